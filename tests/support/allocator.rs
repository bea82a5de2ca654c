//! A global allocator that counts the requests of all threads of a test program.
//!
//! This file is the one place outside of the crate `kernels` with `unsafe`: a global allocator
//! cannot be written without it.
#![allow(dead_code, reason = "each test program counts something else")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering};

/// The system's allocator, counting.
struct Counting;

/// Counts of allocations and reallocations, and of deallocations.
static TAKEN: AtomicU64 = AtomicU64::new(0);
static GIVEN_BACK: AtomicU64 = AtomicU64::new(0);
/// Live bytes, and their maximum since the last reset.
static LIVE: AtomicU64 = AtomicU64::new(0);
static PEAK: AtomicU64 = AtomicU64::new(0);

fn took(bytes: usize) {
    TAKEN.fetch_add(1, Ordering::Relaxed);
    let live = LIVE.fetch_add(bytes as u64, Ordering::Relaxed) + bytes as u64;
    PEAK.fetch_max(live, Ordering::Relaxed);
}

fn gave_back(bytes: usize) {
    GIVEN_BACK.fetch_add(1, Ordering::Relaxed);
    LIVE.fetch_sub(bytes as u64, Ordering::Relaxed);
}

// SAFETY: every call is passed on unchanged to the system's allocator, which keeps the contract;
// counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        took(layout.size());
        // SAFETY: the caller keeps the contract of `alloc`, which is the system allocator's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        took(layout.size());
        // SAFETY: as for `alloc`.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        took(bytes);
        LIVE.fetch_sub(layout.size() as u64, Ordering::Relaxed);
        // SAFETY: the block came from the system's allocator with this layout, as all blocks here
        // do.
        unsafe { System.realloc(block, layout, bytes) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        gave_back(layout.size());
        // SAFETY: as for `realloc`.
        unsafe { System.dealloc(block, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The number of allocations and deallocations of `work`, on all threads together.
pub fn counted(work: impl FnOnce()) -> (u64, u64) {
    let before = (
        TAKEN.load(Ordering::SeqCst),
        GIVEN_BACK.load(Ordering::SeqCst),
    );
    work();
    (
        TAKEN.load(Ordering::SeqCst) - before.0,
        GIVEN_BACK.load(Ordering::SeqCst) - before.1,
    )
}

/// The peak of live bytes during `work`, above those before it, on all threads together.
pub fn peak_bytes(work: impl FnOnce()) -> u64 {
    let before = LIVE.load(Ordering::SeqCst);
    PEAK.store(before, Ordering::SeqCst);
    work();
    PEAK.load(Ordering::SeqCst).saturating_sub(before)
}
