//! One depth-first search, which can be interrupted and resumed after every node.

use super::branch::Child;
use super::memo::{Memo, mix};
use super::state::State;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Status {
    Running,
    Found,
    Infeasible,
}

/// A range of sections that no item still to be placed leaves.
#[derive(Clone, Copy, Debug)]
struct Part {
    from: u32,
    to: u32,
}

enum Frame {
    /// A section, and what can be done about it: the children from `next` on are still to be tried.
    Choice { key: u128, section: u32, mark: usize, part: Part, first: usize, next: usize },
    /// Parts that do not touch each other; those before `next` are solved.
    Split { mark: usize, first: usize, next: usize, end: usize },
}

/// What the search does next.
enum Step {
    Enter(Part),
    Solved,
    Failed,
}

/// How a search goes about it.
#[derive(Clone)]
pub(super) struct Config {
    /// The place of each item in the order of preference.
    pub(super) rank: Vec<u32>,
    pub(super) memo_bits: u32,
}

pub(super) struct Tree {
    pub(super) state: State,
    config: Config,
    memo: Memo,
    item_keys: Vec<u128>,
    frames: Vec<Frame>,
    children: Vec<Child>,
    parts: Vec<Part>,
    step: Option<Step>,
    pub(super) nodes: u64,
    pub(super) hits: u64,
    pub(super) conflicts: Vec<u64>,
}

impl Tree {
    pub(super) fn new(state: State, config: Config) -> Tree {
        let all = Part { from: 0, to: state.sections() as u32 };
        Tree {
            memo: Memo::new(config.memo_bits),
            config,
            item_keys: (0..state.items.len()).map(|i| mix(i as u64, 1)).collect(),
            frames: Vec::new(),
            children: Vec::new(),
            parts: Vec::new(),
            step: Some(if all.to == 0 { Step::Solved } else { Step::Enter(all) }),
            nodes: 0,
            hits: 0,
            conflicts: vec![0; state.sections()],
            state,
        }
    }

    /// Goes on for about so many nodes.
    pub(super) fn run(&mut self, nodes: u64) -> Status {
        let end = self.nodes.saturating_add(nodes);
        while self.nodes < end {
            self.step = Some(match self.step.take() {
                Some(Step::Enter(part)) => self.enter(part),
                Some(Step::Solved) => match self.solved() {
                    Some(step) => step,
                    None => {
                        self.step = Some(Step::Solved);
                        return Status::Found;
                    }
                },
                Some(Step::Failed) | None => match self.failed() {
                    Some(step) => step,
                    None => {
                        self.step = Some(Step::Failed);
                        return Status::Infeasible;
                    }
                },
            });
        }
        Status::Running
    }

    /// What tells a part of the state apart from others: its floors and the items not placed.
    fn key(&self, part: Part) -> u128 {
        let mut key = 0u128;
        for s in part.from as usize..part.to as usize {
            key ^= mix(self.state.floor[s] << 1 | u64::from(self.state.real[s]), s as u64 + 2);
            for &i in self.state.waiting(s) {
                if self.state.items[i as usize].start as usize == s {
                    key ^= self.item_keys[i as usize];
                }
            }
        }
        key
    }

    fn enter(&mut self, part: Part) -> Step {
        self.nodes += 1;
        let key = self.key(part);
        if self.memo.contains(key) {
            self.hits += 1;
            return Step::Failed;
        }
        let choice = self.state.choose(part.from as usize, part.to as usize);
        let section = choice.section;
        let first = self.children.len();
        self.children.extend(self.state.candidates(section).map(Child::Place));
        let rank = &self.config.rank;
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
        self.advance()
    }

    /// Tries the next child of the topmost frame, a choice.
    fn advance(&mut self) -> Step {
        loop {
            let Some(Frame::Choice { key, section, mark, part, first, next }) = self.frames.last_mut() else {
                return Step::Failed;
            };
            let Some(&child) = self.children.get(*next) else {
                self.memo.insert(*key);
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
                if let Some(step) = self.split(part) {
                    return step;
                }
                continue;
            }
            let mark = *mark;
            self.conflicts[self.state.conflict as usize] += 1;
            self.state.undo(mark);
        }
    }

    /// Goes on with what is left of a part. Nothing, if some of it is known to be impossible (and the change undone).
    fn split(&mut self, part: Part) -> Option<Step> {
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
                    if self.memo.contains(self.key(self.parts[k])) {
                        self.hits += 1;
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
    fn failed(&mut self) -> Option<Step> {
        loop {
            match self.frames.last() {
                Some(&Frame::Choice { mark, .. }) => {
                    self.state.undo(mark);
                    return Some(self.advance());
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
