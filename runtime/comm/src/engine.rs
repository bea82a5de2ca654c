//! Engines: they move bytes between ranks, and add only where they read peers' bytes in place.

use std::time::Instant;

use slabwise_kernels::collective::Group;
use slabwise_kernels::memory::Foreign;

/// A collective operation, in which every rank of a world takes part, each within its group.
///
/// In the table, `n` is the number of ranks of a group, which are counted by their places in it,
/// and `c` the bytes of a chunk.
///
/// | collective | source | destination |
/// |---|---|---|
/// | all-to-all | `n * c`: chunk `i` goes to rank `i` | `n * c`: chunk `i` comes from rank `i` |
/// | all-gather | `c` | `n * c`: chunk `i` comes from rank `i` |
/// | reduce-scatter | `n * c`: chunk `i` goes to rank `i` | `c`: the sum of a chunk of every rank |
/// | broadcast | none | `c`, read on the root and written on the others |
/// | shift | `c`, goes to rank `(rank + by) % n` | `c`, comes from rank `(rank - by) % n` |
/// | barrier | none | none |
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Collective {
    /// Exchanges chunks between all ranks of a group.
    AllToAll,
    /// Concatenates the chunks of all ranks on each of them.
    AllGather,
    /// Adds up chunks of f32 [in a tree](slabwise_kernels::tree_sum::add_in_tree) over the ranks,
    /// which must read each other's memory in place ([`World::sums_in_place`]).
    ///
    /// [`World::sums_in_place`]: crate::World::sums_in_place
    ReduceScatter,
    /// Copies the root's bytes to all others.
    Broadcast {
        /// The rank whose bytes are copied.
        root: usize,
    },
    /// Sends to the rank at a fixed distance, cyclically.
    Shift {
        /// The distance; negative values go to lower ranks.
        by: isize,
    },
    /// Waits until all ranks have started it.
    Barrier,
}

/// The bytes that one rank receives from another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Chunk {
    /// The offset in the sender's source.
    pub from: usize,
    /// The offset in the receiver's destination.
    pub to: usize,
    /// The number of bytes.
    pub len: usize,
}

impl Collective {
    /// The chunk that the rank at place `receiver` gets from that at place `sender`; `None` if
    /// there is no message between them. A chunk of 0 bytes is a message too. Bytes that a rank
    /// sends to itself are copied.
    pub(crate) fn chunk(
        self,
        receiver: usize,
        sender: usize,
        size: usize,
        destination: usize,
    ) -> Option<Chunk> {
        let each = destination / size;
        let whole = Chunk {
            from: 0,
            to: 0,
            len: destination,
        };
        match self {
            Collective::AllToAll => Some(Chunk {
                from: receiver * each,
                to: sender * each,
                len: each,
            }),
            Collective::AllGather => Some(Chunk {
                from: 0,
                to: sender * each,
                len: each,
            }),
            Collective::ReduceScatter => Some(Chunk {
                from: receiver * destination,
                ..whole
            }),
            Collective::Broadcast { root } => (sender == root && receiver != root).then_some(whole),
            Collective::Shift { by } => {
                let by = by.rem_euclid(size as isize) as usize;
                ((sender + by) % size == receiver).then_some(whole)
            }
            Collective::Barrier => Some(whole),
        }
    }

    /// The first disagreement of the regions' lengths with the table of [`Collective`].
    pub(crate) fn check(
        self,
        size: usize,
        source: usize,
        destination: usize,
    ) -> Result<(), String> {
        let is_right = match self {
            Collective::AllToAll => source == destination && source.is_multiple_of(size),
            Collective::AllGather => source.checked_mul(size) == Some(destination),
            Collective::ReduceScatter => {
                destination.checked_mul(size) == Some(source)
                    && destination.is_multiple_of(size_of::<f32>())
            }
            Collective::Broadcast { root } if root >= size => {
                return Err(format!("broadcast from rank {root} of {size}"));
            }
            Collective::Broadcast { .. } => source == 0,
            Collective::Shift { .. } => source == destination,
            Collective::Barrier => source == 0 && destination == 0,
        };
        if is_right {
            return Ok(());
        }
        let rule = match self {
            Collective::AllToAll => "as many, in equal chunks for each rank",
            Collective::AllGather => "one chunk of the source's length for each rank",
            Collective::ReduceScatter => "the length of one of equal chunks of f32 for each rank",
            Collective::Broadcast { .. } => "no source, since the root's bytes are its destination",
            Collective::Shift { .. } => "as many",
            Collective::Barrier => "no bytes",
        };
        Err(format!(
            "{} of {source} bytes into {destination} over {size} ranks: it needs {rule}",
            self.name()
        ))
    }

    /// Its name in texts.
    pub fn name(self) -> &'static str {
        match self {
            Collective::AllToAll => "all-to-all",
            Collective::AllGather => "all-gather",
            Collective::ReduceScatter => "reduce-scatter",
            Collective::Broadcast { .. } => "broadcast",
            Collective::Shift { .. } => "shift",
            Collective::Barrier => "barrier",
        }
    }
}

/// A collective with its regions on one rank.
#[derive(Clone, Copy, Debug)]
pub struct Job {
    /// The collective.
    pub collective: Collective,
    /// The ranks between which bytes move.
    pub group: Group,
    /// The start of the source.
    pub source: *const u8,
    /// The bytes of the source.
    pub source_len: usize,
    /// The start of the destination.
    pub destination: *mut u8,
    /// The bytes of the destination.
    pub destination_len: usize,
}

// SAFETY: a job is two regions and their lengths. Whoever starts it promises that both stay valid,
// and may be used from other threads, until it has ended (see `Engine::start`).
unsafe impl Send for Job {}

impl Job {
    /// The bytes from which peers receive.
    pub(crate) fn outgoing(&self) -> *const u8 {
        self.outgoing_bytes().0
    }

    /// The region from which peers receive.
    pub(crate) fn outgoing_bytes(&self) -> (*const u8, usize) {
        match self.collective {
            Collective::Broadcast { .. } => (self.destination, self.destination_len),
            _ => (self.source, self.source_len),
        }
    }

    /// The chunk that a rank gets from another one of its group.
    pub(crate) fn chunk(&self, receiver: usize, sender: usize) -> Option<Chunk> {
        let [to, from] = [receiver, sender].map(|rank| self.group.place_of(rank));
        let size = self.group.size();
        self.collective.chunk(to, from, size, self.destination_len)
    }

    /// The ranks other than this one that it exchanges bytes with, from the next place on.
    pub(crate) fn peers(&self, rank: usize) -> impl Iterator<Item = usize> + Clone + use<> {
        let (group, size) = (self.group, self.group.size());
        let own = group.place_of(rank);
        (1..size).map(move |i| group.member(rank, (own + i) % size))
    }

    /// Copies the chunk that this rank sends to itself, if there is one. A chunk that is in place
    /// already is not copied.
    ///
    /// # Safety
    /// As for [`Engine::start`].
    pub(crate) unsafe fn copy_own(&self, rank: usize) {
        if let Some(chunk) = self.chunk(rank, rank) {
            // SAFETY: the caller's promise: both regions are valid for their lengths, in which the
            // chunk lies because `Collective::check` accepted them.
            unsafe { copy_chunk(self.outgoing(), self.destination, chunk) };
        }
    }
}

/// Copies a chunk from a source to a destination, unless it is in place.
///
/// # Safety
/// The chunk lies in both regions, which are valid and not written by others at the same time.
pub(crate) unsafe fn copy_chunk(source: *const u8, destination: *mut u8, chunk: Chunk) {
    if chunk.len == 0 {
        return;
    }
    // SAFETY: the offsets lie in the regions, by the caller's promise.
    let (from, to) = unsafe { (source.add(chunk.from), destination.add(chunk.to)) };
    if !std::ptr::eq(from, to) {
        // SAFETY: both are valid for the chunk's length; `copy` permits overlaps.
        unsafe { std::ptr::copy(from, to, chunk.len) };
    }
}

/// Runs a collective over copies of the regions, which an engine that abandons them may keep after
/// an error.
pub(crate) fn with_copies<E>(
    (collective, group): (Collective, Group),
    source: &[u8],
    destination: &mut [u8],
    abandons: bool,
    run: impl FnOnce(Job) -> Result<(), E>,
) -> Result<(), E> {
    let source = source.to_vec();
    let mut copy = destination.to_vec();
    let ended = run(Job {
        collective,
        group,
        source: source.as_ptr(),
        source_len: source.len(),
        destination: copy.as_mut_ptr(),
        destination_len: copy.len(),
    });
    match ended {
        Ok(()) => destination.copy_from_slice(&copy),
        Err(_) if abandons => std::mem::forget((source, copy)),
        Err(_) => {}
    }
    ended
}

/// The reason why a collective ends without success. The world cannot be used afterwards.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stop {
    /// A rank is lost, and `why` completes "rank 3 …".
    Lost {
        /// The rank.
        rank: usize,
        /// How it was lost.
        why: String,
    },
    /// Ranks started different collectives.
    Mismatch(String),
    /// The engine failed.
    Failed(String),
}

/// The most collectives that a rank may have started since the first one that is in flight.
pub const IN_FLIGHT_MAX: usize = 64;

/// Moves bytes between the ranks of a world. All ranks start the same collectives in the same
/// order, numbered from 0; one waits for the ranks of its group alone.
pub trait Engine: Send + Sync {
    /// The engine's name and version.
    fn name(&self) -> String;

    /// Starts collective number `seq`, and returns at once.
    ///
    /// # Safety
    /// The groups divide the world, and the lengths agree with [`Collective`]'s table. Until
    /// [`Engine::wait`] has returned `Ok` for `seq`, both regions stay valid, the source is not
    /// written, and the destination is neither read nor written. They do not overlap, except that
    /// the source of an all-gather may be its own chunk of the destination. After an `Err` they
    /// stay valid for the rest of the process if [`Engine::abandons`] says so.
    unsafe fn start(&self, seq: u64, job: Job) -> Result<(), Stop>;

    /// Waits until collective `seq` has ended: this rank's destination is complete, and its source
    /// may be written, since no peer reads it any more.
    ///
    /// # Errors
    /// If a rank is lost, or does not arrive until `until`. Then all other ranks are told.
    fn wait(&self, seq: u64, until: Instant) -> Result<(), Stop>;

    /// Whether regions may still be accessed after an error, by a thread that was abandoned.
    fn abandons(&self) -> bool;

    /// Notes the step that this rank is at, for the reports of others.
    fn set_step(&self, step: u64);

    /// Memory of this rank that others read in place; `None` if there are none for which it would
    /// be of use, or the system has no such memory.
    fn arena(&self, _bytes: usize) -> Option<Foreign> {
        None
    }

    /// The number of threads that each rank can use while all others do too, if each is to have a
    /// core. The same on all of them.
    fn threads(&self) -> usize;

    /// Whether all ranks read each other's memory in place, so that they can add from there. The
    /// same on all of them.
    fn sums_in_place(&self) -> bool {
        false
    }

    /// The bytes that this rank has sent by messages so far, as opposed to those that peers have
    /// read in place.
    fn message_bytes(&self) -> u64 {
        0
    }

    /// Leaves the world. `is_lost` says that a wait has failed.
    fn close(&self, is_lost: bool);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_that_do_not_fit_are_refused() {
        let told = |m: Collective, source, destination| m.check(3, source, destination).err();
        assert_eq!(told(Collective::AllToAll, 6, 6), None);
        assert_eq!(told(Collective::AllGather, 0, 0), None);
        assert_eq!(told(Collective::Broadcast { root: 2 }, 0, 5), None);
        assert!(told(Collective::AllToAll, 7, 7).is_some_and(|t| t.contains("equal chunks")));
        assert!(told(Collective::AllGather, 2, 5).is_some_and(|t| t.contains("2 bytes into 5")));
        assert!(told(Collective::AllGather, usize::MAX, 3).is_some());
        assert!(
            told(Collective::Broadcast { root: 3 }, 0, 5).is_some_and(|t| t.contains("rank 3"))
        );
        assert!(told(Collective::Shift { by: 1 }, 1, 2).is_some());
        assert!(told(Collective::Barrier, 1, 1).is_some());
    }

    #[test]
    fn shifts_wrap_around_in_both_directions() {
        for by in [-4, -3, -1, 0, 1, 2, 7] {
            for sender in 0..3 {
                let receivers: Vec<usize> = (0..3)
                    .filter(|r| Collective::Shift { by }.chunk(*r, sender, 3, 8).is_some())
                    .collect();
                assert_eq!(receivers, [(sender as isize + by).rem_euclid(3) as usize]);
            }
        }
    }
}
