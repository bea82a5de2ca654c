//! The result: a schedule, its explicit steps, and their places in a slab.

use super::network::Network;
use super::state::ScheduleState;
use crate::offload::{Event, Transfer, events};
use crate::remat_graph::{Place, RematGraph, Step};
use slabwise_packer::Lifetime;
use slabwise_packer::{Item, Limits, Problem};

/// A schedule for a budget.
#[derive(Clone, Debug, PartialEq)]
pub struct Remat {
    /// Nodes in the order they run, each at least once.
    pub schedule: Vec<u32>,
    /// The offload intervals.
    pub transfers: Vec<Transfer>,
    /// The budget: the most bytes above the fixed part.
    pub budget: u64,
    /// The most bytes above the fixed part that a step needs. It exceeds the budget if the search
    /// found no schedule that fits.
    pub peak: u64,
    /// The smallest peak found without recomputation.
    pub ordered_peak: u64,
    /// The cost of all steps.
    pub cost: u128,
    /// The cost of all steps plus the waits for transfers.
    pub time: u128,
    /// A lower bound of the time of every schedule within the budget.
    pub time_bound: u128,
    /// A lower bound of the peak of every schedule, and therefore of every budget that can be met.
    pub peak_bound: u64,
}

/// The steps of a schedule with their places in one slab.
#[derive(Clone, Debug, PartialEq)]
pub struct Placed {
    /// Each step, with a place for those that take bytes.
    pub steps: Vec<(Step, Option<Place>)>,
    /// The size of the slab.
    pub height: u64,
}

impl Remat {
    /// Whether it is within the budget.
    pub fn is_met(&self) -> bool {
        self.peak <= self.budget
    }

    /// The number of bytes that are copied to the host.
    pub fn offloaded_bytes(&self, graph: &RematGraph) -> u64 {
        let mut made: Vec<u32> = self.transfers.iter().map(|t| t.value).collect();
        made.sort_unstable();
        made.dedup();
        made.into_iter()
            .map(|p| graph.nodes[self.schedule[p as usize] as usize].bytes)
            .sum()
    }

    /// The schedule as explicit steps; buffers are freed after their last read.
    pub fn steps(&self, graph: &RematGraph) -> Vec<Step> {
        self.lay_out(graph)
            .into_iter()
            .map(|(step, _)| step)
            .collect()
    }

    /// Each step, and the interval of memory that it allocates, if any.
    fn lay_out(&self, graph: &RematGraph) -> Vec<(Step, Option<Stay>)> {
        let (net, nodes) = Network::of(graph);
        let mut number = vec![0; graph.nodes.len()];
        nodes
            .iter()
            .zip(0u32..)
            .for_each(|(&i, c)| number[i as usize] = c);
        let mut order: Vec<u32> = self.schedule.iter().map(|&i| number[i as usize]).collect();
        order.push(net.sink());
        let state = ScheduleState::new(&net, &order);
        let end = self.schedule.len() as u32;
        // By position, the buffers to free after it, and the end of the interval of its value.
        let mut frees: Vec<Vec<u32>> = vec![Vec::new(); order.len()];
        let mut until: Vec<u32> = (0..end).map(|p| state.last[p as usize] + 1).collect();
        for t in &self.transfers {
            until[t.value as usize] = until[t.value as usize].min(t.gone);
        }
        for p in 0..end {
            let last = state.last[p as usize];
            if last < end {
                frees[last as usize].push(self.schedule[p as usize]);
            }
        }
        // By transfer, whether an earlier one has left a copy on the host, and the step from which
        // on the next transfer of the same value frees its bytes.
        let mut by_value: Vec<usize> = (0..self.transfers.len()).collect();
        by_value.sort_unstable_by_key(|&k| (self.transfers[k].value, self.transfers[k].used));
        let mut is_on_host = vec![false; self.transfers.len()];
        let mut next_gone = vec![None; self.transfers.len()];
        for pair in by_value
            .windows(2)
            .filter(|pair| self.transfers[pair[0]].value == self.transfers[pair[1]].value)
        {
            is_on_host[pair[1]] = true;
            next_gone[pair[0]] = Some(self.transfers[pair[1]].gone);
        }
        let mut steps = Vec::new();
        let mut events = events(&self.transfers).into_iter().peekable();
        for p in 0..=end {
            while let Some((_, event, k)) = events.next_if(|event| event.0 == p) {
                let t = &self.transfers[k as usize];
                let node = self.schedule[t.value as usize];
                let is_on_host = is_on_host[k as usize];
                steps.push(match event {
                    Event::Send if is_on_host => continue,
                    Event::Sent if is_on_host => (Step::Free(node), None),
                    Event::Send => (Step::Offload(node), None),
                    Event::Sent => (Step::Offloaded(node), None),
                    Event::Fetch => {
                        let until =
                            next_gone[k as usize].unwrap_or(state.last[t.value as usize] + 1);
                        (
                            Step::Prefetch(node),
                            Some(Stay {
                                from: p,
                                until,
                                bytes: graph.nodes[node as usize].bytes,
                            }),
                        )
                    }
                    Event::Fetched => (Step::Prefetched(node), None),
                });
            }
            if p < end {
                let node = self.schedule[p as usize];
                let stay = Stay {
                    from: p,
                    until: until[p as usize],
                    bytes: graph.nodes[node as usize].bytes,
                };
                steps.push((Step::Compute { node, reuse: None }, Some(stay)));
                steps.extend(
                    frees[p as usize]
                        .iter()
                        .map(|&node| (Step::Free(node), None)),
                );
            }
        }
        steps
    }

    /// Places for all steps in one slab, as low as packing gets it within these limits.
    pub fn place(&self, graph: &RematGraph, limits: &Limits) -> Placed {
        let steps = self.lay_out(graph);
        let item = |from: u32, until: u32, size: u64| Item {
            life: Lifetime::new(u64::from(from), u64::from(until)),
            size,
            align: 1,
        };
        let mut items = Vec::new();
        for (step, stay) in &steps {
            if let Some(stay) = stay {
                items.push(item(stay.from, stay.until, stay.bytes));
                if let Step::Compute { node, .. } = *step {
                    items.push(item(
                        stay.from,
                        stay.from + 1,
                        graph.nodes[node as usize].workspace,
                    ));
                }
            }
        }
        let packing = Problem::new(items).pack_within(limits);
        let (offsets, height) = packing
            .map(|p| (p.offsets, p.height))
            .expect("sums of bytes were checked when the graph was read");
        let mut offsets = offsets.into_iter();
        let mut next = || offsets.next().unwrap_or(0);
        let place = |(step, stay): (Step, Option<Stay>)| {
            let place = stay.map(|_| {
                let offset = next();
                let computes = matches!(step, Step::Compute { .. });
                Place {
                    offset,
                    workspace: if computes { next() } else { 0 },
                }
            });
            (step, place)
        };
        Placed {
            steps: steps.into_iter().map(place).collect(),
            height,
        }
    }
}

/// An interval of bytes, from one step until before another.
#[derive(Clone, Copy)]
struct Stay {
    from: u32,
    until: u32,
    bytes: u64,
}
