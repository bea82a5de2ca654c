//! The transforms of convolutions by Winograd's minimal filtering F(2×2, 3×3): 2×2 neighbouring
//! results of a 3×3 kernel from 4×4 elements of the image, with 16 multiplications instead of 36
//! (Winograd, 1980; Lavin and Gray, 2016).
//!
//! With the matrices Bᵀ, G and Aᵀ below, the results Y of a tile d and a kernel g are `Aᵀ·((G·g·Gᵀ)
//! ∘ (Bᵀ·d·B))·A`, where ∘ multiplies element by element. Sums over channels are taken between the
//! transforms, as 16 matrix products, one for each of the 16 elements.
//!
//! ```text
//!      1  0 −1  0         1  0  0
//! Bᵀ   0  1  1  0    G    ½  ½  ½    Aᵀ   1  1  1  0
//!      0 −1  1  0         ½ −½  ½         0  1 −1 −1
//!      0  1  0 −1         0  0  1
//! ```

// Loops over indices, because iterators over vectors are not inlined into functions of another
// instruction set.
#![allow(clippy::needless_range_loop)]

use super::pack::Piece;
use super::simd::Simd;

/// Elements of a transformed tile.
pub(in super::super) const POINTS: usize = 16;

/// Most lanes of a vector.
const LANES: usize = 16;

/// Tiles of all channels of a part of an image, to be transformed: element e of channel c of the
/// tile in lane l of vector v is read at `at + c·channel + taps[e]` by the vector's pieces, and
/// written to `to + e·point + c·width + v·lanes + l`, where `width` is that of all vectors.
pub(in super::super) struct Tiles<'a> {
    pub at: *const f32,
    pub channels: usize,
    pub channel: usize,
    pub taps: [i32; POINTS],
    pub pieces: &'a [Piece],
    /// As for [`super::pack::Gather`].
    pub vectors: &'a [u16],
    pub to: *mut f32,
    pub point: usize,
}

/// Computes `Bᵀ·d·B`.
pub(in super::super) type TransformTiles = unsafe fn(tiles: &Tiles);

/// Kernels of `rows` output channels, at most a vector, and `channels` input channels: element t of
/// the kernel of row r and channel c is at `at + r·row + c·channel + taps[t]`, element e of the
/// transformed one at `to + (e·channels + c)·rows + r`.
pub(in super::super) struct Kernels {
    pub at: *const f32,
    pub rows: usize,
    pub row: isize,
    pub channels: usize,
    pub channel: isize,
    pub taps: [isize; 9],
    pub to: *mut f32,
}

/// Computes `G·g·Gᵀ`.
pub(in super::super) type TransformKernels = unsafe fn(kernels: &Kernels);

/// Neighbouring tiles of one row of tiles, and the place of their results.
#[derive(Clone, Copy, Default)]
pub(in super::super) struct Run {
    /// The vector of the tiles, and the lane of the first.
    pub vector: usize,
    pub lane: usize,
    /// Elements from a channel's first result to the first of the tiles.
    pub offset: usize,
    /// Results in a row of all these tiles, and rows of results, 1 or 2.
    pub columns: usize,
    pub rows: usize,
}

/// Products of `rows` channels, to be transformed into results: element e of channel r at `at +
/// e·point + r·width`, a channel's results at `to + r·row`, and two rows of results `pitch` apart.
pub(in super::super) struct Products<'a> {
    pub at: *const f32,
    pub point: usize,
    pub rows: usize,
    pub width: usize,
    pub runs: &'a [Run],
    pub to: *mut f32,
    pub row: usize,
    pub pitch: usize,
}

/// Computes `Aᵀ·m·A`.
pub(in super::super) type TransformProducts = unsafe fn(products: &Products);

#[inline(always)]
pub(super) unsafe fn tiles<S: Simd>(tiles: &Tiles) {
    for (v, ends) in tiles.vectors.windows(2).enumerate() {
        let some = |at: *const f32, piece: Piece| {
            // SAFETY: the caller enables S's instruction set and gives pieces whose lanes are
            // readable; the others may lie anywhere, hence the wrapping offset.
            unsafe { S::load_mask(at.wrapping_offset(piece.offset as isize), piece.lanes) }
        };
        // SAFETY: as above, and the caller gives room for every vector.
        unsafe {
            match tiles.pieces[usize::from(ends[0])..usize::from(ends[1])] {
                [one] if one.lanes.count_ones() as usize == S::LANES => {
                    columns::<S>(tiles, v, |at| {
                        S::load(at.wrapping_offset(one.offset as isize))
                    });
                }
                [one] => columns::<S>(tiles, v, |at| some(at, one)),
                [one, two] => columns::<S>(tiles, v, |at| S::or(some(at, one), some(at, two))),
                ref many => columns::<S>(tiles, v, |at| {
                    let mut joined = S::zero();
                    for &piece in many {
                        joined = S::or(joined, some(at, piece));
                    }
                    joined
                }),
            }
        }
    }
}

/// One vector of tiles, of all channels.
#[inline(always)]
unsafe fn columns<S: Simd>(tiles: &Tiles, v: usize, load: impl Fn(*const f32) -> S::V) {
    let width = (tiles.vectors.len() - 1) * S::LANES;
    for channel in 0..tiles.channels {
        let at = tiles.at.wrapping_add(channel * tiles.channel);
        let to = tiles.to.wrapping_add(channel * width + v * S::LANES);
        // SAFETY: the caller enables S's instruction set and gives room for every vector.
        unsafe {
            let mut rows = [[S::zero(); 4]; 4];
            for i in 0..4 {
                let at = |j: usize| at.wrapping_offset(tiles.taps[4 * i + j] as isize);
                rows[i] = of_tile::<S>([load(at(0)), load(at(1)), load(at(2)), load(at(3))]);
            }
            for j in 0..4 {
                let column = of_tile::<S>([rows[0][j], rows[1][j], rows[2][j], rows[3][j]]);
                for i in 0..4 {
                    S::store(to.wrapping_add((4 * i + j) * tiles.point), column[i]);
                }
            }
        }
    }
}

/// `Bᵀ·d`.
#[inline(always)]
unsafe fn of_tile<S: Simd>(d: [S::V; 4]) -> [S::V; 4] {
    // SAFETY: the caller enables S's instruction set.
    unsafe {
        [
            S::sub(d[0], d[2]),
            S::add(d[1], d[2]),
            S::sub(d[2], d[1]),
            S::sub(d[1], d[3]),
        ]
    }
}

#[inline(always)]
pub(super) unsafe fn kernels<S: Simd>(kernels: &Kernels) {
    let mut loaded = [[0.0f32; LANES]; 9];
    for channel in 0..kernels.channels {
        let at = kernels
            .at
            .wrapping_offset(channel as isize * kernels.channel);
        // SAFETY: the caller enables S's instruction set and gives kernels that may be read, and
        // room for the transformed ones.
        unsafe {
            for (taps, tap) in loaded.iter_mut().zip(kernels.taps) {
                for (row, value) in taps.iter_mut().enumerate().take(kernels.rows) {
                    *value = *at.wrapping_offset(row as isize * kernels.row + tap);
                }
            }
            let mut columns = [[S::zero(); 3]; 4];
            for j in 0..3 {
                let at = |i: usize| loaded[3 * i + j].as_ptr();
                let g = of_kernel::<S>([S::load(at(0)), S::load(at(1)), S::load(at(2))]);
                for i in 0..4 {
                    columns[i][j] = g[i];
                }
            }
            for i in 0..4 {
                let row = of_kernel::<S>(columns[i]);
                for j in 0..4 {
                    let step = (4 * i + j) * kernels.channels + channel;
                    let to = kernels.to.add(step * kernels.rows);
                    if kernels.rows == S::LANES {
                        S::store(to, row[j]);
                    } else {
                        S::store_first(to, row[j], kernels.rows);
                    }
                }
            }
        }
    }
}

/// `G·g`.
#[inline(always)]
unsafe fn of_kernel<S: Simd>(g: [S::V; 3]) -> [S::V; 4] {
    // SAFETY: the caller enables S's instruction set.
    unsafe {
        let [half, less] = [S::splat(&0.5), S::splat(&-0.5)];
        let outer = S::fma(S::add(g[0], g[2]), half, S::zero());
        [
            g[0],
            S::fma(g[1], half, outer),
            S::fma(g[1], less, outer),
            g[2],
        ]
    }
}

#[inline(always)]
pub(super) unsafe fn products<S: Simd>(products: &Products) {
    for r in 0..products.rows {
        let to = products.to.wrapping_add(r * products.row);
        let mut runs = products.runs;
        for v in 0..products.width / S::LANES {
            let here = runs.iter().take_while(|run| run.vector == v).count();
            let (now, later) = runs.split_at(here);
            runs = later;
            let at = products.at.wrapping_add(r * products.width + v * S::LANES);
            // SAFETY: the caller enables S's instruction set and gives products that may be read,
            // and room for the results of every run.
            unsafe {
                let mut rows = [[S::zero(); 4]; 2];
                for j in 0..4 {
                    let at = |i: usize| at.wrapping_add((4 * i + j) * products.point);
                    let m = [
                        S::load(at(0)),
                        S::load(at(1)),
                        S::load(at(2)),
                        S::load(at(3)),
                    ];
                    let m = of_products::<S>(m);
                    (rows[0][j], rows[1][j]) = (m[0], m[1]);
                }
                let mut results = [[S::zero(); 2]; 2];
                for i in 0..2 {
                    let m = of_products::<S>(rows[i]);
                    results[i] = S::interleave(m[0], m[1]);
                }
                if let [run] = now
                    && run.columns == 2 * S::LANES
                {
                    for i in 0..run.rows {
                        let to = to.wrapping_add(run.offset + i * products.pitch);
                        S::store(to, results[i][0]);
                        S::store(to.wrapping_add(S::LANES), results[i][1]);
                    }
                    continue;
                }
                let mut line = [0.0f32; 2 * LANES];
                for i in 0..2 {
                    S::store(line.as_mut_ptr(), results[i][0]);
                    S::store(line.as_mut_ptr().add(S::LANES), results[i][1]);
                    for run in now.iter().filter(|run| i < run.rows) {
                        let from = line.as_ptr().add(2 * run.lane);
                        let to = to.wrapping_add(run.offset + i * products.pitch);
                        for first in (0..run.columns).step_by(S::LANES) {
                            let count = (run.columns - first).min(S::LANES);
                            S::copy(from.add(first), to.wrapping_add(first), count);
                        }
                    }
                }
            }
        }
    }
}

/// `Aᵀ·m`.
#[inline(always)]
unsafe fn of_products<S: Simd>(m: [S::V; 4]) -> [S::V; 2] {
    // SAFETY: the caller enables S's instruction set.
    unsafe {
        [
            S::add(S::add(m[0], m[1]), m[2]),
            S::sub(S::sub(m[1], m[2]), m[3]),
        ]
    }
}

/// Gradients of results, to be transformed: two rows of `2·tiles` positions, `width` channels each,
/// at `at` and `at + pitch`; element e of tile t is written to `to + e·point + t·width`.
pub(in super::super) struct Gradients {
    pub at: *const f32,
    pub pitch: usize,
    pub tiles: usize,
    pub width: usize,
    pub to: *mut f32,
    pub point: usize,
}

/// Computes `A·y·Aᵀ`.
pub(in super::super) type TransformGradients = unsafe fn(gradients: &Gradients);

/// Sums over tiles, to be transformed into the gradient of a kernel: element e of split s at `at +
/// s·split + e·point`, `columns` output channels each, whole vectors; element t of the kernel is
/// written to `to + t·columns`.
pub(in super::super) struct Sums {
    pub at: *const f32,
    pub splits: usize,
    pub split: usize,
    pub point: usize,
    pub columns: usize,
    pub to: *mut f32,
}

/// Adds the splits in their order and computes `Gᵀ·m·G`.
pub(in super::super) type TransformSums = unsafe fn(sums: &Sums);

#[inline(always)]
pub(super) unsafe fn gradients<S: Simd>(gradients: &Gradients) {
    for tile in 0..gradients.tiles {
        for lane in (0..gradients.width).step_by(S::LANES) {
            let at = gradients.at.wrapping_add(2 * tile * gradients.width + lane);
            let to = gradients.to.wrapping_add(tile * gradients.width + lane);
            // SAFETY: the caller enables S's instruction set, gives gradients that may be read, and
            // room for the transformed ones.
            unsafe {
                let at =
                    |i: usize, j: usize| at.wrapping_add(i * gradients.pitch + j * gradients.width);
                let left = of_gradient::<S>(S::load(at(0, 0)), S::load(at(1, 0)));
                let right = of_gradient::<S>(S::load(at(0, 1)), S::load(at(1, 1)));
                for i in 0..4 {
                    let row = of_gradient::<S>(left[i], right[i]);
                    for j in 0..4 {
                        S::store(to.wrapping_add((4 * i + j) * gradients.point), row[j]);
                    }
                }
            }
        }
    }
}

/// `A·y`.
#[inline(always)]
unsafe fn of_gradient<S: Simd>(first: S::V, second: S::V) -> [S::V; 4] {
    // SAFETY: the caller enables S's instruction set.
    unsafe {
        [
            first,
            S::add(first, second),
            S::sub(first, second),
            S::sub(S::zero(), second),
        ]
    }
}

#[inline(always)]
pub(super) unsafe fn sums<S: Simd>(sums: &Sums) {
    for lane in (0..sums.columns).step_by(S::LANES) {
        // SAFETY: the caller enables S's instruction set, gives sums that may be read, and room for
        // the gradient.
        unsafe {
            let mut columns = [[S::zero(); 4]; 3];
            for j in 0..4 {
                let mut m = [S::zero(); 4];
                for i in 0..4 {
                    let at = sums.at.wrapping_add((4 * i + j) * sums.point + lane);
                    m[i] = S::load(at);
                    for split in 1..sums.splits {
                        m[i] = S::add(m[i], S::load(at.wrapping_add(split * sums.split)));
                    }
                }
                let m = of_sums::<S>(m);
                for i in 0..3 {
                    columns[i][j] = m[i];
                }
            }
            for i in 0..3 {
                let row = of_sums::<S>(columns[i]);
                for j in 0..3 {
                    let to = sums.to.wrapping_add((3 * i + j) * sums.columns + lane);
                    S::store(to, row[j]);
                }
            }
        }
    }
}

/// `Gᵀ·m`.
#[inline(always)]
unsafe fn of_sums<S: Simd>(m: [S::V; 4]) -> [S::V; 3] {
    // SAFETY: the caller enables S's instruction set.
    unsafe {
        let half = S::splat(&0.5);
        let (sum, difference) = (S::add(m[1], m[2]), S::sub(m[1], m[2]));
        [
            S::fma(sum, half, m[0]),
            S::fma(difference, half, S::zero()),
            S::fma(sum, half, m[3]),
        ]
    }
}
