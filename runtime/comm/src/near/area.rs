//! Areas: shared memory in which a rank publishes its progress to the ranks that see its memory.
//!
//! A rank writes only its own area, and peers read it, possibly from memory that is mapped
//! read-only. A waiting peer sleeps on the bell (a futex) of the area that it waits for.

use std::ptr;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use std::time::Duration;

use super::segment::Address;
use crate::engine::{Collective, IN_FLIGHT_MAX, Job};

/// The most arenas of a rank.
pub(super) const ARENAS_MAX: usize = 64;

/// The place of the bytes that a rank sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// At an address of the process that all ranks are in.
    Address(usize),
    /// After the sender's area, at the slot of the collective.
    Inline,
    /// In an arena of the sender's.
    Arena { index: usize, id: u64, offset: u64 },
    /// Where peers cannot see them: they come by messages.
    Elsewhere,
}

/// A collective as a rank has started it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Posted {
    pub collective: u64,
    /// The number of ranks of the group, and their distance.
    pub group: u64,
    pub len: u64,
    pub place: Place,
}

/// The position of a rank.
#[derive(Default)]
#[repr(C)]
pub(crate) struct Area {
    /// Changes with every news.
    bell: AtomicU32,
    step: AtomicU64,
    posts: Table<Post, IN_FLIGHT_MAX>,
    arenas: Table<Listed, ARENAS_MAX>,
}

/// A number of entries.
#[repr(C)]
struct Table<T, const N: usize>([T; N]);

impl<T: Default, const N: usize> Default for Table<T, N> {
    fn default() -> Self {
        Table(std::array::from_fn(|_| T::default()))
    }
}

/// A collective, at the slot of its number.
#[derive(Default)]
#[repr(C)]
struct Post {
    /// One more than the number of the last collective that was started.
    started: AtomicU64,
    /// One more than the number of the last collective whose bytes have all been received.
    ended: AtomicU64,
    /// The [code](code) of the collective, its group, the bytes of its destination, and where its
    /// bytes are.
    words: [AtomicU64; 6],
}

/// An arena, as others find it.
#[derive(Default)]
#[repr(C)]
struct Listed {
    descriptor: AtomicU64,
    inode: AtomicU64,
    len: AtomicU64,
}

/// Reads a number of an area. The order is that of a fence, because memory that is mapped for
/// reading may be read by relaxed loads only.
fn get(number: &AtomicU64) -> u64 {
    let value = number.load(Ordering::Relaxed);
    fence(Ordering::Acquire);
    value
}

/// A collective as a number, by which ranks compare theirs.
pub(super) fn code(collective: Collective) -> u64 {
    match collective {
        Collective::AllToAll => 0,
        Collective::AllGather => 1,
        Collective::Barrier => 2,
        Collective::Broadcast { root } => 3 | (root as u64) << 3,
        Collective::Shift { by } => 4 | (by as u64) << 3,
        Collective::ReduceScatter => 5,
    }
}

/// The collective of a number of [`code`].
pub(super) fn collective(code: u64) -> Collective {
    match code & 7 {
        0 => Collective::AllToAll,
        1 => Collective::AllGather,
        2 => Collective::Barrier,
        3 => Collective::Broadcast {
            root: (code >> 3) as usize,
        },
        5 => Collective::ReduceScatter,
        // The shift back copies the sign.
        _ => Collective::Shift {
            by: (code as i64 >> 3) as isize,
        },
    }
}

impl Area {
    fn post(&self, seq: u64) -> &Post {
        &self.posts.0[seq as usize % IN_FLIGHT_MAX]
    }

    /// Says that this rank has started a collective.
    pub fn start(&self, seq: u64, job: &Job, place: Place) {
        let [a, b, c] = match place {
            Place::Address(at) => [0, at as u64, 0],
            Place::Inline => [1, 0, 0],
            Place::Arena { index, id, offset } => [2 | (index as u64) << 2, id, offset],
            Place::Elsewhere => [3, 0, 0],
        };
        let post = self.post(seq);
        let group = u64::from(job.group.ranks) << 32 | u64::from(job.group.stride);
        let len = job.destination_len as u64;
        let words = [code(job.collective), group, len, a, b, c];
        for (to, word) in post.words.iter().zip(words) {
            to.store(word, Ordering::Relaxed);
        }
        post.started.store(seq + 1, Ordering::Release);
        self.ring();
    }

    /// Says that this rank has received all bytes of a collective.
    pub fn end(&self, seq: u64) {
        self.post(seq).ended.store(seq + 1, Ordering::Release);
        self.ring();
    }

    /// Whether a collective was started and has not ended.
    pub fn has_open(&self) -> bool {
        let posts = self.posts.0.iter();
        posts
            .clone()
            .any(|post| get(&post.started) != get(&post.ended))
    }

    pub fn has_started(&self, seq: u64) -> bool {
        get(&self.post(seq).started) > seq
    }

    /// The number of collectives that the rank has started.
    pub fn started(&self) -> u64 {
        let posts = self.posts.0.iter();
        posts.map(|post| get(&post.started)).max().unwrap_or(0)
    }

    pub fn has_ended(&self, seq: u64) -> bool {
        get(&self.post(seq).ended) > seq
    }

    /// A collective that the rank has started.
    pub fn posted(&self, seq: u64) -> Posted {
        let [collective, group, len, a, b, c] = self.post(seq).words.each_ref().map(get);
        let place = match a & 3 {
            0 => Place::Address(b as usize),
            1 => Place::Inline,
            2 => Place::Arena {
                index: (a >> 2) as usize % ARENAS_MAX,
                id: b,
                offset: c,
            },
            _ => Place::Elsewhere,
        };
        Posted {
            collective,
            group,
            len,
            place,
        }
    }

    pub fn set_step(&self, step: u64) {
        self.step.store(step, Ordering::Relaxed);
    }

    pub fn step(&self) -> u64 {
        get(&self.step)
    }

    /// Says where others find an arena.
    pub fn list(&self, index: usize, address: Address) {
        let at = &self.arenas.0[index];
        at.descriptor.store(address.descriptor, Ordering::Relaxed);
        at.inode.store(address.inode, Ordering::Relaxed);
        at.len.store(address.len, Ordering::Release);
    }

    /// Where an arena is found.
    pub fn listed(&self, index: usize) -> Address {
        let at = &self.arenas.0[index];
        Address {
            len: get(&at.len),
            descriptor: get(&at.descriptor),
            inode: get(&at.inode),
        }
    }

    /// Wakes all that wait for this area.
    pub fn ring(&self) {
        self.bell.fetch_add(1, Ordering::SeqCst);
        // SAFETY: the word is valid. The call wakes threads of all processes that wait on it.
        unsafe {
            libc::syscall(
                libc::SYS_futex,
                self.bell.as_ptr(),
                libc::FUTEX_WAKE,
                i32::MAX,
            )
        };
    }

    /// The state of the bell, to be read before the state that is waited for.
    pub fn bell(&self) -> u32 {
        let bell = self.bell.load(Ordering::Relaxed);
        fence(Ordering::SeqCst);
        bell
    }

    /// Sleeps until the bell rings after it was in a state, at most for a time. It may wake up
    /// earlier.
    pub fn sleep(&self, bell: u32, most: Duration) {
        let time = libc::timespec {
            tv_sec: most.as_secs() as libc::time_t,
            tv_nsec: most.subsec_nanos() as libc::c_long,
        };
        // SAFETY: the word and the time are valid; the word is read only.
        unsafe {
            libc::syscall(
                libc::SYS_futex,
                self.bell.as_ptr(),
                libc::FUTEX_WAIT,
                bell,
                ptr::from_ref(&time),
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use slabwise_kernels::collective::Group;

    use super::*;

    #[test]
    fn collectives_survive_their_code() {
        for one in [
            Collective::AllToAll,
            Collective::AllGather,
            Collective::ReduceScatter,
            Collective::Barrier,
            Collective::Broadcast { root: 1023 },
            Collective::Shift { by: 3 },
            Collective::Shift { by: -2000 },
        ] {
            assert_eq!(collective(code(one)), one);
        }
    }

    #[test]
    fn posts_survive_their_words() {
        let area = Area::default();
        let job = Job {
            collective: Collective::AllGather,
            group: Group {
                ranks: 3,
                stride: 2,
            },
            source: ptr::null(),
            source_len: 2,
            destination: ptr::null_mut(),
            destination_len: 6,
        };
        let arena = Place::Arena {
            index: 63,
            id: 1 << 40,
            offset: 1 << 33,
        };
        for (seq, place) in [
            Place::Address(usize::MAX),
            Place::Inline,
            arena,
            Place::Elsewhere,
        ]
        .into_iter()
        .enumerate()
        {
            let seq = seq as u64 + 61;
            assert!(!area.has_started(seq));
            area.start(seq, &job, place);
            assert!(area.has_started(seq) && !area.has_ended(seq) && area.has_open());
            let (collective, len) = (code(job.collective), 6);
            let posted = Posted {
                collective,
                group: 3 << 32 | 2,
                len,
                place,
            };
            assert_eq!(area.posted(seq), posted);
            area.end(seq);
            assert!(area.has_ended(seq) && !area.has_open());
        }
    }
}
