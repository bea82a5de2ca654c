//! Elementwise operations: the rows of the table, operators, and functions composed of them. (Their
//! results at special numbers, compared with PyTorch: `docs/numerics.md`.)

use std::ops;
use std::panic::Location;

use slabwise_kernels::dtype::DType;
use slabwise_kernels::scalar::ScalarOp;
use slabwise_kernels::size::Size;
use slabwise_kernels::spec::Dims;

use super::{Operand, Tensor, checked};
use crate::graph::Graph;
use crate::ops::{GraphBuilder, NodeId, Op};
use crate::params::Param;

/// The broadcast shape of two shapes: aligned at the last axis, lengths are equal or 1.
pub(super) fn broadcast_shape(a: &[Size], b: &[Size]) -> Option<Dims> {
    let rank = a.len().max(b.len());
    let at = |d: &[Size], i: usize| (i + d.len()).checked_sub(rank).map_or(Size::ONE, |i| d[i]);
    let join = |i| match (at(a, i), at(b, i)) {
        (a, b) if a == b || b.is(1) => Some(a),
        (a, b) if a.is(1) => Some(b),
        _ => None,
    };
    (0..rank).map(join).collect()
}

/// The operands repeated to a common shape.
pub(super) fn broadcast_all(
    g: &mut Graph,
    what: &str,
    ids: &[NodeId],
) -> Result<Vec<NodeId>, String> {
    let mut dims = g.dims(ids[0]).clone();
    for &id in &ids[1..] {
        dims = broadcast_shape(&dims, g.dims(id)).ok_or_else(|| {
            let shapes: Vec<String> = ids
                .iter()
                .map(|&id| g.symbols.show(g.dims(id)).to_string())
                .collect();
            let two = g
                .dims(ids[0])
                .iter()
                .rev()
                .zip(g.dims(id).iter().rev())
                .find_map(|(a, b)| {
                    let (a, b) = (a.symbols().next()?, b.symbols().next()?);
                    (a != b).then(|| (g.symbols.name(a), g.symbols.name(b)))
                });
            let two = two.map(|(a, b)| {
                format!("; \"{a}\" and \"{b}\" are two dimensions, one name would make them one")
            });
            format!(
                "{what} {}: shapes do not broadcast{}",
                shapes.join(" and "),
                two.unwrap_or_default()
            )
        })?;
    }
    Ok(ids.iter().map(|&id| g.broadcast(id, &dims)).collect())
}

impl<'t> Tensor<'t> {
    #[track_caller]
    fn elementwise(self, op: ScalarOp, rest: &[Tensor<'t>]) -> Tensor<'t> {
        let mut operands = vec![self];
        operands.extend_from_slice(rest);
        self.trace.record(Location::caller(), &operands, |g, ids| {
            let ids = broadcast_all(g, op.name(), ids)?;
            checked(g, Op::Scalar(op), &ids)
        })
    }

    #[track_caller]
    fn binary(self, op: ScalarOp, rhs: impl Operand<'t>) -> Tensor<'t> {
        let rhs = rhs.lift(self.trace, self.dtype(), Location::caller());
        self.elementwise(op, &[rhs])
    }
}

macro_rules! unary {
    ($($(#[$doc:meta])* $name:ident $op:ident;)*) => {
        impl<'t> Tensor<'t> {
            $($(#[$doc])*
            #[track_caller]
            pub fn $name(self) -> Tensor<'t> {
                self.elementwise(ScalarOp::$op, &[])
            })*
        }
    };
}

macro_rules! binary {
    ($($(#[$doc:meta])* $name:ident $op:ident;)*) => {
        impl<'t> Tensor<'t> {
            $($(#[$doc])*
            #[track_caller]
            pub fn $name(self, rhs: impl Operand<'t>) -> Tensor<'t> {
                self.binary(ScalarOp::$op, rhs)
            })*
        }
    };
}

unary! {
    /// x, detached: [`Trace::gradients`](crate::Trace::gradients) treats it as a constant, and no
    /// gradient flows through it.
    detach Detach;
    /// |x|; its slope is [`Tensor::sign`]: 0 at 0, NaN at NaN.
    abs Abs;
    /// −1, 0 or 1; NaN stays NaN.
    sign Sign;
    /// eˣ
    exp Exp;
    /// 2ˣ
    exp2 Exp2;
    /// eˣ − 1, exact near 0.
    expm1 Expm1;
    /// The natural logarithm.
    ln Ln;
    /// The logarithm to base 2, exact for powers of 2.
    log2 Log2;
    /// The logarithm to base 10.
    log10 Log10;
    /// ln |Γ(x)|, whose slope is [`Tensor::digamma`]; ∞ at 0, −1, −2, …
    #[doc(alias = "gammaln")]
    lgamma Lgamma;
    /// ln(1 + x), exact near 0.
    log1p Log1p;
    /// √x
    sqrt Sqrt;
    /// 1/√x; −∞ at −0.
    rsqrt Rsqrt;
    /// 1/x
    recip Recip;
    /// tanh x
    tanh Tanh;
    /// 1/(1 + e⁻ˣ)
    sigmoid Sigmoid;
    /// max(x, 0); NaN stays NaN. The slope is 0 at 0 and 1 at NaN.
    relu Relu;
    /// The error function.
    erf Erf;
    /// x·Φ(x) with the normal distribution function Φ (Hendrycks & Gimpel 2016): ½x(1 + erf(x/√2));
    /// x itself where x is large.
    gelu Gelu;
    /// The approximation of [`Tensor::gelu`] by tanh, from the same paper: ½x(1 + tanh(√(2/π)(x +
    /// 0.044715x³))).
    gelu_tanh GeluTanh;
    /// sin x, x in radians.
    sin Sin;
    /// cos x, x in radians.
    cos Cos;
    /// tan x, x in radians.
    tan Tan;
    /// The hyperbolic sine, (eˣ − e⁻ˣ)/2.
    sinh Sinh;
    /// The hyperbolic cosine, (eˣ + e⁻ˣ)/2.
    cosh Cosh;
    /// The largest integer ≤ x, as a float.
    floor Floor;
    /// The smallest integer ≥ x, as a float.
    ceil Ceil;
    /// The nearest integer, halves to even, as a float.
    round Round;
}

binary! {
    /// xʸ, of floats with the special cases of IEEE 754: x⁰ is 1 with slope 0, for every x; 0ʸ has
    /// slope 0 along y ≥ 0. Powers of integers wrap; for y < 0 they are the integer part of the
    /// fraction, and 0 for x = 0.
    pow Pow;
    /// The angle in −π..=π radians of the point whose vertical coordinate is this tensor and whose
    /// horizontal one is the operand; the signs of zeros count. Its slopes at the origin are 0.
    atan2 Atan2;
    /// The remainder of a division that truncates, with the sign of x, like `%` of Rust and C. A
    /// divisor of 0 gives 0 for integers and NaN for floats. For the sign of the divisor see
    /// [`Tensor::remainder`].
    fmod Fmod;
    /// The bits that are set in both of two integers.
    bit_and BitAnd;
    /// The bits that are set in any of two integers.
    bit_or BitOr;
    /// The bits that are set in exactly one of two integers.
    bit_xor BitXor;
    /// An integer's bits shifted left by y places: times 2ʸ, which wraps; 0 for y outside of 0..32.
    shift_left ShiftLeft;
    /// An integer's bits shifted right by y places, arithmetically: divided by 2ʸ, rounded down;
    /// for y outside of 0..32 the same as for 31.
    shift_right ShiftRight;
    /// The smaller of two; NaN if either is. Equal numbers get half the gradient each; if one is
    /// NaN, both get all of it.
    minimum Min;
    /// The larger of two; NaN if either is. Equal numbers get half the gradient each; if one is
    /// NaN, both get all of it.
    maximum Max;
    /// x < y
    lt Lt;
    /// x ≤ y
    le Le;
    /// x > y
    gt Gt;
    /// x ≥ y
    ge Ge;
    /// x = y
    equal Eq;
    /// x ≠ y
    not_equal Ne;
    /// x and y, of truth values.
    and And;
    /// x or y, of truth values.
    or Or;
    /// x or y but not both, of truth values.
    xor Xor;
}

impl<'t> Tensor<'t> {
    /// `a` where this truth value is true, else `b`.
    #[track_caller]
    pub fn select(self, a: impl Operand<'t>, b: impl Operand<'t>) -> Tensor<'t> {
        let at = Location::caller();
        let dtype = a.own_type().or(b.own_type()).unwrap_or(DType::F32);
        let (a, b) = (a.lift(self.trace, dtype, at), b.lift(self.trace, dtype, at));
        self.elementwise(ScalarOp::Select, &[a, b])
    }

    /// Conversion: floats truncate towards zero and saturate, NaN becomes 0; i32 saturates in u8;
    /// anything but zero is true.
    #[track_caller]
    pub fn cast(self, dtype: DType) -> Tensor<'t> {
        self.trace.record(Location::caller(), &[self], |g, ids| {
            Ok(g.cast(ids[0], dtype))
        })
    }

    /// x, limited to `low..=high`; NaN stays NaN. The gradient passes through strictly between the
    /// bounds and for NaN; it is 0 elsewhere, at the bounds too.
    #[track_caller]
    pub fn clamp(self, low: f32, high: f32) -> Tensor<'t> {
        let at = Location::caller();
        if low <= high {
            let [low, high] =
                [low, high].map(|bound| super::Lift::lift(bound, self.trace, self.dtype(), at));
            return self.elementwise(ScalarOp::Clamp, &[low, high]);
        }
        self.require(at, |_, _| {
            Err(format!(
                "clamp between {low} and {high}: no number lies there"
            ))
        })
    }

    /// This value, or another near it, as a constant: for numbers that affect results only by
    /// rounding.
    #[track_caller]
    pub(super) fn near(self) -> Tensor<'t> {
        self.elementwise(ScalarOp::Near, &[])
    }

    /// This value, with the additional derivative `slope` with respect to `x`. For a detached value
    /// it is the only derivative. Use it for formulas whose own derivative would be NaN or inexact
    /// somewhere. The slope can be differentiated in turn.
    #[track_caller]
    pub(super) fn with_slope(self, x: Tensor<'t>, slope: Tensor<'t>) -> Tensor<'t> {
        self.elementwise(ScalarOp::WithSlope, &[x, slope])
    }

    /// x²
    #[track_caller]
    pub fn square(self) -> Tensor<'t> {
        self * self
    }

    /// x·sigmoid(x)
    #[track_caller]
    pub fn silu(self) -> Tensor<'t> {
        self * self.sigmoid()
    }

    /// ln(1 + eˣ); x itself from 20 on, where the two are equal in f32. The gradient is sigmoid(x).
    #[track_caller]
    pub fn softplus(self) -> Tensor<'t> {
        self.gt(20.0)
            .select(self, self.exp().log1p())
            .detach()
            .with_slope(self, self.sigmoid())
    }
}

macro_rules! operators {
    ($($trait:ident $method:ident),*) => {$(
        impl<'t, R: Operand<'t>> ops::$trait<R> for Tensor<'t> {
            type Output = Tensor<'t>;
            #[track_caller]
            fn $method(self, rhs: R) -> Tensor<'t> {
                self.binary(ScalarOp::$trait, rhs)
            }
        }
        operators!(@left $trait $method f32, i32, &Param);
    )*};
    (@left $trait:ident $method:ident $($left:ty),*) => {$(
        impl<'t> ops::$trait<Tensor<'t>> for $left {
            type Output = Tensor<'t>;
            #[track_caller]
            fn $method(self, rhs: Tensor<'t>) -> Tensor<'t> {
                super::Lift::lift(self, rhs.trace, rhs.dtype(), Location::caller()).elementwise(ScalarOp::$trait, &[rhs])
            }
        }
    )*};
}
operators!(Add add, Sub sub, Mul mul, Div div);

impl<'t> ops::Neg for Tensor<'t> {
    type Output = Tensor<'t>;
    #[track_caller]
    fn neg(self) -> Tensor<'t> {
        self.elementwise(ScalarOp::Neg, &[])
    }
}

impl<'t> ops::Not for Tensor<'t> {
    type Output = Tensor<'t>;
    #[track_caller]
    fn not(self) -> Tensor<'t> {
        self.elementwise(ScalarOp::Not, &[])
    }
}
