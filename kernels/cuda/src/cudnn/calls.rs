//! The cuDNN functions, bound to the library file that was found; a missing function is an error.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::Display;
use std::sync::OnceLock;

use crate::driver;
use crate::libraries::{Library, LibraryError, Missing};

/// The status that a call returns; 0 is success.
pub(super) type Status = c_int;

/// An object of the library.
pub(super) type Raw = *mut c_void;

/// The constructor and destructor of a kind of objects.
pub(super) struct Objects {
    pub create: unsafe extern "C" fn(*mut Raw) -> Status,
    pub destroy: unsafe extern "C" fn(Raw) -> Status,
}

/// The library's estimate for an algorithm: `cudnnConvolutionFwdAlgoPerf_t` and its equivalents for
/// both gradients.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Performance {
    pub algorithm: c_int,
    pub status: Status,
    pub milliseconds: f32,
    pub workspace: usize,
    pub determinism: c_int,
    pub math: c_int,
    reserved: [c_int; 3],
}

/// Lists the algorithms for two operands, a convolution and a result, at most so many, the best
/// estimate first.
type Heuristics =
    unsafe extern "C" fn(Raw, Raw, Raw, Raw, Raw, c_int, *mut c_int, *mut Performance) -> Status;

/// The workspace of an algorithm for two operands, a convolution and a result, bytes.
type Workspace = unsafe extern "C" fn(Raw, Raw, Raw, Raw, Raw, c_int, *mut usize) -> Status;

/// Its arguments: the handle, alpha, two operands each with its address, the convolution, an
/// algorithm, a workspace with its bytes, beta, the result with its address.
type Run = unsafe extern "C" fn(
    Raw,
    *const c_void,
    Raw,
    *const c_void,
    Raw,
    *const c_void,
    Raw,
    c_int,
    *mut c_void,
    usize,
    *const c_void,
    Raw,
    *mut c_void,
) -> Status;

/// The functions for one of the three products that a convolution has, with their names.
pub(super) struct Kind {
    pub heuristics: (&'static str, Heuristics),
    pub workspace: (&'static str, Workspace),
    pub run: (&'static str, Run),
}

/// The functions in use.
pub(super) struct Calls {
    version: unsafe extern "C" fn() -> usize,
    /// The version of CUDA that the library was built with.
    of_cuda: unsafe extern "C" fn() -> usize,
    error_string: unsafe extern "C" fn(Status) -> *const c_char,
    last_error: unsafe extern "C" fn(*mut c_char, usize),
    pub handle: Objects,
    pub set_stream: unsafe extern "C" fn(Raw, *mut c_void) -> Status,
    pub tensor: Objects,
    pub set_tensor: unsafe extern "C" fn(Raw, c_int, c_int, *const c_int, *const c_int) -> Status,
    pub filter: Objects,
    pub set_filter: unsafe extern "C" fn(Raw, c_int, c_int, c_int, *const c_int) -> Status,
    pub convolution: Objects,
    pub set_convolution: unsafe extern "C" fn(
        Raw,
        c_int,
        *const c_int,
        *const c_int,
        *const c_int,
        c_int,
        c_int,
    ) -> Status,
    pub set_groups: unsafe extern "C" fn(Raw, c_int) -> Status,
    pub set_math: unsafe extern "C" fn(Raw, c_int) -> Status,
    pub forward: Kind,
    pub input_grad: Kind,
    pub weight_grad: Kind,
}

impl Calls {
    /// The cuDNN of the process, located and bound at the first use. It is of no newer major version
    /// of CUDA than the driver.
    pub fn bound() -> Result<&'static Calls, LibraryError> {
        static BOUND: OnceLock<Result<Calls, Missing>> = OnceLock::new();
        // The files that are found depend on the driver, if there is one.
        let _ = driver::start();
        let bound = BOUND.get_or_init(|| {
            // Parts of cuDNN load cuBLASLt by its name.
            let _ = Library::CublasLt.open();
            Library::Cudnn.bind(Calls::of)
        });
        let calls = bound.as_ref().map_err(Clone::clone)?;
        // SAFETY: it may be called at any time.
        Library::Cudnn.suits_driver(unsafe { (calls.of_cuda)() } / 1000)?;
        Ok(calls)
    }

    fn of(library: &libloading::Library, file: Display<'_>) -> Result<Calls, String> {
        macro_rules! call {
            ($name:expr) => {
                // SAFETY: the call is of this type in all versions with this major number.
                *unsafe { library.get($name.as_bytes()) }
                    .map_err(|e| format!(": {file} lacks {}: {e}", $name))?
            };
        }
        macro_rules! objects {
            ($create:literal, $destroy:literal) => {
                Objects {
                    create: call!($create),
                    destroy: call!($destroy),
                }
            };
        }
        macro_rules! kind {
            ($heuristics:literal, $workspace:literal, $run:literal) => {
                Kind {
                    heuristics: ($heuristics, call!($heuristics)),
                    workspace: ($workspace, call!($workspace)),
                    run: ($run, call!($run)),
                }
            };
        }
        Ok(Calls {
            version: call!("cudnnGetVersion"),
            of_cuda: call!("cudnnGetCudartVersion"),
            error_string: call!("cudnnGetErrorString"),
            last_error: call!("cudnnGetLastErrorString"),
            handle: objects!("cudnnCreate", "cudnnDestroy"),
            set_stream: call!("cudnnSetStream"),
            tensor: objects!(
                "cudnnCreateTensorDescriptor",
                "cudnnDestroyTensorDescriptor"
            ),
            set_tensor: call!("cudnnSetTensorNdDescriptor"),
            filter: objects!(
                "cudnnCreateFilterDescriptor",
                "cudnnDestroyFilterDescriptor"
            ),
            set_filter: call!("cudnnSetFilterNdDescriptor"),
            convolution: objects!(
                "cudnnCreateConvolutionDescriptor",
                "cudnnDestroyConvolutionDescriptor"
            ),
            set_convolution: call!("cudnnSetConvolutionNdDescriptor"),
            set_groups: call!("cudnnSetConvolutionGroupCount"),
            set_math: call!("cudnnSetConvolutionMathType"),
            forward: kind!(
                "cudnnGetConvolutionForwardAlgorithm_v7",
                "cudnnGetConvolutionForwardWorkspaceSize",
                "cudnnConvolutionForward"
            ),
            input_grad: kind!(
                "cudnnGetConvolutionBackwardDataAlgorithm_v7",
                "cudnnGetConvolutionBackwardDataWorkspaceSize",
                "cudnnConvolutionBackwardData"
            ),
            weight_grad: kind!(
                "cudnnGetConvolutionBackwardFilterAlgorithm_v7",
                "cudnnGetConvolutionBackwardFilterWorkspaceSize",
                "cudnnConvolutionBackwardFilter"
            ),
        })
    }

    /// The version: 92801 for 9.28.1.
    pub fn version(&self) -> usize {
        // SAFETY: it may be called at any time.
        unsafe { (self.version)() }
    }

    /// The result of a call.
    pub fn check(&self, call: &'static str, status: Status) -> Result<(), LibraryError> {
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
        let mut status = known.unwrap_or_else(|| format!("error {status}"));
        let mut more = [0u8; 512];
        // SAFETY: the buffer holds so many bytes, the last of which stays 0.
        unsafe { (self.last_error)(more.as_mut_ptr().cast(), more.len() - 1) };
        if let Ok(more) = CStr::from_bytes_until_nul(&more)
            && !more.is_empty()
        {
            status += &format!(" ({})", more.to_string_lossy().trim());
        }
        Err(LibraryError::Failed {
            library: Library::Cudnn,
            call,
            status,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn a_library_without_a_function_is_refused() {
        let file = Path::new("libc.so.6");
        // SAFETY: this process is linked to it already, so that no initializer runs.
        let other = unsafe { libloading::Library::new(file) }.expect("the C library");
        let why = Calls::of(&other, file.display())
            .err()
            .expect("it is no cuDNN");
        assert!(
            why.starts_with(": libc.so.6 lacks cudnnGetVersion"),
            "{why}"
        );
    }

    /// The size in the library's header.
    #[test]
    fn an_algorithm_is_described_in_48_bytes() {
        use std::mem::{offset_of, size_of};
        let offsets = [
            offset_of!(Performance, algorithm),
            offset_of!(Performance, status),
            offset_of!(Performance, milliseconds),
            offset_of!(Performance, workspace),
            offset_of!(Performance, determinism),
            offset_of!(Performance, math),
            offset_of!(Performance, reserved),
            size_of::<Performance>(),
        ];
        assert_eq!(offsets, [0, 4, 8, 16, 24, 28, 32, 48]);
    }
}
