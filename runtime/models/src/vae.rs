//! A variational autoencoder of images (Kingma & Welling 2014), with the layers of the one that
//! latent diffusion uses (Rombach et al. 2022).

use slabwise::nn::{Conv2d, GroupNorm, Module};
use slabwise::params::Scope;
use slabwise::tensor::Tensor;

use super::Learner;
use super::blocks::{Larger, Norms, Places, Residual, conv3, doubled};

/// The sizes of an autoencoder. Its parameters have the names of `AutoencoderKL` of the `diffusers`
/// library: `encoder.conv_in.weight`, `encoder.down_blocks.0.resnets.0.norm1.weight`,
/// `encoder.mid_block.attentions.0.to_q.weight`, `quant_conv.weight`,
/// `decoder.up_blocks.0.upsamplers.0.conv.weight`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Vae {
    /// Channels of an image.
    pub inputs: usize,
    /// Channels at full size.
    pub width: usize,
    /// Levels, the full size included. Each halves the image and doubles the channels.
    pub levels: usize,
    /// Residual blocks of a level of the encoder; one more in the decoder.
    pub blocks: usize,
    /// Channels of the latent image.
    pub latent: usize,
    /// Groups of the norms; they divide all channels.
    pub groups: usize,
    /// Rows and columns of an image.
    pub size: usize,
}

impl Vae {
    /// Images of 64 × 64 as latent images of 4 channels of 16 × 16.
    pub const SMALL: Vae = Vae {
        inputs: 3,
        width: 64,
        levels: 3,
        blocks: 1,
        latent: 4,
        groups: 32,
        size: 64,
    };

    /// Declares the weights.
    #[track_caller]
    pub fn layers(&self, at: &Scope) -> Autoencoder {
        let norms = Norms {
            groups: self.groups,
            eps: 1e-6,
        };
        let channels = |level: usize| doubled(self.width, level);
        let lowest = channels(self.levels.max(1) - 1);
        let residual = |at: &Scope, i: usize, from: usize, to: usize| {
            Residual::new(&(at / "resnets" / &i.to_string()), norms, from, to, None)
        };
        let middle = |at: &Scope| Middle {
            first: residual(at, 0, lowest, lowest),
            places: Places::new(&(at / "attentions" / "0"), norms, lowest, 1),
            second: residual(at, 1, lowest, lowest),
        };
        let (encoder, decoder) = (at / "encoder", at / "decoder");
        let mut from = self.width;
        let mut downs = Vec::new();
        for level in 0..self.levels {
            let (at, to) = (
                &encoder / "down_blocks" / &level.to_string(),
                channels(level),
            );
            let blocks = (0..self.blocks)
                .map(|i| residual(&at, i, std::mem::replace(&mut from, to), to))
                .collect();
            let smaller = (level + 1 < self.levels)
                .then(|| Conv2d::new(&at / "downsamplers" / "0" / "conv", to, to, 3).stride(2));
            downs.push((blocks, smaller));
        }
        let mut ups = Vec::new();
        for (number, level) in (0..self.levels).rev().enumerate() {
            let (at, to) = (
                &decoder / "up_blocks" / &number.to_string(),
                channels(level),
            );
            let blocks = (0..=self.blocks)
                .map(|i| residual(&at, i, std::mem::replace(&mut from, to), to))
                .collect();
            let larger = (level > 0).then(|| Larger::new(&(&at / "upsamplers" / "0"), to));
            ups.push((blocks, larger));
        }
        let twice = 2 * self.latent;
        Autoencoder {
            sizes: *self,
            read: conv3(&encoder / "conv_in", self.inputs, self.width),
            downs,
            low: middle(&(&encoder / "mid_block")),
            read_norm: norms.at(&encoder / "conv_norm_out", lowest),
            read_out: conv3(&encoder / "conv_out", lowest, twice),
            quant: Conv2d::new(at / "quant_conv", twice, twice, 1),
            unquant: Conv2d::new(at / "post_quant_conv", self.latent, self.latent, 1),
            write: conv3(&decoder / "conv_in", self.latent, lowest),
            high: middle(&(&decoder / "mid_block")),
            ups,
            write_norm: norms.at(&decoder / "conv_norm_out", self.width),
            write_out: conv3(&decoder / "conv_out", self.width, self.inputs),
        }
    }
}

struct Middle {
    first: Residual,
    places: Places,
    second: Residual,
}

impl Module for Middle {
    #[track_caller]
    fn forward<'t>(&self, x: Tensor<'t>) -> Tensor<'t> {
        let x = self.first.over(x, None).apply(&self.places);
        self.second.over(x, None)
    }
}

/// The layers of a [`Vae`].
pub struct Autoencoder {
    sizes: Vae,
    read: Conv2d,
    downs: Vec<(Vec<Residual>, Option<Conv2d>)>,
    low: Middle,
    read_norm: GroupNorm,
    read_out: Conv2d,
    quant: Conv2d,
    unquant: Conv2d,
    write: Conv2d,
    high: Middle,
    ups: Vec<(Vec<Residual>, Option<Larger>)>,
    write_norm: GroupNorm,
    write_out: Conv2d,
}

/// A normal distribution of latent images, each number for itself.
#[derive(Clone, Copy, Debug)]
pub struct Latent<'t> {
    /// The means.
    pub mean: Tensor<'t>,
    /// The logarithms of the variances, from −30 to 20.
    pub log_variance: Tensor<'t>,
}

impl<'t> Latent<'t> {
    /// The sample of this standard normal noise.
    #[track_caller]
    pub fn sample(self, noise: Tensor<'t>) -> Tensor<'t> {
        self.mean + (self.log_variance * 0.5).exp() * noise
    }

    /// The divergence from the standard normal distribution, in nats, added up over each image:
    /// `[n]`.
    #[track_caller]
    pub fn divergence(self) -> Tensor<'t> {
        let each = self.mean.square() + self.log_variance.exp() - 1.0 - self.log_variance;
        each.sum_over([1, 2, 3]) * 0.5
    }
}

impl Autoencoder {
    /// The distribution of the latent images `[n, latent, h, w]` of images `[n, inputs, size,
    /// size]`.
    #[track_caller]
    pub fn encode<'t>(&self, x: Tensor<'t>) -> Latent<'t> {
        let mut x = x.apply(&self.read);
        for (blocks, smaller) in &self.downs {
            x = blocks.iter().fold(x, |x, block| block.over(x, None));
            if let Some(smaller) = smaller {
                x = x.pad([(0, 0), (0, 0), (0, 1), (0, 1)], 0.0).apply(smaller);
            }
        }
        let x = x.apply(&self.low).apply(&self.read_norm).silu();
        let parts = x.apply(&self.read_out).apply(&self.quant).split(1, 2);
        Latent {
            mean: parts[0],
            log_variance: parts[parts.len() - 1].clamp(-30.0, 20.0),
        }
    }

    /// Images of latent images.
    #[track_caller]
    pub fn decode<'t>(&self, z: Tensor<'t>) -> Tensor<'t> {
        let mut x = z.apply(&self.unquant).apply(&self.write).apply(&self.high);
        for (blocks, larger) in &self.ups {
            x = blocks.iter().fold(x, |x, block| block.over(x, None));
            if let Some(larger) = larger {
                x = x.apply(larger);
            }
        }
        x.apply(&self.write_norm).silu().apply(&self.write_out)
    }

    /// The negative evidence lower bound for this noise, up to a constant: half the squared error of
    /// each image, and the divergence, per number of an image.
    #[track_caller]
    pub fn bound<'t>(&self, x: Tensor<'t>, latent: Latent<'t>, noise: Tensor<'t>) -> Tensor<'t> {
        // The numbers of an image, whose size need not be that of the sizes.
        let Vae { inputs, size, .. } = self.sizes;
        let declared = (1..).zip([inputs, size, size]);
        let numbers = declared.map(|(axis, n)| x.len(axis).unwrap_or(n));
        let numbers = numbers.product::<usize>();
        let error = (self.decode(latent.sample(noise)) - x).square().mean() * 0.5;
        error + latent.divergence().mean() * (1.0 / numbers.max(1) as f32)
    }
}

impl Module for Autoencoder {
    /// The images that are made of the means.
    #[track_caller]
    fn forward<'t>(&self, x: Tensor<'t>) -> Tensor<'t> {
        self.decode(self.encode(x).mean)
    }
}

impl Learner for Autoencoder {
    /// The labels are not used.
    #[track_caller]
    fn loss<'t>(&self, x: Tensor<'t>, _: Tensor<'t>) -> Tensor<'t> {
        let latent = self.encode(x);
        self.bound(x, latent, latent.mean.normal_like())
    }
}
