//! slabwise compiles a tensor program once, knows every byte before it runs, and runs it inside one slab.
#![forbid(unsafe_code)]

pub mod error;
pub mod graph;
pub mod nn;
pub mod ops;
pub mod optim;
pub mod params;
pub mod passes;
pub mod reference;
pub mod shape;
pub mod tensor;
pub mod trace;

pub use error::{Error, Result};
pub use params::{Init, Param, Params, Scope};
pub use shape::{Dim, Shape};
pub use slabwise_kernels::dtype::DType;
pub use slabwise_kernels::spec::Window;
pub use tensor::{AxisSet, Operand, Tensor};
pub use trace::{State, Trace};

/// What most programs need: `use slabwise::prelude::*`.
pub mod prelude {
    pub use crate::nn::Module;
    pub use crate::ops::ConvGeometry;
    pub use crate::optim::Optimizer;
    pub use crate::{DType, Dim, Init, Param, Params, Result, Scope, Shape, State, Tensor, Trace, Window};
    pub use slabwise_kernels::dtype::DType::{Bool, F32, I32, U8};
    pub use slabwise_planner::Bytes;
}
