//! What a run takes: seconds of each kernel, bytes touched.

use super::Session;
use crate::error::{Error, Result};
use crate::feed::Feed;
use crate::program::Program;

impl Session {
    /// Runs a program `steps` times and returns the seconds that each of its kernels took at its fastest, in the order of
    /// [`Plan::steps`](crate::Plan::steps).
    pub fn profile<const N: usize>(&mut self, program: &Program<N>, feed: impl Feed, steps: u32) -> Result<Vec<f64>> {
        let kernels = self.planned_for(program, &feed)?.steps.len();
        self.profile = Some(vec![f64::INFINITY; kernels]);
        let result = (0..steps.max(1)).try_for_each(|_| self.run(program, &feed).map(|_| ()));
        let fastest = self.profile.take().unwrap_or_default();
        result.map(|()| fastest)
    }

    /// The bytes of the slab that a run really touches, measured by filling it with a pattern and looking for the last byte
    /// that changed. Runs the program twice, with two patterns; weights and state are put back as they were.
    pub fn measure_touched<const N: usize>(&mut self, program: &Program<N>, feed: impl Feed) -> Result<u64> {
        self.planned_for(program, &feed)?;
        let slab = self.slab.ok_or_else(|| Error::Internal("a program without a slab".into()))?;
        let kept: Vec<Vec<u8>> = self.variables.iter().map(|v| self.memory.bytes(&v.region).to_vec()).collect();
        let mut touched = 0;
        for pattern in [0xA5u8, 0x5A] {
            self.memory.bytes_mut(&slab).fill(pattern);
            self.run(program, &feed)?;
            let last = self.memory.bytes(&slab).iter().rposition(|b| *b != pattern);
            touched = touched.max(last.map_or(0, |l| l as u64 + 1));
            for (variable, bytes) in self.variables.iter().zip(&kept) {
                self.memory.bytes_mut(&variable.region).copy_from_slice(bytes);
            }
        }
        Ok(touched)
    }
}
