//! Errors of the importer.

use std::fmt;
use std::path::PathBuf;

/// The reason why a model cannot be read or expressed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file cannot be read.
    #[error("{}: {source}", path.display())]
    Io {
        /// Its path.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A file is no model, or is damaged.
    #[error("{}: {message}", path.display())]
    File {
        /// Its path.
        path: PathBuf,
        /// The defect.
        message: String,
    },
    /// Nodes that cannot be expressed, all of them.
    #[error("{}", Refusals(.0))]
    Refused(Vec<Refusal>),
    /// An input, dimension or value that does not fit the model.
    #[error("{0}")]
    Input(String),
    /// An error of the runtime.
    #[error(transparent)]
    Runtime(#[from] slabwise::Error),
}

/// A result of the importer.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A node that cannot be expressed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The node's name, or that of its first output.
    pub node: String,
    /// Its operator.
    pub operator: String,
    /// The version of the operator's domain that the model imports.
    pub opset: i64,
    /// The reason.
    pub reason: String,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Refusal {
            node,
            operator,
            opset,
            reason,
        } = self;
        write!(f, "{operator} \"{node}\" (opset {opset}): {reason}")
    }
}

/// The most refusals that an error text lists.
const SHOWN: usize = 20;

struct Refusals<'a>(&'a [Refusal]);

impl fmt::Display for Refusals<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let [one] = self.0 {
            return one.fmt(f);
        }
        write!(f, "{} nodes cannot be expressed:", self.0.len())?;
        for refusal in self.0.iter().take(SHOWN) {
            write!(f, "\n  {refusal}")?;
        }
        match self.0.len().checked_sub(SHOWN) {
            Some(more) if more > 0 => write!(f, "\n  and {more} more"),
            _ => Ok(()),
        }
    }
}
