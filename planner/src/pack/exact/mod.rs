//! Exact search.

mod branch;
mod memo;
mod state;
mod tree;

use super::problem::Problem;
use super::sections::Sections;
use super::Rank;

/// Development.
#[doc(hidden)]
pub fn probe(problem: &Problem, limit: u64, rank: Rank, nodes: u64) -> (String, u64, u64) {
    let placed: Vec<usize> = (0..problem.items.len()).collect();
    let sections = Sections::new(problem, &placed);
    let units = state::Units::of(&sections);
    let Some(state) = state::State::new(&sections, &units, limit / units.bytes) else { return ("Infeasible".into(), 0, 0) };
    let mut place = vec![0; placed.len()];
    rank.order(&sections).iter().enumerate().for_each(|(at, &i)| place[i as usize] = at as u32);
    let mut tree = tree::Tree::new(state, tree::Config { rank: place, memo_bits: 20 });
    let status = tree.run(nodes);
    if status == tree::Status::Found {
        for (i, a) in problem.items.iter().enumerate() {
            let ao = tree.state.offsets[i] * units.bytes;
            assert!(ao + a.occupied() <= limit && ao % a.align == 0);
            for (j, b) in problem.items.iter().enumerate().take(i) {
                let bo = tree.state.offsets[j] * units.bytes;
                assert!(!a.life.overlaps(b.life) || ao + a.occupied() <= bo || bo + b.occupied() <= ao);
            }
        }
    }
    (format!("{status:?}"), tree.nodes, tree.hits)
}
