//! The weights of a model saved in the layout of other programs: rules run backwards.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write};
use std::path::Path;

use safetensors::tensor::Dtype;
use slabwise_kernels::dtype::DType;
use slabwise_planner::files;

use super::assembly::Assembly;
use super::convert::{self, Fault, size};
use super::map::{self, Origin};
use super::open::{INDEX, WHOLE};
use super::plan::{cut, sound, stored_as};
use super::rules::Rules;
use super::{METADATA_KEY, WeightsError, to_format};

/// How [`Session::save_as`](crate::Session::save_as) writes weights: floats as the model has them,
/// in one file, unless told otherwise.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SaveOptions {
    floats: Option<DType>,
    shard_bytes: Option<u64>,
}

impl SaveOptions {
    /// Floats of the model's own type, in one file.
    pub fn new() -> SaveOptions {
        SaveOptions::default()
    }

    /// Floats are stored as f32, f16 or bf16, each rounded to the nearest. A value that would be
    /// infinite is an error.
    #[must_use]
    pub fn floats(self, dtype: DType) -> SaveOptions {
        SaveOptions {
            floats: Some(dtype),
            ..self
        }
    }

    /// Files of at most this many bytes of weights, listed in an index; a larger tensor has a file
    /// of its own.
    #[must_use]
    pub fn shard_bytes(self, bytes: u64) -> SaveOptions {
        SaveOptions {
            shard_bytes: Some(bytes),
            ..self
        }
    }
}

/// A tensor of a file to be written.
struct Output {
    name: String,
    dtype: Dtype,
    tensor: Assembly,
    bytes: u64,
}

/// Shows the bytes of a tensor of the model.
pub(crate) type Show<'s, E> = dyn Fn(usize, &mut dyn FnMut(&[u8])) -> Result<(), E> + 's;

/// A weight of a model to be saved.
pub(crate) struct Saved {
    pub name: String,
    pub dtype: DType,
    pub shape: Vec<u64>,
    /// Whether it is saved in its own type, whatever the type of other floats.
    pub keeps_type: bool,
}

/// Writes the weights of a model to a file (`….safetensors`) or a folder; `show` gives the bytes of
/// each.
pub(crate) fn save_as<E: From<WeightsError>>(
    path: &Path,
    model: &[Saved],
    rules: &Rules,
    options: &SaveOptions,
    show: &Show<'_, E>,
) -> Result<(), E> {
    sound(rules)?;
    let floats = match options.floats {
        None => None,
        Some(dtype @ (DType::F32 | DType::F16 | DType::BF16)) => Some(to_format(dtype)),
        Some(other) => {
            let faults = format!("\n  SaveOptions::floats({other}): it is f32, f16 or bf16");
            return Err(WeightsError::Rules { faults }.into());
        }
    };
    let origin = |saved: &Saved| Origin {
        name: saved.name.clone(),
        dtype: to_format(saved.dtype),
        shape: saved.shape.clone(),
    };
    let origins: Vec<Origin> = model.iter().map(origin).collect();
    let mut mapped = map::backward(rules, &origins);
    if mapped.tensors.contains_key(METADATA_KEY) {
        let said = format!("the format reserves the name {METADATA_KEY}");
        mapped.problems.push(said);
    }
    if !mapped.problems.is_empty() {
        cut(&mut mapped.problems);
        let lines = mapped.problems.iter().map(|line| format!("\n  {line}"));
        return Err(WeightsError::Mismatch {
            path: path.to_owned(),
            problems: lines.collect(),
            help: "saving applies the rules backwards to the model's weights; nothing was written"
                .into(),
        }
        .into());
    }
    let mut outputs: Vec<Output> = mapped
        .tensors
        .into_iter()
        .map(|(name, tensor)| {
            let source = tensor.pieces.first().map(|piece| piece.source);
            let dtype = source.map_or(Dtype::F32, |source| {
                let floats = floats.filter(|_| !model[source].keeps_type);
                stored_as(origins[source].dtype, floats)
            });
            let elements: u64 = tensor.shape.iter().product();
            Output {
                name,
                dtype,
                bytes: elements * size(dtype) as u64,
                tensor,
            }
        })
        .collect();
    // Wide types first, so that each tensor lies at a multiple of its type's size.
    outputs.sort_by_key(|output| std::cmp::Reverse(size(output.dtype)));
    let writer = Writer {
        origins: &origins,
        show,
    };
    // Nothing is written if a value would be lost.
    for output in &outputs {
        writer.look(output)?;
    }
    let is_file = path
        .extension()
        .is_some_and(|extension| extension.eq_ignore_ascii_case("safetensors"));
    if is_file {
        return writer.file(path, &outputs);
    }
    fs::create_dir_all(path).map_err(|source| unwritten(path, source))?;
    let most = options.shard_bytes.unwrap_or(u64::MAX);
    let total: u64 = outputs.iter().map(|output| output.bytes).sum();
    let (stays, hidden) = match total <= most {
        true => (INDEX, false),
        false => (WHOLE, true),
    };
    if path.join(stays).exists() {
        let which = if hidden {
            "would be read instead of"
        } else {
            "belongs to other weights than"
        };
        let said = format!(
            "the folder has {stays}, which {which} the new files: remove it, or choose another folder"
        );
        let source = io::Error::new(io::ErrorKind::AlreadyExists, said);
        return Err(unwritten(path, source).into());
    }
    if total <= most {
        return writer.file(&path.join(WHOLE), &outputs);
    }
    writer.shards(path, &outputs, most, total)
}

fn unwritten(path: &Path, source: io::Error) -> WeightsError {
    WeightsError::Write {
        path: path.to_owned(),
        source,
    }
}

struct Writer<'s, E> {
    origins: &'s [Origin],
    show: &'s Show<'s, E>,
}

impl<E: From<WeightsError>> Writer<'_, E> {
    /// Looks at the values that the file's type may not have.
    fn look(&self, output: &Output) -> Result<(), E> {
        for piece in &output.tensor.pieces {
            let origin = &self.origins[piece.source];
            if !convert::may_fail(origin.dtype, output.dtype) {
                continue;
            }
            let mut lost = None;
            (self.show)(piece.source, &mut |mut bytes| {
                let shape = &output.tensor.shape;
                lost =
                    convert::copy(piece, origin.dtype, output.dtype, shape, &mut bytes, None).err();
            })?;
            if let Some(fault) = lost {
                let said = match fault {
                    Fault::Value { value, .. } => format!(
                        "it has the value {value}, which {} cannot hold; nothing was written",
                        output.dtype
                    ),
                    Fault::Read(error) => error.to_string(),
                };
                return Err(WeightsError::InvalidTensor {
                    tensor: origin.name.clone(),
                    detail: said,
                }
                .into());
            }
        }
        Ok(())
    }

    /// Writes one file.
    fn file<'o>(
        &self,
        path: &Path,
        outputs: impl IntoIterator<Item = &'o Output> + Clone,
    ) -> Result<(), E> {
        // Other programs ask for this note, because PyTorch's layout of a convolution is not that
        // of TensorFlow.
        let notes = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
        let tensors = outputs.clone().into_iter().map(|output| {
            let shape = &*output.tensor.shape;
            (&*output.name, output.dtype, shape, output.bytes)
        });
        let header = header(&notes, tensors);
        // The error of the device, which a writer cannot return.
        let failed = RefCell::new(None);
        let written = files::replace_with(path, &mut |file| {
            file.write_all(&(header.len() as u64).to_le_bytes())?;
            file.write_all(header.as_bytes())?;
            for output in outputs.clone() {
                self.tensor(output, file, &failed)?;
            }
            Ok(())
        });
        if let Some(error) = failed.into_inner() {
            return Err(error);
        }
        written.map_err(|source| unwritten(path, source).into())
    }

    /// Writes the bytes of one tensor.
    fn tensor(
        &self,
        output: &Output,
        file: &mut dyn Write,
        failed: &RefCell<Option<E>>,
    ) -> io::Result<()> {
        let show = |source: usize, look: &mut dyn FnMut(&[u8])| {
            (self.show)(source, look).map_err(|error| {
                *failed.borrow_mut() = Some(error);
                io::Error::other("the device failed")
            })
        };
        let tensor = &output.tensor;
        if let [piece] = &*tensor.pieces
            && tensor.is_whole()
            && self.origins[piece.source].dtype == output.dtype
        {
            let mut written = Ok(());
            show(piece.source, &mut |bytes| written = file.write_all(bytes))?;
            return written;
        }
        let mut bytes = vec![0; output.bytes as usize];
        for piece in &tensor.pieces {
            let from = self.origins[piece.source].dtype;
            let mut copied = Ok(());
            show(piece.source, &mut |mut source| {
                let target = Some(&mut *bytes);
                copied = convert::copy(
                    piece,
                    from,
                    output.dtype,
                    &tensor.shape,
                    &mut source,
                    target,
                );
            })?;
            copied.map_err(|fault| match fault {
                Fault::Read(error) => error,
                Fault::Value { value, .. } => io::Error::other(format!("the value {value}")),
            })?;
        }
        file.write_all(&bytes)
    }

    /// Writes shards of at most `most` bytes, and their index.
    fn shards(&self, folder: &Path, outputs: &[Output], most: u64, total: u64) -> Result<(), E> {
        let mut shards: Vec<(u64, Vec<&Output>)> = Vec::new();
        for output in outputs {
            match shards.last_mut() {
                Some((bytes, shard)) if *bytes + output.bytes <= most => {
                    *bytes += output.bytes;
                    shard.push(output);
                }
                _ => shards.push((output.bytes, vec![output])),
            }
        }
        let index = folder.join(INDEX);
        // Without their index, shards of an earlier save that are half replaced are not read.
        match fs::remove_file(&index) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(unwritten(&index, error).into());
            }
            _ => {}
        }
        let mut list = serde_json::Map::new();
        for (number, (_, shard)) in shards.iter().enumerate() {
            let name = format!("model-{:05}-of-{:05}.safetensors", number + 1, shards.len());
            self.file(&folder.join(&name), shard.iter().copied())?;
            for output in shard {
                list.insert(output.name.clone(), name.clone().into());
            }
        }
        let text = serde_json::json!({ "metadata": { "total_size": total }, "weight_map": list });
        let text = format!("{text:#}\n");
        files::replace(&index, text.as_bytes()).map_err(|source| unwritten(&index, source).into())
    }
}

/// The header of a file with this metadata and these tensors, one after the other, padded so that
/// they begin at a multiple of eight bytes. Of each tensor there are name, type, shape and bytes.
pub(super) fn header<'o>(
    metadata: &BTreeMap<String, String>,
    tensors: impl IntoIterator<Item = (&'o str, Dtype, &'o [u64], u64)>,
) -> String {
    let mut at = 0;
    let tensors = tensors.into_iter().map(|(name, dtype, shape, bytes)| {
        let entry = serde_json::json!({
            "dtype": dtype.to_string(),
            "shape": shape,
            "data_offsets": [at, at + bytes],
        });
        at += bytes;
        format!("{}:{entry}", serde_json::Value::from(name))
    });
    let notes = (!metadata.is_empty())
        .then(|| format!("\"{METADATA_KEY}\":{}", serde_json::json!(metadata)));
    let entries: Vec<String> = notes.into_iter().chain(tensors).collect();
    let mut header = format!("{{{}}}", entries.join(","));
    let padded = header.len().next_multiple_of(8);
    header += &" ".repeat(padded - header.len());
    header
}
