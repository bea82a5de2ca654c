//! Environment variables. An empty or blank one counts as not set.

use slabwise_planner::brief;

use crate::error::{Error, Result};
use crate::memory::MemoryConfig;

/// The most threads that a session may have.
const THREADS_MAX: usize = 1024;

/// Whether a CUDA device replays a program as one graph.
pub const GRAPHS: &str = "SLABWISE_CUDA_GRAPHS";
/// Whether kernels of a graph without conflicting bytes may run side by side.
pub const BRANCHES: &str = "SLABWISE_CUDA_BRANCHES";
/// Whether a kernel of a graph may be launched before the kernels that it depends on end
/// (programmatic dependent launch, from sm_90).
pub const EARLY_LAUNCH: &str = "SLABWISE_CUDA_EARLY_LAUNCH";
/// Whether products are timed on a CUDA device.
pub const AUTOTUNE: &str = "SLABWISE_AUTOTUNE";
/// The folder that the program after each pass is written to, as `DIR` or `DIR:REGEX`, where the
/// expression selects passes by name.
pub const DUMP_PASSES: &str = "SLABWISE_DUMP";
/// Whether the output of every pass is verified, as debug builds do; 0 unless set.
pub const VERIFY: &str = "SLABWISE_VERIFY";
/// Whether a session prints the times of its programs' kernels at its end; 0 unless set.
pub const PROFILE: &str = "SLABWISE_PROFILE";
/// The folder to which each program's kernels on a CUDA device are dumped: sources, code and
/// launches.
pub const DUMP: &str = "SLABWISE_DUMP_CUDA";
/// Whether cuDNN is a candidate for convolutions where products are timed.
pub const CUDNN: &str = "SLABWISE_CUDNN";
/// Variables that are 0 or 1, and 1 unless set.
pub const SWITCHES: [&str; 5] = [GRAPHS, BRANCHES, EARLY_LAUNCH, AUTOTUNE, CUDNN];

/// Whether runs stop at a kernel whose result is not finite: 0, 1 or `inf`.
pub const CHECK_NAN: &str = "SLABWISE_CHECK_NAN";

pub use slabwise_pool::variable;

/// The results of kernels at which a run stops.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NanCheck {
    /// None are examined.
    #[default]
    Off,
    /// Those with NaN. Infinite numbers pass, because masks of attention and maxima over nothing
    /// are infinite by intent.
    Nan,
    /// Those with NaN or infinite numbers.
    NanAndInfinite,
}

/// `SLABWISE_CHECK_NAN`: the results of kernels at which a run stops, unless the session says so.
///
/// # Errors
/// If it is neither 0, 1 nor `inf`.
pub fn check_nan() -> Result<NanCheck> {
    match variable(CHECK_NAN).as_deref().map(str::trim) {
        None | Some("0") => Ok(NanCheck::Off),
        Some("1") => Ok(NanCheck::Nan),
        Some("inf") => Ok(NanCheck::NanAndInfinite),
        Some(text) => Err(Error::Value(format!(
            "{CHECK_NAN} is {:?}; it is 0, 1 (NaN) or inf (NaN and infinite numbers)",
            brief(text)
        ))),
    }
}

/// `SLABWISE_THREADS`: how many threads a session's kernels use, and how many compile kernels for a
/// GPU.
///
/// # Errors
/// If it is not a number from 1 to 1024.
pub fn threads() -> Result<Option<usize>> {
    let Some(text) = variable("SLABWISE_THREADS") else {
        return Ok(None);
    };
    let number = text
        .trim()
        .parse()
        .ok()
        .filter(|n| (1..=THREADS_MAX).contains(n));
    let wrong = || {
        Error::Value(format!(
            "SLABWISE_THREADS is {:?}; it is a number of threads from 1 to {THREADS_MAX}",
            brief(&text)
        ))
    };
    number.map(Some).ok_or_else(wrong)
}

/// `SLABWISE_VERIFY`: whether the output of every pass is verified.
///
/// # Errors
/// If it is neither 0 nor 1.
pub fn verify() -> Result<bool> {
    Ok(variable(VERIFY).is_some() && switch(VERIFY)?)
}

/// `SLABWISE_PROFILE`: whether a session prints the times of its programs' kernels at its end.
///
/// # Errors
/// If it is neither 0 nor 1.
pub fn profile() -> Result<bool> {
    Ok(variable(PROFILE).is_some() && switch(PROFILE)?)
}

/// Whether a variable of [`SWITCHES`] is on.
///
/// # Errors
/// If it is neither 0 nor 1.
pub fn switch(name: &str) -> Result<bool> {
    match variable(name).as_deref().map(str::trim) {
        None | Some("1") => Ok(true),
        Some("0") => Ok(false),
        Some(text) => Err(Error::Value(format!(
            "{name} is {:?}; it is 0 or 1",
            brief(text)
        ))),
    }
}

/// Checks the variables that every session reads, for any device.
///
/// # Errors
/// The first invalid one.
pub fn check() -> Result<()> {
    mistakes().into_iter().next().map_or(Ok(()), Err)
}

/// All invalid variables.
pub fn mistakes() -> Vec<Error> {
    let pool = MemoryConfig::survey()
        .1
        .into_iter()
        .map(|error| Error::Value(error.to_string()));
    threads()
        .err()
        .into_iter()
        .chain(SWITCHES.into_iter().filter_map(|name| switch(name).err()))
        .chain(verify().err())
        .chain(profile().err())
        .chain(check_nan().err())
        .chain(pool)
        .collect()
}
