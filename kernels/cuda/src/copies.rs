//! Copies between the device and pinned host memory while kernels run: one stream for each
//! direction.
//!
//! A copy starts at a point of the device's main stream and not earlier, because its stream waits
//! for an event recorded there. It ends at another point: the main stream waits for an event
//! recorded after the copy. Between the two they are unordered. While a run is being captured, the
//! same calls become branches of the graph, and their events become its edges.

use slabwise_kernels::memory::Region;

use crate::device::Device;
use crate::driver::{DriverError, Event, Stream};

type Result<T> = std::result::Result<T, DriverError>;

/// The copy streams in both directions.
#[derive(Debug)]
pub(crate) struct CopyStreams {
    to_host: Stream,
    from_host: Stream,
    /// The point at which a copy may begin. A wait refers to the most recent record, so one event
    /// is enough.
    begin: Event,
    /// The end of each copy.
    ended: Vec<Event>,
}

impl CopyStreams {
    fn new() -> Result<CopyStreams> {
        Ok(CopyStreams {
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
            status: 0,
            code: code(),
        })
    }
}

impl Device {
    /// Prepares for so many copies in flight at once, so that starting them allocates nothing.
    ///
    /// # Errors
    /// If the driver has no streams or events to give.
    pub fn prepare_copies(&mut self, most: usize) -> Result<()> {
        self.ready()?;
        if most == 0 {
            return Ok(());
        }
        let grown = self.grow_copy_streams(most);
        self.noting(grown)
    }

    fn grow_copy_streams(&mut self, most: usize) -> Result<()> {
        let copy_streams = match &mut self.copy_streams {
            Some(copy_streams) => copy_streams,
            none => none.insert(CopyStreams::new()?),
        };
        while copy_streams.ended.len() < most {
            copy_streams.ended.push(Event::new()?);
        }
        Ok(())
    }

    fn copy_streams(&self) -> Result<&CopyStreams> {
        self.copy_streams
            .as_ref()
            .ok_or_else(|| DriverError::Failed {
                call: "a copy",
                status: 0,
                code: "no copies were prepared for".into(),
            })
    }

    /// Starts to copy one region to another of the same length, one of them in [host
    /// memory](Device::reserve_host), once the work submitted before is done. Until
    /// [`Device::finish_copy`] neither region may be written, and the destination must not be read.
    ///
    /// # Errors
    /// If there is no copy of this number, see [`Device::prepare_copies`], or the driver refuses.
    ///
    /// # Panics
    /// If the lengths differ, or not exactly one of the regions is in host memory.
    pub fn start_copy(&self, copy: usize, from: &Region, to: &Region) -> Result<()> {
        self.ready()?;
        assert_eq!(
            from.bytes, to.bytes,
            "copy between regions of different lengths"
        );
        let (outward, inward) = (self.is_host(to), self.is_host(from));
        assert!(
            outward != inward,
            "{from:?} is copied to {to:?}, and not exactly one of them is in host memory"
        );
        let copy_streams = self.copy_streams()?;
        let ended = copy_streams.ended(copy)?;
        let stream = if outward {
            &copy_streams.to_host
        } else {
            &copy_streams.from_host
        };
        let bytes = from.bytes as usize;
        let started = copy_streams
            .begin
            .record(&self.stream)
            .and_then(|()| stream.wait(&copy_streams.begin))
            .and_then(|()| match (bytes, outward) {
                (0, _) => Ok(()),
                // SAFETY: both regions are live memory, one of the device and the other of the
                // host, as their addresses were checked; work that uses them before the copy is
                // done must wait for it.
                (_, true) => unsafe {
                    stream.download(self.host_address(to) as *mut u8, self.address(from), bytes)
                },
                // SAFETY: as above.
                (_, false) => unsafe {
                    stream.upload(
                        self.address(to),
                        self.host_address(from) as *const u8,
                        bytes,
                    )
                },
            });
        self.noting(started.and_then(|()| ended.record(stream)))
    }

    /// Makes the work submitted from here on wait for a copy.
    ///
    /// # Errors
    /// If there is no copy of this number, or the driver refuses.
    pub fn finish_copy(&self, copy: usize) -> Result<()> {
        self.ready()?;
        let waited = self.stream.wait(self.copy_streams()?.ended(copy)?);
        self.noting(waited)
    }

    /// Waits until no copy between device and host is in flight, including those without a
    /// [`Device::finish_copy`].
    ///
    /// # Errors
    /// If a copy failed.
    pub fn settle_copies(&self) -> Result<()> {
        let done = self
            .copy_streams
            .as_ref()
            .map_or(Ok(()), CopyStreams::synchronize);
        self.noting(done)
    }
}
