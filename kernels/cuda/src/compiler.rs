//! Compiles functions separately and in parallel: each once per process, with its own entry in the
//! disk cache.
//!
//! A function's code depends only on its own text and the prelude. Therefore programs that share a
//! function share its code, whatever else they contain, and if one kernel of a model changes, only
//! that kernel is compiled again.
//!
//! Threads of one process suffice. NVRTC 13.0 holds a lock while it parses, which takes 15 ms per
//! function with `--minimal` (23 ms without it, 3 ms of them for the parts of the prelude that only
//! products need); the phases after that, 30 to 300 ms, run in parallel.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::Instant;

use crate::cache::{self, Cache};
use crate::nvrtc::{self, Cubin, Error, Program};

/// The limit of code that a process keeps in memory, bytes. When it is exceeded, the map is
/// cleared, and code is read from the disk when it is needed again.
const BYTES_MAX: usize = 64 << 20;

/// Stack size of a compiler thread, bytes: the usual size of a process's first thread.
const STACK_BYTES: usize = 8 << 20;

/// Compiles functions, and caches the code in memory.
#[derive(Debug, Default)]
pub struct Compiler {
    code_in_memory: Mutex<CodeInMemory>,
    /// The maximum number of threads; 0 for as many as the machine runs at once.
    threads: AtomicUsize,
    compiled: AtomicUsize,
    read: AtomicUsize,
}

/// The code of a function, set by the first thread that requests it.
type CodeCell = OnceLock<Result<Arc<Cubin>, Error>>;

/// The code in memory.
#[derive(Debug, Default)]
struct CodeInMemory {
    cells: HashMap<String, Arc<CodeCell>>,
    bytes: usize,
}

impl Compiler {
    /// The compiler of the process.
    pub fn of_process() -> &'static Compiler {
        static PROCESS: OnceLock<Compiler> = OnceLock::new();
        PROCESS.get_or_init(Compiler::default)
    }

    /// Limits the number of threads that compile at once; the default is as many as the machine
    /// runs at once.
    pub fn set_threads(&self, threads: usize) {
        self.threads.store(threads, Ordering::Relaxed);
    }

    /// The number of functions that NVRTC has compiled.
    pub fn compiled(&self) -> usize {
        self.compiled.load(Ordering::Relaxed)
    }

    /// The number of functions that were read from a cache.
    pub fn read(&self) -> usize {
        self.read.load(Ordering::Relaxed)
    }

    /// The code of each program: from memory, else from the cache, else compiled and cached.
    /// Programs that take long should come first.
    ///
    /// # Errors
    /// That of the first program that cannot be compiled. Later programs may not have been
    /// compiled.
    pub fn compile(
        &self,
        cache: Option<&Cache>,
        programs: &[Program],
    ) -> Result<Vec<Arc<Cubin>>, Error> {
        if programs.is_empty() {
            return Ok(Vec::new());
        }
        let version = nvrtc::version()?;
        let made: Vec<CodeCell> = programs.iter().map(|_| CodeCell::new()).collect();
        let started = Instant::now();
        let (next, failed, compiled) = (
            AtomicUsize::new(0),
            AtomicBool::new(false),
            AtomicUsize::new(0),
        );
        // Programs are started in order, so that when one fails, those before it have been started
        // and are finished.
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
                // If the system starts no more threads, fewer are used.
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
        made.into_iter().map_while(CodeCell::into_inner).collect()
    }

    /// The code of one program; counts compilations. If another thread is compiling it, this one
    /// waits for that thread.
    fn code(
        &self,
        cache: Option<&Cache>,
        program: &Program,
        version: (u32, u32),
        compiled: &AtomicUsize,
    ) -> Result<Arc<Cubin>, Error> {
        let key = cache::key(program, version, &nvrtc::options(version));
        let cell = self
            .code_in_memory()
            .cells
            .entry(key.clone())
            .or_default()
            .clone();
        let made = cell.get_or_init(|| {
            let made = self.make(cache, program, &key, compiled).map(Arc::new);
            let mut code_in_memory = self.code_in_memory();
            match &made {
                Ok(cubin) => code_in_memory.bytes += cubin.image.len(),
                // The failure may be temporary.
                Err(_) => drop(code_in_memory.cells.remove(&key)),
            }
            if code_in_memory.bytes > BYTES_MAX {
                code_in_memory.cells.retain(|_, cell| cell.get().is_none());
                code_in_memory.bytes = 0;
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
            cache.store_cubin(key, &cubin);
        }
        Ok(cubin)
    }

    fn code_in_memory(&self) -> MutexGuard<'_, CodeInMemory> {
        self.code_in_memory
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}
