//! Losses of classes.

use slabwise::DType;
use slabwise::tensor::{CrossEntropy, Reduction};

use super::Run;
use crate::call::{Call, result};

pub const OPERATORS: &[(&str, Run)] = &[
    ("NegativeLogLikelihoodLoss", |c| {
        let losses = c.float(0)?.nll(c.x(1)?.cast(DType::I32), options(c)?);
        c.same(losses)
    }),
    ("SoftmaxCrossEntropyLoss", |c| {
        let scores = c.float(0)?;
        let labels = c.x(1)?.cast(DType::I32);
        let mut all = c.same(scores.cross_entropy_with(labels, options(c)?))?;
        if c.outputs > 1 {
            all.push(result(c.element(0)?, scores.log_softmax(1)));
        }
        Ok(all)
    }),
];

/// Classes are axis 1, as in PyTorch.
fn options<'t>(call: &Call<'_, 't>) -> Result<CrossEntropy<'t>, String> {
    let ignore = match call.has("ignore_index") {
        true => {
            let label = call.int("ignore_index", 0);
            let label = i32::try_from(label);
            Some(label.map_err(|_| "its ignore_index leaves 32 bits")?)
        }
        false => None,
    };
    let reduction = match &*call.text("reduction", "mean") {
        "none" => Reduction::None,
        "sum" => Reduction::Sum,
        "mean" => Reduction::Mean,
        other => return Err(format!("reduction \"{other}\"")),
    };
    Ok(CrossEntropy {
        class_axis: Some(1),
        ignore,
        weights: call.optional_float(2)?,
        smoothing: 0.0,
        reduction,
    })
}
