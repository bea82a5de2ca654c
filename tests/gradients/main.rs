//! Every operation's gradient, and the gradient of that gradient, against central differences in
//! double precision.

mod attention;
mod composites;
mod loops;
mod methods;
mod quantized;
mod ranks;
#[path = "../support/mod.rs"]
mod support;

use std::collections::BTreeSet;

use slabwise::shape::{Dims, Env, Size};
use slabwise_compiler::graph::Graph;
use slabwise_compiler::ops::{Axes, Checked, ConvGeometry, GraphBuilder, NodeId, Op};
use slabwise_compiler::passes::autodiff::gradients;
use slabwise_compiler::reference::{Array, Precision, evaluate};
use slabwise_kernels::custom::CustomKernel;
use slabwise_kernels::dtype::DType;
use slabwise_kernels::scalar::{Class, ScalarOp, Value};
use slabwise_kernels::spec::{PoolKind, PrefixOp, ReduceOp, Window};
use support::{KINDS, Rng, array, dims, graph, input, kind, select_by};

/// Half the distance between the two points of a difference.
const STEP: f64 = 3e-5;
/// Error allowed, of 1 + the value. The scalar table's irrational constants are f32: they alone are
/// off by up to 4e-8.
const TOLERANCE: f64 = 1e-6;

/// A function of the inputs and variables of a graph.
struct Function {
    name: String,
    graph: Graph,
    /// The arguments of the function.
    of: Vec<NodeId>,
    values: Vec<NodeId>,
}

impl Function {
    /// The function that `build` adds to an empty graph with inputs like the arguments.
    fn built(
        name: impl Into<String>,
        arguments: &[Array],
        build: impl Fn(&mut Graph, &[NodeId]) -> NodeId,
    ) -> Function {
        let mut graph = graph();
        let of: Vec<NodeId> = arguments
            .iter()
            .map(|a| input(&mut graph, a.dtype, &dims(&a.dims)))
            .collect();
        let value = build(&mut graph, &of);
        Function {
            name: name.into(),
            graph,
            of,
            values: vec![value],
        }
    }

    /// The gradient of a scalar function of all values; `None` if no value is a float.
    fn derivative(&self) -> Option<Function> {
        let mut graph = self.graph.clone();
        let loss = weighted(&mut graph, &self.values)?;
        let values = gradients(&mut graph, loss, &self.of)
            .into_iter()
            .flatten()
            .collect();
        Some(Function {
            name: format!("gradient of {}", self.name),
            graph,
            of: self.of.clone(),
            values,
        })
    }

    /// Evaluates a graph of the same inputs and variables.
    fn run(&self, graph: &Graph, arguments: &[Array]) -> Vec<Array> {
        let of_kind = |wanted: fn(&Op) -> Option<u32>| {
            let mut found: Vec<(u32, &Array)> = self
                .of
                .iter()
                .zip(arguments)
                .filter_map(|(id, a)| Some((wanted(&graph.node(*id).op)?, a)))
                .collect();
            found.sort_by_key(|(at, _)| *at);
            found
                .into_iter()
                .map(|(_, a)| a.clone())
                .collect::<Vec<Array>>()
        };
        let inputs = of_kind(|op| {
            if let Op::Input(i) = op {
                Some(*i)
            } else {
                None
            }
        });
        let variables = of_kind(|op| {
            if let Op::Variable(v) = op {
                Some(*v)
            } else {
                None
            }
        });
        let run = evaluate(
            graph,
            &Env::default(),
            &inputs,
            &variables,
            Precision::Double,
        );
        run.unwrap_or_else(|fault| panic!("{}: {fault}", self.name))
            .outputs
    }

    /// Checks the gradient, and the gradient of the gradient; returns the kinds of operations that
    /// were differentiated.
    fn check_twice(&self, arguments: &[Array]) -> BTreeSet<usize> {
        let mut kinds = self.check(arguments);
        kinds.extend(
            self.derivative()
                .iter()
                .flat_map(|second| second.check(arguments)),
        );
        kinds
    }

    /// Checks the gradient; returns the kinds of operations that were differentiated.
    fn check(&self, arguments: &[Array]) -> BTreeSet<usize> {
        let name = &self.name;
        let mut forward = self.graph.clone();
        let Some(loss) = weighted(&mut forward, &self.values) else {
            return BTreeSet::new();
        };
        forward.outputs = vec![loss];
        let mut backward = forward.clone();
        let found = gradients(&mut backward, loss, &self.of);
        assert_eq!(
            backward.current_origin, forward.current_origin,
            "{name}: the origin is put back"
        );
        assert_eq!(backward.verify(), Ok(()), "{name}");
        backward.outputs = found.iter().flatten().copied().collect();
        let mut slopes = self.run(&backward, arguments).into_iter();
        for (k, (argument, found)) in arguments.iter().zip(&found).enumerate() {
            let slope = found.map(|_| slopes.next().expect("one output per gradient"));
            if !argument.dtype.is_float() {
                assert!(slope.is_none(), "{name}: a gradient of integers");
                continue;
            }
            for at in 0..argument.values.len() {
                let loss_at = |shift: f64| {
                    let mut moved = arguments.to_vec();
                    moved[k].values[at] += shift;
                    self.run(&forward, &moved)[0].values[0]
                };
                let numeric = (loss_at(STEP) - loss_at(-STEP)) / (2.0 * STEP);
                let exact = slope.as_ref().map_or(0.0, |s| s.values[at]);
                let error = (numeric - exact).abs();
                assert!(
                    error <= TOLERANCE * (1.0 + numeric.abs()),
                    "{name}: argument {k}[{at}] has slope {numeric}, gradient {exact}"
                );
            }
        }
        let live = forward.live();
        forward
            .ids()
            .filter(|id| live[id.at()])
            .map(|id| kind(&forward.node(id).op))
            .collect()
    }
}

/// A function with its arguments.
struct Case {
    function: Function,
    arguments: Vec<Array>,
}

impl Case {
    fn new(
        name: impl Into<String>,
        arguments: Vec<Array>,
        build: impl Fn(&mut Graph, &[NodeId]) -> NodeId,
    ) -> Case {
        Case {
            function: Function::built(name, &arguments, build),
            arguments,
        }
    }

    fn check(self) -> BTreeSet<usize> {
        self.function.check_twice(&self.arguments)
    }
}

/// A scalar from all elements of all float values, each with a weight of its own, so that errors do
/// not cancel.
fn weighted(g: &mut Graph, values: &[NodeId]) -> Option<NodeId> {
    let mut sum = None;
    for (n, &value) in values.iter().enumerate() {
        if !g.dtype(value).is_float() {
            continue;
        }
        let shape = g.dims(value).clone();
        let strides = (0..shape.len())
            .map(|i| Size::fixed(5 * i as i64 + 1))
            .collect();
        let index = g.emit(Op::Index(strides), &[], DType::I32, shape.clone());
        let index = g.cast(index, DType::F32);
        let (slope, shift) = (
            g.full(0.7, DType::F32, &shape),
            g.full(0.3 + n as f32, DType::F32, &shape),
        );
        let angle = g.mul(index, slope);
        let angle = g.add(angle, shift);
        let weight = g.scalar(ScalarOp::Sin, &[angle]);
        let product = g.mul(value, weight);
        let axes: Vec<usize> = (0..shape.len()).collect();
        let part = g.reduce(ReduceOp::Sum, product, &axes);
        let part = g.reshape(part, &Dims::new());
        sum = Some(sum.map_or(part, |sum| g.add(sum, part)));
    }
    sum
}

fn floats(rng: &mut Rng, lengths: &[usize]) -> Array {
    array(rng, DType::F32, lengths, (-2.0, 2.0), 0)
}

/// The range of an operation's float arguments, where it is defined and not too steep for
/// differences.
fn domain(op: ScalarOp, argument: usize) -> (f64, f64) {
    match (op, argument) {
        (
            ScalarOp::Ln
            | ScalarOp::Log2
            | ScalarOp::Log10
            | ScalarOp::Sqrt
            | ScalarOp::Rsqrt
            | ScalarOp::Recip,
            _,
        )
        | (ScalarOp::Pow, 0)
        | (ScalarOp::Div, 1) => (0.4, 3.0),
        (ScalarOp::Log1p, _) => (-0.6, 3.0),
        (ScalarOp::Tan, _) => (-1.2, 1.2),
        (ScalarOp::Lgamma, _) | (ScalarOp::Polygamma, 1) => (0.8, 3.0),
        // Orders that are rounded to 1.
        (ScalarOp::Polygamma, 0) => (0.8, 1.2),
        // The points are away from the origin.
        (ScalarOp::Atan2, 1) => (0.4, 2.0),
        // No quotient is near an integer.
        (ScalarOp::Fmod, 0) => (1.3, 1.7),
        (ScalarOp::Fmod, 1) => (0.95, 1.05),
        // The lower bound is below the upper one.
        (ScalarOp::Clamp, 1) => (-2.0, -0.5),
        (ScalarOp::Clamp, 2) => (0.5, 2.0),
        _ => (-2.0, 2.0),
    }
}

#[test]
fn every_row_of_the_scalar_table() {
    let mut rng = Rng(1);
    // These two define their own derivative, independently of their value.
    for &op in ScalarOp::ALL
        .iter()
        .filter(|op| !matches!(op, ScalarOp::Detach | ScalarOp::Near | ScalarOp::WithSlope))
    {
        let lane = |i: usize| match op.class() {
            Class::Float | Class::Num | Class::Compare => DType::F32,
            Class::Int => DType::I32,
            Class::Logic => DType::Bool,
            Class::Select => {
                if i == 0 {
                    DType::Bool
                } else {
                    DType::F32
                }
            }
        };
        let arguments: Vec<Array> = (0..op.arity())
            .map(|i| array(&mut rng, lane(i), &[12], domain(op, i), 9))
            .collect();
        let kinds = Case::new(op.name(), arguments, move |g, x| {
            let y = g.scalar(op, x);
            g.cast(y, DType::F32)
        })
        .check();
        assert!(kinds.contains(&kind(&Op::Scalar(op))), "{}", op.name());
    }
}

#[test]
fn integer_arguments_have_no_gradient() {
    let mut rng = Rng(2);
    let whole = array(&mut rng, DType::I32, &[4], (0.0, 0.0), 9);
    Case::new(
        "through integers",
        vec![whole, floats(&mut rng, &[4])],
        |g, x| {
            let down = g.cast(x[1], DType::I32);
            let sum = g.add(down, x[0]);
            let up = g.cast(sum, DType::F32);
            g.mul(up, up)
        },
    )
    .check();
}

fn reductions(rng: &mut Rng, cases: &mut Vec<Case>) {
    for axes in [&[0][..], &[1], &[2], &[0, 2], &[0, 1, 2]] {
        let axes = axes.to_vec();
        for op in [ReduceOp::Sum, ReduceOp::Prod, ReduceOp::Max, ReduceOp::Min] {
            let axes = axes.clone();
            let x = floats(rng, &[2, 3, 2]);
            cases.push(Case::new(
                format!("{op:?} along {axes:?}"),
                vec![x],
                move |g, x| g.reduce(op, x[0], &axes),
            ));
        }
        for op in [
            ReduceOp::Any,
            ReduceOp::All,
            ReduceOp::ArgMax,
            ReduceOp::ArgMin,
        ] {
            let (axes, x) = (axes.clone(), floats(rng, &[2, 3, 2]));
            cases.push(Case::new(
                format!("{op:?} along {axes:?}"),
                vec![x],
                move |g, x| {
                    let logic = matches!(op, ReduceOp::Any | ReduceOp::All);
                    let x = if logic {
                        g.cast(x[0], DType::Bool)
                    } else {
                        x[0]
                    };
                    let y = g.reduce(op, x, &axes);
                    g.cast(y, DType::F32)
                },
            ));
        }
    }
}

fn convolutions(rng: &mut Rng, cases: &mut Vec<Case>) {
    for bits in 0..16 {
        let either = |bit: usize, a: usize, b: usize| if bits >> bit & 1 == 0 { a } else { b };
        let geometry = ConvGeometry {
            stride: [either(0, 1, 2), either(0, 1, 3)],
            pad: [either(1, 0, 1), either(1, 0, 2)],
            dilation: [either(2, 1, 2), either(2, 1, 3)],
            groups: either(3, 1, 2),
        };
        let arguments = vec![
            floats(rng, &[2, 2, 5, 5]),
            floats(rng, &[2, 2 / geometry.groups, 2, 2]),
        ];
        cases.push(Case::new(
            format!("{geometry:?}"),
            arguments,
            move |g, x| {
                let size = |i: usize, n: usize, k: usize| {
                    (n + 2 * geometry.pad[i] - geometry.dilation[i] * (k - 1) - 1)
                        / geometry.stride[i]
                        + 1
                };
                // With groups, more zeros after the last row than before the first.
                let rows = size(0, 5, 2) + geometry.groups - 1;
                let shape = dims(&[2, 2, rows, size(1, 5, 2)]);
                g.emit(Op::Conv2d(geometry), x, DType::F32, shape)
            },
        ));
    }
}

fn poolings(rng: &mut Rng, cases: &mut Vec<Case>) {
    let windows = [
        Window {
            k: [2, 2],
            stride: [2, 2],
            pad: [0, 0],
        },
        Window {
            k: [3, 2],
            stride: [2, 1],
            pad: [1, 0],
        },
        Window {
            k: [3, 3],
            stride: [1, 2],
            pad: [1, 1],
        },
    ];
    // Last windows that reach past the padding.
    let more = [[1, 0], [0, 1], [1, 1]];
    let plain = windows.iter().map(|window| (*window, [0, 0]));
    for (window, more) in plain.chain(windows.into_iter().zip(more)) {
        for kind in [
            PoolKind::Max,
            PoolKind::ArgMax,
            PoolKind::Avg { count_pad: true },
            PoolKind::Avg { count_pad: false },
        ] {
            cases.push(Case::new(
                format!("{kind:?} {window:?} and {more:?}"),
                vec![floats(rng, &[1, 2, 5, 4])],
                move |g, x| {
                    let size = |i: usize, n: usize| {
                        (n + 2 * window.pad[i] - window.k[i]) / window.stride[i] + 1 + more[i]
                    };
                    let dtype = if kind == PoolKind::ArgMax {
                        DType::U8
                    } else {
                        DType::F32
                    };
                    let y = g.emit(
                        Op::Pool2d(kind, window),
                        x,
                        dtype,
                        dims(&[1, 2, size(0, 5), size(1, 4)]),
                    );
                    g.cast(y, DType::F32)
                },
            ));
        }
    }
}

fn indexed(rng: &mut Rng, cases: &mut Vec<Case>) {
    for (axis, lengths) in [(0, [5, 3]), (1, [3, 5])] {
        for dtype in [DType::I32, DType::U8] {
            // Five choices among three: some are chosen twice.
            let index = array(rng, dtype, &lengths, (0.0, 0.0), 3);
            let arguments = vec![floats(rng, &[3, 3]), index.clone()];
            cases.push(Case::new(
                format!("gather along {axis}"),
                arguments,
                move |g, x| g.emit(Op::Gather { axis }, x, DType::F32, dims(&lengths)),
            ));
            for reduce in [ReduceOp::Sum, ReduceOp::Prod, ReduceOp::Max, ReduceOp::Min] {
                let arguments = vec![floats(rng, &lengths), index.clone()];
                cases.push(Case::new(
                    format!("scatter by {reduce:?} along {axis}"),
                    arguments,
                    move |g, x| {
                        let op = Op::Scatter { axis, reduce };
                        let places = g.emit(op, x, DType::F32, dims(&[3, 3]));
                        // A place without values has no finite maximum.
                        let [low, high] =
                            [-9.0, 9.0].map(|n| g.full(n, DType::F32, &dims(&[3, 3])));
                        let above = g.scalar(ScalarOp::Max, &[places, low]);
                        let within = g.scalar(ScalarOp::Min, &[above, high]);
                        g.mul(within, within)
                    },
                ));
            }
        }
    }
}

/// Parts of tensors that are replaced.
fn assigned(rng: &mut Rng, cases: &mut Vec<Case>) {
    let place = |values: &[f64]| Array {
        dtype: DType::I32,
        dims: vec![values.len(), 1],
        values: values.to_vec(),
    };
    for (name, place) in [
        ("fixed", None),
        ("moved", Some(place(&[1.0]))),
        ("moved each", Some(place(&[0.0, 2.0]))),
    ] {
        let mut arguments = vec![floats(rng, &[2, 6]), floats(rng, &[2, 2])];
        let axis = place.as_ref().map(|_| 1);
        arguments.extend(place);
        cases.push(Case::new(
            format!("a part, {name}, is replaced"),
            arguments,
            move |g, x| {
                let op = Op::SliceAssign {
                    start: dims(&[0, 1]),
                    step: [1, 2].into_iter().collect(),
                    axis,
                };
                let y = g.emit(op, x, DType::F32, dims(&[2, 6]));
                g.mul(y, y)
            },
        ));
    }
}

fn prefix_reductions(rng: &mut Rng, cases: &mut Vec<Case>) {
    let ops = [
        PrefixOp::Sum,
        PrefixOp::Linear,
        PrefixOp::LogSumExp,
        PrefixOp::ArgMax,
        PrefixOp::ArgMin,
    ];
    for op in ops {
        for (exclusive, reverse) in [(false, false), (false, true), (true, false), (true, true)] {
            let finds = matches!(op, PrefixOp::ArgMax | PrefixOp::ArgMin);
            if finds && exclusive {
                continue;
            }
            let mut arguments = vec![floats(rng, &[2, 4])];
            if op == PrefixOp::Linear {
                arguments.push(floats(rng, &[2, 4]));
                // A factor of 0 changes nothing about its gradient.
                arguments[1].values[2] = 0.0;
            }
            cases.push(Case::new(
                format!("a prefix reduction by {op:?}, exclusive {exclusive}, reverse {reverse}"),
                arguments,
                move |g, x| {
                    let reduction = Op::PrefixReduce {
                        op,
                        exclusive,
                        reverse,
                    };
                    let dtype = if finds { DType::I32 } else { DType::F32 };
                    let y = g.emit(reduction, x, dtype, dims(&[2, 4]));
                    if finds {
                        let chosen = Op::Gather { axis: 1 };
                        let chosen = g.emit(chosen, &[x[0], y], DType::F32, dims(&[2, 4]));
                        return g.mul(chosen, chosen);
                    }
                    if op == PrefixOp::LogSumExp {
                        // Of no elements it is −∞.
                        return g.scalar(ScalarOp::Exp, &[y]);
                    }
                    g.mul(y, y)
                },
            ));
        }
    }
}

/// Selection by values: positions have no gradient, the elements at them have.
fn chosen(rng: &mut Rng, cases: &mut Vec<Case>) {
    cases.push(Case::new(
        "a selection",
        vec![floats(rng, &[3, 4])],
        |g, x| {
            let place = g.emit(Op::Index(dims(&[1, 2])), &[], DType::I32, dims(&[3, 4]));
            let bound = g.full(3.0, DType::I32, &dims(&[3, 4]));
            let mask = g.scalar(ScalarOp::Ge, &[place, bound]);
            let chosen = select_by(g, x[0], mask).expect("a symbol is left");
            let square = g.mul(chosen, chosen);
            g.reduce(ReduceOp::Sum, square, &[0])
        },
    ));
    cases.push(Case::new("sorted", vec![floats(rng, &[2, 5])], |g, x| {
        let order = g.emit(Op::Sort { descending: true }, x, DType::I32, dims(&[2, 5]));
        let sorted = g.emit(
            Op::Gather { axis: 1 },
            &[x[0], order],
            DType::F32,
            dims(&[2, 5]),
        );
        let rank = g.emit(Op::Index(dims(&[5, 1])), &[], DType::I32, dims(&[2, 5]));
        let rank = g.cast(rank, DType::F32);
        let weighted = g.mul(sorted, rank);
        g.mul(weighted, sorted)
    }));
    cases.push(Case::new(
        "boxes that stay",
        vec![floats(rng, &[4, 4])],
        |g, x| {
            let keep = g.emit(
                Op::NonMaxSuppression { threshold: 0.3 },
                x,
                DType::Bool,
                dims(&[4]),
            );
            let keep = g.cast(keep, DType::F32);
            let column = g.reshape(keep, &dims(&[4, 1]));
            let keep = g.broadcast(column, &dims(&[4, 4]));
            let kept = g.mul(x[0], keep);
            g.mul(kept, x[0])
        },
    ));
}

/// Operations that move or repeat values; squared, so that the gradient has a gradient.
fn views(rng: &mut Rng, cases: &mut Vec<Case>) {
    let mut case = |name: &str, count: usize, view: fn(&mut Graph, &[NodeId]) -> NodeId| {
        let arguments = (0..count).map(|_| floats(rng, &[2, 3, 4])).collect();
        cases.push(Case::new(name, arguments, move |g, x| {
            let y = view(g, x);
            g.mul(y, y)
        }));
    };
    case("reshape", 1, |g, x| g.reshape(x[0], &dims(&[4, 6])));
    case("permute", 1, |g, x| g.permute(x[0], &[2, 0, 1]));
    case("expand", 1, |g, x| {
        let row = g.reduce(ReduceOp::Sum, x[0], &[1]);
        g.broadcast(row, &dims(&[3, 2, 5, 4]))
    });
    case("slice", 1, |g, x| {
        let op = Op::Slice {
            start: dims(&[0, 1, 1]),
            step: [1, 1, 2].into_iter().collect(),
        };
        g.emit(op, x, DType::F32, dims(&[2, 2, 2]))
    });
    case("pad", 1, |g, x| {
        let op = Op::Pad {
            start: dims(&[1, 0, 2]),
            step: [1, 2, 1].into_iter().collect(),
            value: Value::F32(3.0),
        };
        g.emit(op, x, DType::F32, dims(&[4, 6, 7]))
    });
    case("concat", 3, |g, x| {
        g.emit(Op::Concat { axis: 1 }, x, DType::F32, dims(&[2, 9, 4]))
    });
    case("copy", 1, |g, x| {
        g.emit(Op::Copy, x, DType::F32, dims(&[2, 3, 4]))
    });
    case("cast", 1, |g, x| {
        g.emit(Op::Cast(DType::F32), x, DType::F32, dims(&[2, 3, 4]))
    });
    case("one value twice", 1, |g, x| {
        let y = g.add(x[0], x[0]);
        g.mul(y, x[0])
    });
}

fn products(rng: &mut Rng, cases: &mut Vec<Case>) {
    for batch in [&[][..], &[2], &[2, 2]] {
        let with = |tail: [usize; 2]| [batch, &tail].concat();
        let arguments = vec![floats(rng, &with([2, 3])), floats(rng, &with([3, 4]))];
        cases.push(Case::new(
            format!("matmul in batches of {batch:?}"),
            arguments,
            |g, x| g.matmul(x[0], x[1]),
        ));
    }
}

#[test]
fn every_structural_operation() {
    let (mut rng, mut cases) = (Rng(3), Vec::new());
    reductions(&mut rng, &mut cases);
    convolutions(&mut rng, &mut cases);
    poolings(&mut rng, &mut cases);
    indexed(&mut rng, &mut cases);
    assigned(&mut rng, &mut cases);
    prefix_reductions(&mut rng, &mut cases);
    loops::scans(&mut rng, &mut cases);
    chosen(&mut rng, &mut cases);
    views(&mut rng, &mut cases);
    products(&mut rng, &mut cases);
    quantized::quantized(&mut rng, &mut cases);
    attention::attended(&mut rng, &mut cases);
    let seen: BTreeSet<usize> = cases.into_iter().flat_map(Case::check).collect();
    // Neither has float operands that its value depends on, or a value that is read; the last one
    // has no gradient.
    let exempt = [
        Op::Variable(0),
        Op::Size(Size::ONE),
        Op::Uniform { stream: 0 },
        Op::BoundsCheck {
            limit: Size::ONE,
            of: Checked::Index,
        },
        Op::Assign(0),
        Op::Custom(CustomKernel::new("none", [], DType::F32, |_| {})),
    ]
    .map(|op| kind(&op));
    let missing: Vec<usize> = (0..KINDS)
        .filter(|k| !seen.contains(k) && !exempt.contains(k))
        .collect();
    assert!(
        missing.is_empty(),
        "no case differentiates the operations numbered {missing:?} in support::kind"
    );
}

#[test]
fn products_with_zeros() {
    let x = |values: &[f64]| Array {
        dtype: DType::F32,
        dims: vec![4],
        values: values.to_vec(),
    };
    for values in [[2.0, 0.0, -3.0, 0.5], [0.0, 0.0, 4.0, 1.0], [0.0; 4]] {
        let arguments = [x(&values)];
        Function::built("product", &arguments, |g, x| {
            g.reduce(ReduceOp::Prod, x[0], &[0])
        })
        .check(&arguments);
    }
}

#[test]
fn detached_values_are_constants() {
    let mut g = graph();
    let x = input(&mut g, DType::F32, &dims(&[2]));
    let held = g.scalar(ScalarOp::Detach, &[x]);
    let y = g.mul(held, x);
    g.outputs = gradients(&mut g, y, &[x]).into_iter().flatten().collect();
    let values = Array {
        dtype: DType::F32,
        dims: vec![2],
        values: vec![3.0, -0.5],
    };
    let run = evaluate(
        &g,
        &Env::default(),
        std::slice::from_ref(&values),
        &[],
        Precision::Single,
    )
    .unwrap();
    assert_eq!(run.outputs[0].values, values.values);
}

#[test]
fn equal_maxima_share_the_gradient() {
    let mut g = graph();
    let x = input(&mut g, DType::F32, &dims(&[4]));
    let y = g.reduce(ReduceOp::Max, x, &[0]);
    g.outputs = gradients(&mut g, y, &[x]).into_iter().flatten().collect();
    let values = Array {
        dtype: DType::F32,
        dims: vec![4],
        values: vec![1.0, 5.0, 5.0, -2.0],
    };
    let run = evaluate(&g, &Env::default(), &[values], &[], Precision::Single).unwrap();
    assert_eq!(run.outputs[0].values, [0.0, 0.5, 0.5, 0.0]);
}

#[test]
fn nodes_of_one_variable_count_as_one() {
    let mut g = graph();
    let init = slabwise::params::Init::Constant(0.0);
    let first = support::variable(&mut g, DType::F32, &Dims::new(), init);
    let again = g.emit(Op::Variable(0), &[], DType::F32, Dims::new());
    let unused = support::variable(&mut g, DType::F32, &Dims::new(), init);
    let product = g.mul(first, again);
    let found = gradients(&mut g, product, &[first, again, unused]);
    assert_eq!((found[0], found[2]), (found[1], None));
    g.outputs = vec![found[0].unwrap()];
    let three = Array {
        dtype: DType::F32,
        dims: vec![],
        values: vec![3.0],
    };
    let run = evaluate(
        &g,
        &Env::default(),
        &[],
        &[three.clone(), three],
        Precision::Single,
    )
    .unwrap();
    assert_eq!(run.outputs[0].values, [6.0]);
}

#[test]
fn only_nodes_between_loss_and_inputs_are_differentiated() {
    let mut g = graph();
    let (x, y) = (
        input(&mut g, DType::F32, &dims(&[2])),
        input(&mut g, DType::F32, &dims(&[2])),
    );
    let far = g.scalar(ScalarOp::Exp, &[y]);
    let loss = g.mul(x, far);
    g.scalar(ScalarOp::Tanh, &[loss]);
    let before = g.nodes.len();
    let found = gradients(&mut g, loss, &[x, NodeId(9999)]);
    assert_eq!(found[1], None);
    // Ones (three nodes) and their product with exp(y); nothing for exp or tanh.
    assert_eq!(g.nodes.len(), before + 4, "{g}");
    let phase = |id: usize| g.origins[g.nodes[id].origin as usize].phase;
    assert!(
        (before..g.nodes.len()).all(|id| phase(id) == slabwise_compiler::graph::Phase::Backward)
    );
    assert_eq!(gradients(&mut g, NodeId(9999), &[x]), [None]);
    let axes: Axes = Axes::from_slice(&[0]);
    let position = g.emit(
        Op::Reduce(ReduceOp::ArgMax, axes),
        &[x],
        DType::I32,
        dims(&[1]),
    );
    assert_eq!(gradients(&mut g, position, &[x]), [None]);
}
