//! The NVRTC functions, bound to the library file that was found.
//!
//! Bindings that load a library by its name would get the loader's, whichever file was named, and
//! abort the process where it lacks a function.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::Display;
use std::sync::OnceLock;

use super::Error;
use crate::libraries::{Library, Missing};

/// The status that a call returns; 0 is success.
pub(super) type Status = c_int;

/// The source was refused.
pub(super) const REFUSED: Status = 6;

/// A program object of the compiler.
pub(super) type Raw = *mut c_void;

/// Writes the size of a property of a program, bytes.
pub(super) type Count = unsafe extern "C" fn(Raw, *mut usize) -> Status;

/// Writes the property itself.
pub(super) type Write = unsafe extern "C" fn(Raw, *mut c_char) -> Status;

/// The functions in use. They may be called at any time, from any thread.
pub(super) struct Calls {
    version: unsafe extern "C" fn(*mut c_int, *mut c_int) -> Status,
    error_string: unsafe extern "C" fn(Status) -> *const c_char,
    architecture_count: unsafe extern "C" fn(*mut c_int) -> Status,
    architectures: unsafe extern "C" fn(*mut c_int) -> Status,
    pub create: unsafe extern "C" fn(
        *mut Raw,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> Status,
    pub compile: unsafe extern "C" fn(Raw, c_int, *const *const c_char) -> Status,
    pub log_bytes: Count,
    pub log: Write,
    pub cubin_bytes: Count,
    pub cubin: Write,
    pub ptx_bytes: Count,
    pub ptx: Write,
    pub destroy: unsafe extern "C" fn(*mut Raw) -> Status,
}

impl Calls {
    /// The compiler of the process, found and bound at the first use.
    pub fn bound() -> Result<&'static Calls, Error> {
        static BOUND: OnceLock<Result<Calls, Missing>> = OnceLock::new();
        let bound = BOUND.get_or_init(|| Library::Nvrtc.bind(Calls::of));
        bound.as_ref().map_err(|missing| missing.clone().into())
    }

    fn of(library: &libloading::Library, file: Display<'_>) -> Result<Calls, String> {
        macro_rules! call {
            ($name:literal) => {
                // SAFETY: the call has had this type since its first version.
                *unsafe { library.get($name) }.map_err(|e| format!(": {file} lacks a call: {e}"))?
            };
        }
        Ok(Calls {
            version: call!(b"nvrtcVersion\0"),
            error_string: call!(b"nvrtcGetErrorString\0"),
            architecture_count: call!(b"nvrtcGetNumSupportedArchs\0"),
            architectures: call!(b"nvrtcGetSupportedArchs\0"),
            create: call!(b"nvrtcCreateProgram\0"),
            compile: call!(b"nvrtcCompileProgram\0"),
            log_bytes: call!(b"nvrtcGetProgramLogSize\0"),
            log: call!(b"nvrtcGetProgramLog\0"),
            cubin_bytes: call!(b"nvrtcGetCUBINSize\0"),
            cubin: call!(b"nvrtcGetCUBIN\0"),
            ptx_bytes: call!(b"nvrtcGetPTXSize\0"),
            ptx: call!(b"nvrtcGetPTX\0"),
            destroy: call!(b"nvrtcDestroyProgram\0"),
        })
    }

    /// The result of a call.
    pub fn check(&self, call: &'static str, status: Status) -> Result<(), Error> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: the call accepts any number, and returns a static text.
        let text = unsafe { (self.error_string)(status) };
        let known = (!text.is_null()).then(|| {
            // SAFETY: as above.
            unsafe { CStr::from_ptr(text) }
                .to_string_lossy()
                .into_owned()
        });
        Err(Error::Failed {
            call,
            code: known.unwrap_or_else(|| format!("error {status}")),
        })
    }

    /// The compiler's version.
    pub fn version(&self) -> Result<(u32, u32), Error> {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: both are valid for writing.
        self.check("nvrtcVersion", unsafe {
            (self.version)(&mut major, &mut minor)
        })?;
        Ok((major as u32, minor as u32))
    }

    /// The compute capabilities that it generates code for.
    pub fn architectures(&self) -> Result<Vec<u32>, Error> {
        let mut count = 0;
        // SAFETY: the count is valid for writing.
        self.check("nvrtcGetNumSupportedArchs", unsafe {
            (self.architecture_count)(&mut count)
        })?;
        let mut found: Vec<c_int> = vec![0; usize::try_from(count).unwrap_or(0)];
        // SAFETY: there is space for as many as the compiler said.
        self.check("nvrtcGetSupportedArchs", unsafe {
            (self.architectures)(found.as_mut_ptr())
        })?;
        Ok(found.into_iter().map(|sm| sm as u32).collect())
    }
}
