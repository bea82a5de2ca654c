//! Residual networks (He et al. 2016).

use slabwise::nn::{BatchNorm2d, Conv2d, Linear, Module, Sequential};
use slabwise::params::Scope;
use slabwise::tensor::Tensor;

use super::blocks::doubled;

/// The layers of a residual network. Its parameters are named as torchvision names them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResNet {
    /// A 7×7 convolution of stride 2 and max pooling before the blocks (for photographs) instead of
    /// a 3×3 convolution.
    pub large_stem: bool,
    /// Blocks of 1×1, 3×3 and 1×1 convolutions with four times the width after them, instead of
    /// two 3×3 ones.
    pub bottleneck: bool,
    /// Blocks in each stage. Every stage but the first halves the image and doubles the width.
    pub depths: Vec<usize>,
    /// Channels of the first stage.
    pub width: usize,
    /// Classes to tell apart.
    pub classes: usize,
}

impl ResNet {
    /// 20 layers for 32×32 images: 16, 32 and 64 channels.
    pub fn resnet20() -> Self {
        ResNet {
            large_stem: false,
            bottleneck: false,
            depths: vec![3; 3],
            width: 16,
            classes: 10,
        }
    }

    /// 18 layers: 64 to 512 channels, 200 classes.
    pub fn resnet18() -> Self {
        ResNet {
            large_stem: true,
            bottleneck: false,
            depths: vec![2; 4],
            width: 64,
            classes: 200,
        }
    }

    /// 50 layers: 256 to 2048 channels, 1000 classes.
    pub fn resnet50() -> Self {
        ResNet {
            large_stem: true,
            bottleneck: true,
            depths: vec![3, 4, 6, 3],
            width: 64,
            classes: 1000,
        }
    }

    /// Declares the weights: `[n, 3, h, w] → [n, classes]`.
    #[track_caller]
    pub fn layers(&self, at: &Scope) -> impl Module + use<> {
        let (k, stride, pad) = if self.large_stem {
            (7, 2, 3)
        } else {
            (3, 1, 1)
        };
        let conv = Conv2d::new(at / "conv1", 3, self.width, k)
            .stride(stride)
            .padding(pad)
            .without_bias();
        let stem = Sequential::new()
            .then(conv)
            .then(BatchNorm2d::new(at / "bn1", self.width));
        let mut channels = self.width;
        let mut blocks = Vec::new();
        for (stage, &depth) in self.depths.iter().enumerate() {
            let width = doubled(self.width, stage);
            for block in 0..depth {
                let stride = if stage > 0 && block == 0 { 2 } else { 1 };
                let at = at / &format!("layer{}", stage + 1) / &block.to_string();
                let block = Block::new(&at, channels, width, stride, self.bottleneck);
                channels = block.channels;
                blocks.push(block);
            }
        }
        Layers {
            stem,
            pool: self.large_stem,
            blocks,
            head: Linear::new(at / "fc", channels, self.classes),
        }
    }
}

struct Layers {
    stem: Sequential,
    pool: bool,
    blocks: Vec<Block>,
    head: Linear,
}

impl Module for Layers {
    #[track_caller]
    fn forward<'t>(&self, x: Tensor<'t>) -> Tensor<'t> {
        let x = x.apply(&self.stem).relu();
        let x = if self.pool {
            x.max_pool2d_with(super::POOL_3_2)
        } else {
            x
        };
        self.blocks
            .iter()
            .fold(x, |x, block| x.apply(block))
            .global_avg_pool()
            .apply(&self.head)
    }
}

/// Convolutions with norms, and the shortcut added to their result.
struct Block {
    channels: usize,
    main: Vec<(Conv2d, BatchNorm2d)>,
    shortcut: Option<(Conv2d, BatchNorm2d)>,
}

impl Block {
    fn new(at: &Scope, inputs: usize, width: usize, stride: usize, bottleneck: bool) -> Self {
        let channels = if bottleneck { 4 * width } else { width };
        // (kernel, stride, outputs); the 3×3 convolution of a bottleneck moves.
        let plan: &[(usize, usize, usize)] = if bottleneck {
            &[(1, 1, width), (3, stride, width), (1, 1, channels)]
        } else {
            &[(3, stride, width), (3, 1, width)]
        };
        let mut from = inputs;
        let mut main = Vec::new();
        for (i, &(k, stride, to)) in plan.iter().enumerate() {
            let conv = Conv2d::new(at / &format!("conv{}", i + 1), from, to, k)
                .stride(stride)
                .padding(k / 2)
                .without_bias();
            main.push((conv, BatchNorm2d::new(at / &format!("bn{}", i + 1), to)));
            from = to;
        }
        let shortcut = (stride != 1 || inputs != channels).then(|| {
            let at = at / "downsample";
            (
                Conv2d::new(&at / "0", inputs, channels, 1)
                    .stride(stride)
                    .without_bias(),
                BatchNorm2d::new(&at / "1", channels),
            )
        });
        Block {
            channels,
            main,
            shortcut,
        }
    }
}

impl Module for Block {
    #[track_caller]
    fn forward<'t>(&self, x: Tensor<'t>) -> Tensor<'t> {
        let mut y = x;
        for (i, (conv, norm)) in self.main.iter().enumerate() {
            y = if i > 0 { y.relu() } else { y };
            y = y.apply(conv).apply(norm);
        }
        let x = self
            .shortcut
            .as_ref()
            .map_or(x, |(conv, norm)| x.apply(conv).apply(norm));
        (y + x).relu()
    }
}
