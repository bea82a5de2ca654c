//! Arrays in the files of NumPy: `.npy`, and `.npz` with several of them by name.
//!
//! The format is described in NumPy's `numpy.lib.format` (versions 1.0 to 3.0). Elements are read
//! into the types of the runtime:
//!
//! | in the file | read as |
//! |---|---|
//! | `f4`, `f2`, `i4`, `u1`, `b1` | `f32`, `f16`, `i32`, `u8`, `bool` |
//! | `V2` (bfloat16 of ml_dtypes and JAX) | `bf16` |
//! | `f8` | `f32`, rounded; a finite number beyond the range of `f32` is an error |
//! | `i1`, `i2`, `i8`, `u2`, `u4`, `u8` | `i32`; a number beyond its range is an error |
//!
//! Both byte orders and both orders of axes are read. Written are little-endian files of version
//! 1.0 in row-major order; bf16, for which NumPy has no type, is written as `f4`, which has all its
//! values. Objects, texts, dates, complex numbers and records are refused by name, because they are
//! no numbers of a tensor, and a pickle can run code.
//!
//! ```
//! use slabwise::data::{HostArray, npy};
//! use ndarray::array;
//!
//! let saved = HostArray::from(array![[1, 2, 3], [4, 5, 6]]);
//! let bytes = npy::to_bytes(&saved);
//! assert_eq!(npy::of_bytes(&bytes)?, saved);
//! # Ok::<(), slabwise::data::DataError>(())
//! ```

mod header;

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, BufReader, ErrorKind, Read, Write};
use std::path::Path;

use flate2::read::DeflateDecoder;
use half::{bf16, f16};
use ndarray::{ArrayD, IxDyn, ShapeBuilder};
use rawzip::{
    CompressionMethod, ReaderAt, ZipArchive, ZipArchiveWriter, ZipSliceArchive, path::EntryPath,
};
use slabwise_planner::{brief, files};

use super::HostArray;
use super::idx::fill;
use crate::error::DataError;
use header::{Header, Stored};

/// The most elements reserved before any is read from a source of unknown length.
const MAX_RESERVE: u64 = 1 << 20;
/// Bytes read at once, a multiple of every element's size.
const CHUNK: usize = 1 << 16;
/// Bytes of a file's end that take no part in the array, if they are there.
const TRAILING: &str = "bytes follow the array; it may be two files joined";

/// Reads a file of one array. Arrays of 64 bits become f32 and i32, as in JAX by default: floats
/// are rounded to the nearest, and a number that the narrower type cannot hold is an error.
///
/// # Errors
/// A [`DataError`] that names the file and the defect: unreadable, another kind of file, a shape of
/// more bytes than the file has, missing or trailing bytes, or elements that no type of the runtime
/// holds.
pub fn read(path: impl AsRef<Path>) -> Result<HostArray, DataError> {
    let path = path.as_ref();
    let file = File::open(path).map_err(|source| io_error(path, source))?;
    let metadata = file.metadata().map_err(|source| io_error(path, source))?;
    let bytes = metadata.is_file().then_some(metadata.len());
    read_from(path, BufReader::new(file), bytes)
}

/// The array of a file's content.
///
/// # Errors
/// See [`read`].
pub fn of_bytes(bytes: &[u8]) -> Result<HostArray, DataError> {
    read_from(Path::new("the data"), bytes, Some(bytes.len() as u64))
}

/// The content of a file of this array.
pub fn to_bytes(array: &HostArray) -> Vec<u8> {
    let mut bytes = header::written(array);
    match array {
        HostArray::F32(a) => a.iter().for_each(|v| bytes.extend(v.to_le_bytes())),
        HostArray::F16(a) => a.iter().for_each(|v| bytes.extend(v.to_le_bytes())),
        HostArray::BF16(a) => {
            for value in a {
                bytes.extend(value.to_f32().to_le_bytes());
            }
        }
        HostArray::I32(a) => a.iter().for_each(|v| bytes.extend(v.to_le_bytes())),
        HostArray::U8(a) => bytes.extend(a),
        HostArray::Bool(a) => bytes.extend(a.iter().map(|&value| u8::from(value != 0))),
    }
    bytes
}

/// Writes a file of one array, whole or not at all.
///
/// # Errors
/// The system's, such as a full disk.
pub fn write(path: impl AsRef<Path>, array: &HostArray) -> Result<(), DataError> {
    replace(path.as_ref(), &to_bytes(array))
}

/// Reads all arrays of an `.npz` file, in its order, with their names (without `.npy`).
///
/// # Errors
/// Those of [`read`], with the name of the array; and if the file is no zip archive, is damaged
/// (each array has a checksum), is encrypted, or has two arrays of one name.
pub fn read_npz(path: impl AsRef<Path>) -> Result<Vec<(String, HostArray)>, DataError> {
    let path = path.as_ref();
    let file = File::open(path).map_err(|source| io_error(path, source))?;
    let bytes = file
        .metadata()
        .map_err(|source| io_error(path, source))?
        .len();
    let mut buffer = vec![0; rawzip::RECOMMENDED_BUFFER_SIZE];
    arrays(path, ZipArchive::from_file(file, &mut buffer), bytes)
}

/// The arrays of an `.npz` file's content, with their names.
///
/// # Errors
/// See [`read_npz`].
pub fn of_npz_bytes(bytes: &[u8]) -> Result<Vec<(String, HostArray)>, DataError> {
    let archive = ZipArchive::from_slice(bytes).map(ZipSliceArchive::into_reader_archive);
    arrays(Path::new("the data"), archive, bytes.len() as u64)
}

/// Writes an `.npz` file of named arrays, whole or not at all, without compression, as `numpy.savez`
/// does.
///
/// # Errors
/// If two arrays have one name, a name is empty, and the system's errors.
pub fn write_npz<'a>(
    path: impl AsRef<Path>,
    arrays: impl IntoIterator<Item = (&'a str, &'a HostArray)>,
) -> Result<(), DataError> {
    let path = path.as_ref();
    let refused = |detail| malformed(path, detail);
    let mut archive = ZipArchiveWriter::new(Vec::new());
    let mut names = BTreeSet::new();
    for (name, array) in arrays {
        if name.is_empty() || !names.insert(name) {
            let detail = format!(
                "an array can't be named \"{}\": each name is used once",
                brief(name)
            );
            return Err(refused(detail));
        }
        let failed = |error| refused(format!("array \"{}\": {error}", brief(name)));
        let mut written = || -> Result<(), rawzip::Error> {
            let file = format!("{name}.npy");
            let (mut entry, config) = archive
                .new_file(EntryPath::verbatim(file.into_bytes()))
                .start()?;
            let mut writer = config.wrap(&mut entry);
            writer
                .write_all(&to_bytes(array))
                .map_err(rawzip::Error::from)?;
            let (_, output) = writer.finish()?;
            entry.finish(output)?;
            Ok(())
        };
        written().map_err(failed)?;
    }
    let bytes = archive.finish();
    replace(path, &bytes.map_err(|error| refused(error.to_string()))?)
}

fn replace(path: &Path, bytes: &[u8]) -> Result<(), DataError> {
    files::replace(path, bytes).map_err(|source| write_error(path, source))
}

fn io_error(path: &Path, source: io::Error) -> DataError {
    let path = path.to_owned();
    DataError::Io { path, source }
}

fn write_error(path: &Path, source: io::Error) -> DataError {
    let path = path.to_owned();
    DataError::Write { path, source }
}

fn malformed(path: &Path, detail: String) -> DataError {
    let path = path.to_owned();
    DataError::Malformed { path, detail }
}

/// The arrays of a zip archive of so many bytes.
fn arrays<R: ReaderAt>(
    path: &Path,
    archive: Result<ZipArchive<R>, rawzip::Error>,
    bytes: u64,
) -> Result<Vec<(String, HostArray)>, DataError> {
    let damaged =
        |error: rawzip::Error| malformed(path, format!("it is no complete .npz file: {error}"));
    let archive = archive.map_err(damaged)?;
    let mut buffer = vec![0; rawzip::RECOMMENDED_BUFFER_SIZE];
    let mut entries = archive.entries(&mut buffer);
    let mut arrays: Vec<(String, HostArray)> = Vec::new();
    let mut packed = 0u64;
    while let Some(entry) = entries.next_entry().map_err(damaged)? {
        let name = String::from_utf8_lossy(entry.file_path().as_ref()).into_owned();
        let name = name.strip_suffix(".npy").unwrap_or(&name).to_owned();
        let wrong = |detail: &str| {
            Err(malformed(
                path,
                format!("array \"{}\": {detail}", brief(&name)),
            ))
        };
        if arrays.iter().any(|(other, _)| *other == name) {
            return wrong("there are two of this name");
        }
        if entry.flags().is_encrypted() {
            return wrong("it is encrypted");
        }
        // Parts of the file that count for several arrays could grow without limit.
        packed = packed.saturating_add(entry.compressed_size_hint());
        if packed > bytes {
            return wrong("it overlaps another array, or is larger than the file");
        }
        let inside = format!("{}: array \"{}\"", path.display(), brief(&name));
        let inside = Path::new(&inside);
        let method = entry.compression_method();
        let content = archive.get_entry(entry.wayfinder()).map_err(damaged)?;
        // The archive's word for the length of an array is not trusted.
        let array = match method {
            CompressionMethod::STORE => {
                read_from(inside, content.verifying_reader(content.reader()), None)
            }
            CompressionMethod::DEFLATE => {
                let plain = DeflateDecoder::new(content.reader());
                read_from(inside, content.verifying_reader(plain), None)
            }
            other => {
                return wrong(&format!(
                    "its compression is {other}; only none and deflate are read"
                ));
            }
        }?;
        arrays.push((name, array));
    }
    Ok(arrays)
}

/// Reads one array. `bytes` is the length of the source, where it is known.
fn read_from(
    path: &Path,
    mut reader: impl Read,
    bytes: Option<u64>,
) -> Result<HostArray, DataError> {
    let Header {
        stored,
        big_endian,
        column_major,
        shape,
        bytes: header,
    } = header::read(path, &mut reader)?;
    let size = stored.bytes() as u64;
    let too_large = || {
        let detail = format!(
            "its header declares the shape {shape:?}, more elements than memory can address"
        );
        malformed(path, detail)
    };
    // Lengths other than 0 are counted for empty arrays too, because a view's strides would overflow.
    let mut nonzero = shape.iter().filter(|&&n| n > 0);
    let addressable = nonzero.try_fold(size.max(8) as usize, |all, &n| all.checked_mul(n));
    if addressable.is_none_or(|all| isize::try_from(all).is_err()) {
        return Err(too_large());
    }
    let count: usize = shape.iter().product();
    let declared = count as u64 * size;
    if let Some(found) = bytes.map(|bytes| bytes.saturating_sub(header))
        && found < declared
    {
        let path = path.to_owned();
        return Err(DataError::Truncated {
            path,
            declared,
            found,
        });
    }
    let source = Elements {
        path,
        reader,
        count,
        reserve: bytes.map_or(count.min(MAX_RESERVE as usize), |_| count),
        big_endian,
        column_major,
        shape: &shape,
    };
    Ok(match stored {
        Stored::F32 => HostArray::F32(source.read(|b| Ok(f32::from_le_bytes(b)))?),
        Stored::F16 => HostArray::F16(source.read(|b| Ok(f16::from_le_bytes(b)))?),
        Stored::BF16 => HostArray::BF16(source.read(|b| Ok(bf16::from_le_bytes(b)))?),
        Stored::F64 => HostArray::F32(source.read(|b| {
            let value = f64::from_le_bytes(b);
            let rounded = value as f32;
            if rounded.is_infinite() && value.is_finite() {
                return Err(format!("{value:e}, beyond the range of f32"));
            }
            Ok(rounded)
        })?),
        Stored::I8 => HostArray::I32(source.read(|b| Ok(i8::from_le_bytes(b).into()))?),
        Stored::I16 => HostArray::I32(source.read(|b| Ok(i16::from_le_bytes(b).into()))?),
        Stored::I32 => HostArray::I32(source.read(|b| Ok(i32::from_le_bytes(b)))?),
        Stored::I64 => HostArray::I32(source.read(|b| narrowed(i64::from_le_bytes(b).into()))?),
        Stored::U16 => HostArray::I32(source.read(|b| Ok(u16::from_le_bytes(b).into()))?),
        Stored::U32 => HostArray::I32(source.read(|b| narrowed(u32::from_le_bytes(b).into()))?),
        Stored::U64 => HostArray::I32(source.read(|b| narrowed(u64::from_le_bytes(b).into()))?),
        Stored::U8 => HostArray::U8(source.read(|[byte]| Ok(byte))?),
        Stored::Bool => HostArray::Bool(source.read(|[byte]| Ok(u8::from(byte != 0)))?),
    })
}

fn narrowed(value: i128) -> Result<i32, String> {
    i32::try_from(value).map_err(|_| format!("{value}, beyond the range of i32"))
}

/// The elements of an array that follow in a source.
struct Elements<'a, R> {
    path: &'a Path,
    reader: R,
    count: usize,
    /// Elements to reserve memory for.
    reserve: usize,
    big_endian: bool,
    column_major: bool,
    shape: &'a [usize],
}

impl<R: Read> Elements<'_, R> {
    /// Reads and converts the elements; `convert` takes little-endian bytes, and fails with the
    /// value.
    fn read<const N: usize, T: Clone>(
        mut self,
        convert: impl Fn([u8; N]) -> Result<T, String>,
    ) -> Result<ArrayD<T>, DataError> {
        let mut values: Vec<T> = Vec::new();
        let reserved = values.try_reserve_exact(self.reserve);
        reserved
            .map_err(|error| io_error(self.path, io::Error::new(ErrorKind::OutOfMemory, error)))?;
        let mut chunk = vec![0; CHUNK.min(self.count.saturating_mul(N)).max(1)];
        while values.len() < self.count {
            let bytes = (self.count - values.len()).saturating_mul(N).min(CHUNK);
            let chunk = &mut chunk[..bytes];
            let got = self.fill(chunk)?;
            if got < bytes {
                return Err(DataError::Truncated {
                    path: self.path.to_owned(),
                    declared: self.count as u64 * N as u64,
                    found: values.len() as u64 * N as u64 + got as u64,
                });
            }
            for element in chunk.as_chunks::<N>().0 {
                let mut element = *element;
                if self.big_endian {
                    element.reverse();
                }
                let value = convert(element).map_err(|value| self.refused(values.len(), &value))?;
                values.push(value);
            }
        }
        if self.fill(&mut [0])? > 0 {
            return Err(malformed(self.path, TRAILING.into()));
        }
        let shape = IxDyn(self.shape).set_f(self.column_major);
        let array = ArrayD::from_shape_vec(shape, values);
        let array = array.map_err(|error| malformed(self.path, error.to_string()))?;
        Ok(match array.is_standard_layout() {
            true => array,
            false => array.as_standard_layout().into_owned(),
        })
    }

    /// Fills the buffer as far as the source goes; the number of bytes.
    fn fill(&mut self, buffer: &mut [u8]) -> Result<usize, DataError> {
        fill(&mut self.reader, buffer).map_err(|source| io_error(self.path, source))
    }

    /// The error of an element that has no value in the type it is read as.
    fn refused(&self, at: usize, value: &str) -> DataError {
        let mut rest = at;
        let mut index = vec![0; self.shape.len()];
        let mut axes: Vec<usize> = (0..self.shape.len()).collect();
        if !self.column_major {
            axes.reverse();
        }
        for axis in axes {
            index[axis] = rest % self.shape[axis];
            rest /= self.shape[axis];
        }
        malformed(self.path, format!("element {index:?} is {value}"))
    }
}

#[cfg(test)]
mod tests;
