//! Learning: which parameters of a model change, by which gradients, from one batch or from several
//! micro-batches.

use std::collections::BTreeMap;
use std::panic::Location;
use std::rc::Rc;
use std::sync::Arc;

use super::ranks::Summed;
use super::{Building, Line, Trace};
use crate::graph::{Graph, Phase, VariableInfo};
use crate::ops::{GraphBuilder, NodeId};
use crate::optim::{Optimizer, Weight};
use crate::tensor::Tensor;
use crate::world::{Spread, Strategy, Tree, TreeSum};

/// An update that is being recorded.
#[derive(Default)]
pub(super) struct Updating {
    /// The variables it has set so far.
    pub assigned: Vec<u32>,
    /// The step counters it has read.
    pub counters: Vec<u32>,
}

/// A rule that freezes weights, and the user's line of it.
#[derive(Clone)]
pub(super) struct Frozen {
    at: Line,
    chosen: Rc<dyn Fn(&VariableInfo) -> bool>,
}

/// The sums over the parts of a step.
struct PartSums<'t> {
    tree: Tree,
    /// The share of each part in the mean, if the step is spread over ranks.
    share: Option<Tensor<'t>>,
    loss: TreeSum<Tensor<'t>>,
    gradients: BTreeMap<u32, TreeSum<NodeId>>,
}

impl<'t> PartSums<'t> {
    fn new(tree: Tree, share: Option<Tensor<'t>>) -> Self {
        PartSums {
            loss: tree.sum(),
            gradients: BTreeMap::new(),
            tree,
            share,
        }
    }
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

    /// Makes every step change the parameters that `loss` depends on, to decrease it. The loss is
    /// an f32 scalar.
    #[track_caller]
    pub fn minimize<'t>(&'t self, loss: Tensor<'t>, optimizer: impl Optimizer) {
        let at = Location::caller();
        if !self.may_learn(at, &optimizer) {
            return;
        }
        let loss = self.scalar_loss(at, "minimize", loss);
        let spread = self.spread();
        if let Some(spread) = spread.filter(|s| s.grains != s.ranks) {
            let each = spread.grains / spread.ranks;
            let message = format!(
                "minimize: each of {} ranks runs {each} of {} grains; use minimize_in_parts({each}, …)",
                spread.ranks, spread.grains
            );
            return self.building.borrow_mut().mistake(at, "", message);
        }
        // Scaled before differentiation, so that the sums are gradients of the mean.
        let loss = match spread {
            Some(spread) => self.on_behalf(at, || loss * self.share(at, spread, 1)),
            None => loss,
        };
        if loss.is_poisoned() {
            return;
        }
        let learning = self.learning();
        let gradients = self.building.borrow_mut().gradients(loss.id, learning);
        self.update(at, gradients, &optimizer);
    }

    /// [`Trace::minimize`] of the mean of `parts` losses, whose gradients are added up one after
    /// the other (gradient accumulation over micro-batches): the activations of one micro-batch end
    /// before those of the next begin, so that a step needs the memory of one micro-batch and one
    /// gradient for each weight. `loss` gives the loss of the micro-batch of a number from 0; the
    /// result is their mean. For micro-batches of equal size that is the loss of the whole batch
    /// and, apart from rounding, its step; batch norms use the statistics of each micro-batch.
    ///
    /// ```
    /// # use slabwise::prelude::*;
    /// # use slabwise::{nn::Linear, optim::Sgd};
    /// # let params = Params::seeded(0);
    /// # let layer = Linear::new(&params.root() / "layer", 8, 3);
    /// let trace = Trace::training();
    /// let x = trace.input("x", F32, (64, 8)).split(0, 4);
    /// let labels = trace.input("labels", I32, (64,)).split(0, 4);
    /// let loss = trace.minimize_in_parts(4, Sgd::new(0.1), |i| x[i].apply(&layer).cross_entropy(labels[i]));
    /// # Session::new(Device::Cpu, params)?.compile(&trace, [loss])?;
    /// # Ok::<(), slabwise::Error>(())
    /// ```
    #[track_caller]
    pub fn minimize_in_parts<'t>(
        &'t self,
        parts: usize,
        optimizer: impl Optimizer,
        mut loss: impl FnMut(usize) -> Tensor<'t>,
    ) -> Tensor<'t> {
        let at = Location::caller();
        if parts == 0 {
            return self.fail(
                at,
                "",
                "minimize_in_parts: a batch of 0 parts has no loss".into(),
            );
        }
        if !self.may_learn(at, &optimizer) {
            return self.poisoned();
        }
        // The model's parameters say how the step is spread, and no part has read them yet.
        let mut sums: Option<PartSums<'t>> = None;
        for part in 0..parts {
            {
                let building = &mut *self.building.borrow_mut();
                building.graph.current_part += 1;
                building.part = Some(part);
            }
            let loss = self.scalar_loss(at, "minimize_in_parts", loss(part));
            let sums = match &mut sums {
                Some(sums) => sums,
                None => match self.part_sums(at, parts) {
                    Ok(new) => sums.insert(new),
                    Err(message) => return self.fail(at, "", message),
                },
            };
            // Scaled before differentiation, so that the sums are gradients of the mean.
            let loss = self.on_behalf(at, || match sums.share {
                Some(share) => loss * share,
                None => loss * (1.0 / parts as f32),
            });
            if loss.is_poisoned() {
                return loss;
            }
            sums.loss
                .push(loss, &mut |a, b| self.on_behalf(at, || a + b));
            let learning = self.learning();
            let building = &mut *self.building.borrow_mut();
            for (variable, gradient) in building.gradients(loss.id, learning) {
                let new = || sums.tree.sum();
                let sum = sums.gradients.entry(variable).or_insert_with(new);
                sum.push(gradient, &mut |a, b| building.sum(at, variable, a, b));
            }
        }
        {
            let building = &mut *self.building.borrow_mut();
            building.graph.current_part += 1;
            building.part = None;
        }
        let Some(PartSums {
            gradients, loss, ..
        }) = sums
        else {
            return self.poisoned();
        };
        let gradients = gradients.into_iter();
        let gradients = gradients.filter_map(|(variable, sum)| Some((variable, sum.finish()?)));
        self.update(at, gradients.collect(), &optimizer);
        let total = loss.finish().unwrap_or(self.poisoned());
        if self.spread().is_some() {
            self.on_behalf(at, || total.sum_over_ranks())
        } else {
            total
        }
    }

    /// The sums over `parts` parts of a step, without any yet.
    fn part_sums(&self, at: Line, parts: usize) -> Result<PartSums<'_>, String> {
        let Some(spread) = self.spread() else {
            // One after the other, which holds the fewest gradients.
            return Ok(PartSums::new(Tree::chain(parts), None));
        };
        let Spread { ranks, grains, .. } = spread;
        if grains / ranks != parts {
            return Err(format!(
                "minimize_in_parts({parts}): each of {ranks} ranks runs {} of {grains} grains, one in each part",
                grains / ranks
            ));
        }
        let below = Tree::of(grains).split(ranks).map(|(below, _)| below);
        let share = self.share(at, spread, parts);
        Ok(PartSums::new(
            below.unwrap_or(Tree::chain(parts)),
            Some(share),
        ))
    }

    /// Whether this trace can learn by the optimizer; if not, records the mistake.
    fn may_learn(&self, at: Line, optimizer: &impl Optimizer) -> bool {
        let fault = match optimizer.check() {
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

    /// Adds the optimizer's update of the weights with these gradients.
    fn update(&self, at: Line, gradients: Vec<(u32, NodeId)>, optimizer: &impl Optimizer) {
        self.check_frozen();
        let spread = self.spread().filter(|spread| spread.ranks > 1);
        if spread.is_some_and(|s| s.strategy == Strategy::ShardedState)
            && !optimizer.is_elementwise()
        {
            let message = "minimize: this optimizer reads more of a weight than the element that it updates, \
                           so ranks cannot hold parts of its state; Strategy::Replicated can be used"
                .into();
            return self.building.borrow_mut().mistake(at, "", message);
        }
        let gradients: Vec<(u32, Summed)> = match spread {
            Some(spread) => self
                .building
                .borrow_mut()
                .gradients_of_all_ranks(at, gradients, spread),
            None => {
                let whole = gradients.into_iter();
                whole.map(|(v, g)| (v, Summed::Whole(g))).collect()
            }
        };
        let values = {
            let building = &mut *self.building.borrow_mut();
            if gradients.is_empty() {
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
            let value = |v: u32| Tensor {
                trace: self,
                id: building.variables[v as usize].node,
            };
            let values: Vec<Tensor<'_>> = gradients.iter().map(|(v, _)| value(*v)).collect();
            values
        };
        let weights: Vec<Weight<'_>> = gradients
            .into_iter()
            .zip(values)
            .map(|((v, gradient), value)| match gradient {
                Summed::Whole(id) => Weight::new(v, value, Tensor { trace: self, id }),
                Summed::Shard(id, shard) => {
                    let part = self.part_of(at, value, shard);
                    Weight::new(v, part, Tensor { trace: self, id }).of_shard(shard)
                }
            })
            .collect();
        self.on_behalf(at, || optimizer.update(self, &weights));
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
        self.origin_of(at, variable);
        self.graph.add(a, b)
    }
}
