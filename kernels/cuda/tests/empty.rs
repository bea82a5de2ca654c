//! Tensors without elements: every family of kernels with each of its lengths 0, known when it is
//! compiled or only at launch, against the CPU's kernels, under the emulator and through a driver
//! that refuses launches without blocks, or on a GPU where one is required.

#[path = "../../tests/loops/builder.rs"]
#[allow(dead_code)] // not every test needs all of it
mod builder;
mod common;

use builder::Builder;
use common::{Case, Choices, check};
use slabwise_cuda::fake::TestDevice;
use slabwise_kernels::dtype::DType;
use slabwise_kernels::scalar::ScalarOp;
use slabwise_kernels::size::{Env, Size, Symbol};
use slabwise_kernels::spec::{
    Body, BoundsCheck, Conv2d, ConvKind, Dims, Gather, Inst, Matmul, NonMaxSuppression, Nonzero,
    Operand, Pool2d, Pool2dGrad, PoolKind, ReduceOp, Scatter, Sort, Spec, Store, Window,
};

fn contiguous(dtype: DType, dims: &[Size]) -> Operand {
    Operand::contiguous(dtype, dims).expect("a size")
}

/// The row-major strides of some axes, 0 for the axes that are left out.
fn strides(dims: &[Size], of: &[usize]) -> Dims {
    let kept: Dims = of.iter().map(|&axis| dims[axis]).collect();
    let own = contiguous(DType::F32, &kept).strides;
    (0..dims.len())
        .map(|axis| {
            of.iter()
                .position(|&a| a == axis)
                .map_or(Size::ZERO, |at| own[at])
        })
        .collect()
}

/// A loop that `build` fills, over these lengths.
fn looped(dims: &[Size], reduced: usize, build: impl FnOnce(&mut Builder)) -> Spec {
    let mut b = Builder::new(&[], reduced);
    b.spec.dims = dims.into();
    build(&mut b);
    b.spec
}

fn operand(b: &mut Builder, dtype: DType, dims: &[Size], of: &[usize]) -> u16 {
    let k = b.typed(dtype, &[]);
    b.spec.operands[usize::from(k)].strides = strides(dims, of);
    k
}

fn load(b: &mut Builder, dims: &[Size], of: &[usize]) -> u16 {
    let k = operand(b, DType::F32, dims, of);
    b.inst(Inst::Load(k))
}

/// An anchor whose value is stored unchanged.
fn storing(body: Body, dims: &[Size], dtype: DType) -> Spec {
    let stores = vec![Store {
        value: 0,
        operand: 0,
    }];
    Spec {
        body,
        dims: dims.into(),
        reduced: 0,
        operands: vec![contiguous(dtype, dims)],
        indices: vec![],
        code: vec![Inst::Acc],
        stores,
    }
}

/// A body that writes its results itself.
fn writing(body: Body, dims: &[Size]) -> Spec {
    Spec {
        body,
        dims: dims.into(),
        reduced: 0,
        operands: vec![],
        indices: vec![],
        code: vec![],
        stores: vec![],
    }
}

/// A spec for each way to set one of some lengths to 0, and for the outermost two: as numbers, and
/// as a length that is 0 at launch.
fn each(
    cases: &mut Vec<Case>,
    choices: &mut Choices,
    name: &str,
    lengths: &[i64],
    spec: impl Fn(&[Size]) -> Spec,
) {
    let ways = (0..lengths.len())
        .map(|axis| [axis, axis])
        .chain((lengths.len() > 1).then(|| [0, lengths.len() - 1]));
    for way in ways {
        let of = |zero: Size| -> Vec<Size> {
            let sizes = lengths.iter().enumerate();
            sizes
                .map(|(axis, &n)| {
                    if axis == way[0] {
                        zero
                    } else if axis == way[1] {
                        Size::ZERO
                    } else {
                        Size::fixed(n)
                    }
                })
                .collect()
        };
        cases.push(Case::new(
            format!("{name}, lengths {way:?} are 0"),
            spec(&of(Size::ZERO)),
            choices,
        ));
        let (bounds, env) = (Env([lengths[way[0]] as u32; 8]), Env([0; 8]));
        let name = format!("{name}, lengths {way:?} are 0 at launch");
        cases.push(Case::bounded(
            name,
            spec(&of(Size::symbol(Symbol(0)))),
            bounds,
            env,
            choices,
        ));
    }
}

#[test]
fn loops() {
    let Some(_device) = TestDevice::find() else {
        return;
    };
    let (mut cases, mut choices) = (Vec::new(), Choices::new(61));
    each(&mut cases, &mut choices, "sums", &[3, 5, 8], |dims| {
        looped(dims, 0, |b| {
            let (x, y) = (load(b, dims, &[0, 1, 2]), load(b, dims, &[2]));
            let sum = b.op(ScalarOp::Add, &[x, y]);
            let out = operand(b, DType::F32, dims, &[0, 1, 2]);
            b.store(sum, out);
        })
    });
    each(&mut cases, &mut choices, "transposes", &[40, 70], |dims| {
        looped(dims, 0, |b| {
            let x = load(b, dims, &[1, 0]);
            let out = operand(b, DType::F32, dims, &[0, 1]);
            b.store(x, out);
        })
    });
    each(&mut cases, &mut choices, "random numbers", &[100], |dims| {
        looped(dims, 0, |b| {
            let state = b.typed(DType::I32, &[0]);
            b.spec.indices.push([Size::fixed(1)].into_iter().collect());
            let index = b.inst(Inst::Index(0));
            let x = b.inst(Inst::Uniform {
                state,
                stream: 7,
                index,
            });
            let out = operand(b, DType::F32, dims, &[0]);
            b.store(x, out);
        })
    });
    let all = [
        ReduceOp::Sum,
        ReduceOp::Prod,
        ReduceOp::Max,
        ReduceOp::Min,
        ReduceOp::ArgMax,
        ReduceOp::Any,
        ReduceOp::All,
    ];
    // Short rows, rows of a block, rows in parts, columns.
    for (lengths, across) in [
        ([5, 12], false),
        ([3, 1300], false),
        ([2, 40_000], false),
        ([30, 50], true),
    ] {
        for op in all {
            let truth = matches!(op, ReduceOp::Any | ReduceOp::All);
            each(
                &mut cases,
                &mut choices,
                &format!("{op:?} of {lengths:?}"),
                &lengths,
                |dims| {
                    looped(dims, 1, |b| {
                        let k = operand(
                            b,
                            if truth { DType::Bool } else { DType::F32 },
                            dims,
                            if across { &[1, 0] } else { &[0, 1] },
                        );
                        let x = b.inst(Inst::Load(k));
                        let y = b.reduce(op, x);
                        let found = if op == ReduceOp::ArgMax {
                            DType::I32
                        } else {
                            DType::F32
                        };
                        let out = operand(b, if truth { DType::Bool } else { found }, dims, &[0]);
                        b.store(y, out);
                    })
                },
            );
        }
    }
    each(
        &mut cases,
        &mut choices,
        "rows less their sum",
        &[9, 50],
        |dims| {
            looped(dims, 1, |b| {
                let x = load(b, dims, &[0, 1]);
                let sum = b.reduce(ReduceOp::Sum, x);
                let y = b.op(ScalarOp::Sub, &[x, sum]);
                let (out, sums) = (
                    operand(b, DType::F32, dims, &[0, 1]),
                    operand(b, DType::F32, dims, &[0]),
                );
                b.store(y, out);
                b.store(sum, sums);
            })
        },
    );
    check(&cases, 1e-6);
}

#[test]
fn products() {
    let Some(_device) = TestDevice::find() else {
        return;
    };
    let (mut cases, mut choices) = (Vec::new(), Choices::new(62));
    each(
        &mut cases,
        &mut choices,
        "product",
        &[2, 20, 24, 48],
        |lengths| {
            let &[batch, m, n, k] = lengths else {
                unreachable!()
            };
            let (a, b) = (
                contiguous(DType::F32, &[batch, m, k]),
                contiguous(DType::F32, &[batch, k, n]),
            );
            storing(
                Body::Matmul(Matmul {
                    k,
                    in_order: false,
                    a,
                    b,
                }),
                &[batch, m, n],
                DType::F32,
            )
        },
    );
    for kind in [ConvKind::Forward, ConvKind::InputGrad, ConvKind::WeightGrad] {
        each(
            &mut cases,
            &mut choices,
            &format!("{kind:?}"),
            &[2, 5, 6],
            |lengths| {
                let &[n, ci, co] = lengths else {
                    unreachable!()
                };
                let (one, hw) = ([1, 1], [Size::fixed(9); 2]);
                let image = [n, ci, hw[0], hw[1]];
                let weight = [co, ci, Size::fixed(3), Size::fixed(3)];
                let result = [n, co, hw[0], hw[1]];
                let [a, b, out] = match kind {
                    ConvKind::Forward => [image, weight, result],
                    ConvKind::InputGrad => [result, weight, image],
                    ConvKind::WeightGrad => [image, result, weight],
                };
                let [a, b] = [a, b].map(|dims| contiguous(DType::F32, &dims));
                let k = [3, 3];
                let body = Conv2d {
                    kind,
                    n,
                    ci,
                    co,
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
                storing(Body::Conv2d(body), &out, DType::F32)
            },
        );
    }
    check(&cases, 1e-6);
}

#[test]
fn indices_and_windows() {
    let Some(_device) = TestDevice::find() else {
        return;
    };
    let (mut cases, mut choices) = (Vec::new(), Choices::new(63));
    let along = |dims: &[Size], of: &[usize], dtype: DType| Operand {
        dtype,
        offset: Size::ZERO,
        strides: strides(dims, of),
    };
    each(&mut cases, &mut choices, "gather", &[70, 20], |dims| {
        let (source, index) = (along(dims, &[1], DType::F32), along(dims, &[0], DType::I32));
        let body = Gather {
            source,
            index,
            axis_stride: dims[1],
            axis_len: Size::fixed(9),
        };
        storing(Body::Gather(body), dims, DType::F32)
    });
    each(
        &mut cases,
        &mut choices,
        "scatter",
        &[300, 20, 9],
        |lengths| {
            let &[from, width, to] = lengths else {
                unreachable!()
            };
            let space = [from, width];
            let (value, index) = (
                contiguous(DType::F32, &space),
                along(&space, &[0], DType::I32),
            );
            let body = Scatter {
                axis: 0,
                reduce: ReduceOp::Sum,
                space: space.into_iter().collect(),
                value,
                index,
            };
            storing(Body::Scatter(body), &[to, width], DType::F32)
        },
    );
    each(&mut cases, &mut choices, "check", &[300], |dims| {
        writing(
            Body::BoundsCheck(BoundsCheck {
                index: contiguous(DType::I32, dims),
                limit: Size::fixed(10),
            }),
            dims,
        )
    });
    let window = Window {
        k: [3, 3],
        stride: [2, 2],
        pad: [1, 1],
    };
    let whole = |n: Size, c: Size, side: i64| [n, c, Size::fixed(side), Size::fixed(side)];
    each(&mut cases, &mut choices, "pooling", &[2, 3], |lengths| {
        let (x, result) = (
            whole(lengths[0], lengths[1], 9),
            whole(lengths[0], lengths[1], 5),
        );
        let (hw, arg) = ([Size::fixed(9); 2], Some(contiguous(DType::U8, &result)));
        storing(
            Body::Pool2d(Pool2d {
                kind: PoolKind::Max,
                window,
                hw,
                x: contiguous(DType::F32, &x),
                arg,
            }),
            &result,
            DType::F32,
        )
    });
    each(
        &mut cases,
        &mut choices,
        "gradient of pooling",
        &[2, 3],
        |lengths| {
            let (x, result) = (
                whole(lengths[0], lengths[1], 9),
                whole(lengths[0], lengths[1], 5),
            );
            let kind = PoolKind::Avg { count_pad: true };
            let body = Pool2dGrad {
                kind,
                window,
                ohw: [Size::fixed(5); 2],
                dy: contiguous(DType::F32, &result),
                arg: None,
            };
            storing(Body::Pool2dGrad(body), &x, DType::F32)
        },
    );
    // Gathers and scatters without positions have no index that could be invalid; the others have
    // only valid ones.
    for case in &mut cases {
        for (arg, (operand, ..)) in case.spec.arguments().iter().enumerate() {
            if operand.dtype == DType::I32 {
                case.args[arg].fill(0);
            }
        }
    }
    check(&cases, 0.0);
}

#[test]
fn choosing() {
    let Some(_device) = TestDevice::find() else {
        return;
    };
    let (mut cases, mut choices) = (Vec::new(), Choices::new(64));
    for length in [40, 9000] {
        each(
            &mut cases,
            &mut choices,
            "positions",
            &[3, length, 50],
            |lengths| {
                let &[rows, columns, found] = lengths else {
                    unreachable!()
                };
                let space: Dims = [rows, columns].into_iter().collect();
                let (mask, positions) = (
                    contiguous(DType::Bool, &space),
                    contiguous(DType::I32, &[found]),
                );
                writing(
                    Body::Nonzero(Nonzero {
                        space,
                        mask,
                        positions,
                    }),
                    &[found],
                )
            },
        );
        each(&mut cases, &mut choices, "orders", &[3, length], |dims| {
            let (source, positions) = (contiguous(DType::F32, dims), contiguous(DType::I32, dims));
            writing(
                Body::Sort(Sort {
                    descending: false,
                    len: dims[1],
                    source,
                    positions,
                }),
                dims,
            )
        });
    }
    each(&mut cases, &mut choices, "suppression", &[1100], |dims| {
        let (boxes, keep) = (
            contiguous(DType::F32, &[dims[0], Size::fixed(4)]),
            contiguous(DType::Bool, dims),
        );
        writing(
            Body::NonMaxSuppression(NonMaxSuppression {
                threshold: 0.4,
                boxes,
                keep,
            }),
            dims,
        )
    });
    check(&cases, 0.0);
}
