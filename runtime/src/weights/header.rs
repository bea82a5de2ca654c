//! The header of a safetensors file: names, types, shapes and places of its tensors.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::Range;

use safetensors::tensor::{Dtype, Metadata};
use serde::de::{Deserialize, Deserializer, Error as _, IgnoredAny, MapAccess, Visitor};
use slabwise_planner::{brief, shortened};

use super::METADATA_KEY;

/// Most characters of a parser's message.
const DETAIL_MAX: usize = 160;

/// The most bytes of a header, as the format's own library has it.
pub(super) const HEADER_MAX: u64 = 100_000_000;

/// The bytes of the number in front of a header.
pub(super) const LENGTH_BYTES: usize = size_of::<u64>();

/// The header's entry of one tensor.
#[derive(Debug)]
pub(super) struct Info {
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<u64>,
    /// Its bytes, counted from the end of the header.
    pub(super) range: Range<usize>,
}

/// A header that was read and checked.
#[derive(Debug)]
pub(super) struct Header {
    pub(super) tensors: BTreeMap<String, Info>,
    pub(super) metadata: BTreeMap<String, String>,
}

/// The length of a header, from the number in front of it.
///
/// # Errors
/// If the header would not fit into a file of `file` bytes or is absurdly long; the text names the
/// defect.
pub(super) fn length(number: [u8; LENGTH_BYTES], file: u64) -> Result<u64, String> {
    let length = u64::from_le_bytes(number);
    let rest = file.saturating_sub(LENGTH_BYTES as u64);
    if length > rest {
        return Err(format!(
            "its header would have {length} bytes, but only {rest} follow"
        ));
    }
    if length > HEADER_MAX {
        return Err(format!(
            "its header has {length} bytes, more than the {HEADER_MAX} of the format"
        ));
    }
    Ok(length)
}

impl Header {
    /// Reads and checks a header's text; `data` bytes follow it in the file. Tensors fill the data
    /// without gaps or overlaps.
    ///
    /// # Errors
    /// A text that names the defect.
    pub(super) fn parse(text: &[u8], data: u64) -> Result<Header, String> {
        let said = |error: &dyn fmt::Display| shortened(&error.to_string(), DETAIL_MAX);
        only_once(text).map_err(|e| said(&e))?;
        let parsed: Metadata = serde_json::from_slice(text).map_err(|e| said(&e))?;
        if parsed.data_len() as u64 != data {
            return Err(format!(
                "its tensors take {} bytes, but {data} follow the header",
                parsed.data_len()
            ));
        }
        let mut tensors = BTreeMap::new();
        for tensor in parsed.offset_keys() {
            if let Some(found) = parsed.info(&tensor) {
                let shape = found.shape.iter().map(|&extent| extent as u64).collect();
                let range = found.data_offsets.0..found.data_offsets.1;
                tensors.insert(
                    tensor,
                    Info {
                        dtype: found.dtype,
                        shape,
                        range,
                    },
                );
            }
        }
        let metadata = parsed.metadata().iter().flatten();
        Ok(Header {
            tensors,
            metadata: metadata.map(|(k, v)| (k.clone(), v.clone())).collect(),
        })
    }
}

/// Fails if an object of a JSON text, or one directly inside of it, has a key twice.
pub(super) fn only_once(text: &[u8]) -> serde_json::Result<()> {
    serde_json::from_slice::<Names>(text).map(drop)
}

/// The keys of a JSON object, which must be unique: of the header, and of its metadata.
struct Names;

impl<'de> Deserialize<'de> for Names {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Names, D::Error> {
        deserializer.deserialize_map(Names)
    }
}

impl<'de> Visitor<'de> for Names {
    type Value = Names;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Names, A::Error> {
        let mut names = BTreeSet::new();
        while let Some(name) = map.next_key::<Cow<'de, str>>()? {
            // The note of a safetensors file, and the list of an index of shards.
            if name == METADATA_KEY || name == "weight_map" {
                map.next_value::<Names>()?;
            } else {
                map.next_value::<IgnoredAny>()?;
            }
            if names.contains(&name) {
                return Err(A::Error::custom(format_args!(
                    "its header has the name `{}` twice",
                    brief(&name)
                )));
            }
            names.insert(name);
        }
        Ok(Names)
    }
}
