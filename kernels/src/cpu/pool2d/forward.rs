//! Pooling itself.

use std::marker::PhantomData;
use std::ops::Range;

use half::{bf16, f16};

use super::{Common, Geometry, Tile, Tiling, in_fours};
use crate::cpu::pointwise::{OperandView, Scratch, Vectorized, vectorized};
use crate::cpu::{Config, Isa, Launch, SpecError};
use crate::dtype::DType;
use crate::size::Env;
use crate::spec::{Body, PoolKind, Spec};

/// An element type of maximum pooling.
pub(super) trait Source: Copy {
    /// The type it widens to.
    type Lane: Copy;
    /// A lower bound of all elements.
    const LOWEST: Self::Lane;
    fn widen(self) -> Self::Lane;
    /// Whether `value`, met later, takes the place of `best`: larger, or the first NaN.
    fn beats(value: Self::Lane, best: Self::Lane) -> bool;

    /// Maxima of four neighbouring 2×2 windows with stride 2, and their positions.
    ///
    /// # Safety
    /// Eight elements at `top` and `bottom` may be read, four at `best` and `positions` written.
    #[inline(always)]
    unsafe fn four_2x2(
        top: *const Self,
        bottom: *const Self,
        best: *mut Self::Lane,
        positions: *mut i32,
    ) {
        for k in 0..4 {
            // SAFETY: the caller's promise.
            unsafe {
                one_2x2(
                    top.add(2 * k),
                    bottom.add(2 * k),
                    best.add(k),
                    positions.add(k),
                )
            };
        }
    }
}

impl Source for f32 {
    type Lane = f32;
    const LOWEST: f32 = f32::NEG_INFINITY;
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }
    #[inline(always)]
    fn beats(value: f32, best: f32) -> bool {
        (value > best) | (value.is_nan() & !best.is_nan())
    }

    // Spelt out, because the compiler does not find these vectors by itself. SSE2 belongs to every
    // x86-64.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn four_2x2(top: *const f32, bottom: *const f32, best: *mut f32, positions: *mut i32) {
        use std::arch::x86_64::*;
        // SAFETY: the caller's promise; the rest is arithmetic.
        unsafe {
            // "Not less or equal" also holds beside a NaN, of which only the first counts.
            let beats =
                |value, best| _mm_and_ps(_mm_cmpnle_ps(value, best), _mm_cmpord_ps(best, best));
            let select = |mask, a, b| _mm_or_ps(_mm_and_ps(mask, a), _mm_andnot_ps(mask, b));
            let better = |row: *const f32, first: i32| {
                let (low, high) = (_mm_loadu_ps(row), _mm_loadu_ps(row.add(4)));
                let (even, odd) = (
                    _mm_shuffle_ps::<0b10_00_10_00>(low, high),
                    _mm_shuffle_ps::<0b11_01_11_01>(low, high),
                );
                let right = beats(odd, even);
                // A mask is −1 where it holds: the position goes up by one.
                (
                    select(right, odd, even),
                    _mm_castsi128_ps(_mm_sub_epi32(
                        _mm_set1_epi32(first),
                        _mm_castps_si128(right),
                    )),
                )
            };
            let ((upper, upper_at), (lower, lower_at)) = (better(top, 0), better(bottom, 2));
            let below = beats(lower, upper);
            _mm_storeu_ps(best, select(below, lower, upper));
            _mm_storeu_ps(positions.cast(), select(below, lower_at, upper_at));
        }
    }
}

macro_rules! halves {
    ($($half:ty: $widen:expr),+) => {$(
        impl Source for $half {
            type Lane = f32;
            const LOWEST: f32 = f32::NEG_INFINITY;
            #[inline(always)]
            fn widen(self) -> f32 {
                $widen(self)
            }
            #[inline(always)]
            fn beats(value: f32, best: f32) -> bool {
                f32::beats(value, best)
            }

            #[inline(always)]
            unsafe fn four_2x2(
                top: *const Self,
                bottom: *const Self,
                best: *mut f32,
                positions: *mut i32,
            ) {
                // SAFETY: the caller's promise.
                let widened = |row: *const Self| unsafe {
                    std::array::from_fn::<f32, 8, _>(|k| row.add(k).read().widen())
                };
                let (top, bottom) = (widened(top), widened(bottom));
                // SAFETY: eight elements each, and the caller's promise.
                unsafe { f32::four_2x2(top.as_ptr(), bottom.as_ptr(), best, positions) };
            }
        }
    )+};
}

// A bf16 is the upper half of an f32, which vectorizes.
halves!(bf16: |x: bf16| f32::from_bits(u32::from(x.to_bits()) << 16), f16: f16::to_f32);

impl Source for i32 {
    type Lane = i32;
    const LOWEST: i32 = i32::MIN;
    #[inline(always)]
    fn widen(self) -> i32 {
        self
    }
    #[inline(always)]
    fn beats(value: i32, best: i32) -> bool {
        value > best
    }
}

impl Source for u8 {
    type Lane = i32;
    const LOWEST: i32 = i32::MIN;
    #[inline(always)]
    fn widen(self) -> i32 {
        i32::from(self)
    }
    #[inline(always)]
    fn beats(value: i32, best: i32) -> bool {
        value > best
    }
}

/// See [`Body::Pool2d`].
///
/// A window with no element inside the image gives −∞ (the smallest integer) and a position without
/// meaning, or the mean 0.
pub(crate) struct Pool2d {
    common: Common,
}

impl Pool2d {
    pub fn new(spec: &Spec, bound: &Env, config: &Config) -> Result<Self, SpecError> {
        Ok(Pool2d {
            common: Common::new(spec, bound, config)?,
        })
    }

    pub fn workspace(&self) -> u64 {
        (self.common.worker_bytes(2) * self.common.threads) as u64
    }

    /// # Safety
    /// The addresses must be as [`Launch`] promises.
    pub unsafe fn run(&self, spec: &Spec, launch: &Launch) {
        let Body::Pool2d(pool) = &spec.body else {
            unreachable!("checked by new")
        };
        let (env, common) = (launch.env, &self.common);
        let tiling = Tiling::new(&spec.dims, common.capacity, env);
        let geometry = Geometry {
            hw: pool.hw.map(|s| s.usize_at(env)),
            ohw: [tiling.dims[2], tiling.dims[3]],
            window: pool.window,
        };
        let x = OperandView::new(&pool.x, launch.args[0], env);
        let arg = pool
            .arg
            .as_ref()
            .map(|arg| OperandView::new(arg, launch.args[1], env));
        let job = Forward {
            kind: pool.kind,
            geometry,
            x,
            arg,
            tiling,
        };
        let scratch = Scratch::new(launch, common.worker_bytes(2));
        let code = common.code.bind(spec, launch);
        launch.team.run(tiling.tiles(), &|index, worker| {
            let acc = scratch.of(worker);
            let positions = acc.wrapping_add(common.array_bytes());
            let tile = tiling.tile(index);
            // SAFETY: the scratch holds two arrays of a tile's values and the epilogue's bytes, and
            // is this worker's alone; reads stay inside the image and writes inside `arg` and the
            // stores, which `Launch` lets this kernel reach.
            unsafe {
                match x.dtype {
                    DType::F32 => job.tile::<f32>(common.isa, &tile, acc, positions),
                    DType::I32 => job.tile::<i32>(common.isa, &tile, acc, positions),
                    DType::U8 | DType::Bool => job.tile::<u8>(common.isa, &tile, acc, positions),
                    DType::F16 => job.tile::<f16>(common.isa, &tile, acc, positions),
                    DType::BF16 => job.tile::<bf16>(common.isa, &tile, acc, positions),
                }
                let values = if pool.kind == PoolKind::ArgMax {
                    positions
                } else {
                    acc
                };
                tiling.finish(
                    &code,
                    &tile,
                    values.cast(),
                    positions.wrapping_add(common.array_bytes()),
                );
            }
        });
    }
}

/// A pooling at launch.
pub(super) struct Forward {
    pub kind: PoolKind,
    pub geometry: Geometry,
    pub x: OperandView,
    pub arg: Option<OperandView>,
    pub tiling: Tiling,
}

struct ForwardTile<'a, T> {
    job: &'a Forward,
    tile: &'a Tile,
    acc: *mut u8,
    positions: *mut u8,
    source: PhantomData<T>,
}

impl<T: Source> Vectorized for ForwardTile<'_, T> {
    #[inline(always)]
    unsafe fn run(self) {
        let job = self.job;
        let (columns, count) = (&self.tile.cols, self.tile.cols.len());
        for (row, [n, c, i]) in job.tiling.rows(self.tile).enumerate() {
            let start = row * count;
            // SAFETY: both arrays hold a tile's values, of which this row's `count` begin at
            // `start`; they do not overlap.
            let (values, positions) = unsafe {
                let values = self.acc.cast::<T::Lane>().add(start);
                (
                    std::slice::from_raw_parts_mut(values, count),
                    std::slice::from_raw_parts_mut(self.positions.cast::<i32>().add(start), count),
                )
            };
            let plane = job.x.element::<T>(job.x.offset(&[n, c]));
            match job.kind {
                PoolKind::Max | PoolKind::ArgMax => {
                    // SAFETY: the plane is the image's (n, c).
                    unsafe { job.max_row(plane, i, columns, values, positions) };
                }
                PoolKind::Avg { count_pad } => {
                    // SAFETY: only f32 images are averaged (checked by `new`), so `T` and its lane
                    // are f32.
                    let values = unsafe {
                        std::slice::from_raw_parts_mut(values.as_mut_ptr().cast::<f32>(), count)
                    };
                    // SAFETY: the plane is the image's (n, c).
                    unsafe { job.mean_row(plane.cast(), i, columns, count_pad, values) };
                }
            }
        }
    }
}

/// The positions of a tile, which are written to memory.
struct Positions<'a> {
    job: &'a Forward,
    tile: &'a Tile,
    arg: &'a OperandView,
    from: *const i32,
}

impl Vectorized for Positions<'_> {
    #[inline(always)]
    unsafe fn run(self) {
        let (tiling, columns, arg) = (&self.job.tiling, &self.tile.cols, self.arg);
        let [_, _, h, w] = tiling.dims.map(|size| size as isize);
        let [_, plane, row, step, ..] = arg.strides;
        // Rows that follow each other in memory are written as one.
        let joined = columns.len() == w as usize && row == w * step && plane == h * row;
        let (rows, length) = match joined {
            true => (1, self.tile.rows.len() * columns.len()),
            false => (self.tile.rows.len(), columns.len()),
        };
        for (k, [n, c, i]) in tiling.rows(self.tile).take(rows).enumerate() {
            let first = arg.offset(&[n, c, i, columns.start]);
            // SAFETY: the positions are those of a tile; the rows lie inside the operand's region,
            // which this kernel alone writes.
            unsafe {
                let from = std::slice::from_raw_parts(self.from.add(k * length), length);
                match arg.dtype {
                    DType::U8 => store_row(from, arg.element::<u8>(first), step, |p| p as u8),
                    _ => store_row(from, arg.element::<i32>(first), step, |p| p),
                }
            }
        }
    }
}

/// Writes a row of positions to memory.
///
/// # Safety
/// The elements at `to`, `step` apart, may be written.
#[inline(always)]
unsafe fn store_row<A>(from: &[i32], to: *mut A, step: isize, narrow: impl Fn(i32) -> A) {
    for (k, &position) in from.iter().enumerate() {
        // One loop for neighbours, which vectorizes, and one for the rest.
        let at = if step == 1 {
            k as isize
        } else {
            k as isize * step
        };
        // SAFETY: the caller's promise.
        unsafe { to.wrapping_offset(at).write(narrow(position)) };
    }
}

impl Forward {
    /// # Safety
    /// `T` is the image's type; the scratch arrays hold a tile each.
    unsafe fn tile<T: Source>(&self, isa: Isa, tile: &Tile, acc: *mut u8, positions: *mut u8) {
        #[cfg(target_arch = "x86_64")]
        let (pairs, windows) = {
            let (values, positions) = (acc.cast(), positions.cast());
            (
                super::pairs::Maxima {
                    job: self,
                    tile,
                    values,
                    positions,
                },
                super::vectors::Windows {
                    job: self,
                    tile,
                    values,
                    positions,
                },
            )
        };
        // SAFETY: the caller's promise.
        unsafe {
            #[cfg(target_arch = "x86_64")]
            let done = self.x.dtype == DType::F32 && (pairs.run(isa) || windows.run(isa));
            #[cfg(not(target_arch = "x86_64"))]
            let done = false;
            if !done {
                let source = PhantomData;
                vectorized(
                    isa,
                    ForwardTile::<T> {
                        job: self,
                        tile,
                        acc,
                        positions,
                        source,
                    },
                );
            }
            if let Some(arg) = &self.arg {
                let from = positions.cast_const().cast();
                vectorized(
                    isa,
                    Positions {
                        job: self,
                        tile,
                        arg,
                        from,
                    },
                );
            }
        }
    }

    /// The elements of a row's windows in window order.
    #[inline(always)]
    fn elements<'a>(&'a self, i: usize, columns: &'a Range<usize>) -> Elements<'a> {
        let rows = self.geometry.inside(0, i);
        Elements {
            job: self,
            i,
            columns,
            r: rows.start,
            end: rows.end,
            s: 0,
        }
    }

    /// The largest element of each window of a row, and its position.
    ///
    /// # Safety
    /// `plane` is a plane of the image.
    #[inline(always)]
    unsafe fn max_row<T: Source>(
        &self,
        plane: *const T,
        i: usize,
        columns: &Range<usize>,
        best: &mut [T::Lane],
        positions: &mut [i32],
    ) {
        let (g, x) = (&self.geometry, &self.x);
        if g.is_2x2() && x.strides[3] == 1 && 2 * i + 2 <= g.hw[0] && 2 * columns.end <= g.hw[1] {
            let top =
                plane.wrapping_offset(2 * i as isize * x.strides[2] + 2 * columns.start as isize);
            // SAFETY: both rows of each window lie inside the plane.
            unsafe { max_2x2(top, top.wrapping_offset(x.strides[2]), best, positions) };
            return;
        }
        best.fill(T::LOWEST);
        // Until something larger comes, the maximum is the first element inside the image.
        let first_row = g.inside(0, i).start * g.window.k[1];
        for (position, j) in positions.iter_mut().zip(columns.clone()) {
            *position = (first_row + g.window.pad[1].saturating_sub(j * g.window.stride[1])) as i32;
        }
        for Element {
            position,
            span,
            first,
            step,
        } in self.elements(i, columns)
        {
            let (best, positions) = (&mut best[span.clone()], &mut positions[span]);
            let (first, position) = (plane.wrapping_offset(first), position as i32);
            // SAFETY: inside the plane, as `elements` says.
            unsafe {
                match step {
                    1 => max_span(first, 1, position, best, positions),
                    2 => max_span(first, 2, position, best, positions),
                    _ => max_span(first, step, position, best, positions),
                }
            }
        }
    }

    /// The mean of each window of a row.
    ///
    /// # Safety
    /// `plane` is a plane of the image.
    #[inline(always)]
    unsafe fn mean_row(
        &self,
        plane: *const f32,
        i: usize,
        columns: &Range<usize>,
        count_pad: bool,
        sums: &mut [f32],
    ) {
        sums.fill(0.0);
        for Element {
            span, first, step, ..
        } in self.elements(i, columns)
        {
            let (first, sums) = (plane.wrapping_offset(first), &mut sums[span]);
            // SAFETY: inside the plane, as `elements` says.
            unsafe {
                match step {
                    1 => sum_span(first, 1, sums),
                    2 => sum_span(first, 2, sums),
                    _ => sum_span(first, step, sums),
                }
            }
        }
        let rows = self.geometry.inside(0, i).len();
        for (sum, j) in sums.iter_mut().zip(columns.clone()) {
            *sum /= self.geometry.divisor(count_pad, rows, j);
        }
    }
}

/// See [`Forward::elements`].
struct Elements<'a> {
    job: &'a Forward,
    i: usize,
    columns: &'a Range<usize>,
    r: usize,
    end: usize,
    s: usize,
}

/// One element of the windows of a row, for the columns where it lies inside the image.
struct Element {
    /// Its position in the window.
    position: usize,
    /// Those columns, counted from the row's first.
    span: Range<usize>,
    /// Where it lies in the plane for the first of them, in elements from the plane's first.
    first: isize,
    /// Elements from one column's to the next's.
    step: isize,
}

impl Iterator for Elements<'_> {
    type Item = Element;

    #[inline(always)]
    fn next(&mut self) -> Option<Element> {
        let (g, x, columns) = (&self.job.geometry, &self.job.x, self.columns);
        while self.r < self.end {
            let (r, s) = (self.r, self.s);
            self.s += 1;
            if self.s == g.window.k[1] {
                (self.r, self.s) = (r + 1, 0);
            }
            let all = g.windows(1, s, 0..g.hw[1]);
            let (from, to) = (all.start.max(columns.start), all.end.min(columns.end));
            if from < to {
                let row = self.i * g.window.stride[0] + r - g.window.pad[0];
                let column = from * g.window.stride[1] + s - g.window.pad[1];
                return Some(Element {
                    position: r * g.window.k[1] + s,
                    span: from - columns.start..to - columns.start,
                    first: row as isize * x.strides[2] + column as isize * x.strides[3],
                    step: g.window.stride[1] as isize * x.strides[3],
                });
            }
        }
        None
    }
}

/// Keeps the better of each maximum and the element of a window that lies at `first`, `step`
/// further for the next window.
///
/// # Safety
/// The elements may be read.
#[inline(always)]
unsafe fn max_span<T: Source>(
    first: *const T,
    step: isize,
    position: i32,
    best: &mut [T::Lane],
    positions: &mut [i32],
) {
    for (k, (best, at)) in best.iter_mut().zip(positions).enumerate() {
        // SAFETY: the caller's promise.
        let value = unsafe { first.offset(k as isize * step).read() }.widen();
        let wins = T::beats(value, *best);
        *best = if wins { value } else { *best };
        *at = if wins { position } else { *at };
    }
}

/// Adds to each sum the element of a window, in the order of [`max_span`].
///
/// # Safety
/// The elements may be read.
#[inline(always)]
unsafe fn sum_span(first: *const f32, step: isize, sums: &mut [f32]) {
    for (k, sum) in sums.iter_mut().enumerate() {
        // SAFETY: the caller's promise.
        *sum += unsafe { first.offset(k as isize * step).read() };
    }
}

/// Maxima of 2×2 windows with stride 2 over two rows.
///
/// # Safety
/// Both rows hold `2 · best.len()` elements; `positions` is as long as `best`.
#[inline(always)]
unsafe fn max_2x2<T: Source>(
    top: *const T,
    bottom: *const T,
    best: &mut [T::Lane],
    positions: &mut [i32],
) {
    let (best, positions, count) = (best.as_mut_ptr(), positions.as_mut_ptr(), best.len());
    in_fours!(
        count,
        // SAFETY: `k + 4 ≤ count`; the caller's promise.
        |k| unsafe {
            T::four_2x2(
                top.add(2 * k),
                bottom.add(2 * k),
                best.add(k),
                positions.add(k),
            )
        },
        // SAFETY: `k < count`; the caller's promise.
        unsafe {
            one_2x2(
                top.add(2 * k),
                bottom.add(2 * k),
                best.add(k),
                positions.add(k),
            )
        }
    );
}

/// The maximum of a 2×2 window: the better of each row, then of the two. The first of equals wins,
/// as it does one by one.
///
/// # Safety
/// Two elements at `top` and `bottom` may be read, one at `best` and `position` written.
#[inline(always)]
unsafe fn one_2x2<T: Source>(
    top: *const T,
    bottom: *const T,
    best: *mut T::Lane,
    position: *mut i32,
) {
    // SAFETY: the caller's promise.
    let [a, b, c, d] = unsafe {
        [
            top.read(),
            top.add(1).read(),
            bottom.read(),
            bottom.add(1).read(),
        ]
    }
    .map(T::widen);
    let (upper, upper_at) = if T::beats(b, a) { (b, 1) } else { (a, 0) };
    let (lower, lower_at) = if T::beats(d, c) { (d, 3) } else { (c, 2) };
    let (value, at) = if T::beats(lower, upper) {
        (lower, lower_at)
    } else {
        (upper, upper_at)
    };
    // SAFETY: the caller's promise.
    unsafe {
        best.write(value);
        position.write(at);
    }
}
