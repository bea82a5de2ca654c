//! Optimizers: the rules by which gradients change weights. An update is part of the program like
//! any other operation, so that it runs as soon as its gradient exists, and the gradient's bytes
//! are free after it.

mod adafactor;
mod adagrad;
mod adam;
mod adamax;
mod average;
mod clip;
mod combine;
mod group;
mod lion;
mod minimize;
mod muon;
mod named;
mod rmsprop;
mod schedule;
mod sgd;
mod stored;
#[cfg(test)]
mod tests;

pub use adafactor::Adafactor;
pub use adagrad::{Adadelta, Adagrad};
pub use adam::{Adam, AdamW};
pub use adamax::{Adamax, NAdam, RAdam};
pub use average::Ema;
pub use clip::{ClipNorm, ClipValue};
pub use combine::{Maximize, Using};
pub use group::{Group, Grouped};
pub use lion::{Lamb, Lion};
pub use muon::Muon;
pub use named::Named;
pub use rmsprop::RmsProp;
pub use schedule::{Clock, Cyclic, OneCycle, Plateau, Rate, Schedule, WarmRestarts};
pub use sgd::Sgd;
pub use stored::{MasterWeights, StatesIn};

use std::panic::Location;

use slabwise_kernels::dtype::DType;
use slabwise_kernels::size::Size;
use slabwise_kernels::spec::Dims;

use crate::graph::VariableInfo;
use crate::params::Init;
use crate::tensor::Tensor;
use crate::trace::{Learning, State, Trace};
use crate::world::Shard;

/// A rule that changes weights by their gradients; see [`Trace::minimize`].
pub trait Optimizer {
    /// The mistake in its numbers, if there is one.
    fn check(&self) -> Result<(), String>;

    /// Whether each element of a weight and of its states follows from the same element of its
    /// gradient alone, so that ranks can each update [a part](crate::Strategy::ShardedState).
    fn is_elementwise(&self) -> bool {
        false
    }

    /// Adds the update of every weight to the trace.
    fn update<'t>(&self, trace: &'t Trace, weights: &[Weight<'t>]);

    /// The same on gradients scaled down so that their global norm is at most `max` (Pascanu et al.
    /// 2013).
    fn clip_norm(self, max: f64) -> ClipNorm<Self>
    where
        Self: Sized,
    {
        ClipNorm::new(self, max)
    }

    /// The same on gradients whose elements are clipped to ±`max`.
    fn clip_value(self, max: f64) -> ClipValue<Self>
    where
        Self: Sized,
    {
        ClipValue::new(self, max)
    }

    /// The same with other rules for the weights for which `chosen` is true, among those that
    /// learn. A weight in several groups follows, for each rule, the last group that sets it. A
    /// group that chooses no weight is a mistake.
    ///
    /// ```
    /// # use slabwise::optim::{AdamW, Group, Optimizer};
    /// // Neither biases nor norms decay; the head learns faster.
    /// let optimizer = AdamW::new(3e-4)
    ///     .weight_decay(0.1)
    ///     .group(|w| w.rank() < 2, Group::new().weight_decay(0.0))
    ///     .group(|w| w.name.starts_with("head."), Group::new().rate_scale(10.0));
    /// # optimizer.check().unwrap();
    /// ```
    fn group<F: Fn(&VariableInfo) -> bool>(self, chosen: F, group: Group) -> Grouped<Self, F>
    where
        Self: Sized,
    {
        Grouped::new(self, chosen, group)
    }

    /// The same with another optimizer for the weights for which `chosen` is true, among those that
    /// learn. A rule that chooses no weight is a mistake.
    ///
    /// ```
    /// # use slabwise::optim::{Adam, Optimizer, Sgd};
    /// // The head is learned by Adam, everything before it by descent.
    /// let optimizer = Sgd::new(0.01).using(|w| w.name.starts_with("head."), Adam::new(1e-3));
    /// # optimizer.check().unwrap();
    /// ```
    fn using<F: Fn(&VariableInfo) -> bool, P: Optimizer>(
        self,
        chosen: F,
        other: P,
    ) -> Using<Self, F, P>
    where
        Self: Sized,
    {
        Using {
            inner: self,
            chosen,
            other,
        }
    }

    /// The same on negated gradients, which increases the loss.
    fn maximize(self) -> Maximize<Self>
    where
        Self: Sized,
    {
        Maximize(self)
    }

    /// The same, keeping an exponential moving average of each weight in the state `ema.<weight>`:
    /// after every step average ← `decay`·average + (1 − `decay`)·weight. It starts with the
    /// weight's first value, even if that is read by
    /// [`Session::load_weights`](crate::Session::load_weights). A trace that is
    /// [averaged](Trace::averaged) reads it.
    fn ema(self, decay: f64) -> Ema<Self>
    where
        Self: Sized,
    {
        Ema::new(self, decay)
    }

    /// The same with the states of weights, such as Adam's averages, stored in this type, f16 or
    /// bf16, in half the bytes of f32. A step computes with them in f32 and rounds the new states.
    /// In bf16 a slow average then stagnates: if a step changes it by less than 2⁻⁹ of itself, as
    /// for Adam's v with its usual β₂ = 0.999, it is rounded back to its old value. In f16 numbers
    /// below 2⁻²⁵ become 0 and those from 65,520 on infinite. An average of squares such as Adam's v
    /// then forgets gradients below √(2⁻²⁵/(1 − β₂)), 0.0055 with β₂ = 0.999, and its steps grow to
    /// 1/√(1 − β₂) times their length, 32; gradients of 256 and more make it infinite, and the weight
    /// stays as it is from then on. f16 suits states of the size of gradients, such as a momentum.
    ///
    /// ```
    /// # use slabwise::{optim::{AdamW, Optimizer}, prelude::*};
    /// let optimizer = AdamW::new(1e-3).betas(0.9, 0.99).states_in(BF16);
    /// # optimizer.check().unwrap();
    /// ```
    fn states_in(self, dtype: DType) -> StatesIn<Self>
    where
        Self: Sized,
    {
        StatesIn { inner: self, dtype }
    }

    /// The same with f32 master weights for the weights that are [stored in
    /// halves](crate::Scope::stored_in): for each, the state `remainder.<weight>` holds the
    /// rounding error of the last step, so that weight + remainder is the weight in f32, and
    /// updates below the resolution of the half type accumulate. Together they take 6 bytes an
    /// element; 4 with [`states_in`](Optimizer::states_in) after it, where the remainder is rounded
    /// too (Kahan 1965). A weight that is loaded without its remainder, set or copied has a
    /// remainder of 0.
    ///
    /// ```
    /// # use slabwise::{nn::Linear, optim::{Optimizer, Sgd}, prelude::*};
    /// let params = Params::seeded(0);
    /// let layer = Linear::new(params.root().stored_in(BF16), 8, 3);
    /// let trace = Trace::training();
    /// let labels = trace.input("labels", I32, (4,));
    /// let loss = trace.input("x", F32, (4, 8)).apply(&layer).cross_entropy(labels);
    /// trace.minimize(loss, Sgd::new(1e-4).master_weights());
    /// # Session::new(Device::Cpu, params)?.compile(&trace, [loss])?;
    /// # Ok::<(), slabwise::Error>(())
    /// ```
    fn master_weights(self) -> MasterWeights<Self>
    where
        Self: Sized,
    {
        MasterWeights(self)
    }

    /// The same with separate states, named `name.adam.m.<weight>`, `name.optim.step`,
    /// `name.optim.lr` and so on. Without a name, optimizers of all programs of a session share one
    /// step counter, which is right if the programs train the same weights by the same rule;
    /// compiling one that does not is an error, which names avoid.
    fn named(self, name: &str) -> Named<Self>
    where
        Self: Sized,
    {
        Named::new(self, name)
    }
}

impl<O: Optimizer + ?Sized> Optimizer for Box<O> {
    fn check(&self) -> Result<(), String> {
        (**self).check()
    }

    fn is_elementwise(&self) -> bool {
        (**self).is_elementwise()
    }

    fn update<'t>(&self, trace: &'t Trace, weights: &[Weight<'t>]) {
        (**self).update(trace, weights);
    }
}

/// A weight, as an optimizer receives it.
#[derive(Clone, Copy, Debug)]
pub struct Weight<'t> {
    variable: u32,
    value: Tensor<'t>,
    gradient: Tensor<'t>,
    group: Group,
    shard: Option<Shard>,
    /// The type that its states are stored in.
    states: DType,
    /// The rounding error of the previous step, if it is kept.
    remainder: Option<State<'t>>,
}

impl<'t> Weight<'t> {
    fn new(learning: &Learning<'t>) -> Self {
        Weight {
            variable: learning.variable,
            value: learning.value,
            gradient: learning.gradient,
            group: Group::new(),
            shard: learning.shard,
            states: DType::F32,
            remainder: None,
        }
    }

    /// The weight's value when the step begins, in f32; of a weight of which [each rank updates a
    /// part](crate::Strategy::ShardedState), that part as one row.
    pub fn value(&self) -> Tensor<'t> {
        self.value
    }

    /// The gradient of the loss, in the shape of [`Weight::value`].
    pub fn gradient(&self) -> Tensor<'t> {
        self.gradient
    }

    /// The factor of the learning rate: 1 unless a group sets another.
    pub fn rate_scale(&self) -> f64 {
        self.group.rate_scale.unwrap_or(1.0)
    }

    /// The weight decay that its group sets in place of the optimizer's, if it sets one.
    pub fn weight_decay(&self) -> Option<f64> {
        self.group.weight_decay
    }

    /// The learning rate of this weight, given the optimizer's `rate`.
    fn scaled(&self, rate: Tensor<'t>) -> Tensor<'t> {
        if self.rate_scale() == 1.0 {
            rate
        } else {
            rate * self.rate_scale() as f32
        }
    }

    /// The same weight with another gradient.
    pub fn with_gradient(self, gradient: Tensor<'t>) -> Self {
        Weight { gradient, ..self }
    }

    /// A state that accompanies the weight: of its shape, read and set as f32, zeros at first, named `slot.weight` as in
    /// `adam.m.head.bias`, with the name of a
    /// [named](Optimizer::named) optimizer before it.
    #[track_caller]
    pub fn state(&self, slot: &str) -> State<'t> {
        self.state_from(slot, Init::Constant(0.0))
    }

    /// A [state](Weight::state) with another first value.
    #[track_caller]
    pub fn state_from(&self, slot: &str, first: Init) -> State<'t> {
        let trace = self.value.trace();
        let at = Location::caller();
        match self.shard {
            None => trace.beside_variable(at, self.variable, slot, self.states, Some, first),
            Some(shard) => trace.beside_shard(at, self.variable, slot, self.states, shard, first),
        }
    }

    /// A scalar [state](Weight::state) with a first value.
    #[track_caller]
    pub fn scalar_state(&self, slot: &str, first: Init) -> State<'t> {
        let trace = self.value.trace();
        let (at, scalar) = (Location::caller(), |_| Some(Dims::new()));
        trace.beside_variable(at, self.variable, slot, self.states, scalar, first)
    }

    /// A [state](Weight::state) of length 1 along an axis of the weight: a number for each row or
    /// column of a matrix. An axis that the weight does not have is a mistake.
    #[track_caller]
    pub fn state_along(&self, slot: &str, axis: usize) -> State<'t> {
        let trace = self.value.trace();
        let reduced = |mut dims: Dims| {
            *dims.get_mut(axis)? = Size::ONE;
            Some(dims)
        };
        trace.beside_variable(
            Location::caller(),
            self.variable,
            slot,
            self.states,
            reduced,
            Init::Constant(0.0),
        )
    }

    /// The [state](Weight::state) `slot` as an exponential moving average, after this step:
    /// average ← `decay`·average + (1 − `decay`)·`value`.
    #[track_caller]
    pub fn average(&self, slot: &str, decay: f64, value: Tensor<'t>) -> Tensor<'t> {
        let state = self.state(slot);
        let next = state.value() * decay as f32 + value * (1.0 - decay) as f32;
        state.set(next);
        next
    }

    /// The gradient with λ times the weight added, λ the decay of its group, else `usual`.
    fn decayed_gradient(&self, usual: f64) -> Tensor<'t> {
        match self.weight_decay().unwrap_or(usual) {
            0.0 => self.gradient,
            decay => self.gradient + self.value * decay as f32,
        }
    }

    /// The weight without λ times the rate of it, λ the decay of its group, else `usual`.
    fn decayed_value(&self, usual: f64, rate: Tensor<'t>) -> Tensor<'t> {
        match self.weight_decay().unwrap_or(usual) {
            0.0 => self.value,
            decay => self.value * (1.0 - rate * decay as f32),
        }
    }

    /// Makes `value`, rounded to the type the weight is stored in, its value after the step.
    #[track_caller]
    pub fn set(&self, value: Tensor<'t>) {
        let (trace, at) = (self.value.trace(), Location::caller());
        let stored = trace.info(self.variable).dtype;
        // Ranks exchange the stored type.
        let value = if stored.is_half() {
            let rounded = value.cast(stored);
            if let Some(remainder) = self.remainder {
                remainder.set(value - rounded.cast(DType::F32));
            }
            rounded
        } else {
            value
        };
        let value = match self.shard {
            None => value,
            Some(shard) => trace.whole_of(at, self.variable, value, shard),
        };
        trace.assign(at, self.variable, value);
    }
}

/// 1 − βᵗ. For β close to 1 this is a small difference of large numbers, hence −(e^{t·ln β} − 1),
/// with ln β taken in f64.
fn correction(t: Tensor<'_>, beta: f64) -> Tensor<'_> {
    -(t * beta.ln() as f32).expm1()
}

/// A number that must be finite and at least 0.
fn at_least_zero(what: &str, value: f64) -> Result<(), String> {
    if value.is_finite() && value >= 0.0 {
        Ok(())
    } else {
        Err(format!(
            "{what} is {value}, not a finite number of at least 0"
        ))
    }
}

/// A decay rate: at least 0 and below 1.
fn below_one(what: &str, value: f64) -> Result<(), String> {
    if (0.0..1.0).contains(&value) {
        Ok(())
    } else {
        Err(format!("{what} is {value}, not in 0..1"))
    }
}
