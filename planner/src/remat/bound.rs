//! Lower bounds on the cost of a schedule within the budget, and on the peak of any schedule.
//!
//! Consider the moment in which a computation `v` runs for the first time. For each computation
//! `i`, let `x` say whether it has run by then and `y` whether it runs at some later time. The
//! computations with `x` are closed under inputs and contain no successor of `v`; computations
//! without `x` have `y`; each input of a computation with `y` either has `y` as well or is *kept*:
//! alive while `v` runs. Every computation with `x` and `y` runs at least twice, and the kept
//! values fit the budget beside the needs of `v` itself. All of these conditions are implications,
//! so with a price λ on kept bytes the cheapest choice is a minimum cut, and by Lagrangian duality
//! its value less λ × the available bytes is a lower bound for every schedule. The best λ is found
//! by intersecting the lines that two cuts give. With prices only on bytes, the cut is the least
//! memory in which `v` can run.

use super::clock::Clock;
use super::network::Network;
use crate::flow::{FlowNetwork, Meter};

/// Costs are scaled so that their sum is about this, and rounded down.
const SCALE: f64 = (1u64 << 48) as f64;

/// The capacity of an edge that is never cut.
const ENDLESS: i64 = i64::MAX / 8;

/// The number of steps of a flow between checks of the clock.
const STEPS_PER_CLOCK_CHECK: u32 = 4096;

pub(super) struct Bounds<'n> {
    net: &'n Network,
    flow: FlowNetwork<i64>,
    /// By computation, an edge that is cut if it runs before and after.
    rerun_edges: Vec<u32>,
    /// By computation, an edge that is cut if it is kept.
    kept_edges: Vec<u32>,
    /// Edges that are never cut.
    implied: Vec<u32>,
    /// By computation, edges from the source to "has not run", and from that to the sink.
    later: Vec<u32>,
    sooner: Vec<u32>,
    factor: f64,
}

/// The result of one cut.
#[derive(Clone, Copy)]
struct Line {
    /// Scaled cost.
    cost: f64,
    /// Kept bytes.
    bytes: f64,
    /// Whether every choice breaks a condition.
    impossible: bool,
}

impl<'n> Bounds<'n> {
    pub fn new(net: &'n Network) -> Bounds<'n> {
        let n = net.len() as u32;
        // Nodes: "has not run by then", "runs after", "is needed after"; source; sink.
        let (unrun, after, needed) = (|i: u32| i, |i: u32| n + i, |i: u32| 2 * n + i);
        let (source, sink) = (3 * n, 3 * n + 1);
        let mut flow = FlowNetwork::new(3 * n as usize + 2);
        let mut implied = Vec::new();
        let mut rerun_edges = Vec::new();
        let mut kept_edges = Vec::new();
        let mut later = Vec::new();
        let mut sooner = Vec::new();
        for i in 0..n {
            implied.push(flow.add_edge(unrun(i), after(i)));
            implied.push(flow.add_edge(after(i), needed(i)));
            rerun_edges.push(flow.add_edge(after(i), unrun(i)));
            kept_edges.push(flow.add_edge(needed(i), after(i)));
            for &j in net.inputs.of(i) {
                implied.push(flow.add_edge(unrun(j), unrun(i)));
                implied.push(flow.add_edge(after(i), needed(j)));
            }
            for &m in net.before.of(i) {
                implied.push(flow.add_edge(after(i), unrun(m)));
            }
            later.push(flow.add_edge(source, unrun(i)));
            sooner.push(flow.add_edge(unrun(i), sink));
        }
        let factor = SCALE / (net.base_cost.max(1) as f64);
        Bounds {
            net,
            flow,
            rerun_edges,
            kept_edges,
            implied,
            later,
            sooner,
            factor,
        }
    }

    fn source(&self) -> u32 {
        3 * self.net.len() as u32
    }

    /// The least capacity that separates source from sink; [`ENDLESS`] or more if they cannot be
    /// separated. `None` if the time was over before.
    fn min_cut(&mut self, clock: &Clock) -> Option<i64> {
        let (source, steps) = (self.source(), 0);
        let is_sink = |node| node == source + 1;
        let mut meter = ClockMeter { clock, steps };
        self.flow.max_flow(&[source], is_sink, ENDLESS, &mut meter)
    }

    /// The cheapest choice for `v` at `price` per byte and `rate` times the costs; `None` if the
    /// time is over.
    fn line(&mut self, v: u32, price: f64, rate: f64, clock: &Clock) -> Option<Line> {
        let net = self.net;
        let n = net.len() as u32;
        for &e in &self.implied {
            self.flow.set_capacity(e, ENDLESS);
        }
        for i in 0..n {
            let cost = (net.cost[i as usize] as f64 * rate) as i64;
            self.flow.set_capacity(
                self.rerun_edges[i as usize],
                if net.once[i as usize] { ENDLESS } else { cost },
            );
            let free = i == v || net.inputs.of(v).binary_search(&i).is_ok();
            let bytes = if free {
                0.0
            } else {
                net.bytes[i as usize] as f64
            };
            self.flow
                .set_capacity(self.kept_edges[i as usize], (bytes * price) as i64);
            let follows =
                net.consumers.of(v).binary_search(&i).is_ok() || i == net.sink() && v != i;
            self.flow
                .set_capacity(self.later[i as usize], if follows { ENDLESS } else { 0 });
            self.flow
                .set_capacity(self.sooner[i as usize], if i == v { ENDLESS } else { 0 });
        }
        let value = self.min_cut(clock)?;
        if value >= ENDLESS {
            return Some(Line {
                cost: 0.0,
                bytes: 0.0,
                impossible: true,
            });
        }
        let (mut cost, mut bytes) = (0.0, 0.0);
        for i in 0..n {
            let [unrun, after, needed] = [i, n + i, 2 * n + i].map(|k| self.flow.is_source_side(k));
            if after && !unrun {
                cost += net.cost[i as usize] as f64;
            }
            if needed && !after && i != v && net.inputs.of(v).binary_search(&i).is_err() {
                bytes += net.bytes[i as usize] as f64;
            }
        }
        Some(Line {
            cost,
            bytes,
            impossible: false,
        })
    }

    /// A lower bound of the bytes in the step in which `v` first runs, as far as time allows.
    pub fn least(&mut self, v: u32, clock: &Clock) -> i64 {
        let total: f64 = self.net.bytes.iter().map(|&b| b as f64).sum();
        let line = self
            .line(v, SCALE / total.max(1.0), 0.0, clock)
            .filter(|line| !line.impossible);
        // The cut is found at rounded prices, but the bytes of the kept values are exact. Rounding
        // hides less than a byte per computation and unit of scale.
        let hidden = (self.net.len() as f64 * total / SCALE).ceil();
        own(self.net, v) + line.map_or(0, |line| (line.bytes - hidden).max(0.0) as i64)
    }

    /// A lower bound of the extra cost of every schedule within `budget`, compared with running
    /// every computation once, as far as `v` shows it. `None` if `v` seems unable to run within the
    /// budget.
    pub fn extra(&mut self, v: u32, budget: i64, clock: &Clock) -> Option<f64> {
        let room = (budget - own(self.net, v)) as f64;
        if room < 0.0 {
            return None;
        }
        let Some(mut low) = self.line(v, 0.0, self.factor, clock) else {
            return Some(0.0);
        };
        if low.impossible || low.bytes <= room || clock.is_over() {
            return Some(0.0);
        }
        let total: f64 = self.net.bytes.iter().map(|&b| b as f64).sum();
        let Some(mut high) = self.line(v, SCALE / total.max(1.0), self.factor * 1e-6, clock) else {
            return Some(0.0);
        };
        if high.bytes > room + 1.0 {
            return None;
        }
        let mut best = 0.0f64;
        for _ in 0..40 {
            if high.bytes >= low.bytes || clock.is_over() {
                break;
            }
            let price = (high.cost - low.cost) / (low.bytes - high.bytes);
            let crossing = low.cost + price * (low.bytes - room);
            let Some(line) = self.line(v, price * self.factor, self.factor, clock) else {
                break;
            };
            let value = line.cost + price * (line.bytes - room);
            // Each edge's capacity was rounded down by less than one.
            best = best.max(value - 2.0 * self.net.len() as f64 / self.factor);
            if value >= crossing * (1.0 - 1e-9) {
                break;
            }
            *(if line.bytes > room {
                &mut low
            } else {
                &mut high
            }) = line;
        }
        Some(best)
    }
}

/// The bytes that `v` needs by itself: inputs, output and workspace.
fn own(net: &Network, v: u32) -> i64 {
    let inputs: i64 = net
        .inputs
        .of(v)
        .iter()
        .map(|&j| net.bytes[j as usize])
        .sum();
    inputs + net.bytes[v as usize] + net.workspace[v as usize]
}

/// The most bytes that any computation needs by itself: a lower bound of the peak of every
/// schedule, with or without offloading.
pub(super) fn largest_need(net: &Network) -> i64 {
    (0..net.len() as u32)
        .map(|v| own(net, v))
        .max()
        .unwrap_or(0)
}

/// Proved bounds of every schedule.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Proved {
    /// A lower bound of the peak.
    pub floor: i64,
    /// A lower bound of the extra cost within the budget, compared with running every computation
    /// once.
    pub extra: f64,
}

/// Bounds from the computations of `order`: first those whose steps need most in `order` and the
/// neighbours of good ones, until all are done or the time is over.
pub(super) fn prove(
    net: &Network,
    order: &[u32],
    need: &[i64],
    budget: i64,
    clock: &Clock,
) -> Proved {
    let mut proved = Proved {
        floor: largest_need(net),
        extra: 0.0,
    };
    if clock.is_over() {
        return proved;
    }
    let mut bounds = Bounds::new(net);
    let mut seen = vec![false; order.len()];
    let mut ranked: Vec<usize> = (0..order.len()).collect();
    ranked.sort_by_key(|&p| (std::cmp::Reverse(need[p]), p));
    let mut next = ranked.iter().copied();
    // Steps next to a good one come first, because they often give similar bounds.
    let mut near: Vec<usize> = Vec::new();
    let mut count = 0;
    while let Some(p) = near.pop().or_else(|| next.next()) {
        if std::mem::replace(&mut seen[p], true) {
            continue;
        }
        if !clock.may_prove(count) {
            break;
        }
        count += 1;
        let better = match bounds.extra(order[p], budget, clock) {
            Some(extra) if extra > proved.extra => {
                proved.extra = extra;
                true
            }
            Some(_) => false,
            None if clock.is_over() => false,
            None => {
                let least = bounds.least(order[p], clock);
                let better = least > proved.floor;
                proved.floor = proved.floor.max(least);
                better
            }
        };
        if better {
            near.extend(
                [p.wrapping_sub(1), p + 1]
                    .into_iter()
                    .filter(|&q| q < order.len() && !seen[q]),
            );
        }
    }
    proved
}

/// Counts the edges of a flow as a proof, and ends it when the time is over.
struct ClockMeter<'a> {
    clock: &'a Clock,
    /// The steps of the current phase.
    steps: u32,
}

impl Meter for ClockMeter<'_> {
    fn begin_phase(&mut self, edges: usize) -> bool {
        self.steps = 0;
        self.clock.prove(edges as u64);
        !self.clock.is_over()
    }

    fn step(&mut self) -> bool {
        self.steps = self.steps.wrapping_add(1);
        if !self.steps.is_multiple_of(STEPS_PER_CLOCK_CHECK) {
            return true;
        }
        self.clock.prove(u64::from(STEPS_PER_CLOCK_CHECK));
        !self.clock.is_over()
    }
}
