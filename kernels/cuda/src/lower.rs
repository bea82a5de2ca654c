//! The lowering of a spec for CUDA: [`lower`] chooses the generator of its source.
//!
//! It needs neither a driver nor a compiler.

pub(crate) mod horizontal;
mod iterate;
pub(crate) mod products;

use slabwise_kernels::size::Env;
use slabwise_kernels::spec::{Body, Spec, SpecError};

use crate::abi::Target;
use crate::attention;
use crate::lowered::Lowered;
use crate::source::{
    elementwise, gather, non_max_suppression, nonzero, pool, rows, scan, scatter, slice_assign,
    sort,
};

/// The source for a spec that runs with sizes up to `bounds`.
pub fn lower(spec: &Spec, bounds: &Env, target: &Target) -> Result<Lowered, SpecError> {
    spec.check_anchor()?;
    match &spec.body {
        Body::Loop if spec.reduced == 0 => elementwise::lower(spec, bounds, target),
        Body::Loop => rows::lower(spec, bounds, target),
        Body::Matmul(_) | Body::Conv2d(_) => products::lower(spec, bounds, target),
        Body::Pool2d(pool) => pool::lower(spec, pool, bounds, target),
        Body::Pool2dGrad(pool) => pool::lower_grad(spec, pool, bounds, target),
        Body::Gather(gather) => gather::lower(spec, gather, bounds, target),
        Body::Scatter(scatter) => scatter::lower(spec, scatter, bounds, target),
        Body::SliceAssign(assign) => slice_assign::lower(spec, assign, bounds, target),
        Body::Scan(scan) => scan::lower(spec, scan, bounds, target),
        Body::Attention(of) => attention::lower(spec, of, bounds, target),
        Body::AttentionGrad(grad) => attention::lower_grad(spec, grad, bounds, target),
        Body::BoundsCheck(check) => gather::lower_check(spec, check, bounds, target),
        Body::Nonzero(nonzero) => nonzero::lower(spec, nonzero, bounds, target),
        Body::Sort(sort) => sort::lower(spec, sort, bounds, target),
        Body::NonMaxSuppression(non_max_suppression) => {
            non_max_suppression::lower(spec, non_max_suppression, bounds, target)
        }
        Body::Iterate(iterate) => iterate::lower(iterate, bounds, target),
        Body::Collective(_) => Err(SpecError::unsupported(
            "ranks exchange bytes on the CPU only",
        )),
    }
}

/// Cycles between the ends of two small kernels of which one depends on the other.
const LAUNCH_CYCLES: f64 = 4000.0;

/// The modelled cycles of a product, and of another kernel those of its launches alone. `None` if
/// there is no kernel.
pub fn cycles(spec: &Spec, bounds: &Env, target: &Target) -> Option<f64> {
    if let Body::Matmul(_) | Body::Conv2d(_) = spec.body {
        return products::cycles(spec, bounds, target);
    }
    let launches = lower(spec, bounds, target).ok()?.launches(bounds).len();
    Some(launches as f64 * LAUNCH_CYCLES)
}
