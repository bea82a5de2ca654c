//! A classifier of images in an ONNX file.

use std::error::Error;
use std::path::Path;

use ndarray::{Array4, Axis as Along};
use slabwise::data::{Image, augment};
use slabwise::{AnyProgram, Device, Params, Plan, Session, Trace};
use slabwise_onnx::{Axis, OnnxModel};

/// The most times that an image may be longer than wide, because it is resized by its shorter side.
const RATIO_MAX: usize = 100;

/// How an image becomes the input of a model.
pub struct Preparation {
    /// Height and width, if the model leaves them open.
    pub size: usize,
    /// The shorter side before the image is cropped; 8/7 of the model's by default.
    pub resize: Option<usize>,
    /// The means of the channels, which are subtracted; one for all, or one for each.
    pub mean: Vec<f32>,
    /// The standard deviations of the channels, by which they are divided.
    pub deviation: Vec<f32>,
}

/// The axes of a model's image.
struct Layout {
    channels: usize,
    height: usize,
    width: usize,
    channels_last: bool,
}

impl Layout {
    fn of(axes: Option<&[Axis]>, size: usize) -> Result<Layout, String> {
        let Some([batch, a, b, c]) = axes else {
            return Err("the model's input is no batch of images, with four axes".into());
        };
        if let Axis::Fixed(n @ (0 | 2..)) = batch {
            return Err(format!(
                "the model takes {n} images at once; export it for a batch of one or of any length"
            ));
        }
        let colors = |axis: &Axis| match axis {
            Axis::Fixed(n @ (1 | 3)) => Some(*n),
            _ => None,
        };
        let length = |axis: &Axis| match axis {
            Axis::Fixed(n) => *n,
            _ => size,
        };
        let (channels, [height, width], channels_last) = match (colors(a), colors(c)) {
            (Some(channels), _) => (channels, [b, c], false),
            (None, Some(channels)) => (channels, [a, b], true),
            (None, None) => return Err("the model's input has neither 1 nor 3 channels".into()),
        };
        Ok(Layout {
            channels,
            height: length(height),
            width: length(width),
            channels_last,
        })
    }

    fn shape(&self) -> [usize; 4] {
        match self.channels_last {
            true => [1, self.height, self.width, self.channels],
            false => [1, self.channels, self.height, self.width],
        }
    }
}

/// A model in a session, with its weights.
pub struct Classifier {
    session: Session,
    program: AnyProgram,
    layout: Layout,
    preparation: Preparation,
}

impl Classifier {
    /// Imports a model whose input is an image and whose first output has a score for each class.
    pub fn open(path: &Path, preparation: Preparation) -> Result<Classifier, Box<dyn Error>> {
        let model = OnnxModel::load(path)?;
        let [input] = model.inputs() else {
            let n = model.inputs().len();
            return Err(format!("the model has {n} inputs, not one").into());
        };
        let layout = Layout::of(input.axes.as_deref(), preparation.size)?;
        for values in [&preparation.mean, &preparation.deviation] {
            if values.len() != 1 && values.len() != layout.channels {
                let (n, channels) = (values.len(), layout.channels);
                return Err(format!(
                    "{n} means or deviations for {channels} channels: --mean and --deviation take \
                     one number, or one for each"
                )
                .into());
            }
        }
        let is_some = |&deviation: &f32| deviation.is_finite() && deviation > 0.0;
        let is_number = preparation.mean.iter().all(|mean| mean.is_finite());
        if !is_number || !preparation.deviation.iter().all(is_some) {
            return Err("--mean takes finite numbers, --deviation those above 0".into());
        }
        if preparation.size == 0 {
            return Err("an image of no pixels: --size takes a number above 0".into());
        }
        let name = input.name.clone();
        let model = model.with_shape(&name, &layout.shape());
        let (params, trace) = (Params::seeded(0), Trace::inference().named("classify"));
        let inputs = model.declare(&trace)?;
        let outputs = model.trace(&trace, &params.root(), &inputs)?;
        let mut session = Session::new(Device::auto(), params)?;
        let program = session.compile_any(&trace, &outputs[..1])?;
        model.load_weights(&mut session)?;
        Ok(Classifier {
            session,
            program,
            layout,
            preparation,
        })
    }

    /// The memory plan.
    pub fn plan(&self) -> &Plan {
        self.program.plan()
    }

    /// Whether images have one channel.
    pub fn is_grey(&self) -> bool {
        self.layout.channels == 1
    }

    /// The `k` likeliest classes of an image `[channels, height, width]` with values from 0 to 1,
    /// with their probabilities, the likeliest first.
    pub fn top(&mut self, image: &Image, k: usize) -> Result<Vec<(usize, f32)>, Box<dyn Error>> {
        let prepared = self.prepared(image)?;
        let results = self.session.run_any(&self.program, prepared)?;
        let scores = results[0].array::<f32>()?;
        let mut classes: Vec<(usize, f32)> = probabilities(scores.iter().copied().collect())
            .into_iter()
            .enumerate()
            .collect();
        classes.sort_by(|a, b| b.1.total_cmp(&a.1));
        classes.truncate(k);
        Ok(classes)
    }

    /// An image as the model takes it: resized by its shorter side, its middle, normalized.
    fn prepared(&self, image: &Image) -> Result<Array4<f32>, String> {
        let Layout { height, width, .. } = self.layout;
        let (channels, h, w) = image.dim();
        if channels != self.layout.channels {
            let needed = self.layout.channels;
            return Err(format!("the image has {channels} channels, not {needed}"));
        }
        let (shorter, longer) = (h.min(w), h.max(w));
        if shorter == 0 || longer / shorter > RATIO_MAX {
            return Err(format!("the image has {h} × {w} pixels, too long a strip"));
        }
        let to = self
            .preparation
            .resize
            .unwrap_or((height.max(width) * 8).div_ceil(7));
        if to < height.max(width) {
            return Err(format!(
                "an image resized to {to} pixels is smaller than the {height} × {width} of the model"
            ));
        }
        let resized = augment::resize(image, [to * h / shorter, to * w / shorter]);
        let cropped = augment::center_crop(&resized, [height, width]);
        let each = |values: &[f32]| match *values {
            [one] => vec![one; channels],
            _ => values.to_vec(),
        };
        let Preparation {
            mean, deviation, ..
        } = &self.preparation;
        let batch =
            augment::normalize(cropped, &each(mean), &each(deviation)).insert_axis(Along(0));
        Ok(match self.layout.channels_last {
            true => batch
                .permuted_axes([0, 2, 3, 1])
                .as_standard_layout()
                .to_owned(),
            false => batch,
        })
    }
}

/// The probabilities of scores: the scores themselves if the model ends with a softmax, otherwise
/// their softmax.
fn probabilities(scores: Vec<f32>) -> Vec<f32> {
    let sum: f32 = scores.iter().sum();
    if scores.iter().all(|&score| score >= 0.0) && (sum - 1.0).abs() < 1e-3 {
        return scores;
    }
    let largest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let exponentials: Vec<f32> = scores.iter().map(|x| (x - largest).exp()).collect();
    let sum: f32 = exponentials.iter().sum();
    exponentials.iter().map(|x| x / sum).collect()
}
