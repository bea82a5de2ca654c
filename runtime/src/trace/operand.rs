//! Operands of operations: tensors, parameters and numbers.

use slabwise_kernels::dtype::{DType, Lane};
use slabwise_kernels::scalar::Value;
use slabwise_kernels::spec::Dims;

use super::handle::Tensor;
use super::{Line, Trace};
use crate::ops::{GraphBuilder, Op};
use crate::params::Param;

/// An operand of an operation between tensors: a tensor, a parameter, or a number, which takes the
/// tensor's type.
pub trait Operand<'t>: Lift<'t> {}

mod sealed {
    use super::{DType, Line, Tensor, Trace};

    pub trait Lift<'t>: Sized {
        /// The operand's type; `None` if it takes the type of the other operand.
        fn own_type(&self) -> Option<DType>;

        /// As a tensor; `dtype` is the type of the other operand.
        fn lift(self, trace: &'t Trace, dtype: DType, at: Line) -> Tensor<'t>;
    }
}
pub(crate) use sealed::Lift;

impl<'t> Operand<'t> for Tensor<'t> {}
impl<'t> Lift<'t> for Tensor<'t> {
    fn own_type(&self) -> Option<DType> {
        Some(self.dtype())
    }

    fn lift(self, _: &'t Trace, _: DType, _: Line) -> Tensor<'t> {
        self
    }
}

impl<'t> Operand<'t> for &Param {}
impl<'t> Lift<'t> for &Param {
    fn own_type(&self) -> Option<DType> {
        Some(DType::F32)
    }

    fn lift(self, trace: &'t Trace, _: DType, at: Line) -> Tensor<'t> {
        trace.read_param(self, at)
    }
}

impl<'t> Operand<'t> for f32 {}
impl<'t> Lift<'t> for f32 {
    fn own_type(&self) -> Option<DType> {
        None
    }

    fn lift(self, trace: &'t Trace, dtype: DType, at: Line) -> Tensor<'t> {
        let dtype = computed(dtype);
        constant(trace, at, number(self, dtype), dtype)
    }
}

impl<'t> Operand<'t> for i32 {}
impl<'t> Lift<'t> for i32 {
    fn own_type(&self) -> Option<DType> {
        None
    }

    fn lift(self, trace: &'t Trace, dtype: DType, at: Line) -> Tensor<'t> {
        let dtype = computed(dtype);
        let value = match dtype.lane() {
            Lane::Bool => number(self as f32, dtype),
            lane => Ok(Value::I32(self).cast(lane)),
        };
        constant(trace, at, value, dtype)
    }
}

/// The type of arithmetic results on a type.
fn computed(dtype: DType) -> DType {
    dtype.lane().stored()
}

fn constant(trace: &Trace, at: Line, value: Result<Value, String>, dtype: DType) -> Tensor<'_> {
    trace.record(at, &[], |g, _| {
        Ok(g.emit(Op::Const(value?), &[], dtype, Dims::new()))
    })
}

/// A number as a value of a type; a number that the type cannot hold is refused, not changed.
pub(crate) fn number(value: f32, dtype: DType) -> Result<Value, String> {
    // As a float, the bound above i32 is exact only as 2³¹, which is excluded.
    let fits = match dtype {
        DType::F32 | DType::F16 | DType::BF16 => true,
        DType::I32 => value.fract() == 0.0 && (-2_147_483_648.0..2_147_483_648.0).contains(&value),
        DType::U8 => value.fract() == 0.0 && (0.0..256.0).contains(&value),
        DType::Bool => value == 0.0 || value == 1.0,
    };
    if fits {
        Ok(dtype.hold(Value::F32(value)))
    } else {
        Err(format!("{value} is not a value of type {dtype}"))
    }
}
