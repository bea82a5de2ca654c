//! The dynamic mode, for comparison: the same kernels in the same order, with every buffer taken from a caching pool when
//! it is first written and given back after its last use, as eager frameworks do it.

use slabwise_kernels::memory::Region;
use smallvec::SmallVec;

use crate::buffer::Output;
use crate::error::{Error, Result};
use crate::feed::Feed;
use crate::memory::pool::Statistics;
use crate::program::{Place, Program};
use crate::session::{Session, out_of_memory};

impl Session {
    /// Runs a program with its buffers in the caching pool instead of the slab; results are bit-equal to [`Session::run`].
    pub fn run_dynamic<const N: usize>(&mut self, program: &Program<N>, feed: impl Feed) -> Result<[Output<'_>; N]> {
        let inner = &program.inner;
        let env = self.begin(inner, &feed)?;
        let pool_error = |e: crate::memory::pool::NotInUse| Error::Internal(e.to_string());
        // Outputs of the last run were kept until now.
        for region in self.dynamic.drain(..).flatten() {
            self.pool.free(region).map_err(pool_error)?;
        }
        let mut held: Vec<Option<Region>> = vec![None; inner.buffers.len()];
        let bytes_of = |b: usize| {
            let buffer = &inner.buffers[b];
            crate::program::lengths(&buffer.dims, &env).iter().product::<usize>() as u64 * buffer.dtype.bytes() as u64
        };
        for buffer in inner.inputs.iter().filter_map(|i| i.buffer) {
            held[buffer] = Some(self.take(bytes_of(buffer), &inner.name)?);
        }
        let staged = held.clone();
        let fed = self.stage(inner, &feed, &mut |b| staged[b].unwrap_or_default())?;
        for (at, step) in inner.steps.iter().enumerate() {
            for &b in &step.begins {
                if held[b].is_none() {
                    held[b] = Some(self.take(bytes_of(b), &inner.name)?);
                }
            }
            let workspace = self.take(step.workspace.bytes, &inner.name)?;
            let args: SmallVec<[Region; 16]> = step
                .places
                .iter()
                .map(|p| match *p {
                    Place::Planned(b) => {
                        let own = inner.inputs.iter().position(|i| i.buffer == Some(b)).and_then(|i| fed[i]);
                        own.or(held[b]).unwrap_or_default()
                    }
                    Place::Variable(v) => self.variables[v].region,
                    Place::Sizes => self.sizes(),
                })
                .collect();
            let result = step.kernel.run(&mut self.memory, &args, &workspace, &env, &self.team);
            self.pool.free(workspace).map_err(pool_error)?;
            let done = result.is_err() || at + 1 == inner.steps.len();
            for (b, slot) in held.iter_mut().enumerate() {
                let is_output = inner.outputs.contains(&b);
                let ends = if done { !is_output || result.is_err() } else { step.ends.contains(&b) && !is_output };
                if ends && let Some(region) = slot.take() {
                    self.pool.free(region).map_err(pool_error)?;
                }
            }
            result.map_err(|fault| inner.fault(at, fault))?;
        }
        let buffers: [Option<crate::buffer::Buffer>; N] = self.give_donated(inner, &feed, &env, &mut |b| held[b].unwrap_or_default())?;
        let regions: Vec<Region> = inner.outputs.iter().map(|&o| held[o].unwrap_or_default()).collect();
        self.dynamic = held;
        Ok(std::array::from_fn(|i| self.output(inner, i, regions[i], &env, buffers[i].clone())))
    }

    fn take(&mut self, bytes: u64, name: &str) -> Result<Region> {
        self.pool.allocate(&mut self.memory, bytes).map_err(|e| out_of_memory(&format!("a buffer of \"{name}\""), e))
    }

    /// What the pool of the dynamic mode did.
    pub fn pool_statistics(&self) -> Statistics {
        self.pool.statistics()
    }

    /// Gives the dynamic mode's memory back, and starts its statistics anew.
    pub fn reset_pool(&mut self) {
        for region in self.dynamic.drain(..).flatten() {
            // What the pool handed out it takes back.
            let freed = self.pool.free(region);
            debug_assert!(freed.is_ok());
        }
        self.pool.empty_cache(&mut self.memory);
        self.pool = crate::memory::pool::Pool::new();
    }
}
