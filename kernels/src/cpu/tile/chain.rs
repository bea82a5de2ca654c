//! Chains: expressions of several operations that are computed in one sweep over a tile, in place
//! of one of their arguments where possible. They are the updates of optimizers, which read and
//! write more memory than most kernels.
//!
//! A chain is a type that is both the pattern of a value's instructions and the code that computes
//! it. Each operation rounds for itself, so the bits are those of single operations.

use std::marker::PhantomData;

use super::ops::View;
use crate::cpu::Isa;
use crate::cpu::simd::{Entry, Routine, entry};
use crate::math::Arith;
use crate::scalar::code::{Add, Div, Mul, Sqrt, Sub};
use crate::scalar::{Named, ScalarOp, Word};
use crate::spec::{Inst, ValueId};

/// Most arguments of a chain.
const ARGUMENTS_MAX: usize = 6;

/// A value that differs from point to point. Number 0 is the one that the result may overwrite.
struct Varying<const K: usize>;

/// A value that all points share.
struct Shared<const K: usize>;

/// An operation on one expression, and on two.
struct One<O, X>(PhantomData<(O, X)>);
struct Two<O, X, Y>(PhantomData<(O, X, Y)>);

type Sum<X, Y> = Two<Add<f32>, X, Y>;
type Difference<X, Y> = Two<Sub<f32>, X, Y>;
type Product<X, Y> = Two<Mul<f32>, X, Y>;
type Quotient<X, Y> = Two<Div<f32>, X, Y>;
type Root<X> = One<Sqrt<f32>, X>;

/// `x₀ · s₁`
type Scaled = Product<Varying<0>, Shared<1>>;
/// A running average: `x₀ · s₁ + x₂ · s₃`
type Average = Sum<Scaled, Product<Varying<2>, Shared<3>>>;
/// A running average of squares: `x₀ · s₁ + x₂ · x₂ · s₃`
type SquareAverage = Sum<Scaled, Product<Product<Varying<2>, Varying<2>>, Shared<3>>>;
/// A momentum: `x₀ · s₁ + x₂`
type Momentum = Sum<Scaled, Varying<2>>;
/// Adam's change: `x₂ / (√x₃ + s₄) · s₅`
type Change = Product<Quotient<Varying<2>, Sum<Root<Varying<3>>, Shared<4>>>, Shared<5>>;

/// All chains, with the longest of those that may match one value first.
fn all(isa: Isa) -> [Chain; 6] {
    [
        Chain::new::<Difference<Scaled, Change>>(isa),
        Chain::new::<Difference<Varying<0>, Change>>(isa),
        Chain::new::<SquareAverage>(isa),
        Chain::new::<Average>(isa),
        Chain::new::<Momentum>(isa),
        Chain::new::<Difference<Varying<0>, Product<Varying<2>, Shared<1>>>>(isa),
    ]
}

/// An expression as code and as a pattern.
trait Expression: 'static {
    /// Its varying and its shared arguments, by bit.
    const VARYING: usize = 0;
    const SHARED: usize = 0;
    /// Its value for these arguments.
    fn value<A: Arith>(args: &[f32; ARGUMENTS_MAX]) -> f32;
    /// Whether `value` is such an expression; sets its arguments.
    fn matches(values: &Values, value: ValueId, args: &mut Matched) -> bool;
    /// [`Expression::matches`] for an expression that is part of another.
    fn matches_part(values: &Values, value: ValueId, args: &mut Matched) -> bool {
        Self::matches(values, value, args)
    }
}

/// The arguments found so far.
type Matched = [Option<ValueId>; ARGUMENTS_MAX];

/// The values that a chain is looked for in.
pub(super) struct Values<'a> {
    pub code: &'a [Inst],
    /// Whether a value can be computed as part of the chain.
    pub is_part: &'a dyn Fn(ValueId) -> bool,
    /// Whether a value differs from column to column, or is the same for all points.
    pub varies: &'a dyn Fn(ValueId) -> bool,
    pub is_shared: &'a dyn Fn(ValueId) -> bool,
}

impl<const K: usize> Expression for Varying<K> {
    const VARYING: usize = 1 << K;
    #[inline(always)]
    fn value<A: Arith>(args: &[f32; ARGUMENTS_MAX]) -> f32 {
        args[K]
    }
    fn matches(values: &Values, value: ValueId, args: &mut Matched) -> bool {
        // Each argument is another value, so that none but number 0 lies where the result does.
        let taken = (0..ARGUMENTS_MAX).any(|k| k != K && args[k] == Some(value));
        !taken && (values.varies)(value) && *args[K].get_or_insert(value) == value
    }
}

impl<const K: usize> Expression for Shared<K> {
    const SHARED: usize = 1 << K;
    #[inline(always)]
    fn value<A: Arith>(args: &[f32; ARGUMENTS_MAX]) -> f32 {
        args[K]
    }
    fn matches(values: &Values, value: ValueId, args: &mut Matched) -> bool {
        (values.is_shared)(value) && *args[K].get_or_insert(value) == value
    }
}

impl<O: Named<In = f32, Out = f32>, X: Expression> Expression for One<O, X> {
    const VARYING: usize = X::VARYING;
    const SHARED: usize = X::SHARED;
    #[inline(always)]
    fn value<A: Arith>(args: &[f32; ARGUMENTS_MAX]) -> f32 {
        O::apply::<A>([X::value::<A>(args), 0.0, 0.0])
    }
    fn matches(values: &Values, value: ValueId, args: &mut Matched) -> bool {
        match values.code[usize::from(value)] {
            Inst::Op(op, [x, ..]) if op == O::OP => X::matches_part(values, x, args),
            _ => false,
        }
    }
    fn matches_part(values: &Values, value: ValueId, args: &mut Matched) -> bool {
        (values.is_part)(value) && Self::matches(values, value, args)
    }
}

impl<O: Named<In = f32, Out = f32>, X: Expression, Y: Expression> Expression for Two<O, X, Y> {
    const VARYING: usize = X::VARYING | Y::VARYING;
    const SHARED: usize = X::SHARED | Y::SHARED;
    #[inline(always)]
    fn value<A: Arith>(args: &[f32; ARGUMENTS_MAX]) -> f32 {
        O::apply::<A>([X::value::<A>(args), Y::value::<A>(args), 0.0])
    }
    fn matches(values: &Values, value: ValueId, args: &mut Matched) -> bool {
        let Inst::Op(op, [x, y, _]) = values.code[usize::from(value)] else {
            return false;
        };
        let mut found = |x, y| {
            let mut both = *args;
            let matches =
                X::matches_part(values, x, &mut both) && Y::matches_part(values, y, &mut both);
            if matches {
                *args = both;
            }
            matches
        };
        let commutes = matches!(op, ScalarOp::Add | ScalarOp::Mul);
        op == O::OP && (found(x, y) || (commutes && found(y, x)))
    }
    fn matches_part(values: &Values, value: ValueId, args: &mut Matched) -> bool {
        (values.is_part)(value) && Self::matches(values, value, args)
    }
}

/// A chain, compiled for an instruction set.
pub(super) struct Chain {
    matches: fn(&Values, ValueId, &mut Matched) -> bool,
    varying: usize,
    /// For a result in place of argument 0, for a result elsewhere, and for varying arguments that
    /// are the same in all columns after all.
    loops: [Entry<ChainCall>; 3],
}

/// A value as a chain: its number, and its arguments, of which unused ones repeat the first.
#[derive(Clone, Copy)]
pub(super) struct Found {
    chain: usize,
    pub args: [ValueId; ARGUMENTS_MAX],
}

/// The work of a chain on one tile: `rows` lines of `lanes` elements.
pub(super) struct ChainCall {
    pub rows: usize,
    pub lanes: usize,
    pub args: [View; ARGUMENTS_MAX],
    pub out: *mut u32,
    pub out_rs: usize,
}

impl Chain {
    fn new<E: Expression>(isa: Isa) -> Chain {
        Chain {
            matches: E::matches,
            varying: E::VARYING,
            loops: [
                entry::<Sweep<E, IN_PLACE>>(isa),
                entry::<Sweep<E, APART>>(isa),
                entry::<Sweep<E, ANY>>(isa),
            ],
        }
    }

    /// The chain that a value is, if it is one.
    pub fn find(values: &Values, value: ValueId) -> Option<Found> {
        all(Isa::Portable)
            .iter()
            .enumerate()
            .find_map(|(k, chain)| {
                let mut args = [None; ARGUMENTS_MAX];
                (chain.matches)(values, value, &mut args).then(|| {
                    let first = args[0].expect("every chain has argument 0");
                    Found {
                        chain: k,
                        args: args.map(|arg| arg.unwrap_or(first)),
                    }
                })
            })
    }

    /// The code of a value that [`Chain::find`] has found.
    pub fn of(found: &Found, isa: Isa) -> Chain {
        all(isa)
            .into_iter()
            .nth(found.chain)
            .expect("a chain that was found")
    }

    /// Runs the chain; `in_place` if the result is written over argument 0.
    ///
    /// # Safety
    /// The views must be readable for the lines, `out` writable, and `out` must overlap no view but
    /// that of argument 0, in which it is if `in_place`.
    pub unsafe fn run(&self, call: &ChainCall, in_place: bool) {
        let varies =
            (0..ARGUMENTS_MAX).all(|k| self.varying >> k & 1 == 0 || !call.args[k].is_invariant());
        let which = match (varies, in_place) {
            (false, _) => ANY,
            (true, false) => APART,
            (true, true) => IN_PLACE,
        };
        // SAFETY: the caller's promise.
        unsafe { self.loops[which](call) }
    }
}

const IN_PLACE: usize = 0;
const APART: usize = 1;
const ANY: usize = 2;

struct Sweep<E, const WHICH: usize>(PhantomData<E>);

impl<E: Expression, const WHICH: usize> Routine for Sweep<E, WHICH> {
    type Args = ChainCall;

    /// Like [`Chain::run`].
    #[inline(always)]
    unsafe fn run<A: Arith>(call: &ChainCall) {
        for r in 0..call.rows {
            // SAFETY: the caller promises readable views of this row.
            let start = |k: usize| unsafe { call.args[k].ptr.offset(r as isize * call.args[k].rs) };
            let shared: [f32; ARGUMENTS_MAX] = std::array::from_fn(|k| match E::SHARED >> k & 1 {
                // SAFETY: shared values have one element.
                1 => f32::of(unsafe { *start(k) }),
                _ => 0.0,
            });
            // SAFETY: the caller promises a writable line.
            let out = unsafe { call.out.add(r * call.out_rs) };
            if WHICH == ANY {
                for i in 0..call.lanes {
                    // SAFETY: as above; the element may be argument 0's, which is read before.
                    unsafe {
                        let args = std::array::from_fn(|k| match E::VARYING >> k & 1 {
                            1 => f32::of(*start(k).add(i * call.args[k].cs)),
                            _ => shared[k],
                        });
                        *out.add(i) = E::value::<A>(&args).bits();
                    }
                }
                continue;
            }
            let lines: [&[u32]; ARGUMENTS_MAX] = std::array::from_fn(|k| {
                let read = E::VARYING >> k & 1 == 1 && !(WHICH == IN_PLACE && k == 0);
                let len = if read { call.lanes } else { 0 };
                // SAFETY: the caller promises readable views; others have no length.
                unsafe { std::slice::from_raw_parts(start(k), len) }
            });
            // SAFETY: the caller promises that `out` overlaps none of these lines.
            let out = unsafe { std::slice::from_raw_parts_mut(out, call.lanes) };
            line::<E, A, WHICH>(&lines, &shared, out);
        }
    }
}

#[inline(always)]
fn line<E: Expression, A: Arith, const WHICH: usize>(
    lines: &[&[u32]; ARGUMENTS_MAX],
    shared: &[f32; ARGUMENTS_MAX],
    out: &mut [u32],
) {
    let n = out.len();
    let is_read = |k: usize| E::VARYING >> k & 1 == 1 && !(WHICH == IN_PLACE && k == 0);
    let lines: [&[u32]; ARGUMENTS_MAX] =
        std::array::from_fn(|k| if is_read(k) { &lines[k][..n] } else { lines[k] });
    for i in 0..n {
        let args = std::array::from_fn(|k| {
            if is_read(k) {
                f32::of(lines[k][i])
            } else if E::VARYING >> k & 1 == 1 {
                f32::of(out[i])
            } else {
                shared[k]
            }
        });
        out[i] = E::value::<A>(&args).bits();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The chain of the last value, if values 0 to 3 vary, 4 to 6 are shared, and the
    /// value `kept` is also needed for itself.
    fn find(steps: &[(ScalarOp, ValueId, ValueId)], kept: Option<ValueId>) -> Option<Found> {
        let mut code: Vec<Inst> = (0..7).map(Inst::Load).collect();
        code.extend(steps.iter().map(|&(op, x, y)| Inst::Op(op, [x, y, 0])));
        let values = Values {
            code: &code,
            is_part: &|v| kept != Some(v),
            varies: &|v| !(4..7).contains(&v),
            is_shared: &|v| (4..7).contains(&v),
        };
        Chain::find(&values, (code.len() - 1) as ValueId)
    }

    #[test]
    fn updates_are_found_with_their_arguments() {
        use ScalarOp::{Add, Div, Mul, Sqrt, Sub};
        let args = |steps: &[_]| find(steps, None).map(|found| found.args);
        // The factors come in either order.
        let average = [(Mul, 4, 1), (Mul, 3, 5), (Add, 7, 8)];
        assert_eq!(args(&average), Some([1, 4, 3, 5, 1, 1]));
        let squares = [(Mul, 2, 4), (Mul, 3, 3), (Mul, 8, 5), (Add, 7, 9)];
        assert_eq!(args(&squares), Some([2, 4, 3, 5, 2, 2]));
        let change = [(Sqrt, 2, 0), (Add, 7, 4), (Div, 1, 8), (Mul, 9, 5)];
        let adam = [&change[..], &[(Sub, 0, 10)]].concat();
        assert_eq!(args(&adam), Some([0, 0, 1, 2, 4, 5]));
        let decayed = [&change[..], &[(Mul, 0, 6), (Sub, 11, 10)]].concat();
        assert_eq!(args(&decayed), Some([0, 6, 1, 2, 4, 5]));
        // With a part that is needed for itself, the chain begins after it.
        let shorter = find(&adam, Some(8)).map(|found| found.args);
        assert_eq!(shorter, Some([0, 5, 9, 0, 0, 0]));
        // An argument that is also the one overwritten, and a single operation.
        assert!(args(&[(Mul, 1, 4), (Add, 7, 1)]).is_none());
        assert!(args(&[(Add, 0, 1)]).is_none());
    }
}
