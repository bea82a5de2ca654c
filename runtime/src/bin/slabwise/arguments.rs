//! Values of arguments as users write them.

use std::time::Duration;

use slabwise_planner::brief;

/// A length of time as users write it.
pub fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| format!("`{}` is no number of seconds", brief(text)))?;
    Duration::try_from_secs_f64(seconds).map_err(|error| error.to_string())
}
