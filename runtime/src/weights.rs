//! Weights on disk, in the [safetensors](https://github.com/huggingface/safetensors) format.
//!
//! [`save`] replaces a file as a whole: killed at any moment, it leaves either the earlier file or the new one. [`File`]
//! checks everything it reads before it hands out a tensor, and [`match_tensors`] compares a file with what a model expects
//! and reports every difference at once. Elements are little-endian, row-major, and travel as bytes, so every bit survives,
//! NaN payloads included.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::io::{self, Read as _, Write as _};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use slabwise_kernels::dtype::DType;
use thiserror::Error;

/// Why weights could not be saved, read or matched.
#[derive(Debug, Error)]
pub enum WeightsError {
    /// The file could not be read.
    #[error("cannot read weights from {}: {source}; check the path, or save weights there first", path.display())]
    Read {
        /// The file asked for.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The file could not be written. An earlier file of that name is unchanged.
    #[error(
        "cannot save weights to {}: {source}; nothing there was changed; check that the folder exists, is writable and has space",
        path.display()
    )]
    Write {
        /// The file asked for.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The bytes are not one complete safetensors file.
    #[error("{} is not a complete safetensors file ({detail}); it may be cut short or damaged: fetch or save it again", path.display())]
    Malformed {
        /// The file asked for.
        path: PathBuf,
        /// What is wrong with it.
        detail: String,
    },
    /// A tensor of the file has an element type this crate does not store.
    #[error("tensor `{tensor}` of {} has dtype {dtype}; convert it to f32, i32, u8 or bool and save the file again", path.display())]
    UnsupportedDType {
        /// The file asked for.
        path: PathBuf,
        /// The tensor's name.
        tensor: String,
        /// Its element type, as the format names it.
        dtype: String,
    },
    /// A tensor handed to [`save`] cannot be stored.
    #[error("cannot save tensor `{tensor}`: {detail}")]
    InvalidTensor {
        /// The tensor's name.
        tensor: String,
        /// What is wrong with it.
        detail: String,
    },
    /// The file's tensors are not those expected.
    #[error("{} does not fit this model:{problems}\nload weights of the same architecture, or change the model to fit", path.display())]
    Mismatch {
        /// The file compared.
        path: PathBuf,
        /// One line per difference, each starting with a line break.
        problems: String,
    },
}

/// One named tensor: what [`save`] writes and what [`File`] hands out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry<'a> {
    /// Name, unique within a file.
    pub name: &'a str,
    /// Element type.
    pub dtype: DType,
    /// Extents, outermost first; empty for a scalar.
    pub shape: Vec<u64>,
    /// Elements in row-major order, little-endian, with no alignment promised.
    pub bytes: &'a [u8],
}

/// The most bytes of a file: beyond any machine that this crate would train on, and short of what would only fill it.
pub const FILE_MAX: u64 = 1 << 38;

/// Name the format keeps for its metadata.
const METADATA_KEY: &str = "__metadata__";

/// Writes `tensors` and `metadata` to `path`, replacing an earlier file in one step.
///
/// The bytes go to a temporary file in the same folder, which is synced and then renamed over `path` (a link is followed).
/// A process killed before the rename may leave a `.slabwise-*.tmp` file, never a partial `path`. The file is assembled in
/// memory first, so this needs room for a second copy of the weights.
///
/// # Errors
///
/// [`WeightsError::InvalidTensor`] for a repeated or reserved name, bytes that do not fill the shape, or a bool other than
/// 0 or 1; [`WeightsError::Write`] when the system refuses. Either way what was at `path` stays.
pub fn save(path: &Path, tensors: &[Entry<'_>], metadata: &BTreeMap<String, String>) -> Result<(), WeightsError> {
    let mut names = BTreeSet::new();
    let mut views = Vec::with_capacity(tensors.len());
    for entry in tensors {
        let invalid = |detail: String| WeightsError::InvalidTensor { tensor: entry.name.to_owned(), detail };
        if entry.name == METADATA_KEY {
            return Err(invalid("the format reserves this name; choose another".into()));
        }
        if !names.insert(entry.name) {
            return Err(invalid("the name occurs twice; names must be unique".into()));
        }
        views.push((entry.name, view(entry).map_err(invalid)?));
    }
    let info = (!metadata.is_empty()).then(|| metadata.clone().into_iter().collect());
    let written = safetensors::serialize(views, info).map_err(io::Error::other).and_then(|bytes| replace(path, &bytes));
    written.map_err(|source| WeightsError::Write { path: path.to_owned(), source })
}

/// Checks one entry; the error says what is wrong with it.
fn view<'a>(entry: &Entry<'a>) -> Result<TensorView<'a>, String> {
    let elements = entry.shape.iter().try_fold(1u64, |product, &extent| product.checked_mul(extent));
    let needed = elements.and_then(|n| n.checked_mul(entry.dtype.bytes() as u64));
    if needed != Some(entry.bytes.len() as u64) {
        let needed = needed.map_or_else(|| "more bytes than can be counted".to_owned(), |n| format!("{n} bytes"));
        return Err(format!("{} {:?} takes {needed}, but {} were given", entry.dtype, entry.shape, entry.bytes.len()));
    }
    if entry.dtype == DType::Bool && entry.bytes.iter().any(|&byte| byte > 1) {
        return Err("a bool must be stored as 0 or 1".into());
    }
    let shape = entry.shape.iter().map(|&extent| usize::try_from(extent)).collect::<Result<_, _>>().map_err(|e| e.to_string())?;
    TensorView::new(to_format(entry.dtype), shape, entry.bytes).map_err(|e| e.to_string())
}

/// Removes the temporary file it names, unless it was renamed.
struct Temporary {
    path: PathBuf,
    renamed: bool,
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if !self.renamed {
            // Already on the way out with the error that matters.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Puts `bytes` at `path` such that no moment shows a partial file: write aside, sync, rename, sync the folder.
fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    // A rename would replace a link rather than the file it leads to.
    let target = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let folder = match target.parent() {
        Some(folder) if folder.as_os_str().is_empty() => Path::new("."),
        Some(folder) => folder,
        None => return Err(io::Error::new(io::ErrorKind::InvalidInput, "the path names no file")),
    };
    let (mut file, mut temporary) = create_temporary(folder)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    drop(file);
    fs::rename(&temporary.path, &target)?;
    temporary.renamed = true;
    // Makes the rename itself durable. Not every system lets a folder be opened, and the file is whole either way.
    if let Ok(folder) = fs::File::open(folder) {
        let _ = folder.sync_all();
    }
    Ok(())
}

/// A new empty file in `folder` under a name nobody else has.
fn create_temporary(folder: &Path) -> io::Result<(fs::File, Temporary)> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    loop {
        let name = format!(".slabwise-{}-{}.tmp", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let path = folder.join(name);
        match fs::File::create_new(&path) {
            Ok(file) => return Ok((file, Temporary { path, renamed: false })),
            // Left by a killed process that had the same id.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
}

/// What the header says of one tensor.
#[derive(Debug)]
struct Info {
    dtype: DType,
    shape: Vec<u64>,
    range: Range<usize>,
}

/// A safetensors file, read whole and checked.
#[derive(Debug)]
pub struct File {
    path: PathBuf,
    bytes: Vec<u8>,
    tensors: BTreeMap<String, Info>,
    metadata: BTreeMap<String, String>,
}

impl File {
    /// Reads and checks the file at `path`.
    ///
    /// # Errors
    ///
    /// [`WeightsError::Read`] when there is no such readable file, [`WeightsError::Malformed`] when its header is damaged or
    /// does not agree with its length, [`WeightsError::UnsupportedDType`] for element types other than f32, i32, u8, bool. The
    /// 64-bit counters `num_batches_tracked` of PyTorch's batch norms are passed over.
    pub fn open(path: impl AsRef<Path>) -> Result<File, WeightsError> {
        let path = path.as_ref();
        let read = || -> io::Result<Vec<u8>> {
            // Devices and pipes can be endless.
            if !fs::metadata(path)?.is_file() {
                return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
            }
            let mut bytes = Vec::new();
            let length = fs::metadata(path)?.len();
            if length > FILE_MAX {
                let message = format!("it has {length} bytes, more than the {FILE_MAX} that are read at most");
                return Err(io::Error::new(io::ErrorKind::FileTooLarge, message));
            }
            // More than there is memory for is an error, not the end of the process.
            let reserved = usize::try_from(length).map(|length| bytes.try_reserve_exact(length));
            reserved.map_err(io::Error::other)?.map_err(|error| io::Error::new(io::ErrorKind::OutOfMemory, error))?;
            fs::File::open(path)?.take(length).read_to_end(&mut bytes)?;
            Ok(bytes)
        };
        let bytes = read().map_err(|source| WeightsError::Read { path: path.to_owned(), source })?;
        File::of_bytes(path, bytes)
    }

    /// As [`File::open`], of what a file contains; `path` names it in errors.
    ///
    /// # Errors
    ///
    /// As [`File::open`].
    pub fn of_bytes(path: &Path, bytes: Vec<u8>) -> Result<File, WeightsError> {
        let malformed = |detail: String| WeightsError::Malformed { path: path.to_owned(), detail };
        let (header, info) = SafeTensors::read_metadata(&bytes).map_err(|e| malformed(e.to_string()))?;
        let start = header + size_of::<u64>();
        let mut tensors = BTreeMap::new();
        for tensor in info.offset_keys() {
            let Some(found) = info.info(&tensor) else { continue };
            // PyTorch's batch norms count their batches, in 64 bits, for an average that nothing here takes.
            if found.dtype == Dtype::I64 && found.shape.is_empty() && tensor.ends_with("num_batches_tracked") {
                continue;
            }
            let Some(dtype) = from_format(found.dtype) else {
                return Err(WeightsError::UnsupportedDType { path: path.to_owned(), tensor, dtype: found.dtype.to_string() });
            };
            let range = start + found.data_offsets.0..start + found.data_offsets.1;
            let data = bytes.get(range.clone()).ok_or_else(|| malformed(format!("tensor `{tensor}` lies outside the file")))?;
            // Kernels rely on it.
            if dtype == DType::Bool && data.iter().any(|&byte| byte > 1) {
                return Err(malformed(format!("tensor `{tensor}` holds a bool other than 0 or 1")));
            }
            let shape = found.shape.iter().map(|&extent| extent as u64).collect();
            tensors.insert(tensor, Info { dtype, shape, range });
        }
        let metadata = info.metadata().iter().flatten().map(|(key, value)| (key.clone(), value.clone())).collect();
        Ok(File { path: path.to_owned(), bytes, tensors, metadata })
    }

    /// Where the file was read from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// All tensors, ordered by name.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = Entry<'_>> {
        self.tensors.iter().map(|(name, info)| self.entry(name, info))
    }

    /// The tensor called `name`, if there is one.
    pub fn get(&self, name: &str) -> Option<Entry<'_>> {
        self.tensors.get_key_value(name).map(|(name, info)| self.entry(name, info))
    }

    /// The free-form notes saved with the tensors.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    fn entry<'a>(&'a self, name: &'a str, info: &Info) -> Entry<'a> {
        Entry { name, dtype: info.dtype, shape: info.shape.clone(), bytes: &self.bytes[info.range.clone()] }
    }
}

/// Checks that `file` holds exactly the `expected` tensors (name, element type, shape), and besides them only such as are
/// `tolerated` by name.
///
/// # Errors
///
/// [`WeightsError::Mismatch`] listing every missing or unexpected tensor, wrong shape and wrong element type.
pub fn match_tensors(expected: &[(String, DType, Vec<u64>)], file: &File, tolerated: impl Fn(&str) -> bool) -> Result<(), WeightsError> {
    let mut problems = String::new();
    let mut note = |line: std::fmt::Arguments<'_>| {
        // Writing to a string cannot fail.
        let _ = write!(problems, "\n  {line}");
    };
    for (name, dtype, shape) in expected {
        let Some(found) = file.tensors.get(name) else {
            note(format_args!("missing: `{name}` ({dtype} {shape:?})"));
            continue;
        };
        if found.shape != *shape {
            note(format_args!("wrong shape: `{name}` is {shape:?} in the model, {:?} in the file", found.shape));
        }
        if found.dtype != *dtype {
            note(format_args!("wrong dtype: `{name}` is {dtype} in the model, {} in the file", found.dtype));
        }
    }
    let known: BTreeSet<&str> = expected.iter().map(|(name, ..)| name.as_str()).collect();
    for (name, found) in file.tensors.iter().filter(|(name, _)| !known.contains(name.as_str()) && !tolerated(name)) {
        note(format_args!("unexpected: `{name}` ({} {:?})", found.dtype, found.shape));
    }
    if problems.is_empty() { Ok(()) } else { Err(WeightsError::Mismatch { path: file.path.clone(), problems }) }
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
    DType::ALL.into_iter().find(|&ours| to_format(ours) == dtype)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Quiet and signalling NaNs with payloads, negative zero, a subnormal, infinity.
    const BITS: [u32; 6] = [0x7fc0_1234, 0xff80_0001, 0x8000_0000, 0x0000_0001, 0x7f80_0000, 0x3f80_0000];

    fn float_bytes() -> Vec<u8> {
        BITS.iter().flat_map(|bits| bits.to_le_bytes()).collect()
    }

    fn sample(floats: &[u8]) -> Vec<Entry<'_>> {
        vec![
            Entry { name: "w", dtype: DType::F32, shape: vec![2, 3], bytes: floats },
            Entry { name: "step", dtype: DType::I32, shape: vec![], bytes: &[0xfe, 0xff, 0xff, 0xff] },
            Entry { name: "pixels", dtype: DType::U8, shape: vec![3], bytes: &[0, 128, 255] },
            Entry { name: "mask", dtype: DType::Bool, shape: vec![1, 2], bytes: &[0, 1] },
            Entry { name: "empty", dtype: DType::F32, shape: vec![0, 4], bytes: &[] },
        ]
    }

    fn notes() -> BTreeMap<String, String> {
        BTreeMap::from([("epoch".to_owned(), "3".to_owned()), ("über \"q\"".to_owned(), "\n\u{1f600}".to_owned())])
    }

    fn files_in(folder: &Path) -> Vec<String> {
        let mut names: Vec<_> = fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    /// A file with the given header text and data.
    fn raw(header: &str, data: &[u8]) -> Vec<u8> {
        [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat()
    }

    #[test]
    fn every_bit_survives() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.safetensors");
        let floats = float_bytes();
        let saved = sample(&floats);
        save(&path, &saved, &notes()).unwrap();
        let file = File::open(&path).unwrap();
        assert_eq!(file.tensors().len(), saved.len());
        for entry in &saved {
            assert_eq!(file.get(entry.name).as_ref(), Some(entry));
        }
        assert!(file.tensors().map(|e| e.name).eq(["empty", "mask", "pixels", "step", "w"]));
        assert_eq!(file.get("nothing"), None);
        assert_eq!(file.metadata(), &notes());
        assert_eq!(files_in(folder.path()), ["a.safetensors"]);
        // Nothing to say is a valid file too.
        save(&path, &[], &BTreeMap::new()).unwrap();
        let file = File::open(&path).unwrap();
        assert!(file.tensors().len() == 0 && file.metadata().is_empty());
    }

    #[test]
    fn truncated_at_every_length_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.safetensors");
        let floats = float_bytes();
        save(&path, &sample(&floats), &notes()).unwrap();
        let whole = fs::read(&path).unwrap();
        for length in 0..whole.len() {
            fs::write(&path, &whole[..length]).unwrap();
            let error = File::open(&path).unwrap_err();
            assert!(matches!(error, WeightsError::Malformed { .. }), "{length}: {error}");
            assert!(error.to_string().contains(&*path.to_string_lossy()));
        }
        let longer = [&whole[..], &[0]].concat();
        assert!(matches!(File::of_bytes(&path, longer), Err(WeightsError::Malformed { .. })));
        // Damage to any one byte of the header gives an error or a file that can be read through; never a panic.
        let header = whole.len() - floats.len() - 9;
        for at in 0..header {
            for flip in [1, 2, 0x10, 0x80, 0xff] {
                let mut bytes = whole.clone();
                bytes[at] ^= flip;
                if let Ok(file) = File::of_bytes(&path, bytes) {
                    assert!(file.tensors().map(|e| e.bytes.len()).sum::<usize>() <= whole.len());
                }
            }
        }
    }

    #[test]
    fn bad_headers_are_errors() {
        let parse = |bytes| File::of_bytes(Path::new("x.safetensors"), bytes).unwrap_err();
        let huge_shape = r#"{"a":{"dtype":"F32","shape":[18446744073709551615,4],"data_offsets":[0,4]}}"#;
        let huge_offset = r#"{"a":{"dtype":"U8","shape":[2305843009213693951],"data_offsets":[0,2305843009213693951]}}"#;
        let overlap = r#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}}"#;
        let bad_bool = r#"{"a":{"dtype":"BOOL","shape":[2],"data_offsets":[0,2]}}"#;
        let no_dtype = r#"{"a":{"dtype":"F7","shape":[4],"data_offsets":[0,4]}}"#;
        for bytes in [
            raw(huge_shape, &[0; 4]),
            raw(huge_offset, &[0; 4]),
            raw(overlap, &[0; 3]),
            raw(bad_bool, &[1, 2]),
            raw(no_dtype, &[0; 4]),
            raw("not json", &[]),
            u64::MAX.to_le_bytes().to_vec(),
            vec![0xff; 64],
        ] {
            let error = parse(bytes);
            assert!(matches!(error, WeightsError::Malformed { .. }), "{error}");
        }
        let error = parse(raw(r#"{"a":{"dtype":"I16","shape":[2],"data_offsets":[0,4]}}"#, &[0; 4]));
        assert!(matches!(&error, WeightsError::UnsupportedDType { tensor, dtype, .. } if tensor == "a" && dtype == "I16"), "{error}");
    }

    #[test]
    fn unreadable_paths_are_errors() {
        let folder = tempfile::tempdir().unwrap();
        for path in [folder.path().to_owned(), folder.path().join("none.safetensors")] {
            let error = File::open(&path).unwrap_err();
            assert!(matches!(error, WeightsError::Read { .. }));
            assert!(error.to_string().contains(&*path.to_string_lossy()), "{error}");
        }
    }

    #[test]
    fn a_failed_save_changes_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.safetensors");
        let floats = float_bytes();
        save(&path, &sample(&floats), &notes()).unwrap();
        let before = fs::read(&path).unwrap();
        let entry = |name, dtype, shape, bytes| Entry { name, dtype, shape, bytes };
        for bad in [
            vec![entry("a", DType::F32, vec![2], &[0; 4][..])],
            vec![entry("a", DType::U8, vec![u64::MAX, 2], &[0; 4][..])],
            vec![entry("a", DType::Bool, vec![1], &[2][..])],
            vec![entry("a", DType::U8, vec![1], &[2][..]), entry("a", DType::U8, vec![1], &[2][..])],
            vec![entry(METADATA_KEY, DType::U8, vec![1], &[2][..])],
        ] {
            assert!(matches!(save(&path, &bad, &notes()), Err(WeightsError::InvalidTensor { .. })));
        }
        // The rename is refused only after the temporary file was written: it has to go.
        fs::create_dir(folder.path().join("folder")).unwrap();
        for at in ["folder", "none/a.safetensors", "a.safetensors/b.safetensors"] {
            let at = folder.path().join(at);
            let error = save(&at, &sample(&floats), &notes()).unwrap_err();
            assert!(matches!(error, WeightsError::Write { .. }));
            assert!(error.to_string().contains(&*at.to_string_lossy()), "{error}");
        }
        assert!(matches!(save(Path::new("/"), &[], &notes()), Err(WeightsError::Write { .. })));
        assert_eq!(fs::read(&path).unwrap(), before);
        assert_eq!(files_in(folder.path()), ["a.safetensors", "folder"]);
    }

    #[test]
    fn readers_see_whole_files_while_others_save() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.safetensors");
        let save_all = |byte: u8| {
            let bytes = vec![byte; 50_000];
            let entry = Entry { name: "a", dtype: DType::U8, shape: vec![50_000], bytes: &bytes };
            for _ in 0..8 {
                save(&path, std::slice::from_ref(&entry), &BTreeMap::new()).unwrap();
            }
        };
        save_all(0);
        std::thread::scope(|scope| {
            let writers = [scope.spawn(|| save_all(1)), scope.spawn(|| save_all(2))];
            while !writers.iter().all(|writer| writer.is_finished()) {
                let file = File::open(&path).unwrap();
                let bytes = file.get("a").unwrap().bytes;
                assert!(bytes.iter().all(|&byte| byte == bytes[0]));
            }
        });
        assert_eq!(files_in(folder.path()), ["a.safetensors"]);
    }

    #[cfg(unix)]
    #[test]
    fn a_link_is_followed() {
        let folder = tempfile::tempdir().unwrap();
        let (path, link) = (folder.path().join("a.safetensors"), folder.path().join("latest"));
        save(&path, &[], &BTreeMap::new()).unwrap();
        std::os::unix::fs::symlink(&path, &link).unwrap();
        save(&link, &[], &notes()).unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(File::open(&path).unwrap().metadata(), &notes());
    }

    #[test]
    fn every_mismatch_is_listed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.safetensors");
        let floats = float_bytes();
        let saved = sample(&floats);
        save(&path, &saved, &notes()).unwrap();
        let file = File::open(&path).unwrap();
        let mut expected: Vec<_> = saved.iter().map(|e| (e.name.to_owned(), e.dtype, e.shape.clone())).collect();
        match_tensors(&expected, &file, |_| false).unwrap();
        expected[0].2 = vec![3, 2];
        expected[1].1 = DType::F32;
        expected[2].0 = "bias".to_owned();
        let text = match_tensors(&expected, &file, |_| false).unwrap_err().to_string();
        for line in [
            "\n  wrong shape: `w` is [3, 2] in the model, [2, 3] in the file\n",
            "\n  wrong dtype: `step` is f32 in the model, i32 in the file\n",
            "\n  missing: `bias` (u8 [3])\n",
            "\n  unexpected: `pixels` (u8 [3])\n",
        ] {
            assert!(text.contains(line), "{text}");
        }
        assert_eq!(text.lines().count(), 6, "{text}");
    }
}
