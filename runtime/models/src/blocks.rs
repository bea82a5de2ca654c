//! Blocks of the image models that generate: residual convolutions, attention over places, changes
//! of size, with the names of the `diffusers` library.

use slabwise::nn::{Conv2d, GroupNorm, Linear, Module};
use slabwise::params::Scope;
use slabwise::tensor::{Mask, Tensor};

/// Two convolutions with norms before them, around which the image is added: `[n, inputs, h, w] →
/// [n, outputs, h, w]`.
pub(super) struct Residual {
    norm1: GroupNorm,
    conv1: Conv2d,
    /// The product that a vector of the time goes through.
    time: Option<Linear>,
    norm2: GroupNorm,
    conv2: Conv2d,
    shortcut: Option<Conv2d>,
    outputs: usize,
}

/// A number of channels doubled so many times, or 2⁴⁰ if that is more: a size beyond any memory,
/// which is refused where it is used.
pub(super) fn doubled(channels: usize, times: usize) -> usize {
    let times = u32::try_from(times).unwrap_or(u32::MAX).min(40);
    channels.saturating_mul(1 << times).min(1 << 40)
}

/// The numbers that the norms of a model have in common.
#[derive(Clone, Copy)]
pub(super) struct Norms {
    pub groups: usize,
    pub eps: f32,
}

impl Norms {
    #[track_caller]
    pub fn at(self, at: Scope, channels: usize) -> GroupNorm {
        GroupNorm::new(at, self.groups, channels).eps(self.eps)
    }
}

/// A 3 × 3 convolution that keeps the size.
#[track_caller]
pub(super) fn conv3(at: Scope, inputs: usize, outputs: usize) -> Conv2d {
    Conv2d::new(at, inputs, outputs, 3).padding(1)
}

impl Residual {
    #[track_caller]
    pub fn new(
        at: &Scope,
        norms: Norms,
        inputs: usize,
        outputs: usize,
        time: Option<usize>,
    ) -> Self {
        Residual {
            norm1: norms.at(at / "norm1", inputs),
            conv1: conv3(at / "conv1", inputs, outputs),
            time: time.map(|width| Linear::new(at / "time_emb_proj", width, outputs)),
            norm2: norms.at(at / "norm2", outputs),
            conv2: conv3(at / "conv2", outputs, outputs),
            shortcut: (inputs != outputs)
                .then(|| Conv2d::new(at / "conv_shortcut", inputs, outputs, 1)),
            outputs,
        }
    }

    /// `time` is a vector for each image `[n, width]`, for a block that was declared with one.
    #[track_caller]
    pub fn over<'t>(&self, x: Tensor<'t>, time: Option<Tensor<'t>>) -> Tensor<'t> {
        let mut y = x.apply(&self.norm1).silu().apply(&self.conv1);
        if let (Some(layer), Some(time)) = (&self.time, time) {
            y = y + time
                .silu()
                .apply(layer)
                .reshape([-1, self.outputs as i64, 1, 1]);
        }
        let y = y.apply(&self.norm2).silu().apply(&self.conv2);
        match &self.shortcut {
            Some(shortcut) => x.apply(shortcut) + y,
            None => x + y,
        }
    }
}

/// Self-attention over the places of an image, around which the image is added: `[n, channels, h,
/// w]` → the same.
pub(super) struct Places {
    norm: GroupNorm,
    query: Linear,
    key: Linear,
    value: Linear,
    joined: Linear,
    heads: usize,
    channels: usize,
}

impl Places {
    #[track_caller]
    pub fn new(at: &Scope, norms: Norms, channels: usize, heads: usize) -> Self {
        let part = |at: Scope| Linear::new(at, channels, channels);
        Places {
            norm: norms.at(at / "group_norm", channels),
            query: part(at / "to_q"),
            key: part(at / "to_k"),
            value: part(at / "to_v"),
            joined: part(at / "to_out" / "0"),
            heads,
            channels,
        }
    }
}

impl Module for Places {
    #[track_caller]
    fn forward<'t>(&self, x: Tensor<'t>) -> Tensor<'t> {
        let (Some(h), Some(w)) = (x.len(2), x.len(3)) else {
            // An image of no fixed size; the reshape below names it.
            return x.reshape([-1, self.channels as i64, -1, -1]);
        };
        let (places, each) = ((h * w) as i64, (self.channels / self.heads) as i64);
        let rows = x
            .apply(&self.norm)
            .flatten(2)
            .transpose(1, 2)
            .reshape([-1, self.channels as i64]);
        let [q, k, v] = [&self.query, &self.key, &self.value].map(|part| {
            rows.apply(part)
                .reshape([-1, places, self.heads as i64, each])
                .transpose(1, 2)
        });
        let y = q
            .attention(k, v, false, Mask::None)
            .transpose(1, 2)
            .reshape([-1, self.channels as i64])
            .apply(&self.joined)
            .unflatten(0, [-1, places])
            .transpose(1, 2);
        y.unflatten(2, [h, w]) + x
    }
}

/// Every pixel as two rows of two, then a convolution: `[n, channels, h, w] → [n, channels, 2h,
/// 2w]`.
pub(super) struct Larger(Conv2d);

impl Larger {
    #[track_caller]
    pub fn new(at: &Scope, channels: usize) -> Self {
        Larger(conv3(at / "conv", channels, channels))
    }
}

impl Module for Larger {
    #[track_caller]
    fn forward<'t>(&self, x: Tensor<'t>) -> Tensor<'t> {
        let twice = x.unsqueeze(3).unsqueeze(5) * x.trace().ones((2, 1, 2)); // [n, c, h, 2, w, 2]
        let rows = twice.flatten_pair(4).flatten_pair(2);
        rows.apply(&self.0)
    }
}

/// Joins an axis and the one after it.
trait FlattenPair {
    fn flatten_pair(self, axis: usize) -> Self;
}

impl FlattenPair for Tensor<'_> {
    #[track_caller]
    fn flatten_pair(self, axis: usize) -> Self {
        let lengths = [self.len(axis), self.len(axis + 1)].map(|n| n.unwrap_or(0) as i64);
        let mut shape: Vec<i64> = (0..self.rank())
            .map(|i| self.len(i).map_or(-1, |n| n as i64))
            .collect();
        shape.splice(axis..axis + 2, [lengths[0] * lengths[1]]);
        self.reshape(shape.as_slice())
    }
}
