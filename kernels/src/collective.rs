//! Collectives: transfers of bytes between ranks, as kernels see them.
//!
//! A transport moves bytes. Sums over ranks are kernels like any other, so that the program and not
//! the transport determines the order of their additions. Ranks that read each other's memory in
//! place need no copies of the rows that they add: then a collective ends in
//! [`add_in_tree`](crate::tree_sum::add_in_tree), which adds in the same order.
//!
//! A collective is in flight from [`Kernel::start_exchange`](crate::cpu::Kernel::start_exchange) to
//! [`Memory::finish_exchange`]. Meanwhile other ranks read its source and a thread of the transport
//! may write its destination, so [`Memory`] refuses other accesses to them, like accesses to the
//! regions of a [copy](crate::copies) in flight. If a rank is lost, a thread that waits in a
//! foreign library may access them for the rest of the process; then the arenas are never freed.

use crate::memory::{Foreign, Memory, Region};
use crate::spec::CollectiveOp;

pub use crate::group::Group;

/// A world of ranks that exchange bytes, as one of them sees it.
///
/// Every rank starts the same collectives in the same order, of as many bytes, and finishes them in
/// the same order. A collective is between the ranks of a group, and waits for these alone.
pub trait Transport: Send + Sync {
    /// The number of ranks of the world.
    fn ranks(&self) -> usize;

    /// This rank, from 0.
    fn rank(&self) -> usize;

    /// Memory of zeros that other ranks read in place when this one sends from it; `None` if it
    /// would be no faster than other memory, or there is none. The system must have the bytes.
    fn arena(&self, bytes: u64) -> Option<Foreign> {
        let _ = bytes;
        None
    }

    /// Starts a collective in the group of this rank, and returns at once. [`CollectiveOp`] says
    /// which part of the source goes to which rank of it, and where in the destination it arrives.
    ///
    /// # Errors
    /// If a rank is lost, or has failed.
    ///
    /// # Safety
    /// Until [`Transport::finish`] has returned for it, both regions stay valid, the source is not
    /// written, and the destination is neither read nor written; after an error that [keeps] them,
    /// for the rest of the process. They do not overlap.
    ///
    /// [keeps]: TransportError::keeps
    unsafe fn start(
        &self,
        op: CollectiveOp,
        group: Group,
        source: *const [u8],
        destination: *mut [u8],
    ) -> Result<Ticket, TransportError>;

    /// Waits until a collective has ended: all its bytes are received, and no rank reads those of
    /// the source any more.
    ///
    /// # Errors
    /// If a rank is lost, or has failed.
    fn finish(&self, ticket: Ticket) -> Result<(), TransportError>;
}

/// A collective that a transport has started, in numbers of the transport's own.
#[derive(Clone, Copy, Debug)]
pub struct Ticket(pub [u64; 4]);

/// The reason why bytes did not arrive.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{why}")]
pub struct TransportError {
    /// The reason, in words.
    pub why: String,
    /// Whether the regions of collectives in flight may still be accessed.
    pub keeps: bool,
}

/// The name of a collective in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exchange(u64);

/// The collectives in flight of a [`Memory`].
#[derive(Default)]
pub(crate) struct Exchanges {
    flights: Vec<Flight>,
    started: u64,
}

struct Flight {
    exchange: Exchange,
    ticket: Ticket,
    from: Region,
    to: Region,
}

impl Exchanges {
    /// Whether an arena has bytes of a collective in flight.
    pub fn is_in(&self, arena: u32) -> bool {
        let touches = |f: &Flight| f.from.arena == arena || f.to.arena == arena;
        self.flights.iter().any(touches)
    }

    /// The destination that forbids reading a region.
    pub fn arrives_in(&self, region: &Region) -> Option<Region> {
        let mut destinations = self.flights.iter().map(|f| f.to);
        destinations.find(|to| to.overlaps(region))
    }

    /// The source or destination that forbids writing a region.
    pub fn touches(&self, region: &Region) -> Option<Region> {
        let mut regions = self.flights.iter().flat_map(|f| [f.from, f.to]);
        regions.find(|own| own.overlaps(region))
    }
}

impl Memory {
    /// Starts to move bytes between the ranks of a group. Until [`Memory::finish_exchange`] neither
    /// region may be written, and the destination may not be read.
    ///
    /// # Errors
    /// The transport's.
    ///
    /// # Panics
    /// If the regions overlap, one is not inside a live arena, or a collective in flight conflicts
    /// with it.
    pub fn start_exchange(
        &mut self,
        transport: &dyn Transport,
        (op, group): (CollectiveOp, Group),
        [from, to]: [Region; 2],
    ) -> Result<Exchange, TransportError> {
        assert!(
            !from.overlaps(&to),
            "{from:?} is sent while {to:?} is received, which overlaps it"
        );
        self.assert_readable(&from);
        self.assert_writable(&to);
        let source = std::ptr::slice_from_raw_parts(self.address(&from), from.bytes as usize);
        let destination = std::ptr::slice_from_raw_parts_mut(self.address(&to), to.bytes as usize);
        // SAFETY: both lie in live arenas and do not overlap. From here on the flight refuses
        // accesses that conflict, and keeps the arenas alive, until `finish` has returned for it
        // without keeping them. If the start fails and keeps them, the flight is never taken off.
        let ticket = unsafe { transport.start(op, group, source, destination) };
        let exchange = Exchange(self.exchanges.started);
        let (ticket, result) = match ticket {
            Ok(ticket) => (ticket, Ok(exchange)),
            Err(error) if error.keeps => (Ticket([0; 4]), Err(error)),
            Err(error) => return Err(error),
        };
        self.exchanges.started += 1;
        self.exchanges.flights.push(Flight {
            exchange,
            ticket,
            from,
            to,
        });
        result
    }

    /// Waits until a collective has ended; nothing is done if it has.
    ///
    /// # Errors
    /// The transport's. If it keeps the regions, they stay in flight for ever.
    pub fn finish_exchange(
        &mut self,
        exchange: Exchange,
        transport: &dyn Transport,
    ) -> Result<(), TransportError> {
        let flights = &mut self.exchanges.flights;
        let Some(at) = flights.iter().position(|f| f.exchange == exchange) else {
            return Ok(());
        };
        let done = transport.finish(flights[at].ticket);
        if !done.as_ref().is_err_and(|error| error.keeps) {
            flights.remove(at);
        }
        done
    }

    /// The collective that was started first of those in flight.
    pub fn first_exchange(&self) -> Option<Exchange> {
        self.exchanges.flights.first().map(|f| f.exchange)
    }
}
