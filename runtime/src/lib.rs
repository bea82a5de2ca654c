//! slabwise compiles a tensor program once, plans every byte before it runs, and runs it inside one
//! slab.
#![forbid(unsafe_code)]

mod buffer;
mod checkpoint;
pub mod data;
pub mod feed;
pub mod fit;
mod init;
pub mod memory;
pub mod nn;
pub mod optim;
pub mod params;
mod program;
mod session;
pub mod tensor;
pub mod trace;
pub mod weights;
pub mod world;

// The modules of the compiler, under the names that the modules of this crate use.
use slabwise_compiler::{backend, compile, device, graph, ir, ops, passes, plan, words};
pub use slabwise_compiler::{error, settings, shape};

pub use ::half;
pub use backend::Resources;
pub use buffer::{Buffer, Donated, Output};
pub use compile::{CompileOptions, Measures, Tuning};
pub use device::Device;
pub use error::{Error, Result};
pub use fit::Fit;
pub use memory::budget::Budget;
pub use memory::offload::Offload;
pub use params::{Init, Param, Params, Scope};
pub use passes::{ChannelsLast, EpilogueSums, Fuse, RowPadding, Simplify};
pub use plan::{
    BudgetReport, Communication, CompileStage, DataDependentBuffer, MicroBatched, OffloadedValue,
    PaddingReport, Persistent, Plan,
};
pub use program::Program;
pub use program::shapes::PlanCounts;
pub use session::{
    AnyProgram, DebugValue, KernelFamily, KernelTime, LayerSummary, Loss, Profile, Roofline,
    RunStats, Session, Summary,
};
pub use shape::{Dim, Shape};
pub use slabwise_compiler::shapes::{DynamicShapes, LengthRanges};
pub use slabwise_kernels::cpu::Isa;
pub use slabwise_kernels::custom::{CustomKernel, CustomRun};
pub use slabwise_kernels::dtype::DType;
pub use slabwise_kernels::spec::{Quantization, Window};
pub use slabwise_planner::report::{ReceivedBytes, Run, RunStep};
pub use slabwise_planner::{Bytes, Options as PlannerOptions, OrderPolicy};
pub use tensor::{AxisIndex, AxisSet, Mask, Operand, Running, Scatter, Tensor, Tiles};
pub use trace::{Key, LossScale, Precision, Scan, State, Trace};
pub use world::{Mesh, Strategy, World};

/// The program in the readme is compiled with the documentation tests.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;

/// The names that most programs need: `use slabwise::prelude::*`.
pub mod prelude {
    pub use crate::nn::Module;
    pub use crate::ops::ConvGeometry;
    pub use crate::optim::Optimizer;
    pub use crate::{
        Budget, Bytes, DType, Device, Dim, Init, Mask, Offload, Param, Params, Program, Result,
        Scope, Session, Shape, State, Tensor, Tiles, Trace, Window,
    };
    pub use slabwise_kernels::dtype::DType::{BF16, Bool, F16, F32, I32, U8};
}
