//! Packing a problem: the rules where there are some, otherwise the plain core.

use crate::error::ProblemError;
use crate::packing::Packing;
use crate::plain::portfolio::{self, Budget, Limits, pack_plain};
use crate::problem::Problem;
use crate::rules;

impl Problem {
    /// Checks that the problem can be packed: alignments are powers of two, no sum of sizes
    /// overflows, every index is that of an item, and the constraints do not contradict each other.
    pub fn verify(&self) -> Result<(), ProblemError> {
        if let Some((item, it)) = self
            .items
            .iter()
            .enumerate()
            .find(|(_, it)| !it.align.is_power_of_two())
        {
            return Err(ProblemError::Alignment {
                item,
                align: it.align,
            });
        }
        self.stacked()?;
        self.references()?;
        if self.is_plain() {
            Ok(())
        } else {
            rules::verify(self)
        }
    }

    /// The lower bound of the height: the bytes that the fullest instant needs, or the end of the
    /// item that must reach highest. With several spaces, the sum of theirs.
    ///
    /// Saturates where [`Problem::verify`] would fail; constraints that contradict each other give
    /// 0.
    pub fn lower_bound(&self) -> u64 {
        if !self.is_plain() && self.verify().is_err() {
            return 0;
        }
        rules::total_lower_bound(self)
    }

    /// Places the items with the best of several fast heuristics, deterministically. Between two
    /// instants that no life spans, up to eight items without constraints are placed optimally. A
    /// few thousand items take milliseconds where the bound is met early, as it is for nearly all
    /// training steps.
    pub fn pack(&self) -> Result<Packing, ProblemError> {
        self.pack_within(&Limits::default())
    }

    /// Places the items as low as it can within the limits.
    pub fn pack_within(&self, limits: &Limits) -> Result<Packing, ProblemError> {
        self.verify()?;
        if let Some(reachable) = self.with_reachable_start() {
            return reachable.pack_within(limits);
        }
        if !self.is_plain() {
            return rules::pack(self, limits);
        }
        let mut budget = Budget::new(limits);
        budget.goal = self.capacities()[0].or(limits.capacity).unwrap_or(0);
        Ok(pack_plain(self, &budget).into_packing())
    }

    /// Gives every item its own bytes, whether lifetimes overlap or not. Constraints other than
    /// those of each item are ignored.
    pub fn apart(&self) -> Result<Packing, ProblemError> {
        self.verify()?;
        Ok(portfolio::apart(self))
    }
}
