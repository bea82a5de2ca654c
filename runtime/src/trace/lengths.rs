//! Lengths of a run as values: read from a tensor, used in computations, and used as lengths of
//! other tensors.

use std::panic::Location;

use slabwise_kernels::dtype::DType;
use slabwise_kernels::scalar::Value;
use slabwise_kernels::size::Size;
use slabwise_kernels::spec::Dims;
use smallvec::SmallVec;

use super::axes::AxisIndex;
use super::handle::Tensor;
use super::{Trace, resolve};
use crate::ops::{GraphBuilder, Op};
use crate::shape::{Computed, Dim, Shape, Symbols};

/// A size as a length: never negative, and largest at the bounds, for which a program is planned.
pub(super) fn length(symbols: &Symbols, size: Size) -> Result<Size, String> {
    let count = symbols.iter().count();
    if size.symbols().any(|s| usize::from(s.0) >= count) {
        return Err("a computed length is one of another trace".into());
    }
    let shown = || size.show(|s| symbols.name(s));
    let (scale, _) = size.parts();
    let (least, most) = symbols.range_of(size);
    if scale < 0 {
        return Err(format!(
            "the length {} falls where the length in it grows, so that it has no plan at a bound",
            shown()
        ));
    }
    if least < 0 {
        return Err(match size.as_fixed() {
            Some(n) => format!("the length {n} is negative"),
            None => format!(
                "the length {} may be negative: it is from {least} to {most}",
                shown()
            ),
        });
    }
    Ok(size)
}

impl Trace {
    /// A length of a run as a scalar (i32), such as that of a bounded axis.
    ///
    /// ```
    /// # use slabwise::prelude::*;
    /// # let trace = Trace::inference();
    /// let x = trace.input("x", F32, (Dim::bounded("length", 64), 8));
    /// let mean = x.sum_over(0) / trace.length(x.dim(0)).cast(F32);
    /// # assert_eq!(format!("{mean:?}"), "f32 [8]");
    /// ```
    #[track_caller]
    pub fn length(&self, dim: impl Into<Dim>) -> Tensor<'_> {
        let dim = dim.into();
        self.record(Location::caller(), &[], |g, _| {
            // A number may be any, a length is not negative.
            let size = match dim {
                Dim::Fixed(n) => Size::fixed(n),
                Dim::Computed(size) => size,
                dim => resolve(&mut g.symbols, &Shape::from((dim,)))
                    .map_err(|why| format!("length: {why}"))?[0],
            };
            let op = match size.as_fixed().map(i32::try_from) {
                Some(Ok(n)) => Op::Const(Value::I32(n)),
                Some(Err(_)) => return Err("length: the number does not fit 32 bits".into()),
                None => Op::Size(size),
            };
            Ok(g.emit(op, &[], DType::I32, Dims::new()))
        })
    }

    /// The sum of two lengths, such as those of the past and of the new tokens of a text.
    ///
    /// ```
    /// # use slabwise::prelude::*;
    /// # let trace = Trace::inference();
    /// let all = trace.sum_of_lengths(Dim::bounded("past", 60), Dim::bounded("new", 4));
    /// let mask = trace.input("mask", F32, (1, all));
    /// # assert_eq!(format!("{mask:?}"), "f32 [1, (past+new)]");
    /// ```
    #[track_caller]
    pub fn sum_of_lengths(&self, a: impl Into<Dim>, b: impl Into<Dim>) -> Dim {
        self.joint_length(a.into(), b.into(), Computed::Sum)
    }

    /// The product of two lengths, such as those of axes that are joined.
    #[track_caller]
    pub fn product_of_lengths(&self, a: impl Into<Dim>, b: impl Into<Dim>) -> Dim {
        self.joint_length(a.into(), b.into(), Computed::Product)
    }

    #[track_caller]
    fn joint_length(&self, a: Dim, b: Dim, formula: fn(Size, Size) -> Computed) -> Dim {
        let mut joint = Size::ZERO;
        self.record(Location::caller(), &[], |g, _| {
            let parts = resolve(&mut g.symbols, &Shape::from((a, b)))?;
            joint = g.symbols.computed(formula(parts[0], parts[1]))?;
            Ok(g.emit(Op::Const(Value::I32(0)), &[], DType::I32, Dims::new()))
        });
        joint.as_fixed().map_or(Dim::Computed(joint), Dim::Fixed)
    }

    /// A size that is computed from others; the reason where it has no plan at a bound.
    ///
    /// # Errors
    /// Terms that decrease when a length grows, and more lengths than a program may have.
    pub fn computed_size(&self, formula: Computed) -> Result<Size, String> {
        self.with_graph_mut(|g| g.symbols.computed(formula))
    }

    /// a − b, if it can be expressed as a size, such as the rest of a sum of lengths without one of
    /// them.
    pub fn difference_of_sizes(&self, a: Size, b: Size) -> Option<Size> {
        self.with_graph(|g| g.symbols.difference(a, b))
    }

    /// a / b, if it is exact, such as a product of lengths without one of them.
    pub fn quotient_of_sizes(&self, a: Size, b: Size) -> Option<Size> {
        self.with_graph(|g| g.symbols.quotient(a, b))
    }

    /// Whether one size is at most the other in every run, as far as their forms show it.
    pub fn is_at_most(&self, a: Size, b: Size) -> bool {
        self.with_graph(|g| g.symbols.is_at_most(a, b))
    }

    /// The least and the most that a size can be in a run of this trace.
    pub fn range_of(&self, size: Size) -> (i64, i64) {
        self.with_graph(|g| g.symbols.range_of(size))
    }

    /// A size as text, with the names of this trace's dimensions.
    pub fn show_size(&self, size: Size) -> String {
        self.with_graph(|g| size.show(|s| g.symbols.name(s)))
    }
}

impl<'t> Tensor<'t> {
    /// The length of an axis, for the shape of another tensor of the trace; 0 if there is no such
    /// axis.
    ///
    /// ```
    /// # use slabwise::prelude::*;
    /// # let trace = Trace::inference();
    /// let x = trace.input("x", F32, (Dim::bounded("batch", 8), Dim::bounded("length", 64), 12));
    /// let heads = x.reshape((x.dim(0), x.dim(1), 3, 4));
    /// assert_eq!(format!("{heads:?}"), "f32 [batch, length, 3, 4]");
    /// ```
    pub fn dim(self, axis: impl AxisIndex) -> Dim {
        let axis = axis.index(self.rank());
        let size = self.dims().get(axis).copied().unwrap_or(Size::ZERO);
        size.as_fixed().map_or(Dim::Computed(size), Dim::Fixed)
    }

    /// The lengths of all axes, for the shape of another tensor of the trace.
    pub fn shape(self) -> Shape {
        Shape((0..self.rank()).map(|axis| self.dim(axis)).collect())
    }

    /// The part of an axis that begins at `start` and has `length` elements. Both may be lengths
    /// of the run if the part exists in every run.
    #[track_caller]
    pub fn narrow(
        self,
        axis: impl AxisIndex,
        start: impl Into<Dim>,
        length: impl Into<Dim>,
    ) -> Tensor<'t> {
        let axis = axis.index(self.rank());
        let part = Shape::from((start, length));
        self.trace.record(Location::caller(), &[self], |g, ids| {
            let x = ids[0];
            let part = resolve(&mut g.symbols, &part).map_err(|why| format!("narrow: {why}"))?;
            let (start, count) = (part[0], part[1]);
            let (dtype, mut dims) = (g.dtype(x), g.dims(x).clone());
            let Some(&whole) = dims.get(axis) else {
                return Err(format!(
                    "narrow: {} has no axis {}",
                    g.symbols.show(&dims),
                    axis.cast_signed()
                ));
            };
            let symbols = &g.symbols;
            if !symbols.has_part(whole, start, count) {
                let show = |size: Size| size.show(|s| symbols.name(s));
                return Err(format!(
                    "narrow of axis {axis} of {} to {} from {} on: that part does not exist at \
                     every length",
                    symbols.show(&dims),
                    show(count),
                    show(start)
                ));
            }
            if count == whole {
                return Ok(x);
            }
            let mut starts: Dims = SmallVec::from_elem(Size::ZERO, dims.len());
            let step = SmallVec::from_elem(1, dims.len());
            (starts[axis], dims[axis]) = (start, count);
            let op = Op::Slice {
                start: starts,
                step,
            };
            Ok(g.emit(op, &[x], dtype, dims))
        })
    }

    /// This tensor padded with `value` at the end of an axis to a given length.
    #[track_caller]
    pub fn pad_to(self, axis: impl AxisIndex, length: impl Into<Dim>, value: f32) -> Tensor<'t> {
        let axis = axis.index(self.rank());
        let length = Shape::from((length,));
        self.trace.record(Location::caller(), &[self], |g, ids| {
            let x = ids[0];
            let length =
                resolve(&mut g.symbols, &length).map_err(|why| format!("pad_to: {why}"))?;
            let (dtype, mut dims) = (g.dtype(x), g.dims(x).clone());
            let value =
                super::operand::number(value, dtype).map_err(|why| format!("pad_to: {why}"))?;
            let symbols = &g.symbols;
            let Some(&own) = dims.get(axis) else {
                return Err(format!(
                    "pad_to: {} has no axis {}",
                    symbols.show(&dims),
                    axis.cast_signed()
                ));
            };
            if !symbols.is_at_most(own, length[0]) {
                return Err(format!(
                    "pad_to: axis {axis} of {} may be longer than {}",
                    symbols.show(&dims),
                    length[0].show(|s| symbols.name(s))
                ));
            }
            if own == length[0] {
                return Ok(x);
            }
            dims[axis] = length[0];
            let start = SmallVec::from_elem(Size::ZERO, dims.len());
            let step = SmallVec::from_elem(1, dims.len());
            Ok(g.emit(Op::Pad { start, step, value }, ids, dtype, dims))
        })
    }
}
