//! The source of a pool's bytes: the few driver calls that it needs.
//!
//! A source hands out *arenas*, addressed by number and offset, never by pointer. Those of a shared
//! device take `&self` inside and implement [`Source`] for a reference, as files implement `Read`;
//! the host's memory is owned and implements it itself. A pool calls a source only while it holds
//! no lock.

use std::fmt;
use std::time::Duration;

use slabwise_kernels::memory::{Memory, Region};

/// A queue of work of a device. Work of one stream is done in order; streams are independent of
/// each other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Stream(pub u16);

/// The memory of a device, in bytes, as its driver reports it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryInfo {
    /// Unused bytes.
    pub free: u64,
    /// All of its bytes.
    pub total: u64,
}

/// A refused request to a driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the driver has no {bytes} bytes to give")]
pub struct Refused {
    /// The requested bytes.
    pub bytes: u64,
}

/// An address range behind which memory is mapped page by page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// Which arena.
    pub arena: u32,
    /// Bytes that are mapped and unmapped together; a power of two.
    pub page: u64,
    /// Whether pages can be taken out of the range again, and moved within it. The host maps pages
    /// when they are touched and takes none back.
    pub pages_move: bool,
}

impl Range {
    /// The addresses of a range for so many bytes of memory, in whole pages. Where pages move,
    /// there are more addresses than memory, so that scattered pages can be joined at unmapped
    /// addresses.
    pub fn addresses(bytes: u64, page: u64, pages_move: bool) -> u64 {
        let factor = if pages_move { 8 } else { 1 };
        bytes
            .saturating_mul(factor)
            .min(1 << 62)
            .max(bytes)
            .div_ceil(page)
            .saturating_mul(page)
    }
}

/// A device's memory, as a driver offers it. Each method but `now` and `preallocates` is a driver
/// call.
pub trait Source {
    /// Free and total bytes.
    fn info(&mut self) -> MemoryInfo;

    /// A new arena.
    ///
    /// # Errors
    /// If there is not enough memory.
    fn reserve(&mut self, bytes: u64) -> Result<u32, Refused>;

    /// Returns an arena or a range.
    fn release(&mut self, arena: u32);

    /// Addresses without memory, [as many](Range::addresses) as a pool of so many bytes needs.
    /// `None`: this source has no ranges.
    fn range(&mut self, bytes: u64) -> Option<Range>;

    /// Maps memory to whole pages of a range.
    ///
    /// # Errors
    /// If there is not enough memory; nothing is mapped then.
    fn map(&mut self, pages: Region) -> Result<(), Refused>;

    /// Unmaps the memory of whole pages of a range. Only called for a range whose pages move.
    fn unmap(&mut self, pages: Region);

    /// Maps the memory behind some pages of a range, one region after the other, at `to`, whose
    /// pages have none, and leaves the first without. Only called for a range whose pages move.
    /// Their contents may be lost.
    ///
    /// # Errors
    /// If the driver cannot do it; then every page keeps its memory.
    fn remap(&mut self, from: &[Region], to: Region) -> Result<(), Refused>;

    /// Copies bytes between two disjoint regions, after all work submitted to the stream before.
    fn copy(&mut self, stream: Stream, from: Region, to: Region);

    /// The progress of a stream: all work up to this number is done. See
    /// [`Pool::submit`](super::Pool::submit).
    fn completed(&mut self, stream: Stream) -> u64;

    /// Waits until a stream's work is done up to this number.
    fn synchronize(&mut self, stream: Stream, sequence: u64);

    /// A new arena from the driver's own pool of a stream. Memory that the stream released before
    /// may be reused at once.
    ///
    /// # Errors
    /// If there is not enough memory.
    fn reserve_ordered(&mut self, stream: Stream, bytes: u64) -> Result<u32, Refused> {
        let _ = stream;
        self.reserve(bytes)
    }

    /// Returns an arena to the driver's pool once the stream has come so far.
    fn release_ordered(&mut self, stream: Stream, arena: u32) {
        let _ = stream;
        self.release(arena);
    }

    /// The time since some moment in the past.
    fn now(&mut self) -> Duration;

    /// Whether a pool takes its bytes at the first use unless told otherwise: on shared devices it
    /// is better to fail early, on the host it would only deprive other processes.
    fn preallocates(&self) -> bool;
}

/// The host's memory. All work on it is done when the call returns, so streams are always
/// completed.
impl Source for Memory {
    fn info(&mut self) -> MemoryInfo {
        let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let field = |name: &str| {
            let line = text
                .lines()
                .find_map(|l| l.strip_prefix(name)?.strip_prefix(':'))?;
            line.trim()
                .strip_suffix("kB")?
                .trim()
                .parse::<u64>()
                .ok()?
                .checked_mul(1024)
        };
        // Where the system does not report it, the bound is the size of the address space.
        let unknown = isize::MAX as u64;
        MemoryInfo {
            free: field("MemAvailable").unwrap_or(unknown),
            total: field("MemTotal").unwrap_or(unknown),
        }
    }

    fn reserve(&mut self, bytes: u64) -> Result<u32, Refused> {
        Memory::reserve(self, bytes)
            .map(|region| region.arena)
            .map_err(|e| Refused { bytes: e.bytes })
    }

    fn release(&mut self, arena: u32) {
        Memory::release(self, arena);
    }

    fn range(&mut self, bytes: u64) -> Option<Range> {
        let region = Memory::reserve(self, bytes).ok()?;
        Some(Range {
            arena: region.arena,
            page: slabwise_kernels::memory::ARENA_ALIGN,
            pages_move: false,
        })
    }

    fn map(&mut self, _pages: Region) -> Result<(), Refused> {
        // The system maps at the first touch.
        Ok(())
    }

    fn unmap(&mut self, _pages: Region) {}

    fn remap(&mut self, _from: &[Region], _to: Region) -> Result<(), Refused> {
        // Never called, because the pages of the range stay.
        Ok(())
    }

    fn copy(&mut self, _stream: Stream, from: Region, to: Region) {
        Memory::copy(self, &from, &to);
    }

    fn completed(&mut self, _stream: Stream) -> u64 {
        u64::MAX
    }

    fn synchronize(&mut self, _stream: Stream, _sequence: u64) {}

    fn now(&mut self) -> Duration {
        static START: std::sync::OnceLock<std::time::Instant> = std::sync::OnceLock::new();
        START.get_or_init(std::time::Instant::now).elapsed()
    }

    fn preallocates(&self) -> bool {
        false
    }
}

impl fmt::Display for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "stream {}", self.0)
    }
}
