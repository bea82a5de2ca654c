//! A range of addresses whose pages get memory and lose it again, each by itself.
//!
//! Every page is an allocation of its own, so that what lies behind one address can be put behind
//! another without a copy.

use std::collections::BTreeMap;

use crate::driver::{AddressRange, Context, DriverError, Physical};

type Result<T> = std::result::Result<T, DriverError>;

/// See the module documentation.
#[derive(Debug)]
pub(crate) struct Pages {
    range: AddressRange,
    page: u64,
    /// What lies behind the pages that have memory, by their offsets.
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

    /// Bytes of memory behind the addresses.
    pub fn mapped(&self) -> u64 {
        self.memory.len() as u64 * self.page
    }

    /// The offsets of the pages of a stretch.
    ///
    /// # Panics
    /// If these are not whole pages of the range.
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

    /// Puts new memory behind pages that have none. On an error none of them has any.
    pub fn map(&mut self, context: &Context, offset: u64, bytes: u64) -> Result<()> {
        let mut fresh = Vec::new();
        let placed = self.each(offset, bytes).try_for_each(|at| {
            let memory = Physical::new(context, self.page)?;
            let placed = self.range.place(context, at, self.page, &memory);
            // Even what has no address yet is kept, to be given back.
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

    /// Gives the memory behind pages back to the driver; work that uses it must be done.
    pub fn unmap(&mut self, context: &Context, offset: u64, bytes: u64) {
        for at in self.each(offset, bytes) {
            if let Some(memory) = self.memory.remove(&at) {
                self.range.unmap(context, at, self.page);
                memory.release(context);
            }
        }
    }

    /// Puts the memory behind these stretches, one after the other, behind the addresses from `to`
    /// on, which have none; work that uses it must be done. On an error everything is where it was.
    ///
    /// # Panics
    /// If a page has no memory that should.
    pub fn remap(&mut self, context: &Context, from: &[(u64, u64)], to: u64) -> Result<()> {
        let sources: Vec<u64> = from
            .iter()
            .flat_map(|&(offset, bytes)| self.each(offset, bytes))
            .collect();
        let targets: Vec<u64> = self.each(to, sources.len() as u64 * self.page).collect();
        // For a moment the memory is behind two addresses: so nothing has to be undone that could
        // fail.
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

    /// Gives memory and addresses back; work that uses them must be done.
    pub fn close(mut self, context: &Context) {
        for (at, memory) in std::mem::take(&mut self.memory) {
            self.range.unmap(context, at, self.page);
            memory.release(context);
        }
        self.range.free(context);
    }
}
