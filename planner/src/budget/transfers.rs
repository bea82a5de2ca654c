//! The choice of idle values to offload to the host.
//!
//! A value may be offloaded between two reads. The search starts with the step that needs most
//! bytes. Of the values that are idle there, it offloads the one with the most relief for its
//! price: the added time of the schedule, as the copy engines report it, and a small price for
//! keeping the engines busy.

use crate::offload::{Engines, IdleInterval, Transfer};

/// A value of a schedule that may be offloaded while it is idle. Steps are positions in the
/// schedule.
#[derive(Clone, Debug)]
pub(super) struct Value {
    pub bytes: i64,
    /// The step that completes it.
    pub made: u32,
    /// The steps that read it after that, ascending.
    pub reads: Vec<u32>,
    /// The priority of offloading this value over another with the same relief.
    pub weight: f64,
}

/// The inputs of the search for offload intervals.
#[derive(Clone, Debug)]
pub(super) struct Timeline {
    /// The time that each step takes.
    pub costs: Vec<u64>,
    /// The bytes that each step needs if no value is offloaded.
    pub need: Vec<i64>,
    pub values: Vec<Value>,
}

/// The number of top-ranked candidates that are planned together with the current intervals before
/// one is chosen.
const TRIED: usize = 6;

/// The number of passes that try to replace each interval by faster ones.
const PASSES: usize = 3;

/// A search for the offload intervals of a schedule.
pub(super) struct Offloader<'t> {
    timeline: &'t Timeline,
    budget: i64,
    /// The bytes that may be on the host, counted as if all copies were there at the same time.
    host: i64,
    /// The bytes that each step needs with all intervals applied.
    need: Vec<i64>,
    /// Sorted by [`IdleInterval::used`].
    intervals: Vec<IdleInterval>,
    engines: Engines,
    /// For each value, whether it is ever on the host.
    sent: Vec<bool>,
}

impl<'t> Offloader<'t> {
    /// A search for transfers that keep the bytes of each step within `budget`, where copying a
    /// byte takes `link`.
    pub fn new(timeline: &'t Timeline, budget: i64, link: f64, host: i64) -> Self {
        let sent = vec![false; timeline.values.len()];
        let (need, engines) = (timeline.need.clone(), Engines::new(link));
        Offloader {
            timeline,
            budget,
            host,
            need,
            intervals: Vec::new(),
            engines,
            sent,
        }
    }

    /// Adds the given intervals, as far as the host has free bytes.
    pub fn begin_with(&mut self, intervals: &[IdleInterval]) {
        for &interval in intervals {
            if self.sent[interval.value as usize] || interval.bytes <= self.left() {
                self.put(interval);
            }
        }
    }

    /// The bytes that are still free on the host.
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

    /// The planned transfers.
    pub fn transfers(&self) -> &[Transfer] {
        &self.engines.transfers
    }

    /// Plans transfers until the schedule fits the budget or no more values can be offloaded.
    /// Returns the time of the schedule, unless it exceeds `most`, and whether it fits.
    /// `busy_price` is the price of the engines' busy time, as a fraction of it: the higher it is,
    /// the fewer bytes are copied.
    pub fn fit(&mut self, busy_price: f64, most: f64) -> Option<(f64, bool)> {
        let time = self.fill(busy_price, most, None)?;
        if self.worst().is_some() {
            return Some((time, false));
        }
        let mut time = self.spare(time);
        let least: f64 = self.timeline.costs.iter().map(|&cost| cost as f64).sum();
        for _ in 0..PASSES {
            let before = time;
            let mut at = 0;
            while at < self.intervals.len() && time > least {
                time = self.replace(at, time, busy_price);
                at += 1;
            }
            if time >= before {
                break;
            }
        }
        Some((self.time(), true))
    }

    /// Adds intervals, except `without`, until the schedule fits or no candidate is left. Returns
    /// the time of the schedule, unless it exceeds `most`.
    fn fill(&mut self, busy_price: f64, most: f64, without: Option<IdleInterval>) -> Option<f64> {
        let mut time = self.estimate();
        while let Some(worst) = self.worst() {
            let Some(interval) = self.choose(worst, time, busy_price, without) else {
                break;
            };
            self.put(interval);
            time = self.estimate();
            if time > most {
                return None;
            }
        }
        Some(self.time())
    }

    /// Replaces one interval by others if that takes less than `time`. Returns the resulting time.
    fn replace(&mut self, at: usize, time: f64, busy_price: f64) -> f64 {
        let before = (self.intervals.clone(), self.need.clone());
        let without = self.take(at);
        if let Some(filled) = self
            .fill(busy_price, time, Some(without))
            .filter(|_| self.worst().is_none())
        {
            let spared = self.spare(filled);
            if spared < time {
                return spared;
            }
        }
        (self.intervals, self.need) = before;
        self.flag();
        time
    }

    /// The step that needs most bytes, if that exceeds the budget.
    fn worst(&self) -> Option<u32> {
        let over = (0u32..)
            .zip(&self.need)
            .filter(|&(_, &need)| need > self.budget);
        over.max_by_key(|&(p, need)| (*need, std::cmp::Reverse(p)))
            .map(|(p, _)| p)
    }

    /// The steps in which the value is offloaded.
    fn gap(a: &IdleInterval) -> std::ops::Range<usize> {
        a.used as usize + 1..a.read as usize
    }

    fn put(&mut self, interval: IdleInterval) {
        let at = self.intervals.partition_point(|a| a.used <= interval.used);
        self.intervals.insert(at, interval);
        self.need[Self::gap(&interval)]
            .iter_mut()
            .for_each(|need| *need -= interval.bytes);
        self.flag();
    }

    fn take(&mut self, at: usize) -> IdleInterval {
        let interval = self.intervals.remove(at);
        self.need[Self::gap(&interval)]
            .iter_mut()
            .for_each(|need| *need += interval.bytes);
        self.flag();
        interval
    }

    /// Marks the intervals whose value already has a copy on the host.
    fn flag(&mut self) {
        self.sent.fill(false);
        for a in &mut self.intervals {
            a.is_on_host = std::mem::replace(&mut self.sent[a.value as usize], true);
        }
    }

    /// The time of the schedule with all intervals planned. Removes the intervals that the engines
    /// had no time for.
    fn time(&mut self) -> f64 {
        loop {
            let planned = self.engines.plan(
                &self.timeline.costs,
                &self.need,
                self.budget,
                &self.intervals,
                f64::INFINITY,
            );
            let infeasible = self.infeasible();
            if infeasible.is_empty() {
                return planned.unwrap_or(f64::INFINITY);
            }
            for &at in infeasible.iter().rev() {
                self.take(at as usize);
            }
        }
    }

    /// The time of the schedule, where the budget is raised to the current need if that is larger.
    /// Leaves the list of intervals unchanged.
    fn estimate(&mut self) -> f64 {
        let kept = (self.intervals.clone(), self.need.clone(), self.budget);
        self.budget = self
            .need
            .iter()
            .fold(self.budget, |most, &need| most.max(need));
        let time = self.time();
        (self.intervals, self.need, self.budget) = kept;
        self.flag();
        time
    }

    /// The intervals that the engines had no time for, or that were not needed.
    fn infeasible(&mut self) -> Vec<u32> {
        let mut infeasible = std::mem::take(&mut self.engines.infeasible);
        infeasible.sort_unstable();
        infeasible.dedup();
        infeasible
    }

    /// The best interval to relieve step `at`, where the schedule takes `time` now.
    fn choose(
        &mut self,
        at: u32,
        time: f64,
        busy_price: f64,
        without: Option<IdleInterval>,
    ) -> Option<IdleInterval> {
        let left = self.left();
        let price = |bytes: i64| busy_price * bytes as f64 * self.engines.link + 1.0;
        let mut ranked: Vec<(f64, f64, IdleInterval)> = Vec::new();
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
            let is_this = |a: &IdleInterval| (a.value, a.used) == (k, used);
            let taken = is_sent && self.intervals.iter().any(is_this)
                || without.as_ref().is_some_and(is_this);
            if taken || bytes > left && !is_sent {
                continue;
            }
            let interval = IdleInterval {
                value: k,
                made,
                used,
                read,
                bytes,
                is_on_host: false,
            };
            let over = self.need[Self::gap(&interval)]
                .iter()
                .map(|&need| (need - self.budget).clamp(0, bytes) as f64);
            let relief = over.sum::<f64>() * value.weight;
            ranked.push((relief / price(bytes), relief, interval));
        }
        ranked.sort_by(|a, b| b.0.total_cmp(&a.0));
        ranked.truncate(TRIED);
        let mut best: Option<(f64, IdleInterval)> = None;
        for (_, relief, interval) in ranked {
            self.put(interval);
            let longer = (self.estimate() - time).max(0.0);
            if let Some(at) = self
                .intervals
                .iter()
                .position(|a| (a.value, a.used) == (interval.value, interval.used))
            {
                self.take(at);
            }
            let score =
                relief / (longer + busy_price * interval.bytes as f64 * self.engines.link + 1.0);
            if best.is_none_or(|b| b.0 < score) {
                best = Some((score, interval));
            }
        }
        best.map(|b| b.1)
    }

    /// Removes intervals that are no longer needed, where that takes no more time. Returns the
    /// resulting time.
    fn spare(&mut self, mut time: f64) -> f64 {
        let mut at = 0;
        while at < self.intervals.len() {
            let a = self.intervals[at];
            if self.need[Self::gap(&a)]
                .iter()
                .all(|&need| need + a.bytes <= self.budget)
            {
                let before = (self.intervals.clone(), self.need.clone());
                self.take(at);
                let without = self.time();
                if without <= time {
                    time = without;
                    continue;
                }
                (self.intervals, self.need) = before;
                self.flag();
            }
            at += 1;
        }
        time
    }
}
