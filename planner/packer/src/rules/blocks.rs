//! Rigid blocks of items that are tied together, so that one offset per block remains to be chosen.
//!
//! Aliases and contiguity fix the distances between items, and gaps cut rectangles out of them.
//! Each set of items tied together becomes a set of rectangles of time × bytes above a common base,
//! an alignment of that base, and the base itself, if an offset in the group is given.

use crate::error::ProblemError;
use crate::lifetime::Lifetime;
use crate::problem::{Gap, InPlace, Item, Problem};
use crate::rects::{Rect, needed, overlap, union};
use rustc_hash::FxHashSet;

/// Items with fixed distances.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Block {
    /// Its items, and the distance of each above the base.
    pub(super) members: Vec<(usize, u64)>,
    /// The rectangles that its items need, bytes counted from the base. Those of aliases may
    /// overlap.
    pub(super) rects: Vec<Rect>,
    /// From the base to the end of the highest item that ever needs bytes.
    pub(super) size: u64,
    /// The base leaves the rest `residue` when divided by this power of two.
    pub(super) align: u64,
    pub(super) residue: u64,
    /// The base, if it is given.
    pub(super) fixed: Option<u64>,
    /// From the first to the last step at which it needs bytes; empty if it never does.
    pub(super) life: Lifetime,
    pub(super) space: usize,
}

impl Block {
    /// The item that can stand for the block: one rectangle from the base to the top.
    pub(super) fn as_item(&self) -> Option<Item> {
        if self.residue != 0 || self.fixed.is_some() {
            return None;
        }
        let whole = |rects: &[Rect]| {
            let [rect] = rects else { return None };
            let item = Item {
                life: Lifetime::new(rect.start, rect.end),
                size: self.size,
                align: self.align,
            };
            (rect.low == 0 && rect.high == self.size).then_some(item)
        };
        if self.rects.len() == 1 {
            whole(&self.rects)
        } else {
            whole(&union(&self.rects))
        }
    }

    /// The lowest possible base.
    pub(super) fn lowest(&self) -> u64 {
        self.fixed.unwrap_or(self.residue)
    }
}

/// All the items of a problem, in blocks.
pub(super) struct Blocks {
    pub(super) list: Vec<Block>,
    /// The block of each item, and the distance of the item above the base.
    pub(super) place: Vec<(u32, u64)>,
}

impl Blocks {
    /// Ties items together by groups and by the `joined` pairs of [`Problem::in_place`]. Each
    /// constraint must be valid by itself.
    pub(super) fn new(problem: &Problem, joined: &[usize]) -> Result<Self, ProblemError> {
        let mut ties = Ties::new(problem.items.len());
        for group in &problem.aliases {
            group
                .windows(2)
                .try_for_each(|two| ties.tie(two[0], two[1], 0))?;
        }
        for group in &problem.contiguous {
            group.windows(2).try_for_each(|two| {
                ties.tie(two[0], two[1], i128::from(problem.items[two[0]].size))
            })?;
        }
        joined.iter().try_for_each(|&pair| {
            ties.tie(problem.in_place[pair].from, problem.in_place[pair].to, 0)
        })?;
        let mut list: Vec<Block> = Vec::new();
        let mut block_of_root = vec![u32::MAX; problem.items.len()];
        let mut above_root = Vec::with_capacity(problem.items.len());
        let mut members: Vec<Vec<usize>> = Vec::new();
        for item in 0..problem.items.len() {
            let (root, above) = ties.root(item);
            above_root.push(above);
            if block_of_root[root] == u32::MAX {
                block_of_root[root] = members.len() as u32;
                members.push(Vec::new());
            }
            members[block_of_root[root] as usize].push(item);
        }
        let fixed = by_item(
            problem.items.len(),
            problem.fixed.iter().map(|at| (at.item, at.offset)),
        );
        let space = problem.space_of();
        let mut gaps = problem.gaps.clone();
        gaps.sort_by_key(|gap| gap.item);
        for members in members {
            list.push(block(
                problem,
                &members,
                &above_root,
                &fixed,
                &space,
                &gaps,
            )?);
        }
        let mut place = vec![(0, 0); problem.items.len()];
        for (index, block) in (0u32..).zip(&list) {
            block
                .members
                .iter()
                .for_each(|&(item, above)| place[item] = (index, above));
        }
        Ok(Blocks { list, place })
    }

    /// Checks that the constraints permit a packing, and one whose height fits 64 bits.
    pub(super) fn verify(&self, problem: &Problem) -> Result<(), ProblemError> {
        let space = problem.space_of();
        let tied = |list: &'static str, first: usize, second: usize| {
            let (first_space, second_space) = (space[first], space[second]);
            let same = first_space == second_space;
            if same {
                Ok(())
            } else {
                Err(ProblemError::AcrossSpaces {
                    list,
                    first,
                    first_space,
                    second,
                    second_space,
                })
            }
        };
        for (list, groups) in [
            ("aliases", &problem.aliases),
            ("contiguous", &problem.contiguous),
        ] {
            groups
                .iter()
                .flat_map(|group| group.windows(2))
                .try_for_each(|two| tied(list, two[0], two[1]))?;
        }
        for pair in &problem.in_place {
            tied("in_place", pair.from, pair.to)?;
            if self.place[pair.from].0 == self.place[pair.to].0 {
                return Err(ProblemError::PairTied {
                    from: pair.from,
                    to: pair.to,
                });
            }
        }
        // The next block begins at the latest at the first offset for it above all others. Items
        // that never need bytes have offsets too, whose ends must not overflow either.
        let extent = |block: &Block| {
            let end = |&(item, above): &(usize, u64)| above + problem.items[item].size;
            block.members.iter().map(end).fold(block.size, u64::max)
        };
        let coarsest = self.list.iter().map(|block| block.align).fold(1, u64::max);
        let whole = |bytes: u64| bytes.checked_next_multiple_of(coarsest);
        let mut total = 0;
        for block in self.list.iter().filter(|block| block.fixed.is_some()) {
            let top = block.lowest().checked_add(extent(block)).and_then(whole);
            total = top
                .ok_or(ProblemError::TotalSize {
                    item: block.members[0].0,
                })?
                .max(total);
        }
        for block in self.list.iter().filter(|block| block.fixed.is_none()) {
            let sum = block
                .residue
                .checked_add(extent(block))
                .and_then(whole)
                .and_then(|size| size.checked_add(total));
            total = sum.ok_or(ProblemError::TotalSize {
                item: block.members[0].0,
            })?;
        }
        self.overlaps(problem)
    }

    /// The blocks of each space.
    pub(super) fn by_space(&self, problem: &Problem) -> Vec<Vec<&Block>> {
        let mut spaces = vec![Vec::new(); problem.spaces.len().max(1)];
        for block in &self.list {
            spaces[block.space].push(block);
        }
        spaces
    }

    /// Checks whether items at given distances need the same bytes at the same time.
    fn overlaps(&self, problem: &Problem) -> Result<(), ProblemError> {
        let mut alias = vec![usize::MAX; problem.items.len()];
        for (group, items) in problem.aliases.iter().enumerate() {
            items.iter().for_each(|&item| alias[item] = group);
        }
        for block in self.list.iter().filter(|block| block.members.len() > 1) {
            if let Some((first, second, step)) = overlap(&disjoint(block.rects.clone(), &alias)) {
                return Err(ProblemError::TiedOverlap {
                    first,
                    second,
                    step,
                });
            }
        }
        let pairs = self.fixed_pairs(problem);
        for blocks in self.by_space(problem) {
            let placed = blocks
                .iter()
                .filter_map(|block| Some((block, block.fixed?)));
            let rects: Vec<Rect> = placed
                .flat_map(|(block, base)| block.rects.iter().map(move |rect| rect.above(base)))
                .collect();
            let clash = if pairs.is_empty() {
                overlap(&disjoint(rects, &alias))
            } else {
                self.clash(problem, &pairs, rects, alias.clone())
            };
            if let Some((first, second, step)) = clash {
                let offset = |item: usize| {
                    self.list[self.place[item].0 as usize].lowest() + self.place[item].1
                };
                let (first_offset, second_offset) = (offset(first), offset(second));
                return Err(ProblemError::FixedOverlap {
                    first,
                    first_offset,
                    second,
                    second_offset,
                    step,
                });
            }
        }
        Ok(())
    }

    /// Two items of different blocks that need the same bytes at a step and are none of these
    /// pairs: a sweep over time, with the live rectangles sorted by their first bytes.
    fn clash(
        &self,
        problem: &Problem,
        pairs: &[usize],
        rects: Vec<Rect>,
        mut alias: Vec<usize>,
    ) -> Option<(usize, usize, u64)> {
        let mut permitted: FxHashSet<(usize, usize)> = FxHashSet::default();
        for &pair in pairs {
            let InPlace { from, to } = problem.in_place[pair];
            permitted.extend([(from, to), (to, from)]);
            // Rectangles that are joined with others lose their items.
            (alias[from], alias[to]) = (usize::MAX, usize::MAX);
        }
        let mut rects = disjoint(rects, &alias);
        rects.sort_by_key(|rect| rect.low);
        let mut events: Vec<(u64, bool, usize)> = Vec::with_capacity(2 * rects.len());
        for (index, rect) in rects.iter().enumerate() {
            events.extend([(rect.start, true, index), (rect.end, false, index)]);
        }
        events.sort_unstable();
        let mut living = Highest::new(rects.len());
        for (time, arrives, index) in events {
            let rect = &rects[index];
            if !arrives {
                living.set(index, 0);
                continue;
            }
            let clashes = |other: usize| {
                let other = rects[other].item;
                self.place[other].0 != self.place[rect.item].0
                    && !permitted.contains(&(other, rect.item))
            };
            let count = rects.partition_point(|other| other.low < rect.high);
            if let Some(other) = living.find(1, count, rect.low, &clashes) {
                return Some((rects[other].item, rect.item, time));
            }
            living.set(index, rect.high);
        }
        None
    }

    /// The permitted pairs whose items have the same fixed offset, as many as can be taken, earlier
    /// ones first.
    pub(super) fn fixed_pairs(&self, problem: &Problem) -> Vec<usize> {
        let offset = |item: usize| {
            let (block, above) = self.place[item];
            self.list[block as usize].fixed.map(|base| base + above)
        };
        let meets =
            |pair: &InPlace| offset(pair.from).is_some() && offset(pair.from) == offset(pair.to);
        let mut pairs: Vec<usize> = (0..problem.in_place.len())
            .filter(|&pair| meets(&problem.in_place[pair]))
            .collect();
        if !pairs.is_empty() {
            let (mut gives, mut takes) = (
                vec![false; problem.items.len()],
                vec![false; problem.items.len()],
            );
            pairs.retain(|&pair| {
                let InPlace { from, to } = problem.in_place[pair];
                let free = free_to_join(problem, &gives, &takes, from, to);
                (gives[from], takes[to]) = (gives[from] || free, takes[to] || free);
                free
            });
        }
        pairs
    }
}

/// A list of numbers, first all 0, as a segment tree: node `n` has the larger number of its
/// children `2n` and `2n + 1`; the leaves are the list.
struct Highest(Vec<u64>);

impl Highest {
    fn new(count: usize) -> Self {
        Highest(vec![0; 2 * count.next_power_of_two()])
    }

    fn set(&mut self, at: usize, number: u64) {
        let mut node = self.0.len() / 2 + at;
        self.0[node] = number;
        while node > 1 {
            node /= 2;
            self.0[node] = self.0[2 * node].max(self.0[2 * node + 1]);
        }
    }

    /// The first number below a node that is larger than `low`, among the first `count` of the
    /// list, and wanted.
    fn find(
        &self,
        node: usize,
        count: usize,
        low: u64,
        wanted: &impl Fn(usize) -> bool,
    ) -> Option<usize> {
        let leaves = self.0.len() / 2;
        let below = leaves.ilog2() - node.ilog2();
        let first = (node << below) - leaves;
        if self.0[node] <= low || first >= count {
            return None;
        }
        if below == 0 {
            return Some(first).filter(|&at| wanted(at));
        }
        self.find(2 * node, count, low, wanted)
            .or_else(|| self.find(2 * node + 1, count, low, wanted))
    }
}

/// Whether neither side of a pair already has another partner, on that side or within the same
/// step.
pub(super) fn free_to_join(
    problem: &Problem,
    gives: &[bool],
    takes: &[bool],
    from: usize,
    to: usize,
) -> bool {
    let brief = |item: usize| problem.items[item].life.steps() <= 1;
    let taken =
        |item: usize, role: &[bool], other: &[bool]| role[item] || brief(item) && other[item];
    !taken(from, gives, takes) && !taken(to, takes, gives)
}

/// Rectangles that overlap only in an invalid problem: those of aliases are joined.
fn disjoint(mut rects: Vec<Rect>, alias: &[usize]) -> Vec<Rect> {
    let group = |rect: &Rect| alias[rect.item];
    rects.sort_by_key(group);
    let aliases = rects.partition_point(|rect| group(rect) != usize::MAX);
    let mut joined = rects.split_off(aliases);
    for group in rects.chunk_by(|a, b| group(a) == group(b)) {
        joined.extend(union(group));
    }
    joined
}

/// Values of a few items as a list over all of them; empty if there is no value at all.
fn by_item(count: usize, values: impl Iterator<Item = (usize, u64)>) -> Vec<Option<u64>> {
    let mut list = Vec::new();
    for (item, value) in values {
        list.resize(count, None);
        list[item] = Some(value);
    }
    list
}

/// One block, from items and their distances to a common point.
fn block(
    problem: &Problem,
    items: &[usize],
    above_root: &[i128],
    fixed: &[Option<u64>],
    space: &[usize],
    gaps: &[Gap],
) -> Result<Block, ProblemError> {
    let lowest = items
        .iter()
        .copied()
        .min_by_key(|&item| above_root[item])
        .unwrap_or(items[0]);
    let mut members = Vec::with_capacity(items.len());
    for &item in items {
        let above = u64::try_from(above_root[item] - above_root[lowest]).ok();
        let end = above.and_then(|above| above.checked_add(problem.items[item].size));
        members.push((
            item,
            above
                .filter(|_| end.is_some())
                .ok_or(ProblemError::TotalSize { item })?,
        ));
    }
    // The coarsest alignment determines the base; the others must agree with it.
    let coarsest = members
        .iter()
        .copied()
        .max_by_key(|&(item, above)| (problem.items[item].align, std::cmp::Reverse(above)));
    let (anchor, anchor_above) = coarsest.unwrap_or((lowest, 0));
    let align = problem.items[anchor].align;
    let residue = anchor_above.wrapping_neg() & (align - 1);
    for &(item, above) in &members {
        let mine = problem.items[item].align;
        // `residue + above` may wrap: only its low bits matter, and those of a sum modulo 2^64 are
        // right.
        if residue.wrapping_add(above) & (mine - 1) != 0 {
            let distance = i128::from(above) - i128::from(anchor_above);
            return Err(ProblemError::TiedMisaligned {
                first: anchor,
                first_align: align,
                second: item,
                second_align: mine,
                distance,
            });
        }
    }
    let mut base: Option<(usize, u64)> = None;
    for &(item, above) in &members {
        let Some(offset) = fixed.get(item).copied().flatten() else {
            continue;
        };
        let Some(here) = offset.checked_sub(above) else {
            let below = u128::from(above);
            return Err(ProblemError::BelowZero {
                fixed: item,
                offset,
                item: lowest,
                below,
            });
        };
        if let Some((first, there)) = base.filter(|&(_, there)| there != here) {
            let above_first = above_root[item] - above_root[first];
            let asked = i128::from(here) - i128::from(there) + above_first;
            return Err(ProblemError::TwoDistances {
                first,
                second: item,
                asked,
                otherwise: above_first,
            });
        }
        base = Some((item, here));
    }
    if let Some((_, base)) = base.filter(|(_, base)| base & (align - 1) != residue) {
        // The remainder of the sum modulo 2^64 is right even where the sum itself is too large.
        return Err(ProblemError::FixedMisaligned {
            item: anchor,
            offset: base.wrapping_add(anchor_above),
            align,
        });
    }
    let mut rects = Vec::with_capacity(items.len());
    let mut size = 0;
    for &(item, above) in &members {
        let from = gaps.partition_point(|gap| gap.item < item);
        let mine = &gaps[from..from + gaps[from..].partition_point(|gap| gap.item == item)];
        let before = rects.len();
        needed(item, &problem.items[item], above, mine, &mut rects);
        if rects.len() > before {
            size = size.max(above + problem.items[item].size);
        }
    }
    let ends = members
        .iter()
        .map(|&(item, above)| (item, above + problem.items[item].size))
        .max_by_key(|&(_, end)| end);
    if let (Some((_, base)), Some((item, end))) = (base, ends)
        && base.checked_add(end).is_none()
    {
        return Err(ProblemError::TotalSize { item });
    }
    let life = rects.iter().fold(None, |life: Option<Lifetime>, rect| {
        let life = life.unwrap_or(Lifetime::new(rect.start, rect.end));
        Some(Lifetime::new(
            life.start.min(rect.start),
            life.end.max(rect.end),
        ))
    });
    let (fixed, space) = (base.map(|(_, base)| base), space[items[0]]);
    Ok(Block {
        members,
        rects,
        size,
        align,
        residue,
        fixed,
        life: life.unwrap_or_default(),
        space,
    })
}

/// Distances between items: a union-find structure whose links store the distance of the lower end
/// above the upper one.
struct Ties {
    parent: Vec<u32>,
    above: Vec<i128>,
}

impl Ties {
    fn new(items: usize) -> Self {
        Ties {
            parent: (0..items as u32).collect(),
            above: vec![0; items],
        }
    }

    /// The root of an item, and the distance of the item above it.
    fn root(&mut self, item: usize) -> (usize, i128) {
        let (mut root, mut above) = (item, 0);
        while self.parent[root] as usize != root {
            above += self.above[root];
            root = self.parent[root] as usize;
        }
        // Path compression: ties every item on the path to the root itself.
        let (mut at, mut rest) = (item, above);
        while self.parent[at] as usize != root && at != root {
            let (next, link) = (self.parent[at] as usize, self.above[at]);
            (self.parent[at], self.above[at]) = (root as u32, rest);
            (at, rest) = (next, rest - link);
        }
        (root, above)
    }

    /// Fixes the distance of `second` above `first`.
    fn tie(&mut self, first: usize, second: usize, distance: i128) -> Result<(), ProblemError> {
        let ((root, above), (other, other_above)) = (self.root(first), self.root(second));
        if root == other {
            let otherwise = other_above - above;
            let same = otherwise == distance;
            return if same {
                Ok(())
            } else {
                Err(ProblemError::TwoDistances {
                    first,
                    second,
                    asked: distance,
                    otherwise,
                })
            };
        }
        self.parent[other] = root as u32;
        self.above[other] = above + distance - other_above;
        Ok(())
    }
}
