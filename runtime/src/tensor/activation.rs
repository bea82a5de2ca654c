//! Activations: elementwise functions of networks, and gates over halves of an axis. Names and
//! parameters are those of PyTorch.

use std::panic::Location;

use super::{AxisIndex, Operand, Tensor};

impl<'t> Tensor<'t> {
    /// x above 0, else `slope`·x (Maas et al. 2013).
    #[track_caller]
    pub fn leaky_relu(self, slope: f32) -> Tensor<'t> {
        self.gt(0.0).select(self, self * slope)
    }

    /// x above 0, else weight·x, with a weight of any shape that broadcasts (He et al. 2015): of an
    /// image `[n, channels, h, w]`, one slope for each channel is a weight `[channels, 1, 1]`.
    #[track_caller]
    pub fn prelu(self, weight: impl Operand<'t>) -> Tensor<'t> {
        let weight = weight.lift(self.trace, self.dtype(), Location::caller());
        self.gt(0.0).select(self, self.negative_part() * weight)
    }

    /// x above 0, else `alpha`·(eˣ − 1) (Clevert et al. 2016).
    #[track_caller]
    pub fn elu(self, alpha: f32) -> Tensor<'t> {
        let below = self.negative_part().expm1() * alpha;
        self.gt(0.0).select(self, below)
    }

    /// [`Tensor::elu`] with the `alpha` and the scale that keep mean 0 and variance 1 (Klambauer et
    /// al. 2017).
    #[track_caller]
    pub fn selu(self) -> Tensor<'t> {
        self.elu(1.673_263_2) * 1.050_701
    }

    /// x above 0, else `alpha`·(e^(x/`alpha`) − 1), whose slope is continuous (Barron 2017).
    #[track_caller]
    pub fn celu(self, alpha: f32) -> Tensor<'t> {
        let below = (self.negative_part() / alpha).expm1() * alpha;
        self.gt(0.0).select(self, below)
    }

    /// (x + 3)/6 between 0 and 1.
    #[track_caller]
    pub fn hardsigmoid(self) -> Tensor<'t> {
        (self + 3.0).clamp(0.0, 6.0) / 6.0
    }

    /// x·[`hardsigmoid`](Tensor::hardsigmoid) x (Howard et al. 2019).
    #[track_caller]
    pub fn hardswish(self) -> Tensor<'t> {
        self * (self + 3.0).clamp(0.0, 6.0) / 6.0
    }

    /// x between −1 and 1, else the nearer of the two. Other bounds: [`Tensor::clamp`].
    #[track_caller]
    pub fn hardtanh(self) -> Tensor<'t> {
        self.clamp(-1.0, 1.0)
    }

    /// x·tanh(ln(1 + eˣ)) (Misra 2019).
    #[track_caller]
    pub fn mish(self) -> Tensor<'t> {
        self * self.softplus().tanh()
    }

    /// x·sigmoid(1.702·x), an approximation of [`Tensor::gelu`] (Hendrycks & Gimpel 2016).
    #[track_caller]
    pub fn quick_gelu(self) -> Tensor<'t> {
        self * (self * 1.702).sigmoid()
    }

    /// ln sigmoid x, without its rounding errors.
    #[doc(alias = "logsigmoid")]
    #[track_caller]
    pub fn log_sigmoid(self) -> Tensor<'t> {
        -(-self).softplus()
    }

    /// x/(1 + |x|)
    #[track_caller]
    pub fn softsign(self) -> Tensor<'t> {
        self / (self.abs() + 1.0)
    }

    /// x − tanh x
    #[track_caller]
    pub fn tanhshrink(self) -> Tensor<'t> {
        self - self.tanh()
    }

    /// x beyond ±`lambda`, else 0.
    #[track_caller]
    pub fn hardshrink(self, lambda: f32) -> Tensor<'t> {
        self.shrink(lambda, 0.0)
    }

    /// x beyond ±`lambda`, moved towards 0 by `lambda`; else 0.
    #[track_caller]
    pub fn softshrink(self, lambda: f32) -> Tensor<'t> {
        self.shrink(lambda, lambda)
    }

    /// x − `bias` above `lambda`, x + `bias` below −`lambda`, else 0; NaN stays NaN.
    #[track_caller]
    pub fn shrink(self, lambda: f32, bias: f32) -> Tensor<'t> {
        let moved = self.gt(0.0).select(self - bias, self + bias);
        self.abs().le(lambda).select(0.0, moved)
    }

    /// x above `threshold`, else `value`; NaN stays NaN. With value 0 it is the thresholded ReLU.
    #[doc(alias = "thresholded_relu")]
    #[track_caller]
    pub fn threshold(self, threshold: f32, value: f32) -> Tensor<'t> {
        self.le(threshold).select(value, self)
    }

    /// The first half of an axis, gated by the second: a·sigmoid(b) (Dauphin et al. 2017).
    #[track_caller]
    pub fn glu(self, axis: impl AxisIndex) -> Tensor<'t> {
        let axis = axis.index(self.rank());
        let (a, b) = self.halves(axis);
        a * b.sigmoid()
    }

    /// The second half of an axis, gated by the first: silu(a)·b (Shazeer 2020). Of two separate
    /// tensors: `gate.silu() * up`.
    #[track_caller]
    pub fn swiglu(self, axis: impl AxisIndex) -> Tensor<'t> {
        let axis = axis.index(self.rank());
        let (a, b) = self.halves(axis);
        a.silu() * b
    }

    /// The second half of an axis, gated by the first: gelu(a)·b (Shazeer 2020).
    #[track_caller]
    pub fn geglu(self, axis: impl AxisIndex) -> Tensor<'t> {
        let axis = axis.index(self.rank());
        let (a, b) = self.halves(axis);
        a.gelu() * b
    }

    #[track_caller]
    fn halves(self, axis: usize) -> (Tensor<'t>, Tensor<'t>) {
        let parts = self.split(axis, 2);
        (parts[0], parts[1])
    }

    /// [`Tensor::softmax`] of −x along an axis: the smallest element weighs most.
    #[track_caller]
    pub fn softmin(self, axis: impl AxisIndex) -> Tensor<'t> {
        let axis = axis.index(self.rank());
        (-self).softmax(axis)
    }

    /// [`Tensor::softmax`] of x/`temperature` along an axis: below 1 it is sharper, above 1 more
    /// even.
    #[track_caller]
    pub fn softmax_at(self, axis: impl AxisIndex, temperature: f32) -> Tensor<'t> {
        let axis = axis.index(self.rank());
        let x = self.require(Location::caller(), |_, _| match temperature {
            t if t > 0.0 && t.is_finite() => Ok(()),
            t => Err(format!("softmax_at: {t} is not a temperature above 0")),
        });
        (x / temperature).softmax(axis)
    }
}
