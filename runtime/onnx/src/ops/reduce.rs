//! Reductions.

use slabwise::shape::Size;
use slabwise::{DType, Tensor};

use super::Run;
use super::elementwise::lane;
use crate::call::{Call, Results, resolve_all, shape_of, sizes, to_f32};

pub const OPERATORS: &[(&str, Run)] = &[
    ("ReduceL1", |c| {
        reduce(c, 18, |x, axes| x.abs().sum_keep(axes))
    }),
    ("ReduceL2", |c| {
        reduce(c, 18, |x, axes| to_f32(x).square().sum_keep(axes).sqrt())
    }),
    ("ReduceLogSum", |c| {
        reduce(c, 18, |x, axes| to_f32(x).sum_keep(axes).ln())
    }),
    ("ReduceLogSumExp", |c| {
        reduce(c, 18, |x, axes| {
            let x = to_f32(x);
            let empty = axes.iter().any(|&axis| x.len(axis) == Some(0));
            if empty {
                return x.exp().sum_keep(axes).ln();
            }
            let most = x.max_keep(axes).detach();
            // The largest may be infinite, and the difference of two infinities is none.
            let most = most.is_finite().select(most, 0.0);
            (x - most).exp().sum_keep(axes).ln() + most
        })
    }),
    ("ReduceMax", |c| extreme(c, true)),
    ("ReduceMean", |c| {
        reduce(c, 18, |x, axes| to_f32(x).mean_keep(axes))
    }),
    ("ReduceMin", |c| extreme(c, false)),
    ("ReduceProd", |c| reduce(c, 18, |x, axes| x.prod_keep(axes))),
    ("ReduceSum", |c| reduce(c, 13, |x, axes| x.sum_keep(axes))),
    ("ReduceSumSquare", |c| {
        reduce(c, 18, |x, axes| (x * x).sum_keep(axes))
    }),
];

fn reduce<'t>(
    call: &Call<'_, 't>,
    since: i64,
    f: impl Fn(Tensor<'t>, &[usize]) -> Tensor<'t>,
) -> Results<'t> {
    let x = lane(call, 0)?;
    let shape = call.dims(0)?;
    let axes = call.axes(since, 1)?.unwrap_or_default();
    if axes.is_empty() && call.flag("noop_with_empty_axes") {
        return call.same(f(x, &[]));
    }
    let mut axes = match axes.is_empty() {
        true => (0..shape.len()).collect(),
        false => resolve_all(&axes, shape.len())?,
    };
    axes.sort_unstable();
    let kept = f(x, &axes);
    if call.int("keepdims", 1) != 0 {
        return call.same(kept);
    }
    let rest: Vec<Size> = (0..shape.len())
        .filter(|axis| !axes.contains(axis))
        .map(|axis| shape[axis])
        .collect();
    call.same(kept.reshape(shape_of(&rest)))
}

/// The largest or smallest element; of none the identity, as ONNX has it.
fn extreme<'t>(call: &Call<'_, 't>, largest: bool) -> Results<'t> {
    let element = call.element(0)?;
    reduce(call, 18, |x, axes| {
        let x = match x.dtype() {
            DType::Bool => x.cast(DType::I32),
            _ => x,
        };
        if axes.iter().any(|&axis| x.len(axis) == Some(0)) {
            let (low, high) = element.range();
            let identity = match (element.is_float(), largest) {
                (true, true) => f32::NEG_INFINITY,
                (true, false) => f32::INFINITY,
                (false, true) => low.max(i32::MIN.into()) as f32,
                (false, false) => high.min(i32::MAX.into()) as f32,
            };
            let mut shape = sizes(x);
            for &axis in axes {
                shape[axis] = Size::ONE;
            }
            let shape = shape_of(&shape);
            return call.trace.full(identity, x.dtype(), shape);
        }
        match largest {
            true => x.max_keep(axes),
            false => x.min_keep(axes),
        }
    })
}
