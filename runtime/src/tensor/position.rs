//! Positions in sequences: rotary embeddings, sinusoids, relative buckets and linear biases.

use std::f64::consts::TAU;
use std::panic::Location;

use slabwise_kernels::dtype::DType;
use slabwise_kernels::size::Size;

use super::{Operand, Tensor, check_index};
use crate::ops::GraphBuilder;
use crate::trace::{Line, Trace};

/// The layout of a rotary embedding: the elements of a vector that form pairs, or the order of
/// sines and cosines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum RopeLayout {
    /// Element i and element i + width/2 (GPT-NeoX, Llama on the Hugging Face hub).
    #[default]
    Halves,
    /// Elements 2i and 2i + 1 (Su et al. 2021, GPT-J, Meta's Llama).
    Interleaved,
}

/// A change of the frequencies of a rotary embedding for sequences longer than those of training.
#[derive(Clone, Copy, Debug, PartialEq, Default)]
pub enum RopeScaling {
    /// None.
    #[default]
    None,
    /// All frequencies divided by a factor (Chen et al. 2023).
    Linear(f32),
    /// The base multiplied by factor^(width/(width − 2)), so that the highest frequency stays and
    /// the lowest is divided by the factor ("NTK-aware").
    Ntk(f32),
    /// Llama 3.1: frequencies with less than `low` turns in `original` positions are divided by
    /// `factor`, those with more than `high` stay, those between are interpolated.
    Llama3 {
        /// The divisor.
        factor: f32,
        /// Turns below which a frequency is divided.
        low: f32,
        /// Turns above which a frequency stays.
        high: f32,
        /// The positions of training.
        original: usize,
    },
    /// YaRN (Peng et al. 2023), with cosines and sines scaled by 0.1·ln(factor) + 1.
    Yarn {
        /// The divisor of low frequencies.
        factor: f32,
        /// Turns above which a frequency stays; 32 is usual.
        fast: f32,
        /// Turns below which a frequency is divided; 1 is usual.
        slow: f32,
        /// The positions of training.
        original: usize,
    },
}

/// A rotary position embedding (Su et al. 2021): pair i of a vector at position p is rotated by the
/// angle p·base^(−2i/width). See [`Tensor::rope`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rope {
    width: usize,
    base: f32,
    layout: RopeLayout,
    scaling: RopeScaling,
}

impl Rope {
    /// Rotates the first `width` elements of a vector, with the base 10,000 and pairs by halves.
    pub fn new(width: usize) -> Self {
        Rope {
            width,
            base: 10_000.0,
            layout: RopeLayout::Halves,
            scaling: RopeScaling::None,
        }
    }

    /// With this base.
    pub fn base(mut self, base: f32) -> Self {
        self.base = base;
        self
    }

    /// With these pairs.
    pub fn layout(mut self, layout: RopeLayout) -> Self {
        self.layout = layout;
        self
    }

    /// With this scaling.
    pub fn scaling(mut self, scaling: RopeScaling) -> Self {
        self.scaling = scaling;
        self
    }

    /// The angle per position of each pair, in radians, and the factor of cosines and sines.
    ///
    /// Computed in f32 with the same operations as the tables that models are trained with, because
    /// at position 5,000 the last bit of a frequency is 3·10⁻⁴ of an angle.
    pub fn frequencies(&self) -> (Vec<f32>, f32) {
        let base = match self.scaling {
            RopeScaling::Ntk(factor) => {
                let width = self.width as f64;
                let grown = f64::from(factor).powf(width / (width - 2.0));
                (f64::from(self.base) * grown) as f32
            }
            _ => self.base,
        };
        let positions: Vec<f32> = (0..self.width / 2)
            .map(|i| base.powf((2 * i) as f32 / self.width as f32))
            .collect();
        let plain = positions.iter().map(|&p| 1.0 / p);
        match self.scaling {
            RopeScaling::None | RopeScaling::Ntk(_) => (plain.collect(), 1.0),
            RopeScaling::Linear(factor) => (plain.map(|f| f / factor).collect(), 1.0),
            RopeScaling::Llama3 {
                factor,
                low,
                high,
                original,
            } => {
                let original = original as f32;
                let each = |f: f32| {
                    let length = TAU as f32 / f;
                    if length > original / low {
                        f / factor
                    } else if length < original / high {
                        f
                    } else {
                        let share = (original / length - low) / (high - low);
                        (1.0 - share) * f / factor + share * f
                    }
                };
                (plain.map(each).collect(), 1.0)
            }
            RopeScaling::Yarn {
                factor,
                fast,
                slow,
                original,
            } => {
                let width = self.width as f64;
                // The pair that turns so many times in the positions of training.
                let pair = |turns: f32| {
                    let length = original as f64 / (f64::from(turns) * TAU);
                    width * length.ln() / (2.0 * f64::from(base).ln())
                };
                let low = pair(fast).floor().max(0.0) as f32;
                let high = pair(slow).ceil().min(width - 1.0) as f32;
                let span = if low == high { 0.001 } else { high - low };
                let each = |(i, &p): (usize, &f32)| {
                    let stays = 1.0 - ((i as f32 - low) / span).clamp(0.0, 1.0);
                    1.0 / (factor * p) * (1.0 - stays) + 1.0 / p * stays
                };
                let scale = if factor > 1.0 {
                    0.1 * factor.ln() + 1.0
                } else {
                    1.0
                };
                (positions.iter().enumerate().map(each).collect(), scale)
            }
        }
    }
}

/// f32 numbers as a constant of one axis.
fn table<'t>(trace: &'t Trace, at: Line, numbers: &[f32]) -> Tensor<'t> {
    let bytes = numbers.iter().flat_map(|n| n.to_le_bytes()).collect();
    trace.constant_of(at, DType::F32, &[numbers.len()], bytes)
}

impl<'t> Tensor<'t> {
    /// This tensor `[…, length, width]` rotated by a [rotary embedding](Rope) at `positions` (i32),
    /// which broadcast to `[…, length]`: for queries and keys `[batch, heads, length, width]` the
    /// positions are `[length]` or `[batch, 1, length]`. Positions that begin at an input of the
    /// run are `trace.arange(length) + begin`. Elements after the first `rope.width` are unchanged.
    #[track_caller]
    pub fn rope(self, positions: Tensor<'t>, rope: &Rope) -> Tensor<'t> {
        let at = Location::caller();
        let (frequencies, scale) = rope.frequencies();
        let x = self.trace.record(at, &[self, positions], |g, ids| {
            let (x, of_positions) = (g.dims(ids[0]), g.dims(ids[1]));
            let say = |why: &str| {
                let (x, p) = (g.symbols.show(x), g.symbols.show(of_positions));
                Err(format!("rope of {x} at positions {p}: {why}"))
            };
            let width = x.last().and_then(|w| w.as_fixed());
            let enough = width.is_some_and(|w| usize::try_from(w).is_ok_and(|w| w >= rope.width));
            if x.len() < 2 || !enough {
                return say(&format!(
                    "[…, length, width] of a fixed width of {} or more is needed",
                    rope.width
                ));
            }
            if rope.width == 0 || rope.width % 2 == 1 {
                return say(&format!("{} elements do not form pairs", rope.width));
            }
            if g.dtype(ids[1]) != DType::I32 {
                return say("positions are i32");
            }
            if of_positions.is_empty() || of_positions.len() >= x.len() {
                return say("positions [length] or [batch…, length] are needed");
            }
            if !(scale.is_finite() && frequencies.iter().all(|f| f.is_finite())) {
                let Rope { base, scaling, .. } = rope;
                return say(&format!(
                    "the frequencies of a base of {base} with the scaling {scaling:?} are not finite"
                ));
            }
            Ok(ids[0])
        });
        if x.is_poisoned() {
            return x;
        }
        self.trace.on_behalf(at, || {
            let frequencies = table(self.trace, at, &frequencies);
            let angles = positions.cast(DType::F32).unsqueeze(positions.rank()) * frequencies;
            let (mut cos, mut sin) = (angles.cos(), angles.sin());
            if scale != 1.0 {
                (cos, sin) = (cos * scale, sin * scale);
            }
            x.rotate_pairs(cos, sin, rope.layout)
        })
    }

    /// The pairs (a, b) of each vector `[…, width]` rotated to (a·cos − b·sin, b·cos + a·sin):
    /// `cos` and `sin` broadcast to `[…, pairs]`, and elements beyond the first 2·pairs stay.
    #[track_caller]
    pub fn rotate_pairs(self, cos: Tensor<'t>, sin: Tensor<'t>, layout: RopeLayout) -> Tensor<'t> {
        let at = Location::caller();
        let x = self.trace.record(at, &[self, cos, sin], |g, ids| {
            let [x, c, s] = [0, 1, 2].map(|i| g.dims(ids[i]).last().and_then(|d| d.as_fixed()));
            match (x, c, s) {
                (Some(x), Some(c), Some(s)) if c == s && c > 0 && c <= x / 2 => Ok(ids[0]),
                _ => Err(format!(
                    "rotate_pairs of {} by cosines {} and sines {}: half as many, or fewer, cosines and sines as elements are needed",
                    g.symbols.show(g.dims(ids[0])),
                    g.symbols.show(g.dims(ids[1])),
                    g.symbols.show(g.dims(ids[2]))
                )),
            }
        });
        let Some(last) = x.rank().checked_sub(1) else {
            return x;
        };
        let (Some(width), Some(pairs)) = (x.len(last), cos.len(cos.rank() - 1)) else {
            return x;
        };
        self.trace.on_behalf(at, || {
            let turned = match layout {
                RopeLayout::Halves => {
                    let a = x.slice(last, ..pairs);
                    let b = x.slice(last, pairs..2 * pairs);
                    vec![a * cos - b * sin, b * cos + a * sin]
                }
                RopeLayout::Interleaved => {
                    let a = x.slice_step(last, ..2 * pairs, 2);
                    let b = x.slice_step(last, 1..2 * pairs, 2);
                    let both = [a * cos - b * sin, b * cos + a * sin];
                    vec![self.trace.stack(&both, last + 1).flatten(last)]
                }
            };
            let rest = (2 * pairs < width).then(|| x.slice(last, 2 * pairs..));
            let parts: Vec<Tensor<'t>> = turned.into_iter().chain(rest).collect();
            self.trace.concat(&parts, last)
        })
    }

    /// Sines and cosines of positions `[…]` (i32 or f32): `[…, width]`, with the angles
    /// p·base^(−2i/width) (Vaswani et al. 2017). [`RopeLayout::Halves`] puts all sines before all
    /// cosines, [`RopeLayout::Interleaved`] each sine before its cosine.
    #[track_caller]
    pub fn sinusoids(self, width: usize, base: f32, layout: RopeLayout) -> Tensor<'t> {
        let at = Location::caller();
        let x = self.require(at, |g, x| match width {
            0 => Err("sinusoids: a width of 0 has none".into()),
            width if width % 2 == 1 => Err(format!("sinusoids: a width of {width} has no pairs")),
            width if width > 1 << 24 => Err(format!(
                "sinusoids: a width of {width} is more than {}",
                1 << 24
            )),
            _ if !(base > 0.0 && base.is_finite()) => Err(format!("sinusoids: {base} is no base")),
            _ if matches!(g.dtype(x), DType::I32 | DType::F32) => Ok(()),
            _ => Err(format!(
                "sinusoids of {}: positions are i32 or f32",
                g.dtype(x)
            )),
        });
        if x.is_poisoned() {
            return x;
        }
        let (frequencies, _) = Rope::new(width).base(base).frequencies();
        self.trace.on_behalf(at, || {
            let frequencies = table(self.trace, at, &frequencies);
            let last = x.rank();
            let angles = x.cast(DType::F32).unsqueeze(last) * frequencies;
            match layout {
                RopeLayout::Halves => self.trace.concat(&[angles.sin(), angles.cos()], last),
                RopeLayout::Interleaved => self
                    .trace
                    .stack(&[angles.sin(), angles.cos()], last + 1)
                    .flatten(last),
            }
        })
    }

    /// These lengths, i32, of which one below 0 or beyond `longest` fails the run.
    #[track_caller]
    pub(crate) fn require_lengths(self, longest: usize) -> Tensor<'t> {
        self.trace.record(Location::caller(), &[self], |g, ids| {
            if g.dtype(ids[0]) == DType::I32 {
                check_index(g, ids[0], Size::fixed(longest as i64 + 1));
            }
            Ok(ids[0])
        })
    }

    /// Whether a position precedes the end of a sequence: lengths `[…]` (i32) → truth values `[…,
    /// longest]`. As a mask of attention over `[batch, heads, queries, keys]`, lengths `[batch]`
    /// need two more axes: `lengths.within(keys).unsqueeze(1).unsqueeze(1)`.
    #[track_caller]
    pub fn within(self, longest: usize) -> Tensor<'t> {
        let at = Location::caller();
        let x = self.require(at, |g, x| match g.dtype(x) {
            DType::I32 => Ok(()),
            other => Err(format!("within: lengths are i32, not {other}")),
        });
        if x.is_poisoned() {
            return x;
        }
        self.trace
            .on_behalf(at, || self.trace.arange(longest).lt(x.unsqueeze(x.rank())))
    }
}

impl Trace {
    /// The distance j − i of key j from query i, i32 `[queries, keys]`, if the first query is at
    /// position `past`: a number, or an i32 scalar of the run.
    #[track_caller]
    fn distances<'t>(&'t self, queries: usize, keys: usize, past: impl Operand<'t>) -> Tensor<'t> {
        let past = past.lift(self, DType::I32, Location::caller());
        self.arange(keys) - (self.arange(queries).unsqueeze(1) + past)
    }

    /// The bias of attention with linear biases (ALiBi, Press et al. 2022): −slope·|i − j| for query i and
    /// key j, f32 `[heads, queries, keys]`, for [`Mask::Added`](crate::Mask::Added). The slopes are a
    /// geometric sequence from 2^(−8/heads) on; where `heads` is no power of two, they are those of
    /// the next smaller one, then every other one of the next larger. The first query is at position
    /// `past`, a number or an i32 scalar of the run.
    #[track_caller]
    pub fn alibi<'t>(
        &'t self,
        heads: usize,
        queries: usize,
        keys: usize,
        past: impl Operand<'t>,
    ) -> Tensor<'t> {
        let at = Location::caller();
        if heads == 0 || heads > 1 << 16 {
            return self.fail(at, "", format!("alibi: {heads} heads have no slopes"));
        }
        let of_power = |n: usize| (1..=n).map(move |i| (-8.0 * i as f64 / n as f64).exp2() as f32);
        let whole = 1 << heads.ilog2();
        let slopes: Vec<f32> = of_power(whole)
            .chain(of_power(2 * whole).step_by(2))
            .take(heads)
            .collect();
        let distances = self.distances(queries, keys, past);
        self.on_behalf(at, || {
            let slopes = table(self, at, &slopes).reshape((heads, 1, 1));
            distances.abs().cast(DType::F32) * -slopes
        })
    }

    /// The bucket of each pair of a query and a key (T5, Raffel et al. 2020), i32 `[queries, keys]`:
    /// an index into a table `[buckets, heads]` of biases. Half of the buckets (of each direction,
    /// if `both_ways`; else keys after the query count as distance 0) are single distances, the others
    /// grow by equal factors up to `longest`. The first query is at position `past`, a number or an
    /// i32 scalar of the run.
    #[track_caller]
    pub fn relative_buckets<'t>(
        &'t self,
        (queries, keys): (usize, usize),
        past: impl Operand<'t>,
        both_ways: bool,
        buckets: usize,
        longest: usize,
    ) -> Tensor<'t> {
        let at = Location::caller();
        let own = if both_ways { buckets / 2 } else { buckets };
        let exact = own / 2;
        if exact == 0 || buckets > 1 << 16 || longest <= exact || longest > 1 << 24 {
            return self.fail(
                at,
                "",
                format!("relative_buckets: {buckets} buckets for distances up to {longest} do not divide into single and growing ones"),
            );
        }
        let distances = self.distances(queries, keys, past);
        // The first distance of each bucket after the single ones, in the f32 steps of T5.
        let bucket = |distance: usize| {
            let part = (distance as f32 / exact as f32).ln()
                / (longest as f64 / exact as f64).ln() as f32
                * (own - exact) as f32;
            part as usize
        };
        let firsts: Vec<usize> = (1..own - exact)
            .filter_map(|wanted| {
                let (mut low, mut high) = (exact, longest.max(exact + 1));
                while low < high {
                    let middle = low.midpoint(high);
                    if bucket(middle) >= wanted {
                        high = middle;
                    } else {
                        low = middle + 1;
                    }
                }
                (bucket(low) >= wanted).then_some(low)
            })
            .collect();
        self.on_behalf(at, || {
            let (far, later) = if both_ways {
                let later = distances.gt(0).cast(DType::I32) * own as i32;
                (distances.abs(), Some(later))
            } else {
                (-distances.minimum(0), None)
            };
            let growing = firsts
                .iter()
                .map(|&first| far.ge(first as i32).cast(DType::I32));
            let large = growing.fold(self.full(exact as f32, DType::I32, ()), |sum, more| {
                more + sum
            });
            let bucket = far.lt(exact as i32).select(far, large);
            later.map_or(bucket, |later| bucket + later)
        })
    }
}
