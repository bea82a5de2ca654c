//! Tracing: a model runs once on symbolic tensors, and its operations are recorded as a graph.
//!
//! Mistakes do not stop a trace. Each is recorded with the user's line and layer, the call gives a
//! *poisoned* tensor, and operations on a poisoned tensor report nothing; `compile` returns all
//! mistakes together.

pub(crate) mod axes;
mod constants;
mod custom_gradient;
mod debug;
mod donate;
mod gradients;
mod grains;
pub(crate) mod handle;
mod layers;
mod learn;
mod lengths;
mod loss_scale;
pub(crate) mod operand;
mod options;
mod parameters;
mod precision;
mod random;
mod ranges;
mod ranks;
mod scan;
mod segments;
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

use crate::compile::MOST_BYTES;
use crate::error::Mistake;
use crate::graph::{Bases, Graph, InputInfo, Origin, Phase};
use crate::ops::{GraphBuilder, NodeId, Op};
use crate::params::Params;
use crate::shape::{Dim, Extent, Shape, Symbols, elements};
use crate::world::Distribution;

use handle::{POISON, Tensor};

pub(crate) use constants::countable;
pub(crate) use debug::{Debugged, SCALARS};
pub(crate) use learn::{Learning, PartSums, names};
pub use loss_scale::LossScale;
pub(crate) use loss_scale::Scaling;
pub use precision::Precision;
pub use random::Key;
pub(crate) use ranks::{exchanged, gathered_rows, scattered_sum, sum_over};
pub use scan::Scan;
pub use state::State;
pub(crate) use state::{OWN_NAME, RANDOM, RATE, two_starts};

/// The user's line.
pub(crate) type Line = &'static Location<'static>;

/// Adds an operation's nodes to a graph, given its operands, and returns the result, or the mistake.
type Build<'a> = dyn FnOnce(&mut Graph, &[NodeId]) -> Result<NodeId, String> + 'a;

/// A program that is being recorded.
pub struct Trace {
    building: RefCell<Building>,
    training: bool,
    averaged: bool,
    sampling: bool,
    precision: Precision,
    loss_scale: Option<LossScale>,
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
    /// For each update that may be skipped, the truth value of whether it is made.
    is_made: Vec<NodeId>,
    /// The parameters that training does not change.
    frozen: Vec<learn::Frozen>,
    /// The prefix of the names of the states that the current optimizer declares.
    owner: Option<Arc<str>>,
    /// How many segments the backward pass recomputes, and whether nodes belong to the last one.
    segments: u32,
    in_segment: bool,
    /// The functions that gradients of nodes pass through.
    user_functions: gradients::UserFunctions,
    /// The values that the program shows.
    debugged: Vec<Debugged>,
    /// How the step is distributed over ranks, as far as the recorded operations depend on it.
    distributions: Vec<Option<Distribution>>,
    /// For each part of the graph but the first, its number if it belongs to a step in parts.
    parts: Vec<Option<usize>>,
    /// The layer of operations without a parameter.
    layer: Option<Arc<str>>,
    /// The line reported for calls made by this library itself, where the caller's line is lost:
    /// inside of a [`Sequential`](crate::nn::Sequential) and of an optimizer.
    stand_in: Option<Line>,
    /// The last line outside of this library for which an operation was recorded.
    last_line: Option<Line>,
}

/// A variable of the trace.
struct Held {
    /// Its value when the step begins.
    node: NodeId,
    /// The node that the trace reads as its value: `node`, or its conversion to f32.
    read: NodeId,
    /// The node that assigns it, if one does.
    assigned: Option<NodeId>,
    /// The declarations of a parameter that the trace reads: number and line, and whether another
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

    /// Records a mistake, unless the same line has made it before.
    fn mistake(&mut self, at: Line, layer: &str, message: String) {
        let location = self.user_line(at);
        let known = self.mistakes.iter().any(|known| {
            known.location == location && known.layer == layer && known.message == message
        });
        if !known {
            self.mistakes.push(Mistake {
                location,
                layer: layer.to_string(),
                message,
            });
        }
    }
}

impl Trace {
    /// A training program: dropout is active, [`Trace::minimize`] is allowed, and random numbers
    /// change with every step. A program that changes no weight and no state is compiled with a
    /// warning in the log, because it most likely lacks a call of `minimize`.
    pub fn training() -> Self {
        let mut building = Building::default();
        building.graph.is_training = true;
        Trace {
            building: RefCell::new(building),
            training: true,
            averaged: false,
            sampling: false,
            precision: Precision::F32,
            loss_scale: None,
            name: "train".into(),
        }
    }

    /// An inference program: dropout is the identity, and random numbers are the same in every run,
    /// unless the trace is one for [sampling](Trace::sampling).
    pub fn inference() -> Self {
        Trace {
            building: RefCell::default(),
            training: false,
            name: "infer".into(),
            ..Trace::training()
        }
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

    /// The mistakes recorded so far, which [`Session::compile`](crate::Session::compile) would
    /// return.
    pub fn mistakes(&self) -> Vec<Mistake> {
        self.building.borrow().mistakes.clone()
    }

    /// The graph that computes `outputs` and then the statistics of shown values, with all effects
    /// of the trace; or all mistakes so far.
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
        scan::refuse_leaks(&mut building, &graph);
        custom_gradient::refuse_missing_gradients(&mut building, &graph);
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
        if !building.mistakes.is_empty() {
            return Err(building.mistakes.clone());
        }
        let shown = building.debugged.iter().filter_map(|shown| shown.scalars);
        graph.outputs.extend(shown.flatten());
        Ok(match self.precision.half() {
            Some(half) => precision::with_roundings(&graph, half),
            None => graph,
        })
    }

    /// Records an operation. If `build` returns a mistake, no node is added.
    pub(crate) fn record<'t>(
        &'t self,
        at: Line,
        operands: &[Tensor<'t>],
        build: impl FnOnce(&mut Graph, &[NodeId]) -> Result<NodeId, String>,
    ) -> Tensor<'t> {
        self.record_boxed(at, operands, Box::new(build))
    }

    /// [`Trace::record`], compiled once for all operations.
    fn record_boxed<'t>(
        &'t self,
        at: Line,
        operands: &[Tensor<'t>],
        build: Box<Build<'_>>,
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
        } else if building.user_functions.is_running {
            Phase::Backward
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

    /// Calls a function with the graph.
    pub(crate) fn with_graph<R>(&self, look: impl FnOnce(&Graph) -> R) -> R {
        look(&self.building.borrow().graph)
    }

    /// Calls `change` with the graph, outside of any operation.
    pub(crate) fn with_graph_mut<R>(&self, change: impl FnOnce(&mut Graph) -> R) -> R {
        change(&mut self.building.borrow_mut().graph)
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
        Dim::Unbounded { name } => symbols.intern(name, Extent::Unbounded(1)).map(Size::symbol),
        Dim::Computed(size) => lengths::length(symbols, size),
    };
    shape.dims().iter().map(size).collect()
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
            .and_then(|n| n.checked_mul(node.dtype.bytes() as i64))
            .filter(|&bytes| bytes <= MOST_BYTES);
        if bytes.is_none() {
            return say("its byte count overflows or is beyond any machine's memory");
        }
    }
    Ok(())
}
