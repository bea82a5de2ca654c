//! Rules of elementwise operations and conversions.

use slabwise_kernels::dtype::DType;
use slabwise_kernels::scalar::{ScalarOp, Value};
use slabwise_kernels::spec::Dims;

use super::{Builder, view};
use crate::graph::Node;
use crate::ops::{GraphBuilder, NodeId, Op};

/// Whether a value is this number, of either numeric lane (zeros of both signs are 0).
fn is(value: Option<Value>, number: i32) -> bool {
    match value {
        Some(Value::F32(x)) => x == number as f32,
        Some(Value::I32(x)) => x == number,
        _ => false,
    }
}

/// Whether adding this number changes nothing, the sign of a zero included.
fn adds_nothing(value: Option<Value>) -> bool {
    match value {
        Some(Value::F32(x)) => x == 0.0 && x.is_sign_negative(),
        other => is(other, 0),
    }
}

/// 1/c for a power of two with a normal reciprocal.
fn exact_reciprocal(value: Option<Value>) -> Option<f32> {
    let Some(Value::F32(c)) = value else {
        return None;
    };
    let power_of_two = c.is_normal() && c.to_bits().trailing_zeros() >= f32::MANTISSA_DIGITS - 1;
    Some(c.recip()).filter(|r| power_of_two && r.is_normal())
}

/// A simpler node for an elementwise operation.
pub(super) fn rewrite(
    b: &mut Builder,
    op: ScalarOp,
    inputs: &[NodeId],
    dims: &Dims,
) -> Option<NodeId> {
    use ScalarOp as S;
    let x = inputs[0];
    let y = inputs.get(1).copied().unwrap_or(x);
    let (cx, cy) = (b.known(x), b.known(y));
    // The operand of `id`, if `id` is this operation.
    let under =
        |b: &Builder, id: NodeId, op: S| (*b.op(id) == Op::Scalar(op)).then(|| b.operand(id));
    match op {
        // x + (−0) = x, but −0 + 0 = 0.
        S::Add if adds_nothing(cy) => Some(x),
        S::Add if adds_nothing(cx) => Some(y),
        // x + (−y) is x − y by definition, for floats and for wrapping integers.
        S::Add => match (under(b, x, S::Neg), under(b, y, S::Neg)) {
            (_, Some(y)) => Some(b.scalar(S::Sub, &[x, y])),
            (Some(x), None) => Some(b.scalar(S::Sub, &[y, x])),
            (None, None) => view::neighbours(b, x, y, dims),
        },
        // x − 0 = x, but −0 − (−0) = 0.
        S::Sub if is(cy, 0) && !matches!(cy, Some(Value::F32(zero)) if zero.is_sign_negative()) => {
            Some(x)
        }
        S::Sub => under(b, y, S::Neg).map(|y| b.add(x, y)),
        // 1 is neutral; −1 only changes the sign.
        S::Mul | S::Div if is(cy, 1) => Some(x),
        S::Mul if is(cx, 1) => Some(y),
        S::Mul | S::Div if is(cy, -1) => Some(b.scalar(S::Neg, &[x])),
        S::Mul if is(cx, -1) => Some(b.scalar(S::Neg, &[y])),
        // Signs multiply apart from magnitudes. Integers: a product of negations wraps to the same;
        // a quotient may not.
        S::Mul => match (under(b, x, S::Neg), under(b, y, S::Neg)) {
            (Some(x), Some(y)) => Some(b.mul(x, y)),
            _ => None,
        },
        // Both are x / c rounded once.
        S::Div => exact_reciprocal(cy).map(|r| {
            let r = b.full(r, DType::F32, dims);
            b.mul(x, r)
        }),
        // The sign bit twice; wrapping negation undoes itself.
        S::Neg => under(b, x, S::Neg),
        // The sign does not matter; |minimum| wraps to the minimum, as its negation does.
        S::Abs if under(b, x, S::Neg).is_some() => {
            let x = b.operand(x);
            Some(b.scalar(S::Abs, &[x]))
        }
        // These are idempotent.
        S::Abs | S::Relu | S::Floor | S::Ceil | S::Round | S::Sign => under(b, x, op).map(|_| x),
        S::Not => {
            // NaN is unequal to all, so that these two are opposites for it as well.
            let opposite = match b.op(x) {
                Op::Scalar(S::Not) => return Some(b.operand(x)),
                Op::Scalar(S::Eq) => S::Ne,
                Op::Scalar(S::Ne) => S::Eq,
                _ => return None,
            };
            let operands = b.new.node(x).inputs.clone();
            Some(b.scalar(opposite, &operands))
        }
        // Equal operands: the result is either of them.
        S::Min | S::Max | S::And | S::Or if x == y => Some(x),
        S::And | S::Or => {
            // `true` is neutral for `and` and wins `or`; `false` the other way round.
            let (known, other) = match (cx, cy) {
                (Some(Value::Bool(known)), _) => (known, y),
                (_, Some(Value::Bool(known))) => (known, x),
                _ => return None,
            };
            let neutral = known == (op == S::And);
            Some(if neutral {
                other
            } else {
                b.full_of(Value::Bool(known), DType::Bool, dims)
            })
        }
        S::Pow => match cy {
            // Every power 0 is 1, every power 1 its base, NaN included (IEEE 754, pow).
            Some(Value::F32(0.0)) => Some(b.full(1.0, DType::F32, dims)),
            Some(Value::F32(1.0)) => Some(x),
            // The product is rounded once: the nearest there is.
            Some(Value::F32(2.0)) => Some(b.mul(x, x)),
            _ => None,
        },
        S::Select => select(b, inputs),
        // Derivatives were taken while the graph was written.
        S::Detach | S::WithSlope => Some(x),
        _ => None,
    }
}

fn select(b: &mut Builder, inputs: &[NodeId]) -> Option<NodeId> {
    let [condition, yes, no] = *inputs else {
        return None;
    };
    if let Some(Value::Bool(known)) = b.known(condition) {
        return Some(if known { yes } else { no });
    }
    if yes == no {
        return Some(yes);
    }
    if *b.op(condition) == Op::Scalar(ScalarOp::Not) {
        let condition = b.operand(condition);
        return Some(b.scalar(ScalarOp::Select, &[condition, no, yes]));
    }
    // Below a branch the condition is known.
    let below = |b: &Builder, id: NodeId, branch: usize| {
        let node = b.new.node(id);
        let same = node.op == Op::Scalar(ScalarOp::Select) && node.inputs[0] == condition;
        if same { node.inputs[branch] } else { id }
    };
    let (inner_yes, inner_no) = (below(b, yes, 1), below(b, no, 2));
    ((inner_yes, inner_no) != (yes, no))
        .then(|| b.scalar(ScalarOp::Select, &[condition, inner_yes, inner_no]))
}

/// A simpler node for a conversion.
pub(super) fn rewrite_cast(b: &mut Builder, to: DType, x: NodeId) -> Option<NodeId> {
    if b.dtype(x) == to {
        return Some(x);
    }
    if to.is_half() && b.op(x).is_view() {
        return narrowed_view(b, to, x);
    }
    let Op::Cast(through) = *b.op(x) else {
        return None;
    };
    let from = b.operand(x);
    // Truth values and bytes pass unchanged through every wider type, halves through f32 (a
    // conversion to truth asks for nonzero).
    let exact = match b.dtype(from) {
        DType::Bool => true,
        DType::U8 => through != DType::Bool,
        DType::F16 | DType::BF16 => through == DType::F32,
        DType::F32 | DType::I32 => false,
    };
    exact.then(|| b.cast(from, to))
}

/// The view `x` over halves of a type: of those whose conversion to f32 it shows, or of a converted
/// variable, all of whose elements it shows. Such a conversion is the same loop over all variables.
fn narrowed_view(b: &mut Builder, to: DType, x: NodeId) -> Option<NodeId> {
    let below = b.new.below_views(x);
    let halves = match *b.op(below) {
        Op::Cast(DType::F32) => {
            let halves = b.operand(below);
            (b.dtype(halves) == to).then_some(halves)?
        }
        Op::Variable(_) if b.new.shows_all(x) => b.cast(below, to),
        _ => return None,
    };
    let mut views = Vec::new();
    let mut at = x;
    while at != below {
        views.push(b.new.node(at).clone());
        at = b.operand(at);
    }
    let over = |over, view: Node| b.emit(view.op, &[over], to, view.dims);
    Some(views.into_iter().rev().fold(halves, over))
}
