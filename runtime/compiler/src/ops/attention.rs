//! Scaled dot-product attention (Vaswani et al. 2017) as one operation, its gradient as another, and
//! both as products and elementwise operations.
//!
//! Operands are queries `[b, …, q, width]`, keys `[b, …, k, width]` and values `[b, …, k, columns]`.
//! Results have the rows behind the first axis, `[b, q, …, columns]`: so they lie in memory as the
//! layers behind attention read them, with heads side by side.

use slabwise_kernels::dtype::DType;
use slabwise_kernels::scalar::ScalarOp;
use slabwise_kernels::size::Size;
use slabwise_kernels::spec::{Dims, ReduceOp, Scores};
use smallvec::SmallVec;

use super::rules::{Gradients, Rule, TensorType};
use super::{Axes, GraphBuilder, NodeId, Op};
use crate::shape::Symbols;

/// The last two axes: rows and columns.
fn last_two(dims: &[Size]) -> Option<[Size; 2]> {
    match *dims {
        [_, .., rows, columns] => Some([rows, columns]),
        _ => None,
    }
}

/// The axes of `[b, rows, …, columns]` in the order of `[b, …, rows, columns]`.
pub fn rows_last(rank: usize) -> Axes {
    (0..1).chain(2..rank - 1).chain([1, rank - 1]).collect()
}

/// The axes of `[b, …, rows, columns]` in the order of `[b, rows, …, columns]`.
pub(crate) fn rows_second(rank: usize) -> Axes {
    (0..1)
        .chain([rank - 2])
        .chain(1..rank - 2)
        .chain([rank - 1])
        .collect()
}

/// `[b, …, columns]` with rows behind the first axis.
fn with_rows(operand: &[Size], rows: Size, columns: Size) -> Dims {
    let between = &operand[1..operand.len() - 2];
    let first = [operand[0], rows];
    first
        .iter()
        .chain(between)
        .copied()
        .chain([columns])
        .collect()
}

/// The rows of a gradient: of queries, keys and values.
fn rows_of_gradient(queries: Size, keys: Size) -> Option<Size> {
    queries.checked_add(keys)?.checked_add(keys)
}

pub(super) fn infer(given: &[TensorType<'_>], symbols: &Symbols) -> Rule {
    let [q, k, v] = [given[0], given[1], given[2]];
    let say = |why: &str| {
        let shown = [q, k, v].map(|x| symbols.show(x.dims).to_string());
        Err(format!(
            "attention of {}, {} and {}: {why}",
            shown[0], shown[1], shown[2]
        ))
    };
    if [q, k, v].iter().any(|x| x.dtype != DType::F32) {
        return say("f32 is needed");
    }
    let rank = q.dims.len();
    let [Some([queries, width]), Some(of_keys), Some([keys, columns])] =
        [q, k, v].map(|x| last_two(x.dims))
    else {
        return say("each needs three axes");
    };
    let same = [k, v]
        .iter()
        .all(|x| x.dims.len() == rank && x.dims[..rank - 2] == q.dims[..rank - 2]);
    if rank < 3 || !same || of_keys != [keys, width] {
        return say("the shapes do not fit");
    }
    Ok((DType::F32, with_rows(q.dims, queries, columns)))
}

pub(super) fn infer_grad(given: &[TensorType<'_>], symbols: &Symbols) -> Rule {
    let (dtype, result) = infer(given, symbols)?;
    let [q, k, y, dy] = [given[0], given[1], given[3], given[4]];
    let fits = |x: TensorType<'_>| x.dtype == dtype && x.dims == result.as_slice();
    let (Some([queries, width]), Some([keys, _])) = (last_two(q.dims), last_two(k.dims)) else {
        return Err("the gradient of attention: each operand needs three axes".into());
    };
    if !fits(y) || !fits(dy) || result.last() != Some(&width) {
        return Err("the gradient of attention: the shapes do not fit".into());
    }
    let rows =
        rows_of_gradient(queries, keys).ok_or("attention: its rows have no form as one size")?;
    Ok((dtype, with_rows(q.dims, rows, width)))
}

/// The result for operands that fit.
pub fn attention(
    g: &mut dyn GraphBuilder,
    scores: Scores,
    q: NodeId,
    k: NodeId,
    v: NodeId,
) -> NodeId {
    let columns = *g.dims(v).last().expect("of three axes");
    let dims = g.dims(q);
    let dims = with_rows(dims, dims[dims.len() - 2], columns);
    g.emit(Op::Attention(scores), &[q, k, v], DType::F32, dims)
}

pub(super) fn gradient(
    g: &mut dyn GraphBuilder,
    scores: Scores,
    node: NodeId,
    inputs: &[NodeId],
    dy: NodeId,
) -> Gradients {
    let [q, k, v] = [inputs[0], inputs[1], inputs[2]];
    let [queries, keys] = [q, k].map(|x| g.dims(x)[g.dims(x).len() - 2]);
    let rows = rows_of_gradient(queries, keys);
    let (Some(rows), true) = (rows, g.dims(q).last() == g.dims(v).last()) else {
        let parts = gradients_of_parts(g, scores, inputs, node, dy);
        return parts.into_iter().map(Some).collect();
    };
    let width = *g.dims(q).last().expect("of three axes");
    let dims = with_rows(g.dims(q), rows, width);
    let all = g.emit(
        Op::AttentionGrad(scores),
        &[q, k, v, node, dy],
        DType::F32,
        dims,
    );
    split(g, all, queries, keys).into_iter().map(Some).collect()
}

/// The rows of queries, keys and values of a gradient, as `[b, …, rows, width]`.
fn split(g: &mut dyn GraphBuilder, all: NodeId, queries: Size, keys: Size) -> [NodeId; 3] {
    let (dims, dtype) = (g.dims(all).clone(), g.dtype(all));
    let behind = queries.checked_add(keys).expect("the rows have a form");
    [(Size::ZERO, queries), (queries, keys), (behind, keys)].map(|(first, rows)| {
        let (mut part, mut start) = (dims.clone(), Dims::from_elem(Size::ZERO, dims.len()));
        (part[1], start[1]) = (rows, first);
        let step = SmallVec::from_elem(1, dims.len());
        let part = g.emit(Op::Slice { start, step }, &[all], dtype, part);
        g.permute(part, &rows_last(dims.len()))
    })
}

/// Whether the key of a column is visible to the query of a row, over `[…, rows, columns]`; `None` if
/// all are. Rows are `step` positions apart, from `past` and the number `more` of each place on.
pub fn visible(
    g: &mut dyn GraphBuilder,
    scores: &Scores,
    (step, more): (i64, Option<NodeId>),
    dims: &Dims,
) -> Option<NodeId> {
    let rank = dims.len();
    let along = |g: &mut dyn GraphBuilder, axis: usize, step: i64| {
        let mut strides: Dims = SmallVec::from_elem(Size::ZERO, rank);
        strides[axis] = Size::fixed(step);
        g.emit(Op::Index(strides), &[], DType::I32, dims.clone())
    };
    if !scores.causal && scores.window.is_none() {
        return None;
    }
    let shifted = |g: &mut dyn GraphBuilder, x: NodeId, by: u32| {
        // As a float, a position is exact up to 2²⁴; no machine has memory for the scores of more.
        let by = g.full(by as f32, DType::I32, dims);
        g.add(x, by)
    };
    let (row, column) = (along(g, rank - 2, step), along(g, rank - 1, 1));
    let row = shifted(g, row, scores.past);
    let row = match more {
        Some(more) => {
            let more = g.broadcast(more, dims);
            g.add(row, more)
        }
        None => row,
    };
    let causal = scores
        .causal
        .then(|| g.scalar(ScalarOp::Le, &[column, row]));
    let Some(window) = scores.window else {
        return causal;
    };
    let window = window.min(i32::MAX as u32 / 2);
    let end = shifted(g, column, window);
    let near = g.scalar(ScalarOp::Gt, &[end, row]);
    let other = causal.unwrap_or_else(|| {
        let end = shifted(g, row, window);
        g.scalar(ScalarOp::Lt, &[column, end])
    });
    Some(g.scalar(ScalarOp::And, &[other, near]))
}

/// The exponentials of the scores, relative to the largest of each query, and their sums.
fn exponentials(g: &mut dyn GraphBuilder, scores: &Scores, q: NodeId, k: NodeId) -> [NodeId; 2] {
    let kt = g.transpose(k);
    let products = g.matmul(q, kt);
    let dims = g.dims(products).clone();
    let scale = g.full(scores.scale, DType::F32, &dims);
    let mut all = g.mul(products, scale);
    if let Some(sees) = visible(g, scores, (1, None), &dims) {
        let hidden = g.full(f32::NEG_INFINITY, DType::F32, &dims);
        all = g.scalar(ScalarOp::Select, &[sees, all, hidden]);
    }
    let last = dims.len() - 1;
    let largest = g.reduce(ReduceOp::Max, all, &[last]);
    let largest = g.broadcast(largest, &dims);
    let all = g.scalar(ScalarOp::Sub, &[all, largest]);
    let powers = g.scalar(ScalarOp::Exp, &[all]);
    [powers, g.reduce(ReduceOp::Sum, powers, &[last])]
}

/// [`attention`] by products and elementwise operations.
pub(crate) fn attention_of_parts(
    g: &mut dyn GraphBuilder,
    scores: &Scores,
    inputs: &[NodeId],
) -> NodeId {
    let [powers, sums] = exponentials(g, scores, inputs[0], inputs[1]);
    let y = g.matmul(powers, inputs[2]);
    let dims = g.dims(y).clone();
    let sums = g.broadcast(sums, &dims);
    let y = g.scalar(ScalarOp::Div, &[y, sums]);
    g.permute(y, &rows_second(dims.len()))
}

/// The weights P of queries and keys, and the terms dP − δ of the gradient of their scores.
fn weights(
    g: &mut dyn GraphBuilder,
    scores: &Scores,
    [q, k, v]: [NodeId; 3],
    [y, dy]: [NodeId; 2],
) -> [NodeId; 2] {
    let [powers, sums] = exponentials(g, scores, q, k);
    let dims = g.dims(powers).clone();
    let sums = g.broadcast(sums, &dims);
    let p = g.scalar(ScalarOp::Div, &[powers, sums]);
    let vt = g.transpose(v);
    let dp = g.matmul(dy, vt);
    let products = g.mul(dy, y);
    let delta = g.reduce(ReduceOp::Sum, products, &[dims.len() - 1]);
    let delta = g.broadcast(delta, &dims);
    [p, g.scalar(ScalarOp::Sub, &[dp, delta])]
}

/// The gradients of queries, keys and values by products and elementwise operations: `dQ = dS·K`, `dK = dSᵀ·Q` and `dV = Pᵀ·dY` with
/// `dS = scale·P∘(dY·Vᵀ − δ)` and δ the sums of dY∘Y along rows.
pub(crate) fn gradients_of_parts(
    g: &mut dyn GraphBuilder,
    scores: Scores,
    inputs: &[NodeId],
    y: NodeId,
    dy: NodeId,
) -> [NodeId; 3] {
    let [q, k, v] = [inputs[0], inputs[1], inputs[2]];
    let [y, dy] = [y, dy].map(|x| g.permute(x, &rows_last(g.dims(x).len())));
    let [p, centred] = weights(g, &scores, [q, k, v], [y, dy]);
    let ds = scaled(g, p, centred, scores.scale);
    let [dst, pt] = [ds, p].map(|x| g.transpose(x));
    [g.matmul(ds, k), g.matmul(dst, q), g.matmul(pt, dy)]
}

/// `scale·a∘b`.
fn scaled(g: &mut dyn GraphBuilder, a: NodeId, b: NodeId, scale: f32) -> NodeId {
    let product = g.mul(a, b);
    let scale = g.full(scale, DType::F32, &g.dims(a).clone());
    g.mul(product, scale)
}

/// The gradient of [`Op::AttentionGrad`] with respect to its five operands. With cotangents A, B and C
/// of dQ, dK and dV, `G = A·Kᵀ + Q·Bᵀ` is that of dS, `W = scale·G∘P` that of dP − δ,
/// `U = scale·G∘(dP − δ) + dY·Cᵀ` that of P, and `H = P∘(U − Σ P∘U)` that of the scores.
pub(super) fn gradient_of_grad(
    g: &mut dyn GraphBuilder,
    scores: Scores,
    inputs: &[NodeId],
    cotangent: NodeId,
) -> Gradients {
    let [q, k, v] = [inputs[0], inputs[1], inputs[2]];
    let rank = g.dims(q).len();
    let [queries, keys] = [q, k].map(|x| g.dims(x)[rank - 2]);
    let [a, b, c] = split(g, cotangent, queries, keys);
    let [y, dy] = [inputs[3], inputs[4]].map(|x| g.permute(x, &rows_last(rank)));
    let [p, centred] = weights(g, &scores, [q, k, v], [y, dy]);
    let dims = g.dims(p).clone();
    let row_sums = |g: &mut dyn GraphBuilder, x: NodeId| g.reduce(ReduceOp::Sum, x, &[rank - 1]);
    let product = |g: &mut dyn GraphBuilder, x: NodeId, transposed: NodeId| {
        let transposed = g.transpose(transposed);
        g.matmul(x, transposed)
    };
    let of_a = product(g, a, k);
    let of_b = product(g, q, b);
    let of_ds = g.add(of_a, of_b);
    let w = scaled(g, of_ds, p, scores.scale);
    let of_c = product(g, dy, c);
    let rest = scaled(g, of_ds, centred, scores.scale);
    let u = g.add(rest, of_c);
    let pu = g.mul(p, u);
    let sums = row_sums(g, pu);
    let sums = g.broadcast(sums, &dims);
    let u = g.scalar(ScalarOp::Sub, &[u, sums]);
    let h = g.mul(p, u);
    // The scores are scaled products of queries and keys.
    let scale = g.full(scores.scale, DType::F32, &dims);
    let h = g.mul(h, scale);
    let ds = scaled(g, p, centred, scores.scale);
    let sum_of = |g: &mut dyn GraphBuilder, [a, b]: [NodeId; 2], [c, d]: [NodeId; 2]| {
        let (left, right) = (g.matmul(a, b), g.matmul(c, d));
        g.add(left, right)
    };
    let [ht, dst, wt] = [h, ds, w].map(|x| g.transpose(x));
    let of_q = sum_of(g, [h, k], [ds, b]);
    let of_k = sum_of(g, [ht, q], [dst, a]);
    let of_v = g.matmul(wt, dy);
    let delta = row_sums(g, w);
    let delta = g.broadcast(delta, &g.dims(y).clone());
    let of_y = g.mul(delta, dy);
    let of_y = g.scalar(ScalarOp::Neg, &[of_y]);
    let through_weights = sum_of(g, [w, v], [p, c]);
    let through_delta = g.mul(delta, y);
    let of_dy = g.scalar(ScalarOp::Sub, &[through_weights, through_delta]);
    let back = rows_second(rank);
    let [of_y, of_dy] = [of_y, of_dy].map(|x| g.permute(x, &back));
    [of_q, of_k, of_v, of_y, of_dy]
        .into_iter()
        .map(Some)
        .collect()
}
