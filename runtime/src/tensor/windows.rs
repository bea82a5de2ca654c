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

    /// The largest elements of windows that divide an image `[n, channels, h, w]` into the given
    /// rows and columns, as those of [`Tensor::adaptive_avg_pool2d`].
    #[track_caller]
    pub fn adaptive_max_pool2d(self, size: [usize; 2]) -> Tensor<'t> {
        let at = Location::caller();
        let mut lengths = [0; 2];
        let image = self.require(at, |g, x| {
            let fixed = |axis: usize| {
                let n = g.dims(x).get(axis).and_then(|d| d.as_fixed());
                n.and_then(|n| usize::try_from(n).ok())
            };
            match (g.dims(x).len(), fixed(2), fixed(3)) {
                (4, Some(h), Some(w))
                    if (1..=h).contains(&size[0]) && (1..=w).contains(&size[1]) =>
                {
                    lengths = [h, w];
                    Ok(())
                }
                _ => Err(format!(
                    "adaptive_max_pool2d of {} to {}×{}: an image [n, channels, h, w] of fixed and \
                     no smaller height and width is needed",
                    g.symbols.show(g.dims(x)),
                    size[0],
                    size[1]
                )),
            }
        });
        if image.is_poisoned() || lengths == size {
            return image;
        }
        let whole = |i: usize| lengths[i].is_multiple_of(size[i]);
        if size == [1, 1] {
            return image.max_keep([2, 3]);
        }
        if whole(0) && whole(1) {
            let k = [lengths[0] / size[0], lengths[1] / size[1]];
            return image.max_pool2d_with(Window {
                k,
                stride: k,
                pad: [0, 0],
            });
        }
        self.trace.on_behalf(at, || {
            (0..2).fold(image, |x, i| {
                let (axis, n, parts) = (i + 2, lengths[i], size[i]);
                let part = |p: usize| {
                    x.slice(axis, p * n / parts..((p + 1) * n).div_ceil(parts))
                        .max_keep(axis)
                };
                let largest: Vec<Tensor<'t>> = (0..parts).map(part).collect();
                self.trace.concat(&largest, axis)
            })
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
