//! The test cases of the `onnx` package against the importer: each one gives the recorded results,
//! or is refused for the reason that `cases.txt` lists. A case leaves `pass` only by an edit of
//! that list; `UPDATE_EXPECT=1` rewrites it. `cases.py` makes the files; without Python or the
//! package the test says so and is skipped, except where `CI` is set.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::{env, fs, thread};

use slabwise_onnx::Error;
use slabwise_onnx::check::{CheckOptions, Verdict, check_case};

/// The folder of the cases, which are made if they are missing; `None` where they cannot be.
fn cases() -> Option<PathBuf> {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let target = match env::var_os("CARGO_TARGET_DIR") {
        Some(folder) => PathBuf::from(folder),
        None => here.join("../../target"),
    };
    let folder = target.join("onnx-cases");
    let python = env::var("SLABWISE_PYTHON").unwrap_or_else(|_| "python3".into());
    let made = Command::new(&python)
        .arg(here.join("cases.py"))
        .arg(&folder)
        .output();
    let reason = match made {
        Ok(output) if output.status.success() => return Some(folder),
        Ok(output) => String::from_utf8_lossy(&output.stderr).into_owned(),
        Err(error) => error.to_string(),
    };
    assert!(
        env::var_os("CI").is_none(),
        "{python} cannot make the cases: {reason}"
    );
    eprintln!("skipped: {python} with the packages onnx 1.23.2 and numpy is needed: {reason}");
    None
}

/// The folders that have a model, by name.
fn all(root: &Path) -> Vec<(String, PathBuf)> {
    let mut found = Vec::new();
    for kind in [
        "node",
        "pytorch-converted",
        "pytorch-operator",
        "simple",
        "light",
    ] {
        let entries = fs::read_dir(root.join(kind)).expect("the folder was made");
        for entry in entries {
            let path = entry.expect("it can be listed").path();
            if path.join("model.onnx").exists() {
                let name = path.file_name().expect("it has a name").to_string_lossy();
                found.push((format!("{kind}/{name}"), path));
            }
        }
    }
    found.sort();
    found
}

/// One line about a case.
fn verdict(folder: &Path) -> String {
    let options = CheckOptions {
        narrow: true,
        ..CheckOptions::default()
    };
    let mut sets: Vec<PathBuf> = fs::read_dir(folder)
        .expect("the folder was listed")
        .map(|entry| entry.expect("it can be listed").path())
        .filter(|path| path.is_dir())
        .collect();
    sets.sort();
    for set in &sets {
        let run = || check_case(&folder.join("model.onnx"), set, &options);
        match catch_unwind(AssertUnwindSafe(run)) {
            Ok(Ok(Verdict::Match)) => {}
            Ok(Ok(Verdict::Differ(lines))) => return format!("WRONG: {}", lines.join("; ")),
            Ok(Err(Error::Refused(refusals))) => {
                let first = &refusals[0];
                return format!(
                    "refused: {}: {}",
                    first.operator,
                    first.reason.replace('\n', " ")
                );
            }
            Ok(Err(error)) => {
                let text = error.to_string().replace(&*set.to_string_lossy(), "…");
                let text = text.replace(&*folder.to_string_lossy(), "…");
                return format!("refused: {}", text.lines().next().unwrap_or_default());
            }
            Err(_) => return "PANIC".into(),
        }
    }
    match sets.is_empty() {
        true => "WRONG: no data".into(),
        false => "pass".into(),
    }
}

#[test]
fn cases_of_the_package() {
    let Some(root) = cases() else { return };
    let filter = env::var("ONNX_CASES").unwrap_or_default();
    let cases: Vec<_> = all(&root)
        .into_iter()
        .filter(|(name, _)| name.contains(&filter))
        .collect();
    let (next, verdicts) = (AtomicUsize::new(0), Mutex::new(BTreeMap::new()));
    let threads = thread::available_parallelism().map_or(1, Into::into);
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some((name, folder)) = cases.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let line = verdict(folder);
                    verdicts
                        .lock()
                        .expect("no panic")
                        .insert(name.clone(), line);
                }
            });
        }
    });
    let verdicts = verdicts.into_inner().expect("no panic");
    let mut counts: BTreeMap<(&str, &str), usize> = BTreeMap::new();
    let mut text = String::new();
    for (name, line) in &verdicts {
        let kind = name.split('/').next().unwrap_or_default();
        let verdict = line.split(':').next().unwrap_or_default();
        *counts.entry((kind, verdict)).or_default() += 1;
        writeln!(text, "{name}: {line}").expect("to a string");
    }
    for ((kind, verdict), n) in &counts {
        eprintln!("{kind:18} {verdict:8} {n}");
    }
    if !filter.is_empty() {
        eprint!("{text}");
        return;
    }
    let table = Path::new(env!("CARGO_MANIFEST_DIR")).join("cases.txt");
    if env::var_os("UPDATE_EXPECT").is_some() {
        fs::write(&table, &text).expect("the table can be written");
    }
    let bad: Vec<&str> = text
        .lines()
        .filter(|line| line.contains(": WRONG") || line.contains(": PANIC"))
        .collect();
    assert!(
        bad.is_empty(),
        "{} cases fail:\n{}",
        bad.len(),
        bad.join("\n")
    );
    let expected = fs::read_to_string(&table).unwrap_or_default();
    let listed: BTreeMap<&str, &str> = expected
        .lines()
        .filter_map(|line| line.split_once(": "))
        .collect();
    let changed: Vec<String> = verdicts
        .iter()
        .filter(|(name, line)| listed.get(name.as_str()) != Some(&line.as_str()))
        .map(|(name, line)| format!("{name}: {line}"))
        .collect();
    assert!(
        changed.is_empty(),
        "cases.txt says otherwise of:\n{}",
        changed.join("\n")
    );
    assert_eq!(
        listed.len(),
        verdicts.len(),
        "cases.txt lists cases that are gone"
    );
}
