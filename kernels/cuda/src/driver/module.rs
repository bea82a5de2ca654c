//! Loaded code and its kernels.

use std::ffi::{CString, c_int};
use std::ptr::null_mut;

use cudarc::driver::sys;

use super::{DriverError, Result, calls, check};

/// Loaded code. Its context is current and outlives it, and its kernels have finished when it is
/// dropped.
#[derive(Debug)]
pub(crate) struct Module(sys::CUmodule);

/// A kernel of a loaded module.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Function(sys::CUfunction);

// SAFETY: the driver takes calls for modules and functions from any thread.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}
// SAFETY: as above.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

impl Module {
    /// Loads a cubin, or PTX that ends in 0, which the driver compiles.
    pub fn load(image: &[u8]) -> Result<Module> {
        if !image.starts_with(b"\x7fELF") && image.last() != Some(&0) {
            return Err(DriverError::Failed {
                call: "cuModuleLoadData",
                status: 0,
                code: "neither a cubin nor PTX that ends in 0".into(),
            });
        }
        let mut raw = null_mut();
        // SAFETY: a cubin says how long it is, and PTX ends in 0; the driver reads no further.
        check("cuModuleLoadData", unsafe {
            calls::cuModuleLoadData(&mut raw, image.as_ptr().cast())
        })?;
        Ok(Module(raw))
    }

    /// The kernel of this name.
    pub fn function(&self, name: &str) -> Result<Function> {
        let failed = |e: std::ffi::NulError| DriverError::Failed {
            call: "cuModuleGetFunction",
            status: 0,
            code: e.to_string(),
        };
        let name = CString::new(name).map_err(failed)?;
        let mut raw = null_mut();
        // SAFETY: the module lives, and the name ends in 0.
        check("cuModuleGetFunction", unsafe {
            calls::cuModuleGetFunction(&mut raw, self.0, name.as_ptr())
        })?;
        Ok(Function(raw))
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        // SAFETY: it was loaded and is unloaded only here.
        unsafe { calls::cuModuleUnload(self.0) };
    }
}

impl Function {
    /// Lets launches use all shared memory that a block of the device may have, less the kernel's
    /// static shared memory: the driver refuses a larger sum of both.
    pub fn allow_shared(self, block_bytes_max: u32) -> Result<Function> {
        use sys::CUfunction_attribute as A;
        let mut declared: c_int = 0;
        // SAFETY: the function was found in a module that lives, and the pointer is valid for
        // writing.
        check("cuFuncGetAttribute", unsafe {
            calls::cuFuncGetAttribute(
                &mut declared,
                A::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES,
                self.0,
            )
        })?;
        let left = c_int::try_from(block_bytes_max)
            .unwrap_or(c_int::MAX)
            .saturating_sub(declared);
        // SAFETY: as above.
        check("cuFuncSetAttribute", unsafe {
            calls::cuFuncSetAttribute(
                self.0,
                A::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                left,
            )
        })?;
        Ok(self)
    }

    pub(super) fn raw(self) -> sys::CUfunction {
        self.0
    }
}
