//! The passes over the reduced axes: the level at which each value is computed, and the values that
//! are kept from one pass to the next. See [`analysis::Levels`].

use slabwise_kernels::scalar::{Class, ScalarOp};
use slabwise_kernels::spec::{Inst, Store, analysis};

use crate::code::{Code, Fold};

/// The passes of a program.
pub struct Levels {
    /// The pass of every value.
    pub level: Vec<usize>,
    /// The last pass in which full values are stored, if any are.
    top: Option<usize>,
    /// The highest level of a needed value.
    pub depth: usize,
    /// Per-element values that are kept from the pass that computes them to later ones. A value
    /// that is only stored is not: see [`Levels::stores`].
    pub crossing: Vec<bool>,
}

impl Levels {
    pub fn new(code: &Code) -> Levels {
        let levels = analysis::Levels::new(code.spec);
        let stored = code.spec.stores.iter().map(|s| usize::from(s.value));
        let top = stored
            .filter(|&v| !code.per_row[v])
            .map(|v| levels.level[v])
            .max();
        // Each kept value is stored in the pass that computes it.
        let last_uses = levels.last_uses(code.spec, 0);
        let mut crossing: Vec<bool> = Vec::with_capacity(code.spec.code.len());
        let mut recomputed: Vec<bool> = Vec::with_capacity(code.spec.code.len());
        for (i, inst) in code.spec.code.iter().enumerate() {
            let is_found = |&a: &u16| {
                let a = usize::from(a);
                code.per_row[a] || crossing[a] || recomputed[a]
            };
            let is_recomputed = match inst {
                Inst::Index(_) | Inst::Const(_) => true,
                // One instruction, for which nothing else needs to be kept.
                Inst::Op(op, _) => is_one_step(*op) && inst.arguments().iter().all(is_found),
                _ => false,
            };
            crossing.push(!is_recomputed && levels.is_live_across(i, &last_uses));
            recomputed.push(is_recomputed);
        }
        Levels {
            top,
            depth: levels.depth(),
            crossing,
            level: levels.level,
        }
    }

    /// The reductions that pass `l` fills, by value.
    pub fn folds<'a>(
        &'a self,
        code: &'a Code,
        l: usize,
    ) -> impl Iterator<Item = (usize, usize, Fold)> + 'a {
        code.needed().filter_map(move |i| match code.spec.code[i] {
            Inst::Reduce(op, arg) if self.level[i] == l + 1 => {
                Some((i, usize::from(arg), Fold::new(op, code.lane(arg))))
            }
            _ => None,
        })
    }

    /// Whether pass `l` has anything to do at every point.
    pub fn has_pass(&self, code: &Code, l: usize) -> bool {
        self.top == Some(l) || self.folds(code, l).next().is_some()
    }

    /// How many passes there are.
    pub fn passes(&self, code: &Code) -> Vec<usize> {
        (0..=self.depth)
            .filter(|&l| self.has_pass(code, l))
            .collect()
    }

    /// The stores of full values in pass `l`: of those that it computes if values are kept. If not,
    /// the last pass stores all, because earlier ones must not overwrite operands that are loaded
    /// again.
    pub fn stores<'a>(
        &'a self,
        code: &'a Code,
        l: usize,
        keeps: bool,
    ) -> impl Iterator<Item = &'a Store> + 'a {
        code.spec.stores.iter().filter(move |store| {
            let value = usize::from(store.value);
            let pass = if keeps {
                Some(self.level[value])
            } else {
                self.top
            };
            !code.per_row[value] && pass == Some(l)
        })
    }

    /// The full values that pass `l` computes. Those that cross are kept if `keeps`, else computed
    /// again.
    pub fn full(&self, code: &Code, l: usize, keeps: bool) -> Vec<usize> {
        let mut wanted = vec![false; code.spec.code.len()];
        self.folds(code, l)
            .for_each(|(_, arg, _)| wanted[arg] = true);
        self.stores(code, l, keeps)
            .for_each(|s| wanted[usize::from(s.value)] = true);
        for i in (0..wanted.len()).rev() {
            let kept_now = keeps && self.crossing[i] && self.level[i] == l;
            wanted[i] = (wanted[i] || kept_now) && !code.per_row[i] && !self.is_kept(i, l, keeps);
            if wanted[i] {
                let arguments = code.spec.code[i].arguments();
                arguments
                    .iter()
                    .for_each(|&a| wanted[usize::from(a)] = true);
            }
        }
        (0..wanted.len()).filter(|&i| wanted[i]).collect()
    }

    /// Whether pass `l` finds value `i` kept by an earlier one.
    pub fn is_kept(&self, i: usize, l: usize, keeps: bool) -> bool {
        keeps && self.crossing[i] && self.level[i] < l
    }
}

/// Whether an operation takes about one instruction.
fn is_one_step(op: ScalarOp) -> bool {
    matches!(op, ScalarOp::Select | ScalarOp::Neg) || op.class() == Class::Compare
}
