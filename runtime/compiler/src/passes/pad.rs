//! Layout padding: rows of values that begin at whole sectors of a device's memory.
//!
//! Where rows are no multiple of 16 bytes, the kernels of products load elements one by one. A
//! value internal to the program may have its rows further apart instead: `length` elements each,
//! padded to a whole number of sectors. No kernel accesses the padding, because kernels know the
//! lengths of rows as well as their distance; therefore padding changes no result. It is added only
//! where the sums of all kernels keep their order ([`Target::cycles_saved`], [`has_same_sums`]) and
//! where the model that ranks products predicts a gain that exceeds the cost of moving the padding.
//!
//! If a value may be computed in place of another, both are padded or neither, so that this stays
//! possible.

use std::collections::BTreeSet;

use rustc_hash::FxHashMap;
use slabwise_kernels::size::{Env, Size};
use slabwise_kernels::spec::{Body, Inst, Operand, Spec};

use super::error::PassError;
use super::pipeline::Pass;
use super::sums::has_same_sums;
use crate::backend::{Sectors, Target};
use crate::ir::{KernelCall, Piece, Program, Source, Value, ValueId};

/// Which rows of values are padded on a device that gains by it. Results do not depend on it, but
/// with [`Tuning`](crate::compile::Tuning) a product of other strides is timed on its own, and may
/// be computed by another kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum RowPadding {
    /// Those whose products gain more, by the model that ranks kernels, than moving the padding
    /// costs.
    #[default]
    Worthwhile,
    /// All that products read and that can be padded.
    All,
    /// None.
    Off,
}

/// The pass.
pub struct PadRows<'a> {
    /// Which rows.
    padding: RowPadding,
    /// The device.
    target: &'a Target,
    /// The sectors of its memory.
    sectors: Sectors,
}

impl Pass for PadRows<'_> {
    const NAME: &'static str = "pad";
    type Input = Program;
    type Output = Program;

    fn run(&self, program: &Program) -> Result<Program, PassError> {
        Ok(Padder::new(self, program).padded())
    }
}

impl<'a> PadRows<'a> {
    /// The pass for a device; `None` if that gains nothing, or if nothing is to be padded.
    pub fn on(target: &'a Target, padding: RowPadding) -> Option<PadRows<'a>> {
        let sectors = target.sectors().filter(|_| padding != RowPadding::Off)?;
        Some(PadRows {
            padding,
            target,
            sectors,
        })
    }
}

/// The rows of a padded value, in elements.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Row {
    length: i64,
    /// From one row to the next.
    stride: i64,
}

impl Row {
    /// The padded rows of a value; `None` if its rows need no padding or must have none.
    fn of(value: &Value, sector: u64) -> Option<Row> {
        let own = value.source == Source::Computed && value.piece == Piece::Whole;
        if !own || value.output || value.data_dependent || value.channels_last {
            return None;
        }
        let (last, outer) = value.dims.split_last()?;
        let length = last.as_fixed().filter(|&length| length > 1)?;
        let each = value.dtype.bytes() as u64;
        let bytes = (length as u64).checked_mul(each)?;
        let padded = bytes.checked_next_multiple_of(sector)?;
        let several = outer.iter().any(|dim| !dim.is(1));
        (several && padded > bytes && padded % each == 0).then_some(Row {
            length,
            stride: (padded / each) as i64,
        })
    }

    /// A size that counts whole rows, in elements of padded ones.
    fn scaled(self, size: Size) -> Option<Size> {
        size.checked_div(self.length)?
            .checked_mul(Size::fixed(self.stride))
    }

    /// The same access to padded rows; `None` if it does not move by whole rows along some axes and
    /// within one row along the others.
    fn access(self, operand: &Operand, dims: &[Size]) -> Option<Operand> {
        let mut padded = operand.clone();
        // The first and the last element of a row that the access touches.
        let (mut first, mut last) = (0i64, 0i64);
        padded.offset = match self.scaled(operand.offset) {
            Some(offset) => offset,
            None => {
                let offset = operand.offset.as_fixed()?;
                let within = offset.rem_euclid(self.length);
                (first, last) = (within, within);
                self.scaled(Size::fixed(offset - within))?
                    .checked_add(Size::fixed(within))?
            }
        };
        for (stride, dim) in padded.strides.iter_mut().zip(dims) {
            if dim.is(1) || stride.is(0) {
                continue;
            }
            match self.scaled(*stride) {
                Some(rows) => *stride = rows,
                None => {
                    let span = stride.as_fixed()?.checked_mul(dim.as_fixed()? - 1)?;
                    first = first.checked_add(span.min(0))?;
                    last = last.checked_add(span.max(0))?;
                }
            }
        }
        (first >= 0 && last < self.length).then_some(padded)
    }
}

/// The choice of the rows to pad.
struct Padder<'a> {
    pass: &'a PadRows<'a>,
    program: &'a Program,
    bounds: Env,
    /// For each value that may be padded, its rows.
    rows: Vec<Option<Row>>,
    /// For each value, the number of its group: values of which one may be computed in place of
    /// another.
    group: Vec<usize>,
    /// The calls that read or write a group, in order.
    calls: FxHashMap<usize, Vec<usize>>,
    /// The groups that are padded.
    chosen: BTreeSet<usize>,
}

impl<'a> Padder<'a> {
    fn new(pass: &'a PadRows<'a>, program: &'a Program) -> Self {
        let rows: Vec<Option<Row>> = (program.values.iter())
            .map(|value| Row::of(value, pass.sectors.bytes))
            .collect();
        let mut padder = Padder {
            pass,
            program,
            bounds: program.graph.symbols.bounds(),
            group: groups(program),
            calls: FxHashMap::default(),
            chosen: BTreeSet::new(),
            rows,
        };
        padder.find_candidates();
        padder
    }

    /// Chooses all groups that can be padded and that a product reads.
    fn find_candidates(&mut self) {
        let mut row_of_group: FxHashMap<usize, Option<Row>> = FxHashMap::default();
        for (row, group) in self.rows.iter().zip(&self.group) {
            let known = row_of_group.entry(*group).or_insert(*row);
            if *known != *row {
                *known = None;
            }
        }
        for (value, row) in self.rows.iter_mut().enumerate() {
            *row = row_of_group[&self.group[value]];
        }
        for call in &self.program.kernels {
            for (k, &value) in call.args.iter().enumerate() {
                if self.rows[value.index()].is_some() && is_matmul(call) && k < 2 {
                    self.chosen.insert(self.group[value.index()]);
                }
            }
        }
        for (at, call) in self.program.kernels.iter().enumerate() {
            for group in self.touched(call, call.args.len()) {
                self.calls.entry(group).or_default().push(at);
                if self.spec(call, &|g| g == group).is_none() {
                    self.chosen.remove(&group);
                }
            }
        }
    }

    /// The chosen groups among the first arguments of a call.
    fn touched(&self, call: &KernelCall, arguments: usize) -> BTreeSet<usize> {
        let groups = call.args[..arguments]
            .iter()
            .map(|value| self.group[value.index()]);
        groups.filter(|group| self.chosen.contains(group)).collect()
    }

    /// The spec of a call with the strides of padded groups; `None` if an access has no such form.
    fn spec(&self, call: &KernelCall, is_padded: &dyn Fn(usize) -> bool) -> Option<Spec> {
        let mut spec = call.spec.clone();
        let row = |value: ValueId| {
            let row = self.rows[value.index()];
            row.filter(|_| is_padded(self.group[value.index()]))
        };
        let anchors = spec.body.operands(&spec.dims);
        for (k, (operand, space, _)) in anchors.iter().enumerate() {
            let Some(row) = row(call.args[k]) else {
                continue;
            };
            let padded = row.access(operand, space)?;
            match &mut spec.body {
                Body::Matmul(product) if k == 0 => product.a = padded,
                Body::Matmul(product) => product.b = padded,
                _ => return None,
            }
        }
        for (k, operand) in spec.operands.iter_mut().enumerate() {
            if let Some(row) = row(call.args[anchors.len() + k]) {
                *operand = row.access(operand, &spec.dims)?;
            }
        }
        Some(spec)
    }

    /// The cycles that a product saves if these groups are padded; `None` if its sums would be
    /// computed in another order.
    fn saved(&self, call: &KernelCall, is_padded: &dyn Fn(usize) -> bool) -> Option<f64> {
        let padded = self.spec(call, is_padded)?;
        self.pass
            .target
            .cycles_saved(&call.spec, &padded, &self.bounds)
    }

    /// Whether a loop computes its sums in the same order if all chosen groups are padded.
    fn keeps_sums(&self, call: &KernelCall) -> bool {
        let padded = self.spec(call, &|group| self.chosen.contains(&group));
        padded.is_some_and(|padded| {
            has_same_sums(self.pass.target, &call.spec, &padded, &self.bounds)
        })
    }

    /// The cycles that products gain by the padding of a group, beside that of the others.
    fn gain(&self, group: usize) -> f64 {
        let with = |g: usize| self.chosen.contains(&g);
        let without = |g: usize| g != group && self.chosen.contains(&g);
        let calls = self.calls[&group]
            .iter()
            .map(|&at| &self.program.kernels[at]);
        let products = calls.filter(|call| is_matmul(call));
        products
            .map(|call| {
                let [with, without] = [self.saved(call, &with), self.saved(call, &without)];
                with.unwrap_or(0.0) - without.unwrap_or(0.0)
            })
            .sum()
    }

    /// The cycles in which memory moves the padding of a group, once for each access.
    fn cost(&self, group: usize) -> f64 {
        let accesses = self.calls[&group]
            .iter()
            .flat_map(|&at| &self.program.kernels[at].args)
            .filter(|value| self.group[value.index()] == group);
        let bytes: u64 = accesses
            .filter_map(|&value| {
                let padding = self.stride(value)? - self.rows[value.index()]?.length;
                self.program
                    .value(value)
                    .padding_bytes(padding, &self.bounds)
            })
            .sum();
        bytes as f64 / self.pass.sectors.bytes_per_cycle
    }

    fn stride(&self, value: ValueId) -> Option<i64> {
        self.rows[value.index()].map(|row| row.stride)
    }

    /// Drops groups until every sum keeps its order and every group gains.
    fn choose(&mut self) {
        let program = self.program;
        loop {
            let before = self.chosen.len();
            for call in &program.kernels {
                let keeps = match &call.spec.body {
                    Body::Matmul(_) => {
                        let touched = self.touched(call, 2);
                        let with = |group: usize| self.chosen.contains(&group);
                        touched.is_empty() || self.saved(call, &with).is_some()
                    }
                    Body::Loop if call.spec.code.iter().any(Inst::is_reduce) => {
                        self.touched(call, call.args.len()).is_empty() || self.keeps_sums(call)
                    }
                    _ => true,
                };
                if !keeps {
                    let arguments = if is_matmul(call) { 2 } else { call.args.len() };
                    for group in self.touched(call, arguments) {
                        self.chosen.remove(&group);
                    }
                }
            }
            if self.pass.padding == RowPadding::Worthwhile {
                for group in self.chosen.clone() {
                    if self.gain(group) <= self.cost(group) {
                        self.chosen.remove(&group);
                    }
                }
            }
            if self.chosen.len() == before {
                return;
            }
        }
    }

    fn padded(mut self) -> Program {
        self.choose();
        let mut program = self.program.clone();
        let is_padded = |group: usize| self.chosen.contains(&group);
        for call in &mut program.kernels {
            if let Some(spec) = self.spec(call, &is_padded) {
                call.spec = spec;
            }
        }
        for (at, value) in program.values.iter_mut().enumerate() {
            if let Some(row) = self.rows[at].filter(|_| is_padded(self.group[at])) {
                value.pad(row.stride - row.length, &self.bounds);
            }
        }
        program
    }
}

fn is_matmul(call: &KernelCall) -> bool {
    matches!(call.spec.body, Body::Matmul(_))
}

/// For each value the first one of its group: values that calls may compute in place of each other.
pub(super) fn groups(program: &Program) -> Vec<usize> {
    let pairs = program.kernels.iter().flat_map(|call| &call.in_place);
    let pairs = pairs.map(|(from, to)| [from.index(), to.index()]);
    joined((0..program.values.len()).collect(), pairs)
}

/// For each number the smallest one that pairs join it with, given groups of which the first members
/// are known.
pub(super) fn joined(mut first: Vec<usize>, pairs: impl Iterator<Item = [usize; 2]>) -> Vec<usize> {
    let root = |first: &mut [usize], mut number: usize| {
        while first[number] != number {
            first[number] = first[first[number]];
            number = first[number];
        }
        number
    };
    for pair in pairs {
        let [a, b] = pair.map(|number| root(&mut first, number));
        first[a.max(b)] = a.min(b);
    }
    (0..first.len())
        .map(|number| root(&mut first, number))
        .collect()
}

#[cfg(test)]
mod tests {
    use slabwise_kernels::dtype::DType;
    use slabwise_kernels::size::Symbol;
    use slabwise_kernels::spec::Dims;

    use super::*;

    const ROW: Row = Row {
        length: 10,
        stride: 16,
    };

    fn operand(offset: Size, strides: &[Size]) -> Operand {
        Operand {
            dtype: DType::F32,
            offset,
            strides: Dims::from_slice(strides),
        }
    }

    /// The padded access, as its offset and strides.
    fn padded(offset: i64, strides: &[i64], dims: &[i64]) -> Option<(i64, Vec<i64>)> {
        let sizes = |list: &[i64]| list.iter().map(|&n| Size::fixed(n)).collect::<Vec<_>>();
        let access = operand(Size::fixed(offset), &sizes(strides));
        let access = ROW.access(&access, &sizes(dims))?;
        let fixed = |size: Size| size.as_fixed().expect("no symbol takes part");
        Some((
            fixed(access.offset),
            access.strides.into_iter().map(fixed).collect(),
        ))
    }

    #[test]
    fn accesses_keep_their_rows_and_columns() {
        // All of it, transposed, without its first row and three columns, from its end, every other
        // row, the diagonal of a view of rows of two axes, one element of each row.
        assert_eq!(padded(0, &[10, 1], &[4, 10]), Some((0, vec![16, 1])));
        assert_eq!(padded(0, &[1, 10], &[10, 4]), Some((0, vec![1, 16])));
        assert_eq!(padded(13, &[10, 1], &[3, 7]), Some((19, vec![16, 1])));
        assert_eq!(padded(39, &[-10, -1], &[4, 10]), Some((57, vec![-16, -1])));
        assert_eq!(
            padded(0, &[20, 0, 1], &[2, 5, 10]),
            Some((0, vec![32, 0, 1]))
        );
        assert_eq!(
            padded(0, &[10, 5, 1], &[4, 2, 5]),
            Some((0, vec![16, 5, 1]))
        );
        assert_eq!(padded(9, &[10], &[4]), Some((9, vec![16])));
    }

    #[test]
    fn accesses_that_leave_a_row_have_no_padded_form() {
        // Flat, a row that begins in the middle of another, the diagonal, backwards out of a row.
        assert_eq!(padded(0, &[1], &[40]), None);
        assert_eq!(padded(4, &[10, 1], &[3, 10]), None);
        assert_eq!(padded(0, &[11], &[4]), None);
        assert_eq!(padded(3, &[10, -1], &[4, 5]), None);
    }

    #[test]
    fn rows_of_unknown_number_are_padded() {
        let batch = Size::symbol(Symbol(0));
        let [image, row] = [40, 10].map(|n| Size::fixed(n).checked_mul(batch).expect("a size"));
        let access = operand(image, &[row, Size::fixed(10), Size::ONE]);
        let dims = [Size::fixed(2), batch, Size::fixed(10)];
        let access = ROW.access(&access, &dims).expect("whole rows");
        let stride = Size::fixed(16).checked_mul(batch);
        assert_eq!(Some(access.strides[0]), stride);
        assert_eq!(Some(access.offset), Size::fixed(64).checked_mul(batch));
        // A column that a run decides is in no known row.
        let within = operand(Size::ZERO, &[batch, Size::ONE]);
        assert_eq!(ROW.access(&within, &dims[1..]), None);
    }
}
