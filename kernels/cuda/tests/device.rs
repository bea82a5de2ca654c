//! A device over a driver without one: memory, staging, faults, graphs.

use slabwise_cuda::compiler::Compiler;
use slabwise_cuda::driver::{DriverError, properties};
use slabwise_cuda::fake::FakeDriver;
use slabwise_cuda::{
    Description, Device, Dispatch, Function, Launch, Limits, LoadError, Lowered, Run, Word, Work,
    nvrtc, staging_bytes,
};
use slabwise_kernels::size::Env;

const OUT_OF_MEMORY: i32 = 2;
const NVLINK_UNCORRECTABLE: i32 = 220;
const CONTAINED: i32 = 226;
const ILLEGAL_ADDRESS: i32 = 700;
const TENSOR_MEMORY_LEAK: i32 = 721;
const MPS_CLIENT_TERMINATED: i32 = 810;

fn limits(preallocate: bool) -> Limits {
    Limits {
        fraction: 0.75,
        bytes_max: None,
        preallocate,
    }
}

/// A kernel that adds a number to 64 floats.
fn add() -> Lowered {
    let text = "extern \"C\" __global__ void NAME(const __grid_constant__ Words<3> p) {\n    \
                const int i = blockIdx.x * blockDim.x + threadIdx.x;\n    \
                if (i < 64) ((float*)p.w[1])[i] = ((const float*)p.w[0])[i] + (float)(long long)p.w[2];\n}\n";
    Lowered::new(vec![Function::new("add", text)], 0, |env: &Env| {
        let words = vec![
            Word::Argument(0),
            Word::Argument(1),
            Word::Number(i64::from(env.0[0])),
        ];
        vec![Dispatch {
            function: 0,
            grid: [2, 1, 1],
            block: [32, 1, 1],
            shared_bytes: 0,
            words,
        }]
    })
}

fn floats(device: &Device, region: &slabwise_kernels::memory::Region) -> Vec<f32> {
    let mut bytes = vec![0; region.bytes as usize];
    device.read(region, &mut bytes).expect("it is read");
    bytes
        .chunks_exact(4)
        .map(|c| f32::from_ne_bytes(c.try_into().expect("4 bytes")))
        .collect()
}

#[test]
fn memory_is_reserved_at_the_first_use_and_given_back() {
    let Some(driver) = FakeDriver::install() else {
        return;
    };
    for (maps_pages, preallocate) in [(1, true), (1, false), (0, true), (0, false)] {
        driver.set("maps_pages", maps_pages);
        let before = driver.get("live_bytes");
        let ranges = driver.get("live_ranges");
        let mut device = Device::open(0, limits(preallocate)).expect("it is there");
        assert_eq!(driver.get("live_bytes"), before, "nothing is taken at load");
        let a = device.reserve(1000).expect("there is room");
        let taken = (driver.get("live_bytes") - before) as u64;
        let limit = (64 << 20) / 4 * 3;
        let expected = match (maps_pages, preallocate) {
            (_, true) => limit,
            (0, false) => 1024,
            _ => 2 << 20,
        };
        assert_eq!(
            (taken, device.usage().limit),
            (expected, limit),
            "{maps_pages} {preallocate}"
        );
        assert_eq!(device.usage().reserved, taken);
        let b = device.reserve(5 << 20).expect("there is room");
        device.write(&a, &[7; 1000]).expect("it is written");
        device.fill(&b, 3).expect("it is filled");
        device
            .copy(&a.part(0, 500), &b.part(1 << 20, 500))
            .expect("it is copied");
        let mut bytes = vec![0; 502];
        device
            .read(&b.part((1 << 20) - 1, 502), &mut bytes)
            .expect("it is read");
        assert_eq!((bytes[0], bytes[1], bytes[500], bytes[501]), (3, 7, 7, 3));
        device.release(b.arena);
        let c = device
            .reserve(5 << 20)
            .expect("freed memory is available again");
        assert_eq!(device.usage().used, 1024 + (5 << 20));
        let mut bytes = vec![1; 5 << 20];
        device.read(&c, &mut bytes).expect("it is read");
        assert!(bytes.iter().all(|b| *b == 0), "arenas are zeros");
        let refused = device
            .reserve(limit)
            .expect_err("more than the limit leaves");
        assert_eq!(refused, DriverError::OutOfMemory { bytes: limit });
        drop(device);
        assert_eq!(driver.get("live_bytes"), before, "everything is given back");
        assert_eq!(driver.get("live_ranges"), ranges, "addresses too");
    }
    assert_eq!(driver.get("live_pinned"), 0);
}

/// Other processes may hold memory within the limit.
#[test]
fn memory_that_cannot_be_preallocated_is_taken_as_it_is_needed() {
    let Some(driver) = FakeDriver::install() else {
        return;
    };
    for (maps_pages, call, taken) in [(1, "cuMemCreate", 2 << 20), (0, "cuMemAlloc_v2", 1024)] {
        driver.set("maps_pages", maps_pages);
        driver.fail(call, 0, OUT_OF_MEMORY);
        let before = driver.get("live_bytes");
        let mut device = Device::open(0, limits(true)).expect("it is there");
        let a = device.reserve(1000).expect("there is room");
        assert_eq!(driver.get("live_bytes") - before, taken, "{call}");
        assert_eq!(device.usage().reserved, taken as u64, "{call}");
        device.fill(&a, 1).expect("it is filled");
        device.synchronize().expect("it is memory");
        drop(device);
        assert_eq!(driver.get("live_bytes"), before, "{call}");
    }
}

#[test]
fn failed_driver_calls_leave_the_device_unchanged() {
    let Some(driver) = FakeDriver::install() else {
        return;
    };
    for (maps_pages, call) in [
        (1, "cuMemCreate"),
        (1, "cuMemMap"),
        (1, "cuMemSetAccess"),
        (0, "cuMemAlloc_v2"),
    ] {
        driver.set("maps_pages", maps_pages);
        let before = driver.get("live_bytes");
        let mut device = Device::open(0, limits(false)).expect("it is there");
        let first = device.reserve(3 << 20).expect("there is room");
        driver.fail(call, 0, OUT_OF_MEMORY);
        let error = device.reserve(3 << 20).expect_err("it was told to fail");
        assert!(
            matches!(error, DriverError::OutOfMemory { .. }),
            "{call}: {error}"
        );
        let second = device.reserve(3 << 20).expect("it fails once");
        device.fill(&first, 1).expect("it is filled");
        device.fill(&second, 2).expect("it is filled");
        device.synchronize().expect("both are memory");
        drop(device);
        assert_eq!(driver.get("live_bytes"), before, "{call}");
    }
}

#[test]
fn a_graph_is_recorded_once_and_replayed_without_allocations() {
    let Some(driver) = FakeDriver::install() else {
        return;
    };
    let mut device = Device::open(0, limits(false)).expect("it is there");
    let (x, y) = (
        device.reserve(256).expect("room"),
        device.reserve(256).expect("room"),
    );
    let kernel = add();
    let program = device
        .load(&[&kernel, &kernel])
        .expect("the kernels are fine");
    let usage = program
        .usage(&kernel.functions[0].name)
        .expect("it was compiled");
    assert!(usage.registers > 0 && usage.spill_bytes == 0);
    device.prepare_staging(256).expect("there is room");
    let captures = driver.get("captures");
    let env = Env([5, 0, 0, 0, 0, 0, 0, 0]);
    let empty = x.part(0, 0);
    for turn in 0..6u32 {
        let allocations = driver.get("allocations");
        device.begin_staging().expect("it begins");
        let mut write = |bytes: &mut [u8]| {
            bytes
                .chunks_exact_mut(4)
                .for_each(|c| c.copy_from_slice(&(turn as f32).to_ne_bytes()))
        };
        device.stage(&x, &mut write).expect("it is staged");
        device.end_staging().expect("it ends");
        if !device.replay(&program, &[5]).expect("the device is fine") {
            assert_eq!(turn, 0);
            let arguments = [[x, y], [y, y]];
            let launches = (0..2)
                .map(|step| Launch {
                    step,
                    kernel: &kernel,
                    arguments: &arguments[step],
                    workspace: empty,
                })
                .map(Work::Launch);
            let run = Run {
                key: &[5],
                env: &env,
                checked: true,
                after: None,
                early: false,
            };
            device
                .record(&program, &run, launches)
                .expect("it is recorded");
            assert!(device.replay(&program, &[5]).expect("the device is fine"));
        } else {
            assert_eq!(driver.get("allocations"), allocations, "turn {turn}");
        }
        // Several runs are in flight before the host waits.
        if turn % 3 == 2 {
            assert_eq!(floats(&device, &y), vec![turn as f32 + 10.0; 64]);
        }
    }
    assert_eq!(driver.get("captures"), captures + 1);
    assert_eq!(device.fault(), None);
}

/// A kernel that copies 64 floats through its static shared memory; its launches add so many bytes
/// of dynamic shared memory.
fn through_shared(bytes: u32) -> Lowered {
    let text = "extern \"C\" __global__ void __launch_bounds__(64) NAME(const __grid_constant__ Words<2> p) {\n    \
                __shared__ float own[1024];\n    SHARED_BYTES(float, given);\n    \
                own[1023 - threadIdx.x] = given[threadIdx.x] = ((const float*)p.w[0])[threadIdx.x];\n    __syncthreads();\n    \
                const int other = 63 - threadIdx.x;\n    ((float*)p.w[1])[threadIdx.x] = own[1023 - other] + given[other];\n}\n";
    Lowered::new(
        vec![Function::new("through_shared", text)],
        0,
        move |_: &Env| {
            let words = vec![Word::Argument(0), Word::Argument(1)];
            vec![Dispatch {
                function: 0,
                grid: [1, 1, 1],
                block: [64, 1, 1],
                shared_bytes: bytes,
                words,
            }]
        },
    )
}

#[test]
fn a_launch_may_use_all_remaining_shared_memory() {
    let Some(driver) = FakeDriver::install() else {
        return;
    };
    for (capability, shared_bytes) in [(80, 163 << 10), (89, 99 << 10), (90, 227 << 10)] {
        driver.set("capability", capability);
        driver.set("shared_bytes", i64::from(shared_bytes));
        let mut device = Device::open(0, limits(false)).expect("it is there");
        let (x, y) = (
            device.reserve(256).expect("room"),
            device.reserve(256).expect("room"),
        );
        let values: Vec<u8> = (0..64).flat_map(|i| (i as f32).to_ne_bytes()).collect();
        device.write(&x, &values).expect("it is written");
        let left = shared_bytes - 4096;
        for (bytes, fits) in [(256, true), (left, true), (left + 1, false)] {
            let kernel = through_shared(bytes);
            let program = device
                .load(&[&kernel])
                .unwrap_or_else(|e| panic!("sm_{capability}: {e}"));
            assert_eq!(
                program
                    .usage(&kernel.functions[0].name)
                    .map(|u| u.shared_bytes),
                Some(4096)
            );
            let launch = Launch {
                step: 0,
                kernel: &kernel,
                arguments: &[x, y],
                workspace: x.part(0, 0),
            };
            let launched = device.launch(&program, &Env::default(), &launch);
            assert_eq!(
                launched.is_ok(),
                fits,
                "sm_{capability}, {bytes} bytes: {launched:?}"
            );
            let expected: Vec<f32> = (0..64).map(|i| 2.0 * (63 - i) as f32).collect();
            assert!(
                !fits || floats(&device, &y) == expected,
                "sm_{capability}, {bytes} bytes"
            );
        }
    }
}

#[test]
fn a_program_may_be_dropped_while_it_runs_and_by_any_thread() {
    let Some(driver) = FakeDriver::install() else {
        return;
    };
    let modules = driver.get("live_modules");
    for elsewhere in [false, true] {
        let mut device = Device::open(0, limits(false)).expect("it is there");
        let (x, y) = (
            device.reserve(256).expect("room"),
            device.reserve(256).expect("room"),
        );
        let kernel = add();
        let program = device.load(&[&kernel]).expect("the kernel is fine");
        let launch = Launch {
            step: 0,
            kernel: &kernel,
            arguments: &[x, y],
            workspace: x.part(0, 0),
        };
        device
            .launch(&program, &Env([5, 0, 0, 0, 0, 0, 0, 0]), &launch)
            .expect("it is launched");
        assert_eq!(driver.get("live_modules"), modules + 1);
        match elsewhere {
            true => std::thread::spawn(move || drop(program))
                .join()
                .expect("no panic"),
            false => drop(program),
        }
        assert_eq!(
            driver.get("live_modules"),
            modules,
            "dropped by another thread: {elsewhere}"
        );
        assert_eq!(floats(&device, &y), [5.0; 64]);
    }
}

/// Where the driver knows no clocks, they are those of the architecture.
#[test]
fn a_device_without_reported_clocks_is_usable() {
    let Some(driver) = FakeDriver::install() else {
        return;
    };
    let reported = properties(0).expect("there is a device").description;
    driver.set("clocks", 0);
    let about = properties(0).expect("there is a device").description;
    let known = Description::nearest(90);
    assert_eq!(
        (reported.clock_mhz, about.clock_mhz),
        (1000.0, known.clock_mhz)
    );
    assert!(about.bandwidth.memory > 0.0, "{about:?}");
    Device::open(0, limits(false)).expect("it is usable");
}

#[test]
fn capture_allows_concurrent_library_calls() {
    let Some(driver) = FakeDriver::install() else {
        return;
    };
    let mut device = Device::open(0, limits(false)).expect("it is there");
    let (x, y) = (
        device.reserve(256).expect("room"),
        device.reserve(256).expect("room"),
    );
    let kernel = add();
    let program = device.load(&[&kernel]).expect("the kernel is fine");
    let (env, arguments) = (Env([5, 0, 0, 0, 0, 0, 0, 0]), [x, y]);
    for (key, strict) in [(1, 0), (2, 1), (3, 0)] {
        driver.set("strict", strict);
        let work = [Launch {
            step: 0,
            kernel: &kernel,
            arguments: &arguments,
            workspace: x.part(0, 0),
        }]
        .into_iter()
        .map(|launch| {
            // It pins memory, which the driver refuses in the stricter modes, and which then
            // invalidates the capture.
            let opened = Device::open(0, limits(false)).map(|_| ());
            assert_eq!(opened.is_ok(), strict == 0, "{opened:?}");
            Work::Launch(launch)
        });
        let run = Run {
            key: &[key],
            env: &env,
            checked: false,
            after: None,
            early: false,
        };
        let recorded = device.record(&program, &run, work);
        assert_eq!(recorded.is_ok(), strict == 0, "{recorded:?}");
        assert_eq!(device.replay(&program, &[key]), Ok(strict == 0));
        assert_eq!(
            floats(&device, &y),
            [if key == 1 || key == 3 { 5.0 } else { 0.0 }; 64]
        );
        device.fill(&y, 0).expect("it is filled");
    }
}

#[test]
fn a_newer_device_runs_ptx_and_an_old_one_is_refused() {
    let Some(driver) = FakeDriver::install() else {
        return;
    };
    driver.set("capability", 990);
    driver.set("shared_bytes", 227 << 10);
    let mut device = Device::open(0, limits(false)).expect("its driver compiles PTX");
    let (x, y) = (
        device.reserve(256).expect("room"),
        device.reserve(256).expect("room"),
    );
    let values: Vec<u8> = (0..64).flat_map(|i| (i as f32).to_ne_bytes()).collect();
    device.write(&x, &values).expect("it is written");
    let left = (227 << 10) - 4096;
    for (bytes, fits) in [(left, true), (left + 1, false)] {
        let kernel = through_shared(bytes);
        let program = device
            .load(&[&kernel])
            .expect("it is PTX for a device before this one");
        let launch = Launch {
            step: 0,
            kernel: &kernel,
            arguments: &[x, y],
            workspace: x.part(0, 0),
        };
        let launched = device.launch(&program, &Env::default(), &launch);
        assert_eq!(launched.is_ok(), fits, "{bytes} bytes: {launched:?}");
    }
    let expected: Vec<f32> = (0..64).map(|i| 2.0 * (63 - i) as f32).collect();
    assert_eq!(floats(&device, &y), expected);
    drop(device);
    driver.set("capability", 70);
    let error = Device::open(0, limits(false))
        .map(|_| ())
        .expect_err("there is no such code")
        .to_string();
    for part in [
        "makes no code for sm_70",
        "sm_90",
        "a device of sm_80 or newer",
    ] {
        assert!(error.contains(part), "{part:?} is not in: {error}");
    }
}

#[test]
fn programs_share_the_code_of_their_functions() {
    let Some(_driver) = FakeDriver::install() else {
        return;
    };
    let device = Device::open(0, limits(false)).expect("it is there");
    // No other test has these.
    let of = |number: usize| {
        let text = format!(
            "extern \"C\" __global__ void NAME(const __grid_constant__ Words<1> p) {{\n    *(int*)p.w[0] = {number};\n}}\n"
        );
        Lowered::new(
            vec![Function::new("shared_by_programs", &text)],
            0,
            |_: &Env| vec![],
        )
    };
    let kernels: Vec<Lowered> = (1..=3).map(of).collect();
    let loaded = |steps: &[&Lowered]| {
        let before = made();
        let program = device.load(steps).expect("the kernels are fine");
        (program, made() - before)
    };
    // Compiled, or read if an earlier run of the test left them there.
    let made_first = loaded(&[&kernels[0], &kernels[1], &kernels[0]]);
    assert_eq!(made_first.1, 2, "two functions");
    assert!(program_uses(&made_first.0, &kernels[..2]));
    drop(made_first);
    let second = loaded(&[&kernels[1], &kernels[2], &kernels[0]]);
    assert_eq!(second.1, 1, "one is new");
    assert!(program_uses(&second.0, &kernels));
    assert_eq!(loaded(&[&kernels[2]]).1, 0);
}

/// How many functions the process has compiled or read.
fn made() -> usize {
    Compiler::of_process().compiled() + Compiler::of_process().read()
}

fn program_uses(program: &slabwise_cuda::Program, kernels: &[Lowered]) -> bool {
    kernels.iter().all(|kernel| {
        program
            .usage(&kernel.functions[0].name)
            .is_some_and(|usage| usage.registers > 0)
    })
}

#[test]
fn the_source_of_a_failed_compilation_is_saved() {
    let Some(_driver) = FakeDriver::install() else {
        return;
    };
    let device = Device::open(0, limits(false)).expect("it is there");
    let text = "extern \"C\" __global__ void NAME(const __grid_constant__ Words<1> p) {\n    undeclared = 1;\n}\n";
    let kernel = Lowered::new(vec![Function::new("broken", text)], 0, |_: &Env| vec![]);
    let error = device
        .load(&[&kernel])
        .map(|_| ())
        .expect_err("it uses an undefined name");
    let LoadError::Compile(nvrtc::Error::Refused {
        source_file: Some(file),
        log,
        ..
    }) = &error
    else {
        panic!("{error}")
    };
    let message = error.to_string();
    assert!(
        message.contains(&format!(
            "the generated kernel {} for sm_90",
            kernel.functions[0].name
        )),
        "{message}"
    );
    assert!(
        log.contains("undeclared")
            && message.contains(log)
            && message.contains(&file.display().to_string()),
        "{message}"
    );
    // The line that the log names is the one that the file shows under its number.
    let numbered = |line: &&str| line.contains("undeclared = 1");
    let saved = std::fs::read_to_string(file).expect("the saved source");
    let number = saved
        .lines()
        .find(numbered)
        .and_then(|line| line.split_whitespace().next())
        .expect("it is numbered");
    assert!(
        log.contains(&format!("({number})")),
        "line {number} is not in: {log}"
    );
    std::fs::remove_file(file).expect("it was there");
}

#[test]
fn a_lost_device_returns_its_error_for_every_call_of_the_process() {
    let Some(driver) = FakeDriver::install() else {
        return;
    };
    for code in [
        ILLEGAL_ADDRESS,
        NVLINK_UNCORRECTABLE,
        CONTAINED,
        TENSOR_MEMORY_LEAK,
        MPS_CLIENT_TERMINATED,
    ] {
        let mut device = Device::open(0, limits(false)).expect("it is there");
        let other = Device::open(0, limits(false)).expect("it is there");
        let x = device.reserve(256).expect("room");
        driver.fail("cuStreamSynchronize", 0, code);
        let error = device.synchronize().expect_err("it was told to fail");
        let DriverError::Lost(why) = &error else {
            panic!("{code}: {error}")
        };
        assert!(why.starts_with("cuStreamSynchronize answered"), "{error}");
        assert!(
            code != ILLEGAL_ADDRESS || why.contains("CUDA_ERROR_ILLEGAL_ADDRESS"),
            "{error}"
        );
        assert!(
            error.to_string().ends_with("start a new process"),
            "{error}"
        );
        assert_eq!(device.fill(&x, 0), Err(error.clone()));
        assert_eq!(device.reserve(1).map(|_| ()), Err(error.clone()));
        assert_eq!(other.synchronize(), Err(error.clone()));
        drop((device, other));
        // The last session has released the context.
        let opened = Device::open(0, limits(false)).map(|_| ());
        assert_eq!(opened, Err(error));
        driver.restart();
    }
    assert_eq!(
        (driver.get("live_bytes"), driver.get("live_pinned")),
        (0, 0)
    );
    Device::open(0, limits(false)).expect("another process can use it");
}

/// A newer driver may return errors that are not known yet.
#[test]
fn an_unknown_error_is_reported_by_its_number() {
    let Some(driver) = FakeDriver::install() else {
        return;
    };
    let device = Device::open(0, limits(false)).expect("it is there");
    driver.fail("cuStreamSynchronize", 0, 12_345);
    let error = device.synchronize().expect_err("it was told to fail");
    assert_eq!(error.to_string(), "cuStreamSynchronize failed: error 12345");
    assert_eq!(device.synchronize(), Ok(()));
}

#[test]
fn old_drivers_and_missing_devices_are_refused() {
    let Some(driver) = FakeDriver::install() else {
        return;
    };
    let error = Device::open(1, limits(true))
        .map(|_| ())
        .expect_err("there is one");
    assert_eq!(error, DriverError::NoDevice { count: 1 });
    assert_eq!(error.to_string(), "there is one CUDA device, cuda:0");
    driver.set("devices", 0);
    let error = Device::open(0, limits(true))
        .map(|_| ())
        .expect_err("there is none");
    assert_eq!(error.to_string(), "there is no CUDA device");
    driver.set("devices", 1);
    for (version, found) in [(12080, (12, 8)), (11040, (11, 4))] {
        driver.set("version", version);
        let error = Device::open(0, limits(true))
            .map(|_| ())
            .expect_err("it is too old");
        assert_eq!(error, DriverError::TooOld { found, needed: 13 });
    }
}

#[test]
fn large_inputs_are_staged_early_and_arrive_in_order() {
    let Some(driver) = FakeDriver::install() else {
        return;
    };
    // Even if the driver does everything as late as allowed, each run sees its own inputs, with and
    // without a staging buffer.
    for (total, ahead) in [(64 << 20, true), (2 << 20, false)] {
        driver.set("total", total);
        driver.set("maps_pages", 0);
        let mut device = Device::open(0, limits(false)).expect("it is there");
        let bytes = 5 << 18;
        let (x, y) = (
            device.reserve(bytes).expect("room"),
            device.reserve(256).expect("room"),
        );
        let before = device.usage().used;
        device.prepare_staging(bytes as usize).expect("it is ready");
        assert_eq!(
            device
                .set_staging(staging_bytes(bytes))
                .expect("the driver is fine"),
            ahead
        );
        assert_eq!(
            device.usage().used - before,
            if ahead { staging_bytes(bytes) } else { 0 }
        );
        let mut seen = device.reserve(8 * 16).expect("room");
        seen.bytes = 8;
        for turn in 0..16u8 {
            let made = driver.get("allocations");
            device.begin_staging().expect("it begins");
            device
                .stage(&x, &mut |bytes| bytes.fill(turn + 1))
                .expect("it is staged");
            device.end_staging().expect("it ends");
            // Takes the place of the run: it reads the last bytes of its input.
            device
                .copy(&x.part(bytes - 8, 8), &y.part(0, 8))
                .expect("it is copied");
            device
                .copy(
                    &y.part(0, 8),
                    &slabwise_kernels::memory::Region {
                        offset: 8 * u64::from(turn),
                        ..seen
                    },
                )
                .expect("it is copied");
            assert_eq!(driver.get("allocations"), made);
        }
        for turn in 0..16u8 {
            let mut read = [0; 8];
            device
                .read(
                    &slabwise_kernels::memory::Region {
                        offset: 8 * u64::from(turn),
                        ..seen
                    },
                    &mut read,
                )
                .expect("it is read");
            assert_eq!(read, [turn + 1; 8], "run {turn}");
        }
    }
}
