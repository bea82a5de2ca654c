//! Products of few rows, where the steps of a column of the right operand are neighbours in memory, as
//! those of a layer's weight `[outputs, inputs]` are.
//!
//! Such a product takes as long as its right operand takes to arrive, and nothing pays that is done to
//! it more than once. A vector holds steps of one column, so that columns are read in order, without a
//! transposition, and an element is the sum of a vector's lanes. Halves are widened and quantized
//! weights decoded in registers.
//!
//! Therefore sums have another order than in [`super::drive`], and rows other bits than in a product of
//! more rows. Products whose sums have to be in order are not computed here.

use std::ops::Range;

use half::{bf16, f16};

use super::micro::Micro;
use super::pack::Source;
use super::quantized::{PARAMETERS, Parameters, Weights, decoder, number};
use super::simd::Simd;
use super::workspace::{Resources, Slot, Space};
use super::{SERIAL_WORK, even, factors, wanted, workers};
use crate::cpu::tile::TileCode;
use crate::cpu::{Config, Launch, SpecError};
use crate::dtype::DType;
use crate::size::Env;
use crate::spec::{Body, Operand, Spec};

/// Most rows of a product.
const ROWS_MAX: usize = 16;
/// Fewest steps of a product of floats.
const STEPS_MIN: usize = 64;
/// Rows whose sums are in registers at once.
const TILE_ROWS: usize = 4;
/// The columns of a block of the result are a multiple of this but for the last.
const TILE_COLUMNS: usize = 8;
/// Most columns of a block of the result.
const BLOCK_COLUMNS_MAX: usize = 256;
/// Lanes of the widest vector.
const LANES_MAX: usize = 16;

/// A product of few rows, prepared.
pub(crate) struct FewRows {
    code: TileCode,
    micro: &'static Micro,
    threads: usize,
    space: Space,
    /// Whether the product has one column, and is computed transposed.
    transposed: bool,
}

/// Whether a product of sizes up to `whole` is computed here and, if so, transposed.
fn applies(spec: &Spec, whole: &Env) -> Option<bool> {
    let size = |axis: usize| spec.dims[axis].usize_at(whole);
    match &spec.body {
        Body::QuantizedMatmul(product) => {
            (!product.in_order && size(0) <= ROWS_MAX).then_some(false)
        }
        Body::Matmul(product) if !product.in_order && spec.dims.len() == 2 => {
            let k = product.k.as_fixed()?;
            let is = |left: &Operand, right: &Operand, steps: usize| {
                left.dtype == DType::F32
                    && left.strides.len() == 2
                    && right.dtype.is_float()
                    && right.strides.len() == 2
                    && right.strides[steps].is(1)
            };
            let transposed = spec.dims[1].is(1);
            let fits = match transposed {
                true => is(&product.b, &product.a, 1),
                false => size(0) <= ROWS_MAX && is(&product.a, &product.b, 0),
            };
            (fits && k >= STEPS_MIN as i64).then_some(transposed)
        }
        _ => None,
    }
}

impl FewRows {
    /// Prepared for sizes up to `bound`, of slices of a run of sizes up to `whole`; `None` if the
    /// product is not one of few rows, or its sums have to be in order.
    pub fn new(
        spec: &Spec,
        [bound, whole]: [&Env; 2],
        config: &Config,
    ) -> Result<Option<Self>, SpecError> {
        let Some(transposed) = applies(spec, whole) else {
            return Ok(None);
        };
        let code = TileCode::new(spec, bound, config)?;
        let [m, n] = [spec.dims[0], spec.dims[1]].map(|d| d.usize_at(bound));
        let (m, n) = if transposed { (n, m) } else { (m, n) };
        let (k, micro) = match &spec.body {
            Body::QuantizedMatmul(product) => (product.k, decoder(config.isa, product.format)),
            Body::Matmul(product) => (product.k, Micro::of(config.isa)),
            _ => unreachable!("checked by applies"),
        };
        let k = k.usize_at(bound);
        let columns = BLOCK_COLUMNS_MAX.min(n.saturating_add(TILE_COLUMNS));
        let space = Space {
            acc: m.saturating_mul(columns),
            scratch: code.scratch_bytes(),
            shared: m.saturating_mul(k.next_multiple_of(LANES_MAX)),
            ..Space::default()
        };
        Ok(Some(FewRows {
            code,
            micro,
            threads: workers([1, m, n, k], config),
            space,
            transposed,
        }))
    }

    pub fn workspace(&self) -> u64 {
        self.space.bytes(self.threads)
    }

    /// # Safety
    /// The addresses must be as [`Launch`] promises.
    pub unsafe fn run(&self, spec: &Spec, launch: &Launch) {
        let env = launch.env;
        let [m, n] = [spec.dims[0], spec.dims[1]].map(|d| d.usize_at(env));
        let (m, n) = if self.transposed { (n, m) } else { (m, n) };
        let (left, right, k) = self.operands(spec, launch);
        if m == 0 || n == 0 {
            return;
        }
        let resources = Resources {
            workspace: launch.workspace,
            space: &self.space,
            threads: self.threads,
            team: launch.team,
        };
        // Vectors are whole; the steps after the last are zeros.
        let length = k.next_multiple_of(self.micro.lanes);
        let (left, rows) = (Shared(left), Shared(resources.shared()));
        let serial = m.saturating_mul(n).saturating_mul(k) < SERIAL_WORK;
        let threads = self.threads.min(launch.team.threads());
        let most = n.div_ceil(wanted(threads)).min(BLOCK_COLUMNS_MAX);
        let columns = even(n, most, TILE_COLUMNS);
        let parts = right.parts();
        let code = self.code.bind(spec, launch);
        // SAFETY: the workspace has room for the rows, and for the sums of a block on each worker;
        // each task writes a row, or a block of the result, of its own.
        unsafe {
            resources.tasks(m, serial || m == 1, |row, _: &Slot, _: &mut usize| {
                let to = rows.get().add(row * length);
                arrange(left.get(), row, [k, length], [parts, self.micro.lanes], to);
            });
            resources.tasks(n.div_ceil(columns), serial, |block, slot, _| {
                let first = block * columns;
                let count = columns.min(n - first);
                (self.micro.dots)(&Dots {
                    right: &right,
                    columns: first..first + count,
                    left: *rows.get(),
                    rows: m,
                    k,
                    length,
                    to: slot.acc,
                    stride: columns,
                });
                let (origin, rows, columns, stride) = match self.transposed {
                    true => ([first, 0], count, m, 1),
                    false => ([0, first], m, count, columns),
                };
                let acc = slot.acc.cast();
                code.block(&origin, 0, rows, columns, acc, stride, slot.scratch);
            });
        }
    }

    /// The left operand, the right one, and the length of the contracted axis.
    fn operands(&self, spec: &Spec, launch: &Launch) -> (Source, Right, usize) {
        let env = launch.env;
        let (k, mut a, mut b) = factors(spec, launch);
        if self.transposed {
            (a, b) = (b.transposed(), a.transposed());
        }
        let left = Source {
            at: a.first(env).cast(),
            stride: a.strides[0],
            step: a.strides[1],
        };
        let (at, stride) = (b.first(env), b.strides[1]);
        let right = match b.operand.dtype {
            DType::F16 => Right::F16(Columns {
                at: at.cast(),
                stride,
            }),
            DType::BF16 => Right::BF16(Columns {
                at: at.cast(),
                stride,
            }),
            DType::F32 => Right::F32(Columns {
                at: at.cast(),
                stride,
            }),
            _ => Right::Quantized(Weights::new(spec, launch, self.micro)),
        };
        (left, right, k.usize_at(env))
    }
}

/// Shared by tasks: the address of their parts, or a matrix that is only read.
struct Shared<T>(T);

impl<T> Shared<T> {
    /// By a method, because a closure that names a field captures the field alone.
    fn get(&self) -> &T {
        &self.0
    }
}

// SAFETY: tasks write parts of their own, and what all read has been written before.
unsafe impl<T> Sync for Shared<T> {}

/// Copies a row of `k` steps of the left operand, and zeros up to `length`, in the order in which the
/// right one is read: of a group of as many bytes as a vector has lanes, first the steps of the lowest
/// of `parts` numbers of each byte, then of the next.
///
/// # Safety
/// The row may be read, and `length` elements of `to` written.
unsafe fn arrange(
    left: &Source,
    row: usize,
    [k, length]: [usize; 2],
    [parts, lanes]: [usize; 2],
    to: *mut f32,
) {
    let from = left.at.wrapping_offset(row as isize * left.stride);
    // SAFETY: steps lie in the row, and rows of packed numbers are whole groups.
    unsafe {
        if parts == 1 {
            for step in 0..k {
                *to.add(step) = *from.wrapping_offset(step as isize * left.step);
            }
            return to.add(k).write_bytes(0, length - k);
        }
        for group in (0..k).step_by(parts * lanes) {
            for part in 0..parts {
                for lane in 0..lanes {
                    let step = group + lane * parts + part;
                    *to.add(group + part * lanes + lane) =
                        *from.wrapping_offset(step as isize * left.step);
                }
            }
        }
    }
}

/// The right operand.
pub(in super::super) enum Right {
    Quantized(Weights),
    F32(Columns<f32>),
    F16(Columns<f16>),
    BF16(Columns<bf16>),
}

/// Columns `stride` elements apart, whose steps are neighbours.
pub(in super::super) struct Columns<T> {
    at: *const T,
    stride: isize,
}

// SAFETY: columns are only read.
unsafe impl<T> Sync for Columns<T> {}

impl Right {
    /// Numbers in a byte, or 1.
    fn parts(&self) -> usize {
        match self {
            Right::Quantized(weights) => weights.format.per_byte() as usize,
            _ => 1,
        }
    }
}

/// Products of rows with columns of the right operand: element (i, j) at `to + i·stride + j` from the
/// first column on.
pub(in super::super) struct Dots<'a> {
    right: &'a Right,
    columns: Range<usize>,
    /// Arranged rows, `length` elements apart.
    left: *const f32,
    rows: usize,
    k: usize,
    length: usize,
    to: *mut f32,
    stride: usize,
}

/// Computes [`Dots`].
pub(in super::super) type ComputeDots = unsafe fn(dots: &Dots);

#[inline(always)]
pub(super) unsafe fn dots<S: Simd>(dots: &Dots) {
    // SAFETY: the caller enables S's instruction set; operands and results are the caller's.
    unsafe {
        match dots.right {
            Right::F32(columns) => of_floats::<S, f32>(dots, columns),
            Right::F16(columns) => of_floats::<S, f16>(dots, columns),
            Right::BF16(columns) => of_floats::<S, bf16>(dots, columns),
            Right::Quantized(weights) => match weights.format.bits {
                8 => of_numbers::<S, 1>(dots, weights),
                4 => of_numbers::<S, 2>(dots, weights),
                _ => of_numbers::<S, 4>(dots, weights),
            },
        }
    }
}

#[inline(always)]
unsafe fn of_floats<S: Simd, T: Float>(dots: &Dots, columns: &Columns<T>) {
    // SAFETY: as for `dots`.
    unsafe {
        match dots.rows {
            1 => floats::<S, T, 1, 8>(dots, columns),
            2 => floats::<S, T, 2, 4>(dots, columns),
            _ => floats::<S, T, TILE_ROWS, 2>(dots, columns),
        }
    }
}

#[inline(always)]
unsafe fn of_numbers<S: Simd, const P: usize>(dots: &Dots, weights: &Weights) {
    // SAFETY: as for `dots`.
    unsafe {
        match dots.rows {
            1 => numbers::<S, P, 1, 4>(dots, weights),
            2 => numbers::<S, P, 2, 4>(dots, weights),
            _ => numbers::<S, P, TILE_ROWS, 2>(dots, weights),
        }
    }
}

impl Dots<'_> {
    /// The columns from `first` on. Those after the last are the last one.
    #[inline(always)]
    fn columns<const C: usize>(&self, first: usize) -> [usize; C] {
        std::array::from_fn(|column| (first + column).min(self.columns.end - 1))
    }

    /// The rows from `first` on. Those after the last are the last one.
    #[inline(always)]
    fn rows<const R: usize>(&self, first: usize) -> [*const f32; R] {
        let row = |row: usize| (first + row).min(self.rows - 1) * self.length;
        std::array::from_fn(|at| self.left.wrapping_add(row(at)))
    }

    /// Stores the sums of rows and columns from the first of each on.
    ///
    /// # Safety
    /// The caller enables S's instruction set.
    #[inline(always)]
    unsafe fn store<S: Simd, const R: usize, const C: usize>(
        &self,
        row: usize,
        column: usize,
        sums: &[[S::V; C]; R],
    ) {
        let columns = C.min(self.columns.end - column);
        for (at, sums) in sums.iter().enumerate().take(self.rows - row) {
            for (next, &sum) in sums.iter().enumerate().take(columns) {
                let place = (row + at) * self.stride + column - self.columns.start + next;
                // SAFETY: the result has this element.
                unsafe { *self.to.add(place) = total::<S>(sum) };
            }
        }
    }
}

/// The types of floats.
trait Float: Copy {
    /// As many as a vector has lanes, as f32.
    unsafe fn load<S: Simd>(at: *const Self) -> S::V;
}

impl Float for f32 {
    #[inline(always)]
    unsafe fn load<S: Simd>(at: *const f32) -> S::V {
        // SAFETY: the caller enables S's instruction set and gives a readable vector.
        unsafe { S::load(at) }
    }
}

impl Float for f16 {
    #[inline(always)]
    unsafe fn load<S: Simd>(at: *const f16) -> S::V {
        // SAFETY: as above.
        unsafe { S::load_f16(at) }
    }
}

impl Float for bf16 {
    #[inline(always)]
    unsafe fn load<S: Simd>(at: *const bf16) -> S::V {
        // SAFETY: as above.
        unsafe { S::load_bf16(at) }
    }
}

/// [`Dots`] of floats, R rows and C columns at a time.
#[inline(always)]
unsafe fn floats<S: Simd, T: Float, const R: usize, const C: usize>(
    dots: &Dots,
    columns: &Columns<T>,
) {
    let whole = dots.k / S::LANES * S::LANES;
    for first in dots.columns.clone().step_by(C) {
        let at = dots.columns::<C>(first).map(|column| {
            let offset = column as isize * columns.stride;
            columns.at.wrapping_offset(offset)
        });
        for row in (0..dots.rows).step_by(R) {
            let rows = dots.rows::<R>(row);
            // SAFETY: as for `dots`. The steps after the whole vectors are copied.
            unsafe {
                let mut sums = [[S::zero(); C]; R];
                for step in (0..whole).step_by(S::LANES) {
                    add::<S, T, R, C>(&mut sums, rows, at, step);
                }
                if whole < dots.k {
                    let mut rest = [[const { std::mem::zeroed::<T>() }; LANES_MAX]; C];
                    for (rest, at) in rest.iter_mut().zip(at) {
                        std::ptr::copy_nonoverlapping(
                            at.add(whole),
                            rest.as_mut_ptr(),
                            dots.k - whole,
                        );
                    }
                    let rows = rows.map(|row| row.wrapping_add(whole));
                    let mut last = [std::ptr::null(); C];
                    for (last, rest) in last.iter_mut().zip(&rest) {
                        *last = rest.as_ptr();
                    }
                    add::<S, T, R, C>(&mut sums, rows, last, 0);
                }
                dots.store::<S, R, C>(row, first, &sums);
            }
        }
    }
}

/// Adds the products of a vector of steps.
#[inline(always)]
unsafe fn add<S: Simd, T: Float, const R: usize, const C: usize>(
    sums: &mut [[S::V; C]; R],
    rows: [*const f32; R],
    columns: [*const T; C],
    step: usize,
) {
    // SAFETY: the caller enables S's instruction set, and rows and columns have these steps.
    unsafe {
        let mut right = [S::zero(); C];
        for (right, column) in right.iter_mut().zip(columns) {
            *right = T::load::<S>(column.add(step));
        }
        for (sums, row) in sums.iter_mut().zip(rows) {
            let left = S::load(row.add(step));
            for (sum, right) in sums.iter_mut().zip(right) {
                *sum = S::fma(left, right, *sum);
            }
        }
    }
}

/// [`Dots`] of quantized weights, P numbers in a byte, R rows and C columns at a time.
#[inline(always)]
unsafe fn numbers<S: Simd, const P: usize, const R: usize, const C: usize>(
    dots: &Dots,
    weights: &Weights,
) {
    let groups = weights.format.block as usize / (P * S::LANES);
    let blocks = dots.k / weights.format.block as usize;
    let mut parameters = [Parameters::NONE; C];
    for first in dots.columns.clone().step_by(C) {
        let columns = dots.columns::<C>(first);
        let packed = columns.map(|column| weights.column(column));
        for row in (0..dots.rows).step_by(R) {
            let rows = dots.rows::<R>(row);
            // SAFETY: as for `dots`.
            unsafe {
                let mut sums = [[S::zero(); C]; R];
                for start in (0..blocks).step_by(PARAMETERS) {
                    let count = PARAMETERS.min(blocks - start);
                    // Those of the one part of a column stay.
                    if row == 0 || blocks > PARAMETERS {
                        for (parameters, &column) in parameters.iter_mut().zip(&columns) {
                            weights.parameters::<S, P>(column, (start, count), parameters);
                        }
                    }
                    for block in 0..count {
                        let at = (start + block) * groups * S::LANES;
                        for column in 0..C {
                            let zero = S::splat(&parameters[column].zeros[block]);
                            let mut own = [S::zero(); R];
                            for group in 0..groups {
                                let at = at + group * S::LANES;
                                let packed = packed[column].add(at);
                                for part in 0..P {
                                    let number = S::sub(number::<S, P>(packed, part), zero);
                                    for (own, row) in own.iter_mut().zip(rows) {
                                        let left = S::load(row.add(at * P + part * S::LANES));
                                        *own = S::fma(left, number, *own);
                                    }
                                }
                            }
                            let scale = S::splat(&parameters[column].scales[block]);
                            for (sums, own) in sums.iter_mut().zip(own) {
                                sums[column] = S::fma(own, scale, sums[column]);
                            }
                        }
                    }
                }
                dots.store::<S, R, C>(row, first, &sums);
            }
        }
    }
}

/// The sum of a vector's lanes, added in halves.
#[inline(always)]
unsafe fn total<S: Simd>(sum: S::V) -> f32 {
    let mut lanes = [0.0f32; LANES_MAX];
    // SAFETY: the caller enables S's instruction set, and a vector has at most so many lanes.
    unsafe { S::store(lanes.as_mut_ptr(), sum) };
    let mut count = S::LANES;
    while count > 1 {
        count /= 2;
        for lane in 0..count {
            lanes[lane] += lanes[lane + count];
        }
    }
    lanes[0]
}
