//! Kernels without an anchor: elementwise loops, rows, reductions.
//!
//! The iteration space is cut into tiles and the tiles into chunks that threads take. How it is cut
//! depends on sizes and strides alone, never on the number of threads, and so does every rounding
//! error.

mod alike;
mod elementwise;
mod reduce;

pub use alike::has_same_sums;

use smallvec::SmallVec;

use super::tile::{Bound, TileCode};
use super::{Config, Launch, MicroBatchLimits, SpecError};
use crate::micro_batch::MicroBatching;
use crate::size::{Env, Size};
use crate::spec::{Inst, MAX_AXES, Spec};
use reduce::Reduction;

/// The most points that a thread takes at a time: enough work to be worth handing out.
const CHUNK_POINTS_MAX: usize = 1 << 15;

/// The least points that a thread takes at a time, if the code is short.
const CHUNK_POINTS_MIN: usize = CHUNK_POINTS_MAX / 8;

/// Points that a thread takes at a time of a loop over so many, at least `least`: fewer of a small
/// loop, so that all threads have a part of it.
fn chunk(points: usize, least: usize) -> usize {
    (points / 8).clamp(least, CHUNK_POINTS_MAX)
}

/// A prepared [`crate::spec::Body::Loop`].
pub(crate) struct Loop {
    code: TileCode,
    /// The spec's axes, kept before reduced, in the order of iteration.
    order: SmallVec<[usize; MAX_AXES]>,
    threads: usize,
    reduction: Option<Reduction>,
    /// Bytes for the partial results of a split reduction.
    partial_bytes: usize,
}

impl Loop {
    pub fn new(spec: &Spec, bound: &Env, config: &Config) -> Result<Self, SpecError> {
        let mut code = TileCode::new(spec, bound, config)?;
        let order = order(spec, bound);
        let reduction = if spec.reduced > 0 {
            Some(Reduction::new(spec, bound, &order, &mut code)?)
        } else {
            None
        };
        let partial_bytes = reduction
            .as_ref()
            .map_or(0, |reduction| match is_fixed(spec) {
                true => reduction.partial_bytes_at(&mut Bound::sizes(&code, spec, bound, &order)),
                false => reduction.partial_bytes(),
            });
        Ok(Loop {
            code,
            order,
            threads: config.threads,
            reduction,
            partial_bytes,
        })
    }

    /// Where slices of a sum over the batch may end, and the partial sums between them; `None` if a
    /// size beside the number of examples varies, because tiles of a run at smaller sizes end at
    /// other places.
    pub fn micro_batch_limits(
        &self,
        spec: &Spec,
        bound: &Env,
        micro_batching: &MicroBatching,
    ) -> Option<MicroBatchLimits> {
        let (reduction, (axis, _)) = (self.reduction.as_ref()?, micro_batching.axis?);
        let mut symbols = sizes(spec).flat_map(|size| size.symbols());
        if symbols.any(|symbol| symbol != micro_batching.batch) {
            return None;
        }
        // Tiles go through the batch outermost.
        if self.order[spec.dims.len() - spec.reduced] != axis {
            return None;
        }
        let examples = bound.0[usize::from(micro_batching.batch.0)] as usize;
        reduction.micro_batch_limits(
            examples,
            &mut Bound::sizes(&self.code, spec, bound, &self.order),
            &self.code,
        )
    }

    /// One scratch memory per thread, then the partial results of split reductions.
    pub fn workspace(&self) -> u64 {
        (self.threads * self.code.scratch_bytes() + self.partial_bytes) as u64
    }

    /// # Safety
    /// The launch must be as [`Launch`] says, for this spec.
    pub unsafe fn run(&self, spec: &Spec, launch: &Launch) {
        // SAFETY: the caller's promise.
        unsafe {
            match &self.reduction {
                None => self.elementwise(spec, launch),
                Some(reduction) => self.reduce(reduction, spec, launch),
            }
        }
    }

    /// The scratch memory of one worker.
    fn scratch(&self, launch: &Launch, worker: usize) -> *mut u8 {
        launch
            .workspace
            .wrapping_add(worker * self.code.scratch_bytes())
    }
}

/// Whether a loop has the same sizes and strides in every run.
fn is_fixed(spec: &Spec) -> bool {
    sizes(spec).all(|size| size.as_fixed().is_some())
}

/// The lengths of the axes of a loop, and all strides.
fn sizes(spec: &Spec) -> impl Iterator<Item = Size> {
    let strides = spec
        .operands
        .iter()
        .map(|operand| &operand.strides)
        .chain(&spec.indices);
    strides.flatten().chain(&spec.dims).copied()
}

/// The order in which axes are iterated: within the kept and within the reduced axes, by descending
/// stride of the stored operand or, in reductions, of the largest operand read. Results do not
/// depend on the order, except for reductions to positions, which keep the original order.
fn order(spec: &Spec, bound: &Env) -> SmallVec<[usize; MAX_AXES]> {
    let axes = spec.dims.len();
    let kept = axes - spec.reduced;
    let mut order: SmallVec<[usize; MAX_AXES]> = (0..axes).collect();
    let stored = spec
        .stores
        .first()
        .map(|s| usize::from(s.operand))
        .filter(|_| spec.reduced == 0);
    // A reduction reads more than it writes: follow the operand that varies most.
    let read = spec.code.iter().filter_map(|i| {
        if let Inst::Load(k) = i {
            Some(usize::from(*k))
        } else {
            None
        }
    });
    let points = |k: usize| {
        let varies = spec
            .dims
            .iter()
            .zip(&spec.operands[k].strides)
            .filter(|(_, s)| !s.is(0));
        varies.fold(1i64, |p, (d, _)| p.saturating_mul(d.at(bound)))
    };
    let Some(guide) = stored.or_else(|| read.max_by_key(|&k| points(k))) else {
        return order;
    };
    let stride = |axis: &usize| {
        std::cmp::Reverse(spec.operands[guide].strides[*axis].at(bound).unsigned_abs())
    };
    // An axis along which the guide repeats has no stride to compare and stays outermost of its
    // equals.
    let key = |axis: &usize| {
        if spec.operands[guide].strides[*axis].is(0) {
            std::cmp::Reverse(u64::MAX)
        } else {
            stride(axis)
        }
    };
    order[..kept].sort_by_key(key);
    if !spec.code.iter().any(|i| {
        matches!(
            i,
            Inst::Reduce(
                crate::spec::ReduceOp::ArgMax | crate::spec::ReduceOp::ArgMin,
                _
            )
        )
    }) {
        order[kept..].sort_by_key(key);
    }
    order
}
