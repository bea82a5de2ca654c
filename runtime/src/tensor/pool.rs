//! Pooling of sequences and images.

use std::panic::Location;

use slabwise_kernels::dtype::DType;
use slabwise_kernels::scalar::ScalarOp;
use slabwise_kernels::size::Size;
use slabwise_kernels::spec::{Dims, PoolKind, ReduceOp, Window};
use smallvec::SmallVec;

use super::arrange::{integer, pick, ramp};
use super::window::Track;
use super::{ConvOptions, Padding, PoolOptions, Tensor, checked, checked_as};
use crate::graph::Graph;
use crate::ops::{GraphBuilder, NodeId, Op};
use crate::trace::Line;

/// The windows over one axis of fixed length.
#[derive(Clone, Copy)]
struct Windows {
    track: Track,
    /// Padding before the first and after the last element.
    sides: (usize, usize),
    count: usize,
}

impl Windows {
    /// The windows of an axis, as PyTorch counts them: with `ceil`, a last one that is not whole
    /// counts if it begins before the padding that follows the last element.
    fn new(options: &PoolOptions<2>, axis: usize, n: usize) -> Option<Windows> {
        let track = Track {
            n,
            k: options.window[axis],
            stride: options.stride[axis],
            dilation: options.dilation[axis],
        };
        let sides = options.padding.along(axis, track)?;
        let padded = n.checked_add(sides.0)?.checked_add(sides.1)?;
        let stride = track.stride.checked_sub(1)? + 1;
        let span = track.span().filter(|_| track.dilation > 0)?;
        let count = if options.ceil {
            let room = padded.checked_add(stride)?.checked_sub(span)?;
            // Windows that begin at 0, stride, … and of which all but the last are whole.
            let count = room.checked_sub(1)? / stride + 1;
            let last_begins = (count - 1).checked_mul(stride)?;
            count - usize::from(last_begins >= n.checked_add(sides.0)?)
        } else {
            padded.checked_sub(span)? / stride + 1
        };
        (count > 0).then_some(Windows {
            track,
            sides,
            count,
        })
    }

    /// Whether the last window reaches past the padded axis.
    fn overhangs(&self) -> bool {
        let Track { n, k, stride, .. } = self.track;
        (self.count - 1) * stride + k > n + self.sides.0 + self.sides.1
    }

    /// The padded length that all windows with dilation need, in whole steps of the dilation.
    fn reach(&self) -> usize {
        let Track {
            stride, dilation, ..
        } = self.track;
        let span = self.track.span().unwrap_or(usize::MAX);
        ((self.count - 1) * stride + span).next_multiple_of(dilation)
    }
}

impl<'t> Tensor<'t> {
    /// The largest element of each `k × k` window of an image `[n, channels, h, w]`; windows do not
    /// overlap.
    #[track_caller]
    pub fn max_pool2d(self, k: usize) -> Tensor<'t> {
        self.max_pool2d_with(PoolOptions::new(k))
    }

    /// The largest element of each window. The options are [`PoolOptions`] or a [`Window`]. With
    /// dilation the image is copied, sorted by its remainders; all else costs no copy.
    #[track_caller]
    pub fn max_pool2d_with(self, options: impl Into<PoolOptions<2>>) -> Tensor<'t> {
        self.pool(Location::caller(), PoolKind::Max, options.into())
    }

    /// The largest element of each window of a sequence `[n, channels, length]`.
    #[track_caller]
    pub fn max_pool1d_with(self, options: PoolOptions<1>) -> Tensor<'t> {
        let at = Location::caller();
        let pooled = self
            .as_row(at, "max_pool1d of")
            .pool(at, PoolKind::Max, options.of_rows());
        self.trace.on_behalf(at, || pooled.squeeze(2))
    }

    /// The position `row · w + column` (i32) in an image `[n, channels, h, w]` of the first largest
    /// element of each window.
    #[track_caller]
    pub fn max_pool2d_positions(self, options: impl Into<PoolOptions<2>>) -> Tensor<'t> {
        self.positions(Location::caller(), options.into())
    }

    /// The position (i32) in a sequence `[n, channels, length]` of the first largest element of
    /// each window.
    #[track_caller]
    pub fn max_pool1d_positions(self, options: PoolOptions<1>) -> Tensor<'t> {
        let at = Location::caller();
        let pooled = self
            .as_row(at, "max_pool1d of")
            .positions(at, options.of_rows());
        self.trace.on_behalf(at, || pooled.squeeze(2))
    }

    /// The mean of each `k × k` window of an image `[n, channels, h, w]`; windows do not overlap.
    #[track_caller]
    pub fn avg_pool2d(self, k: usize) -> Tensor<'t> {
        self.avg_pool2d_with(PoolOptions::new(k))
    }

    /// The mean of each window. The options are [`PoolOptions`] or a [`Window`]. Zeros of the
    /// padding count, unless the options say otherwise; places past the padding, which a last
    /// window that is not whole reaches, never do. With dilation it is a convolution.
    #[track_caller]
    pub fn avg_pool2d_with(self, options: impl Into<PoolOptions<2>>) -> Tensor<'t> {
        let options = options.into();
        let kind = PoolKind::Avg {
            count_pad: options.count_padding,
        };
        self.pool(Location::caller(), kind, options)
    }

    /// The mean of each window of a sequence `[n, channels, length]`, as
    /// [`avg_pool2d_with`](Tensor::avg_pool2d_with) counts it.
    #[track_caller]
    pub fn avg_pool1d_with(self, options: PoolOptions<1>) -> Tensor<'t> {
        let (at, options) = (Location::caller(), options.of_rows());
        let kind = PoolKind::Avg {
            count_pad: options.count_padding,
        };
        let pooled = self.as_row(at, "avg_pool1d of").pool(at, kind, options);
        self.trace.on_behalf(at, || pooled.squeeze(2))
    }

    /// The mean of each channel: `[n, channels, h, w] → [n, channels]`.
    #[track_caller]
    pub fn global_avg_pool(self) -> Tensor<'t> {
        self.image(Location::caller(), "global_avg_pool")
            .mean_over([2, 3])
    }

    /// The largest element of each channel: `[n, channels, h, w] → [n, channels]`.
    #[track_caller]
    pub fn global_max_pool(self) -> Tensor<'t> {
        self.image(Location::caller(), "global_max_pool")
            .max_over([2, 3])
    }

    fn image(self, at: Line, what: &str) -> Tensor<'t> {
        self.require(at, |g, x| match g.dims(x).len() {
            4 => Ok(()),
            _ => Err(format!(
                "{what} of {}: an image [n, channels, h, w] is needed",
                g.symbols.show(g.dims(x))
            )),
        })
    }

    /// The means of windows that divide an image `[n, channels, h, w]` into the given rows and
    /// columns, as in PyTorch. Window row i covers the rows ⌊i·h/rows⌋ to ⌈(i + 1)·h/rows⌉ of the
    /// image; neighbours overlap by one row where the division has a remainder. There may be more
    /// windows than rows or columns of the image: each then covers one of these or two.
    #[track_caller]
    pub fn adaptive_avg_pool2d(self, size: [usize; 2]) -> Tensor<'t> {
        self.adapt(Location::caller(), "adaptive_avg_pool2d", size)
    }

    /// The largest elements of the windows of
    /// [`adaptive_avg_pool2d`](Tensor::adaptive_avg_pool2d).
    #[track_caller]
    pub fn adaptive_max_pool2d(self, size: [usize; 2]) -> Tensor<'t> {
        self.adapt(Location::caller(), "adaptive_max_pool2d", size)
    }

    /// [`adaptive_avg_pool2d`](Tensor::adaptive_avg_pool2d) of a sequence `[n, channels, length]`
    /// into `size` windows.
    #[track_caller]
    pub fn adaptive_avg_pool1d(self, size: usize) -> Tensor<'t> {
        let at = Location::caller();
        let row = self.as_row(at, "adaptive_avg_pool1d of");
        let pooled = row.adapt(at, "adaptive_avg_pool2d", [1, size]);
        self.trace.on_behalf(at, || pooled.squeeze(2))
    }

    /// [`adaptive_max_pool2d`](Tensor::adaptive_max_pool2d) of a sequence `[n, channels, length]`
    /// into `size` windows.
    #[track_caller]
    pub fn adaptive_max_pool1d(self, size: usize) -> Tensor<'t> {
        let at = Location::caller();
        let row = self.as_row(at, "adaptive_max_pool1d of");
        let pooled = row.adapt(at, "adaptive_max_pool2d", [1, size]);
        self.trace.on_behalf(at, || pooled.squeeze(2))
    }

    fn adapt(self, at: Line, what: &str, size: [usize; 2]) -> Tensor<'t> {
        let largest = what == "adaptive_max_pool2d";
        let mut lengths = [0; 2];
        let image = self.require(at, |g, x| {
            let shown = || {
                let [rows, columns] = size;
                format!(
                    "{what} of {} to {rows}×{columns}",
                    g.symbols.show(g.dims(x))
                )
            };
            let fixed = |axis: usize| {
                let n = g.dims(x).get(axis).and_then(|d| d.as_fixed());
                n.and_then(|n| usize::try_from(n).ok()).filter(|&n| n > 0)
            };
            let (4, Some(h), Some(w)) = (g.dims(x).len(), fixed(2), fixed(3)) else {
                return Err(format!(
                    "{}: an image [n, channels, h, w] of fixed height and width above 0 is needed",
                    shown()
                ));
            };
            lengths = [h, w];
            // Positions are computed as i32.
            let most = i32::MAX as usize;
            let fits = |i: usize| size[i] <= most / lengths[i].max(2);
            match (0..2).find(|&i| size[i] > lengths[i] && !fits(i)) {
                None => Ok(()),
                Some(i) => Err(format!(
                    "{}: axis {} of {} elements can have {} windows at most",
                    shown(),
                    i + 2,
                    lengths[i],
                    most / lengths[i].max(2)
                )),
            }
        });
        if image.is_poisoned() || lengths == size {
            return image;
        }
        self.trace.on_behalf(at, || {
            let [h, w] = lengths;
            if size == [1, 1] {
                return match largest {
                    true => image.max_keep([2, 3]),
                    false => image.mean_keep([2, 3]),
                };
            }
            if h.is_multiple_of(size[0]) && w.is_multiple_of(size[1]) {
                let options = PoolOptions::new([h / size[0], w / size[1]]);
                return match largest {
                    true => image.max_pool2d_with(options),
                    false => image.avg_pool2d_with(options),
                };
            }
            // A window is a rectangle: the mean of its rows' means.
            (0..2).fold(image, |x, i| {
                x.adapt_axis(largest, i + 2, [lengths[i], size[i]])
            })
        })
    }

    /// The mean or the largest element of each of `parts` windows that divide an axis of `n`
    /// elements.
    #[track_caller]
    fn adapt_axis(self, largest: bool, axis: usize, [n, parts]: [usize; 2]) -> Tensor<'t> {
        if parts == 0 {
            return self.slice(axis, ..0);
        }
        if parts == n {
            return self;
        }
        if parts.is_multiple_of(n) {
            return self.repeat_interleave(axis, parts / n);
        }
        if parts > n {
            // Windows of one element are two equal ones, so that all have the same number.
            let ends = self.trace.record(Location::caller(), &[self], |g, ids| {
                let positions = ends_of_windows(g, [n, parts]);
                pick(g, ids[0], axis, positions)
            });
            let ends = ends.unflatten(axis, (parts, 2));
            return match largest {
                true => ends.max_over(axis + 1),
                false => ends.mean_over(axis + 1),
            };
        }
        let part = |p: usize| {
            let rows = self.slice(axis, p * n / parts..((p + 1) * n).div_ceil(parts));
            match largest {
                true => rows.max_keep(axis),
                false => rows.mean_keep(axis),
            }
        };
        let folded: Vec<Tensor<'t>> = (0..parts).map(part).collect();
        self.trace.concat(&folded, axis)
    }

    /// The image, and its windows along both axes.
    fn windows(
        self,
        at: Line,
        what: &str,
        options: &PoolOptions<2>,
    ) -> (Tensor<'t>, Option<[Windows; 2]>) {
        let mut found = None;
        let x = self.require(at, |g, x| {
            let shown = g.symbols.show(g.dims(x));
            if g.dims(x).len() != 4 || g.dtype(x) != DType::F32 {
                return Err(format!(
                    "{what} of {} {shown}: an f32 image [n, channels, h, w] is needed",
                    g.dtype(x)
                ));
            }
            let fixed = |axis: usize| {
                let n = g.dims(x)[axis].as_fixed()?;
                usize::try_from(n).ok().filter(|&n| n > 0)
            };
            let [Some(h), Some(w)] = [fixed(2), fixed(3)] else {
                return Err(format!("{what} of {shown}: height and width must have fixed lengths above 0"));
            };
            let [rows, columns] = [(0, h), (1, w)].map(|(axis, n)| Windows::new(options, axis, n));
            let (Some(rows), Some(columns)) = (rows, columns) else {
                let [k, stride] = [options.window, options.stride].map(|[a, b]| format!("{a}×{b}"));
                return Err(format!("{what} of {shown}: a {k} window with stride {stride} does not fit"));
            };
            let sides = [rows, columns].map(|windows| (windows.track, windows.sides));
            if sides.iter().any(|(track, (before, after))| (*before).max(*after) >= track.span().unwrap_or(0)) {
                return Err(format!(
                    "{what} of {shown}: padding {:?} and {:?} is not less than the window, which would lie in it",
                    rows.sides, columns.sides
                ));
            }
            found = Some([rows, columns]);
            Ok(())
        });
        (x, found)
    }

    fn pool(self, at: Line, kind: PoolKind, options: PoolOptions<2>) -> Tensor<'t> {
        let plain = options.dilation == [1, 1] && !options.ceil;
        if let Padding::Sides(sides) = options.padding
            && plain
            && sides.iter().all(|(before, after)| before == after)
        {
            let window = Window {
                k: options.window,
                stride: options.stride,
                pad: sides.map(|(before, _)| before),
            };
            return self.trace.record(at, &[self], |g, ids| {
                checked(g, Op::Pool2d(kind, window), ids)
            });
        }
        let largest = !matches!(kind, PoolKind::Avg { .. });
        let name = if largest { "max_pool2d" } else { "avg_pool2d" };
        let (x, windows) = self.windows(at, name, &options);
        let Some(windows) = windows.filter(|_| !x.is_poisoned()) else {
            return x;
        };
        self.trace.on_behalf(at, || match kind {
            _ if options.dilation == [1, 1] => x.pool_windows(at, kind, windows),
            PoolKind::Avg { count_pad } => x.dilated_mean(windows, count_pad),
            _ => x.dilated(at, kind, windows),
        })
    }

    /// Pooling by windows of dilation 1, whose number the result's shape says.
    fn pool_windows(self, at: Line, kind: PoolKind, windows: [Windows; 2]) -> Tensor<'t> {
        let window = Window {
            k: windows.map(|w| w.track.k),
            stride: windows.map(|w| w.track.stride),
            pad: windows.map(|w| w.sides.0),
        };
        let pooled = self.trace.record(at, &[self], |g, ids| {
            let mut dims = g.dims(ids[0]).clone();
            for (axis, w) in windows.iter().enumerate() {
                dims[2 + axis] = Size::fixed(w.count as i64);
            }
            checked_as(g, Op::Pool2d(kind, window), ids, DType::F32, &dims)
        });
        if kind != (PoolKind::Avg { count_pad: true }) {
            return pooled;
        }
        // The divisor of the kernel is the whole window; places past the padding do not count.
        (0..2).fold(pooled, |pooled, axis| {
            let w = windows[axis];
            if !w.overhangs() {
                return pooled;
            }
            let (k, all) = (w.track.k as f32, w.track.n + w.sides.0 + w.sides.1);
            let begin = self.trace.arange(w.count).cast(DType::F32) * w.track.stride as f32;
            let counted = (begin + k).minimum(all as f32) - begin;
            let scale = k / counted;
            pooled * if axis == 0 { scale.unsqueeze(1) } else { scale }
        })
    }

    /// Pooling by windows with dilation: the places of one remainder by the dilation are neighbours
    /// in an image of their own.
    fn dilated(self, at: Line, kind: PoolKind, windows: [Windows; 2]) -> Tensor<'t> {
        let [rows, columns] = windows;
        let [h, w] = windows.map(|w| w.reach());
        let [dh, dw] = windows.map(|w| w.track.dilation);
        // The padded image up to the last place that a window reaches.
        let cut = windows.map(|w| w.track.n.min(w.reach().saturating_sub(w.sides.0)));
        let pads = |axis: usize, all: usize| {
            let before = windows[axis].sides.0;
            (before, all - before - cut[axis])
        };
        let padded = self
            .slice(2, ..cut[0])
            .slice(3, ..cut[1])
            .pad([(0, 0), (0, 0), pads(0, h), pads(1, w)], f32::NEG_INFINITY);
        let [qh, qw] = [h / dh, w / dw];
        let sorted = padded
            .unflatten(3, (qw, dw))
            .unflatten(2, (qh, dh))
            .permute([0, 1, 3, 5, 2, 4]);
        let channels = self.len(1).map_or(-1, |n| n as i64);
        let places = (dh * dw) as i64;
        let images = sorted.reshape_like_image(channels, places, [qh, qw]);
        let plain = [(rows, qh), (columns, qw)].map(|(w, n)| Windows {
            track: Track {
                n,
                k: w.track.k,
                stride: 1,
                dilation: 1,
            },
            sides: (0, 0),
            count: n - w.track.k + 1,
        });
        let pooled = images.pool_windows(at, kind, plain);
        let [ph, pw] = plain.map(|w| w.count);
        pooled
            .unflatten(1, [-1, dh as i64, dw as i64])
            .permute([0, 1, 4, 2, 5, 3])
            .reshape_places([ph * dh, pw * dw])
            .slice_step(
                2,
                ..(rows.count - 1) * rows.track.stride + 1,
                rows.track.stride,
            )
            .slice_step(
                3,
                ..(columns.count - 1) * columns.track.stride + 1,
                columns.track.stride,
            )
    }

    /// `[n, c, dh, dw, h, w]` as images `[n, c·dh·dw, h, w]`.
    fn reshape_like_image(self, channels: i64, places: i64, [h, w]: [usize; 2]) -> Tensor<'t> {
        self.trace.record(Location::caller(), &[self], |g, ids| {
            let dims = g.dims(ids[0]);
            let all = dims[1]
                .checked_mul(Size::fixed(places))
                .ok_or_else(|| format!("{channels} channels are too many"))?;
            let dims =
                Dims::from_slice(&[dims[0], all, Size::fixed(h as i64), Size::fixed(w as i64)]);
            Ok(g.reshape(ids[0], &dims))
        })
    }

    /// `[n, c, h, dh, w, dw]` as images `[n, c, h·dh, w·dw]`.
    fn reshape_places(self, lengths: [usize; 2]) -> Tensor<'t> {
        self.trace.record(Location::caller(), &[self], |g, ids| {
            let mut dims = Dims::from_slice(&g.dims(ids[0])[..2]);
            dims.extend(lengths.map(|n| Size::fixed(n as i64)));
            Ok(g.reshape(ids[0], &dims))
        })
    }

    /// Means of windows with dilation: a convolution of each channel by ones, divided by the number
    /// of places that count.
    fn dilated_mean(self, windows: [Windows; 2], count_pad: bool) -> Tensor<'t> {
        let Some(channels) = self.len(1) else {
            return self.require(Location::caller(), |g, x| {
                Err(format!(
                    "avg_pool2d of {} with dilation: a fixed number of channels is needed",
                    g.symbols.show(g.dims(x))
                ))
            });
        };
        let [kh, kw] = windows.map(|w| w.track.k);
        let options = |sides: [(usize, usize); 2], groups: usize| {
            // After the last element, as many zeros as the last window reaches.
            let mut sides = sides;
            for (side, w) in sides.iter_mut().zip(windows) {
                let reach = (w.count - 1) * w.track.stride + w.track.span().unwrap_or(1);
                side.1 = reach.saturating_sub(w.track.n + w.sides.0);
            }
            ConvOptions::<2> {
                stride: windows.map(|w| w.track.stride),
                padding: Padding::Sides(sides),
                dilation: windows.map(|w| w.track.dilation),
                groups,
                output_padding: [0; 2],
            }
        };
        let sides = windows.map(|w| w.sides);
        let trace = self.trace;
        let crop = |x: Tensor<'t>| x.slice(2, ..windows[0].count).slice(3, ..windows[1].count);
        let sums =
            crop(self.conv2d_with(trace.ones((channels, 1, kh, kw)), options(sides, channels)));
        let [h, w] = windows.map(|w| w.track.n);
        let ones = trace.ones((1, 1, h, w));
        let counted = if count_pad {
            let pads = [(0, 0), (0, 0), sides[0], sides[1]];
            let mut unpadded = options([(0, 0); 2], 1);
            if let Padding::Sides(sides) = &mut unpadded.padding {
                for (side, w) in sides.iter_mut().zip(windows) {
                    side.1 = side.1.saturating_sub(w.sides.1);
                }
            }
            ones.pad(pads, 1.0)
                .conv2d_with(trace.ones((1, 1, kh, kw)), unpadded)
        } else {
            ones.conv2d_with(trace.ones((1, 1, kh, kw)), options(sides, 1))
        };
        sums / crop(counted)
    }

    /// See [`Tensor::max_pool2d_positions`].
    fn positions(self, at: Line, options: PoolOptions<2>) -> Tensor<'t> {
        let (x, windows) = self.windows(at, "max_pool2d_positions", &options);
        let Some(windows) = windows.filter(|_| !x.is_poisoned()) else {
            return x;
        };
        let inside = self.trace.on_behalf(at, || {
            if options.dilation == [1, 1] {
                x.pool_windows(at, PoolKind::ArgMax, windows)
            } else {
                x.dilated(at, PoolKind::ArgMax, windows)
            }
        });
        self.trace.record(at, &[inside], |g, ids| {
            let position = g.cast(ids[0], DType::I32);
            Ok(flat_positions(g, position, windows))
        })
    }

    /// The inverse of a maximum pooling: an image `[n, channels, h, w]` of zeros with this tensor's
    /// elements at `positions`, which are those of
    /// [`max_pool2d_positions`](Tensor::max_pool2d_positions). Elements of one position, which
    /// windows that overlap can have, are added.
    #[track_caller]
    pub fn max_unpool2d(self, positions: Tensor<'t>, [h, w]: [usize; 2]) -> Tensor<'t> {
        self.trace.record(Location::caller(), &[self, positions], |g, ids| {
            let (dims, of_positions) = (g.dims(ids[0]).clone(), g.dims(ids[1]).clone());
            let places = h.checked_mul(w).and_then(|n| i32::try_from(n).ok());
            let Some(places) = places.filter(|_| {
                dims.len() == 4 && dims == of_positions && g.dtype(ids[1]) == DType::I32
            }) else {
                return Err(format!(
                    "max_unpool2d of {} by positions {} {} to {h}×{w}: an image [n, channels, h, w] and as many i32 positions are needed",
                    g.symbols.show(&dims),
                    g.dtype(ids[1]),
                    g.symbols.show(&of_positions)
                ));
            };
            let places = Size::fixed(i64::from(places));
            super::check_index(g, ids[1], places);
            let flat = |g: &mut Graph, id: NodeId| {
                let dims = g.dims(id).clone();
                let area = dims[2].checked_mul(dims[3]).ok_or("max_unpool2d: too many places")?;
                Ok::<_, String>(g.reshape(id, &Dims::from_slice(&[dims[0], dims[1], area])))
            };
            let (value, index) = (flat(g, ids[0])?, flat(g, ids[1])?);
            let canvas = Dims::from_slice(&[dims[0], dims[1], places]);
            let scattered = g.emit(
                Op::Scatter { axis: 2, reduce: ReduceOp::Sum },
                &[value, index],
                DType::F32,
                canvas,
            );
            let image = [h, w].map(|n| Size::fixed(n as i64));
            Ok(g.reshape(scattered, &Dims::from_slice(&[dims[0], dims[1], image[0], image[1]])))
        })
    }
}

/// Positions in an image from positions in windows (i32).
fn flat_positions(g: &mut Graph, position: NodeId, windows: [Windows; 2]) -> NodeId {
    let dims = g.dims(position).clone();
    let [rows, columns] = windows;
    let int = |g: &mut Graph, n: usize| g.full(n as f32, DType::I32, &dims);
    let kw = int(g, columns.track.k);
    let row = g.scalar(ScalarOp::Div, &[position, kw]);
    let before = g.mul(row, kw);
    let column = g.scalar(ScalarOp::Sub, &[position, before]);
    let place = |g: &mut Graph, element: NodeId, axis: usize, windows: Windows| {
        let mut strides: Dims = SmallVec::from_elem(Size::ZERO, 4);
        strides[axis] = Size::fixed(windows.track.stride as i64);
        let begin = g.emit(Op::Index(strides), &[], DType::I32, dims.clone());
        let dilation = int(g, windows.track.dilation);
        let element = g.mul(element, dilation);
        let padded = g.add(begin, element);
        let pad = int(g, windows.sides.0);
        g.scalar(ScalarOp::Sub, &[padded, pad])
    };
    let row = place(g, row, 2, rows);
    let column = place(g, column, 3, columns);
    let width = int(g, columns.track.n);
    let first = g.mul(row, width);
    g.add(first, column)
}

/// The first and the last position of each of `parts` windows that divide an axis of fewer elements
/// `n`: i32 `[2·parts]`.
fn ends_of_windows(g: &mut Graph, [n, parts]: [usize; 2]) -> NodeId {
    let ends = ramp(g, Size::fixed(2 * parts as i64));
    let dims = g.dims(ends).clone();
    let [one, n, last, parts] = [1, n, n - 1, parts].map(|k| integer(g, k as i32, &dims));
    let window = g.scalar(ScalarOp::ShiftRight, &[ends, one]);
    let is_last = g.scalar(ScalarOp::BitAnd, &[ends, one]);
    // ⌊i·n/parts⌋ and ⌈(i + 1)·n/parts⌉ − 1 = ⌊(i·n + n − 1)/parts⌋
    let start = g.mul(window, n);
    let more = g.mul(is_last, last);
    let end = g.add(start, more);
    g.scalar(ScalarOp::Div, &[end, parts])
}
