//! Measurements of a run: the beginning and end of each kernel, and the bytes touched.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::time::Instant;

use slabwise_kernels::memory::Region;
use slabwise_kernels::size::Env;
use slabwise_planner::report::{ReceivedBytes, Run, RunStep};
use slabwise_planner::{BufferId, Holder};

use super::Session;
use crate::backend::{Backend, Roofline};
use crate::error::{Error, Result};
use crate::feed::{Feed, Source};
use crate::program::{Compiled, Program};

/// The clock of a run's steps: the device's, if it has one, else the host's.
pub(super) struct StepClock {
    began: Instant,
    on_device: bool,
    /// Seconds from the start to the beginning and the end of each step.
    host: Vec<f64>,
}

impl StepClock {
    pub fn start(memory: &mut dyn Backend) -> StepClock {
        StepClock {
            on_device: memory.begin_marks(),
            began: Instant::now(),
            host: Vec::new(),
        }
    }

    /// Notes the moment at which a step begins or ends.
    pub fn mark(&mut self, memory: &mut dyn Backend) -> Result<()> {
        if self.on_device {
            return memory.mark();
        }
        self.host.push(self.began.elapsed().as_secs_f64());
        Ok(())
    }

    /// The beginning and end of each step, in seconds from the start.
    fn steps(&self, memory: &dyn Backend) -> Result<Vec<[f64; 2]>> {
        let marks = if self.on_device {
            memory.marks()?
        } else {
            self.host.clone()
        };
        Ok(marks
            .chunks_exact(2)
            .map(|pair| [pair[0], pair[1]])
            .collect())
    }
}

/// The record of a run, written while it runs.
pub(super) struct Recording {
    run: Run,
    began: Instant,
}

impl Recording {
    /// Notes the memory that a kernel was passed, once it has run.
    pub(super) fn note(
        &mut self,
        inner: &Compiled,
        at: usize,
        args: &[Region],
        workspace: Region,
        slab: Region,
    ) {
        let seen = |holder: Holder, region: Region| {
            let inside = region.arena == slab.arena && region.offset >= slab.offset;
            ReceivedBytes {
                holder,
                offset: inside.then(|| region.offset - slab.offset),
                bytes: region.bytes,
            }
        };
        let step = &inner.steps[at];
        let planned = step.places.iter().zip(args).filter_map(|(place, region)| {
            let buffer = u32::try_from(place.buffer()?).ok()?;
            Some(seen(Holder::Buffer(BufferId(buffer)), *region))
        });
        let own = seen(Holder::Workspace(inner.plan.offsets().order[at]), workspace);
        let received = planned
            .chain((workspace.bytes > 0).then_some(own))
            .collect();
        self.run.steps.push(RunStep {
            start_ns: 0,
            ns: 0,
            received,
        });
    }

    /// Notes the times of the steps.
    fn time(&mut self, clock: &StepClock, steps: &[[f64; 2]]) {
        let before = clock
            .began
            .saturating_duration_since(self.began)
            .as_secs_f64();
        let ns = |seconds: f64| (1e9 * seconds).round() as u64;
        for (step, [began, ended]) in self.run.steps.iter_mut().zip(steps) {
            (step.start_ns, step.ns) = (ns(before + began), ns(ended - began));
        }
    }
}

impl Session {
    /// Adds the times of a run's steps to the record and to the profiles that are being made.
    pub(super) fn note_times(
        &mut self,
        clock: &StepClock,
        inner: &Compiled,
        sizes: &Env,
    ) -> Result<()> {
        let steps = clock.steps(&*self.memory.backend)?;
        if let Some(recording) = &mut self.execution.recording {
            recording.time(clock, &steps);
        }
        if let Some(times) = &mut self.execution.profile {
            times.add_run(inner, sizes, &steps);
        } else if let Some(mut profiles) = self.execution.profiles.take() {
            profiles.add(inner, sizes, || self.roofline(), &steps);
            self.execution.profiles = Some(profiles);
        }
        Ok(())
    }

    /// Waits until all runs are done. On the CPU they always are.
    ///
    /// # Errors
    /// If one of them failed, which a device may report only now.
    pub fn synchronize(&self) -> Result<()> {
        self.memory.backend.synchronize()
    }

    /// Bytes that the device's driver has given this process, or on the CPU the session's arenas
    /// hold.
    pub fn device_bytes(&self) -> u64 {
        self.memory.backend.reserved_bytes()
    }

    /// Runs a program once and records which bytes of the slab each of its kernels was really
    /// passed, and when; see [`Plan::html`](crate::Plan::html).
    ///
    /// # Errors
    /// See [`Session::run`]; and if the lengths have another plan than [`Program::plan`], as those of
    /// unbounded dimensions may, or an input is donated.
    pub fn record<const N: usize>(&mut self, program: &Program<N>, feed: impl Feed) -> Result<Run> {
        keeps_inputs(program, &feed)?;
        let inner = self.planned_for(program, &feed)?;
        if !Arc::ptr_eq(&inner, &program.inner) {
            return Err(Error::Value(format!(
                "\"{}\" runs by another plan than Program::plan at these lengths, and no record of it could be shown over that; give its \
                 unbounded dimensions bounds",
                inner.name
            )));
        }
        self.execution.recording = Some(Recording {
            run: Run::default(),
            began: Instant::now(),
        });
        let run = || self.run(program, feed).map(|_| ());
        let result = catch_unwind(AssertUnwindSafe(run));
        let recording = self.execution.recording.take();
        result.unwrap_or_else(|panic| resume_unwind(panic))?;
        Ok(recording.map_or_else(Run::default, |recording| recording.run))
    }

    /// The limits of the device's speed: by a device's attributes, and `None` where the driver does
    /// not tell them; on the CPU measured with the session's threads by the first call, which takes
    /// some tenths of a second.
    pub fn roofline(&self) -> Option<Roofline> {
        let team = &self.execution.team;
        self.memory.backend.roofline(self.options.tf32, team)
    }

    /// The bytes of the slab that a run really touches, measured by filling it with a pattern and
    /// looking for the last byte that changed. Runs the program twice, with two patterns, and
    /// restores weights and state.
    pub fn measure_touched<const N: usize>(
        &mut self,
        program: &Program<N>,
        feed: impl Feed,
    ) -> Result<u64> {
        keeps_inputs(program, &feed)?;
        let inner = self.planned_for(program, &feed)?;
        self.ready(&inner)?;
        self.memory.ensure_planned(&inner, &self.world)?;
        let slab = self.memory.slab()?;
        let kept = self.variables.list.iter().map(|v| {
            self.memory
                .backend
                .map_read(&v.region, |memory, region| memory.bytes(region).to_vec())
        });
        let kept: Vec<Vec<u8>> = kept.collect::<Result<_>>()?;
        let mut touched = 0;
        for pattern in [0xA5u8, 0x5A] {
            self.memory.backend.fill(&slab, pattern)?;
            self.run(program, &feed)?;
            let last = self.memory.backend.map_read(&slab, |memory, slab| {
                memory.bytes(slab).iter().rposition(|b| *b != pattern)
            })?;
            touched = touched.max(last.map_or(0, |l| l as u64 + 1));
            for (variable, bytes) in self.variables.list.iter().zip(&kept) {
                self.memory
                    .backend
                    .map_write(&variable.region, &mut |memory, region| {
                        memory.bytes_mut(region).copy_from_slice(bytes)
                    })?;
            }
        }
        Ok(touched)
    }
}

/// Fails if an input is donated, because its bytes would be lost with the outputs, which measurements
/// do not return.
pub(super) fn keeps_inputs<const N: usize>(program: &Program<N>, feed: &dyn Feed) -> Result<()> {
    let mut donated = None;
    feed.each(&mut |at, source| {
        if let Source::Donated(_) = source {
            donated.get_or_insert(at);
        }
    });
    let input = donated.and_then(|at| program.inner.inputs.get(at));
    input.map_or(Ok(()), |input| {
        Err(Error::Input {
            name: input.name.to_string(),
            message: "a measurement returns no output that could take its bytes; feed the buffer \
                      without donating it"
                .into(),
        })
    })
}
