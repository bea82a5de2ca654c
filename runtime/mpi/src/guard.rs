//! The guard of a rank: a parent that turns its death into an ordinary end.
//!
//! When a process of MPICH's launcher dies by a signal, the launcher signals all others, which ends
//! them before they can say anything. Behind a guard they live on, and their lifelines tell them
//! who is gone.

use std::ffi::{OsStr, OsString};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::Command;

/// Runs a program and waits for its end. The program ends with this process, whatever ends that.
/// The result is its exit code; of a program that a signal has ended, 128 and the signal's number.
///
/// # Errors
/// If the program cannot be started.
pub fn guard(program: &OsStr, arguments: &[OsString]) -> std::io::Result<i32> {
    // SAFETY: ignoring these signals changes nothing but their effect on this process; the launcher
    // sends them when another rank has ended.
    unsafe {
        libc::signal(libc::SIGUSR1, libc::SIG_IGN);
        libc::signal(libc::SIGTERM, libc::SIG_IGN);
    }
    let mut command = Command::new(program);
    command.args(arguments);
    // SAFETY: between fork and exec only this system call is made, which allocates nothing.
    unsafe {
        command.pre_exec(|| {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            Ok(())
        });
    }
    let status = command.status()?;
    let signal = status.signal().map(|signal| 128 + signal);
    Ok(status.code().or(signal).unwrap_or(1))
}
