//! The orders in which heuristics consider items.

use super::sections::{Sections, Span};
use crate::method::Rank;
use std::cmp::Reverse;

impl Rank {
    /// The spans in this order.
    pub(crate) fn order(self, sections: &Sections) -> Vec<u32> {
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
