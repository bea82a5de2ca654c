//! Memory that a session has only to be faster, and does without where room is short.

use slabwise_kernels::memory::Region;
use slabwise_planner::{Bytes, Dag};

use super::Session;
use crate::error::{Error, Result};
use crate::program::Compiled;

impl Session {
    /// An arena for what the error would name. If there is no memory for it, what is kept only to
    /// be faster goes first: what the pool holds and nobody uses, and where inputs of the next run
    /// wait.
    pub(crate) fn reserve(&mut self, bytes: u64, what: &str) -> Result<Region> {
        let short = |result: &Result<Region>| matches!(result, Err(Error::OutOfMemory { .. }));
        let mut reserved = self.memory.reserve(bytes, what);
        if short(&reserved) && self.pool.empty_cache(&mut self.memory) > 0 {
            reserved = self.memory.reserve(bytes, what);
        }
        if short(&reserved) && self.memory.landing().0 > 0 && self.memory.set_landing(0)? {
            reserved = self.memory.reserve(bytes, what);
        }
        reserved
    }

    /// The bytes that large inputs of a program wait in, if there is room for them beside a slab of
    /// this height and slots ahead of it: a budget is not kept for them by computing anything
    /// again.
    pub(crate) fn landing_within(
        &self,
        dag: &Dag,
        room: Option<u64>,
        height: u64,
        ahead: u64,
    ) -> u64 {
        let inputs = dag.buffers.iter().filter(|buffer| buffer.live_in);
        let wanted = inputs
            .map(|buffer| self.memory.landing_bytes(buffer.occupied()))
            .sum();
        let needed = self
            .beside_landing(height)
            .saturating_add(ahead)
            .saturating_add(self.memory.landing().0.max(wanted));
        if room.is_some_and(|room| needed > room) {
            0
        } else {
            wanted
        }
    }

    /// Bytes of the slab, if it must be this high, and of all slots.
    fn beside_landing(&self, height: u64) -> u64 {
        let rings = self.rings.iter().map(|ring| ring.region.bytes);
        rings.fold(self.slab_bytes().max(height), u64::saturating_add)
    }

    /// Makes room for a program's large inputs on their way, as it is planned, or gives up what
    /// others have if there is no more room beside this program.
    pub(crate) fn prepare_landing(
        &mut self,
        inner: &mut Compiled,
        room: Option<u64>,
    ) -> Result<()> {
        let (there, _) = self.memory.landing();
        let (ahead, landing) = (
            inner.plan.persistent().ahead,
            inner.plan.persistent().landing,
        );
        let beside = self.beside_landing(inner.slab_bytes).saturating_add(ahead);
        let wanted = match room {
            Some(room) if beside.saturating_add(there) > room => landing,
            _ => there.max(landing),
        };
        if !self.memory.set_landing(wanted)? {
            log::warn!(
                "\"{}\": no room for {} of inputs beside those of the run at work",
                inner.name,
                Bytes(wanted)
            );
            inner.plan.without_landing();
        }
        Ok(())
    }
}
