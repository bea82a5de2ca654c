//! Staging of inputs: they are written to pinned memory of the host, from which the device copies
//! them asynchronously.
//!
//! The pinned memory is double-buffered, so that the inputs of a run are written while the run
//! before it executes. Large inputs are also copied meanwhile: on a separate stream, to a *staging
//! buffer* on the device beside the memory that runs use, from which they are moved when their run
//! starts.

use slabwise_kernels::memory::Region;

use crate::device::Device;
use crate::driver::{DriverError, Event, Pinned};
use crate::reservation::ARENA_ALIGN;

type Result<T> = std::result::Result<T, DriverError>;

/// Smaller inputs, in bytes, are copied when their run starts: that takes less time than waiting
/// for another stream.
const STAGED_BYTES_MIN: u64 = 1 << 20;

/// The size of an input in the device's staging buffer, bytes: 0 for a small one.
pub fn staging_bytes(input: u64) -> u64 {
    if input < STAGED_BYTES_MIN {
        0
    } else {
        input.next_multiple_of(ARENA_ALIGN)
    }
}

/// The staging of a run's inputs.
#[derive(Debug)]
pub(crate) struct Staging {
    sets: [Set; 2],
    turn: usize,
    buffer: StagingBuffer,
}

/// Pinned memory for the inputs of a run.
#[derive(Debug)]
struct Set {
    memory: Pinned,
    used: usize,
    copied: Event,
}

/// The device's staging buffer, where large inputs of the next run wait until it starts.
#[derive(Debug)]
struct StagingBuffer {
    base: u64,
    bytes: u64,
    used: u64,
    /// The copies to it for the run that is being staged: destination, source, bytes.
    pending: Vec<(u64, u64, usize)>,
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
        let buffer = StagingBuffer {
            base: 0,
            bytes: 0,
            used: 0,
            pending: Vec::with_capacity(32),
            arrived: Event::new()?,
            taken: Event::new()?,
        };
        Ok(Staging {
            sets: [set()?, set()?],
            turn: 0,
            buffer,
        })
    }

    /// The address of the staging buffer.
    pub fn buffer_base(&self) -> u64 {
        self.buffer.base
    }
}

impl Device {
    /// Pins this many bytes of host memory for the inputs of a run, so that staging them allocates
    /// nothing. Where the host cannot pin so much, inputs that do not fit are copied from other
    /// memory when they are staged.
    ///
    /// # Errors
    /// If the device is lost.
    pub fn prepare_staging(&mut self, bytes: usize) -> Result<()> {
        self.ready()?;
        for at in 0..self.staging.sets.len() {
            if self.staging.sets[at].memory.len() < bytes {
                self.synchronize_inputs()?;
                let memory = match self.noting(Pinned::new(bytes)) {
                    Err(e @ DriverError::Lost(_)) => return Err(e),
                    Err(e) => {
                        log::warn!("runs wait for the copies of their inputs: {e}");
                        return Ok(());
                    }
                    Ok(memory) => memory,
                };
                let set = &mut self.staging.sets[at];
                (set.memory, set.used) = (memory, 0);
            }
        }
        Ok(())
    }

    /// Sets the size of the staging buffer: the sum of [`staging_bytes`] of a run's inputs. Inputs
    /// that do not fit are copied when their run starts. `false` if the device has too little
    /// memory; then there is no staging buffer.
    ///
    /// # Errors
    /// If the driver refuses for another reason.
    pub fn set_staging(&mut self, bytes: u64) -> Result<bool> {
        self.ready()?;
        if bytes == self.staging.buffer.bytes {
            return Ok(true);
        }
        self.synchronize_inputs()?;
        let old = std::mem::take(&mut self.staging.buffer.base);
        self.staging.buffer.bytes = 0;
        if let Some(reservation) = &mut *self.shared.reservation() {
            reservation.free(&self.shared.context, old);
        }
        match self.allocate(bytes) {
            Ok(base) => (self.staging.buffer.base, self.staging.buffer.bytes) = (base, bytes),
            Err(DriverError::OutOfMemory { .. }) => return Ok(false),
            Err(e) => return Err(e),
        }
        Ok(true)
    }

    /// The size of the staging buffer, bytes.
    pub fn staging(&self) -> u64 {
        self.staging.buffer.bytes
    }

    /// The bytes of the staging buffer that the run staged last used.
    pub fn landed(&self) -> u64 {
        self.staging.buffer.used
    }

    /// Waits until no input copy is in flight.
    fn synchronize_inputs(&self) -> Result<()> {
        self.synchronize()?;
        self.noting(self.transfers.synchronize())
    }

    /// Begins to stage a run's inputs. There are two sets of pinned memory: the host writes the
    /// inputs of a run while the run before it still executes.
    pub fn begin_staging(&mut self) -> Result<()> {
        self.ready()?;
        let Staging { sets, turn, buffer } = &mut self.staging;
        *turn = 1 - *turn;
        let set = &mut sets[*turn];
        set.used = 0;
        buffer.used = 0;
        buffer.pending.clear();
        let waited = set
            .copied
            .synchronize()
            .and_then(|()| self.transfers.wait(&buffer.taken));
        self.noting(waited)
    }

    /// Lets `write` fill pinned memory with a region's bytes, which the device copies
    /// asynchronously.
    pub fn stage(&mut self, region: &Region, write: &mut dyn FnMut(&mut [u8])) -> Result<()> {
        let bytes = region.bytes as usize;
        if bytes == 0 {
            return Ok(());
        }
        let address = self.address(region);
        let Staging { sets, turn, buffer } = &mut self.staging;
        let set = &mut sets[*turn];
        let from = set.used.next_multiple_of(16);
        if from + bytes > set.memory.len() {
            // Larger than the prepared memory.
            let mut own = vec![0; bytes];
            write(&mut own);
            return self.write(region, &own);
        }
        set.used = from + bytes;
        write(&mut set.memory.bytes_mut()[from..from + bytes]);
        let staged = staging_bytes(region.bytes);
        let (stream, to) = if staged > 0 && buffer.used + staged <= buffer.bytes {
            let address_in_buffer = buffer.base + buffer.used;
            buffer.used += staged;
            buffer.pending.push((address, address_in_buffer, bytes));
            (&self.transfers, address_in_buffer)
        } else {
            (&*self.stream, address)
        };
        // SAFETY: both the region, as `address` checked, and the staging buffer are memory of the
        // device; this part of the pinned memory is written again only after its event.
        let copied = unsafe { stream.upload(to, set.memory.as_ptr().add(from), bytes) };
        self.noting(copied)
    }

    /// Ends the staging begun by [`Device::begin_staging`].
    pub fn end_staging(&mut self) -> Result<()> {
        let done = self.arrive();
        self.noting(done)
    }

    /// Moves inputs from the staging buffer to their regions, on the run's stream.
    fn arrive(&self) -> Result<()> {
        let Staging {
            sets,
            turn,
            buffer:
                StagingBuffer {
                    pending,
                    arrived,
                    taken,
                    ..
                },
        } = &self.staging;
        let copied = &sets[*turn].copied;
        if pending.is_empty() {
            return copied.record(&self.stream);
        }
        arrived.record(&self.transfers)?;
        self.stream.wait(arrived)?;
        for &(to, from, bytes) in pending {
            // SAFETY: both are memory of the device, as `stage` ensured, and do not overlap.
            unsafe { self.stream.copy(to, from, bytes)? };
        }
        taken.record(&self.stream)?;
        // Reached after all copies from this pinned memory, on both streams.
        copied.record(&self.stream)
    }
}
