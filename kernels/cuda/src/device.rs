//! A device as a session sees it: arenas of its memory, a stream of work, inputs on their way to it, and the record of what
//! went wrong there.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use slabwise_kernels::memory::Region;

use crate::driver::{self, Context, DriverError, Event, Pinned, Properties, Stream};
use crate::nvrtc;
use crate::space::{Limits, Space, Usage};

type Result<T> = std::result::Result<T, DriverError>;

/// What all sessions of a process share of a device: its context and the reservation of its memory.
#[derive(Debug)]
pub(crate) struct Shared {
    ordinal: u32,
    properties: Properties,
    space: Mutex<Option<Space>>,
    context: Context,
}

impl Shared {
    /// The device's shared part, opened if nobody has it open.
    fn of(ordinal: u32) -> Result<Arc<Shared>> {
        static OPEN: Mutex<Vec<Weak<Shared>>> = Mutex::new(Vec::new());
        let properties = driver::properties(ordinal)?;
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        open.retain(|shared| shared.strong_count() > 0);
        if let Some(shared) = open.iter().filter_map(Weak::upgrade).find(|s| s.ordinal == ordinal) {
            shared.context.bind()?;
            return Ok(shared);
        }
        let shared = Arc::new(Shared { ordinal, properties, space: Mutex::new(None), context: Context::of(ordinal)? });
        open.push(Arc::downgrade(&shared));
        Ok(shared)
    }

    fn space(&self) -> MutexGuard<'_, Option<Space>> {
        self.space.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if let Some(mut space) = self.space().take() {
            space.close(&self.context);
        }
    }
}

/// The first index of a run that was out of range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The step of the program that met it.
    pub step: u32,
    /// Its row-major position among the indices.
    pub position: u32,
    /// The index.
    pub value: i32,
}

/// What both words of a fault record hold while there is no fault.
const NO_FAULT: u64 = u64::MAX;
/// Bytes of a fault record; see [`Word::Fault`](crate::Word::Fault).
const FAULT_BYTES: usize = 2 * size_of::<u64>();

/// A CUDA device, opened for one session.
///
/// All work goes to one stream, in the order in which it is asked for, and is not waited for but where a method says so. Inputs
/// of a run that are large travel on a second stream while the run before is at work, to memory of their own.
#[derive(Debug)]
pub struct Device {
    pub(crate) stream: Stream,
    transfers: Stream,
    landing: Landing,
    arenas: Vec<Option<(u64, u64)>>,
    staging: [Staging; 2],
    turn: usize,
    fault: u64,
    seen: Pinned,
    lost: OnceLock<String>,
    limits: Limits,
    pub(crate) shared: Arc<Shared>,
}

/// Inputs of a run on their way to the device.
#[derive(Debug)]
struct Staging {
    memory: Pinned,
    used: usize,
    copied: Event,
}

/// Whether a device can be used: there are a driver, the device, a compiler, and the driver takes the compiler's code.
///
/// # Errors
/// What is missing.
pub fn usable(ordinal: u32) -> Result<()> {
    const OLDEST: u32 = 12;
    let found = driver::start()?;
    driver::properties(ordinal)?;
    let compiler = nvrtc::version().map_err(|e| match e {
        nvrtc::Error::Missing(missing) => DriverError::Missing(missing),
        other => DriverError::Failed { call: "nvrtcVersion", code: other.to_string() },
    })?;
    let needed = compiler.0.max(OLDEST);
    if found.0 < needed { Err(DriverError::TooOld { found, needed }) } else { Ok(()) }
}

/// Where large inputs of the next run wait on the device until its turn has come.
#[derive(Debug)]
struct Landing {
    base: u64,
    bytes: usize,
    /// What has been sent there for the run that is being staged: to where, from where, how much.
    sent: Vec<(u64, u64, usize)>,
    arrived: Event,
    taken: Event,
}

/// Inputs of fewer bytes are copied when their run has its turn: that takes less than waiting for another stream does.
const LANDING_LEAST: usize = 1 << 20;

impl Device {
    /// Opens a device. Its memory is reserved at the first use; limits of a device that the process has in use already are
    /// those that it was first used with.
    ///
    /// # Errors
    /// If there is no driver, no such device, no compiler, or the driver is older than what the compiler's code needs.
    pub fn open(ordinal: u32, limits: Limits) -> Result<Device> {
        usable(ordinal)?;
        let shared = Shared::of(ordinal)?;
        let staging = || Ok::<_, DriverError>(Staging { memory: Pinned::new(0)?, used: 0, copied: Event::new()? });
        let seen = Pinned::new(FAULT_BYTES)?;
        (0..2).for_each(|at| seen.set_word(at, NO_FAULT));
        Ok(Device {
            stream: Stream::new()?,
            transfers: Stream::new()?,
            landing: Landing { base: 0, bytes: 0, sent: Vec::new(), arrived: Event::new()?, taken: Event::new()? },
            arenas: Vec::new(),
            staging: [staging()?, staging()?],
            turn: 0,
            fault: 0,
            seen,
            lost: OnceLock::new(),
            limits,
            shared,
        })
    }

    /// Other limits of the device's memory; those in force stay while any of it is reserved.
    pub fn set_limits(&mut self, limits: Limits) {
        self.limits = limits;
    }

    /// What the device is.
    pub fn properties(&self) -> &Properties {
        &self.shared.properties
    }

    /// What of the device's memory this process uses.
    pub fn usage(&self) -> Usage {
        self.shared.space().as_ref().map(Space::usage).unwrap_or_default()
    }

    /// Free and total bytes of the device, as the driver says.
    pub fn memory(&self) -> Result<(u64, u64)> {
        self.noting(self.shared.context.memory())
    }

    /// Notes that the device is lost, if a call has found it so.
    pub(crate) fn noting<T>(&self, result: Result<T>) -> Result<T> {
        if let Err(DriverError::Lost(why)) = &result {
            // The first reason is the one that says something.
            let _ = self.lost.set(why.clone());
        }
        result
    }

    /// Makes the device ready for calls of this thread, unless it is lost.
    pub(crate) fn ready(&self) -> Result<()> {
        match self.lost.get() {
            Some(why) => Err(DriverError::Lost(why.clone())),
            None => self.noting(self.shared.context.bind()),
        }
    }

    /// An arena of zeros, all of it as a region.
    ///
    /// # Errors
    /// If the device has not so much memory, or may not use it.
    pub fn reserve(&mut self, bytes: u64) -> Result<Region> {
        self.ready()?;
        let base = self.take(bytes)?;
        let slot = self.arenas.iter().position(Option::is_none).unwrap_or(self.arenas.len());
        if slot == self.arenas.len() {
            self.arenas.push(None);
        }
        self.arenas[slot] = Some((base, bytes));
        let region = Region { arena: slot as u32, offset: 0, bytes };
        self.fill(&region, 0)?;
        Ok(region)
    }

    fn take(&mut self, bytes: u64) -> Result<u64> {
        let Properties { total_bytes, maps_pages, .. } = self.shared.properties;
        let context = &self.shared.context;
        let mut space = self.shared.space();
        let space = match &mut *space {
            Some(space) => space,
            none => none.insert(Space::new(context, &self.limits, total_bytes, maps_pages)?),
        };
        space.take(context, bytes)
    }

    /// Gives an arena back, after all work. Regions of it must not be used again.
    pub fn release(&mut self, arena: u32) {
        let Some((base, _)) = self.arenas.get_mut(arena as usize).and_then(Option::take) else { return };
        // If the device is lost its memory is, too.
        let _ = self.synchronize();
        if let Some(space) = &mut *self.shared.space() {
            space.give(&self.shared.context, base);
        }
    }

    /// The address of a region's first byte.
    ///
    /// # Panics
    /// If the region is not inside a live arena.
    pub fn address(&self, region: &Region) -> u64 {
        let arena = self.arenas.get(region.arena as usize).copied().flatten();
        let inside = arena.filter(|(_, bytes)| region.offset.checked_add(region.bytes).is_some_and(|end| end <= *bytes));
        let (base, _) = inside.unwrap_or_else(|| panic!("{region:?} is not inside a live arena of the device"));
        base + region.offset
    }

    /// Waits until all work is done.
    ///
    /// # Errors
    /// If a kernel did what it must not: the device is lost.
    pub fn synchronize(&self) -> Result<()> {
        self.ready()?;
        self.noting(self.stream.synchronize())
    }

    /// Writes a region's bytes, after all work asked for before.
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
        self.noting(unsafe { self.stream.upload(self.address(region), bytes.as_ptr(), bytes.len()) })?;
        self.synchronize()
    }

    /// Reads a region's bytes, after all work asked for before.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn read(&self, region: &Region, bytes: &mut [u8]) -> Result<()> {
        self.ready()?;
        assert_eq!(region.bytes, bytes.len() as u64, "bytes of {region:?}");
        if !bytes.is_empty() {
            // SAFETY: the region is memory of the device, as `address` checked; the copy is waited for.
            self.noting(unsafe { self.stream.download(bytes.as_mut_ptr(), self.address(region), bytes.len()) })?;
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
        self.noting(unsafe { self.stream.fill(self.address(region), byte, region.bytes as usize) })
    }

    /// Copies one region to another of the same length, which shares nothing with it or is the same.
    ///
    /// # Panics
    /// If the lengths differ, or the regions share a part.
    pub fn copy(&self, from: &Region, to: &Region) -> Result<()> {
        self.ready()?;
        assert_eq!(from.bytes, to.bytes, "copy between regions of different lengths");
        if from == to || from.bytes == 0 {
            return Ok(());
        }
        assert!(!from.overlaps(to), "copy between regions that share a part");
        // SAFETY: both are memory of the device, as `address` checked, and share none of it.
        self.noting(unsafe { self.stream.copy(self.address(to), self.address(from), from.bytes as usize) })
    }

    /// Makes room for this many bytes of inputs of a run, so that staging them allocates nothing.
    pub fn prepare_staging(&mut self, bytes: usize) -> Result<()> {
        self.ready()?;
        if bytes >= LANDING_LEAST && bytes > self.landing.bytes {
            self.synchronize()?;
            let old = std::mem::take(&mut self.landing.base);
            self.landing.bytes = 0;
            if let Some(space) = &mut *self.shared.space() {
                space.give(&self.shared.context, old);
            }
            // Without room there, inputs are copied when their run has its turn.
            match self.take(bytes as u64) {
                Ok(base) => (self.landing.base, self.landing.bytes) = (base, bytes),
                Err(DriverError::OutOfMemory { .. }) => log::debug!("no room for {bytes} bytes of inputs beside those of the run at work"),
                Err(e) => return self.noting(Err(e)),
            }
            self.landing.sent.reserve(32);
        }
        for at in 0..self.staging.len() {
            if self.staging[at].memory.len() < bytes {
                self.synchronize()?;
                self.staging[at].memory = self.noting(Pinned::new(bytes))?;
                self.staging[at].used = 0;
            }
        }
        Ok(())
    }

    /// Begins to stage a run's inputs. There are two sets of them: what is staged for a run is written by the host while the
    /// run before it is still at work.
    pub fn begin_staging(&mut self) -> Result<()> {
        self.ready()?;
        self.turn = 1 - self.turn;
        let staging = &mut self.staging[self.turn];
        staging.used = 0;
        self.landing.sent.clear();
        let waited = staging.copied.synchronize().and_then(|()| self.transfers.wait(&self.landing.taken));
        self.noting(waited)
    }

    /// Lets `write` write a region's bytes to memory that the device copies them from by itself.
    pub fn stage(&mut self, region: &Region, write: &mut dyn FnMut(&mut [u8])) -> Result<()> {
        let bytes = region.bytes as usize;
        if bytes == 0 {
            return Ok(());
        }
        let address = self.address(region);
        let staging = &mut self.staging[self.turn];
        let from = staging.used.next_multiple_of(16);
        if from + bytes > staging.memory.len() {
            // More than was prepared for.
            let mut own = vec![0; bytes];
            write(&mut own);
            return self.write(region, &own);
        }
        staging.used = from + bytes;
        write(&mut staging.memory.bytes_mut()[from..from + bytes]);
        let (stream, to) = if from + bytes <= self.landing.bytes {
            let waits = self.landing.base + from as u64;
            self.landing.sent.push((address, waits, bytes));
            (&self.transfers, waits)
        } else {
            (&self.stream, address)
        };
        // SAFETY: both the region, as `address` checked, and what it waits in are memory of the device; this part of the staging
        // memory is written again only after its event.
        let copied = unsafe { stream.upload(to, staging.memory.as_ptr().add(from), bytes) };
        self.noting(copied)
    }

    /// Ends what [`Device::begin_staging`] began.
    pub fn end_staging(&mut self) -> Result<()> {
        let done = self.arrive();
        self.noting(done)
    }

    /// Lets the run's stream take what was sent ahead.
    fn arrive(&self) -> Result<()> {
        let Landing { sent, arrived, taken, .. } = &self.landing;
        if sent.is_empty() {
            return self.staging[self.turn].copied.record(&self.stream);
        }
        arrived.record(&self.transfers)?;
        self.stream.wait(arrived)?;
        for &(to, from, bytes) in sent {
            // SAFETY: both are memory of the device, as `stage` made sure of, and share none of it.
            unsafe { self.stream.copy(to, from, bytes)? };
        }
        taken.record(&self.stream)?;
        // Reached after all copies from this staging memory, on whichever stream they were.
        self.staging[self.turn].copied.record(&self.stream)
    }

    /// The address of the record of faults, which is made at the first need of it.
    pub(crate) fn fault_record(&mut self) -> Result<u64> {
        if self.fault == 0 {
            self.ready()?;
            let base = self.take(FAULT_BYTES as u64)?;
            // SAFETY: it is memory of the device, as long as the record.
            self.noting(unsafe { self.stream.fill(base, 0xFF, FAULT_BYTES) })?;
            self.fault = base;
        }
        Ok(self.fault)
    }

    /// Asks for a copy of the record of faults as it is after all work asked for until now.
    pub fn look_for_faults(&self) -> Result<()> {
        if self.fault == 0 {
            // Nothing has been launched that could have met one.
            return Ok(());
        }
        // SAFETY: the record is memory of the device; its words are read as ones that may change at any time.
        unsafe { self.stream.download(self.seen.as_ptr(), self.fault, FAULT_BYTES) }
    }

    /// The first index out of range, as far as runs that are done have met one. Waits for nothing.
    pub fn fault(&self) -> Option<Fault> {
        let (word, step) = (self.seen.word(0), self.seen.word(1));
        // A copy that is under way may have brought one of the two.
        let whole = word != NO_FAULT && step != NO_FAULT;
        whole.then_some(Fault { step: step as u32, position: (word >> 32) as u32, value: word as u32 as i32 })
    }

    /// Forgets the fault, after all work.
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
        // If the device is lost nothing of it is in use.
        let _ = self.shared.context.bind().and_then(|()| self.transfers.synchronize()).and_then(|()| self.stream.synchronize());
        if let Some(space) = &mut *self.shared.space() {
            for (base, _) in self.arenas.drain(..).flatten() {
                space.give(&self.shared.context, base);
            }
            space.give(&self.shared.context, self.fault);
            space.give(&self.shared.context, self.landing.base);
        }
    }
}
