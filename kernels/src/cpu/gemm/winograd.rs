//! The transforms of convolutions by Winograd's minimal filtering F(m×m, r×r): m×m neighbouring
//! results of an r×r kernel from a tile of p×p elements of the image, p = m + r − 1, with p²
//! multiplications instead of m²·r² (Winograd, 1980; Lavin and Gray, 2016).
//!
//! With the matrices Bᵀ, G and Aᵀ below, the results Y of a tile d and a kernel g are `Aᵀ·((G·g·Gᵀ)
//! ∘ (Bᵀ·d·B))·A`, where ∘ multiplies element by element. Sums over channels are taken between the
//! transforms, as p² matrix products, one for each of the elements. The matrices follow from p − 1
//! points at which polynomials are evaluated, and the point at infinity (Toom and Cook).
//!
//! F(2×2, 3×3), from the points 0, 1, −1:
//!
//! ```text
//!      1  0 −1  0         1  0  0
//! Bᵀ   0  1  1  0    G    ½  ½  ½    Aᵀ   1  1  1  0
//!      0 −1  1  0         ½ −½  ½         0  1 −1 −1
//!      0  1  0 −1         0  0  1
//! ```
//!
//! F(2×2, 5×5), from the points 0, ±a, ±b with a = 1/√2 and b = √2: as they are each other's
//! inverses, the coefficients stay small, and the error is a third of that with 1 and 2.
//!
//! ```text
//!      1   0  −5/2   0   1  0
//!      0 −2a   −2    a   1  0         G: the rows 1 0 0 0 0 and 0 0 0 0 1, and between them
//! Bᵀ   0  2a   −2   −a   1  0         for x = ±a (n = −3/2) and ±b (n = 6)
//!      0 −b/2  −½    b   1  0           1/n · (1 x x² x³ x⁴)
//!      0  b/2  −½   −b   1  0
//!      0   1    0  −5/2  0  1         Aᵀ   1  1  1  1  1  0
//!                                          0  a −a  b −b  1
//! ```
//!
//! F(4×4, 3×3), from the same points and therefore with the same Bᵀ; G has the first three columns of
//! the rows between, around them 1 0 0 and 0 0 1.
//!
//! ```text
//!      1  1   1   1   1   0
//! Aᵀ   0  a  −a   b  −b   0
//!      0  ½   ½   2   2   0
//!      0 a/2 −a/2 2b −2b  1
//! ```
//!
//! Points decide the error (Barabasz, Anderson, Soodhalter and Gregg, 2020): from 0, ±1 and ±2 or ±½,
//! it is twice as large.

// Loops over indices, because iterators over vectors are not inlined into functions of another
// instruction set.
#![allow(clippy::needless_range_loop)]

use std::mem::MaybeUninit;

use super::simd::Simd;

/// Most taps of an axis of a kernel.
pub(in super::super) const TAPS_MAX: usize = 5;
/// Most groups of columns of a tile, of as many columns as it has results in a row.
const GROUPS_MAX: usize = 3;
/// Most results of an axis of a tile.
const RESULTS_MAX: usize = 4;

/// The inner points of tiles of six elements.
const POINT_A: f32 = std::f32::consts::FRAC_1_SQRT_2;
const POINT_B: f32 = std::f32::consts::SQRT_2;

/// Most lanes of a vector.
const LANES: usize = 16;

/// Vectors of kernels that are read before the first of them is transformed.
const AHEAD: usize = 8;
/// Rows and columns of a block that [`Simd::transpose`] transposes.
const BLOCK: usize = 8;

/// The sizes of F(m×m, r×r).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) struct Filtering {
    /// Results of an axis of a tile.
    pub results: usize,
    /// Taps of an axis of a kernel.
    pub taps: usize,
}

impl Filtering {
    /// F(2×2, 3×3).
    pub const F2_3: Filtering = Filtering {
        results: 2,
        taps: 3,
    };
    /// F(4×4, 3×3).
    pub const F4_3: Filtering = Filtering {
        results: 4,
        taps: 3,
    };
    /// F(2×2, 5×5).
    pub const F2_5: Filtering = Filtering {
        results: 2,
        taps: 5,
    };

    /// Elements of an axis of a tile.
    pub fn points(self) -> usize {
        self.results + self.taps - 1
    }

    /// Elements of a tile.
    pub fn elements(self) -> usize {
        self.points() * self.points()
    }
}

/// The transforms of a filtering.
pub(in super::super) struct Transforms {
    pub tiles: TransformTiles,
    pub kernels: TransformKernels,
    pub products: TransformProducts,
}

/// Tiles of all channels of an image, to be transformed: element e of channel c of the tile in lane l
/// of vector v is written to `to + e·point + c·width + v·lanes + l`, where `width` is that of all
/// vectors. Neighbouring tiles are m columns apart, so that lane l of a vector finds its g-th *group*
/// of m columns in the places ml to ml + m − 1 of m vectors of the image, which are read in stretches.
pub(in super::super) struct Tiles<'a> {
    /// The first element of the first image.
    pub at: *const f32,
    pub channels: usize,
    /// Elements between neighbouring channels, and between neighbouring rows.
    pub channel: isize,
    pub row: isize,
    pub stretches: &'a [Stretch],
    /// The end of the stretches of each vector of the image, after a zero.
    pub ends: &'a [u16],
    pub to: *mut f32,
    pub point: usize,
}

/// Neighbouring elements of each row of some tiles.
#[derive(Clone, Copy, Default)]
pub(in super::super) struct Stretch {
    /// Elements from the first of the image to the first row's place 0 of the first group, which
    /// may lie outside.
    pub offset: isize,
    /// The rows that lie in the image, by bit.
    pub rows: u32,
    /// For each group of columns, the places that lie in the image.
    pub places: [u32; GROUPS_MAX],
}

impl Stretch {
    /// The places of a row's group of columns that lie in the image.
    #[inline(always)]
    fn places_of(&self, row: usize, group: usize) -> u32 {
        self.places[group] & 0u32.wrapping_sub(self.rows >> row & 1)
    }
}

/// Computes `Bᵀ·d·B`.
pub(in super::super) type TransformTiles = unsafe fn(tiles: &Tiles);

/// Kernels of `rows` output channels, at most a vector, and `channels` input channels: element t of
/// the kernel of row r and channel c is at `at + r·row + c·channel + taps[t]`, element e of the
/// transformed one at `to + (e·channels + c)·width + r`.
pub(in super::super) struct Kernels {
    pub at: *const f32,
    pub rows: usize,
    pub row: isize,
    pub channels: usize,
    pub channel: isize,
    pub taps: [isize; TAPS_MAX * TAPS_MAX],
    pub to: *mut f32,
    /// Elements between neighbouring channels, at least `rows`.
    pub width: usize,
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
    pub offset: isize,
    /// Results in a row of all these tiles, and rows of results.
    pub columns: usize,
    pub rows: usize,
}

/// Products of `rows` channels, to be transformed into results: element e of channel r at `at +
/// e·point + r·width`, a channel's results at `to + r·row`, and rows of results `pitch` apart.
pub(in super::super) struct Products<'a> {
    pub at: *const f32,
    pub point: usize,
    pub rows: usize,
    pub width: usize,
    pub runs: &'a [Run],
    pub to: *mut f32,
    pub row: isize,
    pub pitch: isize,
}

/// Computes `Aᵀ·m·A`.
pub(in super::super) type TransformProducts = unsafe fn(products: &Products);

#[inline(always)]
pub(super) unsafe fn tiles<S: Simd, const P: usize, const M: usize>(tiles: &Tiles) {
    for v in 0..tiles.ends.len() / M {
        let mut of = [&tiles.stretches[..0]; M];
        for i in 0..M {
            let [first, end] = [0, 1].map(|next| usize::from(tiles.ends[v * M + i + next]));
            of[i] = &tiles.stretches[first..end];
        }
        let most = of.iter().map(|stretches| stretches.len()).max();
        // SAFETY: the caller enables S's instruction set, and gives stretches whose places are
        // readable and room for every vector.
        unsafe {
            match most {
                Some(0..=1) => stretched::<S, P, M, 1>(tiles, v, of),
                Some(2) => stretched::<S, P, M, 2>(tiles, v, of),
                _ => vector::<S, P, M>(tiles, v, |at, row, group| {
                    let mut loaded = [S::zero(); M];
                    for i in 0..M {
                        for stretch in of[i] {
                            let places = stretch.places_of(row, group);
                            let at = at.wrapping_offset(stretch.offset);
                            loaded[i] = S::or(loaded[i], S::load_mask(at, places));
                        }
                    }
                    loaded
                }),
            }
        }
    }
}

/// One vector of tiles, each of whose vectors of the image consists of up to N stretches.
#[inline(always)]
unsafe fn stretched<S: Simd, const P: usize, const M: usize, const N: usize>(
    tiles: &Tiles,
    v: usize,
    of: [&[Stretch]; M],
) {
    // All channels have the same places; without a stretch there are none.
    let mut places = [[[[0; N]; M]; GROUPS_MAX]; P];
    let mut offsets = [[0; N]; M];
    for i in 0..M {
        for (n, stretch) in of[i].iter().take(N).enumerate() {
            offsets[i][n] = stretch.offset;
            for row in 0..P {
                for group in 0..P.div_ceil(M) {
                    places[row][group][i][n] = stretch.places_of(row, group);
                }
            }
        }
    }
    // SAFETY: the caller enables S's instruction set, and gives stretches whose places are readable
    // and room for every vector; other places may lie anywhere, hence the wrapping offset.
    unsafe {
        vector::<S, P, M>(tiles, v, |at, row, group| {
            let mut loaded = [S::zero(); M];
            for i in 0..M {
                let some = |n: usize| {
                    S::load_mask(at.wrapping_offset(offsets[i][n]), places[row][group][i][n])
                };
                loaded[i] = some(0);
                for n in 1..N {
                    loaded[i] = S::or(loaded[i], some(n));
                }
            }
            loaded
        });
    }
}

/// One vector of tiles, of all channels. `load` reads the vectors of a group of columns of a row.
#[inline(always)]
unsafe fn vector<S: Simd, const P: usize, const M: usize>(
    tiles: &Tiles,
    v: usize,
    load: impl Fn(*const f32, usize, usize) -> [S::V; M],
) {
    let width = tiles.ends.len() / M * S::LANES;
    for channel in 0..tiles.channels {
        let at = tiles.at.wrapping_offset(channel as isize * tiles.channel);
        let to = tiles.to.wrapping_add(channel * width + v * S::LANES);
        // SAFETY: the caller enables S's instruction set and gives room for every vector; all rows
        // are written before columns are read.
        unsafe {
            let mut rows = [const { [const { MaybeUninit::uninit() }; P] }; P];
            for i in 0..P {
                let at = at.wrapping_offset(i as isize * tiles.row);
                let mut row = [S::zero(); P];
                for group in 0..P.div_ceil(M) {
                    let loaded = load(at.wrapping_add(M * group), i, group);
                    let left = P - M * group;
                    let columns = columns::<S, M>(loaded, left);
                    for j in 0..M {
                        if j < left {
                            row[M * group + j] = columns[j];
                        }
                    }
                }
                let row = of_tile::<S, P>(row);
                for j in 0..P {
                    rows[i][j].write(row[j]);
                }
            }
            for j in 0..P {
                let mut column = [S::zero(); P];
                for i in 0..P {
                    column[i] = rows[i][j].assume_init();
                }
                let column = of_tile::<S, P>(column);
                for i in 0..P {
                    S::store(to.wrapping_add((P * i + j) * tiles.point), column[i]);
                }
            }
        }
    }
}

/// The places of M vectors by their remainders by M, 2 or 4, of which `count` are used.
#[inline(always)]
unsafe fn columns<S: Simd, const M: usize>(v: [S::V; M], count: usize) -> [S::V; M] {
    // SAFETY: the caller enables S's instruction set.
    unsafe {
        let mut columns = v;
        if M == 2 {
            columns[0] = S::evens(v[0], v[1]);
            columns[1] = S::odds(v[0], v[1]);
        } else {
            let pairs = [S::even_pairs(v[0], v[1]), S::even_pairs(v[2], v[3])];
            columns[0] = S::evens(pairs[0], pairs[1]);
            columns[1] = S::odds(pairs[0], pairs[1]);
            if count > 2 {
                let pairs = [S::odd_pairs(v[0], v[1]), S::odd_pairs(v[2], v[3])];
                columns[2] = S::evens(pairs[0], pairs[1]);
                columns[3] = S::odds(pairs[0], pairs[1]);
            }
        }
        columns
    }
}

/// The lanes of M vectors in turn, 2 or 4.
#[inline(always)]
unsafe fn in_turn<S: Simd, const M: usize>(v: [S::V; M]) -> [S::V; M] {
    // SAFETY: the caller enables S's instruction set.
    unsafe {
        let mut turns = v;
        if M == 2 {
            [turns[0], turns[1]] = S::interleave(v[0], v[1]);
        } else {
            let evens = S::interleave(v[0], v[2]);
            let odds = S::interleave(v[1], v[3]);
            [turns[0], turns[1]] = S::interleave(evens[0], odds[0]);
            [turns[2], turns[3]] = S::interleave(evens[1], odds[1]);
        }
        turns
    }
}

/// `x·a + b` with a constant.
#[inline(always)]
unsafe fn scaled<S: Simd>(a: S::V, x: f32, b: S::V) -> S::V {
    // SAFETY: the caller enables S's instruction set.
    unsafe { S::fma(a, S::splat(&x), b) }
}

/// `Bᵀ·d`.
#[inline(always)]
unsafe fn of_tile<S: Simd, const P: usize>(d: [S::V; P]) -> [S::V; P] {
    // SAFETY: the caller enables S's instruction set.
    unsafe {
        let mut to = [S::zero(); P];
        if P == 4 {
            to[0] = S::sub(d[0], d[2]);
            to[1] = S::add(d[1], d[2]);
            to[2] = S::sub(d[2], d[1]);
            to[3] = S::sub(d[1], d[3]);
        } else {
            to[0] = scaled::<S>(d[2], -2.5, S::add(d[0], d[4]));
            let (even, odd) = (scaled::<S>(d[2], -2.0, d[4]), scaled::<S>(d[1], -2.0, d[3]));
            to[1] = scaled::<S>(odd, POINT_A, even);
            to[2] = scaled::<S>(odd, -POINT_A, even);
            let (even, odd) = (scaled::<S>(d[2], -0.5, d[4]), scaled::<S>(d[1], -0.5, d[3]));
            to[3] = scaled::<S>(odd, POINT_B, even);
            to[4] = scaled::<S>(odd, -POINT_B, even);
            to[5] = scaled::<S>(d[3], -2.5, S::add(d[1], d[5]));
        }
        to
    }
}

#[inline(always)]
pub(super) unsafe fn kernels<S: Simd, const P: usize, const R: usize>(kernels: &Kernels) {
    let &Kernels {
        rows,
        channels,
        width,
        ..
    } = kernels;
    let taps = &kernels.taps[..R * R];
    let first = taps.iter().copied().min().unwrap_or_default();
    let is_dense = (0..taps.len()).all(|t| taps.contains(&(first + t as isize)));
    let mut places = [0; TAPS_MAX * TAPS_MAX];
    for t in 0..taps.len() {
        places[t] = if is_dense {
            (taps[t] - first) as usize
        } else {
            t
        };
    }
    // A vector holds the rows of several channels, if they are stored side by side and fill it.
    let share = match width == rows && S::LANES.is_multiple_of(rows) {
        true => S::LANES / rows,
        false => 1,
    };
    // Kernels are read some time before they are transformed, so that they have left the store
    // buffer.
    let mut loaded = [[[[0.0f32; LANES]; R]; R]; AHEAD];
    let loaded = loaded.as_mut_ptr().cast::<f32>();
    let vector = |v: usize| loaded.wrapping_add(v * R * R * LANES);
    for group in (0..channels).step_by(AHEAD * share) {
        let end = (group + AHEAD * share).min(channels);
        for channel in group..end {
            let at = kernels
                .at
                .wrapping_offset(channel as isize * kernels.channel);
            let lane = (channel - group) % share * rows;
            let to = vector((channel - group) / share).wrapping_add(lane);
            // SAFETY: the caller enables S's instruction set and gives kernels that may be read.
            unsafe {
                if is_dense {
                    transposed::<S, R>(at.wrapping_offset(first), kernels, to, LANES - lane);
                    continue;
                }
                for t in 0..R * R {
                    let tap = at.wrapping_offset(taps[t]);
                    for row in 0..rows {
                        *to.add(t * LANES + row) = *tap.wrapping_offset(row as isize * kernels.row);
                    }
                }
            }
        }
        for (v, channel) in (group..end).step_by(share).enumerate() {
            let count = rows * share.min(end - channel);
            let loaded = vector(v);
            // SAFETY: the caller enables S's instruction set and gives room for transformed kernels.
            unsafe {
                let mut columns = [[S::zero(); R]; P];
                for j in 0..R {
                    let mut g = [S::zero(); R];
                    for i in 0..R {
                        g[i] = S::load(loaded.add(places[R * i + j] * LANES));
                    }
                    let g = of_kernel::<S, P, R>(g);
                    for i in 0..P {
                        columns[i][j] = g[i];
                    }
                }
                for i in 0..P {
                    let row = of_kernel::<S, P, R>(columns[i]);
                    for j in 0..P {
                        let step = (P * i + j) * channels + channel;
                        let to = kernels.to.add(step * width);
                        if count == S::LANES {
                            S::store(to, row[j]);
                        } else {
                            S::store_first(to, row[j], count);
                        }
                    }
                }
            }
        }
    }
}

/// Transposes the kernels of a channel whose elements are neighbours from `at` on: element t of row r
/// is written to `to + t·LANES + r`, of which `room` may be written for an element.
#[inline(always)]
unsafe fn transposed<S: Simd, const R: usize>(
    at: *const f32,
    kernels: &Kernels,
    to: *mut f32,
    room: usize,
) {
    let whole = R * R / BLOCK * BLOCK;
    for row in (0..kernels.rows).step_by(BLOCK) {
        let count = BLOCK.min(kernels.rows - row);
        let at = at.wrapping_offset(row as isize * kernels.row);
        let to = to.wrapping_add(row);
        // SAFETY: the caller enables S's instruction set, and gives kernels that may be read and room
        // for them.
        unsafe {
            for t in (0..whole).step_by(BLOCK) {
                let (at, to) = (at.wrapping_add(t), to.wrapping_add(t * LANES));
                if count == BLOCK {
                    S::transpose(at, kernels.row, BLOCK, to, LANES, true);
                } else {
                    let over = row + BLOCK <= room;
                    S::transpose(at, kernels.row, count, to, LANES, over);
                }
            }
            for t in whole..R * R {
                for row in 0..count {
                    let tap = at.wrapping_offset(row as isize * kernels.row);
                    *to.add(t * LANES + row) = *tap.wrapping_add(t);
                }
            }
        }
    }
}

/// `G·g`.
#[inline(always)]
unsafe fn of_kernel<S: Simd, const P: usize, const R: usize>(g: [S::V; R]) -> [S::V; P] {
    // SAFETY: the caller enables S's instruction set.
    unsafe {
        let (mut to, zero) = ([S::zero(); P], S::zero());
        (to[0], to[P - 1]) = (g[0], g[R - 1]);
        if P == 4 {
            let outer = scaled::<S>(S::add(g[0], g[2]), 0.5, zero);
            to[1] = scaled::<S>(g[1], 0.5, outer);
            to[2] = scaled::<S>(g[1], -0.5, outer);
        } else {
            let points = [(POINT_A, 0.5, -2.0 / 3.0), (POINT_B, 2.0, 1.0 / 6.0)];
            for k in 0..2 {
                let (x, square, scale) = points[k];
                let (mut even, mut odd) = (g[2], g[1]);
                if R == 5 {
                    (even, odd) = (
                        scaled::<S>(g[4], square, even),
                        scaled::<S>(g[3], square, odd),
                    );
                }
                let even = scaled::<S>(even, square, g[0]);
                let even = scaled::<S>(even, scale, zero);
                to[1 + 2 * k] = scaled::<S>(odd, x * scale, even);
                to[2 + 2 * k] = scaled::<S>(odd, -x * scale, even);
            }
        }
        to
    }
}

#[inline(always)]
pub(super) unsafe fn products<S: Simd, const P: usize, const M: usize>(products: &Products) {
    let mut line = [0.0f32; RESULTS_MAX * LANES];
    for r in 0..products.rows {
        let to = products.to.wrapping_offset(r as isize * products.row);
        let mut runs = products.runs;
        for v in 0..products.width / S::LANES {
            let here = runs.iter().take_while(|run| run.vector == v).count();
            let (now, later) = runs.split_at(here);
            runs = later;
            let at = products.at.wrapping_add(r * products.width + v * S::LANES);
            // SAFETY: the caller enables S's instruction set and gives products that may be read,
            // and room for the results of every run; all columns are written before rows are read.
            unsafe {
                let mut rows = [const { [const { MaybeUninit::uninit() }; P] }; M];
                for j in 0..P {
                    let mut m = [S::zero(); P];
                    for i in 0..P {
                        m[i] = S::load(at.wrapping_add((P * i + j) * products.point));
                    }
                    let m = of_products::<S, P, M>(m);
                    for i in 0..M {
                        rows[i][j].write(m[i]);
                    }
                }
                let mut results = [[S::zero(); M]; M];
                for i in 0..M {
                    let mut row = [S::zero(); P];
                    for j in 0..P {
                        row[j] = rows[i][j].assume_init();
                    }
                    results[i] = in_turn::<S, M>(of_products::<S, P, M>(row));
                }
                let whole = now.iter().all(|run| {
                    (M * run.lane).is_multiple_of(S::LANES) && run.columns.is_multiple_of(S::LANES)
                });
                if whole {
                    for run in now {
                        let first = M * run.lane / S::LANES;
                        for i in 0..M {
                            if i >= run.rows {
                                continue;
                            }
                            let to = to.wrapping_offset(run.offset + i as isize * products.pitch);
                            for k in 0..M {
                                if k >= first && k < first + run.columns / S::LANES {
                                    S::store(
                                        to.wrapping_add((k - first) * S::LANES),
                                        results[i][k],
                                    );
                                }
                            }
                        }
                    }
                    continue;
                }
                for i in 0..M {
                    for k in 0..M {
                        S::store(line.as_mut_ptr().add(k * S::LANES), results[i][k]);
                    }
                    for run in now.iter().filter(|run| i < run.rows) {
                        let from = line.as_ptr().add(M * run.lane);
                        let to = to.wrapping_offset(run.offset + i as isize * products.pitch);
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
unsafe fn of_products<S: Simd, const P: usize, const M: usize>(m: [S::V; P]) -> [S::V; M] {
    // SAFETY: the caller enables S's instruction set.
    unsafe {
        let mut to = [S::zero(); M];
        if P == 4 {
            to[0] = S::add(S::add(m[0], m[1]), m[2]);
            to[1] = S::sub(S::sub(m[1], m[2]), m[3]);
        } else {
            let inner = S::add(S::add(m[1], m[2]), S::add(m[3], m[4]));
            to[0] = S::add(m[0], inner);
            let (a, b) = (S::sub(m[1], m[2]), S::sub(m[3], m[4]));
            if M == 2 {
                to[1] = scaled::<S>(b, POINT_B, scaled::<S>(a, POINT_A, m[5]));
            } else {
                to[1] = scaled::<S>(b, POINT_B, scaled::<S>(a, POINT_A, S::zero()));
                let even = scaled::<S>(S::add(m[1], m[2]), 0.5, S::zero());
                to[2] = scaled::<S>(S::add(m[3], m[4]), 2.0, even);
                to[3] = scaled::<S>(b, 2.0 * POINT_B, scaled::<S>(a, 0.5 * POINT_A, m[5]));
            }
        }
        to
    }
}

/// Gradients of results of 3×3 kernels, to be transformed: two rows of `2·tiles` positions, `width` channels each,
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

/// Sums over tiles, to be transformed into the gradient of a 3×3 kernel: element e of split s at `at +
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
