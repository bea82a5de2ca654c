use slabwise::memory::{MemoryConfig, Policy, replay::Trace};
fn main() {
    for f in std::env::args().skip(1) {
        let mut t = String::new();
        std::io::Read::read_to_string(&mut flate2::read::GzDecoder::new(std::fs::File::open(&f).unwrap()), &mut t).unwrap();
        let rows = slabwise_planner::csv::read(&t).unwrap();
        let trace = Trace::of_lifetimes(&rows).unwrap();
        let live = trace.peak_live_bytes();
        print!("{:<28} {:>14}", f.rsplit('/').next().unwrap(), live);
        for p in Policy::ALL {
            match trace.run(&MemoryConfig::with_policy(p), None) {
                Ok(r) => print!("  {p} {:.4} {:.0}ns", r.statistics.peak_pool_bytes as f64 / live as f64, r.ns_per_op),
                Err(e) => print!("  {p} {e}"),
            }
        }
        println!();
        for x in [1.0, 1.02, 1.05] {
            let cap = (live as f64 * x) as u64;
            match trace.run(&MemoryConfig::with_policy(Policy::Tlsf), Some(cap)) {
                Ok(r) => println!("   x{x}: {} defrags {:.4}% {:.0}ns", r.statistics.defrags, r.statistics.defrag_bytes as f64 * 100. / trace.ops().iter().map(|o| match o { slabwise::memory::replay::Op::Alloc{bytes,..} => *bytes as f64, _ => 0.}).sum::<f64>(), r.ns_per_op),
                Err(e) => println!("   x{x}: {}", &e.to_string()[..200]),
            }
        }
    }
}
