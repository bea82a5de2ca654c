//! The verifier: the invariants of a well-formed program.

use slabwise_kernels::size::Env;
use slabwise_kernels::spec::Access;
use slabwise_planner::DagError;

use super::{KernelCall, Piece, Program, Recompute};

/// The first broken invariant of a [`Program`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IrError {
    /// A value that the planner places comes after one that it does not place.
    #[error("value {value}: values that the planner places come first")]
    Unsorted {
        /// The value.
        value: usize,
    },
    /// A call names a value that does not exist.
    #[error("{kernel}: value {value} does not exist")]
    NoValue {
        /// The call.
        kernel: String,
        /// The value.
        value: u32,
    },
    /// A call has more or fewer arguments than its spec.
    #[error("{kernel}: it has {args} arguments, its spec {expected}")]
    Arguments {
        /// The call.
        kernel: String,
        /// Its arguments.
        args: usize,
        /// The arguments of its spec.
        expected: usize,
    },
    /// A call depends on a call that does not exist, or on itself.
    #[error("{kernel}: it depends on call {before}, which does not come in question")]
    Dependency {
        /// The call.
        kernel: String,
        /// The call that it depends on.
        before: u32,
    },
    /// An argument has another type than its operand.
    #[error("{kernel}: {value} is {is}, its operand {operand}")]
    Type {
        /// The call.
        kernel: String,
        /// The value.
        value: String,
        /// Its type.
        is: String,
        /// The operand's.
        operand: String,
    },
    /// A call reads or writes beyond the end of a value.
    #[error("{kernel}: it touches {needed} bytes of {value}, which has {bytes}")]
    Beyond {
        /// The call.
        kernel: String,
        /// The value.
        value: String,
        /// The end of the bytes that it touches.
        needed: u64,
        /// The bytes of the value.
        bytes: u64,
    },
    /// A recompute clone has a side effect, or writes other values than its call.
    #[error("{kernel}: its recompute clone writes other values, or assigns a variable")]
    Clone {
        /// The call.
        kernel: String,
    },
    /// The prepared kernel computes something else than the call.
    #[error("{kernel}: it is prepared for another spec")]
    Prepared {
        /// The call.
        kernel: String,
    },
    /// The order of the calls, or a permission to compute in place, is impossible.
    #[error(transparent)]
    Dag(#[from] DagError),
}

impl Program {
    /// Checks every invariant that passes rely on; the error names the first that is broken.
    ///
    /// # Errors
    /// If one is broken.
    pub fn verify(&self) -> Result<(), IrError> {
        let planned = self.planned();
        if let Some(at) = (planned..self.values.len()).find(|&at| self.values[at].is_planned()) {
            return Err(IrError::Unsorted { value: at });
        }
        let bounds = self.graph.symbols.bounds();
        for (at, call) in (0u32..).zip(&self.kernels) {
            self.verify_call(call, &bounds)?;
            let count = self.kernels.len();
            let wrong = |a: &&super::CallId| a.index() >= count || a.0 == at;
            if let Some(before) = call.after.iter().find(wrong) {
                return Err(IrError::Dependency {
                    kernel: call.name.clone(),
                    before: before.0,
                });
            }
            if let Recompute::Clone(clone) = &call.recompute {
                self.verify_call(clone, &bounds)?;
                let writes = |call| {
                    self.touched(call).map(|mut list| {
                        list.sort_unstable();
                        list
                    })
                };
                if writes(clone)[1] != writes(call)[1] || !self.assigned(clone).is_empty() {
                    return Err(IrError::Clone {
                        kernel: call.name.clone(),
                    });
                }
            }
        }
        Ok(self.to_dag().verify()?)
    }

    fn verify_call(&self, call: &KernelCall, bounds: &Env) -> Result<(), IrError> {
        let kernel = || call.name.clone();
        if let Some(missing) = call.args.iter().find(|v| v.index() >= self.values.len()) {
            return Err(IrError::NoValue {
                kernel: kernel(),
                value: missing.0,
            });
        }
        let arguments = call.spec.arguments();
        let sums = call.args.last().is_some_and(|last| {
            call.micro_batch.is_some() && self.value(*last).piece == Piece::PartialSums
        });
        let expected = arguments.len() + usize::from(sums);
        if call.args.len() != expected {
            return Err(IrError::Arguments {
                kernel: kernel(),
                args: call.args.len(),
                expected,
            });
        }
        if call.kernel.as_ref().is_some_and(|k| *k.spec() != call.spec) {
            return Err(IrError::Prepared { kernel: kernel() });
        }
        for (value, (operand, space, access)) in call.args.iter().zip(&arguments) {
            let value = self.value(*value);
            if value.dtype != operand.dtype {
                return Err(IrError::Type {
                    kernel: kernel(),
                    value: value.name.clone(),
                    is: value.dtype.to_string(),
                    operand: operand.dtype.to_string(),
                });
            }
            // The bounds say nothing of a data-dependent size, and a micro-batch touches a part.
            let sized = value.is_planned() && !value.data_dependent && call.micro_batch.is_none();
            let elements = operand.extent(space, bounds);
            let needed = elements.saturating_mul(operand.dtype.bytes() as u64);
            let touches = !(*access == Access::Read && elements == 0);
            if sized && touches && needed > value.bytes {
                return Err(IrError::Beyond {
                    kernel: kernel(),
                    value: value.name.clone(),
                    needed,
                    bytes: value.bytes,
                });
            }
        }
        Ok(())
    }
}
