//! The late IR: a program as calls of kernels over values.
//!
//! Lowering makes a [`Program`] of a graph, and every pass after it rewrites that: a call of a
//! kernel names the [values](Value) that it reads and writes, and a value has the source of its
//! data. The planner's [`Dag`] is derived from it by [`Program::to_dag`] and never edited; the
//! planner's answers are applied by [`Program::repeated`], [`Program::offloaded`] and
//! [`Program::overlapped`], and passes build their results with a `Rewriter`.
//!
//! Values that the planner places come first, so that buffer *i* of the dag is value *i*. Without
//! transfers, task *i* of the dag is kernel *i*.

mod apply;
mod display;
mod rewrite;
mod transfers;
mod values;
mod verify;

use std::fmt;
use std::sync::Arc;

use rustc_hash::FxHashSet;
use slabwise_kernels::dtype::DType;
use slabwise_kernels::micro_batch::MicroBatch;
use slabwise_kernels::size::Symbol;
use slabwise_kernels::spec::{Access, Dims, Spec};
use slabwise_planner::{
    ALIGN, Buffer, BufferId, Dag, Kind, MayReuse, Rerun, Space, Task, TaskId, Work,
};

use crate::backend::Kernel;
use crate::graph::{Graph, Origin};
use crate::ops::NodeId;

pub use rewrite::Rewriter;
pub use transfers::{HostCopy, Transfer, TransferStep};
pub use verify::IrError;

/// Names a value: its index in [`Program::values`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ValueId(pub u32);

/// Names a call of a kernel: its index in [`Program::kernels`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CallId(pub u32);

impl ValueId {
    /// The id as an index.
    pub const fn index(self) -> usize {
        self.0 as usize
    }

    /// The planner's id of a value that it places.
    pub const fn buffer(self) -> BufferId {
        BufferId(self.0)
    }
}

impl CallId {
    /// The id as an index.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

impl From<BufferId> for ValueId {
    fn from(buffer: BufferId) -> Self {
        ValueId(buffer.0)
    }
}

/// Where the data of a value comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Source {
    /// The input of the program of this index.
    Input(u32),
    /// The variable of the graph of this index: a weight, a state or a constant.
    Variable(u32),
    /// The sizes of a run: i32, one per symbol.
    Sizes,
    /// Kernels or copies write it.
    Computed,
}

/// The part of its node's value that a value holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Piece {
    /// All of it.
    Whole,
    /// The examples of a micro-batch.
    MicroBatch(MicroBatch),
    /// Partial sums that a kernel accumulates over micro-batches.
    PartialSums,
}

/// Data that kernels read and write.
#[derive(Clone, Debug)]
pub struct Value {
    /// Shown in plans.
    pub name: String,
    /// Where its data comes from.
    pub source: Source,
    /// The node of the graph whose value it holds; none for variables, sizes and the sums of an
    /// epilogue.
    pub node: Option<NodeId>,
    /// The part of the node's value that it holds.
    pub piece: Piece,
    /// Its type.
    pub dtype: DType,
    /// Its shape.
    pub dims: Dims,
    /// Elements after each row, which runs along the last axis, that no kernel touches.
    pub row_padding: i64,
    /// Whether it is stored with its channels, which are axis 1 of 4, innermost.
    pub channels_last: bool,
    /// Its bytes at the bounds of the symbols, with all padding; 0 if its shape is data-dependent.
    pub bytes: u64,
    /// Whether a run computes its size, so that it has no bytes in the plan.
    pub data_dependent: bool,
    /// Its purpose, by which reports group values.
    pub kind: Kind,
    /// Which memory it lies in.
    pub space: Space,
    /// Whether the program returns it.
    pub output: bool,
}

impl Value {
    /// Whether the planner places it. The session places variables and sizes.
    pub fn is_planned(&self) -> bool {
        !matches!(self.source, Source::Variable(_) | Source::Sizes)
    }

    /// Whether it holds data before the first call.
    pub fn is_input(&self) -> bool {
        matches!(self.source, Source::Input(_))
    }
}

/// How the outputs of a call may be recomputed.
#[derive(Clone, Debug, Default)]
pub enum Recompute {
    /// Not at all: the call checks something, or its outputs are marked as kept.
    #[default]
    Never,
    /// By another call like it.
    Same,
    /// By a smaller call without side effects, its recompute clone: a norm without its running
    /// statistics.
    Clone(Box<KernelCall>),
}

/// A call of a kernel.
#[derive(Clone)]
pub struct KernelCall {
    /// Shown in plans.
    pub name: String,
    /// Its computation.
    pub spec: Spec,
    /// Its arguments in the order of [`Spec::arguments`], then the partial sums of a micro-batch.
    pub args: Vec<ValueId>,
    /// Control dependencies: calls that must run before, for reasons other than data, as the
    /// readers of a variable before its writer, or checks before updates.
    pub after: Vec<CallId>,
    /// Permissions to compute in place: the bytes of the first value, which it reads, may become
    /// those of the second, which it writes at the same places.
    pub in_place: Vec<(ValueId, ValueId)>,
    /// The node that it is named after.
    pub node: NodeId,
    /// The kernel prepared for the device, from the pass `prepare` on.
    pub kernel: Option<Arc<Kernel>>,
    /// Its modelled time, in the unit of [`Task::cost`].
    pub cost: u64,
    /// How its outputs may be recomputed.
    pub recompute: Recompute,
    /// The micro-batch that it runs on, if it does not run on the whole batch.
    pub micro_batch: Option<MicroBatch>,
}

impl fmt::Debug for KernelCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = f.debug_struct("KernelCall");
        debug.field("name", &self.name).field("args", &self.args);
        debug.finish_non_exhaustive()
    }
}

impl KernelCall {
    /// A call that is neither prepared nor ordered.
    pub fn new(name: String, spec: Spec, args: Vec<ValueId>, node: NodeId) -> Self {
        KernelCall {
            name,
            spec,
            args,
            after: Vec::new(),
            in_place: Vec::new(),
            node,
            kernel: None,
            cost: 0,
            recompute: Recompute::Never,
            micro_batch: None,
        }
    }

    /// The argument that is an operand of the code.
    pub fn operand(&self, operand: u16) -> ValueId {
        let anchors = self.spec.body.operands(&self.spec.dims).len();
        self.args[anchors + usize::from(operand)]
    }

    /// The values that it stores with its code, in the order of the stores.
    pub fn stored(&self) -> impl Iterator<Item = ValueId> {
        self.spec.stores.iter().map(|s| self.operand(s.operand))
    }

    /// Its arguments with the access to each.
    pub fn accesses(&self) -> impl Iterator<Item = (ValueId, Access)> {
        let partial_sums = std::iter::once(Access::ReadWrite);
        let accesses = self.spec.accesses().into_iter().chain(partial_sums);
        self.args.iter().copied().zip(accesses)
    }

    /// The bytes of its workspace.
    pub fn workspace(&self) -> u64 {
        self.kernel.as_ref().map_or(0, |kernel| kernel.workspace())
    }

    /// Renames its arguments, those of its recompute clone included.
    pub fn rename(&mut self, of: &mut impl FnMut(ValueId) -> ValueId) {
        self.args.iter_mut().for_each(|arg| *arg = of(*arg));
        for (from, to) in &mut self.in_place {
            (*from, *to) = (of(*from), of(*to));
        }
        if let Recompute::Clone(clone) = &mut self.recompute {
            clone.rename(of);
        }
    }
}

/// How a program's kernels run on micro-batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MicroBatches {
    /// The number of examples.
    pub batch: Symbol,
    /// Micro-batches of a kernel.
    pub count: u32,
    /// Examples of every micro-batch but the last.
    pub examples: u32,
    /// Kernels that run on them.
    pub kernels: usize,
}

/// A program as kernel calls over values.
#[derive(Clone)]
pub struct Program {
    /// The graph that it was lowered from.
    pub graph: Arc<Graph>,
    /// The values, those that the planner places first.
    pub values: Vec<Value>,
    /// The calls, in an order in which they can run.
    pub kernels: Vec<KernelCall>,
    /// Bytes that move while kernels run. Copies to the host and back start in this order, and so
    /// do collectives.
    pub transfers: Vec<Transfer>,
    /// Their starts and ends between the kernels, in order.
    pub transfer_steps: Vec<TransferStep>,
    /// How kernels run on micro-batches, if some do.
    pub micro_batches: Option<MicroBatches>,
    /// Bytes after every planned value that no kernel may touch; 0 except for memory checks.
    pub guard: u64,
}

impl Program {
    /// A program of a graph without calls.
    pub fn new(graph: Arc<Graph>) -> Self {
        Program {
            graph,
            values: Vec::new(),
            kernels: Vec::new(),
            transfers: Vec::new(),
            transfer_steps: Vec::new(),
            micro_batches: None,
            guard: 0,
        }
    }

    /// The value of an id.
    pub fn value(&self, id: ValueId) -> &Value {
        &self.values[id.index()]
    }

    /// The call of an id.
    pub fn call(&self, id: CallId) -> &KernelCall {
        &self.kernels[id.index()]
    }

    /// The number of values that the planner places.
    pub fn planned(&self) -> usize {
        self.values.iter().take_while(|v| v.is_planned()).count()
    }

    /// Where a call comes from.
    pub fn origin(&self, call: &KernelCall) -> &Origin {
        self.graph.origin(call.node)
    }

    /// The variables that a call assigns.
    pub fn assigned(&self, call: &KernelCall) -> FxHashSet<ValueId> {
        call.accesses()
            .filter(|(value, access)| {
                *access != Access::Read && matches!(self.value(*value).source, Source::Variable(_))
            })
            .map(|(value, _)| value)
            .collect()
    }

    /// The planned values that a call only reads, and those that it writes, each once.
    pub fn touched(&self, call: &KernelCall) -> [Vec<ValueId>; 2] {
        let mut lists = [Vec::new(), Vec::new()];
        for (value, access) in call.accesses().filter(|(v, _)| self.value(*v).is_planned()) {
            let list: &mut Vec<ValueId> = &mut lists[usize::from(access != Access::Read)];
            if !list.contains(&value) {
                list.push(value);
            }
        }
        lists
    }

    /// Whether a call that reads one value and writes another at the same places may do so in
    /// place: the planner places both, and the second fits into the bytes of the first.
    pub(crate) fn may_reuse(&self, from: ValueId, to: ValueId) -> bool {
        let (from, to) = (self.value(from), self.value(to));
        let sized = !from.data_dependent && !to.data_dependent;
        sized && !from.output && to.bytes <= from.bytes
    }

    /// The bytes that a planned value takes up in the slab.
    pub(crate) fn occupied(&self, value: ValueId) -> u64 {
        self.buffer(self.value(value)).occupied()
    }

    /// The modelled time of all calls, in the unit of [`Task::cost`].
    pub fn time(&self) -> f64 {
        let each = self.kernels.iter().map(|call| call.cost as f64);
        each.sum::<f64>().max(1.0)
    }

    /// The planner's problem: a task for each call and each step of a transfer, a buffer for each
    /// value that it places. Collectives that are transfers start and end in their order.
    pub fn to_dag(&self) -> Dag {
        let mut dag = Dag::new();
        for value in self.values.iter().take_while(|value| value.is_planned()) {
            dag.add_buffer(self.buffer(value));
        }
        let work = self.work();
        // The tasks after which those of other calls may run: of a collective, its end.
        let mut task_of = vec![TaskId(0); self.kernels.len()];
        for (task, work) in (0..).zip(&work) {
            match *work {
                Work::Run(call) => task_of[call.index()] = TaskId(task),
                Work::Start(_) => {}
                Work::Finish(transfer) => {
                    if let Transfer::Ranks(call) = self.transfers[transfer as usize] {
                        task_of[call.index()] = TaskId(task);
                    }
                }
            }
        }
        let mut steps = self.transfer_steps.iter();
        let mut start_of = vec![TaskId(0); self.transfers.len()];
        let (mut started, mut finished): (Option<TaskId>, Option<TaskId>) = (None, None);
        for work in work {
            let (transfer, finishes) = match work {
                Work::Run(call) => {
                    let task = self.task(&self.kernels[call.index()], &task_of);
                    let task = dag.add_task(task);
                    let pairs = &self.kernels[call.index()].in_place;
                    dag.may_reuse
                        .extend(pairs.iter().map(|(from, to)| MayReuse {
                            task,
                            from: from.buffer(),
                            to: to.buffer(),
                        }));
                    continue;
                }
                Work::Start(transfer) => (transfer as usize, false),
                Work::Finish(transfer) => (transfer as usize, true),
            };
            match self.transfers[transfer] {
                Transfer::Host(HostCopy { from, to }) => {
                    let Some(step) = steps.next() else { break };
                    let (from, to) = (from.buffer(), to.buffer());
                    dag.add_task(Task::new(step.name.clone(), &[from], &[to]));
                }
                Transfer::Ranks(call) if !finishes => {
                    let mut task = self.task(self.call(call), &task_of);
                    task.after.extend(started);
                    let task = dag.add_task(task);
                    (started, start_of[transfer]) = (Some(task), task);
                }
                Transfer::Ranks(call) => {
                    let Some(step) = steps.next() else { break };
                    let [reads, writes] = self.touched(self.call(call));
                    let buffers = |list: Vec<ValueId>| {
                        list.into_iter().map(ValueId::buffer).collect::<Vec<_>>()
                    };
                    let (reads, writes) = (buffers(reads), buffers(writes));
                    let mut task = Task::new(step.name.clone(), &reads, &writes);
                    task.after = [start_of[transfer]].into_iter().chain(finished).collect();
                    finished = Some(dag.add_task(task));
                }
            }
        }
        dag
    }

    fn buffer(&self, value: &Value) -> Buffer {
        let guard = if value.data_dependent { 0 } else { self.guard };
        let mut buffer = Buffer::new(
            value.name.clone(),
            value.kind,
            value.bytes.saturating_add(guard),
        );
        buffer.align = ALIGN;
        buffer.space = value.space;
        buffer.live_in = value.is_input();
        buffer.live_out = value.output;
        if let Some(node) = value.node.filter(|_| value.piece != Piece::PartialSums) {
            let origin = self.graph.origin(node);
            buffer.layer = origin.layer.to_string();
            buffer.source = format!("{}:{}", origin.location.file(), origin.location.line());
        }
        buffer
    }

    fn task(&self, call: &KernelCall, task_of: &[TaskId]) -> Task {
        let buffers = |call| {
            self.touched(call)
                .map(|list| list.into_iter().map(ValueId::buffer).collect::<Vec<_>>())
        };
        let [reads, writes] = buffers(call);
        let mut task = Task::new(call.name.clone(), &reads, &writes);
        task.after = call.after.iter().map(|a| task_of[a.index()]).collect();
        task.workspace = call.workspace();
        task.cost = call.cost;
        task.repeatable = !matches!(call.recompute, Recompute::Never);
        if let Recompute::Clone(clone) = &call.recompute {
            let [reads, _] = buffers(clone);
            task.rerun = Some(Rerun {
                reads,
                workspace: clone.workspace(),
                cost: clone.cost,
            });
        }
        task
    }
}
