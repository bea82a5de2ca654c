//! Segments that the backward pass recomputes, and values that are never recomputed.

use super::Trace;
use crate::ops::NodeId;

impl Trace {
    /// Records the nodes of `work` as a segment, which the backward pass recomputes. A segment
    /// inside of another is part of that one.
    pub(crate) fn segment<R>(&self, work: impl FnOnce() -> R) -> R {
        let outermost = {
            let mut building = self.building.borrow_mut();
            let outermost = !building.in_segment;
            building.segments += u32::from(outermost);
            building.in_segment = true;
            outermost
        };
        let result = work();
        self.building.borrow_mut().in_segment = !outermost;
        result
    }

    /// See [`Tensor::keep`](crate::tensor::Tensor::keep).
    pub(crate) fn keep(&self, id: NodeId) {
        self.building.borrow_mut().graph.keep(id);
    }
}
