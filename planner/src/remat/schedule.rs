//! What comes out: a schedule, its explicit steps, and places in a slab.

use super::network::Network;
use super::tape::Tape;
use crate::liveness::Lifetime;
use crate::offload::Transfer;
use crate::pack::{Item, Limits, Problem};
use crate::remat_graph::{Place, RematGraph, Step};

/// A schedule under a budget.
#[derive(Clone, Debug, PartialEq)]
pub struct Remat {
    /// Nodes in the order they run, each once or more.
    pub schedule: Vec<u32>,
    /// What is away from the device for a while.
    pub transfers: Vec<Transfer>,
    /// The most bytes above the fixed part that were allowed.
    pub budget: u64,
    /// The most bytes above the fixed part that a step needs. Above the budget if nothing was found that fits.
    pub peak: u64,
    /// The smallest peak found without recomputation.
    pub ordered_peak: u64,
    /// What all the steps cost.
    pub cost: u128,
    /// What the steps cost with waiting for transfers.
    pub time: u128,
    /// No schedule within the budget takes less.
    pub time_bound: u128,
    /// No schedule has a smaller peak: the floor of every budget.
    pub peak_bound: u64,
}

/// The steps of a schedule with their places in one slab.
#[derive(Clone, Debug, PartialEq)]
pub struct Placed {
    /// Each step; a place for those that take bytes.
    pub steps: Vec<(Step, Option<Place>)>,
    /// The end of the slab.
    pub height: u64,
}

impl Remat {
    /// Whether it is within the budget.
    pub fn is_met(&self) -> bool {
        self.peak <= self.budget
    }

    /// How many bytes are sent to the host.
    pub fn offloaded_bytes(&self, graph: &RematGraph) -> u64 {
        let mut made: Vec<u32> = self.transfers.iter().map(|t| t.value).collect();
        made.sort_unstable();
        made.dedup();
        made.into_iter().map(|p| graph.nodes[self.schedule[p as usize] as usize].bytes).sum()
    }

    /// The schedule step by step, buffers freed after their last read.
    pub fn steps(&self, graph: &RematGraph) -> Vec<Step> {
        self.lay_out(graph).into_iter().map(|(step, _)| step).collect()
    }

    /// Each step, and the stay in memory that it begins: when it is over and how many bytes it is.
    fn lay_out(&self, graph: &RematGraph) -> Vec<(Step, Option<Stay>)> {
        let (net, nodes) = Network::of(graph);
        let mut number = vec![0; graph.nodes.len()];
        nodes.iter().zip(0u32..).for_each(|(&i, c)| number[i as usize] = c);
        let mut order: Vec<u32> = self.schedule.iter().map(|&i| number[i as usize]).collect();
        order.push(net.sink());
        let tape = Tape::new(&net, &order);
        let end = self.schedule.len() as u32;
        // By position: what happens there before the step, sorted by kind; what is free after it.
        let mut before: Vec<Vec<(u8, Step, Option<Stay>)>> = vec![Vec::new(); order.len()];
        let mut frees: Vec<Vec<u32>> = vec![Vec::new(); order.len()];
        let mut until = vec![None; order.len()];
        for t in &self.transfers {
            let made = t.value as usize;
            let node = self.schedule[made];
            let sent = self.transfers.iter().any(|e| e.value == t.value && e.used < t.used);
            if sent {
                before[t.used as usize + 1].push((1, Step::Free(node), None));
            } else {
                before[t.used as usize + 1].push((0, Step::Offload(node), None));
                before[t.gone as usize].push((1, Step::Offloaded(node), None));
            }
            let next = self.transfers.iter().filter(|e| e.value == t.value && e.used > t.used).map(|e| e.used + 1).min();
            let stay = Stay { from: t.back, until: next.unwrap_or(tape.last[made] + 1), bytes: graph.nodes[node as usize].bytes };
            before[t.back as usize].push((2, Step::Prefetch(node), Some(stay)));
            before[t.read as usize].push((3, Step::Prefetched(node), None));
            let first = self.transfers.iter().all(|e| e.value != t.value || e.used >= t.used);
            if first {
                until[made] = Some(t.gone);
            }
        }
        for p in 0..end {
            let last = tape.last[p as usize];
            if last < end {
                frees[last as usize].push(self.schedule[p as usize]);
            }
        }
        let mut steps = Vec::new();
        for p in 0..=end {
            let mut here = std::mem::take(&mut before[p as usize]);
            // Of one kind in the order of transfers, as the engines were planned.
            here.sort_by_key(|&(kind, _, _)| kind);
            steps.extend(here.into_iter().map(|(_, step, stay)| (step, stay)));
            if p < end {
                let node = self.schedule[p as usize];
                let ends = until[p as usize].unwrap_or(tape.last[p as usize] + 1);
                let stay = Stay { from: p, until: ends, bytes: graph.nodes[node as usize].bytes };
                steps.push((Step::Compute { node, reuse: None }, Some(stay)));
                steps.extend(frees[p as usize].iter().map(|&node| (Step::Free(node), None)));
            }
        }
        steps
    }

    /// Places for all the steps in one slab, as low as packing gets it within these limits.
    pub fn place(&self, graph: &RematGraph, limits: &Limits) -> Placed {
        let steps = self.lay_out(graph);
        let item = |from: u32, until: u32, size: u64| Item { life: Lifetime::new(u64::from(from), u64::from(until)), size, align: 1 };
        let mut items = Vec::new();
        for (step, stay) in &steps {
            if let Some(stay) = stay {
                items.push(item(stay.from, stay.until, stay.bytes));
                if let Step::Compute { node, .. } = *step {
                    items.push(item(stay.from, stay.from + 1, graph.nodes[node as usize].workspace));
                }
            }
        }
        let packing = Problem::new(items).pack_within(limits);
        let (offsets, height) = packing.map(|p| (p.offsets, p.height)).expect("sums of bytes were checked when the graph was read");
        let mut offsets = offsets.into_iter();
        let mut next = || offsets.next().unwrap_or(0);
        let place = |(step, stay): (Step, Option<Stay>)| {
            let place = stay.map(|_| {
                let offset = next();
                let computes = matches!(step, Step::Compute { .. });
                Place { offset, workspace: if computes { next() } else { 0 } }
            });
            (step, place)
        };
        Placed { steps: steps.into_iter().map(place).collect(), height }
    }
}

/// Bytes from one step until before another.
#[derive(Clone, Copy)]
struct Stay {
    from: u32,
    until: u32,
    bytes: u64,
}
