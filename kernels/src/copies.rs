//! Copies between regions while kernels run: one thread performs them in the order in which they
//! were started.
//!
//! A copy is in flight from [`Memory::start_copy`] until it has been waited for, even if its bytes
//! arrived earlier; therefore timing never decides whether an access is refused. While a copy is in
//! flight, its destination may not be accessed and its source may not be written: [`Memory`] panics
//! when a kernel or another caller requests such bytes, because only a caller's mistake does.
//! Dropping the memory first waits for the copy in progress.

use std::any::Any;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};

use crate::memory::{Memory, Region};

/// The name of a copy that was started.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(u64);

/// Writes bytes, once: the source of a copy whose bytes are in no region.
pub type Fill = Box<dyn FnOnce(&mut [u8]) + Send>;

/// A copy that has not been waited for.
struct Flight {
    ticket: Ticket,
    from: Option<Region>,
    to: Region,
}

/// A copy as the thread performs it: addresses instead of regions.
struct Job {
    source: Source,
    to: *mut u8,
    bytes: usize,
}

enum Source {
    Bytes(*const u8),
    Fill(Fill),
}

// SAFETY: the addresses point into arenas, which any thread may reach (`Arena` is `Send` and
// `Sync`); the flights of the memory that started the job determine which thread may do so, and
// when.
unsafe impl Send for Job {}

impl Job {
    /// # Safety
    /// The destination must be valid for writes and the source for reads, of as many bytes, the two
    /// must not overlap, and no other thread may write either or read the destination meanwhile.
    unsafe fn run(self) {
        match self.source {
            // SAFETY: required of the caller.
            Source::Bytes(from) => unsafe {
                std::ptr::copy_nonoverlapping(from, self.to, self.bytes)
            },
            Source::Fill(fill) => {
                // SAFETY: required of the caller; arenas are initialised.
                let to = unsafe { std::slice::from_raw_parts_mut(self.to, self.bytes) };
                fill(to)
            }
        }
    }
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Job>,
    /// How many are done, in the order they were started.
    done: u64,
    closing: bool,
    /// The panics of sources, and the numbers of their copies.
    thrown: Vec<(u64, Box<dyn Any + Send>)>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    work: Condvar,
    progress: Condvar,
}

impl Shared {
    /// Ignores poisoning: no holder of the mutex can leave half a change behind.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The body of the thread.
    fn serve(&self) {
        let mut state = self.lock();
        while !state.closing {
            let Some(job) = state.waiting.pop_front() else {
                state = self
                    .work
                    .wait(state)
                    .unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            drop(state);
            // SAFETY: the memory that started the job checked its regions, refuses them to others
            // until it was waited for, and does not drop its arenas before this thread has ended.
            unsafe { self.perform(job) };
            state = self.lock();
        }
    }

    /// # Safety
    /// See [`Job::run`].
    unsafe fn perform(&self, job: Job) {
        // SAFETY: required of the caller.
        let result = catch_unwind(AssertUnwindSafe(|| unsafe { job.run() }));
        let mut state = self.lock();
        let number = state.done;
        state
            .thrown
            .extend(result.err().map(|thrown| (number, thrown)));
        state.done += 1;
        self.progress.notify_all();
    }
}

/// The copies of a [`Memory`].
pub(crate) struct Copies {
    flights: Vec<Flight>,
    started: u64,
    shared: Arc<Shared>,
    /// `None` if the system refuses a thread; each copy is then performed when it is started.
    thread: Option<JoinHandle<()>>,
}

impl Copies {
    fn new() -> Self {
        let shared = Arc::new(Shared::default());
        let own = Arc::clone(&shared);
        let thread = Builder::new()
            .name("slabwise-copies".into())
            .spawn(move || own.serve())
            .ok();
        Copies {
            flights: Vec::new(),
            started: 0,
            shared,
            thread,
        }
    }

    fn reserve(&mut self, most: usize) {
        self.flights
            .reserve(most.saturating_sub(self.flights.len()));
        let mut state = self.shared.lock();
        let more = most.saturating_sub(state.waiting.len());
        state.waiting.reserve(more);
    }

    fn start(&mut self, job: Job, from: Option<Region>, to: Region) -> Ticket {
        let ticket = Ticket(self.started);
        self.started += 1;
        self.flights.push(Flight { ticket, from, to });
        if self.thread.is_some() {
            self.shared.lock().waiting.push_back(job);
            self.shared.work.notify_one();
        } else {
            // SAFETY: the caller of `start` has checked the regions and borrows the memory
            // exclusively.
            unsafe { self.shared.perform(job) };
        }
        ticket
    }

    /// Waits for a copy and all before it, and passes on the first panic of their sources. They were
    /// started in order and are done in order.
    fn wait(&mut self, ticket: Ticket) {
        self.finish(ticket);
        let mut state = self.shared.lock();
        let thrown = state
            .thrown
            .iter()
            .position(|(number, _)| *number <= ticket.0)
            .map(|at| state.thrown.swap_remove(at));
        drop(state);
        if let Some((_, thrown)) = thrown {
            resume_unwind(thrown);
        }
    }

    /// Waits for a copy and all before it. Panics stay for those who wait for a source.
    fn finish(&mut self, ticket: Ticket) {
        let mut state = self.shared.lock();
        while state.done <= ticket.0 {
            state = self
                .shared
                .progress
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
        drop(state);
        self.flights.retain(|flight| flight.ticket > ticket);
    }

    /// The flight that forbids reading a region.
    fn into(&self, region: &Region) -> Option<&Flight> {
        self.flights
            .iter()
            .find(|flight| flight.to.overlaps(region))
    }

    /// The flight that forbids writing a region.
    fn out_of_or_into(&self, region: &Region) -> Option<&Flight> {
        self.flights.iter().find(|flight| {
            flight.to.overlaps(region) || flight.from.is_some_and(|from| from.overlaps(region))
        })
    }
}

impl Drop for Copies {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.closing = true;
        state.waiting.clear();
        drop(state);
        self.shared.work.notify_all();
        if let Some(thread) = self.thread.take() {
            // It catches panics of sources, so it ends only by returning.
            let _ = thread.join();
        }
    }
}

impl Memory {
    /// Starts the thread of copies, with room for so many in flight at once: starting that many
    /// later allocates nothing.
    pub fn prepare_copies(&mut self, most: usize) {
        if most > 0 {
            self.copies.get_or_insert_with(Copies::new).reserve(most);
        }
    }

    /// Starts to copy one region to another of the same length. Until [`Memory::wait_for`] neither
    /// may be written, and the destination may not be read.
    ///
    /// # Panics
    /// If the lengths differ, the regions overlap, one is not inside a live arena, or a copy in
    /// flight conflicts with it.
    pub fn start_copy(&mut self, from: &Region, to: &Region) -> Ticket {
        assert_eq!(
            from.bytes, to.bytes,
            "copy between regions of different lengths"
        );
        assert!(
            !from.overlaps(to),
            "{from:?} is copied to {to:?}, which overlaps it"
        );
        self.assert_readable(from);
        self.assert_writable(to);
        let job = Job {
            source: Source::Bytes(self.address(from)),
            to: self.address(to),
            bytes: to.bytes as usize,
        };
        self.copies
            .get_or_insert_with(Copies::new)
            .start(job, Some(*from), *to)
    }

    /// Starts to write a region with `fill`. Until [`Memory::wait_for`] it may be neither written
    /// nor read.
    ///
    /// # Panics
    /// If the region is not inside a live arena or a copy in flight conflicts with it. A panic of
    /// `fill` resumes in the call that waits for it.
    pub fn start_fill(&mut self, to: &Region, fill: Fill) -> Ticket {
        self.assert_writable(to);
        let job = Job {
            source: Source::Fill(fill),
            to: self.address(to),
            bytes: to.bytes as usize,
        };
        self.copies
            .get_or_insert_with(Copies::new)
            .start(job, None, *to)
    }

    /// Waits until a copy and all that were started before it are done.
    ///
    /// # Panics
    /// If the source of one of them panicked, with the same payload.
    pub fn wait_for(&mut self, ticket: Ticket) {
        if let Some(copies) = &mut self.copies {
            assert!(ticket.0 < copies.started, "{ticket:?} is of another memory");
            copies.wait(ticket);
        }
    }

    /// Waits until nothing is in flight any more. A panic of a source resumes in
    /// [`Memory::wait_for`] of it.
    pub fn wait_for_all(&mut self) {
        if let Some(copies) = &mut self.copies
            && let Some(last) = copies.flights.last()
        {
            let last = last.ticket;
            copies.finish(last);
        }
    }

    /// How many copies are in flight.
    pub fn in_flight(&self) -> usize {
        self.copies
            .as_ref()
            .map_or(0, |copies| copies.flights.len())
    }

    pub(crate) fn assert_readable(&self, region: &Region) {
        if let Some(flight) = self.copies.as_ref().and_then(|copies| copies.into(region)) {
            panic!(
                "{region:?} is read while a copy to {:?} is in flight",
                flight.to
            );
        }
        if let Some(to) = self.exchanges.arrives_in(region) {
            panic!("{region:?} is read while bytes of other ranks arrive in {to:?}");
        }
    }

    pub(crate) fn assert_writable(&self, region: &Region) {
        if let Some(flight) = self
            .copies
            .as_ref()
            .and_then(|copies| copies.out_of_or_into(region))
        {
            panic!(
                "{region:?} is written while a copy from {:?} to {:?} is in flight",
                flight.from, flight.to
            );
        }
        if let Some(own) = self.exchanges.touches(region) {
            panic!("{region:?} is written while {own:?} is in flight between ranks");
        }
    }
}
