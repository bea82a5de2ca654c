//! Normalisation: the computation of norm layers, without their weights.

use std::panic::Location;

use slabwise_kernels::dtype::DType::F32;
use slabwise_kernels::size::Size;
use slabwise_kernels::spec::Dims;
use smallvec::SmallVec;

use super::reduce::count;
use super::{AxisIndex, AxisSet, PoolOptions, Tensor};
use crate::ops::{Axes, GraphBuilder, Op};

/// Statistics of a batch for each channel, and the factors that normalise by them.
pub(crate) struct BatchStatistics<'t> {
    /// x minus a constant near the mean, of x's shape.
    centred: Tensor<'t>,
    /// The mean of `centred`: `[1, channels, 1…]`.
    rest: Tensor<'t>,
    /// The mean of x: `[1, channels, 1…]`.
    pub mean: Tensor<'t>,
    /// The biased variance of x: `[1, channels, 1…]`.
    pub variance: Tensor<'t>,
    /// The number of elements of a channel, an f32 scalar.
    pub count: Tensor<'t>,
}

/// See [`Tensor::moments`].
struct Moments<'t> {
    /// x − K, of x's shape.
    centred: Tensor<'t>,
    /// The mean of that.
    rest: Tensor<'t>,
    variance: Tensor<'t>,
}

impl<'t> Tensor<'t> {
    /// (x − mean)/√(variance + ε), mean and biased variance taken over the given axes; NaN where
    /// the variance overflows.
    #[track_caller]
    pub fn normalize(self, axes: impl AxisSet, eps: f32) -> Tensor<'t> {
        let axes = axes.axes(self.rank());
        let Moments {
            centred,
            rest,
            variance,
        } = self.moments(self.mean_keep(axes.as_slice()), axes.as_slice());
        (centred - rest) * variance.inverse_deviation(eps)
    }

    /// Mean and biased variance over some axes, given a number K near the mean: the mean is K + E[x
    /// − K] and the variance E[(x − K)²] − E[x − K]² (Chan, Golub & LeVeque 1983). With the rounded
    /// mean as K both are exact to f32 rounding. The result depends on K only by rounding, so no
    /// gradient flows through it.
    #[track_caller]
    fn moments(self, near: Tensor<'t>, axes: &[usize]) -> Moments<'t> {
        let centred = self - near.detach();
        let rest = centred.mean_keep(axes);
        let variance = centred.square().mean_keep(axes) - rest.square();
        // Rounding may give less than 0; the clamped value keeps the gradient of the unclamped variance.
        let variance = variance
            .maximum(0.0)
            .detach()
            .with_slope(variance, self.trace.full(1.0, F32, ()));
        Moments {
            centred,
            rest,
            variance,
        }
    }

    /// 1/√(variance + ε) of a variance, or of a mean square: NaN where it is too large for f32,
    /// because it would otherwise silently scale all elements to 0.
    #[track_caller]
    pub(crate) fn inverse_deviation(self, eps: f32) -> Tensor<'t> {
        let raised = self + eps;
        // ∞ · 0 is NaN; for any other variance the term is 0.
        let value = (raised.rsqrt() + raised * 0.0).detach();
        // The slope is expressed in terms of the value, so that the backward pass needs no second
        // root; its own slope likewise.
        let slope = |root: Tensor<'t>| root / raised * -0.5;
        value.with_slope(self, slope(value.with_slope(self, slope(raised.rsqrt()))))
    }

    /// (x − mean)/standard deviation over the given axes, 0 where all elements are equal
    /// (`MeanVarianceNormalization` of ONNX).
    #[track_caller]
    pub fn mean_variance_norm(self, axes: impl AxisSet) -> Tensor<'t> {
        // The root of ε is 10⁻⁹, which no deviation of f32 elements of usual size is near to.
        self.normalize(axes, 1e-18)
    }

    /// x/max(‖x‖₂, ε), with the Euclidean norm over the given axes. The gradient of a norm below ε
    /// is 0.
    #[track_caller]
    pub fn l2_normalize(self, axes: impl AxisSet, eps: f32) -> Tensor<'t> {
        let x = self.require(Location::caller(), |_, _| {
            // Its square must not vanish, because a root has no slope at 0.
            (eps >= 1e-18 && eps.is_finite())
                .then_some(())
                .ok_or_else(|| {
                    format!("l2_normalize: ε is {eps}; 10⁻¹² is usual, and 10⁻¹⁸ the least")
                })
        });
        let axes = axes.axes(x.rank());
        let squares = x.square().sum_keep(axes.as_slice());
        x / squares.maximum(eps * eps).sqrt()
    }

    /// Weight normalization: gain·v/‖v‖₂ for this weight v, with a norm for each slice of `axis`
    /// and a gain that broadcasts to it, such as `[out, 1, 1]` (Salimans and Kingma 2016;
    /// `weight_norm` of PyTorch). A slice of zeros gives NaN.
    #[track_caller]
    pub fn weight_norm(self, gain: Tensor<'t>, axis: impl AxisIndex) -> Tensor<'t> {
        let axis = axis.index(self.rank());
        let v = self.require(Location::caller(), |g, x| match g.dims(x).get(axis) {
            Some(_) => Ok(()),
            None => Err(super::no_axis(g, "weight_norm", axis, x)),
        });
        let others: Vec<usize> = (0..v.rank()).filter(|&other| other != axis).collect();
        v * (gain / v.square().sum_keep(others.as_slice()).sqrt())
    }

    /// Local response normalization (Krizhevsky et al. 2012) of `[n, channels, …]`: x/(k + alpha·m)^beta
    /// with the mean m of the squares over `size` neighbouring channels, ⌊size/2⌋ of them before;
    /// channels that do not exist count as 0.
    #[track_caller]
    pub fn local_response_norm(self, size: usize, alpha: f32, beta: f32, k: f32) -> Tensor<'t> {
        let x = self.require(Location::caller(), |g, x| {
            let dims = g.dims(x);
            let fixed = dims.get(1).is_some_and(|d| d.as_fixed().is_some());
            (dims.len() > 2 && fixed && size > 0).then_some(()).ok_or_else(|| {
                format!("local_response_norm of {} over {size} channels: [n, channels, …] with a fixed number of channels, and one at least, are needed", g.symbols.show(dims))
            })
        });
        if x.is_poisoned() {
            return x;
        }
        // Channels as rows of an image: [n, 1, channels, places].
        let squares = x.square().flatten(2).unsqueeze(1);
        if squares.len(3).is_none() {
            return x.require(Location::caller(), |g, x| {
                Err(format!(
                    "local_response_norm of {}: fixed lengths after the channels are needed",
                    g.symbols.show(g.dims(x))
                ))
            });
        }
        let options = PoolOptions::new([size, 1])
            .stride(1)
            .padding([(size / 2, (size - 1) / 2), (0, 0)]);
        let mean = squares.avg_pool2d_with(options);
        let scale = (mean * alpha + k).pow(-beta);
        let scale = self
            .trace
            .record(Location::caller(), &[scale, x], |g, ids| {
                let dims = g.dims(ids[1]).clone();
                Ok(g.reshape(ids[0], &dims))
            });
        x * scale
    }

    /// Group normalization: [`Tensor::normalize`] of `[n, channels, …]` over the positions, if there
    /// are any, and channels of each of `groups` groups of neighbouring channels.
    #[track_caller]
    pub fn group_normalize(self, groups: usize, eps: f32) -> Tensor<'t> {
        let x = self.require(Location::caller(), |g, x| {
            let shown = g.symbols.show(g.dims(x));
            match g.dims(x).get(1).and_then(|channels| channels.as_fixed()) {
                None => Err(format!("group_normalize of {shown}: [n, channels, …] with a fixed number of channels is needed")),
                Some(channels) if groups == 0 || channels % (groups as i64) != 0 => Err(format!(
                    "group_normalize of {shown}: {channels} channels do not divide into {groups} groups"
                )),
                Some(_) => Ok(()),
            }
        });
        let Some(channels) = x.len(1) else {
            return x;
        };
        let grouped = x.unflatten(1, (groups, channels / groups));
        let axes: Vec<usize> = (2..grouped.rank()).collect();
        let y = grouped.normalize(axes.as_slice(), eps);
        self.trace.record(Location::caller(), &[y, self], |g, ids| {
            let dims = g.dims(ids[1]).clone();
            Ok(g.reshape(ids[0], &dims))
        })
    }

    /// Mean and variance of each channel (axis 1) over all other axes.
    ///
    /// Both come from one pass: the K of [`Tensor::moments`] is the mean of the first example,
    /// which is one of n groups of equal size. So (mean − K)² is at most n times the variance, and
    /// cancellation in the difference costs at most a factor n + 1 in rounding.
    #[track_caller]
    pub(crate) fn batch_statistics(self) -> BatchStatistics<'t> {
        let at = Location::caller();
        let axes: Vec<usize> = (0..self.rank()).filter(|&axis| axis != 1).collect();
        let x = self.with_elements(at, "batch norm", &axes, "has a mean and a variance");
        let first = x.trace.record(at, &[x], |g, ids| {
            let (dtype, dims) = (g.dtype(ids[0]), g.dims(ids[0]).clone());
            let mut one = dims.clone();
            one[0] = Size::ONE;
            let start: Dims = SmallVec::from_elem(Size::ZERO, dims.len());
            Ok(g.emit(
                Op::Slice {
                    start,
                    step: SmallVec::from_elem(1, dims.len()),
                },
                ids,
                dtype,
                one,
            ))
        });
        let places: Vec<usize> = (2..x.rank()).collect();
        let near = if places.is_empty() {
            first
        } else {
            first.mean_keep(places.as_slice())
        };
        let near = near.near();
        let Moments {
            centred,
            rest,
            variance,
        } = x.moments(near, &axes);
        let count = x.trace.record(at, &[x], |g, ids| {
            count(g, ids[0], &Axes::from_slice(&axes))
        });
        BatchStatistics {
            centred,
            rest,
            mean: near.detach() + rest,
            variance,
            count,
        }
    }

    /// This tensor if an axis has this length; `what` is the layer that needs it.
    #[track_caller]
    pub(crate) fn require_len(self, what: &str, axis: usize, len: usize) -> Tensor<'t> {
        self.require(Location::caller(), |g, x| match g.dims(x).get(axis) {
            Some(&n) if i64::try_from(len).is_ok_and(|len| n == Size::fixed(len)) => Ok(()),
            _ => Err(format!(
                "{what} of {}: axis {axis} must have length {len}",
                g.symbols.show(g.dims(x))
            )),
        })
    }
}

impl<'t> BatchStatistics<'t> {
    /// (x − mean)·scale, the scale `[channels, 1…]`.
    #[track_caller]
    pub fn scaled(&self, scale: Tensor<'t>) -> Tensor<'t> {
        (self.centred - self.rest) * scale
    }
}
