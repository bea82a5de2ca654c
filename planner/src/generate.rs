//! Synthetic inputs for tests, fuzzing and benches: dags of any number of tasks, and the packer's
//! problems of known optimum.

use crate::dag::{Buffer, BufferId, Dag, Kind, MayReuse, Task};

pub use slabwise_packer::generate::{Cuts, Known, tiling, with_holes};

fn value(dag: &mut Dag, bytes: u64) -> BufferId {
    dag.add_buffer(Buffer::new("value", Kind::Activation, bytes))
}

/// A chain: each task reads the output of the one before it, and may run in place.
pub fn chain(tasks: usize) -> Dag {
    let mut dag = Dag::new();
    let mut last = value(&mut dag, 4096);
    dag.buffers[last.index()].live_in = true;
    for at in 0..tasks {
        let next = value(&mut dag, 4096);
        let task = dag.add_task(Task::new("step", &[last], &[next]));
        if at > 0 {
            dag.may_reuse.push(MayReuse {
                task,
                from: last,
                to: next,
            });
        }
        last = next;
    }
    dag.buffers[last.index()].live_out = true;
    dag
}

/// A recurrent network and its backward pass: two thirds of the tasks make gradients, from the last
/// step to the first.
pub fn recurrent(tasks: usize) -> Dag {
    let steps = tasks / 3;
    let mut dag = Dag::new();
    let input = value(&mut dag, 64);
    dag.buffers[input.index()].live_in = true;
    let (mut state, mut kept) = (input, Vec::new());
    for at in 0..steps {
        let gates = value(&mut dag, 4 * 2048);
        let next = value(&mut dag, 2048 + 64 * (at as u64 % 3));
        dag.add_task(Task::new("cell", &[state], &[gates, next]));
        kept.push((state, gates, next));
        state = next;
    }
    let mut gradient = state;
    for (before, gates, after) in kept.into_iter().rev() {
        let of_gates = value(&mut dag, 4 * 2048);
        let task = dag.add_task(Task::new(
            "cell.grad",
            &[gates, after, gradient],
            &[of_gates],
        ));
        dag.may_reuse.push(MayReuse {
            task,
            from: gates,
            to: of_gates,
        });
        let of_state = value(&mut dag, 2048);
        dag.add_task(Task::new("state.grad", &[of_gates, before], &[of_state]));
        gradient = of_state;
    }
    dag.buffers[gradient.index()].live_out = true;
    dag
}

/// Each task reads up to three of the last hundred values.
pub fn random_tasks(tasks: usize) -> Dag {
    let mut state = 7u64;
    let mut random = |below: u64| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    let mut dag = Dag::new();
    let input = value(&mut dag, 64);
    dag.buffers[input.index()].live_in = true;
    for at in 0..tasks {
        let made = dag.buffers.len() as u64;
        let reads: Vec<BufferId> = (0..1 + random(3))
            .map(|_| BufferId((made - 1 - random(made.min(100))) as u32))
            .collect();
        let write = value(&mut dag, 64 * (1 + random(64)));
        let mut task = Task::new("task", &reads, &[write]);
        task.workspace = 64 * random(4);
        dag.add_task(task);
        if at + 1 == tasks {
            dag.buffers[write.index()].live_out = true;
        }
    }
    dag
}
