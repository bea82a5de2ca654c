//! Sums over the ranks of a world.

use std::panic::Location;

use slabwise_kernels::dtype::DType;

use super::Tensor;
use crate::ops::GraphBuilder;
use crate::trace::sum_over_ranks;

impl<'t> Tensor<'t> {
    /// The sum of this tensor over the ranks of the [world](crate::Session::on) that the session is
    /// in, the same on every rank: the tensor itself in a world of one. Ranks are added in a fixed
    /// tree. Its gradient is that of the sum of what all ranks compute.
    ///
    /// Of f32 or i32 numbers, of a shape without bounded dimensions; integers wrap.
    #[track_caller]
    pub fn sum_over_ranks(self) -> Tensor<'t> {
        let at = Location::caller();
        let spread = self.trace().spread();
        self.trace().record(at, &[self], |g, ids| {
            let dtype = g.dtype(ids[0]);
            if !matches!(dtype, DType::F32 | DType::I32) {
                return Err(format!(
                    "sum_over_ranks does not take {dtype}; convert with cast"
                ));
            }
            let dims = g.dims(ids[0]);
            if dims.iter().any(|d| d.as_fixed().is_none()) {
                let dims = g.symbols.show(dims);
                return Err(format!(
                    "sum_over_ranks of {dtype} {dims}: its length may differ between ranks"
                ));
            }
            Ok(match spread {
                Some(spread) => sum_over_ranks(g, ids[0], spread.ranks),
                None => ids[0],
            })
        })
    }

    /// The mean of this loss over the whole batch, on every rank of the
    /// [world](crate::Session::on) that the session is in: a rank's loss, the mean over its own
    /// examples, counts by their number. In a world of one, the loss itself. An f32 scalar.
    #[track_caller]
    pub fn mean_over_ranks(self) -> Tensor<'t> {
        let (at, trace) = (Location::caller(), self.trace());
        let loss = trace.scalar_loss(at, "mean_over_ranks", self);
        match trace.spread().filter(|_| !loss.is_poisoned()) {
            Some(spread) => {
                let share = trace.share(at, spread, 1);
                trace.on_behalf(at, || (loss * share).sum_over_ranks())
            }
            None => loss,
        }
    }
}
