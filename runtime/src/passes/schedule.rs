//! Scheduling: the tasks and buffers of a program as a [`Dag`] for the planner.

use std::sync::Arc;

use rustc_hash::{FxHashMap, FxHashSet};
use slabwise_kernels::size::Size;
use slabwise_kernels::spec::{Access, Body};
use slabwise_planner::{
    ALIGN, Buffer, BufferCopy, BufferId, Dag, Kind, MayReuse, Offloaded, Repeated, Rerun, TaskId,
    Work,
};

use super::cost::cost;
use super::lower::{Arg, Task};
use super::rerun::{assigned, kept, rerun};
use super::slices::{Piece, Sliced};
use crate::backend::{Choice, Kernel, Target};
use crate::graph::{Graph, Phase};
use crate::ops::{NodeId, Op};
use crate::shape::elements;

/// A program's tasks, prepared for the device, and the planner's problem.
#[derive(Clone, Default)]
pub struct Scheduled {
    /// What the planner sees; task i is `tasks[i]` run by `kernels[i]`, unless `work` says
    /// otherwise.
    pub dag: Dag,
    /// The tasks.
    pub tasks: Vec<Task>,
    /// The prepared kernels; one that runs twice is there twice.
    pub kernels: Vec<Arc<Kernel>>,
    /// The node of each buffer; a value computed twice has a buffer each time.
    pub nodes: Vec<NodeId>,
    /// What of it runs on slices of the batch.
    pub sliced: Option<Sliced>,
    /// What of a task runs again, where that is not all of it: the task and its kernel.
    pub(super) reruns: FxHashMap<TaskId, (Task, Arc<Kernel>)>,
    /// For each task of the dag, what it does, where some are copies.
    pub(super) work: Option<Vec<Work>>,
    /// The copies, in the order they start.
    pub copies: Vec<BufferCopy>,
}

impl Scheduled {
    /// The buffer of a node that a task reads or writes.
    pub fn buffer_of(&self, task: TaskId, node: NodeId) -> Option<BufferId> {
        let task = &self.dag.tasks[task.index()];
        let sums = |b: &BufferId| {
            self.sliced
                .as_ref()
                .is_some_and(|s| matches!(s.buffers[b.index()], Piece::Sums(_)))
        };
        task.reads
            .iter()
            .chain(&task.writes)
            .copied()
            .find(|b| self.nodes[b.index()] == node && !sums(b))
    }

    /// What a task of the dag does: runs one of `tasks`, or half of a copy.
    pub fn work(&self, task: TaskId) -> Work {
        self.work
            .as_ref()
            .map_or(Work::Run(task), |work| work[task.index()])
    }

    /// The same with buffers that leave for the host and come back, as the planner asks for.
    pub fn offloaded(self, offloaded: Offloaded) -> Scheduled {
        let Offloaded {
            dag,
            work,
            buffer_of,
            copies,
        } = offloaded;
        let nodes = buffer_of.iter().map(|b| self.nodes[b.index()]).collect();
        Scheduled {
            dag,
            nodes,
            work: Some(work),
            copies,
            ..self
        }
    }

    /// The same with some tasks run again, as the planner asks for.
    pub fn repeated(self, repeated: Repeated) -> Scheduled {
        let again: FxHashSet<TaskId> = repeated.again().into_iter().collect();
        let Repeated {
            dag,
            task_of,
            buffer_of,
        } = repeated;
        let of = |(run, &task): (u32, &TaskId)| {
            let leaner = self
                .reruns
                .get(&task)
                .filter(|_| again.contains(&TaskId(run)));
            leaner.cloned().unwrap_or_else(|| {
                (
                    self.tasks[task.index()].clone(),
                    self.kernels[task.index()].clone(),
                )
            })
        };
        let (tasks, kernels) = (0..).zip(&task_of).map(of).unzip();
        let sliced = self
            .sliced
            .as_ref()
            .map(|sliced| sliced.repeated(&task_of, &buffer_of));
        let nodes = buffer_of.iter().map(|b| self.nodes[b.index()]).collect();
        Scheduled {
            dag,
            tasks,
            kernels,
            nodes,
            sliced,
            ..Scheduled::default()
        }
    }
}

/// Prepares the kernels and states which buffers they read and write.
///
/// `guard` bytes that no task may touch are kept behind every buffer (0 but for memory checks).
pub fn schedule(
    graph: &Graph,
    tasks: Vec<Task>,
    target: &Target,
    guard: u64,
) -> Result<Scheduled, String> {
    let bounds = graph.symbols.bounds();
    // Where indices are looked at, what assigns a variable asks first whether one was out of range.
    let checked = tasks
        .iter()
        .any(|t| matches!(t.spec.body, Body::CheckIndex(_)));
    let guarded = |t: &Task| checked && !assigned(t).is_empty();
    let prepare = |t: &Task, choice: &Choice| {
        Kernel::new(t.spec.clone(), &bounds, target, guarded(t), choice)
            .map(Arc::new)
            .map_err(|e| format!("{}: {e}", t.name))
    };
    let kept = kept(graph);
    let found = |id: &NodeId| graph.symbols.any_found(&graph.node(*id).dims);
    // What the pool holds is not planned, nor is when it would be made again.
    let in_pool = |t: &Task| {
        t.args
            .iter()
            .any(|arg| matches!(arg, Arg::Buffer(id) if found(id)))
    };
    let reruns: Vec<Option<Task>> = tasks
        .iter()
        .map(|t| rerun(graph, target, t, &kept).filter(|_| !in_pool(t)))
        .collect();
    // All at once, so that what runs again is computed as it was at first.
    let all: Vec<&Task> = tasks.iter().chain(reruns.iter().flatten()).collect();
    let choices = target.choose(
        &all.iter()
            .map(|t| (&t.spec, guarded(t)))
            .collect::<Vec<_>>(),
        &bounds,
    );
    let (choices, mut again_choices) = (&choices[..tasks.len()], choices[tasks.len()..].iter());
    let kernels = tasks
        .iter()
        .zip(choices)
        .map(|(t, choice)| prepare(t, choice))
        .collect::<Result<Vec<_>, _>>()?;
    let mut s = Scheduled::default();
    let mut buffers: FxHashMap<NodeId, BufferId> = FxHashMap::default();
    let outputs: FxHashSet<NodeId> = graph.outputs.iter().copied().collect();
    for task in &tasks {
        for arg in &task.args {
            if let Arg::Buffer(id) = arg
                && !buffers.contains_key(id)
            {
                let added = s
                    .dag
                    .add_buffer(buffer(graph, *id, outputs.contains(id), guard)?);
                buffers.insert(*id, added);
                s.nodes.push(*id);
            }
        }
    }
    for ((task, kernel), again) in tasks.iter().zip(&kernels).zip(reruns) {
        let [reads, writes] = touched(task, &buffers);
        let mut planned = slabwise_planner::Task::new(task.name.clone(), &reads, &writes);
        planned.after = task.after.iter().map(|&t| TaskId(t as u32)).collect();
        planned.workspace = kernel.workspace();
        planned.cost = cost(&task.spec, &bounds);
        if let Some((again, choice)) = again.and_then(|again| Some((again, again_choices.next()?)))
        {
            planned.repeatable = true;
            if again.spec.stores.len() < task.spec.stores.len() {
                let kernel = prepare(&again, choice)?;
                let [reads, _] = touched(&again, &buffers);
                planned.rerun = Some(Rerun {
                    reads,
                    workspace: kernel.workspace(),
                    cost: cost(&again.spec, &bounds),
                });
                s.reruns
                    .insert(TaskId(s.dag.tasks.len() as u32), (again, kernel));
            }
        }
        let id = s.dag.add_task(planned);
        let pairs = task
            .in_place
            .iter()
            .filter(|(from, to)| !found(from) && !found(to))
            .map(|(from, to)| (buffers[from], buffers[to]));
        for (from, to) in pairs.collect::<Vec<_>>() {
            let (a, b) = (&s.dag.buffers[from.index()], &s.dag.buffers[to.index()]);
            if !a.live_out && b.bytes <= a.bytes {
                s.dag.may_reuse.push(MayReuse { task: id, from, to });
            }
        }
    }
    s.tasks = tasks;
    s.kernels = kernels;
    Ok(s)
}

/// The buffers that a task reads, and those that it writes, each once.
fn touched(task: &Task, buffers: &FxHashMap<NodeId, BufferId>) -> [Vec<BufferId>; 2] {
    let mut lists = [Vec::new(), Vec::new()];
    for (arg, (_, _, access)) in task.args.iter().zip(task.spec.arguments()) {
        let Arg::Buffer(id) = arg else { continue };
        let list = &mut lists[usize::from(access != Access::Read)];
        let buffer = buffers[id];
        if !list.contains(&buffer) {
            list.push(buffer);
        }
    }
    lists
}

fn buffer(graph: &Graph, id: NodeId, is_output: bool, guard: u64) -> Result<Buffer, String> {
    let node = graph.node(id);
    let origin = graph.origin(id);
    let is_input = matches!(node.op, Op::Input(_));
    let kind = match origin.phase {
        _ if is_input => Kind::Input,
        _ if is_output => Kind::Output,
        Phase::Forward | Phase::Again => Kind::Activation,
        Phase::Backward | Phase::Update => Kind::Gradient,
    };
    // What a run finds the size of has no bytes of the slab: the pool gives it some.
    let is_found = graph.symbols.any_found(&node.dims);
    let (size, guard) = if is_found {
        (Some(Size::ZERO), 0)
    } else {
        (elements(&node.dims), guard)
    };
    let bytes = size
        .and_then(|n| n.checked_at(&graph.symbols.bounds()))
        .and_then(|n| u64::try_from(n).ok())
        .and_then(|n| n.checked_mul(node.dtype.bytes() as u64))
        .and_then(|n| n.checked_add(guard))
        .ok_or_else(|| {
            format!(
                "{}: the byte count of {} overflows",
                graph.name(id),
                graph.symbols.show(&node.dims)
            )
        })?;
    let mut buffer = Buffer::new(graph.name(id), kind, bytes);
    buffer.align = ALIGN;
    buffer.layer = origin.layer.to_string();
    buffer.source = format!("{}:{}", origin.location.file(), origin.location.line());
    buffer.live_in = is_input;
    buffer.live_out = is_output;
    Ok(buffer)
}
