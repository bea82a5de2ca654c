//! Learning: which parameters of a model change, by which gradients, and the recording of their
//! update.

use std::panic::Location;
use std::rc::Rc;
use std::sync::Arc;

use super::handle::Tensor;
use super::{Building, Held, Line, Trace};
use crate::graph::{Graph, Origin, Phase, VariableInfo};
use crate::ops::{GraphBuilder, NodeId};

/// An update that is being recorded.
#[derive(Default)]
pub(super) struct Updating {
    /// The variables it has set so far.
    pub assigned: Vec<u32>,
    /// The step counters it has read.
    pub counters: Vec<u32>,
}

/// A weight that an update changes.
pub(crate) struct Learning<'t> {
    pub variable: u32,
    /// Its value when the step begins.
    pub value: Tensor<'t>,
    /// The gradient of the loss, in its shape.
    pub gradient: Tensor<'t>,
}

/// The gradients of weights, by the numbers of their variables.
#[derive(Default)]
pub(crate) struct Gradients(Vec<(u32, NodeId)>);

/// A rule that freezes weights, and the user's line of it.
#[derive(Clone)]
pub(super) struct Frozen {
    at: Line,
    chosen: Rc<dyn Fn(&VariableInfo) -> bool>,
}

impl Building {
    /// The name of an optimizer's state.
    pub(super) fn owned(&self, name: &str) -> String {
        self.owner
            .as_ref()
            .map_or_else(|| name.to_string(), |owner| format!("{owner}.{name}"))
    }

    /// The parameters of the trace that gradients may change, with their nodes, and the rules that
    /// freeze some. Rules are the user's code, which may use the trace; therefore they are called
    /// while no part of the trace is borrowed.
    fn trained(&self) -> (Vec<(u32, NodeId, VariableInfo)>, Vec<Frozen>) {
        let all = (0..).zip(self.graph.variables.iter().zip(&self.variables));
        let trained = all
            .filter(|(_, (info, _))| info.trained)
            .map(|(v, (info, held))| (v, held.node, info.clone()))
            .collect();
        (trained, self.frozen.clone())
    }
}

/// The first names of several variables.
pub(crate) fn names<'a>(infos: impl Iterator<Item = &'a VariableInfo>) -> String {
    let all: Vec<&str> = infos.map(|info| &*info.name).collect();
    let shown = all
        .iter()
        .take(8)
        .map(|name| format!("\"{name}\""))
        .collect::<Vec<_>>()
        .join(", ");
    if all.len() > 8 {
        format!("{shown} and {} more", all.len() - 8)
    } else {
        shown
    }
}

impl Trace {
    /// The weights of the trace that learn, with their nodes.
    fn learning(&self) -> Vec<(u32, NodeId)> {
        let (trained, frozen) = self.building.borrow().trained();
        let learns = |info: &VariableInfo| !frozen.iter().any(|f| (f.chosen)(info));
        trained
            .into_iter()
            .filter(|(.., info)| learns(info))
            .map(|(v, node, _)| (v, node))
            .collect()
    }

    /// Reports rules that choose no parameter, most likely because a name is misspelt.
    fn check_frozen(&self) {
        let (trained, frozen) = self.building.borrow().trained();
        let known = names(trained.iter().map(|(.., info)| info));
        for rule in frozen
            .iter()
            .filter(|f| !trained.iter().any(|(.., info)| (f.chosen)(info)))
        {
            let message =
                format!("freeze: none of the parameters of this trace is chosen; they are {known}");
            self.building.borrow_mut().mistake(rule.at, "", message);
        }
    }

    /// Freezes the parameters for which `chosen` is true: [`Trace::minimize`] neither changes them
    /// nor makes gradients or optimizer state for them. Call it before `minimize`. Running
    /// statistics of a frozen layer are still updated.
    ///
    /// A rule that chooses none of the trace's parameters is a mistake.
    #[track_caller]
    pub fn freeze(&self, chosen: impl Fn(&VariableInfo) -> bool + 'static) {
        let at = Location::caller();
        let building = &mut *self.building.borrow_mut();
        if building.variables.iter().any(|held| {
            held.assigned
                .is_some_and(|a| building.graph.origin(a).phase == Phase::Update)
        }) {
            return building.mistake(
                at,
                "",
                "freeze: the weights are updated already; freeze them before minimize".into(),
            );
        }
        building.frozen.push(Frozen {
            at,
            chosen: Rc::new(chosen),
        });
    }

    /// The gradients of a loss with respect to the learning weights that it depends on.
    pub(crate) fn weight_gradients(&self, loss: Tensor<'_>) -> Gradients {
        let learning = self.learning();
        Gradients(self.building.borrow_mut().gradients(loss.id, learning))
    }

    /// Adds the gradients of another loss. `at` is the line that requests it.
    pub(crate) fn add_weight_gradients(&self, at: Line, sums: &mut Gradients, loss: Tensor<'_>) {
        let learning = self.learning();
        let building = &mut *self.building.borrow_mut();
        for (variable, gradient) in building.gradients(loss.id, learning) {
            match sums.0.binary_search_by_key(&variable, |(v, _)| *v) {
                Ok(i) => sums.0[i].1 = building.sum(at, variable, sums.0[i].1, gradient),
                Err(i) => sums.0.insert(i, (variable, gradient)),
            }
        }
    }

    /// Begins a part of a step in parts, or the rest of the step after its parts.
    pub(crate) fn begin_part(&self, part: Option<usize>) {
        let building = &mut *self.building.borrow_mut();
        building.graph.current_part += 1;
        building.part = part;
    }

    /// Whether this trace can learn by an optimizer with this mistake in its numbers, if there is
    /// one; otherwise records the mistake.
    pub(crate) fn may_learn(&self, at: Line, checked: Result<(), String>) -> bool {
        let fault = match checked {
            Err(why) => Some(why),
            Ok(()) if !self.training => {
                Some("this trace is for inference; a model learns in Trace::training()".into())
            }
            Ok(()) if self.averaged => {
                Some("this trace reads averaged weights, which follow those that learn".into())
            }
            Ok(()) => None,
        };
        if let Some(why) = &fault {
            self.fail(at, "", format!("minimize: {why}"));
        }
        fault.is_none()
    }

    /// Records `update` as the update of the weights with these gradients.
    pub(crate) fn record_update<'t>(
        &'t self,
        at: Line,
        gradients: Gradients,
        update: impl FnOnce(Vec<Learning<'t>>),
    ) {
        self.check_frozen();
        let weights: Vec<Learning<'t>> = {
            let building = &mut *self.building.borrow_mut();
            if gradients.0.is_empty() {
                let frozen = if building.frozen.is_empty() {
                    ""
                } else {
                    " that is not frozen"
                };
                return building.mistake(
                    at,
                    "",
                    format!(
                        "minimize: the loss has no gradient with respect to any parameter{frozen}"
                    ),
                );
            }
            let twice: Vec<Arc<str>> = gradients
                .0
                .iter()
                .filter(|(v, _)| building.variables[*v as usize].assigned.is_some())
                .map(|(v, _)| building.graph.variables[*v as usize].name.clone())
                .collect();
            for name in &twice {
                building.mistake(
                    at,
                    "",
                    format!("minimize: parameter \"{name}\" is updated a second time"),
                );
            }
            if !twice.is_empty() {
                return;
            }
            building.updating = Some(Updating::default());
            let tensor = |id| Tensor { trace: self, id };
            let weight = |(variable, gradient)| Learning {
                variable,
                value: tensor(building.variables[variable as usize].node),
                gradient: tensor(gradient),
            };
            gradients.0.into_iter().map(weight).collect()
        };
        self.on_behalf(at, || update(weights));
        let building = &mut *self.building.borrow_mut();
        let Some(Updating { assigned, counters }) = building.updating.take() else {
            return;
        };
        let Graph {
            counters: known,
            variables,
            ..
        } = &mut building.graph;
        for counter in known.iter_mut().filter(|c| counters.contains(&c.variable)) {
            // An average does not depend on the count.
            let counted =
                |&&v: &&u32| v != counter.variable && variables[v as usize].average_of.is_none();
            let counted: Vec<u32> = assigned.iter().filter(counted).copied().collect();
            counter.counts.extend(counted);
        }
    }

    /// Records a mistake of an update, at the line that requests it.
    #[track_caller]
    pub(crate) fn fail_update(&self, message: String) {
        self.fail(Location::caller(), "", format!("minimize: {message}"));
    }

    /// The description of a variable.
    pub(crate) fn info(&self, variable: u32) -> VariableInfo {
        self.building.borrow().graph.variables[variable as usize].clone()
    }

    /// Records states as those of an optimizer of this name.
    pub(crate) fn owned_by(&self, owner: &str, work: impl FnOnce()) {
        let before = self.building.borrow_mut().owner.replace(Arc::from(owner));
        work();
        self.building.borrow_mut().owner = before;
    }

    /// Keeps an average of a variable's value after each step: average ← decay·average + (1 −
    /// decay)·variable.
    #[track_caller]
    pub(crate) fn keep_average(&self, variable: u32, decay: f32) {
        let at = Location::caller();
        let layer = {
            let building = self.building.borrow();
            building
                .graph
                .origin(building.variables[variable as usize].node)
                .layer
                .clone()
        };
        let average = self.declare(at, &layer, self.info(variable).average());
        average.set(average.value() * decay + self.last_value(variable) * (1.0 - decay));
    }
}

impl Building {
    /// The gradients of a loss with respect to the learning weights that it depends on.
    fn gradients(&mut self, loss: NodeId, learning: Vec<(u32, NodeId)>) -> Vec<(u32, NodeId)> {
        let nodes: Vec<NodeId> = learning.iter().map(|(_, node)| *node).collect();
        let found = crate::passes::autodiff::gradients(&mut self.graph, loss, &nodes);
        learning
            .into_iter()
            .zip(found)
            .filter_map(|((v, _), gradient)| Some((v, gradient?)))
            .collect()
    }

    /// The sum of two gradients of a variable.
    fn sum(&mut self, at: Line, variable: u32, a: NodeId, b: NodeId) -> NodeId {
        let Held { node, .. } = self.variables[variable as usize];
        let layer = self.graph.origin(node).layer.clone();
        let location = self.user_line(at);
        self.graph.set_origin(Origin {
            location,
            layer,
            phase: Phase::Backward,
            segment: 0,
            part: self.graph.current_part,
        });
        self.graph.add(a, b)
    }
}
