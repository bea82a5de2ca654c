//! Kernels of slabwise: pointers, shapes, strides. No graphs.
//!
//! A [`spec::Spec`] describes one kernel: an anchor (`Body`) that produces a value per output
//! element and a small program (`code`) that computes the stored values from it and from other
//! operands. [`cpu`] runs specs on the CPU. Of the workspace's crates only this one and the CUDA
//! back end contain `unsafe`; its public interface is safe, except for [`collective::Transport`]
//! and [`tree_sum::add_in_tree`], which the engines of ranks implement and call.

pub mod collective;
pub mod copies;
pub mod cpu;
pub mod custom;
pub mod dtype;
mod element;
pub mod expr;
mod group;
mod math;
pub mod memory;
pub mod micro_batch;
pub mod random;
pub mod scalar;
pub mod size;
pub mod spec;
mod team;
pub mod tree_sum;
