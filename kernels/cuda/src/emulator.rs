//! The emulator: generated source compiled by `g++` and run on the CPU, where there is no GPU.
//!
//! It runs the same text that NVRTC compiles, on host memory, thread by thread
//! (`emulator/runtime.cpp`), and detects errors that a GPU would leave to chance: barriers that are
//! missing or that not all threads reach, shared memory read before it is written, asynchronous
//! copies not waited for, misaligned vectors, exited lanes in a mask and, with
//! [`Check::Addresses`], accesses outside the launch's memory. It does not model the rounding
//! inside tensor cores, bank conflicts, or memory ordering between blocks.

use std::collections::HashMap;
use std::env;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{self, Command};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use crate::abi::{Dispatch, Function, digest};
pub use crate::reservation::separate_arenas;
use crate::source::PRELUDE;

const SHIM: &str = include_str!("../emulator/shim.h");
const EPILOGUE: &str = include_str!("../emulator/epilogue.h");
const RUNTIME: &str = include_str!("../emulator/runtime.cpp");
/// The interface of a compiled object, as a C header.
pub const ABI: &str = include_str!("../emulator/abi.h");

/// Checks in the compiled code, in addition to those of the runtime.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Check {
    /// No checks.
    Nothing,
    /// Every address, by AddressSanitizer: the process must have been started with its library
    /// preloaded ([`asan_library`]).
    Addresses,
}

/// The order in which threads and blocks take turns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// In the order of their numbers.
    Forward,
    /// In the reverse order.
    Reverse,
    /// In a pseudo-random order with this seed.
    Shuffled(u64),
}

impl Order {
    /// One order of each kind: a correct kernel computes the same bits in all of them.
    pub const ALL: [Order; 3] = [Order::Forward, Order::Reverse, Order::Shuffled(1)];
}

/// Why a source could not be run.
#[derive(Debug, thiserror::Error)]
pub enum EmulatorError {
    /// There is no compiler.
    #[error("g++ cannot be run: {0}")]
    NoCompiler(String),
    /// g++ refused the source; its path and the first lines of the log.
    #[error("{path}: {log}")]
    Compile {
        /// The program, kept for reading.
        path: PathBuf,
        /// The compiler's log.
        log: String,
    },
    /// A file could not be written, or the object not loaded.
    #[error("{0}")]
    Object(String),
    /// A launch violated a rule.
    #[error("{0}")]
    Launch(String),
}

/// If this variable is 1, a GPU test fails where there is no GPU, and no test uses the emulator or
/// the driver without a device.
const REQUIRED: &str = "SLABWISE_REQUIRE_GPU";

/// The line that a test prints before it runs on a GPU, which tells GPU tests from the others.
pub const USES_THE_GPU: &str = "runs on the GPU";

/// Whether tests must run on a GPU.
pub fn gpu_required() -> bool {
    env::var_os(REQUIRED).is_some_and(|value| value == "1")
}

/// Whether a test can run on the first GPU; prints the answer. Without a GPU the test does nothing,
/// except where one is required.
///
/// # Panics
/// If there is none, and one is required.
pub fn gpu_usable() -> bool {
    match crate::usable(0) {
        Ok(()) => eprintln!("{USES_THE_GPU}"),
        Err(why) => {
            assert!(!gpu_required(), "{why}, and {REQUIRED} is set");
            eprintln!("not run on a GPU: {why}");
            return false;
        }
    }
    true
}

/// Whether emulated kernels can run here. Otherwise a test that needs them prints that and does
/// nothing, except under continuous integration (`CI` is set), where it fails.
///
/// # Panics
/// If they cannot run and `CI` is set.
pub fn available() -> bool {
    if gpu_required() {
        eprintln!("skipped: {REQUIRED} leaves the emulator out");
        return false;
    }
    let why = match Command::new("g++").arg("--version").output() {
        Ok(_) if cfg!(all(target_arch = "x86_64", target_os = "linux")) => return true,
        Ok(_) => "the emulator needs x86-64 Linux".to_string(),
        Err(error) => format!("g++ cannot be run: {error}"),
    };
    assert!(env::var_os("CI").is_none(), "{why}, and CI is set");
    eprintln!("skipped: {why}");
    false
}

/// The library to preload (`LD_PRELOAD`) into a process that checks addresses.
pub fn asan_library() -> Option<PathBuf> {
    let found = Command::new("g++")
        .arg("-print-file-name=libasan.so")
        .output()
        .ok()?;
    let path = PathBuf::from(String::from_utf8(found.stdout).ok()?.trim());
    path.is_absolute()
        .then(|| path.canonicalize().ok())
        .flatten()
}

/// The folder of compiled objects: beside the executable, in the build's own folder.
pub(crate) fn folder() -> Result<PathBuf, EmulatorError> {
    let executable = env::current_exe().map_err(|e| EmulatorError::Object(e.to_string()))?;
    let built = executable
        .parent()
        .and_then(Path::parent)
        .unwrap_or(Path::new("."));
    let folder = built.join("slabwise-emulated");
    fs::create_dir_all(&folder)
        .map_err(|e| EmulatorError::Object(format!("{}: {e}", folder.display())))?;
    Ok(folder)
}

/// A path beside this one that no other thread or process uses.
pub(crate) fn beside(path: &Path) -> PathBuf {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    path.with_extension(format!(
        "{}-{}.part",
        process::id(),
        COUNT.fetch_add(1, Ordering::Relaxed)
    ))
}

fn run_compiler(arguments: &[&str], inputs: &[&Path], output: &Path) -> Result<(), EmulatorError> {
    // Written to a temporary file and renamed, so that no process sees half an object.
    let partial = beside(output);
    let result = Command::new("g++")
        .args(arguments)
        .args(inputs)
        .arg("-o")
        .arg(&partial)
        .output();
    let done = result.map_err(|e| EmulatorError::NoCompiler(e.to_string()))?;
    if !done.status.success() {
        let log: String = String::from_utf8_lossy(&done.stderr)
            .lines()
            .take(40)
            .collect::<Vec<_>>()
            .join("\n");
        return Err(EmulatorError::Compile {
            path: inputs[0].to_path_buf(),
            log,
        });
    }
    fs::rename(&partial, output)
        .map_err(|e| EmulatorError::Object(format!("{}: {e}", output.display())))
}

/// Writes a text to a file whose name depends on it, unless the file exists. Readers see all of the
/// file or none.
fn write_once(path: &Path, text: &str) -> Result<(), EmulatorError> {
    if fs::read(path).is_ok_and(|there| there == text.as_bytes()) {
        return Ok(());
    }
    let partial = beside(path);
    let written = fs::write(&partial, text).and_then(|()| fs::rename(&partial, path));
    written.map_err(|e| EmulatorError::Object(format!("{}: {e}", path.display())))
}

/// The runtime as an object file.
fn runtime(folder: &Path) -> Result<PathBuf, EmulatorError> {
    let name = digest(&[RUNTIME, ABI]);
    let object = folder.join(format!("runtime-{name:016x}.o"));
    if !object.exists() {
        let sources = beside(&object);
        fs::create_dir_all(&sources).map_err(|e| EmulatorError::Object(e.to_string()))?;
        write_once(&sources.join("abi.h"), ABI)?;
        let source = sources.join("runtime.cpp");
        write_once(&source, RUNTIME)?;
        // Vector registers would have to be saved when stacks are switched, which also overwrites
        // red zones.
        let flags = [
            "-std=c++17",
            "-O2",
            "-fPIC",
            "-fvisibility=hidden",
            "-mno-red-zone",
            "-fno-exceptions",
            "-w",
            "-c",
        ];
        let compiled = run_compiler(&flags, &[&source], &object);
        fs::remove_dir_all(&sources).map_err(|e| EmulatorError::Object(e.to_string()))?;
        compiled?;
    }
    Ok(object)
}

/// The declarations that all programs include.
fn prelude(wave_width: u32) -> String {
    format!(
        "#define SLABWISE_EMULATED 1\n#define SLABWISE_WAVE {wave_width}\n{SHIM}{PRELUDE}{EPILOGUE}"
    )
}

/// The declarations as a file, and beside it the form that g++ has parsed already, which it reads in
/// place of the file wherever the flags are the same.
fn header(folder: &Path, flags: &[&str], wave_width: u32) -> Result<PathBuf, EmulatorError> {
    let text = prelude(wave_width);
    let name = digest(&[&text, &flags.join(" ")]);
    let file = folder.join(format!("prelude-{name:016x}.h"));
    let parsed = file.with_extension("h.gch");
    if !parsed.exists() {
        write_once(&file, &text)?;
        let flags = [flags, &["-x", "c++-header"]].concat();
        run_compiler(&flags, &[&file], &parsed)?;
    }
    Ok(file)
}

/// The program that g++ compiles.
fn program(header: &Path, functions: &[Function], wave_width: u32) -> String {
    let mut text = format!("#include \"{}\"\n", header.display());
    let mut entries = String::new();
    for f in functions {
        let _ = writeln!(
            text,
            "SLABWISE_SECTION({0})\n#undef SLABWISE_SHARED\n#define SLABWISE_SHARED \"shared_{0}\"\n{1}",
            f.name, f.source
        );
        let _ = writeln!(entries, "SLABWISE_ENTRY({}),", f.name);
    }
    let count = functions.len();
    let _ = writeln!(
        text,
        "extern \"C\" {{\nextern const SlabwiseEntry slabwise_entries[] = {{\n{entries}}};\nextern const unsigned slabwise_entry_count = {count};\n\
         extern const unsigned slabwise_wave = {wave_width};\n}}"
    );
    text
}

/// The fewest functions that are worth another process of g++.
const FUNCTIONS_MIN: usize = 4;

/// Compiles functions to shared objects, side by side on several processors. Each object comes with
/// its functions.
fn compile_objects(
    functions: &[Function],
    check: Check,
    wave_width: u32,
) -> Result<Vec<(PathBuf, Vec<Function>)>, EmulatorError> {
    let mut distinct: Vec<Function> = Vec::new();
    for f in functions {
        if !distinct.contains(f) {
            distinct.push(f.clone());
        }
    }
    let most = thread::available_parallelism().map_or(1, usize::from);
    let objects = (distinct.len() / FUNCTIONS_MIN).clamp(1, most);
    // Long functions take long, so that each object gets as many of them.
    distinct.sort_by_key(|f| std::cmp::Reverse(f.source.len()));
    let mut parts: Vec<Vec<Function>> = vec![Vec::new(); objects];
    for (at, function) in distinct.into_iter().enumerate() {
        parts[at % objects].push(function);
    }
    let compiled: Vec<Result<PathBuf, EmulatorError>> = thread::scope(|scope| {
        let threads: Vec<_> = parts
            .iter()
            .map(|part| scope.spawn(|| compile_object(part, check, wave_width)))
            .collect();
        let panicked = || EmulatorError::Object("a thread of the compiler panicked".into());
        let joined = threads.into_iter().map(|t| t.join());
        joined
            .map(|made| made.unwrap_or_else(|_| Err(panicked())))
            .collect()
    });
    let compiled: Vec<PathBuf> = compiled.into_iter().collect::<Result<_, _>>()?;
    Ok(compiled.into_iter().zip(parts).collect())
}

/// Compiles distinct functions to a shared object with the interface [`ABI`], or returns the object
/// of an earlier compilation.
fn compile_object(
    functions: &[Function],
    check: Check,
    wave_width: u32,
) -> Result<PathBuf, EmulatorError> {
    let folder = folder()?;
    let runtime = runtime(&folder)?;
    // With -O1 tests would take as long to run, and these functions 1.7 times as long to compile.
    let mut flags = vec![
        "-std=c++17",
        "-Og",
        "-fPIC",
        "-fno-strict-aliasing",
        "-fno-gnu-unique",
        "-fno-math-errno",
        "-fvisibility=hidden",
    ];
    // Products are fused with sums only where the source says so, as under NVRTC.
    flags.extend(["-ffp-contract=off", "-fno-exceptions", "-fwrapv", "-w"]);
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("f16c")
    {
        flags.extend(["-mavx2", "-mfma", "-mf16c"]);
    }
    if check == Check::Addresses {
        flags.extend([
            "-fsanitize=address",
            "-fsanitize-recover=address",
            "--param",
            "asan-stack=0",
            "--param",
            "asan-globals=0",
        ]);
    }
    let header = header(&folder, &flags, wave_width)?;
    let text = program(&header, functions, wave_width);
    flags.push("-shared");
    let name = digest(&[&text, &flags.join(" "), &runtime.to_string_lossy()]);
    let object = folder.join(format!("emulated-{name:016x}.so"));
    if !object.exists() {
        let source = folder.join(format!("emulated-{name:016x}.cpp"));
        write_once(&source, &text)?;
        run_compiler(&flags, &[&source, &runtime], &object)?;
    }
    Ok(object)
}

/// The variable that names the folder in which a driver without a device looks for emulated
/// functions.
pub const FOLDER_VARIABLE: &str = "SLABWISE_EMULATED";

/// That folder, for a process without the variable.
pub(crate) static PUBLISHED: OnceLock<PathBuf> = OnceLock::new();

/// A folder for [`publish`], another one whenever the text that all functions include changes, which
/// their names do not tell.
pub(crate) fn functions_folder() -> Result<PathBuf, EmulatorError> {
    let shared = digest(&[&prelude(32), RUNTIME, ABI]);
    Ok(folder()?.join(format!("functions-{shared:016x}")))
}

/// Compiles functions for a driver without a device: for each function, writes a file of its name
/// that holds the path of its object to the folder that [`FOLDER_VARIABLE`] names. Does nothing
/// without the variable.
///
/// # Errors
/// If g++ refuses the source.
pub fn publish(functions: &[Function]) -> Result<(), EmulatorError> {
    let Some(folder) = PUBLISHED
        .get()
        .cloned()
        .or_else(|| env::var_os(FOLDER_VARIABLE).map(PathBuf::from))
    else {
        return Ok(());
    };
    let unknown = |f: &&Function| !folder.join(&f.name).exists();
    let fresh: Vec<Function> = functions.iter().filter(unknown).cloned().collect();
    if fresh.is_empty() {
        return Ok(());
    }
    for (object, functions) in compile_objects(&fresh, Check::Nothing, 32)? {
        let object = object.to_string_lossy();
        functions
            .iter()
            .try_for_each(|f| write_once(&folder.join(&f.name), &object))?;
    }
    Ok(())
}

unsafe extern "C" {
    fn dlopen(path: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void;
    fn dlerror() -> *const c_char;
}
const RTLD_NOW: c_int = 2;

/// `struct SlabwiseLaunch` of the header.
#[repr(C)]
struct Launch {
    grid: [u32; 3],
    block: [u32; 3],
    shared_bytes: u32,
    order: u32,
    seed: u64,
}

type Emulate = unsafe extern "C" fn(*const c_char, *const c_void, *const Launch) -> *const c_char;
type WordCount = unsafe extern "C" fn(*const c_char) -> u32;
type Mark = unsafe extern "C" fn(*const c_void, usize);

/// Functions ready to run. Their objects stay loaded for the life of the process.
#[derive(Clone, Debug)]
pub struct Emulator {
    /// The object of each function, by name.
    functions: HashMap<String, Object>,
}

/// A loaded object.
#[derive(Clone, Copy, Debug)]
struct Object {
    emulate: Emulate,
    words: WordCount,
}

fn symbol(handle: *mut c_void, name: &CStr) -> Option<*mut c_void> {
    // SAFETY: a handle that `dlopen` gave, or null for the whole process, and a text that ends in
    // 0.
    let found = unsafe { dlsym(handle, name.as_ptr()) };
    (!found.is_null()).then_some(found)
}

impl Emulator {
    /// Compiles and loads functions for waves of 32 lanes.
    pub fn new(functions: &[Function], check: Check) -> Result<Emulator, EmulatorError> {
        Emulator::with_waves(functions, check, 32)
    }

    /// Compiles and loads functions for waves of 32 or 64 lanes.
    pub fn with_waves(
        functions: &[Function],
        check: Check,
        wave_width: u32,
    ) -> Result<Emulator, EmulatorError> {
        if check == Check::Addresses
            && symbol(std::ptr::null_mut(), c"__asan_poison_memory_region").is_none()
        {
            return Err(EmulatorError::Object(
                "addresses are checked only where the sanitizer's library is preloaded".into(),
            ));
        }
        let mut loaded = HashMap::new();
        for (path, functions) in compile_objects(functions, check, wave_width)? {
            let object = Object::load(&path)?;
            loaded.extend(functions.into_iter().map(|f| (f.name, object)));
        }
        Ok(Emulator { functions: loaded })
    }

    /// Runs one launch; `words` are the dispatch's, with addresses of this process.
    ///
    /// # Safety
    /// The function must access, through `words`, only memory of this process that is not used
    /// otherwise meanwhile; with [`Check::Addresses`] and memory marked by [`protect`], other
    /// accesses are reported instead.
    pub unsafe fn launch(
        &self,
        function: &Function,
        dispatch: &Dispatch,
        words: &[u64],
        order: Order,
    ) -> Result<(), EmulatorError> {
        let unknown = || EmulatorError::Launch(format!("{} is not compiled", function.name));
        let object = self.functions.get(&function.name).ok_or_else(unknown)?;
        // SAFETY: the caller's promise.
        unsafe { object.launch(&function.name, dispatch, words, order) }
    }
}

impl Object {
    fn load(object: &Path) -> Result<Object, EmulatorError> {
        let path = CString::new(object.as_os_str().as_encoded_bytes())
            .map_err(|e| EmulatorError::Object(e.to_string()))?;
        // SAFETY: a path that ends in 0, to an object compiled above: loading it runs no
        // initialiser of its own.
        let handle = unsafe { dlopen(path.as_ptr(), RTLD_NOW) };
        if handle.is_null() {
            // SAFETY: after a failure, `dlerror` gives a text.
            let why = unsafe { CStr::from_ptr(dlerror()) };
            return Err(EmulatorError::Object(format!(
                "{}: {}",
                object.display(),
                why.to_string_lossy()
            )));
        }
        let missing = || EmulatorError::Object(format!("{} exports too little", object.display()));
        let emulate = symbol(handle, c"slabwise_emulate").ok_or_else(missing)?;
        let words = symbol(handle, c"slabwise_words").ok_or_else(missing)?;
        // SAFETY: the header declares these symbols as functions of these types.
        unsafe {
            Ok(Object {
                emulate: std::mem::transmute::<*mut c_void, Emulate>(emulate),
                words: std::mem::transmute::<*mut c_void, WordCount>(words),
            })
        }
    }

    /// See [`Emulator::launch`].
    unsafe fn launch(
        &self,
        function: &str,
        dispatch: &Dispatch,
        words: &[u64],
        order: Order,
    ) -> Result<(), EmulatorError> {
        let name = CString::new(function).map_err(|e| EmulatorError::Launch(e.to_string()))?;
        // SAFETY: a name that ends in 0.
        let expected = unsafe { (self.words)(name.as_ptr()) } as usize;
        if expected != words.len() {
            return Err(EmulatorError::Launch(format!(
                "{function} takes {expected} words, not {}",
                words.len()
            )));
        }
        let (order, seed) = match order {
            Order::Forward => (0, 0),
            Order::Reverse => (1, 0),
            Order::Shuffled(seed) => (2, seed),
        };
        let launch = Launch {
            grid: dispatch.grid,
            block: dispatch.block,
            shared_bytes: dispatch.shared_bytes,
            order,
            seed,
        };
        // SAFETY: name, words and launch live through the call; the rest is the caller's promise.
        let failed = unsafe { (self.emulate)(name.as_ptr(), words.as_ptr().cast(), &launch) };
        if failed.is_null() {
            return Ok(());
        }
        // SAFETY: the header promises a text.
        Err(EmulatorError::Launch(
            unsafe { CStr::from_ptr(failed) }
                .to_string_lossy()
                .into_owned(),
        ))
    }
}

/// Marks memory as inaccessible to code that checks addresses, or as accessible again. Does nothing
/// where the sanitizer's library is not loaded. Works on whole groups of 8 bytes.
pub fn protect(memory: &[u8], forbidden: bool) {
    let name = if forbidden {
        c"__asan_poison_memory_region"
    } else {
        c"__asan_unpoison_memory_region"
    };
    if let Some(mark) = symbol(std::ptr::null_mut(), name) {
        // SAFETY: the sanitizer's interface declares this type.
        let mark = unsafe { std::mem::transmute::<*mut c_void, Mark>(mark) };
        // SAFETY: memory of this process; only the sanitizer's shadow memory changes.
        unsafe { mark(memory.as_ptr().cast(), memory.len()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn concurrent_threads_share_the_compiled_runtime() {
        if !available() {
            return;
        }
        let folder = tempfile::tempdir().expect("a folder");
        let objects: Vec<_> = thread::scope(|scope| {
            let threads: Vec<_> = (0..3)
                .map(|_| scope.spawn(|| runtime(folder.path())))
                .collect();
            threads
                .into_iter()
                .map(|t| t.join().expect("no panic").expect("it is compiled"))
                .collect()
        });
        assert!(objects.iter().all(|o| o.exists()));
        assert_eq!(
            fs::read_dir(folder.path()).expect("own folder").count(),
            1,
            "only the object is left"
        );
    }
}
