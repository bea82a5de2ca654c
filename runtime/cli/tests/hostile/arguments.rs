//! A hundred command lines and more with values that make no sense.

use std::path::Path;

use super::{example, refused, slabwise};

/// Texts that are no count.
const NO_COUNT: [&str; 8] = [
    "0",
    "-1",
    "1.5",
    "many",
    "",
    "99999999999999999999",
    "0x10",
    "１",
];
const NO_SECONDS: [&str; 6] = ["-1", "nan", "inf", "soon", "", "1e300"];
const NO_BYTES: [&str; 8] = [
    "-1",
    "lots",
    "",
    "5 parsecs",
    "16EiB",
    "1e9",
    "1.2.3MiB",
    "99999999999999999999",
];
const NO_BUDGET: [&str; 6] = ["-5%", "lots", "", "nan%", "16EiB", "5 M"];
const NO_LINK: [&str; 6] = ["0", "-1", "fast", "", "nan", "16 parsecs"];
const NO_NAME: [&str; 5] = ["", "resnet99", "MLP", "\u{1b}[31m", "--"];

/// Commands, an option of each, and values that it does not take.
fn commands(table: &str, graph: &str) -> Vec<(String, &'static str, &'static [&'static str])> {
    let (pack, remat, replay) = (
        format!("pack {table}"),
        format!("remat {graph} --budget 50%"),
        format!("replay {table}"),
    );
    let of = |command: &str, option, values| (command.to_string(), option, values);
    vec![
        of("plan", "", &NO_NAME[..]),
        of("plan mlp", "--batch", &NO_COUNT),
        of("plan mlp", "--budget", &NO_BUDGET),
        of("plan mlp --budget 50%", "--offload", &NO_LINK),
        of(
            "plan mlp",
            "--device",
            &["tpu", "", "cuda", "cuda:x", "cuda:-1"],
        ),
        of("plan mlp", "--optimizer", &["sdg", "", "ADAM"]),
        of("compare", "", &NO_NAME),
        of("compare mlp", "--batch", &NO_COUNT),
        of("compare mlp", "--steps", &NO_COUNT),
        of("bench", "", &NO_NAME),
        of("bench mlp", "--threads", &["0", "1025", "-1", "all", ""]),
        of("bench mlp", "--steps", &NO_COUNT),
        of("bench gemm", "--n", &NO_COUNT),
        of("bench mlp", "--budget", &NO_BUDGET),
        of(&pack, "--capacity", &NO_BYTES),
        of(&pack, "--time-limit", &NO_SECONDS),
        of(&pack, "--threads", &["0", "1025", "-1", "all", ""]),
        of(&pack, "--align", &["0", "3", "-4", "1.5", "", "two"]),
        of(&pack, "--seed", &["-1", "x", "", "1.5"]),
        of(&format!("order {graph}"), "--time-limit", &NO_SECONDS),
        of(&format!("remat {graph}"), "--budget", &NO_BUDGET),
        of(&remat, "--time-limit", &NO_SECONDS),
        of(&remat, "--offload", &["-1", "nan", "inf", "fast", ""]),
        of(&replay, "--policy", &["best", "", "TLSF"]),
        of(
            &replay,
            "--capacity",
            &["-1x", "0x", "nanx", "x", "lots", "", "16EiB"],
        ),
    ]
}

#[test]
fn invalid_values_are_wrong_usage() {
    let folder = tempfile::tempdir().expect("a folder");
    let table = folder.path().join("table.csv");
    std::fs::write(&table, "id,lower,upper,size\na,0,2,6\nb,1,3,6\n").expect("it is written");
    let graph = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../planner/fuzz/graphs/chain.json");
    let mut count = 0;
    for (command, option, values) in
        commands(&table.display().to_string(), &graph.display().to_string())
    {
        for value in values {
            let mut line = slabwise();
            line.args(command.split(' '));
            match option {
                "" => line.arg(value),
                _ => line.arg(format!("{option}={value}")),
            };
            let (code, message) = refused(line, if option.is_empty() { "" } else { option });
            assert_eq!(code, 2, "{command} {option}={value:?}: {message}");
            count += 1;
        }
    }
    assert!(count >= 100, "{count} command lines");
}

#[test]
fn missing_inputs_and_outputs_are_named() {
    let folder = tempfile::tempdir().expect("a folder");
    let table = folder.path().join("table.csv");
    std::fs::write(&table, "id,lower,upper,size\na,0,2,6\n").expect("it is written");
    let [table, nowhere, own] = [
        table,
        folder.path().join("none/out.bin"),
        folder.path().into(),
    ]
    .map(|path| path.display().to_string());
    for (line, names) in [
        ("pack nowhere.csv", "nowhere.csv"),
        ("order nowhere.json", "nowhere.json"),
        ("remat nowhere.json --budget 50%", "nowhere.json"),
        ("replay nowhere.csv", "nowhere.csv"),
        ("diff nowhere.json nowhere.json", "nowhere.json"),
        ("pack FOLDER", &own),
        ("order FOLDER", &own),
        ("replay FOLDER", &own),
        ("diff FOLDER FOLDER", &own),
        ("pack TABLE --capacity rom=4", "rom"),
        ("pack TABLE --capacity rom=", "--capacity"),
        ("pack TABLE -o - --svg -", "stdout"),
        ("plan mlp --svg - --html -", "stdout"),
        ("plan mlp --no-run", "--html"),
        ("replay TABLE --all --policy tlsf", "--all"),
        ("plan mlp mlp", "mlp"),
        ("nothing", "nothing"),
        ("plan mlp --bach 3", "--bach"),
    ] {
        let mut command = slabwise();
        command.args(
            line.split(' ')
                .map(|word| word.replace("TABLE", &table).replace("FOLDER", &own)),
        );
        let (code, message) = refused(command, names);
        assert_eq!(code, 2, "{line}: {message}");
    }
    for line in [
        "pack TABLE --svg NOWHERE",
        "pack TABLE -o NOWHERE",
        "replay TABLE --snapshot NOWHERE",
        "replay TABLE --perfetto NOWHERE",
    ] {
        let mut command = slabwise();
        command.args(
            line.split(' ')
                .map(|word| word.replace("TABLE", &table).replace("NOWHERE", &nowhere)),
        );
        assert_eq!(refused(command, &nowhere).0, 1, "{line}");
    }
}

/// A message stays a message, independently of the text that it quotes.
#[test]
fn endless_and_invisible_values_are_not_echoed() {
    let (long, hidden) = ("x".repeat(100_000), "a\u{1b}[2Jb\u{7}c\u{202e}d");
    for value in [&*long, hidden] {
        for (line, option) in [
            ("plan", ""),
            ("bench", ""),
            ("plan mlp", "--batch"),
            ("plan mlp", "--budget"),
            ("plan mlp", "--device"),
            ("plan mlp", "--optimizer"),
            ("pack a.csv", "--capacity"),
            ("pack a.csv", "--time-limit"),
            ("replay a.csv", "--policy"),
            ("remat a.json", "--budget"),
        ] {
            let mut command = slabwise();
            command.args(line.split(' '));
            match option {
                "" => command.arg(value),
                _ => command.arg(format!("{option}={value}")),
            };
            assert_eq!(refused(command, option).0, 2, "{line} {option}");
        }
        for variable in ["SLABWISE_THREADS", "SLABWISE_POOL", "SLABWISE_AUTOTUNE"] {
            let mut command = slabwise();
            command.args(["plan", "mlp"]).env(variable, value);
            assert_eq!(refused(command, variable).0, 2);
        }
    }
    let mut command = slabwise();
    command.arg("pack").arg(hidden);
    assert_eq!(refused(command, "[2Jb").0, 2);
}

/// Options, and values that they do not take.
type Options = &'static [(&'static str, &'static [&'static str])];

#[test]
fn options_of_the_examples_are_checked() {
    const RUN: Options = &[
        ("--seed", &["-1", "x", ""]),
        ("--threads", &["0", "1025", "all"]),
        ("--device", &["tpu", "cuda:x"]),
        ("--budget", &["lots", "-1%", "5 parsecs"]),
        ("--resume", &["nowhere.safetensors", "/"]),
    ];
    let own: [(&str, Options); 5] = [
        (
            "mnist_mlp",
            &[
                ("--epochs", &["0", "many"]),
                ("--batch", &["0", "60001"]),
                ("--data", &["nowhere"]),
            ],
        ),
        (
            "mnist_cnn",
            &[
                ("--epochs", &["-1"]),
                ("--batch", &["x"]),
                ("--data", &["/"]),
            ],
        ),
        (
            "char_gpt",
            &[
                ("--data", &["nowhere.txt", "/"]),
                ("--steps", &["0"]),
                ("--length", &["1", "4097"]),
                ("--width", &["0", "5"]),
                ("--heads", &["65", "7"]),
                ("--temperature", &["0", "-1", "nan"]),
                ("--rate", &["fast"]),
            ],
        ),
        (
            "cifar_resnet",
            &[
                ("--data", &["nowhere"]),
                ("--epochs", &["0"]),
                ("--images", &["0"]),
                ("--rate", &["x"]),
            ],
        ),
        (
            "dynamic_shapes",
            &[
                ("--steps", &["0"]),
                ("--longest", &["0", "65537"]),
                ("--width", &["0"]),
            ],
        ),
    ];
    for (name, options) in own {
        for (option, values) in options.iter().chain(
            RUN.iter()
                .filter(|(option, _)| *option != "--resume" || name == "dynamic_shapes"),
        ) {
            for value in *values {
                let Some(mut command) = example(name) else {
                    return;
                };
                command.arg(format!("{option}={value}"));
                let file = if ["--data", "--resume"].contains(option) {
                    value
                } else {
                    option
                };
                let (code, message) = refused(command, file.trim_start_matches("--"));
                assert_eq!(code, 2, "{name} {option}={value}: {message}");
            }
        }
    }
}
