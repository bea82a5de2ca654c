//! The update of a model's weights by an optimizer, from one batch or from several micro-batches.

use std::panic::Location;

use super::{Optimizer, Weight};
use crate::tensor::Tensor;
use crate::trace::{Learning, Line, PartSums, Scaling, Trace};

impl Trace {
    /// Makes every step change the parameters that `loss` depends on, to decrease it. The loss is
    /// an f32 scalar.
    #[track_caller]
    pub fn minimize<'t>(&'t self, loss: Tensor<'t>, optimizer: impl Optimizer) {
        let at = Location::caller();
        if !self.may_learn(at, optimizer.check()) {
            return;
        }
        let loss = self.scalar_loss(at, "minimize", loss);
        let distribution = self.distribution();
        if let Some(distribution) = distribution.filter(|d| d.grains != d.ranks()) {
            let each = distribution.grains / distribution.ranks();
            let message = format!(
                "minimize: each of {} ranks runs {each} of {} grains; use minimize_in_parts({each}, …)",
                distribution.ranks(),
                distribution.grains
            );
            self.fail(at, "", message);
            return;
        }
        // Scaled before differentiation, so that the sums are gradients of the mean.
        let loss = match distribution {
            Some(distribution) => self.on_behalf(at, || loss * self.share(at, distribution, 1)),
            None => loss,
        };
        let scaling = self.scaling(at);
        let loss = self.scaled_loss(at, scaling, loss);
        if loss.is_poisoned() {
            return;
        }
        let gradients = self.weight_gradients(loss);
        self.record_update(at, gradients, optimizer.is_elementwise(), |learning| {
            update_by(&optimizer, self, &learning, (at, scaling))
        });
    }

    /// [`Trace::minimize`] of the mean of `parts` losses, whose gradients are added one after
    /// the other (gradient accumulation over micro-batches): the activations of one micro-batch end
    /// before those of the next begin, so that a step needs the memory of one micro-batch and one
    /// gradient for each weight. `loss` gives the loss of the micro-batch of a number from 0; the
    /// result is their mean. For micro-batches of equal size that is the loss of the whole batch
    /// and, apart from rounding, its step; batch norms use the statistics of each micro-batch. So it
    /// is for a batch of bounded length whose rows [`Tensor::shares`] cuts, because their losses are
    /// then weighted by their rows. To cut two lengths into as many shares is a mistake, because
    /// either may be the batch.
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
    ///
    /// A mean over the labels of a part that are not
    /// [ignored](crate::tensor::CrossEntropy::ignore) would count a label more in a part with few of
    /// them. The sum of a part by the mean number of labels is right:
    ///
    /// ```
    /// # use slabwise::prelude::*;
    /// # use slabwise::{nn::Linear, optim::Sgd};
    /// use slabwise::tensor::{CrossEntropy, Reduction};
    /// # let params = Params::seeded(0);
    /// # let layer = Linear::new(&params.root() / "layer", 8, 3);
    /// # let trace = Trace::training();
    /// # let (x, labels) = (trace.input("x", F32, (64, 8)), trace.input("labels", I32, (64,)));
    /// let options = CrossEntropy {
    ///     ignore: Some(-100),
    ///     reduction: Reduction::Sum,
    ///     ..CrossEntropy::default()
    /// };
    /// let each = labels.not_equal(-100).cast(F32).sum() / 4.0;
    /// let (x, labels) = (x.split(0, 4), labels.split(0, 4));
    /// let loss = trace.minimize_in_parts(4, Sgd::new(0.1), |i| {
    ///     x[i].apply(&layer).cross_entropy_with(labels[i], options) / each
    /// });
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
        if !self.may_learn(at, optimizer.check()) {
            return self.poisoned();
        }
        let scaling = self.scaling(at);
        // The model's parameters say how the step is distributed, and no part has read them yet.
        let mut sums: Option<PartSums<'t>> = None;
        for part in 0..parts {
            self.begin_part(Some(part));
            let loss = self.scalar_loss(at, "minimize_in_parts", loss(part));
            let sums = match &mut sums {
                Some(sums) => sums,
                None => match self.part_sums(at, parts) {
                    Ok(new) => sums.insert(new),
                    Err(message) => return self.fail(at, "", message),
                },
            };
            // Scaled before differentiation, so that the sums are gradients of the mean.
            let loss = self.on_behalf(at, || match &sums.shares {
                Some(shares) => loss * shares[part],
                None => loss * (1.0 / parts as f32),
            });
            if loss.is_poisoned() {
                return loss;
            }
            sums.loss
                .push(loss, &mut |a, b| self.on_behalf(at, || a + b));
            let scaled = self.scaled_loss(at, scaling, loss);
            self.add_weight_gradients(at, sums, scaled);
        }
        self.begin_part(None);
        let Some(sums) = sums else {
            return self.poisoned();
        };
        let is_distributed = self.distribution().is_some();
        let (total, gradients) = sums.finish();
        self.record_update(at, gradients, optimizer.is_elementwise(), |learning| {
            update_by(&optimizer, self, &learning, (at, scaling))
        });
        let total = total.unwrap_or(self.poisoned());
        if is_distributed {
            self.on_behalf(at, || total.sum_over_ranks())
        } else {
            total
        }
    }

    /// A loss as it is differentiated.
    fn scaled_loss<'t>(
        &'t self,
        at: Line,
        scaling: Option<Scaling<'t>>,
        loss: Tensor<'t>,
    ) -> Tensor<'t> {
        match scaling {
            Some(scaling) => self.on_behalf(at, || loss * scaling.scale),
            None => loss,
        }
    }
}

/// Adds the optimizer's update of these weights to the trace.
fn update_by<'t>(
    optimizer: &impl Optimizer,
    trace: &'t Trace,
    learning: &[Learning<'t>],
    (at, scaling): (Line, Option<Scaling<'t>>),
) {
    let weights: Vec<Weight<'t>> = learning.iter().map(Weight::new).collect();
    let Some(scaling) = scaling else {
        return optimizer.update(trace, &weights);
    };
    let scaled = weights.iter().map(Weight::gradient);
    scaling.update(at, scaled, |back| {
        let gradient = |w: &Weight<'t>| w.with_gradient(w.gradient() * back);
        let weights: Vec<Weight<'t>> = weights.iter().map(gradient).collect();
        optimizer.update(trace, &weights);
    });
}
