//! Layers, losses and other composites of operations, written as users write them.

use slabwise::nn::*;
use slabwise::prelude::*;
use slabwise::tensor::AttentionOptions;
use slabwise_compiler::reference::Array;

use super::{Function, floats};
use crate::support::{Rng, array};
use slabwise_compiler::ops::Op;

/// Names of inputs.
const NAMES: [&str; 4] = ["x0", "x1", "x2", "x3"];

/// Checks the gradients of a model in its inputs, which are like `arguments`, and in its
/// parameters. Parameters are redrawn, because their initial values, such as ones and zeros, hide
/// mistakes.
#[track_caller]
pub(super) fn check(
    name: &str,
    rng: &mut Rng,
    mut arguments: Vec<Array>,
    build: impl for<'t> Fn(&Scope, &[Tensor<'t>]) -> Tensor<'t>,
) {
    let params = Params::seeded(1);
    let trace = Trace::training();
    let inputs: Vec<Tensor<'_>> = arguments
        .iter()
        .zip(NAMES)
        .map(|(a, name)| trace.input(name, a.dtype, a.dims.as_slice()))
        .collect();
    let value = build(&params.root(), &inputs);
    let graph = trace
        .finish(&[value])
        .unwrap_or_else(|mistakes| panic!("{name}: {mistakes:?}"));
    assert_eq!(
        params.mistakes().len(),
        0,
        "{name}: {:?}",
        params.mistakes()
    );
    let node = |wanted: Op| {
        graph
            .ids()
            .find(|id| graph.node(*id).op == wanted)
            .expect("declared when traced")
    };
    let mut of: Vec<_> = (0..arguments.len())
        .map(|i| node(Op::Input(i as u32)))
        .collect();
    for (v, info) in graph.variables.iter().enumerate() {
        of.push(node(Op::Variable(v as u32)));
        let lengths: Vec<usize> = info
            .dims
            .iter()
            .map(|d| d.as_fixed().expect("fixed") as usize)
            .collect();
        arguments.push(array(rng, info.dtype, &lengths, (0.3, 1.7), 3));
    }
    let values = graph.outputs.clone();
    Function {
        name: name.into(),
        graph,
        of,
        values,
    }
    .check_twice(&arguments);
}

#[test]
fn norms() {
    let rng = &mut Rng(11);
    let x = floats(rng, &[3, 5]);
    check("layer norm", rng, vec![x.clone()], |at, x| {
        x[0].apply(&LayerNorm::new(at / "norm", 5))
    });
    check("rms norm", rng, vec![x.clone()], |at, x| {
        x[0].apply(&RmsNorm::new(at / "norm", 5))
    });
    check("batch norm of rows", rng, vec![x], |at, x| {
        x[0].apply(&BatchNorm1d::new(at / "norm", 5))
    });
    let x = floats(rng, &[2, 4, 2, 2]);
    check("group norm", rng, vec![x.clone()], |at, x| {
        x[0].apply(&GroupNorm::new(at / "norm", 2, 4))
    });
    check("batch norm of images", rng, vec![x], |at, x| {
        x[0].apply(&BatchNorm2d::new(at / "norm", 4))
    });
    let x = floats(rng, &[2, 3, 4]);
    check("batch norm twice", rng, vec![x], |at, x| {
        let norm = BatchNorm1d::new(at / "norm", 3);
        x[0].apply(&norm).tanh().apply(&norm)
    });
}

#[test]
fn embeddings_and_attention() {
    let rng = &mut Rng(12);
    let index = array(rng, I32, &[2, 3], (0.0, 0.0), 4);
    check("embedding", rng, vec![index], |at, x| {
        let tokens = x[0].apply(&Embedding::new(at / "tokens", 4, 3));
        tokens
            .apply(&LearnedPositions::new(at / "places", 5, 3))
            .square()
    });
    let qkv: Vec<Array> = [[2, 3, 2], [2, 4, 2], [2, 4, 3]]
        .iter()
        .map(|lengths| floats(rng, lengths))
        .collect();
    for causal in [false, true] {
        check("attention", rng, qkv.clone(), |_, x| {
            x[0].attention(x[1], x[2], causal, Mask::None)
        });
    }
    check("attention in tiles", rng, qkv.clone(), |_, x| {
        x[0].attention_in(Tiles::Queries(2), x[1], x[2], true, Mask::None)
    });
    let bias = floats(rng, &[3, 4]);
    let with_bias: Vec<Array> = qkv.iter().cloned().chain([bias]).collect();
    check("attention with a bias", rng, with_bias, |_, x| {
        x[0].attention(x[1], x[2], false, Mask::Added(x[3]))
    });
    let mut seen = array(rng, Bool, &[3, 4], (0.0, 0.0), 2);
    seen.values[..]
        .iter_mut()
        .step_by(4)
        .for_each(|first| *first = 1.0);
    let masked: Vec<Array> = qkv.into_iter().chain([seen]).collect();
    check("attention under a mask", rng, masked, |_, x| {
        x[0].attention(x[1], x[2], true, Mask::Seen(x[3]))
    });
    for tiles in [Tiles::Whole, Tiles::Queries(2)] {
        let arguments = vec![
            floats(rng, &[4, 3, 2]),
            floats(rng, &[2, 5, 2]),
            floats(rng, &[2, 5, 3]),
        ];
        check("attention with dropout", rng, arguments, |_, x| {
            let options = AttentionOptions::new().causal().past(2).dropout(0.4);
            x[0].attention_with(x[1], x[2], options.tiles(tiles))
        });
    }
    let x = floats(rng, &[1, 3, 4]);
    check("heads", rng, vec![x], |at, x| {
        x[0].apply(&MultiHeadAttention::new(at / "attention", 4, 2).causal())
    });
}

#[test]
fn adaptive_pooling() {
    let rng = &mut Rng(13);
    let x = floats(rng, &[1, 2, 5, 6]);
    for size in [[1, 1], [5, 3], [2, 4], [5, 6], [8, 9], [3, 12], [7, 2]] {
        check("adaptive pooling", rng, vec![x.clone()], |_, x| {
            x[0].apply(&AdaptiveAvgPool2d(size)).square()
        });
        check("adaptive max pooling", rng, vec![x.clone()], |_, x| {
            x[0].apply(&AdaptiveMaxPool2d(size)).square()
        });
    }
}

#[test]
fn running_sums_and_largest_elements() {
    let rng = &mut Rng(14);
    let x = floats(rng, &[3, 5, 2]);
    for axis in 0..3 {
        check("cumsum", rng, vec![x.clone()], |_, x| {
            x[0].cumsum(axis).square()
        });
        check("topk", rng, vec![x.clone()], |_, x| {
            x[0].topk(2, axis).0.square()
        });
    }
}

#[test]
fn einsum() {
    let rng = &mut Rng(15);
    for (equation, lengths) in [
        ("ij,jk->ik", vec![&[2, 3][..], &[3, 4]]),
        ("bij,bkj->bik", vec![&[2, 2, 3], &[2, 2, 3]]),
        ("ij->ji", vec![&[2, 3]]),
        ("ijk->j", vec![&[2, 3, 2]]),
        ("i,j->ij", vec![&[2], &[3]]),
        ("ij,ij->", vec![&[2, 3], &[2, 3]]),
        ("bhid,bhjd", vec![&[1, 2, 2, 3], &[1, 2, 2, 3]]),
        ("ab,bcd,dea->ce", vec![&[2, 3], &[3, 2, 2], &[2, 2, 2]]),
        ("iji->j", vec![&[2, 3, 2]]),
        ("...ij,...jk", vec![&[2, 2, 3], &[1, 3, 2]]),
    ] {
        let arguments = lengths.iter().map(|l| floats(rng, l)).collect();
        check(equation, rng, arguments, |_, x| {
            x[0].trace().einsum(equation, x)
        });
    }
}

#[test]
fn losses() {
    let rng = &mut Rng(16);
    let (x, target) = (
        floats(rng, &[3, 4]),
        array(rng, F32, &[3, 4], (0.0, 1.0), 0),
    );
    check("logits", rng, vec![x.clone(), target.clone()], |_, x| {
        x[0].binary_cross_entropy_with_logits(x[1])
    });
    let probabilities = array(rng, F32, &[3, 4], (0.1, 0.9), 0);
    check(
        "probabilities",
        rng,
        vec![probabilities, target.clone()],
        |_, x| x[0].binary_cross_entropy(x[1]),
    );
    for delta in [0.3, 1.0, 9.0] {
        check("huber", rng, vec![x.clone(), target.clone()], |_, x| {
            x[0].huber(x[1], delta)
        });
    }
    let labels = array(rng, I32, &[3], (0.0, 0.0), 4);
    for smoothing in [0.0, 0.1, 1.0] {
        check(
            "cross entropy",
            rng,
            vec![x.clone(), labels.clone()],
            |_, x| x[0].cross_entropy_smoothed(x[1], smoothing),
        );
    }
    check("mse", rng, vec![x.clone(), target], |_, x| x[0].mse(x[1]));
    check("softmax", rng, vec![x.clone()], |_, x| x[0].softmax(0));
    check("log softmax", rng, vec![x.clone()], |_, x| {
        x[0].log_softmax(1)
    });
    check("logsumexp", rng, vec![x], |_, x| x[0].logsumexp(1));
}
