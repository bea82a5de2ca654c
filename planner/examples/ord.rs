//! scratch
use slabwise_planner::remat_graph::*;
use std::time::*;
fn shuffle(g: &RematGraph, seed: u64) -> RematGraph {
    let mut x = seed.wrapping_mul(0x9e3779b97f4a7c15) | 1;
    let mut r = move |n: usize| { x ^= x << 13; x ^= x >> 7; x ^= x << 17; (x.wrapping_mul(0x2545F4914F6CDD1D) >> 33) as usize % n };
    let n = g.nodes.len();
    let mut deg: Vec<usize> = g.nodes.iter().map(|v| v.inputs.len()).collect();
    let mut rd = vec![vec![]; n];
    for (i, v) in g.nodes.iter().enumerate() { for &j in &v.inputs { rd[j as usize].push(i); } }
    for (a, b) in g.mutation_order() { rd[a as usize].push(b as usize); deg[b as usize] += 1; }
    let mut ready: Vec<usize> = (0..n).filter(|&i| deg[i] == 0).collect();
    let mut new = vec![0u32; n];
    let mut out = vec![];
    while !ready.is_empty() {
        let i = ready.swap_remove(r(ready.len()));
        new[i] = out.len() as u32;
        out.push(i);
        for &k in &rd[i] { deg[k] -= 1; if deg[k] == 0 { ready.push(k); } }
    }
    let map = |v: &Vec<u32>| { let mut w: Vec<u32> = v.iter().map(|&j| new[j as usize]).collect(); w.sort(); w };
    RematGraph { name: g.name.clone(), nodes: out.iter().map(|&i| { let v = &g.nodes[i]; Node { inputs: map(&v.inputs), inplace: map(&v.inplace), mutates: map(&v.mutates), ..v.clone() } }).collect(), outputs: map(&g.outputs) }
}
fn main() {
    let a: Vec<String> = std::env::args().skip(1).collect();
    let tl: f64 = a[0].parse().unwrap();
    let sh: u64 = a[1].parse().unwrap();
    for f in &a[2..] {
        let g = RematGraph::read(&std::fs::read(f).unwrap()).unwrap();
        for ip in [false, true] {
            for s in 0..=sh {
                let h = if s == 0 { g.clone() } else { shuffle(&g, s) };
                let d = h.to_dag(ip);
                let t = Instant::now();
                let lim = if tl > 0.0 { Some(Duration::from_secs_f64(tl)) } else { None };
                let o = slabwise_planner::minimise_peak(&d.dag, ip, lim).unwrap();
                println!("{} {} {} {} {} {:.2} {}", g.name, d.node_of_task.len(), ip, o.peak, o.lower_bound, t.elapsed().as_secs_f64() * 1e3, o.schedule);
            }
        }
    }
}
