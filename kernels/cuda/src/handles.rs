//! The handles of libraries that compute on a device, opened at their first use.

use std::sync::{Mutex, OnceLock, PoisonError};

use crate::cublaslt;
use crate::cudnn;
use crate::driver::Stream;
use crate::libraries::{Library, LibraryError};

/// The libraries opened for a device.
#[derive(Debug, Default)]
pub(crate) struct Handles {
    /// cuBLASLt, once products were timed or a program was loaded that contains one of its
    /// products.
    cublaslt: Once<cublaslt::Handle>,
    /// cuDNN, likewise.
    cudnn: Once<cudnn::Handle>,
}

/// A handle that is made once. A failure may be temporary, so that it is tried again.
#[derive(Debug)]
struct Once<H> {
    made: OnceLock<H>,
    /// Held while it is made.
    making: Mutex<()>,
}

impl<H> Default for Once<H> {
    fn default() -> Self {
        Once {
            made: OnceLock::new(),
            making: Mutex::default(),
        }
    }
}

impl<H> Once<H> {
    fn get_or_make(
        &self,
        make: impl FnOnce() -> Result<H, LibraryError>,
    ) -> Result<&H, LibraryError> {
        if let Some(made) = self.made.get() {
            return Ok(made);
        }
        let _alone = self.making.lock().unwrap_or_else(PoisonError::into_inner);
        match self.made.get() {
            Some(made) => Ok(made),
            None => make().map(|made| self.made.get_or_init(|| made)),
        }
    }
}

impl Handles {
    /// cuBLASLt for the device, if it is usable.
    pub fn cublaslt(&self) -> Result<&cublaslt::Handle, LibraryError> {
        self.cublaslt.get_or_make(cublaslt::Handle::new)
    }

    /// Whether a library is usable.
    pub fn has(&self, library: Library) -> bool {
        match library {
            Library::CublasLt => self.cublaslt().is_ok(),
            Library::Cudnn => self.cudnn().is_ok(),
            Library::Driver | Library::Nvrtc => true,
        }
    }

    /// Makes the libraries use this stream no more, before it is destroyed.
    pub fn leave(&self, stream: &Stream) {
        if let Some(cudnn) = self.cudnn.made.get() {
            cudnn.leave(stream);
        }
    }

    /// cuDNN for the device, if it is usable.
    pub fn cudnn(&self) -> Result<&cudnn::Handle, LibraryError> {
        self.cudnn.get_or_make(cudnn::Handle::new)
    }
}
