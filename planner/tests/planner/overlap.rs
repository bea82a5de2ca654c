//! Collectives in flight: any dag keeps its work and its slab, kernels run beside them, and the
//! checker finds schedules and places that disturb one.

use crate::generate::random_dag;
use crate::remat::cases;
use slabwise_planner::{
    Buffer, BufferId, Dag, Kind, MayReuse, Options, OrderPolicy, OverlapViolation, Overlapped,
    Plan, Task, TaskId, Work, check, check_overlap, plan, plan_overlapped,
};

#[test]
fn random_dags_keep_their_work_and_their_slab() {
    let mut overlapped = 0;
    cases(300, |u| {
        let mut dag = random_dag(u)?;
        let mut collectives = Vec::new();
        for t in 0..dag.tasks.len() {
            dag.tasks[t].cost = u.int_in_range(0..=9)?;
            if u.ratio(1, 3)? {
                dag.tasks[t].workspace = 0;
                collectives.push(TaskId(t as u32));
            }
        }
        dag.may_reuse.retain(|p| !collectives.contains(&p.task));
        let options = Options {
            effort: 0,
            ..Options::default()
        };
        let once = plan(&dag, &options).expect("a valid dag");
        let room = once.height + u.int_in_range(0..=2)? * 512;
        let overlap = || plan_overlapped(&dag, &once, &collectives, room, &options);
        let (new, planned) = overlap().expect("a valid dag");
        assert!(planned.height <= room, "{dag}");
        assert_eq!(
            overlap(),
            Ok((new.clone(), planned.clone())),
            "the same again"
        );
        let new = check_overlap(&dag, &collectives, new, &planned).expect("the same work");
        let planned = check(&new.dag, planned).expect("a valid plan");
        let halves = new.halves();
        let apart = |halves: &&[TaskId; 2]| {
            let step = |task| {
                planned
                    .order
                    .iter()
                    .position(|t| *t == task)
                    .expect("it runs")
            };
            step(halves[1]) > step(halves[0]) + 1
        };
        overlapped += halves.iter().filter(apart).count();
        Ok(())
    });
    assert!(overlapped > 100, "{overlapped} collectives have company");
}

const LAYERS: u32 = 4;

/// The way back through some layers: the gradient of each is sent, received, and used up by its
/// update, which writes a variable that the dag does not know. Activations end on the way.
fn training() -> (Dag, Vec<TaskId>) {
    let mut dag = Dag::new();
    let saved: Vec<BufferId> = (0..LAYERS)
        .map(|l| {
            dag.add_buffer(Buffer {
                live_in: true,
                ..Buffer::new(format!("x{l}"), Kind::Activation, 4096)
            })
        })
        .collect();
    let mut collectives = Vec::new();
    let mut back = dag.add_buffer(Buffer {
        live_in: true,
        ..Buffer::new("dy", Kind::Gradient, 1024)
    });
    for l in (0..LAYERS).rev() {
        let new = |name: &str, bytes| Buffer::new(format!("{name}{l}"), Kind::Gradient, bytes);
        let own = dag.add_buffer(new("g", 2048));
        let all = dag.add_buffer(new("all", 2048));
        let next = dag.add_buffer(new("dx", 1024));
        let cost = |cost, task| Task { cost, ..task };
        let gradient = Task::new(format!("grad{l}"), &[saved[l as usize], back], &[own]);
        dag.add_task(cost(10, gradient));
        let sum = Task::new(format!("sum{l}"), &[own], &[all]);
        collectives.push(dag.add_task(cost(5, sum)));
        dag.add_task(cost(1, Task::new(format!("update{l}"), &[all], &[])));
        let input = Task::new(format!("back{l}"), &[saved[l as usize], back], &[next]);
        dag.add_task(cost(10, input));
        back = next;
    }
    dag.buffers[back.index()].live_out = true;
    (dag, collectives)
}

fn planned(dag: &Dag) -> Plan {
    let options = Options {
        order: OrderPolicy::Program,
        ..Options::default()
    };
    plan(dag, &options).expect("a valid dag")
}

#[test]
fn the_backward_pass_continues_while_gradients_are_summed() {
    let (dag, collectives) = training();
    let once = planned(&dag);
    // The first layer's gradient is summed when most activations are alive.
    let room = once.height + 1024;
    let (new, after) =
        plan_overlapped(&dag, &once, &collectives, room, &Options::default()).expect("a valid dag");
    let new = check_overlap(&dag, &collectives, new, &after).expect("the same work");
    check(&new.dag, after.clone()).expect("a valid plan");
    assert_eq!(after.height, room);
    // Without the modelled time of kernels between its halves, a collective would be waited for.
    let step = |task: TaskId| {
        after
            .order
            .iter()
            .position(|t| *t == task)
            .expect("it runs")
    };
    for [start, finish] in &new.halves()[..LAYERS as usize - 1] {
        let between = &after.order[step(*start) + 1..step(*finish)];
        let time: u64 = between.iter().map(|t| new.dag.tasks[t.index()].cost).sum();
        assert!(time >= 5, "{}: {time}", new.dag.task_name(*start));
    }
    let most = new.bytes_in_flight(&after).into_iter().max();
    assert!(most >= Some(4096), "{most:?}");
}

/// Two gradients that are summed while a third is computed, and a pair that runs in place.
fn sample() -> (Dag, Vec<TaskId>, Overlapped, Plan) {
    let mut dag = Dag::new();
    let x = dag.add_buffer(Buffer {
        live_in: true,
        live_out: true,
        ..Buffer::new("x", Kind::Input, 256)
    });
    let new = |dag: &mut Dag, name: &str| dag.add_buffer(Buffer::new(name, Kind::Gradient, 256));
    let [a, b, c, d] = ["a", "b", "c", "d"].map(|name| new(&mut dag, name));
    let [sum_a, sum_b] = ["sum a", "sum b"].map(|name| new(&mut dag, name));
    dag.buffers[sum_a.index()].live_out = true;
    dag.buffers[sum_b.index()].live_out = true;
    dag.add_task(Task::new("make a", &[x], &[a]));
    let first = dag.add_task(Task {
        cost: 8,
        ..Task::new("send a", &[a], &[sum_a])
    });
    dag.add_task(Task::new("make b", &[x], &[b]));
    let second = dag.add_task(Task {
        cost: 8,
        ..Task::new("send b", &[b], &[sum_b])
    });
    let third = dag.add_task(Task {
        workspace: 64,
        cost: 1,
        ..Task::new("make c", &[x], &[c])
    });
    let fourth = dag.add_task(Task {
        cost: 1,
        ..Task::new("make d", &[c], &[d])
    });
    let last = dag.add_task(Task::new("last", &[d, sum_a], &[]));
    dag.tasks[last.index()].after = vec![second, third];
    dag.may_reuse.push(MayReuse {
        task: fourth,
        from: c,
        to: d,
    });
    let collectives = vec![first, second];
    let once = planned(&dag);
    let room = once.height * 2;
    let (new, plan) =
        plan_overlapped(&dag, &once, &collectives, room, &Options::default()).expect("a valid dag");
    let order: Vec<&str> = plan.order.iter().map(|t| new.dag.task_name(*t)).collect();
    assert_eq!(
        order,
        [
            "make a",
            "send a",
            "make b",
            "send b",
            "make c",
            "make d",
            "finish send a",
            "finish send b",
            "last"
        ]
    );
    (dag, collectives, new, plan)
}

/// The violation that the checker reports for the sample after a change.
fn broken(change: impl FnOnce(&mut Overlapped, &mut Plan)) -> OverlapViolation {
    let (dag, collectives, mut new, mut plan) = sample();
    change(&mut new, &mut plan);
    check_overlap(&dag, &collectives, new, &plan).expect_err("a broken schedule")
}

const A: usize = 1;
const C: usize = 3;
const D: usize = 4;
const SUM_A: usize = 5;

#[test]
fn broken_schedules_are_refused() {
    use OverlapViolation as V;
    let (dag, collectives, new, plan) = sample();
    assert!(check_overlap(&dag, &collectives, new.clone(), &plan).is_ok());
    assert!(matches!(
        broken(|o, _| o.work.truncate(8)),
        V::Length { .. }
    ));
    assert!(matches!(
        broken(|o, _| o.dag.buffers[A].bytes += 1),
        V::Length { what: "buffers" }
    ));
    assert!(matches!(
        broken(|o, _| o.collectives[0] = TaskId(0)),
        V::Length {
            what: "collectives"
        }
    ));
    // A collective that ends twice, or the end of another; a task that runs twice.
    assert!(matches!(
        broken(|o, _| o.work[6] = Work::Finish(1)),
        V::Differs { .. }
    ));
    assert!(matches!(
        broken(|o, _| o.work[1] = Work::Run(TaskId(1))),
        V::Runs { .. }
    ));
    let ends_first = |o: &mut Overlapped, _: &mut Plan| {
        o.work.swap(1, 6);
        (o.dag.tasks[1].cost, o.dag.tasks[6].cost) = (0, 8);
    };
    assert!(matches!(broken(ends_first), V::Runs { .. }));
    assert!(matches!(
        broken(|o, _| o.dag.tasks[1].reads.clear()),
        V::Differs { .. }
    ));
    assert!(matches!(
        broken(|o, _| o.dag.tasks[1].workspace = 64),
        V::Differs { .. }
    ));
    assert!(matches!(
        broken(|o, _| o.dag.tasks[4].cost += 1),
        V::Differs { .. }
    ));
    // Another time of a collective, and a workspace that has no place.
    assert!(matches!(
        broken(|o, _| o.dag.tasks[1].cost = 0),
        V::Differs { .. }
    ));
    assert!(matches!(
        broken(|o, _| o.dag.tasks[6].cost = 8),
        V::Differs { .. }
    ));
    let mut scratch = dag.clone();
    scratch.tasks[collectives[0].index()].workspace = 64;
    assert!(matches!(
        check_overlap(&scratch, &collectives, new.clone(), &plan),
        Err(V::Differs { .. })
    ));
    // An end that does not wait for its start; a task that waits for a start instead of the end.
    let start = TaskId(1);
    assert!(matches!(
        broken(|o, _| o.dag.tasks[6].after.retain(|t| *t != start)),
        V::Order { .. }
    ));
    assert!(matches!(
        broken(|o, _| o.dag.tasks[8].after[0] = TaskId(3)),
        V::Order { .. }
    ));
    // Any pair that the original does not have.
    assert!(matches!(
        broken(|o, _| o.dag.may_reuse[0].to = BufferId(SUM_A as u32)),
        V::InPlace { .. } | V::Dag(_)
    ));
}

#[test]
fn disturbed_collectives_are_found_by_their_bytes() {
    use OverlapViolation as V;
    let touched = |violation, wanted: &str| match violation {
        V::Touched { how, buffer, .. } => assert_eq!(format!("{how} {buffer}"), wanted),
        other => panic!("{other}"),
    };
    // "make c" writes where "send a" reads, or receives; so does its workspace, or "make d".
    touched(broken(|_, p| p.offsets[C] = p.offsets[A]), "writes a");
    touched(
        broken(|_, p| p.offsets[C] = p.offsets[SUM_A]),
        "writes sum a",
    );
    touched(
        broken(|_, p| p.workspace_offsets[4] = p.offsets[A] + 192),
        "writes a",
    );
    touched(
        broken(|_, p| p.workspace_offsets[4] = p.offsets[SUM_A]),
        "writes sum a",
    );
    touched(broken(|_, p| p.offsets[D] = p.offsets[A]), "writes a");
    // "make b" reads x, which lies where "send a" receives.
    touched(
        broken(|_, p| p.offsets[0] = p.offsets[SUM_A]),
        "reads sum a",
    );
    // "send a" receives where it reads.
    touched(broken(|_, p| p.offsets[SUM_A] = p.offsets[A]), "writes a");
    // It receives two values in one place.
    let (mut dag, collectives, mut new, mut plan) = sample();
    let second = new
        .dag
        .add_buffer(Buffer::new("second", Kind::Gradient, 64));
    dag.buffers = new.dag.buffers.clone();
    dag.tasks[1].writes.push(second);
    for half in [1, 6] {
        new.dag.tasks[half].writes.push(second);
    }
    plan.lifetimes.push(plan.lifetimes[SUM_A]);
    plan.offsets.push(plan.offsets[SUM_A] + 192);
    touched(
        check_overlap(&dag, &collectives, new.clone(), &plan).expect_err("received twice"),
        "writes sum a",
    );
    plan.offsets.pop();
    plan.offsets.push(1 << 20);
    assert!(check_overlap(&dag, &collectives, new, &plan).is_ok());
    // Workspaces without bytes have no place.
    let (dag, collectives, new, mut plan) = sample();
    plan.workspace_offsets[2] = plan.offsets[A] + 64;
    assert!(check_overlap(&dag, &collectives, new, &plan).is_ok());
    // The source is freed at the start, or the destination taken only at the end.
    assert!(matches!(
        broken(|_, p| p.lifetimes[A].end = 2),
        V::Dead { .. }
    ));
    assert!(matches!(
        broken(|_, p| p.lifetimes[SUM_A].start = 6),
        V::Dead { .. }
    ));
    // Other turns than those of the other ranks: of the ends, and of both.
    assert!(matches!(broken(|_, p| p.order.swap(6, 7)), V::Turns { .. }));
    assert!(matches!(broken(|_, p| p.order.swap(1, 3)), V::Turns { .. }));
    assert!(matches!(
        broken(|_, p| p.order.truncate(8)),
        V::Length { .. }
    ));
    assert!(matches!(
        broken(|_, p| p.order[4] = TaskId(99)),
        V::Length { .. }
    ));
    assert!(matches!(
        broken(|_, p| p.order[4] = p.order[5]),
        V::Length { .. }
    ));
}

#[test]
fn a_second_writer_does_not_come_between_the_halves() {
    let mut dag = Dag::new();
    let x = dag.add_buffer(Buffer {
        live_in: true,
        ..Buffer::new("x", Kind::Input, 256)
    });
    let whole = dag.add_buffer(Buffer {
        live_out: true,
        ..Buffer::new("whole", Kind::Output, 512)
    });
    let first = dag.add_task(Task {
        cost: 9,
        ..Task::new("receive a part", &[x], &[whole])
    });
    dag.add_task(Task::new("compute a part", &[x], &[whole]));
    let once = planned(&dag);
    let (mut new, plan) =
        plan_overlapped(&dag, &once, &[first], u64::MAX, &Options::default()).expect("a valid dag");
    assert!(check_overlap(&dag, &[first], new.clone(), &plan).is_ok());
    new.dag.tasks.swap(1, 2);
    new.work.swap(1, 2);
    let error = check_overlap(&dag, &[first], new, &plan).expect_err("a writer between");
    assert!(
        matches!(
            error,
            OverlapViolation::Writers { .. } | OverlapViolation::Dag(_)
        ),
        "{error}"
    );
}

#[test]
fn collectives_in_place_are_planned_apart() {
    let (mut dag, collectives, ..) = sample();
    let [from, to] = [A, SUM_A].map(|b| BufferId(b as u32));
    let pair = MayReuse {
        task: collectives[0],
        from,
        to,
    };
    dag.may_reuse.push(pair);
    let once = planned(&dag);
    assert!(once.reused.contains(&pair));
    for overlap in [false, true] {
        let options = Options {
            overlap,
            ..Options::default()
        };
        let (new, plan) =
            plan_overlapped(&dag, &once, &collectives, 0, &options).expect("a valid dag");
        let new = check_overlap(&dag, &collectives, new, &plan).expect("the same work");
        check(&new.dag, plan).expect("a valid plan");
    }
}

/// Searching a list for each of them would take a minute in a debug build.
#[test]
fn a_task_may_wait_for_many_and_a_collective_may_move_many_buffers() {
    const MANY: usize = 200_000;
    let mut dag = Dag::new();
    let parts: Vec<BufferId> = (0..MANY)
        .map(|_| dag.add_buffer(Buffer::new("part", Kind::Gradient, 64)))
        .collect();
    dag.add_task(Task::new("make all", &[], &parts));
    let send = dag.add_task(Task::new("send all", &parts, &[]));
    let after = (0..MANY).map(|_| dag.add_task(Task::new("other", &[], &[])));
    let after: Vec<TaskId> = after.collect();
    dag.add_task(Task {
        after,
        ..Task::new("last", &[], &[])
    });
    let once = planned(&dag);
    let options = Options {
        overlap: false,
        effort: 0,
        ..Options::default()
    };
    let (new, plan) =
        plan_overlapped(&dag, &once, &[send], u64::MAX, &options).expect("a valid dag");
    let bytes = new.bytes_in_flight(&plan);
    assert_eq!(bytes.iter().max(), Some(&(64 * MANY as u64)));
    check_overlap(&dag, &[send], new, &plan).expect("the same work");
}
