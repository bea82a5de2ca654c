//! Scaling of the loss, so that gradients in f16 are not lost below its smallest number.

use slabwise_kernels::dtype::DType;

use super::handle::Tensor;
use super::operand::Lift;
use super::ranks::sum_over;
use super::state::State;
use super::{Line, Trace};
use crate::params::Init;
use crate::world::Distribution;

/// The scale, f32.
const SCALE: &str = "optim.loss_scale";
/// The number of steps in a row whose gradients were finite, i32.
const FINITE_STEPS: &str = "optim.finite_steps";

/// The factor that a loss is multiplied with before it is differentiated (Micikevicius et al. 2018):
/// see [`Trace::with_loss_scale`].
///
/// ```
/// # use slabwise::LossScale;
/// let scale = LossScale::dynamic().initial(1024.0).interval(500);
/// # scale.check().unwrap();
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossScale {
    initial: f32,
    growth: f32,
    backoff: f32,
    /// `None` if the scale stays as it is.
    interval: Option<u32>,
}

impl LossScale {
    /// A scale that adapts: initially 2¹⁶, halved by a step whose gradients are not all finite, and
    /// doubled after 2,000 steps in a row whose gradients are, as in PyTorch. It is kept in the
    /// states "optim.loss_scale" (f32) and "optim.finite_steps" (i32), which are saved with the
    /// weights.
    pub fn dynamic() -> Self {
        LossScale {
            initial: 65_536.0,
            growth: 2.0,
            backoff: 0.5,
            interval: Some(2_000),
        }
    }

    /// A fixed scale.
    pub fn fixed(scale: f32) -> Self {
        LossScale {
            initial: scale,
            interval: None,
            ..LossScale::dynamic()
        }
    }

    /// With this scale in the first step.
    pub fn initial(mut self, scale: f32) -> Self {
        self.initial = scale;
        self
    }

    /// Growing by this factor, at least 1.
    pub fn growth(mut self, factor: f32) -> Self {
        self.growth = factor;
        self
    }

    /// Falling by this factor, above 0 and below 1, in a step that is skipped.
    pub fn backoff(mut self, factor: f32) -> Self {
        self.backoff = factor;
        self
    }

    /// Growing after this many steps in a row, at least 1.
    pub fn interval(mut self, steps: u32) -> Self {
        self.interval = Some(steps);
        self
    }

    /// The mistake in its numbers, if there is one.
    pub fn check(&self) -> Result<(), String> {
        let (initial, growth, backoff) = (self.initial, self.growth, self.backoff);
        if !(initial.is_normal() && initial > 0.0) {
            return Err(format!(
                "the loss scale is {initial}, not a finite number above 0"
            ));
        }
        if !(growth.is_finite() && growth >= 1.0) {
            return Err(format!(
                "the loss scale grows by {growth}, not a finite factor of at least 1"
            ));
        }
        if !(backoff > 0.0 && backoff < 1.0) {
            return Err(format!(
                "the loss scale falls by {backoff}, not a factor above 0 and below 1"
            ));
        }
        if self.interval == Some(0) {
            return Err("the loss scale grows after 0 steps, not at least 1".into());
        }
        Ok(())
    }
}

/// The scale of a trace's losses.
#[derive(Clone, Copy)]
pub(crate) struct Scaling<'t> {
    rule: LossScale,
    /// The scale of this step.
    pub scale: Tensor<'t>,
    /// The scale and the finite steps in a row, if the scale adapts.
    states: Option<[State<'t>; 2]>,
}

impl Trace {
    /// The same with losses that [`Trace::minimize`] scales, for products in
    /// [f16](crate::Precision::F16): their gradients are often smaller than the smallest number of
    /// f16, 6·10⁻⁸, and are zero then. The optimizer gets gradients that are scaled back. A step
    /// whose gradients are not all finite, because the scale was too large, changes no weight, no
    /// state of the optimizer, no count of steps and no statistic of the model: it is skipped. For
    /// that the gradients of all weights are kept until the last of them is known.
    ///
    /// ```
    /// # use slabwise::prelude::*;
    /// # use slabwise::{LossScale, Precision, nn::Linear, optim::Adam};
    /// # let params = Params::seeded(0);
    /// # let layer = Linear::new(&params.root() / "layer", 8, 3);
    /// let trace = Trace::training()
    ///     .with_precision(Precision::F16)
    ///     .with_loss_scale(LossScale::dynamic());
    /// let labels = trace.input("labels", I32, (4,));
    /// let loss = trace.input("x", F32, (4, 8)).apply(&layer).cross_entropy(labels);
    /// trace.minimize(loss, Adam::new(1e-3));
    /// # let mut session = Session::new(Device::Cpu, params)?;
    /// # session.compile(&trace, [loss])?;
    /// assert_eq!(session.value("optim.loss_scale")?[[]], 65536.0);
    /// # Ok::<(), slabwise::Error>(())
    /// ```
    #[must_use]
    pub fn with_loss_scale(mut self, scale: LossScale) -> Self {
        self.loss_scale = Some(scale);
        self
    }

    /// The mistake in the numbers of the loss scale, if there is one.
    pub(crate) fn check_loss_scale(&self) -> Result<(), String> {
        self.loss_scale.map_or(Ok(()), |scale| scale.check())
    }

    /// The scale of the next loss.
    pub(crate) fn scaling(&self, at: Line) -> Option<Scaling<'_>> {
        let rule = self.loss_scale?;
        let scale = Init::Constant(rule.initial);
        let adapts = rule.interval.is_some();
        let states = adapts.then(|| {
            [
                self.owned_state(SCALE, DType::F32, scale),
                self.owned_state(FINITE_STEPS, DType::I32, Init::Constant(0.0)),
            ]
        });
        let scale = match states {
            Some([scale, _]) => scale.value(),
            None => rule.initial.lift(self, DType::F32, at),
        };
        Some(Scaling {
            rule,
            scale,
            states,
        })
    }

    /// Whether all elements of these gradients are finite, on all ranks: a truth value.
    fn all_finite<'t>(
        &'t self,
        at: Line,
        gradients: impl Iterator<Item = Tensor<'t>>,
    ) -> Tensor<'t> {
        let others = |g: Tensor<'t>| g.is_finite().select(0.0, 1.0).sum();
        let count = gradients.map(others).reduce(|a, b| a + b);
        let Some(count) = count else {
            return self.poisoned();
        };
        let count = match self.distribution() {
            Some(distribution) => self.record(at, &[count], |g, ids| {
                let others = distribution.axes.iter().flat_map(|axes| axes.others());
                let groups = std::iter::once(distribution.group).chain(others);
                Ok(groups.fold(ids[0], |count, group| {
                    let along = Distribution {
                        group,
                        ..distribution
                    };
                    sum_over(g, count, &along, group)
                }))
            }),
            None => count,
        };
        count.equal(0.0)
    }
}

impl<'t> Scaling<'t> {
    /// Records an update by gradients of the scaled loss: `update` gets the factor that scales them
    /// back.
    pub fn update(
        &self,
        at: Line,
        gradients: impl Iterator<Item = Tensor<'t>>,
        update: impl FnOnce(Tensor<'t>),
    ) {
        let trace = self.scale.trace();
        let finite = trace.all_finite(at, gradients);
        update(1.0 / self.scale);
        trace.skip_unless(at, finite);
        let (Some([scale, steps]), Some(interval)) = (self.states, self.rule.interval) else {
            return;
        };
        // A second update in one step continues the rule.
        let (now, done) = (scale.last(), steps.last() + 1);
        let grows = done.ge(i32::try_from(interval).unwrap_or(i32::MAX));
        // Powers of two at both ends of f32: neither infinite nor 0.
        let most = 2.0f32.powi(f32::MAX_EXP - 1);
        let grown = grows.select((now * self.rule.growth).minimum(most), now);
        let fallen = (now * self.rule.backoff).maximum(f32::MIN_POSITIVE);
        let next = finite.select(grown, fallen);
        let counted = finite.and(!grows).select(done, 0);
        scale.advance(|_| next);
        steps.advance(|_| counted);
    }
}
