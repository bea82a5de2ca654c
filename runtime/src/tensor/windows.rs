//! Windows over images beyond the pools of `product.rs`: as columns, adaptive maxima, powers.

use std::panic::Location;

use slabwise_kernels::dtype::DType;
use slabwise_kernels::size::Size;
use slabwise_kernels::spec::{Dims, Window};

use super::arrange::pick;
use super::{Tensor, checked_as};
use crate::graph::Graph;
use crate::ops::{ConvGeometry, GraphBuilder, Op};

impl<'t> Tensor<'t> {
    /// The windows of an image `[n, channels, h, w]` as columns, as PyTorch's `unfold` (im2col)
    /// gives them: `[n, channels·kh·kw, windows]`, for windows of `[kh, kw]` elements with zeros
    /// beyond the edges. Height and width are fixed; the groups do not matter.
    #[doc(alias = "im2col")]
    #[track_caller]
    pub fn unfold(self, kernel: [usize; 2], geometry: ConvGeometry) -> Tensor<'t> {
        let at = Location::caller();
        let [ph, pw] = geometry.pad;
        let image = self.require(at, |g, x| match g.dims(x).len() {
            4 => Ok(()),
            _ => Err(format!(
                "unfold of {}: an image [n, channels, h, w] is needed",
                g.symbols.show(g.dims(x))
            )),
        });
        let padded = if geometry.pad == [0, 0] || image.is_poisoned() {
            image
        } else {
            image.pad([(0, 0), (0, 0), (ph, ph), (pw, pw)], 0.0)
        };
        self.trace.record(at, &[padded], |g, ids| {
            let dims = g.dims(ids[0]).clone();
            let say = |g: &Graph| {
                format!(
                    "unfold of {} into windows of {kernel:?}: an image of fixed height and width \
                     with at least one window is needed",
                    g.symbols.show(&dims)
                )
            };
            let [n, c, h, w] = dims[..] else {
                return Err(say(g));
            };
            let fixed = |n: usize| i64::try_from(n).ok().filter(|n| *n < 1 << 24);
            // Per axis: length, windows, stride, elements, dilation.
            let axis = |length: Size, i: usize| {
                let length = length.as_fixed()?;
                let [k, s, d] = [kernel[i], geometry.stride[i], geometry.dilation[i]].map(fixed);
                let (k, s, d) = (k?, s?, d?);
                let span = d * (k - 1) + 1;
                (k > 0 && s > 0 && d > 0 && span <= length)
                    .then(|| (length, (length - span) / s + 1, s, k, d))
            };
            let (Some(rows), Some(columns)) = (axis(h, 0), axis(w, 1)) else {
                return Err(say(g));
            };
            let ((h, oh, sh, kh, dh), (w, ow, sw, kw, dw)) = (rows, columns);
            let places: Dims = [kh, kw, oh, ow].map(Size::fixed).into_iter().collect();
            let whole = Dims::from_slice(&[Size::fixed(kh * kw * oh * ow)]);
            crate::trace::countable("unfold", &g.symbols, &whole)?;
            let strides: Dims = [dh * w, dw, sh * w, sw]
                .map(Size::fixed)
                .into_iter()
                .collect();
            let index = g.emit(Op::Index(strides), &[], DType::I32, places);
            let index = g.reshape(index, &whole);
            let flat = g.reshape(ids[0], &Dims::from_slice(&[n, c, Size::fixed(h * w)]));
            let read = pick(g, flat, 2, index)?;
            let long = c
                .checked_mul(Size::fixed(kh * kw))
                .ok_or("unfold: the number of rows has no form as one size")?;
            let (dtype, columns) = (g.dtype(read), [n, long, Size::fixed(oh * ow)]);
            checked_as(g, Op::Reshape, &[read], dtype, &Dims::from_slice(&columns))
        })
    }

    /// The length (Σ|x|ᵖ)^(1/p) of each window of an image `[n, channels, h, w]`, for p above 0.
    #[track_caller]
    pub fn lp_pool2d(self, p: f32, window: Window) -> Tensor<'t> {
        let x = self.require(Location::caller(), |_, _| match p {
            p if p > 0.0 && p.is_finite() => Ok(()),
            p => Err(format!("lp_pool2d: {p} is not a power above 0")),
        });
        let count = (window.k[0] * window.k[1]) as f32;
        let sums = x.power_or_flat(p).avg_pool2d_with(window) * count;
        sums.power_or_flat(1.0 / p)
    }
}
