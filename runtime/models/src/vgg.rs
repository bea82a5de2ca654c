//! VGG networks (Simonyan & Zisserman 2015).

use slabwise::nn::{
    AdaptiveAvgPool2d, Conv2d, Dropout, Flatten, Linear, MaxPool2d, Module, Relu, Sequential,
};
use slabwise::params::Scope;

/// The layers of a VGG network. Its parameters are named as torchvision names them.
#[derive(Clone, Debug, PartialEq)]
pub struct Vgg {
    /// Stages: channels, and 3×3 convolutions before the 2×2 max pooling.
    pub stages: Vec<[usize; 2]>,
    /// Rows and columns that the last image is averaged to.
    pub places: usize,
    /// Width of the two hidden layers.
    pub hidden: usize,
    /// Classes to tell apart.
    pub classes: usize,
    /// The probability with which a value of the hidden layers is dropped.
    pub dropout: f32,
}

impl Vgg {
    /// 16 layers, 1000 classes.
    pub fn vgg16() -> Self {
        Vgg {
            stages: vec![[64, 2], [128, 2], [256, 3], [512, 3], [512, 3]],
            places: 7,
            hidden: 4096,
            classes: 1000,
            dropout: 0.5,
        }
    }

    /// Declares the weights: `[n, 3, h, w] → [n, classes]`.
    #[track_caller]
    pub fn layers(&self, at: &Scope) -> impl Module + use<> {
        let features = at / "features";
        let (mut layers, mut channels, mut count) = (Sequential::new(), 3, 0);
        for &[to, convolutions] in &self.stages {
            for _ in 0..convolutions {
                let conv = Conv2d::new(&features / &count.to_string(), channels, to, 3).padding(1);
                layers = layers.then(conv).then(Relu);
                // The activation counts as a layer, and so does the pooling.
                (channels, count) = (to, count + 2);
            }
            layers = layers.then(MaxPool2d(2));
            count += 1;
        }
        let at = at / "classifier";
        let linear = |name: &str, from: usize, to: usize| Linear::new(&at / name, from, to);
        layers
            .then(AdaptiveAvgPool2d([self.places; 2]))
            .then(Flatten(1))
            .then(linear(
                "0",
                channels * self.places * self.places,
                self.hidden,
            ))
            .then(Relu)
            .then(Dropout(self.dropout))
            .then(linear("3", self.hidden, self.hidden))
            .then(Relu)
            .then(Dropout(self.dropout))
            .then(linear("6", self.hidden, self.classes))
    }
}
