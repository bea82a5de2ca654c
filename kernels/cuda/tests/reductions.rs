//! Loops with reductions, against the CPU's kernels.

#[allow(dead_code)] // not every test needs all of it
#[path = "../../tests/loops/builder.rs"]
mod builder;
mod common;

use builder::Builder;
use common::{Case, Choices, NO_FAULT, TARGET, available, check, compile_for_gpu, emulate};
use slabwise_cuda::emulator::{Check, Emulator, Order};
use slabwise_cuda::{Function, PRELUDE, Target, has_same_sums, lower, nvrtc};
use slabwise_kernels::dtype::DType;
use slabwise_kernels::scalar::{ScalarOp, Value};
use slabwise_kernels::size::{Env, Size, Symbol};
use slabwise_kernels::spec::{Inst, ReduceOp};

const OPS: [ReduceOp; 8] = [
    ReduceOp::Sum,
    ReduceOp::Prod,
    ReduceOp::Max,
    ReduceOp::Min,
    ReduceOp::Any,
    ReduceOp::All,
    ReduceOp::ArgMax,
    ReduceOp::ArgMin,
];

/// Dims, the number of reduced ones, and the strides of the source: short rows, warps, blocks,
/// columns, several axes, parts.
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
            for dtype in if truth {
                vec![DType::Bool]
            } else {
                vec![DType::F32, DType::I32]
            } {
                // The types alternate, except for one short layout.
                if at != 2 && (of + at) % 3 != 0 {
                    continue;
                }
                let mut b = Builder::new(&dims, reduced);
                let x = b.typed(dtype, &strides);
                let x = b.inst(Inst::Load(x));
                let y = b.reduce(op, x);
                let kept = dims.len() - reduced;
                let mut to: Vec<i64> = (0..kept)
                    .map(|a| dims[a + 1..kept].iter().product())
                    .collect();
                to.resize(dims.len(), 0);
                let found = matches!(op, ReduceOp::ArgMax | ReduceOp::ArgMin);
                let out = b.typed(if found { DType::I32 } else { dtype }, &to);
                b.store(y, out);
                let mut choices = Choices::new(at as u32);
                let mut case = Case::new(
                    format!("{op:?} of {dtype} over {dims:?} as {strides:?}"),
                    b.spec,
                    &mut choices,
                );
                let count = case.args[0].len() / dtype.bytes();
                if op == ReduceOp::Prod && dtype == DType::F32 {
                    // Thousands of factors whose product is exact in every order.
                    let some = [2.0f32, 0.5, -1.0, -2.0, -0.5];
                    let mut factor = || {
                        if choices.once_in(20) {
                            choices.pick(&some)
                        } else {
                            1.0
                        }
                    };
                    case.args[0] = (0..count).flat_map(|_| factor().to_le_bytes()).collect();
                } else if dtype == DType::F32 && op != ReduceOp::Sum {
                    // Ties, zeros of both signs, and in some rows NaN.
                    let some = [0.0, -0.0, 1.0, -1.0, 1.0, f32::INFINITY];
                    let mut values: Vec<f32> = (0..count)
                        .map(|_| some[choices.below(if at % 2 == 0 { 5 } else { 6 })])
                        .collect();
                    if at % 3 == 0 {
                        let nan = choices.below(count);
                        values[nan] = f32::NAN;
                    }
                    case.args[0] = values.iter().flat_map(|x| x.to_le_bytes()).collect();
                } else if dtype == DType::Bool {
                    // Almost all elements are equal.
                    let all = op == ReduceOp::All;
                    case.args[0] = (0..count)
                        .map(|_| u8::from(choices.once_in(900) != all))
                        .collect();
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
    for (rows, n) in [
        (1, 1),
        (5, 7),
        (33, 64),
        (4, 100),
        (9, 1000),
        (2, 1024),
        (3, 4096),
        (2, 5003),
        (1, 20_000),
        (2, 40_000),
    ] {
        for across in [false, true] {
            cases.push(Case::new(
                format!("softmax {rows} × {n}, across {across}"),
                softmax(rows, n, across).spec,
                &mut choices,
            ));
        }
        cases.push(Case::new(
            format!("layer norm {rows} × {n}"),
            layer_norm(rows, n).spec,
            &mut choices,
        ));
    }
    // In place: the result replaces the argument.
    for (rows, n) in [(5, 64), (3, 4100), (1, 20_000)] {
        let mut case = Case::new(
            format!("softmax {rows} × {n} in place"),
            softmax(rows, n, false).spec,
            &mut choices,
        );
        case.same.push((1, 0));
        cases.push(case);
    }
    // More rows than all blocks process in one iteration, with one reduction, whose shared memory
    // is reused.
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
    let mut case = Case::new(
        "softmax of a row too long to keep",
        softmax(3, 40_000, false).spec,
        &mut choices,
    );
    case.target.multiprocessors = 1;
    cases.push(case);
    check(&cases, 1e-5);
}

/// Three results of a row, one of each pass: 2x; whether x is its largest element, times the sum of
/// all; and where x is positive, the difference from the mean of that. The truth value is cheaper
/// to compute again than to keep. `keeps` says whether the last result needs x.
fn stores_of_every_pass(rows: i64, n: i64, keeps: bool) -> Builder {
    let mut b = Builder::new(&[rows, n], 1);
    let x = b.load(&[n, 1]);
    let (two, zero) = (b.number(2.0), b.number(0.0));
    let each = b.number(1.0 / n as f32);
    let double = b.op(ScalarOp::Mul, &[x, two]);
    let sum = b.reduce(ReduceOp::Sum, x);
    let found = b.reduce(ReduceOp::ArgMax, x);
    b.spec
        .indices
        .push([0, 1].map(Size::fixed).into_iter().collect());
    let index = b.inst(Inst::Index(0));
    let is_found = b.op(ScalarOp::Eq, &[index, found]);
    let marked = b.op(ScalarOp::Select, &[is_found, sum, zero]);
    let total = b.reduce(ReduceOp::Sum, marked);
    let mean = b.op(ScalarOp::Mul, &[total, each]);
    let last = if keeps {
        let is_positive = b.op(ScalarOp::Gt, &[x, zero]);
        let rest = b.op(ScalarOp::Sub, &[x, mean]);
        b.op(ScalarOp::Select, &[is_positive, rest, zero])
    } else {
        b.op(ScalarOp::Sub, &[marked, mean])
    };
    for value in [double, marked, last] {
        let out = b.operand(&[n, 1]);
        b.store(value, out);
    }
    b
}

/// Rows of vectors and not, kept in registers and in shared memory, too long to keep, and split
/// into parts; each of the results in place of the argument.
#[test]
fn every_pass_stores_its_values() {
    if !available() {
        return;
    }
    let mut choices = Choices::new(11);
    let mut cases = Vec::new();
    for (rows, n) in [
        (1, 1),
        (5, 7),
        (33, 256),
        (2, 4100),
        (3, 40_000),
        (1, 40_000),
    ] {
        for (at, keeps) in [true, false, true].into_iter().enumerate() {
            let mut case = Case::new(
                format!("{rows} × {n}, result {at} in place, keeps {keeps}"),
                stores_of_every_pass(rows, n, keeps).spec,
                &mut choices,
            );
            case.same.push((at + 1, 0));
            if rows == 3 {
                case.target.multiprocessors = 1;
            }
            cases.push(case);
        }
    }
    check(&cases, 1e-5);
}

/// The two sums of a batch norm's gradient over [n, c, h, w] for each channel, and the gradient
/// itself.
fn batch_norm_gradient(n: i64, c: i64, hw: i64, dtype: DType) -> Builder {
    let mut b = Builder::new(&[c, n, hw], 2);
    let image = [hw, c * hw, 1];
    let (x, dy) = (b.typed(dtype, &image), b.typed(dtype, &image));
    let (x, dy) = (b.inst(Inst::Load(x)), b.inst(Inst::Load(dy)));
    let (mean, scale) = (b.load(&[1, 0, 0]), b.load(&[1, 0, 0]));
    let centred = b.op(ScalarOp::Sub, &[x, mean]);
    let product = b.op(ScalarOp::Mul, &[dy, centred]);
    let (sum, dot) = (
        b.reduce(ReduceOp::Sum, dy),
        b.reduce(ReduceOp::Sum, product),
    );
    let each = b.number(1.0 / (n * hw) as f32);
    let (sum, dot) = (
        b.op(ScalarOp::Mul, &[sum, each]),
        b.op(ScalarOp::Mul, &[dot, each]),
    );
    let along = b.op(ScalarOp::Mul, &[centred, dot]);
    let rest = b.op(ScalarOp::Sub, &[dy, sum]);
    let rest = b.op(ScalarOp::Sub, &[rest, along]);
    let dx = b.op(ScalarOp::Mul, &[rest, scale]);
    let (out, sums) = (b.typed(dtype, &image), b.operand(&[1, 0, 0]));
    b.store(dx, out);
    b.store(sum, sums);
    b
}

/// Sums over two axes that are not contiguous with each other: planes of vectors and of odd
/// lengths, one iteration and many, whole rows, kept in registers, in shared memory or not at all,
/// and parts; the gradient in a separate region and in that of an argument.
#[test]
fn sums_over_two_axes() {
    if !available() {
        return;
    }
    let mut choices = Choices::new(6);
    let mut cases = Vec::new();
    let shapes = [
        (3, 5, 49),
        (2, 3, 16),
        (5, 2, 784),
        (16, 2, 64),
        (7, 3, 1024),
        (16, 4, 1024),
        (40, 1, 1296),
        (33, 2, 1027),
        (1, 2, 20_000),
    ];
    for (at, (n, c, hw)) in shapes.into_iter().enumerate() {
        for dtype in [DType::F32, DType::BF16] {
            let mut case = Case::new(
                format!("[{n}, {c}, {hw}] of {dtype}"),
                batch_norm_gradient(n, c, hw, dtype).spec,
                &mut choices,
            );
            if at % 2 == 1 {
                case.same.push((4, at / 2 % 2));
            }
            cases.push(case);
        }
    }
    // Three axes, none contiguous with another; more rows than multiprocessors have blocks.
    for (multiprocessors, dims) in [(2, [2, 5, 9, 300, 40]), (1, [40, 1, 3, 5, 36])] {
        let [a, b_, c, d, e] = dims;
        let mut b = Builder::new(&dims, 3);
        let strides = [b_ * c * (d + 1) * e, c * (d + 1) * e, e * (d + 1), e, 1];
        let (x, y) = (b.load(&strides), b.load(&[0, 0, e * d, 0, 1]));
        let product = b.op(ScalarOp::Mul, &[x, y]);
        let (sum, most) = (
            b.reduce(ReduceOp::Sum, product),
            b.reduce(ReduceOp::ArgMax, x),
        );
        let (out, found) = (
            b.operand(&[b_, 1, 0, 0, 0]),
            b.typed(DType::I32, &[b_, 1, 0, 0, 0]),
        );
        b.store(sum, out);
        b.store(most, found);
        let mut case = Case::new(format!("three axes of {a} rows"), b.spec, &mut choices);
        case.target.multiprocessors = multiprocessors;
        cases.push(case);
    }
    // A batch known at launch, and planes of a size known at launch.
    for size in [40, 7, 0] {
        let symbol = Size::symbol(Symbol(0));
        let mut b = batch_norm_gradient(40, 2, 1024, DType::F32);
        b.spec.dims[1] = symbol;
        cases.push(Case::bounded(
            format!("{size} images"),
            b.spec,
            Env([40; 8]),
            Env([size; 8]),
            &mut choices,
        ));
        let mut b = batch_norm_gradient(6, 2, 1, DType::F32);
        let plane = symbol
            .checked_mul(symbol)
            .and_then(|s| s.checked_mul(Size::fixed(4)))
            .expect("a size");
        b.spec.dims[2] = plane;
        for k in [0, 1, 4] {
            b.spec.operands[k].strides[0] = plane;
            b.spec.operands[k].strides[1] = plane.checked_mul(Size::fixed(2)).expect("a size");
        }
        cases.push(Case::bounded(
            format!("planes of {size}²"),
            b.spec,
            Env([40; 8]),
            Env([size; 8]),
            &mut choices,
        ));
    }
    check(&cases, 1e-5);
}

/// Rows in parts take one launch for each pass, and give the same bits whichever block of a row is
/// the last: a row, some with a block for each part, and several of one block.
#[test]
fn the_last_block_joins_the_parts_of_its_rows() {
    if !available() {
        return;
    }
    let mut choices = Choices::new(17);
    let columns = |rows: i64, n: i64| {
        let mut b = Builder::new(&[rows, n], 1);
        let x = b.load(&[1, rows]);
        let square = b.op(ScalarOp::Mul, &[x, x]);
        let (sum, most) = (
            b.reduce(ReduceOp::Sum, square),
            b.reduce(ReduceOp::ArgMax, x),
        );
        let (out, found) = (b.operand(&[1, 0]), b.typed(DType::I32, &[1, 0]));
        b.store(sum, out);
        b.store(most, found);
        b
    };
    let mut cases = Vec::new();
    for (name, passes, builder) in [
        ("columns", 1, columns(100, 9000)),
        ("one column", 1, columns(1, 70_000)),
        ("softmax", 3, softmax(3, 20_000, false)),
        ("softmax across", 3, softmax(70, 2000, true)),
        (
            "norm's gradient",
            2,
            batch_norm_gradient(16, 3, 1024, DType::BF16),
        ),
    ] {
        let case = Case::new(name, builder.spec, &mut choices);
        let lowered = lower(&case.spec, &case.bounds, &case.target).expect("a loop");
        assert_eq!(lowered.functions.len(), passes, "{name}");
        assert_eq!(lowered.launches(&case.env).len(), passes, "{name}");
        assert!(lowered.counters > 0 && lowered.workspace > 0, "{name}");
        if let Some(emulator) = emulate(&lowered.functions) {
            let orders = (1..6).map(Order::Shuffled);
            let bits = [Order::Forward, Order::Reverse].into_iter().chain(orders);
            let mut bits = bits.map(|order| {
                let run = case.emulated(&lowered, &emulator, order, NO_FAULT);
                run.unwrap_or_else(|e| panic!("{name}: {e}")).0
            });
            let first = bits.next().expect("an order");
            assert!(bits.all(|got| got == first), "{name}");
        }
        cases.push(case);
    }
    check(&cases, 1e-5);
}

/// Two kernels' sums are reported to have the same bits only where they do, because the other
/// stores of a kernel may change the width of its vectors.
#[test]
fn loops_reported_alike_compute_the_same_bits() {
    if !available() {
        return;
    }
    let mut seen = [0, 0];
    for (n, c, hw) in [(5, 2, 49), (16, 3, 1024), (7, 2, 784), (33, 2, 1024)] {
        for from in [DType::F32, DType::BF16] {
            let with = |stored: Option<DType>| {
                let mut b = Builder::new(&[c, n, hw], 2);
                let image = [hw, c * hw, 1];
                let x = b.typed(from, &image);
                let x = b.inst(Inst::Load(x));
                let sum = b.reduce(ReduceOp::Sum, x);
                let out = b.operand(&[1, 0, 0]);
                b.store(sum, out);
                if let Some(dtype) = stored {
                    let y = b.op(ScalarOp::Mul, &[x, x]);
                    let out = b.typed(dtype, &image);
                    b.store(y, out);
                }
                Case::new(
                    format!("[{n}, {c}, {hw}] of {from} and {stored:?}"),
                    b.spec,
                    &mut Choices::new(8),
                )
            };
            let alone = with(None);
            for other in [DType::F32, DType::BF16].map(|dtype| with(Some(dtype))) {
                let alike = has_same_sums(&alone.spec, &other.spec, &Env::default(), &TARGET)
                    .expect("kernels");
                let sums = [&alone, &other].map(|case| {
                    let lowered = lower(&case.spec, &case.bounds, &case.target).expect("source");
                    let emulator = Emulator::new(&lowered.functions, Check::Nothing)
                        .unwrap_or_else(|e| panic!("{e}"));
                    case.emulated(&lowered, &emulator, Order::Forward, NO_FAULT)
                        .unwrap_or_else(|e| panic!("{e}"))
                        .0
                        .swap_remove(1)
                });
                assert!(!alike || sums[0] == sums[1], "{}", other.name);
                seen[usize::from(alike)] += 1;
            }
        }
    }
    assert!(seen[0] > 0 && seen[1] > 0, "{seen:?}");
}

/// The loads and stores of rows over two axes in the compiled code: they are vectors, and the loads
/// of all iterations precede the first store.
#[test]
fn two_axes_are_moved_in_vectors() {
    if !available() || nvrtc::version().is_err() {
        return;
    }
    let target = Target {
        sm: 90,
        multiprocessors: 132,
        ..TARGET
    };
    for (n, c, hw, least) in [
        (64, 64, 3136, 4),
        (64, 256, 196, 4),
        (64, 512, 784, 2),
        (16, 64, 256, 2),
    ] {
        let spec = batch_norm_gradient(n, c, hw, DType::F32).spec;
        let lowered = lower(&spec, &Env::default(), &target).expect("source");
        [80, 90]
            .into_iter()
            .for_each(|sm| compile_for_gpu(&lowered.functions, sm, 0));
        let storing: Vec<Function> = lowered
            .functions
            .into_iter()
            .filter(|f| f.source.contains("store_vec"))
            .collect();
        let ptx = nvrtc::ptx(&nvrtc::Program::new(PRELUDE, &storing, 90))
            .unwrap_or_else(|e| panic!("{e}"));
        let moved: Vec<&str> = ptx
            .lines()
            .filter(|l| l.contains(".global.") && l.contains("v4"))
            .collect();
        let first = moved
            .iter()
            .position(|l| l.contains("st.global.v4"))
            .expect("a store");
        assert!(
            first >= least && moved[first..].iter().all(|l| l.contains("st.global.v4")),
            "[{n}, {c}, {hw}]: {moved:#?}"
        );
    }
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
        cases.push(Case::bounded(
            format!("{size} rows of {bound}"),
            b.spec,
            bounds,
            env,
            &mut choices,
        ));
        let mut b = softmax(6, 40, false);
        b.spec.dims[1] = symbol;
        for k in [0, 1] {
            b.spec.operands[k].strides[0] = symbol;
        }
        cases.push(Case::bounded(
            format!("rows of {size} of {bound}"),
            b.spec,
            bounds,
            env,
            &mut choices,
        ));
        // The gradient of a bias: few columns, many rows.
        let mut b = Builder::new(&[24, 9000], 1);
        let x = b.load(&[1, 24]);
        let sum = b.reduce(ReduceOp::Sum, x);
        let out = b.operand(&[1, 0]);
        b.store(sum, out);
        b.spec.dims[1] = symbol.checked_mul(Size::fixed(450)).expect("a size");
        cases.push(Case::bounded(
            format!("columns of {} of 18000", 450 * size),
            b.spec,
            bounds,
            env,
            &mut choices,
        ));
    }
    check(&cases, 1e-5);
}

#[test]
fn invariant_values_are_reduced_too() {
    if !available() {
        return;
    }
    let mut b = Builder::new(&[6, 10], 1);
    let flat = b.load(&[1, 0]);
    let three = b.inst(Inst::Const(Value::F32(3.0)));
    let (sum, product) = (
        b.reduce(ReduceOp::Sum, flat),
        b.reduce(ReduceOp::Prod, three),
    );
    let found = b.reduce(ReduceOp::ArgMax, flat);
    let both = b.op(ScalarOp::Add, &[sum, product]);
    let (out, at) = (b.operand(&[1, 0]), b.typed(DType::I32, &[1, 0]));
    b.store(both, out);
    b.store(found, at);
    check(&[Case::new("flat", b.spec, &mut Choices::new(5))], 1e-5);
}
