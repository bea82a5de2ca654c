//! Convolutions and both their gradients as products (implicit GEMM): patches of an image are never
//! written to memory; the tiles of the image operand are gathered where they are needed.
//!
//! Channels of the result are rows and positions are columns, because positions are neighbours in
//! memory (the product is transposed where they are not). The gradient of the image is itself a
//! convolution of the result's gradient for each residue of the position by the stride: every
//! residue has its own kernel elements, so that none is multiplied by a zero in between (Dumoulin
//! and Visin, *A guide to convolution arithmetic*, 2016, call these the zeros of a fractional
//! stride).

pub(crate) mod library;

use slabwise_kernels::size::{Env, Size};
use slabwise_kernels::spec::{Conv2d, ConvKind, Operand, Spec, SpecError};

use crate::gemm::problem::{
    Axis, Count, Matrix, Problem, Reach, Window, greatest_common_divisor, product,
};
use crate::gemm::tiles::Kernel;

/// Most kernel elements of a window that one thread sums.
const WINDOW: i64 = 64;
/// Most output channels per input channel for such a window.
const MULTIPLIER: i64 = 4;
/// Bytes of a vector of neighbouring elements.
const VECTOR_BYTES: i64 = 16;

/// The problems that together compute the result, and the kernels that compute them directly, if
/// there are any.
pub fn problems(
    spec: &Spec,
    body: &Conv2d,
    bounds: &Env,
) -> Result<(Vec<Problem>, Option<Vec<Kernel>>), SpecError> {
    if body.prologue.is_some() {
        return Err(SpecError::unsupported(
            "a convolution with a prologue, which CUDA has no kernel for",
        ));
    }
    let conv = Conv::new(spec, body, bounds)?;
    let problems = match body.kind {
        ConvKind::Forward => vec![conv.forward()?],
        ConvKind::InputGrad if conv.is_patches() => vec![conv.patches()?],
        ConvKind::InputGrad => conv.input_grad()?,
        ConvKind::WeightGrad => vec![conv.weight_grad()?],
    };
    let problems: Vec<Problem> = problems.into_iter().map(|p| p.oriented(spec)).collect();
    let direct = problems.iter().map(window).collect();
    Ok((problems, direct))
}

/// A convolution whose kernel has one element, as one product over all images, and as one product
/// for each image. For a gradient of the weight, which is the sum of these, the contracted side
/// then has one axis less. `None` where positions of the image and of the result differ.
pub fn pointwise(spec: &Spec, body: &Conv2d, bounds: &Env) -> Option<[Problem; 2]> {
    let Conv2d {
        kind,
        k,
        stride,
        pad,
        hw,
        ohw,
        ..
    } = body;
    if body.prologue.is_some() || [*k, *stride] != [[1; 2]; 2] || *pad != [0; 2] || hw != ohw {
        return None;
    }
    let conv = Conv::new(spec, body, bounds).ok()?;
    let mut whole = match kind {
        ConvKind::Forward => conv.forward().ok()?,
        ConvKind::InputGrad => conv.input_grad().ok()?.pop()?,
        ConvKind::WeightGrad => conv.weight_grad().ok()?,
    };
    for matrix in [&mut whole.left, &mut whole.right] {
        // All positions are inside the image.
        matrix.window = None;
        matrix.offset.truncate(1);
    }
    let mut apart = whole.clone();
    if *kind == ConvKind::WeightGrad {
        apart.deep.remove(0);
        apart.batch.insert(0, Axis::whole(body.n, 0));
        for matrix in [&mut apart.left, &mut apart.right] {
            matrix.batch.insert(0, matrix.deep.remove(0));
        }
    } else {
        apart.batch.insert(0, apart.columns.remove(0));
        apart.left.batch.insert(0, Size::ZERO);
        apart.right.batch.insert(0, apart.right.free.remove(0));
    }
    Some([whole, apart])
}

/// The kernel for a problem that sums over the few elements of a window and not over channels.
fn window(problem: &Problem) -> Option<Kernel> {
    let transposed = problem.left.window.is_some();
    let (image, channels) = if transposed {
        (&problem.left, &problem.columns)
    } else {
        (&problem.right, &problem.rows)
    };
    let [_, height, width] = problem.deep[..] else {
        return None;
    };
    let (deep, height, width) = (problem.deep[0].known()?, height.known()?, width.known()?);
    let multiplier = channels
        .iter()
        .try_fold(1, |p: i64, a| p.checked_mul(a.count.known()?))?;
    (image.window.is_some_and(|w| w.deep.axis == 1)
        && deep == 1
        && height * width <= WINDOW
        && multiplier <= MULTIPLIER
        && !problem.batch.is_empty())
    .then_some(Kernel::Window {
        window: [height, width],
        transposed,
    })
}

/// A convolution whose numbers have been validated.
struct Conv<'a> {
    body: &'a Conv2d,
    /// Channels of a group of the image and of the result.
    per_group: [Size; 2],
}

/// The order of the axes along one side of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    /// Channels, rows, columns.
    ChannelsFirst,
    /// Rows, columns, channels.
    ChannelsLast,
}

impl Order {
    /// The axes of channels, rows and columns in this order.
    fn of<T>(self, [channels, rows, columns]: [T; 3]) -> Vec<T> {
        match self {
            Order::ChannelsFirst => vec![channels, rows, columns],
            Order::ChannelsLast => vec![rows, columns, channels],
        }
    }

    /// The number of the axis of rows.
    fn rows(self) -> usize {
        usize::from(self == Order::ChannelsFirst)
    }
}

/// The kernel elements that positions of one residue use along one axis, and the positions of the
/// result that they reach.
struct Phase {
    /// The first position, and their number.
    position: i64,
    positions: Count,
    /// The first kernel element, the step to the next, and their number.
    element: i64,
    element_step: i64,
    elements: i64,
    /// The result's position reached from the first position through the first element, and its
    /// change per element.
    from: i64,
    step: i64,
}

impl<'a> Conv<'a> {
    fn new(spec: &Spec, body: &'a Conv2d, bounds: &Env) -> Result<Conv<'a>, SpecError> {
        let fail = |what: String| Err(SpecError::unsupported(what));
        if spec.dims.len() != 4 || body.a.strides.len() != 4 || body.b.strides.len() != 4 {
            return fail("a convolution has four axes".into());
        }
        let small = body
            .k
            .iter()
            .chain(&body.stride)
            .chain(&body.dilation)
            .all(|&x| x > 0 && x <= 1 << 16);
        if !small
            || body.groups == 0
            || body.groups > 1 << 30
            || body.pad.iter().any(|&p| p > 1 << 16)
        {
            let Conv2d {
                k,
                stride,
                dilation,
                pad,
                groups,
                ..
            } = body;
            return fail(format!(
                "kernel {k:?}, stride {stride:?}, dilation {dilation:?}, pad {pad:?}, groups {groups}"
            ));
        }
        let groups = body.groups as i64;
        let of = |name: &str, channels: Size| {
            let what = || {
                SpecError::unsupported(format!(
                    "{} {name} channels in {groups} groups",
                    channels.at(bounds)
                ))
            };
            channels.checked_div(groups).ok_or_else(what)
        };
        let per_group = [of("input", body.ci)?, of("output", body.co)?];
        let dims = match body.kind {
            ConvKind::Forward => [body.n, body.co, body.ohw[0], body.ohw[1]],
            ConvKind::InputGrad => [body.n, body.ci, body.hw[0], body.hw[1]],
            ConvKind::WeightGrad => [
                body.co,
                per_group[0],
                Size::fixed(body.k[0] as i64),
                Size::fixed(body.k[1] as i64),
            ],
        };
        if spec.dims[..] != dims {
            return fail(format!(
                "a {:?} convolution over {:?}",
                body.kind, spec.dims
            ));
        }
        Ok(Conv { body, per_group })
    }

    fn numbers(&self) -> [[i64; 2]; 4] {
        [
            self.body.k,
            self.body.stride,
            self.body.pad,
            self.body.dilation,
        ]
        .map(|pair| pair.map(|n| n as i64))
    }

    /// The axis of groups, each of which shifts coordinate `dim` by so many channels.
    fn groups(&self, dim: usize, channels: Size) -> Vec<Axis> {
        match self.body.groups {
            1 => vec![],
            n => vec![Axis {
                count: Count::fixed(n as i64),
                dim,
                from: 0,
                step: channels,
            }],
        }
    }

    /// An operand with stride `channel` per channel; a group has `channels` of them.
    fn matrix(
        &self,
        argument: u16,
        operand: &Operand,
        channel: Size,
        channels: Size,
    ) -> Result<Matrix, SpecError> {
        let batch = if self.body.groups == 1 {
            vec![]
        } else {
            vec![product(channel, channels)?]
        };
        Ok(Matrix {
            batch,
            ..Matrix::of(argument, operand)
        })
    }

    /// The order of the axes of channels, rows and columns of a side of the image, which has so many
    /// channels: channels are innermost where they form whole vectors.
    fn order(&self, image: &Operand, channels: Size) -> Order {
        let vector = VECTOR_BYTES / image.dtype.bytes() as i64;
        let is_whole = |size: &Size| size.checked_div(vector).is_some();
        let [n, channel, rows, columns] = &image.strides[..] else {
            return Order::ChannelsFirst;
        };
        if channel.is(1)
            && [n, rows, columns, &image.offset, &channels]
                .into_iter()
                .all(is_whole)
        {
            Order::ChannelsLast
        } else {
            Order::ChannelsFirst
        }
    }

    fn forward(&self) -> Result<Problem, SpecError> {
        let Conv2d {
            a, b, n, hw, ohw, ..
        } = self.body;
        let [k, stride, pad, dilation] = self.numbers();
        let [ci, co] = self.per_group;
        let order = self.order(a, ci);
        let mut left = self.matrix(1, b, b.strides[0], co)?;
        left.free = vec![b.strides[0]];
        left.deep = order.of([b.strides[1], b.strides[2], b.strides[3]]);
        let mut right = self.matrix(0, a, a.strides[1], ci)?;
        right.free = vec![
            a.strides[0],
            times(a.strides[2], stride[0])?,
            times(a.strides[3], stride[1])?,
        ];
        right.deep = order.of([
            a.strides[1],
            times(a.strides[2], dilation[0])?,
            times(a.strides[3], dilation[1])?,
        ]);
        right
            .offset
            .extend([times(a.strides[2], -pad[0])?, times(a.strides[3], -pad[1])?]);
        let free = Reach {
            axis: 1,
            from: pad.map(|p| -p),
            step: stride,
        };
        right.window = Some(Window {
            limits: *hw,
            free,
            deep: Reach {
                axis: order.rows(),
                from: [0; 2],
                step: dilation,
            },
        });
        Ok(Problem {
            batch: self.groups(1, co),
            rows: vec![Axis::whole(co, 1)],
            columns: vec![
                Axis::whole(*n, 0),
                Axis::whole(ohw[0], 2),
                Axis::whole(ohw[1], 3),
            ],
            deep: order.of([ci.into(), Count::fixed(k[0]), Count::fixed(k[1])]),
            left,
            right,
        })
    }

    fn weight_grad(&self) -> Result<Problem, SpecError> {
        let Conv2d {
            a, b, n, hw, ohw, ..
        } = self.body;
        let [k, stride, pad, dilation] = self.numbers();
        let [ci, co] = self.per_group;
        let order = self.order(a, ci);
        let mut left = self.matrix(1, b, b.strides[1], co)?;
        left.free = vec![b.strides[1]];
        left.deep = vec![b.strides[0], b.strides[2], b.strides[3]];
        let mut right = self.matrix(0, a, a.strides[1], ci)?;
        right.free = order.of([
            a.strides[1],
            times(a.strides[2], dilation[0])?,
            times(a.strides[3], dilation[1])?,
        ]);
        right.deep = vec![
            a.strides[0],
            times(a.strides[2], stride[0])?,
            times(a.strides[3], stride[1])?,
        ];
        right
            .offset
            .extend([times(a.strides[2], -pad[0])?, times(a.strides[3], -pad[1])?]);
        let deep = Reach {
            axis: 1,
            from: pad.map(|p| -p),
            step: stride,
        };
        right.window = Some(Window {
            limits: *hw,
            free: Reach {
                axis: order.rows(),
                from: [0; 2],
                step: dilation,
            },
            deep,
        });
        Ok(Problem {
            batch: self.groups(0, co),
            rows: vec![Axis::whole(co, 0)],
            columns: order.of([
                Axis::whole(ci, 1),
                Axis::whole(Count::fixed(k[0]), 2),
                Axis::whole(Count::fixed(k[1]), 3),
            ]),
            deep: vec![(*n).into(), ohw[0].into(), ohw[1].into()],
            left,
            right,
        })
    }

    /// The residues along axis `i`.
    fn phases(&self, i: usize) -> Vec<Phase> {
        let [k, stride, pad, dilation] = self.numbers().map(|pair| pair[i]);
        let common = greatest_common_divisor(stride, dilation);
        let element_step = stride / common;
        let phase = |position: i64| {
            let meets =
                (0..element_step.min(k)).find(|e| (position + pad - e * dilation) % stride == 0);
            let element = meets.unwrap_or(0);
            Phase {
                position,
                positions: Count {
                    size: self.body.hw[i],
                    add: stride - 1 - position,
                    div: stride,
                },
                element,
                element_step,
                elements: meets.map_or(0, |e| (k - e + element_step - 1) / element_step),
                from: (position + pad - element * dilation).div_euclid(stride),
                step: -dilation / common,
            }
        };
        (0..stride)
            .filter(|&p| self.body.hw[i].as_fixed().is_none_or(|n| p < n))
            .map(phase)
            .collect()
    }

    fn input_grad(&self) -> Result<Vec<Problem>, SpecError> {
        let Conv2d {
            a,
            b,
            n,
            ohw,
            stride,
            ..
        } = self.body;
        let [ci, co] = self.per_group;
        let order = self.order(a, co);
        let mut problems = Vec::new();
        let (high, wide) = (self.phases(0), self.phases(1));
        for (y, x) in high.iter().flat_map(|y| wide.iter().map(move |x| (y, x))) {
            let mut left = self.matrix(1, b, b.strides[0], co)?;
            left.free = vec![b.strides[1]];
            left.deep = order.of([
                b.strides[0],
                times(b.strides[2], y.element_step)?,
                times(b.strides[3], x.element_step)?,
            ]);
            left.offset.extend([
                times(b.strides[2], y.element)?,
                times(b.strides[3], x.element)?,
            ]);
            let mut right = self.matrix(0, a, a.strides[1], co)?;
            right.free = vec![a.strides[0], a.strides[2], a.strides[3]];
            right.deep = order.of([
                a.strides[1],
                times(a.strides[2], y.step)?,
                times(a.strides[3], x.step)?,
            ]);
            right
                .offset
                .extend([times(a.strides[2], y.from)?, times(a.strides[3], x.from)?]);
            let free = Reach {
                axis: 1,
                from: [y.from, x.from],
                step: [1; 2],
            };
            right.window = Some(Window {
                limits: *ohw,
                free,
                deep: Reach {
                    axis: order.rows(),
                    from: [0; 2],
                    step: [y.step, x.step],
                },
            });
            let axis = |i: usize, phase: &Phase| {
                let step = Size::fixed(stride[i] as i64);
                Axis {
                    count: phase.positions,
                    dim: 2 + i,
                    from: phase.position,
                    step,
                }
            };
            problems.push(Problem {
                batch: self.groups(1, ci),
                rows: vec![Axis::whole(ci, 1)],
                columns: vec![Axis::whole(*n, 0), axis(0, y), axis(1, x)],
                deep: order.of([
                    co.into(),
                    Count::fixed(y.elements),
                    Count::fixed(x.elements),
                ]),
                left,
                right,
            });
        }
        Ok(problems)
    }

    /// Whether the image is partitioned into patches of the kernel's size, one per position of the
    /// result.
    fn is_patches(&self) -> bool {
        let [k, stride, pad, dilation] = self.numbers();
        let covered = |i: usize| {
            self.body.ohw[i].checked_mul(Size::fixed(stride[i])) == Some(self.body.hw[i])
        };
        k == stride
            && pad == [0; 2]
            && dilation == [1; 2]
            && k != [1; 2]
            && covered(0)
            && covered(1)
    }

    /// The gradient of an image that is partitioned into patches: every kernel element is a row,
    /// and one product computes the whole image.
    fn patches(&self) -> Result<Problem, SpecError> {
        let Conv2d { a, b, n, ohw, .. } = self.body;
        let [k, ..] = self.numbers();
        let [ci, co] = self.per_group;
        let mut left = self.matrix(1, b, b.strides[0], co)?;
        left.free = b.strides[1..].to_vec();
        left.deep = vec![b.strides[0]];
        let mut right = self.matrix(0, a, a.strides[1], co)?;
        right.free = vec![a.strides[0], a.strides[2], a.strides[3]];
        right.deep = vec![a.strides[1]];
        let position = |i: usize| Axis {
            count: ohw[i].into(),
            dim: 2 + i,
            from: 0,
            step: Size::fixed(k[i]),
        };
        Ok(Problem {
            batch: self.groups(1, ci),
            rows: vec![
                Axis::whole(ci, 1),
                Axis::whole(Count::fixed(k[0]), 2),
                Axis::whole(Count::fixed(k[1]), 3),
            ],
            columns: vec![Axis::whole(*n, 0), position(0), position(1)],
            deep: vec![co.into()],
            left,
            right,
        })
    }
}

fn times(stride: Size, n: i64) -> Result<Size, SpecError> {
    product(stride, Size::fixed(n))
}
