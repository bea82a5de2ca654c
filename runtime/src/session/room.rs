//! Optional memory: buffers that make a session faster, and that it gives up where memory is
//! short.

use slabwise_kernels::memory::Region;
use slabwise_planner::Bytes;

use super::Session;
use crate::error::{Error, Result};
use crate::program::Compiled;

impl Session {
    /// A new arena; an error names its purpose. If there is no memory for it, optional memory is
    /// given up first: the unused blocks of the pool, then the staging buffer of the next run's
    /// inputs.
    pub(crate) fn reserve(&mut self, bytes: u64, what: &str) -> Result<Region> {
        let short = |result: &Result<Region>| matches!(result, Err(Error::OutOfMemory { .. }));
        let mut reserved = self.memory.reserve(bytes, what);
        if short(&reserved) && self.pool.empty_cache(self.memory.source()) > 0 {
            reserved = self.memory.reserve(bytes, what);
        }
        if short(&reserved) && self.memory.staging().0 > 0 && self.memory.set_staging(0)? {
            reserved = self.memory.reserve(bytes, what);
        }
        reserved
    }

    /// Bytes of the slab, if it must be this high, and of all prefetch queues.
    fn bytes_beside_staging(&self, height: u64) -> u64 {
        let queues = self.queues.iter().map(|queue| queue.region.bytes);
        queues.fold(self.slab_bytes().max(height), u64::saturating_add)
    }

    /// Makes the staging buffer as large as a program's plan says, or gives up that of other
    /// programs if the budget has no room for it beside this one.
    pub(crate) fn prepare_landing(
        &mut self,
        inner: &mut Compiled,
        room: Option<u64>,
    ) -> Result<()> {
        let (there, _) = self.memory.staging();
        let (ahead, landing) = (
            inner.plan.persistent().ahead,
            inner.plan.persistent().landing,
        );
        let beside = self
            .bytes_beside_staging(inner.slab_bytes)
            .saturating_add(ahead);
        let wanted = match room {
            Some(room) if beside.saturating_add(there) > room => landing,
            _ => there.max(landing),
        };
        if !self.memory.set_staging(wanted)? {
            log::warn!(
                "\"{}\": no memory for a staging buffer of {} beside the inputs of the current run",
                inner.name,
                Bytes(wanted)
            );
            inner.plan.without_landing();
        }
        Ok(())
    }
}
