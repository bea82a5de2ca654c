//! Attention and what belongs to it: rotary embeddings, linear attention, causal convolutions.

use slabwise::shape::Size;
use slabwise::tensor::{AttentionOptions, ConvOptions, RopeLayout};
use slabwise::{DType, Scan, Tensor};

use super::{Run, UNROLLED_MAX};
use crate::call::{Call, Results, length, result, shape_of, sizes};
use crate::element::Element;
use crate::value::Value;

pub const OPERATORS: &[(&str, Run)] = &[
    ("Attention", attention),
    ("CausalConvWithState", causal_conv),
    ("LinearAttention", linear_attention),
    ("RotaryEmbedding", rotary),
];

/// A number of heads that divides an axis of this length.
fn heads(call: &Call<'_, '_>, name: &str, length: usize) -> Result<usize, String> {
    let n = call.int(name, 0);
    let found = usize::try_from(n).ok().filter(|&n| n > 0);
    found
        .filter(|&n| length.is_multiple_of(n))
        .ok_or_else(|| format!("{name} is {n}, which does not divide {length}"))
}

/// `[batch, positions, heads · width]` as `[batch, heads, positions, width]`.
pub fn split<'t>(call: &Call<'_, 't>, x: Tensor<'t>, name: &str) -> Result<Tensor<'t>, String> {
    let &[batch, positions, _] = &sizes(x)[..] else {
        return Err(format!("{} axes where 3 are needed", x.rank()));
    };
    let width = length(x, 2)?;
    let heads = heads(call, name, width)?;
    let [of_heads, each] = [heads, width / heads].map(|n| Size::fixed(n as i64));
    let x = x.reshape(shape_of(&[batch, positions, of_heads, each]));
    Ok(x.permute([0, 2, 1, 3]))
}

/// The inverse of [`split`].
pub fn united(x: Tensor<'_>) -> Result<Tensor<'_>, String> {
    if x.rank() != 4 {
        return Err(format!("{} axes where 4 are needed", x.rank()));
    }
    Ok(x.permute([0, 2, 1, 3]).flatten(2))
}

fn attention<'t>(call: &Call<'_, 't>) -> Results<'t> {
    let [q, k, v] = [call.float(0)?, call.float(1)?, call.float(2)?];
    let flat = q.rank() == 3;
    let (q, k, v) = match flat {
        true => (
            split(call, q, "q_num_heads")?,
            split(call, k, "kv_num_heads")?,
            split(call, v, "kv_num_heads")?,
        ),
        false => (q, k, v),
    };
    if [q, k, v].iter().any(|x| x.rank() != 4) {
        return Err("queries, keys and values must be of three or of four axes".into());
    }
    let (old_keys, old_values) = (call.optional_float(4)?, call.optional_float(5)?);
    let after = |old: Option<Tensor<'t>>, new: Tensor<'t>| match old {
        Some(old) => call.trace.concat(&[old, new], 2),
        None => new,
    };
    let (k, v) = (after(old_keys, k), after(old_values, v));
    let past = match old_keys {
        Some(old) => length(old, 2)?,
        None => 0,
    };
    let limits = Limits {
        causal: call.flag("is_causal"),
        left: call.int("left_window_size", -1),
        right: call.int("right_window_size", -1),
        past,
        used: call.optional(6)?.map(|n| n.cast(DType::I32)),
    };
    let width = length(q, 3)?;
    let scale = match call.has("scale") {
        true => call.f("scale", 1.0),
        false => (1.0 / (width.max(1) as f64).sqrt()) as f32,
    };
    let cap = call.f("softcap", 0.0);
    let unlimited = call.value(3).is_none() && limits.used.is_none();
    let windowed = limits.left >= 0 || limits.right >= 0;
    let (y, scores) = if unlimited && !windowed && call.outputs < 4 {
        // Every query sees a key at least, so that the runtime's own attention is the same.
        let mut options = AttentionOptions::new().scale(scale);
        if cap > 0.0 {
            options = options.soft_cap(cap);
        }
        if limits.causal {
            options = options.causal().past(past);
        }
        (q.attention_with(k, v, options), None)
    } else {
        let bias = limits.bias(call, length(q, 2)?, length(k, 2)?)?;
        whole(call, [q, k, v], bias, scale, cap)?
    };
    let y = if flat { united(y)? } else { y };
    let mut all = call.same(y)?;
    let typed = |x: Tensor<'t>, at: usize| call.element(at).map(|element| result(element, x));
    if call.outputs > 1 {
        all.push(typed(k, 1)?);
        all.push(typed(v, 2)?);
    }
    if let Some(scores) = scores {
        all.push(typed(scores, 0)?);
    }
    Ok(all)
}

/// Which keys a query may see, by position.
struct Limits<'t> {
    causal: bool,
    /// Keys before and after the own position; negative: all.
    left: i64,
    right: i64,
    /// Keys before the first query.
    past: usize,
    /// The number of keys of each batch that are used.
    used: Option<Tensor<'t>>,
}

impl<'t> Limits<'t> {
    /// What is added to scores `[batch, heads, queries, keys]`: -∞ where a key is not seen.
    fn bias(
        &self,
        call: &Call<'_, 't>,
        queries: usize,
        keys: usize,
    ) -> Result<Option<Tensor<'t>>, String> {
        let trace = call.trace;
        let hidden = |seen: Tensor<'t>| seen.select(0.0, f32::NEG_INFINITY);
        let mut bias = match call.value(3) {
            Some(mask) if mask.element() == Element::Bool => Some(hidden(call.x(3)?)),
            Some(_) => Some(call.float(3)?),
            None => None,
        };
        if let Some(short) = bias {
            let last = short.rank().checked_sub(1).ok_or("a mask without axes")?;
            let given = length(short, last)?;
            if given != 1 && given < keys {
                let mut pads = vec![(0, 0); short.rank()];
                pads[last].1 = keys - given;
                bias = Some(short.pad(&pads, f32::NEG_INFINITY));
            }
        }
        let mut add = |seen: Tensor<'t>| {
            let more = hidden(seen);
            bias = Some(bias.map_or(more, |bias| bias + more));
        };
        let key = trace.arange(keys).cast(DType::I32);
        let used = self.used.map(|used| used.reshape([-1i64, 1, 1, 1]));
        let row = trace.arange(queries).cast(DType::I32).unsqueeze(1);
        let place = match used {
            // The queries are the last of the keys that are used.
            Some(used) if self.past == 0 => row + used - queries as f32,
            _ => row + self.past as f32,
        };
        if self.causal {
            add(key.le(place));
        }
        if self.left >= 0 {
            add((place - key).le(self.left as f32));
        }
        if self.right >= 0 {
            add((key - place).le(self.right as f32));
        }
        if let Some(used) = used {
            add(key.lt(used));
        }
        Ok(bias)
    }
}

/// Attention with all its scores in memory. A query that sees no key gives 0.
fn whole<'t>(
    call: &Call<'_, 't>,
    [q, k, v]: [Tensor<'t>; 3],
    bias: Option<Tensor<'t>>,
    scale: f32,
    cap: f32,
) -> Result<(Tensor<'t>, Option<Tensor<'t>>), String> {
    let (of_queries, of_keys) = (length(q, 1)?, length(k, 1)?);
    let each = match of_keys {
        0 => 1,
        n => of_queries / n,
    };
    if of_keys * each != of_queries {
        return Err(format!(
            "{of_keys} heads of keys for {of_queries} of queries"
        ));
    }
    let spread = |x: Tensor<'t>| match each {
        1 => x,
        each => x.repeat_interleave(1, each),
    };
    let (k, v) = (spread(k), spread(v));
    let products = q.matmul(k.transpose(2, 3)) * scale;
    let capped = match cap > 0.0 {
        true => (products / cap).tanh() * cap,
        false => products,
    };
    let scores = bias.map_or(capped, |bias| capped + bias);
    let shares = scores.softmax(3);
    let shares = match bias {
        Some(bias) => {
            let none = f32::NEG_INFINITY;
            let unseen = |x: Tensor<'t>| x.max_keep(x.rank().saturating_sub(1)).equal(none);
            let hidden = unseen(scores).or(unseen(bias));
            hidden.select(0.0, shares)
        }
        None => shares,
    };
    let shown = match (call.outputs > 3, call.int("qk_matmul_output_mode", 0)) {
        (false, _) => None,
        (true, 0) => Some(products),
        (true, 1) => Some(capped),
        (true, 2) => Some(scores),
        (true, 3) => Some(shares),
        (true, other) => return Err(format!("qk_matmul_output_mode {other}")),
    };
    Ok((shares.matmul(v), shown))
}

/// The rows of a table at these places: their axes, and the columns of the table.
pub fn rows_of<'t>(table: Tensor<'t>, places: Tensor<'t>) -> Result<Tensor<'t>, String> {
    if table.rank() != 2 {
        return Err(format!(
            "a table of {} axes where 2 are needed",
            table.rank()
        ));
    }
    let to = [&sizes(places)[..], &sizes(table)[1..]].concat();
    let rows = table.index_select(0, places.reshape([-1i64]));
    Ok(rows.reshape(shape_of(&to)))
}

fn rotary<'t>(call: &Call<'_, 't>) -> Results<'t> {
    let x = call.float(0)?;
    let flat = x.rank() == 3;
    let x = match flat {
        true => split(call, x, "num_heads")?,
        false => x,
    };
    let (mut cos, mut sin) = (call.float(1)?, call.float(2)?);
    if call.value(3).is_some() {
        let places = call.x(3)?.cast(DType::I32);
        (cos, sin) = (rows_of(cos, places)?, rows_of(sin, places)?);
    }
    if x.rank() != 4 {
        return Err(format!("an input of {} axes", x.rank()));
    }
    if cos.rank() != 3 || sin.rank() != 3 {
        return Err("its tables are not of one row for each position".into());
    }
    let (pairs, width) = (length(cos, 2)?, length(x, 3)?);
    let turned = match usize::try_from(call.int("rotary_embedding_dim", 0)) {
        Ok(0) => width,
        Ok(n) => n,
        Err(_) => return Err("a negative rotary_embedding_dim".into()),
    };
    if turned > width || 2 * pairs != turned {
        return Err(format!(
            "tables of {pairs} pairs for {turned} of {width} elements"
        ));
    }
    let layout = match call.flag("interleaved") {
        true => RopeLayout::Interleaved,
        false => RopeLayout::Halves,
    };
    let y = x.rotate_pairs(cos.unsqueeze(1), sin.unsqueeze(1), layout);
    call.same(if flat { united(y)? } else { y })
}

/// A state `[batch, heads, width of keys, width of values]` that each position updates and reads.
fn linear_attention<'t>(call: &Call<'_, 't>) -> Results<'t> {
    let q = split(call, call.float(0)?, "q_num_heads")?;
    let k = split(call, call.float(1)?, "kv_num_heads")?;
    let v = split(call, call.float(2)?, "kv_num_heads")?;
    let (heads, steps, width) = (length(k, 1)?, length(k, 2)?, length(k, 3)?);
    let queries = length(q, 1)?;
    if heads == 0 || !queries.is_multiple_of(heads) || length(q, 3)? != width {
        return Err(format!("queries of {q:?} for keys of {k:?}"));
    }
    let each = queries / heads;
    let rule = call.text("update_rule", "gated_delta");
    let (gated, delta) = match &*rule {
        "linear" => (false, false),
        "gated" => (true, false),
        "delta" => (false, true),
        "gated_delta" => (true, true),
        other => return Err(format!("update_rule \"{other}\"")),
    };
    if gated != call.value(4).is_some() || delta != call.value(5).is_some() {
        return Err(format!(
            "its decay and beta are not those of update_rule \"{rule}\""
        ));
    }
    let gate = match call.optional_float(4)? {
        Some(decay) if decay.len(decay.rank().saturating_sub(1)) == Some(heads) => {
            Some(decay.permute([0, 2, 1]).unsqueeze(3))
        }
        Some(decay) => Some(split(call, decay, "kv_num_heads")?),
        None => None,
    };
    let beta = call
        .optional_float(5)?
        .map(|beta| beta.permute([0, 2, 1]).unsqueeze(3));
    let scale = match call.f("scale", 0.0) {
        0.0 => (1.0 / (width.max(1) as f64).sqrt()) as f32,
        scale => scale,
    };
    let past = call.optional_float(3)?;
    let shape = [heads, width, length(v, 3)?].map(|n| Size::fixed(n as i64));
    let shape = [&sizes(k)[..1], &shape].concat();
    let mut state = past.unwrap_or_else(|| call.trace.zeros(shape_of(&shape)));
    if steps == 0 {
        return Err("a sequence of no position".into());
    }
    let parts: Vec<Tensor<'t>> = [Some(q), Some(k), Some(v), gate, beta]
        .into_iter()
        .flatten()
        .collect();
    // The state after a position and what is read of it, of rows [batch, heads, 1, width].
    let advance = |state: Tensor<'t>, rows: &[Tensor<'t>]| {
        let mut state = state;
        let (query, key, mut value) = (rows[0], rows[1], rows[2]);
        if gate.is_some() {
            state = state * rows[3].exp().transpose(2, 3);
        }
        if beta.is_some() {
            value = rows[rows.len() - 1] * (value - key.matmul(state));
        }
        state = state + key.transpose(2, 3) * value;
        let read = match each {
            1 => state,
            each => state.repeat_interleave(1, each),
        };
        (state, query.matmul(read) * scale)
    };
    let y = if steps > UNROLLED_MAX {
        let by_step = |x: &Tensor<'t>| x.permute([2, 0, 1, 3]);
        let parts: Vec<Tensor<'t>> = parts.iter().map(by_step).collect();
        let body = |states: &[Tensor<'t>], parts: &[Tensor<'t>]| {
            let rows: Vec<Tensor<'t>> = parts.iter().map(|x| x.unsqueeze(2)).collect();
            let (state, row) = advance(states[0], &rows);
            (vec![state], vec![row.squeeze(2)])
        };
        let options = Scan::default();
        let (last, rows) = call.trace.scan_many(options, &[state], &parts, body);
        let (Some(&last), Some(rows)) = (last.first(), rows.first()) else {
            return Err("its positions cannot be expressed".into());
        };
        state = last;
        rows.permute([1, 2, 0, 3])
    } else {
        let mut all = Vec::with_capacity(steps);
        for step in 0..steps {
            let at = |x: &Tensor<'t>| x.slice(2, step..step + 1);
            let rows: Vec<Tensor<'t>> = parts.iter().map(at).collect();
            let row;
            (state, row) = advance(state, &rows);
            all.push(row);
        }
        call.trace.concat(&all, 2)
    };
    let y = united(y)?;
    let mut all = call.same(y)?;
    if call.outputs > 1 {
        let element = match past {
            Some(_) => call.element(3)?,
            None => call.element(0)?,
        };
        all.push(result(element, state));
    }
    Ok(all)
}

fn causal_conv<'t>(call: &Call<'_, 't>) -> Results<'t> {
    let (x, weight) = (call.float(0)?, call.float(1)?);
    if x.rank() != 3 || weight.rank() != 3 {
        return Err(format!("an input of {x:?} and weights of {weight:?}"));
    }
    let (channels, taps) = (length(x, 1)?, length(weight, 2)?);
    let before = taps.checked_sub(1).ok_or("a kernel of no element")?;
    let padded = match call.optional_float(3)? {
        Some(state) => call.trace.concat(&[state, x], 2),
        None => x.pad([(0, 0), (0, 0), (before, 0)], 0.0),
    };
    let mut y = padded.conv1d_with(weight, ConvOptions::new().groups(channels));
    if let Some(bias) = call.optional_float(2)? {
        y = y + bias.unsqueeze(1);
    }
    let y = match &*call.text("activation", "none") {
        "none" => y,
        "silu" | "swish" => y.silu(),
        other => return Err(format!("activation \"{other}\"")),
    };
    let mut all = call.same(y)?;
    if call.outputs > 1 {
        let n = length(padded, 2)?;
        let state = padded.slice(2, n.saturating_sub(before)..n);
        all.push(Value::tensor(
            call.element(0)?,
            state.cast(call.element(0)?.dtype()),
        ));
    }
    Ok(all)
}
