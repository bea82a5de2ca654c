//! Operators that write at indices.

use slabwise::{DType, Scatter, Tensor};

use super::Run;
use super::elementwise::lane;
use super::index::{positive, positive_rows};
use crate::call::{Call, Results, sizes};
use crate::element::Element;

pub const OPERATORS: &[(&str, Run)] = &[
    ("Col2Im", columns_to_image),
    ("Scatter", elements),
    ("ScatterElements", elements),
    ("ScatterND", |c| {
        let (x, values) = operands(c)?;
        let index = positive_rows(c, c.x(1)?, 0)?;
        c.same(x.scatter_nd(index, values, reduction(c)?))
    }),
    ("TensorScatter", tensor_scatter),
];

fn reduction(call: &Call<'_, '_>) -> Result<Scatter, String> {
    Ok(match &*call.text("reduction", "none") {
        "none" => Scatter::Set,
        "add" => Scatter::Add,
        "mul" => Scatter::Mul,
        "min" => Scatter::Min,
        "max" => Scatter::Max,
        other => return Err(format!("reduction \"{other}\"")),
    })
}

/// Data and values in a type that can be reduced.
fn operands<'t>(call: &Call<'_, 't>) -> Result<(Tensor<'t>, Tensor<'t>), String> {
    let int = |x: Tensor<'t>| match call.element(0) {
        Ok(Element::Bool) => x.cast(DType::I32),
        _ => x,
    };
    Ok((int(lane(call, 0)?), int(lane(call, 2)?)))
}

fn elements<'t>(call: &Call<'_, 't>) -> Results<'t> {
    let axis = call.axis("axis", 0)?;
    let (x, values) = operands(call)?;
    let index = positive(call, call.x(1)?, sizes(x)[axis])?;
    call.same(x.scatter(axis, index, values, reduction(call)?))
}

/// A cache `[batch, …]` with new rows along an axis, from a position of its own for each batch.
fn tensor_scatter<'t>(call: &Call<'_, 't>) -> Results<'t> {
    let (cache, update) = (lane(call, 0)?, lane(call, 1)?);
    let axis = call.axis("axis", -2)?;
    let (shape, part) = (call.shape(0)?, call.shape(1)?);
    if part.len() != shape.len() {
        return Err(format!("an update of {part:?} for a cache of {shape:?}"));
    }
    let (n, new) = (shape[axis], part[axis]);
    let along = |axis: usize, of: usize, x: Tensor<'t>| {
        let mut to = vec![1usize; shape.len()];
        to[axis] = of;
        x.reshape(&to[..])
    };
    let start = match call.optional(2)? {
        Some(start) => along(0, shape[0], start),
        None => along(0, 1, call.trace.full(0.0, DType::I32, (1,))),
    };
    let place = start + along(axis, new, call.trace.arange(new).cast(DType::I32));
    let place = match &*call.text("mode", "linear") {
        "circular" => place.remainder(n as f32),
        "linear" => place,
        other => return Err(format!("mode \"{other}\"")),
    };
    let index = place.expand(&part[..]);
    call.same(cache.scatter(axis, index, update, Scatter::Set))
}

/// Most elements of an image that columns are added into.
const MOST: i64 = 1 << 24;

/// Columns `[n, channels · kernel, windows]`, which are windows of images, added into the images.
fn columns_to_image<'t>(call: &Call<'_, 't>) -> Results<'t> {
    let lengths = |at: usize, what: &str| {
        let all = call
            .ints(at)?
            .ok_or_else(|| format!("its {what} is missing"))?;
        match all.iter().all(|n| (1..=MOST).contains(n)) && !all.is_empty() {
            true => Ok(all),
            false => Err(format!("a {what} of {all:?}")),
        }
    };
    let (image, kernel) = (lengths(1, "image")?, lengths(2, "window")?);
    let axes = image.len();
    let list = |name: &str, n: usize, default: i64| {
        let all = call.int_list(name).unwrap_or_else(|| vec![default; n]);
        match all.len() == n && all.iter().all(|n| (default..=MOST).contains(n)) {
            true => Ok(all),
            false => Err(format!("{name} of {all:?}")),
        }
    };
    let (strides, dilations) = (list("strides", axes, 1)?, list("dilations", axes, 1)?);
    let pads = list("pads", 2 * axes, 0)?;
    if kernel.len() != axes {
        return Err(format!("windows of {kernel:?} of images of {image:?}"));
    }
    let padded: Vec<i64> = (0..axes)
        .map(|a| image[a] + pads[a] + pads[axes + a])
        .collect();
    let product = |all: &[i64]| {
        let times = |n: i64, &m: &i64| n.checked_mul(m).filter(|&n| n <= MOST);
        all.iter().try_fold(1, times)
    };
    let windows: Vec<i64> = (0..axes)
        .map(|a| (padded[a] - dilations[a] * (kernel[a] - 1) - 1).div_euclid(strides[a]) + 1)
        .collect();
    let is_some = windows.iter().all(|&n| n > 0);
    let counts = product(&kernel).zip(product(&windows).filter(|_| is_some));
    let all = product(&padded).ok_or("its image is too large")?;
    let (x, shape) = (lane(call, 0)?, call.shape(0)?);
    let (&[n, deep, wide], Some((k, l))) = (&shape[..], counts) else {
        return Err(format!("columns of {shape:?} for images of {image:?}"));
    };
    if deep as i64 % k != 0 || wide as i64 != l || k.checked_mul(l).is_none_or(|n| n > MOST) {
        return Err(format!(
            "columns of {shape:?} for {l} windows of {kernel:?}"
        ));
    }
    // The place in the padded image of each element of the columns.
    let mut places = vec![0i64];
    for (part, steps) in [(&kernel, &dilations), (&windows, &strides)] {
        for a in 0..axes {
            let row: i64 = padded[a + 1..].iter().product();
            let step = steps[a] * row;
            let next = places
                .iter()
                .flat_map(|&at| (0..part[a]).map(move |i| at + i * step));
            places = next.collect();
        }
    }
    let channels = deep as i64 / k;
    let values = x.reshape([n as i64, channels, k * l]);
    let zeros = (n, channels as usize, all as usize);
    let zeros = call.trace.full(0.0, x.dtype(), zeros);
    let sum = zeros.index_add(2, call.trace.constant(&places), values);
    let whole = [&[n as i64, channels], &padded[..]].concat();
    let mut y = sum.reshape(&whole[..]);
    for a in 0..axes {
        let start = pads[a] as usize;
        y = y.slice(a + 2, start..start + image[a] as usize);
    }
    call.same(y)
}
