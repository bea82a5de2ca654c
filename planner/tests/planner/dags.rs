//! Every broken invariant of a dag has its error, which names the fault; small dags have the
//! expected plans.

use slabwise_planner::{
    Buffer, BufferId, Dag, DagError, Kind, Lifetime, MayReuse, Options, Plan, PlanError, Rerun,
    Task, TaskId, check, plan,
};

fn buffer(name: &str, bytes: u64) -> Buffer {
    Buffer::new(name, Kind::Activation, bytes)
}

fn planned(dag: &Dag) -> Plan {
    check(dag, plan(dag, &Options::default()).expect("a valid dag"))
        .expect("a valid plan")
        .into_inner()
}

/// x → f → h → g → y, where g may compute in place.
fn chain() -> Dag {
    let mut dag = Dag::new();
    let x = dag.add_buffer(Buffer {
        live_in: true,
        ..buffer("x", 256)
    });
    let h = dag.add_buffer(buffer("h", 128));
    let y = dag.add_buffer(Buffer {
        live_out: true,
        ..buffer("y", 64)
    });
    dag.add_task(Task::new("f", &[x], &[h]));
    let task = dag.add_task(Task::new("g", &[h], &[y]));
    dag.may_reuse.push(MayReuse {
        task,
        from: h,
        to: y,
    });
    dag
}

fn error(change: impl FnOnce(&mut Dag)) -> DagError {
    let mut dag = chain();
    assert_eq!(dag.verify(), Ok(()));
    change(&mut dag);
    let error = dag.verify().expect_err("a broken dag");
    assert_eq!(
        plan(&dag, &Options::default()),
        Err(PlanError::Dag(error.clone()))
    );
    error
}

#[test]
fn ids_out_of_range() {
    let found = error(|dag| dag.tasks[1].reads.push(BufferId(9)));
    assert_eq!(
        found,
        DagError::UnknownBuffer {
            place: "task `g`".into(),
            buffer: 9,
            count: 3
        }
    );
    let found = error(|dag| dag.tasks[1].after.push(TaskId(2)));
    assert_eq!(
        found,
        DagError::UnknownTask {
            place: "task `g`".into(),
            task: 2,
            count: 2
        }
    );
    let found = error(|dag| dag.may_reuse[0].task = TaskId(5));
    assert_eq!(
        found,
        DagError::UnknownTask {
            place: "reuse pair 0".into(),
            task: 5,
            count: 2
        }
    );
    let found = error(|dag| dag.may_reuse[0].to = BufferId(3));
    assert_eq!(
        found,
        DagError::UnknownBuffer {
            place: "reuse pair 0".into(),
            buffer: 3,
            count: 3
        }
    );
    assert_eq!(
        found.to_string(),
        "reuse pair 0 names buffer 3, but there are 3 buffers"
    );
}

#[test]
fn sizes() {
    for align in [0, 3, 96] {
        assert_eq!(
            error(|dag| dag.buffers[1].align = align),
            DagError::Alignment {
                buffer: "h".into(),
                align
            }
        );
    }
    let found = error(|dag| dag.buffers[1].bytes = u64::MAX);
    assert_eq!(
        found,
        DagError::TotalBytes {
            name: "h".into(),
            bytes: u64::MAX
        }
    );
    let found = error(|dag| {
        dag.buffers[0].bytes = 1 << 63;
        dag.tasks[1].workspace = 1 << 63;
    });
    assert_eq!(
        found,
        DagError::TotalBytes {
            name: "g".into(),
            bytes: 1 << 63
        }
    );
    let found = error(|dag| dag.buffers[2].align = 1 << 63);
    assert_eq!(
        found,
        DagError::TotalBytes {
            name: "h".into(),
            bytes: 128
        }
    );
}

#[test]
fn data_without_a_writer() {
    let found = error(|dag| dag.buffers[0].live_in = false);
    assert_eq!(
        found,
        DagError::NeverWritten {
            task: "f".into(),
            buffer: "x".into()
        }
    );
    let found = error(|dag| dag.tasks[0].reads.push(BufferId(1)));
    assert_eq!(
        found,
        DagError::ReadBeforeWrite {
            task: "f".into(),
            buffer: "h".into()
        }
    );
    let found = error(|dag| {
        dag.buffers.push(Buffer {
            live_out: true,
            ..buffer("z", 4)
        })
    });
    assert_eq!(found, DagError::OutputNeverWritten { buffer: "z".into() });
}

#[test]
fn cycles_are_named() {
    let found = error(|dag| dag.tasks[0].after.push(TaskId(1)));
    assert!(
        matches!(found, DagError::Cycle { ref tasks } if tasks.len() == 2),
        "{found}"
    );
    assert!(
        ["`f` → `g` → `f`", "`g` → `f` → `g`"]
            .iter()
            .any(|cycle| found.to_string().ends_with(cycle)),
        "{found}"
    );
    let found = error(|dag| dag.tasks[1].after.push(TaskId(1)));
    assert_eq!(
        found,
        DagError::Cycle {
            tasks: vec!["g".into()]
        }
    );
    // A long path from the first stuck task to the cycle, and tasks behind it.
    let mut dag = Dag::new();
    for i in 0..10u32 {
        let mut task = Task::new(format!("t{i}"), &[], &[]);
        task.after = if i < 9 {
            vec![TaskId(i + 1)]
        } else {
            vec![TaskId(7)]
        };
        dag.add_task(task);
    }
    assert_eq!(
        dag.verify(),
        Err(DagError::Cycle {
            tasks: vec!["t9".into(), "t8".into(), "t7".into()]
        })
    );
}

#[test]
fn reuse_pairs() {
    let names = || ("g".to_owned(), "h".to_owned(), "y".to_owned());
    let found = error(|dag| dag.may_reuse[0].from = BufferId(2));
    assert_eq!(
        found,
        DagError::ReuseItself {
            task: "g".into(),
            buffer: "y".into()
        }
    );
    let found = error(|dag| dag.may_reuse[0].to = BufferId(0));
    assert_eq!(
        found,
        DagError::ReuseNotWritten {
            task: "g".into(),
            from: "h".into(),
            to: "x".into()
        }
    );
    let found = error(|dag| dag.may_reuse[0].from = BufferId(0));
    assert_eq!(
        found,
        DagError::ReuseNotRead {
            task: "g".into(),
            from: "x".into(),
            to: "y".into()
        }
    );
    let (task, from, to) = names();
    assert_eq!(
        error(|dag| dag.tasks[1].writes.push(BufferId(1))),
        DagError::ReuseNotRead { task, from, to }
    );
    let (task, from, to) = names();
    assert_eq!(
        error(|dag| dag.buffers[2].live_in = true),
        DagError::ReuseIntoInput { task, from, to }
    );
    let (task, from, to) = names();
    assert_eq!(
        error(|dag| dag.buffers[1].live_out = true),
        DagError::ReuseOfOutput { task, from, to }
    );
    let (task, from, to) = names();
    assert_eq!(
        error(|dag| dag.buffers[2].bytes = 129),
        DagError::ReuseTooSmall {
            task,
            from,
            from_bytes: 128,
            to,
            to_bytes: 129
        }
    );
}

#[test]
fn lifetimes_are_half_open_and_inputs_exist_together() {
    let mut dag = chain();
    let unused = dag.add_buffer(Buffer {
        live_in: true,
        ..buffer("unused", 64)
    });
    let passed = dag.add_buffer(Buffer {
        live_in: true,
        live_out: true,
        ..buffer("passed", 64)
    });
    let forgotten = dag.add_buffer(buffer("forgotten", 1 << 40));
    let silent = dag.add_buffer(buffer("silent", 64));
    dag.tasks[0].writes.push(silent);
    let plan = planned(&dag);
    let life = |id: BufferId| {
        (
            plan.lifetimes[id.index()].start,
            plan.lifetimes[id.index()].end,
        )
    };
    let [x, h, y] = [0, 1, 2].map(BufferId);
    assert_eq!(
        [x, h, y, unused, passed, forgotten, silent].map(life),
        [(0, 1), (0, 2), (1, 2), (0, 1), (0, 2), (0, 0), (0, 1)]
    );
    // Step 0: x, h, unused, passed, silent.
    assert_eq!(plan.height, 256 + 128 + 3 * 64);
}

#[test]
fn without_tasks_inputs_and_outputs_still_lie_apart() {
    let mut dag = Dag::new();
    assert_eq!(planned(&dag).height, 0);
    for name in ["a", "b"] {
        dag.add_buffer(Buffer {
            live_in: true,
            live_out: name == "a",
            ..buffer(name, 100)
        });
    }
    let plan = planned(&dag);
    assert_eq!(plan.height, 256);
    assert_eq!(plan.lifetimes, [Lifetime::new(0, 1); 2]);
}

#[test]
fn parts_are_written_straight_into_the_whole() {
    let mut dag = Dag::new();
    let parts: Vec<BufferId> = (0..4)
        .map(|i| {
            dag.add_buffer(Buffer {
                live_in: true,
                ..buffer(&format!("part{i}"), 64)
            })
        })
        .collect();
    let whole = dag.add_buffer(Buffer {
        live_out: true,
        ..buffer("whole", 256)
    });
    let reader = dag.add_task(Task::new(
        "reader stands first in the program",
        &[whole],
        &[],
    ));
    for part in parts {
        dag.add_task(Task::new("copy", &[part], &[whole]));
    }
    let plan = planned(&dag);
    assert_eq!(plan.order.last(), Some(&reader));
    assert_eq!(plan.lifetimes[whole.index()], Lifetime::new(0, 5));
    assert_eq!(plan.height, 512);
}

#[test]
fn a_chain_in_place_is_one_rectangle() {
    let mut dag = Dag::new();
    let mut last = dag.add_buffer(Buffer {
        live_in: true,
        ..buffer("b0", 1000)
    });
    for i in 1..=10 {
        let next = dag.add_buffer(Buffer {
            live_out: i == 10,
            ..buffer(&format!("b{i}"), 1000)
        });
        let task = dag.add_task(Task::new(format!("t{i}"), &[last], &[next]));
        dag.may_reuse.push(MayReuse {
            task,
            from: last,
            to: next,
        });
        last = next;
    }
    let plan = planned(&dag);
    assert_eq!(
        (plan.height, plan.lower_bound, plan.reused.len()),
        (1024, 1024, 10)
    );
    assert_eq!(plan.offsets, [0; 11]);
}

/// Two independent pairs of a large temporary and its small result: finishing one pair first needs
/// half the bytes.
#[test]
fn the_order_avoids_two_large_temporaries_at_once() {
    let mut dag = Dag::new();
    let [a, b] = ["a", "b"].map(|name| dag.add_buffer(buffer(name, 1 << 20)));
    let [small_a, small_b] = ["small a", "small b"].map(|name| {
        dag.add_buffer(Buffer {
            live_out: true,
            ..buffer(name, 64)
        })
    });
    dag.add_task(Task::new("make a", &[], &[a]));
    dag.add_task(Task::new("make b", &[], &[b]));
    dag.add_task(Task::new("shrink a", &[a], &[small_a]));
    dag.add_task(Task::new("shrink b", &[b], &[small_b]));
    assert_eq!(planned(&dag).height, (1 << 20) + 128);
}

#[test]
fn text_and_dot_name_everything() {
    let mut dag = chain();
    dag.tasks[1].workspace = 2048;
    dag.tasks[1].after.push(TaskId(0));
    dag.buffers[0].name = "x \"quoted\"".into();
    let expected = "2 tasks, 3 buffers\n    0 f: x \"quoted\" 256 B -> h 128 B\n    \
                    1 g: h 128 B -> y 64 B · workspace 2.0 KiB · after 0 · may reuse h 128 B for y 64 B\n";
    assert_eq!(dag.to_string(), expected);
    let dot = dag.to_dot();
    for line in [
        "label=\"x \\\"quoted\\\"\\nactivation · 256 B\"",
        "b0 -> t0;",
        "t0 -> b1;",
        "t0 -> t1 [style=dashed];",
    ] {
        assert!(dot.contains(line), "{line} in {dot}");
    }
}

/// One task whose operands may all be overwritten, and which reads all of them again when it is
/// rerun. Searching a list for each of them would take minutes in a debug build.
#[test]
fn a_task_may_have_many_pairs() {
    let mut dag = Dag::new();
    let reads: Vec<BufferId> = (0..200_000)
        .map(|_| {
            dag.add_buffer(Buffer {
                live_in: true,
                ..buffer("read", 64)
            })
        })
        .collect();
    let to = dag.add_buffer(Buffer {
        live_out: true,
        ..buffer("written", 64)
    });
    let task = dag.add_task(Task {
        rerun: Some(Rerun {
            reads: reads.clone(),
            workspace: 0,
            cost: 1,
        }),
        ..Task::new("task", &reads, &[to])
    });
    let pair = |&from: &BufferId| MayReuse { task, from, to };
    dag.may_reuse = reads.iter().map(pair).collect();
    assert_eq!(dag.verify(), Ok(()));
}
