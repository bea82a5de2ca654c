//! The CUDA back end: turns a [`Spec`](slabwise_kernels::spec::Spec) into source, compiles it, launches it.
//!
//! It is a crate of its own inside `kernels` because a program that runs on the CPU alone should build without it, and
//! because the CPU's kernels, which take long to compile, should not be compiled anew whenever a template of this one changes.

pub mod cache;
pub mod code;
#[cfg(feature = "emulator")]
pub mod emulator;
pub mod libraries;
mod lower;
pub mod nvrtc;
mod source;

pub use lower::{Dispatch, Function, Lowered, Target, Word};
pub use source::{PRELUDE, lower};
