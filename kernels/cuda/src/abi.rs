//! The interface of generated code: functions in CUDA C++ and the form of their launches.
//!
//! Every function has one parameter, a block of 64-bit words:
//!
//! ```text
//! extern "C" __global__ void NAME(const __grid_constant__ Words<N> p)   // struct { unsigned long long w[N]; }
//! ```
//!
//! so that a launch is a list of [`Word`]s for every kernel, on a device and in an emulator. A
//! function's name contains a hash of its source: equal kernels of a program are one function, and
//! names never collide in one module.

/// The most words of a function's parameter: the 4 KiB that every device supports.
pub const WORDS_MAX: usize = 512;

/// The target for which source is generated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Target {
    /// Compute capability, as in `sm_90`: 80, 90, 100, …
    pub sm: u32,
    /// Streaming multiprocessors: they determine how many blocks fill the device.
    pub multiprocessors: u32,
    /// The limit of shared memory per block, bytes.
    pub shared_bytes_max: u32,
    /// Lanes of a wave (a warp): 32 or 64.
    pub wave_width: u32,
    /// The rates by which products are ranked.
    pub speeds: Speeds,
    /// Bytes that memory moves at once: padded rows are a multiple of them.
    pub sector_bytes: u32,
    /// Whether products of f32 may be rounded to tf32.
    pub tf32: bool,
    /// Whether the kernel first reads the fault record, and does nothing if an earlier kernel found
    /// an index out of range. Set for kernels that store to variables.
    pub guarded: bool,
}

/// The rates by which products are ranked, as integers, so that targets can be compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Speeds {
    /// Multiply-adds of a multiprocessor per cycle in f32.
    pub f32: u32,
    /// The same by `mma.sync`, with operands of f32 rounded to tf32.
    pub tf32: u32,
    /// The same with operands in f16 or bf16.
    pub half: u32,
    /// The thousandths of the tensor cores' rates that `mma.sync` reaches.
    pub mma_share: u32,
    /// Bytes that a multiprocessor's share of the memory's bandwidth moves in 1,000 cycles.
    pub memory: u32,
    /// The same of the L2 cache.
    pub cache: u32,
}

/// One `__global__` function.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Function {
    /// Its name in the module.
    pub name: String,
    /// Its definition; code shared by kernels is in the prelude.
    pub source: String,
}

impl Function {
    /// A function from a text in which `NAME` stands for its name, which becomes `kind` and a hash
    /// of the text.
    pub fn new(kind: &str, text: &str) -> Function {
        let name = format!("{kind}_{:016x}", digest(&[text]));
        let source = text.replacen("NAME", &name, 1);
        Function { name, source }
    }

    /// Whether a launch gives it shared memory: functions declare that by a macro of the prelude.
    pub(crate) fn takes_shared(&self) -> bool {
        self.source.contains("SHARED_BYTES(")
    }
}

/// A hash of texts that is stable across versions (FNV-1a; Fowler, Noll, Vo).
pub(crate) fn digest(texts: &[&str]) -> u64 {
    let bytes = texts.iter().flat_map(|text| text.bytes().chain([0]));
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// One 64-bit word of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Word {
    /// The address of the first byte of an argument's region, in the order of `Spec::arguments`: a
    /// multiple of 16.
    Argument(u16),
    /// The address at an offset in bytes into an argument's region: a multiple of 16, too.
    Part(u16, u64),
    /// The address at an offset in bytes into the workspace.
    Workspace(u64),
    /// The address of the step's counter of blocks of this number, and of those that follow, each an
    /// `unsigned`: zero before and after every launch of the step. They are no workspace, because a
    /// plan gives the bytes of a workspace to other steps between two runs.
    Counters(usize),
    /// The address of the run's fault record, two `unsigned long long`: `position << 32 | value` of
    /// the first index out of range, then the step that found it. All ones while there is none. A
    /// step keeps the fault of an earlier step; within one step the first position wins, by
    /// `atomicMin`.
    Fault,
    /// The number of the kernel's step in the program.
    Step,
    /// A number: a size, a stride, an offset, a magic divisor.
    Number(i64),
}

/// One launch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dispatch {
    /// The index of the function.
    pub function: usize,
    /// The number of blocks; a launch without blocks is skipped.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub block: [u32; 3],
    /// Bytes of dynamic shared memory.
    pub shared_bytes: u32,
    /// The words of the parameter.
    pub words: Vec<Word>,
}

impl Dispatch {
    /// A launch of blocks along one dimension, without dynamic shared memory.
    pub fn new(function: usize, blocks: u32, threads: u32, words: Vec<Word>) -> Dispatch {
        Dispatch {
            function,
            grid: [blocks, 1, 1],
            block: [threads, 1, 1],
            shared_bytes: 0,
            words,
        }
    }
}
