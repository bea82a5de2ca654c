//! Graph to graph.

pub mod autodiff;
