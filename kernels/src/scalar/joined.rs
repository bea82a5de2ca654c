//! Operations that are computed together. Each rounds for itself, so the bits are those of the
//! operations one after the other.

use std::marker::PhantomData;

use super::code::{Add, Mul, Neg, Relu, Sub};
use super::{Lanewise, ScalarOp, Visit, Word};
use crate::math::Arith;

/// The code of one operation applied to the result of another: `outer(inner(x, y), z)`, or with
/// `SWAPPED` arguments `outer(z, inner(x, y))`.
struct Pair<I, O, const SWAPPED: bool>(PhantomData<(I, O)>);

impl<T: Word + 'static, I, O, const SWAPPED: bool> Lanewise for Pair<I, O, SWAPPED>
where
    I: Lanewise<In = T, Out = T>,
    O: Lanewise<In = T, Out = T>,
{
    type In = T;
    type Out = T;
    const ARITY: usize = I::ARITY + O::ARITY - 1;
    #[inline(always)]
    fn apply<A: Arith>([x, y, z]: [T; 3]) -> T {
        let inner = I::apply::<A>([x, y, z]);
        O::apply::<A>(if SWAPPED {
            [z, inner, inner]
        } else {
            [inner, z, z]
        })
    }
}

/// The code of `select(x <= y, y, z)`: with y = 0, the gradient of `relu`.
struct AboveOr;

impl Lanewise for AboveOr {
    type In = f32;
    type Out = f32;
    const ARITY: usize = 3;
    #[inline(always)]
    fn apply<A: Arith>([x, y, z]: [f32; 3]) -> f32 {
        if x <= y { y } else { z }
    }
}

/// The code of a product.
pub(crate) type Product = Mul<f32>;

/// The code of a negation.
pub(crate) type Negation = Neg<f32>;

/// The code of a sum.
pub(crate) type Sum = Add<f32>;

/// Operations on floats that have code to be computed together, the first one first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Joined {
    /// One operation after another. `swapped` if the inner result is the second argument.
    Pair {
        /// The first operation.
        inner: ScalarOp,
        /// The second operation.
        outer: ScalarOp,
        /// Whether its second argument is the inner result.
        swapped: bool,
    },
    /// `relu(x · y + z)`
    ReluOfProductSum,
    /// `select(x <= y, y, z)`
    AboveOr,
}

/// Calls the visitor with the code of joined operations, where such code exists. Pairs have it for
/// sums, differences and products of sums, differences and products, and for `relu` of those.
pub(crate) fn visit_joined<V: Visit>(joined: Joined, visitor: V) -> Option<V::Output> {
    fn after<I: Lanewise<In = f32, Out = f32>, V: Visit>(
        outer: ScalarOp,
        swapped: bool,
        visitor: V,
    ) -> Option<V::Output> {
        Some(match (outer, swapped) {
            (ScalarOp::Add, _) => visitor.visit::<Pair<I, Add<f32>, false>>(),
            (ScalarOp::Mul, _) => visitor.visit::<Pair<I, Mul<f32>, false>>(),
            (ScalarOp::Sub, false) => visitor.visit::<Pair<I, Sub<f32>, false>>(),
            (ScalarOp::Sub, true) => visitor.visit::<Pair<I, Sub<f32>, true>>(),
            (ScalarOp::Relu, _) => visitor.visit::<Pair<I, Relu<f32>, false>>(),
            _ => return None,
        })
    }
    match joined {
        Joined::Pair {
            inner,
            outer,
            swapped,
        } => match inner {
            ScalarOp::Add => after::<Add<f32>, V>(outer, swapped, visitor),
            ScalarOp::Sub => after::<Sub<f32>, V>(outer, swapped, visitor),
            ScalarOp::Mul => after::<Mul<f32>, V>(outer, swapped, visitor),
            _ => None,
        },
        Joined::ReluOfProductSum => {
            Some(visitor.visit::<Pair<Pair<Mul<f32>, Add<f32>, false>, Relu<f32>, false>>())
        }
        Joined::AboveOr => Some(visitor.visit::<AboveOr>()),
    }
}
