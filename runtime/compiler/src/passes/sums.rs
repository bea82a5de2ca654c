//! Whether two kernels compute their sums in the same order, so that both give the same bits.
//!
//! Kernels of a GPU report how they split sums, those of the CPU do so once their sizes are known;
//! for all others a rule decides.

use slabwise_kernels::dtype::DType;
use slabwise_kernels::size::Env;
use slabwise_kernels::spec::{Body, Dims, Inst, Operand, Spec, Store};

use crate::backend::Target;

/// Whether the sums that two loops have in common are certain to have the same bits in both.
pub fn has_same_sums(target: &Target, a: &Spec, b: &Spec, bounds: &Env) -> bool {
    target
        .has_same_sums(a, b, bounds)
        .unwrap_or_else(|| alike_by_rule(a, b))
}

/// Whether the values of a product at its points are certain to have the same bits in two kernels
/// that differ in their epilogues. A GPU's ranking of kernels depends on the sums of an epilogue.
pub fn has_same_products(target: &Target, a: &Spec, b: &Spec, bounds: &Env) -> bool {
    match target {
        Target::Cpu(_) => true,
        Target::Cuda(_) => target.cycles_saved(a, b, bounds).is_some(),
    }
}

/// Whether sums are certain to be split into the same parts. Their split follows from the passes
/// over the elements, and from the strides of the operands that vary over the elements.
fn alike_by_rule(a: &Spec, b: &Spec) -> bool {
    let same_space = a.body == Body::Loop
        && b.body == Body::Loop
        && (&a.dims, a.reduced) == (&b.dims, b.reduced);
    let reduces = |spec: &Spec| spec.code.iter().filter(|inst| inst.is_reduce()).count();
    if !same_space || reduces(a) != reduces(b) {
        return false;
    }
    let (a, b) = (Points::of(a), Points::of(b));
    if !a.reads() || !b.reads() {
        return false;
    }
    // One pass over operands with the same strides, or the same work at each element.
    let one_pass = a.is_one_pass() && b.is_one_pass();
    let walk = a.walk();
    one_pass && walk.is_some() && walk == b.walk() || a.steps() == b.steps()
}

/// A loop with reductions, and which of its values are the same at all elements that are reduced.
struct Points<'a> {
    spec: &'a Spec,
    folded: Vec<bool>,
}

/// An instruction at each element, or a reduction: its arguments are numbers of such instructions,
/// and its operand has strides.
type Step = (Inst, Option<Operand>, Option<Dims>);

impl<'a> Points<'a> {
    fn of(spec: &'a Spec) -> Self {
        Points {
            spec,
            folded: spec.per_row(),
        }
    }

    /// The instructions, each with whether its value is the same at all reduced elements.
    fn code(&self) -> impl Iterator<Item = (&'a Inst, bool)> {
        self.spec.code.iter().zip(self.folded.iter().copied())
    }

    /// Whether it loads anything that varies over the elements.
    fn reads(&self) -> bool {
        self.code()
            .any(|(inst, folded)| !folded && matches!(inst, Inst::Load(_)))
    }

    /// Whether no value per element depends on one that is reduced over the elements.
    fn is_one_pass(&self) -> bool {
        let mut follows: Vec<bool> = Vec::with_capacity(self.folded.len());
        for (inst, folded) in self.code() {
            let on_reduced = inst.arguments().iter().any(|&a| follows[usize::from(a)]);
            if on_reduced && (inst.is_reduce() || !folded) {
                return false;
            }
            follows.push(inst.is_reduce() || on_reduced);
        }
        true
    }

    /// The strides of all operands that vary over the elements, if those are the same.
    fn walk(&self) -> Option<&'a Dims> {
        let kept = self.spec.dims.len() - self.spec.reduced;
        let varies = |o: &&Operand| !o.strides[kept..].iter().all(|s| s.is(0));
        let mut walks = self.spec.operands.iter().filter(varies).map(|o| &o.strides);
        let first = walks.next()?;
        walks.all(|strides| strides == first).then_some(first)
    }

    /// The work at each element: its instructions and reductions, and its stores.
    fn steps(&self) -> (Vec<Step>, Vec<(u16, DType, Dims)>) {
        let spec = self.spec;
        let operand = |k: u16| spec.operands[usize::from(k)].clone();
        let mut number: Vec<u16> = Vec::with_capacity(spec.code.len());
        let mut steps: Vec<Step> = Vec::new();
        for (inst, folded) in self.code() {
            // Values that are the same at all elements are computed once, before or after them.
            if folded && !inst.is_reduce() {
                number.push(u16::MAX);
                continue;
            }
            let mut step = inst.clone();
            step.map_arguments(|a| number[usize::from(a)]);
            let (mut read, mut index) = (None, None);
            match &mut step {
                Inst::Load(k) => (read, *k) = (Some(operand(*k)), 0),
                Inst::Uniform { state, .. } => (read, *state) = (Some(operand(*state)), 0),
                Inst::Index(k) => (index, *k) = (Some(spec.indices[usize::from(*k)].clone()), 0),
                _ => {}
            }
            number.push(steps.len() as u16);
            steps.push((step, read, index));
        }
        let points = spec
            .stores
            .iter()
            .filter(|s| !self.folded[usize::from(s.value)]);
        let store = |s: &Store| {
            let Operand { dtype, strides, .. } = operand(s.operand);
            (number[usize::from(s.value)], dtype, strides)
        };
        (steps, points.map(store).collect())
    }
}
