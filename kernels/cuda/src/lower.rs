//! The lowering of a spec for CUDA: [`lower`] chooses the generator of its source.
//!
//! It needs neither a driver nor a compiler.

pub(crate) mod horizontal;
pub(crate) mod products;
mod scan;

use slabwise_kernels::size::Env;
use slabwise_kernels::spec::{Body, Spec, SpecError};

use crate::abi::{Dispatch, Target, WORDS_MAX, Word};
use crate::attention;
use crate::gemm::plan::JOIN;
use crate::lowered::Lowered;
use crate::source::{
    custom, elementwise, gather, non_max_suppression, nonzero, pool, prefix_reduce, rows, scatter,
    slice_assign, sort,
};

/// The source for a spec that runs with sizes up to `bounds`.
pub fn lower(spec: &Spec, bounds: &Env, target: &Target) -> Result<Lowered, SpecError> {
    spec.check_anchor()?;
    checked(generated(spec, bounds, target)?, bounds)
}

/// Whether there is a kernel for a spec.
pub fn has_kernel(spec: &Spec, bounds: &Env, target: &Target) -> bool {
    lower(spec, bounds, target).is_ok()
}

/// The same kernel, if the words of its launches fit in a parameter.
fn checked(lowered: Lowered, bounds: &Env) -> Result<Lowered, SpecError> {
    let launches = lowered.launches(bounds);
    let most = launches.iter().map(|launch| launch.words.len()).max();
    match most.filter(|&words| words > WORDS_MAX) {
        Some(words) => Err(SpecError::unsupported(format!(
            "a kernel with a parameter of {words} words: at most {WORDS_MAX} fit"
        ))),
        None => Ok(lowered),
    }
}

fn generated(spec: &Spec, bounds: &Env, target: &Target) -> Result<Lowered, SpecError> {
    match &spec.body {
        Body::Loop if spec.reduced == 0 => elementwise::lower(spec, bounds, target),
        Body::Loop => rows::lower(spec, bounds, target),
        Body::Matmul(_) | Body::Conv2d(_) | Body::QuantizedMatmul(_) => {
            products::lower(spec, bounds, target)
        }
        Body::Pool2d(pool) => pool::lower(spec, pool, bounds, target),
        Body::Pool2dGrad(pool) => pool::lower_grad(spec, pool, bounds, target),
        Body::Gather(gather) => gather::lower(spec, gather, bounds, target),
        Body::Scatter(scatter) => scatter::lower(spec, scatter, bounds, target),
        Body::SliceAssign(assign) => slice_assign::lower(spec, assign, bounds, target),
        Body::PrefixReduce(reduction) => prefix_reduce::lower(spec, reduction, bounds, target),
        Body::Attention(of) => attention::lower(spec, of, bounds, target),
        Body::AttentionGrad(grad) => attention::lower_grad(spec, grad, bounds, target),
        Body::BoundsCheck(check) => gather::lower_check(spec, check, bounds, target),
        Body::Nonzero(nonzero) => nonzero::lower(spec, nonzero, bounds, target),
        Body::Sort(sort) => sort::lower(spec, sort, bounds, target),
        Body::NonMaxSuppression(non_max_suppression) => {
            non_max_suppression::lower(spec, non_max_suppression, bounds, target)
        }
        Body::Custom(of) => custom::lower(spec, of, bounds, target),
        Body::Scan(scan) => scan::lower(scan, bounds, target),
        Body::Collective(_) => Err(SpecError::unsupported(
            "ranks exchange bytes on the CPU only",
        )),
    }
}

/// Cycles between the ends of two small kernels of which one depends on the other.
const LAUNCH_CYCLES: f64 = 4000.0;

/// The modelled cycles of a product, and of another kernel those of its launches alone and of blocks
/// that find out which is the last. `None` if there is no kernel.
pub fn cycles(spec: &Spec, bounds: &Env, target: &Target) -> Option<f64> {
    if spec.body.is_product() {
        return products::cycles(spec, bounds, target);
    }
    let counts = |word: &Word| matches!(word, Word::Counters(_));
    let launch = |dispatch: &Dispatch| {
        let joins = dispatch.words.iter().any(counts);
        LAUNCH_CYCLES + if joins { JOIN } else { 0.0 }
    };
    let launches = lower(spec, bounds, target).ok()?.launches(bounds);
    Some(launches.iter().map(launch).sum())
}

#[cfg(test)]
mod tests {
    use slabwise_kernels::dtype::DType;
    use slabwise_kernels::scalar::ScalarOp;
    use slabwise_kernels::size::Size;
    use slabwise_kernels::spec::{Inst, MAX_ACCESSES, MAX_AXES, Matmul, Operand, Store};

    use super::*;
    use crate::description::Description;

    #[test]
    fn a_parameter_of_too_many_words_is_refused() {
        let operand = |stride: i64| Operand {
            dtype: DType::F32,
            offset: Size::fixed(stride),
            strides: (0..MAX_AXES as i64)
                .map(|axis| Size::fixed(stride + axis))
                .collect(),
        };
        let spec = |count: usize| {
            let mut code = vec![Inst::Acc];
            for k in 1..count {
                code.push(Inst::Load(k as u16));
                let last = code.len() as u16 - 2;
                code.push(Inst::Op(ScalarOp::Add, [last, last + 1, 0]));
            }
            let value = code.len() as u16 - 1;
            Spec {
                body: Body::Matmul(Matmul {
                    in_order: true,
                    k: Size::fixed(3),
                    a: operand(2),
                    b: operand(3),
                }),
                dims: [Size::fixed(2); MAX_AXES].into_iter().collect(),
                reduced: 0,
                operands: (0..count as i64).map(|k| operand(100 * k + 7)).collect(),
                indices: vec![],
                code,
                stores: vec![Store { value, operand: 0 }],
            }
        };
        let target = Description::nearest(90).target();
        let lowered = |count| lower(&spec(count), &Env::default(), &target);
        assert!(lowered(20).is_ok());
        let error = lowered(MAX_ACCESSES).expect_err("too many words");
        assert!(error.to_string().contains("at most 512 fit"), "{error}");
    }
}
