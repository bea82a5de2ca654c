//! Folders of images.

use std::fs;
use std::io::Cursor;
use std::path::{Path, PathBuf};

use ndarray::Array3;
use slabwise_planner::brief;
use zune_jpeg::JpegDecoder;
use zune_jpeg::zune_core::colorspace::ColorSpace;
use zune_jpeg::zune_core::options::DecoderOptions;

use super::{DataError, Dataset, Image};

/// The most pixels of an image: 64 million.
const PIXELS_MAX: usize = 1 << 26;
/// The most bytes of a file.
const BYTES_MAX: u64 = 1 << 30;

/// PNG and JPEG files in folders, one folder for each class, as torchvision's `ImageFolder` reads
/// them: `ROOT/cat/1.png`, `ROOT/cat/more/2.jpg`, `ROOT/dog/3.jpeg`. Classes are numbered in the
/// order of their names, files in that of their paths. An item is an image `[channels, height,
/// width]` with values in `[0, 1]` and its class; it is read and decoded when it is requested, by
/// the worker that makes the batch.
///
/// Needs the feature `images`.
#[derive(Clone, Debug)]
pub struct ImageFolder {
    classes: Vec<String>,
    files: Vec<(PathBuf, i32)>,
    grey: bool,
}

impl ImageFolder {
    /// Looks for images in the folders of `root`. None is opened yet.
    ///
    /// # Errors
    /// If a folder cannot be read, there are no folders, or one has no images.
    pub fn open(root: impl AsRef<Path>) -> Result<ImageFolder, DataError> {
        let root = root.as_ref();
        let mut folders: Vec<PathBuf> = entries(root)?
            .into_iter()
            .filter(|path| path.is_dir() && !hidden(path))
            .collect();
        folders.sort();
        if folders.is_empty() {
            return Err(malformed(
                root,
                "it has no folders; each class has one".into(),
            ));
        }
        let mut folder = ImageFolder {
            classes: Vec::new(),
            files: Vec::new(),
            grey: false,
        };
        for (class, path) in (0..).zip(&folders) {
            let mut files = Vec::new();
            images_below(path, &mut files, 0)?;
            if files.is_empty() {
                let detail = "there are no .png, .jpg or .jpeg files in it".to_owned();
                return Err(malformed(path, detail));
            }
            files.sort();
            folder
                .files
                .extend(files.into_iter().map(|file| (file, class)));
            let name = path.file_name().unwrap_or_default();
            folder.classes.push(name.to_string_lossy().into_owned());
        }
        Ok(folder)
    }

    /// Gives images of one channel, the luminance, instead of red, green and blue.
    #[must_use]
    pub fn grey(mut self) -> ImageFolder {
        self.grey = true;
        self
    }

    /// The names of the classes, by number.
    pub fn classes(&self) -> &[String] {
        &self.classes
    }

    /// The file of each item, with its class.
    pub fn files(&self) -> &[(PathBuf, i32)] {
        &self.files
    }
}

impl Dataset for ImageFolder {
    type Item = (Image, i32);

    fn len(&self) -> usize {
        self.files.len()
    }

    fn item(&self, index: usize, _: u64) -> Result<Self::Item, DataError> {
        let (path, class) = self.files.get(index).ok_or_else(|| {
            DataError::Other(format!(
                "there is no such image; there are {}",
                self.files.len()
            ))
        })?;
        Ok((read_image(path, self.grey)?, *class))
    }
}

/// Reads a PNG or JPEG file (distinguished by content) as `[3, height, width]`, or as `[1, height,
/// width]` if it is to be grey, with values in `[0, 1]`. Transparency is dropped, 16 bits of PNG
/// are rounded to 8, and a profile of colours or an orientation is not applied.
///
/// # Errors
/// A [`DataError`] that names the file: unreadable, neither PNG nor JPEG, truncated, damaged, or of
/// more than 64 million pixels.
pub fn read_image(path: impl AsRef<Path>, grey: bool) -> Result<Image, DataError> {
    let path = path.as_ref();
    let io = |source| DataError::Io {
        path: path.to_owned(),
        source,
    };
    if fs::metadata(path).map_err(io)?.len() > BYTES_MAX {
        return Err(malformed(path, "it has more than 1 GiB".into()));
    }
    let bytes = fs::read(path).map_err(io)?;
    decode(&bytes, grey).map_err(|detail| malformed(path, detail))
}

/// The image of a file's content; an error is the defect.
fn decode(bytes: &[u8], grey: bool) -> Result<Image, String> {
    let (pixels, [height, width], channels) = match bytes {
        [0x89, b'P', b'N', b'G', ..] => decode_png(bytes)?,
        [0xFF, 0xD8, ..] => decode_jpeg(bytes)?,
        _ => return Err("it is neither PNG nor JPEG by its first bytes".into()),
    };
    if pixels.len() != height * width * channels {
        return Err(format!(
            "its {height}x{width} pixels have {} bytes instead of {}; it may be cut short",
            pixels.len(),
            height * width * channels
        ));
    }
    // Grey, grey and alpha, colour, colour and alpha.
    let colours = if channels < 3 { 1 } else { 3 };
    let value = |channel: usize, y: usize, x: usize| {
        let pixel = &pixels[(y * width + x) * channels..][..channels];
        if grey && colours == 3 {
            let [r, g, b] = [pixel[0], pixel[1], pixel[2]].map(f32::from);
            return (0.299 * r + 0.587 * g + 0.114 * b) / 255.0;
        }
        f32::from(pixel[channel.min(colours - 1)]) / 255.0
    };
    let count = if grey { 1 } else { 3 };
    Ok(Array3::from_shape_fn(
        (count, height, width),
        |(c, y, x)| value(c, y, x),
    ))
}

/// Pixels in bytes, height and width, and the bytes of a pixel.
type Pixels = (Vec<u8>, [usize; 2], usize);

fn too_many(height: usize, width: usize) -> Result<(), String> {
    match height.checked_mul(width) {
        Some(0) => Err(format!("its {height}x{width} pixels are none")),
        Some(pixels) if pixels <= PIXELS_MAX => Ok(()),
        _ => Err(format!(
            "it declares {height}x{width} pixels, more than the {PIXELS_MAX} read at most"
        )),
    }
}

fn decode_png(bytes: &[u8]) -> Result<Pixels, String> {
    let failed = |error: png::DecodingError| {
        format!(
            "its PNG data is damaged or cut short: {}",
            brief(&error.to_string())
        )
    };
    let mut decoder = png::Decoder::new(Cursor::new(bytes));
    decoder.set_transformations(png::Transformations::normalize_to_color8());
    let mut reader = decoder.read_info().map_err(failed)?;
    let (width, height) = (reader.info().width as usize, reader.info().height as usize);
    too_many(height, width)?;
    let size = reader.output_buffer_size();
    let mut pixels = vec![0; size.ok_or("its size overflows")?];
    let frame = reader.next_frame(&mut pixels).map_err(failed)?;
    pixels.truncate(frame.buffer_size());
    Ok((pixels, [height, width], frame.color_type.samples()))
}

fn decode_jpeg(bytes: &[u8]) -> Result<Pixels, String> {
    let options = DecoderOptions::new_fast()
        .set_strict_mode(true)
        .set_max_width(1 << 16)
        .set_max_height(1 << 16)
        .jpeg_set_out_colorspace(ColorSpace::RGB);
    let failed = |error: zune_jpeg::errors::DecodeErrors| {
        format!(
            "its JPEG data is damaged or cut short: {}",
            brief(&error.to_string())
        )
    };
    let mut decoder = JpegDecoder::new_with_options(Cursor::new(bytes), options);
    decoder.decode_headers().map_err(failed)?;
    let (width, height) = decoder.dimensions().ok_or("it has no size")?;
    too_many(height, width)?;
    let pixels = decoder.decode().map_err(failed)?;
    let channels = decoder
        .output_colorspace()
        .map_or(3, |space| space.num_components());
    Ok((pixels, [height, width], channels))
}

/// The paths in a folder.
fn entries(folder: &Path) -> Result<Vec<PathBuf>, DataError> {
    let io = |source| DataError::Io {
        path: folder.to_owned(),
        source,
    };
    let entries = fs::read_dir(folder).map_err(io)?;
    entries.map(|entry| Ok(entry.map_err(io)?.path())).collect()
}

/// Folders in folders that are followed at most, which ends loops of links.
const DEPTH_MAX: usize = 16;

/// Collects the images in a folder and in those in it.
fn images_below(folder: &Path, files: &mut Vec<PathBuf>, depth: usize) -> Result<(), DataError> {
    for path in entries(folder)? {
        let extension = path.extension().unwrap_or_default().to_ascii_lowercase();
        if hidden(&path) {
            continue;
        }
        if path.is_dir() && depth < DEPTH_MAX {
            images_below(&path, files, depth + 1)?;
        } else if ["png", "jpg", "jpeg"]
            .iter()
            .any(|known| extension == *known)
        {
            files.push(path);
        }
    }
    Ok(())
}

/// Whether a name begins with a point, as those that systems add do.
fn hidden(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default();
    name.to_string_lossy().starts_with('.')
}

fn malformed(path: &Path, detail: String) -> DataError {
    let path = path.to_owned();
    DataError::Malformed { path, detail }
}

#[cfg(test)]
mod tests;
