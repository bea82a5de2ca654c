//! The rows of one head of an operand.

use std::ops::Range;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::Matrix;
use crate::cpu::pointwise::OperandView;
use crate::cpu::tile::prefetch;
use crate::dtype::DType;
use crate::size::Size;
use crate::spec::Operand;

/// Rows from the one that is copied to the one that is requested.
const AHEAD: usize = 8;
/// Bytes of a cache line.
const LINE: usize = 64;

/// Rows of `width` elements: of f32, or converted to it. Truth values are terms of scores: 0, and
/// −∞ for false.
#[derive(Clone, Copy)]
pub(super) struct Rows {
    at: *mut u8,
    pub dtype: DType,
    /// Elements between two rows, and between two elements of a row.
    pub stride: isize,
    pub step: isize,
    pub width: usize,
}

impl Rows {
    /// The rows at a point of the axes before `axis`, along which they are.
    pub fn new(view: &OperandView, at: &[usize], axis: usize, width: usize) -> Rows {
        Rows {
            at: view.address(view.offset(&at[..axis])),
            dtype: view.dtype,
            stride: view.strides[axis],
            step: view.strides[axis + 1],
            width,
        }
    }

    /// An element.
    fn at(&self, row: usize, column: usize) -> *mut u8 {
        let elements = row as isize * self.stride + column as isize * self.step;
        self.at
            .wrapping_offset(elements * self.dtype.bytes() as isize)
    }

    /// The first element of a row of f32.
    pub fn floats(&self, row: usize) -> *mut f32 {
        debug_assert_eq!(self.dtype, DType::F32);
        self.at(row, 0).cast()
    }

    /// Some columns of these rows.
    pub fn columns(&self, columns: Range<usize>) -> Rows {
        Rows {
            at: self.at(0, columns.start),
            width: columns.len(),
            ..*self
        }
    }

    /// One of so many rows, from the first on.
    pub fn every(&self, count: usize, first: usize) -> Rows {
        Rows {
            at: self.at(first, 0),
            stride: self.stride * count as isize,
            ..*self
        }
    }

    /// Requests some rows.
    pub fn request(&self, rows: Range<usize>) {
        if self.step == 1 {
            for row in rows {
                let at = self.at(row, 0);
                for line in (0..self.width * self.dtype.bytes()).step_by(LINE) {
                    prefetch(at.wrapping_add(line).cast());
                }
            }
        }
    }

    /// The rows as a contiguous matrix: their copies, if there are any.
    pub fn matrix(&self, copies: Option<*mut f32>) -> Matrix {
        Matrix {
            at: copies.unwrap_or(self.at.cast()),
            stride: self.width,
            width: self.width,
        }
    }

    /// Copies some rows to those of a matrix whose rows are `stride` elements apart.
    ///
    /// # Safety
    /// The rows may be read, and those of the matrix written.
    pub unsafe fn copy(&self, rows: Range<usize>, to: *mut f32, stride: usize) {
        for row in rows {
            // SAFETY: the caller's promise.
            unsafe { self.read(row, to.wrapping_add(row * stride)) };
        }
    }

    /// Copies a row to contiguous memory.
    ///
    /// # Safety
    /// The row may be read, and as many elements written.
    pub unsafe fn read(&self, row: usize, to: *mut f32) {
        let (from, width) = (self.at(row, 0), self.width);
        // Rows are too far apart for the prefetchers of CPUs.
        self.request(row + AHEAD..row + AHEAD + 1);
        // SAFETY: the caller's promise; elements of a type have its size.
        unsafe {
            match self.dtype {
                DType::F32 if self.step == 1 => {
                    std::ptr::copy_nonoverlapping(from.cast(), to, width);
                }
                DType::F16 if self.step == 1 => {
                    let from = std::slice::from_raw_parts(from.cast::<f16>(), width);
                    from.convert_to_f32_slice(std::slice::from_raw_parts_mut(to, width));
                }
                DType::F16 => self.each::<f16>(from, to, f16::to_f32),
                DType::BF16 => self.each::<u16>(from, to, |x| f32::from_bits(u32::from(x) << 16)),
                DType::Bool => self.each::<u8>(from, to, |seen| match seen {
                    0 => f32::NEG_INFINITY,
                    _ => 0.0,
                }),
                _ => self.each::<f32>(from, to, |x| x),
            }
        }
    }

    /// Converts the elements of a row.
    ///
    /// # Safety
    /// See [`Rows::read`].
    #[inline(always)]
    unsafe fn each<T: Copy>(&self, from: *const u8, to: *mut f32, wide: impl Fn(T) -> f32) {
        let from: *const T = from.cast();
        // SAFETY: the caller's promise.
        unsafe {
            match self.step {
                1 => (0..self.width).for_each(|i| *to.add(i) = wide(*from.add(i))),
                step => {
                    (0..self.width).for_each(|i| *to.add(i) = wide(*from.offset(i as isize * step)))
                }
            }
        }
    }

    /// Copies a row from contiguous memory.
    ///
    /// # Safety
    /// The row may be written, and as many elements read.
    pub unsafe fn write(&self, row: usize, from: *const f32) {
        let (to, step) = (self.at(row, 0), self.step);
        let each = 0..self.width;
        // SAFETY: the caller's promise; elements of a type have its size.
        unsafe {
            match self.dtype {
                DType::F32 if step == 1 => {
                    std::ptr::copy_nonoverlapping(from, to.cast(), self.width);
                }
                DType::F16 if step == 1 => {
                    let to = std::slice::from_raw_parts_mut(to.cast::<f16>(), self.width);
                    to.convert_from_f32_slice(std::slice::from_raw_parts(from, self.width));
                }
                DType::F16 => {
                    let to: *mut f16 = to.cast();
                    each.for_each(|i| {
                        *to.offset(i as isize * step) = f16::from_f32(*from.add(i));
                    });
                }
                DType::BF16 => {
                    let to: *mut bf16 = to.cast();
                    each.for_each(|i| {
                        *to.offset(i as isize * step) = bf16::from_f32(*from.add(i));
                    });
                }
                _ => {
                    let to: *mut f32 = to.cast();
                    each.for_each(|i| *to.offset(i as isize * step) = *from.add(i));
                }
            }
        }
    }
}

/// Whether the rows of an operand, of so many elements, follow each other in f32.
pub(super) fn is_contiguous(operand: &Operand, width: Size) -> bool {
    match operand.strides.as_slice() {
        [.., stride, step] => operand.dtype == DType::F32 && step.is(1) && *stride == width,
        _ => false,
    }
}
