//! The engine over MPI: one thread calls the library, and may be abandoned.
//!
//! When a rank dies, an MPI library may report nothing, and even its non-blocking calls may block
//! for ever. Therefore no thread that must respond calls it: such threads wait on a condition
//! variable, which the library's thread, the lifeline or a deadline signals.
//!
//! Ranks of one machine read each other's memory ([`crate::near`]). They send messages only for
//! bytes that peers cannot read.

use std::collections::VecDeque;
use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use slabwise_kernels::memory::Foreign;

use super::calls::{Calls, Handle};
use super::lifeline::Lifeline;
use crate::engine::{Collective, Engine, IN_FLIGHT_MAX, Job, Stop};
use crate::near::{self, Fate, Near, Processes, SharedArena};
use crate::{Error, Result};

/// The most bytes of one message, since counts are `int`.
const PIECE_MAX: usize = 1 << 30;
/// Message tags repeat after this many collectives; every library has at least so many.
const TAGS: u64 = 1 << 14;
/// The time for which the thread looks without sleeping.
const SPIN: Duration = Duration::from_micros(20);
/// The shortest and the longest sleep between two looks. Longer spinning takes cores from ranks
/// that share them.
const NAPS: [Duration; 2] = [Duration::from_micros(20), Duration::from_micros(200)];
/// The words for a rank that ends a collective for all others, because it cannot go on with it.
pub(super) const FAILED: &str = "has failed in a collective";
/// The time that the lifeline gets to explain a failure of the library.
const VERDICT: Duration = Duration::from_secs(1);

/// The state that the program, the library's thread and the lifeline share.
pub(super) struct Shared {
    pub state: Mutex<State>,
    /// Signals waits.
    pub changed: Condvar,
    /// Signals the library's thread.
    work: Condvar,
    /// The number of collectives that this rank has started.
    pub started: AtomicU64,
    /// The step of this rank.
    pub step: AtomicU64,
    /// The bytes that this rank has sent.
    sent: AtomicU64,
    /// The ranks whose memory this one sees.
    near: OnceLock<Arc<Near<Processes>>>,
}

/// Messages of a collective.
struct Errand {
    seq: u64,
    job: Job,
    sends: Ranks,
    receives: Ranks,
}

/// Ranks that messages go to or come from.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ranks {
    None,
    All,
    /// Those whose memory this rank does not see.
    Far,
    /// Those that are near, with bytes that cannot be seen.
    Hidden,
}

pub(super) struct State {
    queue: VecDeque<Errand>,
    /// The number of pending errands for the collective of each slot.
    pending: [u8; IN_FLIGHT_MAX],
    failed: Option<String>,
    /// The first rank that was lost, and how.
    pub lost: Option<(usize, String)>,
    /// The rank that has left after the fewest collectives, with their number.
    pub left: Option<(u64, usize)>,
    /// The ranks that have left.
    pub leavers: usize,
    is_closing: bool,
    has_ended: bool,
}

impl Shared {
    pub fn new() -> Shared {
        let state = State {
            queue: VecDeque::with_capacity(2 * IN_FLIGHT_MAX),
            pending: [0; IN_FLIGHT_MAX],
            failed: None,
            lost: None,
            left: None,
            leavers: 0,
            is_closing: false,
            has_ended: false,
        };
        Shared {
            state: Mutex::new(state),
            changed: Condvar::new(),
            work: Condvar::new(),
            started: AtomicU64::new(0),
            step: AtomicU64::new(0),
            sent: AtomicU64::new(0),
            near: OnceLock::new(),
        }
    }

    /// Gives the library's thread an errand.
    fn send_for(&self, errand: Errand) {
        let mut state = self.state();
        state.pending[errand.seq as usize % IN_FLIGHT_MAX] += 1;
        state.queue.push_back(errand);
        drop(state);
        self.work.notify_one();
    }

    /// Whether messages go to, or come from, a rank.
    fn includes(&self, ranks: Ranks, rank: usize, seq: u64) -> bool {
        let near = self.near.get().filter(|near| near.sees(rank));
        match ranks {
            Ranks::None => false,
            Ranks::All => true,
            Ranks::Far => near.is_none(),
            Ranks::Hidden => near.is_some_and(|near| near.needs_messages(rank, seq)),
        }
    }

    pub fn state(&self) -> MutexGuard<'_, State> {
        // No code panics while it holds the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Declares a rank lost, unless another one is already. Returns the lost one.
    pub fn lose(&self, rank: usize, why: String) -> (usize, String) {
        end_without_mpi();
        let lost = self.state().lost.get_or_insert((rank, why)).clone();
        self.changed.notify_all();
        self.work.notify_all();
        lost
    }

    fn fail(&self, why: String) {
        end_without_mpi();
        self.state().failed.get_or_insert(why);
        self.changed.notify_all();
    }

    /// Waits until `is_over` or the time has come. Returns whether it is over.
    fn wait_until(&self, until: Instant, is_over: impl Fn(&State) -> bool) -> bool {
        let mut state = self.state();
        loop {
            if is_over(&state) {
                return true;
            }
            let now = Instant::now();
            if now >= until {
                return false;
            }
            let waited = self.changed.wait_timeout(state, until - now);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// Whether the world has ended with an error after this rank had left.
static HAS_LEFT_EARLY: AtomicBool = AtomicBool::new(false);

/// Makes the end of the process skip the handlers of MPI, which would wait for a lost rank. The
/// exit code stays, unless it is that of success and this rank has left others that needed it.
fn end_without_mpi() {
    unsafe extern "C" {
        fn on_exit(
            handler: extern "C" fn(c_int, *mut libc::c_void),
            argument: *mut libc::c_void,
        ) -> c_int;
    }
    extern "C" fn end(code: c_int, _: *mut libc::c_void) {
        // SAFETY: `_exit` ends the process at once. Rust's own output is flushed before handlers
        // run.
        unsafe { libc::_exit(code.max(c_int::from(HAS_LEFT_EARLY.load(Ordering::Relaxed)))) }
    }
    static ONCE: OnceLock<()> = OnceLock::new();
    ONCE.get_or_init(|| {
        // SAFETY: the handler is valid for the rest of the process. It runs before those that MPI
        // has registered, because later ones run first.
        unsafe { on_exit(end, std::ptr::null_mut()) };
    });
}

/// This rank's end of the engine.
pub(crate) struct Mpi {
    name: String,
    pub rank: usize,
    pub size: usize,
    pub(super) shared: Arc<Shared>,
    lifeline: OnceLock<Lifeline>,
    patience: Duration,
    /// The threads of each rank; unset in a world of one.
    threads: OnceLock<usize>,
}

impl Mpi {
    /// Starts the library's thread and initialises MPI on it.
    ///
    /// # Errors
    /// If the library refuses, or does not answer in time.
    pub(super) fn start(calls: Calls, patience: Duration) -> Result<Mpi> {
        let shared = Arc::new(Shared::new());
        let name = format!(
            "{} ({}, {})",
            calls.version(),
            calls.dialect.name,
            calls.file.display()
        );
        let (told, answer) = mpsc::channel();
        let theirs = Arc::clone(&shared);
        let spawned = thread::Builder::new()
            .name("slabwise-mpi".into())
            .spawn(move || {
                let place = calls.init();
                let is_ready = place.is_ok();
                if told.send(place).is_ok() && is_ready {
                    serve(&calls, &theirs);
                }
            });
        spawned.map_err(|e| Error::Join(format!("a thread for MPI cannot be started: {e}")))?;
        let (rank, size) = answer
            .recv_timeout(patience)
            .map_err(|_| {
                end_without_mpi();
                Error::Join(format!(
                    "{name} did not connect the ranks within {:.1} s",
                    patience.as_secs_f64()
                ))
            })?
            .map_err(|why| Error::Join(format!("{name}: {why}")))?;
        let lifeline = OnceLock::new();
        Ok(Mpi {
            name,
            rank,
            size,
            shared,
            lifeline,
            patience,
            threads: OnceLock::new(),
        })
    }

    /// Connects the ranks beside MPI, so that the loss of one is seen.
    pub(super) fn set_lifeline(&self, lifeline: Lifeline) {
        // It is set once, by `join`.
        let _ = self.lifeline.set(lifeline);
    }

    /// Sets the threads that each rank can use.
    pub(super) fn set_threads(&self, threads: usize) {
        // It is set once, by `join`.
        let _ = self.threads.set(threads);
    }

    /// Lets this rank read the memory of others in place.
    pub(super) fn set_near(&self, near: Near<Processes>) {
        // It is set once, by `join`.
        let _ = self.shared.near.set(Arc::new(near));
    }

    fn near(&self) -> Option<&Arc<Near<Processes>>> {
        self.shared.near.get()
    }

    /// Receives bytes of near ranks that cannot be seen in place.
    fn receive_hidden(&self, seq: u64, job: Job) {
        self.shared.send_for(Errand {
            seq,
            job,
            sends: Ranks::None,
            receives: Ranks::Hidden,
        });
    }

    /// Reads the bytes that are seen in place.
    fn receive(
        &self,
        near: &Near<Processes>,
        seq: u64,
        messages: &[u8],
    ) -> std::result::Result<(), Stop> {
        near.receive(seq, messages, self)
            .map_err(|stop| match stop {
                // The memory of a rank that has died cannot be mapped any more.
                Stop::Failed(why) => {
                    self.shared.fail(why);
                    self.explain(seq)
                }
                other => other,
            })
    }

    /// Waits until the messages of a collective have arrived.
    fn wait_for_messages(&self, seq: u64, until: Instant) -> std::result::Result<(), Stop> {
        let begun = Instant::now();
        let is_done = |state: &State| state.pending[seq as usize % IN_FLIGHT_MAX] == 0;
        let is_over = |state: &State| is_done(state) || state.is_broken_for(seq);
        if !self.shared.wait_until(until, is_over) {
            return Err(self.give_up(seq, begun.elapsed()));
        }
        if is_done(&self.shared.state()) {
            return Ok(());
        }
        Err(self.explain(seq))
    }

    /// Waits until a collective has ended.
    fn wait_for_bytes(&self, seq: u64, until: Instant) -> std::result::Result<(), Stop> {
        let Some(near) = self.near() else {
            return self.wait_for_messages(seq, until);
        };
        near.arrive(seq, until, self)?;
        let hidden = near.hidden(seq);
        let Some(job) = hidden.filter(|job| job.collective == Collective::ReduceScatter) else {
            if let Some(job) = hidden {
                self.receive_hidden(seq, job);
            }
            self.receive(near, seq, &[])?;
            self.wait_for_messages(seq, until)?;
            return near.finish(seq, until, self);
        };
        // The rare case that a rank sends from memory that cannot be shared: its addends come to
        // memory beside the plan.
        let mut messages = vec![0; job.source_len];
        self.receive_hidden(
            seq,
            Job {
                collective: Collective::AllToAll,
                destination: messages.as_mut_ptr(),
                destination_len: messages.len(),
                ..job
            },
        );
        let received = self.wait_for_messages(seq, until);
        if received.is_err() {
            // The library may still write to it.
            std::mem::forget(messages);
            return received;
        }
        self.receive(near, seq, &messages)?;
        near.finish(seq, until, self)
    }

    /// The reason why a collective cannot end, after a rank was lost or has left, or the library
    /// has failed.
    fn explain(&self, seq: u64) -> Stop {
        let state = self.shared.state();
        let left = state.left.filter(|(started, _)| *started <= seq);
        let failed = state.failed.clone();
        let is_lost = state.lost.is_some();
        drop(state);
        if !is_lost && failed.is_some() {
            self.shared
                .wait_until(Instant::now() + VERDICT, |state| state.lost.is_some());
        }
        if let Some((rank, why)) = self.shared.state().lost.clone() {
            return Stop::Lost { rank, why };
        }
        if let Some((_, rank)) = left {
            return self.lost(rank, "has left the world".into());
        }
        Stop::Failed(failed.unwrap_or_default())
    }

    /// The reason why a collective has not ended in time.
    fn give_up(&self, seq: u64, waited: Duration) -> Stop {
        let late = self.lifeline.get().and_then(|line| line.latecomer(seq));
        let Some((rank, step, started)) = late else {
            let why = format!(
                "its bytes have not arrived after {:.1} s, though no rank is late",
                waited.as_secs_f64()
            );
            self.shared.fail(why.clone());
            return Stop::Failed(why);
        };
        let why = format!(
            "has not arrived after {:.1} s (it is at step {step}, after {started} of {} collectives)",
            waited.as_secs_f64(),
            seq + 1
        );
        self.lost(rank, why)
    }

    /// Declares a rank lost, and tells all others.
    fn lost(&self, rank: usize, why: String) -> Stop {
        let (rank, why) = self.shared.lose(rank, why);
        if let Some(line) = self.lifeline.get() {
            line.tell_lost(rank, &why);
        }
        Stop::Lost { rank, why }
    }
}

impl Fate for Mpi {
    fn verdict(&self, seq: u64, _is_missing: &dyn Fn(usize) -> bool) -> Option<Stop> {
        let is_broken = self.shared.state().is_broken_for(seq);
        is_broken.then(|| self.explain(seq))
    }

    fn late(&self, rank: usize, step: u64, waited: Duration) -> Stop {
        self.lost(rank, near::not_arrived(step, waited))
    }
}

impl State {
    /// Whether the collective of this number cannot end.
    fn is_broken_for(&self, seq: u64) -> bool {
        let has_left = self.left.is_some_and(|(started, _)| started <= seq);
        self.lost.is_some() || self.failed.is_some() || has_left
    }
}

impl Engine for Mpi {
    fn name(&self) -> String {
        self.name.clone()
    }

    unsafe fn start(&self, seq: u64, job: Job) -> std::result::Result<(), Stop> {
        if let Some((rank, why)) = self.shared.state().lost.clone() {
            return Err(Stop::Lost { rank, why });
        }
        self.shared.started.store(seq + 1, Ordering::Relaxed);
        let (sends, receives) = match self.near() {
            None => (Ranks::All, Ranks::All),
            Some(near) => {
                let is_seen = near.start(seq, job);
                let others = if near.sees_all(&job) {
                    Ranks::None
                } else {
                    Ranks::Far
                };
                (if is_seen { others } else { Ranks::All }, others)
            }
        };
        if (sends, receives) != (Ranks::None, Ranks::None) {
            self.shared.send_for(Errand {
                seq,
                job,
                sends,
                receives,
            });
        }
        Ok(())
    }

    fn wait(&self, seq: u64, until: Instant) -> std::result::Result<(), Stop> {
        let ended = self.wait_for_bytes(seq, until);
        if let Err(Stop::Failed(_)) = ended {
            // This rank has started the collective, in which others would wait for it.
            self.lost(self.rank, FAILED.into());
        }
        ended
    }

    fn threads(&self) -> usize {
        let all = || thread::available_parallelism().map_or(1, usize::from);
        self.threads.get().copied().unwrap_or_else(all)
    }

    fn sums_in_place(&self) -> bool {
        self.near().is_some_and(|near| near.is_whole())
    }

    fn abandons(&self) -> bool {
        true
    }

    fn set_step(&self, step: u64) {
        self.shared.step.store(step, Ordering::Relaxed);
        if let Some(near) = self.near() {
            near.set_step(step);
        }
    }

    fn arena(&self, bytes: usize) -> Option<Foreign> {
        Some(Box::new(SharedArena::new(self.near()?, bytes)?))
    }

    fn message_bytes(&self) -> u64 {
        self.shared.sent.load(Ordering::Relaxed)
    }

    fn close(&self, is_lost: bool) {
        let is_known = self.shared.state().lost.is_some();
        if !is_known && is_lost {
            self.lost(self.rank, FAILED.into());
        } else if !is_known && self.near().is_some_and(|near| near.has_open()) {
            self.lost(self.rank, "has left the world".into());
        } else if let Some(line) = self.lifeline.get() {
            line.leave();
        }
        let until = Instant::now() + self.patience.min(Duration::from_secs(86_400));
        let is_broken = |state: &State| state.lost.is_some() || state.failed.is_some();
        if !is_lost && self.lifeline.get().is_some() {
            // Rank 0 stays until all others leave, because it relays their messages.
            let others = if self.rank == 0 { self.size - 1 } else { 0 };
            let all = |state: &State| state.leavers >= others || is_broken(state);
            self.shared.wait_until(until, all);
        }
        let mut state = self.shared.state();
        if is_lost || is_broken(&state) {
            drop(state);
            end_without_mpi();
        } else {
            state.is_closing = true;
            drop(state);
            self.shared.work.notify_all();
            let has_ended = |state: &State| state.has_ended || is_broken(state);
            self.shared.wait_until(until, has_ended);
            if !self.shared.state().has_ended {
                end_without_mpi();
            }
        }
        if let Some((rank, why)) = self.shared.state().lost.clone().filter(|_| !is_lost) {
            // No call is left that could return it. Launchers may end all ranks with this one, so
            // that others get the time to report.
            let size = self.size;
            eprintln!(
                "slabwise: the world ended after this rank had left: rank {rank} of {size} {why}"
            );
            HAS_LEFT_EARLY.store(true, Ordering::Relaxed);
            thread::sleep(VERDICT);
        }
        if let Some(line) = self.lifeline.get() {
            line.end();
        }
    }
}

/// The lengths of the messages that carry `len` bytes. An empty chunk is one empty message, so that
/// every collective waits for its peers.
fn pieces(len: usize, most: usize) -> impl Iterator<Item = (usize, usize)> {
    let count = len.div_ceil(most).max(1);
    (0..count).map(move |i| (i * most, most.min(len - i * most)))
}

/// A message in flight.
struct Request {
    handle: Handle,
    /// The bytes to receive; `None` if it is sent.
    expected: Option<usize>,
    peer: usize,
}

/// A collective in flight.
struct Active {
    seq: u64,
    requests: Vec<Request>,
}

/// The library's thread: starts queued transfers and drives them until the world closes or is lost.
fn serve(calls: &Calls, shared: &Shared) {
    let (rank, _) = calls.place();
    let mut active: Vec<Active> = Vec::with_capacity(2 * IN_FLIGHT_MAX);
    let mut spare: Vec<Vec<Request>> = Vec::with_capacity(2 * IN_FLIGHT_MAX);
    let mut fresh: Vec<Errand> = Vec::with_capacity(2 * IN_FLIGHT_MAX);
    let (mut idle_since, mut nap) = (Instant::now(), NAPS[0]);
    loop {
        let mut state = shared.state();
        while active.is_empty()
            && state.queue.is_empty()
            && !state.is_closing
            && state.lost.is_none()
        {
            state = shared
                .work
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
        if state.lost.is_some() || state.failed.is_some() {
            return;
        }
        if active.is_empty() && state.queue.is_empty() {
            drop(state);
            calls.finalize();
            shared.state().has_ended = true;
            shared.changed.notify_all();
            return;
        }
        fresh.extend(state.queue.drain(..));
        drop(state);
        let mut has_moved = !fresh.is_empty();
        let looked = fresh
            .drain(..)
            .try_for_each(|errand| {
                let mut requests = spare.pop().unwrap_or_default();
                post(calls, rank, shared, &errand, &mut requests)?;
                let seq = errand.seq;
                active.push(Active { seq, requests });
                Ok(())
            })
            .and_then(|()| look(calls, shared, &mut active, &mut spare));
        match looked {
            Ok(moved) => has_moved |= moved,
            Err(why) => return shared.fail(why),
        }
        if has_moved {
            (idle_since, nap) = (Instant::now(), NAPS[0]);
        } else if idle_since.elapsed() > SPIN {
            thread::sleep(nap);
            nap = (nap * 2).min(NAPS[1]);
        }
    }
}

/// Starts the messages of an errand.
fn post(
    calls: &Calls,
    rank: usize,
    shared: &Shared,
    errand: &Errand,
    requests: &mut Vec<Request>,
) -> std::result::Result<(), String> {
    let Errand {
        seq,
        ref job,
        sends,
        receives,
    } = *errand;
    let tag = (seq % TAGS) as c_int;
    let peers = job.peers(rank);
    for peer in peers.clone() {
        let Some(chunk) = job
            .chunk(rank, peer)
            .filter(|_| shared.includes(receives, peer, seq))
        else {
            continue;
        };
        for (at, len) in pieces(chunk.len, PIECE_MAX) {
            let bytes = job.destination.wrapping_add(chunk.to + at);
            // SAFETY: the chunk lies in the destination, which stays valid and unused until the
            // collective has ended, by the promise of `Engine::start`.
            let handle = unsafe { calls.receive(bytes, len as c_int, peer, tag) }?;
            requests.push(Request {
                handle,
                expected: Some(len),
                peer,
            });
        }
    }
    for peer in peers {
        let Some(chunk) = job
            .chunk(peer, rank)
            .filter(|_| shared.includes(sends, peer, seq))
        else {
            continue;
        };
        shared.sent.fetch_add(chunk.len as u64, Ordering::Relaxed);
        for (at, len) in pieces(chunk.len, PIECE_MAX) {
            let bytes = job.outgoing().wrapping_add(chunk.from + at);
            // SAFETY: as above; the source is not written.
            let handle = unsafe { calls.send(bytes, len as c_int, peer, tag) }?;
            requests.push(Request {
                handle,
                expected: None,
                peer,
            });
        }
    }
    if shared.near.get().is_none() {
        // SAFETY: the promise of `Engine::start`; messages do not touch the rank's own chunk of
        // the destination.
        unsafe { job.copy_own(rank) };
    }
    Ok(())
}

/// Looks once after all messages, and says whether one has ended.
fn look(
    calls: &Calls,
    shared: &Shared,
    active: &mut Vec<Active>,
    spare: &mut Vec<Vec<Request>>,
) -> std::result::Result<bool, String> {
    let mut has_moved = false;
    let mut at = 0;
    while at < active.len() {
        let Active { seq, requests } = &mut active[at];
        let mut message = 0;
        while message < requests.len() {
            let Request {
                handle,
                expected,
                peer,
            } = &mut requests[message];
            match calls.test(handle, expected.is_some())? {
                None => message += 1,
                Some(count) => {
                    if expected.is_some_and(|expected| expected != count as usize) {
                        return Err(format!(
                            "rank {peer} sent {count} bytes instead of {}",
                            expected.unwrap_or(0)
                        ));
                    }
                    has_moved = true;
                    requests.swap_remove(message);
                }
            }
        }
        if requests.is_empty() {
            shared.state().pending[*seq as usize % IN_FLIGHT_MAX] -= 1;
            shared.changed.notify_all();
            spare.push(active.swap_remove(at).requests);
        } else {
            at += 1;
        }
    }
    Ok(has_moved)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_every_byte_once() {
        let of = |len, most| pieces(len, most).collect::<Vec<_>>();
        assert_eq!(of(0, 4), [(0, 0)]);
        assert_eq!(of(4, 4), [(0, 4)]);
        assert_eq!(of(9, 4), [(0, 4), (4, 4), (8, 1)]);
        let large = of(5 << 30, PIECE_MAX);
        assert_eq!(large.len(), 5);
        assert!(large.iter().all(|(_, len)| i32::try_from(*len).is_ok()));
    }
}
