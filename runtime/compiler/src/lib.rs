//! The compiler of slabwise: from a graph of tensor operations to a program with a checked plan of
//! its memory.
//!
//! **This interface is unstable.** It is for the crate `slabwise`, for tests of the compiler and
//! for tools that look inside of it; any release may change any part of it. Programs use `slabwise`,
//! which exports the types that users need.
//!
//! [`compile::compile`] takes a [`graph::Graph`], [options](compile::CompileOptions), and the
//! [device and memory](compile::Environment) that there are for the program, and gives a
//! [program](ir::Program) with a [plan](plan::Plan). It knows neither traces nor sessions.
#![forbid(unsafe_code)]

pub mod backend;
pub mod compile;
pub mod device;
mod dumps;
pub mod error;
pub mod graph;
pub mod init;
pub mod ir;
pub mod memory;
pub mod ops;
pub mod passes;
pub mod plan;
pub mod reference;
pub mod settings;
pub mod shape;
pub mod shapes;
pub mod words;
