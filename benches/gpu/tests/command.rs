//! The command from end to end on a driver without a device, with tests that pass, fail, crash and
//! hang.
#![cfg(unix)]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;
use slabwise_cuda::emulator::USES_THE_GPU;
use slabwise_cuda::fake::{self, FakeDriver};
use tempfile::TempDir;

/// The folder and the driver of a run. `new` returns `None`, with a message, where that cannot
/// work.
struct TestBed {
    folder: TempDir,
    driver: PathBuf,
    functions: PathBuf,
}

impl TestBed {
    fn new() -> Option<TestBed> {
        // It reports missing tools. Each run has a separate driver.
        drop(FakeDriver::install()?);
        let (driver, functions) = fake::build().expect("it was built before");
        Some(TestBed {
            folder: tempfile::tempdir().expect("a folder"),
            driver,
            functions,
        })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn command(&self) -> Command {
        let mut command = self.command_of(&["--results"]);
        command.arg(self.path("results.jsonl"));
        command
    }

    fn command_of(&self, words: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_slabwise-gpu"));
        command
            .env("SLABWISE_LIBCUDA", &self.driver)
            .env("SLABWISE_EMULATED", &self.functions)
            .args(words);
        command
            .env("SLABWISE_LIBCUBLASLT", "no library")
            .env("SLABWISE_CACHE_DIR", self.path("cache"));
        // Peers must not see a GPU of this machine.
        command
            .env("CUDA_VISIBLE_DEVICES", "")
            .env("JAX_PLATFORMS", "cpu")
            .current_dir(self.folder.path());
        command
    }

    fn results(&self) -> Vec<Value> {
        let text = fs::read_to_string(self.path("results.jsonl")).expect("results were written");
        text.lines()
            .map(|line| serde_json::from_str(line).expect("each line is JSON"))
            .collect()
    }

    /// A test binary that contains these tests, each with the given script.
    fn tests(&self, tests: &[(&str, &str)]) -> PathBuf {
        self.tests_of("family", tests)
    }

    fn tests_of(&self, family: &str, tests: &[(&str, &str)]) -> PathBuf {
        let folder = self.path("tests");
        fs::create_dir_all(&folder).expect("a folder");
        let names: Vec<String> = tests
            .iter()
            .map(|(name, _)| format!("echo '{name}: test'"))
            .collect();
        let cases: Vec<String> = tests
            .iter()
            .map(|(name, script)| format!("{name}) {script};;"))
            .collect();
        let text = format!(
            "#!/bin/sh\ntest \"$4\" = --ignored && exit 0\nif [ \"$1\" = --list ]; then\n{}\nexit 0\nfi\ntest \"$SLABWISE_REQUIRE_GPU\" = 1 || exit 3\n\
             case \"$2\" in\n{}\nesac\necho 'test result: ok. 1 passed'\n",
            names.join("\n"),
            cases.join("\n")
        );
        write_script(&folder.join(family), &text);
        folder
    }
}

fn write_script(file: &Path, text: &str) {
    fs::write(file, text).expect("it is written");
    fs::set_permissions(file, fs::Permissions::from_mode(0o755)).expect("it is made executable");
}

fn status<'a>(results: &'a [Value], item: &str) -> &'a str {
    let found = results
        .iter()
        .rev()
        .find(|line| line["item"] == item)
        .unwrap_or_else(|| panic!("no result of {item}: {results:?}"));
    found["status"].as_str().expect("a status")
}

fn output_text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

#[test]
fn measurements_become_lines_and_a_table() {
    let Some(bed) = TestBed::new() else { return };
    let items = [
        "step/mlp/f32/",
        "step/mlp/bf16/slabwise",
        "bytes/mlp",
        "product/1024/",
        "row/2048/",
        "launches/",
        "bandwidth/",
    ];
    let mut command = bed.command();
    command
        .arg("--quick")
        .args(items.iter().flat_map(|item| ["--only", item]));
    let output = command.output().expect("it starts");
    let (text, results) = (output_text(&output), bed.results());
    assert!(output.status.success(), "{text}");
    for item in [
        "step/mlp/f32/slabwise",
        "step/mlp/f32/slabwise-no-graph",
        "product/1024/f32/slabwise",
        "row/2048/bf16/slabwise",
        "row/2048/4bits/slabwise",
        "launches/graph",
        "bytes/mlp",
    ] {
        assert_eq!(status(&results, item), "ok", "{text}");
    }
    for item in [
        "step/mlp/f32/torch-eager",
        "step/mlp/f32/jax",
        "product/1024/f32/torch",
    ] {
        // No framework sees a GPU here, or it is not installed.
        assert_eq!(status(&results, item), "skipped", "{text}");
    }
    assert_eq!(status(&results, "step/mlp/bf16/slabwise"), "ok");
    let step = results
        .iter()
        .find(|line| line["item"] == "step/mlp/f32/slabwise")
        .expect("it was measured");
    assert!(
        step["ms"].as_f64() > Some(0.0) && step["ms_low"].as_f64() <= step["ms_high"].as_f64(),
        "{step}"
    );
    let row = results
        .iter()
        .find(|line| line["item"] == "row/2048/4bits/slabwise");
    let tried = row.map(|line| line["candidates"].to_string());
    assert!(
        tried.is_some_and(|list| list.contains("gemv_4bits_1x4")),
        "{row:?}"
    );
    // Weights and momentum of 535,818 floats, and whole pages.
    assert!(
        step["planned_bytes"].as_u64() > Some(8 * 535_818)
            && step["bytes"].as_u64() >= step["planned_bytes"].as_u64(),
        "{step}"
    );
    assert_eq!(
        (&step["device"], &step["versions"]["sm"], &step["quick"]),
        (&"no device (emulated)".into(), &90.into(), &true.into())
    );
    assert!(
        text.contains("mlp f32 ") && text.contains("product/1024 f32"),
        "{text}"
    );
    // A run that resumes measures items that were only tried; a second quick run leaves them out.
    let mut again = bed.command();
    again
        .args(["--quick", "--only", "bytes/mlp", "--resume"])
        .arg(bed.path("results.jsonl"));
    assert!(again.output().expect("it starts").status.success());
    assert_eq!(bed.results().len(), results.len());
    again = bed.command();
    again
        .args(["--only", "bytes/mlp", "--limit", "1", "--resume"])
        .arg(bed.path("results.jsonl"));
    again.output().expect("it starts");
    assert_eq!(bed.results().len(), results.len() + 1);
}

#[test]
fn products_and_convolutions_report_their_candidates() {
    let Some(bed) = TestBed::new() else { return };
    let output = bed
        .command()
        .args(["--quick", "--only", "conv/128-3x3-28/f32/slabwise"])
        .output()
        .expect("it starts");
    let results = bed.results();
    assert!(output.status.success(), "{}", output_text(&output));
    for part in ["forward", "data", "weight"] {
        let part = &results[0]["parts"][part];
        let told = part["candidates"].as_array().expect("a list");
        assert!(
            told.iter().any(|line| line
                .as_str()
                .is_some_and(|line| line.contains("µs") && line.contains('→'))),
            "{part}"
        );
        assert!(part["ms"].as_f64() > Some(0.0), "{part}");
    }
}

#[test]
fn each_end_of_a_test_is_distinguished() {
    let Some(bed) = TestBed::new() else { return };
    let left_behind = bed.path("left_behind");
    let hang = format!("sleep 1000 & echo $! > {}; wait", left_behind.display());
    let tests = bed.tests(&[
        ("passes", &format!("echo {USES_THE_GPU}")),
        (
            "fails",
            &format!("echo {USES_THE_GPU}; echo 'one is not two' >&2; exit 101"),
        ),
        ("crashes", "kill -SEGV $$"),
        ("hangs", &hang),
        ("stays_on_the_host", "true"),
        (
            "is_filtered",
            &format!("echo {USES_THE_GPU}; echo 0 passed; exit 0"),
        ),
    ]);
    let run = || {
        let mut command = bed.command();
        command
            .args(["--only", "test/", "--limit", "2", "--resume"])
            .arg(bed.path("results.jsonl"))
            .arg("--tests")
            .arg(&tests);
        command.output().expect("it starts")
    };
    fs::write(bed.path("results.jsonl"), "").expect("it is written");
    let output = run();
    let (text, results) = (output_text(&output), bed.results());
    assert_eq!(output.status.code(), Some(1), "{text}");
    let ends = ["ok", "failed", "crashed", "timeout", "skipped", "failed"];
    for (name, end) in [
        "passes",
        "fails",
        "crashes",
        "hangs",
        "stays_on_the_host",
        "is_filtered",
    ]
    .into_iter()
    .zip(ends)
    {
        assert_eq!(
            status(&results, &format!("test/family/{name}")),
            end,
            "{text}"
        );
    }
    let failed = results
        .iter()
        .find(|line| line["item"] == "test/family/fails")
        .expect("it has a result");
    assert!(
        failed["error"]
            .as_str()
            .is_some_and(|error| error.contains("one is not two")),
        "{failed}"
    );
    let told = [
        "failed test/family/fails: one is not two",
        "timeout test/family/hangs: ended after 2 s",
        "crashed test/family/crashes: signal 11",
    ];
    assert!(told.iter().all(|line| text.contains(line)), "{text}");
    let process = fs::read_to_string(&left_behind).expect("it was started");
    assert!(
        !Path::new("/proc").join(process.trim()).join("exe").exists(),
        "the hanging test left {process} behind"
    );
    // Items that are ok do not run a second time.
    run();
    let again = bed.results().split_off(results.len());
    assert!(
        again.len() == 5
            && again
                .iter()
                .all(|line| line["item"] != "test/family/passes"),
        "{again:?}"
    );
}

/// A checker that did not attach to a test's process says nothing, and its exit status is that of
/// the test.
#[test]
fn a_checker_must_say_that_it_found_nothing() {
    let Some(bed) = TestBed::new() else { return };
    let uses = format!("echo {USES_THE_GPU}");
    let names = ["few_rows_or_columns", "padded_rows", "tensor_cores"];
    let tests = bed.tests_of("gemm", &names.map(|name| (name, uses.as_str())));
    let folder = bed.path("bin");
    fs::create_dir(&folder).expect("a folder");
    let checker = r#"#!/bin/sh
tool=$2; name=$7
test "$SLABWISE_SEPARATE_ARENAS" = 1 || exit 3
shift 4; "$@" || exit $?
case $name/$tool in
few_rows_or_columns/racecheck) echo '========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)';;
few_rows_or_columns/*) echo '========= ERROR SUMMARY: 0 errors' >&2;;
padded_rows/racecheck) echo '========= ERROR SUMMARY: 0 errors';;
tensor_cores/racecheck) echo '========= RACECHECK SUMMARY: 1 hazard displayed (0 errors, 1 warning)';;
tensor_cores/*) echo '========= ERROR SUMMARY: 10 errors';;
esac
"#;
    write_script(&folder.join("compute-sanitizer"), checker);
    let path = std::env::var("PATH").expect("it is set");
    let mut command = bed.command();
    command
        .env("PATH", format!("{}:{path}", folder.display()))
        .args(["--only", "check/", "--tests"])
        .arg(tests);
    let output = command.output().expect("it starts");
    let (text, results) = (output_text(&output), bed.results());
    assert_eq!(results.len(), 9, "{text}");
    for (name, end) in names.into_iter().zip(["ok", "failed", "failed"]) {
        for tool in ["memcheck", "racecheck", "synccheck"] {
            assert_eq!(
                status(&results, &format!("{tool}/gemm/{name}")),
                end,
                "{text}"
            );
        }
    }
    assert!(
        text.contains("the checker did not say \"ERROR SUMMARY: 0 errors\""),
        "{text}"
    );
}

#[test]
fn a_budget_leaves_the_rest_for_another_run() {
    let Some(bed) = TestBed::new() else { return };
    let tests = bed.tests(&[("hangs", "sleep 1000"), ("never_begins", "true")]);
    let mut command = bed.command();
    command
        .args(["--only", "test/", "--jobs", "1", "--budget", "3", "--tests"])
        .arg(tests);
    let output = command.output().expect("it starts");
    let (text, results) = (output_text(&output), bed.results());
    assert!(output.status.success(), "{text}");
    assert_eq!(
        (results.len(), status(&results, "test/family/hangs")),
        (1, "skipped"),
        "{text}"
    );
    assert!(
        results[0]["error"]
            .as_str()
            .is_some_and(|why| why.contains("budget"))
            && text.contains("1 not begun"),
        "{text}"
    );
}

#[test]
fn wrong_usage_is_rejected_before_any_item_runs() {
    let Some(bed) = TestBed::new() else { return };
    let directory = bed.path("directory");
    fs::create_dir(&directory).expect("a folder");
    fs::write(bed.path("prose"), "not a result\n{}\n").expect("it is written");
    fs::write(
        bed.path("torn"),
        "{\"item\":\"bytes/mlp\",\"status\":\"ok\"}\n{\"item\":\"bytes/cn",
    )
    .expect("it is written");
    let path = |name: &str| bed.path(name).display().to_string();
    let refused: [(&[&str], &str); 9] = [
        (&["--budgit", "3"], "unexpected argument"),
        (&["--budget", "soon"], "invalid value"),
        (&["--jobs", "0"], "invalid value"),
        (
            &["--only", "steps/of/nobody"],
            "no item is named like steps/of/nobody",
        ),
        (
            &["--tests", &path("nowhere")],
            "is no folder of test binaries",
        ),
        (&["--resume", &path("nowhere")], "nowhere"),
        (&["--resume", &path("prose")], "line 1 is no result"),
        (
            &["--results", &path("directory")],
            "results cannot be written",
        ),
        (
            &["--results", "/dev/full", "--quick", "--only", "bytes/mlp"],
            "a result cannot be written",
        ),
    ];
    for (words, why) in refused {
        let output = bed.command_of(words).output().expect("it starts");
        assert!(
            output.status.code() == Some(2) && output_text(&output).contains(why),
            "{words:?}: {}",
            output_text(&output)
        );
    }
    // An incomplete last line is ignored, and the lines before it count.
    let mut command = bed.command();
    command.args(["--quick", "--only", "bytes/mlp", "--resume", &path("torn")]);
    assert!(command.output().expect("it starts").status.success() && bed.results().is_empty());
}

/// A program that is killed leaves whole lines behind, and a torn one is replaced by the next.
#[test]
fn a_killed_run_goes_on() {
    let Some(bed) = TestBed::new() else { return };
    let tests = bed.tests(&[
        ("a_passes", &format!("echo {USES_THE_GPU}")),
        (
            "b_waits",
            &format!(
                "echo {USES_THE_GPU}; test -e {} || sleep 30",
                bed.path("again").display()
            ),
        ),
    ]);
    let command = || {
        let mut command = bed.command();
        command.args(["--only", "test/", "--jobs", "1", "--tests"]);
        command.arg(&tests);
        command
    };
    let mut killed = command().spawn().expect("it starts");
    let file = bed.path("results.jsonl");
    let began = std::time::Instant::now();
    while !fs::read_to_string(&file).is_ok_and(|text| text.ends_with('\n')) {
        assert!(began.elapsed().as_secs() < 60, "no result");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    killed.kill().expect("it runs");
    killed.wait().expect("it was started");
    fs::write(bed.path("again"), "").expect("it is written");
    for torn in [
        "{\"item\":\"test/fam",
        "",
        "{\"item\":\"x\",\"status\":\"ok\"}",
    ] {
        let mut text = fs::read_to_string(&file).expect("a file");
        text.push_str(torn);
        fs::write(&file, text).expect("it is written");
        let output = command().arg("--resume").arg(&file).output();
        let output = output.expect("it starts");
        assert!(output.status.success(), "{}", output_text(&output));
    }
    let results = bed.results();
    let items: Vec<_> = results.iter().map(|line| line["item"].as_str()).collect();
    let expected = ["test/family/a_passes", "test/family/b_waits", "x"];
    assert_eq!(items, expected.map(Some));
}

/// The functions that are compiled beforehand are those that sessions load.
#[test]
fn steps_find_their_functions_beside_the_program() {
    let Some(bed) = TestBed::new() else { return };
    let program = bed.path("slabwise-gpu");
    fs::copy(env!("CARGO_BIN_EXE_slabwise-gpu"), &program).expect("it is copied");
    let command = |words: &[&str]| {
        let mut command = bed.command_of(&[]);
        let mut own = Command::new(&program);
        own.args(words).current_dir(bed.folder.path());
        let variables = command.env("SLABWISE_CACHE_DIR", "").get_envs();
        own.envs(variables.filter_map(|(name, value)| Some((name, value?))));
        own
    };
    let steps = ["--quick", "--only", "step/mlp", "--only", "step/cnn/bf16"];
    let warm = [&steps[..], &["--device", "here", "--warm", "kernels"]].concat();
    let output = command(&warm).output().expect("it starts");
    assert!(output.status.success(), "{}", output_text(&output));
    let contents = fs::read_to_string(bed.path("kernels/contents.jsonl")).expect("contents");
    let contents: Value = serde_json::from_str(&contents).expect("a line of JSON");
    assert!(
        contents["sm"] == 90 && contents["functions"].as_u64() > Some(20),
        "{contents}"
    );
    let own = ["step/mlp/*slabwise", "step/cnn/bf16/slabwise"];
    let measure = ["--quick", "--results", "results.jsonl", "--only"];
    // The emulator takes minutes to time the candidates of convolutions.
    for (only, tuning, count) in [(own[0], "1", 6), (own[1], "0", 2)] {
        let words = [&measure[..], &[only]].concat();
        let mut command = command(&words);
        let output = command.env("SLABWISE_AUTOTUNE", tuning).output();
        let output = output.expect("it starts");
        let (text, results) = (output_text(&output), bed.results());
        assert!(
            output.status.success() && text.contains("functions are compiled already"),
            "{text}"
        );
        assert_eq!(results.len(), count, "{text}");
        for line in results {
            assert_eq!(line["warmed"], contents["functions"], "{line}");
            assert!(
                line["compiled"] == 0 && line["read"].as_u64() > Some(5),
                "{line}"
            );
        }
        fs::remove_file(bed.path("results.jsonl")).expect("it was written");
    }
    // Others could put code there.
    let shared = fs::Permissions::from_mode(0o777);
    fs::set_permissions(bed.path("kernels"), shared).expect("own folder");
    let output = command(&[&measure[..], &[own[1], "--list"]].concat()).output();
    let text = output_text(&output.expect("it starts"));
    assert!(
        text.contains("can be written to by others") && text.contains(own[1]),
        "{text}"
    );
}

#[test]
fn without_a_gpu_nothing_is_measured() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut command = Command::new(env!("CARGO_BIN_EXE_slabwise-gpu"));
    let output = command
        .env("SLABWISE_LIBCUDA", "no driver")
        .current_dir(folder.path())
        .output()
        .expect("it starts");
    assert!(
        output.status.code() == Some(1)
            && output_text(&output).contains("There is no GPU to measure"),
        "{}",
        output_text(&output)
    );
    let list = Command::new(env!("CARGO_BIN_EXE_slabwise-gpu"))
        .arg("--list")
        .env("SLABWISE_LIBCUDA", "no driver")
        .output();
    let list = output_text(&list.expect("it starts"));
    assert!(
        list.contains("step/resnet50/tf32/torch-graph")
            && list.contains("conv/cnn-32-64-5x5-14/bf16/slabwise"),
        "{list}"
    );
}

#[test]
fn peers_have_as_many_weights() {
    let gpt = "gpt:layers=6,width=384,heads=6,length=256";
    for model in ["mlp", "cnn", "resnet20", "resnet18", "resnet50", "gpt", gpt] {
        let params = slabwise::Params::seeded(0);
        slabwise_models::Model::parse(model)
            .expect("it is known")
            .build(&params);
        let trained = params
            .declared()
            .into_iter()
            .filter(|param| param.is_trained());
        let weights: usize = trained
            .map(|param| param.dims().iter().product::<usize>())
            .sum();
        for script in ["torch_step.py", "jax_step.py"] {
            let script = Path::new(env!("CARGO_MANIFEST_DIR"))
                .join("../peers")
                .join(script);
            let output = Command::new("python3")
                .arg("-B")
                .arg(&script)
                .args(["count", model])
                .env("JAX_PLATFORMS", "cpu")
                .output();
            let output = match output {
                Ok(output) => output,
                Err(e) => return eprintln!("skipped: python3: {e}"),
            };
            let line: Value = serde_json::from_slice(&output.stdout)
                .unwrap_or_else(|e| panic!("{e}: {}", output_text(&output)));
            match line["skipped"].as_str() {
                Some(why) => eprintln!("skipped: {why}"),
                None => assert_eq!(line["weights"], weights, "{model}: {}", script.display()),
            }
        }
    }
}

/// Modelled times need no driver, and no step is faster than its launches and its bytes allow.
#[test]
fn steps_are_modelled_without_a_device() {
    let model = |name: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_slabwise-gpu"));
        command.env("SLABWISE_LIBCUDA", "no library");
        command.args(["--model", name]);
        for steps in ["step/mlp", "step/cnn", "step/resnet20", "step/gpt"] {
            command.args(["--only", steps]);
        }
        command.args(["--kernels", "2"]);
        command.output().expect("it starts")
    };
    let output = model("h100");
    assert!(output.status.success(), "{}", output_text(&output));
    let text = String::from_utf8(output.stdout).expect("text");
    let lines: Vec<Value> = text
        .lines()
        .filter(|line| line.starts_with('{'))
        .map(|line| serde_json::from_str(line).expect("JSON"))
        .collect();
    assert_eq!(lines.len(), 12, "{text}");
    let ms = |line: &Value| line["ms"].as_f64().expect("a time");
    let bytes = |line: &Value| line["bytes"].as_f64().expect("a number");
    for line in &lines {
        let launches = line["launches"].as_f64().expect("a number");
        // 2.3 µs between kernels; 5.6 TB/s from the cache.
        assert!(
            ms(line) >= 2.29e-3 * launches && ms(line) >= bytes(line) / 5.6e9,
            "{line}"
        );
    }
    let of = |name: &str, precision: &str| {
        let is_meant = |line: &&Value| line["modelled"] == name && line["precision"] == precision;
        lines.iter().find(is_meant).expect("a line")
    };
    assert!(ms(of("cnn", "bf16")) < ms(of("cnn", "f32")));
    assert!(ms(of("mlp", "f32")) < ms(of("cnn", "f32")));
    // What mixed precision rounds is stored in halves: all images of a network of convolutions, and
    // of a transformer all but its residual stream, which both precisions move alike.
    let moved = bytes(of("resnet20", "bf16")) / bytes(of("resnet20", "f32"));
    assert!(moved < 0.54, "{moved} of the bytes of f32");
    let moved = bytes(of("gpt", "bf16"));
    assert!(moved < 10.2e9, "{moved} bytes");
    let kernels = text
        .lines()
        .skip_while(|line| !line.starts_with("step/gpt/bf16: "));
    let kernels: Vec<&str> = kernels
        .skip(1)
        .take_while(|line| !line.is_empty())
        .collect();
    assert_eq!(kernels.len(), 2, "{text}");
    assert!(kernels[0].contains("transformer."), "{kernels:?}");
    let refused = model("mars");
    let text = output_text(&refused);
    assert!(
        refused.status.code() == Some(2) && text.contains("a100 (sm_80)"),
        "{text}"
    );
}
