//! Beam search for an order below a threshold: of the states with equally many tasks run, the few with the fewest live
//! bytes are followed.

use super::compact::{Compact, Walk};
use super::exact::Verdict;
use super::expand::{Child, Limits, State};
use std::collections::{BTreeMap, HashSet};
use std::rc::Rc;

/// States that wait to be followed, for each that is.
const WAITING: usize = 4;

struct Candidate<'a> {
    parent: Rc<State<'a>>,
    child: Child,
}

/// Looks for an order with a peak of `threshold` at most. A beam that never had to leave out a state proves that there is
/// none if it finds none.
pub(super) fn search(problem: &Compact, width: usize, threshold: i128, limits: &mut Limits) -> Verdict {
    let start = State::new(Walk::new(problem));
    if start.walk.peak > threshold {
        return Verdict::AtLeast(start.walk.peak);
    }
    let mut seen: HashSet<u128> = HashSet::new();
    let mut at_least = i128::MAX;
    let mut complete = true;
    let mut levels: BTreeMap<usize, Vec<Candidate>> = BTreeMap::new();
    let nothing = Child { segment: Box::default(), live: 0, key: 0 };
    levels.insert(0, vec![Candidate { parent: Rc::new(start), child: nothing }]);
    let mut children = Vec::new();
    while let Some((_, mut level)) = levels.pop_first() {
        complete &= keep(&mut level, width);
        for Candidate { parent, child } in level {
            let mut state = Rc::try_unwrap(parent).unwrap_or_else(|parent| (*parent).clone());
            state.follow(&child.segment);
            let expansion = state.expand(threshold, &mut children);
            if state.walk.log.len() == problem.tasks() {
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
            let run = state.walk.log.len();
            let parent = Rc::new(state);
            for child in children.drain(..) {
                let level = levels.entry(run + child.segment.len()).or_default();
                level.push(Candidate { parent: parent.clone(), child });
                if level.len() > WAITING * width + 64 {
                    complete &= keep(level, width);
                }
            }
        }
    }
    if complete { Verdict::AtLeast(at_least) } else { Verdict::Unknown }
}

/// The best few of a level, no state twice; whether none had to be left out.
fn keep(level: &mut Vec<Candidate>, width: usize) -> bool {
    level.sort_by_key(|Candidate { child, .. }| (child.live, child.key));
    level.dedup_by_key(|candidate| candidate.child.key);
    let complete = level.len() <= width;
    level.truncate(width);
    complete
}
