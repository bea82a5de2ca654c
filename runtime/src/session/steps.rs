//! The steps of a planned program, one after the other.

use slabwise_kernels::memory::Region;
use slabwise_kernels::size::Env;
use slabwise_kernels::spec::MAX_ARGUMENTS;
use smallvec::SmallVec;

use super::measure::StepClock;
use super::{RunStats, Session};
use crate::checks::Watch;
use crate::error::{Error, Result};
use crate::program::{Compiled, Place, Work};

impl Session {
    pub(super) fn slab(&self) -> Result<Region> {
        self.slab
            .ok_or_else(|| Error::Internal("a program without a slab".into()))
    }

    /// Runs a program whose inputs are where they are planned, or where `fed` says of each.
    pub(super) fn run_fed(
        &mut self,
        inner: &Compiled,
        env: &mut Env,
        fed: &[Option<Region>],
    ) -> Result<()> {
        self.begin_found(inner)?;
        let (slab, host) = (self.slab()?, self.host.unwrap_or_default());
        let (_, landed) = self.memory.landing();
        #[cfg(feature = "cuda")]
        if self.run_recorded(inner, slab, fed, env)? {
            self.stats = RunStats {
                peak_slab_bytes: inner.peak() + landed,
                ..RunStats::default()
            };
            return Ok(());
        }
        let fed = |buffer: usize| {
            inner
                .inputs
                .iter()
                .position(|i| i.buffer == Some(buffer))
                .and_then(|i| *fed.get(i)?)
        };
        let place = |buffer: usize| {
            fed(buffer).unwrap_or_else(|| {
                inner.place_in(
                    if inner.buffers[buffer].on_host {
                        host
                    } else {
                        slab
                    },
                    buffer,
                )
            })
        };
        let done = self.run_kernels(inner, slab, env, &place);
        if done.is_err() {
            // Whoever comes next finds nothing under way.
            self.memory.settle_copies();
        }
        let (lent_bytes, pool_bytes) = self.found.most();
        self.stats = RunStats {
            peak_slab_bytes: done? + landed,
            lent_bytes,
            pool_bytes,
        };
        if pool_bytes > 0 {
            self.pool.end_step(&mut self.memory);
        }
        Ok(())
    }

    /// Runs the steps on buffers that lie where `place` says; the end of the highest byte of the
    /// slab in use.
    fn run_kernels(
        &mut self,
        inner: &Compiled,
        slab: Region,
        env: &mut Env,
        place: &dyn Fn(usize) -> Region,
    ) -> Result<u64> {
        let mut peak = 0;
        let timed = self.profile.is_some() || self.recording.is_some();
        let mut clock = timed.then(|| StepClock::start(&mut self.memory));
        self.tickets.clear();
        let mut watch = if inner.guard > 0 {
            Some(Watch::begin(self, inner, slab)?)
        } else {
            None
        };
        for (at, step) in inner.steps.iter().enumerate() {
            self.make_room(inner, at, env, slab)?;
            let workspace = slab.part(step.workspace.offset, step.workspace.bytes);
            let args: SmallVec<[Region; MAX_ARGUMENTS]> = step
                .places
                .iter()
                .map(|p| match *p {
                    Place::Planned(b) if inner.buffers[b].found => self.found_region(b, slab),
                    Place::Slice(b, _) if inner.buffers[b].found => {
                        Ok(p.part(self.found_region(b, slab)?, env))
                    }
                    Place::Planned(b) | Place::Slice(b, _) => Ok(p.part(place(b), env)),
                    Place::Variable(v) => Ok(self.variables[v].region),
                    Place::Sizes => Ok(self.sizes),
                })
                .collect::<Result<_>>()?;
            peak = peak.max(step.slab_end(inner));
            clock
                .as_mut()
                .map_or(Ok(()), |clock| clock.mark(&mut self.memory))?;
            match &step.work {
                Work::Run(kernel) => {
                    let done = self.memory.run(
                        inner.loaded.as_ref(),
                        (at, kernel, step.slice),
                        &args,
                        &workspace,
                        env,
                        &self.team,
                    )?;
                    done.map_err(|fault| inner.fault(at, fault))?;
                    self.bind_length(inner, at, args.first(), env)?;
                }
                Work::Start(copy) => self.start_copy(inner, *copy, env, place)?,
                Work::Finish(copy) => self.finish_copy(*copy)?,
            }
            clock
                .as_mut()
                .map_or(Ok(()), |clock| clock.mark(&mut self.memory))?;
            if let Some(recording) = &mut self.recording {
                recording.note(inner, at, &args, workspace, slab);
            }
            self.end_found(inner, at)?;
            if let Some(watch) = &mut watch {
                watch.after(self, inner, slab, at)?;
            }
        }
        self.memory.end_run(inner.loaded.as_ref())?;
        if let Some(clock) = clock {
            self.note_times(&clock)?;
        }
        Ok(peak)
    }
}
