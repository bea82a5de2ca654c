//! Verifies a plan from the dag alone.
//!
//! Planning is a search: orders are guessed, pairs are chosen, heuristics compete, and this code
//! will keep changing. None of it has to be correct for a run to be correct. The properties that a
//! run relies on are few and independent of the search: every task runs once and after its
//! dependencies; from the first write of a buffer to its last use, none of its bytes belong to
//! anything else; the only exception is a declared pair, at the one step where the first buffer
//! dies and the second is born. This module states exactly that, recomputes all facts it needs from
//! the dag and the order, and shares no code with ordering, liveness, in-place choice and packing.
//! A plan that passes is correct however it was found. Therefore checking each result, which costs
//! O(n log n), guarantees for every plan that is used the same as a proof of the planner would. The
//! idea is that of the symbolic checker of the register allocator regalloc2:
//! <https://cfallin.org/blog/2021/03/15/cranelift-isel-3/>. Only this module has to be trusted; it is
//! tested against a naive quadratic oracle and by breaking valid plans in every way it can detect.
//!
//! The numbers of a plan (height, lower bound, size without reuse) are recomputed as well, because
//! users make decisions by them.

use crate::dag::{ALIGN, Dag, Space};
use crate::plan::Plan;
use slabwise_packer::Lifetime;
use std::collections::BTreeMap;
use std::ops::Deref;

mod numbers;
mod offload;
mod order;
mod overlap;
mod repeats;
mod reuse;
mod violation;

pub use offload::{OffloadViolation, check_offload};
use order::steps;
pub use overlap::{OverlapViolation, check_overlap};
pub use repeats::{RepeatViolation, check_repeats};
pub use violation::Violation;

/// A value accepted by [`check()`] or a related check; it cannot be made in another way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checked<T>(T);

impl<T> Deref for Checked<T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T> Checked<T> {
    /// Returns the value; the promise that it was checked is lost.
    pub fn into_inner(self) -> T {
        self.0
    }
}

/// Accepts a correct plan, or returns the first broken invariant. O(n log n).
pub fn check(dag: &Dag, plan: Plan) -> Result<Checked<Plan>, Violation> {
    dag.verify()?;
    let checker = Checker {
        dag,
        plan: &plan,
        step_of: steps(dag, &plan)?,
    };
    checker.dependencies()?;
    checker.lifetimes()?;
    let delayed = checker.reuse()?;
    let tenants = checker.tenants(&delayed)?;
    checker.overlaps(&tenants)?;
    checker.numbers(&tenants)?;
    Ok(Checked(plan))
}

/// Accepts the order and the offsets of a plan for another dag of the same tasks: one whose buffers
/// are smaller, as those of shorter inputs are. The plan's sizes are not checked. O(n log n).
pub fn check_within(dag: &Dag, plan: &Plan) -> Result<(), Violation> {
    dag.verify()?;
    let checker = Checker {
        dag,
        plan,
        step_of: steps(dag, plan)?,
    };
    checker.dependencies()?;
    checker.lifetimes()?;
    let delayed = checker.reuse()?;
    checker.overlaps(&checker.tenants(&delayed)?)
}

/// An occupant of bytes for some steps.
struct Tenant {
    space: Space,
    /// Index of the buffer, or of the task whose workspace it is.
    index: usize,
    is_workspace: bool,
    offset: u64,
    bytes: u64,
    /// The first step at which its bytes are exclusively its own. A buffer computed in place begins
    /// one step late here: at the step itself, the buffer it takes over, at the same offset and no
    /// smaller, stands for both.
    start: u64,
    end: u64,
}

struct Checker<'a> {
    dag: &'a Dag,
    plan: &'a Plan,
    step_of: Vec<usize>,
}

impl Checker<'_> {
    fn task(&self, index: usize) -> String {
        self.dag.tasks[index].name.clone()
    }

    fn buffer(&self, index: usize) -> String {
        self.dag.buffers[index].name.clone()
    }

    /// Checks each lifetime against the definition: first to last touching step, extended for
    /// inputs and outputs.
    fn lifetimes(&self) -> Result<(), Violation> {
        let steps = self.dag.tasks.len().max(1) as u64;
        let mut expected: Vec<(u64, u64)> = vec![(u64::MAX, 0); self.dag.buffers.len()];
        for (t, task) in self.dag.tasks.iter().enumerate() {
            let step = self.step_of[t] as u64;
            for id in task.writes.iter().chain(&task.reads) {
                let (start, end) = &mut expected[id.index()];
                *start = step.min(*start);
                *end = (step + 1).max(*end);
            }
        }
        for (b, buffer) in self.dag.buffers.iter().enumerate() {
            let (mut start, mut end) = expected[b];
            if buffer.live_in {
                (start, end) = (0, end.max(1));
            }
            if buffer.live_out {
                end = steps;
            }
            let expected = if start == u64::MAX {
                Lifetime { start: 0, end: 0 }
            } else {
                Lifetime { start, end }
            };
            if self.plan.lifetimes[b] != expected {
                return Err(Violation::WrongLifetime {
                    buffer: self.buffer(b),
                    expected,
                    found: self.plan.lifetimes[b],
                });
            }
        }
        Ok(())
    }

    /// The occupants of bytes, checked to be aligned and inside the slab. A buffer without bytes or
    /// life may lie anywhere.
    fn tenants(&self, delayed: &[bool]) -> Result<Vec<Tenant>, Violation> {
        let mut tenants = Vec::with_capacity(self.dag.buffers.len());
        for (index, buffer) in self
            .dag
            .buffers
            .iter()
            .enumerate()
            .filter(|(_, buffer)| buffer.bytes > 0)
        {
            let (life, offset) = (self.plan.lifetimes[index], self.plan.offsets[index]);
            if life.start == life.end {
                continue;
            }
            self.inside(
                buffer.space,
                &buffer.name,
                offset,
                buffer.occupied(),
                buffer.align,
            )?;
            let start = life.start + u64::from(delayed[index]);
            tenants.push(Tenant {
                space: buffer.space,
                index,
                is_workspace: false,
                offset,
                bytes: buffer.occupied(),
                start,
                end: life.end,
            });
        }
        for (index, task) in self
            .dag
            .tasks
            .iter()
            .enumerate()
            .filter(|(_, task)| task.workspace > 0)
        {
            let (offset, bytes) = (
                self.plan.workspace_offsets[index],
                task.workspace_occupied(),
            );
            self.inside(Space::Device, &task.name, offset, bytes, ALIGN)?;
            let start = self.step_of[index] as u64;
            tenants.push(Tenant {
                space: Space::Device,
                index,
                is_workspace: true,
                offset,
                bytes,
                start,
                end: start + 1,
            });
        }
        Ok(tenants)
    }

    fn height(&self, space: Space) -> u64 {
        match space {
            Space::Device => self.plan.height,
            Space::Host => self.plan.host_height,
        }
    }

    fn inside(
        &self,
        space: Space,
        name: &str,
        offset: u64,
        bytes: u64,
        align: u64,
    ) -> Result<(), Violation> {
        if !offset.is_multiple_of(align) {
            return Err(Violation::Misaligned {
                name: name.into(),
                offset,
                align,
            });
        }
        let height = self.height(space);
        if offset.checked_add(bytes).is_none_or(|end| end > height) {
            return Err(Violation::OutOfSlab {
                name: name.into(),
                offset,
                bytes,
                height,
            });
        }
        Ok(())
    }

    /// A sweep over the steps with the live tenants sorted by offset: as long as no two overlap, a
    /// new one can only overlap its neighbours.
    fn overlaps(&self, tenants: &[Tenant]) -> Result<(), Violation> {
        let mut events: Vec<(u64, bool, usize)> = Vec::with_capacity(2 * tenants.len());
        for (i, tenant) in tenants
            .iter()
            .enumerate()
            .filter(|(_, tenant)| tenant.start < tenant.end)
        {
            // At each step, ends are processed before starts.
            events.extend([(tenant.start, true, i), (tenant.end, false, i)]);
        }
        events.sort_unstable();
        let mut living: BTreeMap<(Space, u64), &Tenant> = BTreeMap::new();
        for (step, arrives, i) in events {
            let tenant = &tenants[i];
            let at = |offset| (tenant.space, offset);
            if !arrives {
                living.remove(&at(tenant.offset));
                continue;
            }
            let end = tenant.offset + tenant.bytes;
            let below = living
                .range(at(0)..at(end))
                .next_back()
                .map(|(_, other)| *other);
            if let Some(other) = below.filter(|other| other.offset + other.bytes > tenant.offset) {
                return Err(self.overlap(other, tenant, step as usize));
            }
            living.insert(at(tenant.offset), tenant);
        }
        Ok(())
    }

    fn overlap(&self, first: &Tenant, second: &Tenant, step: usize) -> Violation {
        let range = |tenant: &Tenant| (tenant.offset, tenant.offset + tenant.bytes);
        // Two workspaces never meet, because each task has a step to itself.
        match (first.is_workspace, second.is_workspace) {
            (false, false) => Violation::Overlap {
                first: self.buffer(first.index),
                first_bytes: range(first),
                second: self.buffer(second.index),
                second_bytes: range(second),
                step,
            },
            (is_first, _) => {
                let (workspace, buffer) = if is_first {
                    (first, second)
                } else {
                    (second, first)
                };
                Violation::WorkspaceOverlap {
                    task: self.task(workspace.index),
                    workspace_bytes: range(workspace),
                    buffer: self.buffer(buffer.index),
                    buffer_bytes: range(buffer),
                    step,
                }
            }
        }
    }
}
