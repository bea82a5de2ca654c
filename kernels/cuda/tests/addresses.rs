//! Every family of kernels with all memory inaccessible except the arguments of its launch: no
//! kernel accesses other memory, and each is caught if its arguments are too short.

#[path = "../../tests/loops/builder.rs"]
#[allow(dead_code)] // not every test needs all of it
mod builder;
mod common;
mod products;

use builder::Builder;
use common::layouts::{contiguous, sizes};
use common::{Case, Choices, NO_FAULT, TARGET, sanitized};
use products::{matmul, plain, strided, typed};
use slabwise_cuda::emulator::{Check, Emulator, Order, available};
use slabwise_cuda::{Lowered, lower, lower_fused};
use slabwise_kernels::dtype::DType;
use slabwise_kernels::scalar::ScalarOp;
use slabwise_kernels::size::{Env, Size};
use slabwise_kernels::spec::{
    Access, Body, BoundsCheck, Conv2d, ConvKind, Gather, Inst, NonMaxSuppression, Nonzero, Pool2d,
    Pool2dGrad, PoolKind, ReduceOp, Scatter, Sort, Spec, Store, Window,
};

/// A spec that stores the anchor's value unchanged.
fn storing(body: Body, dims: &[i64], dtype: DType) -> Spec {
    let (operands, stores) = (
        vec![contiguous(dtype, dims)],
        vec![Store {
            value: 0,
            operand: 0,
        }],
    );
    Spec {
        body,
        dims: sizes(dims),
        reduced: 0,
        operands,
        indices: vec![],
        code: vec![Inst::Acc],
        stores,
    }
}

/// An anchor that writes its result itself.
fn writing(body: Body, dims: &[i64]) -> Spec {
    Spec {
        body,
        dims: sizes(dims),
        reduced: 0,
        operands: vec![],
        indices: vec![],
        code: vec![],
        stores: vec![],
    }
}

fn scaled(dims: &[i64], from: &[i64], to: &[i64]) -> Spec {
    let mut b = Builder::new(dims, 0);
    let (x, scale) = (b.load(from), b.number(0.5));
    let y = b.op(ScalarOp::Mul, &[x, scale]);
    let out = b.operand(to);
    b.store(y, out);
    b.spec
}

fn softmax(rows: i64, n: i64) -> Spec {
    let mut b = Builder::new(&[rows, n], 1);
    let x = b.load(&[n, 1]);
    let most = b.reduce(ReduceOp::Max, x);
    let below = b.op(ScalarOp::Sub, &[x, most]);
    let e = b.op(ScalarOp::Exp, &[below]);
    let sum = b.reduce(ReduceOp::Sum, e);
    let y = b.op(ScalarOp::Div, &[e, sum]);
    let out = b.operand(&[n, 1]);
    b.store(y, out);
    b.spec
}

fn total(dims: &[i64], strides: &[i64], to: &[i64]) -> Spec {
    let mut b = Builder::new(dims, 1);
    let x = b.load(strides);
    let y = b.reduce(ReduceOp::Sum, x);
    let out = b.operand(to);
    b.store(y, out);
    b.spec
}

fn random() -> Spec {
    let mut b = Builder::new(&[1003], 0);
    let state = b.typed(DType::I32, &[0]);
    b.spec.indices.push(sizes(&[1]));
    let index = b.inst(Inst::Index(0));
    let x = b.inst(Inst::Uniform {
        state,
        stream: 7,
        index,
    });
    let out = b.operand(&[1]);
    b.store(x, out);
    b.spec
}

fn pools() -> [Spec; 2] {
    let window = Window {
        k: [3, 3],
        stride: [2, 2],
        pad: [1, 1],
    };
    let (image, result) = ([2, 3, 9, 9], [2, 3, 5, 5]);
    let arg = || Some(contiguous(DType::U8, &result));
    let hw = [Size::fixed(9); 2];
    let forward = Pool2d {
        kind: PoolKind::Max,
        window,
        hw,
        x: contiguous(DType::F32, &image),
        arg: arg(),
    };
    let ohw = [Size::fixed(5); 2];
    let back = Pool2dGrad {
        kind: PoolKind::Max,
        window,
        ohw,
        dy: contiguous(DType::F32, &result),
        arg: arg(),
    };
    [
        storing(Body::Pool2d(forward), &result, DType::F32),
        storing(Body::Pool2dGrad(back), &image, DType::F32),
    ]
}

fn indexing() -> [Spec; 3] {
    let index = |strides: &[usize]| typed(DType::I32, 0, strides);
    let source = strided(0, &[0, 1]);
    let gather = Gather {
        source,
        index: index(&[1, 0]),
        axis_stride: Size::fixed(20),
        axis_len: Size::fixed(9),
    };
    let value = contiguous(DType::F32, &[70, 20]);
    let scatter = Scatter {
        axis: 0,
        reduce: ReduceOp::Sum,
        space: sizes(&[70, 20]),
        value,
        index: index(&[1, 0]),
    };
    let check = BoundsCheck {
        index: index(&[1]),
        limit: Size::fixed(1000),
    };
    [
        storing(Body::Gather(gather), &[70, 20], DType::F32),
        storing(Body::Scatter(scatter), &[9, 20], DType::F32),
        writing(Body::BoundsCheck(check), &[300]),
    ]
}

fn convolution(kind: ConvKind) -> Spec {
    let n = |n: i64| Size::fixed(n);
    let [image, weight, result] = [[2, 5, 9, 9], [6, 5, 3, 3], [2, 6, 9, 9]];
    let [a, b, out] = match kind {
        ConvKind::Forward => [image, weight, result],
        ConvKind::InputGrad => [result, weight, image],
        ConvKind::WeightGrad => [image, result, weight],
    };
    let (hw, k, one) = ([n(9), n(9)], [3, 3], [1, 1]);
    let [a, b, to] = [a, b, out].map(|dims| contiguous(DType::F32, &dims));
    let body = Conv2d {
        kind,
        n: n(2),
        ci: n(5),
        co: n(6),
        hw,
        ohw: hw,
        k,
        stride: one,
        pad: one,
        dilation: one,
        groups: 1,
        a,
        b,
        prologue: None,
        exact: false,
    };
    plain(Body::Conv2d(body), &out.map(|d| d as usize), to)
}

fn choosing() -> [Spec; 4] {
    let compact = Nonzero {
        space: sizes(&[5000]),
        mask: contiguous(DType::Bool, &[5000]),
        positions: contiguous(DType::I32, &[2400]),
    };
    let sort = |dims: &[i64]| {
        Body::Sort(Sort {
            descending: false,
            len: sizes(dims)[dims.len() - 1],
            source: contiguous(DType::F32, dims),
            positions: contiguous(DType::I32, dims),
        })
    };
    let boxes = NonMaxSuppression {
        threshold: 0.4,
        boxes: contiguous(DType::F32, &[1100, 4]),
        keep: contiguous(DType::Bool, &[1100]),
    };
    [
        writing(Body::Nonzero(compact), &[2400]),
        writing(sort(&[5, 70]), &[5, 70]),
        writing(sort(&[2, 4100]), &[2, 4100]),
        writing(Body::NonMaxSuppression(boxes), &[1100]),
    ]
}

/// A case of every family.
fn cases(choices: &mut Choices) -> Vec<Case> {
    let half = |dims: &[usize]| typed(DType::F16, 0, dims);
    let mut specs: Vec<(&str, Spec)> = vec![
        ("elementwise", scaled(&[1003], &[1], &[1])),
        ("strided", scaled(&[7, 33], &[40, 1], &[33, 1])),
        ("transpose", scaled(&[40, 70], &[1, 40], &[70, 1])),
        ("rows", softmax(9, 50)),
        ("long rows", softmax(3, 3000)),
        ("rows in parts", total(&[1, 40_000], &[0, 1], &[1, 0])),
        ("columns", total(&[50, 30], &[1, 50], &[1, 0])),
        ("random", random()),
        (
            "product",
            matmul(&[70, 50], 33, strided(0, &[33, 1]), strided(0, &[50, 1])),
        ),
        (
            "product of few rows",
            matmul(&[2, 300], 90, strided(0, &[90, 1]), strided(0, &[300, 1])),
        ),
        (
            "product of halves",
            matmul(&[70, 64], 48, half(&[48, 1]), half(&[64, 1])),
        ),
        ("convolution", convolution(ConvKind::Forward)),
        ("its input's gradient", convolution(ConvKind::InputGrad)),
        ("its weight's gradient", convolution(ConvKind::WeightGrad)),
    ];
    specs.extend(["gather", "scatter", "check"].into_iter().zip(indexing()));
    specs.extend(["pool", "pool's gradient"].into_iter().zip(pools()));
    specs.extend(
        ["positions", "short sort", "long sort", "suppression"]
            .into_iter()
            .zip(choosing()),
    );
    let mut cases: Vec<Case> = specs
        .into_iter()
        .map(|(name, spec)| Case::new(name, spec, choices))
        .collect();
    for case in &mut cases {
        // A short axis to gather from and to scatter to.
        if matches!(case.spec.body, Body::Gather(_) | Body::Scatter(_)) {
            case.args[1] = (0..case.args[1].len() / 4)
                .flat_map(|i| (i as i32 * 5 % 9).to_le_bytes())
                .collect();
        }
        if matches!(case.spec.body, Body::BoundsCheck(_)) {
            case.args[0]
                .chunks_mut(4)
                .for_each(|b| b.copy_from_slice(&3i32.to_le_bytes()));
        }
    }
    cases
}

/// The first argument that a kernel writes.
fn written(case: &Case) -> Option<usize> {
    case.spec
        .arguments()
        .iter()
        .position(|(_, _, access)| *access != Access::Read)
}

/// Runs in a separate process, which the test below starts with the sanitizer's library.
#[test]
#[ignore = "needs a preloaded library"]
fn addresses_of_every_family_child() {
    let mut choices = Choices::new(41);
    let mut all = cases(&mut choices);
    let mut kernels: Vec<Lowered> = all
        .iter()
        .map(|c| lower(&c.spec, &c.bounds, &TARGET).expect("source"))
        .collect();
    // Horizontally fused specs: all arguments, one spec's after the other's.
    let members: Vec<Case> = [30, 700, 1003]
        .map(|n| Case::new("some", scaled(&[n], &[1], &[1]), &mut choices))
        .into();
    let specs: Vec<&Spec> = members.iter().map(|case| &case.spec).collect();
    let group = lower_fused(&specs, &Env::default(), &TARGET)
        .expect("source")
        .remove(0);
    assert_eq!(group.members.len(), 3);
    let mut whole = members[0].clone();
    whole.name = "many".into();
    whole.args = members.iter().flat_map(|case| case.args.clone()).collect();
    all.push(whole);
    kernels.push(group.lowered);
    let functions: Vec<_> = kernels.iter().flat_map(|k| k.functions.clone()).collect();
    let emulator = Emulator::new(&functions, Check::Addresses).expect("compiles");
    for (case, kernel) in all.iter().zip(&kernels) {
        let run = |case: &Case| case.emulated(kernel, &emulator, Order::Forward, NO_FAULT);
        run(case).unwrap_or_else(|e| panic!("{} reaches too far: {e}", case.name));
        // Eight bytes less than it writes or, if it writes nothing, reads.
        let mut short = case.clone();
        let argument = &mut short.args[written(case).unwrap_or(0)];
        argument.truncate((argument.len() - 1) / 8 * 8);
        let error = run(&short)
            .err()
            .unwrap_or_else(|| panic!("{} is not caught", case.name));
        assert!(error.contains("AddressSanitizer"), "{}: {error}", case.name);
    }
}

#[test]
fn no_family_accesses_memory_outside_its_arguments() {
    if available() {
        sanitized("addresses_of_every_family_child");
    }
}
