//! Anchors that find positions or choose among elements.

use super::{Dims, Operand};
use crate::size::Size;

/// See [`Body::Nonzero`](super::Body::Nonzero). Writes its result itself: there is no `code`.
#[derive(Clone, Debug, PartialEq)]
pub struct Nonzero {
    /// The space of the mask.
    pub space: Dims,
    /// The mask, strides over `space` (truth values or u8).
    pub mask: Operand,
    /// The result: the positions, strides over `dims`, i32.
    pub positions: Operand,
}

/// See [`Body::Sort`](super::Body::Sort). Writes its result itself: there is no `code`.
#[derive(Clone, Debug, PartialEq)]
pub struct Sort {
    /// The largest first, rather than the smallest. NaN counts as largest; of equal elements the
    /// first comes first.
    pub descending: bool,
    /// The number of elements that are sorted; the last axis of `dims` is as many of them as are
    /// wanted, at most all.
    pub len: Size,
    /// The elements, strides over `dims` with `len` for the last axis (numbers).
    pub source: Operand,
    /// The result: the positions of the elements in their order, strides over `dims`, i32.
    pub positions: Operand,
}

/// See [`Body::NonMaxSuppression`](super::Body::NonMaxSuppression): a box is dropped if its intersection with a better one that is kept is
/// more than `threshold` of their union. Writes its result itself: there is no `code`.
#[derive(Clone, Debug, PartialEq)]
pub struct NonMaxSuppression {
    /// The largest intersection over union of two kept boxes.
    pub threshold: f32,
    /// Two corners of each box (x₀, y₀, x₁, y₁), strides over (box, 4), f32.
    pub boxes: Operand,
    /// The result: whether a box is kept, strides over `dims`, truth values.
    pub keep: Operand,
}
