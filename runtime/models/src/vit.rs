//! The vision transformer (Dosovitskiy et al. 2021).

use slabwise::nn::{Conv2d, LayerNorm, Linear, Module};
use slabwise::params::{Init, Param, Scope};
use slabwise::tensor::Tensor;

use super::attention::{SelfAttention, heads_of};

/// The sizes of a vision transformer. Its parameters have the names of the `transformers` library:
/// `vit.embeddings.cls_token`, `vit.embeddings.patch_embeddings.projection.weight`,
/// `vit.encoder.layer.0.attention.attention.query.weight`, `classifier.weight`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Vit {
    /// Rows and columns of an image, a multiple of those of a patch.
    pub size: usize,
    /// Channels of an image.
    pub inputs: usize,
    /// Rows and columns of a patch.
    pub patch: usize,
    /// Blocks.
    pub layers: usize,
    /// The width of a patch's vector.
    pub width: usize,
    /// Attention heads in a block; they divide the width equally.
    pub heads: usize,
    /// The width between the two products of a block's second half.
    pub inner: usize,
    /// Classes of an image.
    pub classes: usize,
}

impl Vit {
    /// ViT-B/16: 12 blocks of width 768, images of 224 × 224.
    pub const BASE: Vit = Vit {
        size: 224,
        inputs: 3,
        patch: 16,
        layers: 12,
        width: 768,
        heads: 12,
        inner: 3072,
        classes: 1000,
    };

    /// Patches of an image, and one more place for the class.
    fn places(&self) -> usize {
        (self.size / self.patch.max(1)).pow(2) + 1
    }

    /// Declares the weights: `[n, inputs, size, size] → [n, classes]`.
    #[track_caller]
    pub fn layers(&self, at: &Scope) -> impl Module + use<> {
        let (root, d) = (at / "vit", self.width);
        let embeddings = &root / "embeddings";
        let heads = heads_of(at, d, self.heads);
        if self.patch == 0 || !self.size.is_multiple_of(self.patch) {
            at.mistake(format!(
                "a size of {} does not divide into patches of {}",
                self.size, self.patch
            ));
        }
        let normal = Init::Normal {
            mean: 0.0,
            std: 0.02,
        };
        let block = |i: usize| {
            let at = &root / "encoder" / "layer" / &i.to_string();
            let attention = &at / "attention";
            Block {
                norm1: norm(&at / "layernorm_before", d),
                attention: SelfAttention::new(
                    &(&attention / "attention"),
                    &attention / "output" / "dense",
                    d,
                    heads,
                    self.places(),
                ),
                norm2: norm(&at / "layernorm_after", d),
                wide: Linear::new(&at / "intermediate" / "dense", d, self.inner),
                narrow: Linear::new(&at / "output" / "dense", self.inner, d),
            }
        };
        Layers {
            sizes: *self,
            class: embeddings.param("cls_token", (1, 1, d), normal),
            positions: embeddings.param("position_embeddings", (1, self.places(), d), normal),
            patches: Conv2d::new(
                &embeddings / "patch_embeddings" / "projection",
                self.inputs,
                d,
                self.patch,
            )
            .stride(self.patch),
            blocks: (0..self.layers).map(block).collect(),
            norm: norm(&root / "layernorm", d),
            head: Linear::new(at / "classifier", d, self.classes),
        }
    }
}

/// The layer norm of a vision transformer, with ε = 10⁻¹².
#[track_caller]
fn norm(at: Scope, d: usize) -> LayerNorm {
    LayerNorm::new(at, d).eps(1e-12)
}

struct Layers {
    sizes: Vit,
    class: Param,
    positions: Param,
    patches: Conv2d,
    blocks: Vec<Block>,
    norm: LayerNorm,
    head: Linear,
}

impl Module for Layers {
    #[track_caller]
    fn forward<'t>(&self, x: Tensor<'t>) -> Tensor<'t> {
        let (d, places, trace) = (self.sizes.width as i64, self.sizes.places(), x.trace());
        let patches = x.apply(&self.patches).flatten(2).transpose(1, 2); // [n, patches, width]
        // The class's vector has the first place of each image.
        let class = trace
            .param(&self.class)
            .pad([(0, 0), (0, places - 1), (0, 0)], 0.0);
        let x = patches.pad([(0, 0), (1, 0), (0, 0)], 0.0) + (class + &self.positions);
        let x = x.reshape([-1, d]);
        let x = self.blocks.iter().fold(x, |x, block| x.apply(block));
        // Only the class's vector is used.
        let x = x.unflatten(0, [-1, places as i64]).slice(1, ..1).squeeze(1);
        x.apply(&self.norm).apply(&self.head)
    }
}

struct Block {
    norm1: LayerNorm,
    attention: SelfAttention,
    norm2: LayerNorm,
    wide: Linear,
    narrow: Linear,
}

impl Module for Block {
    #[track_caller]
    fn forward<'t>(&self, x: Tensor<'t>) -> Tensor<'t> {
        let x = x + x.apply(&self.norm1).apply(&self.attention);
        x + x
            .apply(&self.norm2)
            .apply(&self.wide)
            .gelu()
            .apply(&self.narrow)
    }
}
