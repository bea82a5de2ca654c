//! Learning-rate schedules that follow the step counter, computed inside of the program: their only
//! state is the counter, so that a resumed run continues where it stopped.

mod cycles;
mod plateau;

use std::f32::consts::PI;
use std::fmt;
use std::rc::Rc;

use slabwise_kernels::dtype::DType;

pub use cycles::{Cyclic, OneCycle, WarmRestarts};
pub use plateau::Plateau;

use super::at_least_zero;
use crate::params::Init;
use crate::tensor::Tensor;
use crate::trace::{RATE, Trace};

/// A rule for the learning rate of each step. Any such rule is a [`Schedule`] by `into()`, as the
/// constructors of optimizers take it.
///
/// ```
/// # use slabwise::prelude::*;
/// # use slabwise::optim::{Adam, Clock, Rate};
/// /// 1/√(1 + t) of a first rate.
/// struct Root(f64);
///
/// impl Rate for Root {
///     fn rate<'t>(&self, clock: Clock<'t>) -> Tensor<'t> {
///         (clock.completed().cast(F32) + 1.0).rsqrt() * self.0 as f32
///     }
/// }
///
/// let optimizer = Adam::new(Root(1e-3));
/// # optimizer.check().unwrap();
/// ```
pub trait Rate {
    /// The mistake in its numbers, if there is one.
    fn check(&self) -> Result<(), String> {
        Ok(())
    }

    /// The learning rate of the step at which the clock stands: an f32 scalar.
    fn rate<'t>(&self, clock: Clock<'t>) -> Tensor<'t>;
}

/// The steps that a [`Rate`] depends on.
#[derive(Clone, Copy, Debug)]
pub struct Clock<'t> {
    trace: &'t Trace,
    begun: u32,
}

impl<'t> Clock<'t> {
    /// The program that contains the rate.
    pub fn trace(self) -> &'t Trace {
        self.trace
    }

    /// The number of steps completed since the schedule began, an i32 scalar: 0 in its first step
    /// and before. The optimizer counts its steps only if some rule asks.
    #[track_caller]
    pub fn completed(self) -> Tensor<'t> {
        let done = self.trace.completed_steps();
        if self.begun == 0 {
            done
        } else {
            // Integers up to here, because a float would lose count after 2²⁴ steps.
            (done - self.begun as i32).maximum(0)
        }
    }

    /// The clock of a schedule that begins after a number of steps of this one.
    pub fn after(self, steps: u32) -> Clock<'t> {
        Clock {
            begun: self.begun.saturating_add(steps),
            ..self
        }
    }
}

/// The learning rate over the steps. A plain number is a constant rate; any [`Rate`] becomes a
/// schedule by `into()`.
///
/// ```
/// # use slabwise::optim::{AdamW, OneCycle, Optimizer, Schedule};
/// // A warm-up, a cosine, and its last rate from then on.
/// let schedule = Schedule::cosine(3e-4, 10_000).floor(3e-5).warmup(500);
/// // A tenth of the rate while the first thousand steps freeze most layers.
/// let chain = Schedule::constant(3e-5).then(1000, schedule);
/// # AdamW::new(chain).check().unwrap();
/// # AdamW::new(OneCycle::new(3e-4, 10_000)).check().unwrap();
/// ```
#[derive(Clone, Debug)]
pub struct Schedule {
    course: Course,
    rate: f64,
    warmup: u32,
    /// A floor that the course does not have.
    unused_floor: Option<f64>,
}

#[derive(Clone, Debug)]
enum Course {
    Constant,
    Manual,
    Step { every: u32, factor: f64 },
    Steps { at: Vec<u32>, factor: f64 },
    Exponential { factor: f64 },
    Linear { to: f64, steps: u32 },
    Cosine { total: u32, floor: f64 },
    Polynomial { total: u32, power: f64, floor: f64 },
    InverseSqrt { peak: u32 },
    Own(Own),
    Then(Box<Schedule>, u32, Box<Schedule>),
    Times(Box<Schedule>, Box<Schedule>),
}

/// A user's rule.
#[derive(Clone)]
struct Own(Rc<dyn Rate>);

impl fmt::Debug for Own {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Rate")
    }
}

/// A rule that a function computes.
struct Function<F>(F);

impl<F: for<'t> Fn(Clock<'t>) -> Tensor<'t>> Rate for Function<F> {
    fn rate<'t>(&self, clock: Clock<'t>) -> Tensor<'t> {
        (self.0)(clock)
    }
}

impl Schedule {
    fn new(rate: f64, course: Course) -> Self {
        Schedule {
            course,
            rate,
            warmup: 0,
            unused_floor: None,
        }
    }

    /// The same rate in every step.
    pub fn constant(rate: f64) -> Self {
        Schedule::new(rate, Course::Constant)
    }

    /// The rate is the state "optim.lr" (f32, a scalar), which the session can set between steps;
    /// `rate` is its first value. An optimizer has one such state, and a
    /// [named](crate::optim::Optimizer::named) one has its own; others share it, in all programs of
    /// a session, and to give it two first values is a mistake.
    pub fn manual(rate: f64) -> Self {
        Schedule::new(rate, Course::Manual)
    }

    /// `rate`, multiplied by `factor` after every `every` steps.
    pub fn step(rate: f64, every: u32, factor: f64) -> Self {
        Schedule::new(rate, Course::Step { every, factor })
    }

    /// `rate`, multiplied by `factor` once each of these numbers of steps is completed.
    pub fn steps(rate: f64, at: &[u32], factor: f64) -> Self {
        let at = at.to_vec();
        Schedule::new(rate, Course::Steps { at, factor })
    }

    /// `rate`, multiplied by `factor` after every step.
    pub fn exponential(rate: f64, factor: f64) -> Self {
        Schedule::new(rate, Course::Exponential { factor })
    }

    /// From `from` to `to` in equal parts over `steps` steps, then `to`.
    pub fn linear(from: f64, to: f64, steps: u32) -> Self {
        Schedule::new(from, Course::Linear { to, steps })
    }

    /// From `rate` along half a cosine down to 0 in `total` steps, the warm-up included (Loshchilov
    /// & Hutter 2017).
    pub fn cosine(rate: f64, total: u32) -> Self {
        Schedule::new(rate, Course::Cosine { total, floor: 0.0 })
    }

    /// From `rate` down to 0 in `total` steps, the warm-up included: the rate times the share of
    /// the steps to come to the power `power`.
    pub fn polynomial(rate: f64, total: u32, power: f64) -> Self {
        let floor = 0.0;
        Schedule::new(
            rate,
            Course::Polynomial {
                total,
                power,
                floor,
            },
        )
    }

    /// A linear rise to `rate` at step `peak` (from 1), then `rate`·√(`peak`/step).
    pub fn inverse_sqrt(rate: f64, peak: u32) -> Self {
        Schedule::new(rate, Course::InverseSqrt { peak })
    }

    /// `scale`/√`width` · min(1/√step, step/`peak`^1.5), with steps from 1, for a transformer of
    /// this width (Vaswani et al. 2017): [`Schedule::inverse_sqrt`] to `scale`/√(`width`·`peak`).
    pub fn noam(scale: f64, width: usize, peak: u32) -> Self {
        let highest = scale / (width as f64 * f64::from(peak)).sqrt();
        Schedule::inverse_sqrt(highest, peak)
    }

    /// The rate that a function computes from the clock.
    ///
    /// ```
    /// # use slabwise::prelude::*;
    /// # use slabwise::optim::{Schedule, Sgd};
    /// let schedule = Schedule::of(|clock| (clock.completed().cast(F32) * 0.1).cos() * 0.01 + 0.02);
    /// # Sgd::new(schedule).check().unwrap();
    /// ```
    pub fn of(function: impl for<'t> Fn(Clock<'t>) -> Tensor<'t> + 'static) -> Self {
        Function(function).into()
    }

    /// A cosine and a polynomial go down to `floor` instead of 0. Of other schedules a floor is a
    /// mistake, also of those that [`then`](Schedule::then) and [`times`](Schedule::times) make.
    pub fn floor(mut self, floor: f64) -> Self {
        match &mut self.course {
            Course::Cosine { floor: slot, .. } | Course::Polynomial { floor: slot, .. } => {
                *slot = floor;
            }
            _ => self.unused_floor = Some(floor),
        }
        self
    }

    /// With a linear rise over the first `steps` steps: step k of them has k/`steps` of the rate.
    /// Then the schedule begins.
    pub fn warmup(mut self, steps: u32) -> Self {
        self.warmup = steps;
        self
    }

    /// This schedule for `steps` steps, then `next` from its beginning.
    pub fn then(self, steps: u32, next: impl Into<Schedule>) -> Self {
        let next = Box::new(next.into());
        Schedule::new(0.0, Course::Then(Box::new(self), steps, next))
    }

    /// The product of this schedule's rate and another's.
    pub fn times(self, other: impl Into<Schedule>) -> Self {
        let other = Box::new(other.into());
        Schedule::new(0.0, Course::Times(Box::new(self), other))
    }

    pub(super) fn check(&self) -> Result<(), String> {
        at_least_zero("the learning rate", self.rate)?;
        countable("a warm-up of", self.warmup)?;
        if let Some(floor) = self.unused_floor {
            return Err(format!(
                "a floor of {floor} is given to a schedule without one; give it to the cosine or the polynomial itself"
            ));
        }
        let goes_down = |what: &str, total: u32, floor: f64| {
            if total <= self.warmup {
                return Err(format!(
                    "{what} over {total} steps ends before its warm-up of {} steps",
                    self.warmup
                ));
            }
            countable(&format!("{what} over"), total)?;
            at_least_zero("the lowest learning rate", floor)
        };
        let factor_of = |factor| at_least_zero("the factor of the learning rate", factor);
        match &self.course {
            Course::Constant | Course::Manual => Ok(()),
            Course::Step { every: 0, .. } => Err("the learning rate changes every 0 steps".into()),
            Course::Step { every, factor } => {
                countable("a change every", *every)?;
                factor_of(*factor)
            }
            Course::Steps { at, factor } => {
                at.iter()
                    .try_for_each(|&n| countable("a change after", n))?;
                factor_of(*factor)
            }
            Course::Exponential { factor } => factor_of(*factor),
            Course::Linear { steps: 0, .. } => Err("a linear change takes 0 steps".into()),
            Course::Linear { to, steps } => {
                countable("a linear change over", *steps)?;
                at_least_zero("the last learning rate", *to)
            }
            Course::Cosine { total, floor } => goes_down("a cosine", *total, *floor),
            Course::Polynomial {
                total,
                power,
                floor,
            } => {
                at_least_zero("the power of a polynomial", *power)?;
                goes_down("a polynomial", *total, *floor)
            }
            Course::InverseSqrt { peak: 0 } => Err("the highest rate is that of step 0".into()),
            Course::InverseSqrt { peak } => countable("a rise over", *peak),
            Course::Own(own) => own.0.check(),
            Course::Then(first, steps, next) => {
                first.check()?;
                countable("a first schedule of", *steps)?;
                next.check()
            }
            Course::Times(one, other) => {
                one.check()?;
                other.check()
            }
        }
    }

    /// The rate of this step: an f32 scalar.
    pub(super) fn rate<'t>(&self, trace: &'t Trace) -> Tensor<'t> {
        self.at(Clock { trace, begun: 0 })
    }

    fn at<'t>(&self, clock: Clock<'t>) -> Tensor<'t> {
        if self.warmup == 0 {
            return self.course(clock);
        }
        let rate = self.course(clock.after(self.warmup));
        let risen = (clock.completed() + 1).minimum(self.warmup as i32);
        rate * (risen.cast(DType::F32) / self.warmup as f32)
    }

    fn course<'t>(&self, clock: Clock<'t>) -> Tensor<'t> {
        let trace = clock.trace;
        let number = |value: f64| trace.full(value as f32, DType::F32, ());
        // The share of the steps up to `total` that are completed.
        let part = |total: u32| {
            let length = (total - self.warmup) as i32;
            clock.completed().minimum(length).cast(DType::F32) / length as f32
        };
        let base = match self.course {
            Course::Manual => trace
                .owned_state(RATE, DType::F32, Init::Constant(self.rate as f32))
                .value(),
            _ => number(self.rate),
        };
        match &self.course {
            Course::Constant | Course::Manual => base,
            Course::Step { every, factor } => {
                let changes = (clock.completed() / *every as i32).cast(DType::F32);
                base * number(*factor).pow(changes)
            }
            Course::Steps { at, factor } => {
                let done = clock.completed();
                at.iter().fold(base, |rate, &n| {
                    let factor = done.ge(n as i32).select(*factor as f32, 1.0);
                    rate * factor
                })
            }
            Course::Exponential { factor } => {
                base * number(*factor).pow(clock.completed().cast(DType::F32))
            }
            Course::Linear { to, steps } => {
                let done = clock.completed().minimum(*steps as i32).cast(DType::F32);
                base + done / *steps as f32 * (to - self.rate) as f32
            }
            Course::Cosine { total, floor } => {
                let floor = *floor as f32;
                (base - floor) * ((part(*total) * PI).cos() + 1.0) * 0.5 + floor
            }
            Course::Polynomial {
                total,
                power,
                floor,
            } => {
                let floor = *floor as f32;
                (base - floor) * (1.0 - part(*total)).pow(*power as f32) + floor
            }
            Course::InverseSqrt { peak } => {
                let step = (clock.completed() + 1).cast(DType::F32) / *peak as f32;
                base * step.minimum(step.rsqrt())
            }
            Course::Own(own) => own.0.rate(clock),
            Course::Then(first, steps, next) => {
                let is_first = clock.completed().lt(*steps as i32);
                is_first.select(first.at(clock), next.at(clock.after(*steps)))
            }
            Course::Times(one, other) => one.at(clock) * other.at(clock),
        }
    }
}

/// A number of steps that the counter, an i32, can hold.
fn countable(what: &str, steps: u32) -> Result<(), String> {
    match i32::try_from(steps) {
        Ok(_) => Ok(()),
        Err(_) => Err(format!(
            "{what} {steps} steps are more than the counter holds"
        )),
    }
}

impl<R: Rate + 'static> From<R> for Schedule {
    fn from(rate: R) -> Self {
        Schedule::new(0.0, Course::Own(Own(Rc::new(rate))))
    }
}

impl From<f64> for Schedule {
    fn from(rate: f64) -> Self {
        Schedule::constant(rate)
    }
}

impl From<f32> for Schedule {
    fn from(rate: f32) -> Self {
        Schedule::constant(f64::from(rate))
    }
}
