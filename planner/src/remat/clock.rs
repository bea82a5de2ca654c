//! The clock and the limits of a search.

use std::cell::Cell;
use std::time::{Duration, Instant};

/// The limit of a search.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// A duration from the call on. The result depends on the speed of the machine.
    Time(Duration),
    /// About this many rounds of local search, however long they take. The same seed gives the same
    /// schedule on every machine.
    Rounds(u64),
}

impl Limit {
    /// Whether it leaves time for more than the fastest methods.
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
    /// The edges visited by proofs.
    proving: Cell<u64>,
}

impl Clock {
    pub fn new(limit: Limit) -> Clock {
        // Work that has started is completed, which takes a moment.
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

    /// The remaining time, if there is a time limit.
    pub fn left(&self) -> Option<Duration> {
        let Limit::Time(limit) = self.limit else {
            return None;
        };
        Some(limit.saturating_sub(self.start.elapsed()))
    }

    /// A separate clock for a part of the work; it leaves at least `reserve` of the time here, if
    /// that much is left.
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

    /// Like [`Clock::slice`], but only a time limit is reduced.
    pub fn part(&self, part: f64) -> Clock {
        match self.limit {
            Limit::Time(_) => self.slice(part, Duration::ZERO),
            rounds => Clock::new(rounds),
        }
    }

    pub fn tick(&mut self) {
        self.rounds += 1;
    }

    /// The progress of the search: 0 at the start, and 1 when it has to end. The remaining time is
    /// for proofs.
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

    /// Whether the time is over or, without a time limit, the work for proofs is spent.
    pub fn is_over(&self) -> bool {
        match self.limit {
            Limit::Time(limit) => self.start.elapsed() >= limit,
            Limit::Rounds(_) => self.proving.get() >= PROVING,
        }
    }

    /// Counts edges visited by a proof.
    pub fn prove(&self, edges: u64) {
        self.proving.set(self.proving.get().saturating_add(edges));
    }

    /// The instant of a progress, if there is a time limit.
    pub fn at(&self, progress: f64) -> Option<Instant> {
        let Limit::Time(limit) = self.limit else {
            return None;
        };
        self.start.checked_add(limit.mul_f64(SEARCH * progress))
    }

    /// The number of anneals from different starts in the first part of the search, for a schedule
    /// of this many steps.
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

/// The part of the time that is reserved for the last step.
const LAST: Duration = Duration::from_millis(4);

/// The part of the time for the search.
const SEARCH: f64 = 0.9;

/// Without a time limit, the most computations that bounds are computed for, and the most edges
/// visited by flows.
const PROOFS: usize = 48;
const PROVING: u64 = 1 << 26;
