//! The packing problem: items and the constraints on their offsets.

use crate::error::ProblemError;
use crate::lifetime::Lifetime;

/// One item to place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Item {
    /// The time in which it needs its bytes; an empty life needs none.
    pub life: Lifetime,
    /// Its size in bytes.
    pub size: u64,
    /// Its offset is a multiple of this power of two.
    pub align: u64,
}

impl Item {
    /// Whether it needs bytes at some instant, ignoring gaps. An item that does not lies at 0
    /// unless it is tied to another item.
    pub(crate) fn needs_space(&self) -> bool {
        self.size > 0 && !self.life.is_empty()
    }
}

/// An item and an offset for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Placement {
    /// The index of the item.
    pub item: usize,
    /// Its first byte.
    pub offset: u64,
}

/// A range of an item's own bytes, counted from its offset, half-open.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Window {
    /// The first byte.
    pub low: u64,
    /// The byte after the last one.
    pub high: u64,
}

/// A part of an item's life in which it does not need all of its bytes. The part of a gap outside
/// the life has no meaning; where gaps of one item overlap, it needs the intersection of their
/// windows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Gap {
    /// The index of the item.
    pub item: usize,
    /// The time of the gap.
    pub life: Lifetime,
    /// The bytes that it needs even then; `None` if it needs no bytes.
    pub window: Option<Window>,
}

/// Permission to compute one item in the place of another: `to`, whose life begins at the last step
/// of the life of `from`, may lie at the same offset, and the two may then share bytes at that
/// step. An item donates its bytes to at most one other and receives those of at most one; an item
/// that lives for a single step does not do both.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct InPlace {
    /// The donor, which dies.
    pub from: usize,
    /// The recipient, which is born.
    pub to: usize,
}

/// A memory with its own addresses.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default)]
pub struct Space {
    /// Its size in bytes, if limited. A packing that stays within it is good enough; one that does
    /// not is still returned, and [`Packing::fits`](crate::Packing::fits) reports it.
    pub capacity: Option<u64>,
    /// The indices of its items. Items that no space names are in the first one.
    pub items: Vec<usize>,
}

/// Items to place, and the constraints on their offsets.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default)]
pub struct Problem {
    /// The items, in any order.
    pub items: Vec<Item>,
    /// Given offsets.
    pub fixed: Vec<Placement>,
    /// Times at which items need fewer bytes than their size.
    pub gaps: Vec<Gap>,
    /// Groups whose members all have the same offset and may share bytes at any time.
    pub aliases: Vec<Vec<usize>>,
    /// Groups in which every item begins exactly at the end of the one before it.
    pub contiguous: Vec<Vec<usize>>,
    /// Permitted in-place pairs; the pairs that are used are chosen together with the offsets.
    pub in_place: Vec<InPlace>,
    /// The memories. If empty: one without a limit.
    pub spaces: Vec<Space>,
    /// Offsets to start from, for some or all items: a packing to improve on if they are valid,
    /// otherwise a hint for the order of placement.
    pub start: Vec<Placement>,
}

impl Problem {
    /// Items in one memory, without constraints.
    pub fn new(items: Vec<Item>) -> Self {
        Problem {
            items,
            ..Problem::default()
        }
    }

    /// Whether there are only items, and perhaps a capacity or a start.
    pub(crate) fn is_plain(&self) -> bool {
        let Problem {
            items: _,
            fixed,
            gaps,
            aliases,
            contiguous,
            in_place,
            spaces,
            start: _,
        } = self;
        fixed.is_empty()
            && gaps.is_empty()
            && aliases.is_empty()
            && contiguous.is_empty()
            && in_place.is_empty()
            && spaces.len() <= 1
    }

    /// The capacity of each space; one without a limit where no space is given.
    pub(crate) fn capacities(&self) -> Vec<Option<u64>> {
        if self.spaces.is_empty() {
            vec![None]
        } else {
            self.spaces.iter().map(|space| space.capacity).collect()
        }
    }

    /// The index of the space of each item. The problem must be valid.
    pub fn space_of(&self) -> Vec<usize> {
        let mut space_of = vec![0; self.items.len()];
        for (index, space) in self.spaces.iter().enumerate() {
            space.items.iter().for_each(|&item| space_of[item] = index);
        }
        space_of
    }

    /// The size of all items in whole units of the coarsest alignment, in bytes. Items stack
    /// without gaps in these units, so no heuristic gets higher than this sum.
    pub(crate) fn stacked(&self) -> Result<u64, ProblemError> {
        let coarsest = self.items.iter().map(|it| it.align).fold(1, u64::max);
        self.items
            .iter()
            .enumerate()
            .try_fold(0u64, |total, (item, it)| {
                let sum = it
                    .size
                    .checked_next_multiple_of(coarsest)
                    .and_then(|size| total.checked_add(size));
                sum.ok_or(ProblemError::TotalSize { item })
            })
    }

    /// The problem without those start offsets that leave too little space above them for all other
    /// items; `None` if every offset leaves enough.
    pub(crate) fn with_reachable_start(&self) -> Option<Problem> {
        let coarsest = self.items.iter().map(|it| it.align).fold(1, u64::max);
        let highest = self
            .stacked()
            .map_or(0, |stacked| (u64::MAX - stacked).saturating_sub(coarsest));
        let is_reachable = |at: &&Placement| at.offset <= highest;
        let start: Vec<Placement> = self.start.iter().filter(is_reachable).copied().collect();
        (start.len() < self.start.len()).then(|| Problem {
            start,
            ..self.clone()
        })
    }

    /// Checks each constraint by itself.
    pub(crate) fn references(&self) -> Result<(), ProblemError> {
        let count = self.items.len();
        let groups = |groups: &[Vec<usize>]| groups.iter().flatten().copied().collect::<Vec<_>>();
        let lists = [
            ("fixed", self.fixed.iter().map(|at| at.item).collect()),
            ("gaps", self.gaps.iter().map(|gap| gap.item).collect()),
            ("aliases", groups(&self.aliases)),
            ("contiguous", groups(&self.contiguous)),
            (
                "in_place",
                self.in_place
                    .iter()
                    .flat_map(|pair| [pair.from, pair.to])
                    .collect(),
            ),
            (
                "spaces",
                self.spaces
                    .iter()
                    .flat_map(|space| &space.items)
                    .copied()
                    .collect(),
            ),
            (
                "start",
                self.start.iter().map(|at| at.item).collect::<Vec<_>>(),
            ),
        ];
        for (list, items) in lists {
            if let Some(&item) = items.iter().find(|&&item| item >= count) {
                return Err(ProblemError::NoSuchItem { list, item, count });
            }
            // Gaps and pairs may name an item several times.
            let mut seen = vec![
                false;
                if matches!(list, "gaps" | "in_place") || items.is_empty() {
                    0
                } else {
                    count
                }
            ];
            if !seen.is_empty()
                && let Some(&item) = items
                    .iter()
                    .find(|&&item| std::mem::replace(&mut seen[item], true))
            {
                return Err(ProblemError::NamedTwice { list, item });
            }
        }
        for &Placement { item, offset } in &self.fixed {
            let Item { size, align, .. } = self.items[item];
            if !offset.is_multiple_of(align) {
                return Err(ProblemError::FixedMisaligned {
                    item,
                    offset,
                    align,
                });
            }
            if offset.checked_add(size).is_none() {
                return Err(ProblemError::FixedEnd { item, offset, size });
            }
        }
        for &Gap { item, life, window } in &self.gaps {
            if life.end < life.start {
                return Err(ProblemError::Gap {
                    item,
                    start: life.start,
                    end: life.end,
                });
            }
            let size = self.items[item].size;
            if let Some(Window { low, high }) =
                window.filter(|window| window.high < window.low || window.high > size)
            {
                return Err(ProblemError::Window {
                    item,
                    low,
                    high,
                    size,
                });
            }
        }
        let mut pairs = self.in_place.clone();
        pairs.sort_unstable();
        if let Some(twice) = pairs.windows(2).find(|two| two[0] == two[1]) {
            return Err(ProblemError::PairTwice {
                from: twice[0].from,
                to: twice[0].to,
            });
        }
        for &InPlace { from, to } in &self.in_place {
            let (end, start) = (self.items[from].life.end, self.items[to].life.start);
            if self.items[from].life.is_empty()
                || self.items[to].life.is_empty()
                || start.checked_add(1) != Some(end)
            {
                return Err(ProblemError::PairNeverMeets {
                    from,
                    to,
                    end,
                    start,
                });
            }
        }
        Ok(())
    }
}
