//! Translation validation: a proof that rewritten kernels compute the values of the kernels before.
//!
//! Both programs are executed symbolically, kernel by kernel in an order in which they may run. A
//! slot (a buffer, a variable) holds a hash-consed term for its contents: the regions written to
//! it, each with the expression of one point over graph inputs and variables. Equal terms are equal
//! numbers, so two programs agree if their outputs, the variables after them and their bounds
//! checks hold equal terms. Nothing is commuted or reassociated, because both would change bits.
//!
//! A kernel that loads the elements that another one stored, at the same points, sees the stored
//! expression itself. Fusing the two, splitting them, computing a value a second time, pruning
//! outputs and moving a producer into a prologue therefore all leave the terms alone, while a wrong
//! operand, a missing dependency or a side effect that happens twice does not. Sums are equal only
//! if the kernels split them into the same parts, about which the target is asked.
//!
//! The method is that of regalloc2's checker and of translation validation (Pnueli, Siegel and
//! Singerman, TACAS 1998); the module shares no code with the passes that it checks, and only
//! `sums` answers both it and them.

mod orders;
mod region;
mod text;

use std::collections::{BTreeMap, BTreeSet};

use rustc_hash::FxHashMap;
use slabwise_kernels::dtype::{DType, Lane};
use slabwise_kernels::scalar::ScalarOp;
use slabwise_kernels::size::{Env, Size};
use slabwise_kernels::spec::{Access, Body, Inst, PoolKind, ReduceOp, Spec};
use slabwise_planner::{TaskId, Work};
use smallvec::SmallVec;

use self::orders::Orders;
use self::region::{Axis, BOUND, Region, Renaming, rename, unmoved};
use crate::ir::{KernelCall, Program, Source, Transfer, Value};
use crate::ops::NodeId;

/// Checks that a rewritten program, in the order of its plan, computes the values of the program
/// before, in an order in which that may run. `alike` says of two loops whether both sum in the same
/// order; it is only asked of those over one space.
///
/// # Errors
/// The first difference.
pub fn validate(
    before: (&Program, &[TaskId]),
    after: (&Program, &[TaskId]),
    alike: &dyn Fn(&Spec, &Spec) -> bool,
) -> Result<(), Mismatch> {
    compared(before, after, Orders::new(Some(alike)))
}

/// Checks the same, whatever the order of sums.
///
/// # Errors
/// The first difference.
pub fn validate_values(
    before: (&Program, &[TaskId]),
    after: (&Program, &[TaskId]),
) -> Result<(), Mismatch> {
    compared(before, after, Orders::new(None))
}

fn compared(
    (before, before_order): (&Program, &[TaskId]),
    (after, after_order): (&Program, &[TaskId]),
    orders: Orders<'_>,
) -> Result<(), Mismatch> {
    let mut interpreter = Interpreter::new(before.graph.symbols.bounds(), orders);
    let old = execute(&mut interpreter, before, before_order)?;
    let new = execute(&mut interpreter, after, after_order)?;
    let (mut old_results, mut new_results) = (results(before, &old), results(after, &new));
    // A variable that no call touches keeps its value.
    for (v, info) in (0..).zip(&before.graph.variables) {
        let kept = interpreter.term(Node::Initial(VARIABLES + v));
        let key = (v, info.name.to_string());
        old_results.entry(key.clone()).or_insert(Some(kept));
        new_results.entry(key).or_insert(Some(kept));
    }
    interpreter.compare(&old_results, &new_results)?;
    if old.checks != new.checks {
        let count = |one: &State, other: &State| one.checks.difference(&other.checks).count();
        return Err(Mismatch::Checks {
            before: count(&old, &new),
            after: count(&new, &old),
        });
    }
    Ok(())
}

/// The results of a program, by a number of their own and their name.
type Results = BTreeMap<(u64, String), Option<Term>>;

/// The state after the last kernel of a program.
fn execute(
    interpreter: &mut Interpreter<'_>,
    program: &Program,
    order: &[TaskId],
) -> Result<State, Mismatch> {
    let outside = |slot: usize| match program.values[slot].source {
        Source::Input(i) => Some(INPUTS + u64::from(i)),
        Source::Variable(v) => Some(VARIABLES + u64::from(v)),
        Source::Sizes => Some(SIZES),
        Source::Computed => None,
    };
    let mut state = interpreter.state(program.values.len(), outside);
    let work = program.work();
    for task in order {
        let call = match work[task.index()] {
            Work::Run(call) => &program.kernels[call.index()],
            Work::Start(transfer) => match program.transfers[transfer as usize] {
                Transfer::Ranks(call) => program.call(call),
                Transfer::Host(copy) => {
                    interpreter.copy(&mut state, copy.from.index(), copy.to.index());
                    continue;
                }
            },
            Work::Finish(_) => continue,
        };
        interpreter.launch(&mut state, call)?;
    }
    Ok(state)
}

/// The terms of the outputs of a program and of the variables that it touches.
fn results(program: &Program, state: &State) -> Results {
    // Outputs are numbered in the order of their nodes, whatever other nodes a graph has.
    let outputs: BTreeSet<NodeId> = program
        .values
        .iter()
        .filter(|value| value.output)
        .filter_map(|value| value.node)
        .collect();
    let outputs: Vec<NodeId> = outputs.into_iter().collect();
    let result = |(slot, value): (usize, &Value)| {
        let key = match (value.source, value.node) {
            (Source::Variable(v), _) => {
                let info = &program.graph.variables[v as usize];
                (u64::from(v), info.name.to_string())
            }
            (_, Some(node)) if value.output => {
                let number = outputs.binary_search(&node).unwrap_or(outputs.len());
                (VARIABLES + number as u64, program.graph.name(node))
            }
            _ => return None,
        };
        // Examples that no launch has written leave a result without a meaning.
        let contents = state.slots[slot].filter(|_| !state.examples.contains_key(&slot));
        Some((key, contents))
    };
    program
        .values
        .iter()
        .enumerate()
        .filter_map(result)
        .collect()
}

/// The initial contents of the sizes, of input 0 and of variable 0.
const SIZES: u64 = 0;
const INPUTS: u64 = 1;
const VARIABLES: u64 = 1 << 32;

/// A hash-consed term: equal ids are equal terms.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Term(u32);

/// A store to a slot: where, and the value at each point.
type Part = (Region, Term);

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Node {
    /// The contents that a slot has before the program runs.
    Initial(u64),
    /// Contents that nothing has written.
    Undefined,
    /// Contents after stores.
    Written {
        before: Term,
        parts: Vec<Part>,
    },
    /// One element of contents that no single store has written.
    Load(Term, DType, Region),
    /// The value that an anchor yields at a point of its space, whose axes are renamed.
    Acc(Term, Renaming),
    /// A result that an anchor stores besides, likewise.
    Side(Term, Renaming),
    /// An anchor: its parameters as text, and the contents of its operands.
    Anchor(String, Vec<Term>),
    Const(Lane, u32),
    /// A linear function of the coordinates: axes and strides.
    Index(Vec<(Axis, Size)>),
    Uniform(Term, Region, u32, Term),
    Op(ScalarOp, SmallVec<[Term; 3]>),
    Cast(Term, Lane),
    /// A reduction over axes of these lengths above 1, from [`BOUND`] on, in one of the known orders.
    Reduce(ReduceOp, Term, Vec<Size>, u32),
    /// A value narrowed to a stored type.
    Narrowed(DType, Term),
}

/// A launch for some of the examples of a batch.
#[derive(Clone, Debug)]
struct MicroBatch {
    /// The first example.
    from: u32,
    /// One more than the last example.
    to: u32,
    /// Whether it is the launch for the last examples.
    last: bool,
    /// For each argument, whether it holds one part for each example.
    batched: Vec<bool>,
    /// Whether the kernel sums over the batch.
    reduces: bool,
    /// The slot of its partial sums, if it keeps them in one.
    sums: Option<usize>,
}

impl MicroBatch {
    /// The examples of a call, if those are not all.
    fn of(call: &KernelCall, arguments: usize) -> Option<MicroBatch> {
        let slice = call.micro_batch?;
        let micro_batching = call.kernel.as_ref()?.micro_batching()?;
        Some(MicroBatch {
            from: slice.from,
            to: slice.to,
            last: slice.last,
            batched: micro_batching.steps.iter().map(Option::is_some).collect(),
            reduces: micro_batching.folds,
            sums: call.args.get(arguments).map(|sums| sums.index()),
        })
    }

    /// Whether the launch adds to partial sums. The one for the last examples stores the sums, and
    /// only that one reads the operands of the code after them.
    fn is_partial(&self) -> bool {
        self.reduces && !self.last
    }
}

/// The examples whose elements of a region are written.
type Examples = (Region, u32, u32);

/// Why a program has no meaning, or another one than the program before.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Mismatch {
    /// A kernel has another number of arguments than its spec.
    #[error("{kernel} has {given} arguments instead of {needed}")]
    Arguments {
        /// The kernel.
        kernel: String,
        /// Its arguments.
        given: usize,
        /// The arguments of its spec.
        needed: usize,
    },
    /// A kernel reads contents that no kernel has written, or not for all the examples it needs.
    #[error("{kernel} reads value {slot} before any kernel writes it")]
    ReadsUndefined {
        /// The kernel.
        kernel: String,
        /// The index of the value.
        slot: usize,
    },
    /// The launches of a kernel for parts of a batch leave out examples, or sum other values.
    #[error("{kernel} does not go on where its examples before {from} ended")]
    Examples {
        /// The kernel.
        kernel: String,
        /// The first example of the launch.
        from: u32,
    },
    /// A value differs from that of the program before; both as expressions.
    #[error("{value} was\n  {before}\nand is now\n  {after}")]
    Differs {
        /// The output or variable.
        value: String,
        /// The innermost part that differs, before.
        before: String,
        /// The same part now.
        after: String,
    },
    /// The bounds checks are not those of the program before.
    #[error("{before} bounds checks are gone, and {after} others are made")]
    Checks {
        /// Checks that only the program before makes.
        before: usize,
        /// Checks that only the rewritten program makes.
        after: usize,
    },
}

/// The slots of a program after its last kernel.
#[derive(Clone, Debug, Default)]
struct State {
    slots: Vec<Option<Term>>,
    /// By slot, the regions that are written for some examples only.
    examples: FxHashMap<usize, Vec<Examples>>,
    /// By slot, partial sums: the terms that are summed, and one more than the last example.
    sums: FxHashMap<usize, (Vec<Term>, u32)>,
    checks: BTreeSet<Term>,
}

/// The interpreter: the table of terms, which all programs that are compared share.
struct Interpreter<'a> {
    ids: FxHashMap<Node, Term>,
    nodes: Vec<Node>,
    orders: Orders<'a>,
    /// Sizes at which it is decided whether two regions are apart.
    env: Env,
}

impl<'a> Interpreter<'a> {
    /// An empty table. Regions are compared at the sizes of `env`.
    fn new(env: Env, orders: Orders<'a>) -> Self {
        Interpreter {
            ids: FxHashMap::default(),
            nodes: Vec::new(),
            orders,
            env,
        }
    }

    /// A state of `slots` slots, where those that `initial` names hold contents from outside.
    fn state(&mut self, slots: usize, initial: impl Fn(usize) -> Option<u64>) -> State {
        let slots = (0..slots).map(|slot| initial(slot).map(|id| self.term(Node::Initial(id))));
        State {
            slots: slots.collect(),
            ..State::default()
        }
    }

    /// Copies the contents of a slot to another one.
    fn copy(&mut self, state: &mut State, from: usize, to: usize) {
        state.slots[to] = state.slots[from];
        match state.examples.get(&from).cloned() {
            Some(examples) => state.examples.insert(to, examples),
            None => state.examples.remove(&to),
        };
    }

    /// Executes a kernel on a state.
    fn launch(&mut self, state: &mut State, call: &KernelCall) -> Result<(), Mismatch> {
        let spec = &call.spec;
        let kernel = || call.name.clone();
        let arguments = spec.arguments();
        let micro_batch = &MicroBatch::of(call, arguments.len());
        let sums = usize::from(
            micro_batch
                .as_ref()
                .is_some_and(|batch| batch.sums.is_some()),
        );
        if call.args.len() != arguments.len() + sums {
            return Err(Mismatch::Arguments {
                kernel: kernel(),
                given: call.args.len(),
                needed: arguments.len() + sums,
            });
        }
        let slots: Vec<usize> = call.args[..arguments.len()]
            .iter()
            .map(|arg| arg.index())
            .collect();
        // All loads come before all stores: an element is read before it is written.
        let mut contents = vec![None; slots.len()];
        for (k, (operand, dims, access)) in arguments.iter().enumerate() {
            if *access == Access::Write {
                continue;
            }
            let needed = micro_batch
                .as_ref()
                .filter(|micro_batch| micro_batch.batched[k]);
            let region = Region::of(operand, dims);
            let complete = state
                .examples
                .get(&slots[k])
                .into_iter()
                .flatten()
                .all(|part| {
                    let inside = |batch: &MicroBatch| part.1 <= batch.from && batch.to <= part.2;
                    needed.is_some_and(inside) || self.are_apart(&part.0, &region)
                });
            contents[k] = state.slots[slots[k]].filter(|_| complete);
            let later =
                needed.is_none() && micro_batch.as_ref().is_some_and(MicroBatch::is_partial);
            if contents[k].is_none() && !later {
                return Err(Mismatch::ReadsUndefined {
                    kernel: kernel(),
                    slot: slots[k],
                });
            }
        }
        let own = slots.len() - spec.operands.len();
        let inputs = self.anchor_inputs(spec, &contents[..own]);
        let anchor = self.anchor(&spec.body, inputs);
        if matches!(spec.body, Body::BoundsCheck(_)) {
            state.checks.insert(anchor);
            return Ok(());
        }
        let values = self.values(spec, &contents[own..], anchor);
        if let Some(batch) = micro_batch.as_ref().filter(|batch| batch.reduces) {
            let slot = batch.sums.unwrap_or(slots[slots.len() - 1]);
            let reduced = spec
                .code
                .iter()
                .zip(&values)
                .filter(|(inst, _)| inst.is_reduce());
            let summed: Vec<Term> = reduced.map(|(_, value)| *value).chain([anchor]).collect();
            let begun = state.sums.insert(slot, (summed.clone(), batch.to));
            if begun.unwrap_or((summed.clone(), 0)) != (summed, batch.from) {
                return Err(Mismatch::Examples {
                    kernel: kernel(),
                    from: batch.from,
                });
            }
        }
        let mut stores: Vec<(usize, Region, DType, Term)> = Vec::new();
        for (k, (operand, dims, access)) in arguments.iter().enumerate().take(own) {
            if *access != Access::Read {
                // A loop over steps has several results.
                let of = match &spec.body {
                    Body::Scan(_) => self.term(Node::Anchor(format!("result {k}"), vec![anchor])),
                    _ => anchor,
                };
                let value = self.term(Node::Side(of, Renaming::new()));
                stores.push((k, Region::of(operand, dims), operand.dtype, value));
            }
        }
        for store in &spec.stores {
            let k = own + usize::from(store.operand);
            let (operand, dims, _) = &arguments[k];
            let value = values[usize::from(store.value)];
            stores.push((k, Region::of(operand, dims), operand.dtype, value));
        }
        for (k, region, dtype, value) in stores {
            // A partial launch stores the elements of its examples, and no sums.
            let stored = |batch: &MicroBatch| !batch.is_partial() || batch.batched[k];
            if !micro_batch.as_ref().is_none_or(stored) {
                continue;
            }
            let slot = slots[k];
            let old = state.slots[slot];
            let new = self.written(old, region.clone(), dtype, value);
            state.slots[slot] = Some(new);
            let (region, _) = region.canonical(&self.env);
            let parts = state.examples.entry(slot).or_default();
            let before = parts.iter().position(|part| part.0 == region);
            let before = before.map(|at| parts.swap_remove(at));
            if let Some(batch) = micro_batch.as_ref().filter(|batch| batch.batched[k]) {
                let goes_on = before.filter(|part| part.2 == batch.from);
                if goes_on.is_some() && old != Some(new) {
                    return Err(Mismatch::Examples {
                        kernel: kernel(),
                        from: batch.from,
                    });
                }
                let from = goes_on.map_or(batch.from, |part| part.1);
                if !(from == 0 && batch.last) {
                    parts.push((region, from, batch.to));
                }
            }
            if parts.is_empty() {
                state.examples.remove(&slot);
            }
        }
        Ok(())
    }

    /// The contents of the operands that an anchor reads. An operand that a prologue computes has
    /// the contents that it would have if the prologue were a preceding kernel.
    fn anchor_inputs(&mut self, spec: &Spec, contents: &[Option<Term>]) -> Vec<Term> {
        let mut inputs = Vec::new();
        let mut rest = 0;
        if let Body::Conv2d(conv) = &spec.body
            && let Some(prologue) = &conv.prologue
        {
            rest = conv.sources();
            let mut sources = contents[..rest].to_vec();
            sources.push(None);
            let none = self.term(Node::Undefined);
            let values = self.values(prologue, &sources, none);
            for store in &prologue.stores {
                let operand = &prologue.operands[usize::from(store.operand)];
                let region = Region::of(operand, &prologue.dims);
                let value = values[usize::from(store.value)];
                inputs.push(self.written(None, region, operand.dtype, value));
            }
        }
        inputs.extend(contents[rest..].iter().flatten());
        inputs
    }

    fn anchor(&mut self, body: &Body, inputs: Vec<Term>) -> Term {
        let text = match body {
            Body::Conv2d(conv) => {
                let mut conv = conv.clone();
                conv.prologue = None;
                format!("{:?}", Body::Conv2d(conv))
            }
            // One anchor has the maxima of windows and their positions, whichever a kernel stores.
            Body::Pool2d(pool) => {
                let mut pool = pool.clone();
                if pool.kind == PoolKind::ArgMax {
                    pool.kind = PoolKind::Max;
                }
                pool.arg = None;
                format!("{:?}", Body::Pool2d(pool))
            }
            body => format!("{body:?}"),
        };
        self.term(Node::Anchor(text, inputs))
    }

    /// The term of each instruction; of a value that exists once per point of the kept axes, over
    /// those alone. `contents`: of the operands that are loaded.
    fn values(&mut self, spec: &Spec, contents: &[Option<Term>], anchor: Term) -> Vec<Term> {
        let is_summed = |axis: &usize| spec.is_reduced(*axis) && !spec.dims[*axis].is(1);
        let axes = || (0..spec.dims.len()).filter(is_summed);
        // The kept axes, numbered from 0 on.
        let kept = (0..spec.dims.len()).filter(|&axis| !spec.is_reduced(axis));
        let kept: Renaming = kept
            .zip(0..)
            .map(|(axis, new)| (axis as Axis, new))
            .collect();
        let per_row = spec.per_row();
        let order = self.orders.of(spec);
        // Over the axes of the space, and over those alone that are kept.
        let mut points: Vec<Term> = Vec::with_capacity(spec.code.len());
        let mut rows: Vec<Term> = Vec::with_capacity(spec.code.len());
        let mut follows: Vec<bool> = Vec::with_capacity(spec.code.len());
        for (i, inst) in spec.code.iter().enumerate() {
            let depends = inst.arguments().iter().any(|&a| follows[usize::from(a)]);
            follows.push(depends || inst.is_reduce());
            // Loops have their kept axes first, so that both are the same. Of a product, only values
            // over the kept axes follow from sums.
            let known = if depends && !inst.is_reduce() {
                &rows
            } else {
                &points
            };
            let of = |v: u16| known[usize::from(v)];
            let term = match inst {
                Inst::Load(k) => {
                    let operand = &spec.operands[usize::from(*k)];
                    let region = Region::of(operand, &spec.dims);
                    let contents = contents[usize::from(*k)];
                    let contents = contents.unwrap_or_else(|| self.term(Node::Undefined));
                    self.load(contents, operand.dtype, region)
                }
                Inst::Acc => match &spec.body {
                    // The positions that a kernel for maxima stores besides.
                    Body::Pool2d(pool) if pool.kind == PoolKind::ArgMax => {
                        self.term(Node::Side(anchor, unmoved(&spec.dims)))
                    }
                    _ => self.term(Node::Acc(anchor, unmoved(&spec.dims))),
                },
                Inst::Const(value) => self.term(Node::Const(value.lane(), value.bits())),
                Inst::Index(k) => {
                    let strides = &spec.indices[usize::from(*k)];
                    let moves = |(axis, (stride, dim)): (Axis, (&Size, &Size))| {
                        (!dim.is(1) && !stride.is(0)).then_some((axis, *stride))
                    };
                    let axes = (0..).zip(strides.iter().zip(&spec.dims)).filter_map(moves);
                    self.term(Node::Index(axes.collect()))
                }
                Inst::Uniform {
                    state,
                    stream,
                    index,
                } => {
                    let operand = &spec.operands[usize::from(*state)];
                    let region = Region::of(operand, &spec.dims);
                    let contents = contents[usize::from(*state)];
                    let contents = contents.unwrap_or_else(|| self.term(Node::Undefined));
                    self.term(Node::Uniform(contents, region, *stream, of(*index)))
                }
                Inst::Op(op, args) => {
                    let args = args[..op.arity()].iter().map(|&a| of(a)).collect();
                    self.op(*op, args)
                }
                Inst::Cast(a, lane) => self.term(Node::Cast(of(*a), *lane)),
                Inst::Reduce(op, a) => {
                    let bind = |(i, axis): (Axis, usize)| (axis as Axis, BOUND + i);
                    let kept = kept.iter().copied();
                    let mut bound: Renaming = (0..).zip(axes()).map(bind).chain(kept).collect();
                    bound.sort_unstable();
                    let reduced = self.renamed(of(*a), &bound);
                    let lengths = axes().map(|axis| spec.dims[axis]).collect();
                    self.term(Node::Reduce(*op, reduced, lengths, order))
                }
            };
            let over_rows = per_row[i] && !follows[i];
            points.push(term);
            rows.push(if over_rows {
                self.renamed(term, &kept)
            } else {
                term
            });
        }
        rows
    }

    /// An expression with other names for the axes of its points.
    fn renamed(&mut self, term: Term, renaming: &Renaming) -> Term {
        if renaming.iter().all(|(from, to)| from == to) {
            return term;
        }
        let mut done: FxHashMap<Term, Term> = FxHashMap::default();
        let mut stack = vec![term];
        while let Some(&next) = stack.last() {
            let waiting = stack.len();
            let arguments = self.arguments(next);
            stack.extend(arguments.iter().filter(|term| !done.contains_key(term)));
            if stack.len() > waiting {
                continue;
            }
            stack.pop();
            let axes = |old: &Renaming| -> Renaming {
                let mut new = old.clone();
                new.iter_mut()
                    .for_each(|(_, to)| *to = rename(*to, renaming));
                let known = |from: Axis| old.iter().any(|(axis, _)| *axis == from);
                let rest = renaming
                    .iter()
                    .filter(|(from, to)| from != to && !known(*from));
                new.extend(rest.copied());
                new.retain(|(from, to)| from != to);
                new.sort_unstable();
                new
            };
            let node = match self.node(next).clone() {
                Node::Load(contents, dtype, region) => {
                    Node::Load(contents, dtype, region.renamed(renaming))
                }
                Node::Acc(anchor, old) => Node::Acc(anchor, axes(&old)),
                Node::Side(anchor, old) => Node::Side(anchor, axes(&old)),
                Node::Index(mut strides) => {
                    strides
                        .iter_mut()
                        .for_each(|(axis, _)| *axis = rename(*axis, renaming));
                    strides.sort_unstable_by_key(|&(axis, _)| axis);
                    Node::Index(strides)
                }
                Node::Uniform(state, region, stream, index) => {
                    Node::Uniform(state, region.renamed(renaming), stream, done[&index])
                }
                Node::Op(op, args) => Node::Op(op, args.iter().map(|arg| done[arg]).collect()),
                Node::Cast(a, lane) => Node::Cast(done[&a], lane),
                Node::Reduce(op, a, lengths, order) => Node::Reduce(op, done[&a], lengths, order),
                Node::Narrowed(dtype, a) => Node::Narrowed(dtype, done[&a]),
                other => other,
            };
            let new = self.term(node);
            done.insert(next, new);
        }
        done[&term]
    }

    /// The operands of an expression that are expressions at the same points.
    fn arguments(&self, term: Term) -> SmallVec<[Term; 3]> {
        match self.node(term) {
            Node::Uniform(_, _, _, a)
            | Node::Cast(a, _)
            | Node::Reduce(_, a, ..)
            | Node::Narrowed(_, a) => SmallVec::from_slice(&[*a]),
            Node::Op(_, args) => args.clone(),
            _ => SmallVec::new(),
        }
    }

    /// An elementwise operation. Rounding a rounded value changes nothing.
    fn op(&mut self, op: ScalarOp, args: SmallVec<[Term; 3]>) -> Term {
        let rounds = matches!(op, ScalarOp::RoundF16 | ScalarOp::RoundBf16);
        if rounds && matches!(self.node(args[0]), Node::Op(inner, _) if *inner == op) {
            return args[0];
        }
        self.term(Node::Op(op, args))
    }

    /// One element of contents: the stored expression, if one store wrote just these elements in
    /// just this order and no later one touches them.
    fn load(&mut self, contents: Term, dtype: DType, region: Region) -> Term {
        let stored = match self.node(contents) {
            Node::Written { parts, .. } => {
                let met = parts
                    .iter()
                    .rev()
                    .find(|(part, _)| !self.are_apart(part, &region));
                met.and_then(|(part, value)| Some((*value, part.same_elements(&region)?)))
            }
            _ => None,
        };
        if let Some((value, renaming)) = stored {
            return self.renamed(value, &renaming);
        }
        self.term(Node::Load(contents, dtype, region))
    }

    /// Contents after a store. Stores to regions that are apart are kept in one order, whichever
    /// happened first.
    fn written(&mut self, old: Option<Term>, region: Region, dtype: DType, value: Term) -> Term {
        let value = match dtype {
            DType::F32 | DType::I32 | DType::Bool => value,
            DType::U8 => self.term(Node::Narrowed(dtype, value)),
            DType::F16 | DType::BF16 => match dtype.rounding() {
                Some(op) => self.op(op, SmallVec::from_slice(&[value])),
                None => value,
            },
        };
        let (region, renaming) = region.canonical(&self.env);
        let value = self.renamed(value, &renaming);
        let old = old.unwrap_or_else(|| self.term(Node::Undefined));
        let (before, mut parts) = match self.node(old) {
            Node::Written { before, parts } => (*before, parts.clone()),
            _ => (old, Vec::new()),
        };
        parts.retain(|(written, _)| *written != region);
        let key = |region: &Region| {
            let sizes = region
                .axes
                .iter()
                .map(|(_, n, _)| n.at(&self.env))
                .collect();
            (region.offset.at(&self.env), sizes)
        };
        let own: (i64, Vec<i64>) = key(&region);
        let mut at = parts.len();
        while at > 0 && self.are_apart(&parts[at - 1].0, &region) && key(&parts[at - 1].0) > own {
            at -= 1;
        }
        parts.insert(at, (region, value));
        self.term(Node::Written { before, parts })
    }

    /// Whether two regions have no element in common, at the sizes of `env`: one lies above the
    /// other, or beside it along an axis of both.
    fn are_apart(&self, a: &Region, b: &Region) -> bool {
        let (a_first, a_last) = a.bounds(&self.env);
        let (b_first, b_last) = b.bounds(&self.env);
        if a_last < b_first || b_last < a_first {
            return true;
        }
        let (low, distance) = if a_first <= b_first {
            (a, b_first - a_first)
        } else {
            (b, a_first - b_first)
        };
        let strides = |region: &Region| {
            let mut strides: Vec<i64> = region
                .axes
                .iter()
                .map(|(_, _, s)| s.at(&self.env))
                .collect();
            strides.sort_unstable();
            strides
        };
        let same = strides(a) == strides(b);
        same && low.axes.iter().any(|(_, n, stride)| {
            let (n, stride) = (n.at(&self.env), stride.at(&self.env));
            stride > 0 && distance % stride == 0 && distance / stride >= n
        })
    }

    /// Compares the results of two programs.
    fn compare(&self, before: &Results, after: &Results) -> Result<(), Mismatch> {
        for key in before.keys().chain(after.keys()) {
            let term = |results: &Results| results.get(key).copied().flatten();
            let (mut old, mut new) = (term(before), term(after));
            if old == new {
                continue;
            }
            if let (Some(a), Some(b)) = (old, new) {
                let (a, b) = self.innermost(a, b);
                (old, new) = (Some(a), Some(b));
            }
            return Err(Mismatch::Differs {
                value: key.1.clone(),
                before: self.show(old),
                after: self.show(new),
            });
        }
        Ok(())
    }

    fn term(&mut self, node: Node) -> Term {
        let next = Term(self.nodes.len() as u32);
        match self.ids.get(&node) {
            Some(&term) => term,
            None => {
                self.nodes.push(node.clone());
                self.ids.insert(node, next);
                next
            }
        }
    }

    fn node(&self, term: Term) -> &Node {
        &self.nodes[term.0 as usize]
    }
}
