//! The cores that the processes of a machine may run on.

use std::thread;

/// The cores that a process may run on.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Cores {
    /// A bit for each.
    set: [u8; SET],
    /// The number that the system lets it use at a time.
    count: u32,
}

/// The bytes of Linux's sets of cores.
const SET: usize = size_of::<libc::cpu_set_t>();

impl Cores {
    /// The bytes in which a rank tells others.
    pub const BYTES: usize = SET + 4;

    /// Those of this process; a set without cores where the system does not tell.
    pub fn own() -> Cores {
        let mut set = [0; SET];
        // SAFETY: the call writes at most so many bytes.
        unsafe { libc::sched_getaffinity(0, SET, set.as_mut_ptr().cast()) };
        let count = thread::available_parallelism().map_or(1, usize::from);
        Cores {
            set,
            count: u32::try_from(count).unwrap_or(u32::MAX),
        }
    }

    pub fn to_bytes(&self) -> Vec<u8> {
        [&self.set[..], &self.count.to_le_bytes()].concat()
    }

    /// Those in the bytes of a rank.
    pub fn of(bytes: &[u8]) -> Cores {
        Cores {
            set: std::array::from_fn(|i| bytes[i]),
            count: u32::from_le_bytes(std::array::from_fn(|i| bytes[SET + i])),
        }
    }
}

/// The threads that each rank can use, from the machine and the cores of each: ranks of a machine
/// that may run on the same cores share them. All use as many as the one that can use the fewest.
pub(super) fn threads(ranks: &[(&[u8], Cores)]) -> usize {
    let of = |own: &(&[u8], Cores)| {
        let sharers = ranks.iter().filter(|other| *other == own).count();
        own.1.count as usize / sharers.max(1)
    };
    ranks.iter().map(of).min().unwrap_or(1).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_share_the_cores_that_they_may_run_on() {
        let cores = |first: u8, count: u32| {
            let mut cores = Cores {
                set: [0; SET],
                count,
            };
            cores.set[0] = first;
            assert_eq!(Cores::of(&cores.to_bytes()), cores);
            cores
        };
        let (here, there) = (&b"here"[..], &b"there"[..]);
        let all = |host| (host, cores(0xff, 8));
        assert_eq!(threads(&[all(here), all(here)]), 4);
        assert_eq!(threads(&[all(here), all(there)]), 8);
        assert_eq!(threads(&[all(here), all(here), all(there)]), 4);
        let half = |set| (here, cores(set, 4));
        assert_eq!(threads(&[half(0x0f), half(0xf0)]), 4, "each has its own");
        let nine = vec![all(here); 9];
        assert_eq!(threads(&nine), 1);
        assert_eq!(
            Cores::own().count as usize,
            threads(&[(here, Cores::own())])
        );
    }
}
