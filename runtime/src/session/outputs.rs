//! The outputs of a run.

use slabwise_kernels::memory::Region;
use slabwise_kernels::size::Env;

use super::Session;
use crate::buffer::{Buffer, Output, Shown};
use crate::error::Result;
use crate::feed::Feed;
use crate::program::{Compiled, lengths};
use crate::trace::Debugged;

impl Session {
    /// The outputs of a run, where they lie.
    pub(super) fn outputs<const N: usize>(
        &mut self,
        (inner, debugged): (&Compiled, &[Debugged]),
        feed: &dyn Feed,
        env: &Env,
        slab: Region,
    ) -> Result<[Output<'_>; N]> {
        let place = |b: usize| inner.place_in(slab, b);
        self.show((inner, debugged), env, place)?;
        let buffers: [Option<Buffer>; N] =
            self.give_donated(inner, feed, env, &mut |b| place(b))?;
        let mut regions = [Region::default(); N];
        for (region, &b) in regions.iter_mut().zip(&inner.outputs) {
            *region = self.output_region(inner, b, slab)?;
        }
        Ok(std::array::from_fn(|i| {
            self.output(inner, i, regions[i], env, buffers[i].clone())
        }))
    }

    /// The region of a buffer that is an output.
    pub(super) fn output_region(&self, inner: &Compiled, b: usize, slab: Region) -> Result<Region> {
        if inner.buffers[b].data_dependent {
            return self.execution.data_dependent.region(b, slab, &self.memory);
        }
        Ok(inner.place_in(slab, b))
    }

    pub(crate) fn output(
        &self,
        inner: &Compiled,
        i: usize,
        region: Region,
        env: &Env,
        buffer: Option<Buffer>,
    ) -> Output<'_> {
        let planned = &inner.buffers[inner.outputs[i]];
        let lengths = lengths(&planned.dims, env);
        let bytes = lengths.iter().product::<usize>() * planned.dtype.bytes();
        Output {
            shown: Shown::new(&*self.memory.backend, region.part(0, bytes as u64)),
            dtype: planned.dtype,
            lengths,
            buffer,
        }
    }
}
