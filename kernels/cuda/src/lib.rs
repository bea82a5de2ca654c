//! The CUDA back end: turns a [`Spec`](slabwise_kernels::spec::Spec) into source, compiles it,
//! launches it.
//!
//! It is a separate crate inside `kernels` because a program that runs only on the CPU should build
//! without it, and because the CPU's kernels, which take long to compile, should not be recompiled
//! whenever a template of this crate changes.

mod abi;
mod arenas;
mod attention;
mod by_name;
pub mod cache;
pub mod code;
pub mod compiler;
mod conv;
mod copies;
pub mod cublaslt;
pub mod cudnn;
mod description;
mod device;
pub mod driver;
#[cfg(feature = "emulator")]
pub mod emulator;
#[cfg(feature = "emulator")]
pub mod fake;
mod gemm;
mod handles;
pub mod libraries;
mod lower;
mod lowered;
pub mod nvrtc;
mod observe;
mod pages;
mod prefetch;
mod program;
mod reservation;
mod source;
mod staging;
mod tune;

pub use abi::{Dispatch, Function, Speeds, Target, Word};
pub use attention::has_attention;
pub use description::{Attributes, Bandwidth, Block, Description, Multiprocessor, Rates};
pub use device::{Device, Fault, usable};
pub use gemm::quantized::has_quantized_matmul;
pub use lower::horizontal::{FusedLaunch, fused_name, lower_fused};
pub use lower::products::{Candidate, candidates, cycles_saved, library_cycles};
pub use lower::{cycles, has_kernel, lower};
pub use lowered::Lowered;
pub use program::{Launch, LoadError, Overlap, Program, Run, Work, workspace_bytes};
pub use reservation::{Limits, Usage as MemoryUsage};
pub use source::{PRELUDE, has_same_sums};
pub use staging::staging_bytes;
pub use tune::{Choice, Picks, Tuner, WORTH, lower_as, timed};
