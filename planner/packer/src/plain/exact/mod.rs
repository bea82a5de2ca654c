//! Exact search: packings under ever lower limits, until one is proved to be the lowest.
//!
//! A partial packing is a set of placed items and the *floor* of each section, below which nothing
//! more is placed. The search picks a valley of the floors and a section in it, and tries every
//! item that can lie on the floor there, and then that no item does. Three ideas are those of
//! Moffitt, "MiniMalloc: A Lightweight Memory Allocator for Hardware-Accelerated Machine Learning"
//! (ASPLOS 2023): placing items from the ground up, with the sum of floor and sizes of a section as
//! a bound ("section inference"); floors that rise to the lowest item; and splitting at instants
//! that no life spans. Two differ: the search branches on the section with the fewest possibilities
//! rather than on the order of offsets; and, because a state is then identified by its floors and
//! the unplaced items, a state that was proved impossible is never tried again, in any order and by
//! any of the searches.

mod branch;
mod memo;
mod search;
mod state;
mod sums;
mod tree;

#[cfg(test)]
mod tests;

use super::Found;
use super::sections::Sections;
use memo::Memo;
pub(super) use search::ROUND;
use search::{Outcome, Search};
use state::Units;
use std::borrow::Cow;
use std::time::Instant;

/// The memo grows up to two to the power of this many keys of 16 bytes.
const MEMO_BITS: u32 = 22;

/// The most limits that are decided without a charge, one after the other.
const DECIDED_MAX: u32 = 1 << 12;

/// Lowers a packing until it is optimal.
///
/// The lowest possible limit is tried first, then limits halfway to the best height, all for the
/// same number of nodes; then the sweep repeats with twice as many. Searches are resumed, not
/// restarted.
pub(super) struct Exact<'a> {
    /// Sizes in bytes: the unused rests of units matter here.
    sections: Cow<'a, Sections>,
    seed: u64,
    unit: u64,
    best: Found,
    /// The proved lower bound of the height.
    lower_bound: u64,
    memo: Memo,
    /// Unfinished searches by limit, in units.
    searches: Vec<(u64, Search)>,
    /// The current limit, the nodes for each limit in this sweep, and the nodes left for this one.
    limit: u64,
    grant: u64,
    left: u64,
    credit: u64,
    /// The limits decided since nodes were last charged.
    decided: u32,
}

impl<'a> Exact<'a> {
    /// Starts from the packing `best` and a proved lower bound.
    pub(super) fn new(sections: &'a Sections, best: Found, lower_bound: u64, seed: u64) -> Self {
        let sections = sections.in_bytes();
        let unit = Units::of(&sections).bytes;
        let mut exact = Exact {
            sections,
            seed,
            unit,
            best,
            lower_bound: lower_bound.div_ceil(unit).saturating_mul(unit),
            memo: Memo::new(MEMO_BITS),
            searches: Vec::new(),
            limit: 0,
            grant: ROUND,
            left: ROUND,
            credit: 0,
            decided: 0,
        };
        exact.limit = exact.lower_bound / unit;
        exact
    }

    /// Adopts a packing found elsewhere if it is lower.
    pub(super) fn offer(&mut self, found: &Found) {
        if found.height < self.best.height {
            self.best = found.clone();
        }
    }

    /// The lowest packing so far.
    pub(super) fn best(&self) -> &Found {
        &self.best
    }

    /// The proved lower bound of the height.
    pub(super) fn lower_bound(&self) -> u64 {
        self.lower_bound
    }

    /// Whether the search is finished for a packing of at most `goal` bytes.
    pub(super) fn is_done(&self, goal: u64) -> bool {
        self.best.height <= goal.max(self.lower_bound)
    }

    /// Visits `nodes` nodes, or stops when the goal is met. Several calls are equivalent to one
    /// with the sum of their nodes. With a deadline, the result depends on the machine.
    pub(super) fn run(&mut self, goal: u64, nodes: u64, threads: usize, deadline: Option<Instant>) {
        self.credit = self.credit.saturating_add(nodes);
        while !self.is_done(goal)
            && self.credit >= ROUND
            && deadline.is_none_or(|deadline| Instant::now() < deadline)
        {
            // Nodes spent on a decided limit are not charged, because mostly there are few limits: each
            // halves the open range. But where each limit from the bound on is refuted at once, there
            // are as many as units up to the best height.
            if self.round(goal, threads, deadline) || self.decided == DECIDED_MAX {
                self.credit -= ROUND;
                self.decided = 0;
            } else {
                self.decided += 1;
            }
        }
    }

    /// One round of the search at the current limit; returns whether that limit is still open.
    /// Packings below the goal are not searched for.
    fn round(&mut self, goal: u64, threads: usize, deadline: Option<Instant>) -> bool {
        self.limit = self.limit.max(goal / self.unit);
        let at = self
            .searches
            .iter()
            .position(|(limit, _)| *limit == self.limit)
            .unwrap_or_else(|| {
                self.searches.push((
                    self.limit,
                    Search::new(&self.sections, self.limit * self.unit, self.seed),
                ));
                self.searches.len() - 1
            });
        self.left = self.left.saturating_sub(ROUND);
        let mut is_open = false;
        match self.searches[at]
            .1
            .run(ROUND, &mut self.memo, threads, deadline)
        {
            Outcome::Open if self.left > 0 => return true,
            Outcome::Open => is_open = true,
            Outcome::Found(found) => self.best = found.clone(),
            Outcome::Infeasible => {
                self.lower_bound = self.lower_bound.max((self.limit + 1) * self.unit)
            }
        }
        let (low, high) = (
            self.lower_bound.max(goal) / self.unit,
            self.best.height.div_ceil(self.unit).saturating_sub(1),
        );
        let last = self.limit;
        self.searches
            .retain(|(limit, _)| (low..=high).contains(limit));
        // The largest open limit below; halfway from there to the best height.
        let open = self
            .searches
            .iter()
            .map(|(limit, _)| *limit)
            .filter(|&limit| limit <= last)
            .max();
        self.limit = match open {
            None => low,
            Some(open) if open < high => high - (high - open) / 2,
            Some(_) => {
                self.grant = self.grant.saturating_mul(2);
                low
            }
        };
        self.left = self.grant;
        is_open
    }
}
