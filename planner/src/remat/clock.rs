//! How much searching is allowed.

use std::time::{Duration, Instant};

/// How much searching is allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// Until this much time has passed since the call. What is found depends on how fast the machine is.
    Time(Duration),
    /// About this many rounds of local search, however long they take. The same seed gives the same schedule everywhere.
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
}

impl Clock {
    pub fn new(limit: Limit) -> Clock {
        // What is begun is finished, and that takes a moment.
        let limit = match limit {
            Limit::Time(time) => Limit::Time(time.saturating_sub((time / 16).min(LAST))),
            rounds => rounds,
        };
        Clock { start: Instant::now(), limit, rounds: 0 }
    }

    /// A clock of its own for a part of the work; it never has more time than is left here.
    pub fn slice(&self, part: f64) -> Clock {
        Clock::new(match self.limit {
            Limit::Time(limit) => Limit::Time(limit.mul_f64(part).min(limit.saturating_sub(self.start.elapsed()))),
            Limit::Rounds(most) => Limit::Rounds((most as f64 * part) as u64),
        })
    }

    /// As [`Clock::slice`], where it is time that is short.
    pub fn part(&self, part: f64) -> Clock {
        match self.limit {
            Limit::Time(_) => self.slice(part),
            rounds => Clock::new(rounds),
        }
    }

    pub fn tick(&mut self) {
        self.rounds += 1;
    }

    /// From 0 at the start to 1 when the search has to end; what is left then is for proofs.
    pub fn progress(&self) -> f64 {
        match self.limit {
            Limit::Time(limit) => self.start.elapsed().as_secs_f64() / (limit.as_secs_f64() * SEARCH).max(1e-6),
            Limit::Rounds(most) => self.rounds as f64 / most.max(1) as f64,
        }
    }

    /// Whether there is time for one more proof after `done` of them.
    pub fn may_prove(&self, done: usize) -> bool {
        match self.limit {
            Limit::Time(_) => !self.is_over(),
            Limit::Rounds(_) => done < PROOFS,
        }
    }

    /// Whether time decides, and is over.
    pub fn is_over(&self) -> bool {
        matches!(self.limit, Limit::Time(limit) if self.start.elapsed() >= limit)
    }

    /// When so much of the time for searching is over, if time decides.
    pub fn at(&self, progress: f64) -> Option<Instant> {
        let Limit::Time(limit) = self.limit else { return None };
        self.start.checked_add(limit.mul_f64(SEARCH * progress))
    }

    /// Into how many anneals from different starts the first part of the search of a schedule of so many steps is split.
    pub fn anneals(&self, steps: u32) -> usize {
        match self.limit {
            Limit::Time(limit) => (limit.as_secs_f64() / 0.4 / (f64::from(steps) / 1000.0).max(1.0)).clamp(1.0, 12.0) as usize,
            Limit::Rounds(most) => (most / 10_000).clamp(1, 12) as usize,
        }
    }
}

/// What is left of the time for the last step.
const LAST: Duration = Duration::from_millis(4);

/// The part of the time that is for searching.
const SEARCH: f64 = 0.9;

/// The most computations that bounds are looked for at when time does not decide.
const PROOFS: usize = 48;
