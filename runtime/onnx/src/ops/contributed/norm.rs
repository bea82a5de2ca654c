//! Normalizations of a sum, and the embedding of BERT.

use slabwise::{DType, Tensor};

use super::Run;
use crate::call::{Call, Results, result};
use crate::element::Element;

pub const OPERATORS: &[(&str, Run)] = &[
    ("EmbedLayerNormalization", embedded),
    ("SkipLayerNormalization", |c| {
        let sum = skipped(c, 4)?;
        let y = layer_norm(c, sum, 2, 3)?;
        let last = sum.rank().saturating_sub(1);
        let spread = (sum.var_keep(last, 0) + c.f("epsilon", EPSILON)).rsqrt();
        named(c, [y, sum.mean_keep(last), spread, sum])
    }),
    ("SkipSimplifiedLayerNormalization", |c| {
        let sum = skipped(c, 3)?;
        let last = sum.rank().saturating_sub(1);
        let spread = ((sum * sum).mean_keep(last) + c.f("epsilon", EPSILON)).rsqrt();
        let y = sum * spread * c.float(2)?;
        named(c, [y, sum.mean_keep(last), spread, sum])
    }),
];

/// The default of the attribute `epsilon`.
const EPSILON: f32 = 1e-12;

/// The first two inputs and, if it is given, the bias at `bias`, added.
fn skipped<'t>(call: &Call<'_, 't>, bias: usize) -> Result<Tensor<'t>, String> {
    let sum = call.float(0)? + call.float(1)?;
    Ok(call.optional_float(bias)?.map_or(sum, |bias| sum + bias))
}

/// The normalization of the last axis, with the inputs of these numbers as its scale and bias.
fn layer_norm<'t>(
    call: &Call<'_, 't>,
    x: Tensor<'t>,
    scale: usize,
    bias: usize,
) -> Result<Tensor<'t>, String> {
    let normal = x.normalize(x.rank().saturating_sub(1), call.f("epsilon", EPSILON));
    let y = normal * call.float(scale)?;
    Ok(call.optional_float(bias)?.map_or(y, |bias| y + bias))
}

/// As many of the results as the node names: result, mean, inverse deviation and sum.
fn named<'t>(call: &Call<'_, 't>, all: [Tensor<'t>; 4]) -> Results<'t> {
    let element = call.element(0)?;
    let elements = [element, Element::F32, Element::F32, element];
    let all = elements.into_iter().zip(all).take(call.outputs);
    Ok(all.map(|(element, x)| result(element, x)).collect())
}

fn embedded<'t>(call: &Call<'_, 't>) -> Results<'t> {
    let ids = call.x(0)?.cast(DType::I32);
    if ids.rank() != 2 {
        return Err(format!("ids of {} axes where 2 are needed", ids.rank()));
    }
    let places = match call.optional(8)? {
        Some(places) => places.cast(DType::I32),
        None => call.trace.arange(ids.dim(1)),
    };
    let mut sum = call.float(2)?.embed(ids) + call.float(3)?.embed(places);
    if let (Some(segments), Some(table)) = (call.optional(1)?, call.optional_float(4)?) {
        sum = sum + table.embed(segments.cast(DType::I32));
    }
    let y = layer_norm(call, sum, 5, 6)?;
    let words = match call.optional(7)? {
        Some(mask) => mask.cast(DType::I32).sum_over(1),
        None => call.trace.full(0.0, DType::I32, (ids.dim(0),)),
    };
    let element = call.element(2)?;
    let all = [(element, y), (Element::I32, words), (element, sum)];
    let all = all.into_iter().take(call.outputs);
    Ok(all.map(|(element, x)| result(element, x)).collect())
}
