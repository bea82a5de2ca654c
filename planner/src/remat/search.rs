//! The search: initial schedules, and local search from them.
//!
//! Each round of the local search perturbs the schedule (removes recomputations, moves steps within
//! their dependencies, or tightens the budget temporarily), repairs and prunes it, and accepts the
//! result by simulated annealing.

use std::ops::Range;

use super::checkpoints::with_checkpoints;
use super::clock::Clock;
use super::copy_planner::CopyPlanner;
use super::network::Network;
use super::repair::Repairer;
use super::state::{CopyId, ScheduleState};
use slabwise_packer::random::{Random, exp, ln};

/// A schedule with its cost and needs.
#[derive(Clone, Debug)]
pub(super) struct FoundSchedule {
    pub order: Vec<u32>,
    pub cost: u128,
    pub peak: i64,
    /// The time, including waits for copies.
    pub time: f64,
}

impl FoundSchedule {
    pub fn of(state: &ScheduleState) -> FoundSchedule {
        FoundSchedule {
            order: state.order().collect(),
            cost: state.cost,
            peak: state.peak(),
            time: state.cost as f64,
        }
    }
}

/// The cheapest schedule found that fits `budget` or, if there is none, the one with the smallest
/// peak. `orders` are complete orders without recomputation, the sink at the end, best first.
pub(super) fn search(
    net: &Network,
    orders: &[Vec<u32>],
    budget: i64,
    clock: &mut Clock,
    seed: u64,
) -> FoundSchedule {
    let mut search = Search::new(net, &orders[0], budget, seed);
    let mut best = FoundSchedule::of(&search.state);
    let mut starts = Vec::new();
    search.repairer.until = clock.at(1.0);
    for order in orders {
        search.state.load(order);
        if search.state.peak() <= budget {
            return FoundSchedule::of(&search.state);
        }
        if search.state.peak() < best.peak {
            best = FoundSchedule::of(&search.state);
        }
    }
    // Repairs of a long schedule may take longer than there is time.
    let spaced = search
        .state
        .is_long()
        .then(|| search.with_checkpoints(&orders[0], clock))
        .flatten();
    // Orders differ more than the methods to repair them. If there is no time for all combinations,
    // each order is tried once first.
    let ways = orders
        .iter()
        .flat_map(|order| [(order, false), (order, true)]);
    let (direct, others): (Vec<_>, Vec<_>) =
        ways.partition(|&(_, descent)| !descent && search.state.is_long());
    for (order, descent) in direct.into_iter().chain(others) {
        if clock.progress() >= if starts.is_empty() { 1.0 } else { 0.25 } {
            break;
        }
        starts.extend(search.start(order, 0.0, descent));
        // Once a start fits, the others may use only half of the time.
        search.repairer.until = clock.at(if starts.is_empty() { 1.0 } else { 0.5 });
        // A repair that ran out of time.
        if starts.is_empty() && clock.progress() >= 1.0 && search.state.peak() < best.peak {
            best = FoundSchedule::of(&search.state);
        }
    }
    let mut tries = 0;
    while starts.is_empty() && tries < 12 && clock.progress() < 0.3 {
        tries += 1;
        starts.extend(search.start(
            &orders[tries % orders.len()],
            0.3 * tries as f64,
            tries % 3 == 0,
        ));
        clock.tick();
    }
    if let Some(spaced) = spaced.filter(|spaced| spaced.peak < best.peak) {
        if spaced.peak <= budget && starts.is_empty() {
            starts.push(spaced);
        } else {
            best = spaced;
        }
    }
    if starts.is_empty() {
        search.squeeze(&mut best, clock);
        if best.peak > budget {
            return best;
        }
        starts.push(best);
    }
    search.anneals(starts, orders, clock, 0.0)
}

/// The progress until which schedules with evenly spaced checkpoints are tried.
const SPACED: f64 = 0.8;

/// The part of an anneal's time that its start may take.
const STARTING: f64 = 0.25;

pub(super) struct Search<'n> {
    budget: i64,
    pub state: ScheduleState<'n>,
    pub repairer: Repairer,
    pub random: Random,
    removable: Vec<CopyId>,
    /// The steps around those that were perturbed last.
    near: Range<u32>,
    /// The planner of copies, if values may be fetched.
    pub copy_planner: Option<CopyPlanner>,
}

impl<'n> Search<'n> {
    pub fn new(net: &'n Network, order: &[u32], budget: i64, seed: u64) -> Self {
        Search {
            budget,
            state: ScheduleState::new(net, order),
            repairer: Repairer::new(net.len(), budget),
            random: Random(seed),
            removable: Vec::new(),
            near: 0..u32::MAX,
            copy_planner: None,
        }
    }

    /// The best schedule that local search finds from these and other starts, from the progress
    /// `begin` on until the time is over.
    pub fn anneals(
        &mut self,
        mut starts: Vec<FoundSchedule>,
        orders: &[Vec<u32>],
        clock: &mut Clock,
        begin: f64,
    ) -> FoundSchedule {
        self.repairer.until = clock.at(1.0);
        starts.sort_by(|a, b| a.time.total_cmp(&b.time));
        let mut best = starts[0].clone();
        let anneals = ((clock.anneals(self.state.len()) as f64 * (1.0 - begin)) as usize).max(1);
        let at = |part: f64| begin + (1.0 - begin) * part;
        // The time that the last new start took.
        let mut long = 0.0;
        for k in 0..anneals {
            let (from, to) = (
                at(k as f64 / anneals as f64 * 0.6),
                at((k + 1) as f64 / anneals as f64 * 0.6),
            );
            let start = if k < starts.len() {
                starts[k].clone()
            } else if long > (to - from) * STARTING {
                best.clone()
            } else {
                let order = &orders[k % orders.len()];
                let noise = 0.5 * self.random.below(5) as f64;
                let began = clock.progress();
                let start = self.start(order, noise, k % 2 == 1);
                long = clock.progress() - began;
                start.unwrap_or_else(|| best.clone())
            };
            if let Some(found) = self.anneal(start, clock, from, to, 1.0) {
                best = if found.time < best.time { found } else { best };
            }
        }
        for (from, to) in [(0.6, 0.8), (0.8, 1.0)] {
            if let Some(found) = self.anneal(best.clone(), clock, at(from), at(to), 0.5) {
                best = if found.time < best.time { found } else { best };
            }
        }
        best
    }

    /// The time of the current schedule, or `None` if it exceeds `most`.
    pub fn time(&mut self, most: f64) -> Option<f64> {
        match &mut self.copy_planner {
            Some(copy_planner) => copy_planner.time(&mut self.state, self.budget, most),
            None => Some(self.state.cost as f64).filter(|&time| time <= most),
        }
    }

    /// A schedule that fits, made from `order` by repair and pruning, either at once or through
    /// intermediate budgets.
    pub fn start(&mut self, order: &[u32], noise: f64, descent: bool) -> Option<FoundSchedule> {
        self.state.load(order);
        self.repairer.noise = noise;
        self.repairer.greed = 0.25;
        self.draw_fetch_price();
        let levels = if descent { 8 } else { 1 };
        let peak = self.state.peak();
        for level in 1..=levels {
            let target =
                peak - ((peak - self.budget) as f64 * f64::from(level) / f64::from(levels)) as i64;
            self.repairer.budget = if level == levels { self.budget } else { target };
            let inserts_max = 2 * self.state.net.len() + 200;
            let done =
                self.repairer
                    .repair(&mut self.state, &mut self.random, inserts_max, u128::MAX);
            if !done {
                self.repairer.budget = self.budget;
                return None;
            }
            self.repairer
                .prune(&mut self.state, &mut self.random, 0..u32::MAX);
        }
        self.repairer.budget = self.budget;
        self.found()
    }

    /// The schedule with evenly spaced checkpoints and the fewest of them that fits or, if none
    /// does, the one with the smallest peak.
    pub fn with_checkpoints(&mut self, order: &[u32], clock: &Clock) -> Option<FoundSchedule> {
        let mut best: Option<FoundSchedule> = None;
        let mut length = order.len() as u32 / 2;
        while length >= order.len().isqrt() as u32 / 2 && clock.progress() < SPACED {
            if let Some(order) = with_checkpoints(self.state.net, order, length) {
                self.state.load(&order);
                let peak = self.state.peak();
                if best.as_ref().is_none_or(|best| peak < best.peak) {
                    best = Some(FoundSchedule::of(&self.state));
                }
                if peak <= self.budget {
                    break;
                }
            }
            length = length * 2 / 3;
        }
        best
    }

    /// The current schedule.
    pub fn found(&mut self) -> Option<FoundSchedule> {
        let time = self.time(f64::INFINITY)?;
        Some(FoundSchedule {
            time,
            ..FoundSchedule::of(&self.state)
        })
    }

    /// Raises the budget to this peak if it is larger.
    pub fn relax(&mut self, peak: i64) {
        self.budget = self.budget.max(peak);
        self.repairer.budget = self.budget;
    }

    /// Draws the price of fetches for the next repair, if they are allowed: high, low or zero,
    /// because the cost of busy engines depends on the rest of the schedule.
    fn draw_fetch_price(&mut self) {
        if let Some(copy_planner) = &self.copy_planner {
            // From a thousandth of a byte's copy time to more than all of it.
            let part = if self.random.below(6) == 0 {
                0.0
            } else {
                1.5 * exp(-7.0 * self.random.unit())
            };
            self.repairer.fetching = Some(part * copy_planner.link());
        }
    }

    /// Lowers the peak of `best` at any cost, until it fits or the time for that is over.
    pub fn squeeze(&mut self, best: &mut FoundSchedule, clock: &mut Clock) {
        while best.peak > self.budget && clock.progress() < 0.6 {
            clock.tick();
            self.state.load(&best.order);
            self.perturb();
            let step = best.peak as f64 * 0.03 * self.random.unit();
            self.repairer.budget = (best.peak - 1 - step as i64).max(self.budget);
            self.repairer.noise = 2.0 * self.random.unit();
            self.repairer.greed = [0.0, 0.25][self.random.below(2) as usize];
            self.draw_fetch_price();
            let cost_max = best.cost.saturating_mul(4);
            self.repairer
                .repair(&mut self.state, &mut self.random, 100, cost_max);
            let peak = self.state.peak();
            if peak <= best.peak {
                self.repairer.budget = peak.max(self.budget);
                self.repairer
                    .prune(&mut self.state, &mut self.random, 0..u32::MAX);
                if self.state.peak() < best.peak || self.state.cost <= best.cost {
                    *best = FoundSchedule::of(&self.state);
                }
            }
        }
        self.repairer.budget = self.budget;
    }

    /// Local search from `start` while the progress goes from `from` to `to`. Returns the best
    /// schedule that improves on it.
    fn anneal(
        &mut self,
        start: FoundSchedule,
        clock: &mut Clock,
        from: f64,
        to: f64,
        heat: f64,
    ) -> Option<FoundSchedule> {
        let base = self.state.net.base_cost as f64;
        let hottest = heat * (0.0007 * base + 0.01 * (start.time - base).max(0.0));
        self.state.load(&start.order);
        let (mut now, mut time) = (start.order.clone(), start.time);
        let mut best: Option<FoundSchedule> = None;
        let mut best_time = start.time;
        loop {
            let progress = clock.progress();
            if progress >= to {
                return best;
            }
            clock.tick();
            let cold = ((progress - from) / (to - from)).clamp(0.0, 1.0);
            let heat = hottest * (1.0 - cold);
            self.perturb();
            let fits = self.repair_and_prune((time * 1.2) as u128);
            let most = time - heat * ln(self.random.unit() + 1e-12);
            let found = if fits {
                self.time(most).filter(|&found| found <= most)
            } else {
                None
            };
            if let Some(found) = found {
                now.clear();
                now.extend(self.state.order());
                time = found;
                if time < best_time {
                    best_time = time;
                    best = Some(FoundSchedule {
                        time,
                        ..FoundSchedule::of(&self.state)
                    });
                }
            } else {
                self.state.load(&now);
            }
        }
    }

    /// Repairs and prunes the perturbed schedule.
    fn repair_and_prune(&mut self, cost_max: u128) -> bool {
        self.draw_fetch_price();
        let random = &mut self.random;
        self.repairer.noise = [0.0, 0.5, 1.0, 2.0][random.below(4) as usize];
        self.repairer.greed = [0.0, 0.0, 0.25, 1.0][random.below(4) as usize];
        if random.below(3) == 0 && !self.removable.is_empty() {
            // Frees about one buffer more than needed, which pruning may use in another way.
            let c = self.removable[random.below(self.removable.len() as u64) as usize];
            let bytes = self.state.net.bytes[self.state.node[c as usize] as usize];
            self.repairer.budget -= (bytes as f64 * 2.0 * random.unit()) as i64;
        }
        let fits = self.repairer.repair(&mut self.state, random, 60, cost_max);
        self.repairer.budget = self.budget;
        let fits = fits || self.state.peak() <= self.budget;
        if fits {
            self.repairer
                .prune(&mut self.state, random, self.near.clone());
        }
        fits
    }

    /// Removes some recomputations, moves some steps, or both; in a long schedule, all near one
    /// step.
    fn perturb(&mut self) {
        let Search {
            state,
            random,
            removable,
            ..
        } = self;
        let steps = if state.is_long() {
            let first = random.below(u64::from(state.len())) as u32;
            first..state.len().min(first + NEAR)
        } else {
            0..state.len()
        };
        removable.clear();
        removable.extend(
            steps
                .clone()
                .map(|p| state.sequence[p as usize])
                .filter(|&c| state.may_remove(c)),
        );
        let kind = random.below(3);
        if kind < 2 && !removable.is_empty() {
            let at = random.below(removable.len() as u64) as usize;
            let most = [4, 12][random.below(2) as usize];
            let count = 1 + random.below(most) as usize;
            for &c in removable.iter().skip(at).take(count) {
                if state.may_remove(c) {
                    state.remove(c);
                }
            }
        }
        if kind >= 1 {
            for _ in 0..1 + random.below(3) {
                let until = steps.end.min(state.len() - 1);
                let from = steps.start.min(until.saturating_sub(1));
                move_randomly(
                    state,
                    from + random.below(u64::from(until - from)) as u32,
                    random,
                );
            }
        }
        removable.retain(|&c| state.copies[state.node[c as usize] as usize].contains(&c));
        let looks_around = state.is_long() && random.below(ALL) > 0;
        self.near = if looks_around {
            steps.start.saturating_sub(NEAR)..steps.end + NEAR
        } else {
            0..u32::MAX
        };
    }
}

/// The number of steps of a long schedule that are perturbed at once, and the number of rounds
/// between prunings of the whole schedule instead of only these steps.
const NEAR: u32 = 512;
const ALL: u64 = 16;

/// Moves the step at `p` to a random position between its operands and its first reader.
fn move_randomly(state: &mut ScheduleState, p: u32, random: &mut Random) {
    let node = state.node_at(p);
    // A fetch stands just before its first reader.
    if node == state.net.sink() || state.is_fetch(p) {
        return;
    }
    let reads = state
        .net
        .makes(node)
        .filter_map(|value| state.first_read(value, p + 1, state.len()));
    let latest = reads.min().unwrap_or(state.len() - 1);
    let sources = state
        .net
        .inputs
        .of(node)
        .iter()
        .filter_map(|&j| state.source(j, p));
    let earliest = sources
        .map(|s| state.pos[s as usize] + 1)
        .max()
        .unwrap_or(0);
    let to = earliest + random.below(u64::from(latest - earliest) + 1) as u32;
    let (from, until) = if to > p { (p + 1, to) } else { (to, p) };
    if from < until && state.is_quiet(node, from, until) {
        let copy = state.sequence[p as usize];
        state.relocate(copy, to);
    }
}
