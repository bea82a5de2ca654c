//! Micro-batches: kernels that run on a few examples of the batch at a time.
//!
//! No order of the kernels, and no recomputation, makes a slab smaller than the operands and
//! results of one kernel. Running kernels on micro-batches does (strip-mining; TVM and MCUNetV2 run
//! "patches", GPipe "micro-batches" of a whole model): a value that only such kernels touch exists
//! one micro-batch at a time, and a value that other kernels touch as well is written and read in
//! place, micro-batch by micro-batch. A kernel that sums over the batch, as for the gradient of a
//! weight, keeps partial sums between micro-batches. The results have the same bits
//! ([`slabwise_kernels::slice`]), for more time: weights are read and packed once for each
//! micro-batch.
//!
//! `Candidates::split` rewrites the program: each chosen call becomes one for each micro-batch. The
//! planner and its checker see a dag like any other, in which the calls of the micro-batches write
//! a buffer in parts, in order, as those of a concatenation do.

mod search;

use std::sync::Arc;

use rustc_hash::FxHashMap;
use slabwise_kernels::dtype::DType;
use slabwise_kernels::micro_batch::MicroBatch;
use slabwise_kernels::size::{Env, Size, Symbol};
use slabwise_kernels::spec::{Dims, MAX_ARGUMENTS};
use slabwise_planner::{Kind, Space};

use super::cost::cost;
use super::error::PassError;
use crate::backend::{Kernel, KernelCache, Target};
use crate::graph::Graph;
use crate::ir::{
    CallId, KernelCall, MicroBatches, Piece, Program, Recompute, Rewriter, Source, Value, ValueId,
};
use crate::ops::{NodeId, Op};
use crate::shape::elements;

pub(crate) use search::SplitBatch;

/// The shape of the part of a node's value that a micro-batch is.
fn dims_of(whole: &Dims, slice: MicroBatch, batch: Symbol) -> Dims {
    let examples = whole[0]
        .checked_div_size(Size::symbol(batch))
        .and_then(|n| n.checked_mul(Size::from(slice.to - slice.from)));
    let mut dims = whole.clone();
    dims[0] = examples.unwrap_or(dims[0]);
    dims
}

/// Where an argument of a call on a micro-batch lies inside of its value, if it is not all of it.
pub fn micro_batch_range(
    program: &Program,
    call: &KernelCall,
    argument: usize,
) -> Option<MicroBatchRange> {
    let slice = call.micro_batch?;
    let piece = program.value(call.args[argument]).piece;
    let kernel = call.kernel.as_ref()?;
    let steps = &kernel.micro_batching()?.steps;
    let example = (*steps.get(argument)?).filter(|_| piece == Piece::Whole)?;
    Some(MicroBatchRange {
        slice,
        example,
        dtype: kernel.spec().arguments()[argument].0.dtype,
    })
}

/// The calls of a program that can run on micro-batches, computed once for all choices among them.
pub(super) struct Candidates<'a> {
    program: &'a Program,
    /// By call: the values that it only reads, and those that it writes.
    touched: Vec<[Vec<ValueId>; 2]>,
    batch: Symbol,
    bounds: Env,
    target: &'a Target,
    kernels: &'a KernelCache,
    /// By call: whether it can run on micro-batches, and the number that their examples must be a
    /// multiple of.
    units: Vec<Option<u32>>,
    /// By call: whether its partial sums, if it has any, are smaller than all values of which it
    /// could read a part.
    pays: Vec<bool>,
}

impl<'a> Candidates<'a> {
    /// Examines every call of a program; `None` if it has no batch to split.
    fn new(
        program: &'a Program,
        target: &'a Target,
        kernels: &'a KernelCache,
    ) -> Result<Option<Self>, PassError> {
        let Some(batch) = batch(&program.graph) else {
            return Ok(None);
        };
        let mut candidates = Candidates {
            program,
            touched: program.kernels.iter().map(|c| program.touched(c)).collect(),
            batch,
            bounds: program.graph.symbols.bounds(),
            target,
            kernels,
            units: Vec::new(),
            pays: Vec::new(),
        };
        for (at, call) in program.kernels.iter().enumerate() {
            let kernel = candidates
                .kernel(call, u32::MAX)?
                .filter(|kernel| candidates.examples_are_contiguous(call, kernel));
            candidates.pays.push(
                kernel
                    .as_ref()
                    .is_some_and(|kernel| kernel.sums() < candidates.with_examples(at).sum()),
            );
            candidates
                .units
                .push(kernel.map(|kernel| kernel.slice_unit()));
        }
        Ok(Some(candidates))
    }

    /// A call's kernel for micro-batches of at most so many examples.
    fn kernel(&self, call: &KernelCall, most: u32) -> Result<Option<Arc<Kernel>>, PassError> {
        let kernel = self
            .kernels
            .sliced(&call.spec, self.batch, most, &self.bounds, self.target);
        kernel.map_err(|source| PassError::Prepare {
            kernel: call.name.clone(),
            source,
        })
    }

    /// Elements of an example, if a value has its examples one after the other.
    fn example(&self, node: NodeId) -> Option<Size> {
        let dims = &self.program.graph.node(node).dims;
        dims.first()?.checked_div_size(Size::symbol(self.batch))?;
        elements(dims)?.checked_div_size(Size::symbol(self.batch))
    }

    /// Whether a kernel accesses the examples of its arguments one after the other, each inside of
    /// its own bytes, and has no other argument that varies with the batch.
    fn examples_are_contiguous(&self, call: &KernelCall, kernel: &Kernel) -> bool {
        let Some(micro_batching) = kernel
            .micro_batching()
            .filter(|_| call.args.len() < MAX_ARGUMENTS)
        else {
            return false;
        };
        let varies = |node: NodeId| {
            let dims = &self.program.graph.node(node).dims;
            dims.iter().any(|d| d.symbols().any(|s| s == self.batch))
        };
        // One example alone, all other sizes at their bounds and at one.
        let alone = [self.bounds.0, [1; 8]].map(|mut sizes| {
            sizes[usize::from(self.batch.0)] = 1;
            Env(sizes)
        });
        let arguments = call.spec.arguments();
        call.args
            .iter()
            .zip(&micro_batching.steps)
            .zip(&arguments)
            .all(|((value, step), (operand, space, _))| {
                match (self.program.value(*value).node, step) {
                    (Some(node), Some(step)) => self.example(node).is_some_and(|example| {
                        let inside =
                            |env| operand.extent(space, env) <= example.at(env).max(0) as u64;
                        example == *step && alone.iter().all(inside)
                    }),
                    (Some(node), None) => !varies(node),
                    (None, step) => step.is_none(),
                }
            })
    }

    /// Bytes of the values that have examples and that a call touches.
    fn with_examples(&self, call: usize) -> impl Iterator<Item = u64> {
        let values = self.touched[call].iter().flatten();
        let values = values.map(|&value| self.program.value(value));
        values
            .filter(|value| value.node.is_some_and(|node| self.example(node).is_some()))
            .map(|value| value.bytes + self.program.guard)
    }

    /// Bytes of the largest of them.
    fn largest(&self, call: usize) -> u64 {
        self.with_examples(call).max().unwrap_or(0)
    }

    /// The time that a call takes longer on micro-batches of so many examples, as modelled.
    fn extra(&self, call: usize, examples: u32) -> f64 {
        let (all, mut sizes) = (self.bounds.0[usize::from(self.batch.0)], self.bounds);
        sizes.0[usize::from(self.batch.0)] = examples.min(all);
        let one = cost(&self.program.kernels[call].spec, &sizes) as f64;
        one * f64::from(all.div_ceil(examples.max(1))) - self.program.kernels[call].cost as f64
    }

    /// The program with the chosen calls on micro-batches of `examples` examples, or a few more: of
    /// the next number at which they may be split. Calls that could only be split into far larger
    /// ones run whole, those with small values first. `None` if no micro-batch is smaller than the
    /// batch.
    fn split(&self, chosen: &[bool], examples: u32) -> Result<Option<Program>, PassError> {
        let all = self.bounds.0[usize::from(self.batch.0)];
        let mut calls: Vec<usize> = (0..chosen.len()).filter(|&call| chosen[call]).collect();
        calls.sort_by_key(|&call| std::cmp::Reverse(self.largest(call)));
        let (mut unit, mut splits) = (1u32, vec![false; chosen.len()]);
        for call in calls {
            let Some(own) = self.units[call] else {
                continue;
            };
            let both = (unit / gcd(unit, own)).saturating_mul(own);
            if both <= examples.saturating_mul(2) {
                (unit, splits[call]) = (both, true);
            }
        }
        let examples = examples
            .max(1)
            .checked_next_multiple_of(unit)
            .unwrap_or(all);
        if examples >= all || !splits.contains(&true) {
            return Ok(None);
        }
        let kernel = |call: usize| match splits[call] {
            true => self.kernel(&self.program.kernels[call], examples),
            false => Ok(None),
        };
        let kernels = (0..splits.len())
            .map(kernel)
            .collect::<Result<_, PassError>>()?;
        let last = (all - 1) / examples * examples;
        let slices = (0..all).step_by(examples as usize).map(|from| MicroBatch {
            from,
            to: (from + examples).min(all),
            last: from == last,
        });
        Ok(Some(
            Splitting::new(self, kernels, slices.collect()).run(examples),
        ))
    }
}

fn gcd(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// The symbol of the batch: the first length of the first input that has a symbol there alone.
fn batch(graph: &Graph) -> Option<Symbol> {
    let inputs = graph
        .ids()
        .filter(|&id| matches!(graph.node(id).op, Op::Input(_)));
    let mut first = inputs
        .filter_map(|id| graph.node(id).dims.first().copied())
        .filter(|d| d.as_fixed().is_none());
    first.find_map(|d| d.symbols().next().filter(|&s| Size::symbol(s) == d))
}

/// The new values of an old one.
enum Becomes {
    Whole(ValueId),
    /// One for each micro-batch.
    Slices(Vec<ValueId>),
}

/// The construction of the new program.
struct Splitting<'a> {
    from: &'a Candidates<'a>,
    /// By call: its kernel for micro-batches, if it is chosen.
    chosen: Vec<Option<Arc<Kernel>>>,
    slices: Vec<MicroBatch>,
    values: Vec<Becomes>,
    /// The partial sums of each chosen call that has any.
    sums: FxHashMap<usize, ValueId>,
    new: Rewriter<'a>,
}

impl<'a> Splitting<'a> {
    fn new(
        from: &'a Candidates<'a>,
        chosen: Vec<Option<Arc<Kernel>>>,
        slices: Vec<MicroBatch>,
    ) -> Self {
        Splitting {
            from,
            chosen,
            slices,
            values: vec![],
            sums: FxHashMap::default(),
            new: Rewriter::without_values(from.program),
        }
    }

    fn run(mut self, examples: u32) -> Program {
        self.place_values();
        let mut pending: Vec<usize> = Vec::new();
        for call in 0..self.chosen.len() {
            let splits = self.chosen[call].is_some();
            // One micro-batch after the other goes through as many calls as possible. A call that
            // needs the whole of an output of theirs ends that; one that needs none of their
            // outputs is put before.
            if self.needs(call, &pending, splits) {
                self.emit_slices(&mut pending);
            }
            match splits {
                true => pending.push(call),
                false => self.emit(call, None),
            }
        }
        self.emit_slices(&mut pending);
        let micro_batches = MicroBatches {
            batch: self.from.batch,
            count: self.slices.len() as u32,
            examples,
            kernels: self.chosen.iter().flatten().count(),
        };
        self.new.finish(Some(micro_batches))
    }

    fn program(&self) -> &'a Program {
        self.from.program
    }

    /// Values that only chosen calls touch are split.
    fn place_values(&mut self) {
        let (from, old) = (self.from, self.program());
        let mut whole: Vec<bool> = old
            .values
            .iter()
            .map(|v| !v.is_planned() || v.is_input() || v.output)
            .collect();
        for (touched, _) in from
            .touched
            .iter()
            .zip(&self.chosen)
            .filter(|(_, chosen)| chosen.is_none())
        {
            touched
                .iter()
                .flatten()
                .for_each(|v| whole[v.index()] = true);
        }
        for (value, whole) in old.values.iter().zip(whole) {
            let example = value.node.and_then(|node| from.example(node));
            let bytes = example
                .map(|example| example.at(&from.bounds) as u64 * value.dtype.bytes() as u64)
                .filter(|_| !whole);
            let becomes = match bytes {
                None => Becomes::Whole(self.new.add_value(value.clone())),
                Some(bytes) => {
                    let part = |&slice: &MicroBatch| Value {
                        name: format!("{} {}..{}", value.name, slice.from, slice.to),
                        piece: Piece::MicroBatch(slice),
                        dims: dims_of(&value.dims, slice, from.batch),
                        bytes: bytes * u64::from(slice.to - slice.from),
                        ..value.clone()
                    };
                    let parts = self.slices.iter().map(part);
                    Becomes::Slices(parts.map(|part| self.new.add_value(part)).collect())
                }
            };
            self.values.push(becomes);
        }
        for call in 0..self.chosen.len() {
            let kernel = self.chosen[call].as_ref();
            let Some(bytes) = kernel
                .map(|kernel| kernel.sums())
                .filter(|&bytes| bytes > 0)
            else {
                continue;
            };
            let of = &old.kernels[call];
            let sums = Value {
                name: format!("sums of {}", of.name),
                source: Source::Computed,
                node: Some(of.node),
                piece: Piece::PartialSums,
                dtype: DType::F32,
                dims: Dims::from_slice(&[Size::fixed((bytes / 4) as i64)]),
                row_padding: 0,
                channels_last: false,
                bytes,
                data_dependent: false,
                kind: Kind::Gradient,
                space: Space::Device,
                output: false,
            };
            self.sums.insert(call, self.new.add_value(sums));
        }
    }

    /// Whether a call needs an output of pending ones: all of it, if it is split itself.
    fn needs(&self, call: usize, pending: &[usize], splits: bool) -> bool {
        let touched = &self.from.touched;
        let written = |v: &ValueId| pending.iter().any(|&p| touched[p][1].contains(v));
        let needed = |v: &&ValueId| !splits || matches!(self.values[v.index()], Becomes::Whole(_));
        let after = &self.program().kernels[call].after;
        let depends = |p: &usize| after.contains(&CallId(*p as u32));
        touched[call].iter().flatten().filter(needed).any(written)
            || !splits && pending.iter().any(depends)
    }

    fn emit_slices(&mut self, pending: &mut Vec<usize>) {
        for slice in 0..self.slices.len() {
            pending
                .iter()
                .for_each(|&call| self.emit(call, Some(slice)));
        }
        pending.clear();
    }

    fn emit(&mut self, call: usize, slice: Option<usize>) {
        let (from, old) = (self.from, &self.program().kernels[call]);
        let values = &self.values;
        // Only chosen calls touch values that are split.
        let mut seen = |value: ValueId| match &values[value.index()] {
            Becomes::Whole(id) => *id,
            Becomes::Slices(ids) => ids[slice.unwrap_or(0)],
        };
        let is_whole = |value: &ValueId| matches!(values[value.index()], Becomes::Whole(_));
        let mut new = old.clone();
        new.in_place
            .retain(|(a, b)| is_whole(a) == slice.is_none() && is_whole(b) == slice.is_none());
        new.rename(&mut seen);
        if let (Some(slice), Some(sliced)) = (slice.map(|at| self.slices[at]), &self.chosen[call]) {
            new.name = format!("{} {}..{}", old.name, slice.from, slice.to);
            let mut sizes = from.bounds;
            sizes.0[usize::from(from.batch.0)] = slice.to - slice.from;
            new.cost = cost(&old.spec, &sizes);
            // A part of a whole value is written once, and partial sums are added to once.
            let repeatable = matches!(old.recompute, Recompute::Same)
                && !from.touched[call][1].iter().any(is_whole)
                && !self.sums.contains_key(&call);
            if !repeatable {
                new.recompute = Recompute::Never;
            }
            // If micro-batches accumulate a sum, only the last one writes the outputs, so it alone
            // has the dependencies.
            let folds = sliced
                .micro_batching()
                .is_some_and(|micro_batching| micro_batching.folds);
            if folds && !slice.last {
                new.after.clear();
            }
            new.args.extend(self.sums.get(&call));
            new.kernel = Some(sliced.clone());
            new.micro_batch = Some(slice);
        }
        self.new.add_call(CallId(call as u32), new);
    }
}

/// The part of a whole value that an argument of a call on a micro-batch is.
#[derive(Clone, Copy, Debug)]
pub struct MicroBatchRange {
    /// The examples.
    pub slice: MicroBatch,
    /// Elements of an example.
    pub example: Size,
    /// Their type.
    pub dtype: DType,
}

impl MicroBatchRange {
    /// The first byte and the bytes, in a buffer of so many.
    pub fn bytes(&self, sizes: &Env, all: u64) -> (u64, u64) {
        let example = self.example.at(sizes).max(0) as u64 * self.dtype.bytes() as u64;
        let [from, to] =
            [self.slice.from, self.slice.to].map(|n| example.saturating_mul(u64::from(n)).min(all));
        (from, to - from)
    }
}
