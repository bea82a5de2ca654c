//! Bandwidths and the rate of launches.

use ndarray::{Array1, Array2};
use serde_json::{Value, json};
use slabwise::prelude::*;

/// Half a GiB of f32, or a MiB.
fn elements() -> usize {
    if super::is_quick() { 1 << 18 } else { 1 << 27 }
}

/// Gigabytes per second of a copy in one of three directions. On the device, values are read and
/// written.
pub fn copy(which: &str) -> Result<Value> {
    let count = elements();
    let bytes = 4.0 * count as f64;
    let mut session = Session::new(Device::cuda(0)?, Params::seeded(0))?;
    let zeros = Array1::<f32>::zeros(count);
    let (times, moved, given) = match which {
        "device" => {
            let trace = Trace::inference().named("copy");
            let x = trace.input("x", F32, (count as u32,));
            let program = session.compile(&trace, [x + 1.0])?;
            let x = session.upload("x", &zeros)?;
            (
                super::runs(&mut session, &program, &(&x,))?,
                2.0 * bytes,
                session.device_bytes(),
            )
        }
        "to-device" => {
            let times = super::timed(1, |_| {
                let held = session.upload("x", &zeros)?;
                session.synchronize()?;
                session.free(held)
            })?;
            (times, bytes, session.device_bytes())
        }
        "to-host" => {
            let held = session.upload("x", &zeros)?;
            let times = super::timed(1, |_| session.download::<f32>(&held).map(drop))?;
            (times, bytes, session.device_bytes())
        }
        _ => {
            return Err(slabwise::Error::Value(format!(
                "{which:?} is no copy; there are device, to-device and to-host"
            )));
        }
    };
    let mut fields = times.fields();
    fields.insert("gb_per_s".into(), json!(moved / times.median() / 1e6));
    fields.insert("bytes".into(), json!(given));
    Ok(Value::Object(fields))
}

/// The time of a launch when kernels are so small that they take no time: a chain of products that
/// do not fuse.
pub fn launches() -> Result<Value> {
    const CHAIN: usize = 200;
    const N: u32 = 16;
    let mut session = Session::new(Device::cuda(0)?, Params::seeded(0))?;
    let trace = Trace::inference().named("launches");
    let [x, w] = ["x", "w"].map(|name| trace.input(name, F32, (N, N)));
    let program = session.compile(&trace, [(0..CHAIN).fold(x, |x, _| x.matmul(w))])?;
    let eye = Array2::<f32>::eye(N as usize);
    let (x, w) = (session.upload("x", &eye)?, session.upload("w", &eye)?);
    let times = super::runs(&mut session, &program, &(&x, &w))?;
    let mut fields = times.fields();
    fields.extend(super::about(&session, &program));
    fields.insert(
        "us_per_launch".into(),
        json!(times.median() * 1e3 / program.plan().kernels().max(1) as f64),
    );
    Ok(Value::Object(fields))
}
