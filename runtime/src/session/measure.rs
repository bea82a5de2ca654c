//! What a run takes: seconds of each kernel, bytes touched.

use std::panic::Location;
use std::time::Instant;

use slabwise_kernels::memory::Region;
use slabwise_planner::report::{Handed, Run, RunStep};
use slabwise_planner::{BufferId, Holder};

use super::Session;
use crate::error::{Error, Result};
use crate::feed::Feed;
use crate::program::{Compiled, Program, Step};

/// What a kernel took.
#[derive(Clone, Debug, PartialEq)]
pub struct KernelTime {
    /// The kernel's name in the plan: the layer and the operations in it.
    pub name: String,
    /// The user's line that it computes.
    pub location: &'static Location<'static>,
    /// Seconds.
    pub seconds: f64,
}

/// What is written down of a run, while it runs.
pub(super) struct Recording {
    run: Run,
    began: Instant,
}

impl Recording {
    /// Writes down what a kernel was handed, once it has run.
    pub(super) fn note(&mut self, inner: &Compiled, at: usize, args: &[Region], workspace: Region, slab: Region, started: Instant) {
        let took = started.elapsed();
        let ns = |time: std::time::Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let seen = |holder: Holder, region: Region| {
            let inside = region.arena == slab.arena && region.offset >= slab.offset;
            Handed { holder, offset: inside.then(|| region.offset - slab.offset), bytes: region.bytes }
        };
        let step = &inner.steps[at];
        let planned = step.places.iter().zip(args).filter_map(|(place, region)| {
            let buffer = u32::try_from(place.buffer()?).ok()?;
            Some(seen(Holder::Buffer(BufferId(buffer)), *region))
        });
        let own = seen(Holder::Workspace(inner.plan.offsets().order[at]), workspace);
        let handed = planned.chain((workspace.bytes > 0).then_some(own)).collect();
        self.run.steps.push(RunStep { start_ns: ns(started.duration_since(self.began)), ns: ns(took), handed });
    }
}

impl Session {
    /// Waits until all runs are done that were asked for. On the CPU they always are.
    ///
    /// # Errors
    /// If one of them failed, which a device may tell only now.
    pub fn synchronize(&self) -> Result<()> {
        self.memory.settle()
    }

    /// Bytes that the device's driver has given this process, or on the CPU the session's arenas hold.
    pub fn device_bytes(&self) -> u64 {
        self.memory.reserved_bytes()
    }

    /// Runs a program once and writes down which bytes of the slab each of its kernels was really handed, and when; see
    /// [`Plan::html`](crate::Plan::html).
    ///
    /// # Errors
    /// As [`Session::run`].
    pub fn record<const N: usize>(&mut self, program: &Program<N>, feed: impl Feed) -> Result<Run> {
        self.recording = Some(Recording { run: Run::default(), began: Instant::now() });
        let result = self.run(program, feed).map(|_| ());
        let run = self.recording.take().map_or_else(Run::default, |recording| recording.run);
        result.map(|()| run)
    }

    /// Runs a program `steps` times and returns what each of its kernels took at its fastest, in the order of
    /// [`Plan::steps`](crate::Plan::steps).
    pub fn profile<const N: usize>(&mut self, program: &Program<N>, feed: impl Feed, steps: u32) -> Result<Vec<KernelTime>> {
        let inner = self.planned_for(program, &feed)?;
        self.profile = Some(vec![f64::INFINITY; inner.steps.len()]);
        let result = (0..steps.max(1)).try_for_each(|_| self.run(program, &feed).map(|_| ()));
        let fastest = self.profile.take().unwrap_or_default();
        let time = |(step, seconds): (&Step, f64)| KernelTime { name: step.name.clone(), location: step.origin.location, seconds };
        result.map(|()| inner.steps.iter().zip(fastest).map(time).collect())
    }

    /// The bytes of the slab that a run really touches, measured by filling it with a pattern and looking for the last byte
    /// that changed. Runs the program twice, with two patterns; weights and state are put back as they were.
    pub fn measure_touched<const N: usize>(&mut self, program: &Program<N>, feed: impl Feed) -> Result<u64> {
        self.planned_for(program, &feed)?;
        let slab = self.slab.ok_or_else(|| Error::Internal("a program without a slab".into()))?;
        let kept = self.variables.iter().map(|v| self.memory.look(&v.region, |memory, region| memory.bytes(region).to_vec()));
        let kept: Vec<Vec<u8>> = kept.collect::<Result<_>>()?;
        let mut touched = 0;
        for pattern in [0xA5u8, 0x5A] {
            self.memory.fill(&slab, pattern)?;
            self.run(program, &feed)?;
            let last = self.memory.look(&slab, |memory, slab| memory.bytes(slab).iter().rposition(|b| *b != pattern))?;
            touched = touched.max(last.map_or(0, |l| l as u64 + 1));
            for (variable, bytes) in self.variables.iter().zip(&kept) {
                self.memory.edit(&variable.region, |memory, region| memory.bytes_mut(region).copy_from_slice(bytes))?;
            }
        }
        Ok(touched)
    }
}
