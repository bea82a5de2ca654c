//! Recomputation under a budget.
mod network;
mod repair;
mod tape;
use crate::generate::Random;
use network::{Computation, Network};
use std::time::{Duration, Instant};

/// proto
pub struct Proto { /// n
 pub nodes: Vec<(bool, u64, u64, u64, bool, Vec<u32>, Vec<u32>)>, /// o
 pub outputs: Vec<u32> }

/// proto
pub fn proto(g: &Proto, budget: i64, limit: Duration, seed: u64, start_order: Option<&[u32]>) -> (f64, i64, f64, u64, Vec<u32>) {
    let t0 = Instant::now();
    let n = g.nodes.len();
    let mut id = vec![u32::MAX; n];
    let mut orig = vec![];
    for (i, x) in g.nodes.iter().enumerate() {
        if !x.0 { id[i] = orig.len() as u32; orig.push(i as u32); }
    }
    let mut mutators: Vec<Vec<u32>> = vec![vec![]; n];
    for (i, x) in g.nodes.iter().enumerate() { for &m in &x.6 { mutators[m as usize].push(id[i]); } }
    let comps: Vec<Computation> = orig.iter().map(|&o| { let x = &g.nodes[o as usize];
        Computation { bytes: x.1, workspace: x.2, cost: x.3, once: x.4 || !x.6.is_empty(),
            inputs: x.5.iter().map(|&j| id[j as usize]).filter(|&j| j != u32::MAX).collect(),
            before: x.5.iter().flat_map(|&j| mutators[j as usize].iter().copied()).filter(|&m| m != id[o as usize]).collect() } }).collect();
    let outs: Vec<u32> = g.outputs.iter().map(|&o| id[o as usize]).filter(|&j| j != u32::MAX).collect();
    let net = Network::new(&comps, &outs);
    let mut order: Vec<u32> = match start_order { Some(o) => o.iter().map(|&i| id[i as usize]).collect(), None => (0..comps.len() as u32).collect() };
    order.push(net.sink());
    let (best, first, iters) = search::search(&net, &order, budget, t0, limit, seed);
    let oh = |c: u128| 100.0 * (c as f64 - net.base_cost as f64) / net.base_cost as f64;
    let tape = tape::Tape::new(&net, &best);
    let _ = Random(0);
    (oh(tape.cost), tape.peak(), oh(first), iters, best.iter().filter(|&&i| i != net.sink()).map(|&i| orig[i as usize]).collect())
}
mod search;
