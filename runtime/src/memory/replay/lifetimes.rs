//! Lifetimes as a trace: what ends at an instant is freed before what begins there is allocated.

use slabwise_planner::csv::Row;

use super::super::source::Stream;
use super::{Op, Trace};

impl Trace {
    /// The trace that makes these lifetimes: at each instant, first what ends is freed, then what begins is allocated, both in
    /// the order of their ids if all of those are numbers (programs number buffers as they make them), else of the rows.
    ///
    /// # Errors
    /// If so many bytes are live at once that they cannot be counted.
    pub fn of_lifetimes(rows: &[Row]) -> Result<Trace, String> {
        let mut sorted: Vec<&Row> = rows.iter().collect();
        let numbers: Option<Vec<u64>> = rows.iter().map(|row| row.id.parse().ok()).collect();
        if numbers.is_some() {
            sorted.sort_by_key(|row| row.id.parse::<u64>().unwrap_or(u64::MAX));
        }
        let rows = sorted;
        let mut events: Vec<(u64, bool, usize)> = Vec::with_capacity(2 * rows.len());
        for (at, row) in rows.iter().enumerate() {
            events.push((row.item.life.start, true, at));
            events.push((row.item.life.end, false, at));
        }
        events.sort_unstable();
        let mut id_of = vec![0; rows.len()];
        let mut allocations = 0;
        let ops: Vec<Op> = events
            .into_iter()
            .map(|(_, begins, at)| {
                if !begins {
                    return Op::Free(id_of[at]);
                }
                id_of[at] = allocations;
                allocations += 1;
                Op::Alloc { bytes: rows[at].item.size, stream: Stream(0) }
            })
            .collect();
        Trace::new(ops).map_err(|_| "the lifetimes have more bytes at once than can be counted".into())
    }
}
