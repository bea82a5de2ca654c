//! The planning of offload and prefetch copies for schedules with fetches.

use super::state::{CopyId, ScheduleState};
use crate::offload::{Engines, IdleInterval, Transfer};

/// A planner of the copies of schedules with fetches. Its buffers are reused from plan to plan.
pub(super) struct CopyPlanner {
    engines: Engines,
    /// By position, the number of steps before it, not counting fetches.
    step: Vec<u32>,
    /// By step.
    costs: Vec<u64>,
    need: Vec<i64>,
    intervals: Vec<IdleInterval>,
    /// By interval, its fetch.
    fetches: Vec<CopyId>,
    sorted: Vec<(IdleInterval, CopyId)>,
}

impl CopyPlanner {
    pub fn new(link: f64) -> Self {
        CopyPlanner {
            engines: Engines::new(link),
            step: Vec::new(),
            costs: Vec::new(),
            need: Vec::new(),
            intervals: Vec::new(),
            fetches: Vec::new(),
            sorted: Vec::new(),
        }
    }

    pub fn link(&self) -> f64 {
        self.engines.link
    }

    /// The transfers of the last plan, and the most bytes that any step needs with them.
    pub fn planned(&self) -> (&[Transfer], i64) {
        (&self.engines.transfers, self.engines.peak)
    }

    /// The value of each transfer of the last plan, which was made for this schedule.
    pub fn values<'t>(&'t self, state: &'t ScheduleState) -> impl Iterator<Item = u32> + 't {
        self.fetches
            .iter()
            .filter_map(|&fetch| state.net.fetched(state.node[fetch as usize]))
    }

    /// The time of the schedule, or `None` once it is known to exceed `most`. Removes fetches for
    /// which there is no time, so that their values stay in the slab.
    pub fn time(&mut self, state: &mut ScheduleState, budget: i64, most: f64) -> Option<f64> {
        if state.cost as f64 > most {
            return None;
        }
        loop {
            self.find(state);
            // No plan needs fewer bytes than the schedule with all intervals applied.
            let budget = self.need.iter().fold(budget, |most, &need| most.max(need));
            let time = self
                .engines
                .plan(&self.costs, &self.need, budget, &self.intervals, most)?;
            if self.engines.infeasible.is_empty() {
                return Some(time);
            }
            let mut infeasible = std::mem::take(&mut self.engines.infeasible);
            infeasible.sort_unstable();
            infeasible.dedup();
            infeasible
                .iter()
                .for_each(|&k| state.remove(self.fetches[k as usize]));
            self.engines.infeasible = infeasible;
        }
    }

    /// Collects the offload intervals of the schedule.
    fn find(&mut self, state: &mut ScheduleState) {
        let net = state.net;
        // Removes fetches whose value is unread.
        for p in (0..state.len()).rev() {
            if state.is_fetch(p) && state.is_unread(p) {
                state.remove(state.sequence[p as usize]);
            }
        }
        self.step.clear();
        self.costs.clear();
        self.need.clear();
        for p in 0..state.len() {
            self.step.push(self.costs.len() as u32);
            if !state.is_fetch(p) {
                self.costs.push(net.cost[state.node_at(p) as usize]);
                self.need.push(state.need[p as usize]);
            }
        }
        self.sorted.clear();
        for p in 0..state.len() {
            let Some(value) = net.fetched(state.node_at(p)) else {
                continue;
            };
            let of = state
                .source(value, p + 1)
                .and_then(|copy| Some((copy, state.previous(copy)?)));
            let (copy, previous) = of.expect("a fetched value has been computed before");
            let read = state
                .first_read(value, p + 1, state.last[copy as usize] + 1)
                .expect("unread ones are gone");
            // The step that computed it, and whether it was offloaded before.
            let (mut origin, mut is_on_host) = (previous, false);
            while state.is_fetch(state.pos[origin as usize]) {
                is_on_host = true;
                origin = state
                    .previous(origin)
                    .expect("a fetched value has been computed before");
            }
            let step = |p: u32| self.step[p as usize];
            let (made, used, read) = (
                step(state.pos[origin as usize]),
                step(state.last[previous as usize]),
                step(read),
            );
            let bytes = net.bytes[value as usize];
            // The bytes are taken when the prefetch starts, whatever the position of the fetch.
            self.need[step(p) as usize..read as usize]
                .iter_mut()
                .for_each(|need| *need -= bytes);
            self.sorted.push((
                IdleInterval {
                    value: made,
                    made,
                    used,
                    read,
                    bytes,
                    is_on_host,
                },
                state.sequence[p as usize],
            ));
        }
        self.sorted.sort_unstable_by_key(|(a, _)| (a.used, a.value));
        self.intervals.clear();
        self.intervals.extend(self.sorted.iter().map(|(a, _)| *a));
        self.fetches.clear();
        self.fetches
            .extend(self.sorted.iter().map(|(_, fetch)| *fetch));
    }
}
