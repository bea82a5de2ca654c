//! One depth-first search, which can be interrupted and resumed after every node.

use super::branch::{Child, Valley};
use super::memo::{Entry, Memo, mix};
use super::state::State;
use std::ops::Range;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Status {
    Open,
    Found,
    Infeasible,
}

enum Frame {
    Branch(Branch),
    /// Parts without a common item; those before `next` are solved.
    Split {
        first: usize,
        next: usize,
        end: usize,
    },
}

/// A section to branch on: the children from `next` on are still to be tried.
struct Branch {
    /// A range of sections that no unplaced item leaves.
    part: Range<u32>,
    key: u128,
    section: u32,
    /// The mark that restores the state.
    mark: usize,
    first: usize,
    next: usize,
    /// The sections that the last child changed.
    touched: Range<u32>,
    /// Whether the last child's changes in one section depended on its changes in another.
    chained: bool,
    /// Sections that explain why the children so far, and everything other than the children, are
    /// impossible.
    why: Range<u32>,
}

impl Branch {
    /// Records that the last child is impossible because of these sections.
    fn explain(&mut self, why: Range<u32>) {
        self.why = hull(&self.why, &why);
        if self.chained {
            self.why = hull(&self.why, &self.touched);
        }
    }
}

/// The next step of the search.
#[derive(Clone)]
enum Step {
    Enter(Range<u32>),
    Solved,
    /// The part has no completion, nor has any part that looks the same in these sections: the same
    /// floors, the same unplaced items, the same lowest offsets.
    Failed(Range<u32>),
}

/// The smallest range that contains both.
fn hull(a: &Range<u32>, b: &Range<u32>) -> Range<u32> {
    a.start.min(b.start)..a.end.max(b.end)
}

/// A depth-first search for one completion, in one order.
pub(super) struct Tree {
    pub(super) state: State,
    /// The place of each item in the order of preference.
    rank: Vec<u32>,
    /// The impossible states that this search found since it last merged them into the common memo.
    failures: Vec<Entry>,
    memo: Memo,
    frames: Vec<Frame>,
    children: Vec<Child>,
    parts: Vec<Range<u32>>,
    step: Step,
    pub(super) nodes: u64,
}

/// The number of nodes between two checks whether to stop.
const NODES_PER_STOP: u64 = 128;

/// The memo of one search grows up to two to the power of this many keys.
const OWN_BITS: u32 = 16;

impl Tree {
    /// A search that starts at `state`; `rank` is each item's place in the order of preference.
    pub(super) fn new(state: State, rank: Vec<u32>) -> Tree {
        let all = 0..state.sections() as u32;
        Tree {
            rank,
            failures: Vec::new(),
            memo: Memo::new(OWN_BITS),
            frames: Vec::new(),
            children: Vec::new(),
            parts: Vec::new(),
            step: if all.is_empty() {
                Step::Solved
            } else {
                Step::Enter(all)
            },
            nodes: 0,
            state,
        }
    }

    /// Visits about `nodes` nodes, or stops when `stop` says so, which is checked now and then.
    pub(super) fn run(&mut self, nodes: u64, common: &Memo, stop: impl Fn() -> bool) -> Status {
        let end = self.nodes.saturating_add(nodes);
        while self.nodes < end {
            let next = match &self.step {
                Step::Enter(part) => {
                    if self.nodes.is_multiple_of(NODES_PER_STOP) && stop() {
                        return Status::Open;
                    }
                    let part = part.clone();
                    Some(self.enter(part, common))
                }
                Step::Solved => self.solved(),
                Step::Failed(why) => {
                    let why = why.clone();
                    self.failed(why, common)
                }
            };
            match (next, &self.step) {
                (Some(step), _) => self.step = step,
                (None, Step::Solved) => return Status::Found,
                (None, _) => return Status::Infeasible,
            }
        }
        Status::Open
    }

    /// Moves the impossible states that this search found into the common memo.
    pub(super) fn share(&mut self, common: &mut Memo) {
        self.failures
            .drain(..)
            .for_each(|entry| common.insert(entry));
        self.memo.clear();
    }

    /// The reason why a state has no completion, if it is known.
    fn known(&self, key: u128, common: &Memo) -> Option<Range<u32>> {
        common.get(key).or_else(|| self.memo.get(key))
    }

    /// The key of a part of the state: the unplaced items and the headroom above the floors. A part
    /// that is impossible under one limit is impossible under others with the same headroom, unless
    /// alignments make a difference.
    fn key(&self, part: &Range<u32>) -> u128 {
        let mut key = if self.state.aligned {
            mix(self.state.limit, u64::MAX)
        } else {
            0
        };
        for s in part.start as usize..part.end as usize {
            key ^= mix(
                (self.state.limit - self.state.floor[s]) << 1 | u64::from(self.state.real[s]),
                s as u64 + 1,
            );
            key ^= self.state.keys[s];
        }
        key
    }

    fn enter(&mut self, part: Range<u32>, common: &Memo) -> Step {
        self.nodes += 1;
        let key = self.key(&part);
        if let Some(why) = self.known(key, common) {
            return Step::Failed(why);
        }
        let Valley { section, why } = self.state.choose(part.start as usize, part.end as usize);
        let first = self.children.len();
        self.children
            .extend(self.state.candidates(section).map(Child::Place));
        let rank = &self.rank;
        self.children[first..].sort_unstable_by_key(|child| match child {
            Child::Place(i) => rank[*i as usize],
            Child::Raise(_) => u32::MAX,
        });
        if self.state.limit - self.state.floor[section] > self.state.rest[section]
            && let Some(next) = self.state.raised(section)
        {
            self.children.push(Child::Raise(next));
        }
        let mark = self.state.mark();
        self.frames.push(Frame::Branch(Branch {
            part,
            key,
            section: section as u32,
            mark,
            first,
            next: first,
            touched: 0..0,
            chained: false,
            why,
        }));
        self.advance(common)
    }

    /// Tries the next child of the topmost frame, a choice.
    fn advance(&mut self, common: &Memo) -> Step {
        loop {
            let Some(Frame::Branch(choice)) = self.frames.last_mut() else {
                return Step::Solved;
            };
            let Some(&child) = self.children.get(choice.next) else {
                let why = choice.why.clone();
                self.give_up(why.clone());
                return Step::Failed(why);
            };
            choice.next += 1;
            let conflict = match child {
                Child::Place(i) => self.state.place(i),
                Child::Raise(floor) => self.state.raise(choice.section as usize, floor),
            };
            choice.touched = self.state.touched.clone();
            choice.chained = self.state.chained;
            match conflict {
                None => {
                    let part = choice.part.clone();
                    return self.split(part, common);
                }
                Some(section) => choice.explain(section..section + 1),
            }
            let mark = choice.mark;
            self.state.undo(mark);
        }
    }

    /// Records that the topmost frame, a choice, has no completion, and leaves it.
    fn give_up(&mut self, why: Range<u32>) {
        if let Some(Frame::Branch(choice)) = self.frames.pop() {
            let entry = Entry::new(choice.key, why);
            self.memo.insert(entry.clone());
            self.failures.push(entry);
            self.children.truncate(choice.first);
        }
    }

    /// Continues with the unsolved rest of a part.
    fn split(&mut self, part: Range<u32>, common: &Memo) -> Step {
        let first = self.parts.len();
        let mut from = part.start;
        for s in part.clone() {
            if s + 1 == part.end || self.state.crossing[s as usize] == 0 {
                if !self.state.is_closed(s as usize) {
                    self.parts.push(from..s + 1);
                }
                from = s + 1;
            }
        }
        match self.parts.len() - first {
            0 => Step::Solved,
            1 => self.parts.pop().map_or(Step::Solved, Step::Enter),
            _ => {
                if let Some(why) = self.parts[first..]
                    .iter()
                    .find_map(|part| self.known(self.key(part), common))
                {
                    self.parts.truncate(first);
                    return Step::Failed(why);
                }
                // Small parts first, because their contradictions are found soonest.
                self.parts[first..].sort_by_key(|part| part.end - part.start);
                self.frames.push(Frame::Split {
                    first,
                    next: first + 1,
                    end: self.parts.len(),
                });
                Step::Enter(self.parts[first].clone())
            }
        }
    }

    /// The current part is complete.
    fn solved(&mut self) -> Option<Step> {
        loop {
            match self.frames.last_mut()? {
                Frame::Branch(choice) => self.children.truncate(choice.first),
                Frame::Split { next, end, .. } if *next < *end => {
                    *next += 1;
                    return Some(Step::Enter(self.parts[*next - 1].clone()));
                }
                Frame::Split { first, .. } => self.parts.truncate(*first),
            }
            self.frames.pop();
        }
    }

    /// The current part has no completion, because of these sections. Choices that changed nothing
    /// there are left at once.
    fn failed(&mut self, why: Range<u32>, common: &Memo) -> Option<Step> {
        loop {
            match self.frames.last_mut()? {
                Frame::Branch(choice) => {
                    let mark = choice.mark;
                    let matters = choice.touched.start < why.end && why.start < choice.touched.end;
                    self.state.undo(mark);
                    if matters {
                        choice.explain(why);
                        return Some(self.advance(common));
                    }
                    self.give_up(why.clone());
                }
                Frame::Split { first, .. } => {
                    self.parts.truncate(*first);
                    self.frames.pop();
                }
            }
        }
    }
}
