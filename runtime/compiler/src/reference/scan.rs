//! Scans: the body's graph is evaluated step by step.

use slabwise_kernels::size::Env;

use super::{Array, Fault, Precision, evaluate};
use crate::graph::{Body, Feed};

/// The results of a scan over these operands, those of all steps along a first axis.
pub(super) fn results(
    body: &Body,
    operands: &[&Array],
    env: &Env,
    precision: Precision,
) -> Result<Vec<Array>, Fault> {
    let steps = body.steps as usize;
    let first = body.first_operands();
    let begin = body.feeds.iter().zip(&first);
    let mut carries: Vec<Array> = begin
        .filter(|(feed, _)| **feed == Feed::Carry)
        .map(|(_, &at)| operands[at].clone())
        .collect();
    let mut parts: Vec<Vec<Option<Array>>> = vec![vec![None; steps]; body.graph.outputs.len()];
    for step in 0..steps {
        let time = if body.reverse { steps - 1 - step } else { step };
        let mut next = carries.iter();
        let mut inputs = Vec::with_capacity(body.feeds.len());
        for (feed, &at) in body.feeds.iter().zip(&first) {
            let input =
                match feed {
                    Feed::Carry => next.next().cloned(),
                    Feed::Step => Some(part(operands[at], time)),
                    Feed::Neighbour { later } => {
                        let other = if *later {
                            Some(time + 1).filter(|&t| t < steps)
                        } else {
                            time.checked_sub(1)
                        };
                        Some(other.map_or_else(
                            || operands[at + 1].clone(),
                            |time| part(operands[at], time),
                        ))
                    }
                    Feed::Whole => Some(operands[at].clone()),
                };
            inputs.extend(input);
        }
        let run = evaluate(&body.graph, env, &inputs, &[], precision)?;
        for (carry, output) in carries.iter_mut().zip(&run.outputs) {
            *carry = output.clone();
        }
        for (parts, output) in parts.iter_mut().zip(run.outputs) {
            parts[time] = Some(output);
        }
    }
    let joined = |(parts, kept): (Vec<Option<Array>>, Option<usize>)| {
        let mut parts: Vec<Array> = parts.into_iter().flatten().collect();
        if let Some(only) = kept {
            parts = vec![parts.swap_remove(only)];
        }
        let mut dims = vec![parts.len()];
        dims.extend(&parts[0].dims);
        Array {
            dtype: parts[0].dtype,
            dims,
            values: parts.iter().flat_map(|p| &p.values).copied().collect(),
        }
    };
    let kept = (0..parts.len()).map(|result| {
        let planned = body.planned.as_ref()?;
        (planned.kept[result] == crate::graph::Kept::Last).then_some(body.last_time() as usize)
    });
    let kept: Vec<Option<usize>> = kept.collect();
    Ok(parts.into_iter().zip(kept).map(joined).collect())
}

/// The part of an array at an index of its first axis.
fn part(of: &Array, time: usize) -> Array {
    let dims = of.dims[1..].to_vec();
    let size: usize = dims.iter().product();
    Array {
        dtype: of.dtype,
        dims,
        values: of.values[time * size..][..size].to_vec(),
    }
}
