//! Programs that recompute values to keep a budget: they compute the same values as without
//! recomputation, and the checker finds plans that do not.

use crate::generate::{mlp, random_dag};
use crate::remat::cases;
use arbtest::arbitrary::Result;
use slabwise_planner::{
    Buffer, BufferId, Dag, DagError, Kind, MayReuse, Options, RepeatViolation, Repeated, Rerun,
    Space, Task, TaskId, Work, check, check_repeats, plan, plan_within,
};

/// The outputs of tasks run in an order: for each output buffer, a number that depends on every
/// value it is computed from. A read that occurs only at the first run of a task does not affect
/// its writes.
fn results(
    original: &Dag,
    dag: &Dag,
    order: &[TaskId],
    task_of: &dyn Fn(TaskId) -> u32,
    buffer_of: &dyn Fn(BufferId) -> u32,
) -> Vec<(u32, u64)> {
    results_with_copies(original, dag, order, task_of, buffer_of, &|_| None)
}

/// The same where some tasks are halves of copies. The bytes of a running copy are undefined; the
/// copied value is the one that is there when the copy is waited for.
pub fn results_with_copies(
    original: &Dag,
    dag: &Dag,
    order: &[TaskId],
    task_of: &dyn Fn(TaskId) -> u32,
    buffer_of: &dyn Fn(BufferId) -> u32,
    half_of: &dyn Fn(TaskId) -> Option<Work>,
) -> Vec<(u32, u64)> {
    let counts = |task: &Task, b: BufferId| {
        task.rerun
            .as_ref()
            .is_none_or(|rerun| rerun.reads.contains(&b))
    };
    let mix = |h: u64, x: u64| (h ^ x).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
    let mut values: Vec<u64> = (0..dag.buffers.len() as u32)
        .map(|b| mix(7, u64::from(buffer_of(BufferId(b)))))
        .collect();
    for &t in order {
        let task = &dag.tasks[t.index()];
        if let Some(half) = half_of(t) {
            let (from, to) = (task.reads[0].index(), task.writes[0].index());
            values[to] = if matches!(half, Work::Finish(_)) {
                values[from]
            } else {
                mix(values[to], u64::from(t.0))
            };
            continue;
        }
        let of = &original.tasks[task_of(t) as usize];
        let reads = task
            .reads
            .iter()
            .filter(|b| counts(of, BufferId(buffer_of(**b))));
        let seen = reads
            .chain(&task.writes)
            .fold(u64::from(task_of(t)), |h, b| mix(h, values[b.index()]));
        (0u64..)
            .zip(&task.writes)
            .for_each(|(k, b)| values[b.index()] = mix(seen, k));
    }
    let out = (0u32..)
        .zip(&dag.buffers)
        .filter(|(_, buffer)| buffer.live_out);
    let mut results: Vec<(u32, u64)> = out
        .map(|(b, _)| (buffer_of(BufferId(b)), values[b as usize]))
        .collect();
    results.sort_unstable();
    results
}

#[test]
fn random_programs_compute_the_same_within_any_budget() {
    let (mut again, mut met) = (0, 0);
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
                !task.writes.is_empty() && u.ratio(9, 10)?,
                u.int_in_range(0..=9)?,
            );
            if u.ratio(1, 3)? {
                let (mut reads, cost) = (task.reads.clone(), u.int_in_range(0..=task.cost)?);
                reads.truncate(u.int_in_range(1..=reads.len().max(1))?);
                task.rerun = Some(Rerun {
                    reads,
                    workspace: task.workspace / 2,
                    cost,
                });
            }
        }
        let options = Options {
            effort: 0,
            ..Options::default()
        };
        let once = plan(&dag, &options).expect("a valid dag");
        let least = plan_within(&dag, once.clone(), 0, &options).expect("a valid dag");
        let budget = u.int_in_range(least.floor.midpoint(once.height)..=once.height)?;
        let within = plan_within(&dag, once.clone(), budget, &options).expect("a valid dag");
        assert_eq!(
            within,
            plan_within(&dag, once.clone(), budget, &options).expect("a valid dag"),
            "the same again"
        );
        assert!(
            within.floor <= within.plan.height
                && within.plan.height <= once.height
                && within.baseline_height == once.height,
            "{dag}"
        );
        let expected = results(&dag, &dag, &once.order, &|t| t.0, &|b| b.0);
        let Some(repeated) = &within.repeated else {
            check(&dag, within.plan).expect("a right plan");
            return Ok(());
        };
        again += repeated.recomputed_tasks().len();
        met += u32::from(within.plan.height <= budget);
        let found = results(
            &dag,
            &repeated.dag,
            &within.plan.order,
            &|t| repeated.task_of[t.index()].0,
            &|b| repeated.buffer_of[b.index()].0,
        );
        assert_eq!(found, expected, "{dag}\n{}", repeated.dag);
        check(&repeated.dag, within.plan.clone()).expect("a right plan");
        Ok(())
    });
    assert!(
        again > 20 && met > 5,
        "{again} runs again, {met} budgets kept"
    );
}

/// `make` writes x, which `use` reads; `use` writes y from x and the weight that `update` changes
/// at the end.
fn small() -> Dag {
    let mut dag = Dag::new();
    let input = dag.add_buffer(Buffer {
        live_in: true,
        ..Buffer::new("in", Kind::Input, 64)
    });
    let x = dag.add_buffer(Buffer::new("x", Kind::Activation, 64));
    let y = dag.add_buffer(Buffer {
        live_out: true,
        ..Buffer::new("y", Kind::Output, 64)
    });
    let make = dag.add_task(Task {
        repeatable: true,
        cost: 5,
        ..Task::new("make", &[input], &[x])
    });
    let task = dag.add_task(Task {
        repeatable: true,
        ..Task::new("use", &[x], &[y])
    });
    dag.add_task(Task {
        after: vec![make, task],
        ..Task::new("update", &[x], &[])
    });
    dag.may_reuse.push(MayReuse {
        task,
        from: x,
        to: y,
    });
    dag
}

/// The small dag with a second run of `make`, for `update`.
fn small_repeated() -> Repeated {
    let mut dag = small();
    let copy = dag.add_buffer(Buffer::new("x again", Kind::Activation, 64));
    let again = dag.add_task(Task {
        repeatable: true,
        cost: 5,
        ..Task::new("make again", &[BufferId(0)], &[copy])
    });
    dag.tasks[2].reads = vec![copy];
    dag.tasks[2].after.push(again);
    let [make, task, update] = [0, 1, 2].map(TaskId);
    let [input, x, y] = [0, 1, 2].map(BufferId);
    Repeated {
        dag,
        task_of: vec![make, task, update, make],
        buffer_of: vec![input, x, y, x],
    }
}

#[test]
fn every_deviation_from_the_program_is_rejected() {
    let right = check_repeats(&small(), small_repeated()).expect("right");
    assert_eq!(
        (right.recomputed_tasks(), right.cost()),
        (vec![TaskId(3)], 10)
    );
    let broken = |change: &dyn Fn(&mut Repeated)| {
        let mut repeated = small_repeated();
        change(&mut repeated);
        check_repeats(&small(), repeated).expect_err("broken")
    };
    use RepeatViolation as V;
    assert!(matches!(
        broken(&|r| r.dag.tasks[0].reads[0] = BufferId(9)),
        V::Dag(_)
    ));
    assert_eq!(
        broken(&|r| r.task_of.truncate(3)),
        V::Origin {
            what: "tasks",
            index: 0,
            count: 3
        }
    );
    assert_eq!(
        broken(&|r| r.buffer_of[3] = BufferId(3)),
        V::Origin {
            what: "buffers",
            index: 3,
            count: 3
        }
    );
    assert!(matches!(
        broken(&|r| r.dag.buffers[3].bytes = 32),
        V::Differs {
            what: "bytes or alignment",
            ..
        }
    ));
    assert!(matches!(
        broken(&|r| r.dag.tasks[3].workspace = 32),
        V::Differs {
            what: "workspace or cost",
            ..
        }
    ));
    assert!(matches!(
        broken(&|r| r.dag.buffers[3].live_in = true),
        V::Copies {
            copies: 1,
            when: "at the start",
            ..
        }
    ));
    assert!(matches!(
        broken(&|r| r.dag.buffers[3].live_out = true),
        V::Copies {
            copies: 1,
            when: "at the end",
            ..
        }
    ));
    assert!(matches!(
        broken(&|r| r.dag.buffers[2].live_out = false),
        V::Copies {
            copies: 0,
            when: "at the end",
            ..
        }
    ));
    assert_eq!(
        broken(&|r| r.dag.buffers[3].space = Space::Host),
        V::Differs {
            name: "x again".into(),
            what: "its space"
        }
    );
    assert_eq!(
        broken(&|r| r.dag.tasks[2].reads[0] = BufferId(2)),
        V::Touches {
            run: "update".into()
        }
    );
    assert_eq!(
        broken(&|r| r.dag.tasks[3].writes.push(BufferId(1))),
        V::Touches {
            run: "make again".into()
        }
    );
    assert_eq!(
        broken(&|r| r.dag.tasks[2].after = vec![TaskId(1), TaskId(0)]),
        V::Order {
            run: "update".into(),
            before: "make again".into()
        }
    );
    let undeclared = MayReuse {
        task: TaskId(0),
        from: BufferId(0),
        to: BufferId(1),
    };
    assert_eq!(
        broken(&|r| r.dag.may_reuse.push(undeclared)),
        V::InPlace { run: "make".into() }
    );
    let twice = |r: &mut Repeated| {
        (r.dag.tasks[3].writes[0], r.dag.tasks[2].reads[0]) = (BufferId(1), BufferId(1))
    };
    assert_eq!(broken(&twice), V::Writers { buffer: "x".into() });
    let mut once = small();
    once.tasks[0].repeatable = false;
    assert_eq!(
        check_repeats(&once, small_repeated()),
        Err(V::Runs {
            task: "make".into(),
            runs: 2
        })
    );
}

#[test]
fn effects_of_the_first_run_happen_once() {
    let mut dag = small();
    // At its first run, `make` has an effect for which it reads the input a second time.
    let more = dag.add_buffer(Buffer {
        live_in: true,
        ..Buffer::new("more", Kind::Input, 64)
    });
    dag.tasks[0].reads.push(more);
    dag.tasks[0].rerun = Some(Rerun {
        reads: vec![BufferId(0)],
        workspace: 0,
        cost: 3,
    });
    let leaner = || {
        let mut repeated = small_repeated();
        repeated.dag.add_buffer(dag.buffers[more.index()].clone());
        repeated.buffer_of.push(more);
        repeated.dag.tasks[0].reads.push(BufferId(4));
        repeated.dag.tasks[3].cost = 3;
        repeated
    };
    assert_eq!(check_repeats(&dag, leaner()).expect("right").cost(), 8);
    let whole_again = |r: &mut Repeated| {
        (r.dag.tasks[3].reads, r.dag.tasks[3].cost) = (vec![BufferId(0), BufferId(4)], 5)
    };
    let never_whole =
        |r: &mut Repeated| (r.dag.tasks[0].reads, r.dag.tasks[0].cost) = (vec![BufferId(0)], 3);
    for change in [whole_again as fn(&mut Repeated), never_whole] {
        let mut repeated = leaner();
        change(&mut repeated);
        assert!(matches!(
            check_repeats(&dag, repeated),
            Err(RepeatViolation::Differs {
                what: "workspace or cost",
                ..
            })
        ));
    }
    let mut reads_more = leaner();
    reads_more.dag.tasks[3].reads.push(BufferId(4));
    assert_eq!(
        check_repeats(&dag, reads_more),
        Err(RepeatViolation::Touches {
            run: "make again".into()
        })
    );
    dag.tasks[0].rerun = Some(Rerun {
        reads: vec![BufferId(2)],
        ..Rerun::default()
    });
    assert_eq!(
        dag.verify(),
        Err(DagError::RerunReads {
            task: "make".into(),
            buffer: "y".into()
        })
    );
}
