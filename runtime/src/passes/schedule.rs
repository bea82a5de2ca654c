//! Scheduling: the tasks and buffers of a program as a [`Dag`] for the planner.

use std::collections::HashMap;

use slabwise_kernels::cpu::{Config, Kernel};
use slabwise_kernels::spec::Access;
use slabwise_planner::{ALIGN, Buffer, BufferId, Dag, Kind, MayReuse, TaskId};

use super::lower::{Arg, Task};
use crate::graph::{Graph, Phase};
use crate::ops::{NodeId, Op};
use crate::shape::elements;

/// A program's tasks, prepared for the device, and the planner's problem.
pub struct Scheduled {
    /// What the planner sees; task i is `tasks[i]` run by `kernels[i]`.
    pub dag: Dag,
    /// The tasks.
    pub tasks: Vec<Task>,
    /// The prepared kernels.
    pub kernels: Vec<Kernel>,
    /// The buffer of each node that has one.
    pub buffers: HashMap<NodeId, BufferId>,
    /// The node of each buffer.
    pub nodes: Vec<NodeId>,
}

/// Prepares the kernels and states which buffers they read and write.
///
/// `guard` bytes that no task may touch are kept behind every buffer (0 but for memory checks).
pub fn schedule(graph: &Graph, tasks: Vec<Task>, config: &Config, guard: u64) -> Result<Scheduled, String> {
    let bounds = graph.symbols.bounds();
    let kernels: Vec<Kernel> = tasks
        .iter()
        .map(|t| Kernel::new(t.spec.clone(), &bounds, config).map_err(|e| format!("{}: {e}", t.name)))
        .collect::<Result<_, _>>()?;
    let mut s = Scheduled { dag: Dag::new(), tasks: Vec::new(), kernels: Vec::new(), buffers: HashMap::new(), nodes: Vec::new() };
    for task in &tasks {
        for arg in &task.args {
            if let Arg::Buffer(id) = arg
                && !s.buffers.contains_key(id)
            {
                let buffer = s.dag.add_buffer(buffer(graph, *id, guard)?);
                s.buffers.insert(*id, buffer);
                s.nodes.push(*id);
            }
        }
    }
    for (task, kernel) in tasks.iter().zip(&kernels) {
        let (mut reads, mut writes) = (Vec::new(), Vec::new());
        for (arg, (_, _, access)) in task.args.iter().zip(task.spec.arguments()) {
            let Arg::Buffer(id) = arg else { continue };
            let list = if access == Access::Read { &mut reads } else { &mut writes };
            let buffer = s.buffers[id];
            if !list.contains(&buffer) {
                list.push(buffer);
            }
        }
        let mut planned = slabwise_planner::Task::new(task.name.clone(), &reads, &writes);
        planned.after = task.after.iter().map(|&t| TaskId(t as u32)).collect();
        planned.workspace = kernel.workspace();
        let id = s.dag.add_task(planned);
        let pairs = task.in_place.iter().map(|(from, to)| (s.buffers[from], s.buffers[to]));
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
