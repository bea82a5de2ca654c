//! Simplification: the same values with every option on and off, and its effects.

mod support;

use slabwise::shape::{Dims, Env, Size};
use slabwise_compiler::graph::Graph;
use slabwise_compiler::ops::{GraphBuilder, NodeId, Op};
use slabwise_compiler::passes::autodiff::gradients;
use slabwise_compiler::passes::flatten_rows;
use slabwise_compiler::passes::simplify::{Simplify, simplify};
use slabwise_compiler::reference::{Array, Evaluated, Precision, evaluate, same, same_bits};
use slabwise_kernels::dtype::DType;
use slabwise_kernels::scalar::{ScalarOp, Value};
use slabwise_kernels::spec::{PoolKind, ReduceOp, Window};
use support::random_graph::{BATCH, RandomGraph};
use support::{KINDS, Rng, array, dims, graph, input, kind};

const NOTHING: Simplify = Simplify {
    cse: false,
    fold: false,
    algebra: false,
};

fn run(graph: &Graph, env: &Env, inputs: &[Array], variables: &[Array]) -> Evaluated {
    evaluate(graph, env, inputs, variables, Precision::Single)
        .unwrap_or_else(|fault| panic!("{fault}\n{graph}"))
}

fn agree(seed: u64, options: &Simplify, equal: fn(&Array, &Array) -> bool, batch: u32) {
    let random = RandomGraph::new(seed, 40);
    let env = random.env(batch);
    let (inputs, variables) = random.arguments(&env);
    let simple = simplify(&random.graph, options);
    assert_eq!(simple.verify(), Ok(()));
    let (before, after) = (
        run(&random.graph, &env, &inputs, &variables),
        run(&simple, &env, &inputs, &variables),
    );
    for (at, (a, b)) in before.outputs.iter().zip(&after.outputs).enumerate() {
        let name = random.graph.name(random.graph.outputs[at]);
        assert!(
            equal(a, b),
            "seed {seed}, {options:?}: output {at} ({name}) is\n{b}\ninstead of\n{a}\nbefore:\n{}after:\n{simple}",
            random.graph
        );
    }
    let put = |e: &Evaluated| e.assigned.clone();
    for (at, pair) in put(&before).iter().zip(put(&after)).enumerate() {
        let same = match pair {
            (Some(a), Some(b)) => equal(a, &b),
            (None, None) => true,
            _ => false,
        };
        assert!(same, "seed {seed}, {options:?}: variable {at}");
    }
}

#[test]
fn random_graphs_keep_their_values() {
    for seed in 0..120 {
        let batch = seed as u32 % (BATCH + 1);
        for (options, equal) in [
            (NOTHING, same_bits as fn(&Array, &Array) -> bool),
            (
                Simplify {
                    cse: true,
                    ..NOTHING
                },
                same_bits,
            ),
            (
                Simplify {
                    fold: true,
                    ..NOTHING
                },
                same_bits,
            ),
            (
                Simplify {
                    algebra: true,
                    ..NOTHING
                },
                same,
            ),
            (Simplify::default(), same),
        ] {
            agree(seed, &options, equal, batch);
        }
    }
}

/// Sums along all rows are in another order, but the reference adds in the order of the elements.
#[test]
fn random_graphs_over_flattened_rows_keep_their_values() {
    let mut changed = 0;
    for seed in 0..300 {
        let random = RandomGraph::new(seed, 40);
        let env = random.env(seed as u32 % (BATCH + 1));
        let (inputs, variables) = random.arguments(&env);
        let before = simplify(&random.graph, &Simplify::default());
        let Some(flat) = flatten_rows(&before) else {
            continue;
        };
        assert_eq!(flat.verify(), Ok(()), "seed {seed}:\n{before}");
        changed += 1;
        let after = simplify(&flat, &Simplify::default());
        for after in [&flat, &after] {
            let [a, b] = [&before, after].map(|graph| run(graph, &env, &inputs, &variables));
            let outputs = a.outputs.iter().map(Some).zip(b.outputs.iter().map(Some));
            let assigned = a.assigned.iter().map(Option::as_ref);
            let assigned = assigned.zip(b.assigned.iter().map(Option::as_ref));
            for (at, (a, b)) in outputs.chain(assigned).enumerate() {
                let equal = match (a, b) {
                    (Some(a), Some(b)) => same(a, b),
                    (a, b) => a.is_none() && b.is_none(),
                };
                assert!(equal, "seed {seed}: value {at}\n{before}{after}");
            }
        }
    }
    assert!(changed > 20, "{changed} graphs have work over rows");
}

#[test]
fn random_graphs_have_everything_in_them() {
    let (mut kinds, mut rows, mut types) = ([false; KINDS], Vec::new(), Vec::new());
    for seed in 0..120 {
        let graph = RandomGraph::new(seed, 40).graph;
        assert_eq!(graph.verify(), Ok(()), "seed {seed}:\n{graph}");
        let live = graph.live();
        for id in graph.ids().filter(|id| live[id.at()]) {
            let node = graph.node(id);
            kinds[kind(&node.op)] = true;
            types.push(node.dtype);
            if let Op::Scalar(op) = node.op {
                rows.push(op);
            }
        }
    }
    assert_eq!(kinds.iter().position(|seen| !seen), None);
    assert!(ScalarOp::ALL.iter().all(|op| rows.contains(op)));
    assert!(DType::ALL.iter().all(|t| types.contains(t)));
}

#[test]
fn random_graphs_hold_finite_varied_numbers() {
    let (mut finite, mut total, mut varied) = (0, 0, 0);
    for seed in 0..60 {
        let random = RandomGraph::new(seed, 40);
        let env = random.env(3);
        let (inputs, variables) = random.arguments(&env);
        for output in run(&random.graph, &env, &inputs, &variables)
            .outputs
            .iter()
            .filter(|o| o.dtype.is_float())
        {
            total += 1;
            finite += usize::from(output.values.iter().all(|v| v.abs() < 100.0));
            varied += usize::from(output.values.iter().any(|v| *v != output.values[0]));
        }
    }
    assert!(
        finite * 100 >= total * 98,
        "{finite} of {total} outputs are finite and small"
    );
    assert!(varied * 2 > total, "{varied} of {total} outputs vary");
}

#[test]
fn simplification_is_idempotent() {
    for seed in 0..30 {
        let once = simplify(&RandomGraph::new(seed, 40).graph, &Simplify::default());
        let twice = simplify(&once, &Simplify::default());
        assert_eq!(once.to_string(), twice.to_string(), "seed {seed}");
    }
}

/// The operations left of `build`'s result over inputs x and y of shape [2, 3], in order. The value
/// stays the same.
fn left(build: impl Fn(&mut Graph, NodeId, NodeId) -> NodeId) -> Vec<String> {
    let mut g = graph();
    let (x, y) = (
        input(&mut g, DType::F32, &dims(&[2, 3])),
        input(&mut g, DType::F32, &dims(&[2, 3])),
    );
    g.outputs = vec![build(&mut g, x, y)];
    let simple = simplify(&g, &Simplify::default());
    let special = |values: [f64; 6]| Array {
        dtype: DType::F32,
        dims: vec![2, 3],
        values: values.to_vec(),
    };
    let inputs = [
        special([1.5, -2.0, f64::NAN, 0.0, f64::INFINITY, -0.25]),
        special([-1.5, 3.0, 1.0, 0.0, 2.0, f64::NEG_INFINITY]),
    ];
    let value = |g: &Graph| run(g, &Env::default(), &inputs, &[]).outputs.remove(0);
    assert!(
        same(&value(&g), &value(&simple)),
        "{} became {}:\n{g}became\n{simple}",
        value(&g),
        value(&simple)
    );
    simple
        .nodes
        .iter()
        .map(|n| n.op.name().to_string())
        .collect()
}

fn slice(g: &mut Graph, x: NodeId, from: [usize; 2], to: [usize; 2]) -> NodeId {
    let op = Op::Slice {
        start: dims(&from),
        step: [1, 1].into_iter().collect(),
    };
    let dtype = g.dtype(x);
    g.emit(op, &[x], dtype, dims(&[to[0] - from[0], to[1] - from[1]]))
}

#[test]
fn zeros_that_change_the_sign_of_a_zero_stay() {
    for (op, zero) in [(ScalarOp::Add, 0.0), (ScalarOp::Sub, -0.0)] {
        let nodes = left(|g: &mut Graph, x, _| {
            let zero = g.full(zero, DType::F32, &dims(&[2, 3]));
            g.scalar(op, &[x, zero])
        });
        assert_eq!(
            nodes.last().map(String::as_str),
            Some(op.name()),
            "{} {zero}",
            op.name()
        );
    }
}

#[test]
fn every_rule_is_applied() {
    use ScalarOp as S;
    fn with(g: &mut Graph, op: ScalarOp, x: NodeId, number: f32) -> NodeId {
        let number = g.full(number, DType::F32, &dims(&[2, 3]));
        g.scalar(op, &[x, number])
    }
    let alone: &[(&str, Build)] = &[
        ("x + -0", |g, x, _| with(g, S::Add, x, -0.0)),
        ("x - 0", |g, x, _| with(g, S::Sub, x, 0.0)),
        ("x * 1", |g, x, _| with(g, S::Mul, x, 1.0)),
        ("x / 1", |g, x, _| with(g, S::Div, x, 1.0)),
        ("x ^ 1", |g, x, _| with(g, S::Pow, x, 1.0)),
        ("--x", |g, x, _| {
            let x = g.scalar(S::Neg, &[x]);
            g.scalar(S::Neg, &[x])
        }),
        ("max(x, x)", |g, x, _| g.scalar(S::Max, &[x, x])),
        ("select of equals", |g, x, y| {
            let c = g.scalar(S::Lt, &[x, y]);
            g.scalar(S::Select, &[c, x, x])
        }),
        ("select of a known", |g, x, y| {
            let c = g.full(1.0, DType::Bool, &dims(&[2, 3]));
            g.scalar(S::Select, &[c, x, y])
        }),
        ("reshape back", |g, x, _| {
            let flat = g.reshape(x, &dims(&[6]));
            g.reshape(flat, &dims(&[2, 3]))
        }),
        ("transpose back", |g, x, _| {
            let t = g.transpose(x);
            g.transpose(t)
        }),
        ("all of it", |g, x, _| slice(g, x, [0, 0], [2, 3])),
        ("part of a concat", |g, x, y| {
            let whole = g.emit(Op::Concat { axis: 0 }, &[y, x], DType::F32, dims(&[4, 3]));
            slice(g, whole, [2, 0], [4, 3])
        }),
        ("unpad", |g, x, _| {
            let (start, step) = (dims(&[1, 1]), [1, 2].into_iter().collect());
            let op = Op::Pad {
                start: start.clone(),
                step,
                value: Value::F32(0.0),
            };
            let padded = g.emit(op, &[x], DType::F32, dims(&[3, 6]));
            g.emit(
                Op::Slice {
                    start,
                    step: [1, 2].into_iter().collect(),
                },
                &[padded],
                DType::F32,
                dims(&[2, 3]),
            )
        }),
    ];
    for (name, build) in alone {
        assert_eq!(left(build), ["input"], "{name}");
    }
    let shorter: &[(&str, Build, &[&str])] = &[
        (
            "x + -y",
            |g, x, y| {
                let y = g.scalar(S::Neg, &[y]);
                g.add(x, y)
            },
            &["input", "input", "sub"],
        ),
        (
            "-x + y",
            |g, x, y| {
                let x = g.scalar(S::Neg, &[x]);
                g.add(x, y)
            },
            &["input", "input", "sub"],
        ),
        (
            "x - -y",
            |g, x, y| {
                let y = g.scalar(S::Neg, &[y]);
                g.scalar(S::Sub, &[x, y])
            },
            &["input", "input", "add"],
        ),
        (
            "select by not",
            |g, x, y| {
                let less = g.scalar(S::Lt, &[x, y]);
                let not = g.scalar(S::Not, &[less]);
                g.scalar(S::Select, &[not, x, y])
            },
            &["input", "input", "lt", "select"],
        ),
        (
            "not equal",
            |g, x, y| {
                let equal = g.scalar(S::Eq, &[x, y]);
                g.scalar(S::Not, &[equal])
            },
            &["input", "input", "not_equal"],
        ),
        (
            "the same condition again",
            |g, x, y| {
                let less = g.scalar(S::Lt, &[x, y]);
                let inner = g.scalar(S::Select, &[less, x, y]);
                let outer = g.scalar(S::Select, &[less, y, inner]);
                g.scalar(S::Relu, &[outer])
            },
            &["input", "relu"],
        ),
        (
            "differences do not commute",
            |g, x, y| {
                let (a, b) = (g.scalar(S::Sub, &[x, y]), g.scalar(S::Sub, &[y, x]));
                g.scalar(S::Max, &[a, b])
            },
            &["input", "input", "sub", "sub", "max"],
        ),
        (
            "signs of factors",
            |g, x, y| {
                let (a, b) = (g.scalar(S::Neg, &[x]), g.scalar(S::Neg, &[y]));
                g.mul(a, b)
            },
            &["input", "input", "mul"],
        ),
        (
            "x / 4",
            |g, x, _| with(g, S::Div, x, 4.0),
            &["input", "const", "reshape", "expand", "mul"],
        ),
        (
            "x / 3 stays",
            |g, x, _| with(g, S::Div, x, 3.0),
            &["input", "const", "reshape", "expand", "div"],
        ),
        (
            "x ^ 2",
            |g, x, _| with(g, S::Pow, x, 2.0),
            &["input", "mul"],
        ),
        (
            "equal sums",
            |g, x, y| {
                let (a, b) = (g.add(x, y), g.add(y, x));
                g.mul(a, b)
            },
            &["input", "input", "add", "mul"],
        ),
        (
            "slice of slice",
            |g, x, _| {
                let most = slice(g, x, [0, 1], [2, 3]);
                slice(g, most, [1, 0], [2, 2])
            },
            &["input", "slice"],
        ),
        (
            "max of max",
            |g, x, _| {
                let row = g.reduce(ReduceOp::Max, x, &[1]);
                g.reduce(ReduceOp::Max, row, &[0])
            },
            &["input", "max"],
        ),
        (
            "sum of sum keeps its order",
            |g, x, _| {
                let row = g.reduce(ReduceOp::Sum, x, &[1]);
                g.reduce(ReduceOp::Sum, row, &[0])
            },
            &["input", "sum", "sum"],
        ),
        (
            "known numbers",
            |g, _, _| {
                let two = g.full(2.0, DType::F32, &dims(&[2, 3]));
                let four = g.mul(two, two);
                g.scalar(S::Exp, &[four])
            },
            &["const", "reshape", "expand"],
        ),
        (
            "a condition of a truth value",
            |g, x, y| {
                let c = g.scalar(S::Lt, &[x, y]);
                let number = g.cast(c, DType::F32);
                g.cast(number, DType::Bool)
            },
            &["input", "input", "lt"],
        ),
        (
            "0 · x could be NaN",
            |g, x, _| with(g, S::Mul, x, 0.0),
            &["input", "const", "reshape", "expand", "mul"],
        ),
        (
            "halves through views",
            |g, x, _| {
                let halves = g.cast(x, DType::BF16);
                let wide = g.cast(halves, DType::F32);
                let turned = g.transpose(wide);
                let again = g.cast(turned, DType::BF16);
                let back = g.transpose(again);
                g.cast(back, DType::F32)
            },
            &["input", "cast", "cast"],
        ),
        (
            "copies stay",
            |g, x, _| {
                let (a, b) = (
                    g.emit(Op::Copy, &[x], DType::F32, dims(&[2, 3])),
                    g.emit(Op::Copy, &[x], DType::F32, dims(&[2, 3])),
                );
                g.add(a, b)
            },
            &["input", "copy", "copy", "add"],
        ),
    ];
    for (name, build, expected) in shorter.iter().chain(JOINED) {
        assert_eq!(left(build), *expected, "{name}");
    }
}

type Build = fn(&mut Graph, NodeId, NodeId) -> NodeId;

/// x as one row of an array of zeros.
fn placed(g: &mut Graph, x: NodeId, row: usize, rows: usize) -> NodeId {
    let op = Op::Pad {
        start: dims(&[row, 0]),
        step: [1, 1].into_iter().collect(),
        value: Value::F32(0.0),
    };
    g.emit(op, &[x], DType::F32, dims(&[rows, 3]))
}

/// Adjacent parts.
const JOINED: &[(&str, Build, &[&str])] = &[
    (
        "the gradients of a split's parts",
        |g, x, y| {
            let [a, b, c] = [(x, 2), (y, 4), (y, 0)].map(|(part, row)| placed(g, part, row, 6));
            let sum = g.add(a, b);
            g.add(sum, c)
        },
        &["input", "input", "concat"],
    ),
    (
        "parts that leave a gap",
        |g, x, y| {
            let [a, b] = [(x, 0), (y, 3)].map(|(part, row)| placed(g, part, row, 5));
            g.add(a, b)
        },
        &["input", "input", "pad", "pad", "add"],
    ),
    (
        "parts that overlap",
        |g, x, y| {
            let [a, b] = [(x, 0), (y, 1)].map(|(part, row)| placed(g, part, row, 3));
            g.add(a, b)
        },
        &["input", "input", "pad", "pad", "add"],
    ),
    (
        "heads of several parts",
        |g, x, y| {
            let [a, b] = [x, y].map(|part| g.reshape(part, &dims(&[6])));
            g.emit(Op::Concat { axis: 0 }, &[a, b], DType::F32, dims(&[12]))
        },
        &["input", "input", "concat", "reshape"],
    ),
];

/// relu, max_pool2d and their gradients over an image [n, 2, 6, 5]; the incoming gradient is the
/// second input.
fn relu_and_pool(window: Window, relu_seen: bool) -> Graph {
    let mut g = graph();
    let batch = Size::symbol(
        g.symbols
            .intern("batch", slabwise::shape::Extent::Bounded(3))
            .unwrap(),
    );
    let shape =
        |h: i64, w: i64| Dims::from_slice(&[batch, Size::fixed(2), Size::fixed(h), Size::fixed(w)]);
    let size =
        |i: usize, n: usize| ((n + 2 * window.pad[i] - window.k[i]) / window.stride[i] + 1) as i64;
    let x = input(&mut g, DType::F32, &shape(6, 5));
    let scale = input(&mut g, DType::F32, &shape(size(0, 6), size(1, 5)));
    let relu = g.scalar(ScalarOp::Relu, &[x]);
    let y = g.emit(
        Op::Pool2d(PoolKind::Max, window),
        &[relu],
        DType::F32,
        shape(size(0, 6), size(1, 5)),
    );
    let z = g.mul(y, scale);
    let found = gradients(&mut g, z, &[x, scale]);
    g.outputs = [Some(y)].into_iter().chain(found).flatten().collect();
    if relu_seen {
        g.outputs.push(relu);
    }
    g
}

#[test]
fn relu_moves_behind_the_pooling() {
    let windows = [
        Window {
            k: [2, 2],
            stride: [2, 2],
            pad: [0, 0],
        },
        Window {
            k: [3, 3],
            stride: [1, 1],
            pad: [0, 0],
        },
        Window {
            k: [3, 3],
            stride: [2, 2],
            pad: [1, 1],
        },
        Window {
            k: [3, 2],
            stride: [2, 1],
            pad: [0, 1],
        },
    ];
    let mut rng = Rng(5);
    for window in windows {
        let graph = relu_and_pool(window, false);
        let simple = simplify(&graph, &Simplify::default());
        // Only x and its gradient have the size of the image.
        let large: Vec<_> = simple
            .nodes
            .iter()
            .filter(|n| n.dims[..] == graph.nodes[0].dims[..])
            .map(|n| n.op.name())
            .collect();
        assert_eq!(large, ["input", "max_pool2d.grad"], "{window:?}\n{simple}");
        for _ in 0..20 {
            // Few different numbers: ties, zeros and windows without anything positive are common;
            // NaN is rare.
            let env = Env([3, 0, 0, 0, 0, 0, 0, 0]);
            let low = rng.below(4) as f64;
            let x = Array::from_fn(DType::F32, &[3, 2, 6, 5], |_| {
                if rng.one_in(50) {
                    f64::NAN
                } else {
                    rng.below(5) as f64 - low
                }
            });
            let scale: Vec<usize> = graph.inputs[1]
                .dims
                .iter()
                .map(|d| d.usize_at(&env))
                .collect();
            let scale = array(&mut rng, DType::F32, &scale, (-2.0, 2.0), 0);
            let (before, after) = (
                run(&graph, &env, &[x.clone(), scale.clone()], &[]),
                run(&simple, &env, &[x, scale], &[]),
            );
            for (a, b) in before.outputs.iter().zip(&after.outputs) {
                assert!(same(a, b), "{window:?}: {b}\ninstead of\n{a}");
            }
        }
    }
}

#[test]
fn relu_stays_where_it_is_seen() {
    let window = Window {
        k: [2, 2],
        stride: [2, 2],
        pad: [0, 0],
    };
    let simple = simplify(&relu_and_pool(window, true), &Simplify::default());
    let relu = simple
        .nodes
        .iter()
        .position(|n| n.op == Op::Scalar(ScalarOp::Relu))
        .unwrap();
    let pool = simple
        .nodes
        .iter()
        .find(|n| matches!(n.op, Op::Pool2d(PoolKind::Max, _)))
        .unwrap();
    assert_eq!(pool.inputs[0].at(), relu, "{simple}");
}

/// A concatenation that others read is one part of a longer one: its own parts would be copied again
/// for each step of a text.
#[test]
fn parts_of_a_concatenation_that_others_read_stay_one() {
    let mut g = graph();
    let mut all = input(&mut g, DType::F32, &dims(&[1, 4]));
    let mut sums = vec![];
    for step in 1..20 {
        let next = input(&mut g, DType::F32, &dims(&[1, 4]));
        let joined = dims(&[step + 1, 4]);
        all = g.emit(Op::Concat { axis: 0 }, &[all, next], DType::F32, joined);
        sums.push(g.reduce(ReduceOp::Sum, all, &[0, 1]));
    }
    g.outputs = sums;
    let simple = simplify(&g, &Simplify::default());
    let parts = |node: &slabwise_compiler::graph::Node| match node.op {
        Op::Concat { .. } => node.inputs.len(),
        _ => 0,
    };
    assert_eq!(simple.nodes.iter().map(parts).max(), Some(2), "{simple}");
}
