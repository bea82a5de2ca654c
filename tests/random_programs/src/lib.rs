//! Random programs over the public interface of slabwise: drawn, compared, shrunk, printed as tests.
#![forbid(unsafe_code)]

pub mod build;
pub mod case;
pub mod draw;
pub mod facts;
pub mod judge;
mod numbers;
pub mod rng;
mod rules;
pub mod run;
pub mod setup;
mod shapes;
