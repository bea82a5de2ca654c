//! Liveness: the steps at which each buffer holds bytes, under one order of the tasks.

use crate::dag::{Dag, TaskId};
use slabwise_packer::Lifetime;

/// The lifetime of each buffer when the tasks run in `order`, which must respect the dependencies.
///
/// From the step of the first writer to the step of the last task that touches it. Data present at
/// the start is live from step 0 and for at least that step (all inputs exist together); outputs
/// are live to the last step. A buffer that no task touches and that holds no data has an empty
/// lifetime.
pub(crate) fn lifetimes(dag: &Dag, order: &[TaskId]) -> Vec<Lifetime> {
    let mut lives: Vec<Option<Lifetime>> = dag
        .buffers
        .iter()
        .map(|b| b.live_in.then_some(Lifetime::new(0, 1)))
        .collect();
    for (step, &task) in (0u64..).zip(order) {
        let task = &dag.tasks[task.index()];
        for buffer in task.reads.iter().chain(&task.writes) {
            lives[buffer.index()]
                .get_or_insert(Lifetime::new(step, step))
                .end = step + 1;
        }
    }
    let end = dag.steps() as u64;
    let out = |(live, buffer): (Option<Lifetime>, &crate::dag::Buffer)| {
        let live = live.unwrap_or_default();
        if buffer.live_out {
            Lifetime { end, ..live }
        } else {
            live
        }
    };
    lives.into_iter().zip(&dag.buffers).map(out).collect()
}

/// An array with range addition and range maximum, each in logarithmic time: a segment tree whose
/// inner nodes hold the amount added to all of their range, and the largest value below.
pub(crate) struct Profile {
    leaves: usize,
    added: Vec<i128>,
    largest: Vec<i128>,
}

impl Profile {
    /// All zeros.
    pub(crate) fn new(positions: usize) -> Self {
        let leaves = positions.next_power_of_two();
        Profile {
            leaves,
            added: vec![0; 2 * leaves],
            largest: vec![0; 2 * leaves],
        }
    }

    /// Adds to every position of a range.
    pub(crate) fn add(&mut self, range: Lifetime, amount: i128) {
        if !range.is_empty() {
            self.add_below(1, Lifetime::new(0, self.leaves as u64), range, amount);
        }
    }

    /// The largest number in a range; 0 for an empty one.
    pub(crate) fn max(&self, range: Lifetime) -> i128 {
        self.max_below(1, Lifetime::new(0, self.leaves as u64), range)
            .unwrap_or(0)
    }

    fn add_below(&mut self, node: usize, span: Lifetime, range: Lifetime, amount: i128) {
        if !span.overlaps(range) {
            return;
        }
        if range.start <= span.start && span.end <= range.end {
            self.added[node] += amount;
            self.largest[node] += amount;
            return;
        }
        let middle = span.start.midpoint(span.end);
        self.add_below(2 * node, Lifetime::new(span.start, middle), range, amount);
        self.add_below(2 * node + 1, Lifetime::new(middle, span.end), range, amount);
        self.largest[node] =
            self.added[node] + self.largest[2 * node].max(self.largest[2 * node + 1]);
    }

    fn max_below(&self, node: usize, span: Lifetime, range: Lifetime) -> Option<i128> {
        if !span.overlaps(range) {
            return None;
        }
        if range.start <= span.start && span.end <= range.end {
            return Some(self.largest[node]);
        }
        let middle = span.start.midpoint(span.end);
        let left = self.max_below(2 * node, Lifetime::new(span.start, middle), range);
        let right = self.max_below(2 * node + 1, Lifetime::new(middle, span.end), range);
        left.max(right).map(|largest| largest + self.added[node])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn profile_agrees_with_a_plain_array() {
        arbtest::arbtest(|u| {
            let positions = u.int_in_range(1..=40usize)?;
            let (mut profile, mut plain) = (Profile::new(positions), vec![0i128; positions]);
            for _ in 0..u.int_in_range(0..=30)? {
                let start = u.int_in_range(0..=positions - 1)?;
                let end = u.int_in_range(start..=positions)?;
                let range = Lifetime::new(start as u64, end as u64);
                let amount = i128::from(u.int_in_range(-50..=50i8)?);
                profile.add(range, amount);
                plain[start..end].iter_mut().for_each(|n| *n += amount);
                let (from, to) = (u.int_in_range(0..=start)?, end);
                let expected = plain[from..to].iter().copied().max().unwrap_or(0);
                assert_eq!(profile.max(Lifetime::new(from as u64, to as u64)), expected);
            }
            Ok(())
        });
    }
}
