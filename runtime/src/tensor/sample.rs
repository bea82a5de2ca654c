//! Sampling of images at coordinates that are themselves tensors: spatial transformers (Jaderberg et
//! al. 2015).

use std::panic::Location;

use slabwise_kernels::dtype::DType::{F32, I32};
use slabwise_kernels::size::Size;
use slabwise_kernels::spec::Dims;

use super::arrange::ramp;
use super::resize::{keys_far, keys_near};
use super::{Tensor, checked};
use crate::graph::Graph;
use crate::ops::{GraphBuilder, NodeId, Op};

/// The interpolation of a sample: the elements that it is computed from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sampling {
    /// The nearest element, halves to even.
    Nearest,
    /// Bilinear, from the four elements around the position.
    Bilinear,
    /// Bicubic, from the sixteen elements around the position, with a = −¾ (Keys 1981).
    Bicubic,
}

/// The padding mode: the values of an image beyond its edges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Beyond {
    /// Zeros.
    Zeros,
    /// The nearest element at the edge.
    Border,
    /// The image mirrored at its edges, or at the centres of the elements there if corners are
    /// aligned.
    Reflection,
}

impl<'t> Tensor<'t> {
    /// An image `[n, channels, h, w]` of fixed height and width, sampled at the positions
    /// `[n, oh, ow, 2]` of a grid: columns, then rows, both in −1..=1 from edge to edge (with
    /// `align_corners` between the centres of the first and last elements). The gradient flows to
    /// the image and to the grid. A position that is NaN counts as −1, as in PyTorch.
    #[track_caller]
    pub fn grid_sample(
        self,
        grid: Tensor<'t>,
        sampling: Sampling,
        beyond: Beyond,
        align_corners: bool,
    ) -> Tensor<'t> {
        let at = Location::caller();
        let mut lengths = [0.0; 2];
        let image = self.trace.record(at, &[self, grid], |g, ids| {
            lengths = grid_fits(g, ids[0], ids[1])?;
            Ok(ids[0])
        });
        if image.is_poisoned() {
            return image;
        }
        self.trace.on_behalf(at, || {
            let place = |axis: usize| {
                // Columns come first.
                let n = lengths[axis];
                let x = grid.slice(3, 1 - axis..=1 - axis).squeeze(3);
                let x = x.is_nan().select(-1.0, x);
                if align_corners {
                    (x + 1.0) * ((n - 1.0) * 0.5)
                } else {
                    ((x + 1.0) * n - 1.0) * 0.5
                }
            };
            let inside =
                |x: Tensor<'t>, axis: usize| beyond.inside(x, lengths[axis], align_corners);
            let [y, x] = [place(0), place(1)];
            let read = |y: Tensor<'t>, x: Tensor<'t>| image.read_at(y, x, lengths, beyond);
            match sampling {
                Sampling::Nearest => read(inside(y, 0).round(), inside(x, 1).round()),
                Sampling::Bilinear => {
                    let [y, x] = [inside(y, 0), inside(x, 1)];
                    let [top, left] = [y.floor(), x.floor()];
                    let [down, right] = [y - top, x - left].map(|t| t.unsqueeze(1));
                    let [upper, lower] = [0.0, 1.0].map(|row| {
                        let [a, b] = [0.0, 1.0].map(|column| read(top + row, left + column));
                        a * (1.0 - right) + b * right
                    });
                    upper * (1.0 - down) + lower * down
                }
                Sampling::Bicubic => {
                    let [top, left] = [y.floor(), x.floor()];
                    let of_rows = cubic((y - top).unsqueeze(1));
                    let of_columns = cubic((x - left).unsqueeze(1));
                    let rows = [-1.0, 0.0, 1.0, 2.0].map(|row| {
                        let y = inside(top + row, 0);
                        let elements =
                            [-1.0, 0.0, 1.0, 2.0].map(|column| read(y, inside(left + column, 1)));
                        sum(elements, of_columns)
                    });
                    sum(rows, of_rows)
                }
            }
        })
    }

    /// The elements at rows and columns `[n, oh, ow]`, f32 integers: `[n, channels, oh, ow]`.
    fn read_at(
        self,
        y: Tensor<'t>,
        x: Tensor<'t>,
        lengths: [f32; 2],
        beyond: Beyond,
    ) -> Tensor<'t> {
        let [h, w] = lengths;
        let clamped = |x: Tensor<'t>, n: f32| x.clamp(0.0, n - 1.0).cast(I32);
        let index = clamped(y, h) * (w as i32) + clamped(x, w);
        let value = self
            .trace
            .record(Location::caller(), &[self, index], |g, ids| {
                let (image, of_index) = (g.dims(ids[0]).clone(), g.dims(ids[1]).clone());
                let [n, c, h, w] = image[..] else {
                    return Err("grid_sample of no image".into());
                };
                let [_, oh, ow] = of_index[..] else {
                    return Err("grid_sample by no grid".into());
                };
                let places = |a: Size, b: Size| {
                    a.checked_mul(b)
                        .ok_or("grid_sample: the number of places has no form as one size")
                };
                let (from, to) = (places(h, w)?, places(oh, ow)?);
                let flat = g.reshape(ids[0], &Dims::from_slice(&[n, c, from]));
                let index = g.reshape(ids[1], &Dims::from_slice(&[n, Size::ONE, to]));
                let index = g.broadcast(index, &Dims::from_slice(&[n, c, to]));
                let read = checked(g, Op::Gather { axis: 2 }, &[flat, index])?;
                Ok(g.reshape(read, &Dims::from_slice(&[n, c, oh, ow])))
            });
        if beyond != Beyond::Zeros {
            return value;
        }
        let inside = |x: Tensor<'t>, n: f32| x.ge(0.0).and(x.le(n - 1.0));
        let inside = inside(y, h).and(inside(x, w)).unsqueeze(1);
        inside.select(value, 0.0)
    }

    /// The grid of an affine map, for [`Tensor::grid_sample`]: a matrix `[n, 2, 3]` gives `[n, h, w,
    /// 2]`, the images of the positions (column, row, 1).
    #[track_caller]
    pub fn affine_grid(self, size: [usize; 2], align_corners: bool) -> Tensor<'t> {
        let at = Location::caller();
        let theta = self.require(at, |g, x| match g.dims(x).as_slice() {
            [_, two, three] if two.is(2) && three.is(3) && g.dtype(x) == F32 => Ok(()),
            dims => Err(format!(
                "affine_grid of {} {}: matrices [n, 2, 3] of f32 are needed",
                g.dtype(x),
                g.symbols.show(dims)
            )),
        });
        if theta.is_poisoned() {
            return theta;
        }
        self.trace.on_behalf(at, || {
            // −1..=1 from edge to edge, or between the centres of the first and last elements.
            let line = |n: usize| {
                let i = self.trace.record(at, &[], |g, _| {
                    let n = i64::try_from(n).map_err(|_| "affine_grid: too many places")?;
                    let places = ramp(g, Size::fixed(n));
                    Ok(g.cast(places, F32))
                });
                if align_corners {
                    let steps = n.saturating_sub(1).max(1) as f32;
                    let first = if n > 1 { -1.0 } else { 0.0 };
                    i * 2.0 / steps + first
                } else {
                    (i * 2.0 + 1.0) / n.max(1) as f32 - 1.0
                }
            };
            let (y, x) = (line(size[0]).unsqueeze(1), line(size[1]));
            let row = |axis: usize| {
                // [n, 1, 1] for places [h, w].
                let of = |k: usize| theta.slice(1, axis..=axis).slice(2, k..=k);
                of(0) * x + of(1) * y + of(2)
            };
            self.trace.stack(&[row(0), row(1)], 3)
        })
    }
}

impl Beyond {
    /// A coordinate mapped back into the image, unless the padding is zeros.
    fn inside<'t>(self, x: Tensor<'t>, n: f32, align_corners: bool) -> Tensor<'t> {
        match self {
            Beyond::Zeros => x,
            Beyond::Border => x.clamp(0.0, n - 1.0),
            Beyond::Reflection => {
                let (low, span) = if align_corners {
                    (0.0, n - 1.0)
                } else {
                    (-0.5, n)
                };
                if span == 0.0 {
                    return x * 0.0;
                }
                // A walk back and forth of period 2·span.
                let from = (x - low).abs();
                let rest = from.fmod(2.0 * span);
                let back = span - (rest - span).abs();
                (back + low).clamp(0.0, n - 1.0)
            }
        }
    }
}

/// The lengths of the image, if the grid fits it.
fn grid_fits(g: &Graph, image: NodeId, grid: NodeId) -> Result<[f32; 2], String> {
    let (x, y) = (g.dims(image), g.dims(grid));
    let lengths = match (x.as_slice(), y.as_slice()) {
        ([n, _, h, w], [m, _, _, two]) if n == m && two.is(2) => h.as_fixed().zip(w.as_fixed()),
        _ => None,
    };
    let floats = g.dtype(image) == F32 && g.dtype(grid) == F32;
    // Positions are i32, coordinates f32.
    let countable = |&(h, w): &(i64, i64)| (1..1 << 24).contains(&h) && (1..1 << 24).contains(&w);
    let numbered = |&(h, w): &(i64, i64)| h * w < 1 << 31;
    match lengths.filter(countable).filter(numbered) {
        Some((h, w)) if floats => Ok([h as f32, w as f32]),
        _ => Err(format!(
            "grid_sample of {} {} by {} {}: an image [n, channels, h, w] of fixed height and width \
             and a grid [n, oh, ow, 2], both f32, are needed",
            g.dtype(image),
            g.symbols.show(x),
            g.dtype(grid),
            g.symbols.show(y)
        )),
    }
}

/// The weights of the four neighbours of a position that is t after the second.
fn cubic(t: Tensor<'_>) -> [Tensor<'_>; 4] {
    const A: f32 = -0.75;
    [
        keys_far(t + 1.0, A),
        keys_near(t, A),
        keys_near(1.0 - t, A),
        keys_far(2.0 - t, A),
    ]
}

fn sum<'t>(elements: [Tensor<'t>; 4], weights: [Tensor<'t>; 4]) -> Tensor<'t> {
    let [a, b, c, d] = elements;
    a * weights[0] + b * weights[1] + c * weights[2] + d * weights[3]
}
