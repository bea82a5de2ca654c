//! A child process for one item, which ends by itself or at its time limit.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{
    Pid, Signal, WaitOptions, kill_process_group, test_kill_process_group, waitpgid,
};

/// The interval between two checks whether a process has ended.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// The longest wait for killed processes, which a driver may hold in the kernel.
const END_LIMIT: Duration = Duration::from_secs(10);

/// The end of a process, and its output.
pub struct Ended {
    /// The exit status; `None` if it was killed at its limit, or could not be started.
    pub status: Option<ExitStatus>,
    /// Why it could not be started.
    pub refused: Option<String>,
    pub stdout: String,
    pub stderr: String,
    pub took: Duration,
}

impl Ended {
    /// A process that could not be started, with the reason.
    pub fn refused(why: String) -> Ended {
        Ended {
            status: None,
            refused: Some(why),
            stdout: String::new(),
            stderr: String::new(),
            took: Duration::ZERO,
        }
    }

    /// The signal that ended it, if one did.
    pub fn signal(&self) -> Option<i32> {
        self.status.and_then(|status| status.signal())
    }

    /// The last lines of its output, followed by those of its errors.
    pub fn tail(&self) -> String {
        const LINES: usize = 20;
        const CHARACTERS: usize = 3000;
        let last = |text: &str| {
            let lines: Vec<&str> = text.trim().lines().collect();
            let tail = lines[lines.len().saturating_sub(LINES)..].join("\n");
            let skip = tail.chars().count().saturating_sub(CHARACTERS);
            tail.chars().skip(skip).collect::<String>()
        };
        [last(&self.stdout), last(&self.stderr)]
            .join("\n")
            .trim()
            .into()
    }
}

/// Runs a command to its end or to its time limit, at which it is killed with all processes that it
/// started.
pub fn run(mut command: Command, limit: Duration) -> Ended {
    let began = Instant::now();
    // Otherwise orphans are left to the first process, which in a container may never wait for them:
    // they would be there for good, though they hold nothing.
    #[cfg(target_os = "linux")]
    let _ = rustix::process::set_child_subreaper(Some(rustix::process::getpid()));
    // Files rather than pipes, because the end of a pipe would wait for every process left behind
    // that still holds it.
    let started = || -> std::io::Result<(Child, [File; 2])> {
        let said = [tempfile::tempfile()?, tempfile::tempfile()?];
        command
            .stdin(Stdio::null())
            .stdout(said[0].try_clone()?)
            .stderr(said[1].try_clone()?)
            .process_group(0);
        Ok((command.spawn()?, said))
    };
    let (mut child, mut said) = match { started }() {
        Ok(started) => started,
        Err(e) => {
            return Ended::refused(format!("{}: {e}", command.get_program().to_string_lossy()));
        }
    };
    let status = loop {
        match child.try_wait() {
            Ok(Some(status)) => break Some(status),
            Ok(None) if began.elapsed() < limit => std::thread::sleep(POLL_INTERVAL),
            _ => break None,
        }
    };
    let took = began.elapsed();
    end(&mut child);
    let mut text = |at: usize| {
        let mut bytes = Vec::new();
        let read = said[at]
            .seek(SeekFrom::Start(0))
            .and_then(|_| said[at].read_to_end(&mut bytes));
        read.map_or_else(
            |e| e.to_string(),
            |_| String::from_utf8_lossy(&bytes).into_owned(),
        )
    };
    Ended {
        status,
        refused: None,
        stdout: text(0),
        stderr: text(1),
        took,
    }
}

/// Kills the process and the group of processes that it started, because compilers' workers outlive
/// it otherwise, and waits until all have ended, because a killed process holds its memory on the
/// device until then.
fn end(child: &mut Child) {
    let group = Pid::from_child(child);
    let _ = kill_process_group(group, Signal::KILL);
    let _ = child.wait();
    let began = Instant::now();
    while test_kill_process_group(group).is_ok() && began.elapsed() < END_LIMIT {
        while let Ok(Some(_)) = waitpgid(group, WaitOptions::NOHANG) {}
        std::thread::sleep(POLL_INTERVAL);
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    /// Each of many processes is still there for a moment after it was killed.
    #[test]
    fn processes_left_behind_have_ended() {
        let mut command = Command::new("sh");
        command.args([
            "-c",
            "for i in $(seq 200); do sleep 1000 & echo $!; done; wait",
        ]);
        let ended = run(command, Duration::from_secs(2));
        assert_eq!(ended.status, None, "{}", ended.stderr);
        let started: Vec<&str> = ended.stdout.lines().collect();
        assert!(!started.is_empty(), "{}", ended.stderr);
        for process in started {
            assert!(!Path::new("/proc").join(process).exists(), "{process}");
        }
    }
}
