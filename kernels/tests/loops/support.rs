//! The harness of all tests of loops: memory around a kernel, and a source of random choices.

use slabwise_kernels::cpu::{Config, Isa, Kernel, Team};
use slabwise_kernels::memory::{Memory, Region};
use slabwise_kernels::random::philox;
use slabwise_kernels::size::Env;
use slabwise_kernels::spec::Spec;

/// Choices that follow from a seed.
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
        philox([self.count, 0, 0, 0], [self.seed, 0x10095])[0]
    }

    /// A number below `n`.
    pub fn below(&mut self, n: usize) -> usize {
        self.bits() as usize % n
    }

    /// True once in `n` times.
    pub fn once_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    pub fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[self.below(from.len())]
    }

    /// A float in [-1, 1).
    pub fn unit(&mut self) -> f32 {
        (self.bits() >> 8) as f32 / 8_388_608.0 - 1.0
    }
}

/// A kernel's arguments, as regions of one block of bytes.
pub struct Bytes {
    pub all: Vec<u8>,
    pub args: Vec<(usize, usize)>,
}

impl Bytes {
    pub fn new() -> Self {
        Bytes {
            all: Vec::new(),
            args: Vec::new(),
        }
    }

    /// Adds an argument with these contents, between guard bytes.
    pub fn push(&mut self, contents: &[u8]) {
        const GUARD: usize = 64;
        let start = (self.all.len() + GUARD).next_multiple_of(4);
        self.all.resize(start, 0xA5);
        self.all.extend_from_slice(contents);
        self.all.resize(self.all.len() + GUARD, 0xA5);
        self.args.push((start, contents.len()));
    }

    pub fn push_f32(&mut self, contents: &[f32]) {
        self.push(
            &contents
                .iter()
                .flat_map(|x| x.to_le_bytes())
                .collect::<Vec<_>>(),
        );
    }

    /// Adds an argument that is the same region as an earlier one.
    pub fn push_same(&mut self, argument: usize) {
        self.args.push(self.args[argument]);
    }

    pub fn f32s(&self, argument: usize) -> Vec<f32> {
        let (start, len) = self.args[argument];
        self.all[start..start + len]
            .chunks_exact(4)
            .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
            .collect()
    }

    pub fn i32s(&self, argument: usize) -> Vec<i32> {
        let (start, len) = self.args[argument];
        self.all[start..start + len]
            .chunks_exact(4)
            .map(|b| i32::from_le_bytes([b[0], b[1], b[2], b[3]]))
            .collect()
    }

    /// Runs a kernel on these bytes, in a workspace of NaN; guards around the workspace must
    /// survive.
    pub fn run(&mut self, kernel: &Kernel, env: &Env, team: &Team) {
        let mut memory = Memory::new();
        let data = memory.reserve(self.all.len() as u64).expect("memory");
        memory.bytes_mut(&data).copy_from_slice(&self.all);
        let work = memory.reserve(kernel.workspace() + 128).expect("memory");
        memory.bytes_mut(&work).fill(0xFF);
        let regions: Vec<Region> = self
            .args
            .iter()
            .map(|&(start, len)| data.part(start as u64, len as u64))
            .collect();
        kernel
            .run(
                &mut memory,
                &regions,
                &work.part(64, kernel.workspace()),
                env,
                team,
            )
            .expect("no fault");
        for guard in [work.part(0, 64), work.part(64 + kernel.workspace(), 64)] {
            assert!(
                memory.bytes(&guard).iter().all(|&b| b == 0xFF),
                "the workspace was overrun"
            );
        }
        self.all.copy_from_slice(memory.bytes(&data));
    }
}

/// Runs a spec on each instruction set and with one to three threads; the bits must not depend on
/// the threads. Returns the bytes after each instruction set's run.
pub fn run_all(spec: &Spec, bound: &Env, env: &Env, bytes: &Bytes) -> Vec<(Isa, Bytes)> {
    let mut results = Vec::new();
    for isa in Isa::available() {
        let mut first: Option<Vec<u8>> = None;
        for threads in 1..=3 {
            let kernel =
                Kernel::new(spec.clone(), bound, &Config { threads, isa }).expect("a valid spec");
            let mut run = Bytes {
                all: bytes.all.clone(),
                args: bytes.args.clone(),
            };
            run.run(&kernel, env, &Team::new(threads));
            match &first {
                None => {
                    first = Some(run.all.clone());
                    results.push((isa, run));
                }
                Some(first) => assert!(
                    *first == run.all,
                    "{isa}: {threads} threads give other bits than one"
                ),
            }
        }
    }
    results
}
