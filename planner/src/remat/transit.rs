//! The planning of offload and prefetch copies for schedules with fetches.

use super::tape::{Copy, Tape};
use crate::offload::{Absence, Engines, Transfer};

/// A planner of the copies of schedules with fetches. Its buffers are reused from plan to plan.
pub(super) struct Transit {
    engines: Engines,
    /// By position, the number of steps before it, not counting fetches.
    step: Vec<u32>,
    /// By step.
    costs: Vec<u64>,
    need: Vec<i64>,
    absences: Vec<Absence>,
    /// By interval, its fetch.
    fetches: Vec<Copy>,
    sorted: Vec<(Absence, Copy)>,
}

impl Transit {
    pub fn new(link: f64) -> Self {
        Transit {
            engines: Engines::new(link),
            step: Vec::new(),
            costs: Vec::new(),
            need: Vec::new(),
            absences: Vec::new(),
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
    pub fn values<'t>(&'t self, tape: &'t Tape) -> impl Iterator<Item = u32> + 't {
        self.fetches
            .iter()
            .filter_map(|&fetch| tape.net.fetched(tape.node[fetch as usize]))
    }

    /// The time of the schedule, or `None` once it is known to exceed `most`. Removes fetches for
    /// which there is no time, so that their values stay in the slab.
    pub fn time(&mut self, tape: &mut Tape, budget: i64, most: f64) -> Option<f64> {
        if tape.cost as f64 > most {
            return None;
        }
        loop {
            self.find(tape);
            // No plan needs fewer bytes than the schedule with all intervals applied.
            let budget = self.need.iter().fold(budget, |most, &need| most.max(need));
            let time = self
                .engines
                .plan(&self.costs, &self.need, budget, &self.absences, most)?;
            if self.engines.void.is_empty() {
                return Some(time);
            }
            let mut void = std::mem::take(&mut self.engines.void);
            void.sort_unstable();
            void.dedup();
            void.iter()
                .for_each(|&k| tape.remove(self.fetches[k as usize]));
            self.engines.void = void;
        }
    }

    /// Collects the offload intervals of the schedule.
    fn find(&mut self, tape: &mut Tape) {
        let net = tape.net;
        // Removes fetches whose value is unread.
        for p in (0..tape.len()).rev() {
            if tape.is_fetch(p) && tape.is_unread(p) {
                tape.remove(tape.sequence[p as usize]);
            }
        }
        self.step.clear();
        self.costs.clear();
        self.need.clear();
        for p in 0..tape.len() {
            self.step.push(self.costs.len() as u32);
            if !tape.is_fetch(p) {
                self.costs.push(net.cost[tape.node_at(p) as usize]);
                self.need.push(tape.need[p as usize]);
            }
        }
        self.sorted.clear();
        for p in 0..tape.len() {
            let Some(value) = net.fetched(tape.node_at(p)) else {
                continue;
            };
            let of = tape
                .source(value, p + 1)
                .and_then(|copy| Some((copy, tape.previous(copy)?)));
            let (copy, previous) = of.expect("what is fetched has been computed");
            let read = tape
                .first_read(value, p + 1, tape.last[copy as usize] + 1)
                .expect("unread ones are gone");
            // The step that computed it, and whether it was offloaded before.
            let (mut origin, mut is_on_host) = (previous, false);
            while tape.is_fetch(tape.pos[origin as usize]) {
                is_on_host = true;
                origin = tape
                    .previous(origin)
                    .expect("what is fetched has been computed");
            }
            let step = |p: u32| self.step[p as usize];
            let (made, used, read) = (
                step(tape.pos[origin as usize]),
                step(tape.last[previous as usize]),
                step(read),
            );
            let bytes = net.bytes[value as usize];
            // The bytes are taken when the prefetch starts, whatever the position of the fetch.
            self.need[step(p) as usize..read as usize]
                .iter_mut()
                .for_each(|need| *need -= bytes);
            self.sorted.push((
                Absence {
                    value: made,
                    made,
                    used,
                    read,
                    bytes,
                    is_on_host,
                },
                tape.sequence[p as usize],
            ));
        }
        self.sorted.sort_unstable_by_key(|(a, _)| (a.used, a.value));
        self.absences.clear();
        self.absences.extend(self.sorted.iter().map(|(a, _)| *a));
        self.fetches.clear();
        self.fetches
            .extend(self.sorted.iter().map(|(_, fetch)| *fetch));
    }
}
