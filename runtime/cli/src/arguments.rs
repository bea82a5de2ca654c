//! Values of arguments as users write them.

use std::time::Duration;

use slabwise::{CompileOptions, Params, Precision};
use slabwise_models::{Model, Network};
use slabwise_planner::brief;

/// How exactly products are computed.
#[derive(clap::Args)]
pub struct Rounding {
    /// On a CUDA device let products and convolutions round f32 operands to tf32, which are up to
    /// 2^-11 off, and compute several times faster; the CPU does not
    #[arg(long)]
    pub tf32: bool,
    /// The operand type of matrix products and convolutions, f32 or bf16; weights, gradients, norms
    /// and losses stay in f32
    #[arg(long, value_name = "TYPE", default_value_t)]
    pub dtype: Precision,
}

impl Rounding {
    /// A model whose programs round so.
    pub fn build(&self, model: Model, params: &Params) -> Network {
        model.build(params).with_precision(self.dtype)
    }

    /// The options of a session that rounds so.
    pub fn options(&self) -> CompileOptions {
        CompileOptions {
            tf32: self.tf32,
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
