//! Ranks and collectives between them.
//!
//! A [`World`] is a number of ranks that run one program: processes that MPI, SLURM or
//! `slabwise launch` has started ([`World::join`]), or threads of one process ([`World::local`]).
//! Its engine moves bytes; sums have the order that the program fixes. The crate does not depend on
//! tensors.
//!
//! Every wait has a deadline. A rank that dies or hangs is an [`Error::Peer`] on every other rank,
//! which names the rank, the step and the collective.

mod agree;
mod engine;
mod error;
pub mod launch;
mod launcher;
mod library;
mod mpi;
mod near;
mod transport;
mod world;

pub use agree::Header;
pub use engine::{Collective, Engine, IN_FLIGHT_MAX, Job, Stop};
pub use error::{Error, Result};
pub use slabwise_kernels::collective::Group;
pub use world::{Kind, Sent, Ticket, World};
