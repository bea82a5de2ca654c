//! Loaders: batches of a dataset's items, made by several threads in a fixed order.

use std::any::Any;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use ndarray::{Array, Array1, Axis, Dimension, RemoveAxis, stack};

use super::split::{epoch_seed, permutation};
use super::{DataError, Dataset, Prefetched};

/// Items that make a batch.
pub trait Collate: Sized {
    /// The batch.
    type Batch: Send + 'static;

    /// The batch of these items.
    ///
    /// # Errors
    /// If the items do not fit together; the error names the first that does not fit, by its
    /// position in the batch.
    fn collate(items: Vec<Self>) -> Result<Self::Batch, DataError>;
}

/// Arrays of one shape are stacked along a new first axis.
impl<T, D> Collate for Array<T, D>
where
    T: Clone + Send + 'static,
    D: Dimension,
    D::Larger: RemoveAxis + Send + 'static,
{
    type Batch = Array<T, D::Larger>;

    fn collate(items: Vec<Self>) -> Result<Self::Batch, DataError> {
        if let Some(first) = items.first()
            && let Some(at) = items.iter().position(|item| item.shape() != first.shape())
        {
            return Err(DataError::Other(format!(
                "a batch has items of the shapes {:?} (first) and {:?} (number {at} from 0); bring them to one shape, as by augment::resize",
                first.shape(),
                items[at].shape()
            )));
        }
        let views: Vec<_> = items.iter().map(|item| item.view()).collect();
        stack(Axis(0), &views).map_err(|error| DataError::Other(error.to_string()))
    }
}

macro_rules! collate_numbers {
    ($($number:ty),*) => {$(
        /// Numbers become an array of one axis.
        impl Collate for $number {
            type Batch = Array1<$number>;

            fn collate(items: Vec<Self>) -> Result<Self::Batch, DataError> {
                Ok(Array1::from_vec(items))
            }
        }
    )*};
}
collate_numbers!(f32, i32, u8, half::f16, half::bf16);

macro_rules! collate_tuple {
    ($($name:ident $list:ident),+) => {
        /// Tuples become a tuple of batches.
        impl<$($name: Collate),+> Collate for ($($name,)+) {
            type Batch = ($($name::Batch,)+);

            fn collate(items: Vec<Self>) -> Result<Self::Batch, DataError> {
                $(let mut $list = Vec::with_capacity(items.len());)+
                for ($($name,)+) in items {
                    $($list.push($name);)+
                }
                Ok(($($name::collate($list)?,)+))
            }
        }
    };
}

#[allow(non_snake_case)]
mod tuples {
    use super::{Collate, DataError};
    collate_tuple!(A a, B b);
    collate_tuple!(A a, B b, C c);
    collate_tuple!(A a, B b, C c, D d);
}

/// The function that joins items.
type Join<I, B> = Arc<dyn Fn(Vec<I>) -> Result<B, DataError> + Send + Sync>;

/// Batches of a dataset; made by [`Dataset::batch`].
///
/// The batches of an epoch, and their order, depend on the dataset, the batch size, the seed and
/// the epoch's number alone, never on the number of workers.
pub struct Loader<D: Dataset, B> {
    dataset: Arc<D>,
    size: usize,
    seed: Option<u64>,
    drop_last: bool,
    workers: usize,
    ahead: usize,
    join: Join<D::Item, B>,
}

impl<D: Dataset, B> Clone for Loader<D, B> {
    fn clone(&self) -> Self {
        Loader {
            dataset: Arc::clone(&self.dataset),
            join: Arc::clone(&self.join),
            ..*self
        }
    }
}

impl<D: Dataset, B> fmt::Debug for Loader<D, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Loader")
            .field("items", &self.dataset.len())
            .field("size", &self.size)
            .field("seed", &self.seed)
            .field("workers", &self.workers)
            .finish_non_exhaustive()
    }
}

impl<D: Dataset + 'static, B: Send + 'static> Loader<D, B> {
    pub(super) fn new(
        dataset: D,
        size: usize,
        join: impl Fn(Vec<D::Item>) -> Result<B, DataError> + Send + Sync + 'static,
    ) -> Self {
        Loader {
            dataset: Arc::new(dataset),
            size: size.max(1),
            seed: None,
            drop_last: false,
            workers: 1,
            ahead: 2,
            join: Arc::new(join),
        }
    }

    /// Takes the items in a new order in each epoch, which seed and epoch alone decide.
    #[must_use]
    pub fn shuffle(mut self, seed: u64) -> Self {
        self.seed = Some(seed);
        self
    }

    /// Leaves out the last batch of an epoch if it is smaller than the others.
    #[must_use]
    pub fn drop_last(mut self) -> Self {
        self.drop_last = true;
        self
    }

    /// Sets the number of threads that make batches; with 0 the caller's makes each when it is
    /// requested. The default is 1.
    #[must_use]
    pub fn workers(mut self, workers: usize) -> Self {
        self.workers = workers.min(1024);
        self
    }

    /// Sets the most batches (at least 1) that each worker has ready or in work; the default is 2.
    /// With the one in use there are at most `workers · ahead + 1` batches in memory.
    #[must_use]
    pub fn ahead(mut self, ahead: usize) -> Self {
        self.ahead = ahead.max(1);
        self
    }

    /// The number of batches of an epoch.
    pub fn len(&self) -> usize {
        match self.drop_last {
            true => self.dataset.len() / self.size,
            false => self.dataset.len().div_ceil(self.size),
        }
    }

    /// Whether an epoch has no batches.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The dataset.
    pub fn dataset(&self) -> &D {
        &self.dataset
    }

    /// The batches of an epoch.
    pub fn epoch(&self, epoch: u64) -> LoadedBatches<B> {
        self.epoch_from(epoch, 0)
    }

    /// The batches of an epoch from the one of a number, from 0: those that were left when training
    /// was interrupted.
    ///
    /// An item that cannot be made, or a function of the user that panics, is an `Err` in the place
    /// of its batch, which names the item's index; the batches after it follow.
    pub fn epoch_from(&self, epoch: u64, first: usize) -> LoadedBatches<B> {
        let len = self.dataset.len();
        let order = self
            .seed
            .map(|seed| permutation(len, epoch_seed(seed, epoch)));
        let plan = Arc::new(Epoch {
            loader: self.clone(),
            order,
            epoch,
        });
        let batches = self.len();
        let first = first.min(batches);
        let step = self.workers.max(1);
        // Worker w makes the batches w, w + n, w + 2n, … of the epoch.
        let shares = (0..step.min((batches - first).max(1))).map(|worker| {
            let plan = Arc::clone(&plan);
            let numbers = (first + worker..batches).step_by(step);
            numbers.map(move |number| plan.batch(number))
        });
        let sources = match self.workers {
            0 => shares.map(|share| Source::Here(Box::new(share))).collect(),
            _ => shares
                .map(|share| Source::Ahead(Prefetched::new(share, self.ahead)))
                .collect(),
        };
        LoadedBatches {
            sources,
            turn: 0,
            left: batches - first,
        }
    }
}

/// An epoch of a loader.
struct Epoch<D: Dataset, B> {
    loader: Loader<D, B>,
    order: Option<Vec<usize>>,
    epoch: u64,
}

impl<D: Dataset, B> Epoch<D, B> {
    /// The batch of a number.
    fn batch(&self, number: usize) -> Result<B, DataError> {
        let Loader {
            dataset,
            size,
            join,
            ..
        } = &self.loader;
        let positions = number * size..dataset.len().min((number + 1) * size);
        let index = |position| {
            self.order
                .as_ref()
                .map_or(position, |order| order[position])
        };
        let mut items = Vec::with_capacity(positions.len());
        for index in positions.map(index) {
            let item = caught(|| dataset.item(index, self.epoch));
            items.push(item.map_err(|source| DataError::Item {
                index,
                source: Box::new(source),
            })?);
        }
        caught(|| join(items)).map_err(|source| DataError::Batch {
            number,
            source: Box::new(source),
        })
    }
}

/// The result of a call, of which a panic is an error.
fn caught<T>(call: impl FnOnce() -> Result<T, DataError>) -> Result<T, DataError> {
    // A panic ends the item; its dataset is used further only through shared references.
    catch_unwind(AssertUnwindSafe(call))
        .unwrap_or_else(|panic| Err(DataError::Panic(said(&*panic))))
}

/// The message of a panic.
fn said(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "without a message".into())
}

/// Where the batches of a worker come from.
enum Source<B> {
    Ahead(Prefetched<Result<B, DataError>>),
    Here(Box<dyn Iterator<Item = Result<B, DataError>> + Send>),
}

/// The batches of an [epoch](Loader::epoch). Dropping it, also mid-way, ends the workers.
pub struct LoadedBatches<B> {
    sources: Vec<Source<B>>,
    /// The worker whose batch is next.
    turn: usize,
    left: usize,
}

impl<B> fmt::Debug for LoadedBatches<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = f.debug_struct("LoadedBatches");
        debug.field("workers", &self.sources.len());
        debug.field("left", &self.left).finish_non_exhaustive()
    }
}

impl<B> Iterator for LoadedBatches<B> {
    type Item = Result<B, DataError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.left == 0 {
            return None;
        }
        self.left -= 1;
        let workers = self.sources.len();
        let source = self.sources.get_mut(self.turn)?;
        self.turn = (self.turn + 1) % workers;
        match source {
            Source::Ahead(batches) => batches.next(),
            Source::Here(batches) => batches.next(),
        }
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left, Some(self.left))
    }
}

impl<B> ExactSizeIterator for LoadedBatches<B> {}
