//! MNIST (LeCun, Cortes, Burges 1998) and data sets in the same four files, such as Fashion-MNIST
//! (Xiao et al. 2017).

use std::path::{Path, PathBuf};

use super::{DataError, Idx, Split};

/// The classes of digits, and of Fashion-MNIST.
const CLASSES: usize = 10;

/// A training and a test split of labelled images.
#[derive(Clone, Debug)]
pub struct Mnist {
    /// Images for training; 60,000 of 28 by 28 in the full sets.
    pub train: Split,
    /// Images for testing; 10,000 of 28 by 28 in the full sets.
    pub test: Split,
}

impl Mnist {
    /// Loads the four files of `folder`: `train-` and `t10k-`, each with `images-idx3-ubyte` and
    /// `labels-idx1-ubyte` (or with a point, as in `images.idx3-ubyte`), with or without `.gz`.
    /// Compression is detected by content.
    ///
    /// # Errors
    ///
    /// A [`DataError`] that names the file and the remedy: missing, damaged, cut short or too long,
    /// without images, labels above 9, and images that do not match their labels in number or the
    /// other split in size.
    pub fn load(folder: impl AsRef<Path>) -> Result<Mnist, DataError> {
        Mnist::load_classes(folder, CLASSES)
    }

    /// Like [`Mnist::load`], of a data set with so many classes, such as the 47 or 62 of EMNIST.
    ///
    /// # Errors
    ///
    /// Those of [`Mnist::load`]; labels are below `classes`.
    pub fn load_classes(folder: impl AsRef<Path>, classes: usize) -> Result<Mnist, DataError> {
        let folder = folder.as_ref();
        let train = load_split(
            folder,
            "train",
            ["training images", "training labels"],
            classes,
        )?;
        let test = load_split(folder, "t10k", ["test images", "test labels"], classes)?;
        if train.image_shape() != test.image_shape() {
            let [train, test] =
                [train.image_shape(), test.image_shape()].map(|[h, w]| format!("{h}x{w}"));
            let detail = format!(
                "training images are {train} pixels, test images {test}; take all four files from one data set"
            );
            return Err(DataError::Inconsistent {
                origin: folder.display().to_string(),
                detail,
            });
        }
        Ok(Mnist { train, test })
    }

    /// The default folder of the examples: `data/mnist` in the current folder, else in the source
    /// tree this was built from.
    pub fn default_dir() -> PathBuf {
        let here = PathBuf::from("data/mnist");
        if here.is_dir() {
            here
        } else {
            Path::new(env!("CARGO_MANIFEST_DIR")).join(here)
        }
    }
}

fn load_split(
    folder: &Path,
    prefix: &str,
    [what, labels]: [&'static str; 2],
    classes: usize,
) -> Result<Split, DataError> {
    let images = find(folder, what, &format!("{prefix}-images"), 3)?;
    let labels = find(folder, labels, &format!("{prefix}-labels"), 1)?;
    let pixels = Idx::read(&images, 3)?;
    let of_images = Idx::read(&labels, 1)?;
    // As many extents as were requested.
    let extent = |idx: &Idx, axis: usize| idx.dims.get(axis).copied().unwrap_or(0);
    let shape = [1, extent(&pixels, 1), extent(&pixels, 2)];
    let (image_count, label_count) = (extent(&pixels, 0), extent(&of_images, 0));
    let origin = format!("{} and {}", images.display(), labels.display());
    if image_count != label_count {
        let detail = format!(
            "{image_count} images, but {label_count} labels; take both files from one data set"
        );
        return Err(DataError::Inconsistent { origin, detail });
    }
    if image_count == 0 {
        return Err(DataError::Inconsistent {
            origin,
            detail: format!("there are no {what}: both files hold none"),
        });
    }
    Split::checked(pixels.data, of_images.data, shape, classes, &origin)
}

/// The file of `folder` that holds `what`, under any of its usual names.
fn find(folder: &Path, what: &'static str, stem: &str, rank: usize) -> Result<PathBuf, DataError> {
    let names = ["-", "."].map(|joint| format!("{stem}{joint}idx{rank}-ubyte"));
    let names: Vec<String> = names
        .into_iter()
        .flat_map(|name| [format!("{name}.gz"), name])
        .collect();
    let found = names
        .iter()
        .map(|name| folder.join(name))
        .find(|path| path.is_file());
    found.ok_or_else(|| DataError::Missing {
        what,
        folder: folder.to_owned(),
        looked_for: names.join(", "),
    })
}
