//! Sums in the epilogues of products: the kernel of a convolution, or of a matrix product, also
//! computes sums over its result.
//!
//! A norm after a convolution needs the mean and the variance of every channel, and its gradient
//! two more sums, over values that the kernel of the convolution has in registers when it writes
//! its result. A loop that sums over such a result is split: its elementwise operations and the
//! sums join the epilogue of the convolution, and a small loop over the channels does the rest. The
//! result is then read once less. Where all operands of the small loop exist when the convolution
//! starts, the blocks that add the last sums execute that loop, too.
//!
//! The gradient of a bias is a sum over the rows of a matrix product times the gradient of an
//! activation: the product stores these numbers instead of its result, and sums its columns.
//!
//! The loop centres the elements by a number that it takes from the result, though any number near
//! the mean would do ([`ScalarOp::Near`]). A kernel cannot know it before its result. Therefore the
//! mean itself and the squared deviations from it replace it; the blocks of the kernel compute them
//! separately and combine them (Chan, Golub and LeVeque, *Updating Formulae and a Pairwise
//! Algorithm for Computing Sample Variances*, 1979).

use slabwise_kernels::dtype::DType;
use slabwise_kernels::scalar::{ScalarOp, Value as Number};
use slabwise_kernels::size::{Env, Size};
use slabwise_kernels::spec::analysis::Levels;
use slabwise_kernels::spec::{
    Body, ConvKind, Dims, Inst, Operand, ReduceOp, Spec, Store, ValueId as InstId,
};
use slabwise_planner::{Kind, Space};

use super::error::PassError;
use super::merge_calls::{CallMerger, LoopMerge, cycles};
use super::pipeline::Pass;
use crate::backend::Target;
use crate::ir::{KernelCall, Piece, Program, Source, Value, ValueId};

mod columns;
mod points;

use columns::with_loop;
use points::{Sums, axes};

/// Which sums over the results of products are computed in their epilogues, on a device whose
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
        has.then_some(SumInEpilogues { choice, target })
    }

    /// The modelled cycles that sums in epilogues save a program.
    pub(super) fn saved(&self, program: &Program) -> f64 {
        self.summed(program).1
    }

    /// The program with the chosen sums in epilogues, and the modelled cycles that they save.
    fn summed(&self, program: &Program) -> (Program, f64) {
        let bounds = program.graph.symbols.bounds();
        let has_kernel = |call: &KernelCall| self.target.has_kernel(&call.spec, &bounds);
        let mut merger = CallMerger::of(program);
        let mut saved = 0.0;
        for at in 0..merger.calls().len() {
            let Some(found) = Joined::of(&merger, at) else {
                continue;
            };
            let [product, _] = found.at;
            let before = [product, at].map(|at| merger.calls()[at].clone());
            if !has_kernel(&found.with_sums()) {
                continue;
            }
            let count = merger.values.len();
            let near = found.near(&merger);
            found.replace(&mut merger, &bounds);
            let whole = with_loop(&merger, [product, at]).filter(has_kernel);
            // Adding the sums of all blocks takes time, which small results do not save.
            let calls = merger.calls();
            let gone = near.map(|near| &calls[near]);
            let after = match &whole {
                Some(call) => vec![call],
                None => vec![&calls[product], &calls[at]],
            };
            let total = |calls: &mut dyn Iterator<Item = &KernelCall>| {
                let each = calls.map(|call| cycles(self.target, call, &bounds));
                each.sum::<f64>()
            };
            let saves = total(&mut before.iter().chain(gone)) - total(&mut after.into_iter());
            let is_worthwhile = saves > 0.0 || self.choice == EpilogueSums::All;
            // More results at once need more memory, and none can be computed again by itself.
            if !is_worthwhile || calls[product].other_stores() > before[0].other_stores() {
                merger.values.truncate(count);
                let [before_product, before_loop] = before;
                merger.set(product, before_product);
                merger.set(at, before_loop);
                continue;
            }
            saved += saves;
            if let Some(call) = whole {
                merger.set(product, call);
                merger.moved_to[at] = Some(product);
            }
        }
        (merger.finish(), saved)
    }
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

/// The axis of a product's result over which its epilogue keeps sums apart: the channels of images,
/// or the columns of a matrix.
pub(super) fn channels(spec: &Spec) -> Option<usize> {
    match &spec.body {
        Body::Conv2d(conv) if conv.kind != ConvKind::WeightGrad && conv.groups == 1 => Some(1),
        Body::Matmul(_) => spec.dims.len().checked_sub(1),
        _ => None,
    }
}

impl Joined {
    /// The loop of this index, with the product whose result it sums; `None` if it sums none.
    fn of(merger: &CallMerger, at: usize) -> Option<Joined> {
        let (calls, around) = (merger.calls(), &merger.around);
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
        if !spec.code.iter().all(folds) {
            return None;
        }
        // The product is the last writer among the operands that the loop reads at each point.
        let product = (0..spec.code.len())
            .filter(|&i| !per_row[i])
            .filter_map(|i| match spec.code[i] {
                Inst::Load(k) => around.writers.get(&call.operand(k))?.last().copied(),
                _ => None,
            })
            .max()
            .filter(|&product| product < at)?;
        let kept = channels(&calls[product].spec)?;
        let axes = axes(&calls[product], call, kept)?;
        Sums::of(LoopMerge::new(merger, [product, at], axes)).joined(at, per_row)
    }

    /// The product with its sums, whose values are not known yet.
    fn with_sums(&self) -> KernelCall {
        let mut product = self.product.clone();
        let channels = channels(&product.spec).unwrap_or(0);
        for sum in &self.sums {
            product.store_sum(sum, channels, ValueId(0));
        }
        product
    }

    /// The call that computes the number near the mean and nothing else.
    fn near(&self, merger: &CallMerger) -> Option<usize> {
        let (calls, around) = (merger.calls(), &merger.around);
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
    fn replace(self, merger: &mut CallMerger, bounds: &Env) {
        let Joined {
            at: [product, at],
            product: mut new,
            sums,
            mean,
            zeros,
        } = self;
        let call = merger.calls()[at].clone();
        let old = &call.spec;
        let per_row = old.per_row();
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
        // The product has those of points.
        rest.stores
            .retain(|store| per_row[usize::from(store.value)]);
        let mut args = call.args.clone();
        let channels = channels(&new.spec).unwrap_or(0);
        let mut first = None;
        for (number, sum) in sums.iter().enumerate() {
            let values = &mut merger.values;
            let value = value_of(&call.name, &dims, values, &call, bounds);
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
        let stores = rest.stores.clone();
        let rest = KernelCall {
            spec: rest,
            args,
            ..call
        };
        merger.set(at, rest.with_stores(&stores));
        // Values that only the loop read are in no memory.
        let product_call = new.with_needed_stores(&merger.values, merger.calls().iter());
        merger.set(product, product_call);
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
    /// The number of its stores of values that are no sums.
    fn other_stores(&self) -> usize {
        let Spec { code, stores, .. } = &self.spec;
        let is_sum = |store: &&Store| code[usize::from(store.value)].is_reduce();
        stores.len() - stores.iter().filter(is_sum).count()
    }

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
