//! Offload of idle values from the slab.

use std::str::FromStr;

use slabwise_planner::{Bytes, brief};

use crate::error::Error;

/// The settings of offload: a link to the host's memory for values that lie idle, and the host
/// bytes that they may take.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Offload {
    per_second: Bytes,
    host: Option<Bytes>,
}

impl Offload {
    /// Over a link of this many bytes per second in each direction, to as much of the host's memory
    /// as needed. The speed of the link decides which values are sent rather than recomputed;
    /// results do not depend on it.
    pub fn new(per_second: Bytes) -> Self {
        Offload {
            per_second,
            host: None,
        }
    }

    /// At most this many bytes of the host's memory.
    #[must_use]
    pub fn with_host_bytes(self, bytes: Bytes) -> Self {
        Offload {
            host: Some(bytes),
            ..self
        }
    }

    /// Bytes per second in each direction.
    pub fn per_second(&self) -> Bytes {
        self.per_second
    }

    /// The most bytes of the host's memory, if there is a limit.
    pub fn host_bytes(&self) -> Option<Bytes> {
        self.host
    }
}

/// Bytes per second: `16GB/s` or `16GB`.
impl FromStr for Offload {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let wrong = || {
            Error::Value(format!(
                "`{}` is not a link speed: bytes per second above 0, such as 16GB/s",
                brief(text)
            ))
        };
        let text = text.trim();
        let per_second: Bytes = text
            .strip_suffix("/s")
            .unwrap_or(text)
            .parse()
            .map_err(|_| wrong())?;
        if per_second.0 == 0 {
            Err(wrong())
        } else {
            Ok(Offload::new(per_second))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_as_users_write_them() {
        let read = |text: &str| text.parse::<Offload>().ok();
        assert_eq!(read("16GB/s"), Some(Offload::new(Bytes(16_000_000_000))));
        assert_eq!(read(" 1.5GiB "), Some(Offload::new(Bytes(3 << 29))));
        assert!(
            ["0", "0GB/s", "", "/s", "-1GB/s", "fast", "16GB/h"]
                .iter()
                .all(|text| read(text).is_none())
        );
    }
}
