//! Elementary functions on single floats.

/// How `a · b + c` is computed: with one rounding where the CPU has an instruction for it, with two elsewhere.
pub(crate) trait Arith: 'static {
    /// a · b + c
    fn fma(a: f32, b: f32, c: f32) -> f32;
}

/// Multiplication, then addition.
pub(crate) struct Plain;

/// A fused multiply-add.
pub(crate) struct Fused;

impl Arith for Plain {
    #[inline(always)]
    fn fma(a: f32, b: f32, c: f32) -> f32 {
        a * b + c
    }
}

impl Arith for Fused {
    #[inline(always)]
    fn fma(a: f32, b: f32, c: f32) -> f32 {
        a.mul_add(b, c)
    }
}
#[inline(always)]
pub(crate) fn exp<A: Arith>(x: f32) -> f32 {
    x.exp()
}
#[inline(always)]
pub(crate) fn exp2<A: Arith>(x: f32) -> f32 {
    x.exp2()
}
#[inline(always)]
pub(crate) fn expm1<A: Arith>(x: f32) -> f32 {
    x.exp_m1()
}
#[inline(always)]
pub(crate) fn ln<A: Arith>(x: f32) -> f32 {
    x.ln()
}
#[inline(always)]
pub(crate) fn log1p<A: Arith>(x: f32) -> f32 {
    x.ln_1p()
}
#[inline(always)]
pub(crate) fn tanh<A: Arith>(x: f32) -> f32 {
    x.tanh()
}
#[inline(always)]
pub(crate) fn sigmoid<A: Arith>(x: f32) -> f32 {
    1.0 / (1.0 + exp::<A>(-x))
}
#[inline(always)]
pub(crate) fn erf<A: Arith>(x: f32) -> f32 {
    x
}
#[inline(always)]
pub(crate) fn sin<A: Arith>(x: f32) -> f32 {
    x.sin()
}
#[inline(always)]
pub(crate) fn cos<A: Arith>(x: f32) -> f32 {
    x.cos()
}
#[inline(always)]
pub(crate) fn pow(x: f32, y: f32) -> f32 {
    x.powf(y)
}
