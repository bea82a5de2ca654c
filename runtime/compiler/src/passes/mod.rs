//! The passes of the compiler: of a graph, and from lowering on of a
//! [`Program`](crate::ir::Program) in the late IR.

pub mod autodiff;
mod cost;
pub(crate) mod dump;
mod error;
mod fuse;
mod fuse_recomputed;
mod layout;
mod lower;
mod micro_batch;
mod pipeline;
mod prepare;
mod prologue;
mod prune_outputs;
mod recompute;
mod remat;
mod sequence;
pub mod simplify;
mod stages;
mod sums;
mod update;
mod validate;
mod workspaces;

pub(crate) use cost::UNITS_PER_SECOND;
pub use cost::{moved, operations};
pub use dump::DumpOptions;
pub use error::PassError;
pub use fuse::{Cluster, Clusters, ClustersError, Fuse, fuse};
pub(crate) use fuse::{FuseWithin, Limits};
pub(crate) use fuse_recomputed::FuseRecomputed;
pub use layout::{Legalize, legalize};
pub use lower::{Lower, lower};
pub(crate) use micro_batch::SplitBatch;
pub use micro_batch::{MicroBatchRange, micro_batch_range};
pub use pipeline::{Broken, Form, PASSES, Pass, PassRun, Pipeline};
pub use prepare::Prepare;
pub(crate) use prologue::FusePrologues;
pub use prologue::count_prologues;
pub(crate) use recompute::{OffloadValues, OverlapCollectives, RecomputeCalls};
pub use remat::{REMAT_MIN_ELEMENTS, Rematerialize, rematerialize};
pub use simplify::{Simplify, simplify};
pub use sums::has_same_sums;
pub use validate::{Mismatch, validate};
pub(crate) use workspaces::GrowWorkspaces;
