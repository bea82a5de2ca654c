//! The state of a session's runs.

use slabwise_kernels::cpu::Team;

use super::RunStats;
use super::data_dependent::DataDependent;
use super::debug::Sink;
use super::measure::Recording;
use super::profile::{Profile, Profiles};
use super::ranks::RankSync;
use super::steps::Ticket;
use crate::error::Result;
use crate::memory::Handle;
use crate::settings::{self, NanCheck};

/// The runs of a session: the threads that its kernels use, and the state of the run in progress.
pub(crate) struct Execution {
    pub team: Team,
    /// Whether the program or the environment has set the number of threads.
    pub(super) has_own_threads: bool,
    /// By transfer, its name if the run has started it.
    pub(super) tickets: Vec<Ticket>,
    /// The blocks of the last run in the dynamic mode that its outputs lie in.
    pub dynamic: Vec<Option<Handle>>,
    pub data_dependent: DataDependent,
    pub(super) stats: RunStats,
    /// The profile of a program, while one is made.
    pub(super) profile: Option<Profile>,
    /// The profiles of all programs, if the environment asks for them.
    pub(super) profiles: Option<Profiles>,
    /// Whether runs stop at the first kernel whose result is not finite.
    pub(super) nan_check: NanCheck,
    /// The receiver of shown values, if they are not printed.
    pub(super) sink: Option<Sink>,
    /// The record of the run, while one is made.
    pub(super) recording: Option<Recording>,
    /// Whether the ranks have synchronized in the run in progress.
    pub(super) rank_sync: RankSync,
}

impl Execution {
    /// No run yet, with the settings of the environment.
    ///
    /// # Errors
    /// If one of them makes no sense.
    pub fn new() -> Result<Execution> {
        Ok(Execution {
            team: Team::new(default_threads()?),
            has_own_threads: settings::threads()?.is_some(),
            tickets: Vec::new(),
            dynamic: Vec::new(),
            data_dependent: DataDependent::default(),
            stats: RunStats::default(),
            profile: None,
            profiles: settings::profile()?.then(Profiles::default),
            nan_check: settings::check_nan()?,
            sink: None,
            recording: None,
            rank_sync: RankSync::Pending,
        })
    }

    /// Whether the times of kernels are noted.
    pub fn is_profiled(&self) -> bool {
        self.profile.is_some() || self.profiles.is_some()
    }
}

/// The default number of threads of a session: `SLABWISE_THREADS`, or one for each core.
fn default_threads() -> Result<usize> {
    Ok(settings::threads()?
        .unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from)))
}
