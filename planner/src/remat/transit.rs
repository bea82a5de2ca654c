//! Schedules with fetches, and what the engines make of them.

use super::tape::{Copy, Tape};
use crate::offload::{Absence, Engines, Transfer};

/// Plans the copies of tapes with fetches, in buffers that are used again.
pub(super) struct Transit {
    engines: Engines,
    /// By position on the tape: how many steps are before it, fetches not counted.
    step: Vec<u32>,
    /// By step.
    costs: Vec<u64>,
    need: Vec<i64>,
    absences: Vec<Absence>,
    /// By absence: its fetch.
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

    /// The transfers of what was last planned, and the most that any step needs with them.
    pub fn planned(&self) -> (&[Transfer], i64) {
        (&self.engines.transfers, self.engines.peak)
    }

    /// The value that each of the transfers last planned on this tape moves.
    pub fn values<'t>(&'t self, tape: &'t Tape) -> impl Iterator<Item = u32> + 't {
        self.fetches
            .iter()
            .filter_map(|&fetch| tape.net.fetched(tape.node[fetch as usize]))
    }

    /// What the schedule takes, unless it is clear that it is more than `most`. Values are kept
    /// instead of fetched where there is no time to fetch them.
    pub fn time(&mut self, tape: &mut Tape, budget: i64, most: f64) -> Option<f64> {
        if tape.cost as f64 > most {
            return None;
        }
        loop {
            self.find(tape);
            // With less than what is there when everything is away no plan does.
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

    /// What is away when.
    fn find(&mut self, tape: &mut Tape) {
        let net = tape.net;
        // Nobody reads what is fetched there.
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
            // What computed it, and whether it was away before.
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
            // Room is taken when the copy begins, wherever the tape says.
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
