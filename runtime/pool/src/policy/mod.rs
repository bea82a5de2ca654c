//! The search of memory for a request: lists of free blocks, and which blocks each holds.

pub(crate) mod bfc;
pub(crate) mod bucket;
pub(crate) mod chain;
pub(crate) mod tlsf;

use super::block::{Block, Table};

/// Free blocks of chains, in the order that a policy looks for them.
#[derive(Debug)]
pub(crate) enum Bins {
    Tlsf(tlsf::Tlsf),
    Bfc(bfc::Bfc),
}

impl Bins {
    pub fn insert(&mut self, table: &mut Table, index: u32) {
        match self {
            Bins::Tlsf(bins) => bins.insert(table, index),
            Bins::Bfc(bins) => bins.insert(table, index),
        }
    }

    pub fn remove(&mut self, table: &mut Table, index: u32) {
        match self {
            Bins::Tlsf(bins) => bins.remove(table, index),
            Bins::Bfc(bins) => bins.remove(table, index),
        }
    }

    /// A free block of at least so many bytes that `usable` allows, of those the policy finds in
    /// bounded time; with `thorough`, any there is.
    pub fn find(
        &self,
        table: &Table,
        bytes: u64,
        thorough: bool,
        usable: impl Fn(&Block) -> bool,
    ) -> Option<u32> {
        match self {
            Bins::Tlsf(bins) => bins.find(table, bytes, thorough, usable),
            Bins::Bfc(bins) => bins.find(table, bytes, usable),
        }
    }

    /// Whether the rest that a request leaves of a block is split off.
    pub fn splits(&self, block: u64, bytes: u64) -> bool {
        match self {
            Bins::Tlsf(_) => block > bytes,
            Bins::Bfc(_) => bfc::splits(block, bytes),
        }
    }
}
