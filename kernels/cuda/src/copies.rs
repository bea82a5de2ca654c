//! Copies between the device and pinned memory of the host while kernels run: one stream to the
//! host, one from it.
//!
//! A copy starts at a moment of the device's own stream and not before: its stream waits for an
//! event recorded there. It is waited for at another: the own stream waits for an event recorded
//! behind the copy. Between the two nothing orders them. While a run is recorded, the same calls
//! become branches of the graph, and their events edges of it.

use slabwise_kernels::memory::Region;

use crate::device::Device;
use crate::driver::{DriverError, Event, Stream};

type Result<T> = std::result::Result<T, DriverError>;

/// The ways to the host and back.
#[derive(Debug)]
pub(crate) struct Ways {
    to_host: Stream,
    from_host: Stream,
    /// The moment a copy may begin. Who waits for it does so for the moment recorded last, so one
    /// is enough.
    begin: Event,
    /// The end of each copy.
    ended: Vec<Event>,
}

impl Ways {
    fn new() -> Result<Ways> {
        Ok(Ways {
            to_host: Stream::new()?,
            from_host: Stream::new()?,
            begin: Event::new()?,
            ended: Vec::new(),
        })
    }

    /// Waits until all copies are done.
    pub fn synchronize(&self) -> Result<()> {
        self.to_host
            .synchronize()
            .and_then(|()| self.from_host.synchronize())
    }

    fn ended(&self, copy: usize) -> Result<&Event> {
        let code = || {
            format!(
                "it is copy {copy}, and {} were prepared for",
                self.ended.len()
            )
        };
        self.ended.get(copy).ok_or_else(|| DriverError::Failed {
            call: "a copy",
            code: code(),
        })
    }
}

impl Device {
    /// Makes ready for so many copies in flight at once, so that starting them makes nothing.
    ///
    /// # Errors
    /// If the driver has no streams or events to give.
    pub fn prepare_copies(&mut self, most: usize) -> Result<()> {
        self.ready()?;
        if most == 0 {
            return Ok(());
        }
        let grown = self.grow_ways(most);
        self.noting(grown)
    }

    fn grow_ways(&mut self, most: usize) -> Result<()> {
        let ways = match &mut self.ways {
            Some(ways) => ways,
            none => none.insert(Ways::new()?),
        };
        while ways.ended.len() < most {
            ways.ended.push(Event::new()?);
        }
        Ok(())
    }

    fn ways(&self) -> Result<&Ways> {
        self.ways.as_ref().ok_or_else(|| DriverError::Failed {
            call: "a copy",
            code: "no copies were prepared for".into(),
        })
    }

    /// Starts to copy one region to another of the same length, one of the two of the
    /// [host](Device::reserve_host), once the work is done that was asked for before. Until
    /// [`Device::finish_copy`] neither may be written, and the destination may not be read.
    ///
    /// # Errors
    /// If there is no copy of this number, see [`Device::prepare_copies`], or the driver refuses.
    ///
    /// # Panics
    /// If the lengths differ, or not just one of the regions is the host's.
    pub fn start_copy(&self, copy: usize, from: &Region, to: &Region) -> Result<()> {
        self.ready()?;
        assert_eq!(
            from.bytes, to.bytes,
            "copy between regions of different lengths"
        );
        let (outward, inward) = (self.is_host(to), self.is_host(from));
        assert!(
            outward != inward,
            "{from:?} is copied to {to:?}, and not just one of them is the host's"
        );
        let ways = self.ways()?;
        let ended = ways.ended(copy)?;
        let way = if outward {
            &ways.to_host
        } else {
            &ways.from_host
        };
        let bytes = from.bytes as usize;
        let started = ways
            .begin
            .record(&self.stream)
            .and_then(|()| way.wait(&ways.begin))
            .and_then(|()| match (bytes, outward) {
                (0, _) => Ok(()),
                // SAFETY: both regions are live memory, the one of the device and the other of the
                // host, as their addresses were checked; who wants to use them first waits for the
                // copy.
                (_, true) => unsafe {
                    way.download(self.host_address(to) as *mut u8, self.address(from), bytes)
                },
                // SAFETY: as above.
                (_, false) => unsafe {
                    way.upload(
                        self.address(to),
                        self.host_address(from) as *const u8,
                        bytes,
                    )
                },
            });
        self.noting(started.and_then(|()| ended.record(way)))
    }

    /// Lets the work that is asked for from here on wait for a copy.
    ///
    /// # Errors
    /// If there is no copy of this number, or the driver refuses.
    pub fn finish_copy(&self, copy: usize) -> Result<()> {
        self.ready()?;
        let waited = self.stream.wait(self.ways()?.ended(copy)?);
        self.noting(waited)
    }

    /// Waits until nothing is on its way between device and host, whether somebody waits for it or
    /// not.
    ///
    /// # Errors
    /// If a copy failed.
    pub fn settle_copies(&self) -> Result<()> {
        let settled = self.ways.as_ref().map_or(Ok(()), Ways::synchronize);
        self.noting(settled)
    }
}
