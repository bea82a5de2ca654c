//! dev
use slabwise_planner::csv;
use slabwise_planner::generate::{tiling, Cuts};
use slabwise_planner::pack::{Problem, exact::{probe, probe_min}};
use std::time::Instant;
fn main() {
    let args: Vec<String> = std::env::args().collect();
    let nodes: u64 = args[2].parse().unwrap();
    let mut problems: Vec<(String, Problem, u64)> = Vec::new();
    for set in args[1].split(',') { match set {
        "mm" => for c in "ABCDEFGHIJK".chars() {
            let text = std::fs::read_to_string(format!("/work/shared/planner-instances/minimalloc/{c}.1048576.csv")).unwrap();
            let p = csv::problem(&csv::read(&text).unwrap());
            problems.push((c.to_string(), p, 1048576));
        },
        "mb" => for c in "CDJ".chars() {
            let text = std::fs::read_to_string(format!("/work/shared/planner-instances/minimalloc/{c}.1048576.csv")).unwrap();
            let p = csv::problem(&csv::read(&text).unwrap());
            let b = p.lower_bound();
            problems.push((format!("{c}b"), p, b));
        },
        t => {
            let dims: Vec<u64> = t[1..].split('x').map(|x| x.parse().unwrap()).collect();
            let (n, w, h) = (dims[0] as usize, *dims.get(1).unwrap_or(&1000), *dims.get(2).unwrap_or(&1000));
            let cuts = match &t[..1] { "g" => Cuts::Straight, "s" => Cuts::Spiral, _ => Cuts::Mixed };
            for seed in dims.get(3).map_or(0..4, |&s| s..s + 1) { let k = tiling(seed, n, w, h, cuts); problems.push((format!("{t}.{seed}"), k.problem, k.height)); }
        }
    } }
    let threads: usize = args[3].parse().unwrap();
    let seed: u64 = args.get(4).map_or(0, |s| s.parse().unwrap());
    for (name, p, limit) in &problems {
        let t = Instant::now();
        if args.get(5).is_some() {
            let (h, l) = probe_min(p, seed, args[5].parse().unwrap(), threads);
            println!("  {name:8} height {h} lower {l} {:.3} s", t.elapsed().as_secs_f64());
            continue;
        }
        let (s, n) = probe(p, *limit, seed, nodes, threads);
        println!("  {name:8} {s:10} nodes {n:9} {:.3} s", t.elapsed().as_secs_f64());
    }
}
