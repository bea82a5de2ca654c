//! Inputs on their way to the device: written to pinned memory of the host, from where the device
//! copies them by itself.
//!
//! There are two sets of that memory in turn, so that what a run is fed with is written while the
//! run before it is at work. Large inputs travel then, too: on a stream of their own to a place
//! beside the memory that runs use, the *landing*, from which they are moved when their run has its
//! turn.

use slabwise_kernels::memory::Region;

use crate::device::Device;
use crate::driver::{DriverError, Event, Pinned};
use crate::space::ARENA_ALIGN;

type Result<T> = std::result::Result<T, DriverError>;

/// Inputs of fewer bytes are copied when their run has its turn: that takes less than waiting for
/// another stream does.
const LANDING_LEAST: u64 = 1 << 20;

/// The bytes that an input of so many takes of the landing, if there is room: none if it is small.
pub fn landing_bytes(input: u64) -> u64 {
    if input < LANDING_LEAST {
        0
    } else {
        input.next_multiple_of(ARENA_ALIGN)
    }
}

/// Inputs of a run on their way to the device.
#[derive(Debug)]
pub(crate) struct Staging {
    sets: [Set; 2],
    turn: usize,
    landing: Landing,
}

/// Pinned memory for the inputs of a run.
#[derive(Debug)]
struct Set {
    memory: Pinned,
    used: usize,
    copied: Event,
}

/// Where large inputs of the next run wait on the device until its turn has come.
#[derive(Debug)]
struct Landing {
    base: u64,
    bytes: u64,
    used: u64,
    /// What has been sent there for the run that is being staged: to where, from where, how much.
    sent: Vec<(u64, u64, usize)>,
    arrived: Event,
    taken: Event,
}

impl Staging {
    pub fn new() -> Result<Staging> {
        let set = || {
            Ok::<_, DriverError>(Set {
                memory: Pinned::new(0)?,
                used: 0,
                copied: Event::new()?,
            })
        };
        let landing = Landing {
            base: 0,
            bytes: 0,
            used: 0,
            sent: Vec::with_capacity(32),
            arrived: Event::new()?,
            taken: Event::new()?,
        };
        Ok(Staging {
            sets: [set()?, set()?],
            turn: 0,
            landing,
        })
    }

    /// The address of the landing.
    pub fn landing_base(&self) -> u64 {
        self.landing.base
    }
}

impl Device {
    /// Makes room in the host's memory for this many bytes of inputs of a run, so that staging them
    /// allocates nothing.
    ///
    /// # Errors
    /// If the host has not so much memory to pin.
    pub fn prepare_staging(&mut self, bytes: usize) -> Result<()> {
        self.ready()?;
        for at in 0..self.staging.sets.len() {
            if self.staging.sets[at].memory.len() < bytes {
                self.settle_inputs()?;
                let memory = self.noting(Pinned::new(bytes))?;
                let set = &mut self.staging.sets[at];
                (set.memory, set.used) = (memory, 0);
            }
        }
        Ok(())
    }

    /// Makes the landing this large: for the sum of [`landing_bytes`] of a run's inputs. Without
    /// room there, inputs are copied when their run has its turn. `false` if the device has not so
    /// much memory; then there is no landing.
    ///
    /// # Errors
    /// If the driver refuses for another reason.
    pub fn set_landing(&mut self, bytes: u64) -> Result<bool> {
        self.ready()?;
        if bytes == self.staging.landing.bytes {
            return Ok(true);
        }
        self.settle_inputs()?;
        let old = std::mem::take(&mut self.staging.landing.base);
        self.staging.landing.bytes = 0;
        if let Some(space) = &mut *self.shared.space() {
            space.give(&self.shared.context, old);
        }
        match self.take(bytes) {
            Ok(base) => (self.staging.landing.base, self.staging.landing.bytes) = (base, bytes),
            Err(DriverError::OutOfMemory { .. }) => return Ok(false),
            Err(e) => return Err(e),
        }
        Ok(true)
    }

    /// Bytes of the landing.
    pub fn landing(&self) -> u64 {
        self.staging.landing.bytes
    }

    /// Bytes of the landing that the run used that was staged last.
    pub fn landed(&self) -> u64 {
        self.staging.landing.used
    }

    /// Waits until no input is on its way.
    fn settle_inputs(&self) -> Result<()> {
        self.synchronize()?;
        self.noting(self.transfers.synchronize())
    }

    /// Begins to stage a run's inputs. There are two sets of them: what is staged for a run is
    /// written by the host while the run before it is still at work.
    pub fn begin_staging(&mut self) -> Result<()> {
        self.ready()?;
        let Staging {
            sets,
            turn,
            landing,
        } = &mut self.staging;
        *turn = 1 - *turn;
        let set = &mut sets[*turn];
        set.used = 0;
        landing.used = 0;
        landing.sent.clear();
        let waited = set
            .copied
            .synchronize()
            .and_then(|()| self.transfers.wait(&landing.taken));
        self.noting(waited)
    }

    /// Lets `write` write a region's bytes to memory that the device copies them from by itself.
    pub fn stage(&mut self, region: &Region, write: &mut dyn FnMut(&mut [u8])) -> Result<()> {
        let bytes = region.bytes as usize;
        if bytes == 0 {
            return Ok(());
        }
        let address = self.address(region);
        let Staging {
            sets,
            turn,
            landing,
        } = &mut self.staging;
        let set = &mut sets[*turn];
        let from = set.used.next_multiple_of(16);
        if from + bytes > set.memory.len() {
            // More than was prepared for.
            let mut own = vec![0; bytes];
            write(&mut own);
            return self.write(region, &own);
        }
        set.used = from + bytes;
        write(&mut set.memory.bytes_mut()[from..from + bytes]);
        let room = landing_bytes(region.bytes);
        let (stream, to) = if room > 0 && landing.used + room <= landing.bytes {
            let waits = landing.base + landing.used;
            landing.used += room;
            landing.sent.push((address, waits, bytes));
            (&self.transfers, waits)
        } else {
            (&*self.stream, address)
        };
        // SAFETY: both the region, as `address` checked, and what it waits in are memory of the
        // device; this part of the staging memory is written again only after its event.
        let copied = unsafe { stream.upload(to, set.memory.as_ptr().add(from), bytes) };
        self.noting(copied)
    }

    /// Ends what [`Device::begin_staging`] began.
    pub fn end_staging(&mut self) -> Result<()> {
        let done = self.arrive();
        self.noting(done)
    }

    /// Lets the run's stream take what was sent ahead.
    fn arrive(&self) -> Result<()> {
        let Staging {
            sets,
            turn,
            landing:
                Landing {
                    sent,
                    arrived,
                    taken,
                    ..
                },
        } = &self.staging;
        let copied = &sets[*turn].copied;
        if sent.is_empty() {
            return copied.record(&self.stream);
        }
        arrived.record(&self.transfers)?;
        self.stream.wait(arrived)?;
        for &(to, from, bytes) in sent {
            // SAFETY: both are memory of the device, as `stage` made sure of, and share none of it.
            unsafe { self.stream.copy(to, from, bytes)? };
        }
        taken.record(&self.stream)?;
        // Reached after all copies from this staging memory, on whichever stream they were.
        copied.record(&self.stream)
    }
}
