//! Plans dags of growing size with the default options, checks the plans and writes reports of them, and prints what each stage took.
//! Nothing here may take much more than ten times as long for ten times as many tasks.
//!
//! ```text
//! cargo bench -p slabwise-planner --bench scale -- [LARGEST]
//! ```

use slabwise_planner::{Buffer, BufferId, Dag, Kind, MayReuse, Options, Task, check, plan, report};
use std::error::Error;
use std::time::Instant;

fn main() -> Result<(), Box<dyn Error>> {
    let largest = std::env::args().skip(1).find_map(|word| word.parse().ok()).unwrap_or(100_000);
    println!("| dag | tasks | plan s | check s | text s | height / bound | order | offsets |\n|---|---|---|---|---|---|---|---|");
    for (name, make) in [("chain", chain as fn(usize) -> Dag), ("recurrent", recurrent), ("random", random)] {
        let mut tasks = 1_000;
        while tasks <= largest {
            row(name, &make(tasks))?;
            tasks *= 10;
        }
    }
    Ok(())
}

fn row(name: &str, dag: &Dag) -> Result<(), Box<dyn Error>> {
    let timed = |begin: Instant| begin.elapsed().as_secs_f64();
    let begin = Instant::now();
    let planned = plan(dag, &Options::default())?;
    let planning = timed(begin);
    let (ratio, schedule, method) = (planned.height as f64 / planned.lower_bound.max(1) as f64, planned.schedule, planned.method);
    let begin = Instant::now();
    let checked = check(dag, planned)?;
    let checking = timed(begin);
    let begin = Instant::now();
    let text = report::text(dag, &checked).to_string();
    let writing = timed(begin);
    assert!(!text.is_empty());
    println!("| {name} | {} | {planning:.3} | {checking:.3} | {writing:.3} | {ratio:.6} | {schedule:?} | {method} |", dag.tasks.len());
    Ok(())
}

fn buffer(dag: &mut Dag, bytes: u64) -> BufferId {
    dag.add_buffer(Buffer::new("value", Kind::Activation, bytes))
}

/// Each task reads what the one before it made, and may run in place.
fn chain(tasks: usize) -> Dag {
    let mut dag = Dag::new();
    let mut last = buffer(&mut dag, 4096);
    dag.buffers[last.index()].live_in = true;
    for at in 0..tasks {
        let next = buffer(&mut dag, 4096);
        let task = dag.add_task(Task::new("step", &[last], &[next]));
        if at > 0 {
            dag.may_reuse.push(MayReuse { task, from: last, to: next });
        }
        last = next;
    }
    dag.buffers[last.index()].live_out = true;
    dag
}

/// A recurrent network and its backward pass: two thirds of the tasks make gradients, from the last step to the first.
fn recurrent(tasks: usize) -> Dag {
    let steps = tasks / 3;
    let mut dag = Dag::new();
    let input = buffer(&mut dag, 64);
    dag.buffers[input.index()].live_in = true;
    let (mut state, mut kept) = (input, Vec::new());
    for at in 0..steps {
        let gates = buffer(&mut dag, 4 * 2048);
        let next = buffer(&mut dag, 2048 + 64 * (at as u64 % 3));
        dag.add_task(Task::new("cell", &[state], &[gates, next]));
        kept.push((state, gates, next));
        state = next;
    }
    let mut gradient = state;
    for (before, gates, after) in kept.into_iter().rev() {
        let of_gates = buffer(&mut dag, 4 * 2048);
        let task = dag.add_task(Task::new("cell.grad", &[gates, after, gradient], &[of_gates]));
        dag.may_reuse.push(MayReuse { task, from: gates, to: of_gates });
        let of_state = buffer(&mut dag, 2048);
        dag.add_task(Task::new("state.grad", &[of_gates, before], &[of_state]));
        gradient = of_state;
    }
    dag.buffers[gradient.index()].live_out = true;
    dag
}

/// Each task reads up to three of the last hundred values.
fn random(tasks: usize) -> Dag {
    let mut state = 7u64;
    let mut random = |below: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    let mut dag = Dag::new();
    let input = buffer(&mut dag, 64);
    dag.buffers[input.index()].live_in = true;
    for at in 0..tasks {
        let made = dag.buffers.len() as u64;
        let reads: Vec<BufferId> = (0..1 + random(3)).map(|_| BufferId((made - 1 - random(made.min(100))) as u32)).collect();
        let write = buffer(&mut dag, 64 * (1 + random(64)));
        let mut task = Task::new("task", &reads, &[write]);
        task.workspace = 64 * random(4);
        dag.add_task(task);
        if at + 1 == tasks {
            dag.buffers[write.index()].live_out = true;
        }
    }
    dag
}
