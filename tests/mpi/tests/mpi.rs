//! Training in worlds of processes, in three binary interfaces of MPI, has the bits of one process.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

/// A library of MPI, with the launcher that belongs to it.
struct Mpi {
    name: &'static str,
    folder: PathBuf,
    /// The library's file.
    library: &'static str,
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
        mpi("the standard's interface", "mpich", "libmpi_abi.so.1"),
        mpi("MPICH's interface", "mpich", "libmpi.so.12"),
        mpi("Open MPI's interface", "openmpi", "libmpi.so.40"),
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
        command.env(
            "SLABWISE_LIBMPI",
            self.folder.join("lib").join(self.library),
        );
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

/// The data behind a file's header.
fn data(file: &Path) -> Vec<u8> {
    let bytes = std::fs::read(file).expect("the file is there");
    let header = u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes"));
    bytes[8 + header as usize..].to_vec()
}

#[test]
fn a_built_in_model_has_the_bits_of_one_process_by_memory_and_by_messages() {
    let Some(mpi) = all().into_iter().next() else {
        return;
    };
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("weights.safetensors");
    let name = file.to_str().expect("a name");
    let arguments = |strategy| ["model", "cnn", strategy, "4", "2", name];
    let mut command = Command::new(RANK);
    let output = command.args(arguments("replicated")).output();
    let output = output.expect("it starts");
    assert!(output.status.success(), "{}", text(&output));
    let alone = data(&file);
    for strategy in ["replicated", "sharded"] {
        for is_near in [true, false] {
            std::fs::remove_file(&file).expect("it was there");
            let mut command = mpi.command(2, &arguments(strategy));
            command.env("SLABWISE_NEAR", if is_near { "1" } else { "0" });
            let output = command.output().expect("mpiexec starts");
            let told = text(&output);
            assert!(output.status.success(), "{told}");
            assert!(data(&file) == alone, "{strategy}, near: {is_near}");
            assert_eq!(
                told.matches("messages 0 of ").count(),
                2 * usize::from(is_near),
                "{told}"
            );
        }
    }
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
