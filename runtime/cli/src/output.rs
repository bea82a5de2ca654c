//! Output of commands: text and files.

use std::fmt::Display;
use std::io::{ErrorKind, Write, stderr, stdout};
use std::path::Path;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use clap::error::{ContextKind, ContextValue};
use slabwise::{Error, Result};
use slabwise_planner::{files, shortened, widest};

/// The exit code of wrong usage.
pub const WRONG_USAGE: u8 = 2;

/// Most characters of a line of an error message: enough for sentences and a path, not for a file
/// that is echoed.
const LINE_MAX: usize = 2000;
/// The same for a mistake in an argument, and for the argument in it.
const USAGE_MAX: usize = 360;
const VALUE_MAX: usize = 80;

/// Whether an output goes to stdout, so that reports go to stderr.
static IS_TAKEN: AtomicBool = AtomicBool::new(false);

/// Whether an output of this name goes to stdout.
fn is_stdout(path: &Path) -> bool {
    [Path::new("-"), Path::new("/dev/stdout")].contains(&path)
}

/// Whether an error of this path is one of stdout or stderr.
pub fn is_standard(path: &Path) -> bool {
    is_stdout(path) || [Path::new("<stdout>"), Path::new("<stderr>")].contains(&path)
}

/// Notes which output goes to stdout.
///
/// # Errors
/// If more than one output would.
pub fn to_stdout(outputs: &[&Path]) -> std::result::Result<(), String> {
    match outputs.iter().filter(|path| is_stdout(path)).count() {
        0 => Ok(()),
        1 => {
            IS_TAKEN.store(true, Ordering::Relaxed);
            Ok(())
        }
        several => Err(format!(
            "{several} outputs name stdout, which accepts one; name files for the others"
        )),
    }
}

/// Writes an output: a file as a whole (see [`files::replace`]), or to stdout.
pub fn save(path: &Path, bytes: &[u8]) -> Result<()> {
    let written = if is_stdout(path) {
        stdout().write_all(bytes).and_then(|()| stdout().flush())
    } else {
        files::replace(path, bytes)
    };
    written.map_err(|source| Error::Io {
        path: path.into(),
        source,
    })
}

/// Writes a line of the report to stdout. A reader that has gone away is an error like any other,
/// not a panic.
pub fn line(text: impl Display) -> Result<()> {
    if IS_TAKEN.load(Ordering::Relaxed) {
        return writeln!(stderr(), "{text}").map_err(|source| Error::Io {
            path: "<stderr>".into(),
            source,
        });
    }
    writeln!(stdout(), "{text}").map_err(|source| Error::Io {
        path: "<stdout>".into(),
        source,
    })
}

/// A message without control characters and without endless lines, whichever text it quotes.
fn legible(text: &str, most: usize) -> String {
    text.lines()
        .map(|line| shortened(line, most))
        .collect::<Vec<_>>()
        .join("\n")
}

/// Reports why a command fails; if stderr is closed, the exit code remains.
pub fn complain(reason: impl Display) {
    let _ = writeln!(
        stderr(),
        "{}",
        legible(&format!("error: {reason}"), LINE_MAX)
    );
}

/// Reports a defect of an argument or an input file.
pub fn bad_input(reason: impl Display) -> Result<ExitCode> {
    complain(reason);
    Ok(WRONG_USAGE.into())
}

/// Prints the result of parsing in place of a command: requested help, or the mistake in the
/// arguments.
pub fn told(mut found: clap::Error) -> ExitCode {
    for kind in [
        ContextKind::InvalidValue,
        ContextKind::InvalidArg,
        ContextKind::InvalidSubcommand,
    ] {
        if let Some(ContextValue::String(given)) = found.get(kind) {
            let shown = shortened(given, VALUE_MAX);
            found.insert(kind, ContextValue::String(shown));
        }
    }
    let text = found.to_string();
    let shown = legible(&text, USAGE_MAX);
    if found.use_stderr() && shown != text.trim_end() {
        let _ = writeln!(stderr(), "{shown}");
        return WRONG_USAGE.into();
    }
    match found.print().and_then(|()| stdout().flush()) {
        Err(error) if !found.use_stderr() && error.kind() != ErrorKind::BrokenPipe => {
            complain(format_args!("<stdout>: {error}"));
            ExitCode::FAILURE
        }
        _ => u8::try_from(found.exit_code())
            .unwrap_or(WRONG_USAGE)
            .into(),
    }
}

/// Times of repeated work, in milliseconds.
#[derive(Default)]
pub struct Times(Vec<f64>);

impl Times {
    /// Does `work` and records its duration.
    pub fn time<T>(&mut self, work: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let result = work();
        self.0.push(start.elapsed().as_secs_f64() * 1e3);
        result
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// The median; of an even number, the mean of the two middle ones.
    pub fn median(&self) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        let half = sorted.len() / 2;
        match sorted.len() {
            0 => f64::NAN,
            n if n % 2 == 1 => sorted[half],
            _ => (sorted[half - 1] + sorted[half]) / 2.0,
        }
    }

    /// The shortest.
    pub fn min(&self) -> f64 {
        self.0.iter().copied().fold(f64::INFINITY, f64::min)
    }
}

/// Names and values, one pair a line, the values under each other.
pub fn pairs<N: AsRef<str>>(pairs: &[(N, String)]) -> Result<()> {
    let width = widest(pairs.iter().map(|(name, _)| name.as_ref()));
    pairs
        .iter()
        .try_for_each(|(name, value)| line(format_args!("{:<width$}  {value}", name.as_ref())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_and_minima() {
        assert!(Times::default().median().is_nan());
        assert_eq!(Times(vec![3.0, 1.0, 2.0]).median(), 2.0);
        let even = Times(vec![4.0, 1.0, 2.0, 8.0]);
        assert_eq!((even.median(), even.min(), even.count()), (3.0, 1.0, 4));
    }

    #[test]
    fn a_name_longer_than_the_formatter_pads_to_is_printed() {
        pairs(&[("x".repeat(70_000), "1".to_string())]).expect("it is printed");
    }
}
