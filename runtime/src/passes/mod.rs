//! The passes of the compiler: of a graph, and from lowering on of a [`Program`](crate::ir::Program)
//! in the late IR.

pub mod autodiff;
mod cost;
mod error;
mod fuse;
mod fuse_recomputed;
mod layout;
mod lower;
mod micro_batch;
mod prepare;
mod prologue;
mod prune_outputs;
mod recompute;
mod remat;
mod sequence;
pub mod simplify;
mod split_fusions;
mod stages;
mod undo_remat;
mod update;
mod workspaces;

pub(crate) use cost::{UNITS_PER_SECOND, moved, operations};
pub use error::PassError;
pub use fuse::{Cluster, Clusters, Fuse, fuse};
pub(crate) use fuse_recomputed::fuse_recomputed;
pub use layout::legalise;
pub use lower::lower;
pub(crate) use micro_batch::{Stretch, micro_batches_within, stretch};
pub use prepare::prepare;
pub(crate) use prologue::{count_prologues, fuse_prologues};
pub use remat::{REMADE_MIN, remake};
pub use simplify::{Simplify, simplify};
pub(crate) use split_fusions::split_fusions;
pub(crate) use undo_remat::undo_remat;
pub(crate) use workspaces::grow_workspaces;
