//! Lifetimes as a trace: at an instant, blocks that end are freed before those that begin are
//! allocated.

use slabwise_planner::csv::Table;

use super::{Op, Trace};
use slabwise_pool::Stream;

impl Trace {
    /// The trace that makes these lifetimes: at each instant, first the blocks that end are freed,
    /// then those that begin are allocated, both in the order of their ids if all of those are
    /// numbers (programs number buffers as they make them), else of the rows. Only ids, lifetimes
    /// and sizes are read: the pool chooses offsets, so their constraints are ignored.
    ///
    /// # Errors
    /// If the bytes live at once overflow.
    pub fn of_lifetimes(table: &Table) -> Result<Trace, String> {
        let items = &table.problem.items;
        let mut order: Vec<usize> = (0..items.len())
            .filter(|&item| !items[item].life.is_empty())
            .collect();
        let numbers: Option<Vec<u64>> = (0..items.len())
            .map(|item| table.id(item).parse().ok())
            .collect();
        if let Some(numbers) = numbers {
            order.sort_by_key(|&item| numbers[item]);
        }
        let mut events: Vec<(u64, bool, usize)> = Vec::with_capacity(2 * order.len());
        for (at, &item) in order.iter().enumerate() {
            events.push((items[item].life.start, true, at));
            events.push((items[item].life.end, false, at));
        }
        events.sort_unstable();
        let mut id_of = vec![0; order.len()];
        let mut allocations = 0;
        let ops: Vec<Op> = events
            .into_iter()
            .map(|(_, begins, at)| {
                if !begins {
                    return Op::Free(id_of[at]);
                }
                id_of[at] = allocations;
                allocations += 1;
                Op::Alloc {
                    bytes: items[order[at]].size,
                    stream: Stream(0),
                }
            })
            .collect();
        Trace::new(ops)
            .map_err(|_| "the lifetimes have more bytes at once than can be counted".into())
    }
}
