//! Operators that write at indices.

use slabwise::{DType, Scatter, Tensor};

use super::Run;
use super::elementwise::lane;
use super::index::{positive, positive_rows};
use crate::call::{Call, Results, sizes};
use crate::element::Element;

pub const OPERATORS: &[(&str, Run)] = &[
    ("Scatter", elements),
    ("ScatterElements", elements),
    ("ScatterND", |c| {
        let (x, values) = operands(c)?;
        let index = positive_rows(c, c.x(1)?, 0)?;
        c.same(x.scatter_nd(index, values, reduction(c)?))
    }),
    ("TensorScatter", tensor_scatter),
];

fn reduction(call: &Call<'_, '_>) -> Result<Scatter, String> {
    Ok(match &*call.text("reduction", "none") {
        "none" => Scatter::Set,
        "add" => Scatter::Add,
        "mul" => Scatter::Mul,
        "min" => Scatter::Min,
        "max" => Scatter::Max,
        other => return Err(format!("reduction \"{other}\"")),
    })
}

/// Data and values in a type that can be reduced.
fn operands<'t>(call: &Call<'_, 't>) -> Result<(Tensor<'t>, Tensor<'t>), String> {
    let int = |x: Tensor<'t>| match call.element(0) {
        Ok(Element::Bool) => x.cast(DType::I32),
        _ => x,
    };
    Ok((int(lane(call, 0)?), int(lane(call, 2)?)))
}

fn elements<'t>(call: &Call<'_, 't>) -> Results<'t> {
    let axis = call.axis("axis", 0)?;
    let (x, values) = operands(call)?;
    let index = positive(call, call.x(1)?, sizes(x)[axis])?;
    call.same(x.scatter(axis, index, values, reduction(call)?))
}

/// A cache `[batch, …]` with new rows along an axis, from a position of its own for each batch.
fn tensor_scatter<'t>(call: &Call<'_, 't>) -> Results<'t> {
    let (cache, update) = (lane(call, 0)?, lane(call, 1)?);
    let axis = call.axis("axis", -2)?;
    let (shape, part) = (call.shape(0)?, call.shape(1)?);
    if part.len() != shape.len() {
        return Err(format!("an update of {part:?} for a cache of {shape:?}"));
    }
    let (n, new) = (shape[axis], part[axis]);
    let along = |axis: usize, of: usize, x: Tensor<'t>| {
        let mut to = vec![1usize; shape.len()];
        to[axis] = of;
        x.reshape(&to[..])
    };
    let start = match call.optional(2)? {
        Some(start) => along(0, shape[0], start),
        None => along(0, 1, call.trace.full(0.0, DType::I32, (1,))),
    };
    let place = start + along(axis, new, call.trace.arange(new).cast(DType::I32));
    let place = match &*call.text("mode", "linear") {
        "circular" => place.remainder(n as f32),
        _ => place,
    };
    let index = place.expand(&part[..]);
    call.same(cache.scatter(axis, index, update, Scatter::Set))
}
