//! Attention and its gradients of any order.

use slabwise_compiler::ops::{GraphBuilder, attention};
use slabwise_kernels::spec::Scores;

use super::support::Rng;
use super::{Case, floats};

/// Attention with values as wide as keys, whose gradient is one operation, and with other values.
pub(super) fn attended(rng: &mut Rng, cases: &mut Vec<Case>) {
    let plain = Scores {
        scale: 0.7,
        causal: false,
        window: None,
        past: 0,
    };
    for (scores, columns) in [
        (plain, 4),
        (plain, 3),
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
            arguments,
            move |g, x| {
                let y = attention(g, scores, x[0], x[1], x[2]);
                g.mul(y, y)
            },
        ));
    }
}
