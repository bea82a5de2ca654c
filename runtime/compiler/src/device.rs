//! Devices a session can run on.

use std::fmt;
use std::str::FromStr;

use slabwise_planner::brief;

use crate::backend;
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
        backend::survey()
    }

    /// Whether the device can be used; the error says why it cannot.
    pub fn check(self) -> Result<()> {
        match self {
            Device::Cpu => Ok(()),
            Device::Cuda(ordinal) => backend::usable(ordinal).map_err(|why| Error::Device {
                device: self.to_string(),
                why,
            }),
        }
    }
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
