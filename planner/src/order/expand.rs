//! From one state to the next: what may run at once without loss, and what remains to be chosen.
//!
//! Let a step fit if the bytes it needs stay below a threshold. A ready task that fits and does not raise the live bytes
//! can run now: in any order that stays below the threshold it can be moved here, since by submodularity it raises the live
//! bytes nowhere later either. The same holds for a ready task together with some of those that become ready by it, if all
//! of these fit, none of these raises the live bytes and all of them together do not. So a weight's gradient brings its
//! update along.

use super::compact::{Mark, Walk};
use std::time::Instant;

/// How much searching is allowed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Changes that may still be computed, or the like.
    pub(super) effort: u64,
    /// When to stop in any case.
    pub(super) deadline: Option<Instant>,
}

impl Limits {
    /// Takes some effort off; whether more is allowed.
    pub(super) fn spend(&mut self, effort: u64) -> bool {
        self.effort = self.effort.saturating_sub(effort);
        if self.deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            self.effort = 0;
        }
        self.effort > 0
    }

    pub(super) fn is_over(&self) -> bool {
        self.effort == 0
    }
}

/// A state one choice further.
#[derive(Clone, Debug)]
pub(super) struct Child {
    /// What runs to get there.
    pub(super) segment: Box<[u32]>,
    pub(super) live: i128,
    pub(super) key: u128,
}

/// A closed state: a walk, and which tasks are ready.
#[derive(Clone)]
pub(super) struct State<'a> {
    pub(super) walk: Walk<'a>,
    pub(super) ready: Vec<u32>,
}

/// What expanding a state found.
pub(super) struct Expansion {
    /// The least that a step needed which did not fit; `i128::MAX` if all did.
    pub(super) exceeded: i128,
    /// What it took.
    pub(super) effort: u64,
}

impl<'a> State<'a> {
    /// Nothing has run.
    pub(super) fn new(walk: Walk<'a>) -> Self {
        let ready = (0..walk.problem.tasks() as u32).filter(|&t| walk.is_ready(t)).collect();
        State { walk, ready }
    }

    /// Runs tasks that are known to be possible one after the other.
    pub(super) fn follow(&mut self, segment: &[u32]) {
        let mark = self.walk.mark();
        segment.iter().for_each(|&task| self.walk.apply(task));
        self.walk.touched.clear();
        self.update_ready(mark);
    }

    fn update_ready(&mut self, mark: Mark) {
        let State { walk, ready } = self;
        for &task in walk.since(mark) {
            ready.extend(walk.problem.after.row(task as usize).iter().filter(|&&next| walk.is_ready(next)));
        }
        ready.retain(|&task| walk.is_ready(task));
        ready.sort_unstable();
        ready.dedup();
    }

    /// Runs what can run without loss while steps need `threshold` at most, then appends the states to which one more such
    /// step leads.
    pub(super) fn expand(&mut self, threshold: i128, children: &mut Vec<Child>) -> Expansion {
        let first = children.len();
        let mut expansion = Expansion { exceeded: i128::MAX, effort: 0 };
        let mut deferred = Vec::new();
        'closing: loop {
            children.truncate(first);
            let start = self.walk.mark();
            let changes: Vec<_> = self.ready.iter().map(|&task| (task, self.walk.change(task))).collect();
            expansion.effort += changes.len() as u64;
            let idle: Vec<u32> = changes.iter().filter(|(_, change)| change.net <= 0).map(|&(task, _)| task).collect();
            if changes.iter().any(|&(_, change)| change.net <= 0 && self.walk.live + change.need <= threshold) {
                self.walk.touched.extend(&idle);
                close(&mut self.walk, threshold, None);
                self.update_ready(start);
                continue;
            }
            let mut alternatives = 0;
            for &(task, change) in &changes {
                let need = start.live + change.need;
                if need > threshold {
                    expansion.exceeded = expansion.exceeded.min(need);
                    continue;
                }
                alternatives += 1;
                self.walk.apply(task);
                deferred.clear();
                close(&mut self.walk, threshold, Some((&self.ready, &mut deferred)));
                let without_loss = self.walk.live <= start.live;
                self.walk.touched.extend(&deferred);
                self.walk.touched.extend(&idle);
                close(&mut self.walk, threshold, None);
                expansion.effort += 2 * self.walk.since(start).len() as u64;
                if without_loss || changes.len() == 1 {
                    self.update_ready(start);
                    continue 'closing;
                }
                let segment = self.walk.since(start).into();
                children.push(Child { segment, live: self.walk.live, key: self.walk.key });
                self.walk.undo(start);
            }
            if alternatives == 1 {
                // The only way on.
                if let Some(child) = children.pop() {
                    self.follow(&child.segment);
                    continue;
                }
            }
            return expansion;
        }
    }
}


/// Runs the touched tasks, and those they touch, that fit and do not raise the live bytes. Tasks of a list are only noted in
/// the other if there are two.
fn close(walk: &mut Walk, threshold: i128, mut spared: Option<(&Vec<u32>, &mut Vec<u32>)>) {
    let mut unfit = Vec::new();
    while let Some(task) = walk.touched.pop() {
        if !walk.is_ready(task) {
            continue;
        }
        if let Some((spared, noted)) = &mut spared
            && spared.binary_search(&task).is_ok()
        {
            noted.push(task);
            continue;
        }
        let change = walk.change(task);
        if change.net > 0 {
            continue;
        }
        if walk.live + change.need > threshold {
            unfit.push(task);
            continue;
        }
        walk.apply(task);
        if change.net < 0 {
            walk.touched.append(&mut unfit);
        }
    }
}
