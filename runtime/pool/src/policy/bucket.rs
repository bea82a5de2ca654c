//! Blocks that are kept whole: MXNet's `Naive` and `Round` pools.
//!
//! Each block is a separate arena. A freed block waits in the bucket of its size for a request that
//! rounds to the same, last in, first out; it is never split and serves no other size. The policies
//! differ in the rounding of requests.

use std::collections::BTreeMap;

use super::super::block::{Block, State, Table};
use super::super::config::{Policy, Settings};
use super::super::source::Stream;
use super::super::streams::Streams;
use super::chain::Return;

/// Above this many bytes, `naive` rounds up to multiples of it.
const LARGE: u64 = 2 << 20;

/// The rule for a bucket's size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rounding {
    /// To a page; above 2 MiB to a multiple of 2 MiB.
    Naive { page: u64 },
    /// To a power of two, at least a page; above the cutoff to a multiple of it.
    Round { page: u64, cutoff: u64 },
}

impl Rounding {
    pub fn of(settings: &Settings) -> Rounding {
        let page = settings.page_size;
        match settings.policy {
            Policy::Round => Rounding::Round {
                page,
                cutoff: 1 << settings.round_cutoff,
            },
            _ => Rounding::Naive { page },
        }
    }

    /// The size of the bucket that serves a request; `None` beyond 64 bits.
    pub fn rounded(self, bytes: u64) -> Option<u64> {
        let bytes = bytes.max(1);
        match self {
            Rounding::Naive { page } => {
                let rounded = bytes.checked_next_multiple_of(page)?;
                if rounded > LARGE {
                    bytes.checked_next_multiple_of(LARGE.max(page))
                } else {
                    Some(rounded)
                }
            }
            Rounding::Round { page, cutoff } if bytes <= cutoff => {
                Some(bytes.next_power_of_two().max(page))
            }
            Rounding::Round { cutoff, .. } => bytes.checked_next_multiple_of(cutoff),
        }
    }
}

/// Free blocks by size.
#[derive(Debug)]
pub(crate) struct Buckets {
    pub rounding: Rounding,
    free: BTreeMap<u64, Vec<u32>>,
}

impl Buckets {
    pub fn new(rounding: Rounding) -> Buckets {
        Buckets {
            rounding,
            free: BTreeMap::new(),
        }
    }

    /// The block of exactly this size that came back last, of those the stream may use.
    pub fn take(
        &mut self,
        table: &mut Table,
        streams: &Streams,
        bytes: u64,
        stream: Stream,
    ) -> Option<u32> {
        let bucket = self.free.get_mut(&bytes)?;
        let at = bucket
            .iter()
            .rposition(|&index| streams.may_use(stream, &table[index]))?;
        let index = bucket.remove(at);
        table[index].state = State::Live;
        Some(index)
    }

    pub fn give(&mut self, table: &mut Table, index: u32) {
        table[index].state = State::Free;
        self.free.entry(table[index].bytes).or_default().push(index);
    }

    /// Returns blocks that `may_go` permits to the driver.
    pub fn trim(&mut self, table: &mut Table, may_go: impl Fn(&Block) -> bool) -> Vec<Return> {
        let mut returns = Vec::new();
        self.free.retain(|_, bucket| {
            bucket.retain(|&index| {
                let Block {
                    arena,
                    bytes,
                    stream,
                    ..
                } = table[index];
                let goes = may_go(&table[index]);
                if goes {
                    table.remove(index);
                    returns.push(Return::Release {
                        arena,
                        bytes,
                        stream,
                    });
                }
                !goes
            });
            !bucket.is_empty()
        });
        returns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_rounded_as_mxnet_does() {
        let naive = Rounding::Naive { page: 4096 };
        let mib = 1 << 20;
        for (bytes, rounded) in [
            (0, 4096),
            (1, 4096),
            (4096, 4096),
            (4097, 8192),
            (2 * mib, 2 * mib),
            (2 * mib + 1, 4 * mib),
            (5 * mib, 6 * mib),
        ] {
            assert_eq!(naive.rounded(bytes), Some(rounded), "naive {bytes}");
        }
        let round = Rounding::Round {
            page: 4096,
            cutoff: 1 << 20,
        };
        for (bytes, rounded) in [
            (32, 4096),
            (4095, 4096),
            (4097, 8192),
            (mib - 1, mib),
            (mib, mib),
            (mib + 1, 2 * mib),
            (2_097_153, 3 * mib),
            (3_145_728, 3 * mib),
        ] {
            assert_eq!(round.rounded(bytes), Some(rounded), "round {bytes}");
        }
        assert_eq!(
            (naive.rounded(u64::MAX), round.rounded(u64::MAX)),
            (None, None)
        );
    }
}
