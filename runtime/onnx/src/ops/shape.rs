//! Operators that arrange elements: views, slices, joins, padding.

use slabwise::tensor::PadMode;
use slabwise::{DType, Tensor};

use super::Run;
use crate::array::{Data, lengths};
use crate::call::{Call, Results, length, resolve_all};
use crate::element::Element;
use crate::fold::{broadcast, reshaped, slices, split_lengths, steps, unsqueezed};
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
        let to = c.ints(1)?.ok_or("its shape is missing")?;
        let to = lengths(&to).ok_or("its shape has a negative length")?;
        let shape = broadcast(&c.shape(0)?, &to)
            .ok_or_else(|| format!("{:?} does not expand to {to:?}", c.shape(0)))?;
        c.same(c.x(0)?.expand(&shape[..]))
    }),
    ("EyeLike", eye_like),
    ("Flatten", |c| {
        // The usual case needs no length, so that the batch may be bounded.
        if c.int("axis", 1) == 1 && c.rank(0)? > 1 {
            return c.same(c.x(0)?.flatten(1));
        }
        let shape = c.shape(0)?;
        let axis = match c.int("axis", 1) {
            axis if axis == shape.len() as i64 => shape.len(),
            _ => c.axis("axis", 1)?,
        };
        let product = |part: &[usize]| part.iter().product::<usize>();
        c.same(
            c.x(0)?
                .reshape([product(&shape[..axis]), product(&shape[axis..])]),
        )
    }),
    ("Pad", pad),
    ("Range", |_| {
        Err("its start, end or step are computed from the inputs".into())
    }),
    ("Reshape", |c| {
        let to = match c.opset >= 5 {
            true => c.ints(1)?.ok_or("its shape is missing")?,
            false => c.int_list("shape").unwrap_or_default(),
        };
        if !c.is_fixed(0)? {
            let x = c.x(0)?;
            return c.same(x.reshape(&reshaped_open(x, &to, c.flag("allowzero"))?[..]));
        }
        let shape = c.shape(0)?;
        let found = reshaped(&shape, &to, c.flag("allowzero"));
        let found = found.ok_or_else(|| format!("{shape:?} has no form as {to:?}"))?;
        c.same(c.x(0)?.reshape(&found[..]))
    }),
    ("ReverseSequence", reverse_sequence),
    ("Shape", |_| Err("the lengths are not fixed".into())),
    ("Size", |_| Err("the lengths are not fixed".into())),
    ("Slice", |c| {
        let mut x = c.x(0)?;
        for (axis, start, end, step) in slices(c, c.rank(0)?)? {
            let n = length(x, axis)?;
            let found = steps(n, start, end, step).ok_or("a step of 0")?;
            x = taken(x, axis, found);
        }
        c.same(x)
    }),
    ("SpaceToDepth", |c| {
        let block = block_size(c)?;
        c.same(match &*c.text("mode", "DCR") {
            "CRD" => c.x(0)?.pixel_unshuffle(block),
            _ => c.x(0)?.space_to_depth(block),
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
        let shape = c.shape(0)?;
        let drop = match c.axes(13, 1)? {
            Some(axes) => resolve_all(&axes, shape.len())?,
            None => (0..shape.len()).filter(|&i| shape[i] == 1).collect(),
        };
        if let Some(&axis) = drop.iter().find(|&&axis| shape[axis] != 1) {
            return Err(format!("axis {axis} of {shape:?} is not of length 1"));
        }
        let kept: Vec<usize> = (0..shape.len())
            .filter(|i| !drop.contains(i))
            .map(|i| shape[i])
            .collect();
        c.same(c.x(0)?.reshape(&kept[..]))
    }),
    ("Tile", |c| {
        let times = c.ints(1)?.ok_or("its repeats are missing")?;
        let times = lengths(&times).ok_or("a negative number of repeats")?;
        c.same(c.x(0)?.tile(times))
    }),
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

/// The lengths of a reshape of a tensor with bounded axes, at most one of them −1: the runtime
/// derives that one from the number of elements.
fn reshaped_open(x: Tensor<'_>, to: &[i64], allow_zero: bool) -> Result<Vec<i64>, String> {
    let own: Vec<Option<usize>> = (0..x.rank()).map(|axis| x.len(axis)).collect();
    let mut shape = Vec::with_capacity(to.len());
    // Bounded axes of `x` that are kept as they are.
    let mut kept = 0;
    for (axis, &n) in to.iter().enumerate() {
        shape.push(match (n, own.get(axis)) {
            (0, Some(Some(n))) if !allow_zero => *n as i64,
            (0, Some(None)) if !allow_zero => {
                kept += 1;
                OPEN
            }
            (0, None) if !allow_zero => {
                return Err(format!(
                    "axis {axis} of {to:?} copies one that is not there"
                ));
            }
            (-1.., _) => n,
            _ => return Err(format!("the length {n} in {to:?}")),
        });
    }
    let derived = shape.iter().filter(|&&n| n == -1).count();
    match (kept, derived) {
        (0, 0 | 1) => {}
        // The only bounded axis is kept: the other lengths are numbers.
        (1, 0 | 1) if own.iter().filter(|n| n.is_none()).count() == 1 => {
            let whole = own
                .iter()
                .flatten()
                .try_fold(1i64, |all, &n| all.checked_mul(i64::try_from(n).ok()?));
            let given = shape.iter().filter(|&&n| n >= 0);
            let given = given.copied().try_fold(1i64, i64::checked_mul);
            let rest = whole
                .zip(given)
                .filter(|&(whole, given)| given > 0 && whole % given == 0)
                .map(|(whole, given)| whole / given)
                .filter(|&rest| derived == 1 || rest == 1)
                .ok_or_else(|| format!("{to:?} does not have the elements of its input"))?;
            for n in &mut shape {
                *n = match *n {
                    OPEN => -1,
                    -1 => rest,
                    n => n,
                };
            }
        }
        _ => {
            return Err(format!(
                "several lengths of {to:?} are bounded, and all but one must be fixed here (--dim)"
            ));
        }
    }
    Ok(shape)
}

/// A bounded axis that a reshape keeps.
const OPEN: i64 = i64::MIN;

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
    let shape = call.ints(0)?.ok_or("its shape is missing")?;
    let shape = lengths(&shape).ok_or("its shape has a negative length")?;
    let (element, value) = match call.array("value")? {
        Some(array) => match &array.data {
            Data::Int(values) => (array.element, values.first().copied().unwrap_or(0) as f32),
            Data::Float(values) => (array.element, values.first().copied().unwrap_or(0.0) as f32),
        },
        None => (Element::F32, 0.0),
    };
    call.typed(element, call.trace.full(value, element.dtype(), &shape[..]))
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
        _ => x.depth_to_space(block),
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
    let mode = match &*call.text("mode", "constant") {
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
    call.same(x.pad_with(all, mode))
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
    fn a_reshape_keeps_a_bounded_axis() {
        let trace = Trace::inference();
        let x = trace.input("x", DType::F32, (Dim::bounded("batch", 8), 3, 4));
        let of = |to: &[i64]| reshaped_open(x, to, false);
        assert_eq!(of(&[-1, 12]), Ok(vec![-1, 12]));
        assert_eq!(of(&[0, 12]), Ok(vec![-1, 12]));
        assert_eq!(of(&[0, -1]), Ok(vec![-1, 12]));
        assert_eq!(of(&[0, 0, 2, -1]), Ok(vec![-1, 3, 2, 2]));
        // Twice the batch would be another model.
        assert!(of(&[0, 6]).is_err());
        assert!(of(&[0, -1, 5]).is_err());
        assert!(of(&[0, 12, 1, 0]).is_err());
        assert!(of(&[-2, 12]).is_err());
        assert!(reshaped_open(x, &[0, 12], true).is_ok_and(|shape| shape == [0, 12]));
        let y = trace.input(
            "y",
            DType::F32,
            (Dim::bounded("batch", 8), 3, Dim::bounded("n", 5)),
        );
        let error = reshaped_open(y, &[0, 3, 0], false).expect_err("two are kept");
        assert!(error.contains("--dim"), "{error}");
    }
}
