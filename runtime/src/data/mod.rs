//! Labelled images: read, shuffled, batched, and prefetched while the previous step runs.
//!
//! ```no_run
//! use slabwise::data::{Mnist, epoch_seed};
//!
//! let mnist = Mnist::load(Mnist::default_dir())?;
//! for epoch in 0..3 {
//!     for (images, labels) in mnist.train.shuffled(64, epoch_seed(0, epoch)).flat().prefetch(2) {
//!         assert_eq!((images.nrows(), images.ncols()), (labels.len(), 784));
//!     }
//! }
//! # Ok::<(), slabwise::data::DataError>(())
//! ```

mod cifar;
mod idx;
mod mnist;
mod prefetch;
mod split;

use std::io;
use std::path::PathBuf;

use thiserror::Error;

pub use cifar::Cifar10;
pub use idx::Idx;
pub use mnist::Mnist;
pub use prefetch::Prefetched;
pub use split::{Batch, Batches, FlatBatch, FlatBatches, Split, epoch_seed};

/// Why data could not be loaded.
#[derive(Debug, Error)]
pub enum DataError {
    /// None of the names a file may have is in the folder.
    #[error(
        "no {what} in {}: looked for {looked_for}; put the four MNIST or Fashion-MNIST files there, \
         plain or gzip-compressed, or give the folder that holds them",
        folder.display()
    )]
    Missing {
        /// The missing contents.
        what: &'static str,
        /// The folder searched.
        folder: PathBuf,
        /// The names tried.
        looked_for: String,
    },
    /// The system could not read the file.
    #[error("cannot read {}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The file does not start as expected.
    #[error(
        "{} does not start as an IDX file of unsigned bytes with {rank} dimensions: {detail}; \
         check that it is the file its name says",
        path.display()
    )]
    Header {
        /// The file.
        path: PathBuf,
        /// The number of dimensions requested.
        rank: usize,
        /// The contents found.
        detail: String,
    },
    /// The header declares more than is allowed in memory.
    #[error(
        "{} declares extents {dims:?}, more than the {most} bytes read at most; its header may be damaged: fetch it again",
        path.display()
    )]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// Declared extents.
        dims: Vec<u32>,
        /// Bytes read at most.
        most: u64,
    },
    /// The file is shorter than its header declares.
    #[error("{} is cut short: {found} of {declared} bytes are there; fetch it again", path.display())]
    Truncated {
        /// The file.
        path: PathBuf,
        /// Bytes expected after the header.
        declared: u64,
        /// Bytes found there.
        found: u64,
    },
    /// The file is longer than its header declares.
    #[error(
        "{} goes on after the {declared} bytes its header declares; it may be two files joined: fetch it again",
        path.display()
    )]
    Trailing {
        /// The file.
        path: PathBuf,
        /// Bytes expected after the header.
        declared: u64,
    },
    /// The gzip stream is damaged.
    #[error("the gzip data of {} is damaged: {source}; fetch it again", path.display())]
    Gzip {
        /// The file.
        path: PathBuf,
        /// The decompressor's error.
        source: io::Error,
    },
    /// A file is not one of CIFAR-10.
    #[error("{}: {detail}; take the six files of CIFAR-10's binary version", path.display())]
    Cifar {
        /// The file.
        path: PathBuf,
        /// The defect.
        detail: String,
    },
    /// Images and labels, or the two splits, do not belong together.
    #[error("{origin}: {detail}")]
    Inconsistent {
        /// Where the data came from.
        origin: String,
        /// The mismatch.
        detail: String,
    },
}

#[cfg(test)]
mod tests;
