//! Values that are invariant along the columns of tiles, computed once for the tiles of many rows.

use super::{Compiler, Place, Step};
use crate::cpu::tile::MAX_ROWS;
use crate::spec::{Inst, Spec, ValueId};

/// The steps of a program without reductions, for blocks whose columns go along the last axis.
pub(in super::super) struct Hoisted {
    /// The steps that compute the invariant values, a lane for each row.
    pub invariant: Vec<Step>,
    /// The other steps, run on tiles.
    pub varying: Vec<Step>,
    /// Invariant values that tiles use.
    pub values: Vec<ValueId>,
    /// The operands and indices that invariant values are read from.
    pub accesses: Vec<u16>,
}

/// For each value whether it is invariant along the last axis. Constants are, but take no step.
pub(super) fn invariant(spec: &Spec) -> Vec<bool> {
    let axis = (0..spec.dims.len())
        .rev()
        .find(|&axis| !spec.dims[axis].is(1))
        .filter(|_| spec.reduced == 0);
    let mut invariant: Vec<bool> = Vec::with_capacity(spec.code.len());
    for inst in &spec.code {
        let is_invariant = match inst {
            Inst::Load(k) => {
                axis.is_some_and(|axis| spec.operands[usize::from(*k)].strides[axis].is(0))
            }
            Inst::Index(k) => axis.is_some_and(|axis| spec.indices[usize::from(*k)][axis].is(0)),
            Inst::Const(_) => axis.is_some(),
            Inst::Op(..) | Inst::Cast(..) => {
                inst.arguments().iter().all(|&a| invariant[usize::from(a)])
            }
            Inst::Acc | Inst::Uniform { .. } | Inst::Reduce(..) => false,
        };
        invariant.push(is_invariant);
    }
    invariant
}

impl Compiler<'_> {
    /// The invariant values hoisted out of the tiles, if there are operations among them. They have
    /// separate registers, of a lane for each row.
    pub(super) fn hoisted(&mut self) -> Option<Hoisted> {
        let (invariant, tiles): (Vec<usize>, Vec<usize>) = self
            .needed()
            .filter(|&i| !self.is_constant(i))
            .partition(|&i| self.a.invariant[i]);
        if !invariant
            .iter()
            .any(|&i| matches!(self.spec.code[i], Inst::Op(..) | Inst::Cast(..)))
        {
            return None;
        }
        let stored = |value: usize| {
            self.spec
                .stores
                .iter()
                .any(|s| usize::from(s.value) == value)
        };
        let used = |value: usize| {
            tiles.iter().any(|&i| {
                self.a
                    .arguments(self.spec, i)
                    .iter()
                    .any(|&a| usize::from(a) == value)
            })
        };
        let values = invariant
            .iter()
            .filter(|&&i| stored(i) || used(i))
            .map(|&i| i as ValueId)
            .collect();
        let mut steps = Vec::with_capacity(invariant.len());
        for &i in &invariant {
            let place = Place {
                at: self.used,
                kept: false,
            };
            self.used += MAX_ROWS.min(self.register);
            steps.push(self.step(i, place));
        }
        let access = |step: &Step| {
            if let Step::Load { access, .. } | Step::Index { access, .. } = step {
                Some(*access)
            } else {
                None
            }
        };
        Some(Hoisted {
            accesses: steps.iter().filter_map(access).collect(),
            invariant: steps,
            varying: self.pass(0, &tiles),
            values,
        })
    }
}
