//! Exact search.

mod branch;
mod memo;
mod search;
mod state;
mod tree;

use super::problem::Problem;
use super::sections::Sections;
use search::{Outcome, Search};

/// Development.
#[doc(hidden)]
pub fn probe(problem: &Problem, limit: u64, seed: u64, nodes: u64, threads: usize) -> (String, u64) {
    let placed: Vec<usize> = (0..problem.items.len()).collect();
    let sections = Sections::new(problem, &placed);
    let mut search = Search::new(&sections, limit, seed);
    let mut used = 0;
    while used < nodes && *search.run(8000, threads, None) == Outcome::Open {
        used += 8000;
    }
    let outcome = search.run(0, threads, None);
    if let Outcome::Found(found) = outcome {
        for (i, a) in problem.items.iter().enumerate() {
            let ao = found.offsets[i];
            assert!(ao + a.occupied() <= limit && ao % a.align == 0);
            for (j, b) in problem.items.iter().enumerate().take(i) {
                let bo = found.offsets[j];
                assert!(!a.life.overlaps(b.life) || ao + a.occupied() <= bo || bo + b.occupied() <= ao);
            }
        }
        return ("Found".into(), used);
    }
    (format!("{outcome:?}"), used)
}
