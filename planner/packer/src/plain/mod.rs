//! The plain core: items with a life, a size and an alignment, in one memory, without rules.
//!
//! `portfolio` decides which packer runs when. `skyline` and `greedy` place items in the orders of
//! `rank`; `orders` tries every order of a few items; `refine` lowers a packing within an effort or
//! a time, by `improve` and `exact` in turns. All of them work on `sections`, time divided into as
//! few sections as distinguish the lives, and find items by their lives in a tree (`lives`).

mod exact;
mod greedy;
mod improve;
mod lives;
mod orders;
pub(crate) mod portfolio;
mod rank;
mod refine;
pub(crate) mod sections;
mod skyline;
#[cfg(test)]
mod tests;

/// The result of a heuristic: the offset of each span and the height.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Found {
    pub(crate) offsets: Vec<u64>,
    pub(crate) height: u64,
}

/// Number `k`, from 1, of the sequence 1, 1, 2, 1, 1, 2, 4, … of Luby, Sinclair and Zuckerman
/// (1993), by which searches of unknown length are best restarted.
pub(crate) fn luby(mut k: u64) -> u64 {
    loop {
        let above = (k + 1).next_power_of_two();
        if above == k + 1 {
            return above / 2;
        }
        k -= above / 2 - 1;
    }
}
