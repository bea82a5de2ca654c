//! A model check of the queue of deferred frees: every interleaving of its threads, as far as the memory model allows them.
//!
//! The queue's source is compiled here a second time, over the locks and atomics of `loom`.

/// What the queue is written against.
mod sync {
    pub use loom::sync::Mutex;
    pub use loom::sync::atomic::{AtomicBool, Ordering};
}

#[path = "../runtime/src/memory/deferred.rs"]
mod deferred;

use deferred::Deferred;
use loom::sync::Arc;

#[test]
fn nothing_is_lost_or_seen_twice() {
    loom::model(|| {
        let queue = Arc::new(Deferred::new());
        let droppers: Vec<_> = (0..2u32)
            .map(|k| {
                let queue = queue.clone();
                loom::thread::spawn(move || {
                    queue.push(2 * k);
                    queue.push(2 * k + 1);
                })
            })
            .collect();
        let mut seen = Vec::new();
        queue.drain(&mut seen);
        queue.drain(&mut seen);
        for dropper in droppers {
            dropper.join().expect("a thread that does not panic");
        }
        queue.drain(&mut seen);
        for k in 0..2 {
            let of_one: Vec<u32> = seen.iter().copied().filter(|item| item / 2 == k).collect();
            assert_eq!(of_one, [2 * k, 2 * k + 1], "in the order of the thread that dropped them");
        }
    });
}

#[test]
fn two_drainers_share_what_there_is() {
    loom::model(|| {
        let queue = Arc::new(Deferred::new());
        queue.push(1);
        let other = {
            let queue = queue.clone();
            loom::thread::spawn(move || {
                let mut seen = Vec::new();
                queue.push(2);
                queue.drain(&mut seen);
                seen
            })
        };
        let mut seen = Vec::new();
        queue.drain(&mut seen);
        seen.extend(other.join().expect("a thread that does not panic"));
        queue.drain(&mut seen);
        seen.sort_unstable();
        assert_eq!(seen, [1, 2]);
    });
}
