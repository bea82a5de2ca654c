//! One item after the other, each against all placed before: the lowest offset free for its whole life (first fit) or the
//! tightest gap (best fit). Quadratic in the number of items.

use super::Found;
use super::sections::Sections;

/// Which of the free gaps an item gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fit {
    /// The lowest that is large enough.
    First,
    /// The smallest that is large enough; above everything only if there is none.
    Best,
}

/// A placed item: bytes first, since offsets are what is scanned.
struct Placed {
    offset: u64,
    top: u64,
    start: u32,
    end: u32,
}

/// Places the spans in `order`. Nothing, if the height would not stay below `limit`.
pub(super) fn pack(sections: &Sections, order: &[u32], fit: Fit, limit: u64) -> Option<Found> {
    let mut offsets = vec![0; sections.spans.len()];
    let mut height = 0;
    // Sorted by offset.
    let mut placed: Vec<Placed> = Vec::with_capacity(order.len());
    for &i in order {
        let span = &sections.spans[i as usize];
        let mut best: Option<(u64, u64)> = None;
        // The lowest aligned offset above everything seen so far that is alive at the same time.
        let mut free = 0u64;
        for other in &placed {
            if other.end <= span.start || span.end <= other.start {
                continue;
            }
            if let Some(gap) = other.offset.checked_sub(free).filter(|&gap| gap >= span.size) {
                if best.is_none_or(|(_, smallest)| gap < smallest) {
                    best = Some((free, gap));
                }
                if fit == Fit::First {
                    break;
                }
            }
            free = free.max(other.top.next_multiple_of(span.align));
        }
        let offset = best.map_or(free, |(offset, _)| offset);
        let top = offset + span.size;
        height = height.max(top);
        if height >= limit {
            return None;
        }
        offsets[i as usize] = offset;
        let at = placed.partition_point(|other| other.offset < offset);
        placed.insert(at, Placed { offset, top, start: span.start, end: span.end });
    }
    Some(Found { offsets, height })
}
