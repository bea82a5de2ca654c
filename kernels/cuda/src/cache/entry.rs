//! The format of a cache entry, and a decoder that trusts nothing in it.
//!
//! An entry is a magic number, the key, a hash of the rest, and the rest. For a compiled program
//! the rest is the length of the usage, the usage (a line for each function) and the image. The
//! decoder allocates memory for the file, its image and its lines, never for a number that the file
//! contains.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::Path;

use sha2::{Digest, Sha256};

use crate::nvrtc::{Cubin, Usage};

/// The size limit of an entry, bytes. The code of a large program has a few MiB.
pub const BYTES_MAX: u64 = 128 << 20;

/// The magic number of an entry, which identifies its content; another number is another format.
pub type Magic = [u8; 16];

/// The magic number of entries that hold compiled programs.
const CUBIN: &Magic = b"slabwise cubin 1";

/// Bytes of a hash.
const HASH_BYTES: usize = 32;

/// Bytes before the hashed part: the magic number, a key of 64 digits, the hash.
pub const HEAD_BYTES: usize = CUBIN.len() + 2 * HASH_BYTES + HASH_BYTES;

/// Why an entry is not used.
#[derive(Debug, thiserror::Error)]
pub enum Refused {
    /// It is a folder, a pipe or a device.
    #[error("it is not a file")]
    NotAFile,
    /// It would take too much memory.
    #[error("it has {bytes} bytes, and an entry has at most {bytes_max}")]
    TooLarge {
        /// Its length; of a file that grows while it is read, the bytes read so far.
        bytes: u64,
        /// The size limit.
        bytes_max: u64,
    },
    /// It cannot be read.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// It begins with something else.
    #[error("it is not an entry, or one of another version")]
    Layout,
    /// It is the entry of another key.
    #[error("it is of another program, compiler or architecture")]
    Key,
    /// It is shorter than its own numbers require.
    #[error("it is cut off after {bytes} bytes")]
    Cut {
        /// Its length.
        bytes: usize,
    },
    /// It was changed after it was written.
    #[error("it has changed since it was written")]
    Hash,
    /// A line of the usage cannot be parsed.
    #[error("line {line} of its functions' resources is not a name and four numbers")]
    Usage {
        /// Counted from 1.
        line: usize,
    },
    /// The usage is not UTF-8.
    #[error("the list of its functions' resources is not UTF-8 from byte {at}")]
    Text {
        /// The offset from the first byte of the usage.
        at: usize,
    },
}

/// Reads the entry of a key from a file of at most so many bytes. `None` if there is no file.
///
/// # Errors
/// If it is not an intact entry of this key.
pub fn read(path: &Path, key: &str, bytes_max: u64) -> Result<Option<Cubin>, Refused> {
    bytes(path, bytes_max)?
        .map(|bytes| decode(&bytes, key))
        .transpose()
}

/// A file's bytes, if there are at most so many. `None` if there is no file.
///
/// # Errors
/// If it is not a regular file, is longer than that, or cannot be read.
pub fn bytes(path: &Path, bytes_max: u64) -> Result<Option<Vec<u8>>, Refused> {
    let meta = match fs::metadata(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        meta => meta?,
    };
    // Opening a pipe would block until another process writes to it.
    if !meta.is_file() {
        return Err(Refused::NotAFile);
    }
    let short_enough = |bytes| {
        if bytes > bytes_max {
            Err(Refused::TooLarge { bytes, bytes_max })
        } else {
            Ok(bytes)
        }
    };
    let mut bytes = Vec::with_capacity(short_enough(meta.len())? as usize);
    File::open(path)?
        .take(bytes_max.saturating_add(1))
        .read_to_end(&mut bytes)?;
    short_enough(bytes.len() as u64)?;
    Ok(Some(bytes))
}

/// The bytes of an entry.
pub fn encode(cubin: &Cubin, key: &str) -> Vec<u8> {
    let line = |u: &Usage| {
        format!(
            "{} {} {} {} {}\n",
            u.name, u.registers, u.spill_bytes, u.stack_bytes, u.shared_bytes
        )
    };
    let usage: String = cubin.usage.iter().map(line).collect();
    seal(
        &[
            &(usage.len() as u64).to_le_bytes(),
            usage.as_bytes(),
            &cubin.image,
        ]
        .concat(),
        key,
    )
}

/// Puts the header before the rest of an entry of a compiled program.
pub fn seal(rest: &[u8], key: &str) -> Vec<u8> {
    seal_as(CUBIN, rest, key)
}

/// Puts the header before the rest of an entry.
pub fn seal_as(magic: &Magic, rest: &[u8], key: &str) -> Vec<u8> {
    [magic, key.as_bytes(), &Sha256::digest(rest), rest].concat()
}

/// The rest of an entry.
///
/// # Errors
/// If it is not an intact entry of this kind and key.
pub fn open<'a>(magic: &Magic, bytes: &'a [u8], key: &str) -> Result<&'a [u8], Refused> {
    let rest = bytes
        .strip_prefix(magic)
        .ok_or(Refused::Layout)?
        .strip_prefix(key.as_bytes())
        .ok_or(Refused::Key)?;
    let (hash, rest) = rest
        .split_at_checked(HASH_BYTES)
        .ok_or(Refused::Cut { bytes: bytes.len() })?;
    if Sha256::digest(rest).as_slice() == hash {
        Ok(rest)
    } else {
        Err(Refused::Hash)
    }
}

/// The entry's cubin.
///
/// # Errors
/// If it is not an intact entry of this key.
pub fn decode(bytes: &[u8], key: &str) -> Result<Cubin, Refused> {
    let cut = || Refused::Cut { bytes: bytes.len() };
    let rest = open(CUBIN, bytes, key)?;
    let (length, rest) = rest.split_first_chunk().ok_or_else(cut)?;
    let length = usize::try_from(u64::from_le_bytes(*length)).map_err(|_| cut())?;
    let (usage, image) = rest.split_at_checked(length).ok_or_else(cut)?;
    let usage = std::str::from_utf8(usage).map_err(|e| Refused::Text {
        at: e.valid_up_to(),
    })?;
    let usage = usage
        .lines()
        .enumerate()
        .map(|(at, line)| used(line).ok_or(Refused::Usage { line: at + 1 }));
    Ok(Cubin {
        usage: usage.collect::<Result<_, _>>()?,
        image: image.to_vec(),
    })
}

/// Parses a line of the usage: the name of a function, and its resources.
fn used(line: &str) -> Option<Usage> {
    let mut words = line.split(' ');
    let name = words.next()?.to_string();
    let mut number = || words.next()?.parse().ok();
    let usage = Usage {
        name,
        registers: number()?,
        spill_bytes: number()?,
        stack_bytes: number()?,
        shared_bytes: number()?,
    };
    words.next().is_none().then_some(usage)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_round_trip_and_single_bit_errors_are_refused() {
        let key = "0123456789abcdef".repeat(4);
        let usage = Usage {
            name: "k".into(),
            registers: 32,
            spill_bytes: 4,
            stack_bytes: 8,
            shared_bytes: 1024,
        };
        let cubin = Cubin {
            image: (0..200).collect(),
            usage: vec![usage],
        };
        let bytes = encode(&cubin, &key);
        assert_eq!(bytes, seal(&bytes[HEAD_BYTES..], &key));
        assert_eq!(decode(&bytes, &key).expect("it is whole"), cubin);
        for at in 0..bytes.len() {
            let mut broken = bytes.clone();
            broken[at] ^= 1 << (at % 8);
            assert!(decode(&broken, &key).is_err(), "byte {at}");
            assert!(decode(&bytes[..at], &key).is_err(), "cut at {at}");
        }
        assert!(matches!(decode(&bytes, &"0".repeat(64)), Err(Refused::Key)));
    }
}
