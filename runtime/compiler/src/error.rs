//! Every error that the runtime reports, worded for the user who can correct its cause.

mod files;

use std::fmt;
use std::panic::Location;
use std::path::PathBuf;

use slabwise_planner::Bytes;

pub use files::{DataError, WeightsError};

/// The result of a fallible call; the error defaults to [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A mistake in a model, found while it was traced.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mistake {
    /// The user's line.
    pub location: &'static Location<'static>,
    /// The layer, such as `body`; empty outside of layers.
    pub layer: String,
    /// The mistake, with shapes and numbers.
    pub message: String,
}

impl fmt::Display for Mistake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}:{}: {}",
            self.location.file(),
            self.location.line(),
            self.message
        )?;
        if !self.layer.is_empty() {
            write!(f, " (in \"{}\")", self.layer)?;
        }
        Ok(())
    }
}

/// Why a call failed.
///
/// `Debug` prints the same text as `Display`, so that `fn main() -> slabwise::Result<()>` ends with
/// a readable message: one line for each mistake in a model.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The traced model has mistakes; all of them are here.
    #[error("{}", list(.0))]
    Trace(Vec<Mistake>),
    /// The plan does not fit the budget.
    #[error(
        "the budget of {budget} is too small for \"{program}\": the best plan found needs {needed} ({persistent} of weights and state, {slab} of slab), and no plan needs less than {floor}; \
         largest at the peak: {holders}; a smaller batch or a larger budget would help"
    )]
    Budget {
        /// Which program.
        program: String,
        /// The budget given.
        budget: Bytes,
        /// The bytes that the best plan found needs.
        needed: Bytes,
        /// The part of it for weights and state.
        persistent: Bytes,
        /// The part of it for the slab.
        slab: Bytes,
        /// The lower bound of every plan, whichever values it recomputes.
        floor: Bytes,
        /// The largest buffers at the peak, by name.
        holders: String,
    },
    /// The machine has no memory left.
    #[error(
        "{what} needs {bytes}, which the machine cannot give{more}; a smaller batch or model would help"
    )]
    OutOfMemory {
        /// The purpose of the request.
        what: String,
        /// How much.
        bytes: Bytes,
        /// Where it failed, and which holders have the rest, as far as known.
        more: String,
    },
    /// A kernel made an invalid access, or the device failed: it accepts no further work of this
    /// process.
    #[error(
        "the session on {device} is lost, with its weights: {why}; start a new process and {}",
        saved.as_ref().map_or_else(
            || "load the last checkpoint with Session::load (this session saved none)".to_string(),
            |path| format!("load the last checkpoint with Session::load({path:?})")
        )
    )]
    Lost {
        /// The device.
        device: String,
        /// The driver's answer.
        why: String,
        /// The file that the session saved last.
        saved: Option<PathBuf>,
    },
    /// A rank is lost, has failed, or runs another program.
    #[error("{0}")]
    Peer(String),
    /// The pool of the dynamic mode has no memory for a buffer, after every retry step.
    #[error("\"{program}\" is out of memory: {report}")]
    Memory {
        /// Which program.
        program: String,
        /// The OOM report: the request, the memory there is, its holders, and possible remedies.
        report: Box<slabwise_pool::OutOfMemory>,
    },
    /// The budget has no headroom for a value whose size is data-dependent.
    #[error(
        "the budget of {budget} has no room for {bytes} of {what} in \"{program}\": weights, state and slab take {planned}, and {pool} of the \
         pool are in use; fewer elements or a larger budget would help"
    )]
    Room {
        /// Which program.
        program: String,
        /// The value.
        what: String,
        /// How much it needs.
        bytes: Bytes,
        /// The budget given.
        budget: Bytes,
        /// The bytes of weights, state and slab.
        planned: Bytes,
        /// The pool bytes that other such values hold.
        pool: Bytes,
    },
    /// An input of a run does not fit the program.
    #[error("input \"{name}\": {message}")]
    Input {
        /// The input's name.
        name: String,
        /// The mistake.
        message: String,
    },
    /// The data of a run broke a rule of the program; weights and state are as they were before the
    /// run.
    #[error("{mistake}; no weight was changed")]
    Data {
        /// The place and the message.
        mistake: Mistake,
    },
    /// A buffer was used after it had been donated.
    #[error(
        "the buffer \"{name}\" was donated to a run and holds nothing any more; Output::buffer gives the new value"
    )]
    Donated {
        /// The buffer.
        name: String,
    },
    /// A buffer was used after it had been freed.
    #[error("the buffer \"{name}\" was freed and holds nothing any more; upload it again")]
    Freed {
        /// The buffer.
        name: String,
    },
    /// A program, buffer or parameter belongs to another session.
    #[error("{0}")]
    Foreign(String),
    /// A kernel computed NaN, or an infinite number, in a session that
    /// [checks](crate::settings::NanCheck) for it; weights and state are as they were before the
    /// run.
    #[error("{mistake}; no weight was changed")]
    NotFinite {
        /// The kernel's name in the plan.
        kernel: String,
        /// The place and the message.
        mistake: Mistake,
    },
    /// A device that is not there.
    #[error("device {device}: {why}")]
    Device {
        /// The device requested.
        device: String,
        /// Why it cannot be used.
        why: String,
    },
    /// A debug check found a kernel writing outside of its buffers, or reading one that had ended.
    #[error("memory check after step {step} ({task}): {message}")]
    MemoryCheck {
        /// The step of the plan.
        step: usize,
        /// The task that ran.
        task: String,
        /// The violation found.
        message: String,
    },
    /// A value a user gave is outside of its range.
    #[error("{0}")]
    Value(String),
    /// A weight file.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// A data file.
    #[error(transparent)]
    DataFile(#[from] DataError),
    /// A file or folder.
    #[error("{path}: {source}")]
    Io {
        /// Which.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// slabwise itself is at fault: please report it.
    #[error("internal error, please report it: {0}")]
    Internal(String),
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

fn list(mistakes: &[Mistake]) -> String {
    let lines: Vec<String> = mistakes.iter().map(ToString::to_string).collect();
    lines.join("\n")
}
