//! Errors of texts and files that are not packing problems.

use crate::shorten::brief;
use std::path::PathBuf;

/// Why a text is not a packing problem. Lines count from 1, the header included.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CsvError {
    /// There is no header line.
    #[error("line 1: the header `id,lower,upper,size` is missing")]
    NoHeader,
    /// The header lacks a column.
    #[error("line 1: the header lacks the column `{0}`")]
    MissingColumn(&'static str),
    /// The header has an unknown or repeated column.
    #[error("line 1: column `{}` is unknown or appears twice; there are {columns}", brief(.0), columns = super::COLUMNS.join(", "))]
    BadColumn(String),
    /// A quoted field does not end, or something follows its end.
    #[error("line {line}: a quoted field is not closed properly")]
    Quote {
        /// The line.
        line: usize,
    },
    /// A line does not have one field per column.
    #[error("line {line}: {found} fields, the header has {expected}")]
    Fields {
        /// The line.
        line: usize,
        /// The number of columns.
        expected: usize,
        /// The number of fields of the line.
        found: usize,
    },
    /// A field is not a whole number of at most 64 bits.
    #[error(
        "line {line}: {column} `{}` is not a whole number from 0 to 2^64-1",
        brief(text)
    )]
    Number {
        /// The line.
        line: usize,
        /// The column.
        column: &'static str,
        /// The field.
        text: String,
    },
    /// A lifetime ends before it has begun.
    #[error("line {line}: upper {upper} is below lower {lower}")]
    Lifetime {
        /// The line.
        line: usize,
        /// The start of the lifetime.
        lower: u64,
        /// The end of the lifetime.
        upper: u64,
    },
    /// An alignment is not a power of two.
    #[error("line {line}: alignment {align} is not a power of two")]
    Alignment {
        /// The line.
        line: usize,
        /// The alignment.
        align: u64,
    },
    /// A given range of bytes ends beyond 64 bits.
    #[error("line {line}: {column} {offset} and size {size} together exceed 64 bits")]
    End {
        /// The line.
        line: usize,
        /// The column: `fixed` or `offset`.
        column: &'static str,
        /// The offset.
        offset: u64,
        /// The size.
        size: u64,
    },
    /// A gap is not `lower-upper` or `lower-upper@low:high`, or ends before it begins.
    #[error(
        "line {line}: gap `{}` is not of the form lower-upper or lower-upper@low:high, with each end at or above its begin",
        brief(text)
    )]
    Gap {
        /// The line.
        line: usize,
        /// The gap.
        text: String,
    },
    /// Two lines have one id.
    #[error("line {line}: id `{}` already stands on line {first}", brief(id))]
    Duplicate {
        /// The second line.
        line: usize,
        /// The first line.
        first: usize,
        /// The id.
        id: String,
    },
    /// A line refers to an unknown id.
    #[error(
        "line {line}: {column} names `{}`, which is not an id of this file",
        brief(id)
    )]
    UnknownId {
        /// The line.
        line: usize,
        /// The column.
        column: &'static str,
        /// The unknown id.
        id: String,
    },
    /// Two items follow the same one, or items follow each other in a cycle.
    #[error(
        "line {line}: `{}` is already followed by another item, or follows this item itself",
        brief(id)
    )]
    Follows {
        /// The line.
        line: usize,
        /// The item that cannot be followed.
        id: String,
    },
    /// There are more items than indices.
    #[error("line {line}: more than {max} items", max = u32::MAX)]
    TooMany {
        /// The line.
        line: usize,
    },
}

/// Why a file cannot be read as a packing problem, or cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// The system reports an error, or the compressed data is damaged.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// The text is longer than [`TEXT_MAX`](super::TEXT_MAX), perhaps only after decompression.
    #[error("{}: the text is longer than {limit} bytes", path.display())]
    TooLong {
        /// The file.
        path: PathBuf,
        /// The largest permitted length.
        limit: u64,
    },
    /// The file is not UTF-8 text.
    #[error("{}: line {line} is not UTF-8", path.display())]
    NoText {
        /// The file.
        path: PathBuf,
        /// The line.
        line: usize,
    },
    /// The text is not a packing problem.
    #[error("{}: {source}", path.display())]
    Csv {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: CsvError,
    },
}
