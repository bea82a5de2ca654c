//! Graph to graph.

pub mod autodiff;
pub mod simplify;
