//! Named state: variables that a step reads and replaces in place.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::panic::Location;
use std::sync::Arc;

use slabwise_kernels::dtype::DType;
use slabwise_kernels::scalar::ScalarOp;
use slabwise_kernels::size::Size;
use slabwise_kernels::spec::Dims;
use smallvec::SmallVec;

use super::handle::Tensor;
use super::operand::number;
use super::{Held, Line, Trace, resolve};
use crate::graph::{Counter, Graph, VariableInfo};
use crate::ops::{GraphBuilder, Op};
use crate::params::Init;
use crate::shape::{Shape, Symbols};
use crate::world::Shard;

/// The name of the random state.
pub(crate) const RANDOM: &str = "random";
/// The name of the random state of traces for sampling.
const SAMPLING: &str = "sampling";
/// The name of the counter of completed training steps.
pub(super) const STEPS: &str = "optim.step";
/// The name of a learning rate that is set or lowered between steps.
pub(crate) const RATE: &str = "optim.lr";

/// A named variable that accompanies weights: it lives in the session, is saved with the weights,
/// and a step may replace it. A step reads the value from before the step; a value that is
/// [set](State::set) takes effect when the step has ended.
#[derive(Clone, Copy, Debug)]
pub struct State<'t> {
    trace: &'t Trace,
    /// `None` after a mistake.
    variable: Option<u32>,
}

impl<'t> State<'t> {
    /// The state that a call with a mistake returns; the poisoned tensor names the trace.
    pub(super) fn mistaken(poisoned: Tensor<'t>) -> Self {
        State {
            trace: poisoned.trace(),
            variable: None,
        }
    }

    /// The variable of the trace.
    pub(super) fn variable(self) -> Option<u32> {
        self.variable
    }

    /// Its value when a step begins, in the type that it is stored in.
    pub(super) fn stored(self) -> Tensor<'t> {
        let id = self
            .variable
            .map(|v| self.trace.building.borrow().variables[v as usize].node);
        id.map_or(self.trace.poisoned(), |id| Tensor {
            trace: self.trace,
            id,
        })
    }

    /// Its value when a step begins.
    pub fn value(self) -> Tensor<'t> {
        let id = self
            .variable
            .map(|v| self.trace.building.borrow().variables[v as usize].read);
        id.map_or(self.trace.poisoned(), |id| Tensor {
            trace: self.trace,
            id,
        })
    }

    /// Its value after the step, as far as the trace is recorded: the value it was
    /// [set](State::set) to, else the value when the step begins.
    pub fn last(self) -> Tensor<'t> {
        self.variable
            .map_or(self.trace.poisoned(), |v| self.trace.last_value(v))
    }

    /// Replaces its next value by the function's result for it: for successive updates of one state
    /// within one step of the program, as for the running statistics of a layer that is applied
    /// several times.
    #[track_caller]
    pub fn advance(self, rule: impl FnOnce(Tensor<'t>) -> Tensor<'t>) {
        let next = rule(self.last());
        if let Some(variable) = self.variable {
            self.trace.reassign(Location::caller(), variable, next);
        }
    }

    /// Sets its value after the step: a tensor of its type and shape. Once per trace.
    #[track_caller]
    pub fn set(self, value: Tensor<'t>) {
        if let Some(variable) = self.variable {
            self.trace.assign(Location::caller(), variable, value);
        }
    }
}

pub(super) fn variable(
    name: Arc<str>,
    dtype: DType,
    dims: Dims,
    init: Init,
    is_param: bool,
) -> VariableInfo {
    VariableInfo {
        name,
        dtype,
        dims,
        init,
        is_param,
        trained: is_param,
        average_of: None,
        remainder_of: None,
        whole: None,
        part: None,
        data: None,
    }
}

impl Trace {
    /// Declares a named state of fixed lengths, or gives the existing one of this name. `init` is
    /// its value before the first step of a session that has no such state yet.
    #[track_caller]
    pub fn state(
        &self,
        name: &str,
        dtype: DType,
        shape: impl Into<Shape>,
        init: Init,
    ) -> State<'_> {
        let at = Location::caller();
        let shape = shape.into();
        let fault = || {
            let dims = resolve(&mut Symbols::default(), &shape)?;
            if dims.iter().any(|d| d.as_fixed().is_none()) {
                return Err("its lengths must be fixed".into());
            }
            match init {
                _ if name.is_empty() => Err("a state needs a name".into()),
                _ if name.contains(char::is_control) => {
                    Err("a name has no line breaks and no other control characters".into())
                }
                _ if [RANDOM, SAMPLING].contains(&name) => {
                    Err("this name belongs to the random state".to_string())
                }
                Init::RandomState => Err("only the random state starts as one".into()),
                Init::Uniform { .. } | Init::Normal { .. } if !dtype.is_float() => {
                    Err(format!("random values are floats, not {dtype}"))
                }
                Init::Constant(value) => number(value, dtype).map(|_| dims),
                _ => init.fault().map_or(Ok(dims), Err),
            }
        };
        match fault() {
            Ok(dims) => self.declare(
                at,
                &Arc::from(""),
                variable(Arc::from(name), dtype, dims, init, false),
            ),
            Err(why) => {
                self.fail(at, "", format!("state {name:?}: {why}"));
                State {
                    trace: self,
                    variable: None,
                }
            }
        }
    }

    /// The variable of this name, declared at its first use.
    pub(crate) fn declare(&self, at: Line, layer: &Arc<str>, info: VariableInfo) -> State<'_> {
        let known = self.building.borrow().names.get(&info.name).copied();
        let Some(v) = known else {
            return self.declare_new(at, layer, info);
        };
        let clash = {
            let building = self.building.borrow();
            let old = &building.graph.variables[v as usize];
            let show = |i: &VariableInfo| {
                let kind = if i.is_param { "parameter" } else { "state" };
                let (dtype, dims) = (i.dtype, building.graph.symbols.show(&i.dims));
                match &i.part {
                    None => format!("{kind} {dtype} {dims}"),
                    Some(part) => {
                        format!(
                            "a part of the quantized \"{}\", {dtype} {dims}",
                            part.weight
                        )
                    }
                }
            };
            let of = |i: &VariableInfo| (i.dtype, i.dims.clone(), i.is_param, i.part.is_some());
            let same = of(old) == of(&info);
            (!same).then(|| {
                format!(
                    "\"{}\" is declared as {} and as {}",
                    info.name,
                    show(old),
                    show(&info)
                )
            })
        };
        let variable = match clash {
            None => Some(v),
            Some(message) => {
                self.fail(at, layer, message);
                None
            }
        };
        State {
            trace: self,
            variable,
        }
    }

    /// [`Trace::declare`] of a variable that the trace reads and sets as f32 if it is stored in
    /// halves.
    pub(crate) fn declare_wide(&self, at: Line, layer: &Arc<str>, info: VariableInfo) -> State<'_> {
        let is_half = info.dtype.is_half();
        let state = self.declare(at, layer, info);
        let held = |v: u32| {
            let held = &self.building.borrow().variables[v as usize];
            (held.read == held.node).then_some(held.node)
        };
        if let Some(variable) = state.variable.filter(|_| is_half)
            && let Some(node) = held(variable)
        {
            let read = self.record_in(at, layer.clone(), |g| Ok(g.cast(node, DType::F32)));
            if !read.is_poisoned() {
                self.building.borrow_mut().variables[variable as usize].read = read.id;
            }
        }
        state
    }

    fn declare_new(&self, at: Line, layer: &Arc<str>, info: VariableInfo) -> State<'_> {
        let node = self.record_in(at, layer.clone(), |g| {
            let v = g.variables.len() as u32;
            Ok(g.emit(Op::Variable(v), &[], info.dtype, info.dims.clone()))
        });
        if node.is_poisoned() {
            return State {
                trace: self,
                variable: None,
            };
        }
        let mut building = self.building.borrow_mut();
        let number = building.graph.variables.len() as u32;
        building.names.insert(info.name.clone(), number);
        building.graph.variables.push(info);
        building.variables.push(Held {
            node: node.id,
            read: node.id,
            assigned: None,
            declarations: SmallVec::new(),
        });
        State {
            trace: self,
            variable: Some(building.variables.len() as u32 - 1),
        }
    }

    /// The state `slot.name` beside a variable: of its layer, stored in a type, of a shape made from
    /// its shape.
    pub(crate) fn beside_variable(
        &self,
        at: Line,
        variable: u32,
        slot: &str,
        dtype: DType,
        shape: impl FnOnce(Dims) -> Option<Dims>,
        first: Init,
    ) -> State<'_> {
        self.beside(at, variable, slot, shape, |name, dims| {
            self::variable(name, dtype, dims, first, false)
        })
    }

    /// A state that accompanies the part of a variable that each rank updates.
    pub(crate) fn beside_shard(
        &self,
        at: Line,
        variable: u32,
        slot: &str,
        dtype: DType,
        shard: Shard,
        first: Init,
    ) -> State<'_> {
        self.beside(at, variable, slot, Some, |name, whole| {
            let dims = Dims::from_slice(&[Size::fixed(shard.elements)]);
            VariableInfo {
                whole: Some(whole),
                ..self::variable(name, dtype, dims, first, false)
            }
        })
    }

    fn beside(
        &self,
        at: Line,
        variable: u32,
        slot: &str,
        shape: impl FnOnce(Dims) -> Option<Dims>,
        info: impl FnOnce(Arc<str>, Dims) -> VariableInfo,
    ) -> State<'_> {
        let (layer, info) = {
            let building = self.building.borrow();
            let of = &building.graph.variables[variable as usize];
            let layer = building
                .graph
                .origin(building.variables[variable as usize].node)
                .layer
                .clone();
            let name: Arc<str> = building.owned(&format!("{slot}.{}", of.name)).into();
            let rank = of.dims.len();
            let info = shape(of.dims.clone())
                .ok_or_else(|| format!("\"{name}\": \"{}\" has {rank} axes", of.name))
                .map(|dims| info(name.clone(), dims));
            (layer, info)
        };
        match info {
            Ok(info) => self.declare_wide(at, &layer, info),
            Err(why) => State::mistaken(self.fail(at, &layer, why)),
        }
    }

    /// Makes `value` a variable's value after the step.
    pub(crate) fn assign<'t>(&'t self, at: Line, variable: u32, value: Tensor<'t>) {
        let index = variable as usize;
        let before = self.building.borrow().variables[index].assigned.is_some();
        let is_wide = {
            let held = &self.building.borrow().variables[index];
            held.read != held.node
        };
        let done = self.record(at, &[value], |g, ids| {
            let stored = g.variables[index].dtype;
            let value = match g.dtype(ids[0]) {
                DType::F32 if is_wide => g.cast(ids[0], stored),
                _ => ids[0],
            };
            let info = &g.variables[index];
            let (dtype, dims) = (g.dtype(value), g.dims(value).clone());
            if (dtype, &dims) != (info.dtype, &info.dims) {
                let (is, got) = (g.symbols.show(&info.dims), g.symbols.show(&dims));
                return Err(format!(
                    "\"{}\" is {} {is} and cannot be set to {dtype} {got}",
                    info.name, info.dtype
                ));
            }
            if before {
                return Err(format!("\"{}\" is set a second time", info.name));
            }
            Ok(g.emit(Op::Assign(variable), &[value], dtype, dims))
        });
        // A poisoned value was already reported, so the next one is not reported again.
        if !done.is_poisoned() {
            let building = &mut *self.building.borrow_mut();
            building.variables[index].assigned = Some(done.id);
            if let Some(updating) = &mut building.updating {
                updating.assigned.push(variable);
            }
        }
    }

    /// Makes `value` a variable's value after the step, in place of an earlier assignment.
    pub(super) fn reassign<'t>(&'t self, at: Line, variable: u32, value: Tensor<'t>) {
        if !value.is_poisoned() {
            let building = &mut *self.building.borrow_mut();
            if let Some(earlier) = building.variables[variable as usize].assigned.take() {
                // A copy without readers has no effect.
                building.graph.nodes[earlier.at()].op = Op::Copy;
            }
        }
        self.assign(at, variable, value);
    }

    /// A variable's value after the step, as far as the trace is recorded.
    pub(crate) fn last_value(&self, variable: u32) -> Tensor<'_> {
        let (read, set, is_wide) = {
            let building = self.building.borrow();
            let held = &building.variables[variable as usize];
            let set = held.assigned.map(|a| building.graph.node(a).inputs[0]);
            (held.read, set, held.read != held.node)
        };
        let last = |id| Tensor { trace: self, id };
        match set.map(last) {
            Some(set) if is_wide => set.cast(DType::F32),
            set => set.unwrap_or(last(read)),
        }
    }

    /// Whether a variable is set already.
    fn is_assigned(&self, state: State<'_>) -> bool {
        state.variable.is_none_or(|v| {
            self.building.borrow().variables[v as usize]
                .assigned
                .is_some()
        })
    }

    /// A variable that holds these bytes and is never written. Equal constants share one variable.
    pub(crate) fn constant_of(
        &self,
        at: Line,
        dtype: DType,
        lengths: &[usize],
        bytes: Vec<u8>,
    ) -> Tensor<'_> {
        let length = |&n: &usize| i64::try_from(n).ok().map(Size::fixed);
        let Some(dims) = lengths.iter().map(length).collect::<Option<Dims>>() else {
            return self.fail(
                at,
                "",
                format!("constant {lengths:?}: a length is beyond any memory"),
            );
        };
        let mut hash = DefaultHasher::new();
        (dtype, lengths, &bytes).hash(&mut hash);
        let name = Arc::from(format!("constant.{:016x}", hash.finish()));
        let info = variable(name, dtype, dims, Init::Constant(0.0), false);
        self.declare(
            at,
            &Arc::from(""),
            VariableInfo {
                data: Some(Arc::new(bytes)),
                ..info
            },
        )
        .value()
    }

    /// The random state (i32 `[3]`: seed low, seed high, step). A trace for training or sampling
    /// that reads it increments its last number. Others read 0 in its place, because training in the
    /// same session is not to change their numbers.
    pub(super) fn random_state(&self, at: Line) -> Tensor<'_> {
        let dims = Dims::from_slice(&[Size::fixed(3)]);
        let advances = self.is_training() || self.sampling;
        let name = if advances && !self.is_training() {
            SAMPLING
        } else {
            RANDOM
        };
        let state = self.declare(
            at,
            &Arc::from(""),
            variable(Arc::from(name), DType::I32, dims, Init::RandomState, false),
        );
        // Without an array of constants.
        let is_last = |g: &mut Graph, dims: &Dims| {
            let strides = Dims::from_slice(&[Size::ONE]);
            let place = g.emit(Op::Index(strides), &[], DType::I32, dims.clone());
            let last = g.full(2.0, DType::I32, dims);
            g.scalar(ScalarOp::Eq, &[place, last])
        };
        if !advances {
            return self.record(at, &[state.value()], |g, ids| {
                let dims = g.dims(ids[0]).clone();
                let is_last = is_last(g, &dims);
                let zero = g.full(0.0, DType::I32, &dims);
                Ok(g.scalar(ScalarOp::Select, &[is_last, zero, ids[0]]))
            });
        }
        if !self.is_assigned(state) {
            let next = self.record(at, &[state.value()], |g, ids| {
                let dims = g.dims(ids[0]).clone();
                let is_last = is_last(g, &dims);
                let one = g.cast(is_last, DType::I32);
                Ok(g.add(ids[0], one))
            });
            if let Some(v) = state.variable {
                self.assign(at, v, next);
            }
        }
        state.value()
    }

    /// The number of training steps completed before this one: an i32 scalar, kept in the state
    /// "optim.step", of which a [named](crate::optim::Optimizer::named) optimizer has a separate
    /// one. A training trace that reads it increments it once per step, however many optimizers
    /// read it.
    ///
    /// Programs of a session that train the same weights by the same optimizer share the count. If
    /// other programs shared it, corrections and schedules that depend on it would be wrong;
    /// therefore compiling the second of them is an error.
    #[track_caller]
    pub fn completed_steps(&self) -> Tensor<'_> {
        let state = self.owned_state(STEPS, DType::I32, Init::Constant(0.0));
        let Some(variable) = state.variable.filter(|_| self.is_training()) else {
            return state.value();
        };
        if !self.is_assigned(state) {
            let is_made = {
                let building = self.building.borrow();
                let outside = building.updating.is_none();
                let updates = building.is_made.iter().filter(|_| outside);
                updates.copied().collect::<Vec<_>>()
            };
            // The step of an update that is skipped does not count.
            let next = is_made.into_iter().fold(state.value() + 1, |next, id| {
                Tensor { trace: self, id }.select(next, state.value())
            });
            state.set(next);
        }
        let building = &mut *self.building.borrow_mut();
        let counters = &mut building.graph.counters;
        if counters.iter().all(|c| c.variable != variable) {
            counters.push(Counter {
                variable,
                counts: Vec::new(),
            });
        }
        if let Some(updating) = &mut building.updating {
            updating.counters.push(variable);
        }
        let node = building.variables[variable as usize].read;
        Tensor {
            trace: self,
            id: node,
        }
    }

    /// A scalar state of the current optimizer.
    #[track_caller]
    pub(crate) fn owned_state(&self, name: &str, dtype: DType, init: Init) -> State<'_> {
        self.owned_state_of(name, dtype, (), init)
    }

    /// A state of the current optimizer. Another initial value than that of an earlier declaration
    /// is a mistake: two rules would share one state, and the value of the second would be ignored.
    #[track_caller]
    pub(crate) fn owned_state_of(
        &self,
        name: &str,
        dtype: DType,
        shape: impl Into<Shape>,
        init: Init,
    ) -> State<'_> {
        let name = self.building.borrow().owned(name);
        let state = self.state(&name, dtype, shape, init);
        let known = state.variable.map(|v| self.info(v).init);
        match known.filter(|&known| known != init) {
            None => state,
            Some(known) => State::mistaken(self.fail(
                Location::caller(),
                "",
                format!(
                    "{} in one program; {OWN_NAME}",
                    two_starts(&name, known, init)
                ),
            )),
        }
    }
}

/// The advice to optimizers that would share a state.
pub(crate) const OWN_NAME: &str = "an optimizer has one such state: set one rate by hand, and give an \
     optimizer that needs another a name of its own, as in Adam::new(rate).named(\"head\")";

/// The mistake of a state with two initial values.
pub(crate) fn two_starts(name: &str, one: Init, other: Init) -> String {
    let show = |init| match init {
        Init::Constant(value) => value.to_string(),
        other => format!("{other:?}"),
    };
    format!("\"{name}\" starts as {} and as {}", show(one), show(other))
}
