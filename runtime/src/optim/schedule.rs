//! Learning-rate schedules that follow the step counter, computed inside of the program.

use std::f32::consts::PI;

use slabwise_kernels::dtype::DType;

use super::at_least_zero;
use crate::params::Init;
use crate::tensor::Tensor;
use crate::trace::Trace;

/// The learning rate over the steps. A plain number is a constant rate.
#[derive(Clone, Debug, PartialEq)]
pub struct Schedule {
    course: Course,
    rate: f64,
    warmup: u32,
}

#[derive(Clone, Debug, PartialEq)]
enum Course {
    Constant,
    Manual,
    Step { every: u32, factor: f64 },
    Cosine { total: u32, floor: f64 },
}

impl Schedule {
    /// The same rate in every step.
    pub fn constant(rate: f64) -> Self {
        Schedule {
            course: Course::Constant,
            rate,
            warmup: 0,
        }
    }

    /// The rate is the state "optim.lr" (f32, a scalar), which the session can set between steps;
    /// `rate` is its first value.
    pub fn manual(rate: f64) -> Self {
        Schedule {
            course: Course::Manual,
            rate,
            warmup: 0,
        }
    }

    /// `rate`, multiplied by `factor` after every `every` steps.
    pub fn step(rate: f64, every: u32, factor: f64) -> Self {
        Schedule {
            course: Course::Step { every, factor },
            rate,
            warmup: 0,
        }
    }

    /// From `rate` along half a cosine down to 0 in `total` steps, the warm-up included (Loshchilov
    /// & Hutter 2017).
    pub fn cosine(rate: f64, total: u32) -> Self {
        Schedule {
            course: Course::Cosine { total, floor: 0.0 },
            rate,
            warmup: 0,
        }
    }

    /// A cosine goes down to `floor` instead of 0; other schedules have no floor.
    pub fn floor(mut self, floor: f64) -> Self {
        if let Course::Cosine { floor: slot, .. } = &mut self.course {
            *slot = floor;
        }
        self
    }

    /// With a linear rise over the first `steps` steps: step k of them has k/`steps` of the rate.
    /// Then the schedule begins.
    pub fn warmup(mut self, steps: u32) -> Self {
        self.warmup = steps;
        self
    }

    pub(super) fn check(&self) -> Result<(), String> {
        at_least_zero("the learning rate", self.rate)?;
        let countable = |what: &str, n: u32| match i32::try_from(n) {
            Ok(_) => Ok(()),
            Err(_) => Err(format!("{what} {n} steps are more than the counter holds")),
        };
        countable("a warm-up of", self.warmup)?;
        match self.course {
            Course::Constant | Course::Manual => Ok(()),
            Course::Step { every: 0, .. } => Err("the learning rate changes every 0 steps".into()),
            Course::Step { every, factor } => {
                countable("a change every", every)?;
                at_least_zero("the factor of the learning rate", factor)
            }
            Course::Cosine { total, .. } if total <= self.warmup => Err(format!(
                "a cosine over {total} steps ends before its warm-up of {} steps",
                self.warmup
            )),
            Course::Cosine { total, floor } => {
                countable("a cosine over", total)?;
                at_least_zero("the lowest learning rate", floor)
            }
        }
    }

    /// The rate of this step: an f32 scalar.
    pub(super) fn rate<'t>(&self, trace: &'t Trace) -> Tensor<'t> {
        let base = match self.course {
            Course::Manual => trace
                .owned_state("optim.lr", DType::F32, Init::Constant(self.rate as f32))
                .value(),
            _ => trace.full(self.rate as f32, DType::F32, ()),
        };
        if self.warmup == 0 && matches!(self.course, Course::Constant | Course::Manual) {
            return base;
        }
        let done = trace.completed_steps();
        // Integers up to here, because a float would lose count after 2²⁴ steps.
        let since = if self.warmup == 0 {
            done
        } else {
            (done - self.warmup as i32).maximum(0)
        };
        let rate = match self.course {
            Course::Constant | Course::Manual => base,
            Course::Step { every, factor } => {
                let changes = (since / every as i32).cast(DType::F32);
                base * trace.full(factor as f32, DType::F32, ()).pow(changes)
            }
            Course::Cosine { total, floor } => {
                let length = (total - self.warmup) as i32;
                let part = since.minimum(length).cast(DType::F32) / length as f32;
                (base - floor as f32) * ((part * PI).cos() + 1.0) * 0.5 + floor as f32
            }
        };
        if self.warmup == 0 {
            return rate;
        }
        let risen = (done + 1).minimum(self.warmup as i32).cast(DType::F32) / self.warmup as f32;
        rate * risen
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
