//! Which idle values to send to the host.
//!
//! A value that lies idle between two reads may be away in between. The step that needs most is
//! looked at first, and of the values that lie idle there the one goes that relieves most for the
//! least: for the time that the schedule takes longer, as the engines tell, and a little for
//! keeping them busy.

use super::engines::{Absence, Engines, Transfer};

/// A value of a schedule that may be away while it lies idle. Steps are positions in the schedule.
#[derive(Clone, Debug)]
pub(super) struct Value {
    pub bytes: i64,
    /// The step that completes it.
    pub made: u32,
    /// The steps that read it after that, ascending.
    pub reads: Vec<u32>,
    /// How much it is worth to send this rather than another that relieves as much.
    pub weight: f64,
}

/// A schedule as transfers see it.
#[derive(Clone, Debug)]
pub(super) struct Timeline {
    /// The time that each step takes.
    pub costs: Vec<u64>,
    /// The bytes that each step needs if nothing is away.
    pub need: Vec<i64>,
    pub values: Vec<Value>,
}

/// How many of the values that look best are planned with the others before one is chosen.
const TRIED: usize = 6;

/// How often all are gone through for others that take less time.
const PASSES: usize = 3;

/// A schedule that transfers are planned for.
pub(super) struct Offloader<'t> {
    timeline: &'t Timeline,
    budget: i64,
    /// The bytes that may be on the host together, whenever each is there.
    host: i64,
    /// What each step needs with all absences.
    need: Vec<i64>,
    /// By [`Absence::used`].
    absences: Vec<Absence>,
    engines: Engines,
    /// By value: whether it is ever on the host.
    sent: Vec<bool>,
}

impl<'t> Offloader<'t> {
    /// Looks for transfers that keep the bytes of each step at most `budget`, where moving one
    /// takes `link`.
    pub fn new(timeline: &'t Timeline, budget: i64, link: f64, host: i64) -> Self {
        let sent = vec![false; timeline.values.len()];
        let (need, engines) = (timeline.need.clone(), Engines::new(link));
        Offloader {
            timeline,
            budget,
            host,
            need,
            absences: Vec::new(),
            engines,
            sent,
        }
    }

    /// Begins with absences, as far as the host has room.
    pub fn begin_with(&mut self, absences: &[Absence]) {
        for &absence in absences {
            if self.sent[absence.value as usize] || absence.bytes <= self.left() {
                self.put(absence);
            }
        }
    }

    /// The bytes that others may take on the host.
    fn left(&self) -> i64 {
        self.host
            - self
                .timeline
                .values
                .iter()
                .zip(&self.sent)
                .filter(|(_, sent)| **sent)
                .map(|(v, _)| v.bytes)
                .sum::<i64>()
    }

    /// What was planned.
    pub fn transfers(&self) -> &[Transfer] {
        &self.engines.transfers
    }

    /// Plans transfers until the schedule fits the budget, or no more can be sent; the time that
    /// takes, unless it is more than `most`, and whether it fits. The dearer the engines' time is
    /// taken to be, as a part of it, the fewer bytes are sent.
    pub fn fit(&mut self, dear: f64, most: f64) -> Option<(f64, bool)> {
        let time = self.fill(dear, most, None)?;
        if self.worst().is_some() {
            return Some((time, false));
        }
        let mut time = self.spare(time);
        let least: f64 = self.timeline.costs.iter().map(|&cost| cost as f64).sum();
        for _ in 0..PASSES {
            let before = time;
            let mut at = 0;
            while at < self.absences.len() && time > least {
                time = self.replace(at, time, dear);
                at += 1;
            }
            if time >= before {
                break;
            }
        }
        Some((self.time(), true))
    }

    /// Adds absences, but not that of `without`, until the schedule fits or none is left to add;
    /// the time then, unless it is more than `most`.
    fn fill(&mut self, dear: f64, most: f64, without: Option<Absence>) -> Option<f64> {
        let mut time = self.estimate();
        while let Some(worst) = self.worst() {
            let Some(absence) = self.choose(worst, time, dear, without) else {
                break;
            };
            self.put(absence);
            time = self.estimate();
            if time > most {
                return None;
            }
        }
        Some(self.time())
    }

    /// Sends others instead of one where that takes less than `time`; the time then.
    fn replace(&mut self, at: usize, time: f64, dear: f64) -> f64 {
        let before = (self.absences.clone(), self.need.clone());
        let without = self.take(at);
        if let Some(filled) = self
            .fill(dear, time, Some(without))
            .filter(|_| self.worst().is_none())
        {
            let spared = self.spare(filled);
            if spared < time {
                return spared;
            }
        }
        (self.absences, self.need) = before;
        self.flag();
        time
    }

    /// The step that needs most, if that is too much.
    fn worst(&self) -> Option<u32> {
        let over = (0u32..)
            .zip(&self.need)
            .filter(|&(_, &need)| need > self.budget);
        over.max_by_key(|&(p, need)| (*need, std::cmp::Reverse(p)))
            .map(|(p, _)| p)
    }

    /// The steps in which it is away.
    fn gap(a: &Absence) -> std::ops::Range<usize> {
        a.used as usize + 1..a.read as usize
    }

    fn put(&mut self, absence: Absence) {
        let at = self.absences.partition_point(|a| a.used <= absence.used);
        self.absences.insert(at, absence);
        self.need[Self::gap(&absence)]
            .iter_mut()
            .for_each(|need| *need -= absence.bytes);
        self.flag();
    }

    fn take(&mut self, at: usize) -> Absence {
        let absence = self.absences.remove(at);
        self.need[Self::gap(&absence)]
            .iter_mut()
            .for_each(|need| *need += absence.bytes);
        self.flag();
        absence
    }

    /// Who finds a copy on the host.
    fn flag(&mut self) {
        self.sent.fill(false);
        for a in &mut self.absences {
            a.is_on_host = std::mem::replace(&mut self.sent[a.value as usize], true);
        }
    }

    /// What the schedule takes with all absences planned. There are none any more for which there
    /// was no time.
    fn time(&mut self) -> f64 {
        loop {
            let planned = self.engines.plan(
                &self.timeline.costs,
                &self.need,
                self.budget,
                &self.absences,
                f64::INFINITY,
            );
            let void = self.void();
            if void.is_empty() {
                return planned.unwrap_or(f64::INFINITY);
            }
            for &at in void.iter().rev() {
                self.take(at as usize);
            }
        }
    }

    /// What it takes within what is needed so far, if that is more than the budget. Who need not go
    /// yet stays.
    fn estimate(&mut self) -> f64 {
        let kept = (self.absences.clone(), self.need.clone(), self.budget);
        self.budget = self
            .need
            .iter()
            .fold(self.budget, |most, &need| most.max(need));
        let time = self.time();
        (self.absences, self.need, self.budget) = kept;
        self.flag();
        time
    }

    /// Which absences the engines had no time for, or no need.
    fn void(&mut self) -> Vec<u32> {
        let mut void = std::mem::take(&mut self.engines.void);
        void.sort_unstable();
        void.dedup();
        void
    }

    /// What to send to relieve step `at`, where the schedule takes `time` now.
    fn choose(
        &mut self,
        at: u32,
        time: f64,
        dear: f64,
        without: Option<Absence>,
    ) -> Option<Absence> {
        let left = self.left();
        let price = |bytes: i64| dear * bytes as f64 * self.engines.link + 1.0;
        let mut ranked: Vec<(f64, f64, Absence)> = Vec::new();
        for (k, value) in (0u32..).zip(&self.timeline.values) {
            let Value { bytes, made, .. } = *value;
            let next = value.reads.partition_point(|&read| read < at);
            let Some(&read) = value
                .reads
                .get(next)
                .filter(|&&read| read > at && made < at && bytes > 0)
            else {
                continue;
            };
            let used = next
                .checked_sub(1)
                .map_or(made, |before| value.reads[before]);
            let is_sent = self.sent[k as usize];
            let is_this = |a: &Absence| (a.value, a.used) == (k, used);
            let taken = is_sent && self.absences.iter().any(is_this)
                || without.as_ref().is_some_and(is_this);
            if taken || bytes > left && !is_sent {
                continue;
            }
            let absence = Absence {
                value: k,
                made,
                used,
                read,
                bytes,
                is_on_host: false,
            };
            let over = self.need[Self::gap(&absence)]
                .iter()
                .map(|&need| (need - self.budget).clamp(0, bytes) as f64);
            let relief = over.sum::<f64>() * value.weight;
            ranked.push((relief / price(bytes), relief, absence));
        }
        ranked.sort_by(|a, b| b.0.total_cmp(&a.0));
        ranked.truncate(TRIED);
        let mut best: Option<(f64, Absence)> = None;
        for (_, relief, absence) in ranked {
            self.put(absence);
            let longer = (self.estimate() - time).max(0.0);
            if let Some(at) = self
                .absences
                .iter()
                .position(|a| (a.value, a.used) == (absence.value, absence.used))
            {
                self.take(at);
            }
            let score = relief / (longer + dear * absence.bytes as f64 * self.engines.link + 1.0);
            if best.is_none_or(|b| b.0 < score) {
                best = Some((score, absence));
            }
        }
        best.map(|b| b.1)
    }

    /// Keeps values that need not go after all, where that takes no longer; the time then.
    fn spare(&mut self, mut time: f64) -> f64 {
        let mut at = 0;
        while at < self.absences.len() {
            let a = self.absences[at];
            if self.need[Self::gap(&a)]
                .iter()
                .all(|&need| need + a.bytes <= self.budget)
            {
                let before = (self.absences.clone(), self.need.clone());
                self.take(at);
                let without = self.time();
                if without <= time {
                    time = without;
                    continue;
                }
                (self.absences, self.need) = before;
                self.flag();
            }
            at += 1;
        }
        time
    }
}
