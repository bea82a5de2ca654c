//! Epilogue sums: sums over the rows of a product's result, one for each column. Those of a thread, a
//! block or all of them are its totals.
//!
//! The sums of a norm's statistics, and of its gradients, are of values that a product's kernel has
//! at hand as it writes its result. Each block adds them for the rows of its tile, and the last
//! blocks add those of all tiles in a fixed order (`totals.cuh`), so that no other kernel reads the
//! result again.

use slabwise_kernels::dtype::Lane;
use slabwise_kernels::size::Env;
use slabwise_kernels::spec::{Inst, ReduceOp, Spec, SpecError, Store, ValueId};

use super::emit::{Writer, number};
use super::problem::{Count, Problem};
use super::tiles::Kernel;
use crate::abi::Word;
use crate::code::{Code, Site};
use crate::lowered::WORKSPACE_ALIGN;

/// Most floats that a thread keeps for its totals.
const FLOATS_MAX: usize = 8;
/// Most tiles whose totals one block adds alone: reading those of more takes longer than a second
/// level of blocks.
const ALONE: i64 = 64;

/// The reductions of an epilogue.
pub(super) struct Totals {
    /// Plain sums: the reduction and its argument.
    sums: Vec<(ValueId, ValueId)>,
    /// Values whose mean and squared deviations are summed: the argument of such a reduction, and
    /// the reductions that are one.
    spreads: Vec<(ValueId, Vec<ValueId>)>,
    /// Sums of a value among the spreads, which follow from its mean.
    of_spreads: Vec<(ValueId, usize)>,
    /// For each value whether a point's stores or the reductions need it.
    at_points: Vec<bool>,
    /// For each value whether the stores of a column need it.
    in_columns: Vec<bool>,
    /// For each value whether it exists once per column.
    per_column: Vec<bool>,
}

impl Totals {
    /// The reductions of a product; `None` if it has none.
    pub fn of(code: &Code) -> Result<Option<Totals>, SpecError> {
        let spec = code.spec;
        if spec.reduced == 0 {
            return Ok(None);
        }
        let per_column = spec.per_row();
        let (mut at_points, mut in_columns) =
            (vec![false; spec.code.len()], vec![false; spec.code.len()]);
        let mut follows: Vec<bool> = Vec::with_capacity(spec.code.len());
        for (i, inst) in spec.code.iter().enumerate() {
            let mut arguments = inst.arguments().iter();
            let depends = arguments.any(|&a| follows[usize::from(a)]);
            if depends && (inst.is_reduce() || !per_column[i]) {
                return Err(refused("work at points on the sums of an epilogue"));
            }
            follows.push(inst.is_reduce() || depends);
        }
        for store in &spec.stores {
            let value = usize::from(store.value);
            match per_column[value] {
                true => in_columns[value] = true,
                false => at_points[value] = true,
            }
        }
        // Arguments precede their instruction. Those of reductions are computed at points.
        for (i, inst) in spec.code.iter().enumerate().rev() {
            for &argument in inst.arguments() {
                let at = usize::from(argument);
                at_points[at] |= at_points[i] || inst.is_reduce() && in_columns[i];
                in_columns[at] |= in_columns[i] && !inst.is_reduce();
            }
        }
        let mut totals = Totals {
            sums: Vec::new(),
            spreads: Vec::new(),
            of_spreads: Vec::new(),
            at_points,
            in_columns,
            per_column,
        };
        let reductions = || {
            code.needed().filter_map(|i| match spec.code[i] {
                Inst::Reduce(op, arg) => Some((i as ValueId, op, arg)),
                _ => None,
            })
        };
        for (value, op, arg) in reductions() {
            if code.lane(arg) != Lane::F32 {
                return Err(refused("sums of integers in an epilogue"));
            }
            match op {
                ReduceOp::Sum => {}
                ReduceOp::SquaredDeviations => {
                    match totals.spreads.iter_mut().find(|(of, _)| *of == arg) {
                        Some((_, list)) => list.push(value),
                        None => totals.spreads.push((arg, vec![value])),
                    }
                }
                _ => return Err(refused("reductions other than sums in an epilogue")),
            }
        }
        for (value, op, arg) in reductions() {
            if op == ReduceOp::Sum {
                match totals.spreads.iter().position(|(of, _)| *of == arg) {
                    Some(spread) => totals.of_spreads.push((value, spread)),
                    None => totals.sums.push((value, arg)),
                }
            }
        }
        if totals.words() > FLOATS_MAX {
            return Err(refused("so many sums in an epilogue"));
        }
        Ok(Some(totals))
    }

    /// Floats of a column.
    fn words(&self) -> usize {
        self.sums.len() + 2 * self.spreads.len()
    }

    /// The name of the type of a thread's totals.
    fn parameters(&self) -> String {
        format!("{}, {}", self.sums.len(), self.spreads.len())
    }

    /// Declares the totals of the thread.
    pub fn declaration(&self) -> String {
        format!("ThreadTotals<{}> totals;\n", self.parameters())
    }

    /// The operands that are read at points, each once.
    pub fn loads(&self, code: &Code) -> Vec<u16> {
        let read_at_points = |k: &u16| {
            let insts = code.spec.code.iter().zip(&self.at_points);
            insts
                .into_iter()
                .any(|(inst, at)| *at && *inst == Inst::Load(*k))
        };
        code.loads().into_iter().filter(read_at_points).collect()
    }

    /// The program at a point: stores, and the values that the thread adds.
    pub fn point(&self, code: &Code, site: &dyn Site) -> String {
        let mut text = String::new();
        for i in code.needed().filter(|&i| self.at_points[i]) {
            text += &code.statement(i, site);
        }
        for store in self.stores(code.spec, false) {
            text += &code.store(store, site);
        }
        for (i, (_, arg)) in self.sums.iter().enumerate() {
            text += &format!("totals.add<{i}>({});\n", site.value(*arg));
        }
        for (i, (arg, _)) in self.spreads.iter().enumerate() {
            text += &format!("totals.spread<{i}>({});\n", site.value(*arg));
        }
        text + "++totals.count;\n"
    }

    /// Stores of columns, or of points.
    fn stores<'a>(&'a self, spec: &'a Spec, columns: bool) -> impl Iterator<Item = &'a Store> {
        let is_wanted = move |store: &&Store| self.per_column[usize::from(store.value)] == columns;
        spec.stores.iter().filter(is_wanted)
    }

    /// Declares `finish(column, all)`, which does the rest of the program for a column, from its
    /// totals. `coordinates` declares the point's.
    pub fn column(&self, code: &Code, site: &dyn Site, coordinates: &str) -> String {
        let mut stores = String::new();
        let mut declare = |value: ValueId, total: String| {
            stores += &format!("const float {} = {total};\n", site.value(value));
        };
        for (i, (value, _)) in self.sums.iter().enumerate() {
            declare(*value, format!("all.of[{i}]"));
        }
        let mean = |spread: usize| self.sums.len() + 2 * spread;
        for (i, (_, values)) in self.spreads.iter().enumerate() {
            for value in values {
                declare(*value, format!("all.of[{}]", mean(i) + 1));
            }
        }
        for (value, spread) in &self.of_spreads {
            declare(
                *value,
                format!("all.of[{}] * float(all.count)", mean(*spread)),
            );
        }
        let is_rest = |&i: &usize| self.in_columns[i] && !code.spec.code[i].is_reduce();
        for i in code.needed().filter(is_rest) {
            stores += &code.statement(i, site);
        }
        for store in self.stores(code.spec, true) {
            stores += &code.store(store, site);
        }
        let parameters = self.parameters();
        format!(
            "const auto finish = [&](int column, const Totals<{parameters}>& all) {{\n\
             const int row = 0;\n{coordinates}{stores}}};\n"
        )
    }

    /// The statement after the last point: adds the totals of all blocks and passes them to
    /// `finish`. The arguments include the threads, rows and columns of a tile.
    pub fn finish(writer: &mut Writer, tile: [i64; 3], shared: Shared) -> String {
        let [threads, rows, columns] = tile;
        let partial = writer.params.address(Word::Workspace(shared.partial));
        let counters = writer.params.address(Word::Counters(shared.counters));
        let problem = writer.problem.clone();
        let down = move |env: &Env| (problem.sizes(env)[0] + rows - 1) / rows;
        let group = writer.params.number(&number(move |env| group(down(env))));
        format!(
            "finish_totals<{threads}, {rows}, {columns}>(totals, share, shared, reinterpret_cast<float*>({partial}), \
             reinterpret_cast<unsigned*>({counters}), int({group}), finish);\n"
        )
    }

    /// Bytes of shared memory of a block of so many threads.
    pub fn shared_bytes(&self, threads: i64) -> i64 {
        4 * threads * (self.words() as i64 + 1)
    }
}

/// The memory that blocks share for their totals.
pub(super) struct Shared {
    /// The offset of the totals of all tiles in the workspace, bytes.
    pub partial: u64,
    /// The counters before theirs.
    pub counters: usize,
}

impl Shared {
    /// Behind a workspace of so many bytes and so many counters.
    pub fn behind(workspace: u64, counters: usize) -> Shared {
        Shared {
            partial: workspace.next_multiple_of(WORKSPACE_ALIGN),
            counters,
        }
    }
}

/// Whether a kernel can sum the rows of its result: those in tiles can.
pub(crate) fn has_totals(kernel: &Kernel) -> bool {
    matches!(kernel, Kernel::Registers(_) | Kernel::Tensor(..))
}

/// Fails unless the columns of a product are the axis along which its sums lie.
pub(crate) fn check(spec: &Spec, problems: &[Problem]) -> Result<(), SpecError> {
    let [problem] = problems else {
        return Err(refused("sums over a result in several products"));
    };
    let kept = (0..spec.dims.len()).find(|&axis| !spec.is_reduced(axis));
    let whole = Count::fixed(1);
    if problem.deep.contains(&Count::fixed(0)) {
        return Err(refused("sums over a result that is a product of nothing"));
    }
    // Without rows no block would store the sums.
    let rows = problem.rows.iter().map(|axis| axis.count);
    if rows
        .clone()
        .any(|count| count.known().is_none_or(|n| n == 0))
    {
        return Err(refused("sums over rows whose number is not known, or 0"));
    }
    match problem.columns[..] {
        [columns]
            if Some(columns.dim) == kept
                && columns.from == 0
                && problem.batch.iter().all(|axis| axis.count == whole) =>
        {
            Totals::of(&Code::new(spec)?).map(|_| ())
        }
        _ => Err(refused(
            "sums over a result whose columns are not its channels",
        )),
    }
}

fn refused(what: &str) -> SpecError {
    SpecError::unsupported(what)
}

/// Floats of a column in the sums of a product's epilogue.
pub(crate) fn words(spec: &Spec) -> usize {
    if spec.reduced == 0 {
        return 0;
    }
    match Code::new(spec).and_then(|code| Totals::of(&code)) {
        Ok(Some(totals)) => totals.words(),
        _ => 0,
    }
}

/// The tiles of totals that are added at once, of so many tiles of rows: all, or as many as there are
/// groups.
pub(super) fn group(down: i64) -> i64 {
    if down <= ALONE {
        return down.max(1);
    }
    let root = (down as u64).isqrt() as i64;
    root + i64::from(root * root < down)
}

/// The workspace of the totals of so many rows and columns in tiles of `high` × `wide`, bytes, and the
/// number of counters: one for each tile of columns, and one for each group of tiles of its rows.
pub(super) fn shared_between_blocks(
    spec: &Spec,
    [high, wide]: [i64; 2],
    [rows, columns]: [i64; 2],
) -> (u64, usize) {
    let words = words(spec) as u64;
    if words == 0 {
        return (0, 0);
    }
    let down = (rows + high - 1) / high;
    let across = ((columns + wide - 1) / wide) as u64;
    let groups = (down + group(down) - 1) / group(down);
    let bytes = (across * down as u64 * wide as u64 * words).saturating_mul(4);
    (bytes, across as usize * (1 + groups as usize))
}
