//! The OOM report of a request for which there is no memory: the request, the memory there is, its
//! holders, and possible remedies.

use std::fmt;

use slabwise_planner::Bytes;

use super::block::{Handle, State};
use super::config::Policy;
use super::heap::{Engine, Heap};
use super::retry::Request;
use super::stats::Fragmentation;
use super::tags::Tag;

/// The most holders that a report names.
const HOLDERS: usize = 8;

/// A holder of memory.
#[derive(Clone, Debug, PartialEq)]
pub struct Holder {
    /// The block; it may be freed by now.
    pub handle: Handle,
    /// Its purpose.
    pub tag: Tag,
    /// The requested bytes.
    pub bytes: u64,
    /// Which allocation of the pool it is, counted from 1.
    pub allocation: u64,
    /// Whether it is pinned.
    pub pinned: bool,
    /// The step that needs it next, if known.
    pub next_use: Option<String>,
}

/// A change that would have let the request succeed, from the numbers of the report.
#[derive(Clone, Debug, PartialEq)]
pub enum Help {
    /// So many bytes more that the pool may take.
    Limit(u64),
    /// The memory is there, but in pieces, and moving blocks is switched off.
    Defragment,
    /// The memory is there, but in pieces between blocks that must not move.
    Unpin {
        /// Bytes of blocks that must not move.
        pinned_bytes: u64,
    },
    /// The memory is there, but in pieces, and moving them would go beyond the rate that is
    /// allowed.
    DefragmentRate,
    /// The memory is there, but kept for other sizes; a policy that splits and joins blocks could
    /// use it.
    Policy(Policy),
    /// Memory that scales with the batch fits if the batch is at most this part of its size.
    Batch(f64),
    /// The device has the bytes, but others hold them.
    Others {
        /// Bytes that the pool may still take, but the driver refuses.
        bytes: u64,
    },
}

/// No memory for a request, after every retry step. The pool stays usable.
#[derive(Clone, Debug, PartialEq)]
pub struct OutOfMemory {
    /// The requested bytes.
    pub requested: u64,
    /// Their purpose.
    pub tag: Tag,
    /// The most that the pool may take.
    pub capacity: u64,
    /// Bytes of the blocks in use.
    pub in_use: u64,
    /// Bytes taken from the driver.
    pub reserved: u64,
    /// The pool's free memory.
    pub fragmentation: Fragmentation,
    /// The policy that failed.
    pub policy: Policy,
    /// The largest blocks in use, largest first.
    pub holders: Vec<Holder>,
    /// The number of other blocks in use.
    pub more_holders: usize,
    /// The remedies, the least first.
    pub help: Vec<Help>,
}

impl Heap {
    /// The OOM report of a failed request; `None` for a request that no memory could hold, which
    /// has no rounded size.
    pub(super) fn oom_report(
        &self,
        bytes: u64,
        tag: u32,
        request: Option<&Request>,
    ) -> OutOfMemory {
        let capacity = self.capacity.map_or(0, |c| c.limit);
        let (in_use, reserved) = (self.statistics.bytes_in_use, self.statistics.pool_bytes);
        let fragmentation = Fragmentation::of_table(&self.table);
        let mut holders = self.holders();
        let more_holders = holders.len().saturating_sub(HOLDERS);
        holders.truncate(HOLDERS);
        let help = request.map_or(Vec::new(), |r| self.help(r, capacity, &fragmentation));
        let tag = self.tags.get(tag).clone();
        let policy = self.settings.policy;
        OutOfMemory {
            requested: bytes,
            tag,
            capacity,
            in_use,
            reserved,
            fragmentation,
            policy,
            holders,
            more_holders,
            help,
        }
    }

    /// All blocks in use, largest first.
    pub(super) fn holders(&self) -> Vec<Holder> {
        let live = self.table.iter().filter(|(_, b)| b.state == State::Live);
        let mut holders: Vec<Holder> = live
            .map(|(row, b)| Holder {
                handle: self.table.handle(row),
                tag: self.tags.get(b.tag).clone(),
                bytes: b.requested,
                allocation: b.since,
                pinned: b.pins > 0,
                next_use: None,
            })
            .collect();
        holders.sort_by_key(|h| (std::cmp::Reverse(h.bytes), h.allocation));
        holders
    }

    fn help(&self, r: &Request, capacity: u64, free: &Fragmentation) -> Vec<Help> {
        let in_use = self.statistics.bytes_in_use;
        let needed = in_use.saturating_add(r.rounded);
        let mut help = Vec::new();
        let room = capacity.saturating_sub(self.statistics.pool_bytes);
        if free.free_bytes + room >= r.rounded {
            let pinned: u64 = self
                .table
                .iter()
                .filter(|(_, b)| b.state == State::Live && b.pins > 0)
                .map(|(_, b)| b.bytes)
                .sum();
            // Without a limit the driver's initial capacity is unknown.
            if room >= r.rounded && capacity < UNLIMITED {
                help.push(Help::Others { bytes: room });
            }
            match &self.engine {
                Engine::Chain(_) if !self.settings.defragment => help.push(Help::Defragment),
                Engine::Chain(_) if pinned > 0 => help.push(Help::Unpin {
                    pinned_bytes: pinned,
                }),
                Engine::Chain(_) => help.push(Help::DefragmentRate),
                Engine::Buckets(_) | Engine::Direct if free.free_bytes > 0 => {
                    help.push(Help::Policy(Policy::Tlsf))
                }
                Engine::Buckets(_) | Engine::Direct => {}
            }
        }
        if needed > capacity {
            help.push(Help::Limit(needed - capacity));
            if needed > 0 && in_use > 0 {
                help.push(Help::Batch(capacity as f64 / needed as f64));
            }
        }
        help
    }
}

impl fmt::Display for OutOfMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Fragmentation {
            free_bytes,
            largest_bytes,
            by_largest,
            ..
        } = self.fragmentation;
        write!(f, "{} for {:?}", Bytes(self.requested), &*self.tag.name)?;
        place(f, &self.tag)?;
        write!(
            f,
            ": {} of {} are in use, {} reserved; free are {}, at most {} in one piece (fragmentation {:.0} %), policy {}",
            Bytes(self.in_use),
            Limit(self.capacity),
            Bytes(self.reserved),
            Bytes(free_bytes),
            Bytes(largest_bytes),
            by_largest * 100.0,
            self.policy
        )?;
        for (at, holder) in self.holders.iter().enumerate() {
            f.write_str(if at == 0 { "; largest: " } else { ", " })?;
            write!(f, "{:?} {}", &*holder.tag.name, Bytes(holder.bytes))?;
            place(f, &holder.tag)?;
            if let Some(next) = &holder.next_use {
                write!(f, " next used by {next}")?;
            }
        }
        if self.more_holders > 0 {
            write!(f, ", {} more", self.more_holders)?;
        }
        for (at, help) in self.help.iter().enumerate() {
            f.write_str(if at == 0 { "; remedies: " } else { ", or " })?;
            match help {
                Help::Limit(bytes) => write!(f, "a limit {} higher", Bytes(*bytes))?,
                Help::Defragment => f.write_str("letting the pool move blocks")?,
                Help::Unpin { pinned_bytes } => {
                    write!(f, "unpinning blocks ({} are pinned)", Bytes(*pinned_bytes))?
                }
                Help::DefragmentRate => f.write_str("a higher rate of moving blocks")?,
                Help::Policy(policy) => write!(f, "policy {policy}")?,
                Help::Batch(part) => write!(f, "{:.0} % of the batch", (part * 100.0).floor())?,
                Help::Others { bytes } => {
                    write!(f, "{} that the driver has given to others", Bytes(*bytes))?
                }
            }
        }
        Ok(())
    }
}

/// A limit of so many bytes counts as none: no device has them.
const UNLIMITED: u64 = 1 << 62;

/// The most that a pool may take.
struct Limit(u64);

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            UNLIMITED.. => f.write_str("all that the device gives"),
            bytes => Bytes(bytes).fmt(f),
        }
    }
}

impl std::error::Error for OutOfMemory {}

/// The layer and line of a tag, if known.
fn place(f: &mut fmt::Formatter<'_>, tag: &Tag) -> fmt::Result {
    match (&*tag.layer, tag.location) {
        ("", None) => Ok(()),
        ("", Some(at)) => write!(f, " ({}:{})", at.file(), at.line()),
        (layer, None) => write!(f, " (in {layer:?})"),
        (layer, Some(at)) => write!(f, " (in {layer:?}, {}:{})", at.file(), at.line()),
    }
}
