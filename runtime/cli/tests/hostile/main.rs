//! Hostile files and command lines: a hundred damaged files of each kind, a hundred command lines
//! with values that make no sense, and outputs to places that are not plain files. Each command
//! ends soon, with 1 or 2 and an error of a few lines; or the damage was harmless, and the values
//! read are sound.
#![cfg(unix)]

mod arguments;
mod damage;
mod files;
mod outputs;
#[path = "../../../../tests/support/readers.rs"]
mod readers;

use std::io::Read;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// The time limit of every command, on a busy machine; a command that exceeds it hangs.
const PATIENCE: Duration = Duration::from_secs(60);

/// The most bytes of a message: a few lines.
const MESSAGE_MAX: usize = 500;

/// A command as on a machine without a GPU.
fn slabwise() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_slabwise"));
    command
        .env("SLABWISE_LIBCUDA", "no driver")
        .env_remove("SLABWISE_THREADS");
    command
}

/// An example's program, if it was built. All are built before the tests run, unless a package or a
/// test is selected.
fn example(name: &str) -> Option<Command> {
    let path = PathBuf::from(env!("CARGO_BIN_EXE_slabwise"))
        .with_file_name("examples")
        .join(name);
    assert!(
        path.is_file() || std::env::var_os("CI").is_none(),
        "{} was not built, and CI is set",
        path.display()
    );
    path.is_file().then(|| {
        let mut command = Command::new(path);
        command.env("SLABWISE_LIBCUDA", "no driver");
        command
    })
}

/// Runs a command that must end within the time limit.
fn ended(mut command: Command) -> Output {
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("it starts");
    let drain = |mut pipe: Box<dyn Read + Send>| {
        std::thread::spawn(move || {
            let mut bytes = Vec::new();
            pipe.read_to_end(&mut bytes).map(|_| bytes).expect("a pipe")
        })
    };
    let stdout = drain(Box::new(child.stdout.take().expect("piped")));
    let stderr = drain(Box::new(child.stderr.take().expect("piped")));
    let status = waited(&mut child).unwrap_or_else(|| panic!("{command:?} does not end"));
    Output {
        status,
        stdout: stdout.join().expect("it is read"),
        stderr: stderr.join().expect("it is read"),
    }
}

/// The status of a child that ends in time; one that does not is killed.
fn waited(child: &mut Child) -> Option<std::process::ExitStatus> {
    let start = Instant::now();
    loop {
        if let Some(status) = child.try_wait().expect("it is ours") {
            return Some(status);
        }
        if start.elapsed() > PATIENCE {
            child.kill().expect("it is ours");
            return None;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// The faults of a message; `names` is the file or the option that it must name.
fn faults(message: &str, names: &str) -> Vec<&'static str> {
    let lower = message.to_lowercase();
    let checks = [
        (!message.trim().is_empty(), "says nothing"),
        (message.contains(names), "does not name the file or option"),
        (message.len() <= MESSAGE_MAX, "is too long"),
        (message.lines().count() <= 8, "has too many lines"),
        (
            !message.chars().any(|c| c.is_control() && c != '\n'),
            "has control characters",
        ),
        (
            !["internal error", "panicked", "unwrap", "backtrace"]
                .iter()
                .any(|word| lower.contains(word)),
            "tells of a fault of its own",
        ),
    ];
    checks
        .iter()
        .filter(|(holds, _)| !holds)
        .map(|(_, fault)| *fault)
        .collect()
}

/// The exit code and the checked message of a command with a bad input.
fn refused(command: Command, names: &str) -> (i32, String) {
    let shown = format!("{command:?}");
    let output = ended(command);
    let code = output
        .status
        .code()
        .unwrap_or_else(|| panic!("{shown}: {}", output.status));
    let message = String::from_utf8(output.stderr)
        .unwrap_or_else(|_| panic!("{shown}: a message that is no text"));
    if code == 0 {
        return (code, message);
    }
    assert!(code == 1 || code == 2, "{shown} ends with {code}");
    let mut faults = faults(&message, names);
    if !message.starts_with("error: ") {
        faults.push("does not begin with the form of an error");
    }
    assert!(
        faults.is_empty(),
        "{shown} ends with {code}, and its message {}:\n{message}",
        faults.join(", ")
    );
    (code, message)
}
