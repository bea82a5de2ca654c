//! Training in worlds of processes, in three binary interfaces of MPI, has the bits of one process.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

use slabwise::weights::File;

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

/// Runs the test program in a world of one.
fn run_alone(arguments: &[&str]) {
    let output = Command::new(RANK).args(arguments).output();
    let output = output.expect("it starts");
    assert!(output.status.success(), "{}", text(&output));
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
    let arguments = |strategy| ["model", "cnn", "8", strategy, "4", "2", name];
    run_alone(&arguments("replicated"));
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

/// The weights and states in a file, without running statistics, which are those of rank 0's rows.
fn learned(path: &Path) -> Vec<(String, Vec<u8>)> {
    let file = File::open(path).expect("the file is there");
    let learned = file.tensors().filter(|one| !one.name.contains("running"));
    learned
        .map(|one| (one.name.to_string(), one.bytes.to_vec()))
        .collect()
}

#[test]
fn built_in_models_have_the_bits_of_one_process_in_worlds_of_processes() {
    let Some(mpi) = all().into_iter().next() else {
        return;
    };
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("weights.safetensors");
    let name = file.to_str().expect("a name");
    for model in [
        "mlp:inputs=144,hidden1=128,hidden2=24",
        "cnn:size=12,width=4,hidden=256",
        "resnet20:size=8,width=12,blocks1=1,blocks2=1,blocks3=1",
        "gpt:layers=1,width=64,heads=2,length=8,vocabulary=96",
    ] {
        // Of 10 rows, two grains have three and two have two.
        for (batch, steps) in [("8", "4"), ("10", "20")] {
            let arguments = |strategy| ["model", model, batch, strategy, "4", steps, name];
            run_alone(&arguments("replicated"));
            let alone = learned(&file);
            assert!(alone.len() > 12, "weights and two states of each");
            // With each strategy once on either number of ranks.
            let worlds = match batch {
                "8" => [(2, "sharded"), (4, "replicated")],
                _ => [(2, "replicated"), (4, "sharded")],
            };
            for (ranks, strategy) in worlds {
                std::fs::remove_file(&file).expect("it was there");
                let output = mpi.run(ranks, &arguments(strategy));
                assert!(output.status.success(), "{model}: {}", text(&output));
                let told = format!("{model}, {batch} rows on {ranks} ranks, {strategy}");
                assert!(learned(&file) == alone, "{told}");
            }
        }
    }
}

#[test]
fn an_error_of_one_process_in_a_compilation_is_reported_on_all() {
    let Some(mpi) = all().into_iter().next() else {
        return;
    };
    let output = mpi.run(3, &["mistake"]);
    let told = text(&output);
    assert!(!output.status.success(), "{told}");
    let count = |part: &str| told.matches(part).count();
    let shared = "error: rank 1 of 3 has failed to compile \"train\"";
    assert_eq!((count(shared), count("[2, 5]")), (2, 3), "{told}");
}

#[test]
fn processes_on_a_mesh_have_the_bits_of_one() {
    let Some(mpi) = all().into_iter().next() else {
        return;
    };
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("weights.safetensors");
    let name = file.to_str().expect("a name");
    run_alone(&["train", "replicated", "4", "3", name]);
    let alone = data(&file);
    for (strategy, is_near) in [
        ("replicated", true),
        ("sharded", true),
        ("replicated", false),
    ] {
        std::fs::remove_file(&file).expect("it was there");
        let mut command = mpi.command(4, &["mesh", strategy, "4", "3", name]);
        command.env("SLABWISE_NEAR", if is_near { "1" } else { "0" });
        let output = command.output().expect("mpiexec starts");
        let told = text(&output);
        assert!(output.status.success(), "{told}");
        assert!(data(&file) == alone, "{strategy}, near: {is_near}");
        let silent = told.matches("messages 0 of ").count();
        assert_eq!(silent, 4 * usize::from(is_near), "{told}");
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
            run_alone(&train);
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
