//! Starts a program on several ranks of this machine or allocation, as `slabwise launch` does.
//!
//! The launcher is the `mpiexec` beside the library that ranks load. Each rank runs under a guard:
//! a small parent process that turns the death of its child by a signal into an exit code, because
//! `mpiexec` would otherwise kill all survivors before they could report.

use std::ffi::OsString;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::launcher::Family;
use crate::{Error, Result, mpi};

/// The words by which a guard tells the launcher of the end of its rank.
const ENDED: &str = "slabwise launch: rank ";
/// The time that survivors get to report before they are killed.
const GRACE: Duration = Duration::from_secs(10);

/// A program to start on several ranks.
#[derive(Clone, Debug)]
pub struct Launch {
    /// The number of ranks.
    pub ranks: usize,
    /// The number of times that a failed run is started again.
    pub restarts: usize,
    /// The program and its arguments.
    pub program: Vec<OsString>,
    /// The command that calls [`guard`] with the arguments that follow it.
    pub guard: Vec<OsString>,
    /// The MPI library that ranks load; `None` searches for one.
    pub library: Option<PathBuf>,
}

impl Launch {
    /// Runs the program on all ranks and forwards its output, each line with its rank. Returns the
    /// exit code: 0 if all ranks ended with 0 in the first run or in a restart.
    ///
    /// # Errors
    /// If no MPI library is found, or its `mpiexec` cannot be started.
    pub fn run(&self) -> Result<u8> {
        if self.ranks == 0 || self.program.is_empty() {
            return Err(Error::Size(
                "a launch needs at least one rank and a program".into(),
            ));
        }
        let (mpiexec, library, family) = mpi::launcher_of_library(self.library.as_deref())?;
        let mut code = self.once(&mpiexec, &library, family)?;
        for restart in 1..=self.restarts {
            if code == 0 {
                break;
            }
            eprintln!("slabwise launch: restart {restart} of {}", self.restarts);
            code = self.once(&mpiexec, &library, family)?;
        }
        Ok(code)
    }

    fn once(&self, mpiexec: &PathBuf, library: &PathBuf, family: Family) -> Result<u8> {
        let mut command = Command::new(mpiexec);
        command.arg("-n").arg(self.ranks.to_string());
        match family {
            Family::Mpich => {
                command.arg("-disable-auto-cleanup");
            }
            Family::OpenMpi => {
                let options =
                    "--map-by :OVERSUBSCRIBE --bind-to none --runtime-options recoverable";
                command.args(options.split(' '));
                // SAFETY: it has no arguments and cannot fail.
                if unsafe { libc::geteuid() } == 0 {
                    command.arg("--allow-run-as-root");
                }
            }
        }
        command
            .args(&self.guard)
            .args(&self.program)
            .env("SLABWISE_LIBMPI", library);
        let cores = thread::available_parallelism().map_or(1, usize::from);
        if self.ranks > cores {
            // MPICH's own settings for machines with fewer cores than ranks.
            for (name, value) in [
                ("MPIR_CVAR_POLLS_BEFORE_YIELD", "1"),
                ("MPIR_CVAR_CH4_PROGRESS_THROTTLE", "true"),
                ("MPIR_CVAR_CH4_PROGRESS_THROTTLE_NO_PROGRESS_COUNT", "1"),
            ] {
                command.env(name, value);
            }
        }
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        die_with_parent(&mut command);
        let failed =
            |e: std::io::Error| Error::Join(format!("{} cannot be run: {e}", mpiexec.display()));
        let mut child = command.spawn().map_err(failed)?;
        let has_failed = Arc::new(AtomicBool::new(false));
        let out = child
            .stdout
            .take()
            .map(|out| forward(out, std::io::stdout(), None));
        let flag = Some(Arc::clone(&has_failed));
        let err = child
            .stderr
            .take()
            .map(|err| forward(err, std::io::stderr(), flag));
        let mut grace = None;
        let status = loop {
            if let Some(status) = child.try_wait().map_err(failed)? {
                break status;
            }
            if has_failed.load(Ordering::Relaxed) {
                let until = *grace.get_or_insert_with(|| Instant::now() + GRACE);
                if Instant::now() > until {
                    eprintln!("slabwise launch: ranks are left after {GRACE:?} and are killed");
                    child.kill().map_err(failed)?;
                    break child.wait().map_err(failed)?;
                }
            }
            thread::sleep(Duration::from_millis(10));
        };
        for reader in [out, err].into_iter().flatten() {
            let _ = reader.join();
        }
        let code = status
            .code()
            .and_then(|code| u8::try_from(code).ok())
            .unwrap_or(1);
        Ok(if code == 0 && has_failed.load(Ordering::Relaxed) {
            1
        } else {
            code
        })
    }
}

/// Copies lines, and sets the flag when a guard says that its rank has failed.
fn forward(
    from: impl Read + Send + 'static,
    mut to: impl Write + Send + 'static,
    flag: Option<Arc<AtomicBool>>,
) -> thread::JoinHandle<()> {
    thread::spawn(move || {
        let mut lines = BufReader::new(from);
        let mut line = Vec::new();
        while lines
            .read_until(b'\n', &mut line)
            .is_ok_and(|count| count > 0)
        {
            if let Some(flag) = &flag
                && line.starts_with(ENDED.as_bytes())
            {
                flag.store(true, Ordering::Relaxed);
            }
            // A reader that has gone away does not stop the ranks.
            let _ = to.write_all(&line).and_then(|()| to.flush());
            line.clear();
        }
    })
}

/// Runs a rank's program as a child of this process, with each line of its output preceded by its
/// rank. Returns the exit code of this process: the child's, or 128 and the number of the signal
/// that killed it.
///
/// # Errors
/// If the program cannot be started.
pub fn guard(program: &[OsString]) -> Result<u8> {
    let [name, arguments @ ..] = program else {
        return Err(Error::Size("a guard needs a program".into()));
    };
    let variables = [
        "PMI_RANK",
        "OMPI_COMM_WORLD_RANK",
        "PMIX_RANK",
        "SLURM_PROCID",
    ];
    let rank = variables
        .iter()
        .find_map(|name| std::env::var(name).ok())
        .unwrap_or_default();
    // SAFETY: ignoring signals runs no code. MPI's launchers send these to the processes of a
    // failed job, of which the guard must outlive its rank.
    unsafe {
        libc::signal(libc::SIGUSR1, libc::SIG_IGN);
        libc::signal(libc::SIGTERM, libc::SIG_IGN);
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
    }
    let mut command = Command::new(name);
    command
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    die_with_parent(&mut command);
    let failed = |e: std::io::Error| Error::Join(format!("{}: {e}", name.to_string_lossy()));
    let mut child: Child = command.spawn().map_err(|e| {
        let name = name.to_string_lossy();
        say(&format!("{ENDED}{rank} cannot be started: {name}: {e}\n"));
        failed(e)
    })?;
    let out = child
        .stdout
        .take()
        .map(|out| prefix(out, std::io::stdout(), &rank));
    let err = child
        .stderr
        .take()
        .map(|err| prefix(err, std::io::stderr(), &rank));
    let status = child.wait().map_err(failed)?;
    for reader in [out, err].into_iter().flatten() {
        let _ = reader.join();
    }
    Ok(match (status.code(), status.signal()) {
        (Some(0), _) => 0,
        (Some(code), _) => {
            say(&format!("{ENDED}{rank} ended with exit code {code}\n"));
            u8::try_from(code).unwrap_or(1)
        }
        (None, signal) => {
            let signal = signal.unwrap_or_default();
            say(&format!("{ENDED}{rank} was killed by signal {signal}\n"));
            u8::try_from(128 + signal).unwrap_or(255)
        }
    })
}

/// Writes a line to the standard error output in one write, so that lines of guards do not mix.
fn say(line: &str) {
    // Without a reader, nobody needs the line.
    let _ = std::io::stderr().write_all(line.as_bytes());
}

/// Copies lines, each preceded by a rank.
fn prefix(
    from: impl Read + Send + 'static,
    mut to: impl Write + Send + 'static,
    rank: &str,
) -> thread::JoinHandle<()> {
    let rank = rank.to_string();
    thread::spawn(move || {
        let mut lines = BufReader::new(from);
        let mut line = Vec::new();
        loop {
            line.clear();
            line.extend(format!("[{rank}] ").bytes());
            let start = line.len();
            if !lines
                .read_until(b'\n', &mut line)
                .is_ok_and(|count| count > 0)
            {
                break;
            }
            if line.len() > start && !line.ends_with(b"\n") {
                line.push(b'\n');
            }
            // One write for each line, so that lines of ranks do not mix.
            let _ = to.write_all(&line).and_then(|()| to.flush());
        }
    })
}

/// Lets the system kill the child when this process dies, so that no rank is left behind. Signals
/// that this process ignores have their defaults in the child.
fn die_with_parent(command: &mut Command) {
    // SAFETY: these calls are allowed between fork and exec: they neither allocate nor lock.
    unsafe {
        command.pre_exec(|| {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            libc::signal(libc::SIGUSR1, libc::SIG_DFL);
            libc::signal(libc::SIGTERM, libc::SIG_DFL);
            Ok(())
        });
    }
}
