//! Matrix products: all candidate kernels, emulated, against sums in double precision and the CPU's
//! kernels.

mod common;
mod products;

use common::gpu::Gpu;
use common::{Case, Choices, NO_FAULT, TARGET, available, compare, emulate};
use products::{
    Pick, check, check_exact, check_like_cpu, check_within, contiguous, matmul, small_integers,
    strided, typed,
};
use slabwise_cuda::emulator::{self, Check, Emulator, Order};
use slabwise_cuda::{Candidate, Lowered, Target, candidates, lower};
use slabwise_kernels::dtype::DType;
use slabwise_kernels::scalar::{ScalarOp, Value};
use slabwise_kernels::size::{Env, Size, Symbol};
use slabwise_kernels::spec::{Body, Inst, Operand, Spec, Store};

/// Row- and column-major, for both operands.
fn layouts(m: usize, n: usize, k: usize) -> [([usize; 2], [usize; 2]); 4] {
    [
        ([k, 1], [n, 1]),
        ([1, m], [1, k]),
        ([1, m], [n, 1]),
        ([k, 1], [1, k]),
    ]
}

fn laid(shape: [usize; 3], a: [usize; 2], b: [usize; 2]) -> Spec {
    let [m, n, k] = shape;
    matmul(&[m, n], k, strided(0, &a), strided(0, &b))
}

#[test]
fn every_tile_on_ragged_shapes() {
    if !available() {
        return;
    }
    let mut choices = Choices::new(1);
    let mut cases = Vec::new();
    for (i, (m, n, k)) in [(140, 130, 37), (132, 64, 16), (33, 137, 19)]
        .into_iter()
        .enumerate()
    {
        for (a, b) in layouts(m, n, k)
            .into_iter()
            .skip(if i == 0 { 0 } else { i % 2 * 3 })
            .take(if i == 0 { 4 } else { 1 })
        {
            let mut case = Case::new(
                format!("{m}×{n}×{k} {a:?} {b:?}"),
                laid([m, n, k], a, b),
                &mut choices,
            );
            case.target.multiprocessors = 1;
            cases.push(case);
        }
    }
    let ran = check(&cases, Pick::All);
    let all = "128x128 128x64 64x128 64x64 32x128 128x32 32x32 16x64 256x16";
    for tile in all.split(' ') {
        assert!(ran.contains(&format!("gemm_{tile}")), "{ran:?}");
    }
}

#[test]
fn few_rows_or_columns() {
    if !available() {
        return;
    }
    let mut choices = Choices::new(2);
    let mut cases = Vec::new();
    for (m, n, k) in [
        (1, 300, 90),
        (300, 1, 120),
        (7, 70, 100),
        (270, 3, 259),
        (1, 1, 1100),
        (2, 2, 3),
    ] {
        for (a, b) in layouts(m, n, k).into_iter().skip(m % 2).step_by(2) {
            cases.push(Case::new(
                format!("{m}×{n}×{k} {a:?} {b:?}"),
                laid([m, n, k], a, b),
                &mut choices,
            ));
        }
    }
    // Few multiprocessors lead to few parts; these lead to many.
    cases.iter_mut().for_each(|c| c.target.multiprocessors = 40);
    let ran = check(&cases, Pick::Vectors);
    assert!(
        ran.iter()
            .any(|n| n.starts_with("gemv_dots") && n.ends_with("parts")),
        "{ran:?}"
    );
    assert!(
        ran.iter()
            .any(|n| n.starts_with("gemv_columns") && n.ends_with("parts")),
        "{ran:?}"
    );
}

/// Strides of a batch of `rows × columns` matrices: row-major, column-major, padded rows, scattered
/// or broadcast.
fn scattered(choices: &mut Choices, batch: &[usize], rows: usize, columns: usize) -> Operand {
    let (row, column, size) = match choices.below(5) {
        0 => (columns, 1, rows * columns),
        1 => (1, rows, rows * columns),
        2 => (columns + 4, 1, rows * (columns + 4)),
        3 => (2 * columns + 1, 2, rows * (2 * columns + 1)),
        _ => (3, 3 * rows + 2, columns * (3 * rows + 2)),
    };
    let mut strides = vec![];
    let mut total = size.next_multiple_of([1, 4][choices.below(2)]);
    for &b in batch.iter().rev() {
        strides.insert(0, if choices.once_in(3) { 0 } else { total });
        total *= b;
    }
    strides.extend([row, column]);
    strided([0, 0, 3, 4][choices.below(4)], &strides)
}

#[test]
fn batches_broadcasts_and_odd_strides() {
    if !available() {
        return;
    }
    let mut choices = Choices::new(3);
    let cases: Vec<Case> = (0..24)
        .map(|i| {
            let batch: Vec<usize> = (0..[0, 1, 1, 2][choices.below(4)])
                .map(|_| 1 + choices.below(3))
                .collect();
            let most = if i % 3 == 0 { 12 } else { 70 };
            let [m, n, k] = [0; 3].map(|_| 1 + choices.below(most));
            let (a, b) = (
                scattered(&mut choices, &batch, m, k),
                scattered(&mut choices, &batch, k, n),
            );
            let dims: Vec<usize> = batch.iter().copied().chain([m, n]).collect();
            let mut spec = matmul(&dims, k, a, b);
            if choices.once_in(3) {
                // A result that is contiguous along its rows.
                let rank = dims.len();
                let mut order = dims.clone();
                order.swap(rank - 1, rank - 2);
                let mut strides = contiguous(&order);
                strides.swap(rank - 1, rank - 2);
                spec.operands[0] = strided(0, &strides);
            }
            Case::new(format!("{dims:?}×{k}"), spec, &mut choices)
        })
        .collect();
    check(&cases, Pick::Two);
}

/// A small result of a long sum: parts of the contracted axis, which the last block adds.
#[test]
fn parts_of_a_long_sum() {
    if !available() {
        return;
    }
    let mut choices = Choices::new(4);
    let mut cases = Vec::new();
    for ((m, n, k), at) in [((40, 50, 400), 0), ((20, 130, 233), 3), ((33, 20, 333), 1)] {
        let (a, b) = layouts(m, n, k)[at];
        let mut case = Case::new(format!("{m}×{n}×{k}"), laid([m, n, k], a, b), &mut choices);
        case.target.multiprocessors = 20;
        cases.push(case);
    }
    let ran = check(&cases, Pick::Two);
    assert!(ran.iter().any(|n| n.ends_with("parts")), "{ran:?}");
}

/// Sizes below the bound, down to none: an empty contracted axis gives zeros, no rows give no
/// launch.
#[test]
fn sizes_below_the_bound() {
    if !available() {
        return;
    }
    let mut choices = Choices::new(5);
    let (rows, deep) = (Size::symbol(Symbol(0)), Size::symbol(Symbol(1)));
    let mut spec = laid([1, 36, 1], [1, 1], [36, 1]);
    spec.dims[0] = rows;
    let Body::Matmul(body) = &mut spec.body else {
        unreachable!()
    };
    body.k = deep;
    body.a.strides[0] = deep;
    let bounds = Env([60, 300, 0, 0, 0, 0, 0, 0]);
    let cases: Vec<Case> = [(60, 300), (60, 299), (1, 4), (7, 0), (0, 9)]
        .into_iter()
        .map(|(m, k)| {
            let env = Env([m, k, 0, 0, 0, 0, 0, 0]);
            let mut case = Case::bounded(
                format!("{m} rows, {k} deep"),
                spec.clone(),
                bounds,
                env,
                &mut choices,
            );
            case.target.multiprocessors = 8;
            case
        })
        .collect();
    check(&cases, Pick::Two);
}

/// A result with bias, activation and residual, stored twice.
fn with_epilogue(mut spec: Spec, out: Operand) -> Spec {
    let rank = spec.dims.len();
    let mut bias = vec![0; rank];
    bias[rank - 1] = 1;
    let mut narrow = out.clone();
    narrow.dtype = DType::BF16;
    spec.operands = vec![out.clone(), strided(2, &bias), out, narrow];
    spec.indices = vec![(0..rank).map(|i| Size::fixed(i as i64 + 1)).collect()];
    spec.code = vec![
        Inst::Acc,
        Inst::Load(1),
        Inst::Op(ScalarOp::Add, [0, 1, 0]),
        Inst::Op(ScalarOp::Relu, [2, 0, 0]),
        Inst::Load(2),
        Inst::Const(Value::F32(0.25)),
        Inst::Op(ScalarOp::Mul, [4, 5, 0]),
        Inst::Op(ScalarOp::Add, [3, 6, 0]),
        Inst::Index(0),
        Inst::Cast(8, slabwise_kernels::dtype::Lane::F32),
        Inst::Op(ScalarOp::Sub, [7, 9, 0]),
    ];
    spec.stores = vec![
        Store {
            value: 7,
            operand: 0,
        },
        Store {
            value: 10,
            operand: 2,
        },
        Store {
            value: 3,
            operand: 3,
        },
    ];
    spec
}

#[test]
fn epilogues() {
    if !available() {
        return;
    }
    let mut choices = Choices::new(6);
    let mut cases = Vec::new();
    for (dims, k, turned) in [
        (vec![70, 45], 33, false),
        (vec![70, 45], 33, true),
        (vec![3, 20, 17], 400, false),
        (vec![2, 90], 65, false),
    ] {
        let rank = dims.len();
        let (m, n) = (dims[rank - 2], dims[rank - 1]);
        let (mut a, mut b) = (vec![m * k; rank - 2], vec![0; rank - 2]);
        a.extend([k, 1]);
        b.extend([n, 1]);
        let mut out = contiguous(&dims);
        if turned {
            out = vec![1, m];
        }
        let spec = with_epilogue(
            matmul(&dims, k, strided(0, &a), strided(0, &b)),
            strided(0, &out),
        );
        let mut case = Case::new(format!("{dims:?}×{k} {turned}"), spec, &mut choices);
        case.target.multiprocessors = 12;
        cases.push(case);
    }
    check_like_cpu(&cases, Pick::All, 2e-5);
}

/// One launch gives the same bits whichever block is the last of a tile or of a group of its parts,
/// with an epilogue that reads and writes, and again on the same counters.
#[test]
fn the_last_block_adds_parts_in_their_order() {
    if !available() {
        return;
    }
    let mut choices = Choices::new(16);
    let mut kinds = Vec::new();
    for (m, n, k, dtype, tf32, kind, parts) in [
        (40, 70, 640, DType::F32, false, "gemm_32x32", 2..=16),
        (40, 70, 640, DType::F32, true, "gemm_tf32", 2..=16),
        (40, 70, 640, DType::BF16, false, "gemm_bf16", 2..=16),
        (3, 70, 1500, DType::F32, false, "gemv", 2..=16),
        (20, 30, 2000, DType::F32, false, "gemm_32x32", 17..=256),
        (20, 70, 4000, DType::BF16, false, "gemm_bf16", 17..=256),
        (3, 8, 40_000, DType::F32, false, "gemv", 17..=256),
    ] {
        for turned in [false, true] {
            // Neighbours along the contracted axis, or along rows and columns.
            let (a, b) = if turned {
                ([1, m], [n, 1])
            } else {
                ([k, 1], [1, k])
            };
            let product = matmul(&[m, n], k, typed(dtype, 0, &a), typed(dtype, 0, &b));
            let spec = with_epilogue(product, strided(0, &[n, 1]));
            let mut case = Case::new(format!("{m}×{n}×{k} {dtype} {turned}"), spec, &mut choices);
            case.target.multiprocessors = if *parts.start() > 2 { 160 } else { 40 };
            case.target.tf32 = tf32;
            let all = candidates(&case.spec, &case.bounds, &case.target).expect("a product");
            // A name is like `gemm_32x32 in 28 parts`.
            let parts_of = |c: &Candidate| c.name.split(' ').nth(2)?.parse::<usize>().ok();
            let is_meant = |c: &Candidate| {
                c.name.starts_with(kind) && parts_of(c).is_some_and(|n| parts.contains(&n))
            };
            let candidate = all.into_iter().find(is_meant).expect("one is split");
            let Lowered { functions, .. } = &candidate.lowered;
            let launches = candidate.lowered.launches(&case.env);
            assert!(launches.len() == 1 && functions.len() == 1, "{launches:?}");
            let emulator = emulate(functions);
            let twice = Lowered::new(functions.clone(), candidate.lowered.workspace, move |_| {
                [launches.clone(), launches.clone()].concat()
            });
            let twice = twice.with_counters(candidate.lowered.counters);
            let mut bits = Vec::new();
            // A GPU runs each several times and compares the bits.
            let mut gpu = Gpu::load(&[&candidate.lowered, &twice]);
            for (step, kernel) in [&candidate.lowered, &twice].into_iter().enumerate() {
                if let Some(gpu) = &mut gpu {
                    let run = gpu.run(step, &case, kernel);
                    run.unwrap_or_else(|e| panic!("{}: {e}", case.name));
                }
                let Some(emulator) = &emulator else { continue };
                let orders = (1..6).map(Order::Shuffled);
                for order in [Order::Forward, Order::Reverse].into_iter().chain(orders) {
                    let run = case.emulated(kernel, emulator, order, NO_FAULT);
                    let (got, _) = run.unwrap_or_else(|e| panic!("{}: {e}", case.name));
                    bits.push(got);
                }
                let (name, first) = (&candidate.name, &bits[0]);
                assert!(bits.iter().all(|got| got == first), "{}: {name}", case.name);
                // The epilogue reads an operand that it writes, so two runs leave other bits.
                bits.clear();
            }
            kinds.push(candidate.name);
        }
    }
    for kind in ["gemv_dots", "gemv_columns"] {
        assert!(kinds.iter().any(|name| name.starts_with(kind)), "{kinds:?}");
    }
}

/// On waves of 64 lanes: no kernel on tensor cores, and the exact sums by all others.
#[test]
fn waves_of_64_lanes() {
    if !emulator::available() {
        return;
    }
    let mut choices = Choices::new(17);
    let mut kinds = Vec::new();
    for (m, n, k, dtype) in [
        (40, 70, 90, DType::F32),
        (40, 70, 90, DType::BF16),
        (3, 70, 1500, DType::F32),
        (130, 2, 300, DType::F32),
    ] {
        for (a, b) in [([1, m], [n, 1]), ([k, 1], [1, k])] {
            let spec = matmul(&[m, n], k, typed(dtype, 0, &a), typed(dtype, 0, &b));
            let mut case = Case::new(format!("{m}×{n}×{k} {dtype}"), spec, &mut choices);
            small_integers(&mut case, &mut choices);
            case.target = Target {
                multiprocessors: 40,
                tf32: true,
                wave_width: 64,
                ..TARGET
            };
            let (expected, _) = case.on_cpu();
            let all = candidates(&case.spec, &case.bounds, &case.target).expect("a product");
            let functions: Vec<_> = all
                .iter()
                .flat_map(|c| c.lowered.functions.clone())
                .collect();
            let emulator = Emulator::with_waves(&functions, Check::Nothing, 64).expect("compiles");
            for candidate in all {
                for order in Order::ALL {
                    let (got, _) = case
                        .emulated(&candidate.lowered, &emulator, order, NO_FAULT)
                        .unwrap_or_else(|e| panic!("{}, {}: {e}", case.name, candidate.name));
                    let what = format!("{}, {} {order:?}", case.name, candidate.name);
                    compare(&case, &what, &got, &expected, 0.0);
                }
                kinds.push(candidate.name);
            }
        }
    }
    assert!(
        !kinds.iter().any(|n| n.contains("f32") || n.contains("f16")),
        "{kinds:?}"
    );
    for kind in ["gemm_64x64", "gemv_dots", "gemv_columns"] {
        assert!(kinds.iter().any(|n| n.starts_with(kind)), "{kinds:?}");
    }
    assert!(kinds.iter().any(|n| n.ends_with("parts")), "{kinds:?}");
}

/// Weights and momentum updated in place in the gradient's epilogue, each element read before it is
/// written.
#[test]
fn an_update_in_place() {
    if !available() {
        return;
    }
    let mut choices = Choices::new(7);
    let (m, n, k) = (40, 66, 130);
    let mut spec = laid([m, n, k], [1, m], [n, 1]);
    let weight = strided(0, &[n, 1]);
    spec.operands = vec![weight.clone(), weight];
    spec.code = vec![
        Inst::Acc,
        Inst::Load(1),
        Inst::Const(Value::F32(0.9)),
        Inst::Op(ScalarOp::Mul, [1, 2, 0]),
        Inst::Op(ScalarOp::Add, [0, 3, 0]),
        Inst::Load(0),
        Inst::Const(Value::F32(0.01)),
        Inst::Op(ScalarOp::Mul, [4, 6, 0]),
        Inst::Op(ScalarOp::Sub, [5, 7, 0]),
    ];
    spec.stores = vec![
        Store {
            value: 4,
            operand: 1,
        },
        Store {
            value: 8,
            operand: 0,
        },
    ];
    let mut case = Case::new("momentum", spec, &mut choices);
    case.target.multiprocessors = 12;
    check_like_cpu(&[case], Pick::All, 2e-5);
}

/// Every tile for tensor cores, every type, on operands whose sums have no rounding.
#[test]
fn tensor_cores() {
    if !available() {
        return;
    }
    let mut choices = Choices::new(8);
    let mut cases = Vec::new();
    let mut add = |dtype: DType, [m, n, k]: [usize; 3], at: usize, choices: &mut Choices| {
        let (a, b) = layouts(m, n, k)[at];
        let spec = matmul(&[m, n], k, typed(dtype, 0, &a), typed(dtype, 0, &b));
        let mut case = Case::new(format!("{dtype} {m}×{n}×{k} {a:?} {b:?}"), spec, choices);
        case.target = Target {
            tf32: true,
            multiprocessors: 1,
            shared_bytes_max: 164 << 10,
            ..TARGET
        };
        small_integers(&mut case, choices);
        cases.push(case);
    };
    for (i, dtype) in [DType::F32, DType::F16, DType::BF16]
        .into_iter()
        .enumerate()
    {
        for at in 0..4 {
            // Types differ in one instruction: each is tested with one shape of whole vectors, and
            // ragged shapes are distributed over them.
            if i < 2 || at == 3 {
                add(dtype, [136, 136, 72], at, &mut choices);
            }
        }
        add(dtype, [131, 67, 45], i, &mut choices);
    }
    let ran = check_exact(&cases, Pick::All);
    for kind in ["tf32", "f16", "bf16"] {
        for tile in ["128x256", "128x128", "128x64", "64x128", "64x64"] {
            assert!(ran.contains(&format!("gemm_{kind}_{tile}")), "{ran:?}");
        }
    }
}

/// Numbers of every size: products of halves are exact in single precision and tensor cores cut
/// sums where others round them; operands of tf32 are rounded to 11 bits first (NVIDIA, *PTX ISA*,
/// alternate floating-point formats).
#[test]
fn tensor_cores_round_as_their_formats_say() {
    if !available() {
        return;
    }
    let mut choices = Choices::new(11);
    let [m, n, k] = [72, 88, 200];
    let sums = |terms: f64| (terms + 4.0) * f64::from(f32::EPSILON);
    for (dtype, operands) in [
        (DType::F32, 2f64.powi(-10)),
        (DType::F16, 0.0),
        (DType::BF16, 0.0),
    ] {
        let mut cases: Vec<Case> = layouts(m, n, k)
            .into_iter()
            .map(|(a, b)| {
                Case::new(
                    format!("{dtype} {a:?} {b:?}"),
                    matmul(&[m, n], k, typed(dtype, 0, &a), typed(dtype, 0, &b)),
                    &mut choices,
                )
            })
            .collect();
        cases.iter_mut().for_each(|c| {
            c.target = Target {
                tf32: true,
                multiprocessors: 8,
                shared_bytes_max: 164 << 10,
                ..TARGET
            }
        });
        check_within(&cases, Pick::Two, |terms| sums(terms) + operands);
    }
}

/// Operands of two types are multiplied in single precision.
#[test]
fn mixed_types() {
    if !available() {
        return;
    }
    let mut choices = Choices::new(9);
    let spec = |n, k, a, b| matmul(&[40, n], k, typed(a, 0, &[k, 1]), typed(b, 0, &[n, 1]));
    let types = [
        (DType::F32, DType::BF16),
        (DType::F16, DType::F32),
        (DType::BF16, DType::F16),
    ];
    let mut cases = Vec::new();
    // Without and with whole vectors.
    for (n, k) in [(33, 50), (64, 48)] {
        cases.extend(types.map(|(a, b)| {
            let name = format!("{a} · {b}, {n} columns");
            Case::new(name, spec(n, k, a, b), &mut choices)
        }));
    }
    check(&cases, Pick::Two);
    let refused = spec(33, 50, DType::I32, DType::F32);
    let refused = lower(&refused, &Env::default(), &TARGET).expect_err("integers have no products");
    assert!(refused.to_string().contains("i32"), "{refused}");
}

/// After a fault, a guarded kernel leaves everything as it was.
#[test]
fn a_fault_stops_guarded_kernels() {
    if !emulator::available() {
        return;
    }
    let mut case = Case::new(
        "guarded",
        laid([20, 20, 200], [200, 1], [20, 1]),
        &mut Choices::new(10),
    );
    case.target = Target {
        guarded: true,
        multiprocessors: 30,
        ..TARGET
    };
    for candidate in candidates(&case.spec, &case.bounds, &case.target).expect("a product") {
        let emulator = Emulator::new(&candidate.lowered.functions, Check::Nothing)
            .expect("its source is fine");
        let (after, fault) = case
            .emulated(&candidate.lowered, &emulator, Order::Forward, 7)
            .expect("it runs");
        assert!(after == case.args && fault == 7, "{}", candidate.name);
        let (after, _) = case
            .emulated(&candidate.lowered, &emulator, Order::Forward, NO_FAULT)
            .expect("it runs");
        assert!(after != case.args, "{}", candidate.name);
    }
}

/// The choice depends on shapes and target alone, and is a sensible one.
#[test]
fn choices_are_sane_and_repeatable() {
    let target = Target {
        multiprocessors: 108,
        shared_bytes_max: 163 << 10,
        ..TARGET
    };
    let names = |[m, n, k]: [usize; 3], target: &Target| -> Vec<String> {
        let spec = laid([m, n, k], [k, 1], [n, 1]);
        candidates(&spec, &Env::default(), target)
            .expect("a product")
            .into_iter()
            .map(|c| c.name)
            .collect()
    };
    let first = |shape| names(shape, &target)[0].clone();
    assert_eq!(first([4096, 4096, 4096]), "gemm_128x128");
    assert!(first([1, 4096, 4096]).starts_with("gemv_columns_1"),);
    assert!(
        first([64, 64, 65536]).ends_with("parts"),
        "{}",
        first([64, 64, 65536])
    );
    assert!(
        !first([2048, 2048, 64]).ends_with("parts"),
        "{}",
        first([2048, 2048, 64])
    );
    assert!(
        names(
            [4096, 4096, 4096],
            &Target {
                tf32: true,
                ..target
            }
        )[0]
        .starts_with("gemm_tf32_128x")
    );
    assert_eq!(
        names([300, 200, 100], &target),
        names([300, 200, 100], &target)
    );
    // Kernels use no more shared memory than the device has.
    let small = Target {
        tf32: true,
        shared_bytes_max: 50 << 10,
        ..target
    };
    let mut fitting = names([300, 200, 100], &small);
    fitting.sort_unstable();
    assert_eq!(
        fitting,
        [
            "128x32", "128x64", "16x64", "32x32", "32x64", "64x128", "64x64"
        ]
        .map(|tile| format!("gemm_tf32_{tile}"))
    );
    let old = lower(
        &laid([3, 3, 3], [3, 1], [3, 1]),
        &Env::default(),
        &Target { sm: 75, ..target },
    )
    .expect_err("too old");
    assert!(old.to_string().contains("7.5"), "{old}");
}

/// Rows that are further apart than they are long are loaded in vectors, of which the last is
/// shorter: nothing between rows enters a sum, and nothing behind the last row is read.
#[test]
fn padded_rows() {
    if !available() {
        return;
    }
    let mut choices = Choices::new(13);
    let mut cases = Vec::new();
    for (dtype, [m, n, k], at) in [
        (DType::F32, [67, 70, 45], 0),
        (DType::F32, [66, 67, 37], 2),
        (DType::F16, [67, 61, 45], 0),
        (DType::F16, [131, 67, 75], 1),
        (DType::BF16, [66, 70, 53], 3),
        (DType::F32, [3, 301, 203], 1),
        (DType::F32, [301, 2, 263], 2),
    ] {
        let each = 16 / dtype.bytes();
        let [padded_m, padded_n, padded_k] =
            [m, n, k].map(|length: usize| length.next_multiple_of(each));
        let (a, b) = layouts(padded_m, padded_n, padded_k)[at];
        for tf32 in [false, true] {
            let spec = matmul(&[m, n], k, typed(dtype, 0, &a), typed(dtype, 0, &b));
            let name = format!("{dtype} {m}×{n}×{k} {a:?} {b:?}, tf32 {tf32}");
            let mut case = Case::new(name, spec, &mut choices);
            case.target = Target {
                tf32,
                multiprocessors: 4,
                shared_bytes_max: 164 << 10,
                ..TARGET
            };
            small_integers(&mut case, &mut choices);
            cases.push(case);
        }
    }
    for case in &cases {
        let list = candidates(&case.spec, &case.bounds, &case.target).expect("a product");
        let is_partial = |lowered: &Lowered| {
            let sources = lowered.functions.iter().map(|f| &f.source);
            // The last parameters of `Matrix`: whole for all sizes, except for the last vector; no
            // table.
            sources
                .filter(|text| text.contains("true, true, 0, 0, 0, 0, 0>;"))
                .count()
                > 0
        };
        let partial = list.iter().filter(|c| is_partial(&c.lowered)).count();
        assert!(partial > 0, "{}: {list:?}", case.name);
    }
    let ran = check_exact(&cases, Pick::All);
    for name in [
        "gemm_f16_",
        "gemm_bf16_",
        "gemm_tf32_",
        "gemm_64x64",
        "gemv_dots_",
        "gemv_columns_",
    ] {
        assert!(
            ran.iter().any(|ran| ran.starts_with(name)),
            "{name}: {ran:?}"
        );
    }
}

/// Rows of a length that vectors of 16 bytes do not divide are loaded in those of 8 or 4.
#[test]
fn short_vectors() {
    if !available() {
        return;
    }
    let mut choices = Choices::new(14);
    let mut cases = Vec::new();
    for (dtype, tf32, [m, n, k], at, loads) in [
        (
            DType::BF16,
            false,
            [132, 68, 76],
            0,
            "product<true, 4, false, 4>",
        ),
        (
            DType::F16,
            false,
            [68, 132, 140],
            1,
            "product<false, 4, true, 4>",
        ),
        (
            DType::F16,
            false,
            [134, 66, 74],
            2,
            "product<false, 2, false, 2>",
        ),
        (
            DType::BF16,
            false,
            [66, 134, 138],
            3,
            "product<true, 2, true, 2>",
        ),
        (
            DType::F32,
            false,
            [130, 66, 38],
            2,
            "product<false, 2, false, 2>",
        ),
        (
            DType::F32,
            true,
            [66, 70, 42],
            3,
            "product<true, 2, true, 2>",
        ),
        (DType::BF16, false, [3, 302, 202], 3, "products<4, 4, 2, 2>"),
        (DType::F16, false, [300, 2, 268], 0, "products<2, 4, 4, 1>"),
        (DType::F32, false, [302, 2, 262], 0, "products<2, 4, 2, 1>"),
    ] {
        let (a, b) = layouts(m, n, k)[at];
        let spec = matmul(&[m, n], k, typed(dtype, 0, &a), typed(dtype, 0, &b));
        let name = format!("{dtype} {m}×{n}×{k} {a:?} {b:?}, tf32 {tf32}");
        let mut case = Case::new(name, spec, &mut choices);
        case.target = Target {
            tf32,
            multiprocessors: 4,
            shared_bytes_max: 164 << 10,
            ..TARGET
        };
        small_integers(&mut case, &mut choices);
        let list = candidates(&case.spec, &case.bounds, &case.target).expect("a product");
        let mut functions = list.iter().flat_map(|c| &c.lowered.functions);
        let is_loaded = functions.any(|f| f.source.contains(loads));
        assert!(is_loaded, "{}: no {loads} of {list:?}", case.name);
        cases.push(case);
    }
    check_exact(&cases, Pick::All);
}
