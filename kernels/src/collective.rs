//! The movement of bytes between ranks, as kernels see it.
//!
//! A transport moves bytes and computes nothing. Sums over ranks are kernels like any other, so that
//! the order of their additions is the program's and not the transport's.

use crate::memory::Foreign;

/// A group of ranks that exchange bytes, as one of them sees it.
///
/// Every rank calls the same methods in the same order with as many bytes. A call returns when the
/// received bytes are complete and the sent ones may be overwritten.
pub trait Transport: Send + Sync {
    /// The number of ranks.
    fn ranks(&self) -> usize;

    /// This rank, from 0.
    fn rank(&self) -> usize;

    /// Memory of zeros that other ranks read in place when this one sends from it; `None` if it
    /// would be no faster than other memory, or there is none. The system must have the bytes.
    fn arena(&self, bytes: u64) -> Option<Foreign> {
        let _ = bytes;
        None
    }

    /// Sends part r of `send` to rank r; part r of `receive` is from rank r. All parts have one
    /// length.
    ///
    /// # Errors
    /// If a rank is lost, or has failed.
    fn all_to_all(&self, send: &[u8], receive: &mut [u8]) -> Result<(), TransportError>;

    /// Sends `send` to every rank; part r of `receive` is from rank r.
    ///
    /// # Errors
    /// If a rank is lost, or has failed.
    fn all_gather(&self, send: &[u8], receive: &mut [u8]) -> Result<(), TransportError>;
}

/// The reason why bytes did not arrive, in words.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct TransportError(pub String);
