//! The handle of a value that is being traced. The operations are methods in
//! [`tensor`](crate::tensor).

use std::fmt;

use slabwise_kernels::dtype::DType;
use slabwise_kernels::spec::Dims;

use super::Trace;
use super::axes::AxisIndex;
use crate::ops::{GraphBuilder, NodeId};

/// The id of a poisoned tensor, which a call with a mistake returns.
pub(crate) const POISON: NodeId = NodeId(u32::MAX);

/// A value of a program that is being traced: a small handle, free to copy.
#[derive(Clone, Copy)]
pub struct Tensor<'t> {
    pub(crate) trace: &'t Trace,
    pub(crate) id: NodeId,
}

impl<'t> Tensor<'t> {
    /// The trace it belongs to.
    pub fn trace(self) -> &'t Trace {
        self.trace
    }

    /// The element type; f32 after a mistake.
    pub fn dtype(self) -> DType {
        if self.is_poisoned() {
            DType::F32
        } else {
            self.trace.with_graph(|g| g.dtype(self.id))
        }
    }

    /// The number of axes; 0 after a mistake.
    pub fn rank(self) -> usize {
        self.dims().len()
    }

    /// The length of an axis, if it exists and is fixed.
    pub fn len(self, axis: impl AxisIndex) -> Option<usize> {
        let axis = axis.index(self.rank());
        self.dims()
            .get(axis)
            .and_then(|d| d.as_fixed())
            .and_then(|n| usize::try_from(n).ok())
    }

    pub(crate) fn is_poisoned(self) -> bool {
        self.id == POISON
    }

    pub(crate) fn dims(self) -> Dims {
        if self.is_poisoned() {
            Dims::new()
        } else {
            self.trace.with_graph(|g| g.dims(self.id).clone())
        }
    }
}

impl fmt::Debug for Tensor<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_poisoned() {
            return f.write_str("(mistaken)");
        }
        self.trace.with_graph(|g| {
            write!(
                f,
                "{} {}",
                g.dtype(self.id),
                g.symbols.show(g.dims(self.id))
            )
        })
    }
}
