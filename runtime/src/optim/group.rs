//! Parameter groups: weights with another learning rate or weight decay than the rest.

use super::{Optimizer, Weight, at_least_zero};
use crate::graph::VariableInfo;
use crate::trace::{Trace, names};

/// Settings that differ for the weights of a group; see [`Optimizer::group`].
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Group {
    pub(super) rate_scale: Option<f64>,
    pub(super) weight_decay: Option<f64>,
}

impl Group {
    /// Nothing differs yet.
    pub fn new() -> Self {
        Group::default()
    }

    /// Multiplies the optimizer's learning rate by this.
    pub fn rate_scale(mut self, scale: f64) -> Self {
        self.rate_scale = Some(scale);
        self
    }

    /// Replaces the optimizer's weight decay.
    pub fn weight_decay(mut self, weight_decay: f64) -> Self {
        self.weight_decay = Some(weight_decay);
        self
    }

    /// This group's settings, else the other's.
    fn over(self, other: Group) -> Group {
        Group {
            rate_scale: self.rate_scale.or(other.rate_scale),
            weight_decay: self.weight_decay.or(other.weight_decay),
        }
    }
}

/// An optimizer with a group of weights that has other rules; see [`Optimizer::group`].
#[derive(Clone, Debug)]
pub struct Grouped<O, F> {
    inner: O,
    chosen: F,
    group: Group,
}

impl<O, F> Grouped<O, F> {
    pub(super) fn new(inner: O, chosen: F, group: Group) -> Self {
        Grouped {
            inner,
            chosen,
            group,
        }
    }
}

impl<O: Optimizer, F: Fn(&VariableInfo) -> bool> Optimizer for Grouped<O, F> {
    fn check(&self) -> Result<(), String> {
        at_least_zero(
            "group: the scale of the learning rate",
            self.group.rate_scale.unwrap_or(1.0),
        )?;
        at_least_zero(
            "group: the weight decay",
            self.group.weight_decay.unwrap_or(0.0),
        )?;
        self.inner.check()
    }

    fn is_elementwise(&self) -> bool {
        self.inner.is_elementwise()
    }

    fn update<'t>(&self, trace: &'t Trace, weights: &[Weight<'t>]) {
        let infos: Vec<VariableInfo> = weights.iter().map(|w| trace.info(w.variable)).collect();
        if !infos.iter().any(&self.chosen) {
            let known = names(infos.iter());
            return trace.fail_update(format!(
                "a group chooses none of the parameters that learn; they are {known}"
            ));
        }
        let grouped = |(w, info): (&Weight<'t>, &VariableInfo)| {
            // Groups added later come first here.
            let group = if (self.chosen)(info) {
                w.group.over(self.group)
            } else {
                w.group
            };
            Weight { group, ..*w }
        };
        let weights: Vec<Weight<'t>> = weights.iter().zip(&infos).map(grouped).collect();
        self.inner.update(trace, &weights);
    }
}
