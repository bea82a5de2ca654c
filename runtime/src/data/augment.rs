//! Changes of images, `[channels, height, width]` with values in `[0, 1]`, for
//! [`Dataset::augment`](super::Dataset::augment) and [`Dataset::map`](super::Dataset::map).
//!
//! ```
//! use slabwise::data::{Dataset, Items, augment};
//! use ndarray::Array3;
//!
//! let images = Items(vec![(Array3::<f32>::zeros((3, 40, 32)), 1); 10]);
//! let examples = images
//!     .augment(7, |(image, label), random| {
//!         let image = augment::random_crop(&image, [32, 32], 4, random);
//!         let image = augment::random_flip(image, 0.5, random);
//!         (augment::color_jitter(image, [0.2, 0.2, 0.2], random), label)
//!     })
//!     .map(|(image, label)| {
//!         (augment::normalize(image, &[0.485, 0.456, 0.406], &[0.229, 0.224, 0.225]), label)
//!     });
//! assert_eq!(examples.item(3, 0)?.0.dim(), (3, 32, 32));
//! assert_eq!(examples.item(3, 5)?, examples.item(3, 5)?);
//! # Ok::<(), slabwise::data::DataError>(())
//! ```

use ndarray::{Array1, Array3, Axis, Slice};

use super::Random;

/// An image: `[channels, height, width]`.
pub type Image = Array3<f32>;

/// The weights of the luminance of red, green and blue (ITU-R BT.601), as PyTorch and Pillow use.
const LUMINANCE: [f32; 3] = [0.299, 0.587, 0.114];

/// The image at another height and width, by bilinear interpolation; where it shrinks, each pixel
/// is a mean over all that it covers, with triangular weights (antialiasing), as in Pillow and
/// torchvision. A length of 0 gives an empty image; an empty image gives zeros.
pub fn resize(image: &Image, [height, width]: [usize; 2]) -> Image {
    let (channels, h, w) = image.dim();
    if h == 0 || w == 0 || height == 0 || width == 0 {
        return Image::zeros((channels, height, width));
    }
    resize_axis(&resize_axis(image, 2, width), 1, height)
}

/// Interpolates along an axis.
fn resize_axis(image: &Image, axis: usize, length: usize) -> Image {
    let before = image.shape()[axis];
    if before == length {
        return image.clone();
    }
    let scale = before as f64 / length as f64;
    let support = scale.max(1.0);
    let mut shape = image.raw_dim();
    shape[axis] = length;
    let mut result = Image::zeros(shape);
    for (at, mut to) in result.axis_iter_mut(Axis(axis)).enumerate() {
        let centre = (at as f64 + 0.5) * scale;
        let first = (centre - support + 0.5).floor().max(0.0) as usize;
        let end = ((centre + support + 0.5).floor() as usize).min(before);
        let weight = |from: usize| {
            let distance = (from as f64 + 0.5 - centre) / support;
            (1.0 - distance.abs()).max(0.0)
        };
        let total: f64 = (first..end).map(weight).sum();
        for from in first..end {
            let share = (weight(from) / total) as f32;
            to.scaled_add(share, &image.index_axis(Axis(axis), from));
        }
    }
    result
}

/// The part of an image around its middle; where the image is smaller, zeros.
pub fn center_crop(image: &Image, [height, width]: [usize; 2]) -> Image {
    let (_, h, w) = image.dim();
    let offset = |whole: usize, part: usize| (whole as i64 - part as i64).div_euclid(2);
    crop(
        image,
        [offset(h, height), offset(w, width)],
        [height, width],
    )
}

/// A part of an image at a random place; the image is padded by `padding` zeros on each side, and
/// by more where it is smaller than the part.
pub fn random_crop(
    image: &Image,
    [height, width]: [usize; 2],
    padding: usize,
    random: &mut Random,
) -> Image {
    let (_, h, w) = image.dim();
    let mut offset = |whole: usize, part: usize| {
        let room = (whole + 2 * padding) as i64 - part as i64;
        match usize::try_from(room) {
            Ok(room) => random.below(room + 1) as i64 - padding as i64,
            Err(_) => room.div_euclid(2) - padding as i64,
        }
    };
    let start = [offset(h, height), offset(w, width)];
    crop(image, start, [height, width])
}

/// A random part of an image with a share of its area in `area` and a ratio of width to height in
/// `ratio` (on a logarithmic scale), resized to a height and width: "Inception-style" cropping
/// (Szegedy et al., 2014). After ten tries that do not fit, the middle of the image.
pub fn random_resized_crop(
    image: &Image,
    size: [usize; 2],
    area: [f32; 2],
    ratio: [f32; 2],
    random: &mut Random,
) -> Image {
    let (_, h, w) = image.dim();
    for _ in 0..10 {
        let share = random.uniform(area[0], area[1]) * (h * w) as f32;
        let ratio = random.uniform(ratio[0].ln(), ratio[1].ln()).exp();
        let width = (share * ratio).sqrt().round() as usize;
        let height = (share / ratio).sqrt().round() as usize;
        if (1..=h).contains(&height) && (1..=w).contains(&width) {
            let start = [random.below(h - height + 1), random.below(w - width + 1)];
            return resize(&crop(image, start.map(|n| n as i64), [height, width]), size);
        }
    }
    let side = h.min(w);
    resize(&center_crop(image, [side, side]), size)
}

/// The part of an image that begins at a place; zeros outside of the image.
fn crop(image: &Image, start: [i64; 2], [height, width]: [usize; 2]) -> Image {
    let (channels, h, w) = image.dim();
    let mut part = Image::zeros((channels, height, width));
    // The rows and columns that lie inside of the image.
    let inside = |start: i64, part: usize, whole: usize| {
        let first = (-start).clamp(0, part as i64);
        let end = (whole as i64 - start).clamp(first, part as i64);
        (first as usize, end as usize)
    };
    let ((top, bottom), (left, right)) = (inside(start[0], height, h), inside(start[1], width, w));
    let from = |at: usize, start: i64| (at as i64 + start) as usize;
    if top < bottom && left < right {
        let rows = Slice::from(from(top, start[0])..from(bottom, start[0]));
        let columns = Slice::from(from(left, start[1])..from(right, start[1]));
        let source = image.slice_axis(Axis(1), rows);
        let mut inner = part.slice_axis_mut(Axis(1), Slice::from(top..bottom));
        inner
            .slice_axis_mut(Axis(2), Slice::from(left..right))
            .assign(&source.slice_axis(Axis(2), columns));
    }
    part
}

/// The image with left and right exchanged.
pub fn flip(mut image: Image) -> Image {
    image.invert_axis(Axis(2));
    image.as_standard_layout().into_owned()
}

/// [`flip`] with a probability.
pub fn random_flip(image: Image, probability: f32, random: &mut Random) -> Image {
    match random.chance(probability) {
        true => flip(image),
        false => image,
    }
}

/// Random brightness, contrast and saturation, in this order: each mixes the image with black, with
/// its mean luminance, and with its luminance, by a factor uniform in `1 − strength..1 + strength`
/// (at least 0). Images of other than three channels have no saturation, and the mean of their
/// values as luminance. Values are kept in `[0, 1]`.
pub fn color_jitter(
    mut image: Image,
    [brightness, contrast, saturation]: [f32; 3],
    random: &mut Random,
) -> Image {
    // The numbers are drawn in any case, so that a strength does not change those that follow.
    let mut factor = |strength: f32| random.uniform((1.0 - strength).max(0.0), 1.0 + strength);
    let (light, range, colour) = (factor(brightness), factor(contrast), factor(saturation));
    image.mapv_inplace(|value| (value * light).clamp(0.0, 1.0));
    let grey = |image: &Image| match image.dim().0 {
        3 => {
            let weights = Array1::from_iter(LUMINANCE)
                .insert_axis(Axis(1))
                .insert_axis(Axis(2));
            (image * &weights).sum_axis(Axis(0))
        }
        _ => image.mean_axis(Axis(0)).unwrap_or_default(),
    };
    let mean = grey(&image).mean().unwrap_or(0.0);
    image.mapv_inplace(|value| (mean + (value - mean) * range).clamp(0.0, 1.0));
    if image.dim().0 == 3 {
        let grey = grey(&image).insert_axis(Axis(0));
        image = (&grey + (&image - &grey) * colour).mapv_into(|value| value.clamp(0.0, 1.0));
    }
    image
}

/// (value − mean)/deviation for each channel; channels without a mean or deviation keep their
/// values (mean 0, deviation 1).
pub fn normalize(mut image: Image, mean: &[f32], deviation: &[f32]) -> Image {
    for (channel, mut values) in image.axis_iter_mut(Axis(0)).enumerate() {
        let mean = mean.get(channel).copied().unwrap_or(0.0);
        let deviation = deviation.get(channel).copied().unwrap_or(1.0);
        values.mapv_inplace(|value| (value - mean) / deviation);
    }
    image
}

/// Fills a random rectangle with zeros, with a probability: its share of the area is uniform in
/// `area`, its ratio of width to height between 0.3 and 1/0.3 on a logarithmic scale (Zhong et al.,
/// "Random Erasing Data Augmentation", 2017). After ten rectangles that do not fit, none.
pub fn random_erasing(
    mut image: Image,
    probability: f32,
    area: [f32; 2],
    random: &mut Random,
) -> Image {
    let (_, h, w) = image.dim();
    if !random.chance(probability) {
        return image;
    }
    for _ in 0..10 {
        let share = random.uniform(area[0], area[1]) * (h * w) as f32;
        let ratio = random.uniform(0.3f32.ln(), -(0.3f32.ln())).exp();
        let (height, width) = (
            (share / ratio).sqrt() as usize,
            (share * ratio).sqrt() as usize,
        );
        if height < h && width < w {
            let (y, x) = (random.below(h - height + 1), random.below(w - width + 1));
            let mut rows = image.slice_axis_mut(Axis(1), Slice::from(y..y + height));
            rows.slice_axis_mut(Axis(2), Slice::from(x..x + width))
                .fill(0.0);
            break;
        }
    }
    image
}
