//! Scaled dot-product attention (Vaswani et al. 2017) as one operation, its gradient as another,
//! and both as products and elementwise operations.
//!
//! Operands are queries `[b, …, q, width]`, keys `[b, …, k, width]` and values `[b, …, k,
//! columns]`, then a mask `[b, …, q, k]` and a past `[b, …]`, i32, if there are any: a mask is
//! added to the scores, and −∞ in it hides a key of any score; or it has truth values, and false
//! hides a key. Halves are converted to f32, in which everything is computed. Results have the rows
//! after the first axis, `[b, q, …, columns]`, which is the layout that the layers after attention
//! read, with heads side by side.

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

/// `[b, …, columns]` with rows after the first axis.
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

/// The operands of attention, as types or nodes.
#[derive(Clone, Copy)]
pub(crate) struct Operands<T> {
    pub q: T,
    pub k: T,
    pub v: T,
    pub mask: Option<T>,
    pub past: Option<T>,
}

impl<T: Copy> Operands<T> {
    /// From a list of them; a past is i32.
    pub(crate) fn of(list: &[T], dtype: impl Fn(T) -> DType) -> Option<Operands<T>> {
        let [q, k, v, ref more @ ..] = *list else {
            return None;
        };
        let (mask, past) = match *more {
            [] => (None, None),
            [past] if dtype(past) == DType::I32 => (None, Some(past)),
            [mask] => (Some(mask), None),
            [mask, past] => (Some(mask), Some(past)),
            _ => return None,
        };
        Some(Operands {
            q,
            k,
            v,
            mask,
            past,
        })
    }
}

impl Operands<NodeId> {
    pub(crate) fn of_nodes(g: &dyn GraphBuilder, list: &[NodeId]) -> Operands<NodeId> {
        Operands::of(list, |id| g.dtype(id)).expect("checked by the rule")
    }
}

pub(super) fn infer(given: &[TensorType<'_>], dtype: DType, symbols: &Symbols) -> Rule {
    let Some(of) = Operands::of(given, |x| x.dtype) else {
        return Err("attention: queries, keys, values, a mask and a past are needed".into());
    };
    let [q, k, v] = [of.q, of.k, of.v];
    let say = |why: &str| {
        let shown = [q, k, v].map(|x| symbols.show(x.dims).to_string());
        Err(format!(
            "attention of {}, {} and {}: {why}",
            shown[0], shown[1], shown[2]
        ))
    };
    if !dtype.is_float() || [q, k, v].iter().any(|x| !x.dtype.is_float()) {
        return say("floats are needed");
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
    if let Some(mask) = of.mask {
        let pairs: Dims = q.dims[..rank - 1].iter().copied().chain([keys]).collect();
        if mask.dims != pairs.as_slice() || !mask.dtype.is_float() && mask.dtype != DType::Bool {
            return say("the mask has no number or truth value for each query and key");
        }
    }
    if of
        .past
        .is_some_and(|past| past.dtype != DType::I32 || past.dims != &q.dims[..rank - 2])
    {
        return say("the past has no i32 for each head");
    }
    Ok((dtype, with_rows(q.dims, queries, columns)))
}

/// The operands of [`Op::AttentionGrad`]: those of attention, then the result and its gradient.
pub(crate) fn split_last<T: Copy>(list: &[T]) -> Option<(&[T], [T; 2])> {
    let (of, last) = list.split_at_checked(list.len().checked_sub(2)?)?;
    Some((of, [last[0], last[1]]))
}

pub(super) fn infer_grad(
    given: &[TensorType<'_>],
    dtype: DType,
    in_turns: bool,
    symbols: &Symbols,
) -> Rule {
    let Some((of, [y, dy])) = split_last(given) else {
        return Err("the gradient of attention: five operands are needed".into());
    };
    let (_, result) = infer(of, y.dtype, symbols)?;
    let [q, k] = [of[0], of[1]];
    let fits = |x: TensorType<'_>| x.dtype.is_float() && x.dims == result.as_slice();
    let (Some([queries, width]), Some([keys, _])) = (last_two(q.dims), last_two(k.dims)) else {
        return Err("the gradient of attention: each operand needs three axes".into());
    };
    let unlike = in_turns && queries != keys;
    if unlike || !fits(y) || !fits(dy) || result.last() != Some(&width) {
        return Err("the gradient of attention: the shapes do not fit".into());
    }
    let rows =
        rows_of_gradient(queries, keys).ok_or("attention: its rows have no form as one size")?;
    if !dtype.is_float() {
        return Err(format!("the gradient of attention as {dtype}"));
    }
    Ok((dtype, with_rows(q.dims, rows, width)))
}

/// The result, of a type of floats, for operands that fit: queries, keys, values and, if there are
/// any, a mask and a past.
pub fn attention(
    g: &mut dyn GraphBuilder,
    scores: Scores,
    operands: &[NodeId],
    dtype: DType,
) -> NodeId {
    let columns = *g.dims(operands[2]).last().expect("of three axes");
    let dims = g.dims(operands[0]);
    let dims = with_rows(dims, dims[dims.len() - 2], columns);
    g.emit(Op::Attention(scores), operands, dtype, dims)
}

pub(super) fn gradient(
    g: &mut dyn GraphBuilder,
    scores: Scores,
    node: NodeId,
    inputs: &[NodeId],
    dy: NodeId,
    wanted: &[bool],
) -> Gradients {
    let of = Operands::of_nodes(g, inputs);
    let [queries, keys] = [of.q, of.k].map(|x| g.dims(x)[g.dims(x).len() - 2]);
    let rows = rows_of_gradient(queries, keys);
    let width = *g.dims(of.q).last().expect("of three axes");
    let dims = rows.map(|rows| with_rows(g.dims(of.q), rows, width));
    let dims = dims.filter(|dims| three(dims[2]).is_some());
    let parts = match dims.filter(|_| g.dims(of.v).last() == Some(&width)) {
        Some(dims) => {
            let all: SmallVec<[NodeId; 8]> = inputs.iter().copied().chain([node, dy]).collect();
            let in_turns = queries == keys;
            let op = Op::AttentionGrad { scores, in_turns };
            let all = g.emit(op, &all, DType::F32, dims);
            split(g, all, in_turns, [queries, keys])
        }
        None => gradients_of_parts(g, scores, &of, node, dy),
    };
    let mut gradients: Gradients = parts.into_iter().map(Some).collect();
    gradients.resize(inputs.len(), None);
    if let Some(mask) = of.mask
        && wanted[3]
        && g.dtype(mask).is_float()
    {
        let [y, dy] = rows_last_of(g, [node, dy]);
        let Weights { p, centred, .. } = weights(g, &scores, &of, [y, dy]);
        gradients[3] = Some(g.mul(p, centred));
    }
    gradients
}

/// Results `[b, rows, …, columns]` in f32 as `[b, …, rows, columns]`.
fn rows_last_of(g: &mut dyn GraphBuilder, results: [NodeId; 2]) -> [NodeId; 2] {
    results.map(|x| {
        let x = g.permute(x, &rows_last(g.dims(x).len()));
        g.cast(x, DType::F32)
    })
}

/// Three times a length.
fn three(size: Size) -> Option<Size> {
    size.checked_mul(Size::fixed(3))
}

/// The gradients of queries, keys and values, `[b, …, rows, width]`, as that of
/// [`Op::AttentionGrad`].
pub(crate) fn join(g: &mut dyn GraphBuilder, in_turns: bool, parts: [NodeId; 3]) -> NodeId {
    let parts = parts.map(|part| g.permute(part, &rows_second(g.dims(part).len())));
    let [of_q, of_k] = [0, 1].map(|i| g.dims(parts[i]).clone());
    let mut dims = of_q.clone();
    let rows = rows_of_gradient(of_q[1], of_k[1]).expect("the gradient has these rows");
    let axis = if in_turns {
        dims[2] = three(of_q[2]).expect("checked for the gradient");
        2
    } else {
        dims[1] = rows;
        1
    };
    let all = g.emit(Op::Concat { axis }, &parts, DType::F32, dims);
    let mut dims = of_q;
    dims[1] = rows;
    g.reshape(all, &dims)
}

/// The rows of queries, keys and values of a gradient, as `[b, …, rows, width]`.
fn split(
    g: &mut dyn GraphBuilder,
    all: NodeId,
    in_turns: bool,
    [queries, keys]: [Size; 2],
) -> [NodeId; 3] {
    let (mut dims, dtype) = (g.dims(all).clone(), g.dtype(all));
    if in_turns {
        let side_by_side = three(dims[2]).expect("checked for the gradient");
        let each = std::mem::replace(&mut dims[2], side_by_side);
        dims[1] = queries;
        let all = g.reshape(all, &dims);
        return [0, 1, 2].map(|part| {
            let mut start = Dims::from_elem(Size::ZERO, dims.len());
            start[2] = each
                .checked_mul(Size::fixed(part))
                .expect("less than three");
            let step = SmallVec::from_elem(1, dims.len());
            let mut of_part = dims.clone();
            of_part[2] = each;
            let part = g.emit(Op::Slice { start, step }, &[all], dtype, of_part);
            g.permute(part, &rows_last(dims.len()))
        });
    }
    let behind = queries.checked_add(keys).expect("the rows have a form");
    [(Size::ZERO, queries), (queries, keys), (behind, keys)].map(|(first, rows)| {
        let (mut part, mut start) = (dims.clone(), Dims::from_elem(Size::ZERO, dims.len()));
        (part[1], start[1]) = (rows, first);
        let step = SmallVec::from_elem(1, dims.len());
        let part = g.emit(Op::Slice { start, step }, &[all], dtype, part);
        g.permute(part, &rows_last(dims.len()))
    })
}

/// Whether the key of a column is visible to the query of a row, over `[…, rows, columns]`; `None`
/// if all are. `more` is added to the past at each place.
pub fn visible(
    g: &mut dyn GraphBuilder,
    scores: &Scores,
    more: Option<NodeId>,
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
    let shifted = |g: &mut dyn GraphBuilder, x: NodeId, by: i32| {
        // As a float, a position is exact up to 2²⁴; no machine has memory for the scores of more.
        let by = g.full(by as f32, DType::I32, dims);
        g.add(x, by)
    };
    let (row, column) = (
        along(g, rank - 2, i64::from(scores.step)),
        along(g, rank - 1, 1),
    );
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
    let window = window.min(i32::MAX as u32 / 2) as i32;
    let end = shifted(g, column, window);
    let near = g.scalar(ScalarOp::Gt, &[end, row]);
    let other = causal.unwrap_or_else(|| {
        let end = shifted(g, row, window);
        g.scalar(ScalarOp::Lt, &[column, end])
    });
    Some(g.scalar(ScalarOp::And, &[other, near]))
}

/// The exponentials of the scores, relative to the largest of each query, and their sums.
struct Exponentials {
    powers: NodeId,
    sums: NodeId,
    /// tanh(s/cap) of limited scores s.
    limited: Option<NodeId>,
    /// Whether a query may see no key: its sum is 0.
    hides: bool,
}

/// `a·b` of two operands, converted to a type of floats.
fn product(g: &mut dyn GraphBuilder, a: NodeId, b: NodeId, dtype: DType) -> NodeId {
    let [a, b] = [a, b].map(|x| g.cast(x, dtype));
    g.matmul(a, b)
}

fn exponentials(g: &mut dyn GraphBuilder, scores: &Scores, of: &Operands<NodeId>) -> Exponentials {
    // As the operands of other products, queries and weights follow the type of the keys and values
    // in memory.
    let dtype = g.dtype(of.k);
    let kt = g.transpose(of.k);
    let products = product(g, of.q, kt, dtype);
    let dims = g.dims(products).clone();
    let full = |g: &mut dyn GraphBuilder, x: f32| g.full(x, DType::F32, &dims);
    let scale = full(g, scores.scale);
    let mut all = g.mul(products, scale);
    let limited = scores.soft_cap.map(|cap| {
        let cap = full(g, cap);
        let part = g.scalar(ScalarOp::Div, &[all, cap]);
        let part = g.scalar(ScalarOp::Tanh, &[part]);
        all = g.mul(part, cap);
        part
    });
    let hidden = full(g, f32::NEG_INFINITY);
    if let Some(mask) = of.mask {
        all = match g.dtype(mask) {
            DType::Bool => g.scalar(ScalarOp::Select, &[mask, all, hidden]),
            _ => {
                let mask = g.cast(mask, DType::F32);
                let hides = g.scalar(ScalarOp::Eq, &[mask, hidden]);
                let sum = g.add(all, mask);
                g.scalar(ScalarOp::Select, &[hides, hidden, sum])
            }
        };
    }
    let past = of.past.map(|past| {
        let mut of_heads = g.dims(past).clone();
        of_heads.extend([Size::ONE, Size::ONE]);
        g.reshape(past, &of_heads)
    });
    if let Some(sees) = visible(g, scores, past, &dims) {
        all = g.scalar(ScalarOp::Select, &[sees, all, hidden]);
    }
    let last = dims.len() - 1;
    let mut largest = g.reduce(ReduceOp::Max, all, &[last]);
    let before_all = scores.causal && (of.past.is_some() || scores.past < 0);
    let hides = of.mask.is_some() || scores.window.is_some() || before_all;
    if hides {
        // The exponentials of a query that sees no key are 0.
        let rows = g.dims(largest).clone();
        let [zero, lowest] = [0.0, f32::NEG_INFINITY].map(|x| g.full(x, DType::F32, &rows));
        let none = g.scalar(ScalarOp::Eq, &[largest, lowest]);
        largest = g.scalar(ScalarOp::Select, &[none, zero, largest]);
    }
    let largest = g.broadcast(largest, &dims);
    let all = g.scalar(ScalarOp::Sub, &[all, largest]);
    let powers = g.scalar(ScalarOp::Exp, &[all]);
    Exponentials {
        powers,
        sums: g.reduce(ReduceOp::Sum, powers, &[last]),
        limited,
        hides,
    }
}

/// [`attention`] by products and elementwise operations.
pub(crate) fn attention_of_parts(
    g: &mut dyn GraphBuilder,
    scores: &Scores,
    of: &Operands<NodeId>,
    dtype: DType,
) -> NodeId {
    let Exponentials { powers, sums, .. } = exponentials(g, scores, of);
    let stored = g.dtype(of.v);
    let y = product(g, powers, of.v, stored);
    let dims = g.dims(y).clone();
    let sums = g.broadcast(sums, &dims);
    let y = g.scalar(ScalarOp::Div, &[y, sums]);
    let y = g.permute(y, &rows_second(dims.len()));
    g.cast(y, dtype)
}

/// The weights P of queries and keys, and the factors of the gradient of their scores.
struct Weights {
    p: NodeId,
    /// dP − δ.
    centred: NodeId,
    /// tanh(s/cap) of limited scores s, and their derivatives.
    limited: Option<[NodeId; 2]>,
}

fn weights(
    g: &mut dyn GraphBuilder,
    scores: &Scores,
    of: &Operands<NodeId>,
    [y, dy]: [NodeId; 2],
) -> Weights {
    let Exponentials {
        powers,
        sums,
        limited,
        hides,
    } = exponentials(g, scores, of);
    let dims = g.dims(powers).clone();
    let sums = g.broadcast(sums, &dims);
    // A query that sees no key adds nothing to gradients.
    let zero = g.full(0.0, DType::F32, &dims);
    let none = hides.then(|| g.scalar(ScalarOp::Eq, &[sums, zero]));
    let seen = |g: &mut dyn GraphBuilder, x: NodeId| match none {
        Some(none) => g.scalar(ScalarOp::Select, &[none, zero, x]),
        None => x,
    };
    let p = g.scalar(ScalarOp::Div, &[powers, sums]);
    let p = seen(g, p);
    let vt = g.transpose(of.v);
    let stored = g.dtype(of.v);
    let dp = product(g, dy, vt, stored);
    let products = g.mul(dy, y);
    let delta = g.reduce(ReduceOp::Sum, products, &[dims.len() - 1]);
    let delta = g.broadcast(delta, &dims);
    let limited = limited.map(|part| {
        let one = g.full(1.0, DType::F32, &dims);
        let square = g.mul(part, part);
        [part, g.scalar(ScalarOp::Sub, &[one, square])]
    });
    let centred = g.scalar(ScalarOp::Sub, &[dp, delta]);
    Weights {
        p,
        centred: seen(g, centred),
        limited,
    }
}

impl Weights {
    /// The derivatives of limited scores times x.
    fn slope(&self, g: &mut dyn GraphBuilder, x: NodeId) -> NodeId {
        match self.limited {
            Some([_, slope]) => g.mul(x, slope),
            None => x,
        }
    }
}

/// The gradients of queries, keys and values by products and elementwise operations: `dQ = dS·K`,
/// `dK = dSᵀ·Q` and `dV = Pᵀ·dY` with `dS = scale·P∘(dY·Vᵀ − δ)`, times the derivatives of limited
/// scores, and δ the sums of dY∘Y along rows.
pub(crate) fn gradients_of_parts(
    g: &mut dyn GraphBuilder,
    scores: Scores,
    of: &Operands<NodeId>,
    y: NodeId,
    dy: NodeId,
) -> [NodeId; 3] {
    let [y, dy] = rows_last_of(g, [y, dy]);
    let weights = weights(g, &scores, of, [y, dy]);
    let ds = scaled(g, weights.p, weights.centred, scores.scale);
    let ds = weights.slope(g, ds);
    let [dst, pt] = [ds, weights.p].map(|x| g.transpose(x));
    let [of_scores, of_weights] = [of.k, of.v].map(|x| g.dtype(x));
    [
        product(g, ds, of.k, of_scores),
        product(g, dst, of.q, of_scores),
        product(g, pt, dy, of_weights),
    ]
}

/// `scale·a∘b`.
fn scaled(g: &mut dyn GraphBuilder, a: NodeId, b: NodeId, scale: f32) -> NodeId {
    let product = g.mul(a, b);
    let scale = g.full(scale, DType::F32, &g.dims(a).clone());
    g.mul(product, scale)
}

/// The gradient of [`Op::AttentionGrad`] with respect to its operands. With cotangents A, B and C
/// of dQ, dK and dV, `G = scale·(A·Kᵀ + Q·Bᵀ)` is that of dS/scale, `W = G∘P∘D` that of dP − δ,
/// where D are the derivatives of limited scores, `U = G∘(dP − δ)∘D + dY·Cᵀ` that of P, and
/// `H = P∘(U − Σ P∘U)` that of the scores, limited ones and the mask. That of scores before the
/// limit is `H∘D − 2·G∘P∘(dP − δ)∘D∘T/cap`, where T are tanh(s/cap) and D = 1 − T².
pub(super) fn gradient_of_grad(
    g: &mut dyn GraphBuilder,
    (scores, in_turns): (Scores, bool),
    inputs: &[NodeId],
    cotangent: NodeId,
) -> Gradients {
    let (list, [y, dy]) = split_last(inputs).expect("checked by the rule");
    let mut of = Operands::of_nodes(g, list);
    let [q, k, v] = [of.q, of.k, of.v].map(|x| g.cast(x, DType::F32));
    (of.q, of.k, of.v) = (q, k, v);
    let rank = g.dims(q).len();
    let [queries, keys] = [q, k].map(|x| g.dims(x)[rank - 2]);
    let [a, b, c] = split(g, cotangent, in_turns, [queries, keys]);
    let [y, dy] = rows_last_of(g, [y, dy]);
    let weights = weights(g, &scores, &of, [y, dy]);
    let (p, centred) = (weights.p, weights.centred);
    let dims = g.dims(p).clone();
    let row_sums = |g: &mut dyn GraphBuilder, x: NodeId| g.reduce(ReduceOp::Sum, x, &[rank - 1]);
    let across = |g: &mut dyn GraphBuilder, x: NodeId, transposed: NodeId| {
        let transposed = g.transpose(transposed);
        g.matmul(x, transposed)
    };
    let of_a = across(g, a, k);
    let of_b = across(g, q, b);
    let of_ds = g.add(of_a, of_b);
    let scale = g.full(scores.scale, DType::F32, &dims);
    let of_ds = g.mul(of_ds, scale);
    // Through the derivatives of limited scores.
    let through = weights.slope(g, of_ds);
    let w = g.mul(through, p);
    let of_c = across(g, dy, c);
    let rest = g.mul(through, centred);
    let u = g.add(rest, of_c);
    let pu = g.mul(p, u);
    let sums = row_sums(g, pu);
    let sums = g.broadcast(sums, &dims);
    let u = g.scalar(ScalarOp::Sub, &[u, sums]);
    let of_mask = g.mul(p, u);
    let mut h = weights.slope(g, of_mask);
    if let (Some(cap), Some([part, _])) = (scores.soft_cap, weights.limited) {
        let factor = g.full(-2.0 / cap, DType::F32, &dims);
        let term = g.mul(w, centred);
        let term = g.mul(term, part);
        let term = g.mul(term, factor);
        h = g.add(h, term);
    }
    // Scores before the limit are scaled products of queries and keys.
    let h = g.mul(h, scale);
    let ds = scaled(g, p, centred, scores.scale);
    let ds = weights.slope(g, ds);
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
    let mut gradients: Gradients = [of_q, of_k, of_v].into_iter().map(Some).collect();
    gradients.extend(
        of.mask
            .map(|mask| g.dtype(mask).is_float().then_some(of_mask)),
    );
    gradients.extend(of.past.map(|_| None));
    gradients.extend([Some(of_y), Some(of_dy)]);
    gradients
}
