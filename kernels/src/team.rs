//! A fork-join thread pool ("team"), whose threads share the chunks of one kernel.
//!
//! Fork-join over numbered chunks, and nothing else: no queues, no futures, no allocation. A step
//! of a small model is about a millisecond with tens of parallel regions in it, so handing one out
//! must cost about a microsecond; idle threads spin for a few tens of microseconds, which covers
//! the time between two kernels of a step, and then sleep.
//!
//! Each thread has its own range of the chunks, which is the same part of every region, so that
//! bytes that it has accessed in one kernel are in its caches for the next one (affinity
//! scheduling, Markatos and LeBlanc 1994). It takes chunks from the front of its range, and when
//! that is empty from the end of others' ranges, so that no thread waits for threads that are
//! slower or have not woken up. It takes a fixed part of the chunks that are left in a range, which
//! are neighbours. A thread that is still looking through others' ranges when the next region
//! starts takes no chunk of that region there, because it is to start with its own range.
//!
//! One atomic word holds a range and the number of its region. Taking chunks is a compare-and-swap
//! on both at once, so that a thread that reads the word late cannot take a chunk of a later region
//! by mistake.

use std::any::Any;
use std::cell::Cell;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long an idle thread polls for the next region before it sleeps. Half of it costs up to 4 %
/// of a step, and more gains nothing (docs/adr/0001-fork-join-team-instead-of-rayon.md).
const SPIN: Duration = Duration::from_micros(40);
/// Polls of shared memory between two readings of the clock.
const SPIN_STEPS: usize = 32;
/// Bits of a chunk's number in the word of a range. The bits above its two ends number the region:
/// the same number returns after 2³² regions, far more than pass between a read and an exchange.
const CHUNK_BITS: u32 = 16;
const CHUNK_MASK: u64 = (1 << CHUNK_BITS) - 1;
/// Parts of the chunks that are left in a range, of which a thread takes one.
const PARTS: usize = 8;

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

/// A region in progress, on the stack of its caller.
struct Job<'a> {
    work: Work<'a>,
    /// Number of the first chunk.
    first: usize,
    chunks: usize,
}

/// The chunks of a region that are set aside for a thread and not taken yet: its number, the first
/// of them and their end. Each has a pair of cache lines of its own, which CPUs fetch together.
#[repr(align(128))]
struct Chunks(AtomicU64);

impl Chunks {
    fn word(region: u64, range: &Range<usize>) -> u64 {
        (region << CHUNK_BITS | range.start as u64) << CHUNK_BITS | range.end as u64
    }

    fn range(word: u64) -> Range<usize> {
        (word >> CHUNK_BITS & CHUNK_MASK) as usize..(word & CHUNK_MASK) as usize
    }
}

struct Shared {
    /// The number of the current region.
    region: AtomicU64,
    /// The chunks of each thread, the caller first.
    chunks: Box<[Chunks]>,
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
            region: AtomicU64::new(0),
            chunks: (0..threads.max(1))
                .map(|_| Chunks(AtomicU64::new(0)))
                .collect(),
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
    /// `worker` is below [`Team::threads`], and no two chunks of a region that run at the same time
    /// have the same. Unless threads are late, worker `w` of `n` runs the chunks from `w/n` to
    /// `(w + 1)/n` of all, in ascending order.
    ///
    /// A call from inside a chunk runs on its own thread alone, under that thread's index. A call
    /// made while another thread's is in progress runs on its own thread alone too, as worker 0.
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
        let region = self.region.load(Ordering::Relaxed).wrapping_add(1);
        let mut first = 0;
        for (worker, chunks) in self.chunks.iter().enumerate() {
            let end = (job.chunks * (worker + 1)).div_ceil(self.chunks.len());
            if first < end {
                // Publishes the two stores above to threads that take one of these chunks.
                chunks
                    .0
                    .store(Chunks::word(region, &(first..end)), Ordering::Release);
            }
            first = end;
        }
        // Sequentially consistent, as `sleeping` must be read after it.
        self.region.store(region, Ordering::SeqCst);
        let sleeping = self.sleeping.load(Ordering::SeqCst);
        if sleeping > 0 {
            drop(self.lock());
            (0..sleeping.min(job.chunks - 1)).for_each(|_| self.work_ready.notify_one());
        }
        self.work(0, region);
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

    /// Takes and runs chunks of a region until none is left.
    fn work(&self, worker: usize, region: u64) {
        let outer = CURRENT.replace((self, worker));
        let threads = self.chunks.len();
        for other in 0..threads {
            let owner = (worker + other) % threads;
            while let Some((job, chunks)) = self.take(owner, region, other == 0) {
                let count = chunks.len();
                for chunk in chunks {
                    let work = AssertUnwindSafe(|| (job.work)(job.first + chunk, worker));
                    if let Err(thrown) = catch_unwind(work) {
                        self.lock().get_or_insert(thrown);
                    }
                }
                // After this the job may be gone.
                if self.unfinished.fetch_sub(count, Ordering::SeqCst) == count
                    && self.caller_sleeps.load(Ordering::SeqCst)
                {
                    drop(self.lock());
                    self.work_done.notify_one();
                }
            }
        }
        CURRENT.set(outer);
    }

    /// Takes some of the chunks of a region that are set aside for a thread, from the front or the
    /// end.
    fn take(
        &self,
        owner: usize,
        region: u64,
        front: bool,
    ) -> Option<(&Job<'static>, Range<usize>)> {
        let chunks = &self.chunks[owner].0;
        let mut word = chunks.load(Ordering::Acquire);
        loop {
            let left = Chunks::range(word);
            if left.is_empty() || Chunks::word(region, &left) != word {
                return None;
            }
            let job = self.job.load(Ordering::Relaxed);
            let count = (left.len() / PARTS).max(1);
            let (taken, rest) = match front {
                true => (left.start..left.start + count, left.start + count..left.end),
                false => (left.end - count..left.end, left.start..left.end - count),
            };
            match chunks.compare_exchange_weak(
                word,
                Chunks::word(region, &rest),
                Ordering::AcqRel,
                Ordering::Acquire,
            ) {
                // SAFETY: the exchange took chunks of the region that the word numbers, and `job`
                // was read while they were free, so it is that region's: the next one's is stored
                // only after every chunk of this one has finished. For the same reason the caller,
                // whose stack holds the job and all it borrows, is still inside `region`, until the
                // chunks that were taken here are counted as finished.
                Ok(_) => return Some((unsafe { &*job }, taken)),
                Err(now) => word = now,
            }
        }
    }

    /// The body of a helper.
    fn help(&self, worker: usize) {
        // The last region of which this thread has found no chunk left.
        let seen = Cell::new(0);
        let wanted = |order| self.region.load(order) != seen.get() || self.closing.load(order);
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
            seen.set(self.region.load(Ordering::Acquire));
            self.work(worker, seen.get());
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
