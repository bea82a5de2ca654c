//! Normalisation over a batch, with running statistics.

use std::panic::Location;

use super::Module;
use crate::params::{Init, Param, Scope};
use crate::tensor::Tensor;

/// (x − mean)/√(variance + ε)·weight + bias for each channel (Ioffe & Szegedy 2015). Weight and
/// bias `[channels]`.
///
/// A training trace uses mean and biased variance of the batch, and moves the statistics
/// `running_mean` and `running_var` (of the unbiased variance) towards them by the momentum, in
/// place and once for each application. Any other trace uses the running statistics, folded with
/// weight and bias into one scale and one shift for each channel. A batch without elements has no
/// statistics: a training run with one fails before it changes anything. With one element per
/// channel, the variance is 0.
///
/// `SPATIAL_AXES` is how many axes follow the channels; see [`BatchNorm1d`] and [`BatchNorm2d`].
#[derive(Clone, Debug)]
pub struct BatchNorm<const SPATIAL_AXES: usize> {
    at: Scope,
    affine: bool,
    tracked: bool,
    frozen: bool,
    channels: usize,
    eps: f32,
    momentum: f32,
    weight: Param,
    bias: Param,
    running_mean: Param,
    running_var: Param,
}

/// [`BatchNorm`] of `[n, channels]` or `[n, channels, length]`.
pub type BatchNorm1d = BatchNorm<1>;
/// [`BatchNorm`] of `[n, channels, h, w]`.
pub type BatchNorm2d = BatchNorm<2>;
/// [`BatchNorm`] of `[n, channels, depth, h, w]`.
pub type BatchNorm3d = BatchNorm<3>;

impl<const SPATIAL_AXES: usize> BatchNorm<SPATIAL_AXES> {
    /// Declares `weight` (initially ones), `bias` (zeros), `running_mean` (zeros) and `running_var`
    /// (ones). ε is 10⁻⁵, the momentum 0.1.
    #[track_caller]
    pub fn new(at: Scope, channels: usize) -> Self {
        let [one, zero] = [1.0, 0.0].map(Init::Constant);
        BatchNorm {
            affine: true,
            tracked: true,
            frozen: false,
            channels,
            eps: 1e-5,
            momentum: 0.1,
            weight: at.param("weight", (channels,), one),
            bias: at.param("bias", (channels,), zero),
            running_mean: at.statistic("running_mean", (channels,), zero),
            running_var: at.statistic("running_var", (channels,), one),
            at,
        }
    }

    /// With this ε.
    pub fn eps(mut self, eps: f32) -> Self {
        self.eps = eps;
        self
    }

    /// With this momentum: the share of a batch in the new running statistics.
    pub fn momentum(mut self, momentum: f32) -> Self {
        self.momentum = momentum;
        self
    }

    /// Without weight and bias.
    pub fn without_affine(mut self) -> Self {
        self.affine = false;
        self.at.retract(&self.weight);
        self.at.retract(&self.bias);
        self
    }

    /// Without running statistics: every trace uses those of its batch.
    pub fn without_statistics(mut self) -> Self {
        self.tracked = false;
        self.at.retract(&self.running_mean);
        self.at.retract(&self.running_var);
        self
    }

    /// With the running statistics in training traces, too, which leave them as they are: a model
    /// is fine-tuned so on batches too small for statistics of their own. Weight and bias learn
    /// unless the trace [freezes](crate::Trace::freeze) them.
    pub fn frozen_statistics(mut self) -> Self {
        self.frozen = true;
        self
    }

    /// The weight, `[channels]`; no parameter of the model where the layer has none.
    pub fn weight(&self) -> &Param {
        &self.weight
    }

    /// The bias, `[channels]`; no parameter of the model where the layer has none.
    pub fn bias(&self) -> &Param {
        &self.bias
    }

    /// The input, if it has the rank and the channels of this layer.
    fn check<'t>(&self, x: Tensor<'t>, at: &'static Location<'static>) -> Tensor<'t> {
        let x = x
            .trace()
            .on_behalf(at, || x.require_len("batch norm", 1, self.channels));
        let fits =
            x.rank() == SPATIAL_AXES + 2 || (SPATIAL_AXES == 1 && x.rank() == 2) || x.rank() == 0;
        if fits {
            x
        } else {
            x.trace().fail(
                at,
                self.weight.layer(),
                format!("batch norm in {SPATIAL_AXES}d of {x:?}: the number of axes does not fit"),
            )
        }
    }

    #[track_caller]
    fn of_batch<'t>(&self, x: Tensor<'t>, affine: Option<[Tensor<'t>; 2]>) -> Tensor<'t> {
        let batch = x.batch_statistics();
        if self.tracked && x.trace().is_training() {
            // A single element has no unbiased variance; the biased one is used.
            let unbiased = batch.variance * (batch.count / (batch.count - 1.0).maximum(1.0));
            for (running, of_batch) in [
                (&self.running_mean, batch.mean),
                (&self.running_var, unbiased),
            ] {
                let state = x.trace().statistic(running);
                state.advance(|old| {
                    old * (1.0 - self.momentum) + of_batch.reshape((self.channels,)) * self.momentum
                });
            }
        }
        let scale = batch.variance.inverse_deviation(self.eps);
        match affine {
            Some([weight, bias]) => batch.scaled(scale * weight) + bias,
            None => batch.scaled(scale),
        }
    }
}

impl<const SPATIAL_AXES: usize> Module for BatchNorm<SPATIAL_AXES> {
    #[track_caller]
    fn forward<'t>(&self, x: Tensor<'t>) -> Tensor<'t> {
        let (x, trace) = (self.check(x, Location::caller()), x.trace());
        // One number per channel, repeated over the positions.
        let lengths: Vec<usize> = [self.channels]
            .into_iter()
            .chain(std::iter::repeat_n(1, x.rank().saturating_sub(2)))
            .collect();
        let along = |p: Tensor<'t>| p.reshape(lengths.as_slice());
        let affine = self
            .affine
            .then(|| [&self.weight, &self.bias].map(|p| trace.param(p)));
        if (trace.is_training() && !self.frozen) || !self.tracked {
            return self.of_batch(x, affine.map(|pair| pair.map(along)));
        }
        let deviation = trace.param(&self.running_var).inverse_deviation(self.eps);
        let scale = affine.map_or(deviation, |[weight, _]| weight * deviation);
        let shift = trace.param(&self.running_mean) * scale;
        let shift = affine.map_or(-shift, |[_, bias]| bias - shift);
        x * along(scale) + along(shift)
    }

    fn path(&self) -> &str {
        self.at.path()
    }
}
