//! Operations along the order of an axis: prefix reductions such as running sums, and the largest
//! elements.

use std::panic::Location;

use slabwise_kernels::dtype::DType;
use slabwise_kernels::scalar::ScalarOp;
use slabwise_kernels::size::Size;
use slabwise_kernels::spec::{Dims, PrefixOp, ReduceOp};
use smallvec::SmallVec;

use super::select::{axis_back, axis_last, order_along};
use super::{AxisIndex, Tensor, checked, no_axis};
use crate::graph::Graph;
use crate::ops::{GraphBuilder, NodeId, Op};
use crate::trace::countable;

/// The elements that a running result covers: by default all up to its own, from the first on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Running {
    /// Exclusive: without its own element, so that the first result is that of no elements.
    pub exclusive: bool,
    /// Reversed: from the last element on.
    pub reverse: bool,
}

/// A prefix reduction along any axis.
fn prefix_reduce(
    g: &mut Graph,
    op: PrefixOp,
    running: Running,
    axis: usize,
    inputs: &[NodeId],
) -> Result<NodeId, String> {
    let rank = g.dims(inputs[0]).len();
    let to_last = axis_last(axis, rank);
    let moved: Vec<NodeId> = inputs.iter().map(|&x| g.permute(x, &to_last)).collect();
    let op = Op::PrefixReduce {
        op,
        exclusive: running.exclusive,
        reverse: running.reverse,
    };
    let result = checked(g, op, &moved)?;
    Ok(g.permute(result, &axis_back(axis, rank)))
}

/// Refuses a missing axis, and a type that is not among these.
fn require(g: &Graph, what: &str, x: NodeId, axis: usize, types: &[DType]) -> Result<(), String> {
    if axis >= g.dims(x).len() {
        return Err(no_axis(g, what, axis, x));
    }
    if !types.contains(&g.dtype(x)) {
        return Err(format!(
            "{what} does not take {}; convert with cast",
            g.dtype(x)
        ));
    }
    Ok(())
}

/// The coordinate along an axis, i32.
fn place_along(g: &mut Graph, axis: usize, dims: &Dims) -> NodeId {
    let mut strides: Dims = SmallVec::from_elem(Size::ZERO, dims.len());
    strides[axis] = Size::ONE;
    g.emit(Op::Index(strides), &[], DType::I32, dims.clone())
}

/// Types of sums.
const NUMBERS: [DType; 2] = [DType::F32, DType::I32];
/// Types with an order.
const SORTED: [DType; 5] = [DType::F32, DType::F16, DType::BF16, DType::I32, DType::U8];

impl<'t> Tensor<'t> {
    /// The sum of each element and those before it along an axis, of f32 or i32, which wraps.
    /// Floats are summed in double precision on the CPU.
    #[track_caller]
    pub fn cumsum(self, axis: impl AxisIndex) -> Tensor<'t> {
        let axis = axis.index(self.rank());
        self.cumsum_by(axis, Running::default())
    }

    /// [`Tensor::cumsum`] of the elements that `running` says: exclusive, from the end, or both.
    ///
    /// ```
    /// # use slabwise::prelude::*;
    /// # use slabwise::Running;
    /// # let trace = Trace::inference();
    /// let x = trace.input("x", F32, (4,));
    /// let before = x.cumsum_by(0, Running { exclusive: true, ..Running::default() });
    /// ```
    #[track_caller]
    pub fn cumsum_by(self, axis: impl AxisIndex, running: Running) -> Tensor<'t> {
        let axis = axis.index(self.rank());
        self.trace.record(Location::caller(), &[self], |g, ids| {
            require(g, "cumsum", ids[0], axis, &NUMBERS)?;
            prefix_reduce(g, PrefixOp::Sum, running, axis, ids)
        })
    }

    /// The product of each element and those before it along an axis, of f32 or i32, which wraps.
    /// Its gradient is exact where elements are 0.
    #[track_caller]
    pub fn cumprod(self, axis: impl AxisIndex) -> Tensor<'t> {
        let axis = axis.index(self.rank());
        self.cumprod_by(axis, Running::default())
    }

    /// [`Tensor::cumprod`] of the elements that `running` says.
    #[track_caller]
    pub fn cumprod_by(self, axis: impl AxisIndex, running: Running) -> Tensor<'t> {
        let axis = axis.index(self.rank());
        self.trace.record(Location::caller(), &[self], |g, ids| {
            require(g, "cumprod", ids[0], axis, &NUMBERS)?;
            countable("cumprod", &g.symbols, g.dims(ids[0]))?;
            // A recurrence whose state is the first element after it.
            let (dims, dtype) = (g.dims(ids[0]).clone(), g.dtype(ids[0]));
            let place = place_along(g, axis, &dims);
            let first = if running.reverse {
                let last = super::select::size_like(g, dims[axis], place);
                let one = g.full(1.0, DType::I32, &dims);
                let last = g.scalar(ScalarOp::Sub, &[last, one]);
                g.scalar(ScalarOp::Eq, &[place, last])
            } else {
                let zero = g.full(0.0, DType::I32, &dims);
                g.scalar(ScalarOp::Eq, &[place, zero])
            };
            let (zero, one) = (g.full(0.0, dtype, &dims), g.full(1.0, dtype, &dims));
            let start = g.scalar(ScalarOp::Select, &[first, ids[0], zero]);
            let products = prefix_reduce(g, PrefixOp::Linear, running, axis, &[start, ids[0]])?;
            Ok(if running.exclusive {
                g.scalar(ScalarOp::Select, &[first, one, products])
            } else {
                products
            })
        })
    }

    /// The states of a linear recurrence along an axis: `stateₜ = factorₜ · stateₜ₋₁ + selfₜ`, of
    /// f32 or i32, with factors of the same type and shape. The first state is the first element,
    /// and the first factor is not used. (A discretized state space, a moving average, a discounted
    /// return.)
    ///
    /// Its gradient is a linear recurrence in the other direction (Martin and Cundy,
    /// "Parallelizing Linear Recurrent Neural Nets Over Sequence Length", 2018).
    #[track_caller]
    pub fn linear_recurrence(
        self,
        factors: Tensor<'t>,
        axis: impl AxisIndex,
        running: Running,
    ) -> Tensor<'t> {
        let axis = axis.index(self.rank());
        self.trace
            .record(Location::caller(), &[self, factors], |g, ids| {
                require(g, "linear_recurrence", ids[0], axis, &NUMBERS)?;
                let alike = (g.dtype(ids[0]), g.dims(ids[0])) == (g.dtype(ids[1]), g.dims(ids[1]));
                if !alike {
                    return Err(format!(
                        "linear_recurrence of {} {} by {} {}: the factors need its type and shape",
                        g.dtype(ids[0]),
                        g.symbols.show(g.dims(ids[0])),
                        g.dtype(ids[1]),
                        g.symbols.show(g.dims(ids[1]))
                    ));
                }
                prefix_reduce(g, PrefixOp::Linear, running, axis, ids)
            })
    }

    /// The logarithm of the sum of the exponentials of each element (f32) and those before it along
    /// an axis, without overflow.
    #[track_caller]
    pub fn logcumsumexp(self, axis: impl AxisIndex) -> Tensor<'t> {
        let axis = axis.index(self.rank());
        self.logcumsumexp_by(axis, Running::default())
    }

    /// [`Tensor::logcumsumexp`] of the elements that `running` says; −∞ of none.
    #[track_caller]
    pub fn logcumsumexp_by(self, axis: impl AxisIndex, running: Running) -> Tensor<'t> {
        let axis = axis.index(self.rank());
        self.trace.record(Location::caller(), &[self], |g, ids| {
            require(g, "logcumsumexp", ids[0], axis, &[DType::F32])?;
            prefix_reduce(g, PrefixOp::LogSumExp, running, axis, ids)
        })
    }

    /// The largest of each element and those before it along an axis, and its last position (i32).
    /// From a NaN on results are NaN. A gradient goes back to the position of the element.
    #[track_caller]
    pub fn cummax(self, axis: impl AxisIndex) -> (Tensor<'t>, Tensor<'t>) {
        let axis = axis.index(self.rank());
        self.running_extreme("cummax", axis, PrefixOp::ArgMax)
    }

    /// The smallest of each element and those before it along an axis, and its last position
    /// (i32), as [`Tensor::cummax`].
    #[track_caller]
    pub fn cummin(self, axis: impl AxisIndex) -> (Tensor<'t>, Tensor<'t>) {
        let axis = axis.index(self.rank());
        self.running_extreme("cummin", axis, PrefixOp::ArgMin)
    }

    #[track_caller]
    fn running_extreme(self, what: &str, axis: usize, op: PrefixOp) -> (Tensor<'t>, Tensor<'t>) {
        let at = Location::caller();
        let positions = self.trace.record(at, &[self], |g, ids| {
            require(g, what, ids[0], axis, &SORTED)?;
            countable(what, &g.symbols, g.dims(ids[0]))?;
            prefix_reduce(g, op, Running::default(), axis, ids)
        });
        (self.at_positions(axis, positions), positions)
    }

    /// The elements at positions along an axis that are in range by construction, so that there is
    /// no check at run time.
    #[track_caller]
    fn at_positions(self, axis: usize, positions: Tensor<'t>) -> Tensor<'t> {
        self.trace
            .record(Location::caller(), &[self, positions], |g, ids| {
                checked(g, Op::Gather { axis }, ids)
            })
    }

    /// The `k` largest elements along an axis, the largest first, and their positions (i32); of
    /// equal ones the first comes first, and NaN counts as largest. Both have length `k`, which may
    /// be 0, along the axis. They are selected in linear time, then sorted.
    #[track_caller]
    pub fn topk(self, k: usize, axis: impl AxisIndex) -> (Tensor<'t>, Tensor<'t>) {
        let axis = axis.index(self.rank());
        self.first_of_order("topk", k, axis, true)
    }

    /// The `k` smallest elements along an axis, the smallest first, and their positions, as
    /// [`Tensor::topk`]; NaN counts as largest here too.
    #[track_caller]
    pub fn bottomk(self, k: usize, axis: impl AxisIndex) -> (Tensor<'t>, Tensor<'t>) {
        let axis = axis.index(self.rank());
        self.first_of_order("bottomk", k, axis, false)
    }

    #[track_caller]
    fn first_of_order(
        self,
        what: &str,
        k: usize,
        axis: usize,
        descending: bool,
    ) -> (Tensor<'t>, Tensor<'t>) {
        let at = Location::caller();
        let positions = self.trace.record(at, &[self], |g, ids| {
            let x = ids[0];
            require(g, what, x, axis, &SORTED)?;
            let dims = g.dims(x).clone();
            // Lengths are monotonic in their symbols, so all symbols at 0 give the least.
            let least = dims[axis].checked_at(&slabwise_kernels::size::Env::default());
            let wanted = i64::try_from(k)
                .ok()
                .filter(|&k| least.is_some_and(|n| k <= n));
            let Some(wanted) = wanted else {
                return Err(format!(
                    "{what}: axis {axis} of {} does not have {k} elements at every length",
                    g.symbols.show(&dims)
                ));
            };
            if wanted == 0 {
                let mut none = dims;
                none[axis] = Size::ZERO;
                return Ok(g.full(0.0, DType::I32, &none));
            }
            order_along(g, what, x, axis, Some(Size::fixed(wanted)), descending)
        });
        (self.at_positions(axis, positions), positions)
    }

    /// The last position (i32) of the largest element along an axis, which is removed; NaN counts
    /// as largest. f32 or i32; over no elements: an error.
    #[track_caller]
    pub fn argmax_last(self, axis: impl AxisIndex) -> Tensor<'t> {
        let axis = axis.index(self.rank());
        self.last_extreme("argmax_last", axis, ReduceOp::Max)
    }

    /// The last position (i32) of the smallest element along an axis, which is removed; NaN counts
    /// as smallest. f32 or i32; over no elements: an error.
    #[track_caller]
    pub fn argmin_last(self, axis: impl AxisIndex) -> Tensor<'t> {
        let axis = axis.index(self.rank());
        self.last_extreme("argmin_last", axis, ReduceOp::Min)
    }

    #[track_caller]
    fn last_extreme(self, what: &str, axis: usize, op: ReduceOp) -> Tensor<'t> {
        let at = Location::caller();
        let x = self.require(at, |g, x| require(g, what, x, axis, &NUMBERS));
        let x = x.with_elements(at, what, &[axis], "has a largest or smallest element");
        self.trace.record(at, &[x], |g, ids| {
            let x = ids[0];
            let dims = g.dims(x).clone();
            countable(what, &g.symbols, &dims)?;
            let extreme = g.reduce(op, x, &[axis]);
            let extreme = g.broadcast(extreme, &dims);
            let mut hit = g.scalar(ScalarOp::Eq, &[x, extreme]);
            if g.dtype(x).is_float() {
                let [a, b] = [x, extreme].map(|v| g.scalar(ScalarOp::Ne, &[v, v]));
                let both = g.scalar(ScalarOp::And, &[a, b]);
                hit = g.scalar(ScalarOp::Or, &[hit, both]);
            }
            let place = place_along(g, axis, &dims);
            let none = g.full(-1.0, DType::I32, &dims);
            let places = g.scalar(ScalarOp::Select, &[hit, place, none]);
            let last = g.reduce(ReduceOp::Max, places, &[axis]);
            let mut kept = dims;
            kept.remove(axis);
            Ok(g.reshape(last, &kept))
        })
    }
}
