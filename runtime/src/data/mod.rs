//! Labelled images: read, shuffled, batched, and prefetched while the previous step runs.
//!
//! ```no_run
//! use slabwise::data::{Mnist, epoch_seed};
//!
//! let mnist = Mnist::load(Mnist::default_dir())?;
//! for epoch in 0..3 {
//!     for (images, labels) in mnist.train.shuffled(64, epoch_seed(0, epoch)).flat().prefetch(2) {
//!         assert_eq!((images.nrows(), images.ncols()), (labels.len(), 784));
//!     }
//! }
//! # Ok::<(), slabwise::data::DataError>(())
//! ```

mod array;
pub mod augment;
mod cifar;
mod dataset;
mod frechet;
mod idx;
#[cfg(feature = "images")]
mod images;
mod loader;
mod mnist;
pub mod npy;
mod prefetch;
mod score;
mod show;
mod split;
mod table;
mod text;

pub use array::HostArray;
pub(crate) use array::with_array;
pub use augment::Image;
pub use cifar::Cifar10;
pub use dataset::{Augment, Concat, Dataset, Items, Map, Random, Rows, Subset, TryMap, Zip};
pub use frechet::frechet_distance;
pub use idx::Idx;
#[cfg(feature = "images")]
pub use images::{ImageFolder, read_image};
pub use loader::{Collate, LoadedBatches, Loader};
pub use mnist::Mnist;
pub use prefetch::Prefetched;
pub use score::{bleu, edit_distance, error_rate};
pub(crate) use show::{format, short};
pub use slabwise_compiler::error::DataError;
pub use split::{Batch, Batches, FlatBatch, FlatBatches, Split, epoch_seed};
pub use table::Table;
pub use text::Text;

#[cfg(test)]
mod tests;
