//! Collectives in flight between ranks: conflicting accesses are refused, and memory that a lost
//! transport may still access is never given back.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use slabwise_kernels::collective::{Group, Ticket, Transport, TransportError};
use slabwise_kernels::memory::{Memory, Region};
use slabwise_kernels::spec::CollectiveOp;

/// Two ranks of which the other sends 7s, after it is waited for; or is lost.
#[derive(Default)]
struct Sevens {
    started: Mutex<Vec<(usize, usize)>>,
    is_lost: AtomicBool,
    keeps: bool,
}

impl Sevens {
    fn result(&self) -> Result<(), TransportError> {
        if self.is_lost.load(Ordering::SeqCst) {
            return Err(TransportError {
                why: "rank 1 is lost".into(),
                keeps: self.keeps,
            });
        }
        Ok(())
    }
}

impl Transport for Sevens {
    fn ranks(&self) -> usize {
        2
    }

    fn rank(&self) -> usize {
        0
    }

    unsafe fn start(
        &self,
        _op: CollectiveOp,
        _group: Group,
        _source: *const [u8],
        destination: *mut [u8],
    ) -> Result<Ticket, TransportError> {
        self.result()?;
        let mut started = self.started.lock().expect("no panic");
        let destination = (
            destination.cast::<u8>().expose_provenance(),
            destination.len(),
        );
        started.push(destination);
        Ok(Ticket([started.len() as u64 - 1, 0, 0, 0]))
    }

    fn finish(&self, ticket: Ticket) -> Result<(), TransportError> {
        self.result()?;
        let (at, len) = self.started.lock().expect("no panic")[ticket.0[0] as usize];
        // SAFETY: the memory keeps the destination valid and to this transport until now.
        unsafe { std::ptr::with_exposed_provenance_mut::<u8>(at).write_bytes(7, len) };
        Ok(())
    }
}

#[repr(align(4096))]
struct Page([u8; 4096]);

/// Memory that tells when it is given back.
struct Watched(Box<Page>, Arc<AtomicBool>);

impl AsMut<[u8]> for Watched {
    fn as_mut(&mut self) -> &mut [u8] {
        &mut self.0.0
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.1.store(true, Ordering::SeqCst);
    }
}

/// A memory with one arena, a source and a destination in it, and whether the arena was given back.
fn memory() -> (Memory, [Region; 2], Arc<AtomicBool>) {
    let is_given_back = Arc::new(AtomicBool::new(false));
    let page = Watched(Box::new(Page([0; 4096])), Arc::clone(&is_given_back));
    let mut memory = Memory::new();
    let all = memory.adopt(Box::new(page));
    (memory, [all.part(0, 64), all.part(128, 128)], is_given_back)
}

/// The message of the panic that `work` ends in.
fn refused<T>(work: impl FnOnce() -> T) -> String {
    let thrown = catch_unwind(AssertUnwindSafe(work)).err().expect("refused");
    let text = thrown.downcast_ref::<String>();
    text.cloned().expect("a message")
}

#[test]
fn conflicts_are_refused_until_the_exchange_has_ended() {
    let ranks = Sevens::default();
    let (mut memory, [from, to], is_given_back) = memory();
    memory.bytes_mut(&from).fill(1);
    let exchange = memory
        .start_exchange(&ranks, (CollectiveOp::AllGather, Group::all(2)), [from, to])
        .expect("no loss");
    assert_eq!(memory.first_exchange(), Some(exchange));
    // The source may be read, and the bytes between the two be written.
    assert_eq!(memory.bytes(&from)[63], 1);
    let all = Region {
        bytes: 4096,
        ..from
    };
    memory.bytes_mut(&all.part(64, 64)).fill(2);
    assert!(refused(|| memory.bytes(&to).len()).contains("is read while bytes of other ranks"));
    assert!(refused(|| memory.bytes_mut(&to).fill(0)).contains("is written while"));
    assert!(refused(|| memory.bytes_mut(&from).fill(0)).contains("is written while"));
    assert!(refused(|| memory.copy(&to, &all.part(256, 128))).contains("is read"));
    assert!(refused(|| memory.start_copy(&all.part(256, 64), &from)).contains("is written"));
    let again = [from, to.part(64, 64)];
    let mut start =
        || memory.start_exchange(&ranks, (CollectiveOp::AllToAll, Group::all(2)), again);
    assert!(refused(&mut start).contains("is written"));
    memory.finish_exchange(exchange, &ranks).expect("no loss");
    assert!(memory.bytes(&to).iter().all(|byte| *byte == 7));
    memory.bytes_mut(&from).fill(0);
    // Waiting once more is no mistake.
    memory
        .finish_exchange(exchange, &ranks)
        .expect("it has ended");
    drop(memory);
    assert!(is_given_back.load(Ordering::SeqCst));
}

#[test]
fn memory_that_a_lost_transport_may_access_is_never_given_back() {
    for (keeps, releases) in [(false, false), (true, false), (true, true)] {
        let ranks = Sevens {
            keeps,
            ..Sevens::default()
        };
        let (mut memory, [from, to], is_given_back) = memory();
        let exchange = memory
            .start_exchange(&ranks, (CollectiveOp::AllGather, Group::all(2)), [from, to])
            .expect("no loss");
        ranks.is_lost.store(true, Ordering::SeqCst);
        let error = memory.finish_exchange(exchange, &ranks);
        assert!(error.is_err_and(|e| e.keeps == keeps && e.why == "rank 1 is lost"));
        if keeps {
            assert!(refused(|| memory.bytes(&to).len()).contains("is read"));
        } else {
            memory.bytes_mut(&to).fill(0);
        }
        if releases {
            memory.release(from.arena);
        }
        drop(memory);
        assert_eq!(
            is_given_back.load(Ordering::SeqCst),
            !keeps,
            "{keeps} {releases}"
        );
    }
}

#[test]
fn memory_in_flight_outlives_its_owner() {
    let ranks = Sevens::default();
    let (mut memory, sides, is_given_back) = memory();
    let started = memory.start_exchange(&ranks, (CollectiveOp::AllGather, Group::all(2)), sides);
    started.expect("no loss");
    // As in a panic between the start and the end.
    drop(memory);
    assert!(!is_given_back.load(Ordering::SeqCst));
    // The other rank goes on, and writes.
    ranks.finish(Ticket([0; 4])).expect("no loss");
}
