//! Errors of passes.

use std::path::PathBuf;

use slabwise_kernels::spec::SpecError;
use slabwise_planner::PlanError;

use super::pipeline::Broken;
use super::validate::Mismatch;
use crate::error::Error;

/// A failure of a pass. The rules of the graph leave no program for which one fails, so all but
/// those about files are bugs of the compiler.
#[derive(Debug, thiserror::Error)]
pub enum PassError {
    /// A kernel has no form, because no strides describe its operands.
    #[error("{kernel} has no strides")]
    NoStrides {
        /// The kernel.
        kernel: String,
    },
    /// The byte count of a value overflows.
    #[error("{value}: the byte count of {shape} overflows")]
    Overflow {
        /// The value.
        value: String,
        /// Its shape.
        shape: String,
    },
    /// The device has no kernel for a spec.
    #[error("{kernel}: {source}")]
    Prepare {
        /// The call.
        kernel: String,
        /// The spec's fault.
        source: SpecError,
    },
    /// The planner refuses a program.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The output of a pass is not well-formed.
    #[error("after {pass}: {source}")]
    Broken {
        /// The pass.
        pass: &'static str,
        /// The broken invariant.
        source: Broken,
    },
    /// A pass changed the meaning of a program.
    #[error("a pass changed the program: {0}")]
    Changed(#[from] Mismatch),
    /// A dump could not be written.
    #[error("{path}: {source}")]
    Dump {
        /// The file or folder.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
}

impl From<PassError> for Error {
    fn from(error: PassError) -> Self {
        match error {
            PassError::Dump { path, source } => Error::Io { path, source },
            error => Error::Internal(error.to_string()),
        }
    }
}
