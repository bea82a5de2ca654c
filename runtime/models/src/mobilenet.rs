//! MobileNetV2 (Sandler et al. 2018).

use slabwise::nn::{BatchNorm2d, Conv2d, Dropout, Linear, Module, Relu6, Sequential};
use slabwise::params::Scope;
use slabwise::tensor::Tensor;

/// The layers of a MobileNetV2. Its parameters are named as torchvision names them.
#[derive(Clone, Debug, PartialEq)]
pub struct MobileNetV2 {
    /// Channels of the first convolution, which has stride 2.
    pub stem: usize,
    /// Stages: factor of expansion, channels, blocks, stride of the first block.
    pub stages: Vec<[usize; 4]>,
    /// Channels before the head.
    pub last: usize,
    /// Classes to tell apart.
    pub classes: usize,
    /// The probability with which an input of the head is dropped.
    pub dropout: f32,
}

impl MobileNetV2 {
    /// The network of the paper with width 1 and 1000 classes.
    pub fn standard() -> Self {
        let stages = [
            [1, 16, 1, 1],
            [6, 24, 2, 2],
            [6, 32, 3, 2],
            [6, 64, 4, 2],
            [6, 96, 3, 1],
            [6, 160, 3, 2],
            [6, 320, 1, 1],
        ];
        MobileNetV2 {
            stem: 32,
            stages: stages.to_vec(),
            last: 1280,
            classes: 1000,
            dropout: 0.2,
        }
    }

    /// Declares the weights: `[n, 3, h, w] → [n, classes]`.
    #[track_caller]
    pub fn layers(&self, at: &Scope) -> impl Module + use<> {
        let features = at / "features";
        let mut layers = Sequential::new().then(unit(&features / "0", 3, self.stem, 3, 2, 1));
        let (mut channels, mut count) = (self.stem, 1);
        for &[factor, to, blocks, stride] in &self.stages {
            for block in 0..blocks {
                let stride = if block == 0 { stride } else { 1 };
                layers = layers.then(Inverted::new(
                    &features / &count.to_string(),
                    channels,
                    to,
                    stride,
                    factor,
                ));
                (channels, count) = (to, count + 1);
            }
        }
        let layers = layers.then(unit(
            &features / &count.to_string(),
            channels,
            self.last,
            1,
            1,
            1,
        ));
        let head = Linear::new(at / "classifier" / "1", self.last, self.classes);
        layers
            .then(slabwise::nn::GlobalAvgPool)
            .then(Dropout(self.dropout))
            .then(head)
    }
}

/// A convolution with norm and activation.
fn unit(at: Scope, from: usize, to: usize, k: usize, stride: usize, groups: usize) -> Sequential {
    let conv = Conv2d::new(&at / "0", from, to, k)
        .stride(stride)
        .padding(k / 2)
        .groups(groups)
        .without_bias();
    Sequential::new()
        .then(conv)
        .then(BatchNorm2d::new(&at / "1", to))
        .then(Relu6)
}

/// Expansion, one filter for each channel, projection; added to its input where shapes agree.
struct Inverted {
    layers: Sequential,
    residual: bool,
}

impl Inverted {
    fn new(at: Scope, from: usize, to: usize, stride: usize, factor: usize) -> Self {
        let (at, wide) = (at / "conv", from * factor);
        let mut next = 0..;
        let mut place = || &at / &next.next().unwrap_or_default().to_string();
        let mut layers = Sequential::new();
        if factor != 1 {
            layers = layers.then(unit(place(), from, wide, 1, 1, 1));
        }
        layers = layers.then(unit(place(), wide, wide, 3, stride, wide));
        layers = layers
            .then(Conv2d::new(place(), wide, to, 1).without_bias())
            .then(BatchNorm2d::new(place(), to));
        Inverted {
            layers,
            residual: stride == 1 && from == to,
        }
    }
}

impl Module for Inverted {
    #[track_caller]
    fn forward<'t>(&self, x: Tensor<'t>) -> Tensor<'t> {
        let y = x.apply(&self.layers);
        if self.residual { x + y } else { y }
    }
}
