//! The targets that kernels are prepared for, and the prepared kernels.

use std::sync::Arc;

use slabwise_kernels::cpu::{self, SpecError};
use slabwise_kernels::dtype::DType;
use slabwise_kernels::micro_batch::MicroBatching;
use slabwise_kernels::size::{Env, Size, Symbol};
use slabwise_kernels::spec::{Quantization, Scores, Spec};

use super::{Capabilities, Choice, KernelCache, Sectors, cuda};

/// A device that kernels are prepared for.
#[derive(Clone, Debug)]
pub enum Target {
    /// The CPU.
    Cpu(super::cpu::Target),
    /// A CUDA device.
    Cuda(cuda::Target),
}

impl Target {
    /// A described CUDA device, whose products are not timed.
    #[cfg(feature = "cuda")]
    pub fn described(target: slabwise_cuda::Target) -> Target {
        Target::Cuda(cuda::Target {
            target,
            tuner: None,
            modelled: Arc::default(),
        })
    }

    /// The properties of the device that passes depend on.
    pub fn capabilities(&self) -> Capabilities {
        match self {
            Target::Cpu(_) => super::cpu::CAPABILITIES,
            Target::Cuda(target) => target.capabilities(),
        }
    }

    /// Whether there is a kernel for attention of these scores as a whole, or for its gradient. Each
    /// operand has a type and rows of so many elements.
    pub(crate) fn has_attention(&self, scores: &Scores, operands: &[(DType, Size)]) -> bool {
        match self {
            Target::Cpu(_) => true,
            Target::Cuda(target) => target.has_attention(scores, operands),
        }
    }

    /// Whether there is a kernel for products of up to so many rows with quantized weights of a
    /// format.
    pub(crate) fn has_quantized_matmul(&self, format: Quantization, rows: i64) -> bool {
        match self {
            Target::Cpu(_) => format.has_kernel(),
            Target::Cuda(target) => target.has_quantized_matmul(format, rows),
        }
    }

    /// The fastest known kernel for each of a program's specs. `guarded` as for [`Kernel::new`].
    pub(crate) fn choose(&self, specs: &[(&Spec, bool)], bounds: &Env) -> Vec<Choice> {
        match self {
            Target::Cpu(_) => vec![Choice::default(); specs.len()],
            Target::Cuda(target) => target.choose(specs, bounds),
        }
    }

    /// Whether the sums that two loops have in common come out as the same bits in both, in every
    /// run; `None` where that is not known.
    pub(crate) fn has_same_sums(&self, a: &Spec, b: &Spec, bounds: &Env) -> Option<bool> {
        match self {
            Target::Cpu(target) => target.has_same_sums(a, b, bounds),
            Target::Cuda(target) => target.has_same_sums(a, b, bounds),
        }
    }

    /// The sectors at which rows of values begin where kernels gain by it; `None` on the CPU, whose
    /// kernels pack the operands of products.
    pub(crate) fn sectors(&self) -> Option<Sectors> {
        match self {
            Target::Cpu(_) => None,
            Target::Cuda(target) => target.sectors(),
        }
    }

    /// The modelled cycles of a product by the kernel that is ranked first, and of another kernel
    /// those of its launches; `None` on the CPU.
    pub(crate) fn cycles(&self, spec: &Spec, bounds: &Env) -> Option<f64> {
        match self {
            Target::Cpu(_) => None,
            Target::Cuda(target) => target.cycles(spec, bounds),
        }
    }

    /// Whether a CUDA device has a kernel for a spec.
    pub(crate) fn has_kernel(&self, spec: &Spec, bounds: &Env) -> bool {
        match self {
            Target::Cpu(_) => false,
            Target::Cuda(target) => target.has_kernel(spec, bounds),
        }
    }

    /// The modelled cycles that a product takes less with the strides of `after`. `None` if its sums
    /// would be computed in another order.
    pub(crate) fn cycles_saved(&self, before: &Spec, after: &Spec, bounds: &Env) -> Option<f64> {
        match self {
            Target::Cpu(_) => None,
            Target::Cuda(target) => target.cycles_saved(before, after, bounds),
        }
    }

    /// The same target with the smallest workspaces that kernels can run with, if they have a
    /// choice.
    pub(crate) fn lean(&self) -> Option<Target> {
        self.with_workspace(0)
    }

    /// The same target with workspaces of at most so many bytes, where a kernel can do with them.
    fn with_workspace(&self, most: u64) -> Option<Target> {
        match self {
            Target::Cpu(target) => Some(Target::Cpu(super::cpu::Target {
                workspace_max: most,
                ..*target
            })),
            Target::Cuda(_) => None,
        }
    }

    /// The most bytes of a kernel's workspace, if it can run with fewer than it is fastest with.
    pub(super) fn workspace_max(&self) -> u64 {
        match self {
            Target::Cpu(target) => target.workspace_max,
            Target::Cuda(_) => u64::MAX,
        }
    }

    /// Whether kernels have smaller workspaces than they are fastest with.
    pub(crate) fn limits_workspaces(&self) -> bool {
        self.workspace_max() < u64::MAX
    }

    /// The same target with products of f32 rounded to tf32 or not, where that is faster.
    pub fn with_tf32(mut self, tf32: bool) -> Target {
        if let Target::Cuda(target) = &mut self {
            target.set_tf32(tf32);
        }
        self
    }

    /// The same target with products timed that have this many multiplications and more, or none.
    pub fn timed_from(mut self, worth: Option<i64>) -> Target {
        if let Target::Cuda(target) = &mut self {
            target.time_from(worth);
        }
        self
    }
}

/// A prepared kernel.
pub enum Kernel {
    /// For the CPU.
    Cpu(Box<cpu::Kernel>),
    /// For a CUDA device.
    Cuda(Box<cuda::Kernel>),
}

impl Kernel {
    /// Prepares a spec. A `guarded` kernel stores to weights or state, which it must not do if an
    /// index was out of range before it. On the CPU the run has stopped by then.
    pub(crate) fn new(
        spec: Spec,
        bounds: &Env,
        target: &Target,
        guarded: bool,
        choice: &Choice,
    ) -> Result<Kernel, SpecError> {
        Ok(match target {
            Target::Cpu(target) => Kernel::Cpu(Box::new(target.prepare(spec, bounds)?)),
            Target::Cuda(target) => {
                Kernel::Cuda(Box::new(target.prepare(spec, bounds, guarded, choice)?))
            }
        })
    }

    /// Prepares a spec to run on parts of the batch of at most so many examples; `None` if it
    /// cannot.
    pub(crate) fn sliced(
        spec: Spec,
        batch: Symbol,
        examples: u32,
        bounds: &Env,
        target: &Target,
    ) -> Result<Option<Kernel>, SpecError> {
        let Target::Cpu(target) = target else {
            return Ok(None);
        };
        let kernel = target.sliced(spec, batch, examples, bounds)?;
        Ok(kernel.map(|kernel| Kernel::Cpu(Box::new(kernel))))
    }

    /// The name and the source of each function generated for it.
    pub(crate) fn sources(&self) -> Vec<(&str, &str)> {
        match self {
            Kernel::Cpu(_) => Vec::new(),
            Kernel::Cuda(kernel) => kernel.sources(),
        }
    }

    /// The same kernel with a workspace of at most so many bytes; `examples` is as for
    /// [`Kernel::sliced`], if it was prepared by that. `None` if the target bounds no workspaces.
    pub(crate) fn with_workspace(
        &self,
        known: &KernelCache,
        examples: u32,
        bounds: &Env,
        target: &Target,
        most: u64,
    ) -> Result<Option<Arc<Kernel>>, SpecError> {
        let Some(target) = target.with_workspace(most) else {
            return Ok(None);
        };
        match self.micro_batching() {
            Some(micro_batching) => {
                known.sliced(self.spec(), micro_batching.batch, examples, bounds, &target)
            }
            None => {
                let choice = Choice::default();
                let kernel = known.prepare(self.spec(), bounds, &target, false, choice);
                kernel.map(Some)
            }
        }
    }

    /// Bytes of scratch memory of a run, enough for all sizes up to the bounds.
    pub fn workspace(&self) -> u64 {
        match self {
            Kernel::Cpu(kernel) => kernel.workspace(),
            Kernel::Cuda(kernel) => kernel.workspace(),
        }
    }

    /// The part of it that a library of NVIDIA's computes.
    pub fn library(&self) -> Option<String> {
        match self {
            Kernel::Cpu(_) => None,
            Kernel::Cuda(kernel) => kernel.library(),
        }
    }

    /// The spec that it computes.
    pub fn spec(&self) -> &Spec {
        match self {
            Kernel::Cpu(kernel) => kernel.spec(),
            Kernel::Cuda(kernel) => kernel.spec(),
        }
    }

    fn cpu(&self) -> Option<&cpu::Kernel> {
        match self {
            Kernel::Cpu(kernel) => Some(kernel),
            Kernel::Cuda(_) => None,
        }
    }

    /// The examples of its arguments, if it was prepared for part of the batch.
    pub fn micro_batching(&self) -> Option<&MicroBatching> {
        self.cpu()?.micro_batching()
    }

    /// The number of examples that the parts of its batch must be a multiple of.
    pub(crate) fn slice_unit(&self) -> u32 {
        self.cpu().map_or(1, cpu::Kernel::slice_unit)
    }

    /// Bytes of the partial sums that it keeps between parts of the batch.
    pub(crate) fn sums(&self) -> u64 {
        self.cpu().map_or(0, cpu::Kernel::sums)
    }

    /// The factor by which it is slower than with the largest workspace.
    pub(crate) fn slower(&self) -> f64 {
        self.cpu().map_or(1.0, cpu::Kernel::slower)
    }

    /// The largest team that its workspace is large enough for, if a team runs it.
    pub fn threads(&self) -> Option<usize> {
        self.cpu().map(cpu::Kernel::threads)
    }
}
