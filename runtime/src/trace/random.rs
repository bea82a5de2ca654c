//! Random numbers: each is a function of a key, the step, the operation and the element, so that a
//! run can be repeated bit by bit, and a recomputed value is identical. The key is the session's
//! seed, or a key of the user.

use std::f32::consts::{SQRT_2, TAU};
use std::ops::Range;
use std::panic::Location;

use slabwise_kernels::dtype::DType;
use slabwise_kernels::size::Size;
use slabwise_kernels::spec::Dims;

use super::axes::AxisIndex;
use super::handle::Tensor;
use super::operand::Operand;
use super::{Line, Trace, countable, resolve};
use crate::graph::Graph;
use crate::ops::{GraphBuilder, NodeId, Op};
use crate::shape::{Dim, Shape};

/// A key of random numbers: the same key gives the same numbers, in every step, on every device and
/// with any number of threads, apart from the rounding of `ln` and `cos`. A key is used for one
/// draw; [`Key::split`] and [`Key::fold_in`] derive other keys from it, as in JAX.
///
/// ```
/// # use slabwise::prelude::*;
/// let trace = Trace::inference();
/// let [noise, mask] = trace.key(42).split::<2>();
/// let x = noise.normal((8, 3));
/// let kept = mask.bernoulli(0.9, (8, 3));
/// // Other numbers for each row of a batch, or each step of a loop.
/// let later = noise.fold_in(7).normal((8, 3));
/// # let _ = (x, kept, later);
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Key<'t> {
    /// i32 `[3]`.
    words: Tensor<'t>,
}

/// The streams of a key's numbers, which differ from those of a trace.
const KEYED: u32 = 1 << 31;
/// The streams of the keys made from a key.
const FOLDED: u32 = 3 << 30;

/// Where numbers come from: the random state of the trace, or a key.
#[derive(Clone, Copy)]
struct Source<'t> {
    trace: &'t Trace,
    key: Option<Key<'t>>,
}

macro_rules! distributions {
    ($($(#[$doc:meta])* $name:ident($($arg:ident: $type:ty),*);)*) => {
        impl Trace {
            $($(#[$doc])*
            ///
            /// Different numbers in each step of a training trace, the same in each run of an
            /// inference trace.
            #[track_caller]
            pub fn $name<'t>(&'t self, $($arg: $type),*) -> Tensor<'t> {
                Source { trace: self, key: None }.$name($($arg),*)
            }
            )*
        }

        impl<'t> Key<'t> {
            $($(#[$doc])*
            ///
            /// The same numbers for the same key.
            #[track_caller]
            pub fn $name(self, $($arg: $type),*) -> Tensor<'t> {
                Source { trace: self.words.trace(), key: Some(self) }.$name($($arg),*)
            }
            )*
        }
    };
}

distributions! {
    /// Uniform in [0, 1), f32: multiples of 2⁻²⁴.
    uniform(shape: impl Into<Shape>);
    /// Normal with mean 0 and variance 1, f32, by the transform of Box & Muller (1958): √(−2 ln
    /// u)·cos 2πv.
    normal(shape: impl Into<Shape>);
    /// Normal with these means and standard deviations, f32, in the shape to which the two are
    /// repeated. Gradients reach both.
    normal_of(mean: Tensor<'t>, std: Tensor<'t>);
    /// Truncated normal: with mean 0 and variance 1 under the condition that it lies in a range,
    /// f32, by the inverse of the distribution function (that of erf by Giles 2010). Beyond ±5 the
    /// numbers are coarse.
    truncated_normal(range: Range<f32>, shape: impl Into<Shape>);
    /// True with probability `p`, a number or a tensor that is repeated to the shape.
    bernoulli(p: impl Operand<'t>, shape: impl Into<Shape>);
    /// Integers of a range, i32, equally often except for 1 in 2³¹/length.
    randint(range: Range<i32>, shape: impl Into<Shape>);
    /// Exponential with mean 1, f32: −ln(1 − u).
    exponential(shape: impl Into<Shape>);
    /// Standard Gumbel, f32: −ln(−ln u), finite.
    gumbel(shape: impl Into<Shape>);
    /// A class (i32) for each row of logits along `axis`, which is removed: class i with
    /// probability softmax(logits)ᵢ, as the largest of logits + Gumbel noise. Classes of logit −∞
    /// are never drawn.
    categorical(logits: Tensor<'t>, axis: impl AxisIndex);
    /// `n` different classes (i32, along `axis` in place of the classes) for each row of logits
    /// along `axis`, one after the other without replacement, as the largest `n` of logits + Gumbel
    /// noise (Vieira 2014).
    choices(logits: Tensor<'t>, n: usize, axis: impl AxisIndex);
    /// The integers 0, 1, … n − 1 in random order, i32 `[n]`.
    permutation(n: impl Into<Dim>);
}

impl<'t> Source<'t> {
    /// Uniform numbers of the shape of `near`, in its layer, or of a shape. `slot` numbers the
    /// draws of one key.
    fn draw(
        self,
        at: Line,
        slot: u32,
        near: Option<Tensor<'t>>,
        shape: impl FnOnce(&mut Graph) -> Result<Dims, String>,
    ) -> Tensor<'t> {
        let trace = self.trace;
        if near.is_some_and(Tensor::is_poisoned) {
            return trace.poisoned();
        }
        let (words, stream) = match self.key {
            Some(key) => (key.words, KEYED + slot),
            None => {
                let state = trace.random_state(at);
                let mut building = trace.building.borrow_mut();
                building.streams += 1;
                (state, building.streams - 1)
            }
        };
        let operands: Vec<Tensor<'t>> = std::iter::once(words).chain(near).collect();
        trace.record(at, &operands, |g, ids| {
            let dims = shape(g)?;
            countable("uniform", &g.symbols, &dims)?;
            let index = row_major(g, &dims)?;
            Ok(g.emit(Op::Uniform { stream }, &[ids[0], index], DType::F32, dims))
        })
    }

    #[track_caller]
    fn uniform_like(self, slot: u32, like: Tensor<'t>) -> Tensor<'t> {
        self.draw(Location::caller(), slot, Some(like), |g| {
            Ok(g.dims(like.id).clone())
        })
    }

    #[track_caller]
    fn uniform(self, shape: impl Into<Shape>) -> Tensor<'t> {
        let shape = shape.into();
        self.draw(Location::caller(), 0, None, |g| {
            resolve(&mut g.symbols, &shape).map_err(|why| format!("uniform: {why}"))
        })
    }

    #[track_caller]
    fn normal(self, shape: impl Into<Shape>) -> Tensor<'t> {
        let u = self.uniform(shape);
        self.box_muller(u)
    }

    #[track_caller]
    fn box_muller(self, u: Tensor<'t>) -> Tensor<'t> {
        let v = self.uniform_like(1, u);
        // 1 − u lies in (0, 1], where the logarithm is finite.
        ((1.0 - u).ln() * -2.0).sqrt() * (v * TAU).cos()
    }

    #[track_caller]
    fn normal_of(self, mean: Tensor<'t>, std: Tensor<'t>) -> Tensor<'t> {
        let u = self.uniform_like(0, mean + std);
        mean + std * self.box_muller(u)
    }

    #[track_caller]
    fn truncated_normal(self, range: Range<f32>, shape: impl Into<Shape>) -> Tensor<'t> {
        let Range { start, end } = range;
        // No NaN passes the comparison.
        let [low, high] = match start < end {
            true => [start, end].map(|x| below(f64::from(x))),
            false => [0.0; 2],
        };
        if low >= high {
            return self.trace.fail(
                Location::caller(),
                "",
                format!("truncated_normal: no number lies between {start} and {end}"),
            );
        }
        let x = self.uniform(shape) * (2.0 * (high - low)) as f32 + (2.0 * low - 1.0) as f32;
        // ±1 belong to ±∞.
        let x = x.clamp(f32::EPSILON / 2.0 - 1.0, 1.0 - f32::EPSILON / 2.0);
        (x.erfinv() * SQRT_2).clamp(start, end)
    }

    #[track_caller]
    fn bernoulli(self, p: impl Operand<'t>, shape: impl Into<Shape>) -> Tensor<'t> {
        self.uniform(shape).lt(p)
    }

    #[track_caller]
    fn randint(self, range: Range<i32>, shape: impl Into<Shape>) -> Tensor<'t> {
        let Range { start, end } = range;
        let length = end.checked_sub(start).filter(|&n| n > 0);
        let Some(length) = length else {
            return self.trace.fail(
                Location::caller(),
                "",
                format!(
                    "randint: {start}..{end} has no length from 1 to {}",
                    i32::MAX
                ),
            );
        };
        let u = self.uniform(shape);
        // 24 bits and seven more.
        let bits = |u: Tensor<'t>, count: i32| (u * (1 << count) as f32).cast(DType::I32);
        let x = bits(u, 24) * 128 + bits(self.uniform_like(1, u), 7);
        x - x / length * length + start
    }

    #[track_caller]
    fn exponential(self, shape: impl Into<Shape>) -> Tensor<'t> {
        -(-self.uniform(shape)).log1p()
    }

    #[track_caller]
    fn gumbel(self, shape: impl Into<Shape>) -> Tensor<'t> {
        gumbel_of(self.uniform(shape))
    }

    /// Logits with Gumbel noise, of f32.
    #[track_caller]
    fn perturbed(self, logits: Tensor<'t>) -> Tensor<'t> {
        logits + gumbel_of(self.uniform_like(0, logits))
    }

    #[track_caller]
    fn categorical(self, logits: Tensor<'t>, axis: impl AxisIndex) -> Tensor<'t> {
        self.perturbed(logits).argmax(axis)
    }

    #[track_caller]
    fn choices(self, logits: Tensor<'t>, n: usize, axis: impl AxisIndex) -> Tensor<'t> {
        self.perturbed(logits).topk(n, axis).1
    }

    #[track_caller]
    fn permutation(self, n: impl Into<Dim>) -> Tensor<'t> {
        let u = self.uniform((n.into(),));
        // Among more draws of 24 bits two are often equal; a second draw breaks such ties.
        if u.len(0).is_some_and(|n| n < 1 << 9) {
            return u.argsort(false);
        }
        let by_lower = self.uniform_like(1, u).argsort(false);
        let by_upper = u.gather(0, by_lower).argsort(false);
        by_lower.gather(0, by_upper)
    }
}

/// −ln(−ln u) of a number in [0, 1), of which 0 counts as 2⁻²⁵.
#[track_caller]
fn gumbel_of(u: Tensor<'_>) -> Tensor<'_> {
    const LEAST: f32 = 1.0 / 33_554_432.0;
    -(-u.maximum(LEAST).ln()).ln()
}

/// The normal distribution function (Marsaglia, "Evaluating the normal distribution", 2004).
fn below(x: f64) -> f64 {
    if x.abs() > 7.0 {
        return if x > 0.0 { 1.0 } else { 0.0 };
    }
    let (mut term, mut sum, mut odd) = (x, x, 1.0);
    while sum + term != sum {
        odd += 2.0;
        term *= x * x / odd;
        sum += term;
    }
    0.5 + sum * (-0.5 * x * x).exp() / std::f64::consts::TAU.sqrt()
}

impl Trace {
    /// The key of a seed. It is a constant of the program; a key that changes from run to run is an
    /// input ([`Key::of`]) or made with the number of the step ([`Key::fold_in`]).
    #[track_caller]
    pub fn key(&self, seed: u64) -> Key<'_> {
        let words = [seed as u32, (seed >> 32) as u32, 0];
        let bytes = words.into_iter().flat_map(u32::to_ne_bytes).collect();
        Key {
            words: self.constant_of(Location::caller(), DType::I32, &[3], bytes),
        }
    }
}

impl<'t> Key<'t> {
    /// The key that a tensor i32 `[3]` holds, such as an input or the [words](Key::words) of
    /// another key.
    #[track_caller]
    pub fn of(words: Tensor<'t>) -> Key<'t> {
        let trace = words.trace();
        let words = trace.record(Location::caller(), &[words], |g, ids| {
            let (dtype, dims) = (g.dtype(ids[0]), g.dims(ids[0]));
            if dtype != DType::I32 || dims.len() != 1 || !dims[0].is(3) {
                return Err(format!(
                    "a key of {dtype} {}: i32 [3] is needed",
                    g.symbols.show(dims)
                ));
            }
            Ok(ids[0])
        });
        Key { words }
    }

    /// The key as a tensor: i32 `[3]`.
    pub fn words(self) -> Tensor<'t> {
        self.words
    }

    /// A derived key for each integer, whose numbers are independent of those of this key: 72 bits
    /// of Philox at the integer. `data` is an i32 scalar, such as [`Trace::completed_steps`], or a
    /// number.
    #[track_caller]
    pub fn fold_in(self, data: impl Operand<'t>) -> Key<'t> {
        let at = Location::caller();
        let trace = self.words.trace();
        let data = data.lift(trace, DType::I32, at);
        let words = trace.record(at, &[self.words, data], |g, ids| {
            let (dtype, dims) = (g.dtype(ids[1]), g.dims(ids[1]));
            if dtype != DType::I32 || !dims.is_empty() {
                return Err(format!(
                    "fold_in of {dtype} {}: an i32 scalar is needed",
                    g.symbols.show(dims)
                ));
            }
            Ok(folded(g, ids[0], ids[1]))
        });
        Key { words }
    }

    /// `N` other keys: those that [`Key::fold_in`] makes of 0, 1, … `N` − 1.
    #[track_caller]
    pub fn split<const N: usize>(self) -> [Key<'t>; N] {
        std::array::from_fn(|i| self.fold_in(i as i32))
    }
}

/// The words of the key that [`Key::fold_in`] makes of an i32 scalar.
pub(super) fn folded(g: &mut Graph, words: NodeId, data: NodeId) -> NodeId {
    let one = Dims::from_slice(&[Size::ONE]);
    let index = g.reshape(data, &one);
    let folded = [0, 1, 2].map(|word| {
        let stream = FOLDED + word;
        g.emit(
            Op::Uniform { stream },
            &[words, index],
            DType::F32,
            one.clone(),
        )
    });
    let three = Dims::from_slice(&[Size::fixed(3)]);
    let joined = g.emit(Op::Concat { axis: 0 }, &folded, DType::F32, three.clone());
    let scale = g.full(16_777_216.0, DType::F32, &three);
    let scaled = g.mul(joined, scale);
    g.cast(scaled, DType::I32)
}

impl<'t> Tensor<'t> {
    /// Uniform numbers in [0, 1) of this tensor's shape.
    #[track_caller]
    pub fn uniform_like(self) -> Tensor<'t> {
        let source = Source {
            trace: self.trace(),
            key: None,
        };
        source.uniform_like(0, self)
    }

    /// Normal numbers with mean 0 and variance 1 of this tensor's shape; see [`Trace::normal`].
    #[track_caller]
    pub fn normal_like(self) -> Tensor<'t> {
        let source = Source {
            trace: self.trace(),
            key: None,
        };
        source.box_muller(source.uniform_like(0, self))
    }
}

/// The number of each element in row-major order.
fn row_major(g: &mut Graph, dims: &Dims) -> Result<NodeId, String> {
    let mut strides = dims.clone();
    let mut stride = Size::ONE;
    for (slot, &len) in strides.iter_mut().zip(dims).rev() {
        *slot = stride;
        stride = stride
            .checked_mul(len)
            .ok_or("uniform: the number of elements has no form")?;
    }
    Ok(g.emit(Op::Index(strides), &[], DType::I32, dims.clone()))
}
