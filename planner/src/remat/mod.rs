//! Rematerialization: the cheapest schedule of a graph whose peak stays within a budget.
//!
//! A schedule is a sequence of nodes in which a node may occur more than once; each read takes the
//! latest copy, and a copy lives from its step to its last read. Dropping an idle buffer and
//! recomputing it costs time and saves memory at the peak; in training this is known as gradient
//! checkpointing. Finding the cheapest schedule within a budget is NP-hard; [`remat`] searches
//! locally from greedy starts and returns a lower bound of the optimum as well.
//!
//! Sources of the ideas: Chen et al., *Training Deep Nets with Sublinear Memory Cost* (2016); Jain
//! et al., *Checkmate* (2020), for schedules with any number of recomputations as an exact problem;
//! Kirisame et al., *Dynamic Tensor Rematerialization* (2021), for choosing the buffer to drop by
//! bytes, staleness and recomputation cost; Bartan et al., *Moccasin* (2023), for intervals of
//! retention over one fixed order of steps.

use std::borrow::Cow;
use std::time::{Duration, Instant};

mod bound;
mod checkpoints;
mod clock;
mod combine;
mod copy_planner;
mod needs;
mod network;
mod program;
mod repair;
mod schedule;
mod search;
mod state;
#[cfg(test)]
mod tests;

pub use crate::offload::Transfer;
use crate::order::candidates_until;
use crate::remat_graph::RematGraph;
use clock::Clock;
pub use clock::Limit;
use network::Network;
pub(crate) use program::{DagSearch, RunInterval};
pub use schedule::{Placed, Remat};
use slabwise_packer::Limits;

/// The most bytes that a schedule may need above the fixed part.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Budget {
    /// A number of bytes.
    Bytes(u64),
    /// A fraction of the smallest peak found without recomputation.
    Fraction(f64),
}

/// The options of [`remat`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RematOptions {
    /// The most bytes above the fixed part that any step may need.
    pub budget: Budget,
    /// The time to copy a byte to the host or back, in units of cost; `None` disables offloading.
    pub link: Option<f64>,
    /// The limit of the search.
    pub limit: Limit,
    /// The seed of the random numbers.
    pub seed: u64,
}

/// The reason why no search is possible.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum RematError {
    /// Sums of bytes do not fit the search's arithmetic.
    #[error("buffers and workspaces together are {bytes} bytes; the search takes less than 2^62")]
    TooLarge {
        /// The sum.
        bytes: u128,
    },
    /// The fraction of a budget is invalid.
    #[error(
        "a budget of {fraction} times the peak is invalid: the factor must be finite and not negative"
    )]
    Fraction {
        /// The fraction.
        fraction: f64,
    },
    /// The speed of a link is invalid.
    #[error("the time to copy a byte is {link}, but it must be finite and not negative")]
    Link {
        /// The time for a byte.
        link: f64,
    },
}

/// The cheapest schedule found whose peak is at most the budget. If the search finds none, returns
/// the schedule with the smallest peak found; see [`Remat::is_met`].
///
/// # Errors
/// If bytes do not fit the search's arithmetic, or a number of the options is negative or not
/// finite.
pub fn remat(graph: &RematGraph, options: &RematOptions) -> Result<Remat, RematError> {
    let mut clock = Clock::new(options.limit);
    let problem = Problem::new(graph, options, &clock)?;
    let budget = problem.budget(options.budget);
    Ok(problem.solve(options, budget, &problem.orders, &mut clock))
}

/// Like [`remat`], but the budget limits the slab that all buffers and workspaces are packed into.
/// If packing adds gaps, the search is repeated for a smaller peak.
///
/// # Errors
/// See [`remat`].
pub fn remat_in_slab(
    graph: &RematGraph,
    options: &RematOptions,
) -> Result<(Remat, Placed), RematError> {
    let clock = Clock::new(options.limit);
    let problem = Problem::new(graph, options, &clock)?;
    let budget = problem.budget(options.budget);
    let (mut target, mut share) = (budget, if problem.is_long() { 0.5 } else { 0.25 });
    let mut best: Option<(Remat, Placed)> = None;
    let mut orders = Cow::Borrowed(&problem.orders);
    let (mut time_bound, mut peak_bound) = (u128::MAX, 0);
    let parts = if problem.is_long() {
        LONG_SLAB_PARTS
    } else {
        SLAB_PARTS
    };
    // A lower bound of a packing's time: the time of the last one beyond its limit.
    let mut quickest = PACKED.saturating_mul(problem.net.len() as u32);
    for (seed, part) in (0..)
        .map(|round| options.seed.wrapping_add(round))
        .zip(parts)
    {
        let mut remat = problem.solve(
            &RematOptions { seed, ..*options },
            target,
            &orders,
            &mut clock.slice(part, quickest),
        );
        let limits = match (options.limit, clock.left()) {
            (Limit::Time(time), Some(left)) => {
                let time = time.mul_f64(PACKING).min(left.saturating_sub(quickest));
                Limits {
                    time: Some(time),
                    effort: u64::MAX,
                    ..Limits::default()
                }
            }
            _ => Limits {
                effort: EFFORT,
                ..Limits::default()
            },
        };
        let began = Instant::now();
        let placed = remat.place(
            graph,
            &Limits {
                capacity: Some(budget),
                ..limits
            },
        );
        quickest = quickest.max(
            began
                .elapsed()
                .saturating_sub(limits.time.unwrap_or_default()),
        );
        let (lost, met) = (
            placed.height.saturating_sub(remat.peak),
            placed.height <= budget,
        );
        // A bound proved for the budget stays valid. For a smaller target a stronger bound may
        // hold, but it would not hold for the budget.
        time_bound = time_bound.min(remat.time_bound);
        peak_bound = peak_bound.max(remat.peak_bound);
        (remat.budget, remat.time_bound, remat.peak_bound) =
            (budget, time_bound.min(remat.time), peak_bound);
        let peak = remat.peak;
        if problem.is_long() && options.link.is_none() {
            // Continues the search from its result, because there is no time to start over.
            orders = Cow::Owned(vec![problem.order(&remat.schedule)]);
        }
        // First the one within the budget, then the faster, then the smaller.
        let rank = |(remat, placed): &(Remat, Placed)| {
            (placed.height.max(budget), remat.time, placed.height)
        };
        let found = (remat, placed);
        if best.as_ref().is_none_or(|best| rank(&found) < rank(best)) {
            best = Some(found);
        }
        if met || clock.left().is_some_and(|left| left < 2 * quickest) {
            break;
        }
        // Other schedules lose other amounts to packing, so the target is lowered step by step.
        let tighter = budget
            .saturating_sub(((lost as f64 * share) as u64).max(1))
            .min(target - target / 512);
        let tighter = if problem.is_long() {
            tighter.min(peak - peak / 512)
        } else {
            tighter
        };
        if tighter < problem.largest_need() {
            break;
        }
        (target, share) = (tighter, 2.0 * share);
    }
    Ok(best.expect("there is at least one part"))
}

/// Whether a number is finite and not negative.
pub(crate) fn is_amount(number: f64) -> bool {
    number.is_finite() && number >= 0.0
}

/// The parts of the time for searches with smaller and smaller targets until the slab fits, and the
/// part for each packing.
const SLAB_PARTS: [f64; 5] = [0.5, 0.08, 0.08, 0.08, 0.08];
/// The same for long schedules, where the search needs most of the time to find any that fits.
const LONG_SLAB_PARTS: [f64; 5] = [0.7, 0.06, 0.06, 0.06, 0.06];
const PACKING: f64 = 0.03;
/// The assumed time of a packing per computation, before one has been made.
const PACKED: Duration = Duration::from_micros(2);
/// The effort of each packing if there is no time limit.
const EFFORT: u64 = 2_000_000;

/// The size of graphs whose best order is found in a few milliseconds.
const QUICKLY_ORDERED: usize = 400;

/// The part of the time for finding orders.
const ORDERING: f64 = 0.5;

/// The input of the search.
struct Problem {
    net: Network,
    /// Orders without repeats, the smallest peak first.
    orders: Vec<Vec<u32>>,
    /// The node of each computation.
    nodes: Vec<u32>,
    /// The peak of the first of the orders.
    ordered_peak: i64,
}

impl Problem {
    fn new(
        graph: &RematGraph,
        options: &RematOptions,
        clock: &Clock,
    ) -> Result<Problem, RematError> {
        match *options {
            RematOptions {
                budget: Budget::Fraction(fraction),
                ..
            } if !is_amount(fraction) => {
                return Err(RematError::Fraction { fraction });
            }
            RematOptions {
                link: Some(link), ..
            } if !is_amount(link) => return Err(RematError::Link { link }),
            _ => {}
        }
        let bytes = graph
            .nodes
            .iter()
            .map(|n| u128::from(n.bytes) + u128::from(n.workspace))
            .sum();
        if bytes >= 1 << 62 {
            return Err(RematError::TooLarge { bytes });
        }
        let (net, nodes) = Network::of(graph);
        let mut orders = vec![net.program_order()];
        if !clock.is_over() {
            // A fraction refers to the best order. Without time, other orders must do for large
            // graphs with a budget in bytes.
            let hurries = net.len() > QUICKLY_ORDERED && !options.limit.is_ample();
            let wants_best = !hurries || matches!(options.budget, Budget::Fraction(_));
            let found = candidates_until(&graph.to_dag(false).dag, wants_best, clock.at(ORDERING));
            orders.extend(found.iter().map(|order| {
                order
                    .iter()
                    .map(|task| task.0)
                    .chain([net.sink()])
                    .collect::<Vec<u32>>()
            }));
        }
        let ranked = |order: Vec<u32>| (state::ScheduleState::new(&net, &order).peak(), order);
        let mut ranked: Vec<(i64, Vec<u32>)> = orders.into_iter().map(ranked).collect();
        ranked.sort();
        ranked.dedup();
        ranked.truncate(3);
        let ordered_peak = ranked[0].0;
        Ok(Problem {
            ordered_peak,
            orders: ranked.into_iter().map(|(_, o)| o).collect(),
            net,
            nodes,
        })
    }

    fn budget(&self, budget: Budget) -> u64 {
        match budget {
            Budget::Bytes(bytes) => bytes,
            Budget::Fraction(fraction) => (self.ordered_peak as f64 * fraction) as u64,
        }
    }

    fn largest_need(&self) -> u64 {
        bound::largest_need(&self.net) as u64
    }

    fn solve(
        &self,
        options: &RematOptions,
        budget_bytes: u64,
        orders: &[Vec<u32>],
        clock: &mut Clock,
    ) -> Remat {
        let net = &self.net;
        let budget = budget_bytes.min(1 << 62) as i64;
        let remat = |order: &[u32], peak: i64, cost: u128| Remat {
            schedule: self.schedule(order),
            transfers: Vec::new(),
            budget: budget_bytes,
            peak: peak as u64,
            ordered_peak: self.ordered_peak as u64,
            cost,
            time: cost,
            time_bound: net.base_cost,
            peak_bound: self.largest_need(),
        };
        if let Some(link) = options.link {
            let found = combine::combine(net, orders, budget, link, clock, options.seed);
            let time = found.time.round() as u128;
            return Remat {
                transfers: found.transfers,
                time,
                ..remat(&found.order, found.peak, found.cost)
            };
        }
        let found = search::search(net, orders, budget, clock, options.seed);
        let state = state::ScheduleState::new(net, &self.orders[0]);
        let proved = bound::prove(net, &self.orders[0], &state.need, budget, clock);
        let most = if found.peak <= budget {
            found.cost
        } else {
            u128::MAX
        };
        let time_bound = (net.base_cost + proved.extra as u128).min(most);
        Remat {
            time_bound,
            peak_bound: proved.floor as u64,
            ..remat(&found.order, found.peak, found.cost)
        }
    }

    /// Whether its schedules are [long](state::is_long).
    fn is_long(&self) -> bool {
        state::is_long(self.orders[0].len())
    }

    /// The order of computations that an order of nodes stands for.
    fn order(&self, schedule: &[u32]) -> Vec<u32> {
        let number = |i: &u32| self.nodes.partition_point(|node| node < i) as u32;
        schedule
            .iter()
            .map(number)
            .chain([self.net.sink()])
            .collect()
    }

    /// The order of nodes that an order of computations stands for.
    fn schedule(&self, order: &[u32]) -> Vec<u32> {
        order
            .iter()
            .filter(|&&i| i != self.net.sink())
            .map(|&i| self.nodes[i as usize])
            .collect()
    }
}
