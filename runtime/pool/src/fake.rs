//! A device without hardware: for tests, and for the replay of traces.
//!
//! Its total is settable; its clock, its streams' work and its driver's failures are controlled by
//! the test; every driver call is counted. It can hold bytes, so that moves can be checked, or only
//! count them.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use slabwise_kernels::memory::Region;

use super::source::{MemoryInfo, Range, Refused, Source, Stream};

/// A device of a settable size. See the module documentation. Methods and [`Source`] work on a
/// shared reference, from any thread.
#[derive(Debug, Default)]
pub struct FakeDevice {
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    total: u64,
    used_elsewhere: u64,
    page: Option<u64>,
    holds_bytes: bool,
    arenas: BTreeMap<u32, Arena>,
    /// The bytes of memory in all of them.
    reserved: u64,
    next: u32,
    now: Duration,
    calls: u64,
    copies: u64,
    copied_bytes: u64,
    /// Calls for memory that succeed before the failures, and the number of failures.
    fail_after: u64,
    fail: u64,
    streams: BTreeMap<Stream, Progress>,
    preallocates: bool,
}

#[derive(Debug, Default, Clone, Copy)]
struct Progress {
    completed: u64,
    by_hand: bool,
}

#[derive(Debug, Default)]
struct Arena {
    mapped: u64,
    /// Of an address range: the runs of bytes that have memory, from start to end, no two adjacent.
    runs: Option<BTreeMap<u64, u64>>,
    bytes: Vec<u8>,
}

impl FakeDevice {
    /// A device with this many bytes. Its streams are always done; it has no address ranges and
    /// holds no bytes.
    pub fn new(total: u64) -> FakeDevice {
        let inner = Inner {
            total,
            preallocates: true,
            ..Inner::default()
        };
        FakeDevice {
            inner: Mutex::new(inner),
        }
    }

    /// Offers address ranges, mapped in pages of this many bytes.
    #[must_use]
    pub fn with_pages(self, page: u64) -> FakeDevice {
        self.lock().page = Some(page);
        self
    }

    /// Holds real bytes behind its arenas.
    #[must_use]
    pub fn with_bytes(self) -> FakeDevice {
        self.lock().holds_bytes = true;
        self
    }

    /// Whether pools take their bytes at the first use by default; true unless set here.
    #[must_use]
    pub fn with_preallocation(self, preallocates: bool) -> FakeDevice {
        self.lock().preallocates = preallocates;
        self
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes that other processes hold.
    pub fn use_elsewhere(&self, bytes: u64) {
        self.lock().used_elsewhere = bytes;
    }

    /// After `after` calls for memory that may succeed, the next `count` fail.
    pub fn fail(&self, after: u64, count: u64) {
        let mut inner = self.lock();
        (inner.fail_after, inner.fail) = (after, count);
    }

    /// Lets time pass.
    pub fn advance(&self, by: Duration) {
        self.lock().now += by;
    }

    /// From now on, work of the stream is done only when [`FakeDevice::complete`] says so.
    pub fn hold(&self, stream: Stream) {
        self.lock().streams.entry(stream).or_default().by_hand = true;
    }

    /// The stream's work up to this number is done.
    pub fn complete(&self, stream: Stream, sequence: u64) {
        let mut inner = self.lock();
        let progress = inner.streams.entry(stream).or_default();
        progress.completed = progress.completed.max(sequence);
    }

    /// The number of driver calls.
    pub fn calls(&self) -> u64 {
        self.lock().calls
    }

    /// The number of copies, and their bytes.
    pub fn copies(&self) -> (u64, u64) {
        let inner = self.lock();
        (inner.copies, inner.copied_bytes)
    }

    /// Bytes of memory given out and not returned.
    pub fn reserved_bytes(&self) -> u64 {
        self.lock().reserved
    }

    /// Reads bytes, of a device that holds them.
    pub fn read(&self, region: Region) -> Vec<u8> {
        let inner = self.lock();
        let arena = &inner.arenas[&region.arena];
        assert!(arena.has(region), "{region:?} has no memory");
        arena.bytes[region.offset as usize..(region.offset + region.bytes) as usize].to_vec()
    }

    /// Writes bytes, on a device that holds them.
    pub fn write(&self, region: Region, bytes: &[u8]) {
        let mut inner = self.lock();
        let arena = inner
            .arenas
            .get_mut(&region.arena)
            .expect("an arena there is");
        assert!(arena.has(region), "{region:?} has no memory");
        arena.bytes[region.offset as usize..(region.offset + region.bytes) as usize]
            .copy_from_slice(bytes);
    }

    /// Whether there is memory behind all of a region.
    pub fn has(&self, region: Region) -> bool {
        self.lock()
            .arenas
            .get(&region.arena)
            .is_some_and(|arena| arena.has(region))
    }
}

impl Arena {
    fn has(&self, region: Region) -> bool {
        let Some(end) = region.offset.checked_add(region.bytes) else {
            return false;
        };
        match &self.runs {
            None => end <= self.mapped,
            Some(runs) => {
                let run = runs.range(..=region.offset).next_back();
                region.bytes == 0 || run.is_some_and(|(_, &last)| end <= last)
            }
        }
    }
}

impl Inner {
    fn free(&self) -> u64 {
        self.total
            .saturating_sub(self.used_elsewhere)
            .saturating_sub(self.reserved)
    }

    /// Whether a call for so many bytes succeeds.
    fn give(&mut self, bytes: u64) -> Result<(), Refused> {
        self.calls += 1;
        if self.fail_after > 0 {
            self.fail_after -= 1;
        } else if self.fail > 0 {
            self.fail -= 1;
            return Err(Refused { bytes });
        }
        if bytes > self.free() {
            Err(Refused { bytes })
        } else {
            Ok(())
        }
    }

    fn add(&mut self, arena: Arena) -> u32 {
        let at = self.next;
        self.next += 1;
        self.reserved += arena.mapped;
        self.arenas.insert(at, arena);
        at
    }

    fn set_pages(&mut self, pages: Region, mapped: bool) {
        let (page, holds_bytes) = (self.page.unwrap_or(1), self.holds_bytes);
        assert!(
            pages.offset.is_multiple_of(page) && pages.bytes.is_multiple_of(page),
            "{pages:?} is not whole pages of {page}"
        );
        let arena = self
            .arenas
            .get_mut(&pages.arena)
            .expect("an arena there is");
        let runs = arena.runs.as_mut().expect("only ranges are mapped");
        let (mut from, mut to) = (pages.offset, pages.offset + pages.bytes);
        // The last run that begins before the end of the pages.
        let last = runs.range(..to).next_back().map(|(&from, &to)| (from, to));
        let (start, end) = last.unwrap_or_default();
        assert!(
            from == to
                || if mapped {
                    end <= from
                } else {
                    start <= from && to <= end
                },
            "{pages:?} is in part {} already",
            if mapped { "mapped" } else { "bare" }
        );
        if mapped {
            if last.is_some() && end == from {
                from = start;
            }
            to = runs.remove(&to).unwrap_or(to);
            runs.insert(from, to);
        } else if from < to {
            runs.remove(&start);
            let rest = [(start, from), (to, end)];
            runs.extend(rest.into_iter().filter(|(from, to)| from < to));
        }
        for sum in [&mut arena.mapped, &mut self.reserved] {
            *sum = if mapped {
                *sum + pages.bytes
            } else {
                *sum - pages.bytes
            };
        }
        if mapped && holds_bytes {
            let end = (pages.offset + pages.bytes) as usize;
            arena.bytes.resize(arena.bytes.len().max(end), 0);
        }
    }
}

impl Source for &FakeDevice {
    fn info(&mut self) -> MemoryInfo {
        let mut inner = self.lock();
        inner.calls += 1;
        MemoryInfo {
            free: inner.free(),
            total: inner.total,
        }
    }

    fn reserve(&mut self, bytes: u64) -> Result<u32, Refused> {
        let mut inner = self.lock();
        inner.give(bytes)?;
        let held = if inner.holds_bytes {
            vec![0; bytes as usize]
        } else {
            Vec::new()
        };
        Ok(inner.add(Arena {
            mapped: bytes,
            runs: None,
            bytes: held,
        }))
    }

    fn release(&mut self, arena: u32) {
        let mut inner = self.lock();
        inner.calls += 1;
        let released = inner.arenas.remove(&arena);
        let released = released.unwrap_or_else(|| panic!("arena {arena} was released twice"));
        inner.reserved -= released.mapped;
    }

    fn range(&mut self, _bytes: u64) -> Option<Range> {
        let mut inner = self.lock();
        let page = inner.page?;
        inner.calls += 1;
        let arena = inner.add(Arena {
            runs: Some(BTreeMap::new()),
            ..Arena::default()
        });
        Some(Range {
            arena,
            page,
            pages_move: true,
        })
    }

    fn map(&mut self, pages: Region) -> Result<(), Refused> {
        let mut inner = self.lock();
        inner.give(pages.bytes)?;
        inner.set_pages(pages, true);
        Ok(())
    }

    fn unmap(&mut self, pages: Region) {
        let mut inner = self.lock();
        inner.calls += 1;
        inner.set_pages(pages, false);
    }

    fn remap(&mut self, from: &[Region], to: Region) -> Result<(), Refused> {
        let mut inner = self.lock();
        assert_eq!(from.iter().map(|pages| pages.bytes).sum::<u64>(), to.bytes);
        // It takes no memory, but counts as a call that may fail.
        inner.give(0).map_err(|_| Refused { bytes: to.bytes })?;
        from.iter().for_each(|&pages| inner.set_pages(pages, false));
        inner.set_pages(to, true);
        Ok(())
    }

    fn copy(&mut self, _stream: Stream, from: Region, to: Region) {
        let mut inner = self.lock();
        assert!(
            from.bytes == to.bytes && !from.overlaps(&to),
            "a copy of {from:?} to {to:?}"
        );
        inner.calls += 1;
        inner.copies += 1;
        inner.copied_bytes += from.bytes;
        assert!(
            [from, to].iter().all(|r| inner.arenas[&r.arena].has(*r)),
            "a copy of {from:?} to {to:?}, which have no memory"
        );
        if inner.holds_bytes {
            let held = inner.arenas[&from.arena].bytes
                [from.offset as usize..(from.offset + from.bytes) as usize]
                .to_vec();
            let arena = inner.arenas.get_mut(&to.arena).expect("seen above");
            arena.bytes[to.offset as usize..(to.offset + to.bytes) as usize].copy_from_slice(&held);
        }
    }

    fn completed(&mut self, stream: Stream) -> u64 {
        let mut inner = self.lock();
        inner.calls += 1;
        let progress = inner.streams.get(&stream).copied().unwrap_or_default();
        if progress.by_hand {
            progress.completed
        } else {
            u64::MAX
        }
    }

    fn synchronize(&mut self, stream: Stream, sequence: u64) {
        self.lock().calls += 1;
        self.complete(stream, sequence);
    }

    fn now(&mut self) -> Duration {
        self.lock().now
    }

    fn preallocates(&self) -> bool {
        self.lock().preallocates
    }
}
