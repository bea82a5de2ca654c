//! Random numbers: each is a function of the session's seed, the step, the operation and the
//! element, so that a run can be repeated bit by bit, and a recomputed value is identical.

use std::f32::consts::TAU;
use std::panic::Location;

use slabwise_kernels::dtype::DType;
use slabwise_kernels::size::Size;
use slabwise_kernels::spec::Dims;

use super::{Line, Trace, countable, resolve};
use crate::graph::Graph;
use crate::ops::{GraphBuilder, NodeId, Op};
use crate::shape::Shape;
use crate::tensor::Tensor;

impl Trace {
    /// Uniform in [0, 1), f32. Different numbers in each step of a training trace, the same in each
    /// run of an inference trace.
    #[track_caller]
    pub fn uniform(&self, shape: impl Into<Shape>) -> Tensor<'_> {
        let shape = shape.into();
        self.draw(Location::caller(), None, |g| {
            resolve(&mut g.symbols, &shape).map_err(|why| format!("uniform: {why}"))
        })
    }

    /// Normal with mean 0 and variance 1, f32, by the transform of Box & Muller (1958): √(−2 ln
    /// u)·cos 2πv.
    #[track_caller]
    pub fn normal(&self, shape: impl Into<Shape>) -> Tensor<'_> {
        let shape = shape.into();
        let u = self.uniform(shape);
        let v = u.uniform_like();
        // 1 − u lies in (0, 1], where the logarithm is finite.
        ((1.0 - u).ln() * -2.0).sqrt() * (v * TAU).cos()
    }

    /// Uniform numbers of the shape `shape`, in the layer of `near`.
    fn draw<'t>(
        &'t self,
        at: Line,
        near: Option<Tensor<'t>>,
        shape: impl FnOnce(&mut Graph) -> Result<Dims, String>,
    ) -> Tensor<'t> {
        if near.is_some_and(Tensor::is_poisoned) {
            return self.poisoned();
        }
        let random = self.random_state(at);
        let stream = {
            let mut building = self.building.borrow_mut();
            building.streams += 1;
            building.streams - 1
        };
        let operands: Vec<Tensor<'t>> = std::iter::once(random).chain(near).collect();
        self.record(at, &operands, |g, ids| {
            let dims = shape(g)?;
            countable("uniform", &g.symbols, &dims)?;
            let index = row_major(g, &dims)?;
            Ok(g.emit(Op::Uniform { stream }, &[ids[0], index], DType::F32, dims))
        })
    }
}

impl<'t> Tensor<'t> {
    /// Uniform numbers in [0, 1) of this tensor's shape.
    #[track_caller]
    pub fn uniform_like(self) -> Tensor<'t> {
        self.trace.draw(Location::caller(), Some(self), |g| {
            Ok(g.dims(self.id).clone())
        })
    }
}

/// The number of each element in row-major order.
fn row_major(g: &mut Graph, dims: &Dims) -> Result<NodeId, String> {
    let mut strides = dims.clone();
    let mut stride = Size::ONE;
    for (slot, &len) in strides.iter_mut().zip(dims).rev() {
        *slot = stride;
        stride = stride
            .checked_mul(len)
            .ok_or("uniform: the number of elements has no form")?;
    }
    Ok(g.emit(Op::Index(strides), &[], DType::I32, dims.clone()))
}
