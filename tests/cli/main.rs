//! The command line as scripts see it: keys, numbers, exit codes.
#![cfg(feature = "cli")]

mod pack;

use std::collections::BTreeSet;
use std::process::{Command, Output};

use serde_json::Value;
use slabwise::memory::MemoryConfig;

/// Runs a command as on a machine without a GPU.
fn slabwise(args: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_slabwise"));
    command
        .args(args.split_whitespace())
        .env("SLABWISE_LIBCUDA", "no driver")
        .output()
        .unwrap()
}

/// What a command that succeeds prints.
fn text(args: &str) -> String {
    let output = slabwise(args);
    assert_eq!(
        output.status.code(),
        Some(0),
        "{args}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).unwrap()
}

fn json(args: &str) -> Value {
    serde_json::from_str(&text(&format!("{args} --json"))).unwrap()
}

/// What a command that fails with this code writes to stderr; nothing goes to stdout.
fn failure(args: &str, code: i32) -> String {
    let output = slabwise(args);
    assert_eq!(output.status.code(), Some(code), "{args}");
    assert!(output.stdout.is_empty(), "{args}");
    String::from_utf8(output.stderr).unwrap()
}

fn keys(value: &Value) -> BTreeSet<&str> {
    value
        .as_object()
        .unwrap()
        .keys()
        .map(String::as_str)
        .collect()
}

fn assert_keys(value: &Value, expected: &str) {
    assert_eq!(keys(value), expected.split_whitespace().collect());
    for (key, value) in value
        .as_object()
        .unwrap()
        .iter()
        .filter(|(key, _)| key.ends_with("_bytes"))
    {
        assert!(value.is_u64(), "{key}: {value}");
    }
}

const PLAN: &str = "model batch slab_bytes lower_bound_bytes without_reuse_bytes persistent_bytes prologues kernels compile_s peak buffers host_bytes";
const COMPARE: &str = "no_reuse_bytes dynamic_bytes planned_without_inplace_bytes planned_bytes measured_bytes lower_bound_bytes \
                       policies step_ms_dynamic step_ms_planned";
const POLICIES: &str = "tlsf bfc naive round unpooled platform async vmm";
const BENCH: &str = "model batch optimizer device dtype tf32 threads steps step_ms_median step_ms_min compile_s first_step_s params_bytes \
                     state_bytes slab_bytes lower_bound_bytes peak_measured_bytes rss_peak_bytes host_bytes";

#[test]
fn plan_tells_what_a_step_needs() {
    let plan = json("plan mlp --batch 32");
    assert_keys(&plan, PLAN);
    assert_eq!(
        (plan["model"].as_str(), plan["batch"].as_u64()),
        (Some("mlp"), Some(32))
    );
    // Weights and one momentum for each: 2 · 535,818 numbers of 4 bytes.
    assert_eq!(plan["persistent_bytes"].as_u64(), Some(2 * 535_818 * 4));
    let named = json("plan mlp --batch 32 --kernels");
    assert_eq!(
        named["kernel_names"].as_array().unwrap().len() as u64,
        named["kernels"].as_u64().unwrap()
    );
    // Adam: two moments and a counter of steps.
    assert_eq!(
        json("plan mlp --optimizer adam")["persistent_bytes"].as_u64(),
        Some(3 * 535_818 * 4 + 4)
    );
    // A batch whose tensors are never touched is planned as quickly.
    assert!(
        json("plan cnn --batch 4096")["slab_bytes"].as_u64()
            > json("plan cnn")["slab_bytes"].as_u64()
    );
    assert!(text("plan mlp --kernels").contains("lower bound"));
}

#[test]
fn plan_draws_a_picture() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("plan.svg");
    text(&format!("plan mlp --svg {}", path.display()));
    let svg = std::fs::read_to_string(&path).unwrap();
    assert!(
        svg.starts_with("<svg") && svg.contains("hidden1"),
        "{}",
        &svg[..svg.len().min(200)]
    );
    let nowhere = failure(
        &format!("plan mlp --svg {}/none/plan.svg", folder.path().display()),
        1,
    );
    assert!(
        nowhere.starts_with("error: ") && nowhere.contains("plan.svg"),
        "{nowhere}"
    );
}

#[test]
fn plan_writes_a_page_and_what_a_step_was_seen_to_use() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    let [html, alone, pickle, snapshot, trace, profile] = [
        "plan.html",
        "alone.html",
        "a.pickle",
        "a.json",
        "trace.json",
        "a.pb.gz",
    ]
    .map(path);
    let plan = json(&format!(
        "plan mlp --batch 8 --html {html} --snapshot {snapshot} --perfetto {trace} --pprof {profile}"
    ));
    text(&format!("plan mlp --batch 8 --html {alone} --no-run"));
    let [page, alone] = [html, alone].map(|file| std::fs::read_to_string(file).unwrap());
    let measured = format!("\"run\":{{\"peak\":{}", plan["slab_bytes"]);
    assert!(
        page.contains(&measured)
            && !alone.contains("\"run\":{\"peak\"")
            && alone.contains("it was asked not to be")
    );
    // The step as an allocation trace: as many bytes at once as were planned.
    let replay = json(&format!("replay {snapshot} --policy tlsf"));
    assert_eq!(replay["peak_live_bytes"], plan["peak"]["bytes"]);
    text(&format!("plan mlp --batch 8 --snapshot {pickle}"));
    assert_eq!(
        json(&format!("replay {pickle} --policy tlsf"))["peak_live_bytes"],
        plan["peak"]["bytes"]
    );
    let events: Value = serde_json::from_slice(&std::fs::read(trace).unwrap()).unwrap();
    let kernels = events["traceEvents"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|e| e["ph"] == "X")
        .count();
    assert_eq!(kernels as u64, plan["kernels"].as_u64().unwrap());
    assert!(std::fs::read(profile).unwrap().starts_with(&[0x1f, 0x8b]));
    for wrong in [
        "plan mlp --no-run",
        "plan mlp --html a --frontier",
        "plan mlp --html a --no-run --pprof b",
    ] {
        failure(wrong, 2);
    }
}

#[test]
fn diff_tells_what_made_a_plan_grow() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    let [a, b, cut, nowhere] = ["a.json", "b.json", "cut.json", "none.json"].map(path);
    let (small, large) = (
        text("plan cnn --batch 4 --json"),
        text("plan cnn --batch 8 --json"),
    );
    [
        (&a, &small[..]),
        (&b, &large[..]),
        (&cut, &small[..small.len() / 2]),
    ]
    .iter()
    .for_each(|(file, t)| std::fs::write(file, t).unwrap());
    let [small, large]: [Value; 2] = [small, large].map(|t| serde_json::from_str(&t).unwrap());
    // The plan's own file: buffers within the slab, those at the peak add up to it.
    let rows = small["buffers"].as_array().unwrap();
    let number = |row: &Value, key: &str| row[key].as_u64().unwrap();
    assert!(
        rows.iter()
            .all(|r| number(r, "offset") + number(r, "occupied_bytes")
                <= number(&small, "slab_bytes"))
    );
    let at_peak = rows.iter().filter(|r| r["at_peak"] == true);
    assert_eq!(
        at_peak.map(|r| number(r, "occupied_bytes")).sum::<u64>(),
        number(&small["peak"], "bytes")
    );
    assert!(
        rows.iter()
            .any(|r| r["layer"] == "stem" && r["source"].as_str().unwrap().contains(".rs:"))
    );

    let diff = json(&format!("diff {a} {b}"));
    let change = |key: &str| diff[key].as_i64().unwrap();
    let peaks = [&small, &large].map(|plan| plan["peak"]["bytes"].as_i64().unwrap());
    assert_eq!(change("peak_change_bytes"), peaks[1] - peaks[0]);
    assert_eq!(
        diff["causes"]
            .as_object()
            .unwrap()
            .values()
            .map(|v| v.as_i64().unwrap())
            .sum::<i64>(),
        peaks[1] - peaks[0]
    );
    assert!(
        diff["resized"]
            .as_array()
            .unwrap()
            .iter()
            .any(|pair| pair["b"]["name"] == "images" && pair["a"]["bytes"] == 4 * 784 * 4)
    );
    let told = text(&format!("diff {a} {b}"));
    assert!(
        ["slab", "at the peaks, by layer", "stem.relu", "other sizes"]
            .iter()
            .all(|part| told.contains(part)),
        "{told}"
    );
    assert!(text(&format!("diff {a} {a}")).contains("no buffer differs"));
    assert!(failure(&format!("diff {a} {cut}"), 2).contains("line 1"));
    assert!(failure(&format!("diff {a} {nowhere}"), 2).contains("none.json"));
    failure(&format!("diff {a}"), 2);
}

#[test]
fn the_frontier_tells_what_smaller_slabs_cost() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("frontier.svg");
    let report = json(&format!(
        "plan mlp --batch 512 --frontier --svg {}",
        path.display()
    ));
    assert_keys(&report, "model batch frontier");
    let points = report["frontier"].as_array().unwrap();
    let slabs: Vec<u64> = points
        .iter()
        .map(|p| p["slab_bytes"].as_u64().unwrap())
        .collect();
    assert!(
        slabs.windows(2).all(|two| two[0] > two[1])
            && points
                .iter()
                .all(|p| p["slab_bytes"].as_u64() <= p["budget_bytes"].as_u64())
    );
    assert_eq!(
        (slabs[0], points[0]["again"].as_u64()),
        (
            json("plan mlp --batch 512")["slab_bytes"].as_u64().unwrap(),
            Some(0)
        )
    );
    let svg = std::fs::read_to_string(&path).unwrap();
    assert!(svg.starts_with("<svg") && svg.matches("<circle").count() == points.len());
    failure("plan mlp --frontier --budget 1MiB", 2);
}

#[test]
fn a_budget_is_kept_or_refused_with_the_bill() {
    let plan = json("plan mlp");
    let needed = plan["persistent_bytes"].as_u64().unwrap() + plan["slab_bytes"].as_u64().unwrap();
    assert_eq!(
        json("plan mlp --budget 64MiB")["slab_bytes"],
        plan["slab_bytes"]
    );
    assert!(text(&format!("plan mlp --budget {}", needed + 4096)).contains("slab"));
    // With smaller workspaces fewer bytes are enough; weights and state alone are not.
    let tight = json(&format!("plan mlp --budget {}", needed - 1));
    assert!(
        tight["persistent_bytes"].as_u64().unwrap() + tight["slab_bytes"].as_u64().unwrap()
            < needed,
        "{tight}"
    );
    for budget in ["1MiB", "0", &plan["persistent_bytes"].to_string()] {
        let why = failure(&format!("plan mlp --budget {budget}"), 1);
        assert!(
            why.starts_with("error: the budget of ") && why.contains("too small"),
            "{why}"
        );
    }
}

#[test]
fn a_budget_below_one_kernel_is_kept_in_slices() {
    let (all, half) = (
        json("plan cnn --batch 16"),
        json("plan cnn --batch 16 --budget 50%"),
    );
    let slab = |plan: &Value| plan["slab_bytes"].as_u64().unwrap();
    assert!(
        slab(&half) * 100 <= slab(&all) * 51 && half["kernels"].as_u64() > all["kernels"].as_u64()
    );
    assert!(text("plan cnn --batch 16 --budget 50%").contains(" kernels sliced "));
    let report = json("plan cnn --batch 16 --frontier");
    let points = report["frontier"].as_array().unwrap();
    assert_eq!(points[0]["slices"].as_u64(), Some(1));
    assert!(
        points.len() > 3 && points.last().unwrap()["slices"].as_u64() > Some(1),
        "{report}"
    );
}

fn assert_planned(report: &Value) {
    assert_eq!(
        keys(report),
        BTreeSet::from(["model", "batch", "train", "infer"])
    );
    for program in ["train", "infer"] {
        let measured = &report[program];
        assert_keys(measured, COMPARE);
        let bytes = |key: &str| measured[key].as_u64().unwrap();
        assert_eq!(
            bytes("planned_bytes"),
            bytes("lower_bound_bytes"),
            "{program}"
        );
        assert_eq!(bytes("measured_bytes"), bytes("planned_bytes"), "{program}");
        assert!(
            bytes("planned_bytes") <= bytes("dynamic_bytes"),
            "{program}"
        );
        assert!(
            bytes("planned_bytes") <= bytes("planned_without_inplace_bytes"),
            "{program}"
        );
        assert!(
            bytes("dynamic_bytes") < bytes("no_reuse_bytes"),
            "{program}"
        );
        assert_keys(&measured["policies"], POLICIES);
        for (policy, report) in measured["policies"].as_object().unwrap() {
            assert_keys(report, "reserved_bytes in_use_bytes driver_calls defrags");
            let [reserved, in_use] =
                ["reserved_bytes", "in_use_bytes"].map(|key| report[key].as_u64().unwrap());
            assert!(
                bytes("planned_bytes") <= in_use && in_use <= reserved,
                "{policy}"
            );
        }
        assert!(
            ["step_ms_dynamic", "step_ms_planned"]
                .iter()
                .all(|key| measured[key].as_f64().unwrap() > 0.0)
        );
    }
}

#[test]
fn planned_is_the_lower_bound_and_what_is_measured() {
    assert_planned(&json("compare mlp --batch 256 --steps 2"));
    assert_planned(&json("compare cnn --batch 8 --steps 1"));
    assert_planned(&json("compare resnet20 --batch 2 --steps 1"));
    assert_planned(&json(
        "compare gpt:layers=2,width=32,heads=2,length=16,vocabulary=64 --batch 3 --steps 1",
    ));
}

#[test]
fn compare_is_a_table_of_one_model_or_all() {
    assert!(text("compare mlp --batch 2 --steps 1").contains("lower bound"));
    assert!(failure("compare mlp --all", 2).contains("cannot be used with"));
    assert!(failure("compare", 2).contains("required"));
}

#[test]
fn the_speed_of_a_link_is_more_than_none() {
    for link in ["0", "fast", "-1"] {
        let said = failure(&format!("plan mlp --budget 50% --offload={link}"), 2);
        assert!(said.contains("no speed of a link"), "{said}");
    }
}

/// What does not fit waits on the host meanwhile: the plan says what and when, and a run keeps to
/// it.
#[test]
fn a_link_keeps_a_budget_by_sending_values_to_the_host() {
    let small = "plan gpt:layers=4,width=64,length=64 --batch 2";
    let (all, sent) = (
        json(small),
        json(&format!("{small} --budget 85% --offload 100GB/s")),
    );
    let bytes = |plan: &Value, key: &str| plan[key].as_u64().expect("bytes");
    assert!(
        bytes(&sent, "slab_bytes") * 100 <= bytes(&all, "slab_bytes") * 85
            && bytes(&sent, "host_bytes") > 0,
        "{sent}"
    );
    let list = sent["offloaded"].as_array().expect("a list");
    assert!(
        !list.is_empty() && sent["overhead_pct"].as_f64().is_some(),
        "{sent}"
    );
    list.iter()
        .for_each(|one| assert_keys(one, "buffer bytes after before steps copying_s computing_s"));
    assert!(
        list.iter().map(|one| bytes(one, "bytes")).sum::<u64>() >= bytes(&sent, "host_bytes"),
        "{sent}"
    );
    let run = json("bench mlp --batch 512 --budget 80% --offload 100GB/s --steps 2");
    assert!(
        bytes(&run, "host_bytes") > 0 && run["peak_measured_bytes"] == run["slab_bytes"],
        "{run}"
    );
    assert!(text("plan mlp --batch 512 --budget 80% --offload 100GB/s").contains("  host "));
}

#[test]
fn bench_times_steps() {
    let bench = json("bench mlp --batch 8 --optimizer adamw --steps 3 --threads 1");
    assert_keys(&bench, BENCH);
    assert_eq!([&bench["optimizer"], &bench["device"]], ["adamw", "cpu"]);
    assert_eq!(
        [
            &bench["steps"],
            &bench["threads"],
            &bench["batch"],
            &bench["params_bytes"]
        ],
        [3, 1, 8, 535_818 * 4]
    );
    assert_eq!(bench["peak_measured_bytes"], bench["slab_bytes"]);
    assert!(bench["step_ms_min"].as_f64().unwrap() <= bench["step_ms_median"].as_f64().unwrap());
    assert!(
        bench["compile_s"].as_f64().unwrap() > 0.0 && bench["first_step_s"].as_f64().unwrap() > 0.0
    );
    let gemm = json("bench gemm --n 64 --steps 3");
    assert_eq!(gemm["n"], 64);
    assert!(gemm["gflops"].as_f64().unwrap() > 0.0);
    for grad in ["", "--grad"] {
        let chain = json(&format!("bench chain --n 5000 --steps 3 {grad}"));
        assert_eq!(
            (chain["n"].as_u64(), chain["grad"].as_bool()),
            (Some(5000), Some(!grad.is_empty()))
        );
        assert!(chain["step_ms_median"].as_f64().unwrap() > 0.0);
    }
    assert!(text("bench gemm --n 8 --steps 1").contains("gflops"));
}

#[test]
fn bench_compile_times_each_stage() {
    let report = json("bench compile lstm:length=3,hidden=8 --batch 2");
    assert_keys(&report, "all_s batch kernels model nodes stages");
    assert_eq!(report["model"], "lstm:hidden=8,length=3");
    let stages = report["stages"].as_array().unwrap();
    let names: Vec<&str> = stages
        .iter()
        .map(|stage| stage["name"].as_str().unwrap())
        .collect();
    let expected =
        "trace finish simplify remake legalise fuse lower schedule plan check variables link load";
    assert_eq!(names.join(" "), expected);
    let sum: f64 = stages
        .iter()
        .map(|stage| stage["s"].as_f64().unwrap())
        .sum();
    assert!(sum > 0.0 && (sum - report["all_s"].as_f64().unwrap()).abs() < 1e-6);
    let table = text("bench compile mlp:hidden1=16 ode:steps=2 --batch 2 --steps 2");
    assert!(
        table.contains("mlp:hidden1=16 ms") && table.contains("ode:steps=2 ms"),
        "{table}"
    );
    assert!(
        expected
            .split(' ')
            .all(|stage| table.lines().any(|line| line.starts_with(stage))),
        "{table}"
    );
}

/// Every model is listed with its sizes, in a form that can be given.
#[test]
fn help_lists_the_sizes_of_models() {
    let help = text("plan --help");
    for line in [
        "lstm:vocabulary=128,width=128,hidden=256,length=32,layers=1,frozen=false",
        "ode:width=16,hidden=64,steps=20,classes=10",
    ] {
        assert!(help.contains(line), "{help}");
    }
}

#[test]
fn wrong_usage_is_told_apart_from_what_cannot_be_done() {
    for wrong in [
        "",
        "plam mlp",
        "plan",
        "plan mlp --bach 3",
        "plan mlp --batch 0",
        "plan mlp --batch many",
        "plan mlp --budget 3parsecs",
        "plan mlp --device tpu",
        "compare",
        "compare mlp --all",
        "bench mlp --optimizer sdg",
        "bench mlp --threads 0",
    ] {
        failure(wrong, 2);
    }
    for unknown in ["plan resnet99", "compare resnet99", "bench resnet99"] {
        let why = failure(unknown, 2);
        assert!(
            why.contains("unknown model \"resnet99\"; there are mlp, cnn"),
            "{why}"
        );
    }
    let sizes = failure("plan gpt:layers=1,layers=2", 2);
    assert!(sizes.contains("gpt: layers is given twice"), "{sizes}");
    let sizes = failure("bench gpt:depth=3", 2);
    assert!(
        sizes.contains("gpt has no size \"depth\"; there are layers, width,"),
        "{sizes}"
    );
    for usage in ["bench compile", "bench mlp cnn"] {
        assert!(failure(usage, 2).contains("models follow `bench compile`"));
    }
    let device = failure("plan mlp --device cuda:0", 1);
    assert!(device.starts_with("error: device cuda:0"), "{device}");
    let size = failure("bench gemm --n 4294967295", 1);
    assert!(size.starts_with("error: "), "{size}");
}

#[test]
fn info_names_settings_and_where_they_came_from() {
    let info = |threads: Option<&str>| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_slabwise"));
        command
            .arg("info")
            .env_remove("SLABWISE_THREADS")
            .envs(threads.map(|n| ("SLABWISE_THREADS", n)));
        let output = command.output().unwrap();
        (
            output.status.code(),
            String::from_utf8(output.stdout).unwrap(),
            String::from_utf8(output.stderr).unwrap(),
        )
    };
    let (code, text, _) = info(None);
    assert_eq!(code, Some(0));
    assert!(
        text.contains(env!("CARGO_PKG_VERSION"))
            && text.contains("portable")
            && text.contains("one for each core"),
        "{text}"
    );
    let (code, text, _) = info(Some("3"));
    assert_eq!(code, Some(0));
    assert!(text.contains("3 (from SLABWISE_THREADS)"), "{text}");
    // What makes no sense is reported by the command that one asks what is read.
    let (code, text, _) = info(Some("lots"));
    assert_eq!(code, Some(0));
    assert!(
        text.contains("refused: SLABWISE_THREADS is \"lots\""),
        "{text}"
    );
    assert!(
        info(Some("")).1.contains("one for each core"),
        "what is empty is not set"
    );
}

#[test]
fn info_names_the_settings_of_memory() {
    let info = |variables: &[(&str, &str)]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_slabwise"));
        for name in MemoryConfig::VARIABLES {
            command.env_remove(name);
        }
        let output = command
            .arg("info")
            .envs(variables.iter().copied())
            .output()
            .unwrap();
        (
            output.status.code(),
            String::from_utf8(output.stdout).unwrap() + &String::from_utf8(output.stderr).unwrap(),
        )
    };
    let (code, text) = info(&[]);
    assert_eq!(code, Some(0), "{text}");
    assert!(
        [
            "tlsf (the default)",
            "0.75 (the default)",
            "as the device prefers (the default)"
        ]
        .iter()
        .all(|part| text.contains(part)),
        "{text}"
    );
    let (_, text) = info(&[
        ("SLABWISE_POOL", "round"),
        ("SLABWISE_MEM_FRACTION", "0.4"),
        ("SLABWISE_PREALLOCATE", "0"),
    ]);
    let parts = [
        "round (from SLABWISE_POOL)",
        "0.4 (from SLABWISE_MEM_FRACTION)",
        "false (from SLABWISE_PREALLOCATE)",
    ];
    assert!(parts.iter().all(|part| text.contains(part)), "{text}");
    assert!(
        info(&[("SLABWISE_ALLOCATOR", "vmm")])
            .1
            .contains("vmm (from SLABWISE_ALLOCATOR)")
    );
    for (name, value) in MemoryConfig::VARIABLES
        .iter()
        .zip(["cuda", "best", "perhaps", "1.5", "5000", "19", "101"])
    {
        let (code, text) = info(&[(name, value)]);
        assert!(
            code == Some(0) && text.contains(&format!("refused: {name} is \"{value}\"")),
            "{text}"
        );
        assert!(
            info(&[(name, " ")]).1.contains("tlsf (the default)"),
            "what is blank is not set"
        );
    }
    assert!(
        info(&[("SLABWISE_AUTOTUNE", "0")])
            .1
            .contains("off (from SLABWISE_AUTOTUNE)")
    );
}

#[test]
fn a_variable_that_makes_no_sense_is_wrong_usage_wherever_it_is_read() {
    let (_folder, trace) = table(TABLE);
    let variables = MemoryConfig::VARIABLES
        .iter()
        .zip(["cuda", "best", "perhaps", "1.5", "5000", "19", "101"]);
    let switches = [
        (&"SLABWISE_THREADS", "lots"),
        (&"SLABWISE_AUTOTUNE", "abc"),
        (&"SLABWISE_CUDA_GRAPHS", "x"),
    ];
    for (name, value) in variables.chain(switches) {
        let commands = [
            "plan mlp".into(),
            "compare mlp".into(),
            "bench mlp".into(),
            format!("replay {trace}"),
        ];
        // A replay has no threads and no products, and its device is all the pool's.
        let is_replayed =
            MemoryConfig::VARIABLES.contains(name) && *name != "SLABWISE_MEM_FRACTION";
        let commands = if is_replayed {
            &commands[..]
        } else {
            &commands[..3]
        };
        for command in commands {
            let output = Command::new(env!("CARGO_BIN_EXE_slabwise"))
                .args(command.split(' '))
                .env(name, value)
                .output()
                .unwrap();
            let why = String::from_utf8(output.stderr).unwrap();
            assert_eq!(
                output.status.code(),
                Some(2),
                "{command} with {name}={value}: {why}"
            );
            assert_eq!(why.lines().count(), 1, "{why}");
            assert!(
                why.starts_with(&format!("error: {name} is \"{value}\"; it is ")),
                "{why}"
            );
        }
    }
}

/// What a command that fails after it has shown its result writes to stderr.
fn failure_with_report(args: &str, code: i32) -> String {
    let output = slabwise(args);
    assert_eq!(output.status.code(), Some(code), "{args}");
    String::from_utf8(output.stderr).unwrap()
}

const PACK: &str = "buffers lower_bound height ratio optimal method seconds";
/// `benchmarks/examples/input.12.csv` of google/minimalloc (Apache-2.0, Copyright 2023 Google LLC);
/// its optimum is 12.
const TABLE: &str = "id,lower,upper,size\nb1,0,3,4\nb2,3,9,4\nb3,0,9,4\nb4,9,21,4\nb5,0,21,4\n";

/// A folder with a table of buffers, and the path of that.
fn table(text: &str) -> (tempfile::TempDir, String) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("table.csv");
    std::fs::write(&path, text).unwrap();
    let path = path.display().to_string();
    (folder, path)
}

const ORDER: &str = "graph ops in_place fixed peak lower_bound optimal gap_pct method seconds";
const REMAT: &str = "graph fixed_bytes budget_bytes met peak_bytes no_remat_peak_bytes floor_bytes computes base_cost cost overhead_pct \
                     lower_bound_pct seconds";

/// A graph that comes with the project.
fn graph(name: &str) -> String {
    format!("{}/data/graphs/{name}.json.gz", env!("CARGO_MANIFEST_DIR"))
}

fn written(path: &std::path::Path) -> Value {
    let content = std::fs::read(path).unwrap();
    let text = if path.extension().is_some_and(|e| e == "gz") {
        std::io::read_to_string(flate2::read::GzDecoder::new(&content[..])).unwrap()
    } else {
        String::from_utf8(content).unwrap()
    };
    serde_json::from_str(&text).unwrap()
}

#[test]
fn order_finds_the_smallest_peak_and_writes_the_schedule() {
    let folder = tempfile::tempdir().unwrap();
    let path = graph("unet_d2_c16_b4_grads");
    for (flag, peak, file, key) in [
        ("", 49_807_500, "o.json", "order"),
        ("--in-place", 46_137_476, "o.json.gz", "steps"),
    ] {
        let out = folder.path().join(file);
        let report = json(&format!("order {path} {flag} -o {}", out.display()));
        assert_keys(&report, ORDER);
        assert_eq!(
            (report["peak"].as_u64(), report["lower_bound"].as_u64()),
            (Some(peak), Some(peak))
        );
        assert_eq!(
            (report["optimal"].as_bool(), report["ops"].as_u64()),
            (Some(true), Some(86))
        );
        assert!(written(&out)[key].as_array().unwrap().len() >= 86);
    }
    assert!(text(&format!("order {path} --time-limit 1")).contains("no order is better"));
}

#[test]
fn remat_keeps_a_budget_or_tells_the_floor() {
    let folder = tempfile::tempdir().unwrap();
    let path = graph("unet_d2_c16_b4_grads");
    let out = folder.path().join("r.json");
    let report = json(&format!(
        "remat {path} --budget 75% --time-limit 0.2 -o {}",
        out.display()
    ));
    assert_keys(&report, REMAT);
    assert_eq!(
        (report["met"].as_bool(), report["budget_bytes"].as_u64()),
        (Some(true), Some(37_355_625))
    );
    assert!(report["peak_bytes"].as_u64() <= report["budget_bytes"].as_u64());
    assert!(report["lower_bound_pct"].as_f64() <= report["overhead_pct"].as_f64());
    assert_eq!(
        written(&out)["order"].as_array().unwrap().len() as u64,
        report["computes"].as_u64().unwrap()
    );

    let report = json(&format!(
        "remat {path} --budget 38MB --offload 300 --slab --time-limit 0.2 -o {}",
        out.display()
    ));
    assert_keys(
        &report,
        &format!("{REMAT} time time_overhead_pct offloaded_bytes slab_bytes"),
    );
    assert!(report["slab_bytes"].as_u64() <= Some(38_000_000));
    assert!(written(&out)["steps"][0]["off"].is_u64());

    let args = format!("remat {path} --budget 1000 --time-limit 0.1 --json");
    let output = slabwise(&args);
    assert_eq!(output.status.code(), Some(1));
    let why = String::from_utf8(output.stderr).unwrap();
    assert!(
        why.starts_with("error: the budget of 1000 bytes is not met")
            && why.contains("no schedule needs less than"),
        "{why}"
    );
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(report["floor_bytes"].as_u64() > Some(1000) && report["met"] == false);
}

#[test]
fn bad_graphs_and_budgets_are_wrong_usage() {
    let folder = tempfile::tempdir().unwrap();
    let bad = |nodes: &str| {
        let path = folder.path().join("g.json");
        std::fs::write(
            &path,
            format!(r#"{{"format":"remat-graph-v1","nodes":[{nodes}],"outputs":[]}}"#),
        )
        .unwrap();
        let order = failure(&format!("order {}", path.display()), 2);
        assert_eq!(
            failure(&format!("remat {} --budget 50%", path.display()), 2),
            order
        );
        assert!(order.contains("g.json"), "{order}");
        order
    };
    let circle = bad(r#"{"name":"a","inputs":[1],"bytes":1},{"name":"b","inputs":[0],"bytes":1}"#);
    assert!(circle.contains("wait for each other"), "{circle}");
    let negative = bad(r#"{"name":"a","inputs":[],"bytes":-4}"#);
    assert!(negative.contains("\"bytes\" is -4"), "{negative}");
    let huge = bad(&format!(
        r#"{{"name":"a","inputs":[],"bytes":{0}}},{{"name":"b","inputs":[],"bytes":{0}}}"#,
        u64::MAX
    ));
    assert!(huge.contains("64 bits"), "{huge}");
    assert!(bad(r#"{"name":"a""#).contains("line 1"));
    assert!(failure("order no/such.json", 2).contains("no/such.json"));
    let path = graph("randwire12_inf");
    for usage in [
        "",
        "--budget lots",
        "--budget -1",
        "--budget -5%",
        "--budget 50% --offload -1",
        "--budget 50% --offload 1e302",
        "--budget 50% --time-limit x",
    ] {
        failure(&format!("remat {path} {usage}"), 2);
    }
}

const REPLAY: &str = "policy peak_live_bytes peak_reserved_bytes fragmentation ns_per_op driver_calls defrags defrag_bytes";

#[test]
fn replay_sends_a_trace_through_policies() {
    let (_folder, path) = table(TABLE);
    let report = json(&format!("replay {path}"));
    assert_keys(&report, REPLAY);
    assert_eq!(
        (
            report["policy"].as_str(),
            report["peak_live_bytes"].as_u64()
        ),
        (Some("tlsf"), Some(12))
    );
    let all = json(&format!("replay {path} --all"));
    let names: Vec<&str> = all
        .as_array()
        .unwrap()
        .iter()
        .filter_map(|report| report["policy"].as_str())
        .collect();
    assert_eq!(names.join(" "), POLICIES);
    assert_eq!(
        json(&format!("replay {path} --policy round"))["peak_reserved_bytes"].as_u64(),
        Some(3 * 4096)
    );
    let shown = text(&format!(
        "replay {path} --all --capacity 1MiB --no-defragment"
    ));
    assert!(
        shown.contains("peak live 12 B")
            && POLICIES
                .split_whitespace()
                .all(|policy| shown.contains(policy)),
        "{shown}"
    );
    // What is written is a trace again, up to the peak.
    let folder = tempfile::tempdir().unwrap();
    let [json_file, pickle, perfetto] =
        ["s.json", "s.pickle", "p.json"].map(|name| folder.path().join(name).display().to_string());
    for file in [&json_file, &pickle] {
        text(&format!(
            "replay {path} --snapshot {file} --perfetto {perfetto}"
        ));
        assert_eq!(
            json(&format!("replay {file}"))["peak_live_bytes"].as_u64(),
            Some(12)
        );
    }
    let events: Value = serde_json::from_str(&std::fs::read_to_string(perfetto).unwrap()).unwrap();
    assert!(
        events["traceEvents"]
            .as_array()
            .unwrap()
            .iter()
            .filter(|event| event["ph"] == "b")
            .count()
            >= 3
    );
    // Another format: what it is shows in the file.
    let (_folder, log) = table(
        "Thread,Time,Action,Pointer,Size,Stream\n1,0,allocate,0x10,300,0x0\n1,0,free,0x10,300,0x0\n",
    );
    assert_eq!(
        json(&format!("replay {log} --policy unpooled"))["peak_reserved_bytes"].as_u64(),
        Some(512)
    );
}

#[test]
fn replay_tells_bad_traces_from_too_little_memory() {
    let (_folder, path) = table("id,lower,upper,size\na,0,2,600\nb,1,3,600\n");
    let bill = failure(&format!("replay {path} --capacity 1024"), 1);
    assert!(
        bill.contains("operation 1") && bill.contains("600 B") && bill.contains("tlsf"),
        "{bill}"
    );
    assert_eq!(
        json(&format!("replay {path} --capacity 2x"))["peak_live_bytes"].as_u64(),
        Some(1200)
    );
    let (_folder, log) = table("Thread,Time,Action,Pointer,Size,Stream\n1,0,free,0x10,300,0x0\n");
    let error = failure(&format!("replay {log}"), 2);
    assert!(
        error.contains("line 2") && error.contains("0x10"),
        "{error}"
    );
    assert!(failure("replay nowhere.csv", 2).contains("nowhere.csv"));
    assert!(failure(&format!("replay {path} --policy best"), 2).contains("tlsf, bfc"));
    assert!(failure(&format!("replay {path} --capacity=-1x"), 2).contains("-1x"));
    assert!(failure(&format!("replay {path} --capacity=0x"), 2).contains("0x"));
    // A policy without a limit of its own has none to name.
    let bill = failure(&format!("replay {path} --policy platform --capacity 1B"), 1);
    assert!(
        bill.contains("0 B of all that the device gives are in use") && !bill.contains("iB"),
        "{bill}"
    );
}
