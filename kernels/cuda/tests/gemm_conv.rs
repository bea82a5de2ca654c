//! Convolutions and both gradients: all candidate kernels, emulated, against the definition.

mod common;
mod products;

use common::{Case, Choices, available};
use products::convolution::{KINDS, Shape};
use products::{Pick, check, check_exact, check_like_cpu, small_integers, typed};
use slabwise_cuda::{candidates, lower};
use slabwise_kernels::dtype::DType;
use slabwise_kernels::scalar::ScalarOp;
use slabwise_kernels::size::{Env, Size, Symbol};
use slabwise_kernels::spec::{Body, Conv2d, ConvKind, Inst, Operand, Spec, Store};

/// Axes in memory order, with gaps now and then.
fn scattered(choices: &mut Choices, space: [usize; 4]) -> Operand {
    let order = choices.pick(&[
        [0, 1, 2, 3],
        [0, 1, 2, 3],
        [0, 2, 3, 1],
        [3, 1, 0, 2],
        [1, 0, 2, 3],
    ]);
    let mut strides = [0; 4];
    let mut stride = if choices.once_in(5) { 2 } else { 1 };
    for &axis in order.iter().rev() {
        strides[axis] = stride;
        stride = stride * space[axis]
            + if choices.once_in(4) {
                1 + choices.below(3)
            } else {
                0
            };
    }
    typed(DType::F32, choices.below(3) as i64, &strides)
}

#[test]
fn random_geometry_and_strides() {
    if !available() {
        return;
    }
    let mut choices = Choices::new(21);
    let mut cases = Vec::new();
    while cases.len() < 48 {
        let groups = choices.pick(&[1, 1, 2, 3]);
        let mut pair = |from: [usize; 2], most: [usize; 2]| {
            [
                from[0] + choices.below(most[0]),
                from[1] + choices.below(most[1]),
            ]
        };
        let (hw, k, stride) = (
            pair([1, 1], [10, 14]),
            pair([1, 1], [5, 4]),
            pair([1, 1], [3, 3]),
        );
        let (pad, dilation) = (pair([0, 0], [4, 3]), pair([1, 1], [2, 3]));
        let (n, ci, co) = (
            1 + choices.below(3),
            groups * (1 + choices.below(5)),
            groups * choices.pick(&[1, 2, 5, 17]),
        );
        let cut = [choices.below(4) / 3, choices.below(4) / 3];
        let shape = Shape {
            n,
            ci,
            co,
            hw,
            k,
            stride,
            pad,
            dilation,
            groups,
            cut,
            dtype: DType::F32,
        };
        if (0..2).any(|i| hw[i] + 2 * pad[i] <= (k[i] - 1) * dilation[i]) {
            continue;
        }
        for kind in KINDS {
            let spec = match cases.len() / 3 % 2 {
                0 => shape.contiguous(kind),
                _ => shape.spec(
                    kind,
                    shape
                        .spaces(kind)
                        .map(|space| scattered(&mut choices, space)),
                ),
            };
            cases.push(Case::new(format!("{kind:?} {shape:?}"), spec, &mut choices));
        }
    }
    check(&cases, Pick::Two);
}

#[test]
fn shapes_of_every_kind() {
    if !available() {
        return;
    }
    let mut choices = Choices::new(22);
    let one = Shape::simple;
    let shapes = [
        // Several tiles of channels and of positions; the image's edges fall into tiles.
        one(2, 9, 70, 9, 3, 1),
        // A point-wise product is a plain one, with or without steps.
        one(2, 40, 33, 6, 1, 0),
        Shape {
            stride: [2, 2],
            ..one(3, 20, 30, 8, 1, 0)
        },
        // Depthwise, also with several outputs per channel, with steps and gaps.
        Shape {
            groups: 24,
            ..one(2, 24, 24, 9, 3, 1)
        },
        Shape {
            groups: 8,
            stride: [2, 2],
            ..one(1, 8, 16, 15, 3, 1)
        },
        Shape {
            groups: 3,
            stride: [3, 2],
            k: [2, 4],
            dilation: [1, 2],
            hw: [11, 37],
            ..one(2, 3, 3, 0, 0, 1)
        },
        // Groups of several channels.
        Shape {
            groups: 3,
            ..one(2, 12, 15, 8, 3, 1)
        },
        // More residues than kernel elements, a dilation that shares a factor with the stride, a
        // stride larger than the image.
        Shape {
            stride: [4, 6],
            dilation: [2, 4],
            hw: [23, 31],
            ..one(2, 3, 5, 0, 3, 2)
        },
        Shape {
            stride: [9, 9],
            ..one(2, 3, 2, 5, 5, 2)
        },
        // Patches that fill the image.
        Shape {
            stride: [4, 2],
            k: [4, 2],
            hw: [12, 10],
            ..one(2, 3, 20, 0, 0, 0)
        },
        Shape {
            stride: [4, 4],
            k: [4, 4],
            hw: [13, 12],
            ..one(2, 3, 20, 0, 0, 0)
        },
        // More padding than image; many positions of few images, many images of one position.
        one(2, 2, 3, 1, 3, 4),
        Shape {
            hw: [3, 300],
            k: [2, 3],
            ..one(1, 2, 3, 0, 0, 1)
        },
        one(70, 3, 4, 2, 2, 0),
    ];
    let mut cases: Vec<Case> = shapes
        .iter()
        .flat_map(|s| KINDS.map(|kind| (s, kind)))
        .map(|(s, kind)| s.case(kind, &mut choices))
        .collect();
    cases
        .iter_mut()
        .step_by(2)
        .for_each(|c| c.target.multiprocessors = 16);
    let ran = check(&cases, Pick::Two);
    assert!(
        ran.iter().any(|n| n.starts_with("depthwise")) && ran.iter().any(|n| n.ends_with("parts")),
        "{ran:?}"
    );
}

/// Halves and tf32 on tensor cores, where elements are gathered one by one, on sums without
/// rounding.
#[test]
fn tensor_cores() {
    if !available() {
        return;
    }
    let mut choices = Choices::new(23);
    let mut cases = Vec::new();
    let one = Shape::simple;
    let shapes = [
        one(2, 9, 40, 9, 3, 1),
        Shape {
            stride: [2, 1],
            ..one(1, 16, 24, 8, 3, 1)
        },
        // Windows whose elements repeat after many tiles or one, without and with much padding,
        // also in images smaller than the window, whose rows are apart.
        Shape {
            stride: [2, 2],
            ..one(2, 3, 20, 15, 7, 3)
        },
        one(2, 6, 70, 12, 5, 2),
        one(3, 8, 30, 9, 2, 0),
        one(2, 10, 20, 2, 3, 1),
        one(2, 4, 9, 3, 3, 5),
        Shape {
            k: [2, 3],
            dilation: [3, 2],
            ..one(2, 5, 18, 11, 0, 2)
        },
        Shape {
            groups: 2,
            ..one(2, 12, 70, 7, 3, 0)
        },
        Shape {
            stride: [2, 2],
            ..one(2, 40, 70, 8, 1, 0)
        },
        // Windows beside each other.
        Shape {
            stride: [2, 2],
            ..one(3, 20, 70, 10, 2, 0)
        },
        // Positions in vectors of four halves or two, of both operands or one.
        one(3, 40, 70, 6, 1, 0),
        one(3, 9, 40, 6, 3, 1),
        Shape {
            hw: [6, 7],
            ..one(2, 70, 20, 0, 1, 0)
        },
        Shape {
            hw: [6, 7],
            ..one(2, 9, 20, 0, 3, 1)
        },
    ];
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        for (i, shape) in shapes.iter().enumerate() {
            // The two halves differ in the multiplication alone.
            if dtype == DType::F16 && i > 0 {
                continue;
            }
            let shape = Shape { dtype, ..*shape };
            for kind in KINDS {
                let mut case = shape.case(kind, &mut choices);
                case.target.tf32 = true;
                small_integers(&mut case, &mut choices);
                cases.push(case);
            }
        }
    }
    check_exact(&cases, Pick::Two);
}

/// Images whose channels are innermost, in vectors where there are enough of them: register tiles
/// and tensor cores, on sums without rounding.
#[test]
fn channels_innermost() {
    if !available() {
        return;
    }
    let mut choices = Choices::new(29);
    let mut cases = Vec::new();
    let one = Shape::simple;
    let shapes = [
        one(2, 16, 40, 9, 3, 1),
        one(3, 40, 24, 7, 1, 0),
        // No vectors of channels of the image, of the result, of both in halves.
        one(2, 6, 72, 6, 3, 1),
        one(2, 24, 10, 5, 3, 1),
        one(2, 12, 20, 5, 5, 2),
        Shape {
            stride: [2, 2],
            ..one(2, 16, 72, 11, 3, 1)
        },
        Shape {
            stride: [2, 2],
            ..one(2, 64, 16, 8, 1, 0)
        },
        Shape {
            k: [2, 3],
            dilation: [3, 2],
            ..one(2, 8, 16, 11, 0, 2)
        },
        Shape {
            groups: 2,
            ..one(2, 32, 48, 7, 3, 2)
        },
        // One channel each, of which some have two results; windows beside each other.
        Shape {
            groups: 8,
            ..one(2, 8, 16, 7, 3, 1)
        },
        Shape {
            k: [1, 3],
            pad: [0, 1],
            groups: 2,
            ..one(2, 8, 8, 6, 3, 1)
        },
        Shape {
            stride: [2, 2],
            ..one(3, 24, 72, 10, 2, 0)
        },
    ];
    for dtype in [DType::F32, DType::BF16] {
        for (i, shape) in shapes.iter().enumerate() {
            let shape = Shape { dtype, ..*shape };
            for kind in KINDS {
                let spec = shape.channels_last(kind, i % 2 == 0);
                let name = format!("channels last {kind:?} {shape:?}");
                let mut case = Case::new(name, spec, &mut choices);
                case.target.shared_bytes_max = 164 << 10;
                case.target.tf32 = i % 3 != 2;
                small_integers(&mut case, &mut choices);
                cases.push(case);
            }
        }
    }
    check_exact(&cases, Pick::Two);
}

/// A batch below the bound, and an empty one: a weight gradient is zeros then.
#[test]
fn batches_below_the_bound() {
    if !available() {
        return;
    }
    let mut choices = Choices::new(24);
    let mut cases = Vec::new();
    let halves = Shape {
        dtype: DType::BF16,
        ..Shape::simple(1, 20, 30, 6, 1, 0)
    };
    for (shape, kind) in [Shape::simple(1, 3, 5, 9, 3, 1), halves]
        .iter()
        .flat_map(|shape| KINDS.map(|kind| (shape, kind)))
    {
        let mut spec = shape.contiguous(kind);
        let Body::Conv2d(body) = &mut spec.body else {
            unreachable!()
        };
        body.n = Size::symbol(Symbol(0));
        if kind != ConvKind::WeightGrad {
            spec.dims[0] = body.n;
        }
        for n in [0, 1, 6] {
            let [bounds, env] = [6, n].map(|n| Env([n, 0, 0, 0, 0, 0, 0, 0]));
            let mut case = Case::bounded(
                format!("{kind:?} of {n}"),
                spec.clone(),
                bounds,
                env,
                &mut choices,
            );
            case.target.multiprocessors = 8;
            cases.push(case);
        }
        if (shape.dtype, kind) == (DType::BF16, ConvKind::WeightGrad) {
            // Whatever the batch, positions form vectors.
            let Case {
                spec,
                bounds,
                target,
                ..
            } = &cases[cases.len() - 1];
            let list = candidates(spec, bounds, target).expect("a product");
            let text = &list[0].lowered.functions[0].source;
            assert!(text.contains("product<true, 4, true, 4>"), "{text}");
        }
    }
    check(&cases, Pick::Two);
}

/// Bias and activation in the epilogue, and another operand updated in place.
#[test]
fn epilogues() {
    if !available() {
        return;
    }
    let mut choices = Choices::new(25);
    let mut cases = Vec::new();
    for shape in [
        Shape::simple(3, 4, 6, 11, 3, 1),
        Shape {
            stride: [2, 2],
            groups: 2,
            ..Shape::simple(2, 4, 4, 9, 3, 1)
        },
        // Most pixels have no element of the window: their gradient is a zero.
        Shape {
            stride: [2, 3],
            groups: 2,
            ..Shape::simple(2, 4, 6, 9, 1, 0)
        },
    ] {
        for kind in KINDS {
            let mut spec = shape.contiguous(kind);
            let out = spec.operands[0].clone();
            spec.operands = vec![out.clone(), typed(DType::F32, 0, &[0, 1, 0, 0]), out];
            spec.code = vec![
                Inst::Acc,
                Inst::Load(1),
                Inst::Op(ScalarOp::Add, [0, 1, 0]),
                Inst::Op(ScalarOp::Relu, [2, 0, 0]),
                Inst::Load(2),
                Inst::Op(ScalarOp::Sub, [4, 0, 0]),
            ];
            spec.stores = vec![
                Store {
                    value: 3,
                    operand: 0,
                },
                Store {
                    value: 5,
                    operand: 2,
                },
            ];
            let mut case = Case::new(format!("{kind:?} {shape:?}"), spec, &mut choices);
            case.target.multiprocessors = 8;
            let lowered = lower(&case.spec, &case.bounds, &case.target).expect("a product");
            let fills = lowered
                .functions
                .iter()
                .any(|f| f.name.starts_with("gemm_zeros"));
            assert_eq!(fills, kind == ConvKind::InputGrad && shape.k == [1; 2]);
            cases.push(case);
        }
    }
    check_like_cpu(&cases, Pick::Two, 2e-5);
}

#[test]
fn wrong_geometry_is_refused() {
    let shape = Shape::simple(2, 4, 6, 8, 3, 1);
    let refused = |change: &dyn Fn(&mut Conv2d)| {
        let mut spec = shape.contiguous(ConvKind::Forward);
        let Body::Conv2d(body) = &mut spec.body else {
            unreachable!()
        };
        change(body);
        candidates(&spec, &Env::default(), &common::TARGET)
            .expect_err("it is wrong")
            .to_string()
    };
    assert!(
        refused(&|b| b.groups = 3).contains("4 input channels in 3 groups"),
        "{}",
        refused(&|b| b.groups = 3)
    );
    assert!(refused(&|b| b.stride = [0, 1]).contains("stride [0, 1]"));
    assert!(refused(&|b| b.ohw = [Size::fixed(3); 2]).contains("Forward convolution over"));
    assert!(refused(&|b| b.a.strides.truncate(3)).contains("four axes"));
    let huge = |b: &mut Conv2d| b.ci = Size::fixed(1 << 40);
    assert!(refused(&huge).contains("at most"), "{}", refused(&huge));
}

#[test]
fn a_prologue_is_refused() {
    for kind in [ConvKind::Forward, ConvKind::WeightGrad] {
        let mut spec = Shape::simple(2, 4, 6, 8, 3, 1).contiguous(kind);
        let Body::Conv2d(body) = &mut spec.body else {
            unreachable!()
        };
        let dims = [body.n, body.ci, body.hw[0], body.hw[1]]
            .into_iter()
            .collect();
        let operands = vec![body.a.clone(), body.a.clone()];
        let (code, stores) = (
            vec![Inst::Load(0), Inst::Op(ScalarOp::Relu, [0; 3])],
            vec![Store {
                value: 1,
                operand: 1,
            }],
        );
        body.prologue = Some(Box::new(Spec {
            body: Body::Loop,
            dims,
            reduced: 0,
            operands,
            indices: vec![],
            code,
            stores,
        }));
        let all = candidates(&spec, &Env::default(), &common::TARGET).map(|_| ());
        let one = lower(&spec, &Env::default(), &common::TARGET).map(|_| ());
        for refused in [all, one] {
            let why = refused.expect_err("there is no such kernel").to_string();
            assert!(
                why.contains("a convolution with a prologue"),
                "{kind:?}: {why}"
            );
        }
    }
}
