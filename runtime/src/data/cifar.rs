//! CIFAR-10 (Krizhevsky 2009) in its binary version.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use super::{DataError, Split};

/// Red, green and blue, height, width.
const SHAPE: [usize; 3] = [3, 32, 32];
const CLASSES: usize = 10;
/// A record: the label, then the image.
const RECORD: usize = 1 + 3 * 32 * 32;
/// Most records of a file, as the published ones have.
const RECORDS_MAX: usize = 10_000;
/// The archive's name of its folder.
const FOLDER: &str = "cifar-10-batches-bin";

/// A training and a test split of photographs, `[3, 32, 32]`, ten classes.
#[derive(Clone, Debug)]
pub struct Cifar10 {
    /// Images for training; 50,000 in the full set.
    pub train: Split,
    /// Images for testing; 10,000 in the full set.
    pub test: Split,
}

impl Cifar10 {
    /// Loads `data_batch_1.bin` to `data_batch_5.bin` and `test_batch.bin` of `folder`, or of
    /// `cifar-10-batches-bin` in it.
    ///
    /// # Errors
    ///
    /// A [`DataError`] that names the file and the defect: missing, of a size that is not a number
    /// of records from 1 to 10,000, or with a label above 9.
    pub fn load(folder: impl AsRef<Path>) -> Result<Cifar10, DataError> {
        let inner = folder.as_ref().join(FOLDER);
        let folder = if inner.is_dir() {
            inner
        } else {
            folder.as_ref().to_owned()
        };
        let parts: Vec<PathBuf> = (1..=5)
            .map(|i| folder.join(format!("data_batch_{i}.bin")))
            .collect();
        Ok(Cifar10 {
            train: load(&folder, &parts)?,
            test: load(&folder, &[folder.join("test_batch.bin")])?,
        })
    }

    /// The images of one file's content.
    ///
    /// # Errors
    ///
    /// See [`Cifar10::load`].
    pub fn of_bytes(bytes: &[u8]) -> Result<Split, DataError> {
        let (path, mut split) = (Path::new("the data"), Default::default());
        append(path, &records(path, bytes)?, &mut split)?;
        let (pixels, labels) = split;
        Split::checked(pixels, labels, SHAPE, CLASSES, "the data")
    }
}

/// The images of several files, one after the other.
fn load(folder: &Path, paths: &[PathBuf]) -> Result<Split, DataError> {
    let mut split = Default::default();
    for path in paths {
        if !path.is_file() {
            return Err(wrong(path, "there is no such file".into()));
        }
        let file = File::open(path).map_err(|source| DataError::Io {
            path: path.to_owned(),
            source,
        })?;
        append(path, &records(path, file)?, &mut split)?;
    }
    let (pixels, labels) = split;
    Split::checked(
        pixels,
        labels,
        SHAPE,
        CLASSES,
        &folder.display().to_string(),
    )
}

/// Adds pixels and labels of a file's records.
fn append(
    path: &Path,
    records: &[u8],
    (pixels, labels): &mut (Vec<u8>, Vec<u8>),
) -> Result<(), DataError> {
    for (at, record) in records.chunks_exact(RECORD).enumerate() {
        if usize::from(record[0]) >= CLASSES {
            return Err(wrong(
                path,
                format!(
                    "record {at} has the label {}; labels run from 0 to 9",
                    record[0]
                ),
            ));
        }
        labels.push(record[0]);
        pixels.extend_from_slice(&record[1..]);
    }
    Ok(())
}

/// The bytes of a file, which are a number of records.
fn records(path: &Path, file: impl Read) -> Result<Vec<u8>, DataError> {
    let most = RECORD * RECORDS_MAX;
    let mut bytes = Vec::new();
    // One byte more than allowed detects a file that is too long, of any length.
    file.take(most as u64 + 1)
        .read_to_end(&mut bytes)
        .map_err(|source| DataError::Io {
            path: path.to_owned(),
            source,
        })?;
    if bytes.len() > most {
        return Err(wrong(
            path,
            format!("it is longer than the {most} bytes of {RECORDS_MAX} images"),
        ));
    }
    if bytes.is_empty() || !bytes.len().is_multiple_of(RECORD) {
        return Err(wrong(
            path,
            format!(
                "its {} bytes are not a number of images of {RECORD} bytes",
                bytes.len()
            ),
        ));
    }
    Ok(bytes)
}

fn wrong(path: &Path, detail: String) -> DataError {
    DataError::Cifar {
        path: path.to_owned(),
        detail,
    }
}
