//! Products with weights that are quantized in blocks (see [`Quantization`]), which are decoded as
//! they are read, so that no unpacked copy of them is in memory.
//!
//! With few rows, a product takes as long as its weights take to arrive. They are decoded in
//! registers and multiplied at once: a vector holds steps of one column, so that the bytes of a row
//! of weights are read in order, and an element is the sum of a vector's lanes. With more rows, or
//! where sums have to be in order, the weights of a panel are decoded as it is packed, and the product
//! has the bits of one with f32 weights.

use std::ops::Range;

use super::micro::Micro;
use super::pack::Source;
use super::simd::Simd;
use super::workspace::{Resources, Slot, Space};
use super::{Matmul, SERIAL_WORK, even, wanted, workers};
use crate::cpu::tile::TileCode;
use crate::cpu::{Config, Isa, Launch, SpecError};
use crate::dtype::DType;
use crate::size::Env;
use crate::spec::{Body, Operand, Quantization, Spec};

/// Most rows of a product whose weights are decoded in registers.
const FEW_ROWS_MAX: usize = 16;
/// Rows and columns whose sums are in registers: with one row, with two, and with up to four.
const TILE_ROWS: usize = 4;
const TILE_COLUMNS: usize = 4;
/// Most columns of a block of the result.
const BLOCK_COLUMNS_MAX: usize = 256;
/// Steps that are decoded at a time for a panel.
const STEPS: usize = 64;
/// Elements of a decoded row: so many steps, and those of the vectors that they begin and end in,
/// of at most 16 bytes of four numbers each.
const DECODED: usize = STEPS + 2 * 64;
/// Blocks of a column whose zero points and scales are read at a time; a multiple of the numbers in a
/// vector of bytes.
const PARAMETERS: usize = 64;
/// Columns of the widest panel.
const PANEL_COLUMNS_MAX: usize = 32;
/// Lanes of the widest vector.
const LANES_MAX: usize = 16;

/// [`Body::QuantizedMatmul`], prepared.
pub(crate) enum QuantizedMatmul {
    Few(Box<FewRows>),
    Many(Box<Matmul>),
}

/// A product of few rows.
pub(crate) struct FewRows {
    code: TileCode,
    micro: &'static Micro,
    threads: usize,
    space: Space,
}

impl QuantizedMatmul {
    /// Prepared for sizes up to `bound`, with a worker's part of the workspace of no more than
    /// `most` bytes where that is possible.
    pub fn new(spec: &Spec, bound: &Env, config: &Config, most: usize) -> Result<Self, SpecError> {
        let Body::QuantizedMatmul(body) = &spec.body else {
            return Err(SpecError::unsupported(
                "not a product with quantized weights",
            ));
        };
        if !body.format.has_kernel() {
            let message = format!("blocks of weights in {:?}", body.format);
            return Err(SpecError::unsupported(message));
        }
        let [m, n] = [spec.dims[0], spec.dims[1]].map(|d| d.usize_at(bound));
        let k = body.k.usize_at(bound);
        if m > FEW_ROWS_MAX || body.in_order {
            let product = Matmul::new(spec, [bound, bound], config, most)?;
            return Ok(QuantizedMatmul::Many(Box::new(product)));
        }
        let code = TileCode::new(spec, bound, config)?;
        let space = Space {
            acc: m * BLOCK_COLUMNS_MAX.min(n.next_multiple_of(TILE_COLUMNS)),
            scratch: code.scratch_bytes(),
            shared: m * k,
            ..Space::default()
        };
        Ok(QuantizedMatmul::Few(Box::new(FewRows {
            code,
            micro: decoder(config.isa, body.format),
            threads: workers([1, m, n, k], config),
            space,
        })))
    }

    pub fn workspace(&self) -> u64 {
        match self {
            QuantizedMatmul::Few(few) => few.space.bytes(few.threads),
            QuantizedMatmul::Many(product) => product.workspace(),
        }
    }

    pub fn slower(&self) -> f64 {
        match self {
            QuantizedMatmul::Few(_) => 1.0,
            QuantizedMatmul::Many(product) => product.slower(),
        }
    }

    /// # Safety
    /// The addresses must be as [`Launch`] promises.
    pub unsafe fn run(&self, spec: &Spec, launch: &Launch) {
        // SAFETY: the caller's promise.
        unsafe {
            match self {
                QuantizedMatmul::Few(few) => few.run(spec, launch),
                QuantizedMatmul::Many(product) => product.run(spec, launch),
            }
        }
    }
}

/// The instruction set with the widest vectors of bytes that blocks are whole multiples of.
fn decoder(isa: Isa, format: Quantization) -> &'static Micro {
    let bytes = (format.block / format.per_byte()) as usize;
    let widest = Micro::of(isa);
    match bytes.is_multiple_of(widest.lanes) {
        true => widest,
        false => Micro::of(isa.min(Isa::Avx2)),
    }
}

impl FewRows {
    /// # Safety
    /// As for [`QuantizedMatmul::run`].
    unsafe fn run(&self, spec: &Spec, launch: &Launch) {
        let Body::QuantizedMatmul(body) = &spec.body else {
            unreachable!("checked by new")
        };
        let env = launch.env;
        let [m, n] = [spec.dims[0], spec.dims[1]].map(|d| d.usize_at(env));
        let k = body.k.usize_at(env);
        if m == 0 || n == 0 {
            return;
        }
        let weights = Weights::new(spec, launch, self.micro);
        let resources = Resources {
            workspace: launch.workspace,
            space: &self.space,
            threads: self.threads,
            team: launch.team,
        };
        let rows = Shared(resources.shared());
        let left = Source {
            at: address(&body.a, launch.args[0], env).cast(),
            stride: stride(&body.a, 0, env),
            step: stride(&body.a, 1, env),
        };
        let left = Shared(left);
        let serial = m.saturating_mul(n).saturating_mul(k) < SERIAL_WORK;
        let threads = self.threads.min(launch.team.threads());
        let columns = even(
            n,
            n.div_ceil(wanted(threads)).min(BLOCK_COLUMNS_MAX),
            TILE_COLUMNS,
        );
        let code = self.code.bind(spec, launch);
        // SAFETY: the workspace has room for the rows, and for the sums of a block on each worker;
        // each task writes a row, or a block of the result, of its own.
        unsafe {
            resources.tasks(m, serial || m == 1, |row, _: &Slot, _: &mut usize| {
                arrange(left.get(), row, k, &weights, rows.get().add(row * k));
            });
            resources.tasks(n.div_ceil(columns), serial, |block, slot, _| {
                let first = block * columns;
                let count = columns.min(n - first);
                for row in (0..m).step_by(TILE_ROWS) {
                    let dots = Dots {
                        weights: &weights,
                        rows: TILE_ROWS.min(m - row),
                        columns: first..first + count,
                        left: rows.get().add(row * k),
                        k,
                        to: slot.acc.add(row * columns),
                        stride: columns,
                    };
                    (self.micro.dots)(&dots);
                }
                code.block(
                    &[0, first],
                    0,
                    m,
                    count,
                    slot.acc.cast(),
                    columns,
                    slot.scratch,
                );
            });
        }
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

fn address(operand: &Operand, at: *mut u8, env: &Env) -> *const u8 {
    let offset = operand.offset.at(env) as isize * operand.dtype.bytes() as isize;
    at.wrapping_offset(offset)
}

fn stride(operand: &Operand, axis: usize, env: &Env) -> isize {
    operand.strides[axis].at(env) as isize
}

/// Copies a row of the left operand, in the order in which weights are decoded: of a group of as many
/// bytes as a vector has lanes, first the steps of the lowest numbers, then of the next.
///
/// # Safety
/// The row may be read, and `k` elements of `to` written.
unsafe fn arrange(left: &Source, row: usize, k: usize, weights: &Weights, to: *mut f32) {
    let (parts, lanes) = (weights.format.per_byte() as usize, weights.micro.lanes);
    let from = left.at.wrapping_offset(row as isize * left.stride);
    for group in (0..k).step_by(parts * lanes) {
        for part in 0..parts {
            for lane in 0..lanes {
                let step = group + lane * parts + part;
                // SAFETY: steps of a group lie in the row, because rows are whole groups.
                unsafe {
                    *to.add(group + part * lanes + lane) =
                        *from.wrapping_offset(step as isize * left.step);
                }
            }
        }
    }
}

/// The zero points and scales of some blocks of a column.
struct Parameters {
    zeros: [f32; PARAMETERS],
    scales: [f32; PARAMETERS],
}

/// Quantized weights in memory.
pub(in super::super) struct Weights {
    format: Quantization,
    /// Decodes them.
    micro: &'static Micro,
    numbers: *const u8,
    /// Bytes from row to row.
    stride: isize,
    scales: PerBlock<f32>,
    zeros: Zeros,
}

/// A number for each block: address, and elements from row to row and from block to block.
#[derive(Clone, Copy)]
struct PerBlock<T> {
    at: *const T,
    strides: [isize; 2],
}

impl<T: Copy> PerBlock<T> {
    fn new(operand: &Operand, at: *mut u8, env: &Env) -> Self {
        PerBlock {
            at: address(operand, at, env).cast(),
            strides: [0, 1].map(|axis| stride(operand, axis, env)),
        }
    }

    fn row(self, row: usize) -> Self {
        let at = self.at.wrapping_offset(row as isize * self.strides[0]);
        PerBlock { at, ..self }
    }

    /// # Safety
    /// The element exists.
    #[inline(always)]
    unsafe fn get(&self, block: usize) -> T {
        // SAFETY: the caller's promise.
        unsafe { *self.at.offset(block as isize * self.strides[1]) }
    }
}

#[derive(Clone, Copy)]
enum Zeros {
    Middle(f32),
    Floats(PerBlock<f32>),
    Packed(PerBlock<u8>, Quantization),
}

impl Zeros {
    fn row(self, row: usize) -> Self {
        match self {
            Zeros::Middle(_) => self,
            Zeros::Floats(zeros) => Zeros::Floats(zeros.row(row)),
            Zeros::Packed(zeros, format) => Zeros::Packed(zeros.row(row), format),
        }
    }

    /// The zero point of a block of this row.
    ///
    /// # Safety
    /// The block exists.
    unsafe fn get(&self, block: usize) -> f32 {
        // SAFETY: the caller's promise.
        unsafe {
            match self {
                Zeros::Middle(zero) => *zero,
                Zeros::Floats(zeros) => zeros.get(block),
                Zeros::Packed(zeros, format) => {
                    let bit = block as u32 * format.bits;
                    let byte = zeros.get((bit / 8) as usize);
                    (u32::from(byte) >> (bit % 8) & format.mask()) as f32
                }
            }
        }
    }
}

impl Weights {
    /// The weights of a launch of a [`Body::QuantizedMatmul`], to be decoded by `micro`.
    fn new(spec: &Spec, launch: &Launch, micro: &'static Micro) -> Weights {
        let Body::QuantizedMatmul(body) = &spec.body else {
            unreachable!("checked when it was prepared")
        };
        let env = launch.env;
        let zeros = match &body.zeros {
            None => Zeros::Middle(body.format.middle() as f32),
            Some(zeros) if zeros.dtype == DType::U8 => {
                Zeros::Packed(PerBlock::new(zeros, launch.args[3], env), body.format)
            }
            Some(zeros) => Zeros::Floats(PerBlock::new(zeros, launch.args[3], env)),
        };
        Weights {
            format: body.format,
            micro,
            numbers: address(&body.numbers, launch.args[1], env),
            stride: stride(&body.numbers, 0, env),
            scales: PerBlock::new(&body.scales, launch.args[2], env),
            zeros,
        }
    }

    /// Those of a product of many rows on this instruction set.
    pub fn of(spec: &Spec, launch: &Launch, isa: Isa) -> Option<Weights> {
        let Body::QuantizedMatmul(body) = &spec.body else {
            return None;
        };
        Some(Weights::new(spec, launch, decoder(isa, body.format)))
    }

    /// Steps that are decoded at once.
    fn group(&self) -> usize {
        self.format.per_byte() as usize * self.micro.lanes
    }

    /// The zero points and scales of `count` blocks of a column from `first` on; `first` and a
    /// multiple of a vector's lanes begin a byte.
    ///
    /// # Safety
    /// The blocks exist, at most [`PARAMETERS`] of them, and the caller enables S's instruction set.
    #[inline(always)]
    unsafe fn parameters<S: Simd, const P: usize>(
        &self,
        column: usize,
        (first, count): (usize, usize),
        to: &mut Parameters,
    ) {
        let scales = self.scales.row(column);
        // SAFETY: the caller's promise; a byte has P blocks' zero points.
        unsafe {
            for (block, scale) in (first..first + count).zip(&mut to.scales) {
                *scale = scales.get(block);
            }
            match self.zeros.row(column) {
                Zeros::Middle(middle) => to.zeros.fill(middle),
                Zeros::Floats(zeros) => {
                    for (block, zero) in (first..first + count).zip(&mut to.zeros) {
                        *zero = zeros.get(block);
                    }
                }
                Zeros::Packed(zeros, _) => {
                    let mut numbers = [0; PARAMETERS];
                    for (at, byte) in (first / P..).zip(&mut numbers[..count.div_ceil(P)]) {
                        *byte = zeros.get(at);
                    }
                    let groups = count.div_ceil(P * S::LANES);
                    let to = to.zeros.as_mut_ptr();
                    decode_groups::<S, P>(numbers.as_ptr(), groups, [0.0, 1.0], to);
                }
            }
        }
    }

    /// Decodes and packs columns of a panel, as [`Matrix::pack`](super::matrix::Matrix::pack) does.
    ///
    /// # Safety
    /// The columns, at most a panel's, and the steps exist, and `steps · width` elements of `to` may
    /// be written.
    pub unsafe fn pack(
        &self,
        micro: &Micro,
        columns: Range<usize>,
        steps: Range<usize>,
        (to, width): (*mut f32, usize),
    ) {
        let mut decoded = [0.0f32; PANEL_COLUMNS_MAX * DECODED];
        let group = self.group();
        for first in steps.clone().step_by(STEPS) {
            let end = steps.end.min(first + STEPS);
            let whole = first / group * group..end.next_multiple_of(group);
            let part = Part {
                weights: self,
                columns: columns.clone(),
                steps: whole.clone(),
                to: decoded.as_mut_ptr(),
            };
            // SAFETY: rows of weights are whole groups, and a row of this buffer takes them.
            unsafe { (self.micro.decode)(&part) };
            let from = Source {
                at: decoded[first - whole.start..].as_ptr(),
                stride: DECODED as isize,
                step: 1,
            };
            // SAFETY: so many rows and steps were decoded, and the panel has room for them.
            unsafe {
                let to = to.add((first - steps.start) * width);
                (micro.pack)(from, columns.len(), end - first, to, width);
            }
        }
    }
}

/// Columns and steps of weights, which begin and end with a group, to be decoded to rows of
/// [`DECODED`] elements, one for each column.
pub(in super::super) struct Part<'a> {
    weights: &'a Weights,
    columns: Range<usize>,
    steps: Range<usize>,
    to: *mut f32,
}

/// Decodes a [`Part`].
pub(in super::super) type Decode = unsafe fn(part: &Part);

#[inline(always)]
pub(super) unsafe fn decode<S: Simd>(part: &Part) {
    // SAFETY: the caller enables S's instruction set, and the memory is the caller's.
    unsafe {
        match part.weights.format.bits {
            8 => decode_columns::<S, 1>(part),
            4 => decode_columns::<S, 2>(part),
            _ => decode_columns::<S, 4>(part),
        }
    }
}

#[inline(always)]
unsafe fn decode_columns<S: Simd, const P: usize>(part: &Part) {
    let weights = part.weights;
    let size = weights.format.block as usize;
    for (column, row) in part.columns.clone().enumerate() {
        // SAFETY: as for `decode`: the column's blocks exist, and so does its row.
        unsafe {
            let (scales, zeros) = (weights.scales.row(row), weights.zeros.row(row));
            let numbers = (weights.numbers).wrapping_offset(row as isize * weights.stride);
            let to = part.to.add(column * DECODED);
            let mut step = part.steps.start;
            while step < part.steps.end {
                let block = step / size;
                let end = ((block + 1) * size).min(part.steps.end);
                decode_groups::<S, P>(
                    numbers.add(step / P),
                    (end - step) / (P * S::LANES),
                    [zeros.get(block), scales.get(block)],
                    to.add(step - part.steps.start),
                );
                step = end;
            }
        }
    }
}

/// Decodes packed numbers of one block, in groups of a vector's lanes of bytes.
#[inline(always)]
unsafe fn decode_groups<S: Simd, const P: usize>(
    numbers: *const u8,
    groups: usize,
    [zero, scale]: [f32; 2],
    to: *mut f32,
) {
    // SAFETY: as for `decode`.
    unsafe {
        let (zero, scale) = (S::splat(&zero), S::splat(&scale));
        for group in 0..groups {
            let numbers = numbers.add(group * S::LANES);
            let to = to.add(group * S::LANES * P);
            // (Intrinsics are calls in a closure that is not inlined.)
            let mut values = [S::zero(); P];
            for (part, value) in values.iter_mut().enumerate() {
                *value = S::mul(S::sub(number::<S, P>(numbers, part), zero), scale);
            }
            match values[..] {
                [a] => S::store(to, a),
                [a, b] => {
                    for (i, v) in S::interleave(a, b).into_iter().enumerate() {
                        S::store(to.add(i * S::LANES), v);
                    }
                }
                [a, b, c, d] => {
                    let [even, odd] = [S::interleave(a, c), S::interleave(b, d)];
                    for (i, (even, odd)) in even.into_iter().zip(odd).enumerate() {
                        for (j, v) in S::interleave(even, odd).into_iter().enumerate() {
                            S::store(to.add((2 * i + j) * S::LANES), v);
                        }
                    }
                }
                _ => unreachable!("a byte has one, two or four numbers"),
            }
        }
    }
}

/// The numbers of one part of each byte of a group.
#[inline(always)]
unsafe fn number<S: Simd, const P: usize>(numbers: *const u8, part: usize) -> S::V {
    let bits = 8 / P;
    // SAFETY: the caller enables S's instruction set and gives a vector's lanes of bytes.
    unsafe { S::bits(numbers, (part * bits) as u32, (1 << bits) - 1) }
}

/// Products of a few arranged rows with columns of weights: element (i, j) at `to + i·stride + j`
/// from the first column on.
pub(in super::super) struct Dots<'a> {
    weights: &'a Weights,
    rows: usize,
    columns: Range<usize>,
    /// Rows of `k` elements.
    left: *const f32,
    k: usize,
    to: *mut f32,
    stride: usize,
}

// SAFETY: weights are only read.
unsafe impl Sync for Weights {}

/// Computes [`Dots`].
pub(in super::super) type ComputeDots = unsafe fn(dots: &Dots);

#[inline(always)]
pub(super) unsafe fn dots<S: Simd>(dots: &Dots) {
    // SAFETY: the caller enables S's instruction set; operands and results are the caller's.
    unsafe {
        match dots.weights.format.bits {
            8 => dots_of_parts::<S, 1>(dots),
            4 => dots_of_parts::<S, 2>(dots),
            _ => dots_of_parts::<S, 4>(dots),
        }
    }
}

#[inline(always)]
unsafe fn dots_of_parts<S: Simd, const P: usize>(dots: &Dots) {
    // SAFETY: as for `dots`.
    unsafe {
        match dots.rows {
            1 => dots_of_tiles::<S, P, 1, 4>(dots),
            2 => dots_of_tiles::<S, P, 2, 4>(dots),
            _ => dots_of_tiles::<S, P, TILE_ROWS, 2>(dots),
        }
    }
}

/// [`Dots`] of up to R rows, C columns at a time.
#[inline(always)]
unsafe fn dots_of_tiles<S: Simd, const P: usize, const R: usize, const C: usize>(dots: &Dots) {
    let weights = dots.weights;
    let groups = weights.format.block as usize / (P * S::LANES);
    let blocks = dots.k / weights.format.block as usize;
    let mut parameters = [const {
        Parameters {
            zeros: [0.0; PARAMETERS],
            scales: [0.0; PARAMETERS],
        }
    }; C];
    // SAFETY: as for `dots`. Rows and columns after the last are the last ones.
    unsafe {
        let rows: [*const f32; R] =
            std::array::from_fn(|row| dots.left.add(row.min(dots.rows - 1) * dots.k));
        for first in dots.columns.clone().step_by(C) {
            let last = dots.columns.end - 1;
            let columns: [usize; C] = std::array::from_fn(|column| (first + column).min(last));
            let numbers = columns
                .map(|column| (weights.numbers).wrapping_offset(column as isize * weights.stride));
            let mut sums = [[S::zero(); C]; R];
            for start in (0..blocks).step_by(PARAMETERS) {
                let count = PARAMETERS.min(blocks - start);
                for (parameters, &column) in parameters.iter_mut().zip(&columns) {
                    weights.parameters::<S, P>(column, (start, count), parameters);
                }
                for block in 0..count {
                    let at = (start + block) * groups * S::LANES;
                    for column in 0..C {
                        let zero = S::splat(&parameters[column].zeros[block]);
                        let mut own = [S::zero(); R];
                        for group in 0..groups {
                            let at = at + group * S::LANES;
                            let numbers = numbers[column].add(at);
                            for part in 0..P {
                                let number = S::sub(number::<S, P>(numbers, part), zero);
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
            let count = C.min(dots.columns.end - first);
            for (row, sums) in sums.iter().enumerate().take(dots.rows) {
                let to = dots.to.add(row * dots.stride + first - dots.columns.start);
                for (column, &sum) in sums.iter().enumerate().take(count) {
                    *to.add(column) = total::<S>(sum);
                }
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
