//! The lower bound: the bytes that the fullest instant needs for any choice of offsets.
//!
//! At one instant no two items share a byte, with two exceptions: aliases, which are counted once,
//! and pairs computed in place, all permitted ones of which are assumed to be used. If all offsets
//! are multiples of a unit, the unused rest of an item's last unit is lost, except at the top of
//! the packing, where the rest of one item does not count.

use super::blocks::{Block, Blocks};
use crate::lifetime::Lifetime;
use crate::problem::{InPlace, Item, Problem};
use crate::rects::union;
use rustc_hash::FxHashMap;
use std::collections::BTreeMap;

/// Bytes needed for an interval of time.
struct Load {
    life: Lifetime,
    bytes: u64,
}

/// The largest sum of bytes alive at once, in whole units except for the item that lies highest,
/// less the savings of a step.
fn fullest(loads: &[Load], unit: u64, savings: &FxHashMap<u64, u64>) -> u64 {
    let whole = |bytes: u64| i128::from(bytes.div_ceil(unit)) * i128::from(unit);
    // All ends and starts at one instant count before the sum does.
    let mut changes: Vec<(u64, i128, u64)> =
        Vec::with_capacity(2 * loads.len() + 2 * savings.len());
    for load in loads.iter().filter(|load| !load.life.is_empty()) {
        let slack = (whole(load.bytes) - i128::from(load.bytes)) as u64;
        changes.extend([
            (load.life.start, whole(load.bytes), slack),
            (load.life.end, -whole(load.bytes), slack),
        ]);
    }
    for (&step, &saved) in savings {
        changes.extend([
            (step, -i128::from(saved), 0),
            (step + 1, i128::from(saved), 0),
        ]);
    }
    changes.sort_unstable();
    let mut slacks: BTreeMap<u64, usize> = BTreeMap::new();
    let (mut live, mut bound) = (0i128, 0i128);
    for at_once in changes.chunk_by(|a, b| a.0 == b.0) {
        for &(_, change, slack) in at_once {
            live += change;
            if slack > 0 {
                let count = slacks.entry(slack).or_insert(0);
                // Ends sort before starts; the ends here belong to lives that started earlier.
                *count = if change > 0 { *count + 1 } else { *count - 1 };
                if *count == 0 {
                    slacks.remove(&slack);
                }
            }
        }
        let spared = slacks
            .last_key_value()
            .map_or(0, |(&slack, _)| i128::from(slack));
        bound = bound.max(live - spared);
    }
    u64::try_from(bound).unwrap_or(u64::MAX)
}

/// The lower bound of the height of a valid problem. With several spaces, the sum of theirs.
pub(crate) fn total_lower_bound(problem: &Problem) -> u64 {
    if problem.is_plain() {
        let load = |item: &Item| Load {
            life: item.life,
            bytes: item.size,
        };
        let loads: Vec<Load> = problem.items.iter().map(load).collect();
        return fullest(&loads, problem.unit(), &FxHashMap::default());
    }
    Blocks::new(problem, &[]).map_or(0, |blocks| {
        lower_bounds(problem, &blocks)
            .into_iter()
            .fold(0, u64::saturating_add)
    })
}

impl Problem {
    /// A power of two that divides the start of every byte range that items need: the finest
    /// alignment, if ranges begin at the start of their items and those at multiples of their
    /// alignment.
    pub(super) fn unit(&self) -> u64 {
        let windows = self.gaps.iter().any(|gap| gap.window.is_some());
        let finest = self
            .items
            .iter()
            .filter(|item| item.needs_space())
            .map(|item| item.align)
            .min()
            .unwrap_or(1);
        // An alignment of 0, which is invalid, is refused elsewhere.
        if windows { 1 } else { finest.max(1) }
    }
}

impl Problem {
    /// The bytes needed over time, each byte of aliases once. The problem must be valid.
    pub fn live(&self) -> Vec<(Lifetime, u64)> {
        let blocks = Blocks::new(self, &[])
            .map(|blocks| blocks.list)
            .unwrap_or_default();
        loads(blocks.iter())
            .into_iter()
            .map(|load| (load.life, load.bytes))
            .collect()
    }
}

fn loads<'a>(blocks: impl Iterator<Item = &'a Block>) -> Vec<Load> {
    let mut loads = Vec::new();
    for block in blocks {
        let rects = union(&block.rects);
        loads.extend(rects.iter().map(|rect| Load {
            life: Lifetime::new(rect.start, rect.end),
            bytes: rect.high - rect.low,
        }));
    }
    loads
}

/// The lower bound of each space. The problem must be valid, and the blocks must be its blocks with
/// no pair joined.
pub(super) fn lower_bounds(problem: &Problem, blocks: &Blocks) -> Vec<u64> {
    let unit = problem.unit();
    let mut pairs = vec![Vec::new(); problem.spaces.len().max(1)];
    for pair in &problem.in_place {
        pairs[blocks.list[blocks.place[pair.from].0 as usize].space].push(*pair);
    }
    let lower_bound = |(mine, pairs): (Vec<&Block>, Vec<InPlace>)| {
        let mine = || mine.iter().filter(|block| !block.rects.is_empty());
        let highest = mine()
            .map(|block| block.lowest().saturating_add(block.size))
            .max()
            .unwrap_or(0);
        let savings = savings(problem, blocks, &pairs, unit);
        fullest(&loads(mine().copied()), unit, &savings).max(highest)
    };
    let spaces = blocks.by_space(problem).into_iter().zip(pairs);
    spaces.map(lower_bound).collect()
}

/// For each step the bytes that these pairs computed in place could save there, if every donor and
/// every recipient had its best partner: summed over donors or over recipients, whichever is less.
fn savings(
    problem: &Problem,
    blocks: &Blocks,
    pairs: &[InPlace],
    unit: u64,
) -> FxHashMap<u64, u64> {
    // The bytes of an item at a step.
    let bytes = |item: usize, step: u64| {
        let block = &blocks.list[blocks.place[item].0 as usize];
        // Items are in order, and so are the intervals of each.
        let at = block
            .rects
            .partition_point(|rect| (rect.item, rect.end) <= (item, step));
        let rect = block
            .rects
            .get(at)
            .filter(|rect| rect.item == item && rect.start <= step);
        rect.map_or(0, |rect| (rect.high - rect.low).next_multiple_of(unit))
    };
    let mut donors: FxHashMap<(u64, usize), u64> = FxHashMap::default();
    let mut recipients = donors.clone();
    for pair in pairs {
        let step = problem.items[pair.to].life.start;
        let saved = bytes(pair.from, step).min(bytes(pair.to, step));
        for (sides, item) in [(&mut donors, pair.from), (&mut recipients, pair.to)] {
            let best = sides.entry((step, item)).or_insert(0);
            *best = saved.max(*best);
        }
    }
    let mut savings: FxHashMap<u64, u64> = FxHashMap::default();
    for (&(step, _), &saved) in &donors {
        *savings.entry(step).or_insert(0) += saved;
    }
    let mut by_recipients: FxHashMap<u64, u64> = FxHashMap::default();
    for (&(step, _), &saved) in &recipients {
        *by_recipients.entry(step).or_insert(0) += saved;
    }
    savings
        .iter_mut()
        .for_each(|(step, saved)| *saved = (*saved).min(by_recipients[step]));
    savings
}
