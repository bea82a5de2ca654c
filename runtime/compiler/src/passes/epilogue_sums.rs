//! Sums in the epilogues of products: the sums over a convolution's result are computed by its own
//! kernel.
//!
//! A norm behind a convolution needs the mean and the variance of every channel, and its gradient
//! two more sums, over values that the kernel of the convolution has at hand as it writes its result.
//! A loop that sums over such a result becomes two: the work at each point with the sums joins the
//! epilogue of the convolution, and a small loop over the channels does the rest. The result is then
//! read once less. Where all that the loop needs is there when the convolution starts, the blocks that
//! add the last sums do its work, too.
//!
//! The loop centres the elements by a number that it takes from the result, though any number near the
//! mean would do ([`ScalarOp::Near`]). A kernel cannot know it before its result: the mean itself and
//! the squared deviations from it take its place, which blocks of the kernel compute apart and combine
//! (Chan, Golub and LeVeque, *Updating Formulae and a Pairwise Algorithm for Computing Sample
//! Variances*, 1979).

use rustc_hash::FxHashMap;
use slabwise_kernels::dtype::DType;
use slabwise_kernels::scalar::{ScalarOp, Value as Number};
use slabwise_kernels::size::{Env, Size};
use slabwise_kernels::spec::analysis::{Levels, prune};
use slabwise_kernels::spec::{
    Access, Body, ConvKind, Dims, Inst, MAX_ARGUMENTS, Operand, ReduceOp, Spec, Store,
    ValueId as InstId,
};
use slabwise_planner::{Kind, Space};

use super::cost::moved;
use super::error::PassError;
use super::pipeline::Pass;
use crate::backend::Target;
use crate::graph::Phase;
use crate::ir::{CallId, KernelCall, Piece, Program, Rewriter, Source, Value, ValueId};
use crate::ops::{NodeId, Op};

mod columns;

/// Which sums over the results of convolutions are computed in their epilogues, on a device whose
/// kernels can. Results differ in the rounding of sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum EpilogueSums {
    /// Those that save more time, by the model that ranks kernels, than blocks take to add theirs.
    #[default]
    Worthwhile,
    /// All that can be.
    All,
    /// None.
    Off,
}

/// The pass.
pub struct SumInEpilogues<'a> {
    /// Which sums.
    choice: EpilogueSums,
    /// The device.
    target: &'a Target,
    /// Bytes that its memory moves per cycle.
    bytes_per_cycle: f64,
}

impl Pass for SumInEpilogues<'_> {
    const NAME: &'static str = "epilogue_sums";
    type Input = Program;
    type Output = Program;

    fn run(&self, program: &Program) -> Result<Program, PassError> {
        Ok(self.summed(program).0)
    }
}

impl<'a> SumInEpilogues<'a> {
    /// The pass for a device; `None` if its products have no sums in their epilogues.
    pub fn on(target: &'a Target, choice: EpilogueSums) -> Option<SumInEpilogues<'a>> {
        let has = target.capabilities().epilogue_sums && choice != EpilogueSums::Off;
        let sectors = target.sectors().filter(|_| has)?;
        Some(SumInEpilogues {
            choice,
            target,
            bytes_per_cycle: sectors.bytes_per_cycle,
        })
    }

    /// The modelled cycles that sums in epilogues save a program.
    pub(super) fn saved(&self, program: &Program) -> f64 {
        self.summed(program).1
    }

    /// The modelled cycles of a call: of a loop those of its launches, or of its bytes if they take
    /// longer; of a product those of its epilogue's bytes beside its own.
    fn cycles(&self, call: &KernelCall, bounds: &Env) -> f64 {
        let own = self.target.cycles(&call.spec, bounds).unwrap_or(0.0);
        let bytes = moved(&call.spec, bounds) as f64 / self.bytes_per_cycle;
        match call.spec.body {
            Body::Loop => own.max(bytes),
            _ => own + bytes,
        }
    }

    /// The program with the chosen sums in epilogues, and the modelled cycles that they save.
    fn summed(&self, program: &Program) -> (Program, f64) {
        let bounds = program.graph.symbols.bounds();
        let mut calls: Vec<KernelCall> = program.kernels.clone();
        let mut values: Vec<Value> = program.values.clone();
        let around = Around::of(program);
        // The products that do the work of loops.
        let mut moved_to: Vec<Option<usize>> = vec![None; calls.len()];
        let mut saved = 0.0;
        for at in 0..calls.len() {
            let Some(found) = Joined::of(&calls, &values, &around, at) else {
                continue;
            };
            let [product, _] = found.at;
            let before = [product, at].map(|at| calls[at].clone());
            if !self
                .target
                .has_epilogue_sums(&found.with_sums().spec, &bounds)
            {
                continue;
            }
            let count = values.len();
            let near = found.near(&calls, &around);
            found.replace(&mut calls, &mut values, &bounds);
            // Adding the sums of all blocks takes time, which small results do not save.
            let cycles = |calls: [&KernelCall; 2]| {
                calls
                    .map(|call| self.cycles(call, &bounds))
                    .iter()
                    .sum::<f64>()
            };
            let gone = near.map_or(0.0, |near| self.cycles(&calls[near], &bounds));
            let saves = cycles(before.each_ref()) + gone - cycles([&calls[product], &calls[at]]);
            if self.choice == EpilogueSums::Worthwhile && saves <= 0.0 {
                values.truncate(count);
                [calls[product], calls[at]] = before;
                continue;
            }
            saved += saves;
            let all = columns::Calls {
                calls: &calls,
                values: &values,
                around: &around,
                moved_to: &moved_to,
            };
            let whole = all.with_loop([product, at]);
            let whole = whole.filter(|call| self.target.has_epilogue_sums(&call.spec, &bounds));
            if let Some(call) = whole {
                saved += self.cycles(&calls[at], &bounds);
                calls[product] = call;
                moved_to[at] = Some(product);
            }
        }
        let unread = unread(&calls, &values);
        let mut rewriter = Rewriter::new(program);
        for value in values.drain(program.values.len()..) {
            rewriter.add_value(value);
        }
        let order = columns::Calls {
            calls: &calls,
            values: &values,
            around: &around,
            moved_to: &moved_to,
        }
        .order();
        let mut added = vec![None; calls.len()];
        let mut calls: Vec<Option<KernelCall>> = calls.into_iter().map(Some).collect();
        for at in order {
            // What depended on a call that nothing reads any more depends on nothing else.
            if let (None, false, Some(call)) = (moved_to[at], unread[at], calls[at].take()) {
                added[at] = Some(rewriter.add_call(CallId(at as u32), call));
            }
        }
        for (at, product) in moved_to.iter().enumerate() {
            let by = product.and_then(|product| added[product]);
            rewriter.replace(CallId(at as u32), by);
        }
        (rewriter.finish(program.micro_batches), saved)
    }
}

/// Facts about a program that the choice of sums needs.
#[derive(Default)]
struct Around {
    /// For each value the calls that write it, in order.
    writers: FxHashMap<ValueId, Vec<usize>>,
    /// For each value the number of calls that read it.
    readers: FxHashMap<ValueId, usize>,
    /// Whether the backward pass computes some number near a mean again, which must be the same number.
    repeats_near: bool,
}

impl Around {
    fn of(program: &Program) -> Around {
        let graph = &program.graph;
        let is_repeated = |id: NodeId| {
            let is_near = graph.node(id).op == Op::Scalar(ScalarOp::Near);
            is_near && graph.origin(id).phase == Phase::Recompute
        };
        let mut around = Around {
            repeats_near: graph.ids().any(is_repeated),
            ..Around::default()
        };
        for (at, call) in program.kernels.iter().enumerate() {
            for (value, access) in call.accesses() {
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

/// For each call whether no other call reads what it writes, and nothing else needs it.
fn unread(calls: &[KernelCall], values: &[Value]) -> Vec<bool> {
    let mut read = vec![false; values.len()];
    for call in calls {
        for (value, access) in call.accesses() {
            read[value.index()] |= access != Access::Write;
        }
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

/// A sum that joins the epilogue.
struct Sum {
    /// The reduction of the loop that it stands for.
    inst: InstId,
    op: ReduceOp,
    /// Its argument in the epilogue.
    arg: InstId,
}

/// A loop whose sums join the epilogue of a product.
struct Joined {
    /// The product and the loop.
    at: [usize; 2],
    /// The product with the work at each point, not yet with the sums and their stores.
    product: KernelCall,
    sums: Vec<Sum>,
    /// The instruction of the loop in whose place the mean is, and the number of elements of a
    /// channel, of which the first sum is.
    mean: Option<(InstId, i64)>,
    /// Sums of deviations from the mean, which are 0.
    zeros: Vec<InstId>,
}

/// The axis of a product's result over which its epilogue keeps sums apart.
fn channels(body: &Body) -> Option<usize> {
    match body {
        Body::Conv2d(conv) if conv.kind != ConvKind::WeightGrad && conv.groups == 1 => Some(1),
        _ => None,
    }
}

impl Joined {
    /// The loop of this index, with the product whose result it sums; `None` if it sums none.
    fn of(calls: &[KernelCall], values: &[Value], around: &Around, at: usize) -> Option<Joined> {
        let call = &calls[at];
        let spec = &call.spec;
        if spec.body != Body::Loop || spec.reduced == 0 || !spec.indices.is_empty() {
            return None;
        }
        let folds = |inst: &Inst| match inst {
            Inst::Reduce(op, _) => *op == ReduceOp::Sum,
            _ => true,
        };
        let levels = Levels::new(spec);
        let per_row = &levels.per_row;
        let stores_rows = spec.stores.iter().all(|s| per_row[usize::from(s.value)]);
        if !spec.code.iter().all(folds) || !stores_rows {
            return None;
        }
        // The product is the last writer of what the loop reads at each point.
        let product = (0..spec.code.len())
            .filter(|&i| !per_row[i])
            .filter_map(|i| match spec.code[i] {
                Inst::Load(k) => around.writers.get(&call.operand(k))?.last().copied(),
                _ => None,
            })
            .max()
            .filter(|&product| product < at)?;
        let kept = channels(&calls[product].spec.body)?;
        Work {
            call,
            values,
            around,
            product,
            axes: axes(&calls[product], call, kept)?,
            new: calls[product].clone(),
            made: vec![None; spec.code.len()],
            mean: None,
        }
        .joined(at, per_row)
    }

    /// The product with its sums, whose values are not known yet.
    fn with_sums(&self) -> KernelCall {
        let mut product = self.product.clone();
        let channels = channels(&product.spec.body).unwrap_or(0);
        for sum in &self.sums {
            product.store_sum(sum, channels, ValueId(0));
        }
        product
    }

    /// The call that computes the number near the mean and nothing else.
    fn near(&self, calls: &[KernelCall], around: &Around) -> Option<usize> {
        let call = &calls[self.at[1]];
        let (mean, _) = self.mean?;
        let mut open = vec![mean];
        while let Some(inst) = open.pop() {
            let inst = &call.spec.code[usize::from(inst)];
            if let Inst::Load(k) = inst {
                return around.writers.get(&call.operand(*k))?.last().copied();
            }
            open.extend(inst.arguments());
        }
        None
    }

    /// Replaces the product and the loop.
    fn replace(self, calls: &mut [KernelCall], values: &mut Vec<Value>, bounds: &Env) {
        let Joined {
            at: [product, at],
            product: mut new,
            sums,
            mean,
            zeros,
        } = self;
        let call = &calls[at];
        let old = &call.spec;
        let kept: Vec<usize> = (0..old.dims.len())
            .filter(|&axis| !old.is_reduced(axis))
            .collect();
        let at_kept = |strides: &Dims| kept.iter().map(|&axis| strides[axis]).collect::<Dims>();
        let dims = at_kept(&old.dims);
        let mut rest = Spec {
            body: Body::Loop,
            dims: dims.clone(),
            reduced: 0,
            operands: old
                .operands
                .iter()
                .map(|operand| Operand {
                    strides: at_kept(&operand.strides),
                    ..operand.clone()
                })
                .collect(),
            indices: Vec::new(),
            code: old.code.clone(),
            stores: old.stores.clone(),
        };
        let mut args = call.args.clone();
        let channels = channels(&new.spec.body).unwrap_or(0);
        let mut first = None;
        for (number, sum) in sums.iter().enumerate() {
            let value = value_of(&call.name, &dims, values, call, bounds);
            let id = ValueId(values.len() as u32);
            values.push(value);
            new.store_sum(sum, channels, id);
            let strides = rest
                .dims
                .iter()
                .map(|dim| Size::fixed(i64::from(!dim.is(1))));
            rest.operands.push(Operand {
                dtype: DType::F32,
                offset: Size::ZERO,
                strides: strides.collect(),
            });
            args.push(id);
            let load = Inst::Load(rest.operands.len() as u16 - 1);
            match (mean, number) {
                // The mean follows from the first sum.
                (Some(_), 0) => first = Some(load),
                _ => rest.code[usize::from(sum.inst)] = load,
            }
        }
        for zero in zeros {
            rest.code[usize::from(zero)] = Inst::Const(Number::F32(0.0));
        }
        if let (Some((mean, count)), Some(load)) = (mean, first) {
            // Two instructions more, in front of all others.
            let part = Inst::Const(Number::F32(1.0 / count as f32));
            rest.code
                .iter_mut()
                .for_each(|inst| inst.map_arguments(|a| a + 2));
            rest.stores.iter_mut().for_each(|store| store.value += 2);
            rest.code.splice(..0, [load, part]);
            rest.code[usize::from(mean) + 2] = Inst::Op(ScalarOp::Mul, [0, 1, 0]);
        }
        let pruned = prune(&rest, &rest.stores);
        let is_kept = |(arg, kept): (ValueId, bool)| kept.then_some(arg);
        let args: Vec<ValueId> = args
            .into_iter()
            .zip(pruned.operands)
            .filter_map(is_kept)
            .collect();
        let stay = |(from, to): &(ValueId, ValueId)| args.contains(from) && args.contains(to);
        let in_place = call.in_place.iter().copied().filter(stay).collect();
        calls[at] = KernelCall {
            spec: pruned.spec,
            in_place,
            args,
            ..calls[at].clone()
        };
        calls[product] = new;
    }
}

/// A value for the sums of a call.
fn value_of(name: &str, dims: &Dims, values: &[Value], call: &KernelCall, bounds: &Env) -> Value {
    let kinds = call.stored().map(|value| values[value.index()].kind);
    let is_gradient = kinds
        .into_iter()
        .any(|kind| matches!(kind, Kind::Gradient | Kind::Weight));
    let count = dims
        .iter()
        .map(|dim| dim.at(bounds).max(0) as u64)
        .product::<u64>();
    Value {
        name: format!("{name} (sums)"),
        source: Source::Computed,
        node: None,
        piece: Piece::Whole,
        dtype: DType::F32,
        dims: dims.clone(),
        row_padding: 0,
        channels_last: false,
        bytes: count * DType::F32.bytes() as u64,
        data_dependent: false,
        kind: if is_gradient {
            Kind::Gradient
        } else {
            Kind::Activation
        },
        space: Space::Device,
        output: false,
    }
}

impl KernelCall {
    /// Adds a sum over all axes but one to the epilogue, stored in a value.
    fn store_sum(&mut self, sum: &Sum, channels: usize, value: ValueId) {
        let spec = &mut self.spec;
        spec.reduced = spec.dims.len() - 1;
        spec.code.push(Inst::Reduce(sum.op, sum.arg));
        spec.stores.push(Store {
            value: spec.code.len() as InstId - 1,
            operand: spec.operands.len() as u16,
        });
        let stride = |axis: usize| Size::fixed(i64::from(axis == channels));
        spec.operands.push(Operand {
            dtype: DType::F32,
            offset: Size::ZERO,
            strides: (0..spec.dims.len()).map(stride).collect(),
        });
        self.args.push(value);
    }
}

/// For each axis of a loop that is longer than 1 the axis of the product's space along it, by the
/// strides of a value that one stores and the other reads. The product's channels must be the axis
/// that the loop keeps, and innermost.
fn axes(product: &KernelCall, call: &KernelCall, kept: usize) -> Option<Vec<Option<usize>>> {
    let [space, dims] = [&product.spec.dims, &call.spec.dims];
    let (stored, read) = product.spec.stores.iter().find_map(|store| {
        let value = product.operand(store.operand);
        let reads = |k: &usize| call.operand(*k as u16) == value && call.spec.reads(*k as u16);
        let k = (0..call.spec.operands.len()).find(reads)?;
        let stored = &product.spec.operands[usize::from(store.operand)];
        Some((stored, &call.spec.operands[k]))
    })?;
    if (stored.dtype, stored.offset) != (read.dtype, read.offset) || !stored.strides[kept].is(1) {
        return None;
    }
    let mut used = vec![false; space.len()];
    let mut axes = Vec::with_capacity(dims.len());
    for (i, dim) in dims.iter().enumerate() {
        if dim.is(1) {
            axes.push(None);
            continue;
        }
        let is_along =
            |&j: &usize| !used[j] && space[j] == *dim && stored.strides[j] == read.strides[i];
        let j = (0..space.len()).find(is_along)?;
        if call.spec.is_reduced(i) == (j == kept) {
            return None;
        }
        used[j] = true;
        axes.push(Some(j));
    }
    let all = (0..space.len()).all(|j| used[j] || space[j].is(1));
    all.then_some(axes)
}

/// The work of a loop at each point, as it moves into an epilogue.
struct Work<'a> {
    call: &'a KernelCall,
    values: &'a [Value],
    around: &'a Around,
    product: usize,
    /// See [`axes`].
    axes: Vec<Option<usize>>,
    /// The product in the making.
    new: KernelCall,
    /// For each instruction of the loop the one of the epilogue that computes it.
    made: Vec<Option<InstId>>,
    /// The instruction in whose place the mean of a value is, and that value's instruction in the
    /// epilogue.
    mean: Option<(InstId, InstId)>,
}

impl Work<'_> {
    fn joined(mut self, at: usize, per_row: &[bool]) -> Option<Joined> {
        let spec = &self.call.spec;
        let mut sums: Vec<Sum> = Vec::new();
        let mut zeros = Vec::new();
        for (inst, reduction) in (0..).zip(&spec.code) {
            let &Inst::Reduce(op, arg) = reduction else {
                continue;
            };
            // A sum that is the same at all points would be one of as many numbers.
            if per_row[usize::from(arg)] {
                return None;
            }
            match self.deviation(arg, per_row)? {
                Some(false) => zeros.push(inst),
                Some(true) => sums.push(Sum {
                    inst,
                    op: ReduceOp::SquaredDeviations,
                    arg: self.mean?.1,
                }),
                None => {
                    let arg = self.value(arg)?;
                    sums.push(Sum { inst, op, arg });
                }
            }
        }
        let mean = match self.mean {
            None => None,
            Some((mean, of)) => {
                // Only the squares need the mean's value in the epilogue.
                if !sums.iter().all(|sum| sum.op == ReduceOp::SquaredDeviations) {
                    return None;
                }
                let count = self.count()?;
                sums.insert(
                    0,
                    Sum {
                        inst: mean,
                        op: ReduceOp::Sum,
                        arg: of,
                    },
                );
                Some((mean, count))
            }
        };
        if sums.is_empty() || self.new.args.len() + sums.len() > MAX_ARGUMENTS {
            return None;
        }
        Some(Joined {
            at: [self.product, at],
            product: self.new,
            sums,
            mean,
            zeros,
        })
    }

    /// The number of elements of a channel, if it is known.
    fn count(&self) -> Option<i64> {
        let spec = &self.call.spec;
        (0..spec.dims.len())
            .filter(|&axis| spec.is_reduced(axis))
            .try_fold(1i64, |n, axis| n.checked_mul(spec.dims[axis].as_fixed()?))
    }

    /// Whether a summed value is the distance of the product's result from a number near its mean
    /// (`Some(false)`) or its square (`Some(true)`). The outer `None`: it depends on such a number in
    /// another way, or is the distance of something else.
    fn deviation(&mut self, arg: InstId, per_row: &[bool]) -> Option<Option<bool>> {
        let spec = &self.call.spec;
        let near = |v: InstId| matches!(spec.code[usize::from(v)], Inst::Op(ScalarOp::Near, _));
        let (distance, squared) = match spec.code[usize::from(arg)] {
            Inst::Op(ScalarOp::Mul, [a, b, _]) if a == b => (a, true),
            _ => (arg, false),
        };
        let Inst::Op(ScalarOp::Sub, [x, mean, _]) = spec.code[usize::from(distance)] else {
            return Some(None);
        };
        if per_row[usize::from(x)] || !near(mean) {
            return Some(None);
        }
        let of = self.value(x)?;
        match self.mean {
            None if self.is_read_once(mean) => self.mean = Some((mean, of)),
            Some(known) if known == (mean, of) => {}
            _ => return None,
        }
        Some(Some(squared))
    }

    /// Whether no other call can compute the same number near the mean: none reads its operands, nor
    /// what it is computed from here.
    fn is_read_once(&self, mean: InstId) -> bool {
        if self.around.repeats_near {
            return false;
        }
        let spec = &self.call.spec;
        let mut open = vec![mean];
        while let Some(at) = open.pop() {
            if at != mean && spec.stores.iter().any(|store| store.value == at) {
                return false;
            }
            let inst = &spec.code[usize::from(at)];
            if let Inst::Load(k) = inst
                && self.around.readers.get(&self.call.operand(*k)) != Some(&1)
            {
                return false;
            }
            open.extend(inst.arguments());
        }
        true
    }

    /// The instruction of the epilogue that computes an instruction of the loop; `None` if the
    /// epilogue cannot.
    fn value(&mut self, inst: InstId) -> Option<InstId> {
        if let Some(made) = self.made[usize::from(inst)] {
            return Some(made);
        }
        let made = match &self.call.spec.code[usize::from(inst)] {
            Inst::Load(k) => self.load(*k)?,
            Inst::Const(number) => self.push(Inst::Const(*number)),
            Inst::Op(ScalarOp::Near, _) | Inst::Reduce(..) => return None,
            Inst::Op(op, args) => {
                let mut new = [0; 3];
                for (new, &arg) in new.iter_mut().zip(&args[..op.arity()]) {
                    *new = self.value(arg)?;
                }
                self.push(Inst::Op(*op, new))
            }
            Inst::Cast(arg, lane) => {
                let arg = self.value(*arg)?;
                self.push(Inst::Cast(arg, *lane))
            }
            Inst::Acc | Inst::Index(_) | Inst::Uniform { .. } => return None,
        };
        self.made[usize::from(inst)] = Some(made);
        Some(made)
    }

    fn push(&mut self, inst: Inst) -> InstId {
        let code = &mut self.new.spec.code;
        code.push(inst);
        code.len() as InstId - 1
    }

    /// The element of an operand of the loop: as the product stores it, or loaded.
    fn load(&mut self, k: u16) -> Option<InstId> {
        let value = self.call.operand(k);
        let read = &self.call.spec.operands[usize::from(k)];
        let mut strides = Dims::from_elem(Size::ZERO, self.new.spec.dims.len());
        for (axis, stride) in self.axes.iter().zip(&read.strides) {
            if let Some(axis) = axis {
                strides[*axis] = *stride;
            }
        }
        let operand = Operand {
            strides,
            ..read.clone()
        };
        let stored = self.new.spec.stores.iter().find(|store| {
            let of_product = self.new.operand(store.operand);
            of_product == value
        });
        if let Some(store) = stored {
            let own = &self.new.spec.operands[usize::from(store.operand)];
            let stored = store.value;
            let dims = &self.new.spec.dims;
            let same = own.strides.iter().zip(&operand.strides).zip(dims);
            let same = same.into_iter().all(|((a, b), dim)| a == b || dim.is(1));
            if !same || (own.dtype, own.offset) != (operand.dtype, operand.offset) {
                return None;
            }
            return match own.dtype {
                DType::F32 => Some(stored),
                // The number that memory holds, which rounding again leaves as it is.
                half if half.is_half() => {
                    let rounding = half.rounding()?;
                    match self.new.spec.code[usize::from(stored)] {
                        Inst::Op(op, _) if op == rounding => Some(stored),
                        _ => Some(self.push(Inst::Op(rounding, [stored, 0, 0]))),
                    }
                }
                _ => None,
            };
        }
        // It must be in memory before the product runs, and stay there.
        let is_before = self
            .around
            .writers
            .get(&value)
            .is_none_or(|list| list.iter().all(|&writer| writer < self.product));
        let source = self.values[value.index()].source;
        if !is_before || matches!(source, Source::Variable(_)) {
            return None;
        }
        let spec = &mut self.new.spec;
        let first = self.new.args.len() - spec.operands.len();
        let known = (0..spec.operands.len())
            .find(|&k| self.new.args[first + k] == value && spec.operands[k] == operand);
        // An argument that is accessed in two ways is not computed in place.
        if known.is_none() && self.new.args.contains(&value) {
            return None;
        }
        let k = known.unwrap_or_else(|| {
            spec.operands.push(operand);
            self.new.args.push(value);
            spec.operands.len() - 1
        });
        let loads = |inst: &Inst| *inst == Inst::Load(k as u16);
        match self.new.spec.code.iter().position(loads) {
            Some(inst) => Some(inst as InstId),
            None => Some(self.push(Inst::Load(k as u16))),
        }
    }
}
