//! Matrix products against double precision, on every instruction set.

#[path = "../common/mod.rs"]
mod common;
mod few_rows;
mod quantized;
mod rows;

use common::*;
use half::{bf16, f16};
use slabwise_kernels::cpu::{Config, Isa, Kernel, Team};
use slabwise_kernels::dtype::DType;
use slabwise_kernels::scalar::{ScalarOp, Value};
use slabwise_kernels::size::{Env, Size, Symbol};
use slabwise_kernels::spec::{Body, Inst, Matmul, Operand, Spec, Store};

/// A product whose result is stored unchanged.
fn plain(dims: &[usize], k: usize, a: Operand, b: Operand) -> Spec {
    Spec {
        body: Body::Matmul(Matmul {
            in_order: true,
            k: Size::fixed(k as i64),
            a,
            b,
        }),
        dims: dims.iter().map(|&d| Size::fixed(d as i64)).collect(),
        reduced: 0,
        operands: vec![operand(0, &contiguous(dims))],
        indices: vec![],
        code: vec![Inst::Acc],
        stores: vec![Store {
            value: 0,
            operand: 0,
        }],
    }
}

/// Σₖ a·b in double precision and the sum of magnitudes, at one point.
fn oracle(
    k: usize,
    a: (&[f32], &Operand),
    b: (&[f32], &Operand),
    at: &[usize],
    env: &Env,
) -> (f64, f64) {
    let rank = at.len();
    // The address of (i, 0) or (0, j), and elements between neighbours along the contracted axis.
    let line = |operand: &Operand, free: usize, contracted: usize| {
        let stride = |axis: usize| operand.strides[axis].at(env);
        let batch: i64 = (0..rank - 2)
            .map(|axis| at[axis] as i64 * stride(axis))
            .sum();
        (
            operand.offset.at(env) + batch + at[free] as i64 * stride(free),
            stride(contracted),
        )
    };
    let ((a_start, a_step), (b_start, b_step)) =
        (line(a.1, rank - 2, rank - 1), line(b.1, rank - 1, rank - 2));
    (0..k as i64).fold((0.0, 0.0), |(sum, scale), kk| {
        let term = f64::from(a.0[(a_start + kk * a_step) as usize])
            * f64::from(b.0[(b_start + kk * b_step) as usize]);
        (sum + term, scale + term.abs())
    })
}

fn points(dims: &[usize]) -> impl Iterator<Item = Vec<usize>> + '_ {
    (0..dims.iter().product()).map(|mut flat| {
        let mut at = vec![0; dims.len()];
        for axis in (0..dims.len()).rev() {
            (at[axis], flat) = (flat % dims[axis], flat / dims[axis]);
        }
        at
    })
}

/// Every `step`-th element of the result against the oracle.
fn check(
    spec: &Spec,
    dims: &[usize],
    k: usize,
    args: &[Vec<f32>],
    result: &[f32],
    step: usize,
    isa: Isa,
) {
    let Body::Matmul(body) = &spec.body else {
        unreachable!()
    };
    let env = Env::default();
    for (flat, at) in points(dims)
        .enumerate()
        .filter(|(flat, _)| flat % step == 0)
    {
        let (expected, scale) = oracle(k, (&args[0], &body.a), (&args[1], &body.b), &at, &env);
        assert_sum(result[flat], expected, scale, k, &|| {
            format!("{isa} {dims:?} k {k} at {at:?}, {body:?}")
        });
    }
}

/// Strides of a batch of `rows × columns` matrices: row-major, column-major, padded rows, scattered
/// or broadcast.
fn layout(random: &mut Random, batch: &[usize], rows: usize, columns: usize) -> (Operand, usize) {
    let (rows, columns) = (rows.max(1) as i64, columns.max(1) as i64);
    let (row, column, size) = match random.int(0, 4) {
        0 => (columns, 1, rows * columns),
        1 => (1, rows, rows * columns),
        2 => (columns + 3, 1, rows * (columns + 3)),
        3 => (2 * columns + 1, 2, rows * (2 * columns + 1)),
        _ => (3, 3 * rows + 2, columns * (3 * rows + 2)),
    };
    let offset = random.int(0, 3) as i64;
    let mut strides = vec![];
    let mut total = size;
    for &b in batch.iter().rev() {
        strides.insert(0, if random.int(0, 2) == 0 { 0 } else { total });
        total *= b as i64;
    }
    strides.extend([row, column]);
    (operand(offset, &strides), (offset + total) as usize)
}

/// Every `step`-th element of products of operands in random layouts against the oracle.
fn check_layouts(
    random: &mut Random,
    teams: &[Team],
    batch: &[usize],
    [m, n, k]: [usize; 3],
    step: usize,
) {
    let (a, a_len) = layout(random, batch, m, k);
    let (b, b_len) = layout(random, batch, k, n);
    let dims: Vec<usize> = batch.iter().copied().chain([m, n]).collect();
    let spec = plain(&dims, k, a, b);
    let args = [
        random.floats(a_len),
        random.floats(b_len),
        vec![f32::NAN; dims.iter().product()],
    ];
    for (isa, results) in run_all(&spec, &Env::default(), &Env::default(), teams, &args) {
        check(&spec, &dims, k, &args, &results[2], step, isa);
    }
}

/// Right operands with columns apart, which many left panels transpose beside their sums, and results
/// that are summed in place, with rows apart, elements between them left alone, and a last vector of
/// columns that is whole or not.
#[test]
fn transposed_operands_and_results_with_rows_apart() {
    let mut random = Random(29);
    let teams = teams();
    // With rows of 512 elements, the columns of the right operand share few sets of a cache.
    for (batch, [m, n, k], apart) in [
        (1, [90, 80, 64], 0),
        (1, [130, 96, 37], 16),
        (1, [200, 64, 512], 3),
        (1, [85, 112, 600], 5),
        (3, [86, 48, 66], 16),
        (2, [90, 70, 65], 1),
        (2, [90, 65, 1030], 0),
    ] {
        let [rows, columns, steps] = [m as i64, n as i64, k as i64];
        let step = steps + if k == 512 { 0 } else { 5 };
        let row = columns + apart;
        let dims = [batch, m, n];
        let a = operand(0, &[rows * steps, steps, 1]);
        let b = operand(2, &[columns * step, 1, step]);
        let spec = Spec {
            operands: vec![operand(1, &[rows * row, row, 1])],
            ..plain(&dims, k, a, b)
        };
        let args = [
            random.floats(batch * m * k),
            random.floats(2 + batch * n * step as usize),
            vec![7.0; 1 + batch * m * row as usize],
        ];
        for (isa, results) in run_all(&spec, &Env::default(), &Env::default(), &teams, &args) {
            let lines = results[2][1..].chunks(row as usize);
            assert_eq!(results[2][0], 7.0);
            let mut values = vec![];
            for line in lines {
                let (line, between) = line.split_at(n);
                values.extend_from_slice(line);
                assert!(
                    between.iter().all(|&x| x == 7.0),
                    "{isa} {dims:?} {k}: {between:?}"
                );
            }
            check(&spec, &dims, k, &args, &values, 7, isa);
        }
    }
}

/// Operands of integers are refused before an address is made.
#[test]
fn integers_are_refused() {
    let of = |dtype| Operand {
        dtype,
        ..operand(0, &[4, 1])
    };
    let config = Config {
        threads: 1,
        isa: Isa::detect(),
    };
    let refused = |a, b| {
        Kernel::new(plain(&[4, 4], 4, of(a), of(b)), &Env::default(), &config)
            .err()
            .map(|e| e.to_string())
    };
    assert_eq!(refused(DType::F32, DType::F32), None);
    assert_eq!(
        refused(DType::I32, DType::F32).unwrap(),
        "invalid kernel: the left operand is i32, which this kernel does not take"
    );
    assert_eq!(
        refused(DType::F32, DType::U8).unwrap(),
        "invalid kernel: the right operand is u8, which this kernel does not take"
    );
}

/// Numbers as a type stores them, in the words of a region, and as f32 after that.
fn stored(dtype: DType, numbers: &[f32]) -> (Vec<f32>, Vec<f32>) {
    let half = |x: &f32| match dtype {
        DType::F16 => (f16::from_f32(*x).to_bits(), f16::from_f32(*x).to_f32()),
        _ => (bf16::from_f32(*x).to_bits(), bf16::from_f32(*x).to_f32()),
    };
    if dtype == DType::F32 {
        return (numbers.to_vec(), numbers.to_vec());
    }
    let (bits, rounded): (Vec<u16>, Vec<f32>) = numbers.iter().map(half).unzip();
    let word = |pair: &[u16]| {
        let high = pair.get(1).map_or(0, |&high| u32::from(high));
        f32::from_bits(u32::from(pair[0]) | high << 16)
    };
    (bits.chunks(2).map(word).collect(), rounded)
}

/// Halves are converted as they are packed: a product has the bits of one of the same numbers in
/// f32, whatever the other operand's type.
#[test]
fn halves_are_read_as_the_same_numbers_in_single_precision() {
    let (mut random, teams) = (Random(57), teams());
    let types = [DType::F32, DType::F16, DType::BF16];
    let pairs = types.iter().flat_map(|a| types.map(|b| (*a, b))).skip(1);
    for (left, right) in pairs {
        for [m, n, k] in [
            [1, 70, 130],
            [1, 1, 300],
            [40, 1, 90],
            [5, 33, 600],
            [16, 100, 97],
            [35, 40, 1],
            [70, 65, 530],
            [300, 70, 40],
        ] {
            for batch in [&[][..], &[3]] {
                let (a, a_len) = layout(&mut random, batch, m, k);
                let (b, b_len) = layout(&mut random, batch, k, n);
                let dims: Vec<usize> = batch.iter().copied().chain([m, n]).collect();
                let wide = plain(&dims, k, a.clone(), b.clone());
                let narrow = plain(
                    &dims,
                    k,
                    Operand { dtype: left, ..a },
                    Operand { dtype: right, ..b },
                );
                let (a, a_wide) = stored(left, &random.floats(a_len));
                let (b, b_wide) = stored(right, &random.floats(b_len));
                let result = vec![f32::NAN; dims.iter().product()];
                let all = |spec: &Spec, args: [Vec<f32>; 3]| {
                    run_all(spec, &Env::default(), &Env::default(), &teams, &args)
                };
                let got = all(&narrow, [a, b, result.clone()]);
                let expected = all(&wide, [a_wide, b_wide, result]);
                for ((isa, got), (_, expected)) in got.iter().zip(&expected) {
                    assert!(
                        got[2] == expected[2],
                        "{isa} {left} × {right} {dims:?} k {k}: {narrow:?}"
                    );
                }
            }
        }
    }
}

#[test]
fn random_shapes_and_strides() {
    let (mut random, teams) = (Random(7), teams());
    for round in 0..150 {
        let batch: Vec<usize> = (0..random.of(&[0, 0, 1, 2]))
            .map(|_| random.int(1, 3))
            .collect();
        let most = if round % 3 == 0 { 8 } else { 90 };
        let (m, n, k) = (
            random.int(1, most),
            random.int(1, most),
            random.int(0, most),
        );
        check_layouts(&mut random, &teams, &batch, [m, n, k], 1);
    }
}

#[test]
fn block_edges() {
    let (mut random, teams) = (Random(11), teams());
    let shapes = [
        (337, 65, 400),
        (15, 700, 390),
        (64, 300, 784),
        (1, 40, 1000),
        (500, 1, 64),
        (170, 33, 1),
        (129, 10, 385),
        (29, 31, 5000),
        (345, 130, 256),
    ];
    for (m, n, k) in shapes {
        for (a, b) in [
            ([k, 1], [n, 1]),
            ([1, m], [1, k]),
            ([1, m], [n, 1]),
            ([k, 1], [1, k]),
        ] {
            let strides = |s: [usize; 2]| operand(0, &[s[0] as i64, s[1] as i64]);
            let spec = plain(&[m, n], k, strides(a), strides(b));
            let args = [
                random.floats(m * k),
                random.floats(k * n),
                vec![f32::NAN; m * n],
            ];
            for (isa, results) in run_all(&spec, &Env::default(), &Env::default(), &teams, &args) {
                check(&spec, &[m, n], k, &args, &results[2], 37, isa);
            }
        }
    }
}

/// Right micro-panels that are copied while the one before is multiplied have the bits of those
/// that are transposed on their own: of fewer steps than left panels and of many more, of several
/// k-blocks, and followed by narrower ones. So do left operands that are read where they lie, which
/// are packed beside transposed right ones, and results that are summed where they are stored.
#[test]
fn copied_micro_panels_have_the_bits_of_packed_ones() {
    let (mut random, teams) = (Random(43), teams());
    let shapes = [
        (171, 3, 200),
        (40, 1, 97),
        (29, 40, 81),
        (100, 513, 130),
        (170, 1100, 333),
        (200, 600, 96),
        (340, 650, 784),
    ];
    for (m, k, n) in shapes {
        for a in [[k as i64, 1], [1, m as i64]] {
            let (rows, columns) = (random.floats(k * (n + 3)), vec![f32::NAN; m * n]);
            let transposed = (0..n * k)
                .map(|at| rows[at % k * (n + 3) + at / k])
                .collect();
            let left = random.floats(m * k);
            let run = |b: Vec<f32>, strides: [i64; 2]| {
                let spec = plain(&[m, n], k, operand(0, &a), operand(0, &strides));
                let args = [left.clone(), b, columns.clone()];
                run_all(&spec, &Env::default(), &Env::default(), &teams, &args)
            };
            let copied = run(rows.clone(), [n as i64 + 3, 1]);
            let packed = run(transposed, [1, k as i64]);
            for ((isa, copied), (_, packed)) in copied.into_iter().zip(packed) {
                assert!(
                    copied[2]
                        .iter()
                        .zip(&packed[2])
                        .all(|(a, b)| a.to_bits() == b.to_bits()),
                    "{isa} {m} by {k} by {n}, left strides {a:?}"
                );
            }
        }
    }
}

/// Products that are computed transposed, because the larger operand is the right one, have the bits
/// of those whose right operand lies the other way: of columns apart, several k-blocks, rows that
/// are no whole vectors, and fewer rows than the kernel was prepared for.
#[test]
fn swapped_operands_give_the_same_bits() {
    let (mut random, teams) = (Random(47), teams());
    let shapes = [
        (16, 33, 20),
        (17, 500, 513),
        (64, 257, 1100),
        (33, 1030, 7),
        (100, 101, 784),
        (130, 160, 784),
    ];
    for (m, n, k) in shapes {
        for rows in [m, m / 2 + 1, 1, 0] {
            let apart = k + 5;
            let columns = random.floats(n * apart);
            let across: Vec<f32> = (0..k * n)
                .map(|at| columns[at % n * apart + at / n])
                .collect();
            let left = random.floats(m * k);
            let env = |rows: usize| Env([rows as u32, 0, 0, 0, 0, 0, 0, 0]);
            let run = |b: &[f32], strides: [i64; 2]| {
                let left_operand = operand(0, &[k as i64, 1]);
                let mut spec = plain(&[m, n], k, left_operand, operand(0, &strides));
                spec.dims[0] = Size::symbol(Symbol(0));
                let args = [left.clone(), b.to_vec(), vec![f32::NAN; m * n]];
                run_all(&spec, &env(m), &env(rows), &teams, &args)
            };
            let swapped = run(&columns, [1, apart as i64]);
            let packed = run(&across, [n as i64, 1]);
            for ((isa, swapped), (_, packed)) in swapped.into_iter().zip(packed) {
                let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                assert!(
                    bits(&swapped[2]) == bits(&packed[2]),
                    "{isa} {rows} of {m} by {k} by {n}"
                );
            }
        }
    }
}

/// Products of so few rows that no operand is packed, among them a vector, several k-blocks, and
/// several blocks of columns.
#[test]
fn few_rows_of_any_strides() {
    let (mut random, teams) = (Random(37), teams());
    let shapes = [
        (1, 1100, 64),
        (1, 40, 1100),
        (2, 17, 33),
        (4, 10, 256),
        (5, 600, 31),
        (16, 33, 700),
        (16, 130, 64),
        (300, 1, 520),
    ];
    for (m, n, k) in shapes {
        for round in 0..3 {
            let batch = &[2][..usize::from(round == 1)];
            check_layouts(&mut random, &teams, batch, [m, n, k], 7);
        }
    }
}

/// Rows that are multiplied without packing have the bits of the same rows among many.
#[test]
fn few_rows_have_the_bits_of_many() {
    let (mut random, teams) = (Random(41), teams());
    for (n, k, b) in [
        (70, 1200, [70, 1]),
        (10, 64, [10, 1]),
        (45, 600, [1, 600]),
        (1, 900, [1, 1]),
        // Short sums of many columns.
        (520, 128, [1, 128]),
        (100, 97, [100, 1]),
    ] {
        let (left, right) = (random.floats(50 * k), random.floats(n * k));
        let rows = |m: usize| {
            let spec = plain(
                &[m, n],
                k,
                operand(0, &[k as i64, 1]),
                operand(0, &b.map(|stride: usize| stride as i64)),
            );
            let args = [left.clone(), right.clone(), vec![f32::NAN; m * n]];
            run_all(&spec, &Env::default(), &Env::default(), &teams, &args)
        };
        let many = rows(50);
        for m in [1, 3, 6, 14, 16] {
            for ((isa, few), (_, many)) in rows(m).iter().zip(&many) {
                assert!(few[2] == many[2][..m * n], "{isa} {m} of 50 × {n}, k {k}");
            }
        }
    }
}

/// Workspaces of products whose left operand and result are used where they lie hold right
/// micro-panels alone.
#[test]
fn workspaces_without_a_left_operand_and_sums() {
    for isa in Isa::available() {
        let config = Config { threads: 2, isa };
        let (m, n, k) = (64, 512, 784);
        let [left, right] = [k, n].map(|row| operand(0, &[row as i64, 1]));
        let spec = plain(&[m, n], k, left, right);
        let kernel = Kernel::new(spec, &Env::default(), &config).expect("a valid spec");
        // Two of a k-block of at most 32 columns for each worker, and the scratch of the code.
        let most = 2 * (2 * 512 * 32 * 4 + 8192);
        let workspace = kernel.workspace();
        assert!(workspace <= most, "{isa}: {workspace}");
    }
}

/// Workspaces of products of few rows hold their sums and no panel.
#[test]
fn workspaces_of_few_rows_hold_sums() {
    for isa in Isa::available() {
        let config = Config { threads: 1, isa };
        // Several rows of many columns are packed where panels are narrow.
        let few = [(1, 512, 700), (3, 512, 128), (4, 64, 64)];
        for &(m, n, k) in &few[..if isa == Isa::Avx512 { 3 } else { 1 }] {
            let right = operand(0, &[1, k as i64]);
            let spec = plain(&[m, n], k, operand(0, &[k as i64, 1]), right);
            let kernel = Kernel::new(spec, &Env::default(), &config).expect("a valid spec");
            let blocks = if k > 512 { 2 } else { 1 };
            let most = (4 * m * n * blocks) as u64 + 4096;
            let workspace = kernel.workspace();
            assert!(
                workspace <= most,
                "{isa}: {m} × {k} · {k} × {n}: {workspace}"
            );
        }
    }
}

#[test]
fn a_long_sum_into_a_small_result() {
    let (mut random, teams) = (Random(13), teams());
    for (m, n, k) in [
        (3, 5, 20_000),
        (40, 130, 9_000),
        (1, 1, 50_000),
        (10, 300, 3_500),
    ] {
        let spec = plain(
            &[m, n],
            k,
            operand(0, &[1, m as i64]),
            operand(0, &[n as i64, 1]),
        );
        let args = [
            random.floats(m * k),
            random.floats(k * n),
            vec![f32::NAN; m * n],
        ];
        for (isa, results) in run_all(&spec, &Env::default(), &Env::default(), &teams, &args) {
            check(&spec, &[m, n], k, &args, &results[2], 11, isa);
        }
    }
}

#[test]
fn nothing_to_contract_gives_zeros() {
    for dims in [vec![3, 70], vec![2, 20, 5]] {
        let strides = vec![0; dims.len()];
        let spec = plain(&dims, 0, operand(0, &strides), operand(0, &strides));
        let args = [vec![], vec![], vec![f32::NAN; dims.iter().product()]];
        for (_, results) in run_all(&spec, &Env::default(), &Env::default(), &teams(), &args) {
            assert!(results[2].iter().all(|x| x.to_bits() == 0));
        }
    }
}

#[test]
fn an_empty_result_runs() {
    for dims in [[0, 5], [5, 0]] {
        let spec = plain(
            &dims,
            4,
            operand(0, &[4, 1]),
            operand(0, &[dims[1] as i64, 1]),
        );
        run_all(
            &spec,
            &Env::default(),
            &Env::default(),
            &teams(),
            &[vec![1.0; 20], vec![1.0; 20], vec![]],
        );
    }
}

/// Bias and activation to one result, the sum to another, and an update of a weight in place.
#[test]
fn the_epilogue_sees_every_point_once() {
    check_epilogue([187, 83, 70], [83, 1]);
    // Of few rows, whose right operand has steps side by side: computed transposed.
    check_epilogue([35, 187, 70], [1, 70]);
    check_epilogue([35, 187, 600], [1, 600]);
}

fn check_epilogue([m, n, k]: [usize; 3], right: [i64; 2]) {
    let (mut random, teams) = (Random(17), teams());
    let left = operand(0, &[k as i64, 1]);
    let mut spec = plain(&[m, n], k, left, operand(0, &right));
    let row = contiguous(&[m, n]);
    spec.operands = vec![
        operand(0, &row),
        operand(0, &[0, 1]),
        operand(0, &[1, m as i64]),
        operand(0, &row),
    ];
    spec.code = vec![
        Inst::Acc,
        Inst::Load(1),
        Inst::Op(ScalarOp::Add, [0, 1, 0]),
        Inst::Op(ScalarOp::Relu, [2, 0, 0]),
        Inst::Load(3),
        Inst::Const(Value::F32(0.5)),
        Inst::Op(ScalarOp::Mul, [0, 5, 0]),
        Inst::Op(ScalarOp::Sub, [4, 6, 0]),
    ];
    spec.stores = vec![
        Store {
            value: 3,
            operand: 0,
        },
        Store {
            value: 0,
            operand: 2,
        },
        Store {
            value: 7,
            operand: 3,
        },
    ];
    let (bias, weight) = (random.floats(n), random.floats(m * n));
    let nan = vec![f32::NAN; m * n];
    let args = [
        random.floats(m * k),
        random.floats(k * n),
        nan.clone(),
        bias.clone(),
        nan,
        weight.clone(),
    ];
    for (isa, results) in run_all(&spec, &Env::default(), &Env::default(), &teams, &args) {
        let Body::Matmul(body) = &spec.body else {
            unreachable!()
        };
        for at in points(&[m, n]) {
            let (i, j) = (at[0], at[1]);
            let acc = results[4][j * m + i];
            let (expected, scale) = oracle(
                k,
                (&args[0], &body.a),
                (&args[1], &body.b),
                &at,
                &Env::default(),
            );
            assert_sum(acc, expected, scale, k, &|| format!("{isa} at {at:?}"));
            assert_eq!(
                results[2][i * n + j],
                (acc + bias[j]).max(0.0),
                "{isa} at {at:?}"
            );
            assert_eq!(
                results[5][i * n + j],
                weight[i * n + j] - acc * 0.5,
                "{isa} at {at:?}"
            );
        }
    }
}

/// A kernel prepared for a bound runs at every size below, and gives the bits of one prepared for
/// just that size.
#[test]
fn sizes_below_the_bound() {
    let (mut random, teams) = (Random(19), teams());
    let symbol = Size::symbol(Symbol(0));
    // Forward: the symbol is m or n; weight gradient: the symbol is k.
    for role in ['m', 'n', 'k'] {
        let fixed = 52;
        let operands = match role {
            'm' => (operand(0, &[fixed as i64, 1]), operand(0, &[45, 1])),
            'n' => (
                operand(0, &[fixed as i64, 1]),
                operand(0, &[1, fixed as i64]),
            ),
            _ => (operand(0, &[1, 45]), operand(0, &[45, 1])),
        };
        let sizes = |size: usize| match role {
            'm' => (size, 45, fixed),
            'n' => (45, size, fixed),
            _ => (45, 45, size),
        };
        let mut spec = plain(&[45, 45], fixed, operands.0.clone(), operands.1.clone());
        let Body::Matmul(body) = &mut spec.body else {
            unreachable!()
        };
        match role {
            'm' => spec.dims[0] = symbol,
            'n' => (spec.dims[1], spec.operands[0].strides[0]) = (symbol, symbol),
            _ => body.k = symbol,
        }
        let bound = Env([5_000, 0, 0, 0, 0, 0, 0, 0]);
        for size in [1, 2, 13, 64, 65, 400, 4_999] {
            let env = Env([size as u32, 0, 0, 0, 0, 0, 0, 0]);
            let (m, n, k) = sizes(size);
            let args = [
                random.floats(m * k),
                random.floats(k * n),
                vec![f32::NAN; m * n],
            ];
            let at_bound = run_all(&spec, &bound, &env, &teams, &args);
            let exact = run_all(&spec, &env, &env, &teams[..1], &args);
            assert!(at_bound == exact, "size {size}");
            let exactly = plain(&[m, n], k, operands.0.clone(), operands.1.clone());
            for (isa, results) in at_bound {
                check(&exactly, &[m, n], k, &args, &results[2], 101, isa);
            }
        }
    }
}

/// Rows and columns in reverse, the operand beginning at its last element: no view makes that, and
/// no kernel supports it.
#[test]
#[should_panic(expected = "negative offset or stride")]
fn negative_strides_are_refused() {
    let (m, k) = (3, 2);
    let spec = plain(
        &[m, 5],
        k,
        operand((m * k - 1) as i64, &[-(k as i64), -1]),
        operand(0, &[5, 1]),
    );
    run(
        &spec,
        &Env::default(),
        &Env::default(),
        Isa::Portable,
        &teams()[0],
        &[vec![0.0; m * k], vec![0.0; k * 5], vec![0.0; m * 5]],
    );
}

#[test]
#[should_panic(expected = "above the bound")]
fn sizes_above_the_bound_are_refused() {
    let mut spec = plain(&[4, 4], 4, operand(0, &[4, 1]), operand(0, &[4, 1]));
    spec.dims[0] = Size::symbol(Symbol(0));
    let env = |m| Env([m, 0, 0, 0, 0, 0, 0, 0]);
    run(
        &spec,
        &env(3),
        &env(4),
        Isa::Portable,
        &teams()[0],
        &[vec![0.0; 16], vec![0.0; 16], vec![0.0; 16]],
    );
}

#[test]
#[should_panic(expected = "argument 0 reaches")]
fn elements_before_a_region_are_refused() {
    let spec = plain(&[4, 4], 4, operand(0, &[-4, 1]), operand(0, &[4, 1]));
    run(
        &spec,
        &Env::default(),
        &Env::default(),
        Isa::Portable,
        &teams()[0],
        &[vec![0.0; 16], vec![0.0; 16], vec![0.0; 16]],
    );
}
