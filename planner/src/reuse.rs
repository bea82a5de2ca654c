//! The choice among the permitted in-place computations.
//!
//! A chosen pair puts two buffers on the same bytes, one after the other, so chains of pairs become
//! one rectangle of steps and bytes, as large as its first buffer. Between buffers of one size this
//! never costs bytes: the second buffer's bytes are saved at the step that computes it. A smaller
//! buffer that takes over a larger one keeps the larger rectangle alive for longer. Therefore such
//! a pair is chosen only if the steps it raises stay below the current need around them.

use crate::dag::{BufferId, Dag, MayReuse, Space, TaskId};
use crate::liveness::Profile;
use slabwise_packer::Lifetime;

/// A policy for in-place pairs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReusePolicy {
    /// Only pairs of equal size, which never raise the live bytes of any step.
    EqualSizes,
    /// Also pairs of a smaller buffer on a larger one.
    AnySize,
}

/// Chains of buffers that share their bytes: for each buffer the first of its chain, and for each
/// first the last.
pub(crate) struct Chains {
    head: Vec<u32>,
    next: Vec<Option<u32>>,
}

impl Chains {
    pub(crate) fn new(buffers: usize, taken: &[MayReuse]) -> Self {
        let mut chains = Chains {
            head: (0..buffers as u32).collect(),
            next: vec![None; buffers],
        };
        let mut follows = vec![false; buffers];
        for pair in taken {
            chains.next[pair.from.index()] = Some(pair.to.0);
            follows[pair.to.index()] = true;
        }
        for first in (0..buffers).filter(|&b| !follows[b]) {
            let mut at = chains.next[first];
            while let Some(buffer) = at {
                chains.head[buffer as usize] = first as u32;
                at = chains.next[buffer as usize];
            }
        }
        chains
    }

    /// The first buffer of the chain of this one: itself, if it takes over no bytes.
    pub(crate) fn head(&self, buffer: usize) -> usize {
        self.head[buffer] as usize
    }

    /// The last buffer of the chain of this one.
    pub(crate) fn tail(&self, mut buffer: usize) -> usize {
        while let Some(next) = self.next[buffer] {
            buffer = next as usize;
        }
        buffer
    }
}

/// Chooses pairs of the dag under one order, larger savings first. Each buffer takes part in at
/// most one pair as `from` and at most one as `to`.
pub(crate) fn choose(
    dag: &Dag,
    order: &[TaskId],
    lives: &[Lifetime],
    policy: ReusePolicy,
) -> Vec<MayReuse> {
    let mut step_of = vec![0u64; dag.tasks.len()];
    for (step, task) in (0u64..).zip(order) {
        step_of[task.index()] = step;
    }
    let bytes = |id: BufferId| dag.buffers[id.index()].occupied();
    let fits = |pair: &&MayReuse| {
        let step = step_of[pair.task.index()];
        let (from, to) = (
            &dag.buffers[pair.from.index()],
            &dag.buffers[pair.to.index()],
        );
        let meets =
            lives[pair.from.index()].end == step + 1 && lives[pair.to.index()].start == step;
        meets
            && to.bytes > 0
            && to.align <= from.align
            // The profile of live bytes is that of the slab.
            && (policy == ReusePolicy::AnySize && to.space == Space::Device
                || from.occupied() == to.occupied())
    };
    let mut pairs: Vec<MayReuse> = dag.may_reuse.iter().filter(fits).copied().collect();
    pairs.sort_by_key(|pair| {
        (
            bytes(pair.from) != bytes(pair.to),
            std::cmp::Reverse(bytes(pair.to)),
            *pair,
        )
    });

    let mut live = LiveBytes::new(dag, order, lives);
    let mut chosen: Vec<MayReuse> = Vec::new();
    let mut is_from = vec![false; dag.buffers.len()];
    let mut is_to = is_from.clone();
    for pair in pairs {
        let (from, to) = (pair.from.index(), pair.to.index());
        if is_from[from] || is_to[to] || !live.join(from, to, step_of[pair.task.index()]) {
            continue;
        }
        (is_from[from], is_to[to]) = (true, true);
        chosen.push(pair);
    }
    chosen.sort_unstable();
    chosen
}

/// The live bytes of every step while pairs are taken one by one.
struct LiveBytes {
    profile: Profile,
    /// For each first buffer of a chain, the bytes of the chain.
    bytes: Vec<u64>,
    /// For each first buffer of a chain, the step after the chain's last.
    end: Vec<u64>,
    /// For each last buffer of a chain, its first.
    head: Vec<u32>,
    /// For each first buffer of a chain, its last.
    tail: Vec<u32>,
}

impl LiveBytes {
    fn new(dag: &Dag, order: &[TaskId], lives: &[Lifetime]) -> Self {
        let mut profile = Profile::new(dag.steps());
        for (buffer, &live) in dag.buffers.iter().zip(lives) {
            profile.add(live, i128::from(buffer.occupied_on_device()));
        }
        for (step, task) in (0u64..).zip(order) {
            profile.add(
                Lifetime::new(step, step + 1),
                i128::from(dag.tasks[task.index()].workspace_occupied()),
            );
        }
        let own: Vec<u32> = (0..dag.buffers.len() as u32).collect();
        LiveBytes {
            profile,
            bytes: dag.buffers.iter().map(|b| b.occupied_on_device()).collect(),
            end: lives.iter().map(|live| live.end).collect(),
            head: own.clone(),
            tail: own,
        }
    }

    /// Appends the chain that begins with `to` to the one that ends with `from`, unless that raises
    /// a step above the current need around it.
    fn join(&mut self, from: usize, to: usize, step: u64) -> bool {
        let first = self.head[from] as usize;
        let (small, large) = (i128::from(self.bytes[to]), i128::from(self.bytes[first]));
        let shared = Lifetime::new(step, step + 1);
        let raised = Lifetime::new(step + 1, self.end[to]);
        if large > small {
            let before = self.profile.max(Lifetime::new(step, self.end[to]));
            if self.profile.max(raised) + large - small > before {
                return false;
            }
        }
        self.profile.add(shared, -small);
        self.profile.add(raised, large - small);
        let last = self.tail[to];
        self.end[first] = self.end[to];
        self.tail[first] = last;
        self.head[last as usize] = first as u32;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dag::{Buffer, Kind, Task};
    use crate::liveness::lifetimes;

    /// a (100 units) → b (`small` units) → c, where a task between them holds `beside` units.
    fn narrowing(small: u64, beside: u64) -> (Dag, Vec<TaskId>) {
        let mut dag = Dag::new();
        let [a, b, c, side] = [
            ("a", 6400),
            ("b", 64 * small),
            ("c", 64),
            ("side", 64 * beside),
        ]
        .map(|(name, bytes)| dag.add_buffer(Buffer::new(name, Kind::Activation, bytes)));
        dag.add_task(Task::new("make a", &[], &[a]));
        let task = dag.add_task(Task::new("make b", &[a], &[b]));
        dag.add_task(Task::new("side", &[], &[side]));
        dag.add_task(Task::new("make c", &[b, side], &[c]));
        dag.may_reuse.push(MayReuse {
            task,
            from: a,
            to: b,
        });
        let order = (0..4).map(TaskId).collect();
        (dag, order)
    }

    #[test]
    fn a_small_buffer_keeps_a_large_one_only_where_it_is_harmless() {
        for (small, beside, taken) in [
            (100, 1000, true),
            (50, 1, true),
            (50, 49, true),
            (50, 51, false),
            (50, 1000, false),
        ] {
            let (dag, order) = narrowing(small, beside);
            let lives = lifetimes(&dag, &order);
            let chosen = choose(&dag, &order, &lives, ReusePolicy::AnySize);
            assert_eq!(
                chosen.len(),
                usize::from(taken),
                "{small} units beside {beside}"
            );
            let equal = choose(&dag, &order, &lives, ReusePolicy::EqualSizes);
            assert_eq!(equal.len(), usize::from(small == 100));
        }
    }

    #[test]
    fn chains_know_their_ends() {
        let pair = |from, to| MayReuse {
            task: TaskId(0),
            from: BufferId(from),
            to: BufferId(to),
        };
        let chains = Chains::new(5, &[pair(3, 1), pair(1, 4)]);
        assert_eq!([0, 1, 2, 3, 4].map(|b| chains.head(b)), [0, 3, 2, 3, 3]);
        assert_eq!([0, 1, 2, 3, 4].map(|b| chains.tail(b)), [0, 4, 2, 4, 4]);
    }
}
