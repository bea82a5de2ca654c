//! Calls of attention, and their weights and gradients by formulas.

use ndarray::{Array2, Array4, ArrayD, IxDyn};
use slabwise::Precision;
use slabwise::prelude::*;
use slabwise::tensor::AttentionOptions;

use super::support::Rng;
use super::{BATCH, WIDTH, random};

/// The key that a mask hides from a query; the first is never hidden, because a query without keys
/// has no weights.
fn hides(query: usize, key: usize) -> bool {
    key > 0 && (3 * query + 5 * key).is_multiple_of(4)
}

/// The number that a mask adds to a score.
fn bias(query: usize, key: usize) -> f32 {
    match hides(query, key) {
        true => f32::NEG_INFINITY,
        false => (query as f32 - 2.0 * key as f32) * 0.05,
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Masked {
    No,
    Seen,
    Added,
}

/// One call of attention. The values are an identity matrix, so that its result is the matrix of the
/// weights.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    pub heads: usize,
    pub key_heads: usize,
    pub queries: usize,
    pub keys: usize,
    pub causal: bool,
    pub past: usize,
    /// The past is an input of the run.
    pub at_run: bool,
    pub window: Option<usize>,
    pub mask: Masked,
    pub cap: Option<f32>,
    pub tiles: Tiles,
    pub stored: DType,
    pub precision: Precision,
    pub p: f32,
}

pub const PLAIN: Case = Case {
    heads: 4,
    key_heads: 4,
    queries: 11,
    keys: 13,
    causal: false,
    past: 0,
    at_run: false,
    window: None,
    mask: Masked::No,
    cap: None,
    tiles: Tiles::Auto,
    stored: F32,
    precision: Precision::F32,
    p: 0.3,
};

/// Weights, and the gradients in queries, keys and values of the sum of their products with random
/// factors.
pub struct Attended {
    pub weights: ArrayD<f32>,
    pub gradients: [ArrayD<f32>; 3],
}

impl Case {
    pub fn queries(&self) -> ArrayD<f32> {
        random(&mut Rng(1), &[BATCH, self.heads, self.queries, WIDTH])
    }

    pub fn keys(&self) -> ArrayD<f32> {
        random(&mut Rng(2), &[BATCH, self.key_heads, self.keys, WIDTH])
    }

    fn factors(&self) -> ArrayD<f32> {
        random(&mut Rng(3), &[BATCH, self.heads, self.queries, self.keys])
    }

    pub fn options<'t>(&self, trace: &'t Trace) -> AttentionOptions<'t> {
        let mut options = AttentionOptions::new().tiles(self.tiles);
        if self.causal {
            options = options.causal();
        }
        if let Some(window) = self.window {
            options = options.window(window);
        }
        if let Some(cap) = self.cap {
            options = options.soft_cap(cap);
        }
        options = match self.at_run {
            true => options.past_of_run(trace.full(self.past as f32, I32, ())),
            false => options.past(self.past),
        };
        let lengths = (self.queries, self.keys);
        let mask = match self.mask {
            Masked::No => Mask::None,
            Masked::Seen => {
                let seen = Array2::from_shape_fn(lengths, |(query, key)| !hides(query, key));
                Mask::Seen(trace.constant(&seen))
            }
            Masked::Added => {
                let biases = Array2::from_shape_fn(lengths, |(query, key)| bias(query, key));
                Mask::Added(trace.constant(&biases))
            }
        };
        options.mask(mask)
    }

    /// Runs a training step so many times, and gives the last results.
    pub fn run(&self, seed: u64, steps: usize) -> Attended {
        let trace = Trace::training().with_precision(self.precision);
        let q = trace.input("q", F32, (BATCH, self.heads, self.queries, WIDTH));
        let k = trace.input("k", F32, (BATCH, self.key_heads, self.keys, WIDTH));
        let v = trace.input("v", F32, (BATCH, self.key_heads, self.keys, self.keys));
        let factors = trace.input("factors", F32, (BATCH, self.heads, self.queries, self.keys));
        let options = self.options(&trace).dropout(self.p);
        let [stored_k, stored_v] = [k, v].map(|x| x.cast(self.stored));
        let y = q.attention_with(stored_k, stored_v, options);
        let [dq, dk, dv] = trace.gradients((y * factors).sum(), [q, k, v]);
        let mut session = Session::new(Device::Cpu, Params::seeded(seed))
            .expect("a session")
            .with_threads(2);
        let program = session
            .compile(&trace, [y, dq, dk, dv])
            .expect("it compiles");
        let lengths = (BATCH, self.key_heads, self.keys, self.keys);
        let v = Array4::from_shape_fn(lengths, |(_, _, row, column)| f32::from(row == column));
        let (q, k, factors) = (self.queries(), self.keys(), self.factors());
        let mut got = None;
        for _ in 0..steps {
            let outputs = session
                .run(&program, (&q, &k, &v, &factors))
                .expect("it runs");
            got = Some(outputs.map(|output| output.array::<f32>().expect("f32")));
        }
        let [weights, dq, dk, dv] = got.expect("a step");
        Attended {
            weights,
            gradients: [dq, dk, dv],
        }
    }

    fn is_visible(&self, query: usize, key: usize) -> bool {
        let position = query + self.past;
        (!self.causal || key <= position)
            && self
                .window
                .is_none_or(|window| position.abs_diff(key) < window)
            && (self.mask == Masked::No || !hides(query, key))
    }

    /// The scores of a query, before masks, and its weights without dropout.
    fn row(&self, q: &ArrayD<f32>, k: &ArrayD<f32>, [b, h, i]: [usize; 3]) -> (Vec<f64>, Vec<f64>) {
        let of_keys = h / (self.heads / self.key_heads);
        let scores: Vec<f64> = (0..self.keys)
            .map(|j| {
                let product = |w| f64::from(q[[b, h, i, w]]) * f64::from(k[[b, of_keys, j, w]]);
                let score = (0..WIDTH).map(product).sum::<f64>() / (WIDTH as f64).sqrt();
                self.cap.map_or(score, |cap| {
                    f64::from(cap) * (score / f64::from(cap)).tanh()
                })
            })
            .collect();
        let exponentials = scores.iter().enumerate().map(|(j, score)| {
            let added = match self.mask {
                Masked::Added => f64::from(bias(i, j)),
                _ => 0.0,
            };
            if self.is_visible(i, j) {
                (score + added).exp()
            } else {
                0.0
            }
        });
        let exponentials: Vec<f64> = exponentials.collect();
        let sum: f64 = exponentials.iter().sum();
        (scores, exponentials.iter().map(|e| e / sum).collect())
    }

    fn places(&self) -> impl Iterator<Item = [usize; 3]> {
        let (heads, queries) = (self.heads, self.queries);
        (0..BATCH * heads * queries)
            .map(move |n| [n / queries / heads, n / queries % heads, n % queries])
    }

    /// Checks the weights: each is 0, or the softmax divided by 1 − p, and the share of the zeros
    /// among visible keys is p. Returns whether each visible weight is kept.
    pub fn check_weights(&self, got: &Attended, tolerance: f64) -> Vec<bool> {
        let (q, k) = (self.queries(), self.keys());
        assert_eq!(
            got.weights.shape(),
            [BATCH, self.heads, self.queries, self.keys]
        );
        let mut kept = Vec::new();
        for [b, h, i] in self.places() {
            let (_, weights) = self.row(&q, &k, [b, h, i]);
            for (j, weight) in weights.iter().enumerate() {
                let got = got.weights[[b, h, i, j]];
                if !self.is_visible(i, j) {
                    assert_eq!(got, 0.0, "a hidden key {j} of query {i}: {self:?}");
                    continue;
                }
                kept.push(got != 0.0);
                let right = weight / (1.0 - f64::from(self.p));
                assert!(
                    got == 0.0 || (f64::from(got) - right).abs() <= tolerance,
                    "{got} instead of {right} for key {j} of query {i}, {self:?}"
                );
            }
        }
        let dropped = kept.iter().filter(|&&kept| !kept).count();
        let (n, p) = (kept.len() as f64, f64::from(self.p));
        let off = dropped as f64 / n - p;
        // Five deviations.
        assert!(
            off.abs() <= 5.0 * (p * (1.0 - p) / n).sqrt(),
            "{dropped} of {n} weights are dropped: {self:?}"
        );
        kept
    }

    /// Checks the gradients by the weights that the forward pass has kept.
    pub fn check_gradients(&self, got: &Attended, tolerance: f64) {
        let (q, k, factors) = (self.queries(), self.keys(), self.factors());
        let mut expected = [
            ArrayD::<f64>::zeros(q.shape()),
            ArrayD::zeros(k.shape()),
            ArrayD::zeros(IxDyn(&[BATCH, self.key_heads, self.keys, self.keys])),
        ];
        for [b, h, i] in self.places() {
            let of_keys = h / (self.heads / self.key_heads);
            let (scores, weights) = self.row(&q, &k, [b, h, i]);
            let weight = |j: usize| f64::from(got.weights[[b, h, i, j]]);
            let factor = |j: usize| f64::from(factors[[b, h, i, j]]);
            let mean: f64 = (0..self.keys).map(|j| weight(j) * factor(j)).sum();
            for j in 0..self.keys {
                let slope = self
                    .cap
                    .map_or(1.0, |cap| 1.0 - (scores[j] / f64::from(cap)).powi(2));
                let of_score =
                    (weight(j) * factor(j) - weights[j] * mean) * slope / (WIDTH as f64).sqrt();
                for w in 0..WIDTH {
                    expected[0][[b, h, i, w]] += of_score * f64::from(k[[b, of_keys, j, w]]);
                    expected[1][[b, of_keys, j, w]] += of_score * f64::from(q[[b, h, i, w]]);
                }
                for n in 0..self.keys {
                    expected[2][[b, of_keys, j, n]] += weight(j) * factor(n);
                }
            }
        }
        for ((name, got), expected) in ["queries", "keys", "values"]
            .iter()
            .zip(&got.gradients)
            .zip(&expected)
        {
            assert_eq!(got.shape(), expected.shape());
            for (i, (got, right)) in got.iter().zip(expected).enumerate() {
                assert!(
                    (f64::from(*got) - right).abs() <= tolerance * (1.0 + right.abs()),
                    "{got} instead of {right}, element {i} of the gradient in {name}: {self:?}"
                );
            }
        }
    }
}

/// Masks, positions, groups of heads and single queries, each with all scores at once and in tiles.
pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let causal = Case {
        causal: true,
        ..PLAIN
    };
    let grouped = Case {
        key_heads: 2,
        ..causal
    };
    let single = Case {
        queries: 1,
        keys: 31,
        past: 30,
        ..causal
    };
    for tiles in [Tiles::Auto, Tiles::Whole, Tiles::Queries(4)] {
        cases.extend(
            [
                PLAIN,
                causal,
                Case { past: 2, ..causal },
                Case {
                    past: 2,
                    at_run: true,
                    ..causal
                },
                Case {
                    window: Some(3),
                    past: 2,
                    ..causal
                },
                Case {
                    window: Some(4),
                    ..PLAIN
                },
                Case {
                    mask: Masked::Seen,
                    ..causal
                },
                Case {
                    mask: Masked::Added,
                    ..PLAIN
                },
                Case {
                    cap: Some(0.7),
                    p: 0.6,
                    ..PLAIN
                },
                grouped,
                Case {
                    mask: Masked::Added,
                    past: 2,
                    ..grouped
                },
                Case {
                    key_heads: 1,
                    mask: Masked::Seen,
                    ..PLAIN
                },
                single,
                Case {
                    at_run: true,
                    ..single
                },
                Case {
                    key_heads: 2,
                    ..single
                },
                Case {
                    key_heads: 2,
                    at_run: true,
                    ..single
                },
            ]
            .map(|case| Case { tiles, ..case }),
        );
    }
    cases
}
