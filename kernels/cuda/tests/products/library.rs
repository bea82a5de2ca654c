//! Runs products by a library, over a driver without a device.

use std::sync::Arc;

use slabwise_cuda::cache::Cache;
use slabwise_cuda::cublaslt::Algorithm;
use slabwise_cuda::driver::{DriverError, properties};
use slabwise_cuda::fake::FakeDriver;
use slabwise_cuda::{
    Choice, Device, Launch, Limits, LoadError, Lowered, Picks, Target, Tuner, lower_as,
    workspace_bytes,
};
use slabwise_kernels::memory::Region;
use slabwise_kernels::scalar::ScalarOp;
use slabwise_kernels::spec::{Inst, Operand, Spec, Store};

use super::super::common::{Case, Choices, compare};
use super::small_integers;

pub const LIMITS: Limits = Limits {
    fraction: 0.75,
    bytes_max: None,
    preallocate: false,
};

/// An algorithm of the fake library, as its source defines it: a mark, its number, how parts are
/// added, the number of parts.
pub fn algorithm(id: u64, workspace: u64) -> Algorithm {
    let (scheme, parts) = if id == 23 { (2, 3) } else { (0, 1) };
    Algorithm {
        words: [0x51ab, id, scheme, parts, 0, 0, 0, 0],
        workspace,
    }
}

/// The choice of an algorithm of cuBLASLt.
pub fn by(id: u64, workspace: u64) -> Choice {
    Choice::Library(algorithm(id, workspace))
}

/// The driver with cuBLASLt.
pub fn installed() -> Option<FakeDriver> {
    let driver = FakeDriver::install()?;
    driver.set("library", 1);
    // A run of a kernel is longer than a sample.
    driver.cost("", 1_000_000);
    Some(driver)
}

/// The target of the driver's device.
pub fn target() -> Target {
    properties(0).expect("there is a device").target
}

pub fn put(device: &mut Device, bytes: &[u8]) -> Region {
    let region = device.reserve(bytes.len() as u64).expect("there is room");
    device.write(&region, bytes).expect("it is written");
    region
}

/// The arguments of each case after its run on the device, all loaded as one program.
pub fn on_device(runs: &[(&Case, &Lowered)]) -> Vec<Result<Vec<Vec<u8>>, DriverError>> {
    let mut device = Device::open(0, LIMITS).expect("it is there");
    let lowered: Vec<&Lowered> = runs.iter().map(|(_, lowered)| *lowered).collect();
    let program = match device.load(&lowered) {
        Err(LoadError::Driver(e)) => return vec![Err(e); runs.len()],
        loaded => loaded.unwrap_or_else(|e| panic!("{e}")),
    };
    let run = |(step, (case, lowered)): (usize, &(&Case, &Lowered))| {
        let arguments: Vec<Region> = case
            .args
            .iter()
            .map(|bytes| put(&mut device, bytes))
            .collect();
        let workspace = put(&mut device, &vec![0xff; workspace_bytes(lowered) as usize]);
        device.launch(
            &program,
            &case.env,
            &Launch {
                step,
                kernel: lowered,
                arguments: &arguments,
                workspace,
            },
        )?;
        let read = |region: &Region| {
            let mut bytes = vec![0; region.bytes as usize];
            device.read(region, &mut bytes).map(|()| bytes)
        };
        arguments.iter().map(read).collect()
    };
    runs.iter().enumerate().map(run).collect()
}

/// Cases of specs, each with its companion value, whose sums have no rounding.
pub fn on_small_integers<T>(
    specs: impl IntoIterator<Item = (&'static str, Spec, T)>,
    seed: u32,
) -> Vec<(Case, T)> {
    let mut choices = Choices::new(seed);
    let case = |(name, spec, beside)| {
        let mut case = Case::new(name, spec, &mut choices);
        case.target = target();
        small_integers(&mut case, &mut choices);
        (case, beside)
    };
    specs.into_iter().map(case).collect()
}

/// A product with an epilogue: `code` after the sum, operands after the result.
pub fn with(mut spec: Spec, operands: Vec<Operand>, code: Vec<Inst>) -> Spec {
    spec.operands.extend(operands);
    spec.code.extend(code);
    spec.stores = vec![Store {
        value: spec.code.len() as u16 - 1,
        operand: 0,
    }];
    spec
}

pub fn op(op: ScalarOp, a: u16, b: u16) -> Inst {
    Inst::Op(op, [a, b, 0])
}

/// A case computed by an algorithm of a library.
pub fn of_library(case: &Case, choice: &Choice) -> Lowered {
    let lowered =
        lower_as(&case.spec, &case.bounds, &case.target, choice).expect("it has a source");
    let named = if matches!(choice, Choice::Cudnn(_)) {
        "cuDNN"
    } else {
        "cuBLASLt"
    };
    assert!(
        lowered
            .library()
            .is_some_and(|name| name.starts_with(named)),
        "{} is not the library's: {:?}",
        case.name,
        case.spec
    );
    lowered
}

/// The arguments of each case after each of a library's algorithms. Fails unless the library writes
/// the result itself where the flag says so.
pub fn computed(cases: &[(Case, bool)], algorithms: &[Choice]) -> Vec<Vec<Vec<u8>>> {
    let mut lowered = Vec::new();
    for (case, direct) in cases {
        for algorithm in algorithms {
            lowered.push((case, of_library(case, algorithm)));
            assert_eq!(
                lowered.last().is_some_and(|(_, l)| l.functions.is_empty()),
                *direct,
                "{}",
                case.name
            );
        }
    }
    let runs: Vec<(&Case, &Lowered)> = lowered
        .iter()
        .map(|(case, lowered)| (*case, lowered))
        .collect();
    let done = on_device(&runs).into_iter().zip(&runs);
    done.map(|(done, (case, _))| done.unwrap_or_else(|e| panic!("{}: {e}", case.name)))
        .collect()
}

/// Fails unless a library's algorithms give the CPU's result for each case, within the tolerance.
pub fn check(cases: &[(Case, bool)], algorithms: &[Choice], tolerance: f32) {
    for ((case, _), results) in cases
        .iter()
        .zip(computed(cases, algorithms).chunks(algorithms.len()))
    {
        let (expected, _) = case.on_cpu();
        for (got, algorithm) in results.iter().zip(algorithms) {
            compare(
                case,
                &format!("{}, {algorithm:?}", case.name),
                got,
                &expected,
                tolerance,
            );
        }
    }
}

pub fn tuner(picks: Arc<Picks>) -> Tuner {
    Tuner {
        ordinal: 0,
        limits: LIMITS,
        room: None,
        worth: 48 * 40 * 64,
        cudnn: true,
        picks,
    }
}

pub fn picks_in(folder: &tempfile::TempDir) -> Arc<Picks> {
    Picks::at(Cache::at(folder.path().join("cache")).expect("a private folder"))
}
