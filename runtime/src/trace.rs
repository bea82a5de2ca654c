//! Tracing: a model runs once on symbolic tensors, and its operations are recorded as a graph.
//!
//! Mistakes do not stop a trace. Each is recorded with the user's line and layer, the call gives a
//! *poisoned* tensor, and operations on a poisoned tensor report nothing; `compile` returns all
//! mistakes together.

mod learn;
mod precision;
mod random;
mod state;

use std::cell::RefCell;
use std::collections::HashMap;
use std::fmt;
use std::panic::Location;
use std::sync::Arc;

use slabwise_kernels::dtype::DType;
use slabwise_kernels::size::Size;
use slabwise_kernels::spec::Dims;
use smallvec::SmallVec;

use crate::error::Mistake;
use crate::graph::{Bases, Graph, InputInfo, Origin, Phase};
use crate::ops::{Emit, NodeId, Op};
use crate::params::{Param, Params};
use crate::passes::autodiff;
use crate::shape::{Dim, Extent, Shape, Symbols, elements};
use crate::tensor::{Operand, POISON, Tensor, number};

pub(crate) use learn::names;
pub use precision::Precision;
pub(crate) use state::RANDOM;
pub use state::State;

/// The user's line.
pub(crate) type Line = &'static Location<'static>;

/// A program that is being recorded.
pub struct Trace {
    building: RefCell<Building>,
    training: bool,
    averaged: bool,
    sampling: bool,
    precision: Precision,
    name: String,
}

#[derive(Default)]
struct Building {
    graph: Graph,
    bases: Bases,
    mistakes: Vec<Mistake>,
    /// The declarations of the parameters.
    params: Option<Params>,
    variables: Vec<Held>,
    /// Their numbers by name.
    names: HashMap<Arc<str>, u32>,
    /// The number of random operations.
    streams: u32,
    /// The update that is being recorded.
    updating: Option<learn::Updating>,
    /// The parameters that do not change when a model learns.
    frozen: Vec<learn::Frozen>,
    /// The prefix of the names of the states that the current optimizer declares.
    owner: Option<Arc<str>>,
    /// How many segments the backward pass recomputes, and whether nodes belong to the last of
    /// them.
    segments: u32,
    in_segment: bool,
    /// The line reported for calls made by this library itself, where the caller's line is lost:
    /// inside of a
    /// [`Sequential`](crate::nn::Sequential) and of an optimizer.
    stand_in: Option<Line>,
    /// The last line outside of this library for which an operation was recorded.
    last_line: Option<Line>,
}

/// A variable of the trace.
struct Held {
    /// Its value when the step begins.
    node: NodeId,
    /// The node that assigns it, if one does.
    assigned: Option<NodeId>,
    /// Of a parameter, the declarations that the trace reads: number and line, and whether another
    /// may be read in the same program.
    declarations: SmallVec<[(u64, Line, bool); 1]>,
}

impl Building {
    /// `at`, unless it lies in this library and there is a line to report in its place: that of a
    /// call, or the last one before a layer was called through `dyn`, which loses the caller's
    /// line.
    fn user_line(&mut self, at: Line) -> Line {
        let own = file!()
            .strip_suffix("trace.rs")
            .is_some_and(|folder| at.file().starts_with(folder));
        if !own {
            self.last_line = Some(at);
            return at;
        }
        self.stand_in.or(self.last_line).unwrap_or(at)
    }

    /// The layer of an operation: that of a parameter among its operands, else the first layer of
    /// an operand.
    fn layer(&mut self, operands: &[NodeId]) -> Arc<str> {
        let Building { graph, bases, .. } = self;
        // A transposed weight counts as the weight.
        let mut weight = |id: &&NodeId| matches!(graph.node(bases.of(graph, **id)).op, Op::Variable(v) if graph.variables[v as usize].is_param);
        let layer = |id: &NodeId| &graph.origin(*id).layer;
        let found = operands
            .iter()
            .filter(&mut weight)
            .chain(operands)
            .map(layer)
            .find(|layer| !layer.is_empty());
        found.map_or_else(|| Arc::from(""), Arc::clone)
    }

    fn mistake(&mut self, at: Line, layer: &str, message: String) {
        let location = self.user_line(at);
        self.mistakes.push(Mistake {
            location,
            layer: layer.to_string(),
            message,
        });
    }
}

impl Trace {
    /// A program that learns: dropout is active, [`Trace::minimize`] is allowed, and random numbers
    /// change with every step. A program that changes no weight and no state is compiled with a
    /// warning in the log, because it most likely lacks its `minimize`.
    pub fn training() -> Self {
        Trace {
            building: RefCell::default(),
            training: true,
            averaged: false,
            sampling: false,
            precision: Precision::F32,
            name: "train".into(),
        }
    }

    /// A program without learning: dropout is the identity, and random numbers are the same in
    /// every run, unless the trace is one for [sampling](Trace::sampling).
    pub fn inference() -> Self {
        Trace {
            training: false,
            name: "infer".into(),
            ..Trace::training()
        }
    }

    /// The same with new random numbers in each run, for sampling from a model: they follow from
    /// the seed of the session's parameters and from the number of runs of such programs before,
    /// which is the last element of the state "sampling" (i32 `[3]`: seed low, seed high, runs). It
    /// is saved with the weights, so that a resumed session draws the same numbers as an
    /// uninterrupted one; [`Session::set_value`](crate::Session::set_value) sets it anew. Training
    /// draws from another state, which sampling leaves alone.
    ///
    /// ```
    /// # use slabwise::prelude::*;
    /// let trace = Trace::inference().sampling();
    /// let noise = trace.normal((4, 2));
    /// # let mut session = Session::new(Device::Cpu, Params::seeded(0))?;
    /// let sample = session.compile(&trace, [noise])?;
    /// let first = session.run(&sample, ())?[0].array::<f32>()?;
    /// assert_ne!(session.run(&sample, ())?[0].array::<f32>()?, first);
    /// # Ok::<(), slabwise::Error>(())
    /// ```
    #[must_use]
    pub fn sampling(mut self) -> Self {
        self.sampling = true;
        self
    }

    /// The same on averaged weights: parameters are read as the averages that
    /// [`Optimizer::ema`](crate::optim::Optimizer::ema) keeps of them, statistics as they are. An
    /// average before the first step is the weight's initial value.
    pub fn averaged(mut self) -> Self {
        self.averaged = true;
        self
    }

    /// The same with matrix products and convolutions in this precision, including those of the
    /// backward pass: each rounds its operands and sums in f32. Everything else stays in f32:
    /// weights, their gradients and optimizer states, norms, softmax, losses. This is mixed
    /// precision, and the model is written as usual. On a CUDA device tensor cores multiply halves
    /// many times as fast as other cores multiply f32; the CPU gives the same sums but gains
    /// nothing.
    ///
    /// ```
    /// # use slabwise::prelude::*;
    /// # use slabwise::Precision;
    /// let params = Params::seeded(0);
    /// let weight = params.root().param("weight", (8, 1), Init::Constant(0.5));
    /// let trace = Trace::inference().with_precision(Precision::Bf16);
    /// let y = trace.input("x", F32, (4, 8)).matmul(trace.param(&weight));
    /// assert_eq!(y.dtype(), F32);
    /// ```
    pub fn with_precision(mut self, precision: Precision) -> Self {
        self.precision = precision;
        self
    }

    /// The operand type of matrix products and convolutions.
    pub fn precision(&self) -> Precision {
        self.precision
    }

    /// The same with the name that reports show.
    pub fn named(mut self, name: &str) -> Self {
        self.name = name.into();
        self
    }

    /// The name that reports show: "train" or "infer" unless it was [named](Trace::named).
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether this is a [training](Trace::training) trace.
    pub fn is_training(&self) -> bool {
        self.training
    }

    /// The declarations of the parameters read so far.
    pub fn params(&self) -> Option<Params> {
        self.building.borrow().params.clone()
    }

    /// Declares an input. A run passes inputs in the order of declaration.
    #[track_caller]
    pub fn input(&self, name: &str, dtype: DType, shape: impl Into<Shape>) -> Tensor<'_> {
        let shape = shape.into();
        self.record(Location::caller(), &[], |g, _| {
            let dims = resolve(&mut g.symbols, &shape)
                .map_err(|why| format!("input \"{name}\": {why}"))?;
            if g.inputs.iter().any(|i| &*i.name == name) {
                return Err(format!("input \"{name}\" is declared a second time"));
            }
            g.inputs.push(InputInfo {
                name: name.into(),
                dtype,
                dims: dims.clone(),
                donated_to: None,
            });
            Ok(g.emit(Op::Input(g.inputs.len() as u32 - 1), &[], dtype, dims))
        })
    }

    /// Donates the bytes of an input to output `position` of the program: a
    /// [`Buffer`](crate::Buffer) fed to it by [`donate`](crate::Buffer::donate) holds that output
    /// after the run, and every earlier handle is dead. The two have one type and shape; each is
    /// named once.
    #[track_caller]
    pub fn donate(&self, input: Tensor<'_>, position: usize) {
        let at = Location::caller();
        if input.is_poisoned() {
            return;
        }
        let mut building = self.building.borrow_mut();
        let found =
            std::ptr::eq(input.trace, self).then(|| building.graph.node(input.id).op.clone());
        let Some(Op::Input(i)) = found else {
            return building.mistake(
                at,
                "",
                "donate: only an input of this trace can be donated".into(),
            );
        };
        let twice = building
            .graph
            .inputs
            .iter()
            .any(|known| known.donated_to == Some(position as u32));
        let info = &mut building.graph.inputs[i as usize];
        let name = info.name.clone();
        if twice || info.donated_to.replace(position as u32).is_some() {
            building.mistake(
                at,
                "",
                format!("donate: input \"{name}\" or output {position} is donated a second time"),
            );
        }
    }

    /// The value of a parameter when a step begins.
    #[track_caller]
    pub fn param(&self, param: &Param) -> Tensor<'_> {
        self.read_param(param, Location::caller())
    }

    /// A [statistic](crate::Scope::statistic) of the model as state: its value, and its
    /// replacement.
    #[track_caller]
    pub fn statistic(&self, statistic: &Param) -> State<'_> {
        let at = Location::caller();
        if statistic.is_trained() {
            let message = format!(
                "\"{}\" is a parameter: an optimizer changes it",
                statistic.name()
            );
            return State::mistaken(self.fail(at, statistic.layer(), message));
        }
        self.variable_of(statistic, at)
    }

    pub(crate) fn read_param(&self, param: &Param, at: Line) -> Tensor<'_> {
        self.variable_of(param, at).value()
    }

    fn variable_of(&self, param: &Param, at: Line) -> State<'_> {
        let foreign = {
            let mut building = self.building.borrow_mut();
            let own = building
                .params
                .get_or_insert_with(|| param.params().clone())
                .same(param.params());
            let read = || {
                building
                    .graph
                    .variables
                    .iter()
                    .find(|v| v.is_param)
                    .map_or_else(String::new, |v| format!(", as \"{}\"", v.name))
            };
            (!own).then(|| {
                format!(
                    "parameter \"{}\" belongs to other Params than those used before{}; one program reads the parameters of one Params",
                    param.name(),
                    read()
                )
            })
        };
        if let Some(message) = foreign {
            return State::mistaken(self.fail(at, param.layer(), message));
        }
        // Its declaration was reported; errors that follow from it are not reported again.
        if param.is_faulty() {
            return State::mistaken(self.poisoned());
        }
        let info = param.info();
        let info = if self.averaged && info.trained {
            info.average()
        } else {
            info
        };
        let state = self.declare(at, param.layer(), info);
        if let Some(message) = state
            .variable()
            .and_then(|variable| self.second_declaration(param, variable))
        {
            return State::mistaken(self.fail(at, param.layer(), message));
        }
        state
    }

    /// The mistake if this is another declaration of a parameter than those read before, when it is
    /// first read.
    fn second_declaration(&self, param: &Param, variable: u32) -> Option<String> {
        let (number, location) = param.declaration();
        let known = &mut self.building.borrow_mut().variables[variable as usize].declarations;
        if known.iter().any(|(n, ..)| *n == number) {
            return None;
        }
        let first = known
            .iter()
            .find(|(.., shared)| !shared)
            .map(|(_, line, _)| *line)
            .filter(|_| !param.is_shared());
        known.push((number, location, param.is_shared()));
        let first = first?;
        let place = |line: Line| format!("{}:{}", line.file(), line.line());
        Some(format!(
            "\"{}\" is declared at {} and again at {}: two layers have one name and would share weights; give the second another name, \
             or its place as Scope::shared() if they are to",
            param.name(),
            place(first),
            place(location)
        ))
    }

    /// A tensor of one value. Numbers that the type cannot hold are mistakes.
    #[track_caller]
    pub fn full(&self, value: f32, dtype: DType, shape: impl Into<Shape>) -> Tensor<'_> {
        let shape = shape.into();
        self.record(Location::caller(), &[], |g, _| {
            let dims = resolve(&mut g.symbols, &shape).map_err(|why| format!("full: {why}"))?;
            let value = number(value, dtype)?;
            let one = g.emit(Op::Const(value), &[], dtype, Dims::new());
            Ok(g.broadcast(one, &dims))
        })
    }

    /// Zeros of type f32.
    #[track_caller]
    pub fn zeros(&self, shape: impl Into<Shape>) -> Tensor<'_> {
        self.full(0.0, DType::F32, shape)
    }

    /// Ones of type f32.
    #[track_caller]
    pub fn ones(&self, shape: impl Into<Shape>) -> Tensor<'_> {
        self.full(1.0, DType::F32, shape)
    }

    /// `0, 1, … n − 1`: i32 `[n]`.
    #[track_caller]
    pub fn arange(&self, n: impl Into<Dim>) -> Tensor<'_> {
        let n = n.into();
        self.record(Location::caller(), &[], |g, _| {
            let dims = resolve(&mut g.symbols, &Shape::from((n,)))
                .map_err(|why| format!("arange: {why}"))?;
            countable("arange", &g.symbols, &dims)?;
            Ok(g.emit(
                Op::Index(Dims::from_slice(&[Size::ONE])),
                &[],
                DType::I32,
                dims,
            ))
        })
    }

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

    fn scalar_loss<'t>(&'t self, at: Line, what: &str, loss: Tensor<'t>) -> Tensor<'t> {
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

    /// The graph that computes `outputs`, with all effects of the trace; or all mistakes so far.
    #[track_caller]
    pub fn finish(&self, outputs: &[Tensor<'_>]) -> Result<Graph, Vec<Mistake>> {
        let mut building = self.building.borrow_mut();
        for (i, output) in outputs.iter().enumerate() {
            if !std::ptr::eq(output.trace, self) {
                building.mistake(
                    Location::caller(),
                    "",
                    format!("output {i} belongs to another trace"),
                );
            }
        }
        if !building.mistakes.is_empty() {
            return Err(building.mistakes.clone());
        }
        // A mistake in a declaration was not reported here.
        if outputs.iter().any(|o| o.is_poisoned()) {
            return Err(building
                .params
                .as_ref()
                .map(Params::mistakes)
                .unwrap_or_default());
        }
        let mut graph = building.graph.clone();
        graph.outputs = outputs.iter().map(|o| o.id).collect();
        for info in &graph.inputs {
            let Some(position) = info.donated_to else {
                continue;
            };
            let output = graph.outputs.get(position as usize).map(|&o| graph.node(o));
            if output.is_none_or(|o| (o.dtype, &o.dims) != (info.dtype, &info.dims)) {
                let is = output.map_or("does not exist".into(), |o| {
                    format!("is {} {}", o.dtype, graph.symbols.show(&o.dims))
                });
                let message = format!(
                    "donate: input \"{}\" is {} {}, output {position} {is}",
                    info.name,
                    info.dtype,
                    graph.symbols.show(&info.dims)
                );
                building.mistake(Location::caller(), "", message);
            }
        }
        if building.mistakes.is_empty() {
            Ok(graph)
        } else {
            Err(building.mistakes.clone())
        }
    }

    /// Records an operation. `build` adds its nodes and returns the result, or the mistake; then no
    /// node is added.
    pub(crate) fn record<'t>(
        &'t self,
        at: Line,
        operands: &[Tensor<'t>],
        build: impl FnOnce(&mut Graph, &[NodeId]) -> Result<NodeId, String>,
    ) -> Tensor<'t> {
        if operands.iter().any(|t| t.is_poisoned()) {
            return self.poisoned();
        }
        if operands.iter().any(|t| !std::ptr::eq(t.trace, self)) {
            return self.fail(at, "", "the operands belong to two traces".into());
        }
        let ids: SmallVec<[NodeId; 4]> = operands.iter().map(|t| t.id).collect();
        let layer = self.building.borrow_mut().layer(&ids);
        self.record_in(at, layer, |g| build(g, &ids))
    }

    /// [`Trace::record`] in a given layer.
    fn record_in(
        &self,
        at: Line,
        layer: Arc<str>,
        build: impl FnOnce(&mut Graph) -> Result<NodeId, String>,
    ) -> Tensor<'_> {
        let mut building = self.building.borrow_mut();
        let location = building.user_line(at);
        let phase = if building.updating.is_some() {
            Phase::Update
        } else {
            Phase::Forward
        };
        let segment = if building.in_segment {
            building.segments
        } else {
            0
        };
        let graph = &mut building.graph;
        graph.set_origin(Origin {
            location,
            layer: layer.clone(),
            phase,
            segment,
            part: graph.current_part,
        });
        let start = graph.nodes.len();
        let built = build(graph).and_then(|id| fits(graph, start).map(|()| id));
        match built {
            Ok(id) => Tensor { trace: self, id },
            Err(message) => {
                graph.nodes.truncate(start);
                building.mistake(at, &layer, message);
                self.poisoned()
            }
        }
    }

    /// Records a mistake.
    pub(crate) fn fail(&self, at: Line, layer: &str, message: String) -> Tensor<'_> {
        self.building.borrow_mut().mistake(at, layer, message);
        self.poisoned()
    }

    pub(crate) fn poisoned(&self) -> Tensor<'_> {
        Tensor {
            trace: self,
            id: POISON,
        }
    }

    /// Reports `at` for the calls that this library makes during `work`.
    pub(crate) fn on_behalf<R>(&self, at: Line, work: impl FnOnce() -> R) -> R {
        let before = {
            let mut building = self.building.borrow_mut();
            let line = building.user_line(at);
            building.stand_in.replace(line)
        };
        let result = work();
        self.building.borrow_mut().stand_in = before;
        result
    }

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

    /// See [`Tensor::keep`].
    pub(crate) fn keep(&self, id: NodeId) {
        self.building.borrow_mut().graph.keep(id);
    }

    /// Whether a step changes a weight or a state other than the random one.
    pub(crate) fn changes_anything(&self) -> bool {
        let building = self.building.borrow();
        building
            .graph
            .variables
            .iter()
            .zip(&building.variables)
            .any(|(info, held)| held.assigned.is_some() && &*info.name != RANDOM)
    }

    /// Looks at the graph.
    pub(crate) fn with_graph<R>(&self, look: impl FnOnce(&Graph) -> R) -> R {
        look(&self.building.borrow().graph)
    }
}

impl fmt::Debug for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let building = self.building.borrow();
        let (nodes, mistakes) = (building.graph.nodes.len(), building.mistakes.len());
        f.debug_struct("Trace")
            .field("name", &self.name)
            .field("nodes", &nodes)
            .field("mistakes", &mistakes)
            .finish()
    }
}

/// A shape as sizes, its named dimensions interned.
pub(crate) fn resolve(symbols: &mut Symbols, shape: &Shape) -> Result<Dims, String> {
    let size = |dim: &Dim| match *dim {
        Dim::Fixed(n) if n < 0 => Err(format!("the length {n} is negative")),
        Dim::Fixed(n) => Ok(Size::fixed(n)),
        Dim::Bounded { name, max } => symbols.intern(name, Extent::Bounded(max)).map(Size::symbol),
        Dim::Free { name } => symbols.intern(name, Extent::Free(1)).map(Size::symbol),
    };
    shape.dims().iter().map(size).collect()
}

/// Refuses a shape with more elements than an i32 can number.
pub(crate) fn countable(what: &str, symbols: &Symbols, dims: &[Size]) -> Result<(), String> {
    match elements(dims).and_then(|n| n.checked_at(&symbols.bounds())) {
        Some(n) if n <= 1 << 31 => Ok(()),
        _ => Err(format!(
            "{what} {}: more than 2³¹ elements cannot be numbered",
            symbols.show(dims)
        )),
    }
}

/// Refuses values whose size cannot be expressed or overflows, among the nodes from `start` on.
fn fits(graph: &Graph, start: usize) -> Result<(), String> {
    for node in &graph.nodes[start..] {
        let say = |why: &str| {
            Err(format!(
                "{} {}: {why}",
                node.op.name(),
                graph.symbols.show(&node.dims)
            ))
        };
        let Some(count) = elements(&node.dims) else {
            return say(
                "the number of elements overflows, or has too many bounded lengths in it to be planned",
            );
        };
        let bytes = count
            .checked_at(&graph.symbols.bounds())
            .and_then(|n| n.checked_mul(node.dtype.bytes() as i64));
        if bytes.is_none() {
            return say("the number of bytes overflows");
        }
    }
    Ok(())
}
