//! Pooling over windows.

use slabwise_kernels::dtype::DType;
use slabwise_kernels::size::Size;
use slabwise_kernels::spec::{Dims, PoolKind, Window};
use smallvec::SmallVec;

use super::rules::{Gradients, Rule, TensorType};
use super::{GraphBuilder, NodeId, Op, conv};
use crate::shape::Symbols;

/// The type of a window position: a byte if 256 positions suffice.
pub(super) fn position_type(window: &Window) -> DType {
    if window.k[0].saturating_mul(window.k[1]) <= 256 {
        DType::U8
    } else {
        DType::I32
    }
}

/// The shape of a pooling's result. A node may declare another height and width than those of equal
/// padding on both sides, with which every window that begins in the padded image is whole: any
/// windows that have an element of the image.
pub(super) fn infer(
    kind: PoolKind,
    window: &Window,
    given: TensorType<'_>,
    declared: &[Size],
    symbols: &Symbols,
) -> Rule {
    let op = Op::Pool2d(kind, *window);
    let name = op.name();
    let say = |why: String| Err(format!("{name} of {}: {why}", symbols.show(given.dims)));
    let takes_halves = matches!(kind, PoolKind::Max | PoolKind::ArgMax);
    if given.dims.len() != 4
        || given.dtype != DType::F32 && !(takes_halves && given.dtype.is_half())
    {
        return say("an f32 image [n, channels, h, w] is needed".into());
    }
    let (Some(h), Some(w)) = (given.dims[2].as_fixed(), given.dims[3].as_fixed()) else {
        return say("height and width must have fixed lengths".into());
    };
    if h == 0 || w == 0 {
        return say("it has no pixels, and no window has a value".into());
    }
    let numbers = window.k.iter().chain(&window.stride).chain(&window.pad);
    if let Some(n) = numbers.max().filter(|&&n| n > conv::STEP_MAX) {
        return say(format!(
            "{n} is more than the side, stride and padding of a window can be, which is {}",
            conv::STEP_MAX
        ));
    }
    let dtype = if kind == PoolKind::ArgMax {
        position_type(window)
    } else {
        DType::F32
    };
    if let [n, c, oh, ow] = *declared {
        let holds = |result: Size, image: i64, i: usize| {
            let int = |n: usize| i64::try_from(n).ok();
            let last = result
                .as_fixed()?
                .checked_sub(1)
                .filter(|&last| last >= 0)?;
            let begin = last
                .checked_mul(int(window.stride[i])?)?
                .checked_sub(int(window.pad[i])?)?;
            (window.pad[i] < window.k[i] && begin < image).then_some(())
        };
        let same = [n, c] == given.dims[..2] && window.stride.iter().all(|&s| s > 0);
        if !same || holds(oh, h, 0).and(holds(ow, w, 1)).is_none() {
            return say(format!(
                "a result {} has windows without an element of the image",
                symbols.show(declared)
            ));
        }
        return Ok((dtype, Dims::from_slice(declared)));
    }
    if window
        .pad
        .iter()
        .zip(window.k)
        .any(|(&p, k)| p.saturating_mul(2) > k)
    {
        return say(format!(
            "padding {}×{} is more than half the {}×{} window",
            window.pad[0], window.pad[1], window.k[0], window.k[1]
        ));
    }
    let axis = |n: i64, i: usize| {
        let pad = window.pad[i];
        conv::windows(n, window.k[i], window.stride[i], (pad, pad), 1)
    };
    let (Some(oh), Some(ow)) = (axis(h, 0), axis(w, 1)) else {
        return say(format!(
            "a {}×{} window with stride {}×{} does not fit",
            window.k[0], window.k[1], window.stride[0], window.stride[1]
        ));
    };
    Ok((
        dtype,
        Dims::from_slice(&[
            given.dims[0],
            given.dims[1],
            Size::fixed(oh),
            Size::fixed(ow),
        ]),
    ))
}

/// The positions of a max pooling's winners.
fn positions(g: &mut dyn GraphBuilder, window: &Window, x: NodeId, like: NodeId) -> NodeId {
    let dims = g.dims(like).clone();
    g.emit(
        Op::Pool2d(PoolKind::ArgMax, *window),
        &[x],
        position_type(window),
        dims,
    )
}

pub(super) fn gradient(
    g: &mut dyn GraphBuilder,
    kind: PoolKind,
    window: &Window,
    x: NodeId,
    dy: NodeId,
) -> Gradients {
    let dims = g.dims(x).clone();
    let mut inputs: SmallVec<[NodeId; 2]> = SmallVec::from_iter([dy]);
    if kind == PoolKind::Max {
        inputs.push(positions(g, window, x, dy));
    }
    let dx = g.emit(Op::Pool2dGrad(kind, *window), &inputs, DType::F32, dims);
    SmallVec::from_iter([Some(dx)])
}

/// The gradient of a pooling is linear in dy: for an upstream `d` of the image's shape it gives
/// back the elements that the windows select.
pub(super) fn gradient_of_grad(
    g: &mut dyn GraphBuilder,
    kind: PoolKind,
    window: &Window,
    inputs: &[NodeId],
    d: NodeId,
) -> Gradients {
    let dy = inputs[0];
    let dims = g.dims(dy).clone();
    match kind {
        PoolKind::Max | PoolKind::ArgMax => {
            let picked = pick(g, window, d, inputs[1]);
            SmallVec::from_iter([Some(picked), None])
        }
        PoolKind::Avg { .. } => SmallVec::from_iter([Some(g.emit(
            Op::Pool2d(kind, *window),
            &[d],
            DType::F32,
            dims,
        ))]),
    }
}

/// `d` at the winning position of every window: a gather over the flattened image.
fn pick(g: &mut dyn GraphBuilder, window: &Window, d: NodeId, positions: NodeId) -> NodeId {
    use slabwise_kernels::scalar::ScalarOp;
    let image = g.dims(d).clone();
    let result = g.dims(positions).clone();
    let fixed = |s: Size| s.as_fixed().expect("pooling has fixed height and width");
    let (width, out_h, out_w) = (fixed(image[3]), fixed(result[2]), fixed(result[3]));
    let int = |g: &mut dyn GraphBuilder, n: i64| g.full(n as f32, DType::I32, &result);
    // Row and column of the winner: window origin plus position.
    let position = g.cast(positions, DType::I32);
    let kw = int(g, window.k[1] as i64);
    let row_in = g.scalar(ScalarOp::Div, &[position, kw]);
    let before = g.mul(row_in, kw);
    let col_in = g.scalar(ScalarOp::Sub, &[position, before]);
    let origin = |axis: usize, stride: usize| {
        let mut strides: Dims = SmallVec::from_elem(Size::ZERO, 4);
        strides[axis] = Size::fixed(stride as i64);
        Op::Index(strides)
    };
    let row0 = g.emit(origin(2, window.stride[0]), &[], DType::I32, result.clone());
    let col0 = g.emit(origin(3, window.stride[1]), &[], DType::I32, result.clone());
    let (pad_h, pad_w, w) = (
        int(g, window.pad[0] as i64),
        int(g, window.pad[1] as i64),
        int(g, width),
    );
    let row = g.add(row0, row_in);
    let row = g.scalar(ScalarOp::Sub, &[row, pad_h]);
    let col = g.add(col0, col_in);
    let col = g.scalar(ScalarOp::Sub, &[col, pad_w]);
    let flat = g.mul(row, w);
    let flat = g.add(flat, col);
    let flat = g.reshape(
        flat,
        &Dims::from_slice(&[result[0], result[1], Size::fixed(out_h * out_w)]),
    );
    let source = g.reshape(
        d,
        &Dims::from_slice(&[image[0], image[1], Size::fixed(fixed(image[2]) * width)]),
    );
    let dims = g.dims(flat).clone();
    let picked = g.emit(Op::Gather { axis: 2 }, &[source, flat], DType::F32, dims);
    g.reshape(picked, &result)
}
