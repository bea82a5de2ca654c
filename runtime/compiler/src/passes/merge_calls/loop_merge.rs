//! Moves the elementwise operations of a loop into another call over the same points: a loop, or
//! the epilogue of a product.

use slabwise_kernels::dtype::DType;
use slabwise_kernels::scalar::ScalarOp;
use slabwise_kernels::size::Size;
use slabwise_kernels::spec::{Dims, Inst, Operand, Store, ValueId as InstId};

use super::{Around, CallMerger};
use crate::ir::{KernelCall, Source, Value};

/// For each axis of the second of two spaces that is longer than 1 the axis of the first along
/// which the same value has the same stride; `None` if they do not cover it.
pub(in super::super) fn axes_along(
    [space, dims]: [&Dims; 2],
    strides: [&Dims; 2],
) -> Option<Vec<Option<usize>>> {
    let mut used = vec![false; space.len()];
    let mut axes = Vec::with_capacity(dims.len());
    for (dim, stride) in dims.iter().zip(strides[1]) {
        if dim.is(1) {
            axes.push(None);
            continue;
        }
        let is_along =
            |&j: &usize| !used[j] && space[j] == *dim && strides[0][j] == *stride && !stride.is(0);
        let j = (0..space.len()).find(is_along)?;
        used[j] = true;
        axes.push(Some(j));
    }
    let all = (0..space.len()).all(|j| used[j] || space[j].is(1));
    all.then_some(axes)
}

/// The merge of a loop into another call, which computes the values of the loop at each point.
pub(in super::super) struct LoopMerge<'a> {
    pub call: &'a KernelCall,
    pub values: &'a [Value],
    pub around: &'a Around,
    /// The number of the other call.
    pub to: usize,
    /// For each axis of the loop that is longer than 1 the axis of the other call's space along it.
    axes: Vec<Option<usize>>,
    /// The other call under construction.
    pub new: KernelCall,
    /// For each instruction of the loop the one of the other call that computes it.
    made: Vec<Option<InstId>>,
}

impl<'a> LoopMerge<'a> {
    /// The merge of the second of two calls, none of which has moved, into the first, with
    /// [`axes_along`] those of the first.
    pub fn new(
        merger: &'a CallMerger,
        [to, at]: [usize; 2],
        axes: Vec<Option<usize>>,
    ) -> LoopMerge<'a> {
        let call = &merger.calls()[at];
        LoopMerge {
            call,
            values: &merger.values,
            around: &merger.around,
            to,
            axes,
            new: merger.calls()[to].clone(),
            made: vec![None; call.spec.code.len()],
        }
    }

    /// The instruction of the other call that computes an instruction of the loop; `None` if it
    /// cannot.
    pub fn value(&mut self, inst: InstId) -> Option<InstId> {
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

    /// Stores a value of each point by the other call; `None` if it cannot.
    pub fn store(&mut self, store: &Store) -> Option<()> {
        let value = self.call.operand(store.operand);
        let written_once = self.around.writers.get(&value).map(Vec::len) == Some(1);
        let is_variable = matches!(self.values[value.index()].source, Source::Variable(_));
        if !written_once || is_variable || self.new.args.contains(&value) {
            return None;
        }
        let operand = self.operand(store.operand);
        let made = self.value(store.value)?;
        self.new.spec.stores.push(Store {
            value: made,
            operand: self.new.spec.operands.len() as u16,
        });
        self.new.spec.operands.push(operand);
        self.new.args.push(value);
        // Where its code reads an element, and its anchor no other, it may write another one.
        let pairs = self.call.in_place.iter().filter(|(from, to)| {
            let mut uses = (0..self.new.args.len()).filter(|&i| self.new.args[i] == *from);
            let first = self.new.args.len() - self.new.spec.operands.len();
            let alone = match [uses.next(), uses.next()] {
                [Some(i), None] => i.checked_sub(first),
                _ => None,
            };
            *to == value && alone.is_some_and(|k| self.new.spec.reads(k as u16))
        });
        self.new.in_place.extend(pairs.copied().collect::<Vec<_>>());
        Some(())
    }

    /// An operand of the loop in the space of the other call.
    fn operand(&self, k: u16) -> Operand {
        let own = &self.call.spec.operands[usize::from(k)];
        let mut strides = Dims::from_elem(Size::ZERO, self.new.spec.dims.len());
        for (axis, stride) in self.axes.iter().zip(&own.strides) {
            if let Some(axis) = axis {
                strides[*axis] = *stride;
            }
        }
        Operand {
            strides,
            ..own.clone()
        }
    }

    fn push(&mut self, inst: Inst) -> InstId {
        let code = &mut self.new.spec.code;
        code.push(inst);
        code.len() as InstId - 1
    }

    /// The element of an operand of the loop: as the other call stores it, or loaded.
    fn load(&mut self, k: u16) -> Option<InstId> {
        let value = self.call.operand(k);
        let operand = self.operand(k);
        let stored = self.new.spec.stores.iter().find(|store| {
            let own = self.new.operand(store.operand);
            own == value
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
        // It must be in memory before the call runs, and stay there.
        let is_before = self
            .around
            .writers
            .get(&value)
            .is_none_or(|list| list.iter().all(|&writer| writer < self.to));
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
