//! The packer for problems that are not simple: rigid blocks of any shape, some at given offsets,
//! some in the place of others.
//!
//! Each block in turn gets the lowest base at which it shares no byte with a placed block, or the
//! place of an item that it may be computed in. A good order is searched for by trying several and
//! then by squeaky-wheel optimisation (Joslin and Clements, 1999): the block that did not fit below
//! the best height so far is placed earlier next time.

use super::blocks::{Blocks, free_to_join};
use crate::method::{Method, Rank};
use crate::plain::portfolio::{Budget, Plain, pack_plain};
use crate::plain::sections::Sections;
use crate::problem::{Item, Problem};
use crate::random::Random;

/// The most blocks for which more than one order is tried: beyond, one pass may take seconds.
const ORDERS_MAX: usize = 8_000;

const RANKS: [Rank; 6] = [
    Rank::TotalAreaWidth,
    Rank::SizeWidth,
    Rank::WidthAreaTotal,
    Rank::TotalSize,
    Rank::Area,
    Rank::Start,
];

/// The result of one pass.
#[derive(Clone, Debug)]
pub(super) struct PassResult {
    /// The base of each block.
    pub(super) bases: Vec<u64>,
    pub(super) height: u64,
    /// The pairs computed in place, as indices into [`Problem::in_place`].
    pub(super) taken: Vec<usize>,
    pub(super) method: Method,
}

/// The placement rule of one pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Policy {
    /// Prefers the place of a donor even where a lower base is free, as long as that does not raise
    /// the height.
    in_place: bool,
    /// Puts blocks at their offsets in the start, if they fit there.
    as_given: bool,
}

/// A rectangle of a block, with its times as indices.
struct Flat {
    item: usize,
    start: u64,
    end: u64,
    low: u64,
    high: u64,
    first_slot: u32,
    last_slot: u32,
}

/// All blocks, and the placed ones.
pub(super) struct General<'a> {
    problem: &'a Problem,
    blocks: &'a Blocks,
    /// The pairs that are already joined into blocks.
    joined: &'a [usize],
    /// The pairs that fixed offsets put in the same place.
    fixed: Vec<usize>,
    rects: Vec<Flat>,
    /// The index of the first rectangle of each block.
    first_rect: Vec<u32>,
    /// The pairs of each item that are not joined.
    pairs: Vec<Vec<usize>>,
    /// The bases given by the start.
    given: Vec<Option<u64>>,
    /// The placed rectangles of each slot of time: index and first byte.
    slots: Vec<Vec<(u32, u64)>>,
    base: Vec<Option<u64>>,
    gives: Vec<bool>,
    takes: Vec<bool>,
    /// Whether each pair is computed in place, and the list of those that are.
    is_taken: Vec<bool>,
    taken: Vec<usize>,
    forbidden: Vec<(u64, u64)>,
}

impl<'a> General<'a> {
    pub(super) fn new(problem: &'a Problem, blocks: &'a Blocks, joined: &'a [usize]) -> Self {
        let mut starts: Vec<u64> = blocks
            .list
            .iter()
            .flat_map(|block| block.rects.iter().map(|rect| rect.start))
            .collect();
        starts.sort_unstable();
        // Slots of time, in each of which about as many rectangles begin.
        let slots = (starts.len() / 64).clamp(1, 512);
        let bounds: Vec<u64> = (1..slots)
            .map(|slot| starts[slot * starts.len() / slots])
            .collect();
        let slot = |time: u64| bounds.partition_point(|&bound| bound <= time) as u32;
        let mut rects = Vec::with_capacity(starts.len());
        let mut first_rect = vec![0];
        for block in &blocks.list {
            rects.extend(block.rects.iter().map(|rect| Flat {
                item: rect.item,
                start: rect.start,
                end: rect.end,
                low: rect.low,
                high: rect.high,
                first_slot: slot(rect.start),
                last_slot: slot(rect.end - 1),
            }));
            first_rect.push(rects.len() as u32);
        }
        let mut is_joined = vec![false; problem.in_place.len()];
        joined.iter().for_each(|&pair| is_joined[pair] = true);
        let mut pairs = vec![Vec::new(); problem.items.len()];
        for (index, pair) in problem
            .in_place
            .iter()
            .enumerate()
            .filter(|(index, _)| !is_joined[*index])
        {
            pairs[pair.from].push(index);
            pairs[pair.to].push(index);
        }
        let mut given = vec![None; blocks.list.len()];
        for at in &problem.start {
            let (block, above) = blocks.place[at.item];
            let aligned = |base: &u64| {
                base & (blocks.list[block as usize].align - 1)
                    == blocks.list[block as usize].residue
            };
            let reaches = |base: &u64| base.checked_add(blocks.list[block as usize].size).is_some();
            given[block as usize] = at
                .offset
                .checked_sub(above)
                .filter(aligned)
                .filter(reaches)
                .or(given[block as usize]);
        }
        General {
            problem,
            blocks,
            joined,
            fixed: blocks.fixed_pairs(problem),
            rects,
            first_rect,
            pairs,
            given,
            slots: vec![Vec::new(); slots],
            base: vec![None; blocks.list.len()],
            gives: vec![false; problem.items.len()],
            takes: vec![false; problem.items.len()],
            is_taken: vec![false; problem.in_place.len()],
            taken: Vec::new(),
            forbidden: Vec::new(),
        }
    }

    /// The best of the packing of hulls and of several orders; stops at the budget's goal.
    pub(super) fn orders(&mut self, budget: &Budget) -> (PassResult, Vec<u32>) {
        let first = self.around(budget);
        let mut order: Vec<u32> = (0..self.blocks.list.len() as u32).collect();
        order.sort_by_key(|&block| first.bases[block as usize]);
        let mut best = (first, order);
        let in_place = self.pairs.iter().any(|pairs| !pairs.is_empty());
        let first_come: &[bool] = if in_place { &[true, false] } else { &[false] };
        let mut tries: Vec<(Vec<u32>, Policy, Method)> = Vec::new();
        if self.given.iter().any(Option::is_some) {
            for as_given in [true, false] {
                tries.push((
                    self.by_start(),
                    Policy { in_place, as_given },
                    Method::Start,
                ));
            }
        }
        if let Some(order) = self.outward() {
            tries.push((
                order,
                Policy {
                    in_place,
                    as_given: false,
                },
                Method::Blocks(Rank::Start),
            ));
        }
        let hulls = self.hulls();
        let ranks = if self.blocks.list.len() > ORDERS_MAX {
            1
        } else {
            RANKS.len()
        };
        for rank in &RANKS[..ranks] {
            for &in_place in first_come {
                tries.push((
                    rank.order(&hulls),
                    Policy {
                        in_place,
                        as_given: false,
                    },
                    Method::Blocks(*rank),
                ));
            }
        }
        for (order, policy, method) in tries {
            let limit = best.0.height;
            if limit <= budget.goal || budget.is_over() {
                break;
            }
            if let Ok(placed) = self.pass(&order, policy, method, limit, budget) {
                best = (placed, order);
            }
        }
        best
    }

    /// The plain packing of the hulls of all blocks that are not fixed. Those that it places on
    /// bytes of fixed blocks are packed again above all others; if that is not lower, all are
    /// packed above the fixed ones. Unlike a pass, it takes little time however many blocks live at
    /// once.
    fn around(&mut self, budget: &Budget) -> PassResult {
        let blocks = &self.blocks.list;
        let plain = |free: &[usize]| {
            let hull = |&index: &usize| Item {
                life: blocks[index].life,
                size: blocks[index].residue + blocks[index].size,
                align: blocks[index].align,
            };
            let budget = Budget {
                effort: 0,
                ..*budget
            };
            pack_plain(&Problem::new(free.iter().map(hull).collect()), &budget)
        };
        let coarsest = blocks.iter().map(|block| block.align).fold(1, u64::max);
        // The height with these hulls above other blocks; they begin at the alignment of all.
        let above = |height: u64, hulls: &Plain| match hulls.height {
            0 => Some(height),
            more => height.checked_next_multiple_of(coarsest)?.checked_add(more),
        };
        let free: Vec<usize> = (0..blocks.len())
            .filter(|&index| blocks[index].fixed.is_none())
            .collect();
        let hulls = plain(&free);
        let fixed_height = self.put_fixed();
        let mut bases: Vec<u64> = self.base.iter().map(|base| base.unwrap_or(0)).collect();
        let (mut height, mut moved) = (fixed_height, Vec::new());
        for (&index, offset) in free.iter().zip(&hulls.offsets) {
            bases[index] = blocks[index].residue + offset;
            if !budget.is_over() && self.fits(index, bases[index]) {
                height = height.max(bases[index] + blocks[index].size);
            } else {
                moved.push(index);
            }
        }
        let again = (moved.len() < free.len())
            .then(|| plain(&moved))
            .filter(|again| {
                above(height, again).is_some_and(|top| Some(top) <= above(fixed_height, &hulls))
            });
        if again.is_none() {
            self.put_fixed();
            (height, moved) = (fixed_height, free);
        }
        let top = again.as_ref().unwrap_or(&hulls);
        let from = height.checked_next_multiple_of(coarsest);
        for (&index, offset) in moved.iter().zip(&top.offsets) {
            bases[index] = from.unwrap_or(height) + blocks[index].residue + offset;
        }
        PassResult {
            bases,
            height: above(height, top).expect("verified: blocks above the fixed ones fit 64 bits"),
            taken: self.all_taken(),
            method: hulls.method,
        }
    }

    /// Improves the best order until the effort or the time is spent or the goal is reached.
    pub(super) fn improve(&mut self, found: (PassResult, Vec<u32>), budget: &Budget) -> PassResult {
        let (mut best, mut order) = found;
        let mut random = Random(budget.seed);
        let mut left = budget.effort;
        let (mut best_order, mut failures) = (order.clone(), 0usize);
        while left > 0 && !order.is_empty() && best.height > budget.goal && !budget.is_over() {
            let policy = Policy {
                in_place: random.below(2) == 0,
                as_given: false,
            };
            let (end, result) =
                match self.pass(&order, policy, Method::SqueakyWheel, best.height, budget) {
                    Ok(placed) => (order.len(), Some(placed)),
                    Err(at) => (at, None),
                };
            left = left.saturating_sub(end as u64 + 1);
            if let Some(placed) = result {
                best = placed;
                best_order.clone_from(&order);
                failures = 0;
                continue;
            }
            failures += 1;
            // The block that did not fit comes earlier: often first of all, else halfway or a
            // little.
            let to = match random.below(4) {
                0 => 0,
                1 => end / 2,
                2 => random.below(end as u64 + 1) as usize,
                _ => end.saturating_sub(1 + random.below(4) as usize),
            };
            order[to..=end].rotate_right(1);
            if failures.is_multiple_of(4 * order.len() + 50) {
                order.clone_from(&best_order);
                for _ in 0..1 + random.below(order.len() as u64) {
                    let (a, b) = (
                        random.below(order.len() as u64) as usize,
                        random.below(order.len() as u64) as usize,
                    );
                    order.swap(a, b);
                }
            }
        }
        best
    }

    /// Blocks as items, with their gaps filled, because ranks are defined for items.
    fn hulls(&self) -> Sections {
        let hull = |block: &super::blocks::Block| Item {
            life: block.life,
            size: block.size,
            align: 1,
        };
        let problem = Problem::new(self.blocks.list.iter().map(hull).collect());
        let all: Vec<usize> = (0..problem.items.len()).collect();
        Sections::new(&problem, &all)
    }

    /// Blocks in the order of their bases in the start; the rest after them, larger ones first.
    fn by_start(&self) -> Vec<u32> {
        let mut order: Vec<u32> = (0..self.blocks.list.len() as u32).collect();
        order.sort_by_key(|&block| {
            let given = self.given[block as usize];
            (
                given.is_none(),
                given,
                std::cmp::Reverse(self.blocks.list[block as usize].size),
            )
        });
        order
    }

    /// The order away from the first fixed block in both directions of time, so that its
    /// constraints propagate from neighbour to neighbour: later blocks by start, then earlier ones
    /// by end, the last first. `None` if no block is fixed.
    fn outward(&self) -> Option<Vec<u32>> {
        let blocks = &self.blocks.list;
        let origin = blocks
            .iter()
            .filter(|block| block.fixed.is_some())
            .map(|block| block.life.start)
            .min()?;
        let mut order: Vec<u32> = (0..blocks.len() as u32).collect();
        order.sort_by_key(|&block| {
            let life = blocks[block as usize].life;
            let before = life.start < origin;
            (
                before,
                if before {
                    u64::MAX - life.end
                } else {
                    life.start
                },
                std::cmp::Reverse(blocks[block as usize].size),
            )
        });
        Some(order)
    }

    /// Places the fixed blocks and then all others in this order. Fails with the position of the
    /// block whose top would not stay below the limit, or of the one at which the time was over.
    fn pass(
        &mut self,
        order: &[u32],
        policy: Policy,
        method: Method,
        limit: u64,
        budget: &Budget,
    ) -> Result<PassResult, usize> {
        let mut height = self.put_fixed();
        let blocks = self.blocks;
        for (at, &index) in order.iter().enumerate() {
            let (index, block) = (index as usize, &blocks.list[index as usize]);
            if block.fixed.is_some() {
                continue;
            }
            if budget.is_over() {
                return Err(at);
            }
            let base = self.choose(index, policy, height);
            let top = base + block.size;
            if top >= limit {
                return Err(at);
            }
            self.put(index, base);
            height = height.max(top);
        }
        let bases = self.base.iter().map(|base| base.unwrap_or(0)).collect();
        Ok(PassResult {
            bases,
            height,
            taken: self.all_taken(),
            method,
        })
    }

    /// The pairs computed in place, those that are joined among them.
    fn all_taken(&self) -> Vec<usize> {
        let mut taken: Vec<usize> = self.taken.iter().chain(self.joined).copied().collect();
        taken.sort_unstable();
        taken
    }

    /// Removes all blocks and places the fixed ones; returns their height.
    fn put_fixed(&mut self) -> u64 {
        self.clear();
        let mut height = 0;
        let blocks = self.blocks;
        for (index, block) in blocks.list.iter().enumerate() {
            if let Some(base) = block.fixed {
                // Their pairs are taken already.
                debug_assert!(self.fits(index, base), "verified: fixed blocks are apart");
                self.put(index, base);
                height = height.max(base + block.size);
            }
        }
        height
    }

    fn clear(&mut self) {
        self.slots.iter_mut().for_each(Vec::clear);
        self.base.fill(None);
        self.gives.fill(false);
        self.takes.fill(false);
        for pair in self.taken.drain(..) {
            self.is_taken[pair] = false;
        }
        for &pair in self.joined.iter().chain(&self.fixed) {
            self.gives[self.problem.in_place[pair].from] = true;
            self.takes[self.problem.in_place[pair].to] = true;
        }
        self.fixed
            .iter()
            .for_each(|&pair| self.is_taken[pair] = true);
        self.taken.extend_from_slice(&self.fixed);
    }

    /// Chooses a base for a block, and with it the pairs it completes.
    fn choose(&mut self, index: usize, policy: Policy, height: u64) -> u64 {
        if let Some(base) = self.given[index].filter(|_| policy.as_given)
            && self.fits(index, base)
        {
            return base;
        }
        let lowest = self.lowest(index);
        let size = self.blocks.list[index].size;
        for base in self.places(index) {
            let harmless = policy.in_place
                && base
                    .checked_add(size)
                    .is_some_and(|top| top <= height.max(lowest + size));
            if (base <= lowest || harmless) && self.fits(index, base) {
                return base;
            }
        }
        lowest
    }

    /// The bases at which an item of a block would lie at the offset of a placed partner, lowest
    /// first.
    fn places(&self, index: usize) -> Vec<u64> {
        let block = &self.blocks.list[index];
        let mut bases = Vec::new();
        for &(item, above) in &block.members {
            for &pair in &self.pairs[item] {
                let pair = self.problem.in_place[pair];
                let partner = if pair.from == item {
                    pair.to
                } else {
                    pair.from
                };
                let base = self
                    .offset(partner)
                    .and_then(|offset| offset.checked_sub(above));
                let aligned = base.filter(|base| base & (block.align - 1) == block.residue);
                if aligned.is_some()
                    && free_to_join(self.problem, &self.gives, &self.takes, pair.from, pair.to)
                {
                    bases.extend(aligned);
                }
            }
        }
        bases.sort_unstable();
        bases.dedup();
        bases
    }

    /// The offset of an item, if it is placed.
    fn offset(&self, item: usize) -> Option<u64> {
        let (block, above) = self.blocks.place[item];
        self.base[block as usize].map(|base| base + above)
    }

    fn rects_of(&self, index: usize) -> std::ops::Range<usize> {
        self.first_rect[index] as usize..self.first_rect[index + 1] as usize
    }

    /// The placed rectangles that live at the same time as this one, and their first bytes.
    fn beside<'b>(&'b self, rect: &'b Flat) -> impl Iterator<Item = (&'b Flat, u64)> {
        let slots = rect.first_slot..=rect.last_slot;
        slots.flat_map(move |slot| {
            // A rectangle in several slots counts in the first slot that it shares with this one.
            let here = move |other: &Flat| {
                slot == other.first_slot.max(rect.first_slot)
                    && other.start < rect.end
                    && rect.start < other.end
            };
            let others = self.slots[slot as usize]
                .iter()
                .map(|&(other, low)| (&self.rects[other as usize], low));
            others.filter(move |(other, _)| here(other))
        })
    }

    /// The lowest base at which a block shares no byte with anything.
    fn lowest(&mut self, index: usize) -> u64 {
        let mut forbidden = std::mem::take(&mut self.forbidden);
        forbidden.clear();
        for rect in self.rects_of(index) {
            let rect = &self.rects[rect];
            for (other, low) in self.beside(rect) {
                let high = low + (other.high - other.low);
                // From one byte less than entirely below the other one, to entirely above.
                if high > rect.low {
                    forbidden.push(((low + 1).saturating_sub(rect.high), high - rect.low));
                }
            }
        }
        forbidden.sort_unstable();
        let block = &self.blocks.list[index];
        let mut base = block.residue;
        for &(from, to) in &forbidden {
            if from > base {
                break;
            }
            if to > base {
                base = at_least(to, block.align, block.residue);
            }
        }
        self.forbidden = forbidden;
        base
    }

    /// Whether a block can lie here. Marks the pairs that this completes as computed in place.
    fn fits(&mut self, index: usize, base: u64) -> bool {
        let taken = self.taken.len();
        let mut met: Vec<usize> = Vec::new();
        for at in self.rects_of(index) {
            let rect = &self.rects[at];
            let (low, high) = (base + rect.low, base + rect.high);
            let item = rect.item;
            let offset = base + self.blocks.place[item].1;
            let meets = |&(other, other_low): &(&Flat, u64)| {
                low < other_low + (other.high - other.low) && other_low < high
            };
            met.clear();
            met.extend(self.beside(rect).filter(meets).map(|(other, _)| other.item));
            for &other in &met {
                if !self.take(item, offset, other) {
                    for pair in self.taken.drain(taken..) {
                        self.is_taken[pair] = false;
                        self.gives[self.problem.in_place[pair].from] = false;
                        self.takes[self.problem.in_place[pair].to] = false;
                    }
                    return false;
                }
            }
        }
        true
    }

    /// Lets two items share bytes, if they are a permitted pair, both without another partner, and
    /// at the same offset.
    fn take(&mut self, item: usize, offset: u64, other: usize) -> bool {
        if self.offset(other) != Some(offset) {
            return false;
        }
        for at in 0..self.pairs[item].len() {
            let index = self.pairs[item][at];
            let pair = self.problem.in_place[index];
            if pair.from != other && pair.to != other {
                continue;
            }
            if self.is_taken[index] {
                return true;
            }
            if free_to_join(self.problem, &self.gives, &self.takes, pair.from, pair.to) {
                (
                    self.gives[pair.from],
                    self.takes[pair.to],
                    self.is_taken[index],
                ) = (true, true, true);
                self.taken.push(index);
                return true;
            }
        }
        false
    }

    fn put(&mut self, index: usize, base: u64) {
        self.base[index] = Some(base);
        for at in self.rects_of(index) {
            let rect = &self.rects[at];
            for slot in rect.first_slot..=rect.last_slot {
                self.slots[slot as usize].push((at as u32, base + rect.low));
            }
        }
    }
}

/// The smallest number from `at` on with this remainder.
fn at_least(at: u64, align: u64, residue: u64) -> u64 {
    at.saturating_sub(residue).next_multiple_of(align) + residue
}
