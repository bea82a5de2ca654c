//! Datasets: items by index, and datasets made of others.

use std::sync::Arc;

use ndarray::{Array, Array3, Axis, Dimension, RemoveAxis};

use super::loader::{Collate, Loader};
use super::split::{SplitMix64, epoch_seed, permutation};
use super::{DataError, Split};

/// A finite set of items that any thread can make, each from its index.
///
/// ```
/// use slabwise::data::{Dataset, Items, Rows};
/// use ndarray::Array2;
///
/// let pairs = Rows(Array2::from_shape_fn((100, 3), |(i, j)| (i + j) as f32))
///     .zip(Items(vec![7i32; 100]))
///     .map(|(row, label)| (row * 0.5, label));
/// for batch in pairs.batch(8).shuffle(1).drop_last().workers(2).epoch(0) {
///     let (rows, labels) = batch?;
///     assert_eq!((rows.dim(), labels.len()), ((8, 3), 8));
/// }
/// # Ok::<(), slabwise::data::DataError>(())
/// ```
pub trait Dataset: Send + Sync {
    /// An item.
    type Item: Send;

    /// The number of items.
    fn len(&self) -> usize;

    /// The item of an index below [`Dataset::len`]. `epoch` counts the passes over the data, for
    /// datasets whose items [vary](Dataset::augment) from one to the next. The same index and epoch
    /// give the same item.
    ///
    /// # Errors
    /// If the item cannot be read or is damaged.
    fn item(&self, index: usize, epoch: u64) -> Result<Self::Item, DataError>;

    /// Whether there are no items.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The items, each changed by a function.
    fn map<T: Send, F: Fn(Self::Item) -> T + Send + Sync>(self, change: F) -> Map<Self, F>
    where
        Self: Sized,
    {
        Map { of: self, change }
    }

    /// The items, each changed by a function that may fail.
    fn try_map<T: Send, F: Fn(Self::Item) -> Result<T, DataError> + Send + Sync>(
        self,
        change: F,
    ) -> TryMap<Self, F>
    where
        Self: Sized,
    {
        TryMap { of: self, change }
    }

    /// The items, each changed by a function with random numbers that seed, epoch and index alone
    /// decide: the same with any number of workers, and new ones in each epoch. See
    /// [`augment`](super::augment).
    fn augment<T: Send, F: Fn(Self::Item, &mut Random) -> T + Send + Sync>(
        self,
        seed: u64,
        change: F,
    ) -> Augment<Self, F>
    where
        Self: Sized,
    {
        let of = self;
        Augment { of, seed, change }
    }

    /// The items of these indices, in their order; an index may be there several times.
    ///
    /// # Errors
    /// If there is no item of an index.
    fn subset(self, indices: impl Into<Vec<usize>>) -> Result<Subset<Self>, DataError>
    where
        Self: Sized,
    {
        let indices = indices.into();
        let len = self.len();
        if let Some(index) = indices.iter().find(|&&index| index >= len) {
            let detail = format!("there is no item {index}; the dataset has {len}");
            return Err(DataError::Other(format!("subset: {detail}")));
        }
        Ok(Subset { of: self, indices })
    }

    /// The first `n` items, or all if there are fewer.
    fn take(self, n: usize) -> Subset<Self>
    where
        Self: Sized,
    {
        let indices = (0..n.min(self.len())).collect();
        Subset { of: self, indices }
    }

    /// The first `n` items, and the others; after [`Dataset::permuted`] a random split.
    fn split(self, n: usize) -> [Subset<Arc<Self>>; 2]
    where
        Self: Sized,
    {
        let (len, of) = (self.len(), Arc::new(self));
        let n = n.min(len);
        [0..n, n..len].map(|range| Subset {
            of: Arc::clone(&of),
            indices: range.collect(),
        })
    }

    /// The items in an order that `seed` alone decides, the same in every epoch. For a new order in
    /// each, see [`Loader::shuffle`].
    fn permuted(self, seed: u64) -> Subset<Self>
    where
        Self: Sized,
    {
        let indices = permutation(self.len(), seed);
        Subset { of: self, indices }
    }

    /// The items of this dataset, then those of another.
    fn concat<D: Dataset<Item = Self::Item>>(self, next: D) -> Concat<Self, D>
    where
        Self: Sized,
    {
        Concat { first: self, next }
    }

    /// Pairs of the items of two datasets, as many as the shorter has.
    fn zip<D: Dataset>(self, other: D) -> Zip<Self, D>
    where
        Self: Sized,
    {
        Zip(self, other)
    }

    /// Batches of `size` items (0 counts as 1), stacked along a new first axis.
    fn batch(self, size: usize) -> Loader<Self, <Self::Item as Collate>::Batch>
    where
        Self: Sized + 'static,
        Self::Item: Collate,
    {
        self.batch_with(size, Collate::collate)
    }

    /// Batches of `size` items (0 counts as 1), joined by a function.
    fn batch_with<B: Send + 'static>(
        self,
        size: usize,
        collate: impl Fn(Vec<Self::Item>) -> Result<B, DataError> + Send + Sync + 'static,
    ) -> Loader<Self, B>
    where
        Self: Sized + 'static,
    {
        Loader::new(self, size, collate)
    }
}

/// Random numbers of one item, for [`Dataset::augment`]: SplitMix64, the same on every platform.
pub struct Random(SplitMix64);

impl Random {
    /// The random numbers of a seed, an epoch and an index.
    pub fn keyed(seed: u64, epoch: u64, index: u64) -> Random {
        Random(SplitMix64(epoch_seed(epoch_seed(seed, epoch), index)))
    }

    /// A number uniform in `low..high`; `low` if the range is empty.
    pub fn uniform(&mut self, low: f32, high: f32) -> f32 {
        // 24 bits are the numbers of an f32 between 0 and 1 with equal distances.
        let share = (self.0.next() >> 40) as f32 / (1u32 << 24) as f32;
        let value = low + (high - low) * share;
        // Rounding may reach the end.
        if value < high { value } else { low }
    }

    /// An integer uniform in `0..bound`; 0 if there is none.
    pub fn below(&mut self, bound: usize) -> usize {
        match bound {
            0 => 0,
            bound => self.0.below(bound as u64) as usize,
        }
    }

    /// True with a probability from 0 to 1.
    pub fn chance(&mut self, probability: f32) -> bool {
        self.uniform(0.0, 1.0) < probability
    }
}

/// See [`Dataset::map`].
#[derive(Clone, Debug)]
pub struct Map<D, F> {
    of: D,
    change: F,
}

impl<D: Dataset, T: Send, F: Fn(D::Item) -> T + Send + Sync> Dataset for Map<D, F> {
    type Item = T;

    fn len(&self) -> usize {
        self.of.len()
    }

    fn item(&self, index: usize, epoch: u64) -> Result<T, DataError> {
        self.of.item(index, epoch).map(&self.change)
    }
}

/// See [`Dataset::try_map`].
#[derive(Clone, Debug)]
pub struct TryMap<D, F> {
    of: D,
    change: F,
}

impl<D: Dataset, T: Send, F: Fn(D::Item) -> Result<T, DataError> + Send + Sync> Dataset
    for TryMap<D, F>
{
    type Item = T;

    fn len(&self) -> usize {
        self.of.len()
    }

    fn item(&self, index: usize, epoch: u64) -> Result<T, DataError> {
        self.of.item(index, epoch).and_then(&self.change)
    }
}

/// See [`Dataset::augment`].
#[derive(Clone, Debug)]
pub struct Augment<D, F> {
    of: D,
    seed: u64,
    change: F,
}

impl<D: Dataset, T: Send, F: Fn(D::Item, &mut Random) -> T + Send + Sync> Dataset
    for Augment<D, F>
{
    type Item = T;

    fn len(&self) -> usize {
        self.of.len()
    }

    fn item(&self, index: usize, epoch: u64) -> Result<T, DataError> {
        let item = self.of.item(index, epoch)?;
        let mut random = Random::keyed(self.seed, epoch, index as u64);
        Ok((self.change)(item, &mut random))
    }
}

/// Chosen items of a dataset; see [`Dataset::subset`], [`Dataset::take`], [`Dataset::split`] and
/// [`Dataset::permuted`].
#[derive(Clone, Debug)]
pub struct Subset<D> {
    of: D,
    indices: Vec<usize>,
}

impl<D: Dataset> Dataset for Subset<D> {
    type Item = D::Item;

    fn len(&self) -> usize {
        self.indices.len()
    }

    fn item(&self, index: usize, epoch: u64) -> Result<D::Item, DataError> {
        let index = self.indices.get(index);
        let index = index.ok_or_else(|| no_item(self.len()))?;
        self.of.item(*index, epoch)
    }
}

/// See [`Dataset::concat`].
#[derive(Clone, Debug)]
pub struct Concat<A, B> {
    first: A,
    next: B,
}

impl<A: Dataset, B: Dataset<Item = A::Item>> Dataset for Concat<A, B> {
    type Item = A::Item;

    fn len(&self) -> usize {
        self.first.len().saturating_add(self.next.len())
    }

    fn item(&self, index: usize, epoch: u64) -> Result<A::Item, DataError> {
        match index.checked_sub(self.first.len()) {
            None => self.first.item(index, epoch),
            Some(rest) => self.next.item(rest, epoch),
        }
    }
}

/// See [`Dataset::zip`].
#[derive(Clone, Debug)]
pub struct Zip<A, B>(A, B);

impl<A: Dataset, B: Dataset> Dataset for Zip<A, B> {
    type Item = (A::Item, B::Item);

    fn len(&self) -> usize {
        self.0.len().min(self.1.len())
    }

    fn item(&self, index: usize, epoch: u64) -> Result<Self::Item, DataError> {
        Ok((self.0.item(index, epoch)?, self.1.item(index, epoch)?))
    }
}

/// The error of an index beyond a dataset's end.
fn no_item(len: usize) -> DataError {
    DataError::Other(format!("there is no such item; the dataset has {len}"))
}

impl<D: Dataset + ?Sized> Dataset for Arc<D> {
    type Item = D::Item;

    fn len(&self) -> usize {
        (**self).len()
    }

    fn item(&self, index: usize, epoch: u64) -> Result<D::Item, DataError> {
        (**self).item(index, epoch)
    }
}

/// Items in memory.
#[derive(Clone, Debug)]
pub struct Items<T>(pub Vec<T>);

impl<T: Clone + Send + Sync> Dataset for Items<T> {
    type Item = T;

    fn len(&self) -> usize {
        self.0.len()
    }

    fn item(&self, index: usize, _: u64) -> Result<T, DataError> {
        let item = self.0.get(index).cloned();
        item.ok_or_else(|| no_item(self.0.len()))
    }
}

/// The parts of an array along its first axis, such as the rows of a matrix. An array without axes
/// has none.
#[derive(Clone, Debug)]
pub struct Rows<T, D: Dimension>(pub Array<T, D>);

impl<T: Clone + Send + Sync, D: Dimension + RemoveAxis> Dataset for Rows<T, D> {
    type Item = Array<T, D::Smaller>;

    fn len(&self) -> usize {
        self.0.shape().first().copied().unwrap_or(0)
    }

    fn item(&self, index: usize, _: u64) -> Result<Self::Item, DataError> {
        if index >= self.len() {
            return Err(no_item(self.len()));
        }
        Ok(self.0.index_axis(Axis(0), index).to_owned())
    }
}

/// Images `[channels, height, width]` with values in `[0, 1]`, and their labels.
impl Dataset for Split {
    type Item = (Array3<f32>, i32);

    fn len(&self) -> usize {
        Split::len(self)
    }

    fn item(&self, index: usize, _: u64) -> Result<Self::Item, DataError> {
        let [height, width] = self.image_shape();
        let shape = (self.channels(), height, width);
        let size = shape.0 * height * width;
        let label = self.labels().get(index);
        let label = label.ok_or_else(|| no_item(Split::len(self)))?;
        let pixels = self.pixels()[index * size..][..size].iter();
        let values = pixels.map(|&pixel| f32::from(pixel) / 255.0).collect();
        let image = Array3::from_shape_vec(shape, values);
        let image = image.map_err(|error| DataError::Other(error.to_string()))?;
        Ok((image, i32::from(*label)))
    }
}

#[cfg(test)]
mod tests;
