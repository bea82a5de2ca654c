//! Recomputation: the cheapest schedule of a graph whose peak stays within a budget.
//!
//! A schedule is a sequence of nodes in which a node may stand more than once; each read takes the
//! latest copy, and a copy lives from its step to its last read. Dropping a buffer while it lies
//! idle and computing it again costs time and saves memory where the peak is: rematerialisation, in
//! training known as gradient checkpointing. Finding the cheapest schedule within a budget is
//! NP-hard; [`remat`] searches locally from greedy starts and says how far from the optimum it can
//! be.
//!
//! Sources of the ideas: Chen et al., *Training Deep Nets with Sublinear Memory Cost* (2016); Jain
//! et al., *Checkmate* (2020), for schedules with any number of repeats as an exact problem;
//! Kirisame et al., *Dynamic Tensor Rematerialization* (2021), for choosing what to drop by bytes,
//! staleness and cost of the way back; Bartan et al., *Moccasin* (2023), for intervals of retention
//! over one fixed order of steps.

use std::borrow::Cow;
use std::time::{Duration, Instant};

mod bound;
mod clock;
mod combine;
mod flow;
mod needs;
mod network;
mod program;
mod repair;
mod schedule;
mod search;
mod tape;
#[cfg(test)]
mod tests;
mod transit;

pub use crate::offload::Transfer;
use crate::order::candidates_until;
use crate::pack::Limits;
use crate::remat_graph::RematGraph;
use clock::Clock;
pub use clock::Limit;
use network::Network;
pub(crate) use program::{Away, DagSearch};
pub use schedule::{Placed, Remat};

/// How many bytes a schedule may need above the fixed part.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Budget {
    /// So many.
    Bytes(u64),
    /// This part of the smallest peak found without recomputation.
    Fraction(f64),
}

/// What [`remat`] is asked for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RematOptions {
    /// The most bytes above the fixed part that any step may need.
    pub budget: Budget,
    /// Time to copy a byte to the host or back, in units of cost, if buffers may be sent there.
    pub link: Option<f64>,
    /// How much searching is allowed.
    pub limit: Limit,
    /// Where chance begins.
    pub seed: u64,
}

/// Why there is nothing to search.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum RematError {
    /// Sums of bytes do not fit the search's arithmetic.
    #[error("buffers and workspaces together are {bytes} bytes; the search takes less than 2^62")]
    TooLarge {
        /// The sum.
        bytes: u128,
    },
    /// A budget is no part of a peak.
    #[error("a budget of {fraction} times the peak is none: it takes a finite number from 0 on")]
    Fraction {
        /// The part asked for.
        fraction: f64,
    },
    /// A link has no speed.
    #[error("copying a byte is to take the time {link}: it takes a finite number from 0 on")]
    Link {
        /// The time for a byte.
        link: f64,
    },
}

/// The cheapest schedule found whose peak is at most the budget; if none was found, the one with
/// the smallest peak found ([`Remat::is_met`] tells).
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

/// As [`remat`], but the budget is for the slab that all buffers and workspaces are packed into.
/// Where packing loses bytes, the search is done again for a smaller peak.
///
/// # Errors
/// As [`remat`].
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
    // What a packing takes at least: as long as the last one that was given no time for more.
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
        // What is proved for the budget holds; for smaller targets more may be, but that is not
        // asked.
        time_bound = time_bound.min(remat.time_bound);
        peak_bound = peak_bound.max(remat.peak_bound);
        (remat.budget, remat.time_bound, remat.peak_bound) =
            (budget, time_bound.min(remat.time), peak_bound);
        let peak = remat.peak;
        if problem.is_long() && options.link.is_none() {
            // Searching goes on where it was; there is no time to begin anew.
            orders = Cow::Owned(vec![problem.order(&remat.schedule)]);
        }
        // Within the budget first, then sooner done, then smaller.
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
        // Other schedules lose other amounts: the target gives way step by step.
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

/// Whether this is so much of something.
pub(crate) fn is_amount(number: f64) -> bool {
    number.is_finite() && number >= 0.0
}

/// The parts of the time for searches with ever smaller targets until the slab fits, and that for
/// each packing.
const SLAB_PARTS: [f64; 5] = [0.5, 0.08, 0.08, 0.08, 0.08];
/// The same where searching needs most of it to find anything that fits.
const LONG_SLAB_PARTS: [f64; 5] = [0.7, 0.06, 0.06, 0.06, 0.06];
const PACKING: f64 = 0.03;
/// What a packing is taken to need at least for each computation, before one has been made.
const PACKED: Duration = Duration::from_micros(2);
/// What each packing may spend if time does not decide.
const EFFORT: u64 = 2_000_000;

/// Graphs of so many computations are put in their best order in a few milliseconds.
const QUICKLY_ORDERED: usize = 400;

/// The part of the time that may be spent on orders.
const ORDERING: f64 = 0.5;

/// A graph as the search sees it.
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
            // A fraction is one of the best order there is; in a hurry, others have to do for the
            // bytes of large graphs.
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
        let ranked = |order: Vec<u32>| (tape::Tape::new(&net, &order).peak(), order);
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
        let tape = tape::Tape::new(net, &self.orders[0]);
        let proved = bound::prove(net, &self.orders[0], &tape.need, budget, clock);
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

    /// Whether its schedules are [long](tape::is_long).
    fn is_long(&self) -> bool {
        tape::is_long(self.orders[0].len())
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
