//! Loops over steps: prepared kernels that run in every step.

use smallvec::SmallVec;

use super::{Config, Fault, Kernel, SpecError, Team};
use crate::memory::{Memory, Region};
use crate::size::Env;
use crate::spec::{Body, Located, MAX_ARGUMENTS, Spec};

/// See [`Body::Scan`]. Every call of every step is checked like a call outside of loops, so the
/// loop itself needs no `unsafe`.
pub(crate) struct Scan {
    kernels: Vec<Kernel>,
    scratch: u64,
}

impl Scan {
    pub fn new(spec: &Spec, bound: &Env, config: &Config) -> Result<Self, SpecError> {
        let Body::Scan(scan) = &spec.body else {
            return Err(SpecError::unsupported("not a loop over steps"));
        };
        let mut kernels = Vec::with_capacity(scan.calls.len());
        for call in &scan.calls {
            let kernel = Kernel::new(call.spec.clone(), bound, config)?;
            if kernel.workspace() > call.workspace_bytes {
                return Err(SpecError::Scan(format!(
                    "a call needs a workspace of {} bytes and has {}",
                    kernel.workspace(),
                    call.workspace_bytes
                )));
            }
            kernels.push(kernel);
        }
        Ok(Scan {
            kernels,
            scratch: scan.scratch,
        })
    }

    pub fn workspace(&self) -> u64 {
        self.scratch
    }

    pub fn run(
        &self,
        spec: &Spec,
        memory: &mut Memory,
        args: &[Region],
        workspace: &Region,
        env: &Env,
        team: &Team,
    ) -> Result<(), Fault> {
        let Body::Scan(scan) = &spec.body else {
            unreachable!("checked by new")
        };
        for step in 0..scan.steps {
            for (kernel, call) in self.kernels.iter().zip(&scan.calls) {
                let region = |place| match scan.locate(place, step, env) {
                    Located::Argument {
                        argument,
                        offset,
                        bytes,
                    } => args[usize::from(argument)].part(offset, bytes),
                    Located::Scratch(scratch) => workspace.part(scratch.offset, scratch.bytes),
                };
                let regions: SmallVec<[Region; MAX_ARGUMENTS]> =
                    call.places.iter().map(region).collect();
                let own = workspace.part(call.workspace, call.workspace_bytes);
                kernel.run(memory, &regions, &own, env, team)?;
            }
        }
        Ok(())
    }
}
