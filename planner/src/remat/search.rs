use super::network::Network;
use super::repair::Repairer;
use super::tape::Tape;
use crate::generate::Random;
use std::time::{Duration, Instant};

pub(super) fn search(net: &Network, order: &[u32], budget: i64, t0: Instant, limit: Duration, seed: u64) -> (Vec<u32>, u128, u64) {
    let mut random = Random(seed);
    let mut tape = Tape::new(net, order);
    let mut rep = Repairer::new(net.len(), budget);
    let mut start = None;
    let kk: u64 = std::env::var("KK").ok().and_then(|s| s.parse().ok()).unwrap_or(4); let ft: u64 = std::env::var("FT").ok().and_then(|s| s.parse().ok()).unwrap_or(3);
    let n0: f64 = std::env::var("N0").ok().and_then(|s| s.parse().ok()).unwrap_or(0.0); let tt: f64 = std::env::var("TT").ok().and_then(|s| s.parse().ok()).unwrap_or(0.0009);
    for k in 0..20 {
        tape.load(order);
        rep.noise = n0 + 0.3 * k as f64;
        let ok = rep.repair(&mut tape, &mut random, 20 * net.len(), u128::MAX);
        if ok { rep.prune(&mut tape, &mut random); start = Some(tape.order().collect::<Vec<_>>()); break; }
    }
    let Some(start) = start else { return (order.to_vec(), net.base_cost, 0) };
    let mut cur = start.clone();
    let mut cur_cost = tape.cost;
    let mut best = start;
    let mut best_cost = tape.cost;
    let first = tape.cost;
    let mut iters = 0;
    tape.load(&cur);
    while t0.elapsed() < limit {
        iters += 1;
        let frac = t0.elapsed().as_secs_f64() / limit.as_secs_f64();
        let temp = tt * (1.0 - frac) * net.base_cost as f64;
        // destroy
        let again: Vec<u32> = tape.sequence.iter().copied().filter(|&c| tape.copies[tape.node[c as usize] as usize].len() > 1 && tape.may_remove(c)).collect();
        let kind = random.below(3);
        if kind < 2 && !again.is_empty() {
            let at = random.below(again.len() as u64) as usize;
            let k = 1 + random.below(kk) as usize;
            for &c in again.iter().skip(at).take(k) { if tape.may_remove(c) { tape.remove(c); } }
        }
        if kind >= 1 {
            // moves
            for _ in 0..1 + random.below(3) {
                let p = random.below(tape.len() as u64 - 1) as u32;
                let c = tape.sequence[p as usize];
                let i = tape.node[c as usize];
                let hi = tape.first_read(i, p + 1, tape.len()).unwrap_or(tape.len() - 1);
                let lo = net.inputs.of(i).iter().filter_map(|&j| tape.source(j, p)).map(|s| tape.pos[s as usize] + 1).max().unwrap_or(0);
                if hi <= lo + 1 { continue; }
                let q = lo + random.below((hi - lo) as u64 + 1) as u32;
                if q == p || q == p + 1 { continue; }
                if !may_move(&tape, i, p, q) { continue; }
                move_to(&mut tape, c, q);
            }
        }
        rep.noise = [0.0, 0.5, 1.0, 2.0][random.below(4) as usize];
        if random.below(ft) == 0 && !again.is_empty() {
            let c = again[random.below(again.len() as u64) as usize];
            rep.budget = budget - (net.bytes[tape.node[c as usize] as usize] as f64 * 2.0 * random.unit()) as i64;
        }
        rep.greed = [0.0, 0.0, 0.25, 1.0][random.below(4) as usize];
        let mut ok = rep.repair(&mut tape, &mut random, 60, cur_cost + cur_cost / 5);
        rep.budget = budget;
        if !ok { ok = tape.peak() <= budget; }
        if ok { rep.prune(&mut tape, &mut random); }
        let accept = ok && (tape.cost <= cur_cost || (tape.cost - cur_cost) as f64 <= -temp * (random.unit() + 1e-12).ln());
        if accept {
            cur.clear(); cur.extend(tape.order());
            cur_cost = tape.cost;
            if cur_cost < best_cost { best_cost = cur_cost; best = cur.clone(); }
        } else {
            tape.load(&cur);
        }
    }
    (best, first, iters)
}

fn may_move(tape: &Tape, i: u32, p: u32, q: u32) -> bool {
    let (a, b) = if q > p { (p + 1, q) } else { (q, p) };
    tape.is_quiet(i, a, b)
}

fn move_to(tape: &mut Tape, c: u32, q: u32) {
    let i = tape.node[c as usize];
    tape.insert(i, q);
    tape.remove(c);
}
