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
mod cifar;
mod idx;
mod mnist;
pub mod npy;
mod prefetch;
mod show;
mod split;

pub use array::HostArray;
pub(crate) use array::with_array;
pub use cifar::Cifar10;
pub use idx::Idx;
pub use mnist::Mnist;
pub use prefetch::Prefetched;
pub(crate) use show::{format, short};
pub use slabwise_compiler::error::DataError;
pub use split::{Batch, Batches, FlatBatch, FlatBatches, Split, epoch_seed};

#[cfg(test)]
mod tests;
