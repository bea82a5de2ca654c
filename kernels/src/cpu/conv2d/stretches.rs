//! Elements of an image that tiles read, as stretches of neighbours.

use std::ops::Range;

use super::tile::{Axis, Part, Source};
use crate::cpu::gemm::micro::Micro;
use crate::cpu::gemm::winograd::{Filtering, Stretch};

/// Most vectors of tiles, most lanes of a vector, and most results of an axis of a tile.
const VECTORS: usize = 2;
const LANES: usize = 16;
const RESULTS: usize = 4;

/// The stretches of one or two vectors of tiles.
pub(super) struct Stretches {
    stretches: [Stretch; VECTORS * LANES],
    count: usize,
    /// The end of the stretches of each vector of the image, after a zero.
    ends: [u16; RESULTS * VECTORS + 1],
    results: usize,
}

impl Stretches {
    pub fn all(&self) -> &[Stretch] {
        &self.stretches[..self.count]
    }

    /// See [`Tiles::ends`](crate::cpu::gemm::winograd::Tiles::ends), of `vectors` vectors of tiles.
    pub fn ends(&self, vectors: usize) -> &[u16] {
        &self.ends[..=self.results * vectors]
    }
}

/// The stretches of some tiles of a part; `axes` are [those of tiles](super::winograd::axes).
pub(super) fn stretches(
    source: &Source,
    axes: &[Axis; 2],
    part: &Part,
    tiles: Range<usize>,
    filtering: Filtering,
    micro: &Micro,
) -> Stretches {
    let mut found = Stretches {
        stretches: [Stretch::default(); VECTORS * LANES],
        count: 0,
        ends: [0; RESULTS * VECTORS + 1],
        results: filtering.results,
    };
    let (rows, columns) = (part.rows.len(), part.columns.len());
    // Tiles of a vector of the image.
    let share = micro.lanes / filtering.results;
    let [image_stride, _, row_stride, _] = source.strides;
    let mut tile = tiles.start;
    while tile < tiles.end {
        let lane = tile - tiles.start;
        let count = (columns - tile % columns)
            .min(share - lane % share)
            .min(tiles.end - tile);
        // The first element of the first tile, in the padding where it is negative.
        let image = part.images.start + tile / columns / rows;
        let row = axes[0].first(part.rows.start + tile / columns % rows);
        let column = axes[1].first(part.columns.start + tile % columns);
        let place = filtering.results * (lane % share);
        let clamp = |first: isize, size: usize, most: usize| {
            let inside = |at: isize| at.clamp(0, most as isize) as u32;
            ((1u64 << inside(first + size as isize)) - 1) & !((1u64 << inside(first)) - 1)
        };
        let mut stretch = Stretch {
            offset: image as isize * image_stride + row * row_stride + column - place as isize,
            rows: clamp(-row, axes[0].source, filtering.points()) as u32,
            ..Stretch::default()
        };
        for (group, places) in stretch.places.iter_mut().enumerate() {
            let first = -(column + (filtering.results * group) as isize);
            let inside = clamp(first, axes[1].source, filtering.results * count);
            *places = (inside << place) as u32;
        }
        found.stretches[found.count] = stretch;
        found.count += 1;
        let next = lane / share + 1;
        found.ends[next..].fill(found.count as u16);
        tile += count;
    }
    found
}
