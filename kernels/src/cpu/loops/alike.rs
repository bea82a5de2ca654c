//! Whether two loops fold alike, so that what both sum comes out the same.

use smallvec::SmallVec;

use super::reduce::ReductionOrder;
use super::{Loop, is_fixed};
use crate::cpu::Config;
use crate::cpu::tile::Bound;
use crate::size::Env;
use crate::spec::{Body, MAX_AXES, Spec};

/// Whether two loops over the same space fold every value along the reduced axes in the same order,
/// cut into the same parts, in every run on every team: a reduction of a value that has the same
/// bits in both then has the same bits in both. (What is computed point by point has them whatever
/// stands beside it.) `None` if that may depend on the sizes of a run, or one of them is no kernel.
///
/// How a loop is cut follows from all that it reads and writes, so one that stores less may be cut
/// differently.
pub fn sums_alike(a: &Spec, b: &Spec, bound: &Env, config: &Config) -> Option<bool> {
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
    /// How values are folded, for a space that has these sizes in every run: the reduced axes of
    /// more than one point in the order in which they are walked, and what is made of them; nothing
    /// if there is nothing to fold.
    fn reductions(
        &self,
        spec: &Spec,
        bound: &Env,
    ) -> Option<(SmallVec<[usize; MAX_AXES]>, ReductionOrder)> {
        let folding = self.reduction.as_ref()?.reduction_order(&mut Bound::sizes(
            &self.code,
            spec,
            bound,
            &self.order,
        ))?;
        let walked = self.order[spec.dims.len() - spec.reduced..].iter().copied();
        Some((
            walked.filter(|&axis| !spec.dims[axis].is(1)).collect(),
            folding,
        ))
    }
}
