//! The search for schedules with recomputation on the dag of a program.

use super::clock::{Clock, Limit};
use super::combine::combine_from;
use super::network::Network;
use super::search::{FoundSchedule, search};
use super::state::ScheduleState;
use crate::dag::relations::Relations;
use crate::dag::{Buffer, BufferId, Dag, Space, TaskId};
use crate::order::{OrderPolicy, Sizes, candidates};
use crate::plan::Options;

/// Rounds of one search for each task, their maximum, and the most rounds times tasks, all at the
/// default effort.
const ROUNDS: u64 = 20;
const ROUNDS_MAX: u64 = 4_000;
const WORK: u64 = 4_000_000;
/// The divisors of these rounds for recomputation alone, if copies come next, and for both.
const ALONE: u64 = 8;
const TOGETHER: u64 = 2;
/// The fewest rounds at any effort.
const ROUNDS_MIN: u64 = 50;

/// A search for schedules of a dag with recomputation.
pub(crate) struct DagSearch {
    net: Network,
    /// The buffers of each value.
    buffers: Vec<Vec<BufferId>>,
    /// Orders without recomputation, the smallest peak first.
    orders: Vec<Vec<u32>>,
    /// The bytes of inputs, which always count.
    base: u64,
    rounds: u64,
}

impl DagSearch {
    /// For a verified dag; `None` if its bytes do not fit the search's arithmetic.
    pub fn new(dag: &Dag, options: &Options) -> Option<Self> {
        let bytes = dag
            .buffers
            .iter()
            .map(|b| u128::from(b.occupied()))
            .chain(dag.tasks.iter().map(|t| u128::from(t.workspace_occupied())));
        if bytes.sum::<u128>() >= 1 << 62 {
            return None;
        }
        let candidates = candidates(dag, OrderPolicy::MinPeak, false, Sizes::Occupied);
        let (net, buffers) =
            Network::of_dag(dag, candidates.first().map_or(&[], |(_, order)| order));
        let ranked = |(_, order): (_, Vec<TaskId>)| {
            let order: Vec<u32> = order
                .iter()
                .map(|task| task.0)
                .chain([net.sink()])
                .collect();
            (ScheduleState::new(&net, &order).peak(), order)
        };
        let mut orders: Vec<(i64, Vec<u32>)> = candidates.into_iter().map(ranked).collect();
        orders.sort();
        orders.dedup();
        orders.truncate(3);
        let base = dag
            .buffers
            .iter()
            .filter(|b| b.live_in)
            .map(Buffer::occupied)
            .sum();
        let tasks = dag.tasks.len().max(1) as u64;
        let rounds = (ROUNDS * tasks).min(WORK / tasks).min(ROUNDS_MAX);
        let rounds = rounds.saturating_mul(options.effort) / Options::default().effort;
        let rounds = rounds.clamp(ROUNDS_MIN, ROUNDS_MAX);
        Some(DagSearch {
            orders: orders.into_iter().map(|(_, order)| order).collect(),
            net,
            buffers,
            base,
            rounds,
        })
    }

    /// The smallest known peak without recomputation.
    pub fn peak(&self) -> u64 {
        self.base + ScheduleState::new(&self.net, &self.orders[0]).peak() as u64
    }

    /// The cheapest schedule found in which at most `target` bytes are live or, if there is none,
    /// one with few, and whether the target was met.
    pub fn find(&self, target: u64) -> (Vec<TaskId>, bool) {
        let found = self.recompute(target, self.rounds);
        (self.tasks(&found.order), found.peak <= self.live(target))
    }

    fn recompute(&self, target: u64, rounds: u64) -> FoundSchedule {
        search(
            &self.net,
            &self.orders,
            self.live(target),
            &mut Clock::new(Limit::Rounds(rounds)),
            0,
        )
    }

    /// The part of a target of live bytes that remains beside the inputs.
    fn live(&self, target: u64) -> i64 {
        target.saturating_sub(self.base).min(1 << 62) as i64
    }

    fn tasks(&self, order: &[u32]) -> Vec<TaskId> {
        order
            .iter()
            .filter(|&&task| task != self.net.sink())
            .map(|&task| TaskId(task))
            .collect()
    }

    /// Like [`DagSearch::find`], but buffers may be offloaded, where copying a byte takes `link`:
    /// the fastest schedule found, and its offload intervals. Buffers with several writers and
    /// buffers with data at the start stay in the slab.
    pub fn find_with_offload(
        &self,
        dag: &Dag,
        target: u64,
        link: f64,
    ) -> (Vec<TaskId>, Vec<RunInterval>) {
        let writers = Relations::new(dag).writers;
        let may_be_offloaded = |b: &BufferId| {
            writers.row(b.index()).len() == 1 && dag.buffers[b.index()].space == Space::Device
        };
        let fetching = self
            .net
            .with_fetches(|value| self.buffers[value as usize].iter().all(may_be_offloaded));
        // A round with transfers takes several times as long, and recomputation alone is only its
        // start.
        let [alone, both] = [ALONE, TOGETHER].map(|part| (self.rounds / part).max(ROUNDS_MIN));
        let clock = &mut Clock::new(Limit::Rounds(both));
        let limits = (self.live(target), link.max(0.0));
        let found = combine_from(
            self.recompute(target, alone),
            (&self.net, &fetching),
            &self.orders,
            limits,
            clock,
            0,
        );
        let runs = self.tasks(&found.order);
        let mut intervals = Vec::new();
        for (transfer, &value) in found.transfers.iter().zip(&found.values) {
            let of = |&buffer: &BufferId| RunInterval {
                buffer,
                made: transfer.value,
                used: transfer.used,
                read: transfer.read,
            };
            intervals.extend(
                self.buffers[value as usize]
                    .iter()
                    .filter(|_| (transfer.read as usize) < runs.len())
                    .map(of),
            );
        }
        (runs, intervals)
    }
}

/// The interval in which a buffer is offloaded. Steps are positions in the schedule.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RunInterval {
    pub buffer: BufferId,
    /// The run that makes it.
    pub made: u32,
    /// The last run that reads it before the interval.
    pub used: u32,
    /// The next run that reads it.
    pub read: u32,
}
