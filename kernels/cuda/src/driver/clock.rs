//! How long a stream is at work: two events, one before and one after.

use std::ptr::null_mut;

use cudarc::driver::sys::{self, CUevent, CUresult};

use super::{DriverError, Event, Result, Stream, check};

/// Two events that know when they were reached. Its context is current and outlives it.
#[derive(Debug)]
pub(crate) struct Clock {
    before: Event,
    after: Event,
}

impl Clock {
    pub fn new() -> Result<Clock> {
        Ok(Clock { before: Event::timed()?, after: Event::timed()? })
    }

    /// Milliseconds from the first to the last of what `work` asks of the stream. Waits for it.
    pub fn time(&self, stream: &Stream, work: impl FnOnce() -> Result<()>) -> Result<f64> {
        self.before.record(stream)?;
        work()?;
        self.after.record(stream)?;
        self.after.synchronize()?;
        let mut milliseconds = 0f32;
        let elapsed = elapsed_time()?;
        // SAFETY: both events live and have been reached, and the pointer is valid for writing.
        check("cuEventElapsedTime", unsafe { elapsed(&mut milliseconds, self.before.0, self.after.0) })?;
        Ok(f64::from(milliseconds))
    }
}

type ElapsedTime = unsafe extern "C" fn(*mut f32, CUevent, CUevent) -> CUresult;

/// The call has a second version since 12.8; drivers before that have the first alone, and the bindings would end the process.
fn elapsed_time() -> Result<ElapsedTime> {
    // SAFETY: the driver is open.
    let library = unsafe { sys::culib() };
    for name in ["cuEventElapsedTime_v2", "cuEventElapsedTime"] {
        // SAFETY: both versions have this type.
        if let Ok(call) = unsafe { library.get::<ElapsedTime>(name.as_bytes()) } {
            return Ok(*call);
        }
    }
    Err(DriverError::Failed { call: "cuEventElapsedTime", code: "the driver has no such call".into() })
}

impl Event {
    /// An event that knows when it was reached.
    fn timed() -> Result<Event> {
        let mut raw = null_mut();
        // SAFETY: the pointer is valid for writing.
        check("cuEventCreate", unsafe { sys::cuEventCreate(&mut raw, sys::CUevent_flags::CU_EVENT_DEFAULT as u32) })?;
        Ok(Event(raw))
    }
}
