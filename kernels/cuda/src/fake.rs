//! A CUDA driver without a device (`emulator/fake_libcuda.c`), used by the tests of all layers
//! above the driver, with a matching cuBLASLt and cuDNN (`emulator/fake_libcublaslt.c`,
//! `emulator/fake_libcudnn.c`).

#[cfg(test)]
mod captures;

use std::ffi::{CString, c_char, c_int, c_longlong};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use libloading::Library as Object;

use crate::abi::digest;
use crate::device;
use crate::emulator::{self, ABI, EmulatorError, PUBLISHED};
use crate::libraries::Library;
use crate::nvrtc;
use crate::tune::Picks;

const SOURCE: &str = concat!(
    include_str!("../emulator/fake_work.c"),
    include_str!("../emulator/fake_libcuda.c")
);
const CUBLASLT: &str = include_str!("../emulator/fake_libcublaslt.c");
const CUDNN: &str = include_str!("../emulator/fake_libcudnn.c");

/// The driver's settings before each test.
const DEFAULTS: [(&str, i64); 19] = [
    ("devices", 1),
    ("version", 13000),
    ("total", 64 << 20),
    ("page", 2 << 20),
    ("maps_pages", 1),
    ("multiprocessors", 4),
    ("capability", 90),
    ("shared_bytes", 227 << 10),
    ("order", 0),
    ("eager", 0),
    ("library", 0),
    ("cudnn", 0),
    ("strict", 0),
    ("idle", 0),
    ("clocks", 1),
    ("chains", 0),
    ("ends", 0),
    ("graph_room", 1 << 20),
    ("unmap_us", 0),
];

/// The driver, locked for one test at a time because its settings and counters are global to the
/// process.
pub struct FakeDriver {
    object: &'static Object,
    _alone: MutexGuard<'static, ()>,
}

/// A device for tests that depend on none of its properties: the first GPU where one is required,
/// else that of the driver.
pub enum TestDevice {
    /// A GPU.
    Gpu,
    /// The driver's device.
    Fake(FakeDriver),
}

impl TestDevice {
    /// The device; `None` where neither can work, which is printed.
    ///
    /// # Panics
    /// If a GPU is required and there is none, and as [`FakeDriver::install`].
    pub fn find() -> Option<TestDevice> {
        if emulator::gpu_required() {
            return emulator::gpu_usable().then_some(TestDevice::Gpu);
        }
        FakeDriver::install().map(TestDevice::Fake)
    }
}

/// The driver's object file and the folder of emulated functions, for another process's
/// `SLABWISE_LIBCUDA` and `SLABWISE_EMULATED`.
///
/// # Errors
/// If it cannot be compiled.
pub fn build() -> Result<(PathBuf, PathBuf), EmulatorError> {
    let driver = object("libcuda", SOURCE)?;
    let functions = emulator::functions_folder()?;
    fs::create_dir_all(&functions).map_err(io(&functions))?;
    Ok((driver, functions))
}

/// The object file of a cuBLASLt that matches the driver, for another process's
/// `SLABWISE_LIBCUBLASLT`.
///
/// # Errors
/// If it cannot be compiled.
pub fn build_cublaslt() -> Result<PathBuf, EmulatorError> {
    object("libcublasLt", CUBLASLT)
}

/// The object file of a cuDNN that matches the driver, for another process's `SLABWISE_LIBCUDNN`.
///
/// # Errors
/// If it cannot be compiled.
pub fn build_cudnn() -> Result<PathBuf, EmulatorError> {
    object("libcudnn", CUDNN)
}

fn io(path: &Path) -> impl FnOnce(std::io::Error) -> EmulatorError {
    let path = path.display().to_string();
    move |e| EmulatorError::Object(format!("{path}: {e}"))
}

/// Compiles a library; the loader knows it as `name` with the suffix `.so`.
fn object(name: &str, text: &str) -> Result<PathBuf, EmulatorError> {
    let object = emulator::folder()?.join(format!("{name}-{:016x}.so", digest(&[text, ABI])));
    if !object.exists() {
        let sources = emulator::beside(&object);
        fs::create_dir_all(&sources).map_err(io(&sources))?;
        let source = sources.join(format!("{name}.c"));
        fs::write(sources.join("abi.h"), ABI).map_err(io(&sources))?;
        fs::write(&source, text).map_err(io(&source))?;
        let partial = sources.join("made.so");
        let flags = [
            "-std=gnu11",
            "-O1",
            "-fPIC",
            "-shared",
            &format!("-Wl,-soname,{name}.so"),
        ];
        let made = Command::new("gcc")
            .args(flags)
            .arg(&source)
            .args(["-o"])
            .arg(&partial)
            .args(["-ldl", "-lpthread"])
            .output();
        let made = made.map_err(|e| EmulatorError::NoCompiler(e.to_string()))?;
        if !made.status.success() {
            return Err(EmulatorError::Compile {
                path: source,
                log: String::from_utf8_lossy(&made.stderr).into_owned(),
            });
        }
        fs::rename(&partial, &object).map_err(io(&object))?;
        fs::remove_dir_all(&sources).map_err(io(&sources))?;
    }
    Ok(object)
}

impl FakeDriver {
    /// Installs the driver in this process, with default settings. `None` where it cannot work,
    /// which is printed; with `CI` set that is a failure.
    ///
    /// # Panics
    /// If it cannot work and `CI` is set, or another driver is found.
    pub fn install() -> Option<FakeDriver> {
        static OBJECT: OnceLock<Object> = OnceLock::new();
        static ALONE: Mutex<()> = Mutex::new(());
        if !emulator::available() {
            return None;
        }
        if let Err(e) = nvrtc::version() {
            assert!(std::env::var_os("CI").is_none(), "{e}");
            eprintln!("skipped: {e}");
            return None;
        }
        // A failed test leaves the lock poisoned, and no other state that the next test does not
        // reset.
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let object = OBJECT.get_or_init(|| {
            let (file, functions) = build().unwrap_or_else(|e| panic!("{e}"));
            let found = Library::Driver
                .open_as(&file)
                .unwrap_or_else(|e| panic!("{e}"));
            assert_eq!(found.file, file, "another driver was opened before");
            // Libraries installed on this machine would look for a real driver.
            let library = build_cublaslt().unwrap_or_else(|e| panic!("{e}"));
            let found = Library::CublasLt
                .open_as(&library)
                .unwrap_or_else(|e| panic!("{e}"));
            assert_eq!(found.file, library, "another cuBLASLt was opened before");
            // A test may have opened a cuDNN that is not usable.
            let _ = Library::Cudnn.open_as(&build_cudnn().unwrap_or_else(|e| panic!("{e}")));
            // SAFETY: the object has no initialisers.
            let object =
                unsafe { Object::new(&file) }.unwrap_or_else(|e| panic!("{}: {e}", file.display()));
            let path = CString::new(functions.as_os_str().as_encoded_bytes())
                .expect("a path without zeros");
            // SAFETY: the source declares the function with this type; the path ends in 0.
            unsafe {
                let name_folder = object
                    .get::<unsafe extern "C" fn(*const c_char)>(b"fake_folder\0")
                    .expect("it is exported");
                name_folder(path.as_ptr());
            }
            PUBLISHED.get_or_init(|| functions);
            object
        });
        let driver = FakeDriver {
            object,
            _alone: alone,
        };
        driver.restart();
        driver.fail("", -1, 0);
        driver.cost("", 1000);
        Picks::forget_all();
        for (name, value) in DEFAULTS {
            driver.set(name, value);
        }
        Some(driver)
    }

    /// Sets a property of the driver, or resets a counter.
    ///
    /// # Panics
    /// If it has no such number.
    pub fn set(&self, name: &str, value: i64) {
        let text = CString::new(name).expect("a name without zeros");
        // SAFETY: the source declares the function with this type; the name ends in 0.
        let known = unsafe {
            let set = self
                .object
                .get::<unsafe extern "C" fn(*const c_char, c_longlong) -> c_int>(b"fake_set\0")
                .expect("it is exported");
            set(text.as_ptr(), value)
        };
        assert_ne!(known, 0, "the driver has no {name}");
    }

    /// A property or a counter of the driver.
    pub fn get(&self, name: &str) -> i64 {
        let text = CString::new(name).expect("a name without zeros");
        // SAFETY: as for `set`.
        unsafe {
            let get = self
                .object
                .get::<unsafe extern "C" fn(*const c_char) -> c_longlong>(b"fake_get\0")
                .expect("it is exported");
            get(text.as_ptr())
        }
    }

    /// Makes the call of this name fail with the driver's error `code`, after it has succeeded so
    /// many times. An error by which a device is lost is that of all later calls.
    pub fn fail(&self, call: &str, after: i64, code: i32) {
        let text = CString::new(call).expect("a name without zeros");
        // SAFETY: as for `set`.
        unsafe {
            let fail = self
                .object
                .get::<unsafe extern "C" fn(*const c_char, c_longlong, c_int)>(b"fake_fail\0")
                .expect("it is exported");
            fail(text.as_ptr(), after, code);
        }
    }

    /// Makes a lost device usable again, as it is in a new process. Nothing that uses the device may
    /// be left.
    pub fn restart(&self) {
        // SAFETY: the source declares the function with this type.
        unsafe {
            let restart = self
                .object
                .get::<unsafe extern "C" fn()>(b"fake_restart\0")
                .expect("it is exported");
            restart();
        }
        device::forget_lost();
    }

    /// Makes kernels whose names begin so take so many nanoseconds by the events' clock; an empty
    /// beginning means all kernels and clears earlier settings. cuBLASLt's algorithms are
    /// `cublaslt_21`, …, cuDNN's `cudnn_forward_1`, `cudnn_data_1_plain`, `cudnn_filter_1`, ….
    pub fn cost(&self, begins: &str, nanoseconds: i64) {
        let text = CString::new(begins).expect("a name without zeros");
        // SAFETY: as for `set`.
        unsafe {
            let cost = self
                .object
                .get::<unsafe extern "C" fn(*const c_char, c_longlong)>(b"fake_cost\0")
                .expect("it is exported");
            cost(text.as_ptr(), nanoseconds);
        }
    }

    /// Clears the process's kernel choices.
    pub fn forget_picks(&self) {
        Picks::forget_all();
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::{c_uint, c_void};
    use std::ptr::{null, null_mut};

    use super::*;
    use crate::abi::Function;
    use crate::{Device, Limits};

    const OK: c_int = 0;
    const INVALID_VALUE: c_int = 1;
    const INVALID_HANDLE: c_int = 400;
    const LAUNCH_FAILED: c_int = 719;
    const CAPTURE_UNSUPPORTED: c_int = 900;
    const CAPTURE_INVALIDATED: c_int = 901;
    const LOSSY_QUERY: c_int = 917;
    const PAGE: usize = 2 << 20;

    type Pointer = *mut c_void;
    type Free = unsafe extern "C" fn(u64) -> c_int;
    type Range = unsafe extern "C" fn(u64, usize) -> c_int;
    type Make = unsafe extern "C" fn(*mut Pointer, c_uint) -> c_int;
    type Fill = unsafe extern "C" fn(u64, u8, usize, Pointer) -> c_int;
    type Launch = unsafe extern "C" fn(
        Pointer,
        c_uint,
        c_uint,
        c_uint,
        c_uint,
        c_uint,
        c_uint,
        c_uint,
        Pointer,
        *const Pointer,
        Pointer,
    ) -> c_int;

    /// A call of the driver, which must have this type.
    unsafe fn call<T: Copy>(driver: &FakeDriver, name: &str) -> T {
        // SAFETY: the caller's promise.
        *unsafe { driver.object.get::<T>(name.as_bytes()) }.expect("it is exported")
    }

    /// A device whose context is this thread's.
    fn open() -> Device {
        let limits = Limits {
            fraction: 0.75,
            bytes_max: None,
            preallocate: false,
        };
        Device::open(0, limits).expect("it is there")
    }

    /// The calls that map memory.
    struct Mapping {
        reserve: unsafe extern "C" fn(*mut u64, usize, usize, u64, u64) -> c_int,
        create: unsafe extern "C" fn(*mut u64, usize, *const c_void, u64) -> c_int,
        map: unsafe extern "C" fn(u64, usize, usize, u64, u64) -> c_int,
        set_access: unsafe extern "C" fn(u64, usize, *const c_void, usize) -> c_int,
        unmap: Range,
        release: Free,
        free: Range,
        is_inside: Range,
    }

    impl Mapping {
        fn of(driver: &FakeDriver) -> Mapping {
            // SAFETY: the source declares the functions with these types.
            unsafe {
                Mapping {
                    reserve: call(driver, "cuMemAddressReserve"),
                    create: call(driver, "cuMemCreate"),
                    map: call(driver, "cuMemMap"),
                    set_access: call(driver, "cuMemSetAccess"),
                    unmap: call(driver, "cuMemUnmap"),
                    release: call(driver, "cuMemRelease"),
                    free: call(driver, "cuMemAddressFree"),
                    is_inside: call(driver, "fake_inside"),
                }
            }
        }
    }

    /// Memory is mapped from its start on, in whole pages, and is no memory of the device before its
    /// access is set.
    #[test]
    fn mapped_memory_is_refused_as_by_a_real_driver() {
        let Some(driver) = FakeDriver::install() else {
            return;
        };
        let (_current, calls) = (open(), Mapping::of(&driver));
        let (mut at, mut memory) = (0, 0);
        // SAFETY: addresses and handles are those that the driver has returned.
        unsafe {
            assert_eq!((calls.reserve)(&mut at, 2 * PAGE, 0, 0, 0), OK);
            assert_eq!((calls.create)(&mut memory, 2 * PAGE, null(), 0), OK);
            // Not from its start, a part of a page, and more than there is.
            for (bytes, offset) in [(PAGE, PAGE), (PAGE / 2, 0), (3 * PAGE, 0)] {
                assert_eq!((calls.map)(at, bytes, offset, memory, 0), INVALID_VALUE);
            }
            // Nothing is mapped yet.
            assert_eq!((calls.set_access)(at, PAGE, null(), 1), INVALID_VALUE);
            assert_eq!((calls.map)(at, PAGE, 0, memory, 0), OK);
            assert_eq!((calls.is_inside)(at, PAGE), 0);
            // The second page is not mapped.
            assert_eq!((calls.set_access)(at, 2 * PAGE, null(), 1), INVALID_VALUE);
            assert_eq!((calls.is_inside)(at, PAGE), 0);
            assert_eq!((calls.set_access)(at, PAGE, null(), 1), OK);
            assert_eq!((calls.is_inside)(at, PAGE), 1);
            assert_eq!((calls.unmap)(at, PAGE), OK);
            assert_eq!((calls.release)(memory), OK);
            assert_eq!((calls.free)(at, 2 * PAGE), OK);
        }
    }

    /// Mappings and ranges are given back as wholes, each once, ranges after their mappings; memory
    /// stays as long as it is mapped.
    #[test]
    fn mapped_memory_is_given_back_as_to_a_real_driver() {
        let Some(driver) = FakeDriver::install() else {
            return;
        };
        let (_current, calls) = (open(), Mapping::of(&driver));
        let (before, ranges) = (driver.get("live_bytes"), driver.get("live_ranges"));
        let (mut at, mut memory, mut own) = (0, 0, 0);
        // SAFETY: the source declares the functions with these types; addresses and handles are those
        // that the driver has returned, or it refuses them.
        unsafe {
            let allocate: unsafe extern "C" fn(*mut u64, usize) -> c_int =
                call(&driver, "cuMemAlloc_v2");
            let free_own: Free = call(&driver, "cuMemFree_v2");
            assert_eq!(allocate(&mut own, PAGE), OK);
            assert_eq!((calls.reserve)(&mut at, 2 * PAGE, 0, 0, 0), OK);
            assert_eq!((calls.create)(&mut memory, 2 * PAGE, null(), 0), OK);
            let second = at + PAGE as u64;
            // It would end behind the range.
            let behind = (calls.map)(second, 2 * PAGE, 0, memory, 0);
            assert_eq!(behind, INVALID_VALUE);
            assert_eq!((calls.map)(at, PAGE, 0, memory, 0), OK);
            // Something is mapped already.
            assert_eq!((calls.map)(at, PAGE, 0, memory, 0), INVALID_VALUE);
            assert_eq!((calls.set_access)(at, PAGE, null(), 1), OK);
            assert_eq!((calls.free)(at, 2 * PAGE), INVALID_VALUE);
            assert_eq!((calls.release)(memory), OK);
            assert_eq!((calls.release)(memory), INVALID_VALUE);
            assert_eq!((calls.map)(second, PAGE, 0, memory, 0), INVALID_VALUE);
            let taken = driver.get("live_bytes") - before;
            assert_eq!(taken as usize, 3 * PAGE);
            for (from, bytes) in [(at, PAGE / 2), (at, 2 * PAGE), (second, PAGE), (own, PAGE)] {
                assert_eq!((calls.unmap)(from, bytes), INVALID_VALUE);
            }
            assert_eq!(free_own(at), INVALID_VALUE);
            assert_eq!((calls.is_inside)(at, PAGE), 1);
            assert_eq!((calls.unmap)(at, PAGE), OK);
            assert_eq!((calls.unmap)(at, PAGE), INVALID_VALUE);
            assert_eq!((calls.is_inside)(at, PAGE), 0);
            assert_eq!(free_own(own), OK);
            assert_eq!(free_own(own), INVALID_VALUE);
            assert_eq!(driver.get("live_bytes"), before);
            assert_eq!((calls.free)(at, PAGE), INVALID_VALUE);
            assert_eq!((calls.free)(second, PAGE), INVALID_VALUE);
            assert_eq!((calls.free)(at, 2 * PAGE), OK);
            assert_eq!((calls.free)(at, 2 * PAGE), INVALID_VALUE);
        }
        assert_eq!(driver.get("live_ranges"), ranges);
    }

    #[repr(C)]
    #[derive(Clone, Copy, Default)]
    struct Edge {
        from_port: u8,
        to_port: u8,
        kind: u8,
        reserved: [u8; 5],
    }

    /// The calls that capture, and a stream.
    struct Capturing {
        stream: Pointer,
        begin: unsafe extern "C" fn(Pointer, c_int) -> c_int,
        end: unsafe extern "C" fn(Pointer, *mut Pointer) -> c_int,
        info: unsafe extern "C" fn(
            Pointer,
            *mut c_int,
            Pointer,
            Pointer,
            *mut *const Pointer,
            *mut *const Edge,
            *mut usize,
        ) -> c_int,
        update: unsafe extern "C" fn(Pointer, *mut Pointer, *const Edge, usize, c_uint) -> c_int,
        library: unsafe extern "C" fn(
            Pointer,
            unsafe extern "C" fn(*const c_void) -> *const c_char,
            *const c_void,
            usize,
            *const c_char,
        ) -> c_int,
    }

    unsafe extern "C" fn nothing_wrong(_data: *const c_void) -> *const c_char {
        null()
    }

    impl Capturing {
        fn of(driver: &FakeDriver) -> Capturing {
            let mut stream = null_mut();
            // SAFETY: the source declares the functions with these types, and the pointer is valid
            // for writing.
            unsafe {
                let make: Make = call(driver, "cuStreamCreate");
                assert_eq!(make(&mut stream, 1), OK);
                Capturing {
                    stream,
                    begin: call(driver, "cuStreamBeginCapture_v2"),
                    end: call(driver, "cuStreamEndCapture"),
                    info: call(driver, "cuStreamGetCaptureInfo_v3"),
                    update: call(driver, "cuStreamUpdateCaptureDependencies_v2"),
                    library: call(driver, "fake_submit"),
                }
            }
        }

        fn begin(&self, mode: c_int) {
            // SAFETY: the stream lives.
            assert_eq!(unsafe { (self.begin)(self.stream, mode) }, OK);
        }

        fn end(&self) -> (c_int, Pointer) {
            let mut graph = null_mut();
            // SAFETY: the stream lives, and the pointer is valid for writing.
            let ended = unsafe { (self.end)(self.stream, &mut graph) };
            (ended, graph)
        }

        /// The node that the next one will depend on.
        fn front(&self) -> Pointer {
            let (mut status, mut nodes, mut edges, mut count) = (0, null(), null(), 0);
            // SAFETY: the stream lives, the pointers are valid for writing, and the driver sets one of
            // them to so many nodes.
            unsafe {
                let known = (self.info)(
                    self.stream,
                    &mut status,
                    null_mut(),
                    null_mut(),
                    &mut nodes,
                    &mut edges,
                    &mut count,
                );
                assert_eq!((known, status, count), (OK, 1, 1));
                *nodes
            }
        }

        /// The driver's status for a request without edges.
        fn without_edges(&self) -> c_int {
            let (mut status, mut nodes, mut count) = (0, null(), 0);
            // SAFETY: as above; the edges are not requested.
            unsafe {
                (self.info)(
                    self.stream,
                    &mut status,
                    null_mut(),
                    null_mut(),
                    &mut nodes,
                    null_mut(),
                    &mut count,
                )
            }
        }

        /// Lets the next node start before this one has ended.
        fn set_early(&self, mut node: Pointer, from_port: u8) -> c_int {
            let edge = Edge {
                from_port,
                kind: 1,
                ..Edge::default()
            };
            // SAFETY: the stream lives; there is one node and one edge.
            unsafe { (self.update)(self.stream, &mut node, &edge, 1, 1) }
        }

        /// Submits a kernel of a library.
        fn library(&self) -> c_int {
            // SAFETY: the data are none, and the name ends in 0.
            unsafe {
                (self.library)(
                    self.stream,
                    nothing_wrong,
                    [0u64; 1].as_ptr().cast(),
                    8,
                    c"library".as_ptr(),
                )
            }
        }
    }

    /// Programmatic edges lead from a kernel to one that waits, and only on devices that launch
    /// kernels early.
    #[test]
    fn programmatic_edges_are_refused_as_by_a_real_driver() {
        let Some(driver) = FakeDriver::install() else {
            return;
        };
        for capability in [80, 89, 90, 100] {
            driver.set("capability", capability);
            let (mut device, calls) = (open(), Capturing::of(&driver));
            let region = device.reserve(256).expect("room");
            let at = device.address(&region);
            // SAFETY: the source declares the function with this type.
            let fill: Fill = unsafe { call(&driver, "cuMemsetD8Async") };
            // SAFETY: it is memory of the device.
            let fill = || unsafe { fill(at, 0, 256, calls.stream) };
            // The stream is not captured.
            assert_eq!(calls.set_early(null_mut(), 1), INVALID_VALUE);
            for by_library in [true, false] {
                calls.begin(2);
                assert_eq!(fill(), OK);
                let filled = calls.front();
                assert_eq!(calls.library(), OK);
                let kernel = calls.front();
                assert_eq!(calls.set_early(filled, 1), INVALID_VALUE, "from a fill");
                assert_eq!(calls.set_early(kernel, 0), INVALID_VALUE, "at its end");
                let beyond = kernel.wrapping_byte_add(1);
                assert_eq!(calls.set_early(beyond, 1), INVALID_VALUE, "from no node");
                let is_early = calls.set_early(kernel, 1) == OK;
                assert_eq!(is_early, capability >= 90, "sm_{capability}");
                if is_early {
                    assert_eq!(calls.without_edges(), LOSSY_QUERY);
                    assert_eq!(calls.front(), kernel);
                    let next = if by_library { calls.library() } else { fill() };
                    assert_eq!(next, INVALID_VALUE, "to what does not wait");
                }
                let ended = if is_early { CAPTURE_INVALIDATED } else { OK };
                assert_eq!(calls.end().0, ended);
            }
        }
    }

    /// Calls that may allocate memory invalidate captures of every thread, of the calling one, or
    /// none, by the mode of the capture.
    #[test]
    fn captures_are_invalidated_by_their_mode() {
        let Some(driver) = FakeDriver::install() else {
            return;
        };
        let (device, calls) = (open(), Capturing::of(&driver));
        // SAFETY: the source declares the functions with these types.
        let (allocate, free): (unsafe extern "C" fn(*mut u64, usize) -> c_int, Free) = unsafe {
            (
                call(&driver, "cuMemAlloc_v2"),
                call(&driver, "cuMemFree_v2"),
            )
        };
        let taken = || {
            device.shared.context.bind().expect("the device is fine");
            let mut at = 0;
            // SAFETY: the pointer is valid for writing.
            (unsafe { allocate(&mut at, 256) }, at)
        };
        for (mode, own, others) in [(0, true, true), (1, true, false), (2, false, false)] {
            for (elsewhere, refused) in [(false, own), (true, others)] {
                calls.begin(mode);
                assert_eq!(calls.library(), OK);
                let (status, at) = match elsewhere {
                    true => std::thread::scope(|scope| scope.spawn(taken).join()),
                    false => Ok(taken()),
                }
                .expect("no panic");
                let expected = if refused {
                    (CAPTURE_UNSUPPORTED, CAPTURE_INVALIDATED)
                } else {
                    (OK, OK)
                };
                let ended = calls.end().0;
                assert_eq!((status, ended), expected, "{mode} {elsewhere}");
                // SAFETY: it was allocated, or the driver refuses.
                assert_eq!(unsafe { free(at) } == OK, !refused);
            }
        }
    }

    /// A function of at most 64 threads, which uses 4 KiB of a block's shared memory.
    fn bounded() -> (Function, String) {
        let text = "extern \"C\" __global__ void __launch_bounds__(64) NAME(const __grid_constant__ Words<1> p) {\n    \
                    if (p.w[0] != 0) ((float*)p.w[0])[threadIdx.x] = 1.0f;\n}\n";
        let function = Function::new("bounded", text);
        let ptx = format!(
            ".version 8.0\n.target sm_90\n.visible .entry {}(.param .align 8 .b8 p[8])\n\
             .maxntid 64, 1, 1\n{{\n.shared .align 4 .b8 own[4096];\nret;\n}}\n\0",
            function.name
        );
        (function, ptx)
    }

    /// A launch has the limits of its function and of a grid, and needs code that is loaded; code is
    /// not unloaded while it runs.
    #[test]
    fn launches_are_refused_as_by_a_real_driver() {
        let Some(driver) = FakeDriver::install() else {
            return;
        };
        let (_current, calls) = (open(), Capturing::of(&driver));
        let (function, ptx) = bounded();
        emulator::publish(std::slice::from_ref(&function)).expect("it compiles");
        let name = CString::new(function.name).expect("a name without zeros");
        // SAFETY: the source declares the functions with these types; pointers are valid for writing,
        // texts end in 0, and the kernel accesses nothing through its word.
        unsafe {
            let load: unsafe extern "C" fn(*mut Pointer, *const c_char) -> c_int =
                call(&driver, "cuModuleLoadData");
            let unload: unsafe extern "C" fn(Pointer) -> c_int = call(&driver, "cuModuleUnload");
            let find: unsafe extern "C" fn(*mut Pointer, Pointer, *const c_char) -> c_int =
                call(&driver, "cuModuleGetFunction");
            let attribute: unsafe extern "C" fn(*mut c_int, c_int, Pointer) -> c_int =
                call(&driver, "cuFuncGetAttribute");
            let set_attribute: unsafe extern "C" fn(Pointer, c_int, c_int) -> c_int =
                call(&driver, "cuFuncSetAttribute");
            let launch: Launch = call(&driver, "cuLaunchKernel");
            let instantiate: unsafe extern "C" fn(*mut Pointer, Pointer, u64) -> c_int =
                call(&driver, "cuGraphInstantiateWithFlags");
            let replay: unsafe extern "C" fn(Pointer, Pointer) -> c_int =
                call(&driver, "cuGraphLaunch");
            let synchronize: unsafe extern "C" fn(Pointer) -> c_int =
                call(&driver, "cuStreamSynchronize");
            let loaded = || {
                let (mut module, mut kernel) = (null_mut(), null_mut());
                assert_eq!(load(&mut module, ptx.as_ptr().cast()), OK);
                assert_eq!(find(&mut kernel, module, name.as_ptr()), OK);
                (module, kernel)
            };
            let launched = |kernel, [x, y, z]: [u32; 3], [a, b, c]: [u32; 3], shared| {
                let words = [0u64];
                let parameters = [words.as_ptr().cast_mut().cast()];
                let stream = calls.stream;
                launch(
                    kernel,
                    x,
                    y,
                    z,
                    a,
                    b,
                    c,
                    shared,
                    stream,
                    parameters.as_ptr(),
                    null_mut(),
                )
            };
            let (module, kernel) = loaded();
            let one = [1; 3];
            for (grid, block, shared, fits) in [
                ([1, 65_535, 65_535], [64, 1, 1], 44 << 10, true),
                ([0x8000_0000, 1, 1], one, 0, false),
                ([1, 65_536, 1], one, 0, false),
                ([1, 1, 65_536], one, 0, false),
                ([1, 0, 1], one, 0, false),
                (one, [65, 1, 1], 0, false),
                (one, [8, 3, 3], 0, false),
                (one, [1, 1, 65], 0, false),
                (one, [1, 0, 1], 0, false),
                (one, one, (44 << 10) + 1, false),
            ] {
                // Large grids are captured only.
                calls.begin(2);
                let status = launched(kernel, grid, block, shared);
                let expected = if fits { OK } else { INVALID_VALUE };
                assert_eq!(status, expected, "{grid:?} {block:?} {shared}");
                assert_eq!(calls.end().0, OK);
            }
            // Dynamic shared memory and the 4 KiB of the function are at most those of a block.
            let mut declared = 0;
            assert_eq!(attribute(&mut declared, 1, kernel), OK);
            assert_eq!(declared, 4096);
            assert_eq!(set_attribute(kernel, 8, (223 << 10) + 1), INVALID_VALUE);
            assert_eq!(set_attribute(kernel, 8, 223 << 10), OK);
            assert_eq!(launched(kernel, one, one, 223 << 10), OK);
            // A kernel that waits is the target of a programmatic edge.
            assert_eq!(synchronize(calls.stream), OK);
            calls.begin(2);
            assert_eq!(calls.library(), OK);
            assert_eq!(calls.set_early(calls.front(), 1), OK);
            assert_eq!(launched(kernel, one, one, 0), OK);
            let (ended, graph) = calls.end();
            assert_eq!(ended, OK);
            let mut executable = null_mut();
            assert_eq!(instantiate(&mut executable, graph, 0), OK);
            assert_eq!(replay(executable, calls.stream), OK);
            assert_eq!(synchronize(calls.stream), OK);
            assert_eq!(unload(module), OK);
            assert_eq!(launched(kernel, one, one, 0), INVALID_HANDLE);
            assert_eq!(attribute(&mut declared, 1, kernel), INVALID_HANDLE);
            assert_eq!(set_attribute(kernel, 8, 0), INVALID_HANDLE);
            assert_eq!(replay(executable, calls.stream), INVALID_HANDLE);
            // The last error is that of every further call.
            let (module, kernel) = loaded();
            assert_eq!(launched(kernel, one, one, 0), OK);
            assert_eq!(unload(module), LAUNCH_FAILED);
            assert_eq!(synchronize(calls.stream), LAUNCH_FAILED);
        }
    }
}
