//! Dropout of whole channels and examples, and dropout for layers that normalize themselves.

use std::panic::Location;

use slabwise_kernels::dtype::DType;
use slabwise_kernels::size::Size;

use super::Tensor;
use crate::ops::GraphBuilder;

impl<'t> Tensor<'t> {
    /// Channel dropout: in a training trace, zeroes each channel of each example of
    /// `[n, channels, …]` with probability `p` and scales the others by 1/(1 − p) (Tompson et al.
    /// 2015); otherwise the identity.
    #[track_caller]
    pub fn dropout_channels(self, p: f32) -> Tensor<'t> {
        self.drop_whole("dropout_channels", p, 2)
    }

    /// In a training trace zeroes each example along axis 0 with probability `p` and scales the
    /// others by 1/(1 − p): stochastic depth (Huang et al. 2016) for the branch of a residual block.
    /// Otherwise the identity.
    #[track_caller]
    pub fn drop_path(self, p: f32) -> Tensor<'t> {
        self.drop_whole("drop_path", p, 1)
    }

    /// Dropout for SELU networks (Klambauer et al. 2017): in a training trace each element becomes
    /// the limit of [`Tensor::selu`] with probability `p`, and all are then scaled and shifted so
    /// that mean 0 and variance 1 are preserved; otherwise the identity.
    #[track_caller]
    pub fn alpha_dropout(self, p: f32) -> Tensor<'t> {
        const LIMIT: f32 = -1.758_099_3;
        let x = self.droppable("alpha_dropout", p, 0);
        if !self.trace.is_training() || p == 0.0 {
            return x;
        }
        if p == 1.0 {
            return x * 0.0;
        }
        let scale = ((1.0 - p) * (1.0 + p * LIMIT * LIMIT)).sqrt().recip();
        let kept = x.uniform_like().ge(p);
        kept.select(x, LIMIT) * scale - scale * p * LIMIT
    }

    /// This tensor, if it is f32 with so many axes and `p` is a probability.
    #[track_caller]
    fn droppable(self, what: &str, p: f32, axes: usize) -> Tensor<'t> {
        self.require(Location::caller(), |g, x| {
            if !(0.0..=1.0).contains(&p) {
                return Err(format!("{what}: {p} is not a probability"));
            }
            if g.dtype(x) != DType::F32 || g.dims(x).len() < axes {
                return Err(format!(
                    "{what} of {} {}: f32 with {axes} axes or more is needed",
                    g.dtype(x),
                    g.symbols.show(g.dims(x))
                ));
            }
            Ok(())
        })
    }

    /// Drops whole slices: one decision for each index along the first `axes` axes.
    #[track_caller]
    fn drop_whole(self, what: &str, p: f32, axes: usize) -> Tensor<'t> {
        let at = Location::caller();
        let x = self.droppable(what, p, axes);
        if !self.trace.is_training() || p == 0.0 {
            return x;
        }
        let scale = if p < 1.0 { 1.0 / (1.0 - p) } else { 0.0 };
        // One number for each, of x's rank.
        let ones = self.trace.record(at, &[x], |g, ids| {
            let mut dims = g.dims(ids[0]).clone();
            dims[axes..].fill(Size::ONE);
            Ok(g.full(1.0, DType::F32, &dims))
        });
        ones.uniform_like().ge(p).select(x * scale, 0.0)
    }
}
