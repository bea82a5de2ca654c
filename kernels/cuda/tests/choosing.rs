//! Compaction, sorting and suppression, the kernels with data-dependent lengths, against the CPU's
//! kernels.

mod common;

use common::layouts::{layout, sizes};
use common::{Case, Choices, TARGET, available, check};
use slabwise_cuda::{Lowered, lower};
use slabwise_kernels::dtype::DType;
use slabwise_kernels::size::{Env, Size, Symbol};
use slabwise_kernels::spec::{
    Body, Dims, NonMaxSuppression, Nonzero, Operand, PrefixOp, PrefixReduce, Sort, Spec,
};

fn spec(body: Body, dims: Dims) -> Spec {
    Spec {
        body,
        dims,
        reduced: 0,
        operands: vec![],
        indices: vec![],
        code: vec![],
        stores: vec![],
    }
}

fn functions(case: &Case) -> (usize, Lowered) {
    let lowered = lower(&case.spec, &case.bounds, &TARGET).expect("source");
    (lowered.functions.len(), lowered)
}

#[test]
fn positions_are_those_of_a_plain_loop() {
    if !available() {
        return;
    }
    let mut choices = Choices::new(31);
    let mut cases = Vec::new();
    for round in 0..24 {
        // Several chunks, none, and a remainder after whole ones.
        let long = [40, 3000, 9000, 2048, 4096, 0][round % 6];
        let mut dims: Vec<i64> = vec![
            1 + choices.below(3) as i64,
            1 + choices.below(4) as i64,
            long,
        ];
        dims.drain(..choices.below(3));
        let contiguous = choices.once_in(2);
        let dtype = choices.pick(&[DType::Bool, DType::U8]);
        let mask = layout(&mut choices, dtype, &dims, contiguous);
        // The result may be too short or too long.
        let room = dims.iter().product::<i64>() / [1, 2, 3, 20][choices.below(4)]
            + choices.below(3) as i64;
        let positions = layout(&mut choices, DType::I32, &[room], contiguous);
        let body = Body::Nonzero(Nonzero {
            space: sizes(&dims),
            mask,
            positions,
        });
        let mut case = Case::new(
            format!("positions {round}"),
            spec(body, sizes(&[room])),
            &mut choices,
        );
        let one_in = [1, 2, 9][round % 3];
        case.args[0]
            .iter_mut()
            .for_each(|b| *b = u8::from(choices.once_in(one_in)) * 3);
        cases.push(case);
    }
    // Bounds larger than the length, in the mask and in the result.
    let (rows, found) = (Size::symbol(Symbol(0)), Size::symbol(Symbol(1)));
    for (count, length) in [(900, 450), (3, 30), (1, 0)] {
        let space = Dims::from_slice(&[rows, Size::fixed(10)]);
        let mask = Operand::contiguous(DType::Bool, &space).expect("small");
        let positions = Operand::contiguous(DType::I32, &[found]).expect("small");
        let body = Body::Nonzero(Nonzero {
            space,
            mask,
            positions,
        });
        let env = |rows, found| Env([rows, found, 0, 0, 0, 0, 0, 0]);
        let spec = spec(body, Dims::from_slice(&[found]));
        cases.push(Case::bounded(
            format!("{count} rows"),
            spec,
            env(900, 9000),
            env(count, length),
            &mut choices,
        ));
    }
    let counts: Vec<usize> = cases.iter().map(|case| functions(case).0).collect();
    assert!(
        counts.contains(&1) && counts.contains(&3),
        "one chunk and several: {counts:?}"
    );
    check(&cases, 0.0);
}

#[test]
fn orders_are_those_of_a_stable_sort() {
    if !available() {
        return;
    }
    let mut choices = Choices::new(32);
    let mut cases = Vec::new();
    for round in 0..30 {
        let dtype = [DType::F32, DType::I32, DType::U8, DType::F16, DType::BF16][round % 5];
        let len = [1, 7, 40, 300, 700, 2048][choices.below(6)];
        let mut dims = vec![
            1 + choices.below(3) as i64,
            1 + choices.below((30 / (1 + len as usize / 40)).max(1)) as i64,
            len,
        ];
        dims.drain(..choices.below(3));
        let contiguous = choices.once_in(2);
        let source = layout(&mut choices, dtype, &dims, contiguous);
        // All of them, or the first few.
        let last = dims.len() - 1;
        if choices.once_in(3) {
            dims[last] = choices.below(len as usize + 1) as i64;
        }
        let positions = layout(&mut choices, DType::I32, &dims, contiguous);
        let body = Body::Sort(Sort {
            descending: choices.once_in(2),
            len: Size::fixed(len),
            source,
            positions,
        });
        cases.push(Case::new(
            format!("sort {round}"),
            spec(body, sizes(&dims)),
            &mut choices,
        ));
    }
    // Rows of several chunks: merged once, twice, and three times, where the last run has no
    // neighbour.
    for (rows, len) in [(2, 4000), (1, 8000), (1, 12_500), (3, 2049)] {
        let dtype = if len == 4000 { DType::F32 } else { DType::I32 };
        let wanted = if rows == 3 { 100 } else { len };
        let (source, positions) = (
            layout(&mut choices, dtype, &[rows, len], rows == 1),
            layout(&mut choices, DType::I32, &[rows, wanted], true),
        );
        let body = Body::Sort(Sort {
            descending: rows == 2,
            len: Size::fixed(len),
            source,
            positions,
        });
        cases.push(Case::new(
            format!("{rows} rows of {len}"),
            spec(body, sizes(&[rows, wanted])),
            &mut choices,
        ));
    }
    // Prepared for long rows, run on short ones, and on none.
    let length = Size::symbol(Symbol(0));
    for n in [5, 2048, 5000, 0] {
        let source = Operand::contiguous(DType::F32, &[length]).expect("small");
        let positions = Operand::contiguous(DType::I32, &[length]).expect("small");
        let body = Body::Sort(Sort {
            descending: false,
            len: length,
            source,
            positions,
        });
        let spec = spec(body, Dims::from_slice(&[length]));
        cases.push(Case::bounded(
            format!("{n} of 5000"),
            spec,
            Env([5000; 8]),
            Env([n; 8]),
            &mut choices,
        ));
    }
    // Many equal elements, both zeros, infinities, and NaN of either sign.
    let odd = [
        f32::NAN,
        -f32::NAN,
        f32::INFINITY,
        f32::NEG_INFINITY,
        0.0,
        -0.0,
        1e-40,
        -1e-40,
        2.5,
    ];
    for case in &mut cases {
        let dtype = case.spec.arguments()[0].0.dtype;
        let mut some = || odd[choices.below(odd.len())];
        match dtype {
            DType::F32 => case.args[0]
                .chunks_mut(4)
                .for_each(|b| b.copy_from_slice(&some().to_le_bytes())),
            DType::F16 => case.args[0]
                .chunks_mut(2)
                .for_each(|b| b.copy_from_slice(&half::f16::from_f32(some()).to_le_bytes())),
            DType::BF16 => case.args[0]
                .chunks_mut(2)
                .for_each(|b| b.copy_from_slice(&half::bf16::from_f32(some()).to_le_bytes())),
            _ => {}
        }
    }
    check(&cases, 0.0);
}

#[test]
fn prefix_reductions_run_along_rows() {
    if !available() {
        return;
    }
    let mut choices = Choices::new(34);
    let mut cases = Vec::new();
    let ops = [
        PrefixOp::Sum,
        PrefixOp::Linear,
        PrefixOp::LogSumExp,
        PrefixOp::ArgMax,
        PrefixOp::ArgMin,
    ];
    for round in 0..60 {
        let op = ops[round % 5];
        let finds = matches!(op, PrefixOp::ArgMax | PrefixOp::ArgMin);
        let types: &[DType] = match op {
            PrefixOp::LogSumExp => &[DType::F32],
            PrefixOp::Sum | PrefixOp::Linear => &[DType::F32, DType::I32],
            _ => &[DType::F32, DType::I32, DType::U8, DType::BF16],
        };
        let dtype = choices.pick(types);
        let mut dims = vec![
            1 + choices.below(3) as i64,
            1 + choices.below(4) as i64,
            choices.pick(&[1, 7, 256, 300, 700, 0]),
        ];
        dims.drain(..choices.below(3));
        let contiguous = choices.once_in(2);
        let factor =
            (op == PrefixOp::Linear).then(|| layout(&mut choices, dtype, &dims, contiguous));
        let result = if finds { DType::I32 } else { dtype };
        let body = Body::PrefixReduce(PrefixReduce {
            op,
            exclusive: !finds && choices.once_in(2),
            reverse: choices.once_in(2),
            source: layout(&mut choices, dtype, &dims, contiguous),
            factor,
            result: layout(&mut choices, result, &dims, contiguous),
        });
        let name = format!("prefix reduction {round} by {op:?}");
        let mut case = Case::new(name, spec(body, sizes(&dims)), &mut choices);
        if op == PrefixOp::Linear && dtype == DType::F32 {
            // Factors below 1, so that rounding errors fade; or products of factors near 1, whose
            // elements are 0; or a few large factors, which alone vanish or overflow together.
            let kind = choices.below(4);
            for bytes in case.args[1].chunks_mut(4) {
                let factor = match kind {
                    0 | 1 => 0.7 * choices.unit(),
                    2 => 0.99 + 0.02 * choices.unit(),
                    _ => choices.pick(&[1e30, 1e-30, 0.5, 2.0, 0.0]),
                };
                bytes.copy_from_slice(&factor.to_le_bytes());
            }
            if kind > 1 {
                case.args[0].fill(0);
            }
            if let (2, [n], Body::PrefixReduce(reduction)) =
                (kind, dims.as_slice(), &case.spec.body)
            {
                let [offset, stride] = [reduction.source.offset, reduction.source.strides[0]]
                    .map(|s| s.at(&Env::default()));
                let first = if reduction.reverse { n - 1 } else { 0 };
                let at = 4 * (offset + first * stride) as usize;
                if let Some(bytes) = case.args[0].get_mut(at..at + 4) {
                    bytes.copy_from_slice(&3.0f32.to_le_bytes());
                }
            }
            if kind == 1 {
                let at = 4 * choices.below((case.args[1].len() / 4).max(1));
                let factor = choices.pick(&[1.5f32, f32::INFINITY, f32::NAN]);
                if let Some(bytes) = case.args[1].get_mut(at..at + 4) {
                    bytes.copy_from_slice(&factor.to_le_bytes());
                }
            }
        }
        cases.push(case);
    }
    check(&cases, 2e-4);
}

#[test]
fn boxes_stay_as_one_after_the_other_would() {
    if !available() {
        return;
    }
    let mut choices = Choices::new(33);
    let mut cases = Vec::new();
    // Panels have 1024 boxes.
    for (round, count) in [0, 1, 63, 64, 65, 300, 1024, 1100, 2100]
        .into_iter()
        .enumerate()
    {
        let contiguous = choices.once_in(2);
        let (boxes, keep) = (
            layout(&mut choices, DType::F32, &[count, 4], contiguous),
            layout(&mut choices, DType::Bool, &[count], contiguous),
        );
        let place: Vec<usize> = (0..count)
            .flat_map(|i| (0..4).map(move |k| (i, k)))
            .map(|(i, k)| {
                let at = |s: Size| s.at(&Env::default());
                (at(boxes.offset) + i * at(boxes.strides[0]) + k * at(boxes.strides[1])) as usize
            })
            .collect();
        let body = Body::NonMaxSuppression(NonMaxSuppression {
            threshold: [0.0, 0.3, 0.5, 0.7][round % 4],
            boxes,
            keep,
        });
        let mut case = Case::new(
            format!("{count} boxes"),
            spec(body, sizes(&[count])),
            &mut choices,
        );
        for four in place.chunks(4) {
            let [x, y, w, h] =
                [60, 60, 16, 16].map(|n| choices.below(n) as f32 + choices.unit() / 4.0);
            for (&at, side) in four.iter().zip([x, y, x + w, y + h]) {
                case.args[0][4 * at..4 * at + 4].copy_from_slice(&side.to_le_bytes());
            }
        }
        cases.push(case);
    }
    check(&cases, 0.0);
}
