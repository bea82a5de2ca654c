//! The sequence of searches and their thresholds.

use super::bound::Bounds;
use super::compact::Compact;
use super::exact::Verdict;
use super::expand::SearchLimits;
use super::{Schedule, beam, exact};
use crate::dag::TaskId;

/// The factor by which each round grows.
const GROWTH: u64 = 4;
/// The effort of a depth-first search in the first round, for each task: enough to finish without
/// backtracking.
const DIVE: u64 = 10;
/// The divisor of a round's effort for searches backwards in time, which seldom find orders that
/// forward searches miss.
const BACKWARDS_SHARE: u64 = 4;
/// The effort of the first bounds, and the divisor of the remaining effort for bounds.
const BOUNDS_EFFORT: u64 = 50_000;
const BOUNDS_SHARE: u64 = 4;
/// The maximum of beam states times tasks: some hundred megabytes.
const BEAM_SIZE: usize = 400_000;

/// The best order and the best bound so far.
pub(super) struct Search<'a> {
    problem: &'a Compact,
    pub(super) order: Vec<u32>,
    pub(super) peak: i128,
    /// A lower bound of the peak of every order.
    pub(super) bound: i128,
    /// The origin of the order.
    pub(super) schedule: Schedule,
    /// Task → the fewest bytes in which a known order runs it.
    needs: Vec<i128>,
}

/// The parameters of one search, except for its threshold.
struct Attempt<'a> {
    problem: &'a Compact,
    backwards: bool,
    /// The width of the beam; `None` for a depth-first search.
    beam_width: Option<usize>,
    effort: u64,
}

impl<'a> Search<'a> {
    /// Starts from some orders, at least one.
    pub(super) fn new(problem: &'a Compact, orders: &[(Schedule, Vec<TaskId>)]) -> Self {
        let needs = vec![i128::MAX; problem.tasks()];
        let mut search = Search {
            problem,
            order: Vec::new(),
            peak: i128::MAX,
            bound: 0,
            schedule: Schedule::Program,
            needs,
        };
        for (schedule, order) in orders {
            search.offer(order.iter().map(|task| task.0).collect(), *schedule);
        }
        search
    }

    /// Keeps an order if it is the best so far.
    fn offer(&mut self, order: Vec<u32>, schedule: Schedule) {
        let (needs, peak) = self.problem.needs(&order);
        self.needs
            .iter_mut()
            .zip(needs)
            .for_each(|(known, need)| *known = need.min(*known));
        if peak < self.peak {
            (self.order, self.peak, self.schedule) = (order, peak, schedule);
        }
    }

    fn is_over(&self, limits: &SearchLimits) -> bool {
        self.bound >= self.peak || limits.is_over()
    }

    /// Searches until the peak is proved or the limit is reached.
    pub(super) fn run(&mut self, mut limits: SearchLimits) {
        if limits.is_over() {
            return;
        }
        let mut bounds = Bounds::new(self.problem);
        self.raise_bound(&mut bounds, BOUNDS_EFFORT, &mut limits);
        if self.is_over(&limits) {
            return;
        }
        let reversed = self.problem.reversed();
        let (mut width, mut effort) = (1, DIVE * self.problem.tasks() as u64);
        let width_max = (BEAM_SIZE / self.problem.tasks().max(1)).max(8);
        while !self.is_over(&limits) {
            for beam in [false, true] {
                for backwards in [false, true] {
                    let problem = if backwards { &reversed } else { self.problem };
                    let share = if backwards { BACKWARDS_SHARE } else { 1 };
                    let width = (width / share as usize).clamp(1, width_max);
                    let beam_width = beam.then_some(width);
                    let effort = if beam { u64::MAX } else { effort / share };
                    self.narrow(
                        &Attempt {
                            problem,
                            backwards,
                            beam_width,
                            effort,
                        },
                        &mut limits,
                    );
                }
            }
            self.raise_bound(&mut bounds, effort, &mut limits);
            width = width.saturating_mul(GROWTH as usize);
            effort = effort.saturating_mul(GROWTH);
        }
    }

    fn raise_bound(&mut self, bounds: &mut Bounds, effort: u64, limits: &mut SearchLimits) {
        limits.within(effort.min(limits.effort / BOUNDS_SHARE), |limits| {
            self.bound = bounds.raise(self.bound, &self.needs, self.peak, limits);
        });
    }

    /// Tries to beat the peak and, once that succeeds, repeatedly halves the interval between it
    /// and the bound. A depth-first search also tries whether the bound itself can be met or
    /// raised.
    fn narrow(&mut self, attempt: &Attempt, limits: &mut SearchLimits) {
        let mut low = self.bound;
        let mut threshold = self.peak - 1;
        let mut bound_tried = attempt.backwards || attempt.beam_width.is_some();
        while !self.is_over(limits) {
            let is_decided = self.attempt(attempt, threshold, limits);
            if is_decided {
                low = low.max(self.bound);
            } else if threshold == self.peak - 1 {
                if std::mem::replace(&mut bound_tried, true) {
                    return;
                }
                threshold = self.bound;
                continue;
            } else if threshold == self.bound {
                return;
            } else {
                low = threshold + 1;
                // Stops if the remaining interval is an eighth of the gap, or a thousandth of the
                // peak.
                if (self.peak - low) * 8 <= (self.peak - self.bound).max(self.peak / 125) {
                    return;
                }
            }
            threshold = low.midpoint(self.peak - 1);
        }
    }

    /// One search: whether it found an order or proved that there is none.
    fn attempt(&mut self, attempt: &Attempt, threshold: i128, limits: &mut SearchLimits) -> bool {
        let verdict = limits.within(attempt.effort, |limits| match attempt.beam_width {
            Some(width) => beam::search(attempt.problem, width, threshold, limits),
            None => exact::search(attempt.problem, threshold, limits),
        });
        match verdict {
            Verdict::Found(mut order) => {
                if attempt.backwards {
                    order.reverse();
                }
                self.offer(
                    order,
                    if attempt.beam_width.is_some() {
                        Schedule::Beam
                    } else {
                        Schedule::Exact
                    },
                );
                true
            }
            Verdict::AtLeast(bound) => {
                self.bound = self.bound.max(bound.min(self.peak));
                true
            }
            Verdict::Unknown => false,
        }
    }
}
