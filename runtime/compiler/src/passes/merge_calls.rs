//! Merging calls: calls that do the work of other calls in addition to their own.
//!
//! Shared by the passes that move work from call to call: the calls under construction, with the
//! analyses that such a pass needs, and the program made of them. [`LoopMerge`] moves elementwise
//! operations.

mod loop_merge;

use std::borrow::Cow;

use rustc_hash::FxHashMap;
use slabwise_kernels::scalar::ScalarOp;
use slabwise_kernels::size::Env;
use slabwise_kernels::spec::analysis::prune;
use slabwise_kernels::spec::{Access, Body, Store};
use smallvec::SmallVec;

pub(super) use loop_merge::{LoopMerge, axes_along};

use super::cost::moved;
use crate::backend::Target;
use crate::graph::Phase;
use crate::ir::{CallId, KernelCall, Program, Rewriter, Source, Value, ValueId};
use crate::ops::{NodeId, Op};

/// The arguments of a call with the access to each.
type Accesses = Vec<(ValueId, Access)>;

/// The calls of a program, while the work of some of them moves to others.
pub(super) struct CallMerger<'a> {
    program: Cow<'a, Program>,
    /// Those of the program, in an order in which they can run, changed in place.
    calls: Vec<KernelCall>,
    /// For each call its arguments with the access to each.
    accesses: Vec<Accesses>,
    /// Those of the program, and new ones after them.
    pub values: Vec<Value>,
    pub around: Around,
    /// For each call the one that does its work.
    pub moved_to: Vec<Option<usize>>,
}

impl<'a> CallMerger<'a> {
    /// A program in which no work has moved.
    pub fn of(program: &'a Program) -> CallMerger<'a> {
        let accesses = accesses_of(&program.kernels);
        let moved_to = vec![None; program.kernels.len()];
        let order = order(&program.kernels, &accesses, &program.values, &moved_to);
        let (program, accesses) = match order.is_sorted() {
            true => (Cow::Borrowed(program), accesses),
            false => {
                let order = order.into_iter().map(|at| CallId(at as u32));
                let program = program.in_order(order);
                let accesses = accesses_of(&program.kernels);
                (Cow::Owned(program), accesses)
            }
        };
        CallMerger {
            calls: program.kernels.clone(),
            values: program.values.clone(),
            around: Around::of(&program, &accesses),
            program,
            accesses,
            moved_to,
        }
    }

    /// The calls, among them those whose work has moved.
    pub fn calls(&self) -> &[KernelCall] {
        &self.calls
    }

    /// The arguments of a call with the access to each.
    pub fn accesses(&self, at: usize) -> &[(ValueId, Access)] {
        &self.accesses[at]
    }

    /// Replaces a call.
    pub fn set(&mut self, at: usize, call: KernelCall) {
        self.accesses[at] = call.accesses().collect();
        self.calls[at] = call;
    }

    /// The call that does the work of a call.
    pub fn mover(&self, call: CallId) -> usize {
        self.moved_to[call.index()].unwrap_or(call.index())
    }

    /// Whether one of these calls has to run after a call.
    pub fn any_behind(&self, first: usize, mut these: impl Iterator<Item = usize>) -> bool {
        let mut behind = vec![false; self.calls.len()];
        let mut written = vec![false; self.values.len()];
        let order = order(&self.calls, &self.accesses, &self.values, &self.moved_to);
        for at in order.into_iter().skip_while(|&at| at != first) {
            let accesses = || self.accesses[at].iter().copied();
            let reads =
                |(value, access): (ValueId, _)| access != Access::Write && written[value.index()];
            let waits = || {
                let mut after = self.calls[at].after.iter();
                after.any(|before| behind[self.mover(*before)])
            };
            if at == first || accesses().any(reads) || waits() {
                behind[at] = true;
                for (value, access) in accesses() {
                    written[value.index()] |= access != Access::Read;
                }
            }
        }
        these.any(|call| behind[call])
    }

    /// The program with the calls that are left.
    pub fn finish(self) -> Program {
        let order = order(&self.calls, &self.accesses, &self.values, &self.moved_to);
        let unread = unread(&self.calls, &self.accesses, &self.values);
        let CallMerger {
            program,
            mut calls,
            mut values,
            moved_to,
            ..
        } = self;
        for call in moved_to.iter().flatten() {
            // Values that only its own work needs are in no memory.
            let stays = |at: &usize| moved_to[*at].is_none() && !unread[*at];
            let others = (0..calls.len()).filter(stays).map(|at| &calls[at]);
            calls[*call] = calls[*call].with_needed_stores(&values, others);
        }
        let mut rewriter = Rewriter::new(&program);
        for value in values.drain(program.values.len()..) {
            rewriter.add_value(value);
        }
        let mut added = vec![None; calls.len()];
        let mut calls: Vec<Option<KernelCall>> = calls.into_iter().map(Some).collect();
        for at in order {
            // Calls that waited for one whose results nothing reads any more wait for nothing else.
            if let (None, false, Some(call)) = (moved_to[at], unread[at], calls[at].take()) {
                added[at] = Some(rewriter.add_call(CallId(at as u32), call));
            }
        }
        for (at, call) in moved_to.iter().enumerate() {
            let by = call.and_then(|call| added[call]);
            rewriter.replace(CallId(at as u32), by);
        }
        rewriter.finish(program.micro_batches)
    }
}

/// An order in which the calls can run whose work has not moved: theirs, but that those come
/// earlier which others before them wait for.
fn order(
    calls: &[KernelCall],
    accesses: &[Accesses],
    values: &[Value],
    moved_to: &[Option<usize>],
) -> Vec<usize> {
    let stay: Vec<usize> = (0..calls.len())
        .filter(|&at| moved_to[at].is_none())
        .collect();
    let mut writers: Vec<SmallVec<[usize; 2]>> = vec![SmallVec::new(); values.len()];
    for &at in &stay {
        for &(value, access) in &accesses[at] {
            // Calls of one variable wait for each other.
            let is_computed = values[value.index()].source == Source::Computed;
            if access != Access::Read && is_computed {
                writers[value.index()].push(at);
            }
        }
    }
    let before = |at: usize| -> Vec<usize> {
        let reads = accesses[at].iter();
        let reads = reads.filter(|(_, access)| *access != Access::Write);
        let data = reads.flat_map(|(value, _)| &writers[value.index()]);
        let control = calls[at].after.iter().map(|call| call.index());
        let control = control.map(|call| moved_to[call].unwrap_or(call));
        let mut list: Vec<usize> = data.copied().chain(control).collect();
        list.sort_unstable_by(|a, b| b.cmp(a));
        list
    };
    let mut order = Vec::with_capacity(stay.len());
    let mut seen = vec![false; calls.len()];
    for at in stay {
        // Depth first, each call after those that it waits for.
        let mut open = vec![(at, false)];
        while let Some((at, done)) = open.pop() {
            if done {
                order.push(at);
            } else if !std::mem::replace(&mut seen[at], true) {
                open.push((at, true));
                open.extend(before(at).into_iter().map(|before| (before, false)));
            }
        }
    }
    order
}

fn accesses_of(calls: &[KernelCall]) -> Vec<Accesses> {
    calls.iter().map(|call| call.accesses().collect()).collect()
}

/// Facts about a program before any work has moved.
#[derive(Default)]
pub(super) struct Around {
    /// For each value the calls that write it, in order.
    pub writers: FxHashMap<ValueId, Vec<usize>>,
    /// For each value the number of calls that read it.
    pub readers: FxHashMap<ValueId, usize>,
    /// Whether the backward pass computes some number near a mean again, which must be the same
    /// number.
    pub repeats_near: bool,
}

impl Around {
    fn of(program: &Program, accesses: &[Accesses]) -> Around {
        let graph = &program.graph;
        let is_repeated = |id: NodeId| {
            let is_near = graph.node(id).op == Op::Scalar(ScalarOp::Near);
            is_near && graph.origin(id).phase == Phase::Recompute
        };
        let mut around = Around {
            repeats_near: graph.ids().any(is_repeated),
            ..Around::default()
        };
        for (at, accesses) in accesses.iter().enumerate() {
            for &(value, access) in accesses {
                if access != Access::Read {
                    around.writers.entry(value).or_default().push(at);
                }
                if access != Access::Write {
                    *around.readers.entry(value).or_default() += 1;
                }
            }
        }
        around
    }
}

/// For each call whether no other call reads its results, and nothing else needs them.
fn unread(calls: &[KernelCall], accesses: &[Accesses], values: &[Value]) -> Vec<bool> {
    let mut read = vec![false; values.len()];
    for &(value, access) in accesses.iter().flatten() {
        read[value.index()] |= access != Access::Write;
    }
    let is_needed = |value: ValueId| {
        let Value { source, output, .. } = &values[value.index()];
        read[value.index()] || *output || matches!(source, Source::Variable(_))
    };
    let is_unread = |call: &KernelCall| {
        let is_loop = call.spec.body == Body::Loop && call.after.is_empty();
        is_loop && !call.stored().any(is_needed)
    };
    calls.iter().map(is_unread).collect()
}

/// The modelled cycles of a call: of a loop those of its launches, or of its bytes if they take
/// longer; of a product those of its epilogue's bytes beside its own.
pub(super) fn cycles(target: &Target, call: &KernelCall, bounds: &Env) -> f64 {
    let own = target.cycles(&call.spec, bounds).unwrap_or(0.0);
    let bytes = moved(&call.spec, bounds) as f64;
    let bytes = target.sectors().map_or(0.0, |s| bytes / s.bytes_per_cycle);
    match call.spec.body {
        Body::Loop => own.max(bytes),
        _ => own + bytes,
    }
}

impl KernelCall {
    /// The call without the stores of internal values that none of these calls reads.
    pub(super) fn with_needed_stores<'a>(
        &self,
        values: &[Value],
        calls: impl Iterator<Item = &'a KernelCall> + Clone,
    ) -> KernelCall {
        let is_needed = |store: &&Store| {
            let value = self.operand(store.operand);
            let Value { source, output, .. } = &values[value.index()];
            let reads = |(read, access)| read == value && access != Access::Write;
            *output
                || *source != Source::Computed
                || calls
                    .clone()
                    .any(|call| call.args.contains(&value) && call.accesses().any(reads))
        };
        let stores: Vec<Store> = self.spec.stores.iter().filter(is_needed).copied().collect();
        self.with_stores(&stores)
    }

    /// The call with only these of its stores, and the code and operands that they need.
    pub(super) fn with_stores(&self, stores: &[Store]) -> KernelCall {
        let pruned = prune(&self.spec, stores);
        let (anchors, own) = self
            .args
            .split_at(self.args.len() - self.spec.operands.len());
        let own = own.iter().zip(pruned.operands);
        let own = own.filter_map(|(arg, kept)| kept.then_some(*arg));
        let args: Vec<ValueId> = anchors.iter().copied().chain(own).collect();
        let stay = |(from, to): &&(ValueId, ValueId)| args.contains(from) && args.contains(to);
        KernelCall {
            spec: pruned.spec,
            in_place: self.in_place.iter().filter(stay).copied().collect(),
            args,
            ..self.clone()
        }
    }
}
