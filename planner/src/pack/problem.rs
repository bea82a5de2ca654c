//! What is to be packed, and when it cannot be.

use crate::liveness::Lifetime;

/// One thing to place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Item {
    /// When it needs its bytes. Empty: never, and its offset is 0.
    pub life: Lifetime,
    /// How many bytes. 0: its offset is 0.
    pub size: u64,
    /// Its offset is a multiple of this power of two, and it takes up whole units of it.
    pub align: u64,
}

impl Item {
    /// The bytes it takes up: its size in whole units of its alignment.
    pub fn occupied(&self) -> u64 {
        self.size.checked_next_multiple_of(self.align).unwrap_or(u64::MAX)
    }

    pub(super) fn needs_space(&self) -> bool {
        self.size > 0 && !self.life.is_empty()
    }
}

/// Items to place in one address range.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default)]
pub struct Problem {
    /// The items, in any order.
    pub items: Vec<Item>,
}

/// Why a problem cannot be packed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProblemError {
    /// An alignment is not a power of two.
    #[error("item {item} has alignment {align}, which is no power of two")]
    Alignment {
        /// The index of the item.
        item: usize,
        /// Its alignment.
        align: u64,
    },
    /// All sizes together, in whole units of the coarsest alignment, exceed 64 bits.
    #[error("the items up to {item} together are more bytes than 64 bits hold")]
    TotalSize {
        /// The index of the item at which the sum overflows.
        item: usize,
    },
}

impl Problem {
    /// Checks alignments, and that no sum of sizes overflows.
    pub fn verify(&self) -> Result<(), ProblemError> {
        if let Some((item, it)) = self.items.iter().enumerate().find(|(_, it)| !it.align.is_power_of_two()) {
            return Err(ProblemError::Alignment { item, align: it.align });
        }
        // In whole units of the coarsest alignment items stack without gaps, so no heuristic gets higher than this sum.
        let coarsest = self.items.iter().map(|it| it.align).fold(1, u64::max);
        self.items.iter().enumerate().try_fold(0u64, |total, (item, it)| {
            let sum = it.size.checked_next_multiple_of(coarsest).and_then(|size| total.checked_add(size));
            sum.ok_or(ProblemError::TotalSize { item })
        })?;
        Ok(())
    }

    /// The largest sum of occupied bytes alive at one instant.
    pub fn lower_bound(&self) -> u64 {
        let mut events: Vec<(u64, bool, u64)> = Vec::with_capacity(2 * self.items.len());
        for item in self.items.iter().filter(|item| item.needs_space()) {
            // At one instant, ends sort before starts.
            events.extend([(item.life.start, true, item.occupied()), (item.life.end, false, item.occupied())]);
        }
        events.sort_unstable();
        let (mut live, mut bound) = (0u64, 0);
        for (_, starts, bytes) in events {
            live = if starts { live.saturating_add(bytes) } else { live.saturating_sub(bytes) };
            bound = bound.max(live);
        }
        bound
    }
}
