//! Operations and reductions that are computed together with an argument that has no other use, so
//! that the argument is never stored.

use smallvec::SmallVec;

use super::super::chain::{Chain, Values};
use super::super::ops::OpCode;
use super::super::reduce::ReduceCode;
use super::Analysis;
use crate::cpu::Isa;
use crate::dtype::{DType, Lane};
use crate::scalar::{Joined, ScalarOp};
use crate::spec::{Inst, ReduceOp, Spec, ValueId};

impl Analysis {
    /// Finds the values that are computed together with arguments.
    pub(super) fn join(&mut self, spec: &Spec) {
        let mut uses = vec![0; spec.code.len()];
        let used = (0..spec.code.len())
            .filter(|&i| self.is_live(i))
            .flat_map(|i| spec.code[i].arguments().iter().copied());
        for v in used.chain(spec.stores.iter().map(|s| s.value)) {
            uses[usize::from(v)] += 1;
        }
        self.find_chains(spec, &uses);
        self.pair_up(spec, &uses);
    }

    /// Finds the chains whose results are stored.
    fn find_chains(&mut self, spec: &Spec, uses: &[usize]) {
        if spec.reduced > 0 {
            return;
        }
        let last = (0..spec.dims.len())
            .rev()
            .find(|&axis| !spec.dims[axis].is(1));
        let mut varies: Vec<bool> = Vec::with_capacity(spec.code.len());
        for inst in &spec.code {
            varies.push(match inst {
                Inst::Acc => true,
                Inst::Load(k) => {
                    last.is_some_and(|axis| spec.operands[usize::from(*k)].strides[axis].is(1))
                }
                _ => inst.arguments().iter().any(|&a| varies[usize::from(a)]),
            });
        }
        let is_shared = |v: ValueId| match spec.code[usize::from(v)] {
            Inst::Const(_) => true,
            Inst::Load(k) => spec.operands[usize::from(k)]
                .strides
                .iter()
                .all(|s| s.is(0)),
            _ => false,
        };
        // From the results back, so that the longest chains are found first.
        for i in (0..spec.code.len()).rev() {
            let is_stored = spec.stores.iter().any(|store| {
                usize::from(store.value) == i
                    && spec.operands[usize::from(store.operand)].dtype == DType::F32
            });
            if !is_stored || self.absorbed[i] || self.lanes[i] != Lane::F32 {
                continue;
            }
            let absorbed = &self.absorbed;
            let values = Values {
                code: &spec.code,
                is_part: &|v| uses[usize::from(v)] == 1 && !absorbed[usize::from(v)],
                varies: &|v| varies[usize::from(v)],
                is_shared: &is_shared,
            };
            self.chains[i] = Chain::find(&values, i as ValueId);
            let mut parts: SmallVec<[usize; 8]> = SmallVec::new();
            parts.extend(self.chains[i].map(|_| i));
            while let Some(part) = parts.pop() {
                for &a in spec.code[part].arguments() {
                    if !self.is_argument(i, a) {
                        self.absorbed[usize::from(a)] = true;
                        parts.push(usize::from(a));
                    }
                }
            }
        }
    }

    /// Whether a value is an argument of chain `i`.
    fn is_argument(&self, i: usize, value: ValueId) -> bool {
        self.chains[i].is_some_and(|found| found.args.contains(&value))
    }

    /// Finds the operations and reductions that can be computed together with an argument.
    fn pair_up(&mut self, spec: &Spec, uses: &[usize]) {
        for i in 0..spec.code.len() {
            let is_joined = self.absorbed[i] || self.chains[i].is_some();
            if is_joined || !self.is_live(i) || self.lanes[i] != Lane::F32 {
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
                && self.chains[a].is_none()
                && self.summed(spec, a, Isa::Portable).is_some();
        }
        self.chains[a].is_none()
            && self.is_per_row(a) == self.is_per_row(i)
            && self.invariant[a] == self.invariant[i]
            && self.level(a) == self.level(i)
            && self
                .operations(spec, i, k)
                .is_some_and(|joined| OpCode::joined(joined, Isa::Portable).is_some())
    }

    /// The code of a sum of the results of value `a`, if they are computed together.
    pub(super) fn summed(&self, spec: &Spec, a: usize, isa: Isa) -> Option<ReduceCode> {
        if self.pairs[a].is_some() {
            return ReduceCode::sum_of_joined(self.joined(spec, a)?, isa);
        }
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
        if let Some(found) = self.chains[i] {
            return SmallVec::from_slice(&found.args);
        }
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
