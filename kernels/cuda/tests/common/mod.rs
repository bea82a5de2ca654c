//! Runs specs twice, by the CPU's kernels and by generated source under the emulator, on copies of
//! the same arguments.
#![allow(dead_code)] // each test binary uses a part of it

pub mod gpu;
pub mod layouts;
pub mod machine_code;

use slabwise_cuda::cache::Cache;
use slabwise_cuda::compiler::Compiler;
use slabwise_cuda::emulator::{self, Check, Emulator, Order, asan_library, gpu_required, protect};
use slabwise_cuda::{Dispatch, Function, Lowered, PRELUDE, Speeds, Target, Word, lower, nvrtc};
use slabwise_kernels::cpu::{Config, Isa, Kernel, Team};
use slabwise_kernels::dtype::DType;
use slabwise_kernels::memory::{Memory, Region};
use slabwise_kernels::random::philox;
use slabwise_kernels::size::Env;
use slabwise_kernels::spec::{Access, Spec};

/// The target of generated source in tests: few multiprocessors, so that loops over blocks take
/// several iterations.
pub const TARGET: Target = Target {
    sm: 80,
    multiprocessors: 2,
    shared_bytes_max: 99 << 10,
    wave_width: 32,
    speeds: Speeds {
        f32: 64,
        tf32: 512,
        half: 1024,
        mma_share: 1000,
        memory: 13_400,
        cache: 31_500,
    },
    sector_bytes: 32,
    tf32: false,
    guarded: false,
};

/// Bytes of guard zones between arguments; writes to them are detected.
const GUARD: usize = 256;
const UNTOUCHED: u8 = 0xff;
/// The value of a fault record without a fault.
pub const NO_FAULT: u64 = u64::MAX;

/// Whether cases can be checked here: on a GPU that is required, or under the emulator.
pub fn available() -> bool {
    gpu_required() || emulator::available()
}

/// The functions under the emulator, or `None` where a GPU is required.
pub fn emulate(functions: &[Function]) -> Option<Emulator> {
    (!gpu_required())
        .then(|| Emulator::new(functions, Check::Nothing).unwrap_or_else(|e| panic!("{e}")))
}

/// Pseudo-random choices.
pub struct Choices {
    seed: u32,
    count: u32,
}

impl Choices {
    pub fn new(seed: u32) -> Self {
        Choices { seed, count: 0 }
    }

    pub fn bits(&mut self) -> u32 {
        self.count += 1;
        philox([self.count, 0, 0, 0], [self.seed, 0x0cda])[0]
    }

    /// A number below `n`.
    pub fn below(&mut self, n: usize) -> usize {
        self.bits() as usize % n
    }

    /// True once in `n` times.
    pub fn once_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    pub fn pick<T: Clone>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())].clone()
    }

    /// A float in [-1, 1).
    pub fn unit(&mut self) -> f32 {
        (self.bits() >> 8) as f32 / 8_388_608.0 - 1.0
    }

    /// Elements of a type: floats around 0, small integers, truth values.
    pub fn elements(&mut self, dtype: DType, count: usize) -> Vec<u8> {
        (0..count)
            .flat_map(|_| match dtype {
                DType::F32 => (2.0 * self.unit()).to_le_bytes().to_vec(),
                DType::F16 => half::f16::from_f32(2.0 * self.unit())
                    .to_le_bytes()
                    .to_vec(),
                DType::BF16 => half::bf16::from_f32(2.0 * self.unit())
                    .to_le_bytes()
                    .to_vec(),
                DType::I32 => (self.below(201) as i32 - 100).to_le_bytes().to_vec(),
                DType::U8 => vec![self.bits() as u8],
                DType::Bool => vec![self.bits() as u8 & 1],
            })
            .collect()
    }
}

/// A spec with the arguments of one run.
#[derive(Clone)]
pub struct Case {
    pub name: String,
    pub spec: Spec,
    pub bounds: Env,
    pub env: Env,
    /// The bytes of each argument.
    pub args: Vec<Vec<u8>>,
    /// Arguments that share the region of an earlier one.
    pub same: Vec<(usize, usize)>,
    pub target: Target,
}

impl Case {
    /// A case without symbols, its arguments filled at random.
    pub fn new(name: impl Into<String>, spec: Spec, choices: &mut Choices) -> Case {
        Case::bounded(name, spec, Env::default(), Env::default(), choices)
    }

    /// A case whose sizes are `env`, prepared for `bounds`.
    pub fn bounded(
        name: impl Into<String>,
        spec: Spec,
        bounds: Env,
        env: Env,
        choices: &mut Choices,
    ) -> Case {
        let arguments = spec.arguments();
        let args = arguments
            .iter()
            .map(|(o, dims, _)| choices.elements(o.dtype, o.extent(dims, &env) as usize))
            .collect();
        Case {
            name: name.into(),
            spec,
            bounds,
            env,
            args,
            same: vec![],
            target: TARGET,
        }
    }

    fn region_of(&self, argument: usize) -> usize {
        self.same
            .iter()
            .find(|(a, _)| *a == argument)
            .map_or(argument, |(_, first)| *first)
    }

    /// The arguments after a run on the CPU, and the fault record that the run should leave.
    pub fn on_cpu(&self) -> (Vec<Vec<u8>>, u64) {
        let kernel = Kernel::new(
            self.spec.clone(),
            &self.bounds,
            &Config {
                threads: 1,
                isa: Isa::detect(),
            },
        );
        let kernel = kernel.unwrap_or_else(|e| panic!("{}: {e}", self.name));
        let mut memory = Memory::new();
        let own: Vec<Region> = self
            .args
            .iter()
            .map(|a| memory.reserve(a.len() as u64).expect("memory"))
            .collect();
        for (region, arg) in own.iter().zip(&self.args) {
            memory.bytes_mut(region).copy_from_slice(arg);
        }
        let regions: Vec<Region> = (0..own.len()).map(|a| own[self.region_of(a)]).collect();
        let workspace = memory.reserve(kernel.workspace()).expect("memory");
        let fault = match kernel.run(&mut memory, &regions, &workspace, &self.env, &Team::new(1)) {
            Ok(()) => NO_FAULT,
            Err(slabwise_kernels::cpu::Fault::Index {
                position, value, ..
            }) => position << 32 | u64::from(value as i32 as u32),
        };
        (
            regions.iter().map(|r| memory.bytes(r).to_vec()).collect(),
            fault,
        )
    }

    /// The arguments and the fault record after a run of generated source.
    pub fn emulated(
        &self,
        lowered: &Lowered,
        emulator: &Emulator,
        order: Order,
        fault: u64,
    ) -> Result<(Vec<Vec<u8>>, u64), String> {
        let mut slab = Slab::default();
        let own: Vec<usize> = self.args.iter().map(|a| slab.push(a)).collect();
        let at: Vec<usize> = (0..own.len()).map(|a| own[self.region_of(a)]).collect();
        let workspace = slab.push(&vec![0xff; lowered.workspace as usize]);
        let counters = slab.push(&vec![0; 4 * lowered.counters]);
        let record = slab.push(&[fault.to_le_bytes(), NO_FAULT.to_le_bytes()].concat());
        let mut slab = slab.fixed();
        slab.protect(true);
        let base = slab.base() as u64;
        let mut failed = None;
        let mut launches = lowered.launches(&self.env);
        if lowered.side_by_side && order == Order::Reverse {
            launches.reverse();
        }
        for dispatch in launches {
            let argument = |a: usize| base + at[a] as u64;
            let others = [workspace, counters, record].map(|at| base + at as u64);
            let words = words(&dispatch, argument, others);
            let function = &lowered.functions[dispatch.function];
            // SAFETY: the words are addresses inside `slab`, which is large enough for the case;
            // these tests exist to detect kernels that access other memory.
            if let Err(error) = unsafe { emulator.launch(function, &dispatch, &words, order) } {
                failed = Some(error.to_string());
                break;
            }
        }
        slab.protect(false);
        if let Some(failed) = failed {
            return Err(failed);
        }
        slab.check_guards()?;
        let counts = slab.bytes(counters, 4 * lowered.counters);
        if counts.iter().any(|&byte| byte != 0) {
            return Err(format!("counters are left at {counts:?}"));
        }
        let fault = u64::from_le_bytes(slab.bytes(record, 8).try_into().expect("8 bytes"));
        Ok((
            at.iter()
                .zip(&self.args)
                .map(|(&at, a)| slab.bytes(at, a.len()).to_vec())
                .collect(),
            fault,
        ))
    }
}

/// The words of a launch, for the addresses of its arguments, and of its workspace, its counters and
/// the fault record.
pub fn words(
    dispatch: &Dispatch,
    argument: impl Fn(usize) -> u64,
    [workspace, counters, record]: [u64; 3],
) -> Vec<u64> {
    let word = |word: &Word| match word {
        Word::Argument(a) => argument((*a).into()),
        Word::Part(a, offset) => argument((*a).into()) + offset,
        Word::Workspace(offset) => workspace + offset,
        Word::Counters(first) => counters + 4 * *first as u64,
        Word::Fault => record,
        Word::Step => 7,
        Word::Number(n) => *n as u64,
    };
    dispatch.words.iter().map(word).collect()
}

/// Memory of a run: arguments between guard zones, each at a multiple of 256 bytes.
#[derive(Default)]
struct Slab {
    bytes: Vec<u8>,
    used: Vec<(usize, usize)>,
}

impl Slab {
    fn push(&mut self, contents: &[u8]) -> usize {
        let at = (self.bytes.len() + GUARD).next_multiple_of(256);
        self.bytes.resize(at, UNTOUCHED);
        self.bytes.extend_from_slice(contents);
        self.used.push((at, contents.len()));
        at
    }

    fn fixed(mut self) -> Fixed {
        self.bytes.resize(self.bytes.len() + GUARD, UNTOUCHED);
        let mut memory = vec![0u8; self.bytes.len() + 256];
        let ahead = memory.as_ptr().align_offset(256);
        memory[ahead..ahead + self.bytes.len()].copy_from_slice(&self.bytes);
        Fixed {
            memory,
            ahead,
            len: self.bytes.len(),
            used: self.used,
        }
    }
}

/// A slab at a fixed address.
struct Fixed {
    memory: Vec<u8>,
    ahead: usize,
    len: usize,
    used: Vec<(usize, usize)>,
}

impl Fixed {
    fn base(&mut self) -> *mut u8 {
        self.memory[self.ahead..].as_mut_ptr()
    }

    /// Replaces the contents by those after a run elsewhere.
    fn overwrite(&mut self, after: &[u8]) {
        self.memory[self.ahead..][..self.len].copy_from_slice(after);
    }

    fn bytes(&self, at: usize, len: usize) -> &[u8] {
        &self.memory[self.ahead + at..][..len]
    }

    /// Marks all bytes outside the arguments as inaccessible, or all as accessible.
    fn protect(&self, forbidden: bool) {
        protect(self.bytes(0, self.len), forbidden);
        self.used
            .iter()
            .for_each(|&(at, len)| protect(self.bytes(at, len), false));
    }

    fn check_guards(&self) -> Result<(), String> {
        let mut free = vec![true; self.len];
        self.used
            .iter()
            .for_each(|&(at, len)| free[at..at + len].fill(false));
        match self
            .bytes(0, self.len)
            .iter()
            .zip(free)
            .position(|(&b, free)| free && b != UNTOUCHED)
        {
            Some(at) => Err(format!(
                "byte {at}, outside of every argument, was written; arguments are {:?}",
                self.used
            )),
            None => Ok(()),
        }
    }
}

/// A stored float as a number.
pub fn float(dtype: DType, x: &[u8]) -> f32 {
    match dtype {
        DType::F32 => f32::from_le_bytes(x.try_into().expect("4 bytes")),
        DType::F16 => half::f16::from_le_bytes(x.try_into().expect("2 bytes")).to_f32(),
        DType::BF16 => half::bf16::from_le_bytes(x.try_into().expect("2 bytes")).to_f32(),
        DType::I32 | DType::U8 | DType::Bool => panic!("{dtype} is no float"),
    }
}

/// Whether two elements agree: floats within `tolerance` of the larger (or of 1), halves within a
/// step or two of theirs, other types in every bit.
fn agree(dtype: DType, a: &[u8], b: &[u8], tolerance: f32) -> bool {
    if a == b {
        return true;
    }
    if !dtype.is_float() {
        return false;
    }
    let tolerance = if dtype.is_half() && tolerance > 0.0 {
        1e-2
    } else {
        tolerance
    };
    let (a, b) = (float(dtype, a), float(dtype, b));
    (a.is_nan() && b.is_nan())
        || a == b
        || (a - b).abs() <= tolerance * a.abs().max(b.abs()).max(1.0)
}

/// A register or two that a call saves, in the slow path of a division: no sign of too few
/// registers.
pub const SAVED_BY_CALLS: u32 = 16;

/// Fails if NVRTC, where it is installed, refuses a function, or if a thread of one spills more
/// bytes than these. Where a GPU is required, the functions are compiled for it.
pub fn compile_for_gpu(functions: &[Function], sm: u32, spill_bytes_max: u32) {
    if gpu_required() || nvrtc::version().is_err() {
        return; // the tests of the compiler say so
    }
    let executable = std::env::current_exe().expect("a path");
    let built = executable
        .parent()
        .and_then(|deps| deps.parent())
        .expect("a build folder");
    let cache = Cache::at(built.join("slabwise-cubins")).expect("a private folder");
    let programs = nvrtc::Program::each(PRELUDE, functions, sm);
    let code = Compiler::of_process()
        .compile(Some(&cache), &programs)
        .unwrap_or_else(|e| panic!("{e}"));
    let spilled: Vec<_> = code
        .iter()
        .flat_map(|cubin| &cubin.usage)
        .filter(|u| u.spill_bytes > spill_bytes_max)
        .collect();
    assert!(spilled.is_empty(), "sm_{sm}: {spilled:?}");
}

/// Runs an ignored test of this binary in a process that checks addresses, and fails if it fails.
pub fn sanitized(test: &str) {
    let library = asan_library().expect("g++ comes with the sanitizer");
    let child = std::process::Command::new(std::env::current_exe().expect("a path"))
        .args(["--exact", test, "--ignored", "--nocapture"])
        .env("LD_PRELOAD", library)
        .env(
            "ASAN_OPTIONS",
            "detect_leaks=0:halt_on_error=0:handle_segv=0:allow_user_segv_handler=1",
        )
        .output()
        .expect("runs");
    let text = String::from_utf8_lossy(&child.stdout).into_owned()
        + &String::from_utf8_lossy(&child.stderr);
    assert!(
        child.status.success() && text.contains("1 passed"),
        "{text}"
    );
}

/// A GPU computes some functions, such as exponentials, differently from the host: inexact
/// operations may differ by this tolerance.
const GPU_TOLERANCE: f32 = 1e-4;

/// Fails unless the cases give the CPU's results in every order of threads, with the same bits in
/// all orders; and on a GPU, where there is one.
pub fn check(cases: &[Case], tolerance: f32) {
    let lowered: Vec<Lowered> = cases
        .iter()
        .map(|c| lower(&c.spec, &c.bounds, &c.target).unwrap_or_else(|e| panic!("{}: {e}", c.name)))
        .collect();
    let functions: Vec<_> = lowered.iter().flat_map(|l| l.functions.clone()).collect();
    // Random cases are much alike: g++ compiles all of their functions, and NVRTC some.
    // `architectures.rs` has functions of each kind for NVRTC.
    let some: Vec<_> = functions.iter().step_by(3).cloned().collect();
    compile_for_gpu(&some, 90, SAVED_BY_CALLS);
    let emulator = emulate(&functions);
    let wide = Wide::new(cases);
    let mut gpu = gpu::Gpu::load(&lowered.iter().collect::<Vec<_>>());
    for (step, (case, lowered)) in cases.iter().zip(&lowered).enumerate() {
        let (expected, fault) = case.on_cpu();
        if let Some(gpu) = &mut gpu {
            let (got, record) = gpu
                .run(step, case, lowered)
                .unwrap_or_else(|e| panic!("{}: {e}\n{:?}", case.name, case.spec));
            assert_eq!(record, fault, "{} on the GPU: fault record", case.name);
            let tolerance = if tolerance == 0.0 {
                0.0
            } else {
                tolerance.max(GPU_TOLERANCE)
            };
            compare(
                case,
                &format!("{} on the GPU", case.name),
                &got,
                &expected,
                tolerance,
            );
        }
        let Some(emulator) = &emulator else { continue };
        wide.check(step, case, &expected, fault, tolerance);
        let mut first: Option<Vec<Vec<u8>>> = None;
        for order in Order::ALL {
            let what = format!("{} ({order:?})", case.name);
            let (got, record) = case
                .emulated(lowered, emulator, order, NO_FAULT)
                .unwrap_or_else(|e| panic!("{what}: {e}\n{:?}", case.spec));
            assert_eq!(record, fault, "{what}: fault record");
            compare(case, &what, &got, &expected, tolerance);
            match &first {
                Some(first) => assert!(*first == got, "{what}: other bits than forward"),
                None => first = Some(got),
            }
        }
    }
}

/// Every third case, for a device whose waves have 64 lanes.
struct Wide {
    lowered: Vec<Lowered>,
    emulator: Option<Emulator>,
}

impl Wide {
    const STEP: usize = 3;

    fn new(cases: &[Case]) -> Wide {
        let lower = |case: &Case| {
            let target = Target {
                wave_width: 64,
                ..case.target
            };
            lower(&case.spec, &case.bounds, &target)
                .unwrap_or_else(|e| panic!("{}: {e}", case.name))
        };
        let lowered: Vec<Lowered> = cases.iter().step_by(Wide::STEP).map(lower).collect();
        let functions: Vec<_> = lowered.iter().flat_map(|l| l.functions.clone()).collect();
        let emulator = (!gpu_required()).then(|| {
            Emulator::with_waves(&functions, Check::Nothing, 64).unwrap_or_else(|e| panic!("{e}"))
        });
        Wide { lowered, emulator }
    }

    /// Compares case `step` with the CPU, if it is one of them.
    fn check(&self, step: usize, case: &Case, expected: &[Vec<u8>], fault: u64, tolerance: f32) {
        let Some(emulator) = self
            .emulator
            .as_ref()
            .filter(|_| step.is_multiple_of(Wide::STEP))
        else {
            return;
        };
        let lowered = &self.lowered[step / Wide::STEP];
        let mut first: Option<Vec<Vec<u8>>> = None;
        for order in Order::ALL {
            let what = format!("{} ({order:?}, 64 lanes)", case.name);
            let (got, record) = case
                .emulated(lowered, emulator, order, NO_FAULT)
                .unwrap_or_else(|e| panic!("{what}: {e}\n{:?}", case.spec));
            assert_eq!(record, fault, "{what}: fault record");
            compare(case, &what, &got, expected, tolerance);
            let first = first.get_or_insert_with(|| got.clone());
            assert!(*first == got, "{what}: other bits than forward");
        }
    }
}

pub fn compare(case: &Case, what: &str, got: &[Vec<u8>], expected: &[Vec<u8>], tolerance: f32) {
    for (a, (operand, _, access)) in case.spec.arguments().iter().enumerate() {
        let width = operand.dtype.bytes();
        let shared = case
            .same
            .iter()
            .any(|&(again, first)| again == a || first == a);
        let tolerance = if *access == Access::Read && !shared {
            0.0
        } else {
            tolerance
        };
        for (i, (g, e)) in got[a]
            .chunks(width)
            .zip(expected[a].chunks(width))
            .enumerate()
        {
            if !agree(operand.dtype, g, e, tolerance) {
                let show = |x: &[u8]| match operand.dtype {
                    dtype if dtype.is_float() => float(dtype, x).to_string(),
                    _ => format!("{x:?}"),
                };
                panic!(
                    "{what}: element {i} of argument {a} is {} instead of {}\n{:?}",
                    show(g),
                    show(e),
                    case.spec
                );
            }
        }
    }
}
