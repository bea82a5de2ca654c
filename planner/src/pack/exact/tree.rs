//! One depth-first search, which can be interrupted and resumed after every node.

use super::branch::Child;
use super::memo::{Memo, mix};
use super::state::State;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Status {
    Open,
    Found,
    Infeasible,
}

/// A range of sections that no item still to be placed leaves.
#[derive(Clone, Copy, Debug)]
struct Part {
    from: u32,
    to: u32,
}

#[derive(Clone)]
enum Frame {
    /// A section, and what can be done about it: the children from `next` on are still to be tried.
    Choice { key: u128, section: u32, mark: usize, part: Part, first: usize, next: usize },
    /// Parts that do not touch each other; those before `next` are solved.
    Split { mark: usize, first: usize, next: usize, end: usize },
}

/// What the search does next.
#[derive(Clone, Copy)]
enum Step {
    Enter(Part),
    Solved,
    Failed,
}

/// A search for one completion, in one order.
pub(super) struct Tree {
    pub(super) state: State,
    /// The place of each item in the order of preference.
    rank: Vec<u32>,
    /// What this search found impossible since its memo was last emptied into the common one.
    failures: Vec<u128>,
    memo: Memo,
    frames: Vec<Frame>,
    children: Vec<Child>,
    parts: Vec<Part>,
    step: Step,
    pub(super) nodes: u64,
}

/// How often a search asks whether to stop.
const NODES_PER_STOP: u64 = 128;

/// The memo of one search grows up to two to this many keys.
const OWN_BITS: u32 = 16;

impl Tree {
    /// A search from `state` on; `rank` is each item's place in the order of preference.
    pub(super) fn new(state: State, rank: Vec<u32>) -> Tree {
        let all = Part { from: 0, to: state.sections() as u32 };
        Tree {
            rank,
            failures: Vec::new(),
            memo: Memo::new(OWN_BITS),
            frames: Vec::new(),
            children: Vec::new(),
            parts: Vec::new(),
            step: if all.to == 0 { Step::Solved } else { Step::Enter(all) },
            nodes: 0,
            state,
        }
    }

    /// Goes on for about so many nodes, or until `stop` says so, which is asked now and then.
    pub(super) fn run(&mut self, nodes: u64, common: &Memo, stop: impl Fn() -> bool) -> Status {
        let end = self.nodes.saturating_add(nodes);
        while self.nodes < end {
            let next = match self.step {
                Step::Enter(part) => {
                    if self.nodes.is_multiple_of(NODES_PER_STOP) && stop() {
                        return Status::Open;
                    }
                    Some(self.enter(part, common))
                }
                Step::Solved => self.solved(),
                Step::Failed => self.failed(common),
            };
            match (next, self.step) {
                (Some(step), _) => self.step = step,
                (None, Step::Solved) => return Status::Found,
                (None, _) => return Status::Infeasible,
            }
        }
        Status::Open
    }

    /// Empties what the search found impossible into the memo of all.
    pub(super) fn share(&mut self, common: &mut Memo) {
        self.failures.drain(..).for_each(|key| common.insert(key));
        self.memo.clear();
    }

    fn is_known(&self, key: u128, common: &Memo) -> bool {
        common.contains(key) || self.memo.contains(key)
    }

    /// What tells a part of the state apart from others: the items not placed and the room above the floors. What is
    /// impossible under one limit is so under others with the same room, unless alignments make a difference.
    fn key(&self, part: Part) -> u128 {
        let mut key = if self.state.aligned { mix(self.state.limit, u64::MAX) } else { 0 };
        for s in part.from as usize..part.to as usize {
            key ^= mix((self.state.limit - self.state.floor[s]) << 1 | u64::from(self.state.real[s]), s as u64 + 1);
            key ^= self.state.keys[s];
        }
        key
    }

    fn enter(&mut self, part: Part, common: &Memo) -> Step {
        self.nodes += 1;
        let key = self.key(part);
        if self.is_known(key, common) {
            return Step::Failed;
        }
        let choice = self.state.choose(part.from as usize, part.to as usize);
        let section = choice.section;
        let first = self.children.len();
        self.children.extend(self.state.candidates(section).map(Child::Place));
        let rank = &self.rank;
        self.children[first..].sort_unstable_by_key(|child| match child {
            Child::Place(i) => rank[*i as usize],
            Child::Raise(_) => u32::MAX,
        });
        if self.state.limit - self.state.floor[section] > self.state.rest[section] {
            if let Some(next) = self.state.raised(section) {
                self.children.push(Child::Raise(next));
            }
        }
        self.frames.push(Frame::Choice { key, section: section as u32, mark: self.state.mark(), part, first, next: first });
        self.advance(common)
    }

    /// Tries the next child of the topmost frame, a choice.
    fn advance(&mut self, common: &Memo) -> Step {
        loop {
            let Some(Frame::Choice { key, section, mark, part, first, next }) = self.frames.last_mut() else {
                return Step::Failed;
            };
            let Some(&child) = self.children.get(*next) else {
                self.memo.insert(*key);
                self.failures.push(*key);
                self.children.truncate(*first);
                self.frames.pop();
                return Step::Failed;
            };
            *next += 1;
            let fits = match child {
                Child::Place(i) => self.state.place(i),
                Child::Raise(floor) => self.state.raise(*section as usize, floor),
            };
            if fits {
                let part = *part;
                if let Some(step) = self.split(part, common) {
                    return step;
                }
                continue;
            }
            let mark = *mark;
            self.state.undo(mark);
        }
    }

    /// Goes on with what is left of a part. Nothing, if some of it is known to be impossible (and the change undone).
    fn split(&mut self, part: Part, common: &Memo) -> Option<Step> {
        let first = self.parts.len();
        let mut from = part.from;
        for s in part.from..part.to {
            if s + 1 == part.to || self.state.crossing[s as usize] == 0 {
                if !self.state.is_closed(s as usize) {
                    self.parts.push(Part { from, to: s + 1 });
                }
                from = s + 1;
            }
        }
        match self.parts.len() - first {
            0 => Some(Step::Solved),
            1 => self.parts.pop().map(Step::Enter),
            _ => {
                for k in first..self.parts.len() {
                    if self.is_known(self.key(self.parts[k]), common) {
                        self.parts.truncate(first);
                        if let Some(Frame::Choice { mark, .. }) = self.frames.last() {
                            self.state.undo(*mark);
                        }
                        return None;
                    }
                }
                // Small parts first: what they contradict is known soonest.
                self.parts[first..].sort_by_key(|part| part.to - part.from);
                self.frames.push(Frame::Split { mark: self.state.mark(), first, next: first + 1, end: self.parts.len() });
                Some(Step::Enter(self.parts[first]))
            }
        }
    }

    /// The part at hand is complete.
    fn solved(&mut self) -> Option<Step> {
        loop {
            match self.frames.last_mut() {
                Some(Frame::Choice { first, .. }) => self.children.truncate(*first),
                Some(Frame::Split { next, end, .. }) if *next < *end => {
                    *next += 1;
                    return Some(Step::Enter(self.parts[*next - 1]));
                }
                Some(Frame::Split { first, .. }) => self.parts.truncate(*first),
                None => return None,
            }
            self.frames.pop();
        }
    }

    /// The part at hand has no completion.
    fn failed(&mut self, common: &Memo) -> Option<Step> {
        loop {
            match self.frames.last() {
                Some(&Frame::Choice { mark, .. }) => {
                    self.state.undo(mark);
                    return Some(self.advance(common));
                }
                Some(&Frame::Split { mark, first, .. }) => {
                    self.state.undo(mark);
                    self.parts.truncate(first);
                    self.frames.pop();
                }
                None => return None,
            }
        }
    }
}
