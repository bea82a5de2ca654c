//! Matrix products and convolutions.

use slabwise::Tensor;
use slabwise::tensor::{ConvOptions, Padding};

use super::Run;
use crate::call::{Call, Results, length};

pub const OPERATORS: &[(&str, Run)] = &[
    ("Conv", conv),
    ("ConvTranspose", conv_transpose),
    ("Einsum", |c| {
        let operands: Vec<Tensor<'_>> = (0..c.len())
            .map(|at| c.float(at))
            .collect::<Result<_, _>>()?;
        let equation: String = c.text("equation", "").split_whitespace().collect();
        c.same(c.trace.einsum(&equation, &operands))
    }),
    ("Gemm", gemm),
    ("MatMul", |c| {
        let element = c.element(0)?;
        if !element.is_float() {
            return int_matmul(c);
        }
        c.same(product(c.float(0)?, c.float(1)?))
    }),
];

/// A product as NumPy's: a vector is a row on the left and a column on the right.
pub fn product<'t>(a: Tensor<'t>, b: Tensor<'t>) -> Tensor<'t> {
    let (left, right) = (a.rank() == 1, b.rank() == 1);
    let a = if left { a.unsqueeze(0) } else { a };
    let b = if right { b.unsqueeze(1) } else { b };
    let mut result = a.matmul(b);
    if right {
        result = result.squeeze(result.rank().saturating_sub(1));
    }
    if left {
        result = result.squeeze(result.rank().saturating_sub(if right { 1 } else { 2 }));
    }
    result
}

/// A product of integers, as sums of elementwise products.
fn int_matmul<'t>(call: &Call<'_, 't>) -> Results<'t> {
    let (a, b) = (
        super::elementwise::lane(call, 0)?,
        super::elementwise::lane(call, 1)?,
    );
    if a.rank() < 2 || b.rank() < 2 {
        return Err("a product of vectors of integers".into());
    }
    let wide = a.unsqueeze(a.rank()) * b.unsqueeze(b.rank() - 2);
    call.same(wide.sum_over(wide.rank().saturating_sub(2)))
}

pub fn gemm<'t>(call: &Call<'_, 't>) -> Results<'t> {
    let (mut a, mut b) = (call.float(0)?, call.float(1)?);
    if call.flag("transA") {
        a = a.t();
    }
    if call.flag("transB") {
        b = b.t();
    }
    let mut result = a.matmul(b);
    let (alpha, beta) = (call.f("alpha", 1.0), call.f("beta", 1.0));
    if alpha != 1.0 {
        result = result * alpha;
    }
    if let Some(c) = call.optional_float(2)? {
        result = result + if beta == 1.0 { c } else { c * beta };
    }
    call.same(result)
}

/// A vector along axis 1, the channels, of a tensor of `rank` axes.
pub fn along_channels(v: Tensor<'_>, rank: usize) -> Tensor<'_> {
    (2..rank).fold(v, |v, _| v.unsqueeze(v.rank()))
}

/// The attribute of one number per axis.
pub fn per_axis<const N: usize>(
    call: &Call<'_, '_>,
    name: &str,
    default: usize,
) -> Result<[usize; N], String> {
    match call.sizes(name)? {
        None => Ok([default; N]),
        Some(values) => values
            .try_into()
            .map_err(|values| format!("{name} {values:?} for {N} axes")),
    }
}

/// The padding before and after each axis; negative padding is refused.
pub fn padding<const N: usize>(call: &Call<'_, '_>) -> Result<Padding<N>, String> {
    match &*call.text("auto_pad", "NOTSET") {
        "SAME_UPPER" => return Ok(Padding::Same),
        "SAME_LOWER" => return Ok(Padding::SameLower),
        "NOTSET" | "VALID" | "" => {}
        other => return Err(format!("auto_pad \"{other}\"")),
    }
    let pads = call.sizes("pads")?.unwrap_or_else(|| vec![0; 2 * N]);
    if pads.len() != 2 * N {
        return Err(format!("pads {pads:?} for {N} axes"));
    }
    Ok(Padding::Sides(std::array::from_fn(|i| {
        (pads[i], pads[i + N])
    })))
}

fn options<const N: usize>(call: &Call<'_, '_>) -> Result<ConvOptions<N>, String> {
    let groups = usize::try_from(call.int("group", 1)).map_err(|_| "a negative group")?;
    Ok(ConvOptions {
        stride: per_axis(call, "strides", 1)?,
        padding: padding(call)?,
        dilation: per_axis(call, "dilations", 1)?,
        groups,
        output_padding: per_axis(call, "output_padding", 0)?,
    })
}

fn biased<'t>(call: &Call<'_, 't>, y: Tensor<'t>) -> Results<'t> {
    let y = match call.optional_float(2)? {
        Some(bias) => y + along_channels(bias, y.rank()),
        None => y,
    };
    call.same(y)
}

pub fn conv<'t>(call: &Call<'_, 't>) -> Results<'t> {
    let (x, weight) = (call.float(0)?, call.float(1)?);
    let y = match x.rank() {
        3 => x.conv1d_with(weight, options(call)?),
        4 => x.conv2d_with(weight, options::<2>(call)?),
        5 => x.conv3d_with(weight, options(call)?),
        n => return Err(format!("an input of {n} axes")),
    };
    biased(call, y)
}

fn conv_transpose<'t>(call: &Call<'_, 't>) -> Results<'t> {
    let (x, weight) = (call.float(0)?, call.float(1)?);
    let y = match x.rank() {
        3 => x.conv_transpose1d(weight, transposed::<1>(call)?),
        4 => x.conv_transpose2d(weight, transposed::<2>(call)?),
        5 => x.conv_transpose3d(weight, transposed::<3>(call)?),
        n => return Err(format!("a transposed convolution of {n} axes")),
    };
    biased(call, y)
}

const ABSURD: &str = "its strides, dilations or padding are beyond any image";

/// With `output_shape` or `auto_pad` the padding follows from the result's lengths.
fn transposed<const N: usize>(call: &Call<'_, '_>) -> Result<ConvOptions<N>, String> {
    let mut options: ConvOptions<N> = options(call)?;
    let mode = call.text("auto_pad", "NOTSET");
    let given = call.sizes("output_shape")?.filter(|to| to.len() >= N);
    let (x, kernel) = (call.x(0)?, call.shape(1)?);
    if kernel.len() != N + 2 || (given.is_none() && !mode.starts_with("SAME")) {
        return Ok(options);
    }
    let image = (2..N + 2).map(|axis| length(x, axis));
    let image = image.collect::<Result<Vec<usize>, _>>()?;
    if image.contains(&0) || kernel.contains(&0) {
        return Ok(options);
    }
    let wanted = match given {
        Some(to) => to[to.len() - N..].to_vec(),
        None => {
            let lengths = (0..N).map(|i| image[i].checked_mul(options.stride[i]));
            lengths.collect::<Option<Vec<_>>>().ok_or(ABSURD)?
        }
    };
    let mut sides = [(0, 0); N];
    for i in 0..N {
        let reach = |n: usize, by: usize| (n - 1).checked_mul(by);
        let whole = reach(image[i], options.stride[i])
            .zip(reach(kernel[i + 2], options.dilation[i]))
            .and_then(|(a, b)| {
                a.checked_add(b)?
                    .checked_add(1)?
                    .checked_add(options.output_padding[i])
            })
            .ok_or(ABSURD)?;
        match whole.checked_sub(wanted[i]) {
            Some(total) => {
                let less = total / 2;
                sides[i] = match &*mode {
                    "SAME_UPPER" => (less, total - less),
                    _ => (total - less, less),
                };
            }
            None => options.output_padding[i] += wanted[i] - whole,
        }
    }
    options.padding = Padding::Sides(sides);
    Ok(options)
}
