//! Plans dags of growing size with the default options, checks the plans, writes reports of them,
//! and prints the time of each stage. No stage may take much more than ten times as long for ten
//! times as many tasks.
//!
//! ```text
//! cargo bench -p slabwise-planner --bench scale -- [LARGEST]
//! ```

use slabwise_planner::generate::{chain, random_tasks, recurrent};
use slabwise_planner::{Dag, Options, check, plan, report};
use std::error::Error;
use std::time::Instant;

fn main() -> Result<(), Box<dyn Error>> {
    let largest = std::env::args()
        .skip(1)
        .find_map(|word| word.parse().ok())
        .unwrap_or(100_000);
    println!(
        "| dag | tasks | plan s | check s | text s | height / bound | order | offsets |\n|---|---|---|---|---|---|---|---|"
    );
    for (name, make) in [
        ("chain", chain as fn(usize) -> Dag),
        ("recurrent", recurrent),
        ("random", random_tasks),
    ] {
        let mut tasks = 1_000;
        while tasks <= largest {
            row(name, &make(tasks))?;
            tasks *= 10;
        }
    }
    Ok(())
}

fn row(name: &str, dag: &Dag) -> Result<(), Box<dyn Error>> {
    let timed = |begin: Instant| begin.elapsed().as_secs_f64();
    let begin = Instant::now();
    let planned = plan(dag, &Options::default())?;
    let planning = timed(begin);
    let (ratio, schedule, method) = (
        planned.height as f64 / planned.lower_bound.max(1) as f64,
        planned.schedule,
        planned.method,
    );
    let begin = Instant::now();
    let checked = check(dag, planned)?;
    let checking = timed(begin);
    let begin = Instant::now();
    let text = report::text(dag, &checked).to_string();
    let writing = timed(begin);
    assert!(!text.is_empty());
    println!(
        "| {name} | {} | {planning:.3} | {checking:.3} | {writing:.3} | {ratio:.6} | {schedule:?} | {method} |",
        dag.tasks.len()
    );
    Ok(())
}
