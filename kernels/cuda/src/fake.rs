//! A CUDA driver without a device (`emulator/fake_libcuda.c`), used by the tests of all layers
//! above the driver, with a matching cuBLASLt and cuDNN (`emulator/fake_libcublaslt.c`,
//! `emulator/fake_libcudnn.c`).

use std::ffi::{CString, c_char, c_int, c_longlong};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use libloading::Library as Object;

use crate::abi::digest;
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
const DEFAULTS: [(&str, i64); 13] = [
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
    let functions = emulator::folder()?.join("functions");
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
    /// many times.
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
    use super::*;
    use crate::{Device, Limits};

    const OK: c_int = 0;
    const INVALID_VALUE: c_int = 1;
    const PAGE: usize = 2 << 20;

    /// Memory is mapped from its start on, in whole pages, and is no memory of the device before its
    /// access is set.
    #[test]
    fn mapped_memory_is_refused_as_by_a_real_driver() {
        let Some(driver) = FakeDriver::install() else {
            return;
        };
        let limits = Limits {
            fraction: 0.75,
            bytes_max: None,
            preallocate: false,
        };
        let _current = Device::open(0, limits).expect("it is there");
        let object = driver.object;
        // SAFETY: the source declares the functions with these types; addresses and handles are those
        // that it has returned, and each is released once.
        unsafe {
            type Pointer = *const std::ffi::c_void;
            let reserve = object
                .get::<unsafe extern "C" fn(*mut u64, usize, usize, u64, u64) -> c_int>(
                    b"cuMemAddressReserve\0",
                )
                .expect("it is exported");
            let create = object
                .get::<unsafe extern "C" fn(*mut u64, usize, Pointer, u64) -> c_int>(
                    b"cuMemCreate\0",
                )
                .expect("it is exported");
            let map = object
                .get::<unsafe extern "C" fn(u64, usize, usize, u64, u64) -> c_int>(b"cuMemMap\0")
                .expect("it is exported");
            let set_access = object
                .get::<unsafe extern "C" fn(u64, usize, Pointer, usize) -> c_int>(
                    b"cuMemSetAccess\0",
                )
                .expect("it is exported");
            let unmap = object
                .get::<unsafe extern "C" fn(u64, usize) -> c_int>(b"cuMemUnmap\0")
                .expect("it is exported");
            let release = object
                .get::<unsafe extern "C" fn(u64) -> c_int>(b"cuMemRelease\0")
                .expect("it is exported");
            let free = object
                .get::<unsafe extern "C" fn(u64, usize) -> c_int>(b"cuMemAddressFree\0")
                .expect("it is exported");
            let is_inside = object
                .get::<unsafe extern "C" fn(u64, usize) -> c_int>(b"fake_inside\0")
                .expect("it is exported");
            let (mut at, mut memory, none) = (0, 0, std::ptr::null());
            assert_eq!(reserve(&mut at, 2 * PAGE, 0, 0, 0), OK);
            assert_eq!(create(&mut memory, 2 * PAGE, none, 0), OK);
            // Not from its start, a part of a page, and more than there is.
            for (bytes, offset) in [(PAGE, PAGE), (PAGE / 2, 0), (3 * PAGE, 0)] {
                assert_eq!(map(at, bytes, offset, memory, 0), INVALID_VALUE);
            }
            // Nothing is mapped yet.
            assert_eq!(set_access(at, PAGE, none, 1), INVALID_VALUE);
            assert_eq!(map(at, PAGE, 0, memory, 0), OK);
            assert_eq!(is_inside(at, PAGE), 0);
            // The second page is not mapped.
            assert_eq!(set_access(at, 2 * PAGE, none, 1), INVALID_VALUE);
            assert_eq!(is_inside(at, PAGE), 0);
            assert_eq!(set_access(at, PAGE, none, 1), OK);
            assert_eq!(is_inside(at, PAGE), 1);
            assert_eq!(unmap(at, PAGE), OK);
            assert_eq!(release(memory), OK);
            assert_eq!(free(at, 2 * PAGE), OK);
        }
    }
}
