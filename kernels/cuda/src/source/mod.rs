//! Source for every spec: [`lower`].

mod elementwise;
pub(crate) mod params;
pub(crate) mod space;

use slabwise_kernels::cpu::SpecError;
use slabwise_kernels::size::Env;
use slabwise_kernels::spec::{Body, Spec};

use crate::lower::{Lowered, Target};

/// What stands in front of every program: what the functions share.
pub const PRELUDE: &str = include_str!("prelude.cuh");

/// Threads of a block where nothing asks for another number.
pub(crate) const THREADS: u32 = 256;

/// Source for a spec that runs with sizes up to `bounds`.
pub fn lower(spec: &Spec, bounds: &Env, target: &Target) -> Result<Lowered, SpecError> {
    match &spec.body {
        Body::Loop if spec.reduced == 0 => elementwise::lower(spec, bounds, target),
        Body::Loop => Err(SpecError("reductions have no CUDA source".into())),
        Body::Matmul(_) => Err(SpecError("matrix products have no CUDA source".into())),
        Body::Conv2d(_) => Err(SpecError("convolutions have no CUDA source".into())),
        Body::Pool2d(_) | Body::Pool2dGrad(_) => Err(SpecError("pooling has no CUDA source".into())),
        Body::Gather(_) | Body::ScatterAdd(_) | Body::CheckIndex(_) => Err(SpecError("indexing has no CUDA source".into())),
        Body::Compact(_) | Body::Sort(_) | Body::Suppress(_) => Err(SpecError("choosing by value has no CUDA source".into())),
    }
}
