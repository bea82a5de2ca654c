//! The parts of the CUDA driver that slabwise uses: each resource is released when its owner is
//! dropped, and each failed call is named in its error.
//!
//! Types are those of cudarc's bindings. Its safe layer is not used because it tracks events for
//! every allocation, which captured graphs must not contain, and has no address ranges.

mod calls;
mod clock;
mod edges;
mod module;
mod range;

use std::ffi::{CStr, c_int, c_void};
use std::ptr::{NonNull, null, null_mut};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

use cudarc::driver::sys::{self, CUresult};

use calls::Status;
pub(crate) use clock::{Clock, Timestamps};
pub(crate) use edges::{Edges, Node, Recording};
pub(crate) use module::{Function, Module};
pub(crate) use range::{AddressRange, Physical, page_bytes};

use crate::abi::Target;
use crate::description::{Attributes, Block, Description, Multiprocessor};
use crate::libraries::{Library, LibraryError, Missing, set_driver_major};
use crate::nvrtc;

/// Why the device did not do a requested operation.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DriverError {
    /// There is no driver.
    #[error(transparent)]
    Missing(#[from] Missing),
    /// The driver does not run this compiler's code, or lacks the calls that are made.
    #[error("the driver is of CUDA {}.{}, older than the {needed}.0 that is needed; {}", found.0, found.1, newer(*found, *needed))]
    TooOld {
        /// The driver's CUDA version.
        found: (u32, u32),
        /// The required major version.
        needed: u32,
    },
    /// There is no device of this number.
    #[error("there {}", match count { 0 => "is no CUDA device".to_string(), 1 => "is one CUDA device, cuda:0".to_string(), n => format!("are {n} CUDA devices, cuda:0 to cuda:{}", n - 1) })]
    NoDevice {
        /// The number of devices.
        count: u32,
    },
    /// The device has too little memory.
    #[error("the driver has no {bytes} bytes to give")]
    OutOfMemory {
        /// The requested bytes.
        bytes: u64,
    },
    /// A kernel failed: the driver answers every further call of the process with the same error.
    #[error("the device is lost: {0}; start a new process")]
    Lost(String),
    /// No kernel can be compiled for the device.
    #[error(transparent)]
    Compiler(#[from] nvrtc::Error),
    /// A library call failed.
    #[error(transparent)]
    Library(#[from] LibraryError),
    /// A call failed.
    #[error("{call} failed: {code}")]
    Failed {
        /// The call.
        call: &'static str,
        /// The driver's number for the failure; 0 if the driver was not called.
        status: i32,
        /// The driver's name and text for it.
        code: String,
    },
}

type Result<T> = std::result::Result<T, DriverError>;

/// Errors after which the driver answers every call of the process with the same error.
const FATAL: [CUresult; 18] = [
    CUresult::CUDA_ERROR_ILLEGAL_ADDRESS,
    CUresult::CUDA_ERROR_LAUNCH_TIMEOUT,
    CUresult::CUDA_ERROR_ASSERT,
    CUresult::CUDA_ERROR_HARDWARE_STACK_ERROR,
    CUresult::CUDA_ERROR_ILLEGAL_INSTRUCTION,
    CUresult::CUDA_ERROR_MISALIGNED_ADDRESS,
    CUresult::CUDA_ERROR_INVALID_ADDRESS_SPACE,
    CUresult::CUDA_ERROR_INVALID_PC,
    CUresult::CUDA_ERROR_LAUNCH_FAILED,
    CUresult::CUDA_ERROR_TENSOR_MEMORY_LEAK,
    CUresult::CUDA_ERROR_ECC_UNCORRECTABLE,
    CUresult::CUDA_ERROR_NVLINK_UNCORRECTABLE,
    CUresult::CUDA_ERROR_CONTAINED,
    CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED,
    CUresult::CUDA_ERROR_DEINITIALIZED,
    CUresult::CUDA_ERROR_MPS_CLIENT_TERMINATED,
    CUresult::CUDA_ERROR_EXTERNAL_DEVICE,
    CUresult::CUDA_ERROR_UNKNOWN,
];

/// The result of a call.
fn check(call: &'static str, status: Status) -> Result<()> {
    let is = |error: &CUresult| *error as Status == status;
    if is(&CUresult::CUDA_SUCCESS) {
        Ok(())
    } else if is(&CUresult::CUDA_ERROR_OUT_OF_MEMORY) {
        Err(DriverError::OutOfMemory { bytes: 0 })
    } else if FATAL.iter().any(is) {
        let error = describe(status);
        Err(DriverError::Lost(format!("{call} answered {error}")))
    } else {
        Err(DriverError::Failed {
            call,
            status,
            code: describe(status),
        })
    }
}

/// The driver's name and text for an error.
fn describe(status: Status) -> String {
    let text = |of: unsafe fn(Status, *mut *const std::ffi::c_char) -> Status| {
        let mut text = null();
        // SAFETY: the pointer is valid for writing; the driver sets it to a static text.
        let known = unsafe { of(status, &mut text) } == 0 && !text.is_null();
        known.then(|| {
            // SAFETY: as above.
            unsafe { CStr::from_ptr(text) }
                .to_string_lossy()
                .into_owned()
        })
    };
    let name = text(calls::cuGetErrorName).unwrap_or_else(|| format!("error {status}"));
    text(calls::cuGetErrorString).map_or(name.clone(), |more| format!("{name} ({more})"))
}

/// The same error with the number of requested bytes.
fn of_bytes(bytes: u64) -> impl FnOnce(DriverError) -> DriverError {
    move |e| {
        if matches!(e, DriverError::OutOfMemory { .. }) {
            DriverError::OutOfMemory { bytes }
        } else {
            e
        }
    }
}

/// Opens and starts the driver, once for the process, and returns its CUDA version.
///
/// # Errors
/// If there is none, or it does not start.
pub fn start() -> Result<(u32, u32)> {
    static STARTED: OnceLock<Result<()>> = OnceLock::new();
    let start = || {
        let calls = [
            c"cuInit",
            c"cuDriverGetVersion",
            c"cuGetErrorName",
            c"cuGetErrorString",
        ];
        // SAFETY: initialisers of the library may run at any time, and it is found before it is used.
        Library::Driver.bind_by_name(calls, || unsafe {
            let found = sys::is_culib_present().then(|| sys::culib())?;
            found
                .get::<*const c_void>(b"cuInit\0")
                .ok()
                .map(|call| *call)
        })?;
        // SAFETY: the library is open. cuInit may be called at any time.
        check("cuInit", unsafe { calls::cuInit(0) })
    };
    STARTED.get_or_init(start).clone()?;
    let mut version: c_int = 0;
    // SAFETY: the driver has been started, and the pointer is valid for writing.
    check("cuDriverGetVersion", unsafe {
        calls::cuDriverGetVersion(&mut version)
    })?;
    let (major, minor) = (version as u32 / 1000, version as u32 % 1000 / 10);
    set_driver_major(major);
    Ok((major, minor))
}

/// Advice to make the driver and the code that needs it compatible.
fn newer(found: (u32, u32), needed: u32) -> String {
    // NVIDIA's first driver of each CUDA version.
    let install = match needed {
        ..=12 => "install NVIDIA's driver 525 or newer",
        13 => "install NVIDIA's driver 580 or newer",
        _ => "install a newer driver of NVIDIA's",
    };
    match found.0 {
        12 if needed > 12 => format!(
            "{install}, or let it have a compiler of its version: pip install nvidia-cuda-nvrtc-cu12, and name its folder in SLABWISE_LIBNVRTC"
        ),
        _ => install.into(),
    }
}

/// The number of devices.
///
/// # Errors
/// If there is no driver.
pub fn device_count() -> Result<u32> {
    start()?;
    let mut count: c_int = 0;
    // SAFETY: the driver has been started, and the pointer is valid for writing.
    check("cuDeviceGetCount", unsafe {
        calls::cuDeviceGetCount(&mut count)
    })?;
    Ok(count.max(0) as u32)
}

/// The properties of a device.
#[derive(Clone, Debug, PartialEq)]
pub struct Properties {
    /// Its limits and rates.
    pub description: Description,
    /// The target for which source is generated.
    pub target: Target,
    /// Total memory, bytes.
    pub total_bytes: u64,
    /// Whether memory can be mapped to addresses page by page.
    pub maps_pages: bool,
}

/// The properties of a device.
///
/// # Errors
/// If there is no such device.
pub fn properties(ordinal: u32) -> Result<Properties> {
    use sys::CUdevice_attribute as A;
    let count = device_count()?;
    if ordinal >= count {
        return Err(DriverError::NoDevice { count });
    }
    let mut device = 0;
    // SAFETY: the driver has been started, and the pointer is valid for writing.
    check("cuDeviceGet", unsafe {
        calls::cuDeviceGet(&mut device, ordinal as c_int)
    })?;
    let attribute = |which: A| -> Result<u32> {
        let mut value = 0;
        // SAFETY: as above; the device exists.
        check("cuDeviceGetAttribute", unsafe {
            calls::cuDeviceGetAttribute(&mut value, which, device)
        })?;
        Ok(value.max(0) as u32)
    };
    // 0 if the driver does not know it.
    let optional = |which: A| match attribute(which) {
        Err(DriverError::Failed { .. }) => Ok(0),
        known => known,
    };
    let mut name = [0u8; 128];
    // SAFETY: as above; the name is as long as it is said to be.
    check("cuDeviceGetName", unsafe {
        calls::cuDeviceGetName(name.as_mut_ptr().cast(), name.len() as c_int, device)
    })?;
    let mut total = 0;
    // SAFETY: as above.
    check("cuDeviceTotalMem", unsafe {
        calls::cuDeviceTotalMem_v2(&mut total, device)
    })?;
    let major = attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
    let minor = attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
    let wave_width = attribute(A::CU_DEVICE_ATTRIBUTE_WARP_SIZE)?;
    let threads = attribute(A::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR)?;
    // Clocks are in kHz; memory transfers twice per cycle.
    let memory_khz = f64::from(optional(A::CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE)?);
    let bus_bits = f64::from(attribute(A::CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH)?);
    let reported = Attributes {
        capability: 10 * major + minor,
        wave_width,
        multiprocessors: attribute(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        clock_mhz: f64::from(optional(A::CU_DEVICE_ATTRIBUTE_CLOCK_RATE)?) / 1e3,
        multiprocessor: Multiprocessor {
            registers: attribute(A::CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR)?,
            waves: threads / wave_width.max(1),
            blocks: attribute(A::CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR)?,
            shared_bytes: attribute(A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR)?,
        },
        block: Block {
            shared_bytes: attribute(A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK)?,
            shared_bytes_max: attribute(A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
        },
        memory: 2.0 * 1e3 * memory_khz * bus_bits / 8.0 / 1e9,
        cache_bytes: attribute(A::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?.into(),
    };
    let name = CStr::from_bytes_until_nul(&name)
        .map(|n| n.to_string_lossy().into_owned())
        .unwrap_or_default();
    let maps_pages = attribute(A::CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED)? != 0;
    let description = Description::of(&name, &reported);
    Ok(Properties {
        target: description.target(),
        description,
        total_bytes: total as u64,
        maps_pages,
    })
}

/// A device's primary context, shared by all work of a process on it.
#[derive(Debug)]
pub(crate) struct Context {
    device: sys::CUdevice,
    raw: sys::CUcontext,
}

// SAFETY: the driver takes calls for a context from any thread.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    pub fn of(ordinal: u32) -> Result<Context> {
        let (mut device, mut raw) = (0, null_mut());
        // SAFETY: the pointers are valid for writing.
        check("cuDeviceGet", unsafe {
            calls::cuDeviceGet(&mut device, ordinal as c_int)
        })?;
        // SAFETY: as above; the device exists.
        check("cuDevicePrimaryCtxRetain", unsafe {
            calls::cuDevicePrimaryCtxRetain(&mut raw, device)
        })?;
        let context = Context { device, raw };
        context.bind()?;
        Ok(context)
    }

    /// Makes the context current for the calling thread.
    pub fn bind(&self) -> Result<()> {
        // SAFETY: the context is retained as long as `self` lives.
        check("cuCtxSetCurrent", unsafe {
            calls::cuCtxSetCurrent(self.raw)
        })
    }

    pub fn device(&self) -> c_int {
        self.device
    }

    /// Free and total bytes of the device.
    pub fn memory(&self) -> Result<(u64, u64)> {
        self.bind()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: the pointers are valid for writing.
        check("cuMemGetInfo", unsafe {
            calls::cuMemGetInfo_v2(&mut free, &mut total)
        })?;
        Ok((free as u64, total as u64))
    }

    /// Allocates device memory.
    pub fn allocate(&self, bytes: u64) -> Result<u64> {
        self.bind()?;
        let mut address = 0;
        // SAFETY: the pointer is valid for writing.
        check("cuMemAlloc", unsafe {
            calls::cuMemAlloc_v2(&mut address, bytes as usize)
        })
        .map_err(of_bytes(bytes))?;
        Ok(address)
    }

    /// Frees device memory; work that uses it must be done.
    pub fn free(&self, address: u64) {
        // SAFETY: the caller got the address from `allocate` and frees it once. A lost context has
        // freed it already.
        let _ = self
            .bind()
            .and_then(|()| check("cuMemFree", unsafe { calls::cuMemFree_v2(address) }));
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: it was retained once and is released only here.
        unsafe { calls::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}

/// A queue of work. Its context is current and outlives it.
#[derive(Debug)]
pub(crate) struct Stream {
    raw: sys::CUstream,
    /// Held while work is captured.
    recording: Mutex<()>,
}

// SAFETY: the driver takes calls for a stream from any thread.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    /// A stream that does not synchronize with the default stream.
    pub fn new() -> Result<Stream> {
        let mut raw = null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the pointer is valid for writing.
        check("cuStreamCreate", unsafe {
            calls::cuStreamCreate(&mut raw, flags)
        })?;
        Ok(Stream {
            raw,
            recording: Mutex::default(),
        })
    }

    /// The stream as NVIDIA's other libraries expect it.
    pub fn raw(&self) -> *mut c_void {
        self.raw.cast()
    }

    pub fn synchronize(&self) -> Result<()> {
        // SAFETY: the stream lives.
        check("cuStreamSynchronize", unsafe {
            calls::cuStreamSynchronize(self.raw)
        })
    }

    /// Makes the work submitted from here on wait for the most recent record of the event.
    pub fn wait(&self, event: &Event) -> Result<()> {
        // SAFETY: both live.
        check("cuStreamWaitEvent", unsafe {
            calls::cuStreamWaitEvent(self.raw, event.0, 0)
        })
    }

    /// Copies from host memory.
    ///
    /// # Safety
    /// `to` is memory of the device; `from` is memory of the host that is not modified
    /// until the copy is done.
    pub unsafe fn upload(&self, to: u64, from: *const u8, bytes: usize) -> Result<()> {
        // SAFETY: the caller's promise.
        check("cuMemcpyHtoDAsync", unsafe {
            calls::cuMemcpyHtoDAsync_v2(to, from.cast(), bytes, self.raw)
        })
    }

    /// Copies to host memory.
    ///
    /// # Safety
    /// `from` is memory of the device; `to` is memory of the host that is not accessed
    /// until the copy is done.
    pub unsafe fn download(&self, to: *mut u8, from: u64, bytes: usize) -> Result<()> {
        // SAFETY: the caller's promise.
        check("cuMemcpyDtoHAsync", unsafe {
            calls::cuMemcpyDtoHAsync_v2(to.cast(), from, bytes, self.raw)
        })
    }

    /// Copies within the device.
    ///
    /// # Safety
    /// Both are memory of the device and do not overlap.
    pub unsafe fn copy(&self, to: u64, from: u64, bytes: usize) -> Result<()> {
        // SAFETY: the caller's promise.
        check("cuMemcpyDtoDAsync", unsafe {
            calls::cuMemcpyDtoDAsync_v2(to, from, bytes, self.raw)
        })
    }

    /// Fills memory with a byte.
    ///
    /// # Safety
    /// It is memory of the device.
    pub unsafe fn fill(&self, to: u64, byte: u8, bytes: usize) -> Result<()> {
        // SAFETY: the caller's promise.
        check("cuMemsetD8Async", unsafe {
            calls::cuMemsetD8Async(to, byte, bytes, self.raw)
        })
    }

    /// Launches a kernel whose one parameter is `words`.
    ///
    /// # Safety
    /// The function takes at most so many words and accesses through them only memory that it may.
    pub unsafe fn launch(
        &self,
        function: Function,
        grid: [u32; 3],
        block: [u32; 3],
        shared_bytes: u32,
        words: &[u64],
    ) -> Result<()> {
        let mut parameters = [words.as_ptr().cast_mut().cast::<c_void>()];
        let ([gx, gy, gz], [bx, by, bz]) = (grid, block);
        // SAFETY: the driver copies the parameter before it returns; the rest is the caller's
        // promise.
        let launched = unsafe {
            calls::cuLaunchKernel(
                function.raw(),
                gx,
                gy,
                gz,
                bx,
                by,
                bz,
                shared_bytes,
                self.raw,
                parameters.as_mut_ptr(),
                null_mut(),
            )
        };
        check("cuLaunchKernel", launched)
    }

    /// Waits until all work is done. Waits first for a capture by another thread, which
    /// synchronization would invalidate.
    pub fn quiesce(&self) -> Result<()> {
        let _alone = self
            .recording
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        self.synchronize()
    }

    /// Captures the work that `work` submits to this stream, instead of executing it, and uploads the
    /// graph to the device.
    ///
    /// `work` may make any call that does not wait for the stream: the relaxed mode is needed
    /// because libraries allocate memory and load kernels at the first use of a kernel, which the
    /// driver refuses in the other modes.
    pub fn capture(&self, work: impl FnOnce() -> Result<()>) -> Result<Graph> {
        let _alone = self
            .recording
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the stream lives and is not being captured.
        check("cuStreamBeginCapture", unsafe {
            calls::cuStreamBeginCapture_v2(self.raw, mode)
        })?;
        let mut capture = Capture {
            stream: self,
            is_over: false,
        };
        let submitted = work();
        let captured = capture.end();
        let captured = submitted.and(captured)?;
        let mut made = null_mut();
        // SAFETY: the pointer is valid for writing, and the graph was captured.
        check("cuGraphInstantiate", unsafe {
            calls::cuGraphInstantiateWithFlags(&mut made, captured.0, 0)
        })?;
        let made = Graph(made);
        // Otherwise its first launch uploads it, which takes long and may be refused.
        // SAFETY: both live.
        check("cuGraphUpload", unsafe {
            calls::cuGraphUpload(made.0, self.raw)
        })?;
        Ok(made)
    }

    pub fn replay(&self, graph: &Graph) -> Result<()> {
        // SAFETY: both live.
        check("cuGraphLaunch", unsafe {
            calls::cuGraphLaunch(graph.0, self.raw)
        })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: it was created and is destroyed only here.
        unsafe { calls::cuStreamDestroy_v2(self.raw) };
    }
}

/// A capture of a stream's work, which ends with this at the latest: also if the work panics.
struct Capture<'a> {
    stream: &'a Stream,
    is_over: bool,
}

impl Capture<'_> {
    fn end(&mut self) -> Result<Captured> {
        self.is_over = true;
        let mut graph = Captured(null_mut());
        // SAFETY: the stream lives and is being captured, and the pointer is valid for writing.
        check("cuStreamEndCapture", unsafe {
            calls::cuStreamEndCapture(self.stream.raw, &mut graph.0)
        })?;
        Ok(graph)
    }
}

impl Drop for Capture<'_> {
    fn drop(&mut self) {
        if !self.is_over {
            let _ = self.end();
        }
    }
}

/// Captured work from which a graph is made, which does not need it any more then.
struct Captured(sys::CUgraph);

impl Drop for Captured {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: it was captured and is destroyed only here.
            unsafe { calls::cuGraphDestroy(self.0) };
        }
    }
}

/// Captured work that can be launched repeatedly. Its context is current and outlives it.
#[derive(Debug)]
pub(crate) struct Graph(sys::CUgraphExec);

// SAFETY: an executable graph may be launched from any thread, though not from two at once: it is
// used through a lock.
unsafe impl Send for Graph {}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: it was instantiated and is destroyed only here; the driver keeps it while it
        // runs.
        unsafe { calls::cuGraphExecDestroy(self.0) };
    }
}

/// A point in a stream's work. Its context is current and outlives it.
#[derive(Debug)]
pub(crate) struct Event(sys::CUevent);

// SAFETY: the driver takes calls for an event from any thread.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// An event for synchronization, without timing.
    pub fn new() -> Result<Event> {
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING;
        let mut raw = null_mut();
        // SAFETY: the pointer is valid for writing.
        check("cuEventCreate", unsafe {
            calls::cuEventCreate(&mut raw, flags as u32)
        })?;
        Ok(Event(raw))
    }

    pub fn record(&self, stream: &Stream) -> Result<()> {
        // SAFETY: both live.
        check("cuEventRecord", unsafe {
            calls::cuEventRecord(self.0, stream.raw)
        })
    }

    /// Blocks the host until the event is reached.
    pub fn synchronize(&self) -> Result<()> {
        // SAFETY: the event lives.
        check("cuEventSynchronize", unsafe {
            calls::cuEventSynchronize(self.0)
        })
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: it was created and is destroyed only here.
        unsafe { calls::cuEventDestroy_v2(self.0) };
    }
}

/// Page-locked host memory, which the device accesses directly. Its context is current and outlives
/// it.
#[derive(Debug)]
pub(crate) struct Pinned {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: it owns its memory, which is read by shared and written by exclusive reference, except
// for concurrent writes by devices.
unsafe impl Send for Pinned {}
// SAFETY: as above.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// So many bytes of zeros.
    pub fn new(bytes: usize) -> Result<Pinned> {
        let mut raw = null_mut();
        // Not write-combined memory, which would be slow to read.
        // SAFETY: the pointer is valid for writing.
        check("cuMemHostAlloc", unsafe {
            calls::cuMemHostAlloc(&mut raw, bytes.max(1), 0)
        })
        .map_err(of_bytes(bytes as u64))?;
        let start = NonNull::new(raw.cast::<u8>()).ok_or(DriverError::OutOfMemory {
            bytes: bytes as u64,
        })?;
        // SAFETY: it is as long as was requested.
        unsafe { start.as_ptr().write_bytes(0, bytes) };
        Ok(Pinned { start, bytes })
    }

    pub fn len(&self) -> usize {
        self.bytes
    }

    pub fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// The bytes for writing, while no device copies from them.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: it is initialised, and borrowed exclusively; a caller that has started a device
        // copy waits for it before borrowing again.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.bytes) }
    }

    /// A word, which a device may write at any time.
    pub fn word(&self, at: usize) -> u64 {
        self.atomic(at).load(Ordering::Acquire)
    }

    /// Sets a word.
    pub fn set_word(&self, at: usize, value: u64) {
        self.atomic(at).store(value, Ordering::Release);
    }

    fn atomic(&self, at: usize) -> &AtomicU64 {
        let bytes = size_of::<u64>();
        assert!(self.bytes / bytes > at, "word {at} of {} bytes", self.bytes);
        // SAFETY: the driver's memory starts at a page, is long enough, and lives as long as
        // `self`.
        unsafe { AtomicU64::from_ptr(self.start.as_ptr().add(at * bytes).cast()) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: it was allocated and is freed only here.
        unsafe { calls::cuMemFreeHost(self.start.as_ptr().cast()) };
    }
}
