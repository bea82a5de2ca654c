//! Steps of operations that write to places or run along an axis: scatter, assignment to a part,
//! prefix reductions, the first of an order.

use slabwise::params::Init;
use slabwise::shape::{Dims, Env, Size};
use slabwise_compiler::ops::{GraphBuilder, NodeId, Op};
use slabwise_kernels::dtype::DType;
use slabwise_kernels::scalar::ScalarOp;
use slabwise_kernels::spec::{PrefixOp, ReduceOp};

use super::{BOUND, Known, LIMIT, Maker};
use crate::support::variable;

impl Maker {
    /// Values reduced by places, joined with a number, so that places without values have one too.
    pub(super) fn scatter(&mut self) -> Option<()> {
        let x = self.find(|g, id, _| matches!(g.dtype(id), DType::F32 | DType::I32))?;
        let (axis, mut dims) = self.indexed(x)?;
        let (dtype, shape, known) = (self.g.dtype(x), self.g.dims(x).clone(), self.of(x));
        let (index, _) = self.index(&shape);
        dims[axis] = Size::fixed((LIMIT + self.rng.below(2)) as i64);
        let reduce = self
            .rng
            .pick(&[ReduceOp::Sum, ReduceOp::Prod, ReduceOp::Max, ReduceOp::Min]);
        let count = shape[axis].at(&Env::default()) as f64;
        let (join, bound) = match reduce {
            ReduceOp::Sum => (ScalarOp::Add, known.bound * count),
            ReduceOp::Prod => (ScalarOp::Mul, known.bound.max(1.0).powf(count)),
            ReduceOp::Max => (ScalarOp::Max, known.bound),
            _ => (ScalarOp::Min, known.bound),
        };
        if bound > 1e6 {
            return None;
        }
        let node = self.g.emit(
            Op::Scatter { axis, reduce },
            &[x, index],
            dtype,
            dims.clone(),
        );
        let one = self.g.full(1.0, dtype, &dims);
        let joined = self.g.scalar(join, &[node, one]);
        let chooses = matches!(reduce, ReduceOp::Max | ReduceOp::Min);
        let exact = known.exact && (chooses || dtype == DType::I32);
        self.keep(joined, bound + 1.0, exact);
        if dtype.is_float() && (known.exact || !chooses) && self.rng.one_in(2) {
            self.differentiate(joined, &[x]);
        }
        Some(())
    }

    /// A tensor with a part replaced: of a value, or of a variable that becomes the result.
    pub(super) fn assign_part(&mut self) -> Option<()> {
        let changes = self.rng.one_in(2);
        let x = self.find(|g, id, _| {
            let fixed = g.dims(id).iter().all(|d| d.as_fixed().is_some());
            !g.dims(id).is_empty() && (fixed || !changes)
        })?;
        let (dtype, dims, mut known) = (self.g.dtype(x), self.g.dims(x).clone(), self.of(x));
        let base = if changes {
            known = Known {
                bound: known.bound.max(3.0),
                ..known
            };
            variable(&mut self.g, dtype, &dims, Init::Constant(0.0))
        } else {
            x
        };
        let (mut start, mut step, mut part) = (Dims::new(), Vec::new(), Dims::new());
        let mut room = Vec::new();
        for d in &dims {
            let n = d.as_fixed().filter(|&n| n > 1 && self.rng.one_in(2));
            let by = n.map_or(1, |_| 1 + self.rng.below(2) as i64);
            let from = n.map_or(0, |n| self.rng.below(n as usize) as i64);
            let most = n.map_or(0, |n| (n - from - 1) / by + 1);
            let count = n.map(|_| 1 + self.rng.below(most as usize) as i64);
            start.push(Size::fixed(from));
            step.push(by as u32);
            part.push(count.map_or(*d, Size::fixed));
            room.push(match (n, count) {
                (Some(n), Some(count)) => n - 1 - from - (count - 1) * by,
                _ => 0,
            });
        }
        // Of the first elements of the tensor, so that the values differ from those they replace.
        let zero = Op::Slice {
            start: dims.iter().map(|_| Size::ZERO).collect(),
            step: dims.iter().map(|_| 1).collect(),
        };
        let slice = self.g.emit(zero, &[x], dtype, part.clone());
        let value = if dtype.is_float() && self.rng.one_in(2) {
            let negative = self.g.scalar(ScalarOp::Neg, &[slice]);
            self.g.cast(negative, dtype)
        } else {
            slice
        };
        let mut inputs: Vec<NodeId> = vec![base, value];
        let axis = self.rng.below(dims.len());
        let moves = self.rng.one_in(2) && room[axis] >= LIMIT as i64 - 1;
        if moves {
            let mut places = part.clone();
            places[axis] = Size::ONE;
            if self.rng.one_in(2) {
                places.iter_mut().for_each(|d| *d = Size::ONE);
            }
            let (place, _) = self.index(&places);
            inputs.push(self.g.cast(place, DType::I32));
        }
        let op = Op::SliceAssign {
            start,
            step: step.into_iter().collect(),
            axis: moves.then_some(axis),
        };
        let node = self.g.emit(op, &inputs, dtype, dims.clone());
        if changes {
            let at = self.g.variables.len() as u32 - 1;
            self.g.emit(Op::Assign(at), &[node], dtype, dims.clone());
            // Read where it is, not returned.
            let own = self.g.full(0.0, dtype, &dims);
            let read = if dtype == DType::Bool {
                self.g.scalar(ScalarOp::Or, &[node, own])
            } else {
                self.g.scalar(ScalarOp::Max, &[node, own])
            };
            self.keep(read, known.bound, known.exact);
        } else {
            self.keep(node, known.bound, known.exact);
            if dtype.is_float() && self.rng.one_in(2) {
                self.differentiate(node, &[x]);
            }
        }
        Some(())
    }

    /// Running results along the last axis.
    pub(super) fn prefix_reduce(&mut self) -> Option<()> {
        let op = self.rng.pick(&[
            PrefixOp::Sum,
            PrefixOp::Linear,
            PrefixOp::LogSumExp,
            PrefixOp::ArgMax,
            PrefixOp::ArgMin,
        ]);
        let finds = matches!(op, PrefixOp::ArgMax | PrefixOp::ArgMin);
        let x = self.find(|g, id, known| {
            let types: &[DType] = match op {
                PrefixOp::LogSumExp => &[DType::F32],
                PrefixOp::Sum | PrefixOp::Linear => &[DType::F32, DType::I32],
                _ => &[DType::F32, DType::F16, DType::BF16, DType::I32, DType::U8],
            };
            !g.dims(id).is_empty() && types.contains(&g.dtype(id)) && (known.exact || !finds)
        })?;
        let (dims, dtype, known) = (self.g.dims(x).clone(), self.g.dtype(x), self.of(x));
        let most = dims.last()?.at(&self.g.symbols.bounds()).max(1) as f64;
        let mut inputs = vec![x];
        if op == PrefixOp::Linear {
            let factor = if dtype == DType::F32 {
                // A factor of at most 1.
                self.scaled(x, 1.0 / known.bound.max(1.0))
            } else {
                self.g.full(1.0, dtype, &dims)
            };
            inputs.push(factor);
        }
        let exclusive = !finds && op != PrefixOp::LogSumExp && self.rng.one_in(2);
        let reduction = Op::PrefixReduce {
            op,
            exclusive,
            reverse: self.rng.one_in(2),
        };
        let result = if finds { DType::I32 } else { dtype };
        let node = self.g.emit(reduction, &inputs, result, dims);
        let bound = match op {
            _ if finds => most,
            PrefixOp::LogSumExp => known.bound + most,
            _ => known.bound * most,
        };
        let exact = known.exact && (finds || dtype == DType::I32);
        self.keep(node, bound.min(1e6).max(BOUND.min(bound)), exact);
        if result.is_float() && self.rng.one_in(2) {
            self.differentiate(node, &[x]);
        }
        Some(())
    }
}
