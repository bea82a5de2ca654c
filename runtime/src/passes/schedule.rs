//! Scheduling: the tasks and buffers of a program as a [`Dag`] for the planner.

use std::collections::HashMap;
use std::sync::Arc;

use slabwise_kernels::cpu::{Config, Kernel};
use slabwise_kernels::spec::{Access, Body};
use slabwise_planner::{ALIGN, Buffer, BufferCopy, BufferId, Dag, Kind, MayReuse, Offloaded, Repeated, TaskId, Work};

use super::cost::cost;
use super::lower::{Arg, Task};
use crate::graph::{Graph, Phase};
use crate::ops::{NodeId, Op};
use crate::shape::elements;

/// A program's tasks, prepared for the device, and the planner's problem.
pub struct Scheduled {
    /// What the planner sees; task i is `tasks[i]` run by `kernels[i]`, unless `work` says otherwise.
    pub dag: Dag,
    /// The tasks.
    pub tasks: Vec<Task>,
    /// The prepared kernels; one that runs twice is there twice.
    pub kernels: Vec<Arc<Kernel>>,
    /// The node of each buffer; a value computed twice has a buffer each time.
    pub nodes: Vec<NodeId>,
    /// For each task of the dag, what it does, where some are copies.
    work: Option<Vec<Work>>,
    /// The copies, in the order they start.
    pub copies: Vec<BufferCopy>,
}

impl Scheduled {
    /// The buffer of a node that a task reads or writes.
    pub fn buffer_of(&self, task: TaskId, node: NodeId) -> Option<BufferId> {
        let task = &self.dag.tasks[task.index()];
        task.reads.iter().chain(&task.writes).copied().find(|b| self.nodes[b.index()] == node)
    }

    /// What a task of the dag does: runs one of `tasks`, or half of a copy.
    pub fn work(&self, task: TaskId) -> Work {
        self.work.as_ref().map_or(Work::Run(task), |work| work[task.index()])
    }

    /// The same with buffers that leave for the host and come back, as the planner asks for.
    pub fn offloaded(self, offloaded: Offloaded) -> Scheduled {
        let Offloaded { dag, work, buffer_of, copies } = offloaded;
        let nodes = buffer_of.iter().map(|b| self.nodes[b.index()]).collect();
        Scheduled { dag, nodes, work: Some(work), copies, ..self }
    }

    /// The same with some tasks run again, as the planner asks for.
    pub fn repeated(self, repeated: Repeated) -> Scheduled {
        let Repeated { dag, task_of, buffer_of } = repeated;
        Scheduled {
            dag,
            tasks: task_of.iter().map(|t| self.tasks[t.index()].clone()).collect(),
            kernels: task_of.iter().map(|t| self.kernels[t.index()].clone()).collect(),
            nodes: buffer_of.iter().map(|b| self.nodes[b.index()]).collect(),
            work: None,
            copies: Vec::new(),
        }
    }
}

/// Prepares the kernels and states which buffers they read and write.
///
/// `guard` bytes that no task may touch are kept behind every buffer (0 but for memory checks).
pub fn schedule(graph: &Graph, tasks: Vec<Task>, config: &Config, guard: u64) -> Result<Scheduled, String> {
    let bounds = graph.symbols.bounds();
    let kernels: Vec<Arc<Kernel>> = tasks
        .iter()
        .map(|t| Kernel::new(t.spec.clone(), &bounds, config).map(Arc::new).map_err(|e| format!("{}: {e}", t.name)))
        .collect::<Result<_, _>>()?;
    let mut s = Scheduled { dag: Dag::new(), tasks: Vec::new(), kernels: Vec::new(), nodes: Vec::new(), work: None, copies: Vec::new() };
    let mut buffers: HashMap<NodeId, BufferId> = HashMap::new();
    for task in &tasks {
        for arg in &task.args {
            if let Arg::Buffer(id) = arg
                && !buffers.contains_key(id)
            {
                let added = s.dag.add_buffer(buffer(graph, *id, guard)?);
                buffers.insert(*id, added);
                s.nodes.push(*id);
            }
        }
    }
    for (task, kernel) in tasks.iter().zip(&kernels) {
        let (mut reads, mut writes) = (Vec::new(), Vec::new());
        // What fails a run or changes weights and state does so once.
        let mut repeatable = !matches!(task.spec.body, Body::CheckIndex(_));
        for (arg, (_, _, access)) in task.args.iter().zip(task.spec.arguments()) {
            repeatable &= !matches!(arg, Arg::Variable(_)) || access == Access::Read;
            let Arg::Buffer(id) = arg else { continue };
            let list = if access == Access::Read { &mut reads } else { &mut writes };
            let buffer = buffers[id];
            if !list.contains(&buffer) {
                list.push(buffer);
            }
        }
        let mut planned = slabwise_planner::Task::new(task.name.clone(), &reads, &writes);
        planned.after = task.after.iter().map(|&t| TaskId(t as u32)).collect();
        planned.workspace = kernel.workspace();
        planned.cost = cost(&task.spec, &bounds);
        planned.repeatable = repeatable;
        let id = s.dag.add_task(planned);
        let pairs = task.in_place.iter().map(|(from, to)| (buffers[from], buffers[to]));
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

fn buffer(graph: &Graph, id: NodeId, guard: u64) -> Result<Buffer, String> {
    let node = graph.node(id);
    let origin = graph.origin(id);
    let is_input = matches!(node.op, Op::Input(_));
    let is_output = graph.outputs.contains(&id);
    let kind = match origin.phase {
        _ if is_input => Kind::Input,
        _ if is_output => Kind::Output,
        Phase::Forward | Phase::Again => Kind::Activation,
        Phase::Backward | Phase::Update => Kind::Gradient,
    };
    let bytes = elements(&node.dims)
        .and_then(|n| n.checked_at(&graph.symbols.bounds()))
        .and_then(|n| u64::try_from(n).ok())
        .and_then(|n| n.checked_mul(node.dtype.bytes() as u64))
        .and_then(|n| n.checked_add(guard))
        .ok_or_else(|| format!("{}: the byte count of {} overflows", graph.name(id), graph.symbols.show(&node.dims)))?;
    let mut buffer = Buffer::new(graph.name(id), kind, bytes);
    buffer.align = ALIGN;
    buffer.source = format!("{}:{}", origin.location.file(), origin.location.line());
    buffer.live_in = is_input;
    buffer.live_out = is_output;
    Ok(buffer)
}
