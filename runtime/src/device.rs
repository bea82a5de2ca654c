//! Devices a session can run on.

use std::fmt;
use std::str::FromStr;

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
    /// The best device there is.
    pub fn auto() -> Self {
        Device::Cpu
    }

    /// Whether the device can be used; the error says why it cannot.
    pub fn check(self) -> Result<()> {
        match self {
            Device::Cpu => Ok(()),
            Device::Cuda(_) => {
                Err(Error::Device { device: self.to_string(), why: "this version runs on the CPU only; use cpu or auto".into() })
            }
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
                .ok_or_else(|| format!("unknown device {text:?}; it is auto, cpu or cuda:N")),
        }
    }
}
