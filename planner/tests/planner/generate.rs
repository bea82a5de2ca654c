//! Dags for tests: random ones that exercise every rule, and training steps like those of a
//! runtime.

use arbtest::arbitrary::{Result, Unstructured};
use slabwise_planner::{Buffer, BufferId, Dag, Kind, MayReuse, Task, TaskId};

/// A random dag that passes `verify`: up to about twenty tasks, several writers, in-place pairs,
/// extra order, zero sizes, mixed alignments, sometimes with the tasks shuffled out of their
/// natural order.
pub fn random_dag(u: &mut Unstructured) -> Result<Dag> {
    let mut dag = Dag::new();
    let mixed_alignments = u.ratio(1, 3)?;
    for i in 0..u.int_in_range(0..=3)? {
        let mut buffer = random_buffer(u, format!("in{i}"), mixed_alignments)?;
        (buffer.live_in, buffer.live_out) = (true, u.ratio(1, 4)?);
        dag.add_buffer(buffer);
    }
    // Buffers without a reader so far, of which a later task may still write a part.
    let mut open: Vec<BufferId> = Vec::new();
    for t in 0..u.int_in_range(0..=20)? {
        let mut reads: Vec<BufferId> = Vec::new();
        for _ in 0..u.int_in_range(0..=3)? {
            if !dag.buffers.is_empty() {
                reads.push(BufferId(u.int_in_range(0..=dag.buffers.len() as u32 - 1)?));
            }
        }
        let mut writes = Vec::new();
        if u.ratio(1, 4)? && !open.is_empty() {
            let part = *u.choose(&open)?;
            if !reads.contains(&part) {
                writes.push(part);
            }
        }
        open.retain(|buffer| !reads.contains(buffer));
        for w in 0..u.int_in_range(0..=2)? {
            let mut buffer = random_buffer(u, format!("b{t}.{w}"), mixed_alignments)?;
            buffer.live_out = u.ratio(1, 6)?;
            let id = dag.add_buffer(buffer);
            writes.push(id);
            open.push(id);
        }
        let mut task = Task::new(format!("t{t}"), &reads, &writes);
        task.workspace = if u.ratio(1, 3)? {
            u.int_in_range(0..=900)?
        } else {
            0
        };
        if t > 0 && u.ratio(1, 5)? {
            task.after.push(TaskId(u.int_in_range(0..=t - 1)?));
        }
        let id = dag.add_task(task);
        for &from in &reads {
            for &to in &writes {
                let pair = MayReuse { task: id, from, to };
                let allowed = !dag.buffers[from.index()].live_out
                    && dag.buffers[to.index()].bytes <= dag.buffers[from.index()].bytes;
                if allowed && u.ratio(3, 4)? {
                    dag.may_reuse.push(pair);
                }
            }
        }
    }
    if u.ratio(1, 3)? {
        let shuffled = shuffled(u, &dag)?;
        if shuffled.verify().is_ok() {
            return Ok(shuffled);
        }
    }
    Ok(dag)
}

fn random_buffer(u: &mut Unstructured, name: String, mixed_alignments: bool) -> Result<Buffer> {
    // Few different sizes, so that equal sizes meet.
    let bytes = *u.choose(&[0, 1, 64, 100, 128, 128, 512, 512, 700, 1024, 4096])?;
    let mut buffer = Buffer::new(name, *u.choose(&Kind::ALL)?, bytes);
    if mixed_alignments {
        buffer.align = 1 << u.int_in_range(0..=9)?;
    }
    Ok(buffer)
}

/// The same dag with its tasks in another program order. Buffers with several writers may turn it
/// invalid.
fn shuffled(u: &mut Unstructured, dag: &Dag) -> Result<Dag> {
    let mut place: Vec<u32> = (0..dag.tasks.len() as u32).collect();
    for i in (1..place.len()).rev() {
        place.swap(i, u.int_in_range(0..=i)?);
    }
    let mut shuffled = dag.clone();
    for (task, &to) in dag.tasks.iter().zip(&place) {
        shuffled.tasks[to as usize] = task.clone();
    }
    shuffled
        .tasks
        .iter_mut()
        .flat_map(|task| &mut task.after)
        .for_each(|before| *before = TaskId(place[before.index()]));
    shuffled
        .may_reuse
        .iter_mut()
        .for_each(|pair| pair.task = TaskId(place[pair.task.index()]));
    Ok(shuffled)
}

/// Builds training steps: operations append tasks and record the operands of the backward pass,
/// which `finish` appends.
pub struct Step {
    pub dag: Dag,
    batch: u64,
    layers: Vec<Layer>,
}

struct Layer {
    name: String,
    input: BufferId,
    output: BufferId,
    weight_bytes: u64,
    workspace: u64,
    has_activation: bool,
}

const FLOAT: u64 = 4;

impl Step {
    /// Begins a step with a batch of inputs of `width` numbers.
    pub fn new(batch: u64, width: u64) -> (Step, BufferId) {
        let mut dag = Dag::new();
        let images = dag.add_buffer(Buffer {
            live_in: true,
            ..Buffer::new("images", Kind::Input, batch * width * FLOAT)
        });
        (
            Step {
                dag,
                batch,
                layers: Vec::new(),
            },
            images,
        )
    }

    fn value(&mut self, name: String, kind: Kind, bytes: u64) -> BufferId {
        let source = format!("model.rs:{}", 10 + self.layers.len());
        self.dag.add_buffer(Buffer {
            source,
            ..Buffer::new(name, kind, bytes)
        })
    }

    /// A matmul or convolution to `width` numbers, its activation in place.
    pub fn layer(
        &mut self,
        name: &str,
        input: BufferId,
        width: u64,
        weights: u64,
        workspace: u64,
        has_activation: bool,
    ) -> BufferId {
        let bytes = self.batch * width * FLOAT;
        let linear = self.value(format!("{name}.linear"), Kind::Activation, bytes);
        self.dag.add_task(Task {
            workspace,
            ..Task::new(format!("{name}.forward"), &[input], &[linear])
        });
        let output = if has_activation {
            self.in_place(format!("{name}.relu"), Kind::Activation, linear, &[])
        } else {
            linear
        };
        let (name, weight_bytes) = (name.to_owned(), weights * FLOAT);
        self.layers.push(Layer {
            name,
            input,
            output,
            weight_bytes,
            workspace,
            has_activation,
        });
        output
    }

    /// An elementwise task over `from` and `others` that may lie on `from`.
    fn in_place(
        &mut self,
        name: String,
        kind: Kind,
        from: BufferId,
        others: &[BufferId],
    ) -> BufferId {
        let to = self.value(name.clone(), kind, self.dag.buffers[from.index()].bytes);
        let task = self
            .dag
            .add_task(Task::new(name, &[&[from], others].concat(), &[to]));
        self.dag.may_reuse.push(MayReuse { task, from, to });
        to
    }

    /// Appends the loss, the backward pass, and (after all gradients, as a naive program would) one
    /// update per layer.
    pub fn finish(mut self, logits: BufferId) -> Dag {
        let loss = self.dag.add_buffer(Buffer {
            live_out: true,
            ..Buffer::new("loss", Kind::Output, FLOAT)
        });
        let mut gradient = self.in_place("loss.grad".into(), Kind::Gradient, logits, &[]);
        self.dag.add_task(Task::new("loss", &[logits], &[loss]));
        let mut weight_gradients = Vec::new();
        for layer in std::mem::take(&mut self.layers).into_iter().rev() {
            let name = &layer.name;
            if layer.has_activation {
                gradient = self.in_place(
                    format!("{name}.relu.grad"),
                    Kind::Gradient,
                    gradient,
                    &[layer.output],
                );
            }
            let weights = self.value(
                format!("{name}.weight.grad"),
                Kind::Gradient,
                layer.weight_bytes,
            );
            let backward = Task::new(
                format!("{name}.weight.grad"),
                &[layer.input, gradient],
                &[weights],
            );
            self.dag.add_task(Task {
                workspace: layer.workspace,
                ..backward
            });
            weight_gradients.push((name.clone(), weights));
            if !self.dag.buffers[layer.input.index()].live_in {
                let bytes = self.dag.buffers[layer.input.index()].bytes;
                let input_gradient =
                    self.value(format!("{name}.input.grad"), Kind::Gradient, bytes);
                let backward =
                    Task::new(format!("{name}.input.grad"), &[gradient], &[input_gradient]);
                self.dag.add_task(Task {
                    workspace: layer.workspace,
                    ..backward
                });
                gradient = input_gradient;
            }
        }
        for (name, weights) in weight_gradients {
            self.dag
                .add_task(Task::new(format!("{name}.update"), &[weights], &[]));
        }
        self.dag
    }
}

/// A training step of a multilayer perceptron of these widths.
pub fn mlp(batch: u64, widths: &[u64]) -> Dag {
    let (mut step, mut at) = Step::new(batch, widths[0]);
    for (i, pair) in widths.windows(2).enumerate() {
        let is_last = i + 2 == widths.len();
        at = step.layer(
            &format!("fc{i}"),
            at,
            pair[1],
            pair[0] * pair[1],
            64 * 1024,
            !is_last,
        );
    }
    step.finish(at)
}

/// A training step of a small convolutional network: two convolutions with pooling, two dense
/// layers.
pub fn cnn(batch: u64) -> Dag {
    let (mut step, images) = Step::new(batch, 784);
    let mut at = images;
    at = step.layer("conv1", at, 32 * 784, 32 * 25, 256 * 1024, true);
    at = step.layer("pool1", at, 32 * 196, 0, 0, false);
    at = step.layer("conv2", at, 64 * 196, 64 * 32 * 25, 512 * 1024, true);
    at = step.layer("pool2", at, 3136, 0, 0, false);
    at = step.layer("fc1", at, 512, 3136 * 512, 64 * 1024, true);
    at = step.layer("fc2", at, 10, 512 * 10, 64 * 1024, false);
    step.finish(at)
}
