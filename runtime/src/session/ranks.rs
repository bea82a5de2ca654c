//! Sessions of a world: the ranks agree on a program when it is compiled, and synchronize in each
//! run.
//!
//! When a program that exchanges bytes is compiled, the ranks synchronize twice, when the program
//! is known and when it can run, so that an error of one rank becomes an error of all.
//!
//! In a run they synchronize once, before its first collective. All checks of data come before
//! that, and no weight is written before the sums of all ranks are there, so a fault on one rank
//! ends the run on every rank and changes nothing on any. The search for NaN finds faults after that
//! too; then they synchronize once more, at the end.

use std::hash::{DefaultHasher, Hash, Hasher};

use slabwise_kernels::cpu::Team;

use super::Session;
use crate::compile::CompiledPlan;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::program::Compiled;
use crate::world::World;

/// The graph and the kernels of a program, as text. That of the graph has all constants.
type Views = [String; 2];

/// The name of the seed of the parameters, which ranks compare beside views of the program.
const SEED: &str = "seed";

/// Whether the ranks have synchronized in a run, or in the compilation of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RankSync {
    /// Not yet.
    Pending,
    /// They have, and all of them go on.
    Done,
    /// They have, and none goes on.
    Failed,
}

impl Session {
    /// Joins a world, in which the programs of this session run on several ranks. Each rank makes
    /// the same calls: it compiles the same programs, and runs them in the same order, each on its
    /// own rows of the batch. Unless the number of threads is set, kernels of a rank use as many
    /// threads as give each thread of all ranks a core.
    ///
    /// [`Trace::minimize`](crate::Trace::minimize) then takes the step of the whole batch: each
    /// rank's loss is weighted by its number of examples, which is the length of the first input,
    /// and gradients are summed over all ranks. Batch norms use the statistics of a rank's own
    /// part. The random numbers of a training step differ between ranks; those of a user's
    /// [key](crate::Trace::key) and of an inference trace are the same.
    ///
    /// On a [mesh](crate::Mesh) the ranks along its data axis share the batch, and the others have
    /// the same rows: the step is that of a world of the data axis's size, bit-exact if it has the
    /// same [grains](World::with_grains) and exchanges nothing along other axes. If it does, a
    /// weight's gradient is the mean of the gradients of the ranks along these axes, each taken of
    /// the sum of the losses of these ranks; the loss must be the same along them.
    ///
    /// ```
    /// # use slabwise::prelude::*;
    /// # use slabwise::{nn::Linear, optim::Sgd, World};
    /// let worlds = World::local(2)?;
    /// std::thread::scope(|threads| {
    ///     for world in worlds {
    ///         threads.spawn(move || -> slabwise::Result<()> {
    ///             let params = Params::seeded(0);
    ///             let layer = Linear::new(&params.root() / "layer", 2, 1);
    ///             let mut session = Session::new(Device::Cpu, params)?.on(world.clone())?;
    ///             let trace = Trace::training();
    ///             let x = trace.input("x", F32, (Dim::bounded("batch", 8), 2));
    ///             let loss = x.apply(&layer).square().mean();
    ///             trace.minimize(loss, Sgd::new(0.1));
    ///             let step = session.compile(&trace, [loss])?;
    ///             let own = ndarray::Array2::<f32>::ones((world.share(7).len(), 2));
    ///             session.run(&step, &own)?;
    ///             Ok(())
    ///         });
    ///     }
    /// });
    /// # Ok::<(), slabwise::Error>(())
    /// ```
    ///
    /// # Errors
    /// If programs were compiled before, or on a device other than the CPU in a world of several
    /// ranks.
    pub fn on(mut self, world: impl Into<World>) -> Result<Self> {
        let world = world.into();
        if !self.variables.list.is_empty() {
            return Err(Error::Value(
                "the session has compiled a program or loaded weights already; join a world before that".into(),
            ));
        }
        if world.ranks() > 1 && self.device != Device::Cpu {
            return Err(Error::Value(format!(
                "ranks exchange bytes on the CPU only; the session is on {}",
                self.device
            )));
        }
        if let Some(threads) = world.threads().filter(|_| !self.execution.has_own_threads) {
            self.execution.team = Team::new(threads.clamp(1, 1024));
        }
        self.variables.params.set_distribution(world.distribution());
        self.world = world;
        Ok(self)
    }

    /// The world that the session is in.
    pub fn world(&self) -> &World {
        &self.world
    }

    /// A compiled program as ranks show it to each other; `None` if there is one rank.
    pub(super) fn shown(&self, compiled: &CompiledPlan) -> Option<Views> {
        let program = compiled.program();
        (self.world.ranks() > 1).then(|| [program.graph.in_full(), program.to_string()])
    }

    /// Compiles a program, which the other ranks compile too if it may exchange bytes: an error of
    /// one rank is reported on all.
    pub(super) fn compile_with_ranks<R>(
        &mut self,
        name: &str,
        exchanges: bool,
        compile: impl FnOnce(&mut Session) -> Result<R>,
    ) -> Result<R> {
        self.execution.rank_sync = RankSync::Pending;
        let (first, shared) = (self.variables.list.len(), self.variables.shared.clone());
        let budget = self.memory.budget;
        let compiled = compile(self);
        let told = match self.execution.rank_sync {
            RankSync::Pending if !exchanges => Ok(()),
            RankSync::Pending | RankSync::Done => {
                self.exchange_errors(name, compiled.as_ref().err())
            }
            RankSync::Failed => Ok(()),
        };
        let compiled = compiled.and_then(|compiled| told.map(|()| compiled));
        if compiled.is_err() {
            self.variables.forget(first, &mut *self.memory.backend);
            self.variables.shared = shared;
            self.memory.budget = budget;
        }
        compiled
    }

    /// Shows the other ranks this one's error in the compilation of a program; the error that ends
    /// it on all of them, if there is one.
    fn exchange_errors(&self, name: &str, own: Option<&Error>) -> Result<()> {
        if self.world.ranks() == 1 {
            return Ok(());
        }
        let own = own.map_or(String::new(), Error::to_string);
        let all = self.world.gather(own.as_bytes())?;
        let Some(rank) = all.iter().position(|message| !message.is_empty()) else {
            return Ok(());
        };
        Err(Error::Peer(format!(
            "rank {rank} of {} has failed to compile \"{name}\": {}",
            self.world.ranks(),
            String::from_utf8_lossy(&all[rank])
        )))
    }

    /// Lets every rank show the program that it has compiled, and refuses different ones; the number
    /// by which they know it, if it exchanges anything.
    pub(super) fn agree(
        &mut self,
        compiled: &Compiled,
        shown: Option<Views>,
    ) -> Result<Option<u64>> {
        let Some(views) = shown.filter(|_| compiled.exchanges()) else {
            return Ok(None);
        };
        self.execution.rank_sync = RankSync::Failed;
        self.exchange_errors(&compiled.name, None)?;
        let agreed = self.agree_on(compiled, views)?;
        self.execution.rank_sync = RankSync::Done;
        Ok(Some(agreed))
    }

    /// Refuses programs that differ between ranks; the number of one that does not.
    fn agree_on(&self, compiled: &Compiled, [graph, kernels]: Views) -> Result<u64> {
        let plan = compiled.plan.offsets();
        let views = [
            (SEED, self.variables.params.seed().to_string()),
            ("search for NaN", format!("{:?}", self.execution.nan_check)),
            ("graph", graph),
            ("kernels", kernels),
            ("plan", format!("{:?} {:?}", plan.order, plan.offsets)),
        ];
        let mut all = DefaultHasher::new();
        views.hash(&mut all);
        let hashes = views
            .each_ref()
            .map(|(_, text)| hash_of(text).to_le_bytes());
        let facts = views.iter().zip(&hashes);
        let facts = facts.map(|((view, _), hash)| (*view, hash.as_slice()));
        match self.world.agree(facts)? {
            None => Ok(all.finish()),
            Some((rank, view)) => {
                let text = views.iter().find(|(name, _)| *name == view);
                let text = text.map_or("", |(_, text)| text);
                Err(self.difference(&compiled.name, &view, text, rank)?)
            }
        }
    }

    /// The error for a program that differs on a rank: the first line of a view in which that rank
    /// and another differ.
    fn difference(&self, name: &str, view: &str, text: &str, rank: usize) -> Result<Error> {
        let lines: Vec<&str> = text.lines().collect();
        let hashes = lines.iter().flat_map(|line| hash_of(line).to_le_bytes());
        let all = self.world.gather(&hashes.collect::<Vec<u8>>())?;
        let of = |rank: usize| all[rank].chunks_exact(8);
        let other = (0..all.len()).find(|&other| all[other] != all[rank]);
        let other = other.unwrap_or(rank);
        let at = of(rank).zip(of(other)).position(|(a, b)| a != b);
        let at = at.unwrap_or(of(rank).len().min(of(other).len()));
        let line = lines.get(at).map_or("nothing", |line| line.trim());
        let shown = self.world.gather(line.as_bytes())?;
        let line = |rank: usize| String::from_utf8_lossy(&shown[rank]).into_owned();
        let (own, theirs) = (line(rank), line(other));
        Ok(Error::Peer(if view == SEED {
            format!(
                "rank {rank} does not run the program of the others: the parameters of \"{name}\" have the seed {own} on rank {rank} and {theirs} on \
                 rank {other}; pass the same seed to Params::seeded on all ranks"
            )
        } else {
            format!(
                "rank {rank} does not run the program of the others: the {view} of \"{name}\" differs, which has {own:?} on rank {rank} and {theirs:?} \
                 on rank {other}; give all ranks the same options and constants, and pass values that differ between ranks as inputs"
            )
        }))
    }

    /// Makes a run of a program, which the other ranks make too: an error of one rank is reported
    /// on all.
    pub(super) fn with_ranks<R>(
        &mut self,
        inner: &Compiled,
        run: impl FnOnce(&mut Session) -> Result<R>,
    ) -> Result<R> {
        self.execution.rank_sync = RankSync::Pending;
        if inner.fingerprint.is_some() {
            self.world.begin_run();
        }
        let result = run(self);
        match (&result, inner.fingerprint) {
            (Err(error), Some(program)) if self.execution.rank_sync == RankSync::Pending => {
                // The other ranks end this run with an error that has this one in it.
                let _ = self.exchange_headers(program, Some((1, error)));
            }
            _ => {}
        }
        result
    }

    /// Synchronizes with the other ranks, once in a run.
    pub(super) fn synchronize_ranks(&mut self, inner: &Compiled) -> Result<()> {
        match (self.execution.rank_sync, inner.fingerprint) {
            (RankSync::Pending, Some(program)) => {
                self.execution.rank_sync = RankSync::Failed;
                if let Some((_, error)) = self.exchange_headers(program, None)? {
                    return Err(error);
                }
                self.execution.rank_sync = RankSync::Done;
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Synchronizes with the other ranks once more, at the end of a run in which they have: this
    /// rank may have found an error, in a step, since then. The error of the rank that has found one
    /// in the earliest step.
    pub(super) fn end_with_ranks(
        &self,
        inner: &Compiled,
        found: Option<(usize, Error)>,
    ) -> Result<()> {
        let Some(program) = self.synchronized_as(inner) else {
            return Ok(());
        };
        let own = found
            .as_ref()
            .map(|(step, error)| (*step as u32 + 1, error));
        match (self.exchange_headers(program, own), found) {
            (Ok(None), _) => Ok(()),
            (Ok(Some((rank, error))), Some((_, own))) => Err(if rank == self.world.rank() {
                own
            } else {
                error
            }),
            (Ok(Some((_, error))), None) => Err(error),
            // The search has more to say than that a rank is lost.
            (Err(lost), found) => Err(found.map_or(lost, |(_, own)| own)),
        }
    }

    /// The number of a program in whose run the ranks have synchronized.
    pub(super) fn synchronized_as(&self, inner: &Compiled) -> Option<u64> {
        let is_done = self.execution.rank_sync == RankSync::Done;
        inner.fingerprint.filter(|_| is_done)
    }

    /// Shows the other ranks this one's program and error, with a number by which errors are ordered:
    /// the rank of the first error, and the error that ends the run on the others.
    fn exchange_headers(
        &self,
        program: u64,
        own: Option<(u32, &Error)>,
    ) -> Result<Option<(usize, Error)>> {
        let fault = own.map_or(0, |(fault, _)| fault);
        let Some(rank) = self.world.synchronize(program, fault)? else {
            return Ok(None);
        };
        let own = own.map_or(String::new(), |(_, error)| error.to_string());
        let messages = self.world.gather(own.as_bytes())?;
        let error = Error::Peer(format!(
            "rank {rank} of {} has failed in this run, which changed nothing on any rank: {}",
            self.world.ranks(),
            String::from_utf8_lossy(&messages[rank])
        ));
        Ok(Some((rank, error)))
    }
}

fn hash_of(text: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    text.hash(&mut hasher);
    hasher.finish()
}
