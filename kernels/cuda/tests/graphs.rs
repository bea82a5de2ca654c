//! Graphs whose capture or creation fails, over a driver without a device.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use slabwise_cuda::fake::FakeDriver;
use slabwise_cuda::{Device, Dispatch, Function, Launch, Limits, Lowered, Run, Word, Work};
use slabwise_kernels::memory::Region;
use slabwise_kernels::size::Env;

const INVALID_VALUE: i32 = 1;
const CAPTURE_INVALIDATED: i32 = 901;

const LIMITS: Limits = Limits {
    fraction: 0.75,
    bytes_max: None,
    preallocate: false,
};

/// The sizes of all runs.
const SIZES: Env = Env([5, 0, 0, 0, 0, 0, 0, 0]);

/// A kernel that adds the first size of a run to 64 floats.
fn add() -> Lowered {
    let text = "extern \"C\" __global__ void NAME(const __grid_constant__ Words<3> p) {\n    \
                wait_for_earlier_kernels();\n    \
                const int i = threadIdx.x;\n    \
                ((float*)p.w[1])[i] = ((const float*)p.w[0])[i] + (float)(long long)p.w[2];\n}\n";
    Lowered::new(vec![Function::new("add", text)], 0, |env: &Env| {
        let size = Word::Number(i64::from(env.0[0]));
        vec![Dispatch {
            function: 0,
            grid: [1, 1, 1],
            block: [64, 1, 1],
            shared_bytes: 0,
            words: vec![Word::Argument(0), Word::Argument(1), size],
        }]
    })
}

fn floats(device: &Device, region: &Region) -> Vec<f32> {
    let mut bytes = vec![0; region.bytes as usize];
    device.read(region, &mut bytes).expect("it is read");
    bytes
        .chunks_exact(4)
        .map(|c| f32::from_ne_bytes(c.try_into().expect("4 bytes")))
        .collect()
}

/// A run of two kernels, of which the second may be launched early.
fn run_of(key: &[u64]) -> Run<'_> {
    Run {
        key,
        env: &SIZES,
        checked: true,
        after: None,
        early: true,
    }
}

/// If the driver refuses edges, a run is captured again with fewer, and later runs at once: without
/// launches before other kernels have ended, then as a chain.
#[test]
fn a_graph_whose_edges_are_refused_has_fewer() {
    let Some(driver) = FakeDriver::install() else {
        return;
    };
    let kernel = add();
    let refused = [
        ("", -1, "", 1),
        ("cuStreamUpdateCaptureDependencies_v2", 0, "", 2),
        ("cuStreamUpdateCaptureDependencies_v2", 2, "", 2),
        ("cuGraphInstantiateWithFlags", 0, "", 2),
        ("cuGraphUpload", 0, "", 2),
        ("", -1, "ends", 2),
        ("", -1, "chains", 3),
    ];
    for (call, after, always, captures) in refused {
        driver.set("ends", i64::from(always == "ends"));
        driver.set("chains", i64::from(always == "chains"));
        let mut device = Device::open(0, LIMITS).expect("it is there");
        let [x, y, z] = [0; 3].map(|_| device.reserve(256).expect("room"));
        let program = device.load(&[&kernel, &kernel]).expect("both are fine");
        let arguments = [[x, y], [y, z]];
        let launches = (0..2).map(|step| Launch {
            step,
            kernel: &kernel,
            arguments: &arguments[step],
            workspace: x.part(0, 0),
        });
        driver.fail(call, after, INVALID_VALUE);
        for (key, captures) in [(1, captures), (2, 1)] {
            let before = driver.get("captures");
            let (key, dependencies) = ([key], [vec![], vec![0]]);
            let run = Run {
                after: Some(&dependencies),
                ..run_of(&key)
            };
            let work = launches.clone().map(Work::Launch);
            let recorded = device.record(&program, &run, work);
            recorded.unwrap_or_else(|e| panic!("{call}: {e}"));
            assert_eq!(
                driver.get("captures") - before,
                captures,
                "{call} {after} {always}"
            );
            assert!(driver.get("uploads") > 0, "{call}");
            driver.set("uploads", 0);
            assert_eq!(device.replay(&program, &key), Ok(true));
            assert_eq!(floats(&device, &z), [10.0; 64], "{call}");
            device.fill(&z, 0).expect("it is filled");
        }
    }
}

/// A failure that is not a refusal of the edges may be temporary: they are tried again.
#[test]
fn a_capture_that_fails_once_keeps_its_edges() {
    let Some(driver) = FakeDriver::install() else {
        return;
    };
    let kernel = add();
    let mut device = Device::open(0, LIMITS).expect("it is there");
    let [x, y, z] = [0; 3].map(|_| device.reserve(256).expect("room"));
    let program = device.load(&[&kernel, &kernel]).expect("both are fine");
    let arguments = [[x, y], [y, z]];
    let after = [vec![], vec![0]];
    // Then the driver refuses edges to kernels that start early, which are still tried first.
    for (key, call, ends, captures) in [
        (1, "cuStreamEndCapture", 0, 2),
        (2, "", 0, 1),
        (3, "", 1, 2),
        (4, "", 1, 1),
    ] {
        driver.fail(call, 0, CAPTURE_INVALIDATED);
        driver.set("ends", ends);
        let before = driver.get("captures");
        let work = (0..2).map(|step| {
            Work::Launch(Launch {
                step,
                kernel: &kernel,
                arguments: &arguments[step],
                workspace: x.part(0, 0),
            })
        });
        let key = [key];
        let run = Run {
            after: Some(&after),
            ..run_of(&key)
        };
        device.record(&program, &run, work).expect("it is recorded");
        assert_eq!(driver.get("captures") - before, captures, "{key:?}");
        assert_eq!(device.replay(&program, &key), Ok(true));
        assert_eq!(floats(&device, &z), [10.0; 64]);
        device.fill(&z, 0).expect("it is filled");
    }
}

/// A capture that is invalidated while work is submitted ends, and is tried again; the stream then
/// executes work.
#[test]
fn an_invalidated_capture_ends_and_is_repeated() {
    let Some(driver) = FakeDriver::install() else {
        return;
    };
    let kernel = add();
    for (call, after, edges) in [
        ("cuStreamGetCaptureInfo_v3", 1, true),
        ("cuLaunchKernel", 1, true),
        ("cuLaunchKernel", 0, false),
        ("cuMemcpyDtoHAsync_v2", 0, false),
    ] {
        let mut device = Device::open(0, LIMITS).expect("it is there");
        let [x, y, z] = [0; 3].map(|_| device.reserve(256).expect("room"));
        let program = device.load(&[&kernel, &kernel]).expect("both are fine");
        let arguments = [[x, y], [y, z]];
        let work = (0..2).map(|step| {
            Work::Launch(Launch {
                step,
                kernel: &kernel,
                arguments: &arguments[step],
                workspace: x.part(0, 0),
            })
        });
        let dependencies = [vec![], vec![0]];
        let run = Run {
            after: edges.then_some(&dependencies[..]),
            early: edges,
            ..run_of(&[1])
        };
        let before = driver.get("captures");
        driver.fail(call, after, CAPTURE_INVALIDATED);
        let recorded = device.record(&program, &run, work);
        recorded.unwrap_or_else(|e| panic!("{call}: {e}"));
        assert_eq!(driver.get("captures") - before, 2, "{call}");
        assert_eq!(floats(&device, &z), [0.0; 64], "nothing was run");
        assert_eq!(device.replay(&program, &[1]), Ok(true));
        assert_eq!(floats(&device, &z), [10.0; 64], "{call}");
    }
}

/// The stream of a capture that panics is usable.
#[test]
fn a_panic_ends_a_capture() {
    let Some(_driver) = FakeDriver::install() else {
        return;
    };
    let kernel = add();
    let mut device = Device::open(0, LIMITS).expect("it is there");
    let [x, y] = [0; 2].map(|_| device.reserve(256).expect("room"));
    let program = device.load(&[&kernel]).expect("it is fine");
    let arguments = [x, y];
    let launch = Launch {
        step: 0,
        kernel: &kernel,
        arguments: &arguments,
        workspace: x.part(0, 0),
    };
    let work = [launch, launch]
        .into_iter()
        .enumerate()
        .map(|(at, launch)| {
            if at == 1 {
                resume_unwind(Box::new("no second kernel"));
            }
            Work::Launch(launch)
        });
    let recorded = catch_unwind(AssertUnwindSafe(|| {
        device.record(&program, &run_of(&[1]), work)
    }));
    assert!(recorded.is_err());
    assert_eq!(floats(&device, &y), [0.0; 64], "nothing was run");
    let work = [Work::Launch(launch)].into_iter();
    device
        .record(&program, &run_of(&[1]), work)
        .expect("it is recorded");
    assert_eq!(device.replay(&program, &[1]), Ok(true));
    assert_eq!(floats(&device, &y), [5.0; 64]);
}
