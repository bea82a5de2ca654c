//! Loops over all points of a space, independently: without an anchor, or with one that each thread
//! evaluates itself. Neighbours are moved in vectors of 16 bytes where the layout allows.

use std::fmt::Write as _;
use std::sync::Arc;

use slabwise_kernels::size::{Env, Size};
use slabwise_kernels::spec::{Spec, SpecError};

use super::SharedLoop;
use super::params::{Number, Params};
use super::space::{Point, Space, Via, memory_order, pointers, points, touched, vector_width};
use super::{THREADS, transpose};
use crate::abi::{Dispatch, Function, Target};
use crate::code::Code;
use crate::lowered::Lowered;

/// Blocks per multiprocessor: remaining points are processed in further iterations of the loops.
const BLOCKS_EACH: u32 = 16;

/// The most elements of a vector: 16 bytes of a type of one byte.
const VECTOR_MAX: i64 = 16;

/// The number of blocks of `threads` for `items`, no more than are useful.
pub fn blocks(items: i64, threads: u32, target: &Target) -> u32 {
    let most = u64::from(target.multiprocessors.max(1)) * u64::from(BLOCKS_EACH);
    (items.max(0) as u64).div_ceil(u64::from(threads)).min(most) as u32
}

/// An anchor whose value is computed point by point.
pub trait Anchor {
    /// Declares the names that its statements use.
    fn declare(&self, params: &mut Params) -> String;
    /// Statements that declare `acc`, the value at a point, including any side effects there.
    fn at(&self, space: &Space, params: &mut Params, coordinates: &[String]) -> String;
    /// Statements that declare `accs.v[0..width]`, the values of neighbours along the last axis.
    fn vector(
        &self,
        _space: &Space,
        _params: &mut Params,
        _coordinates: &[String],
        _width: i64,
    ) -> String {
        String::new()
    }
    /// The accesses of vectors that it moves, with the bytes of their elements; `None` where points
    /// are processed singly.
    fn moved(&self, _space: &Space) -> Option<Vec<(usize, usize)>> {
        None
    }
}

/// No anchor.
struct NoAnchor;

impl Anchor for NoAnchor {
    fn declare(&self, _: &mut Params) -> String {
        String::new()
    }
    fn at(&self, _: &Space, _: &mut Params, _: &[String]) -> String {
        String::new()
    }
    fn moved(&self, _: &Space) -> Option<Vec<(usize, usize)>> {
        Some(vec![])
    }
}

pub fn lower(spec: &Spec, bounds: &Env, target: &Target) -> Result<Lowered, SpecError> {
    let code = Code::new(spec)?;
    let space = ordered(&code, Space::new(spec), bounds);
    if let Some(across) = transpose::across(&code, &space, bounds) {
        return Ok(transpose::lower(
            &code,
            &space,
            Params::new(spec, bounds, target),
            across,
            target,
        ));
    }
    Ok(pointwise(
        "elementwise",
        &code,
        space,
        &NoAnchor,
        bounds,
        target,
    ))
}

/// A loop as a function that several specs may share.
pub fn lower_shared(spec: &Spec, bounds: &Env, target: &Target) -> Result<SharedLoop, SpecError> {
    let code = Code::new(spec)?;
    let space = ordered(&code, Space::new(spec), bounds);
    let params = Params::new(spec, bounds, target);
    if let Some(across) = transpose::across(&code, &space, bounds) {
        return Ok(transpose::lower_shared(
            &code, &space, params, across, target,
        ));
    }
    let mut params = params.shared();
    let width = width(&code, &space, &NoAnchor);
    let function = all_points(
        "elementwise_many",
        &code,
        &space,
        &NoAnchor,
        &mut params,
        width,
    );
    let target = *target;
    let blocks = move |env: &Env| grid(space.points(env), width, &target);
    Ok(SharedLoop {
        function,
        params,
        threads: THREADS,
        shared_bytes: 0,
        blocks: Box::new(blocks),
    })
}

/// The axes in the order of the first result's memory, merged; at least one.
pub fn ordered(code: &Code, mut space: Space, bounds: &Env) -> Space {
    if let Some(store) = code.spec.stores.first() {
        let strides = &code.spec.operands[usize::from(store.operand)].strides;
        space.permute(&memory_order(strides, 0, strides.len(), bounds));
    }
    if space.merge(0, space.dims.len()) == 0 {
        space.insert(0);
    }
    space
}

/// One kernel over all points of a space.
pub fn pointwise(
    kind: &str,
    code: &Code,
    space: Space,
    anchor: &dyn Anchor,
    bounds: &Env,
    target: &Target,
) -> Lowered {
    let mut params = Params::new(code.spec, bounds, target);
    let width = width(code, &space, anchor);
    let function = all_points(kind, code, &space, anchor, &mut params, width);
    let target = *target;
    Lowered::new(vec![function], 0, move |env| {
        vec![launch(0, space.points(env), width, &params, env, &target)]
    })
}

/// The launch of a pointwise kernel.
pub fn launch(
    function: usize,
    count: i64,
    width: i64,
    params: &Params,
    env: &Env,
    target: &Target,
) -> Dispatch {
    let blocks = grid(count, width, target);
    Dispatch::new(function, blocks, THREADS, params.words(env))
}

/// The number of blocks for so many points.
fn grid(count: i64, width: i64, target: &Target) -> u32 {
    // The first threads process the remainder.
    let items = if width > 1 {
        (count / width).max(i64::from(count > 0))
    } else {
        count
    };
    blocks(items, THREADS, target)
}

/// The number of neighbours along the last axis that a thread processes.
pub fn width(code: &Code, space: &Space, anchor: &dyn Anchor) -> i64 {
    let last = space.dims.len() - 1;
    if code
        .spec
        .stores
        .iter()
        .any(|s| !space.stride(s.operand, last).is(1))
    {
        return 1;
    }
    let Some(mut used) = anchor.moved(space) else {
        return 1;
    };
    used.extend(touched(code));
    let rows_end_partial = last == 0 || ends_partial(space.dims[last]);
    vector_width(space, &used, last, rows_end_partial)
}

/// Whether the last vector of a row of this length may be shorter than the others: the length is
/// known, and the row has several whole vectors of any width.
fn ends_partial(length: Size) -> bool {
    length.as_fixed().is_some_and(|n| n >= 4 * VECTOR_MAX)
}

/// The kernel.
pub fn all_points(
    kind: &str,
    code: &Code,
    space: &Space,
    anchor: &dyn Anchor,
    params: &mut Params,
    width: i64,
) -> Function {
    let last = space.dims.len() - 1;
    let mut body = pointers(code, params);
    body += &anchor.declare(params);
    // Rows whose last vector is shorter are counted in vectors.
    let in_vectors = (space.dims[last].as_fixed())
        .filter(|n| last > 0 && n % width != 0)
        .map(|n| {
            let mut dims = space.dims.clone();
            dims[last] = Size::fixed((n + width - 1) / width);
            dims
        });
    // The number of points is a word, so that arrays of different lengths share a function.
    let all = in_vectors.clone().unwrap_or_else(|| space.dims.clone());
    let count: Number = Arc::new(move |env| points(&all, env));
    let _ = writeln!(body, "const idx count = {};", params.number(&count));
    let _ = writeln!(
        body,
        "const idx thread = idx(blockIdx.x) * {THREADS} + threadIdx.x, threads = idx(gridDim.x) * {THREADS};"
    );
    let single = |params: &mut Params| {
        let (text, coordinates) = params.coordinates("i", &space.dims, "c");
        let value = anchor.at(space, params, &coordinates);
        let point = Point::new(space, params, &coordinates, "acc");
        format!("{text}{value}{}", code.point(&point))
    };
    if width == 1 {
        let _ = writeln!(
            body,
            "for (idx i = thread; i < count; i += threads) {{\n{}}}",
            single(params)
        );
        return params.function(kind, THREADS, &body);
    }
    let (mut text, mut coordinates);
    let vectors = match &in_vectors {
        Some(dims) => {
            (text, coordinates) = params.coordinates("i", dims, "c");
            text += &format!("const idx first = c{last} * {width};\n");
            coordinates[last] = "first".into();
            "count".to_string()
        }
        None => {
            (text, coordinates) = params.coordinates("first", &space.dims, "c");
            text = format!("const idx first = i * {width};\n{text}");
            format!("count / {width}")
        }
    };
    let ahead = Point::new(space, params, &coordinates, "");
    let moved = |k: u16| space.stride(k, last).is(1);
    let vector = |k: u16| format!("Vec<{}, {width}>", code.storage(k).ty);
    let _ = writeln!(
        body,
        "for (idx i = thread; i < {vectors}; i += threads) {{\n{text}"
    );
    if in_vectors.is_some() {
        let mut each = coordinates.clone();
        each[last] = "c".into();
        let value = anchor.at(space, params, &each);
        let point = Point::new(space, params, &each, "acc");
        let length = params.size(space.dims[last]);
        let _ = writeln!(
            body,
            "if (first + {width} > {length}) {{\nfor (idx c = first; c < {length}; ++c) {{\n{value}{}}}\ncontinue;\n}}",
            code.point(&point)
        );
    }
    body += &anchor.vector(space, params, &coordinates, width);
    for k in code.loads().into_iter().filter(|&k| moved(k)) {
        let _ = writeln!(
            body,
            "const {0} x{k} = load_vec<{0}>(a{k} + ({1}));",
            vector(k),
            ahead.element(k)
        );
    }
    for store in &code.spec.stores {
        let _ = writeln!(body, "{} y{};", vector(store.operand), store.operand);
    }
    coordinates[last] = format!("({} + u)", coordinates[last]);
    let site = Via {
        point: Point::new(space, params, &coordinates, "accs.v[u]"),
        read: &|k| moved(k).then(|| format!("x{k}.v[u]")),
        write: &|k| Some(format!("y{k}.v[u]")),
    };
    let _ = writeln!(
        body,
        "#pragma unroll\nfor (int u = 0; u < {width}; ++u) {{\n{}}}",
        code.point(&site)
    );
    for store in &code.spec.stores {
        let _ = writeln!(
            body,
            "store_vec(a{0} + ({1}), y{0});",
            store.operand,
            ahead.element(store.operand)
        );
    }
    body += "}\n";
    // Even where this length leaves no remainder, because another length that shares the function
    // may.
    if last == 0 {
        let _ = writeln!(
            body,
            "for (idx i = count / {width} * {width} + thread; i < count; i += threads) {{\n{}}}",
            single(params)
        );
    }
    params.function(kind, THREADS, &body)
}
