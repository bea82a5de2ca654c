//! Reads and writes at indices that are computed from the number of a loop's step: slices that
//! cannot fail, because the indices of all steps are known to lie inside of the axis.

use slabwise::{DType, Tensor};

use crate::call::{Call, Results, result, sizes};
use crate::element::Element;
use crate::value::{Range, Value};

/// The bound of integers that are computed from the number of a step: i32 holds them.
const MOST: i64 = 1 << 31;

/// The range of a call's result, if its input has one and all its elements stay equal.
pub fn range_of(call: &Call<'_, '_>) -> Option<Range> {
    let range = |at: usize| {
        let value = call.value(at)?;
        value.step().or_else(|| {
            let &[n] = call.constant(at)?.as_ints().ok()? else {
                return None;
            };
            Some((n, n))
        })
    };
    let is_step = |at: usize| call.value(at).is_some_and(|value| value.step().is_some());
    let within = |range: Range| (range.0 > -MOST && range.1 < MOST).then_some(range);
    match call.operator {
        "Identity" | "Unsqueeze" | "Squeeze" | "Reshape" | "Expand" | "Flatten" | "Tile" => {
            range(0).filter(|_| is_step(0))
        }
        "Cast" => {
            let to = Element::of(i32::try_from(call.int("to", 0)).ok()?).ok()?;
            let is_wide = matches!(to, Element::I32 | Element::I64);
            range(0).filter(|_| is_wide && is_step(0))
        }
        "Concat" if call.len() == 1 => range(0).filter(|_| is_step(0)),
        "Add" | "Sub" | "Mul" if is_step(0) != is_step(1) => {
            let ((a, b), (c, d)) = (range(0)?, range(1)?);
            within(match call.operator {
                "Add" => (a.checked_add(c)?, b.checked_add(d)?),
                "Sub" => (a.checked_sub(d)?, b.checked_sub(c)?),
                _ => {
                    let (n, of) = if is_step(0) { (c, (a, b)) } else { (a, (c, d)) };
                    let ends = (n.checked_mul(of.0)?, n.checked_mul(of.1)?);
                    (ends.0.min(ends.1), ends.0.max(ends.1))
                }
            })
        }
        _ => None,
    }
}

/// The start of the `part` elements that a call reads or writes, a scalar that counts from the start
/// of an axis of `n` elements. `None` if its index has no range, or may lie outside of the axis.
fn place<'t>(call: &Call<'_, 't>, at: usize, n: i64, part: i64) -> Option<Tensor<'t>> {
    let value = call.value(at)?;
    let (least, most) = value.step()?;
    let last = n.checked_sub(part)?;
    let inside = |low: i64, high: i64| low >= 0 && high <= last;
    let index = value.traced(call.trace).ok()?.cast(DType::I32);
    let one = index.reshape([-1i64]).slice(0, 0..1).reshape(());
    let from_end = i32::try_from(n).ok()?;
    if inside(least, most) {
        return Some(one);
    }
    if most < 0 && inside(least + n, most + n) {
        return Some(one + from_end);
    }
    // Negative in the first steps alone: each step tells by itself.
    (least >= -n && least < 0 && inside(0, most) && part == 1)
        .then(|| one.lt(0).select(one + from_end, one))
}

/// The results of a read or write at the place of the step; `None` if it is of another form.
pub fn at_step<'t>(call: &Call<'_, 't>) -> Option<Results<'t>> {
    let known = |at: usize| -> Option<Vec<i64>> {
        let dims = sizes(call.x(at).ok()?);
        dims.into_iter().map(|n| n.as_fixed()).collect()
    };
    let axis =
        |default: i64, rank: usize| crate::call::resolve(call.int("axis", default), rank).ok();
    let shaped = |x: Tensor<'t>, dims: &[i64]| x.reshape(dims);
    match call.operator {
        "Gather" => {
            let (x, index) = (known(0)?, known(1)?);
            let axis = axis(0, x.len())?;
            if index.iter().any(|&n| n != 1) {
                return None;
            }
            let row = call
                .x(0)
                .ok()?
                .slice_clamped(axis, place(call, 1, x[axis], 1)?, 1);
            let dims = [&x[..axis], &index, &x[axis + 1..]].concat();
            Some(call.same(shaped(row, &dims)))
        }
        "GatherElements" => {
            let (x, index) = (known(0)?, known(1)?);
            let axis = axis(0, x.len())?;
            is_row(&x, &index, axis).then_some(())?;
            let start = place(call, 1, x[axis], 1)?;
            Some(call.same(call.x(0).ok()?.slice_clamped(axis, start, 1)))
        }
        "Scatter" | "ScatterElements" => {
            let (x, index, values) = (known(0)?, known(1)?, known(2)?);
            let axis = axis(0, x.len())?;
            (index == values && is_row(&x, &index, axis)).then_some(())?;
            write(call, 2, axis, place(call, 1, x[axis], 1)?)
        }
        "ScatterND" => {
            let (x, index, values) = (known(0)?, known(1)?, known(2)?);
            let one = index.iter().all(|&n| n == 1) && !index.is_empty();
            let row = [&index[1..], x.get(1..)?].concat();
            (one && values == row).then_some(())?;
            write(call, 2, 0, place(call, 1, x[0], 1)?)
        }
        "TensorScatter" => {
            let (x, part) = (known(0)?, known(1)?);
            let axis = axis(-2, x.len())?;
            let is_linear = call.text("mode", "linear") == "linear";
            let alike = x.len() == part.len() && (0..x.len()).all(|a| a == axis || x[a] == part[a]);
            (is_linear && alike).then_some(())?;
            write(call, 1, axis, place(call, 2, x[axis], part[axis])?)
        }
        _ => None,
    }
}

/// Whether indices of this shape name one element of each row of an axis.
fn is_row(x: &[i64], index: &[i64], axis: usize) -> bool {
    let own = |at: usize| if at == axis { 1 } else { x[at] };
    index.len() == x.len() && (0..x.len()).all(|at| index[at] == own(at))
}

/// Input 0 with the elements of an axis from `start` on replaced by those of an input, or reduced
/// with them as the attribute `reduction` says.
fn write<'t>(
    call: &Call<'_, 't>,
    values: usize,
    axis: usize,
    start: Tensor<'t>,
) -> Option<Results<'t>> {
    let (x, values) = (call.x(0).ok()?, call.x(values).ok()?);
    let numeric = |x: Tensor<'t>| !matches!(x.dtype(), DType::Bool | DType::U8);
    let mut part = sizes(x)
        .into_iter()
        .map(|n| n.as_fixed())
        .collect::<Option<Vec<i64>>>()?;
    part[axis] = match call.operator {
        "TensorScatter" => sizes(values)[axis].as_fixed()?,
        _ => 1,
    };
    let values = values.reshape(&part[..]);
    let old = || x.slice_clamped(axis, start, usize::try_from(part[axis]).unwrap_or(1));
    let new = match &*call.text("reduction", "none") {
        "none" => values,
        _ if !numeric(x) => return None,
        "add" => old() + values,
        "mul" => old() * values,
        "min" => old().minimum(values),
        "max" => old().maximum(values),
        _ => return None,
    };
    let element = call.element(0).ok()?;
    Some(Ok(vec![result(
        element,
        x.update_clamped(axis, start, new),
    )]))
}

/// The number of a step, of `steps`.
pub fn number<'t>(number: Tensor<'t>, steps: i64) -> Value<'t> {
    Value::tensor(Element::I64, number).with_step((0, steps - 1))
}
