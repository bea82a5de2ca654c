//! Recomputation and offload together: recomputation down to some budget above the one asked for, transfers for the rest.

use super::clock::Clock;
use super::network::Network;
use super::search::{Found, search};
use super::tape::Tape;
use crate::generate::Random;
use crate::offload::{Offloader, Timeline, Transfer, Value};

/// A schedule with transfers.
#[derive(Clone, Debug)]
pub(super) struct Combined {
    pub order: Vec<u32>,
    pub transfers: Vec<Transfer>,
    pub cost: u128,
    pub peak: i64,
    pub time: f64,
}

impl Combined {
    fn of(found: &Found) -> Combined {
        let Found { order, cost, peak } = found.clone();
        Combined { order, transfers: Vec::new(), cost, peak, time: cost as f64 }
    }

    /// Whether it is better under a budget: fitting first, then sooner done, then smaller.
    fn beats(&self, other: &Combined, budget: i64) -> bool {
        let rank = |c: &Combined| (c.peak.max(budget), c.time);
        let ((peak, time), (other_peak, other_time)) = (rank(self), rank(other));
        peak < other_peak || peak == other_peak && (time < other_time || time == other_time && self.peak < other.peak)
    }
}

/// How far between the peak without recomputation and the budget the intermediate budgets are.
const LEVELS: [f64; 15] = [1.0, 0.93, 0.86, 0.79, 0.71, 0.64, 0.57, 0.5, 0.43, 0.36, 0.29, 0.23, 0.15, 0.08, 0.04];

/// The fastest schedule found that fits `budget` where moving a byte takes `link`.
pub(super) fn combine(net: &Network, orders: &[Vec<u32>], budget: i64, link: f64, clock: &mut Clock, seed: u64) -> Combined {
    let mut random = Random(seed ^ 0x6f66_666c_6f61_6421);
    let alone = search(net, orders, budget, &mut clock.slice(0.3), seed);
    let mut best = Combined::of(&alone);
    let mut pool: Vec<Found> = Vec::new();
    let peak = Tape::new(net, &orders[0]).peak();
    if peak <= budget {
        return best;
    }
    for level in LEVELS {
        let above = budget + ((peak - budget) as f64 * level) as i64;
        if level == 1.0 {
            for order in orders {
                let tape = Tape::new(net, order);
                pool.push(Found { order: order.clone(), cost: tape.cost, peak: tape.peak() });
            }
        } else {
            pool.push(search(net, orders, above, &mut clock.slice(0.03), seed));
        }
    }
    pool.push(alone);
    // The cheapest of which some schedule can be made: what it costs without any waiting is known before.
    pool.sort_by_key(|f| f.cost);
    let mut from = pool[0].clone();
    for found in &pool {
        for (noise, patient) in [(0.0, true), (0.0, false), (1.0, true)] {
            if found.cost as f64 >= best.time && best.peak <= budget {
                break;
            }
            if let Some(better) = attempt(net, &found.order, budget, link, &mut random, (noise, patient), &best) {
                best = better;
                from = found.clone();
            }
        }
    }
    let mut tape = Tape::new(net, &from.order);
    while clock.progress() < 1.0 {
        clock.tick();
        let start = if random.below(3) == 0 { &pool[random.below(pool.len() as u64) as usize].order } else { &best.order };
        tape.load(start);
        for _ in 0..random.below(4) {
            let removable: Vec<u32> = tape.sequence.iter().copied().filter(|&c| tape.may_remove(c)).collect();
            if let Some(&c) = removable.get(random.below(removable.len().max(1) as u64) as usize) {
                tape.remove(c);
            }
        }
        let order: Vec<u32> = tape.order().collect();
        let how = (2.0 * random.unit(), random.below(2) == 0);
        if let Some(better) = attempt(net, &order, budget, link, &mut random, how, &best) {
            best = better;
        }
    }
    best
}

/// Transfers for `order` that make it better than `best`, planned with some noise, and patiently or not.
fn attempt(
    net: &Network,
    order: &[u32],
    budget: i64,
    link: f64,
    random: &mut Random,
    (noise, patient): (f64, bool),
    best: &Combined,
) -> Option<Combined> {
    let tape = Tape::new(net, order);
    let most = if best.peak <= budget { best.time } else { f64::INFINITY };
    if tape.cost as f64 >= most {
        return None;
    }
    let timeline = timeline(&tape);
    let mut offloader = Offloader::new(&timeline, budget, link, i64::MAX);
    let fits = offloader.fit(random, noise, 1.1 * most, patient);
    let (peak, time) = (offloader.peak(), fits.unwrap_or_else(|| offloader.run().time));
    let found = Combined { order: order.to_vec(), transfers: offloader.transfers, cost: tape.cost, peak, time };
    found.beats(best, budget).then_some(found)
}

/// A schedule as transfers see it: the value at each index is what the step of that position makes.
fn timeline(tape: &Tape) -> Timeline {
    let net = tape.net;
    let order = || (0u32..).zip(tape.order());
    let mut values: Vec<Value> =
        order().map(|(made, node)| Value { bytes: net.bytes[node as usize], made, reads: Vec::new(), weight: 1.0 }).collect();
    let mut latest = vec![0u32; net.len()];
    for (step, node) in order() {
        net.inputs.of(node).iter().for_each(|&j| values[latest[j as usize] as usize].reads.push(step));
        latest[node as usize] = step;
    }
    Timeline { costs: order().map(|(_, node)| net.cost[node as usize] as f64).collect(), need: tape.need.clone(), values }
}
