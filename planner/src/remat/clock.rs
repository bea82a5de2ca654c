//! How much searching is allowed.

use std::cell::Cell;
use std::time::{Duration, Instant};

/// How much searching is allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// Until this much time has passed since the call. What is found depends on how fast the
    /// machine is.
    Time(Duration),
    /// About this many rounds of local search, however long they take. The same seed gives the same
    /// schedule everywhere.
    Rounds(u64),
}

impl Limit {
    /// Whether it leaves time for more than what is quickest.
    pub(super) fn is_ample(self) -> bool {
        match self {
            Limit::Time(limit) => limit >= Duration::from_millis(200),
            Limit::Rounds(_) => true,
        }
    }
}

pub(super) struct Clock {
    start: Instant,
    limit: Limit,
    rounds: u64,
    /// Edges looked at in proofs.
    proving: Cell<u64>,
}

impl Clock {
    pub fn new(limit: Limit) -> Clock {
        // What is begun is finished, and that takes a moment.
        let limit = match limit {
            Limit::Time(time) => Limit::Time(time.saturating_sub((time / 16).min(LAST))),
            rounds => rounds,
        };
        Clock {
            start: Instant::now(),
            limit,
            rounds: 0,
            proving: Cell::new(0),
        }
    }

    /// What is left of the time, if time decides.
    pub fn left(&self) -> Option<Duration> {
        let Limit::Time(limit) = self.limit else {
            return None;
        };
        Some(limit.saturating_sub(self.start.elapsed()))
    }

    /// A clock of its own for a part of the work; what is left here when its time is over is
    /// `reserve` at least, if there is so much.
    pub fn slice(&self, part: f64, reserve: Duration) -> Clock {
        Clock::new(match self.limit {
            Limit::Time(limit) => Limit::Time(
                limit
                    .mul_f64(part)
                    .min(self.left().unwrap_or_default().saturating_sub(reserve)),
            ),
            Limit::Rounds(most) => Limit::Rounds((most as f64 * part) as u64),
        })
    }

    /// As [`Clock::slice`], where it is time that is short.
    pub fn part(&self, part: f64) -> Clock {
        match self.limit {
            Limit::Time(_) => self.slice(part, Duration::ZERO),
            rounds => Clock::new(rounds),
        }
    }

    pub fn tick(&mut self) {
        self.rounds += 1;
    }

    /// From 0 at the start to 1 when the search has to end; what is left then is for proofs.
    pub fn progress(&self) -> f64 {
        match self.limit {
            Limit::Time(limit) => {
                self.start.elapsed().as_secs_f64() / (limit.as_secs_f64() * SEARCH).max(1e-6)
            }
            Limit::Rounds(most) => self.rounds as f64 / most.max(1) as f64,
        }
    }

    /// Whether there is time for one more proof after `done` of them.
    pub fn may_prove(&self, done: usize) -> bool {
        match self.limit {
            Limit::Time(_) => !self.is_over(),
            Limit::Rounds(_) => done < PROOFS && !self.is_over(),
        }
    }

    /// Whether the time is over, or what proofs may do if time does not decide.
    pub fn is_over(&self) -> bool {
        match self.limit {
            Limit::Time(limit) => self.start.elapsed() >= limit,
            Limit::Rounds(_) => self.proving.get() >= PROVING,
        }
    }

    /// Counts edges that a proof has looked at.
    pub fn prove(&self, edges: u64) {
        self.proving.set(self.proving.get().saturating_add(edges));
    }

    /// When so much of the time for searching is over, if time decides.
    pub fn at(&self, progress: f64) -> Option<Instant> {
        let Limit::Time(limit) = self.limit else {
            return None;
        };
        self.start.checked_add(limit.mul_f64(SEARCH * progress))
    }

    /// Into how many anneals from different starts the first part of the search of a schedule of so
    /// many steps is split.
    pub fn anneals(&self, steps: u32) -> usize {
        match self.limit {
            Limit::Time(limit) => {
                (limit.as_secs_f64() / 0.4 / (f64::from(steps) / 1000.0).max(1.0)).clamp(1.0, 12.0)
                    as usize
            }
            Limit::Rounds(most) => (most / 10_000).clamp(1, 12) as usize,
        }
    }
}

/// What is left of the time for the last step.
const LAST: Duration = Duration::from_millis(4);

/// The part of the time that is for searching.
const SEARCH: f64 = 0.9;

/// The most computations that bounds are looked for at when time does not decide, and the most
/// edges of flows.
const PROOFS: usize = 48;
const PROVING: u64 = 1 << 26;
