//! A device's memory: one reservation for the process, from which arenas are cut.
//!
//! Where the driver can map memory behind addresses page by page, the reservation is a range of
//! addresses as long as the limit, and memory is put behind it when an arena needs it, or all at
//! once if the reservation is made ahead (*preallocated*, the default on a device, which others may
//! use too: it is better to know at once). Where it cannot, the reservation is one allocation made
//! ahead, or each arena an allocation of its own.
//!
//! Where memory is mapped as it is needed, there can be ranges beside the reservation whose pages
//! are mapped one by one ([`Pages`]). Their bytes count as the reservation's do, towards the same
//! limit.

use std::collections::BTreeMap;

use crate::driver::{AddressRange, Context, DriverError, Physical, page_bytes};
use crate::pages::Pages;

/// What arenas start at a multiple of, bytes.
pub(crate) const ARENA_ALIGN: u64 = 256;

/// About how many pages all that may be used is mapped in at most: each is some calls of the
/// driver.
const PAGES_MOST: u64 = 4096;

/// How much of a device's memory may be used, and when it is taken.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limits {
    /// The part of the device's memory that may be used, above 0 and at most 1.
    pub fraction: f64,
    /// The most bytes that may be used, whatever the fraction says.
    pub bytes_max: Option<u64>,
    /// Whether all of it is taken at the first use.
    pub preallocate: bool,
}

/// What of a device's memory is used, bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// What may be used.
    pub limit: u64,
    /// What the driver has given.
    pub reserved: u64,
    /// What arenas hold.
    pub used: u64,
}

/// The reservation.
#[derive(Debug)]
pub(crate) struct Space {
    limit: u64,
    used: u64,
    /// Bytes behind pages of ranges beside this.
    paged: u64,
    backing: Backing,
    free: Extents,
    arenas: BTreeMap<u64, u64>,
}

#[derive(Debug)]
enum Backing {
    /// One allocation.
    Whole { base: u64 },
    /// A range of addresses with memory behind some of its pages.
    Mapped {
        range: AddressRange,
        page: u64,
        pieces: BTreeMap<u64, Piece>,
        ahead: bool,
    },
    /// An allocation for each arena.
    Each,
}

/// Memory behind neighbouring pages.
#[derive(Debug)]
struct Piece {
    bytes: u64,
    memory: Physical,
    /// How many arenas reach into it.
    arenas: usize,
}

impl Space {
    /// Makes the reservation.
    pub fn new(
        context: &Context,
        limits: &Limits,
        total: u64,
        maps_pages: bool,
    ) -> Result<Space, DriverError> {
        // A whole number of bytes below 2^53 for every device there is.
        let limit = (limits.fraction * total as f64).floor() as u64;
        let limit =
            limits.bytes_max.map_or(limit, |most| limit.min(most)) / ARENA_ALIGN * ARENA_ALIGN;
        let mut space = Space {
            limit,
            used: 0,
            paged: 0,
            backing: Backing::Each,
            free: Extents::default(),
            arenas: BTreeMap::new(),
        };
        if maps_pages {
            let page = page_bytes(context)?;
            let range = AddressRange::reserve(context, limit.next_multiple_of(page))?;
            space.free.give(range.base, limit);
            let mut pieces = BTreeMap::new();
            let mut ahead = limits.preallocate;
            if ahead {
                // Others may hold what the limit allows; then memory is taken as it is needed.
                match range.map_new(context, 0, range.bytes) {
                    Ok(memory) => drop(pieces.insert(
                        0,
                        Piece {
                            bytes: range.bytes,
                            memory,
                            arenas: 0,
                        },
                    )),
                    Err(DriverError::OutOfMemory { .. }) => {
                        log::warn!(
                            "{limit} bytes of the device cannot be taken ahead: others use them; memory is taken as it is needed"
                        );
                        ahead = false;
                    }
                    Err(e) => return Err(e),
                }
            }
            space.backing = Backing::Mapped {
                range,
                page,
                pieces,
                ahead,
            };
        } else if limits.preallocate {
            let base = context.allocate(limit)?;
            space.free.give(base, limit);
            space.backing = Backing::Whole { base };
        }
        Ok(space)
    }

    pub fn usage(&self) -> Usage {
        let reserved = match &self.backing {
            Backing::Whole { .. } => self.limit,
            Backing::Mapped { pieces, .. } => {
                pieces.values().map(|p| p.bytes).sum::<u64>() + self.paged
            }
            Backing::Each => self.used,
        };
        Usage {
            limit: self.limit,
            reserved,
            used: self.used,
        }
    }

    /// Whether all that may be used has been taken from the driver.
    pub fn is_ahead(&self) -> bool {
        matches!(
            self.backing,
            Backing::Whole { .. } | Backing::Mapped { ahead: true, .. }
        )
    }

    /// Bytes that may still be taken from the driver, where that is done page by page.
    fn room(&self) -> u64 {
        let Backing::Mapped { page, .. } = &self.backing else {
            return 0;
        };
        self.limit
            .next_multiple_of(*page)
            .saturating_sub(self.usage().reserved)
    }

    /// A range of its own, whose pages are mapped as they are needed; `None` where memory is not
    /// mapped or was taken ahead.
    pub fn pages(&self, context: &Context, bytes: u64) -> Result<Option<Pages>, DriverError> {
        match &self.backing {
            Backing::Mapped {
                page, ahead: false, ..
            } => {
                let page = page
                    .next_power_of_two()
                    .max((self.limit / PAGES_MOST).next_power_of_two());
                Pages::reserve(context, bytes, page).map(Some)
            }
            _ => Ok(None),
        }
    }

    /// Counts bytes that a range is about to map.
    pub fn lend(&mut self, bytes: u64) -> Result<(), DriverError> {
        if self
            .used
            .checked_add(bytes)
            .is_none_or(|used| used > self.limit)
            || bytes > self.room()
        {
            return Err(DriverError::OutOfMemory { bytes });
        }
        (self.used, self.paged) = (self.used + bytes, self.paged + bytes);
        Ok(())
    }

    /// Counts bytes that a range maps no more.
    pub fn take_back(&mut self, bytes: u64) {
        (self.used, self.paged) = (
            self.used.saturating_sub(bytes),
            self.paged.saturating_sub(bytes),
        );
    }

    /// The address of so many bytes; none for 0.
    pub fn take(&mut self, context: &Context, bytes: u64) -> Result<u64, DriverError> {
        let refused = DriverError::OutOfMemory { bytes };
        let padded = bytes
            .checked_next_multiple_of(ARENA_ALIGN)
            .ok_or(refused.clone())?;
        if padded == 0 {
            return Ok(0);
        }
        if self
            .used
            .checked_add(padded)
            .is_none_or(|used| used > self.limit)
        {
            return Err(refused);
        }
        let room = self.room();
        let base = match &mut self.backing {
            Backing::Each => context.allocate(padded)?,
            Backing::Whole { .. } => self.free.take(padded).ok_or(refused)?,
            Backing::Mapped {
                range,
                page,
                pieces,
                ..
            } => {
                let base = self.free.take(padded).ok_or(refused)?;
                if let Err(e) = back(
                    context,
                    (range, *page),
                    pieces,
                    (base - range.base, padded),
                    room,
                ) {
                    self.free.give(base, padded);
                    return Err(e);
                }
                base
            }
        };
        self.used += padded;
        self.arenas.insert(base, padded);
        Ok(base)
    }

    /// Takes an arena back; work that uses it must be done.
    pub fn give(&mut self, context: &Context, base: u64) {
        let Some(bytes) = self.arenas.remove(&base) else {
            return;
        };
        self.used -= bytes;
        match &mut self.backing {
            Backing::Each => context.free(base),
            Backing::Whole { .. } => self.free.give(base, bytes),
            Backing::Mapped {
                range,
                pieces,
                ahead,
                ..
            } => {
                self.free.give(base, bytes);
                let (from, to) = (base - range.base, base - range.base + bytes);
                let touched: Vec<u64> = pieces
                    .range(..to)
                    .filter(|(at, p)| *at + p.bytes > from)
                    .map(|(at, _)| *at)
                    .collect();
                for at in touched {
                    let Some(piece) = pieces.get_mut(&at) else {
                        continue;
                    };
                    piece.arenas -= 1;
                    if piece.arenas == 0
                        && !*ahead
                        && let Some(piece) = pieces.remove(&at)
                    {
                        range.unmap(context, at, piece.bytes);
                        piece.memory.release(context);
                    }
                }
            }
        }
    }

    /// Gives everything back to the driver.
    pub fn close(&mut self, context: &Context) {
        match std::mem::replace(&mut self.backing, Backing::Each) {
            Backing::Each => self.arenas.keys().for_each(|&base| context.free(base)),
            Backing::Whole { base } => context.free(base),
            Backing::Mapped { range, pieces, .. } => {
                for (at, piece) in pieces {
                    range.unmap(context, at, piece.bytes);
                    piece.memory.release(context);
                }
                range.free(context);
            }
        }
        self.arenas.clear();
    }
}

/// Puts memory behind those pages of a stretch that have none, `room` bytes at most, and counts it
/// at all that it touches.
fn back(
    context: &Context,
    (range, page): (&AddressRange, u64),
    pieces: &mut BTreeMap<u64, Piece>,
    (offset, bytes): (u64, u64),
    room: u64,
) -> Result<(), DriverError> {
    let (mut at, end) = (
        offset / page * page,
        (offset + bytes).next_multiple_of(page),
    );
    let mut touched: Vec<u64> = pieces
        .range(..end)
        .filter(|(start, p)| *start + p.bytes > at)
        .map(|(start, _)| *start)
        .collect();
    let mut fresh = Vec::new();
    let known: Vec<(u64, u64)> = touched
        .iter()
        .map(|start| (*start, *start + pieces[start].bytes))
        .collect();
    let there: u64 = known
        .iter()
        .map(|&(start, stop)| stop.min(end) - start.max(at))
        .sum();
    if end - at - there > room {
        return Err(DriverError::OutOfMemory { bytes });
    }
    for (start, stop) in known.into_iter().chain([(end, end)]) {
        if start > at {
            match range.map_new(context, at, start - at) {
                Ok(memory) => {
                    pieces.insert(
                        at,
                        Piece {
                            bytes: start - at,
                            memory,
                            arenas: 0,
                        },
                    );
                    fresh.push(at);
                }
                Err(e) => {
                    // What was mapped for this stretch goes back.
                    for at in fresh {
                        if let Some(piece) = pieces.remove(&at) {
                            range.unmap(context, at, piece.bytes);
                            piece.memory.release(context);
                        }
                    }
                    return Err(e);
                }
            }
        }
        at = at.max(stop);
    }
    touched.extend(fresh);
    for start in touched {
        if let Some(piece) = pieces.get_mut(&start) {
            piece.arenas += 1;
        }
    }
    Ok(())
}

/// Free stretches of addresses, neighbours joined.
#[derive(Debug, Default)]
struct Extents(BTreeMap<u64, u64>);

impl Extents {
    /// The start of the smallest stretch that suffices; the rest of it stays free.
    fn take(&mut self, bytes: u64) -> Option<u64> {
        let (&base, &length) = self
            .0
            .iter()
            .filter(|(_, length)| **length >= bytes)
            .min_by_key(|(base, length)| (**length, **base))?;
        self.0.remove(&base);
        if length > bytes {
            self.0.insert(base + bytes, length - bytes);
        }
        Some(base)
    }

    fn give(&mut self, base: u64, bytes: u64) {
        let (mut base, mut bytes) = (base, bytes);
        if let Some((&before, &length)) = self.0.range(..base).next_back()
            && before + length == base
        {
            self.0.remove(&before);
            (base, bytes) = (before, bytes + length);
        }
        if let Some(after) = self.0.remove(&(base + bytes)) {
            bytes += after;
        }
        self.0.insert(base, bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_given_back_is_joined_and_can_be_taken_as_one() {
        let mut free = Extents::default();
        free.give(1 << 20, 4096);
        let parts: Vec<u64> = (0..4)
            .map(|_| free.take(1024).expect("there is room"))
            .collect();
        assert_eq!(free.take(256), None);
        for at in [2, 0, 3, 1] {
            free.give(parts[at], 1024);
        }
        assert_eq!(free.0, BTreeMap::from([(1 << 20, 4096)]));
        // The smallest stretch that suffices is taken.
        assert_eq!(free.take(4096), Some(1 << 20));
        free.give(0, 512);
        free.give(8192, 256);
        assert_eq!(free.take(256), Some(8192));
    }
}
