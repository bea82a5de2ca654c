//! The dynamic mode, for comparison: the same kernels in the same order, but every buffer is
//! allocated from a caching pool at its first write and freed after its last use, as in eager
//! frameworks.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use slabwise_kernels::memory::Region;
use slabwise_kernels::size::Env;
use smallvec::SmallVec;

use super::{Buffers, Memory, Run, Session};
use crate::buffer::{Buffer, Donated, Output};
use crate::error::{Error, Result};
use crate::feed::{Feed, Source};
use crate::memory::{
    Handle, MemoryConfig, NotInUse, OutOfMemory, Policy, Pool, Statistics, Stream, TagId,
};
use crate::program::{Compiled, Place, Program};

/// The blocks of the pool that a run has taken.
pub(crate) struct Pooled {
    /// By buffer of the program.
    held: Held,
    /// The workspace of the running kernel.
    workspace: Option<Handle>,
}

/// Blocks by buffer of the program.
type Held = Vec<Option<Handle>>;

impl Session {
    /// Sets how the memory of the dynamic mode is managed, and how much of a device's memory is
    /// reserved and when. Settings left open are read from the environment.
    ///
    /// # Errors
    /// If a setting is invalid; the error names it.
    pub fn with_memory(mut self, config: &MemoryConfig) -> Result<Self> {
        let pool = open_pool(config)?;
        self.memory.backend.configure(config)?;
        self.reset_pool();
        // Programs that have run refer to their buffers' tags by number.
        pool.know_tags_of(&self.memory.pool);
        self.memory.pool = pool;
        Ok(self)
    }

    /// Runs a program with its buffers in the caching pool instead of the slab; results are
    /// bit-equal to [`Session::run`].
    ///
    /// # Errors
    /// Those of [`Session::run`], and if the pool has no memory for a buffer: [`Error::Memory`],
    /// with an OOM report. The session stays usable.
    pub fn run_dynamic<const N: usize>(
        &mut self,
        program: &Program<N>,
        feed: impl Feed,
    ) -> Result<[Output<'_>; N]> {
        let inner = &*self.planned_for(program, &feed)?;
        if inner.fingerprint.is_some() {
            return Err(Error::Value(format!(
                "\"{}\" exchanges values with other ranks, for which Session::run has planned their bytes; it has no dynamic mode",
                inner.name
            )));
        }
        let mut env = self.begin(inner, &feed)?;
        self.memory.backend.start(inner.loaded.as_ref(), &env)?;
        // Outputs of the last run were kept until now.
        let last = std::mem::take(&mut self.execution.dynamic);
        self.memory.free_all(last)?;
        let mut blocks = Pooled {
            held: vec![None; inner.buffers.len()],
            workspace: None,
        };
        let run = || self.run_in_blocks(inner, &feed, &mut env, &mut blocks);
        let done = catch_unwind(AssertUnwindSafe(run));
        // The blocks of outputs are kept until the next run, whatever fails after the kernels.
        match done {
            Ok(Ok(())) => self.execution.dynamic = blocks.held,
            failed => {
                self.memory.free_all([blocks.workspace])?;
                self.memory.free_all(blocks.held)?;
                failed.unwrap_or_else(|panic| resume_unwind(panic))?;
            }
        }
        self.memory.pool.end_step(self.memory.backend.source());
        self.memory.backend.end_run(inner.loaded.as_ref())?;
        let places = self.memory.places(&self.execution.dynamic)?;
        self.show((inner, &program.debugged), &env, |b| places[b])?;
        let donated = self.give_donated(inner, &feed, &env, &mut |b| places[b])?;
        Ok(std::array::from_fn(|i| {
            self.output(inner, i, places[inner.outputs[i]], &env, &donated)
        }))
    }

    /// Runs a program in blocks of the pool.
    fn run_in_blocks(
        &mut self,
        inner: &Compiled,
        feed: &dyn Feed,
        env: &mut Env,
        blocks: &mut Pooled,
    ) -> Result<()> {
        let mut copied: SmallVec<[usize; 8]> = SmallVec::new();
        feed.each(&mut |at, source| {
            let input = &inner.inputs[at];
            let in_place = matches!(
                source,
                Source::Resident(Buffer { dtype, .. }) | Source::Donated(Donated(Buffer { dtype, .. }))
                    if *dtype == input.dtype
            );
            copied.extend(input.buffer.filter(|_| !in_place));
        });
        for buffer in copied {
            self.memory.take_block(inner, blocks, 0, buffer, env)?;
        }
        let places = self.memory.places(&blocks.held)?;
        let fed = self.stage(inner, feed, env, &mut |b| places[b])?;
        let mut run = Run {
            inner,
            fed: &fed,
            buffers: Buffers::Pooled(blocks),
            recorded: false,
        };
        self.run_steps(&mut run, env)
    }

    /// The statistics of the dynamic mode's pool.
    pub fn pool_statistics(&self) -> Statistics {
        self.memory.pool.statistics()
    }

    /// The policy of the dynamic mode's pool.
    pub fn pool_policy(&self) -> Policy {
        self.memory.pool.policy()
    }

    /// The pool of the dynamic mode.
    pub fn pool(&self) -> &Pool {
        &self.memory.pool
    }

    /// Gives the dynamic mode's memory back, and resets its statistics.
    pub fn reset_pool(&mut self) {
        let last = std::mem::take(&mut self.execution.dynamic);
        // The pool takes back every block that it handed out.
        let freed = self.memory.free_all(last);
        let cleared = self.execution.data_dependent.clear(&mut self.memory);
        debug_assert!(freed.is_ok() && cleared.is_ok());
        self.memory.pool.empty_cache(self.memory.backend.source());
        self.memory.pool.reset_statistics();
    }
}

impl Memory {
    /// Takes blocks for the values that a step is the first to write, and for its workspace; the
    /// region of the workspace.
    pub(crate) fn take_blocks(
        &mut self,
        inner: &Compiled,
        blocks: &mut Pooled,
        at: usize,
        env: &Env,
    ) -> Result<Region> {
        let step = &inner.steps[at];
        for &b in &step.begins {
            // Inputs have blocks already, or need none.
            if blocks.held[b].is_none() && inner.input_of[b].is_none() {
                self.take_block(inner, blocks, at, b, env)?;
            }
        }
        let tag = self.tag_ids(inner)[inner.buffers.len() + at];
        let workspace = self.take(inner, at, step.workspace.bytes, tag, &blocks.held)?;
        blocks.workspace = Some(workspace);
        self.place(blocks.workspace)
    }

    /// Gives back the blocks of the values that a step is the last to use, and of its workspace.
    pub(crate) fn free_blocks(
        &mut self,
        inner: &Compiled,
        blocks: &mut Pooled,
        at: usize,
    ) -> Result<()> {
        self.free_all([blocks.workspace.take()])?;
        let mut free = |b: usize| match inner.outputs.contains(&b) {
            true => Ok(()),
            false => self.free_all([blocks.held[b].take()]),
        };
        match at + 1 == inner.steps.len() {
            true => (0..inner.buffers.len()).try_for_each(free),
            false => inner.steps[at].ends.iter().try_for_each(|&b| free(b)),
        }
    }

    /// The region of a buffer's block.
    pub(crate) fn block(&self, blocks: &Pooled, buffer: usize) -> Result<Region> {
        self.place(blocks.held[buffer])
    }

    fn take_block(
        &mut self,
        inner: &Compiled,
        blocks: &mut Pooled,
        step: usize,
        buffer: usize,
        env: &Env,
    ) -> Result<()> {
        let (bytes, tag) = (
            inner.buffers[buffer].bytes_at(env),
            self.tag_ids(inner)[buffer],
        );
        blocks.held[buffer] = Some(self.take(inner, step, bytes, tag, &blocks.held)?);
        Ok(())
    }

    /// A block for a step.
    fn take(
        &mut self,
        inner: &Compiled,
        step: usize,
        bytes: u64,
        tag: TagId,
        held: &Held,
    ) -> Result<Handle> {
        let source = self.backend.source();
        let taken = self.pool.allocate(source, bytes, Stream::default(), tag);
        taken.map_err(|report| Error::Memory {
            program: inner.name.to_string(),
            report: with_next_uses(report, inner, step, held),
        })
    }

    /// The region of a block; empty if there is none.
    fn place(&self, handle: Option<Handle>) -> Result<Region> {
        handle.map_or(Ok(Region::default()), |handle| {
            self.pool.region(handle).map_err(lost)
        })
    }

    fn places(&self, held: &Held) -> Result<Vec<Region>> {
        held.iter().map(|&handle| self.place(handle)).collect()
    }

    fn free_all(&mut self, blocks: impl IntoIterator<Item = Option<Handle>>) -> Result<()> {
        blocks
            .into_iter()
            .flatten()
            .try_for_each(|handle| self.pool.free(self.backend.source(), handle).map_err(lost))
    }

    /// The pool's numbers of a program's tags.
    pub(crate) fn tag_ids<'a>(&self, inner: &'a Compiled) -> &'a [TagId] {
        inner.tag_ids.get_or_init(|| {
            inner
                .tags
                .iter()
                .map(|tag| self.pool.tag(tag.clone()))
                .collect()
        })
    }
}

/// A pool for the dynamic mode.
pub(crate) fn open_pool(config: &MemoryConfig) -> Result<Pool> {
    Pool::new(config).map_err(|e| Error::Value(e.to_string()))
}

/// The error for a block of a run that its pool does not know.
fn lost(e: NotInUse) -> Error {
    Error::Internal(e.to_string())
}

/// Adds to each holder of an OOM report the kernel that uses it next.
fn with_next_uses(
    mut report: Box<OutOfMemory>,
    inner: &Compiled,
    step: usize,
    held: &Held,
) -> Box<OutOfMemory> {
    for holder in &mut report.holders {
        let Some(buffer) = held.iter().position(|h| *h == Some(holder.handle)) else {
            continue;
        };
        let uses = |p: &Place| p.buffer() == Some(buffer);
        let next = inner
            .steps
            .iter()
            .enumerate()
            .skip(step)
            .find(|(_, s)| s.places.iter().any(uses));
        holder.next_use = Some(match next {
            Some((at, s)) => format!("step {at} {}", s.name),
            None => "the caller".into(),
        });
    }
    report
}
