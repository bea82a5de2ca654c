//! Gradients of a scalar, appended to the trace.

use std::panic::Location;

use slabwise_kernels::dtype::DType;

use super::handle::Tensor;
use super::operand::Operand;
use super::{Line, Trace};
use crate::ops::GraphBuilder;
use crate::passes::autodiff;

impl Trace {
    /// The gradient of a scalar with respect to parameters or tensors, each in the shape of its
    /// parameter or tensor: zeros where the scalar does not depend on it. Gradients are tensors
    /// like any other and can be differentiated again.
    #[track_caller]
    pub fn gradients<'t, W: Operand<'t>, const N: usize>(
        &'t self,
        of: Tensor<'t>,
        wrt: [W; N],
    ) -> [Tensor<'t>; N] {
        let at = Location::caller();
        let wrt = wrt.map(|w| w.lift(self, DType::F32, at));
        let of = self.scalar_loss(at, "gradients", of);
        let of = wrt.iter().fold(of, |of, &w| {
            self.record(at, &[of, w], |g, ids| match g.dtype(ids[1]) {
                dtype if dtype.is_float() => Ok(ids[0]),
                dtype => Err(format!(
                    "gradients: there is no gradient with respect to a tensor of type {dtype}"
                )),
            })
        });
        if of.is_poisoned() || wrt.iter().any(|w| w.is_poisoned()) {
            return [self.poisoned(); N];
        }
        let mut building = self.building.borrow_mut();
        let graph = &mut building.graph;
        let nodes = wrt.map(|w| w.id);
        let mut found = autodiff::gradients(graph, of.id, &nodes).into_iter();
        nodes.map(|w| {
            let gradient = found.next().flatten().unwrap_or_else(|| {
                let dims = graph.dims(w).clone();
                graph.full(0.0, DType::F32, &dims)
            });
            Tensor {
                trace: self,
                id: gradient,
            }
        })
    }

    pub(crate) fn scalar_loss<'t>(&'t self, at: Line, what: &str, loss: Tensor<'t>) -> Tensor<'t> {
        self.record(at, &[loss], |g, ids| {
            let (dtype, dims) = (g.dtype(ids[0]), g.dims(ids[0]));
            if dtype != DType::F32 || !dims.is_empty() {
                return Err(format!(
                    "{what}: the loss is {dtype} {}, not an f32 scalar; mean() makes one",
                    g.symbols.show(dims)
                ));
            }
            Ok(ids[0])
        })
    }
}
