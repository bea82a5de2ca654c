//! Copies between the slab and the host, between the calls of a program.

use slabwise_planner::{TaskId, Work};

use super::{Program, ValueId};

/// A copy between the slab and the host's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostCopy {
    /// The value that is copied.
    pub from: ValueId,
    /// The value that holds the same data after it.
    pub to: ValueId,
}

/// The start or the end of a copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CopyStep {
    /// Shown in plans.
    pub name: String,
    /// The index of the copy in [`Program::copies`].
    pub copy: u32,
    /// Whether it waits for the copy to end, rather than starts it.
    pub finishes: bool,
    /// The number of kernels before it.
    pub position: u32,
}

impl Program {
    /// The work of the tasks of its dag, in order: to run a call, or to start or end a copy.
    pub fn work(&self) -> Vec<Work> {
        let mut work = Vec::with_capacity(self.kernels.len() + self.copy_steps.len());
        let mut steps = self.copy_steps.iter().peekable();
        for at in 0..=self.kernels.len() as u32 {
            while let Some(step) = steps.next_if(|step| step.position == at) {
                work.push(match step.finishes {
                    true => Work::Finish(step.copy),
                    false => Work::Start(step.copy),
                });
            }
            work.extend(((at as usize) < self.kernels.len()).then_some(Work::Run(TaskId(at))));
        }
        work
    }
}
