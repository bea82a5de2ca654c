//! Worlds: ranks, and the collectives between them.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use slabwise_kernels::collective::Group;
use slabwise_kernels::memory::Foreign;

use crate::engine::{Collective, Engine, IN_FLIGHT_MAX, Job, Stop, with_copies};
use crate::launcher::{Launcher, launcher};
use crate::near::Local;
use crate::{Error, Result, error, mpi};

/// A rank's membership in a group of processes, or threads, that run one program.
///
/// All ranks call the same collectives in the same order. Clones are the same membership; the rank
/// leaves when the last one is dropped.
///
/// ```
/// let ranks = slabwise_comm::World::local(2);
/// std::thread::scope(|scope| {
///     for world in ranks {
///         scope.spawn(move || {
///             let mut all = [0; 2];
///             world.all_gather("ids", &[world.rank() as u8], &mut all)?;
///             assert_eq!(all, [0, 1]);
///             Ok::<(), slabwise_comm::Error>(())
///         });
///     }
/// });
/// ```
#[derive(Clone)]
pub struct World(pub(crate) Arc<Inner>);

pub(crate) struct Inner {
    engine: Box<dyn Engine>,
    rank: usize,
    size: usize,
    patience: AtomicU64,
    sequence: Mutex<Sequence>,
    /// The header of this rank, then those of all, so that a step allocates nothing.
    pub(crate) headers: Mutex<Vec<u8>>,
    sent: [Counter; Kind::ALL.len()],
}

/// The position of a rank in its program.
#[derive(Default)]
struct Sequence {
    /// The number of the next collective.
    next: u64,
    /// The collectives that are not finished: number `seq` is bit `seq % IN_FLIGHT_MAX`.
    in_flight: u64,
    step: u64,
    /// The number of the step's first collective.
    first: u64,
    /// The error that ended the world.
    lost: Option<Error>,
}

#[derive(Default)]
struct Counter {
    collectives: AtomicU64,
    bytes: AtomicU64,
}

/// A class of traffic that is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Exchanges of chunks.
    AllToAll,
    /// Concatenations of chunks.
    AllGather,
    /// Sums of chunks.
    ReduceScatter,
    /// Copies from one rank to all others.
    Broadcast,
    /// Cyclic sends.
    Shift,
    /// Small messages of the runtime: headers, agreements, barriers.
    Control,
}

impl Kind {
    /// All kinds.
    pub const ALL: [Kind; 6] = [
        Kind::AllToAll,
        Kind::AllGather,
        Kind::ReduceScatter,
        Kind::Broadcast,
        Kind::Shift,
        Kind::Control,
    ];

    fn of(collective: Collective) -> Kind {
        match collective {
            Collective::AllToAll => Kind::AllToAll,
            Collective::AllGather => Kind::AllGather,
            Collective::ReduceScatter => Kind::ReduceScatter,
            Collective::Broadcast { .. } => Kind::Broadcast,
            Collective::Shift { .. } => Kind::Shift,
            Collective::Barrier => Kind::Control,
        }
    }
}

/// Traffic of one kind that a rank has sent, without messages of the lifeline.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sent {
    /// The number of collectives started.
    pub collectives: u64,
    /// The bytes sent to other ranks.
    pub bytes: u64,
}

/// A collective in flight, to be given to [`World::finish`].
#[derive(Debug)]
#[must_use = "a collective ends in `World::finish`"]
pub struct Ticket {
    pub(crate) seq: u64,
    pub(crate) step: u64,
    pub(crate) collective: u64,
}

impl World {
    /// The world of one rank.
    pub fn alone() -> World {
        World::local(1).remove(0)
    }

    /// A world of ranks that are threads of this process: one element for each, by rank. It is
    /// empty for a size of 0.
    pub fn local(size: usize) -> Vec<World> {
        let ends = Local::world(size).into_iter().enumerate();
        ends.map(|(rank, end)| World::over(Box::new(end), (rank, size), error::PATIENCE, 0))
            .collect()
    }

    /// The world that a launcher has started: that of MPI's or SLURM's variables, or of one rank if
    /// there are none. Later calls return the same membership.
    ///
    /// # Errors
    /// If MPI is not found, is another one than the launcher's, or cannot connect the ranks; if the
    /// variables contradict each other, or are those of torchrun.
    pub fn join() -> Result<World> {
        static JOINED: Mutex<Option<Weak<Inner>>> = Mutex::new(None);
        let lookup = |name: &str| std::env::var(name).ok();
        let (patience, near) = (error::patience(&lookup)?, error::near(&lookup)?);
        let (family, place, variable) = match launcher(&lookup)? {
            Launcher::None => return Ok(World::alone().with_patience(patience)),
            Launcher::Torchrun(place) if place.size == 1 => {
                return Ok(World::alone().with_patience(patience));
            }
            Launcher::Torchrun(place) => {
                return Err(Error::Join(format!(
                    "this is rank {} of {} of torchrun's variables, but ranks on CPUs talk through \
                     MPI: start them with mpiexec, srun or slabwise launch",
                    place.rank, place.size
                )));
            }
            Launcher::Mpi {
                family,
                place,
                variable,
            } => (family, place, variable),
        };
        let mut joined = JOINED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(joined) = &*joined {
            return joined.upgrade().map(World).ok_or_else(|| {
                Error::Join("this process has left its world, and MPI starts only once".into())
            });
        }
        let mpi = mpi::join(family, place, variable, (patience, near))?;
        let place = (mpi.rank, mpi.size);
        let next = if mpi.size > 1 { mpi::JOINING } else { 0 };
        let world = World::over(Box::new(mpi), place, patience, next);
        *joined = Some(Arc::downgrade(&world.0));
        Ok(world)
    }

    pub(crate) fn over(
        engine: Box<dyn Engine>,
        (rank, size): (usize, usize),
        patience: Duration,
        next: u64,
    ) -> World {
        World(Arc::new(Inner {
            engine,
            rank,
            size,
            patience: AtomicU64::new(nanoseconds(patience)),
            sequence: Mutex::new(Sequence {
                next,
                first: next,
                ..Sequence::default()
            }),
            headers: Mutex::default(),
            sent: Default::default(),
        }))
    }

    /// This rank, from 0.
    pub fn rank(&self) -> usize {
        self.0.rank
    }

    /// The number of ranks.
    pub fn size(&self) -> usize {
        self.0.size
    }

    /// Whether this is rank 0, which prints.
    pub fn leads(&self) -> bool {
        self.0.rank == 0
    }

    /// The name of the engine that moves bytes.
    pub fn engine(&self) -> String {
        self.0.engine.name()
    }

    /// Sets the longest time that a collective waits for a rank. The default is 300 s, or the
    /// seconds in `SLABWISE_PATIENCE`.
    #[must_use]
    pub fn with_patience(self, patience: Duration) -> World {
        self.0
            .patience
            .store(nanoseconds(patience), Ordering::Relaxed);
        self
    }

    /// Notes that a step begins: errors and heartbeats name it, and the collectives in it are
    /// numbered from 0.
    pub fn begin_step(&self, step: u64) {
        let mut sequence = self.sequence();
        sequence.step = step;
        sequence.first = sequence.next;
        drop(sequence);
        self.0.engine.set_step(step);
    }

    /// The traffic that this rank has sent.
    pub fn sent(&self, kind: Kind) -> Sent {
        let counter = &self.0.sent[kind as usize];
        Sent {
            collectives: counter.collectives.load(Ordering::Relaxed),
            bytes: counter.bytes.load(Ordering::Relaxed),
        }
    }

    /// The error that ended the world; `None` while it works.
    pub fn lost(&self) -> Option<Error> {
        self.sequence().lost.clone()
    }

    /// Starts a collective over regions of the caller's, and returns at once. It copies nothing but
    /// the chunk that a rank sends to itself, and allocates nothing. [`World::finish`] ends it; the
    /// collectives in flight may be finished in any order that is the same on all ranks.
    ///
    /// # Errors
    /// If the lengths do not fit [`Collective`]'s table, [`IN_FLIGHT_MAX`] collectives have been
    /// started since one that is not finished, or the world is lost.
    ///
    /// # Safety
    /// Until [`World::finish`] has returned `Ok`, both regions stay valid, the source is not
    /// written, and the destination is neither read nor written. They do not overlap, except that
    /// the source of an all-gather may be its own chunk of the destination. If it returns an `Err`
    /// or is not called, the same holds for the rest of the process, because a thread that waits
    /// in a foreign library may still access them; [`World::abandons`] says whether one may.
    pub unsafe fn start(
        &self,
        name: &str,
        collective: Collective,
        source: *const [u8],
        destination: *mut [u8],
    ) -> Result<Ticket> {
        // SAFETY: the caller promises as much.
        unsafe { self.start_in(self.all(), name, collective, source, destination) }
    }

    /// Like [`World::start`], between the ranks of each group.
    ///
    /// # Errors
    /// Those of [`World::start`], or if groups of so many ranks do not divide the world.
    ///
    /// # Safety
    /// As for [`World::start`].
    pub unsafe fn start_in(
        &self,
        group: Group,
        name: &str,
        collective: Collective,
        source: *const [u8],
        destination: *mut [u8],
    ) -> Result<Ticket> {
        let job = Job {
            collective,
            group,
            source: source.cast(),
            source_len: source.len(),
            destination: destination.cast(),
            destination_len: destination.len(),
        };
        // SAFETY: the caller promises as much.
        unsafe { self.start_job(name, job, None) }
    }

    /// Memory of zeros whose bytes the other ranks of this machine read in place when a collective
    /// sends them; nothing is copied on the way. `None` if they see all of this rank's memory
    /// anyway or none of it, or the system has no such memory: collectives work from any memory.
    pub fn arena(&self, bytes: usize) -> Option<Foreign> {
        self.0.engine.arena(bytes)
    }

    /// The bytes that this rank has sent by messages so far, as opposed to those that ranks of its
    /// machine have read in place. It counts those of joining too.
    pub fn message_bytes(&self) -> u64 {
        self.0.engine.message_bytes()
    }

    /// The number of threads that each rank can use while all others do too, if each is to have a
    /// core: ranks that may run on the same cores share them. The same on all ranks, because plans
    /// depend on it.
    pub fn threads(&self) -> usize {
        self.0.engine.threads()
    }

    /// Whether all ranks read each other's memory in place, so that [`Collective::ReduceScatter`]
    /// is possible. The same on all of them.
    pub fn sums_in_place(&self) -> bool {
        self.0.engine.sums_in_place()
    }

    /// Whether the regions of a collective that failed may still be accessed, and must stay valid
    /// for the rest of the process.
    pub fn abandons(&self) -> bool {
        self.0.engine.abandons()
    }

    /// Starts a collective. Its bytes are counted as of `kind`; without one, as the collective's
    /// own kind.
    ///
    /// # Safety
    /// As for [`World::start`].
    pub(crate) unsafe fn start_job(
        &self,
        name: &str,
        job: Job,
        kind: Option<Kind>,
    ) -> Result<Ticket> {
        if !job.group.divides(self.size()) {
            return Err(Error::Size(format!(
                "\"{name}\": groups of {} in a world of {}",
                job.group,
                self.size()
            )));
        }
        let check = job
            .collective
            .check(job.group.size(), job.source_len, job.destination_len);
        check.map_err(|why| Error::Size(format!("\"{name}\": {why}")))?;
        if job.collective == Collective::ReduceScatter && !self.sums_in_place() {
            return Err(Error::Size(format!(
                "\"{name}\": a reduce-scatter among ranks that do not read each other's memory in \
                 place; use all-to-all, and add up"
            )));
        }
        let mut sequence = self.sequence();
        if let Some(lost) = &sequence.lost {
            return Err(lost.clone());
        }
        let slot = 1 << (sequence.next % IN_FLIGHT_MAX as u64);
        if sequence.in_flight & slot != 0 {
            return Err(Error::Size(format!(
                "\"{name}\" is the {IN_FLIGHT_MAX}th collective after one that is not finished: \
                 finish that one first"
            )));
        }
        let ticket = Ticket {
            seq: sequence.next,
            step: sequence.step,
            collective: sequence.next - sequence.first,
        };
        // SAFETY: the lengths fit, and the caller promises the rest.
        let started = unsafe { self.0.engine.start(ticket.seq, job) };
        if let Err(stop) = started {
            return Err(self.lose(sequence, &ticket, name, stop));
        }
        sequence.next += 1;
        sequence.in_flight |= slot;
        drop(sequence);
        let counter = &self.0.sent[kind.unwrap_or(Kind::of(job.collective)) as usize];
        let bytes = job
            .peers(self.rank())
            .filter_map(|peer| job.chunk(peer, self.rank()))
            .map(|chunk| chunk.len as u64);
        counter.collectives.fetch_add(1, Ordering::Relaxed);
        counter.bytes.fetch_add(bytes.sum(), Ordering::Relaxed);
        Ok(ticket)
    }

    /// Waits until a collective has ended: the destination is complete, and no peer reads the
    /// source any more.
    ///
    /// # Errors
    /// If a rank is lost or does not arrive in time. The world cannot be used afterwards.
    pub fn finish(&self, ticket: Ticket, name: &str) -> Result<()> {
        let patience = Duration::from_nanos(self.0.patience.load(Ordering::Relaxed));
        let now = Instant::now();
        // A time that cannot be represented is as good as for ever: a year.
        let until = now
            .checked_add(patience)
            .unwrap_or(now + Duration::from_secs(31_536_000));
        let waited = self.0.engine.wait(ticket.seq, until);
        let mut sequence = self.sequence();
        match waited {
            Ok(()) => {
                sequence.in_flight &= !(1 << (ticket.seq % IN_FLIGHT_MAX as u64));
                Ok(())
            }
            Err(stop) => Err(self.lose(sequence, &ticket, name, stop)),
        }
    }

    /// Exchanges equal chunks: chunk `i` of `source` goes to rank `i`, and chunk `i` of
    /// `destination` comes from rank `i`.
    ///
    /// # Errors
    /// If the lengths differ or the number of ranks does not divide them, or a rank is lost.
    pub fn all_to_all(&self, name: &str, source: &[u8], destination: &mut [u8]) -> Result<()> {
        self.run_in(self.all(), name, Collective::AllToAll, source, destination)
    }

    /// Concatenates the sources of all ranks, by rank, on each of them.
    ///
    /// # Errors
    /// If the destination is not as long as all sources together, or a rank is lost.
    pub fn all_gather(&self, name: &str, source: &[u8], destination: &mut [u8]) -> Result<()> {
        self.run_in(self.all(), name, Collective::AllGather, source, destination)
    }

    /// Adds up f32 of all ranks: on rank `i` chunk `i` of the sources, in a tree over the ranks.
    ///
    /// # Errors
    /// If the source is not as long as a destination for each rank, the ranks do not read each
    /// other's memory ([`World::sums_in_place`]), or one is lost.
    pub fn reduce_scatter(&self, name: &str, source: &[u8], destination: &mut [u8]) -> Result<()> {
        self.run_in(
            self.all(),
            name,
            Collective::ReduceScatter,
            source,
            destination,
        )
    }

    /// Copies the root's bytes to all other ranks.
    ///
    /// # Errors
    /// If there is no such rank, or a rank is lost.
    pub fn broadcast(&self, name: &str, root: usize, bytes: &mut [u8]) -> Result<()> {
        self.run_in(self.all(), name, Collective::Broadcast { root }, &[], bytes)
    }

    /// Sends to the rank at a distance, cyclically, and receives from the one at the same distance
    /// on the other side.
    ///
    /// # Errors
    /// If the lengths differ, or a rank is lost.
    pub fn shift(
        &self,
        name: &str,
        by: isize,
        source: &[u8],
        destination: &mut [u8],
    ) -> Result<()> {
        self.run_in(
            self.all(),
            name,
            Collective::Shift { by },
            source,
            destination,
        )
    }

    /// Waits until all ranks are here.
    ///
    /// # Errors
    /// If a rank is lost.
    pub fn barrier(&self, name: &str) -> Result<()> {
        self.run_in(self.all(), name, Collective::Barrier, &[], &mut [])
    }

    /// Runs a collective between the ranks of each group.
    ///
    /// # Errors
    /// Those of [`World::start_in`], or if a rank is lost.
    pub fn run_in(
        &self,
        group: Group,
        name: &str,
        collective: Collective,
        source: &[u8],
        destination: &mut [u8],
    ) -> Result<()> {
        self.run((collective, group), name, source, destination, None)
    }

    /// The group of all ranks.
    pub(crate) fn all(&self) -> Group {
        Group::all(self.size() as u32)
    }

    /// Runs a collective over copies of the regions, which an engine may keep after an error.
    pub(crate) fn run(
        &self,
        collective: (Collective, Group),
        name: &str,
        source: &[u8],
        destination: &mut [u8],
        kind: Option<Kind>,
    ) -> Result<()> {
        with_copies(collective, source, destination, self.abandons(), |job| {
            // SAFETY: both regions live until the collective has ended, and nothing else accesses
            // them; after an error they are never freed if the engine may still use them.
            let ticket = unsafe { self.start_job(name, job, kind) }?;
            self.finish(ticket, name)
        })
    }

    fn sequence(&self) -> MutexGuard<'_, Sequence> {
        // No code panics while it holds the lock.
        self.0
            .sequence
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the world with an error, unless an earlier one has.
    fn lose(
        &self,
        mut sequence: MutexGuard<'_, Sequence>,
        ticket: &Ticket,
        name: &str,
        stop: Stop,
    ) -> Error {
        let name = name.to_string();
        let Ticket {
            step, collective, ..
        } = *ticket;
        let error = match stop {
            Stop::Lost { rank, why } => Error::Peer {
                rank,
                size: self.size(),
                step,
                collective,
                name,
                why,
            },
            Stop::Mismatch(why) => Error::Mismatch { name, why },
            Stop::Failed(why) => Error::Engine {
                step,
                collective,
                name,
                why,
            },
        };
        sequence.lost.get_or_insert(error).clone()
    }
}

impl std::fmt::Debug for World {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "rank {} of {} ({})",
            self.rank(),
            self.size(),
            self.engine()
        )
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let sequence = self
            .sequence
            .get_mut()
            .unwrap_or_else(PoisonError::into_inner);
        self.engine.close(sequence.lost.is_some());
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
