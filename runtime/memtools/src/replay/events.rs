//! Allocation logs as a trace: allocations and frees are matched by their addresses.

use std::collections::HashMap;

use super::{Op, Trace};
use slabwise_pool::Stream;

/// A line of a log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Logged {
    Alloc {
        address: u64,
        bytes: u64,
        stream: u64,
    },
    Free {
        address: u64,
        bytes: u64,
    },
}

/// The state of memory before the log began.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Before {
    /// Empty: a free without an allocation is an error.
    Nothing,
    /// In use: memory freed without an allocation was allocated before.
    Something,
}

/// The trace of a log, and of the other blocks live from before it until after it, with the streams
/// in the order in which they appear. An error is the place in the log (its end, if there is no
/// better one), and the defect there.
pub(super) fn trace(
    log: &[Logged],
    before: Before,
    also: &[u64],
) -> Result<Trace, (usize, String)> {
    let end = log.len();
    let mut streams: HashMap<u64, Stream> = HashMap::new();
    let mut live: HashMap<u64, (u32, u64)> = HashMap::new();
    let mut first: Vec<u64> = also.to_vec();
    let number = |count: usize| {
        u32::try_from(count).map_err(|_| (end, "more than 4294967295 allocations".to_string()))
    };
    // Allocations of the log are numbered after those from before it, whose number is known only at
    // its end.
    let mut ops = Vec::with_capacity(log.len());
    let mut place = Vec::with_capacity(log.len());
    let mut allocations = 0usize;
    for (at, line) in log.iter().enumerate() {
        match *line {
            Logged::Alloc {
                address,
                bytes,
                stream,
            } => {
                let next = u16::try_from(streams.len())
                    .map_err(|_| (at, "more than 65535 streams".to_string()))?;
                let stream = *streams.entry(stream).or_insert(Stream(next));
                if live
                    .insert(address, (number(allocations)?, bytes))
                    .is_some()
                {
                    return Err((
                        at,
                        format!("{address:#x} is allocated, but was not freed since it last was"),
                    ));
                }
                allocations += 1;
                ops.push(Op::Alloc { bytes, stream });
            }
            Logged::Free { address, bytes } => match live.remove(&address) {
                Some((id, was)) if before == Before::Something || bytes == was => {
                    ops.push(Op::Free(id))
                }
                Some((_, was)) => {
                    return Err((
                        at,
                        format!(
                            "{address:#x} is freed with {bytes} bytes, but was allocated with {was}"
                        ),
                    ));
                }
                None if before == Before::Something => {
                    // Marked by a number that no allocation of the log has.
                    ops.push(Op::Free(u32::MAX - number(first.len())?));
                    first.push(bytes);
                }
                None => {
                    return Err((
                        at,
                        format!("{address:#x} is freed, but was not allocated before"),
                    ));
                }
            },
        }
        place.push(at);
    }
    let shift = number(first.len())?;
    number(allocations + first.len()).and_then(|all| {
        if all < u32::MAX / 2 {
            Ok(())
        } else {
            Err((end, "too many allocations".into()))
        }
    })?;
    for op in &mut ops {
        if let Op::Free(id) = op {
            *id = if *id > u32::MAX - 1 - shift {
                u32::MAX - *id
            } else {
                *id + shift
            };
        }
    }
    let there = first.iter().map(|&bytes| Op::Alloc {
        bytes,
        stream: Stream(0),
    });
    let all: Vec<Op> = there.chain(ops).collect();
    Trace::new(all).map_err(|at| {
        let at = at
            .checked_sub(first.len())
            .and_then(|at| place.get(at).copied())
            .unwrap_or(end);
        (
            at,
            "more bytes are allocated at once than can be counted".into(),
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn alloc(address: u64, bytes: u64, stream: u64) -> Logged {
        Logged::Alloc {
            address,
            bytes,
            stream,
        }
    }

    fn free(address: u64, bytes: u64) -> Logged {
        Logged::Free { address, bytes }
    }

    #[test]
    fn addresses_become_allocations() {
        let log = [
            alloc(16, 100, 77),
            alloc(32, 200, 78),
            free(16, 100),
            alloc(16, 300, 77),
            free(16, 300),
        ];
        let found = trace(&log, Before::Nothing, &[]).expect("a log that is right");
        let on = |bytes, stream| Op::Alloc {
            bytes,
            stream: Stream(stream),
        };
        assert_eq!(
            found.ops(),
            [on(100, 0), on(200, 1), Op::Free(0), on(300, 0), Op::Free(2)]
        );
    }

    #[test]
    fn earlier_allocations_come_first_in_the_trace() {
        let log = [alloc(16, 100, 0), free(32, 5), free(16, 100), free(48, 6)];
        let found = trace(&log, Before::Something, &[7]).expect("a log that is right");
        let on = |bytes| Op::Alloc {
            bytes,
            stream: Stream(0),
        };
        assert_eq!(
            found.ops(),
            [
                on(7),
                on(5),
                on(6),
                on(100),
                Op::Free(1),
                Op::Free(3),
                Op::Free(2)
            ]
        );
    }

    #[test]
    fn wrong_logs_name_the_place() {
        let at = |log: &[Logged], before| trace(log, before, &[]).expect_err("wrong").0;
        assert_eq!(at(&[alloc(1, 1, 0), free(2, 1)], Before::Nothing), 1);
        assert_eq!(at(&[alloc(1, 1, 0), free(1, 2)], Before::Nothing), 1);
        assert_eq!(
            at(
                &[alloc(1, 1, 0), alloc(2, 1, 0), alloc(1, 1, 0)],
                Before::Something
            ),
            2
        );
        assert_eq!(
            at(
                &[alloc(1, 1 << 61, 0), alloc(2, 1 << 61, 0)],
                Before::Nothing
            ),
            1
        );
    }
}
