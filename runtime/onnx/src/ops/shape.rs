//! Operators that arrange elements: views, slices, joins, padding.

use slabwise::shape::{Computed, Size};
use slabwise::tensor::PadMode;
use slabwise::{DType, Shape, Tensor};

use super::Run;
use crate::array::{Data, lengths};
use crate::call::{Call, Results, dim, length, resolve_all, shape_of, sizes};
use crate::element::Element;
use crate::fold::{reshaped, slices, split_lengths, steps, unsqueezed};
use crate::value::Value;

pub const OPERATORS: &[(&str, Run)] = &[
    ("CenterCropPad", center_crop_pad),
    ("Concat", concat),
    ("Constant", |_| {
        Err("a constant of this kind (strings, sparse) cannot be expressed".into())
    }),
    ("ConstantOfShape", constant_of_shape),
    ("DepthToSpace", depth_to_space),
    ("Expand", |c| {
        let x = c.x(0)?;
        let (own, to) = (sizes(x), c.lengths(1)?);
        let rank = own.len().max(to.len());
        let at = |list: &[Size], axis: usize| {
            let axis = (axis + list.len()).checked_sub(rank);
            axis.map_or(Size::ONE, |axis| list[axis])
        };
        let joint: Vec<Size> = (0..rank)
            .map(|axis| match (at(&own, axis), at(&to, axis)) {
                (own, to) if to.is(1) => own,
                (_, to) => to,
            })
            .collect();
        c.same(x.expand(shape_of(&joint)))
    }),
    ("EyeLike", eye_like),
    ("Flatten", |c| {
        // The usual case needs no length, so that the batch may be bounded.
        if c.int("axis", 1) == 1 && c.rank(0)? > 1 {
            return c.same(c.x(0)?.flatten(1));
        }
        let dims = c.dims(0)?;
        let axis = match c.int("axis", 1) {
            axis if axis == dims.len() as i64 => dims.len(),
            _ => c.axis("axis", 1)?,
        };
        let product = |part: &[Size]| {
            let all = part.iter().try_fold(Size::ONE, |n, &d| n.checked_mul(d));
            all.ok_or("a joined length has no form as one size")
        };
        let shape = [product(&dims[..axis])?, product(&dims[axis..])?];
        c.same(c.x(0)?.reshape(shape_of(&shape)))
    }),
    ("Pad", pad),
    ("Range", range),
    ("Reshape", |c| {
        let to = match c.opset >= 5 {
            true => c.lengths(1)?,
            false => {
                let to = c.int_list("shape").unwrap_or_default();
                to.into_iter().map(Size::fixed).collect()
            }
        };
        let x = c.x(0)?;
        let numbers: Option<Vec<i64>> = to.iter().map(|n| n.as_fixed()).collect();
        if let (Some(to), true) = (numbers, c.is_fixed(0)?) {
            let shape = c.shape(0)?;
            let found = reshaped(&shape, &to, c.flag("allowzero"));
            let found = found.ok_or_else(|| format!("{shape:?} has no form as {to:?}"))?;
            return c.same(x.reshape(&found[..]));
        }
        c.same(x.reshape(reshaped_open(&sizes(x), &to, c.flag("allowzero"))?))
    }),
    ("ReverseSequence", reverse_sequence),
    ("Shape", |c| {
        c.dims(0).and(Err("its lengths have no form".into()))
    }),
    ("Size", |c| {
        let dims = c.dims(0)?.into_iter().map(|n| c.trace.length(dim(n)));
        let all = dims
            .reduce(|a, b| a * b)
            .unwrap_or_else(|| c.trace.length(1));
        c.typed(Element::I64, all)
    }),
    ("Slice", slice),
    ("SpaceToDepth", |c| {
        let block = block_size(c)?;
        c.same(match &*c.text("mode", "DCR") {
            "CRD" => c.x(0)?.pixel_unshuffle(block),
            "DCR" => c.x(0)?.space_to_depth(block),
            other => return Err(format!("mode \"{other}\"")),
        })
    }),
    ("Split", |c| {
        let axis = c.axis("axis", 0)?;
        let (x, element) = (c.x(0)?, c.element(0)?);
        let parts = split_lengths(c, length(x, axis)?)?;
        let mut start = 0;
        let parts = parts.into_iter().map(|n| {
            start += n;
            Value::tensor(element, x.slice(axis, start - n..start))
        });
        Ok(parts.collect())
    }),
    ("Squeeze", |c| {
        let dims = c.dims(0)?;
        let drop = match c.axes(13, 1)? {
            Some(axes) => resolve_all(&axes, dims.len())?,
            None => (0..dims.len()).filter(|&i| dims[i].is(1)).collect(),
        };
        if let Some(&axis) = drop.iter().find(|&&axis| !dims[axis].is(1)) {
            let n = c.trace.show_size(dims[axis]);
            return Err(format!("axis {axis} is of length {n}, not of length 1"));
        }
        let kept = (0..dims.len()).filter(|i| !drop.contains(i));
        let kept: Vec<Size> = kept.map(|i| dims[i]).collect();
        c.same(c.x(0)?.reshape(shape_of(&kept)))
    }),
    ("Tile", tile),
    ("Transpose", |c| {
        let order = match c.sizes("perm")? {
            Some(order) => order,
            None => (0..c.rank(0)?).rev().collect(),
        };
        c.same(c.x(0)?.permute(order))
    }),
    ("Trilu", |c| {
        let diagonal = c.number(1)?.unwrap_or(0.0) as i64;
        let x = c.x(0)?;
        let as_int = matches!(x.dtype(), DType::Bool | DType::U8);
        let x = if as_int { x.cast(DType::I32) } else { x };
        c.same(match c.int("upper", 1) {
            0 => x.tril(diagonal),
            _ => x.triu(diagonal),
        })
    }),
    ("Unsqueeze", |c| {
        let axes = c.axes(13, 1)?.ok_or("its axes are missing")?;
        if !c.is_fixed(0)? {
            let x = c.x(0)?;
            let mut new = resolve_all(&axes, x.rank() + axes.len())?;
            new.sort_unstable();
            if new.windows(2).any(|pair| pair[0] == pair[1]) {
                return Err(format!("its axes {axes:?} name one twice"));
            }
            return c.same(new.into_iter().fold(x, |x, axis| x.unsqueeze(axis)));
        }
        let shape = unsqueezed(&c.shape(0)?, &axes)?;
        c.same(c.x(0)?.reshape(&shape[..]))
    }),
];

/// The shape that Reshape asks for, of a tensor with open axes; at most one length is −1, which the
/// runtime derives from the number of elements.
fn reshaped_open(own: &[Size], to: &[Size], allow_zero: bool) -> Result<Shape, String> {
    let dims = to.iter().enumerate().map(|(axis, &n)| {
        if n.is(0) && !allow_zero {
            let kept = own.get(axis);
            return kept.copied().ok_or_else(|| {
                format!("its axis {axis} is to be kept, and its input has no such axis")
            });
        }
        match n.as_fixed() {
            Some(..-1) => Err(format!("the length {n:?} of axis {axis}")),
            _ => Ok(n),
        }
    });
    let mut dims: Vec<Size> = dims.collect::<Result<_, String>>()?;
    // A length on both sides cancels, so that the other ones may be products of open lengths.
    if let Some(at) = dims.iter().position(|n| n.is(-1)) {
        let mut rest: Vec<Size> = own.to_vec();
        let mut given = Size::ONE;
        for &n in dims.iter().filter(|n| !n.is(-1)) {
            match rest.iter().position(|&own| own == n) {
                Some(same) => drop(rest.remove(same)),
                None => {
                    given = given
                        .checked_mul(n)
                        .ok_or("its lengths have no form as one size")?
                }
            }
        }
        let whole = rest
            .iter()
            .try_fold(Size::ONE, |all, &n| all.checked_mul(n));
        if let Some(n) = whole.and_then(|whole| whole.checked_div_size(given)) {
            dims[at] = n;
        }
    }
    Ok(shape_of(&dims))
}

/// `start`, `start + step`, … before `limit`: a number of elements that a run may decide.
fn range<'t>(call: &Call<'_, 't>) -> Results<'t> {
    let computed = "its start, end or step are computed from the inputs";
    let one = |at: usize| {
        let found = call
            .lengths(at)
            .map_err(|why| format!("{computed}: {why}"))?;
        found
            .first()
            .copied()
            .ok_or_else(|| format!("its input {at} has no element"))
    };
    let (start, limit, step) = (one(0)?, one(1)?, one(2)?);
    let step = step
        .as_fixed()
        .filter(|&n| n != 0 && n.unsigned_abs() <= 1 << 24);
    let step = step.ok_or("a step that is not a number")?;
    let span = call.trace.difference_of_sizes(limit, start);
    let span = span.and_then(|n| n.checked_div(step));
    let count = span.ok_or_else(|| {
        let show = |n| call.trace.show_size(n);
        format!(
            "the number of elements from {} to {} by {step} has no form",
            show(start),
            show(limit)
        )
    })?;
    let count = call.trace.computed_size(Computed::Rest(count))?;
    let offset = call.trace.length(dim(start));
    let places = call.trace.arange(dim(count)).cast(DType::I32);
    let places = if step == 1 {
        places
    } else {
        places * step as f32
    };
    call.same(if start.is(0) { places } else { places + offset })
}

/// Slice; ends of an axis whose length a run decides may be computed from lengths.
fn slice<'t>(call: &Call<'_, 't>) -> Results<'t> {
    let mut x = call.x(0)?;
    for (axis, [start, end], step) in parts(call, x.rank())? {
        if let (Some(n), Some(start), Some(end)) = (x.len(axis), start.as_fixed(), end.as_fixed()) {
            let found = steps(n, start, end, step).ok_or("a step of 0")?;
            x = taken(x, axis, found);
            continue;
        }
        // After a mistake, which is reported, a tensor has no axes.
        let Some(&n) = sizes(x).get(axis) else { break };
        let show = |n| call.trace.show_size(n);
        let range = |n| call.trace.range_of(n);
        // The place from 0 to n that a number counts from either end; of open ones if it is the
        // same formula at every length.
        let place = |at: Size| {
            let place = match range(at) {
                (_, ..0) => n.checked_add(at),
                (0.., _) => Some(at),
                _ => None,
            }?;
            let rest = call.trace.difference_of_sizes(n, place);
            match (range(place), rest.map(range)) {
                ((_, ..=0), _) => Some(Size::ZERO),
                (_, Some((_, ..=0))) => Some(n),
                ((0.., _), Some((0.., _))) => Some(place),
                // Of a shorter axis none.
                ((..0, 1..), Some((0.., _))) => {
                    call.trace.computed_size(Computed::Rest(place)).ok()
                }
                ((0.., _), None) if call.trace.is_at_most(place, n) => Some(place),
                ((least, _), None) if least >= range(n).1 => Some(n),
                _ => None,
            }
        };
        let undecided = || {
            format!(
                "its part from {} to {} by {step} of axis {axis}, which has length {}, has no form \
                 that holds at every length",
                show(start),
                show(end),
                show(n)
            )
        };
        if step == -1 && start.is(-1) && range(end).1 <= i64::from(i32::MIN) {
            x = x.flip(axis);
            continue;
        }
        let to = place(end).ok_or_else(undecided)?;
        // A part that begins behind a shorter axis is empty, so that its place does not matter.
        let from = place(start).or(start.as_fixed().filter(|&n| n >= 0).map(Size::fixed));
        let from = from.ok_or_else(undecided)?;
        let exact = call.trace.difference_of_sizes(to, from);
        // Of the last elements, or of those before them, a shorter axis has as many as fit.
        let last = || {
            let most = match (range(start), range(end)) {
                ((_, ..0), (_, ..0)) => call.trace.difference_of_sizes(end, start)?,
                ((_, ..0), _) if to == n => start.checked_mul(Size::fixed(-1))?,
                _ => return None,
            };
            let is_some = most.as_fixed().is_some_and(|n| n > 0);
            let of = Computed::Least(to, most);
            is_some.then(|| call.trace.computed_size(of).ok()).flatten()
        };
        let count = exact.or_else(last).filter(|_| step == 1);
        let count = count.ok_or_else(undecided)?;
        let count = call.trace.computed_size(Computed::Rest(count))?;
        x = x.narrow(axis, dim(from), dim(count));
    }
    call.same(x)
}

/// The axes of Slice with start and end, and step.
fn parts(call: &Call<'_, '_>, rank: usize) -> Result<Vec<(usize, [Size; 2], i64)>, String> {
    let open = |at: usize| {
        call.value(at)
            .is_some_and(|value| value.lengths().is_some())
    };
    if call.opset < 10 || !(open(1) || open(2)) {
        let all = slices(call, rank)?.into_iter();
        let fixed = |(axis, start, end, step)| (axis, [start, end].map(Size::fixed), step);
        return Ok(all.map(fixed).collect());
    }
    let (starts, ends) = (call.lengths(1)?, call.lengths(2)?);
    let axes = match call.ints(3)? {
        Some(axes) => resolve_all(&axes, rank)?,
        None => (0..starts.len()).collect(),
    };
    let steps = call.ints(4)?.unwrap_or_else(|| vec![1; starts.len()]);
    if [ends.len(), axes.len(), steps.len()] != [starts.len(); 3] {
        return Err("its starts, ends, axes and steps are not of one length".into());
    }
    Ok((0..starts.len())
        .map(|i| (axes[i], [starts[i], ends[i]], steps[i]))
        .collect())
}

/// Tile; an axis of length 1 may be repeated as often as a run decides.
fn tile<'t>(call: &Call<'_, 't>) -> Results<'t> {
    let (mut x, times) = (call.x(0)?, call.lengths(1)?);
    if let Some(times) = times
        .iter()
        .map(|n| n.as_fixed())
        .collect::<Option<Vec<i64>>>()
    {
        let times = lengths(&times).ok_or("a negative number of repeats")?;
        return call.same(x.tile(times));
    }
    if times.len() != x.rank() {
        return Err(format!("{} repeats for {} axes", times.len(), x.rank()));
    }
    for (axis, &n) in times.iter().enumerate().filter(|(_, n)| !n.is(1)) {
        // As a new axis before the repeated one, and joined with it; after a mistake, which is
        // reported, a tensor has no axes.
        let mut dims = sizes(x);
        let Some(own) = dims.get(axis) else { break };
        let joined = own.checked_mul(n);
        let joined = joined.ok_or("a repeated length has no form as one size")?;
        dims.insert(axis, n);
        let wide = x.unsqueeze(axis).expand(shape_of(&dims));
        dims.remove(axis);
        dims[axis] = joined;
        x = wide.reshape(shape_of(&dims));
    }
    call.same(x)
}

/// Every `step`th element of an axis from `start` on, `number` of them.
pub fn taken(x: Tensor<'_>, axis: usize, (start, step, number): (i64, i64, usize)) -> Tensor<'_> {
    if number == 0 {
        return x.slice(axis, 0..0);
    }
    let size = step.unsigned_abs() as usize;
    let last = start + step * (number as i64 - 1);
    let (low, high) = (start.min(last) as usize, start.max(last) as usize);
    let part = x.slice_step(axis, low..high + 1, size);
    match step < 0 {
        true => part.flip(axis),
        false => part,
    }
}

fn concat<'t>(call: &Call<'_, 't>) -> Results<'t> {
    let axis = call.axis("axis", if call.opset < 4 { 1 } else { 0 })?;
    let parts: Vec<Tensor<'t>> = (0..call.len())
        .map(|at| call.x(at))
        .collect::<Result<_, _>>()?;
    call.same(call.trace.concat(&parts, axis))
}

fn constant_of_shape<'t>(call: &Call<'_, 't>) -> Results<'t> {
    let shape = shape_of(&call.lengths(0)?);
    let (element, value) = match call.array("value")? {
        Some(array) => match &array.data {
            Data::Int(values) => (array.element, values.first().copied().unwrap_or(0) as f64),
            Data::Float(values) => (array.element, values.first().copied().unwrap_or(0.0)),
        },
        None => (Element::F32, 0.0),
    };
    if !element.is_float() && !is_exact(value) {
        let zeros = call.trace.full(0.0, DType::I32, shape);
        return call.typed(element, zeros + integer(call, value)?);
    }
    let value = value as f32;
    call.typed(element, call.trace.full(value, element.dtype(), shape))
}

/// Whether f32 holds a number that i32 holds.
fn is_exact(value: f64) -> bool {
    f64::from(value as f32) == value && value.abs() < 2f64.powi(31)
}

/// An integer that f32 doesn't hold, as a tensor.
fn integer<'t>(call: &Call<'_, 't>, value: f64) -> Result<Tensor<'t>, String> {
    let within = (f64::from(i32::MIN)..=f64::from(i32::MAX)).contains(&value);
    match within {
        true => Ok(call.trace.constant(&[value as i32]).squeeze(0)),
        false => Err(format!("its value {value} is beyond 32 bits")),
    }
}

fn eye_like<'t>(call: &Call<'_, 't>) -> Results<'t> {
    let shape = call.shape(0)?;
    let &[rows, columns] = &shape[..] else {
        return Err(format!("of {} axes; two are needed", shape.len()));
    };
    let element = match call.has("dtype") {
        true => Element::of(i32::try_from(call.int("dtype", 0)).unwrap_or(0))?,
        false => call.element(0)?,
    };
    let k = call.int("k", 0);
    let row = call.trace.arange(rows).cast(DType::I32).unsqueeze(1);
    let column = call.trace.arange(columns).cast(DType::I32);
    let diagonal = (row + k as f32).equal(column);
    call.typed(element, diagonal.cast(DType::I32))
}

fn block_size(call: &Call<'_, '_>) -> Result<usize, String> {
    usize::try_from(call.int("blocksize", 0))
        .ok()
        .filter(|&n| n > 0)
        .ok_or_else(|| "its blocksize is missing".into())
}

fn depth_to_space<'t>(call: &Call<'_, 't>) -> Results<'t> {
    let (x, block) = (call.x(0)?, block_size(call)?);
    call.same(match &*call.text("mode", "DCR") {
        "CRD" => x.pixel_shuffle(block),
        "DCR" => x.depth_to_space(block),
        other => return Err(format!("mode \"{other}\"")),
    })
}

fn pad<'t>(call: &Call<'_, 't>) -> Results<'t> {
    let element = call.element(0)?;
    let x = super::elementwise::lane(call, 0)?;
    let rank = x.rank();
    let (pads, value, axes) = match call.opset >= 11 {
        true => (
            call.ints(1)?.ok_or("its pads are missing")?,
            call.number(2)?.unwrap_or(0.0),
            call.ints(3)?,
        ),
        false => {
            let name = if call.opset >= 2 { "pads" } else { "paddings" };
            let pads = call.int_list(name).ok_or("its pads are missing")?;
            (pads, f64::from(call.f("value", 0.0)), None)
        }
    };
    let axes = match axes {
        Some(axes) => resolve_all(&axes, rank)?,
        None => (0..rank).collect(),
    };
    if pads.len() != 2 * axes.len() {
        return Err(format!("{} pads for {} axes", pads.len(), axes.len()));
    }
    let mut all = vec![(0, 0); rank];
    for (at, &axis) in axes.iter().enumerate() {
        all[axis] = (pads[at], pads[at + axes.len()]);
    }
    // Padded with zeros, the difference from the number that is wanted.
    let shift = match element.is_float() || is_exact(value) {
        true => None,
        false => Some(integer(call, value)?),
    };
    let mode = match &*call.text("mode", "constant") {
        "constant" if shift.is_some() => PadMode::Constant(0.0),
        "constant" => PadMode::Constant(value as f32),
        "reflect" => PadMode::Reflect,
        "edge" => PadMode::Replicate,
        "wrap" => PadMode::Circular,
        other => return Err(format!("mode \"{other}\"")),
    };
    let x = match element {
        Element::Bool => x.cast(DType::I32),
        _ => x,
    };
    call.same(match (mode, shift) {
        (PadMode::Constant(_), Some(shift)) => (x - shift).pad_with(all, mode) + shift,
        _ => x.pad_with(all, mode),
    })
}

fn center_crop_pad<'t>(call: &Call<'_, 't>) -> Results<'t> {
    let x = call.x(0)?;
    let shape = call.shape(0)?;
    let to = call.ints(1)?.ok_or("its shape is missing")?;
    let axes = match call.int_list("axes") {
        Some(axes) => resolve_all(&axes, shape.len())?,
        None => (0..shape.len()).collect(),
    };
    let mut pads = vec![(0, 0); shape.len()];
    for (&axis, &to) in axes.iter().zip(&to) {
        if to < 0 {
            return Err(format!("a length of {to} for axis {axis}"));
        }
        let more = to.saturating_sub(shape[axis] as i64);
        // An odd element is added or taken at the end.
        let before = match more >= 0 {
            true => more / 2,
            false => -((-more) / 2),
        };
        pads[axis] = (before, more - before);
    }
    call.same(x.pad_with(pads, PadMode::Constant(0.0)))
}

fn reverse_sequence<'t>(call: &Call<'_, 't>) -> Results<'t> {
    let x = call.x(0)?;
    let (batch, time) = (call.axis("batch_axis", 1)?, call.axis("time_axis", 0)?);
    let n = x.len(time).ok_or("the time axis is not fixed")?;
    let lengths = call.x(1)?;
    let shape = call.shape(0)?;
    let view = |axis: usize, t: Tensor<'t>| {
        let mut to = vec![1; shape.len()];
        to[axis] = shape[axis];
        t.reshape(&to[..])
    };
    let place = view(time, call.trace.arange(n).cast(DType::I32));
    let length = view(batch, lengths);
    let index = place.lt(length).select(length - 1.0 - place, place);
    call.same(x.take_along_axis(time, index.expand(&shape[..])))
}

#[cfg(test)]
mod tests {
    use slabwise::Trace;
    use slabwise::shape::Dim;

    use super::*;

    #[test]
    fn a_reshape_keeps_open_axes() {
        let trace = Trace::inference();
        let dims = (Dim::bounded("batch", 8), Dim::bounded("length", 4), 12);
        let x = trace.input("x", DType::F32, dims);
        let of = |to: &[i64]| {
            let to: Vec<Size> = to.iter().map(|&n| Size::fixed(n)).collect();
            reshaped_open(&sizes(x), &to, false).map(|shape| format!("{:?}", x.reshape(shape)))
        };
        let ok = |text: &str| Ok(text.to_string());
        assert_eq!(of(&[0, 0, 3, -1]), ok("f32 [batch, length, 3, 4]"));
        assert_eq!(of(&[0, -1, 3, 4]), ok("f32 [batch, length, 3, 4]"));
        assert_eq!(of(&[-1, 12]), ok("f32 [batch·length, 12]"));
        assert_eq!(of(&[0, -1]), ok("f32 [batch, 12·length]"));
        assert!(of(&[0, 0, 0, 0]).is_err());
        assert!(of(&[0, 0, 3, -2]).is_err());
        assert_eq!(trace.mistakes().len(), 0);
    }
}
