//! Normalizations.

use slabwise::shape::Size;
use slabwise::{DType, Tensor};

use super::Run;
use super::product::along_channels;
use crate::call::{Call, Results, length, result, shape_of, sizes};
use crate::element::Element;
use crate::value::Value;

pub const OPERATORS: &[(&str, Run)] = &[
    ("BatchNormalization", batch),
    ("GroupNormalization", group),
    ("InstanceNormalization", |c| {
        let x = c.float(0)?;
        let axes: Vec<usize> = (2..x.rank()).collect();
        let normal = x.normalize(&axes[..], c.f("epsilon", 1e-5));
        c.same(scaled(normal, Some(c.float(1)?), Some(c.float(2)?)))
    }),
    ("LRN", |c| {
        let size = usize::try_from(c.int("size", 1)).unwrap_or(0);
        if size == 0 {
            return Err(format!("a size of {}", c.int("size", 1)));
        }
        let (alpha, beta) = (c.f("alpha", 1e-4), c.f("beta", 0.75));
        let x = c.float(0)?;
        let half = (size - 1) / 2;
        let n = x.len(1).ok_or("its channels are not fixed")?;
        // A window reaches no further than all other channels.
        let far = n.saturating_sub(1);
        let (before, after) = (half.min(far), (size - 1 - half).min(far));
        if before + after >= WINDOW_MAX {
            return Err(format!(
                "a size of {size} for {n} channels; windows of up to {WINDOW_MAX} can be expressed"
            ));
        }
        let mut pads = vec![(0, 0); x.rank()];
        pads[1] = (before, after);
        let squares = (x * x).pad(&pads, 0.0);
        let sum = (1..=before + after).fold(squares.slice(1, 0..n), |sum, at| {
            sum + squares.slice(1, at..at + n)
        });
        let base = sum * (alpha / size as f32) + c.f("bias", 1.0);
        c.same(x / base.pow(beta))
    }),
    ("LayerNormalization", layer),
    ("LpNormalization", |c| {
        let axis = c.axis("axis", -1)?;
        let x = c.float(0)?;
        let norm = x.norm_keep(axis, c.int("p", 2) as f32);
        c.same(norm.equal(0.0).select(norm * 0.0, x / norm))
    }),
    ("MeanVarianceNormalization", |c| {
        let axes = c.sizes("axes")?.unwrap_or_else(|| vec![0, 2, 3]);
        c.same(c.float(0)?.mean_variance_norm(&axes[..]))
    }),
    ("RMSNormalization", rms),
    // A name that onnxruntime had given it in the default domain before there was an operator.
    ("SimplifiedLayerNormalization", rms),
];

/// Most channels of a window, whose squares are added one after the other.
const WINDOW_MAX: usize = 512;

/// Scale and bias of the channels, axis 1.
fn scaled<'t>(x: Tensor<'t>, scale: Option<Tensor<'t>>, bias: Option<Tensor<'t>>) -> Tensor<'t> {
    let along = |v: Tensor<'t>| along_channels(v, x.rank());
    let x = scale.map_or(x, |scale| x * along(scale));
    bias.map_or(x, |bias| x + along(bias))
}

fn batch<'t>(call: &Call<'_, 't>) -> Results<'t> {
    let x = call.float(0)?;
    let (scale, bias) = (call.float(1)?, call.float(2)?);
    let (mean, variance) = (call.float(3)?, call.float(4)?);
    let eps = call.f("epsilon", 1e-5);
    let training = call.opset >= 14 && call.flag("training_mode");
    // Before opset 9 there may be a number for each place, not one for each channel.
    let of_places = call.opset < 9 && call.int("spatial", 1) == 0;
    if !of_places && let Some(at) = (1..5).find(|&at| call.rank(at) != Ok(1)) {
        return Err(format!("its input {at} is not a number for each channel"));
    }
    if call.opset < 7 && call.int("is_test", 0) == 0 && call.outputs > 1 {
        return Err("training before opset 7".into());
    }
    if !training {
        let factor = scale / (variance + eps).sqrt();
        let bias = bias - mean * factor;
        return call.same(match of_places {
            true => x * factor + bias,
            false => scaled(x, Some(factor), Some(bias)),
        });
    }
    let axes: Vec<usize> = (0..x.rank()).filter(|&axis| axis != 1).collect();
    let (now, spread) = (x.mean_over(&axes[..]), x.var_over(&axes[..], 0));
    let normal = x.normalize(&axes[..], eps);
    let momentum = call.f("momentum", 0.9);
    let blend = |old: Tensor<'t>, new: Tensor<'t>| old * momentum + new * (1.0 - momentum);
    let mut all = call.same(scaled(normal, Some(scale), Some(bias)))?;
    all.push(result(call.element(3)?, blend(mean, now)));
    all.push(result(call.element(4)?, blend(variance, spread)));
    Ok(all)
}

fn group<'t>(call: &Call<'_, 't>) -> Results<'t> {
    let x = call.float(0)?;
    let shape = sizes(x);
    let groups = call.int("num_groups", 1);
    if shape.len() < 2 {
        return Err("it has no channels".into());
    }
    let channels = length(x, 1)?;
    let groups = usize::try_from(groups)
        .ok()
        .filter(|&n| n > 0 && channels.is_multiple_of(n))
        .ok_or_else(|| format!("{channels} channels do not divide into {groups} groups"))?;
    let [of_groups, each] = [groups, channels / groups].map(|n| Size::fixed(n as i64));
    let split = [&[shape[0], of_groups, each], &shape[2..]].concat();
    let axes: Vec<usize> = (2..split.len()).collect();
    let normal = x
        .reshape(shape_of(&split))
        .normalize(&axes[..], call.f("epsilon", 1e-5));
    let (mut scale, mut bias) = (call.float(1)?, call.float(2)?);
    if call.opset < 21 && scale.len(0) == Some(groups) && groups != channels {
        // One number for each group.
        let each = |v: Tensor<'t>| v.repeat_interleave(0, channels / groups);
        (scale, bias) = (each(scale), each(bias));
    }
    call.same(scaled(
        normal.reshape(shape_of(&shape)),
        Some(scale),
        Some(bias),
    ))
}

fn rms<'t>(call: &Call<'_, 't>) -> Results<'t> {
    let x = call.float(0)?;
    let axes: Vec<usize> = (call.axis("axis", -1)?..x.rank()).collect();
    let root = ((x * x).mean_keep(&axes[..]) + call.f("epsilon", 1e-5)).sqrt();
    let mut all = call.same(x / root * call.float(1)?)?;
    if call.outputs > 1 {
        all.push(Value::tensor(Element::F32, root.recip()));
    }
    Ok(all)
}

fn layer<'t>(call: &Call<'_, 't>) -> Results<'t> {
    let x = call.float(0)?;
    let axes: Vec<usize> = (call.axis("axis", -1)?..x.rank()).collect();
    let eps = call.f("epsilon", 1e-5);
    let mut y = x.normalize(&axes[..], eps) * call.float(1)?;
    if let Some(bias) = call.optional_float(2)? {
        y = y + bias;
    }
    let mut all = call.same(y)?;
    if call.outputs > 1 {
        all.push(Value::tensor(
            Element::F32,
            x.mean_keep(&axes[..]).cast(DType::F32),
        ));
    }
    if call.outputs > 2 {
        let variance = x.var_keep(&axes[..], 0);
        all.push(Value::tensor(Element::F32, (variance + eps).rsqrt()));
    }
    Ok(all)
}
