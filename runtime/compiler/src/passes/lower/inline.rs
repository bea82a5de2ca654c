//! Values that each kernel computes for itself: numbers, indices, sizes, conversions.

use slabwise_kernels::dtype::{DType, Lane};
use slabwise_kernels::scalar::{ScalarOp, Value};
use slabwise_kernels::size::{Size, Symbol};
use slabwise_kernels::spec::{Dims, Inst, Operand, ValueId};
use smallvec::SmallVec;

use super::super::layout::AxisMap;
use super::{Arg, Lowering};
use crate::ops::{NodeId, Op};

impl<'a> Lowering<'a> {
    /// Conversion as a buffer of the type in between would do it: bytes saturate, halves round.
    pub(super) fn cast(&mut self, value: ValueId, from: DType, to: DType) -> ValueId {
        let mut value = value;
        if from.lane() != to.lane() {
            value = self.push(Inst::Cast(value, to.lane()));
        }
        if let Some(round) = to.rounding().filter(|_| from != to) {
            value = self.push(Inst::Op(round, [value, 0, 0]));
        }
        if to == DType::U8 && from.lane() != Lane::Bool && from != DType::U8 {
            let (low, high) = (
                self.push(Inst::Const(Value::I32(0))),
                self.push(Inst::Const(Value::I32(255))),
            );
            let above = self.push(Inst::Op(ScalarOp::Max, [value, low, 0]));
            value = self.push(Inst::Op(ScalarOp::Min, [above, high, 0]));
        }
        value
    }

    /// A value that every kernel makes for itself; `axes` are the node's axes in the space.
    pub(super) fn inline(&mut self, id: NodeId, axes: AxisMap) -> Option<ValueId> {
        if let Some(&value) = self.made.get(&(id, axes.clone())) {
            return Some(value);
        }
        let graph = self.graph;
        let node = graph.node(id);
        let value = match &node.op {
            Op::Const(value) => self.push(Inst::Const(*value)),
            Op::Size(size) => self.size(*size),
            Op::Index(strides) => {
                let mut index: Dims = SmallVec::from_elem(Size::ZERO, self.dims.len());
                for (stride, axis) in strides.iter().zip(&axes) {
                    if let Some(s) = axis {
                        index[self.position[usize::from(*s)]] = *stride;
                    }
                }
                let at = self
                    .indices
                    .iter()
                    .position(|i| *i == index)
                    .unwrap_or_else(|| {
                        self.indices.push(index);
                        self.indices.len() - 1
                    });
                self.push(Inst::Index(at as u16))
            }
            Op::Uniform { stream } => {
                let state = self.variable_operand(self.clusters.edges[id.at()][0].source);
                let index = self.read(id, 1, &axes)?;
                self.push(Inst::Uniform {
                    state,
                    stream: *stream,
                    index,
                })
            }
            Op::Cast(to) => {
                let value = self.read(id, 0, &axes)?;
                self.cast(value, graph.node(node.inputs[0]).dtype, *to)
            }
            Op::Scalar(op) => {
                let mut args = [0; 3];
                for (k, arg) in args[..node.inputs.len()].iter_mut().enumerate() {
                    *arg = self.read(id, k, &axes)?;
                }
                self.push(Inst::Op(*op, args))
            }
            _ => return None,
        };
        self.made.insert((id, axes), value);
        Some(value)
    }

    pub(super) fn variable_operand(&mut self, variable: NodeId) -> u16 {
        let node = self.graph.node(variable);
        let strides = SmallVec::from_elem(Size::ZERO, self.dims.len());
        self.operand(
            self.around.base(self.graph, variable),
            Operand {
                dtype: node.dtype,
                offset: Size::ZERO,
                strides,
            },
        )
    }

    /// A size as a value: `scale · s₁ · s₂ + offset` from the sizes of the run.
    fn size(&mut self, size: Size) -> ValueId {
        let int = |n: i64| Inst::Const(Value::I32(i32::try_from(n).unwrap_or(i32::MAX)));
        if let Some(n) = size.as_fixed() {
            return self.push(int(n));
        }
        let (scale, offset) = size.parts();
        let mut value = self.push(int(scale));
        for Symbol(s) in size.symbols() {
            let strides = SmallVec::from_elem(Size::ZERO, self.dims.len());
            let at = self.operand(
                Arg::Sizes,
                Operand {
                    dtype: DType::I32,
                    offset: Size::fixed(i64::from(s)),
                    strides,
                },
            );
            let factor = self.push(Inst::Load(at));
            value = self.push(Inst::Op(ScalarOp::Mul, [value, factor, 0]));
        }
        let offset = self.push(int(offset));
        self.push(Inst::Op(ScalarOp::Add, [value, offset, 0]))
    }
}
