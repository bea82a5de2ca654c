//! Planning: from a [`Dag`] to a [`Plan`], which combines order, lifetimes, in-place choices and
//! offsets.

mod peak;

use crate::dag::{ALIGN, Dag, DagError, MayReuse, Space, TaskId};
use crate::liveness::lifetimes;
use crate::order::{self, OrderPolicy, Schedule, Sizes};
use crate::reuse::{Chains, ReusePolicy, choose};
use peak::without_reuse;
pub use peak::{Holder, holders_at_peak, live_bytes, peak, saved_in_place};
use slabwise_packer::{Item, Lifetime, Limits, Method, Packing, Problem, ProblemError};

/// The planner's options. By default every optimization is on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Options {
    /// The policy that orders tasks.
    pub order: OrderPolicy,
    /// Whether [`Dag::may_reuse`] is used.
    pub in_place: bool,
    /// Whether buffers may share bytes. If not, buffers and workspaces are disjoint, and `in_place`
    /// is off.
    pub reuse: bool,
    /// The effort of the search for offsets where the fast packers miss the bound, as in
    /// [`Limits::effort`], for each order that could be lower. The search for tasks to recompute
    /// under a budget scales with it too.
    pub effort: u64,
    /// Whether tasks run while collectives are in flight, as far as the bytes suffice.
    pub overlap: bool,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            order: OrderPolicy::MinPeak,
            in_place: true,
            reuse: true,
            effort: 1_000_000,
            overlap: true,
        }
    }
}

/// The reason why there is no plan.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum PlanError {
    /// The dag is broken.
    #[error(transparent)]
    Dag(#[from] DagError),
    /// The offsets cannot be computed.
    #[error(transparent)]
    Problem(#[from] ProblemError),
    /// The speed of a link to the host is invalid.
    #[error("the time to copy a byte is {cost_per_byte}, but it must be finite and not negative")]
    Link {
        /// The time for a byte.
        cost_per_byte: f64,
    },
}

/// The place of every byte of a run at every step. Made by [`plan()`], trusted only after
/// [`check`](crate::check()).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The tasks in the order of execution: the task at index `s` runs at step `s`.
    pub order: Vec<TaskId>,
    /// For each buffer, the steps at which it needs its bytes.
    pub lifetimes: Vec<Lifetime>,
    /// For each buffer, its first byte in its space.
    pub offsets: Vec<u64>,
    /// For each task (by id, not by step), the first byte of its workspace; 0 if it has none.
    pub workspace_offsets: Vec<u64>,
    /// The pairs that are computed in place, in the order of task ids.
    pub reused: Vec<MayReuse>,
    /// The size of the slab: the end of its highest item. Each item in the slab occupies whole
    /// units of its alignment.
    pub height: u64,
    /// The height of the host's space; 0 if no buffer lies there. The numbers below are of the slab
    /// alone.
    pub host_height: u64,
    /// The largest number of bytes occupied at one step, pairs in `reused` counted once: a lower
    /// bound of the slab for this order and these pairs.
    pub lower_bound: u64,
    /// The size of a slab in which no bytes are shared.
    pub without_reuse: u64,
    /// The policy that made the order.
    pub schedule: Schedule,
    /// The method that found the offsets.
    pub method: Method,
}

/// Plans a dag: the order, the pairs to compute in place, and an offset for every buffer and
/// workspace.
///
/// Candidates (orders × in-place choices) are packed in the order of their lower bounds until the
/// best slab is no larger than the next bound, so neither reordering nor in-place computation ever
/// costs bytes. Deterministic.
pub fn plan(dag: &Dag, options: &Options) -> Result<Plan, PlanError> {
    dag.verify()?;
    let mut candidates = Vec::new();
    for (schedule, order) in order::candidates(
        dag,
        options.order,
        options.in_place && options.reuse,
        Sizes::Occupied,
    ) {
        let lives = lifetimes(dag, &order);
        for reused in reuse_choices(dag, options, &order, &lives) {
            let layout = Layout::new(dag, &order, &lives, &reused);
            candidates.push(Candidate {
                schedule,
                order: order.clone(),
                lives: lives.clone(),
                reused,
                bound: layout.problem.lower_bound(),
                layout,
            });
        }
    }
    // Stable: of equal bounds the simpler candidate comes first.
    candidates.sort_by_key(|candidate| candidate.bound);
    let mut best: Option<(usize, Packing)> = None;
    let keep = |best: &mut Option<(usize, Packing)>, at: usize, packing: Packing| {
        if best
            .as_ref()
            .is_none_or(|(_, best)| packing.height < best.height)
        {
            *best = Some((at, packing));
        }
    };
    for (at, candidate) in candidates.iter().enumerate() {
        if best
            .as_ref()
            .is_some_and(|(_, best)| !options.reuse || best.height <= candidate.bound)
        {
            break;
        }
        let packing = if options.reuse {
            candidate.layout.problem.pack()?
        } else {
            candidate.layout.problem.apart()?
        };
        keep(&mut best, at, packing);
    }
    // If fast heuristics leave a gap, the candidates that could be lower are packed again with more
    // effort.
    let limits = Limits {
        effort: options.effort,
        ..Limits::default()
    };
    for (at, candidate) in candidates
        .iter()
        .enumerate()
        .filter(|_| options.reuse && options.effort > 0)
    {
        // All such candidates are searched, so that a planner with more candidates never ends up
        // higher.
        if best
            .as_ref()
            .is_some_and(|(_, best)| candidate.bound < best.height)
        {
            keep(
                &mut best,
                at,
                candidate.layout.problem.pack_within(&limits)?,
            );
        }
    }
    let (at, packing) = best.expect("the program's own order is always a candidate");
    let candidate = candidates.swap_remove(at);
    let host = match &candidate.layout.host {
        Some(host) if options.reuse => Some(host.pack_within(&limits)?),
        Some(host) => Some(host.apart()?),
        None => None,
    };
    Ok(candidate.into_plan(dag, packing, host))
}

/// The sets of pairs worth packing, the most promising first.
fn reuse_choices(
    dag: &Dag,
    options: &Options,
    order: &[TaskId],
    lives: &[Lifetime],
) -> Vec<Vec<MayReuse>> {
    let mut choices = Vec::new();
    if options.in_place && options.reuse {
        for policy in [ReusePolicy::EqualSizes, ReusePolicy::AnySize] {
            choices.push(choose(dag, order, lives, policy));
        }
    }
    choices.push(Vec::new());
    choices.dedup();
    choices
}

struct Candidate {
    schedule: Schedule,
    order: Vec<TaskId>,
    lives: Vec<Lifetime>,
    reused: Vec<MayReuse>,
    bound: u64,
    layout: Layout,
}

impl Candidate {
    fn into_plan(self, dag: &Dag, packing: Packing, host: Option<Packing>) -> Plan {
        let offset = |item: &Option<u32>| item.map_or(0, |item| packing.offsets[item as usize]);
        let mut offsets: Vec<u64> = self.layout.item_of_buffer.iter().map(offset).collect();
        for (place, item) in offsets.iter_mut().zip(&self.layout.item_on_host) {
            if let (Some(host), Some(item)) = (&host, item) {
                *place = host.offsets[*item as usize];
            }
        }
        let mut plan = Plan {
            offsets,
            workspace_offsets: self.layout.item_of_workspace.iter().map(offset).collect(),
            without_reuse: without_reuse(dag, &self.lives),
            order: self.order,
            lifetimes: self.lives,
            reused: self.reused,
            height: packing.height,
            host_height: host.map_or(0, |host| host.height),
            lower_bound: 0,
            schedule: self.schedule,
            method: packing.method,
        };
        plan.lower_bound = live_bytes(dag, &plan).into_iter().max().unwrap_or(0);
        plan
    }
}

/// A packing problem and the mapping of its items: chains of buffers that share their bytes, and
/// workspaces.
pub(crate) struct Layout {
    pub(crate) problem: Problem,
    /// For each buffer, the item it lies in; `None` for one without bytes or life, or in another
    /// space.
    pub(crate) item_of_buffer: Vec<Option<u32>>,
    /// For each task, the item that is its workspace.
    pub(crate) item_of_workspace: Vec<Option<u32>>,
    /// The packing problem of the host's space, if any buffer lies there.
    host: Option<Problem>,
    /// For each buffer, the item of the host's space it lies in.
    item_on_host: Vec<Option<u32>>,
}

impl Layout {
    pub(crate) fn new(
        dag: &Dag,
        order: &[TaskId],
        lives: &[Lifetime],
        reused: &[MayReuse],
    ) -> Self {
        let chains = Chains::new(dag.buffers.len(), reused);
        let mut items = Vec::with_capacity(dag.buffers.len());
        let mut items_on_host = Vec::new();
        let mut item_of_buffer = vec![None; dag.buffers.len()];
        let mut item_on_host = item_of_buffer.clone();
        for (i, buffer) in dag.buffers.iter().enumerate() {
            if chains.head(i) == i && buffer.bytes > 0 && !lives[i].is_empty() {
                let (items, item_of) = match buffer.space {
                    Space::Device => (&mut items, &mut item_of_buffer),
                    Space::Host => (&mut items_on_host, &mut item_on_host),
                };
                item_of[i] = Some(items.len() as u32);
                items.push(Item {
                    life: Lifetime::new(lives[i].start, lives[chains.tail(i)].end),
                    size: buffer.occupied(),
                    align: buffer.align,
                });
            }
        }
        for buffer in 0..dag.buffers.len() {
            let head = chains.head(buffer);
            item_of_buffer[buffer] = item_of_buffer[head];
            item_on_host[buffer] = item_on_host[head];
        }
        let mut item_of_workspace = vec![None; dag.tasks.len()];
        for (step, &task) in (0u64..).zip(order) {
            let size = dag.tasks[task.index()].workspace_occupied();
            if size > 0 {
                item_of_workspace[task.index()] = Some(items.len() as u32);
                items.push(Item {
                    life: Lifetime::new(step, step + 1),
                    size,
                    align: ALIGN,
                });
            }
        }
        let host = (!items_on_host.is_empty()).then(|| Problem::new(items_on_host));
        Layout {
            problem: Problem::new(items),
            item_of_buffer,
            item_of_workspace,
            host,
            item_on_host,
        }
    }
}

#[cfg(test)]
mod tests;
