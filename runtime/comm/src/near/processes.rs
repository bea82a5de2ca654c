//! The memory of the processes of one machine that they can read from each other.

use std::mem::size_of;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::area::{ARENAS_MAX, Area, Place};
use super::segment::{Address, MACHINE, Segment, View, machine};
use super::{Near, Posted, Sight};
use crate::engine::IN_FLIGHT_MAX;

/// The most bytes that are copied after the area, where peers see them wherever they were.
const INLINE: usize = 1024;
/// The bytes of a window: an area, and the small bytes of each slot.
const WINDOW: usize = size_of::<Area>() + IN_FLIGHT_MAX * INLINE;

/// The window of a rank, before it knows its peers.
pub(crate) struct Introduction {
    window: Option<Segment>,
    rank: usize,
    views: Vec<Option<Peer>>,
}

impl Introduction {
    /// The bytes by which ranks introduce themselves.
    pub const BYTES: usize = MACHINE + 4 + 8 + 8;

    /// Makes a window, unless this rank wants none or the system has no memory for it.
    pub fn new(rank: usize, is_wanted: bool) -> Introduction {
        Introduction {
            window: is_wanted.then(|| Segment::new(WINDOW).ok()).flatten(),
            rank,
            views: Vec::new(),
        }
    }

    /// The bytes for the other ranks; zeros if there is no window.
    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        if let (Some(window), Some(machine)) = (&self.window, machine()) {
            let at = window.address();
            bytes[..MACHINE].copy_from_slice(&machine);
            let mut rest = &mut bytes[MACHINE..];
            for part in [
                &std::process::id().to_le_bytes()[..],
                &at.descriptor.to_le_bytes(),
                &at.inode.to_le_bytes(),
            ] {
                let (to, after) = rest.split_at_mut(part.len());
                to.copy_from_slice(part);
                rest = after;
            }
        }
        bytes
    }

    /// Maps the windows of the ranks on this machine. Returns for each rank whether it is seen.
    pub fn look(&mut self, all: &[u8]) -> Vec<u8> {
        let own = self.to_bytes();
        let seen = |(rank, theirs): (usize, &[u8])| {
            let is_near = rank != self.rank && own[0] != 0 && theirs[..MACHINE] == own[..MACHINE];
            let number = |at: usize| {
                u64::from_le_bytes(std::array::from_fn(|i| theirs[MACHINE + 4 + at + i]))
            };
            let process = u32::from_le_bytes(std::array::from_fn(|i| theirs[MACHINE + i]));
            let address = Address {
                descriptor: number(0),
                inode: number(8),
                len: WINDOW as u64,
            };
            let window = is_near
                .then(|| View::open(process, address).ok())
                .flatten()?;
            Some(Peer {
                process,
                window,
                arenas: Mutex::new((0..ARENAS_MAX).map(|_| None).collect()),
            })
        };
        let ranks = all.chunks_exact(Self::BYTES).enumerate();
        self.views = ranks.map(seen).collect();
        self.views.iter().map(|v| u8::from(v.is_some())).collect()
    }

    /// The ranks that this one sees, if they see it too: row r of `seen` says whom rank r sees.
    /// `None` if there are none.
    pub fn meet(mut self, seen: &[u8]) -> Option<Near<Processes>> {
        let (rank, size) = (self.rank, self.views.len());
        for (other, view) in self.views.iter_mut().enumerate() {
            if seen[other * size + rank] == 0 {
                *view = None;
            }
        }
        let is_alone = self.views.iter().all(Option::is_none);
        let own = self.window.filter(|_| !is_alone)?;
        let sees = |(at, seen): (usize, &u8)| *seen != 0 || at / size == at % size;
        let is_whole = seen.iter().enumerate().all(sees);
        let sight = Processes {
            rank,
            own,
            peers: self.views,
            arenas: Mutex::new([None; ARENAS_MAX]),
        };
        Some(Near::over(sight, rank, size, is_whole))
    }
}

/// The windows of ranks in other processes, and the arenas that have been looked at.
pub(crate) struct Processes {
    rank: usize,
    own: Segment,
    peers: Vec<Option<Peer>>,
    arenas: Mutex<[Option<Own>; ARENAS_MAX]>,
}

/// A peer.
struct Peer {
    process: u32,
    window: View,
    /// Its arenas, with the numbers of their files.
    arenas: Mutex<Vec<Option<(u64, View)>>>,
}

/// An arena of this rank.
#[derive(Clone, Copy)]
struct Own {
    start: usize,
    len: usize,
    id: u64,
}

impl Processes {
    fn arenas(&self) -> MutexGuard<'_, [Option<Own>; ARENAS_MAX]> {
        // No code panics while it holds the lock.
        self.arenas.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The bytes after an area for the collective of a slot.
    fn inline(window: NonNull<u8>, seq: u64) -> *mut u8 {
        let at = size_of::<Area>() + seq as usize % IN_FLIGHT_MAX * INLINE;
        window.as_ptr().wrapping_add(at)
    }
}

impl Sight for Processes {
    fn area(&self, rank: usize) -> Option<&Area> {
        let window = if rank == self.rank {
            self.own.start()
        } else {
            self.peers.get(rank)?.as_ref()?.window.start()
        };
        // SAFETY: a window begins with an area: it is long enough, at the start of a page, and
        // was zeros, which are a valid area. All accesses are atomic, and those to a peer's are
        // relaxed loads.
        Some(unsafe { window.cast::<Area>().as_ref() })
    }

    fn place(&self, seq: u64, (start, len): (*const u8, usize)) -> Place {
        if len <= INLINE {
            let to = Self::inline(self.own.start(), seq);
            if len > 0 {
                // SAFETY: the source is valid, by the promise of `Engine::start`. The destination
                // lies in this rank's window, and no peer reads it, because all have said that the
                // collective that had the slot before has ended.
                unsafe { std::ptr::copy_nonoverlapping(start, to, len) };
            }
            return Place::Inline;
        }
        let arenas = self.arenas();
        let found = arenas.iter().enumerate().find_map(|(index, arena)| {
            let arena = arena.as_ref()?;
            let offset = start.addr().checked_sub(arena.start)?;
            let fits = offset.checked_add(len)? <= arena.len;
            fits.then_some(Place::Arena {
                index,
                id: arena.id,
                offset: offset as u64,
            })
        });
        found.unwrap_or(Place::Elsewhere)
    }

    fn with_bytes(&self, bytes: Posted, read: &mut dyn FnMut(*const u8)) -> Result<(), String> {
        let Posted {
            rank,
            seq,
            place,
            end,
        } = bytes;
        let peer = self.peers[rank].as_ref().ok_or("it is not near")?;
        match place {
            Place::Inline if end <= INLINE => read(Self::inline(peer.window.start(), seq)),
            Place::Arena { index, id, offset } => {
                let mut arenas = peer.arenas.lock().unwrap_or_else(PoisonError::into_inner);
                let known = &mut arenas[index];
                if known.as_ref().is_none_or(|(other, _)| *other != id) {
                    let address = self.area(rank).map(|area| area.listed(index));
                    let address = address.filter(|address| address.inode == id);
                    let address = address.ok_or("an arena is not listed")?;
                    let view = View::open(peer.process, address).map_err(|e| e.to_string())?;
                    *known = Some((id, view));
                }
                let view = known.as_ref().map(|(_, view)| view);
                let fits = |view: &&View| {
                    let end = offset.checked_add(end as u64);
                    end.is_some_and(|end| end <= view.len() as u64)
                };
                let view = view.filter(fits).ok_or("bytes beyond an arena")?;
                read(view.start().as_ptr().wrapping_add(offset as usize));
            }
            _ => return Err("a message in no place".into()),
        }
        Ok(())
    }
}

/// Memory of this rank that the ranks of its machine read in place.
pub(crate) struct SharedArena {
    segment: Segment,
    near: Arc<Near<Processes>>,
    index: usize,
}

impl SharedArena {
    /// An arena of zeros; `None` if the system has no memory for it, or there are too many.
    pub(crate) fn new(near: &Arc<Near<Processes>>, bytes: usize) -> Option<SharedArena> {
        let segment = Segment::new(bytes).ok()?;
        let mut arenas = near.sight.arenas();
        let index = arenas.iter().position(Option::is_none)?;
        let address = segment.address();
        near.own().list(index, address);
        arenas[index] = Some(Own {
            start: segment.start().addr().get(),
            len: segment.len(),
            id: address.inode,
        });
        drop(arenas);
        Some(SharedArena {
            segment,
            near: Arc::clone(near),
            index,
        })
    }
}

impl AsMut<[u8]> for SharedArena {
    fn as_mut(&mut self) -> &mut [u8] {
        // SAFETY: the segment is mapped with this length, was zeros, and is reached in this process
        // through this value only.
        unsafe { std::slice::from_raw_parts_mut(self.segment.start().as_ptr(), self.segment.len()) }
    }
}

impl Drop for SharedArena {
    fn drop(&mut self) {
        self.near.sight.arenas()[self.index] = None;
    }
}
