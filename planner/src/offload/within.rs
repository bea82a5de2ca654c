//! Plans that keep a budget by sending buffers to the host, by computing them again, or by both.

use super::{Absence, Link, Offloaded, Offloader, Timeline, Value};
use crate::check::{Checked, check_offload, check_repeats};
use crate::dag::{BufferId, Dag, Space, Task, TaskId};
use crate::order::OrderPolicy;
use crate::plan::{Options, Plan, PlanError, live_bytes, plan};
use crate::relations::Relations;
use crate::remat::{Away, DagSearch, is_amount};
use crate::repeat::{Repeated, Within, floor, plan_within};

/// A stay of a buffer on the host. Tasks and buffers are those of the dag without copies.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Trip {
    /// Which buffer.
    pub buffer: BufferId,
    /// The bytes of the slab that it leaves.
    pub bytes: u64,
    /// The last task that touches it before.
    pub used: TaskId,
    /// The task that reads it next.
    pub read: TaskId,
    /// How many steps lie between, in which its bytes are free.
    pub steps: u32,
    /// What computing it again would cost for each of its bytes, had all that its task reads been
    /// kept; nothing if it may not run again.
    pub recompute: Option<f64>,
    /// What copying it costs for each of its bytes, there and back, whether or not a kernel has to
    /// wait for it.
    pub link: f64,
}

/// A plan under a budget, with a way to the host.
#[derive(Clone, Debug, PartialEq)]
pub struct WithLink {
    /// What runs how often, if anything runs twice.
    pub repeated: Option<Checked<Repeated>>,
    /// What is copied when, if anything is; made from `repeated`, if there is that.
    pub offloaded: Option<Checked<Offloaded>>,
    /// The plan of what the two come to, not yet checked. Above the budget if nothing was found
    /// that keeps it.
    pub plan: Plan,
    /// What is away from the slab for how long.
    pub trips: Vec<Trip>,
    /// The time of all tasks and of waiting for copies, in the unit of [`Task::cost`].
    pub time: f64,
    /// No schedule needs a smaller slab than this.
    pub floor: u64,
}

/// How much of what is above the budget is left to copies, where recomputation does the rest: tried
/// in this order.
const LEVELS: [f64; 4] = [0.8, 0.55, 0.3, 0.12];
/// What the engines' time is taken to cost, as a part of it, beside the time that kernels wait for
/// them: tried in this order.
const DEAR: [f64; 2] = [0.02, 0.3];
/// How often both are searched for at once, each time for fewer live bytes; not where that could
/// save but this part of the time.
const TOGETHER: usize = 2;
const LITTLE: f64 = 0.002;
/// How often transfers are planned for a smaller sum of live bytes, since packing loses some.
const TARGETS: usize = 4;

/// Plans a dag so that the slab is no larger than `budget`, sending buffers to the host while they
/// lie idle and running [`Task::repeatable`] tasks again where the plan `once`, which does neither,
/// is larger: the plan that takes the least time of those found, or the smallest if none keeps the
/// budget. Never worse than either alone as found by the same search. Deterministic.
///
/// Every idle stretch of a buffer has two prices: what its bytes cost to compute again, and what
/// they cost to copy. Copies that hide behind kernels cost no time, but the engine has only so much
/// of it; so of the values that relieve a step alike, those go first that are dear to compute
/// again, and recomputation is left the cheap ones.
///
/// # Errors
/// As [`plan`]; [`PlanError::Link`] if the time to copy a byte is negative or not finite.
pub fn plan_with_link(
    dag: &Dag,
    once: Plan,
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
    let without = WithLink::new(dag, None, once.clone(), floor);
    if once.height <= budget {
        return Ok(without);
    }
    let again = WithLink::without_copies(dag, plan_within(dag, once.clone(), budget, options)?);
    let mut best = without.clone().or(again.clone(), budget);
    best = offload(dag, without, &[], best, budget, link, options)?;
    // What does not keep the budget may with copies.
    if again.repeated.is_some() && again.plan.height > budget {
        best = offload(dag, again, &[], best, budget, link, options)?;
    }
    let Some(search) = DagSearch::new(dag, options) else {
        return Ok(best);
    };
    for level in LEVELS {
        let height = budget as f64 + level * (once.height - budget) as f64;
        let target = search.peak() as f64 * height / once.height as f64;
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
    together(dag, &search, once.height, best, budget, link, options)
}

/// The best of `best` and what a search for both at once finds.
fn together(
    dag: &Dag,
    search: &DagSearch,
    height_once: u64,
    mut best: WithLink,
    budget: u64,
    link: &Link,
    options: &Options,
) -> Result<WithLink, PlanError> {
    let least: f64 = dag.tasks.iter().map(|task| task.cost as f64).sum();
    let mut target = (search.peak() as f64 * budget as f64 / height_once as f64) as u64;
    for _ in 0..TOGETHER {
        if best.plan.height <= budget && best.time <= least * (1.0 + LITTLE) {
            break;
        }
        let (runs, away) = search.find_sending(dag, target, link.cost_per_byte);
        let Ok(repeated) = check_repeats(dag, Repeated::new(dag, &runs)) else {
            break;
        };
        // What is away when is told for the runs in their order.
        let planned = plan(
            &repeated.dag,
            &Options {
                order: OrderPolicy::Program,
                ..*options
            },
        )?;
        let start = WithLink::new(dag, Some(repeated), planned, best.floor);
        let before = (best.plan.height, best.time);
        best = offload(dag, start, &away, best, budget, link, options)?;
        if (best.plan.height, best.time) != before && best.plan.height <= budget {
            break;
        }
        target -= target / 16;
    }
    Ok(best)
}

impl WithLink {
    /// What keeps a budget without copies, or does not, for the dag it was made from.
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
            trips: Vec::new(),
            time,
            floor,
        }
    }

    /// The better of two: within the budget first, then sooner done, then smaller; this, if they
    /// are alike.
    fn or(self, other: WithLink, budget: u64) -> WithLink {
        let heights = [&self, &other].map(|w| w.plan.height.max(budget));
        let alike = heights[0]
            .cmp(&heights[1])
            .then(self.time.total_cmp(&other.time))
            .then(self.plan.height.cmp(&other.plan.height));
        if alike.is_gt() { other } else { self }
    }
}

/// The best of `best` and what copies make of `start`; the search for them begins with what is away
/// already.
fn offload(
    dag: &Dag,
    start: WithLink,
    away: &[Away],
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
        idle.expect(repeated, &start.plan, away);
    }
    let options = Options {
        order: OrderPolicy::Program,
        ..*options
    };
    for dear in DEAR {
        let mut target = budget;
        for _ in 0..TARGETS {
            let fits = best.plan.height <= budget;
            let most = if fits { best.time } else { f64::INFINITY };
            let Some((offloaded, time, trips)) =
                idle.offload(base, &start.plan, target, link, most, dear)
            else {
                break;
            };
            // A dag that does other work is none: the checker's word counts, not the search's.
            let Ok(offloaded) = check_offload(base, offloaded) else {
                break;
            };
            let planned = plan(&offloaded.dag, &options)?;
            let height = planned.height;
            let found = WithLink {
                offloaded: Some(offloaded),
                plan: planned,
                trips,
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

/// A plan's buffers, as transfers see them.
struct Idle {
    timeline: Timeline,
    /// The buffer of each value.
    buffers: Vec<BufferId>,
    /// What computing each value again costs for a byte, if its tasks may run again.
    recompute: Vec<Option<f64>>,
    /// What is away to begin with.
    begin: Vec<Absence>,
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
            // Writers come first, one after the other; what there is at the start is first touched
            // by a reader.
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

    /// Begins with what is away between runs, where the plan has the same reads one after the
    /// other.
    fn expect(&mut self, repeated: &Repeated, plan: &Plan, away: &[Away]) {
        let mut step_of = vec![0u32; plan.order.len()];
        (0u32..)
            .zip(&plan.order)
            .for_each(|(step, task)| step_of[task.index()] = step);
        for away in away {
            let writes = &repeated.dag.tasks[away.made as usize].writes;
            let Some(buffer) = writes
                .iter()
                .find(|b| repeated.buffer_of[b.index()] == away.buffer)
            else {
                continue;
            };
            let Ok(k) = self.buffers.binary_search(buffer) else {
                continue;
            };
            let [used, read] = [away.used, away.read].map(|run| step_of[run as usize]);
            let Value {
                bytes, made, reads, ..
            } = &self.timeline.values[k];
            let next = reads.partition_point(|&r| r < read);
            let before = next.checked_sub(1).map_or(*made, |before| reads[before]);
            if reads.get(next) == Some(&read) && before == used && used < read {
                self.begin.push(Absence {
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

    /// The dag with transfers by which no more than `target` bytes are live, or fewer than without
    /// at least; the time it takes, and what is away. Nothing if nothing can be sent or it takes
    /// `most` or more.
    fn offload(
        &self,
        dag: &Dag,
        plan: &Plan,
        target: u64,
        link: &Link,
        most: f64,
        dear: f64,
    ) -> Option<(Offloaded, f64, Vec<Trip>)> {
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
        let (time, fits) = offloader.fit(dear, most)?;
        if offloader.transfers().is_empty() || time >= most || !fits && most.is_finite() {
            return None;
        }
        let task = |step: u32| plan.order[step as usize];
        let trips = offloader.transfers().iter().map(|t| Trip {
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
            trips.collect(),
        ))
    }
}
