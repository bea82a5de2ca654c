//! The engine between threads of one process.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::area::{Area, Place};
use super::{Fate, Near, Posted, Sight};
use crate::engine::{Engine, Job, Stop};

/// The areas of all ranks. Addresses are the same for all.
struct Threads(Arc<Vec<Area>>);

impl Sight for Threads {
    fn area(&self, rank: usize) -> Option<&Area> {
        self.0.get(rank)
    }

    fn place(&self, _seq: u64, (start, _): (*const u8, usize)) -> Place {
        Place::Address(start.expose_provenance())
    }

    fn with_bytes(&self, bytes: Posted, read: &mut dyn FnMut(*const u8)) -> Result<(), String> {
        match bytes.place {
            Place::Address(start) => read(std::ptr::with_exposed_provenance(start)),
            _ => unreachable!("threads post addresses"),
        }
        Ok(())
    }
}

/// The state of a world that is not in the areas.
struct State {
    /// Ranks that have left the world.
    left: Vec<bool>,
    /// The first rank that was lost, and how.
    lost: Option<(usize, String)>,
    /// The number of ranks that are copying at this moment.
    reading: usize,
}

/// A rank's end of the engine.
pub(crate) struct Local {
    near: Near<Threads>,
    rank: usize,
    hub: Arc<Mutex<State>>,
}

impl Local {
    /// The ends of a world of `size` ranks, by rank.
    pub fn world(size: usize) -> Vec<Local> {
        let areas = Arc::new((0..size).map(|_| Area::default()).collect::<Vec<_>>());
        let hub = Arc::new(Mutex::new(State {
            left: vec![false; size],
            lost: None,
            reading: 0,
        }));
        (0..size)
            .map(|rank| Local {
                near: Near::over(Threads(Arc::clone(&areas)), rank, size, true),
                rank,
                hub: Arc::clone(&hub),
            })
            .collect()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // No code panics while it holds the lock, and a rank that unwinds must still be able to
        // leave.
        self.hub.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Declares a rank lost, unless another one is already, and returns the error of this rank.
    /// Waits until no peer reads this rank's bytes: later readers see the loss first.
    fn lose<'a>(&'a self, mut state: MutexGuard<'a, State>, rank: usize, why: String) -> Stop {
        let (rank, why) = state.lost.get_or_insert((rank, why)).clone();
        self.near.own().ring();
        while state.reading > 0 {
            drop(state);
            thread::sleep(Duration::from_micros(50));
            state = self.state();
        }
        Stop::Lost { rank, why }
    }
}

impl Fate for Local {
    fn verdict(&self, _seq: u64, is_missing: &dyn Fn(usize) -> bool) -> Option<Stop> {
        let state = self.state();
        let left = state.left.iter().enumerate();
        let gone = left.filter(|(rank, left)| **left && is_missing(*rank));
        let gone = gone.map(|(rank, _)| (rank, "has left the world".into()));
        let (rank, why) = state.lost.clone().or(gone.into_iter().next())?;
        Some(self.lose(state, rank, why))
    }

    fn late(&self, rank: usize, step: u64, waited: Duration) -> Stop {
        self.lose(self.state(), rank, super::not_arrived(step, waited))
    }

    fn begin_reading(&self) -> Result<(), Stop> {
        let mut state = self.state();
        if let Some((rank, why)) = state.lost.clone() {
            return Err(self.lose(state, rank, why));
        }
        state.reading += 1;
        Ok(())
    }

    fn end_reading(&self) {
        self.state().reading -= 1;
    }
}

impl Engine for Local {
    fn name(&self) -> String {
        format!("{} threads of one process", self.near.size)
    }

    unsafe fn start(&self, seq: u64, job: Job) -> Result<(), Stop> {
        let state = self.state();
        if let Some((rank, why)) = state.lost.clone() {
            return Err(self.lose(state, rank, why));
        }
        drop(state);
        self.near.start(seq, job);
        Ok(())
    }

    fn wait(&self, seq: u64, until: Instant) -> Result<(), Stop> {
        self.near.arrive(seq, until, self)?;
        self.near.receive(seq, &[], self)?;
        self.near.finish(seq, until, self)
    }

    fn abandons(&self) -> bool {
        false
    }

    fn threads(&self) -> usize {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        (cores / self.near.size).max(1)
    }

    fn sums_in_place(&self) -> bool {
        self.near.is_whole()
    }

    fn set_step(&self, step: u64) {
        self.near.set_step(step);
    }

    fn close(&self, _is_lost: bool) {
        let mut state = self.state();
        state.left[self.rank] = true;
        self.near.own().ring();
        if self.near.has_open() {
            self.lose(state, self.rank, "has left the world".into());
        }
    }
}
