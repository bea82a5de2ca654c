//! A model check of the queue of deferred frees: every interleaving of its threads, as far as the
//! memory model allows them.
//!
//! The queue's source is compiled here a second time, over the locks and atomics of `loom`.

/// Every interleaving with a bounded number of preemptions. In practice, errors that occur with
/// more preemptions also occur with few (Musuvathi and Qadeer, "Iterative context bounding", 2007).
fn check(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(model);
}

/// The synchronization primitives of the queue.
mod sync {
    pub use loom::sync::Mutex;
    pub use loom::sync::atomic::{AtomicBool, Ordering};
}

#[path = "../../../runtime/pool/src/deferred.rs"]
mod deferred;

use deferred::Deferred;
use loom::sync::Arc;

#[test]
fn nothing_is_lost_or_seen_twice() {
    check(|| {
        let queue = Arc::new(Deferred::new());
        let droppers: Vec<_> = [vec![0, 1], vec![2]]
            .into_iter()
            .map(|items| {
                let queue = queue.clone();
                loom::thread::spawn(move || items.into_iter().for_each(|item| queue.push(item)))
            })
            .collect();
        let mut seen = Vec::new();
        queue.drain(&mut seen);
        for dropper in droppers {
            dropper.join().expect("a thread that does not panic");
        }
        queue.drain(&mut seen);
        let of_one: Vec<u32> = seen.iter().copied().filter(|item| *item < 2).collect();
        assert_eq!(
            of_one,
            [0, 1],
            "in the order of the thread that dropped them"
        );
        seen.sort_unstable();
        assert_eq!(seen, [0, 1, 2]);
    });
}

#[test]
fn two_drainers_share_the_queue() {
    check(|| {
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
