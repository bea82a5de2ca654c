//! The verifier of specs: the rules that hold on every back end and for all sizes. Back ends refuse
//! specs for further reasons ([`SpecError::Unsupported`]).

use super::analysis::is_contiguous;
use super::{
    Access, Body, Collective, CollectiveOp, Conv2d, ConvKind, Dims, Inst, MAX_ACCESSES,
    MAX_ARGUMENTS, MAX_AXES, Operand, Pool2d, Pool2dGrad, PoolKind, PrefixOp, PrefixReduce,
    PrologueError, ReduceOp, Scatter, SliceAssign, Spec, SpecError, Window,
};
use crate::dtype::{DType, Lane};
use crate::size::{Env, Size};

/// Types an index may have.
const INDEX_TYPES: [DType; 2] = [DType::U8, DType::I32];

/// Types of sums.
const NUMBERS: [DType; 2] = [DType::F32, DType::I32];

/// Types with an order.
const SORTED: [DType; 5] = [DType::F32, DType::F16, DType::BF16, DType::I32, DType::U8];

/// The largest side, stride or padding of a pooling window, so that coordinates cannot overflow.
const WINDOW_MAX: usize = 1 << 24;

/// Fails unless an operand has one stride per axis and one of these types.
///
/// # Errors
/// Calls the operand `name`.
pub fn check_operand(
    name: &'static str,
    operand: &Operand,
    rank: usize,
    types: &[DType],
) -> Result<(), SpecError> {
    if operand.strides.len() != rank {
        return Err(SpecError::OperandRank {
            operand: name,
            strides: operand.strides.len(),
            axes: rank,
        });
    }
    if !types.contains(&operand.dtype) {
        return Err(SpecError::OperandType {
            operand: name,
            dtype: operand.dtype,
        });
    }
    Ok(())
}

/// Fails if a length of an argument's space falls as a symbol grows: workspaces are those of the
/// bound.
pub(crate) fn check_lengths(arguments: &[(Operand, Dims, Access)]) -> Result<(), SpecError> {
    let mut lengths = arguments.iter().flat_map(|(_, space, _)| space);
    match lengths.find(|length| length.parts().0 < 0) {
        Some(length) => Err(SpecError::unsupported(format!(
            "the length {length:?} falls as its symbols grow"
        ))),
        None => Ok(()),
    }
}

impl Spec {
    /// Checks the rules on `code`, its operands and its stores; returns the lane of every value.
    ///
    /// # Errors
    /// The first rule that the code breaks.
    pub fn check_code(&self) -> Result<Vec<Lane>, SpecError> {
        let axes = self.dims.len();
        if axes > MAX_AXES || self.operands.len() + self.indices.len() > MAX_ACCESSES {
            return Err(SpecError::TooLarge);
        }
        let reducible = match &self.body {
            Body::Loop => self.reduced <= axes,
            Body::Matmul(_) => self.reduced == 0 || self.reduced + 1 == axes,
            Body::Conv2d(conv) if conv.kind != ConvKind::WeightGrad => {
                self.reduced == 0 || self.reduced + 1 == axes
            }
            _ => self.reduced == 0,
        };
        if !reducible {
            let reduced = self.reduced;
            return Err(SpecError::Reduced { reduced, axes });
        }
        if self.operands.iter().any(|o| o.strides.len() != axes)
            || self.indices.iter().any(|i| i.len() != axes)
        {
            return Err(SpecError::Strides);
        }
        let operand = |k: u16| self.operands.get(usize::from(k));
        for (value, inst) in self.code.iter().enumerate() {
            if inst.arguments().iter().any(|&a| usize::from(a) >= value) {
                return Err(SpecError::LaterValue { value });
            }
            let exists = match inst {
                Inst::Load(k) => operand(*k).is_some(),
                Inst::Uniform { state, .. } => {
                    operand(*state).is_some_and(|state| state.dtype == DType::I32)
                }
                Inst::Index(k) => usize::from(*k) < self.indices.len(),
                Inst::Acc => self.body != Body::Loop,
                Inst::Reduce(ReduceOp::SquaredDeviations, _) if self.body == Body::Loop => false,
                Inst::Reduce(..) => self.reduced > 0,
                Inst::Const(_) | Inst::Op(..) | Inst::Cast(..) => true,
            };
            if !exists {
                let inst = inst.clone();
                return Err(SpecError::Dangling { value, inst });
            }
        }
        let lanes = self.lanes().ok_or(SpecError::Lanes)?;
        for (value, inst) in self.code.iter().enumerate() {
            let fits = match inst {
                Inst::Uniform { index, .. } => lanes[usize::from(*index)] == Lane::I32,
                Inst::Reduce(op, a) => {
                    matches!(op, ReduceOp::Any | ReduceOp::All)
                        == (lanes[usize::from(*a)] == Lane::Bool)
                }
                _ => true,
            };
            if !fits {
                let inst = inst.clone();
                return Err(SpecError::ArgumentLane { value, inst });
            }
        }
        for (i, store) in self.stores.iter().enumerate() {
            if usize::from(store.value) >= lanes.len() || operand(store.operand).is_none() {
                return Err(SpecError::DanglingStore { store: i });
            }
            if self.stores[..i].iter().any(|s| s.operand == store.operand) {
                let operand = store.operand;
                return Err(SpecError::StoredTwice { operand });
            }
        }
        Ok(lanes)
    }

    /// Fails unless the anchor's operands have the axes and types that every back end supports.
    /// Loops have no anchor; the types of a product's operands depend on the back end.
    ///
    /// # Errors
    /// The first rule that the anchor breaks.
    pub fn check_anchor(&self) -> Result<(), SpecError> {
        let rank = self.dims.len();
        let one_axis = |results: &'static str| match rank {
            1 => Ok(()),
            axes => Err(SpecError::OneAxis { results, axes }),
        };
        match &self.body {
            Body::Loop | Body::Matmul(_) => Ok(()),
            Body::QuantizedMatmul(product) => product.check(self),
            Body::Conv2d(conv) => conv
                .prologue
                .as_deref()
                .map_or(Ok(()), |prologue| self.check_prologue(conv, prologue)),
            Body::Pool2d(pool) => check_pool(pool, rank),
            Body::Pool2dGrad(pool) => check_pool_grad(pool, rank),
            Body::Gather(gather) => {
                check_operand("the source", &gather.source, rank, &DType::ALL)?;
                check_operand("the index", &gather.index, rank, &INDEX_TYPES)
            }
            Body::Scatter(scatter) => self.check_scatter(scatter),
            Body::SliceAssign(assign) => self.check_slice_assign(assign),
            Body::PrefixReduce(reduction) => self.check_prefix_reduce(reduction),
            Body::Attention(attention) => attention.check(self),
            Body::AttentionGrad(grad) => grad.check(self),
            Body::BoundsCheck(check) => {
                check_operand("the index", &check.index, rank, &INDEX_TYPES)
            }
            Body::Nonzero(compact) => {
                one_axis("positions")?;
                check_operand(
                    "the mask",
                    &compact.mask,
                    compact.space.len(),
                    &[DType::Bool, DType::U8],
                )?;
                check_operand("the positions", &compact.positions, 1, &[DType::I32])
            }
            Body::Sort(sort) => {
                if rank == 0 {
                    return Err(SpecError::SortedScalar);
                }
                check_operand("the source", &sort.source, rank, &SORTED)?;
                check_operand("the positions", &sort.positions, rank, &[DType::I32])
            }
            Body::NonMaxSuppression(suppress) => {
                one_axis("boxes")?;
                check_operand("the boxes", &suppress.boxes, 2, &[DType::F32])?;
                check_operand("what stays", &suppress.keep, 1, &[DType::Bool])
            }
            Body::Custom(custom) => custom.check(self),
            Body::Scan(scan) => scan.check(self),
            Body::Collective(collective) => self.check_collective(collective),
        }
    }

    /// Fails unless a prologue computes its image point by point and has no other effect.
    fn check_prologue(&self, conv: &Conv2d, prologue: &Spec) -> Result<(), SpecError> {
        let invalid = |reason| Err(SpecError::Prologue(reason));
        if conv.kind == ConvKind::InputGrad {
            return invalid(PrologueError::NoImage);
        }
        if prologue.body != Body::Loop {
            return invalid(PrologueError::Anchor);
        }
        let image = Dims::from_slice(&[conv.n, conv.ci, conv.hw[0], conv.hw[1]]);
        if prologue.dims != image {
            let (dims, image) = (prologue.dims.to_vec(), image.to_vec());
            return invalid(PrologueError::Space { dims, image });
        }
        if prologue.reduced > 0 {
            return invalid(PrologueError::Reduces(prologue.reduced));
        }
        let operands = prologue.operands.len();
        let ([store], Some((stored, sources))) =
            (&prologue.stores[..], prologue.operands.split_last())
        else {
            let stores = prologue.stores.len();
            return invalid(PrologueError::Stores { stores, operands });
        };
        if usize::from(store.operand) != sources.len() {
            let operand = store.operand;
            return invalid(PrologueError::NotLast { operand, operands });
        }
        check_operand(
            "the image that a prologue makes",
            stored,
            image.len(),
            &[DType::F32],
        )?;
        if prologue.reads(store.operand) {
            return invalid(PrologueError::ReadsImage);
        }
        // The convolution has one more operand: its weight or gradient.
        let count = sources.len() + 1 + self.operands.len();
        if count > MAX_ARGUMENTS {
            return invalid(PrologueError::Arguments(count));
        }
        Ok(())
    }

    fn check_scatter(&self, scatter: &Scatter) -> Result<(), SpecError> {
        let (rank, dims, space, axis) = (self.dims.len(), &self.dims, &scatter.space, scatter.axis);
        check_operand("the value", &scatter.value, rank, &NUMBERS)?;
        check_operand("the index", &scatter.index, rank, &INDEX_TYPES)?;
        let axes_match = space.len() == rank
            && axis < rank
            && (0..rank).all(|a| a == axis || dims[a] == space[a]);
        let folds = [ReduceOp::Sum, ReduceOp::Prod, ReduceOp::Max, ReduceOp::Min];
        if !folds.contains(&scatter.reduce) {
            return Err(SpecError::ScatterReduce(scatter.reduce));
        }
        if axes_match {
            Ok(())
        } else {
            Err(SpecError::Scatter {
                space: space.to_vec(),
                axis,
                dims: dims.to_vec(),
            })
        }
    }

    fn check_slice_assign(&self, assign: &SliceAssign) -> Result<(), SpecError> {
        let (rank, dtype) = (self.dims.len(), assign.result.dtype);
        check_operand("the result", &assign.result, rank, &DType::ALL)?;
        if let Some(base) = &assign.base {
            check_operand("the base", base, rank, &[dtype])?;
        }
        check_operand("the value", &assign.value, rank, &[dtype])?;
        let mut ok = assign.space.len() == rank
            && assign.start.len() == rank
            && assign.step.len() == rank
            && assign.step.iter().all(|&step| step > 0);
        if let Some((axis, at)) = &assign.place {
            check_operand("the place", at, rank, &[DType::I32])?;
            ok &= *axis < rank && at.strides[*axis].is(0);
        }
        if ok {
            Ok(())
        } else {
            Err(SpecError::SliceAssign {
                space: assign.space.to_vec(),
                dims: self.dims.to_vec(),
            })
        }
    }

    /// The mistake of an anchor that writes outside of its result in a run of these sizes, if it
    /// does.
    pub(crate) fn outside(&self, env: &Env) -> Option<&'static str> {
        let size = |size: Size| size.at(env);
        match &self.body {
            Body::SliceAssign(assign) if assign.space.iter().all(|&n| size(n) > 0) => {
                let is_inside = (0..self.dims.len()).all(|axis| {
                    let start = size(assign.start[axis]);
                    let last = (size(assign.space[axis]) - 1) * i64::from(assign.step[axis]);
                    // A part at a place of its own is moved into the axis.
                    let is_placed = matches!(assign.place, Some((placed, _)) if placed == axis);
                    start >= 0 && (is_placed || start + last < size(self.dims[axis]))
                });
                (!is_inside).then_some("a part outside of the result")
            }
            Body::AttentionGrad(grad) => {
                let [.., rows, columns] = self.dims[..] else {
                    return None;
                };
                let is_whole = size(rows) == size(grad.queries) + 2 * size(grad.of.keys)
                    && size(columns) == size(grad.of.width);
                (!is_whole).then_some("gradients of attention outside of the result")
            }
            _ => None,
        }
    }

    fn check_collective(&self, collective: &Collective) -> Result<(), SpecError> {
        let (dims, ranks) = (&self.dims, collective.group.ranks);
        let space = collective.source_space(dims);
        let is_sum = collective.op == CollectiveOp::ReduceScatter;
        let types = if is_sum {
            &[DType::F32][..]
        } else {
            &DType::ALL
        };
        check_operand("the source", &collective.source, space.len(), types)?;
        let dtype = collective.source.dtype;
        check_operand("the result", &collective.result, dims.len(), &[dtype])?;
        let rows = if is_sum { &space } else { dims };
        let whole = rows.first().is_some_and(|d| d.is(i64::from(ranks)))
            && is_contiguous(&collective.source, &space)
            && is_contiguous(&collective.result, dims);
        if ranks > 0 && collective.group.stride > 0 && whole {
            Ok(())
        } else {
            Err(SpecError::Collective {
                ranks,
                dims: dims.to_vec(),
            })
        }
    }

    fn check_prefix_reduce(&self, reduction: &PrefixReduce) -> Result<(), SpecError> {
        let rank = self.dims.len();
        let finds = matches!(reduction.op, PrefixOp::ArgMax | PrefixOp::ArgMin);
        let types = match reduction.op {
            PrefixOp::Sum | PrefixOp::Linear => &NUMBERS[..],
            PrefixOp::LogSumExp => &[DType::F32],
            PrefixOp::ArgMax | PrefixOp::ArgMin => &SORTED,
        };
        check_operand("the source", &reduction.source, rank, types)?;
        let dtype = reduction.source.dtype;
        if let Some(factor) = &reduction.factor {
            check_operand("the factor", factor, rank, &[dtype])?;
        }
        let result = if finds { DType::I32 } else { dtype };
        check_operand("the result", &reduction.result, rank, &[result])?;
        let linear = reduction.op == PrefixOp::Linear;
        if rank == 0 || linear != reduction.factor.is_some() || (finds && reduction.exclusive) {
            return Err(SpecError::PrefixReduce {
                op: reduction.op,
                axes: rank,
            });
        }
        Ok(())
    }
}

fn check_pool(pool: &Pool2d, rank: usize) -> Result<(), SpecError> {
    check_window(&pool.window, rank)?;
    let averages = matches!(pool.kind, PoolKind::Avg { .. });
    let types = if averages {
        &[DType::F32][..]
    } else {
        &DType::ALL[..]
    };
    check_operand("the image", &pool.x, 4, types)?;
    match (&pool.arg, pool.kind) {
        (None, _) => Ok(()),
        (Some(arg), PoolKind::Max) => check_positions(arg, &pool.window),
        (Some(_), kind) => Err(SpecError::PoolPositions(kind)),
    }
}

fn check_pool_grad(pool: &Pool2dGrad, rank: usize) -> Result<(), SpecError> {
    check_window(&pool.window, rank)?;
    check_operand("the gradient", &pool.dy, 4, &[DType::F32])?;
    match (pool.kind, &pool.arg) {
        (PoolKind::Max, Some(arg)) => check_positions(arg, &pool.window),
        (PoolKind::Avg { .. }, None) => Ok(()),
        (kind, arg) => Err(SpecError::PoolGradPositions {
            kind,
            positions: arg.is_some(),
        }),
    }
}

fn check_window(window: &Window, rank: usize) -> Result<(), SpecError> {
    if rank != 4 {
        return Err(SpecError::PoolRank { axes: rank });
    }
    let nonzero = window.k.iter().chain(&window.stride).all(|&n| n > 0);
    let small = window
        .k
        .iter()
        .chain(&window.stride)
        .chain(&window.pad)
        .all(|&n| n <= WINDOW_MAX);
    if nonzero && small {
        Ok(())
    } else {
        Err(SpecError::Window(*window))
    }
}

/// Fails unless stored positions can name every element of a window.
fn check_positions(arg: &Operand, window: &Window) -> Result<(), SpecError> {
    check_operand("the positions", arg, 4, &[DType::U8, DType::I32])?;
    if arg.dtype == DType::U8 && window.k[0].saturating_mul(window.k[1]) > 256 {
        return Err(SpecError::WindowPositions { k: window.k });
    }
    Ok(())
}
