//! The source of a product's kernels, and the parameter words of their launches.

use std::sync::Arc;

use slabwise_kernels::size::{Env, Size};
use slabwise_kernels::spec::{Body, Quantization, Spec, SpecError};

use super::plan::{ALONE, GROUP, Method, Plan, SumOrder};
use super::problem::{Count, Matrix, Problem, Reach, StridedAxes, View, greatest_common_divisor};
use super::quantized;
use super::tiles::{Elem, Kernel};
use super::totals::{self, Shared, Totals};
use crate::abi::{Dispatch, Function, Target, Word};
use crate::code::Code;
use crate::lowered::Lowered;
use crate::source::THREADS;
use crate::source::params::{Number, Params};
use crate::source::space::pointers;

/// Multiplier and shift by which `quotient` in `sides.cuh` divides by `d` (Granlund and Montgomery,
/// *Division by Invariant Integers using Multiplication*, 1994): for numerators below 2³¹, ⌊2³¹⁺ˢ /
/// d⌋ + 1 and s = ⌈log₂ d⌉.
pub fn divisor(d: i64) -> i64 {
    let d = d.max(1) as u64;
    let shift = d.next_power_of_two().trailing_zeros();
    (((1u64 << (31 + shift)) / d + 1) | (u64::from(shift) << 32)) as i64
}

pub(super) fn number(f: impl Fn(&Env) -> i64 + Send + Sync + 'static) -> Number {
    Arc::new(f)
}

pub(super) fn sized(size: Size) -> Number {
    number(move |env| size.at(env))
}

/// The source of a product under construction.
pub(super) struct Writer<'a> {
    pub(super) spec: &'a Spec,
    pub(super) problem: &'a Problem,
    pub(super) params: Params,
}

impl Writer<'_> {
    /// The type of a side; appends its words.
    fn side(&mut self, axes: &StridedAxes, reach: Option<Reach>) -> String {
        let single = vec![(Count::fixed(1), Size::ZERO)];
        let axes = if axes.is_empty() { &single } else { axes };
        let mut words: Vec<Number> = axes.iter().map(|&(_, stride)| sized(stride)).collect();
        for &(count, _) in &axes[1..] {
            words.push(number(move |env| count.at(env)));
            words.push(number(move |env| divisor(count.at(env))));
        }
        if let Some(Reach { from, step, .. }) = reach {
            words.extend([from[0], step[0], from[1], step[1]].map(|n| number(move |_| n)));
        }
        let at = self.params.block(words);
        let rows = reach.map_or("NO_WINDOW".into(), |reach| reach.axis.to_string());
        format!("Side<idx, {at}, {}, {rows}>", axes.len())
    }

    /// Declares the type `name` of an operand.
    fn matrix(
        &mut self,
        name: &str,
        matrix: &Matrix,
        elem: Elem,
        view: &View,
        vector: i64,
        taps: [i64; 2],
    ) -> String {
        let address = self.params.word(Word::Argument(matrix.argument));
        let (lies, whole) = (view.clone(), view.clone());
        let mut words = vec![
            number(move |env| lies.offset(env)),
            number(move |env| i64::from(whole.is_whole(vector, env))),
        ];
        if let Some(window) = view.window {
            words.extend(window.limits.map(sized));
        }
        let at = self.params.block(words);
        let batch = self.side(&view.batch, None);
        let [free, deep] = view.reaches();
        let free = self.side(&view.free, free);
        let deep = self.side(&view.deep, deep);
        let (elem, window) = (elem.name(), view.window.is_some());
        let whole = view.is_known(vector) && view.is_whole(vector, &Env::default());
        let partial = view.ends_partial(vector);
        let [high, wide] = taps;
        let (stride, [down, over]) = match taps {
            [0, 0] => (0, [0; 2]),
            _ => (known_stride(view).unwrap_or(0), view.spans(taps)),
        };
        format!(
            "using {name} = Matrix<{elem}, idx, {address}, {at}, {batch}, {free}, {deep}, {window}, {whole}, {partial}, {high}, {wide}, {down}, {over}, {stride}>;\n"
        )
    }
}

/// The launch of a kernel for the sizes of a run.
pub type Launch = Box<dyn Fn(&Env) -> Dispatch + Send + Sync>;

/// A kernel of a product, ready to launch.
pub struct Launchable {
    /// The kernel.
    pub function: Function,
    /// The parameters of its launch for the sizes of a run; `function` is 0.
    pub dispatch: Launch,
}

/// Threads of a block, and bytes of its dynamic shared memory.
struct Shape {
    block: i64,
    shared_bytes: i64,
}

fn launchable(
    function: Function,
    params: Params,
    shape: Shape,
    blocks: impl Fn(&Env) -> i64 + Send + Sync + 'static,
) -> Launchable {
    let dispatch = move |env: &Env| Dispatch {
        function: 0,
        // Sizes at the bounds were validated; a run without points has no blocks.
        grid: [u32::try_from(blocks(env).max(0)).unwrap_or(u32::MAX), 1, 1],
        block: [shape.block as u32, 1, 1],
        shared_bytes: shape.shared_bytes as u32,
        words: params.words(env),
    };
    Launchable {
        function,
        dispatch: Box::new(dispatch),
    }
}

/// How the contracted axis of a run is split: the length of a part and the number of parts.
fn cut(deep: i64, parts: i64, multiple: i64) -> (i64, i64) {
    let even = (deep.max(1) + parts - 1) / parts;
    let length = (even + multiple - 1) / multiple * multiple;
    (length, ((deep + length - 1) / length).max(1))
}

/// The tiles of a product, over all batches, and the parts of each.
fn blocks(problem: &Problem, plan: &Plan, env: &Env) -> [i64; 2] {
    let [rows, columns, length, products] = problem.sizes(env);
    let [high, wide] = plan.kernel.tile();
    let tiles = ((rows + high - 1) / high).saturating_mul((columns + wide - 1) / wide);
    let parts = cut(length, plan.parts, plan.kernel.deep()).1;
    [tiles.saturating_mul(products).max(0), parts]
}

/// The order in which a product computes its sums by a plan for operands with these views.
pub fn sum_order(problem: &Problem, plan: &Plan, views: &[View; 2], bounds: &Env) -> SumOrder {
    let (deep, known) = (problem.sizes(bounds)[2], problem.deep.iter());
    let unit = plan.kernel.deep();
    let part = (plan.parts > 1).then(|| {
        let known = known.clone().all(|count| count.known().is_some());
        // The parts of a length that a run decides follow from their granularity.
        (
            plan.parts,
            if known {
                cut(deep, plan.parts, unit).0
            } else {
                unit
            },
        )
    });
    let method = match plan.kernel {
        Kernel::Registers(_) => Method::Registers,
        Kernel::Tensor(..) => Method::Tensor,
        Kernel::Dots { transposed, .. } => {
            Method::Dots(run_length(&views[usize::from(!transposed)]))
        }
        Kernel::Columns { .. } => Method::Columns,
        Kernel::Quantized { format, .. } => Method::Quantized(format.bits),
        Kernel::Window { .. } => Method::Window,
    };
    SumOrder { method, part }
}

/// Contracted elements of an operand that a lane of [`Kernel::Dots`] reads at once; one inside a
/// window.
fn run_length(view: &View) -> i64 {
    let is_run = view.by_deep && view.window.is_none();
    if is_run { view.vector } else { 1 }
}

/// The workspace for the partial sums of a product, bytes, and the number of its counters.
pub fn shared_between_parts(problem: &Problem, plan: &Plan, bounds: &Env) -> (u64, usize) {
    plan.shared_between_parts(blocks(problem, plan, bounds)[0] as u64)
}

/// The workspace that a product needs, bytes, and the number of its counters: those of its parts,
/// then those of its totals.
pub fn shared_between_all(
    spec: &Spec,
    problem: &Problem,
    plan: &Plan,
    bounds: &Env,
) -> (u64, usize) {
    let (sums, counters) = shared_between_parts(problem, plan, bounds);
    with_totals(spec, problem, plan.kernel.tile(), (sums, counters), bounds)
}

/// A workspace of so many bytes, and so many counters, with those of totals in tiles after them.
fn with_totals(
    spec: &Spec,
    problem: &Problem,
    tile: [i64; 2],
    (workspace, counters): (u64, usize),
    bounds: &Env,
) -> (u64, usize) {
    let [rows, columns, ..] = problem.sizes(bounds);
    match totals::shared_between_blocks(spec, tile, [rows, columns]) {
        (0, 0) => (workspace, counters),
        (bytes, more) => {
            let Shared { partial, counters } = Shared::behind(workspace, counters);
            (partial + bytes, counters + more)
        }
    }
}

/// The launch of a product by a plan, or, of one that sums nothing, of its epilogue alone.
pub fn product(
    spec: &Spec,
    problem: &Problem,
    plan: &Plan,
    bounds: &Env,
    target: &Target,
) -> Result<Launchable, SpecError> {
    if sums_nothing(problem, bounds) {
        return epilogue_alone(spec, problem, bounds, target, None);
    }
    let code = Code::new(spec)?;
    let kernel = plan.kernel;
    let params = Params::new(spec, bounds, target);
    let mut writer = Writer {
        spec,
        problem,
        params,
    };
    let (plan_parts, deep) = (plan.parts, kernel.deep());
    let sized_problem = Arc::new(problem.clone());
    let of = |f: fn([i64; 4]) -> i64| {
        let problem = sized_problem.clone();
        number(move |env| f(problem.sizes(env)))
    };
    let apart = matches!(kernel, Kernel::Window { .. });
    let elems = Elem::of_both(spec, problem)?;
    let views = views(problem, elems, apart, bounds);
    let cut_at = |i: usize| {
        let problem = sized_problem.clone();
        number(move |env| <[i64; 2]>::from(cut(problem.sizes(env)[2], plan_parts, deep))[i])
    };
    let share = writer.params.block([
        of(|s| s[0]),
        of(|s| s[1]),
        of(|s| s[2]),
        of(|s| s[3]),
        cut_at(0),
        cut_at(1),
    ]);
    let mut body = String::new();
    let sides = [("Left", &problem.left), ("Right", &problem.right)];
    for (i, (name, matrix)) in sides.into_iter().enumerate() {
        let vector = match kernel {
            Kernel::Columns { each, .. } => each,
            Kernel::Quantized { .. } => quantized::VECTOR,
            _ => views[i].vector,
        };
        let taps = located(&kernel, &views[i]).unwrap_or_default();
        body += &writer.matrix(name, matrix, elems[i], &views[i], vector, taps);
    }
    if let Body::QuantizedMatmul(quantized) = &spec.body {
        body += &writer.blocks(quantized);
    }
    let [high, wide] = kernel.tile();
    body += &format!("const Share<{share}, {high}, {wide}> share(p.w);\n");
    body += "const int batch = share.batch;\nconst Left left(p.w, batch);\nconst Right right(p.w, batch);\n";
    body += &if plan.parts > 1 {
        let sums = writer.params.word(Word::Workspace(0));
        let counters = writer.params.word(Word::Counters(0));
        format!(
            "const Parts<{}, {}, {sums}, {counters}, {}, {ALONE}, {GROUP}> parts(p.w);\n",
            kernel.threads(),
            kernel.partial_sums(),
            share + 5
        )
    } else {
        "const Whole parts;\n".into()
    };
    body += &pointers(&code, &mut writer.params);
    let totals = Totals::of(&code)?;
    body += &writer.epilogue_ahead(&code, totals.as_ref());
    body += &multiply(spec, &kernel, &views, elems);
    if totals.is_some() {
        let tile = [kernel.threads(), kernel.tile()[0], kernel.tile()[1]];
        let (sums, counters) = shared_between_parts(problem, plan, bounds);
        let shared = Shared::behind(sums, counters);
        body += &Totals::finish(&mut writer, tile, shared);
    }
    let held = match plan.parts {
        1 => kernel.blocks(),
        _ => kernel.blocks_if_split(),
    };
    let bounds_text = format!("{}, {held}", kernel.threads());
    let function = writer.params.function(&kernel.name(), bounds_text, &body);
    let plan = *plan;
    let blocks = move |env: &Env| {
        let [tiles, parts] = blocks(&sized_problem, &plan, env);
        tiles.saturating_mul(parts)
    };
    if blocks(bounds) > i64::from(i32::MAX) {
        return Err(SpecError::unsupported(format!(
            "a product of {:?} in {} blocks",
            problem.sizes(bounds),
            blocks(bounds)
        )));
    }
    let shape = Shape {
        block: kernel.threads(),
        shared_bytes: kernel.shared_bytes() + table_bytes(&kernel, &views, writer.params.is_wide()),
    };
    Ok(launchable(function, writer.params, shape, blocks))
}

/// Height and width of the window by which a kernel locates an operand in a table.
fn located(kernel: &Kernel, view: &View) -> Option<[i64; 2]> {
    view.taps.filter(|_| matches!(kernel, Kernel::Tensor(..)))
}

/// The distance of neighbours along the free side, where an operand without a window needs no table
/// because of it: that of a weight's channels, which is the number of elements of the kernel. A
/// single element has no neighbours, at any distance.
fn known_stride(view: &View) -> Option<i64> {
    let stride = match view.free[..] {
        [] => 1,
        [(_, stride)] => stride.as_fixed()?,
        _ => return None,
    };
    let known = view.window.is_none() && view.by_deep;
    (known && (1..=64).contains(&stride)).then_some(stride)
}

/// Bytes of shared memory of the tables that locate both operands: `SHARED_BYTES` in `located.cuh`.
fn table_bytes(kernel: &Kernel, views: &[View; 2], is_wide: bool) -> i64 {
    let entry = if is_wide { 8 } else { 4 };
    let deep = kernel.deep();
    let bytes = |(view, free): (&View, i64)| {
        let Some(taps) = located(kernel, view) else {
            return 0;
        };
        if !view.by_deep {
            let taps = taps[0] * taps[1];
            return entry * (taps / greatest_common_divisor(taps, deep) * deep);
        }
        let offsets = if known_stride(view).is_some() {
            0
        } else {
            free
        };
        let parts: i64 = view.spans(taps).iter().map(|span| 2 * span + 3).sum();
        let rows = view.window.map_or(0, |_| (kernel.threads() / deep).max(1));
        entry * offsets + 4 * rows * parts
    };
    views.iter().zip(kernel.tile()).map(bytes).sum()
}

/// Bytes of shared memory of a block of a kernel for a problem.
pub fn shared_bytes(
    kernel: &Kernel,
    spec: &Spec,
    problem: &Problem,
    bounds: &Env,
    target: &Target,
) -> Result<i64, SpecError> {
    let elems = Elem::of_both(spec, problem)?;
    let views = views(problem, elems, false, bounds);
    let is_wide = Params::new(spec, bounds, target).is_wide();
    Ok(kernel.shared_bytes() + table_bytes(kernel, &views, is_wide))
}

/// Whether the contracted side has no elements, as for pixels that no element of a strided window
/// meets, and the points are few enough for a thread each.
pub fn sums_nothing(problem: &Problem, bounds: &Env) -> bool {
    let [rows, columns, _, products] = problem.sizes(bounds);
    let points = rows.saturating_mul(columns).saturating_mul(products);
    problem.deep.iter().any(|n| n.known() == Some(0))
        && points <= i64::from(i32::MAX) - i64::from(THREADS)
}

/// The kernel of an epilogue, a thread per point: of the sums that a library left in the workspace,
/// one matrix of f32 after the other for each of the parts, which it adds in their order; or, without
/// parts, of zeros.
fn epilogue_alone(
    spec: &Spec,
    problem: &Problem,
    bounds: &Env,
    target: &Target,
    parts: Option<Number>,
) -> Result<Launchable, SpecError> {
    let code = Code::new(spec)?;
    let mut writer = Writer {
        spec,
        problem,
        params: Params::new(spec, bounds, target),
    };
    let sized_problem = Arc::new(problem.clone());
    let of = |f: fn([i64; 4]) -> i64| {
        let problem = sized_problem.clone();
        number(move |env| f(problem.sizes(env)))
    };
    let column_divisor = of(|s| divisor(s[1]));
    let row_divisor = of(|s| divisor(s[0]));
    let words = writer.params.block([
        of(|s| s[0]),
        of(|s| s[1]),
        of(|s| s[3]),
        row_divisor,
        column_divisor,
    ]);
    let w = |i: usize| format!("p.w[{}]", words + i);
    let (name, sum) = match parts {
        Some(parts) => {
            let partial = writer.params.address(Word::Workspace(0));
            let parts = writer.params.number(&parts);
            let sum = format!(
                "sum_of_parts(reinterpret_cast<const float*>({partial}), at, total, int({parts}))"
            );
            ("gemm_parts", sum)
        }
        None => ("gemm_zeros", "0.0f".into()),
    };
    let mut body = format!(
        "const int total = int({}) * int({}) * int({});\n",
        w(0),
        w(1),
        w(2)
    );
    body += &format!(
        "const int at = int(blockIdx.x) * {THREADS} + int(threadIdx.x);\nif (at >= total) return;\n"
    );
    body += &format!("const float sum = {sum};\n");
    body += &format!(
        "const int line = quotient(at, {0}), column = at - line * int({1});\n\
         const int batch = quotient(line, {2}), row = line - batch * int({3});\n",
        w(4),
        w(1),
        w(3),
        w(0)
    );
    body += &pointers(&code, &mut writer.params);
    body += &writer.epilogue(&code);
    let function = writer.params.function(name, THREADS, &body);
    let blocks = move |env: &Env| {
        let [rows, columns, _, products] = sized_problem.sizes(env);
        (rows * columns * products + i64::from(THREADS) - 1) / i64::from(THREADS)
    };
    Ok(launchable(
        function,
        writer.params,
        Shape {
            block: i64::from(THREADS),
            shared_bytes: 0,
        },
        blocks,
    ))
}

/// The epilogue kernel for sums that a library left at the start of a workspace of so many bytes, see
/// [`epilogue_alone`].
pub fn library_epilogue(
    spec: &Spec,
    problem: &Problem,
    bounds: &Env,
    target: &Target,
    parts: Number,
    workspace: u64,
) -> Result<Lowered, SpecError> {
    let Launchable { function, dispatch } = match spec.reduced {
        0 => epilogue_alone(spec, problem, bounds, target, Some(parts))?,
        _ => epilogue_in_tiles(spec, problem, bounds, target, parts, workspace)?,
    };
    let shared = with_totals(spec, problem, EPILOGUE_TILE, (workspace, 0), bounds);
    let lowered = Lowered::new(vec![function], shared.0, move |env| vec![dispatch(env)]);
    Ok(lowered.with_counters(shared.1))
}

/// Rows and columns of the tiles of [`epilogue_in_tiles`].
const EPILOGUE_TILE: [i64; 2] = [64, 64];

/// The same with totals, whose blocks have a tile of the sums each.
fn epilogue_in_tiles(
    spec: &Spec,
    problem: &Problem,
    bounds: &Env,
    target: &Target,
    parts: Number,
    workspace: u64,
) -> Result<Launchable, SpecError> {
    totals::check(spec, std::slice::from_ref(problem))?;
    let code = Code::new(spec)?;
    let totals = Totals::of(&code)?.ok_or_else(|| SpecError::unsupported("no sums"))?;
    let mut writer = Writer {
        spec,
        problem,
        params: Params::new(spec, bounds, target),
    };
    let sized_problem = Arc::new(problem.clone());
    let of = |i: usize| {
        let problem = sized_problem.clone();
        number(move |env| problem.sizes(env)[i])
    };
    let fixed = |n: i64| number(move |_| n);
    // One product of one part without a contracted axis.
    let share = [of(0), of(1), fixed(0), fixed(1), fixed(0), fixed(1)];
    let share = writer.params.block(share);
    let partial = writer.params.address(Word::Workspace(0));
    let parts = writer.params.number(&parts);
    let [high, wide] = EPILOGUE_TILE;
    let mut body = format!(
        "const Share<{share}, {high}, {wide}> share(p.w);\nconst int batch = 0;\n\
         const int total = share.rows * share.columns;\n"
    );
    body += &pointers(&code, &mut writer.params);
    body += &writer.epilogue_ahead(&code, Some(&totals));
    body += &format!(
        "SHARED_BYTES(float, shared);\n\
         struct Held {{\nenum {{ COUNT = Loaded::COUNT + 1 }};\nLoaded loaded;\nfloat sum;\n}};\n\
         give_slice<{high} * {wide}, {THREADS}>([&](int at) {{\n\
         return Given{{share.row + at / {wide}, share.column + at % {wide}, 0.0f}};\n}}, share,\n\
         [&](int row, int column) {{\n\
         return Held{{load(row, column), sum_of_parts(reinterpret_cast<const float*>({partial}), row * share.columns + column, total, int({parts}))}};\n}},\n\
         [&](int row, int column, float, const Held& given) {{ take(row, column, given.sum, given.loaded); }});\n"
    );
    let tile = [i64::from(THREADS), high, wide];
    body += &Totals::finish(&mut writer, tile, Shared::behind(workspace, 0));
    let function = writer.params.function("gemm_totals", THREADS, &body);
    let blocks = move |env: &Env| {
        let [rows, columns, ..] = sized_problem.sizes(env);
        ((rows + high - 1) / high).saturating_mul((columns + wide - 1) / wide)
    };
    let shape = Shape {
        block: i64::from(THREADS),
        shared_bytes: totals.shared_bytes(i64::from(THREADS)),
    };
    Ok(launchable(function, writer.params, shape, blocks))
}

/// The views of both operands for their kernel.
pub fn views(problem: &Problem, elems: [Elem; 2], apart: bool, bounds: &Env) -> [View; 2] {
    [
        View::new(
            &problem.left,
            problem,
            &problem.rows,
            elems[0].bytes(),
            apart,
            bounds,
        ),
        View::new(
            &problem.right,
            problem,
            &problem.columns,
            elems[1].bytes(),
            apart,
            bounds,
        ),
    ]
}

/// The statements that compute a block's part of the product and pass every `sum` to `take`, with
/// the values that `load` reads.
fn multiply(spec: &Spec, kernel: &Kernel, views: &[View; 2], elems: [Elem; 2]) -> String {
    const TAKE: &str = "take(row, column, sum, load(row, column));\n";
    match kernel {
        Kernel::Registers(_) | Kernel::Tensor(..) => {
            let of = |i: usize| {
                let view = &views[i];
                // Tiles in registers are f32: halves are converted one by one.
                let converted = matches!(kernel, Kernel::Registers(_)) && elems[i] != Elem::F32;
                let vector = if converted || (view.by_deep && !kernel.vectors_by_deep()) {
                    1
                } else {
                    view.vector
                };
                format!("{}, {vector}", view.by_deep)
            };
            let [left, right] = views.each_ref().map(|view| view.by_deep);
            format!(
                "SHARED_BYTES(float, shared);\n{} tile;\ntile.product<{}, {}>(left, right, share, shared);\n\
                 if (!parts.join(tile.sum)) return;\ntile.give<{left}, {right}>(share, shared, load, take);\n",
                kernel.source(),
                of(0),
                of(1)
            )
        }
        Kernel::Dots {
            few,
            large,
            transposed,
        }
        | Kernel::Columns {
            few,
            each: large,
            transposed,
        } => {
            let (operands, first, counts, parameters) = match transposed {
                false => (
                    "right, left",
                    "share.column",
                    "share.columns, share.rows",
                    "int column, int row, float sum",
                ),
                true => (
                    "left, right",
                    "share.row",
                    "share.rows, share.columns",
                    "int row, int column, float sum",
                ),
            };
            let view = &views[usize::from(!transposed)];
            let take = format!("[&]({parameters}) {{\n{TAKE}}}");
            if let Kernel::Dots { .. } = kernel {
                let vector = run_length(view);
                let other = run_length(&views[usize::from(*transposed)]).min(vector);
                format!(
                    "const int first = {first} + int(threadIdx.x) / 32 * {large};\n\
                     dot_products<{few}, {large}, {vector}, {other}>({operands}, first, {counts}, share.deep, share.end, parts, {take});\n"
                )
            } else {
                let (warps, vector) = (super::tiles::VECTOR_WARPS, large);
                format!(
                    "SHARED_BYTES(float, shared);\n\
                     column_sums<{few}, {warps}, {vector}>({operands}, {first}, {counts}, share.deep, share.end, shared, parts, {take});\n"
                )
            }
        }
        Kernel::Quantized { few, large, format } => {
            let Quantization { bits, block } = format;
            let aligned = match &spec.body {
                Body::QuantizedMatmul(product) => quantized::are_words(&product.numbers),
                _ => false,
            };
            let by_deep = views[0].by_deep;
            format!(
                "const int first = share.column + int(threadIdx.x) / 32 * {large}, above = share.row;\n\
                 quantized_dots<{few}, {large}, {bits}, {block}, {aligned}, {by_deep}, Scales, Zeros>(right, left, first, share.columns, above, share.rows - above, share.deep, share.end, parts, \
                 [&](int column, int below, float sum) {{\nconst int row = above + below;\n{TAKE}}});\n"
            )
        }
        Kernel::Window {
            window: [high, wide],
            transposed,
        } => {
            let (operands, position) = match transposed {
                false => (
                    "right, left",
                    "const int row = share.row, column = share.column + int(threadIdx.x);",
                ),
                true => (
                    "left, right",
                    "const int row = share.row + int(threadIdx.x), column = share.column;",
                ),
            };
            let at = if *transposed {
                "row, column"
            } else {
                "column, row"
            };
            format!(
                "{position}\nif (row >= share.rows || column >= share.columns) return;\n\
                 const float sum = window_sum<{high}, {wide}>({operands}, {at});\n{TAKE}"
            )
        }
    }
}

/// Whether all numbers of indices fit in 31 bits, with room for the tiles' overhang.
pub fn check_sizes(problem: &Problem, bounds: &Env) -> Result<(), SpecError> {
    let most = i64::from(i32::MAX) - (1 << 16);
    let sizes = problem.sizes(bounds);
    if sizes.iter().any(|&n| n > most) {
        return Err(SpecError::unsupported(format!(
            "a product of rows, columns, contracted elements and products {sizes:?}: at most {most} each"
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{cut, divisor};

    /// The host version of `quotient` in `sides.cuh`.
    fn quotient(n: u32, word: i64) -> u32 {
        let word = word as u64;
        ((u64::from(n * 2) * (word & 0xffff_ffff)) >> 32 >> (word >> 32)) as u32
    }

    #[test]
    fn quotients_are_exact() {
        let most = i32::MAX as u32;
        let divisors = (1..70).chain([
            127,
            128,
            129,
            1000,
            3136,
            65535,
            65536,
            65537,
            1 << 30,
            (1 << 30) + 1,
            most - 1,
            most,
        ]);
        for d in divisors {
            let word = divisor(i64::from(d));
            let near = (1..4)
                .flat_map(|k| [d.saturating_mul(k), most / d * d])
                .flat_map(|n| [n.saturating_sub(1), n, n.saturating_add(1)]);
            for n in near
                .chain([0, 1, 2, most / 2, most - 1, most])
                .filter(|&n| n <= most)
            {
                assert_eq!(quotient(n, word), n / d, "{n} / {d}");
            }
        }
    }

    #[test]
    fn parts_cover_the_axis_once() {
        for deep in [0, 1, 7, 8, 100, 4096, 50_001] {
            for parts in [1, 2, 3, 7, 256] {
                for multiple in [8, 32, 128] {
                    let (length, number) = cut(deep, parts, multiple);
                    assert!(
                        length % multiple == 0 && number >= 1 && number <= parts,
                        "{deep} {parts} {multiple}: {length} × {number}"
                    );
                    assert!(
                        length * number >= deep && length * (number - 1) < deep.max(1),
                        "{deep} {parts}: {length} × {number}"
                    );
                }
            }
        }
    }
}
