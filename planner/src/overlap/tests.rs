//! The work of overlapping grows with the tasks, not with their square.

use super::plan_overlapped;
use crate::dag::relations::LOOKS;
use crate::dag::{Buffer, Dag, Kind, Task, TaskId};
use crate::order::OrderPolicy;
use crate::plan::{Options, plan};

/// A chain of kernels, every fourth of which makes a value that is summed meanwhile.
fn training(layers: u32) -> (Dag, Vec<TaskId>) {
    let (mut dag, mut collectives) = (Dag::new(), Vec::new());
    let new = |name: &str| Buffer::new(name, Kind::Gradient, 64);
    let mut last = dag.add_buffer(Buffer {
        live_in: true,
        ..new("x")
    });
    for _ in 0..layers {
        let [next, own, all] = ["dx", "g", "all"].map(|name| dag.add_buffer(new(name)));
        let cost = |cost, task| Task { cost, ..task };
        dag.add_task(cost(1, Task::new("grad", &[last], &[own])));
        collectives.push(dag.add_task(cost(3, Task::new("sum", &[own], &[all]))));
        dag.add_task(cost(1, Task::new("update", &[all], &[])));
        dag.add_task(cost(1, Task::new("back", &[last], &[next])));
        last = next;
    }
    (dag, collectives)
}

#[test]
fn work_is_linear_in_the_tasks() {
    let looks = |layers| {
        let (dag, collectives) = training(layers);
        let options = Options {
            order: OrderPolicy::Program,
            effort: 0,
            ..Options::default()
        };
        let once = plan(&dag, &options).expect("a valid dag");
        let before = LOOKS.get();
        plan_overlapped(&dag, &once, &collectives, u64::MAX, &options).expect("a valid dag");
        LOOKS.get() - before
    };
    let (few, many) = (looks(250), looks(2000));
    assert!(many < 10 * few, "{many} for 8 times the tasks of {few}");
}
