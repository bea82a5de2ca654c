//! Products of few rows with quantized weights, emulated, against sums in double precision and the
//! CPU's kernels.

mod common;
mod products;

use common::{Case, Choices, TARGET, available, compile_for_gpu};
use products::{Pick, Zeros, check, check_like_cpu, quantized, strided, typed};
use slabwise_cuda::{Description, candidates, lower};
use slabwise_kernels::dtype::DType;
use slabwise_kernels::scalar::ScalarOp;
use slabwise_kernels::size::{Env, Size, Symbol};
use slabwise_kernels::spec::{Body, Inst, Operand, Spec, SpecError, Store};

const ZEROS: [Zeros; 3] = [Zeros::Middle, Zeros::Packed, Zeros::Floats];

/// Formats with blocks of one word, of several, and of a number that is no power of two.
const FORMATS: [(u32, u32); 6] = [(4, 32), (8, 8), (2, 32), (4, 16), (8, 24), (2, 96)];

/// The same with operands of other strides.
fn scattered(mut spec: Spec, choices: &mut Choices) -> Spec {
    let [m, _] = [spec.dims[0], spec.dims[1]].map(|d| d.usize_at(&Env::default()));
    let Body::QuantizedMatmul(body) = &mut spec.body else {
        unreachable!("a product with quantized weights")
    };
    let k = body.k.usize_at(&Env::default());
    body.a = match choices.below(4) {
        0 => strided(0, &[k + 4, 1]),
        1 => strided(3, &[k, 1]),
        2 => strided(0, &[1, m]),
        _ => strided(1, &[2 * k + 1, 2]),
    };
    // Rows of numbers begin at words, at bytes, or backwards.
    let row = body.numbers.strides[0].usize_at(&Env::default());
    let rows = spec.dims[1].usize_at(&Env::default());
    body.numbers = match choices.below(3) {
        0 => typed(DType::U8, 8, &[row + 4, 1]),
        1 => typed(DType::U8, 0, &[row + 3, 1]),
        _ => Operand {
            dtype: DType::U8,
            offset: Size::fixed((row * (rows - 1)) as i64),
            strides: [Size::fixed(-(row as i64)), Size::ONE]
                .into_iter()
                .collect(),
        },
    };
    // Numbers of the blocks lie along columns.
    let along = |operand: &mut Operand| operand.strides = strided(0, &[1, rows]).strides;
    along(&mut body.scales);
    body.zeros.iter_mut().for_each(along);
    spec
}

#[test]
fn every_format_and_number_of_rows() {
    if !available() {
        return;
    }
    let mut choices = Choices::new(1);
    // All candidates for one kind of zero points of each format, two for the others.
    let (mut cases, mut others) = (Vec::new(), Vec::new());
    for (i, format) in FORMATS.into_iter().enumerate() {
        for (j, zeros) in ZEROS.into_iter().enumerate() {
            let cases = if i % ZEROS.len() == j {
                &mut cases
            } else {
                &mut others
            };
            let m = [1, 2, 3, 8, 19, 5][(i + 2 * j) % 6];
            let n = [24, 19, 33, 7][(i + j) % 4];
            // Parts of a warp's words, and several turns.
            let k = format.1 as usize * [3, 20, 9][(i + j) % 3];
            let name = format!("{m}×{n}×{k} {format:?} {zeros:?}");
            let spec = quantized([m, n, k], format, zeros);
            cases.push(Case::new(name.clone(), spec.clone(), &mut choices));
            if i < 3 {
                let spec = scattered(spec, &mut choices);
                cases.push(Case::new(format!("{name}, scattered"), spec, &mut choices));
            }
        }
    }
    let mut ran = check(&others, Pick::Two);
    ran.extend(check(&cases, Pick::All));
    for (bits, few) in [(4, 1), (8, 2), (2, 4), (4, 8)] {
        let name = format!("gemv_{bits}bits_{few}x1");
        assert!(ran.contains(&name), "{name}: {ran:?}");
    }
}

#[test]
fn long_sums_are_split_into_parts() {
    if !available() {
        return;
    }
    let mut choices = Choices::new(2);
    let case = |(format, zeros)| {
        let spec = quantized([1, 8, 8192], format, zeros);
        let mut case = Case::new(format!("{format:?}"), spec, &mut choices);
        case.target.multiprocessors = 40;
        case
    };
    let formats = [((4, 32), Zeros::Packed), ((8, 64), Zeros::Middle)];
    let ran = check(&formats.map(case), Pick::All);
    assert!(ran.iter().any(|name| name.ends_with("parts")), "{ran:?}");
}

/// A bias and an activation in the epilogue, for fewer rows than the bound, and none.
#[test]
fn epilogues_and_bounded_rows() {
    if !available() {
        return;
    }
    let mut choices = Choices::new(3);
    let rows = Size::symbol(Symbol(0));
    let mut spec = quantized([1, 33, 96], (4, 32), Zeros::Packed);
    spec.dims[0] = rows;
    spec.operands.insert(0, strided(0, &[0, 1]));
    spec.code.extend([
        Inst::Load(0),
        Inst::Op(ScalarOp::Add, [0, 1, 0]),
        Inst::Op(ScalarOp::Relu, [2, 0, 0]),
    ]);
    spec.stores = vec![Store {
        value: 3,
        operand: 1,
    }];
    let of = |rows: u32| {
        let [bounds, env] = [4, rows].map(|rows| {
            let mut env = Env::default();
            env.0[0] = rows;
            env
        });
        Case::bounded(
            format!("{rows} rows"),
            spec.clone(),
            bounds,
            env,
            &mut choices,
        )
    };
    check_like_cpu(&[4, 3, 1, 0].map(of), Pick::All, 1e-5);
}

#[test]
fn ragged_blocks_are_refused() {
    let refused = |spec: &Spec| lower(spec, &Env::default(), &TARGET);
    let of = |rows, format| quantized([rows, 16, 192], format, Zeros::Middle);
    assert!(refused(&of(8, (4, 32))).is_ok());
    for spec in [of(1, (4, 8)), of(1, (2, 16))] {
        let error = refused(&spec).expect_err("no kernel");
        assert!(matches!(error, SpecError::Unsupported { .. }), "{error}");
    }
}

/// Compiles the kernels for so many rows.
fn compiled(sm: u32, rows: impl IntoIterator<Item = (usize, Zeros)>) {
    let target = Description::nearest(sm).target();
    let mut functions = Vec::new();
    for (m, zeros) in rows {
        for bits in [2, 4, 8] {
            let spec = quantized([m, 4096, 4096], (bits, 32), zeros);
            let list = candidates(&spec, &Env::default(), &target).expect("a product");
            functions.extend(list.into_iter().flat_map(|c| c.lowered.functions));
        }
    }
    compile_for_gpu(&functions, target.sm, 0);
}

#[test]
fn registers_suffice() {
    compiled(80, [(1, Zeros::Packed), (8, Zeros::Floats)]);
    compiled(90, [(2, Zeros::Floats), (4, Zeros::Packed)]);
}

#[test]
#[ignore = "takes minutes"]
fn registers_suffice_on_every_architecture() {
    for sm in [80, 86, 89, 90, 100, 120] {
        let rows = [1, 2, 4, 8].into_iter();
        compiled(sm, rows.flat_map(|m| ZEROS.map(|zeros| (m, zeros))));
    }
}
