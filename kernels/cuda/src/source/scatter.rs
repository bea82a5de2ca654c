//! Deterministic scatter: each element of the result joins its values in their order, without
//! atomic operations.
//!
//! Where one index addresses a whole run of values (the gradient of an embedding), three small
//! kernels first build an ordered list of values per position: they count the values, compute the
//! prefix sums of the counts, and fill the lists. Where there are few positions, the indices are
//! split into chunks, so that many warps count and list them: a position's list is then the
//! concatenation of the lists of all chunks. Otherwise, or where there are few values, every
//! element scans the indices that may address it.

use std::fmt::Write as _;
use std::sync::Arc;

use slabwise_kernels::dtype::Lane;
use slabwise_kernels::size::{Env, Size};
use slabwise_kernels::spec::{ReduceOp, Scatter, Spec, SpecError};

use super::THREADS;
use super::elementwise::{Anchor, all_points, launch, ordered, pointwise, width};
use super::gather::coordinate;
use super::params::{Number, Params};
use super::space::{Space, points};
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
/// Iterations of 32 indices whose loads a warp batches.
const TURNS: i64 = 4;
/// Numbers of values of a list that a thread loads before it adds them in their order: the largest
/// that remain in the list.
const AHEAD: [i64; 3] = [64, 8, 1];

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
    /// The loops over the list that add its values in order: each iteration loads several values by
    /// `load`, and then adds each of them, `sent[t]`, by `add`.
    fn each(
        &self,
        space: &Space,
        params: &mut Params,
        coordinates: &[String],
        width: i64,
        load: &str,
        add: &str,
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
        for ahead in AHEAD.map(|values| (values / width).max(1)) {
            let turn = format!("#pragma unroll\nfor (int t = 0; t < {ahead}; ++t)");
            let _ = writeln!(
                text,
                "for (; end - q >= {ahead}; q += {ahead}) {{\nVec<{}, {width}> sent[{ahead}];",
                lane(self.scatter)
            );
            let _ = writeln!(
                text,
                "{turn} {{\nconst idx s = lists[q + t];\nsent[t] = {load};\n}}\n{turn} {{\n{add}}}\n}}"
            );
        }
        text
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
        text
    }

    fn at(&self, space: &Space, params: &mut Params, coordinates: &[String]) -> String {
        let load = format!("{{values[value + {}]}}", self.step(params));
        let each = self.each(
            space,
            params,
            coordinates,
            1,
            &load,
            &(join(self.scatter, "acc", "sent[t].v[0]") + "\n"),
        );
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
        let add = format!("{all}{}\n", join(self.scatter, "accs.v[u]", "sent[t].v[u]"));
        let nothing = match self.scatter.reduce {
            ReduceOp::Sum => String::new(),
            _ => format!("{all}accs.v[u] = {};\n", fold(self.scatter).identity()),
        };
        format!(
            "Vec<{}, {width}> accs = {{}};\n{nothing}{}",
            lane(self.scatter),
            self.each(space, params, coordinates, width, &load, &add)
        )
    }

    fn moved(&self, space: &Space) -> Option<Vec<(usize, usize)>> {
        let last = space.dims.len() - 1;
        let invariant = |access: usize| space.accesses[access].1[last].is(0);
        let aligned = self.scatter.value.strides[self.scatter.axis]
            .checked_div(4)
            .is_some();
        (invariant(self.accesses.place) && invariant(self.accesses.list) && aligned)
            .then(|| vec![(self.accesses.value, 4)])
    }
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
    let (starts, values) = (Word::Workspace(0), Word::Workspace(groups.starts_bytes));
    let space = ordered(&code, space, bounds);
    let lists = Lists {
        scatter,
        accesses,
        chunks: groups.chunks,
        starts,
        values,
    };

    let mut fill = Params::new(spec, bounds, target);
    let mut scan = fill.clone();
    let mut sum = fill.clone();
    let mut count = fill.clone();
    // Where threads are few, each processes one list, with as many iterations for a long list as a
    // vector would take.
    let few = space.points(bounds) < 1024 * i64::from(target.multiprocessors.max(1));
    let width = if few { 1 } else { width(&code, &space, &lists) };
    let functions = vec![
        groups.fill(&mut count, spec, scatter, false, (starts, values)),
        groups.scan(&mut scan, spec, scatter, starts),
        groups.fill(&mut fill, spec, scatter, true, (starts, values)),
        all_points("scatter_lists", &code, &space, &lists, &mut sum, width),
    ];
    let (target, workspace) = (*target, groups.starts_bytes + groups.values_bytes);
    let len = spec.dims[axis];
    Ok(Lowered::new(functions, workspace, move |env| {
        let each = points(&groups.dims, env).clamp(0, i64::from(u16::MAX)) as u32;
        let warps =
            (len.at(env).max(0) as u64).div_ceil(PLACES as u64) as u32 * groups.chunks as u32;
        let dispatch = |function, grid, threads, words| Dispatch {
            grid,
            ..Dispatch::new(function, 0, threads, words)
        };
        vec![
            dispatch(0, [warps, each, 1], 32, count.words(env)),
            dispatch(1, [each, 1, 1], THREADS, scan.words(env)),
            dispatch(2, [warps, each, 1], 32, fill.words(env)),
            launch(3, space.points(env), width, &sum, env, &target),
        ]
    }))
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
        let (axis, chunks) = (scatter.axis, self.chunks);
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
                .next_multiple_of(32) as i64
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
            "for (int t = lane; t < {PLACES}; t += 32) cursors[t] = {from};\n__syncwarp();"
        );
        let _ = writeln!(
            body,
            "for (idx from = start; from < stop; from += {}) {{\nidx places[{TURNS}];",
            32 * TURNS
        );
        let turn = format!(
            "#pragma unroll\nfor (int t = 0; t < {TURNS}; ++t) {{\nconst idx s = from + t * 32 + lane;"
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
            body += "unsigned same = __ballot_sync(0xffffffffu, mine);\n";
            let _ = writeln!(
                body,
                "#pragma unroll\nfor (int bit = 1; bit < {PLACES}; bit <<= 1) {{"
            );
            body += "const unsigned with = __ballot_sync(0xffffffffu, (place & bit) != 0);\n";
            body += "same &= (place & bit) != 0 ? with : ~with;\n}\n";
            body += "const int next = cursors[place], before = __popc(same & ((1u << lane) - 1u));\n__syncwarp();\n";
            body += "if (mine) lists[next + before] = int(s);\n";
            body += "if (mine && same >> lane == 1u) cursors[place] = next + before + 1;\n__syncwarp();\n}\n}\n";
        } else {
            body += "if (mine) atomicAdd(&cursors[place], 1);\n}\n}\n__syncwarp();\n";
            let _ = writeln!(
                body,
                "for (int t = lane; t < {PLACES}; t += 32)\nif (first + t < len) own[t * {chunks}] = cursors[t];"
            );
        }
        params.function(
            if lists {
                "scatter_fill"
            } else {
                "scatter_count"
            },
            32,
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
