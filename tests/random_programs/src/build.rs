//! The interpreter: records a program of a case on a trace.

use std::collections::HashMap;

use slabwise::nn::{
    BatchNorm1d, BatchNorm2d, Embedding, GroupNorm, GroupedQueryAttention, Gru, InstanceNorm,
    LayerNorm, Linear, Lstm, Module, MultiHeadAttention, RmsNorm, Rnn, TransformerEncoderLayer,
};
use slabwise::optim::{
    Adadelta, Adafactor, Adagrad, Adam, AdamW, Adamax, Lamb, NAdam, Optimizer, RAdam, RmsProp, Sgd,
};
use slabwise::{DType, Dim, Init, Mask, Param, Params, Tensor, Tiles, Trace};

use crate::case::{Axis, Binary, Case, Fold, Layer, Learn, Op, Program, Rule, Run, Unary};

/// Names of inputs, in the order in which a program declares them.
pub const INPUTS: [&str; 8] = ["a", "b", "c", "d", "e", "f", "g", "h"];

/// Parameters and states that the programs of a case share.
pub struct Model {
    /// The scope of the parameters.
    pub params: Params,
    weights: Vec<Param>,
    layers: HashMap<usize, Box<dyn Module>>,
}

/// The initial value of parameters that start as random numbers.
pub const SPREAD: Init = Init::Uniform {
    low: -1.0,
    high: 1.0,
};

impl Model {
    /// Declares the parameters of a case.
    pub fn new(case: &Case) -> Model {
        let stored = case.stored.unwrap_or(DType::F32);
        let params = Params::seeded(case.seed % 1000).stored_in(stored);
        let root = params.root();
        let init = |value: Option<f32>| value.map_or(SPREAD, Init::Constant);
        let weight = |(i, p): (usize, &crate::case::Param)| {
            root.param(&format!("w{i}"), p.dims.as_slice(), init(p.value))
        };
        let weights = case.params.iter().enumerate().map(weight).collect();
        let mut layers: HashMap<usize, Box<dyn Module>> = HashMap::new();
        for statement in case.programs.iter().flat_map(|p| &p.statements) {
            if let Op::Layer {
                layer,
                name,
                sizes: [inputs, outputs],
            } = statement.op
            {
                let scope = &root / &format!("l{name}");
                layers.entry(name).or_insert_with(|| match layer {
                    Layer::Linear => Box::new(Linear::new(scope, inputs, outputs)),
                    Layer::LayerNorm => Box::new(LayerNorm::new(scope, inputs)),
                    Layer::RmsNorm => Box::new(RmsNorm::new(scope, inputs)),
                    Layer::BatchNorm1d => Box::new(BatchNorm1d::new(scope, inputs)),
                    Layer::BatchNorm2d => Box::new(BatchNorm2d::new(scope, inputs)),
                    Layer::Lstm => Box::new(Lstm::new(scope, inputs, outputs)),
                    Layer::Embedding => Box::new(Embedding::new(scope, inputs, outputs)),
                    Layer::MultiHeadAttention => {
                        Box::new(MultiHeadAttention::new(scope, inputs, outputs))
                    }
                    Layer::Gru => Box::new(Gru::new(scope, inputs, outputs)),
                    Layer::Rnn => Box::new(Rnn::new(scope, inputs, outputs)),
                    Layer::Deep => {
                        Box::new(Lstm::new(scope, inputs, outputs).layers(2).both_ways())
                    }
                    Layer::InstanceNorm => {
                        Box::new(InstanceNorm::new(scope, inputs).affine().eps(0.1))
                    }
                    Layer::GroupNorm => Box::new(GroupNorm::new(scope, outputs, inputs).eps(0.1)),
                    Layer::GroupedQueryAttention => {
                        Box::new(GroupedQueryAttention::new(scope, inputs, outputs, 1))
                    }
                    Layer::Encoder => Box::new(
                        TransformerEncoderLayer::new(scope, inputs, outputs, 3).dropout(0.0),
                    ),
                });
            }
        }
        Model {
            params,
            weights,
            layers,
        }
    }
}

/// Records a program and returns its tensors.
pub fn build<'t>(
    case: &Case,
    program: &Program,
    model: &Model,
    trace: &'t Trace,
    swap: bool,
) -> Vec<Tensor<'t>> {
    let mut builder = Builder {
        case,
        model,
        trace,
        swap,
        inputs: 0,
    };
    let mut values: Vec<Tensor<'t>> = Vec::with_capacity(program.statements.len());
    for statement in &program.statements {
        let args: Vec<Tensor<'t>> = statement.args.iter().map(|&a| values[a]).collect();
        let value = builder.apply(&statement.op, &args);
        values.push(value);
    }
    for &(state, value) in &program.sets {
        builder.state(state).set(values[value]);
    }
    if let Some((input, position)) = program.donate {
        trace.donate(values[input], position);
    }
    let mut outputs: Vec<Tensor<'t>> = program.outputs.iter().map(|&o| values[o]).collect();
    if let Some(learn) = &program.learn {
        // A loss of micro-batches is the last output.
        outputs.extend(builder.learn(learn, &values));
    }
    outputs
}

struct Builder<'a, 't> {
    case: &'a Case,
    model: &'a Model,
    trace: &'t Trace,
    /// Whether unbounded dimensions are bounded and bounded ones unbounded.
    swap: bool,
    inputs: usize,
}

impl<'t> Builder<'_, 't> {
    fn dim(&self, axis: Axis) -> Dim {
        match axis {
            Axis::Fixed(n) => n.into(),
            Axis::Open => Dim::Fixed(-1),
            Axis::Named(at) => {
                let named = &self.case.dims[at];
                if named.free != self.swap {
                    Dim::unbounded(named.name)
                } else {
                    Dim::bounded(named.name, named.max)
                }
            }
        }
    }

    fn shape(&self, shape: &[Axis]) -> Vec<Dim> {
        shape.iter().map(|&axis| self.dim(axis)).collect()
    }

    fn state(&self, at: usize) -> slabwise::State<'t> {
        let state = &self.case.states[at];
        self.trace.state(
            &format!("s{at}"),
            state.dtype,
            state.dims.as_slice(),
            Init::Constant(0.0),
        )
    }

    fn learn(&self, learn: &Learn, values: &[Tensor<'t>]) -> Option<Tensor<'t>> {
        let done = self.minimize(learn.rule, values[learn.loss], learn.parts);
        if let Some(also) = learn.also {
            self.minimize(learn.rule, values[also], None);
        }
        done
    }

    fn minimize(&self, rule: Rule, loss: Tensor<'t>, parts: Option<usize>) -> Option<Tensor<'t>> {
        macro_rules! by {
            ($($rule:ident $optimizer:expr;)*) => {
                match rule { $(Rule::$rule => minimize(self.trace, loss, parts, $optimizer)),* }
            };
        }
        by! {
            Sgd Sgd::new(0.05);
            Momentum Sgd::new(0.05).momentum(0.9);
            Nesterov Sgd::new(0.05).momentum(0.5).nesterov();
            Adam Adam::new(0.01).eps(0.1);
            AdamW AdamW::new(0.01).weight_decay(0.1).eps(0.1);
            Clipped Sgd::new(0.05).clip_norm(1.0);
            ClippedValues Sgd::new(0.05).clip_value(0.5);
            Averaged Sgd::new(0.05).ema(0.5);
            Amsgrad Adam::new(0.01).eps(0.1).amsgrad();
            Adagrad Adagrad::new(0.01).eps(0.1);
            Adadelta Adadelta::new(0.5).eps(0.1);
            Adamax Adamax::new(0.01).eps(0.1);
            NAdam NAdam::new(0.01).eps(0.1);
            RAdam RAdam::new(0.01).eps(0.1);
            RmsProp RmsProp::new(0.01).eps(0.1).momentum(0.5);
            Lamb Lamb::new(0.01).eps(0.1);
            Adafactor Adafactor::new(0.01).eps(0.1, 0.1);
        }
    }

    fn apply(&mut self, op: &Op, args: &[Tensor<'t>]) -> Tensor<'t> {
        let trace = self.trace;
        match (op, args) {
            (Op::Input { dtype, shape, .. }, _) => {
                self.inputs += 1;
                trace.input(
                    INPUTS[self.inputs - 1],
                    *dtype,
                    self.shape(shape).as_slice(),
                )
            }
            (Op::Param(at), _) => trace.param(&self.model.weights[*at]),
            (Op::State(at), _) => self.state(*at).value(),
            (
                Op::Full {
                    value,
                    dtype,
                    shape,
                },
                _,
            ) => trace.full(*value, *dtype, self.shape(shape).as_slice()),
            (Op::Arange(n), _) => trace.arange(self.dim(*n)),
            (Op::Length(n), _) => trace.length(self.dim(*n)),
            (Op::Uniform(shape), _) => trace.uniform(self.shape(shape).as_slice()),
            (Op::Concat(axis), _) => trace.concat(args, *axis),
            (Op::Stack(axis), _) => trace.stack(args, *axis),
            (Op::Einsum(text), _) => trace.einsum(text, args),
            (Op::Method(method), _) => method.apply(trace, args, |axis| self.dim(axis)),
            (Op::Layer { name, .. }, [x]) => x.apply(&*self.model.layers[name]),
            (Op::Expand(shape), [x]) => x.expand(self.shape(shape).as_slice()),
            (Op::Reshape(shape), [x]) => x.reshape(self.shape(shape).as_slice()),
            (Op::Gradient, [of, wrt]) => trace.gradients(of.mean(), [*wrt])[0],
            (Op::Gradient, [of, wrt, other]) => {
                let both = trace.gradients(of.mean(), [*wrt, *other]);
                both[0] + both[1].mean()
            }
            (_, [x]) => one(op, *x),
            _ => several(op, args),
        }
    }
}

fn minimize<'t>(
    trace: &'t Trace,
    loss: Tensor<'t>,
    parts: Option<usize>,
    rule: impl Optimizer,
) -> Option<Tensor<'t>> {
    let Some(parts) = parts else {
        trace.minimize(loss, rule);
        return None;
    };
    let each = loss.split(0, parts);
    Some(trace.minimize_in_parts(parts, rule, |i| each[i].square().mean()))
}

fn unary(op: Unary, x: Tensor<'_>) -> Tensor<'_> {
    match op {
        Unary::Neg => -x,
        Unary::Not => !x,
        Unary::Detach => x.detach(),
        Unary::Abs => x.abs(),
        Unary::Sign => x.sign(),
        Unary::Exp => x.exp(),
        Unary::Exp2 => x.exp2(),
        Unary::Expm1 => x.expm1(),
        Unary::Ln => x.ln(),
        Unary::Log1p => x.log1p(),
        Unary::Sqrt => x.sqrt(),
        Unary::Rsqrt => x.rsqrt(),
        Unary::Recip => x.recip(),
        Unary::Tanh => x.tanh(),
        Unary::Sigmoid => x.sigmoid(),
        Unary::Relu => x.relu(),
        Unary::Erf => x.erf(),
        Unary::Sin => x.sin(),
        Unary::Cos => x.cos(),
        Unary::Floor => x.floor(),
        Unary::Ceil => x.ceil(),
        Unary::Round => x.round(),
        Unary::Square => x.square(),
        Unary::Gelu => x.gelu(),
        Unary::GeluTanh => x.gelu_tanh(),
        Unary::Silu => x.silu(),
        Unary::Softplus => x.softplus(),
        Unary::Log2 => x.log2(),
        Unary::Log10 => x.log10(),
        Unary::Lgamma => x.lgamma(),
        Unary::Digamma => x.digamma(),
        Unary::Tan => x.tan(),
        Unary::Sinh => x.sinh(),
        Unary::Cosh => x.cosh(),
        Unary::Atan => x.atan(),
        Unary::Asin => x.asin(),
        Unary::Acos => x.acos(),
        Unary::Asinh => x.asinh(),
        Unary::Acosh => x.acosh(),
        Unary::Atanh => x.atanh(),
        Unary::Erfinv => x.erfinv(),
        Unary::Logit => x.logit(),
        Unary::Trunc => x.trunc(),
        Unary::Fract => x.fract(),
        Unary::IsNan => x.is_nan(),
        Unary::IsInfinite => x.is_infinite(),
        Unary::IsFinite => x.is_finite(),
        Unary::BitNot => x.bit_not(),
        Unary::LeakyRelu => x.leaky_relu(0.25),
        Unary::Elu => x.elu(0.5),
        Unary::Selu => x.selu(),
        Unary::Hardsigmoid => x.hardsigmoid(),
        Unary::Hardswish => x.hardswish(),
        Unary::Hardtanh => x.hardtanh(),
        Unary::Mish => x.mish(),
        Unary::QuickGelu => x.quick_gelu(),
        Unary::LogSigmoid => x.log_sigmoid(),
        Unary::Softsign => x.softsign(),
        Unary::Softshrink => x.softshrink(0.5),
    }
}

fn binary<'t>(op: Binary, x: Tensor<'t>, y: impl slabwise::Operand<'t>) -> Tensor<'t> {
    match op {
        Binary::Add => x + y,
        Binary::Sub => x - y,
        Binary::Mul => x * y,
        Binary::Div => x / y,
        Binary::Pow => x.pow(y),
        Binary::Minimum => x.minimum(y),
        Binary::Maximum => x.maximum(y),
        Binary::Lt => x.lt(y),
        Binary::Le => x.le(y),
        Binary::Gt => x.gt(y),
        Binary::Ge => x.ge(y),
        Binary::Equal => x.equal(y),
        Binary::NotEqual => x.not_equal(y),
        Binary::And => x.and(y),
        Binary::Or => x.or(y),
        Binary::Xor => x.xor(y),
        Binary::Atan2 => x.atan2(y),
        Binary::Fmod => x.fmod(y),
        Binary::Remainder => x.remainder(y),
        Binary::DivFloor => x.div_floor(y),
        Binary::BitAnd => x.bit_and(y),
        Binary::BitOr => x.bit_or(y),
        Binary::BitXor => x.bit_xor(y),
        Binary::ShiftLeft => x.shift_left(y),
        Binary::ShiftRight => x.shift_right(y),
        Binary::Hypot => x.hypot(y),
        Binary::LogAddExp => x.logaddexp(y),
    }
}

fn fold<'t>(op: Fold, x: Tensor<'t>, axes: Option<&[usize]>, keep: bool) -> Tensor<'t> {
    match (op, axes) {
        (Fold::Sum, None) => x.sum(),
        (Fold::Prod, None) => x.prod(),
        (Fold::Max, None) => x.max(),
        (Fold::Min, None) => x.min(),
        (Fold::Mean, None) => x.mean(),
        (Fold::Any, None) => x.any(),
        (Fold::All, None) => x.all(),
        (Fold::ArgMax, None) => x.argmax(..),
        (Fold::ArgMin, None) => x.argmin(..),
        (Fold::Sum, Some(a)) => {
            if keep {
                x.sum_keep(a)
            } else {
                x.sum_over(a)
            }
        }
        (Fold::Prod, Some(a)) => {
            if keep {
                x.prod_keep(a)
            } else {
                x.prod_over(a)
            }
        }
        (Fold::Max, Some(a)) => {
            if keep {
                x.max_keep(a)
            } else {
                x.max_over(a)
            }
        }
        (Fold::Min, Some(a)) => {
            if keep {
                x.min_keep(a)
            } else {
                x.min_over(a)
            }
        }
        (Fold::Mean, Some(a)) => {
            if keep {
                x.mean_keep(a)
            } else {
                x.mean_over(a)
            }
        }
        (Fold::Any, Some(a)) => {
            if keep {
                x.any_keep(a)
            } else {
                x.any_over(a)
            }
        }
        (Fold::All, Some(a)) => {
            if keep {
                x.all_keep(a)
            } else {
                x.all_over(a)
            }
        }
        (Fold::ArgMax, Some(a)) => {
            if keep {
                x.argmax_keep(a)
            } else {
                x.argmax(a)
            }
        }
        (Fold::ArgMin, Some(a)) => {
            if keep {
                x.argmin_keep(a)
            } else {
                x.argmin(a)
            }
        }
    }
}

fn one<'t>(op: &Op, x: Tensor<'t>) -> Tensor<'t> {
    match op {
        Op::UniformLike => x.uniform_like(),
        Op::Unary(u) => unary(*u, x),
        Op::Number(b, number) => binary(*b, x, *number),
        Op::Clamp(low, high) => x.clamp(*low, *high),
        Op::Cast(dtype) => x.cast(*dtype),
        Op::Fold {
            fold: f,
            axes,
            keep,
        } => fold(*f, x, axes.as_deref(), *keep),
        Op::CumSum(axis) => x.cumsum(*axis),
        Op::Run {
            run,
            axis,
            by: [exclusive, reverse],
        } => {
            let by = slabwise::Running {
                exclusive: *exclusive,
                reverse: *reverse,
            };
            match run {
                Run::Sum => x.cumsum_by(*axis, by),
                Run::Product => x.cumprod_by(*axis, by),
                Run::LogSumExp => x.logcumsumexp_by(*axis, by),
                Run::Max => x.cummax(*axis).0,
                Run::Min => x.cummin(*axis).0,
                Run::ArgMax => x.cummax(*axis).1,
            }
        }
        Op::TopK { k, axis, positions } => {
            let (values, places) = x.topk(*k, *axis);
            if *positions { places } else { values }
        }
        Op::Argsort(descending) => x.argsort(*descending),
        Op::Sort(descending) => x.sort(*descending),
        Op::MaxPool(window) => x.max_pool2d_with(*window),
        Op::AvgPool(window) => x.avg_pool2d_with(*window),
        Op::GlobalAvgPool => x.global_avg_pool(),
        Op::AdaptiveAvgPool(size) => x.adaptive_avg_pool2d(*size),
        Op::Flatten(from) => x.flatten(*from),
        Op::Unflatten {
            axis,
            lengths: [a, b],
        } => x.unflatten(*axis, (*a, *b)),
        Op::Permute(axes) => x.permute(axes),
        Op::T => x.t(),
        Op::Squeeze(axis) => x.squeeze(*axis),
        Op::Unsqueeze(axis) => x.unsqueeze(*axis),
        Op::Slice {
            axis,
            start,
            end,
            step,
        } => match (end, step) {
            (Some(end), 1) => x.slice(*axis, *start..*end),
            (None, 1) => x.slice(*axis, *start..),
            (Some(end), step) => x.slice_step(*axis, *start..*end, *step),
            (None, step) => x.slice_step(*axis, *start.., *step),
        },
        Op::Split { axis, parts, which } => x.split(*axis, *parts)[*which],
        Op::Pad { pads, value } => x.pad(pads, *value),
        Op::OneHot(n) => x.one_hot(*n),
        Op::Softmax(axis) => x.softmax(*axis),
        Op::LogSoftmax(axis) => x.log_softmax(*axis),
        Op::LogSumExp(axis) => x.logsumexp(*axis),
        Op::Normalize { axes, eps } => x.normalize(axes.as_slice(), *eps),
        Op::GroupNormalize { groups, eps } => x.group_normalize(*groups, *eps),
        Op::Dropout(p) => x.dropout(*p),
        Op::SelfAttention { heads, causal } => x.self_attention(*heads, *causal, Mask::None),
        Op::Nonzero => x.nonzero(),
        Op::Unique => x.unique(),
        Op::Keep => x.keep(),
        Op::Checkpoint(list) => x.checkpoint(|x| list.iter().fold(x, |x, u| unary(*u, x))),
        other => unreachable!("{other:?} with one operand"),
    }
}

fn several<'t>(op: &Op, args: &[Tensor<'t>]) -> Tensor<'t> {
    match (op, args) {
        (Op::Binary(b), [x, y]) => binary(*b, *x, *y),
        (Op::Select, [c, x, y]) => c.select(*x, *y),
        (Op::Matmul, [x, y]) => x.matmul(*y),
        (Op::Conv2d(g), [x, w]) => x.conv2d_with(*w, *g),
        (Op::ConvTranspose2d(g), [x, w]) => x.conv_transpose2d(*w, *g),
        (Op::Gather(axis), [x, index]) => x.gather(*axis, *index),
        (Op::Scatter(axis, how), [x, index, v]) => x.scatter(*axis, *index, *v, *how),
        (Op::SliceAssign { axis, start }, [x, v]) => {
            let end = start + v.len(*axis).unwrap_or(0);
            x.slice_assign(*axis, *start..end, *v)
        }
        (Op::UpdateSlice(axis), [x, v, start]) => x.dynamic_update_slice(*axis, *start, *v),
        (Op::IndexSelect(axis), [x, index]) => x.index_select(*axis, *index),
        (Op::Embed, [table, index]) => table.embed(*index),
        (Op::CrossEntropy(smoothing), [x, labels]) => {
            if *smoothing == 0.0 {
                x.cross_entropy(*labels)
            } else {
                x.cross_entropy_smoothed(*labels, *smoothing)
            }
        }
        (Op::BinaryCrossEntropy, [x, y]) => x.binary_cross_entropy(*y),
        (Op::BinaryCrossEntropyWithLogits, [x, y]) => x.binary_cross_entropy_with_logits(*y),
        (Op::Huber(delta), [x, y]) => x.huber(*y, *delta),
        (Op::Mse, [x, y]) => x.mse(*y),
        (Op::Attention { causal, tiles }, [q, k, v, mask @ ..]) => {
            let mask = mask.first().map_or(Mask::None, |m| {
                if m.dtype() == DType::Bool {
                    Mask::Seen(*m)
                } else {
                    Mask::Added(*m)
                }
            });
            q.attention_in(
                tiles.map_or(Tiles::Auto, Tiles::Queries),
                *k,
                *v,
                *causal,
                mask,
            )
        }
        (Op::Checkpoint(list), [x, w]) => {
            x.checkpoint(|x| list.iter().fold(x.matmul(*w), |x, u| unary(*u, x)))
        }
        (Op::MaskedSelect, [x, mask]) => x.masked_select(*mask),
        (Op::Compress(axis), [x, mask]) => x.compress(*axis, *mask),
        (Op::DynamicSlice(axis), [x, start, length]) => x.dynamic_slice(*axis, *start, *length),
        (Op::SliceFrom { axis, length }, [x, start]) => x.slice_from(*axis, *start, *length),
        (Op::Nms(threshold), [boxes, scores]) => boxes.nms(*scores, *threshold),
        (other, _) => unreachable!("{other:?} with {} operands", args.len()),
    }
}
