//! Properties of every dag, tested on random ones; the checker against a naive oracle.

use crate::generate::random_dag;
use arbtest::arbitrary::{Result, Unstructured};
use arbtest::arbtest;
use slabwise_planner::{
    Bytes, Dag, Holder, Options, OrderPolicy, Plan, Violation, check, csv, holders_at_peak,
    live_bytes, peak, plan, report, saved_in_place,
};

const ALL: [Options; 5] = [
    Options {
        order: OrderPolicy::MinPeak,
        in_place: true,
        reuse: true,
        effort: 100_000,
        overlap: true,
    },
    Options {
        order: OrderPolicy::MinPeak,
        in_place: false,
        reuse: true,
        effort: 100_000,
        overlap: true,
    },
    Options {
        order: OrderPolicy::Program,
        in_place: true,
        reuse: true,
        effort: 100_000,
        overlap: true,
    },
    Options {
        order: OrderPolicy::Program,
        in_place: false,
        reuse: true,
        effort: 100_000,
        overlap: true,
    },
    Options {
        order: OrderPolicy::MinPeak,
        in_place: true,
        reuse: false,
        effort: 100_000,
        overlap: true,
    },
];

/// Whether a plan is safe to run, straight from the definition and in quadratic time: every byte
/// that a task touches, at every step at which it must hold its data, belongs to one buffer.
fn oracle(dag: &Dag, plan: &Plan) -> bool {
    let step_of = |task: usize| plan.order.iter().position(|t| t.index() == task);
    let n = dag.tasks.len();
    if plan.order.len() != n || (0..n).any(|task| step_of(task).is_none()) {
        return false;
    }
    let before = |a: usize, b: usize| step_of(a) < step_of(b);
    let writes = |t: usize, b: usize| dag.tasks[t].writes.iter().any(|w| w.index() == b);
    let touches =
        |t: usize, b: usize| writes(t, b) || dag.tasks[t].reads.iter().any(|r| r.index() == b);
    for a in 0..n {
        for b in (0..n).filter(|&b| b != a) {
            let shared = |buffer: usize| {
                writes(a, buffer) && touches(b, buffer) && (!writes(b, buffer) || a < b)
            };
            let ordered = dag.tasks[b].after.iter().any(|t| t.index() == a)
                || (0..dag.buffers.len()).any(shared);
            if ordered && !before(a, b) {
                return false;
            }
        }
    }
    let holds = |buffer: usize, step: usize| {
        let b = &dag.buffers[buffer];
        let used: Vec<usize> = (0..n)
            .filter(|&s| touches(plan.order[s].index(), buffer))
            .collect();
        let first = if b.live_in {
            Some(0)
        } else {
            used.first().copied()
        };
        let last = if b.live_out {
            Some(dag.steps() - 1)
        } else {
            used.last().copied().or(first)
        };
        matches!((first, last), (Some(first), Some(last)) if first <= step && step <= last)
    };
    let in_place = |a: usize, b: usize, step: usize| {
        let pair = |from: usize, to: usize| {
            plan.reused.iter().any(|p| {
                let declared =
                    dag.may_reuse.contains(p) && p.from.index() == from && p.to.index() == to;
                let meets = !holds(from, step + 1)
                    && (step == 0 || !holds(to, step - 1))
                    && plan.order.get(step) == Some(&p.task);
                let fits = dag.buffers[to].occupied() <= dag.buffers[from].occupied()
                    && plan.offsets[from] == plan.offsets[to];
                declared && meets && fits
            })
        };
        pair(a, b) || pair(b, a)
    };
    for step in 0..dag.steps() {
        let mut here: Vec<(Option<usize>, u64, u64)> = Vec::new();
        for (i, b) in dag
            .buffers
            .iter()
            .enumerate()
            .filter(|(i, b)| b.bytes > 0 && holds(*i, step))
        {
            if !plan.offsets[i].is_multiple_of(b.align) {
                return false;
            }
            here.push((Some(i), plan.offsets[i], b.occupied()));
        }
        if let Some(task) = plan
            .order
            .get(step)
            .filter(|t| dag.tasks[t.index()].workspace > 0)
        {
            let offset = plan.workspace_offsets[task.index()];
            if !offset.is_multiple_of(slabwise_planner::ALIGN) {
                return false;
            }
            here.push((None, offset, dag.tasks[task.index()].workspace_occupied()));
        }
        for (i, &(a, a_offset, a_bytes)) in here.iter().enumerate() {
            if a_offset.saturating_add(a_bytes) > plan.height {
                return false;
            }
            for &(b, b_offset, b_bytes) in &here[..i] {
                let apart =
                    a_offset + a_bytes <= b_offset || b_offset.saturating_add(b_bytes) <= a_offset;
                let allowed = matches!((a, b), (Some(a), Some(b)) if in_place(a, b, step));
                if !apart && !allowed {
                    return false;
                }
            }
        }
    }
    true
}

#[test]
fn every_plan_is_checked_and_no_option_costs_bytes() {
    arbtest(|u| {
        let dag = random_dag(u)?;
        assert_eq!(dag.verify(), Ok(()), "{dag}");
        let [best, copied, program, plain, apart] = ALL.map(|options| {
            let plan = plan(&dag, &options).expect("a valid dag");
            assert!(oracle(&dag, &plan), "{options:?} {plan:?} {dag}");
            check(&dag, plan).unwrap_or_else(|violation| panic!("{options:?}: {violation}\n{dag}"))
        });
        for plan in [&best, &copied, &program, &plain, &apart] {
            assert!(plan.lower_bound <= plan.height);
            assert_eq!(
                live_bytes(&dag, plan).into_iter().max(),
                Some(plan.lower_bound)
            );
        }
        assert!(best.height <= copied.height && best.height <= program.height);
        assert!(program.height <= plain.height && copied.height <= plain.height);
        assert!(copied.reused.is_empty() && plain.reused.is_empty() && apart.reused.is_empty());
        assert_eq!(apart.height, apart.without_reuse);
        if dag
            .buffers
            .iter()
            .all(|buffer| buffer.align == slabwise_planner::ALIGN)
        {
            assert!(best.height <= best.without_reuse);
        }
        if program.order.windows(2).any(|pair| pair[0] > pair[1]) {
            let mut in_order = plain.clone().into_inner();
            in_order.order.sort_unstable();
            let violation =
                check(&dag, in_order).expect_err("a program order that is possible is kept");
            assert!(
                matches!(violation, Violation::Dependency { .. }),
                "{violation}"
            );
        }
        Ok(())
    });
}

#[test]
fn planning_is_deterministic() {
    arbtest(|u| {
        let dag = random_dag(u)?;
        for options in ALL {
            assert_eq!(plan(&dag, &options), plan(&dag.clone(), &options));
        }
        Ok(())
    });
}

/// One random change to a plan, in any field that affects a run.
fn damage(u: &mut Unstructured, plan: &mut Plan) -> Result<()> {
    let index = |u: &mut Unstructured, len: usize| u.int_in_range(0..=len.saturating_sub(1));
    let near = |u: &mut Unstructured, offset: u64| -> Result<u64> {
        Ok((offset + 64 * u.int_in_range(0..=8u64)?).saturating_sub(256))
    };
    match u.int_in_range(0..=4)? {
        0 if plan.order.len() > 1 => {
            let (a, b) = (index(u, plan.order.len())?, index(u, plan.order.len())?);
            plan.order.swap(a, b);
        }
        1 if !plan.offsets.is_empty() => {
            let at = index(u, plan.offsets.len())?;
            plan.offsets[at] = near(u, plan.offsets[at])?;
        }
        2 if !plan.workspace_offsets.is_empty() => {
            let at = index(u, plan.workspace_offsets.len())?;
            plan.workspace_offsets[at] = near(u, plan.workspace_offsets[at])?;
        }
        3 if !plan.reused.is_empty() => {
            let at = index(u, plan.reused.len())?;
            plan.reused.remove(at);
        }
        _ if plan.offsets.len() > 1 => {
            let (a, b) = (index(u, plan.offsets.len())?, index(u, plan.offsets.len())?);
            plan.offsets.swap(a, b);
        }
        _ => {}
    }
    Ok(())
}

/// Recomputes the numbers of a damaged plan, so that only its safety is in question.
fn with_right_numbers(dag: &Dag, mut plan: Plan) -> Plan {
    loop {
        match check(dag, plan.clone()) {
            Err(Violation::WrongLifetime {
                buffer, expected, ..
            }) => {
                let at = dag
                    .buffers
                    .iter()
                    .position(|b| b.name == buffer)
                    .expect("names are unique here");
                plan.lifetimes[at] = expected;
            }
            Err(Violation::OutOfSlab { offset, bytes, .. }) => plan.height = offset + bytes,
            Err(Violation::Height { expected, .. }) => plan.height = expected,
            Err(Violation::LowerBound { expected, .. }) => plan.lower_bound = expected,
            _ => return plan,
        }
    }
}

#[test]
fn the_checker_agrees_with_the_oracle_about_damaged_plans() {
    let (mut accepted, mut rejected) = (0, 0);
    arbtest(|u| {
        let dag = random_dag(u)?;
        let options = *u.choose(&ALL)?;
        let mut plan = plan(&dag, &options).expect("a valid dag");
        for _ in 0..u.int_in_range(1..=3)? {
            damage(u, &mut plan)?;
        }
        let plan = with_right_numbers(&dag, plan);
        let verdict = check(&dag, plan.clone());
        // The checker rejects listed pairs that do not meet, even where no byte is at risk; the
        // oracle does not.
        let harmless = matches!(
            verdict,
            Err(Violation::ReuseOfLive { .. }
                | Violation::ReuseByLive { .. }
                | Violation::ReuseMoved { .. })
        );
        if !harmless {
            assert_eq!(verdict.is_ok(), oracle(&dag, &plan), "{verdict:?}\n{dag}");
        }
        *if verdict.is_ok() {
            &mut accepted
        } else {
            &mut rejected
        } += 1;
        Ok(())
    })
    // Enough for both counts below on a machine with ten other jobs.
    .budget_ms(2_000);
    assert!(
        accepted > 10 && rejected > 10,
        "{accepted} accepted, {rejected} rejected: the damage is too weak or too strong"
    );
}

#[test]
fn reports_add_up() {
    arbtest(|u| {
        let dag = random_dag(u)?;
        let options = *u.choose(&ALL)?;
        let plan = check(&dag, plan(&dag, &options).expect("a valid dag")).expect("a valid plan");
        let (step, bytes) = peak(&dag, &plan);
        let holders = holders_at_peak(&dag, &plan);
        assert_eq!(bytes, plan.lower_bound);
        assert_eq!(holders.iter().map(|holder| holder.1).sum::<u64>(), bytes);
        assert!(holders.is_sorted_by(|a, b| a.1 >= b.1));
        for (holder, _) in holders {
            match holder {
                Holder::Buffer(id) => assert!(plan.lifetimes[id.index()].contains(step as u64)),
                Holder::Workspace(task) => assert_eq!(plan.order[step], task),
            }
        }
        let saved = saved_in_place(&dag, &plan);
        assert!(saved == 0 || plan.height + saved <= plan.without_reuse);
        let text = report::text(&dag, &plan).to_string();
        assert!(
            text.contains(&format!("slab         {}", Bytes(plan.height))),
            "{text}"
        );

        let table = csv::of_plan(&dag, &plan);
        assert_eq!(csv::read(&csv::write(&table)).as_ref(), Ok(&table));
        let placed = table
            .problem
            .start
            .iter()
            .map(|at| at.offset + table.problem.items[at.item].size);
        assert_eq!(placed.max().unwrap_or(0), plan.height);
        Ok(())
    });
}
