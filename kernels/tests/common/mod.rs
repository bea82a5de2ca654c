//! Runs kernels on the public interface, in memory laid out to catch stray accesses: guard zones
//! around every argument and the workspace, and a workspace full of NaN.

use slabwise_kernels::cpu::{Config, Isa, Kernel, Team};
use slabwise_kernels::dtype::DType;
use slabwise_kernels::memory::{Memory, Region};
use slabwise_kernels::size::{Env, Size};
use slabwise_kernels::spec::{Operand, Spec};

/// Bytes of a guard zone, a multiple of every alignment.
const GUARD: u64 = 256;
/// The contents of guard zones and of the workspace: a NaN.
const POISON: u32 = 0x7fde_adbe;

/// A small pseudo-random generator (xorshift64*, Vigna 2016).
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// A number in `from..=to`.
    pub fn int(&mut self, from: usize, to: usize) -> usize {
        from + ((self.next() >> 32) as usize) % (to - from + 1)
    }

    /// Any of these.
    pub fn of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.int(0, choices.len() - 1)]
    }

    /// A number in −1..1.
    pub fn float(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    pub fn floats(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.float()).collect()
    }
}

/// An f32 operand with these strides.
pub fn operand(offset: i64, strides: &[i64]) -> Operand {
    Operand {
        dtype: DType::F32,
        offset: Size::fixed(offset),
        strides: strides.iter().map(|&s| Size::fixed(s)).collect(),
    }
}

/// Row-major strides.
pub fn contiguous(dims: &[usize]) -> Vec<i64> {
    let mut strides = vec![1; dims.len()];
    for axis in (1..dims.len()).rev() {
        strides[axis - 1] = strides[axis] * dims[axis] as i64;
    }
    strides
}

/// Runs a spec prepared for `bound` under `env` on copies of `args` and returns them afterwards.
/// Arguments and workspace lie between guard zones or, for two threads, in arenas of their own,
/// whose ends an address sanitizer watches.
pub fn run(
    spec: &Spec,
    bound: &Env,
    env: &Env,
    isa: Isa,
    team: &Team,
    args: &[Vec<f32>],
) -> Vec<Vec<f32>> {
    run_within(u64::MAX, team.threads(), spec, bound, env, isa, team, args)
}

/// Like [`run`], prepared for so many threads, with a workspace of at most `most` bytes, if
/// possible.
#[allow(clippy::too_many_arguments)] // they differ between calls
fn run_within(
    most: u64,
    threads: usize,
    spec: &Spec,
    bound: &Env,
    env: &Env,
    isa: Isa,
    team: &Team,
    args: &[Vec<f32>],
) -> Vec<Vec<f32>> {
    let config = Config { threads, isa };
    let kernel = Kernel::within(spec.clone(), bound, &config, most).expect("a valid spec");
    let mut memory = Memory::new();
    let guard = if team.threads() == 2 { 0 } else { GUARD };
    let mut regions: Vec<Region> = Vec::new();
    let mut guards: Vec<Region> = Vec::new();
    for bytes in args
        .iter()
        .map(|a| 4 * a.len() as u64)
        .chain([kernel.workspace()])
    {
        let arena = memory.reserve(bytes + 2 * guard).unwrap();
        memory.elements_mut::<i32>(&arena).fill(POISON as i32);
        regions.push(arena.part(guard, bytes));
        guards.extend([arena.part(0, guard), arena.part(guard + bytes, guard)]);
    }
    let workspace = regions.pop().unwrap();
    for (region, arg) in regions.iter().zip(args) {
        memory.elements_mut::<f32>(region).copy_from_slice(arg);
    }
    kernel
        .run(&mut memory, &regions, &workspace, env, team)
        .unwrap();
    for guard in &guards {
        assert!(
            memory
                .elements::<i32>(guard)
                .iter()
                .all(|&x| x == POISON as i32),
            "guard zone {guard:?} was written"
        );
    }
    regions
        .iter()
        .map(|r| memory.elements::<f32>(r).to_vec())
        .collect()
}

/// Runs a spec on every instruction set with one, two and three threads, with small workspaces, and
/// with fewer threads than it was prepared for;
/// the results of each instruction set are bit-equal, and its single-threaded ones are returned.
pub fn run_all(
    spec: &Spec,
    bound: &Env,
    env: &Env,
    teams: &[Team],
    args: &[Vec<f32>],
) -> Vec<(Isa, Vec<Vec<f32>>)> {
    let bits = |results: &[Vec<f32>]| {
        results
            .iter()
            .flatten()
            .map(|x| x.to_bits())
            .collect::<Vec<_>>()
    };
    Isa::available()
        .into_iter()
        .map(|isa| {
            let first = run(spec, bound, env, isa, &teams[0], args);
            for team in &teams[1..] {
                let other = run(spec, bound, env, isa, team, args);
                assert!(
                    bits(&first) == bits(&other),
                    "{isa}: {} threads give other bits than one: {spec:?}",
                    team.threads()
                );
            }
            // The system may have given fewer threads than were asked for.
            let last = &teams[teams.len() - 1];
            for (most, threads, team) in [
                (0, last.threads(), last),
                (100_000, 1, &teams[0]),
                (u64::MAX, 5, &teams[0]),
            ] {
                let other = run_within(most, threads, spec, bound, env, isa, team, args);
                assert!(
                    bits(&first) == bits(&other),
                    "{isa}: workspaces of {most} bytes for {threads} threads give other bits: \
                     {spec:?}"
                );
            }
            (isa, first)
        })
        .collect()
}

/// Teams of one, two and three threads.
pub fn teams() -> Vec<Team> {
    (1..=3).map(Team::new).collect()
}

/// Compares a sum of `terms` products with its value in double precision; `scale` is the sum of
/// their magnitudes. The bound is that of any order of summation in single precision (Higham,
/// *Accuracy and Stability*, §3.1).
pub fn assert_sum(actual: f32, expected: f64, scale: f64, terms: usize, what: &dyn Fn() -> String) {
    let bound = (terms as f64 + 4.0) * f64::from(f32::EPSILON) / 2.0 * scale;
    assert!(
        (f64::from(actual) - expected).abs() <= bound,
        "{actual} is not {expected} ± {bound}: {}",
        what()
    );
}
