//! Tables in files, gzipped or not.

use super::{FileError, Table, read, write};
use flate2::Compression;
use flate2::read::MultiGzDecoder;
use flate2::write::GzEncoder;
use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::path::Path;

/// The longest text that is read: enough for some ten million items, and a bound to what a small file may unpack to.
pub const TEXT_MAX: u64 = 1 << 30;

/// Reads a file; one that begins like gzip is unpacked.
pub fn read_file(path: &Path) -> Result<Table, FileError> {
    let file = File::open(path).map_err(|source| FileError::Io { path: path.into(), source })?;
    read_bytes(path, BufReader::new(file), TEXT_MAX)
}

/// Reads what a file of this name contains, up to a length of the text.
pub(super) fn read_bytes(path: &Path, file: impl Read, limit: u64) -> Result<Table, FileError> {
    let bytes = unpack(path, file, limit)?;
    let text = str::from_utf8(&bytes).map_err(|error| {
        let line = 1 + bytes[..error.valid_up_to()].iter().filter(|&&byte| byte == b'\n').count();
        FileError::NoText { path: path.into(), line }
    })?;
    read(text).map_err(|source| FileError::Csv { path: path.into(), source })
}

/// Reads a file of any kind, up to so many bytes; one that begins like gzip is unpacked.
pub fn read_packed(path: &Path, limit: u64) -> Result<Vec<u8>, FileError> {
    let file = File::open(path).map_err(|source| FileError::Io { path: path.into(), source })?;
    unpack(path, BufReader::new(file), limit)
}

fn unpack(path: &Path, mut file: impl Read, limit: u64) -> Result<Vec<u8>, FileError> {
    let io = |source| FileError::Io { path: path.into(), source };
    let mut head = Vec::new();
    file.by_ref().take(2).read_to_end(&mut head).map_err(io)?;
    let packed = head == [0x1f, 0x8b];
    let whole = io::Cursor::new(head).chain(file);
    let mut bytes = Vec::new();
    let length = if packed {
        MultiGzDecoder::new(whole).take(limit + 1).read_to_end(&mut bytes)
    } else {
        whole.take(limit + 1).read_to_end(&mut bytes)
    };
    if length.map_err(io)? as u64 > limit {
        return Err(FileError::TooLong { path: path.into(), limit });
    }
    Ok(bytes)
}

/// Writes a file, gzipped if its name ends in `.gz`.
pub fn write_file(path: &Path, table: &Table) -> Result<(), FileError> {
    let text = write(table);
    let save = || {
        let mut file = BufWriter::new(File::create(path)?);
        if path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gz")) {
            let mut packer = GzEncoder::new(file, Compression::default());
            packer.write_all(text.as_bytes())?;
            return packer.finish()?.flush();
        }
        file.write_all(text.as_bytes())?;
        file.flush()
    };
    save().map_err(|source| FileError::Io { path: path.into(), source })
}
