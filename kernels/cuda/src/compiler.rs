//! Functions compiled one by one, several at once: each once in a process, and kept on disk by
//! itself.
//!
//! A function's code depends on its own text and the prelude alone. So programs that share a
//! function share its code, whatever else is in them, and a model of which one kernel changed
//! compiles that one.
//!
//! Threads of one process are enough. NVRTC 13.0 holds a lock while it parses, which is 15 ms of a
//! function with `--minimal` (23 ms without it, 3 ms of them for those parts of the prelude that
//! only products need); what follows, 30 to 300 ms, runs side by side.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::Instant;

use crate::cache::{self, Cache};
use crate::nvrtc::{self, Cubin, Error, Program};

/// Bytes of code that a process keeps in memory; beyond them it starts anew, and reads from the
/// disk what it needs again.
const BYTES_MAX: usize = 64 << 20;

/// Bytes of stack of a thread that compiles: as many as a process's first thread usually has.
const STACK_BYTES: usize = 8 << 20;

/// Compiles functions, and knows the code of those that it has compiled.
#[derive(Debug, Default)]
pub struct Compiler {
    known: Mutex<Known>,
    /// The most threads; 0 for as many as the machine runs at once.
    threads: AtomicUsize,
    compiled: AtomicUsize,
    read: AtomicUsize,
}

/// A function's code, once one of the threads that want it has made it.
type Slot = OnceLock<Result<Arc<Cubin>, Error>>;

/// Code in memory.
#[derive(Debug, Default)]
struct Known {
    slots: HashMap<String, Arc<Slot>>,
    bytes: usize,
}

impl Compiler {
    /// The process's.
    pub fn of_process() -> &'static Compiler {
        static PROCESS: OnceLock<Compiler> = OnceLock::new();
        PROCESS.get_or_init(Compiler::default)
    }

    /// Bounds how many threads compile at once; without a bound there are as many as the machine
    /// runs at once.
    pub fn set_threads(&self, threads: usize) {
        self.threads.store(threads, Ordering::Relaxed);
    }

    /// How many functions NVRTC has compiled.
    pub fn compiled(&self) -> usize {
        self.compiled.load(Ordering::Relaxed)
    }

    /// How many were read from a cache.
    pub fn read(&self) -> usize {
        self.read.load(Ordering::Relaxed)
    }

    /// The code of each program: from memory, or from the cache, or else compiled and kept there.
    /// Those that take long are best first.
    ///
    /// # Errors
    /// Of the first program that cannot be compiled. Those after it may not have been looked at.
    pub fn compile(
        &self,
        cache: Option<&Cache>,
        programs: &[Program],
    ) -> Result<Vec<Arc<Cubin>>, Error> {
        if programs.is_empty() {
            return Ok(Vec::new());
        }
        let version = nvrtc::version()?;
        let made: Vec<Slot> = programs.iter().map(|_| Slot::new()).collect();
        let started = Instant::now();
        let (next, failed, compiled) = (
            AtomicUsize::new(0),
            AtomicBool::new(false),
            AtomicUsize::new(0),
        );
        // Programs are taken in their order: when one fails, those before it have been taken and
        // are finished.
        let work = || {
            while !failed.load(Ordering::Relaxed) {
                let at = next.fetch_add(1, Ordering::Relaxed);
                let Some(program) = programs.get(at) else {
                    break;
                };
                let code = self.code(cache, program, version, &compiled);
                if code.is_err() {
                    failed.store(true, Ordering::Relaxed);
                }
                let _ = made[at].set(code);
            }
        };
        let most = match self.threads.load(Ordering::Relaxed) {
            0 => thread::available_parallelism().map_or(1, usize::from),
            threads => threads,
        };
        thread::scope(|scope| {
            for _ in 1..most.min(programs.len()) {
                // Where the system starts no more threads, there are fewer.
                if thread::Builder::new()
                    .stack_size(STACK_BYTES)
                    .spawn_scoped(scope, work)
                    .is_err()
                {
                    break;
                }
            }
            work();
        });
        let compiled = compiled.into_inner();
        if compiled > 0 {
            log::info!(
                "{compiled} of {} functions compiled in {:.2} s",
                programs.len(),
                started.elapsed().as_secs_f64()
            );
            cache.into_iter().for_each(Cache::trim);
        }
        made.into_iter().map_while(Slot::into_inner).collect()
    }

    /// The code of one program; counts what was compiled. A thread that wants what another is
    /// making waits for it.
    fn code(
        &self,
        cache: Option<&Cache>,
        program: &Program,
        version: (u32, u32),
        compiled: &AtomicUsize,
    ) -> Result<Arc<Cubin>, Error> {
        let key = cache::key(program, version, &nvrtc::options(version));
        let slot = self.known().slots.entry(key.clone()).or_default().clone();
        let made = slot.get_or_init(|| {
            let made = self.make(cache, program, &key, compiled).map(Arc::new);
            let mut known = self.known();
            match &made {
                Ok(cubin) => known.bytes += cubin.image.len(),
                // It may work another time.
                Err(_) => drop(known.slots.remove(&key)),
            }
            if known.bytes > BYTES_MAX {
                known.slots.retain(|_, slot| slot.get().is_none());
                known.bytes = 0;
            }
            made
        });
        made.clone()
    }

    fn make(
        &self,
        cache: Option<&Cache>,
        program: &Program,
        key: &str,
        compiled: &AtomicUsize,
    ) -> Result<Cubin, Error> {
        if let Some(cubin) = cache.and_then(|cache| cache.cubin(key)) {
            self.read.fetch_add(1, Ordering::Relaxed);
            return Ok(cubin);
        }
        let cubin = nvrtc::compile(program)?;
        for count in [compiled, &self.compiled] {
            count.fetch_add(1, Ordering::Relaxed);
        }
        if let Some(cache) = cache {
            cache.keep_cubin(key, &cubin);
        }
        Ok(cubin)
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
