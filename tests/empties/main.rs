//! Tensors without elements: every operation with a length of 0 on each axis equals the reference
//! evaluator, or is an error that names the axis; gradients likewise.

#[path = "../support/evaluator.rs"]
mod evaluator;
mod models;
#[path = "../support/mod.rs"]
mod support;

use evaluator::any_results;
use slabwise::prelude::*;
use slabwise::{CompileOptions, Error};
use slabwise_compiler::graph::Graph;
use slabwise_compiler::ops::ConvGeometry;
use slabwise_compiler::reference::{Array, Precision, evaluate};
use slabwise_kernels::dtype::DType;
use support::arrays::close;
use support::{Rng, array};

type Build = for<'t> fn(&'t Trace, &[Tensor<'t>]) -> Vec<Tensor<'t>>;

/// An operation over inputs such as `"a2 b3, i:b3"`: a letter for each axis, of one length wherever
/// it stands, and a type if it is not f32. `refused` are the letters whose length must not be 0;
/// behind a `!`, pairs of which both may be 0 nevertheless.
struct Case {
    name: &'static str,
    inputs: &'static str,
    refused: &'static str,
    build: Build,
}

const fn case(
    name: &'static str,
    inputs: &'static str,
    refused: &'static str,
    build: Build,
) -> Case {
    Case {
        name,
        inputs,
        refused,
        build,
    }
}

/// The type and the axes of each input, as letters and lengths.
fn parse(inputs: &str) -> Vec<(DType, Vec<(char, usize)>)> {
    let axis = |word: &str| {
        (
            word.chars().next().expect("a letter"),
            word[1..].parse().expect("a length"),
        )
    };
    let one = |text: &str| match text.trim().split_once(':') {
        Some(("i", axes)) => (I32, axes.split_whitespace().map(axis).collect()),
        Some(("b", axes)) => (Bool, axes.split_whitespace().map(axis).collect()),
        _ => (F32, text.split_whitespace().map(axis).collect()),
    };
    inputs.split(',').map(one).collect()
}

/// The kind of length of an axis without elements.
#[derive(Clone, Copy, Debug, PartialEq)]
enum How {
    Fixed,
    Bounded,
    /// By 0.
    Never,
    Free,
}

/// Outputs and, of each float input, the gradient of their sum.
fn graph(case: &Case, empty: &str, how: How) -> Result<Graph, String> {
    const NAMES: [&str; 4] = ["first", "second", "third", "fourth"];
    let trace = Trace::inference();
    let dim = |&(letter, length): &(char, usize)| match how {
        _ if !empty.contains(letter) => Dim::from(length),
        How::Fixed => Dim::from(0),
        How::Bounded => Dim::bounded("empty", 3),
        How::Never => Dim::bounded("empty", 0),
        How::Free => Dim::unbounded("empty"),
    };
    let parsed = parse(case.inputs);
    let inputs: Vec<Tensor<'_>> = parsed
        .iter()
        .zip(NAMES)
        .map(|((dtype, axes), name)| {
            trace.input(
                name,
                *dtype,
                axes.iter().map(dim).collect::<Vec<Dim>>().as_slice(),
            )
        })
        .collect();
    let mut outputs = (case.build)(&trace, &inputs);
    let floats: Vec<Tensor<'_>> = outputs
        .iter()
        .copied()
        .filter(|o| o.dtype() == F32)
        .collect();
    if let Some(sum) = floats.iter().map(|o| o.sum()).reduce(|a, b| a + b) {
        let wrt = inputs.iter().filter(|x| x.dtype() == F32);
        outputs.extend(wrt.map(|&x| trace.gradients(sum, [x])[0]));
    }
    trace.finish(&outputs).map_err(|mistakes| {
        mistakes
            .iter()
            .map(|m| m.to_string())
            .collect::<Vec<_>>()
            .join("\n")
    })
}

fn session() -> Session {
    Session::new(Device::Cpu, Params::seeded(0))
        .expect("a session")
        .with_threads(2)
}

fn checked() -> Session {
    session().with_options(CompileOptions {
        check_memory: true,
        ..CompileOptions::default()
    })
}

/// Runs a case with these letters empty. The error describes the difference.
fn look(case: &Case, empty: &str, how: How) -> Result<(), String> {
    let (letters, fine) = case.refused.split_once('!').unwrap_or((case.refused, ""));
    let refused = empty.chars().any(|letter| letters.contains(letter))
        && !fine.split(' ').any(|pair| pair == empty);
    let graph = match graph(case, empty, how) {
        Ok(graph) => graph,
        // Operations that need a fixed length refuse another.
        Err(_) if how != How::Fixed => return Ok(()),
        Err(text) if refused && text.contains(file!()) => return Ok(()),
        Err(text) => return Err(format!("refused: {text}")),
    };
    graph.verify().map_err(|e| e.to_string())?;
    let mut env = graph.symbols.bounds();
    env.0.iter_mut().for_each(|n| *n = 0);
    let mut rng = Rng(7);
    let mut drawn =
        |dtype: DType, lengths: &[usize]| array(&mut rng, dtype, lengths, (-2.0, 2.0), 2);
    let inputs: Vec<Array> = graph
        .inputs
        .iter()
        .map(|i| {
            drawn(
                i.dtype,
                &i.dims.iter().map(|d| d.usize_at(&env)).collect::<Vec<_>>(),
            )
        })
        .collect();
    let variables: Vec<Array> = graph
        .variables
        .iter()
        .map(|v| {
            drawn(
                v.dtype,
                &v.dims.iter().map(|d| d.usize_at(&env)).collect::<Vec<_>>(),
            )
        })
        .collect();
    let want = evaluate(&graph, &env, &inputs, &variables, Precision::Single);
    let sessions: [(&str, &dyn Fn() -> Session); 2] =
        [("plain", &session), ("memory checks", &checked)];
    for (what, open) in sessions {
        let got = any_results(&graph, open, &inputs, &variables);
        match (&want, got) {
            (Err(_), Err(Error::Data { .. })) if refused => {}
            (Ok(want), Ok(got)) if !refused => {
                for got in got {
                    for (at, (a, b)) in got.iter().zip(&want.outputs).enumerate() {
                        let same = a.len() == b.values.len()
                            && a.iter().zip(&b.values).all(|(&p, &q)| close(p, q));
                        if !same {
                            return Err(format!("{what}: output {at} is {a:?} instead of {b}"));
                        }
                    }
                }
            }
            (want, got) => {
                let want = want
                    .as_ref()
                    .map(|w| w.outputs.len())
                    .map_err(|e| e.to_string());
                return Err(format!(
                    "{what}: {} where the evaluator has {want:?}",
                    got.map_or_else(|e| e.to_string(), |_| "values".into())
                ));
            }
        }
    }
    Ok(())
}

/// Every operation, with each letter and each pair of letters empty, in all ways. Reports all
/// faults at once.
fn all(cases: &[Case]) {
    let mut wrong = Vec::new();
    for case in cases {
        let mut letters: Vec<char> = parse(case.inputs)
            .iter()
            .flat_map(|(_, axes)| axes.iter().map(|(letter, _)| *letter))
            .collect();
        letters.sort_unstable();
        letters.dedup();
        let pairs = letters.iter().enumerate().flat_map(|(i, a)| {
            letters[i..]
                .iter()
                .map(move |b| [*a, *b].iter().collect::<String>())
        });
        for empty in pairs {
            for how in [How::Fixed, How::Bounded, How::Never, How::Free] {
                let looked =
                    std::panic::catch_unwind(|| look(case, &empty, how)).unwrap_or_else(|panic| {
                        let text = panic.downcast_ref::<String>().cloned();
                        Err(format!(
                            "PANIC {}",
                            text.or(panic.downcast_ref::<&str>().map(|s| s.to_string()))
                                .unwrap_or_default()
                        ))
                    });
                wrong.extend(
                    looked
                        .err()
                        .map(|why| format!("{} with {empty} empty, {how:?}: {why}", case.name)),
                );
            }
        }
    }
    assert!(
        wrong.is_empty(),
        "{} wrong:\n{}",
        wrong.len(),
        wrong.join("\n")
    );
}

#[test]
fn elementwise_operations() {
    all(&[
        case("unary", "a2 b3", "", |_, x| {
            vec![
                x[0].exp(),
                x[0].relu(),
                x[0].gelu(),
                x[0].softplus(),
                x[0].square(),
                x[0].clamp(-1.0, 1.0),
            ]
        }),
        case("unary of a vector", "a2", "", |_, x| {
            vec![
                x[0].silu(),
                x[0].tanh(),
                x[0].abs(),
                x[0].gelu_tanh(),
                x[0].sign(),
            ]
        }),
        case("binary", "a2 b3, b3", "", |_, x| {
            vec![x[0] + x[1], x[0] * x[1], x[0] - x[1], x[0].maximum(x[1])]
        }),
        case("broadcast from 1", "a2 b3, a2 u1", "u!bu", |_, x| {
            vec![x[0] / (x[1] + 3.0), x[1] * x[0]]
        }),
        case("broadcast both", "a2 u1, v1 b3", "uv!bu av", |_, x| {
            vec![x[0] + x[1]]
        }),
        case("compare", "a2 b3, a2 b3", "", |_, x| {
            vec![
                x[0].lt(x[1]),
                x[0].equal(x[1]).select(x[0], x[1]),
                x[0].ge(0.0),
            ]
        }),
        case("select", "b:a2 b3, a2 b3, b3", "", |_, x| {
            vec![x[0].select(x[1], x[2])]
        }),
        case("cast", "a2 b3", "", |_, x| {
            vec![x[0].cast(F16), x[0].cast(I32), x[0].cast(BF16).cast(F32)]
        }),
        case("dropout", "a2 b3", "", |_, x| vec![x[0].dropout(0.5)]),
        case("random", "a2 b3", "", |_, x| vec![x[0].uniform_like()]),
        case("checkpoint", "a2 b3", "", |_, x| {
            vec![
                x[0].checkpoint(|x| x.exp().tanh()),
                x[0].exp().keep().tanh(),
            ]
        }),
    ]);
}

#[test]
fn reductions() {
    all(&[
        case("sum", "a2 b3 c4", "", |_, x| {
            vec![
                x[0].sum(),
                x[0].sum_over(1),
                x[0].sum_keep([0, 2]),
                x[0].sum_over(0),
            ]
        }),
        case("prod", "a2 b3", "", |_, x| {
            vec![x[0].prod(), x[0].prod_over(0), x[0].prod_over(1)]
        }),
        case("mean", "a2 b3", "", |_, x| {
            vec![x[0].mean(), x[0].mean_over(0), x[0].mean_keep(1)]
        }),
        case("any", "b:a2 b3", "", |_, x| {
            vec![x[0].any(), x[0].any_over(0), x[0].all(), x[0].all_over(1)]
        }),
        case("mean of truth", "b:a2 b3", "", |_, x| {
            vec![x[0].mean(), x[0].mean_over(1)]
        }),
        case("max", "a2 b3", "b", |_, x| {
            vec![x[0].max_over(1), x[0].min_keep(1)]
        }),
        case("max over all", "a2 b3", "ab", |_, x| {
            vec![x[0].max(), x[0].min()]
        }),
        case("max of integers", "i:a2 b3", "a", |_, x| {
            vec![x[0].max_over(0), x[0].min_over(0)]
        }),
        case("argmax", "a2 b3", "b", |_, x| {
            vec![x[0].argmax(1), x[0].argmin_keep(1)]
        }),
        case("argmin", "a2 b3", "a", |_, x| {
            vec![x[0].argmin(0), x[0].argmax_keep(0)]
        }),
        case("softmax", "a2 b3", "", |_, x| {
            vec![x[0].softmax(1), x[0].log_softmax(0), x[0].softmax(0)]
        }),
        case("logsumexp", "a2 b3", "", |_, x| vec![x[0].logsumexp(1)]),
        case("cumsum", "a2 b3", "", |_, x| {
            vec![x[0].cumsum(0), x[0].cumsum(1)]
        }),
        case("topk", "a2 b3", "b", |_, x| {
            vec![x[0].topk(2, 1).0, x[0].topk(1, 1).1]
        }),
        case("topk of none", "a2 b3", "", |_, x| {
            vec![x[0].topk(0, 1).0, x[0].topk(0, 0).1]
        }),
        case("normalize", "a2 b3", "", |_, x| {
            vec![x[0].normalize([1], 1e-5)]
        }),
        case("group_normalize", "n2 c4 h3 w2", "", |_, x| {
            vec![x[0].group_normalize(2, 1e-5)]
        }),
    ]);
}

#[test]
fn losses() {
    all(&[
        case("cross_entropy", "n2 c3, i:n2", "c!cn", |_, x| {
            vec![x[0].cross_entropy(x[1])]
        }),
        case("smoothed", "n2 c3, i:n2", "c!cn", |_, x| {
            vec![x[0].cross_entropy_smoothed(x[1], 0.1)]
        }),
        case("mse", "n2 c3, n2 c3", "", |_, x| {
            vec![x[0].mse(x[1]), x[0].huber(x[1], 1.0)]
        }),
        case("bce", "n2 c3, n2 c3", "", |_, x| {
            let p = (x[0] + 2.5) / 5.0;
            vec![
                p.binary_cross_entropy(x[1]),
                x[0].binary_cross_entropy_with_logits(x[1]),
            ]
        }),
    ]);
}

#[test]
fn products() {
    all(&[
        case("matmul", "m2 k3, k3 n4", "", |_, x| vec![x[0].matmul(x[1])]),
        case("matmul of batches", "b2 m2 k3, b2 k3 n4", "", |_, x| {
            vec![
                x[0].matmul(x[1]),
                x[1].transpose(1, 2).matmul(x[0].transpose(1, 2)),
            ]
        }),
        case("matmul of vectors", "k3, k3 n4", "", |_, x| {
            vec![x[0].matmul(x[1])]
        }),
        case("matmul and its epilogue", "m2 k3, k3 n4, n4", "", |_, x| {
            vec![(x[0].matmul(x[1]) + x[2]).relu().sum_over(1)]
        }),
        case("einsum", "i2 j3, j3 k2, k2 l2", "", |t, x| {
            vec![t.einsum("ij,jk,kl->il", x)]
        }),
        case("attention", "b2 q3 w4, b2 k5 w4, b2 k5 v2", "", |_, x| {
            vec![x[0].attention(x[1], x[2], false, Mask::None)]
        }),
        case("causal attention", "q3 w4, q3 w4, q3 v2", "", |_, x| {
            vec![x[0].attention(x[1], x[2], true, Mask::None)]
        }),
        case("conv2d", "n2 c4 h5 w6, o2 c4 k2 l2", "hwkl", |_, x| {
            vec![x[0].conv2d(x[1])]
        }),
        case(
            "conv2d with padding",
            "n2 c2 h3 w3, o2 c2 k2 l2",
            "kl",
            |_, x| {
                vec![x[0].conv2d_with(
                    x[1],
                    ConvGeometry {
                        pad: [1, 1],
                        ..ConvGeometry::default()
                    },
                )]
            },
        ),
        case(
            "conv2d in groups",
            "n2 c4 h5 w6, o2 g2 k2 l2",
            "hwklcg!cg",
            |_, x| {
                vec![x[0].conv2d_with(
                    x[1],
                    ConvGeometry {
                        groups: 2,
                        ..ConvGeometry::default()
                    },
                )]
            },
        ),
        case(
            "conv_transpose2d",
            "n2 c4 h5 w6, c4 o2 k2 l2",
            "hwkl",
            |_, x| vec![x[0].conv_transpose2d(x[1], ConvGeometry::default())],
        ),
        case("max_pool2d", "n2 c2 h4 w4", "hw", |_, x| {
            vec![x[0].max_pool2d(2)]
        }),
        case("avg_pool2d", "n2 c2 h4 w4", "hw", |_, x| {
            vec![x[0].avg_pool2d(2), x[0].relu().avg_pool2d(2)]
        }),
        case("global_avg_pool", "n2 c2 h4 w4", "", |_, x| {
            vec![x[0].global_avg_pool()]
        }),
        case("adaptive_avg_pool2d", "n2 c2 h5 w4", "hw", |_, x| {
            vec![x[0].adaptive_avg_pool2d([2, 2])]
        }),
    ]);
}

#[test]
fn indices() {
    all(&[
        case("gather", "a2 b3, i:a2 c2", "b!ab bc", |_, x| {
            vec![x[0].gather(1, x[1])]
        }),
        case("index_select", "a2 b3, i:n4", "a!an", |_, x| {
            vec![x[0].index_select(0, x[1])]
        }),
        case("embed", "r3 w4, i:n2 m3", "r!nr mr", |_, x| {
            vec![x[0].embed(x[1])]
        }),
        case("one_hot", "i:a2 b3", "", |_, x| vec![x[0].one_hot(3)]),
        case("sort", "a2 b3", "", |_, x| {
            vec![x[0].sort(true), x[0].argsort(false)]
        }),
        case("sort and slice", "a4 b3", "a", |_, x| {
            vec![x[0].transpose(0, 1).sort(true).slice(1, 0..2).exp()]
        }),
        case("unique", "a2 b3", "", |_, x| vec![x[0].unique()]),
        case("nonzero", "a2 b3", "", |_, x| {
            vec![x[0].nonzero(), x[0].gt(0.0).nonzero()]
        }),
        case("masked_select", "a2 b3, b:b3", "", |_, x| {
            vec![
                x[0].masked_select(x[1]).exp(),
                x[0].masked_select(x[1]).sum(),
            ]
        }),
        case("compress", "a2 b3, b:b3", "", |_, x| {
            vec![x[0].compress(1, x[1]).sum_over(1)]
        }),
        case("max of a selection", "b:a1 b3, a1 b3", "ab", |_, x| {
            vec![x[1].masked_select(x[0].or(x[1].lt(9.0))).max()]
        }),
        case("nms", "n5 b4, n5", "b", |_, x| vec![x[0].nms(x[1], 0.5)]),
    ]);
}

#[test]
fn views_and_pieces() {
    all(&[
        case("slice", "a4 b3", "a", |_, x| {
            vec![
                x[0].slice(0, 0..2).exp(),
                x[0].slice(0, 2..4),
                x[0].slice_step(0, .., 2),
            ]
        }),
        case("slice of nothing", "a4 b3", "", |_, x| {
            vec![
                x[0].slice(1, 0..0).exp(),
                x[0].slice(0, ..).slice(1, ..0).flatten(0).sum(),
            ]
        }),
        case("split", "a4 b3", "", |_, x| x[0].split(0, 2)),
        case("pad", "a2 b3", "", |_, x| {
            vec![
                x[0].pad([(1, 0), (0, 2)], 0.5),
                x[0].pad([(0, 0), (1, 1)], 0.0).slice(1, 1..),
            ]
        }),
        case("concat", "a2 b3, c4 b3", "", |t, x| {
            vec![
                t.concat(&[x[0], x[1], x[0]], 0),
                t.concat(&[x[0], x[0].exp()], 1),
            ]
        }),
        case("stack", "a2 b3, a2 b3", "", |t, x| {
            vec![t.stack(&[x[0], x[1]], 0), t.stack(&[x[0], x[1]], 2)]
        }),
        case("flatten", "a2 b3 c4", "", |_, x| {
            vec![
                x[0].flatten(0).exp(),
                x[0].flatten(1).sum_over(1),
                x[0].transpose(0, 2).flatten(0),
            ]
        }),
        case("flatten a transposed view", "a2 b3 c4", "", |_, x| {
            vec![
                x[0].permute([2, 0, 1]).flatten(0).sum(),
                x[0].exp().transpose(0, 1).flatten(1),
            ]
        }),
        case("unflatten", "a4 b3", "a!ab", |_, x| {
            vec![x[0].exp().unflatten(0, (2, 2)).sum_over(1)]
        }),
        case("expand", "a2 u1", "u", |_, x| {
            vec![
                x[0].unsqueeze(0)
                    .expand((3, x[0].len(0).unwrap_or(9), x[0].len(1).unwrap_or(9))),
                x[0].sum_keep(0).expand((0, 1)),
            ]
        }),
        case("squeeze", "a2 b3", "", |_, x| {
            vec![x[0].unsqueeze(1).exp().squeeze(1), x[0].t()]
        }),
        case("kept", "a2 b3", "", |t, x| {
            vec![x[0] + t.full(2.0, F32, ()).keep(), x[0].keep().t().exp()]
        }),
    ]);
}
