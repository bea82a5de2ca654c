//! Prefetch of batches: the inputs of later runs are copied to the device while earlier runs
//! execute. The prefetch queue is a ring of slots, each with host memory to write to, which is pinned
//! where it can be, and device memory to receive the copy.
//!
//! The caller decides which slot holds which batch. This module orders the copies: a host slot is
//! written once the copy out of it is done, a device slot once the run that consumed its batch is
//! done, and a run consumes only a batch that has arrived.

use slabwise_kernels::memory::Region;

use crate::device::Device;
use crate::driver::{DriverError, Event, Pinned};

type Result<T> = std::result::Result<T, DriverError>;

/// A prefetch queue: slots for the batches of later runs.
#[derive(Debug)]
pub(crate) struct Queue {
    host: HostMemory,
    device: Region,
    slots: Vec<SlotEvents>,
}

/// Memory of the host from which batches are copied.
#[derive(Debug)]
enum HostMemory {
    Pinned(Pinned),
    /// Copies from it block until the driver has read it.
    Pageable(Vec<u8>),
}

impl HostMemory {
    fn new(bytes: usize) -> Result<HostMemory> {
        match Pinned::new(bytes) {
            Ok(memory) => Ok(HostMemory::Pinned(memory)),
            Err(e @ DriverError::Lost(_)) => Err(e),
            Err(e) => {
                log::warn!("batches are copied from memory that is not pinned: {e}");
                Ok(HostMemory::Pageable(vec![0; bytes]))
            }
        }
    }

    fn as_ptr(&self) -> *const u8 {
        match self {
            HostMemory::Pinned(memory) => memory.as_ptr(),
            HostMemory::Pageable(memory) => memory.as_ptr(),
        }
    }

    /// The bytes for writing, while no device copies from them.
    fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            HostMemory::Pinned(memory) => memory.bytes_mut(),
            HostMemory::Pageable(memory) => memory,
        }
    }
}

/// The state of a slot.
#[derive(Debug)]
struct SlotEvents {
    arrived: Event,
    consumed: Event,
}

impl Device {
    /// Splits a region of the device into `slots` slots of equal size, and pins as many bytes of
    /// the host, if it can. Returns the number of the ring.
    ///
    /// # Errors
    /// If the driver has no events to give.
    pub fn open_queue(&mut self, device: Region, slots: usize) -> Result<usize> {
        self.ready()?;
        let queue = Queue::new(device, slots).and_then(|queue| {
            // Work submitted before, such as zeroing the region, precedes the first batches.
            queue
                .slots
                .iter()
                .try_for_each(|slot| slot.consumed.record(&self.stream))
                .map(|()| queue)
        });
        let queue = self.noting(queue)?;
        self.queues.push(queue);
        Ok(self.queues.len() - 1)
    }

    /// Lets `write` fill a slot of the host, and copies it to the device's slot. Nothing is copied
    /// if `write` fails; the inner result is its error. Blocks while the previous batch of the slot
    /// is being copied.
    ///
    /// # Errors
    /// If the driver refuses.
    ///
    /// # Panics
    /// If there is no such ring or slot.
    pub fn send_ahead<E>(
        &mut self,
        queue: usize,
        slot: usize,
        write: impl FnOnce(&mut [u8]) -> std::result::Result<(), E>,
    ) -> Result<std::result::Result<(), E>> {
        self.ready()?;
        let waited = self.queues[queue].slots[slot].arrived.synchronize();
        self.noting(waited)?;
        let Queue {
            host,
            device,
            slots,
        } = &mut self.queues[queue];
        let bytes = device.bytes as usize / slots.len();
        let written = write(&mut host.bytes_mut()[slot * bytes..(slot + 1) * bytes]);
        if written.is_err() {
            return Ok(written);
        }
        let sent = self.send(queue, slot);
        self.noting(sent).map(|()| written)
    }

    fn send(&self, queue: usize, slot: usize) -> Result<()> {
        let Queue {
            host,
            device,
            slots,
        } = &self.queues[queue];
        let SlotEvents { arrived, consumed } = &slots[slot];
        let bytes = device.bytes / slots.len() as u64;
        let to = device.part(slot as u64 * bytes, bytes);
        self.transfers.wait(consumed)?;
        // SAFETY: the slot is memory of the device, as `address` checked, and that of the host is
        // as long; it is written again only after this event.
        unsafe {
            self.transfers.upload(
                self.address(&to),
                host.as_ptr().add(slot * bytes as usize),
                bytes as usize,
            )?
        };
        arrived.record(&self.transfers)
    }

    /// Copies parts of the batch in a slot to where runs read them, once it has arrived: each from
    /// an offset in bytes into the slot, to a region.
    ///
    /// # Errors
    /// If the driver refuses.
    ///
    /// # Panics
    /// If there is no such ring or slot, or a part is not inside of it or of a live arena.
    pub fn take_ahead(
        &mut self,
        queue: usize,
        slot: usize,
        parts: impl Iterator<Item = (u64, Region)>,
    ) -> Result<()> {
        self.ready()?;
        let Queue { device, slots, .. } = &self.queues[queue];
        let bytes = device.bytes / slots.len() as u64;
        let (own, SlotEvents { arrived, consumed }) =
            (device.part(slot as u64 * bytes, bytes), &slots[slot]);
        let waited = self.stream.wait(arrived);
        self.noting(waited)?;
        for (offset, to) in parts {
            self.copy(&own.part(offset, to.bytes), &to)?;
        }
        let recorded = consumed.record(&self.stream);
        self.noting(recorded)
    }
}

impl Queue {
    fn new(device: Region, slots: usize) -> Result<Queue> {
        let slot = |_| {
            Ok(SlotEvents {
                arrived: Event::new()?,
                consumed: Event::new()?,
            })
        };
        let host = usize::try_from(device.bytes).map_err(|_| DriverError::OutOfMemory {
            bytes: device.bytes,
        });
        Ok(Queue {
            host: HostMemory::new(host?)?,
            device,
            slots: (0..slots).map(slot).collect::<Result<_>>()?,
        })
    }
}
