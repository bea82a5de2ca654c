//! Source generation for every spec: [`lower`].

mod elementwise;
mod gather;
mod horizontal;
mod non_max_suppression;
mod nonzero;
pub(crate) mod params;
mod pool;
mod rows;
mod scan;
mod scatter;
mod slice_assign;
mod sort;
pub(crate) mod space;
mod transpose;

pub use horizontal::{FusedLaunch, fused_name, lower_fused};
pub use rows::has_same_sums;
use slabwise_kernels::size::Env;
use slabwise_kernels::spec::{Body, Spec, SpecError};

use crate::gemm;
use crate::lower::{Lowered, Target};

/// The prelude of every program: declarations shared by the functions.
pub const PRELUDE: &str = concat!(
    include_str!("prelude.cuh"),
    include_str!("choose.cuh"),
    include_str!("../gemm/sides.cuh"),
    include_str!("../gemm/tiles.cuh"),
    include_str!("../gemm/registers.cuh"),
    include_str!("../gemm/tensor.cuh"),
    include_str!("../gemm/vectors.cuh"),
    include_str!("../conv/depthwise.cuh"),
);

/// The default number of threads of a block.
pub(crate) const THREADS: u32 = 256;

/// The source for a spec that runs with sizes up to `bounds`.
pub fn lower(spec: &Spec, bounds: &Env, target: &Target) -> Result<Lowered, SpecError> {
    spec.check_anchor()?;
    match &spec.body {
        Body::Loop if spec.reduced == 0 => elementwise::lower(spec, bounds, target),
        Body::Loop => rows::lower(spec, bounds, target),
        Body::Matmul(_) | Body::Conv2d(_) => gemm::lower(spec, bounds, target),
        Body::Pool2d(pool) => pool::lower(spec, pool, bounds, target),
        Body::Pool2dGrad(pool) => pool::lower_grad(spec, pool, bounds, target),
        Body::Gather(gather) => gather::lower(spec, gather, bounds, target),
        Body::Scatter(scatter) => scatter::lower(spec, scatter, bounds, target),
        Body::SliceAssign(assign) => slice_assign::lower(spec, assign, bounds, target),
        Body::Scan(scan) => scan::lower(spec, scan, bounds, target),
        Body::BoundsCheck(check) => gather::lower_check(spec, check, bounds, target),
        Body::Nonzero(nonzero) => nonzero::lower(spec, nonzero, bounds, target),
        Body::Sort(sort) => sort::lower(spec, sort, bounds, target),
        Body::NonMaxSuppression(non_max_suppression) => {
            non_max_suppression::lower(spec, non_max_suppression, bounds, target)
        }
        Body::Collective(_) => Err(SpecError::unsupported(
            "ranks exchange bytes on the CPU only",
        )),
    }
}
