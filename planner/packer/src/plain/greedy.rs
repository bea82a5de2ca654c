//! Greedy placement: each item in turn goes to the lowest offset free for its whole life (first
//! fit) or into the tightest gap (best fit). Where most items live at once, all placed items are
//! scanned by offset; where few do, only an item's neighbours are gathered and sorted.

use super::Found;
use super::lives::{Index, Lives};
use super::sections::{Sections, Span};

/// The rule by which an item gets one of the free gaps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fit {
    /// The lowest gap that is large enough.
    First,
    /// The smallest gap that is large enough; above everything if there is none.
    Best,
}

/// A placed item: bytes come first, because offsets are scanned.
struct PlacedItem {
    offset: u64,
    top: u64,
    start: u32,
    end: u32,
}

/// The cost of gathering and sorting a neighbour, in steps of the scan over all items.
const GATHERING: u64 = 16;

/// The cost of a pass, in steps of some nanosecond.
pub(super) fn cost(sections: &Sections) -> u64 {
    scan_cost(sections).min(gather_cost(sections))
}

fn scan_cost(sections: &Sections) -> u64 {
    (sections.spans.len() as u64).pow(2) / 2
}

fn gather_cost(sections: &Sections) -> u64 {
    sections.pairs().saturating_mul(GATHERING)
}

/// Places the spans in `order`; `None` if the height would not stay below `limit`.
pub(super) fn pack(
    sections: &Sections,
    lives: &Lives,
    order: &[u32],
    fit: Fit,
    limit: u64,
) -> Option<Found> {
    let mut found = Found {
        offsets: vec![0; sections.spans.len()],
        height: 0,
    };
    let scans_all = scan_cost(sections) <= gather_cost(sections);
    // `all` has the placed spans by offset; the index tells which of them are neighbours.
    let mut all: Vec<PlacedItem> = Vec::new();
    let mut index = Index::new(lives);
    let mut near: Vec<(u64, u64)> = Vec::new();
    for &i in order {
        let span = &sections.spans[i as usize];
        let offset = if scans_all {
            let alive = all
                .iter()
                .filter(|other| other.end > span.start && span.end > other.start);
            lowest(alive.map(|other| (other.offset, other.top)), span, fit)
        } else {
            near.clear();
            index.across(lives, span.start, span.end, |other| {
                let offset = found.offsets[other as usize];
                near.push((offset, offset + sections.spans[other as usize].size));
            });
            near.sort_unstable();
            lowest(near.iter().copied(), span, fit)
        };
        let top = offset + span.size;
        found.height = found.height.max(offset + span.bytes);
        if found.height >= limit {
            return None;
        }
        found.offsets[i as usize] = offset;
        if scans_all {
            let at = all.partition_point(|other| other.offset < offset);
            all.insert(
                at,
                PlacedItem {
                    offset,
                    top,
                    start: span.start,
                    end: span.end,
                },
            );
        } else {
            index.insert(lives, i);
        }
    }
    Some(found)
}

/// The offset at which a span fits between the `taken` ranges (offset and top, by offset).
fn lowest(taken: impl Iterator<Item = (u64, u64)>, span: &Span, fit: Fit) -> u64 {
    let mut best: Option<(u64, u64)> = None;
    // The lowest aligned offset above everything seen so far.
    let mut free = 0u64;
    for (offset, top) in taken {
        if let Some(gap) = offset.checked_sub(free).filter(|&gap| gap >= span.size) {
            if fit == Fit::First {
                return free;
            }
            if best.is_none_or(|(_, smallest)| gap < smallest) {
                best = Some((free, gap));
            }
        }
        free = free.max(top.next_multiple_of(span.align));
    }
    best.map_or(free, |(offset, _)| offset)
}
