//! A statement as an expression.

use super::written;
use crate::case::{Axis, Binary, Fold, Op, Run, Unary};

fn unary(op: Unary, x: &str) -> String {
    match op {
        Unary::Neg => format!("(-{x})"),
        Unary::Not => format!("(!{x})"),
        other if other.text().ends_with(')') => format!("{x}.{}", other.text()),
        other => format!("{x}.{}()", other.text()),
    }
}

fn binary(op: Binary, x: &str, y: &str) -> String {
    match op {
        Binary::Add => format!("{x} + {y}"),
        Binary::Sub => format!("{x} - {y}"),
        Binary::Mul => format!("{x} * {y}"),
        Binary::Div => format!("{x} / {y}"),
        other => format!("{x}.{}({y})", other.text()),
    }
}

/// A number as an operand.
fn literal(number: f32) -> String {
    match number {
        f32::INFINITY => "f32::INFINITY".into(),
        f32::NEG_INFINITY => "f32::NEG_INFINITY".into(),
        n if n.is_sign_negative() => format!("({n:?})"),
        n => format!("{n:?}"),
    }
}

fn fold(op: Fold, x: &str, axes: Option<&[usize]>, keep: bool) -> String {
    let position = matches!(op, Fold::ArgMax | Fold::ArgMin);
    let Some(axes) = axes else {
        return if position {
            format!("{x}.{}(..)", op.text())
        } else {
            format!("{x}.{}()", op.text())
        };
    };
    let ending = match (keep, position) {
        (true, _) => "_keep",
        (false, true) => "",
        (false, false) => "_over",
    };
    // An empty list needs a type.
    let axes = if axes.is_empty() {
        "[0usize; 0]".to_string()
    } else {
        format!("{axes:?}")
    };
    format!("{x}.{}{ending}({axes})", op.text())
}

/// The expression of a statement's value.
pub fn expression(op: &Op, args: &[String]) -> String {
    let x = args.first().map_or("", String::as_str);
    let y = args.get(1).map_or("", String::as_str);
    let z = args.get(2).map_or("", String::as_str);
    let all = args.join(", ");
    match op {
        Op::Param(at) => format!("trace.param(&w{at})"),
        Op::Full {
            value,
            dtype,
            shape,
        } => format!(
            "trace.full({}, {dtype:?}, {})",
            literal(*value),
            written(shape)
        ),
        Op::Arange(Axis::Fixed(n)) => format!("trace.arange({n})"),
        Op::Arange(Axis::Named(at)) => format!("trace.arange(dim{at})"),
        Op::Length(Axis::Fixed(n)) => format!("trace.length({n})"),
        Op::Length(Axis::Named(at)) => format!("trace.length(dim{at})"),
        Op::Uniform(shape) => format!("trace.uniform({})", written(shape)),
        Op::UniformLike => format!("{x}.uniform_like()"),
        Op::Unary(u) => unary(*u, x),
        Op::Binary(b) => binary(*b, x, y),
        Op::Number(b, number) => binary(*b, x, &literal(*number)),
        Op::Select => format!("{x}.select({y}, {})", args[2]),
        Op::Clamp(low, high) => format!("{x}.clamp({low:?}, {high:?})"),
        Op::Cast(dtype) => format!("{x}.cast({dtype:?})"),
        Op::Fold {
            fold: f,
            axes,
            keep,
        } => fold(*f, x, axes.as_deref(), *keep),
        Op::CumSum(axis) => format!("{x}.cumsum({axis})"),
        Op::Run {
            run,
            axis,
            by: [exclusive, reverse],
        } => {
            let by = format!("slabwise::Running {{ exclusive: {exclusive}, reverse: {reverse} }}");
            match run {
                Run::Sum => format!("{x}.cumsum_by({axis}, {by})"),
                Run::Product => format!("{x}.cumprod_by({axis}, {by})"),
                Run::LogSumExp => format!("{x}.logcumsumexp_by({axis}, {by})"),
                Run::Max => format!("{x}.cummax({axis}).0"),
                Run::Min => format!("{x}.cummin({axis}).0"),
                Run::ArgMax => format!("{x}.cummax({axis}).1"),
            }
        }
        Op::Scatter(axis, how) => {
            format!("{x}.scatter({axis}, {y}, {z}, slabwise::Scatter::{how:?})")
        }
        Op::SliceAssign { axis, start } => {
            format!(
                "{x}.slice_assign({axis}, {start}..{start} + {y}.len({axis}).unwrap_or(0), {y})"
            )
        }
        Op::UpdateSlice(axis) => format!("{x}.dynamic_update_slice({axis}, {z}, {y})"),
        Op::TopK { k, axis, positions } => {
            format!("{x}.topk({k}, {axis}).{}", usize::from(*positions))
        }
        Op::Argsort(descending) => format!("{x}.argsort({descending})"),
        Op::Sort(descending) => format!("{x}.sort({descending})"),
        Op::Matmul => format!("{x}.matmul({y})"),
        Op::Einsum(text) => format!("trace.einsum({text:?}, &[{all}])"),
        Op::Conv2d(g) => format!("{x}.conv2d_with({y}, {g:?})"),
        Op::ConvTranspose2d(g) => format!("{x}.conv_transpose2d({y}, {g:?})"),
        Op::MaxPool(window) => format!("{x}.max_pool2d_with({window:?})"),
        Op::AvgPool(window) => format!("{x}.avg_pool2d_with({window:?})"),
        Op::GlobalAvgPool => format!("{x}.global_avg_pool()"),
        Op::AdaptiveAvgPool(size) => format!("{x}.adaptive_avg_pool2d({size:?})"),
        Op::Reshape(shape) => match shape.as_slice() {
            [Axis::Open] => format!("{x}.reshape([-1])"),
            _ => format!("{x}.reshape({})", written(shape)),
        },
        Op::Flatten(from) => format!("{x}.flatten({from})"),
        Op::Unflatten {
            axis,
            lengths: [a, b],
        } => format!("{x}.unflatten({axis}, ({a}, {b}))"),
        Op::Permute(axes) => format!("{x}.permute({axes:?})"),
        Op::T => format!("{x}.t()"),
        Op::Expand(shape) => format!("{x}.expand({})", written(shape)),
        Op::Squeeze(axis) => format!("{x}.squeeze({axis})"),
        Op::Unsqueeze(axis) => format!("{x}.unsqueeze({axis})"),
        Op::Slice {
            axis,
            start,
            end,
            step,
        } => {
            let range = format!(
                "{start}..{}",
                end.map_or(String::new(), |end| end.to_string())
            );
            if *step == 1 {
                format!("{x}.slice({axis}, {range})")
            } else {
                format!("{x}.slice_step({axis}, {range}, {step})")
            }
        }
        Op::Split { axis, parts, which } => format!("{x}.split({axis}, {parts})[{which}]"),
        Op::Pad { pads, value } => format!("{x}.pad({pads:?}, {value:?})"),
        Op::Concat(axis) => format!("trace.concat(&[{all}], {axis})"),
        Op::Stack(axis) => format!("trace.stack(&[{all}], {axis})"),
        Op::Gather(axis) => format!("{x}.gather({axis}, {y})"),
        Op::IndexSelect(axis) => format!("{x}.index_select({axis}, {y})"),
        Op::Embed => format!("{x}.embed({y})"),
        Op::OneHot(n) => format!("{x}.one_hot({n})"),
        Op::Softmax(axis) => format!("{x}.softmax({axis})"),
        Op::LogSoftmax(axis) => format!("{x}.log_softmax({axis})"),
        Op::LogSumExp(axis) => format!("{x}.logsumexp({axis})"),
        Op::Normalize { axes, eps } => {
            let axes = if axes.is_empty() {
                "[0usize; 0]".to_string()
            } else {
                format!("{axes:?}")
            };
            format!("{x}.normalize({axes}, {eps:?})")
        }
        Op::GroupNormalize { groups, eps } => format!("{x}.group_normalize({groups}, {eps:?})"),
        Op::CrossEntropy(0.0) => format!("{x}.cross_entropy({y})"),
        Op::CrossEntropy(smoothing) => format!("{x}.cross_entropy_smoothed({y}, {smoothing:?})"),
        Op::BinaryCrossEntropy => format!("{x}.binary_cross_entropy({y})"),
        Op::BinaryCrossEntropyWithLogits => format!("{x}.binary_cross_entropy_with_logits({y})"),
        Op::Huber(delta) => format!("{x}.huber({y}, {delta:?})"),
        Op::Mse => format!("{x}.mse({y})"),
        Op::Dropout(p) => format!("{x}.dropout({p:?})"),
        Op::Attention { causal, tiles } => {
            let tiles = tiles.map_or("Tiles::Auto".to_string(), |n| {
                format!("Tiles::Queries({n})")
            });
            let mask = args.get(3).map_or("Mask::None".to_string(), |m| {
                format!("if {m}.dtype() == Bool {{ Mask::Seen({m}) }} else {{ Mask::Added({m}) }}")
            });
            format!(
                "{x}.attention_in({tiles}, {y}, {}, {causal}, {mask})",
                args[2]
            )
        }
        Op::SelfAttention { heads, causal } => {
            format!("{x}.self_attention({heads}, {causal}, Mask::None)")
        }
        Op::Layer { name, .. } => format!("{x}.apply(&l{name})"),
        Op::Nonzero => format!("{x}.nonzero()"),
        Op::MaskedSelect => format!("{x}.masked_select({y})"),
        Op::Compress(axis) => format!("{x}.compress({axis}, {y})"),
        Op::Unique => format!("{x}.unique()"),
        Op::DynamicSlice(axis) => format!("{x}.dynamic_slice({axis}, {y}, {})", args[2]),
        Op::SliceFrom { axis, length } => format!("{x}.slice_from({axis}, {y}, {length})"),
        Op::Nms(threshold) => format!("{x}.nms({y}, {threshold:?})"),
        Op::Method(method) => method.text(args, &written(method.shape())),
        Op::Keep => format!("{x}.keep()"),
        Op::Checkpoint(list) => {
            let first = match args.len() {
                2 => format!("x.matmul({y})"),
                _ => "x".to_string(),
            };
            let all = list.iter().fold(first, |x, u| unary(*u, &x));
            format!("{x}.checkpoint(|x| {all})")
        }
        Op::Gradient if args.len() == 3 => format!(
            "{{ let both = trace.gradients({x}.mean(), [{y}, {z}]); both[0] + both[1].mean() }}"
        ),
        Op::Gradient => format!("trace.gradients({x}.mean(), [{y}])[0]"),
        // These need the case, so that the printer of programs writes them.
        Op::Input { .. } | Op::State(_) | Op::Arange(Axis::Open) | Op::Length(Axis::Open) => {
            String::new()
        }
    }
}
