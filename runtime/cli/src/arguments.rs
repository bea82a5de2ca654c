//! Values of arguments as users write them.

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use slabwise::{CompileOptions, Error, Params, Precision};
use slabwise_models::{Model, Network};
use slabwise_planner::brief;

/// How exactly products are computed.
#[derive(clap::Args)]
pub struct Rounding {
    /// On a CUDA device let products and convolutions round f32 operands to tf32, which are up to
    /// 2^-11 off, and compute several times faster; the CPU does not
    #[arg(long)]
    pub tf32: bool,
    /// On the CPU compute no convolution by Winograd's filtering, whose results depend on elements
    /// beside those that they read (docs/numerics.md)
    #[arg(long)]
    pub exact_convolutions: bool,
    /// The type of matrix products, convolutions and the values between them, f32, bf16 or f16
    /// (training then scales the loss); weights, their gradients and losses stay in f32
    #[arg(long, value_name = "TYPE", default_value_t)]
    pub dtype: Precision,
    /// The type that weights are stored in, f32, bf16 or f16
    #[arg(long, value_name = "TYPE", default_value_t)]
    pub weights: Precision,
}

impl Rounding {
    /// A model whose programs round so.
    pub fn build(&self, model: Model, params: &Params) -> Network {
        let params = params.clone().stored_in(self.weights.dtype());
        model.build(&params).with_precision(self.dtype)
    }

    /// The options of a session that rounds so.
    pub fn options(&self) -> CompileOptions {
        CompileOptions {
            tf32: self.tf32,
            exact_convolutions: self.exact_convolutions,
            ..CompileOptions::default()
        }
    }
}

/// A length of time as users write it.
pub fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text
        .parse()
        .map_err(|_| format!("`{}` is not a number of seconds", brief(text)))?;
    Duration::try_from_secs_f64(seconds).map_err(|error| error.to_string())
}

/// A difference that a comparison permits, as users write it.
pub fn tolerance(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|n: &f64| *n >= 0.0);
    number.ok_or_else(|| format!("`{}` is not a number from 0 on", brief(text)))
}

/// A built-in model, or a file of one.
#[derive(Clone, Debug)]
pub enum ModelOrFile {
    BuiltIn(Model),
    /// An ONNX file.
    File(PathBuf),
}

impl FromStr for ModelOrFile {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let path = PathBuf::from(text);
        let ending = path.extension();
        if ending.is_some_and(|ending| ending.eq_ignore_ascii_case("onnx")) {
            return Ok(ModelOrFile::File(path));
        }
        let built_in = text.parse().map(ModelOrFile::BuiltIn);
        built_in.map_err(|error| match path.is_file() {
            true => Error::Value(format!(
                "{} is a file whose name does not end in .onnx, as those of models do",
                path.display()
            )),
            false => error,
        })
    }
}

/// The length of a named dimension, as users write it.
#[derive(Clone, Debug)]
pub struct NamedLength {
    pub name: String,
    pub length: u32,
    /// Whether the length is the largest of many.
    pub bounded: bool,
}

impl FromStr for NamedLength {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!(
                "`{}` is not of the form batch=64 or batch=..64",
                brief(text)
            )
        };
        let (name, length) = text.rsplit_once('=').ok_or_else(wrong)?;
        let (length, bounded) = match length.strip_prefix("..") {
            Some(most) => (most, true),
            None => (length, false),
        };
        let length = length.parse().map_err(|_| wrong())?;
        if bounded && length == 0 {
            return Err(format!(
                "`{}`: the largest length is 0; it must be 1 or more",
                brief(text)
            ));
        }
        match name.is_empty() {
            true => Err(wrong()),
            false => Ok(NamedLength {
                name: name.into(),
                length,
                bounded,
            }),
        }
    }
}

/// The options of an ONNX file.
#[derive(clap::Args)]
pub struct FileOptions {
    /// Of an ONNX file: the length of a named dimension, such as batch=64, or its largest, such as
    /// batch=..64, for a plan that fits every length up to it; repeat it for others
    #[arg(long = "dim", value_name = "NAME=[..]LENGTH")]
    pub dims: Vec<NamedLength>,
    /// Of an ONNX file: compute double in float; without it such a model is refused
    #[arg(long)]
    pub narrow: bool,
}
