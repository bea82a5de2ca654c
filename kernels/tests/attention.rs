//! Attention and its gradients against double precision, on every instruction set.

#[allow(dead_code)]
mod common;

use common::*;
use half::{bf16, f16};
use slabwise_kernels::cpu::{Isa, Team};
use slabwise_kernels::dtype::DType;
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
    /// The types of queries, keys, values and the result.
    types: [DType; 4],
    mask: Option<(DType, Pairs)>,
    /// Whether a past is given for each of the batch.
    past: bool,
}

/// The axes that a mask has elements of its own along.
#[derive(Clone, Copy, Debug)]
enum Pairs {
    /// `[batch, heads, queries, keys]`.
    All,
    /// `[batch, 1, 1, keys]`, with other elements between those of the batch.
    Keys,
    /// `[heads, queries, keys]`, keys along columns.
    Transposed,
    /// `[queries, 1]`.
    Queries,
    /// Every other one of `[batch, 1, queries, 2·keys]`.
    Strided,
}

/// A tensor: its elements as numbers, and as words of their type.
struct Stored {
    values: Vec<f32>,
    words: Vec<f32>,
    operand: Operand,
}

/// The bits of an element of a type.
fn narrow(dtype: DType, x: f32) -> u32 {
    match dtype {
        DType::F16 => f16::from_f32(x).to_bits().into(),
        DType::BF16 => bf16::from_f32(x).to_bits().into(),
        DType::Bool => u32::from(x != 0.0),
        DType::I32 => (x as i32) as u32,
        _ => x.to_bits(),
    }
}

fn wide(dtype: DType, bits: u32) -> f32 {
    match dtype {
        DType::F16 => f16::from_bits(bits as u16).to_f32(),
        DType::BF16 => bf16::from_bits(bits as u16).to_f32(),
        DType::Bool => bits as f32,
        DType::I32 => bits as i32 as f32,
        _ => f32::from_bits(bits),
    }
}

/// The elements of words of a type.
fn unpack(dtype: DType, words: &[f32]) -> Vec<f32> {
    let (bytes, mut values) = (dtype.bytes(), vec![]);
    for word in words {
        for i in 0..4 / bytes {
            let bits = u64::from(word.to_bits()) >> (8 * bytes * i);
            values.push(wide(dtype, (bits & ((1 << (8 * bytes)) - 1)) as u32));
        }
    }
    values
}

impl Stored {
    fn new(dtype: DType, operand: Operand, values: Vec<f32>) -> Stored {
        let bytes = dtype.bytes();
        let word = |some: &[f32]| {
            let shifted = some.iter().enumerate();
            let bits = shifted.map(|(i, &x)| narrow(dtype, x) << (8 * bytes * i));
            f32::from_bits(bits.fold(0, |a, b| a | b))
        };
        Stored {
            words: values.chunks(4 / bytes).map(word).collect(),
            values: values
                .iter()
                .map(|&x| wide(dtype, narrow(dtype, x)))
                .collect(),
            operand: Operand { dtype, ..operand },
        }
    }
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

fn oracle(case: &Case, args: &[&Stored], dy: Option<&Stored>, head: [usize; 2]) -> Expected {
    let of = |stored: &Stored, rows: usize, width: usize| -> Vec<Vec<f64>> {
        let row = |r| {
            (0..width)
                .map(|c| element(&stored.values, &stored.operand, [head[0], head[1], r, c]))
                .collect()
        };
        (0..rows).map(row).collect()
    };
    let rows = |i: usize, rows: usize, width: usize| of(args[i], rows, width);
    let terms = case.mask.map(|(dtype, _)| {
        let mut terms = rows(3, case.queries, case.keys);
        if dtype == DType::Bool {
            for term in terms.iter_mut().flatten() {
                *term = if *term == 0.0 { f64::NEG_INFINITY } else { 0.0 };
            }
        }
        terms
    });
    let past = case.past.then(|| {
        let past = args[3 + usize::from(case.mask.is_some())];
        past.values[head[0]] as i32
    });
    let shape = case.scores.after(past.unwrap_or(0));
    let (q, k) = (
        rows(0, case.queries, case.width),
        rows(1, case.keys, case.width),
    );
    let v = rows(2, case.keys, case.columns);
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let scale = f64::from(case.scores.scale);
    let mut y = vec![vec![0.0; case.columns]; case.queries];
    let mut gradients = vec![vec![0.0; case.width]; case.queries + 2 * case.keys];
    let dy = dy.map(|dy| of(dy, case.queries, case.columns));
    for row in 0..case.queries {
        let term = |key: usize| terms.as_ref().map_or(0.0, |terms| terms[row][key]);
        let seen = shape.visible(row, case.keys);
        let seen: Vec<usize> = seen.filter(|&key| term(key) != f64::NEG_INFINITY).collect();
        let part = |key: usize| {
            let score = dot(&q[row], &k[key]) * scale;
            case.scores
                .soft_cap
                .map(|cap| (score / f64::from(cap)).tanh())
        };
        let score = |key: &usize| match (case.scores.soft_cap, part(*key)) {
            (Some(cap), Some(part)) => part * f64::from(cap) + term(*key),
            _ => dot(&q[row], &k[*key]) * scale + term(*key),
        };
        let scores: Vec<f64> = seen.iter().map(score).collect();
        let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let powers: Vec<f64> = scores.iter().map(|s| (s - largest).exp()).collect();
        let sum: f64 = powers.iter().sum();
        for column in 0..case.columns {
            let terms = seen.iter().zip(&powers).map(|(&key, p)| p * v[key][column]);
            y[row][column] = terms.sum::<f64>() / sum;
        }
        let Some(dy) = &dy else { continue };
        let delta = dot(&dy[row], &y[row]);
        for (&key, power) in seen.iter().zip(&powers) {
            let p = power / sum;
            let slope = part(key).map_or(1.0, |part| 1.0 - part * part);
            let ds = p * (dot(&dy[row], &v[key]) - delta) * scale * slope;
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
            soft_cap: random.of(&[None, None, Some(0.7), Some(30.0)]),
            causal: random.int(0, 2) > 0,
            window: random.of(&[None, None, Some(1), Some(9), Some(40)]),
            past: random.of(&[0, 0, 3, 20, -1]),
            step: random.of(&[1, 1, 1, 0]),
        },
        types: [0; 4].map(|_| random.of(&[DType::F32, DType::F32, DType::F16, DType::BF16])),
        mask: random.of(&MASKS),
        past: random.int(0, 3) == 0,
    }
}

const MASKS: [Option<(DType, Pairs)>; 12] = [
    None,
    None,
    None,
    Some((DType::F32, Pairs::All)),
    Some((DType::Bool, Pairs::All)),
    Some((DType::F32, Pairs::Keys)),
    Some((DType::Bool, Pairs::Keys)),
    Some((DType::BF16, Pairs::Keys)),
    Some((DType::F32, Pairs::Transposed)),
    Some((DType::Bool, Pairs::Transposed)),
    Some((DType::F16, Pairs::Strided)),
    Some((DType::F32, Pairs::Queries)),
];

/// A mask that hides some keys, and all of some queries.
fn mask(case: &Case, dtype: DType, pairs: Pairs, random: &mut Random) -> Stored {
    let [b, h, q, k] = [case.batch, case.heads, case.queries, case.keys].map(|n| n as i64);
    let (offset, strides, count) = match pairs {
        Pairs::All => (1, [h * q * k, q * k, k, 1], b * h * q * k),
        Pairs::Keys => (0, [k + 3, 0, 0, 1], b * (k + 3)),
        Pairs::Transposed => (0, [0, q * k, 1, q], h * q * k),
        Pairs::Queries => (2, [0, 0, 1, 0], q),
        Pairs::Strided => (0, [2 * q * k, 0, 2 * k, 2], 2 * b * q * k),
    };
    let hidden = random.of(&[2, 4, 400]);
    let values = (0..count + offset)
        .map(|_| match (random.int(0, hidden - 1), dtype) {
            (0, DType::Bool) => 0.0,
            (0, _) => f32::NEG_INFINITY,
            (_, DType::Bool) => 1.0,
            _ => 3.0 * random.float(),
        })
        .collect();
    Stored::new(dtype, operand(offset, &strides), values)
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
    for round in 0..120 {
        let mut case = draw(&mut random);
        if round % 20 == 7 {
            // Several blocks of panels.
            (case.queries, case.width, case.columns) = (620, 4, 4);
        }
        if round % 3 == 0 {
            case.columns = random.of(&[1, 5, 16, 40]);
        }
        let f32s = [DType::F32; 4];
        case.types = if round % 2 == 0 { f32s } else { case.types };
        let draw =
            |dtype: DType, layout: Layout, rows: usize, width: usize, random: &mut Random| {
                let (operand, count) = layout.operand(&case, rows, width);
                Stored::new(dtype, operand, random.floats(count))
            };
        let shapes = [
            (case.queries, case.width),
            (case.keys, case.width),
            (case.keys, case.columns),
        ];
        let mut sources = vec![];
        for (i, (rows, width)) in shapes.into_iter().enumerate() {
            let layout = LAYOUTS[random.int(0, 3)];
            sources.push(draw(case.types[i], layout, rows, width, &mut random));
        }
        let of_mask = case
            .mask
            .map(|(dtype, pairs)| mask(&case, dtype, pairs, &mut random));
        let has_mask = of_mask.is_some();
        sources.extend(of_mask);
        if case.past {
            let values = (0..case.batch).map(|_| random.int(0, 8) as f32 - 2.0);
            let past = Stored::new(DType::I32, operand(0, &[1, 0]), values.collect());
            sources.push(past);
        }
        let layout = LAYOUTS[random.int(0, 2)];
        let y = draw(
            case.types[3],
            layout,
            case.queries,
            case.columns,
            &mut random,
        );
        let attention = Attention {
            scores: case.scores,
            width: Size::fixed(case.width as i64),
            keys: Size::fixed(case.keys as i64),
            q: sources[0].operand.clone(),
            k: sources[1].operand.clone(),
            v: sources[2].operand.clone(),
            mask: has_mask.then(|| sources[3].operand.clone()),
            past: case
                .past
                .then(|| sources[sources.len() - 1].operand.clone()),
            result: y.operand.clone(),
        };
        let dims = [case.batch, case.heads, case.queries, case.columns];
        let forward = spec(Body::Attention(Box::new(attention.clone())), &dims);
        let env = Env::default();
        let all = heads(&case);
        let given: Vec<&Stored> = sources.iter().collect();
        let mut args: Vec<Vec<f32>> = given.iter().map(|s| s.words.clone()).collect();
        args.push(y.words.clone());
        // Scores are at most `width · scale` and have roundings of as many terms.
        let terms = (case.width + 8) as f64 * f64::from(case.scores.scale.abs()).max(1.0);
        let bound = 4.0 * f64::from(f32::EPSILON) * terms;
        // Results are rounded to their type; they are at most 1.
        let rounding = match case.types[3] {
            DType::F16 => 2f64.powi(-11),
            DType::BF16 => 2f64.powi(-8),
            _ => 0.0,
        };
        let mut results = vec![];
        for (isa, got) in run_all(&forward, &env, &env, &teams, &args) {
            let values = unpack(case.types[3], &got[sources.len()]);
            for &head in &all {
                let expected = oracle(&case, &given, None, head);
                for (row, expected) in expected.y.iter().enumerate() {
                    for (column, &expected) in expected.iter().enumerate() {
                        let at = [head[0], head[1], row, column];
                        let got = element(&values, &y.operand, at);
                        check(&case, isa, "an element", got, expected, bound + rounding);
                    }
                }
            }
            results.push(got[sources.len()].clone());
        }
        // The gradient of a rounded result is that of the exact one, and more.
        if case.columns != case.width || rounding > 0.0 {
            continue;
        }
        let layout = LAYOUTS[random.int(0, 3)];
        let dy = draw(DType::F32, layout, case.queries, case.width, &mut random);
        let rows = case.queries + 2 * case.keys;
        let layout = LAYOUTS[random.int(0, 2)];
        let result = draw(DType::F32, layout, rows, case.width, &mut random);
        let in_turns = case.queries == case.keys && random.int(0, 1) == 0;
        let grad = AttentionGrad {
            of: attention,
            queries: Size::fixed(case.queries as i64),
            dy: dy.operand.clone(),
            in_turns,
            gradients: result.operand.clone(),
        };
        let dims = [case.batch, case.heads, rows, case.width];
        let backward = spec(Body::AttentionGrad(Box::new(grad)), &dims);
        args[sources.len()] = results[0].clone();
        args.extend([dy.words.clone(), result.words]);
        let largest = case.queries.max(case.keys).max(case.width) as f64;
        for (isa, got) in run_all(&backward, &env, &env, &teams, &args) {
            for &head in &all {
                let expected = oracle(&case, &given, Some(&dy), head);
                for (row, values) in expected.gradients.iter().enumerate() {
                    let row = match in_turns {
                        true => row % case.queries * 3 + row / case.queries,
                        false => row,
                    };
                    for (column, &expected) in values.iter().enumerate() {
                        let at = [head[0], head[1], row, column];
                        let got = element(&got[sources.len() + 2], &result.operand, at);
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
