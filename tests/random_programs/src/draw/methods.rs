//! Steps that draw methods with options.

use slabwise::tensor::{
    Beyond, ConvOptions, Interpolate, PadMode, Padding, PoolOptions, Reduction, Sampling,
};
use slabwise::{DType, Quantization};

use super::steps::single;
use super::{BOUND, Maker};
use crate::case::{Axis, Binary, Op, Unary};
use crate::facts::{Fact, Len};
use crate::method::{Loss, Method, Numbers, Pool};
use crate::scans::{Body, Loop, Take};

impl Maker<'_> {
    pub(super) fn call(&mut self, method: Method, args: &[usize]) -> Option<usize> {
        self.push(Op::Method(method), args)
    }

    /// A value of this shape, or an input.
    pub(super) fn of_shape(&mut self, dims: &[Len]) -> Option<usize> {
        let found = self.find(|f| single(f) && f.dims == dims);
        match found.filter(|_| !self.rng.one_in(3)) {
            Some(x) => Some(x),
            None => {
                let shape = self.shape(dims)?;
                self.input(DType::F32, shape)
            }
        }
    }

    /// A value of this shape, often a part of a longer one along its last axis, or turned, so that
    /// its rows are not neighbours in memory.
    fn cut(&mut self, dims: &[Len]) -> Option<usize> {
        let last = dims.len().wrapping_sub(1);
        let count = dims.last().and_then(|d| d.as_fixed());
        let Some(count) = count.filter(|_| !self.rng.one_in(3)) else {
            return self.of_shape(dims);
        };
        let mut longer = dims.to_vec();
        if self.rng.one_in(3) && last > 0 {
            longer.swap(last, last - 1);
            let x = self.of_shape(&longer)?;
            return self.push(Op::T, &[x]);
        }
        let start = self.rng.below(2);
        longer[last] = Len::fixed(count + 1 + self.rng.below(2));
        let x = self.of_shape(&longer)?;
        let part = Op::Slice {
            axis: last,
            start,
            end: Some(start + count),
            step: 1,
        };
        self.push(part, &[x])
    }

    pub(super) fn attention_with(&mut self) -> Option<usize> {
        let q = match self.find(|f| single(f) && f.rank() > 2) {
            Some(q) => q,
            None => {
                let n = self.rng.pick(&self.lengths);
                let shape = [1, self.rng.pick(&[1, 2, 4]), n, 2].map(Axis::Fixed);
                self.input(DType::F32, shape.to_vec())?
            }
        };
        let mut dims = self.fact(q).dims.clone();
        let rank = dims.len();
        if let Some(heads) = dims[rank - 3].as_fixed().filter(|&n| n > 0) {
            let few = 1 + self.rng.below(heads);
            if heads % few == 0 {
                dims[rank - 3] = Len::fixed(few);
            }
        }
        if self.rng.one_in(2) {
            dims[rank - 2] = Len::fixed(self.rng.pick(&self.lengths).max(1));
        }
        let k = self.of_shape(&dims)?;
        let v = self.of_shape(&dims)?;
        let mut args = vec![q, k, v];
        let keys = dims[rank - 2];
        let of_scores = self.fact(q).dims.clone();
        if self.rng.one_in(4) {
            args.extend(self.find(|f| {
                (single(f) || (f.dtype == DType::Bool && f.exact))
                    && f.rank() == rank
                    && f.dims[rank - 1] == keys
                    && (0..rank - 1).all(|i| f.dims[i] == of_scores[i] || f.dims[i].is(1))
            }));
        }
        let method = Method::AttentionWith {
            causal: self.rng.one_in(2),
            past: self.rng.pick(&[0, 0, 1, 2]),
            window: self.rng.one_in(2).then(|| 1 + self.rng.below(4)),
            cap: self.rng.one_in(4).then_some(4.0),
            tiles: self.rng.one_in(3).then(|| 1 + self.rng.below(2)),
        };
        self.call(method, &args)
    }

    fn padding<const N: usize>(&mut self) -> Padding<N> {
        match self.rng.below(6) {
            0 => Padding::Same,
            1 => Padding::SameLower,
            2 => Padding::Causal,
            _ => Padding::Sides([(); N].map(|()| (self.rng.below(3), self.rng.below(2)))),
        }
    }

    /// An operand of `axes` axes after batch and channels, or an input.
    pub(super) fn field(&mut self, axes: usize) -> Option<usize> {
        let small = |f: &Fact| {
            single(f)
                && f.rank() == 2 + axes
                && f.dims[1..]
                    .iter()
                    .all(|d| d.as_fixed().is_some_and(|n| n > 0))
        };
        if let Some(x) = self.find(small) {
            return Some(x);
        }
        let mut shape = vec![Axis::Fixed(self.rng.pick(&[1, 2]))];
        if !self.scope.case.dims.is_empty() && self.rng.one_in(2) {
            shape[0] = Axis::Named(0);
        }
        shape.push(Axis::Fixed(self.rng.pick(&[1, 2, 3, 4])));
        for _ in 0..axes {
            let most: &[usize] = if axes == 3 { &[1, 2, 3] } else { &[1, 3, 4, 6] };
            shape.push(Axis::Fixed(self.rng.pick(most)));
        }
        self.input(DType::F32, shape)
    }

    fn weight<const N: usize>(
        &mut self,
        x: usize,
        transposed: bool,
    ) -> Option<(ConvOptions<N>, usize)> {
        let channels = self.fact(x).dims[1].as_fixed()?;
        let even = channels % 2 == 0;
        let groups = self.rng.pick(&[1, 1, if even { 2 } else { 1 }, channels]);
        let mut options = ConvOptions::new().groups(groups);
        options.stride = [(); N].map(|()| 1 + self.rng.below(2));
        options.dilation = [(); N].map(|()| self.rng.pick(&[1, 1, 2]));
        options.padding = self.padding();
        let mut lengths = if transposed {
            options.padding =
                Padding::Sides([(); N].map(|()| (self.rng.below(2), self.rng.below(2))));
            options.output_padding = [(); N].map(|()| self.rng.below(2));
            vec![channels, 1 + self.rng.below(2)]
        } else {
            vec![groups * (1 + self.rng.below(2)), channels / groups]
        };
        lengths.extend((0..N).map(|_| self.rng.pick(&[1, 2, 3])));
        let w = self.input(DType::F32, lengths.into_iter().map(Axis::Fixed).collect())?;
        Some((options, w))
    }

    pub(super) fn convolution_with(&mut self) -> Option<usize> {
        match self.rng.below(5) {
            0 => {
                let x = self.field(1)?;
                let (options, w) = self.weight(x, false)?;
                self.call(Method::Conv1d(options), &[x, w])
            }
            1 => {
                let x = self.field(2)?;
                let (options, w) = self.weight(x, false)?;
                self.call(Method::Conv2d(options), &[x, w])
            }
            2 => {
                let x = self.field(3)?;
                let (options, w) = self.weight(x, false)?;
                self.call(Method::Conv3d(options), &[x, w])
            }
            3 => {
                let x = self.field(1)?;
                let (options, w) = self.weight(x, true)?;
                self.call(Method::ConvTranspose1d(options), &[x, w])
            }
            _ => {
                let x = self.field(2)?;
                let (options, w) = self.weight(x, true)?;
                self.call(Method::ConvTranspose2d(options), &[x, w])
            }
        }
    }

    pub(super) fn windows<const N: usize>(&mut self) -> PoolOptions<N> {
        let mut options = PoolOptions::new([(); N].map(|()| 1 + self.rng.below(3)))
            .stride([(); N].map(|()| 1 + self.rng.below(3)));
        if self.rng.one_in(4) {
            options.dilation = [(); N].map(|()| 1 + self.rng.below(2));
        } else {
            options.padding = match self.rng.below(3) {
                0 => Padding::Same,
                _ => Padding::Sides([(); N].map(|()| (self.rng.below(2), self.rng.below(2)))),
            };
        }
        options.ceil = self.rng.one_in(2);
        options.count_padding = self.rng.one_in(2);
        options
    }

    pub(super) fn pool_with(&mut self) -> Option<usize> {
        let pool = self
            .rng
            .pick(&[Pool::Max, Pool::Max, Pool::Avg, Pool::Positions]);
        if self.rng.one_in(3) {
            let x = self.field(1)?;
            let options = self.windows();
            return self.call(Method::Pool1d(pool, options), &[x]);
        }
        let x = self.field(2)?;
        if self.rng.one_in(5) {
            let size = [1 + self.rng.below(6), 1 + self.rng.below(6)];
            return self.call(Method::AdaptiveMaxPool(size), &[x]);
        }
        let options = self.windows();
        self.call(Method::Pool2d(pool, options), &[x])
    }

    pub(super) fn resample(&mut self) -> Option<usize> {
        if self.rng.one_in(3) {
            let x = self.field(2)?;
            let batch = self.fact(x).dims[0];
            let (h, w) = (1 + self.rng.below(3), 1 + self.rng.below(3));
            let shape = vec![
                self.axis(batch)?,
                Axis::Fixed(h),
                Axis::Fixed(w),
                Axis::Fixed(2),
            ];
            let grid = self.input(DType::F32, shape)?;
            let method = Method::GridSample {
                sampling: self.rng.pick(&[
                    Sampling::Nearest,
                    Sampling::Bilinear,
                    Sampling::Bilinear,
                    Sampling::Bicubic,
                ]),
                beyond: self
                    .rng
                    .pick(&[Beyond::Zeros, Beyond::Border, Beyond::Reflection]),
                corners: self.rng.one_in(2),
            };
            return self.call(method, &[x, grid]);
        }
        let axes = 1 + self.rng.below(2);
        let x = self.field(axes)?;
        let align_corners = self.rng.one_in(2);
        let how = self.rng.pick(&[
            Interpolate::Nearest,
            Interpolate::NearestExact,
            Interpolate::Linear { align_corners },
            Interpolate::Linear { align_corners },
            Interpolate::Cubic { align_corners },
            Interpolate::AntialiasedLinear,
            Interpolate::AntialiasedCubic,
        ]);
        let size = (0..axes).map(|_| 1 + self.rng.below(8)).collect();
        self.call(Method::Interpolate(how, size), &[x])
    }

    pub(super) fn norm_with(&mut self) -> Option<usize> {
        match self.rng.below(3) {
            0 => {
                let axes = 1 + self.rng.below(2);
                let x = self.field(axes)?;
                let size = 1 + self.rng.below(4);
                self.call(Method::LocalResponseNorm(size), &[x])
            }
            kind => {
                let x = self.find(|f| single(f) && f.rank() > 0)?;
                let axes = self.some_axes(x);
                let method = match kind {
                    1 => Method::L2Normalize(axes),
                    _ => Method::Variance(axes),
                };
                self.call(method, &[x])
            }
        }
    }

    pub(super) fn loss_with(&mut self) -> Option<usize> {
        let x = self.find(|f| single(f) && f.rank() > 0)?;
        let dims = self.fact(x).dims.clone();
        let reduction = self.rng.pick(&[
            Reduction::None,
            Reduction::Mean,
            Reduction::Sum,
            Reduction::BatchMean,
        ]);
        if self.rng.one_in(2) {
            let axis = self.an_axis(x)?;
            let (classes, mut rest) = (dims[axis], dims.clone());
            rest.remove(axis);
            let labels = self.index(&rest, classes.least())?;
            let mut args = vec![x, labels];
            if self.rng.one_in(3) {
                let weights = self.of_shape(&[classes])?;
                args.push(self.positive(weights)?);
            }
            let method = Method::CrossEntropyWith {
                axis,
                ignore: self.rng.pick(&[None, None, Some(0), Some(1), Some(-100)]),
                smoothing: self.rng.pick(&[0.0, 0.0, 0.25]),
                reduction,
            };
            return self.call(method, &args);
        }
        let mut x = x;
        let mut y = self.of_shape(&dims)?;
        let loss = self.rng.pick(&[
            Loss::L1,
            Loss::SmoothL1,
            Loss::PoissonNll,
            Loss::SoftMargin,
            Loss::Focal,
            Loss::Dice,
            Loss::KlDivergenceOfLogs,
        ]);
        match loss {
            Loss::PoissonNll => x = self.push(Op::Unary(Unary::Tanh), &[x])?,
            Loss::KlDivergenceOfLogs => y = self.push(Op::Unary(Unary::Tanh), &[y])?,
            Loss::Focal => y = self.push(Op::Unary(Unary::Sigmoid), &[y])?,
            Loss::Dice => {
                x = self.push(Op::Unary(Unary::Sigmoid), &[x])?;
                y = self.push(Op::Unary(Unary::Sigmoid), &[y])?;
            }
            _ => {}
        }
        self.call(Method::Loss(loss, reduction), &[x, y])
    }

    /// A loop over the first axis of a value.
    pub(super) fn scan(&mut self) -> Option<usize> {
        let steps = |f: &Fact| f.dims.first().and_then(|n| n.as_fixed()).unwrap_or(0);
        let x = match self.find(|f| single(f) && steps(f) > 0 && f.rank() > 1) {
            Some(x) => x,
            None => {
                let lengths = [self.rng.pick(&[1, 2, 3, 5]), 2, self.rng.pick(&[1, 3])];
                self.input(DType::F32, lengths.map(Axis::Fixed).to_vec())?
            }
        };
        let dims = self.fact(x).dims[1..].to_vec();
        let first = self.cut(&dims)?;
        let mut args = vec![x, first];
        let body = self.rng.pick(Body::ALL);
        if let Some(captured) = Loop::captured(body, &dims) {
            args.push(self.cut(&captured)?);
        }
        let method = Method::Scan(Loop {
            body,
            reverse: self.rng.one_in(2),
            checkpoint_every: self.rng.one_in(3).then(|| 1 + self.rng.below(3)),
            take: self
                .rng
                .pick(&[Take::Carry, Take::Results, Take::All, Take::All]),
        });
        self.call(method, &args)
    }

    pub(super) fn ctc(&mut self) -> Option<usize> {
        let known = |d: &Len| d.as_fixed().is_some_and(|n| n > 0);
        let fits = |f: &Fact| {
            single(f) && f.rank() == 3 && known(&f.dims[0]) && f.dims[1..].iter().all(known)
        };
        let x = match self.find(|f| fits(f) && f.dims[2].least() > 1) {
            Some(x) => x,
            None => {
                let lengths = [self.rng.pick(&[1, 2, 5]), self.rng.pick(&[1, 2]), 3];
                self.input(DType::F32, lengths.map(Axis::Fixed).to_vec())?
            }
        };
        let [n, classes] = [1, 2].map(|i| self.fact(x).dims[i]);
        let blank = classes.least() - 1;
        let count = Len::fixed(1 + self.rng.below(2));
        let labels = self.index(&[n, count], blank)?;
        let labels = self.push(Op::Cast(DType::I32), &[labels])?;
        let reduction = self
            .rng
            .pick(&[Reduction::None, Reduction::Mean, Reduction::Sum]);
        let blank = blank as i32;
        self.call(Method::Ctc { blank, reduction }, &[x, labels])
    }

    /// A value of this shape that exists, or an input, or random numbers where there may be no more
    /// inputs.
    fn floats(&mut self, shape: Vec<Axis>) -> Option<usize> {
        let dims = self.scope.shape(&shape)?;
        if let Some(found) = self.of_shape(&dims) {
            return Some(found);
        }
        self.keyed_by(Numbers::Uniform, shape)
    }

    /// Bytes of any bits.
    fn bytes(&mut self, shape: Vec<Axis>) -> Option<usize> {
        let x = match self.rng.below(3) {
            0 => self.input(DType::U8, shape.clone()),
            1 => self.input(DType::I32, shape.clone()),
            _ => None,
        };
        let x = x.or_else(|| self.keyed_by(Numbers::Randint, shape))?;
        // These are at most 2.
        let times = self.rng.pick(&[1, 39, 85, 98, 127]) as f32;
        let x = self.push(Op::Number(Binary::Mul, times), &[x])?;
        self.push(Op::Cast(DType::U8), &[x])
    }

    /// Weights of packed numbers, and perhaps a product with their transposed matrix or some of
    /// their rows.
    pub(super) fn dequantize(&mut self) -> Option<usize> {
        let bits = self.rng.pick(&[2, 4, 8]);
        let per_byte = 8 / bits as usize;
        // Blocks of whole 8 bytes have a kernel for products.
        let sizes = [8 * per_byte, 8 * per_byte, per_byte, 1, 3, 6];
        let block = self.rng.pick(&sizes);
        let most = (64 / block).clamp(1, 5);
        let blocks = 1 + self.rng.below(most);
        let blocks = (blocks..blocks + 4).find(|n| (n * block).is_multiple_of(per_byte))?;
        let columns = blocks * block;
        let rows = match self.rng.one_in(4) && !self.scope.case.dims.is_empty() {
            true => Axis::Named(0),
            false => Axis::Fixed(self.rng.pick(&self.lengths)),
        };
        let of_blocks = vec![rows, Axis::Fixed(blocks)];
        let numbers = self.bytes(vec![rows, Axis::Fixed(columns / per_byte)])?;
        let zeros = match self.rng.below(3) {
            0 => None,
            1 => Some(self.floats(of_blocks.clone())?),
            _ => Some(self.bytes(vec![rows, Axis::Fixed(blocks.div_ceil(per_byte))])?),
        };
        // A weight within the bound, because one that is scaled down afterwards is no factor that
        // the kernel reads.
        let scales = self.floats(of_blocks)?;
        let most = f64::from(1 << bits) + zeros.map_or(0.0, |z| self.fact(z).bound().min(8.0));
        let share = BOUND / (most * self.fact(scales).bound().max(f64::MIN_POSITIVE));
        let share = share.min(1.0).log2().floor().exp2() as f32;
        let scales = self.push(Op::Number(Binary::Mul, share), &[scales])?;
        let mut args = vec![numbers, scales];
        args.extend(zeros);
        let block = block as u32;
        let weight = self.call(Method::Dequantize(Quantization { bits, block }), &args)?;
        let dims = self.fact(weight).dims.clone();
        match self.rng.below(4) {
            0 => Some(weight),
            1 => {
                let n = Len::fixed(self.rng.pick(&self.lengths));
                let index = self.index(&[n], dims[0].least())?;
                self.push(Op::Embed, &[weight, index])
            }
            _ => {
                let fits = |f: &Fact| {
                    single(f) && f.rank() > 1 && f.dims.last() == dims.last() && f.dims != dims
                };
                let x = match self.find(fits) {
                    Some(x) => x,
                    None => {
                        let n = Axis::Fixed(self.rng.pick(&self.lengths));
                        self.floats(vec![n, Axis::Fixed(columns)])?
                    }
                };
                let transposed = self.push(Op::T, &[weight])?;
                self.push(Op::Matmul, &[x, transposed])
            }
        }
    }

    fn keyed_by(&mut self, numbers: Numbers, shape: Vec<Axis>) -> Option<usize> {
        let method = Method::Keyed {
            seed: self.rng.bits() >> 40,
            numbers,
            shape,
        };
        self.call(method, &[])
    }

    pub(super) fn keyed(&mut self) -> Option<usize> {
        let method = Method::Keyed {
            seed: self.rng.bits() >> self.rng.pick(&[0, 32, 60]),
            numbers: self.rng.pick(&Numbers::ALL),
            shape: self.any_shape(),
        };
        self.call(method, &[])
    }

    pub(super) fn arrange(&mut self) -> Option<usize> {
        let x = self.find(|f| f.rank() > 0)?;
        let (axis, rank) = (self.an_axis(x)?, self.fact(x).rank());
        let method = match self.rng.below(6) {
            0 => Method::Flip(self.some_axes(x)),
            1 => Method::Roll(axis, self.rng.below(9) as i64 - 4),
            2 => Method::RepeatInterleave(axis, self.rng.below(4)),
            3 => {
                let modes = [
                    PadMode::Constant(0.0),
                    PadMode::Reflect,
                    PadMode::Replicate,
                    PadMode::Circular,
                ];
                let mut pads = vec![(0, 0); rank];
                pads[axis] = (self.rng.below(5) as i64 - 1, self.rng.below(4) as i64 - 1);
                Method::PadWith(self.rng.pick(&modes), pads)
            }
            4 => Method::Triangle {
                upper: self.rng.one_in(2),
                diagonal: self.rng.below(5) as i64 - 2,
            },
            _ => {
                let x =
                    self.find(|f| f.rank() > 0 && matches!(f.dtype, DType::F32 | DType::I32))?;
                let axis = self.an_axis(x)?;
                let fact = self.fact(x).clone();
                let factors = self.find(|f| f.dtype == fact.dtype && f.dims == fact.dims)?;
                let factors = match fact.dtype {
                    DType::F32 => self.push(Op::Unary(Unary::Tanh), &[factors])?,
                    _ => self.push(Op::Number(Binary::Minimum, 1.0), &[factors])?,
                };
                let by = [self.rng.one_in(3), self.rng.one_in(2)];
                return self.call(Method::LinearRecurrence { axis, by }, &[x, factors]);
            }
        };
        self.call(method, &[x])
    }
}
