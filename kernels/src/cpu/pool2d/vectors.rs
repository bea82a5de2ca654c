//! Pooling of f32 rows in vectors of AVX2 and AVX-512: a vector holds the same element of
//! neighbouring windows, which are one or two columns apart. Elements outside of the image are
//! lanes that are not read, so that padding and ends of rows take the same instructions as the
//! middle. Results are those of the loops over single rows, bit by bit.

use std::marker::PhantomData;
use std::ops::Range;

use super::forward::{Forward, Source};
use super::grad::Backward;
use super::lanes::Lanes;
use super::{Geometry, Tile};
use crate::cpu::Isa;
use crate::cpu::gemm::simd::{Avx2, Avx512};
use crate::cpu::pointwise::{Vectorized, product, vectorized};
use crate::spec::PoolKind;

/// Most columns of a window.
const TAPS: usize = 8;
/// Most lanes of a vector.
const LANES: usize = 16;

/// `value` in all lanes.
#[inline(always)]
pub(super) unsafe fn all<S: Lanes>(value: f32) -> S::V {
    // SAFETY: the caller enables S's instruction set.
    unsafe { S::splat(&value) }
}

/// Bits `from..to`, as far as they are among the first 64.
#[inline(always)]
pub(super) fn bits(from: usize, to: usize) -> u64 {
    let below = |end: usize| {
        if end >= 64 { u64::MAX } else { (1 << end) - 1 }
    };
    below(to) & !below(from)
}

/// Lanes `first + lane`, by bit, that are places in `0..end`.
#[inline(always)]
fn lanes_inside(first: isize, lanes: usize, end: usize) -> u64 {
    let to = (end as isize - first).clamp(0, lanes as isize);
    bits(((-first).max(0) as usize).min(lanes), to as usize)
}

/// One column of neighbouring windows.
#[derive(Clone, Copy, Default)]
struct Tap {
    /// Its number in the windows.
    column: usize,
    /// The element or window of the first lane; it may lie outside.
    first: isize,
    /// The lanes with an element or window.
    lanes: u32,
    /// The elements that are read of one vector, or of two whose even lanes are used.
    read: [u32; 2],
}

/// The columns of the windows from `window` on.
#[inline(always)]
fn taps<S: Lanes, const STRIDE: usize>(g: &Geometry, window: usize, count: usize) -> [Tap; TAPS] {
    let mut taps = [Tap::default(); TAPS];
    for (column, tap) in taps[..g.window.k[1]].iter_mut().enumerate() {
        let first = (window * STRIDE + column) as isize - g.window.pad[1] as isize;
        // Elements between the first and the last lane's.
        let read = lanes_inside(first, count * STRIDE - (STRIDE - 1), g.hw[1]);
        let lanes = (0..count).fold(0, |lanes, lane| {
            lanes | ((read >> (lane * STRIDE) & 1) as u32) << lane
        });
        *tap = Tap {
            column,
            first,
            lanes,
            read: [(read & bits(0, S::LANES)) as u32, (read >> S::LANES) as u32],
        };
    }
    taps
}

/// The elements of a tap in a row of the image.
///
/// # Safety
/// S's instruction set is enabled, and `row` holds the elements inside the image.
#[inline(always)]
unsafe fn load<S: Lanes, const STRIDE: usize>(row: *const f32, tap: &Tap) -> S::V {
    let at = row.wrapping_offset(tap.first);
    // SAFETY: only elements of the row are read.
    unsafe {
        let low = S::load_mask(at, tap.read[0]);
        if STRIDE == 1 {
            return low;
        }
        S::evens(low, S::load_mask(at.wrapping_add(S::LANES), tap.read[1]))
    }
}

/// # Safety
/// S's instruction set is enabled, and `count` elements at `to` may be written.
#[inline(always)]
pub(super) unsafe fn store<S: Lanes>(to: *mut f32, v: S::V, count: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        if count >= S::LANES {
            S::store(to, v)
        } else {
            S::store_first(to, v, count)
        }
    }
}

/// Positions of type `A` as integers, in the lanes whose bit is set.
///
/// # Safety
/// S's instruction set is enabled, and the positions of the set lanes may be read.
#[inline(always)]
pub(super) unsafe fn positions_at<S: Lanes, A>(at: *const A, lanes: u32) -> S::V {
    // SAFETY: the caller's promise.
    unsafe {
        if size_of::<A>() == 1 {
            S::load_bytes(at.cast(), lanes)
        } else {
            S::load_mask(at.cast(), lanes)
        }
    }
}

/// The divisors of means over windows from `first` on, except for a factor that [`factor`] gives.
#[inline(always)]
fn divisors(g: &Geometry, count_pad: bool, first: isize) -> [f32; LANES] {
    std::array::from_fn(|lane| match usize::try_from(first + lane as isize) {
        Ok(window) if !count_pad => g.inside(1, window).len().max(1) as f32,
        _ => 1.0,
    })
}

/// That factor, for windows of `rows` rows inside the image.
#[inline(always)]
fn factor(g: &Geometry, count_pad: bool, rows: usize) -> f32 {
    let count = if count_pad {
        product(&g.window.k)
    } else {
        rows
    };
    count.max(1) as f32
}

/// `sum / (factor · divisors)`; the product is exact.
///
/// # Safety
/// S's instruction set is enabled.
#[inline(always)]
unsafe fn mean<S: Lanes>(sum: S::V, factor: f32, divisors: &[f32; LANES]) -> S::V {
    // SAFETY: the caller's promise.
    unsafe {
        let divisors = S::load(divisors.as_ptr());
        S::div(sum, S::fma(all::<S>(factor), divisors, S::zero()))
    }
}

/// A tile that is computed column by column of its windows.
trait Columns: Sized {
    /// Computes the tile in vectors of `S`, with windows `STRIDE` columns apart.
    ///
    /// # Safety
    /// S's instruction set is enabled; the rest as the implementation says.
    unsafe fn compute<S: Lanes, const STRIDE: usize>(self);
}

/// [`Columns`] on the vectors of one instruction set.
struct Strided<C, S, const STRIDE: usize>(C, PhantomData<S>);

impl<C: Columns, S: Lanes, const STRIDE: usize> Vectorized for Strided<C, S, STRIDE> {
    #[inline(always)]
    unsafe fn run(self) {
        // SAFETY: `vectorized` enables S's instruction set; the rest is the caller's promise.
        unsafe { self.0.compute::<S, STRIDE>() }
    }
}

/// Computes a tile whose windows are `stride` columns apart, one or two.
///
/// # Safety
/// As for [`Columns::compute`]; `isa` is one of this CPU's, with vectors.
unsafe fn on_vectors<C: Columns>(columns: C, isa: Isa, stride: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        match (isa, stride) {
            (Isa::Avx512, 1) => vectorized(isa, Strided::<_, Avx512, 1>(columns, PhantomData)),
            (Isa::Avx512, _) => vectorized(isa, Strided::<_, Avx512, 2>(columns, PhantomData)),
            (_, 1) => vectorized(isa, Strided::<_, Avx2, 1>(columns, PhantomData)),
            _ => vectorized(isa, Strided::<_, Avx2, 2>(columns, PhantomData)),
        }
    }
}

/// Whether windows of these columns are computed here. The loops for maxima of 2×2 windows read
/// each element once.
fn applies(isa: Isa, g: &Geometry, kind: PoolKind) -> bool {
    isa != Isa::Portable
        && (1..=2).contains(&g.window.stride[1])
        && g.window.k[1] <= TAPS
        && (!g.is_2x2() || matches!(kind, PoolKind::Avg { .. }))
}

/// A tile of poolings.
#[derive(Clone, Copy)]
pub(super) struct Windows<'a> {
    pub job: &'a Forward,
    pub tile: &'a Tile,
    pub values: *mut f32,
    pub positions: *mut i32,
}

impl Windows<'_> {
    /// Computes the tile and returns true, if its windows are computed here.
    ///
    /// # Safety
    /// The image is f32; the arrays hold the tile's values.
    pub unsafe fn run(self, isa: Isa) -> bool {
        let job = self.job;
        if !applies(isa, &job.geometry, job.kind) || job.x.strides[3] != 1 {
            return false;
        }
        // SAFETY: the caller's promise.
        unsafe { on_vectors(self, isa, job.geometry.window.stride[1]) }
        true
    }

    /// The first image row of the windows of a row, and the windows' rows inside the image.
    #[inline(always)]
    fn lines(&self, [n, c, i]: [usize; 3]) -> (*const f32, Range<usize>) {
        let (g, x) = (&self.job.geometry, &self.job.x);
        let inside = g.inside(0, i);
        let row = i * g.window.stride[0] + inside.start - g.window.pad[0];
        let at = x.offset(&[n, c]) + row as isize * x.strides[2];
        (x.element::<f32>(at).cast_const(), inside)
    }

    /// The largest elements of `count` windows of each row, and their positions if these are
    /// wanted.
    ///
    /// # Safety
    /// S's instruction set is enabled; the rest as for the tile.
    #[inline(always)]
    unsafe fn max<S: Lanes, const STRIDE: usize, const POSITIONS: bool>(
        &self,
        from: usize,
        count: usize,
        taps: &[Tap],
    ) {
        let (g, step) = (&self.job.geometry, self.job.x.strides[2]);
        // Until something larger comes, the maximum is the first element inside the image.
        let first: [i32; LANES] = std::array::from_fn(|lane| {
            let column = (self.tile.cols.start + from + lane) * STRIDE;
            g.window.pad[1].saturating_sub(column) as i32
        });
        for (row, at) in self.job.tiling.rows(self.tile).enumerate() {
            let (mut line, rows) = self.lines(at);
            // SAFETY: elements of the image's lines, and this row's values.
            unsafe {
                let mut best = all::<S>(f32::NEG_INFINITY);
                let mut position = (rows.start * g.window.k[1]) as i32;
                let first = first.map(|column| column + position);
                let mut positions = S::load(first.as_ptr().cast());
                for _ in rows {
                    for tap in taps {
                        let value = load::<S, STRIDE>(line, tap);
                        let beats = S::beats(value, best, tap.lanes);
                        best = S::select(beats, value, best);
                        if POSITIONS {
                            let here = all::<S>(f32::from_bits(position as u32));
                            positions = S::select(beats, here, positions);
                        }
                        position += 1;
                    }
                    line = line.wrapping_offset(step);
                }
                let to = row * self.tile.cols.len() + from;
                store::<S>(self.values.add(to), best, count);
                if POSITIONS {
                    store::<S>(self.positions.add(to).cast(), positions, count);
                }
            }
        }
    }

    /// The means of `count` windows of each row.
    ///
    /// # Safety
    /// As for [`Windows::max`].
    #[inline(always)]
    unsafe fn mean<S: Lanes, const STRIDE: usize>(
        &self,
        from: usize,
        count: usize,
        taps: &[Tap],
        count_pad: bool,
    ) {
        let (g, step) = (&self.job.geometry, self.job.x.strides[2]);
        let divisors = divisors(g, count_pad, (self.tile.cols.start + from) as isize);
        for (row, at) in self.job.tiling.rows(self.tile).enumerate() {
            let (mut line, rows) = self.lines(at);
            let factor = factor(g, count_pad, rows.len());
            // SAFETY: elements of the image's lines, and this row's values.
            unsafe {
                let mut sum = S::zero();
                for _ in rows {
                    for tap in taps {
                        sum = S::add(sum, load::<S, STRIDE>(line, tap));
                    }
                    line = line.wrapping_offset(step);
                }
                let to = row * self.tile.cols.len() + from;
                store::<S>(
                    self.values.add(to),
                    mean::<S>(sum, factor, &divisors),
                    count,
                );
            }
        }
    }
}

impl Columns for Windows<'_> {
    #[inline(always)]
    unsafe fn compute<S: Lanes, const STRIDE: usize>(self) {
        let Windows { job, tile, .. } = self;
        let g = &job.geometry;
        for from in (0..tile.cols.len()).step_by(S::LANES) {
            let count = S::LANES.min(tile.cols.len() - from);
            let taps = taps::<S, STRIDE>(g, tile.cols.start + from, count);
            let taps = &taps[..g.window.k[1]];
            // SAFETY: the caller's promise.
            unsafe {
                match job.kind {
                    PoolKind::Max if job.arg.is_none() => {
                        self.max::<S, STRIDE, false>(from, count, taps)
                    }
                    PoolKind::Max | PoolKind::ArgMax => {
                        self.max::<S, STRIDE, true>(from, count, taps)
                    }
                    PoolKind::Avg { count_pad } => {
                        self.mean::<S, STRIDE>(from, count, taps, count_pad)
                    }
                }
            }
        }
    }
}

/// A tile of gradients, with positions of type `A`.
#[derive(Clone, Copy)]
pub(super) struct Gradients<'a, A> {
    pub job: &'a Backward,
    pub tile: &'a Tile,
    pub values: *mut f32,
    pub positions: PhantomData<A>,
}

impl<A: Source<Lane = i32>> Gradients<'_, A> {
    /// Like [`Windows::run`].
    ///
    /// # Safety
    /// `A` is the type of the positions, if there are any; the array holds the tile's values.
    pub unsafe fn run(self, isa: Isa) -> bool {
        let job = self.job;
        let adjacent = job.dy.strides[3] == 1 && job.arg.is_none_or(|arg| arg.strides[3] == 1);
        if !applies(isa, &job.geometry, job.kind) || !adjacent {
            return false;
        }
        // SAFETY: the caller's promise.
        unsafe { on_vectors(self, isa, job.geometry.window.stride[1]) }
        true
    }

    /// The gradients of `count` neighbouring columns of each row; `taps`: for each remainder of
    /// columns by the stride, the windows that reach them, from left to right.
    ///
    /// # Safety
    /// S's instruction set is enabled; the rest as for the tile.
    #[inline(always)]
    unsafe fn columns<S: Lanes, const STRIDE: usize>(
        &self,
        from: usize,
        count: usize,
        taps: [&[Tap]; STRIDE],
    ) {
        let Backward {
            kind,
            geometry: g,
            dy,
            arg,
            tiling,
        } = self.job;
        let count_pad = *kind == PoolKind::Avg { count_pad: true };
        let divisors = taps.map(|taps| {
            let mut all = [[1.0; LANES]; TAPS];
            for (divisors, tap) in all.iter_mut().zip(taps).filter(|_| arg.is_none()) {
                *divisors = self::divisors(g, count_pad, tap.first);
            }
            all
        });
        for (row, [n, c, y]) in tiling.rows(self.tile).enumerate() {
            // SAFETY: windows that exist are read, and this row's values written.
            unsafe {
                let mut sums = [S::zero(); STRIDE];
                for i in g.reaching(0, y) {
                    let r = y + g.window.pad[0] - i * g.window.stride[0];
                    let line = dy.element::<f32>(dy.offset(&[n, c, i])).cast_const();
                    let load = |tap: &Tap| S::load_mask(line.wrapping_offset(tap.first), tap.lanes);
                    if let Some(arg) = arg {
                        let first = (r * g.window.k[1]) as i32;
                        let line = arg.element::<A>(arg.offset(&[n, c, i])).cast_const();
                        for (sum, taps) in sums.iter_mut().zip(taps) {
                            for tap in taps {
                                let at = line.wrapping_offset(tap.first);
                                let positions = positions_at::<S, A>(at, tap.lanes);
                                let position = first + tap.column as i32;
                                let won = S::where_at(positions, position, load(tap));
                                *sum = S::add(*sum, won);
                            }
                        }
                    } else {
                        let factor = factor(g, count_pad, g.inside(0, i).len());
                        for ((sum, taps), divisors) in sums.iter_mut().zip(taps).zip(&divisors) {
                            for (tap, divisors) in taps.iter().zip(divisors) {
                                *sum = S::add(*sum, mean::<S>(load(tap), factor, divisors));
                            }
                        }
                    }
                }
                let to = self.values.add(row * self.tile.cols.len() + from);
                if STRIDE == 1 {
                    store::<S>(to, sums[0], count);
                    continue;
                }
                let [low, high] = S::interleave(sums[0], sums[1]);
                store::<S>(to, low, count);
                if count > S::LANES {
                    store::<S>(to.add(S::LANES), high, count - S::LANES);
                }
            }
        }
    }
}

impl<A: Source<Lane = i32>> Columns for Gradients<'_, A> {
    #[inline(always)]
    unsafe fn compute<S: Lanes, const STRIDE: usize>(self) {
        let Gradients { job, tile, .. } = self;
        let g = &job.geometry;
        let wide = STRIDE * S::LANES;
        for from in (0..tile.cols.len()).step_by(wide) {
            let count = wide.min(tile.cols.len() - from);
            let (mut taps, mut counts) = ([[Tap::default(); TAPS]; STRIDE], [0; STRIDE]);
            for column in (0..g.window.k[1]).rev() {
                for phase in 0..STRIDE {
                    let place = tile.cols.start + from + phase + g.window.pad[1];
                    let distance = place as isize - column as isize;
                    if distance.rem_euclid(STRIDE as isize) != 0 {
                        continue;
                    }
                    let first = distance.div_euclid(STRIDE as isize);
                    let lanes = lanes_inside(first, S::LANES, g.ohw[1]) as u32;
                    taps[phase][counts[phase]] = Tap {
                        column,
                        first,
                        lanes,
                        read: [lanes, 0],
                    };
                    counts[phase] += 1;
                }
            }
            let taps = std::array::from_fn(|phase| &taps[phase][..counts[phase]]);
            // SAFETY: the caller's promise.
            unsafe { self.columns::<S, STRIDE>(from, count, taps) };
        }
    }
}
