//! Specs of loops, written down value by value.

use slabwise_kernels::dtype::DType;
use slabwise_kernels::scalar::{ScalarOp, Value};
use slabwise_kernels::size::Size;
use slabwise_kernels::spec::{Body, Dims, Inst, Operand, ReduceOp, Spec, Store, ValueId};

/// A loop under construction.
pub struct Builder {
    pub spec: Spec,
}

impl Builder {
    pub fn new(dims: &[i64], reduced: usize) -> Self {
        let dims = dims.iter().map(|&d| Size::fixed(d)).collect();
        Builder {
            spec: Spec {
                body: Body::Loop,
                dims,
                reduced,
                operands: vec![],
                indices: vec![],
                code: vec![],
                stores: vec![],
            },
        }
    }

    pub fn operand(&mut self, strides: &[i64]) -> u16 {
        let strides: Dims = strides.iter().map(|&s| Size::fixed(s)).collect();
        self.spec.operands.push(Operand {
            dtype: DType::F32,
            offset: Size::ZERO,
            strides,
        });
        (self.spec.operands.len() - 1) as u16
    }

    pub fn inst(&mut self, inst: Inst) -> ValueId {
        self.spec.code.push(inst);
        (self.spec.code.len() - 1) as ValueId
    }

    /// An operand of another type.
    pub fn typed(&mut self, dtype: DType, strides: &[i64]) -> u16 {
        let k = self.operand(strides);
        self.spec.operands[usize::from(k)].dtype = dtype;
        k
    }

    pub fn load(&mut self, strides: &[i64]) -> ValueId {
        let operand = self.operand(strides);
        self.inst(Inst::Load(operand))
    }

    pub fn number(&mut self, x: f32) -> ValueId {
        self.inst(Inst::Const(Value::F32(x)))
    }

    pub fn op(&mut self, op: ScalarOp, args: &[ValueId]) -> ValueId {
        let arg = |k: usize| args.get(k).copied().unwrap_or(0);
        self.inst(Inst::Op(op, [arg(0), arg(1), arg(2)]))
    }

    pub fn reduce(&mut self, op: ReduceOp, value: ValueId) -> ValueId {
        self.inst(Inst::Reduce(op, value))
    }

    pub fn store(&mut self, value: ValueId, operand: u16) {
        self.spec.stores.push(Store { value, operand });
    }
}
