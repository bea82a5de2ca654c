//! A compiled program: kernels in the order of a checked plan, and where their arguments lie.

mod fed;
pub(crate) mod gaps;
pub(crate) mod layers;
mod link;
#[cfg(feature = "profiles")]
mod memory_profile;
pub(crate) mod shapes;
mod transfers;

use std::sync::{Arc, OnceLock};

use slabwise_kernels::cpu::Fault;
use slabwise_kernels::dtype::DType;
use slabwise_kernels::memory::Region;
use slabwise_kernels::micro_batch::MicroBatch;
use slabwise_kernels::size::{Env, Size, Symbol};
use slabwise_kernels::spec::Dims;

use crate::backend::{CheckKind, Kernel, Loaded, Resources, describe};
use crate::error::{Error, Mistake, Result};
use crate::feed::Lengths;
use crate::graph::Origin;
use crate::memory::{Tag, TagId};
use crate::passes::MicroBatchRange;
use crate::plan::Plan;
use crate::shape::Symbols;
use crate::trace::Debugged;
use layers::LayerOutput;
use shapes::PerShape;
pub(crate) use transfers::Transfer;

/// A program with `N` outputs. It is run by the session that compiled it.
pub struct Program<const N: usize> {
    /// The program; with unbounded dimensions, that of the lengths planned first.
    pub(crate) inner: Arc<Compiled>,
    /// With unbounded dimensions, the plans for other lengths.
    pub(crate) shaped: Option<Box<PerShape>>,
    /// The values that it shows, whose scalars are outputs after the first `N`.
    pub(crate) debugged: Vec<Debugged>,
    /// Its layers with their outputs.
    pub(crate) layers: Vec<(Arc<str>, LayerOutput)>,
}

impl<const N: usize> Program<N> {
    /// The memory plan: bytes, lifetimes, savings. With [unbounded](crate::Dim::unbounded) dimensions, which
    /// have no length before the first run, that is the plan for a length of 64.
    pub fn plan(&self) -> &Plan {
        &self.inner.plan
    }

    /// The resources of a GPU that the functions of each kernel use, in the order of
    /// [`Plan::steps`]; none on the CPU.
    pub fn resources(&self) -> Vec<Vec<Resources>> {
        self.inner.resources()
    }

    /// The part of each kernel that a library of NVIDIA computes, in the order of [`Plan::steps`]:
    /// cuBLASLt's products, by the number of its algorithm.
    pub fn libraries(&self) -> Vec<Option<String>> {
        self.inner.libraries()
    }
}

/// Where an argument lies.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Place {
    /// A planned buffer.
    Planned(usize),
    /// A micro-batch inside a planned buffer.
    MicroBatch(usize, MicroBatchRange),
    /// A variable of the session.
    Variable(usize),
    /// The sizes of the run.
    Sizes,
}

/// The work of a step.
pub(crate) enum Work {
    /// Runs a kernel.
    Run(Arc<Kernel>),
    /// Starts the transfer of this index.
    Start(usize),
    /// Waits until the transfer of this index has ended.
    Finish(usize),
}

/// One kernel with its arguments, or half of a transfer.
pub(crate) struct Step {
    pub work: Work,
    pub places: Vec<Place>,
    pub workspace: Planned,
    /// The micro-batch that it runs on, if it does not run on the whole batch.
    pub slice: Option<MicroBatch>,
    pub name: String,
    pub origin: Origin,
    /// Buffers whose last use this is.
    pub ends: Vec<usize>,
    /// Buffers whose first use this is.
    pub begins: Vec<usize>,
    /// The data-dependent length that this step determines.
    pub binds: Option<Binds>,
    /// Whether it checks that elements are finite.
    pub finite: bool,
}

/// A data-dependent length that a step determines.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Binds {
    /// Whose length.
    pub symbol: Symbol,
    /// Elements before it in the step's first argument.
    pub offset: Size,
}

impl Place {
    /// The planned buffer that the argument lies in.
    pub fn buffer(&self) -> Option<usize> {
        match self {
            Place::Planned(b) | Place::MicroBatch(b, _) => Some(*b),
            Place::Variable(_) | Place::Sizes => None,
        }
    }

    /// The part of its buffer's region that the argument is, in a run of these sizes.
    pub fn part(&self, region: Region, sizes: &Env) -> Region {
        let Place::MicroBatch(_, micro_batch_range) = self else {
            return region;
        };
        let (from, bytes) = micro_batch_range.bytes(sizes, region.bytes);
        region.part(from, bytes)
    }
}

/// Bytes of the slab, or of the host's space.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Planned {
    pub offset: u64,
    pub bytes: u64,
}

/// A buffer of the program.
#[derive(Clone, Debug)]
pub(crate) struct PlannedBuffer {
    pub place: Planned,
    /// Whether it lies in the host's space instead of the slab.
    pub on_host: bool,
    /// Its bytes without alignment and guards.
    pub used: u64,
    pub dtype: DType,
    pub dims: Dims,
    /// Its dimensions in memory, where its rows may be padded.
    pub stored: Dims,
    /// Its size is data-dependent: it has no place in the slab.
    pub data_dependent: bool,
    /// Where its value comes from, if it is one of the graph.
    pub origin: Option<Origin>,
}

/// An input of the program; `buffer` is `None` if nothing uses it.
#[derive(Clone, Debug)]
pub(crate) struct InputSlot {
    pub name: Arc<str>,
    pub dtype: DType,
    pub dims: Dims,
    pub buffer: Option<usize>,
    pub donated_to: Option<u32>,
}

/// A length that must not be 0 in a run.
#[derive(Clone, Debug)]
pub(crate) struct Need {
    length: Size,
    /// The step after which the length is known, unless it is from the start.
    after: Option<usize>,
    mistake: Mistake,
}

/// A program without its count of outputs.
pub(crate) struct Compiled {
    pub session: u64,
    pub name: Arc<str>,
    pub steps: Vec<Step>,
    pub buffers: Vec<PlannedBuffer>,
    /// The transfers, those of each kind in the order they start.
    pub transfers: Vec<Transfer>,
    pub inputs: Vec<InputSlot>,
    /// For each buffer the input that it holds, if it holds one.
    pub input_of: Vec<Option<usize>>,
    pub outputs: Vec<usize>,
    pub symbols: Symbols,
    /// Lengths that must not be 0.
    pub needed: Vec<Need>,
    pub slab_bytes: u64,
    pub host_bytes: u64,
    /// The queue of prefetched batches, if there are bytes for any.
    pub prefetch_queue: Option<usize>,
    pub plan: Plan,
    pub guard: u64,
    /// Whether sizes of buffers are data-dependent.
    pub has_data_dependent: bool,
    /// For each such buffer, the stretches of the slab that the plan leaves free while it lives;
    /// empty if none are lent.
    pub gaps: Vec<Vec<(u64, u64)>>,
    /// Its kernels as loaded on a device other than the CPU.
    pub loaded: Option<Loaded>,
    /// The number of this rank among those that run it, how many these are, and how many of them
    /// share a batch.
    pub rank: [usize; 3],
    /// The number by which ranks know that they run the same program; `None` if it exchanges
    /// nothing.
    pub fingerprint: Option<u64>,
    /// The purposes of blocks in the dynamic mode: buffers, then the workspaces of the steps.
    pub tags: Vec<Tag>,
    /// The tags' numbers in the session's pool, once it has seen them.
    pub tag_ids: OnceLock<Vec<TagId>>,
}

impl Compiled {
    /// The resources of a GPU that each step's functions use, in order; none on the CPU.
    pub fn resources(&self) -> Vec<Vec<Resources>> {
        if let Some(loaded) = &self.loaded {
            return self
                .steps
                .iter()
                .map(|step| {
                    step.kernel()
                        .map_or_else(Vec::new, |kernel| loaded.resources(kernel))
                })
                .collect();
        }
        Vec::new()
    }

    /// One past the highest byte of the slab that a kernel is given.
    pub fn peak(&self) -> u64 {
        self.steps
            .iter()
            .map(|step| step.slab_end(self))
            .max()
            .unwrap_or(0)
    }

    /// The part of each step that a library of NVIDIA's computes, in order.
    pub fn libraries(&self) -> Vec<Option<String>> {
        self.steps
            .iter()
            .map(|step| step.kernel().and_then(Kernel::library))
            .collect()
    }

    /// Refuses a run in which a length is 0 that must not be: those that are known after a step, or
    /// at the start.
    pub fn check_needed(&self, after: Option<usize>, env: &Env) -> Result<()> {
        match self
            .needed
            .iter()
            .find(|need| need.after == after && need.length.at(env) == 0)
        {
            Some(need) => Err(Error::Data {
                mistake: need.mistake.clone(),
            }),
            None => Ok(()),
        }
    }

    /// The mistake that a fault in a step's data is.
    pub fn fault(&self, step: usize, fault: Fault) -> Error {
        let message = describe(fault, self.steps[step].checks(), self.indices_of(step));
        let step = &self.steps[step];
        let mistake = Mistake {
            location: step.origin.location,
            layer: step.origin.layer.to_string(),
            message,
        };
        Error::Data { mistake }
    }
}

impl Compiled {
    /// The name of the value that a step reads indices from; empty if that is no buffer of the
    /// program.
    pub fn indices_of(&self, step: usize) -> &str {
        let buffer = self.steps[step].places.first().and_then(Place::buffer);
        buffer.map_or("", |b| &self.plan.dag().buffers[b].name)
    }
}

/// The lengths that a shape has in a run.
pub(crate) fn lengths(dims: &Dims, env: &Env) -> Lengths {
    dims.iter().map(|d| d.usize_at(env)).collect()
}

impl Compiled {
    /// Where a buffer lies in the memory that it is planned for.
    pub fn place_in(&self, space: Region, buffer: usize) -> Region {
        let Planned { offset, bytes } = self.buffers[buffer].place;
        space.part(offset, bytes)
    }
}

impl Step {
    /// The kernel that it runs, if it runs one.
    pub fn kernel(&self) -> Option<&Kernel> {
        if let Work::Run(kernel) = &self.work {
            Some(kernel)
        } else {
            None
        }
    }

    /// The sizes that its kernel runs with, in a run of these sizes: those of its micro-batch.
    pub fn sizes(&self, run: &Env) -> Env {
        let split = self.kernel().and_then(Kernel::micro_batching);
        let split = self.slice.zip(split);
        split.map_or(*run, |(slice, split)| slice.sizes(run, split.batch))
    }

    /// The kind of its check, if it checks anything.
    pub fn checks(&self) -> CheckKind {
        match self.binds {
            Some(_) => CheckKind::Length,
            None if self.finite => CheckKind::Finite,
            None => CheckKind::Index,
        }
    }

    /// The largest team that it may run with, if one runs it.
    pub fn threads(&self) -> Option<usize> {
        self.kernel()?.threads()
    }
}

impl Step {
    /// The end of the highest byte of the slab that it is given, whether inputs lie there or
    /// elsewhere.
    pub fn slab_end(&self, inner: &Compiled) -> u64 {
        let moved = match self.work {
            Work::Run(_) => None,
            Work::Start(transfer) | Work::Finish(transfer) => Some(&inner.transfers[transfer]),
        };
        let placed = self
            .places
            .iter()
            .filter_map(Place::buffer)
            .filter(|&b| !inner.buffers[b].data_dependent);
        let buffers = placed.chain(moved.into_iter().flat_map(Transfer::buffers));
        let places = buffers
            .map(|b| &inner.buffers[b])
            .filter(|b| !b.on_host)
            .map(|b| b.place)
            .chain([self.workspace]);
        places
            .map(|place| place.offset + place.bytes)
            .max()
            .unwrap_or(0)
    }
}

impl PlannedBuffer {
    /// The bytes of its value under the sizes of a run.
    pub fn bytes_at(&self, env: &Env) -> u64 {
        lengths(&self.stored, env).iter().product::<usize>() as u64 * self.dtype.bytes() as u64
    }
}
