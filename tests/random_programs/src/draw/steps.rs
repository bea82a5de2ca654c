//! One step of drawing for each kind of statement. A step without suitable operands changes
//! nothing.

use slabwise::{DType, Window};
use slabwise_compiler::ops::ConvGeometry;

use super::Maker;
use super::elementwise::ODD;
use crate::case::{Axis, Fold, Layer, Op, Run, Unary};
use crate::facts::Fact;

macro_rules! steps {
    ($($weight:literal $step:ident,)*) => {
        /// The weight of each kind of statement.
        const WEIGHTS: &[u32] = &[$($weight),*];

        impl Maker<'_> {
            /// Tries one step.
            pub(super) fn step(&mut self) -> Option<usize> {
                let steps = [$(Self::$step),*];
                let weights = if self.plain { &WEIGHTS[..ELEMENTWISE] } else { WEIGHTS };
                steps[self.rng.weighted(weights)](self)
            }
        }
    };
}

/// The first of these steps, which are elementwise.
const ELEMENTWISE: usize = 6;

steps! {
    14 unary,
    14 binary,
    5 number,
    4 select,
    3 clamp,
    6 cast,
    8 fold,
    3 order,
    5 matmul,
    2 einsum,
    4 convolution,
    4 pool,
    5 reshape,
    5 rearrange,
    4 expand,
    10 slice,
    4 pad,
    5 join,
    5 choose,
    5 softmax,
    3 normalize,
    4 loss,
    3 attention,
    6 layer,
    6 found,
    3 random,
    3 source,
    5 gradient,
    3 keep,
    5 attention_with,
    6 convolution_with,
    6 pool_with,
    6 resample,
    3 norm_with,
    5 loss_with,
    5 scan,
    3 ctc,
    2 keyed,
    5 arrange,
    5 dequantize,
    4 pools,
    3 grow,
    5 edges,
    3 meet,
    4 parts,
    4 turned,
    3 computed,
    6 places,
}

pub(super) fn float(f: &Fact) -> bool {
    f.dtype.is_float()
}

pub(super) fn single(f: &Fact) -> bool {
    f.dtype == DType::F32
}

impl Maker<'_> {
    pub(super) fn an_axis(&mut self, x: usize) -> Option<usize> {
        let rank = self.fact(x).rank();
        (rank > 0).then(|| self.rng.below(rank))
    }

    pub(super) fn some_axes(&mut self, x: usize) -> Vec<usize> {
        (0..self.fact(x).rank())
            .filter(|_| self.rng.one_in(2))
            .collect()
    }

    fn fold(&mut self) -> Option<usize> {
        let fold = self.rng.pick(Fold::ALL);
        let logic = matches!(fold, Fold::Any | Fold::All);
        let x = self.find(|f| (f.dtype == DType::Bool) == logic || fold == Fold::Mean)?;
        let axes = if self.rng.one_in(3) {
            None
        } else {
            Some(self.some_axes(x))
        };
        let keep = axes.is_some() && self.rng.one_in(2);
        self.push(Op::Fold { fold, axes, keep }, &[x])
    }

    fn order(&mut self) -> Option<usize> {
        let x = self.find(|f| f.rank() > 0 && f.dtype != DType::Bool && f.exact)?;
        let axis = self.an_axis(x)?;
        let descending = self.rng.one_in(2);
        let op = match self.rng.below(6) {
            4 | 5 => Op::Run {
                run: self.rng.pick(&[
                    Run::Sum,
                    Run::Product,
                    Run::LogSumExp,
                    Run::Max,
                    Run::Min,
                    Run::ArgMax,
                ]),
                axis,
                by: [self.rng.one_in(3), self.rng.one_in(2)],
            },
            0 => Op::CumSum(axis),
            1 => Op::TopK {
                k: 1 + self.rng.below(3),
                axis,
                positions: self.rng.one_in(2),
            },
            2 => Op::Argsort(descending),
            _ => Op::Sort(descending),
        };
        self.push(op, &[x])
    }

    fn matmul(&mut self) -> Option<usize> {
        let a = self.find(|f| float(f) && f.rank() > 0)?;
        let fact = self.fact(a).clone();
        let k = *fact.dims.last()?;
        let fits = |f: &Fact| {
            f.dtype == fact.dtype && f.rank() > 0 && f.dims[f.rank().saturating_sub(2)] == k
        };
        if let Some(b) = self.find(fits)
            && let Some(done) = self.push(Op::Matmul, &[a, b])
        {
            return Some(done);
        }
        let b = self.push(Op::T, &[a])?;
        self.push(Op::Matmul, &[a, b])
    }

    fn einsum(&mut self) -> Option<usize> {
        let text = self.rng.pick(&[
            "ij,jk->ik",
            "ij,kj->ki",
            "bij,bjk->bik",
            "ij,ij->j",
            "i,j->ij",
            "ij->ji",
            "bij,bij->b",
            "ij,j->i",
        ]);
        let ranks: Vec<usize> = text.split("->").next()?.split(',').map(str::len).collect();
        let mut args = Vec::new();
        for rank in ranks {
            args.push(self.find(|f| single(f) && f.rank() == rank)?);
        }
        self.push(Op::Einsum(text), &args)
    }

    fn image(&mut self) -> Option<usize> {
        if let Some(x) = self.find(|f| single(f) && f.rank() == 4) {
            return Some(x);
        }
        let batch = if self.scope.case.dims.is_empty() || self.rng.one_in(2) {
            Axis::Fixed(self.rng.pick(&self.lengths))
        } else {
            Axis::Named(0)
        };
        let [c, h, w] = [
            self.rng.pick(&[1, 2, 3, 4]),
            self.rng.pick(&[1, 3, 4, 5]),
            self.rng.pick(&[1, 2, 4]),
        ];
        self.input(
            DType::F32,
            vec![batch, Axis::Fixed(c), Axis::Fixed(h), Axis::Fixed(w)],
        )
    }

    fn convolution(&mut self) -> Option<usize> {
        let x = self.image()?;
        let channels = self.fact(x).dims[1].as_fixed()?;
        let groups = if channels % 2 == 0 {
            self.rng.pick(&[1, 1, 2, channels.max(1)])
        } else {
            self.rng.pick(&[1, channels.max(1)])
        };
        let geometry = ConvGeometry {
            stride: [self.rng.pick(&[1, 1, 2]), 1 + self.rng.below(2)],
            pad: [self.rng.below(2), self.rng.below(3)],
            dilation: [1, self.rng.pick(&[1, 1, 2])],
            groups,
        };
        let k = [self.rng.pick(&[1, 2, 3]), self.rng.pick(&[1, 3])];
        let out = groups * (1 + self.rng.below(2));
        let transpose = self.rng.one_in(4);
        let lengths = if transpose {
            [channels, 1 + self.rng.below(2), k[0], k[1]]
        } else {
            [out, channels / groups, k[0], k[1]]
        };
        let w = self.input(DType::F32, lengths.map(Axis::Fixed).to_vec())?;
        self.push(
            if transpose {
                Op::ConvTranspose2d(geometry)
            } else {
                Op::Conv2d(geometry)
            },
            &[x, w],
        )
    }

    fn pool(&mut self) -> Option<usize> {
        let x = self.image()?;
        let window = self.rng.pick(&[
            Window {
                k: [2, 2],
                stride: [2, 2],
                pad: [0, 0],
            },
            Window {
                k: [1, 1],
                stride: [1, 1],
                pad: [0, 0],
            },
            Window {
                k: [3, 2],
                stride: [1, 2],
                pad: [1, 0],
            },
            Window {
                k: [2, 3],
                stride: [2, 1],
                pad: [1, 1],
            },
        ]);
        let op = match self.rng.below(6) {
            0..=2 => Op::MaxPool(window),
            3 => Op::AvgPool(window),
            4 => Op::GlobalAvgPool,
            _ => Op::AdaptiveAvgPool([1 + self.rng.below(6), 1 + self.rng.below(4)]),
        };
        self.push(op, &[x])
    }

    fn reshape(&mut self) -> Option<usize> {
        let x = self.find(|f| f.rank() > 0)?;
        let dims = self.fact(x).dims.clone();
        let op = match self.rng.below(5) {
            0 => Op::Flatten(self.an_axis(x)?),
            1 => {
                let axis = self.an_axis(x)?;
                let n = dims[axis].as_fixed()?;
                let a = (1..=n)
                    .filter(|a| n % a == 0)
                    .nth(self.rng.below(3))
                    .unwrap_or(1);
                Op::Unflatten {
                    axis,
                    lengths: if n == 0 {
                        [self.rng.pick(&[0, 3]), 0]
                    } else {
                        [a, n / a]
                    },
                }
            }
            2 => Op::Reshape(vec![Axis::Open]),
            3 => {
                let n = self.rng.pick(&self.lengths);
                let mut shape = vec![Axis::Open, Axis::Fixed(n)];
                if self.rng.one_in(2) {
                    shape.swap(0, 1);
                }
                Op::Reshape(shape)
            }
            _ => {
                let mut shape = self.shape(&dims)?;
                let at = self.rng.below(shape.len());
                let to = self.rng.below(shape.len());
                shape.swap(at, to);
                Op::Reshape(shape)
            }
        };
        self.push(op, &[x])
    }

    fn rearrange(&mut self) -> Option<usize> {
        let x = self.find(|_| true)?;
        let rank = self.fact(x).rank();
        let op = match self.rng.below(4) {
            0 if rank > 1 => {
                let mut axes: Vec<usize> = (0..rank).collect();
                for i in (1..rank).rev() {
                    axes.swap(i, self.rng.below(i + 1));
                }
                Op::Permute(axes)
            }
            1 => Op::T,
            2 => Op::Squeeze(self.fact(x).dims.iter().position(|d| d.is(1))?),
            _ => Op::Unsqueeze(self.rng.below(rank + 1)),
        };
        self.push(op, &[x])
    }

    fn expand(&mut self) -> Option<usize> {
        let x = self.find(|f| f.rank() < 3 || f.dims.iter().any(|d| d.is(1)))?;
        let dims = self.fact(x).dims.clone();
        let mut shape = Vec::new();
        for d in dims {
            let named = !self.scope.case.dims.is_empty() && self.rng.one_in(3);
            shape.push(match (d.is(1), named) {
                (true, true) => Axis::Named(0),
                (true, false) => Axis::Fixed(self.rng.pick(&self.lengths)),
                _ => Axis::Open,
            });
        }
        if shape.len() < 3 && self.rng.one_in(2) {
            shape.insert(0, Axis::Fixed(self.rng.pick(&self.lengths)));
        }
        self.push(Op::Expand(shape), &[x])
    }

    fn slice(&mut self) -> Option<usize> {
        let x = self.find(|f| f.rank() > 0)?;
        let axis = self.an_axis(x)?;
        let len = self.fact(x).dims[axis];
        let least = len.least();
        if self.rng.one_in(5) {
            let parts = self.rng.pick(&[1, 2, 3]);
            let which = self.rng.below(parts);
            return self.push(Op::Split { axis, parts, which }, &[x]);
        }
        // Prefixes, suffixes, inner ranges, the empty range, the whole range.
        let start = if self.rng.one_in(2) {
            0
        } else {
            self.rng.below(least + 1)
        };
        let end = if self.rng.one_in(3) {
            None
        } else {
            Some(start + self.rng.below(least - start + 1))
        };
        let step = if self.rng.one_in(3) {
            1 + self.rng.below(3)
        } else {
            1
        };
        self.push(
            Op::Slice {
                axis,
                start,
                end,
                step,
            },
            &[x],
        )
    }

    fn pad(&mut self) -> Option<usize> {
        let x = self.find(|f| f.rank() > 0)?;
        let pads = (0..self.fact(x).rank())
            .map(|_| {
                if self.rng.one_in(2) {
                    (0, 0)
                } else {
                    (self.rng.below(3), self.rng.below(2))
                }
            })
            .collect();
        let value = self.rng.pick(&[0.0, 0.0, 1.0, 2.0]);
        self.push(Op::Pad { pads, value }, &[x])
    }

    fn join(&mut self) -> Option<usize> {
        let x = self.find(|_| true)?;
        let fact = self.fact(x).clone();
        let stack = fact.rank() == 0 || self.rng.one_in(3);
        let axis = if stack {
            self.rng.below(fact.rank() + 1)
        } else {
            self.rng.below(fact.rank())
        };
        let mut parts = vec![x];
        for _ in 0..self.rng.below(3) {
            let alike = |f: &Fact| {
                f.dtype == fact.dtype
                    && f.rank() == fact.rank()
                    && (0..f.rank()).all(|i| (i == axis && !stack) || f.dims[i] == fact.dims[i])
            };
            parts.extend(self.find(alike));
        }
        let done = self.push(
            if stack {
                Op::Stack(axis)
            } else {
                Op::Concat(axis)
            },
            &parts,
        )?;
        // A slice of it, perhaps of another slice.
        let len = self.fact(done).dims[axis].least();
        if len > 1 && self.rng.one_in(2) {
            let start = self.rng.below(len);
            let end = Some(start + 1 + self.rng.below(len - start));
            return self.push(
                Op::Slice {
                    axis,
                    start,
                    end,
                    step: 1,
                },
                &[done],
            );
        }
        Some(done)
    }

    fn softmax(&mut self) -> Option<usize> {
        let x = self.find(|f| single(f) && f.rank() > 0)?;
        let axis = if self.rng.one_in(2) {
            self.fact(x).rank() - 1
        } else {
            self.an_axis(x)?
        };
        let op = self.rng.pick(&[
            Op::Softmax(axis),
            Op::Softmax(axis),
            Op::LogSoftmax(axis),
            Op::LogSumExp(axis),
        ]);
        self.push(op, &[x])
    }

    fn normalize(&mut self) -> Option<usize> {
        let x = self.find(|f| single(f) && f.rank() > 0)?;
        let op = match self.rng.below(3) {
            0 => Op::GroupNormalize {
                groups: 1 + self.rng.below(2),
                eps: 0.1,
            },
            _ => Op::Normalize {
                axes: self.some_axes(x),
                eps: 0.1,
            },
        };
        self.push(op, &[x])
    }

    fn loss(&mut self) -> Option<usize> {
        let x = self.find(single)?;
        let dims = self.fact(x).dims.clone();
        if self.rng.one_in(2) && !dims.is_empty() {
            let labels = self.index(&dims[..dims.len() - 1], dims.last()?.least())?;
            let smoothing = self.rng.pick(&[0.0, 0.0, 0.25]);
            return self.push(Op::CrossEntropy(smoothing), &[x, labels]);
        }
        let y = self.find(|f| single(f) && f.dims == dims)?;
        match self.rng.below(4) {
            0 => self.push(Op::Mse, &[x, y]),
            1 => self.push(Op::Huber(0.5), &[x, y]),
            kind => {
                let target = self.push(Op::Unary(Unary::Sigmoid), &[y])?;
                if kind == 2 {
                    return self.push(Op::BinaryCrossEntropyWithLogits, &[x, target]);
                }
                let p = self.push(Op::Unary(Unary::Sigmoid), &[x])?;
                self.push(Op::BinaryCrossEntropy, &[p, target])
            }
        }
    }

    fn attention(&mut self) -> Option<usize> {
        let q = self.find(|f| single(f) && f.rank() > 1)?;
        let fact = self.fact(q).clone();
        let causal = self.rng.one_in(2);
        if self.rng.one_in(3) {
            let heads = 1 + self.rng.below(2);
            return self.push(Op::SelfAttention { heads, causal }, &[q]);
        }
        let alike = |f: &Fact| {
            single(f)
                && f.rank() == fact.rank()
                && f.dims[..f.rank() - 2] == fact.dims[..f.rank() - 2]
                && f.dims.last() == fact.dims.last()
        };
        let k = self.find(alike)?;
        let keys = self.fact(k).dims[fact.rank() - 2];
        let v = self.find(|f| {
            single(f)
                && f.rank() == fact.rank()
                && f.dims[..f.rank() - 2] == fact.dims[..f.rank() - 2]
                && f.dims[f.rank() - 2] == keys
        })?;
        let mut args = vec![q, k, v];
        if self.rng.one_in(3) {
            args.extend(self.find(|f| single(f) && f.dims.last() == Some(&keys)));
        }
        let tiles = self.rng.one_in(3).then(|| 1 + self.rng.below(2));
        self.push(Op::Attention { causal, tiles }, &args)
    }

    fn layer(&mut self) -> Option<usize> {
        let layer = self.rng.pick(Layer::ALL);
        let x = match layer {
            Layer::BatchNorm1d => self.find(|f| single(f) && (2..4).contains(&f.rank()))?,
            Layer::BatchNorm2d => self.image()?,
            Layer::Lstm
            | Layer::Gru
            | Layer::Rnn
            | Layer::Deep
            | Layer::MultiHeadAttention
            | Layer::GroupedQueryAttention
            | Layer::Encoder => self.find(|f| single(f) && f.rank() == 3)?,
            Layer::InstanceNorm | Layer::GroupNorm => {
                self.find(|f| single(f) && (3..5).contains(&f.rank()))?
            }
            Layer::Embedding => self.find(|f| {
                matches!(f.dtype, DType::I32 | DType::U8) && f.exact && f.low >= 0.0 && f.high < 8.0
            })?,
            _ => self.find(|f| single(f) && f.rank() > 0)?,
        };
        let fact = self.fact(x);
        let of_axis = |axis: usize| fact.dims.get(axis).and_then(|d| d.as_fixed());
        let inputs = match layer {
            Layer::BatchNorm1d | Layer::BatchNorm2d | Layer::InstanceNorm | Layer::GroupNorm => {
                of_axis(1)?
            }
            Layer::Embedding => fact.high as usize + 1,
            _ => of_axis(fact.rank() - 1)?,
        };
        let outputs = match layer {
            Layer::MultiHeadAttention
            | Layer::GroupedQueryAttention
            | Layer::Encoder
            | Layer::GroupNorm => {
                if inputs % 2 == 0 {
                    self.rng.pick(&[1, 2])
                } else {
                    1
                }
            }
            Layer::Lstm | Layer::Gru | Layer::Rnn | Layer::Deep => self.rng.pick(&[1, 2, 3]),
            _ => self.rng.pick(&[1, 2, 3, 4, 5]),
        };
        // A name for each kind and size, so that layers of one name are one layer, in both
        // programs.
        let name = (layer as usize * 100 + inputs) * 10 + outputs;
        self.push(
            Op::Layer {
                layer,
                name,
                sizes: [inputs, outputs],
            },
            &[x],
        )
    }

    fn random(&mut self) -> Option<usize> {
        let x = self.find(single)?;
        let op = match self.rng.below(3) {
            0 => Op::UniformLike,
            1 => Op::Dropout(self.rng.pick(&[0.0, 0.25, 0.5, 1.0])),
            _ => {
                let shape = self.any_shape();
                return self.push(Op::Uniform(shape), &[]);
            }
        };
        self.push(op, &[x])
    }

    fn source(&mut self) -> Option<usize> {
        match self.rng.below(5) {
            0 => {
                let at = self.rng.below(self.scope.case.params.len());
                self.push(Op::Param(at), &[])
            }
            1 => {
                let n = self.any_shape().first().copied()?;
                let op = self
                    .rng
                    .pick(&[Op::Arange(n), Op::Arange(n), Op::Length(n)]);
                self.push(op, &[])
            }
            2 => {
                let (dtype, shape) = (
                    self.rng
                        .pick(&[DType::F32, DType::I32, DType::F16, DType::Bool]),
                    self.any_shape(),
                );
                let mut value = self.rng.pick(&[0.0, 1.0]);
                if self.scope.case.odd_numbers && dtype == DType::F32 {
                    value = self.rng.pick(&ODD);
                }
                self.push(
                    Op::Full {
                        value,
                        dtype,
                        shape,
                    },
                    &[],
                )
            }
            _ => {
                let dtype =
                    self.rng
                        .pick(&[DType::F32, DType::F32, DType::I32, DType::Bool, DType::F16]);
                let like = self.find(|_| true)?;
                let shape = self.shape(&self.fact(like).dims.clone())?;
                self.input(dtype, shape)
            }
        }
    }

    fn gradient(&mut self) -> Option<usize> {
        let of = self.find(|f| {
            single(f)
                && f.smooth
                && f.dims
                    .iter()
                    .all(|d| d.least() > 0 || d.as_fixed().is_none())
        })?;
        // Mostly a value that it depends on.
        let above = self.above(of);
        let near = self.find_at(|i, f| float(f) && f.smooth && above.contains(&i));
        let wrt = match near.filter(|_| !self.rng.one_in(6)) {
            Some(near) => near,
            None => self.find(|f| float(f) && f.smooth)?,
        };
        // The mean over a length of 0 is no number, so none is drawn here.
        let open = self.fact(of).dims.iter().any(|d| d.as_fixed().is_none());
        let zeros = self.scope.case.dims.iter().any(|d| d.lengths.contains(&0));
        if open && (zeros || self.fact(of).dims.iter().any(|d| self.axis(*d).is_none())) {
            return None;
        }
        let known = |f: &Fact| f.dims.iter().all(|d| d.as_fixed().is_some_and(|n| n > 0));
        let other = self.find_at(|i, f| single(f) && f.smooth && known(f) && above.contains(&i));
        let mut args = vec![of, wrt];
        args.extend(other.filter(|_| self.rng.one_in(3)));
        let first = self.push(Op::Gradient, &args)?;
        if self.rng.one_in(2) {
            return Some(first);
        }
        // Of second order.
        let square = self.push(Op::Unary(Unary::Square), &[first])?;
        let wrt = match self.rng.one_in(2) {
            true => wrt,
            false => self.find_at(|i, f| single(f) && f.smooth && above.contains(&i))?,
        };
        self.push(Op::Gradient, &[square, wrt])
    }

    fn keep(&mut self) -> Option<usize> {
        let x = self.find(float)?;
        if self.rng.one_in(2) {
            return self.push(Op::Keep, &[x]);
        }
        let list = [
            Unary::Tanh,
            Unary::Sigmoid,
            Unary::Sin,
            Unary::Relu,
            Unary::Neg,
            Unary::Square,
        ];
        let segment = (0..1 + self.rng.below(3))
            .map(|_| self.rng.pick(&list))
            .collect();
        let k = self.fact(x).dims.last().copied();
        let dtype = self.fact(x).dtype;
        let factor =
            self.find(|f| f.dtype == dtype && f.rank() == 2 && f.dims.first().copied() == k);
        let mut args = vec![x];
        args.extend(factor);
        self.push(Op::Checkpoint(segment), &args)
    }
}
