//! Checks the numbers that a plan reports: heights, lower bound, size without reuse.

use std::collections::BTreeMap;

use super::violation::Violation;
use super::{Checker, Tenant};
use crate::dag::Space;

impl Checker<'_> {
    /// Checks the heights, the lower bound and the size without reuse.
    pub(super) fn numbers(&self, tenants: &[Tenant]) -> Result<(), Violation> {
        let within = |space| tenants.iter().filter(move |tenant| tenant.space == space);
        for space in [Space::Device, Space::Host] {
            let expected = within(space)
                .map(|tenant| tenant.offset + tenant.bytes)
                .max()
                .unwrap_or(0);
            if self.height(space) != expected {
                return Err(Violation::Height {
                    expected,
                    found: self.height(space),
                });
            }
        }
        let mut changes: BTreeMap<u64, i128> = BTreeMap::new();
        for tenant in within(Space::Device).filter(|tenant| tenant.start < tenant.end) {
            *changes.entry(tenant.start).or_default() += i128::from(tenant.bytes);
            *changes.entry(tenant.end).or_default() -= i128::from(tenant.bytes);
        }
        let (mut live, mut largest) = (0, 0);
        for change in changes.into_values() {
            live += change;
            largest = live.max(largest);
        }
        let expected = largest as u64;
        if self.plan.lower_bound != expected {
            return Err(Violation::LowerBound {
                expected,
                found: self.plan.lower_bound,
            });
        }
        let expected = within(Space::Device).map(|tenant| tenant.bytes).sum();
        if self.plan.without_reuse != expected {
            return Err(Violation::WithoutReuse {
                expected,
                found: self.plan.without_reuse,
            });
        }
        Ok(())
    }
}
