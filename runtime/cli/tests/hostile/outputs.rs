//! Outputs of all commands to places that are not plain files, and to full disks.

use std::fs;
use std::os::unix::fs::{FileTypeExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use super::{ended, faults, slabwise};

/// A folder with a table of buffers.
struct Place {
    folder: tempfile::TempDir,
    table: String,
    graph: String,
}

impl Place {
    fn new() -> Place {
        let folder = tempfile::tempdir().expect("a folder");
        let table = folder.path().join("table.csv");
        fs::write(&table, "id,lower,upper,size\na,0,2,6\nb,1,3,6\n").expect("it is written");
        let graph =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../../planner/fuzz/graphs/chain.json");
        Place {
            table: table.display().to_string(),
            graph: graph.display().to_string(),
            folder,
        }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// All commands that write files, each with one output and the extension of its file name.
    fn commands(&self) -> Vec<(Vec<String>, String)> {
        let (table, graph) = (&self.table, &self.graph);
        let all = [
            (
                format!("pack {table}"),
                vec!["-o out.csv", "-o out.csv.gz", "--svg out.svg"],
            ),
            (
                format!("order {graph}"),
                vec!["-o out.json", "-o out.json.gz"],
            ),
            (
                format!("remat {graph} --budget 100% --time-limit 0.02"),
                vec!["-o out.json"],
            ),
            (
                format!("replay {table}"),
                vec![
                    "--snapshot out.pickle",
                    "--snapshot out.json",
                    "--perfetto out.json",
                ],
            ),
            (
                "plan mlp --batch 1".into(),
                vec![
                    "--svg out.svg",
                    "--html out.html",
                    "--snapshot out.pickle",
                    "--perfetto out.json",
                    "--pprof out.pb",
                ],
            ),
            (
                "plan mlp --batch 1 --frontier".into(),
                vec!["--svg out.svg"],
            ),
        ];
        let of = |(command, options): (String, Vec<&str>)| {
            let command: Vec<String> = command.split(' ').map(String::from).collect();
            let line = move |option: &str| {
                let (option, name) = option.split_once(' ').expect("an option and a name");
                (
                    command
                        .iter()
                        .cloned()
                        .chain([option.to_string()])
                        .collect(),
                    name.to_string(),
                )
            };
            options.into_iter().map(line).collect::<Vec<_>>()
        };
        all.into_iter().flat_map(of).collect()
    }
}

/// Runs a command that writes to `output`.
fn writes(arguments: &[String], output: &Path) -> Output {
    let mut command = slabwise();
    command.args(arguments).arg(output);
    ended(command)
}

fn temporaries(folder: &Path) -> usize {
    let names = fs::read_dir(folder)
        .expect("a folder")
        .map(|entry| entry.expect("an entry").file_name());
    names
        .filter(|name| name.to_string_lossy().starts_with(".slabwise-"))
        .count()
}

#[test]
fn files_keep_their_mode_through_links_and_pipes_stay_pipes() {
    let place = Place::new();
    for (arguments, name) in place.commands() {
        let (file, link) = (place.at("file"), place.at(&name));
        fs::write(&file, "before").expect("it is written");
        fs::set_permissions(&file, fs::Permissions::from_mode(0o640)).expect("it is ours");
        symlink("file", &link).expect("it is made");
        let output = writes(&arguments, &link);
        assert!(
            output.status.success(),
            "{arguments:?}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        assert!(
            fs::symlink_metadata(&link)
                .expect("it is there")
                .is_symlink(),
            "{arguments:?}"
        );
        assert_eq!(
            fs::metadata(&file)
                .expect("it is there")
                .permissions()
                .mode()
                & 0o7777,
            0o640,
            "{arguments:?}"
        );
        let written = fs::read(&file).expect("it is there");
        assert_ne!(written, b"before", "{arguments:?}");
        fs::remove_file(&link).expect("it is there");

        assert!(
            Command::new("mkfifo")
                .arg(&link)
                .status()
                .expect("it is there")
                .success()
        );
        let reader = std::thread::spawn({
            let link = link.clone();
            move || fs::read(link).expect("it is read")
        });
        let output = writes(&arguments, &link);
        assert!(
            output.status.success(),
            "{arguments:?}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        let piped = reader.join().expect("it ends");
        assert!(
            !piped.is_empty()
                && fs::symlink_metadata(&link)
                    .expect("it is there")
                    .file_type()
                    .is_fifo(),
            "{arguments:?}"
        );
        fs::remove_file(&link).expect("it is there");
        assert_eq!(temporaries(place.folder.path()), 0, "{arguments:?}");
    }
}

/// A reader of a report may leave early, but one of a file has lost a part of it.
#[test]
fn a_pipe_whose_reader_leaves_is_an_error() {
    let place = Place::new();
    let pipe = place.at("out.html");
    let made = Command::new("mkfifo").arg(&pipe).status();
    assert!(made.expect("it is there").success());
    let reader = std::thread::spawn({
        let pipe = pipe.clone();
        move || drop(fs::File::open(pipe).expect("it opens"))
    });
    // More than a pipe holds.
    let arguments = ["plan", "resnet20", "--batch", "1", "--html"].map(String::from);
    let output = writes(&arguments, &pipe);
    reader.join().expect("it ends");
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("out.html") && said.contains("pipe"), "{said}");
}

#[test]
fn a_full_disk_or_a_folder_leaves_the_old_file() {
    let place = Place::new();
    fs::create_dir(place.at("folder")).expect("it is made");
    for (arguments, name) in place.commands() {
        let file = place.at(&name);
        fs::write(&file, "before").expect("it is written");
        // As on a full disk, a write beyond the limit fails; the signal that would end the program
        // is ignored.
        let mut full = Command::new("sh");
        full.args([
            "-c",
            "trap '' XFSZ; ulimit -f 0; exec \"$@\"",
            "sh",
            env!("CARGO_BIN_EXE_slabwise"),
        ]);
        full.args(&arguments)
            .arg(&file)
            .env("SLABWISE_LIBCUDA", "no driver");
        let output = ended(full);
        let message = String::from_utf8(output.stderr).expect("text");
        assert_eq!(output.status.code(), Some(1), "{arguments:?}: {message}");
        assert!(
            faults(&message, &name).is_empty()
                && message.starts_with("error: ")
                && !message.contains(".slabwise-"),
            "{message}"
        );
        assert_eq!(
            fs::read(&file).expect("it is there"),
            b"before",
            "{arguments:?}"
        );
        assert_eq!(temporaries(place.folder.path()), 0, "{arguments:?}");
        fs::remove_file(&file).expect("it is there");
    }
    for (arguments, _) in place.commands().into_iter().take(6) {
        let output = writes(&arguments, &place.at("folder"));
        let message = String::from_utf8(output.stderr).expect("text");
        assert!(
            output.status.code() == Some(1) && message.contains("folder: it is a folder"),
            "{arguments:?}: {message}"
        );
    }
}

/// The message names the output as the user wrote it and the reason.
#[test]
fn a_missing_folder_is_named() {
    let place = Place::new();
    let missing = place.at("missing");
    for (arguments, name) in place.commands() {
        let file = missing.join(&name);
        let output = writes(&arguments, &file);
        let message = String::from_utf8(output.stderr).expect("text");
        let [file, folder] = [&file, &missing].map(|path| path.display().to_string());
        let expected = format!("{file}: there is no folder {folder}");
        assert!(
            output.status.code() == Some(1) && message.contains(&expected),
            "{arguments:?}: {message}"
        );
        assert!(!message.contains(".slabwise-"), "{message}");
    }
}

#[test]
fn a_table_is_packed_in_place_or_stays() {
    let place = Place::new();
    let before = fs::read(&place.table).expect("it is there");
    let line = |limit: &str| {
        let mut command = Command::new("sh");
        let script = format!("trap '' XFSZ; ulimit -f {limit}; exec \"$@\"");
        command.args([
            "-c",
            &script,
            "sh",
            env!("CARGO_BIN_EXE_slabwise"),
            "pack",
            &place.table,
            "-o",
            &place.table,
        ]);
        ended(command).status.code()
    };
    assert_eq!(line("0"), Some(1));
    assert_eq!(fs::read(&place.table).expect("it is there"), before);
    assert_eq!(line("unlimited"), Some(0));
    assert!(
        fs::read_to_string(&place.table)
            .expect("it is there")
            .starts_with("id,lower,upper,size,offset\n")
    );
}

#[test]
fn a_dash_is_stdout_and_the_report_goes_elsewhere() {
    let place = Place::new();
    for (arguments, name) in place
        .commands()
        .into_iter()
        .filter(|(_, name)| !name.ends_with(".gz") && !name.ends_with(".pb"))
    {
        // A snapshot is JSON if its name says so.
        let is_same = ["out.csv", "out.svg"].contains(&&*name)
            || ["order", "remat"].contains(&&*arguments[0]);
        let file = place.at(&name);
        assert!(writes(&arguments, &file).status.success());
        for stdout in ["-", "/dev/stdout"] {
            let output = writes(&arguments, Path::new(stdout));
            assert!(
                output.status.success() && !output.stdout.is_empty() && !output.stderr.is_empty(),
                "{arguments:?}"
            );
            assert!(
                !is_same || output.stdout == fs::read(&file).expect("it is there"),
                "{arguments:?} {stdout}"
            );
        }
        fs::remove_file(&file).expect("it is there");
    }
    assert!(!Path::new("-").exists(), "no file of that name");
}

/// Nothing is replaced here: the device only refuses writes.
#[test]
fn a_stdout_that_is_full_is_noticed() {
    let full = || {
        fs::OpenOptions::new()
            .write(true)
            .open("/dev/full")
            .expect("Linux has it")
    };
    for arguments in [
        &["--help"][..],
        &["--version"],
        &["plan", "--help"],
        &["info"],
    ] {
        let output = slabwise()
            .args(arguments)
            .stdout(full())
            .output()
            .expect("it starts");
        assert_eq!(output.status.code(), Some(1), "{arguments:?}");
        assert!(
            String::from_utf8_lossy(&output.stderr).starts_with("error: <stdout>: "),
            "{arguments:?}"
        );
    }
    // The exit code is right even if the error cannot be printed.
    let status = slabwise()
        .args(["pack", "nowhere.csv"])
        .stderr(full())
        .status()
        .expect("it starts");
    assert_eq!(status.code(), Some(2));
    let help = slabwise().arg("--help").output().expect("it starts");
    assert!(
        help.status.success()
            && String::from_utf8_lossy(&help.stdout).contains("Exit codes: 0 done; 1 ")
    );
}
