//! A U-Net that tells the noise of an image (Ho, Jain & Abbeel 2020): residual blocks that know the
//! time, attention where images are small, skips from the way down to the way up.

use std::f64::consts::LN_10;

use slabwise::DType::F32;
use slabwise::nn::{Conv2d, Embedding, GroupNorm, Linear, Module};
use slabwise::params::Scope;
use slabwise::tensor::Tensor;

use super::Learner;
use super::attention::heads_of;
use super::blocks::{Larger, Norms, Places, Residual, conv3, doubled};

/// The sizes of a diffusion model. Its parameters have the names of `UNet2DModel` of the `diffusers`
/// library: `conv_in.weight`, `time_embedding.linear_1.weight`,
/// `down_blocks.0.resnets.0.norm1.weight`, `down_blocks.1.attentions.0.to_q.weight`,
/// `mid_block.resnets.0.conv1.weight`, `up_blocks.0.upsamplers.0.conv.weight`, `conv_out.weight`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Diffusion {
    /// Channels of an image.
    pub inputs: usize,
    /// Channels at full size; level l, from 0, has 2ˡ times as many.
    pub width: usize,
    /// Levels, the full size included. Each after it halves the image and doubles the channels.
    pub levels: usize,
    /// Residual blocks of a level on the way down; one more on the way up.
    pub blocks: usize,
    /// The lowest levels, so many, have attention.
    pub attention: usize,
    /// Attention heads.
    pub heads: usize,
    /// Groups of the norms; they divide all channels.
    pub groups: usize,
    /// Rows and columns of an image.
    pub size: usize,
    /// Classes of images, of which the model knows that of each.
    pub classes: usize,
    /// Steps of the noise.
    pub steps: usize,
}

impl Diffusion {
    /// Images of 32 × 32 as in CIFAR-10: three levels of 64 to 256 channels.
    pub const CIFAR: Diffusion = Diffusion {
        inputs: 3,
        width: 64,
        levels: 3,
        blocks: 2,
        attention: 2,
        heads: 4,
        groups: 32,
        size: 32,
        classes: 10,
        steps: 1000,
    };

    /// Declares the weights.
    #[track_caller]
    pub fn layers(&self, at: &Scope) -> Denoiser {
        let norms = Norms {
            groups: self.groups,
            eps: 1e-5,
        };
        let time = 4 * self.width;
        let channels = |level: usize| doubled(self.width, level);
        let numbered = |name: &str, i: usize| at / name / &i.to_string();
        let attends = |level: usize| level + self.attention >= self.levels;
        // Heads that divide the narrowest level with attention divide those below it.
        let narrowest = self.levels - self.attention.clamp(1, self.levels.max(1)).min(self.levels);
        let heads = heads_of(at, channels(narrowest), self.heads);
        let residual = |at: &Scope, i: usize, from: usize, to: usize| {
            Residual::new(
                &(at / "resnets" / &i.to_string()),
                norms,
                from,
                to,
                Some(time),
            )
        };
        let places = |at: &Scope, i: usize, channels: usize| {
            Places::new(
                &(at / "attentions" / &i.to_string()),
                norms,
                channels,
                heads,
            )
        };
        // The channels of the skips, in the order in which the way down makes them.
        let mut skips = vec![self.width];
        let mut from = self.width;
        let mut downs = Vec::new();
        for level in 0..self.levels {
            let (at, to) = (numbered("down_blocks", level), channels(level));
            let mut blocks = Vec::new();
            for i in 0..self.blocks {
                let attention = attends(level).then(|| places(&at, i, to));
                blocks.push((residual(&at, i, from, to), attention));
                from = to;
                skips.push(to);
            }
            let smaller = (level + 1 < self.levels).then(|| {
                skips.push(to);
                conv3(&at / "downsamplers" / "0" / "conv", to, to).stride(2)
            });
            downs.push((blocks, smaller));
        }
        let middle = at / "mid_block";
        let mid = (
            residual(&middle, 0, from, from),
            places(&middle, 0, from),
            residual(&middle, 1, from, from),
        );
        let mut ups = Vec::new();
        for (number, level) in (0..self.levels).rev().enumerate() {
            let (at, to) = (numbered("up_blocks", number), channels(level));
            let mut blocks = Vec::new();
            for i in 0..=self.blocks {
                let skip = skips.pop().unwrap_or(0);
                let attention = attends(level).then(|| places(&at, i, to));
                blocks.push((residual(&at, i, from + skip, to), attention));
                from = to;
            }
            let larger = (level > 0).then(|| Larger::new(&(&at / "upsamplers" / "0"), to));
            ups.push((blocks, larger));
        }
        Denoiser {
            sizes: *self,
            conv_in: conv3(at / "conv_in", self.inputs, self.width),
            time1: Linear::new(at / "time_embedding" / "linear_1", self.width, time),
            time2: Linear::new(at / "time_embedding" / "linear_2", time, time),
            class: Embedding::with_std(at / "class_embedding", self.classes, time, 0.02),
            downs,
            mid,
            ups,
            norm: norms.at(at / "conv_norm_out", self.width),
            conv_out: conv3(at / "conv_out", self.width, self.inputs),
        }
    }
}

type Blocks = Vec<(Residual, Option<Places>)>;

/// The layers of a [`Diffusion`].
pub struct Denoiser {
    sizes: Diffusion,
    conv_in: Conv2d,
    time1: Linear,
    time2: Linear,
    class: Embedding,
    downs: Vec<(Blocks, Option<Conv2d>)>,
    mid: (Residual, Places, Residual),
    ups: Vec<(Blocks, Option<Larger>)>,
    norm: GroupNorm,
    conv_out: Conv2d,
}

/// Sines and cosines of a number at wavelengths from 2π to 20000π: `[n] → [n, width]`, the cosines
/// first.
#[track_caller]
fn waves(number: Tensor<'_>, width: usize) -> Tensor<'_> {
    let half = (width / 2).max(1);
    let trace = number.trace();
    let place = trace.arange(half as i64).cast(F32);
    let speed = (place * (-4.0 * LN_10 / half as f64) as f32).exp();
    let angle = number.unsqueeze(1) * speed;
    trace.concat(&[angle.cos(), angle.sin()], 1)
}

impl Denoiser {
    /// The noise in images `[n, inputs, size, size]`, at a time for each (f32 `[n]`, from 0 to the
    /// number of steps − 1), of a class for each (i32 `[n]`).
    #[track_caller]
    pub fn noise<'t>(&self, x: Tensor<'t>, time: Tensor<'t>, class: Tensor<'t>) -> Tensor<'t> {
        let time = waves(time, self.sizes.width)
            .apply(&self.time1)
            .silu()
            .apply(&self.time2)
            + class.apply(&self.class);
        let over = |x: Tensor<'t>, (residual, places): &(Residual, Option<Places>)| {
            let x = residual.over(x, Some(time));
            places.as_ref().map_or(x, |places| x.apply(places))
        };
        let mut x = x.apply(&self.conv_in);
        let mut skips = vec![x];
        for (blocks, smaller) in &self.downs {
            for block in blocks {
                x = over(x, block);
                skips.push(x);
            }
            if let Some(smaller) = smaller {
                x = x.apply(smaller);
                skips.push(x);
            }
        }
        let (first, places, second) = &self.mid;
        x = second.over(first.over(x, Some(time)).apply(places), Some(time));
        for (blocks, larger) in &self.ups {
            for block in blocks {
                let joined: Vec<Tensor<'t>> = [x].into_iter().chain(skips.pop()).collect();
                x = over(x.trace().concat(&joined, 1), block);
            }
            if let Some(larger) = larger {
                x = x.apply(larger);
            }
        }
        x.apply(&self.norm).silu().apply(&self.conv_out)
    }

    /// The share of an image's variance that is left at each time, `[n] → [n]`, with rates of noise
    /// from 10⁻⁴ to 0.02 in equal parts: Π (1 − βₛ) over s ≤ t as exp of the sum of −βₛ − βₛ²/2 −
    /// βₛ³/3, which is exact to 10⁻⁵.
    #[track_caller]
    pub fn signal<'t>(&self, time: Tensor<'t>) -> Tensor<'t> {
        let (low, high) = (1e-4f64, 0.02f64);
        let slope = (high - low) / (self.sizes.steps.max(2) - 1) as f64;
        // Sums of 1, s, s², s³ over s = 0 … t.
        let n = time + 1.0;
        let one = n;
        let s1 = time * n * 0.5;
        let s2 = s1 * (time * 2.0 + 1.0) * (1.0 / 3.0) as f32;
        let s3 = s1 * s1;
        let (a, b) = (low, slope);
        let terms = [
            (one, a + a * a / 2.0 + a * a * a / 3.0),
            (s1, b + a * b + a * a * b),
            (s2, b * b / 2.0 + a * b * b),
            (s3, b * b * b / 3.0),
        ];
        let sum = terms
            .iter()
            .map(|&(x, factor)| x * factor as f32)
            .reduce(|sum, term| sum + term);
        sum.map_or(one, |sum| (-sum).exp())
    }

    /// The mean squared error of the noise found in images to which this noise was added, for a time
    /// of each.
    #[track_caller]
    pub fn error<'t>(
        &self,
        x: Tensor<'t>,
        class: Tensor<'t>,
        time: Tensor<'t>,
        noise: Tensor<'t>,
    ) -> Tensor<'t> {
        let signal = self.signal(time).reshape([-1i64, 1, 1, 1]);
        let noisy = x * signal.sqrt() + noise * (1.0 - signal).sqrt();
        self.noise(noisy, time, class).mse(noise)
    }
}

impl Module for Denoiser {
    /// The noise in images that are nothing but noise, of class 0: the first step of a generation.
    #[track_caller]
    fn forward<'t>(&self, x: Tensor<'t>) -> Tensor<'t> {
        // A number for each image, whatever it is.
        let each = x.slice(1, ..0).sum_over([1, 2, 3]);
        let last = each + (self.sizes.steps.max(1) - 1) as f32;
        self.noise(x, last, each.cast(slabwise::DType::I32))
    }
}

impl Learner for Denoiser {
    #[track_caller]
    fn loss<'t>(&self, x: Tensor<'t>, labels: Tensor<'t>) -> Tensor<'t> {
        let noise = x.normal_like();
        let steps = self.sizes.steps as f32;
        let time = (labels.uniform_like() * steps).floor();
        self.error(x, labels, time, noise)
    }
}
