//! The way of a program from graph to kernels. Each stage is a type, so none can be left out or run
//! out of order: `Graph` → [`autodiff`] → [`mod@simplify`] → [`fn@remake`] → [`legalise`] →
//! [`Clusters`] → [`Task`]s → [`Scheduled`] → plan → check → program.

mod alias;
pub mod autodiff;
mod cost;
mod fuse;
mod layout;
mod lower;
mod prologue;
mod rejoin;
mod remake;
mod rerun;
mod schedule;
mod sequence;
pub mod simplify;
mod slices;
mod stages;
mod stores;
mod unfuse;
mod update;
mod workspaces;

pub(crate) use alias::alias;
pub(crate) use cost::{UNITS_PER_SECOND, moved, operations};
pub use fuse::{Cluster, Clusters, Fuse, fuse};
pub use layout::legalise;
pub use lower::{Arg, Task, lower};
pub(crate) use prologue::{count_prologues, prologues};
pub(crate) use rejoin::rejoin;
pub use remake::{REMADE_MIN, remake};
pub use schedule::{Scheduled, schedule};
pub use simplify::{Simplify, simplify};
pub use slices::{Found, Piece, Sliced, slices_within};
pub(crate) use slices::{Stretch, time};
pub(crate) use unfuse::unfuse;
pub(crate) use workspaces::widen;
