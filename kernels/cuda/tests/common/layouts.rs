//! Operands with contiguous and other layouts.

use slabwise_kernels::dtype::DType;
use slabwise_kernels::size::Size;
use slabwise_kernels::spec::{Dims, Operand};

use super::Choices;

/// Fixed sizes.
pub fn sizes(dims: &[i64]) -> Dims {
    dims.iter().map(|&d| Size::fixed(d)).collect()
}

/// A contiguous operand over `dims`.
pub fn contiguous(dtype: DType, dims: &[i64]) -> Operand {
    Operand::contiguous(dtype, &sizes(dims)).expect("small")
}

/// An operand over `dims`: contiguous, or with its axes in another order, gaps and an offset.
pub fn layout(choices: &mut Choices, dtype: DType, dims: &[i64], contiguous: bool) -> Operand {
    let mut operand = self::contiguous(dtype, dims);
    if contiguous {
        return operand;
    }
    let mut order: Vec<usize> = (0..dims.len()).collect();
    for i in (1..order.len()).rev() {
        order.swap(i, choices.below(i + 1));
    }
    operand.offset = Size::fixed(choices.below(5) as i64);
    let mut stride = 1 + choices.below(2) as i64;
    for &axis in order.iter().rev() {
        operand.strides[axis] = Size::fixed(stride);
        stride *= dims[axis].max(1) + choices.below(2) as i64;
    }
    operand
}

/// As `layout`, broadcast along some axes.
pub fn repeating(choices: &mut Choices, dtype: DType, dims: &[i64], contiguous: bool) -> Operand {
    let own: Vec<i64> = dims
        .iter()
        .map(|&d| if choices.once_in(2) { 1 } else { d })
        .collect();
    let mut operand = layout(choices, dtype, &own, contiguous);
    for (axis, &d) in own.iter().enumerate() {
        if d == 1 {
            operand.strides[axis] = Size::ZERO;
        }
    }
    operand
}
