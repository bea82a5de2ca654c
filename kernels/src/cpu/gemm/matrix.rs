//! The operands of a matrix product as strided matrices.

use crate::size::Env;
use crate::spec::Operand;

/// An operand: its address, and elements between neighbours along its last two axes.
pub(super) struct Matrix<'a> {
    pub operand: &'a Operand,
    at: *const f32,
    pub strides: [isize; 2],
}

impl<'a> Matrix<'a> {
    pub fn new(operand: &'a Operand, at: *mut u8, env: &Env) -> Self {
        let rank = operand.strides.len();
        let stride = |axis: usize| operand.strides[axis].at(env) as isize;
        let at = at
            .cast::<f32>()
            .wrapping_offset(operand.offset.at(env) as isize);
        Matrix {
            operand,
            at,
            strides: [stride(rank - 2), stride(rank - 1)],
        }
    }

    pub fn transposed(self) -> Self {
        let [rows, columns] = self.strides;
        Matrix {
            strides: [columns, rows],
            ..self
        }
    }

    /// Element (i, j) of the matrix at these batch coordinates.
    pub fn at(&self, batch: &[usize], i: usize, j: usize, env: &Env) -> *const f32 {
        let group: isize = batch
            .iter()
            .zip(&self.operand.strides)
            .map(|(&c, s)| c as isize * s.at(env) as isize)
            .sum();
        self.at
            .wrapping_offset(group + i as isize * self.strides[0] + j as isize * self.strides[1])
    }
}
