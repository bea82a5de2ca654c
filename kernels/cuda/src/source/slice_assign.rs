//! A tensor with a part of it replaced: a kernel that copies the tensor, which does nothing where
//! the result is its memory already, and one that writes the part.

use std::fmt::Write as _;
use std::sync::Arc;

use slabwise_kernels::size::{Env, Size};
use slabwise_kernels::spec::{SliceAssign, Spec, SpecError};

use super::THREADS;
use super::elementwise::blocks;
use super::params::{Number, Params};
use super::space::Space;
use crate::abi::{Dispatch, Target};
use crate::code::Storage;
use crate::lowered::Lowered;

/// The loop over the points of a space, each the one with the number `i`.
fn each_point(
    space: &Space,
    params: &mut Params,
    body: impl FnOnce(&mut Params, &[String]) -> String,
) -> String {
    let all = space.clone();
    let count: Number = Arc::new(move |env| all.points(env));
    let mut text = format!(
        "const idx count = {}, threads = idx(gridDim.x) * {THREADS};\n",
        params.number(&count)
    );
    let _ = writeln!(
        text,
        "for (idx i = idx(blockIdx.x) * {THREADS} + threadIdx.x; i < count; i += threads) {{"
    );
    let (coordinates, names) = params.coordinates("i", &space.dims, "c");
    text += &coordinates;
    text += &body(params, &names);
    text + "}\n"
}

/// A space merged to at least one axis.
fn merged(mut space: Space) -> Space {
    if space.merge(0, space.dims.len()) == 0 {
        space.insert(0);
    }
    space
}

pub fn lower(
    spec: &Spec,
    assign: &SliceAssign,
    bounds: &Env,
    target: &Target,
) -> Result<Lowered, SpecError> {
    let rank = spec.dims.len();
    let ty = Storage::of(assign.result.dtype).ty;
    let mut write = Params::new(spec, bounds, target);
    let mut copy = write.clone();
    let value = usize::from(assign.base.is_some());
    let result = value + 1 + usize::from(assign.place.is_some());
    let mut functions = Vec::new();
    let whole = assign.base.as_ref().map(|base| {
        let mut space = Space::over(&spec.dims);
        let from = space.push(base.offset, &base.strides);
        let to = space.push(assign.result.offset, &assign.result.strides);
        let space = merged(space);
        let mut body = copy.pointer("source", &format!("const {ty}"), 0)
            + &copy.pointer("result", ty, result)
            + "if (source == result) return;\n";
        body += &each_point(&space, &mut copy, |params, at| {
            let (from, to) = (space.place(params, from, at), space.place(params, to, at));
            format!("result[{to}] = source[{from}];\n")
        });
        functions.push(copy.function("slice_copy", THREADS, &body));
        space
    });
    let mut space = Space::over(&assign.space);
    let own = space.push(assign.value.offset, &assign.value.strides);
    let strides: Option<Vec<Size>> = (0..rank)
        .map(|a| assign.result.strides[a].checked_mul(Size::from(assign.step[a])))
        .collect();
    let strides = strides
        .ok_or_else(|| SpecError::unsupported("a stride of a part has no form as a size"))?;
    let to = space.push(Size::ZERO, &strides);
    let place = assign.place.as_ref();
    let at_place = place.map(|(_, at)| space.push(at.offset, &at.strides));
    let space = merged(space);
    // Starts are sums of products, which need not have a form as a size.
    let (start, along, offset) = (
        assign.start.clone(),
        assign.result.strides.clone(),
        assign.result.offset,
    );
    let first: Number = Arc::new(move |env| {
        let parts = start.iter().zip(&along).map(|(s, d)| s.at(env) * d.at(env));
        parts.sum::<i64>() + offset.at(env)
    });
    // How far the part may be moved, so that it stays in its axis.
    let room: Option<Number> = place.map(|&(axis, _)| -> Number {
        let (len, count) = (spec.dims[axis], assign.space[axis]);
        let (start, step) = (assign.start[axis], i64::from(assign.step[axis]));
        Arc::new(move |env| len.at(env) - 1 - (count.at(env) - 1) * step - start.at(env))
    });
    let mut body = write.pointer("values", &format!("const {ty}"), value)
        + &write.pointer("result", ty, result);
    if at_place.is_some() {
        body += &write.pointer("places", "const int", value + 1);
    }
    let _ = writeln!(body, "const idx first = {};", write.number(&first));
    if let Some(room) = &room {
        let _ = writeln!(body, "const idx room = {};", write.number(room));
    }
    body += &each_point(&space, &mut write, |params, at| {
        let moved = match (place, at_place) {
            (Some((axis, _)), Some(access)) => {
                let place = space.place(params, access, at);
                let stride = params.size(assign.result.strides[*axis]);
                format!(" + max(idx(0), min(idx(places[{place}]), room)) * {stride}")
            }
            _ => String::new(),
        };
        let (from, to) = (space.place(params, own, at), space.place(params, to, at));
        format!("result[first + {to}{moved}] = values[{from}];\n")
    });
    functions.push(write.function("slice_write", THREADS, &body));
    let target = *target;
    Ok(Lowered::new(functions, 0, move |env| {
        let mut launches = Vec::new();
        if let Some(whole) = &whole {
            let blocks = blocks(whole.points(env), THREADS, &target);
            launches.push(Dispatch::new(0, blocks, THREADS, copy.words(env)));
        }
        let fits = room.as_ref().is_none_or(|room| room(env) >= 0);
        let points = if fits { space.points(env) } else { 0 };
        launches.push(Dispatch::new(
            usize::from(whole.is_some()) as _,
            blocks(points, THREADS, &target),
            THREADS,
            write.words(env),
        ));
        launches
    }))
}
