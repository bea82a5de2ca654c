//! Beam search for an order below a threshold: among the states with equally many tasks run, those
//! with the fewest live bytes are expanded.

use super::compact::Compact;
use super::exact::Verdict;
use super::expand::{Child, SearchLimits, State};
use crate::dag::relations::count_looks;
use rustc_hash::FxHashSet;
use std::collections::BTreeMap;
use std::rc::Rc;

/// The number of queued states per expanded state.
const WAITING: usize = 4;

struct Candidate<'a> {
    parent: Rc<State<'a>>,
    /// The next task; `None` at the start.
    child: Option<u32>,
    live: i128,
    key: u128,
}

/// Searches for an order with a peak of at most `threshold`. A beam that never had to drop a state
/// proves that there is no such order if it finds none.
pub(super) fn search(
    problem: &Compact,
    width: usize,
    threshold: i128,
    limits: &mut SearchLimits,
) -> Verdict {
    let start = State::new(problem);
    if start.walk.peak > threshold {
        return Verdict::AtLeast(start.walk.peak);
    }
    let mut seen: FxHashSet<u128> = FxHashSet::default();
    let mut at_least = i128::MAX;
    let mut complete = true;
    let mut levels: BTreeMap<usize, Vec<Candidate>> = BTreeMap::new();
    levels.insert(
        0,
        vec![Candidate {
            parent: Rc::new(start),
            child: None,
            live: 0,
            key: 0,
        }],
    );
    let mut children = Vec::new();
    while let Some((_, mut level)) = levels.pop_first() {
        complete &= keep(&mut level, width);
        for Candidate { parent, child, .. } in level {
            let mut state = Rc::try_unwrap(parent).unwrap_or_else(|parent| {
                count_looks(problem.tasks() as u64);
                (*parent).clone()
            });
            if let Some(task) = child {
                state.follow(task, threshold);
            }
            let expansion = state.expand(threshold, true, &mut children);
            if state.is_complete() {
                return Verdict::Found(state.walk.log);
            }
            at_least = at_least.min(expansion.exceeded);
            if !limits.spend(expansion.effort + 1) {
                return Verdict::Unknown;
            }
            if !seen.insert(state.walk.key) {
                children.clear();
                continue;
            }
            let level = levels.entry(state.walk.log.len() + 1).or_default();
            let parent = Rc::new(state);
            for Child { task, live, key } in children.drain(..) {
                level.push(Candidate {
                    parent: parent.clone(),
                    child: Some(task),
                    live,
                    key,
                });
            }
            if level.len() > WAITING * width + 64 {
                complete &= keep(level, width);
            }
        }
    }
    if complete {
        Verdict::AtLeast(at_least)
    } else {
        Verdict::Unknown
    }
}

/// Keeps the best states of a level, without duplicates; returns whether none had to be dropped.
fn keep(level: &mut Vec<Candidate>, width: usize) -> bool {
    level.sort_by_key(|candidate| (candidate.live, candidate.key));
    level.dedup_by_key(|candidate| candidate.key);
    let complete = level.len() <= width;
    level.truncate(width);
    complete
}
