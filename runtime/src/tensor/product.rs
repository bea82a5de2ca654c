//! Matrix products, convolution and pooling.

use std::panic::Location;

use slabwise_kernels::dtype::DType;
use slabwise_kernels::size::Size;
use slabwise_kernels::spec::{Dims, PoolKind, Window};

use super::elementwise::broadcast_shape;
use super::{Operand, Tensor, checked};
use crate::graph::Graph;
use crate::ops::{
    ConvGeometry, GraphBuilder, NodeId, Op, TensorType, floats, infer, transposed_conv,
};
use crate::shape::elements;

impl<'t> Tensor<'t> {
    /// `[batch…, m, k] × [batch…, k, n] → [batch…, m, n]`, f32; batch dimensions broadcast. An
    /// operand with one axis is a row on the left and a column on the right, and that axis is not
    /// in the result.
    #[track_caller]
    pub fn matmul(self, rhs: impl Operand<'t>) -> Tensor<'t> {
        let at = Location::caller();
        let rhs = rhs.lift(self.trace, DType::F32, at);
        let precision = self.trace.precision();
        self.trace.record(at, &[self, rhs], |g, ids| {
            let [a, b] = [ids[0], ids[1]].map(|id| precision.round(g, id));
            matmul(g, a, b)
        })
    }

    /// Convolution of an image `[n, channels, h, w]` with a weight `[out, channels, kh, kw]`, with
    /// stride 1 and no padding.
    #[track_caller]
    pub fn conv2d(self, weight: impl Operand<'t>) -> Tensor<'t> {
        self.conv2d_with(weight, ConvGeometry::default())
    }

    /// Convolution of an image `[n, channels, h, w]` with a weight `[out, channels/groups, kh, kw]`
    /// (a cross-correlation, as is usual in networks).
    #[track_caller]
    pub fn conv2d_with(self, weight: impl Operand<'t>, geometry: ConvGeometry) -> Tensor<'t> {
        let at = Location::caller();
        let weight = weight.lift(self.trace, DType::F32, at);
        let precision = self.trace.precision();
        self.trace.record(at, &[self, weight], |g, ids| {
            let rounded = [ids[0], ids[1]].map(|id| precision.round(g, id));
            checked(g, Op::Conv2d(geometry), &rounded)
        })
    }

    /// The transpose of [`Tensor::conv2d_with`], which is its gradient: an image `[n, in, h, w]`
    /// with a weight `[in, out/groups, kh, kw]` gives `[n, out, (h − 1)·stride − 2·pad +
    /// dilation·(kh − 1) + 1, …]`.
    #[track_caller]
    pub fn conv_transpose2d(self, weight: impl Operand<'t>, geometry: ConvGeometry) -> Tensor<'t> {
        let at = Location::caller();
        let weight = weight.lift(self.trace, DType::F32, at);
        let precision = self.trace.precision();
        self.trace.record(at, &[self, weight], |g, ids| {
            let ids = [ids[0], ids[1]].map(|id| precision.round(g, id));
            let given = ids.map(|id| TensorType {
                dtype: g.dtype(id),
                dims: g.dims(id),
            });
            let (dtype, dims) = transposed_conv(&geometry, given, &g.symbols)?;
            // It is the gradient of the convolution that has this image's shape.
            let result = [
                TensorType {
                    dtype: g.dtype(ids[0]),
                    dims: &dims,
                },
                TensorType {
                    dtype: g.dtype(ids[1]),
                    dims: g.dims(ids[1]),
                },
            ];
            debug_assert_eq!(
                infer(&Op::Conv2d(geometry), &result, (dtype, &dims), &g.symbols)
                    .as_ref()
                    .map(|(_, dims)| dims),
                Ok(g.dims(ids[0]))
            );
            Ok(g.emit(Op::Conv2dInputGrad(geometry), &ids, dtype, dims))
        })
    }

    /// The largest element of each `k × k` window of an image `[n, channels, h, w]`; windows do not
    /// overlap.
    #[track_caller]
    pub fn max_pool2d(self, k: usize) -> Tensor<'t> {
        self.max_pool2d_with(tiles(k))
    }

    /// The largest element of each window.
    #[track_caller]
    pub fn max_pool2d_with(self, window: Window) -> Tensor<'t> {
        self.pool(PoolKind::Max, window)
    }

    /// The mean of each `k × k` window of an image `[n, channels, h, w]`; windows do not overlap.
    #[track_caller]
    pub fn avg_pool2d(self, k: usize) -> Tensor<'t> {
        self.avg_pool2d_with(tiles(k))
    }

    /// The mean of each window; zeros of the padding count.
    #[track_caller]
    pub fn avg_pool2d_with(self, window: Window) -> Tensor<'t> {
        self.pool(PoolKind::Avg { count_pad: true }, window)
    }

    /// The mean of each channel: `[n, channels, h, w] → [n, channels]`.
    #[track_caller]
    pub fn global_avg_pool(self) -> Tensor<'t> {
        let image = self.require(Location::caller(), |g, x| match g.dims(x).len() {
            4 => Ok(()),
            _ => Err(format!(
                "global_avg_pool of {}: an image [n, channels, h, w] is needed",
                g.symbols.show(g.dims(x))
            )),
        });
        image.mean_over([2, 3])
    }

    /// The means of windows that divide an image `[n, channels, h, w]` into the given rows and
    /// columns. Window row i covers the rows ⌊i·h/rows⌋ to ⌈(i + 1)·h/rows⌉ of the image;
    /// neighbours overlap by one row where the division has a remainder.
    #[track_caller]
    pub fn adaptive_avg_pool2d(self, size: [usize; 2]) -> Tensor<'t> {
        let mut lengths = [0; 2];
        let image = self.require(Location::caller(), |g, x| {
            let fixed = |axis: usize| g.dims(x).get(axis).and_then(|d| d.as_fixed()).and_then(|n| usize::try_from(n).ok());
            match (g.dims(x).len(), fixed(2), fixed(3)) {
                (4, Some(h), Some(w)) if (1..=h).contains(&size[0]) && (1..=w).contains(&size[1]) => {
                    lengths = [h, w];
                    Ok(())
                }
                _ => Err(format!(
                    "adaptive_avg_pool2d of {} to {}×{}: an image [n, channels, h, w] of fixed and no smaller height and width is needed",
                    g.symbols.show(g.dims(x)),
                    size[0],
                    size[1]
                )),
            }
        });
        if image.is_poisoned() || lengths == size {
            return image;
        }
        let [h, w] = lengths;
        if size == [1, 1] {
            return image.mean_keep([2, 3]);
        }
        if h.is_multiple_of(size[0]) && w.is_multiple_of(size[1]) {
            let k = [h / size[0], w / size[1]];
            return image.avg_pool2d_with(Window {
                k,
                stride: k,
                pad: [0, 0],
            });
        }
        // A window is a rectangle: the mean of its rows' means.
        (0..2).fold(image, |x, i| {
            let (axis, n, parts) = (i + 2, lengths[i], size[i]);
            let part = |p: usize| {
                x.slice(axis, p * n / parts..((p + 1) * n).div_ceil(parts))
                    .mean_keep(axis)
            };
            let means: Vec<Tensor<'t>> = (0..parts).map(part).collect();
            self.trace.concat(&means, axis)
        })
    }

    #[track_caller]
    fn pool(self, kind: PoolKind, window: Window) -> Tensor<'t> {
        self.trace.record(Location::caller(), &[self], |g, ids| {
            checked(g, Op::Pool2d(kind, window), ids)
        })
    }
}

/// Windows side by side.
fn tiles(k: usize) -> Window {
    Window {
        k: [k, k],
        stride: [k, k],
        pad: [0, 0],
    }
}

fn matmul(g: &mut Graph, a: NodeId, b: NodeId) -> Result<NodeId, String> {
    let (da, db) = (g.dims(a).clone(), g.dims(b).clone());
    let say = |g: &Graph, why: String| {
        Err(format!(
            "matmul {} × {}: {why}",
            g.symbols.show(&da),
            g.symbols.show(&db)
        ))
    };
    if da.is_empty() || db.is_empty() {
        return say(g, "both need an axis".into());
    }
    if let Err(why) = floats(g.dtype(a), g.dtype(b)) {
        return say(g, why);
    }
    // One axis becomes two: a row on the left, a column on the right.
    let (mut ma, mut mb) = (da.clone(), db.clone());
    if ma.len() == 1 {
        ma.insert(0, Size::ONE);
    }
    if mb.len() == 1 {
        mb.push(Size::ONE);
    }
    let (ra, rb) = (ma.len(), mb.len());
    let (m, k, l, n) = (ma[ra - 2], ma[ra - 1], mb[rb - 2], mb[rb - 1]);
    if k != l {
        let show = |d: Size| d.show(|s| g.symbols.name(s));
        return say(
            g,
            format!("inner dimensions {} and {} differ", show(k), show(l)),
        );
    }
    let Some(batch) = broadcast_shape(&ma[..ra - 2], &mb[..rb - 2]) else {
        return say(g, "batch dimensions do not broadcast".into());
    };
    // With one matrix on the right, the rows of all batches make one matrix, so that nothing is
    // repeated.
    let rows = elements(&ma[..ra - 1]).filter(|_| rb == 2);
    let (left, right) = match rows {
        Some(rows) => (Dims::from_slice(&[rows, k]), mb),
        None => {
            let with = |r, c| batch.iter().copied().chain([r, c]).collect::<Dims>();
            (with(m, k), with(l, n))
        }
    };
    let a = g.reshape(a, if rows.is_some() { &left } else { &ma });
    let a = g.broadcast(a, &left);
    let b = if db.len() == 1 {
        g.reshape(b, &Dims::from_slice(&[l, n]))
    } else {
        b
    };
    let b = g.broadcast(b, &right);
    let product = g.matmul(a, b);
    let mut dims = batch;
    dims.extend((da.len() > 1).then_some(m));
    dims.extend((db.len() > 1).then_some(n));
    Ok(g.reshape(product, &dims))
}
