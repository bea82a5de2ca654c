//! Plans that meet a budget by offloading buffers to the host, by recomputing them, or by both.

use super::transfers::{Offloader, Timeline, Value};
use super::{Within, floor, plan_within};
use crate::check::{Checked, check_offload, check_repeats};
use crate::dag::relations::Relations;
use crate::dag::{BufferId, Dag, Space, Task, TaskId};
use crate::offload::{IdleInterval, Link, Offloaded};
use crate::order::OrderPolicy;
use crate::plan::{Options, Plan, PlanError, live_bytes, plan};
use crate::remat::{DagSearch, RunInterval, is_amount};
use crate::repeat::Repeated;

/// The interval in which a buffer is offloaded. Tasks and buffers are those of the dag without
/// copies.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OffloadInterval {
    /// The offloaded buffer.
    pub buffer: BufferId,
    /// The bytes that it frees in the slab.
    pub bytes: u64,
    /// The last task that touches it before the interval.
    pub used: TaskId,
    /// The next task that reads it.
    pub read: TaskId,
    /// The number of steps in between in which its bytes are free.
    pub steps: u32,
    /// The cost of recomputing it, per byte, if all operands of its task had been kept; `None` if
    /// the task is not repeatable.
    pub recompute: Option<f64>,
    /// The cost of copying it to the host and back, per byte, whether or not a kernel has to wait
    /// for the copies.
    pub link: f64,
}

/// A plan for a budget, with rematerialization and offloading.
#[derive(Clone, Debug, PartialEq)]
pub struct WithLink {
    /// The dag with recomputation, if any task runs twice.
    pub repeated: Option<Checked<Repeated>>,
    /// The dag with offload copies, if there are any; derived from `repeated`, if that is set.
    pub offloaded: Option<Checked<Offloaded>>,
    /// The plan of the resulting dag, not yet checked. It exceeds the budget if the search found
    /// none that meets it.
    pub plan: Plan,
    /// The offload intervals of the plan.
    pub intervals: Vec<OffloadInterval>,
    /// The time of all tasks and of all waits for copies, in the unit of [`Task::cost`].
    pub time: f64,
    /// A lower bound of the slab for every schedule.
    pub floor: u64,
}

/// The share of the excess over the budget that is left to copies while recomputation removes the
/// rest: tried in this order.
const COPY_SHARES: [f64; 4] = [0.8, 0.55, 0.3, 0.12];
/// The price of the copy engines' busy time, as a fraction of that time, in addition to the time
/// that kernels wait for copies: tried in this order.
const BUSY_PRICES: [f64; 2] = [0.02, 0.3];
/// The number of combined searches for recomputation and offloading, each for fewer live bytes.
/// Skipped if less than the fraction `MIN_GAIN` of the time could be saved.
const COMBINED_SEARCHES: usize = 2;
const MIN_GAIN: f64 = 0.002;
/// The number of attempts to plan offloading, each for a smaller sum of live bytes, because packing
/// adds gaps.
const TARGETS: usize = 4;

/// Plans a dag so that the slab is no larger than `budget`. If the plan `baseline` is larger,
/// idle buffers are offloaded and [`Task::repeatable`] tasks are recomputed. Returns the plan that
/// takes the least time of those found, or the smallest if none meets the budget. It is never worse
/// than recomputation alone or offloading alone, as found by the same search. Deterministic.
///
/// Every idle interval of a buffer has two prices: the cost of recomputing its bytes, and the cost
/// of copying them. A copy that overlaps with kernels costs no time, but the engine's time is
/// limited. Therefore, among values that relieve a step equally, those that are expensive to
/// recompute are offloaded first, and the cheap ones are left to recomputation.
///
/// # Errors
/// Those of [`plan`]; [`PlanError::Link`] if the time to copy a byte is negative or not finite.
pub fn plan_with_link(
    dag: &Dag,
    baseline: Plan,
    budget: u64,
    link: &Link,
    options: &Options,
) -> Result<WithLink, PlanError> {
    if !is_amount(link.cost_per_byte) {
        return Err(PlanError::Link {
            cost_per_byte: link.cost_per_byte,
        });
    }
    dag.verify()?;
    let floor = floor(dag);
    let unchanged = WithLink::new(dag, None, baseline.clone(), floor);
    if baseline.height <= budget {
        return Ok(unchanged);
    }
    let recomputed =
        WithLink::without_copies(dag, plan_within(dag, baseline.clone(), budget, options)?);
    let mut best = unchanged.clone().or(recomputed.clone(), budget);
    best = offload(dag, unchanged, &[], best, budget, link, options)?;
    // Recomputation alone may miss a budget that it meets together with copies.
    if recomputed.repeated.is_some() && recomputed.plan.height > budget {
        best = offload(dag, recomputed, &[], best, budget, link, options)?;
    }
    let Some(search) = DagSearch::new(dag, options) else {
        return Ok(best);
    };
    for level in COPY_SHARES {
        let height = budget as f64 + level * (baseline.height - budget) as f64;
        let target = search.peak() as f64 * height / baseline.height as f64;
        let Ok(repeated) = check_repeats(dag, Repeated::new(dag, &search.find(target as u64).0))
        else {
            continue;
        };
        if best.plan.height <= budget && repeated.cost() as f64 >= best.time {
            continue;
        }
        let planned = plan(&repeated.dag, options)?;
        let start = WithLink::new(dag, Some(repeated), planned, floor);
        best = offload(dag, start, &[], best, budget, link, options)?;
    }
    combined_search(dag, &search, baseline.height, best, budget, link, options)
}

/// The better of `best` and the result of a combined search for recomputation and offloading.
fn combined_search(
    dag: &Dag,
    search: &DagSearch,
    baseline_height: u64,
    mut best: WithLink,
    budget: u64,
    link: &Link,
    options: &Options,
) -> Result<WithLink, PlanError> {
    let least: f64 = dag.tasks.iter().map(|task| task.cost as f64).sum();
    let mut target = (search.peak() as f64 * budget as f64 / baseline_height as f64) as u64;
    for _ in 0..COMBINED_SEARCHES {
        if best.plan.height <= budget && best.time <= least * (1.0 + MIN_GAIN) {
            break;
        }
        let (runs, intervals) = search.find_with_offload(dag, target, link.cost_per_byte);
        let Ok(repeated) = check_repeats(dag, Repeated::new(dag, &runs)) else {
            break;
        };
        // The intervals found are for the runs in this order.
        let planned = plan(
            &repeated.dag,
            &Options {
                order: OrderPolicy::Program,
                ..*options
            },
        )?;
        let start = WithLink::new(dag, Some(repeated), planned, best.floor);
        let before = (best.plan.height, best.time);
        best = offload(dag, start, &intervals, best, budget, link, options)?;
        if (best.plan.height, best.time) != before && best.plan.height <= budget {
            break;
        }
        target -= target / 16;
    }
    Ok(best)
}

impl WithLink {
    /// A plan without copies, from the result of [`plan_within`] for `dag`.
    pub fn without_copies(dag: &Dag, within: Within) -> Self {
        let Within {
            repeated,
            plan,
            floor,
            ..
        } = within;
        WithLink::new(dag, repeated, plan, floor)
    }

    fn new(dag: &Dag, repeated: Option<Checked<Repeated>>, plan: Plan, floor: u64) -> Self {
        let time = repeated
            .as_ref()
            .map_or(&dag.tasks, |repeated| &repeated.dag.tasks)
            .iter()
            .map(|task| task.cost as f64)
            .sum();
        WithLink {
            repeated,
            offloaded: None,
            plan,
            intervals: Vec::new(),
            time,
            floor,
        }
    }

    /// The better of two plans: first the one within the budget, then the faster, then the smaller;
    /// `self` if they are equal.
    fn or(self, other: WithLink, budget: u64) -> WithLink {
        let heights = [&self, &other].map(|w| w.plan.height.max(budget));
        let alike = heights[0]
            .cmp(&heights[1])
            .then(self.time.total_cmp(&other.time))
            .then(self.plan.height.cmp(&other.plan.height));
        if alike.is_gt() { other } else { self }
    }
}

/// The better of `best` and `start` with offloading added. The search for intervals begins with
/// `intervals`.
fn offload(
    dag: &Dag,
    start: WithLink,
    intervals: &[RunInterval],
    mut best: WithLink,
    budget: u64,
    link: &Link,
    options: &Options,
) -> Result<WithLink, PlanError> {
    let base = start
        .repeated
        .as_ref()
        .map_or(dag, |repeated| &repeated.dag);
    let bytes: u128 = base.buffers.iter().map(|b| u128::from(b.occupied())).sum();
    if bytes >= 1 << 62 {
        return Ok(best);
    }
    let mut idle = Idle::new(base, &start.plan, link);
    if let Some(repeated) = &start.repeated {
        idle.begin_with(repeated, &start.plan, intervals);
    }
    let options = Options {
        order: OrderPolicy::Program,
        ..*options
    };
    for busy_price in BUSY_PRICES {
        let mut target = budget;
        for _ in 0..TARGETS {
            let fits = best.plan.height <= budget;
            let most = if fits { best.time } else { f64::INFINITY };
            let Some((offloaded, time, intervals)) =
                idle.offload(base, &start.plan, target, link, most, busy_price)
            else {
                break;
            };
            // A dag that does other work is rejected: the checker decides, not the search.
            let Ok(offloaded) = check_offload(base, offloaded) else {
                break;
            };
            let planned = plan(&offloaded.dag, &options)?;
            let height = planned.height;
            let found = WithLink {
                offloaded: Some(offloaded),
                plan: planned,
                intervals,
                time,
                ..start.clone()
            };
            best = best.or(found, budget);
            if height <= budget || target <= budget / 2 {
                break;
            }
            target = target.saturating_sub((height - budget).max(target / 128));
        }
    }
    Ok(best)
}

/// The buffers of a plan as candidates for offloading.
struct Idle {
    timeline: Timeline,
    /// The buffer of each value.
    buffers: Vec<BufferId>,
    /// The cost of recomputing each value, per byte, if its tasks are repeatable.
    recompute: Vec<Option<f64>>,
    /// The intervals that the search begins with.
    begin: Vec<IdleInterval>,
}

impl Idle {
    fn new(dag: &Dag, plan: &Plan, link: &Link) -> Self {
        let relations = Relations::new(dag);
        let mut step_of = vec![0u32; dag.tasks.len()];
        (0u32..)
            .zip(&plan.order)
            .for_each(|(step, task)| step_of[task.index()] = step);
        let cost = |task: &TaskId| dag.tasks[task.index()].cost;
        let need = live_bytes(dag, plan)
            .into_iter()
            .map(|bytes| bytes as i64)
            .collect();
        let timeline = Timeline {
            costs: plan.order.iter().map(cost).collect(),
            need,
            values: Vec::new(),
        };
        let mut idle = Idle {
            timeline,
            buffers: Vec::new(),
            recompute: Vec::new(),
            begin: Vec::new(),
        };
        for (b, buffer) in (0u32..).zip(&dag.buffers) {
            let writers = relations.writers.row(b as usize);
            let mut touched: Vec<u32> = relations
                .users
                .row(b as usize)
                .iter()
                .map(|&user| step_of[user as usize])
                .collect();
            touched.sort_unstable();
            touched.dedup();
            // Writers come first, one after the other. A buffer that exists at the start is first
            // touched by a reader.
            let reads = touched.split_off(writers.len().max(1).min(touched.len()));
            let (Some(&made), false) = (
                touched.last(),
                reads.is_empty() || buffer.bytes == 0 || buffer.space == Space::Host,
            ) else {
                continue;
            };
            let makers: Vec<&Task> = writers
                .iter()
                .map(|&writer| &dag.tasks[writer as usize])
                .collect();
            let may_run_again =
                !makers.is_empty() && makers.iter().all(|task| task.repeatable) && !buffer.live_in;
            let cost: f64 = makers.iter().map(|task| task.cost as f64).sum();
            let price = may_run_again.then(|| cost / buffer.bytes as f64);
            let weight = price
                .map_or(1.0, |price| {
                    price / (price + 2.0 * link.cost_per_byte).max(f64::MIN_POSITIVE)
                })
                .max(0.05);
            idle.timeline.values.push(Value {
                bytes: buffer.occupied() as i64,
                made,
                reads,
                weight,
            });
            idle.buffers.push(BufferId(b));
            idle.recompute.push(price);
        }
        idle
    }

    /// Takes over the intervals between runs for which the plan has the same consecutive reads.
    fn begin_with(&mut self, repeated: &Repeated, plan: &Plan, intervals: &[RunInterval]) {
        let mut step_of = vec![0u32; plan.order.len()];
        (0u32..)
            .zip(&plan.order)
            .for_each(|(step, task)| step_of[task.index()] = step);
        for interval in intervals {
            let writes = &repeated.dag.tasks[interval.made as usize].writes;
            let Some(buffer) = writes
                .iter()
                .find(|b| repeated.buffer_of[b.index()] == interval.buffer)
            else {
                continue;
            };
            let Ok(k) = self.buffers.binary_search(buffer) else {
                continue;
            };
            let [used, read] = [interval.used, interval.read].map(|run| step_of[run as usize]);
            let Value {
                bytes, made, reads, ..
            } = &self.timeline.values[k];
            let next = reads.partition_point(|&r| r < read);
            let before = next.checked_sub(1).map_or(*made, |before| reads[before]);
            if reads.get(next) == Some(&read) && before == used && used < read {
                self.begin.push(IdleInterval {
                    value: k as u32,
                    made: *made,
                    used,
                    read,
                    bytes: *bytes,
                    is_on_host: false,
                });
            }
        }
    }

    /// The dag with offload copies for which at most `target` bytes are live, or at least fewer
    /// than without; its time, and the intervals. `None` if no value can be offloaded or the time
    /// is `most` or more.
    fn offload(
        &self,
        dag: &Dag,
        plan: &Plan,
        target: u64,
        link: &Link,
        most: f64,
        busy_price: f64,
    ) -> Option<(Offloaded, f64, Vec<OffloadInterval>)> {
        let host = link
            .host_bytes
            .map_or(i64::MAX, |bytes| bytes.min(1 << 62) as i64);
        let mut offloader = Offloader::new(
            &self.timeline,
            target.min(1 << 62) as i64,
            link.cost_per_byte,
            host,
        );
        offloader.begin_with(&self.begin);
        let (time, fits) = offloader.fit(busy_price, most)?;
        if offloader.transfers().is_empty() || time >= most || !fits && most.is_finite() {
            return None;
        }
        let task = |step: u32| plan.order[step as usize];
        let intervals = offloader.transfers().iter().map(|t| OffloadInterval {
            buffer: self.buffers[t.value as usize],
            bytes: self.timeline.values[t.value as usize].bytes as u64,
            used: task(t.used),
            read: task(t.read),
            steps: t.back - t.gone,
            recompute: self.recompute[t.value as usize],
            link: 2.0 * link.cost_per_byte,
        });
        Some((
            Offloaded::new(dag, &plan.order, &self.buffers, offloader.transfers()),
            time,
            intervals.collect(),
        ))
    }
}
