//! The arenas of a session: device memory and pinned host memory, identified by number.

use slabwise_kernels::memory::Region;

use crate::device::{Device, Shared};
use crate::driver::{DriverError, Pinned, Properties};
use crate::pages::Pages;
use crate::reservation::Reservation;

type Result<T> = std::result::Result<T, DriverError>;

/// An arena of a session.
#[derive(Debug)]
pub(crate) enum Arena {
    /// Sub-allocated from the device's reservation.
    Device {
        /// The address of the first byte.
        base: u64,
        /// Its length.
        bytes: u64,
    },
    /// A range of addresses whose pages are mapped one by one.
    Pages(Pages),
    /// Pinned memory of the host, which kernels do not access.
    Host(Pinned),
}

impl Arena {
    /// Frees the memory, once no work uses it.
    pub fn close(self, shared: &Shared) {
        let mut reservation = shared.reservation();
        match (self, &mut *reservation) {
            (Arena::Device { base, .. }, Some(reservation)) => {
                reservation.free(&shared.context, base)
            }
            (Arena::Pages(pages), Some(reservation)) => {
                reservation.uncharge(pages.mapped());
                pages.close(&shared.context);
            }
            // The driver's own memory is freed when it is dropped.
            (Arena::Host(_), _) | (_, None) => {}
        }
    }

    fn bytes(&self) -> u64 {
        match self {
            Arena::Device { bytes, .. } => *bytes,
            Arena::Pages(pages) => pages.bytes(),
            Arena::Host(memory) => memory.len() as u64,
        }
    }
}

impl Device {
    /// A zeroed arena, returned as one region.
    ///
    /// # Errors
    /// If the device has too little memory, or its limit does not allow so much.
    pub fn reserve(&mut self, bytes: u64) -> Result<Region> {
        self.ready()?;
        let base = self.allocate(bytes)?;
        let region = self.add(Arena::Device { base, bytes });
        match self.fill(&region, 0) {
            Ok(()) => Ok(region),
            Err(e) => {
                self.release(region.arena);
                Err(e)
            }
        }
    }

    /// A zeroed arena of pinned host memory, returned as one region. It is used only for copies
    /// from and to the device, see [`Device::start_copy`].
    ///
    /// # Errors
    /// If the host cannot pin so much memory.
    pub fn reserve_host(&mut self, bytes: u64) -> Result<Region> {
        self.ready()?;
        let refused = DriverError::OutOfMemory { bytes };
        let memory = usize::try_from(bytes)
            .map_err(|_| refused)
            .and_then(Pinned::new);
        let memory = self.noting(memory)?;
        Ok(self.add(Arena::Host(memory)))
    }

    fn add(&mut self, arena: Arena) -> Region {
        let slot = self
            .arenas
            .iter()
            .position(Option::is_none)
            .unwrap_or(self.arenas.len());
        if slot == self.arenas.len() {
            self.arenas.push(None);
        }
        let bytes = arena.bytes();
        self.arenas[slot] = Some(arena);
        Region {
            arena: slot as u32,
            offset: 0,
            bytes,
        }
    }

    /// Calls `work` with the reservation, which is made at the first use of the device.
    fn with_reservation<T>(
        &self,
        work: impl FnOnce(&Shared, &mut Reservation) -> Result<T>,
    ) -> Result<T> {
        let Properties {
            total_bytes,
            maps_pages,
            ..
        } = self.shared.properties;
        let mut reservation = self.shared.reservation();
        let reservation = match &mut *reservation {
            Some(reservation) => reservation,
            none => none.insert(Reservation::new(
                &self.shared.context,
                &self.limits,
                total_bytes,
                maps_pages,
            )?),
        };
        self.noting(work(&self.shared, reservation))
    }

    /// The address of so many bytes of the reservation.
    pub(crate) fn allocate(&self, bytes: u64) -> Result<u64> {
        self.with_reservation(|shared, reservation| reservation.allocate(&shared.context, bytes))
    }

    /// Frees an arena, after all work. Its regions must not be used again.
    pub fn release(&mut self, arena: u32) {
        let Some(arena) = self.arenas.get_mut(arena as usize).and_then(Option::take) else {
            return;
        };
        // If the device is lost, its memory is lost too.
        let _ = self.synchronize_all();
        arena.close(&self.shared);
    }

    /// Whether ranges of pages can be reserved beside the reservation: where memory is mapped page
    /// by page and was not preallocated. Makes the reservation at the first use of the device.
    ///
    /// # Errors
    /// If the reservation cannot be made.
    pub fn has_ranges(&self) -> Result<bool> {
        self.ready()?;
        Ok(self.shared.properties.maps_pages
            && self.with_reservation(|_, reservation| Ok(reservation.has_ranges()))?)
    }

    /// An arena of addresses without memory; [`Device::map`] maps memory to whole pages of it.
    /// Returns the arena and the bytes of a page, or `None` where ranges are not available, see
    /// [`Device::has_ranges`].
    ///
    /// # Errors
    /// If the driver has too few addresses.
    pub fn range(&mut self, bytes: u64) -> Result<Option<(u32, u64)>> {
        self.ready()?;
        let pages =
            self.with_reservation(|shared, reservation| reservation.pages(&shared.context, bytes))?;
        Ok(pages.map(|pages| {
            let page = pages.page();
            (self.add(Arena::Pages(pages)).arena, page)
        }))
    }

    /// Calls `work` with the range that contains a region.
    fn in_pages<T>(
        &mut self,
        arena: u32,
        work: impl FnOnce(&Shared, &mut Pages) -> Result<T>,
    ) -> Result<T> {
        let Some(Some(Arena::Pages(pages))) = self.arenas.get_mut(arena as usize) else {
            panic!("arena {arena} is no range of pages");
        };
        let done = work(&self.shared, pages);
        self.noting(done)
    }

    /// Maps memory to whole pages of a range, which have none. Its contents are undefined.
    ///
    /// # Errors
    /// If the device has too little memory, or its limit does not allow so much: then no page is
    /// mapped.
    ///
    /// # Panics
    /// If the region is not whole pages of a range.
    pub fn map(&mut self, pages: &Region) -> Result<()> {
        self.ready()?;
        self.with_reservation(|_, reservation| reservation.charge(pages.bytes))?;
        let mapped = self.in_pages(pages.arena, |shared, range| {
            range.map(&shared.context, pages.offset, pages.bytes)
        });
        if mapped.is_err() {
            self.with_reservation(|_, reservation| {
                reservation.uncharge(pages.bytes);
                Ok(())
            })?;
        }
        mapped
    }

    /// Unmaps whole pages of a range and returns their memory to the driver, after all work.
    ///
    /// # Panics
    /// If the region is not whole pages of a range.
    pub fn unmap(&mut self, pages: &Region) {
        // If the device is lost, its memory is lost too.
        let _ = self.synchronize_all();
        let unmapped = self.in_pages(pages.arena, |shared, range| {
            let before = range.mapped();
            range.unmap(&shared.context, pages.offset, pages.bytes);
            Ok(before - range.mapped())
        });
        let _ = unmapped.and_then(|bytes| {
            self.with_reservation(|_, reservation| {
                reservation.uncharge(bytes);
                Ok(())
            })
        });
    }

    /// Remaps the memory of whole pages of a range, one region after the other, to the pages of
    /// another region of it, which have none, after all work. No byte is copied.
    ///
    /// # Errors
    /// If the driver refuses: then all memory is mapped as before.
    ///
    /// # Panics
    /// If the regions are not whole pages of one range, or the first ones have no memory.
    pub fn remap(&mut self, from: &[Region], to: &Region) -> Result<()> {
        self.synchronize_all()?;
        assert!(
            from.iter().all(|r| r.arena == to.arena),
            "pages of {from:?} for another range's {to:?}"
        );
        assert_eq!(
            from.iter().map(|r| r.bytes).sum::<u64>(),
            to.bytes,
            "pages of {from:?} for {to:?}"
        );
        let from: Vec<(u64, u64)> = from.iter().map(|r| (r.offset, r.bytes)).collect();
        self.in_pages(to.arena, |shared, range| {
            range.remap(&shared.context, &from, to.offset)
        })
    }

    fn arena(&self, region: &Region) -> Option<&Arena> {
        let arena = self.arenas.get(region.arena as usize)?.as_ref()?;
        region
            .offset
            .checked_add(region.bytes)
            .is_some_and(|end| end <= arena.bytes())
            .then_some(arena)
    }

    /// The address of a region's first byte.
    ///
    /// # Panics
    /// If the region is not inside a live arena of the device.
    pub fn address(&self, region: &Region) -> u64 {
        let base = match self.arena(region) {
            Some(Arena::Device { base, .. }) => Some(*base),
            Some(Arena::Pages(pages)) => Some(pages.base()),
            Some(Arena::Host(_)) | None => None,
        };
        base.unwrap_or_else(|| panic!("{region:?} is not inside a live arena of the device"))
            + region.offset
    }

    /// The address of the first byte of a region of the host.
    ///
    /// # Panics
    /// If the region is not inside a live arena of the host.
    pub fn host_address(&self, region: &Region) -> u64 {
        let Some(Arena::Host(memory)) = self.arena(region) else {
            panic!("{region:?} is not inside a live arena of the host");
        };
        memory.as_ptr() as u64 + region.offset
    }

    /// Whether a region is in host memory.
    pub(crate) fn is_host(&self, region: &Region) -> bool {
        matches!(self.arena(region), Some(Arena::Host(_)))
    }
}
