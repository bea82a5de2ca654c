//! A rate that the program's user lowers when a measure stops improving.

use slabwise_kernels::dtype::DType;

use super::{Clock, Rate, at_least_zero};
use crate::params::Init;
use crate::tensor::Tensor;
use crate::trace::RATE;

/// A rate that is multiplied by a factor when a measure, such as the loss on validation data, has
/// stopped improving; as PyTorch's `ReduceLROnPlateau`. The measure is
/// [observed](crate::Session::observe) between steps. The rate is the state "optim.lr", as that of
/// [`Schedule::manual`](super::Schedule::manual), and the memory of the rule the state
/// "optim.plateau", so that both are saved with the weights and a resumed run continues identically.
/// Optimizers that share a plateau share both; for a plateau of its own an optimizer has a
/// [name](Plateau::of_optimizer).
///
/// ```
/// # use slabwise::prelude::*;
/// # use slabwise::optim::{Adam, Plateau};
/// # let params = Params::seeded(0);
/// # let w = params.root().param("w", (), Init::Constant(1.0));
/// let plateau = Plateau::new(1e-3).patience(2);
/// let trace = Trace::training();
/// let loss = trace.param(&w).square();
/// trace.minimize(loss, Adam::new(plateau.clone()));
/// let mut session = Session::new(Device::Cpu, params)?;
/// let step = session.compile(&trace, [loss])?;
/// let loss = session.run(&step, ())?[0].item();
/// let rate = session.observe(&plateau, loss)?;
/// assert_eq!(rate, 1e-3);
/// # Ok::<(), slabwise::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Plateau {
    rate: f64,
    factor: f64,
    patience: u32,
    threshold: f64,
    cooldown: u32,
    floor: f64,
    larger_is_better: bool,
    optimizer: String,
}

/// The best measure, whether there is one, the observations without improvement, and those before
/// the rule counts again.
const MEMORY: &str = "optim.plateau";

impl Plateau {
    /// A tenth of the rate after 10 observations without an improvement by 0.01 % of the smallest
    /// measure.
    pub fn new(rate: f64) -> Self {
        Plateau {
            rate,
            factor: 0.1,
            patience: 10,
            threshold: 1e-4,
            cooldown: 0,
            floor: 0.0,
            larger_is_better: false,
            optimizer: String::new(),
        }
    }

    /// With this factor, below 1.
    pub fn factor(mut self, factor: f64) -> Self {
        self.factor = factor;
        self
    }

    /// With this many observations without improvement that are accepted.
    pub fn patience(mut self, observations: u32) -> Self {
        self.patience = observations;
        self
    }

    /// With this least improvement, relative to the best measure.
    pub fn threshold(mut self, threshold: f64) -> Self {
        self.threshold = threshold;
        self
    }

    /// With this many observations after a change that do not count as bad.
    pub fn cooldown(mut self, observations: u32) -> Self {
        self.cooldown = observations;
        self
    }

    /// With this lowest rate.
    pub fn floor(mut self, floor: f64) -> Self {
        self.floor = floor;
        self
    }

    /// For a measure that grows, such as an accuracy.
    pub fn larger_is_better(mut self) -> Self {
        self.larger_is_better = true;
        self
    }

    /// For a [named](crate::optim::Optimizer::named) optimizer.
    pub fn of_optimizer(mut self, name: &str) -> Self {
        self.optimizer = format!("{name}.");
        self
    }

    /// The names of the states that hold the rate and the memory.
    pub(crate) fn states(&self) -> [String; 2] {
        [RATE, MEMORY].map(|name| format!("{}{name}", self.optimizer))
    }

    /// Rate and memory after a measure.
    pub(crate) fn observed(
        &self,
        mut rate: f32,
        [mut best, seen, mut bad, mut cooling]: [f32; 4],
        measure: f32,
    ) -> (f32, [f32; 4]) {
        let threshold = self.threshold as f32;
        let improved = match (seen != 0.0, self.larger_is_better) {
            (false, _) => !measure.is_nan(),
            (true, false) => measure < best * (1.0 - threshold),
            (true, true) => measure > best * (1.0 + threshold),
        };
        if improved {
            (best, bad) = (measure, 0.0);
        } else {
            bad += 1.0;
        }
        if cooling > 0.0 {
            (cooling, bad) = (cooling - 1.0, 0.0);
        }
        if bad > self.patience as f32 {
            // A change of less than 1e-8 is none.
            let lower = (rate * self.factor as f32).max(self.floor as f32);
            if rate - lower > 1e-8 {
                rate = lower;
            }
            (cooling, bad) = (self.cooldown as f32, 0.0);
        }
        let seen = if improved { 1.0 } else { seen };
        (rate, [best, seen, bad, cooling])
    }
}

impl Rate for Plateau {
    fn check(&self) -> Result<(), String> {
        at_least_zero("the learning rate", self.rate)?;
        at_least_zero("the lowest learning rate", self.floor)?;
        at_least_zero("the threshold", self.threshold)?;
        super::super::below_one("the factor of the learning rate", self.factor)
    }

    fn rate<'t>(&self, clock: Clock<'t>) -> Tensor<'t> {
        let trace = clock.trace();
        trace.owned_state_of(MEMORY, DType::F32, [4u32], Init::Constant(0.0));
        let first = Init::Constant(self.rate as f32);
        trace.owned_state(RATE, DType::F32, first).value()
    }
}
