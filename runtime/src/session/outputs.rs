//! The outputs of a run.

use slabwise_kernels::memory::Region;
use slabwise_kernels::size::Env;
use smallvec::SmallVec;

use super::Session;
use crate::buffer::{Buffer, Output, Shown};
use crate::error::{Error, Result};
use crate::feed::{Feed, Source};
use crate::program::{Compiled, lengths};
use crate::trace::Debugged;

/// The outputs that have taken over the bytes of donated inputs, with their new handles.
pub(super) type Given = SmallVec<[(usize, Buffer); 2]>;

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
        let donated = self.give_donated(inner, feed, env, &mut |b| place(b))?;
        let mut regions = [Region::default(); N];
        for (region, &b) in regions.iter_mut().zip(&inner.outputs) {
            *region = self.output_region(inner, b, slab)?;
        }
        Ok(std::array::from_fn(|i| {
            self.output(inner, i, regions[i], env, &donated)
        }))
    }

    /// Turns donated inputs into the outputs that they were declared for: the same bytes, under a
    /// new generation of the handle.
    pub(crate) fn give_donated(
        &mut self,
        inner: &Compiled,
        feed: &dyn Feed,
        env: &Env,
        place: &mut dyn FnMut(usize) -> Region,
    ) -> Result<Given> {
        let mut given = Given::new();
        let mut donated: SmallVec<[(usize, Buffer); 2]> = SmallVec::new();
        feed.each(&mut |at, source| {
            if let Source::Donated(d) = source {
                donated.push((at, d.0.clone()));
            }
        });
        for (at, buffer) in donated {
            // A buffer whose bytes no output can take was refused before the run.
            let Some(to) = inner.inputs[at].donated_to.map(|to| to as usize) else {
                continue;
            };
            let region = self.memory.buffers.slots[buffer.slot].region;
            let output = &inner.buffers[inner.outputs[to]];
            let lengths = lengths(&output.dims, env);
            let bytes = (lengths.iter().product::<usize>() * output.dtype.bytes()) as u64;
            if bytes > region.bytes {
                return Err(Error::Input {
                    name: inner.inputs[at].name.to_string(),
                    message: format!(
                        "the donated buffer has {} bytes, its output needs {bytes}",
                        region.bytes
                    ),
                });
            }
            let from = place(inner.outputs[to]).part(0, bytes);
            self.memory.backend.copy(&from, &region.part(0, bytes))?;
            // Only now are earlier handles of it invalid.
            self.memory.buffers.slots[buffer.slot].generation += 1;
            let taken = Buffer {
                generation: buffer.generation + 1,
                lengths,
                dtype: output.dtype,
                ..buffer
            };
            given.push((to, taken));
        }
        Ok(given)
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
        donated: &Given,
    ) -> Output<'_> {
        let planned = &inner.buffers[inner.outputs[i]];
        let lengths = lengths(&planned.dims, env);
        let bytes = lengths.iter().product::<usize>() * planned.dtype.bytes();
        Output {
            shown: Shown::new(&*self.memory.backend, region.part(0, bytes as u64)),
            dtype: planned.dtype,
            lengths,
            buffer: donated
                .iter()
                .find(|(to, _)| *to == i)
                .map(|(_, buffer)| buffer.clone()),
        }
    }
}
