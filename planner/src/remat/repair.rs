//! Repair of a schedule that exceeds the budget, and pruning of recomputations.
//!
//! *Repair*: while a step needs too much, one of the buffers that are idle there is dropped after
//! its previous read and recomputed just before its next read, together with those of its inputs
//! that are gone by then. The buffer chosen has the most bytes × steps relieved per cost.
//! *Pruning*: removes a copy if the copy before it can stay live instead.

use std::ops::Range;
use std::time::Instant;

use super::network::Network;
use super::state::{CopyId, ScheduleState};
use slabwise_packer::random::{Random, exp};

/// The limits and the buffers of repairs.
pub(super) struct Repairer {
    pub budget: i64,
    /// The amount of random noise in scores: 0 for none.
    pub noise: f64,
    /// The weight of freed bytes beyond the excess, as a fraction of the buffer.
    pub greed: f64,
    /// The assumed cost of prefetching a byte, if values may be prefetched from the host (see
    /// [`Network::with_fetches`]).
    pub fetching: Option<f64>,
    /// The time at which to give up.
    pub until: Option<Instant>,
    /// The steps that need too much; and for each step, the number of them before it, if counted.
    over: Vec<u32>,
    before: Vec<u32>,
    /// The computations to repeat for the current candidate, inputs first; and for the best one.
    chain: Vec<u32>,
    best_chain: Vec<u32>,
    /// The unfinished computations of a chain, each an input of the one before, and the number of
    /// their inputs that are dealt with.
    path: Vec<(u32, usize)>,
    /// For each computation, the last `round` in which it was in `chain` or was found impossible.
    seen: Vec<u32>,
    round: u32,
    /// For each computation, the repair in which it was moved last. Moving is free, so moving twice
    /// could cycle.
    moved: Vec<u32>,
    repairs: u32,
    /// Candidates and copies to prune.
    order: Vec<(f64, CopyId)>,
    /// In a [long](super::state::is_long) schedule, the best copies of the last full scan, and the
    /// score of the first one beyond them.
    shortlist: Vec<CopyId>,
    shortlisted: f64,
}

/// The most copies on the shortlist, and the divisor of the candidates for it.
const SHORT: usize = 64;
const SHORT_PART: usize = 4;

/// An action to relieve a step that needs too much.
enum Action {
    /// Insert `best_chain` before this position, and remove the copy if that leaves it unread.
    Recompute(u32, CopyId),
    /// Move a copy to before this position.
    Move(CopyId, u32),
}

/// The step to relieve, and the bytes that the drop frees.
#[derive(Clone, Copy)]
struct Relief {
    at: u32,
    worth: i64,
}

/// The best action so far.
struct BestAction {
    action: Option<Action>,
    score: f64,
}

impl BestAction {
    /// Keeps `action` if it is better.
    fn offer(&mut self, score: f64, action: Action) -> bool {
        let better = score > self.score;
        if better {
            *self = BestAction {
                action: Some(action),
                score,
            };
        }
        better
    }
}

impl Repairer {
    pub fn new(nodes: usize, budget: i64) -> Repairer {
        let (over, chain, best_chain, order) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        Repairer {
            budget,
            noise: 0.0,
            greed: 0.25,
            fetching: None,
            until: None,
            over,
            before: Vec::new(),
            chain,
            best_chain,
            path: Vec::new(),
            seen: vec![0; nodes],
            round: 0,
            moved: vec![0; nodes],
            repairs: 0,
            order,
            shortlist: Vec::new(),
            shortlisted: 0.0,
        }
    }

    fn is_over(&self) -> bool {
        self.until.is_some_and(|until| Instant::now() >= until)
    }

    /// The cost of a step for scores.
    #[inline]
    fn price(&self, net: &Network, node: u32) -> u128 {
        match net.fetched(node) {
            Some(value) => {
                (self.fetching.unwrap_or(0.0) * net.bytes[value as usize] as f64) as u128
            }
            None => u128::from(net.cost[node as usize]),
        }
    }

    /// Repairs all steps that need too much. False if that is impossible, or takes more than
    /// `inserts_max` further recomputations or a cost above `cost_max`; the schedule is then valid
    /// but does not fit.
    pub fn repair(
        &mut self,
        state: &mut ScheduleState,
        random: &mut Random,
        inserts_max: usize,
        cost_max: u128,
    ) -> bool {
        let mut inserted = 0;
        self.repairs += 1;
        self.shortlist.clear();
        loop {
            let Some(worst) = self.worst(state) else {
                return true;
            };
            if inserted >= inserts_max || state.cost > cost_max || self.is_over() {
                return false;
            }
            let Some(action) = self.choose(state, random, worst) else {
                return false;
            };
            match action {
                Action::Recompute(read, copy) => {
                    inserted += self.best_chain.len();
                    for (k, &node) in self.best_chain.iter().enumerate() {
                        state.insert(node, read + k as u32);
                    }
                    if state.is_unread(state.pos[copy as usize]) && state.may_remove(copy) {
                        state.remove(copy);
                    }
                }
                Action::Move(copy, to) => {
                    inserted += 1;
                    self.moved[state.node[copy as usize] as usize] = self.repairs;
                    state.relocate(copy, to);
                }
            }
        }
    }

    /// The step that needs most, if that is too much; lists all steps that need too much.
    fn worst(&mut self, state: &ScheduleState) -> Option<u32> {
        let (mut worst, mut most) = (None, self.budget);
        self.over.clear();
        self.before.clear();
        for (p, need) in state.need.over(self.budget) {
            if need > most {
                (worst, most) = (Some(p), need);
            }
            self.over.push(p);
        }
        worst
    }

    /// The number of steps in `from..to` that need too much.
    fn relieved(&self, from: u32, to: u32) -> u32 {
        let search = |p: u32| self.over.partition_point(|&q| q < p) as u32;
        let before = |p: u32| {
            self.before
                .get(p as usize)
                .copied()
                .unwrap_or_else(|| search(p))
        };
        before(to) - before(from)
    }

    /// Counts the steps that need too much, so that [`Repairer::relieved`] is fast for any range of
    /// the `steps` steps.
    fn count(&mut self, steps: u32) {
        self.before.reserve(steps as usize + 1);
        for (before, &p) in (0u32..).zip(&self.over) {
            self.before.resize(p as usize + 1, before);
        }
        self.before
            .resize(steps as usize + 1, self.over.len() as u32);
    }

    /// The best action for step `at`; leaves the computations to repeat in `best_chain`.
    fn choose(&mut self, state: &ScheduleState, random: &mut Random, at: u32) -> Option<Action> {
        let mut best = BestAction {
            action: None,
            score: 0.0,
        };
        if !self.shortlist.is_empty() {
            let shortlist = std::mem::take(&mut self.shortlist);
            for &c in &shortlist {
                self.score_copy(state, random, at, c, &mut best);
            }
            self.shortlist = shortlist;
            if best.action.is_some() && best.score >= self.shortlisted {
                return best.action;
            }
            best = BestAction {
                action: None,
                score: 0.0,
            };
        }

        let is_long = state.is_long();
        if is_long {
            self.count(state.len());
        }
        self.order.clear();
        for p in 0..at {
            for c in state.made_at(p) {
                let score = self.score_copy(state, random, at, c, &mut best);
                if is_long && score > 0.0 {
                    self.order.push((score, c));
                }
            }
        }
        self.shortlist.clear();
        let short = SHORT.min(self.order.len() / SHORT_PART);
        if short > 0 {
            self.order
                .select_nth_unstable_by(short, |a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
            self.shortlist
                .extend(self.order[..short].iter().map(|o| o.1));
            self.shortlisted = self.order[short].0;
        }
        best.action
    }

    /// Offers the actions on a copy that relieve step `at`. Returns the score of the best, or its
    /// upper bound without the cost of further recomputations.
    fn score_copy(
        &mut self,
        state: &ScheduleState,
        random: &mut Random,
        at: u32,
        c: CopyId,
        best: &mut BestAction,
    ) -> f64 {
        let net = state.net;
        let (p, last) = (state.pos[c as usize], state.last[c as usize]);
        if last <= at || p >= at {
            return 0.0;
        }
        let value = state.node[c as usize];
        let bytes = net.bytes[value as usize];
        if bytes == 0 || net.inputs.of(state.node_at(at)).contains(&value) {
            return 0.0;
        }
        let Some(read) = state.first_read(value, at + 1, last + 1) else {
            return 0.0;
        };
        let excess = state.need[at as usize] - self.budget;
        let epsilon = 1e-9 * net.base_cost as f64 + 1.0;
        let (made, node) = (state.sequence[p as usize], net.maker(value));
        let used = state.last_read(value, p + 1, at).unwrap_or(p);
        // No value made with it has been read by then.
        let unused = used == p
            && net
                .makes(node)
                .all(|v| v == value || state.last_read(v, p + 1, read).is_none());
        let steps = self.relieved(used + 1, read);
        let noise_factor = if self.noise > 0.0 {
            exp(self.noise * (random.unit() - 0.5))
        } else {
            1.0
        };
        let score = |relieved: i64, cost: u128| {
            relieved as f64 * f64::from(steps) / (cost as f64 + epsilon) * noise_factor
        };
        let enough = excess.max((bytes as f64 * self.greed) as i64);
        let reader = state.sequence[read as usize];
        let mut own = 0.0f64;
        if read == last
            && let Some(gain) = self.gain_if_earlier(state, reader, read, at)
        {
            own = own.max(score(gain.min(enough), 0));
            best.offer(score(gain.min(enough), 0), Action::Move(reader, at));
        }
        if unused && let Some(gain) = self.gain_if_later(state, made, read, at) {
            own = own.max(score(gain.min(enough), 0));
            best.offer(score(gain.min(enough), 0), Action::Move(made, read));
        }
        if steps == 0 {
            return own;
        }
        let saved = if unused {
            self.price(net, state.node_at(p))
        } else {
            0
        };
        if self.fetching.is_some()
            && let Some(fetch) = net.fetch_of(value)
        {
            // The first copy cannot be saved, because the value must be computed before it is
            // offloaded.
            let saved = if state.copies[value as usize].first() == Some(&c) {
                0
            } else {
                saved
            };
            let cost = self.price(net, fetch).saturating_sub(saved);
            own = own.max(score(bytes.min(enough), cost));
            if best.offer(
                score(bytes.min(enough), cost),
                Action::Recompute(read, made),
            ) {
                self.best_chain.clear();
                self.best_chain.push(fetch);
            }
        }
        if net.once[node as usize] {
            return own;
        }
        // Recomputed inputs only add cost, so this score is an upper bound.
        let saved = saved.min(u128::from(net.cost[node as usize]));
        let alone = score(
            bytes.min(enough),
            u128::from(net.cost[node as usize]) - saved,
        );
        if alone <= best.score {
            return own.max(alone);
        }
        // Chains that cost more cannot be the best.
        let most =
            bytes.min(enough) as f64 * f64::from(steps) * noise_factor / best.score - epsilon;
        let most = saved.saturating_add((most.max(0.0) * (1.0 + 1e-9) + 1.0) as u128);
        self.chain.clear();
        self.round += 1;
        let Some((cost, kept)) =
            self.extend_chain(state, node, read, Relief { at, worth: bytes }, most)
        else {
            return own;
        };
        own = own.max(score((bytes - kept).min(enough), cost - saved));
        if best.offer(
            score((bytes - kept).min(enough), cost - saved),
            Action::Recompute(read, made),
        ) {
            std::mem::swap(&mut self.chain, &mut self.best_chain);
        }
        own
    }

    /// The bytes that step `at` gains if the copy at `read` is made just before it instead; `None`
    /// if that is impossible.
    fn gain_if_earlier(
        &self,
        state: &ScheduleState,
        copy: CopyId,
        read: u32,
        at: u32,
    ) -> Option<i64> {
        let net = state.net;
        let node = state.node[copy as usize];
        let ready = |j: u32| {
            state
                .source(j, read)
                .is_some_and(|s| state.pos[s as usize] < at)
        };
        if node == net.sink()
            || self.moved[node as usize] == self.repairs
            || !net.inputs.of(node).iter().all(|&j| ready(j))
            || !state.is_quiet(node, at, read)
        {
            return None;
        }
        let mut gain = -state.makes_bytes(node);
        for &j in net.inputs.of(node) {
            let s = state.source(j, read)?;
            if state.last[s as usize] < read {
                continue;
            }
            if state.last_read(j, at, read).is_none() {
                gain += net.bytes[j as usize];
            }
        }
        Some(gain)
    }

    /// The bytes that step `at` gains if `copy`, which is unread by then, is made just before
    /// `read`; `None` if that is impossible.
    fn gain_if_later(
        &self,
        state: &ScheduleState,
        copy: CopyId,
        read: u32,
        at: u32,
    ) -> Option<i64> {
        let net = state.net;
        let node = state.node[copy as usize];
        let p = state.pos[copy as usize];
        if self.moved[node as usize] == self.repairs || !state.is_quiet(node, p + 1, read) {
            return None;
        }
        let mut gain = state.makes_bytes(node);
        for &j in net.inputs.of(node) {
            let s = state.source(j, p)?;
            if state.last[s as usize] < at {
                gain -= net.bytes[j as usize];
            }
        }
        Some(gain)
    }

    /// Appends to `chain` the computations that make `node` just before `read`, inputs first. An
    /// input that is gone by then is kept live if the budget allows, and is recomputed otherwise.
    /// Returns the cost and the bytes kept live across step `relief.at`; `None` if it is impossible
    /// or costs more than `most`.
    fn extend_chain(
        &mut self,
        state: &ScheduleState,
        node: u32,
        read: u32,
        relief: Relief,
        most: u128,
    ) -> Option<(u128, i64)> {
        let Relief { at, worth } = relief;
        let (mut cost, mut kept) = (0, 0);
        self.path.clear();
        let mut next = Some(node);
        loop {
            if let Some(node) = next.take() {
                cost += u128::from(state.net.cost[node as usize]);
                if cost > most || !state.may_insert(node, read) {
                    return None;
                }
                self.seen[node as usize] = self.round;
                self.path.push((node, 0));
            }
            let Some((node, input)) = self.path.last_mut() else {
                return Some((cost, kept));
            };
            let Some(&j) = state.net.inputs.of(*node).get(*input) else {
                self.chain.push(*node);
                self.path.pop();
                continue;
            };
            *input += 1;
            let maker = state.net.maker(j);
            if self.seen[maker as usize] == self.round {
                continue;
            }
            let source = state.source(j, read)?;
            let last = state.last[source as usize];
            if last >= read {
                continue;
            }
            let bytes = state.net.bytes[j as usize];
            // At the step to relieve, no bytes are free.
            let room = last >= at && state.peak_in(last + 1, read) + bytes <= self.budget;
            if room {
                continue;
            }
            if bytes * 16 <= worth {
                kept += if last < at { bytes } else { 0 };
                continue;
            }
            let fetch = self.fetching.and_then(|_| state.net.fetch_of(j));
            let dearer = |&fetch: &u32| {
                !state.may_insert(maker, read)
                    || self.price(state.net, fetch) < self.price(state.net, maker)
            };
            if let Some(fetch) = fetch.filter(dearer) {
                self.seen[maker as usize] = self.round;
                cost += self.price(state.net, fetch);
                self.chain.push(fetch);
                continue;
            }
            next = Some(maker);
        }
    }

    /// Removes copies made in `steps`, those with the highest cost per byte × step first, until no
    /// more can be removed or the time is over.
    pub fn prune(&mut self, state: &mut ScheduleState, random: &mut Random, steps: Range<u32>) {
        loop {
            self.order.clear();
            for p in steps.start..state.len().min(steps.end) {
                let c = state.sequence[p as usize];
                let node = state.node[c as usize];
                if !state.may_remove(c) {
                    continue;
                }
                let held = |c: CopyId| {
                    let gap = state
                        .previous(c)
                        .map_or(0, |d| p - state.last[d as usize].min(p));
                    state.net.bytes[state.node[c as usize] as usize] as f64 * f64::from(gap)
                };
                let held = state.made_at(p).map(held).sum::<f64>() + 1.0;
                let mut score = (self.price(state.net, node) as f64 + 1.0) / held;
                if self.noise > 0.0 {
                    score *= exp(self.noise * (random.unit() - 0.5));
                }
                self.order.push((score, c));
            }
            self.order
                .sort_unstable_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
            let mut removed = false;
            for k in 0..self.order.len() {
                if k % 16 == 0 && self.is_over() {
                    return;
                }
                let c = self.order[k].1;
                if state.may_remove(c) && state.peak_without(c) <= self.budget {
                    state.remove(c);
                    removed = true;
                }
            }
            if !removed {
                return;
            }
        }
    }
}
