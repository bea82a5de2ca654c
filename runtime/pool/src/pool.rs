//! A pool: one lock, and the driver calls that are made without it.

use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use slabwise_kernels::memory::Region;

use super::block::{Block, Handle, State};
use super::config::{ConfigError, MemoryConfig, Policy, variable};
use super::deferred::Deferred;
use super::defrag::in_pieces;
use super::event_log::{Action, Event, EventLog};
use super::heap::Heap;
use super::oom::{Holder, OutOfMemory};
use super::policy::chain::Return;
use super::retry::{Call, Next, Outcome, Request};
use super::source::{MemoryInfo, Source, Stream};
use super::stats::{Fragmentation, Statistics};
use super::tags::{Tag, TagId};

/// A block that is not in use: it was freed, or comes from another pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{handle:?} is not in use in this pool: freed twice, or never allocated from it")]
pub struct NotInUse {
    /// The block.
    pub handle: Handle,
}

/// A block of a pool, in use or free, as [`Pool::inspect`] shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Inspected {
    /// Where it lies.
    pub region: Region,
    /// The stream that it was taken for.
    pub stream: Stream,
    /// The requested bytes; `None` for a free block.
    pub requested: Option<u64>,
}

impl Inspected {
    fn of(block: &Block) -> Self {
        Inspected {
            region: block.region(),
            stream: block.stream,
            requested: (block.state == State::Live).then_some(block.requested),
        }
    }
}

/// A callback of the program that is called when memory is short, to drop a cache for instance.
type Callback = Box<dyn FnMut() + Send>;

/// A caching pool of one device's memory. See the [module documentation](super).
///
/// Every method takes the source of the pool's memory, which must be the same in each call. A pool
/// can be shared by threads, each with a separate source for the same device.
pub struct Pool {
    heap: Mutex<Heap>,
    /// Signalled when blocks have been moved, and when the pool has its first memory.
    moved: Condvar,
    deferred: Arc<Deferred<Handle>>,
    callbacks: Mutex<Vec<Callback>>,
}

/// A block that is freed when this is dropped: not at once, but with the pool's next operation, so
/// that dropping calls no driver and waits for no other thread.
#[derive(Debug)]
pub struct Lease {
    handle: Handle,
    deferred: Arc<Deferred<Handle>>,
}

impl Lease {
    /// The block.
    pub fn handle(&self) -> Handle {
        self.handle
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.deferred.push(self.handle);
    }
}

impl Pool {
    /// A pool that holds nothing yet. Settings that the configuration leaves open are read from the
    /// environment.
    ///
    /// # Errors
    /// If a setting is invalid; the error names it.
    pub fn new(config: &MemoryConfig) -> Result<Pool, ConfigError> {
        let settings = config.settings(variable)?;
        Ok(Pool {
            heap: Mutex::new(Heap::new(settings)),
            moved: Condvar::new(),
            deferred: Arc::new(Deferred::new()),
            callbacks: Mutex::default(),
        })
    }

    /// The policy by which the pool finds memory.
    pub fn policy(&self) -> Policy {
        self.lock().settings.policy
    }

    /// The number of a tag, for [`Pool::allocate`]; the same for an equal tag.
    pub fn tag(&self, tag: Tag) -> TagId {
        self.lock().tags.id(tag)
    }

    /// Adopts the tags of another pool, so that their numbers mean the same here.
    pub fn know_tags_of(&self, other: &Pool) {
        let tags = other.lock().tags.clone();
        self.lock().tags = tags;
    }

    /// Allocates a block of at least `bytes` bytes, aligned to 256 bytes. Its contents are
    /// undefined. A request for no bytes has a block as well, so that it can be freed like any
    /// other.
    ///
    /// # Errors
    /// If there is no memory for it, after every retry step: the OOM report. The pool stays usable.
    pub fn allocate<S: Source + ?Sized>(
        &self,
        source: &mut S,
        bytes: u64,
        stream: Stream,
        tag: TagId,
    ) -> Result<Handle, Box<OutOfMemory>> {
        let mut heap = self.enter(source);
        let Some(mut request) = heap.request(bytes, stream, tag.0) else {
            heap.statistics.ooms += 1;
            return Err(Box::new(heap.oom_report(bytes, tag.0, None)));
        };
        loop {
            match heap.advance(&mut request) {
                Next::Served(row) => return Ok(heap.serve(row, &request)),
                Next::Wait => {
                    heap = self
                        .moved
                        .wait(heap)
                        .unwrap_or_else(PoisonError::into_inner)
                }
                Next::Call(call) => heap = self.make(heap, source, call, Some(&mut request)),
                Next::Failed => {
                    heap.statistics.ooms += 1;
                    let region = Region {
                        bytes,
                        ..Region::default()
                    };
                    heap.note_at(
                        Action::Oom,
                        region,
                        &Block {
                            stream,
                            tag: tag.0,
                            ..Block::default()
                        },
                    );
                    return Err(Box::new(heap.oom_report(bytes, tag.0, Some(&request))));
                }
            }
        }
    }

    /// Frees a block. The stream it was allocated for may use it at once; others once that stream
    /// has finished the work submitted so far.
    ///
    /// # Errors
    /// If the block is not in use; the pool is then unchanged.
    pub fn free<S: Source + ?Sized>(&self, source: &mut S, handle: Handle) -> Result<(), NotInUse> {
        let mut heap = self.enter(source);
        let row = heap.table.live(handle).ok_or(NotInUse { handle })?;
        if heap.moving {
            // Wait until its bytes are no longer moving.
            while heap.moving {
                heap = self
                    .moved
                    .wait(heap)
                    .unwrap_or_else(PoisonError::into_inner);
            }
            heap.table.live(handle).ok_or(NotInUse { handle })?;
        }
        for call in heap.release(row) {
            heap = self.make(heap, source, call, None);
        }
        Ok(())
    }

    /// A block that is freed when the lease is dropped. Nothing else may free it.
    pub fn lease(&self, handle: Handle) -> Lease {
        Lease {
            handle,
            deferred: self.deferred.clone(),
        }
    }

    /// Where a block lies, with its requested bytes. It may be moved by the next
    /// [`Pool::allocate`]; see [`Pool::pin`].
    ///
    /// # Errors
    /// If the block is not in use.
    pub fn region(&self, handle: Handle) -> Result<Region, NotInUse> {
        let heap = self.settled();
        let row = heap.table.live(handle).ok_or(NotInUse { handle })?;
        Ok(Region {
            bytes: heap.table[row].requested,
            ..heap.table[row].region()
        })
    }

    /// Holds a block in place until [`Pool::unpin`], for as long as a kernel in flight, a captured
    /// graph or external code knows its address; returns its region. Pins count.
    ///
    /// # Errors
    /// If the block is not in use.
    pub fn pin(&self, handle: Handle) -> Result<Region, NotInUse> {
        let mut heap = self.settled();
        let row = heap.table.live(handle).ok_or(NotInUse { handle })?;
        heap.pin(row, 1);
        Ok(Region {
            bytes: heap.table[row].requested,
            ..heap.table[row].region()
        })
    }

    /// Removes one pin.
    ///
    /// # Errors
    /// If the block is not in use.
    pub fn unpin(&self, handle: Handle) -> Result<(), NotInUse> {
        let mut heap = self.settled();
        let row = heap.table.live(handle).ok_or(NotInUse { handle })?;
        heap.unpin(row, 1);
        Ok(())
    }

    /// Counts a piece of work submitted to a stream; gives its number. [`Source::completed`] refers
    /// to these numbers.
    pub fn submit(&self, stream: Stream) -> u64 {
        self.lock().streams.submit(stream)
    }

    /// Waits for all submitted work, and takes dropped blocks back: after it, every free block
    /// serves every stream.
    pub fn wait_all<S: Source + ?Sized>(&self, source: &mut S) {
        let mut heap = self.enter(source);
        let behind = heap.streams.behind();
        if !behind.is_empty() {
            heap = self.make(heap, source, Call::Synchronize(behind), None);
        }
        if let Some(call) = heap.returned_arenas() {
            drop(self.make(heap, source, call, None));
        }
    }

    /// Returns unused memory to the driver, as far as streams are done with it; gives the number of
    /// bytes.
    pub fn empty_cache<S: Source + ?Sized>(&self, source: &mut S) -> u64 {
        let heap = self.polled(source);
        self.give_back(heap, source, |_| true)
    }

    /// Ends a step: memory unused for as long as the configuration says goes back to the driver.
    /// Gives the number of bytes.
    pub fn end_step<S: Source + ?Sized>(&self, source: &mut S) -> u64 {
        let mut heap = self.enter(source);
        heap.step += 1;
        let (time, steps) = (heap.settings.idle_time, heap.settings.idle_steps);
        if time.is_none() && steps.is_none() {
            return 0;
        }
        drop(heap);
        let heap = self.polled(source);
        let (now, step) = (heap.now, heap.step);
        let age = time.map(|t| u64::try_from(t.as_nanos()).unwrap_or(u64::MAX));
        self.give_back(heap, source, |b| {
            age.is_some_and(|age| now.saturating_sub(b.idle_since) >= age)
                || steps.is_some_and(|n| step.saturating_sub(b.since) > n)
        })
    }

    /// Moves blocks together until a free block has this many bytes, if possible; whether there is
    /// one now.
    pub fn defragment<S: Source + ?Sized>(&self, source: &mut S, bytes: u64) -> bool {
        let mut heap = self.enter(source);
        let Some(mut request) = heap.request(bytes, Stream(0), 0) else {
            return false;
        };
        while heap.moving {
            heap = self
                .moved
                .wait(heap)
                .unwrap_or_else(PoisonError::into_inner);
        }
        let fits = |heap: &Heap| Fragmentation::of_table(&heap.table).largest_bytes >= bytes;
        if !fits(&heap)
            && let Some(call) = heap.defragment(&mut request)
        {
            heap = self.make(heap, source, call, None);
        }
        fits(&heap)
    }

    /// Free and total bytes, as the driver reports them.
    pub fn memory_info<S: Source + ?Sized>(&self, source: &mut S) -> MemoryInfo {
        source.info()
    }

    /// Registers a callback for when memory is short, before more is taken from the driver. It may
    /// free blocks and drop leases.
    pub fn on_pressure(&self, callback: impl FnMut() + Send + 'static) {
        self.callbacks
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(Box::new(callback));
        self.lock().has_callbacks = true;
    }

    /// The statistics of the pool.
    pub fn statistics(&self) -> Statistics {
        let heap = self.lock();
        Statistics {
            largest_free_block_bytes: Fragmentation::of_table(&heap.table).largest_bytes,
            ..heap.statistics
        }
    }

    /// Resets counts and peaks; the pool's memory stays.
    pub fn reset_statistics(&self) {
        let mut heap = self.lock();
        let Statistics {
            bytes_in_use,
            bytes_limit,
            pool_bytes,
            rounding_waste_bytes,
            ..
        } = heap.statistics;
        let (peak_bytes_in_use, peak_pool_bytes) = (bytes_in_use, pool_bytes);
        heap.statistics = Statistics {
            bytes_in_use,
            peak_bytes_in_use,
            bytes_limit,
            pool_bytes,
            peak_pool_bytes,
            rounding_waste_bytes,
            ..Statistics::default()
        };
    }

    /// The pool's free memory.
    pub fn fragmentation(&self) -> Fragmentation {
        Fragmentation::of_table(&self.lock().table)
    }

    /// All blocks in use, largest first.
    pub fn live_buffers(&self) -> Vec<Holder> {
        self.settled().holders()
    }

    /// Records events from now on, the last `most` of them; 0 records none.
    pub fn record(&self, most: usize) {
        self.lock().event_log = (most > 0).then(|| EventLog {
            events: std::collections::VecDeque::new(),
            most,
        });
    }

    /// The recorded events, oldest first.
    pub fn events(&self) -> Vec<Event> {
        self.lock()
            .event_log
            .as_ref()
            .map_or(Vec::new(), |event_log| {
                event_log.events.iter().copied().collect()
            })
    }

    /// A tag by its number.
    pub fn tag_of(&self, id: TagId) -> Tag {
        self.lock().tags.get(id.0).clone()
    }

    /// All tags, by their numbers.
    pub fn tags(&self) -> Vec<Tag> {
        self.lock().tags.all().to_vec()
    }

    /// Calls `visit` with every block in use and every free one, arena by arena, in the order of
    /// addresses.
    pub fn inspect(&self, mut visit: impl FnMut(Inspected, &Tag)) {
        let heap = self.settled();
        let mut rows: Vec<&Block> = heap
            .table
            .iter()
            .map(|(_, b)| b)
            .filter(|b| matches!(b.state, State::Live | State::Free))
            .collect();
        rows.sort_by_key(|b| (b.arena, b.offset));
        rows.into_iter()
            .for_each(|block| visit(Inspected::of(block), heap.tags.get(block.tag)));
    }

    fn lock(&self) -> MutexGuard<'_, Heap> {
        // A panic in a thread that held the lock leaks at worst one block.
        self.heap.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The lock, while no block is being moved.
    fn settled(&self) -> MutexGuard<'_, Heap> {
        let heap = self.lock();
        self.moved
            .wait_while(heap, |heap| heap.moving)
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// The lock at the beginning of an operation, after dropped blocks are freed.
    fn enter<S: Source + ?Sized>(&self, source: &mut S) -> MutexGuard<'_, Heap> {
        let mut heap = self.lock();
        if heap.event_log.is_some() || heap.settings.idle_time.is_some() {
            heap.now = u64::try_from(source.now().as_nanos()).unwrap_or(u64::MAX);
        }
        if !heap.moving && self.deferred.is_pending() {
            let mut dropped = Vec::new();
            self.deferred.drain(&mut dropped);
            for handle in dropped {
                let Some(row) = heap.table.live(handle) else {
                    continue;
                };
                for call in heap.release(row) {
                    heap = self.make(heap, source, call, None);
                }
            }
        }
        if heap.has_waiting_arenas() {
            let streams = heap
                .streams
                .behind()
                .into_iter()
                .map(|(stream, _)| stream)
                .collect();
            heap = self.make(heap, source, Call::Poll(streams), None);
            if let Some(call) = heap.returned_arenas() {
                heap = self.make(heap, source, call, None);
            }
        }
        heap
    }

    /// The lock, after the streams' progress was queried and while no block is being moved.
    fn polled<S: Source + ?Sized>(&self, source: &mut S) -> MutexGuard<'_, Heap> {
        let mut heap = self.enter(source);
        let streams: Vec<Stream> = heap
            .streams
            .behind()
            .into_iter()
            .map(|(stream, _)| stream)
            .collect();
        if !streams.is_empty() {
            heap = self.make(heap, source, Call::Poll(streams), None);
        }
        self.moved
            .wait_while(heap, |heap| heap.moving)
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn give_back<S: Source + ?Sized>(
        &self,
        mut heap: MutexGuard<'_, Heap>,
        source: &mut S,
        may_go: impl Fn(&Block) -> bool,
    ) -> u64 {
        let Some(call) = heap.trim(may_go) else {
            return 0;
        };
        let bytes = match &call {
            Call::Return { all, .. } => all.iter().map(Return::bytes).sum(),
            _ => 0,
        };
        drop(self.make(heap, source, call, None));
        bytes
    }

    /// Makes a driver call without the lock, and applies its outcome.
    fn make<'a, S: Source + ?Sized>(
        &'a self,
        heap: MutexGuard<'a, Heap>,
        source: &mut S,
        call: Call,
        request: Option<&mut Request>,
    ) -> MutexGuard<'a, Heap> {
        drop(heap);
        let outcome = self.perform(source, &call);
        let mut heap = self.lock();
        let waited_for = heap.moving || heap.opening;
        heap.conclude(request, call, outcome);
        if waited_for && !(heap.moving || heap.opening) {
            self.moved.notify_all();
        }
        heap
    }

    fn perform<S: Source + ?Sized>(&self, source: &mut S, call: &Call) -> Outcome {
        match call {
            Call::Info => Outcome::Info(source.info(), source.preallocates()),
            Call::Range { bytes } => Outcome::Range(source.range(*bytes)),
            Call::Reserve {
                bytes,
                stream,
                ordered: true,
            } => Outcome::Reserved(source.reserve_ordered(*stream, *bytes)),
            Call::Reserve { bytes, .. } => Outcome::Reserved(source.reserve(*bytes)),
            Call::Map { pages, .. } => Outcome::Mapped(source.map(*pages)),
            Call::Return { all, ordered } => {
                for one in all {
                    match *one {
                        Return::Release { arena, stream, .. } if *ordered => {
                            source.release_ordered(stream, arena)
                        }
                        Return::Release { arena, .. } => source.release(arena),
                        Return::Unmap { pages, .. } => source.unmap(pages),
                    }
                }
                Outcome::Done
            }
            Call::Poll(streams) => {
                Outcome::Progress(streams.iter().map(|&s| (s, source.completed(s))).collect())
            }
            Call::Synchronize(streams) => {
                streams
                    .iter()
                    .for_each(|&(stream, sequence)| source.synchronize(stream, sequence));
                Outcome::Done
            }
            Call::Callbacks => {
                // Taken out, so that a callback may use the pool, and set another.
                let mut callbacks = std::mem::take(
                    &mut *self
                        .callbacks
                        .lock()
                        .unwrap_or_else(PoisonError::into_inner),
                );
                callbacks.iter_mut().for_each(|callback| callback());
                let mut kept = self
                    .callbacks
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner);
                callbacks.append(&mut kept);
                *kept = callbacks;
                Outcome::Done
            }
            Call::Copy {
                before,
                moves,
                after,
            } => {
                let ((), ns) = timed(source, |source| {
                    before
                        .iter()
                        .for_each(|&(stream, sequence)| source.synchronize(stream, sequence));
                    moves
                        .iter()
                        .for_each(|m| in_pieces(*m, |from, to| source.copy(m.stream, from, to)));
                    after
                        .iter()
                        .for_each(|&(stream, sequence)| source.synchronize(stream, sequence));
                });
                Outcome::Moved { ns }
            }
            Call::Remap { from, to } => {
                let pages: Vec<Region> = from.iter().map(|(_, pages)| *pages).collect();
                let (done, ns) = timed(source, |source| source.remap(&pages, to.1));
                Outcome::Remapped { done, ns }
            }
        }
    }
}

/// Does some work of a source; its result, and its nanoseconds.
fn timed<S: Source + ?Sized, T>(source: &mut S, work: impl FnOnce(&mut S) -> T) -> (T, u64) {
    let start = source.now();
    let done = work(source);
    (
        done,
        u64::try_from(source.now().saturating_sub(start).as_nanos()).unwrap_or(u64::MAX),
    )
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool")
            .field("policy", &self.policy())
            .field("statistics", &self.statistics())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
