//! Products and convolutions whose operands stay on the device, with the times of all candidates.

use std::sync::Mutex;

use half::bf16;
use ndarray::{ArrayD, IxDyn};
use serde_json::{Map, Value, json};
use slabwise::feed::{Input, ToBytes};
use slabwise::nn::Linear;
use slabwise::prelude::*;
use slabwise::{Buffer, CompileOptions, Quantization, Tuning};
use slabwise_kernels::memory::Element;
use slabwise_models::noise;

use super::{dtype, number};

/// The tuner's log messages about candidates.
static MESSAGES: Mutex<Vec<String>> = Mutex::new(Vec::new());

struct Listener;

impl log::Log for Listener {
    fn enabled(&self, about: &log::Metadata<'_>) -> bool {
        about.target().starts_with("slabwise_cuda::tune")
    }

    fn log(&self, record: &log::Record<'_>) {
        if self.enabled(record.metadata()) {
            MESSAGES
                .lock()
                .expect("no holder of the lock panics")
                .push(record.args().to_string());
        }
    }

    fn flush(&self) {}
}

/// A session without weights that times all candidates anew and logs the results.
fn session(precision: &str) -> Result<Session> {
    session_of(Params::seeded(0), precision)
}

/// The same with these weights.
fn session_of(params: Params, precision: &str) -> Result<Session> {
    if log::set_logger(&Listener).is_ok() {
        log::set_max_level(log::LevelFilter::Info);
    }
    let options = CompileOptions {
        tuning: Tuning::All,
        tf32: precision == "tf32",
        ..CompileOptions::default()
    };
    Ok(Session::new(Device::cuda(0)?, params)?.with_options(options))
}

fn candidates() -> Vec<String> {
    std::mem::take(&mut *MESSAGES.lock().expect("no holder of the lock panics"))
}

/// A tensor stored in the type of its operands, as peers do, because products of halves are f32
/// here.
fn stored(tensor: Tensor<'_>, dtype: DType) -> Tensor<'_> {
    if dtype == BF16 {
        tensor.cast(BF16)
    } else {
        tensor
    }
}

/// Random numbers of a type on the device.
fn filled(session: &mut Session, name: &str, dtype: DType, dims: &[usize]) -> Result<Buffer> {
    let mut draw = noise(dims.len() as u64);
    let mut upload = Upload {
        session,
        name,
        dims,
    };
    match dtype {
        BF16 => upload.of(|| bf16::from_f32(draw() - 0.5)),
        _ => upload.of(|| draw() - 0.5),
    }
}

struct Upload<'a> {
    session: &'a mut Session,
    name: &'a str,
    dims: &'a [usize],
}

impl Upload<'_> {
    fn of<T: Element + ToBytes>(&mut self, make: impl FnMut() -> T) -> Result<Buffer> {
        self.session.upload(
            self.name,
            &ArrayD::from_shape_simple_fn(IxDyn(self.dims), make),
        )
    }
}

/// C = A·B of square matrices.
pub fn square(n: &str, precision: &str) -> Result<Value> {
    let (n, dtype) = (number(n)?, dtype(precision)?);
    let mut session = session(precision)?;
    let trace = Trace::inference().named("product");
    let [a, b] = ["a", "b"].map(|name| trace.input(name, dtype, (n, n)));
    let program = session.compile(&trace, [stored(a.matmul(b), dtype)])?;
    let dims = [n as usize; 2];
    let (a, b) = (
        filled(&mut session, "a", dtype, &dims)?,
        filled(&mut session, "b", dtype, &dims)?,
    );
    let times = super::runs(&mut session, &program, &(&a, &b))?;
    let mut fields = times.fields();
    fields.extend(super::about(&session, &program));
    fields.insert(
        "tflops".into(),
        json!(2.0 * f64::from(n).powi(3) / times.median() / 1e9),
    );
    fields.insert("candidates".into(), json!(candidates()));
    Ok(Value::Object(fields))
}

/// A row times the transposed matrix of a layer's weight, whose numbers are stored in f32 or bf16, or
/// quantized in blocks of 32, as in the layers of a language model that generates a token.
pub fn row(n: &str, stored: &str) -> Result<Value> {
    let n = number(n)?;
    let params = Params::seeded(0);
    let root = match stored {
        "f32" => params.root(),
        "bf16" => params.root().stored_in(BF16),
        _ => {
            let bits = number(stored.trim_end_matches("bits"))?;
            params.root().quantized(Quantization { bits, block: 32 })
        }
    };
    let layer = Linear::without_bias(root / "layer", n as usize, n as usize);
    let trace = Trace::inference().named("row");
    let y = trace.input("x", F32, (1, n)).apply(&layer);
    let mut session = session_of(params, "f32")?;
    let program = session.compile(&trace, [y])?;
    let x = filled(&mut session, "x", F32, &[1, n as usize])?;
    let weights = session.persistent_bytes();
    let times = super::runs(&mut session, &program, &(&x,))?;
    let mut fields = times.fields();
    fields.extend(super::about(&session, &program));
    fields.insert(
        "gb_per_s".into(),
        json!(weights as f64 / times.median() / 1e6),
    );
    fields.insert("candidates".into(), json!(candidates()));
    Ok(Value::Object(fields))
}

/// The forward pass of a convolution, the gradient of its image and that of its weight.
pub fn convolution(sizes: &str, precision: &str) -> Result<Value> {
    let read: Vec<u32> = sizes.split(',').map(number).collect::<Result<_>>()?;
    let [batch, inputs, outputs, image, k, stride] = read[..] else {
        return Err(slabwise::Error::Value(format!(
            "{sizes:?} is not BATCH,INPUTS,OUTPUTS,IMAGE,WINDOW,STRIDE"
        )));
    };
    let dtype = dtype(precision)?;
    let [step, pad] = [stride, k / 2].map(|n| n as usize);
    let geometry = ConvGeometry {
        stride: [step; 2],
        pad: [pad; 2],
        ..ConvGeometry::default()
    };
    let result = (image + 2 * (k / 2) - k) / stride + 1;
    let dims = [
        [batch, inputs, image, image],
        [outputs, inputs, k, k],
        [batch, outputs, result, result],
    ];
    let flop = [batch, outputs, result, result, inputs, k, k]
        .iter()
        .map(|&n| f64::from(n))
        .product::<f64>()
        * 2.0;
    let mut parts = Map::new();
    let mut total = 0.0;
    let mut bytes = 0;
    for (at, part) in ["forward", "data", "weight"].into_iter().enumerate() {
        let mut session = session(precision)?;
        let trace = Trace::inference().named(part);
        // The forward pass does not read the gradient of the result.
        let names = &["x", "w", "dy"][..if at == 0 { 2 } else { 3 }];
        let given: Vec<Tensor<'_>> = names
            .iter()
            .zip(dims)
            .map(|(name, dims)| trace.input(name, dtype, &dims.map(Dim::from)[..]))
            .collect();
        let result = stored(given[0].conv2d_with(given[1], geometry), dtype);
        let output = match given.get(2) {
            None => result,
            Some(&dy) => stored(
                trace.gradients((result * dy).sum(), [given[at - 1]])[0],
                dtype,
            ),
        };
        let program = session.compile(&trace, [output])?;
        let held: Vec<Buffer> = names
            .iter()
            .zip(dims)
            .map(|(name, dims)| filled(&mut session, name, dtype, &dims.map(|n| n as usize)))
            .collect::<Result<_>>()?;
        let feed: Vec<&dyn Input> = held.iter().map(|buffer| buffer as &dyn Input).collect();
        let times = super::runs(&mut session, &program, &feed[..])?;
        total += times.median();
        bytes = bytes.max(session.device_bytes());
        let mut fields = times.fields();
        fields.extend(super::about(&session, &program));
        fields.insert("tflops".into(), json!(flop / times.median() / 1e9));
        fields.insert("candidates".into(), json!(candidates()));
        parts.insert(part.into(), Value::Object(fields));
    }
    Ok(json!({ "ms": total, "bytes": bytes, "parts": parts }))
}
