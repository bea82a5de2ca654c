//! The way of a program from graph to kernels; each stage is a type.

mod fuse;
mod layout;
mod lower;
mod schedule;
mod update;
pub use fuse::{Cluster, Clusters, Fuse, fuse};
pub use layout::legalise;
pub use lower::{Arg, Task, lower};
pub use schedule::{Scheduled, schedule};
