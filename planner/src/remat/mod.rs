//! Recomputation: the cheapest schedule of a graph whose peak stays within a budget.
//!
//! A schedule is a sequence of nodes in which a node may stand more than once; each read takes the latest copy, and a copy
//! lives from its step to its last read. Dropping a buffer while it lies idle and computing it again costs time and saves
//! memory where the peak is: rematerialisation, in training known as gradient checkpointing. Finding the cheapest schedule
//! within a budget is NP-hard; [`remat`] searches locally from greedy starts and says how far from the optimum it can be.
//!
//! Sources of the ideas: Chen et al., *Training Deep Nets with Sublinear Memory Cost* (2016); Jain et al., *Checkmate* (2020),
//! for schedules with any number of repeats as an exact problem; Kirisame et al., *Dynamic Tensor Rematerialization* (2021),
//! for choosing what to drop by bytes, staleness and cost of the way back; Bartan et al., *Moccasin* (2023), for intervals of
//! retention over one fixed order of steps.

mod bound;
mod clock;
mod combine;
mod flow;
mod network;
mod offload;
mod repair;
mod schedule;
mod search;
mod tape;

use crate::order::{OrderPolicy, candidates};
use crate::remat_graph::RematGraph;
use clock::Clock;
pub use clock::Limit;
use network::Network;
pub use offload::Transfer;
pub use schedule::{Placed, Remat};

/// What [`remat`] is asked for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RematOptions {
    /// The most bytes above the fixed part that any step may need.
    pub budget: u64,
    /// Time to copy a byte to the host or back, in units of cost, if buffers may be sent there.
    pub link: Option<f64>,
    /// How much searching is allowed.
    pub limit: Limit,
    /// Where chance begins.
    pub seed: u64,
}

/// Why there is nothing to search.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RematError {
    /// Sums of bytes do not fit the search's arithmetic.
    #[error("buffers and workspaces together are {bytes} bytes; the search takes less than 2^62")]
    TooLarge {
        /// The sum.
        bytes: u128,
    },
}

/// The cheapest schedule found whose peak is at most the budget; if none was found, the one with the smallest peak found.
///
/// # Errors
/// If bytes do not fit the search's arithmetic.
pub fn remat(graph: &RematGraph, options: &RematOptions) -> Result<Remat, RematError> {
    let mut clock = Clock::new(options.limit);
    let problem = Problem::new(graph)?;
    let (net, orders) = (&problem.net, &problem.orders);
    let budget = options.budget.min(1 << 62) as i64;
    let tape = tape::Tape::new(net, &orders[0]);
    if let Some(link) = options.link {
        let found = combine::combine(net, orders, budget, link.max(0.0), &mut clock, options.seed);
        return Ok(Remat {
            schedule: problem.schedule(&found.order),
            transfers: found.transfers,
            peak: found.peak as u64,
            cost: found.cost,
            time: found.time.round() as u128,
            time_bound: net.base_cost,
            peak_bound: bound::largest_need(net) as u64,
        });
    }
    let found = search::search(net, orders, budget, &mut clock, options.seed);
    let proved = bound::prove(net, &orders[0], &tape.need, budget, &clock);
    let most = if found.peak <= budget { found.cost } else { u128::MAX };
    Ok(Remat {
        schedule: problem.schedule(&found.order),
        transfers: Vec::new(),
        peak: found.peak as u64,
        cost: found.cost,
        time: found.cost,
        time_bound: (net.base_cost + proved.extra as u128).min(most),
        peak_bound: proved.floor as u64,
    })
}

/// A graph as the search sees it.
struct Problem {
    net: Network,
    /// Orders without repeats, the smallest peak first.
    orders: Vec<Vec<u32>>,
    /// The node of each computation.
    nodes: Vec<u32>,
}

impl Problem {
    fn new(graph: &RematGraph) -> Result<Problem, RematError> {
        let bytes = graph.nodes.iter().map(|n| u128::from(n.bytes) + u128::from(n.workspace)).sum();
        if bytes >= 1 << 62 {
            return Err(RematError::TooLarge { bytes });
        }
        let (net, nodes) = Network::of(graph);
        let dag = graph.to_dag(false);
        let mut orders: Vec<Vec<u32>> = vec![(0..nodes.len() as u32).collect()];
        for (_, order) in candidates(&dag.dag, OrderPolicy::MinPeak) {
            orders.push(order.iter().map(|t| t.0).collect());
        }
        for order in &mut orders {
            order.push(net.sink());
        }
        let mut ranked: Vec<(i64, Vec<u32>)> = orders.into_iter().map(|o| (tape::Tape::new(&net, &o).peak(), o)).collect();
        ranked.sort();
        ranked.dedup();
        ranked.truncate(3);
        Ok(Problem { orders: ranked.into_iter().map(|(_, o)| o).collect(), net, nodes })
    }

    /// The order of nodes that an order of computations stands for.
    fn schedule(&self, order: &[u32]) -> Vec<u32> {
        order.iter().filter(|&&i| i != self.net.sink()).map(|&i| self.nodes[i as usize]).collect()
    }
}
