//! The rows of one head of an operand.

use std::ops::Range;

use super::Matrix;
use crate::cpu::pointwise::OperandView;
use crate::cpu::tile::prefetch;
use crate::size::Size;
use crate::spec::Operand;

/// Rows from the one that is copied to the one that is requested.
const AHEAD: usize = 8;
/// Elements of a cache line.
const LINE: usize = 16;

/// Rows of `width` elements of f32.
#[derive(Clone, Copy)]
pub(super) struct Rows {
    at: *mut f32,
    /// Elements between two rows, and between two elements of a row.
    pub stride: isize,
    pub step: isize,
    pub width: usize,
}

impl Rows {
    /// The rows at a point of the axes before `axis`, along which they are.
    pub fn new(view: &OperandView, at: &[usize], axis: usize, width: usize) -> Rows {
        Rows {
            at: view.element(view.offset(&at[..axis])),
            stride: view.strides[axis],
            step: view.strides[axis + 1],
            width,
        }
    }

    /// The first element of a row.
    pub fn at(&self, row: usize) -> *mut f32 {
        self.at.wrapping_offset(row as isize * self.stride)
    }

    /// Requests some rows.
    pub fn request(&self, rows: Range<usize>) {
        if self.step == 1 {
            for row in rows {
                for line in (0..self.width).step_by(LINE) {
                    prefetch(self.at(row).wrapping_add(line).cast());
                }
            }
        }
    }

    /// The rows as a contiguous matrix: their copies, if there are any.
    pub fn matrix(&self, copies: Option<*mut f32>) -> Matrix {
        Matrix {
            at: copies.unwrap_or(self.at),
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
        let from = self.at(row);
        // SAFETY: the caller's promise.
        unsafe {
            if self.step == 1 {
                // Rows are too far apart for the prefetchers of CPUs.
                self.request(row + AHEAD..row + AHEAD + 1);
                return std::ptr::copy_nonoverlapping(from, to, self.width);
            }
            for i in 0..self.width {
                *to.add(i) = *from.offset(i as isize * self.step);
            }
        }
    }

    /// Copies a row from contiguous memory.
    ///
    /// # Safety
    /// The row may be written, and as many elements read.
    pub unsafe fn write(&self, row: usize, from: *const f32) {
        let to = self.at(row);
        // SAFETY: the caller's promise.
        unsafe {
            if self.step == 1 {
                return std::ptr::copy_nonoverlapping(from, to, self.width);
            }
            for i in 0..self.width {
                *to.offset(i as isize * self.step) = *from.add(i);
            }
        }
    }
}

/// Whether the rows of an operand, of so many elements, follow each other.
pub(super) fn is_contiguous(operand: &Operand, width: Size) -> bool {
    match operand.strides.as_slice() {
        [.., stride, step] => step.is(1) && *stride == width,
        _ => false,
    }
}
