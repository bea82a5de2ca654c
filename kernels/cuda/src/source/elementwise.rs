//! Loops that reduce nothing: each point on its own, in vectors of 16 bytes where memory allows, through tiles in shared
//! memory where an operand lies across the others.

use std::fmt::Write as _;

use slabwise_kernels::cpu::SpecError;
use slabwise_kernels::size::{Env, Size};
use slabwise_kernels::spec::Spec;

use super::THREADS;
use super::params::{Number, Params};
use super::space::{Point, Space, memory_order, pointers};
use crate::code::{Code, Site};
use crate::lower::{Dispatch, Function, Lowered, Target};

/// Blocks for each multiprocessor: what is left is done in further turns of the loops.
const BLOCKS_EACH: u32 = 16;

/// Blocks that `items` threads fill, no more than are useful.
pub(crate) fn blocks(items: i64, threads: u32, target: &Target) -> u32 {
    let most = u64::from(target.multiprocessors.max(1)) * u64::from(BLOCKS_EACH);
    (items.max(0) as u64).div_ceil(u64::from(threads)).min(most) as u32
}

pub fn lower(spec: &Spec, bounds: &Env, target: &Target) -> Result<Lowered, SpecError> {
    let code = Code::new(spec)?;
    if spec.stores.is_empty() {
        return Ok(Lowered::new(vec![], 0, |_| vec![]));
    }
    let mut space = Space::new(spec);
    let stored = usize::from(spec.stores[0].operand);
    space.permute(&memory_order(&spec.operands[stored].strides, 0, spec.dims.len(), bounds));
    space.merge(0, space.dims.len());
    if space.dims.is_empty() {
        space.dims.push(Size::ONE);
        space.walks.iter_mut().for_each(|(_, strides)| strides.push(Size::ZERO));
    }
    let mut params = Params::new(spec, bounds, target);
    let width = width(&code, &space);
    let (function, vectors) = flat(&code, &space, &mut params, width);
    let target = *target;
    Ok(Lowered::new(vec![function], 0, move |env| {
        let items = space.points(env);
        // A tail is left to the first threads.
        let items = if vectors > 1 { (items / vectors).max(i64::from(items > 0)) } else { items };
        let grid = [blocks(items, THREADS, &target), 1, 1];
        vec![Dispatch { function: 0, grid, block: [THREADS, 1, 1], shared_bytes: 0, words: params.words(env) }]
    }))
}

/// How many neighbours along the last axis a thread takes: vectors of 16 bytes of the widest type, if every operand's elements
/// lie so that they can be moved.
fn width(code: &Code, space: &Space) -> i64 {
    let last = space.dims.len() - 1;
    let used: Vec<u16> = code.loads().into_iter().chain(code.spec.stores.iter().map(|s| s.operand)).collect();
    let along = |k: &u16| space.stride(*k, last);
    let stores_apart = code.spec.stores.iter().any(|s| !along(&s.operand).is(1));
    if stores_apart || used.iter().any(|k| !along(k).is(0) && !along(k).is(1)) {
        return 1;
    }
    let moved: Vec<u16> = used.into_iter().filter(|k| along(k).is(1)).collect();
    let Some(widest) = moved.iter().map(|&k| code.spec.operands[usize::from(k)].dtype.bytes()).max() else { return 1 };
    let mut width = 16 / widest as i64;
    let fits = |width: i64| {
        let whole = |size: Size| size.checked_div(width).is_some();
        let walks = || moved.iter().map(|&k| &space.walks[usize::from(k)]);
        (last == 0 || whole(space.dims[last]))
            && walks().all(|(offset, strides)| whole(*offset) && strides[..last].iter().all(|s| whole(*s)))
    };
    while width > 1 && !fits(width) {
        width /= 2;
    }
    width
}

/// A point among `width` neighbours whose elements are moved together.
struct InVector<'a> {
    point: Point,
    moved: &'a dyn Fn(u16) -> bool,
}

impl Site for InVector<'_> {
    fn read(&self, k: u16) -> String {
        if (self.moved)(k) { format!("x{k}.v[u]") } else { self.point.read(k) }
    }
    fn write(&self, k: u16) -> String {
        format!("y{k}.v[u]")
    }
    fn state(&self, k: u16) -> String {
        self.point.state(k)
    }
    fn index(&self, k: u16) -> String {
        self.point.index(k)
    }
}

/// One loop over all points. Returns how many of them a turn takes.
fn flat(code: &Code, space: &Space, params: &mut Params, width: i64) -> (Function, i64) {
    let last = space.dims.len() - 1;
    let mut body = pointers(code, params);
    // The number of points is a word, so that arrays of different lengths share a function.
    let all = space.clone();
    let count: Number = std::sync::Arc::new(move |env| all.points(env));
    let _ = writeln!(body, "const idx count = {};", params.number(&count));
    let _ = writeln!(body, "const idx thread = idx(blockIdx.x) * {THREADS} + threadIdx.x, threads = idx(gridDim.x) * {THREADS};");
    if width == 1 {
        let (text, coordinates) = params.coordinates("i", &space.dims, "c");
        let point = Point::new(space, params, &coordinates, "");
        let _ = writeln!(body, "for (idx i = thread; i < count; i += threads) {{\n{text}{}}}", code.point(&point));
        return (params.function("elementwise", THREADS, &body), 1);
    }
    let (text, mut coordinates) = params.coordinates("first", &space.dims, "c");
    let start = Point::new(space, params, &coordinates, "");
    let moved = |k: u16| space.stride(k, last).is(1);
    let loads: Vec<u16> = code.loads().into_iter().filter(|&k| moved(k)).collect();
    let vector = |k: u16| format!("Vec<{}, {width}>", code.storage(k).ty);
    let _ = writeln!(body, "for (idx i = thread; i < count / {width}; i += threads) {{\nconst idx first = i * {width};\n{text}");
    for &k in &loads {
        let _ = writeln!(body, "const {0} x{k} = load_vec<{0}>(a{k} + {1});", vector(k), start.element(k));
    }
    for store in &code.spec.stores {
        let _ = writeln!(body, "{} y{};", vector(store.operand), store.operand);
    }
    coordinates[last] = format!("({} + u)", coordinates[last]);
    let site = InVector { point: Point::new(space, params, &coordinates, ""), moved: &moved };
    let _ = writeln!(body, "#pragma unroll\nfor (int u = 0; u < {width}; ++u) {{\n{}}}", code.point(&site));
    for store in &code.spec.stores {
        let _ = writeln!(body, "store_vec(a{0} + {1}, y{0});", store.operand, start.element(store.operand));
    }
    body += "}\n";
    if last == 0 && space.dims[0].checked_div(width).is_none() {
        let (text, coordinates) = params.coordinates("i", &space.dims, "c");
        let point = Point::new(space, params, &coordinates, "");
        let _ =
            writeln!(body, "for (idx i = count / {width} * {width} + thread; i < count; i += threads) {{\n{text}{}}}", code.point(&point));
    }
    (params.function("elementwise", THREADS, &body), width)
}
