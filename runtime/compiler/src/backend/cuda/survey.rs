//! The parts of CUDA on this machine: libraries, devices, and the cache of compiled kernels.

use slabwise_cuda::{cache::Cache, cublaslt, cudnn, driver, libraries::Library, nvrtc};
use slabwise_planner::Bytes;

use crate::device::Device;

/// Fails if a CUDA device cannot be used; the error says why.
pub(crate) fn usable(ordinal: u32) -> Result<(), String> {
    slabwise_cuda::usable(ordinal).map_err(|e| e.to_string())
}

/// A name and a text for each part.
pub(crate) fn survey() -> Vec<(String, String)> {
    let mut rows = Vec::new();
    for library in Library::ALL {
        let found = library.open().map_or_else(
            |missing| format!("not found{}; {}", missing.why, library.advice()),
            ToString::to_string,
        );
        let version = match library {
            Library::Driver => {
                driver::start().map(|(major, minor)| format!("CUDA {major}.{minor}, "))
            }
            Library::Nvrtc => Ok(nvrtc::version()
                .map(|(major, minor)| format!("{major}.{minor}, "))
                .unwrap_or_default()),
            Library::CublasLt => Ok(cublaslt::version()
                .map(|version| format!("{version}, "))
                .unwrap_or_default()),
            Library::Cudnn => Ok(cudnn::version()
                .map(|version| format!("{version}, "))
                .unwrap_or_default()),
        };
        rows.push((
            library.name().to_string(),
            version.unwrap_or_default() + &found,
        ));
    }
    for ordinal in 0..driver::device_count().unwrap_or(0) {
        let about = driver::properties(ordinal).map_or_else(
            |e| e.to_string(),
            |p| {
                format!(
                    "{}, sm_{}, {} multiprocessors, {}",
                    p.description.name,
                    p.target.sm,
                    p.target.multiprocessors,
                    Bytes(p.total_bytes)
                )
            },
        );
        rows.push((Device::Cuda(ordinal).to_string(), about));
    }
    let kept = Cache::of_user().map_or_else(
        |e| e.to_string(),
        |cache| cache.folder().display().to_string(),
    );
    rows.push(("compiled kernels".into(), kept));
    rows
}
