//! Gradients of a scalar, appended to the trace, and gradient hooks.

use std::collections::HashMap;
use std::panic::Location;
use std::rc::Rc;
use std::sync::Arc;

use slabwise_kernels::dtype::DType;
use slabwise_kernels::spec::Dims;
use smallvec::SmallVec;

use super::custom_gradient::CustomGradient;
use super::handle::Tensor;
use super::operand::Operand;
use super::precision::Rounded;
use super::{Line, Trace};
use crate::graph::Graph;
use crate::ops::{Gradients, GraphBuilder, NodeId, Op};
use crate::passes::autodiff;

/// A function of a gradient that returns the one to use in its place.
type GradientHook = Arc<dyn for<'t> Fn(Tensor<'t>) -> Tensor<'t> + Send + Sync>;

/// The functions of the user that gradients of nodes pass through.
#[derive(Default)]
pub(super) struct UserFunctions {
    hooks: HashMap<NodeId, (Line, GradientHook)>,
    pub custom: HashMap<NodeId, Rc<CustomGradient>>,
    /// Whether one of them is being called.
    pub is_running: bool,
}

impl UserFunctions {
    /// Those of nodes from `start` on, in order: the node, the user's line, and whether it is a hook.
    pub fn since(&self, start: usize) -> Vec<(NodeId, Line, bool)> {
        let hooks = self.hooks.iter().map(|(id, (at, _))| (*id, *at, true));
        let custom = self.custom.iter().map(|(id, of)| (*id, of.at, false));
        let mut all: Vec<_> = hooks.chain(custom).collect();
        all.retain(|(id, ..)| id.at() >= start);
        all.sort_unstable();
        all
    }
}

/// The functions of the user of a trace whose graph is being differentiated, and the rounding of
/// gradients.
struct Backward<'t> {
    trace: &'t Trace,
    rounded: Option<(DType, Rounded)>,
}

impl Backward<'_> {
    /// Calls `work` while the graph is the trace's, because functions of the user record operations.
    fn in_trace<R>(&self, graph: &mut Graph, work: impl FnOnce(&Trace) -> R) -> R {
        let swap = |graph: &mut Graph, is_running: bool| {
            let mut building = self.trace.building.borrow_mut();
            std::mem::swap(graph, &mut building.graph);
            std::mem::replace(&mut building.user_functions.is_running, is_running)
        };
        let before = swap(graph, true);
        let result = work(self.trace);
        swap(graph, before);
        result
    }
}

impl autodiff::UserGradients for Backward<'_> {
    fn replaced(&mut self, graph: &mut Graph, node: NodeId, gradient: NodeId) -> NodeId {
        let building = self.trace.building.borrow();
        let hook = building.user_functions.hooks.get(&node).cloned();
        drop(building);
        let gradient = match hook {
            Some((at, hook)) => self.in_trace(graph, |trace| trace.hooked(at, &hook, gradient)),
            None => gradient,
        };
        match &self.rounded {
            Some((half, rounded)) if rounded.has_gradient(node) => {
                let stored = graph.cast(gradient, *half);
                graph.cast(stored, DType::F32)
            }
            _ => gradient,
        }
    }

    fn inputs(&self, node: NodeId) -> Option<SmallVec<[NodeId; 3]>> {
        let building = self.trace.building.borrow();
        let custom = building.user_functions.custom.get(&node)?;
        Some(custom.inputs.clone())
    }

    fn gradients(&mut self, graph: &mut Graph, node: NodeId, gradient: NodeId) -> Gradients {
        let building = self.trace.building.borrow();
        let custom = building.user_functions.custom.get(&node).cloned();
        drop(building);
        custom.map_or_else(Gradients::new, |custom| {
            self.in_trace(graph, |trace| custom.gradients(trace, node, gradient))
        })
    }
}

impl<'t> Tensor<'t> {
    /// The same tensor with a gradient hook: the function is called when a backward pass is
    /// recorded ([`Trace::gradients`], [`Trace::minimize`]), with the accumulated gradient of the
    /// returned tensor. It may show the gradient or return another of the same type and shape.
    /// Hooks are not available in a step of a [scan](Trace::scan).
    ///
    /// This is `Tensor.register_hook` of PyTorch, except that the gradient of `self` itself, where
    /// it is used beside the returned tensor, does not pass through the function. Layers with a
    /// function are [`BackwardHooked`](crate::nn::BackwardHooked).
    ///
    /// ```
    /// # use slabwise::prelude::*;
    /// # let trace = Trace::inference();
    /// let x = trace.input("x", F32, (3,));
    /// let y = x.square().hook_gradient(|dy| {
    ///     dy.trace().debug("dy", dy);
    ///     dy.clamp(-1.0, 1.0)
    /// });
    /// let [dx] = trace.gradients((y * 5.0).sum(), [x]);
    /// # let mut session = Session::new(Device::Cpu, Params::seeded(0))?;
    /// let program = session.compile(&trace, [dx])?;
    /// let [dx] = session.run(&program, (ndarray::arr1(&[1.0f32, 2.0, 3.0]).into_dyn(),))?;
    /// assert_eq!(dx.array::<f32>()?.into_iter().collect::<Vec<_>>(), [2.0, 4.0, 6.0]);
    /// # Ok::<(), slabwise::Error>(())
    /// ```
    #[track_caller]
    pub fn hook_gradient(
        self,
        hook: impl for<'h> Fn(Tensor<'h>) -> Tensor<'h> + Send + Sync + 'static,
    ) -> Tensor<'t> {
        let at = Location::caller();
        let through = self.trace.record(at, &[self], |g, ids| {
            let dtype = g.dtype(ids[0]);
            if !dtype.is_float() {
                return Err(format!(
                    "hook_gradient: a tensor of type {dtype} has no gradient"
                ));
            }
            // A node of its own, which simplifying removes, because the operand may be used
            // elsewhere.
            Ok(marked(g, ids[0]))
        });
        if !through.is_poisoned() {
            let mut building = self.trace.building.borrow_mut();
            let hooks = &mut building.user_functions.hooks;
            hooks.insert(through.id, (at, Arc::new(hook)));
        }
        through
    }
}

/// A node of its own with the value of another one, which functions of the user belong to;
/// simplifying removes it. It is no view, because a scan reads the values below views.
pub(super) fn marked(g: &mut Graph, value: NodeId) -> NodeId {
    let (dtype, dims) = (g.dtype(value), g.dims(value).clone());
    g.emit(Op::Cast(dtype), &[value], dtype, dims)
}

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
        let found = self.gradients_many(of, wrt);
        std::array::from_fn(|i| found[i])
    }

    /// Like [`Trace::gradients`], for parameters or tensors whose number is known only when the
    /// program runs; in their order.
    ///
    /// ```
    /// # use slabwise::{nn::Linear, prelude::*};
    /// # let params = Params::seeded(0);
    /// # let layer = Linear::new(&params.root() / "layer", 4, 2);
    /// let trace = Trace::inference();
    /// let loss = trace.input("x", F32, (8, 4)).apply(&layer).square().mean();
    /// let gradients = trace.gradients_many(loss, &params.declared());
    /// assert_eq!(gradients.len(), 2);
    /// ```
    #[track_caller]
    pub fn gradients_many<'t, W: Operand<'t>>(
        &'t self,
        of: Tensor<'t>,
        wrt: impl IntoIterator<Item = W>,
    ) -> Vec<Tensor<'t>> {
        let at = Location::caller();
        let wrt = wrt.into_iter().map(|w| w.lift(self, DType::F32, at));
        let wrt: Vec<Tensor<'t>> = wrt.collect();
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
            return vec![self.poisoned(); wrt.len()];
        }
        let nodes: Vec<NodeId> = wrt.iter().map(|w| w.id).collect();
        let mut found = self.gradients_of_nodes(of.id, &nodes).into_iter();
        let mut building = self.building.borrow_mut();
        let graph = &mut building.graph;
        let each = nodes.into_iter().map(|w| {
            let gradient = found.next().flatten().unwrap_or_else(|| {
                let dims = graph.dims(w).clone();
                graph.full(0.0, DType::F32, &dims)
            });
            Tensor {
                trace: self,
                id: gradient,
            }
        });
        each.collect()
    }

    /// The gradients with respect to nodes, passed through their hooks; those of rounded values are
    /// rounded.
    pub(super) fn gradients_of_nodes(&self, of: NodeId, wrt: &[NodeId]) -> Vec<Option<NodeId>> {
        let half = self.precision.half();
        let rounded = half.map(|half| self.with_graph(|g| Rounded::of(g, half)));
        let mut user = Backward {
            trace: self,
            rounded: half.zip(rounded),
        };
        let mut graph = std::mem::take(&mut self.building.borrow_mut().graph);
        let found = autodiff::gradients_with(&mut graph, of, wrt, &mut user);
        self.building.borrow_mut().graph = graph;
        found
    }

    /// The result of a hook for a gradient; the gradient itself after a mistake.
    fn hooked(&self, at: Line, hook: &GradientHook, gradient: NodeId) -> NodeId {
        let given = Tensor {
            trace: self,
            id: gradient,
        };
        let made = hook(given);
        let checked = self.record(at, &[given, made], |g, ids| {
            let of = |id: NodeId| (g.dtype(id), g.dims(id));
            if of(ids[0]) != of(ids[1]) {
                let show =
                    |(dtype, dims): (DType, &Dims)| format!("{dtype} {}", g.symbols.show(dims));
                return Err(format!(
                    "hook_gradient: the hook returns {} for a gradient {}",
                    show(of(ids[1])),
                    show(of(ids[0]))
                ));
            }
            Ok(ids[1])
        });
        match checked.is_poisoned() {
            true => gradient,
            false => checked.id,
        }
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
