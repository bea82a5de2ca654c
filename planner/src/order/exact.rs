//! Depth-first search for an order below a threshold: it finds one, or proves that there is none.

use super::compact::{Compact, Mark};
use super::expand::{Child, SearchLimits, State};
use rustc_hash::FxHashSet;

/// The most states remembered for one threshold.
const STATES_MAX: usize = 4 << 20;

/// The result of a search below a threshold.
pub(super) enum Verdict {
    /// An order whose peak is at most the threshold.
    Found(Vec<u32>),
    /// There is no such order, nor one with a peak below this.
    AtLeast(i128),
    /// The limit was reached.
    Unknown,
}

struct Frame {
    mark: Mark,
    ready: Vec<u32>,
    children: Vec<Child>,
}

/// Searches for an order with a peak of at most `threshold`. States are identified by keys of 128
/// random bits, so that two of a billion states are confused with a probability below 10⁻²⁰.
pub(super) fn search(problem: &Compact, threshold: i128, limits: &mut SearchLimits) -> Verdict {
    let mut state = State::new(problem);
    let mut visited: FxHashSet<u128> = FxHashSet::default();
    let mut frames: Vec<Frame> = Vec::new();
    let mut at_least = i128::MAX;
    let mut mark = state.walk.mark();
    if state.walk.peak > threshold {
        return Verdict::AtLeast(state.walk.peak);
    }
    loop {
        // The state has just been reached.
        let mut children = Vec::new();
        let expansion = state.expand(threshold, false, &mut children);
        if state.is_complete() {
            return Verdict::Found(state.walk.log);
        }
        at_least = at_least.min(expansion.exceeded);
        if !limits.spend(expansion.effort + 1) || visited.len() >= STATES_MAX {
            return Verdict::Unknown;
        }
        if !visited.insert(state.walk.key) {
            children.clear();
        }
        // The child with the fewest live bytes is followed first.
        children.sort_by_key(|child| (std::cmp::Reverse(child.live), child.key));
        frames.push(Frame {
            mark,
            ready: state.ready.clone(),
            children,
        });
        loop {
            let Some(frame) = frames.last_mut() else {
                return Verdict::AtLeast(at_least);
            };
            match frame.children.pop() {
                Some(child) if visited.contains(&child.key) => {}
                Some(child) => {
                    mark = state.walk.mark();
                    state.ready.clone_from(&frame.ready);
                    state.follow(child.task, threshold);
                    break;
                }
                None => {
                    state.walk.undo(frame.mark);
                    frames.pop();
                }
            }
        }
    }
}
