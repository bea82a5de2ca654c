//! Model files and the data files beside them.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Component, Path};

use prost::Message;
use prost::bytes::Bytes;

use crate::error::{Error, Result};
use crate::proto::{ModelProto, TensorProto};

/// The most bytes of a model file: the limit of protocol buffers.
pub const MAX_BYTES: u64 = (1 << 31) - 1;

/// The bytes of a file of at most [`MAX_BYTES`].
pub fn bytes(path: &Path) -> Result<Vec<u8>> {
    let io = |source| Error::Io {
        path: path.into(),
        source,
    };
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(io)?;
    file.take(MAX_BYTES + 1)
        .read_to_end(&mut bytes)
        .map_err(io)?;
    if bytes.len() as u64 > MAX_BYTES {
        return Err(Error::File {
            path: path.into(),
            message: format!("has more than {MAX_BYTES} bytes, the most of a protocol buffer"),
        });
    }
    Ok(bytes)
}

/// The message in a file.
pub fn message<M: Message + Default>(path: &Path) -> Result<M> {
    decode(path, bytes(path)?.into())
}

/// The message in these bytes, of the file of this path.
pub fn decode<M: Message + Default>(path: &Path, bytes: Bytes) -> Result<M> {
    M::decode(bytes).map_err(|error| Error::File {
        path: path.into(),
        message: format!("is no protocol buffer of this kind, or damaged: {error}"),
    })
}

/// The model in a file.
pub fn model(path: &Path) -> Result<ModelProto> {
    let model: ModelProto = message(path)?;
    if model.graph.is_none() {
        return Err(Error::File {
            path: path.into(),
            message: "is no ONNX model: it has no graph".into(),
        });
    }
    Ok(model)
}

/// The bytes of a tensor that lie in a file of `folder`.
///
/// # Errors
/// A path that leads out of the folder, a file that cannot be read, and a length that is not the
/// tensor's.
pub fn external(folder: Option<&Path>, tensor: &TensorProto) -> Result<Bytes, String> {
    let name = &tensor.name;
    let entry = |key: &str| {
        let found = tensor.external_data.iter().find(|entry| entry.key == key);
        found.map(|entry| entry.value.as_str())
    };
    let number = |key: &str| match entry(key) {
        None => Ok(None),
        Some(text) => text.parse::<u64>().map(Some).map_err(|_| {
            format!("tensor \"{name}\": the {key} of its data, {text}, is no number of bytes")
        }),
    };
    let location =
        entry("location").ok_or_else(|| format!("tensor \"{name}\" names no file of its data"))?;
    let plain = Path::new(location)
        .components()
        .all(|part| matches!(part, Component::Normal(_) | Component::CurDir));
    if !plain {
        return Err(format!(
            "tensor \"{name}\": its data is in {location}, outside of the model's folder"
        ));
    }
    let folder = folder.ok_or_else(|| {
        format!(
            "tensor \"{name}\": its data is in the file {location}, but the model has no folder"
        )
    })?;
    let path = folder.join(location);
    let io = |error: std::io::Error| format!("tensor \"{name}\": {}: {error}", path.display());
    let mut file = File::open(&path).map_err(io)?;
    let has = file.metadata().map_err(io)?.len();
    let offset = number("offset")?.unwrap_or(0);
    let left = has.checked_sub(offset).ok_or_else(|| {
        format!(
            "tensor \"{name}\": its data begin at byte {offset} of {}, which has {has}",
            path.display()
        )
    })?;
    let length = number("length")?.unwrap_or(left);
    if length > left {
        return Err(format!(
            "tensor \"{name}\": its data are {length} bytes from {offset} on of {}, which has {has}",
            path.display()
        ));
    }
    file.seek(SeekFrom::Start(offset)).map_err(io)?;
    let mut bytes = Vec::new();
    file.take(length).read_to_end(&mut bytes).map_err(io)?;
    Ok(bytes.into())
}
