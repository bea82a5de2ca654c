//! Sending idle buffers to the host and fetching them back in time.
//!
//! A copy that lies idle between two reads may be away in between: it is sent out once its last read before has run, its
//! bytes are free from some step on, taken again at a later step, and there before the next read. One engine per direction
//! copies in the order of issue; computing goes on meanwhile, and waits only where bytes must be gone or there. The greedy
//! looks for the idle buffers that relieve most for the least waiting: sent as early, fetched as late as engines allow.

use super::tape::{Copy, Tape};
use crate::generate::Random;

/// One copy away from the device for a while. All numbers are positions in the schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Transfer {
    /// The step that made it.
    pub made: u32,
    /// The last step that reads it before; it is sent when that has run.
    pub used: u32,
    /// From this step on its bytes are free.
    pub gone: u32,
    /// From this step on its bytes are taken again.
    pub back: u32,
    /// The step that reads it next.
    pub read: u32,
}

/// What a run of a schedule with transfers takes.
pub(super) struct Run {
    /// When each step begins.
    start: Vec<f64>,
    /// When each transfer out and in is over; one that needs no sending is over when it begins.
    out: Vec<f64>,
    fetched: Vec<(f64, f64)>,
    pub time: f64,
}

/// A schedule that transfers are planned for.
pub(super) struct Offloader<'t, 'n> {
    tape: &'t Tape<'n>,
    budget: i64,
    /// Time per byte.
    link: f64,
    costs: Vec<f64>,
    need: Vec<i64>,
    pub transfers: Vec<Transfer>,
}

impl<'t, 'n> Offloader<'t, 'n> {
    pub fn new(tape: &'t Tape<'n>, budget: i64, link: f64) -> Self {
        let costs = tape.order().map(|i| tape.net.cost[i as usize] as f64).collect();
        Offloader { tape, budget, link, costs, need: tape.need.clone(), transfers: Vec::new() }
    }

    fn bytes(&self, t: &Transfer) -> i64 {
        self.tape.net.bytes[self.tape.node_at(t.made) as usize]
    }

    /// Whether an earlier transfer has left a copy on the host.
    fn is_on_host(&self, t: &Transfer) -> bool {
        self.transfers.iter().any(|e| e.made == t.made && e.used < t.used)
    }

    /// Runs the schedule on one stream and two engines.
    pub fn run(&self) -> Run {
        let count = self.transfers.len();
        let mut run =
            Run { start: Vec::with_capacity(self.costs.len() + 1), out: vec![0.0; count], fetched: vec![(0.0, 0.0); count], time: 0.0 };
        let mut events: Vec<(u32, u8, u32)> = Vec::with_capacity(4 * count);
        for (k, t) in (0u32..).zip(&self.transfers) {
            events.extend([(t.used + 1, 0, k), (t.gone, 1, k), (t.back, 2, k), (t.read, 3, k)]);
        }
        events.sort_unstable();
        let mut events = events.into_iter().peekable();
        let (mut now, mut engine_out, mut engine_in) = (0.0f64, 0.0f64, 0.0f64);
        for p in 0..=self.costs.len() {
            while let Some((_, what, k)) = events.next_if(|e| e.0 as usize == p) {
                let t = &self.transfers[k as usize];
                let long = self.bytes(t) as f64 * self.link;
                let k = k as usize;
                match what {
                    0 if self.is_on_host(t) => run.out[k] = now,
                    0 => {
                        engine_out = engine_out.max(now) + long;
                        run.out[k] = engine_out;
                    }
                    1 => now = now.max(run.out[k]),
                    2 => {
                        let begin = engine_in.max(now);
                        engine_in = begin + long;
                        run.fetched[k] = (begin, engine_in);
                    }
                    _ => now = now.max(run.fetched[k].1),
                }
            }
            run.start.push(now);
            now += self.costs.get(p).copied().unwrap_or(0.0);
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
        let same = self.transfers.iter_mut().find(|t| t.made == transfer.made && t.used == transfer.used);
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
        let mut start = Vec::with_capacity(self.costs.len());
        for cost in &self.costs {
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
        let here = self.tape.net.inputs.of(self.tape.node_at(at));
        for p in 0..at {
            let c: Copy = self.tape.sequence[p as usize];
            let node = self.tape.node[c as usize];
            let (last, bytes) = (self.tape.last[c as usize], self.tape.net.bytes[node as usize]);
            if last <= at || bytes == 0 || here.contains(&node) {
                continue;
            }
            let Some(read) = self.tape.first_read(node, at + 1, last + 1) else { continue };
            let used = self.tape.last_read(node, p + 1, at).unwrap_or(p);
            let (transfer, waiting) = match self.transfers.iter().find(|t| t.made == p && t.used == used) {
                Some(t) if patient || t.gone <= at && at < t.back => continue,
                // Gone for longer, whoever has to wait.
                Some(t) => (Transfer { gone: t.gone.min(at), back: t.back.max(at + 1), ..*t }, 0.0),
                None => self.place(run, Transfer { made: p, used, gone: at, back: at + 1, read }, bytes),
            };
            if patient && waiting > 0.0 {
                continue;
            }
            let over = self.need[transfer.gone as usize..transfer.back as usize].iter();
            let relief: f64 = over.map(|&n| (n - self.budget).clamp(0, bytes) as f64).sum();
            let luck = (noise * (random.unit() - 0.5)).exp();
            let score = relief * luck / (waiting + 0.02 * bytes as f64 * self.link + 1.0);
            ranked.push((score, transfer, relief * luck));
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
        let sent = run.start[t.used as usize] + self.costs[t.used as usize];
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
            let later = self.transfers.iter().any(|e| e.made == old.made && e.used > old.used);
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
