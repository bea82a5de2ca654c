//! Weights in one file or in shards, opened but not read.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::path::{Component, Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use safetensors::tensor::Dtype;
use slabwise_planner::{brief, shortened};

use super::convert::{self, Bytes, WINDOW};
use super::file::FILE_MAX;
use super::gguf::{self, Elements, Refused, TensorType};
use super::header::{self, Header, LENGTH_BYTES};
use super::{CHECKSUMS, SAFETENSORS, WeightsError};

/// The file of a folder with all weights, and the one that lists shards.
pub(super) const WHOLE: &str = "model.safetensors";
pub(super) const INDEX: &str = "model.safetensors.index.json";

/// The most bytes of an index of shards.
const INDEX_MAX: u64 = 1 << 26;

/// Most names that an error lists.
const LISTED: usize = 8;

/// Weights in the safetensors format or in that of llama.cpp (GGUF), in one file or in shards:
/// opened, but not read. Each tensor is read when it is loaded, a part at a time, so that loading
/// takes the memory of the weights and little more.
///
/// Shapes are row-major, which is the reverse of the order in a GGUF file. Elements of its blocks
/// are read as the f32 that llama.cpp's Python package decodes them to, bit for bit, and cast as
/// floats are. These types are read: F32, F16, BF16, F64, I8, I16, I32, I64, Q4_0, Q4_1, Q5_0, Q5_1,
/// Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS and MXFP4. Tensors of other types are listed,
/// and loading one is an error.
///
/// A weight that a model declares as [quantized](crate::Scope::quantized) takes over the numbers of
/// Q4_0 (where the model has 4 bits in blocks of 32) and of Q8_0 (8 bits in blocks of 32), and
/// stands for exactly the values of the file; rules may move whole rows and blocks. Other types and
/// formats are quantized by their values.
///
/// ```no_run
/// use slabwise::weights::Weights;
///
/// let weights = Weights::open("Llama-3.2-1B")?;
/// for (name, dtype, shape) in weights.names() {
///     println!("{name} {dtype} {shape:?}");
/// }
/// # Ok::<(), slabwise::Error>(())
/// ```
#[derive(Debug)]
pub struct Weights {
    path: PathBuf,
    files: Vec<Shard>,
    tensors: BTreeMap<String, Stored>,
    metadata: BTreeMap<String, String>,
}

/// One file of weights.
#[derive(Debug)]
struct Shard {
    path: PathBuf,
    file: Mutex<fs::File>,
    /// The saved checksums of its tensors, in the order of names.
    sums: Option<String>,
}

/// A tensor in a file.
#[derive(Debug)]
pub(super) struct Stored {
    file: usize,
    /// The type of its elements as they are read.
    pub(super) dtype: Dtype,
    /// Its type in a GGUF file.
    pub(super) kind: Option<&'static TensorType>,
    pub(super) shape: Vec<u64>,
    /// Its first byte in the file, and its bytes there.
    at: u64,
    bytes: u64,
}

impl Stored {
    /// Its type's name in the format.
    pub(super) fn type_name(&self) -> String {
        match self.kind {
            Some(kind) => kind.name.to_owned(),
            None => self.dtype.to_string(),
        }
    }

    /// Whether its elements lie in the file one after the other.
    pub(super) fn is_plain(&self) -> bool {
        self.kind
            .is_none_or(|kind| matches!(kind.elements, Elements::Plain(_)))
    }

    /// Whether its elements can be read.
    pub(super) fn is_read(&self) -> bool {
        self.kind
            .is_none_or(|kind| !matches!(kind.elements, Elements::Unread))
    }

    /// The bytes of its elements as they are read.
    pub(super) fn length(&self) -> u64 {
        if self.is_plain() {
            return self.bytes;
        }
        let elements: u64 = self.shape.iter().product();
        elements * convert::size(self.dtype) as u64
    }
}

impl Weights {
    /// Opens a safetensors file, an index of shards (`model.safetensors.index.json`), a GGUF file
    /// (of version 2 or 3, little-endian), or a folder that has one of them, and reads the headers.
    /// Shards lie in the folder of their index; the other files of a GGUF that was split
    /// (`…-00001-of-00003.gguf`) lie beside the one that is named. A GGUF file is known by its first
    /// bytes.
    ///
    /// # Errors
    /// [`WeightsError::Read`] when a file is not there or not readable, [`WeightsError::Malformed`]
    /// when a header or an index is damaged, when an index names files outside of its folder or
    /// tensors that its files do not have, or when two files have a tensor of the same name;
    /// [`WeightsError::Unsupported`] for a GGUF file of another version or byte order.
    pub fn open(path: impl AsRef<Path>) -> Result<Weights, WeightsError> {
        let path = path.as_ref();
        let unread = |source| WeightsError::Read {
            path: path.to_owned(),
            source,
        };
        if fs::metadata(path).map_err(unread)?.is_dir() {
            return Weights::open(found_in(path).map_err(unread)?);
        }
        let is_index = path
            .extension()
            .is_some_and(|extension| extension.eq_ignore_ascii_case("json"));
        let mut weights = Weights {
            path: path.to_owned(),
            files: Vec::new(),
            tensors: BTreeMap::new(),
            metadata: BTreeMap::new(),
        };
        if !is_index {
            if weights.add(path)? == gguf::NAME {
                for other in gguf::splits(path, &weights.metadata)? {
                    weights.add(&other)?;
                }
            }
            return Ok(weights);
        }
        let listed = index(path)?;
        let folder = path.parent().unwrap_or(Path::new(""));
        let shards: BTreeSet<&String> = listed.values().collect();
        for shard in &shards {
            weights.add(&folder.join(shard))?;
        }
        let shard_of = |stored: &Stored| weights.files[stored.file].path.file_name();
        let absent: Vec<String> = listed
            .iter()
            .filter(|(name, shard)| {
                let there = weights.tensors.get(*name).and_then(shard_of);
                there.is_none_or(|there| there != shard.as_str())
            })
            .map(|(name, shard)| format!("`{}` in {}", brief(name), brief(shard)))
            .collect();
        if !absent.is_empty() {
            let names = some_of(&absent);
            return Err(malformed(
                path,
                SAFETENSORS,
                format!("it lists tensors that are not there: {names}"),
            ));
        }
        Ok(weights)
    }

    /// Opens one more file, and gives its format's name.
    fn add(&mut self, path: &Path) -> Result<&'static str, WeightsError> {
        let unread = |source| WeightsError::Read {
            path: path.to_owned(),
            source,
        };
        let (mut file, length) = regular(path).map_err(unread)?;
        let mut magic = [0; gguf::MAGIC.len()];
        if length >= magic.len() as u64 {
            file.read_exact(&mut magic).map_err(unread)?;
            file.rewind().map_err(unread)?;
        }
        if magic == *gguf::MAGIC {
            self.add_gguf(path, file, length)?;
            return Ok(gguf::NAME);
        }
        let mut number = [0; LENGTH_BYTES];
        if length < LENGTH_BYTES as u64 {
            let detail = format!("it has {length} bytes, fewer than the length of a header");
            return Err(malformed(path, SAFETENSORS, detail));
        }
        file.read_exact(&mut number).map_err(unread)?;
        let header = header::length(number, length).map_err(|e| malformed(path, SAFETENSORS, e))?;
        let mut text = vec![0; header as usize];
        file.read_exact(&mut text).map_err(unread)?;
        let start = LENGTH_BYTES as u64 + header;
        let parsed =
            Header::parse(&text, length - start).map_err(|e| malformed(path, SAFETENSORS, e))?;
        let number = self.files.len();
        let stored = parsed.tensors.into_iter().map(|(name, info)| {
            let stored = Stored {
                file: number,
                dtype: info.dtype,
                kind: None,
                shape: info.shape,
                at: start + info.range.start as u64,
                bytes: info.range.len() as u64,
            };
            (name, stored)
        });
        self.add_file(path, file, SAFETENSORS, stored, parsed.metadata)?;
        Ok(SAFETENSORS)
    }

    /// Adds an opened GGUF file.
    fn add_gguf(&mut self, path: &Path, file: fs::File, length: u64) -> Result<(), WeightsError> {
        let header = gguf::Header::read(&file, length).map_err(|refused| match refused {
            Refused::Read(source) => WeightsError::Read {
                path: path.to_owned(),
                source,
            },
            Refused::Malformed(detail) => malformed(path, gguf::NAME, detail),
            Refused::Unsupported(detail) => WeightsError::Unsupported {
                path: path.to_owned(),
                detail,
            },
        })?;
        let number = self.files.len();
        let stored = header.tensors.into_iter().map(|(name, info)| {
            let stored = Stored {
                file: number,
                dtype: info.kind.dtype(),
                kind: Some(info.kind),
                shape: info.shape,
                at: info.at,
                bytes: info.bytes,
            };
            (name, stored)
        });
        self.add_file(path, file, gguf::NAME, stored, header.metadata)
    }

    /// Adds the tensors and the metadata of an opened file.
    fn add_file(
        &mut self,
        path: &Path,
        file: fs::File,
        format: &'static str,
        tensors: impl Iterator<Item = (String, Stored)>,
        mut metadata: BTreeMap<String, String>,
    ) -> Result<(), WeightsError> {
        let mut twice = Vec::new();
        for (name, stored) in tensors {
            if let Some(other) = self.tensors.get(&name) {
                let there = self.files[other.file].path.display();
                twice.push(format!("`{}` as {there}", brief(&name)));
                continue;
            }
            self.tensors.insert(name, stored);
        }
        if !twice.is_empty() {
            let names = some_of(&twice);
            let detail = format!("it has the same tensors: {names}");
            return Err(malformed(path, format, detail));
        }
        let sums = metadata.remove(CHECKSUMS);
        self.metadata.extend(metadata);
        self.files.push(Shard {
            path: path.to_owned(),
            file: Mutex::new(file),
            sums,
        });
        Ok(())
    }

    /// The opened file or index.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The files that have the tensors.
    pub fn files(&self) -> impl ExactSizeIterator<Item = &Path> {
        self.files.iter().map(|shard| &*shard.path)
    }

    /// The names of all tensors in order, each with its type's name in the format and its shape.
    pub fn names(&self) -> impl ExactSizeIterator<Item = (&str, String, &[u64])> {
        self.tensors
            .iter()
            .map(|(name, stored)| (&**name, stored.type_name(), &*stored.shape))
    }

    /// Bytes of all tensors.
    pub fn bytes(&self) -> u64 {
        self.tensors.values().map(|stored| stored.bytes).sum()
    }

    /// The free-form metadata of the files. Numbers and bools of a GGUF file are as Rust writes
    /// them, strings as they are, and of an array there is the type and the length: `[string; 32000]`.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// The bytes of one tensor, row-major and little-endian, blocks as the file has them; `None` if
    /// there is none of this name.
    ///
    /// # Errors
    /// [`WeightsError::Read`] if the file cannot be read, or has been cut short since it was
    /// opened.
    pub fn read(&self, name: &str) -> Result<Option<Vec<u8>>, WeightsError> {
        let Some(stored) = self.tensors.get(name) else {
            return Ok(None);
        };
        let mut bytes = Vec::new();
        let room = usize::try_from(stored.bytes).map_err(io::Error::other);
        let read = room.and_then(|room| {
            bytes.try_reserve_exact(room).map_err(io::Error::other)?;
            bytes.resize(room, 0);
            self.files[stored.file].read(stored.at, &mut bytes)
        });
        read.map_err(|source| self.unread(stored, source))?;
        Ok(Some(bytes))
    }

    pub(super) fn tensors(&self) -> &BTreeMap<String, Stored> {
        &self.tensors
    }

    /// The file that has a tensor.
    pub(super) fn file_of(&self, stored: &Stored) -> &Path {
        &self.files[stored.file].path
    }

    /// The bytes of a tensor's elements, a window at a time.
    pub(super) fn window<'w>(&'w self, stored: &'w Stored, buffer: &'w mut Vec<u8>) -> Window<'w> {
        Window {
            decoded: stored.kind.filter(|_| !stored.is_plain()),
            length: stored.length(),
            ..self.blocks(stored, buffer)
        }
    }

    /// The bytes of a tensor as the file has them, a window at a time.
    pub(super) fn blocks<'w>(&'w self, stored: &'w Stored, buffer: &'w mut Vec<u8>) -> Window<'w> {
        buffer.clear();
        Window {
            shard: &self.files[stored.file],
            start: stored.at,
            length: stored.bytes,
            decoded: None,
            blocks: Vec::new(),
            at: 0,
            buffer,
        }
    }

    /// Reads all bytes of a tensor to a slice of their length.
    pub(super) fn read_into(&self, stored: &Stored, bytes: &mut [u8]) -> io::Result<()> {
        self.files[stored.file].read(stored.at, bytes)
    }

    pub(super) fn unread(&self, stored: &Stored, source: io::Error) -> WeightsError {
        WeightsError::Read {
            path: self.file_of(stored).to_owned(),
            source,
        }
    }

    /// Compares tensors with the checksums that were saved with them.
    ///
    /// # Errors
    /// [`WeightsError::Damaged`] for the first that has changed.
    pub(super) fn verify(&self) -> Result<(), WeightsError> {
        let mut buffer = Vec::new();
        for (number, shard) in self.files.iter().enumerate() {
            let Some(sums) = &shard.sums else {
                continue;
            };
            let own = || self.tensors.iter().filter(|(_, t)| t.file == number);
            let saved: Option<Vec<u32>> = sums
                .split(' ')
                .map(|sum| u32::from_str_radix(sum, 16).ok())
                .collect();
            let saved = saved.filter(|saved| saved.len() == own().count());
            let Some(saved) = saved else {
                let detail = format!(
                    "its note {CHECKSUMS} is not a checksum for each tensor: `{}`",
                    brief(sums)
                );
                return Err(malformed(&shard.path, SAFETENSORS, detail));
            };
            for ((name, stored), saved) in own().zip(saved) {
                let mut window = self.window(stored, &mut buffer);
                let (mut hash, mut at) = (crc32fast::Hasher::new(), 0);
                while at < stored.length() {
                    let n = (stored.length() - at).min(WINDOW as u64);
                    let bytes = window.read(at, n as usize);
                    hash.update(bytes.map_err(|e| self.unread(stored, e))?);
                    at += n;
                }
                let found = hash.finalize();
                if found != saved {
                    return Err(WeightsError::Damaged {
                        path: shard.path.clone(),
                        tensor: name.clone(),
                        saved,
                        found,
                    });
                }
            }
        }
        Ok(())
    }
}

impl Shard {
    fn read(&self, at: u64, bytes: &mut [u8]) -> io::Result<()> {
        // The position in the file is set anew at each use.
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        file.seek(SeekFrom::Start(at))?;
        file.read_exact(bytes)
    }
}

/// A part of a tensor's bytes in memory, which follows the reads.
pub(super) struct Window<'w> {
    shard: &'w Shard,
    /// The tensor's first byte in the file.
    start: u64,
    /// The bytes of the tensor as they are read.
    length: u64,
    /// The type of its blocks, if they are decoded.
    decoded: Option<&'static TensorType>,
    /// Blocks of the file, which are decoded to the buffer.
    blocks: Vec<u8>,
    /// The first byte in memory, counted from the tensor's first.
    at: u64,
    buffer: &'w mut Vec<u8>,
}

impl Window<'_> {
    /// Moves to the bytes from `at` on, so many at least.
    fn fill(&mut self, at: u64, bytes: u64) -> io::Result<()> {
        let Some(kind) = self.decoded else {
            self.at = at;
            self.buffer.resize(bytes as usize, 0);
            return self.shard.read(self.start + at, self.buffer);
        };
        let (floats, wide) = (4 * kind.values as u64, kind.bytes as u64);
        let first = at / floats;
        let count = (at + bytes).div_ceil(floats) - first;
        self.at = first * floats;
        self.blocks.resize((count * wide) as usize, 0);
        self.shard
            .read(self.start + first * wide, &mut self.blocks)?;
        self.buffer.resize((count * floats) as usize, 0);
        kind.decode(&self.blocks, self.buffer);
        Ok(())
    }
}

impl Bytes for Window<'_> {
    fn read(&mut self, at: u64, length: usize) -> io::Result<&[u8]> {
        let end = at + length as u64;
        if at < self.at || end > self.at + self.buffer.len() as u64 {
            let rest = self.length.saturating_sub(at);
            let n = (length.max(WINDOW) as u64).min(rest).max(length as u64);
            if let Err(error) = self.fill(at, n) {
                self.buffer.clear();
                return Err(error);
            }
        }
        let start = (at - self.at) as usize;
        Ok(&self.buffer[start..start + length])
    }
}

fn malformed(path: &Path, format: &'static str, detail: String) -> WeightsError {
    WeightsError::Malformed {
        path: path.to_owned(),
        format,
        detail,
    }
}

/// A list's first entries, and how many more there are.
fn some_of(names: &[String]) -> String {
    let more = match names.len().saturating_sub(LISTED) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    names[..names.len().min(LISTED)].join(", ") + &more
}

/// Opens a regular file, and gives its length.
fn regular(path: &Path) -> io::Result<(fs::File, u64)> {
    // Devices and pipes can be endless, and opening a pipe can wait for ever.
    let there = fs::metadata(path)?;
    if !there.is_file() {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "not a regular file",
        ));
    }
    let file = fs::File::open(path)?;
    let length = file.metadata()?.len();
    if length > FILE_MAX {
        let message =
            format!("it has {length} bytes, more than the {FILE_MAX} that are read at most");
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, message));
    }
    Ok((file, length))
}

/// The file or the index of weights in a folder.
fn found_in(folder: &Path) -> io::Result<PathBuf> {
    for name in [WHOLE, INDEX] {
        let path = folder.join(name);
        if path.is_file() {
            return Ok(path);
        }
    }
    let mut names = BTreeSet::new();
    for entry in fs::read_dir(folder)? {
        names.insert(entry?.file_name().to_string_lossy().into_owned());
    }
    let ending =
        |end: &str| -> Vec<&String> { names.iter().filter(|name| name.ends_with(end)).collect() };
    for end in [".safetensors.index.json", ".safetensors", ".gguf"] {
        if let [only] = *ending(end) {
            return Ok(folder.join(only));
        }
    }
    let there = match ending(".safetensors").len() {
        0 if !ending(".gguf").is_empty() => {
            let n = ending(".gguf").len();
            format!("the folder has {n} GGUF files: name one of them")
        }
        0 => {
            let mut said = format!("the folder has neither {WHOLE} nor {INDEX}");
            if names
                .iter()
                .any(|n| n.ends_with(".bin") || n.ends_with(".pt"))
            {
                said += "; pickled weights are not read, because reading them runs code: \
                         save them again as safetensors";
            }
            said
        }
        n => format!("the folder has {n} files of weights and no {INDEX}: name one of them"),
    };
    Err(io::Error::new(io::ErrorKind::NotFound, there))
}

/// The file of each tensor, by an index of shards.
fn index(path: &Path) -> Result<BTreeMap<String, String>, WeightsError> {
    let unread = |source| WeightsError::Read {
        path: path.to_owned(),
        source,
    };
    let wrong = |detail: String| WeightsError::Index {
        path: path.to_owned(),
        detail,
    };
    let (file, length) = regular(path).map_err(unread)?;
    if length > INDEX_MAX {
        let detail = format!("it has {length} bytes, more than the {INDEX_MAX} that are read");
        return Err(wrong(detail));
    }
    let mut text = Vec::new();
    file.take(INDEX_MAX)
        .read_to_end(&mut text)
        .map_err(unread)?;
    let said = |error: serde_json::Error| wrong(shortened(&error.to_string(), 160));
    let parsed: serde_json::Value = serde_json::from_slice(&text).map_err(said)?;
    header::only_once(&text).map_err(said)?;
    let Some(listed) = parsed.get("weight_map").and_then(|map| map.as_object()) else {
        return Err(wrong(
            "it has no \"weight_map\" from tensors to files".into(),
        ));
    };
    let mut files = BTreeMap::new();
    for (name, file) in listed {
        let Some(file) = file.as_str() else {
            let detail = format!("the file of `{}` is no text", brief(name));
            return Err(wrong(detail));
        };
        let mut parts = Path::new(file).components();
        let plain = matches!(
            (parts.next(), parts.next()),
            (Some(Component::Normal(_)), None)
        );
        if !plain || file.contains(['/', '\\', '\0']) {
            let detail = format!(
                "the file of `{}` is `{}`, which is not a file of the index's own folder",
                brief(name),
                brief(file)
            );
            return Err(wrong(detail));
        }
        files.insert(name.clone(), file.to_owned());
    }
    Ok(files)
}
