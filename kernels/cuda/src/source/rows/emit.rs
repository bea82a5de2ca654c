//! The source text of kernels with reductions.

use std::fmt::Write as _;
use std::sync::Arc;

use slabwise_kernels::size::{Env, Size};
use slabwise_kernels::spec::{Inst, Store, ValueId};

use super::levels::Levels;
use super::{Keep, Mapping};
use crate::abi::{Function, Word};
use crate::code::{Code, Fold, Site, lane_type};
use crate::source::params::{Number, Params};
use crate::source::space::{Point, Space, Via, pointers, points};

/// Registers that a thread fills with loads before it uses the first of them: in blocks of fewer
/// than 1,024 threads, and of 1,024, which have 64 registers each.
const AHEAD: [i64; 2] = [24, 8];
/// Most iterations whose loads a thread batches.
const TURNS: i64 = 8;
/// Registers of a multiprocessor; those of a thread if the compiler chooses, which rather spills a
/// few values than take more; and those for anything but values and coordinates.
const REGISTERS: [i64; 3] = [65_536, 64, 16];

/// The emitter of one spec's kernels.
pub struct Emitter<'a> {
    pub code: &'a Code<'a>,
    pub levels: &'a Levels,
    pub space: &'a Space,
    /// The number of kept axes of the space.
    pub kept: usize,
    pub mapping: &'a Mapping,
}

/// The workspace of rows that are split into parts: for each reduction the accumulators of every
/// row's parts, then those of the whole rows, if a later pass reads them.
pub struct Part {
    parts: i64,
    /// Byte offsets of a reduction's partial results and of its results, by value.
    places: Vec<Option<(u64, Option<u64>)>>,
    bytes: u64,
    /// Points of a part.
    len: Number,
}

impl Part {
    pub fn new(emitter: &Emitter, rows: i64) -> Part {
        let (parts, step) = (
            emitter.mapping.parts,
            i64::from(emitter.mapping.team) * emitter.mapping.vector,
        );
        let mut bytes = 0u64;
        let mut take = |count: i64| {
            let at = bytes;
            // A rank is the widest accumulator.
            bytes = (bytes + count as u64 * 8).next_multiple_of(256);
            at
        };
        let (code, levels) = (emitter.code, emitter.levels);
        let needed = |i: usize| code.needed[i] && code.spec.code[i].is_reduce();
        let last = levels.passes(code).last().copied();
        let mut place = |i: usize| {
            let read_later = Some(levels.level[i]) <= last;
            (take(rows * parts), read_later.then(|| take(rows)))
        };
        let places = (0..code.spec.code.len())
            .map(|i| needed(i).then(|| place(i)))
            .collect();
        let reduced = emitter.space.dims[emitter.kept..].to_vec();
        let len = move |env: &Env| {
            let each = (points(&reduced, env) as u64).div_ceil(parts as u64);
            each.next_multiple_of(step as u64) as i64
        };
        Part {
            parts,
            places,
            bytes,
            len: Arc::new(len),
        }
    }

    /// The workspace, bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Declares the pointers `p{i}` to the partial results and `r{i}` to the results of reduction
    /// `i`.
    fn pointers(&self, params: &mut Params, i: usize, fold: Fold) -> String {
        let Some((partial, result)) = self.places[i] else {
            return String::new();
        };
        let mut text = String::new();
        let pointers = [("p", Some(partial)), ("r", result)];
        for (name, at) in pointers.into_iter().filter_map(|(n, at)| Some((n, at?))) {
            let address = params.address(Word::Workspace(at));
            let _ = writeln!(
                text,
                "{0}* const {name}{i} = reinterpret_cast<{0}*>({address});",
                fold.ty()
            );
        }
        text
    }
}

/// The work of the last block of a row's parts, after a pass.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Joins {
    Nothing,
    /// It combines the results of the parts, for the passes that follow.
    Results,
    /// It combines them, and writes the stores that happen once per row.
    Stores,
}

/// A point of a pass: values kept by earlier passes are read from their arrays.
struct InPass<'a> {
    via: Via<'a>,
    kept: &'a dyn Fn(ValueId) -> Option<String>,
}

impl Site for InPass<'_> {
    fn read(&self, k: u16) -> String {
        self.via.read(k)
    }
    fn write(&self, k: u16) -> String {
        self.via.write(k)
    }
    fn state(&self, k: u16) -> String {
        self.via.state(k)
    }
    fn index(&self, k: u16) -> String {
        self.via.index(k)
    }
    fn value(&self, v: ValueId) -> String {
        (self.kept)(v).unwrap_or_else(|| format!("v{v}"))
    }
}

impl Emitter<'_> {
    /// Whether no pass loads an element that an earlier pass has loaded.
    fn keeps(&self) -> bool {
        let keeps_nothing = self.mapping.parts == 1 && !self.levels.crossing.contains(&true);
        self.mapping.keep != Keep::Recompute || keeps_nothing
    }

    fn crossing(&self) -> impl Iterator<Item = usize> {
        (0..self.levels.crossing.len()).filter(|&i| self.levels.crossing[i] && self.keeps())
    }

    /// Bytes of dynamic shared memory.
    pub fn shared_bytes(&self) -> u32 {
        match self.mapping.keep {
            Keep::Shared(len) => (4 * len * self.crossing().count() as i64) as u32,
            _ => 0,
        }
    }

    /// Whether a store has a value per row.
    pub fn stores_folded(&self) -> bool {
        self.code
            .spec
            .stores
            .iter()
            .any(|s| self.code.per_row[usize::from(s.value)])
    }

    /// All passes in one kernel, row after row.
    pub fn whole(&self, params: &mut Params) -> Function {
        let mapping = self.mapping;
        let mut body = pointers(self.code, params);
        body += &self.counts(params);
        body += &self.member();
        body += &self.declare_kept();
        body += &self.declare_shared();
        let each = mapping.rows();
        let _ = writeln!(
            body,
            "for (idx base = idx(blockIdx.x) * {each}; base < rows; base += idx(gridDim.x) * {each}) {{"
        );
        body += "const bool live = base + local < rows;\nconst idx row = live ? base + local : rows - 1;\nconst idx n = live ? len : 0;\n";
        body += &self.row_coordinates(params);
        for l in 0..=self.levels.depth {
            body += &self.folded(params, l, l);
            if self.levels.has_pass(self.code, l) {
                body += &self.pass(params, l, "0");
                for (i, _, fold) in self.levels.folds(self.code, l).collect::<Vec<_>>() {
                    body += &self.combine(i, fold);
                    let _ = writeln!(
                        body,
                        "const {} v{i} = {};",
                        lane_type(self.code.lanes[i]),
                        fold.result(&format!("f{i}"))
                    );
                }
            }
        }
        let _ = writeln!(
            body,
            "if (live && m == 0) {{\n{}}}",
            self.folded_stores(params)
        );
        if self.uses_shared() {
            // The next row must not overwrite data that is still being read.
            body += "__syncthreads();\n";
        }
        body += "}\n";
        params.function("rows", self.launch_bounds(), &body)
    }

    /// The threads of a block, and after a comma the number of blocks for which a thread has enough
    /// registers, if the compiler might choose too few.
    fn launch_bounds(&self) -> String {
        let threads = i64::from(self.mapping.threads);
        let kept = match self.mapping.keep {
            Keep::Registers(each) => each * self.crossing().count() as i64,
            _ => 0,
        };
        let axes = self.space.dims.len() - self.kept;
        let of_pass = |l| {
            let loads = self.loads(&self.levels.full(self.code, l, self.keeps()));
            let turns = self.turns(&loads);
            // Coordinates of each iteration, of the next one, and their increments.
            let coordinates = if axes > 1 {
                axes as i64 * (turns + 2)
            } else {
                0
            };
            let sums = self.levels.folds(self.code, l).count() as i64;
            turns * self.loaded(&loads) + coordinates + sums + self.live_row_values(l)
        };
        let [all, chosen, other] = REGISTERS;
        let most = (0..=self.levels.depth).map(of_pass).max();
        let needed = kept + most.unwrap_or(0) + other;
        if kept > 0 && needed > chosen {
            format!("{threads}, {}", (all / (threads * needed)).max(1))
        } else {
            threads.to_string()
        }
    }

    /// The values of a row that are known in pass `l` and read by it at every point or later.
    fn live_row_values(&self, l: usize) -> i64 {
        let (code, levels) = (self.code, self.levels);
        let mut is_read = vec![false; code.spec.code.len()];
        let mut read = |values: &[ValueId]| {
            values
                .iter()
                .for_each(|&value| is_read[usize::from(value)] = true);
        };
        for later in l..=levels.depth {
            for i in levels.full(code, later, self.keeps()) {
                read(code.spec.code[i].arguments());
            }
        }
        for i in code.needed().filter(|&i| levels.level[i] > l) {
            read(code.spec.code[i].arguments());
        }
        code.spec.stores.iter().for_each(|s| read(&[s.value]));
        let known = |&i: &usize| {
            let is_number = matches!(code.spec.code[i], Inst::Const(_));
            code.per_row[i] && is_read[i] && levels.level[i] <= l && !is_number
        };
        code.needed().filter(known).count() as i64
    }

    /// One pass over a part of every row. The last block of a row's parts combines their results, if
    /// `joins`; after the last pass, it writes the stores that happen once per row.
    pub fn part(&self, params: &mut Params, l: usize, joins: Joins, part: &Part) -> Function {
        let mapping = self.mapping;
        let mut body = pointers(self.code, params);
        body += &self.counts(params);
        body += &self.member();
        body += &self.declare_shared();
        body += &self.workspace(params, l, part);
        let (each, parts) = (mapping.rows(), part.parts);
        let _ = writeln!(
            body,
            "const idx group = idx(blockIdx.x) / {parts}, part = idx(blockIdx.x) % {parts}, base = group * {each};"
        );
        body += "const bool live = base + local < rows;\nconst idx row = live ? base + local : rows - 1;\n";
        let _ = writeln!(
            body,
            "const idx start = part * {};",
            params.number(&part.len)
        );
        let _ = writeln!(
            body,
            "const idx n = live ? min(len, start + {}) : 0;",
            params.number(&part.len)
        );
        body += &self.row_coordinates(params);
        body += &self.results(l);
        body += &self.folded(params, 0, l);
        body += &self.pass(params, l, "start");
        for (i, _, fold) in self.levels.folds(self.code, l).collect::<Vec<_>>() {
            body += &self.combine(i, fold);
            let _ = writeln!(
                body,
                "if (live && m == 0) p{i}[row * {parts} + part] = f{i};"
            );
        }
        if joins != Joins::Nothing {
            let counters = params.address(Word::Counters(0));
            let _ = writeln!(
                body,
                "if (!have_arrived(reinterpret_cast<unsigned*>({counters}) + group, {parts})) return;"
            );
            body += &self.join(params, l, joins, part);
        }
        params.function("rows_part", mapping.threads, &body)
    }

    /// Combines the partial results of pass `l` of a block's rows, a warp for each row.
    fn join(&self, params: &mut Params, l: usize, joins: Joins, part: &Part) -> String {
        let mapping = self.mapping;
        let (parts, wave) = (part.parts, mapping.wave);
        let mut text = format!(
            "const int lane = threadIdx.x % {wave};\nfor (idx local = threadIdx.x / {wave}; local < {} && base + local < rows; local += {}) {{\nconst idx row = base + local;\n",
            mapping.rows(),
            mapping.threads / wave
        );
        text += &self.row_coordinates(params);
        text += &self.results(l);
        for (i, _, fold) in self.levels.folds(self.code, l).collect::<Vec<_>>() {
            let ty = fold.ty();
            let _ = writeln!(
                text,
                "{ty} f{i} = {};\nfor (int q = lane; q < {parts}; q += {wave}) {{",
                fold.identity()
            );
            let _ = writeln!(
                text,
                "const {ty} other = p{i}[row * {parts} + q];\nf{i} = {};\n}}",
                fold.join(&format!("f{i}"), "other")
            );
            text += &shuffles(i, fold, wave);
            let _ = match joins {
                Joins::Stores => writeln!(
                    text,
                    "const {} v{i} = {};",
                    lane_type(self.code.lanes[i]),
                    fold.result(&format!("f{i}"))
                ),
                _ => writeln!(text, "if (lane == 0) r{i}[row] = f{i};"),
            };
        }
        if joins == Joins::Stores {
            text += &self.folded(params, 0, self.levels.depth);
            let _ = writeln!(text, "if (lane == 0) {{\n{}}}", self.folded_stores(params));
        }
        text + "}\n"
    }

    fn counts(&self, params: &mut Params) -> String {
        let (rows, reduced) = (
            self.space.dims[..self.kept].to_vec(),
            self.space.dims[self.kept..].to_vec(),
        );
        let rows: Number = Arc::new(move |env| points(&rows, env));
        let fixed = reduced.iter().all(|d| d.as_fixed().is_some());
        let len = if fixed {
            points(&reduced, &Env::default()).to_string()
        } else {
            let number: Number = Arc::new(move |env| points(&reduced, env));
            params.number(&number)
        };
        format!("const idx rows = {}, len = {len};\n", params.number(&rows))
    }

    /// Declares the number `local` of a thread's row in the block, and its number `m` in the team.
    fn member(&self) -> String {
        let (team, rows) = (self.mapping.team, self.mapping.rows());
        match self.mapping.adjacent {
            true => format!("const int local = threadIdx.x / {team}, m = threadIdx.x % {team};\n"),
            false => format!("const int local = threadIdx.x % {rows}, m = threadIdx.x / {rows};\n"),
        }
    }

    fn declare_kept(&self) -> String {
        let mut text = String::new();
        match self.mapping.keep {
            Keep::Recompute => {}
            Keep::Registers(each) => {
                for i in self.crossing() {
                    let _ = writeln!(text, "{} k{i}[{each}];", lane_type(self.code.lanes[i]));
                }
            }
            Keep::Shared(len) => {
                text += "SHARED_BYTES(unsigned char, pool);\n";
                for (at, i) in self.crossing().enumerate() {
                    let ty = lane_type(self.code.lanes[i]);
                    let _ = writeln!(
                        text,
                        "{ty}* const k{i} = reinterpret_cast<{ty}*>(pool + {});",
                        4 * len * at as i64
                    );
                }
            }
        }
        text
    }

    /// Whether teams exchange values in shared memory.
    fn uses_shared(&self) -> bool {
        let mapping = self.mapping;
        if mapping.adjacent {
            mapping.team > mapping.wave
        } else {
            mapping.team > 1
        }
    }

    fn declare_shared(&self) -> String {
        let mapping = self.mapping;
        let mut text = String::new();
        if !self.uses_shared() {
            return text;
        }
        for l in 0..=self.levels.depth {
            for (i, _, fold) in self.levels.folds(self.code, l) {
                let count = if mapping.adjacent {
                    mapping.team / mapping.wave
                } else {
                    mapping.threads
                };
                let _ = writeln!(text, "__shared__ {} s{i}[{count}];", fold.ty());
            }
        }
        text
    }

    fn row_coordinates(&self, params: &mut Params) -> String {
        params
            .coordinates("row", &self.space.dims[..self.kept], "c")
            .0
    }

    fn kept_names(&self) -> Vec<String> {
        (0..self.kept).map(|axis| format!("c{axis}")).collect()
    }

    /// The point of a row at the start of the reduced axes.
    fn row_point(&self, params: &mut Params) -> Point {
        let mut at = self.kept_names();
        at.resize(self.space.dims.len(), "0".into());
        Point::new(self.space, params, &at, "")
    }

    /// Declares the per-row values of these levels, except the reductions themselves.
    fn folded(&self, params: &mut Params, from: usize, to: usize) -> String {
        let point = self.row_point(params);
        let wanted = |i: &usize| {
            self.code.per_row[*i]
                && (from..=to).contains(&self.levels.level[*i])
                && !self.code.spec.code[*i].is_reduce()
        };
        self.code
            .needed()
            .filter(wanted)
            .map(|i| self.code.statement(i, &point))
            .collect()
    }

    fn folded_stores(&self, params: &mut Params) -> String {
        let point = self.row_point(params);
        self.code
            .spec
            .stores
            .iter()
            .filter(|s| self.code.per_row[usize::from(s.value)])
            .map(|s| self.code.store(s, &point))
            .collect()
    }

    /// Declares the results of the passes before `l` from the workspace.
    fn results(&self, l: usize) -> String {
        let mut text = String::new();
        for before in 0..l {
            for (i, _, fold) in self.levels.folds(self.code, before) {
                let _ = writeln!(text, "const {} f{i} = r{i}[row];", fold.ty());
                let _ = writeln!(
                    text,
                    "const {} v{i} = {};",
                    lane_type(self.code.lanes[i]),
                    fold.result(&format!("f{i}"))
                );
            }
        }
        text
    }

    /// Declares pointers into the workspace for the reductions of the passes up to `l`.
    fn workspace(&self, params: &mut Params, l: usize, part: &Part) -> String {
        let folds: Vec<_> = (0..=l)
            .flat_map(|l| self.levels.folds(self.code, l).collect::<Vec<_>>())
            .collect();
        folds
            .into_iter()
            .map(|(i, _, fold)| part.pointers(params, i, fold))
            .collect()
    }

    /// Pass `l` over the points from `start` below `n` of a row, distributed over the team:
    /// computes the accumulators `f{i}`.
    ///
    /// A thread batches several iterations: it loads all their operands before it stores anything,
    /// because the compiler cannot know that a store overwrites no operand of a later iteration. (A
    /// result may share memory with an operand; then each element replaces itself.) Coordinates
    /// along several reduced axes are advanced from iteration to iteration, without divisions.
    fn pass(&self, params: &mut Params, l: usize, start: &str) -> String {
        let (code, mapping) = (self.code, self.mapping);
        let vector = mapping.vector;
        let step = i64::from(mapping.team) * vector;
        let full = self.levels.full(code, l, self.keeps());
        let loads = self.loads(&full);
        let turns = self.turns(&loads);
        let mut text = String::new();
        for (i, _, fold) in self.levels.folds(code, l) {
            let _ = writeln!(text, "{} f{i} = {};", fold.ty(), fold.identity());
        }
        let reduced = &self.space.dims[self.kept..];
        let (decode, starts) = params.coordinates("first", reduced, "start");
        let (cursor, advance) = advancing(params, reduced, &starts, step);
        let _ = writeln!(
            text,
            "if (const idx first = {start} + m * {vector}; first < n) {{\n{decode}{cursor}"
        );
        match mapping.keep {
            Keep::Registers(each) => {
                let _ = writeln!(
                    text,
                    "#pragma unroll\nfor (int e = 0; e < {}; e += {turns}) {{",
                    each / vector
                );
                let _ = writeln!(text, "const idx g = first + e * {step};");
            }
            _ => {
                let _ = writeln!(
                    text,
                    "#pragma unroll 1\nfor (idx g = first; g < n; g += {}) {{",
                    turns * step
                );
            }
        }
        let turn = format!("#pragma unroll\nfor (int t = 0; t < {turns}; ++t) {{\n");
        // The arrays that a thread keeps end with the last iteration.
        let wanted = match mapping.keep {
            Keep::Registers(each) if each / vector % turns != 0 => {
                format!("e + t < {} && g + t * {step} < n", each / vector)
            }
            _ => format!("g + t * {step} < n"),
        };
        let mut at = self.kept_names();
        if reduced.len() == 1 {
            at.push(format!("(g + t * {step})"));
        } else {
            (0..reduced.len()).for_each(|axis| text += &format!("idx j{axis}[{turns}];\n"));
            at.extend((0..reduced.len()).map(|axis| format!("j{axis}[t]")));
        }
        let last = self.space.dims.len() - 1;
        let moved = |k: u16| vector > 1 && self.space.stride(k, last).is(1);
        let vector_of = |k: u16| format!("Vec<{}, {vector}>", code.storage(k).ty);
        let ahead = Point::new(self.space, params, &at, "");
        for &k in &loads {
            let ty = if moved(k) {
                vector_of(k)
            } else {
                code.storage(k).ty.to_string()
            };
            let _ = writeln!(text, "{ty} x{k}[{turns}];");
        }
        if !loads.is_empty() || reduced.len() > 1 {
            text += &turn;
            if reduced.len() > 1 {
                (0..reduced.len()).for_each(|axis| text += &format!("j{axis}[t] = at{axis};\n"));
                text += &advance;
            }
            let _ = writeln!(text, "if ({wanted}) {{");
            for &k in &loads {
                let value = if moved(k) {
                    format!("load_vec<{}>(a{k} + ({}))", vector_of(k), ahead.element(k))
                } else {
                    ahead.read(k)
                };
                let _ = writeln!(text, "x{k}[t] = {value};");
            }
            text += "}\n}\n";
        }
        let _ = writeln!(text, "{turn}if ({wanted}) {{");
        if vector > 1 {
            for store in self.full_stores(l) {
                let _ = writeln!(text, "{} y{};", vector_of(store.operand), store.operand);
            }
            let _ = writeln!(
                text,
                "#pragma unroll\nfor (int u = 0; u < {vector}; ++u) {{"
            );
            at[last] = format!("({} + u)", at[last]);
        }
        // The position of element `u` of this iteration in the row, and among those that this
        // thread keeps.
        let (position, own) = match vector {
            1 => (format!("g + t * {step}"), "e + t".into()),
            _ => (
                format!("g + t * {step} + u"),
                format!("(e + t) * {vector} + u"),
            ),
        };
        let slot = if matches!(mapping.keep, Keep::Shared(_)) {
            position.clone()
        } else {
            own
        };
        let kept = |v: ValueId| {
            self.levels
                .is_kept(usize::from(v), l, self.keeps())
                .then(|| format!("k{v}[{slot}]"))
        };
        let site = InPass {
            via: Via {
                point: Point::new(self.space, params, &at, ""),
                read: &|k| {
                    Some(if moved(k) {
                        format!("x{k}[t].v[u]")
                    } else {
                        format!("x{k}[t]")
                    })
                },
                write: &|k| moved(k).then(|| format!("y{k}.v[u]")),
            },
            kept: &kept,
        };
        for &i in &full {
            text += &code.statement(i, &site);
            if self.keeps() && self.levels.crossing[i] && self.levels.level[i] == l {
                let _ = writeln!(text, "k{i}[{slot}] = v{i};");
            }
        }
        for (i, arg, fold) in self.levels.folds(code, l) {
            let lifted = fold.lift(&site.value(arg as ValueId), &position);
            let _ = writeln!(
                text,
                "const {} t{i} = {lifted};\nf{i} = {};",
                fold.ty(),
                fold.join(&format!("f{i}"), &format!("t{i}"))
            );
        }
        self.full_stores(l)
            .for_each(|s| text += &code.store(s, &site));
        if vector > 1 {
            text += "}\n";
            for store in self.full_stores(l) {
                let _ = writeln!(
                    text,
                    "store_vec(a{0} + ({1}), y{0});",
                    store.operand,
                    ahead.element(store.operand)
                );
            }
        }
        text += "}\n}\n}\n}\n";
        text
    }

    /// The operands that these values load, each once.
    fn loads(&self, full: &[usize]) -> Vec<u16> {
        let loaded = |&i: &usize| {
            if let Inst::Load(k) = self.code.spec.code[i] {
                Some(k)
            } else {
                None
            }
        };
        let mut list: Vec<u16> = full.iter().filter_map(loaded).collect();
        list.sort_unstable();
        list.dedup();
        list
    }

    /// Registers that the loads of an iteration fill.
    fn loaded(&self, loads: &[u16]) -> i64 {
        let (vector, last) = (self.mapping.vector, self.space.dims.len() - 1);
        let registers = |&k: &u16| {
            let elements = if self.space.stride(k, last).is(1) {
                vector
            } else {
                1
            };
            (elements * self.code.spec.operands[usize::from(k)].dtype.bytes() as i64 + 3) / 4
        };
        loads.iter().map(registers).sum()
    }

    /// The number of iterations that a thread batches: as many as have loads that fit in its
    /// registers.
    fn turns(&self, loads: &[u16]) -> i64 {
        let ahead = AHEAD[usize::from(self.mapping.threads >= 1024)];
        let fit = ahead / self.loaded(loads).max(1);
        let most = fit.min(TURNS).min(self.mapping.turns).max(1);
        // The largest power of two that is not larger.
        1 << most.ilog2()
    }

    /// The stores of full values in pass `l`.
    fn full_stores(&self, l: usize) -> impl Iterator<Item = &Store> {
        self.levels.stores(self.code, l, self.keeps())
    }

    /// Combines the accumulators of a team, so that every thread has the result.
    fn combine(&self, i: usize, fold: Fold) -> String {
        let mapping = self.mapping;
        let rows = mapping.rows();
        let mut text = String::new();
        if mapping.adjacent {
            let wave = mapping.wave;
            text += &shuffles(i, fold, mapping.team.min(wave));
            if mapping.team > wave {
                let _ = writeln!(
                    text,
                    "if (m % {wave} == 0) s{i}[m / {wave}] = f{i};\n__syncthreads();\nf{i} = s{i}[0];"
                );
                // Eight at a time: in blocks of 1,024 threads more have no registers beside the values
                // of the row.
                let _ = writeln!(
                    text,
                    "#pragma unroll 8\nfor (int q = 1; q < {}; ++q) {{",
                    mapping.team / wave
                );
                let _ = writeln!(
                    text,
                    "const {} other = s{i}[q];\nf{i} = {};\n}}",
                    fold.ty(),
                    fold.join(&format!("f{i}"), "other")
                );
            }
        } else if mapping.team > 1 {
            let _ = writeln!(
                text,
                "s{i}[threadIdx.x] = f{i};\n__syncthreads();\nf{i} = s{i}[local];"
            );
            let _ = writeln!(
                text,
                "#pragma unroll\nfor (int q = 1; q < {}; ++q) {{",
                mapping.team
            );
            let _ = writeln!(
                text,
                "const {} other = s{i}[q * {rows} + local];\nf{i} = {};\n}}",
                fold.ty(),
                fold.join(&format!("f{i}"), "other")
            );
        }
        text
    }
}

/// Combines accumulators `f{i}` of groups of neighbouring lanes.
fn shuffles(i: usize, fold: Fold, lanes: u32) -> String {
    if lanes == 1 {
        return String::new();
    }
    let join = fold.join(&format!("f{i}"), "other");
    format!(
        "#pragma unroll\nfor (int o = {}; o > 0; o >>= 1) {{\nconst {} other = from_lane_xor(f{i}, o);\nf{i} = {join};\n}}\n",
        lanes / 2,
        fold.ty()
    )
}

/// Declares the coordinates `at{axis}` of a point, starting at these, and the increments that
/// advance them by `step` points; also returns the statements that do so. Empty for a single axis.
fn advancing(params: &mut Params, dims: &[Size], starts: &[String], step: i64) -> (String, String) {
    if dims.len() == 1 {
        return (String::new(), String::new());
    }
    let (mut declared, by) = params.coordinates(&format!("idx({step})"), dims, "by");
    let mut text = String::new();
    for axis in (0..dims.len()).rev() {
        let _ = writeln!(declared, "idx at{axis} = {};", starts[axis]);
        let _ = writeln!(text, "at{axis} += {};", by[axis]);
        if axis > 0 {
            let size = params.divisor(dims[axis]);
            let _ = writeln!(
                text,
                "if (at{axis} >= {size}) {{\nat{axis} -= {size};\n++at{};\n}}",
                axis - 1
            );
        }
    }
    (declared, text)
}
