//! placeholder
mod bytes;
pub use bytes::Bytes;
