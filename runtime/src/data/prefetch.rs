//! A prefetch queue: items made on a background thread, a bounded number ahead.

use std::fmt;
use std::panic::resume_unwind;
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{Builder, JoinHandle};

/// The most items ahead, because their slots are allocated at once.
const DEPTH_MAX: usize = 1 << 16;

/// An iterator whose items a background thread makes ahead of use: batches of a
/// [`Split`](super::Split), or of any other source.
///
/// ```
/// use slabwise::data::Prefetched;
///
/// let squares = Prefetched::new((0..5).map(|n| n * n), 2);
/// assert!(squares.eq([0, 1, 4, 9, 16]));
/// ```
///
/// Dropping it, also mid-way, ends the thread before the drop returns; at most one item is still
/// being made by then. A panic of the thread is propagated by [`next`](Iterator::next), after the
/// items made before it. If the system cannot start a thread, `next` makes the items.
pub struct Prefetched<T> {
    /// The source, if no thread has it.
    source: Option<Box<dyn Iterator<Item = T> + Send>>,
    /// None once the thread is done.
    items: Option<Receiver<T>>,
    thread: Option<JoinHandle<()>>,
    /// The size hint of the source, less the items handed out.
    left: (usize, Option<usize>),
}

impl<T: Send + 'static> Prefetched<T> {
    /// Makes the items of `source` ahead, which may be infinite: at most `depth` (0 counts as 1)
    /// exist that were not handed out.
    pub fn new(source: impl Iterator<Item = T> + Send + 'static, depth: usize) -> Prefetched<T> {
        Prefetched::on(Builder::new(), source, depth)
    }

    /// Makes the items on a thread of this kind.
    fn on(
        builder: Builder,
        source: impl Iterator<Item = T> + Send + 'static,
        depth: usize,
    ) -> Prefetched<T> {
        let left = source.size_hint();
        // A thread that cannot be started drops its closure, and the source is still needed.
        let given = Arc::new(Mutex::new(Some(source)));
        let taken = Arc::clone(&given);
        // The thread itself holds one more item than the channel while it waits for space.
        let (sender, items) = sync_channel(
            depth
                .saturating_sub(1)
                .min(left.1.unwrap_or(usize::MAX))
                .min(DEPTH_MAX),
        );
        let work = move || {
            let source = taken.lock().unwrap_or_else(PoisonError::into_inner).take();
            for item in source.into_iter().flatten() {
                if sender.send(item).is_err() {
                    return;
                }
            }
        };
        match builder.name("slabwise-prefetch".into()).spawn(work) {
            Ok(thread) => Prefetched {
                source: None,
                items: Some(items),
                thread: Some(thread),
                left,
            },
            Err(reason) => {
                log::warn!(
                    "batches are made on request, because no thread can be started: {reason}"
                );
                let source = given.lock().unwrap_or_else(PoisonError::into_inner).take();
                Prefetched {
                    source: source.map(|source| Box::new(source) as _),
                    items: None,
                    thread: None,
                    left,
                }
            }
        }
    }
}

impl<T> Prefetched<T> {
    /// Ends the thread: hangs up, so that a waiting send returns, then joins it. Gives its result.
    fn end(&mut self) -> std::thread::Result<()> {
        self.items = None;
        self.left = (0, Some(0));
        self.thread.take().map_or(Ok(()), JoinHandle::join)
    }
}

impl<T> Iterator for Prefetched<T> {
    type Item = T;

    fn next(&mut self) -> Option<T> {
        if let Some(source) = &mut self.source {
            let item = source.next();
            self.left = source.size_hint();
            return item;
        }
        if let Ok(item) = self.items.as_ref()?.recv() {
            let (least, most) = self.left;
            self.left = (
                least.saturating_sub(1),
                most.map(|most| most.saturating_sub(1)),
            );
            return Some(item);
        }
        match self.end() {
            Ok(()) => None,
            Err(panic) => resume_unwind(panic),
        }
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.left
    }
}

impl<T> fmt::Debug for Prefetched<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Prefetched")
            .field("left", &self.left)
            .field("thread", &self.thread)
            .finish_non_exhaustive()
    }
}

impl<T> Drop for Prefetched<T> {
    fn drop(&mut self) {
        // The caller did not request the item that failed, and a panic while dropping could abort.
        let _ = self.end();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

    /// Counts the live items.
    struct Counted(Arc<AtomicUsize>);

    impl Drop for Counted {
        fn drop(&mut self) {
            self.0.fetch_sub(1, SeqCst);
        }
    }

    #[test]
    fn no_more_than_depth_items_exist_ahead() {
        for depth in [0, 1, 3] {
            let (alive, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
            let (count, peak) = (Arc::clone(&alive), Arc::clone(&most));
            let source = (0..50).map(move |_| {
                peak.fetch_max(count.fetch_add(1, SeqCst) + 1, SeqCst);
                Counted(Arc::clone(&count))
            });
            let mut items = Prefetched::new(source, depth);
            for left in (0..50).rev() {
                drop(items.next().unwrap());
                assert_eq!(items.size_hint(), (left, Some(left)));
            }
            assert!(items.next().is_none() && items.next().is_none());
            // One more: the item just handed out here may not be dropped yet while the thread makes
            // the next.
            assert!(most.load(SeqCst) <= depth.max(1) + 1);
            assert_eq!(alive.load(SeqCst), 0);
        }
    }

    #[test]
    fn a_source_need_not_know_its_end() {
        let mut numbers = 0..5;
        let mut items = Prefetched::new(std::iter::from_fn(move || numbers.next()), usize::MAX);
        assert_eq!((items.size_hint(), items.next()), ((0, None), Some(0)));
        assert!(items.by_ref().eq(1..5));
        assert_eq!(items.size_hint(), (0, Some(0)));
        assert!(
            Prefetched::new(0.., 3).take(4).eq(0..4),
            "it may be without end"
        );
    }

    #[test]
    fn without_a_thread_items_are_made_when_they_are_asked_for() {
        // No address space holds such a stack.
        let mut items = Prefetched::on(
            Builder::new().stack_size(isize::MAX as usize / 2),
            (0..4).map(|n| n * n),
            2,
        );
        assert!(items.thread.is_none() && items.size_hint() == (4, Some(4)));
        assert_eq!((items.next(), items.size_hint()), (Some(0), (3, Some(3))));
        assert!(items.by_ref().eq([1, 4, 9]));
        assert_eq!((items.next(), items.size_hint()), (None, (0, Some(0))));
    }

    #[test]
    fn dropping_midway_ends_the_thread() {
        let owned = Arc::new(());
        let held = Arc::clone(&owned);
        let mut items = Prefetched::new(
            (0..1_000_000).map(move |i| (i, Arc::strong_count(&held))),
            2,
        );
        assert_eq!(items.next(), Some((0, 2)));
        drop(items);
        // The thread's values are gone, so the thread is.
        assert_eq!(Arc::strong_count(&owned), 1);
    }

    #[test]
    fn a_panic_goes_on_where_items_are_taken() {
        let source = (0..4).map(|i| {
            if i == 2 {
                resume_unwind(Box::new("broken"))
            } else {
                i
            }
        });
        let mut items = Prefetched::new(source, 1);
        assert_eq!((items.next(), items.next()), (Some(0), Some(1)));
        let panic = catch_unwind(AssertUnwindSafe(|| items.next())).unwrap_err();
        assert_eq!(panic.downcast_ref(), Some(&"broken"));
        assert_eq!((items.next(), items.size_hint()), (None, (0, Some(0))));
    }
}
