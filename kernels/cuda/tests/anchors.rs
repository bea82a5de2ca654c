//! Gathers, scatters and pooling, against the CPU's kernels.

mod common;

use common::gpu::Gpu;
use common::layouts::{layout, repeating, sizes};
use common::{Case, Choices, NO_FAULT, available, check, emulate};
use slabwise_cuda::emulator::Order;
use slabwise_cuda::lower;
use slabwise_kernels::dtype::DType;
use slabwise_kernels::scalar::ScalarOp;
use slabwise_kernels::size::{Env, Size, Symbol};
use slabwise_kernels::spec::{
    Body, BoundsCheck, Dims, Gather, Inst, Operand, Pool2d, Pool2dGrad, PoolKind, ReduceOp,
    Scatter, SliceAssign, Spec, Store, Window,
};

/// A spec that stores the anchor's value plus an operand of its type.
fn storing(
    choices: &mut Choices,
    body: Body,
    dims: &[i64],
    dtype: DType,
    contiguous: bool,
) -> Spec {
    let operands = vec![
        layout(choices, dtype, dims, contiguous),
        layout(choices, dtype, dims, contiguous),
    ];
    let plain = dtype == DType::Bool || choices.once_in(2);
    Spec {
        body,
        dims: sizes(dims),
        reduced: 0,
        operands,
        indices: vec![],
        code: vec![
            Inst::Load(0),
            Inst::Acc,
            if plain {
                Inst::Acc
            } else {
                Inst::Op(ScalarOp::Add, [0, 1, 0])
            },
        ],
        stores: vec![Store {
            value: 2,
            operand: 1,
        }],
    }
}

/// Fills an index argument with numbers below `limit`, sometimes with others.
fn fill_indices(case: &mut Case, argument: usize, limit: i64, wild: bool, choices: &mut Choices) {
    let dtype = case.spec.arguments()[argument].0.dtype;
    let count = case.args[argument].len() / dtype.bytes();
    // Values at the ends of the valid range, and others.
    let outside = [limit as i32, -1, 499, i32::MIN, i32::MAX];
    let mut number = || {
        if wild && choices.once_in(9) {
            choices.pick(&outside)
        } else {
            choices.below(limit.max(1) as usize) as i32
        }
    };
    case.args[argument] = match dtype {
        DType::U8 => (0..count).map(|_| number().clamp(0, 255) as u8).collect(),
        _ => (0..count).flat_map(|_| number().to_le_bytes()).collect(),
    };
}

fn dims(choices: &mut Choices) -> Vec<i64> {
    let mut dims: Vec<i64> = (0..1 + choices.below(3))
        .map(|_| 1 + choices.below(7) as i64)
        .collect();
    let last = dims.len() - 1;
    dims[last] = choices.pick(&[1, 3, 8, 20, 48]);
    dims
}

#[test]
fn gathers() {
    if !available() {
        return;
    }
    let mut choices = Choices::new(1);
    let mut cases = Vec::new();
    for round in 0..60 {
        let dims = dims(&mut choices);
        let axis = choices.below(dims.len());
        let len = [1, 5, 12, 200, 0][if round == 7 { 4 } else { choices.below(4) }];
        let dtype = choices.pick(&DType::ALL);
        let contiguous = choices.once_in(2);
        let mut of = dims.clone();
        of[axis] = len;
        let mut source = layout(&mut choices, dtype, &of, contiguous);
        let axis_stride = std::mem::replace(&mut source.strides[axis], Size::ZERO);
        let index_type = choices.pick(&[DType::U8, DType::I32]);
        let index = repeating(&mut choices, index_type, &dims, contiguous);
        let body = Body::Gather(Gather {
            source,
            index,
            axis_stride,
            axis_len: Size::fixed(len),
        });
        let stored = dtype.lane().stored();
        let spec = storing(&mut choices, body, &dims, stored, contiguous);
        let mut case = Case::new(format!("gather {round}"), spec, &mut choices);
        fill_indices(&mut case, 1, len, true, &mut choices);
        cases.push(case);
    }
    check(&cases, 0.0);
}

/// Replaces the values of a scatter by numbers whose sums and products are exact in any order,
/// because long lists are added in pieces.
fn exact_values(case: &mut Case, choices: &mut Choices) {
    for value in case.args[0].chunks_mut(4) {
        let x = choices.pick(&[-2.0f32, -1.0, 1.0, 2.0]);
        value.copy_from_slice(&x.to_le_bytes());
    }
}

#[test]
fn scatters_add_in_order() {
    if !available() {
        return;
    }
    let mut choices = Choices::new(2);
    let mut cases = Vec::new();
    for round in 0..60 {
        let mut of = dims(&mut choices);
        let axis = choices.below(of.len());
        let contiguous = choices.once_in(2);
        // Few values, or enough for lists.
        of[axis] = choices.pick(&[1, 4, 33, 150]);
        let mut result = of.clone();
        result[axis] = choices.pick(&[1, 6, 128, 300]);
        let index_type = choices.pick(&[DType::U8, DType::I32]);
        let index = repeating(&mut choices, index_type, &of, contiguous);
        let dtype = choices.pick(&[DType::F32, DType::F32, DType::I32]);
        let value = layout(&mut choices, dtype, &of, contiguous);
        let reduce = choices.pick(&[
            ReduceOp::Sum,
            ReduceOp::Sum,
            ReduceOp::Prod,
            ReduceOp::Max,
            ReduceOp::Min,
        ]);
        let body = Body::Scatter(Scatter {
            axis,
            reduce,
            space: sizes(&of),
            value,
            index,
        });
        let spec = storing(&mut choices, body, &result, dtype, contiguous);
        let mut case = Case::new(format!("scatter {round} by {reduce:?}"), spec, &mut choices);
        fill_indices(&mut case, 1, result[axis], true, &mut choices);
        if dtype == DType::F32 && of[axis] > 64 {
            exact_values(&mut case, &mut choices);
        }
        cases.push(case);
    }
    // Sums are in the order of the values for every order of threads, so they equal the CPU's in
    // every bit.
    check(&cases, 0.0);
}

/// Values that repeat along axes are read as they are, where a thread computes several elements too.
#[test]
fn scatters_of_repeated_values() {
    if !available() {
        return;
    }
    let mut choices = Choices::new(21);
    let mut cases = Vec::new();
    // Repeated along everything, neighbours alone, and the scattered axis alone; values of few
    // positions and of long lists.
    for (many, places) in [(40, 70), (40, 3000), (300, 3000)] {
        for strides in [[0, 0], [4, 0], [0, 1]] {
            let (of, result) = ([many, 8], [places, 8]);
            let value = Operand {
                dtype: DType::F32,
                offset: Size::ONE,
                strides: sizes(&strides),
            };
            let index = Operand {
                dtype: DType::I32,
                offset: Size::ZERO,
                strides: sizes(&[1, 0]),
            };
            let body = Body::Scatter(Scatter {
                axis: 0,
                reduce: ReduceOp::Sum,
                space: sizes(&of),
                value,
                index,
            });
            let spec = storing(&mut choices, body, &result, DType::F32, true);
            let name = format!("{many} values of strides {strides:?} in {places} positions");
            let mut case = Case::new(name, spec, &mut choices);
            // So that there are threads enough for vectors.
            case.target.multiprocessors = 1;
            fill_indices(&mut case, 1, 5, true, &mut choices);
            exact_values(&mut case, &mut choices);
            cases.push(case);
        }
    }
    check(&cases, 0.0);
}

/// The values of a position are added in pieces of 64, and their sums in order: the same bits for
/// every order of threads and every number of multiprocessors.
#[test]
fn long_lists_are_added_in_pieces() {
    if !available() {
        return;
    }
    let mut choices = Choices::new(12);
    // Groups, indices, positions, neighbours; a share of the indices that name position 2; elements
    // from row to row of the values and of the result.
    for (groups, many, places, width, common, [value_row, result_row]) in [
        (1, 1000, 5, 8, 2, [8, 8]),
        (1, 700, 9, 3, 1, [3, 3]),
        (2, 400, 300, 4, 3, [4, 4]),
        (1, 193, 1, 2, 1, [2, 2]),
        (1, 640, 4, 16, 4, [16, 16]),
        // Vectors of values and of results, but not of the sums of pieces, whose rows are close.
        (1, 300, 40, 66, 2, [132, 72]),
    ] {
        let of = [groups, many, width];
        let result = [groups, places, width];
        let rows = |count: i64, row: i64| Operand {
            dtype: DType::F32,
            offset: Size::ZERO,
            strides: sizes(&[count * row, row, 1]),
        };
        let index = Operand {
            dtype: DType::I32,
            offset: Size::ZERO,
            strides: sizes(&[many, 1, 0]),
        };
        let body = Body::Scatter(Scatter {
            axis: 1,
            reduce: ReduceOp::Sum,
            space: sizes(&of),
            value: rows(many, value_row),
            index,
        });
        let spec = Spec {
            body,
            dims: sizes(&result),
            reduced: 0,
            operands: vec![rows(places, result_row)],
            indices: vec![],
            code: vec![Inst::Acc],
            stores: vec![Store {
                value: 0,
                operand: 0,
            }],
        };
        let mut case = Case::new(format!("{of:?} to {places}"), spec, &mut choices);
        let indices: Vec<i32> = (0..groups * many)
            .map(|_| match choices.once_in(common) {
                true => 2.min(places as i32 - 1),
                false => choices.below(places as usize) as i32,
            })
            .collect();
        case.args[1] = indices.iter().flat_map(|i| i.to_le_bytes()).collect();
        let value = |at: usize| {
            let bytes = case.args[0][4 * at..].first_chunk().expect("4 bytes");
            f32::from_le_bytes(*bytes)
        };
        let [many, width, value_row] = [many, width, value_row].map(|n| n as usize);
        let mut expected = Vec::new();
        for (group, place) in (0..groups as usize).flat_map(|g| (0..places).map(move |p| (g, p))) {
            let list: Vec<usize> = (group * many..(group + 1) * many)
                .filter(|&s| i64::from(indices[s]) == place)
                .collect();
            for column in 0..width {
                let sum = |piece: &[usize]| {
                    let add = |sum: f32, &s: &usize| sum + value(s * value_row + column);
                    piece.iter().fold(0.0, add)
                };
                expected.push(list.chunks(64).map(sum).fold(0.0f32, |a, b| a + b));
            }
        }
        for multiprocessors in [2, 50] {
            case.target.multiprocessors = multiprocessors;
            let lowered = lower(&case.spec, &case.bounds, &case.target).expect("its source");
            let mut runs = Vec::new();
            if let Some(mut gpu) = Gpu::load(&[&lowered]) {
                runs.push(("on the GPU".into(), gpu.run(0, &case, &lowered)));
            }
            if let Some(emulator) = emulate(&lowered.functions) {
                runs.extend(Order::ALL.map(|order| {
                    let run = case.emulated(&lowered, &emulator, order, NO_FAULT);
                    (format!("{order:?}"), run)
                }));
            }
            for (what, run) in runs {
                let (got, _) = run.unwrap_or_else(|e| panic!("{}: {e}", case.name));
                let of_row = |row: &[u8]| -> Vec<f32> {
                    let numbers = row.chunks(4).take(width);
                    numbers
                        .map(|b| f32::from_le_bytes(*b.first_chunk().expect("4 bytes")))
                        .collect()
                };
                let rows = got[2].chunks(4 * result_row as usize);
                let got: Vec<f32> = rows.flat_map(of_row).collect();
                assert_eq!(got, expected, "{} {what}", case.name);
            }
        }
    }
}

#[test]
fn parts_are_replaced() {
    if !available() {
        return;
    }
    let mut choices = Choices::new(9);
    let mut cases = Vec::new();
    for round in 0..40 {
        let dims = [
            1 + choices.below(3) as i64,
            1 + choices.below(20) as i64,
            choices.pick(&[1, 8, 33]),
        ];
        let dtype = choices.pick(&DType::ALL);
        let contiguous = choices.once_in(2);
        let (mut start, mut step, mut part) = (vec![0; 3], vec![1u32; 3], dims);
        for a in 1..3 {
            start[a] = choices.below(dims[a] as usize) as i64;
            step[a] = 1 + choices.below(2) as u32;
            let most = (dims[a] - 1 - start[a]) / i64::from(step[a]) + 1;
            part[a] = choices.below(most as usize + 1) as i64;
        }
        let axis = 1 + choices.below(2);
        let mut places = part;
        places[axis] = 1;
        let moves = choices.once_in(2);
        let place = moves.then(|| {
            let mut at = repeating(&mut choices, DType::I32, &places, contiguous);
            at.strides[axis] = Size::ZERO;
            (axis, at)
        });
        let result = layout(&mut choices, dtype, &dims, contiguous);
        // Into a copy, into the base itself, and into memory that holds the base.
        let base = [
            Some(layout(&mut choices, dtype, &dims, contiguous)),
            Some(result.clone()),
            None,
        ][round % 3]
            .clone();
        let body = Body::SliceAssign(Box::new(SliceAssign {
            base,
            space: sizes(&part),
            value: layout(&mut choices, dtype, &part, contiguous),
            start: sizes(&start),
            step: step.into_iter().collect(),
            place,
            result,
        }));
        let spec = Spec {
            body,
            dims: sizes(&dims),
            reduced: 0,
            operands: vec![],
            indices: vec![],
            code: vec![],
            stores: vec![],
        };
        let mut case = Case::new(format!("part {round}"), spec, &mut choices);
        let last = case.args.len() - 1;
        if round % 3 == 1 {
            case.same.push((last, 0));
            case.args[last] = case.args[0].clone();
        }
        if moves {
            // Valid places, and some that are moved into the axis.
            let at = last - 1;
            fill_indices(&mut case, at, 4, true, &mut choices);
        }
        cases.push(case);
    }
    check(&cases, 0.0);
}

/// The gradient of an embedding whose number of tokens is known at launch.
#[test]
fn the_gradient_of_an_embedding() {
    if !available() {
        return;
    }
    let mut choices = Choices::new(3);
    let mut cases = Vec::new();
    let tokens = Size::symbol(Symbol(0));
    for (bound, size) in [(300, 300), (300, 77), (300, 0)] {
        let (places, width) = (400, 24);
        let space = Dims::from_slice(&[tokens, Size::fixed(width)]);
        let value = Operand::contiguous(DType::F32, &space).expect("small");
        let index = Operand {
            dtype: DType::I32,
            offset: Size::ZERO,
            strides: sizes(&[1, 0]),
        };
        let body = Body::Scatter(Scatter {
            axis: 0,
            reduce: ReduceOp::Sum,
            space,
            value,
            index,
        });
        let spec = storing(&mut choices, body, &[places, width], DType::F32, true);
        let (bounds, env) = (Env([bound; 8]), Env([size; 8]));
        let mut case = Case::bounded(format!("{size} tokens"), spec, bounds, env, &mut choices);
        // Some tokens come often.
        case.args[1] = (0..size)
            .flat_map(|_| {
                (choices.below(places as usize) as i32 / if choices.once_in(2) { 1 } else { 50 })
                    .to_le_bytes()
            })
            .collect();
        cases.push(case);
    }
    check(&cases, 0.0);
}

/// Many tokens of few words, one of them much commoner than the others: indices in chunks, whose
/// number depends on the device, and long lists. Sums are in the order of the tokens for all
/// numbers of chunks.
#[test]
fn tokens_of_few_words_are_listed_in_chunks() {
    if !available() {
        return;
    }
    let mut choices = Choices::new(6);
    let mut cases = Vec::new();
    let tokens = Size::symbol(Symbol(0));
    for (places, width, multiprocessors) in
        [(65, 20, 1), (65, 20, 132), (3, 64, 132), (700, 12, 20)]
    {
        for size in [5000, 1111] {
            let space = Dims::from_slice(&[tokens, Size::fixed(width)]);
            let value = Operand::contiguous(DType::F32, &space).expect("small");
            let index = Operand {
                dtype: DType::I32,
                offset: Size::ZERO,
                strides: sizes(&[1, 0]),
            };
            let body = Body::Scatter(Scatter {
                axis: 0,
                reduce: ReduceOp::Sum,
                space,
                value,
                index,
            });
            let spec = storing(&mut choices, body, &[places, width], DType::F32, true);
            let name = format!("{size} tokens of {places} words on {multiprocessors}");
            let mut case = Case::bounded(name, spec, Env([5000; 8]), Env([size; 8]), &mut choices);
            case.target.multiprocessors = multiprocessors;
            let mut word = || {
                if choices.once_in(3) {
                    1
                } else {
                    choices.below(places as usize) as i32
                }
            };
            case.args[1] = (0..size).flat_map(|_| word().to_le_bytes()).collect();
            exact_values(&mut case, &mut choices);
            cases.push(case);
        }
    }
    let chunks = |case: &Case| {
        let lowered = lower(&case.spec, &case.bounds, &case.target).expect("source");
        lowered.launches(&case.env)[0].grid[0]
    };
    assert_eq!(
        cases.iter().map(chunks).collect::<Vec<_>>(),
        [4, 4, 10, 10, 10, 10, 60, 60]
    );
    check(&cases, 0.0);
}

#[test]
fn the_first_bad_index_is_reported() {
    if !available() {
        return;
    }
    let mut choices = Choices::new(4);
    let mut cases = Vec::new();
    for round in 0..30 {
        let dims = if round == 0 {
            vec![]
        } else {
            dims(&mut choices)
        };
        let limit = 1 + choices.below(200) as i64;
        let index_type = choices.pick(&[DType::U8, DType::I32]);
        let contiguous = choices.once_in(2);
        let index = layout(&mut choices, index_type, &dims, contiguous);
        let body = Body::BoundsCheck(BoundsCheck {
            index,
            limit: Size::fixed(limit),
        });
        let spec = Spec {
            body,
            dims: sizes(&dims),
            reduced: 0,
            operands: vec![],
            indices: vec![],
            code: vec![],
            stores: vec![],
        };
        let mut case = Case::new(format!("check {round}"), spec, &mut choices);
        fill_indices(&mut case, 0, limit, round % 2 == 0, &mut choices);
        cases.push(case);
    }
    check(&cases, 0.0);
}

fn pooled(size: i64, k: usize, stride: usize, pad: usize) -> i64 {
    (size + 2 * pad as i64 - k as i64).max(-(stride as i64)) / stride as i64 + 1
}

#[test]
fn pooling_and_its_gradient() {
    if !available() {
        return;
    }
    let mut choices = Choices::new(5);
    let mut cases = Vec::new();
    for round in 0..60 {
        let k = [1 + choices.below(3), 1 + choices.below(4)];
        let window = match choices.once_in(3) {
            true => Window {
                k: [2, 2],
                stride: [2, 2],
                pad: [0, 0],
            },
            false => Window {
                k,
                stride: [1 + choices.below(3), 1 + choices.below(3)],
                pad: [choices.below(k[0]), choices.below(k[1])],
            },
        };
        let image = [
            choices.below(3) as i64 + 1,
            choices.below(3) as i64 + 1,
            choices.below(12) as i64 + 1,
            choices.below(20) as i64 + 1,
        ];
        let mut result = image;
        for axis in 0..2 {
            result[2 + axis] = pooled(
                image[2 + axis],
                window.k[axis],
                window.stride[axis],
                window.pad[axis],
            );
        }
        let contiguous = choices.once_in(2);
        let kind = choices.pick(&[
            PoolKind::Max,
            PoolKind::Max,
            PoolKind::Avg { count_pad: true },
            PoolKind::Avg { count_pad: false },
            PoolKind::ArgMax,
        ]);
        let is_max = kind == PoolKind::Max;
        let marks = choices.pick(&[DType::U8, DType::I32]);
        if round % 2 == 0 {
            let dtype = match kind {
                PoolKind::Avg { .. } => DType::F32,
                _ => choices.pick(&DType::ALL),
            };
            let arg = (is_max && choices.once_in(2))
                .then(|| layout(&mut choices, marks, &result, contiguous));
            let stored = if kind == PoolKind::ArgMax {
                DType::I32
            } else {
                dtype.lane().stored()
            };
            let x = layout(&mut choices, dtype, &image, contiguous);
            let body = Body::Pool2d(Pool2d {
                kind,
                window,
                hw: [Size::fixed(image[2]), Size::fixed(image[3])],
                x,
                arg,
            });
            let spec = storing(&mut choices, body, &result, stored, contiguous);
            let mut case = Case::new(format!("{kind:?} pooling {round}"), spec, &mut choices);
            if dtype == DType::F32 && is_max {
                // Ties and special values.
                let some = [
                    0.0,
                    1.0,
                    f32::NEG_INFINITY,
                    -1.0,
                    1.0,
                    f32::NAN,
                    f32::INFINITY,
                ];
                let count = case.args[0].len() / 4;
                case.args[0] = (0..count)
                    .flat_map(|_| some[choices.below(5 + round / 20)].to_le_bytes())
                    .collect();
            }
            cases.push(case);
        } else if kind != PoolKind::ArgMax {
            let arg = is_max.then(|| layout(&mut choices, marks, &result, contiguous));
            let dy = layout(&mut choices, DType::F32, &result, contiguous);
            let body = Body::Pool2dGrad(Pool2dGrad {
                kind,
                window,
                ohw: [Size::fixed(result[2]), Size::fixed(result[3])],
                dy,
                arg,
            });
            let spec = storing(&mut choices, body, &image, DType::F32, contiguous);
            let mut case = Case::new(
                format!("gradient of {kind:?} pooling {round}"),
                spec,
                &mut choices,
            );
            if is_max {
                fill_indices(
                    &mut case,
                    1,
                    (window.k[0] * window.k[1]) as i64,
                    false,
                    &mut choices,
                );
            }
            cases.push(case);
        }
    }
    // Sums in the order of the windows.
    check(&cases, 0.0);
}
