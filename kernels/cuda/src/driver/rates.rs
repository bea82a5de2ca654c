//! The peak rates of a device, computed from its attributes.

use std::ffi::c_int;
use std::fmt;

use cudarc::driver::sys::{self, CUdevice_attribute as A};

use super::{DriverError, Result, check, device_count, properties};

/// The peak rates of a device per second: at its highest clock, with every unit busy.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Their highest clock, Hz.
    pub clock: f64,
    /// Floating-point operations in f32, where a fused multiply-add counts as two.
    pub f32: f64,
    /// Operations on tensor cores with operands of f32 rounded to tf32.
    pub tf32: f64,
    /// Operations on tensor cores with operands in f16 or bf16.
    pub half: f64,
    /// Bytes read from or written to memory.
    pub bytes: f64,
}

/// Fused multiply-adds of a multiprocessor per cycle: f32, tf32, and halves with sums in f32
/// (NVIDIA, the whitepapers of these architectures). Where devices of one capability differ, the
/// larger number.
fn per_cycle(sm: u32) -> [f64; 3] {
    match sm {
        80 => [64.0, 512.0, 1024.0],
        90..=99 => [128.0, 1024.0, 2048.0],
        100..=109 => [128.0, 2048.0, 4096.0],
        _ => [128.0, 256.0, 512.0],
    }
}

/// The rates of a device; `None` if the driver does not report its clocks.
///
/// # Errors
/// If there is no such device.
pub fn rates(ordinal: u32) -> Result<Option<Rates>> {
    let count = device_count()?;
    if ordinal >= count {
        return Err(DriverError::NoDevice { count });
    }
    let target = properties(ordinal)?.target;
    let mut device = 0;
    // SAFETY: the driver has been started, and the pointer is valid for writing.
    check("cuDeviceGet", unsafe {
        sys::cuDeviceGet(&mut device, ordinal as c_int)
    })?;
    let attribute = |which: A| -> Result<f64> {
        let mut value = 0;
        // SAFETY: as above; the device exists.
        check("cuDeviceGetAttribute", unsafe {
            sys::cuDeviceGetAttribute(&mut value, which, device)
        })?;
        Ok(f64::from(value.max(0)))
    };
    // Both in kHz; memory transfers twice per cycle.
    let clock = 1e3 * attribute(A::CU_DEVICE_ATTRIBUTE_CLOCK_RATE)?;
    let memory = 1e3 * attribute(A::CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE)?;
    let bytes = 2.0 * memory * attribute(A::CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH)? / 8.0;
    let [f32, tf32, half] =
        per_cycle(target.sm).map(|each| 2.0 * each * clock * f64::from(target.multiprocessors));
    Ok((clock > 0.0 && bytes > 0.0).then_some(Rates {
        multiprocessors: target.multiprocessors,
        clock,
        f32,
        tf32,
        half,
        bytes,
    }))
}

impl fmt::Display for Rates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "by the device's attributes: {} multiprocessors at {:.2} GHz, f32 {:.1}, tf32 {:.1}, halves {:.1} Tflop/s, memory {:.0} GB/s",
            self.multiprocessors,
            self.clock / 1e9,
            self.f32 / 1e12,
            self.tf32 / 1e12,
            self.half / 1e12,
            self.bytes / 1e9
        )
    }
}
