//! Functions composed of elementwise operations: each fuses into one kernel with its neighbours.

use std::f32::consts::{FRAC_2_SQRT_PI, LN_2};
use std::panic::Location;

use slabwise_kernels::dtype::DType;
use slabwise_kernels::scalar::ScalarOp;

use super::{Operand, Tensor, checked};
use crate::ops::{GraphBuilder, Op};

impl<'t> Tensor<'t> {
    /// The arc tangent, in −π/2..=π/2 radians.
    #[doc(alias = "arctan")]
    #[track_caller]
    pub fn atan(self) -> Tensor<'t> {
        self.atan2(1.0)
    }

    /// The arc sine, in −π/2..=π/2 radians; NaN beyond ±1. Its slope at ±1 is ∞.
    #[doc(alias = "arcsin")]
    #[track_caller]
    pub fn asin(self) -> Tensor<'t> {
        let square = (1.0 - self) * (self + 1.0);
        let value = self.atan2(square.sqrt());
        value.detach().with_slope(self, square.rsqrt())
    }

    /// The arc cosine, in 0..=π radians; NaN beyond ±1. Its slope at ±1 is −∞.
    #[doc(alias = "arccos")]
    #[track_caller]
    pub fn acos(self) -> Tensor<'t> {
        let square = (1.0 - self) * (self + 1.0);
        let value = square.sqrt().atan2(self);
        value.detach().with_slope(self, -square.rsqrt())
    }

    /// The inverse hyperbolic sine.
    #[doc(alias = "arcsinh")]
    #[track_caller]
    pub fn asinh(self) -> Tensor<'t> {
        // ln(|x| + √(x² + 1)) as ln(1 + |x| + x²/(1 + √(x² + 1))). Where the square would overflow
        // it is ln |x| + ln 2, of which |x|/2 takes 2 ln 2 away.
        let (x, far) = (self.abs(), self.abs().gt(1e9));
        let near = x * (x / ((x * x + 1.0).sqrt() + 1.0)) + x;
        let value = far.select(x * 0.5, near).log1p() + far.select(2.0 * LN_2, 0.0);
        (value * self.sign())
            .detach()
            .with_slope(self, (self * self + 1.0).rsqrt())
    }

    /// The inverse hyperbolic cosine, ≥ 0; NaN below 1. Its slope at 1 is ∞.
    #[doc(alias = "arccosh")]
    #[track_caller]
    pub fn acosh(self) -> Tensor<'t> {
        let (less, far) = (self - 1.0, self.gt(1e9));
        let near = less + less.sqrt() * (self + 1.0).sqrt();
        let value = far.select(self * 0.5, near).log1p() + far.select(2.0 * LN_2, 0.0);
        value
            .detach()
            .with_slope(self, less.rsqrt() * (self + 1.0).rsqrt())
    }

    /// The inverse hyperbolic tangent: ±∞ at ±1, NaN beyond.
    #[doc(alias = "arctanh")]
    #[track_caller]
    pub fn atanh(self) -> Tensor<'t> {
        let x = self.abs();
        let value = ((x + x) / (1.0 - x)).log1p() * 0.5 * self.sign();
        let slope = ((1.0 - self) * (self + 1.0)).recip();
        value.detach().with_slope(self, slope)
    }

    /// The integer part, towards zero, as a float.
    #[doc(alias = "fix")]
    #[track_caller]
    pub fn trunc(self) -> Tensor<'t> {
        self.lt(0.0).select(self.ceil(), self.floor())
    }

    /// x − [`trunc`](Tensor::trunc) x: the part after the point, with the sign of x.
    #[doc(alias = "frac")]
    #[track_caller]
    pub fn fract(self) -> Tensor<'t> {
        self - self.trunc()
    }

    /// The remainder x − y·⌊x/y⌋ of a division that rounds down, with the sign of y, like `%` of
    /// Python; 0 for integers divided by 0. For the sign of x see [`Tensor::fmod`].
    #[doc(alias = "mod")]
    #[track_caller]
    pub fn remainder(self, rhs: impl Operand<'t>) -> Tensor<'t> {
        let y = rhs.lift(self.trace, self.dtype(), Location::caller());
        let rest = self.fmod(y);
        rest.is_opposite(y).select(rest + y, rest)
    }

    /// Whether a truncated remainder and its divisor have different signs.
    #[track_caller]
    fn is_opposite(self, divisor: Tensor<'t>) -> Tensor<'t> {
        let signs = self.lt(0).xor(divisor.lt(0));
        signs.and(self.not_equal(0))
    }

    /// ⌊x/y⌋, like `//` of Python; 0 for integers divided by 0. Integers divided by `/` truncate
    /// instead. No gradient flows through it.
    #[doc(alias = "floor_divide")]
    #[track_caller]
    pub fn div_floor(self, rhs: impl Operand<'t>) -> Tensor<'t> {
        let y = rhs
            .lift(self.trace, self.dtype(), Location::caller())
            .detach();
        let x = self.detach();
        let rest = x.fmod(y);
        let whole = (x - rest) / y;
        let opposite = rest.is_opposite(y);
        if !x.dtype().is_float() {
            return opposite.select(whole - 1, whole);
        }
        // The quotient is an integer except for its rounding error.
        let whole = whole.round();
        let whole = opposite.select(whole - 1.0, whole);
        y.equal(0.0).select(x / y, whole)
    }

    /// The complement of an integer's bits: −1 − x.
    #[track_caller]
    pub fn bit_not(self) -> Tensor<'t> {
        self.bit_xor(-1)
    }

    /// Whether an element is NaN.
    #[doc(alias = "isnan")]
    #[track_caller]
    pub fn is_nan(self) -> Tensor<'t> {
        self.not_equal(self)
    }

    /// Whether an element is ∞ or −∞; false for NaN and for integers.
    #[doc(alias = "isinf")]
    #[track_caller]
    pub fn is_infinite(self) -> Tensor<'t> {
        if self.dtype().is_float() {
            self.abs().equal(f32::INFINITY)
        } else {
            self.not_equal(self)
        }
    }

    /// Whether an element is neither NaN nor infinite.
    #[doc(alias = "isfinite")]
    #[track_caller]
    pub fn is_finite(self) -> Tensor<'t> {
        if self.dtype().is_float() {
            self.abs().lt(f32::INFINITY)
        } else {
            self.equal(self)
        }
    }

    /// x, with given numbers in place of NaN, ∞ and −∞; no gradient flows through those elements.
    /// PyTorch's defaults are 0, [`f32::MAX`] and [`f32::MIN`].
    #[track_caller]
    pub fn nan_to_num(self, nan: f32, infinity: f32, minus_infinity: f32) -> Tensor<'t> {
        let x = self.equal(f32::INFINITY).select(infinity, self);
        let x = self.equal(f32::NEG_INFINITY).select(minus_infinity, x);
        self.is_nan().select(nan, x)
    }

    /// min(max(x, `low`), `high`), element by element; NaN if one of the three is NaN. Where two
    /// are equal, each gets half the gradient, as for [`Tensor::maximum`]. For constant bounds see
    /// [`Tensor::clamp`].
    #[track_caller]
    pub fn clamp_between(self, low: impl Operand<'t>, high: impl Operand<'t>) -> Tensor<'t> {
        self.maximum(low).minimum(high)
    }

    /// x + weight·(end − x): x itself at weight 0, and `end` at weight 1.
    #[track_caller]
    pub fn lerp(self, end: impl Operand<'t>, weight: impl Operand<'t>) -> Tensor<'t> {
        let at = Location::caller();
        let end = end.lift(self.trace, self.dtype(), at);
        let weight = weight.lift(self.trace, self.dtype(), at);
        let step = end - self;
        // Exact at both ends.
        weight
            .lt(0.5)
            .select(step * weight + self, end - step * (1.0 - weight))
    }

    /// x + value·a·b
    #[track_caller]
    pub fn addcmul(self, a: Tensor<'t>, b: Tensor<'t>, value: f32) -> Tensor<'t> {
        self + a * b * value
    }

    /// x + value·a/b
    #[track_caller]
    pub fn addcdiv(self, a: Tensor<'t>, b: Tensor<'t>, value: f32) -> Tensor<'t> {
        self + a / b * value
    }

    /// √(x² + y²) without overflow of the squares. Its slope at the origin is NaN.
    #[track_caller]
    pub fn hypot(self, rhs: impl Operand<'t>) -> Tensor<'t> {
        let y = rhs.lift(self.trace, self.dtype(), Location::caller());
        let (a, b) = (self.abs(), y.abs());
        let (long, short) = (a.maximum(b), a.minimum(b));
        // A quotient of two zeros or infinities would be NaN.
        let known = long.equal(0.0).or(long.equal(f32::INFINITY));
        let quotient = short / long;
        let value = known
            .select(long, long * (quotient * quotient + 1.0).sqrt())
            .detach();
        // The second slopes need the first ones of the value.
        let value = value
            .with_slope(self, self / value)
            .with_slope(y, y / value);
        value
            .detach()
            .with_slope(self, self / value)
            .with_slope(y, y / value)
    }

    /// ln(eˣ + eʸ) without overflow.
    #[track_caller]
    pub fn logaddexp(self, rhs: impl Operand<'t>) -> Tensor<'t> {
        let y = rhs.lift(self.trace, self.dtype(), Location::caller());
        // The difference of equal infinities would be NaN.
        let rest = self.equal(y).select(0.0, (self - y).abs());
        let value = self.maximum(y) + (-rest).exp().log1p();
        let share = (self - y).sigmoid();
        value
            .detach()
            .with_slope(self, share)
            .with_slope(y, (y - self).sigmoid())
    }

    /// The slope of [`Tensor::lgamma`]; −∞ at 0, ∞ at −0, NaN at −1, −2, …
    #[track_caller]
    pub fn digamma(self) -> Tensor<'t> {
        self.polygamma(0)
    }

    /// The derivative of order `n` of [`Tensor::digamma`], for `n` up to 100. Left of 0 the orders
    /// from 2 on are as exact as f32 between −500 and 0.
    #[track_caller]
    pub fn polygamma(self, n: u32) -> Tensor<'t> {
        self.trace.record(Location::caller(), &[self], |g, ids| {
            if n > 100 {
                return Err(format!("polygamma of order {n}: 100 is the largest"));
            }
            let dims = g.dims(ids[0]).clone();
            let order = g.full(n as f32, DType::F32, &dims);
            checked(g, Op::Scalar(ScalarOp::Polygamma), &[order, ids[0]])
        })
    }

    /// The inverse of [`erf`](Tensor::erf): ±∞ at ±1, NaN beyond. Its relative error is at most
    /// 6·10⁻⁷ (Giles, "Approximating the erfinv function", 2012).
    #[track_caller]
    pub fn erfinv(self) -> Tensor<'t> {
        const NEAR: [f32; 9] = [
            1.501_409_4,
            0.246_640_73,
            -0.004_177_681_6,
            -0.001_253_725,
            2.185_808_7e-4,
            -4.391_506_5e-6,
            -3.523_387_7e-6,
            3.432_739e-7,
            2.810_226_4e-8,
        ];
        const FAR: [f32; 9] = [
            2.832_976_8,
            1.001_674,
            0.009_438_87,
            -0.007_622_461_3,
            0.005_739_508,
            -0.003_673_428_4,
            0.001_349_343,
            1.009_505_6e-4,
            -2.002_142_6e-4,
        ];
        let w = -((1.0 - self) * (self + 1.0)).ln();
        let is_near = w.lt(5.0);
        let t = is_near.select(w - 2.5, w.sqrt() - 3.0);
        let mut sum = is_near.select(NEAR[8], FAR[8]);
        for (near, far) in NEAR.into_iter().zip(FAR).rev().skip(1) {
            sum = sum * t + is_near.select(near, far);
        }
        // ∞ · ±1, because the sum would be NaN.
        let size = w.equal(f32::INFINITY).select(f32::INFINITY, sum);
        let value = (size * self).detach();
        let slope = |value: Tensor<'t>| (value * value).exp() * (1.0 / FRAC_2_SQRT_PI);
        value.with_slope(self, slope(value.with_slope(self, slope(value))))
    }

    /// ln(x/(1 − x)), the inverse of [`Tensor::sigmoid`].
    #[track_caller]
    pub fn logit(self) -> Tensor<'t> {
        let value = self.ln() - (-self).log1p();
        let slope = (self * (1.0 - self)).recip();
        let slope = value.is_nan().select(value.detach(), slope);
        value.detach().with_slope(self, slope)
    }

    /// √x with a slope of 0 instead of ∞ at 0: for norms and standard deviations.
    #[track_caller]
    pub(super) fn sqrt_or_flat(self) -> Tensor<'t> {
        let zero = self.equal(0.0);
        zero.select(0.0, zero.select(1.0, self).sqrt())
    }

    /// x where it is at most 0, else 0: the argument of functions that would overflow at large x,
    /// whose gradient would then be 0 · ∞.
    #[track_caller]
    pub(super) fn negative_part(self) -> Tensor<'t> {
        self.gt(0.0).select(0.0, self)
    }

    /// This tensor as f32, if it is a float.
    #[track_caller]
    pub(super) fn require_float(self, what: &str) -> Tensor<'t> {
        self.require(Location::caller(), |g, x| match g.dtype(x) {
            DType::F32 => Ok(()),
            other => Err(format!("{what} does not take {other}; convert with cast")),
        })
    }
}
