//! The orders in which heuristics consider items.

use super::sections::{Sections, Span};
use crate::liveness::{Lifetime, Profile};
use std::cmp::Reverse;
use std::fmt;

/// What makes an item come earlier: larger numbers first, ties by the next criterion, then by start and index.
///
/// *Width* is the length of its life, *area* that times its size, *total* the largest sum of live sizes during its life.
/// The combinations of width, area and total are those of Moffitt, "MiniMalloc" (ASPLOS 2023).
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
    /// Start, earlier ones first, then size: the order in which a run asks for them.
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
            Rank::TotalAreaWidth | Rank::TotalWidthArea | Rank::TotalSize | Rank::WidthAreaTotal => totals(sections),
            Rank::SizeWidth | Rank::Area | Rank::Start => vec![0; sections.spans.len()],
        };
        let key = |i: usize| {
            let span = &sections.spans[i];
            let width = u128::from(span.width);
            let (size, total) = (u128::from(span.size), u128::from(totals[i]));
            let area = width.saturating_mul(size);
            let largest = match self {
                Rank::SizeWidth => [size, width, 0],
                Rank::Area => [area, size, 0],
                Rank::TotalAreaWidth => [total, area, width],
                Rank::TotalWidthArea => [total, width, area],
                Rank::TotalSize => [total, size, width],
                Rank::WidthAreaTotal => [width, area, total],
                Rank::Start => [u128::from(u32::MAX - span.start), size, width],
            };
            (Reverse(largest), span.start)
        };
        let mut order: Vec<u32> = (0..sections.spans.len() as u32).collect();
        order.sort_by_cached_key(|&i| key(i as usize));
        order
    }
}

/// For each span the largest sum of live sizes during its life.
fn totals(sections: &Sections) -> Vec<u64> {
    let mut changes = vec![0i128; sections.count() + 1];
    for span in &sections.spans {
        changes[span.start as usize] += i128::from(span.size);
        changes[span.end as usize] -= i128::from(span.size);
    }
    let life = |span: &Span| Lifetime::new(u64::from(span.start), u64::from(span.end));
    let mut live = Profile::new(sections.count());
    let mut sum = 0;
    for (section, change) in (0u64..).zip(changes) {
        sum += change;
        live.add(Lifetime::new(section, section + 1), sum);
    }
    sections.spans.iter().map(|span| live.max(life(span)) as u64).collect()
}
