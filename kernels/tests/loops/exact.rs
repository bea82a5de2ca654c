//! Random programs over numbers for which every operation is exact, so that results must agree to
//! the last bit for any order of summation.

use half::{bf16, f16};
use slabwise_kernels::dtype::{DType, Lane};
use slabwise_kernels::scalar::{Class, ScalarOp, Value};
use slabwise_kernels::size::{Env, Size, Symbol};
use slabwise_kernels::spec::{Body, Dims, Inst, Operand, ReduceOp, Spec, Store, ValueId};

use crate::reference;
use crate::support::{Bytes, Choices, run_all};

/// A program under construction.
struct Draft {
    spec: Spec,
    /// The largest magnitude each value can have, and whether it is a whole number.
    bounds: Vec<f64>,
    bytes: Bytes,
    /// Sizes of the axes as planned (strides are laid out for these) and as run.
    planned: Vec<usize>,
    points: f64,
}

/// Magnitudes below which floats (and i32) are exact, also as sums.
const LIMIT: f64 = 16_777_216.0;

const FLOAT_OPS: &[ScalarOp] = &[
    ScalarOp::Add,
    ScalarOp::Sub,
    ScalarOp::Mul,
    ScalarOp::Neg,
    ScalarOp::Abs,
    ScalarOp::Sign,
    ScalarOp::Min,
    ScalarOp::Max,
    ScalarOp::Clamp,
    ScalarOp::WithSlope,
    ScalarOp::Relu,
    ScalarOp::Floor,
    ScalarOp::Round,
    ScalarOp::Lt,
    ScalarOp::Le,
    ScalarOp::Gt,
    ScalarOp::Ge,
    ScalarOp::Eq,
    ScalarOp::Ne,
    ScalarOp::And,
    ScalarOp::Or,
    ScalarOp::Xor,
    ScalarOp::Not,
    ScalarOp::Select,
    ScalarOp::Div,
];

impl Draft {
    /// An operand over the axes: some repeated, the others in some order with gaps.
    fn operand(&self, c: &mut Choices, dtype: DType, varying: &[bool]) -> Operand {
        let axes = self.planned.len();
        let mut order: Vec<usize> = (0..axes).collect();
        if c.once_in(3) {
            for i in (1..axes).rev() {
                order.swap(i, c.below(i + 1));
            }
        }
        let gaps = c.once_in(3);
        let mut strides: Dims = (0..axes).map(|_| Size::ZERO).collect();
        let mut stride = 1;
        for &axis in order.iter().rev().filter(|&&a| varying[a]) {
            strides[axis] = Size::fixed(stride as i64);
            stride *= self.planned[axis].max(1) + if gaps && c.once_in(2) { 3 } else { 0 };
        }
        Operand {
            dtype,
            offset: Size::fixed(if c.once_in(3) { c.below(40) as i64 } else { 0 }),
            strides,
        }
    }

    /// Bytes enough for an operand at the planned sizes.
    fn extent(&self, operand: &Operand) -> usize {
        let dims: Vec<Size> = self
            .planned
            .iter()
            .map(|&n| Size::fixed(n.max(1) as i64))
            .collect();
        operand.extent(&dims, &Env::default()) as usize * operand.dtype.bytes()
    }

    fn push(&mut self, inst: Inst, bound: f64) -> ValueId {
        self.spec.code.push(inst);
        self.bounds.push(bound);
        (self.spec.code.len() - 1) as ValueId
    }

    fn lane(&self, v: ValueId) -> Lane {
        self.spec.lanes().expect("valid so far")[usize::from(v)]
    }

    fn load(&mut self, c: &mut Choices) {
        let axes = self.planned.len();
        let all = c.once_in(2);
        let flat_end = axes - if c.once_in(4) { self.spec.reduced } else { 0 };
        let varying: Vec<bool> = (0..axes)
            .map(|a| a < flat_end && (all || !c.once_in(3)))
            .collect();
        let dtype = *c.pick(&[
            DType::F32,
            DType::F32,
            DType::F32,
            DType::F16,
            DType::BF16,
            DType::I32,
            DType::U8,
            DType::Bool,
        ]);
        let operand = self.operand(c, dtype, &varying);
        let n = self.extent(&operand) / dtype.bytes();
        let contents: Vec<u8> = (0..n)
            .flat_map(|_| match dtype {
                DType::F32 => (c.below(9) as f32 - 4.0).to_le_bytes().to_vec(),
                DType::F16 => f16::from_f32(c.below(9) as f32 - 4.0)
                    .to_le_bytes()
                    .to_vec(),
                DType::BF16 => bf16::from_f32(c.below(9) as f32 - 4.0)
                    .to_le_bytes()
                    .to_vec(),
                DType::I32 => (c.below(9) as i32 - 4).to_le_bytes().to_vec(),
                DType::U8 => vec![c.below(9) as u8],
                DType::Bool => vec![c.below(2) as u8],
            })
            .collect();
        self.bytes.push(&contents);
        self.spec.operands.push(operand);
        self.push(Inst::Load((self.spec.operands.len() - 1) as u16), 8.0);
    }

    /// One more value, if the drawn operation is exact.
    fn step(&mut self, c: &mut Choices) {
        let any = |c: &mut Choices, d: &Draft| c.below(d.spec.code.len()) as ValueId;
        let bound = |d: &Draft, v: ValueId| d.bounds[usize::from(v)];
        if self.spec.reduced > 0 && c.once_in(4) {
            let v = any(c, self);
            let (op, result) = match self.lane(v) {
                Lane::Bool => (*c.pick(&[ReduceOp::Any, ReduceOp::All]), 1.0),
                _ => match *c.pick(&[
                    ReduceOp::Sum,
                    ReduceOp::Sum,
                    ReduceOp::Max,
                    ReduceOp::Min,
                    ReduceOp::ArgMax,
                    ReduceOp::ArgMin,
                ]) {
                    ReduceOp::Sum => (ReduceOp::Sum, bound(self, v) * self.points),
                    op @ (ReduceOp::ArgMax | ReduceOp::ArgMin) => (op, self.points),
                    op => (op, bound(self, v)),
                },
            };
            // The identities of max and min are infinite: only where there are points.
            let empty = self.points == 0.0 && matches!(op, ReduceOp::Max | ReduceOp::Min);
            if result < LIMIT && !empty {
                self.push(Inst::Reduce(op, v), result);
            }
            return;
        }
        if c.once_in(8) {
            let v = any(c, self);
            let to = *c.pick(&[Lane::F32, Lane::I32, Lane::Bool]);
            let bound = bound(self, v);
            self.push(Inst::Cast(v, to), bound);
            return;
        }
        let op = *c.pick(FLOAT_OPS);
        let args = [any(c, self), any(c, self), any(c, self)];
        let lanes: Vec<Lane> = args[..op.arity()].iter().map(|&v| self.lane(v)).collect();
        if op.lane(&lanes).is_none() {
            return;
        }
        let [a, b, z] = args.map(|v| bound(self, v));
        let result = match op {
            ScalarOp::Add | ScalarOp::Sub => a + b,
            ScalarOp::Mul => a * b,
            // Exact only for integers, where it truncates.
            ScalarOp::Div if lanes[0] == Lane::I32 => a,
            ScalarOp::Div => return,
            ScalarOp::Select => b.max(z),
            ScalarOp::Clamp => a.max(b).max(z),
            op if matches!(op.class(), Class::Compare | Class::Logic) => 1.0,
            _ => a.max(if op.arity() > 1 { b } else { 0.0 }),
        };
        if result < LIMIT {
            self.push(Inst::Op(op, args), result);
        }
    }

    fn store(&mut self, c: &mut Choices, v: ValueId) {
        let axes = self.planned.len();
        let folded = self.spec.is_per_row(v);
        let kept = axes - self.spec.reduced;
        let lane = self.lane(v);
        let dtypes: &[DType] = match lane {
            Lane::F32 => &[DType::F32, DType::F32, DType::U8],
            Lane::I32 => &[DType::I32, DType::U8, DType::F32],
            Lane::Bool => &[DType::Bool, DType::U8, DType::I32],
        };
        let varying: Vec<bool> = (0..axes).map(|a| !folded || a < kept).collect();
        // In place of an operand that is read with the same strides.
        let taken = |k: usize, d: &Draft| {
            d.spec
                .stores
                .iter()
                .any(|s| d.bytes.args[usize::from(s.operand)] == d.bytes.args[k])
        };
        let is_state = |k: usize, d: &Draft| {
            d.spec
                .code
                .iter()
                .any(|i| matches!(i, Inst::Uniform { state, .. } if usize::from(*state) == k))
        };
        let fits = |k: &usize, d: &Draft| {
            let o = &d.spec.operands[*k];
            !is_state(*k, d)
                && dtypes.contains(&o.dtype)
                && o.strides.iter().zip(&varying).all(|(s, &w)| s.is(0) != w)
                && !taken(*k, d)
        };
        let twins: Vec<usize> = (0..self.spec.operands.len())
            .filter(|k| fits(k, self))
            .collect();
        if !twins.is_empty() && c.once_in(2) {
            let k = *c.pick(&twins);
            // The same argument read and written, or two arguments in one region.
            if c.once_in(2) {
                self.spec.stores.push(Store {
                    value: v,
                    operand: k as u16,
                });
                return;
            }
            self.bytes.push_same(k);
            self.spec.operands.push(self.spec.operands[k].clone());
        } else {
            let dtype = *c.pick(dtypes);
            let operand = self.operand(c, dtype, &varying);
            self.bytes.push(&vec![0x5A; self.extent(&operand)]);
            self.spec.operands.push(operand);
        }
        self.spec.stores.push(Store {
            value: v,
            operand: (self.spec.operands.len() - 1) as u16,
        });
    }
}

/// A random spec with its bytes, its bound, and the sizes it is run at.
fn draft(seed: u32) -> (Spec, Bytes, Env, Env) {
    let c = &mut Choices::new(seed);
    let axes = c.below(5);
    let sizes: &[usize] = if c.once_in(12) {
        &[1, 2, 60, 300]
    } else {
        &[1, 2, 3, 5, 8, 10, 16, 17, 33, 64]
    };
    let mut planned: Vec<usize> = (0..axes).map(|_| *c.pick(sizes)).collect();
    while planned.iter().product::<usize>() > if sizes.len() == 4 { 200_000 } else { 8_000 } {
        let largest = (0..axes).max_by_key(|&a| planned[a]).unwrap_or(0);
        planned[largest] = planned[largest].div_ceil(3);
    }
    let (mut bound, mut env) = (Env::default(), Env::default());
    let mut dims = Dims::new();
    let mut actual = planned.clone();
    for a in 0..axes {
        if c.once_in(3) {
            bound.0[a] = planned[a] as u32;
            actual[a] = if c.once_in(2) {
                planned[a]
            } else {
                c.below(planned[a] + 1)
            };
            env.0[a] = actual[a] as u32;
            dims.push(Size::symbol(Symbol(a as u8)));
        } else {
            dims.push(Size::fixed(planned[a] as i64));
        }
    }
    let reduced = if c.once_in(3) { 0 } else { c.below(axes + 1) };
    let points = actual[axes - reduced..].iter().product::<usize>() as f64;
    let spec = Spec {
        body: Body::Loop,
        dims,
        reduced,
        operands: vec![],
        indices: vec![],
        code: vec![],
        stores: vec![],
    };
    let mut d = Draft {
        spec,
        bounds: vec![],
        bytes: Bytes::new(),
        planned,
        points,
    };
    for _ in 0..1 + c.below(4) {
        d.load(c);
    }
    d.push(
        Inst::Const(*c.pick(&[Value::F32(2.0), Value::I32(-3), Value::Bool(true)])),
        3.0,
    );
    if c.once_in(3) {
        let strides: Dims = (0..axes).map(|_| Size::fixed(c.below(4) as i64)).collect();
        d.spec.indices.push(strides);
        let index = d.push(Inst::Index(0), 4.0 * 4.0 * 300.0);
        if c.once_in(2) {
            let state: Vec<u8> = (0..12).map(|_| c.below(256) as u8).collect();
            d.bytes.push(&state);
            let strides = (0..axes).map(|_| Size::ZERO).collect();
            d.spec.operands.push(Operand {
                dtype: DType::I32,
                offset: Size::ZERO,
                strides,
            });
            let state = (d.spec.operands.len() - 1) as u16;
            let u = d.push(
                Inst::Uniform {
                    state,
                    stream: c.below(9) as u32,
                    index,
                },
                LIMIT,
            );
            let half = d.push(Inst::Const(Value::F32(0.5)), 1.0);
            d.push(Inst::Op(ScalarOp::Lt, [u, half, 0]), 1.0);
        }
    }
    for _ in 0..c.below(16) {
        d.step(c);
    }
    for _ in 0..1 + c.below(3) {
        let v = if c.once_in(2) {
            d.spec.code.len() - 1
        } else {
            c.below(d.spec.code.len())
        };
        d.store(c, v as ValueId);
    }
    (d.spec, d.bytes, bound, env)
}

#[test]
fn random_programs_match_the_reference() {
    let wanted: Option<u32> = std::env::var("SEED").ok().and_then(|s| s.parse().ok());
    let seeds = wanted.map_or(0..2000, |s| s..s + 1);
    for seed in seeds {
        let (spec, bytes, bound, env) = draft(seed);
        let expected = reference::run(&spec, &env, &bytes);
        for (isa, run) in run_all(&spec, &bound, &env, &bytes) {
            if let Some(at) = (0..expected.len()).find(|&i| expected[i] != run.all[i]) {
                let argument = bytes
                    .args
                    .iter()
                    .position(|&(s, n)| (s..s + n).contains(&at));
                panic!(
                    "seed {seed}, {isa}: byte {at} (argument {argument:?}) is {} instead of {}\n{spec:#?}\n{env:?}",
                    run.all[at], expected[at]
                );
            }
        }
    }
}
