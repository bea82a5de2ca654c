//! Reports about a device: profiles, written kernels and the command line.

use super::*;

/// Profiles use the device's clock, not the host's, and report each kernel's share of the device's
/// rates.
#[test]
fn profiles_are_by_the_clock_of_the_device() {
    let Some(driver) = FakeDriver::install() else {
        return;
    };
    driver.cost("", 3_000);
    driver.cost("gemm_", 40_000);
    let trace = Trace::inference();
    let (a, b) = (
        trace.input("a", F32, (32, 48)),
        trace.input("b", F32, (48, 16)),
    );
    let (y, z) = (a.matmul(b), a.sum());
    let mut session = session(Device::Cuda(0), Params::seeded(0));
    let program = session.compile(&trace, [y, z]).expect("it compiles");
    let (a, b) = (
        ArrayD::<f32>::ones(vec![32, 48]),
        ArrayD::<f32>::ones(vec![48, 16]),
    );
    let waits = driver.get("calls");
    let profile = session
        .profile(&program, (&a, &b), 3)
        .expect("it runs")
        .kernels;
    let calls = driver.get("calls") - waits;
    let product = profile
        .iter()
        .find(|kernel| kernel.name.contains("matmul"))
        .expect("a product");
    let sum = profile
        .iter()
        .find(|kernel| kernel.name.contains("sum"))
        .expect("a sum");
    let is = |seconds: f64, nanoseconds: f64| (seconds * 1e9 - nanoseconds).abs() < 1.0;
    assert!(is(product.seconds, 40_000.0), "{product:?}");
    assert!(
        is(sum.seconds, 3_000.0) || is(sum.seconds, 6_000.0),
        "{sum:?}"
    );
    assert_eq!(
        (product.flops, product.bytes),
        (2 * 32 * 48 * 16, 4 * (32 * 48 + 48 * 16 + 32 * 16))
    );
    // The device has 4 multiprocessors of 128 lanes at 1 GHz, and 1024 bits of memory at 1 GHz,
    // twice in a cycle.
    let (computing, moving) = (
        product.flops as f64 / (4.0 * 256e9),
        product.bytes as f64 / 256e9,
    );
    assert!(
        (product.least_seconds.expect("it is known") - computing.max(moving)).abs() < 1e-15,
        "{product:?}"
    );
    let roofline = session.roofline().expect("the driver says its clocks");
    assert!(
        roofline
            .source
            .starts_with("by the device's attributes: 4 multiprocessors at 1.00 GHz, "),
        "{roofline:?}"
    );
    // A recorded run has the same clock: steps follow each other and overlap nowhere.
    let run = session.record(&program, (&a, &b)).expect("it runs");
    let took: Vec<u64> = run.steps.iter().map(|step| step.ns).collect();
    assert!(took.iter().any(|&ns| ns.abs_diff(40_000) <= 1), "{took:?}");
    assert!(
        run.steps
            .windows(2)
            .all(|pair| pair[0].start_ns + pair[0].ns <= pair[1].start_ns + 1),
        "{:?}",
        run.steps
    );
    // There is no synchronization per step.
    assert!(calls < 200, "{calls} calls");
}

#[test]
fn kernels_are_written_to_the_folder_of_a_variable() {
    let Some(_driver) = FakeDriver::install() else {
        return;
    };
    let (driver, functions) = slabwise_cuda::fake::build().expect("it was built before");
    let folder = tempfile::tempdir().expect("a folder");
    let plan = |dump: &std::path::Path| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_slabwise-cuda-tests"));
        command.args(
            "plan mlp:inputs=64,hidden1=48,hidden2=32 --batch 4 --device cuda:0 --kernels"
                .split(' '),
        );
        command
            .env("SLABWISE_LIBCUDA", &driver)
            .env("SLABWISE_EMULATED", &functions)
            .env("SLABWISE_PREALLOCATE", "0");
        command
            .env("SLABWISE_AUTOTUNE", "0")
            .env("SLABWISE_DUMP_CUDA", dump)
            .output()
            .expect("it starts")
    };
    let output = plan(folder.path());
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let own = folder.path().join("000-train");
    let text = std::fs::read_to_string(own.join("steps.json")).expect("it was written");
    let report: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    let steps = report["steps"].as_array().expect("steps");
    let product = steps
        .iter()
        .find(|step| {
            step["name"]
                .as_str()
                .is_some_and(|name| name.contains("matmul"))
        })
        .expect("a product");
    let flops = product["flops"].as_u64().expect("a number");
    assert!(
        flops >= 2 * 4 * 64 * 48
            && product["bytes"].as_u64().expect("a number") >= 4 * (4 * 64 + 64 * 48),
        "{product}"
    );
    let mut launched = 0;
    let together = report["together"].as_array().expect("groups");
    for launch in steps
        .iter()
        .chain(together)
        .flat_map(|step| step["launches"].as_array().expect("a list"))
    {
        let name = launch["function"].as_str().expect("a name");
        let source = std::fs::read_to_string(own.join(format!("{name}.cu"))).expect("its source");
        assert!(
            source.starts_with("#include \"prelude.cuh\"") && source.contains(name),
            "{name}"
        );
        assert!(
            std::fs::read(own.join(format!("{name}.cubin")))
                .expect("its code")
                .starts_with(b"\x7fELF"),
            "{name}"
        );
        assert!(
            launch["registers"]
                .as_u64()
                .is_some_and(|n| (1..=255).contains(&n)),
            "{launch}"
        );
        assert!(
            ["grid", "block"]
                .iter()
                .all(|of| launch[of].as_array().is_some_and(|list| list.len() == 3)),
            "{launch}"
        );
        assert!(
            ["spill_bytes", "static_shared_bytes", "dynamic_shared_bytes"]
                .iter()
                .all(|of| launch[of].is_u64()),
            "{launch}"
        );
        launched += 1;
    }
    assert!(launched >= steps.len() && own.join("prelude.cuh").exists());
    // The path of the folder is a file.
    let output = plan(&own.join("steps.json"));
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        !output.status.success() && told.contains("steps.json"),
        "{told}"
    );
}

#[test]
fn the_command_line_runs_on_a_device() {
    let Some(_driver) = FakeDriver::install() else {
        return;
    };
    let (driver, functions) = slabwise_cuda::fake::build().expect("it was built before");
    let said = |words: &str| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_slabwise-cuda-tests"));
        command
            .args(words.split(' '))
            .env("SLABWISE_LIBCUDA", &driver)
            .env("SLABWISE_EMULATED", &functions);
        let output = command
            .env("SLABWISE_PREALLOCATE", "0")
            .output()
            .expect("it starts");
        let [text, errors] = [&output.stdout, &output.stderr]
            .map(|bytes| String::from_utf8_lossy(bytes).into_owned());
        assert!(output.status.success(), "{words}: {errors}");
        text
    };
    let info = said("info");
    for part in [
        "cuda:0",
        "no device (emulated), sm_90",
        "libcuda-",
        "named by a variable",
    ] {
        assert!(info.contains(part), "{part:?} is not in: {info}");
    }
    let bench: serde_json::Value = serde_json::from_str(&said(
        "bench mlp --batch 4 --steps 2 --device cuda:0 --json",
    ))
    .expect("JSON");
    assert_eq!(
        (bench["device"].as_str(), &bench["peak_measured_bytes"]),
        (Some("cuda:0"), &bench["slab_bytes"])
    );
    let kernels = said("plan mlp --batch 4 --device cuda:0 --kernels");
    assert!(
        kernels.contains(" registers, 0 bytes spilled, "),
        "{kernels}"
    );
}
