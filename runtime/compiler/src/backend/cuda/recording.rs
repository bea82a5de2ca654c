//! Recorded runs: a run whose sizes and addresses repeat is recorded as a graph, and replayed by
//! one call.

use slabwise_cuda::{Launch, Run, Work};
use slabwise_kernels::memory::Region;
use smallvec::SmallVec;

use super::{Gpu, Loaded, cuda_kernel, within};
use crate::backend::{Bindings, Kernel, Replay};
use crate::error::{Error, Result};

/// A step of a run that is recorded.
pub(super) enum Recorded {
    /// The kernel of this step.
    Run {
        step: usize,
        arguments: Vec<Region>,
        workspace: Region,
    },
    /// The copy of this number starts.
    Start {
        copy: usize,
        from: Region,
        to: Region,
    },
    /// The copy of this number is waited for.
    Finish(usize),
}

/// The sizes and addresses of a run.
type Key = SmallVec<[u64; 24]>;

impl Gpu {
    fn key(&self, run: &Bindings<'_>) -> Key {
        let mut key: Key = run.sizes.0.iter().map(|&size| u64::from(size)).collect();
        key.push(self.device.address(&run.slab));
        key.extend(run.host.map(|host| self.device.host_address(&host)));
        // A prefetched input is moved to its planned offset, where other inputs are written: the
        // run is the same.
        let address = |input: usize| {
            run.fed
                .get(input)
                .copied()
                .flatten()
                .map_or(0, |region| self.device.address(&region))
        };
        key.extend((0..run.inputs).map(address));
        key
    }

    /// Replays a run, if it was recorded; else says how to proceed. Fails if one of its kernels
    /// would be refused when it is launched.
    pub(super) fn replay_run(&mut self, loaded: &Loaded, run: &Bindings<'_>) -> Result<Replay> {
        if !self.graphs {
            return Ok(Replay::Launch);
        }
        let key = self.key(run);
        let replayed = self.device.replay(&loaded.program, &key);
        if replayed.map_err(|e| self.error(e))? {
            return Ok(Replay::Done);
        }
        if loaded.program.is_worth_recording(&key) {
            return Ok(Replay::Record);
        }
        let kernels = loaded.kernels.iter().flatten();
        let lowered = kernels.filter_map(|kernel| match &**kernel {
            Kernel::Cuda(kernel) => Some(&kernel.lowered),
            Kernel::Cpu(_) => None,
        });
        self.device
            .foresee(lowered, run.sizes)
            .map_err(|e| self.error(e))?;
        Ok(Replay::Launch)
    }

    /// Makes a graph of a run's steps, and replays it; `false` if the device keeps no graph of it.
    pub(super) fn record(
        &mut self,
        loaded: &Loaded,
        run: &Bindings<'_>,
        steps: &[Recorded],
    ) -> Result<bool> {
        let arguments = |&step: &usize| {
            if let Recorded::Run { arguments, .. } = &steps[step] {
                &arguments[..]
            } else {
                &[]
            }
        };
        let fused: Vec<Vec<Region>> = loaded
            .groups
            .iter()
            .map(|group| group.members.iter().flat_map(arguments).copied().collect())
            .collect();
        let mut work = Vec::with_capacity(steps.len());
        for recorded in steps {
            match recorded {
                Recorded::Run {
                    step,
                    arguments,
                    workspace,
                } => {
                    let (step, workspace) = (*step, *workspace);
                    let Some(kernel) = &loaded.kernels[step] else {
                        return Err(Error::Internal(format!("step {step} has no kernel")));
                    };
                    let kernel = cuda_kernel(step, kernel)?;
                    within(&kernel.spec, arguments, run.sizes)?;
                    let group = loaded
                        .groups
                        .iter()
                        .position(|group| group.members.contains(&step));
                    match group.map(|g| (g, &loaded.groups[g])) {
                        None => work.push(Work::Launch(Launch {
                            step,
                            kernel: &kernel.lowered,
                            arguments,
                            workspace,
                        })),
                        Some((g, group)) if group.turn == step => {
                            work.push(Work::Launch(Launch {
                                step: steps.len() + g,
                                kernel: &group.kernel,
                                arguments: &fused[g],
                                workspace,
                            }));
                        }
                        Some(_) => {}
                    }
                }
                Recorded::Start { copy, from, to } => work.push(Work::Start {
                    copy: *copy,
                    from: *from,
                    to: *to,
                }),
                Recorded::Finish(copy) => work.push(Work::Finish(*copy)),
            }
        }
        let key = self.key(run);
        let graph = Run {
            key: &key,
            env: run.sizes,
            checked: !loaded.checks.is_empty(),
            after: loaded.after.as_deref(),
            early: self.overlap.launches,
        };
        let recorded = self
            .device
            .record(&loaded.program, &graph, work.into_iter());
        recorded.map_err(|e| self.error(e))?;
        let replayed = self.device.replay(&loaded.program, &key);
        replayed.map_err(|e| self.error(e))
    }
}
