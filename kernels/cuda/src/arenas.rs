//! What a session has of a device's memory, and of pinned memory of the host: arenas, named by
//! number.

use slabwise_kernels::memory::Region;

use crate::device::{Device, Shared};
use crate::driver::{DriverError, Pinned, Properties};
use crate::pages::Pages;
use crate::space::Space;

type Result<T> = std::result::Result<T, DriverError>;

/// Memory of a session.
#[derive(Debug)]
pub(crate) enum Arena {
    /// Cut from the device's reservation.
    Device {
        /// The address of the first byte.
        base: u64,
        /// Its length.
        bytes: u64,
    },
    /// A range of addresses whose pages are mapped one by one.
    Pages(Pages),
    /// Of the host, which kernels do not reach.
    Host(Pinned),
}

impl Arena {
    /// Gives the memory back, once no work uses it.
    pub fn close(self, shared: &Shared) {
        let mut space = shared.space();
        match (self, &mut *space) {
            (Arena::Device { base, .. }, Some(space)) => space.give(&shared.context, base),
            (Arena::Pages(pages), Some(space)) => {
                space.take_back(pages.mapped());
                pages.close(&shared.context);
            }
            // The driver's own is given back when it is dropped.
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
    /// An arena of zeros, all of it as a region.
    ///
    /// # Errors
    /// If the device has not so much memory, or may not use it.
    pub fn reserve(&mut self, bytes: u64) -> Result<Region> {
        self.ready()?;
        let base = self.take(bytes)?;
        let region = self.add(Arena::Device { base, bytes });
        self.fill(&region, 0)?;
        Ok(region)
    }

    /// An arena of pinned memory of the host, zeros, all of it as a region: for copies from the
    /// device and back, see
    /// [`Device::start_copy`], and for nothing else.
    ///
    /// # Errors
    /// If the host has not so much memory to pin.
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

    /// Lets `work` have the reservation, which is made if this is the first use of the device.
    fn in_space<T>(&self, work: impl FnOnce(&Shared, &mut Space) -> Result<T>) -> Result<T> {
        let Properties {
            total_bytes,
            maps_pages,
            ..
        } = self.shared.properties;
        let mut space = self.shared.space();
        let space = match &mut *space {
            Some(space) => space,
            none => none.insert(Space::new(
                &self.shared.context,
                &self.limits,
                total_bytes,
                maps_pages,
            )?),
        };
        self.noting(work(&self.shared, space))
    }

    /// The address of so many bytes of the reservation.
    pub(crate) fn take(&self, bytes: u64) -> Result<u64> {
        self.in_space(|shared, space| space.take(&shared.context, bytes))
    }

    /// Gives an arena back, after all work. Regions of it must not be used again.
    pub fn release(&mut self, arena: u32) {
        let Some(arena) = self.arenas.get_mut(arena as usize).and_then(Option::take) else {
            return;
        };
        // If the device is lost its memory is, too.
        let _ = self.synchronize();
        arena.close(&self.shared);
    }

    /// Whether ranges of pages can be had beside the reservation: where memory is mapped, and was
    /// not taken ahead. Makes the reservation if this is the first use of the device.
    ///
    /// # Errors
    /// If it cannot be made.
    pub fn has_ranges(&self) -> Result<bool> {
        self.ready()?;
        Ok(self.shared.properties.maps_pages && self.in_space(|_, space| Ok(!space.is_ahead()))?)
    }

    /// An arena of addresses without memory, which [`Device::map`] puts behind whole pages of it:
    /// the arena and the bytes of a page. `None` if there is no such thing, see
    /// [`Device::has_ranges`].
    ///
    /// # Errors
    /// If the driver has not so many addresses.
    pub fn range(&mut self, bytes: u64) -> Result<Option<(u32, u64)>> {
        self.ready()?;
        let pages = self.in_space(|shared, space| space.pages(&shared.context, bytes))?;
        Ok(pages.map(|pages| {
            let page = pages.page();
            (self.add(Arena::Pages(pages)).arena, page)
        }))
    }

    /// Lets `work` have the range that a region is in.
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

    /// Puts memory behind whole pages of a range, which have none. What it holds is anything.
    ///
    /// # Errors
    /// If the device has not so much memory, or may not use it: then none of the pages has any.
    ///
    /// # Panics
    /// If the region is not whole pages of a range.
    pub fn map(&mut self, pages: &Region) -> Result<()> {
        self.ready()?;
        self.in_space(|_, space| space.lend(pages.bytes))?;
        let mapped = self.in_pages(pages.arena, |shared, range| {
            range.map(&shared.context, pages.offset, pages.bytes)
        });
        if mapped.is_err() {
            self.in_space(|_, space| {
                space.take_back(pages.bytes);
                Ok(())
            })?;
        }
        mapped
    }

    /// Gives the memory behind whole pages of a range back to the driver, after all work.
    ///
    /// # Panics
    /// If the region is not whole pages of a range.
    pub fn unmap(&mut self, pages: &Region) {
        // If the device is lost its memory is, too.
        let _ = self.synchronize();
        let unmapped = self.in_pages(pages.arena, |shared, range| {
            let before = range.mapped();
            range.unmap(&shared.context, pages.offset, pages.bytes);
            Ok(before - range.mapped())
        });
        let _ = unmapped.and_then(|bytes| {
            self.in_space(|_, space| {
                space.take_back(bytes);
                Ok(())
            })
        });
    }

    /// Puts the memory behind whole pages of a range, one region after the other, behind the pages
    /// of another region of it, which have none, after all work. No byte is copied.
    ///
    /// # Errors
    /// If the driver refuses: then all memory is where it was.
    ///
    /// # Panics
    /// If the regions are not whole pages of one range with memory behind the first ones.
    pub fn remap(&mut self, from: &[Region], to: &Region) -> Result<()> {
        self.synchronize()?;
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

    /// Whether a region is the host's.
    pub(crate) fn is_host(&self, region: &Region) -> bool {
        matches!(self.arena(region), Some(Arena::Host(_)))
    }
}
