//! Devices a session can run on.

use std::fmt;
use std::str::FromStr;

#[cfg(feature = "cuda")]
use slabwise_planner::Bytes;
use slabwise_planner::brief;

use crate::error::{Error, Result};

/// Where programs run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Device {
    /// The CPU; always there.
    Cpu,
    /// The CUDA device of this number.
    Cuda(u32),
}

impl Device {
    /// The best device available: the first CUDA device, if there are a driver, a compiler and a
    /// device, else the CPU.
    pub fn auto() -> Self {
        let first = Device::Cuda(0);
        match first.check() {
            Ok(()) => first,
            Err(e) => {
                log::debug!("the CPU is used: {e}");
                Device::Cpu
            }
        }
    }

    /// The CUDA device of this number.
    ///
    /// # Errors
    /// If it cannot be used; the error says why.
    pub fn cuda(ordinal: u32) -> Result<Self> {
        let device = Device::Cuda(ordinal);
        device.check().map(|()| device)
    }

    /// The CUDA installation of this machine: libraries and where they were found, or how to
    /// install them; devices; where compiled kernels are kept. A name and a text each.
    pub fn survey() -> Vec<(String, String)> {
        survey()
    }

    /// Whether the device can be used; the error says why it cannot.
    pub fn check(self) -> Result<()> {
        match self {
            Device::Cpu => Ok(()),
            Device::Cuda(ordinal) => usable(ordinal).map_err(|why| Error::Device {
                device: self.to_string(),
                why,
            }),
        }
    }
}

/// Whether a CUDA device can be used, or why not.
#[cfg(feature = "cuda")]
fn usable(ordinal: u32) -> Result<(), String> {
    slabwise_cuda::usable(ordinal).map_err(|e| e.to_string())
}

#[cfg(feature = "cuda")]
fn survey() -> Vec<(String, String)> {
    use slabwise_cuda::{cache::Cache, cublaslt, cudnn, driver, libraries::Library, nvrtc};
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
                    p.name,
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

#[cfg(not(feature = "cuda"))]
fn survey() -> Vec<(String, String)> {
    vec![(
        "CUDA".into(),
        "not in this build; the feature \"cuda\" adds it".into(),
    )]
}

/// Whether a CUDA device can be used, or why not.
#[cfg(not(feature = "cuda"))]
fn usable(_ordinal: u32) -> Result<(), String> {
    Err("this build has no CUDA; build it with the feature \"cuda\", or use cpu or auto".into())
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Device::Cpu => f.write_str("cpu"),
            Device::Cuda(n) => write!(f, "cuda:{n}"),
        }
    }
}

impl FromStr for Device {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        match text {
            "cpu" => Ok(Device::Cpu),
            "auto" => Ok(Device::auto()),
            _ => text
                .strip_prefix("cuda:")
                .and_then(|n| n.parse().ok())
                .map(Device::Cuda)
                .ok_or_else(|| {
                    format!(
                        "unknown device {:?}; it is auto, cpu or cuda:N",
                        brief(text)
                    )
                }),
        }
    }
}
