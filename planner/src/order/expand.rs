//! Transitions between states: the tasks that can run at once without loss, and the remaining
//! choices.
//!
//! Let a step fit if the bytes it needs stay below a threshold. A ready task that fits and does not
//! raise the live bytes can run now: in any order that stays below the threshold it can be moved
//! here, because by submodularity it raises the live bytes at no later point either. The same holds
//! for a ready task together with some of the tasks that it makes ready, if all of these fit, none
//! of the latter raises the live bytes, and all of them together do not. For example, a weight's
//! gradient runs together with its update.

use super::compact::{Compact, Mark, Walk, key};
use std::time::Instant;

/// The limits of a search.
#[derive(Clone, Copy, Debug)]
pub(super) struct SearchLimits {
    /// The number of changes, or comparable operations, that may still be computed.
    pub(super) effort: u64,
    /// The time to stop in any case.
    pub(super) deadline: Option<Instant>,
}

impl SearchLimits {
    /// Spends some effort; returns whether any is left.
    pub(super) fn spend(&mut self, effort: u64) -> bool {
        self.effort = self.effort.saturating_sub(effort);
        if is_past(self.deadline) {
            self.effort = 0;
        }
        self.effort > 0
    }

    /// Runs `work` with only a part of the remaining effort.
    pub(super) fn within<T>(&mut self, most: u64, work: impl FnOnce(&mut SearchLimits) -> T) -> T {
        let allowed = most.min(self.effort);
        let mut part = SearchLimits {
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

/// Whether the time is over, if it is limited.
pub(super) fn is_past(deadline: Option<Instant>) -> bool {
    deadline.is_some_and(|deadline| Instant::now() >= deadline)
}

/// A choice in a state.
#[derive(Clone, Copy, Debug)]
pub(super) struct Child {
    /// The task of the choice.
    pub(super) task: u32,
    /// The live bytes of the next state, as far as they are known.
    pub(super) live: i128,
    /// The key of the next state, as far as it is known.
    pub(super) key: u128,
}

/// A walk and its ready tasks.
#[derive(Clone)]
pub(super) struct State<'a> {
    pub(super) walk: Walk<'a>,
    /// Ascending.
    pub(super) ready: Vec<u32>,
}

/// The result of expanding a state.
pub(super) struct Expansion {
    /// The least need of a step that did not fit; `i128::MAX` if all did.
    pub(super) exceeded: i128,
    /// The effort spent.
    pub(super) effort: u64,
}

impl<'a> State<'a> {
    /// The state in which no task has run.
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

    /// Runs a task, and then all tasks that can run without loss.
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

    /// Runs all tasks that can run without loss while steps need at most `threshold`, then appends
    /// the remaining choices.
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
        // The least need of a step that did not fit while only one did.
        let mut passed_by = i128::MAX;
        self.walk.affected.clear();
        'closing: loop {
            // The tasks affected by the last step come first, before all ready tasks are checked
            // again.
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

    /// Runs a ready task if that loses nothing; otherwise returns the state it would lead to.
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
    /// The task ran.
    Done,
    /// The task is one of the choices.
    Child(Child),
    /// The task would need more than the threshold.
    Exceeded(i128),
}

impl Walk<'_> {
    /// Runs the touched tasks, and those they touch in turn, that fit and do not raise the live
    /// bytes, if they became ready when at least `since` tasks had run. The other ready ones are
    /// marked as affected.
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
