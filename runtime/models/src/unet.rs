//! U-Net (Ronneberger, Fischer & Brox 2015), with padding and batch norm as it is common today.

use slabwise::nn::{BatchNorm2d, Conv2d, ConvTranspose2d, MaxPool2d, Module, Relu, Sequential};
use slabwise::params::Scope;
use slabwise::tensor::Tensor;

use super::blocks::doubled;

/// The layers of a U-Net. Its parameters are named as in the usual PyTorch implementations:
/// `inc.double_conv.0.weight`, `down1.maxpool_conv.1.double_conv.0.weight`, `up1.up.weight`,
/// `up1.conv.double_conv.0.weight`, `outc.conv.weight`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UNet {
    /// Channels of the image.
    pub inputs: usize,
    /// Channels at full size; every level down halves the image and doubles the channels.
    pub width: usize,
    /// Levels below the full size.
    pub levels: usize,
    /// Classes of a pixel.
    pub classes: usize,
}

impl UNet {
    /// Four levels from 64 to 1024 channels, two classes.
    pub fn standard() -> Self {
        UNet {
            inputs: 3,
            width: 64,
            levels: 4,
            classes: 2,
        }
    }

    /// Declares the weights: `[n, inputs, h, w] → [n, classes, h, w]`; height and width are
    /// multiples of 2 to the levels.
    #[track_caller]
    pub fn layers(&self, at: &Scope) -> impl Module + use<> {
        let width = |level: usize| doubled(self.width, level);
        let numbered = |name: &str, i: usize| at / &format!("{name}{i}");
        let down = |i: usize| {
            double(
                &(numbered("down", i) / "maxpool_conv" / "1"),
                width(i - 1),
                width(i),
            )
        };
        let up = |i: usize| {
            let (at, from) = (numbered("up", i), width(self.levels + 1 - i));
            (
                ConvTranspose2d::new(&at / "up", from, from / 2, 2).stride(2),
                double(&(&at / "conv"), from, from / 2),
            )
        };
        Layers {
            inc: double(&(at / "inc"), self.inputs, self.width),
            downs: (1..=self.levels).map(down).collect(),
            ups: (1..=self.levels).map(up).collect(),
            head: Conv2d::new(at / "outc" / "conv", self.width, self.classes, 1),
        }
    }
}

/// Two convolutions, each with norm and activation.
fn double(at: &Scope, from: usize, to: usize) -> Sequential {
    let at = at / "double_conv";
    let conv = |name: &str, from: usize| {
        Conv2d::new(&at / name, from, to, 3)
            .padding(1)
            .without_bias()
    };
    let norm = |name: &str| BatchNorm2d::new(&at / name, to);
    Sequential::new()
        .then(conv("0", from))
        .then(norm("1"))
        .then(Relu)
        .then(conv("3", to))
        .then(norm("4"))
        .then(Relu)
}

struct Layers {
    inc: Sequential,
    downs: Vec<Sequential>,
    ups: Vec<(ConvTranspose2d, Sequential)>,
    head: Conv2d,
}

impl Module for Layers {
    #[track_caller]
    fn forward<'t>(&self, x: Tensor<'t>) -> Tensor<'t> {
        let mut x = x.apply(&self.inc);
        let mut kept = Vec::new();
        for down in &self.downs {
            kept.push(x);
            x = x.apply(&MaxPool2d(2)).apply(down);
        }
        for ((up, layers), beside) in self.ups.iter().zip(kept.into_iter().rev()) {
            x = x.trace().concat(&[beside, x.apply(up)], 1).apply(layers);
        }
        x.apply(&self.head)
    }
}
