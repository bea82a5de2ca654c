//! Beam search: of the states with equally many tasks run, the best few are followed.

use super::compact::{Compact, Walk};
use super::expand::{Child, Limits, State};
use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;

/// States that wait to be followed, for each that is.
const WAITING: usize = 4;

struct Candidate<'a> {
    parent: Rc<State<'a>>,
    child: Child,
}

/// The best order with a peak below `ceiling` that a beam of some width meets, and its peak. Peaks up to `floor` are all
/// the same to it.
pub(super) fn search(problem: &Compact, width: usize, floor: i128, ceiling: i128, limits: &mut Limits) -> Option<(Vec<u32>, i128)> {
    let tasks = problem.tasks();
    let mut ceiling = ceiling;
    let mut best = None;
    let mut seen: HashMap<u128, i128> = HashMap::new();
    let mut levels: BTreeMap<usize, Vec<Candidate>> = BTreeMap::new();
    let nothing = Child { segment: Box::default(), live: 0, peak: 0, key: 0 };
    levels.insert(0, vec![Candidate { parent: Rc::new(State::new(Walk::new(problem))), child: nothing }]);
    let mut children = Vec::new();
    while let Some((_, mut level)) = levels.pop_first() {
        keep(&mut level, width, floor);
        for Candidate { parent, child } in level {
            if child.peak >= ceiling {
                continue;
            }
            let mut state = Rc::try_unwrap(parent).unwrap_or_else(|parent| (*parent).clone());
            state.follow(&child.segment);
            let expansion = state.expand(floor, ceiling, &mut children);
            if state.walk.log.len() == tasks {
                if state.walk.peak < ceiling {
                    ceiling = state.walk.peak;
                    best = Some((state.walk.log, ceiling));
                    if ceiling <= floor {
                        return best;
                    }
                }
                continue;
            }
            if !limits.spend(expansion.effort + 1) {
                return best;
            }
            let known = seen.entry(state.walk.key).or_insert(i128::MAX);
            if *known <= state.walk.peak {
                children.clear();
                continue;
            }
            *known = state.walk.peak;
            let run = state.walk.log.len();
            let parent = Rc::new(state);
            for child in children.drain(..) {
                let level = levels.entry(run + child.segment.len()).or_default();
                level.push(Candidate { parent: parent.clone(), child });
                if level.len() > WAITING * width + 64 {
                    keep(level, width, floor);
                }
            }
        }
    }
    best
}

/// The best few of a level, no state twice.
fn keep(level: &mut Vec<Candidate>, width: usize, floor: i128) {
    level.sort_by_key(|Candidate { child, .. }| (child.peak.max(floor), child.live, child.key));
    level.dedup_by_key(|candidate| candidate.child.key);
    level.truncate(width);
}
