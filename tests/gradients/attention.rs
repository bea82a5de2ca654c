//! Attention and its gradients of any order.

use slabwise_compiler::ops::{GraphBuilder, attention};
use slabwise_kernels::dtype::DType;
use slabwise_kernels::spec::Scores;

use super::support::Rng;
use super::{Case, floats};

/// Attention with values as wide as keys, whose gradient is one operation, and with other values.
pub(super) fn attended(rng: &mut Rng, cases: &mut Vec<Case>) {
    let plain = Scores {
        scale: 0.7,
        soft_cap: None,
        causal: false,
        window: None,
        past: 0,
        step: 1,
    };
    let capped = Scores {
        soft_cap: Some(0.6),
        causal: true,
        past: 1,
        ..plain
    };
    for (scores, columns) in [
        (plain, 4),
        (plain, 3),
        (capped, 4),
        (capped, 3),
        (
            Scores {
                causal: true,
                past: 1,
                ..plain
            },
            4,
        ),
        (
            Scores {
                causal: true,
                window: Some(2),
                ..plain
            },
            4,
        ),
        (
            Scores {
                window: Some(2),
                ..plain
            },
            3,
        ),
    ] {
        let arguments = vec![
            floats(rng, &[2, 2, 3, 4]),
            floats(rng, &[2, 2, 5, 4]),
            floats(rng, &[2, 2, 5, columns]),
        ];
        cases.push(Case::new(
            format!("attention by {scores:?} of {columns} columns"),
            arguments.clone(),
            move |g, x| {
                let y = attention(g, scores, x, DType::F32);
                g.mul(y, y)
            },
        ));
        // With a mask, whose gradient is needed too: of all pairs, and of keys alone.
        for shape in [[2, 2, 3, 5], [2, 1, 1, 5]] {
            let mut arguments = arguments.clone();
            arguments.push(floats(rng, &shape));
            cases.push(Case::new(
                format!("attention by {scores:?} of {columns} columns, mask {shape:?}"),
                arguments,
                move |g, x| {
                    let mut dims = g.dims(x[0]).clone();
                    dims[3] = g.dims(x[1])[2];
                    let mask = g.broadcast(x[3], &dims);
                    let y = attention(g, scores, &[x[0], x[1], x[2], mask], DType::F32);
                    g.mul(y, y)
                },
            ));
        }
    }
}
