//! Weights on disk, in the [safetensors](https://github.com/huggingface/safetensors) format, and
//! those of other programs also in [GGUF](https://github.com/ggml-org/ggml/blob/master/docs/gguf.md),
//! the format of llama.cpp.
//!
//! [`save`] replaces a file as a whole: killed at any moment, it leaves either the earlier file or
//! the new one. [`File`] checks everything it reads before it hands out a tensor, and
//! [`LoadOptions`] map tensors of a file to weights; every difference between a file and a model is
//! reported at once. Elements are little-endian, row-major, and travel as bytes, so every bit
//! survives, NaN payloads included.
//!
//! Weights of other programs, in one file or in shards, are opened by [`Weights::open`], mapped by
//! [`Rules`] and read a part at a time, so that loading takes hardly more memory than the weights
//! themselves:
//!
//! ```no_run
//! # use slabwise::prelude::*;
//! # fn load(session: &mut Session) -> Result<()> {
//! use slabwise::weights::{Rules, Weights};
//!
//! session.load_from(&Weights::open("openai-community/gpt2")?, &Rules::gpt2())?;
//! # Ok(())
//! # }
//! ```
//!
//! A GGUF file is opened in the same way, and its names are mapped by rules such as
//! [`Rules::llama_gguf`]. Tensors in blocks of a few bits are read as the f32 that they stand for, or
//! stay in their bits where the model has [quantized](crate::Scope::quantized) weights; [`Weights`]
//! lists the types, and which of them are taken over exactly.
//!
//! A file that [`save`] wrote has a checksum of each tensor in its metadata (`slabwise.crc32`:
//! CRC-32 of the bytes, eight hexadecimal digits for each tensor in the order of names), and a
//! tensor that has changed since is refused by name. Files of other programs, without this entry,
//! are read unchecked.

mod assembly;
mod convert;
mod file;
mod fit;
mod gguf;
mod header;
mod layouts;
mod map;
mod open;
mod pattern;
mod plan;
mod quantize;
mod rules;
mod write;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use safetensors::tensor::Dtype;
use slabwise_kernels::dtype::DType;
use slabwise_planner::files;

pub use file::{FILE_MAX, File};
pub(crate) use fit::{Expected, fit};
pub use fit::{LoadOptions, Loaded};
pub use open::Weights;
pub(crate) use plan::{LoadPlan, names_after};
pub(crate) use quantize::{NotFinite, Quantized, check as check_finite, quantize};
pub use rules::Rules;
pub use slabwise_compiler::error::WeightsError;
pub use write::SaveOptions;
pub(crate) use write::{Saved, save_as};

/// A named tensor, as [`save`] writes it and [`File`] hands it out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry<'a> {
    /// Name, unique within a file.
    pub name: &'a str,
    /// Element type.
    pub dtype: DType,
    /// Extents, outermost first; empty for a scalar.
    pub shape: Vec<u64>,
    /// Elements in row-major order, little-endian, without guaranteed alignment.
    pub bytes: &'a [u8],
}

/// The name that the format reserves for its metadata.
const METADATA_KEY: &str = "__metadata__";

/// The format's name in errors.
const SAFETENSORS: &str = "safetensors";

/// The metadata key of the checksums of all tensors.
const CHECKSUMS: &str = "slabwise.crc32";

/// Writes `tensors` and `metadata` to `path`, replacing an earlier file in one step; see
/// [`files::replace`] for its treatment of permissions, of links and of targets that are not files.
/// The tensors are written one after the other, from where they are.
///
/// # Errors
///
/// [`WeightsError::InvalidTensor`] for a repeated or reserved name, bytes that do not fill the
/// shape, or a bool other than 0 or 1; [`WeightsError::Write`] when the system refuses. Either way
/// the earlier file at `path` stays.
pub fn save(
    path: &Path,
    tensors: &[Entry<'_>],
    metadata: &BTreeMap<String, String>,
) -> Result<(), WeightsError> {
    let mut names = BTreeSet::new();
    let mut views = Vec::with_capacity(tensors.len());
    for entry in tensors {
        let invalid = |detail: String| WeightsError::InvalidTensor {
            tensor: entry.name.to_owned(),
            detail,
        };
        if entry.name == METADATA_KEY {
            return Err(invalid(
                "the format reserves this name; choose another".into(),
            ));
        }
        if !names.insert(entry.name) {
            return Err(invalid(
                "the name occurs twice; names must be unique".into(),
            ));
        }
        check(entry).map_err(invalid)?;
        views.push((entry.name, (entry, to_format(entry.dtype))));
    }
    if metadata.contains_key(CHECKSUMS) {
        let detail = "it is a note that only a save writes; choose another name".into();
        return Err(WeightsError::InvalidTensor {
            tensor: CHECKSUMS.into(),
            detail,
        });
    }
    let mut metadata = metadata.clone();
    if !tensors.is_empty() {
        let bytes: BTreeMap<&str, &[u8]> = tensors
            .iter()
            .map(|entry| (entry.name, entry.bytes))
            .collect();
        let sums: Vec<String> = bytes
            .values()
            .map(|bytes| format!("{:08x}", crc32fast::hash(bytes)))
            .collect();
        metadata.insert(CHECKSUMS.into(), sums.join(" "));
    }
    // Wide types first, so that each tensor lies at a multiple of its type's size.
    views.sort_by(|(a, left), (b, right)| (right.1, a).cmp(&(left.1, b)));
    let tensors = views.iter().map(|(name, (entry, dtype))| {
        let bytes = entry.bytes.len() as u64;
        (*name, *dtype, &*entry.shape, bytes)
    });
    let header = write::header(&metadata, tensors);
    let written = files::replace_with(path, &mut |file| {
        file.write_all(&(header.len() as u64).to_le_bytes())?;
        file.write_all(header.as_bytes())?;
        let mut all = views.iter();
        all.try_for_each(|(_, (entry, _))| file.write_all(entry.bytes))
    });
    written.map_err(|source| WeightsError::Write {
        path: path.to_owned(),
        source,
    })
}

/// Checks one entry; the error names its defect.
fn check(entry: &Entry<'_>) -> Result<(), String> {
    let elements = entry
        .shape
        .iter()
        .try_fold(1u64, |product, &extent| product.checked_mul(extent));
    let needed = elements.and_then(|n| n.checked_mul(entry.dtype.bytes() as u64));
    if needed != Some(entry.bytes.len() as u64) {
        let needed = needed.map_or_else(
            || "more bytes than can be counted".to_owned(),
            |n| format!("{n} bytes"),
        );
        return Err(format!(
            "{} {:?} takes {needed}, but {} were given",
            entry.dtype,
            entry.shape,
            entry.bytes.len()
        ));
    }
    if entry.dtype == DType::Bool && entry.bytes.iter().any(|&byte| byte > 1) {
        return Err("a bool must be stored as 0 or 1".into());
    }
    Ok(())
}

const fn to_format(dtype: DType) -> Dtype {
    match dtype {
        DType::F32 => Dtype::F32,
        DType::F16 => Dtype::F16,
        DType::BF16 => Dtype::BF16,
        DType::I32 => Dtype::I32,
        DType::U8 => Dtype::U8,
        DType::Bool => Dtype::BOOL,
    }
}

fn from_format(dtype: Dtype) -> Option<DType> {
    DType::ALL
        .into_iter()
        .find(|&ours| to_format(ours) == dtype)
}

#[cfg(test)]
mod tests;
