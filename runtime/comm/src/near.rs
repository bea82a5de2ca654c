//! Collectives between ranks that see each other's memory: they copy their peers' bytes in place.
//!
//! The ranks are threads of one process ([`local`]) or processes of one machine
//! ([`processes`]). Either way each rank publishes its progress in an [`Area`]: that it has started
//! a collective, with the place of its bytes, and that it has received all of its own. A collective
//! ends when all ranks have published the latter, because then no rank reads this rank's bytes any
//! more.

mod area;
mod local;
mod processes;
mod segment;

use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use slabwise_kernels::tree_sum::add_in_tree;

use crate::engine::{Collective, IN_FLIGHT_MAX, Job, Stop, copy_chunk};
use area::{Area, Place, collective};
pub(crate) use local::Local;
pub(crate) use processes::{Introduction, Processes, SharedArena};
pub(crate) use segment::{BOOT, boot};

/// The time for which a rank looks without sleeping.
const SPIN: Duration = Duration::from_micros(20);
/// The longest sleep between two looks at the fate of others.
const NAP: Duration = Duration::from_millis(20);

/// A message about a rank that did not arrive.
pub(crate) fn not_arrived(step: u64, waited: Duration) -> String {
    let seconds = waited.as_secs_f64();
    format!("has not arrived after {seconds:.1} s (it is at step {step})")
}

/// The failure to see a rank's memory, in words.
fn unseen(rank: usize, why: &str) -> String {
    format!("the memory of rank {rank} cannot be seen: {why}")
}

/// The memory of peers.
pub(crate) trait Sight: Send + Sync {
    /// The area of a rank; `None` if this rank does not see it.
    fn area(&self, rank: usize) -> Option<&Area>;

    /// The place of this rank's bytes, as its peers see them. Small bytes may be copied.
    fn place(&self, seq: u64, bytes: (*const u8, usize)) -> Place;

    /// Gives `read` the address of a peer's bytes, which is valid until it returns.
    ///
    /// # Errors
    /// If they cannot be seen, in words.
    fn with_bytes(&self, bytes: Posted, read: &mut dyn FnMut(*const u8)) -> Result<(), String>;
}

/// The bytes that a rank has posted for a collective.
#[derive(Clone, Copy)]
pub(crate) struct Posted {
    pub rank: usize,
    pub seq: u64,
    pub place: Place,
    /// The number of bytes from the place on that are read.
    pub end: usize,
}

/// The news from which a rank learns that a peer will not come.
pub(crate) trait Fate {
    /// The reason why a collective cannot end, though time is left; `is_missing` says which ranks
    /// it waits for.
    fn verdict(&self, seq: u64, is_missing: &dyn Fn(usize) -> bool) -> Option<Stop>;

    /// Gives up a collective because a rank has not arrived in time; it is at this step.
    fn late(&self, rank: usize, step: u64, waited: Duration) -> Stop;

    /// Asks whether peers' bytes may be read now.
    ///
    /// # Errors
    /// If the world has ended.
    fn begin_reading(&self) -> Result<(), Stop> {
        Ok(())
    }

    /// Says that reading has ended.
    fn end_reading(&self) {}
}

/// A rank among the ranks that it sees.
pub(crate) struct Near<S> {
    sight: S,
    rank: usize,
    size: usize,
    is_whole: bool,
    jobs: Mutex<[Option<Job>; IN_FLIGHT_MAX]>,
    /// The address of each rank's addends, while they are added.
    addends: Mutex<Vec<AtomicPtr<u8>>>,
}

impl<S: Sight> Near<S> {
    /// `is_whole` says that all ranks see each other.
    fn over(sight: S, rank: usize, size: usize, is_whole: bool) -> Near<S> {
        Near {
            sight,
            rank,
            size,
            is_whole,
            jobs: Mutex::new([None; IN_FLIGHT_MAX]),
            addends: Mutex::new((0..size).map(|_| AtomicPtr::default()).collect()),
        }
    }

    /// Whether this rank sees another one's memory.
    pub fn sees(&self, rank: usize) -> bool {
        rank != self.rank && self.sight.area(rank).is_some()
    }

    /// Whether this rank sees the memory of all others of a collective.
    pub fn sees_all(&self, job: &Job) -> bool {
        let mut peers = job.peers(self.rank);
        peers.all(|rank| self.sight.area(rank).is_some())
    }

    /// Whether all ranks see each other's memory.
    pub fn is_whole(&self) -> bool {
        self.is_whole
    }

    /// The other ranks of a collective that this one sees, with their areas.
    fn peers(&self, job: &Job) -> impl Iterator<Item = (usize, &Area)> {
        let others = job.peers(self.rank);
        others.filter_map(|rank| Some((rank, self.sight.area(rank)?)))
    }

    fn own(&self) -> &Area {
        self.sight.area(self.rank).expect("a rank sees itself")
    }

    /// The jobs in flight, by slot.
    fn jobs(&self) -> MutexGuard<'_, [Option<Job>; IN_FLIGHT_MAX]> {
        // No code panics while it holds the lock.
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn job(&self, seq: u64) -> Job {
        self.jobs()[seq as usize % IN_FLIGHT_MAX].expect("it was started")
    }

    /// Starts a collective. Returns whether peers see this rank's bytes; else they need messages.
    pub fn start(&self, seq: u64, job: Job) -> bool {
        self.jobs()[seq as usize % IN_FLIGHT_MAX] = Some(job);
        let place = self.sight.place(seq, job.outgoing_bytes());
        self.own().start(seq, &job, place);
        place != Place::Elsewhere
    }

    /// Whether a peer's bytes of a collective that it has started come by messages.
    pub fn needs_messages(&self, rank: usize, seq: u64) -> bool {
        self.sight
            .area(rank)
            .is_some_and(|area| area.posted(seq).place == Place::Elsewhere)
    }

    /// Waits until all peers have started a collective, and compares it with theirs.
    pub fn arrive(&self, seq: u64, until: Instant, fate: &impl Fate) -> Result<(), Stop> {
        let job = self.job(seq);
        self.wait_for_all(seq, &job, until, fate, |area| area.has_started(seq))?;
        let what = |posted: area::Posted| (posted.collective, posted.group, posted.len);
        let own = what(self.own().posted(seq));
        if self.peers(&job).any(|(_, a)| what(a.posted(seq)) != own) {
            return Err(Stop::Mismatch(self.difference(seq, &job)));
        }
        Ok(())
    }

    /// The job of a collective that has arrived, if bytes of a peer come by messages.
    pub fn hidden(&self, seq: u64) -> Option<Job> {
        let job = self.job(seq);
        let is_hidden = |(_, area): (usize, &Area)| area.posted(seq).place == Place::Elsewhere;
        self.peers(&job).any(is_hidden).then_some(job)
    }

    /// Copies the bytes of a collective that this rank sees, or adds them up. Its own chunk is one
    /// of them. The chunks of peers whose bytes it does not see are `messages`, by their places in
    /// the group.
    pub fn receive(&self, seq: u64, messages: &[u8], fate: &impl Fate) -> Result<(), Stop> {
        let job = self.job(seq);
        fate.begin_reading()?;
        let received = match job.collective {
            Collective::ReduceScatter => self.add(seq, &job, messages),
            _ => self.copy(seq, &job),
        };
        fate.end_reading();
        received.map_err(Stop::Failed)
    }

    /// Adds up the chunk of this rank of every rank's bytes, where they are.
    fn add(&self, seq: u64, job: &Job, messages: &[u8]) -> Result<(), String> {
        // No code panics while it holds the lock.
        let addends = self.addends.lock().unwrap_or_else(PoisonError::into_inner);
        let mut sum = || {
            let row = |place: usize| addends[place].load(Ordering::Relaxed).cast_const();
            // SAFETY: all ranks have started this collective with equal lengths, so that a chunk of
            // the destination's length is at each address, which stays valid and unwritten until
            // this rank has said that it has ended. Nothing else accesses the destination.
            unsafe { add_in_tree(job.group.size(), &row, job.destination, job.destination_len) };
        };
        self.with_addends(0, seq, job, messages, &addends, &mut sum)
    }

    /// Notes the addresses of the addends of the ranks from a place on, and calls `sum` while they
    /// are valid.
    fn with_addends(
        &self,
        at: usize,
        seq: u64,
        job: &Job,
        messages: &[u8],
        addends: &[AtomicPtr<u8>],
        sum: &mut dyn FnMut(),
    ) -> Result<(), String> {
        if at == job.group.size() {
            sum();
            return Ok(());
        }
        let len = job.destination_len;
        let mut rest = Ok(());
        let mut note = |address: *const u8| {
            addends[at].store(address.cast_mut(), Ordering::Relaxed);
            rest = self.with_addends(at + 1, seq, job, messages, addends, sum);
        };
        let rank = job.group.member(self.rank, at);
        let from = job.group.place_of(self.rank) * len;
        let area = self.sight.area(rank).ok_or("a rank is not near")?;
        let place = area.posted(seq).place;
        if rank == self.rank {
            note(job.source.wrapping_add(from));
        } else if place == Place::Elsewhere {
            let message = messages.get(at * len..(at + 1) * len);
            note(message.ok_or("a message is missing")?.as_ptr());
        } else {
            let end = from + len;
            let bytes = Posted {
                rank,
                seq,
                place,
                end,
            };
            let seen = self
                .sight
                .with_bytes(bytes, &mut |start| note(start.wrapping_add(from)));
            seen.map_err(|why| unseen(rank, &why))?;
        }
        rest
    }

    fn copy(&self, seq: u64, job: &Job) -> Result<(), String> {
        // SAFETY: the promise of `Engine::start`.
        unsafe { job.copy_own(self.rank) };
        for (sender, area) in self.peers(job) {
            let chunk = job.chunk(self.rank, sender);
            let (Some(chunk), place) = (chunk, area.posted(seq).place) else {
                continue;
            };
            if place == Place::Elsewhere || chunk.len == 0 {
                continue;
            }
            let mut read = |from: *const u8| {
                // SAFETY: all ranks that this one sees have started this collective with equal
                // lengths, so that the chunk lies in the source, at `from`, and in the destination.
                // A peer's source stays unwritten until this rank has said that it has ended.
                unsafe { copy_chunk(from, job.destination, chunk) };
            };
            let bytes = Posted {
                rank: sender,
                seq,
                place,
                end: chunk.from + chunk.len,
            };
            self.sight
                .with_bytes(bytes, &mut read)
                .map_err(|why| unseen(sender, &why))?;
        }
        Ok(())
    }

    /// Says that this rank has received all of its bytes, and waits until all peers have.
    pub fn finish(&self, seq: u64, until: Instant, fate: &impl Fate) -> Result<(), Stop> {
        self.own().end(seq);
        let job = self.job(seq);
        self.wait_for_all(seq, &job, until, fate, |area| area.has_ended(seq))
    }

    /// Waits until something is true of the areas of all peers of a collective.
    fn wait_for_all(
        &self,
        seq: u64,
        job: &Job,
        until: Instant,
        fate: &impl Fate,
        is_there: impl Fn(&Area) -> bool,
    ) -> Result<(), Stop> {
        let begun = Instant::now();
        for (rank, area) in self.peers(job) {
            loop {
                let bell = area.bell();
                if is_there(area) {
                    break;
                }
                if begun.elapsed() < SPIN {
                    std::hint::spin_loop();
                    continue;
                }
                let is_missing = |rank: usize| {
                    let is_peer = job.peers(self.rank).any(|peer| peer == rank);
                    let area = self.sight.area(rank).filter(|_| is_peer);
                    area.is_some_and(|area| !is_there(area))
                };
                if let Some(stop) = fate.verdict(seq, &is_missing) {
                    return Err(stop);
                }
                let now = Instant::now();
                if now >= until {
                    let (rank, step) = self.last(rank);
                    return Err(fate.late(rank, step, now - begun));
                }
                area.sleep(bell, NAP.min(until - now));
            }
        }
        Ok(())
    }

    /// The rank that has started the fewest collectives, and its step: one that is waited for may
    /// itself wait for a rank of another group. Of equals, the one that is waited for.
    fn last(&self, waited_for: usize) -> (usize, u64) {
        let others = (0..self.size).filter(|rank| *rank != self.rank);
        let seen = others.filter_map(|rank| Some((rank, self.sight.area(rank)?)));
        let last = seen.min_by_key(|(rank, area)| (area.started(), *rank != waited_for));
        last.map_or((waited_for, 0), |(rank, area)| (rank, area.step()))
    }

    /// The first difference between a collective of this rank and others, in words that are the
    /// same on all that see each other.
    fn difference(&self, seq: u64, job: &Job) -> String {
        let members = job.group.members(self.rank);
        let seen = members.filter_map(|rank| Some((rank, self.sight.area(rank)?)));
        let all: Vec<_> = seen
            .map(|(rank, area)| (rank, area.posted(seq)))
            .map(|(rank, posted)| (rank, posted.collective, posted.len, posted.group))
            .collect();
        let shown = |(rank, code, len, group): (usize, u64, u64, u64)| {
            let among = match group as u32 {
                1 => String::new(),
                stride => format!(" among {} ranks at a distance of {stride}", group >> 32),
            };
            format!(
                "{:?} of {len} bytes{among} on rank {rank}",
                collective(code)
            )
        };
        let other = all
            .iter()
            .find(|one| (one.1, one.2, one.3) != (all[0].1, all[0].2, all[0].3));
        let other = other.copied().unwrap_or(all[0]);
        format!("{}, {}", shown(all[0]), shown(other))
    }

    /// Notes the step that this rank is at.
    pub fn set_step(&self, step: u64) {
        self.own().set_step(step);
    }

    /// Whether a collective was started and has not ended.
    pub fn has_open(&self) -> bool {
        self.own().has_open()
    }
}
