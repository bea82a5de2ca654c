//! Tensors of known numbers.

use std::panic::Location;

use slabwise_kernels::dtype::DType;
use slabwise_kernels::size::Size;
use slabwise_kernels::spec::Dims;

use super::handle::Tensor;
use super::operand::number;
use super::{Trace, resolve};
use crate::ops::{GraphBuilder, Op};
use crate::shape::{Dim, Shape, Symbols, elements};

impl Trace {
    /// A tensor of one value. Numbers that the type cannot hold are mistakes.
    #[track_caller]
    pub fn full(&self, value: f32, dtype: DType, shape: impl Into<Shape>) -> Tensor<'_> {
        let shape = shape.into();
        self.record(Location::caller(), &[], |g, _| {
            let dims = resolve(&mut g.symbols, &shape).map_err(|why| format!("full: {why}"))?;
            let value = number(value, dtype)?;
            let one = g.emit(Op::Const(value), &[], dtype, Dims::new());
            Ok(g.broadcast(one, &dims))
        })
    }

    /// Zeros of type f32.
    #[track_caller]
    pub fn zeros(&self, shape: impl Into<Shape>) -> Tensor<'_> {
        self.full(0.0, DType::F32, shape)
    }

    /// Ones of type f32.
    #[track_caller]
    pub fn ones(&self, shape: impl Into<Shape>) -> Tensor<'_> {
        self.full(1.0, DType::F32, shape)
    }

    /// `0, 1, … n − 1`: i32 `[n]`.
    #[track_caller]
    pub fn arange(&self, n: impl Into<Dim>) -> Tensor<'_> {
        let n = n.into();
        self.record(Location::caller(), &[], |g, _| {
            let dims = resolve(&mut g.symbols, &Shape::from((n,)))
                .map_err(|why| format!("arange: {why}"))?;
            countable("arange", &g.symbols, &dims)?;
            Ok(g.emit(
                Op::Index(Dims::from_slice(&[Size::ONE])),
                &[],
                DType::I32,
                dims,
            ))
        })
    }
}

/// Refuses a shape with more elements than an i32 can number.
pub(crate) fn countable(what: &str, symbols: &Symbols, dims: &[Size]) -> Result<(), String> {
    match elements(dims).and_then(|n| n.checked_at(&symbols.bounds())) {
        Some(n) if n <= 1 << 31 => Ok(()),
        _ => Err(format!(
            "{what} {}: more than 2³¹ elements cannot be numbered",
            symbols.show(dims)
        )),
    }
}
