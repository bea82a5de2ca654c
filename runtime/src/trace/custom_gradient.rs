//! Values whose gradient is a function of the user.

use std::panic::Location;
use std::rc::Rc;

use slabwise_kernels::dtype::DType;
use slabwise_kernels::scalar::ScalarOp;
use smallvec::SmallVec;

use super::gradients::marked;
use super::handle::Tensor;
use super::{Building, Line, Trace};
use crate::graph::Graph;
use crate::ops::{Gradients, GraphBuilder, NodeId, Op};

/// A function of inputs, a value and its gradient that returns the gradients of the inputs.
type Rule = dyn for<'t> Fn(&[Tensor<'t>], Tensor<'t>, Tensor<'t>) -> Vec<Option<Tensor<'t>>>;

/// The gradient of a value by a function of the user.
pub(super) struct CustomGradient {
    /// The user's line.
    pub at: Line,
    /// The tensors that get gradients.
    pub inputs: SmallVec<[NodeId; 3]>,
    rule: Box<Rule>,
}

impl Trace {
    /// The value of `forward` with a gradient of its own: a backward pass does not differentiate the
    /// operations in `forward`, but calls `gradient` with the inputs, the value and the gradient of
    /// the value. It returns the gradient of each input, f32 and of the input's shape, or `None` for
    /// 0. This is `custom_vjp` of JAX, and `autograd.Function` of PyTorch.
    ///
    /// `gradient` is called once for each backward pass that reaches the value ([`Trace::gradients`],
    /// [`Trace::minimize`]), and its operations are ordinary ones: they can be differentiated again,
    /// and are fused and planned with all others. An operation that `forward` has recorded too is
    /// not computed twice, so that no values have to be saved for `gradient`. Random numbers are
    /// drawn anew; pass them as an input.
    ///
    /// Only the inputs get gradients. Parameters that `forward` reads must be among them, and other
    /// tensors that it reads count as constants. The gradient of the value includes a
    /// [loss scale](Trace::with_loss_scale), so `gradient` should be linear in it. Not available in a
    /// step of a [scan](Trace::scan).
    ///
    /// ```
    /// # use slabwise::prelude::*;
    /// # let trace = Trace::inference();
    /// # let x = trace.input("x", F32, (3,));
    /// // A straight-through estimator: the gradient of rounding is that of the identity.
    /// let y = trace.custom_gradient([x], |[x]| x.round(), |_, _, dy| [Some(dy)]);
    /// let [dx] = trace.gradients((y * 5.0).sum(), [x]);
    /// # let mut session = Session::new(Device::Cpu, Params::seeded(0))?;
    /// let program = session.compile(&trace, [dx])?;
    /// let [dx] = session.run(&program, (ndarray::arr1(&[0.2f32, 1.7, 3.0]).into_dyn(),))?;
    /// assert_eq!(dx.array::<f32>()?.into_iter().collect::<Vec<_>>(), [5.0; 3]);
    /// # Ok::<(), slabwise::Error>(())
    /// ```
    ///
    /// Mistakes: a value that is not of floats, no inputs, a parameter of a training trace that
    /// `forward` reads and that is not an input, a gradient of another type or shape than its input.
    #[track_caller]
    pub fn custom_gradient<'t, const N: usize>(
        &'t self,
        inputs: [Tensor<'t>; N],
        forward: impl FnOnce([Tensor<'t>; N]) -> Tensor<'t>,
        gradient: impl for<'h> Fn([Tensor<'h>; N], Tensor<'h>, Tensor<'h>) -> [Option<Tensor<'h>>; N]
        + 'static,
    ) -> Tensor<'t> {
        self.custom_gradient_many(
            &inputs,
            |x| forward(array(x)),
            move |x, y, dy| gradient(array(x), y, dy).to_vec(),
        )
    }

    /// [`Trace::custom_gradient`] of inputs whose number is known only when the program runs.
    #[track_caller]
    pub fn custom_gradient_many<'t>(
        &'t self,
        inputs: &[Tensor<'t>],
        forward: impl FnOnce(&[Tensor<'t>]) -> Tensor<'t>,
        gradient: impl for<'h> Fn(&[Tensor<'h>], Tensor<'h>, Tensor<'h>) -> Vec<Option<Tensor<'h>>>
        + 'static,
    ) -> Tensor<'t> {
        let at = Location::caller();
        let start = self.with_graph(|g| g.nodes.len());
        let value = forward(inputs);
        let unlisted = self.unlisted_parameter(start, inputs);
        let all: Vec<Tensor<'t>> = [value].iter().chain(inputs).copied().collect();
        let value = self.record(at, &all, |g, ids| {
            let dtype = g.dtype(ids[0]);
            if ids.len() == 1 {
                return Err("custom_gradient: it has no inputs".into());
            }
            if !dtype.is_float() {
                return Err(format!(
                    "custom_gradient: a value of type {dtype} has no gradient"
                ));
            }
            if let Some(name) = unlisted {
                return Err(format!(
                    "custom_gradient: the parameter \"{name}\" would not learn, because it is not \
                     among the inputs; pass it as an input, or detach it"
                ));
            }
            Ok(marked(g, ids[0]))
        });
        if !value.is_poisoned() {
            let custom = CustomGradient {
                at,
                inputs: inputs.iter().map(|x| x.id).collect(),
                rule: Box::new(gradient),
            };
            let mut building = self.building.borrow_mut();
            let of_nodes = &mut building.user_functions.custom;
            of_nodes.insert(value.id, Rc::new(custom));
        }
        value
    }

    /// The name of a parameter that learns and is read by operations from `start` on, beside the
    /// inputs.
    fn unlisted_parameter(&self, start: usize, inputs: &[Tensor<'_>]) -> Option<String> {
        if !self.training {
            return None;
        }
        self.with_graph(|g| {
            let is_input = |id: NodeId| inputs.iter().any(|x| x.id == id);
            let learns = |&id: &NodeId| parameter(g, id).filter(|_| !is_input(id));
            let reads = g.nodes.get(start..)?.iter();
            let mut reads = reads.filter(|node| node.op != Op::Scalar(ScalarOp::Detach));
            reads.find_map(|node| node.inputs.iter().find_map(learns))
        })
    }
}

/// The name of the parameter that a node is, or is the conversion of, if it learns.
fn parameter(g: &Graph, id: NodeId) -> Option<String> {
    let node = match g.node(id).op {
        Op::Cast(_) => g.node(*g.node(id).inputs.first()?),
        _ => g.node(id),
    };
    let Op::Variable(variable) = node.op else {
        return None;
    };
    let info = g.variables.get(variable as usize)?;
    info.trained.then(|| info.name.to_string())
}

impl CustomGradient {
    /// The gradients of the inputs, from that of the value; none after a mistake.
    pub(super) fn gradients(&self, trace: &Trace, value: NodeId, gradient: NodeId) -> Gradients {
        let tensor = |id: NodeId| Tensor { trace, id };
        let inputs: Vec<Tensor<'_>> = self.inputs.iter().map(|&id| tensor(id)).collect();
        let made = (self.rule)(&inputs, tensor(value), tensor(gradient));
        if made.len() != inputs.len() {
            let message = format!(
                "custom_gradient: {} gradients of {} inputs",
                made.len(),
                inputs.len()
            );
            trace.fail(self.at, "", message);
            return Gradients::from_elem(None, inputs.len());
        }
        let checked = (0..).zip(inputs).zip(made).map(|((k, input), made)| {
            let made = made.filter(|_| input.dtype().is_float())?;
            let checked = trace.record(self.at, &[input, made], |g, ids| {
                let (dims, dtype) = (g.dims(ids[0]), g.dtype(ids[1]));
                if dtype == DType::F32 && g.dims(ids[1]) == dims {
                    return Ok(ids[1]);
                }
                Err(format!(
                    "custom_gradient: the gradient of input {k} is {dtype} {}, not f32 {}",
                    g.symbols.show(g.dims(ids[1])),
                    g.symbols.show(dims)
                ))
            });
            (!checked.is_poisoned()).then_some(checked.id)
        });
        checked.collect()
    }
}

/// Reports a custom kernel that a graph needs the gradient of.
pub(super) fn refuse_missing_gradients(building: &mut Building, graph: &Graph) {
    let Some((of, id, name)) = missing_gradient(graph) else {
        return;
    };
    let origin = of.origin(id);
    let message = format!(
        "{name}: a custom kernel has no gradient, and the backward pass needs it; give its result \
         one by custom_gradient, or detach it"
    );
    building.mistake(origin.location, &origin.layer, message);
}

/// The first node that stands for such a gradient, in the graph or in a loop of it.
fn missing_gradient(graph: &Graph) -> Option<(&Graph, NodeId, &str)> {
    let live = graph.live();
    let mut needed = graph.ids().filter(|id| live[id.at()]);
    needed.find_map(|id| match &graph.node(id).op {
        Op::NoGradient(kernel) => Some((graph, id, kernel.name())),
        Op::Scan(_) => missing_gradient(&graph.body(id)?.graph),
        _ => None,
    })
}

fn array<'t, const N: usize>(tensors: &[Tensor<'t>]) -> [Tensor<'t>; N] {
    std::array::from_fn(|i| tensors[i])
}
