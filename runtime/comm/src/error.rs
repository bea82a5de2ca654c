//! Errors of worlds and their collectives.

use std::time::Duration;

/// The reason why a world could not be joined, or why a collective did not finish.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A rank died, left its world or did not arrive in time. The world cannot be used again.
    #[error(
        "rank {rank} of {size} {why} while \"{name}\" (collective {collective} of step {step}) \
         waited for it; restart from the last checkpoint"
    )]
    Peer {
        /// The rank that is lost.
        rank: usize,
        /// The number of ranks.
        size: usize,
        /// The step of the rank that reports it.
        step: u64,
        /// The collective's number within the step.
        collective: u64,
        /// The collective's name.
        name: String,
        /// How the rank was lost.
        why: String,
    },
    /// Ranks do not agree on a value that must be the same on all.
    #[error(
        "rank {rank} does not run the program of the others: its {name} differs ({theirs}, \
         {own} on rank {rank})"
    )]
    Disagree {
        /// The first rank that differs from the majority.
        rank: usize,
        /// The name of the first value that differs.
        name: String,
        /// The value of that rank.
        own: String,
        /// The value of the majority.
        theirs: String,
    },
    /// Ranks started different collectives at the same position.
    #[error("\"{name}\" is not the same collective on all ranks: {why}")]
    Mismatch {
        /// The collective's name on this rank.
        name: String,
        /// The first difference.
        why: String,
    },
    /// A region or a shape has a wrong size.
    #[error("{0}")]
    Size(String),
    /// The world could not be joined: no library, another library than the launcher's, a wrong
    /// variable.
    #[error("{0}")]
    Join(String),
    /// The engine failed, and no lost rank explains it.
    #[error("\"{name}\" (collective {collective} of step {step}) failed: {why}")]
    Engine {
        /// The step of the rank that reports it.
        step: u64,
        /// The collective's number within the step.
        collective: u64,
        /// The collective's name.
        name: String,
        /// The engine's words.
        why: String,
    },
}

/// Results of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// The default of [`World::with_patience`](crate::World::with_patience).
pub(crate) const PATIENCE: Duration = Duration::from_secs(300);

/// The longest time that a collective waits: the default or `SLABWISE_PATIENCE`, in seconds.
///
/// # Errors
/// If the variable is not a positive number of seconds.
pub(crate) fn patience(lookup: &dyn Fn(&str) -> Option<String>) -> Result<Duration> {
    let name = "SLABWISE_PATIENCE";
    let Some(text) = lookup(name).filter(|text| !text.trim().is_empty()) else {
        return Ok(PATIENCE);
    };
    text.trim()
        .parse::<f64>()
        .ok()
        .filter(|seconds| *seconds > 0.0)
        .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
        .ok_or_else(|| {
            Error::Join(format!(
                "{name} is {text:?}, but must be a positive number of seconds, such as 300"
            ))
        })
}

/// Whether ranks of one machine read each other's memory: yes, unless `SLABWISE_NEAR` is 0.
///
/// # Errors
/// If the variable is neither 0 nor 1.
pub(crate) fn near(lookup: &dyn Fn(&str) -> Option<String>) -> Result<bool> {
    let name = "SLABWISE_NEAR";
    let text = lookup(name).unwrap_or_default();
    match text.trim() {
        "" | "1" => Ok(true),
        "0" => Ok(false),
        _ => Err(Error::Join(format!(
            "{name} is {text:?}, but must be 0 (ranks of one machine send messages) or 1"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patience_is_a_positive_number_of_seconds() {
        let of = |text: &'static str| patience(&|_| Some(text.to_string()));
        assert_eq!(of("2.5"), Ok(Duration::from_millis(2500)));
        assert_eq!(of(" "), Ok(PATIENCE));
        assert_eq!(patience(&|_| None), Ok(PATIENCE));
        for wrong in ["0", "-1", "NaN", "inf", "soon", "1e300"] {
            let told = of(wrong).expect_err(wrong).to_string();
            assert!(
                told.contains("SLABWISE_PATIENCE") && told.contains(wrong),
                "{told}"
            );
        }
    }
}
