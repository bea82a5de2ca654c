//! Labelled images in memory, and batches of them.

use std::ops::Range;
use std::sync::Arc;

use ndarray::{Array1, Array2, Array4};

use super::{DataError, Prefetched};
use crate::world::{OwnGrains, World, share_of};

/// Images `[n, channels, height, width]` with values in `[0, 1]`, and their labels `[n]`.
pub type Batch = (Array4<f32>, Array1<i32>);
/// Images `[n, channels * height * width]` with values in `[0, 1]`, and their labels `[n]`.
pub type FlatBatch = (Array2<f32>, Array1<i32>);

/// Images of one size, each with a label: one of so many classes, counted from 0. Cloning shares
/// the data.
#[derive(Clone, Debug)]
pub struct Split {
    data: Arc<Images>,
}

#[derive(Clone, Debug)]
struct Images {
    pixels: Vec<u8>,
    labels: Vec<u8>,
    /// Labels are below this.
    classes: usize,
    /// Channels, height, width.
    shape: [usize; 3],
}

impl Split {
    /// A split of `labels.len()` grey images of `shape` (height, width), row-major one after the
    /// other in `pixels`, with as many classes as the largest label requires.
    ///
    /// # Errors
    ///
    /// [`DataError::Inconsistent`] for an empty image, or a number of pixels that is not that of
    /// the labels times the image's.
    pub fn new(pixels: Vec<u8>, labels: Vec<u8>, shape: [usize; 2]) -> Result<Split, DataError> {
        let classes = labels.iter().max().map_or(0, |&most| usize::from(most) + 1);
        Split::checked(pixels, labels, [1, shape[0], shape[1]], classes, "split")
    }

    /// The same images as of `classes` classes, of which some may not occur.
    ///
    /// # Errors
    ///
    /// [`DataError::Inconsistent`] if a label is not below `classes`.
    pub fn with_classes(self, classes: usize) -> Result<Split, DataError> {
        let Images {
            pixels,
            labels,
            shape,
            ..
        } = Arc::try_unwrap(self.data).unwrap_or_else(|shared| Images::clone(&shared));
        Split::checked(pixels, labels, shape, classes, "split")
    }

    /// A split of data from `origin`.
    pub(super) fn checked(
        pixels: Vec<u8>,
        labels: Vec<u8>,
        shape: [usize; 3],
        classes: usize,
        origin: &str,
    ) -> Result<Split, DataError> {
        let wrong = |detail| {
            Err(DataError::Inconsistent {
                origin: origin.to_owned(),
                detail,
            })
        };
        let [channels, height, width] = shape;
        if channels == 0 || height == 0 || width == 0 {
            return wrong(format!(
                "images of {height}x{width} pixels and {channels} channels are empty"
            ));
        }
        let all = [channels, height, width, labels.len()]
            .into_iter()
            .try_fold(1usize, usize::checked_mul);
        if all != Some(pixels.len()) {
            let of = if channels == 1 {
                String::new()
            } else {
                format!("{channels}x")
            };
            return wrong(format!(
                "{} pixels are not {} images of {of}{height}x{width}",
                pixels.len(),
                labels.len()
            ));
        }
        if let Some((index, label)) = labels
            .iter()
            .enumerate()
            .find(|&(_, &label)| usize::from(label) >= classes)
        {
            return wrong(format!(
                "label {index} is {label}; labels of {classes} classes run from 0 to {}",
                classes.saturating_sub(1)
            ));
        }
        Ok(Split {
            data: Arc::new(Images {
                pixels,
                labels,
                classes,
                shape,
            }),
        })
    }

    /// Number of images.
    pub fn len(&self) -> usize {
        self.data.labels.len()
    }

    /// True if there are none.
    pub fn is_empty(&self) -> bool {
        self.data.labels.is_empty()
    }

    /// How many classes there are: labels are below it.
    pub fn classes(&self) -> usize {
        self.data.classes
    }

    /// Height and width of each image, in pixels.
    pub fn image_shape(&self) -> [usize; 2] {
        let [_, height, width] = self.data.shape;
        [height, width]
    }

    /// Numbers of a pixel: 1 of grey images, 3 of coloured ones.
    pub fn channels(&self) -> usize {
        self.data.shape[0]
    }

    /// The first `n` images, or all if there are fewer.
    pub fn first(&self, n: usize) -> Split {
        let n = n.min(self.len());
        let Images {
            pixels,
            labels,
            classes,
            shape,
        } = &*self.data;
        let image: usize = shape.iter().product();
        let (pixels, labels) = (pixels[..n * image].to_vec(), labels[..n].to_vec());
        Split {
            data: Arc::new(Images {
                pixels,
                labels,
                classes: *classes,
                shape: *shape,
            }),
        }
    }

    /// All pixels `[len, channels, height, width]`, 0 to 255.
    pub fn pixels(&self) -> &[u8] {
        &self.data.pixels
    }

    /// All labels `[len]`, below [`Split::classes`].
    pub fn labels(&self) -> &[u8] {
        &self.data.labels
    }

    /// Every image once, in order, `batch` at a time (0 counts as 1); the last batch may be
    /// smaller.
    pub fn batches(&self, batch: usize) -> Batches {
        self.in_order_of(None, batch)
    }

    /// Every image once, in an order that `seed` alone decides, `batch` at a time (0 counts as 1);
    /// the last batch may be smaller. The order is the same on every platform and in every version.
    /// Use [`epoch_seed`] for a new order per epoch.
    pub fn shuffled(&self, batch: usize, seed: u64) -> Batches {
        self.in_order_of(Some(permutation(self.len(), seed)), batch)
    }

    fn in_order_of(&self, order: Option<Vec<usize>>, batch: usize) -> Batches {
        Batches {
            data: Arc::clone(&self.data),
            order,
            batch: batch.max(1),
            left: 0..self.len(),
            share: World::alone().own_grains(),
        }
    }
}

/// Batches of a [`Split`], assembled one by one on request. Holds on to the data, not to the split.
#[derive(Clone, Debug)]
pub struct Batches {
    data: Arc<Images>,
    /// Image shown at each position; none for the order of the split.
    order: Option<Vec<usize>>,
    batch: usize,
    /// Positions not yet handed out.
    left: Range<usize>,
    /// The grains whose part of each batch is assembled.
    share: OwnGrains,
}

impl Batches {
    /// The same batches with each image as one row, as a multilayer perceptron expects them.
    pub fn flat(self) -> FlatBatches {
        FlatBatches(self)
    }

    /// The same batches, reduced to the [rows](World::share) of this rank of a world.
    pub fn share(mut self, world: &World) -> Batches {
        self.share = world.own_grains();
        self
    }

    /// Assembles batches on a background thread, at most `depth` ahead (0 counts as 1); on the
    /// caller's, one by one, if the system cannot start a thread.
    pub fn prefetch(self, depth: usize) -> Prefetched<Batch> {
        Prefetched::new(self, depth)
    }

    /// Pixel values and labels of the next batch; none at the end.
    fn assemble(&mut self) -> Option<(Vec<f32>, Array1<i32>)> {
        if self.left.is_empty() {
            return None;
        }
        let end = self
            .left
            .end
            .min(self.left.start.saturating_add(self.batch));
        let own = share_of(&self.share, end - self.left.start);
        let positions = self.left.start + own.start..self.left.start + own.end;
        self.left.start = end;
        let image: usize = self.data.shape.iter().product();
        let mut values = Vec::with_capacity(positions.len() * image);
        let mut labels = Vec::with_capacity(positions.len());
        for position in positions {
            let index = self
                .order
                .as_ref()
                .map_or(position, |order| order[position]);
            // Divided rather than multiplied by an inexact 1/255, so that 255 becomes exactly 1.
            values.extend(
                self.data.pixels[index * image..(index + 1) * image]
                    .iter()
                    .map(|&pixel| f32::from(pixel) / 255.0),
            );
            labels.push(i32::from(self.data.labels[index]));
        }
        Some((values, Array1::from_vec(labels)))
    }
}

impl Iterator for Batches {
    type Item = Batch;

    fn next(&mut self) -> Option<Batch> {
        let [channels, height, width] = self.data.shape;
        let (values, labels) = self.assemble()?;
        // Always fits: as many values as images times pixels.
        let images =
            Array4::from_shape_vec((labels.len(), channels, height, width), values).ok()?;
        Some((images, labels))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = self.left.len().div_ceil(self.batch);
        (left, Some(left))
    }
}

impl ExactSizeIterator for Batches {}

/// [`Batches`] with each image as one row.
#[derive(Clone, Debug)]
pub struct FlatBatches(Batches);

impl FlatBatches {
    /// Like [`Batches::prefetch`].
    pub fn prefetch(self, depth: usize) -> Prefetched<FlatBatch> {
        Prefetched::new(self, depth)
    }
}

impl Iterator for FlatBatches {
    type Item = FlatBatch;

    fn next(&mut self) -> Option<FlatBatch> {
        let image = self.0.data.shape.iter().product();
        let (values, labels) = self.0.assemble()?;
        // Always fits, as above.
        let images = Array2::from_shape_vec((labels.len(), image), values).ok()?;
        Some((images, labels))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.0.size_hint()
    }
}

impl ExactSizeIterator for FlatBatches {}

/// SplitMix64 (Steele, Lea, Flood 2014): 64 bits of state, equidistributed, and the same
/// everywhere.
pub(super) struct SplitMix64(pub(super) u64);

impl SplitMix64 {
    /// The odd number nearest to 2^64 over the golden ratio.
    const GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(Self::GAMMA);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in `0..bound`, for a bound above 0, without bias (Lemire 2019).
    pub fn below(&mut self, bound: u64) -> u64 {
        loop {
            let product = u128::from(self.next()) * u128::from(bound);
            let low = product as u64;
            // The division is needed only where rejection is possible at all.
            if low >= bound || low >= bound.wrapping_neg() % bound {
                return (product >> 64) as u64;
            }
        }
    }
}

/// `0..n` in an order that `seed` decides (Fisher and Yates, in Durstenfeld's form).
pub(super) fn permutation(n: usize, seed: u64) -> Vec<usize> {
    let mut random = SplitMix64(seed);
    let mut order: Vec<usize> = (0..n).collect();
    for last in (1..n).rev() {
        order.swap(last, random.below(last as u64 + 1) as usize);
    }
    order
}

/// A seed for `epoch` (from 0) of a run seeded with `seed`: output number `epoch` of SplitMix64.
pub fn epoch_seed(seed: u64, epoch: u64) -> u64 {
    SplitMix64(seed.wrapping_add(epoch.wrapping_mul(SplitMix64::GAMMA))).next()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_generator_is_the_published_one() {
        // First outputs for seed 1234567, as given with the public-domain C version by Vigna.
        let mut random = SplitMix64(1_234_567);
        let outputs = [(); 5].map(|()| random.next());
        let published = [
            6457827717110365317,
            3203168211198807973,
            9817491932198370423,
            4593380528125082431,
            16408922859458223821,
        ];
        assert_eq!(outputs, published);
        assert_eq!(
            (0..5)
                .map(|epoch| epoch_seed(1_234_567, epoch))
                .collect::<Vec<_>>(),
            published
        );
    }

    #[test]
    fn permutations_are_permutations_and_unbiased() {
        for n in [0, 1, 2, 3, 1000] {
            let mut order = permutation(n, 7);
            assert_eq!(order, permutation(n, 7));
            order.sort_unstable();
            assert!(order.into_iter().eq(0..n));
        }
        assert_ne!(permutation(1000, 7), permutation(1000, 8));
        // All six orders of three are equally likely: chi-squared with 5 degrees of freedom stays
        // under its 99.99% point.
        let mut counts = [0u32; 6];
        for seed in 0..60_000 {
            let order = permutation(3, seed);
            counts[order[0] * 2 + usize::from(order[1] > order[2])] += 1;
        }
        let chi: f64 = counts
            .iter()
            .map(|&count| (f64::from(count) - 10_000.0).powi(2) / 10_000.0)
            .sum();
        assert!(chi < 25.7, "{counts:?}");
    }
}
