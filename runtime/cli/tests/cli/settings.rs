//! `slabwise info`, and environment variables.

use super::*;
use slabwise::memory::MemoryConfig;

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
    // `info` reports a value that makes no sense.
    let (code, text, _) = info(Some("lots"));
    assert_eq!(code, Some(0));
    assert!(
        text.contains("refused: SLABWISE_THREADS is \"lots\""),
        "{text}"
    );
    assert!(
        info(Some("")).1.contains("one for each core"),
        "an empty variable is not set"
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
            "a blank variable is not set"
        );
    }
    assert!(
        info(&[("SLABWISE_AUTOTUNE", "0")])
            .1
            .contains("off (from SLABWISE_AUTOTUNE)")
    );
}

#[test]
fn an_invalid_variable_is_wrong_usage_in_every_command() {
    let (_folder, trace) = table(TABLE);
    let variables = MemoryConfig::VARIABLES
        .iter()
        .zip(["cuda", "best", "perhaps", "1.5", "5000", "19", "101"]);
    let switches = [
        (&"SLABWISE_THREADS", "lots"),
        (&"SLABWISE_AUTOTUNE", "abc"),
        (&"SLABWISE_PROFILE", "all"),
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

#[test]
fn a_session_prints_the_profiles_of_its_programs() {
    let output = Command::new(env!("CARGO_BIN_EXE_slabwise"))
        .args(["compare", "mlp", "--batch", "8", "--steps", "2"])
        .env("SLABWISE_PROFILE", "1")
        .output()
        .unwrap();
    let (code, text) = (
        output.status.code(),
        String::from_utf8(output.stderr).unwrap(),
    );
    assert_eq!(code, Some(0), "{text}");
    let tables: Vec<&str> = text.split("each kernel's fastest time:\n").collect();
    assert!(tables.len() > 2, "training and inference: {text}");
    for table in &tables[1..] {
        let head = table.lines().next().unwrap();
        assert!(
            head.starts_with("kernel") && head.ends_with("of floor"),
            "{head}"
        );
        assert!(
            table.lines().any(|line| line.starts_with("hidden1.matmul")),
            "{table}"
        );
        assert!(
            table.contains("floors: measured with") && table.contains("between kernels"),
            "{table}"
        );
    }
}
