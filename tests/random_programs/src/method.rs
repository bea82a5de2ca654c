//! Methods with options: attention, convolutions, poolings, resampling, losses, random numbers of a
//! key, arrangements. Each as data, as a call, as the text of one; `method_rules` has their shapes.

use slabwise::tensor::Ctc;
use slabwise::tensor::{
    AttentionOptions, Beyond, ConvOptions, CrossEntropy, Interpolate, PadMode, Padding,
    PoolOptions, Reduction, Sampling,
};
use slabwise::{DType, Dim, Mask, Quantization, Running, Tensor, Tiles, Trace};

use crate::axis::Axis;
use crate::indexing::Indexing;
use crate::scans::Loop;

/// A method with options, and its options.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)] // the methods of slabwise, by their names
pub enum Method {
    /// Of queries, keys and values, perhaps with fewer heads of keys, and a mask that is added.
    AttentionWith {
        causal: bool,
        past: usize,
        window: Option<usize>,
        cap: Option<f32>,
        tiles: Option<usize>,
    },
    Conv1d(ConvOptions<1>),
    Conv2d(ConvOptions<2>),
    Conv3d(ConvOptions<3>),
    ConvTranspose1d(ConvOptions<1>),
    ConvTranspose2d(ConvOptions<2>),
    Pool1d(Pool, PoolOptions<1>),
    Pool2d(Pool, PoolOptions<2>),
    AdaptiveMaxPool([usize; 2]),
    Interpolate(Interpolate, Vec<usize>),
    GridSample {
        sampling: Sampling,
        beyond: Beyond,
        corners: bool,
    },
    LocalResponseNorm(usize),
    L2Normalize(Vec<usize>),
    Variance(Vec<usize>),
    Loss(Loss, Reduction),
    CrossEntropyWith {
        axis: usize,
        ignore: Option<i32>,
        smoothing: f32,
        reduction: Reduction,
    },
    Keyed {
        seed: u64,
        numbers: Numbers,
        shape: Vec<Axis>,
    },
    Flip(Vec<usize>),
    Roll(usize, i64),
    RepeatInterleave(usize, usize),
    PadWith(PadMode, Vec<(i64, i64)>),
    Triangle {
        upper: bool,
        diagonal: i64,
    },
    LinearRecurrence {
        axis: usize,
        by: [bool; 2],
    },
    /// A loop over the first axis of an operand, whose carry begins as the second operand; perhaps
    /// with a captured value.
    Scan(Loop),
    Index(Indexing),
    /// Of logarithms of probabilities and labels.
    Ctc {
        blank: i32,
        reduction: Reduction,
    },
    /// Of packed numbers and scales, perhaps of zero points, which are packed or floats.
    Dequantize(Quantization),
}

/// What a pooling takes of each window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Pool {
    Max,
    Avg,
    Positions,
}

/// A loss of a prediction and its target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Loss {
    L1,
    SmoothL1,
    PoissonNll,
    SoftMargin,
    Focal,
    Dice,
    KlDivergenceOfLogs,
}

/// A distribution of random numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Numbers {
    Uniform,
    Normal,
    Bernoulli,
    Randint,
    Exponential,
    Gumbel,
}

impl Numbers {
    /// All of them.
    pub const ALL: [Numbers; 6] = [
        Numbers::Uniform,
        Numbers::Normal,
        Numbers::Bernoulli,
        Numbers::Randint,
        Numbers::Exponential,
        Numbers::Gumbel,
    ];
}

/// The ε of [`Tensor::l2_normalize`], large enough that rounding does not decide much.
const EPS: f32 = 0.5;

impl Method {
    /// The shape that it writes down.
    pub fn shape(&self) -> &[Axis] {
        match self {
            Method::Keyed { shape, .. } => shape,
            Method::Index(method) => method.shape(),
            _ => &[],
        }
    }

    /// [`Method::shape`], to change it.
    pub fn shape_mut(&mut self) -> &mut [Axis] {
        match self {
            Method::Keyed { shape, .. } => shape,
            Method::Index(method) => method.shape_mut(),
            _ => &mut [],
        }
    }

    /// Whether the result is discontinuous in an operand.
    pub fn jumps(&self) -> bool {
        matches!(
            self,
            Method::Pool1d(Pool::Positions, _) | Method::Pool2d(Pool::Positions, _)
        )
    }

    /// The result.
    pub(crate) fn apply<'t>(
        &self,
        trace: &'t Trace,
        args: &[Tensor<'t>],
        dim: impl Fn(Axis) -> Dim,
    ) -> Tensor<'t> {
        match (self, args) {
            (
                Method::Keyed {
                    seed,
                    numbers,
                    shape,
                },
                _,
            ) => {
                let shape: Vec<Dim> = shape.iter().map(|&axis| dim(axis)).collect();
                let (key, shape) = (trace.key(*seed), shape.as_slice());
                match numbers {
                    Numbers::Uniform => key.uniform(shape),
                    Numbers::Normal => key.normal(shape),
                    Numbers::Bernoulli => key.bernoulli(0.25, shape),
                    Numbers::Randint => key.randint(0..3, shape),
                    Numbers::Exponential => key.exponential(shape),
                    Numbers::Gumbel => key.gumbel(shape),
                }
            }
            (&Method::Dequantize(format), [numbers, scales, zeros @ ..]) => {
                numbers.dequantize(format, *scales, zeros.first().copied())
            }
            (Method::AttentionWith { .. }, [q, k, v, mask @ ..]) => {
                q.attention_with(*k, *v, self.attention(mask.first().copied()))
            }
            (Method::Index(method), args) => method.apply(args, dim),
            (method, [x]) => method.of_one(*x),
            (Method::Conv1d(options), [x, w]) => x.conv1d_with(*w, *options),
            (Method::Conv2d(options), [x, w]) => x.conv2d_with(*w, *options),
            (Method::Conv3d(options), [x, w]) => x.conv3d_with(*w, *options),
            (Method::ConvTranspose1d(options), [x, w]) => x.conv_transpose1d(*w, *options),
            (Method::ConvTranspose2d(options), [x, w]) => x.conv_transpose2d(*w, *options),
            (
                Method::GridSample {
                    sampling,
                    beyond,
                    corners,
                },
                [x, grid],
            ) => x.grid_sample(*grid, *sampling, *beyond, *corners),
            (Method::Loss(loss, by), [x, y]) => match loss {
                Loss::L1 => x.l1_by(*y, *by),
                Loss::SmoothL1 => x.smooth_l1(*y, 0.5, *by),
                Loss::PoissonNll => x.poisson_nll(*y, *by),
                Loss::SoftMargin => x.soft_margin(*y, *by),
                Loss::Focal => x.focal(*y, 0.25, 2.0, *by),
                Loss::Dice => x.dice(*y, 1.0, *by),
                Loss::KlDivergenceOfLogs => x.kl_divergence_of_logs(*y, *by),
            },
            (
                &Method::CrossEntropyWith {
                    axis,
                    ignore,
                    smoothing,
                    reduction,
                },
                [x, labels, weights @ ..],
            ) => {
                let options = CrossEntropy {
                    class_axis: Some(axis),
                    ignore,
                    weights: weights.first().copied(),
                    smoothing,
                    reduction,
                };
                x.cross_entropy_with(*labels, options)
            }
            (&Method::LinearRecurrence { axis, by }, [x, factors]) => {
                x.linear_recurrence(*factors, axis, running(by))
            }
            (Method::Scan(l), args) => l.apply(trace, args),
            (&Method::Ctc { blank, reduction }, [x, labels]) => {
                let options = Ctc {
                    blank,
                    reduction,
                    zero_infinity: true,
                    ..Ctc::default()
                };
                x.ctc(*labels, options)
            }
            (other, _) => unreachable!("{other:?} with {} operands", args.len()),
        }
    }

    fn of_one<'t>(&self, x: Tensor<'t>) -> Tensor<'t> {
        match self {
            Method::Pool1d(Pool::Max, options) => x.max_pool1d_with(*options),
            Method::Pool1d(Pool::Avg, options) => x.avg_pool1d_with(*options),
            Method::Pool1d(Pool::Positions, options) => x.max_pool1d_positions(*options),
            Method::Pool2d(Pool::Max, options) => x.max_pool2d_with(*options),
            Method::Pool2d(Pool::Avg, options) => x.avg_pool2d_with(*options),
            Method::Pool2d(Pool::Positions, options) => x.max_pool2d_positions(*options),
            Method::AdaptiveMaxPool(size) => x.adaptive_max_pool2d(*size),
            Method::Interpolate(method, size) => x.interpolate(size, *method),
            Method::LocalResponseNorm(size) => x.local_response_norm(*size, 0.5, 0.75, 1.0),
            Method::L2Normalize(axes) => x.l2_normalize(axes.as_slice(), EPS),
            Method::Variance(axes) => x.var_keep(axes.as_slice(), 0),
            Method::Flip(axes) => x.flip(axes.as_slice()),
            Method::Roll(axis, shift) => x.roll(*axis, *shift),
            Method::RepeatInterleave(axis, times) => x.repeat_interleave(*axis, *times),
            Method::PadWith(mode, pads) => x.pad_with(pads, *mode),
            Method::Triangle {
                upper: true,
                diagonal,
            } => x.triu(*diagonal),
            Method::Triangle { diagonal, .. } => x.tril(*diagonal),
            other => unreachable!("{other:?} with one operand"),
        }
    }

    fn attention<'t>(&self, mask: Option<Tensor<'t>>) -> AttentionOptions<'t> {
        let Method::AttentionWith {
            causal,
            past,
            window,
            cap,
            tiles,
        } = *self
        else {
            return AttentionOptions::new();
        };
        let mut options = AttentionOptions::new()
            .past(past)
            .tiles(tiles.map_or(Tiles::Auto, Tiles::Queries))
            .mask(mask.map_or(Mask::None, |mask| match mask.dtype() {
                DType::Bool => Mask::Seen(mask),
                _ => Mask::Added(mask),
            }));
        if causal {
            options = options.causal();
        }
        if let Some(window) = window {
            options = options.window(window);
        }
        match cap {
            Some(cap) => options.soft_cap(cap),
            None => options,
        }
    }

    /// The expression of its call; `shape` is the text of [`Method::shape`].
    pub(crate) fn text(&self, args: &[String], shape: &str) -> String {
        let x = args.first().map_or("", String::as_str);
        let y = args.get(1).map_or("", String::as_str);
        let axes = |axes: &[usize]| match axes {
            [] => "[0usize; 0]".to_string(),
            axes => format!("{axes:?}"),
        };
        match self {
            Method::AttentionWith {
                causal,
                past,
                window,
                cap,
                tiles,
            } => {
                let mut options = format!("AttentionOptions::new().past({past})");
                if let Some(queries) = tiles {
                    options += &format!(".tiles(Tiles::Queries({queries}))");
                }
                if let Some(mask) = args.get(3) {
                    options += &format!(
                        ".mask(if {mask}.dtype() == Bool {{ Mask::Seen({mask}) }} else {{ Mask::Added({mask}) }})"
                    );
                }
                if *causal {
                    options += ".causal()";
                }
                if let Some(window) = window {
                    options += &format!(".window({window})");
                }
                if let Some(cap) = cap {
                    options += &format!(".soft_cap({cap:?})");
                }
                format!("{x}.attention_with({y}, {}, {options})", args[2])
            }
            Method::Conv1d(options) => format!("{x}.conv1d_with({y}, {})", convolution(options)),
            Method::Conv2d(options) => format!("{x}.conv2d_with({y}, {})", convolution(options)),
            Method::Conv3d(options) => format!("{x}.conv3d_with({y}, {})", convolution(options)),
            Method::ConvTranspose1d(options) => {
                format!("{x}.conv_transpose1d({y}, {})", convolution(options))
            }
            Method::ConvTranspose2d(options) => {
                format!("{x}.conv_transpose2d({y}, {})", convolution(options))
            }
            Method::Pool1d(pool, options) => pooling(x, *pool, 1, options),
            Method::Pool2d(pool, options) => pooling(x, *pool, 2, options),
            Method::AdaptiveMaxPool(size) => format!("{x}.adaptive_max_pool2d({size:?})"),
            Method::Interpolate(method, size) => {
                format!("{x}.interpolate({size:?}, Interpolate::{method:?})")
            }
            Method::GridSample {
                sampling,
                beyond,
                corners,
            } => format!(
                "{x}.grid_sample({y}, Sampling::{sampling:?}, Beyond::{beyond:?}, {corners})"
            ),
            Method::LocalResponseNorm(size) => {
                format!("{x}.local_response_norm({size}, 0.5, 0.75, 1.0)")
            }
            Method::L2Normalize(list) => format!("{x}.l2_normalize({}, {EPS:?})", axes(list)),
            Method::Variance(list) => format!("{x}.var_keep({}, 0)", axes(list)),
            Method::Loss(loss, by) => {
                let (method, more) = match loss {
                    Loss::L1 => ("l1_by", ""),
                    Loss::SmoothL1 => ("smooth_l1", "0.5, "),
                    Loss::PoissonNll => ("poisson_nll", ""),
                    Loss::SoftMargin => ("soft_margin", ""),
                    Loss::Focal => ("focal", "0.25, 2.0, "),
                    Loss::Dice => ("dice", "1.0, "),
                    Loss::KlDivergenceOfLogs => ("kl_divergence_of_logs", ""),
                };
                format!("{x}.{method}({y}, {more}Reduction::{by:?})")
            }
            Method::CrossEntropyWith {
                axis,
                ignore,
                smoothing,
                reduction,
            } => {
                let weights = args
                    .get(2)
                    .map_or("None".to_string(), |w| format!("Some({w})"));
                format!(
                    "{x}.cross_entropy_with({y}, CrossEntropy {{ class_axis: Some({axis}), ignore: {ignore:?}, \
                     weights: {weights}, smoothing: {smoothing:?}, reduction: Reduction::{reduction:?} }})"
                )
            }
            Method::Keyed { seed, numbers, .. } => {
                let (method, more) = match numbers {
                    Numbers::Uniform => ("uniform", ""),
                    Numbers::Normal => ("normal", ""),
                    Numbers::Bernoulli => ("bernoulli", "0.25, "),
                    Numbers::Randint => ("randint", "0..3, "),
                    Numbers::Exponential => ("exponential", ""),
                    Numbers::Gumbel => ("gumbel", ""),
                };
                format!("trace.key({seed}).{method}({more}{shape})")
            }
            Method::Flip(list) => format!("{x}.flip({})", axes(list)),
            Method::Roll(axis, shift) => format!("{x}.roll({axis}, {shift})"),
            Method::RepeatInterleave(axis, times) => {
                format!("{x}.repeat_interleave({axis}, {times})")
            }
            Method::PadWith(mode, pads) => format!("{x}.pad_with({pads:?}, PadMode::{mode:?})"),
            Method::Triangle { upper, diagonal } => {
                format!("{x}.{}({diagonal})", if *upper { "triu" } else { "tril" })
            }
            Method::LinearRecurrence {
                axis,
                by: [exclusive, reverse],
            } => format!(
                "{x}.linear_recurrence({y}, {axis}, slabwise::Running {{ exclusive: {exclusive}, reverse: {reverse} }})"
            ),
            Method::Scan(l) => l.text(args),
            Method::Index(method) => method.text(args),
            Method::Ctc { blank, reduction } => format!(
                "{x}.ctc({y}, slabwise::tensor::Ctc {{ blank: {blank}, reduction: Reduction::{reduction:?}, \
                 zero_infinity: true, ..Default::default() }})"
            ),
            Method::Dequantize(Quantization { bits, block }) => {
                let zeros = args
                    .get(2)
                    .map_or("None".to_string(), |zeros| zeros.to_string());
                format!(
                    "{x}.dequantize(slabwise::Quantization {{ bits: {bits}, block: {block} }}, {y}, {zeros})"
                )
            }
        }
    }
}

fn running([exclusive, reverse]: [bool; 2]) -> Running {
    Running { exclusive, reverse }
}

fn padding<const N: usize>(padding: &Padding<N>) -> String {
    match padding {
        Padding::Sides(sides) => format!("{sides:?}"),
        other => format!("Padding::{other:?}"),
    }
}

fn convolution<const N: usize>(options: &ConvOptions<N>) -> String {
    let mut text = format!(
        "ConvOptions::new().stride({:?}).padding({}).dilation({:?}).groups({})",
        options.stride,
        padding(&options.padding),
        options.dilation,
        options.groups
    );
    if options.output_padding != [0; N] {
        text += &format!(".output_padding({:?})", options.output_padding);
    }
    text
}

fn pooling<const N: usize>(x: &str, pool: Pool, axes: usize, options: &PoolOptions<N>) -> String {
    let mut text = format!(
        "PoolOptions::new({:?}).stride({:?}).padding({}).dilation({:?})",
        options.window,
        options.stride,
        padding(&options.padding),
        options.dilation
    );
    if options.ceil {
        text += ".ceil()";
    }
    if !options.count_padding {
        text += ".without_padding_in_means()";
    }
    match pool {
        Pool::Max => format!("{x}.max_pool{axes}d_with({text})"),
        Pool::Avg => format!("{x}.avg_pool{axes}d_with({text})"),
        Pool::Positions => format!("{x}.max_pool{axes}d_positions({text})"),
    }
}
