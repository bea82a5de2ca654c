//! `slabwise launch`: output, exit codes, restarts.

use std::env;
use std::path::PathBuf;
use std::process::{Command, Output};

/// The MPI library of the wheel in `target/mpi`, or the one that the variable names.
fn library() -> Option<PathBuf> {
    let this = env::current_exe().expect("this program");
    let target = this.ancestors().nth(3).expect("target/debug/deps");
    let file = target.join("mpi/mpich/lib/libmpi_abi.so.1");
    if file.is_file() {
        return Some(file);
    }
    let missing = format!("{} is missing", file.display());
    assert!(env::var("CI").is_err(), "{missing}");
    println!("skipped: {missing}");
    None
}

fn launch(library: &str, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_slabwise"));
    command
        .arg("launch")
        .args(arguments)
        .env("SLABWISE_LIBMPI", library);
    command.output().expect("a program that starts")
}

fn lines(bytes: &[u8]) -> Vec<String> {
    let mut lines: Vec<String> = String::from_utf8_lossy(bytes)
        .lines()
        .map(str::to_string)
        .collect();
    lines.sort();
    lines
}

#[test]
fn lines_of_ranks_are_forwarded_with_their_ranks() {
    let Some(library) = library() else { return };
    let script = "echo one; echo two >&2; printf three";
    let output = launch(
        &library.to_string_lossy(),
        &["-n", "2", "--", "sh", "-c", script],
    );
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert_eq!(
        lines(&output.stdout),
        ["[0] one", "[0] three", "[1] one", "[1] three"]
    );
    assert_eq!(lines(&output.stderr), ["[0] two", "[1] two"]);
}

#[test]
fn a_failing_rank_fails_the_launch_after_its_restarts() {
    let Some(library) = library() else { return };
    let library = library.to_string_lossy();
    let script = "test $PMI_RANK = 0 || kill -9 $$";
    let output = launch(
        &library,
        &["-n", "2", "--restarts", "1", "--", "sh", "-c", script],
    );
    assert!(
        output.status.code().is_some_and(|code| code != 0),
        "{output:?}"
    );
    let told = lines(&output.stderr);
    let killed = told
        .iter()
        .filter(|l| l.ends_with("rank 1 was killed by signal 9"))
        .count();
    assert_eq!(killed, 2, "{told:?}");
    assert!(
        told.contains(&"slabwise launch: restart 1 of 1".into()),
        "{told:?}"
    );
}

#[test]
fn a_program_or_a_library_that_is_missing_is_named() {
    let output = launch("/nowhere/libmpi.so", &["-n", "2", "--", "true"]);
    assert_eq!(output.status.code(), Some(1));
    let told = lines(&output.stderr).join(" ");
    assert!(
        told.contains("no MPI library was found (/nowhere/libmpi.so"),
        "{told}"
    );
    assert!(told.contains("pip install mpich"), "{told}");
    let Some(library) = library() else { return };
    let output = launch(
        &library.to_string_lossy(),
        &["-n", "1", "--", "/nowhere/program"],
    );
    assert_ne!(output.status.code(), Some(0));
    assert!(
        lines(&output.stderr).join(" ").contains("/nowhere/program"),
        "{output:?}"
    );
}

#[test]
fn wrong_usage_exits_with_2() {
    for wrong in [
        &["-n", "0", "--", "true"][..],
        &["-n", "2"],
        &["--", "true"],
    ] {
        let output = launch("", wrong);
        assert_eq!(output.status.code(), Some(2), "{wrong:?}: {output:?}");
    }
}
