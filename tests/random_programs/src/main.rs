//! `random-programs`.
#![forbid(unsafe_code)]

use slabwise_random_programs::{
    draw, judge,
    rng::{Rng, mixed},
};
use std::collections::BTreeMap;

fn main() {
    let args: Vec<u64> = std::env::args().skip(1).filter_map(|a| a.parse().ok()).collect();
    let (seed, graphs) = (args[0], args[1]);
    let mut counts = judge::Counts::default();
    let mut seen: BTreeMap<String, (u64, String)> = BTreeMap::new();
    let t = std::time::Instant::now();
    for i in 0..graphs {
        let s = mixed(mixed(seed) ^ i);
        let case = draw::case(s, 12);
        if !judge::is_valid(&case) {
            println!("INVALID {s}: {case:#?}");
            continue;
        }
        let setups = draw::setups(&case, &mut Rng::new(s ^ 1));
        if let Some(f) = judge::judge(&case, &setups, &mut counts) {
            let e = seen.entry(f.signature()).or_insert((0, format!("{s}: {}", f.text())));
            e.0 += 1;
        }
    }
    println!("{counts:?} {:?}", t.elapsed());
    for (k, (n, t)) in seen {
        println!("{n} x {k}\n    {}", t.chars().take(400).collect::<String>());
    }
}
