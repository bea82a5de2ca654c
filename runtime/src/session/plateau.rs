//! Learning rates that a session lowers.

use ndarray::{arr0, arr1};

use super::Session;
use crate::error::{Error, Result};
use crate::optim::Plateau;

impl Session {
    /// Records a metric such as a loss on validation data, lowers the rate of the optimizer that
    /// follows `plateau` if the metric has stopped improving, and returns the rate of the next
    /// step. NaN is no improvement.
    ///
    /// # Errors
    /// If no program of the session trains by this schedule.
    pub fn observe(&mut self, plateau: &Plateau, measure: f32) -> Result<f32> {
        let [rate, memory] = plateau.states();
        let before: Vec<f32> = self.value(&memory)?.iter().copied().collect();
        let before = <[f32; 4]>::try_from(before).map_err(|other| {
            Error::Value(format!(
                "\"{memory}\" has {} numbers; the memory of a plateau has 4",
                other.len()
            ))
        })?;
        let (next, after) = plateau.observed(self.value(&rate)?.sum(), before, measure);
        self.set_value(&rate, &arr0(next))?;
        self.set_value(&memory, &arr1(&after))?;
        Ok(next)
    }
}
