//! Tensors without elements: every operation with a length of 0 in each place gives what the reference evaluator gives, or an error
//! that says what is missing; gradients likewise.

mod support;

use ndarray::{Array2, ArrayD, arr1};
use slabwise::feed::Input;
use slabwise::graph::Graph;
use slabwise::nn::{BatchNorm1d, Embedding, LayerNorm, Linear};
use slabwise::ops::ConvGeometry;
use slabwise::optim::{Adam, Sgd};
use slabwise::prelude::*;
use slabwise::reference::{Array, Precision, evaluate};
use slabwise::{CompileOptions, Error};
use slabwise_kernels::dtype::DType;
use support::arrays::{close, host, numbers};
use support::random_graph::{BATCH, RandomGraph};
use support::{Rng, array};

type Build = for<'t> fn(&'t Trace, &[Tensor<'t>]) -> Vec<Tensor<'t>>;

/// An operation over inputs such as `"a2 b3, i:b3"`: a letter for each axis, of one length wherever it stands, and a type if it is not
/// f32. `refused` are the letters whose length must not be 0; behind a `!`, pairs of which both may be 0 nevertheless.
struct Case {
    name: &'static str,
    inputs: &'static str,
    refused: &'static str,
    build: Build,
}

const fn case(name: &'static str, inputs: &'static str, refused: &'static str, build: Build) -> Case {
    Case { name, inputs, refused, build }
}

/// The type and the axes of each input, as letters and lengths.
fn parse(inputs: &str) -> Vec<(DType, Vec<(char, usize)>)> {
    let axis = |word: &str| (word.chars().next().expect("a letter"), word[1..].parse().expect("a length"));
    let one = |text: &str| match text.trim().split_once(':') {
        Some(("i", axes)) => (I32, axes.split_whitespace().map(axis).collect()),
        Some(("b", axes)) => (Bool, axes.split_whitespace().map(axis).collect()),
        _ => (F32, text.split_whitespace().map(axis).collect()),
    };
    inputs.split(',').map(one).collect()
}

/// How an axis without elements is written down.
#[derive(Clone, Copy, Debug, PartialEq)]
enum How {
    Fixed,
    Bounded,
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
        How::Free => Dim::free("empty"),
    };
    let parsed = parse(case.inputs);
    let inputs: Vec<Tensor<'_>> = parsed
        .iter()
        .zip(NAMES)
        .map(|((dtype, axes), name)| trace.input(name, *dtype, axes.iter().map(dim).collect::<Vec<Dim>>().as_slice()))
        .collect();
    let mut outputs = (case.build)(&trace, &inputs);
    let floats: Vec<Tensor<'_>> = outputs.iter().copied().filter(|o| o.dtype() == F32).collect();
    if let Some(sum) = floats.iter().map(|o| o.sum()).reduce(|a, b| a + b) {
        let wrt = inputs.iter().filter(|x| x.dtype() == F32);
        outputs.extend(wrt.map(|&x| trace.gradients(sum, [x])[0]));
    }
    trace.finish(&outputs).map_err(|mistakes| mistakes.iter().map(|m| m.to_string()).collect::<Vec<_>>().join("\n"))
}

/// What a program gives, planned and dynamic, or the error of its run.
fn results<const N: usize>(
    graph: &Graph,
    open: &dyn Fn() -> Session,
    inputs: &[Array],
    variables: &[Array],
) -> Result<[Vec<Vec<f64>>; 2], Error> {
    let mut session = open();
    let program = session.compile_graph::<N>("case", graph)?;
    for (info, array) in graph.variables.iter().zip(variables) {
        let values = array.values.iter().map(|&v| v as f32).collect();
        let values = ArrayD::from_shape_vec(array.dims.clone(), values).expect("as many");
        session.set_value(&info.name, &values).expect("it exists");
    }
    let owned: Vec<Box<dyn Input>> = inputs.iter().map(host).collect();
    let feed: Vec<&dyn Input> = owned.iter().map(|b| &**b).collect();
    let planned = session.run(&program, &feed[..])?.iter().map(numbers).collect();
    let dynamic = session.run_dynamic(&program, &feed[..])?.iter().map(numbers).collect();
    Ok([planned, dynamic])
}

fn any_results(graph: &Graph, open: &dyn Fn() -> Session, inputs: &[Array], variables: &[Array]) -> Result<[Vec<Vec<f64>>; 2], Error> {
    macro_rules! by_count {
        ($($n:literal)*) => { match graph.outputs.len() { $($n => results::<$n>(graph, open, inputs, variables),)* n => panic!("{n} outputs") } };
    }
    by_count!(1 2 3 4 5 6 7 8 9 10 11 12)
}

fn session() -> Session {
    Session::new(Device::Cpu, Params::seeded(0)).expect("a session").with_threads(2)
}

fn checked() -> Session {
    session().with_options(CompileOptions { check_memory: true, ..CompileOptions::default() })
}

/// Runs a case with these letters empty; a description of what went wrong.
fn look(case: &Case, empty: &str, how: How) -> Result<(), String> {
    let (letters, fine) = case.refused.split_once('!').unwrap_or((case.refused, ""));
    let refused = empty.chars().any(|letter| letters.contains(letter)) && !fine.split(' ').any(|pair| pair == empty);
    let graph = match graph(case, empty, how) {
        Ok(graph) => graph,
        // What needs a fixed length says so of another.
        Err(_) if how != How::Fixed => return Ok(()),
        Err(text) if refused && text.contains(file!()) => return Ok(()),
        Err(text) => return Err(format!("refused: {text}")),
    };
    graph.verify().map_err(|e| e.to_string())?;
    let mut env = graph.symbols.bounds();
    env.0.iter_mut().for_each(|n| *n = 0);
    let mut rng = Rng(7);
    let mut drawn = |dtype: DType, lengths: &[usize]| array(&mut rng, dtype, lengths, (-2.0, 2.0), 2);
    let inputs: Vec<Array> =
        graph.inputs.iter().map(|i| drawn(i.dtype, &i.dims.iter().map(|d| d.usize_at(&env)).collect::<Vec<_>>())).collect();
    let variables: Vec<Array> =
        graph.variables.iter().map(|v| drawn(v.dtype, &v.dims.iter().map(|d| d.usize_at(&env)).collect::<Vec<_>>())).collect();
    let want = evaluate(&graph, &env, &inputs, &variables, Precision::Single);
    let sessions: [(&str, &dyn Fn() -> Session); 2] = [("plain", &session), ("memory checks", &checked)];
    for (what, open) in sessions {
        let got = any_results(&graph, open, &inputs, &variables);
        match (&want, got) {
            (Err(_), Err(Error::Data { .. })) if refused => {}
            (Ok(want), Ok(got)) if !refused => {
                for got in got {
                    for (at, (a, b)) in got.iter().zip(&want.outputs).enumerate() {
                        let same = a.len() == b.values.len() && a.iter().zip(&b.values).all(|(&p, &q)| close(p, q));
                        if !same {
                            return Err(format!("{what}: output {at} is {a:?} instead of {b}"));
                        }
                    }
                }
            }
            (want, got) => {
                let want = want.as_ref().map(|w| w.outputs.len()).map_err(|e| e.to_string());
                return Err(format!(
                    "{what}: {} where the evaluator has {want:?}",
                    got.map_or_else(|e| e.to_string(), |_| "values".into())
                ));
            }
        }
    }
    Ok(())
}

/// Every operation, each letter empty and each pair of them, in all three ways; all that is wrong at once.
fn all(cases: &[Case]) {
    let mut wrong = Vec::new();
    for case in cases {
        let mut letters: Vec<char> = parse(case.inputs).iter().flat_map(|(_, axes)| axes.iter().map(|(letter, _)| *letter)).collect();
        letters.sort_unstable();
        letters.dedup();
        let pairs = letters.iter().enumerate().flat_map(|(i, a)| letters[i..].iter().map(move |b| [*a, *b].iter().collect::<String>()));
        for empty in pairs {
            for how in [How::Fixed, How::Bounded, How::Free] {
                let looked = std::panic::catch_unwind(|| look(case, &empty, how)).unwrap_or_else(|panic| {
                    let text = panic.downcast_ref::<String>().cloned();
                    Err(format!("PANIC {}", text.or(panic.downcast_ref::<&str>().map(|s| s.to_string())).unwrap_or_default()))
                });
                wrong.extend(looked.err().map(|why| format!("{} with {empty} empty, {how:?}: {why}", case.name)));
            }
        }
    }
    assert!(wrong.is_empty(), "{} wrong:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn elementwise_operations() {
    all(&[
        case("unary", "a2 b3", "", |_, x| {
            vec![x[0].exp(), x[0].relu(), x[0].gelu(), x[0].softplus(), x[0].square(), x[0].clamp(-1.0, 1.0)]
        }),
        case("unary of a vector", "a2", "", |_, x| vec![x[0].silu(), x[0].tanh(), x[0].abs(), x[0].gelu_tanh(), x[0].sign()]),
        case("binary", "a2 b3, b3", "", |_, x| vec![x[0] + x[1], x[0] * x[1], x[0] - x[1], x[0].maximum(x[1])]),
        case("broadcast from 1", "a2 b3, a2 u1", "u!bu", |_, x| vec![x[0] / (x[1] + 3.0), x[1] * x[0]]),
        case("broadcast both", "a2 u1, v1 b3", "uv!bu av", |_, x| vec![x[0] + x[1]]),
        case("compare", "a2 b3, a2 b3", "", |_, x| vec![x[0].lt(x[1]), x[0].equal(x[1]).select(x[0], x[1]), x[0].ge(0.0)]),
        case("select", "b:a2 b3, a2 b3, b3", "", |_, x| vec![x[0].select(x[1], x[2])]),
        case("cast", "a2 b3", "", |_, x| vec![x[0].cast(F16), x[0].cast(I32), x[0].cast(BF16).cast(F32)]),
        case("dropout", "a2 b3", "", |_, x| vec![x[0].dropout(0.5)]),
        case("random", "a2 b3", "", |_, x| vec![x[0].uniform_like()]),
        case("checkpoint", "a2 b3", "", |_, x| vec![x[0].checkpoint(|x| x.exp().tanh()), x[0].exp().keep().tanh()]),
    ]);
}

#[test]
fn reductions() {
    all(&[
        case("sum", "a2 b3 c4", "", |_, x| vec![x[0].sum(), x[0].sum_over(1), x[0].sum_keep([0, 2]), x[0].sum_over(0)]),
        case("prod", "a2 b3", "", |_, x| vec![x[0].prod(), x[0].prod_over(0), x[0].prod_over(1)]),
        case("mean", "a2 b3", "", |_, x| vec![x[0].mean(), x[0].mean_over(0), x[0].mean_keep(1)]),
        case("any", "b:a2 b3", "", |_, x| vec![x[0].any(), x[0].any_over(0), x[0].all(), x[0].all_over(1)]),
        case("mean of truth", "b:a2 b3", "", |_, x| vec![x[0].mean(), x[0].mean_over(1)]),
        case("max", "a2 b3", "b", |_, x| vec![x[0].max_over(1), x[0].min_keep(1)]),
        case("max over all", "a2 b3", "ab", |_, x| vec![x[0].max(), x[0].min()]),
        case("max of integers", "i:a2 b3", "a", |_, x| vec![x[0].max_over(0), x[0].min_over(0)]),
        case("argmax", "a2 b3", "b", |_, x| vec![x[0].argmax(1), x[0].argmin_keep(1)]),
        case("argmin", "a2 b3", "a", |_, x| vec![x[0].argmin(0), x[0].argmax_keep(0)]),
        case("softmax", "a2 b3", "", |_, x| vec![x[0].softmax(1), x[0].log_softmax(0), x[0].softmax(0)]),
        case("logsumexp", "a2 b3", "", |_, x| vec![x[0].logsumexp(1)]),
        case("cumsum", "a2 b3", "", |_, x| vec![x[0].cumsum(0), x[0].cumsum(1)]),
        case("topk", "a2 b3", "b", |_, x| vec![x[0].topk(2, 1).0, x[0].topk(1, 1).1]),
        case("topk of none", "a2 b3", "", |_, x| vec![x[0].topk(0, 1).0, x[0].topk(0, 0).1]),
        case("normalize", "a2 b3", "", |_, x| vec![x[0].normalize([1], 1e-5)]),
        case("group_normalize", "n2 c4 h3 w2", "", |_, x| vec![x[0].group_normalize(2, 1e-5)]),
    ]);
}

#[test]
fn losses() {
    all(&[
        case("cross_entropy", "n2 c3, i:n2", "c!cn", |_, x| vec![x[0].cross_entropy(x[1])]),
        case("smoothed", "n2 c3, i:n2", "c!cn", |_, x| vec![x[0].cross_entropy_smoothed(x[1], 0.1)]),
        case("mse", "n2 c3, n2 c3", "", |_, x| vec![x[0].mse(x[1]), x[0].huber(x[1], 1.0)]),
        case("bce", "n2 c3, n2 c3", "", |_, x| {
            let p = (x[0] + 2.5) / 5.0;
            vec![p.binary_cross_entropy(x[1]), x[0].binary_cross_entropy_with_logits(x[1])]
        }),
    ]);
}

#[test]
fn products() {
    all(&[
        case("matmul", "m2 k3, k3 n4", "", |_, x| vec![x[0].matmul(x[1])]),
        case("matmul of batches", "b2 m2 k3, b2 k3 n4", "", |_, x| {
            vec![x[0].matmul(x[1]), x[1].transpose(1, 2).matmul(x[0].transpose(1, 2))]
        }),
        case("matmul of vectors", "k3, k3 n4", "", |_, x| vec![x[0].matmul(x[1])]),
        case("matmul and its epilogue", "m2 k3, k3 n4, n4", "", |_, x| vec![(x[0].matmul(x[1]) + x[2]).relu().sum_over(1)]),
        case("einsum", "i2 j3, j3 k2, k2 l2", "", |t, x| vec![t.einsum("ij,jk,kl->il", x)]),
        case("attention", "b2 q3 w4, b2 k5 w4, b2 k5 v2", "", |_, x| vec![x[0].attention(x[1], x[2], false, Mask::None)]),
        case("causal attention", "q3 w4, q3 w4, q3 v2", "", |_, x| vec![x[0].attention(x[1], x[2], true, Mask::None)]),
        case("conv2d", "n2 c4 h5 w6, o2 c4 k2 l2", "hwkl", |_, x| vec![x[0].conv2d(x[1])]),
        case("conv2d with padding", "n2 c2 h3 w3, o2 c2 k2 l2", "kl", |_, x| {
            vec![x[0].conv2d_with(x[1], ConvGeometry { pad: [1, 1], ..ConvGeometry::default() })]
        }),
        case("conv2d in groups", "n2 c4 h5 w6, o2 g2 k2 l2", "hwklcg!cg", |_, x| {
            vec![x[0].conv2d_with(x[1], ConvGeometry { groups: 2, ..ConvGeometry::default() })]
        }),
        case("conv_transpose2d", "n2 c4 h5 w6, c4 o2 k2 l2", "hwkl", |_, x| vec![x[0].conv_transpose2d(x[1], ConvGeometry::default())]),
        case("max_pool2d", "n2 c2 h4 w4", "hw", |_, x| vec![x[0].max_pool2d(2)]),
        case("avg_pool2d", "n2 c2 h4 w4", "hw", |_, x| vec![x[0].avg_pool2d(2), x[0].relu().avg_pool2d(2)]),
        case("global_avg_pool", "n2 c2 h4 w4", "", |_, x| vec![x[0].global_avg_pool()]),
        case("adaptive_avg_pool2d", "n2 c2 h5 w4", "hw", |_, x| vec![x[0].adaptive_avg_pool2d([2, 2])]),
    ]);
}

#[test]
fn indices() {
    all(&[
        case("gather", "a2 b3, i:a2 c2", "b!ab bc", |_, x| vec![x[0].gather(1, x[1])]),
        case("index_select", "a2 b3, i:n4", "a!an", |_, x| vec![x[0].index_select(0, x[1])]),
        case("embed", "r3 w4, i:n2 m3", "r!nr mr", |_, x| vec![x[0].embed(x[1])]),
        case("one_hot", "i:a2 b3", "", |_, x| vec![x[0].one_hot(3)]),
        case("sort", "a2 b3", "", |_, x| vec![x[0].sort(true), x[0].argsort(false)]),
        case("sort and slice", "a4 b3", "a", |_, x| vec![x[0].transpose(0, 1).sort(true).slice(1, 0..2).exp()]),
        case("unique", "a2 b3", "", |_, x| vec![x[0].unique()]),
        case("nonzero", "a2 b3", "", |_, x| vec![x[0].nonzero(), x[0].gt(0.0).nonzero()]),
        case("masked_select", "a2 b3, b:b3", "", |_, x| vec![x[0].masked_select(x[1]).exp(), x[0].masked_select(x[1]).sum()]),
        case("compress", "a2 b3, b:b3", "", |_, x| vec![x[0].compress(1, x[1]).sum_over(1)]),
        case("max of what is selected", "b:a1 b3, a1 b3", "ab", |_, x| vec![x[1].masked_select(x[0].or(x[1].lt(9.0))).max()]),
        case("nms", "n5 b4, n5", "b", |_, x| vec![x[0].nms(x[1], 0.5)]),
    ]);
}

#[test]
fn views_and_pieces() {
    all(&[
        case("slice", "a4 b3", "a", |_, x| vec![x[0].slice(0, 0..2).exp(), x[0].slice(0, 2..4), x[0].slice_step(0, .., 2)]),
        case("slice of nothing", "a4 b3", "", |_, x| vec![x[0].slice(1, 0..0).exp(), x[0].slice(0, ..).slice(1, ..0).flatten(0).sum()]),
        case("split", "a4 b3", "", |_, x| x[0].split(0, 2)),
        case("pad", "a2 b3", "", |_, x| vec![x[0].pad([(1, 0), (0, 2)], 0.5), x[0].pad([(0, 0), (1, 1)], 0.0).slice(1, 1..)]),
        case("concat", "a2 b3, c4 b3", "", |t, x| vec![t.concat(&[x[0], x[1], x[0]], 0), t.concat(&[x[0], x[0].exp()], 1)]),
        case("stack", "a2 b3, a2 b3", "", |t, x| vec![t.stack(&[x[0], x[1]], 0), t.stack(&[x[0], x[1]], 2)]),
        case("flatten", "a2 b3 c4", "", |_, x| vec![x[0].flatten(0).exp(), x[0].flatten(1).sum_over(1), x[0].transpose(0, 2).flatten(0)]),
        case("flatten what is turned", "a2 b3 c4", "", |_, x| {
            vec![x[0].permute([2, 0, 1]).flatten(0).sum(), x[0].exp().transpose(0, 1).flatten(1)]
        }),
        case("unflatten", "a4 b3", "a!ab", |_, x| vec![x[0].exp().unflatten(0, (2, 2)).sum_over(1)]),
        case("expand", "a2 u1", "u", |_, x| {
            vec![x[0].unsqueeze(0).expand((3, x[0].len(0).unwrap_or(9), x[0].len(1).unwrap_or(9))), x[0].sum_keep(0).expand((0, 1))]
        }),
        case("squeeze", "a2 b3", "", |_, x| vec![x[0].unsqueeze(1).exp().squeeze(1), x[0].t()]),
        case("kept", "a2 b3", "", |t, x| vec![x[0] + t.full(2.0, F32, ()).keep(), x[0].keep().t().exp()]),
    ]);
}

/// The largest element along an axis that has none in a run is a mistake of that run, and nothing has changed.
#[test]
fn a_run_in_which_an_axis_has_no_largest_element_changes_nothing() {
    let params = Params::seeded(0);
    let w = params.root().param("w", (3,), Init::Constant(1.0));
    let trace = Trace::training();
    let x = trace.input("x", F32, (Dim::bounded("batch", 4), 3));
    let (loss, line) = ((x * &w).max_over(0).sum(), line!());
    trace.minimize(loss, Sgd::new(0.1));
    let found = trace.input("mask", Bool, (3,));
    let least = x.compress(1, found).min_over(1).sum();
    let mut session = Session::new(Device::Cpu, params).expect("a session");
    let program = session.compile(&trace, [loss, least]).expect("it compiles");
    let before = session.value("w").expect("it is there");
    let all = arr1(&[1u8, 1, 1]);
    let error = session.run(&program, (&Array2::<f32>::zeros((0, 3)), &all)).map(|_| ()).expect_err("no largest element").to_string();
    assert!(error.contains(&format!("empties.rs:{line}: ")), "{error}");
    assert!(error.contains("max: axis 0 of [batch, 3] has no elements, and nothing without elements has a largest"), "{error}");
    let error = session
        .run(&program, (&Array2::<f32>::ones((2, 3)), &arr1(&[0u8, 0, 0])))
        .map(|_| ())
        .expect_err("no smallest element")
        .to_string();
    assert!(error.contains("min: axis 1 of [batch, found1] has no elements"), "{error}");
    assert_eq!(session.value("w").expect("it is there"), before);
    session.run(&program, (&Array2::<f32>::ones((2, 3)), &all)).expect("there is a largest one");
    assert_ne!(session.value("w").expect("it is there"), before);
    let trace = Trace::inference();
    let x = trace.input("x", F32, (2, 0));
    let error = session.compile(&trace, [x.argmax(1)]).map(|_| ()).expect_err("no largest element").to_string();
    assert!(error.contains("argmax: axis 1 of [2, 0] has no elements, and nothing without elements has a largest"), "{error}");
    let ids = trace.input("ids", I32, (2,));
    let error = session.compile(&trace, [ids.one_hot(0)]).map(|_| ()).expect_err("no position").to_string();
    assert!(error.contains("one_hot of [2] among 0 positions"), "{error}");
}

/// A training run of no examples fails before it changes anything; a trace for inference gives NaN, as PyTorch does.
#[test]
fn an_empty_batch_does_not_reach_the_weights() {
    for statistics in [false, true] {
        let params = Params::seeded(0);
        let (layer, norm) = (Linear::new(&params.root() / "layer", 4, 3), BatchNorm1d::new(&params.root() / "norm", 3));
        let trace = Trace::training();
        let batch = Dim::bounded("batch", 4);
        let (x, labels) = (trace.input("x", F32, (batch, 4)), trace.input("labels", I32, (batch,)));
        let logits = x.apply(&layer);
        let loss =
            if statistics { logits.apply(&norm).square().sum() + 0.0 * labels.cast(F32).sum() } else { logits.cross_entropy(labels) };
        trace.minimize(loss, Adam::new(0.1));
        let mut session = Session::new(Device::Cpu, params).expect("a session");
        let program = session.compile(&trace, [loss]).expect("it compiles");
        let values = |session: &Session| session.names().map(|n| session.value(n).expect("it is there")).collect::<Vec<_>>();
        let before = values(&session);
        let none = (Array2::<f32>::zeros((0, 4)), Vec::<i32>::new());
        for _ in 0..2 {
            let error = session.run(&program, (&none.0, &none.1)).map(|_| ()).expect_err("no examples").to_string();
            let what = if statistics { "batch norm: axis 0 of [batch, 3]" } else { "cross_entropy: axis 0 of [batch, 1] has no elements" };
            assert!(error.contains(what), "{error}");
        }
        assert_eq!(values(&session), before);
    }
    let trace = Trace::inference();
    let (x, y) = (trace.input("x", F32, (Dim::bounded("batch", 4), 3)), trace.input("y", F32, (Dim::bounded("batch", 4), 3)));
    let mut session = session();
    let program = session.compile(&trace, [x.mse(y)]).expect("it compiles");
    let none = Array2::<f32>::zeros((0, 3));
    assert!(session.run(&program, (&none, &none)).expect("it runs")[0].item().is_nan());
}

/// Layers with a length of 0, and one without.
struct Model {
    first: Linear,
    narrow: Linear,
    wide: Linear,
    norm: LayerNorm,
    table: Embedding,
}

impl Model {
    fn loss<'t>(&self, x: Tensor<'t>, words: Tensor<'t>, y: Tensor<'t>) -> Tensor<'t> {
        let hidden = x.apply(&self.first).tanh().apply(&self.narrow) + words.apply(&self.table);
        hidden.apply(&self.norm).relu().dropout(0.5).apply(&self.wide).mse(y)
    }
}

/// Examples in a batch of such a model.
const ROWS: usize = 512;

/// What the session holds after some steps of such a model.
fn train(open: impl Fn(Session) -> Session, parts: bool) -> Result<Vec<(String, ArrayD<f32>)>> {
    let params = Params::seeded(3);
    let at = params.root();
    let none = at.param("none", (0, 5), Init::Constant(1.0));
    let (first, narrow, wide) = (Linear::new(&at / "first", 4, 64), Linear::new(&at / "narrow", 64, 0), Linear::new(&at / "wide", 0, 3));
    let (norm, table) = (LayerNorm::new(&at / "norm", 0), Embedding::new(&at / "table", 6, 0));
    let trace = Trace::training();
    let (x, y, words) = (trace.input("x", F32, (ROWS, 4)), trace.input("y", F32, (ROWS, 3)), trace.input("words", I32, (ROWS,)));
    let model = Model { first, narrow, wide, norm, table };
    let loss = if parts {
        let [x, y, words] = [x, y, words].map(|t| t.split(0, 2));
        trace.minimize_in_parts(2, Adam::new(0.1), |i| model.loss(x[i], words[i], y[i]) + trace.param(&none).sum())
    } else {
        let loss = model.loss(x, words, y) + trace.param(&none).sum();
        trace.minimize(loss, Adam::new(0.1).clip_norm(1.0));
        loss
    };
    let mut session = open(Session::new(Device::Cpu, params).expect("a session").with_threads(2));
    let program = session.compile(&trace, [loss])?;
    let x = Array2::from_shape_fn((ROWS, 4), |(i, j)| ((i * 5 + j) as f32).sin());
    let y = Array2::from_shape_fn((ROWS, 3), |(i, j)| ((i + 7 * j) as f32).cos());
    let words: Vec<i32> = (0..ROWS as i32).map(|i| i % 6).collect();
    for _ in 0..3 {
        session.run(&program, (&x, &y, &words)).expect("a step");
    }
    session.run_dynamic(&program, (&x, &y, &words)).expect("a step");
    let folder = std::env::temp_dir().join(format!("slabwise-empties-{}-{parts}", std::process::id()));
    session.save(&folder).expect("it is saved");
    let held: Vec<_> = session.names().map(|n| (n.to_string(), session.value(n).expect("it is there"))).collect();
    session.load(&folder).expect("it is loaded");
    std::fs::remove_file(&folder).expect("it was there");
    let again: Vec<_> = session.names().map(|n| (n.to_string(), session.value(n).expect("it is there"))).collect();
    assert_eq!(held, again);
    Ok(held)
}

#[test]
fn layers_of_width_0_train_within_budgets_and_beside_a_link() {
    for parts in [false, true] {
        let base = train(|s| s, parts).expect("it trains");
        assert!(base.iter().all(|(_, values)| values.iter().all(|v| v.is_finite())), "{base:?}");
        assert!(base.iter().any(|(name, values)| name == "none" && values.is_empty()));
        let checked = CompileOptions { check_memory: true, ..CompileOptions::default() };
        assert_eq!(train(|s| s.with_options(checked), parts).expect("it trains"), base);
        let mut kept = 0;
        for fraction in [0.9, 0.8, 0.6] {
            let within = |s: Session| s.with_budget(Budget::Fraction(fraction));
            let beside = |s: Session| within(s).with_offload(Offload::new(Bytes(1 << 40)));
            for trained in [train(within, parts), train(beside, parts)] {
                match trained {
                    Ok(held) => {
                        assert_eq!(held, base, "{fraction}");
                        kept += 1;
                    }
                    Err(Error::Budget { .. }) => {}
                    Err(other) => panic!("{fraction}: {other}"),
                }
            }
        }
        assert!(kept > 0, "no budget was kept");
    }
}

/// A model whose only parameter has no elements: it compiles, is saved and is loaded, before it compiles too.
#[test]
fn a_model_may_have_nothing_but_parameters_without_elements() {
    let path = std::env::temp_dir().join(format!("slabwise-nothing-{}", std::process::id()));
    let open = || {
        let params = Params::seeded(0);
        let w = params.root().param("w", (0, 5), Init::Normal { mean: 0.0, std: 1.0 });
        (w, Session::new(Device::Cpu, params).expect("a session"))
    };
    let compile = |w: &Param, session: &mut Session| {
        let trace = Trace::training();
        let loss = trace.input("x", F32, (2, 0)).matmul(w).square().sum();
        trace.minimize(loss, Sgd::new(0.1).momentum(0.9).weight_decay(0.1));
        session.compile(&trace, [loss])
    };
    let (w, mut session) = open();
    let program = compile(&w, &mut session).expect("it compiles");
    assert_eq!(session.run(&program, (&Array2::<f32>::zeros((2, 0)),)).expect("it runs")[0].item(), 0.0);
    assert_eq!(session.value("w").expect("it is there").shape(), [0, 5]);
    session.save(&path).expect("it is saved");
    let (w, mut session) = open();
    session.load_weights(&path).expect("it is loaded");
    compile(&w, &mut session).expect("it compiles");
    session.load(&path).expect("it is loaded");
    std::fs::remove_file(&path).expect("it was there");
}

/// Reports, pictures, pages and runs ahead of a program none of whose values has elements.
#[test]
fn a_program_of_nothing_is_planned_shown_and_fed_like_any_other() {
    let mut session = session().with_prefetch(3);
    let trace = Trace::inference();
    let x = trace.input("x", F32, (4, 0));
    let program = session.compile(&trace, [x.exp(), x.softmax(1)]).expect("it compiles");
    assert_eq!(program.plan().to_string(), program.plan().to_string());
    assert!(program.plan().svg().contains("<svg"));
    let none = Array2::<f32>::zeros((4, 0));
    let mut batches = vec![none.clone(), none.clone()].into_iter().map(|x| (x,));
    let mut runs = 0;
    while let Some([y, z]) = session.run_ahead(&program, &mut batches).expect("it runs") {
        assert_eq!((y.array::<f32>().expect("f32").shape(), z.array::<f32>().expect("f32").len()), (&[4, 0][..], 0));
        runs += 1;
    }
    assert_eq!(runs, 2);
    let run = session.record(&program, (&none,)).expect("it runs");
    assert!(program.plan().html(Ok(&run)).contains("<html"));
    session.profile(&program, (&none,), 2).expect("it runs");
    let kept = session.upload("x", &none).expect("it fits");
    let [y, _] = session.run(&program, (&kept,)).expect("it runs");
    assert!(y.array::<f32>().expect("f32").is_empty());
    assert!(session.download::<f32>(&kept).expect("it is there").is_empty());
    session.free(kept).expect("it is there");
}

/// Slices of the batch are tried where a sum over it has no axis left to be kept.
#[test]
fn a_sum_over_the_batch_of_nothing_is_looked_at_in_slices() {
    let trace = Trace::inference();
    let x = trace.input("x", F32, (Dim::bounded("batch", 8), 0, 0));
    let y = x.maximum(x.sum_keep(0)).tanh();
    let wide = y.pad([(0, 0), (1, 1), (1, 1)], 0.0);
    let mut session = session().with_budget(Budget::Fraction(0.3));
    match session.compile(&trace, [y, wide, y + x]) {
        Ok(_) | Err(Error::Budget { .. }) => {}
        Err(other) => panic!("{other}"),
    }
}

/// On a device: layers of width 0, empty batches, and folds, products, indices and views of nothing.
#[cfg(feature = "cuda")]
#[test]
fn what_has_no_elements_runs_on_a_device() {
    let Some(_driver) = slabwise_cuda::fake::FakeDriver::install() else { return };
    let run = |device: Device| -> Vec<Vec<f64>> {
        let open = || {
            let untuned = CompileOptions { tuning: slabwise::Tuning::Off, ..CompileOptions::default() };
            Session::new(device, Params::seeded(0)).expect("a session").with_threads(1).with_options(untuned)
        };
        let trace = Trace::inference();
        let batch = Dim::bounded("batch", 3);
        let (x, none) = (trace.input("x", F32, (batch, 4)), trace.input("none", F32, (4, 0)));
        let (image, index) = (trace.input("image", F32, (batch, 2, 5, 5)), trace.input("index", I32, (batch, 2)));
        let weight = trace.full(0.5, F32, (3, 2, 2, 2));
        let image = image.conv2d(weight).relu().max_pool2d(2);
        let outputs = [
            x.matmul(none).matmul(none.t()),
            none.matmul(none.t()).exp(),
            x.softmax(1).sum_over(0),
            none.softmax(1).sum_over(1),
            x.mean_over(0),
            none.exp().flatten(0).sum(),
            image,
            x.gather(1, index).sum_over(0),
            x.sort(true),
            x.gt(0.0).nonzero(),
            x.masked_select(x.gt(0.0)).sum(),
            trace.concat(&[x, x.slice(1, 0..0), x.cumsum(1)], 1).pad([(0, 0), (1, 1)], 0.5),
        ];
        let gradients = [x, none].map(|w| trace.gradients((outputs[0].square().sum() + outputs[6].sum()) + outputs[2].sum(), [w])[0]);
        let mut session = open();
        let program = session.compile(&trace, outputs).expect("it compiles");
        let slopes = session.compile(&trace, gradients).expect("it compiles");
        let mut all = Vec::new();
        for n in [0, 2, 3] {
            let x = Array2::from_shape_fn((n, 4), |(i, j)| (i as f32 * 1.7 + j as f32).sin());
            let image = ArrayD::from_shape_fn(vec![n, 2, 5, 5], |at| (at[0] + at[2] * at[3]) as f32 * 0.1);
            let (none, index) = (Array2::<f32>::zeros((4, 0)), Array2::<i32>::from_elem((n, 2), 3));
            all.extend(session.run(&program, (&x, &none, &image, &index)).expect("it runs").iter().map(numbers));
            all.extend(session.run(&slopes, (&x, &none, &image, &index)).expect("it runs").iter().map(numbers));
        }
        all
    };
    let (on_device, on_cpu) = (run(Device::Cuda(0)), run(Device::Cpu));
    for (at, (a, b)) in on_device.iter().zip(&on_cpu).enumerate() {
        let same = a.len() == b.len() && a.iter().zip(b).all(|(&p, &q)| close(p, q));
        assert!(same, "result {at}: {a:?} on the device, {b:?} on the CPU");
    }
}

/// Graphs drawn at random with lengths of 0 and 1 everywhere, on a device and within budgets.
#[cfg(feature = "cuda")]
#[test]
fn random_graphs_without_elements_run_on_a_device() {
    let Some(_driver) = slabwise_cuda::fake::FakeDriver::install() else { return };
    let open = || {
        let untuned = CompileOptions { tuning: slabwise::Tuning::Off, ..CompileOptions::default() };
        Session::new(Device::Cuda(0), Params::seeded(0)).expect("a session").with_threads(1).with_options(untuned)
    };
    for seed in 500..506 {
        against_the_evaluator(seed, 8, &open);
    }
}

/// A random graph with lengths of 0 and 1 everywhere, with a batch, of one example and of none.
fn against_the_evaluator(seed: u64, size: usize, open: &dyn Fn() -> Session) {
    let case = RandomGraph::short(seed, size);
    for batch in [BATCH, 1, 0] {
        let env = case.env(batch);
        let (inputs, variables) = case.arguments(&env);
        let want = evaluate(&case.graph, &env, &inputs, &variables, Precision::Single).expect("the graph evaluates");
        if case.graph.outputs.is_empty() || case.graph.outputs.len() > 12 {
            return;
        }
        let first = case.graph.outputs.len();
        match any_results(&case.graph, open, &inputs, &variables) {
            Ok([planned, _]) => {
                for (at, (a, b)) in planned.iter().zip(&want.outputs).enumerate().take(first) {
                    let same = a.len() == b.values.len() && a.iter().zip(&b.values).all(|(&p, &q)| close(p, q));
                    assert!(same, "seed {seed}, batch {batch}, output {at}: {a:?} instead of {b}\n{}", case.graph);
                }
            }
            Err(Error::Budget { .. }) => return,
            Err(other) => panic!("seed {seed}, batch {batch}: {other}\n{}", case.graph),
        }
    }
}

#[test]
fn random_graphs_without_elements_run_within_budgets_and_beside_a_link() {
    for seed in 600..640 {
        for fraction in [0.8, 0.4] {
            let within = || session().with_budget(Budget::Fraction(fraction));
            against_the_evaluator(seed, 14, &within);
            against_the_evaluator(seed, 14, &|| within().with_offload(Offload::new(Bytes(1 << 40))));
        }
    }
}
