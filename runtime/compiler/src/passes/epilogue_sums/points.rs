//! Moves the sums of a loop and its elementwise operations into the epilogue of the product whose
//! result it reads.

use slabwise_kernels::scalar::ScalarOp;
use slabwise_kernels::spec::{Body, Inst, MAX_ARGUMENTS, ReduceOp, Store, ValueId as InstId};

use super::{Joined, Sum};
use crate::ir::KernelCall;
use crate::passes::merge_calls::{LoopMerge, axes_along};

/// For each axis of a loop that is longer than 1 the axis of the product's space along it, by the
/// strides of a value that one stores and the other reads. The product's channels must be the axis
/// that the loop keeps, and innermost.
pub(super) fn axes(
    product: &KernelCall,
    call: &KernelCall,
    kept: usize,
) -> Option<Vec<Option<usize>>> {
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
    let found = axes_along([space, dims], [&stored.strides, &read.strides])?;
    let fits = |(i, along): (usize, &Option<usize>)| {
        along.is_none_or(|j| call.spec.is_reduced(i) != (j == kept))
    };
    found.iter().enumerate().all(fits).then_some(found)
}

/// The sums of a loop, as they move into an epilogue.
pub(super) struct Sums<'a> {
    merge: LoopMerge<'a>,
    /// The instruction in whose place the mean of a value is, and that value's instruction in the
    /// epilogue.
    mean: Option<(InstId, InstId)>,
}

impl<'a> Sums<'a> {
    pub fn of(merge: LoopMerge<'a>) -> Sums<'a> {
        Sums { merge, mean: None }
    }

    /// The product with the loop's sums and stores at points; `None` if an epilogue cannot do that.
    pub fn joined(mut self, at: usize, per_row: &[bool]) -> Option<Joined> {
        let spec = &self.merge.call.spec;
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
                    let arg = self.merge.value(arg)?;
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
        let at_points = |store: &&Store| !per_row[usize::from(store.value)];
        let is_image = !matches!(self.merge.new.spec.body, Body::Matmul(_));
        for store in spec.stores.iter().filter(at_points) {
            // Other kernels for a network of images under a budget sum such values by themselves.
            if is_image {
                return None;
            }
            self.merge.store(store)?;
        }
        if sums.is_empty() || self.merge.new.args.len() + sums.len() > MAX_ARGUMENTS {
            return None;
        }
        Some(Joined {
            at: [self.merge.to, at],
            product: self.merge.new,
            sums,
            mean,
            zeros,
        })
    }

    /// The number of elements of a channel, if it is known.
    fn count(&self) -> Option<i64> {
        let spec = &self.merge.call.spec;
        (0..spec.dims.len())
            .filter(|&axis| spec.is_reduced(axis))
            .try_fold(1i64, |n, axis| n.checked_mul(spec.dims[axis].as_fixed()?))
    }

    /// Whether a summed value is the distance of the product's result from a number near its mean
    /// (`Some(false)`) or its square (`Some(true)`). The outer `None`: it depends on such a number
    /// in another way, or is the distance of something else.
    fn deviation(&mut self, arg: InstId, per_row: &[bool]) -> Option<Option<bool>> {
        let spec = &self.merge.call.spec;
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
        let of = self.merge.value(x)?;
        match self.mean {
            None if self.is_read_once(mean) => self.mean = Some((mean, of)),
            Some(known) if known == (mean, of) => {}
            _ => return None,
        }
        Some(Some(squared))
    }

    /// Whether no other call can compute the same number near the mean: none reads its operands,
    /// nor the values that it is computed from here.
    fn is_read_once(&self, mean: InstId) -> bool {
        if self.merge.around.repeats_near {
            return false;
        }
        let spec = &self.merge.call.spec;
        let mut open = vec![mean];
        while let Some(at) = open.pop() {
            if at != mean && spec.stores.iter().any(|store| store.value == at) {
                return false;
            }
            let inst = &spec.code[usize::from(at)];
            if let Inst::Load(k) = inst
                && self.merge.around.readers.get(&self.merge.call.operand(*k)) != Some(&1)
            {
                return false;
            }
            open.extend(inst.arguments());
        }
        true
    }
}
