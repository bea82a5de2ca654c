//! Slices: kernels that run a few examples of the batch at a time.
//!
//! No order of the kernels, and no repeating of them, makes a slab smaller than what one kernel
//! reads and writes. Cutting kernels into slices of the batch does (strip-mining; TVM and MCUNetV2
//! run "patches", GPipe "micro-batches" of a whole model): a value that only sliced kernels touch
//! exists a slice at a time, and a value that others touch as well is made and read in place, slice
//! by slice. What sums over the batch, a weight's gradient, keeps its sums between slices. The
//! results have the same bits ([`slabwise_kernels::slice`]), for more time: weights are read and
//! packed once for each slice.
//!
//! `Cuttable::cut` rewrites the tasks: each chosen one becomes a task for each slice. The planner
//! and its checker see a dag like any other, in which slices write a buffer in parts, in their
//! order, as those of a concatenation do.

mod search;

use std::sync::Arc;

use rustc_hash::FxHashMap;
use slabwise_kernels::dtype::DType;
use slabwise_kernels::size::{Env, Size, Symbol};
use slabwise_kernels::slice::Slice;
use slabwise_kernels::spec::{Dims, MAX_ARGUMENTS};
use slabwise_planner::{ALIGN, Buffer, BufferId, Dag, Kind, MayReuse, Rerun, TaskId};

use super::cost::cost;
use super::lower::{Arg, Task};
use super::schedule::Scheduled;
use crate::backend::{Kernel, Target};
use crate::graph::Graph;
use crate::ops::{NodeId, Op};
use crate::shape::elements;

pub(crate) use search::time;
pub use search::{Found, slices_within};

/// What a buffer of a program holds of its node's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Piece {
    /// All of it.
    Whole,
    /// These examples.
    Slice(Slice),
    /// So many bytes of sums that a kernel keeps between slices.
    Sums(u64),
}

/// How a program's kernels run on slices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sliced {
    /// The number of examples.
    pub batch: Symbol,
    /// Slices of a sliced kernel.
    pub count: u32,
    /// Examples of every slice but the last.
    pub examples: u32,
    /// Kernels that run on slices.
    pub kernels: usize,
    /// For each task of the dag, the slice that it runs; `None` for one that runs whole.
    pub tasks: Vec<Option<Slice>>,
    /// For each buffer, what it holds.
    pub buffers: Vec<Piece>,
}

impl Sliced {
    /// The same for a dag that runs some of the tasks again.
    pub(super) fn repeated(&self, task_of: &[TaskId], buffer_of: &[BufferId]) -> Sliced {
        Sliced {
            tasks: task_of.iter().map(|t| self.tasks[t.index()]).collect(),
            buffers: buffer_of.iter().map(|b| self.buffers[b.index()]).collect(),
            ..self.clone()
        }
    }

    /// The type of what a buffer holds, of a node of this type.
    pub fn dtype(&self, buffer: usize, whole: DType) -> DType {
        if matches!(self.buffers[buffer], Piece::Sums(_)) {
            DType::F32
        } else {
            whole
        }
    }

    /// The shape of what a buffer holds, of a node of this shape.
    pub fn dims(&self, buffer: usize, whole: &Dims) -> Dims {
        match self.buffers[buffer] {
            Piece::Whole => whole.clone(),
            Piece::Slice(slice) => {
                let examples = whole[0]
                    .checked_div_size(Size::symbol(self.batch))
                    .and_then(|n| n.checked_mul(Size::from(slice.to - slice.from)));
                let mut dims = whole.clone();
                dims[0] = examples.unwrap_or(dims[0]);
                dims
            }
            Piece::Sums(bytes) => Dims::from_slice(&[Size::fixed((bytes / 4) as i64)]),
        }
    }
}

impl Scheduled {
    /// Where an argument of a task lies in its buffer, if not all of the buffer is the argument.
    pub(crate) fn stretch(
        &self,
        task: TaskId,
        argument: usize,
        buffer: BufferId,
    ) -> Option<Stretch> {
        let sliced = self.sliced.as_ref()?;
        let (slice, piece) = (sliced.tasks[task.index()]?, sliced.buffers[buffer.index()]);
        let kernel = &self.kernels[task.index()];
        let example = kernel.slicing()?.steps[argument].filter(|_| piece == Piece::Whole)?;
        Some(Stretch {
            slice,
            example,
            dtype: kernel.spec().arguments()[argument].0.dtype,
        })
    }

    /// The buffer of the sums that a task goes on with.
    pub(crate) fn sums_of(&self, task: TaskId) -> Option<BufferId> {
        let sliced = self.sliced.as_ref()?;
        self.dag.tasks[task.index()]
            .writes
            .iter()
            .copied()
            .find(|b| matches!(sliced.buffers[b.index()], Piece::Sums(_)))
    }
}

/// What can be cut of a program, found once for all ways to cut it.
pub(super) struct Cuttable<'a> {
    graph: &'a Graph,
    scheduled: &'a Scheduled,
    batch: Symbol,
    bounds: Env,
    target: &'a Target,
    guard: u64,
    /// For each task whether it can be sliced, and the number of examples that slices must be a
    /// multiple of.
    units: Vec<Option<u32>>,
    /// For each task whether its sums, if it has any, are smaller than all that it could read in
    /// slices.
    pays: Vec<bool>,
}

impl<'a> Cuttable<'a> {
    /// Looks at every task of a program; `None` if it has no batch to cut.
    fn new(
        graph: &'a Graph,
        scheduled: &'a Scheduled,
        target: &'a Target,
        guard: u64,
    ) -> Result<Option<Self>, String> {
        let Some(batch) = batch(graph) else {
            return Ok(None);
        };
        let bounds = graph.symbols.bounds();
        let mut cuttable = Cuttable {
            graph,
            scheduled,
            batch,
            bounds,
            target,
            guard,
            units: Vec::new(),
            pays: Vec::new(),
        };
        for (at, task) in scheduled.tasks.iter().enumerate() {
            let kernel = cuttable
                .kernel(task, u32::MAX)?
                .filter(|kernel| cuttable.walks_examples(task, kernel));
            cuttable.pays.push(
                kernel
                    .as_ref()
                    .is_some_and(|kernel| kernel.sums() < cuttable.with_examples(at).sum()),
            );
            cuttable
                .units
                .push(kernel.map(|kernel| kernel.slice_unit()));
        }
        Ok(Some(cuttable))
    }

    /// A task's kernel for slices of at most so many examples.
    fn kernel(&self, task: &Task, most: u32) -> Result<Option<Kernel>, String> {
        let kernel = Kernel::sliced(
            task.spec.clone(),
            self.batch,
            most,
            &self.bounds,
            self.target,
        );
        kernel.map_err(|e| format!("{}: {e}", task.name))
    }

    /// Elements of an example, if a value has its examples one after the other.
    fn example(&self, node: NodeId) -> Option<Size> {
        let dims = &self.graph.node(node).dims;
        dims.first()?.checked_div_size(Size::symbol(self.batch))?;
        elements(dims)?.checked_div_size(Size::symbol(self.batch))
    }

    /// Whether a kernel takes the examples of its arguments one after the other, each example
    /// inside its own bytes, and nothing else of values that have any.
    fn walks_examples(&self, task: &Task, kernel: &Kernel) -> bool {
        let Some(slicing) = kernel.slicing().filter(|_| task.args.len() < MAX_ARGUMENTS) else {
            return false;
        };
        let varies = |node: NodeId| {
            self.graph
                .node(node)
                .dims
                .iter()
                .any(|d| d.symbols().any(|s| s == self.batch))
        };
        // An example alone, all other sizes at their bounds and at one.
        let alone = [self.bounds.0, [1; 8]].map(|mut sizes| {
            sizes[usize::from(self.batch.0)] = 1;
            Env(sizes)
        });
        let arguments = task.spec.arguments();
        task.args.iter().zip(&slicing.steps).zip(&arguments).all(
            |((arg, step), (operand, space, _))| match (arg, step) {
                (Arg::Buffer(node), Some(step)) => self.example(*node).is_some_and(|example| {
                    let inside = |env| operand.extent(space, env) <= example.at(env).max(0) as u64;
                    example == *step && alone.iter().all(inside)
                }),
                (Arg::Buffer(node), None) => !varies(*node),
                (Arg::Variable(_) | Arg::Sizes, step) => step.is_none(),
            },
        )
    }

    /// Bytes of the values that have examples and that a task touches.
    fn with_examples(&self, task: usize) -> impl Iterator<Item = u64> {
        let (task, dag) = (&self.scheduled.dag.tasks[task], &self.scheduled.dag);
        let touched = task.reads.iter().chain(&task.writes);
        touched
            .filter(|b| self.example(self.scheduled.nodes[b.index()]).is_some())
            .map(|b| dag.buffers[b.index()].bytes)
    }

    /// Bytes of the largest of them.
    fn largest(&self, task: usize) -> u64 {
        self.with_examples(task).max().unwrap_or(0)
    }

    /// The time that a task takes longer in slices of so many examples, as modelled.
    fn extra(&self, task: usize, examples: u32) -> f64 {
        let (all, mut sizes) = (self.bounds.0[usize::from(self.batch.0)], self.bounds);
        sizes.0[usize::from(self.batch.0)] = examples.min(all);
        let slice = cost(&self.scheduled.tasks[task].spec, &sizes) as f64;
        slice * f64::from(all.div_ceil(examples.max(1)))
            - self.scheduled.dag.tasks[task].cost as f64
    }

    /// The program with the chosen tasks on slices of `examples` examples, or a few more: of the
    /// next number at which they may be cut. Tasks that could only be cut into far larger slices
    /// run whole, those with small values first. `None` if no slice is smaller than all.
    fn cut(&self, chosen: &[bool], examples: u32) -> Result<Option<Scheduled>, String> {
        let all = self.bounds.0[usize::from(self.batch.0)];
        let mut tasks: Vec<usize> = (0..chosen.len()).filter(|&task| chosen[task]).collect();
        tasks.sort_by_key(|&task| std::cmp::Reverse(self.largest(task)));
        let (mut unit, mut joins) = (1u32, vec![false; chosen.len()]);
        for task in tasks {
            let Some(own) = self.units[task] else {
                continue;
            };
            let both = (unit / gcd(unit, own)).saturating_mul(own);
            if both <= examples.saturating_mul(2) {
                (unit, joins[task]) = (both, true);
            }
        }
        let examples = examples
            .max(1)
            .checked_next_multiple_of(unit)
            .unwrap_or(all);
        if examples >= all || !joins.contains(&true) {
            return Ok(None);
        }
        let kernel = |task: usize| {
            if joins[task] {
                self.kernel(&self.scheduled.tasks[task], examples)
            } else {
                Ok(None)
            }
        };
        let kernels = (0..joins.len())
            .map(|task| Ok(kernel(task)?.map(Arc::new)))
            .collect::<Result<_, String>>()?;
        let last = (all - 1) / examples * examples;
        let slices = (0..all).step_by(examples as usize).map(|from| Slice {
            from,
            to: (from + examples).min(all),
            last: from == last,
        });
        Ok(Some(
            Rewriting::new(self, kernels, slices.collect(), examples).run(),
        ))
    }
}

fn gcd(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// The symbol that a batch is: the first length of the first input that has a symbol there alone.
fn batch(graph: &Graph) -> Option<Symbol> {
    let inputs = graph
        .ids()
        .filter(|&id| matches!(graph.node(id).op, Op::Input(_)));
    let mut first = inputs
        .filter_map(|id| graph.node(id).dims.first().copied())
        .filter(|d| d.as_fixed().is_none());
    first.find_map(|d| d.symbols().next().filter(|&s| Size::symbol(s) == d))
}

/// What a buffer of the program becomes.
enum Becomes {
    Whole(BufferId),
    /// One for each slice.
    Slices(Vec<BufferId>),
}

/// Making the new program from the old.
struct Rewriting<'a> {
    from: &'a Cuttable<'a>,
    /// For each task its kernel for slices, if it is chosen.
    chosen: Vec<Option<Arc<Kernel>>>,
    slices: Vec<Slice>,
    buffers: Vec<Becomes>,
    /// The sums of each chosen task that has any.
    sums: FxHashMap<usize, BufferId>,
    /// The new tasks of each old one.
    made: Vec<Vec<TaskId>>,
    new: Scheduled,
    sliced: Sliced,
}

impl<'a> Rewriting<'a> {
    fn new(
        from: &'a Cuttable<'a>,
        chosen: Vec<Option<Arc<Kernel>>>,
        slices: Vec<Slice>,
        examples: u32,
    ) -> Self {
        let (count, kernels) = (slices.len() as u32, chosen.iter().flatten().count());
        let sliced = Sliced {
            batch: from.batch,
            count,
            examples,
            kernels,
            tasks: vec![],
            buffers: vec![],
        };
        let (new, made) = (Scheduled::default(), vec![vec![]; chosen.len()]);
        Rewriting {
            from,
            chosen,
            slices,
            buffers: vec![],
            sums: FxHashMap::default(),
            made,
            new,
            sliced,
        }
    }

    fn run(mut self) -> Scheduled {
        self.place_buffers();
        let mut pending: Vec<usize> = Vec::new();
        for task in 0..self.chosen.len() {
            let joins = self.chosen[task].is_some();
            // Slices go one after the other through as many tasks as possible. A task that needs
            // the whole of what one of them makes ends that; one that needs nothing of theirs is
            // put before.
            if self.needs(task, &pending, joins) {
                self.emit_slices(&mut pending);
            }
            match joins {
                true => pending.push(task),
                false => self.emit(task, None),
            }
        }
        self.emit_slices(&mut pending);
        self.wait();
        self.in_place();
        self.new.sliced = Some(self.sliced);
        self.new
    }

    fn dag(&self) -> &'a Dag {
        &self.from.scheduled.dag
    }

    /// Values that only chosen tasks touch are cut.
    fn place_buffers(&mut self) {
        let (from, old) = (self.from, self.dag());
        let mut whole: Vec<bool> = old
            .buffers
            .iter()
            .map(|b| b.live_in || b.live_out)
            .collect();
        for (task, _) in old
            .tasks
            .iter()
            .zip(&self.chosen)
            .filter(|(_, chosen)| chosen.is_none())
        {
            task.reads
                .iter()
                .chain(&task.writes)
                .for_each(|b| whole[b.index()] = true);
        }
        for (b, buffer) in old.buffers.iter().enumerate() {
            let node = from.scheduled.nodes[b];
            let example = from.example(node).map(|example| {
                example.at(&from.bounds) as u64 * from.graph.node(node).dtype.bytes() as u64
            });
            let becomes = match example.filter(|_| !whole[b]) {
                None => Becomes::Whole(self.add_buffer(buffer.clone(), node, Piece::Whole)),
                Some(bytes) => Becomes::Slices(
                    (0..self.slices.len())
                        .map(|at| {
                            let slice = self.slices[at];
                            let bytes = bytes * u64::from(slice.to - slice.from) + from.guard;
                            let name = format!("{} {}..{}", buffer.name, slice.from, slice.to);
                            self.add_buffer(
                                Buffer {
                                    name,
                                    bytes,
                                    ..buffer.clone()
                                },
                                node,
                                Piece::Slice(slice),
                            )
                        })
                        .collect(),
                ),
            };
            self.buffers.push(becomes);
        }
        for task in 0..self.chosen.len() {
            let Some(bytes) = self.chosen[task]
                .as_ref()
                .map(|kernel| kernel.sums())
                .filter(|&bytes| bytes > 0)
            else {
                continue;
            };
            let of = &from.scheduled.tasks[task];
            let mut buffer = Buffer::new(
                format!("sums of {}", of.name),
                Kind::Gradient,
                bytes + from.guard,
            );
            buffer.align = ALIGN;
            let id = self.add_buffer(buffer, of.node, Piece::Sums(bytes));
            self.sums.insert(task, id);
        }
    }

    fn add_buffer(&mut self, buffer: Buffer, node: NodeId, piece: Piece) -> BufferId {
        self.new.nodes.push(node);
        self.sliced.buffers.push(piece);
        self.new.dag.add_buffer(buffer)
    }

    /// Whether a task needs what some pending ones make: all of it, if it is sliced itself.
    fn needs(&self, task: usize, pending: &[usize], sliced: bool) -> bool {
        let old = self.dag();
        let makes = |b: &BufferId| pending.iter().any(|&p| old.tasks[p].writes.contains(b));
        let needed =
            |b: &&BufferId| !sliced || matches!(self.buffers[b.index()], Becomes::Whole(_));
        let (task, waits) = (&old.tasks[task], |p: &usize| {
            old.tasks[task].after.contains(&TaskId(*p as u32))
        });
        task.reads
            .iter()
            .chain(&task.writes)
            .filter(needed)
            .any(makes)
            || !sliced && pending.iter().any(waits)
    }

    fn emit_slices(&mut self, pending: &mut Vec<usize>) {
        for slice in 0..self.slices.len() {
            pending
                .iter()
                .for_each(|&task| self.emit(task, Some(slice)));
        }
        pending.clear();
    }

    /// A buffer as a slice sees it.
    fn seen(&self, buffer: BufferId, slice: Option<usize>) -> BufferId {
        match (&self.buffers[buffer.index()], slice) {
            (Becomes::Whole(id), _) => *id,
            // What is in slices only chosen tasks touch.
            (Becomes::Slices(ids), slice) => ids[slice.unwrap_or(0)],
        }
    }

    fn emit(&mut self, task: usize, slice: Option<usize>) {
        let (from, old) = (self.from, &self.dag().tasks[task]);
        let seen = |list: &[BufferId]| {
            list.iter()
                .map(|&b| self.seen(b, slice))
                .collect::<Vec<_>>()
        };
        let mut new = slabwise_planner::Task {
            reads: seen(&old.reads),
            writes: seen(&old.writes),
            after: vec![],
            ..old.clone()
        };
        let mut kernel = from.scheduled.kernels[task].clone();
        if let (Some(slice), Some(sliced)) = (slice.map(|at| self.slices[at]), &self.chosen[task]) {
            kernel = sliced.clone();
            new.name = format!("{} {}..{}", old.name, slice.from, slice.to);
            new.workspace = kernel.workspace();
            let mut sizes = from.bounds;
            sizes.0[usize::from(from.batch.0)] = slice.to - slice.from;
            new.cost = cost(&from.scheduled.tasks[task].spec, &sizes);
            // A part of a whole buffer is written once, and sums are added to once.
            let whole = |b: &BufferId| matches!(self.buffers[b.index()], Becomes::Whole(_));
            new.repeatable &= old.rerun.is_none()
                && !old.writes.iter().any(whole)
                && !self.sums.contains_key(&task);
            new.writes.extend(self.sums.get(&task));
        }
        new.rerun = new.rerun.filter(|_| slice.is_none()).map(|rerun| Rerun {
            reads: seen(&rerun.reads),
            ..rerun
        });
        let id = self.new.dag.add_task(new);
        if let Some(rerun) = from
            .scheduled
            .reruns
            .get(&TaskId(task as u32))
            .filter(|_| slice.is_none())
        {
            self.new.reruns.insert(id, rerun.clone());
        }
        self.made[task].push(id);
        self.new.tasks.push(from.scheduled.tasks[task].clone());
        self.new.kernels.push(kernel);
        self.sliced.tasks.push(slice.map(|at| self.slices[at]));
    }

    /// Whoever waited for a task waits for all its slices. Of slices that sum, the last one writes
    /// what the task writes, so it alone waits.
    fn wait(&mut self) {
        for task in 0..self.made.len() {
            let before: Vec<TaskId> = self.dag().tasks[task]
                .after
                .iter()
                .flat_map(|a| self.made[a.index()].iter().copied())
                .collect();
            let folds = self.chosen[task]
                .as_ref()
                .and_then(|kernel| kernel.slicing())
                .is_some_and(|slicing| slicing.folds);
            for id in self.made[task]
                .iter()
                .skip(if folds { self.slices.len() - 1 } else { 0 })
            {
                self.new.dag.tasks[id.index()].after.clone_from(&before);
            }
        }
    }

    /// What may be computed in place may be so in each slice, if both buffers are cut.
    fn in_place(&mut self) {
        for pair in &self.dag().may_reuse {
            let of_task = &self.made[pair.task.index()];
            for (at, &task) in of_task.iter().enumerate() {
                let (from, to) = (
                    &self.buffers[pair.from.index()],
                    &self.buffers[pair.to.index()],
                );
                let (from, to) = match (from, to, &self.chosen[pair.task.index()]) {
                    (Becomes::Slices(from), Becomes::Slices(to), Some(_)) => (from[at], to[at]),
                    (Becomes::Whole(from), Becomes::Whole(to), None) => (*from, *to),
                    _ => continue,
                };
                self.new.dag.may_reuse.push(MayReuse { task, from, to });
            }
        }
    }
}

/// Where in a whole buffer an argument of a sliced kernel has its slice.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stretch {
    /// The examples.
    pub slice: Slice,
    /// Elements of an example.
    pub example: Size,
    /// Their type.
    pub dtype: DType,
}

impl Stretch {
    /// The first byte and the bytes, in a buffer of so many.
    pub fn bytes(&self, sizes: &Env, all: u64) -> (u64, u64) {
        let example = self.example.at(sizes).max(0) as u64 * self.dtype.bytes() as u64;
        let [from, to] =
            [self.slice.from, self.slice.to].map(|n| example.saturating_mul(u64::from(n)).min(all));
        (from, to - from)
    }
}
