//! Windows over images as columns, and the lengths of windows as vectors.

use std::panic::Location;

use slabwise_kernels::dtype::DType;
use slabwise_kernels::size::Size;
use slabwise_kernels::spec::Dims;

use super::arrange::pick;
use super::window::Track;
use super::{ConvOptions, PoolOptions, Tensor, checked_as};
use crate::graph::Graph;
use crate::ops::{GraphBuilder, NodeId, Op};

impl<'t> Tensor<'t> {
    /// The windows of an image `[n, channels, h, w]` of fixed height and width as columns, as
    /// PyTorch's `unfold` (im2col) gives them: `[n, channels·kh·kw, windows]`, for windows of `[kh,
    /// kw]` elements with zeros beyond the edges. The options are [`ConvOptions`] or a
    /// [`ConvGeometry`](crate::ops::ConvGeometry), whose groups do not matter.
    #[doc(alias = "im2col")]
    #[track_caller]
    pub fn unfold(self, kernel: [usize; 2], options: impl Into<ConvOptions<2>>) -> Tensor<'t> {
        let (at, options) = (Location::caller(), options.into());
        let mut sides = [(0, 0); 2];
        let image = self.require(at, |g, x| {
            let along = |axis: usize| {
                let n = g.dims(x)[axis + 2].as_fixed()?;
                let track = Track {
                    n: usize::try_from(n).ok()?,
                    k: kernel[axis],
                    stride: options.stride[axis],
                    dilation: options.dilation[axis],
                };
                options.padding.along(axis, track)
            };
            let fits = g.dims(x).len() == 4;
            match fits.then(|| along(0).zip(along(1))).flatten() {
                Some((rows, columns)) => {
                    sides = [rows, columns];
                    Ok(())
                }
                None => Err(no_windows(g, x, kernel)),
            }
        });
        let padded = if sides == [(0, 0); 2] || image.is_poisoned() {
            image
        } else {
            image.pad([(0, 0), (0, 0), sides[0], sides[1]], 0.0)
        };
        self.trace.record(at, &[padded], |g, ids| {
            let dims = g.dims(ids[0]).clone();
            let [n, c, h, w] = dims[..] else {
                return Err(no_windows(g, ids[0], kernel));
            };
            let fixed = |n: usize| i64::try_from(n).ok().filter(|n| *n < 1 << 24);
            // Per axis: length, windows, stride, elements, dilation.
            let axis = |length: Size, i: usize| {
                let length = length.as_fixed()?;
                let [k, s, d] = [kernel[i], options.stride[i], options.dilation[i]].map(fixed);
                let (k, s, d) = (k?, s?, d?);
                let span = d * (k - 1) + 1;
                (k > 0 && s > 0 && d > 0 && span <= length)
                    .then(|| (length, (length - span) / s + 1, s, k, d))
            };
            let (Some(rows), Some(columns)) = (axis(h, 0), axis(w, 1)) else {
                return Err(no_windows(g, ids[0], kernel));
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

    /// The length (Σ|x|ᵖ)^(1/p) of each whole window of an image `[n, channels, h, w]`, for p above
    /// 0. The options are [`PoolOptions`] or a [`Window`](slabwise_kernels::spec::Window).
    #[track_caller]
    pub fn lp_pool2d(self, p: f32, options: impl Into<PoolOptions<2>>) -> Tensor<'t> {
        let mut options = options.into();
        let x = self.require(Location::caller(), |_, _| match p {
            p if !(p > 0.0 && p.is_finite()) => {
                Err(format!("lp_pool2d: {p} is not a power above 0"))
            }
            _ if options.ceil => Err("lp_pool2d: windows that are not whole are not possible; \
                 pad the image"
                .into()),
            _ => Ok(()),
        });
        options.count_padding = true;
        let count = options.window[0] as f32 * options.window[1] as f32;
        let sums = x.power_or_flat(p).avg_pool2d_with(options) * count;
        sums.power_or_flat(1.0 / p)
    }
}

fn no_windows(g: &Graph, x: NodeId, kernel: [usize; 2]) -> String {
    format!(
        "unfold of {} into windows of {kernel:?}: an image [n, channels, h, w] of fixed height and \
         width with at least one window is needed",
        g.symbols.show(g.dims(x))
    )
}
