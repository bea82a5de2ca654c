//! First fit in every order of a few items. It finds the lowest packing, because first fit in the
//! order of a packing's offsets places no item higher than that packing does.

use super::Found;
use super::sections::{Sections, Span};

/// The most items: eight have 40,320 orders, and orders that reach as high as the best are pruned.
pub(super) const MAX: usize = 8;

/// The lowest packing, if one is below `limit`. Stops at the first that reaches `goal`.
pub(super) fn lowest(sections: &Sections, limit: u64, goal: u64) -> Option<Found> {
    let spans = &sections.spans;
    let mut orders = Orders {
        spans,
        order: Vec::new(),
        offsets: vec![0; spans.len()],
        limit,
        goal,
        best: None,
    };
    orders.extend(0);
    orders.best.map(|offsets| Found {
        offsets,
        height: orders.limit,
    })
}

struct Orders<'a> {
    spans: &'a [Span],
    /// The spans placed so far.
    order: Vec<usize>,
    offsets: Vec<u64>,
    /// The height of the best packing; orders that reach it are pruned.
    limit: u64,
    goal: u64,
    best: Option<Vec<u64>>,
}

impl Orders<'_> {
    /// Tries every order of the remaining items above the first ones, which reach `height`.
    fn extend(&mut self, height: u64) {
        if self.order.len() == self.spans.len() {
            self.limit = height;
            self.best = Some(self.offsets.clone());
            return;
        }
        for at in 0..self.spans.len() {
            if self.limit <= self.goal {
                return;
            }
            if self.order.contains(&at) {
                continue;
            }
            let offset = self.first_fit(&self.spans[at]);
            let top = height.max(offset + self.spans[at].bytes);
            if top < self.limit {
                self.offsets[at] = offset;
                self.order.push(at);
                self.extend(top);
                self.order.pop();
            }
        }
    }

    /// The lowest offset free for the whole life of a span.
    fn first_fit(&self, span: &Span) -> u64 {
        let mut offset = 0;
        let blocks = |offset: u64| {
            let other = self
                .order
                .iter()
                .map(|&other| (&self.spans[other], self.offsets[other]));
            let mut alive =
                other.filter(|(other, _)| other.start < span.end && span.start < other.end);
            alive.find(|(other, low)| *low < offset + span.size && offset < low + other.size)
        };
        while let Some((other, low)) = blocks(offset) {
            offset = (low + other.size).next_multiple_of(span.align);
        }
        offset
    }
}
