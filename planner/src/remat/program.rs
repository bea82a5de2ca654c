//! The search on the dag of a program.

use super::clock::{Clock, Limit};
use super::network::Network;
use super::search::search;
use super::tape::Tape;
use crate::dag::{Buffer, Dag, TaskId};
use crate::order::{OrderPolicy, Sizes, candidates};
use crate::plan::Options;

/// Rounds of one search for each task, and the most of them; the most rounds times tasks. All of that with the effort that is spent
/// by default.
const ROUNDS: u64 = 20;
const ROUNDS_MAX: u64 = 4_000;
const WORK: u64 = 4_000_000;
/// The fewest rounds, whatever the effort.
const ROUNDS_MIN: u64 = 50;

/// Looks for schedules of a dag with repeats.
pub(crate) struct DagSearch {
    net: Network,
    /// Orders without repeats, the smallest peak first.
    orders: Vec<Vec<u32>>,
    /// The bytes of inputs, counted all the time.
    base: u64,
    rounds: u64,
}

impl DagSearch {
    /// For a verified dag; nothing if its bytes do not fit the search's arithmetic.
    pub fn new(dag: &Dag, options: &Options) -> Option<Self> {
        let bytes =
            dag.buffers.iter().map(|b| u128::from(b.occupied())).chain(dag.tasks.iter().map(|t| u128::from(t.workspace_occupied())));
        if bytes.sum::<u128>() >= 1 << 62 {
            return None;
        }
        let candidates = candidates(dag, OrderPolicy::MinPeak, false, Sizes::Occupied);
        let net = Network::of_dag(dag, candidates.first().map_or(&[], |(_, order)| order));
        let ranked = |(_, order): (_, Vec<TaskId>)| {
            let order: Vec<u32> = order.iter().map(|task| task.0).chain([net.sink()]).collect();
            (Tape::new(&net, &order).peak(), order)
        };
        let mut orders: Vec<(i64, Vec<u32>)> = candidates.into_iter().map(ranked).collect();
        orders.sort();
        orders.dedup();
        orders.truncate(3);
        let base = dag.buffers.iter().filter(|b| b.live_in).map(Buffer::occupied).sum();
        let tasks = dag.tasks.len().max(1) as u64;
        let rounds = (ROUNDS * tasks).min(WORK / tasks).min(ROUNDS_MAX);
        let rounds = rounds.saturating_mul(options.effort) / Options::default().effort;
        let rounds = rounds.clamp(ROUNDS_MIN, ROUNDS_MAX);
        Some(DagSearch { orders: orders.into_iter().map(|(_, order)| order).collect(), net, base, rounds })
    }

    /// The smallest peak known without repeats.
    pub fn peak(&self) -> u64 {
        self.base + Tape::new(&self.net, &self.orders[0]).peak() as u64
    }

    /// The cheapest schedule found in which no more than `target` bytes are live; if none was found, one with few.
    pub fn find(&self, target: u64) -> Vec<TaskId> {
        let target = target.saturating_sub(self.base).min(1 << 62) as i64;
        let found = search(&self.net, &self.orders, target, &mut Clock::new(Limit::Rounds(self.rounds)), 0);
        found.order.into_iter().filter(|&task| task != self.net.sink()).map(TaskId).collect()
    }
}
