//! The operands of a matrix product as strided matrices.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::micro::Micro;
use super::pack::Source;
use crate::dtype::DType;
use crate::size::Env;
use crate::spec::Operand;

/// An operand: its address, and elements between neighbours along its last two axes.
pub(super) struct Matrix<'a> {
    pub operand: &'a Operand,
    at: *const u8,
    pub strides: [isize; 2],
}

impl<'a> Matrix<'a> {
    pub fn new(operand: &'a Operand, at: *mut u8, env: &Env) -> Self {
        let rank = operand.strides.len();
        let stride = |axis: usize| operand.strides[axis].at(env) as isize;
        let matrix = Matrix {
            operand,
            at,
            strides: [stride(rank - 2), stride(rank - 1)],
        };
        Matrix {
            at: matrix.offset(operand.offset.at(env) as isize),
            ..matrix
        }
    }

    pub fn transposed(self) -> Self {
        let [rows, columns] = self.strides;
        Matrix {
            strides: [columns, rows],
            ..self
        }
    }

    /// Whether its elements are f32, which kernels read where they are; halves are converted as
    /// they are packed.
    pub fn is_wide(&self) -> bool {
        self.operand.dtype == DType::F32
    }

    /// Its first element.
    pub fn first(&self, env: &Env) -> *const u8 {
        self.at(&[], 0, 0, env)
    }

    /// Element (i, j) of the matrix at these batch coordinates.
    pub fn at(&self, batch: &[usize], i: usize, j: usize, env: &Env) -> *const u8 {
        let group: isize = batch
            .iter()
            .zip(&self.operand.strides)
            .map(|(&c, s)| c as isize * s.at(env) as isize)
            .sum();
        self.offset(group + i as isize * self.strides[0] + j as isize * self.strides[1])
    }

    fn offset(&self, elements: isize) -> *const u8 {
        let bytes = self.operand.dtype.bytes() as isize;
        self.at.wrapping_offset(elements * bytes)
    }

    /// Packs a panel as [`Pack`](super::pack::Pack) does, from an address of this matrix: element i
    /// of step k lies `i·stride + k·step` elements after it.
    ///
    /// # Safety
    /// As for `Pack`: the elements may be read, and `depth · width` elements of `to` written.
    pub unsafe fn pack(
        &self,
        micro: &Micro,
        (at, [stride, step]): (*const u8, [isize; 2]),
        (count, depth): (usize, usize),
        (to, width): (*mut f32, usize),
    ) {
        // SAFETY: the caller's promise; the elements are of the operand's type.
        unsafe {
            match self.operand.dtype {
                DType::F16 => {
                    let from = (at.cast::<f16>(), [stride, step]);
                    halves(micro, from, (count, depth), (to, width));
                }
                DType::BF16 => {
                    let from = (at.cast::<bf16>(), [stride, step]);
                    halves(micro, from, (count, depth), (to, width));
                }
                _ => {
                    let at = at.cast();
                    (micro.pack)(Source { at, stride, step }, count, depth, to, width);
                }
            }
        }
    }
}

/// A type of 16 bits that f32 has all numbers of.
trait Half: Copy {
    fn wide(self) -> f32;
    fn wide_all(from: &[Self], to: &mut [f32]);
}

impl Half for f16 {
    fn wide(self) -> f32 {
        self.to_f32()
    }

    fn wide_all(from: &[Self], to: &mut [f32]) {
        from.convert_to_f32_slice(to);
    }
}

impl Half for bf16 {
    fn wide(self) -> f32 {
        self.to_f32()
    }

    fn wide_all(from: &[Self], to: &mut [f32]) {
        // The same conversion except for the payload of NaNs, and in vectors.
        for (to, from) in to.iter_mut().zip(from) {
            *to = f32::from_bits(u32::from(from.to_bits()) << 16);
        }
    }
}

/// Steps of rows that are converted at a time before they are transposed.
const STEPS: usize = 64;
/// Elements of the steps that are converted at a time: the rows of the widest micro-panel.
const ROWS: usize = 32;

/// [`Matrix::pack`] of halves.
///
/// # Safety
/// See [`Matrix::pack`].
unsafe fn halves<T: Half>(
    micro: &Micro,
    (at, [stride, step]): (*const T, [isize; 2]),
    (count, depth): (usize, usize),
    (to, width): (*mut f32, usize),
) {
    if stride == 1 {
        for k in 0..depth {
            // SAFETY: a step's elements are neighbours; the panel has a row for each step.
            let (from, to) = unsafe {
                let from = at.offset(k as isize * step);
                let to = to.add(k * width);
                to.write_bytes(0, width);
                (
                    std::slice::from_raw_parts(from, count),
                    std::slice::from_raw_parts_mut(to, count),
                )
            };
            T::wide_all(from, to);
        }
        return;
    }
    let mut rows = [0.0f32; STEPS * ROWS];
    for first in (0..depth).step_by(STEPS) {
        let steps = STEPS.min(depth - first);
        for (i, row) in rows.chunks_mut(STEPS).take(count).enumerate() {
            let at = at.wrapping_offset(i as isize * stride + first as isize * step);
            if step == 1 {
                // SAFETY: the steps of an element are neighbours.
                let from = unsafe { std::slice::from_raw_parts(at, steps) };
                T::wide_all(from, &mut row[..steps]);
            } else {
                for (k, slot) in row[..steps].iter_mut().enumerate() {
                    // SAFETY: the element lies inside the operand.
                    *slot = unsafe { *at.offset(k as isize * step) }.wide();
                }
            }
        }
        let from = Source {
            at: rows.as_ptr(),
            stride: STEPS as isize,
            step: 1,
        };
        // SAFETY: `count` rows of so many steps were written, and the panel has room for them.
        unsafe { (micro.pack)(from, count, steps, to.add(first * width), width) };
    }
}
