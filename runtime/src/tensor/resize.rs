//! Resampling along axes: nearest, linear and cubic, with the coordinates of PyTorch and of ONNX's
//! `Resize`.
//!
//! Axes are resampled one after the other. The result along an axis is a sum of 1, 2 or 4 elements
//! with weights that are computed from the position, so that only the image is in memory.

use std::panic::Location;

use slabwise_kernels::dtype::DType::{F32, I32};
use slabwise_kernels::size::Size;
use slabwise_kernels::spec::Dims;
use smallvec::SmallVec;

use super::Tensor;
use super::arrange::{pick, ramp};
use crate::ops::{GraphBuilder, Op};

/// The method of [`Tensor::interpolate`], as in PyTorch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interpolate {
    /// The element at ⌊i·in/out⌋.
    Nearest,
    /// The element whose centre is nearest.
    NearestExact,
    /// Linear, bilinear or trilinear.
    Linear {
        /// Whether the first and last elements stay where they are; otherwise the edges do.
        align_corners: bool,
    },
    /// Cubic or bicubic, with a = −¾ (Keys 1981).
    Cubic {
        /// Whether the first and last elements stay where they are; otherwise the edges do.
        align_corners: bool,
    },
    /// Linear, with a filter as wide as the distance of the results where an axis shrinks, so that
    /// every element counts (`antialias` of PyTorch).
    AntialiasedLinear,
    /// Cubic, with a = −½ and such a filter (`antialias` of PyTorch).
    AntialiasedCubic,
}

/// The input coordinate x of output position i, for an axis of `in` elements that gets `out`, and s
/// = `out`/`in` unless [`ResizeAxis::scale`] gives it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Coordinates {
    /// (i + ½)/s − ½: the centres of elements are half-way between edges.
    HalfPixel,
    /// Like `HalfPixel`, but 0 where `out` is 1.
    PytorchHalfPixel,
    /// Like `HalfPixel`, around the middle of the image where a given s does not make `out` whole.
    HalfPixelSymmetric,
    /// (i + ½)/s, for nearest elements alone.
    TfHalfPixelForNearest,
    /// i/s
    Asymmetric,
    /// i·(`in` − 1)/(`out` − 1): the first and last elements stay where they are.
    AlignCorners,
    /// From `crop.0`·(`in` − 1) to `crop.1`·(`in` − 1), see [`ResizeAxis::crop`].
    Crop,
}

/// The rounding of a coordinate to a position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rounding {
    /// To the nearest, halves down.
    PreferFloor,
    /// To the nearest, halves up.
    PreferCeil,
    /// Down.
    Floor,
    /// Up.
    Ceil,
}

/// The elements that a result is computed from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Interpolation {
    /// One element.
    Nearest(Rounding),
    /// The two neighbours.
    Linear,
    /// Four neighbours, with the weights of Keys (1981).
    Cubic {
        /// The slope of the weights at distance 1: −½ or −¾.
        a: f32,
    },
}

/// Options of [`Tensor::resize`], those of ONNX's operator of that name.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Resize {
    /// The elements that a result is computed from.
    pub interpolation: Interpolation,
    /// The input coordinate of an output position.
    pub coordinates: Coordinates,
    /// Whether elements outside of the input weigh nothing; otherwise they equal those at the edge.
    pub exclude_outside: bool,
    /// The result where a coordinate of [`Coordinates::Crop`] lies outside of the input.
    pub extrapolation: f32,
    /// Whether the weights of an axis that shrinks are stretched over all elements between results.
    /// Nearest elements have no such weights.
    pub antialias: bool,
}

impl Resize {
    /// Options without exclusions.
    pub const fn new(interpolation: Interpolation, coordinates: Coordinates) -> Self {
        Resize {
            interpolation,
            coordinates,
            exclude_outside: false,
            extrapolation: 0.0,
            antialias: false,
        }
    }
}

/// An axis to resample.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ResizeAxis {
    /// The axis, of fixed length.
    pub axis: usize,
    /// Its new length.
    pub length: usize,
    /// The factor s between coordinates, if it is not the quotient of the lengths.
    pub scale: Option<f32>,
    /// Start and end of the part that [`Coordinates::Crop`] takes, as shares of the axis.
    pub crop: (f32, f32),
}

impl ResizeAxis {
    /// All of an axis, with a new length.
    pub const fn new(axis: usize, length: usize) -> Self {
        ResizeAxis {
            axis,
            length,
            scale: None,
            crop: (0.0, 1.0),
        }
    }
}

impl<'t> Tensor<'t> {
    /// An image or sequence `[n, channels, …]` of fixed lengths, resampled to other lengths of its
    /// last axes, as PyTorch's `interpolate` does it.
    ///
    /// ```
    /// # use slabwise::prelude::*;
    /// # use slabwise::tensor::Interpolate;
    /// # let trace = Trace::inference();
    /// # let x = trace.input("x", F32, (2, 3, 8, 8));
    /// let y = x.interpolate([16, 12], Interpolate::Linear { align_corners: false });
    /// assert_eq!(y.len(2), Some(16));
    /// ```
    #[track_caller]
    pub fn interpolate(self, size: impl AsRef<[usize]>, method: Interpolate) -> Tensor<'t> {
        let size = size.as_ref();
        let x = self.require(Location::caller(), |g, x| {
            if g.dims(x).len() == size.len() + 2 && !size.is_empty() {
                return Ok(());
            }
            Err(format!(
                "interpolate of {} to {size:?}: [n, channels, …] with a new length for each axis \
                 from 2 on is needed",
                g.symbols.show(g.dims(x))
            ))
        });
        let corners = |align| {
            if align {
                Coordinates::AlignCorners
            } else {
                Coordinates::HalfPixel
            }
        };
        let smooth = |interpolation| Resize {
            antialias: true,
            exclude_outside: true,
            ..Resize::new(interpolation, Coordinates::HalfPixel)
        };
        let options = match method {
            Interpolate::Nearest => Resize::new(
                Interpolation::Nearest(Rounding::Floor),
                Coordinates::Asymmetric,
            ),
            Interpolate::NearestExact => Resize::new(
                Interpolation::Nearest(Rounding::PreferCeil),
                Coordinates::HalfPixel,
            ),
            Interpolate::Linear { align_corners } => {
                Resize::new(Interpolation::Linear, corners(align_corners))
            }
            Interpolate::Cubic { align_corners } => {
                Resize::new(Interpolation::Cubic { a: -0.75 }, corners(align_corners))
            }
            Interpolate::AntialiasedLinear => smooth(Interpolation::Linear),
            Interpolate::AntialiasedCubic => smooth(Interpolation::Cubic { a: -0.5 }),
        };
        if x.is_poisoned() {
            return x;
        }
        let axes: Vec<ResizeAxis> = (2..)
            .zip(size)
            .map(|(axis, &length)| ResizeAxis::new(axis, length))
            .collect();
        x.resize(axes, options)
    }

    /// Resampled along axes of fixed length, with all options of ONNX's `Resize`. PyTorch's:
    /// [`Tensor::interpolate`].
    #[track_caller]
    pub fn resize(self, axes: impl AsRef<[ResizeAxis]>, options: Resize) -> Tensor<'t> {
        let mut axes = axes.as_ref().to_vec();
        let x = self.require(Location::caller(), |g, x| {
            for (i, to) in axes.iter().enumerate() {
                let shown = g.symbols.show(g.dims(x));
                let Some(from) = g.dims(x).get(to.axis) else {
                    return Err(super::no_axis(g, "resize", to.axis, x));
                };
                if axes[..i].iter().any(|other| other.axis == to.axis) {
                    return Err(format!("resize: axis {} is named twice", to.axis));
                }
                let Some(from) = from.as_fixed() else {
                    return Err(format!(
                        "resize: axis {} of {shown} has no fixed length",
                        to.axis
                    ));
                };
                if from == 0 && to.length > 0 {
                    return Err(format!(
                        "resize: axis {} of {shown} has no elements to become {}",
                        to.axis, to.length
                    ));
                }
                // Coordinates are f32.
                if from > 1 << 24 || to.length > 1 << 24 {
                    return Err(format!(
                        "resize: axis {} of {shown} to {}: at most 2²⁴ elements have coordinates",
                        to.axis, to.length
                    ));
                }
                if to.scale.is_some_and(|s| !(s > 0.0 && s.is_finite())) {
                    return Err(format!("resize: axis {} has no scale above 0", to.axis));
                }
            }
            match g.dtype(x) {
                F32 => Ok(()),
                _ if matches!(options.interpolation, Interpolation::Nearest(_)) => Ok(()),
                other => Err(format!(
                    "resize does not interpolate {other}; convert with cast"
                )),
            }
        });
        if x.is_poisoned() {
            return x;
        }
        // The axes that shrink most come first, so that values in between are small.
        let growth = |to: &ResizeAxis| to.length as f64 / x.len(to.axis).unwrap_or(1) as f64;
        axes.sort_by(|a, b| growth(a).total_cmp(&growth(b)));
        let mut x = x;
        for to in axes {
            x = x.resize_axis(&to, &options);
        }
        x
    }

    #[track_caller]
    fn resize_axis(self, to: &ResizeAxis, options: &Resize) -> Tensor<'t> {
        let axis = to.axis;
        let from = self.len(axis).unwrap_or(0);
        let crop = options.coordinates == Coordinates::Crop;
        if to.length == 0 || from == 0 {
            return self.slice(axis, ..0);
        }
        if from == to.length && to.scale.is_none_or(|s| s == 1.0) && !crop {
            let identity = options.coordinates != Coordinates::TfHalfPixelForNearest;
            if identity && !matches!(options.interpolation, Interpolation::Cubic { .. }) {
                return self;
            }
        }
        if let Some(whole) = self.resize_by_whole(to, options, from) {
            return whole;
        }
        let x = self.coordinates(to, options.coordinates, from);
        let last = (from - 1) as f32;
        let share = (to.scale).map_or(to.length as f64 / from as f64, f64::from);
        let value = match options.interpolation {
            Interpolation::Nearest(rounding) => {
                let place = match rounding {
                    Rounding::PreferFloor => (x - 0.5).ceil(),
                    Rounding::PreferCeil => (x + 0.5).floor(),
                    Rounding::Floor => x.floor(),
                    Rounding::Ceil => x.ceil(),
                };
                self.picked(axis, place, last)
            }
            Interpolation::Linear if options.antialias && share < 1.0 => {
                self.stretched(to, options, x, [last, share as f32], 1.0 / share, |d| {
                    (1.0 - d).maximum(0.0)
                })
            }
            Interpolation::Cubic { a } if options.antialias && share < 1.0 => {
                self.stretched(to, options, x, [last, share as f32], 2.0 / share, |d| {
                    let far = d.lt(2.0).select(keys_far(d, a), 0.0);
                    d.le(1.0).select(keys_near(d, a), far)
                })
            }
            Interpolation::Linear => self.weighted(to, options, x, last, [0.0, 1.0], |d| 1.0 - d),
            Interpolation::Cubic { a } => {
                self.weighted(to, options, x, last, [-1.0, 0.0, 1.0, 2.0], |d| {
                    d.le(1.0).select(keys_near(d, a), keys_far(d, a))
                })
            }
        };
        if !crop {
            return value;
        }
        let outside = x.lt(0.0).or(x.gt(last)).along(axis, self.rank());
        outside.select(options.extrapolation, value)
    }

    /// Nearest elements by a whole factor, without an index: a view with a step, or each element
    /// repeated.
    #[track_caller]
    fn resize_by_whole(self, to: &ResizeAxis, options: &Resize, from: usize) -> Option<Tensor<'t>> {
        let Interpolation::Nearest(rounding) = options.interpolation else {
            return None;
        };
        let floors = options.coordinates == Coordinates::Asymmetric && rounding == Rounding::Floor;
        let centred = matches!(options.coordinates, Coordinates::HalfPixel)
            && matches!(rounding, Rounding::PreferFloor | Rounding::PreferCeil);
        let factor = |of: f64| to.scale.is_none_or(|s| f64::from(s) == of);
        if to.length.is_multiple_of(from) && factor((to.length / from) as f64) {
            return (floors || centred).then(|| self.repeat_interleave(to.axis, to.length / from));
        }
        let exact = from.is_multiple_of(to.length) && to.scale.is_none();
        (floors && exact).then(|| self.slice_step(to.axis, .., from / to.length))
    }

    /// The input coordinate of each output position: f32 `[length]`.
    #[track_caller]
    fn coordinates(self, to: &ResizeAxis, coordinates: Coordinates, from: usize) -> Tensor<'t> {
        let i = self.trace.record(Location::caller(), &[], |g, _| {
            let places = ramp(g, Size::fixed(to.length as i64));
            Ok(g.cast(places, F32))
        });
        // A quotient of exact products, so that coordinates that are integers or halves are exact.
        let (above, below) = match to.scale {
            Some(scale) => (1.0, scale),
            None => (from as f32, to.length as f32),
        };
        let scaled = |i: Tensor<'t>| times(i, above, below);
        let ((start, end), last) = (to.crop, (from - 1) as f32);
        let at = Location::caller();
        self.trace.on_behalf(at, || match coordinates {
            Coordinates::PytorchHalfPixel | Coordinates::AlignCorners if to.length == 1 => i * 0.0,
            Coordinates::HalfPixel | Coordinates::PytorchHalfPixel => scaled(i + 0.5) - 0.5,
            Coordinates::HalfPixelSymmetric => {
                let share = to.length as f32 / (from as f32 * below / above);
                let centre = from as f32 / 2.0 * (1.0 - share);
                scaled(i + 0.5) - 0.5 + centre
            }
            Coordinates::TfHalfPixelForNearest => scaled(i + 0.5),
            Coordinates::Asymmetric => scaled(i),
            Coordinates::AlignCorners => i * last / (to.length - 1) as f32,
            Coordinates::Crop if to.length == 1 => i * 0.0 + (start + end) * 0.5 * last,
            Coordinates::Crop => i * ((end - start) * last) / (to.length - 1) as f32 + start * last,
        })
    }

    /// Σ weight(|x − position|)·element over the positions ⌊x⌋ + offset.
    #[track_caller]
    fn weighted<const N: usize>(
        self,
        to: &ResizeAxis,
        options: &Resize,
        x: Tensor<'t>,
        last: f32,
        offsets: [f32; N],
        weight: impl Fn(Tensor<'t>) -> Tensor<'t>,
    ) -> Tensor<'t> {
        let at = Location::caller();
        let base = x.floor();
        let mut weights = self.trace.on_behalf(at, || {
            offsets.map(|offset| {
                let place = base + offset;
                let weight = weight((x - place).abs());
                if options.exclude_outside {
                    let inside = place.ge(0.0).and(place.le(last));
                    inside.select(weight, 0.0)
                } else {
                    weight
                }
            })
        });
        if options.exclude_outside {
            let mut sum = weights[0];
            for weight in &weights[1..] {
                sum = sum + *weight;
            }
            for weight in &mut weights {
                *weight = *weight / sum;
            }
        }
        let mut value = None;
        for (offset, weight) in offsets.into_iter().zip(weights) {
            let element = self.picked(to.axis, base + offset, last);
            let part = element * weight.along(to.axis, self.rank());
            value = Some(match value {
                Some(sum) => sum + part,
                None => part,
            });
        }
        value.unwrap_or(self)
    }

    /// Σ weight(|x − position|·share)·element over the positions up to `reach` away from x, divided
    /// by the sum of the weights.
    #[track_caller]
    fn stretched(
        self,
        to: &ResizeAxis,
        options: &Resize,
        x: Tensor<'t>,
        [last, share]: [f32; 2],
        reach: f64,
        weight: impl Fn(Tensor<'t>) -> Tensor<'t>,
    ) -> Tensor<'t> {
        let (at, axis) = (Location::caller(), to.axis);
        let reach = reach.ceil() as usize;
        // Positions and weights [length, 2·reach].
        let (places, weights) = self.trace.on_behalf(at, || {
            let offsets = self.trace.arange(2 * reach).cast(F32) - (reach as f32 - 1.0);
            let places = x.floor().unsqueeze(1) + offsets;
            let mut weights = weight((x.unsqueeze(1) - places).abs() * share);
            if options.exclude_outside {
                let inside = places.ge(0.0).and(places.le(last));
                weights = inside.select(weights, 0.0);
            }
            (places.flatten(0), weights / weights.sum_keep(1))
        });
        let elements = self.picked(axis, places, last);
        self.trace.on_behalf(at, || {
            let more = self.rank() - axis - 1;
            let weights = (0..more).fold(weights, |w, i| w.unsqueeze(2 + i));
            let elements = elements.unflatten(axis, (to.length, 2 * reach));
            (elements * weights).sum_over(axis + 1)
        })
    }

    /// The slices of an axis at positions `[n]`, f32 integers, of which those outside count as the
    /// nearest inside.
    #[track_caller]
    fn picked(self, axis: usize, positions: Tensor<'t>, last: f32) -> Tensor<'t> {
        let positions = positions.clamp(0.0, last).cast(I32);
        self.trace
            .record(Location::caller(), &[self, positions], |g, ids| {
                pick(g, ids[0], axis, ids[1])
            })
    }

    /// A vector as a tensor of some rank, whose elements lie along one axis.
    #[track_caller]
    fn along(self, axis: usize, rank: usize) -> Tensor<'t> {
        self.trace.record(Location::caller(), &[self], |g, ids| {
            let mut dims: Dims = SmallVec::from_elem(Size::ONE, rank);
            dims[axis] = g.dims(ids[0])[0];
            let dtype = g.dtype(ids[0]);
            Ok(g.emit(Op::Reshape, ids, dtype, dims))
        })
    }
}

/// i·above/below, without operations that change nothing.
fn times(i: Tensor<'_>, above: f32, below: f32) -> Tensor<'_> {
    let product = if above == 1.0 { i } else { i * above };
    if below == 1.0 {
        product
    } else {
        product / below
    }
}

/// The weight of an element at distance d ≤ 1 (Keys 1981).
pub(super) fn keys_near(d: Tensor<'_>, a: f32) -> Tensor<'_> {
    (d * (a + 2.0) - (a + 3.0)) * d * d + 1.0
}

/// The weight of an element at distance 1 ≤ d ≤ 2.
pub(super) fn keys_far(d: Tensor<'_>, a: f32) -> Tensor<'_> {
    (((d - 5.0) * d + 8.0) * d - 4.0) * a
}
