//! The transfers of a plan as its user sees them: values that are copied to the host, and bytes
//! that ranks exchange.

use std::fmt;

use slabwise_planner::{Bytes, Dag, Overlapped, Plan as Offsets, TaskId, Work, live_bytes};

use super::{OffloadedValue, Plan};

/// The exchange of bytes between ranks in a step, which is the same on each of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Communication {
    /// The number of ranks that exchange with each other: in a mesh, those of the longest axis that
    /// is exchanged along.
    pub ranks: u32,
    /// Collectives between ranks.
    pub collectives: usize,
    /// Bytes of values that each rank sends to others, at the bounds of dynamic lengths.
    pub sent: u64,
    /// Bytes of the slab that collectives in flight hold at its peak.
    pub at_peak: u64,
    /// The most bytes of the slab that collectives in flight hold at a step.
    pub most: u64,
    /// Collectives that overlap with other kernels.
    pub overlapped: usize,
}

impl Communication {
    /// The exchange of a program of so many ranks, in which each sends these bytes.
    pub(crate) fn new(
        (ranks, sent): (u32, u64),
        dag: &Dag,
        overlapped: &Overlapped,
        offsets: &Offsets,
    ) -> Self {
        let in_flight = overlapped.bytes_in_flight(offsets);
        let live = live_bytes(dag, offsets);
        let peak = live.iter().zip(&in_flight).max_by_key(|(live, _)| **live);
        let mut step_of = vec![0; offsets.order.len()];
        for (step, task) in offsets.order.iter().enumerate() {
            step_of[task.index()] = step;
        }
        let halves = overlapped.halves();
        let is_apart = |[start, finish]: &&[TaskId; 2]| {
            let steps = step_of[start.index()] + 1..step_of[finish.index()];
            let mut between = offsets.order[steps].iter();
            between.any(|t| matches!(overlapped.work[t.index()], Work::Run(_)))
        };
        Communication {
            ranks,
            collectives: halves.len(),
            sent,
            at_peak: peak.map_or(0, |(_, in_flight)| *in_flight),
            most: in_flight.iter().copied().max().unwrap_or(0),
            overlapped: halves.iter().filter(is_apart).count(),
        }
    }
}

impl fmt::Display for Communication {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} ranks · {} sent by each in {} collectives, {} of them beside kernels · in flight {} at the peak, at most {}",
            self.ranks,
            Bytes(self.sent),
            self.collectives,
            self.overlapped,
            Bytes(self.at_peak),
            Bytes(self.most)
        )
    }
}

/// Trips to the host that a plan tells when it is shown.
const OFFLOADED_SHOWN: usize = 4;

impl Plan {
    /// Writes the values that leave the slab, the largest first, with the reason.
    pub(super) fn write_host(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut offloaded: Vec<&OffloadedValue> =
            self.details.budget_report.offloaded.iter().collect();
        if offloaded.is_empty() {
            return Ok(());
        }
        offloaded.sort_by_key(|offloaded| std::cmp::Reverse(offloaded.bytes));
        write!(f, "  host         {}", Bytes(self.host_bytes()))?;
        for offloaded in offloaded.iter().take(OFFLOADED_SHOWN) {
            write!(f, "\n               {offloaded}")?;
        }
        if offloaded.len() > OFFLOADED_SHOWN {
            write!(
                f,
                "\n               {} more",
                offloaded.len() - OFFLOADED_SHOWN
            )?;
        }
        writeln!(f)
    }
}

impl fmt::Display for OffloadedValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} {} away from {} to {}, ",
            self.name, self.bytes, self.used, self.read
        )?;
        write!(
            f,
            "{} steps: copies {:.3} ms",
            self.steps,
            1e3 * self.copying_s
        )?;
        match self.computing_s {
            Some(seconds) => write!(f, ", recomputing it {:.3} ms", 1e3 * seconds),
            None => write!(f, ", cannot be recomputed"),
        }
    }
}
