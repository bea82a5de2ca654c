//! Late fusion: recomputed kernels are fused with one another.
//!
//! In the forward pass a norm over the batch separates a convolution from the activation after it.
//! When both are recomputed the norm's statistics are known already, and the activation is one more
//! step after the convolution: one kernel computes both, the value between them is not read from
//! memory, and it is not written either unless another kernel reads it. Outputs of a recomputed
//! kernel that no kernel reads are pruned as well.
//!
//! The fusion of the graph ([`super::fuse`]) cannot do this. It decides from dependencies alone,
//! while here the plan's order says which calls are neighbours, and its live bytes say whether a
//! fused call still fits into the budget (docs/adr/0009-late-fusion-of-recomputed-kernels.md has
//! the measurements). Only recomputed calls change: all others stay as they were planned.

use rustc_hash::FxHashSet;
use slabwise_kernels::dtype::DType;
use slabwise_kernels::spec::{Body, Inst, MAX_ARGUMENTS, Spec, Store, ValueId as InstId};
use slabwise_planner::{self as planner, Plan, TaskId};

use super::cost::cost;
use super::error::PassError;
use super::pipeline::Pass;
use super::prune_outputs::prune_outputs;
use crate::backend::{Choice, KernelCache, Target};
use crate::ir::{CallId, KernelCall, Program, Recompute, Rewriter, ValueId};

/// Most instructions of a kernel made of several.
const INSTRUCTIONS_MAX: usize = 128;

/// The pass. Its result is the program with recomputed calls fused, where one reads per element a
/// value that another writes, and its recomputed calls; `None` if there is nothing to fuse.
///
/// The outputs of a fused kernel exist earlier, so kernels are fused only as long as the live bytes
/// stay within the room.
pub(crate) struct FuseRecomputed<'a> {
    /// The plan, whose order the calls of the result are in.
    pub plan: &'a Plan,
    /// The recomputed calls.
    pub recomputed: &'a [TaskId],
    /// The bytes that the slab may have.
    pub room: u64,
    /// The device.
    pub target: &'a Target,
    /// The kernels that are prepared already.
    pub kernels: &'a KernelCache,
}

impl Pass for FuseRecomputed<'_> {
    const NAME: &'static str = "fuse-recomputed";
    type Input = Program;
    type Output = Option<(Program, Vec<TaskId>)>;

    fn run(&self, program: &Program) -> Result<Self::Output, PassError> {
        // Micro-batches have their own kernels.
        if program.micro_batches.is_some() || self.recomputed.is_empty() {
            return Ok(None);
        }
        let order = &self.plan.order;
        let live = planner::live_bytes(&program.to_dag(), self.plan);
        let recomputed: FxHashSet<TaskId> = self.recomputed.iter().copied().collect();
        let steps: Vec<usize> = (0..order.len())
            .filter(|&step| recomputed.contains(&order[step]))
            .collect();
        let ordered = program.in_order(order.iter().map(|task| CallId(task.0)));
        let mut fusion = Fusion::new(&ordered, live, &steps, self.target);
        for &step in &steps {
            fusion.fuse_into_producer(step, self.room);
        }
        steps.iter().for_each(|&step| fusion.prune_unread(step));
        if fusion.changed.is_empty() {
            Ok(None)
        } else {
            fusion.finish(&steps, self.kernels).map(Some)
        }
    }
}

/// The program under change. Its calls are in the order of the plan, so that a call's index is its
/// step.
struct Fusion<'a> {
    program: &'a Program,
    /// By step: the call as it is now; none if another one does its work.
    calls: Vec<Option<KernelCall>>,
    /// By step: the values that the call only reads, and those that it writes.
    touched: Vec<[Vec<ValueId>; 2]>,
    /// By step: the one that does its work.
    into: Vec<usize>,
    /// By value: its only writer, if it has exactly one.
    writer: Vec<Option<usize>>,
    /// By value: the steps that read or write it.
    users: Vec<Vec<u32>>,
    /// By step: the bytes of the slab in use.
    live: Vec<u64>,
    recomputed: FxHashSet<usize>,
    changed: FxHashSet<usize>,
    target: &'a Target,
}

impl<'a> Fusion<'a> {
    fn new(program: &'a Program, live: Vec<u64>, recomputed: &[usize], target: &'a Target) -> Self {
        let values = program.values.len();
        let (mut writer, mut written) = (vec![None; values], vec![0u32; values]);
        let mut users = vec![Vec::new(); values];
        let touched: Vec<_> = program.kernels.iter().map(|c| program.touched(c)).collect();
        for (at, [reads, writes]) in touched.iter().enumerate() {
            reads
                .iter()
                .chain(writes)
                .for_each(|v| users[v.index()].push(at as u32));
            for v in writes {
                (writer[v.index()], written[v.index()]) = (Some(at), written[v.index()] + 1);
            }
        }
        writer
            .iter_mut()
            .zip(&written)
            .filter(|(_, n)| **n > 1)
            .for_each(|(writer, _)| *writer = None);
        Fusion {
            calls: program.kernels.iter().cloned().map(Some).collect(),
            touched,
            into: (0..program.kernels.len()).collect(),
            writer,
            users,
            live,
            recomputed: recomputed.iter().copied().collect(),
            changed: FxHashSet::default(),
            program,
            target,
        }
    }

    fn bytes<'v>(&self, values: impl Iterator<Item = &'v ValueId>) -> u64 {
        values.map(|&v| self.program.occupied(v)).sum()
    }

    /// Fuses a call into its latest producer, if that producer is recomputed too and no other
    /// dependency separates them.
    fn fuse_into_producer(&mut self, at: usize, room: u64) {
        let Some(second) = &self.calls[at] else {
            return;
        };
        let [reads, writes] = &self.touched[at];
        let producers = reads.iter().filter_map(|v| self.writer[v.index()]);
        let Some(first) = producers.max() else {
            return;
        };
        let separated = second.after.iter().any(|a| self.into[a.index()] >= first);
        let known =
            |v: &ValueId| self.writer[v.index()].is_some() || self.program.value(*v).is_input();
        let alone = writes.iter().all(|v| self.writer[v.index()] == Some(at));
        if separated
            || !alone
            || !self.recomputed.contains(&first)
            || first >= at
            || !reads.iter().all(known)
        {
            return;
        }
        let Some(fused) = self.calls[first]
            .as_ref()
            .filter(|first| self.may_have_epilogue(first))
            .and_then(|first| fused(self.program, first, second))
        else {
            return;
        };
        // A kernel reads one copy of a node's value.
        let mut touched: Vec<ValueId> = [&self.touched[first], &self.touched[at]]
            .into_iter()
            .flatten()
            .flatten()
            .copied()
            .collect();
        touched.sort_unstable();
        touched.dedup();
        let nodes: FxHashSet<_> = touched
            .iter()
            .map(|&v| self.program.value(v).node)
            .collect();
        if nodes.len() < touched.len() {
            return;
        }
        let (more, less) = self.moved(first, at);
        if self.live[first..at]
            .iter()
            .any(|live| (live + more).saturating_sub(less) > room)
        {
            return;
        }
        self.live[first..at]
            .iter_mut()
            .for_each(|live| *live = (*live + more).saturating_sub(less));
        for v in writes {
            self.writer[v.index()] = Some(first);
        }
        touched
            .iter()
            .for_each(|v| self.users[v.index()].push(first as u32));
        self.touched[first] = self.program.touched(&fused);
        self.calls[first] = Some(fused);
        self.calls[at] = None;
        self.into
            .iter_mut()
            .filter(|into| **into == at)
            .for_each(|into| *into = first);
        self.changed.remove(&at);
        self.changed.insert(first);
        self.fuse_into_producer(first, room);
    }

    /// Whether the sums of a call keep their bits with another epilogue. On other devices
    /// than the CPU the kernel of a product may depend on them, or be a measured choice.
    fn may_have_epilogue(&self, call: &KernelCall) -> bool {
        let late_epilogues = self.target.capabilities().late_epilogues;
        call.spec.body == Body::Loop || late_epilogues && call.spec.body.is_product()
    }

    /// The bytes that are live earlier if the second call runs with the first, and those that are
    /// not live any more: the outputs of the first that only the second reads.
    fn moved(&self, first: usize, second: usize) -> (u64, u64) {
        let reads =
            |v: &ValueId, at: usize| self.calls[at].is_some() && self.touched[at][0].contains(v);
        let alone = |v: &&ValueId| {
            let others = || {
                self.users[v.index()]
                    .iter()
                    .any(|&at| at as usize != second && reads(v, at as usize))
            };
            !self.program.value(**v).output && reads(v, second) && !others()
        };
        (
            self.bytes(self.touched[second][1].iter()),
            self.bytes(self.touched[first][1].iter().filter(alone)),
        )
    }

    /// Prunes the outputs of a call that no call reads.
    fn prune_unread(&mut self, at: usize) {
        let Some(call) = self.calls[at]
            .as_ref()
            .filter(|call| call.spec.stores.len() > 1 && self.may_have_epilogue(call))
        else {
            return;
        };
        let touches = |other: usize, v: &ValueId| {
            other != at
                && self.calls[other].is_some()
                && self.touched[other].iter().flatten().any(|t| t == v)
        };
        let unread = |v: ValueId| {
            let mut users = self.users[v.index()].iter();
            let touched = users.any(|&other| touches(other as usize, &v));
            self.program.value(v).is_planned() && !touched && !self.program.value(v).output
        };
        let stores: Vec<Store> = call
            .spec
            .stores
            .iter()
            .copied()
            .filter(|s| !unread(call.operand(s.operand)))
            .collect();
        if stores.len() == call.spec.stores.len() {
            return;
        }
        let Some(fewer) = prune_outputs(self.program, self.target, call, &stores) else {
            return;
        };
        self.touched[at] = self.program.touched(&fewer);
        self.calls[at] = Some(fewer);
        self.changed.insert(at);
    }

    /// The new program and its recomputed calls.
    fn finish(
        self,
        recomputed: &[usize],
        kernels: &KernelCache,
    ) -> Result<(Program, Vec<TaskId>), PassError> {
        let bounds = self.program.graph.symbols.bounds();
        let mut rewriter = Rewriter::new(self.program);
        for (at, call) in (0u32..).zip(self.calls) {
            let Some(mut call) = call else { continue };
            if self.changed.contains(&(at as usize)) {
                let choice = Choice::default();
                let made = kernels.prepare(&call.spec, &bounds, self.target, false, choice);
                let made = made.map_err(|source| PassError::Prepare {
                    kernel: call.name.clone(),
                    source,
                })?;
                call.kernel = Some(made);
                call.cost = cost(&call.spec, &bounds);
                call.recompute = Recompute::Never;
            }
            rewriter.add_call(CallId(at), call);
        }
        for (at, &into) in (0u32..).zip(&self.into) {
            if into != at as usize {
                let by = rewriter.done_by(CallId(into as u32)).to_vec();
                rewriter.replace(CallId(at), by);
            }
        }
        let mut runs: Vec<TaskId> = recomputed
            .iter()
            .flat_map(|&at| rewriter.done_by(CallId(at as u32)))
            .map(|call| TaskId(call.0))
            .collect();
        runs.sort_unstable();
        runs.dedup();
        Ok((rewriter.finish(None), runs))
    }
}

/// Two calls as one, the second of which reads values of the first at the same points.
fn fused(program: &Program, first: &KernelCall, second: &KernelCall) -> Option<KernelCall> {
    let (a, b) = (&first.spec, &second.spec);
    let pointwise = a.reduced == 0 && b.reduced == 0 && b.body == Body::Loop && a.dims == b.dims;
    let assigns = |call: &KernelCall| !program.assigned(call).is_empty();
    if !pointwise || assigns(first) || assigns(second) {
        return None;
    }
    // For each operand of the second, the value of the first that it would read back.
    let read_back = |k: usize| -> Option<Option<InstId>> {
        let stored = |s: &&Store| first.operand(s.operand) == second.args[k];
        let Some(store) = a.stores.iter().find(stored) else {
            return Some(None);
        };
        // A value that is narrowed when it is stored is another value.
        let exact = matches!(b.operands[k].dtype, DType::F32 | DType::I32)
            && a.operands[usize::from(store.operand)] == b.operands[k];
        exact.then_some(Some(store.value))
    };
    let values: Vec<Option<InstId>> = (0..b.operands.len())
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
    let mut value: Vec<InstId> = Vec::with_capacity(b.code.len());
    for inst in &b.code {
        let of = |v: InstId| value[usize::from(v)];
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
        value.push(spec.code.len() as InstId);
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
    // In place only over values that the other call does not touch.
    let apart = |pair: &&(ValueId, ValueId), other: &KernelCall| !other.args.contains(&pair.0);
    let mut in_place: Vec<_> = first
        .in_place
        .iter()
        .filter(|pair| apart(pair, second))
        .copied()
        .collect();
    in_place.extend(second.in_place.iter().filter(|pair| apart(pair, first)));
    Some(KernelCall {
        after: first.after.iter().chain(&second.after).copied().collect(),
        in_place,
        ..KernelCall::new(
            format!("{} & {}", first.name, second.name),
            spec,
            args,
            first.node,
        )
    })
}
