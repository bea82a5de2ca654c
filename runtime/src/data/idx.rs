//! The IDX format: a big-endian header of extents, then elements in row-major order.
//!
//! Described on the MNIST page (LeCun, Cortes, Burges): two zero bytes, an element type (8 is
//! unsigned byte), the number of dimensions, each extent as a big-endian `u32`, the elements.

use std::fs::File;
use std::io::{self, BufRead, BufReader, ErrorKind, Read};
use std::path::Path;

use slabwise_planner::files::Gunzip;

use super::DataError;

/// Most bytes of elements that a file may declare: some twenty times MNIST, and too few to endanger
/// the machine.
const MAX_BYTES: u64 = 1 << 30;
/// The most bytes reserved before any element is read: MNIST fits, and a false header costs no
/// more.
const MAX_RESERVE: u64 = 64 << 20;
/// Element type code of unsigned bytes.
const UNSIGNED_BYTE: u8 = 8;

/// An array of unsigned bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Idx {
    /// Extents, outermost first.
    pub dims: Vec<usize>,
    /// Elements in row-major order, as many as the product of `dims`.
    pub data: Vec<u8>,
}

impl Idx {
    /// Reads the IDX file at `path`, plain or gzip-compressed (detected by content), of unsigned
    /// bytes with `rank` dimensions.
    ///
    /// # Errors
    ///
    /// A [`DataError`] for an unreadable file, another kind of file, extents above 1 GiB in all,
    /// missing or trailing bytes, and damaged gzip data. Memory use follows the file's contents,
    /// not its header.
    pub fn read(path: &Path, rank: usize) -> Result<Idx, DataError> {
        let io_error = |source| DataError::Io {
            path: path.to_owned(),
            source,
        };
        read_from(
            path,
            BufReader::with_capacity(1 << 16, File::open(path).map_err(io_error)?),
            rank,
        )
    }

    /// Like [`Idx::read`], from a file's contents.
    ///
    /// # Errors
    ///
    /// See [`Idx::read`].
    pub fn of_bytes(bytes: &[u8], rank: usize) -> Result<Idx, DataError> {
        read_from(Path::new("the data"), bytes, rank)
    }
}

/// Reads a file's content, plain or gzip-compressed.
fn read_from(path: &Path, mut plain: impl BufRead, rank: usize) -> Result<Idx, DataError> {
    let io_error = |source| DataError::Io {
        path: path.to_owned(),
        source,
    };
    // Both bytes of gzip's magic: IDX starts with two zeros.
    if plain
        .fill_buf()
        .map_err(io_error)?
        .starts_with(&[0x1f, 0x8b])
    {
        parse(path, Gunzip::new(plain), rank, |source| DataError::Gzip {
            path: path.to_owned(),
            source,
        })
    } else {
        parse(path, plain, rank, io_error)
    }
}

/// Parses the bytes of `reader`; `failed` wraps its errors.
fn parse(
    path: &Path,
    mut reader: impl Read,
    rank: usize,
    failed: impl Fn(io::Error) -> DataError,
) -> Result<Idx, DataError> {
    let header_error = |detail: String| DataError::Header {
        path: path.to_owned(),
        rank,
        detail,
    };
    let mut header = vec![0; 4 + 4 * rank];
    let got = fill(&mut reader, &mut header).map_err(&failed)?;
    if got < header.len() {
        return Err(header_error(format!("it ends after {got} bytes")));
    }
    let (magic, extents) = header.split_at(4);
    if magic[..3] != [0, 0, UNSIGNED_BYTE] || usize::from(magic[3]) != rank {
        return Err(header_error(format!(
            "its first bytes are {magic:02x?}, not [00, 00, 08, {rank:02x}]"
        )));
    }
    let extents: Vec<u32> = extents
        .chunks_exact(4)
        .map(|b| u32::from_be_bytes([b[0], b[1], b[2], b[3]]))
        .collect();
    let declared = extents
        .iter()
        .try_fold(1u64, |product, &extent| product.checked_mul(extent.into()));
    let Some(declared) = declared.filter(|&declared| declared <= MAX_BYTES) else {
        return Err(DataError::TooLarge {
            path: path.to_owned(),
            dims: extents,
            most: MAX_BYTES,
        });
    };
    // One byte more than declared detects trailing data, and lets gzip check its sum if there is
    // none.
    let mut data = Vec::new();
    let reserve = declared.min(MAX_RESERVE) as usize + 1;
    let no_room = |error| DataError::Io {
        path: path.to_owned(),
        source: io::Error::new(ErrorKind::OutOfMemory, error),
    };
    data.try_reserve_exact(reserve).map_err(no_room)?;
    match reader.take(declared + 1).read_to_end(&mut data) {
        Err(error) if error.kind() != ErrorKind::UnexpectedEof => return Err(failed(error)),
        // Complete data with an incomplete gzip trailer is truncated as well, but reported
        // differently.
        Err(error) if data.len() as u64 >= declared => return Err(failed(error)),
        _ => {}
    }
    let found = data.len() as u64;
    match found.cmp(&declared) {
        std::cmp::Ordering::Less => Err(DataError::Truncated {
            path: path.to_owned(),
            declared,
            found,
        }),
        std::cmp::Ordering::Greater => Err(DataError::Trailing {
            path: path.to_owned(),
            declared,
        }),
        std::cmp::Ordering::Equal => Ok(Idx {
            dims: extents.into_iter().map(|extent| extent as usize).collect(),
            data,
        }),
    }
}

/// Fills `buffer` as far as `reader` goes; gives the number of bytes.
pub(super) fn fill(reader: &mut impl Read, buffer: &mut [u8]) -> io::Result<usize> {
    let mut got = 0;
    while got < buffer.len() {
        match reader.read(&mut buffer[got..]) {
            Ok(0) => break,
            Ok(n) => got += n,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            // A cut gzip stream.
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => break,
            Err(error) => return Err(error),
        }
    }
    Ok(got)
}
