//! The handles of libraries that compute on a device, opened at their first use.

use std::sync::OnceLock;

use crate::cublaslt;
use crate::cudnn;
use crate::driver::Stream;
use crate::libraries::LibraryError;

/// The libraries opened for a device.
#[derive(Debug, Default)]
pub(crate) struct Handles {
    /// cuBLASLt, once products were timed or a program was loaded that contains one of its
    /// products.
    cublaslt: OnceLock<Result<cublaslt::Handle, LibraryError>>,
    /// cuDNN, likewise.
    cudnn: OnceLock<Result<cudnn::Handle, LibraryError>>,
}

impl Handles {
    /// cuBLASLt for the device, if it is usable.
    pub fn cublaslt(&self) -> Result<&cublaslt::Handle, LibraryError> {
        self.cublaslt
            .get_or_init(cublaslt::Handle::new)
            .as_ref()
            .map_err(Clone::clone)
    }

    /// Makes the libraries use this stream no more, before it is destroyed.
    pub fn leave(&self, stream: &Stream) {
        if let Some(Ok(cudnn)) = self.cudnn.get() {
            cudnn.leave(stream);
        }
    }

    /// cuDNN for the device, if it is usable.
    pub fn cudnn(&self) -> Result<&cudnn::Handle, LibraryError> {
        self.cudnn
            .get_or_init(cudnn::Handle::new)
            .as_ref()
            .map_err(Clone::clone)
    }
}
