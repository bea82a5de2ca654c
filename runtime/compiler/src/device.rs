//! Devices a session can run on.

use std::fmt;
use std::str::FromStr;

use slabwise_planner::brief;

/// Where programs run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Device {
    /// The CPU; always there.
    Cpu,
    /// The CUDA device of this number.
    Cuda(u32),
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

    fn from_str(text: &str) -> Result<Self, String> {
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
