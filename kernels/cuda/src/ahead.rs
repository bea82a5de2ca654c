//! Batches that travel to the device while runs before theirs are at work: a ring of slots, each
//! with pinned memory of the host to be written to and memory of the device to arrive in.
//!
//! Which slot holds which batch is the caller's to say. Here is what orders the copies: a slot of
//! the host is written once the copy out of it is done, a slot of the device once the run that took
//! its batch has, and a run takes a batch that has arrived.

use slabwise_kernels::memory::Region;

use crate::device::Device;
use crate::driver::{DriverError, Event, Pinned};

type Result<T> = std::result::Result<T, DriverError>;

/// Slots for batches ahead.
#[derive(Debug)]
pub(crate) struct Ring {
    host: Pinned,
    device: Region,
    slots: Vec<Slot>,
}

/// What is known of a slot.
#[derive(Debug)]
struct Slot {
    arrived: Event,
    taken: Event,
}

impl Device {
    /// Makes as many slots of equal size as a region of the device is to be cut into, and pins as
    /// many bytes of the host. The ring's number.
    ///
    /// # Errors
    /// If the host has not so much memory to pin, or the driver no events.
    pub fn open_ring(&mut self, device: Region, slots: usize) -> Result<usize> {
        self.ready()?;
        let ring = Ring::new(device, slots).and_then(|ring| {
            // What was asked for before, zeros among it, comes before the first batches.
            ring.slots
                .iter()
                .try_for_each(|slot| slot.taken.record(&self.stream))
                .map(|()| ring)
        });
        let ring = self.noting(ring)?;
        self.rings.push(ring);
        Ok(self.rings.len() - 1)
    }

    /// Lets `write` write a slot of the host, and sends it to the device's; nothing is sent if it
    /// fails, and its error is what is inside. Waits while the slot's batch before this one is on
    /// its way.
    ///
    /// # Errors
    /// If the driver refuses.
    ///
    /// # Panics
    /// If there is no such ring or slot.
    pub fn send_ahead<E>(
        &mut self,
        ring: usize,
        slot: usize,
        write: impl FnOnce(&mut [u8]) -> std::result::Result<(), E>,
    ) -> Result<std::result::Result<(), E>> {
        self.ready()?;
        let waited = self.rings[ring].slots[slot].arrived.synchronize();
        self.noting(waited)?;
        let Ring {
            host,
            device,
            slots,
        } = &mut self.rings[ring];
        let bytes = device.bytes as usize / slots.len();
        let written = write(&mut host.bytes_mut()[slot * bytes..(slot + 1) * bytes]);
        if written.is_err() {
            return Ok(written);
        }
        let sent = self.send(ring, slot);
        self.noting(sent).map(|()| written)
    }

    fn send(&self, ring: usize, slot: usize) -> Result<()> {
        let Ring {
            host,
            device,
            slots,
        } = &self.rings[ring];
        let Slot { arrived, taken } = &slots[slot];
        let bytes = device.bytes / slots.len() as u64;
        let to = device.part(slot as u64 * bytes, bytes);
        self.transfers.wait(taken)?;
        // SAFETY: the slot is memory of the device, as `address` checked, and that of the host as
        // long; it is written again only after this event.
        unsafe {
            self.transfers.upload(
                self.address(&to),
                host.as_ptr().add(slot * bytes as usize),
                bytes as usize,
            )?
        };
        arrived.record(&self.transfers)
    }

    /// Moves parts of the batch in a slot to where runs read them, once it has arrived: from so
    /// many bytes into the slot, to there.
    ///
    /// # Errors
    /// If the driver refuses.
    ///
    /// # Panics
    /// If there is no such ring or slot, or a part is not inside of it or of a live arena.
    pub fn take_ahead(
        &mut self,
        ring: usize,
        slot: usize,
        parts: impl Iterator<Item = (u64, Region)>,
    ) -> Result<()> {
        self.ready()?;
        let Ring { device, slots, .. } = &self.rings[ring];
        let bytes = device.bytes / slots.len() as u64;
        let (own, Slot { arrived, taken }) =
            (device.part(slot as u64 * bytes, bytes), &slots[slot]);
        let waited = self.stream.wait(arrived);
        self.noting(waited)?;
        for (offset, to) in parts {
            self.copy(&own.part(offset, to.bytes), &to)?;
        }
        let recorded = taken.record(&self.stream);
        self.noting(recorded)
    }
}

impl Ring {
    fn new(device: Region, slots: usize) -> Result<Ring> {
        let slot = |_| {
            Ok(Slot {
                arrived: Event::new()?,
                taken: Event::new()?,
            })
        };
        let host = usize::try_from(device.bytes).map_err(|_| DriverError::OutOfMemory {
            bytes: device.bytes,
        });
        Ok(Ring {
            host: Pinned::new(host?)?,
            device,
            slots: (0..slots).map(slot).collect::<Result<_>>()?,
        })
    }
}
