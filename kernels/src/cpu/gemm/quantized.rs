//! Weights that are quantized in blocks (see [`Quantization`]), which products decode as they read
//! them, so that no decoded copy of them is in memory.

use std::ops::Range;

use super::matrix::Matrix;
use super::micro::Micro;
use super::pack::Source;
use super::simd::Simd;
use crate::cpu::{Isa, Launch};
use crate::dtype::DType;
use crate::size::Env;
use crate::spec::{Body, Operand, Quantization, Spec};

/// Steps that are decoded at a time for a panel.
const STEPS: usize = 64;
/// Elements of a decoded row: so many steps, and those of the vectors that they begin and end in,
/// of at most 16 bytes of four numbers each.
const DECODED: usize = STEPS + 2 * 64;
/// Blocks of a column whose zero points and scales are read at a time; a multiple of the numbers in a
/// vector of bytes.
pub(super) const PARAMETERS: usize = 64;
/// Columns of the widest panel.
const PANEL_COLUMNS_MAX: usize = 32;

/// The kernels that decode weights of a format: those of the instruction set with the widest vectors
/// of bytes of which blocks are whole multiples.
pub(super) fn decoder(isa: Isa, format: Quantization) -> &'static Micro {
    let bytes = (format.block / format.per_byte()) as usize;
    let widest = Micro::of(isa);
    match bytes.is_multiple_of(widest.lanes) {
        true => widest,
        false => Micro::of(isa.min(Isa::Avx2)),
    }
}

/// The zero points and scales of some blocks of a column.
pub(in super::super) struct Parameters {
    pub zeros: [f32; PARAMETERS],
    pub scales: [f32; PARAMETERS],
}

impl Parameters {
    pub const NONE: Parameters = Parameters {
        zeros: [0.0; PARAMETERS],
        scales: [0.0; PARAMETERS],
    };
}

/// Quantized weights in memory.
pub(in super::super) struct Weights {
    pub format: Quantization,
    /// Decodes them.
    micro: &'static Micro,
    numbers: Rows<u8>,
    scales: Rows<f32>,
    zeros: Zeros,
}

/// Rows of bytes, or of a number for each block: address, and elements from row to row and from one to
/// the next.
#[derive(Clone, Copy)]
struct Rows<T> {
    at: *const T,
    strides: [isize; 2],
}

impl<T: Copy> Rows<T> {
    fn new(operand: &Operand, at: *mut u8, env: &Env) -> Self {
        let matrix = Matrix::new(operand, at, env);
        Rows {
            at: matrix.first(env).cast(),
            strides: matrix.strides,
        }
    }

    fn row(self, row: usize) -> Self {
        let at = self.at.wrapping_offset(row as isize * self.strides[0]);
        Rows { at, ..self }
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
    Floats(Rows<f32>),
    Packed(Rows<u8>, Quantization),
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
    pub fn new(spec: &Spec, launch: &Launch, micro: &'static Micro) -> Weights {
        let Body::QuantizedMatmul(body) = &spec.body else {
            unreachable!("checked when it was prepared")
        };
        let env = launch.env;
        let zeros = match &body.zeros {
            None => Zeros::Middle(body.format.middle() as f32),
            Some(zeros) if zeros.dtype == DType::U8 => {
                Zeros::Packed(Rows::new(zeros, launch.args[3], env), body.format)
            }
            Some(zeros) => Zeros::Floats(Rows::new(zeros, launch.args[3], env)),
        };
        Weights {
            format: body.format,
            micro,
            numbers: Rows::new(&body.numbers, launch.args[1], env),
            scales: Rows::new(&body.scales, launch.args[2], env),
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

    /// The packed numbers of a column.
    pub fn column(&self, column: usize) -> *const u8 {
        self.numbers.row(column).at
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
    pub unsafe fn parameters<S: Simd, const P: usize>(
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
            let numbers = weights.column(row);
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
pub(super) unsafe fn number<S: Simd, const P: usize>(numbers: *const u8, part: usize) -> S::V {
    let bits = 8 / P;
    // SAFETY: the caller enables S's instruction set and gives a vector's lanes of bytes.
    unsafe { S::bits(numbers, (part * bits) as u32, (1 << bits) - 1) }
}

// SAFETY: weights are only read.
unsafe impl Sync for Weights {}
