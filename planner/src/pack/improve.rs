//! Improvement of skyline packings: squeaky-wheel optimisation (Joslin and Clements, 1999) with noise, on several orders side
//! by side.
//!
//! A pass of the skyline turns an order into a packing. What stands too high in it came too late: it is promoted in the order,
//! by more or less, some others move at random, and the next pass shows whether that was better. A *lane* is one such walk;
//! lanes start from different orders, and one that falls behind goes on from the best.
//!
//! Each lane has random numbers of its own and lanes look at each other only between rounds, after a fixed number of
//! passes: how many threads there are changes nothing, and a deadline only ends the search earlier.

use super::lives::Lives;
use super::portfolio::Budget;
use super::sections::Sections;
use super::skyline::Skyline;
use super::{Found, Rank};
use crate::generate::Random;

/// How many walks there are.
const LANES: usize = 4;

/// How many items are placed in a lane between two looks at the others: some milliseconds of work.
const ROUND: usize = 20_000;

/// After how many rounds without progress a lane that is behind goes on from the best.
const PATIENCE: u32 = 8;

/// The orders lanes start from.
const STARTS: [Rank; LANES] = [Rank::TotalAreaWidth, Rank::SizeWidth, Rank::TotalWidthArea, Rank::WidthAreaTotal];

/// The search, which can be interrupted and taken up again.
pub(super) struct Improve<'a> {
    sections: &'a Sections,
    lanes: Vec<Lane<'a>>,
    best: Found,
    /// Items placed so far.
    pub(super) placed: u64,
}

impl<'a> Improve<'a> {
    /// Starts from what other methods have found; nothing worse is ever returned.
    pub(super) fn new(sections: &'a Sections, lives: &'a Lives, incumbent: Found, seed: u64) -> Self {
        let lane = |(at, rank): (u64, Rank)| Lane {
            sections,
            skyline: Skyline::new(sections, lives),
            walk: Walk { order: rank.order(sections), offsets: Vec::new(), cost: Cost::NONE },
            lowest: None,
            waits: 0,
            random: Random(seed.wrapping_mul(LANES as u64).wrapping_add(at)),
            keys: Vec::new(),
        };
        Improve { sections, lanes: (0..).zip(STARTS).map(lane).collect(), best: incumbent, placed: 0 }
    }

    /// What is best so far.
    pub(super) fn best(&self) -> &Found {
        &self.best
    }

    /// Goes on until the goal is reached or `budget` is spent: its time, or its effort, counted in items placed by this call.
    pub(super) fn run(&mut self, budget: &Budget) {
        let until = self.placed.saturating_add(budget.effort);
        let items = self.sections.spans.len().max(1);
        let passes = (ROUND / items).max(1);
        while self.best.height > budget.goal && self.placed < until && !budget.is_over() {
            let threads = budget.threads.clamp(1, LANES);
            std::thread::scope(|scope| {
                let mut shares: Vec<&mut [Lane]> = self.lanes.chunks_mut(LANES.div_ceil(threads)).collect();
                let own = shares.pop();
                for share in shares {
                    scope.spawn(move || share.iter_mut().for_each(|lane| lane.run(passes, budget)));
                }
                own.into_iter().flatten().for_each(|lane| lane.run(passes, budget));
            });
            self.placed = self.placed.saturating_add((passes * items * LANES) as u64);
            self.compare(budget.goal);
        }
    }

    /// Takes over the lowest packing, and lets lanes go on from it that have fallen behind.
    fn compare(&mut self, goal: u64) {
        for lane in &mut self.lanes {
            if let Some(found) = lane.lowest.take().filter(|found| found.height < self.best.height) {
                self.best = found;
            }
        }
        let Some(ahead) = (0..LANES).min_by_key(|&at| self.lanes[at].walk.cost) else { return };
        let above = |lane: &Lane| lane.walk.cost.height.saturating_sub(goal);
        for at in 0..LANES {
            let far = above(&self.lanes[at]) / 2 > above(&self.lanes[ahead]);
            if at != ahead && (far || self.lanes[at].waits > PATIENCE) {
                let walk = self.lanes[ahead].walk.clone();
                (self.lanes[at].walk, self.lanes[at].waits) = (walk, 0);
            }
        }
    }
}

/// How good a packing is: its height, then how far what stands above the goal does so.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Cost {
    height: u64,
    above: u64,
}

impl Cost {
    /// Worse than anything: there is no packing yet.
    const NONE: Cost = Cost { height: u64::MAX, above: u64::MAX };
}

/// Where a lane stands.
#[derive(Clone, Debug)]
struct Walk {
    order: Vec<u32>,
    /// Where this order leads each span.
    offsets: Vec<u64>,
    cost: Cost,
}

struct Lane<'a> {
    sections: &'a Sections,
    skyline: Skyline<'a>,
    walk: Walk,
    /// The lowest packing since the last look.
    lowest: Option<Found>,
    /// Rounds since the walk last got better.
    waits: u32,
    random: Random,
    keys: Vec<(f64, u32)>,
}

impl Lane<'_> {
    fn run(&mut self, passes: usize, budget: &Budget) {
        let before = self.walk.cost;
        for _ in 0..passes {
            if self.walk.cost.height <= budget.goal || budget.is_over() {
                break;
            }
            let known = self.walk.cost != Cost::NONE;
            let order = if known { self.varied(budget.goal) } else { self.walk.order.clone() };
            self.pass(order, budget.goal);
        }
        self.waits = if self.walk.cost < before { 0 } else { self.waits + 1 };
    }

    /// Tries an order, and stands there if it is not worse.
    fn pass(&mut self, order: Vec<u32>, goal: u64) {
        // Now and then a step up is taken, lest the walk end in the first hollow.
        let height = self.walk.cost.height;
        let lenient = self.random.below(20) == 0;
        let limit = if lenient { height.saturating_add((height - goal) / 16) } else { height }.saturating_add(1);
        let Some(height) = self.skyline.pack(&order, limit) else { return };
        let tops = self.skyline.offsets.iter().zip(&self.sections.spans).map(|(offset, span)| offset + span.size);
        let cost = Cost { height, above: tops.map(|top| top.saturating_sub(goal)).fold(0, u64::saturating_add) };
        if cost <= self.walk.cost || lenient {
            if self.lowest.as_ref().is_none_or(|found| height < found.height) {
                self.lowest = Some(Found { offsets: self.skyline.offsets.clone(), height });
            }
            self.walk.offsets.clone_from(&self.skyline.offsets);
            (self.walk.order, self.walk.cost) = (order, cost);
        }
    }

    /// The order of the walk with what stands high promoted, and some noise.
    fn varied(&mut self, goal: u64) -> Vec<u32> {
        let Walk { order, offsets, cost } = &self.walk;
        let random = &mut self.random;
        // Promoted is what stands above some height between the goal and the top.
        let aim = match random.below(3) {
            0 => goal + ((cost.height - goal) as f64 * unit(random)) as u64,
            _ => goal,
        };
        let share = unit(random);
        let kept = 1.0 - (-8.0 * unit(random)).exp2();
        let noise = match random.below(2) {
            0 => 0.0,
            _ => (-12.0 * unit(random)).exp2() * 0.3 * order.len() as f64,
        };
        self.keys.clear();
        for (place, &i) in (0u32..).zip(order) {
            let mut key = f64::from(place);
            if offsets[i as usize] + self.sections.spans[i as usize].size > aim && unit(random) < share {
                key *= kept;
            }
            if noise > 0.0 {
                key += (unit(random) - 0.5) * noise;
            }
            self.keys.push((key, i));
        }
        // Stable, hence nothing moves without a reason.
        self.keys.sort_by(|a, b| a.0.total_cmp(&b.0));
        self.keys.iter().map(|key| key.1).collect()
    }
}

/// A number from 0 to 1.
fn unit(random: &mut Random) -> f64 {
    random.below(1 << 53) as f64 / (1u64 << 53) as f64
}
