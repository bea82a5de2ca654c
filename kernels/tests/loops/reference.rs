//! Evaluates a spec point by point on plain bytes.

use half::{bf16, f16};
use slabwise_kernels::dtype::{DType, Lane};
use slabwise_kernels::random::uniform;
use slabwise_kernels::scalar::{ScalarOp, Value};
use slabwise_kernels::size::{Env, Size};
use slabwise_kernels::spec::{Inst, Operand, ReduceOp, Spec};

use crate::support::Bytes;

fn read(bytes: &[u8], at: usize, dtype: DType) -> Value {
    let word = || [bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]];
    match dtype {
        DType::F32 => Value::F32(f32::from_le_bytes(word())),
        DType::F16 => Value::F32(f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()),
        DType::BF16 => Value::F32(bf16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()),
        DType::I32 => Value::I32(i32::from_le_bytes(word())),
        DType::U8 => Value::I32(i32::from(bytes[at])),
        DType::Bool => Value::Bool(bytes[at] != 0),
    }
}

fn write(bytes: &mut [u8], at: usize, dtype: DType, value: Value) {
    match (dtype, value) {
        (DType::U8, Value::F32(x)) => bytes[at] = x as u8,
        (DType::U8, Value::I32(x)) => bytes[at] = x as u8,
        (DType::U8, Value::Bool(x)) => bytes[at] = u8::from(x),
        (dtype, value) => match value.cast(dtype.lane()) {
            Value::F32(x) if dtype == DType::F16 => {
                bytes[at..at + 2].copy_from_slice(&f16::from_f32(x).to_le_bytes())
            }
            Value::F32(x) if dtype == DType::BF16 => {
                bytes[at..at + 2].copy_from_slice(&bf16::from_f32(x).to_le_bytes())
            }
            Value::F32(x) => bytes[at..at + 4].copy_from_slice(&x.to_le_bytes()),
            Value::I32(x) => bytes[at..at + 4].copy_from_slice(&x.to_le_bytes()),
            Value::Bool(x) => bytes[at] = u8::from(x),
        },
    }
}

fn linear(strides: &[Size], point: &[usize], env: &Env) -> i64 {
    strides
        .iter()
        .zip(point)
        .map(|(s, &i)| s.at(env) * i as i64)
        .sum()
}

fn address(operand: &Operand, start: usize, point: &[usize], env: &Env) -> usize {
    let at = operand.offset.at(env) + linear(&operand.strides, point, env);
    start + at as usize * operand.dtype.bytes()
}

/// Every point of a space, in row-major order.
pub fn points(dims: &[usize]) -> Vec<Vec<usize>> {
    let count = dims.iter().product();
    (0..count)
        .map(|mut i: usize| {
            let mut point = vec![0; dims.len()];
            for (p, &d) in point.iter_mut().zip(dims).rev() {
                *p = i % d;
                i /= d;
            }
            point
        })
        .collect()
}

/// Reduces values one after another. Exact for the numbers of the tests.
fn reduce(op: ReduceOp, values: &[Value], lane: Lane) -> Value {
    let both =
        |op: ScalarOp, identity: Value| values.iter().fold(identity, |a, &b| op.eval(&[a, b]));
    let number = |f: f32, i: i32| {
        if lane == Lane::F32 {
            Value::F32(f)
        } else {
            Value::I32(i)
        }
    };
    let first_best = |better: &dyn Fn(f64, f64) -> bool| {
        let rank = |v: Value| {
            if let Value::I32(i) = v {
                f64::from(i)
            } else {
                f64::from(if let Value::F32(x) = v { x } else { 0.0 })
            }
        };
        let mut best = 0;
        for i in 1..values.len() {
            let (old, new) = (rank(values[best]), rank(values[i]));
            if !old.is_nan() && (new.is_nan() || better(new, old)) {
                best = i;
            }
        }
        Value::I32(best as i32)
    };
    match op {
        ReduceOp::Sum => both(ScalarOp::Add, number(0.0, 0)),
        ReduceOp::Prod => both(ScalarOp::Mul, number(1.0, 1)),
        ReduceOp::Max => both(ScalarOp::Max, number(f32::NEG_INFINITY, i32::MIN)),
        ReduceOp::Min => both(ScalarOp::Min, number(f32::INFINITY, i32::MAX)),
        ReduceOp::Any => both(ScalarOp::Or, Value::Bool(false)),
        ReduceOp::All => both(ScalarOp::And, Value::Bool(true)),
        ReduceOp::ArgMax => first_best(&|new, old| new > old),
        ReduceOp::SquaredDeviations => panic!("no loop has it"),
        ReduceOp::ArgMin => first_best(&|new, old| new < old),
    }
}

/// The bytes after the kernel ran.
pub fn run(spec: &Spec, env: &Env, bytes: &Bytes) -> Vec<u8> {
    let dims: Vec<usize> = spec.dims.iter().map(|d| d.usize_at(env)).collect();
    let kept = dims.len() - spec.reduced;
    let folded = spec.per_row();
    let lanes = spec.lanes().expect("a valid spec");
    let mut out = bytes.all.clone();
    for outer in points(&dims[..kept]) {
        let inner: Vec<Vec<usize>> = points(&dims[kept..])
            .into_iter()
            .map(|p| [outer.clone(), p].concat())
            .collect();
        // A per-row value is the same at every reduced point, and exists even without points: it is
        // evaluated at the first coordinates.
        let origin = vec![[outer.clone(), vec![0; spec.reduced]].concat()];
        let mut values: Vec<Vec<Value>> = Vec::new();
        for (v, inst) in spec.code.iter().enumerate() {
            let places = if folded[v] { &origin } else { &inner };
            let at = |values: &[Vec<Value>], a: u16, i: usize| {
                if folded[usize::from(a)] {
                    values[usize::from(a)][0]
                } else {
                    values[usize::from(a)][i]
                }
            };
            let value = |i: usize, point: &Vec<usize>| match inst {
                Inst::Load(k) => {
                    let operand = &spec.operands[usize::from(*k)];
                    read(
                        &bytes.all,
                        address(operand, bytes.args[usize::from(*k)].0, point, env),
                        operand.dtype,
                    )
                }
                Inst::Const(c) => *c,
                Inst::Index(k) => {
                    Value::I32(linear(&spec.indices[usize::from(*k)], point, env) as i32)
                }
                Inst::Uniform {
                    state,
                    stream,
                    index,
                } => {
                    let start = address(
                        &spec.operands[usize::from(*state)],
                        bytes.args[usize::from(*state)].0,
                        &[],
                        env,
                    );
                    let word = |i: usize| {
                        if let Value::I32(x) = read(&bytes.all, start + 4 * i, DType::I32) {
                            x as u32
                        } else {
                            0
                        }
                    };
                    let Value::I32(index) = at(&values, *index, i) else {
                        panic!("an index is an integer")
                    };
                    Value::F32(uniform(
                        u64::from(word(1)) << 32 | u64::from(word(0)),
                        word(2),
                        *stream,
                        index as u32,
                    ))
                }
                Inst::Op(op, args) => op.eval(
                    &args[..op.arity()]
                        .iter()
                        .map(|&a| at(&values, a, i))
                        .collect::<Vec<_>>(),
                ),
                Inst::Cast(a, lane) => at(&values, *a, i).cast(*lane),
                Inst::Reduce(op, a) => {
                    let all: Vec<Value> = (0..inner.len()).map(|i| at(&values, *a, i)).collect();
                    reduce(*op, &all, lanes[usize::from(*a)])
                }
                Inst::Acc => panic!("a loop has no anchor"),
            };
            let line = places
                .iter()
                .enumerate()
                .map(|(i, point)| value(i, point))
                .collect();
            values.push(line);
        }
        for store in &spec.stores {
            let (k, v) = (usize::from(store.operand), usize::from(store.value));
            let operand = &spec.operands[k];
            let places: Vec<&[usize]> = if folded[v] {
                vec![&outer]
            } else {
                inner.iter().map(Vec::as_slice).collect()
            };
            for (point, &value) in places.iter().zip(&values[v]) {
                write(
                    &mut out,
                    address(operand, bytes.args[k].0, point, env),
                    operand.dtype,
                    value,
                );
            }
        }
    }
    out
}
