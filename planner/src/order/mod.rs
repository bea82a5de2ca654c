//! Task orders with a small peak, and how small a peak can be.
//!
//! First the program's order and three constructions (`list`). Then, until the peak is proved to be the smallest or the
//! effort is spent: minimum cuts bound the peak from below (`bound`); beams of growing width look for a better order,
//! forwards and backwards in time (`beam`); a depth-first search decides what is left (`exact`). All of them walk through
//! states from which everything has run that can run without loss (`expand`). In-place computation concerns a task's own
//! step only.

use crate::dag::{Dag, DagError, TaskId};
use crate::relations::Relations;
use std::fmt;
use std::time::{Duration, Instant};

mod beam;
mod bound;
mod compact;
mod exact;
mod expand;
mod list;

use bound::Bounds;
use compact::{Compact, Sizes};
use exact::Verdict;
use expand::Limits;

/// Who decides the order of tasks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum OrderPolicy {
    /// The program: its own order, changed only where dependencies demand it.
    Program,
    /// The planner: the order with the smallest peak it finds.
    #[default]
    MinPeak,
}

/// How the order of a plan was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Schedule {
    /// As the program gives it.
    Program,
    /// Greedy on memory from the first task on.
    Forward,
    /// Greedy on memory from the last task back.
    Backward,
    /// Depth first from the results, larger needs first.
    DepthFirst,
    /// Found by a beam search.
    Beam,
    /// Found by a depth-first search below a threshold.
    Exact,
}

impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Schedule::Program => "program order",
            Schedule::Forward => "greedy order",
            Schedule::Backward => "backward greedy order",
            Schedule::DepthFirst => "depth-first order",
            Schedule::Beam => "beam search order",
            Schedule::Exact => "exact search order",
        })
    }
}

/// What is known about the smallest peak of a dag.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ordering {
    /// All tasks, as they should run.
    pub order: Vec<TaskId>,
    /// The live bytes of the fullest step of this order.
    pub peak: u64,
    /// No order has a smaller peak than this.
    pub lower_bound: u64,
    /// How the order was made.
    pub schedule: Schedule,
}

impl Ordering {
    /// Whether no order is better.
    pub fn is_optimal(&self) -> bool {
        self.peak == self.lower_bound
    }
}

/// The orders worth comparing, the program's first; all of them respect the dependencies of a verified dag.
pub(crate) fn candidates(dag: &Dag, policy: OrderPolicy, in_place: bool) -> Vec<(Schedule, Vec<TaskId>)> {
    let relations = Relations::new(dag);
    if policy == OrderPolicy::Program {
        return vec![(Schedule::Program, relations.program_order())];
    }
    let mut orders = list::orders(dag, &relations);
    let problem = Compact::new(dag, &relations, in_place, Sizes::Occupied);
    let mut search = Search::new(&problem, &orders);
    search.run(Limits { effort: COMPILE_EFFORT, deadline: None });
    if search.improved {
        orders.push((search.schedule, search.order.iter().copied().map(TaskId).collect()));
    }
    orders
}

const COMPILE_EFFORT: u64 = 40_000;

/// Searches for the order with the smallest peak.
pub fn minimise_peak(dag: &Dag, in_place: bool, time_limit: Option<Duration>) -> Result<Ordering, DagError> {
    dag.verify()?;
    let relations = Relations::new(dag);
    let problem = Compact::new(dag, &relations, in_place, Sizes::Exact);
    let mut search = Search::new(&problem, &list::orders(dag, &relations));
    let deadline = time_limit.map(|limit| Instant::now() + limit);
    search.run(Limits { effort: u64::MAX, deadline });
    Ok(Ordering {
        order: search.order.iter().copied().map(TaskId).collect(),
        peak: search.peak as u64,
        lower_bound: search.bound as u64,
        schedule: search.schedule,
    })
}

/// Widths of beams, one after the other.
const WIDTHS: [usize; 5] = [1, 8, 64, 512, 4096];

struct Search<'a> {
    problem: &'a Compact,
    order: Vec<u32>,
    peak: i128,
    bound: i128,
    schedule: Schedule,
    improved: bool,
    /// Task → the fewest bytes in which any known order runs it.
    needs: Vec<i128>,
}

impl<'a> Search<'a> {
    fn new(problem: &'a Compact, orders: &[(Schedule, Vec<TaskId>)]) -> Self {
        let mut search = Search {
            problem,
            order: Vec::new(),
            peak: i128::MAX,
            bound: 0,
            schedule: Schedule::Program,
            improved: false,
            needs: vec![i128::MAX; problem.tasks()],
        };
        for (schedule, order) in orders {
            search.offer(order.iter().map(|task| task.0).collect(), *schedule);
        }
        search.improved = false;
        search
    }

    /// Keeps an order if it is the best so far.
    fn offer(&mut self, order: Vec<u32>, schedule: Schedule) {
        let (needs, peak) = self.problem.needs(&order);
        self.needs.iter_mut().zip(needs).for_each(|(known, need)| *known = need.min(*known));
        if peak < self.peak {
            (self.order, self.peak, self.schedule, self.improved) = (order, peak, schedule, true);
        }
    }

    fn run(&mut self, mut limits: Limits) {
        let debug = std::env::var("DBG").is_ok();
        let t0 = Instant::now();
        macro_rules! say { ($($a:tt)*) => { if debug { eprintln!("{:8.3} ms peak {} bound {} ready: {}", t0.elapsed().as_secs_f64()*1e3, self.peak, self.bound, format!($($a)*)); } } }
        say!("lists");
        let mut bounds = Bounds::new(self.problem);
        self.bound = bounds.raise(0, &self.needs, self.peak, &mut Limits{effort: u64::MAX, deadline:None});
        say!("bounds");
        if self.bound >= self.peak {
            return;
        }
        let reversed = self.problem.reversed();
        let mut dive = self.problem.tasks() as u64 * 4;
        let mut round = 0u32;
        'rounds: while self.bound < self.peak && !limits.is_over() && round < 12 {
            for beam in [false, true] {
                for backwards in [false, true] {
                    let problem = if backwards { &reversed } else { self.problem };
                    for way in 0..4 {
                        let mut repeats = 0;
                        while self.bound < self.peak && !limits.is_over() && repeats < 6 {
                            let threshold = match way {
                                0 => self.peak - 1,
                                1 => self.bound,
                                2 => self.bound.midpoint(self.peak),
                                _ => self.bound.midpoint(self.peak).midpoint(self.peak),
                            };
                            let width = 1usize << (2 * round);
                            let allowed = (dive << (2 * round)) * 2;
                            let mut own = Limits { effort: if beam { limits.effort } else { allowed.min(limits.effort)}, ..limits };
                            let before = own.effort;
                            let verdict = if beam { beam::search(problem, width, threshold, &mut own) } else { exact::search(problem, threshold, &mut own) };
                            let spent = before - own.effort;
                            limits.spend(spent);
                            if beam && round == 0 { dive = dive.max(spent); }
                            let found = match verdict {
                                Verdict::Found(mut order) => {
                                    if backwards {
                                        order.reverse();
                                    }
                                    self.offer(order, if beam { Schedule::Beam } else { Schedule::Exact });
                                    "found"
                                }
                                Verdict::AtLeast(bound) => { self.bound = self.bound.max(bound.min(self.peak)); "atleast" }
                                Verdict::Unknown => "unknown",
                            };
                            say!("{round} {width} {} way {way} T {threshold} {found} {beam} effort {spent}", if backwards { "back" } else { "forth" });
                            if found == "unknown" {
                                break;
                            }
                            repeats += 1;
                        }
                    }
                }
            }
            round += 1;
            if limits.is_over() { break 'rounds; }
        }
        say!("over {}", limits.effort);
    }
}
