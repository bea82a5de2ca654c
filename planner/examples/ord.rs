//! scratch
use slabwise_planner::remat_graph::*;
use std::time::*;
fn main() {
    let a: Vec<String> = std::env::args().skip(1).collect();
    let tl: f64 = a[0].parse().unwrap();
    for f in &a[1..] {
        let g = RematGraph::read(&std::fs::read(f).unwrap()).unwrap();
        for ip in [false, true] {
            let d = g.to_dag(ip);
            let t = Instant::now();
            let o = slabwise_planner::minimise_peak(&d.dag, ip, Some(Duration::from_secs_f64(tl))).unwrap();
            println!("{} {} {} {} {} {:.2} {}", g.name, d.node_of_task.len(), ip, o.peak, o.lower_bound, t.elapsed().as_secs_f64() * 1e3, o.schedule);
        }
    }
}
