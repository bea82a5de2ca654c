//! Tells the likeliest classes of images by a classifier in an ONNX file.
//!
//! `cargo run --release --example onnx_classify -- MODEL.onnx PHOTO.jpg --labels LABELS.txt`
//!
//! Called without arguments, it prints how to get a model. The defaults prepare images as
//! torchvision does for its classifiers of ImageNet. A classifier of digits comes with the tests:
//!
//! `cargo run --release --example onnx_classify -- tests/onnx/data/digits.onnx
//! tests/onnx/data/seven.png --resize 28 --mean 0.1307 --deviation 0.3081`
#![forbid(unsafe_code)]

#[path = "onnx_classify/classifier.rs"]
mod classifier;

use std::error::Error;
use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use classifier::{Classifier, Preparation};
use slabwise::data::read_image;

const NO_MODEL: &str = "\
a classifier in an ONNX file and images (PNG or JPEG) are needed, for example:

  pip install torch torchvision onnxscript
  python - <<'END'
  import torch, torchvision.models as models
  weights = models.SqueezeNet1_1_Weights.DEFAULT
  model = models.squeezenet1_1(weights=weights).eval()
  image = torch.zeros(1, 3, 224, 224)
  torch.onnx.export(model, (image,), 'squeezenet.onnx', external_data=False)
  open('labels.txt', 'w').write('\\n'.join(weights.meta['categories']))
  END
  cargo run --release --example onnx_classify -- squeezenet.onnx photo.jpg --labels labels.txt

Classifiers of the ONNX model zoo and of timm (timm.create_model, torch.onnx.export) are used in the
same way.";

#[derive(Parser)]
struct Args {
    /// An ONNX file whose first input is an image, or a batch of any length
    model: Option<PathBuf>,
    /// PNG or JPEG files
    images: Vec<PathBuf>,
    /// The names of the classes, one in a line
    #[arg(long, value_name = "FILE")]
    labels: Option<PathBuf>,
    /// The number of classes that are shown
    #[arg(long, default_value_t = 5)]
    top: usize,
    /// The length of the shorter side to which images are resized before they are cropped; 8/7 of
    /// the model's unless given
    #[arg(long)]
    resize: Option<usize>,
    /// Height and width of the image, if the model leaves them open
    #[arg(long, default_value_t = 224)]
    size: usize,
    /// The means of the channels, which are subtracted
    #[arg(long, value_delimiter = ',', num_args = 1.., default_value = "0.485,0.456,0.406")]
    mean: Vec<f32>,
    /// The standard deviations of the channels, by which they are divided
    #[arg(long, value_delimiter = ',', num_args = 1.., default_value = "0.229,0.224,0.225")]
    deviation: Vec<f32>,
}

fn run(args: &Args) -> Result<(), Box<dyn Error>> {
    let Some(model) = args.model.as_ref().filter(|_| !args.images.is_empty()) else {
        return Err(NO_MODEL.into());
    };
    let labels: Vec<String> = match &args.labels {
        Some(path) => {
            let text = fs::read_to_string(path);
            let text = text.map_err(|error| format!("{}: {error}", path.display()))?;
            text.lines().map(String::from).collect()
        }
        None => Vec::new(),
    };
    let preparation = Preparation {
        size: args.size,
        resize: args.resize,
        mean: args.mean.clone(),
        deviation: args.deviation.clone(),
    };
    let mut classifier = Classifier::open(model, preparation)?;
    println!("{}", classifier.plan());
    for path in &args.images {
        let image = read_image(path, classifier.is_grey())?;
        println!("{}", path.display());
        for (class, probability) in classifier.top(&image, args.top)? {
            let label = labels.get(class).map_or("", String::as_str);
            println!("{:6.2} %  {class:4}  {label}", 100.0 * probability);
        }
    }
    Ok(())
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(2)
        }
    }
}
