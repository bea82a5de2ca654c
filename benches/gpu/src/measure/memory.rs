//! Bandwidths and the rate of launches.

use ndarray::{Array1, Array2};
use serde_json::{Value, json};
use slabwise::prelude::*;
use slabwise_cuda::Limits;
use slabwise_cuda::driver::DriverError;

/// Half a GiB of f32, or a MiB.
fn elements() -> usize {
    if super::is_quick() { 1 << 18 } else { 1 << 27 }
}

/// Gigabytes per second of a copy in one of three directions. On the device, values are read and
/// written.
pub fn copy(which: &str) -> Result<Value> {
    let count = elements();
    let bytes = 4.0 * count as f64;
    let (times, moved, given) = match which {
        "device" => {
            let mut session = Session::new(Device::cuda(0)?, Params::seeded(0))?;
            let trace = Trace::inference().named("copy");
            let x = trace.input("x", F32, (count as u32,));
            let program = session.compile(&trace, [x + 1.0])?;
            let x = session.upload("x", &Array1::<f32>::zeros(count))?;
            (
                super::runs(&mut session, &program, &(&x,))?,
                2.0 * bytes,
                session.device_bytes(),
            )
        }
        "to-device" | "to-host" => {
            let (times, given) = link(which == "to-host", 4 * count as u64)?;
            (times, bytes, given)
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

/// Times of copies between memory of the device and pinned memory of the host, both allocated once,
/// and the bytes allocated on the device.
fn link(to_host: bool, bytes: u64) -> Result<(super::Times, u64)> {
    let text = |e: DriverError| slabwise::Error::Value(e.to_string());
    let limits = Limits {
        fraction: 0.9,
        bytes_max: None,
        preallocate: false,
    };
    let mut device = slabwise_cuda::Device::open(0, limits).map_err(text)?;
    let on_device = device.reserve(bytes).map_err(text)?;
    let on_host = device.reserve_host(bytes).map_err(text)?;
    device.prepare_copies(1).map_err(text)?;
    let (from, to) = if to_host {
        (on_device, on_host)
    } else {
        (on_host, on_device)
    };
    let times = super::timed(1, |_| {
        device
            .start_copy(0, &from, &to)
            .and_then(|()| device.finish_copy(0))
            .and_then(|()| device.synchronize())
            .map_err(text)
    })?;
    let given = device.usage().reserved;
    device.release(on_device.arena);
    device.release(on_host.arena);
    Ok((times, given))
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
