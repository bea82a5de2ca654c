//! The options of a compilation.

use slabwise_kernels::cpu::Isa;
use slabwise_planner::Options;

use crate::passes::{ChannelsLast, EpilogueSums, Fuse, RowPadding, Simplify};
use crate::shapes::DynamicShapes;

/// How programs are compiled. Every optimisation that changes no result is on by default; results
/// depend on a field only as its documentation says: by the rounding of sums, or with `tf32` of
/// operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct CompileOptions {
    /// The simplifications.
    pub simplify: Simplify,
    /// The fusions.
    pub fuse: Fuse,
    /// The options of the planner.
    pub planner: Options,
    /// The instruction set of kernels; the best available one if `None`. Results differ in rounding
    /// between sets.
    pub isa: Option<Isa>,
    /// The planning of values without a size at compile time, and the memory that they live in.
    pub shapes: DynamicShapes,
    /// The rewrites of kernels that a budget may use.
    pub measures: Measures,
    /// Whether images have their channels innermost on a CUDA device, where sums then round otherwise.
    pub channels_last: ChannelsLast,
    /// Which sums over the results of products a CUDA device computes in their epilogues, where they
    /// round otherwise.
    pub epilogue_sums: EpilogueSums,
    /// Which rows of values are padded to whole sectors of a CUDA device's memory.
    pub row_padding: RowPadding,
    /// Which products are timed on a CUDA device, to be computed by the fastest kernel. Kernels
    /// round sums differently.
    pub tuning: Tuning,
    /// Let products and convolutions of f32 round their operands to tf32 on a CUDA device, whose
    /// tensor cores multiply those several times faster: 11 significant bits, so each operand is
    /// wrong by up to 2⁻¹¹ of itself (of cuBLASLt's kernels, which may cut digits off, by up to
    /// 2⁻¹⁰). Sums stay in f32. Off by default; the CPU multiplies in f32 in any case.
    pub tf32: bool,
    /// Let the CPU sum the products of convolutions term by term, rather than by Winograd's
    /// filtering, which multiplies 2.25 to 4 times less often and computes 3×3 and 5×5 kernels of
    /// stride 1. On random data both are wrong by at most 2⁻²¹ of the sum of magnitudes, filtering
    /// in tiles of 4×4 results by 2⁻¹⁸; but elements beside those that a result reads enter its
    /// error too, for c channels by up to `(c + 30)·2⁻¹⁹` of the magnitudes in its tile. Off by
    /// default.
    pub exact_convolutions: bool,
    /// Fill dead bytes of the slab with NaN, keep guards between buffers, and check both after
    /// every kernel. Slow.
    pub check_memory: bool,
}

/// The rewrites of kernels that keep a program within its budget; each can be switched off. Results
/// do not depend on them. Recomputation and, with [`Offload`](crate::memory::offload::Offload),
/// copies to the host are chosen besides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Measures {
    /// Kernels run on a few examples of the batch at a time, so that a tensor between two of them
    /// needs only a micro-batch's bytes.
    pub micro_batch: bool,
    /// Convolutions compute their input themselves, so that it is never in memory.
    pub prologue_fusion: bool,
    /// Kernels have smaller workspaces than those with which they are fastest.
    pub small_workspaces: bool,
}

impl Default for Measures {
    fn default() -> Self {
        Measures {
            micro_batch: true,
            prologue_fusion: true,
            small_workspaces: true,
        }
    }
}

/// The products and convolutions that are autotuned on a CUDA device: when a program is compiled, a
/// few kernels, cuBLASLt's and cuDNN's among them, are timed, and the fastest is used. The others
/// use the kernel that a model of the device ranks first, and so are all with
/// `SLABWISE_AUTOTUNE=0`; `SLABWISE_CUDNN=0` leaves cuDNN out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Tuning {
    /// Those that take longer than their launch.
    #[default]
    Worthwhile,
    /// All.
    All,
    /// None: the same sizes give the same kernels on every machine with such a device.
    Off,
}
