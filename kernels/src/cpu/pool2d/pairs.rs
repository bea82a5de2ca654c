//! Maxima of 2×2 windows with stride 2 in vectors of AVX2 and AVX-512, and their gradient. Windows
//! do not overlap, so that each element is read once, and each gradient is a selection. Results are
//! those of the loops over single rows, bit by bit.

use std::marker::PhantomData;

use super::Tile;
use super::forward::{Forward, Source};
use super::grad::Backward;
use super::lanes::Lanes;
use super::vectors::{all, bits, positions_at, store};
use crate::cpu::Isa;
use crate::cpu::gemm::simd::{Avx2, Avx512};
use crate::cpu::pointwise::{Vectorized, vectorized};
use crate::spec::PoolKind;

/// Lane masks of `count` elements in two vectors.
#[inline(always)]
fn in_two<S: Lanes>(count: usize) -> [u32; 2] {
    let read = bits(0, count);
    [(read & bits(0, S::LANES)) as u32, (read >> S::LANES) as u32]
}

/// Work in vectors of one instruction set.
struct On<W, S>(W, PhantomData<S>);

/// Does work in vectors of `isa`.
///
/// # Safety
/// As for [`Vectorized::run`]; `isa` is one of this CPU's, with vectors.
unsafe fn on_vectors<W>(work: W, isa: Isa)
where
    On<W, Avx2>: Vectorized,
    On<W, Avx512>: Vectorized,
{
    // SAFETY: the caller's promise.
    unsafe {
        match isa {
            Isa::Avx512 => vectorized(isa, On::<_, Avx512>(work, PhantomData)),
            _ => vectorized(isa, On::<_, Avx2>(work, PhantomData)),
        }
    }
}

/// A tile of maxima.
#[derive(Clone, Copy)]
pub(super) struct Maxima<'a> {
    pub job: &'a Forward,
    pub tile: &'a Tile,
    pub values: *mut f32,
    pub positions: *mut i32,
}

impl Maxima<'_> {
    /// Computes the tile and returns true, if its windows are 2×2 ones inside the image.
    ///
    /// # Safety
    /// The image is f32; the arrays hold the tile's values.
    pub unsafe fn run(self, isa: Isa) -> bool {
        let (g, x) = (&self.job.geometry, &self.job.x);
        let is_inside = 2 * g.ohw[0] <= g.hw[0] && 2 * g.ohw[1] <= g.hw[1];
        let is_maximum = matches!(self.job.kind, PoolKind::Max | PoolKind::ArgMax);
        if isa == Isa::Portable || !g.is_2x2() || !is_maximum || !is_inside || x.strides[3] != 1 {
            return false;
        }
        // SAFETY: the caller's promise.
        unsafe { on_vectors(self, isa) }
        true
    }
}

/// The better of neighbouring elements of a row, and its position if the left one has `position`.
///
/// # Safety
/// S's instruction set is enabled, and the elements of the masks may be read.
#[inline(always)]
unsafe fn better<S: Lanes>(row: *const f32, read: [u32; 2], position: u32) -> [S::V; 2] {
    // SAFETY: the caller's promise.
    unsafe {
        let low = S::load_mask(row, read[0]);
        let high = S::load_mask(row.wrapping_add(S::LANES), read[1]);
        let (left, right) = (S::evens(low, high), S::odds(low, high));
        let beats = S::beats(right, left, u32::MAX);
        let at = |position| all::<S>(f32::from_bits(position));
        [
            S::select(beats, right, left),
            S::select(beats, at(position + 1), at(position)),
        ]
    }
}

impl<S: Lanes> Vectorized for On<Maxima<'_>, S> {
    #[inline(always)]
    unsafe fn run(self) {
        let Maxima {
            job,
            tile,
            values,
            positions,
        } = self.0;
        let (x, width) = (&job.x, tile.cols.len());
        for from in (0..width).step_by(S::LANES) {
            let count = S::LANES.min(width - from);
            let (read, first) = (in_two::<S>(2 * count), 2 * (tile.cols.start + from));
            for (row, [n, c, i]) in job.tiling.rows(tile).enumerate() {
                let top = x.element::<f32>(x.offset(&[n, c, 2 * i, first]));
                let bottom = top.wrapping_offset(x.strides[2]);
                // SAFETY: all windows lie inside the image; this row's values are written.
                unsafe {
                    let [upper, upper_at] = better::<S>(top, read, 0);
                    let [lower, lower_at] = better::<S>(bottom, read, 2);
                    let below = S::beats(lower, upper, u32::MAX);
                    let to = row * width + from;
                    store::<S>(values.add(to), S::select(below, lower, upper), count);
                    let at = S::select(below, lower_at, upper_at);
                    store::<S>(positions.add(to).cast(), at, count);
                }
            }
        }
    }
}

/// A tile of the gradient of maxima, with positions of type `A`.
#[derive(Clone, Copy)]
pub(super) struct Spread<'a, A> {
    pub job: &'a Backward,
    pub tile: &'a Tile,
    pub values: *mut f32,
    pub positions: PhantomData<A>,
}

impl<A: Source<Lane = i32>> Spread<'_, A> {
    /// Like [`Maxima::run`].
    ///
    /// # Safety
    /// `A` is the type of the positions, if there are any; the array holds the tile's values.
    pub unsafe fn run(self, isa: Isa) -> bool {
        let job = self.job;
        let adjacent = job.dy.strides[3] == 1 && job.arg.is_some_and(|arg| arg.strides[3] == 1);
        let is_even = self.tile.cols.start.is_multiple_of(2);
        if isa == Isa::Portable || !job.geometry.is_2x2() || !adjacent || !is_even {
            return false;
        }
        // SAFETY: the caller's promise.
        unsafe { on_vectors(self, isa) }
        true
    }

    /// The gradients of neighbouring windows, at the upper two elements of each window from
    /// `position` 0 on, or at the lower two from 2 on.
    ///
    /// # Safety
    /// S's instruction set is enabled, and `count` elements at `to` may be written.
    #[inline(always)]
    unsafe fn row<S: Lanes>(
        [gradients, positions]: [S::V; 2],
        position: i32,
        to: *mut f32,
        count: usize,
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            let left = S::where_at(positions, position, gradients);
            let right = S::where_at(positions, position + 1, gradients);
            let [low, high] = S::interleave(left, right);
            store::<S>(to, low, count);
            if count > S::LANES {
                store::<S>(to.add(S::LANES), high, count - S::LANES);
            }
        }
    }
}

impl<A: Source<Lane = i32>, S: Lanes> Vectorized for On<Spread<'_, A>, S> {
    #[inline(always)]
    unsafe fn run(self) {
        let Spread {
            job, tile, values, ..
        } = self.0;
        let Backward {
            geometry: g,
            dy,
            tiling,
            ..
        } = job;
        let arg = job.arg.as_ref().expect("checked by `run`");
        let (width, height) = (tile.cols.len(), tiling.dims[2]);
        for from in (0..width).step_by(2 * S::LANES) {
            let count = (2 * S::LANES).min(width - from);
            let first = (tile.cols.start + from) / 2;
            // The last window may reach out of the image, and columns may have no window.
            let windows = count.div_ceil(2).min(g.ohw[1].saturating_sub(first));
            let [lanes, _] = in_two::<S>(windows);
            let mut rows = tiling.rows(tile).enumerate();
            while let Some((row, [n, c, y])) = rows.next() {
                // SAFETY: windows that exist are read, and this row's values written, with those of
                // the next row of the same windows.
                unsafe {
                    let to = values.add(row * width + from);
                    let mut pair = [S::zero(); 2];
                    if y / 2 < g.ohw[0] {
                        let gradient = dy.element::<f32>(dy.offset(&[n, c, y / 2, first]));
                        let at = arg.element::<A>(arg.offset(&[n, c, y / 2, first]));
                        // Added to 0, as any sum of gradients begins: −0 becomes 0.
                        let gradient = S::add(S::zero(), S::load_mask(gradient, lanes));
                        pair = [gradient, positions_at::<S, A>(at, lanes)];
                    }
                    Spread::<A>::row::<S>(pair, 2 * (y % 2) as i32, to, count);
                    if y % 2 == 0 && y + 1 < height && rows.next().is_some() {
                        Spread::<A>::row::<S>(pair, 2, to.add(width), count);
                    }
                }
            }
        }
    }
}
