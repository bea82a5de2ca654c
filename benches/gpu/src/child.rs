//! One item as a process of its own, which ends by itself or at its limit.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Between two looks at whether a process has ended.
const LOOK: Duration = Duration::from_millis(5);

/// How a process ended, and what it said.
pub struct Ended {
    /// What the system tells of its end; `None` if it was ended at its limit, or could not be started.
    pub status: Option<ExitStatus>,
    /// Why it could not be started.
    pub refused: Option<String>,
    pub stdout: String,
    pub stderr: String,
    pub took: Duration,
}

impl Ended {
    /// The signal that ended it, if one did.
    pub fn signal(&self) -> Option<i32> {
        self.status.and_then(|status| status.signal())
    }

    /// The last lines of what it said, errors if there are any.
    pub fn tail(&self) -> String {
        const LINES: usize = 30;
        const CHARACTERS: usize = 4000;
        let text = if self.stderr.trim().is_empty() { &self.stdout } else { &self.stderr };
        let lines: Vec<&str> = text.trim().lines().collect();
        let tail = lines[lines.len().saturating_sub(LINES)..].join("\n");
        let skip = tail.chars().count().saturating_sub(CHARACTERS);
        tail.chars().skip(skip).collect()
    }
}

/// Runs a command to its end, or until its time is over: then it is ended, with all that it started.
pub fn run(mut command: Command, limit: Duration) -> Ended {
    let began = Instant::now();
    // Files rather than pipes: what a process left behind holds on to would be waited for at the end of a pipe.
    let started = || -> std::io::Result<(Child, [File; 2])> {
        let said = [tempfile::tempfile()?, tempfile::tempfile()?];
        command.stdin(Stdio::null()).stdout(said[0].try_clone()?).stderr(said[1].try_clone()?).process_group(0);
        Ok((command.spawn()?, said))
    };
    let mut ended = Ended { status: None, refused: None, stdout: String::new(), stderr: String::new(), took: Duration::ZERO };
    let (mut child, mut said) = match { started }() {
        Ok(started) => started,
        Err(e) => {
            ended.refused = Some(format!("{}: {e}", command.get_program().to_string_lossy()));
            return ended;
        }
    };
    ended.status = loop {
        match child.try_wait() {
            Ok(Some(status)) => break Some(status),
            Ok(None) if began.elapsed() < limit => std::thread::sleep(LOOK),
            _ => break None,
        }
    };
    ended.took = began.elapsed();
    end(&mut child);
    let mut text = |at: usize| {
        let mut bytes = Vec::new();
        let read = said[at].seek(SeekFrom::Start(0)).and_then(|_| said[at].read_to_end(&mut bytes));
        read.map_or_else(|e| e.to_string(), |_| String::from_utf8_lossy(&bytes).into_owned())
    };
    (ended.stdout, ended.stderr) = (text(0), text(1));
    ended
}

/// Ends the process and the group of what it started: compilers' workers outlive it otherwise.
fn end(child: &mut Child) {
    let group = format!("kill -9 -{} 2>/dev/null", child.id());
    let _ = Command::new("sh").args(["-c", &group]).stdin(Stdio::null()).status();
    // The group's own signal did this, unless there is no shell.
    let _ = child.kill();
    let _ = child.wait();
}
