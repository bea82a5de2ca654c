//! Attention with its projections, masks and caches of keys and values.

use slabwise::shape::Size;
use slabwise::tensor::{AttentionOptions, Mask, RopeLayout};
use slabwise::{DType, Tensor};

use super::super::attention::{rows_of, split, united};
use super::super::product::product;
use super::Run;
use crate::call::{Call, Results, dim, length, result, size};

pub const OPERATORS: &[(&str, Run)] = &[
    ("Attention", attention),
    ("GroupQueryAttention", grouped),
    ("MultiHeadAttention", multi_head),
    ("RotaryEmbedding", rotary),
];

/// Queries, keys and values, each `[batch, heads, positions, width]`.
type Heads<'t> = [Tensor<'t>; 3];

/// The parts of the last axis of `x` as heads.
fn heads<'t>(
    call: &Call<'_, 't>,
    x: Tensor<'t>,
    widths: &[usize; 3],
    names: [&str; 3],
) -> Result<Heads<'t>, String> {
    if x.rank() != 3 {
        return Err(format!("{} axes where 3 are needed", x.rank()));
    }
    let parts = x.split_lengths(2, widths);
    let &[q, k, v] = &parts[..] else {
        return Err("queries, keys and values cannot be told apart".into());
    };
    let [of_q, of_k, of_v] = names;
    Ok([
        split(call, q, of_q)?,
        split(call, k, of_k)?,
        split(call, v, of_v)?,
    ])
}

/// Refuses a call with an attribute of another value than 0.
fn without(call: &Call<'_, '_>, names: &[&str]) -> Result<(), String> {
    match names.iter().find(|name| call.int(name, 0) != 0) {
        Some(name) => Err(format!("{name} of {}", call.int(name, 0))),
        None => Ok(()),
    }
}

/// Refuses a call with one of these inputs.
fn absent(call: &Call<'_, '_>, inputs: &[(usize, &str)]) -> Result<(), String> {
    match inputs.iter().find(|(at, _)| call.value(*at).is_some()) {
        Some((at, name)) => Err(format!("its input {at}, {name}, is not expressed")),
        None => Ok(()),
    }
}

/// The options that all have: the scale, and a cap of scores.
fn options<'t>(call: &Call<'_, 't>) -> AttentionOptions<'t> {
    let mut options = AttentionOptions::new();
    match call.f("scale", 0.0) {
        0.0 => {}
        scale => options = options.scale(scale),
    }
    match call.f("softcap", 0.0) {
        cap if cap > 0.0 => options.soft_cap(cap),
        _ => options,
    }
}

/// Options with which every query sees only the keys up to its own position, which `past` others
/// precede.
fn causal<'t>(
    call: &Call<'_, 't>,
    options: AttentionOptions<'t>,
    past: Size,
) -> AttentionOptions<'t> {
    let options = options.causal();
    match past.as_fixed().and_then(|n| usize::try_from(n).ok()) {
        Some(n) => options.past(n),
        None => options.past_of_run(call.trace.length(dim(past))),
    }
}

/// The bias of scores `[batch, heads, queries, keys]` for an input that hides keys: the attribute
/// `mask_filter_value` for a hidden key, 0 for others. The input is a mask of truth values, or the
/// position at which the keys of each sequence end, followed by those at which they begin.
fn padding<'t>(
    call: &Call<'_, 't>,
    at: usize,
    batch: Size,
    keys: Size,
) -> Result<Option<Tensor<'t>>, String> {
    let Some(mask) = call.optional(at)? else {
        return Ok(None);
    };
    let mask = mask.cast(DType::I32);
    let seen = match mask.rank() {
        1 => {
            let key = call.trace.arange(dim(keys)).cast(DType::I32);
            let column = |x: Tensor<'t>| x.reshape([-1i64, 1, 1, 1]);
            let given = size(mask, 0)?;
            if given == batch {
                key.lt(column(mask))
            } else if call.trace.quotient_of_sizes(given, batch) == Some(Size::fixed(2)) {
                let ends = column(mask.narrow(0, 0, dim(batch)));
                let starts = column(mask.narrow(0, dim(batch), dim(batch)));
                key.lt(ends).and(key.ge(starts))
            } else {
                return Err(format!("a mask of {mask:?}"));
            }
        }
        2 => mask.unsqueeze(1).unsqueeze(2).not_equal(0.0),
        3 => mask.unsqueeze(1).not_equal(0.0),
        n => return Err(format!("a mask of {n} axes")),
    };
    let hidden = call.f("mask_filter_value", -10_000.0);
    Ok(Some(seen.select(0.0, hidden)))
}

/// The sum of the biases of scores that are given.
fn added<'t>(biases: [Option<Tensor<'t>>; 2]) -> Mask<'t> {
    let sum = biases.into_iter().flatten().reduce(|a, b| a + b);
    sum.map_or(Mask::None, Mask::Added)
}

fn attention<'t>(call: &Call<'_, 't>) -> Results<'t> {
    without(call, &["do_rotary", "past_present_share_buffer"])?;
    absent(call, &[(6, "past_sequence_length")])?;
    let mut x = product(call.float(0)?, call.float(1)?);
    if let Some(bias) = call.optional_float(2)? {
        x = x + bias;
    }
    let all = length(x, x.rank().saturating_sub(1))?;
    let widths = match call.sizes("qkv_hidden_sizes")? {
        Some(widths) => <[usize; 3]>::try_from(widths).ok(),
        None => all.is_multiple_of(3).then_some([all / 3; 3]),
    };
    let widths = widths
        .filter(|widths| widths.iter().try_fold(0usize, |sum, &n| sum.checked_add(n)) == Some(all))
        .ok_or_else(|| format!("{all} columns are not those of queries, keys and values"))?;
    let heads = heads(call, x, &widths, ["num_heads"; 3])?;
    let past = match call.optional_float(4)? {
        Some(past) if past.rank() == 5 => {
            Some([0, 1].map(|of| past.slice(0, of..of + 1).squeeze(0)))
        }
        Some(past) => return Err(format!("past keys and values of {past:?}")),
        None => None,
    };
    let (y, [k, v]) = attend(call, heads, past, 3, 5)?;
    let mut all = call.same(y)?;
    if call.outputs > 1 {
        let present = call.trace.stack(&[k, v], 0);
        all.push(result(call.element(0)?, present));
    }
    Ok(all)
}

/// The result of attention `[batch, queries, heads · width]`, and all keys and values: those of the
/// past and the new ones. `mask` and `bias` are the numbers of inputs, of padding and of a bias.
fn attend<'t>(
    call: &Call<'_, 't>,
    [q, k, v]: Heads<'t>,
    past: Option<[Tensor<'t>; 2]>,
    mask: usize,
    bias: usize,
) -> Result<(Tensor<'t>, [Tensor<'t>; 2]), String> {
    let before = match past {
        Some([old, _]) if old.rank() == 4 => size(old, 2)?,
        Some([old, _]) => return Err(format!("past keys of {old:?}")),
        None => Size::ZERO,
    };
    let [k, v] = match past {
        Some([keys, values]) => [[keys, k], [values, v]].map(|parts| call.trace.concat(&parts, 2)),
        None => [k, v],
    };
    let hidden = padding(call, mask, size(q, 0)?, size(k, 2)?)?;
    let mut options = options(call).mask(added([hidden, call.optional_float(bias)?]));
    if call.flag("unidirectional") {
        options = causal(call, options, before);
    }
    Ok((united(q.attention_with(k, v, options))?, [k, v]))
}

fn multi_head<'t>(call: &Call<'_, 't>) -> Results<'t> {
    absent(
        call,
        &[(8, "past_sequence_length"), (9, "cache_indirection")],
    )?;
    if call.outputs > 3 {
        return Err("its scores are a result".into());
    }
    let q = call.float(0)?;
    let (k, v) = (call.optional_float(1)?, call.optional_float(2)?);
    // One of several tensors that are packed along axis 3.
    let packed = |x: Tensor<'t>, at: usize| {
        let part = x.slice(3, at..at + 1).squeeze(3);
        part.permute([0, 2, 1, 3])
    };
    let bias = call.optional_float(3)?;
    let mut start = 0;
    let mut flat = |x: Tensor<'t>| -> Result<Tensor<'t>, String> {
        let x = match bias {
            Some(bias) => {
                let width = length(x, 2)?;
                let part = bias.slice(0, start..start + width);
                start += width;
                x + part
            }
            None => x,
        };
        split(call, x, "num_heads")
    };
    let heads = match (q.rank(), k, v) {
        (5, None, None) if bias.is_none() => [packed(q, 0), packed(q, 1), packed(q, 2)],
        (3, Some(k), None) if k.rank() == 5 && bias.is_none() => {
            [flat(q)?, packed(k, 0), packed(k, 1)]
        }
        (3, Some(k), Some(v)) if k.rank() == 4 && v.rank() == 4 => [flat(q)?, k, v],
        (3, Some(k), Some(v)) if k.rank() == 3 && v.rank() == 3 => [flat(q)?, flat(k)?, flat(v)?],
        _ => {
            return Err(format!(
                "queries of {q:?}, keys of {k:?} and values of {v:?}"
            ));
        }
    };
    let past = match (call.optional_float(6)?, call.optional_float(7)?) {
        (Some(keys), Some(values)) => Some([keys, values]),
        (None, None) => None,
        _ => return Err("past keys without values, or values without keys".into()),
    };
    let (y, kept) = attend(call, heads, past, 4, 5)?;
    let element = call.element(0)?;
    let kept = kept.into_iter().take(call.outputs.saturating_sub(1));
    let all = std::iter::once(y).chain(kept);
    Ok(all.map(|x| result(element, x)).collect())
}

/// The rotation of heads by tables of cosines and sines, the inputs `at` and `at + 1`, at positions
/// `[batch, positions]`, or `[positions]` of all sequences.
fn turned<'t>(
    call: &Call<'_, 't>,
    at: usize,
    places: Tensor<'t>,
    interleaved: &str,
) -> Result<impl Fn(Tensor<'t>) -> Tensor<'t> + use<'t>, String> {
    let places = match places.rank() {
        1 => places.unsqueeze(0),
        _ => places,
    };
    let [cos, sin] = [at, at + 1].map(|at| rows_of(call.float(at)?, places));
    let (cos, sin) = (cos?.unsqueeze(1), sin?.unsqueeze(1));
    let layout = match call.flag(interleaved) {
        true => RopeLayout::Interleaved,
        false => RopeLayout::Halves,
    };
    Ok(move |x: Tensor<'t>| x.rotate_pairs(cos, sin, layout))
}

fn rotary<'t>(call: &Call<'_, 't>) -> Results<'t> {
    without(call, &["is_packed_batching"])?;
    if call.f("scale", 1.0) != 1.0 {
        return Err(format!("a scale of {}", call.f("scale", 1.0)));
    }
    let x = call.float(0)?;
    let pairs = length(call.float(2)?, 1)?;
    let flat = x.rank() == 3;
    let x = match flat {
        true if call.int("num_heads", 0) > 0 => split(call, x, "num_heads")?,
        true => {
            let to = (x.dim(0), x.dim(1), -1i64, 2 * pairs);
            x.reshape(to).permute([0, 2, 1, 3])
        }
        false => x,
    };
    if x.rank() != 4 {
        return Err(format!("an input of {} axes", x.rank()));
    }
    let places = call.x(1)?.cast(DType::I32);
    let places = match places.rank() {
        // The position of the first element.
        0 | 1 => call.trace.arange(x.dim(2)).cast(DType::I32) + places,
        _ => places,
    };
    let y = turned(call, 2, places, "interleaved")?(x);
    call.same(if flat { united(y)? } else { y })
}

/// Attention of sequences of different lengths, whose heads of queries share heads of keys and
/// values. New keys are written after the last key of each sequence.
fn grouped<'t>(call: &Call<'_, 't>) -> Results<'t> {
    without(
        call,
        &["smooth_softmax", "sliding_window_cache", "qk_output"],
    )?;
    absent(
        call,
        &[
            (11, "head_sink"),
            (12, "k_scale"),
            (13, "v_scale"),
            (14, "q_norm_weight"),
            (15, "k_norm_weight"),
            (16, "query_seqlens"),
        ],
    )?;
    if call.len() > 17 {
        return Err(format!("{} inputs, of which 17 are known", call.len()));
    }
    let [mut q, mut k, mut v] = grouped_heads(call)?;
    let trace = call.trace;
    let queries = size(q, 2)?;
    let past = match call.optional_float(3)? {
        Some(past) => size(past, 2)?,
        None => Size::ZERO,
    };
    // The number of keys of each sequence, [batch], and of those before the first query.
    let all = call.x(5)?.cast(DType::I32).reshape([-1i64]) + 1;
    let before = match past == Size::ZERO {
        true => None,
        false => Some((all - trace.length(dim(queries))).maximum(0.0)),
    };
    if call.flag("do_rotary") {
        let step = trace.arange(dim(queries)).cast(DType::I32);
        let places = match (call.optional(9)?, before) {
            (Some(places), _) => places.cast(DType::I32),
            (None, Some(before)) => before.unsqueeze(1) + step,
            (None, None) => step,
        };
        let turn = turned(call, 7, places, "rotary_interleaved")?;
        (q, k) = (turn(q), turn(k));
    }
    if let Some(before) = before {
        (k, v) = cached(call, [k, v], before, past)?;
    }
    let column = |x: Tensor<'t>| x.reshape([-1i64, 1, 1, 1]);
    let mut options = options(call);
    let hidden = match (call.int("causal", 1), before) {
        (0, _) => {
            let key = trace.arange(dim(size(k, 2)?)).cast(DType::I32);
            Some(key.lt(column(all)).select(0.0, f32::NEG_INFINITY))
        }
        (_, before) => {
            options = options.causal();
            if let Some(before) = before {
                options = options.past_of_run(column(before));
            }
            None
        }
    };
    if let n @ 1.. = call.int("local_window_size", -1) {
        let n = usize::try_from(n).map_err(|_| format!("a local_window_size of {n}"))?;
        options = options.window(n);
    }
    let options = options.mask(added([hidden, call.optional_float(10)?]));
    let y = united(q.attention_with(k, v, options))?;
    let element = call.element(0)?;
    let all = [y, k, v].into_iter().take(call.outputs);
    Ok(all.map(|x| result(element, x)).collect())
}

/// The heads of queries, keys and values, of three inputs or packed into one.
fn grouped_heads<'t>(call: &Call<'_, 't>) -> Result<Heads<'t>, String> {
    let names = ["num_heads", "kv_num_heads", "kv_num_heads"];
    let q = call.float(0)?;
    if let (Some(k), Some(v)) = (call.optional_float(1)?, call.optional_float(2)?) {
        let [of_q, of_k, of_v] = names;
        return Ok([
            split(call, q, of_q)?,
            split(call, k, of_k)?,
            split(call, v, of_v)?,
        ]);
    }
    let columns = length(q, 2)?;
    let number = |name| usize::try_from(call.int(name, 0)).unwrap_or(0);
    let (of_q, of_k) = (number("num_heads"), number("kv_num_heads"));
    let count = of_k.checked_mul(2).and_then(|n| n.checked_add(of_q));
    let each = match count.filter(|&n| n > 0 && columns.is_multiple_of(n)) {
        Some(n) => columns / n,
        None => {
            return Err(format!(
                "{columns} columns for {of_q} heads of queries and {of_k} of keys and values"
            ));
        }
    };
    heads(call, q, &[of_q * each, of_k * each, of_k * each], names)
}

/// The past keys and values, of which each sequence has as many as `before` says, and new ones
/// after them.
fn cached<'t>(
    call: &Call<'_, 't>,
    new: [Tensor<'t>; 2],
    before: Tensor<'t>,
    past: Size,
) -> Result<(Tensor<'t>, Tensor<'t>), String> {
    let trace = call.trace;
    let [keys, values] = [(3, new[0]), (4, new[1])].map(|(at, new)| {
        let old = call.float(at)?;
        Ok::<_, String>(trace.concat(&[old, new], 2))
    });
    let (keys, values) = (keys?, values?);
    let both = size(keys, 2)?;
    let total = call.lengths(6).ok();
    let total = total.and_then(|total| total.first()?.as_fixed());
    // A cache that has room already does not grow, which is known of fixed lengths alone.
    let room = match (past.as_fixed(), total) {
        (Some(past), Some(total)) => Size::fixed(past.max(total)),
        _ => both,
    };
    let place = trace.arange(dim(room)).cast(DType::I32);
    let first = before.unsqueeze(1);
    let fresh = place - first + trace.length(dim(past));
    let from = place.lt(first).select(place, fresh);
    let from = from.minimum(trace.length(dim(both)) - 1);
    let from = from.unsqueeze(1).unsqueeze(3);
    let kept = |all: Tensor<'t>| all.take_along_axis(2, from);
    Ok((kept(keys), kept(values)))
}
