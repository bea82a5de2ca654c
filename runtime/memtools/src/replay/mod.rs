//! Allocation traces, and their replay under a pool's policies.
//!
//! A trace is a list of allocations and frees as some program made them. [`Trace::run`] replays it
//! in a pool over a [`FakeDevice`], whose memory is only counted; therefore traces of devices
//! larger than this machine can be replayed.

mod events;
mod file;
mod lifetimes;
mod pickle;
mod rmm;
mod snapshot;
#[cfg(test)]
mod tests;

use std::time::{Duration, Instant};

use slabwise_pool::{
    Action, ConfigError, Event, FakeDevice, Fragmentation, MemoryConfig, OutOfMemory, Policy, Pool,
    Statistics, Stream, TagId,
};

pub use file::{FILE_MAX, TraceError};

/// One line of a trace. Allocations are numbered in their order, from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// A request for memory.
    Alloc {
        /// How much.
        bytes: u64,
        /// For which stream.
        stream: Stream,
    },
    /// The memory of an allocation is freed.
    Free(u32),
}

/// A list of allocations and frees.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Trace {
    ops: Vec<Op>,
    allocations: u32,
}

/// The result of a trace under a policy.
#[derive(Clone, Debug, PartialEq)]
pub struct Replay {
    /// The policy.
    pub policy: Policy,
    /// The largest sum of requested bytes not yet given back.
    pub peak_live_bytes: u64,
    /// Nanoseconds of this machine for each allocation or free, on average.
    pub ns_per_op: f64,
    /// Calls of the driver.
    pub driver_calls: u64,
    /// The free memory at the first peak of live bytes.
    pub fragmentation: Fragmentation,
    /// Everything else.
    pub statistics: Statistics,
}

impl Trace {
    /// A trace of these operations.
    ///
    /// # Errors
    /// The operation at fault: a free of a block that was not allocated before it, or was freed
    /// before, or the first that makes more than 2³² − 1 allocations or 2⁶² bytes live.
    pub fn new(ops: Vec<Op>) -> Result<Trace, usize> {
        let mut live: Vec<Option<u64>> = Vec::new();
        let mut sum = 0u64;
        for (at, op) in ops.iter().enumerate() {
            match *op {
                Op::Alloc { bytes, .. } => {
                    live.push(Some(bytes));
                    sum = sum
                        .checked_add(bytes)
                        .filter(|sum| *sum < 1 << 62)
                        .ok_or(at)?;
                }
                Op::Free(id) => {
                    let bytes = live.get_mut(id as usize).and_then(Option::take).ok_or(at)?;
                    sum -= bytes;
                }
            }
        }
        let allocations = u32::try_from(live.len()).map_err(|_| ops.len() - 1)?;
        Ok(Trace { ops, allocations })
    }

    /// The trace of a pool's recorded events; see [`Pool::record`]. Blocks that were in use before
    /// are allocated first.
    ///
    /// # Errors
    /// If the events are not those of a pool, in their order.
    pub fn of_events(events: &[Event]) -> Result<Trace, String> {
        use events::{Before, Logged, trace};
        let log = events.iter().filter_map(|event| {
            let (address, bytes, stream) = (
                event.allocation,
                event.region.bytes,
                u64::from(event.stream.0),
            );
            match event.action {
                Action::Alloc => Some(Logged::Alloc {
                    address,
                    bytes,
                    stream,
                }),
                Action::Free => Some(Logged::Free { address, bytes }),
                _ => None,
            }
        });
        trace(&log.collect::<Vec<_>>(), Before::Something, &[])
            .map_err(|(at, what)| format!("allocation or free {at}: {what}"))
    }

    /// The operations.
    pub fn ops(&self) -> &[Op] {
        &self.ops
    }

    /// The largest sum of requested bytes not yet given back.
    pub fn peak_live_bytes(&self) -> u64 {
        self.peak().1
    }

    /// The first operation after which the most bytes are live, and their number.
    fn peak(&self) -> (usize, u64) {
        let mut sizes = Vec::with_capacity(self.allocations as usize);
        let (mut live, mut peak) = (0u64, (0, 0));
        for (at, op) in self.ops.iter().enumerate() {
            match *op {
                Op::Alloc { bytes, .. } => {
                    sizes.push(bytes);
                    live += bytes;
                    if live > peak.1 {
                        peak = (at, live);
                    }
                }
                Op::Free(id) => live -= sizes[id as usize],
            }
        }
        peak
    }

    /// Replays the trace in a pool with this configuration, on a device of `capacity` bytes, all of
    /// which are the pool's; without a capacity, on one larger than any.
    ///
    /// # Errors
    /// If a setting is invalid, or the OOM report of the first request that failed.
    pub fn run(&self, config: &MemoryConfig, capacity: Option<u64>) -> Result<Replay, ReplayError> {
        self.watch(config, capacity, 0, |_| {})
    }

    /// Like [`Trace::run`], while the pool records its last `events` events; `at_peak` receives the
    /// pool at the first peak of live bytes. Each operation takes a microsecond of the device's
    /// time.
    ///
    /// # Errors
    /// See [`Trace::run`].
    pub fn watch(
        &self,
        config: &MemoryConfig,
        capacity: Option<u64>,
        events: usize,
        mut at_peak: impl FnMut(&Pool),
    ) -> Result<Replay, ReplayError> {
        const PAGE: u64 = 2 << 20;
        let device = FakeDevice::new(capacity.unwrap_or(1 << 60))
            .with_pages(PAGE)
            .with_preallocation(capacity.is_some());
        let whole = MemoryConfig {
            fraction: Some(1.0),
            ..config.clone()
        };
        let pool = Pool::new(&whole)?;
        pool.record(events);
        let mut handles = Vec::with_capacity(self.allocations as usize);
        let mut source = &device;
        let (peak_at, peak_live_bytes) = self.peak();
        let (mut fragmentation, mut elapsed) = (Fragmentation::default(), Duration::ZERO);
        let mut start = Instant::now();
        for (at, op) in self.ops.iter().enumerate() {
            if events > 0 {
                device.advance(Duration::from_micros(1));
            }
            match *op {
                Op::Alloc { bytes, stream } => {
                    let handle = pool.allocate(&mut source, bytes, stream, TagId::default());
                    handles.push(handle.map_err(|report| ReplayError::OutOfMemory { at, report })?);
                }
                Op::Free(id) => {
                    let freed = pool.free(&mut source, handles[id as usize]);
                    debug_assert!(freed.is_ok(), "a trace frees what it has allocated");
                }
            }
            if at == peak_at {
                elapsed += start.elapsed();
                fragmentation = pool.fragmentation();
                at_peak(&pool);
                start = Instant::now();
            }
        }
        let ns = (elapsed + start.elapsed()).as_nanos() as f64;
        let (driver_calls, statistics) = (device.calls(), pool.statistics());
        Ok(Replay {
            policy: pool.policy(),
            peak_live_bytes,
            ns_per_op: ns / self.ops.len().max(1) as f64,
            driver_calls,
            fragmentation,
            statistics,
        })
    }
}

/// Why a trace could not be replayed.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    /// A setting is invalid.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// There was no memory for a request.
    #[error("operation {at} of the trace: {report}")]
    OutOfMemory {
        /// Which operation, counted from 0.
        at: usize,
        /// The OOM report.
        report: Box<OutOfMemory>,
    },
}
