//! Loops whose body is recorded, compiled and planned once.

use std::panic::Location;
use std::sync::Arc;

use rustc_hash::FxHashMap;
use slabwise_kernels::dtype::DType;
use slabwise_kernels::size::Size;
use slabwise_kernels::spec::{Dims, MAX_ARGUMENTS};

use super::handle::Tensor;
use super::{Building, Line, Trace};
use crate::graph::{Body, BodyBuilder, Feed, Graph, Node, Origin, Phase};
use crate::ops::{GraphBuilder, NodeId, Op};

/// The options of a [scan](Trace::scan): its direction, its length, and the carries that are kept
/// for the backward pass.
///
/// ```
/// # use slabwise::prelude::*;
/// # use slabwise::Scan;
/// # let trace = Trace::inference();
/// # let x = trace.input("x", F32, (100, 4));
/// let options = Scan::default().reverse().checkpoint_every(10);
/// let zero = trace.zeros((4,));
/// let ([_], [sums]) = trace.scan_with(options, [zero], [x], |[sum], [x]| {
///     let sum = sum + x;
///     ([sum], [sum])
/// });
/// assert_eq!(format!("{sums:?}"), "f32 [100, 4]");
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Scan {
    reverse: bool,
    length: Option<usize>,
    checkpoint_every: Option<usize>,
}

impl Scan {
    /// From the last index to the first. Results lie at the index of their step, as inputs do.
    pub fn reverse(self) -> Self {
        Scan {
            reverse: true,
            ..self
        }
    }

    /// The number of steps, for a scan without inputs.
    pub fn length(self, steps: usize) -> Self {
        Scan {
            length: Some(steps),
            ..self
        }
    }

    /// Keeps the carries at intervals of this many steps for the backward pass rather than those of
    /// all steps; the backward pass recomputes the steps between them. About the square root of the
    /// number of steps keeps the fewest bytes.
    ///
    /// Gradient checkpointing: Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016).
    pub fn checkpoint_every(self, steps: usize) -> Self {
        Scan {
            checkpoint_every: Some(steps),
            ..self
        }
    }
}

/// The carries and results of a step, or of a scan.
type Values<'t> = (Vec<Tensor<'t>>, Vec<Tensor<'t>>);

impl Trace {
    /// A loop over steps: `step` is called once, on symbolic values, and the operations that it
    /// records run in every step. It takes the carries of the previous step, `initial` at first,
    /// and the parts of `inputs` at the index of the step along their first axis. It returns the
    /// new carries, of the same types and shapes, and results. The scan returns the last carries,
    /// and the results of all steps along a new first axis.
    ///
    /// Unlike a loop in Rust, whose steps are all recorded, a scan is compiled once for any number
    /// of steps, and the plan has bytes for one step, the carries and the results of all steps.
    /// Tensors and parameters from outside may be used in a step; only values that depend on its
    /// carries and inputs are computed in every step.
    ///
    /// Gradients of any order are scans in the other direction. For them the carries of all steps
    /// are kept and everything else in a step is recomputed; [`Scan::checkpoint_every`] keeps
    /// fewer.
    ///
    /// Mistakes are inputs of different or varying lengths, carries that change their type or
    /// shape, and, in a step, random numbers (which would be the same in every step; draw them
    /// before and pass them as inputs), checks of indices and lengths, and assignments of state. A
    /// tensor of a step that is used outside of it is a mistake, too.
    ///
    /// The form is that of JAX's `lax.scan`.
    ///
    /// ```
    /// # use slabwise::prelude::*;
    /// # let params = Params::seeded(0);
    /// // A recurrent network h ← tanh(x + W·h) over 1000 steps of a batch of 8.
    /// let w = params.root().param("w", (16, 16), Init::kaiming_uniform(16));
    /// let trace = Trace::inference();
    /// let x = trace.input("x", F32, (1000, 8, 16));
    /// let zero = trace.zeros((8, 16));
    /// let ([last], [all]) = trace.scan([zero], [x], |[h], [x]| {
    ///     let h = (x + h.matmul(trace.param(&w))).tanh();
    ///     ([h], [h])
    /// });
    /// # let mut session = Session::new(Device::Cpu, params)?;
    /// let program = session.compile(&trace, [last, all])?;
    /// assert!(program.plan().kernels() < 10);
    /// # Ok::<(), slabwise::Error>(())
    /// ```
    #[track_caller]
    pub fn scan<'t, const C: usize, const X: usize, const Y: usize>(
        &'t self,
        initial: [Tensor<'t>; C],
        inputs: [Tensor<'t>; X],
        step: impl FnOnce([Tensor<'t>; C], [Tensor<'t>; X]) -> ([Tensor<'t>; C], [Tensor<'t>; Y]),
    ) -> ([Tensor<'t>; C], [Tensor<'t>; Y]) {
        self.scan_with(Scan::default(), initial, inputs, step)
    }

    /// [`Trace::scan`] with options.
    #[track_caller]
    pub fn scan_with<'t, const C: usize, const X: usize, const Y: usize>(
        &'t self,
        options: Scan,
        initial: [Tensor<'t>; C],
        inputs: [Tensor<'t>; X],
        step: impl FnOnce([Tensor<'t>; C], [Tensor<'t>; X]) -> ([Tensor<'t>; C], [Tensor<'t>; Y]),
    ) -> ([Tensor<'t>; C], [Tensor<'t>; Y]) {
        let (carries, results) = self.scan_many(options, &initial, &inputs, |carries, inputs| {
            let array = |list: &[Tensor<'t>]| std::array::from_fn(|i| list[i]);
            let given = std::array::from_fn(|i| inputs[i]);
            let (carries, results) = step(array(carries), given);
            (carries.to_vec(), results.to_vec())
        });
        let or_poisoned =
            |list: &[Tensor<'t>], i: usize| list.get(i).copied().unwrap_or_else(|| self.poisoned());
        (
            std::array::from_fn(|i| or_poisoned(&carries, i)),
            std::array::from_fn(|i| or_poisoned(&results, i)),
        )
    }

    /// [`Trace::scan_with`] for numbers of carries, inputs and results that are known only when the
    /// program runs. After a mistake there may be fewer results.
    #[track_caller]
    pub fn scan_many<'t>(
        &'t self,
        options: Scan,
        initial: &[Tensor<'t>],
        inputs: &[Tensor<'t>],
        step: impl FnOnce(&[Tensor<'t>], &[Tensor<'t>]) -> Values<'t>,
    ) -> Values<'t> {
        let at = Location::caller();
        let steps = self.steps(at, options, initial, inputs);
        let Some(steps) = steps else {
            return (vec![self.poisoned(); initial.len()], Vec::new());
        };
        match options.checkpoint_every {
            Some(0) => {
                let why = "scan: checkpoint_every(0): carries are kept of every so many steps";
                self.fail(at, "", why.into());
                (vec![self.poisoned(); initial.len()], Vec::new())
            }
            Some(every) if every < steps as usize => self.on_behalf(at, || {
                self.scan_of_scans(
                    options.reverse,
                    [steps as usize, every],
                    initial,
                    inputs,
                    step,
                )
            }),
            _ => {
                let made = self.record_scan(at, options.reverse, steps, initial, inputs, step);
                self.values(made.as_ref(), initial.len())
            }
        }
    }

    /// A scan over segments, each a scan over the steps in it, and one over the steps that are left,
    /// which run last.
    fn scan_of_scans<'t>(
        &'t self,
        reverse: bool,
        [steps, every]: [usize; 2],
        initial: &[Tensor<'t>],
        inputs: &[Tensor<'t>],
        step: impl FnOnce(&[Tensor<'t>], &[Tensor<'t>]) -> Values<'t>,
    ) -> Values<'t> {
        let at = Location::caller();
        let (segments, left) = (steps / every, steps % every);
        let whole = segments * every;
        let cut = if reverse { left } else { whole };
        let sides = |x: &Tensor<'t>| {
            let (first, second) = (x.slice(0, ..cut), x.slice(0, cut..));
            if reverse {
                [second, first]
            } else {
                [first, second]
            }
        };
        let apart: Vec<Tensor<'t>> = inputs
            .iter()
            .map(|x| sides(x)[0].with_first_axes(&[segments, every], 1))
            .collect();
        let mut inner = None;
        let outer = |carries: &[Tensor<'t>], parts: &[Tensor<'t>]| {
            inner = self.record_scan(at, reverse, every as u32, carries, parts, step);
            self.values(inner.as_ref(), initial.len())
        };
        let made = self.record_scan(at, reverse, segments as u32, initial, &apart, outer);
        let (carries, results) = self.values(made.as_ref(), initial.len());
        let results: Vec<Tensor<'t>> = results
            .iter()
            .map(|y| y.with_first_axes(&[whole], 2))
            .collect();
        let (Some(inner), Some(_), true) = (inner, made, left > 0) else {
            return (carries, results);
        };
        let rest: Vec<Tensor<'t>> = inputs.iter().map(|x| sides(x)[1]).collect();
        let tail = self.again(&inner, left as u32, &carries, &rest);
        let (last, tail) = self.values(tail.as_ref(), initial.len());
        let joined = results.iter().zip(&tail).map(|(&a, &b)| {
            let order = if reverse { [b, a] } else { [a, b] };
            self.concat(&order, 0)
        });
        (last, joined.collect())
    }

    /// A scan with the body of another, over other steps.
    fn again<'t>(
        &'t self,
        made: &Made,
        steps: u32,
        initial: &[Tensor<'t>],
        inputs: &[Tensor<'t>],
    ) -> Option<Made> {
        let mut building = self.building.borrow_mut();
        let graph = &mut building.graph;
        let Op::Scan(body) = graph.node(made.scan).op else {
            return None;
        };
        let (node, body) = (
            graph.node(made.scan).clone(),
            graph.bodies[body as usize].clone(),
        );
        let (mut initial, mut inputs) = (initial.iter(), inputs.iter());
        let mut operands = node.inputs.clone();
        for (feed, &at) in body.feeds.iter().zip(&body.first_operands()) {
            match feed {
                Feed::Carry => operands[at] = initial.next()?.id,
                Feed::Step => operands[at] = inputs.next()?.id,
                Feed::Whole | Feed::Neighbour { .. } => {}
            }
        }
        graph.current_origin = node.origin;
        graph.bodies.push(Arc::new(Body {
            steps,
            ..(*body).clone()
        }));
        let op = Op::Scan(graph.bodies.len() as u32 - 1);
        let scan = graph.emit(op, &operands, node.dtype, node.dims);
        made_of(graph, scan, made.carries.len(), made.result_of.clone())
    }

    /// The last carries and the results of a scan.
    fn values<'t>(&'t self, made: Option<&Made>, carries: usize) -> Values<'t> {
        let tensor = |id: &NodeId| Tensor {
            trace: self,
            id: *id,
        };
        match made {
            Some(made) => (
                made.carries.iter().map(tensor).collect(),
                made.results.iter().map(tensor).collect(),
            ),
            None => (vec![self.poisoned(); carries], Vec::new()),
        }
    }

    /// The number of steps; `None` after a mistake.
    fn steps<'t>(
        &'t self,
        at: Line,
        options: Scan,
        initial: &[Tensor<'t>],
        inputs: &[Tensor<'t>],
    ) -> Option<u32> {
        let given: Vec<Tensor<'t>> = initial.iter().chain(inputs).copied().collect();
        let mut steps = 0;
        let checked = self.record(at, &given, |g, ids| {
            let (_, inputs) = ids.split_at(initial.len());
            steps = length(g, options, inputs)?;
            if initial.is_empty() && inputs.is_empty() {
                return Err("scan: it has neither carries nor inputs".into());
            }
            Ok(ids[0])
        });
        (!checked.is_poisoned()).then_some(steps)
    }

    /// Records the body and the scan.
    fn record_scan<'t>(
        &'t self,
        at: Line,
        reverse: bool,
        steps: u32,
        initial: &[Tensor<'t>],
        inputs: &[Tensor<'t>],
        step: impl FnOnce(&[Tensor<'t>], &[Tensor<'t>]) -> Values<'t>,
    ) -> Option<Made> {
        let start = self.with_graph(|g| g.nodes.len());
        let placeholder = |of: &Tensor<'t>, axes: usize| {
            self.record(at, &[*of], |g, ids| {
                let (dtype, dims) = (g.dtype(ids[0]), Dims::from_slice(&g.dims(ids[0])[axes..]));
                Ok(g.emit(Op::Placeholder, &[], dtype, dims))
            })
        };
        let carries: Vec<Tensor<'t>> = initial.iter().map(|c| placeholder(c, 0)).collect();
        let parts: Vec<Tensor<'t>> = inputs.iter().map(|x| placeholder(x, 1)).collect();
        let before = self.effects();
        let (next, results) = step(&carries, &parts);
        let made: Vec<Tensor<'t>> = next.iter().chain(&results).copied().collect();
        if made.iter().any(|t| t.is_poisoned()) {
            return None;
        }
        if made.iter().any(|t| !std::ptr::eq(t.trace, self)) {
            self.fail(
                at,
                "",
                "scan: a step returns a tensor of another trace".into(),
            );
            return None;
        }
        let mut building = self.building.borrow_mut();
        let message = mismatch(&building.graph, initial, &next)
            .or_else(|| (before != building.effects()).then(|| {
                "scan: a step may not assign state or update parameters; return the value as a carry"
                    .into()
            }));
        if let Some(message) = message {
            building.mistake(at, "", message);
            return None;
        }
        if building.refuse_effects(start) {
            return None;
        }
        let ids = |list: &[Tensor<'t>]| list.iter().map(|t| t.id).collect::<Vec<NodeId>>();
        let recorded = Recorded {
            start,
            placeholders: ids(&carries).into_iter().chain(ids(&parts)).collect(),
            initial: ids(initial),
            inputs: ids(inputs),
            next: ids(&next),
            results: ids(&results),
        };
        let made = building.add_scan(at, steps, reverse, &recorded);
        made.map_err(|message| building.mistake(at, "", message))
            .ok()
    }

    fn effects(&self) -> usize {
        self.building.borrow().effects()
    }
}

/// The nodes of a recorded step.
struct Recorded {
    /// The first node of the step.
    start: usize,
    /// The placeholders of the carries and of the parts of the inputs.
    placeholders: Vec<NodeId>,
    initial: Vec<NodeId>,
    inputs: Vec<NodeId>,
    /// The carries after the step.
    next: Vec<NodeId>,
    results: Vec<NodeId>,
}

impl Building {
    /// The number of assignments so far.
    fn effects(&self) -> usize {
        let assigned = self.variables.iter().filter(|v| v.assigned.is_some());
        assigned.count()
    }

    /// Reports nodes from `start` on that a step may not have; whether there is one.
    fn refuse_effects(&mut self, start: usize) -> bool {
        let mut refused = Vec::new();
        let mut varies = vec![false; self.graph.nodes.len() - start];
        for (at, node) in self.graph.nodes[start..].iter().enumerate() {
            varies[at] = node.op == Op::Placeholder
                || node
                    .inputs
                    .iter()
                    .any(|i| i.at() >= start && varies[i.at() - start]);
            let message = match &node.op {
                Op::Uniform { .. } => {
                    "scan: random numbers would be the same in every step; draw them before the \
                     scan and pass them as inputs"
                }
                Op::Collective { .. } if varies[at] => {
                    "scan: ranks exchange nothing in a step; exchange before the scan or after it"
                }
                op if op.is_check() && varies[at] => {
                    "scan: a step checks no indices, lengths or finite values; check them before \
                     the scan or after it"
                }
                _ => continue,
            };
            let origin = &self.graph.origins[node.origin as usize];
            refused.push((origin.location, origin.layer.clone(), message.to_owned()));
        }
        let functions = self.user_functions.since(start).into_iter();
        refused.extend(functions.map(|(id, at, is_hook)| {
            let message = match is_hook {
                true => {
                    "scan: the gradients in a step pass through no hook; hook what enters the scan \
                     or leaves it"
                }
                false => {
                    "scan: a step has no custom gradients; give one to a value that enters the scan \
                     or leaves it"
                }
            };
            (at, self.graph.origin(id).layer.clone(), message.to_owned())
        }));
        let any = !refused.is_empty();
        for (location, layer, message) in refused.into_iter().take(8) {
            self.mistake(location, &layer, message);
        }
        any
    }

    /// Adds the scan of a recorded step: its last carries and its results.
    fn add_scan(
        &mut self,
        at: Line,
        steps: u32,
        reverse: bool,
        recorded: &Recorded,
    ) -> Result<Made, String> {
        let location = self.user_line(at);
        let layer = self.layer(&recorded.next);
        let segment = if self.in_segment { self.segments } else { 0 };
        let graph = &mut self.graph;
        graph.set_origin(Origin {
            location,
            layer,
            phase: Phase::Forward,
            segment,
            part: graph.current_part,
        });
        let mut body = BodyBuilder::within(graph);
        let mut map = FxHashMap::default();
        let feeds = recorded
            .initial
            .iter()
            .map(|&id| (Feed::Carry, "carry", id))
            .chain(recorded.inputs.iter().map(|&id| (Feed::Step, "input", id)));
        for ((feed, name, operand), &placeholder) in feeds.zip(&recorded.placeholders) {
            let node = graph.node(placeholder);
            let of = (node.dtype, node.dims.clone());
            map.insert(placeholder, body.input(feed, &[operand], name, of));
        }
        // A result that is a carry is kept once.
        let carry_of = |id: &NodeId| recorded.next.iter().position(|next| next == id);
        let mut outputs = recorded.next.clone();
        let own = recorded.results.iter().filter(|id| carry_of(id).is_none());
        outputs.extend(own);
        body.graph.outputs = body.copy(graph, Some(recorded.start), &mut map, &outputs);
        let symbols = &body.graph.symbols;
        let found = |node: &&Node| symbols.any_data_dependent(&node.dims);
        if let Some(node) = body.graph.nodes.iter().find(found) {
            return Err(format!(
                "scan: a step has a {} {}, whose length a run finds out; a scan is planned for \
                 lengths that are known before it",
                node.op.name(),
                symbols.show(&node.dims)
            ));
        }
        let arguments = body.operands.len() + body.graph.outputs.len();
        if arguments >= MAX_ARGUMENTS {
            return Err(format!(
                "scan: a step uses {arguments} tensors of outside, carries, inputs and results \
                 together, of which there may be {}; join some with concat or stack",
                MAX_ARGUMENTS - 1
            ));
        }
        if steps == 0 {
            let none = |id: &NodeId| {
                let mut dims = Dims::from_slice(&[Size::ZERO]);
                dims.extend(graph.dims(*id).iter().copied());
                let dtype = graph.dtype(*id);
                graph.full(0.0, dtype, &dims)
            };
            let results = recorded.results.iter().map(none).collect();
            return Ok(Made {
                scan: NodeId(0),
                carries: recorded.initial.clone(),
                result_of: Vec::new(),
                results,
            });
        }
        let scan = body.finish(graph, steps, reverse);
        let mut own = recorded.next.len() as u32..;
        let result_of = recorded.results.iter().map(|id| match carry_of(id) {
            Some(carry) => carry as u32,
            None => own.next().unwrap_or_default(),
        });
        let result_of = result_of.collect();
        super::fits(graph, scan.at())?;
        made_of(graph, scan, recorded.next.len(), result_of)
            .ok_or_else(|| "scan: a result is missing".into())
    }
}

/// A recorded scan.
struct Made {
    scan: NodeId,
    /// The last carries.
    carries: Vec<NodeId>,
    /// For each result of a step the result of the scan, which may be a carry.
    result_of: Vec<u32>,
    /// The results of all steps.
    results: Vec<NodeId>,
}

/// A scan whose results are added to the graph.
fn made_of(g: &mut Graph, scan: NodeId, carries: usize, result_of: Vec<u32>) -> Option<Made> {
    let body = g.body(scan)?;
    let (count, last) = (body.graph.outputs.len() as u32, body.last_time());
    let all: Option<Vec<NodeId>> = (0..count)
        .map(|result| g.scan_result(scan, result))
        .collect();
    let all = all?;
    let carries = all[..carries]
        .iter()
        .map(|&all| g.part_at(all, last))
        .collect();
    let results = result_of
        .iter()
        .map(|&result| all[result as usize])
        .collect();
    Some(Made {
        scan,
        carries,
        result_of,
        results,
    })
}

/// The number of steps.
fn length(g: &Graph, options: Scan, inputs: &[NodeId]) -> Result<u32, String> {
    let mut steps = options.length.map(|n| (n as i64, "its options".to_owned()));
    for (at, &input) in inputs.iter().enumerate() {
        let dims = g.dims(input);
        let Some(first) = dims.first() else {
            return Err(format!("scan: input {at} is a scalar, which has no steps"));
        };
        let Some(n) = first.as_fixed() else {
            return Err(format!(
                "scan: the first axis of input {at} {} is not of fixed length, which a scan needs; \
                 pad the input and mask the steps that do not count",
                g.symbols.show(dims)
            ));
        };
        let name = format!("input {at} {}", g.symbols.show(dims));
        match &steps {
            Some((known, of)) if *known != n => {
                return Err(format!("scan: {name} has {n} steps, {of} {known}"));
            }
            _ => steps = Some((n, name)),
        }
    }
    let Some((steps, _)) = steps else {
        return Err("scan: without inputs, Scan::length says how many steps there are".into());
    };
    u32::try_from(steps).map_err(|_| format!("scan: {steps} steps are too many"))
}

/// The mistake if carries change their number, type or shape.
fn mismatch(g: &Graph, initial: &[Tensor<'_>], next: &[Tensor<'_>]) -> Option<String> {
    if initial.len() != next.len() {
        return Some(format!(
            "scan: a step takes {} carries and returns {}",
            initial.len(),
            next.len()
        ));
    }
    let of = |t: &Tensor<'_>| (g.dtype(t.id), g.dims(t.id).clone());
    let pairs = initial.iter().zip(next).enumerate();
    let changed = pairs.into_iter().find(|(_, (a, b))| of(a) != of(b));
    changed.map(|(at, (a, b))| {
        let show = |t| {
            let (dtype, dims): (DType, Dims) = of(t);
            format!("{dtype} {}", g.symbols.show(&dims))
        };
        format!(
            "scan: carry {at} is {} at first and {} after a step; a step returns carries as it \
             takes them",
            show(a),
            show(b)
        )
    })
}

/// Reports values of a step that a graph needs outside of it.
pub(super) fn refuse_leaks(building: &mut Building, graph: &Graph) {
    if graph.nodes.iter().all(|node| node.op != Op::Placeholder) {
        return;
    }
    let live = graph.live();
    let leaked = graph
        .ids()
        .find(|id| live[id.at()] && graph.node(*id).op == Op::Placeholder);
    if let Some(id) = leaked {
        let origin = graph.origin(id);
        let message = "scan: a tensor of a step is used outside of it; return it as a result";
        building.mistake(origin.location, &origin.layer, message.into());
    }
}

impl<'t> Tensor<'t> {
    /// This tensor with other axes in place of the first few.
    #[track_caller]
    fn with_first_axes(self, axes: &[usize], replaced: usize) -> Tensor<'t> {
        self.trace().record(Location::caller(), &[self], |g, ids| {
            let first = axes.iter().map(|&n| Size::fixed(n as i64));
            let rest = g.dims(ids[0])[replaced..].iter().copied();
            let dims: Dims = first.chain(rest).collect();
            Ok(g.reshape(ids[0], &dims))
        })
    }
}
