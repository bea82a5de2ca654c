//! Observation of a device: timestamps of its work, and the code that it runs.

use std::sync::Arc;

use crate::abi::Function;
use crate::cache::Cache;
use crate::compiler::Compiler;
use crate::device::Device;
use crate::driver::DriverError;
use crate::nvrtc::{self, Cubin, Program};
use crate::source::PRELUDE;

impl Device {
    /// Starts recording timestamps, and discards earlier ones.
    pub fn begin_marks(&mut self) {
        self.marks.begin();
    }

    /// Records a timestamp once all work submitted until now is done. Waits for nothing.
    ///
    /// # Errors
    /// If the driver refuses, or the device is lost.
    pub fn mark(&mut self) -> Result<(), DriverError> {
        self.ready()?;
        let marked = self.marks.mark(&self.stream);
        self.noting(marked)
    }

    /// Seconds from the first timestamp to each, by the device's clock. Waits for the last.
    ///
    /// # Errors
    /// See [`Device::mark`].
    pub fn marks(&self) -> Result<Vec<f64>, DriverError> {
        self.ready()?;
        self.noting(self.marks.seconds())
    }

    /// A function's code for this device, compiled separately.
    ///
    /// # Errors
    /// If there is no compiler, or it refuses the source.
    pub fn code_of(&self, function: &Function) -> Result<Arc<Cubin>, nvrtc::Error> {
        let program = Program::new(PRELUDE, [function], self.properties().target.sm);
        // One cubin per program.
        Ok(Compiler::of_process()
            .compile(Cache::of_user().ok().as_ref(), &[program])?
            .swap_remove(0))
    }
}
