//! Training: the parameters that change, their gradients, and the recording of their update.

use std::collections::BTreeMap;
use std::panic::Location;
use std::rc::Rc;
use std::sync::Arc;

use slabwise_kernels::dtype::DType;
use slabwise_kernels::size::Size;

use super::handle::Tensor;
use super::ranks::Summed;
use super::state::{STEPS, State};
use super::{Building, Line, Trace};
use crate::graph::{Graph, Phase, QuantizedRole, VariableInfo};
use crate::ops::{GraphBuilder, NodeId};
use crate::world::{Distribution, Shard, Strategy, Tree, TreeSum};

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
    /// The gradient of the loss, in the shape of the value.
    pub gradient: Tensor<'t>,
    /// The part of the weight that value and gradient are of, if ranks update a part each.
    pub shard: Option<Shard>,
}

/// The gradients of weights, by the numbers of their variables.
pub(crate) struct Gradients(Vec<(u32, NodeId)>);

/// The sums of a loss and of its gradients over the parts of a step.
pub(crate) struct PartSums<'t> {
    tree: Tree,
    /// The weight of each part in the mean, if the parts may differ: over ranks, or in rows.
    pub shares: Option<Vec<Tensor<'t>>>,
    pub loss: TreeSum<Tensor<'t>>,
    gradients: BTreeMap<u32, TreeSum<NodeId>>,
}

impl<'t> PartSums<'t> {
    fn new(tree: Tree, shares: Option<Vec<Tensor<'t>>>) -> Self {
        PartSums {
            loss: tree.sum(),
            gradients: BTreeMap::new(),
            tree,
            shares,
        }
    }

    /// The sum of the losses, once all have come, and those of the gradients.
    pub fn finish(self) -> (Option<Tensor<'t>>, Gradients) {
        let sums = self.gradients.into_iter();
        let sums = sums.filter_map(|(variable, sum)| Some((variable, sum.finish()?)));
        (self.loss.finish(), Gradients(sums.collect()))
    }
}

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

    /// The parameters of the trace that training may change, with their nodes, and the rules that
    /// freeze some. Rules are the user's code, which may use the trace; therefore they are called
    /// while no part of the trace is borrowed.
    fn trained(&self) -> (Vec<(u32, NodeId, VariableInfo)>, Vec<Frozen>) {
        let all = (0..).zip(self.graph.variables.iter().zip(&self.variables));
        let trained = all
            .filter(|(_, (info, _))| info.trained)
            .map(|(v, (info, held))| (v, held.read, info.clone()))
            .collect();
        (trained, self.frozen.clone())
    }

    /// The quantized weights of the trace, which do not learn, as rules see them: whole.
    fn quantized(&self) -> Vec<VariableInfo> {
        let whole = |info: &VariableInfo| {
            let part = info.part.as_ref()?;
            (part.role == QuantizedRole::Numbers).then(|| VariableInfo {
                name: part.weight.clone(),
                dtype: DType::F32,
                dims: part.dims.iter().map(|&n| Size::fixed(n as i64)).collect(),
                part: None,
                ..info.clone()
            })
        };
        self.graph.variables.iter().filter_map(whole).collect()
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
    /// The trained weights of the trace, with their nodes.
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
        let quantized = self.building.borrow().quantized();
        let infos = || trained.iter().map(|(.., info)| info).chain(&quantized);
        let known = names(infos());
        for rule in frozen.iter().filter(|f| !infos().any(|i| (f.chosen)(i))) {
            let message =
                format!("freeze: none of the parameters of this trace is chosen; they are {known}");
            self.building.borrow_mut().mistake(rule.at, "", message);
        }
    }

    /// Freezes the parameters for which `chosen` is true: [`Trace::minimize`] does not change them,
    /// and computes no gradients and no optimizer state for them. Call it before `minimize`.
    /// Running statistics of a frozen layer are still updated.
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

    /// The gradients of a loss with respect to the trained weights that it depends on.
    pub(crate) fn weight_gradients(&self, loss: Tensor<'_>) -> Gradients {
        let learning = self.learning();
        Gradients(self.gradients_of_weights(loss.id, learning))
    }

    fn gradients_of_weights(
        &self,
        loss: NodeId,
        learning: Vec<(u32, NodeId)>,
    ) -> Vec<(u32, NodeId)> {
        let nodes: Vec<NodeId> = learning.iter().map(|(_, node)| *node).collect();
        let found = self.gradients_of_nodes(loss, &nodes);
        learning
            .into_iter()
            .zip(found)
            .filter_map(|((v, _), gradient)| Some((v, gradient?)))
            .collect()
    }

    /// Adds the gradients of the loss of the next part. `at` is the line that requests it.
    pub(crate) fn add_weight_gradients(&self, at: Line, sums: &mut PartSums<'_>, loss: Tensor<'_>) {
        let learning = self.learning();
        let gradients = self.gradients_of_weights(loss.id, learning);
        let building = &mut *self.building.borrow_mut();
        for (variable, gradient) in gradients {
            let new = || sums.tree.sum();
            let sum = sums.gradients.entry(variable).or_insert_with(new);
            sum.push(gradient, &mut |a, b| building.sum(at, variable, a, b));
        }
    }

    /// The sums over `parts` parts of a step, without any yet.
    ///
    /// # Errors
    /// If ranks run another number of parts, or it is unclear which length is the batch.
    pub(crate) fn part_sums(&self, at: Line, parts: usize) -> Result<PartSums<'_>, String> {
        let Some(distribution) = self.distribution() else {
            // One after the other, which holds the fewest gradients.
            let shares = self.shares(at, None, parts)?;
            return Ok(PartSums::new(Tree::chain(parts), shares));
        };
        let (ranks, grains) = (distribution.ranks(), distribution.grains);
        if grains / ranks != parts {
            return Err(format!(
                "minimize_in_parts({parts}): each of {ranks} ranks runs {} of {grains} grains, one in each part",
                grains / ranks
            ));
        }
        let below = Tree::of(grains).split(ranks).map(|(below, _)| below);
        let shares = self.shares(at, Some(distribution), parts)?;
        Ok(PartSums::new(below.unwrap_or(Tree::chain(parts)), shares))
    }

    /// Begins a part of a step in parts, or the rest of the step after its parts.
    pub(crate) fn begin_part(&self, part: Option<usize>) {
        let building = &mut *self.building.borrow_mut();
        building.graph.current_part += 1;
        building.parts.push(part);
    }

    /// Whether this trace can be trained by an optimizer whose numbers may have this mistake;
    /// otherwise records the reason.
    pub(crate) fn may_learn(&self, at: Line, checked: Result<(), String>) -> bool {
        let fault = match checked {
            Err(why) => Some(why),
            Ok(()) if self.check_loss_scale().is_err() => self.check_loss_scale().err(),
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
        is_elementwise: bool,
        update: impl FnOnce(Vec<Learning<'t>>),
    ) {
        self.check_frozen();
        let distribution = self.distribution();
        let is_sharded = |d: Distribution| d.ranks() > 1 && d.strategy == Strategy::ShardedState;
        if distribution.is_some_and(is_sharded) && !is_elementwise {
            let message = "minimize: this optimizer reads more of a weight than the element that it updates, \
                           so ranks cannot hold parts of its state; Strategy::Replicated can be used"
                .into();
            return self.building.borrow_mut().mistake(at, "", message);
        }
        let values = {
            let building = &mut *self.building.borrow_mut();
            if gradients.0.is_empty() {
                let frozen = if building.frozen.is_empty() {
                    ""
                } else {
                    " that is not frozen"
                };
                let quantized = building.quantized();
                let help = match quantized.is_empty() {
                    true => String::new(),
                    false => format!(
                        "; quantized weights do not learn ({}), but an adapter beside them does, see LoraLinear",
                        names(quantized.iter())
                    ),
                };
                return building.mistake(
                    at,
                    "",
                    format!(
                        "minimize: the loss has no gradient with respect to any parameter{frozen}{help}"
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
            let value = |&(v, _): &(u32, NodeId)| Tensor {
                trace: self,
                id: building.variables[v as usize].read,
            };
            gradients.0.iter().map(value).collect::<Vec<_>>()
        };
        let summed = match distribution {
            Some(distribution) => {
                let building = &mut *self.building.borrow_mut();
                building.gradients_of_all_ranks(at, gradients.0, distribution)
            }
            None => {
                let whole = gradients.0.into_iter();
                whole.map(|(v, g)| (v, Summed::Whole(g))).collect()
            }
        };
        let learning = |((variable, summed), value)| {
            let (value, id, shard) = match summed {
                Summed::Whole(id) => (value, id, None),
                Summed::Shard(id, shard) => (self.part_of(at, value, shard), id, Some(shard)),
            };
            Learning {
                variable,
                value,
                gradient: Tensor { trace: self, id },
                shard,
            }
        };
        let weights = summed.into_iter().zip(values).map(learning).collect();
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

    /// Makes the update that is being recorded, and the new statistics of the model, conditional on
    /// a truth value.
    pub(super) fn skip_unless(&self, at: Line, condition: Tensor<'_>) {
        let (updated, set) = {
            let building = &mut *self.building.borrow_mut();
            let Some(updating) = &mut building.updating else {
                return;
            };
            let updated = std::mem::take(&mut updating.assigned);
            let infos = (0..).zip(&building.graph.variables);
            let statistics = infos.filter(|(_, info)| info.is_param && !info.trained);
            let mut all = [&updated[..], &updating.counters].concat();
            all.extend(statistics.map(|(variable, _)| variable));
            // The count of the trace, if no optimizer counts by it.
            let counts = building.graph.counters.iter();
            let counts = counts.filter(|c| c.counts.is_empty()).map(|c| c.variable);
            let of_trace = |&v: &u32| &*building.graph.variables[v as usize].name == STEPS;
            all.extend(counts.filter(of_trace));
            all.sort_unstable();
            all.dedup();
            let next = |variable: u32| {
                let held = &building.variables[variable as usize];
                let next = building.graph.node(held.assigned?).inputs[0];
                Some((variable, held.node, next))
            };
            let set: Vec<(u32, NodeId, NodeId)> = all.into_iter().filter_map(next).collect();
            (updated, set)
        };
        for (variable, before, after) in set {
            let [before, after] = [before, after].map(|id| Tensor { trace: self, id });
            let kept = condition.select(after, before).cast(after.dtype());
            self.reassign(at, variable, kept);
        }
        let building = &mut *self.building.borrow_mut();
        building.is_made.push(condition.id);
        if let Some(updating) = &mut building.updating {
            updating.assigned = updated;
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

    /// Marks a state as the rounding error of a variable, with which it ends.
    pub(crate) fn mark_remainder(&self, state: State<'_>, of: u32) {
        let variables = &mut self.building.borrow_mut().graph.variables;
        if let Some(remainder) = state.variable() {
            variables[remainder as usize].remainder_of = Some(variables[of as usize].name.clone());
        }
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
        let average = self.declare_wide(at, &layer, self.info(variable).average());
        average.set(average.value() * decay + self.last_value(variable) * (1.0 - decay));
    }
}

impl Building {
    /// The sum of two gradients of a variable.
    fn sum(&mut self, at: Line, variable: u32, a: NodeId, b: NodeId) -> NodeId {
        self.origin_of(at, variable);
        self.graph.add(a, b)
    }
}
