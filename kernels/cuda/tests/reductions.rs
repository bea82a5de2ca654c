//! Loops with reductions, against the CPU's kernels.

#[allow(dead_code)] // not every test needs all of it
#[path = "../../tests/loops/builder.rs"]
mod builder;
mod common;

use builder::Builder;
use common::{Case, Choices, available, check};
use slabwise_kernels::dtype::DType;
use slabwise_kernels::scalar::{ScalarOp, Value};
use slabwise_kernels::size::{Env, Size, Symbol};
use slabwise_kernels::spec::{Inst, ReduceOp};

const OPS: [ReduceOp; 8] =
    [ReduceOp::Sum, ReduceOp::Prod, ReduceOp::Max, ReduceOp::Min, ReduceOp::Any, ReduceOp::All, ReduceOp::ArgMax, ReduceOp::ArgMin];

/// Dims, how many of them are reduced, and the strides of the source: short rows, warps, blocks, columns, several axes, parts.
fn layouts() -> Vec<(Vec<i64>, usize, Vec<i64>)> {
    vec![
        (vec![5, 3], 1, vec![3, 1]),
        (vec![37, 12], 1, vec![12, 1]),
        (vec![7, 100], 1, vec![100, 1]),
        (vec![3, 1300], 1, vec![1300, 1]),
        (vec![3, 1301], 1, vec![1301, 1]),
        (vec![40, 9], 1, vec![1, 40]),
        (vec![300, 33], 1, vec![1, 300]),
        (vec![3, 4, 5, 6], 2, vec![120, 30, 6, 1]),
        (vec![4, 3, 5, 6], 2, vec![30, 360, 6, 1]),
        (vec![5, 6, 7], 1, vec![42, 1, 6]),
        (vec![9000], 1, vec![1]),
        (vec![2, 9001], 1, vec![9001, 1]),
        (vec![3, 9000], 1, vec![1, 3]),
        (vec![2, 95, 97], 2, vec![97, 194, 1]),
    ]
}

/// Every reduction of every type over every layout.
#[test]
fn operations() {
    if !available() {
        return;
    }
    let mut cases = Vec::new();
    for (at, (dims, reduced, strides)) in layouts().into_iter().enumerate() {
        for (of, op) in OPS.into_iter().enumerate() {
            let truth = matches!(op, ReduceOp::Any | ReduceOp::All);
            for dtype in if truth { vec![DType::Bool] } else { vec![DType::F32, DType::I32] } {
                // The types by turns, but for one short layout.
                if at != 2 && (of + at) % 3 != 0 {
                    continue;
                }
                let mut b = Builder::new(&dims, reduced);
                let x = b.typed(dtype, &strides);
                let x = b.inst(Inst::Load(x));
                let y = b.reduce(op, x);
                let kept = dims.len() - reduced;
                let mut to: Vec<i64> = (0..kept).map(|a| dims[a + 1..kept].iter().product()).collect();
                to.resize(dims.len(), 0);
                let found = matches!(op, ReduceOp::ArgMax | ReduceOp::ArgMin);
                let out = b.typed(if found { DType::I32 } else { dtype }, &to);
                b.store(y, out);
                let mut choices = Choices::new(at as u32);
                let mut case = Case::new(format!("{op:?} of {dtype} over {dims:?} as {strides:?}"), b.spec, &mut choices);
                let count = case.args[0].len() / dtype.bytes();
                if op == ReduceOp::Prod && dtype == DType::F32 {
                    case.args[0] = (0..count).flat_map(|_| (1.0 + 0.01 * choices.unit()).to_le_bytes()).collect();
                } else if dtype == DType::F32 && op != ReduceOp::Sum {
                    // Ties, zeros of both signs, and in some rows NaN.
                    let some = [0.0, -0.0, 1.0, -1.0, 1.0, f32::INFINITY];
                    let mut values: Vec<f32> = (0..count).map(|_| some[choices.below(if at % 2 == 0 { 5 } else { 6 })]).collect();
                    if at % 3 == 0 {
                        let nan = choices.below(count);
                        values[nan] = f32::NAN;
                    }
                    case.args[0] = values.iter().flat_map(|x| x.to_le_bytes()).collect();
                } else if dtype == DType::Bool {
                    // Mostly one answer.
                    let all = op == ReduceOp::All;
                    case.args[0] = (0..count).map(|_| u8::from(choices.once_in(900) != all)).collect();
                }
                cases.push(case);
            }
        }
    }
    check(&cases, 1e-5);
}

/// softmax(x) over the last `n`, with the row's sum stored as well.
fn softmax(rows: i64, n: i64, across: bool) -> Builder {
    let mut b = Builder::new(&[rows, n], 1);
    let strides = if across { [1, rows] } else { [n, 1] };
    let x = b.load(&strides);
    let most = b.reduce(ReduceOp::Max, x);
    let below = b.op(ScalarOp::Sub, &[x, most]);
    let e = b.op(ScalarOp::Exp, &[below]);
    let sum = b.reduce(ReduceOp::Sum, e);
    let y = b.op(ScalarOp::Div, &[e, sum]);
    let (out, sums) = (b.operand(&strides), b.operand(&[1, 0]));
    b.store(y, out);
    b.store(sum, sums);
    b
}

/// Layer normalisation with scale and shift, mean and reciprocal deviation stored.
fn layer_norm(rows: i64, n: i64) -> Builder {
    let mut b = Builder::new(&[rows, n], 1);
    let x = b.load(&[n, 1]);
    let (scale, shift) = (b.load(&[0, 1]), b.load(&[0, 1]));
    let total = b.reduce(ReduceOp::Sum, x);
    let each = b.number(1.0 / n as f32);
    let mean = b.op(ScalarOp::Mul, &[total, each]);
    let centred = b.op(ScalarOp::Sub, &[x, mean]);
    let square = b.op(ScalarOp::Mul, &[centred, centred]);
    let squares = b.reduce(ReduceOp::Sum, square);
    let variance = b.op(ScalarOp::Mul, &[squares, each]);
    let small = b.number(1e-5);
    let safe = b.op(ScalarOp::Add, &[variance, small]);
    let inverse = b.op(ScalarOp::Rsqrt, &[safe]);
    let normal = b.op(ScalarOp::Mul, &[centred, inverse]);
    let scaled = b.op(ScalarOp::Mul, &[normal, scale]);
    let y = b.op(ScalarOp::Add, &[scaled, shift]);
    let (out, means, inverses) = (b.operand(&[n, 1]), b.operand(&[1, 0]), b.operand(&[1, 0]));
    b.store(y, out);
    b.store(mean, means);
    b.store(inverse, inverses);
    b
}

#[test]
fn rows_in_several_passes() {
    if !available() {
        return;
    }
    let mut choices = Choices::new(3);
    let mut cases = Vec::new();
    for (rows, n) in [(1, 1), (5, 7), (33, 64), (4, 100), (9, 1000), (2, 1024), (3, 4096), (2, 5003), (1, 20_000), (2, 40_000)] {
        for across in [false, true] {
            cases.push(Case::new(format!("softmax {rows} × {n}, across {across}"), softmax(rows, n, across).spec, &mut choices));
        }
        cases.push(Case::new(format!("layer norm {rows} × {n}"), layer_norm(rows, n).spec, &mut choices));
    }
    // In place: the result lies where the argument was.
    for (rows, n) in [(5, 64), (3, 4100), (1, 20_000)] {
        let mut case = Case::new(format!("softmax {rows} × {n} in place"), softmax(rows, n, false).spec, &mut choices);
        case.same.push((1, 0));
        cases.push(case);
    }
    // More rows than a turn of all blocks takes, with one reduction, whose place in shared memory is used again.
    for (rows, n, strides) in [(40, 1500, [1500, 1]), (1400, 40, [1, 1400])] {
        let mut b = Builder::new(&[rows, n], 1);
        let x = b.load(&strides);
        let sum = b.reduce(ReduceOp::Sum, x);
        let out = b.operand(&[1, 0]);
        b.store(sum, out);
        let mut case = Case::new(format!("{rows} sums of {n} in turns"), b.spec, &mut choices);
        case.target.multiprocessors = 1;
        cases.push(case);
    }
    // More than the device keeps on chip.
    let mut case = Case::new("softmax of a row too long to keep", softmax(3, 40_000, false).spec, &mut choices);
    case.target.multiprocessors = 1;
    cases.push(case);
    check(&cases, 1e-5);
}

#[test]
fn rows_of_a_size_known_at_launch() {
    if !available() {
        return;
    }
    let mut choices = Choices::new(4);
    let mut cases = Vec::new();
    let symbol = Size::symbol(Symbol(0));
    for (bound, size) in [(40, 40), (40, 33), (40, 1), (40, 0)] {
        let (bounds, env) = (Env([bound; 8]), Env([size; 8]));
        let mut b = softmax(40, 48, false);
        b.spec.dims[0] = symbol;
        cases.push(Case::bounded(format!("{size} rows of {bound}"), b.spec, bounds, env, &mut choices));
        let mut b = softmax(6, 40, false);
        b.spec.dims[1] = symbol;
        for k in [0, 1] {
            b.spec.operands[k].strides[0] = symbol;
        }
        cases.push(Case::bounded(format!("rows of {size} of {bound}"), b.spec, bounds, env, &mut choices));
        // The gradient of a bias: few columns, many rows.
        let mut b = Builder::new(&[24, 9000], 1);
        let x = b.load(&[1, 24]);
        let sum = b.reduce(ReduceOp::Sum, x);
        let out = b.operand(&[1, 0]);
        b.store(sum, out);
        b.spec.dims[1] = symbol.checked_mul(Size::fixed(450)).expect("a size");
        cases.push(Case::bounded(format!("columns of {} of 18000", 450 * size), b.spec, bounds, env, &mut choices));
    }
    check(&cases, 1e-5);
}

#[test]
fn values_that_do_not_vary_are_folded_too() {
    if !available() {
        return;
    }
    let mut b = Builder::new(&[6, 10], 1);
    let flat = b.load(&[1, 0]);
    let three = b.inst(Inst::Const(Value::F32(3.0)));
    let (sum, product) = (b.reduce(ReduceOp::Sum, flat), b.reduce(ReduceOp::Prod, three));
    let found = b.reduce(ReduceOp::ArgMax, flat);
    let both = b.op(ScalarOp::Add, &[sum, product]);
    let (out, at) = (b.operand(&[1, 0]), b.typed(DType::I32, &[1, 0]));
    b.store(both, out);
    b.store(found, at);
    check(&[Case::new("flat", b.spec, &mut Choices::new(5))], 1e-5);
}
