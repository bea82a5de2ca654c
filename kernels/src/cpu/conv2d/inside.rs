//! The positions at which the elements of a kernel read the image and not its padding.
//!
//! With small images a large part of a weight gradient's products has a zero of the padding as a
//! factor: of a padded 3×3 kernel over 2×2 positions 5 of 9. Where the rows of a panel belong to
//! one kernel element, their sums run over a list of the other positions.

use std::ops::Range;

use super::Sizes;
use super::tile::{Axis, Parts};
use crate::cpu::gemm::micro::Micro;
use crate::cpu::gemm::{Limits, MC, even, split_blocks, splits, wanted};

/// Fewest channels of the image for which panels of one kernel element are high enough.
const CHANNELS_MIN: usize = 8;
/// Fewest channels of a block.
const BLOCK_MIN: usize = 6;

/// The lists of all kernel elements for a part of whole images: first the end of each, then
/// positions in ascending order, counted from the part's first.
pub(super) struct Inside {
    at: *const i32,
    taps: usize,
}

/// Pairs of positions and kernel elements of one image that lie inside it.
fn pairs(axes: &[Axis; 2]) -> usize {
    let along = |axis: &Axis| -> usize { (0..axis.taps).map(|tap| axis.inside(tap).len()).sum() };
    along(&axes[0]).saturating_mul(along(&axes[1]))
}

/// Whether lists are worth it: at least an eighth of the products is with padding, and parts of the
/// contracted axis are whole images. The number of images decides nothing.
fn applies(sizes: &Sizes, parts: &Parts) -> bool {
    let (taps, out) = (sizes.taps(), sizes.axes.map(|axis| axis.out));
    let blocks = split_blocks(sizes.groups, sizes.source * taps, sizes.other);
    sizes.fixed
        && sizes.source >= CHANNELS_MIN
        && parts.size()[1..] == out
        && pairs(&sizes.axes) * 8 <= taps * out[0] * out[1] * 7
        && splits(blocks, usize::MAX) == 1
}

/// Channels of a block of rows, if its panels belong to one kernel element each: where lists are
/// worth it and there is memory for panels of many channels.
pub(super) fn channels(
    sizes: &Sizes,
    parts: &Parts,
    micro: &Micro,
    limits: &Limits,
) -> Option<usize> {
    let most = 2 * MC / sizes.taps();
    let apart = limits.is_fastest() && most >= BLOCK_MIN && applies(sizes, parts);
    let panels = most / micro.mr * micro.mr;
    apart.then(|| even(sizes.source, if panels > 0 { panels } else { most }, 1))
}

/// Columns of a block beside blocks of rows of so many channels: at most `most`, and few enough for
/// every thread, and for two threads at least, to have several blocks.
pub(super) fn columns(
    sizes: &Sizes,
    channels: usize,
    most: usize,
    threads: usize,
    micro: &Micro,
) -> usize {
    let blocks = sizes.groups * sizes.source.div_ceil(channels);
    let share = wanted(threads.max(2)).div_ceil(blocks);
    even(
        sizes.other,
        most.min(sizes.other.div_ceil(share)),
        micro.nr(),
    )
}

impl Inside {
    /// Elements of the lists for parts of up to `images` images.
    pub fn elements(sizes: &Sizes, images: usize) -> usize {
        (sizes.taps() + 1).saturating_add(images.saturating_mul(pairs(&sizes.axes)))
    }

    /// Writes the lists.
    ///
    /// # Safety
    /// `to` has room for [`Inside::elements`], and is not written while the lists are in use.
    pub unsafe fn new(sizes: &Sizes, images: usize, to: *mut i32) -> Inside {
        let ([rows, columns], taps) = (&sizes.axes, sizes.taps());
        let mut end = taps + 1;
        for tap in 0..taps {
            for image in 0..images {
                for row in rows.inside(tap / columns.taps) {
                    for column in columns.inside(tap % columns.taps) {
                        let position = (image * rows.out + row) * columns.out + column;
                        // SAFETY: the caller's promise.
                        unsafe { *to.add(end) = position as i32 };
                        end += 1;
                    }
                }
            }
            // SAFETY: as above.
            unsafe { *to.add(tap + 1) = end as i32 };
        }
        // SAFETY: as above.
        unsafe { *to = taps as i32 + 1 };
        Inside { at: to, taps }
    }

    /// The positions of a kernel element among these.
    pub fn between(&self, tap: usize, positions: Range<usize>) -> &[i32] {
        debug_assert!(tap < self.taps);
        // SAFETY: `new` has written the ends and the lists.
        let all = unsafe {
            let [from, to] = [tap, tap + 1].map(|tap| *self.at.add(tap) as usize);
            std::slice::from_raw_parts(self.at.add(from), to - from)
        };
        let before = |end: usize| all.partition_point(|&position| (position as usize) < end);
        &all[before(positions.start)..before(positions.end)]
    }
}
