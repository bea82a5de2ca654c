//! Which value is computed in which pass over the reduced axes.
//!
//! A value is *folded* if it exists once per point of the kept axes, else *full*. What needs no
//! reduction has level 0, a reduction of a value of level n has level n + 1, and everything else
//! the highest level of its arguments. Pass n computes full values of level n and reduces them. A
//! full value used in a later pass than its own *crosses*.

use slabwise_kernels::spec::Inst;

use crate::code::{Code, Fold};

/// The passes of a program.
pub struct Levels {
    /// Of every value.
    pub level: Vec<usize>,
    /// The pass in which full values are stored, if any are.
    pub top: Option<usize>,
    /// The highest level of a needed value.
    pub depth: usize,
    /// Full values that cross.
    pub crossing: Vec<bool>,
}

impl Levels {
    pub fn new(code: &Code) -> Levels {
        let n = code.spec.code.len();
        let mut level = vec![0; n];
        for (i, inst) in code.spec.code.iter().enumerate() {
            let deepest = inst
                .arguments()
                .iter()
                .map(|&a| level[usize::from(a)])
                .max()
                .unwrap_or(0);
            level[i] = deepest + usize::from(is_reduce(inst));
        }
        let full_stores = || {
            code.spec
                .stores
                .iter()
                .map(|s| usize::from(s.value))
                .filter(|&v| !code.folded[v])
        };
        let top = full_stores().map(|v| level[v]).max();
        let mut last_use = level.clone();
        for i in code.needed() {
            let used_at = level[i] - usize::from(is_reduce(&code.spec.code[i]));
            for a in code.spec.code[i].arguments() {
                let last = &mut last_use[usize::from(a)];
                *last = (*last).max(used_at);
            }
        }
        full_stores().for_each(|v| last_use[v] = last_use[v].max(top.unwrap_or(0)));
        let made_again = |i: usize| matches!(code.spec.code[i], Inst::Index(_) | Inst::Const(_));
        let crossing = (0..n)
            .map(|i| code.needed[i] && !code.folded[i] && !made_again(i) && last_use[i] > level[i])
            .collect();
        let depth = code.needed().map(|i| level[i]).max().unwrap_or(0);
        Levels {
            level,
            top,
            depth,
            crossing,
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

    /// The full values that pass `l` computes. Those that cross are kept if `keeps`, else computed
    /// again.
    pub fn full(&self, code: &Code, l: usize, keeps: bool) -> Vec<usize> {
        let mut wanted = vec![false; code.spec.code.len()];
        self.folds(code, l)
            .for_each(|(_, arg, _)| wanted[arg] = true);
        if self.top == Some(l) {
            code.spec
                .stores
                .iter()
                .for_each(|s| wanted[usize::from(s.value)] = true);
        }
        for i in (0..wanted.len()).rev() {
            let kept_now = keeps && self.crossing[i] && self.level[i] == l;
            wanted[i] = (wanted[i] || kept_now) && !code.folded[i] && !self.is_kept(i, l, keeps);
            if wanted[i] {
                code.spec.code[i]
                    .arguments()
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

/// Whether an instruction reduces.
pub fn is_reduce(inst: &Inst) -> bool {
    matches!(inst, Inst::Reduce(..))
}
