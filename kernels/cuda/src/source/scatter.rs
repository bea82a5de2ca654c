//! Deterministic scatter: each element of the result joins its values in their order, without
//! atomic operations.
//!
//! Where one index addresses a whole run of values (the gradient of an embedding), three small
//! kernels first build an ordered list of values per position: they count the values, compute the
//! prefix sums of the counts, and fill the lists. Where there are few positions, the indices are
//! split into chunks, so that many warps count and list them: a position's list is then the
//! concatenation of the lists of all chunks. Long lists are added in pieces of [`PIECE`] values by a
//! fourth kernel, and an element of the result joins the sums of its pieces. Otherwise, or where
//! there are few values, every element scans the indices that may address it.

use std::fmt::Write as _;
use std::sync::Arc;

use slabwise_kernels::dtype::Lane;
use slabwise_kernels::size::{Env, Size};
use slabwise_kernels::spec::{ReduceOp, Scatter, Spec, SpecError};

use super::THREADS;
use super::elementwise::{Anchor, all_points, launch, ordered, pointwise, width};
use super::gather::coordinate;
use super::params::{Number, Params};
use super::space::{Space, points, vector_width};
use crate::abi::{Dispatch, Function, Target, Word};
use crate::code::{Code, Fold, Storage, lane_type};
use crate::lowered::Lowered;

/// The number of values above which lists are worth three additional kernels.
const FEW_VALUES: i64 = 32;
/// Positions whose lists one warp fills: a power of two.
const PLACES: i64 = 128;
/// Indices of a chunk, at least.
const CHUNK: i64 = 512;
/// The desired number of warps per multiprocessor while lists are filled.
const WARPS: i64 = 4;
/// The limit of counts per group when indices are split into chunks: one block scans them.
const COUNTS: i64 = 1 << 15;
/// Indices of a lane whose loads a warp batches.
const TURNS: i64 = 4;
/// Numbers of values of a list that a thread loads before it adds them in their order: the largest
/// that remain in the list.
const AHEAD: [i64; 3] = [64, 8, 1];
/// Values of a piece. Shorter lists are one piece, so that their sums are in the order of the
/// values, as on the CPU.
const PIECE: i64 = 64;

/// The accesses to values and indices, without the scattered axis; to the scattered axis; and to
/// the lists of the result's positions.
struct Accesses {
    value: usize,
    index: usize,
    place: usize,
    list: usize,
}

/// Every element scans the indices.
struct Search<'a> {
    scatter: &'a Scatter,
    accesses: Accesses,
}

/// Every element reads the list of its position.
struct Lists<'a> {
    scatter: &'a Scatter,
    accesses: Accesses,
    chunks: i64,
    starts: Word,
    values: Word,
    /// The sums of pieces of long lists: where they are, the access to those of an element, and the
    /// stride from one to the next; `None` if no list is long.
    pieces: Option<(Word, usize, Size)>,
}

/// The type of the values.
fn lane(scatter: &Scatter) -> &'static str {
    lane_type(scatter.value.dtype.lane())
}

/// The reduction.
fn fold(scatter: &Scatter) -> Fold {
    Fold::new(scatter.reduce, scatter.value.dtype.lane())
}

/// A statement that joins a value to `acc`.
fn join(scatter: &Scatter, acc: &str, x: &str) -> String {
    match (scatter.reduce, scatter.value.dtype.lane()) {
        (ReduceOp::Sum, Lane::F32) => format!("{acc} += {x};"),
        _ => format!("{acc} = {};", fold(scatter).join(acc, x)),
    }
}

fn declare(scatter: &Scatter, params: &mut Params) -> String {
    params.pointer("values", &format!("const {}", lane(scatter)), 0)
        + &params.pointer(
            "indices",
            &format!("const {}", Storage::of(scatter.index.dtype).ty),
            1,
        )
}

impl Anchor for Search<'_> {
    fn declare(&self, params: &mut Params) -> String {
        declare(self.scatter, params)
    }

    fn at(&self, space: &Space, params: &mut Params, coordinates: &[String]) -> String {
        let (scatter, axis) = (self.scatter, self.scatter.axis);
        let mut text = format!(
            "{} acc = {};\nconst idx place = {};\n",
            lane(scatter),
            fold(scatter).identity(),
            space.place(params, self.accesses.place, coordinates)
        );
        let (value, index) = (
            space.place(params, self.accesses.value, coordinates),
            space.place(params, self.accesses.index, coordinates),
        );
        let _ = writeln!(
            text,
            "const idx value = {value}, index = {index}, many = {};",
            params.size(scatter.space[axis])
        );
        let at = ["s".to_string()];
        let index = params.dot(&[scatter.index.strides[axis]], &at, Size::ZERO);
        let value = params.dot(&[scatter.value.strides[axis]], &at, Size::ZERO);
        let index = Storage::of(scatter.index.dtype).widen(&format!("indices[index + {index}]"));
        let _ = writeln!(
            text,
            "#pragma unroll 4\nfor (idx s = 0; s < many; ++s)\nif ({index} == place) {}",
            join(scatter, "acc", &format!("values[value + {value}]"))
        );
        text
    }
}

impl Lists<'_> {
    /// The statements that add the list's values, or the sums of its pieces: `join` adds `x` to the
    /// value under construction, `load` reads the value of index `s`.
    fn each(
        &self,
        space: &Space,
        params: &mut Params,
        coordinates: &[String],
        width: i64,
        load: &str,
        join: &dyn Fn(&str) -> String,
    ) -> String {
        let value = space.place(params, self.accesses.value, coordinates);
        let (group, place) = (
            space.place(params, self.accesses.list, coordinates),
            space.place(params, self.accesses.place, coordinates),
        );
        let mut text = format!(
            "const idx value = {value}, list = {group} + ({place}) * {};\n",
            self.chunks
        );
        let _ = writeln!(
            text,
            "int q = starts[list];\nconst int end = starts[list + {}];",
            self.chunks
        );
        if let Some((_, access, stride)) = self.pieces {
            let lane = lane(self.scatter);
            let first = space.place(params, access, coordinates);
            let stride = params.size(stride);
            let _ = writeln!(
                text,
                "if (end - q > {PIECE}) {{\nconst int list_start = q, base = starts[{group}];"
            );
            let _ = writeln!(
                text,
                "#pragma unroll 4\nfor (; q < end; q += {PIECE}) {{\n\
                 const idx slot = (q - base) / {PIECE} * 2 + (q == list_start ? 1 : 0);\n\
                 const Vec<{lane}, {width}> x = load_vec<Vec<{lane}, {width}>>(pieces + ({first} + slot * {stride}));\n\
                 {}}}\n}}",
                join("x")
            );
        }
        text + &walk(lane(self.scatter), width, load, join)
    }

    fn step(&self, params: &mut Params) -> String {
        params.dot(
            &[self.scatter.value.strides[self.scatter.axis]],
            &["s".to_string()],
            Size::ZERO,
        )
    }
}

impl Anchor for Lists<'_> {
    fn declare(&self, params: &mut Params) -> String {
        let mut text = params.pointer("values", &format!("const {}", lane(self.scatter)), 0);
        let (starts, lists) = (params.address(self.starts), params.address(self.values));
        let _ = writeln!(
            text,
            "const int* const starts = reinterpret_cast<const int*>({starts});"
        );
        let _ = writeln!(
            text,
            "const int* const lists = reinterpret_cast<const int*>({lists});"
        );
        if let Some((pieces, ..)) = self.pieces {
            let (lane, pieces) = (lane(self.scatter), params.address(pieces));
            let _ = writeln!(
                text,
                "const {lane}* const pieces = reinterpret_cast<const {lane}*>({pieces});"
            );
        }
        text
    }

    fn at(&self, space: &Space, params: &mut Params, coordinates: &[String]) -> String {
        let load = format!("{{values[value + {}]}}", self.step(params));
        let add = |x: &str| join(self.scatter, "acc", &format!("{x}.v[0]")) + "\n";
        let each = self.each(space, params, coordinates, 1, &load, &add);
        let (lane, nothing) = (lane(self.scatter), fold(self.scatter).identity());
        format!("{lane} acc = {nothing};\n{each}")
    }

    fn vector(
        &self,
        space: &Space,
        params: &mut Params,
        coordinates: &[String],
        width: i64,
    ) -> String {
        let load = format!(
            "load_vec<Vec<{}, {width}>>(values + (value + {}))",
            lane(self.scatter),
            self.step(params)
        );
        let all = format!("#pragma unroll\nfor (int u = 0; u < {width}; ++u) ");
        let add = |x: &str| {
            let join = join(self.scatter, "accs.v[u]", &format!("{x}.v[u]"));
            format!("{all}{join}\n")
        };
        nothing(self.scatter, width) + &self.each(space, params, coordinates, width, &load, &add)
    }

    fn moved(&self, space: &Space) -> Option<Vec<(usize, usize)>> {
        let last = space.dims.len() - 1;
        let invariant = |access: usize| space.accesses[access].1[last].is(0);
        // Repeated values are read one by one.
        let vectors = space.accesses[self.accesses.value].1[last].is(1);
        let steps = [self.scatter.value.strides[self.scatter.axis]];
        let slots = self.pieces.map(|(_, _, stride)| stride);
        let mut steps = steps.into_iter().chain(slots);
        let aligned = steps.all(|stride| stride.checked_div(4).is_some());
        let pieces = self.pieces.map(|(_, access, _)| (access, 4));
        let fixed = invariant(self.accesses.place) && invariant(self.accesses.list);
        (fixed && vectors && aligned).then(|| {
            let moved = [(self.accesses.value, 4)];
            moved.into_iter().chain(pieces).collect()
        })
    }
}

/// Declares `accs`, a vector of the reduction's identity.
fn nothing(scatter: &Scatter, width: i64) -> String {
    let declared = format!("Vec<{}, {width}> accs = {{}};\n", lane(scatter));
    match scatter.reduce {
        ReduceOp::Sum => declared,
        _ => format!(
            "{declared}#pragma unroll\nfor (int u = 0; u < {width}; ++u) accs.v[u] = {};\n",
            fold(scatter).identity()
        ),
    }
}

/// The loops that add the values of the list entries `q..end` in order: each iteration loads several
/// values by `load`, and then joins each of them.
fn walk(lane: &str, width: i64, load: &str, join: &dyn Fn(&str) -> String) -> String {
    let mut text = String::new();
    for ahead in AHEAD.map(|values| (values / width).max(1)) {
        let turn = format!("#pragma unroll\nfor (int t = 0; t < {ahead}; ++t)");
        let _ = writeln!(
            text,
            "for (; end - q >= {ahead}; q += {ahead}) {{\nVec<{lane}, {width}> sent[{ahead}];"
        );
        let _ = writeln!(
            text,
            "{turn} {{\nconst idx s = lists[q + t];\nsent[t] = {load};\n}}\n{turn} {{\n{}}}\n}}",
            join("sent[t]")
        );
    }
    text
}

pub fn lower(
    spec: &Spec,
    scatter: &Scatter,
    bounds: &Env,
    target: &Target,
) -> Result<Lowered, SpecError> {
    let code = Code::new(spec)?;
    let (rank, axis) = (spec.dims.len(), scatter.axis);
    let without_axis = |strides: &[Size]| -> Vec<Size> {
        (0..rank)
            .map(|a| if a == axis { Size::ZERO } else { strides[a] })
            .collect()
    };
    let mut space = Space::new(spec);
    let mut accesses = Accesses {
        value: space.push(scatter.value.offset, &without_axis(&scatter.value.strides)),
        index: space.push(scatter.index.offset, &without_axis(&scatter.index.strides)),
        place: space.push(Size::ZERO, &coordinate(axis, rank)),
        list: 0,
    };
    let Some(groups) = Groups::new(spec, scatter, bounds, target) else {
        let space = ordered(&code, space, bounds);
        return Ok(pointwise(
            "scatter",
            &code,
            space,
            &Search { scatter, accesses },
            bounds,
            target,
        ));
    };
    accesses.list = space.push(Size::ZERO, &groups.list_strides);
    let lists_bytes = groups.starts_bytes + groups.values_bytes;
    let (starts, values) = (Word::Workspace(0), Word::Workspace(groups.starts_bytes));
    let pieces = Pieces::new(spec, scatter, &groups, bounds);
    let sums = Word::Workspace(lists_bytes);
    let lists = Lists {
        scatter,
        accesses,
        chunks: groups.chunks,
        starts,
        values,
        pieces: pieces.as_ref().map(|pieces| {
            let access = space.push(Size::ZERO, &without_axis(&pieces.strides));
            (sums, access, pieces.strides[axis])
        }),
    };
    let space = ordered(&code, space, bounds);

    let mut fill = Params::new(spec, bounds, target);
    let mut scan = fill.clone();
    let mut sum = fill.clone();
    let mut count = fill.clone();
    // Where threads are few, each processes one list, with as many iterations for a long list as a
    // vector would take.
    let few = space.points(bounds) < 1024 * i64::from(target.multiprocessors.max(1));
    let width = if few { 1 } else { width(&code, &space, &lists) };
    let mut functions = vec![
        groups.fill(&mut count, spec, scatter, false, (starts, values)),
        groups.scan(&mut scan, spec, scatter, starts),
        groups.fill(&mut fill, spec, scatter, true, (starts, values)),
        all_points("scatter_lists", &code, &space, &lists, &mut sum, width),
    ];
    let mut add = count.clone();
    let mut workspace = lists_bytes;
    let added = pieces.map(|pieces| {
        workspace += pieces.bytes(bounds);
        let few = pieces.space.points(bounds) < 1024 * i64::from(target.multiprocessors.max(1));
        let width = if few { 1 } else { pieces.width(scatter) };
        add = Params::new(spec, bounds, target);
        let words = (starts, values, sums);
        functions.push(pieces.function(&mut add, spec, scatter, &groups, words, width));
        (pieces, width)
    });
    let target = *target;
    let len = spec.dims[axis];
    Ok(Lowered::new(functions, workspace, move |env| {
        let each = points(&groups.dims, env).clamp(0, i64::from(u16::MAX)) as u32;
        let warps =
            (len.at(env).max(0) as u64).div_ceil(PLACES as u64) as u32 * groups.chunks as u32;
        let dispatch = |function, grid, threads, words| Dispatch {
            grid,
            ..Dispatch::new(function, 0, threads, words)
        };
        let mut launches = vec![
            dispatch(0, [warps, each, 1], target.wave_width, count.words(env)),
            dispatch(1, [each, 1, 1], THREADS, scan.words(env)),
            dispatch(2, [warps, each, 1], target.wave_width, fill.words(env)),
        ];
        launches.extend(added.as_ref().map(|(pieces, width)| {
            launch(4, pieces.space.points(env), *width, &add, env, &target)
        }));
        launches.push(launch(3, space.points(env), width, &sum, env, &target));
        launches
    }))
}

/// The sums of pieces of the long lists. The lists of a group lie one after the other, so that among
/// the pieces of long lists at most two begin in each range of [`PIECE`] entries: a later piece of
/// one list, and the first piece of the next. Each range has a slot for either.
struct Pieces {
    /// The result's axes, with slots in the place of the scattered one.
    space: Space,
    /// The accesses of `space` to the values, to a group's first list, to the slot, and to the sums.
    value: usize,
    list: usize,
    slot: usize,
    sum: usize,
    /// Strides of the sums along the result's axes.
    strides: Vec<Size>,
}

impl Pieces {
    /// `None` if no list can be long.
    fn new(spec: &Spec, scatter: &Scatter, groups: &Groups, bounds: &Env) -> Option<Pieces> {
        let (rank, axis) = (spec.dims.len(), scatter.axis);
        let many = scatter.space[axis].at(bounds);
        if many <= PIECE {
            return None;
        }
        let mut dims = spec.dims.to_vec();
        dims[axis] = Size::fixed(2 * ((many + PIECE - 1) / PIECE));
        let mut strides = vec![Size::ONE; rank];
        for a in (0..rank - 1).rev() {
            strides[a] = strides[a + 1].checked_mul(dims[a + 1])?;
        }
        let mut value = scatter.value.strides.to_vec();
        value[axis] = Size::ZERO;
        let mut space = Space::over(&dims);
        let (value, list, slot, sum) = (
            space.push(scatter.value.offset, &value),
            space.push(Size::ZERO, &groups.list_strides),
            space.push(Size::ZERO, &coordinate(axis, rank)),
            space.push(Size::ZERO, &strides),
        );
        if space.merge(0, rank) == 0 {
            space.insert(0);
        }
        let fits = space.points(bounds) < i64::from(i32::MAX / 4);
        fits.then_some(Pieces {
            space,
            value,
            list,
            slot,
            sum,
            strides,
        })
    }

    fn bytes(&self, bounds: &Env) -> u64 {
        4 * self.space.points(bounds).max(0) as u64
    }

    /// The number of neighbours along the last axis that a thread processes.
    fn width(&self, scatter: &Scatter) -> i64 {
        let last = self.space.dims.len() - 1;
        let stride = |access: usize| self.space.accesses[access].1[last];
        let fixed = stride(self.slot).is(0) && stride(self.list).is(0);
        let aligned = scatter.value.strides[scatter.axis].checked_div(4).is_some();
        if !fixed || !stride(self.value).is(1) || !aligned {
            return 1;
        }
        vector_width(&self.space, &[(self.value, 4), (self.sum, 4)], last, false)
    }

    /// Adds the values of each piece of a long list: a thread for each slot, and for `width`
    /// neighbours.
    fn function(
        &self,
        params: &mut Params,
        spec: &Spec,
        scatter: &Scatter,
        groups: &Groups,
        (starts, lists, sums): (Word, Word, Word),
        width: i64,
    ) -> Function {
        let (axis, chunks, lane) = (scatter.axis, groups.chunks, lane(scatter));
        let mut body = params.pointer("values", &format!("const {lane}"), 0)
            + &Groups::pointers(params, (starts, lists));
        let sums = params.address(sums);
        let _ = writeln!(
            body,
            "{lane}* const pieces = reinterpret_cast<{lane}*>({sums});"
        );
        let all = self.space.clone();
        let count: Number = Arc::new(move |env| all.points(env) / width);
        let (count, len) = (params.number(&count), params.size(spec.dims[axis]));
        let _ = writeln!(
            body,
            "for (idx i = idx(blockIdx.x) * {THREADS} + threadIdx.x; i < {count}; i += idx(gridDim.x) * {THREADS}) {{\n\
             const idx point = i * {width}, len = {len};"
        );
        let (text, at) = params.coordinates("point", &self.space.dims, "c");
        body += &text;
        let places = [self.list, self.slot, self.value, self.sum]
            .map(|access| self.space.place(params, access, &at));
        let [list, slot, value, sum] = places;
        let _ = writeln!(
            body,
            "const idx list = {list}, slot = {slot}, value = {value};\n\
             const int base = starts[list], from = base + int(slot / 2) * {PIECE};"
        );
        // The last list that starts before the range, or the last one in it.
        let _ = writeln!(
            body,
            "const bool is_first = slot % 2 == 1;\n\
             const int inside = is_first ? from + {PIECE} : from;\n\
             if (inside >= starts[list + len * {chunks}]) continue;\n\
             idx low = 0;\n\
             for (idx high = len; high - low > 1;) {{\n\
             const idx middle = (low + high) / 2;\n\
             if (starts[list + middle * {chunks}] <= inside) low = middle;\nelse high = middle;\n}}\n\
             const int start = starts[list + low * {chunks}], stop = starts[list + (low + 1) * {chunks}];\n\
             if (stop - start <= {PIECE}) continue;\n\
             int q = is_first ? start : start + (from - start + {PIECE} - 1) / {PIECE} * {PIECE};\n\
             if (is_first ? q < from || q == inside : q == start || q >= stop) continue;\n\
             const int end = min(stop, q + {PIECE});"
        );
        let at = ["s".to_string()];
        let step = params.dot(&[scatter.value.strides[axis]], &at, Size::ZERO);
        let vec = format!("Vec<{lane}, {width}>");
        let load = format!("load_vec<{vec}>(values + (value + {step}))");
        let add = |x: &str| {
            let join = join(scatter, "accs.v[u]", &format!("{x}.v[u]"));
            format!("#pragma unroll\nfor (int u = 0; u < {width}; ++u) {join}\n")
        };
        body += &nothing(scatter, width);
        body += &walk(lane, width, &load, &add);
        let store = match width {
            1 => format!("pieces[{sum}] = accs.v[0];"),
            _ => format!("store_vec(pieces + ({sum}), accs);"),
        };
        let _ = writeln!(body, "{store}\n}}");
        params.function("scatter_pieces", THREADS, &body)
    }
}

/// The lists of values: a group for each point of the axes before the scattered one along which the
/// index varies.
struct Groups {
    /// Sizes of the axes before the scattered one, or 1 along which the index is broadcast.
    dims: Vec<Size>,
    /// Strides from a point of the result to its group's first list.
    list_strides: Vec<Size>,
    /// Chunks of the indices of a group: a position has a list per chunk.
    chunks: i64,
    /// Threads that list the values of a range of positions.
    wave_width: u32,
    starts_bytes: u64,
    values_bytes: u64,
}

impl Groups {
    /// `None` if lists are not profitable or not possible.
    fn new(spec: &Spec, scatter: &Scatter, bounds: &Env, target: &Target) -> Option<Groups> {
        let (rank, axis) = (spec.dims.len(), scatter.axis);
        let repeats = scatter.index.strides[axis + 1..].iter().all(|s| s.is(0));
        let (len, many) = (spec.dims[axis], scatter.space[axis]);
        if !repeats || many.at(bounds) <= FEW_VALUES {
            return None;
        }
        let varies = |a: usize| !scatter.index.strides[a].is(0);
        let dims: Vec<Size> = (0..axis)
            .map(|a| if varies(a) { spec.dims[a] } else { Size::ONE })
            .collect();
        let groups = points(&dims, bounds);
        let places = len.at(bounds).max(1);
        let warps = groups.saturating_mul((places + PLACES - 1) / PLACES).max(1);
        let wanted = WARPS * i64::from(target.multiprocessors.max(1)) / warps;
        let chunks = wanted
            .min((many.at(bounds) + CHUNK - 1) / CHUNK)
            .min(COUNTS / places)
            .max(1);
        // A group has a list per position and chunk, and an end.
        let counts = len
            .checked_mul(Size::fixed(chunks))?
            .checked_add(Size::ONE)?;
        let mut stride = counts;
        let mut list_strides = vec![Size::ZERO; rank];
        for a in (0..axis).rev() {
            if varies(a) {
                list_strides[a] = stride;
                stride = stride.checked_mul(spec.dims[a])?;
            }
        }
        let bytes = |count: i64| {
            (count.max(0) as u64)
                .saturating_mul(4)
                .next_multiple_of(256)
        };
        let starts = groups.saturating_mul(counts.at(bounds));
        let values = groups.saturating_mul(many.at(bounds));
        // Positions in the lists are 32-bit numbers, and groups are counted along the second axis
        // of a grid.
        let fits = starts.max(values) < i64::from(i32::MAX / 4) && groups <= i64::from(u16::MAX);
        fits.then(|| Groups {
            dims,
            list_strides,
            chunks,
            wave_width: target.wave_width,
            starts_bytes: bytes(starts),
            values_bytes: bytes(values),
        })
    }

    fn pointers(params: &mut Params, (starts, lists): (Word, Word)) -> String {
        let (starts, lists) = (params.address(starts), params.address(lists));
        format!(
            "int* const starts = reinterpret_cast<int*>({starts});\nint* const lists = reinterpret_cast<int*>({lists});\n"
        )
    }

    /// Counts the values of each position or, given the prefix sums, lists them in order: one warp
    /// for each range of positions and each chunk scans the indices of the chunk.
    fn fill(
        &self,
        params: &mut Params,
        spec: &Spec,
        scatter: &Scatter,
        lists: bool,
        words: (Word, Word),
    ) -> Function {
        let (axis, chunks, wave) = (scatter.axis, self.chunks, u64::from(self.wave_width));
        let storage = Storage::of(scatter.index.dtype);
        let mut body = params.pointer("indices", &format!("const {}", storage.ty), 1)
            + &Groups::pointers(params, words);
        let (len, many) = (
            params.size(spec.dims[axis]),
            params.size(scatter.space[axis]),
        );
        let of = scatter.space[axis];
        let chunk: Number = Arc::new(move |env| {
            (of.at(env).max(0) as u64)
                .div_ceil(chunks as u64)
                .next_multiple_of(wave) as i64
        });
        let _ = writeln!(
            body,
            "const idx len = {len}, first = idx(blockIdx.x) / {chunks} * {PLACES}, chunk = idx(blockIdx.x) % {chunks};"
        );
        let _ = writeln!(
            body,
            "const idx start = chunk * {0}, stop = min(idx({many}), idx(start + {0}));",
            params.number(&chunk)
        );
        let _ = writeln!(
            body,
            "const int lane = threadIdx.x;\nconst idx group = blockIdx.y;\n__shared__ int cursors[{PLACES}];"
        );
        let _ = writeln!(
            body,
            "int* const own = starts + (group * (len * {chunks} + 1) + first * {chunks} + chunk);"
        );
        let (text, mut at) = params.coordinates("group", &self.dims, "c");
        body += &text;
        at.push("s".into());
        at.resize(spec.dims.len(), "0".into());
        let index = params.dot(&scatter.index.strides, &at, scatter.index.offset);
        let from = if lists {
            format!("first + t < len ? own[t * {chunks}] : 0")
        } else {
            "0".into()
        };
        let _ = writeln!(
            body,
            "for (int t = lane; t < {PLACES}; t += WAVE) cursors[t] = {from};\n__syncwarp();"
        );
        let _ = writeln!(
            body,
            "for (idx from = start; from < stop; from += {TURNS} * WAVE) {{\nidx places[{TURNS}];"
        );
        let turn = format!(
            "#pragma unroll\nfor (int t = 0; t < {TURNS}; ++t) {{\nconst idx s = from + t * WAVE + lane;"
        );
        let _ = writeln!(
            body,
            "{turn}\nplaces[t] = s < stop ? idx({}) : -1;\n}}",
            storage.widen(&format!("indices[{index}]"))
        );
        let _ = writeln!(
            body,
            "{turn}\nconst bool mine = places[t] >= first && places[t] < first + {PLACES} && places[t] < len;"
        );
        body += "const int place = mine ? int(places[t] - first) : 0;\n";
        if lists {
            // The lanes of one position reserve consecutive list entries in lane order, so lists
            // are in the order of the values.
            body += "Lanes same = ballot(mine);\n";
            let _ = writeln!(
                body,
                "#pragma unroll\nfor (int bit = 1; bit < {PLACES}; bit <<= 1) {{"
            );
            body += "const Lanes with = ballot((place & bit) != 0);\n";
            body += "same &= (place & bit) != 0 ? with : ~with;\n}\n";
            body += "const int next = cursors[place], before = lanes_before(same, lane);\n__syncwarp();\n";
            body += "if (mine) lists[next + before] = int(s);\n";
            body += "if (mine && same >> lane == 1) cursors[place] = next + before + 1;\n__syncwarp();\n}\n}\n";
        } else {
            body += "if (mine) atomicAdd(&cursors[place], 1);\n}\n}\n__syncwarp();\n";
            let _ = writeln!(
                body,
                "for (int t = lane; t < {PLACES}; t += WAVE)\nif (first + t < len) own[t * {chunks}] = cursors[t];"
            );
        }
        params.function(
            if lists {
                "scatter_fill"
            } else {
                "scatter_count"
            },
            self.wave_width,
            &body,
        )
    }

    /// Computes the prefix sums of the counts, one block per group.
    fn scan(&self, params: &mut Params, spec: &Spec, scatter: &Scatter, starts: Word) -> Function {
        let address = params.address(starts);
        let mut body = format!("int* const starts = reinterpret_cast<int*>({address});\n");
        let (len, many) = (
            params.size(spec.dims[scatter.axis]),
            params.size(scatter.space[scatter.axis]),
        );
        let _ = writeln!(
            body,
            "const idx counts = {len} * {}, group = blockIdx.x, many = {many};",
            self.chunks
        );
        body += "int* const own = starts + group * (counts + 1);\n";
        let _ = writeln!(
            body,
            "__shared__ int sums[{THREADS}];\nscan_counts<{THREADS}>(own, counts, int(group * many), sums);"
        );
        params.function("scatter_scan", THREADS, &body)
    }
}
