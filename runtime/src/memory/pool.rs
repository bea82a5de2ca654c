//! A caching pool: memory for buffers whose place no plan has fixed.
//!
//! The pool reserves large *segments* from [`Memory`] and hands out *blocks* of them. A request is rounded up to 512 bytes
//! and takes the smallest free block that holds it; what is left over is split off, and a block that comes back joins its
//! free neighbours at once. Small and large requests live in segments of their own, so that a long-lived small buffer does
//! not break up a large segment. Sizes and rules follow PyTorch's caching allocator (`c10/cuda/CUDACachingAllocator.cpp`).
//!
//! Blocks are rows of a table that name their neighbours by index; nothing is written into the memory itself. Once table
//! and lists have grown to what a program needs, a request that the cache can serve allocates nothing on the host.

use slabwise_kernels::memory::{Memory, OutOfMemory, Region};

/// Requests are rounded up to a multiple of this many bytes; every region begins at such a multiple.
pub const GRANULE: u64 = 512;
/// The largest rounded request, in bytes, that is served from small segments.
pub const SMALL_LARGEST: u64 = 1 << 20;
/// Bytes of a segment for small requests.
pub const SMALL_SEGMENT: u64 = 2 << 20;
/// Bytes of a segment for large requests below [`LARGE_OWN`].
pub const LARGE_SEGMENT: u64 = 20 << 20;
/// Requests from this many bytes on get a segment of their own size, rounded up to [`SEGMENT_GRANULE`].
pub const LARGE_OWN: u64 = 10 << 20;
/// Bytes that the size of a segment of its own is rounded up to.
pub const SEGMENT_GRANULE: u64 = 2 << 20;

/// No block: the end of a chain.
const NONE: u32 = u32::MAX;

/// A region that cannot be freed, because the pool has not handed it out, or has it back already.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{region:?} is not in use in this pool: freed twice, or never allocated from it")]
pub struct NotInUse {
    /// The region.
    pub region: Region,
}

/// What the pool has done and holds. Bytes, unless the name says that it counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Bytes of the blocks in use, rounding included.
    pub bytes_in_use: u64,
    /// The most that `bytes_in_use` has been.
    pub peak_bytes_in_use: u64,
    /// Bytes of all segments held, in use or cached.
    pub pool_bytes: u64,
    /// The most that `pool_bytes` has been.
    pub peak_pool_bytes: u64,
    /// The largest request so far, in bytes.
    pub largest_alloc_bytes: u64,
    /// Bytes of the largest free block.
    pub largest_free_block_bytes: u64,
    /// Bytes of the blocks in use that nobody asked for: rounding, and rests too small to split off.
    pub rounding_waste_bytes: u64,
    /// Requests served.
    pub num_allocs: u64,
    /// Regions given back.
    pub num_frees: u64,
    /// Requests that a cached block could serve.
    pub cache_hits: u64,
    /// Requests that needed a new segment.
    pub cache_misses: u64,
    /// Segments reserved from the host.
    pub driver_allocs: u64,
    /// Segments given back to the host.
    pub driver_frees: u64,
    /// Reservations tried again after the cache had been emptied.
    pub retries: u64,
    /// Requests that failed.
    pub ooms: u64,
}

/// One block: a piece of a segment, free or in use. An unused row of the table has no bytes.
#[derive(Clone, Copy, Debug, Default)]
struct Block {
    arena: u32,
    offset: u64,
    bytes: u64,
    /// Bytes asked for; only of a block in use.
    requested: u64,
    in_use: bool,
    /// The neighbours by address in the same segment.
    before: u32,
    after: u32,
}

impl Block {
    fn is_whole_segment(&self) -> bool {
        self.before == NONE && self.after == NONE
    }
}

/// A free block in the order of the search: by class, then size, then place, so that the first that is large enough fits best
/// and the choice does not depend on history.
type Free = (Class, u64, u32, u64, u32);

/// Which segments serve a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Class {
    Small,
    Large,
}

impl Class {
    fn of(rounded: u64) -> Class {
        if rounded <= SMALL_LARGEST { Class::Small } else { Class::Large }
    }

    /// The smallest rest that is split off: a smaller one would only ever be in the way.
    fn least_rest(self) -> u64 {
        match self {
            Class::Small => GRANULE,
            Class::Large => SMALL_LARGEST + GRANULE,
        }
    }
}

/// A caching pool of regions of a [`Memory`]. See the module documentation.
#[derive(Default)]
pub struct Pool {
    blocks: Vec<Block>,
    /// Rows of `blocks` that hold no block.
    unused: Vec<u32>,
    /// The class of each segment, by arena, sorted.
    segments: Vec<(u32, Class)>,
    /// Sorted.
    free: Vec<Free>,
    /// Blocks in use by arena and offset, sorted.
    live: Vec<(u32, u64, u32)>,
    statistics: Statistics,
}

impl Pool {
    /// A pool that holds nothing yet.
    pub fn new() -> Pool {
        Pool::default()
    }

    /// A region of exactly `bytes` bytes, aligned to [`GRANULE`], from `memory`, which must be the same in every call. What the
    /// region holds is whatever it held last. A request for 0 bytes takes a block as well, so that it can be freed like any other.
    ///
    /// # Errors
    /// If the host has no memory for a new segment, even after all cached segments have been given back.
    pub fn allocate(&mut self, memory: &mut Memory, bytes: u64) -> Result<Region, OutOfMemory> {
        let found = self.find(memory, bytes);
        let Ok((index, class, rounded)) = found else {
            self.statistics.ooms += 1;
            return Err(OutOfMemory { bytes });
        };
        self.take_free(index, class);
        if self.blocks[index as usize].bytes - rounded >= class.least_rest() {
            self.split(index, class, rounded);
        }
        let block = &mut self.blocks[index as usize];
        (block.in_use, block.requested) = (true, bytes);
        let block = *block;
        let at = self.live.partition_point(|live| (live.0, live.1) < (block.arena, block.offset));
        self.live.insert(at, (block.arena, block.offset, index));
        let s = &mut self.statistics;
        s.num_allocs += 1;
        s.largest_alloc_bytes = s.largest_alloc_bytes.max(bytes);
        s.bytes_in_use += block.bytes;
        s.peak_bytes_in_use = s.peak_bytes_in_use.max(s.bytes_in_use);
        s.rounding_waste_bytes += block.bytes - bytes;
        Ok(Region { arena: block.arena, offset: block.offset, bytes })
    }

    /// Takes a region back. Its bytes stay reserved, for the next request.
    ///
    /// # Errors
    /// If the region is not one that [`Pool::allocate`] returned and that is still in use; the pool is then unchanged.
    pub fn free(&mut self, region: Region) -> Result<(), NotInUse> {
        let at =
            self.live.binary_search_by_key(&(region.arena, region.offset), |live| (live.0, live.1)).map_err(|_| NotInUse { region })?;
        let mut index = self.live[at].2;
        let block = self.blocks[index as usize];
        if block.requested != region.bytes {
            return Err(NotInUse { region });
        }
        self.live.remove(at);
        self.statistics.num_frees += 1;
        self.statistics.bytes_in_use -= block.bytes;
        self.statistics.rounding_waste_bytes -= block.bytes - block.requested;
        let class = self.class(block.arena);
        self.blocks[index as usize].in_use = false;
        let is_free = |pool: &Pool, neighbour: u32| pool.blocks.get(neighbour as usize).is_some_and(|block| !block.in_use);
        if is_free(self, block.after) {
            self.take_free(block.after, class);
            self.join(index);
        }
        if is_free(self, block.before) {
            self.take_free(block.before, class);
            self.join(block.before);
            index = block.before;
        }
        self.put_free(index, class);
        Ok(())
    }

    /// Gives every segment without a block in use back to the host; returns how many bytes that were.
    pub fn empty_cache(&mut self, memory: &mut Memory) -> u64 {
        let before = self.statistics.pool_bytes;
        let mut k = 0;
        while let Some(&(.., index)) = self.free.get(k) {
            let block = self.blocks[index as usize];
            if !block.is_whole_segment() {
                k += 1;
                continue;
            }
            self.free.remove(k);
            self.blocks[index as usize] = Block::default();
            self.unused.push(index);
            self.segments.retain(|&(arena, _)| arena != block.arena);
            memory.release(block.arena);
            self.statistics.pool_bytes -= block.bytes;
            self.statistics.driver_frees += 1;
        }
        before - self.statistics.pool_bytes
    }

    /// What the pool has done and holds.
    pub fn statistics(&self) -> Statistics {
        let largest = self.free.iter().map(|free| free.1).max().unwrap_or(0);
        Statistics { largest_free_block_bytes: largest, ..self.statistics }
    }

    /// A free block for a request, from the cache or a new segment: its index, class and the rounded size.
    fn find(&mut self, memory: &mut Memory, bytes: u64) -> Result<(u32, Class, u64), OutOfMemory> {
        let too_large = OutOfMemory { bytes };
        let rounded = bytes.max(1).checked_next_multiple_of(GRANULE).ok_or(too_large)?;
        let class = Class::of(rounded);
        let at = self.free.partition_point(|free| (free.0, free.1) < (class, rounded));
        if let Some(&(.., index)) = self.free.get(at).filter(|free| free.0 == class) {
            self.statistics.cache_hits += 1;
            return Ok((index, class, rounded));
        }
        let segment = match class {
            Class::Small => SMALL_SEGMENT,
            Class::Large if rounded < LARGE_OWN => LARGE_SEGMENT,
            Class::Large => rounded.checked_next_multiple_of(SEGMENT_GRANULE).ok_or(too_large)?,
        };
        let region = match memory.reserve(segment) {
            Ok(region) => region,
            Err(_) => {
                self.statistics.retries += 1;
                self.empty_cache(memory);
                memory.reserve(segment)?
            }
        };
        let s = &mut self.statistics;
        s.cache_misses += 1;
        s.driver_allocs += 1;
        s.pool_bytes += segment;
        s.peak_pool_bytes = s.peak_pool_bytes.max(s.pool_bytes);
        let at = self.segments.partition_point(|&(arena, _)| arena < region.arena);
        self.segments.insert(at, (region.arena, class));
        let index = self.new_block(Block { arena: region.arena, bytes: segment, before: NONE, after: NONE, ..Block::default() });
        self.put_free(index, class);
        Ok((index, class, rounded))
    }

    /// The class of the segment in an arena.
    fn class(&self, arena: u32) -> Class {
        let at = self.segments.partition_point(|&(other, _)| other < arena);
        self.segments[at].1
    }

    fn new_block(&mut self, block: Block) -> u32 {
        match self.unused.pop() {
            Some(index) => {
                self.blocks[index as usize] = block;
                index
            }
            None => {
                self.blocks.push(block);
                // Rows are given back here without allocating: there is room for all of them.
                self.unused.reserve(self.blocks.len());
                self.blocks.len() as u32 - 1
            }
        }
    }

    /// Cuts a free block that is in no list after `bytes` bytes and puts the rest into the list of free blocks.
    fn split(&mut self, index: u32, class: Class, bytes: u64) {
        let block = self.blocks[index as usize];
        let rest = Block { offset: block.offset + bytes, bytes: block.bytes - bytes, before: index, ..block };
        let rest = self.new_block(rest);
        if block.after != NONE {
            self.blocks[block.after as usize].before = rest;
        }
        let first = &mut self.blocks[index as usize];
        (first.bytes, first.after) = (bytes, rest);
        self.put_free(rest, class);
    }

    /// Joins a block with the one after it, neither in a list.
    fn join(&mut self, index: u32) {
        let after = self.blocks[index as usize].after;
        let gone = std::mem::take(&mut self.blocks[after as usize]);
        let block = &mut self.blocks[index as usize];
        block.bytes += gone.bytes;
        block.after = gone.after;
        if gone.after != NONE {
            self.blocks[gone.after as usize].before = index;
        }
        self.unused.push(after);
    }

    fn entry(&self, index: u32, class: Class) -> Free {
        let block = &self.blocks[index as usize];
        (class, block.bytes, block.arena, block.offset, index)
    }

    fn put_free(&mut self, index: u32, class: Class) {
        let entry = self.entry(index, class);
        let at = self.free.partition_point(|free| *free < entry);
        self.free.insert(at, entry);
    }

    fn take_free(&mut self, index: u32, class: Class) {
        let entry = self.entry(index, class);
        let at = self.free.partition_point(|free| *free < entry);
        self.free.remove(at);
    }
}

#[cfg(test)]
mod tests;
