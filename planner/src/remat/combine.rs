//! Combined search for recomputation and offloading.
//!
//! A prefetch from the host is another way to restore a value: it reads no values and takes no time
//! on the device, but keeps an engine busy, and computing waits if the prefetch is late. Therefore
//! the search is that for recomputation alone, on a network with a fetch for each value. Its
//! repairs choose between the two at a random price for the engine's time, and a schedule is judged
//! by its time with its copies planned.

use super::clock::Clock;
use super::copy_planner::CopyPlanner;
use super::network::Network;
use super::search::{FoundSchedule, Search, search};
use super::state::ScheduleState;
use crate::offload::Transfer;

/// A schedule with transfers.
#[derive(Clone, Debug)]
pub(super) struct Combined {
    pub order: Vec<u32>,
    pub transfers: Vec<Transfer>,
    /// By transfer, its value.
    pub values: Vec<u32>,
    pub cost: u128,
    pub peak: i64,
    pub time: f64,
}

impl Combined {
    fn of(found: FoundSchedule) -> Combined {
        let FoundSchedule {
            order,
            cost,
            peak,
            time,
        } = found;
        Combined {
            order,
            transfers: Vec::new(),
            values: Vec::new(),
            cost,
            peak,
            time,
        }
    }

    /// Whether it is better for a budget: first the one that fits, then the faster, then the
    /// smaller.
    fn beats(&self, other: &Combined, budget: i64) -> bool {
        let rank = |c: &Combined| (c.peak.max(budget), c.time);
        let ((peak, time), (other_peak, other_time)) = (rank(self), rank(other));
        peak < other_peak
            || peak == other_peak
                && (time < other_time || time == other_time && self.peak < other.peak)
    }
}

/// The part of the time for recomputation alone.
const ALONE: f64 = 0.3;
/// The number of repairs with fetches to start from, and the progress until which they are tried.
const STARTS: usize = 12;
const STARTED: f64 = 0.5;

/// The fastest schedule found that fits `budget`, where copying a byte takes `link`. It is never
/// slower than recomputation alone, which comes first and gets all of the rounds or a part of the
/// time. If no schedule fits, the fastest of the smallest peak found.
pub(super) fn combine(
    net: &Network,
    orders: &[Vec<u32>],
    budget: i64,
    link: f64,
    clock: &mut Clock,
    seed: u64,
) -> Combined {
    let alone = search(net, orders, budget, &mut clock.part(ALONE), seed);
    if is_enough(&alone, net, budget) || clock.progress() >= 1.0 {
        return Combined::of(alone);
    }
    combine_from(
        alone,
        (net, &net.with_fetches(|_| true)),
        orders,
        (budget, link),
        clock,
        seed,
    )
}

/// Like [`combine`], with the result of recomputation alone given, and for the values that may be
/// offloaded.
pub(super) fn combine_from(
    alone: FoundSchedule,
    (net, fetching): (&Network, &Network),
    orders: &[Vec<u32>],
    (budget, link): (i64, f64),
    clock: &mut Clock,
    seed: u64,
) -> Combined {
    let best = Combined::of(alone.clone());
    if is_enough(&alone, net, budget) {
        return best;
    }
    let mut search = Search::new(fetching, &alone.order, budget, seed ^ 0x6f66_666c_6f61_6421);
    search.copy_planner = Some(CopyPlanner::new(link));
    let mut starts = Vec::new();
    if alone.peak <= budget {
        starts.push(alone.clone());
    } else if search.state.is_long() {
        // The repair that recomputation alone had no time for.
        search.repairer.until = clock.at(1.0);
        starts.extend(search.start(&alone.order, 0.0, false));
    }
    for k in 0..STARTS {
        search.repairer.until = clock.at(if starts.is_empty() { 1.0 } else { STARTED });
        if clock.progress() > if starts.is_empty() { 1.0 } else { STARTED } {
            break;
        }
        let noise = if k < orders.len() { 0.0 } else { 1.0 };
        starts.extend(search.start(&orders[k % orders.len()], noise, k % 2 == 1));
    }
    if starts.is_empty() {
        let mut least = FoundSchedule::of(&search.state);
        least = if alone.peak < least.peak {
            alone
        } else {
            least
        };
        search.squeeze(&mut least, clock);
        search.relax(least.peak);
        search.state.load(&least.order);
        starts.extend(search.found());
    }
    if starts.is_empty() {
        return best;
    }
    let begin = clock.progress().min(0.9);
    let found = search.anneals(starts, orders, clock, begin);
    let found = search.with_planned_copies(&found, net);
    if found.beats(&best, budget) {
        found
    } else {
        best
    }
}

/// Whether no transfer can improve it.
fn is_enough(alone: &FoundSchedule, net: &Network, budget: i64) -> bool {
    alone.peak <= budget && alone.cost == net.base_cost
}

impl Search<'_> {
    /// A schedule with its transfers planned, for the network without fetches.
    fn with_planned_copies(&mut self, found: &FoundSchedule, net: &Network) -> Combined {
        self.state.load(&found.order);
        let time = self.time(f64::INFINITY).unwrap_or(f64::INFINITY);
        let order: Vec<u32> = self
            .state
            .order()
            .filter(|&node| net.sink() >= node)
            .collect();
        let cost = ScheduleState::new(net, &order).cost;
        let (transfers, peak) = self
            .copy_planner
            .as_ref()
            .map_or((&[][..], self.state.peak()), CopyPlanner::planned);
        let values = self
            .copy_planner
            .iter()
            .flat_map(|copy_planner| copy_planner.values(&self.state));
        let values = values
            .map(|value| self.state.net.without_fetches(value))
            .collect();
        Combined {
            order,
            transfers: transfers.to_vec(),
            values,
            cost,
            peak,
            time,
        }
    }
}
