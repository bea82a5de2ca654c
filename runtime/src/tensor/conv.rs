//! Convolutions over sequences, images and volumes, and their transposes.

use std::panic::Location;

use slabwise_kernels::dtype::DType;

use super::window::Track;
use super::{ConvOptions, Operand, Padding, Tensor, checked};
use crate::graph::Graph;
use crate::ops::{ConvGeometry, GraphBuilder, NodeId, Op, TensorType, convolved, transposed_conv};
use crate::trace::Line;

impl<'t> Tensor<'t> {
    /// Convolution of an image `[n, channels, h, w]` with a weight `[out, channels, kh, kw]`, with
    /// stride 1 and no padding.
    #[track_caller]
    pub fn conv2d(self, weight: impl Operand<'t>) -> Tensor<'t> {
        self.conv2d_with(weight, ConvOptions::new())
    }

    /// Convolution of an image `[n, channels, h, w]` with a weight `[out, channels/groups, kh, kw]`
    /// (a cross-correlation, as is usual in networks). The options are [`ConvOptions`] or a
    /// [`ConvGeometry`]. Padding costs no copy of the image, on any side.
    #[track_caller]
    pub fn conv2d_with(
        self,
        weight: impl Operand<'t>,
        options: impl Into<ConvOptions<2>>,
    ) -> Tensor<'t> {
        let (at, options) = (Location::caller(), options.into());
        let weight = weight.lift(self.trace, DType::F32, at);
        self.convolve(at, weight, options)
    }

    /// Convolution of a sequence `[n, channels, length]` with a weight `[out, channels, k]`, with
    /// stride 1 and no padding.
    #[track_caller]
    pub fn conv1d(self, weight: impl Operand<'t>) -> Tensor<'t> {
        self.conv1d_with(weight, ConvOptions::new())
    }

    /// Convolution of a sequence `[n, channels, length]` with a weight `[out, channels/groups, k]`,
    /// as of an image of one row.
    #[track_caller]
    pub fn conv1d_with(self, weight: impl Operand<'t>, options: ConvOptions<1>) -> Tensor<'t> {
        let at = Location::caller();
        let weight = weight.lift(self.trace, DType::F32, at);
        let row = self.as_row(at, "conv1d of");
        let weight = weight.as_row(at, "conv1d with weight");
        let result = row.convolve(at, weight, options.of_rows());
        self.trace.on_behalf(at, || result.squeeze(2))
    }

    /// Convolution of a volume `[n, channels, depth, h, w]` with a weight `[out, channels/groups,
    /// kd, kh, kw]`: one of images, with the `kd` slices that a result depends on as its channels.
    /// These are copied side by side, `kd/stride` times the bytes of the volume; the products are
    /// those of the convolution alone.
    #[track_caller]
    pub fn conv3d_with(self, weight: impl Operand<'t>, options: ConvOptions<3>) -> Tensor<'t> {
        let at = Location::caller();
        let weight = weight.lift(self.trace, DType::F32, at);
        let mut sizes = None;
        let x = self.trace.record(at, &[self, weight], |g, ids| {
            let (x, w) = (g.dims(ids[0]), g.dims(ids[1]));
            let say = |why: &str| {
                let (x, w) = (g.symbols.show(x), g.symbols.show(w));
                Err(format!("conv3d {x} with weight {w}: {why}"))
            };
            if x.len() != 5 || w.len() != 5 {
                return say(
                    "volume [n, channels, depth, h, w] and weight [out, in/groups, kd, kh, kw] are needed",
                );
            }
            let fixed = |n: Option<i64>| n.and_then(|n| usize::try_from(n).ok());
            let Some((n, k)) = fixed(x[2].as_fixed()).zip(fixed(w[2].as_fixed())) else {
                return say("only the batch may be of bounded length");
            };
            let track = Track {
                n,
                k,
                stride: options.stride[0],
                dilation: options.dilation[0],
            };
            let padded = options.padding.along(0, track).and_then(|(before, after)| {
                let all = n.checked_add(before)?.checked_add(after)?;
                let room = all.checked_sub(track.span()?)?;
                Some((track, (before, after), room.checked_div(track.stride)? + 1))
            });
            sizes = padded.filter(|_| k > 0 && track.dilation > 0);
            match sizes {
                Some(_) => Ok(ids[0]),
                None => say("the kernel does not fit, or a stride or dilation is 0"),
            }
        });
        let Some((track, (before, after), results)) = sizes.filter(|_| !x.is_poisoned()) else {
            return x;
        };
        let pair = |numbers: [usize; 3]| [numbers[1], numbers[2]];
        let flat = ConvOptions {
            stride: pair(options.stride),
            padding: match options.padding {
                Padding::Sides(sides) => Padding::Sides([sides[1], sides[2]]),
                Padding::Same => Padding::Same,
                Padding::SameLower => Padding::SameLower,
                Padding::Causal => Padding::Causal,
            },
            dilation: pair(options.dilation),
            groups: options.groups,
            output_padding: [0; 2],
        };
        self.trace.on_behalf(at, || {
            let x = if (before, after) == (0, 0) {
                x
            } else {
                x.pad([(0, 0), (0, 0), (before, after), (0, 0), (0, 0)], 0.0)
            };
            let reach = (results - 1) * track.stride + 1;
            let slices: Vec<Tensor<'t>> = (0..track.k)
                .map(|element| {
                    let first = element * track.dilation;
                    x.slice_step(2, first..first + reach, track.stride)
                })
                .collect();
            // [n, channels, kd, results, h, w] → [n·results, channels·kd, h, w]
            let images = self
                .trace
                .stack(&slices, 2)
                .permute([0, 3, 1, 2, 4, 5])
                .flatten_pair(2)
                .flatten_pair(0);
            let y = images.convolve(at, weight.flatten_pair(1), flat);
            y.unflatten(0, [-1, results as i64]).transpose(1, 2)
        })
    }

    /// Two neighbouring axes joined into one.
    #[track_caller]
    fn flatten_pair(self, axis: usize) -> Tensor<'t> {
        self.trace.record(Location::caller(), &[self], |g, ids| {
            let mut dims = g.dims(ids[0]).clone();
            let after = dims.remove(axis + 1);
            dims[axis] = dims[axis]
                .checked_mul(after)
                .ok_or("the joined length has no form as one size")?;
            Ok(g.reshape(ids[0], &dims))
        })
    }

    #[track_caller]
    fn convolve(self, at: Line, weight: Tensor<'t>, options: ConvOptions<2>) -> Tensor<'t> {
        let precision = self.trace.precision();
        self.trace.record(at, &[self, weight], |g, ids| {
            let rounded = [ids[0], ids[1]].map(|id| precision.round(g, id));
            let (geometry, after) = geometry(g, ids, &options);
            if after == geometry.pad {
                return checked(g, Op::Conv2d(geometry), &rounded);
            }
            let (dtype, dims) = convolved(&geometry, Some(after), &types(g, ids), &g.symbols)?;
            Ok(g.emit(Op::Conv2d(geometry), &rounded, dtype, dims))
        })
    }

    /// The transposed convolution of [`Tensor::conv2d_with`], which is the gradient of its image:
    /// an image `[n, in, h, w]` with a weight `[in, out/groups, kh, kw]` gives
    /// `[n, out, (h − 1)·stride − padding + dilation·(kh − 1) + 1 + output padding, …]`, where the
    /// padding is that of both sides.
    #[track_caller]
    pub fn conv_transpose2d(
        self,
        weight: impl Operand<'t>,
        options: impl Into<ConvOptions<2>>,
    ) -> Tensor<'t> {
        let (at, options) = (Location::caller(), options.into());
        let weight = weight.lift(self.trace, DType::F32, at);
        self.convolve_transposed(at, weight, options)
    }

    /// The transpose of [`Tensor::conv1d_with`]: a sequence `[n, in, length]` with a weight `[in,
    /// out/groups, k]` gives `[n, out, (length − 1)·stride − padding + dilation·(k − 1) + 1 +
    /// output padding]`.
    #[track_caller]
    pub fn conv_transpose1d(self, weight: impl Operand<'t>, options: ConvOptions<1>) -> Tensor<'t> {
        let at = Location::caller();
        let weight = weight.lift(self.trace, DType::F32, at);
        let row = self.as_row(at, "conv_transpose1d of");
        let weight = weight.as_row(at, "conv_transpose1d with weight");
        let result = row.convolve_transposed(at, weight, options.of_rows());
        self.trace.on_behalf(at, || result.squeeze(2))
    }

    /// The transpose of [`Tensor::conv3d_with`]: a volume `[n, in, depth, h, w]` with a
    /// weight `[in, out/groups, kd, kh, kw]` gives `[n, out, (depth − 1)·stride − padding +
    /// dilation·(kd − 1) + 1 + output padding, …]`. One transposed convolution of images gives the
    /// contribution of each of the `kd` slices of the kernel, `kd` images for each slice of the
    /// volume; the result is their sum.
    #[track_caller]
    pub fn conv_transpose3d(self, weight: impl Operand<'t>, options: ConvOptions<3>) -> Tensor<'t> {
        let at = Location::caller();
        let weight = weight.lift(self.trace, DType::F32, at);
        let mut sizes = None;
        let x = self.trace.record(at, &[self, weight], |g, ids| {
            let (x, w) = (g.dims(ids[0]), g.dims(ids[1]));
            let say = |why: &str| {
                let (x, w) = (g.symbols.show(x), g.symbols.show(w));
                Err(format!("conv_transpose3d {x} with weight {w}: {why}"))
            };
            if x.len() != 5 || w.len() != 5 {
                return say("volume [n, in, depth, h, w] and weight [in, out/groups, kd, kh, kw] are needed");
            }
            let fixed = |n: Option<i64>| n.and_then(|n| usize::try_from(n).ok());
            let Some((n, k)) = fixed(x[2].as_fixed()).zip(fixed(w[2].as_fixed())) else {
                return say("only the batch may be of bounded length");
            };
            let Padding::Sides([sides, rest @ ..]) = options.padding else {
                return say("this padding is that of a convolution; give the numbers");
            };
            let (stride, more) = (options.stride[0], options.output_padding[0]);
            let track = Track {
                n,
                k,
                stride,
                dilation: options.dilation[0],
            };
            let whole = || {
                let reach = n.checked_sub(1)?.checked_mul(stride)?.checked_add(1)?;
                let all = reach.checked_add(track.span()? - 1)?.checked_add(more)?;
                let all = all.checked_sub(sides.0.checked_add(sides.1)?)?;
                Some((reach, all))
            };
            let steps = stride > 0 && track.dilation > 0 && more < stride.max(track.dilation);
            match whole().filter(|&(_, all)| all > 0 && steps) {
                Some((reach, all)) => sizes = Some((track, sides.0, rest, reach, all)),
                None => {
                    return say(
                        "nothing is left, a stride or dilation is 0, or the output padding is not \
                         less than either",
                    );
                }
            }
            Ok(ids[0])
        });
        let Some((track, before, rest, reach, all)) = sizes.filter(|_| !x.is_poisoned()) else {
            return x;
        };
        let pair = |numbers: [usize; 3]| [numbers[1], numbers[2]];
        let flat = ConvOptions {
            stride: pair(options.stride),
            padding: Padding::Sides(rest),
            dilation: pair(options.dilation),
            groups: options.groups,
            output_padding: pair(options.output_padding),
        };
        self.trace.on_behalf(at, || {
            let images = x.transpose(1, 2).flatten_pair(0);
            let y = images.convolve_transposed(at, weight.flatten_pair(1), flat);
            if y.is_poisoned() {
                return y;
            }
            // [n·depth, out·kd, h, w] → [n, out, kd, depth, h, w]
            let y = y
                .unflatten(1, [-1, track.k as i64])
                .unflatten(0, [-1, track.n as i64])
                .permute([0, 2, 3, 1, 4, 5]);
            let mut sum = None;
            for element in 0..track.k {
                // Its slices lie at `first`, `first + stride`, … of a result with its padding.
                let first = element * track.dilation;
                let (from, to) = (first.max(before), (first + reach).min(before + all));
                if from >= to {
                    continue;
                }
                let one = y.slice(2, element..element + 1).squeeze(2);
                let spread = one
                    .unsqueeze(3)
                    .pad(
                        [
                            (0, 0),
                            (0, 0),
                            (0, 0),
                            (0, track.stride - 1),
                            (0, 0),
                            (0, 0),
                        ],
                        0.0,
                    )
                    .flatten_pair(2);
                let sides = (from - before, before + all - to);
                let part = spread
                    .slice(2, from - first..to - first)
                    .pad([(0, 0), (0, 0), sides, (0, 0), (0, 0)], 0.0);
                sum = Some(sum.map_or(part, |sum| sum + part));
            }
            sum.unwrap_or_else(|| {
                let none = y.slice(2, ..1).squeeze(2).slice(2, ..1) * 0.0;
                none.pad([(0, 0), (0, 0), (0, all - 1), (0, 0), (0, 0)], 0.0)
            })
        })
    }

    #[track_caller]
    fn convolve_transposed(
        self,
        at: Line,
        weight: Tensor<'t>,
        options: ConvOptions<2>,
    ) -> Tensor<'t> {
        let precision = self.trace.precision();
        self.trace.record(at, &[self, weight], |g, ids| {
            let Padding::Sides(sides) = options.padding else {
                return Err(format!(
                    "conv_transpose of {}: {:?} padding is that of a convolution; give the numbers",
                    g.symbols.show(g.dims(ids[0])),
                    options.padding
                ));
            };
            let rounded = [ids[0], ids[1]].map(|id| precision.round(g, id));
            let geometry = ConvGeometry {
                stride: options.stride,
                pad: sides.map(|(before, _)| before),
                dilation: options.dilation,
                groups: options.groups,
            };
            let after = sides.map(|(_, after)| after);
            let more = options.output_padding;
            let given = types(g, ids);
            let (dtype, dims) = transposed_conv(&geometry, Some(after), more, given, &g.symbols)?;
            // It is the gradient of the convolution that has this image's shape.
            Ok(g.emit(Op::Conv2dInputGrad(geometry), &rounded, dtype, dims))
        })
    }
}

/// The types of an image and a weight.
fn types<'a>(g: &'a Graph, ids: &[NodeId]) -> [TensorType<'a>; 2] {
    [ids[0], ids[1]].map(|id| TensorType {
        dtype: g.dtype(id),
        dims: g.dims(id),
    })
}

/// The geometry of a convolution, and the zeros after the last row and column. Where the options
/// fit no image, the geometry is refused by its shape rule.
fn geometry(g: &Graph, ids: &[NodeId], options: &ConvOptions<2>) -> (ConvGeometry, [usize; 2]) {
    let length = |operand: usize, axis: usize| {
        let fixed = g.dims(ids[operand]).get(2 + axis)?.as_fixed()?;
        usize::try_from(fixed).ok()
    };
    let sides = [0, 1].map(|axis| {
        let track = Track {
            n: length(0, axis).unwrap_or(0),
            k: length(1, axis).unwrap_or(1),
            stride: options.stride[axis],
            dilation: options.dilation[axis],
        };
        options.padding.along(axis, track).unwrap_or((0, 0))
    });
    let geometry = ConvGeometry {
        stride: options.stride,
        pad: sides.map(|(before, _)| before),
        dilation: options.dilation,
        groups: options.groups,
    };
    (geometry, sides.map(|(_, after)| after))
}
