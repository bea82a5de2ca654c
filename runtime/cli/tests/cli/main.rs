//! The command line as scripts use it: keys, numbers, exit codes.

mod graphs;
mod launch;
mod onnx;
mod pack;
mod replay;
mod settings;

use std::collections::BTreeSet;
use std::process::{Command, Output};

use serde_json::Value;

/// Runs a command as on a machine without a GPU.
fn slabwise(args: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_slabwise"));
    command
        .args(args.split_whitespace())
        .env("SLABWISE_LIBCUDA", "no driver")
        .output()
        .unwrap()
}

/// The output of a command that succeeds.
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

/// The stderr of a command that fails with this code; its stdout must be empty.
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

const PLAN: &str = "format model batch slab_bytes lower_bound_bytes without_reuse_bytes persistent_bytes prologues kernels compile_s peak buffers host_bytes";
const COMPARE: &str = "no_reuse_bytes dynamic_bytes planned_without_inplace_bytes planned_bytes measured_bytes lower_bound_bytes \
                       policies step_ms_dynamic step_ms_planned";
const POLICIES: &str = "tlsf bfc naive round unpooled platform async vmm";
const BENCH: &str = "model batch optimizer device dtype tf32 threads steps step_ms_median step_ms_min compile_s first_step_s params_bytes \
                     state_bytes slab_bytes lower_bound_bytes peak_measured_bytes rss_peak_bytes host_bytes";

#[test]
fn plan_reports_the_memory_of_a_step() {
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
fn a_model_file_that_cannot_be_read_is_bad_input() {
    for command in ["plan", "run"] {
        let error = failure(&format!("{command} no-such-model.onnx"), 2);
        assert!(
            error.contains("no-such-model.onnx: No such file"),
            "{error}"
        );
    }
}

#[test]
fn options_of_the_other_kind_of_model_are_refused() {
    let error = failure("plan model.onnx --batch 8", 2);
    assert!(error.contains("--batch (use --dim)"), "{error}");
    for option in ["--dim batch=8", "--narrow", "--train adam"] {
        let error = failure(&format!("plan cnn {option}"), 2);
        assert!(
            error.contains("is for model files; cnn is built in"),
            "{error}"
        );
    }
}

#[test]
fn plan_reports_what_ranks_send_and_hold() {
    let weights = 535_818 * 4;
    let of = |strategy: &str| {
        let plan = json(&format!("plan mlp --ranks 2 --strategy {strategy}"));
        let of_rank = |key: &str| plan["ranks"][key].as_u64().expect(key);
        assert_eq!(of_rank("ranks"), 2);
        assert_eq!(of_rank("weights_bytes"), weights);
        // Half of all sums, then half of all weights.
        assert_eq!(of_rank("sent_bytes"), weights);
        assert_eq!(plan["slab_bytes"].as_u64(), Some(of_rank("slab_bytes")));
        assert!(of_rank("collectives") >= 6 && of_rank("overlapped") >= 1);
        assert!(of_rank("in_flight_at_peak_bytes") <= of_rank("in_flight_most_bytes"));
        of_rank("state_bytes")
    };
    assert_eq!(of("replicated"), weights);
    assert!(of("zero1") < weights * 11 / 20);
    let shown = text("plan mlp --ranks 2");
    assert!(shown.contains("2 ranks · 2.0 MiB sent by each"), "{shown}");
    assert!(json("plan mlp")["ranks"].is_null());
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
fn plan_writes_a_page_with_the_measured_memory() {
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
    // The step as an allocation trace: its peak is the planned bytes.
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
fn diff_explains_why_a_plan_grew() {
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
fn the_frontier_lists_the_time_of_smaller_slabs() {
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
        (slabs[0], points[0]["recomputed"].as_u64()),
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
fn a_budget_is_met_or_refused_with_the_bytes_needed() {
    let plan = json("plan mlp");
    let needed = plan["persistent_bytes"].as_u64().unwrap() + plan["slab_bytes"].as_u64().unwrap();
    assert_eq!(
        json("plan mlp --budget 64MiB")["slab_bytes"],
        plan["slab_bytes"]
    );
    assert!(text(&format!("plan mlp --budget {}", needed + 4096)).contains("slab"));
    // Smaller workspaces need fewer bytes; weights and state alone do not suffice.
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
fn a_budget_below_one_kernel_is_met_by_micro_batches() {
    let (all, half) = (
        json("plan cnn --batch 16"),
        json("plan cnn --batch 16 --budget 50%"),
    );
    let slab = |plan: &Value| plan["slab_bytes"].as_u64().unwrap();
    assert!(
        slab(&half) * 100 <= slab(&all) * 51 && half["kernels"].as_u64() > all["kernels"].as_u64()
    );
    assert!(text("plan cnn --batch 16 --budget 50%").contains(" micro-batches of "));
    let report = json("plan cnn --batch 4 --frontier");
    let points = report["frontier"].as_array().unwrap();
    assert_eq!(points[0]["micro_batches"].as_u64(), Some(1));
    assert!(
        points.len() > 3 && points.last().unwrap()["micro_batches"].as_u64() > Some(1),
        "{report}"
    );
}

#[test]
fn the_largest_batch_is_that_of_a_budget() {
    let plan = |batch: u64| json(&format!("plan mlp --batch {batch}"));
    let bytes = |plan: &Value| {
        plan["persistent_bytes"].as_u64().unwrap() + plan["slab_bytes"].as_u64().unwrap()
    };
    let room = bytes(&plan(300));
    let report = json(&format!("plan mlp --largest-batch {room}"));
    assert_keys(&report, "model bytes largest_batch");
    assert_eq!(report["bytes"].as_u64(), Some(room));
    let [kept, within] =
        ["all_values_kept", "within_the_budget"].map(|how| &report["largest_batch"][how]);
    for fit in [kept, within] {
        assert_keys(fit, "batch slab_bytes persistent_bytes overhead_pct");
        assert!(bytes(fit) <= room, "{report}");
    }
    // One more example does not fit without recomputation.
    let batch = kept["batch"].as_u64().unwrap();
    assert!(batch >= 300 && bytes(&plan(batch)) <= room && bytes(&plan(batch + 1)) > room);
    let more = within["batch"].as_u64().unwrap();
    assert!(more > batch, "{report}");
    let fits = |batch: u64| format!("plan mlp --batch {batch} --budget {room}");
    assert!(bytes(&json(&fits(more))) <= room);
    failure(&fits(more + 1), 1);
    assert!(text(&format!("plan mlp --largest-batch {room}")).contains("weights and state"));
    let error = failure("plan mlp --largest-batch 1MiB", 1);
    assert!(
        error.contains("the budget of 1.0 MiB is too small"),
        "{error}"
    );
    failure("plan mlp --largest-batch 8GiB --budget 1GiB", 2);
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
fn planned_bytes_equal_lower_bound_and_measured_bytes() {
    assert_planned(&json("compare mlp --batch 256 --steps 2"));
    assert_planned(&json("compare cnn --batch 8 --steps 1"));
    assert_planned(&json("compare resnet20 --batch 5 --steps 1"));
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
fn the_speed_of_a_link_is_positive() {
    for link in ["0", "fast", "-1"] {
        let said = failure(&format!("plan mlp --budget 50% --offload={link}"), 2);
        assert!(said.contains("is not a link speed"), "{said}");
    }
}

/// Values that do not fit are offloaded: the plan lists their intervals, and a run keeps to them.
#[test]
fn offload_meets_a_budget() {
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
fn bench_compares_kernels_with_the_machine() {
    let report = json("bench cnn --batch 2 --steps 3 --threads 1 --kernels");
    let kernels = report["kernels"].as_array().unwrap();
    let of = |kernel: &Value, key: &str| kernel[key].as_f64().unwrap();
    for kernel in kernels {
        let us = of(kernel, "us");
        assert!(us > 0.0 && of(kernel, "floor_us") >= 0.0, "{kernel}");
        let rates = [("gflops", "flops"), ("gbytes", "bytes")];
        for (rate, work) in rates {
            let exact = of(kernel, work) / us / 1e3;
            assert!((of(kernel, rate) - exact).abs() <= 1e-9 * exact, "{kernel}");
        }
    }
    // An update in place reads and writes the weight and each of Adam's two states.
    let update = kernels.iter().find(|k| {
        let name = k["name"].as_str().unwrap();
        name.starts_with("hidden.matmul.grad") && name.ends_with("update")
    });
    let [weight, image, gradient] = [3136 * 512, 2 * 3136, 2 * 512].map(|n| 4 * n);
    let bytes = update.unwrap()["bytes"].as_u64().unwrap();
    assert!(bytes >= 6 * weight + image + gradient, "{bytes}");
    assert!(bytes < 7 * weight, "{bytes}");
    let families: BTreeSet<&str> = kernels
        .iter()
        .filter_map(|k| k["family"].as_str())
        .collect();
    assert_eq!(
        families,
        BTreeSet::from(["convolution", "other", "product"])
    );
    // Every kernel is in one family, and a kernel loses the time above its floor.
    let losses = report["losses"].as_array().unwrap();
    let names = losses.iter().filter_map(|loss| loss["of"].as_str());
    let expected = [
        "products",
        "convolutions",
        "memory-bound kernels",
        "between kernels",
    ];
    assert_eq!(names.collect::<Vec<_>>(), expected);
    let sum = |rows: &[Value], key: &str| rows.iter().map(|row| of(row, key)).sum::<f64>();
    let all = sum(kernels, "us");
    assert!((sum(&losses[..3], "us") - all).abs() <= 1e-6 * all);
    let lost = kernels
        .iter()
        .map(|k| (of(k, "us") - of(k, "floor_us")).max(0.0));
    assert!((sum(&losses[..3], "lost_us") - lost.sum::<f64>()).abs() <= 1e-6 * all);

    let table = text("bench mlp --batch 2 --steps 3 --threads 1 --kernels");
    assert!(table.contains("lost above the floors") && table.contains("measured with 1 threads"));
    let peak = json("bench peak --threads 2");
    let threads = [&peak[0]["threads"], &peak[1]["threads"]];
    assert_eq!(threads.map(|t| t.as_u64().unwrap()), [1, 2]);
    assert!(of(&peak[0], "gflops") > 0.1 && of(&peak[0], "gbytes") > 0.1);
    assert!(text("bench peak --threads 1").contains("gflops"));
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
    let expected = "trace finish simplify rematerialize legalize fuse lower schedule plan check variables link load";
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

/// Every model is listed with its sizes, in a form that the command accepts.
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
fn wrong_usage_and_impossible_requests_have_different_exit_codes() {
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

/// The stderr of a command that fails after it has printed its result.
fn failure_with_report(args: &str, code: i32) -> String {
    let output = slabwise(args);
    assert_eq!(output.status.code(), Some(code), "{args}");
    String::from_utf8(output.stderr).unwrap()
}

const PACK: &str = "buffers lower_bound height ratio optimal method seconds";
/// `benchmarks/examples/input.12.csv` of google/minimalloc (Apache-2.0, Copyright 2023 Google LLC);
/// its optimum is 12.
const TABLE: &str = "id,lower,upper,size\nb1,0,3,4\nb2,3,9,4\nb3,0,9,4\nb4,9,21,4\nb5,0,21,4\n";

/// A folder with a table of buffers, and the path of the table.
fn table(text: &str) -> (tempfile::TempDir, String) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("table.csv");
    std::fs::write(&path, text).unwrap();
    let path = path.display().to_string();
    (folder, path)
}
