//! Lengths of shapes, as programs write them.

/// One length of a shape, as written in a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Axis {
    /// A number.
    Fixed(usize),
    /// A named dimension, by its position among the dimensions of the case.
    Named(usize),
    /// `-1`: the length that follows from the others in a reshape, or the existing length in an
    /// expansion.
    Open,
}
