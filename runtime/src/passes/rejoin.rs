//! Kernels that run again, joined with one another.
//!
//! On the way forward a norm over the batch stands between a convolution and the activation behind
//! it, and keeps them apart. When both run again the norm's statistics are known already, and the
//! activation is a step behind the convolution like any other: one kernel makes both, and what lies
//! between them is read from no memory, nor written where nobody else needs it. What another run
//! makes that nobody reads is left out likewise.

use rustc_hash::FxHashSet;
use slabwise_kernels::dtype::DType;
use slabwise_kernels::spec::{Access, Body, Inst, MAX_ARGUMENTS, Spec, Store, ValueId};
use slabwise_planner::{self as planner, BufferId, Dag, MayReuse, Plan, TaskId};

use super::cost::cost;
use super::lower::{Arg, Task};
use super::schedule::Scheduled;
use super::stores::{argument, keep_stores};
use crate::backend::{Choice, Kernel, Target};
use crate::graph::Graph;
use crate::ops::NodeId;

/// Most instructions of a kernel made of several.
const INSTRUCTIONS_MAX: usize = 128;

/// The program with kernels of `again`, the runs that are not the first of their tasks, joined
/// where one takes what another makes point by point, in the order of its plan; and those runs in
/// the new program. What a joined kernel makes is there earlier: kernels are joined as long as what
/// is live stays within `room`. `None` if there is nothing to join.
pub(crate) fn rejoin(
    graph: &Graph,
    (scheduled, plan): (&Scheduled, &Plan),
    again: &[TaskId],
    room: u64,
    target: &Target,
) -> Result<Option<(Scheduled, Vec<TaskId>)>, String> {
    // Slices have their own kernels.
    if scheduled.sliced.is_some() || again.is_empty() {
        return Ok(None);
    }
    let mut joining = Joining::new(graph, scheduled, plan, again, target);
    let steps: Vec<usize> = (0..joining.tasks.len())
        .filter(|at| joining.again.contains(at))
        .collect();
    for &step in &steps {
        joining.join(step, room);
    }
    steps.iter().for_each(|&step| joining.drop_unread(step));
    if joining.changed.is_empty() {
        Ok(None)
    } else {
        joining.finish(&steps).map(Some)
    }
}

/// The program under change. Tasks are numbered by their steps in the plan.
struct Joining<'a> {
    graph: &'a Graph,
    old: &'a Scheduled,
    order: &'a [TaskId],
    /// By task: what it is now; nothing if another one does its work.
    tasks: Vec<Option<Task>>,
    dag: Dag,
    /// By task: the one that does its work.
    into: Vec<usize>,
    /// By buffer: its one writer. Of what several write, or none, nothing is known.
    writer: Vec<Option<usize>>,
    /// By buffer: the tasks that read or write it.
    users: Vec<Vec<u32>>,
    /// By step: the bytes of the slab in use.
    live: Vec<u64>,
    again: FxHashSet<usize>,
    changed: FxHashSet<usize>,
    target: &'a Target,
}

impl<'a> Joining<'a> {
    fn new(
        graph: &'a Graph,
        old: &'a Scheduled,
        plan: &'a Plan,
        again: &[TaskId],
        target: &'a Target,
    ) -> Self {
        let mut step = vec![TaskId(0); plan.order.len()];
        (0u32..)
            .zip(&plan.order)
            .for_each(|(at, task)| step[task.index()] = TaskId(at));
        let mut dag = Dag {
            tasks: Vec::new(),
            ..old.dag.clone()
        };
        for task in &plan.order {
            let planned = old.dag.tasks[task.index()].clone();
            let after = planned.after.iter().map(|a| step[a.index()]).collect();
            dag.add_task(planner::Task { after, ..planned });
        }
        dag.may_reuse
            .iter_mut()
            .for_each(|pair| pair.task = step[pair.task.index()]);
        let (mut writer, mut written) =
            (vec![None; dag.buffers.len()], vec![0u32; dag.buffers.len()]);
        let mut users = vec![Vec::new(); dag.buffers.len()];
        for (at, task) in dag.tasks.iter().enumerate() {
            task.reads
                .iter()
                .chain(&task.writes)
                .for_each(|b| users[b.index()].push(at as u32));
            for b in &task.writes {
                (writer[b.index()], written[b.index()]) = (Some(at), written[b.index()] + 1);
            }
        }
        writer
            .iter_mut()
            .zip(&written)
            .filter(|(_, n)| **n > 1)
            .for_each(|(writer, _)| *writer = None);
        Joining {
            graph,
            old,
            order: &plan.order,
            tasks: plan
                .order
                .iter()
                .map(|task| Some(old.tasks[task.index()].clone()))
                .collect(),
            dag,
            into: (0..plan.order.len()).collect(),
            writer,
            users,
            live: planner::live_bytes(&old.dag, plan),
            again: again
                .iter()
                .map(|task| step[task.index()].index())
                .collect(),
            changed: FxHashSet::default(),
            target,
        }
    }

    /// Makes a task part of the one that makes the last of what it reads, if that runs again too
    /// and leaves nothing to wait for.
    fn join(&mut self, task: usize, room: u64) {
        let Some(second) = self.tasks[task].clone() else {
            return;
        };
        let own = &self.dag.tasks[task];
        let Some(first) = own
            .reads
            .iter()
            .filter_map(|b| self.writer[b.index()])
            .max()
        else {
            return;
        };
        let waits = own.after.iter().any(|a| self.into[a.index()] >= first);
        let known =
            |b: &BufferId| self.writer[b.index()].is_some() || self.dag.buffers[b.index()].live_in;
        let alone = own
            .writes
            .iter()
            .all(|b| self.writer[b.index()] == Some(task));
        if waits
            || !alone
            || !self.again.contains(&first)
            || first >= task
            || !own.reads.iter().all(known)
        {
            return;
        }
        let Some(made) = self.tasks[first]
            .as_ref()
            .filter(|first| self.takes_steps(first))
            .and_then(|first| joined(first, &second))
        else {
            return;
        };
        // One node has one buffer in a task.
        let before = &self.dag.tasks[first];
        let mut touched: Vec<BufferId> = [&before.reads, &before.writes, &own.reads, &own.writes]
            .into_iter()
            .flatten()
            .copied()
            .collect();
        touched.sort_unstable();
        touched.dedup();
        let nodes: FxHashSet<NodeId> = touched.iter().map(|b| self.old.nodes[b.index()]).collect();
        if nodes.len() < touched.len() {
            return;
        }
        let (more, less) = self.moved(first, task);
        if self.live[first..task]
            .iter()
            .any(|live| (live + more).saturating_sub(less) > room)
        {
            return;
        }
        self.live[first..task]
            .iter_mut()
            .for_each(|live| *live = (*live + more).saturating_sub(less));
        let (reads, writes, after) = (own.reads.clone(), own.writes.clone(), own.after.clone());
        let name = format!("{} & {}", self.dag.tasks[first].name, own.name);
        let one = &mut self.dag.tasks[first];
        one.reads.extend(
            reads
                .into_iter()
                .filter(|b| self.writer[b.index()] != Some(first)),
        );
        one.reads.sort_unstable();
        one.reads.dedup();
        writes
            .iter()
            .for_each(|b| self.writer[b.index()] = Some(first));
        one.writes.extend(writes);
        one.after.extend(after);
        one.name = name;
        touched
            .iter()
            .for_each(|b| self.users[b.index()].push(first as u32));
        self.tasks[first] = Some(made);
        self.tasks[task] = None;
        self.into
            .iter_mut()
            .filter(|into| **into == task)
            .for_each(|into| *into = first);
        self.changed.remove(&task);
        self.changed.insert(first);
        self.join(first, room);
    }

    /// Whether what a task sums is the same sum with other steps behind it. On other devices than
    /// the CPU the way of a product may follow from them, or be a measured choice.
    fn takes_steps(&self, task: &Task) -> bool {
        let late_epilogues = self.target.capabilities().late_epilogues;
        task.spec.body == Body::Loop
            || late_epilogues && matches!(task.spec.body, Body::Matmul(_) | Body::Conv2d(_))
    }

    /// The bytes that lie in memory earlier if the second task runs with the first, and those that
    /// lie there no more: what only the second reads of the first.
    fn moved(&self, first: usize, second: usize) -> (u64, u64) {
        let bytes = |buffers: &mut dyn Iterator<Item = &BufferId>| {
            buffers
                .map(|b| self.dag.buffers[b.index()].occupied())
                .sum::<u64>()
        };
        let read = |b: &BufferId, task: usize| {
            self.tasks[task].is_some() && self.dag.tasks[task].reads.contains(b)
        };
        let alone = |b: &&BufferId| {
            let others = || {
                self.users[b.index()]
                    .iter()
                    .any(|&task| task as usize != second && read(b, task as usize))
            };
            !self.dag.buffers[b.index()].live_out && read(b, second) && !others()
        };
        (
            bytes(&mut self.dag.tasks[second].writes.iter()),
            bytes(&mut self.dag.tasks[first].writes.iter().filter(alone)),
        )
    }

    /// Leaves out of a task what nobody reads.
    fn drop_unread(&mut self, at: usize) {
        let Some(task) = self.tasks[at]
            .as_ref()
            .filter(|task| task.spec.stores.len() > 1 && self.takes_steps(task))
        else {
            return;
        };
        let touches = |task: usize, b: &BufferId| {
            let planned = &self.dag.tasks[task];
            task != at
                && self.tasks[task].is_some()
                && (planned.reads.contains(b) || planned.writes.contains(b))
        };
        let touched = |b: &BufferId| {
            self.users[b.index()]
                .iter()
                .any(|&task| touches(task as usize, b))
        };
        let unread = |b: &BufferId| !touched(b) && !self.dag.buffers[b.index()].live_out;
        let gone: Vec<BufferId> = self.dag.tasks[at]
            .writes
            .iter()
            .copied()
            .filter(unread)
            .collect();
        let is_gone = |arg: Arg| matches!(arg, Arg::Buffer(node) if gone.iter().any(|b| self.old.nodes[b.index()] == node));
        let stores: Vec<Store> = task
            .spec
            .stores
            .iter()
            .copied()
            .filter(|s| !is_gone(argument(task, s.operand)))
            .collect();
        if stores.len() == task.spec.stores.len() {
            return;
        }
        let Some(fewer) = keep_stores(self.graph, self.target, task, &stores) else {
            return;
        };
        let still: FxHashSet<Arg> = fewer.args.iter().copied().collect();
        let keeps = |b: &BufferId| still.contains(&Arg::Buffer(self.old.nodes[b.index()]));
        self.dag.tasks[at].reads.retain(keeps);
        self.dag.tasks[at].writes.retain(keeps);
        self.tasks[at] = Some(fewer);
        self.changed.insert(at);
    }

    /// The new program, its tasks numbered anew.
    fn finish(self, again: &[usize]) -> Result<(Scheduled, Vec<TaskId>), String> {
        let bounds = self.graph.symbols.bounds();
        let mut number = vec![TaskId(0); self.tasks.len()];
        let alive = (0..self.tasks.len()).filter(|&at| self.tasks[at].is_some());
        (0u32..)
            .zip(alive)
            .for_each(|(new, at)| number[at] = TaskId(new));
        let of = |task: TaskId| number[self.into[task.index()]];
        let mut new = Scheduled {
            nodes: self.old.nodes.clone(),
            ..Scheduled::default()
        };
        new.dag.buffers.clone_from(&self.dag.buffers);
        for (at, task) in self.tasks.iter().enumerate() {
            let Some(task) = task else { continue };
            let mut planned = self.dag.tasks[at].clone();
            planned.after = planned
                .after
                .iter()
                .map(|&a| of(a))
                .filter(|a| *a != number[at])
                .collect();
            planned.after.sort_unstable();
            planned.after.dedup();
            let mut kernel = self.old.kernels[self.order[at].index()].clone();
            if self.changed.contains(&at) {
                let made = Kernel::new(
                    task.spec.clone(),
                    &bounds,
                    self.target,
                    false,
                    &Choice::default(),
                )
                .map_err(|e| format!("{}: {e}", task.name))?;
                (planned.workspace, planned.cost) = (made.workspace(), cost(&task.spec, &bounds));
                kernel = made.into();
            }
            new.dag.add_task(planned);
            new.tasks.push(task.clone());
            new.kernels.push(kernel);
        }
        let node = |b: BufferId| self.old.nodes[b.index()];
        let possible = |pair: &MayReuse| {
            let (planned, task) = (
                &new.dag.tasks[pair.task.index()],
                &new.tasks[pair.task.index()],
            );
            let touched = planned.reads.contains(&pair.from) && planned.writes.contains(&pair.to);
            touched && task.in_place.contains(&(node(pair.from), node(pair.to)))
        };
        let pairs = self.dag.may_reuse.iter().map(|pair| MayReuse {
            task: of(pair.task),
            ..*pair
        });
        new.dag.may_reuse = pairs.filter(possible).collect();
        let mut runs: Vec<TaskId> = again.iter().map(|&at| of(TaskId(at as u32))).collect();
        runs.sort_unstable();
        runs.dedup();
        Ok((new, runs))
    }
}

/// Two tasks as one, the second of which reads what the first makes, at the same points.
fn joined(first: &Task, second: &Task) -> Option<Task> {
    let (a, b) = (&first.spec, &second.spec);
    let pointwise = a.reduced == 0 && b.reduced == 0 && b.body == Body::Loop && a.dims == b.dims;
    let assigns = |task: &Task| {
        let arguments = task.spec.arguments();
        task.args
            .iter()
            .zip(&arguments)
            .any(|(arg, (_, _, access))| matches!(arg, Arg::Variable(_)) && *access != Access::Read)
    };
    if !pointwise || assigns(first) || assigns(second) {
        return None;
    }
    // For each operand of the second, the value of the first that it would read back.
    let read_back = |k: usize| -> Option<Option<ValueId>> {
        let made = |s: &&Store| argument(first, s.operand) == second.args[k];
        let Some(store) = a.stores.iter().find(made) else {
            return Some(None);
        };
        // What is narrowed when it is stored is another value.
        let exact = matches!(b.operands[k].dtype, DType::F32 | DType::I32)
            && a.operands[usize::from(store.operand)] == b.operands[k];
        exact.then_some(Some(store.value))
    };
    let values: Vec<Option<ValueId>> = (0..b.operands.len())
        .map(read_back)
        .collect::<Option<_>>()?;
    let anchors = first.args.len() - a.operands.len();
    let (mut operands, mut args) = (a.operands.clone(), first.args.clone());
    let mut place = Vec::with_capacity(b.operands.len());
    for (k, operand) in b.operands.iter().enumerate() {
        let written = b.stores.iter().any(|s| usize::from(s.operand) == k);
        let known = (0..a.operands.len())
            .find(|&j| !written && args[anchors + j] == second.args[k] && operands[j] == *operand);
        place.push(known.unwrap_or(operands.len()) as u16);
        if known.is_none() && values[k].is_none() {
            operands.push(operand.clone());
            args.push(second.args[k]);
        }
    }
    let mut spec = Spec {
        operands,
        ..a.clone()
    };
    spec.indices.extend(b.indices.iter().cloned());
    let mut value: Vec<ValueId> = Vec::with_capacity(b.code.len());
    for inst in &b.code {
        let of = |v: ValueId| value[usize::from(v)];
        let inst = match *inst {
            Inst::Load(k) if values[usize::from(k)].is_some() => {
                value.extend(values[usize::from(k)]);
                continue;
            }
            Inst::Load(k) => Inst::Load(place[usize::from(k)]),
            Inst::Index(k) => Inst::Index(k + a.indices.len() as u16),
            Inst::Uniform {
                state,
                stream,
                index,
            } => Inst::Uniform {
                state: place[usize::from(state)],
                stream,
                index: of(index),
            },
            Inst::Op(op, args) => {
                let mut new = [0; 3];
                (0..op.arity()).for_each(|i| new[i] = of(args[i]));
                Inst::Op(op, new)
            }
            Inst::Cast(v, lane) => Inst::Cast(of(v), lane),
            Inst::Const(_) => inst.clone(),
            Inst::Acc | Inst::Reduce(..) => return None,
        };
        value.push(spec.code.len() as ValueId);
        spec.code.push(inst);
    }
    let store = |s: &Store| Store {
        value: value[usize::from(s.value)],
        operand: place[usize::from(s.operand)],
    };
    spec.stores.extend(b.stores.iter().map(store));
    if args.len() >= MAX_ARGUMENTS || spec.code.len() > INSTRUCTIONS_MAX {
        return None;
    }
    // In place only over what the other one does not touch.
    let apart = |pair: &&(NodeId, NodeId), other: &Task| !other.args.contains(&Arg::Buffer(pair.0));
    let mut in_place: Vec<_> = first
        .in_place
        .iter()
        .filter(|pair| apart(pair, second))
        .copied()
        .collect();
    in_place.extend(second.in_place.iter().filter(|pair| apart(pair, first)));
    let name = format!("{} & {}", first.name, second.name);
    Some(Task {
        name,
        spec,
        args,
        in_place,
        after: Vec::new(),
        node: first.node,
    })
}
