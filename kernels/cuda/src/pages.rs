//! A range of addresses whose pages are mapped and unmapped individually.
//!
//! Every page is an allocation, so that the memory at one address can be remapped to another
//! without a copy.

use std::collections::BTreeMap;

use crate::driver::{AddressRange, Context, DriverError, Physical};

type Result<T> = std::result::Result<T, DriverError>;

/// A range of addresses that is mapped page by page.
#[derive(Debug)]
pub(crate) struct Pages {
    range: AddressRange,
    page: u64,
    /// The memory of the mapped pages, by their offsets.
    memory: BTreeMap<u64, Physical>,
}

impl Pages {
    /// So many addresses, rounded up to whole pages, without memory.
    pub fn reserve(context: &Context, bytes: u64, page: u64) -> Result<Pages> {
        let rounded = bytes
            .max(1)
            .checked_next_multiple_of(page)
            .ok_or(DriverError::OutOfMemory { bytes })?;
        Ok(Pages {
            range: AddressRange::reserve(context, rounded)?,
            page,
            memory: BTreeMap::new(),
        })
    }

    pub fn base(&self) -> u64 {
        self.range.base
    }

    pub fn bytes(&self) -> u64 {
        self.range.bytes
    }

    pub fn page(&self) -> u64 {
        self.page
    }

    /// Mapped bytes.
    pub fn mapped(&self) -> u64 {
        self.memory.len() as u64 * self.page
    }

    /// The offsets of the pages of a region.
    ///
    /// # Panics
    /// If the region is not made of whole pages of the range.
    fn each(&self, offset: u64, bytes: u64) -> impl Iterator<Item = u64> + use<> {
        let page = self.page;
        let whole = offset.is_multiple_of(page) && bytes.is_multiple_of(page);
        assert!(
            whole
                && offset
                    .checked_add(bytes)
                    .is_some_and(|end| end <= self.range.bytes),
            "pages {offset}+{bytes} of {self:?}"
        );
        (0..bytes / page).map(move |k| offset + k * page)
    }

    /// Maps new memory to unmapped pages. On an error none of them is mapped.
    pub fn map(&mut self, context: &Context, offset: u64, bytes: u64) -> Result<()> {
        let mut fresh = Vec::new();
        let placed = self.each(offset, bytes).try_for_each(|at| {
            let memory = Physical::new(context, self.page)?;
            let placed = self.range.place(context, at, self.page, &memory);
            // Memory that is not mapped yet is recorded too, so that it is released.
            fresh.push((at, memory, placed.is_ok()));
            placed
        });
        match placed.and_then(|()| self.range.allow(context, offset, bytes)) {
            Ok(()) => {
                self.memory
                    .extend(fresh.into_iter().map(|(at, memory, _)| (at, memory)));
                Ok(())
            }
            Err(e) => {
                for (at, memory, placed) in fresh {
                    if placed {
                        self.range.unmap(context, at, self.page);
                    }
                    memory.release(context);
                }
                Err(if let DriverError::OutOfMemory { .. } = e {
                    DriverError::OutOfMemory { bytes }
                } else {
                    e
                })
            }
        }
    }

    /// Unmaps pages and returns their memory to the driver; work that uses it must be done.
    pub fn unmap(&mut self, context: &Context, offset: u64, bytes: u64) {
        for at in self.each(offset, bytes) {
            if let Some(memory) = self.memory.remove(&at) {
                self.range.unmap(context, at, self.page);
                memory.release(context);
            }
        }
    }

    /// Remaps the memory of these regions, one after the other, to the addresses from `to` on,
    /// which are unmapped; work that uses it must be done. On an error all memory is mapped as
    /// before.
    ///
    /// # Panics
    /// If a page of the regions is not mapped.
    pub fn remap(&mut self, context: &Context, from: &[(u64, u64)], to: u64) -> Result<()> {
        let sources: Vec<u64> = from
            .iter()
            .flat_map(|&(offset, bytes)| self.each(offset, bytes))
            .collect();
        let targets: Vec<u64> = self.each(to, sources.len() as u64 * self.page).collect();
        // The memory is temporarily mapped to two addresses, so that undoing consists only of calls
        // that cannot fail.
        let mut placed = 0;
        let mut moved = sources.iter().zip(&targets).try_for_each(|(from, &to)| {
            let memory = self
                .memory
                .get(from)
                .unwrap_or_else(|| panic!("page {from} of {:?} has no memory", self.range));
            self.range.place(context, to, self.page, memory)?;
            placed += 1;
            Ok(())
        });
        if moved.is_ok() {
            moved = self
                .range
                .allow(context, to, targets.len() as u64 * self.page);
        }
        if moved.is_err() {
            targets[..placed]
                .iter()
                .for_each(|&at| self.range.unmap(context, at, self.page));
            return moved;
        }
        for (from, to) in sources.into_iter().zip(targets) {
            self.range.unmap(context, from, self.page);
            if let Some(memory) = self.memory.remove(&from) {
                self.memory.insert(to, memory);
            }
        }
        Ok(())
    }

    /// Releases memory and addresses; work that uses them must be done.
    pub fn close(mut self, context: &Context) {
        for (at, memory) in std::mem::take(&mut self.memory) {
            self.range.unmap(context, at, self.page);
            memory.release(context);
        }
        self.range.free(context);
    }
}
