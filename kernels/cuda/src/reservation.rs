//! The memory of a device: one reservation per process, from which arenas are sub-allocated.
//!
//! Where the driver can map memory page by page, the reservation is a range of addresses as long as
//! the limit. Memory is mapped to it when an arena needs it, or all at once if the reservation is
//! *preallocated*, which is the default on a device because other processes may use it too, and a
//! shortage is better known at the start. Where the driver cannot map pages, or refuses to map the
//! first one, the reservation is one preallocated block, or each arena is a separate allocation.
//!
//! Where memory is mapped on demand, there can be ranges beside the reservation whose pages are
//! mapped individually ([`Pages`]). Their bytes count towards the same limit.

use std::collections::BTreeMap;

use crate::driver::{AddressRange, Context, DriverError, Physical, page_bytes};
use crate::pages::Pages;

/// The alignment of arenas, bytes.
pub(crate) const ARENA_ALIGN: u64 = 256;

/// The approximate maximum number of pages that cover the limit, because each page takes several
/// driver calls.
const PAGES_MOST: u64 = 4096;

/// If this variable is 1, each arena is an allocation of its own in tests, so that a memory checker
/// finds accesses beyond its end: it does not in a mapped page that several arenas share.
#[cfg(feature = "emulator")]
const SEPARATE_ARENAS: &str = "SLABWISE_SEPARATE_ARENAS";

/// Whether each arena is an allocation of its own, of exactly its bytes.
#[cfg(feature = "emulator")]
pub fn separate_arenas() -> bool {
    std::env::var_os(SEPARATE_ARENAS).is_some_and(|value| value == "1")
}

#[cfg(not(feature = "emulator"))]
fn separate_arenas() -> bool {
    false
}

/// The limits of a device's memory, and when it is reserved.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limits {
    /// The fraction of the device's memory that may be used, above 0 and at most 1.
    pub fraction: f64,
    /// An additional limit, bytes.
    pub bytes_max: Option<u64>,
    /// Whether all of it is reserved at the first use.
    pub preallocate: bool,
}

/// The use of a device's memory, bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// The limit.
    pub limit: u64,
    /// Bytes allocated from the driver.
    pub reserved: u64,
    /// Bytes in arenas.
    pub used: u64,
}

/// The memory reservation of a device.
#[derive(Debug)]
pub(crate) struct Reservation {
    limit: u64,
    used: u64,
    /// Mapped bytes of ranges beside the reservation.
    paged: u64,
    backing: Backing,
    free: FreeRanges,
    arenas: BTreeMap<u64, u64>,
}

#[derive(Debug)]
enum Backing {
    /// One allocation.
    Whole { base: u64 },
    /// A range of addresses, some of whose pages are mapped.
    Mapped {
        range: AddressRange,
        page: u64,
        pieces: BTreeMap<u64, Piece>,
        preallocated: bool,
    },
    /// An allocation for each arena.
    Each,
}

impl Backing {
    /// A range of addresses as long as the limit, to which memory can be mapped.
    fn mapped(context: &Context, limit: u64, preallocate: bool) -> Result<Backing, DriverError> {
        let page = page_bytes(context)?;
        let range = AddressRange::reserve(context, limit.next_multiple_of(page))?;
        let mut pieces = BTreeMap::new();
        if preallocate {
            // Other processes may hold memory within the limit; then it is taken on demand.
            match range.map_new(context, 0, range.bytes) {
                Ok(memory) => {
                    let (bytes, arenas) = (range.bytes, 0);
                    let piece = Piece {
                        bytes,
                        memory,
                        arenas,
                    };
                    pieces.insert(0, piece);
                }
                Err(DriverError::OutOfMemory { .. }) => warn_of_others(limit),
                Err(e) => {
                    range.free(context);
                    return Err(e);
                }
            }
        }
        if pieces.is_empty()
            && let Err(e) = try_page(context, &range, page)
        {
            range.free(context);
            return Err(e);
        }
        Ok(Backing::Mapped {
            preallocated: !pieces.is_empty(),
            range,
            page,
            pieces,
        })
    }
}

/// Memory mapped to neighbouring pages.
#[derive(Debug)]
struct Piece {
    bytes: u64,
    memory: Physical,
    /// The number of arenas that overlap it.
    arenas: usize,
}

impl Reservation {
    /// Makes the reservation.
    pub fn new(
        context: &Context,
        limits: &Limits,
        total: u64,
        maps_pages: bool,
    ) -> Result<Reservation, DriverError> {
        // A whole number of bytes below 2^53 for every existing device.
        let limit = (limits.fraction * total as f64).floor() as u64;
        let limit =
            limits.bytes_max.map_or(limit, |most| limit.min(most)) / ARENA_ALIGN * ARENA_ALIGN;
        let mut reservation = Reservation {
            limit,
            used: 0,
            paged: 0,
            backing: Backing::Each,
            free: FreeRanges::default(),
            arenas: BTreeMap::new(),
        };
        let mapped = match maps_pages && !separate_arenas() {
            true => match Backing::mapped(context, limit, limits.preallocate) {
                Err(e @ (DriverError::Failed { .. } | DriverError::OutOfMemory { .. })) => {
                    log::warn!("memory is allocated, not mapped page by page: {e}");
                    None
                }
                mapped => Some(mapped?),
            },
            false => None,
        };
        if let Some(backing) = mapped {
            if let Backing::Mapped { range, .. } = &backing {
                reservation.free.free(range.base, limit);
            }
            reservation.backing = backing;
        } else if limits.preallocate {
            match context.allocate(limit) {
                Ok(base) => {
                    reservation.free.free(base, limit);
                    reservation.backing = Backing::Whole { base };
                }
                Err(DriverError::OutOfMemory { .. }) => warn_of_others(limit),
                Err(e) => return Err(e),
            }
        }
        Ok(reservation)
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

    /// Whether ranges can be reserved beside the reservation, see [`Reservation::pages`].
    pub fn has_ranges(&self) -> bool {
        matches!(
            self.backing,
            Backing::Mapped {
                preallocated: false,
                ..
            }
        )
    }

    /// Bytes that can still be mapped, where memory is mapped page by page.
    fn headroom(&self) -> u64 {
        let Backing::Mapped { page, .. } = &self.backing else {
            return 0;
        };
        self.limit
            .next_multiple_of(*page)
            .saturating_sub(self.usage().reserved)
    }

    /// A separate range, whose pages are mapped on demand; `None` where memory is not mapped or was
    /// preallocated.
    pub fn pages(&self, context: &Context, bytes: u64) -> Result<Option<Pages>, DriverError> {
        match &self.backing {
            Backing::Mapped {
                page,
                preallocated: false,
                ..
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
    pub fn charge(&mut self, bytes: u64) -> Result<(), DriverError> {
        if self
            .used
            .checked_add(bytes)
            .is_none_or(|used| used > self.limit)
            || bytes > self.headroom()
        {
            return Err(DriverError::OutOfMemory { bytes });
        }
        (self.used, self.paged) = (self.used + bytes, self.paged + bytes);
        Ok(())
    }

    /// Counts bytes that a range has unmapped.
    pub fn uncharge(&mut self, bytes: u64) {
        (self.used, self.paged) = (
            self.used.saturating_sub(bytes),
            self.paged.saturating_sub(bytes),
        );
    }

    /// The address of a new arena of so many bytes; 0 for 0 bytes.
    pub fn allocate(&mut self, context: &Context, bytes: u64) -> Result<u64, DriverError> {
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
        let headroom = self.headroom();
        let base = match &mut self.backing {
            // Padding would hide accesses beyond the end from a memory checker.
            Backing::Each if separate_arenas() => context.allocate(bytes)?,
            Backing::Each => context.allocate(padded)?,
            Backing::Whole { .. } => self.free.allocate(padded).ok_or(refused)?,
            Backing::Mapped {
                range,
                page,
                pieces,
                ..
            } => {
                let base = self.free.allocate(padded).ok_or(refused)?;
                if let Err(e) = map_missing(
                    context,
                    (range, *page),
                    pieces,
                    (base - range.base, padded),
                    headroom,
                ) {
                    self.free.free(base, padded);
                    return Err(e);
                }
                base
            }
        };
        self.used += padded;
        self.arenas.insert(base, padded);
        Ok(base)
    }

    /// Frees an arena; work that uses it must be done.
    pub fn free(&mut self, context: &Context, base: u64) {
        let Some(bytes) = self.arenas.remove(&base) else {
            return;
        };
        self.used -= bytes;
        match &mut self.backing {
            Backing::Each => context.free(base),
            Backing::Whole { .. } => self.free.free(base, bytes),
            Backing::Mapped {
                range,
                pieces,
                preallocated,
                ..
            } => {
                self.free.free(base, bytes);
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
                        && !*preallocated
                        && let Some(piece) = pieces.remove(&at)
                    {
                        range.unmap(context, at, piece.bytes);
                        piece.memory.release(context);
                    }
                }
            }
        }
    }

    /// Returns all memory to the driver.
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

/// Maps a page and unmaps it again, because a driver that reserves addresses may still refuse to
/// map memory to them. A lack of memory is no refusal.
fn try_page(context: &Context, range: &AddressRange, page: u64) -> Result<(), DriverError> {
    match range.map_new(context, 0, page) {
        Ok(memory) => {
            range.unmap(context, 0, page);
            memory.release(context);
            Ok(())
        }
        Err(DriverError::OutOfMemory { .. }) => Ok(()),
        Err(e) => Err(e),
    }
}

/// Warns that the limit is not preallocated.
fn warn_of_others(limit: u64) {
    log::warn!(
        "{limit} bytes of the device cannot be taken ahead: others use them; memory is taken as it is needed"
    );
}

/// Maps memory to the unmapped pages of a region, at most `room` bytes, and counts the region as a
/// user of all pieces that it overlaps.
fn map_missing(
    context: &Context,
    (range, page): (&AddressRange, u64),
    pieces: &mut BTreeMap<u64, Piece>,
    (offset, bytes): (u64, u64),
    headroom: u64,
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
    if end - at - there > headroom {
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
                    // Unmaps the new pieces again.
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

/// Free address ranges, with neighbours merged.
#[derive(Debug, Default)]
struct FreeRanges(BTreeMap<u64, u64>);

impl FreeRanges {
    /// The start of the smallest sufficient range (best fit); the rest of it stays free.
    fn allocate(&mut self, bytes: u64) -> Option<u64> {
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

    fn free(&mut self, base: u64, bytes: u64) {
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
    fn freed_ranges_are_merged() {
        let mut free = FreeRanges::default();
        free.free(1 << 20, 4096);
        let parts: Vec<u64> = (0..4)
            .map(|_| free.allocate(1024).expect("there is room"))
            .collect();
        assert_eq!(free.allocate(256), None);
        for at in [2, 0, 3, 1] {
            free.free(parts[at], 1024);
        }
        assert_eq!(free.0, BTreeMap::from([(1 << 20, 4096)]));
        // The smallest sufficient range is taken.
        assert_eq!(free.allocate(4096), Some(1 << 20));
        free.free(0, 512);
        free.free(8192, 256);
        assert_eq!(free.allocate(256), Some(8192));
    }
}
