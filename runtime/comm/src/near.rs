//! The engine between threads of one process: ranks read their peers' bytes in place.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crate::engine::{Engine, IN_FLIGHT_MAX, Job, Stop, copy_chunk};

/// The state that the ranks share.
struct Hub {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    /// Movements in flight; number `seq` is in slot `seq % IN_FLIGHT_MAX`.
    slots: Vec<Slot>,
    /// Ranks that have left the world.
    left: Vec<bool>,
    /// The step of each rank.
    steps: Vec<u64>,
    /// The first rank that was lost, and what happened to it.
    lost: Option<(usize, String)>,
}

struct Slot {
    /// The movement that it is for.
    seq: u64,
    /// The jobs of the ranks that have started it.
    jobs: Vec<Option<Job>>,
    /// The ranks that have received all of their bytes.
    done: Vec<bool>,
    /// The number of ranks that are copying at this moment.
    reading: usize,
}

impl Slot {
    fn arrived(&self) -> bool {
        self.jobs.iter().all(Option::is_some)
    }

    /// The first difference between the jobs of ranks.
    fn mismatch(&self) -> Option<String> {
        let shown = |rank: usize, job: &Job| {
            format!(
                "{:?} of {} bytes on rank {rank}",
                job.movement, job.destination_len
            )
        };
        let mut jobs = self.jobs.iter().flatten().enumerate();
        let (_, first) = jobs.next()?;
        let same = |job: &Job| {
            (job.movement, job.destination_len) == (first.movement, first.destination_len)
        };
        let (rank, other) = jobs.find(|(_, job)| !same(job))?;
        Some(format!("{}, {}", shown(0, first), shown(rank, other)))
    }
}

/// A rank's end of the engine.
pub(crate) struct Near {
    hub: Arc<Hub>,
    rank: usize,
    size: usize,
    /// Copies of all ranks' jobs, kept so that waiting allocates nothing.
    jobs: Mutex<Vec<Job>>,
}

impl Near {
    /// The ends of a world of `size` ranks, by rank.
    pub fn world(size: usize) -> Vec<Near> {
        let slots = (0..IN_FLIGHT_MAX as u64).map(|seq| Slot {
            seq,
            jobs: vec![None; size],
            done: vec![false; size],
            reading: 0,
        });
        let state = State {
            slots: slots.collect(),
            left: vec![false; size],
            steps: vec![0; size],
            lost: None,
        };
        let hub = Arc::new(Hub {
            state: Mutex::new(state),
            changed: Condvar::new(),
        });
        (0..size)
            .map(|rank| Near {
                hub: Arc::clone(&hub),
                rank,
                size,
                jobs: Mutex::new(Vec::with_capacity(size)),
            })
            .collect()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // No code panics while it holds the lock, and a rank that unwinds must still be able to
        // leave.
        self.hub
            .state
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Declares a rank lost, unless another one is already, and returns the error of this rank.
    /// Waits until no peer reads this rank's bytes: later readers see the loss first.
    fn lose(&self, mut state: MutexGuard<'_, State>, rank: usize, why: String) -> Stop {
        state.lost.get_or_insert((rank, why));
        self.hub.changed.notify_all();
        while state.slots.iter().any(|slot| slot.reading > 0) {
            state = self
                .hub
                .changed
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
        let (rank, why) = state.lost.clone().expect("just set");
        Stop::Lost { rank, why }
    }

    /// Waits until `is_over`, and fails if one of the ranks that it waits for is lost or late.
    fn wait_for<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        seq: u64,
        until: Instant,
        is_over: impl Fn(&Slot) -> bool,
        is_missing: impl Fn(&Slot, usize) -> bool,
    ) -> Result<MutexGuard<'a, State>, Stop> {
        let begun = Instant::now();
        loop {
            let slot = &state.slots[seq as usize % IN_FLIGHT_MAX];
            // A slot that is used again has ended for all.
            if slot.seq != seq || is_over(slot) {
                return Ok(state);
            }
            if let Some((rank, why)) = state.lost.clone() {
                return Err(self.lose(state, rank, why));
            }
            let missing = |rank: &usize| is_missing(slot, *rank);
            let gone = (0..self.size)
                .filter(missing)
                .find(|&rank| state.left[rank]);
            if let Some(rank) = gone {
                return Err(self.lose(state, rank, "has left the world".into()));
            }
            let now = Instant::now();
            if now >= until {
                let late = (0..self.size).find(missing).unwrap_or(self.rank);
                let why = format!(
                    "has not arrived after {:.1} s (it is at step {})",
                    (now - begun).as_secs_f64(),
                    state.steps[late]
                );
                return Err(self.lose(state, late, why));
            }
            let waited = self.hub.changed.wait_timeout(state, until - now);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Engine for Near {
    fn name(&self) -> String {
        format!("{} threads of one process", self.size)
    }

    unsafe fn start(&self, seq: u64, job: Job) -> Result<(), Stop> {
        let mut state = self.state();
        if let Some((rank, why)) = state.lost.clone() {
            return Err(self.lose(state, rank, why));
        }
        let slot = &mut state.slots[seq as usize % IN_FLIGHT_MAX];
        assert_eq!(
            slot.seq, seq,
            "no more movements are in flight than there are slots"
        );
        slot.jobs[self.rank] = Some(job);
        if slot.arrived() {
            self.hub.changed.notify_all();
        }
        Ok(())
    }

    fn wait(&self, seq: u64, until: Instant) -> Result<(), Stop> {
        let at = seq as usize % IN_FLIGHT_MAX;
        let mut state = self.wait_for(self.state(), seq, until, Slot::arrived, |slot, rank| {
            slot.jobs[rank].is_none()
        })?;
        if let Some(why) = state.slots[at].mismatch() {
            return Err(Stop::Mismatch(why));
        }
        if let Some((rank, why)) = state.lost.clone() {
            return Err(self.lose(state, rank, why));
        }
        let mut jobs = self.jobs.lock().unwrap_or_else(PoisonError::into_inner);
        jobs.clear();
        jobs.extend(state.slots[at].jobs.iter().flatten());
        state.slots[at].reading += 1;
        drop(state);
        let own = jobs[self.rank];
        for (sender, job) in jobs.iter().enumerate() {
            let chunk = own
                .movement
                .chunk(self.rank, sender, self.size, own.destination_len);
            if let Some(chunk) = chunk {
                // SAFETY: all ranks have started this movement with equal lengths. A peer's source
                // stays valid and unwritten until its wait returns, which happens after `reading`
                // has become 0 and, without a loss, after this rank is done.
                unsafe { copy_chunk(job.outgoing(), own.destination, chunk) };
            }
        }
        drop(jobs);
        let mut state = self.state();
        let slot = &mut state.slots[at];
        slot.reading -= 1;
        slot.done[self.rank] = true;
        if slot.done.iter().all(|done| *done) {
            slot.seq += IN_FLIGHT_MAX as u64;
            slot.jobs.fill(None);
            slot.done.fill(false);
        }
        self.hub.changed.notify_all();
        self.wait_for(state, seq, until, |_| false, |slot, rank| !slot.done[rank])
            .map(drop)
    }

    fn abandons(&self) -> bool {
        false
    }

    fn set_step(&self, step: u64) {
        self.state().steps[self.rank] = step;
    }

    fn close(&self, _is_lost: bool) {
        let mut state = self.state();
        state.left[self.rank] = true;
        self.hub.changed.notify_all();
        let open = |slot: &Slot| slot.jobs[self.rank].is_some();
        if state.slots.iter().any(open) {
            self.lose(state, self.rank, "has left the world".into());
        }
    }
}
