//! Dynamic mode, for comparison: the same kernels in the same order, with every buffer taken from a
//! caching pool when it is first written and given back after its last use, as eager frameworks do
//! it.

use slabwise_kernels::memory::Region;
use slabwise_kernels::size::Env;
use smallvec::SmallVec;

use crate::buffer::Output;
use crate::error::{Error, Result};
use crate::feed::Feed;
use crate::memory::{
    Handle, MemoryConfig, NotInUse, OutOfMemory, Policy, Pool, Statistics, Stream, TagId,
};
use crate::program::{Compiled, Copied, Place, Program, Work};
use crate::session::Session;

/// The blocks of a run, by buffer of the program.
type Held = Vec<Option<Handle>>;

impl Session {
    /// How the memory of the dynamic mode is managed, and how much of a device's memory is taken
    /// when. Settings left open are read from the environment.
    ///
    /// # Errors
    /// If a setting makes no sense; the error names it.
    pub fn with_memory(mut self, config: &MemoryConfig) -> Result<Self> {
        let pool = open_pool(config)?;
        self.memory.configure(config)?;
        self.reset_pool();
        // Programs that have run know their buffers' tags by number.
        pool.know_tags_of(&self.pool);
        self.pool = pool;
        Ok(self)
    }

    /// Runs a program with its buffers in the caching pool instead of the slab; results are
    /// bit-equal to [`Session::run`].
    ///
    /// # Errors
    /// As [`Session::run`], and if the pool has no memory for a buffer: [`Error::Memory`], with the
    /// bill. The session stays usable.
    pub fn run_dynamic<const N: usize>(
        &mut self,
        program: &Program<N>,
        feed: impl Feed,
    ) -> Result<[Output<'_>; N]> {
        let inner = &*self.planned_for(program, &feed)?;
        let mut env = self.begin(inner, &feed)?;
        self.memory.start(inner.loaded.as_ref(), &env)?;
        // Outputs of the last run were kept until now.
        let last = std::mem::take(&mut self.dynamic);
        self.give_all(last)?;
        let mut held: Held = vec![None; inner.buffers.len()];
        let done = self.run_steps(inner, &feed, &mut env, &mut held);
        if let Err(error) = done {
            self.give_all(held)?;
            return Err(error);
        }
        self.pool.end_step(&mut self.memory);
        self.memory.end_run(inner.loaded.as_ref())?;
        let places = self.places(&held)?;
        let buffers: [Option<crate::buffer::Buffer>; N] =
            self.give_donated(inner, &feed, &env, &mut |b| places[b])?;
        self.dynamic = held;
        Ok(std::array::from_fn(|i| {
            self.output(inner, i, places[inner.outputs[i]], &env, buffers[i].clone())
        }))
    }

    fn run_steps(
        &mut self,
        inner: &Compiled,
        feed: &dyn Feed,
        env: &mut Env,
        held: &mut Held,
    ) -> Result<()> {
        let tags = inner.tag_ids.get_or_init(|| {
            inner
                .tags
                .iter()
                .map(|tag| self.pool.tag(tag.clone()))
                .collect()
        });
        let bytes_of = |b: usize, env: &Env| inner.buffers[b].bytes_at(env);
        for buffer in inner.inputs.iter().filter_map(|i| i.buffer) {
            held[buffer] = Some(self.take(inner, 0, bytes_of(buffer, env), tags[buffer], held)?);
        }
        let staged = self.places(held)?;
        let fed = self.stage(inner, feed, env, &mut |b| staged[b])?;
        for (at, step) in inner.steps.iter().enumerate() {
            for &b in &step.begins {
                if held[b].is_none() {
                    held[b] = Some(self.take(inner, at, bytes_of(b, env), tags[b], held)?);
                }
            }
            let workspace = self.take(
                inner,
                at,
                step.workspace.bytes,
                tags[inner.buffers.len() + at],
                held,
            )?;
            let place = |session: &Session, b: usize| {
                let own = inner
                    .inputs
                    .iter()
                    .position(|i| i.buffer == Some(b))
                    .and_then(|i| fed[i]);
                own.map_or_else(|| session.place(held[b]), Ok)
            };
            let args: Result<SmallVec<[Region; 16]>> = step
                .places
                .iter()
                .map(|p| match *p {
                    Place::Planned(b) | Place::Slice(b, _) => {
                        place(self, b).map(|region| p.part(region, env))
                    }
                    Place::Variable(v) => Ok(self.variables[v].region),
                    Place::Sizes => Ok(self.sizes()),
                })
                .collect();
            let workspace_region = self.place(Some(workspace))?;
            let first = args.as_ref().ok().and_then(|args| args.first().copied());
            let result = match &step.work {
                Work::Run(kernel) => {
                    let run = (at, &**kernel, step.slice);
                    args.and_then(|args| {
                        self.memory.run(
                            inner.loaded.as_ref(),
                            run,
                            &args,
                            &workspace_region,
                            env,
                            &self.team,
                        )
                    })
                }
                // At once: this mode is for comparing memory, and a caching pool plans no copies
                // ahead.
                Work::Start(copy) => {
                    let Copied { from, to } = inner.copies[*copy];
                    let bytes = bytes_of(from, env);
                    let (from, to) = (
                        place(self, from)?.part(0, bytes),
                        place(self, to)?.part(0, bytes),
                    );
                    self.memory.copy(&from, &to).map(Ok)
                }
                Work::Finish(_) => Ok(Ok(())),
            };
            self.pool.free(&mut self.memory, workspace).map_err(lost)?;
            result?.map_err(|fault| inner.fault(at, fault))?;
            self.bind_length(inner, at, first.as_ref(), env)?;
            let last = at + 1 == inner.steps.len();
            for (b, slot) in held.iter_mut().enumerate() {
                let ends = (last || step.ends.contains(&b)) && !inner.outputs.contains(&b);
                if ends && let Some(handle) = slot.take() {
                    self.pool.free(&mut self.memory, handle).map_err(lost)?;
                }
            }
        }
        Ok(())
    }

    /// A block for what a step needs.
    fn take(
        &mut self,
        inner: &Compiled,
        step: usize,
        bytes: u64,
        tag: TagId,
        held: &Held,
    ) -> Result<Handle> {
        let taken = self
            .pool
            .allocate(&mut self.memory, bytes, Stream::default(), tag);
        taken.map_err(|bill| Error::Memory {
            program: inner.name.to_string(),
            bill: with_next_uses(bill, inner, step, held),
        })
    }

    /// Where a block lies now; an empty region if there is none.
    fn place(&self, handle: Option<Handle>) -> Result<Region> {
        handle.map_or(Ok(Region::default()), |handle| {
            self.pool.region(handle).map_err(lost)
        })
    }

    fn places(&self, held: &Held) -> Result<Vec<Region>> {
        held.iter().map(|&handle| self.place(handle)).collect()
    }

    fn give_all(&mut self, held: Held) -> Result<()> {
        held.into_iter()
            .flatten()
            .try_for_each(|handle| self.pool.free(&mut self.memory, handle).map_err(lost))
    }

    /// What the pool of the dynamic mode did.
    pub fn pool_statistics(&self) -> Statistics {
        self.pool.statistics()
    }

    /// How the pool of the dynamic mode finds memory.
    pub fn pool_policy(&self) -> Policy {
        self.pool.policy()
    }

    /// The pool of the dynamic mode, to look at.
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// Gives the dynamic mode's memory back, and starts its statistics anew.
    pub fn reset_pool(&mut self) {
        let last = std::mem::take(&mut self.dynamic);
        // What the pool handed out it takes back.
        let freed = self.give_all(last);
        debug_assert!(freed.is_ok());
        self.pool.empty_cache(&mut self.memory);
        self.pool.reset_statistics();
    }
}

/// A pool for the dynamic mode.
pub(crate) fn open_pool(config: &MemoryConfig) -> Result<Pool> {
    Pool::new(config).map_err(|e| Error::Value(e.to_string()))
}

/// A block of a run that its pool does not know.
fn lost(e: NotInUse) -> Error {
    Error::Internal(e.to_string())
}

/// Says of each holder which kernel uses it next.
fn with_next_uses(
    mut bill: Box<OutOfMemory>,
    inner: &Compiled,
    step: usize,
    held: &Held,
) -> Box<OutOfMemory> {
    for holder in &mut bill.holders {
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
    bill
}
