//! The CPU back end: prepares a [`Spec`] once, then runs it in caller-planned memory without
//! allocating.

mod attention;
mod conv2d;
mod custom;
mod gather;
mod gemm;
mod isa;
mod loops;
mod non_max_suppression;
mod nonzero;
mod peak;
mod pointwise;
mod pool2d;
mod prefix_reduce;
mod scan;
mod scatter;
mod simd;
mod slice_assign;
mod sort;
mod tile;

pub use crate::team::Team;
pub use isa::Isa;
pub use loops::has_same_sums;
pub use peak::Peak;

use smallvec::SmallVec;

use crate::collective::{Exchange, Transport, TransportError};
use crate::memory::{Memory, Region};
use crate::micro_batch::{MicroBatch, MicroBatching, Part};
use crate::size::{Env, Symbol};
use crate::spec::{Access, Body, Collective, Dims, MAX_ARGUMENTS, Operand, Spec, check_lengths};
pub use crate::spec::{MAX_AXES, SpecError};

/// The machine that kernels are prepared for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// Threads of the team that will run them; workspaces are sized for it.
    pub threads: usize,
    /// Instruction set; must be available on this CPU.
    pub isa: Isa,
}

/// A run that stopped because the data broke a rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// [`Body::BoundsCheck`] met an index outside its range.
    #[error("index {value} at position {position} is outside 0..{limit}")]
    Index {
        /// Row-major position of the first such index.
        position: u64,
        /// The index.
        value: i64,
        /// One more than the largest allowed.
        limit: u64,
    },
}

/// The arguments of one launch: addresses instead of regions.
///
/// `args[i]` points at the first byte of argument `i`'s region; everything reachable through it by
/// `spec` under `env` is inside memory that this launch may use, and overlaps nothing it writes
/// (but see [`Access::ReadWrite`]).
pub(crate) struct Launch<'a> {
    pub args: &'a [*mut u8],
    pub workspace: *mut u8,
    /// The sizes of the launch; of the whole run for a kernel that sums over a batch in slices.
    pub env: &'a Env,
    pub team: &'a Team,
    /// The slice and the whole run, if this launch is a slice.
    pub part: Option<&'a Part<'a>>,
}

impl Launch<'_> {
    /// The sizes that decide how sums are split.
    pub fn whole(&self) -> &Env {
        self.part.map_or(self.env, |part| part.whole)
    }
}

// SAFETY: the addresses are plain numbers until a kernel dereferences them, and each kernel states
// why its threads may.
unsafe impl Sync for Launch<'_> {}

/// A spec made ready for this CPU: strategy chosen, registers assigned, workspace sized.
pub struct Kernel {
    spec: Spec,
    arguments: Vec<(Operand, Dims, Access)>,
    bound: Env,
    threads: usize,
    body: Prepared,
    slices: Option<Slices>,
}

/// How a kernel runs on slices of a batch.
struct Slices {
    micro_batching: MicroBatching,
    cut: MicroBatchLimits,
    /// The largest sizes of the whole run.
    bound: Env,
}

/// Where slices may end, and the partial sums that pass between them.
#[derive(Clone, Copy)]
pub(crate) struct MicroBatchLimits {
    /// The length of every slice but the last is a multiple of this many examples.
    pub unit: usize,
    /// Elements (of four bytes) of the sums.
    pub sums: usize,
}

/// One variant per [`Body`].
enum Prepared {
    Loop(loops::Loop),
    Matmul(gemm::Product),
    Conv2d(conv2d::Conv2d),
    Pool2d(pool2d::Pool2d),
    Pool2dGrad(pool2d::Pool2dGrad),
    Gather(gather::Gather),
    Scatter(scatter::Scatter),
    SliceAssign(slice_assign::SliceAssign),
    PrefixReduce(prefix_reduce::PrefixReduce),
    Attention(attention::Attention),
    AttentionGrad(attention::AttentionGrad),
    BoundsCheck(gather::BoundsCheck),
    Nonzero(nonzero::Nonzero),
    Sort(sort::Sort),
    NonMaxSuppression(non_max_suppression::NonMaxSuppression),
    Scan(scan::Scan),
    /// Its function is part of the spec.
    Custom,
    /// It has no code: a transport runs it.
    Collective,
}

impl Kernel {
    /// Prepares a spec to run with sizes up to `bound`.
    pub fn new(spec: Spec, bound: &Env, config: &Config) -> Result<Kernel, SpecError> {
        Kernel::within(spec, bound, config, u64::MAX)
    }

    /// Like [`Kernel::new`], with a workspace of at most `workspace` bytes, or the smallest one if
    /// that is larger. A smaller workspace holds smaller packed panels and sums, which takes longer
    /// and changes no bit.
    pub fn within(
        spec: Spec,
        bound: &Env,
        config: &Config,
        workspace: u64,
    ) -> Result<Kernel, SpecError> {
        Kernel::prepare(spec, [bound, bound], config, workspace)
    }

    /// Prepares a spec to run with sizes up to `bound`, for slices of runs of sizes up to `whole`.
    fn prepare(
        spec: Spec,
        [bound, whole]: [&Env; 2],
        config: &Config,
        workspace: u64,
    ) -> Result<Kernel, SpecError> {
        if config.isa > Isa::detect() {
            return Err(SpecError::unsupported(format!(
                "this CPU has no {}",
                config.isa
            )));
        }
        spec.check_anchor()?;
        if spec.reduced > 0 && spec.body != Body::Loop {
            return Err(SpecError::unsupported(
                "sums in the epilogue of a product, which CUDA alone has kernels for",
            ));
        }
        let each = usize::try_from(workspace / config.threads.max(1) as u64).unwrap_or(usize::MAX);
        let body = match &spec.body {
            Body::Loop => Prepared::Loop(loops::Loop::new(&spec, bound, config)?),
            Body::Matmul(_) | Body::QuantizedMatmul(_) => {
                Prepared::Matmul(gemm::Product::new(&spec, [bound, whole], config, each)?)
            }
            Body::Conv2d(_) => Prepared::Conv2d(conv2d::Conv2d::new(&spec, bound, config, each)?),
            Body::Pool2d(_) => Prepared::Pool2d(pool2d::Pool2d::new(&spec, bound, config)?),
            Body::Pool2dGrad(_) => {
                Prepared::Pool2dGrad(pool2d::Pool2dGrad::new(&spec, bound, config)?)
            }
            Body::Gather(_) => Prepared::Gather(gather::Gather::new(&spec, bound, config)?),
            Body::Scatter(_) => Prepared::Scatter(scatter::Scatter::new(&spec, bound, config)?),
            Body::SliceAssign(_) => {
                Prepared::SliceAssign(slice_assign::SliceAssign::new(&spec, bound, config)?)
            }
            Body::PrefixReduce(_) => {
                Prepared::PrefixReduce(prefix_reduce::PrefixReduce::new(&spec, bound, config)?)
            }
            Body::Attention(_) => {
                Prepared::Attention(attention::Attention::new(&spec, bound, config)?)
            }
            Body::AttentionGrad(_) => {
                Prepared::AttentionGrad(attention::AttentionGrad::new(&spec, bound, config)?)
            }
            Body::BoundsCheck(_) => {
                Prepared::BoundsCheck(gather::BoundsCheck::new(&spec, bound, config)?)
            }
            Body::Nonzero(_) => Prepared::Nonzero(nonzero::Nonzero::new(&spec, bound, config)?),
            Body::Sort(_) => Prepared::Sort(sort::Sort::new(&spec, bound, config)?),
            Body::NonMaxSuppression(_) => Prepared::NonMaxSuppression(
                non_max_suppression::NonMaxSuppression::new(&spec, bound, config)?,
            ),
            Body::Custom(_) => Prepared::Custom,
            Body::Scan(_) => Prepared::Scan(scan::Scan::new(&spec, bound, config)?),
            Body::Collective(_) => Prepared::Collective,
        };
        let arguments = spec.arguments();
        check_lengths(&arguments)?;
        Ok(Kernel {
            spec,
            arguments,
            bound: *bound,
            threads: config.threads.max(1),
            body,
            slices: None,
        })
    }

    /// Prepares a spec to run on slices of at most `most` examples along `batch` with
    /// [`Kernel::run_slice`]; `None` if it cannot. The workspace is as in [`Kernel::within`].
    pub fn sliced(
        spec: Spec,
        batch: Symbol,
        most: u32,
        bound: &Env,
        config: &Config,
        workspace: u64,
    ) -> Result<Option<Kernel>, SpecError> {
        let Some(micro_batching) = MicroBatching::of(&spec, batch) else {
            return Ok(None);
        };
        // The sizes of the whole run decide how sums are split, so loops and sums over the batch,
        // other than products, are prepared for them. All other kernels need only the workspace of
        // a slice.
        let mut own = *bound;
        if matches!(spec.body, Body::Matmul(_))
            || !micro_batching.folds && !matches!(spec.body, Body::Loop)
        {
            let examples = &mut own.0[usize::from(batch.0)];
            *examples = (*examples).min(most);
        }
        let kernel = Kernel::prepare(spec, [&own, bound], config, workspace)?;
        let cut = match &kernel.body {
            _ if !micro_batching.folds => Some(MicroBatchLimits { unit: 1, sums: 0 }),
            Prepared::Conv2d(k) => k.micro_batch_limits(&kernel.spec, bound),
            Prepared::Matmul(k) => k.micro_batch_limits(&kernel.spec, bound),
            Prepared::Loop(k) => k.micro_batch_limits(&kernel.spec, bound, &micro_batching),
            _ => None,
        };
        Ok(cut.map(|cut| Kernel {
            slices: Some(Slices {
                micro_batching,
                cut,
                bound: *bound,
            }),
            ..kernel
        }))
    }

    /// How this kernel runs on slices, if it was prepared by [`Kernel::sliced`].
    pub fn micro_batching(&self) -> Option<&MicroBatching> {
        self.slices.as_ref().map(|s| &s.micro_batching)
    }

    /// The number of examples of every slice but the last must be a multiple of this.
    pub fn slice_unit(&self) -> u32 {
        self.slices
            .as_ref()
            .map_or(1, |s| u32::try_from(s.cut.unit).unwrap_or(u32::MAX))
    }

    /// Bytes of the partial sums that pass from slice to slice; 64-byte aligned.
    pub fn sums(&self) -> u64 {
        self.slices.as_ref().map_or(0, |s| s.cut.sums as u64 * 4)
    }

    /// The spec this was prepared from.
    pub fn spec(&self) -> &Spec {
        &self.spec
    }

    /// The largest team its workspace has room for.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Bytes of scratch memory that a run needs, for all sizes up to the bound; 64-byte aligned.
    pub fn workspace(&self) -> u64 {
        match &self.body {
            Prepared::Loop(k) => k.workspace(),
            Prepared::Matmul(k) => k.workspace(),
            Prepared::Conv2d(k) => k.workspace(),
            Prepared::Pool2d(k) => k.workspace(),
            Prepared::Pool2dGrad(k) => k.workspace(),
            Prepared::Gather(k) => k.workspace(),
            Prepared::Scatter(k) => k.workspace(),
            Prepared::SliceAssign(k) => k.workspace(),
            Prepared::PrefixReduce(k) => k.workspace(),
            Prepared::Attention(k) => k.workspace(),
            Prepared::AttentionGrad(k) => k.workspace(),
            Prepared::BoundsCheck(k) => k.workspace(),
            Prepared::Nonzero(k) => k.workspace(),
            Prepared::Sort(k) => k.workspace(),
            Prepared::NonMaxSuppression(k) => k.workspace(),
            Prepared::Scan(k) => k.workspace(),
            Prepared::Custom | Prepared::Collective => 0,
        }
    }

    /// The estimated run time relative to that with the largest workspace.
    pub fn slower(&self) -> f64 {
        match &self.body {
            Prepared::Matmul(k) => k.slower(),
            Prepared::Conv2d(k) => k.slower(&self.spec),
            _ => 1.0,
        }
    }

    /// Runs the kernel over regions of `memory`, one per argument in the order of
    /// [`Spec::arguments`].
    ///
    /// # Panics
    /// If `env` is above the bound, the team is larger than the one the kernel was prepared for, or
    /// a region is too small for the kernel's accesses under `env`, is not aligned to its elements
    /// (64 bytes for the workspace), is not inside a live arena, is written twice in one place, or
    /// overlaps a region that is written, other than as the same region with the same strides
    /// (in-place elementwise work), or if a copy in flight writes a region or reads one that is
    /// written: a plan that passed its checker never does this, so it is a bug of the caller, and
    /// memory safety does not depend on the caller.
    pub fn run(
        &self,
        memory: &mut Memory,
        args: &[Region],
        workspace: &Region,
        env: &Env,
        team: &Team,
    ) -> Result<(), Fault> {
        assert!(
            team.threads() <= self.threads,
            "a team of {} runs a kernel prepared for {}",
            team.threads(),
            self.threads
        );
        self.check(args, workspace, env);
        self.launch(memory, args, workspace, env, team, None)
    }

    /// Starts a collective, whose bytes the transport moves. [`Memory::finish_exchange`] ends it.
    ///
    /// # Errors
    /// The transport's.
    ///
    /// # Panics
    /// Those of [`Kernel::run`], or if the kernel is no collective, or its groups do not divide the
    /// ranks.
    pub fn start_exchange(
        &self,
        memory: &mut Memory,
        args: &[Region],
        env: &Env,
        transport: &dyn Transport,
    ) -> Result<Exchange, TransportError> {
        let Body::Collective(collective) = &self.spec.body else {
            panic!("a kernel that is no collective is given a transport")
        };
        let Collective { op, group, .. } = *collective;
        assert!(
            group.divides(transport.ranks()),
            "{group} of {}",
            transport.ranks()
        );
        self.check(args, &Region::default(), env);
        // A collective's operands are contiguous.
        let part = |argument: usize| {
            let (operand, dims, _) = &self.arguments[argument];
            let size = operand.dtype.bytes();
            let elements: usize = dims.iter().map(|d| d.usize_at(env)).product();
            let offset = operand.offset.usize_at(env) * size;
            args[argument].part(offset as u64, (elements * size) as u64)
        };
        memory.start_exchange(transport, (op, group), [part(0), part(1)])
    }

    /// Runs a slice of a run of the sizes `whole`. Regions hold the slice's examples; regions of
    /// arguments without a batch axis are those of the whole run. Slices run one after the other,
    /// and the last one is marked. A kernel with [`Kernel::sums`] takes their region as its last
    /// argument; its results without a batch axis are written by the last slice only.
    ///
    /// # Panics
    /// Those of [`Kernel::run`], or if the kernel was not prepared for slices or a slice ends at
    /// the wrong place.
    pub fn run_slice(
        &self,
        memory: &mut Memory,
        args: &[Region],
        workspace: &Region,
        whole: &Env,
        team: &Team,
        slice: MicroBatch,
    ) -> Result<(), Fault> {
        let Some(Slices {
            micro_batching,
            cut,
            bound,
        }) = &self.slices
        else {
            panic!("a slice of a kernel that was not prepared for it")
        };
        assert!(
            team.threads() <= self.threads,
            "a team of {} runs a kernel prepared for {}",
            team.threads(),
            self.threads
        );
        check_sizes(whole, bound);
        let examples = whole.0[usize::from(micro_batching.batch.0)];
        let own = slice.sizes(whole, micro_batching.batch);
        let to = slice.to.min(examples);
        for end in [slice.from, to].into_iter().filter(|&end| end < examples) {
            assert!(
                (end as usize).is_multiple_of(cut.unit),
                "a slice that ends at {end}, not a multiple of {}",
                cut.unit
            );
        }
        let (args, sums) = args.split_at(self.arguments.len().min(args.len()));
        assert_eq!(sums.len(), usize::from(cut.sums > 0), "regions for sums");
        self.check(args, workspace, &own);
        for sums in sums {
            assert!(
                sums.bytes >= self.sums() && sums.offset.is_multiple_of(64),
                "sums of {} bytes in {sums:?}",
                self.sums()
            );
            assert!(
                !args.iter().chain([workspace]).any(|arg| arg.overlaps(sums)),
                "the sums overlap an argument or the workspace"
            );
        }
        let part = Part {
            whole,
            examples: slice.from.min(to) as usize..to as usize,
            last: slice.last,
            micro_batching,
            sums: sums
                .first()
                .map_or(std::ptr::null_mut(), |sums| memory.address(sums)),
        };
        sums.iter().for_each(|sums| memory.assert_writable(sums));
        self.launch(
            memory,
            args,
            workspace,
            if micro_batching.folds { whole } else { &own },
            team,
            Some(&part),
        )
    }

    /// Runs checked regions.
    fn launch(
        &self,
        memory: &mut Memory,
        args: &[Region],
        workspace: &Region,
        env: &Env,
        team: &Team,
        part: Option<&Part<'_>>,
    ) -> Result<(), Fault> {
        for (region, (_, _, access)) in args.iter().zip(&self.arguments) {
            if *access == Access::Read {
                memory.assert_readable(region)
            } else {
                memory.assert_writable(region)
            }
        }
        memory.assert_writable(workspace);
        if let Prepared::Scan(k) = &self.body {
            return k.run(&self.spec, memory, args, workspace, env, team);
        }
        let addresses: SmallVec<[*mut u8; MAX_ARGUMENTS]> =
            args.iter().map(|r| memory.address(r)).collect();
        // Without a workspace, an address that is valid for a slice of no elements.
        let workspace = if workspace.bytes == 0 {
            std::ptr::without_provenance_mut(64)
        } else {
            memory.address(workspace)
        };
        let launch = Launch {
            args: &addresses,
            workspace,
            env,
            team,
            part,
        };
        // SAFETY: `check` proved that every access lies inside its region and that written regions
        // overlap nothing else (of a slice: every access of the slice's examples, and to the sums);
        // `memory` is borrowed exclusively for the whole run, and no copy in flight conflicts with
        // any region.
        unsafe {
            match &self.body {
                Prepared::Loop(k) => k.run(&self.spec, &launch),
                Prepared::Matmul(k) => k.run(&self.spec, &launch),
                Prepared::Conv2d(k) => k.run(&self.spec, &launch),
                Prepared::Pool2d(k) => k.run(&self.spec, &launch),
                Prepared::Pool2dGrad(k) => k.run(&self.spec, &launch),
                Prepared::Gather(k) => k.run(&self.spec, &launch),
                Prepared::Scatter(k) => k.run(&self.spec, &launch),
                Prepared::SliceAssign(k) => k.run(&self.spec, &launch),
                Prepared::PrefixReduce(k) => k.run(&self.spec, &launch),
                Prepared::Attention(k) => k.run(&self.spec, &launch),
                Prepared::AttentionGrad(k) => k.run(&self.spec, &launch),
                Prepared::BoundsCheck(k) => return k.run(&self.spec, &launch),
                Prepared::Nonzero(k) => k.run(&self.spec, &launch),
                Prepared::Sort(k) => k.run(&self.spec, &launch),
                Prepared::NonMaxSuppression(k) => k.run(&self.spec, &launch),
                Prepared::Custom => custom::run(&self.spec, &launch),
                Prepared::Scan(_) => unreachable!("launched by its calls"),
                Prepared::Collective => panic!("a collective runs by Kernel::start_exchange"),
            }
        }
        Ok(())
    }

    fn check(&self, args: &[Region], workspace: &Region, env: &Env) {
        assert_eq!(args.len(), self.arguments.len(), "one region per argument");
        check_sizes(env, &self.bound);
        if let Some(mistake) = self.spec.outside(env) {
            panic!("{mistake}");
        }
        assert!(
            workspace.bytes >= self.workspace(),
            "workspace of {} bytes, {} needed",
            workspace.bytes,
            self.workspace()
        );
        assert!(
            workspace.offset.is_multiple_of(64),
            "workspace at {}, not 64-byte aligned",
            workspace.offset
        );
        for (i, (operand, dims, access)) in self.arguments.iter().enumerate() {
            assert!(
                args[i].offset.is_multiple_of(operand.dtype.bytes() as u64),
                "argument {i} is not aligned to {}",
                operand.dtype
            );
            let needed = operand
                .extent(dims, env)
                .saturating_mul(operand.dtype.bytes() as u64);
            assert!(
                needed <= args[i].bytes,
                "argument {i} reaches {needed} bytes of a region of {}",
                args[i].bytes
            );
            assert!(
                !args[i].overlaps(workspace),
                "argument {i} overlaps the workspace"
            );
            assert!(
                operand.is_forward(env),
                "argument {i} has a negative offset or stride"
            );
            if *access == Access::Read {
                continue;
            }
            assert!(
                operand.is_injective(dims, env),
                "argument {i} is written to one place from several points"
            );
            for (j, (other, space, read)) in
                self.arguments.iter().enumerate().filter(|&(j, _)| j != i)
            {
                if args[i].overlaps(&args[j]) {
                    // With equal strides from one address, accesses meet only at the same point,
                    // which is read before it is written; the regions' unreached ends do not
                    // matter.
                    let start = |region: &Region| (region.arena, region.offset);
                    let pointwise = (operand, dims) == (other, space)
                        && *read == Access::Read
                        && self.is_pointwise(i)
                        && self.is_pointwise(j);
                    let same =
                        start(&args[i]) == start(&args[j]) && (pointwise || self.is_in_place(j, i));
                    assert!(same, "argument {i} is written and overlaps argument {j}");
                }
            }
        }
    }

    /// Whether a loop over steps may write one argument over another. Its calls are checked again
    /// when they run.
    fn is_in_place(&self, from: usize, to: usize) -> bool {
        let Body::Scan(scan) = &self.spec.body else {
            return false;
        };
        scan.in_place.contains(&(from as u16, to as u16))
    }

    /// Whether an argument belongs to `code` rather than to the anchor, so that it is touched point
    /// by point; or is the base or the result of an assignment to a part, which copies nothing if
    /// they are one.
    fn is_pointwise(&self, argument: usize) -> bool {
        if let Body::SliceAssign(assign) = &self.spec.body {
            let last = self.arguments.len() - 1;
            return assign.base.is_some() && (argument == 0 || argument == last);
        }
        argument + self.spec.operands.len() >= self.arguments.len()
    }
}

fn check_sizes(env: &Env, bound: &Env) {
    assert!(
        env.0.iter().zip(bound.0).all(|(&size, most)| size <= most),
        "sizes {:?} above the bound {:?}",
        env.0,
        bound.0
    );
}
