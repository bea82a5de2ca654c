//! Errors of files: of data, and of weights.

use std::io;
use std::path::PathBuf;

use slabwise_planner::brief;
use thiserror::Error;

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
    /// The file could not be written. An earlier file of that name is unchanged.
    #[error("cannot write {}: {source}; check that the folder exists, is writable and has space", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The content of a file is not as its format, or the runtime's types, demand.
    #[error("{}: {detail}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// The defect.
        detail: String,
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
    /// An item of a dataset could not be made.
    #[error("item {index}: {source}")]
    Item {
        /// Its index in the dataset.
        index: usize,
        /// The defect.
        source: Box<DataError>,
    },
    /// The items of a batch could not be joined.
    #[error("batch {number}: {source}")]
    Batch {
        /// Its number in the epoch, from 0.
        number: usize,
        /// The defect.
        source: Box<DataError>,
    },
    /// A function that makes an item or a batch panicked.
    #[error("the function that makes it panicked: {0}")]
    Panic(String),
    /// Any other error, such as one of a user's dataset, as text.
    #[error("{0}")]
    Other(String),
    /// Images and labels, or the two splits, do not belong together.
    #[error("{origin}: {detail}")]
    Inconsistent {
        /// Where the data came from.
        origin: String,
        /// The mismatch.
        detail: String,
    },
}

/// Why weights could not be saved, read or matched.
#[derive(Debug, Error)]
pub enum WeightsError {
    /// The file could not be read.
    #[error("cannot read weights from {}: {source}; check the path, or save weights there first", path.display())]
    Read {
        /// The requested file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The file could not be written. An earlier file of that name is unchanged.
    #[error(
        "cannot save weights to {}: {source}; nothing there was changed; check that the folder exists, is writable and has space",
        path.display()
    )]
    Write {
        /// The requested file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The bytes are not one complete file of their format.
    #[error("{} is not a complete {format} file ({detail}); it may be cut short or damaged: fetch or save it again", path.display())]
    Malformed {
        /// The requested file.
        path: PathBuf,
        /// The format's name.
        format: &'static str,
        /// The defect.
        detail: String,
    },
    /// The file is whole, but of a kind that is not read.
    #[error("cannot read weights from {}: {detail}", path.display())]
    Unsupported {
        /// The requested file.
        path: PathBuf,
        /// Its kind, and the remedy.
        detail: String,
    },
    /// A tensor differs from the one that was written.
    #[error(
        "tensor `{}` of {} is damaged: its bytes have changed since they were saved (their CRC-32 is {found:08x}, not {saved:08x}); \
         fetch or save the file again, or if a program changed it on purpose, let that remove the note slabwise.crc32",
        brief(tensor),
        path.display()
    )]
    Damaged {
        /// The requested file.
        path: PathBuf,
        /// The tensor's name.
        tensor: String,
        /// The checksum that was saved.
        saved: u32,
        /// The checksum of the bytes in the file.
        found: u32,
    },
    /// A value of a tensor cannot be quantized.
    #[error(
        "tensor `{}` of {} cannot be quantized: its element {at:?} is {value}; mend the file, or leave Scope::quantized away for this weight",
        brief(tensor),
        path.display()
    )]
    NotQuantized {
        /// The file or folder.
        path: PathBuf,
        /// The name of the weight.
        tensor: String,
        /// The row and the column of the value.
        at: [usize; 2],
        /// The value.
        value: f32,
    },
    /// The list of a sharded model's files cannot be used.
    #[error("{} is not an index of shards ({detail}); fetch it again, or name one of its files", path.display())]
    Index {
        /// The index.
        path: PathBuf,
        /// The defect.
        detail: String,
    },
    /// Rules for weights are mistaken or contradict each other.
    #[error("these rules for weights cannot be used:{faults}")]
    Rules {
        /// One line per mistake, each starting with a line break.
        faults: String,
    },
    /// A tensor handed to `save` cannot be stored.
    #[error("cannot save tensor `{}`: {detail}", brief(tensor))]
    InvalidTensor {
        /// The tensor's name.
        tensor: String,
        /// The defect.
        detail: String,
    },
    /// The file's tensors do not match the expected ones.
    #[error("{} does not fit this model:{problems}\n{help}", path.display())]
    Mismatch {
        /// The file compared.
        path: PathBuf,
        /// One line per difference, each starting with a line break; truncated if there are very
        /// many.
        problems: String,
        /// The remedy.
        help: String,
    },
}
