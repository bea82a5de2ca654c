//! The trait by which the rules of operations read and extend a graph.

use slabwise_kernels::dtype::{DType, Lane};
use slabwise_kernels::scalar::{ScalarOp, Value};
use slabwise_kernels::size::Size;
use slabwise_kernels::spec::{Dims, ReduceOp};

use super::{Axes, Op};

/// The position of a node in its graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeId(pub u32);

impl NodeId {
    /// As an index.
    pub fn at(self) -> usize {
        self.0 as usize
    }
}

/// A builder to which nodes can be added. Emitted nodes already obey the shape rules: a broken rule
/// is a bug of the caller.
pub trait GraphBuilder {
    /// Adds a node.
    fn emit(&mut self, op: Op, inputs: &[NodeId], dtype: DType, dims: Dims) -> NodeId;
    /// The shape of a node.
    fn dims(&self, node: NodeId) -> &Dims;
    /// The type of a node.
    fn dtype(&self, node: NodeId) -> DType;

    /// One number of a type, of shape `[]`.
    fn constant(&mut self, value: f32, dtype: DType) -> NodeId {
        let value = dtype.hold(Value::F32(value));
        self.emit(Op::Const(value), &[], dtype, Dims::new())
    }

    /// One number repeated to a shape.
    fn full(&mut self, value: f32, dtype: DType, dims: &Dims) -> NodeId {
        let one = self.constant(value, dtype);
        self.broadcast(one, dims)
    }

    /// An elementwise operation on operands of one shape.
    fn scalar(&mut self, op: ScalarOp, inputs: &[NodeId]) -> NodeId {
        let lanes: Vec<Lane> = inputs.iter().map(|&i| self.dtype(i).lane()).collect();
        let lane = op
            .lane(&lanes)
            .unwrap_or_else(|| panic!("{} of {lanes:?}", op.name()));
        let dtype = lane.stored();
        let dims = self.dims(inputs[0]).clone();
        self.emit(Op::Scalar(op), inputs, dtype, dims)
    }

    /// `a + b`.
    fn add(&mut self, a: NodeId, b: NodeId) -> NodeId {
        self.scalar(ScalarOp::Add, &[a, b])
    }

    /// `a · b`.
    fn mul(&mut self, a: NodeId, b: NodeId) -> NodeId {
        self.scalar(ScalarOp::Mul, &[a, b])
    }

    /// Conversion; the node itself if it has the type already.
    fn cast(&mut self, a: NodeId, dtype: DType) -> NodeId {
        if self.dtype(a) == dtype {
            return a;
        }
        let dims = self.dims(a).clone();
        self.emit(Op::Cast(dtype), &[a], dtype, dims)
    }

    /// The same elements under another shape of as many elements; the node itself if it has the
    /// shape already.
    fn reshape(&mut self, a: NodeId, dims: &Dims) -> NodeId {
        if self.dims(a) == dims {
            return a;
        }
        let dtype = self.dtype(a);
        self.emit(Op::Reshape, &[a], dtype, dims.clone())
    }

    /// Axis i of the result is axis `axes[i]`.
    fn permute(&mut self, a: NodeId, axes: &[usize]) -> NodeId {
        if axes.iter().enumerate().all(|(i, &p)| i == p) {
            return a;
        }
        let dims = axes.iter().map(|&p| self.dims(a)[p]).collect();
        let dtype = self.dtype(a);
        self.emit(Op::Permute(Axes::from_slice(axes)), &[a], dtype, dims)
    }

    /// The last two axes exchanged.
    fn transpose(&mut self, a: NodeId) -> NodeId {
        let rank = self.dims(a).len();
        let mut axes: Axes = (0..rank).collect();
        axes.swap(rank - 2, rank - 1);
        self.permute(a, &axes)
    }

    /// Repeats to a shape by the broadcasting rule: shapes align at the last axis, axes of length 1
    /// and missing ones repeat.
    fn broadcast(&mut self, a: NodeId, dims: &Dims) -> NodeId {
        let missing = dims.len() - self.dims(a).len();
        let mut padded: Dims = std::iter::repeat_n(Size::ONE, missing).collect();
        padded.extend(self.dims(a).iter().copied());
        let a = self.reshape(a, &padded);
        if self.dims(a) == dims {
            return a;
        }
        let dtype = self.dtype(a);
        self.emit(Op::Expand, &[a], dtype, dims.clone())
    }

    /// Reduces along axes, which stay with length 1; the node itself if there are none.
    fn reduce(&mut self, op: ReduceOp, a: NodeId, axes: &[usize]) -> NodeId {
        if axes.is_empty() {
            return self.cast(a, self.dtype(a).lane().stored());
        }
        let mut dims = self.dims(a).clone();
        for &axis in axes {
            dims[axis] = Size::ONE;
        }
        let dtype = if matches!(op, ReduceOp::ArgMax | ReduceOp::ArgMin) {
            DType::I32
        } else {
            self.dtype(a).lane().stored()
        };
        self.emit(Op::Reduce(op, Axes::from_slice(axes)), &[a], dtype, dims)
    }

    /// The sum over repeated elements: the gradient of [`GraphBuilder::broadcast`] from `dims`.
    fn unbroadcast(&mut self, gradient: NodeId, dims: &Dims) -> NodeId {
        let missing = self.dims(gradient).len() - dims.len();
        let repeated = |i: usize, d: &Size| i < missing || (dims[i - missing].is(1) && !d.is(1));
        let axes: Axes = self
            .dims(gradient)
            .iter()
            .enumerate()
            .filter(|&(i, d)| repeated(i, d))
            .map(|(i, _)| i)
            .collect();
        let sum = self.reduce(ReduceOp::Sum, gradient, &axes);
        self.reshape(sum, dims)
    }

    /// `[batch…, m, k] × [batch…, k, n]`, batches equal.
    fn matmul(&mut self, a: NodeId, b: NodeId) -> NodeId {
        let mut dims = self.dims(a).clone();
        let rank = dims.len();
        dims[rank - 1] = self.dims(b)[rank - 1];
        self.emit(Op::Matmul, &[a, b], DType::F32, dims)
    }
}
