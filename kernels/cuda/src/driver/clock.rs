//! Timing of a stream's work by events.

use std::ptr::null_mut;

use cudarc::driver::sys::{self, CUevent};

use super::calls::{self, Status};
use super::{DriverError, Event, Result, Stream, check};

/// Two events with timestamps. Its context is current and outlives it.
#[derive(Debug)]
pub(crate) struct Clock {
    before: Event,
    after: Event,
}

impl Clock {
    pub fn new() -> Result<Clock> {
        Ok(Clock {
            before: Event::timed()?,
            after: Event::timed()?,
        })
    }

    /// The time of the work that `work` submits to the stream, milliseconds. Waits for it. If the
    /// stream is idle, the time of the submission counts too.
    pub fn time(&self, stream: &Stream, work: impl FnOnce() -> Result<()>) -> Result<f64> {
        self.before.record(stream)?;
        work()?;
        self.after.record(stream)?;
        self.after.synchronize()?;
        self.after.since(&self.before)
    }
}

/// Consecutive timestamps in a stream's work. Its context is current and outlives it.
#[derive(Debug, Default)]
pub(crate) struct Timestamps {
    events: Vec<Event>,
    noted: usize,
}

impl Timestamps {
    /// Discards the timestamps.
    pub fn begin(&mut self) {
        self.noted = 0;
    }

    /// Records a timestamp once all work submitted to the stream until now is done.
    pub fn mark(&mut self, stream: &Stream) -> Result<()> {
        if self.noted == self.events.len() {
            self.events.push(Event::timed()?);
        }
        self.events[self.noted].record(stream)?;
        self.noted += 1;
        Ok(())
    }

    /// Seconds from the first timestamp to each. Waits for the last.
    pub fn seconds(&self) -> Result<Vec<f64>> {
        let noted = &self.events[..self.noted];
        noted.last().map_or(Ok(()), Event::synchronize)?;
        noted
            .iter()
            .map(|event| Ok(event.since(&noted[0])? / 1e3))
            .collect()
    }
}

type ElapsedTime = unsafe extern "C" fn(*mut f32, CUevent, CUevent) -> Status;

/// The elapsed-time call. It has a second version since 12.8; older drivers have only the first,
/// and the bindings would abort the process.
fn elapsed_time() -> Result<ElapsedTime> {
    for name in ["cuEventElapsedTime_v2", "cuEventElapsedTime"] {
        // SAFETY: the driver is open, and both versions have this type.
        if let Some(call) = unsafe { calls::find::<ElapsedTime>(name) } {
            return Ok(call);
        }
    }
    Err(DriverError::Failed {
        call: "cuEventElapsedTime",
        status: 0,
        code: "the driver has no such call".into(),
    })
}

impl Event {
    /// Milliseconds between two events that have been reached.
    fn since(&self, before: &Event) -> Result<f64> {
        let mut milliseconds = 0f32;
        let elapsed = elapsed_time()?;
        // SAFETY: both events live and have been reached, and the pointer is valid for writing.
        check("cuEventElapsedTime", unsafe {
            elapsed(&mut milliseconds, before.0, self.0)
        })?;
        Ok(f64::from(milliseconds))
    }

    /// An event with a timestamp.
    fn timed() -> Result<Event> {
        let mut raw = null_mut();
        // SAFETY: the pointer is valid for writing.
        check("cuEventCreate", unsafe {
            calls::cuEventCreate(&mut raw, sys::CUevent_flags::CU_EVENT_DEFAULT as u32)
        })?;
        Ok(Event(raw))
    }
}
