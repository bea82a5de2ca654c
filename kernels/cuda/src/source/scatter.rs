//! Deterministic scatter-add: each element of the result adds up what is sent to it, in the order of the values, without
//! atomic additions.
//!
//! Where one index moves a whole run of values (the gradient of an embedding), three small kernels list the values of every
//! place first, in order: they count them, turn the counts into where each list starts, and fill the lists. Else, or where
//! there are few values, every element looks through the indices that may lead to it.

use std::fmt::Write as _;

use slabwise_kernels::cpu::SpecError;
use slabwise_kernels::size::{Env, Size};
use slabwise_kernels::spec::{ScatterAdd, Spec};

use super::THREADS;
use super::elementwise::{Anchor, all_points, launch, ordered, pointwise, width};
use super::gather::coordinate;
use super::params::Params;
use super::space::{Space, points};
use crate::code::{Code, Storage};
use crate::lower::{Dispatch, Function, Lowered, Target, Word};

/// Values beyond which lists are worth three kernels more.
const FEW_VALUES: i64 = 32;
/// Places whose lists one warp fills.
const PLACES: i64 = 128;

/// The walks over values and indices, without the scattered axis; over the scattered axis; and over the lists of the result's
/// places.
struct Walks {
    value: usize,
    index: usize,
    place: usize,
    list: usize,
}

/// Every element looks through the indices.
struct Search<'a> {
    scatter: &'a ScatterAdd,
    walks: Walks,
}

/// Every element reads the list of its place.
struct Lists<'a> {
    scatter: &'a ScatterAdd,
    walks: Walks,
    starts: Word,
    values: Word,
}

fn declare(scatter: &ScatterAdd, params: &mut Params) -> String {
    params.pointer("values", "const float", 0) + &params.pointer("indices", &format!("const {}", Storage::of(scatter.index.dtype).ty), 1)
}

impl Anchor for Search<'_> {
    fn declare(&self, params: &mut Params) -> String {
        declare(self.scatter, params)
    }

    fn at(&self, space: &Space, params: &mut Params, coordinates: &[String]) -> String {
        let (scatter, axis) = (self.scatter, self.scatter.axis);
        let mut text = format!("float acc = 0.0f;\nconst idx place = {};\n", space.place(params, self.walks.place, coordinates));
        let (value, index) = (space.place(params, self.walks.value, coordinates), space.place(params, self.walks.index, coordinates));
        let _ = writeln!(text, "const idx value = {value}, index = {index}, many = {};", params.size(scatter.space[axis]));
        let at = ["s".to_string()];
        let index = params.dot(&[scatter.index.strides[axis]], &at, Size::ZERO);
        let value = params.dot(&[scatter.value.strides[axis]], &at, Size::ZERO);
        let index = Storage::of(scatter.index.dtype).widen(&format!("indices[index + {index}]"));
        let _ = writeln!(text, "#pragma unroll 4\nfor (idx s = 0; s < many; ++s)\nif ({index} == place) acc += values[value + {value}];");
        text
    }
}

impl Lists<'_> {
    /// Declares `value` and the loop over the list, in which `s` is a value's coordinate.
    fn each(&self, space: &Space, params: &mut Params, coordinates: &[String]) -> String {
        let value = space.place(params, self.walks.value, coordinates);
        let start =
            format!("{} + {}", space.place(params, self.walks.list, coordinates), space.place(params, self.walks.place, coordinates));
        let mut text = format!("const idx value = {value}, list = {start};\n");
        text += "#pragma unroll 4\nfor (int q = starts[list]; q < starts[list + 1]; ++q) {\nconst idx s = lists[q];\n";
        text
    }

    fn step(&self, params: &mut Params) -> String {
        params.dot(&[self.scatter.value.strides[self.scatter.axis]], &["s".to_string()], Size::ZERO)
    }
}

impl Anchor for Lists<'_> {
    fn declare(&self, params: &mut Params) -> String {
        let mut text = params.pointer("values", "const float", 0);
        let (starts, lists) = (params.address(self.starts), params.address(self.values));
        let _ = writeln!(text, "const int* const starts = reinterpret_cast<const int*>({starts});");
        let _ = writeln!(text, "const int* const lists = reinterpret_cast<const int*>({lists});");
        text
    }

    fn at(&self, space: &Space, params: &mut Params, coordinates: &[String]) -> String {
        let each = self.each(space, params, coordinates);
        format!("float acc = 0.0f;\n{each}acc += values[value + {}];\n}}\n", self.step(params))
    }

    fn vector(&self, space: &Space, params: &mut Params, coordinates: &[String], width: i64) -> String {
        let each = self.each(space, params, coordinates);
        let mut text = format!("Vec<float, {width}> accs = {{}};\n{each}");
        let _ = writeln!(text, "const Vec<float, {width}> sent = load_vec<Vec<float, {width}>>(values + (value + {}));", self.step(params));
        let _ = writeln!(text, "#pragma unroll\nfor (int u = 0; u < {width}; ++u) accs.v[u] += sent.v[u];\n}}");
        text
    }

    fn moved(&self, space: &Space) -> Option<Vec<(usize, usize)>> {
        let last = space.dims.len() - 1;
        let flat = |walk: usize| space.walks[walk].1[last].is(0);
        let aligned = self.scatter.value.strides[self.scatter.axis].checked_div(4).is_some();
        (flat(self.walks.place) && flat(self.walks.list) && aligned).then(|| vec![(self.walks.value, 4)])
    }
}

pub fn lower(spec: &Spec, scatter: &ScatterAdd, bounds: &Env, target: &Target) -> Result<Lowered, SpecError> {
    let code = Code::new(spec)?;
    let (rank, axis) = (spec.dims.len(), scatter.axis);
    let without_axis = |strides: &[Size]| -> Vec<Size> { (0..rank).map(|a| if a == axis { Size::ZERO } else { strides[a] }).collect() };
    let mut space = Space::new(spec);
    let mut walks = Walks {
        value: space.push(scatter.value.offset, &without_axis(&scatter.value.strides)),
        index: space.push(scatter.index.offset, &without_axis(&scatter.index.strides)),
        place: space.push(Size::ZERO, &coordinate(axis, rank)),
        list: 0,
    };
    let Some(groups) = Groups::new(spec, scatter, bounds) else {
        let space = ordered(&code, space, bounds);
        return Ok(pointwise("scatter", &code, space, &Search { scatter, walks }, bounds, target));
    };
    walks.list = space.push(Size::ZERO, &groups.list_strides);
    let (starts, values) = (Word::Workspace(0), Word::Workspace(groups.starts_bytes));
    let space = ordered(&code, space, bounds);
    let lists = Lists { scatter, walks, starts, values };

    let mut fill = Params::new(spec, bounds, target);
    let mut scan = fill.clone();
    let mut sum = fill.clone();
    let mut count = fill.clone();
    let width = width(&code, &space, &lists);
    let functions = vec![
        groups.fill(&mut count, spec, scatter, false, (starts, values)),
        Groups::scan(&mut scan, spec, scatter, starts),
        groups.fill(&mut fill, spec, scatter, true, (starts, values)),
        all_points("scatter_lists", &code, &space, &lists, &mut sum, width),
    ];
    let (target, workspace) = (*target, groups.starts_bytes + groups.values_bytes);
    let len = spec.dims[axis];
    Ok(Lowered::new(functions, workspace, move |env| {
        let each = points(&groups.dims, env).clamp(0, i64::from(u16::MAX)) as u32;
        let places = (len.at(env).max(0) as u64).div_ceil(PLACES as u64) as u32;
        let dispatch = |function, grid, threads, words| Dispatch { function, grid, block: [threads, 1, 1], shared_bytes: 0, words };
        vec![
            dispatch(0, [places, each, 1], 32, count.words(env)),
            dispatch(1, [each, 1, 1], THREADS, scan.words(env)),
            dispatch(2, [places, each, 1], 32, fill.words(env)),
            launch(3, space.points(env), width, &sum, env, &target),
        ]
    }))
}

/// Lists of values: a group for each point of the axes before the scattered one along which the index varies.
struct Groups {
    /// Sizes of the axes before the scattered one, or 1 where the index repeats.
    dims: Vec<Size>,
    /// What leads from a point of the result to its group's first list.
    list_strides: Vec<Size>,
    starts_bytes: u64,
    values_bytes: u64,
}

impl Groups {
    /// `None` if lists are not worth it, or not possible.
    fn new(spec: &Spec, scatter: &ScatterAdd, bounds: &Env) -> Option<Groups> {
        let (rank, axis) = (spec.dims.len(), scatter.axis);
        let repeats = scatter.index.strides[axis + 1..].iter().all(|s| s.is(0));
        let (len, many) = (spec.dims[axis], scatter.space[axis]);
        if !repeats || many.at(bounds) <= FEW_VALUES {
            return None;
        }
        let varies = |a: usize| !scatter.index.strides[a].is(0);
        let dims: Vec<Size> = (0..axis).map(|a| if varies(a) { spec.dims[a] } else { Size::ONE }).collect();
        // A group has a list for each place, and an end.
        let mut stride = len.checked_add(Size::ONE)?;
        let mut list_strides = vec![Size::ZERO; rank];
        for a in (0..axis).rev() {
            if varies(a) {
                list_strides[a] = stride;
                stride = stride.checked_mul(spec.dims[a])?;
            }
        }
        let groups = points(&dims, bounds);
        let bytes = |count: i64| (count.max(0) as u64).saturating_mul(4).next_multiple_of(256);
        let starts = groups.saturating_mul(len.at(bounds).saturating_add(1));
        let values = groups.saturating_mul(many.at(bounds));
        // Positions in the lists are 32-bit numbers, and groups are counted along the second axis of a grid.
        let fits = starts.max(values) < i64::from(i32::MAX / 4) && groups <= i64::from(u16::MAX);
        fits.then(|| Groups { dims, list_strides, starts_bytes: bytes(starts), values_bytes: bytes(values) })
    }

    fn pointers(params: &mut Params, (starts, lists): (Word, Word)) -> String {
        let (starts, lists) = (params.address(starts), params.address(lists));
        format!("int* const starts = reinterpret_cast<int*>({starts});\nint* const lists = reinterpret_cast<int*>({lists});\n")
    }

    /// One warp for each range of places looks through the indices of its group: counts the values of each place, or, with
    /// what the counts added up to, lists them in order.
    fn fill(&self, params: &mut Params, spec: &Spec, scatter: &ScatterAdd, lists: bool, words: (Word, Word)) -> Function {
        let axis = scatter.axis;
        let storage = Storage::of(scatter.index.dtype);
        let mut body = params.pointer("indices", &format!("const {}", storage.ty), 1) + &Groups::pointers(params, words);
        let (len, many) = (params.size(spec.dims[axis]), params.size(scatter.space[axis]));
        let _ = writeln!(body, "const idx len = {len}, many = {many}, first = idx(blockIdx.x) * {PLACES};");
        let _ = writeln!(body, "const int lane = threadIdx.x;\nconst idx group = blockIdx.y;\n__shared__ int cursors[{PLACES}];");
        let (text, mut at) = params.coordinates("group", &self.dims, "c");
        body += &text;
        at.push("s".into());
        at.resize(spec.dims.len(), "0".into());
        let index = params.dot(&scatter.index.strides, &at, scatter.index.offset);
        let from = if lists { "first + t < len ? starts[group * (len + 1) + first + t] : 0" } else { "0" };
        let _ = writeln!(body, "for (int t = lane; t < {PLACES}; t += 32) cursors[t] = {from};\n__syncwarp();");
        let _ = writeln!(body, "for (idx from = 0; from < many; from += 32) {{\nconst idx s = from + lane;");
        let _ = writeln!(body, "const idx place = s < many ? idx({}) : -1;", storage.widen(&format!("indices[{index}]")));
        let _ = writeln!(body, "const bool mine = place >= first && place < first + {PLACES} && place < len;");
        if lists {
            // One lane after the other: lists are in the order of the values.
            body += "unsigned waiting = __ballot_sync(0xffffffffu, mine);\nwhile (waiting) {\n";
            body += "if (lane == __ffs(int(waiting)) - 1) lists[cursors[place - first]++] = int(s);\n";
            body += "waiting &= waiting - 1;\n__syncwarp();\n}\n}\n";
        } else {
            body += "if (mine) atomicAdd(&cursors[place - first], 1);\n}\n__syncwarp();\n";
            let _ = writeln!(body, "for (int t = lane; t < {PLACES}; t += 32)");
            body += "if (first + t < len) starts[group * (len + 1) + first + t] = cursors[t];\n";
        }
        params.function(if lists { "scatter_fill" } else { "scatter_count" }, 32, &body)
    }

    /// A block for each group turns counts into where lists start.
    fn scan(params: &mut Params, spec: &Spec, scatter: &ScatterAdd, starts: Word) -> Function {
        let address = params.address(starts);
        let mut body = format!("int* const starts = reinterpret_cast<int*>({address});\n");
        let (len, many) = (params.size(spec.dims[scatter.axis]), params.size(scatter.space[scatter.axis]));
        let _ = writeln!(body, "const idx len = {len}, group = blockIdx.x, many = {many};\nint* const own = starts + group * (len + 1);");
        let _ = writeln!(body, "__shared__ int sums[{THREADS}];\nscan_counts<{THREADS}>(own, len, int(group * many), sums);");
        params.function("scatter_scan", THREADS, &body)
    }
}
