//! Results of tensor operations, against formulas in f64 written here, by the reference evaluator;
//! and the messages for mistakes.

mod axes;
mod methods;
mod mistakes;
mod order;
mod values;

use slabwise_kernels::dtype::DType;

use super::Tensor;
use crate::graph::Graph;
use crate::params::Init;
use crate::shape::Env;
use crate::trace::Trace;
use slabwise_compiler::reference::{Array, Evaluated, Fault, Precision, evaluate};

/// The f32 array of these dimensions and elements.
pub(crate) fn array(dims: &[usize], values: &[f64]) -> Array {
    Array {
        dtype: DType::F32,
        dims: dims.to_vec(),
        values: values.to_vec(),
    }
}

/// The i32 array of these dimensions and elements.
fn integers(dims: &[usize], values: &[i32]) -> Array {
    Array {
        dtype: DType::I32,
        dims: dims.to_vec(),
        values: values.iter().map(|&v| f64::from(v)).collect(),
    }
}

/// The graph of a trace without mistakes.
pub(crate) fn finished(trace: &Trace, outputs: &[Tensor<'_>]) -> Graph {
    let graph = trace
        .finish(outputs)
        .unwrap_or_else(|mistakes| panic!("{mistakes:#?}"));
    assert_eq!(graph.verify(), Ok(()), "{graph}");
    graph
}

/// The initial values of a graph's variables. Random ones hold their lower bound.
pub(crate) fn first_values(graph: &Graph) -> Vec<Array> {
    let value = |init: Init| match init {
        Init::Constant(c) => f64::from(c),
        Init::Uniform { low, .. } => f64::from(low),
        Init::Normal { mean, .. } => f64::from(mean),
        Init::RandomState => 0.0,
    };
    let array = |v: &crate::graph::VariableInfo| {
        let dims: Vec<usize> = v.dims.iter().map(|d| d.usize_at(&Env::default())).collect();
        Array::from_fn(v.dtype, &dims, |_| value(v.init))
    };
    graph.variables.iter().map(array).collect()
}

fn try_run(
    trace: &Trace,
    outputs: &[Tensor<'_>],
    batch: u32,
    inputs: &[Array],
) -> Result<Evaluated, Fault> {
    let graph = finished(trace, outputs);
    let variables = first_values(&graph);
    evaluate(
        &graph,
        &Env([batch; 8]),
        inputs,
        &variables,
        Precision::Single,
    )
}

/// The outputs of one run; every bounded dimension has the length `batch`.
fn run(trace: &Trace, outputs: &[Tensor<'_>], batch: u32, inputs: &[Array]) -> Vec<Array> {
    try_run(trace, outputs, batch, inputs)
        .unwrap_or_else(|fault| panic!("{fault}"))
        .outputs
}

#[track_caller]
fn assert_close(got: &[f64], expected: &[f64], tolerance: f64) {
    assert_eq!(got.len(), expected.len());
    for (g, e) in got.iter().zip(expected) {
        let same = g == e || (g.is_nan() && e.is_nan());
        assert!(
            same || (g - e).abs() <= tolerance * (1.0 + e.abs()),
            "{got:?} instead of {expected:?}"
        );
    }
}
