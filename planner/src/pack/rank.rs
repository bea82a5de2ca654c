//! The orders in which heuristics consider items.

use super::sections::{Sections, Span};
use std::cmp::Reverse;
use std::fmt;

/// The criteria by which items come earlier: larger numbers first, ties by the next criterion, then
/// by area, width, total, start and index.
///
/// *Width* is the length of an item's life, *area* its width times its size, *total* the largest
/// sum of live sizes during its life. The combinations of width, area and total are those of
/// Moffitt, "MiniMalloc" (ASPLOS 2023).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Rank {
    /// Size, width.
    SizeWidth,
    /// Area.
    Area,
    /// Total, area, width.
    TotalAreaWidth,
    /// Total, width, area.
    TotalWidthArea,
    /// Total, size: the items of the fullest instant first ("greedy by breadth").
    TotalSize,
    /// Width, area, total.
    WidthAreaTotal,
    /// Start, earlier ones first, then size: the order in which a run allocates them.
    Start,
}

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Rank::SizeWidth => "size",
            Rank::Area => "area",
            Rank::TotalAreaWidth => "total, area, width",
            Rank::TotalWidthArea => "total, width, area",
            Rank::TotalSize => "total, size",
            Rank::WidthAreaTotal => "width, area, total",
            Rank::Start => "start",
        })
    }
}

impl Rank {
    /// The spans in this order.
    pub(super) fn order(self, sections: &Sections) -> Vec<u32> {
        let totals = match self {
            Rank::TotalAreaWidth
            | Rank::TotalWidthArea
            | Rank::TotalSize
            | Rank::WidthAreaTotal => sections.totals(),
            Rank::SizeWidth | Rank::Area | Rank::Start => Vec::new(),
        };
        let total = |i: u32| totals.get(i as usize).copied().unwrap_or(0);
        let area = |span: &Span| u128::from(span.width).saturating_mul(u128::from(span.size));
        // Areas beyond 64 bits are distinguished only when two spans are compared in full.
        let short = |area: u128| u64::try_from(area).unwrap_or(u64::MAX);
        let keys = (0u32..).zip(&sections.spans).map(|(i, span)| match self {
            Rank::SizeWidth => (span.size, span.width, i),
            Rank::Area => (short(area(span)), 0, i),
            Rank::TotalAreaWidth => (total(i), short(area(span)), i),
            Rank::TotalWidthArea => (total(i), span.width, i),
            Rank::TotalSize => (total(i), span.size, i),
            Rank::WidthAreaTotal => (span.width, short(area(span)), i),
            Rank::Start => (u64::from(u32::MAX - span.start), span.size, i),
        });
        let mut keys: Vec<(u64, u64, u32)> = keys.collect();
        let full = |i: u32| {
            let span = &sections.spans[i as usize];
            (area(span), span.width, total(i), Reverse((span.start, i)))
        };
        keys.sort_unstable_by(|a, b| {
            (b.0, b.1)
                .cmp(&(a.0, a.1))
                .then_with(|| full(b.2).cmp(&full(a.2)))
        });
        keys.into_iter().map(|key| key.2).collect()
    }
}
