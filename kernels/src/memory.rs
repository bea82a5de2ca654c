//! Host memory that kernels work in: arenas, and regions of them.
//!
//! A [`Memory`] owns a few large aligned allocations (*arenas*): the persistent region, the slab,
//! segments of a pool. A [`Region`] names bytes inside one by arena, offset and length; it is plain
//! data, so plans and pools can hold it, and it is checked against the arena whenever bytes are
//! reached through it.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;

use crate::collective::Exchanges;
use crate::copies::Copies;
pub use crate::element::Element;
use crate::element::{as_elements, as_elements_mut};

/// Alignment of every arena, in bytes: a page, so that no two arenas share one.
pub const ARENA_ALIGN: u64 = 4096;

/// Bytes of a huge page. Arenas of several of them begin at one: kernels traverse tensors plane by
/// plane, and with small pages these span more pages than the CPU's TLB has entries.
const HUGE_PAGE: usize = 2 << 20;

/// Bytes inside one arena of a [`Memory`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct Region {
    /// Which arena.
    pub arena: u32,
    /// First byte.
    pub offset: u64,
    /// How many bytes.
    pub bytes: u64,
}

impl Region {
    /// Whether two regions share a byte.
    pub fn overlaps(&self, other: &Region) -> bool {
        self.arena == other.arena
            && self.bytes > 0
            && other.bytes > 0
            && self.offset < other.offset + other.bytes
            && other.offset < self.offset + self.bytes
    }

    /// The part of this region that starts `offset` bytes in.
    ///
    /// # Panics
    /// If the part reaches past the end.
    pub fn part(&self, offset: u64, bytes: u64) -> Region {
        assert!(
            offset
                .checked_add(bytes)
                .is_some_and(|end| end <= self.bytes),
            "part {offset}+{bytes} of {self:?}"
        );
        Region {
            arena: self.arena,
            offset: self.offset + offset,
            bytes,
        }
    }
}

/// The host could not provide the requested memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the host has no {bytes} bytes of memory to give")]
pub struct OutOfMemory {
    /// The requested bytes.
    pub bytes: u64,
}

/// Memory that did not come from the allocator.
pub type Foreign = Box<dyn AsMut<[u8]> + Send + Sync>;

struct Arena {
    owner: Owner,
    /// The first byte, aligned to [`ARENA_ALIGN`].
    start: NonNull<u8>,
    bytes: usize,
}

/// The owner of an arena's memory, which frees it when it is dropped.
enum Owner {
    /// The allocator, with its result and its layout; not used for an arena of no bytes.
    Allocator { base: NonNull<u8>, layout: Layout },
    /// A box that lends its bytes. It is not used before it is dropped.
    Foreign(NonNull<dyn AsMut<[u8]> + Send + Sync>),
}

// SAFETY: an arena owns its allocation and is reached only through `Memory`, by shared reference
// for reading and by exclusive reference for writing.
unsafe impl Send for Arena {}
// SAFETY: as above.
unsafe impl Sync for Arena {}

impl Drop for Arena {
    fn drop(&mut self) {
        match self.owner {
            // SAFETY: `base` came from `alloc_zeroed` with this layout and is freed only here.
            Owner::Allocator { base, layout } if layout.size() > 0 => unsafe {
                dealloc(base.as_ptr(), layout);
            },
            Owner::Allocator { .. } => {}
            // SAFETY: it came from a box, and is dropped only here; its bytes are not used again.
            Owner::Foreign(owner) => drop(unsafe { Box::from_raw(owner.as_ptr()) }),
        }
    }
}

/// Advises the system to use huge pages. A system without them uses small ones.
fn advise_huge_pages(start: NonNull<u8>, size: usize) {
    #[cfg(target_os = "linux")]
    // SAFETY: these bytes are an allocation of the caller's, and the advice changes none of them.
    unsafe {
        libc::madvise(start.as_ptr().cast(), size, libc::MADV_HUGEPAGE);
    }
    #[cfg(not(target_os = "linux"))]
    let _ = (start, size);
}

/// Aligned host allocations, reached by [`Region`].
#[derive(Default)]
pub struct Memory {
    /// Dropped before the arenas, so that none is freed while a copy is in progress.
    pub(crate) copies: Option<Copies>,
    pub(crate) exchanges: Exchanges,
    arenas: Vec<Option<Arena>>,
}

impl Drop for Memory {
    fn drop(&mut self) {
        for arena in 0..self.arenas.len() as u32 {
            if self.exchanges.is_in(arena) {
                self.leak(arena);
            }
        }
    }
}

impl Memory {
    /// No memory yet.
    pub fn new() -> Self {
        Memory::default()
    }

    /// Adds an arena of zeros and returns all of it as a region. Nothing is touched: the host maps
    /// pages on first use.
    ///
    /// Requests more bytes at a small alignment rather than these at a large one, because the
    /// system then maps pages of zeros without touching them; it would clear every byte of an
    /// allocation of large alignment.
    pub fn reserve(&mut self, bytes: u64) -> Result<Region, OutOfMemory> {
        const SMALL_ALIGN: usize = 16;
        let size = usize::try_from(bytes).map_err(|_| OutOfMemory { bytes })?;
        let huge = size >= 2 * HUGE_PAGE;
        let align = if huge {
            HUGE_PAGE
        } else {
            ARENA_ALIGN as usize
        };
        let padded = if size == 0 {
            Some(0)
        } else {
            size.checked_add(align - SMALL_ALIGN)
        };
        let layout = padded
            .and_then(|size| Layout::from_size_align(size, SMALL_ALIGN).ok())
            .ok_or(OutOfMemory { bytes })?;
        let (base, start) = if size == 0 {
            // A slice of no elements of any type may begin there.
            let nowhere = NonNull::new(std::ptr::without_provenance_mut(ARENA_ALIGN as usize))
                .unwrap_or(NonNull::dangling());
            (nowhere, nowhere)
        } else {
            // SAFETY: the layout's size is not zero.
            let base =
                NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or(OutOfMemory { bytes })?;
            let ahead = base.as_ptr().align_offset(align);
            // SAFETY: `base` is a multiple of `SMALL_ALIGN`, so the next multiple of `align` is at
            // most the padding ahead.
            (base, unsafe { base.add(ahead) })
        };
        if huge {
            advise_huge_pages(start, size);
        }
        Ok(self.add(Arena {
            owner: Owner::Allocator { base, layout },
            start,
            bytes: size,
        }))
    }

    /// Adds an arena in memory that did not come from the allocator, and returns all of it as a
    /// region. The memory is dropped with the arena.
    ///
    /// # Panics
    /// If it does not begin at a multiple of [`ARENA_ALIGN`].
    pub fn adopt(&mut self, memory: Foreign) -> Region {
        let owner = NonNull::from(Box::leak(memory));
        // SAFETY: the box was leaked just now, and nothing else refers to its content. The bytes
        // are borrowed until it is dropped, and it is not used before.
        let bytes = unsafe { (*owner.as_ptr()).as_mut() };
        let (start, size) = (NonNull::from(&mut *bytes).cast::<u8>(), bytes.len());
        let is_aligned = start.addr().get().is_multiple_of(ARENA_ALIGN as usize);
        assert!(is_aligned, "an arena at {start:?}");
        self.add(Arena {
            owner: Owner::Foreign(owner),
            start,
            bytes: size,
        })
    }

    fn add(&mut self, arena: Arena) -> Region {
        let free = self.arenas.iter().position(Option::is_none);
        let slot = free.unwrap_or(self.arenas.len());
        let bytes = arena.bytes as u64;
        let arena = Some(arena);
        if slot == self.arenas.len() {
            self.arenas.push(arena)
        } else {
            self.arenas[slot] = arena
        }
        Region {
            arena: slot as u32,
            offset: 0,
            bytes,
        }
    }

    /// Gives an arena back to the host, once nothing is in flight. Regions of it must not be used
    /// again: reaching through one panics.
    pub fn release(&mut self, arena: u32) {
        self.wait_for_all();
        if self.exchanges.is_in(arena) {
            self.leak(arena);
        }
        self.arenas[arena as usize] = None;
    }

    /// Never gives an arena back, because bytes of it are in flight between ranks: other ranks, or
    /// a thread that waits in a foreign library, may still access them.
    fn leak(&mut self, arena: u32) {
        std::mem::forget(self.arenas[arena as usize].take());
    }

    /// Bytes in all arenas.
    pub fn reserved_bytes(&self) -> u64 {
        self.arenas.iter().flatten().map(|a| a.bytes as u64).sum()
    }

    /// Whether the region lies inside a live arena.
    pub fn contains(&self, region: &Region) -> bool {
        let size = self
            .arenas
            .get(region.arena as usize)
            .and_then(Option::as_ref)
            .map(|a| a.bytes as u64);
        size.is_some_and(|size| {
            region
                .offset
                .checked_add(region.bytes)
                .is_some_and(|end| end <= size)
        })
    }

    /// The address of a region's first byte. Writing through it needs exclusive access to the
    /// memory.
    ///
    /// # Panics
    /// If the region is not inside a live arena.
    pub(crate) fn address(&self, region: &Region) -> *mut u8 {
        assert!(
            self.contains(region),
            "{region:?} is not inside a live arena"
        );
        let arena = self.arenas[region.arena as usize]
            .as_ref()
            .expect("checked by contains");
        // SAFETY: the offset lies inside the allocation (or one past its end, for an empty region).
        unsafe { arena.start.as_ptr().add(region.offset as usize) }
    }

    /// The bytes of a region.
    ///
    /// # Panics
    /// If the region is not inside a live arena, or a copy in flight writes it.
    pub fn bytes(&self, region: &Region) -> &[u8] {
        self.assert_readable(region);
        // SAFETY: inside a live allocation (checked by `address`), initialised (zeroed), and not
        // written while `self` is borrowed: copies in flight do not, and others cannot be started.
        unsafe { std::slice::from_raw_parts(self.address(region), region.bytes as usize) }
    }

    /// The bytes of a region, to write.
    ///
    /// # Panics
    /// If the region is not inside a live arena, or a copy in flight reads or writes it.
    pub fn bytes_mut(&mut self, region: &Region) -> &mut [u8] {
        self.assert_writable(region);
        // SAFETY: as for `bytes`; `self` is borrowed exclusively, and no copy in flight reaches the
        // region.
        unsafe { std::slice::from_raw_parts_mut(self.address(region), region.bytes as usize) }
    }

    /// The region as elements.
    ///
    /// # Panics
    /// Those of [`Memory::bytes`], and if it is not aligned to whole elements.
    pub fn elements<T: Element>(&self, region: &Region) -> &[T] {
        let elements = as_elements(self.bytes(region));
        elements.unwrap_or_else(|| panic!("{region:?} is not whole {}", T::DTYPE))
    }

    /// The region as elements, to write.
    ///
    /// # Panics
    /// Those of [`Memory::bytes_mut`], and if it is not aligned to whole elements.
    pub fn elements_mut<T: Element>(&mut self, region: &Region) -> &mut [T] {
        let elements = as_elements_mut(self.bytes_mut(region));
        elements.unwrap_or_else(|| panic!("{region:?} is not whole {}", T::DTYPE))
    }

    /// Copies one region to another of the same length.
    ///
    /// # Panics
    /// If the lengths differ, a region is not inside a live arena, or a copy in flight conflicts
    /// with it.
    pub fn copy(&mut self, from: &Region, to: &Region) {
        assert_eq!(
            from.bytes, to.bytes,
            "copy between regions of different lengths"
        );
        self.assert_readable(from);
        self.assert_writable(to);
        let (from, to, bytes) = (self.address(from), self.address(to), from.bytes as usize);
        // SAFETY: both ranges lie inside live allocations; `copy` allows overlap; `self` is
        // borrowed exclusively, and no copy in flight is in the way.
        unsafe { std::ptr::copy(from, to, bytes) };
    }
}
