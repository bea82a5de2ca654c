//! The gradient of pooling.

use std::marker::PhantomData;
use std::ops::Range;

use super::forward::Source;
use super::{Common, Geometry, Tile, Tiling, in_fours};
use crate::cpu::pointwise::{OperandView, Scratch, Vectorized, vectorized};
use crate::cpu::{Config, Isa, Launch, SpecError};
use crate::dtype::DType;
use crate::size::Env;
use crate::spec::{Body, PoolKind, Spec};

/// See [`Body::Pool2dGrad`].
pub(crate) struct Pool2dGrad {
    common: Common,
}

impl Pool2dGrad {
    pub fn new(spec: &Spec, bound: &Env, config: &Config) -> Result<Self, SpecError> {
        Ok(Pool2dGrad {
            common: Common::new(spec, bound, config)?,
        })
    }

    pub fn workspace(&self) -> u64 {
        (self.common.worker_bytes(1) * self.common.threads) as u64
    }

    /// # Safety
    /// The addresses must be as [`Launch`] promises.
    pub unsafe fn run(&self, spec: &Spec, launch: &Launch) {
        let Body::Pool2dGrad(pool) = &spec.body else {
            unreachable!("checked by new")
        };
        let (env, common) = (launch.env, &self.common);
        let tiling = Tiling::new(&spec.dims, common.capacity, env);
        let geometry = Geometry {
            hw: [tiling.dims[2], tiling.dims[3]],
            ohw: pool.ohw.map(|s| s.usize_at(env)),
            window: pool.window,
        };
        let dy = OperandView::new(&pool.dy, launch.args[0], env);
        let arg = pool
            .arg
            .as_ref()
            .map(|arg| OperandView::new(arg, launch.args[1], env));
        let job = Backward {
            kind: pool.kind,
            geometry,
            dy,
            arg,
            tiling,
        };
        let scratch = Scratch::new(launch, common.worker_bytes(1));
        let code = common.code.bind(spec, launch);
        launch.team.run(tiling.tiles(), &|index, worker| {
            let acc = scratch.of(worker);
            let tile = tiling.tile(index);
            // SAFETY: the scratch holds a tile's values and the epilogue's bytes, and is this
            // worker's alone; `BackwardTile` reads positions of the type it is made for.
            unsafe {
                match job.arg.map(|arg| arg.dtype) {
                    Some(DType::I32) => job.tile::<i32>(common.isa, &tile, acc),
                    _ => job.tile::<u8>(common.isa, &tile, acc),
                }
                tiling.finish(
                    &code,
                    &tile,
                    acc.cast(),
                    acc.wrapping_add(common.array_bytes()),
                );
            }
        });
    }
}

/// The gradient of a pooling at launch.
pub(super) struct Backward {
    pub kind: PoolKind,
    pub geometry: Geometry,
    pub dy: OperandView,
    pub arg: Option<OperandView>,
    pub tiling: Tiling,
}

struct BackwardTile<'a, A> {
    job: &'a Backward,
    tile: &'a Tile,
    acc: *mut u8,
    positions: PhantomData<A>,
}

impl<A: Source<Lane = i32>> Vectorized for BackwardTile<'_, A> {
    #[inline(always)]
    unsafe fn run(self) {
        let job = self.job;
        let columns = &self.tile.cols;
        for (row, at) in job.tiling.rows(self.tile).enumerate() {
            let start = row * columns.len();
            // SAFETY: the array holds a tile's values, of which this row's begin at `start`.
            let acc = unsafe {
                std::slice::from_raw_parts_mut(self.acc.cast::<f32>().add(start), columns.len())
            };
            // SAFETY: `A` is the type of the positions.
            unsafe { job.row::<A>(at, columns, acc) };
        }
    }
}

impl Backward {
    /// # Safety
    /// `A` is the type of the positions, if there are any; the scratch array holds a tile.
    unsafe fn tile<A: Source<Lane = i32>>(&self, isa: Isa, tile: &Tile, acc: *mut u8) {
        #[cfg(target_arch = "x86_64")]
        {
            let (values, positions) = (acc.cast(), PhantomData::<A>);
            let pairs = super::pairs::Spread {
                job: self,
                tile,
                values,
                positions,
            };
            let gradients = super::vectors::Gradients {
                job: self,
                tile,
                values,
                positions,
            };
            // SAFETY: the caller's promise.
            if unsafe { pairs.run(isa) || gradients.run(isa) } {
                return;
            }
        }
        // SAFETY: the caller's promise.
        unsafe {
            vectorized(
                isa,
                BackwardTile::<A> {
                    job: self,
                    tile,
                    acc,
                    positions: PhantomData,
                },
            )
        }
    }

    /// The gradient of one row of the image: windows above first, then windows to the left first.
    ///
    /// # Safety
    /// `A` is the type of the positions, if there are any; `acc` is as long as the row.
    #[inline(always)]
    unsafe fn row<A: Source<Lane = i32>>(
        &self,
        [n, c, y]: [usize; 3],
        columns: &Range<usize>,
        acc: &mut [f32],
    ) {
        let g = &self.geometry;
        let (stride, pad) = (g.window.stride, g.window.pad);
        let Range { start: first, end } = g.reaching(0, y);
        let windows_at = |i| {
            let dy = self
                .dy
                .element::<f32>(self.dy.offset(&[n, c, i]))
                .cast_const();
            (
                dy,
                self.arg.map(|arg| {
                    (
                        arg.element::<A>(arg.offset(&[n, c, i])).cast_const(),
                        arg.strides[3],
                    )
                }),
            )
        };
        // Whole windows of 2×2 tile the columns: no last column belongs to a window that reaches
        // out of the image.
        let is_whole = columns.start.is_multiple_of(2)
            && (columns.end.is_multiple_of(2) || columns.end / 2 >= g.ohw[1]);
        if g.is_2x2()
            && is_whole
            && self.dy.strides[3] == 1
            && first < end
            && let (dy, Some((arg, 1))) = windows_at(first)
        {
            let j = columns.start / 2;
            let (inside, outside) =
                acc.split_at_mut(2 * (columns.len() / 2).min(g.ohw[1].saturating_sub(j)));
            // SAFETY: the windows of the row begin at `j`, and two elements of `inside` belong to
            // each.
            unsafe { spread_2x2(dy.add(j), arg.add(j), 2 * (y % 2) as i32, inside) };
            outside.fill(0.0);
            return;
        }
        acc.fill(0.0);
        for i in first..end {
            let r = y + pad[0] - i * stride[0];
            let (dy, arg) = windows_at(i);
            let rows = g.inside(0, i).len();
            for s in (0..g.window.k[1]).rev() {
                let windows = g.windows(1, s, columns.clone());
                if windows.is_empty() {
                    continue;
                }
                let to = windows.start * stride[1] + s - pad[1] - columns.start;
                let position = (r * g.window.k[1] + s) as i32;
                let step = self.dy.strides[3];
                // SAFETY: window (i, j) exists, so its gradient lies inside the operand's region.
                let gradient = |j: usize| unsafe { dy.wrapping_offset(j as isize * step).read() };
                match (self.kind, arg) {
                    (PoolKind::Avg { count_pad: true }, _) => {
                        let all = g.divisor(true, 0, 0);
                        add_at(acc, to, stride[1], windows, |j| gradient(j) / all);
                    }
                    (_, None) => add_at(acc, to, stride[1], windows, |j| {
                        gradient(j) / g.divisor(false, rows, j)
                    }),
                    (_, Some((arg, step))) => {
                        let stored = |j: usize| {
                            // SAFETY: as above, for its position.
                            unsafe { arg.wrapping_offset(j as isize * step).read() }.widen()
                        };
                        add_at(acc, to, stride[1], windows, |j| {
                            if stored(j) == position {
                                gradient(j)
                            } else {
                                0.0
                            }
                        });
                    }
                }
            }
        }
    }
}

/// Adds each window's gradient to places `stride` apart.
#[inline(always)]
fn add_at(
    acc: &mut [f32],
    first: usize,
    stride: usize,
    windows: Range<usize>,
    value: impl Fn(usize) -> f32,
) {
    for (k, j) in windows.enumerate() {
        acc[first + k * stride] += value(j);
    }
}

/// One row of the gradient of 2×2 windows with stride 2: each window's gradient goes to its
/// maximum, if that is position `left` or `left + 1`.
///
/// # Safety
/// `dy` and `positions` hold a value for every two elements of `row`.
#[inline(always)]
unsafe fn spread_2x2<A: Source<Lane = i32>>(
    dy: *const f32,
    positions: *const A,
    left: i32,
    row: &mut [f32],
) {
    let (row, count) = (row.as_mut_ptr(), row.len() / 2);
    in_fours!(
        count,
        // SAFETY: `k + 4 ≤ count`; the caller's promise.
        |k| unsafe { four_2x2(dy.add(k), positions.add(k), left, row.add(2 * k)) },
        // SAFETY: `k < count`; the caller's promise.
        unsafe { one_2x2(dy.add(k), positions.add(k), left, row.add(2 * k)) }
    );
}

/// # Safety
/// As for [`spread_2x2`], for one window.
#[inline(always)]
unsafe fn one_2x2<A: Source<Lane = i32>>(
    dy: *const f32,
    position: *const A,
    left: i32,
    row: *mut f32,
) {
    // SAFETY: the caller's promise.
    unsafe {
        // Added to 0, as any sum of gradients begins: −0 becomes 0.
        let (value, at) = (0.0 + dy.read(), position.read().widen());
        row.write(if at == left { value } else { 0.0 });
        row.add(1).write(if at == left + 1 { value } else { 0.0 });
    }
}

/// # Safety
/// As for [`spread_2x2`], for four windows.
#[inline(always)]
unsafe fn four_2x2<A: Source<Lane = i32>>(
    dy: *const f32,
    positions: *const A,
    left: i32,
    row: *mut f32,
) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the caller's promise; SSE2 belongs to every x86-64.
    unsafe {
        use std::arch::x86_64::*;
        let value = _mm_add_ps(_mm_setzero_ps(), _mm_loadu_ps(dy));
        let [a, b, c, d] = positions.cast::<[A; 4]>().read().map(A::widen);
        let at = _mm_setr_epi32(a, b, c, d);
        let where_at = |position| {
            _mm_and_ps(
                _mm_castsi128_ps(_mm_cmpeq_epi32(at, _mm_set1_epi32(position))),
                value,
            )
        };
        let (even, odd) = (where_at(left), where_at(left + 1));
        _mm_storeu_ps(row, _mm_unpacklo_ps(even, odd));
        _mm_storeu_ps(row.add(4), _mm_unpackhi_ps(even, odd));
    }
    #[cfg(not(target_arch = "x86_64"))]
    for k in 0..4 {
        // SAFETY: the caller's promise.
        unsafe { one_2x2(dy.add(k), positions.add(k), left, row.add(2 * k)) };
    }
}
