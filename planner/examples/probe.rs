//! dev
use slabwise_planner::csv;
use slabwise_planner::generate::{tiling, Cuts};
use slabwise_planner::pack::{Problem, Rank, exact::probe};
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
            let n: usize = t[1..].parse().unwrap();
            let cuts = match &t[..1] { "g" => Cuts::Straight, "s" => Cuts::Spiral, _ => Cuts::Mixed };
            for seed in 0..4 { let k = tiling(seed, n, 1000, 1000, cuts); problems.push((format!("{t}.{seed}"), k.problem, k.height)); }
        }
    } }
    for rank in [Rank::TotalAreaWidth, Rank::TotalWidthArea, Rank::WidthAreaTotal, Rank::SizeWidth] {
        println!("{rank:?}");
        for (name, p, limit) in &problems {
            let t = Instant::now();
            let (s, n, h) = probe(p, *limit, rank, nodes);
            println!("  {name:8} {s:10} nodes {n:9} hits {h:8} {:.3} s", t.elapsed().as_secs_f64());
        }
    }
}
