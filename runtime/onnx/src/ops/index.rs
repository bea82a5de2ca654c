//! Operators that read at indices, and those that order or choose elements.

use slabwise::shape::Size;
use slabwise::{DType, Running, Tensor};

use super::Run;
use super::elementwise::lane;
use crate::call::{Call, Results, dim, resolve, result, shape_of, sizes};
use crate::element::Element;
use crate::lengths::Lengths;
use crate::value::Value;

pub const OPERATORS: &[(&str, Run)] = &[
    ("ArgMax", |c| arg(c, true)),
    ("ArgMin", |c| arg(c, false)),
    ("Compress", compress),
    ("CumProd", |c| {
        running(c, |x, axis, how| x.cumprod_by(axis, how))
    }),
    ("CumSum", |c| {
        running(c, |x, axis, how| x.cumsum_by(axis, how))
    }),
    ("Gather", |c| {
        let axis = c.axis("axis", 0)?;
        let x = c.x(0)?;
        let index = positive(c, c.x(1)?, sizes(x)[axis])?;
        let dims = sizes(x);
        let to = [&dims[..axis], &c.dims(1)?, &dims[axis + 1..]].concat();
        let flat = index.reshape([-1i64]);
        c.same(x.index_select(axis, flat).reshape(shape_of(&to)))
    }),
    ("GatherElements", |c| {
        let axis = c.axis("axis", 0)?;
        let mut x = c.x(0)?;
        let index = positive(c, c.x(1)?, sizes(x)[axis])?;
        // The index may be shorter than the data along the other axes.
        for other in (0..x.rank()).filter(|&other| other != axis) {
            if let Some(n) = index.len(other)
                && x.len(other).is_some_and(|own| n < own)
            {
                x = x.slice(other, 0..n);
            }
        }
        c.same(x.gather(axis, index))
    }),
    ("GatherND", |c| {
        let batch = usize::try_from(c.int("batch_dims", 0)).unwrap_or(0);
        let x = c.x(0)?;
        let index = positive_rows(c, c.x(1)?, batch)?;
        c.same(x.gather_nd(index, batch))
    }),
    ("NonMaxSuppression", nms),
    ("NonZero", |c| {
        let x = c.x(0)?;
        let x = match x.dtype() {
            DType::Bool => x,
            _ => lane(c, 0)?.not_equal(0.0),
        };
        c.typed(Element::I64, x.nonzero().transpose(0, 1))
    }),
    ("OneHot", one_hot),
    ("TopK", topk),
    ("Unique", unique),
];

/// Indices of an axis of `n` elements that may count from the end as indices from the start.
pub fn positive<'t>(call: &Call<'_, 't>, index: Tensor<'t>, n: Size) -> Result<Tensor<'t>, String> {
    let index = index.cast(DType::I32);
    if let Some(n) = n.as_fixed() {
        let n = i32::try_from(n).map_err(|_| "the indexed axis leaves 32 bits")?;
        return Ok(index.lt(0).select(index + n, index));
    }
    Ok(index.lt(0).select(index + call.trace.length(dim(n)), index))
}

/// [`positive`] for rows of coordinates.
pub fn positive_rows<'t>(
    call: &Call<'_, 't>,
    index: Tensor<'t>,
    batch: usize,
) -> Result<Tensor<'t>, String> {
    let shape = call.dims(0)?;
    let k = index
        .len(index.rank().saturating_sub(1))
        .ok_or("rows of no fixed length")?;
    let part = shape
        .get(batch..batch.saturating_add(k))
        .ok_or("more coordinates than axes")?;
    let lengths = Value::of_lengths(Lengths::list(part.to_vec())).traced(call.trace)?;
    let index = index.cast(DType::I32);
    Ok(index.lt(0.0).select(index + lengths, index))
}

fn arg<'t>(call: &Call<'_, 't>, largest: bool) -> Results<'t> {
    let axis = call.axis("axis", 0)?;
    let x = lane(call, 0)?;
    let found = match (largest, call.flag("select_last_index")) {
        (true, false) => x.argmax(axis),
        (false, false) => x.argmin(axis),
        (true, true) => x.argmax_last(axis),
        (false, true) => x.argmin_last(axis),
    };
    let found = match call.int("keepdims", 1) {
        0 => found,
        _ => found.unsqueeze(axis),
    };
    call.typed(Element::I64, found)
}

fn running<'t>(
    call: &Call<'_, 't>,
    f: impl Fn(Tensor<'t>, usize, Running) -> Tensor<'t>,
) -> Results<'t> {
    let x = lane(call, 0)?;
    let axis = call.number(1)?.ok_or("its axis is missing")? as i64;
    let how = Running {
        exclusive: call.flag("exclusive"),
        reverse: call.flag("reverse"),
    };
    call.same(f(x, resolve(axis, x.rank())?, how))
}

fn compress<'t>(call: &Call<'_, 't>) -> Results<'t> {
    let mut x = call.x(0)?;
    let axis = match call.has("axis") {
        true => call.axis("axis", 0)?,
        false => {
            x = x.reshape([-1i64]);
            0
        }
    };
    let mask = call.x(1)?;
    // A condition may be shorter than the axis.
    let n = mask.len(0).ok_or("its condition is not fixed")?;
    call.same(x.slice(axis, 0..n).compress(axis, mask))
}

fn one_hot<'t>(call: &Call<'_, 't>) -> Results<'t> {
    let index = match call.element(0)?.is_float() {
        true => call.float(0)?.cast(DType::I32),
        false => call.x(0)?.cast(DType::I32),
    };
    let depth = call.number(1)?.ok_or("its depth is missing")?;
    if !(0.0..=1e9).contains(&depth) {
        return Err(format!("a depth of {depth}"));
    }
    let n = depth as usize;
    let axis = resolve(call.int("axis", -1), index.rank() + 1)?;
    let index = index.lt(0).select(index + n as i32, index);
    let mut place = call.trace.arange(n).cast(DType::I32);
    for _ in axis..index.rank() {
        place = place.unsqueeze(place.rank());
    }
    let hot = index.unsqueeze(axis).equal(place);
    let values = lane(call, 2)?;
    let (off, on) = (values.slice(0, 0..1), values.slice(0, 1..2));
    let rank = hot.rank();
    let lift = |x: Tensor<'t>| x.reshape(&vec![1usize; rank][..]);
    call.typed(call.element(2)?, hot.select(lift(on), lift(off)))
}

fn topk<'t>(call: &Call<'_, 't>) -> Results<'t> {
    let k = match call.opset >= 10 {
        true => call.number(1)?.ok_or("its k is missing")? as i64,
        false => call.int("k", 0),
    };
    let k = usize::try_from(k).map_err(|_| format!("k is {k}"))?;
    let axis = call.axis("axis", -1)?;
    let x = lane(call, 0)?;
    let (values, index) = match call.int("largest", 1) {
        0 => x.bottomk(k, axis),
        _ => x.topk(k, axis),
    };
    Ok(vec![
        result(call.element(0)?, values),
        result(Element::I64, index),
    ])
}

fn unique<'t>(call: &Call<'_, 't>) -> Results<'t> {
    if call.has("axis") || call.int("sorted", 1) == 0 || call.outputs > 1 {
        return Err(
            "only the sorted values can be expressed, without axis, inverse or counts".into(),
        );
    }
    let x = lane(call, 0)?;
    let x = match x.dtype() {
        DType::Bool => x.cast(DType::I32),
        _ => x,
    };
    call.same(x.reshape([-1i64]).unique())
}

/// The boxes of each class that share no more than a part of their union with a better selected one
/// of that class: a loop over the boxes of all classes, each in the order of its scores, marks the
/// selected ones.
fn nms<'t>(call: &Call<'_, 't>) -> Results<'t> {
    let (boxes, scores, trace) = (call.float(0)?, call.float(1)?, call.trace);
    let &[batch, classes, n] = &call.shape(1)?[..] else {
        return Err("its scores are not of three axes".into());
    };
    let most = call.number(2)?.unwrap_or(0.0).clamp(0.0, n as f64);
    let overlap = call.number(3)?.unwrap_or(0.0) as f32;
    if batch * classes * n == 0 {
        return Err("it has no boxes".into());
    }
    let (values, order) = scores.topk(n, 2);
    let valid = match call.number(4)? {
        Some(least) => values.gt(least as f32).cast(DType::I32),
        None => trace.full(1.0, DType::I32, (batch, classes, n)),
    };
    let column = |x: Tensor<'t>, at: usize| x.slice(2, at..at + 1);
    let sides = |low: usize, high: usize| {
        let (a, b) = (column(boxes, low), column(boxes, high));
        match call.flag("center_point_box") {
            true => (a - b * 0.5, a + b * 0.5),
            false => (a.minimum(b), a.maximum(b)),
        }
    };
    let (x, y) = (sides(0, 2), sides(1, 3));
    // Each side of the boxes in the order of the scores: [batch, classes, n].
    let ordered = |side: Tensor<'t>| {
        let side = side.transpose(1, 2).expand((batch, classes, n));
        side.gather(2, order)
    };
    let all = [x.0, x.1, y.0, y.1].map(ordered);
    let area = (all[1] - all[0]) * (all[3] - all[2]);
    let first = |x: Tensor<'t>| x.permute([2, 0, 1]);
    let [a, b, c, d] = all.map(first);
    let parts = [trace.arange(n).cast(DType::I32), first(valid), a, b, c, d];
    let none = trace.full(0.0, DType::I32, (batch, classes, n));
    let count = trace.full(0.0, DType::I32, (batch, classes));
    let places = trace.arange(n).cast(DType::I32);
    let (_, [rows]) = trace.scan([none, count], parts, |[kept, count], parts| {
        let [place, valid, sides @ ..] = parts;
        let [left, right, top, bottom] = sides.map(|side| side.unsqueeze(2));
        let width = all[1].minimum(right) - all[0].maximum(left);
        let height = all[3].minimum(bottom) - all[2].maximum(top);
        let shared = width.maximum(0.0) * height.maximum(0.0);
        let own = (right - left) * (bottom - top);
        let over = (shared / (area + own - shared)).gt(overlap);
        let over = (over.cast(DType::I32) * kept).sum_over(2);
        let selected = over.equal(0.0).cast(DType::I32) * valid;
        let selected = selected * count.lt(most as f32).cast(DType::I32);
        let mark = places.equal(place).cast(DType::I32);
        let kept = kept + selected.unsqueeze(2) * mark;
        ([kept, count + selected], [selected])
    });
    let rows = rows.permute([1, 2, 0]).nonzero();
    let index = order.gather_nd(rows, 0).unsqueeze(1);
    let found = trace.concat(&[rows.slice(1, 0..2), index], 1);
    call.typed(Element::I64, found)
}
