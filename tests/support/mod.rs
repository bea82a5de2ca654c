//! Helpers that several test binaries share.
#![allow(dead_code)] // each binary uses a part of it

pub mod arrays;
pub mod networks;
pub mod random_graph;
mod splitmix;

use half::{bf16, f16};
use slabwise::params::Init;
use slabwise::shape::{Dims, Size, elements};
use slabwise_compiler::graph::{Graph, InputInfo, Origin, Phase, VariableInfo};
use slabwise_compiler::ops::{GraphBuilder, NodeId, Op};
use slabwise_compiler::reference::Array;
use slabwise_kernels::dtype::DType;
use slabwise_kernels::spec::ReduceOp;

pub use splitmix::Rng;

impl Rng {
    pub fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    /// In `low..high`, with few enough digits to be an f32.
    pub fn float(&mut self, low: f64, high: f64) -> f64 {
        let unit = (self.bits() >> 40) as f64 / (1u64 << 24) as f64;
        f64::from((low + (high - low) * unit) as f32)
    }

    pub fn pick<T: Copy>(&mut self, list: &[T]) -> T {
        list[self.below(list.len())]
    }
}

/// Fixed lengths.
pub fn dims(lengths: &[usize]) -> Dims {
    lengths.iter().map(|&n| Size::fixed(n as i64)).collect()
}

/// An empty graph with the origin of its future nodes.
#[track_caller]
pub fn graph() -> Graph {
    let mut graph = Graph::default();
    graph.set_origin(Origin {
        location: std::panic::Location::caller(),
        layer: "".into(),
        phase: Phase::Forward,
        segment: 0,
        part: 0,
    });
    graph
}

/// Adds an input.
pub fn input(graph: &mut Graph, dtype: DType, dims: &Dims) -> NodeId {
    let at = graph.inputs.len() as u32;
    graph.inputs.push(InputInfo {
        name: "input".into(),
        dtype,
        dims: dims.clone(),
        donated_to: None,
    });
    graph.emit(Op::Input(at), &[], dtype, dims.clone())
}

/// Adds a variable.
pub fn variable(graph: &mut Graph, dtype: DType, dims: &Dims, init: Init) -> NodeId {
    let at = graph.variables.len() as u32;
    let is_param = dtype.is_float();
    graph.variables.push(VariableInfo {
        name: format!("variable{at}").into(),
        dtype,
        dims: dims.clone(),
        init,
        is_param,
        trained: is_param,
        average_of: None,
        remainder_of: None,
        whole: None,
        part: None,
        data: None,
    });
    graph.emit(Op::Variable(at), &[], dtype, dims.clone())
}

/// The elements of a tensor selected by a mask of its shape, of data-dependent length.
pub fn select_by(graph: &mut Graph, x: NodeId, mask: NodeId) -> Option<NodeId> {
    let most = elements(graph.dims(x))?;
    let flat = Dims::from_slice(&[most]);
    let (x, mask) = (graph.reshape(x, &flat), graph.reshape(mask, &flat));
    let ones = graph.cast(mask, DType::I32);
    let count = graph.reduce(ReduceOp::Sum, ones, &[0]);
    let count = graph.reshape(count, &Dims::new());
    let symbol = graph.symbols.data_dependent(most).ok()?;
    graph.emit(Op::Bind { symbol }, &[count], DType::I32, Dims::new());
    let dims = Dims::from_slice(&[Size::symbol(symbol)]);
    let positions = graph.emit(Op::Nonzero, &[mask], DType::I32, dims.clone());
    let dtype = graph.dtype(x);
    Some(graph.emit(Op::Gather { axis: 0 }, &[x, positions], dtype, dims))
}

/// The number of kinds of operations.
pub const KINDS: usize = 38;

/// Numbers the kinds of operations. There is no wildcard, so that a new operation needs a number
/// here and a case in the tests that count numbers.
pub fn kind(op: &Op) -> usize {
    match op {
        Op::Input(_) => 0,
        Op::Variable(_) => 1,
        Op::Const(_) => 2,
        Op::Index(_) => 3,
        Op::Size(_) => 25,
        Op::Uniform { .. } => 4,
        Op::Scalar(_) => 5,
        Op::Cast(_) => 6,
        // An exchange between ranks is that copy where there is one; `gradients/ranks.rs` has the
        // others.
        Op::Copy | Op::Collective { .. } => 7,
        Op::Reduce(..) => 8,
        // A product with quantized weights is that of both, in no graph before it is compiled.
        Op::Matmul | Op::QuantizedMatmul(_) => 9,
        Op::Conv2d(_) => 10,
        Op::Conv2dInputGrad(_) => 11,
        Op::Conv2dWeightGrad(_) => 12,
        Op::Pool2d(..) => 13,
        Op::Pool2dGrad(..) => 14,
        Op::Gather { .. } => 15,
        Op::Scatter { .. } => 16,
        Op::Reshape => 17,
        Op::Permute(_) => 18,
        Op::Expand => 19,
        Op::Slice { .. } => 20,
        Op::Concat { .. } => 21,
        Op::Pad { .. } => 22,
        Op::BoundsCheck { .. } => 23,
        Op::Assign(_) => 24,
        Op::Bind { .. } => 26,
        Op::Nonzero => 27,
        Op::Sort { .. } => 28,
        Op::NonMaxSuppression { .. } => 29,
        Op::SliceAssign { .. } => 30,
        Op::PrefixReduce { .. } => 31,
        // A placeholder is in no graph that runs.
        Op::Scan(_) | Op::Placeholder => 32,
        Op::ScanResult(_) => 33,
        Op::Attention(_) => 34,
        Op::AttentionGrad { .. } => 35,
        Op::Dequantize(_) => 36,
        // Its gradient is in no graph that runs.
        Op::Custom(_) | Op::NoGradient(_) => 37,
    }
}

/// An array of a type, drawn at random: floats in `low..high`, integers in `0..limit`.
pub fn array(
    rng: &mut Rng,
    dtype: DType,
    lengths: &[usize],
    (low, high): (f64, f64),
    limit: usize,
) -> Array {
    Array::from_fn(dtype, lengths, |_| match dtype {
        DType::F32 => rng.float(low, high),
        DType::F16 => f16::from_f64(rng.float(low, high)).to_f64(),
        DType::BF16 => bf16::from_f64(rng.float(low, high)).to_f64(),
        DType::I32 | DType::U8 => rng.below(limit) as f64,
        DType::Bool => rng.below(2) as f64,
    })
}
