//! The steps at which offload and prefetch copies start and end, for given idle intervals.
//!
//! The values to offload are chosen elsewhere; this module assigns steps to each interval. Forwards
//! in time, the offload engine takes completed values in the order of their last use. Computing
//! waits only if a step needs bytes whose copy is still in progress, and bytes are free from the
//! first step on that begins after the copy. Backwards in time, prefetching is the same: the copy
//! of a value takes its turn on the engine at its read, and bytes are free before the last step
//! that begins before the copy. Therefore no copy starts too late or too early for lack of
//! lookahead, and one plan takes two traversals of the schedule.

#[cfg(test)]
mod tests;

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// An idle interval of a value that it is to spend on the host. Steps are positions in the
/// schedule.
#[derive(Clone, Copy, Debug)]
pub(crate) struct IdleInterval {
    /// The value.
    pub value: u32,
    /// The step that completes it.
    pub made: u32,
    /// The last step that reads it before the interval.
    pub used: u32,
    /// The next step that reads it.
    pub read: u32,
    pub bytes: i64,
    /// Whether an earlier interval has left a copy on the host.
    pub is_on_host: bool,
}

/// A planned interval of one value on the host. Steps are positions in the schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Transfer {
    /// The value; in a schedule of a graph file, the step that makes it.
    pub value: u32,
    /// The step before which its copy to the host starts, unless an earlier transfer has left one
    /// there.
    pub sent: u32,
    /// The last step that reads it before the interval.
    pub used: u32,
    /// The first step at which its bytes are free.
    pub gone: u32,
    /// The first step at which its bytes are taken again.
    pub back: u32,
    /// The next step that reads it.
    pub read: u32,
}

/// An event of a transfer before a step. Events of one step happen in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Event {
    /// The copy to the host starts, or is queued.
    Send,
    /// Computing waits for the end of that copy.
    Sent,
    /// Bytes are taken, and the prefetch starts or is queued.
    Fetch,
    /// Computing waits for the end of the prefetch.
    Fetched,
}

/// The events of transfers in the order in which they happen: the step before which each happens,
/// its kind, and the index of its transfer. Engines process copies in this order: offloads by last
/// use, prefetches by next read.
pub(crate) fn events(transfers: &[Transfer]) -> Vec<(u32, Event, u32)> {
    let mut keyed: Vec<(u32, Event, u32, u32)> = Vec::with_capacity(4 * transfers.len());
    for (k, t) in (0u32..).zip(transfers) {
        keyed.extend([
            (t.sent, Event::Send, t.used, k),
            (t.gone, Event::Sent, t.used, k),
        ]);
        keyed.extend([
            (t.back, Event::Fetch, t.read, k),
            (t.read, Event::Fetched, t.read, k),
        ]);
    }
    keyed.sort_unstable();
    keyed
        .into_iter()
        .map(|(step, event, _, k)| (step, event, k))
        .collect()
}

/// A planner of copies. Its buffers are reused from plan to plan.
#[derive(Clone, Debug, Default)]
pub(crate) struct Engines {
    /// Time per byte.
    pub link: f64,
    sent: Vec<u32>,
    gone: Vec<u32>,
    back: Vec<u32>,
    /// The end of each copy in progress.
    done: Vec<f64>,
    /// Intervals that have begun, seen from either end, but whose bytes are not free yet.
    waiting: Vec<u32>,
    by_made: Vec<u32>,
    by_read: Vec<u32>,
    queue: BinaryHeap<Reverse<u32>>,
    /// For each step, the bytes including values whose copies are not complete, and the time that
    /// computing waits before it.
    need: Vec<i64>,
    wait: Vec<f64>,
    /// Intervals too short to offload and prefetch in.
    pub infeasible: Vec<u32>,
    /// The planned transfers.
    pub transfers: Vec<Transfer>,
    /// The most bytes that any step needs with them.
    pub peak: i64,
}

/// The step of an event that does not happen.
const NEVER: u32 = u32::MAX;

/// The most time per byte. With more, sums of times would overflow, and no copy is worthwhile long
/// before.
const SLOWEST: f64 = 1e30;

impl Engines {
    /// Engines that take `link` per byte. Values that are not positive count as 0, and larger ones
    /// as `SLOWEST`.
    pub fn new(link: f64) -> Self {
        Engines {
            link: if link > 0.0 { link.min(SLOWEST) } else { 0.0 },
            ..Engines::default()
        }
    }

    /// Plans the intervals, sorted by [`IdleInterval::used`], of a schedule whose steps take
    /// `costs` and need `need` bytes, at most `budget`, if all intervals are applied. Returns the
    /// time of the schedule, or `None` once it is known to exceed `most`. If `infeasible` is not
    /// empty afterwards, the plan of the other intervals is a guess.
    pub fn plan(
        &mut self,
        costs: &[u64],
        need: &[i64],
        budget: i64,
        intervals: &[IdleInterval],
        most: f64,
    ) -> Option<f64> {
        self.infeasible.clear();
        self.transfers.clear();
        for list in [&mut self.sent, &mut self.gone, &mut self.back] {
            list.clear();
            list.resize(intervals.len(), NEVER);
        }
        self.done.clear();
        self.done.resize(intervals.len(), f64::INFINITY);
        self.send(costs, need, budget, intervals, most)?;
        self.fetch(costs, budget, intervals);
        if !self.infeasible.is_empty() {
            return Some(f64::INFINITY);
        }
        for (k, a) in intervals.iter().enumerate() {
            let IdleInterval {
                value, used, read, ..
            } = *a;
            self.transfers.push(Transfer {
                value,
                sent: self.sent[k].min(used + 1),
                used,
                gone: self.gone[k],
                back: self.back[k],
                read,
            });
        }
        Some(self.time(costs, intervals))
    }

    /// The forward traversal: the start and end of each offload copy, and the waits of steps.
    fn send(
        &mut self,
        costs: &[u64],
        need: &[i64],
        budget: i64,
        intervals: &[IdleInterval],
        most: f64,
    ) -> Option<()> {
        self.by_made.clear();
        self.by_made
            .extend((0..intervals.len() as u32).filter(|&k| !intervals[k as usize].is_on_host));
        self.by_made
            .sort_unstable_by_key(|&k| intervals[k as usize].made);
        self.queue.clear();
        self.waiting.clear();
        self.need.clear();
        self.wait.clear();
        let (mut made, mut begun) = (0, 0);
        let (mut now, mut engine, mut held) = (0.0f64, 0.0f64, 0i64);
        for (p, (&cost, &need)) in (0u32..).zip(costs.iter().zip(need)) {
            let begin = now;
            while let Some(&k) = self
                .by_made
                .get(made)
                .filter(|&&k| intervals[k as usize].made < p)
            {
                self.queue.push(Reverse(k));
                made += 1;
            }
            while let Some(a) = intervals.get(begun).filter(|a| a.used < p) {
                if a.is_on_host {
                    self.gone[begun] = p;
                } else {
                    self.waiting.push(begun as u32);
                    held += a.bytes;
                }
                begun += 1;
            }
            let (infeasible, done, gone) = (&mut self.infeasible, &self.done, &mut self.gone);
            self.waiting.retain(|&k| {
                let IdleInterval { read, bytes, .. } = intervals[k as usize];
                if read == p {
                    infeasible.push(k);
                } else if done[k as usize] <= now {
                    gone[k as usize] = p;
                } else {
                    return true;
                }
                held -= bytes;
                false
            });
            while need + held > budget && !self.waiting.is_empty() {
                // The value that was last used first is copied first, so its copy ends first.
                let first = (0..self.waiting.len()).min_by(|&a, &b| {
                    let done = |at: usize| self.done[self.waiting[at] as usize];
                    done(a)
                        .total_cmp(&done(b))
                        .then(self.waiting[a].cmp(&self.waiting[b]))
                });
                let at = first.unwrap_or(0);
                let k = self.waiting[at] as usize;
                if self.sent[k] == NEVER {
                    self.issue(intervals, p, begin, &mut engine);
                    continue;
                }
                now = now.max(self.done[k]);
                self.gone[k] = p;
                held -= intervals[k].bytes;
                self.waiting.swap_remove(at);
            }
            if now > most {
                return None;
            }
            while engine < now + cost as f64 && !self.queue.is_empty() {
                self.issue(intervals, p, begin, &mut engine);
            }
            self.need.push(need + held);
            self.wait.push(now - begin);
            now += cost as f64;
        }
        Some(())
    }

    /// Starts the copy of the next queued value before step `p`, which cannot begin before `begin`.
    fn issue(&mut self, intervals: &[IdleInterval], p: u32, begin: f64, engine: &mut f64) {
        if let Some(Reverse(k)) = self.queue.pop() {
            let k = k as usize;
            *engine = engine.max(begin) + intervals[k].bytes as f64 * self.link;
            self.sent[k] = p;
            self.done[k] = *engine;
        }
    }

    /// The backward traversal: the step before which each prefetch starts.
    fn fetch(&mut self, costs: &[u64], budget: i64, intervals: &[IdleInterval]) {
        self.by_read.clear();
        self.by_read
            .extend((0..intervals.len() as u32).filter(|&k| self.gone[k as usize] != NEVER));
        self.by_read
            .sort_unstable_by_key(|&k| Reverse((intervals[k as usize].read, k)));
        self.waiting.clear();
        // Time to the end.
        let (mut now, mut engine, mut held) = (0.0f64, 0.0f64, 0i64);
        let mut begun = 0;
        self.peak = 0;
        for p in (0..costs.len() as u32).rev() {
            while let Some(&k) = self
                .by_read
                .get(begun)
                .filter(|&&k| intervals[k as usize].read > p)
            {
                engine = engine.max(now) + intervals[k as usize].bytes as f64 * self.link;
                self.done[k as usize] = engine;
                self.waiting.push(k);
                held += intervals[k as usize].bytes;
                begun += 1;
            }
            let (infeasible, done, gone, back) =
                (&mut self.infeasible, &self.done, &self.gone, &mut self.back);
            self.waiting.retain(|&k| {
                if gone[k as usize] > p {
                    infeasible.push(k);
                } else if done[k as usize] <= now {
                    back[k as usize] = p + 1;
                } else {
                    return true;
                }
                held -= intervals[k as usize].bytes;
                false
            });
            while self.need[p as usize] + held > budget && !self.waiting.is_empty() {
                // The engine processes copies in order, and the list keeps that order.
                let k = self.waiting.remove(0) as usize;
                now = now.max(self.done[k]);
                self.back[k] = p + 1;
                held -= intervals[k].bytes;
            }
            self.peak = self.peak.max(self.need[p as usize] + held);
            now += costs[p as usize] as f64 + self.wait[p as usize];
        }
        // Intervals whose read comes before any step ran.
        self.infeasible.append(&mut self.waiting);
    }

    /// The time of the schedule with the transfers.
    fn time(&mut self, costs: &[u64], intervals: &[IdleInterval]) -> f64 {
        let mut now = 0.0f64;
        let mut engines = [0.0f64; 2];
        let mut next = 0;
        for (step, event, k) in events(&self.transfers) {
            while next < step {
                now += costs[next as usize] as f64;
                next += 1;
            }
            let a = &intervals[k as usize];
            let long = a.bytes as f64 * self.link;
            let done = &mut self.done[k as usize];
            match event {
                Event::Send if a.is_on_host => *done = now,
                Event::Send | Event::Fetch => {
                    let engine = &mut engines[usize::from(event == Event::Fetch)];
                    *engine = engine.max(now) + long;
                    *done = *engine;
                }
                Event::Sent | Event::Fetched => now = now.max(*done),
            }
        }
        costs[next as usize..]
            .iter()
            .fold(now, |now, &cost| now + cost as f64)
    }
}
