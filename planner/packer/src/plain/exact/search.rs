//! The decision whether a packing under a limit exists, by several searches at once.

use super::super::sections::Sections;
use super::super::{Found, luby};
use super::memo::Memo;
use super::state::{State, Units};
use super::tree::{Status, Tree};
use crate::method::Rank;
use crate::random::Random;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread::{self, Builder};
use std::time::Instant;

/// The result for a limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// A packing under it.
    Found(Found),
    /// No packing exists.
    Infeasible,
    /// Undecided.
    Open,
}

/// The orders that searches start with; random ones follow.
const RANKS: [Rank; 4] = [
    Rank::TotalWidthArea,
    Rank::SizeWidth,
    Rank::TotalAreaWidth,
    Rank::Area,
];

/// The number of searches that take turns.
const SLOTS: usize = 8;

/// The number of them that are never restarted; the others are restarted in other orders.
const STEADY: usize = 4;

/// Nodes of one search in one round.
const SLICE: u64 = 1000;

/// Nodes of all searches in one round.
pub(in crate::plain) const ROUND: u64 = SLICE * SLOTS as u64;

/// The sum over all items of the sections of their lives, beyond which a search needs too much
/// memory.
const ENTRIES_MAX: u64 = 4 << 20;

/// Searches for a packing under a limit, in rounds.
///
/// In one round each of several searches visits the same number of nodes, in parallel. Then their
/// results are read in the order of the searches, and the impossible states that they found are
/// shared. Therefore the number of threads affects only the time.
pub(super) struct Search {
    units: Units,
    start: Option<State>,
    orders: Vec<Vec<u32>>,
    slots: Vec<Slot>,
    random: Random,
    /// Granted nodes that whole rounds have not used up.
    credit: u64,
    restarts: u64,
    outcome: Outcome,
}

struct Slot {
    tree: Tree,
    status: Status,
    /// The search is restarted when its nodes exceed this.
    nodes_max: u64,
}

impl Search {
    /// Looks for packings of at most `limit` bytes.
    pub(super) fn new(sections: &Sections, limit: u64, seed: u64) -> Search {
        let units = Units::of(sections);
        let mut search = Search {
            orders: RANKS.iter().map(|rank| rank.order(sections)).collect(),
            start: None,
            slots: Vec::new(),
            random: Random(seed),
            credit: 0,
            restarts: 0,
            outcome: Outcome::Open,
            units,
        };
        // Stacked one above the other, in whole units of the coarsest alignment, everything fits.
        let coarsest = sections
            .spans
            .iter()
            .map(|span| span.align)
            .fold(1, u64::max);
        let stacked = sections.spans.iter().fold(0u64, |sum, span| {
            sum.saturating_add(
                span.size
                    .checked_next_multiple_of(coarsest)
                    .unwrap_or(u64::MAX),
            )
        });
        let limit = limit.min(stacked) / search.units.bytes;
        let entries: u64 = sections
            .spans
            .iter()
            .map(|span| u64::from(span.end - span.start))
            .sum();
        if sections.lower_bound().div_ceil(search.units.bytes) > limit {
            search.outcome = Outcome::Infeasible;
        } else if limit <= u64::MAX / 4 && entries <= ENTRIES_MAX {
            let start = State::new(sections, &search.units, limit);
            for k in 0..SLOTS {
                let order = search
                    .orders
                    .get(k)
                    .cloned()
                    .unwrap_or_else(|| search.random_order());
                search.slots.push(Slot::new(
                    &start,
                    &order,
                    if k < STEADY { u64::MAX } else { SLICE },
                ));
            }
            search.start = Some(start);
        }
        search
    }

    /// Visits `nodes` nodes; several calls are equivalent to one with the sum of their nodes. A
    /// deadline ends it at any time; the result then depends on the machine.
    pub(super) fn run(
        &mut self,
        nodes: u64,
        memo: &mut Memo,
        threads: usize,
        deadline: Option<Instant>,
    ) -> &Outcome {
        self.credit = self.credit.saturating_add(nodes);
        let over = || deadline.is_some_and(|deadline| Instant::now() >= deadline);
        while self.outcome == Outcome::Open
            && self.start.is_some()
            && self.credit >= ROUND
            && !over()
        {
            self.credit -= ROUND;
            self.round(memo, threads, &over);
        }
        &self.outcome
    }

    fn round(&mut self, memo: &mut Memo, threads: usize, over: &(impl Fn() -> bool + Sync)) {
        // Searches after the first successful one need not go on.
        let (next, first) = (AtomicUsize::new(0), AtomicUsize::new(usize::MAX));
        let waiting: Vec<Mutex<&mut Slot>> = self.slots.iter_mut().map(Mutex::new).collect();
        let common = &*memo;
        let work = || {
            loop {
                let k = next.fetch_add(1, Ordering::Relaxed);
                let Some(slot) = waiting.get(k) else { return };
                let mut slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
                slot.status = slot.tree.run(SLICE, common, || {
                    first.load(Ordering::Relaxed) < k || over()
                });
                if slot.status != Status::Open {
                    first.fetch_min(k, Ordering::Relaxed);
                }
            }
        };
        thread::scope(|scope| {
            for _ in 1..threads.min(SLOTS) {
                // If the system provides no more threads, the existing ones do all the work.
                drop(Builder::new().spawn_scoped(scope, work));
            }
            work();
        });
        for k in 0..self.slots.len() {
            let slot = &mut self.slots[k];
            match slot.status {
                Status::Found => self.outcome = Outcome::Found(slot.tree.state.found(&self.units)),
                Status::Infeasible => self.outcome = Outcome::Infeasible,
                Status::Open => {
                    slot.tree.share(memo);
                    if slot.tree.nodes >= slot.nodes_max {
                        self.restart(k);
                    }
                    continue;
                }
            }
            self.slots.clear();
            return;
        }
    }

    /// Restarts a search in another order, now and then with more nodes.
    fn restart(&mut self, k: usize) {
        let order = self.random_order();
        self.restarts += 1;
        let nodes_max = SLICE.saturating_mul(luby(self.restarts));
        if let Some(start) = &self.start {
            self.slots[k] = Slot::new(start, &order, nodes_max);
        }
    }

    /// One of the orders, perturbed.
    fn random_order(&mut self) -> Vec<u32> {
        let n = self.orders[0].len() as u64;
        let order = &self.orders[self.random.below(RANKS.len() as u64) as usize];
        let reach = [n / 20, n / 8, n / 3, n][self.random.below(4) as usize].max(2);
        let mut keyed: Vec<(u64, u32)> = (0u64..)
            .zip(order)
            .map(|(at, &i)| (at + self.random.below(reach), i))
            .collect();
        keyed.sort_unstable();
        keyed.into_iter().map(|(_, i)| i).collect()
    }
}

impl Slot {
    fn new(start: &State, order: &[u32], nodes_max: u64) -> Slot {
        let mut rank = vec![0; order.len()];
        (0u32..)
            .zip(order)
            .for_each(|(at, &i)| rank[i as usize] = at);
        Slot {
            tree: Tree::new(start.clone(), rank),
            status: Status::Open,
            nodes_max,
        }
    }
}
