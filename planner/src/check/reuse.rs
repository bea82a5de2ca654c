//! Checks the pairs of buffers that are computed in place.

use super::Checker;
use super::violation::Violation;
use crate::dag::TaskId;

impl Checker<'_> {
    /// Checks every pair that is computed in place; returns for each buffer whether it begins that
    /// way.
    pub(super) fn reuse(&self) -> Result<Vec<bool>, Violation> {
        let mut declared = self.dag.may_reuse.clone();
        declared.sort_unstable();
        let buffers = self.dag.buffers.len();
        let (mut gives, mut takes): (Vec<Option<TaskId>>, Vec<Option<TaskId>>) =
            (vec![None; buffers], vec![None; buffers]);
        for (index, pair) in self.plan.reused.iter().enumerate() {
            if declared.binary_search(pair).is_err() {
                return Err(Violation::ReuseUndeclared {
                    index,
                    task: pair.task.0,
                    from: pair.from.0,
                    to: pair.to.0,
                });
            }
            let (task, from, to) = (
                self.task(pair.task.index()),
                self.buffer(pair.from.index()),
                self.buffer(pair.to.index()),
            );
            let step = self.step_of[pair.task.index()];
            for (buffer, sides) in [(pair.from, &mut gives), (pair.to, &mut takes)] {
                if let Some(first) = sides[buffer.index()].replace(pair.task) {
                    let (buffer, first) = (self.buffer(buffer.index()), self.task(first.index()));
                    return Err(Violation::ReusedTwice {
                        buffer,
                        first,
                        second: task,
                    });
                }
            }
            let end = self.plan.lifetimes[pair.from.index()].end;
            if end != step as u64 + 1 {
                return Err(Violation::ReuseOfLive {
                    task,
                    step,
                    from,
                    to,
                    end,
                });
            }
            let start = self.plan.lifetimes[pair.to.index()].start;
            if start != step as u64 {
                return Err(Violation::ReuseByLive {
                    task,
                    step,
                    from,
                    to,
                    start,
                });
            }
            let (from_offset, to_offset) = (
                self.plan.offsets[pair.from.index()],
                self.plan.offsets[pair.to.index()],
            );
            if from_offset != to_offset {
                return Err(Violation::ReuseMoved {
                    task,
                    from,
                    from_offset,
                    to,
                    to_offset,
                });
            }
            let (source, target) = (
                &self.dag.buffers[pair.from.index()],
                &self.dag.buffers[pair.to.index()],
            );
            let (from_bytes, to_bytes) = (source.occupied(), target.occupied());
            if to_bytes > from_bytes {
                return Err(Violation::ReuseTooSmall {
                    task,
                    from,
                    from_bytes,
                    to,
                    to_bytes,
                });
            }
        }
        Ok(takes.into_iter().map(|task| task.is_some()).collect())
    }
}
