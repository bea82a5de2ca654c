//! Poolings, resampling and other operators of images.

use slabwise::Tensor;
use slabwise::shape::Size;
use slabwise::tensor::{
    Beyond, Coordinates, Interpolation, Padding, PoolOptions, Resize, ResizeAxis, Rounding,
    Sampling,
};

use super::Run;
use super::product::{padding, per_axis};
use crate::call::{Call, Results, length, resolve_all, result, shape_of, sizes};
use crate::element::Element;

pub const OPERATORS: &[(&str, Run)] = &[
    ("AffineGrid", affine_grid),
    ("AveragePool", average_pool),
    ("GlobalAveragePool", |c| {
        global(c, |x, axes| x.mean_keep(axes))
    }),
    ("GlobalLpPool", |c| {
        let p = c.f("p", c.int("p", 2) as f32);
        global(c, |x, axes| x.norm_keep(axes, p))
    }),
    ("GlobalMaxPool", |c| global(c, |x, axes| x.max_keep(axes))),
    ("GridSample", grid_sample),
    ("LpPool", lp_pool),
    ("MaxPool", max_pool),
    ("MaxUnpool", max_unpool),
    ("Resize", resize),
    ("Upsample", upsample),
];

fn global<'t>(call: &Call<'_, 't>, f: impl Fn(Tensor<'t>, &[usize]) -> Tensor<'t>) -> Results<'t> {
    let x = call.float(0)?;
    let axes: Vec<usize> = (2..x.rank()).collect();
    call.same(f(x, &axes))
}

fn pool_options<const N: usize>(call: &Call<'_, '_>) -> Result<PoolOptions<N>, String> {
    let window = per_axis(call, "kernel_shape", 1)?;
    Ok(PoolOptions {
        window,
        stride: per_axis(call, "strides", 1)?,
        padding: padding(call)?,
        dilation: per_axis(call, "dilations", 1)?,
        ceil: call.flag("ceil_mode"),
        count_padding: call.flag("count_include_pad"),
    })
}

/// A pooling of volumes `[n, channels, depth, h, w]`, whose windows are products of intervals: over
/// the rows and columns of each slice, then over the slices.
fn volumes<'t>(
    call: &Call<'_, 't>,
    x: Tensor<'t>,
    pool: impl Fn(Tensor<'t>, PoolOptions<2>) -> Tensor<'t>,
) -> Results<'t> {
    let options = pool_options::<3>(call)?;
    let padding = |axes: [Option<usize>; 2]| match options.padding {
        Padding::Sides(sides) => {
            Padding::Sides(axes.map(|axis| axis.map_or((0, 0), |axis| sides[axis])))
        }
        Padding::Same => Padding::Same,
        Padding::SameLower => Padding::SameLower,
        Padding::Causal => Padding::Causal,
    };
    let along = |numbers: [usize; 3], axes: [Option<usize>; 2]| {
        axes.map(|axis| axis.map_or(1, |axis| numbers[axis]))
    };
    let of = |axes: [Option<usize>; 2]| PoolOptions {
        window: along(options.window, axes),
        stride: along(options.stride, axes),
        padding: padding(axes),
        dilation: along(options.dilation, axes),
        ceil: options.ceil,
        count_padding: options.count_padding,
    };
    let batch = sizes(x)[0];
    let shaped = |x: Tensor<'t>, rest: &[usize]| {
        let rest = rest.iter().map(|&n| Size::fixed(n as i64));
        let all: Vec<Size> = [batch].into_iter().chain(rest).collect();
        x.reshape(shape_of(&all))
    };
    let [c, d] = [length(x, 1)?, length(x, 2)?];
    let [h, w] = [length(x, 3)?, length(x, 4)?];
    let slices = pool(shaped(x, &[c * d, h, w]), of([Some(1), Some(2)]));
    let [oh, ow] = [2, 3].map(|axis| slices.len(axis).unwrap_or(0));
    let columns = pool(shaped(slices, &[c, d, oh * ow]), of([Some(0), None]));
    let depth = columns.len(2).unwrap_or(0);
    call.same(shaped(columns, &[c, depth, oh, ow]))
}

pub fn average_pool<'t>(call: &Call<'_, 't>) -> Results<'t> {
    let x = call.float(0)?;
    call.same(match x.rank() {
        3 => x.avg_pool1d_with(pool_options(call)?),
        4 => x.avg_pool2d_with(pool_options::<2>(call)?),
        5 => return volumes(call, x, |x, options| x.avg_pool2d_with(options)),
        n => return Err(format!("a pooling of {n} axes")),
    })
}

fn max_pool<'t>(call: &Call<'_, 't>) -> Results<'t> {
    if call.int("storage_order", 0) != 0 && call.outputs > 1 {
        return Err("positions in column-major order".into());
    }
    let element = call.element(0)?;
    let x = match element.is_float() {
        true => call.float(0)?,
        // Integers of 8 bits are exact in f32.
        false if matches!(element, Element::U8 | Element::I8) => {
            call.x(0)?.cast(slabwise::DType::F32)
        }
        false => return Err(format!("a pooling of {element}")),
    };
    let (y, positions) = match x.rank() {
        3 => {
            let options = pool_options(call)?;
            let positions = || x.max_pool1d_positions(options);
            (
                x.max_pool1d_with(options),
                (call.outputs > 1).then(positions),
            )
        }
        4 => {
            let options = pool_options::<2>(call)?;
            let positions = || x.max_pool2d_positions(options);
            (
                x.max_pool2d_with(options),
                (call.outputs > 1).then(positions),
            )
        }
        5 if call.outputs < 2 => return volumes(call, x, |x, options| x.max_pool2d_with(options)),
        n => return Err(format!("a pooling of {n} axes")),
    };
    let mut results = call.same(y)?;
    if let Some(positions) = positions {
        // Positions count through all images and channels.
        let shape = call.shape(0)?;
        let elements = crate::array::count(&shape).and_then(|n| i32::try_from(n).ok());
        elements.ok_or("an input whose positions leave 32 bits")?;
        let area = shape[2..].iter().product::<usize>() as i32;
        let planes = call
            .trace
            .arange(shape[0] * shape[1])
            .cast(slabwise::DType::I32);
        let mut to = vec![shape[0], shape[1]];
        to.resize(shape.len(), 1);
        let first = planes.reshape(&to[..]) * area;
        results.push(result(Element::I64, positions + first));
    }
    Ok(results)
}

fn max_unpool<'t>(call: &Call<'_, 't>) -> Results<'t> {
    let x = call.float(0)?;
    let shape = call.shape(0)?;
    let &[n, c, h, w] = &shape[..] else {
        return Err(format!("an unpooling of {} axes", shape.len()));
    };
    let [kh, kw] = per_axis(call, "kernel_shape", 1)?;
    let [sh, sw] = per_axis(call, "strides", 1)?;
    let Padding::Sides([rows, columns]) = padding::<2>(call)? else {
        return Err("automatic padding".into());
    };
    let length = |n: usize, stride: usize, k: usize, (before, after): (usize, usize)| {
        let reach = n.checked_sub(1)?.checked_mul(stride)?.checked_add(k)?;
        reach.checked_sub(before)?.checked_sub(after)
    };
    let own = [length(h, sh, kh, rows), length(w, sw, kw, columns)];
    let [Some(oh), Some(ow)] = own else {
        return Err("its strides and pads fit no image".into());
    };
    if let Some(to) = call.ints(2)?
        && to.get(2..) != Some(&[oh as i64, ow as i64])
    {
        return Err("an output_shape other than that of its geometry".into());
    }
    let area = oh.checked_mul(ow).and_then(|n| i32::try_from(n).ok());
    let area = area.ok_or("an image whose positions leave 32 bits")?;
    let planes = call.trace.arange(n * c).cast(slabwise::DType::I32);
    // Positions in an image of the pooling's size.
    let places = call.x(1)? - planes.reshape([n, c, 1, 1]) * area;
    call.same(x.max_unpool2d(places, [oh, ow]))
}

fn lp_pool<'t>(call: &Call<'_, 't>) -> Results<'t> {
    let x = call.float(0)?;
    // A float in the first version.
    let p = call.f("p", call.int("p", 2) as f32);
    let power = x.abs().pow(p);
    let sums = match x.rank() {
        3 => {
            let mut options = pool_options::<1>(call)?;
            options.count_padding = true;
            let n = options.window.iter().map(|&n| n as f32).product::<f32>();
            power.avg_pool1d_with(options) * n
        }
        4 => {
            let mut options = pool_options::<2>(call)?;
            options.count_padding = true;
            let n = options.window.iter().map(|&n| n as f32).product::<f32>();
            power.avg_pool2d_with(options) * n
        }
        n => return Err(format!("a pooling of {n} axes")),
    };
    if call.flag("ceil_mode") {
        return Err("ceil_mode".into());
    }
    call.same(sums.pow(1.0 / p))
}

fn interpolation(call: &Call<'_, '_>) -> Result<(Interpolation, Coordinates), String> {
    let rounding = match &*call.text("nearest_mode", "round_prefer_floor") {
        "round_prefer_floor" => Rounding::PreferFloor,
        "round_prefer_ceil" => Rounding::PreferCeil,
        "floor" => Rounding::Floor,
        "ceil" => Rounding::Ceil,
        other => return Err(format!("nearest_mode \"{other}\"")),
    };
    let interpolation = match &*call.text("mode", "nearest") {
        "nearest" => Interpolation::Nearest(rounding),
        "linear" | "bilinear" => Interpolation::Linear,
        "cubic" => Interpolation::Cubic {
            a: call.f("cubic_coeff_a", -0.75),
        },
        other => return Err(format!("mode \"{other}\"")),
    };
    let coordinates = match &*call.text("coordinate_transformation_mode", "half_pixel") {
        "half_pixel" => Coordinates::HalfPixel,
        "half_pixel_symmetric" => Coordinates::HalfPixelSymmetric,
        "pytorch_half_pixel" => Coordinates::PytorchHalfPixel,
        "align_corners" => Coordinates::AlignCorners,
        "asymmetric" => Coordinates::Asymmetric,
        "tf_half_pixel_for_nn" => Coordinates::TfHalfPixelForNearest,
        "tf_crop_and_resize" => Coordinates::Crop,
        other => return Err(format!("coordinate_transformation_mode \"{other}\"")),
    };
    Ok((interpolation, coordinates))
}

fn resize<'t>(call: &Call<'_, 't>) -> Results<'t> {
    let x = call.float(0)?;
    let dims = call.dims(0)?;
    let (mut kind, mut coordinates) = interpolation(call)?;
    let (scales, given, roi) = match call.opset >= 11 {
        true => (
            call.known_optional(2)?
                .filter(|a| !a.is_empty())
                .map(|a| a.to_floats()),
            call.value(3).map(|_| call.lengths(3)).transpose()?,
            call.known_optional(1)?.map(|a| a.to_floats()),
        ),
        false => {
            coordinates = Coordinates::Asymmetric;
            if matches!(kind, Interpolation::Nearest(_)) {
                kind = Interpolation::Nearest(Rounding::Floor);
            }
            (call.known_optional(1)?.map(|a| a.to_floats()), None, None)
        }
    };
    let axes = match call.int_list("axes") {
        Some(axes) => resolve_all(&axes, dims.len())?,
        None => (0..dims.len()).collect(),
    };
    let policy = call.text("keep_aspect_ratio_policy", "stretch");
    // The new length of each axis, and its scale where that is given.
    let mut targets: Vec<(Size, Option<f32>)> = Vec::with_capacity(axes.len());
    if let Some(given) = given {
        if given.len() != axes.len() {
            return Err(format!("{} sizes for {} axes", given.len(), axes.len()));
        }
        let common = match &*policy {
            "not_larger" | "not_smaller" => {
                let mut all = Vec::with_capacity(axes.len());
                for (&axis, to) in axes.iter().zip(&given) {
                    all.push(number(call, axis, *to)? as f64 / length(x, axis)? as f64);
                }
                Some(match &*policy {
                    "not_larger" => all.into_iter().fold(f64::INFINITY, f64::min),
                    _ => all.into_iter().fold(0.0, f64::max),
                })
            }
            _ => None,
        };
        for (&axis, &to) in axes.iter().zip(&given) {
            targets.push(match common {
                Some(scale) => {
                    let n = (scale * length(x, axis)? as f64).round();
                    (Size::fixed(n as i64), Some(scale as f32))
                }
                None => (to, None),
            });
        }
    } else if let Some(scales) = scales {
        if scales.len() != axes.len() {
            return Err(format!("{} scales for {} axes", scales.len(), axes.len()));
        }
        for (&scale, &axis) in scales.iter().zip(&axes) {
            let to = match scale == 1.0 {
                true => dims[axis],
                false => Size::fixed((scale * length(x, axis)? as f64).floor() as i64),
            };
            targets.push((to, Some(scale as f32)));
        }
    } else {
        return Err("it has neither scales nor sizes".into());
    }
    let mut wanted = Vec::with_capacity(axes.len());
    for (at, (&axis, &(to, scale))) in axes.iter().zip(&targets).enumerate() {
        let crop = match (coordinates, &roi) {
            (Coordinates::Crop, Some(roi)) if roi.len() == 2 * axes.len() => {
                (roi[at] as f32, roi[at + axes.len()] as f32)
            }
            _ => (0.0, 1.0),
        };
        if to == dims[axis] && crop == (0.0, 1.0) {
            continue;
        }
        let n = number(call, axis, to)?;
        let mut resized = ResizeAxis::new(axis, n);
        (resized.scale, resized.crop) = (scale, crop);
        if coordinates == Coordinates::AlignCorners && n == 1 {
            resized.crop = (0.0, 0.0);
        } else if let (Coordinates::AlignCorners, Some(scale)) = (coordinates, scale) {
            // Aligned to the length before it was rounded down.
            let whole = f64::from(scale) * length(x, axis)? as f64 - 1.0;
            if whole > 0.0 {
                resized.crop = (0.0, (n.saturating_sub(1) as f64 / whole) as f32);
            }
        }
        wanted.push(resized);
    }
    if coordinates == Coordinates::AlignCorners {
        // The same coordinates, of which `crop` says how far they reach.
        coordinates = Coordinates::Crop;
    }
    let options = Resize {
        exclude_outside: call.flag("exclude_outside"),
        antialias: call.flag("antialias"),
        extrapolation: call.f("extrapolation_value", 0.0),
        ..Resize::new(kind, coordinates)
    };
    call.same(x.resize(wanted, options))
}

/// The new length of an axis, which must be a number.
fn number(call: &Call<'_, '_>, axis: usize, to: Size) -> Result<usize, String> {
    let n = to.as_fixed().ok_or_else(|| {
        let to = call.trace.show_size(to);
        format!("the new length of axis {axis} is {to}, and must be fixed here")
    })?;
    usize::try_from(n).map_err(|_| format!("the new length of axis {axis} is {n}"))
}

/// The operator before Resize: asymmetric coordinates, rounded down.
fn upsample<'t>(call: &Call<'_, 't>) -> Results<'t> {
    let x = call.float(0)?;
    let scales: Vec<f64> = match call.opset >= 9 {
        true => call.known(1)?.to_floats(),
        false => match call.float_list("scales") {
            Some(scales) => scales.into_iter().map(f64::from).collect(),
            None => vec![
                1.0,
                1.0,
                call.f("height_scale", 1.0).into(),
                call.f("width_scale", 1.0).into(),
            ],
        },
    };
    let kind = match &*call.text("mode", "nearest") {
        "nearest" => Interpolation::Nearest(Rounding::Floor),
        "linear" | "bilinear" => Interpolation::Linear,
        other => return Err(format!("mode \"{other}\"")),
    };
    if scales.len() != x.rank() {
        return Err(format!("{} scales for {} axes", scales.len(), x.rank()));
    }
    let mut axes = Vec::new();
    for (axis, &scale) in scales.iter().enumerate() {
        if scale != 1.0 {
            let n = (scale * length(x, axis)? as f64).floor() as usize;
            axes.push(ResizeAxis {
                scale: Some(scale as f32),
                ..ResizeAxis::new(axis, n)
            });
        }
    }
    call.same(x.resize(axes, Resize::new(kind, Coordinates::Asymmetric)))
}

fn grid_sample<'t>(call: &Call<'_, 't>) -> Results<'t> {
    let (x, grid) = (call.float(0)?, call.float(1)?);
    if x.rank() != 4 {
        return Err(format!("an image of {} axes", x.rank()));
    }
    let sampling = match &*call.text("mode", "linear") {
        "linear" | "bilinear" => Sampling::Bilinear,
        "nearest" => Sampling::Nearest,
        "cubic" | "bicubic" => Sampling::Bicubic,
        other => return Err(format!("mode \"{other}\"")),
    };
    let beyond = match &*call.text("padding_mode", "zeros") {
        "zeros" => Beyond::Zeros,
        "border" => Beyond::Border,
        "reflection" => Beyond::Reflection,
        other => return Err(format!("padding_mode \"{other}\"")),
    };
    call.same(x.grid_sample(grid, sampling, beyond, call.flag("align_corners")))
}

fn affine_grid<'t>(call: &Call<'_, 't>) -> Results<'t> {
    let theta = call.float(0)?;
    let size = call.ints(1)?.ok_or("its size is missing")?;
    let &[_, _, h, w] = &size[..] else {
        return Err(format!("a grid of {} axes", size.len().saturating_sub(2)));
    };
    let size = [h, w].map(|n| usize::try_from(n).unwrap_or(0));
    call.same(theta.affine_grid(size, call.flag("align_corners")))
}
