//! Tensors of numbers in regular order, and grids of them.

use std::panic::Location;

use slabwise_kernels::dtype::DType;
use slabwise_kernels::scalar::{ScalarOp, Value};
use slabwise_kernels::size::Size;
use slabwise_kernels::spec::Dims;

use super::Trace;
use super::handle::Tensor;
use crate::graph::Graph;
use crate::ops::{GraphBuilder, NodeId, Op};

impl Trace {
    /// `start, start + step, …` before `end`: i32. A negative step counts down.
    ///
    /// ```
    /// # use slabwise::prelude::*;
    /// let trace = Trace::inference();
    /// assert_eq!(trace.range(10, 3, -2).len(0), Some(4)); // 10, 8, 6, 4
    /// ```
    #[track_caller]
    pub fn range(&self, start: i32, end: i32, step: i32) -> Tensor<'_> {
        self.record(Location::caller(), &[], |g, _| {
            let [from, to, by] = [start, end, step].map(i64::from);
            if by == 0 {
                return Err(format!("range from {start} to {end} by 0 has no end"));
            }
            let count = if by > 0 {
                to - from + by - 1
            } else {
                to - from + by + 1
            } / by;
            let places = places(g, count.max(0))?;
            let like = g.dims(places).clone();
            let [start, step] = [start, step].map(|n| repeated(g, Value::I32(n), &like));
            let moved = g.mul(places, step);
            Ok(g.add(moved, start))
        })
    }

    /// `start, start + step, …` before `end`: f32, as many as PyTorch's `arange` gives for these
    /// numbers, ⌈(`end` − `start`)/`step`⌉ in f64.
    #[track_caller]
    pub fn range_f32(&self, start: f64, end: f64, step: f64) -> Tensor<'_> {
        self.record(Location::caller(), &[], |g, _| {
            let count = ((end - start) / step).ceil();
            if step == 0.0 || !count.is_finite() {
                return Err(format!("range from {start} to {end} by {step} has no end"));
            }
            let places = places(g, count.max(0.0) as i64)?;
            line(g, places, start as f32, step as f32)
        })
    }

    /// `n` numbers at equal distances from `start` to `end`, both of which are among them: f32.
    #[track_caller]
    pub fn linspace(&self, start: f32, end: f32, n: usize) -> Tensor<'_> {
        self.record(Location::caller(), &[], |g, _| {
            let count = i64::try_from(n).unwrap_or(i64::MAX);
            let places = places(g, count)?;
            let step = (end - start) / n.saturating_sub(1).max(1) as f32;
            let ahead = line(g, places, start, step)?;
            if n < 2 {
                return Ok(ahead);
            }
            // The second half counts from the end, so that the last number is exact.
            let like = g.dims(places).clone();
            let last = repeated(g, Value::I32((count - 1) as i32), &like);
            let left = g.scalar(ScalarOp::Sub, &[last, places]);
            let back = line(g, left, end, -step)?;
            let half = repeated(g, Value::I32((count / 2) as i32), &like);
            let first = g.scalar(ScalarOp::Lt, &[places, half]);
            Ok(g.scalar(ScalarOp::Select, &[first, ahead, back]))
        })
    }

    /// The matrix `[rows, columns]` (f32) of ones where both positions are equal, else zeros.
    #[track_caller]
    pub fn eye(&self, rows: usize, columns: usize) -> Tensor<'_> {
        self.ones((rows, columns)).tril(0).triu(0)
    }

    /// Vectors repeated to the grid of all their combinations: result i has the values of vector i
    /// along axis i (PyTorch's `indexing="ij"`).
    #[track_caller]
    pub fn meshgrid<'t>(&'t self, vectors: &[Tensor<'t>]) -> Vec<Tensor<'t>> {
        let at = Location::caller();
        let mut grids = Vec::new();
        for axis in 0..vectors.len() {
            grids.push(self.record(at, vectors, |g, ids| {
                let mut dims = Dims::new();
                for &id in ids {
                    let &[n] = g.dims(id).as_slice() else {
                        return Err(format!(
                            "meshgrid of {}: vectors are needed",
                            g.symbols.show(g.dims(id))
                        ));
                    };
                    dims.push(n);
                }
                let mut column: Dims = dims.iter().map(|_| Size::ONE).collect();
                column[axis] = dims[axis];
                let column = g.reshape(ids[axis], &column);
                Ok(g.broadcast(column, &dims))
            }));
        }
        grids
    }
}

/// 0, 1, … n − 1, as i32.
fn places(g: &mut Graph, n: i64) -> Result<NodeId, String> {
    let dims = Dims::from_slice(&[Size::fixed(n)]);
    super::countable("a range", &g.symbols, &dims)?;
    let strides = Dims::from_slice(&[Size::ONE]);
    Ok(g.emit(Op::Index(strides), &[], DType::I32, dims))
}

fn repeated(g: &mut Graph, value: Value, dims: &Dims) -> NodeId {
    let dtype = value.lane().stored();
    let one = g.emit(Op::Const(value), &[], dtype, Dims::new());
    g.broadcast(one, dims)
}

/// start + place·step
fn line(g: &mut Graph, places: NodeId, start: f32, step: f32) -> Result<NodeId, String> {
    let like = g.dims(places).clone();
    let places = g.cast(places, DType::F32);
    let [start, step] = [start, step].map(|n| repeated(g, Value::F32(n), &like));
    let moved = g.mul(places, step);
    Ok(g.add(moved, start))
}
