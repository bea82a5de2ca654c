//! Whether two loops reduce in the same order, so that their reductions have the same bits.

use smallvec::SmallVec;

use super::reduce::ReductionOrder;
use super::{Loop, is_fixed};
use crate::cpu::Config;
use crate::cpu::tile::Bound;
use crate::size::Env;
use crate::spec::{Body, MAX_AXES, Spec};

/// Whether two loops over the same space reduce every value along the reduced axes in the same
/// order, split into the same parts, in every run on every team. If so, reductions of values with
/// the same bits have the same bits. (Values computed point by point have the same bits in any
/// case.) `None` if the answer may depend on the sizes of a run, or one of the specs has no kernel.
///
/// All reads and writes of a loop decide how it is split, so a loop with fewer stores may be split
/// differently.
pub fn has_same_sums(a: &Spec, b: &Spec, bound: &Env, config: &Config) -> Option<bool> {
    let same_space = a.dims == b.dims && a.reduced == b.reduced;
    if a.body != Body::Loop || b.body != Body::Loop || !same_space {
        return Some(false);
    }
    if !is_fixed(a) || !is_fixed(b) {
        return None;
    }
    let reductions = |spec| Some(Loop::new(spec, bound, config).ok()?.reductions(spec, bound));
    Some(reductions(a)? == reductions(b)?)
}

impl Loop {
    /// The order of reductions, for a space that has these sizes in every run: the reduced axes of
    /// more than one point in the order of iteration, and how they are split; `None` without
    /// reductions.
    fn reductions(
        &self,
        spec: &Spec,
        bound: &Env,
    ) -> Option<(SmallVec<[usize; MAX_AXES]>, ReductionOrder)> {
        let reduction_order = self.reduction.as_ref()?.reduction_order(&mut Bound::sizes(
            &self.code,
            spec,
            bound,
            &self.order,
        ))?;
        let reduced = self.order[spec.dims.len() - spec.reduced..].iter().copied();
        Some((
            reduced.filter(|&axis| !spec.dims[axis].is(1)).collect(),
            reduction_order,
        ))
    }
}
