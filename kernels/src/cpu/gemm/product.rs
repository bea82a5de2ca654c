//! The choice of a kernel for a product.

use super::Matmul;
use super::few_rows::FewRows;
use crate::cpu::{Config, Launch, MicroBatchLimits, SpecError};
use crate::size::Env;
use crate::spec::{Body, Spec};

/// [`Body::Matmul`] or [`Body::QuantizedMatmul`], prepared.
pub(crate) enum Product {
    FewRows(Box<FewRows>),
    Blocks(Box<Matmul>),
}

impl Product {
    /// Prepared for sizes up to `bound`, of slices of a run of sizes up to `whole`, with a worker's
    /// part of the workspace of no more than `most` bytes where that is possible.
    pub fn new(
        spec: &Spec,
        bounds: [&Env; 2],
        config: &Config,
        most: usize,
    ) -> Result<Self, SpecError> {
        if let Body::QuantizedMatmul(body) = &spec.body
            && !body.format.has_kernel()
        {
            let message = format!("blocks of weights in {:?}", body.format);
            return Err(SpecError::unsupported(message));
        }
        Ok(match FewRows::new(spec, bounds, config)? {
            Some(few) => Product::FewRows(Box::new(few)),
            None => Product::Blocks(Box::new(Matmul::new(spec, bounds, config, most)?)),
        })
    }

    pub fn micro_batch_limits(&self, spec: &Spec, bound: &Env) -> Option<MicroBatchLimits> {
        match self {
            Product::FewRows(_) => Some(MicroBatchLimits { unit: 1, sums: 0 }),
            Product::Blocks(product) => product.micro_batch_limits(spec, bound),
        }
    }

    pub fn workspace(&self) -> u64 {
        match self {
            Product::FewRows(few) => few.workspace(),
            Product::Blocks(product) => product.workspace(),
        }
    }

    pub fn slower(&self) -> f64 {
        match self {
            Product::FewRows(_) => 1.0,
            Product::Blocks(product) => product.slower(),
        }
    }

    /// # Safety
    /// The addresses must be as [`Launch`] promises.
    pub unsafe fn run(&self, spec: &Spec, launch: &Launch) {
        // SAFETY: the caller's promise.
        unsafe {
            match self {
                Product::FewRows(few) => few.run(spec, launch),
                Product::Blocks(product) => product.run(spec, launch),
            }
        }
    }
}
