//! The switches of fusion.

/// Which fusions are allowed; each can be switched off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fuse {
    /// Elementwise nodes join each other.
    pub elementwise: bool,
    /// Reductions join elementwise work before and after them.
    pub reductions: bool,
    /// Reductions join the work over the points that uses their results: softmax in one kernel.
    pub rows: bool,
    /// Elementwise work joins the matrix product, convolution, pooling or gather before it.
    pub epilogues: bool,
    /// Elementwise work after a product whose rows are several axes is over its rows (see
    /// [`fn@super::super::flatten_rows`]). Sums along all of these axes are along the rows, in
    /// another order.
    pub flatten_rows: bool,
    /// Independent kernels over one space that share an operand become one; on a CUDA device also a
    /// kernel and the last other one that reads the value in whose place it writes.
    pub siblings: bool,
    /// A value that several kernels use is computed and stored by the first of them, rather than by
    /// a kernel before.
    pub stored: bool,
    /// Values that are cheap to compute from tensors in memory are recomputed where they are used:
    /// by each of several kernels, and in the backward pass rather than kept live for it (see
    /// [`fn@super::super::rematerialize`]).
    pub recompute: bool,
    /// Several small kernels, such as an optimizer's updates, run by one launch of a CUDA device,
    /// without moving a byte of the plan.
    pub horizontal: bool,
}

impl Default for Fuse {
    fn default() -> Self {
        Fuse {
            elementwise: true,
            reductions: true,
            rows: true,
            epilogues: true,
            flatten_rows: true,
            siblings: true,
            stored: true,
            recompute: true,
            horizontal: true,
        }
    }
}

impl Fuse {
    /// Every node in a kernel of its own.
    pub fn none() -> Self {
        Fuse {
            elementwise: false,
            reductions: false,
            rows: false,
            epilogues: false,
            flatten_rows: false,
            siblings: false,
            stored: false,
            recompute: false,
            horizontal: false,
        }
    }
}
