//! Improvement of skyline packings: squeaky-wheel optimisation (Joslin and Clements, 1999) with
//! noise, on several orders side by side.
//!
//! A pass of the skyline turns an order into a packing. Items that end up too high came too late in
//! the order: they are promoted by varying amounts, some others move at random, and the next pass
//! shows whether the packing is better. A *lane* is one such local search; lanes start from
//! different orders, and one that falls behind continues from the best.
//!
//! Each lane has its own random numbers, and lanes are compared only between rounds, after a fixed
//! number of passes. Therefore the result does not depend on the number of threads, and a deadline
//! only ends the search earlier.

use super::lives::Lives;
use super::portfolio::Budget;
use super::sections::Sections;
use super::skyline::Skyline;
use super::{Found, luby};
use crate::method::Rank;
use crate::random::{Random, exp2};
use std::sync::{Mutex, PoisonError};
use std::thread::{self, Builder};

/// The number of local searches.
const LANES: usize = 4;

/// The number of items placed in a lane between two comparisons: some milliseconds of work.
const ROUND: usize = 60_000;

/// The number of passes without progress after which a lane continues from the best.
const LANE_PATIENCE: usize = 8;

/// The number of passes without any progress after which all lanes restart, or a multiple of it.
/// The time that a search takes to reach the goal varies widely between starts, so that many short
/// searches and a few long ones reach it sooner than a single one.
const PATIENCE: usize = 15;

/// The orders lanes start from.
const STARTS: [Rank; LANES] = [
    Rank::TotalAreaWidth,
    Rank::SizeWidth,
    Rank::TotalWidthArea,
    Rank::WidthAreaTotal,
];

/// The search, which can be interrupted and taken up again.
pub(super) struct Improve<'a> {
    sections: &'a Sections,
    lanes: Vec<Lane<'a>>,
    /// Passes of a lane between two comparisons.
    passes: usize,
    best: Found,
    /// Items placed so far.
    placed: u64,
    /// The best cost that a lane has reached since the last restart, and the number of passes since
    /// then.
    best_since_restart: Option<Cost>,
    stale: usize,
    /// The number of restarts.
    restarts: u64,
}

impl<'a> Improve<'a> {
    /// Starts from packings of other methods; a worse packing is never returned. All runs together
    /// are expected to place about `effort` items, and one round no more than that.
    pub(super) fn new(
        sections: &'a Sections,
        lives: &'a Lives,
        incumbent: Found,
        seed: u64,
        effort: u64,
    ) -> Self {
        let lane = |(at, rank): (u64, Rank)| Lane {
            sections,
            skyline: Skyline::new(sections, lives),
            rank,
            state: None,
            starts: 0,
            stalled: 0,
            lowest: None,
            random: Random(seed.wrapping_mul(LANES as u64).wrapping_add(at)),
            keys: Vec::new(),
        };
        let lanes = (0..).zip(STARTS).map(lane).collect();
        let round = usize::try_from(effort / LANES as u64)
            .unwrap_or(ROUND)
            .min(ROUND);
        let passes = (round / sections.spans.len().max(1)).max(1);
        Improve {
            sections,
            lanes,
            passes,
            best: incumbent,
            placed: 0,
            best_since_restart: None,
            stale: 0,
            restarts: 0,
        }
    }

    /// The best packing so far.
    pub(super) fn best(&self) -> &Found {
        &self.best
    }

    /// Runs until the goal is reached or `budget` is spent: its time, or its effort, counted in
    /// items placed by this call.
    pub(super) fn run(&mut self, budget: &Budget) {
        let until = self.placed.saturating_add(budget.effort);
        let (items, passes) = (self.sections.spans.len().max(1), self.passes);
        while self.best.height > budget.goal && self.placed < until && !budget.is_over() {
            let threads = budget.threads.clamp(1, LANES);
            let lanes = Mutex::new(self.lanes.iter_mut());
            // An idle thread takes the next lane: passes that fail are over early.
            let next = || lanes.lock().unwrap_or_else(PoisonError::into_inner).next();
            let work = || {
                while let Some(lane) = next() {
                    lane.run(passes, budget);
                }
            };
            thread::scope(|scope| {
                // If the system provides no more threads, the existing ones do all the work.
                (1..threads).for_each(|_| drop(Builder::new().spawn_scoped(scope, work)));
                work();
            });
            self.placed = self.placed.saturating_add((passes * items * LANES) as u64);
            self.compare(budget.goal, passes);
        }
    }

    /// Adopts the lowest packing, lets lanes that have fallen behind continue from the best, and
    /// restarts all if there is no progress at all.
    fn compare(&mut self, goal: u64, passes: usize) {
        for lane in &mut self.lanes {
            if let Some(found) = lane
                .lowest
                .take()
                .filter(|found| found.height < self.best.height)
            {
                self.best = found;
            }
        }
        let costs: Vec<Option<Cost>> = self
            .lanes
            .iter()
            .map(|lane| lane.state.as_ref().map(|state| state.cost))
            .collect();
        let Some((cost, leader)) = costs
            .iter()
            .zip(0..)
            .filter_map(|(cost, at)| Some(((*cost)?, at)))
            .min()
        else {
            return;
        };
        self.stale = if self.best_since_restart.is_none_or(|best| cost < best) {
            0
        } else {
            self.stale + passes
        };
        self.best_since_restart = self
            .best_since_restart
            .map(|best| best.min(cost))
            .or(Some(cost));
        if self.stale >= PATIENCE * luby(self.restarts + 1) as usize {
            self.restarts += 1;
            (self.best_since_restart, self.stale) = (None, 0);
            self.lanes.iter_mut().for_each(|lane| lane.state = None);
            return;
        }
        let state: Option<LaneState> = self.lanes[leader].state.clone();
        for (at, lane) in self
            .lanes
            .iter_mut()
            .enumerate()
            .filter(|(at, _)| *at != leader)
        {
            let far = costs[at].is_none_or(|own| {
                own.height.saturating_sub(goal) / 2 > cost.height.saturating_sub(goal)
            });
            if far || lane.stalled > LANE_PATIENCE {
                lane.state.clone_from(&state);
                lane.stalled = 0;
            }
        }
    }
}

/// The cost of a packing: its height, then how far items reach above the goal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Cost {
    height: u64,
    above: u64,
}

/// The current state of a lane.
#[derive(Clone, Debug)]
struct LaneState {
    order: Vec<u32>,
    /// The offset of each span in this order.
    offsets: Vec<u64>,
    cost: Cost,
}

struct Lane<'a> {
    sections: &'a Sections,
    skyline: Skyline<'a>,
    /// The order it starts from.
    rank: Rank,
    /// `None` before the first pass.
    state: Option<LaneState>,
    /// The number of its starts.
    starts: u32,
    /// Passes since the last improvement.
    stalled: usize,
    /// The lowest packing since the last comparison.
    lowest: Option<Found>,
    random: Random,
    keys: Vec<(f64, u32)>,
}

impl Lane<'_> {
    fn run(&mut self, passes: usize, budget: &Budget) {
        self.skyline.deadline = budget.deadline;
        let before = self.state.as_ref().map(|state| state.cost);
        for _ in 0..passes {
            let cost = self.state.as_ref().map(|state| state.cost);
            if cost.is_some_and(|cost| cost.height <= budget.goal) || budget.is_over() {
                break;
            }
            let order = match self.state.take() {
                None => self.first(),
                Some(state) => {
                    let order = self.varied(&state, budget.goal);
                    self.state = Some(state);
                    order
                }
            };
            self.pass(order, budget.goal);
        }
        let after = self.state.as_ref().map(|state| state.cost);
        // Any cost is better than none.
        let better = after.is_some_and(|after| before.is_none_or(|before| after < before));
        self.stalled = if better { 0 } else { self.stalled + passes };
    }

    /// Tries an order, and adopts it if it is not worse.
    fn pass(&mut self, order: Vec<u32>, goal: u64) {
        // Occasionally a worse order is accepted, so that the search leaves local minima.
        let lenient = self.random.below(20) == 0;
        let own = self.state.as_ref().map(|state| state.cost);
        let limit = own.map_or(u64::MAX, |own| {
            let step = if lenient { (own.height - goal) / 16 } else { 0 };
            own.height.saturating_add(step).saturating_add(1)
        });
        let Some(height) = self.skyline.pack(&order, limit) else {
            return;
        };
        let tops = self
            .skyline
            .offsets
            .iter()
            .zip(&self.sections.spans)
            .map(|(offset, span)| offset + span.bytes);
        let cost = Cost {
            height,
            above: tops
                .map(|top| top.saturating_sub(goal))
                .fold(0, u64::saturating_add),
        };
        if lenient || own.is_none_or(|own| cost <= own) {
            let offsets = &self.skyline.offsets;
            if self
                .lowest
                .as_ref()
                .is_none_or(|found| height < found.height)
            {
                self.lowest = Some(Found {
                    offsets: offsets.clone(),
                    height,
                });
            }
            self.state = Some(LaneState {
                order,
                offsets: offsets.clone(),
                cost,
            });
        }
    }

    /// The order to start from: the first time unchanged, later with noise.
    fn first(&mut self) -> Vec<u32> {
        let order = self.rank.order(self.sections);
        self.starts += 1;
        if self.starts == 1 {
            return order;
        }
        let random = &mut self.random;
        let noise = exp2(-4.0 - 8.0 * unit(random)) * order.len() as f64;
        self.keys.clear();
        self.keys.extend(
            (0u32..)
                .zip(order)
                .map(|(place, i)| (f64::from(place) + (unit(random) - 0.5) * noise, i)),
        );
        self.by_key()
    }

    /// The current order with the items above the goal promoted, and some noise.
    fn varied(&mut self, state: &LaneState, goal: u64) -> Vec<u32> {
        let LaneState {
            order,
            offsets,
            cost,
        } = state;
        let random = &mut self.random;
        let spans = &self.sections.spans;
        let top = |i: u32| offsets[i as usize] + spans[i as usize].bytes;
        // Items above some height between the goal and the top are promoted: one of them surely,
        // others perhaps.
        let aim = match random.below(3) {
            0 => goal + ((cost.height - goal) as f64 * unit(random)) as u64,
            _ => goal,
        };
        let high = order.iter().filter(|&&i| top(i) > aim).count() as u64;
        let (sure, share) = (random.below(high.max(1)), unit(random));
        let kept = 1.0 - exp2(-8.0 * unit(random));
        let culprit = order
            .iter()
            .copied()
            .filter(|&i| top(i) > aim)
            .nth(sure as usize)
            .unwrap_or(0);
        // Noise moves all items, or only those alive at one instant with the promoted one.
        let noise = exp2(-12.0 * unit(random)) * 0.3 * order.len() as f64;
        let life = &spans[culprit as usize];
        let instant = life.start + random.below(u64::from(life.end - life.start)) as u32;
        let noisy = match random.below(3) {
            0 => 0..0,
            1 => 0..u32::MAX,
            _ => instant..instant + 1,
        };
        self.keys.clear();
        for (place, &i) in (0u32..).zip(order) {
            let mut key = f64::from(place);
            if i == culprit || top(i) > aim && unit(random) < share {
                key *= kept;
            }
            let span = &spans[i as usize];
            if span.start < noisy.end && noisy.start < span.end {
                key += (unit(random) - 0.5) * noise;
            }
            self.keys.push((key, i));
        }
        self.by_key()
    }

    fn by_key(&mut self) -> Vec<u32> {
        // The sort is stable, so that nothing moves without a reason.
        self.keys.sort_by(|a, b| a.0.total_cmp(&b.0));
        self.keys.iter().map(|key| key.1).collect()
    }
}

/// A number from 0 to 1.
fn unit(random: &mut Random) -> f64 {
    random.below(1 << 53) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests;
