//! Kernels of slabwise: pointers, shapes, strides. No graphs.
//!
//! A [`spec::Spec`] describes one kernel: an anchor (`Body`) that produces a value per output
//! element and a small program (`code`) that turns it, together with other operands, into what is
//! stored. [`cpu`] runs specs on the CPU. This is the only crate of the workspace with `unsafe`;
//! what it offers outside is safe.

pub mod copies;
pub mod cpu;
pub mod dtype;
pub mod expr;
mod math;
pub mod memory;
pub mod random;
pub mod scalar;
pub mod size;
pub mod slice;
pub mod spec;
