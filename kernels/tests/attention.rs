//! Attention and its gradients against double precision, on every instruction set.

#[allow(dead_code)]
mod common;

use common::*;
use slabwise_kernels::cpu::{Isa, Team};
use slabwise_kernels::size::{Env, Size};
use slabwise_kernels::spec::{Attention, AttentionGrad, Body, Operand, Scores, Spec};

/// The sizes of a case: axes of heads, then these.
#[derive(Clone, Copy, Debug)]
struct Case {
    batch: usize,
    heads: usize,
    queries: usize,
    keys: usize,
    width: usize,
    columns: usize,
    scores: Scores,
}

/// How rows of a head lie in memory.
#[derive(Clone, Copy, Debug)]
enum Layout {
    /// `[batch, heads, rows, width]`.
    Contiguous,
    /// `[batch, rows, heads, width]`, with other elements between the rows.
    Joined,
    /// `[batch, heads, width, rows]`.
    Transposed,
    /// `[rows, width]`, the same for every head.
    Shared,
}

impl Layout {
    /// The operand of such rows, and the elements of its memory.
    fn operand(self, case: &Case, rows: usize, width: usize) -> (Operand, usize) {
        let [b, h, r, w] = [case.batch, case.heads, rows, width].map(|n| n as i64);
        let (offset, strides) = match self {
            Layout::Contiguous => (0, [h * r * w, r * w, w, 1]),
            Layout::Joined => (3, [r * (h * w + 5), w, h * w + 5, 1]),
            Layout::Transposed => (0, [h * r * w, r * w, 1, r]),
            Layout::Shared => (1, [0, 0, w, 1]),
        };
        let operand = operand(offset, &strides);
        let dims = [b, h, r, w].map(Size::fixed);
        let elements = operand.extent(&dims, &Env::default()) as usize;
        (operand, elements)
    }
}

/// An element of an operand.
fn element(values: &[f32], operand: &Operand, at: [usize; 4]) -> f64 {
    let env = Env::default();
    let steps = operand
        .strides
        .iter()
        .zip(at)
        .map(|(s, c)| s.usize_at(&env) * c);
    f64::from(values[operand.offset.usize_at(&env) + steps.sum::<usize>()])
}

fn spec(body: Body, dims: &[usize]) -> Spec {
    Spec {
        body,
        dims: dims.iter().map(|&d| Size::fixed(d as i64)).collect(),
        reduced: 0,
        operands: vec![],
        indices: vec![],
        code: vec![],
        stores: vec![],
    }
}

/// Results and gradients of one head in double precision.
struct Expected {
    y: Vec<Vec<f64>>,
    /// Of queries, keys and values, by rows.
    gradients: Vec<Vec<f64>>,
}

fn oracle(case: &Case, args: &[(&Vec<f32>, &Operand)], head: [usize; 2]) -> Expected {
    let rows = |i: usize, rows: usize, width: usize| -> Vec<Vec<f64>> {
        let (values, operand) = args[i];
        let row = |r| {
            (0..width)
                .map(|c| element(values, operand, [head[0], head[1], r, c]))
                .collect()
        };
        (0..rows).map(row).collect()
    };
    let (q, k) = (
        rows(0, case.queries, case.width),
        rows(1, case.keys, case.width),
    );
    let v = rows(2, case.keys, case.columns);
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let scale = f64::from(case.scores.scale);
    let mut y = vec![vec![0.0; case.columns]; case.queries];
    let mut gradients = vec![vec![0.0; case.width]; case.queries + 2 * case.keys];
    let dy = (args.len() > 3).then(|| rows(3, case.queries, case.columns));
    for row in 0..case.queries {
        let seen = case.scores.visible(row, case.keys);
        let scores: Vec<f64> = seen
            .clone()
            .map(|key| dot(&q[row], &k[key]) * scale)
            .collect();
        let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let powers: Vec<f64> = scores.iter().map(|s| (s - largest).exp()).collect();
        let sum: f64 = powers.iter().sum();
        for column in 0..case.columns {
            let terms = seen.clone().zip(&powers).map(|(key, p)| p * v[key][column]);
            y[row][column] = terms.sum::<f64>() / sum;
        }
        let Some(dy) = &dy else { continue };
        let delta = dot(&dy[row], &y[row]);
        for (key, power) in seen.zip(&powers) {
            let p = power / sum;
            let ds = p * (dot(&dy[row], &v[key]) - delta) * scale;
            for column in 0..case.width {
                gradients[row][column] += ds * k[key][column];
                gradients[case.queries + key][column] += ds * q[row][column];
                gradients[case.queries + case.keys + key][column] += p * dy[row][column];
            }
        }
    }
    Expected { y, gradients }
}

fn draw(random: &mut Random) -> Case {
    let width = random.of(&[1, 3, 8, 20, 32, 64]);
    let queries = random.of(&[1, 2, 7, 16, 31, 33, 70]);
    let keys = random.of(&[1, 5, 16, 33, 64, 90, 600]);
    Case {
        batch: random.int(1, 2),
        heads: random.int(1, 3),
        queries,
        keys: if random.int(0, 1) == 0 { queries } else { keys },
        width,
        columns: width,
        scores: Scores {
            scale: random.of(&[1.0 / (width as f32).sqrt(), 1.0, -0.5]),
            causal: random.int(0, 2) > 0,
            window: random.of(&[None, None, Some(1), Some(9), Some(40)]),
            past: random.of(&[0, 0, 3, 20]),
        },
    }
}

const LAYOUTS: [Layout; 4] = [
    Layout::Contiguous,
    Layout::Joined,
    Layout::Transposed,
    Layout::Shared,
];

/// Every element within a bound of the oracle's, NaN where that is NaN.
fn check(case: &Case, isa: Isa, name: &str, got: f64, expected: f64, bound: f64) {
    assert!(
        (got - expected).abs() <= bound || got.is_nan() && expected.is_nan(),
        "{isa}: {name} is {got}, not {expected} ± {bound}: {case:?}"
    );
}

#[test]
fn attention_and_its_gradients_match_double_precision() {
    // Fewer heads than threads, as many, and more.
    let teams: Vec<Team> = [1, 2, 3, 4, 9].map(Team::new).into();
    let mut random = Random(71);
    for round in 0..60 {
        let mut case = draw(&mut random);
        if round % 20 == 7 {
            // Several blocks of panels.
            (case.queries, case.width, case.columns) = (620, 4, 4);
        }
        if round % 3 == 0 {
            case.columns = random.of(&[1, 5, 16, 40]);
        }
        let mut operands = vec![];
        let shapes = [
            (case.queries, case.width),
            (case.keys, case.width),
            (case.keys, case.columns),
            (case.queries, case.columns),
        ];
        for (i, (rows, width)) in shapes.into_iter().enumerate() {
            let most = if i < 3 { 4 } else { 3 };
            let layout = LAYOUTS[random.int(0, most - 1)];
            operands.push(layout.operand(&case, rows, width));
        }
        let mut args: Vec<Vec<f32>> = operands.iter().map(|o| random.floats(o.1)).collect();
        let attention = Attention {
            scores: case.scores,
            width: Size::fixed(case.width as i64),
            keys: Size::fixed(case.keys as i64),
            q: operands[0].0.clone(),
            k: operands[1].0.clone(),
            v: operands[2].0.clone(),
            result: operands[3].0.clone(),
        };
        let dims = [case.batch, case.heads, case.queries, case.columns];
        let forward = spec(Body::Attention(Box::new(attention.clone())), &dims);
        let env = Env::default();
        let all = heads(&case);
        // Scores are at most `width · scale` and have roundings of as many terms.
        let terms = (case.width + 8) as f64 * f64::from(case.scores.scale.abs()).max(1.0);
        let bound = 4.0 * f64::from(f32::EPSILON) * terms;
        let mut results = vec![];
        for (isa, got) in run_all(&forward, &env, &env, &teams, &args) {
            for &head in &all {
                let given: Vec<_> = (0..3).map(|i| (&args[i], &operands[i].0)).collect();
                let expected = oracle(&case, &given, head);
                for (row, expected) in expected.y.iter().enumerate() {
                    for (column, &expected) in expected.iter().enumerate() {
                        let at = [head[0], head[1], row, column];
                        let got = element(&got[3], &operands[3].0, at);
                        check(&case, isa, "an element", got, expected, bound);
                    }
                }
            }
            results.push((isa, got[3].clone()));
        }
        if case.columns != case.width {
            continue;
        }
        let layout = LAYOUTS[random.int(0, 3)];
        let dy = layout.operand(&case, case.queries, case.width);
        let rows = case.queries + 2 * case.keys;
        let layout = LAYOUTS[random.int(0, 2)];
        let result = layout.operand(&case, rows, case.width);
        let grad = AttentionGrad {
            of: attention,
            queries: Size::fixed(case.queries as i64),
            dy: dy.0.clone(),
            result: result.0.clone(),
        };
        let dims = [case.batch, case.heads, rows, case.width];
        let backward = spec(Body::AttentionGrad(Box::new(grad)), &dims);
        args[3] = results[0].1.clone();
        args.extend([random.floats(dy.1), random.floats(result.1)]);
        let largest = case.queries.max(case.keys).max(case.width) as f64;
        for (isa, got) in run_all(&backward, &env, &env, &teams, &args) {
            for &head in &all {
                let given: Vec<_> = (0..3).map(|i| (&args[i], &operands[i].0)).collect();
                let given = [given, vec![(&args[4], &dy.0)]].concat();
                let expected = oracle(&case, &given, head);
                for (row, values) in expected.gradients.iter().enumerate() {
                    for (column, &expected) in values.iter().enumerate() {
                        let at = [head[0], head[1], row, column];
                        let got = element(&got[5], &result.0, at);
                        let bound = 8.0 * bound * largest.sqrt();
                        check(&case, isa, "a gradient", got, expected, bound);
                    }
                }
            }
        }
    }
}

fn heads(case: &Case) -> Vec<[usize; 2]> {
    (0..case.batch * case.heads)
        .map(|head| [head / case.heads, head % case.heads])
        .collect()
}
