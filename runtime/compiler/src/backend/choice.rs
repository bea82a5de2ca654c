//! The choice and the check of devices.

use crate::device::Device;
use crate::error::{Error, Result};

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
        super::survey()
    }

    /// Whether the device can be used; the error says why it cannot.
    pub fn check(self) -> Result<()> {
        match self {
            Device::Cpu => Ok(()),
            Device::Cuda(ordinal) => super::usable(ordinal).map_err(|why| Error::Device {
                device: self.to_string(),
                why,
            }),
        }
    }
}
