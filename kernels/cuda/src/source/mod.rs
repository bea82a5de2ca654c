//! Generators of source, one for each kind of kernel except products.

pub(crate) mod custom;
pub(crate) mod elementwise;
pub(crate) mod gather;
pub(crate) mod non_max_suppression;
pub(crate) mod nonzero;
pub(crate) mod params;
pub(crate) mod pool;
pub(crate) mod prefix_reduce;
pub(crate) mod rows;
pub(crate) mod scatter;
pub(crate) mod slice_assign;
pub(crate) mod sort;
pub(crate) mod space;
mod transpose;

pub use rows::has_same_sums;

use slabwise_kernels::size::Env;

use crate::abi::Function;
use params::Params;

/// The prelude of every program: declarations shared by the functions.
pub const PRELUDE: &str = concat!(
    include_str!("prelude.cuh"),
    include_str!("choose.cuh"),
    include_str!("../gemm/sides.cuh"),
    include_str!("../gemm/tiles.cuh"),
    include_str!("../gemm/totals.cuh"),
    include_str!("../gemm/located.cuh"),
    include_str!("../gemm/registers.cuh"),
    include_str!("../gemm/tensor.cuh"),
    include_str!("../gemm/vectors.cuh"),
    include_str!("../gemm/quantized.cuh"),
    include_str!("../conv/depthwise.cuh"),
    include_str!("../attention/tiles.cuh"),
    include_str!("../attention/kernels.cuh"),
);

/// The default number of threads of a block.
pub(crate) const THREADS: u32 = 256;

/// A loop whose function several specs may share, with the parameter words of this spec.
pub(crate) struct SharedLoop {
    pub function: Function,
    pub params: Params,
    /// Threads of a block, equal for all specs of the function.
    pub threads: u32,
    /// Bytes of a block's dynamic shared memory, which may follow from the bounds of this spec.
    pub shared_bytes: u32,
    /// The number of blocks of a run.
    pub blocks: Box<dyn Fn(&Env) -> u32 + Send + Sync>,
}
