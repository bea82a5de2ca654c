//! The independent verifier of packings.
//!
//! The rules of a packing are few, and do not depend on its packer: every offset is aligned and
//! obeys the constraints of its item; no byte belongs to two items at the same time, unless they
//! are aliases, or a permitted pair at the step at which one replaces the other; and the reported
//! numbers are right. This module checks exactly these rules. It recomputes everything from the
//! [`Problem`] and shares no code with the packers, so that a mistake in a packer cannot also hide
//! in the checker. It takes O(n log n), except for aliases that have gaps with windows: a group of
//! `k` of them may cost O(k²).

use crate::packing::{Packing, Proof};
use crate::problem::{Gap, InPlace, Problem};
use rustc_hash::FxHashMap;
use std::collections::{BTreeMap, BinaryHeap};

mod violation;

pub use violation::Violation;

/// Accepts a valid packing, or returns its first violation. A space that is too small is reported
/// last: the packing is valid otherwise.
pub fn check(problem: &Problem, packing: &Packing) -> Result<(), Violation> {
    problem.verify()?;
    let space_count = problem.spaces.len().max(1);
    let lengths = [
        ("offsets", problem.items.len(), packing.offsets.len()),
        ("spaces", space_count, packing.spaces.len()),
    ];
    if let Some(&(what, expected, found)) = lengths
        .iter()
        .find(|(_, expected, found)| expected != found)
    {
        return Err(Violation::Length {
            what,
            expected,
            found,
        });
    }
    let mut space = vec![0; problem.items.len()];
    for (index, named) in problem.spaces.iter().enumerate() {
        named.items.iter().for_each(|&item| space[item] = index);
    }
    let checker = Checker {
        problem,
        packing,
        offset: &packing.offsets,
        space,
    };
    checker.places()?;
    checker.groups()?;
    checker.pairs()?;
    let tenants = checker.tenants();
    checker.overlaps(&tenants)?;
    checker.numbers(&tenants)?;
    Ok(packing.fits(problem)?)
}

/// Bytes that belong to an item, or to a group of aliases, for an interval of time.
#[derive(Clone, Copy)]
struct Tenant {
    item: usize,
    start: u64,
    end: u64,
    low: u64,
    high: u64,
}

struct Checker<'a> {
    problem: &'a Problem,
    packing: &'a Packing,
    offset: &'a [u64],
    /// The space of each item.
    space: Vec<usize>,
}

impl Checker<'_> {
    /// Each item by itself: aligned, below 2^64, and where it is fixed.
    fn places(&self) -> Result<(), Violation> {
        for (item, (it, &offset)) in self.problem.items.iter().zip(self.offset).enumerate() {
            if offset % it.align != 0 {
                return Err(Violation::Misaligned {
                    item,
                    offset,
                    align: it.align,
                });
            }
            if u64::MAX - offset < it.size {
                return Err(Violation::End {
                    item,
                    offset,
                    size: it.size,
                });
            }
        }
        match self
            .problem
            .fixed
            .iter()
            .find(|at| self.offset[at.item] != at.offset)
        {
            Some(at) => Err(Violation::Moved {
                item: at.item,
                fixed: at.offset,
                offset: self.offset[at.item],
            }),
            None => Ok(()),
        }
    }

    fn groups(&self) -> Result<(), Violation> {
        for group in &self.problem.aliases {
            for &second in group {
                let (first_offset, second_offset) = (self.offset[group[0]], self.offset[second]);
                if first_offset != second_offset {
                    return Err(Violation::AliasesApart {
                        first: group[0],
                        first_offset,
                        second,
                        second_offset,
                    });
                }
            }
        }
        for group in &self.problem.contiguous {
            for (&first, &second) in group.iter().zip(group.iter().skip(1)) {
                let (end, offset) = (
                    self.offset[first] + self.problem.items[first].size,
                    self.offset[second],
                );
                if end != offset {
                    return Err(Violation::NotContiguous {
                        first,
                        end,
                        second,
                        offset,
                    });
                }
            }
        }
        Ok(())
    }

    fn pairs(&self) -> Result<(), Violation> {
        let mut permitted: FxHashMap<InPlace, bool> = self
            .problem
            .in_place
            .iter()
            .map(|&pair| (pair, true))
            .collect();
        let (mut given_to, mut taken_from) = (FxHashMap::default(), FxHashMap::default());
        for &InPlace { from, to } in &self.packing.in_place {
            if permitted.insert(InPlace { from, to }, false) != Some(true) {
                return Err(Violation::PairUnknown { from, to });
            }
            let (from_offset, to_offset) = (self.offset[from], self.offset[to]);
            if from_offset != to_offset {
                return Err(Violation::PairApart {
                    from,
                    from_offset,
                    to,
                    to_offset,
                });
            }
            if let Some(first) = given_to.insert(from, to) {
                return Err(Violation::GivesTwice {
                    from,
                    first,
                    second: to,
                });
            }
            if let Some(first) = taken_from.insert(to, from) {
                return Err(Violation::TakesTwice {
                    to,
                    first,
                    second: from,
                });
            }
        }
        for (&item, &from) in &taken_from {
            let life = self.problem.items[item].life;
            if let Some(&to) = given_to.get(&item).filter(|_| life.end - life.start == 1) {
                return Err(Violation::PassedOn { item, from, to });
            }
        }
        Ok(())
    }

    /// The bytes that each item needs, in the order of items and then of time; no two tenants of
    /// one item overlap in time.
    fn tenants(&self) -> Vec<Tenant> {
        let mut gaps: Vec<&Gap> = self.problem.gaps.iter().collect();
        gaps.sort_by_key(|gap| (gap.item, gap.life.start));
        let mut gaps = gaps.chunk_by(|a, b| a.item == b.item).peekable();
        let mut tenants = Vec::with_capacity(self.problem.items.len());
        for (item, it) in self.problem.items.iter().enumerate() {
            let mine = gaps.next_if(|group| group[0].item == item).unwrap_or(&[]);
            if it.size == 0 || it.life.start >= it.life.end {
                continue;
            }
            for (start, end, low, high) in self.needs(item, mine) {
                let base = self.offset[item];
                tenants.push(Tenant {
                    item,
                    start,
                    end,
                    low: base + low,
                    high: base + high,
                });
            }
        }
        tenants
    }

    /// Intervals of an item's life with the bytes it needs in them. Its gaps come sorted by start.
    fn needs(&self, item: usize, gaps: &[&Gap]) -> Vec<(u64, u64, u64, u64)> {
        let it = &self.problem.items[item];
        let mut times: Vec<u64> = gaps
            .iter()
            .flat_map(|gap| [gap.life.start, gap.life.end])
            .collect();
        times.extend([it.life.start, it.life.end]);
        times.retain(|time| (it.life.start..=it.life.end).contains(time));
        times.sort_unstable();
        times.dedup();
        // The open gaps, by the end of their windows that leaves less; closed gaps are removed when
        // they reach the top.
        let (mut lows, mut highs) = (BinaryHeap::new(), BinaryHeap::new());
        let mut coming = gaps.iter().peekable();
        let mut needs = Vec::new();
        for interval in times.windows(2) {
            while let Some(gap) = coming.next_if(|gap| gap.life.start <= interval[0]) {
                let (low, high) = gap
                    .window
                    .map_or((0, 0), |window| (window.low, window.high));
                lows.push((low, gap.life.end));
                highs.push((std::cmp::Reverse(high), gap.life.end));
            }
            while lows.peek().is_some_and(|&(_, end)| end <= interval[0]) {
                lows.pop();
            }
            while highs.peek().is_some_and(|&(_, end)| end <= interval[0]) {
                highs.pop();
            }
            let low = lows.peek().map_or(0, |&(low, _)| low);
            let high = highs.peek().map_or(it.size, |&(high, _)| high.0);
            if low < high {
                needs.push((interval[0], interval[1], low, high));
            }
        }
        needs
    }

    /// The bytes that an item needs at a step, from tenants sorted by item and time.
    fn at<'t>(&self, tenants: &'t [Tenant], item: usize, step: u64) -> Option<&'t Tenant> {
        let next = tenants.partition_point(|tenant| (tenant.item, tenant.start) <= (item, step));
        tenants[..next]
            .last()
            .filter(|tenant| tenant.item == item && step < tenant.end)
    }

    /// No two tenants of a space overlap: a sweep over time, with the live ones sorted by bytes.
    fn overlaps(&self, tenants: &[Tenant]) -> Result<(), Violation> {
        let mut given: FxHashMap<usize, usize> = FxHashMap::default();
        given.extend(
            self.packing
                .in_place
                .iter()
                .map(|pair| (pair.to, pair.from)),
        );
        let mut own: Vec<Tenant> = Vec::with_capacity(tenants.len());
        for tenant in tenants {
            let birth = self.problem.items[tenant.item].life.start;
            let donor = given
                .get(&tenant.item)
                .filter(|_| tenant.start == birth)
                .and_then(|&from| self.at(tenants, from, birth));
            let Some(donor) = donor else {
                own.push(*tenant);
                continue;
            };
            // At their common step, the donor stands for both items where it has bytes.
            own.push(Tenant {
                start: birth + 1,
                ..*tenant
            });
            own.push(Tenant {
                end: birth + 1,
                high: tenant.high.min(donor.low),
                ..*tenant
            });
            own.push(Tenant {
                end: birth + 1,
                low: tenant.low.max(donor.high),
                ..*tenant
            });
        }
        own.retain(|tenant| tenant.start < tenant.end && tenant.low < tenant.high);
        let own = self.joined(own);
        let mut events: Vec<(usize, u64, bool, usize)> = Vec::with_capacity(2 * own.len());
        for (index, tenant) in own.iter().enumerate() {
            let space = self.space[tenant.item];
            // At one step, tenants that end are removed before others are added.
            events.extend([
                (space, tenant.start, true, index),
                (space, tenant.end, false, index),
            ]);
        }
        events.sort_unstable();
        let mut living: BTreeMap<u64, &Tenant> = BTreeMap::new();
        for (space, step, arrives, index) in events {
            let tenant = &own[index];
            if !arrives {
                living.remove(&tenant.low);
                continue;
            }
            let below = living
                .range(..tenant.high)
                .next_back()
                .map(|(_, other)| *other);
            if let Some(other) = below.filter(|other| other.high > tenant.low) {
                return Err(Violation::Overlap {
                    first: other.item,
                    first_bytes: (other.low, other.high),
                    second: tenant.item,
                    second_bytes: (tenant.low, tenant.high),
                    step,
                    space,
                });
            }
            living.insert(tenant.low, tenant);
        }
        Ok(())
    }

    /// The same tenants, with those of each group of aliases replaced by the union of the group.
    fn joined(&self, tenants: Vec<Tenant>) -> Vec<Tenant> {
        if self.problem.aliases.is_empty() {
            return tenants;
        }
        let mut group_of: Vec<Option<usize>> = vec![None; self.problem.items.len()];
        for (group, items) in self.problem.aliases.iter().enumerate() {
            items.iter().for_each(|&item| group_of[item] = Some(group));
        }
        let mut groups: Vec<Vec<Tenant>> = vec![Vec::new(); self.problem.aliases.len()];
        let mut joined = Vec::with_capacity(tenants.len());
        for tenant in tenants {
            match group_of[tenant.item] {
                Some(group) => groups[group].push(tenant),
                None => joined.push(tenant),
            }
        }
        for mut group in groups {
            group.sort_by_key(|tenant| tenant.start);
            let mut times: Vec<u64> = group
                .iter()
                .flat_map(|tenant| [tenant.start, tenant.end])
                .collect();
            times.sort_unstable();
            times.dedup();
            let flat = group.windows(2).all(|two| two[0].low == two[1].low);
            let mut coming = group.iter().peekable();
            let mut highest: BinaryHeap<(u64, u64, usize)> = BinaryHeap::new();
            let mut living: Vec<&Tenant> = Vec::new();
            for interval in times.windows(2) {
                while let Some(tenant) = coming.next_if(|tenant| tenant.start <= interval[0]) {
                    highest.push((tenant.high, tenant.end, tenant.item));
                    living.extend((!flat).then_some(tenant));
                }
                while highest
                    .peek()
                    .is_some_and(|&(_, end, _)| end <= interval[0])
                {
                    highest.pop();
                }
                if flat {
                    let top = highest.peek().map(|&(high, _, item)| Tenant {
                        item,
                        start: interval[0],
                        end: interval[1],
                        low: group[0].low,
                        high,
                    });
                    joined.extend(top);
                    continue;
                }
                living.retain(|tenant| tenant.end > interval[0]);
                living.sort_by_key(|tenant| tenant.low);
                let first = joined.len();
                for tenant in &living {
                    match joined[first..]
                        .last_mut()
                        .filter(|last| tenant.low <= last.high)
                    {
                        Some(last) => last.high = last.high.max(tenant.high),
                        None => joined.push(Tenant {
                            start: interval[0],
                            end: interval[1],
                            ..**tenant
                        }),
                    }
                }
            }
        }
        joined
    }

    /// Checks heights, lower bounds and the claimed proof.
    fn numbers(&self, tenants: &[Tenant]) -> Result<(), Violation> {
        let mut heights = vec![0u64; self.packing.spaces.len()];
        for tenant in tenants {
            let height = &mut heights[self.space[tenant.item]];
            *height =
                (*height).max(self.offset[tenant.item] + self.problem.items[tenant.item].size);
        }
        let bounds = self.lower_bounds(tenants);
        // Not the sums, which saturate.
        let is_at_bound = heights == bounds;
        for (space, extent) in self.packing.spaces.iter().enumerate() {
            if extent.height != heights[space] {
                return Err(Violation::Height {
                    space,
                    expected: heights[space],
                    found: extent.height,
                });
            }
            if extent.lower_bound != bounds[space] {
                return Err(Violation::LowerBound {
                    space,
                    expected: bounds[space],
                    found: extent.lower_bound,
                });
            }
        }
        let (height, lower_bound) = (self.packing.height, self.packing.lower_bound);
        for (what, parts, found) in [
            ("height", heights, height),
            ("lower bound", bounds, lower_bound),
        ] {
            let expected = parts
                .iter()
                .fold(0, |sum: u64, &part| sum.saturating_add(part));
            if expected != found {
                return Err(Violation::Sum {
                    what,
                    expected,
                    found,
                });
            }
        }
        let proof = self.packing.proof;
        if (proof == Some(Proof::Bound)) != is_at_bound {
            return Err(Violation::Proof {
                proof,
                height,
                lower_bound,
            });
        }
        Ok(())
    }

    /// The lower bound of each space: see [`Problem::lower_bound`].
    fn lower_bounds(&self, tenants: &[Tenant]) -> Vec<u64> {
        let needy = self
            .problem
            .items
            .iter()
            .filter(|item| item.size > 0 && !item.life.is_empty());
        let windows = self.problem.gaps.iter().any(|gap| gap.window.is_some());
        let unit = if windows {
            1
        } else {
            needy.map(|item| item.align).min().unwrap_or(1)
        };
        let whole = |bytes: u64| u128::from(bytes).next_multiple_of(u128::from(unit));
        // (space, step, +bytes, -bytes, the rest of its last unit and where that ends)
        let mut changes: BTreeMap<(usize, u64), (u128, u128)> = BTreeMap::new();
        let mut rests: Vec<(usize, u64, u64, u64)> = Vec::new();
        for tenant in self.joined(tenants.to_vec()) {
            let (space, bytes) = (self.space[tenant.item], tenant.high - tenant.low);
            changes.entry((space, tenant.start)).or_default().0 += whole(bytes);
            changes.entry((space, tenant.end)).or_default().1 += whole(bytes);
            let rest = (whole(bytes) - u128::from(bytes)) as u64;
            if rest > 0 {
                rests.push((space, tenant.start, rest, tenant.end));
            }
        }
        for ((space, step), saved) in self.savings(tenants, whole) {
            changes.entry((space, step)).or_default().1 += saved;
            changes.entry((space, step + 1)).or_default().0 += saved;
        }
        rests.sort_unstable();
        let mut rests = rests.into_iter().peekable();
        let mut bounds = self.tops();
        let (mut current, mut more, mut less) = (0, 0u128, 0u128);
        let mut spare: BinaryHeap<(u64, u64)> = BinaryHeap::new();
        for ((space, step), (plus, minus)) in changes {
            if space != current {
                (current, more, less) = (space, 0, 0);
                spare.clear();
            }
            (more, less) = (more + plus, less + minus);
            while let Some((_, _, rest, end)) =
                rests.next_if(|&(of, start, ..)| (of, start) <= (space, step))
            {
                spare.push((rest, end));
            }
            while spare.peek().is_some_and(|&(_, end)| end <= step) {
                spare.pop();
            }
            let live = more
                .saturating_sub(less)
                .saturating_sub(spare.peek().map_or(0, |&(rest, _)| u128::from(rest)));
            bounds[space] = bounds[space].max(u64::try_from(live).unwrap_or(u64::MAX));
        }
        bounds
    }

    /// The most that permitted pairs could save at each step: a sum over donors or over recipients,
    /// each with its best partner.
    fn savings(
        &self,
        tenants: &[Tenant],
        whole: impl Fn(u64) -> u128,
    ) -> BTreeMap<(usize, u64), u128> {
        let mut best: [BTreeMap<(usize, u64, usize), u128>; 2] = Default::default();
        for &InPlace { from, to } in &self.problem.in_place {
            let step = self.problem.items[to].life.start;
            let (Some(donor), Some(recipient)) =
                (self.at(tenants, from, step), self.at(tenants, to, step))
            else {
                continue;
            };
            let shared = whole((donor.high - donor.low).min(recipient.high - recipient.low));
            for (side, item) in best.iter_mut().zip([from, to]) {
                let most = side.entry((self.space[from], step, item)).or_default();
                *most = shared.max(*most);
            }
        }
        let [donors, recipients] = best.map(|side| {
            let mut sums: BTreeMap<(usize, u64), u128> = BTreeMap::new();
            side.into_iter().for_each(|((space, step, _), most)| {
                *sums.entry((space, step)).or_default() += most
            });
            sums
        });
        donors
            .into_iter()
            .map(|(at, sum)| (at, sum.min(recipients[&at])))
            .collect()
    }

    /// The minimal end of the highest item of each space, given the items that it is tied to.
    fn tops(&self) -> Vec<u64> {
        let mut tied: Vec<usize> = (0..self.problem.items.len()).collect();
        let root = |tied: &mut Vec<usize>, mut item: usize| {
            while tied[item] != item {
                tied[item] = tied[tied[item]];
                item = tied[item];
            }
            item
        };
        for group in self.problem.aliases.iter().chain(&self.problem.contiguous) {
            for two in group.windows(2) {
                let (a, b) = (root(&mut tied, two[0]), root(&mut tied, two[1]));
                tied[a] = b;
            }
        }
        // For each set of tied items: its first byte, the coarsest alignment, and whether it can
        // move.
        let mut ties = vec![(u64::MAX, 1, false); self.problem.items.len()];
        for item in 0..tied.len() {
            let (low, align, _) = &mut ties[root(&mut tied, item)];
            (*low, *align) = (
                (*low).min(self.offset[item]),
                (*align).max(self.problem.items[item].align),
            );
        }
        for at in &self.problem.fixed {
            ties[root(&mut tied, at.item)].2 = true;
        }
        let mut tops = vec![0u64; self.packing.spaces.len()];
        let mut gapless: Vec<bool> = self
            .problem
            .items
            .iter()
            .map(|it| it.size > 0 && it.life.start < it.life.end)
            .collect();
        if !self.problem.gaps.is_empty() {
            gapless.fill(false);
            self.tenants()
                .iter()
                .for_each(|tenant| gapless[tenant.item] = true);
        }
        for item in (0..tied.len()).filter(|&item| gapless[item]) {
            let (low, align, fixed) = ties[root(&mut tied, item)];
            let end = self.offset[item] + self.problem.items[item].size;
            let top = &mut tops[self.space[item]];
            // A movable set begins as low as its alignment allows.
            *top = (*top).max(if fixed { end } else { end - low + low % align });
        }
        tops
    }
}
