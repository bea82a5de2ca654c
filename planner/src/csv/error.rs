//! Why a text or a file is no packing problem.

use crate::shorten::brief;
use std::path::PathBuf;

/// Why a text is no packing problem. Lines count from 1, the header included.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CsvError {
    /// There is no header line.
    #[error("line 1: the header `id,lower,upper,size` is missing")]
    NoHeader,
    /// The header lacks a column.
    #[error("line 1: the header lacks the column `{0}`")]
    MissingColumn(&'static str),
    /// The header has a column that is not understood, or one twice.
    #[error("line 1: column `{}` is unknown or appears twice; there are {columns}", brief(.0), columns = super::COLUMNS.join(", "))]
    BadColumn(String),
    /// A quoted field does not end, or something follows its end.
    #[error("line {line}: a quoted field is not closed properly")]
    Quote {
        /// The line.
        line: usize,
    },
    /// A line has not one field per column.
    #[error("line {line}: {found} fields, the header has {expected}")]
    Fields {
        /// The line.
        line: usize,
        /// How many columns there are.
        expected: usize,
        /// How many fields the line has.
        found: usize,
    },
    /// A field is no whole number, or one beyond 64 bits.
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
        /// Where the lifetime starts.
        lower: u64,
        /// Where it ends.
        upper: u64,
    },
    /// An alignment is not a power of two.
    #[error("line {line}: alignment {align} is no power of two")]
    Alignment {
        /// The line.
        line: usize,
        /// The alignment.
        align: u64,
    },
    /// A given place reaches beyond 64 bits.
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
    /// A line refers to an id that there is not.
    #[error(
        "line {line}: {column} names `{}`, which is no id of this file",
        brief(id)
    )]
    UnknownId {
        /// The line.
        line: usize,
        /// The column.
        column: &'static str,
        /// What stands there.
        id: String,
    },
    /// Two items follow one, or an item follows itself in the end.
    #[error(
        "line {line}: `{}` is followed by something else already, or follows this item itself",
        brief(id)
    )]
    Follows {
        /// The line.
        line: usize,
        /// The item that cannot be followed.
        id: String,
    },
    /// There are more items than can be counted.
    #[error("line {line}: more than {max} items", max = u32::MAX)]
    TooMany {
        /// The line.
        line: usize,
    },
}

/// Why a file is no packing problem, or cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// The system refuses, or the compressed data is damaged.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: std::io::Error,
    },
    /// The text is longer than [`TEXT_MAX`](super::TEXT_MAX), perhaps only once it is unpacked.
    #[error("{}: the text is longer than {limit} bytes", path.display())]
    TooLong {
        /// The file.
        path: PathBuf,
        /// How long it may be.
        limit: u64,
    },
    /// The file is no text.
    #[error("{}: line {line} is not UTF-8", path.display())]
    NoText {
        /// The file.
        path: PathBuf,
        /// The line.
        line: usize,
    },
    /// The text is no packing problem.
    #[error("{}: {source}", path.display())]
    Csv {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: CsvError,
    },
}
