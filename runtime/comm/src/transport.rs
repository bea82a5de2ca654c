//! Worlds as the transports of kernels.

use slabwise_kernels::collective::{self, Group, Transport, TransportError};
use slabwise_kernels::memory::Foreign;
use slabwise_kernels::spec::CollectiveOp;

use crate::{Collective, Error, Ticket, World};

/// The collective of each [`CollectiveOp`].
const COLLECTIVES: [Collective; 3] = [
    Collective::AllToAll,
    Collective::AllGather,
    Collective::ReduceScatter,
];

impl Transport for World {
    fn ranks(&self) -> usize {
        self.size()
    }

    fn rank(&self) -> usize {
        World::rank(self)
    }

    fn arena(&self, bytes: u64) -> Option<Foreign> {
        World::arena(self, usize::try_from(bytes).ok()?)
    }

    unsafe fn start(
        &self,
        op: CollectiveOp,
        group: Group,
        source: *const [u8],
        destination: *mut [u8],
    ) -> Result<collective::Ticket, TransportError> {
        let collective = COLLECTIVES[op as usize];
        // SAFETY: the caller promises as much: until `finish` has returned, and after an error for
        // as long as `abandons` asks for it.
        let started =
            unsafe { self.start_in(group, collective.name(), collective, source, destination) };
        let ticket = started.map_err(|error| self.failure(&error))?;
        Ok(collective::Ticket([
            ticket.seq,
            ticket.step,
            ticket.collective,
            op as u64,
        ]))
    }

    fn finish(&self, ticket: collective::Ticket) -> Result<(), TransportError> {
        let collective::Ticket([seq, step, collective, op]) = ticket;
        let ticket = Ticket {
            seq,
            step,
            collective,
        };
        let name = COLLECTIVES.get(op as usize).map_or("", |m| m.name());
        let done = World::finish(self, ticket, name);
        done.map_err(|error| self.failure(&error))
    }
}

impl World {
    fn failure(&self, error: &Error) -> TransportError {
        TransportError {
            why: error.to_string(),
            keeps: self.abandons(),
        }
    }
}
