//! Compiles functions separately and in parallel: each once per process, with its own entry in the
//! disk cache.
//!
//! A function's code depends only on its own text and the prelude. Therefore programs that share a
//! function share its code, whatever else they contain, and if one kernel of a model changes, only
//! that kernel is compiled again. The exception is the code of custom kernels that include files:
//! because the files may change, it is compiled at every load.
//!
//! NVRTC holds a lock while it parses, which limits the number of threads that are of use. From the
//! second function of a call on, it reads the parsed prelude from a precompiled header: a function of
//! NVRTC 13.0 holds the lock for 15 ms instead of 42, and a product for 60 instead of 85. The phases
//! after that, 30 to 500 ms, run in parallel.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::Instant;

use crate::cache::{self, Cache};
use crate::nvrtc::{self, Cubin, Error, PrecompiledHeaders, Program};

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

/// The state shared by the threads of a call.
struct Call<'a> {
    cache: Option<&'a Cache>,
    /// The compiler's version.
    version: (u32, u32),
    /// Its build.
    build: &'static str,
    /// The number of functions whose compilation has begun.
    started: AtomicUsize,
    /// The number of functions compiled.
    compiled: AtomicUsize,
    /// Made for the second function that is compiled, because one alone would only write them.
    headers: OnceLock<Option<PrecompiledHeaders>>,
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
        let call = Call {
            cache,
            version: nvrtc::version()?,
            build: nvrtc::build(),
            started: AtomicUsize::new(0),
            compiled: AtomicUsize::new(0),
            headers: OnceLock::new(),
        };
        let made: Vec<CodeCell> = programs.iter().map(|_| CodeCell::new()).collect();
        let began = Instant::now();
        let (next, failed) = (AtomicUsize::new(0), AtomicBool::new(false));
        // Programs are started in order, so that when one fails, those before it have been started
        // and are finished.
        let work = || {
            while !failed.load(Ordering::Relaxed) {
                let at = next.fetch_add(1, Ordering::Relaxed);
                let Some(program) = programs.get(at) else {
                    break;
                };
                let code = self.code(program, &call);
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
        let compiled = call.compiled.into_inner();
        if compiled > 0 {
            log::info!(
                "{compiled} of {} functions compiled in {:.2} s",
                programs.len(),
                began.elapsed().as_secs_f64()
            );
            cache.into_iter().for_each(Cache::trim);
        }
        made.into_iter().map_while(CodeCell::into_inner).collect()
    }

    /// The code of one program; counts compilations. If another thread is compiling it, this one
    /// waits for that thread.
    fn code(&self, program: &Program, call: &Call<'_>) -> Result<Arc<Cubin>, Error> {
        if program.may_read_files() {
            return self.compile_one(program, call).map(Arc::new);
        }
        let options = nvrtc::options(call.version);
        let key = cache::key(program, call.version, call.build, &options);
        let cell = self
            .code_in_memory()
            .cells
            .entry(key.clone())
            .or_default()
            .clone();
        let made = cell.get_or_init(|| {
            let made = self.make(program, &key, call).map(Arc::new);
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

    fn make(&self, program: &Program, key: &str, call: &Call<'_>) -> Result<Cubin, Error> {
        if let Some(cubin) = call.cache.and_then(|cache| cache.cubin(key)) {
            self.read.fetch_add(1, Ordering::Relaxed);
            return Ok(cubin);
        }
        let cubin = self.compile_one(program, call)?;
        if let Some(cache) = call.cache {
            cache.store_cubin(key, &cubin);
        }
        Ok(cubin)
    }

    fn compile_one(&self, program: &Program, call: &Call<'_>) -> Result<Cubin, Error> {
        let is_first = call.started.fetch_add(1, Ordering::Relaxed) == 0;
        let headers = match is_first {
            true => None,
            false => call
                .headers
                .get_or_init(|| PrecompiledHeaders::new(call.version))
                .as_ref(),
        };
        let cubin = nvrtc::compile(program, headers)?;
        for count in [&call.compiled, &self.compiled] {
            count.fetch_add(1, Ordering::Relaxed);
        }
        Ok(cubin)
    }

    fn code_in_memory(&self) -> MutexGuard<'_, CodeInMemory> {
        self.code_in_memory
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}
