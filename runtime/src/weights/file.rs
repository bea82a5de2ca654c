//! A safetensors file, read whole and checked.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use safetensors::tensor::Dtype;
use slabwise_kernels::dtype::DType;
use slabwise_planner::brief;

use super::gguf;
use super::header::{self, Header, Info, LENGTH_BYTES};
use super::{CHECKSUMS, Entry, SAFETENSORS, WeightsError, from_format};

/// The most bytes of a file: more than fits any machine that this crate would train on, but less
/// than a file that could only fill its disk.
pub const FILE_MAX: u64 = 1 << 38;

/// A safetensors file, read whole and checked.
#[derive(Debug)]
pub struct File {
    path: PathBuf,
    bytes: Vec<u8>,
    /// The end of the header.
    start: usize,
    pub(super) tensors: BTreeMap<String, Info>,
    metadata: BTreeMap<String, String>,
}

impl File {
    /// Reads and checks the file at `path`.
    ///
    /// # Errors
    ///
    /// [`WeightsError::Read`] when there is no such readable file, [`WeightsError::Malformed`] when
    /// its header is damaged, has a name twice or does not agree with its length,
    /// [`WeightsError::Damaged`] when a tensor differs from the one that was saved.
    pub fn open(path: impl AsRef<Path>) -> Result<File, WeightsError> {
        let path = path.as_ref();
        let read = || -> io::Result<Vec<u8>> {
            // Devices and pipes can be endless.
            if !fs::metadata(path)?.is_file() {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidInput,
                    "not a regular file",
                ));
            }
            let mut bytes = Vec::new();
            let length = fs::metadata(path)?.len();
            if length > FILE_MAX {
                let message = format!(
                    "it has {length} bytes, more than the {FILE_MAX} that are read at most"
                );
                return Err(io::Error::new(io::ErrorKind::FileTooLarge, message));
            }
            // A file larger than memory is an error, not the end of the process.
            let reserved = usize::try_from(length).map(|length| bytes.try_reserve_exact(length));
            reserved
                .map_err(io::Error::other)?
                .map_err(|error| io::Error::new(io::ErrorKind::OutOfMemory, error))?;
            fs::File::open(path)?.take(length).read_to_end(&mut bytes)?;
            Ok(bytes)
        };
        let bytes = read().map_err(|source| WeightsError::Read {
            path: path.to_owned(),
            source,
        })?;
        File::of_bytes(path, bytes)
    }

    /// Like [`File::open`], from a file's contents; `path` names it in errors.
    ///
    /// # Errors
    ///
    /// See [`File::open`].
    pub fn of_bytes(path: &Path, bytes: Vec<u8>) -> Result<File, WeightsError> {
        let malformed = |detail: String| WeightsError::Malformed {
            path: path.to_owned(),
            format: SAFETENSORS,
            detail,
        };
        if bytes.starts_with(gguf::MAGIC) {
            return Err(WeightsError::Unsupported {
                path: path.to_owned(),
                detail: "it is a GGUF file; Weights::open and Session::load_from read it".into(),
            });
        }
        let number = bytes.first_chunk().copied().ok_or_else(|| {
            let detail = "it has fewer bytes than the length of a header";
            malformed(detail.into())
        })?;
        let length = header::length(number, bytes.len() as u64).map_err(malformed)?;
        let start = LENGTH_BYTES + length as usize;
        let (text, data) = bytes[LENGTH_BYTES..].split_at(length as usize);
        let Header { tensors, metadata } =
            Header::parse(text, data.len() as u64).map_err(malformed)?;
        for (tensor, info) in &tensors {
            // Kernels rely on it.
            let data = data.get(info.range.clone()).unwrap_or_default();
            if info.dtype == Dtype::BOOL && data.iter().any(|&byte| byte > 1) {
                return Err(malformed(format!(
                    "tensor `{}` holds a bool other than 0 or 1",
                    brief(tensor)
                )));
            }
        }
        let mut file = File {
            path: path.to_owned(),
            bytes,
            start,
            tensors,
            metadata,
        };
        if let Some(sums) = file.metadata.remove(CHECKSUMS) {
            file.verify(&sums)?;
        }
        Ok(file)
    }

    /// Compares the checksums of all tensors with those that were saved.
    fn verify(&self, sums: &str) -> Result<(), WeightsError> {
        let path = || self.path.clone();
        let malformed = |detail: String| WeightsError::Malformed {
            path: path(),
            format: SAFETENSORS,
            detail,
        };
        let saved: Vec<u32> = sums
            .split(' ')
            .map(|sum| u32::from_str_radix(sum, 16))
            .collect::<Result<_, _>>()
            .map_err(|_| {
                malformed(format!(
                    "its note {CHECKSUMS} is not a list of checksums: `{}`",
                    brief(sums)
                ))
            })?;
        if saved.len() != self.tensors.len() {
            return Err(malformed(format!(
                "its note {CHECKSUMS} has {} checksums for {} tensors",
                saved.len(),
                self.tensors.len()
            )));
        }
        for ((name, info), saved) in self.tensors.iter().zip(saved) {
            let found = crc32fast::hash(self.data(info));
            if found != saved {
                return Err(WeightsError::Damaged {
                    path: path(),
                    tensor: name.clone(),
                    saved,
                    found,
                });
            }
        }
        Ok(())
    }

    /// The path that the file was read from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// All tensors of a type that a model can have, ordered by name.
    pub fn tensors(&self) -> impl Iterator<Item = Entry<'_>> {
        self.tensors
            .iter()
            .filter_map(|(name, info)| self.entry(name, info))
    }

    /// The tensor called `name`, if there is one and a model can have its type.
    pub fn get(&self, name: &str) -> Option<Entry<'_>> {
        self.tensors
            .get_key_value(name)
            .and_then(|(name, info)| self.entry(name, info))
    }

    /// The names of all tensors in order, each with its type's name in the format and its shape,
    /// including types that no model can have, such as I64.
    pub fn names(&self) -> impl ExactSizeIterator<Item = (&str, String, &[u64])> {
        self.tensors
            .iter()
            .map(|(name, info)| (&**name, info.dtype.to_string(), &*info.shape))
    }

    /// The free-form metadata saved with the tensors.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    fn entry<'a>(&'a self, name: &'a str, info: &Info) -> Option<Entry<'a>> {
        Some(Entry {
            name,
            dtype: from_format(info.dtype)?,
            shape: info.shape.clone(),
            bytes: self.data(info),
        })
    }

    fn data(&self, info: &Info) -> &[u8] {
        // The range was checked when the file was read.
        let data = self.bytes.get(self.start..).unwrap_or_default();
        data.get(info.range.clone()).unwrap_or_default()
    }

    /// A tensor's elements converted to a type that it has or that [`is_cast`] permits.
    pub(crate) fn elements(&self, name: &str, to: DType) -> Option<Cow<'_, [u8]>> {
        let info = self.tensors.get(name)?;
        let bytes = self.data(info);
        if from_format(info.dtype) == Some(to) {
            return Some(Cow::Borrowed(bytes));
        }
        if !is_cast(info.dtype, to) {
            return None;
        }
        // Narrower types hold fewer values: a value between two of them goes to the nearest, a tie
        // to the even one.
        let floats: Vec<f32> = match info.dtype {
            Dtype::F16 => bytes
                .as_chunks()
                .0
                .iter()
                .map(|b| f16::from_le_bytes(*b).to_f32())
                .collect(),
            Dtype::BF16 => bytes
                .as_chunks()
                .0
                .iter()
                .map(|b| bf16::from_le_bytes(*b).to_f32())
                .collect(),
            Dtype::F32 => bytes
                .as_chunks()
                .0
                .iter()
                .map(|b| f32::from_le_bytes(*b))
                .collect(),
            Dtype::F64 => bytes
                .as_chunks()
                .0
                .iter()
                .map(|b| f64::from_le_bytes(*b) as f32)
                .collect(),
            _ => return None,
        };
        Some(Cow::Owned(match to {
            DType::F32 => floats.into_iter().flat_map(f32::to_le_bytes).collect(),
            DType::F16 => floats
                .into_iter()
                .flat_map(|x| f16::from_f32(x).to_le_bytes())
                .collect(),
            DType::BF16 => floats
                .into_iter()
                .flat_map(|x| bf16::from_f32(x).to_le_bytes())
                .collect(),
            DType::I32 | DType::U8 | DType::Bool => return None,
        }))
    }
}

/// Whether a type of a file is cast to a type of a model: floats are, except 64 bits to 16, which
/// would round twice.
pub(super) fn is_cast(from: Dtype, to: DType) -> bool {
    let half = matches!(to, DType::F16 | DType::BF16);
    match from {
        Dtype::F16 | Dtype::BF16 | Dtype::F32 => half || to == DType::F32,
        Dtype::F64 => to == DType::F32,
        _ => false,
    }
}
