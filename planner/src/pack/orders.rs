//! First fit in every order of a few items, which finds the lowest packing: in the order of its
//! offsets no item comes to lie higher than there.

use super::Found;
use super::sections::{Sections, Span};

/// Up to how many items: eight have 40,320 orders, of which those are left that reach as high as
/// the best.
pub(super) const MAX: usize = 8;

/// The lowest packing, where one is below `limit`. Ends with the first that reaches `goal`.
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
    /// What is not below this is not looked for: the height of the best.
    limit: u64,
    goal: u64,
    best: Option<Vec<u64>>,
}

impl Orders<'_> {
    /// Tries every order of what is left above the first ones, which reach `height`.
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
