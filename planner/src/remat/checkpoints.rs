//! Schedules with evenly spaced checkpoints (Chen et al., 2016), in linear time.

use super::network::Network;

/// The most steps of such a schedule, as a multiple of those of the order it is made from.
const STEPS_MAX: usize = 4;

/// The schedule that divides `order` into intervals of `length` steps and keeps the values that one
/// interval passes to the next. Each other value is dropped where it is unused for more than
/// `length` steps, and recomputed from the values kept. `None` if that takes too many steps.
pub(super) fn with_checkpoints(net: &Network, order: &[u32], length: u32) -> Option<Vec<u32>> {
    let mut made = vec![0; net.values()];
    let mut is_kept = vec![false; net.values()];
    for (at, &node) in (0u32..).zip(order) {
        for &value in net.inputs.of(node) {
            let from = made[value as usize];
            is_kept[value as usize] |= at - from <= length && at / length != from / length;
        }
        net.makes(node).for_each(|value| made[value as usize] = at);
    }
    let mut schedule = Schedule {
        net,
        length,
        is_kept,
        used: vec![0; net.values()],
        has_run: vec![false; net.len()],
        steps: Vec::new(),
    };
    for (at, &node) in (0u32..).zip(order) {
        schedule.run(node, at);
        if schedule.steps.len() > STEPS_MAX * order.len() {
            return None;
        }
    }
    Some(schedule.steps)
}

/// A schedule that is being made.
struct Schedule<'n> {
    net: &'n Network,
    length: u32,
    is_kept: Vec<bool>,
    /// By value, the step of the order at which it was made, remade or read last.
    used: Vec<u32>,
    /// By computation, whether it has run.
    has_run: Vec<bool>,
    steps: Vec<u32>,
}

impl Schedule<'_> {
    /// Adds a computation, after those that make its dropped operands again.
    fn run(&mut self, node: u32, at: u32) {
        // Computations and the number of their operands that are there.
        let mut path = vec![(node, 0)];
        while let Some((node, done)) = path.last_mut() {
            let inputs = &self.net.inputs.of(*node)[*done..];
            if let Some(missing) = inputs.iter().position(|&value| !self.is_there(value, at)) {
                *done += missing;
                path.push((self.net.maker(inputs[missing]), 0));
                continue;
            }
            let node = *node;
            path.pop();
            self.steps.push(node);
            self.has_run[node as usize] = true;
            let inputs = self.net.inputs.of(node).iter().copied();
            for value in inputs.chain(self.net.makes(node)) {
                self.used[value as usize] = at;
            }
        }
    }

    /// Whether a read at this step of the order takes the latest copy of a value.
    fn is_there(&self, value: u32, at: u32) -> bool {
        let maker = self.net.maker(value);
        let changed = || {
            let later = self.net.before.of(maker).iter();
            later.into_iter().any(|&node| self.has_run[node as usize])
        };
        at - self.used[value as usize] <= self.length
            || self.is_kept[value as usize]
            || self.net.once[maker as usize]
            || changed()
    }
}
