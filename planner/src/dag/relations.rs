//! The uses of buffers and the dependencies between tasks, as flat arrays.

use super::{Dag, TaskId};
use std::cmp::Reverse;
use std::collections::BinaryHeap;

#[cfg(test)]
thread_local! {
    /// The number of times this thread has read tasks, buffers and places: the unit in which tests
    /// measure the work of planning.
    pub(crate) static LOOKS: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

/// Counts such reads in tests.
#[inline(always)]
pub(crate) fn count_looks(_looks: u64) {
    #[cfg(test)]
    LOOKS.set(LOOKS.get() + _looks);
}

/// For each of `n` rows, a sorted list of distinct ids (compressed sparse rows).
#[derive(Clone, Debug)]
pub(crate) struct Csr {
    starts: Vec<u32>,
    ids: Vec<u32>,
}

impl Csr {
    /// Rows from `(row, id)` pairs in any order; a pair given twice counts once.
    pub(crate) fn new(rows: usize, mut pairs: Vec<(u32, u32)>) -> Self {
        pairs.sort_unstable();
        pairs.dedup();
        let mut starts = vec![0u32; rows + 1];
        for &(row, _) in &pairs {
            starts[row as usize + 1] += 1;
        }
        for row in 0..rows {
            starts[row + 1] += starts[row];
        }
        Csr {
            starts,
            ids: pairs.into_iter().map(|(_, id)| id).collect(),
        }
    }

    /// The ids of one row, ascending.
    pub(crate) fn row(&self, row: usize) -> &[u32] {
        count_looks(1);
        &self.ids[self.starts[row] as usize..self.starts[row + 1] as usize]
    }

    /// The number of rows.
    pub(crate) fn rows(&self) -> usize {
        self.starts.len() - 1
    }

    /// The inverse relation, for `ids` ids.
    pub(crate) fn transposed(&self, ids: usize) -> Csr {
        let pairs =
            (0..self.rows()).flat_map(|row| self.row(row).iter().map(move |&id| (id, row as u32)));
        Csr::new(ids, pairs.collect())
    }
}

/// The relations that follow from the reads, writes and control dependencies of a dag whose ids are
/// in range.
pub(crate) struct Relations {
    /// Buffer → tasks that write it, in program order.
    pub(crate) writers: Csr,
    /// Task → buffers it touches.
    pub(crate) uses: Csr,
    /// Buffer → tasks that touch it.
    pub(crate) users: Csr,
    /// Task → tasks that depend on it.
    pub(crate) after: Csr,
    /// Task → tasks it depends on.
    pub(crate) before: Csr,
}

impl Relations {
    pub(crate) fn new(dag: &Dag) -> Self {
        let (tasks, buffers) = (dag.tasks.len(), dag.buffers.len());
        let mut writes = Vec::new();
        let mut touches = Vec::new();
        let mut edges = Vec::new();
        for (t, task) in (0u32..).zip(&dag.tasks) {
            writes.extend(task.writes.iter().map(|b| (b.0, t)));
            touches.extend(task.reads.iter().chain(&task.writes).map(|b| (b.0, t)));
            edges.extend(task.after.iter().map(|before| (before.0, t)));
        }
        let (writers, users) = (Csr::new(buffers, writes), Csr::new(buffers, touches));
        for buffer in 0..buffers {
            let writers = writers.row(buffer);
            edges.extend(writers.windows(2).map(|pair| (pair[0], pair[1])));
            let Some(&last) = writers.last() else {
                continue;
            };
            edges.extend(
                users
                    .row(buffer)
                    .iter()
                    .filter(|user| writers.binary_search(user).is_err())
                    .map(|&reader| (last, reader)),
            );
        }
        let after = Csr::new(tasks, edges);
        Relations {
            uses: users.transposed(tasks),
            before: after.transposed(tasks),
            writers,
            users,
            after,
        }
    }

    /// The order that respects every dependency and otherwise stays as close to the program as
    /// possible: it always takes the first ready task. Leaves out tasks on a cycle and their
    /// dependents.
    pub(crate) fn program_order(&self) -> Vec<TaskId> {
        let tasks = self.after.rows();
        let mut waiting: Vec<usize> = (0..tasks).map(|t| self.before.row(t).len()).collect();
        let mut ready: BinaryHeap<Reverse<u32>> = (0..tasks as u32)
            .filter(|&t| waiting[t as usize] == 0)
            .map(Reverse)
            .collect();
        let mut order = Vec::with_capacity(tasks);
        while let Some(Reverse(task)) = ready.pop() {
            order.push(TaskId(task));
            for &next in self.after.row(task as usize) {
                waiting[next as usize] -= 1;
                if waiting[next as usize] == 0 {
                    ready.push(Reverse(next));
                }
            }
        }
        order
    }

    /// A dependency cycle, each task dependent on the one before it, if there is one.
    pub(crate) fn find_cycle(&self) -> Option<Vec<TaskId>> {
        let order = self.program_order();
        if order.len() == self.after.rows() {
            return None;
        }
        let mut stuck = vec![true; self.after.rows()];
        order.iter().for_each(|t| stuck[t.index()] = false);
        // Every stuck task depends on a stuck one, so that following dependencies backwards must
        // close a cycle.
        let mut at = stuck.iter().position(|&stuck| stuck)? as u32;
        let mut path = Vec::new();
        let mut seen_at = vec![None; stuck.len()];
        while seen_at[at as usize].is_none() {
            seen_at[at as usize] = Some(path.len());
            path.push(TaskId(at));
            at = *self
                .before
                .row(at as usize)
                .iter()
                .find(|&&before| stuck[before as usize])?;
        }
        let mut cycle = path.split_off(seen_at[at as usize]?);
        cycle.reverse();
        Some(cycle)
    }
}
