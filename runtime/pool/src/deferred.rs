//! Deferred frees: a handle dropped anywhere, on any thread, is noted here and freed at the pool's
//! next operation.
//!
//! A drop must neither call a driver nor wait for a pool that another thread has locked. So a drop
//! only appends to a list under a separate lock, which is held for no longer than that. `pending`
//! lets the pool see without the lock that there is nothing to do; it is set before the list's lock
//! is released and cleared while that is held, so that it is set whenever the list has an item.

use super::sync::{AtomicBool, Mutex, Ordering};

/// A list that any thread appends to and one at a time empties.
#[derive(Debug)]
pub(crate) struct Deferred<T> {
    items: Mutex<Vec<T>>,
    pending: AtomicBool,
}

impl<T> Deferred<T> {
    pub(crate) fn new() -> Deferred<T> {
        Deferred {
            items: Mutex::new(Vec::new()),
            pending: AtomicBool::new(false),
        }
    }

    /// Notes an item.
    pub(crate) fn push(&self, item: T) {
        let mut items = self
            .items
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner());
        items.push(item);
        self.pending.store(true, Ordering::Release);
    }

    /// Whether there may be items. An item of this thread, or one that this thread knows of, is
    /// never missed.
    pub(crate) fn is_pending(&self) -> bool {
        self.pending.load(Ordering::Acquire)
    }

    /// Moves all items to the end of `into`.
    pub(crate) fn drain(&self, into: &mut Vec<T>) {
        if !self.is_pending() {
            return;
        }
        let mut items = self
            .items
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner());
        self.pending.store(false, Ordering::Release);
        into.append(&mut items);
    }
}
