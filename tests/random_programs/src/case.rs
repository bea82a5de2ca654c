//! A case as plain data: programs as lists of statements, their data, and the way they are run.

use slabwise::{DType, LossScale, Precision, Window};
use slabwise_compiler::ops::ConvGeometry;

pub use crate::axis::Axis;
use crate::method::Method;

/// A dimension with a length for each run.
#[derive(Clone, Debug, PartialEq)]
pub struct Named {
    /// Its name.
    pub name: &'static str,
    /// The largest length.
    pub max: u32,
    /// Whether it is declared as unbounded.
    pub free: bool,
    /// The length in each run; the last one also in all later runs.
    pub lengths: Vec<u32>,
}

macro_rules! methods {
    ($(#[$doc:meta])* $name:ident: $($variant:ident $method:literal),* $(,)?) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[allow(missing_docs)]
        pub enum $name { $($variant),* }

        impl $name {
            /// All of them.
            pub const ALL: &[$name] = &[$($name::$variant),*];

            /// Its method's name.
            pub fn text(self) -> &'static str {
                match self { $($name::$variant => $method),* }
            }
        }
    };
}

methods! {
    /// A method of one tensor, elementwise or a composition of such methods.
    Unary:
    Neg "neg", Not "not", Detach "detach", Abs "abs", Sign "sign", Exp "exp", Exp2 "exp2", Expm1 "expm1", Ln "ln", Log1p "log1p",
    Sqrt "sqrt", Rsqrt "rsqrt", Recip "recip", Tanh "tanh", Sigmoid "sigmoid", Relu "relu", Erf "erf", Sin "sin", Cos "cos",
    Floor "floor", Ceil "ceil", Round "round", Square "square", Gelu "gelu", GeluTanh "gelu_tanh", Silu "silu", Softplus "softplus",
    Log2 "log2", Log10 "log10", Lgamma "lgamma", Digamma "digamma", Tan "tan", Sinh "sinh", Cosh "cosh", Atan "atan", Asin "asin",
    Acos "acos", Asinh "asinh", Acosh "acosh", Atanh "atanh", Erfinv "erfinv", Logit "logit", Trunc "trunc", Fract "fract",
    IsNan "is_nan", IsInfinite "is_infinite", IsFinite "is_finite", BitNot "bit_not", LeakyRelu "leaky_relu(0.25)", Elu "elu(0.5)",
    Selu "selu", Hardsigmoid "hardsigmoid", Hardswish "hardswish", Hardtanh "hardtanh", Mish "mish", QuickGelu "quick_gelu",
    LogSigmoid "log_sigmoid", Softsign "softsign", Softshrink "softshrink(0.5)",
}

methods! {
    /// A method of two tensors, elementwise.
    Binary:
    Add "add", Sub "sub", Mul "mul", Div "div", Pow "pow", Minimum "minimum", Maximum "maximum", Lt "lt", Le "le", Gt "gt", Ge "ge",
    Equal "equal", NotEqual "not_equal", And "and", Or "or", Xor "xor",
    Atan2 "atan2", Fmod "fmod", Remainder "remainder", DivFloor "div_floor", BitAnd "bit_and", BitOr "bit_or", BitXor "bit_xor",
    ShiftLeft "shift_left", ShiftRight "shift_right", Hypot "hypot", LogAddExp "logaddexp",
}

methods! {
    /// Reductions over axes.
    Fold:
    Sum "sum", Prod "prod", Max "max", Min "min", Mean "mean", Any "any", All "all", ArgMax "argmax", ArgMin "argmin",
}

methods! {
    /// A layer with weights.
    Layer:
    Linear "Linear", LayerNorm "LayerNorm", RmsNorm "RmsNorm", BatchNorm1d "BatchNorm1d", BatchNorm2d "BatchNorm2d", Lstm "Lstm",
    Embedding "Embedding", MultiHeadAttention "MultiHeadAttention", Gru "Gru", Rnn "Rnn", Deep "Lstm", InstanceNorm "InstanceNorm",
    GroupNorm "GroupNorm", GroupedQueryAttention "GroupedQueryAttention", Encoder "TransformerEncoderLayer",
}

methods! {
    /// An optimizer.
    Rule:
    Sgd "Sgd::new(0.05)", Momentum "Sgd::new(0.05).momentum(0.9)", Nesterov "Sgd::new(0.05).momentum(0.5).nesterov()",
    Adam "Adam::new(0.01).eps(0.1)", AdamW "AdamW::new(0.01).weight_decay(0.1).eps(0.1)",
    Clipped "Sgd::new(0.05).clip_norm(1.0)", ClippedValues "Sgd::new(0.05).clip_value(0.5)", Averaged "Sgd::new(0.05).ema(0.5)",
    Amsgrad "Adam::new(0.01).eps(0.1).amsgrad()", Adagrad "Adagrad::new(0.01).eps(0.1)", Adadelta "Adadelta::new(0.5).eps(0.1)",
    Adamax "Adamax::new(0.01).eps(0.1)", NAdam "NAdam::new(0.01).eps(0.1)", RAdam "RAdam::new(0.01).eps(0.1)",
    RmsProp "RmsProp::new(0.01).eps(0.1).momentum(0.5)", Lamb "Lamb::new(0.01).eps(0.1)",
    Adafactor "Adafactor::new(0.01).eps(0.1, 0.1)",
}

methods! {
    /// A scale of losses.
    Scale:
    Fixed "LossScale::fixed(1024.0)", Dynamic "LossScale::dynamic().initial(64.0).interval(1)",
    Overflows "LossScale::dynamic().initial(3e38).interval(2)",
}

impl Scale {
    /// The option of a trace.
    pub fn option(self) -> LossScale {
        match self {
            Scale::Fixed => LossScale::fixed(1024.0),
            Scale::Dynamic => LossScale::dynamic().initial(64.0).interval(1),
            Scale::Overflows => LossScale::dynamic().initial(3e38).interval(2),
        }
    }
}

/// The operation of a statement; its operands are earlier statements.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)] // the methods of slabwise, by their names
pub enum Op {
    /// The last number selects its data.
    Input {
        dtype: DType,
        shape: Vec<Axis>,
        data: u32,
    },
    /// A parameter, by its position among those of the case.
    Param(usize),
    /// The value of a state, by its position among those of the case.
    State(usize),
    Full {
        value: f32,
        dtype: DType,
        shape: Vec<Axis>,
    },
    Arange(Axis),
    /// A length as a scalar.
    Length(Axis),
    Uniform(Vec<Axis>),
    UniformLike,
    Unary(Unary),
    Binary(Binary),
    /// With a number on the right.
    Number(Binary, f32),
    Select,
    Clamp(f32, f32),
    Cast(DType),
    /// Over all axes, or over some, which are dropped or kept.
    Fold {
        fold: Fold,
        axes: Option<Vec<usize>>,
        keep: bool,
    },
    CumSum(usize),
    /// Running results: exclusive, reverse.
    Run {
        run: Run,
        axis: usize,
        by: [bool; 2],
    },
    /// Values at places along an axis, joined with what is there.
    Scatter(usize, slabwise::Scatter),
    /// The part of an axis from this element on is replaced.
    SliceAssign {
        axis: usize,
        start: usize,
    },
    /// The same, with a start that the run says.
    UpdateSlice(usize),
    /// Returns values, or positions.
    TopK {
        k: usize,
        axis: usize,
        positions: bool,
    },
    Argsort(bool),
    Sort(bool),
    Matmul,
    Einsum(&'static str),
    Conv2d(ConvGeometry),
    ConvTranspose2d(ConvGeometry),
    MaxPool(Window),
    AvgPool(Window),
    GlobalAvgPool,
    AdaptiveAvgPool([usize; 2]),
    Reshape(Vec<Axis>),
    Flatten(usize),
    Unflatten {
        axis: usize,
        lengths: [usize; 2],
    },
    Permute(Vec<usize>),
    T,
    Expand(Vec<Axis>),
    Squeeze(usize),
    Unsqueeze(usize),
    Slice {
        axis: usize,
        start: usize,
        end: Option<usize>,
        step: usize,
    },
    Split {
        axis: usize,
        parts: usize,
        which: usize,
    },
    Pad {
        pads: Vec<(usize, usize)>,
        value: f32,
    },
    Concat(usize),
    Stack(usize),
    Gather(usize),
    IndexSelect(usize),
    Embed,
    OneHot(usize),
    Softmax(usize),
    LogSoftmax(usize),
    LogSumExp(usize),
    Normalize {
        axes: Vec<usize>,
        eps: f32,
    },
    GroupNormalize {
        groups: usize,
        eps: f32,
    },
    CrossEntropy(f32),
    BinaryCrossEntropy,
    BinaryCrossEntropyWithLogits,
    Huber(f32),
    Mse,
    Dropout(f32),
    /// Queries, keys, values, and perhaps a mask, boolean or additive. Tiles of so many queries.
    Attention {
        causal: bool,
        tiles: Option<usize>,
    },
    SelfAttention {
        heads: usize,
        causal: bool,
    },
    /// A layer of this name, of so many inputs and outputs.
    Layer {
        layer: Layer,
        name: usize,
        sizes: [usize; 2],
    },
    Nonzero,
    MaskedSelect,
    Compress(usize),
    Unique,
    DynamicSlice(usize),
    SliceFrom {
        axis: usize,
        length: usize,
    },
    Nms(f32),
    Method(Method),
    Keep,
    /// Functions, perhaps of the product with a second operand, recomputed for gradients.
    Checkpoint(Vec<Unary>),
    /// The gradient of the mean of the first operand with respect to the second; with a third, the
    /// mean of the gradient with respect to it is added.
    Gradient,
}

/// One statement of a program.
#[derive(Clone, Debug, PartialEq)]
pub struct Statement {
    /// The operation.
    pub op: Op,
    /// Its operands: positions of earlier statements.
    pub args: Vec<usize>,
}

/// The training of a program.
#[derive(Clone, Debug, PartialEq)]
pub struct Learn {
    /// The loss, a scalar; with parts, a tensor of which each part's mean of squares is the loss of
    /// a micro-batch.
    pub loss: usize,
    /// The optimizer.
    pub rule: Rule,
    /// Micro-batches along the first axis.
    pub parts: Option<usize>,
    /// A second loss, a scalar that depends on other weights.
    pub also: Option<usize>,
    /// The scale of losses.
    pub scale: Option<Scale>,
}

/// One traced program.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Program {
    /// Its statements.
    pub statements: Vec<Statement>,
    /// Positions of its outputs.
    pub outputs: Vec<usize>,
    /// Whether its trace is for training.
    pub training: bool,
    /// Its training.
    pub learn: Option<Learn>,
    /// The states that it sets, each with the statement of its new value.
    pub sets: Vec<(usize, usize)>,
    /// An input, by its statement, whose bytes become those of an output, by its position.
    pub donate: Option<(usize, usize)>,
}

/// What a running result is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Run {
    /// Sums.
    Sum,
    /// Products.
    Product,
    /// Logarithms of sums of exponentials.
    LogSumExp,
    /// The largest elements.
    Max,
    /// The smallest elements.
    Min,
    /// The positions of the largest elements.
    ArgMax,
}

/// A parameter declared by the case.
#[derive(Clone, Debug, PartialEq)]
pub struct Param {
    /// Its shape.
    pub dims: Vec<usize>,
    /// The initial value of all its elements; random numbers if there is none.
    pub value: Option<f32>,
}

/// A state declared by the case.
#[derive(Clone, Debug, PartialEq)]
pub struct State {
    /// Its type.
    pub dtype: DType,
    /// Its shape.
    pub dims: Vec<usize>,
}

/// Programs of one session, and their runs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Case {
    /// The seed of its data.
    pub seed: u64,
    /// Dimensions with a length for each run.
    pub dims: Vec<Named>,
    /// Weights.
    pub params: Vec<Param>,
    /// The type that weights are stored in, if it is not f32.
    pub stored: Option<DType>,
    /// The precision of all programs.
    pub precision: Precision,
    /// States.
    pub states: Vec<State>,
    /// Programs.
    pub programs: Vec<Program>,
    /// Positions of programs, in the order in which they run.
    pub runs: Vec<usize>,
    /// Whether inputs contain NaN, infinities, zeros of both signs and denormals.
    pub odd_numbers: bool,
}

impl Layer {
    /// The arguments of its constructor behind the scope, and the calls of its options.
    pub fn options(self, [inputs, outputs]: [usize; 2]) -> String {
        match self {
            Layer::LayerNorm | Layer::RmsNorm | Layer::BatchNorm1d | Layer::BatchNorm2d => {
                format!("{inputs})")
            }
            Layer::Deep => format!("{inputs}, {outputs}).layers(2).both_ways()"),
            Layer::InstanceNorm => format!("{inputs}).affine().eps(0.1)"),
            Layer::GroupNorm => format!("{outputs}, {inputs}).eps(0.1)"),
            Layer::GroupedQueryAttention => format!("{inputs}, {outputs}, 1)"),
            Layer::Encoder => format!("{inputs}, {outputs}, 3).dropout(0.0)"),
            _ => format!("{inputs}, {outputs})"),
        }
    }
}

impl Program {
    /// The statements of its inputs, in their order.
    pub fn inputs(&self) -> impl Iterator<Item = usize> {
        (0..self.statements.len()).filter(|&i| matches!(self.statements[i].op, Op::Input { .. }))
    }

    /// Whether it changes anything that another program of the session may read.
    pub fn has_effects(&self) -> bool {
        let moves = |s: &Statement| match s.op {
            Op::Layer { layer, .. } => matches!(layer, Layer::BatchNorm1d | Layer::BatchNorm2d),
            Op::Uniform(_) | Op::UniformLike | Op::Dropout(_) => true,
            _ => false,
        };
        self.learn.is_some()
            || !self.sets.is_empty()
            || (self.training && self.statements.iter().any(moves))
    }
}

impl Case {
    /// The length of a named dimension in a run.
    pub fn length(&self, dim: usize, run: usize) -> usize {
        let lengths = &self.dims[dim].lengths;
        lengths.get(run).or(lengths.last()).copied().unwrap_or(1) as usize
    }

    /// Statements of all programs.
    pub fn size(&self) -> usize {
        self.programs.iter().map(|p| p.statements.len()).sum()
    }
}
