//! From one state to the next: what may run at once without loss, and what remains to be chosen.
//!
//! Let a step fit if the bytes it needs stay below a threshold. A ready task that fits and does not
//! raise the live bytes can run now: in any order that stays below the threshold it can be moved
//! here, since by submodularity it raises the live bytes nowhere later either. The same holds for a
//! ready task together with some of those that become ready by it, if all of these fit, none of
//! these raises the live bytes and all of them together do not. So a weight's gradient brings its
//! update along.

use super::compact::{Compact, Mark, Walk, key};
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
        if is_past(self.deadline) {
            self.effort = 0;
        }
        self.effort > 0
    }

    /// Does something that may take only part of what is left.
    pub(super) fn within<T>(&mut self, most: u64, work: impl FnOnce(&mut Limits) -> T) -> T {
        let allowed = most.min(self.effort);
        let mut part = Limits {
            effort: allowed,
            ..*self
        };
        let result = work(&mut part);
        self.spend(allowed - part.effort);
        result
    }

    pub(super) fn is_over(&self) -> bool {
        self.effort == 0 || is_past(self.deadline)
    }
}

/// Whether the time is over, if there is an end to it.
pub(super) fn is_past(deadline: Option<Instant>) -> bool {
    deadline.is_some_and(|deadline| Instant::now() >= deadline)
}

/// A choice in a state.
#[derive(Clone, Copy, Debug)]
pub(super) struct Child {
    /// The task to run.
    pub(super) task: u32,
    /// The live bytes it leads to, as far as they are known.
    pub(super) live: i128,
    /// The key of the state it leads to, as far as that is known.
    pub(super) key: u128,
}

/// A walk and which tasks are ready.
#[derive(Clone)]
pub(super) struct State<'a> {
    pub(super) walk: Walk<'a>,
    /// Ascending.
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
    pub(super) fn new(problem: &'a Compact) -> Self {
        let walk = Walk::new(problem);
        let ready = (0..problem.tasks() as u32)
            .filter(|&t| walk.is_ready(t))
            .collect();
        State { walk, ready }
    }

    /// Whether all tasks have run.
    pub(super) fn is_complete(&self) -> bool {
        self.walk.log.len() == self.walk.problem.tasks()
    }

    /// Runs a task and what can run without loss then.
    pub(super) fn follow(&mut self, task: u32, threshold: i128) {
        let mark = self.walk.mark();
        self.run(task, threshold);
        self.update_ready(mark);
    }

    fn run(&mut self, task: u32, threshold: i128) {
        self.walk.apply(task);
        self.walk.close(threshold, 0);
    }

    fn update_ready(&mut self, mark: Mark) {
        let State { walk, ready } = self;
        ready.retain(|&task| walk.is_ready(task));
        let old = ready.len();
        for &task in walk.since(mark) {
            ready.extend(
                walk.problem
                    .after
                    .row(task as usize)
                    .iter()
                    .filter(|&&next| walk.is_ready(next)),
            );
        }
        if ready.len() > old {
            ready.sort_unstable();
            ready.dedup();
        }
    }

    /// Runs what can run without loss while steps need `threshold` at most, then appends the
    /// choices that are left.
    pub(super) fn expand(
        &mut self,
        threshold: i128,
        thorough: bool,
        children: &mut Vec<Child>,
    ) -> Expansion {
        let first = children.len();
        let mut expansion = Expansion {
            exceeded: i128::MAX,
            effort: 0,
        };
        let mut start = self.walk.mark();
        // The least that was needed by a step not taken where there was only one that fitted.
        let mut passed_by = i128::MAX;
        self.walk.affected.clear();
        'closing: loop {
            // What the last step concerned, before everything is looked at again.
            while let Some(task) = self.walk.affected.pop() {
                if self.walk.is_ready(task) {
                    self.advance(task, threshold, false, &mut expansion);
                }
            }
            self.update_ready(start);
            start = self.walk.mark();
            children.truncate(first);
            expansion.exceeded = passed_by;
            for at in 0..self.ready.len() {
                match self.advance(self.ready[at], threshold, thorough, &mut expansion) {
                    Advance::Done => continue 'closing,
                    Advance::Child(child) => children.push(child),
                    Advance::Exceeded(need) => expansion.exceeded = expansion.exceeded.min(need),
                }
            }
            if let [only] = children[first..] {
                passed_by = expansion.exceeded;
                self.run(only.task, threshold);
                continue;
            }
            return expansion;
        }
    }

    /// Runs a ready task if nothing is lost by it, else tells where it would lead.
    fn advance(
        &mut self,
        task: u32,
        threshold: i128,
        thorough: bool,
        expansion: &mut Expansion,
    ) -> Advance {
        let walk = &mut self.walk;
        let start = walk.mark();
        let change = walk.change(task);
        expansion.effort += 1;
        let need = start.live + change.need;
        if need > threshold {
            return Advance::Exceeded(need);
        }
        if change.net <= 0 {
            self.run(task, threshold);
            return Advance::Done;
        }
        if !thorough && !walk.enables(task) {
            return Advance::Child(Child {
                task,
                live: start.live + change.net,
                key: start.key ^ key(task),
            });
        }
        let affected = walk.affected.len();
        walk.apply(task);
        walk.close(threshold, start.len + 1);
        expansion.effort += 2 * walk.since(start).len() as u64;
        if walk.live <= start.live {
            return Advance::Done;
        }
        if thorough {
            let noted = walk.affected.split_off(affected);
            walk.touched.extend(noted);
            walk.close(threshold, 0);
        }
        let child = Child {
            task,
            live: walk.live,
            key: walk.key,
        };
        walk.undo(start);
        walk.affected.truncate(affected);
        Advance::Child(child)
    }
}

enum Advance {
    /// It ran.
    Done,
    /// It is one of the choices.
    Child(Child),
    /// It would need more than the threshold.
    Exceeded(i128),
}

impl Walk<'_> {
    /// Runs the touched tasks, and those they touch, that fit and do not raise the live bytes, if
    /// they became ready when `since` tasks or more had run. The others that are ready are
    /// affected.
    fn close(&mut self, threshold: i128, since: usize) {
        let mut unfit = Vec::new();
        while let Some(task) = self.touched.pop() {
            if !self.is_ready(task) {
                continue;
            }
            let change = self.change(task);
            if change.net > 0 || self.ready_since[task as usize] < since {
                self.affected.push(task);
            } else if self.live + change.need > threshold {
                unfit.push(task);
            } else {
                self.apply(task);
                if change.net < 0 {
                    self.touched.append(&mut unfit);
                }
            }
        }
        self.affected.append(&mut unfit);
    }
}
