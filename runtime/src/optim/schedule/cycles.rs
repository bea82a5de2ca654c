//! Schedules that rise and fall: one cycle, restarts, triangles.

use std::f32::consts::PI;

use slabwise_kernels::dtype::DType;

use super::{Clock, Rate, at_least_zero, countable};
use crate::tensor::Tensor;

/// One rise to a highest rate and one long fall (Smith & Topin 2018), with the phases of PyTorch's
/// `OneCycleLR`. After `total` steps the rate stays.
#[derive(Clone, Debug)]
pub struct OneCycle {
    highest: f64,
    total: u32,
    rise: f64,
    first: f64,
    last: f64,
    linear: bool,
    symmetric: bool,
}

impl OneCycle {
    /// To the rate `highest` in the first 30 % of `total` steps from a 25th of it, then down to
    /// 4e-6 of it, both along cosines.
    pub fn new(highest: f64, total: u32) -> Self {
        OneCycle {
            highest,
            total,
            rise: 0.3,
            first: 1.0 / 25.0,
            last: 1e-4,
            linear: false,
            symmetric: false,
        }
    }

    /// With this share of the steps for the rise.
    pub fn rise(mut self, share: f64) -> Self {
        self.rise = share;
        self
    }

    /// With a first rate of `first` times the highest, and a last one of `last` times the first.
    pub fn ends(mut self, first: f64, last: f64) -> Self {
        self.first = first;
        self.last = last;
        self
    }

    /// Along straight lines in place of cosines.
    pub fn linear(mut self) -> Self {
        self.linear = true;
        self
    }

    /// With a fall to the first rate that is as long as the rise, and then one to the last.
    pub fn symmetric(mut self) -> Self {
        self.symmetric = true;
        self
    }

    /// The last step of each phase, steps from 0, and the rate there.
    fn phases(&self) -> Vec<(f64, f64)> {
        let (total, first) = (f64::from(self.total), self.highest * self.first);
        let mut phases = vec![(self.rise * total - 1.0, self.highest)];
        if self.symmetric {
            phases.push((2.0 * self.rise * total - 2.0, first));
        }
        phases.push((total - 1.0, first * self.last));
        phases
    }
}

impl Rate for OneCycle {
    fn check(&self) -> Result<(), String> {
        at_least_zero("the highest learning rate", self.highest)?;
        at_least_zero("the first share of the rate", self.first)?;
        at_least_zero("the last share of the rate", self.last)?;
        countable("a cycle of", self.total)?;
        let mut before = 0.0;
        for (end, _) in self.phases() {
            if end.is_nan() || end <= before {
                return Err(format!(
                    "one cycle of {} steps with a rise over {} of them has an empty phase",
                    self.total, self.rise
                ));
            }
            before = end;
        }
        Ok(())
    }

    fn rate<'t>(&self, clock: Clock<'t>) -> Tensor<'t> {
        let done = clock.completed().minimum(self.total as i32 - 1);
        let done = done.cast(DType::F32);
        let (mut start, mut from) = (0.0, self.highest * self.first);
        let mut rate: Option<Tensor<'t>> = None;
        for (end, to) in self.phases() {
            let part = (done - start as f32) / (end - start) as f32;
            let part = if self.linear {
                part
            } else {
                (1.0 - (part * PI).cos()) * 0.5
            };
            let here = part * (to - from) as f32 + from as f32;
            // A phase ends with the step `end`, which the next one starts from.
            rate = Some(rate.map_or(here, |before| done.gt(start as f32).select(here, before)));
            (start, from) = (end, to);
        }
        rate.unwrap_or(done)
    }
}

/// Cosines from `rate` down to a floor, one after another, each `factor` times as long as the one
/// before (SGDR: Loshchilov & Hutter 2017).
#[derive(Clone, Debug)]
pub struct WarmRestarts {
    rate: f64,
    first: u32,
    factor: u32,
    floor: f64,
}

impl WarmRestarts {
    /// Cosines of `steps` steps each, down to 0.
    pub fn new(rate: f64, steps: u32) -> Self {
        WarmRestarts {
            rate,
            first: steps,
            factor: 1,
            floor: 0.0,
        }
    }

    /// With each cosine this many times as long as the one before.
    pub fn factor(mut self, factor: u32) -> Self {
        self.factor = factor;
        self
    }

    /// Down to this rate instead of 0.
    pub fn floor(mut self, floor: f64) -> Self {
        self.floor = floor;
        self
    }
}

impl Rate for WarmRestarts {
    fn check(&self) -> Result<(), String> {
        at_least_zero("the learning rate", self.rate)?;
        at_least_zero("the lowest learning rate", self.floor)?;
        countable("restarts after", self.first)?;
        match (self.first, self.factor) {
            (0, _) => Err("the learning rate restarts after 0 steps".into()),
            (_, 0) => Err("each restart is 0 times as long as the one before".into()),
            _ => Ok(()),
        }
    }

    fn rate<'t>(&self, clock: Clock<'t>) -> Tensor<'t> {
        let done = clock.completed();
        let first = self.first as i32;
        let (since, length) = if self.factor == 1 {
            (done - done / first * first, None)
        } else {
            // There are at most 31 restarts that an i32 can count.
            let (mut begun, mut length) = (None, None);
            let (mut start, mut long) = (0i64, i64::from(self.first));
            loop {
                start += long;
                long = long.saturating_mul(i64::from(self.factor));
                let (Ok(at), Ok(steps)) = (i32::try_from(start), i32::try_from(long)) else {
                    break;
                };
                let past = done.ge(at);
                let or = |before: Option<Tensor<'t>>, now: i32, first: i32| {
                    Some(match before {
                        Some(before) => past.select(now, before),
                        None => past.cast(DType::I32) * (now - first) + first,
                    })
                };
                begun = or(begun, at, 0);
                length = or(length, steps, first);
            }
            (begun.map_or(done, |begun| done - begun), length)
        };
        let since = since.cast(DType::F32);
        let part = match length {
            Some(length) => since / length.cast(DType::F32),
            None => since / first as f32,
        };
        let half = ((part * PI).cos() + 1.0) * 0.5;
        half * (self.rate - self.floor) as f32 + self.floor as f32
    }
}

/// Triangles between two rates (Smith 2017), as PyTorch's `CyclicLR`.
#[derive(Clone, Debug)]
pub struct Cyclic {
    low: f64,
    high: f64,
    up: u32,
    down: u32,
    shrinking: Shrinking,
}

#[derive(Clone, Copy, Debug)]
enum Shrinking {
    None,
    Halving,
    ByStep(f64),
}

impl Cyclic {
    /// From `low` to `high` in `steps` steps, and back in as many.
    pub fn new(low: f64, high: f64, steps: u32) -> Self {
        Cyclic {
            low,
            high,
            up: steps,
            down: steps,
            shrinking: Shrinking::None,
        }
    }

    /// Back in this many steps.
    pub fn down(mut self, steps: u32) -> Self {
        self.down = steps;
        self
    }

    /// With the height of the triangles halved after each.
    pub fn halving(mut self) -> Self {
        self.shrinking = Shrinking::Halving;
        self
    }

    /// With the height of the triangles multiplied by `factor` after every step.
    pub fn shrinking(mut self, factor: f64) -> Self {
        self.shrinking = Shrinking::ByStep(factor);
        self
    }
}

impl Rate for Cyclic {
    fn check(&self) -> Result<(), String> {
        at_least_zero("the lowest learning rate", self.low)?;
        at_least_zero("the highest learning rate", self.high)?;
        if let Shrinking::ByStep(factor) = self.shrinking {
            at_least_zero("the factor of the height", factor)?;
        }
        if self.up == 0 || self.down == 0 {
            return Err(format!(
                "a cycle of {} steps up and {} down has an empty side",
                self.up, self.down
            ));
        }
        countable("a cycle of", self.up.saturating_add(self.down))
    }

    fn rate<'t>(&self, clock: Clock<'t>) -> Tensor<'t> {
        let done = clock.completed();
        let length = (self.up + self.down) as i32;
        let cycle = done / length;
        let at = (done - cycle * length).cast(DType::F32);
        let up = at / self.up as f32;
        let down = (length as f32 - at) / self.down as f32;
        let height = up.minimum(down);
        let number = |value: f64| clock.trace().full(value as f32, DType::F32, ());
        let height = match self.shrinking {
            Shrinking::None => height,
            Shrinking::Halving => height * number(0.5).pow(cycle.cast(DType::F32)),
            Shrinking::ByStep(factor) => height * number(factor).pow(done.cast(DType::F32)),
        };
        height * (self.high - self.low) as f32 + self.low as f32
    }
}
