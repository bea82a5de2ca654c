//! The checker must reject invalid plans: one valid plan, broken in every way that it can detect.

use slabwise_planner::{
    Buffer, BufferId, Dag, DagError, Kind, Lifetime, MayReuse, Options, OrderPolicy, Plan, Task,
    TaskId, Violation, check, plan,
};

const X: usize = 0;
const A: usize = 1;
const B: usize = 2;
const Y: usize = 3;
const WHOLE: usize = 4;

/// x → a (by `first`, with a workspace) → b in place of a (by `second`) → two halves of `whole` →
/// y.
fn sample() -> (Dag, Plan) {
    let mut dag = Dag::new();
    let x = dag.add_buffer(Buffer {
        live_in: true,
        ..Buffer::new("x", Kind::Input, 128)
    });
    let [a, b] = ["a", "b"].map(|name| dag.add_buffer(Buffer::new(name, Kind::Activation, 256)));
    let y = dag.add_buffer(Buffer {
        live_out: true,
        ..Buffer::new("y", Kind::Output, 64)
    });
    let whole = dag.add_buffer(Buffer::new("whole", Kind::Activation, 128));
    dag.add_task(Task {
        workspace: 192,
        ..Task::new("first", &[x], &[a])
    });
    let second = dag.add_task(Task::new("second", &[a, x], &[b]));
    dag.add_task(Task::new("left", &[b], &[whole]));
    dag.add_task(Task::new("right", &[b], &[whole]));
    let join = dag.add_task(Task::new("join", &[whole], &[y]));
    let last = dag.add_task(Task::new("last", &[], &[]));
    dag.tasks[last.index()].after.push(join);
    dag.may_reuse = vec![
        MayReuse {
            task: second,
            from: a,
            to: b,
        },
        MayReuse {
            task: TaskId(2),
            from: b,
            to: whole,
        },
        MayReuse {
            task: TaskId(3),
            from: b,
            to: whole,
        },
        MayReuse {
            task: TaskId(0),
            from: x,
            to: a,
        },
    ];
    // The last pair requires more bytes than x has.
    dag.may_reuse.pop();
    let plan = plan(
        &dag,
        &Options {
            order: OrderPolicy::Program,
            ..Options::default()
        },
    )
    .expect("a valid dag");
    assert_eq!(plan.reused, [dag.may_reuse[0]]);
    assert_eq!(plan.order, (0..6).map(TaskId).collect::<Vec<_>>());
    assert!(check(&dag, plan.clone()).is_ok());
    (dag, plan)
}

/// The violation that the checker reports for the sample after a change.
fn broken(change: impl FnOnce(&mut Dag, &mut Plan)) -> Violation {
    let (mut dag, mut plan) = sample();
    change(&mut dag, &mut plan);
    check(&dag, plan).expect_err("a broken plan")
}

#[test]
fn a_broken_dag() {
    let violation = broken(|dag, _| dag.buffers[A].align = 3);
    assert_eq!(
        violation,
        Violation::Dag(DagError::Alignment {
            buffer: "a".into(),
            align: 3
        })
    );
}

#[test]
fn lists_of_the_wrong_length() {
    let length = |what, expected, found| Violation::Length {
        what,
        expected,
        found,
    };
    assert_eq!(
        broken(|_, plan| plan.order.truncate(5)),
        length("steps", 6, 5)
    );
    assert_eq!(
        broken(|_, plan| plan.lifetimes.clear()),
        length("lifetimes", 5, 0)
    );
    assert_eq!(
        broken(|_, plan| plan.offsets.push(0)),
        length("offsets", 5, 6)
    );
    assert_eq!(
        broken(|_, plan| plan.workspace_offsets.truncate(5)),
        length("workspace offsets", 6, 5)
    );
}

#[test]
fn an_order_that_is_no_permutation() {
    let violation = broken(|_, plan| plan.order[5] = TaskId(6));
    assert_eq!(
        violation,
        Violation::UnknownTask {
            step: 5,
            task: 6,
            count: 6
        }
    );
    let violation = broken(|_, plan| plan.order[5] = TaskId(1));
    assert_eq!(
        violation,
        Violation::RunsTwice {
            task: "second".into(),
            first: 1,
            second: 5
        }
    );
}

#[test]
fn a_violated_dependency() {
    let swapped = |a: usize, b: usize| {
        move |_: &mut Dag, plan: &mut Plan| {
            plan.order.swap(a, b);
        }
    };
    let violation =
        |late: &str, late_step, early: &str, early_step, reason: &str| Violation::Dependency {
            late: late.into(),
            late_step,
            early: early.into(),
            early_step,
            reason: reason.into(),
        };
    assert_eq!(
        broken(swapped(0, 1)),
        violation(
            "first",
            1,
            "second",
            0,
            "it writes `a`, which the other reads"
        )
    );
    assert_eq!(
        broken(swapped(2, 3)),
        violation("left", 3, "right", 2, "both write `whole`, in this order")
    );
    assert_eq!(
        broken(swapped(4, 5)),
        violation("join", 5, "last", 4, "it is a control dependency")
    );
    // A reader between the two writers.
    assert_eq!(
        broken(swapped(3, 4)),
        violation(
            "right",
            4,
            "join",
            3,
            "it writes `whole`, which the other reads"
        )
    );
}

#[test]
fn a_wrong_lifetime() {
    let (_, plan) = sample();
    for buffer in [X, A, B, Y, WHOLE] {
        let true_life = plan.lifetimes[buffer];
        for found in [
            Lifetime {
                start: true_life.start + 1,
                ..true_life
            },
            Lifetime {
                end: true_life.end - 1,
                ..true_life
            },
            Lifetime {
                end: true_life.end + 1,
                ..true_life
            },
        ] {
            match broken(|_, plan| plan.lifetimes[buffer] = found) {
                Violation::WrongLifetime {
                    expected,
                    found: reported,
                    ..
                } => assert_eq!((expected, reported), (true_life, found)),
                other => panic!("{other}"),
            }
        }
    }
}

#[test]
fn a_misaligned_offset() {
    let violation = broken(|_, plan| plan.offsets[X] += 32);
    assert!(
        matches!(violation, Violation::Misaligned { ref name, align: 64, .. } if name == "x"),
        "{violation}"
    );
    let violation = broken(|_, plan| plan.workspace_offsets[0] += 8);
    assert!(
        matches!(violation, Violation::Misaligned { ref name, align: 64, .. } if name == "first"),
        "{violation}"
    );
}

#[test]
fn something_outside_the_slab() {
    for offset in [1 << 20, u64::MAX - 63] {
        let violation = broken(|_, plan| plan.offsets[Y] = offset);
        assert!(
            matches!(violation, Violation::OutOfSlab { ref name, bytes: 64, .. } if name == "y"),
            "{violation}"
        );
        let violation = broken(|_, plan| plan.workspace_offsets[0] = offset);
        assert!(
            matches!(violation, Violation::OutOfSlab { ref name, bytes: 192, .. } if name == "first"),
            "{violation}"
        );
    }
    let violation = broken(|_, plan| plan.height -= 64);
    assert!(
        matches!(violation, Violation::OutOfSlab { .. }),
        "{violation}"
    );
}

#[test]
fn two_buffers_on_the_same_bytes() {
    // x and a are alive at steps 0 and 1; sharing only their last byte counts as much as sharing
    // all.
    let violation = broken(|_, plan| plan.offsets[X] = plan.offsets[A] + 192);
    match violation {
        Violation::Overlap {
            first,
            second,
            step: 0,
            ..
        } => assert!([("x", "a"), ("a", "x")].contains(&(&first, &second))),
        other => panic!("{other}"),
    }
}

#[test]
fn a_workspace_on_a_living_buffer() {
    let violation = broken(|_, plan| plan.workspace_offsets[0] = plan.offsets[A]);
    assert!(
        matches!(violation, Violation::WorkspaceOverlap { ref task, ref buffer, step: 0, .. } if task == "first" && buffer == "a"),
        "{violation}"
    );
}

#[test]
fn an_undeclared_pair_on_the_same_bytes() {
    let violation = broken(|_, plan| plan.reused.clear());
    assert!(
        matches!(violation, Violation::Overlap { step: 1, .. }),
        "{violation}"
    );
}

#[test]
fn a_pair_that_is_not_declared() {
    let violation = broken(|dag, _| dag.may_reuse.retain(|pair| pair.task != TaskId(1)));
    assert_eq!(
        violation,
        Violation::ReuseUndeclared {
            index: 0,
            task: 1,
            from: A as u32,
            to: B as u32
        }
    );
    let violation = broken(|_, plan| plan.reused[0].to = BufferId(77));
    assert_eq!(
        violation,
        Violation::ReuseUndeclared {
            index: 0,
            task: 1,
            from: A as u32,
            to: 77
        }
    );
}

#[test]
fn a_pair_whose_first_buffer_is_still_live() {
    // `left` reads b, but `right` still needs it.
    let violation = broken(|dag, plan| plan.reused.push(dag.may_reuse[1]));
    assert!(
        matches!(
            violation,
            Violation::ReuseOfLive {
                step: 2,
                end: 4,
                ..
            }
        ),
        "{violation}"
    );
    // At `right` b dies, but half of `whole` is already written.
    let violation = broken(|dag, plan| plan.reused.push(dag.may_reuse[2]));
    assert!(
        matches!(
            violation,
            Violation::ReuseByLive {
                step: 3,
                start: 2,
                ..
            }
        ),
        "{violation}"
    );
}

#[test]
fn a_pair_at_two_places() {
    let violation = broken(|_, plan| {
        plan.offsets[B] += 1024;
        plan.height += 1024;
    });
    assert!(
        matches!(violation, Violation::ReuseMoved { .. }),
        "{violation}"
    );
}

#[test]
fn a_pair_whose_recipient_is_larger_in_units() {
    // 256 bytes in both cases, but in units of 512.
    let violation = broken(|dag, plan| {
        dag.buffers[B].align = 512;
        plan.height += 1024;
    });
    assert!(
        matches!(
            violation,
            Violation::ReuseTooSmall {
                from_bytes: 256,
                to_bytes: 512,
                ..
            }
        ),
        "{violation}"
    );
}

/// x, 256 bytes → its first `part` bytes, computed in place of x: a valid plan if `part` does not
/// exceed 256.
fn prefix(part: u64) -> (Dag, Option<Plan>) {
    let mut dag = Dag::new();
    let x = dag.add_buffer(Buffer {
        live_in: true,
        ..Buffer::new("x", Kind::Input, 256)
    });
    let y = dag.add_buffer(Buffer {
        live_out: true,
        ..Buffer::new("y", Kind::Output, part)
    });
    let task = dag.add_task(Task::new("part", &[x], &[y]));
    dag.may_reuse.push(MayReuse {
        task,
        from: x,
        to: y,
    });
    let plan = plan(&dag, &Options::default()).ok();
    (dag, plan)
}

#[test]
fn a_part_that_ends_beyond_its_donor() {
    let (dag, planned) = prefix(64);
    let planned = planned.expect("a valid dag");
    assert_eq!(
        (planned.reused.len(), planned.height),
        (1, 256),
        "the first part of a buffer is computed in its place"
    );
    assert!(check(&dag, planned.clone()).is_ok());
    // The same plan, with a written buffer that ends beyond the buffer it takes over.
    for bytes in [257, 320, 1 << 20] {
        let mut longer = dag.clone();
        longer.buffers[1].bytes = bytes;
        let too_small = DagError::ReuseTooSmall {
            task: "part".into(),
            from: "x".into(),
            from_bytes: 256,
            to: "y".into(),
            to_bytes: bytes,
        };
        let grown = Plan {
            height: 1 << 21,
            ..planned.clone()
        };
        assert_eq!(check(&longer, grown), Err(Violation::Dag(too_small)));
        assert!(prefix(bytes).1.is_none(), "no plan is made of that");
    }
    // A part that begins after the buffer it takes over is not part of it: the bytes of both are in
    // use at that step.
    let later = Plan {
        offsets: vec![planned.offsets[0], planned.offsets[0] + 64],
        ..planned.clone()
    };
    assert!(matches!(
        check(&dag, later),
        Err(Violation::ReuseMoved { .. })
    ));
    // Undeclared, the part's bytes belong to another buffer.
    let undeclared = Plan {
        reused: vec![],
        ..planned
    };
    assert!(matches!(
        check(&dag, undeclared),
        Err(Violation::Overlap { .. })
    ));
}

#[test]
fn a_buffer_that_donates_or_receives_twice() {
    let violation = broken(|dag, plan| plan.reused.push(dag.may_reuse[0]));
    assert_eq!(
        violation,
        Violation::ReusedTwice {
            buffer: "a".into(),
            first: "second".into(),
            second: "second".into()
        }
    );
}

#[test]
fn wrong_numbers() {
    let (_, plan) = sample();
    let (height, bound, apart) = (plan.height, plan.lower_bound, plan.without_reuse);
    assert_eq!(
        broken(|_, plan| plan.height += 64),
        Violation::Height {
            expected: height,
            found: height + 64
        }
    );
    for found in [bound - 64, bound + 64, 1 << 40] {
        assert_eq!(
            broken(|_, plan| plan.lower_bound = found),
            Violation::LowerBound {
                expected: bound,
                found
            }
        );
    }
    assert_eq!(
        broken(|_, plan| plan.without_reuse -= 1),
        Violation::WithoutReuse {
            expected: apart,
            found: apart - 1
        }
    );
}
