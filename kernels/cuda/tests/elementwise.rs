//! Loops that reduce nothing, against the CPU's kernels.

#[path = "../../tests/loops/builder.rs"]
#[allow(dead_code)] // not every test needs all of it
mod builder;
mod common;

use builder::Builder;
use common::{Case, Choices, TARGET, available, check};
use slabwise_cuda::{PRELUDE, lower, nvrtc};
use slabwise_kernels::dtype::{DType, Lane};
use slabwise_kernels::scalar::{Class, ScalarOp};
use slabwise_kernels::size::{Env, Size, Symbol};
use slabwise_kernels::spec::{Inst, ReduceOp};

/// Numbers of all kinds: special, tiny, huge, and many in between.
fn floats() -> Vec<f32> {
    let special = [
        0.0,
        -0.0,
        1.0,
        -1.0,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
        f32::MAX,
        f32::MIN_POSITIVE,
        2.5,
        -2.5,
        3e9,
        -3e9,
    ];
    special
        .into_iter()
        .chain((0..400).map(|i| i as f32 * 0.043 - 8.6))
        .collect()
}

fn integers() -> Vec<i32> {
    [
        0,
        1,
        -1,
        2,
        -7,
        i32::MAX,
        i32::MIN,
        i32::MIN + 1,
        1 << 20,
        255,
        256,
    ]
    .into_iter()
    .chain(-40..40)
    .collect()
}

/// Every pair of samples, as three arguments of a type.
fn arguments(dtype: DType, which: usize) -> Vec<u8> {
    let n = 420;
    let pick = |i: usize, len: usize| (i * [1, 17, 5][which] + which) % len;
    match dtype {
        DType::F32 => (0..n)
            .flat_map(|i| floats()[pick(i, floats().len())].to_le_bytes())
            .collect(),
        DType::F16 => (0..n)
            .flat_map(|i| half::f16::from_f32(floats()[pick(i, floats().len())]).to_le_bytes())
            .collect(),
        DType::BF16 => (0..n)
            .flat_map(|i| half::bf16::from_f32(floats()[pick(i, floats().len())]).to_le_bytes())
            .collect(),
        DType::I32 => (0..n)
            .flat_map(|i| integers()[pick(i, integers().len())].to_le_bytes())
            .collect(),
        DType::U8 => (0..n).map(|i| (i * 7 + which) as u8).collect(),
        DType::Bool => (0..n).map(|i| (i >> which & 1) as u8).collect(),
    }
}

/// Operations that a GPU computes differently; all others equal the CPU's in every bit.
fn is_near(op: ScalarOp) -> bool {
    use ScalarOp as S;
    let near = [
        S::Pow,
        S::Exp,
        S::Exp2,
        S::Expm1,
        S::Ln,
        S::Log1p,
        S::Rsqrt,
        S::Tanh,
        S::Sigmoid,
        S::Erf,
        S::Sin,
        S::Cos,
        S::Tan,
        S::Sinh,
        S::Cosh,
        S::Atan2,
        S::Log2,
        S::Log10,
        S::Lgamma,
        S::Polygamma,
        S::Gelu,
        S::GeluSlope,
        S::GeluTanh,
        S::GeluTanhSlope,
    ];
    near.contains(&op)
}

/// Every operation on every lane it takes.
#[test]
fn operations() {
    if !available() {
        return;
    }
    let (mut exact, mut near) = (Vec::new(), Vec::new());
    for &op in ScalarOp::ALL {
        for dtype in [DType::F32, DType::I32, DType::Bool] {
            let types: Vec<DType> = (0..op.arity())
                .map(|k| {
                    if op.class() == Class::Select && k == 0 {
                        DType::Bool
                    } else {
                        dtype
                    }
                })
                .collect();
            let lanes: Vec<Lane> = types.iter().map(|t| t.lane()).collect();
            let Some(lane) = op.lane(&lanes) else {
                continue;
            };
            let mut b = Builder::new(&[420], 0);
            let values: Vec<u16> = types.iter().map(|&t| b.typed(t, &[1])).collect();
            let values: Vec<u16> = values.into_iter().map(|k| b.inst(Inst::Load(k))).collect();
            let y = b.op(op, &values);
            let out = b.typed(lane.stored(), &[1]);
            b.store(y, out);
            let mut case = Case::new(
                format!("{} of {dtype}", op.name()),
                b.spec,
                &mut Choices::new(1),
            );
            for (k, &t) in types.iter().enumerate() {
                case.args[k] = arguments(t, k);
            }
            let cases = if is_near(op) && lane == Lane::F32 {
                &mut near
            } else {
                &mut exact
            };
            cases.push(case);
        }
    }
    assert!(exact.len() + near.len() > ScalarOp::ALL.len() && near.len() == 24);
    check(&exact, 0.0);
    check(&near, 1e-5);
}

/// Every type from every lane, by stores and by casts.
#[test]
fn conversions() {
    if !available() {
        return;
    }
    let mut cases = Vec::new();
    for from in DType::ALL {
        for to in DType::ALL {
            let mut b = Builder::new(&[420], 0);
            let x = b.typed(from, &[1]);
            let x = b.inst(Inst::Load(x));
            let y = b.inst(Inst::Cast(x, to.lane()));
            for value in [x, y] {
                let out = b.typed(to, &[1]);
                b.store(value, out);
            }
            let mut case = Case::new(format!("{from} to {to}"), b.spec, &mut Choices::new(1));
            case.args[0] = arguments(from, 0);
            cases.push(case);
        }
    }
    check(&cases, 0.0);
}

/// Whether all operations of a random program equal the CPU's in every bit.
fn is_exact(round: usize) -> bool {
    round % 8 < 4
}

/// A random program over random layouts: broadcasts, permutations, gaps, offsets, several results.
fn program(choices: &mut Choices, round: usize) -> Case {
    let rank = 1 + choices.below(4);
    let mut dims: Vec<i64> = (0..rank).map(|_| 1 + choices.below(6) as i64).collect();
    dims[rank - 1] = choices.pick(&[1, 7, 16, 40, 64]);
    if choices.once_in(3) {
        let axis = choices.below(rank);
        dims[axis] = choices.pick(&[33, 64, 70]);
    }
    let mut b = Builder::new(&dims, 0);
    let strides = |choices: &mut Choices, repeats: bool, scrambles: bool| {
        let mut order: Vec<usize> = (0..rank).collect();
        for i in (1..rank).rev().filter(|_| scrambles) {
            order.swap(i, choices.below(i + 1));
        }
        let mut strides = vec![0; rank];
        let mut stride = 1;
        for &axis in order.iter().rev() {
            if repeats && choices.once_in(3) {
                continue;
            }
            strides[axis] = stride;
            stride *= dims[axis] + i64::from(choices.once_in(6));
        }
        strides
    };
    // Half of the programs access all memory in one order, as most kernels do.
    let scrambles = round % 2 == 1;
    let mut floats = Vec::new();
    for _ in 0..1 + choices.below(3) {
        let dtype = choices.pick(&[DType::F32, DType::F32, DType::F16, DType::BF16]);
        let repeats = choices.once_in(2);
        let along = strides(choices, repeats, scrambles);
        let k = b.typed(dtype, &along);
        if choices.once_in(4) {
            b.spec.operands[usize::from(k)].offset = Size::fixed(choices.below(9) as i64);
        }
        floats.push(b.inst(Inst::Load(k)));
    }
    let mut ints = Vec::new();
    let dtype = choices.pick(&[DType::I32, DType::U8]);
    let along = strides(choices, false, scrambles);
    let k = b.typed(dtype, &along);
    ints.push(b.inst(Inst::Load(k)));
    let along: Vec<i64> = (0..rank).map(|_| choices.below(50) as i64 - 10).collect();
    b.spec
        .indices
        .push(along.iter().map(|&s| Size::fixed(s)).collect());
    ints.push(b.inst(Inst::Index(0)));
    if choices.once_in(2) {
        let state = b.typed(DType::I32, &vec![0; rank]);
        let index = choices.pick(&ints);
        floats.push(b.inst(Inst::Uniform {
            state,
            stream: choices.bits(),
            index,
        }));
    }
    for _ in 0..1 + choices.below(8) {
        let mut op = choices.pick(&[
            ScalarOp::Add,
            ScalarOp::Mul,
            ScalarOp::Sub,
            ScalarOp::Max,
            ScalarOp::Min,
            ScalarOp::Tanh,
            ScalarOp::Abs,
        ]);
        if op == ScalarOp::Tanh && is_exact(round) {
            op = choices.pick(&[ScalarOp::Div, ScalarOp::Sqrt]);
        }
        let on_floats = [ScalarOp::Tanh, ScalarOp::Sqrt].contains(&op);
        if !on_floats && choices.once_in(3) {
            let args = [choices.pick(&ints), choices.pick(&ints)];
            let value = b.op(op, &args[..op.arity()]);
            ints.push(value);
        } else {
            let args = [choices.pick(&floats), choices.pick(&floats)];
            let value = b.op(op, &args[..op.arity()]);
            floats.push(value);
        }
    }
    let across = round % 4 == 1;
    let order = strides(choices, false, across);
    let (float, int) = (floats[floats.len() - 1], ints[ints.len() - 1]);
    let out = b.typed(choices.pick(&[DType::F32, DType::F32, DType::BF16]), &order);
    b.store(float, out);
    if choices.once_in(2) {
        let out = b.typed(DType::I32, &order);
        b.store(int, out);
    }
    Case::new(format!("program {round}"), b.spec, choices)
}

#[test]
fn random_programs() {
    if !available() {
        return;
    }
    let mut choices = Choices::new(7);
    let rounds = (0..80).map(|round| (is_exact(round), program(&mut choices, round)));
    let (exact, near): (Vec<_>, Vec<_>) = rounds.partition(|(exact, _)| *exact);
    check(
        &exact.into_iter().map(|(_, case)| case).collect::<Vec<_>>(),
        0.0,
    );
    check(
        &near.into_iter().map(|(_, case)| case).collect::<Vec<_>>(),
        1e-5,
    );
}

/// Sums of products in various contexts: stored alone, beside a product, and of numbers that are
/// invariant along a row. A product that is fused with a sum is rounded once instead of twice.
#[test]
fn products_are_rounded_before_they_are_added() {
    if !available() {
        return;
    }
    let mut cases = Vec::new();
    for company in 0..3 {
        let mut b = Builder::new(&[40, 1003], 0);
        let row: &[i64] = if company == 2 { &[1, 0] } else { &[1003, 1] };
        let (x, y, z, w) = (
            b.load(row),
            b.load(row),
            b.load(&[1003, 1]),
            b.load(&[1003, 1]),
        );
        let (p, q) = (b.op(ScalarOp::Mul, &[x, y]), b.op(ScalarOp::Mul, &[z, w]));
        let sum = b.op(ScalarOp::Add, &[p, q]);
        for value in if company == 1 {
            vec![sum, p]
        } else {
            vec![sum]
        } {
            let out = b.operand(&[1003, 1]);
            b.store(value, out);
        }
        let lowered = lower(&b.spec, &Env::default(), &TARGET).expect("source");
        let case = Case::new(format!("company {company}"), b.spec, &mut Choices::new(5));
        if nvrtc::version().is_ok() {
            let ptx = nvrtc::ptx(&nvrtc::Program::new(PRELUDE, &lowered.functions, 90))
                .unwrap_or_else(|e| panic!("{e}"));
            assert!(
                ptx.contains("mul.rn.f32") && !ptx.contains("fma.rn.f32"),
                "{ptx}"
            );
        }
        cases.push(case);
    }
    check(&cases, 0.0);
}

/// Vectors are loaded and stored by one instruction each, for all strides of the other axes.
#[test]
fn vectors_are_stored_whole() {
    if nvrtc::version().is_err() {
        return;
    }
    let mut pointwise = Builder::new(&[16, 256, 3136], 0);
    let (x, bias) = (
        pointwise.load(&[802_816, 3136, 1]),
        pointwise.load(&[0, 1, 0]),
    );
    let y = pointwise.op(ScalarOp::Add, &[x, bias]);
    let out = pointwise.operand(&[802_816, 3136, 1]);
    pointwise.store(y, out);
    // Rows minus their maximum.
    let mut rows = Builder::new(&[12, 30, 3136], 1);
    let x = rows.load(&[94_080, 3136, 1]);
    let most = rows.reduce(ReduceOp::Max, x);
    let y = rows.op(ScalarOp::Sub, &[x, most]);
    let out = rows.operand(&[94_080, 3136, 1]);
    rows.store(y, out);
    for (name, spec) in [("points", pointwise.spec), ("rows", rows.spec)] {
        let lowered = lower(&spec, &Env::default(), &TARGET).expect("source");
        assert!(
            lowered
                .functions
                .iter()
                .any(|f| f.source.contains("store_vec")),
            "{name}"
        );
        let ptx = nvrtc::ptx(&nvrtc::Program::new(PRELUDE, &lowered.functions, 90))
            .unwrap_or_else(|e| panic!("{e}"));
        let count = |instruction: &str| ptx.matches(instruction).count();
        assert!(
            count("ld.global.v4") > 0 && count("st.global.v4") > 0 && count("st.global.f32") == 0,
            "{name}: {ptx}"
        );
    }
}

/// Rows that are further apart than they are long are moved in vectors, of which the last is
/// shorter: the elements between rows are neither read nor written.
#[test]
fn padded_rows() {
    if !available() {
        return;
    }
    let mut choices = Choices::new(7);
    let mut cases = Vec::new();
    for (dtype, [rows, length, stride]) in [
        (DType::F32, [5, 75, 80]),
        (DType::F32, [9, 1023, 1024]),
        (DType::F16, [7, 250, 256]),
        (DType::BF16, [3, 65, 80]),
    ] {
        let mut b = Builder::new(&[rows, length], 0);
        let (x, bias) = (b.typed(dtype, &[stride, 1]), b.load(&[0, 1]));
        let x = b.inst(Inst::Load(x));
        let scale = b.load(&[1, 0]);
        let y = b.op(ScalarOp::Add, &[x, bias]);
        let y = b.op(ScalarOp::Mul, &[y, scale]);
        let out = b.typed(dtype, &[stride, 1]);
        b.store(y, out);
        let lowered = lower(&b.spec, &Env::default(), &TARGET).expect("source");
        assert!(lowered.functions[0].source.contains("store_vec"));
        cases.push(Case::new(
            format!("{dtype} {rows} × {length}"),
            b.spec,
            &mut choices,
        ));
    }
    check(&cases, 0.0);
}

/// Optimizer updates: several results in place of the arguments, with a length that is no multiple
/// of a vector.
#[test]
fn updates_in_place() {
    if !available() {
        return;
    }
    let mut cases = Vec::new();
    for n in [1, 6, 64, 1003] {
        let mut b = Builder::new(&[n], 0);
        let (weight, gradient, moment) = (b.load(&[1]), b.load(&[1]), b.load(&[1]));
        let (rate, decay) = (b.number(0.1), b.number(0.9));
        let kept = b.op(ScalarOp::Mul, &[moment, decay]);
        let next = b.op(ScalarOp::Add, &[kept, gradient]);
        let step = b.op(ScalarOp::Mul, &[next, rate]);
        let new = b.op(ScalarOp::Sub, &[weight, step]);
        let (to_weight, to_moment) = (b.operand(&[1]), b.operand(&[1]));
        b.store(new, to_weight);
        b.store(next, to_moment);
        let mut case = Case::new(format!("update of {n}"), b.spec, &mut Choices::new(2));
        case.same = vec![(3, 0), (4, 2)];
        cases.push(case);
    }
    check(&cases, 1e-6);
}

/// Sizes, strides and offsets that are known at launch.
#[test]
fn sizes_known_at_launch() {
    if !available() {
        return;
    }
    let n = Size::symbol(Symbol(0));
    let mut cases = Vec::new();
    for size in [0, 1, 5, 48] {
        for across in [false, true] {
            let mut b = Builder::new(&[3, 48, 40], 0);
            let x = b.load(if across {
                &[1920, 1, 48]
            } else {
                &[1920, 40, 1]
            });
            let bias = b.load(&[0, 0, 1]);
            let y = b.op(ScalarOp::Add, &[x, bias]);
            let out = b.operand(&[1920, 40, 1]);
            b.store(y, out);
            b.spec.dims[1] = n;
            let plane = n.checked_mul(Size::fixed(40)).expect("a size");
            b.spec.operands[0].strides[0] = plane;
            b.spec.operands[usize::from(out)].strides[0] = plane;
            b.spec.operands[0].offset = n;
            if across {
                b.spec.operands[0].strides[2] = n;
            }
            let name = format!("{size} of 48, across {across}");
            cases.push(Case::bounded(
                name,
                b.spec,
                Env([48; 8]),
                Env([size; 8]),
                &mut Choices::new(3),
            ));
        }
    }
    check(&cases, 0.0);
}
