//! A team of threads that shares the chunks of one kernel.
//!
//! Fork-join over numbered chunks, and nothing else: no queues, no futures, no allocation. A step
//! of a small model is about a millisecond with tens of parallel regions in it, so handing one out
//! must cost about a microsecond; idle threads spin for a few tens of microseconds, which covers
//! the time between two kernels of a step, and then sleep.
//!
//! One atomic word holds the number of the current region and the number of its chunks that are not
//! taken yet. Taking chunks is a compare-and-swap on both at once, so that a thread that reads the
//! word late can never take a chunk of a later region by mistake. A thread takes a fixed part of
//! the chunks that are left, which are neighbours (guided self-scheduling): neighbouring chunks
//! mostly write neighbouring memory, and two threads that write alternate pages lose half of the
//! bandwidth. The caller never waits for threads that have not woken up, because it runs the chunks
//! that they do not take.

use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long an idle thread polls for the next region before it sleeps.
const SPIN: Duration = Duration::from_micros(40);
/// Polls of shared memory between two readings of the clock.
const SPIN_STEPS: usize = 32;
/// Bits of the state word that count chunks; the rest number the regions.
const CHUNK_BITS: u32 = 24;
const CHUNK_MASK: u64 = (1 << CHUNK_BITS) - 1;
/// Parts, for each thread, of the chunks that are left, of which a thread takes one.
const PARTS: u64 = 8;

/// The chunks of one region.
type Work<'a> = &'a (dyn Fn(usize, usize) + Sync + 'a);

thread_local! {
    /// The team whose chunk this thread is running, and under which index; null outside.
    static CURRENT: Cell<(*const Shared, usize)> = const { Cell::new((std::ptr::null(), 0)) };
}

/// A fork-join pool: threads that run the chunks of a parallel region together with its caller.
pub struct Team {
    shared: Arc<Shared>,
    helpers: Vec<JoinHandle<()>>,
}

/// A region under way, on the stack of its caller.
struct Job<'a> {
    work: Work<'a>,
    /// Number of the first chunk.
    first: usize,
    chunks: usize,
}

struct Shared {
    /// Threads, the caller included.
    threads: u64,
    /// Region number, and the number of its chunks that are not taken yet.
    state: AtomicU64,
    /// The region's job; valid for a thread that holds one of its chunks.
    job: AtomicPtr<Job<'static>>,
    /// Chunks of the region that have not finished.
    unfinished: AtomicUsize,
    /// Set while a caller uses the team.
    busy: AtomicBool,
    /// Set when the team is dropped.
    closing: AtomicBool,
    /// Helpers that sleep, or are about to.
    sleeping: AtomicUsize,
    /// Set while the caller sleeps, or is about to.
    caller_sleeps: AtomicBool,
    /// The payload of the first panic of a chunk. The mutex also orders going to sleep and waking
    /// up.
    thrown: Mutex<Option<Box<dyn Any + Send>>>,
    work_ready: Condvar,
    work_done: Condvar,
}

impl Team {
    /// A team of `threads` threads, the caller of [`Team::run`] included (at least one). If the
    /// system gives fewer, the team is smaller.
    pub fn new(threads: usize) -> Self {
        let shared = Arc::new(Shared {
            threads: threads.max(1) as u64,
            state: AtomicU64::new(0),
            job: AtomicPtr::new(null_mut()),
            unfinished: AtomicUsize::new(0),
            busy: AtomicBool::new(false),
            closing: AtomicBool::new(false),
            sleeping: AtomicUsize::new(0),
            caller_sleeps: AtomicBool::new(false),
            thrown: Mutex::new(None),
            work_ready: Condvar::new(),
            work_done: Condvar::new(),
        });
        let start = |index| {
            let shared = Arc::clone(&shared);
            std::thread::Builder::new()
                .name(format!("slabwise-{index}"))
                .spawn(move || shared.help(index))
                .ok()
        };
        let helpers = (1..threads).map_while(start).collect();
        Team { shared, helpers }
    }

    /// How many threads take part, the caller included.
    pub fn threads(&self) -> usize {
        self.helpers.len() + 1
    }

    /// Runs `work(chunk, worker)` once for each chunk in `0..chunks` and returns when all are done.
    /// `worker` is below
    /// [`Team::threads`], and no two chunks of a region that run at the same time have the same.
    ///
    /// A call from inside a chunk runs on its own thread alone, under that thread's index. A call
    /// made while another thread's is under way runs on its own thread alone too, as worker 0.
    ///
    /// # Panics
    /// If a chunk panics. The panic reaches the caller after the other chunks have ended; a call
    /// that runs alone stops at it.
    pub fn run(&self, chunks: usize, work: &(dyn Fn(usize, usize) + Sync)) {
        let (team, worker) = CURRENT.get();
        let nested = std::ptr::eq(team, Arc::as_ptr(&self.shared));
        if nested
            || chunks <= 1
            || self.helpers.is_empty()
            || self.shared.busy.swap(true, Ordering::Acquire)
        {
            let worker = if nested { worker } else { 0 };
            (0..chunks).for_each(|chunk| work(chunk, worker));
            return;
        }
        let mut thrown = None;
        for first in (0..chunks).step_by(CHUNK_MASK as usize) {
            thrown = self
                .shared
                .region(&Job {
                    work,
                    first,
                    chunks: (chunks - first).min(CHUNK_MASK as usize),
                })
                .or(thrown);
        }
        self.shared.busy.store(false, Ordering::Release);
        if let Some(thrown) = thrown {
            resume_unwind(thrown);
        }
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        self.shared.closing.store(true, Ordering::SeqCst);
        drop(self.shared.lock());
        self.shared.work_ready.notify_all();
        for helper in self.helpers.drain(..) {
            // A helper catches panics of its chunks, so it ends only by returning.
            let _ = helper.join();
        }
    }
}

impl Shared {
    /// Ignores poisoning: no holder of the mutex can leave half a change behind.
    fn lock(&self) -> MutexGuard<'_, Option<Box<dyn Any + Send>>> {
        self.thrown.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs one region as the caller and returns the panic of a chunk, if any.
    fn region(&self, job: &Job<'_>) -> Option<Box<dyn Any + Send>> {
        self.unfinished.store(job.chunks, Ordering::Relaxed);
        self.job
            .store(std::ptr::from_ref(job).cast_mut().cast(), Ordering::Relaxed);
        let number = (self.state.load(Ordering::Relaxed) >> CHUNK_BITS).wrapping_add(1);
        // Publishes the two stores above; sequentially consistent, as `sleeping` must be read after
        // it.
        self.state
            .store(number << CHUNK_BITS | job.chunks as u64, Ordering::SeqCst);
        let sleeping = self.sleeping.load(Ordering::SeqCst);
        if sleeping > 0 {
            drop(self.lock());
            (0..sleeping.min(job.chunks - 1)).for_each(|_| self.work_ready.notify_one());
        }
        self.work(0);
        if !spin_until(|| self.unfinished.load(Ordering::Acquire) == 0) {
            let mut guard = self.lock();
            self.caller_sleeps.store(true, Ordering::SeqCst);
            while self.unfinished.load(Ordering::SeqCst) != 0 {
                guard = self
                    .work_done
                    .wait(guard)
                    .unwrap_or_else(PoisonError::into_inner);
            }
            self.caller_sleeps.store(false, Ordering::Relaxed);
        }
        self.lock().take()
    }

    /// Takes and runs chunks of the current region until none is left.
    fn work(&self, worker: usize) {
        let outer = CURRENT.replace((self, worker));
        let mut state = self.state.load(Ordering::Acquire);
        while state & CHUNK_MASK != 0 {
            let job = self.job.load(Ordering::Relaxed);
            let left = state & CHUNK_MASK;
            let taken = (left / (PARTS * self.threads)).max(1);
            if let Err(now) = self.state.compare_exchange_weak(
                state,
                state - taken,
                Ordering::AcqRel,
                Ordering::Acquire,
            ) {
                state = now;
                continue;
            }
            // SAFETY: the exchange took chunks of the region that `state` numbers, and `job` was
            // read while they were free, so it is that region's: the next one's is stored only
            // after every chunk of this one has finished. For the same reason the caller, whose
            // stack holds the job and all it borrows, is still inside `region`.
            let job = unsafe { &*job };
            let first = job.first + job.chunks - left as usize;
            for chunk in first..first + taken as usize {
                if let Err(thrown) = catch_unwind(AssertUnwindSafe(|| (job.work)(chunk, worker))) {
                    self.lock().get_or_insert(thrown);
                }
            }
            // After this the job may be gone.
            let taken = taken as usize;
            if self.unfinished.fetch_sub(taken, Ordering::SeqCst) == taken
                && self.caller_sleeps.load(Ordering::SeqCst)
            {
                drop(self.lock());
                self.work_done.notify_one();
            }
            state = self.state.load(Ordering::Acquire);
        }
        CURRENT.set(outer);
    }

    /// The body of a helper.
    fn help(&self, worker: usize) {
        let wanted = |order| self.state.load(order) & CHUNK_MASK != 0 || self.closing.load(order);
        while !self.closing.load(Ordering::Acquire) {
            if !spin_until(|| wanted(Ordering::Acquire)) {
                let mut guard = self.lock();
                self.sleeping.fetch_add(1, Ordering::SeqCst);
                // Either this sees the new region, or the region's caller sees `sleeping` and waits
                // for the mutex to wake us.
                while !wanted(Ordering::SeqCst) {
                    guard = self
                        .work_ready
                        .wait(guard)
                        .unwrap_or_else(PoisonError::into_inner);
                }
                self.sleeping.fetch_sub(1, Ordering::SeqCst);
            }
            self.work(worker);
        }
    }
}

/// Polls until `done` is true, or for [`SPIN`]; returns whether it is true.
fn spin_until(done: impl Fn() -> bool) -> bool {
    if done() {
        return true;
    }
    let start = Instant::now();
    loop {
        for _ in 0..SPIN_STEPS {
            if done() {
                return true;
            }
            std::hint::spin_loop();
        }
        if start.elapsed() > SPIN {
            return false;
        }
    }
}
