//! Two-dimensional convolution and its two gradients. The three form a closed family: each is
//! linear in both operands, and the gradient of one consists of the others.

use slabwise_kernels::dtype::DType;
use slabwise_kernels::size::Size;
use slabwise_kernels::spec::Dims;
use smallvec::SmallVec;

use super::matmul::{floats, like_operand};
use super::rules::{Gradients, Rule, TensorType};
use super::{GraphBuilder, NodeId, Op};
use crate::shape::Symbols;
use crate::words::count;

/// How a convolution's kernel moves over the image: rows, columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ConvGeometry {
    /// Distance between neighbouring results.
    pub stride: [usize; 2],
    /// Zeros before the first row and column; as many follow the last, unless the shape of a node
    /// says otherwise.
    pub pad: [usize; 2],
    /// Distance between kernel elements.
    pub dilation: [usize; 2],
    /// Channel groups that do not mix.
    pub groups: usize,
}

impl Default for ConvGeometry {
    fn default() -> Self {
        ConvGeometry {
            stride: [1, 1],
            pad: [0, 0],
            dilation: [1, 1],
            groups: 1,
        }
    }
}

/// The largest stride, padding, dilation and side of a window: coordinates must fit the integers
/// that kernels use.
pub(super) const STEP_MAX: usize = 1 << 24;

impl ConvGeometry {
    /// The mistake in the numbers, for any image.
    fn check(&self) -> Result<(), String> {
        if self.groups == 0 || self.stride.contains(&0) || self.dilation.contains(&0) {
            return Err("groups, stride and dilation are at least 1".into());
        }
        let numbers = self.stride.iter().chain(&self.pad).chain(&self.dilation);
        match numbers.max().filter(|&&n| n > STEP_MAX) {
            Some(n) => Err(format!(
                "{n} is more than stride, padding and dilation can be, which is {STEP_MAX}"
            )),
            None => Ok(()),
        }
    }
}

/// The length of a windowed axis: windows of `k` elements `dilation` apart, every `stride`, over
/// `n` elements with `pad` zeros before and after them; `None` if no window fits or the numbers
/// overflow.
pub(super) fn windows(
    n: i64,
    k: usize,
    stride: usize,
    (before, after): (usize, usize),
    dilation: usize,
) -> Option<i64> {
    let int = |n: usize| i64::try_from(n).ok();
    let room = n
        .checked_add(int(before)?)?
        .checked_add(int(after)?)?
        .checked_sub(span(k, dilation)?)?;
    (k > 0 && room >= 0 && stride > 0).then(|| room / int(stride).unwrap_or(i64::MAX) + 1)
}

/// The positions from the first to the last of `k` elements `dilation` apart.
fn span(k: usize, dilation: usize) -> Option<i64> {
    let int = |n: usize| i64::try_from(n).ok();
    int(dilation)?
        .checked_mul(int(k)?.checked_sub(1)?)?
        .checked_add(1)
}

/// The shape of a convolution's result. A node may declare another height and width than those of
/// equal padding on both sides: the padding after the last row and column follows from them.
pub(super) fn infer(
    c: &ConvGeometry,
    given: &[TensorType<'_>],
    declared: &[Size],
    symbols: &Symbols,
) -> Rule {
    let &[_, _, oh, ow] = declared else {
        return convolved(c, None, given, symbols);
    };
    let after = |result: Size, axis: usize| {
        let fixed = |operand: usize| given[operand].dims.get(2 + axis)?.as_fixed();
        let last = result
            .as_fixed()?
            .checked_sub(1)
            .filter(|&last| last >= 0)?;
        let end = last
            .checked_mul(i64::try_from(c.stride[axis]).ok()?)?
            .checked_add(span(usize::try_from(fixed(1)?).ok()?, c.dilation[axis])?)?
            .checked_sub(i64::try_from(c.pad[axis]).ok()?)?;
        usize::try_from(end.checked_sub(fixed(0)?)?.max(0)).ok()
    };
    let (Some(bottom), Some(right)) = (after(oh, 0), after(ow, 1)) else {
        return convolved(c, None, given, symbols);
    };
    let (dtype, dims) = convolved(c, Some([bottom, right]), given, symbols)?;
    let same = declared[..2] == dims[..2];
    Ok((
        dtype,
        if same {
            Dims::from_slice(declared)
        } else {
            dims
        },
    ))
}

/// The shape of a convolution's result with so many zeros after the last row and column; as many as
/// before the first, if not given.
pub fn convolved(
    c: &ConvGeometry,
    after: Option<[usize; 2]>,
    given: &[TensorType<'_>],
    symbols: &Symbols,
) -> Rule {
    let (x, w) = (given[0], given[1]);
    let say = |why: String| {
        Err(format!(
            "conv2d {} with weight {}: {why}",
            symbols.show(x.dims),
            symbols.show(w.dims)
        ))
    };
    if x.dims.len() != 4 || w.dims.len() != 4 {
        return say(
            "image [n, channels, h, w] and weight [out, in/groups, kh, kw] are needed".into(),
        );
    }
    if let Err(why) = floats(x.dtype, w.dtype) {
        return say(why);
    }
    if let Err(why) = c.check() {
        return say(why);
    }
    let fixed: Option<Vec<i64>> = x.dims[1..]
        .iter()
        .chain(w.dims)
        .map(|d| d.as_fixed())
        .collect();
    let Some([ci, h, wd, co, per_group, kh, kw]) =
        fixed.as_deref().and_then(|f| <[i64; 7]>::try_from(f).ok())
    else {
        return say("only the batch may be of bounded length".into());
    };
    let groups = i64::try_from(c.groups).unwrap_or(i64::MAX);
    if Some(ci) != per_group.checked_mul(groups) || co % groups != 0 {
        return say(format!(
            "{ci} channels in {} do not match a weight for {per_group} channels a group and {co} results",
            count(c.groups, "group")
        ));
    }
    let after = after.unwrap_or(c.pad);
    if let Some(n) = after.iter().find(|&&n| n > STEP_MAX) {
        return say(format!(
            "{n} is more than stride, padding and dilation can be, which is {STEP_MAX}"
        ));
    }
    let axis = |n: i64, k: i64, i: usize| {
        windows(
            n,
            usize::try_from(k).unwrap_or(0),
            c.stride[i],
            (c.pad[i], after[i]),
            c.dilation[i],
        )
    };
    let (Some(oh), Some(ow)) = (axis(h, kh, 0), axis(wd, kw, 1)) else {
        return say(format!(
            "the {kh}×{kw} kernel does not fit in {h}×{wd} with padding {}×{}",
            c.pad[0], c.pad[1]
        ));
    };
    Ok((
        DType::F32,
        Dims::from_slice(&[x.dims[0], Size::fixed(co), Size::fixed(oh), Size::fixed(ow)]),
    ))
}

/// The shape of the image whose convolution with a weight `[in, out/groups, kh, kw]` has the shape
/// of `x`, `[n, in, h, w]`: the smallest, where a stride leaves a choice. `after` is the padding
/// after the last row and column (as many as before the first, if not given), `more` the rows and
/// columns to add at the end.
pub fn transposed(
    c: &ConvGeometry,
    after: Option<[usize; 2]>,
    more: [usize; 2],
    [x, w]: [TensorType<'_>; 2],
    symbols: &Symbols,
) -> Rule {
    let say = |why: String| {
        Err(format!(
            "conv_transpose2d {} with weight {}: {why}",
            symbols.show(x.dims),
            symbols.show(w.dims)
        ))
    };
    if x.dims.len() != 4 || w.dims.len() != 4 {
        return say("image [n, in, h, w] and weight [in, out/groups, kh, kw] are needed".into());
    }
    if let Err(why) = floats(x.dtype, w.dtype) {
        return say(why);
    }
    if let Err(why) = c.check() {
        return say(why);
    }
    let fixed: Option<Vec<i64>> = x
        .dims
        .iter()
        .skip(1)
        .chain(w.dims)
        .map(|d| d.as_fixed())
        .collect();
    let Some([channels, h, wd, of_weight, per_group, kh, kw]) =
        fixed.as_deref().and_then(|f| <[i64; 7]>::try_from(f).ok())
    else {
        return say("only the batch may be of bounded length".into());
    };
    if channels != of_weight {
        return say(format!(
            "the image has {channels} channels, the weight is for {of_weight}"
        ));
    }
    if channels % i64::try_from(c.groups).unwrap_or(i64::MAX) != 0 {
        return say(format!(
            "{channels} channels do not divide into {} groups",
            c.groups
        ));
    }
    if h == 0 || wd == 0 || kh == 0 || kw == 0 {
        return say("image and weight need a pixel".into());
    }
    let after = after.unwrap_or(c.pad);
    for (axis, &n) in more.iter().enumerate() {
        let most = c.stride[axis].max(c.dilation[axis]);
        if n >= most {
            return say(format!(
                "output padding {}×{} is not less than the stride or the dilation: {n} rows or columns would not depend on the image",
                more[0], more[1]
            ));
        }
    }
    if let Some(n) = after.iter().find(|&&n| n > STEP_MAX) {
        return say(format!(
            "{n} is more than stride, padding and dilation can be, which is {STEP_MAX}"
        ));
    }
    let int = |n: usize| i64::try_from(n).ok();
    let axis = |n: i64, k: i64, i: usize| {
        let span = span(usize::try_from(k).ok()?, c.dilation[i])?;
        let reach = (n - 1).checked_mul(int(c.stride[i])?)?.checked_add(span)?;
        reach
            .checked_add(int(more[i])?)?
            .checked_sub(int(c.pad[i])?)?
            .checked_sub(int(after[i])?)
    };
    let lengths = int(c.groups)
        .and_then(|g| per_group.checked_mul(g))
        .zip(axis(h, kh, 0))
        .zip(axis(wd, kw, 1));
    let Some(((out, oh), ow)) = lengths else {
        return say("the result is too large".into());
    };
    if oh <= 0 || ow <= 0 {
        return say(format!(
            "padding {}×{} leaves no pixel of the result, which has {oh}×{ow} pixels with it",
            c.pad[0], c.pad[1]
        ));
    }
    Ok((
        DType::F32,
        Dims::from_slice(&[
            x.dims[0],
            Size::fixed(out),
            Size::fixed(oh),
            Size::fixed(ow),
        ]),
    ))
}

fn emit_like(g: &mut dyn GraphBuilder, op: Op, inputs: &[NodeId], like: NodeId) -> NodeId {
    let dims = g.dims(like).clone();
    g.emit(op, inputs, DType::F32, dims)
}

pub(super) fn gradient(
    g: &mut dyn GraphBuilder,
    c: &ConvGeometry,
    inputs: &[NodeId],
    dy: NodeId,
    wanted: &[bool],
) -> Gradients {
    let (x, w) = (inputs[0], inputs[1]);
    let dy = like_operand(g, dy, x);
    let dx = wanted[0].then(|| emit_like(g, Op::Conv2dInputGrad(*c), &[dy, w], x));
    let dw = wanted[1].then(|| emit_like(g, Op::Conv2dWeightGrad(*c), &[x, dy], w));
    SmallVec::from_iter([dx, dw])
}

/// dx = InputGrad(dy, w): with an upstream `d` of dx's shape, ∂/∂dy = Conv(d, w) and ∂/∂w =
/// WeightGrad(d, dy).
pub(super) fn gradient_of_input_grad(
    g: &mut dyn GraphBuilder,
    c: &ConvGeometry,
    inputs: &[NodeId],
    d: NodeId,
    wanted: &[bool],
) -> Gradients {
    let (dy, w) = (inputs[0], inputs[1]);
    let d = like_operand(g, d, dy);
    let to_dy = wanted[0].then(|| emit_like(g, Op::Conv2d(*c), &[d, w], dy));
    let to_w = wanted[1].then(|| emit_like(g, Op::Conv2dWeightGrad(*c), &[d, dy], w));
    SmallVec::from_iter([to_dy, to_w])
}

/// dw = WeightGrad(x, dy): with an upstream `d` of dw's shape, ∂/∂x = InputGrad(dy, d) and ∂/∂dy =
/// Conv(x, d).
pub(super) fn gradient_of_weight_grad(
    g: &mut dyn GraphBuilder,
    c: &ConvGeometry,
    inputs: &[NodeId],
    d: NodeId,
    wanted: &[bool],
) -> Gradients {
    let (x, dy) = (inputs[0], inputs[1]);
    let d = like_operand(g, d, x);
    let to_x = wanted[0].then(|| emit_like(g, Op::Conv2dInputGrad(*c), &[dy, d], x));
    let to_dy = wanted[1].then(|| emit_like(g, Op::Conv2d(*c), &[x, d], dy));
    SmallVec::from_iter([to_x, to_dy])
}
