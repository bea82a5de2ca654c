//! Analyses and rewrites of specs that the compiler and the back ends share: the operands of
//! instructions, liveness and dead code, the passes that nested reductions need, and renumbering.

use smallvec::SmallVec;

use super::{Access, Body, Dims, Inst, Operand, PoolKind, ReduceOp, Spec, Store, ValueId};
use crate::dtype::Lane;
use crate::size::Size;

/// Row-major strides of a contiguous buffer; `None` if a stride overflows or has no form as a
/// [`Size`].
pub fn contiguous_strides(dims: &[Size]) -> Option<Dims> {
    let mut strides: Dims = SmallVec::from_elem(Size::ONE, dims.len());
    let mut stride = Size::ONE;
    for (slot, &dim) in strides.iter_mut().zip(dims).rev() {
        *slot = stride;
        stride = stride.checked_mul(dim)?;
    }
    Some(strides)
}

/// Whether the elements of an operand over a space follow each other in row-major order.
pub fn is_contiguous(operand: &Operand, dims: &[Size]) -> bool {
    contiguous_strides(dims).is_some_and(|strides| {
        let mut axes = dims.iter().zip(&strides).zip(&operand.strides);
        axes.all(|((dim, a), b)| a == b || dim.is(1))
    })
}

impl Body {
    /// Whether it is a product or a convolution.
    pub fn is_product(&self) -> bool {
        matches!(
            self,
            Body::Matmul(_) | Body::QuantizedMatmul(_) | Body::Conv2d(_)
        )
    }
}

impl Inst {
    /// The values an instruction computes from.
    pub fn arguments(&self) -> &[ValueId] {
        match self {
            Inst::Load(_) | Inst::Acc | Inst::Const(_) | Inst::Index(_) => &[],
            Inst::Uniform { index, .. } => std::slice::from_ref(index),
            Inst::Op(op, args) => &args[..op.arity()],
            Inst::Cast(a, _) | Inst::Reduce(_, a) => std::slice::from_ref(a),
        }
    }

    /// The operand an instruction reads.
    pub fn operand(&self) -> Option<u16> {
        match self {
            Inst::Load(k) | Inst::Uniform { state: k, .. } => Some(*k),
            _ => None,
        }
    }

    /// Whether this is a reduction.
    pub fn is_reduce(&self) -> bool {
        matches!(self, Inst::Reduce(..))
    }

    /// Replaces each argument by its image under `to`.
    pub fn map_arguments(&mut self, mut to: impl FnMut(ValueId) -> ValueId) {
        match self {
            Inst::Load(_) | Inst::Acc | Inst::Const(_) | Inst::Index(_) => {}
            Inst::Uniform { index, .. } => *index = to(*index),
            Inst::Op(op, args) => args[..op.arity()].iter_mut().for_each(|a| *a = to(*a)),
            Inst::Cast(a, _) | Inst::Reduce(_, a) => *a = to(*a),
        }
    }

    /// Replaces the operand that the instruction reads, if any, by its image under `to`.
    pub fn map_operand(&mut self, to: impl FnOnce(u16) -> u16) {
        if let Inst::Load(k) | Inst::Uniform { state: k, .. } = self {
            *k = to(*k);
        }
    }

    /// Replaces the index that the instruction evaluates, if any, by its image under `to`.
    pub fn map_index(&mut self, to: impl FnOnce(u16) -> u16) {
        if let Inst::Index(k) = self {
            *k = to(*k);
        }
    }
}

/// For each instruction whether one of `stores` depends on it.
pub fn live_values(code: &[Inst], stores: &[Store]) -> Vec<bool> {
    let mut live = vec![false; code.len()];
    for store in stores {
        live[usize::from(store.value)] = true;
    }
    mark_arguments(code, &mut live);
    live
}

/// Marks the values that marked values are computed from.
pub fn mark_arguments(code: &[Inst], marked: &mut [bool]) {
    // Arguments precede their instruction.
    for (i, inst) in code.iter().enumerate().rev() {
        if marked[i] {
            for &a in inst.arguments() {
                marked[usize::from(a)] = true;
            }
        }
    }
}

/// The new number of each element when only the elements marked in `kept` remain, in their order.
/// (Of other elements the number is meaningless.)
pub fn renumbering(kept: &[bool]) -> Vec<u16> {
    let number = |next: &mut u16, &kept: &bool| {
        let own = *next;
        *next += u16::from(kept);
        Some(own)
    };
    kept.iter().scan(0, number).collect()
}

/// A spec without its dead code, and which operands it still has. See [`prune`].
#[derive(Clone, Debug, PartialEq)]
pub struct Pruned {
    /// The smaller spec.
    pub spec: Spec,
    /// For each operand of `code` in the original spec whether the smaller one has it too.
    pub operands: Vec<bool>,
}

/// A spec with only these of its stores, and only the instructions and operands that they depend
/// on, renumbered. Anchor, space, reduced axes and indices stay the same.
///
/// Its values per element have the same bits. Reductions do too only if they are split into the
/// same parts, which depends on the back end.
pub fn prune(spec: &Spec, stores: &[Store]) -> Pruned {
    let live = live_values(&spec.code, stores);
    let mut operands = vec![false; spec.operands.len()];
    let read = kept(&spec.code, &live).filter_map(Inst::operand);
    for operand in read.chain(stores.iter().map(|s| s.operand)) {
        operands[usize::from(operand)] = true;
    }
    let (operand, value) = (renumbering(&operands), renumbering(&live));
    let (operand, value) = (
        |k: u16| operand[usize::from(k)],
        |v: ValueId| value[usize::from(v)],
    );
    let renumbered = |inst: &Inst| {
        let mut inst = inst.clone();
        inst.map_arguments(value);
        inst.map_operand(operand);
        inst
    };
    let spec = Spec {
        body: spec.body.clone(),
        dims: spec.dims.clone(),
        reduced: spec.reduced,
        operands: kept(&spec.operands, &operands).cloned().collect(),
        indices: spec.indices.clone(),
        code: kept(&spec.code, &live).map(renumbered).collect(),
        stores: stores
            .iter()
            .map(|s| Store {
                value: value(s.value),
                operand: operand(s.operand),
            })
            .collect(),
    };
    Pruned { spec, operands }
}

/// The marked elements of a list.
fn kept<'a, T>(list: &'a [T], marked: &'a [bool]) -> impl Iterator<Item = &'a T> {
    list.iter()
        .zip(marked)
        .filter(|(_, marked)| **marked)
        .map(|(element, _)| element)
}

/// Moves operand `k` of `code` after the others, which keep their order.
pub fn move_operand_last(spec: &mut Spec, k: u16) {
    let last = spec.operands.len() as u16 - 1;
    let moved = spec.operands.remove(usize::from(k));
    spec.operands.push(moved);
    let place = |old: u16| match old.cmp(&k) {
        std::cmp::Ordering::Less => old,
        std::cmp::Ordering::Equal => last,
        std::cmp::Ordering::Greater => old - 1,
    };
    spec.code.iter_mut().for_each(|i| i.map_operand(place));
    for store in &mut spec.stores {
        store.operand = place(store.operand);
    }
}

/// The passes over the reduced axes in which the values of a spec are computed.
///
/// A value is *per row* if it exists once per point of the kept axes, else *per element*; see
/// [`Spec::per_row`]. A value without reductions among its arguments has level 0, the reduction of a
/// value of level n has level n + 1, and every other value has the highest level of its arguments.
/// Pass n computes the per-element values of level n and reduces them; the per-row values of level
/// n are computed just before it.
#[derive(Clone, Debug, PartialEq)]
pub struct Levels {
    /// The level of each value.
    pub level: Vec<usize>,
    /// For each value whether it exists once per point of the kept axes.
    pub per_row: Vec<bool>,
    /// For each value whether a store depends on it.
    pub live: Vec<bool>,
}

impl Levels {
    /// The levels of the values of a valid spec.
    pub fn new(spec: &Spec) -> Levels {
        let mut level: Vec<usize> = Vec::with_capacity(spec.code.len());
        for inst in &spec.code {
            let arguments = inst.arguments().iter().map(|&a| level[usize::from(a)]);
            let deepest = arguments.max().unwrap_or(0);
            level.push(deepest + usize::from(inst.is_reduce()));
        }
        Levels {
            level,
            per_row: spec.per_row(),
            live: live_values(&spec.code, &spec.stores),
        }
    }

    /// The highest level of a live value.
    pub fn depth(&self) -> usize {
        kept(&self.level, &self.live).copied().max().unwrap_or(0)
    }

    /// Whether one pass computes all values, dead ones included: no per-element value and no
    /// reduction depends on a reduction.
    pub fn is_single_pass(&self) -> bool {
        self.level
            .iter()
            .zip(&self.per_row)
            .all(|(&level, &per_row)| level == 0 || (level == 1 && per_row))
    }

    /// The last pass in which each value is used, if pass `storing` stores the per-element values.
    pub fn last_uses(&self, spec: &Spec, storing: usize) -> Vec<usize> {
        let mut last = self.level.clone();
        for (i, inst) in spec.code.iter().enumerate().filter(|&(i, _)| self.live[i]) {
            // A reduction uses its argument in the pass before its own level.
            let pass = self.level[i] - usize::from(inst.is_reduce());
            for &a in inst.arguments() {
                let last = &mut last[usize::from(a)];
                *last = pass.max(*last);
            }
        }
        for v in spec.stores.iter().map(|s| usize::from(s.value)) {
            if !self.per_row[v] {
                last[v] = storing.max(last[v]);
            }
        }
        last
    }

    /// Whether a per-element value is live across passes: used after the pass that computes it.
    /// `last_uses` are those of [`Levels::last_uses`].
    pub fn is_live_across(&self, value: usize, last_uses: &[usize]) -> bool {
        self.live[value] && !self.per_row[value] && last_uses[value] > self.level[value]
    }
}

impl Spec {
    /// Whether `code` reads operand `k`.
    pub fn reads(&self, k: u16) -> bool {
        self.code.iter().any(|inst| inst.operand() == Some(k))
    }

    /// The access to each of [`Spec::arguments`], without the cost of their spaces.
    pub fn accesses(&self) -> Vec<Access> {
        let anchor = self.body.operands(&self.dims);
        let mut list: Vec<Access> = anchor.into_iter().map(|(.., access)| access).collect();
        list.extend(self.uses().into_iter().map(|(access, _)| access));
        list
    }

    /// The access of code and stores to each of `operands`, and whether it holds the seed and step
    /// of random numbers.
    pub(super) fn uses(&self) -> Vec<(Access, bool)> {
        let mut uses = vec![(Access::Read, false); self.operands.len()];
        for store in &self.stores {
            if let Some((access, _)) = uses.get_mut(usize::from(store.operand)) {
                *access = Access::Write;
            }
        }
        for inst in &self.code {
            if let Some((access, random)) = inst.operand().and_then(|k| uses.get_mut(k as usize)) {
                if *access == Access::Write {
                    *access = Access::ReadWrite;
                }
                *random |= matches!(inst, Inst::Uniform { .. });
            }
        }
        uses
    }

    /// Whether reductions are over an axis. Those of a product are over all axes but the one of the
    /// channels of images, or the last one of a matrix.
    pub fn is_reduced(&self, axis: usize) -> bool {
        let axes = self.dims.len();
        match self.body {
            _ if self.reduced == 0 => false,
            Body::Conv2d(_) => axis != 1,
            Body::Matmul(_) => axis + 1 != axes,
            _ => axis + self.reduced >= axes,
        }
    }

    /// Whether no stride moves along a reduced axis.
    pub(super) fn is_uniform(&self, strides: &Dims) -> bool {
        (0..strides.len()).all(|axis| !self.is_reduced(axis) || strides[axis].is(0))
    }

    /// Whether a value exists once per point of the kept axes, rather than at every point: a
    /// reduction, or anything computed from reductions, constants and operands that do not vary
    /// along the reduced axes.
    pub fn is_per_row(&self, value: ValueId) -> bool {
        self.per_row()[usize::from(value)]
    }

    /// [`Spec::is_per_row`] of every value.
    pub fn per_row(&self) -> Vec<bool> {
        if self.reduced == 0 {
            return vec![false; self.code.len()];
        }
        let mut per_row: Vec<bool> = Vec::with_capacity(self.code.len());
        for inst in &self.code {
            per_row.push(match inst {
                Inst::Load(k) => self.is_uniform(&self.operands[usize::from(*k)].strides),
                Inst::Index(k) => self.is_uniform(&self.indices[usize::from(*k)]),
                Inst::Acc => false,
                Inst::Const(_) | Inst::Reduce(..) => true,
                Inst::Uniform { .. } | Inst::Op(..) | Inst::Cast(..) => {
                    inst.arguments().iter().all(|&a| per_row[usize::from(a)])
                }
            });
        }
        per_row
    }

    /// The lane of every value; `None` where an operation does not take its arguments' lanes.
    pub fn lanes(&self) -> Option<Vec<Lane>> {
        let mut lanes: Vec<Lane> = Vec::with_capacity(self.code.len());
        for inst in &self.code {
            let of = |v: ValueId| lanes.get(usize::from(v)).copied();
            lanes.push(match inst {
                Inst::Load(k) => self.operands.get(usize::from(*k))?.dtype.lane(),
                Inst::Acc => match &self.body {
                    Body::Gather(g) => g.source.dtype.lane(),
                    Body::Scatter(s) => s.value.dtype.lane(),
                    Body::Pool2d(p) if p.kind == PoolKind::ArgMax => Lane::I32,
                    Body::Pool2d(p) => p.x.dtype.lane(),
                    _ => Lane::F32,
                },
                Inst::Const(v) => v.lane(),
                Inst::Index(_) => Lane::I32,
                Inst::Uniform { .. } => Lane::F32,
                Inst::Op(op, args) => {
                    let args: SmallVec<[Lane; 3]> = args[..op.arity()]
                        .iter()
                        .map(|&a| of(a))
                        .collect::<Option<_>>()?;
                    op.lane(&args)?
                }
                Inst::Cast(_, lane) => *lane,
                Inst::Reduce(ReduceOp::ArgMax | ReduceOp::ArgMin, _) => Lane::I32,
                Inst::Reduce(_, a) => of(*a)?,
            });
        }
        Some(lanes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::scalar::{ScalarOp, Value};
    use crate::spec::Operand;

    fn operand(strides: [i64; 2]) -> Operand {
        Operand {
            dtype: DType::F32,
            offset: Size::ZERO,
            strides: strides.iter().map(|&s| Size::fixed(s)).collect(),
        }
    }

    fn store(value: ValueId, operand: u16) -> Store {
        Store { value, operand }
    }

    /// Rows of 8 elements, of which `x - max(x)` and `sum(x - max(x))` are stored. Operands: x, an
    /// unread one, a result per row, a result per element.
    fn rows() -> Spec {
        Spec {
            body: Body::Loop,
            dims: Dims::from_slice(&[Size::fixed(4), Size::fixed(8)]),
            reduced: 1,
            operands: [[8, 1], [0, 1], [1, 0], [8, 1]].map(operand).to_vec(),
            indices: vec![Dims::from_slice(&[Size::ZERO, Size::ONE])],
            code: vec![
                Inst::Load(0),
                Inst::Reduce(ReduceOp::Max, 0),
                Inst::Index(0),
                Inst::Op(ScalarOp::Sub, [0, 1, 0]),
                Inst::Load(1),
                Inst::Reduce(ReduceOp::Sum, 3),
            ],
            stores: vec![store(5, 2), store(3, 3)],
        }
    }

    #[test]
    fn levels_count_reductions() {
        let (spec, levels) = (rows(), Levels::new(&rows()));
        assert!(spec.check_code().is_ok());
        assert_eq!(levels.level, [0, 1, 0, 1, 0, 2]);
        let as_bools = |bits: [u8; 6]| bits.map(|bit| bit == 1).to_vec();
        assert_eq!(levels.per_row, as_bools([0, 1, 0, 0, 0, 1]));
        assert_eq!(levels.live, as_bools([1, 1, 0, 1, 0, 1]));
        assert_eq!(levels.depth(), 2);
        assert!(!levels.is_single_pass());
        let last = levels.last_uses(&spec, 1);
        assert_eq!(last, [1, 1, 0, 1, 0, 2]);
        let across: Vec<usize> = (0..6)
            .filter(|&v| levels.is_live_across(v, &last))
            .collect();
        assert_eq!(across, [0]);
        // Stored in the last pass, the difference is live until then.
        assert_eq!(levels.last_uses(&spec, 2)[3], 2);
    }

    #[test]
    fn one_pass_reduces_values_that_no_reduction_precedes() {
        let mut spec = rows();
        spec.code.truncate(2);
        spec.stores = vec![store(1, 2)];
        assert!(Levels::new(&spec).is_single_pass());
        spec.code.push(Inst::Reduce(ReduceOp::Sum, 1));
        assert!(!Levels::new(&spec).is_single_pass());
    }

    #[test]
    fn pruned_specs_are_renumbered() {
        let spec = rows();
        let whole = prune(&spec, &spec.stores);
        assert_eq!(whole.operands, [true, false, true, true]);
        assert_eq!(whole.spec.code.len(), 4);
        assert_eq!(whole.spec.code[2], Inst::Op(ScalarOp::Sub, [0, 1, 0]));
        assert_eq!(whole.spec.code[3], Inst::Reduce(ReduceOp::Sum, 2));
        assert_eq!(whole.spec.stores, [store(3, 1), store(2, 2)]);
        assert!(whole.spec.check_code().is_ok());
        let part = prune(&spec, &[store(1, 2)]);
        assert_eq!(part.operands, [true, false, true, false]);
        assert_eq!(part.spec.code, spec.code[..2]);
        assert_eq!(part.spec.operands[1], spec.operands[2]);
        assert_eq!(part.spec.stores, [store(1, 1)]);
    }

    #[test]
    fn the_moved_operand_is_the_last() {
        let mut spec = rows();
        spec.code.push(Inst::Uniform {
            state: 3,
            stream: 7,
            index: 2,
        });
        let old = spec.clone();
        move_operand_last(&mut spec, 1);
        assert_eq!(spec.operands[3], old.operands[1]);
        assert_eq!(spec.operands[1..3], old.operands[2..]);
        assert_eq!(
            (&spec.code[0], &spec.code[4]),
            (&Inst::Load(0), &Inst::Load(3))
        );
        assert_eq!(spec.code[6].operand(), Some(2));
        assert_eq!(spec.stores, [store(5, 1), store(3, 2)]);
    }

    #[test]
    fn instructions_are_mapped() {
        let mapped = |mut inst: Inst| {
            inst.map_arguments(|v| v + 10);
            inst.map_operand(|k| k + 20);
            inst.map_index(|k| k + 30);
            inst
        };
        assert_eq!(mapped(Inst::Load(1)), Inst::Load(21));
        assert_eq!(mapped(Inst::Index(1)), Inst::Index(31));
        assert_eq!(mapped(Inst::Acc), Inst::Acc);
        let one = Inst::Const(Value::F32(1.0));
        assert_eq!(mapped(one.clone()), one);
        let cast = mapped(Inst::Cast(2, Lane::I32));
        assert_eq!(cast, Inst::Cast(12, Lane::I32));
        let reduce = mapped(Inst::Reduce(ReduceOp::Sum, 2));
        assert_eq!(reduce, Inst::Reduce(ReduceOp::Sum, 12));
        // Unused arguments stay 0.
        let exp = mapped(Inst::Op(ScalarOp::Exp, [3, 0, 0]));
        assert_eq!(exp, Inst::Op(ScalarOp::Exp, [13, 0, 0]));
        let uniform = |state, index| Inst::Uniform {
            state,
            stream: 5,
            index,
        };
        assert_eq!(mapped(uniform(1, 2)), uniform(21, 12));
    }

    #[test]
    fn the_last_axis_is_contiguous() {
        let dims = [2, 3, 4].map(Size::fixed);
        let strides = contiguous_strides(&dims).expect("sizes");
        assert_eq!(strides[..], [12, 4, 1].map(Size::fixed));
    }
}
