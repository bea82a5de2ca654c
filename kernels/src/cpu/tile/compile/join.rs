//! Operations and reductions that are computed together with an argument that has no other use, so
//! that the argument is never stored.

use smallvec::SmallVec;

use super::super::ops::OpCode;
use super::super::reduce::ReduceCode;
use super::Analysis;
use crate::cpu::Isa;
use crate::dtype::Lane;
use crate::scalar::{Joined, ScalarOp};
use crate::spec::{Inst, ReduceOp, Spec, ValueId};

impl Analysis {
    /// Finds the operations and reductions that can be computed together with an argument.
    pub(super) fn pair_up(&mut self, spec: &Spec) {
        let mut uses = vec![0; spec.code.len()];
        let used = (0..spec.code.len())
            .filter(|&i| self.is_live(i))
            .flat_map(|i| spec.code[i].arguments().iter().copied());
        for v in used.chain(spec.stores.iter().map(|s| s.value)) {
            uses[usize::from(v)] += 1;
        }
        for i in 0..spec.code.len() {
            if !self.is_live(i) || self.lanes[i] != Lane::F32 {
                continue;
            }
            let arguments = spec.code[i].arguments();
            let k = (0..arguments.len().min(2)).find(|&k| {
                let a = usize::from(arguments[k]);
                uses[a] == 1 && self.is_joined(spec, i, k, a)
            });
            if let Some(k) = k {
                self.pairs[i] = Some(k);
                self.absorbed[usize::from(arguments[k])] = true;
            }
        }
    }

    /// Whether value `i` can be computed together with its argument number `k`, value `a`.
    fn is_joined(&self, spec: &Spec, i: usize, k: usize, a: usize) -> bool {
        if let Inst::Reduce(op, _) = spec.code[i] {
            return op == ReduceOp::Sum
                && !self.is_per_row(a)
                && self.pairs[a].is_none()
                && self.summed(spec, a, Isa::Portable).is_some();
        }
        self.is_per_row(a) == self.is_per_row(i)
            && self.invariant[a] == self.invariant[i]
            && self.level(a) == self.level(i)
            && self
                .operations(spec, i, k)
                .is_some_and(|joined| OpCode::joined(joined, Isa::Portable).is_some())
    }

    /// The code of a sum of the results of value `a`, if they are computed together.
    pub(super) fn summed(&self, spec: &Spec, a: usize, isa: Isa) -> Option<ReduceCode> {
        match spec.code[a] {
            Inst::Op(op, _) if self.lanes[a] == Lane::F32 => ReduceCode::sum_of(op, isa),
            _ => None,
        }
    }

    /// The operations of value `i` together with its argument number `k`.
    fn operations(&self, spec: &Spec, i: usize, k: usize) -> Option<Joined> {
        let Inst::Op(outer, args) = spec.code[i] else {
            return None;
        };
        let a = usize::from(args[k]);
        let Inst::Op(inner, inner_args) = spec.code[a] else {
            return None;
        };
        match (inner, outer, self.pairs[a]) {
            (ScalarOp::Add, ScalarOp::Relu, Some(j)) => {
                let product = &spec.code[usize::from(inner_args[j])];
                matches!(product, Inst::Op(ScalarOp::Mul, _)).then_some(Joined::ReluOfProductSum)
            }
            (ScalarOp::Le, ScalarOp::Select, None) => (k == 0
                && inner_args[1] == args[1]
                && self.lanes[usize::from(args[1])] == Lane::F32)
                .then_some(Joined::AboveOr),
            (_, _, None) => Some(Joined::Pair {
                inner,
                outer,
                swapped: k == 1,
            }),
            _ => None,
        }
    }

    /// The operations that value `i` is computed by, if they are several.
    pub(super) fn joined(&self, spec: &Spec, i: usize) -> Option<Joined> {
        self.operations(spec, i, self.pairs[i]?)
    }

    /// The arguments of step `i`; of joined operations, the arguments of all of them.
    pub(super) fn arguments(&self, spec: &Spec, i: usize) -> SmallVec<[ValueId; 4]> {
        let mut args = SmallVec::from_slice(spec.code[i].arguments());
        if let Some(k) = self.pairs[i] {
            let inner = args.remove(k);
            args.insert_from_slice(0, &self.arguments(spec, usize::from(inner)));
            if self.joined(spec, i) == Some(Joined::AboveOr) {
                // Both operations have the bound.
                args.remove(1);
            }
        }
        args
    }
}
