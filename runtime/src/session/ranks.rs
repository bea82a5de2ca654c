//! Sessions of a world: the ranks agree on a program when it is compiled, and meet in each run.
//!
//! A run meets once, before its first collective. All checks of data come before that, and no
//! weight is written before the sums of all ranks are there, so a fault on one rank ends the run on
//! every rank and changes nothing on any.

use std::hash::{DefaultHasher, Hash, Hasher};

use super::Session;
use crate::compile::CompiledPlan;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::program::{Compiled, Step};
use crate::world::World;

/// The graph and the kernels of a program, as text.
type Views = [String; 2];

/// Whether the ranks have met in a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Meeting {
    /// Not yet.
    Due,
    /// They have, and all of them go on.
    Held,
    /// They have, and none goes on.
    Failed,
}

/// The bytes that each rank shows in a meeting: a word each for its health, its program and the
/// bytes of its message.
const HEADER: usize = 24;

/// The most bytes of an error that another rank is told.
const MESSAGE: usize = 1 << 10;

impl Session {
    /// Joins a world, in which the programs of this session run on several ranks. Each rank makes
    /// the same calls: it compiles the same programs, and runs them in the same order, each on its
    /// own rows of the batch.
    ///
    /// [`Trace::minimize`](crate::Trace::minimize) then takes the step of the whole batch: each
    /// rank's loss counts by its number of examples, which is the length of the first input, and
    /// gradients are summed over all ranks. Batch norms use the statistics of a rank's own part, and
    /// random numbers are the same on every rank.
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
    pub fn on(mut self, world: World) -> Result<Self> {
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
        self.variables.params.set_spread(world.spread());
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
        (self.world.ranks() > 1).then(|| [program.graph.to_string(), program.to_string()])
    }

    /// Lets every rank show the program that it has compiled, and refuses different ones; the number
    /// by which they know it, if it exchanges anything.
    pub(super) fn agree(&self, compiled: &Compiled, shown: Option<Views>) -> Result<Option<u64>> {
        let exchanges = compiled.steps.iter().any(Step::exchanges);
        let Some([graph, kernels]) = shown.filter(|_| exchanges) else {
            return Ok(None);
        };
        let plan = compiled.plan.offsets();
        let views = [
            ("graph", graph),
            ("kernels", kernels),
            ("plan", format!("{:?} {:?}", plan.order, plan.offsets)),
        ];
        let mut all = DefaultHasher::new();
        let mut shown = [0u8; 24];
        for ((_, text), word) in views.iter().zip(shown.chunks_exact_mut(8)) {
            let mut hasher = DefaultHasher::new();
            text.hash(&mut hasher);
            text.hash(&mut all);
            word.copy_from_slice(&hasher.finish().to_le_bytes());
        }
        let ranks = self.world.gather(&shown)?;
        let ranks: Vec<&[u8]> = ranks.chunks_exact(shown.len()).collect();
        for (at, (view, text)) in views.iter().enumerate() {
            let word = at * 8..at * 8 + 8;
            let others = ranks
                .iter()
                .position(|r| r[word.clone()] != ranks[0][word.clone()]);
            if let Some(rank) = others {
                return Err(self.difference(&compiled.name, view, text, rank)?);
            }
        }
        Ok(Some(all.finish()))
    }

    /// The error for a program that differs between rank 0 and another: the first line of a view in
    /// which it does.
    fn difference(&self, name: &str, view: &str, text: &str, rank: usize) -> Result<Error> {
        let lines: Vec<&str> = text.lines().collect();
        let counts = self.world.gather(&(lines.len() as u64).to_le_bytes())?;
        let count = |rank: usize| word(&counts, rank);
        let most = (0..self.world.ranks()).map(count).max().unwrap_or(0);
        let mut hashes = Vec::new();
        for at in 0..most as usize {
            let mut hasher = DefaultHasher::new();
            lines.get(at).hash(&mut hasher);
            hashes.extend(hasher.finish().to_le_bytes());
        }
        let all = self.world.gather(&hashes)?;
        let (first, other) = (&all[..hashes.len()], &all[rank * hashes.len()..]);
        let at = (0..most as usize).find(|&at| word(first, at) != word(other, at));
        let line = at
            .and_then(|at| lines.get(at))
            .map_or("nothing", |line| line.trim());
        let mut own = vec![b' '; MESSAGE];
        let length = line.len().min(MESSAGE);
        own[..length].copy_from_slice(&line.as_bytes()[..length]);
        let shown = self.world.gather(&own)?;
        let line = |rank: usize| {
            let line = &shown[rank * MESSAGE..(rank + 1) * MESSAGE];
            String::from_utf8_lossy(line).trim_end().to_string()
        };
        Ok(Error::Peer(format!(
            "rank {rank} does not run the program of rank 0: the {view} of \"{name}\" differs, which has {:?} on rank {rank} and {:?} on rank 0",
            line(rank),
            line(0)
        )))
    }

    /// Makes a run of a program, which the other ranks make too: an error of one is told to all.
    pub(super) fn with_ranks<R>(
        &mut self,
        inner: &Compiled,
        run: impl FnOnce(&mut Session) -> Result<R>,
    ) -> Result<R> {
        self.execution.meeting = Meeting::Due;
        let result = run(self);
        match (&result, inner.fingerprint) {
            (Err(error), Some(program)) if self.execution.meeting == Meeting::Due => {
                // The other ranks end this run with an error that has this one in it.
                let _ = self.exchange_headers(program, Some(error));
            }
            _ => {}
        }
        result
    }

    /// Meets the other ranks, once in a run.
    pub(super) fn meet(&mut self, inner: &Compiled) -> Result<()> {
        match (self.execution.meeting, inner.fingerprint) {
            (Meeting::Due, Some(program)) => {
                self.execution.meeting = Meeting::Failed;
                self.exchange_headers(program, None)?;
                self.execution.meeting = Meeting::Held;
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Shows the other ranks this one's program and error; the error that ends the run on all of
    /// them, if there is one.
    fn exchange_headers(&self, program: u64, error: Option<&Error>) -> Result<()> {
        let mut message = error.map_or(String::new(), Error::to_string);
        let end = (0..=MESSAGE.min(message.len())).rev();
        let end = end.into_iter().find(|&at| message.is_char_boundary(at));
        message.truncate(end.unwrap_or(0));
        let mut header = [0u8; HEADER];
        let words = [u64::from(error.is_some()), program, message.len() as u64];
        for (bytes, word) in header.chunks_exact_mut(8).zip(words) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        let headers = self.world.gather(&header)?;
        let of = |rank: usize, field: usize| word(&headers, rank * 3 + field);
        let ranks = 0..self.world.ranks();
        if let Some(rank) = ranks.clone().find(|&rank| of(rank, 0) != 0) {
            let mut own = vec![0; MESSAGE];
            own[..message.len()].copy_from_slice(message.as_bytes());
            let messages = self.world.gather(&own)?;
            let length = (of(rank, 2) as usize).min(MESSAGE);
            let why = &messages[rank * MESSAGE..rank * MESSAGE + length];
            return Err(Error::Peer(format!(
                "rank {rank} of {} has failed in this run, which changed nothing on any rank: {}",
                self.world.ranks(),
                String::from_utf8_lossy(why)
            )));
        }
        if let Some(rank) = ranks.clone().find(|&rank| of(rank, 1) != of(0, 1)) {
            return Err(Error::Peer(format!(
                "rank {rank} of {} runs another program than rank 0",
                self.world.ranks()
            )));
        }
        Ok(())
    }
}

/// A word of little-endian ones.
fn word(bytes: &[u8], at: usize) -> u64 {
    let word = bytes.get(at * 8..at * 8 + 8);
    word.and_then(|word| word.try_into().ok())
        .map_or(0, u64::from_le_bytes)
}
