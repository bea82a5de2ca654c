//! Programs that offload buffers to the host to keep a budget: they compute the same values as
//! without offload, and the checkers find plans that do not.

use crate::generate::{mlp, random_dag};
use crate::remat::cases;
use crate::repeats::results_with_copies;
use arbtest::arbitrary::Result;
use slabwise_planner::{
    Buffer, BufferCopy, BufferId, Dag, DagError, Kind, Lifetime, Link, MayReuse, OffloadViolation,
    Offloaded, Options, OrderPolicy, Plan, Space, Task, TaskId, Violation, Work, check,
    check_offload, plan, plan_with_link, plan_within,
};

#[test]
fn random_programs_compute_the_same_within_any_budget_over_any_link() {
    let (mut sent, mut met, mut both) = (0, 0, 0);
    cases(40, |u| {
        let mut dag = if u.ratio(1, 3)? {
            random_dag(u)?
        } else {
            let mut widths = || {
                (0..7)
                    .map(|_| u.int_in_range(1..=40))
                    .collect::<Result<Vec<u64>>>()
            };
            mlp(4096, &widths()?)
        };
        for task in &mut dag.tasks {
            (task.repeatable, task.cost) = (
                !task.writes.is_empty() && u.ratio(1, 2)?,
                u.int_in_range(0..=9)?,
            );
        }
        let options = Options {
            effort: 0,
            ..Options::default()
        };
        let once = plan(&dag, &options).expect("a valid dag");
        let budget = u.int_in_range(once.height / 3..=once.height)?;
        let host_bytes = if u.ratio(1, 4)? {
            Some(u.int_in_range(0..=once.height)?)
        } else {
            None
        };
        let link = Link {
            cost_per_byte: *u.choose(&[0.0, 1e-6, 1e-4, 1e-2])?,
            host_bytes,
        };
        let found =
            plan_with_link(&dag, once.clone(), budget, &link, &options).expect("a valid dag");
        assert_eq!(
            found,
            plan_with_link(&dag, once.clone(), budget, &link, &options).expect("a valid dag"),
            "the same again"
        );
        assert!(
            found.floor <= found.plan.height && found.plan.height <= once.height,
            "{dag}"
        );
        assert!(host_bytes.is_none_or(|most| found.plan.host_height <= most));
        // Never worse than recomputation alone.
        let within = plan_within(&dag, once.clone(), budget, &options).expect("a valid dag");
        let cost = within.repeated.as_ref().map_or(
            dag.tasks.iter().map(|t| u128::from(t.cost)).sum(),
            |repeated| repeated.cost(),
        );
        assert!(found.plan.height.max(budget) <= within.plan.height.max(budget));
        assert!(
            within.plan.height > budget || found.time <= cost as f64,
            "{} {cost}",
            found.time
        );
        met += u32::from(found.plan.height <= budget && budget < once.height);
        let base = found
            .repeated
            .as_ref()
            .map_or(&dag, |repeated| &repeated.dag);
        let task_of = |t: TaskId| {
            found
                .repeated
                .as_ref()
                .map_or(t.0, |repeated| repeated.task_of[t.index()].0)
        };
        let buffer_of = |b: BufferId| {
            found
                .repeated
                .as_ref()
                .map_or(b.0, |repeated| repeated.buffer_of[b.index()].0)
        };
        let Some(offloaded) = &found.offloaded else {
            check(base, found.plan.clone()).expect("a right plan");
            return Ok(());
        };
        check(&offloaded.dag, found.plan.clone()).expect("a right plan");
        sent += offloaded.copies.len();
        both += u32::from(found.repeated.is_some());
        assert_eq!(
            found
                .intervals
                .iter()
                .filter(|interval| interval.steps == 0 || interval.bytes == 0)
                .count(),
            0
        );
        let half_of = |t: TaskId| {
            Some(offloaded.work[t.index()]).filter(|work| !matches!(work, Work::Run(_)))
        };
        let original = |t: TaskId| {
            if let Work::Run(task) = offloaded.work[t.index()] {
                task_of(task)
            } else {
                u32::MAX
            }
        };
        let stands_for = |b: BufferId| buffer_of(offloaded.buffer_of[b.index()]);
        let expected = results_with_copies(&dag, &dag, &once.order, &|t| t.0, &|b| b.0, &|_| None);
        let made = results_with_copies(
            &dag,
            &offloaded.dag,
            &found.plan.order,
            &original,
            &stands_for,
            &half_of,
        );
        assert_eq!(made, expected, "{dag}\n{}", offloaded.dag);
        Ok(())
    });
    assert!(
        sent > 20 && met > 5 && both > 0,
        "{sent} copies, {met} budgets kept, {both} with recomputation"
    );
}

const BYTES: u64 = 4096;
const X: BufferId = BufferId(0);

/// x is written first and read last; two large buffers live in between.
fn sample() -> Dag {
    let mut dag = Dag::new();
    let [x, a, b] =
        ["x", "a", "b"].map(|name| dag.add_buffer(Buffer::new(name, Kind::Activation, BYTES)));
    let y = dag.add_buffer(Buffer {
        live_out: true,
        ..Buffer::new("y", Kind::Output, 64)
    });
    let costs = |name: &str, reads: &[BufferId], writes: &[BufferId]| Task {
        cost: 100,
        ..Task::new(name, reads, writes)
    };
    dag.add_task(costs("make x", &[], &[x]));
    dag.add_task(costs("make a", &[x], &[a]));
    dag.add_task(costs("make b", &[a], &[b]));
    dag.add_task(costs("use b", &[b], &[]));
    let last = dag.add_task(costs("make y", &[x], &[y]));
    dag.tasks[last.index()].after.push(TaskId(3));
    dag.may_reuse.push(MayReuse {
        task: last,
        from: x,
        to: y,
    });
    dag
}

/// The sample in two thirds of its bytes: x is offloaded while b is computed from a.
fn offloaded_sample() -> (Offloaded, Plan) {
    let dag = sample();
    let once = plan(&dag, &Options::default()).expect("a valid dag");
    assert_eq!(once.height, 3 * BYTES);
    let found = plan_with_link(
        &dag,
        once,
        2 * BYTES,
        &Link {
            cost_per_byte: 1e-3,
            host_bytes: None,
        },
        &Options::default(),
    );
    let found = found.expect("a valid dag");
    assert_eq!(
        (found.plan.height, found.plan.host_height, found.time),
        (2 * BYTES, BYTES, 500.0)
    );
    let [interval] = found.intervals[..] else {
        panic!("{:?}", found.intervals)
    };
    assert_eq!(
        (
            interval.buffer,
            interval.bytes,
            interval.used,
            interval.read,
            interval.recompute
        ),
        (X, BYTES, TaskId(1), TaskId(4), None)
    );
    let offloaded = found.offloaded.expect("copies").into_inner();
    (offloaded, found.plan)
}

/// The tasks of the sample with copies, in order.
const NAMES: [&str; 9] = [
    "make x",
    "send x",
    "make a",
    "sent x",
    "make b",
    "fetch x on the host",
    "use b",
    "fetched x on the host",
    "make y",
];

#[test]
fn a_buffer_is_offloaded_after_a_use_and_prefetched_for_the_next() {
    let (offloaded, plan) = offloaded_sample();
    let names: Vec<&str> = plan
        .order
        .iter()
        .map(|&task| offloaded.dag.task_name(task))
        .collect();
    assert_eq!(names, NAMES);
    assert_eq!(
        offloaded.copies,
        [(0, 4), (4, 5)].map(|(from, to)| BufferCopy {
            from: BufferId(from),
            to: BufferId(to)
        })
    );
    assert_eq!(offloaded.dag.buffers[4].space, Space::Host);
    let life = |b: usize| (plan.lifetimes[b].start, plan.lifetimes[b].end);
    // The lives: until its copy has ended, from the start of the other copy, and on the host the
    // whole time between.
    assert_eq!([life(0), life(5), life(4)], [(0, 4), (5, 9), (1, 8)]);
    assert_eq!(offloaded.bytes(), BYTES);
}

/// The violation that the checker reports for the sample with copies after a change.
fn broken(change: impl FnOnce(&Offloaded, &mut Plan)) -> Violation {
    let (offloaded, mut plan) = offloaded_sample();
    change(&offloaded, &mut plan);
    check(&offloaded.dag, plan).expect_err("a broken plan")
}

/// The violation of a plan in another order that is otherwise consistent.
fn reordered(from: usize, to: usize) -> Violation {
    let (mut offloaded, plan) = offloaded_sample();
    let mut order = plan.order.clone();
    let task = order.remove(from);
    order.insert(to, task);
    // Lifetimes and offsets of the same dag without the constraints that forbid the order.
    let kept = offloaded.dag.clone();
    let place: Vec<u32> = (0..9)
        .map(|t| order.iter().position(|o| o.0 == t).expect("in the order") as u32)
        .collect();
    let mut tasks: Vec<(u32, Task)> = place
        .into_iter()
        .zip(std::mem::take(&mut offloaded.dag.tasks))
        .collect();
    tasks.sort_by_key(|(at, _)| *at);
    offloaded.dag.tasks = tasks
        .into_iter()
        .map(|(_, task)| Task {
            after: Vec::new(),
            ..task
        })
        .collect();
    let lives = |b: BufferId| {
        let touches = |task: &Task| task.reads.contains(&b) || task.writes.contains(&b);
        let steps: Vec<u64> = (0u64..)
            .zip(&offloaded.dag.tasks)
            .filter(|(_, task)| touches(task))
            .map(|(step, _)| step)
            .collect();
        Lifetime::new(
            steps[0],
            if b.0 == 3 {
                9
            } else {
                steps[steps.len() - 1] + 1
            },
        )
    };
    let lifetimes = (0..kept.buffers.len() as u32)
        .map(|b| lives(BufferId(b)))
        .collect();
    check(
        &kept,
        Plan {
            order,
            lifetimes,
            reused: Vec::new(),
            ..plan
        },
    )
    .expect_err("a broken plan")
}

#[test]
fn plans_that_copy_too_late_or_reuse_bytes_too_early_are_rejected() {
    let late = |violation: Violation, late: &str, early: &str| match violation {
        Violation::Dependency {
            late: l, early: e, ..
        } => assert_eq!((&*l, &*e), (late, early)),
        other => panic!("{other}"),
    };
    // Read before it is back, prefetched before it is offloaded, offloaded before it is written.
    late(reordered(7, 8), "fetched x on the host", "make y");
    late(reordered(5, 2), "sent x", "fetch x on the host");
    late(reordered(3, 6), "sent x", "fetch x on the host");
    late(reordered(1, 0), "make x", "send x");
    // The halves of a copy in the wrong order.
    late(reordered(3, 1), "send x", "sent x");
    // Its bytes are reused before the copy out of them has ended, or still in use when the copy
    // into them begins.
    let overlap = |violation: Violation, first: &str, second: &str, step: usize| match violation {
        Violation::Overlap {
            first: f,
            second: s,
            step: at,
            ..
        } => assert_eq!((&*f, &*s, at), (first, second, step)),
        other => panic!("{other}"),
    };
    assert!(matches!(
        broken(|_, plan| plan.lifetimes[0].end = 3),
        Violation::WrongLifetime { .. }
    ));
    assert!(matches!(
        broken(|_, plan| plan.lifetimes[5].start = 6),
        Violation::WrongLifetime { .. }
    ));
    assert!(matches!(
        broken(|_, plan| plan.lifetimes[4].end = 7),
        Violation::WrongLifetime { .. }
    ));
    overlap(
        broken(|_, plan| plan.offsets[1] = plan.offsets[0]),
        "x",
        "a",
        2,
    );
    // The wait for the offload comes after the first use of its bytes by another buffer.
    overlap(reordered(3, 4), "x", "b", 3);
    // The prefetch begins while another buffer holds the bytes.
    overlap(reordered(5, 4), "a", "x fetched", 4);
    // The host's space is checked like the slab.
    assert!(matches!(
        broken(|_, plan| plan.offsets[4] = 64),
        Violation::OutOfSlab { height: BYTES, .. }
    ));
    assert!(matches!(
        broken(|_, plan| plan.host_height += 64),
        Violation::Height {
            expected: BYTES,
            ..
        }
    ));
    assert!(matches!(
        broken(|_, plan| plan.height += 64),
        Violation::Height { .. }
    ));
}

#[test]
fn buffers_on_the_host_are_computed_in_place() {
    let mut dag = Dag::new();
    let [a, b, c, d] = [("a", 128), ("b", 128), ("c", 64), ("d", 64)].map(|(name, bytes)| {
        dag.add_buffer(Buffer {
            space: Space::Host,
            ..Buffer::new(name, Kind::Other, bytes)
        })
    });
    let [x, y] = ["x", "y"].map(|name| dag.add_buffer(Buffer::new(name, Kind::Other, 64)));
    dag.add_task(Task::new("make", &[], &[a, x]));
    for (from, to) in [(a, b), (b, c)] {
        let task = dag.add_task(Task::new("next", &[from], &[to]));
        dag.may_reuse.push(MayReuse { task, from, to });
    }
    dag.add_task(Task::new("beside", &[c, x], &[d, y]));
    for options in [true, false].map(|in_place| Options {
        in_place,
        ..Options::default()
    }) {
        let found = plan(&dag, &options).expect("a valid dag");
        let found = check(&dag, found).expect("a valid plan");
        assert_eq!((found.height, found.lower_bound), (128, 128));
        assert_eq!(found.host_height, if options.in_place { 192 } else { 256 });
    }
}

#[test]
fn buffers_on_the_host_do_not_share_bytes() {
    let mut dag = Dag::new();
    let [a, b] = ["a", "b"].map(|name| {
        dag.add_buffer(Buffer {
            space: Space::Host,
            ..Buffer::new(name, Kind::Other, 64)
        })
    });
    let c = dag.add_buffer(Buffer::new("c", Kind::Other, 64));
    dag.add_task(Task::new("make", &[], &[a, b, c]));
    let good = plan(&dag, &Options::default()).expect("a valid dag");
    assert_eq!(
        (
            good.height,
            good.host_height,
            good.lower_bound,
            good.without_reuse
        ),
        (64, 128, 64, 64)
    );
    let mut bad = good.clone();
    bad.offsets[1] = bad.offsets[0];
    bad.host_height = 64;
    assert!(matches!(check(&dag, bad), Err(Violation::Overlap { .. })));
    check(&dag, good).expect("a right plan");
    dag.add_task(Task::new("across", &[c], &[]));
    dag.tasks[1].writes.push(b);
    dag.may_reuse.push(MayReuse {
        task: TaskId(1),
        from: c,
        to: b,
    });
    assert!(matches!(dag.verify(), Err(DagError::ReuseAcross { .. })));
}

#[test]
fn every_deviation_from_the_program_is_rejected() {
    let (right, _) = offloaded_sample();
    check_offload(&sample(), right.clone()).expect("right");
    let broken = |change: &dyn Fn(&mut Offloaded)| {
        let mut offloaded = right.clone();
        change(&mut offloaded);
        check_offload(&sample(), offloaded).expect_err("broken")
    };
    use OffloadViolation as V;
    let [send, sent, fetched] = [1, 3, 7];
    assert!(matches!(
        broken(&|o| o.dag.tasks[0].reads = vec![BufferId(9)]),
        V::Dag(_)
    ));
    assert_eq!(
        broken(&|o| o.work.truncate(8)),
        V::Origin {
            what: "tasks",
            index: 0,
            count: 5
        }
    );
    assert_eq!(
        broken(&|o| o.work[send] = Work::Start(2)),
        V::Origin {
            what: "copies",
            index: 2,
            count: 2
        }
    );
    assert_eq!(
        broken(&|o| o.buffer_of[4] = BufferId(4)),
        V::Origin {
            what: "buffers",
            index: 4,
            count: 4
        }
    );
    assert!(matches!(
        broken(&|o| o.dag.buffers[4].bytes = 64),
        V::Differs {
            what: "bytes or alignment",
            ..
        }
    ));
    assert!(matches!(
        broken(&|o| o.dag.tasks[0].cost = 1),
        V::Differs { .. }
    ));
    // A read of another buffer, or of a buffer that is on the host.
    assert_eq!(
        broken(&|o| o.dag.tasks[8].reads = vec![BufferId(2)]),
        V::Dag(DagError::ReuseNotRead {
            task: "make y".into(),
            from: "x fetched".into(),
            to: "y".into()
        })
    );
    let elsewhere = |o: &mut Offloaded, b: u32| {
        o.dag.may_reuse.clear();
        o.dag.tasks[8].reads = vec![BufferId(b)];
    };
    assert_eq!(
        broken(&|o| elsewhere(o, 2)),
        V::Touches {
            run: "make y".into()
        }
    );
    assert_eq!(
        broken(&|o| elsewhere(o, 4)),
        V::OnHost {
            name: "x on the host".into()
        }
    );
    assert_eq!(
        broken(&|o| o.work[8] = Work::Run(TaskId(3))),
        V::Touches {
            run: "make y".into()
        }
    );
    assert_eq!(
        broken(&|o| o.dag.tasks[8].after.clear()),
        V::Order {
            run: "make y".into(),
            before: "use b".into()
        }
    );
    let pair = MayReuse {
        task: TaskId(2),
        from: X,
        to: BufferId(1),
    };
    assert_eq!(
        broken(&|o| o.dag.may_reuse.push(pair)),
        V::InPlace {
            run: "make a".into()
        }
    );
    // Copies that never end, never begin or copy another buffer.
    let drop_task = |o: &mut Offloaded, at: usize| {
        let copy = o.dag.tasks.remove(at);
        o.work.remove(at);
        o.dag
            .tasks
            .iter_mut()
            .flat_map(|t| &mut t.after)
            .for_each(|a| a.0 -= u32::from(a.index() > at));
        o.dag.may_reuse.iter_mut().for_each(|pair| pair.task.0 -= 1);
        copy
    };
    assert_eq!(
        broken(&|o| _ = drop_task(o, fetched)),
        V::Halves {
            copy: 1,
            to: "x fetched".into()
        }
    );
    assert_eq!(
        broken(&|o| _ = drop_task(o, sent)),
        V::Halves {
            copy: 0,
            to: "x on the host".into()
        }
    );
    assert_eq!(
        broken(&|o| o.work.swap(send, sent)),
        V::Halves {
            copy: 0,
            to: "x on the host".into()
        }
    );
    assert!(matches!(
        broken(&|o| o.dag.tasks[send].reads.push(BufferId(1))),
        V::NotACopy { .. }
    ));
    assert!(matches!(
        broken(&|o| o.dag.tasks[sent].reads.clear()),
        V::NotACopy { .. }
    ));
    assert!(matches!(
        broken(&|o| o.dag.tasks[sent].workspace = 64),
        V::NotACopy { .. }
    ));
    let other = |o: &mut Offloaded| {
        (
            o.copies[0].from,
            o.dag.tasks[send].reads[0],
            o.dag.tasks[sent].reads[0],
        ) = (BufferId(1), BufferId(1), BufferId(1))
    };
    assert!(matches!(
        broken(&other),
        V::Sides {
            what: "stands for other data",
            ..
        }
    ));
    assert!(matches!(
        broken(&|o| o.dag.buffers[4].space = Space::Device),
        V::Sides {
            what: "lies in the same space",
            ..
        }
    ));
    // Both a task and a copy write it; an extra writer.
    assert_eq!(
        broken(&|o| o.dag.tasks[0].writes.push(BufferId(5))),
        V::Touches {
            run: "make x".into()
        }
    );
    assert!(matches!(
        broken(&|o| o.dag.buffers[5].live_out = true),
        V::Dag(_)
    ));
    assert!(matches!(
        broken(&|o| o.dag.buffers[4].live_in = true),
        V::Copies {
            when: "at the start",
            ..
        }
    ));
    assert!(matches!(
        broken(&|o| o.dag.buffers[3].live_out = false),
        V::Copies {
            copies: 0,
            when: "at the end",
            ..
        }
    ));
    // A buffer that nothing writes, and a task that never runs.
    let spare = |o: &mut Offloaded| {
        o.dag
            .add_buffer(Buffer::new("x spare", Kind::Activation, BYTES));
        o.buffer_of.push(X);
    };
    assert_eq!(
        broken(&spare),
        V::Makers {
            buffer: "x spare".into()
        }
    );
    let mut more = sample();
    more.add_task(Task::new("forgotten", &[], &[]));
    assert_eq!(
        check_offload(&more, right.clone()),
        Err(V::Runs {
            task: "forgotten".into(),
            runs: 0
        })
    );
}

#[test]
fn the_host_may_be_too_small_and_the_order_of_the_program_is_kept() {
    let dag = sample();
    let once = plan(
        &dag,
        &Options {
            order: OrderPolicy::Program,
            ..Options::default()
        },
    )
    .expect("a valid dag");
    let link = Link {
        cost_per_byte: 1e-3,
        host_bytes: Some(BYTES - 1),
    };
    let found = plan_with_link(&dag, once.clone(), 2 * BYTES, &link, &Options::default())
        .expect("a valid dag");
    assert_eq!((found.plan.height, found.offloaded), (once.height, None));
}

/// Layers of many widths over a link so slow that not all offloaded bytes can be copied while
/// kernels run. If recomputation is searched for first and copies afterwards, the lowest costs
/// found are 12.0 and 10.8 % above the cost of running everything once.
#[test]
fn copies_and_recomputation_are_searched_for_jointly() {
    for (shift, most) in [(0, 1.11), (1, 1.095)] {
        let widths: Vec<u64> = (0..14).map(|i| 8 + (i * 11 + shift * 5) % 29).collect();
        let mut dag = mlp(4096, &widths);
        for (t, task) in (0u64..).zip(&mut dag.tasks) {
            (task.repeatable, task.cost) = (
                task.repeatable || !task.writes.is_empty() && t < 13,
                1000 + 700 * (t % 5),
            );
        }
        let options = Options::default();
        let once = plan(&dag, &options).expect("a valid dag");
        let budget = once.height / 2;
        let link = Link {
            cost_per_byte: 0.05,
            host_bytes: None,
        };
        let found = plan_with_link(&dag, once, budget, &link, &options).expect("a valid dag");
        let base: f64 = dag.tasks.iter().map(|t| t.cost as f64).sum();
        assert!(
            found.plan.height <= budget && found.time <= most * base,
            "{} of {budget}, {}",
            found.plan.height,
            found.time / base
        );
        assert!(found.repeated.is_some() && found.offloaded.is_some());
    }
}
