//! Worlds of processes: exchanges in three binary interfaces of MPI, the bits of training, and
//! ranks that die or hang.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

/// A library of MPI, with the launcher that belongs to it.
struct Mpi {
    name: &'static str,
    folder: PathBuf,
    /// The library's file, if not the first that is found.
    library: Option<&'static str>,
}

const RANK: &str = env!("CARGO_BIN_EXE_mpi-rank");

/// The folder of the libraries; `None` if they cannot be had on this machine, which is a failure in
/// CI.
fn fetched() -> Option<&'static Path> {
    static FOLDER: OnceLock<Option<PathBuf>> = OnceLock::new();
    let folder = FOLDER.get_or_init(|| {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("../mpi");
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("fetch.sh");
        let done = Command::new("bash").arg(script).arg(&folder).output();
        let done = done.is_ok_and(|output| output.status.success());
        assert!(
            done || std::env::var_os("CI").is_none(),
            "MPI's wheels cannot be had"
        );
        let whole = || folder.canonicalize().expect("it is there");
        done.then(whole)
    });
    if folder.is_none() {
        eprintln!("skipped: no MPI (tests/mpi/fetch.sh fetches it by pip)");
    }
    folder.as_deref()
}

fn all() -> Vec<Mpi> {
    let Some(folder) = fetched() else {
        return Vec::new();
    };
    let mpi = |name, package, library| Mpi {
        name,
        folder: folder.join(package),
        library,
    };
    vec![
        mpi("the standard's interface", "mpich", None),
        mpi("MPICH's interface", "mpich", Some("libmpi.so.12")),
        mpi("Open MPI's interface", "openmpi", None),
    ]
}

impl Mpi {
    fn is_open(&self) -> bool {
        self.folder.ends_with("openmpi")
    }

    /// `mpiexec` with some ranks of the test program.
    fn command(&self, ranks: usize, arguments: &[&str]) -> Command {
        let bin = self.folder.join("bin");
        let path = std::env::var("PATH").unwrap_or_default();
        let mut command = Command::new(bin.join("mpiexec"));
        command.env("PATH", format!("{}:{path}", bin.display()));
        if self.is_open() {
            command.args([
                "--allow-run-as-root",
                "--oversubscribe",
                "--bind-to",
                "none",
            ]);
            command.env("OPAL_PREFIX", &self.folder);
            command.env("PRTE_PREFIX", &self.folder);
        } else {
            // More ranks than cores: those that wait sleep.
            command.env("MPIR_CVAR_POLLS_BEFORE_YIELD", "1");
            command.env("MPIR_CVAR_CH4_PROGRESS_THROTTLE", "true");
            command.env("MPIR_CVAR_CH4_PROGRESS_THROTTLE_NO_PROGRESS_COUNT", "1");
            command.arg("-disable-auto-cleanup");
        }
        if let Some(library) = self.library {
            command.env("SLABWISE_LIBMPI", self.folder.join("lib").join(library));
        }
        command
            .args(["-n", &ranks.to_string(), RANK])
            .args(arguments);
        command
    }

    fn run(&self, ranks: usize, arguments: &[&str]) -> Output {
        let mut command = self.command(ranks, arguments);
        command.output().expect("mpiexec starts")
    }
}

fn text(output: &Output) -> String {
    let streams = [&output.stdout, &output.stderr];
    streams.map(|bytes| String::from_utf8_lossy(bytes)).concat()
}

#[test]
fn every_interface_exchanges_bytes() {
    for mpi in all() {
        for ranks in [2, 3] {
            let output = mpi.run(ranks, &["exchange"]);
            let shown = text(&output);
            assert!(
                output.status.success(),
                "{}, {ranks} ranks: {shown}",
                mpi.name
            );
            for rank in 0..ranks {
                let line = format!("exchanged as rank {rank} of {ranks}");
                assert!(shown.contains(&line), "{}: {shown}", mpi.name);
            }
        }
    }
}

/// The data behind a file's header.
fn data(file: &Path) -> Vec<u8> {
    let bytes = std::fs::read(file).expect("the file is there");
    let header = u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes"));
    bytes[8 + header as usize..].to_vec()
}

#[test]
fn processes_have_the_bits_of_one() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("weights.safetensors");
    let name = file.to_str().expect("a name");
    let mut expected = None;
    for mpi in all() {
        let alone = expected.get_or_insert_with(|| {
            let train = ["train", "replicated", "4", "3", name];
            let output = Command::new(RANK).args(train).output().expect("it starts");
            assert!(output.status.success(), "{}", text(&output));
            data(&file)
        });
        for (ranks, strategy) in [(2, "replicated"), (4, "sharded")] {
            std::fs::remove_file(&file).expect("it was there");
            let output = mpi.run(ranks, &["train", strategy, "4", "3", name]);
            assert!(output.status.success(), "{}: {}", mpi.name, text(&output));
            assert!(
                data(&file) == *alone,
                "{}, {ranks} ranks, {strategy}",
                mpi.name
            );
        }
    }
}

/// The lines of a run of endless steps, each with the time at which it came, until all ranks have
/// ended. `act` is called with the process of every rank once all have started.
fn watched(
    mpi: &Mpi,
    arguments: &[&str],
    patience: &str,
    act: impl FnOnce(&[u32]),
) -> Vec<(Instant, String)> {
    let ranks = 3;
    let mut command = mpi.command(ranks, arguments);
    command.env("SLABWISE_PATIENCE", patience);
    let mut child = command
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("mpiexec starts");
    let (sender, lines) = channel();
    let stdout = BufReader::new(child.stdout.take().expect("piped"));
    std::thread::spawn(move || {
        for line in stdout.lines().map_while(Result::ok) {
            if sender.send((Instant::now(), line)).is_err() {
                return;
            }
        }
    });
    let (mut processes, mut seen) = (vec![0; ranks], Vec::new());
    let mut act = Some(act);
    let mut started = 0;
    while let Ok((at, line)) = lines.recv_timeout(Duration::from_secs(60)) {
        let words: Vec<&str> = line.split(' ').collect();
        if let ["process", process, "is", "rank", rank] = words[..] {
            let rank: usize = rank.parse().expect("a rank");
            processes[rank] = process.parse().expect("a process");
            started += 1;
            if started == ranks {
                std::thread::sleep(Duration::from_millis(700));
                if let Some(act) = act.take() {
                    act(&processes);
                }
            }
        }
        let ends = line.starts_with("error:");
        seen.push((at, line));
        // One rank has died or hangs.
        let ended = seen.iter().filter(|(_, line)| line.starts_with("error:"));
        if ends && ended.count() + 1 == ranks {
            break;
        }
    }
    if arguments.contains(&"hang") {
        for process in &processes {
            let kill = ["-9".to_string(), process.to_string()];
            let _ = Command::new("kill")
                .args(kill)
                .stderr(Stdio::null())
                .status();
        }
    }
    let end = Instant::now() + Duration::from_secs(5);
    let lives = |process: &u32| Path::new(&format!("/proc/{process}/exe")).exists();
    while processes.iter().any(lives) && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(50));
    }
    let left: Vec<_> = processes.iter().filter(|p| lives(p)).collect();
    let _ = child.kill();
    let _ = child.wait();
    assert!(left.is_empty(), "ranks are left: {left:?} after {seen:?}");
    seen
}

#[test]
fn a_rank_that_hangs_is_named() {
    for mpi in all() {
        let seen = watched(&mpi, &["guarded", "hang", "1"], "2", |_| {
            // The rank that hangs is ended by the test, once the others have spoken.
        });
        let named = |line: &&(Instant, String)| line.1.contains("has waited 2.0 s for rank 1");
        assert_eq!(
            seen.iter().filter(named).count(),
            2,
            "{}: {seen:?}",
            mpi.name
        );
    }
}

#[test]
fn a_rank_that_dies_is_named() {
    for mpi in all() {
        let mut killed = None;
        let seen = watched(&mpi, &["guarded", "endless"], "60", |processes| {
            let process = i32::try_from(processes[2]).expect("a process");
            killed = Some(Instant::now());
            let status = Command::new("kill")
                .args(["-9", &process.to_string()])
                .status();
            assert!(status.is_ok_and(|s| s.success()), "it is killed");
        });
        let killed = killed.expect("all ranks started");
        let named: Vec<_> = seen
            .iter()
            .filter(|(_, line)| line.contains("rank 2 of 3 is gone"))
            .collect();
        assert_eq!(named.len(), 2, "{}: {seen:?}", mpi.name);
        for (at, line) in named {
            assert!(
                *at - killed < Duration::from_secs(5),
                "{}: {line}",
                mpi.name
            );
        }
    }
}

#[test]
fn mistakes_of_launching_are_told() {
    let alone = |variables: &[(&str, &str)]| {
        let mut command = Command::new(RANK);
        command.arg("endless").envs(variables.iter().copied());
        text(&command.output().expect("it starts"))
    };
    let shown = alone(&[
        ("RANK", "1"),
        ("WORLD_SIZE", "2"),
        ("MASTER_ADDR", "localhost"),
    ]);
    assert!(shown.contains("ranks on CPUs talk through MPI"), "{shown}");
    let absent = [
        ("PMI_RANK", "1"),
        ("PMI_SIZE", "2"),
        ("SLABWISE_LIBMPI", "/nowhere/libmpi.so.12"),
    ];
    let shown = alone(&absent);
    assert!(
        shown.contains("/nowhere/libmpi.so.12 cannot be used as MPI"),
        "{shown}"
    );
    let other = alone(&[
        ("PMI_RANK", "1"),
        ("PMI_SIZE", "2"),
        ("SLABWISE_LIBMPI", "libc.so.6"),
    ]);
    assert!(other.contains("it has no MPI_Init_thread"), "{other}");
    let shown = alone(&[("PMI_RANK", "one"), ("PMI_SIZE", "2")]);
    assert!(
        shown.contains("PMI_RANK is \"one\", not a number"),
        "{shown}"
    );
    let shown = alone(&[
        ("PMI_RANK", "0"),
        ("PMI_SIZE", "2"),
        ("SLABWISE_PATIENCE", "soon"),
    ]);
    assert!(shown.contains("SLABWISE_PATIENCE is \"soon\""), "{shown}");
    let Some(folder) = fetched() else { return };
    // A library whose launcher did not start the process is a world of one.
    let library = folder.join("mpich/lib/libmpi_abi.so.1");
    let library = library.to_str().expect("a name");
    let open = [
        ("OMPI_COMM_WORLD_RANK", "1"),
        ("OMPI_COMM_WORLD_SIZE", "2"),
        ("SLABWISE_LIBMPI", library),
    ];
    let shown = alone(&open);
    assert!(
        shown.contains("rank 1 of 2, but") && shown.contains("rank 0 of 1"),
        "{shown}"
    );
}
