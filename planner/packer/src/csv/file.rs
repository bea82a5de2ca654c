//! Tables in files, gzipped or not.

use super::{FileError, Table, read, write};
use crate::files::{self, Gunzip};
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;

/// The longest text that is read: enough for some ten million items, and a bound on the
/// decompressed size of a small file.
pub const TEXT_MAX: u64 = 1 << 30;

/// Reads a file; one that begins like gzip is decompressed.
pub fn read_file(path: &Path) -> Result<Table, FileError> {
    let file = File::open(path).map_err(|source| FileError::Io {
        path: path.into(),
        source,
    })?;
    read_bytes(path, BufReader::new(file), TEXT_MAX)
}

/// Reads a table from the content of a file of this name, up to a length of the text.
pub(super) fn read_bytes(path: &Path, file: impl BufRead, limit: u64) -> Result<Table, FileError> {
    let bytes = unpack(path, file, limit)?;
    let text = str::from_utf8(&bytes).map_err(|error| {
        let line = 1 + bytes[..error.valid_up_to()]
            .iter()
            .filter(|&&byte| byte == b'\n')
            .count();
        FileError::NoText {
            path: path.into(),
            line,
        }
    })?;
    read(text).map_err(|source| FileError::Csv {
        path: path.into(),
        source,
    })
}

/// Reads a file of any kind, up to `limit` bytes; one that begins like gzip is decompressed.
pub fn read_packed(path: &Path, limit: u64) -> Result<Vec<u8>, FileError> {
    let file = File::open(path).map_err(|source| FileError::Io {
        path: path.into(),
        source,
    })?;
    unpack(path, BufReader::new(file), limit)
}

fn unpack(path: &Path, mut file: impl BufRead, limit: u64) -> Result<Vec<u8>, FileError> {
    let io = |source| FileError::Io {
        path: path.into(),
        source,
    };
    let mut head = Vec::new();
    file.by_ref().take(2).read_to_end(&mut head).map_err(io)?;
    let packed = head == [0x1f, 0x8b];
    let whole = io::Cursor::new(head).chain(file);
    let mut bytes = Vec::new();
    let length = if packed {
        let damaged =
            |error: io::Error| io::Error::new(error.kind(), format!("damaged gzip data: {error}"));
        Gunzip::new(whole)
            .take(limit + 1)
            .read_to_end(&mut bytes)
            .map_err(damaged)
    } else {
        whole.take(limit + 1).read_to_end(&mut bytes)
    };
    if length.map_err(io)? as u64 > limit {
        return Err(FileError::TooLong {
            path: path.into(),
            limit,
        });
    }
    Ok(bytes)
}

/// Writes a file as a whole (see [`files::replace`]), gzipped if its name ends in `.gz`.
pub fn write_file(path: &Path, table: &Table) -> Result<(), FileError> {
    let save =
        files::packed_for(path, &write(table)).and_then(|bytes| files::replace(path, &bytes));
    save.map_err(|source| FileError::Io {
        path: path.into(),
        source,
    })
}
