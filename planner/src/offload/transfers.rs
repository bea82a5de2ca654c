//! Which idle values to send to the host, and when.
//!
//! A value that lies idle between two reads may be away in between: it is sent out once its last read before has run, its
//! bytes are free from some step on, taken again at a later step, and there before the next read. One engine per direction
//! copies in the order of issue; computing goes on meanwhile, and waits only where bytes must be gone or there. The greedy
//! looks for the idle values that relieve most for the least waiting: sent as early, fetched as late as engines allow.

use super::engines::{Event, events};
use crate::generate::Random;

/// A value of a schedule that may be away while it lies idle. Steps are positions in the schedule.
#[derive(Clone, Debug)]
pub(crate) struct Value {
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
pub(crate) struct Timeline {
    /// The time that each step takes.
    pub costs: Vec<f64>,
    /// The bytes that each step needs if nothing is away.
    pub need: Vec<i64>,
    pub values: Vec<Value>,
}

/// One value away from the device for a while. Steps are positions in the schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Transfer {
    /// Which value: that of this step in a schedule of a graph file.
    pub value: u32,
    /// The step before which its copying to the host begins, unless an earlier transfer has left a copy there.
    pub sent: u32,
    /// The last step that reads it before.
    pub used: u32,
    /// From this step on its bytes are free.
    pub gone: u32,
    /// From this step on its bytes are taken again.
    pub back: u32,
    /// The step that reads it next.
    pub read: u32,
}

/// What a run of a schedule with transfers takes.
pub(crate) struct Run {
    /// When each step begins.
    start: Vec<f64>,
    /// When each transfer out and in is over; one that needs no sending is over when it begins.
    out: Vec<f64>,
    fetched: Vec<(f64, f64)>,
    pub time: f64,
}

/// A schedule that transfers are planned for.
pub(crate) struct Offloader<'t> {
    timeline: &'t Timeline,
    budget: i64,
    /// Time per byte.
    link: f64,
    /// The bytes that may be on the host together, whenever each is there.
    host: i64,
    need: Vec<i64>,
    pub transfers: Vec<Transfer>,
}

impl<'t> Offloader<'t> {
    /// Looks for transfers that keep the bytes of each step at most `budget`, where moving one takes `link`.
    pub fn new(timeline: &'t Timeline, budget: i64, link: f64, host: i64) -> Self {
        Offloader { timeline, budget, link, host, need: timeline.need.clone(), transfers: Vec::new() }
    }

    fn bytes(&self, t: &Transfer) -> i64 {
        self.timeline.values[t.value as usize].bytes
    }

    /// The bytes of all that is ever on the host.
    fn on_host(&self) -> i64 {
        self.transfers.iter().filter(|t| !self.is_on_host(t)).map(|t| self.bytes(t)).sum()
    }

    /// Whether an earlier transfer has left a copy on the host.
    fn is_on_host(&self, t: &Transfer) -> bool {
        self.transfers.iter().any(|e| e.value == t.value && e.used < t.used)
    }

    /// Runs the schedule on one stream and two engines.
    pub fn run(&self) -> Run {
        let count = self.transfers.len();
        let mut run = Run {
            start: Vec::with_capacity(self.timeline.costs.len() + 1),
            out: vec![0.0; count],
            fetched: vec![(0.0, 0.0); count],
            time: 0.0,
        };
        let mut events = events(&self.transfers).into_iter().peekable();
        let (mut now, mut engine_out, mut engine_in) = (0.0f64, 0.0f64, 0.0f64);
        for p in 0..=self.timeline.costs.len() {
            while let Some((_, what, k)) = events.next_if(|e| e.0 as usize == p) {
                let t = &self.transfers[k as usize];
                let long = self.bytes(t) as f64 * self.link;
                let k = k as usize;
                match what {
                    Event::Send if self.is_on_host(t) => run.out[k] = now,
                    Event::Send => {
                        engine_out = engine_out.max(now) + long;
                        run.out[k] = engine_out;
                    }
                    Event::Sent => now = now.max(run.out[k]),
                    Event::Fetch => {
                        let begin = engine_in.max(now);
                        engine_in = begin + long;
                        run.fetched[k] = (begin, engine_in);
                    }
                    Event::Fetched => now = now.max(run.fetched[k].1),
                }
            }
            run.start.push(now);
            now += self.timeline.costs.get(p).copied().unwrap_or(0.0);
        }
        run.time = now;
        run
    }

    fn change(&mut self, t: &Transfer, sign: i64) {
        let bytes = self.bytes(t) * sign;
        self.need[t.gone as usize..t.back as usize].iter_mut().for_each(|n| *n += bytes);
    }

    /// Plans transfers until the schedule fits the budget; its time, or nothing if it does not, or not in less than `most`.
    /// If `patient`, first only transfers that nothing waits for, wherever they relieve; then, where that is not enough, others.
    pub fn fit(&mut self, random: &mut Random, noise: f64, most: f64, mut patient: bool) -> Option<f64> {
        let mut run = self.run();
        let mut given_up = vec![false; self.need.len()];
        loop {
            let over = (0u32..).zip(&self.need).filter(|&(p, &need)| need > self.budget && !(patient && given_up[p as usize]));
            let Some((worst, _)) = over.max_by_key(|&(p, need)| (*need, std::cmp::Reverse(p))) else {
                if patient && self.peak() > self.budget {
                    patient = false;
                    continue;
                }
                return Some(self.relax(run.time));
            };
            match self.choose(&run, worst, random, noise, patient) {
                Some(transfer) => {
                    self.change(&transfer, -1);
                    if let Some(old) = self.put(transfer) {
                        self.change(&old, 1);
                    }
                    run = self.run();
                    if patient {
                        run = self.delay(run);
                    }
                    if run.time > most {
                        return None;
                    }
                }
                None if patient => given_up[worst as usize] = true,
                None => return None,
            }
        }
    }

    /// Adds a transfer, in place of the one of the same stretch if there is one.
    fn put(&mut self, transfer: Transfer) -> Option<Transfer> {
        let same = self.transfers.iter_mut().find(|t| t.value == transfer.value && t.used == transfer.used);
        match same {
            Some(old) => Some(std::mem::replace(old, transfer)),
            None => {
                self.transfers.push(transfer);
                None
            }
        }
    }

    /// Lets what is sent or fetched later than it was before a transfer came between stay longer, so that nothing waits.
    fn delay(&mut self, run: Run) -> Run {
        if (0..self.transfers.len()).all(|k| run.out[k] <= run.start[self.transfers[k].gone as usize] + 1e-6) {
            return run;
        }
        // Without waiting, steps begin when those before them are over.
        let mut now = 0.0;
        let mut start = Vec::with_capacity(self.timeline.costs.len());
        for cost in &self.timeline.costs {
            start.push(now);
            now += cost;
        }
        for _ in 0..4 {
            let run = self.run();
            let mut moved = false;
            for k in 0..self.transfers.len() {
                let t = self.transfers[k];
                let gone = (start.partition_point(|&s| s < run.out[k]) as u32).clamp(t.gone, t.back - 1);
                if run.out[k] > run.start[t.gone as usize] + 1e-6 && gone > t.gone {
                    self.change(&t, 1);
                    self.transfers[k].gone = gone;
                    let later = self.transfers[k];
                    self.change(&later, -1);
                    moved = true;
                }
            }
            if !moved {
                break;
            }
        }
        self.run()
    }

    /// What to send to relieve step `at`.
    fn choose(&mut self, run: &Run, at: u32, random: &mut Random, noise: f64, patient: bool) -> Option<Transfer> {
        let mut ranked: Vec<(f64, Transfer, f64)> = Vec::new();
        let left = self.host - self.on_host();
        for (k, value) in (0u32..).zip(&self.timeline.values) {
            let Value { bytes, made, .. } = *value;
            let next = value.reads.partition_point(|&read| read < at);
            let Some(&read) = value.reads.get(next).filter(|&&read| read > at && made < at && bytes > 0) else { continue };
            let used = next.checked_sub(1).map_or(made, |before| value.reads[before]);
            let (transfer, waiting) = match self.transfers.iter().find(|t| t.value == k && t.used == used) {
                Some(t) if patient || t.gone <= at && at < t.back => continue,
                // Gone for longer, whoever has to wait.
                Some(t) => (Transfer { gone: t.gone.min(at), back: t.back.max(at + 1), ..*t }, 0.0),
                None if bytes > left && !self.transfers.iter().any(|t| t.value == k) => continue,
                None => self.place(run, Transfer { value: k, sent: used + 1, used, gone: at, back: at + 1, read }, bytes),
            };
            if patient && waiting > 0.0 {
                continue;
            }
            let over = self.need[transfer.gone as usize..transfer.back as usize].iter();
            let relief: f64 = over.map(|&n| (n - self.budget).clamp(0, bytes) as f64).sum();
            let worth = value.weight * (noise * (random.unit() - 0.5)).exp();
            let score = relief * worth / (waiting + 0.02 * bytes as f64 * self.link + 1.0);
            ranked.push((score, transfer, relief * worth));
        }
        ranked.sort_by(|a, b| b.0.total_cmp(&a.0));
        ranked.truncate(6);
        let mut best: Option<(f64, Transfer)> = None;
        for (_, transfer, relief) in ranked {
            let replaced = self.put(transfer);
            let time = self.run().time;
            match replaced {
                Some(old) => drop(self.put(old)),
                None => drop(self.transfers.pop()),
            }
            let used = 0.02 * self.bytes(&transfer) as f64 * self.link + 1.0;
            let score = relief / ((time - run.time).max(0.0) + used);
            if best.is_none_or(|b| b.0 < score) {
                best = Some((score, transfer));
            }
        }
        best.map(|b| b.1)
    }

    /// The steps in which a transfer is gone and back, such that it covers step `gone` of `t`, and about how long it makes
    /// the schedule wait.
    fn place(&self, run: &Run, t: Transfer, bytes: i64) -> (Transfer, f64) {
        let at = t.gone;
        let long = bytes as f64 * self.link;
        let sent = run.start[t.used as usize] + self.timeline.costs[t.used as usize];
        let mut free = sent;
        if !self.is_on_host(&t) {
            let before = self.transfers.iter().zip(&run.out).filter(|(e, _)| e.used <= t.used);
            free = before.fold(sent, |free, (_, &end)| free.max(end)) + long;
        }
        // Buffers sent later wait for this one; how much that matters the run tells.
        let gone = (run.start.partition_point(|&s| s < free) as u32).max(t.used + 1);
        let mut waiting = if gone > at { free - run.start[at as usize] } else { 0.0 };
        let gone = gone.min(at);
        // The latest free window of the engine before the read.
        let mut windows: Vec<(f64, f64)> = run.fetched.iter().copied().filter(|w| w.1 > w.0).collect();
        windows.sort_by(|a, b| b.0.total_cmp(&a.0));
        let mut end = run.start[t.read as usize];
        for (from, to) in windows {
            if from < end && to > end - long {
                end = from;
            }
        }
        let begin = end - long;
        let back = (run.start.partition_point(|&s| s <= begin) as u32).saturating_sub(1).min(t.read);
        if back <= at {
            waiting += run.start[at as usize + 1].max(begin) - begin;
        }
        (Transfer { gone, back: back.max(at + 1), ..t }, waiting)
    }

    /// Lets buffers stay longer and come sooner where there is room, and stay altogether where they can; what that takes.
    fn relax(&mut self, time: f64) -> f64 {
        let mut best = time;
        let mut k = 0;
        while k < self.transfers.len() {
            let old = self.transfers[k];
            let bytes = self.bytes(&old);
            self.change(&old, 1);
            let fits = |need: &[i64]| need.iter().all(|&n| n <= self.budget);
            let later = self.transfers.iter().any(|e| e.value == old.value && e.used > old.used);
            if !later && fits(&self.need[old.gone as usize..old.back as usize]) {
                let without = self.transfers.remove(k);
                let time = self.run().time;
                if time <= best {
                    best = time;
                    continue;
                }
                self.transfers.insert(k, without);
            }
            let mut wide = old;
            while wide.gone + 1 < wide.back && self.need[wide.gone as usize] <= self.budget {
                wide.gone += 1;
            }
            while wide.back > wide.gone + 1 && self.need[wide.back as usize - 1] <= self.budget {
                wide.back -= 1;
            }
            let options = [wide, Transfer { back: old.back, ..wide }, Transfer { gone: old.gone, ..wide }];
            let mut chosen = old;
            for option in options {
                self.transfers[k] = option;
                let time = self.run().time;
                if time < best {
                    (best, chosen) = (time, option);
                }
            }
            self.transfers[k] = chosen;
            debug_assert_eq!(self.bytes(&chosen), bytes);
            self.change(&chosen, -1);
            k += 1;
        }
        best
    }

    /// The most that any step needs with the transfers.
    pub fn peak(&self) -> i64 {
        self.need.iter().copied().max().unwrap_or(0)
    }
}
