//! A device as a session uses it: a stream of work on arenas of its memory, and the record of its
//! failures.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use slabwise_kernels::memory::Region;

use crate::arenas::Arena;
use crate::copies::CopyStreams;
use crate::driver::{self, Context, DriverError, Pinned, Properties, Stream, Timestamps};
use crate::handles::Handles;
use crate::nvrtc::{self, Architecture};
use crate::prefetch::Queue;
use crate::program::GraphEdges;
use crate::reservation::{Limits, Reservation, Usage};
use crate::staging::Staging;

type Result<T, E = DriverError> = std::result::Result<T, E>;

/// The state that all sessions of a process share: the context and the memory reservation of a
/// device.
#[derive(Debug)]
pub(crate) struct Shared {
    ordinal: u32,
    pub(crate) properties: Properties,
    reservation: Mutex<Option<Reservation>>,
    /// The first error after which the device accepts no work.
    lost: OnceLock<String>,
    pub(crate) libraries: Handles,
    pub(crate) context: Context,
    /// Dropped last.
    _open: OpenDevice,
}

/// The devices that the process has open: by number, until all of their state is dropped.
static OPEN: Mutex<Vec<(u32, Weak<Shared>)>> = Mutex::new(Vec::new());
/// Notified when a device is no longer open.
static CLOSED: Condvar = Condvar::new();

fn all_open() -> MutexGuard<'static, Vec<(u32, Weak<Shared>)>> {
    OPEN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The entry of a device, by its number, in the list of those that are open.
#[derive(Debug)]
struct OpenDevice(u32);

impl Drop for OpenDevice {
    fn drop(&mut self) {
        all_open().retain(|(ordinal, _)| *ordinal != self.0);
        CLOSED.notify_all();
    }
}

/// The devices that the process has lost, and the first error of each. Only a new process can use
/// them again.
static LOST: Mutex<Vec<(u32, String)>> = Mutex::new(Vec::new());

fn lost() -> MutexGuard<'static, Vec<(u32, String)>> {
    LOST.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Forgets that devices were lost, as in a new process; for tests.
#[cfg(feature = "emulator")]
pub(crate) fn forget_lost() {
    lost().clear();
}

impl Shared {
    /// The device's shared state, opened if no session has it open. Waits for a thread that is
    /// closing the device, which has its memory until then.
    pub(crate) fn of(ordinal: u32) -> Result<Arc<Shared>> {
        let properties = driver::properties(ordinal)?;
        let mut open = all_open();
        while let Some((_, shared)) = open.iter().find(|(of, _)| *of == ordinal) {
            if let Some(shared) = shared.upgrade() {
                // If this is the last reference after a failure, dropping it takes the lock.
                drop(open);
                shared.context.bind()?;
                return Ok(shared);
            }
            open = CLOSED.wait(open).unwrap_or_else(PoisonError::into_inner);
        }
        let context = Context::of(ordinal)?;
        let shared = Arc::new(Shared {
            ordinal,
            properties,
            reservation: Mutex::new(None),
            lost: OnceLock::new(),
            libraries: Handles::default(),
            context,
            _open: OpenDevice(ordinal),
        });
        open.push((ordinal, Arc::downgrade(&shared)));
        Ok(shared)
    }

    /// Records that the process has lost the device, if the result says so.
    fn noting<T>(&self, result: Result<T>) -> Result<T> {
        // The first reason is the informative one.
        if let Err(DriverError::Lost(why)) = &result
            && self.lost.set(why.clone()).is_ok()
        {
            lost().push((self.ordinal, why.clone()));
        }
        result
    }

    pub(crate) fn reservation(&self) -> MutexGuard<'_, Option<Reservation>> {
        self.reservation
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // Libraries are dropped next, and require their context to be current.
        let _ = self.context.bind();
        if let Some(mut reservation) = self.reservation().take() {
            reservation.close(&self.context);
        }
    }
}

/// The first index of a run that was out of range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The step of the program that found it.
    pub step: u32,
    /// Its row-major position among the indices.
    pub position: u32,
    /// The index.
    pub value: i32,
}

/// The value of both words of a fault record without a fault.
const NO_FAULT: u64 = u64::MAX;
/// Bytes of a fault record; see [`Word::Fault`](crate::Word::Fault).
const FAULT_BYTES: usize = 2 * size_of::<u64>();

/// A CUDA device, opened for one session.
///
/// All work goes to one stream, in the order in which it is submitted; a method waits for it only
/// where its documentation says so. Inputs of a run are copied on a second stream while earlier
/// runs execute, to their own memory; offload and prefetch copies use two more streams.
#[derive(Debug)]
pub struct Device {
    pub(crate) stream: Arc<Stream>,
    pub(crate) transfers: Stream,
    pub(crate) staging: Staging,
    pub(crate) queues: Vec<Queue>,
    /// Set once copies to the host are prepared.
    pub(crate) copy_streams: Option<CopyStreams>,
    pub(crate) arenas: Vec<Option<Arena>>,
    /// For profiles.
    pub(crate) marks: Timestamps,
    fault: u64,
    seen: Pinned,
    /// The most of a graph's edges that the code allows and the driver has accepted.
    pub(crate) edges: GraphEdges,
    pub(crate) limits: Limits,
    pub(crate) shared: Arc<Shared>,
}

/// Checks whether a device is usable: the driver, the device and a compiler exist, the compiler
/// generates code for the device, the driver accepts that code, and the process has not lost the
/// device.
///
/// # Errors
/// The missing part.
pub fn usable(ordinal: u32) -> Result<()> {
    if let Some((_, why)) = lost().iter().find(|(device, _)| *device == ordinal) {
        return Err(DriverError::Lost(why.clone()));
    }
    let found = driver::start()?;
    let sm = driver::properties(ordinal)?.target.sm;
    let compiler = nvrtc::version().map_err(|e| match e {
        nvrtc::Error::Missing(missing) => DriverError::Missing(missing),
        other => DriverError::Compiler(other),
    })?;
    nvrtc::suffices(compiler)?;
    let needed = compiler.0;
    if found.0 < needed {
        return Err(DriverError::TooOld { found, needed });
    }
    if let Architecture::Ptx(older) = nvrtc::architecture(sm)? {
        let (major, minor) = compiler;
        log::info!(
            "NVRTC {major}.{minor} does not know sm_{sm}: it makes PTX for compute_{older}, which the driver compiles"
        );
    }
    Ok(())
}

impl Device {
    /// Opens a device. Its memory is reserved at the first use. If the process already uses the
    /// device, the limits of its first use stay in force.
    ///
    /// # Errors
    /// If there is no driver, no such device, no compiler, or the driver is older than the
    /// compiler's code requires.
    pub fn open(ordinal: u32, limits: Limits) -> Result<Device> {
        usable(ordinal)?;
        let shared = Shared::of(ordinal)?;
        // Otherwise a kernel that is launched early would not wait.
        let edges = match nvrtc::architecture(shared.properties.target.sm)?.waits() {
            true => GraphEdges::Early,
            false => GraphEdges::Dependencies,
        };
        let seen = Pinned::new(FAULT_BYTES)?;
        (0..2).for_each(|at| seen.set_word(at, NO_FAULT));
        Ok(Device {
            stream: Arc::new(Stream::new()?),
            transfers: Stream::new()?,
            staging: Staging::new()?,
            queues: Vec::new(),
            copy_streams: None,
            arenas: Vec::new(),
            marks: Timestamps::default(),
            fault: 0,
            seen,
            edges,
            limits,
            shared,
        })
    }

    /// Changes the limits of the device's memory; those in force stay while any of it is reserved.
    pub fn set_limits(&mut self, limits: Limits) {
        self.limits = limits;
    }

    /// The limits of the device's memory that were requested last.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// The properties of the device.
    pub fn properties(&self) -> &Properties {
        &self.shared.properties
    }

    /// This process's use of the device's memory.
    pub fn usage(&self) -> Usage {
        self.shared
            .reservation()
            .as_ref()
            .map(Reservation::usage)
            .unwrap_or_default()
    }

    /// Free and total bytes of the device, as the driver reports them.
    pub fn memory(&self) -> Result<(u64, u64)> {
        self.noting(self.shared.context.memory())
    }

    /// Records that the device is lost, if the result says so.
    pub(crate) fn noting<T>(&self, result: Result<T>) -> Result<T> {
        self.shared.noting(result)
    }

    /// Makes the context current for this thread, unless the device is lost.
    pub(crate) fn ready(&self) -> Result<()> {
        match self.shared.lost.get() {
            Some(why) => Err(DriverError::Lost(why.clone())),
            None => self.noting(self.shared.context.bind()),
        }
    }

    /// Waits until all work is done.
    ///
    /// # Errors
    /// If a kernel failed: the device is lost.
    pub fn synchronize(&self) -> Result<()> {
        self.ready()?;
        self.noting(self.stream.synchronize())
    }

    /// Waits until no stream has work, those of inputs and copies among them.
    pub(crate) fn synchronize_all(&self) -> Result<()> {
        self.synchronize()?;
        self.noting(self.transfers.synchronize())?;
        self.settle_copies()
    }

    /// Writes a region's bytes, after all work submitted before.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn write(&self, region: &Region, bytes: &[u8]) -> Result<()> {
        self.ready()?;
        assert_eq!(region.bytes, bytes.len() as u64, "bytes for {region:?}");
        if bytes.is_empty() {
            return Ok(());
        }
        // SAFETY: the region is memory of the device, as `address` checked; the copy is waited for.
        self.noting(unsafe {
            self.stream
                .upload(self.address(region), bytes.as_ptr(), bytes.len())
        })?;
        self.synchronize()
    }

    /// Reads a region's bytes, after all work submitted before.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn read(&self, region: &Region, bytes: &mut [u8]) -> Result<()> {
        self.ready()?;
        assert_eq!(region.bytes, bytes.len() as u64, "bytes of {region:?}");
        if !bytes.is_empty() {
            // SAFETY: the region is memory of the device, as `address` checked; the copy is waited
            // for.
            self.noting(unsafe {
                self.stream
                    .download(bytes.as_mut_ptr(), self.address(region), bytes.len())
            })?;
        }
        self.synchronize()
    }

    /// Fills a region with a byte.
    pub fn fill(&self, region: &Region, byte: u8) -> Result<()> {
        self.ready()?;
        if region.bytes == 0 {
            return Ok(());
        }
        // SAFETY: the region is memory of the device, as `address` checked.
        self.noting(unsafe {
            self.stream
                .fill(self.address(region), byte, region.bytes as usize)
        })
    }

    /// Copies one region to another of the same length, which is disjoint from it or the same.
    ///
    /// # Panics
    /// If the lengths differ, or the regions share a part.
    pub fn copy(&self, from: &Region, to: &Region) -> Result<()> {
        self.ready()?;
        assert_eq!(
            from.bytes, to.bytes,
            "copy between regions of different lengths"
        );
        if from == to || from.bytes == 0 {
            return Ok(());
        }
        assert!(!from.overlaps(to), "copy between regions that share a part");
        // SAFETY: both are memory of the device, as `address` checked, and share none of it.
        self.noting(unsafe {
            self.stream
                .copy(self.address(to), self.address(from), from.bytes as usize)
        })
    }

    /// Creates the fault record, so that the first run allocates no memory.
    ///
    /// # Errors
    /// If the device has no memory for it.
    pub fn prepare_faults(&mut self) -> Result<()> {
        self.fault_record().map(|_| ())
    }

    /// The address of the fault record, which is created at the first use.
    pub(crate) fn fault_record(&mut self) -> Result<u64> {
        if self.fault == 0 {
            self.ready()?;
            let base = self.allocate(FAULT_BYTES as u64)?;
            // SAFETY: it is memory of the device, as long as the record.
            let filled = self.noting(unsafe { self.stream.fill(base, 0xFF, FAULT_BYTES) });
            if let Err(e) = filled {
                if let Some(reservation) = &mut *self.shared.reservation() {
                    reservation.free(&self.shared.context, base);
                }
                return Err(e);
            }
            self.fault = base;
        }
        Ok(self.fault)
    }

    /// Submits a copy of the fault record, after all work submitted until now.
    pub fn look_for_faults(&self) -> Result<()> {
        if self.fault == 0 {
            // No launched kernel could have found one.
            return Ok(());
        }
        self.ready()?;
        // SAFETY: the record is memory of the device; its words are read as values that may change
        // at any time.
        self.noting(unsafe {
            self.stream
                .download(self.seen.as_ptr(), self.fault, FAULT_BYTES)
        })
    }

    /// The first index out of range in the runs that are done, if there is one. Waits for nothing.
    pub fn fault(&self) -> Option<Fault> {
        let (word, step) = (self.seen.word(0), self.seen.word(1));
        // A copy in flight may have brought only one of the two words.
        let whole = word != NO_FAULT && step != NO_FAULT;
        whole.then_some(Fault {
            step: step as u32,
            position: (word >> 32) as u32,
            value: word as u32 as i32,
        })
    }

    /// Clears the fault, after all work.
    pub fn clear_fault(&self) -> Result<()> {
        self.synchronize()?;
        if self.fault != 0 {
            // SAFETY: it is memory of the device, as long as the record.
            self.noting(unsafe { self.stream.fill(self.fault, 0xFF, FAULT_BYTES) })?;
            self.synchronize()?;
        }
        (0..2).for_each(|at| self.seen.set_word(at, NO_FAULT));
        Ok(())
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // If the device is lost, none of its memory is in use.
        let _ = self.shared.context.bind();
        let _ = self.synchronize_all();
        self.shared.libraries.leave(&self.stream);
        self.arenas
            .drain(..)
            .flatten()
            .for_each(|arena| arena.close(&self.shared));
        if let Some(reservation) = &mut *self.shared.reservation() {
            reservation.free(&self.shared.context, self.fault);
            reservation.free(&self.shared.context, self.staging.buffer_base());
        }
    }
}
