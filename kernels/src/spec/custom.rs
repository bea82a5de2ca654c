//! The anchor that is a function of the user.

use smallvec::SmallVec;

use super::analysis::is_contiguous;
use super::verify::check_operand;
use super::{Access, Dims, MAX_ARGUMENTS, Operand, Spec, SpecError};
use crate::custom::CustomKernel;
use crate::dtype::DType;

/// The most inputs of a custom kernel; its result is one more argument.
pub const CUSTOM_INPUTS_MAX: usize = MAX_ARGUMENTS - 1;

/// See [`Body::Custom`](super::Body::Custom). Operands are contiguous and start at any element.
/// Writes its result itself: there is no `code`.
#[derive(Clone, Debug, PartialEq)]
pub struct Custom {
    /// The function.
    pub kernel: CustomKernel,
    /// The inputs and their spaces.
    pub inputs: Vec<(Operand, Dims)>,
    /// The result, strides over `dims`.
    pub result: Operand,
}

impl Custom {
    pub(super) fn operands(&self, dims: &Dims) -> SmallVec<[(Operand, Dims, Access); 3]> {
        let inputs = self.inputs.iter();
        inputs
            .map(|(operand, space)| (operand.clone(), space.clone(), Access::Read))
            .chain([(self.result.clone(), dims.clone(), Access::Write)])
            .collect()
    }

    pub(super) fn check(&self, spec: &Spec) -> Result<(), SpecError> {
        let types = self.kernel.inputs();
        let mut fits = types.len() == self.inputs.len();
        for ((operand, space), dtype) in self.inputs.iter().zip(types) {
            check_operand("an input", operand, space.len(), &[*dtype])?;
            fits &= is_contiguous(operand, space);
        }
        check_operand(
            "the result",
            &self.result,
            spec.dims.len(),
            &[self.kernel.result()],
        )?;
        fits &= is_contiguous(&self.result, &spec.dims) && self.result.dtype != DType::Bool;
        match fits {
            true => Ok(()),
            false => Err(SpecError::unsupported(format!(
                "{:?} of other operands, which are not contiguous, or with a result of bool",
                self.kernel
            ))),
        }
    }
}
