//! What a packing can break, one variant per invariant.

use crate::pack::{DoesNotFit, ProblemError, Proof};

/// What is wrong with a packing. Items are named by index.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// The problem itself is broken.
    #[error("the problem cannot be packed: {0}")]
    Problem(#[from] ProblemError),
    /// A list of the packing has not one entry for each item or space.
    #[error("the packing has {found} {what}, not {expected}")]
    Length {
        /// Which list.
        what: &'static str,
        /// How long it should be.
        expected: usize,
        /// How long it is.
        found: usize,
    },
    /// An item lies at no multiple of its alignment.
    #[error("item {item} lies at {offset}, which is no multiple of its alignment {align}")]
    Misaligned {
        /// The index of the item.
        item: usize,
        /// Where it lies.
        offset: u64,
        /// Its alignment.
        align: u64,
    },
    /// An item ends beyond 64 bits.
    #[error("item {item} lies at {offset} and has {size} bytes: together more than 64 bits hold")]
    End {
        /// The index of the item.
        item: usize,
        /// Where it lies.
        offset: u64,
        /// Its size.
        size: u64,
    },
    /// An item is not where it must be.
    #[error("item {item} is fixed at {fixed}, but lies at {offset}")]
    Moved {
        /// The index of the item.
        item: usize,
        /// Its fixed offset.
        fixed: u64,
        /// Where it lies.
        offset: u64,
    },
    /// Two aliases have different offsets.
    #[error(
        "items {first} and {second} are aliases, but lie at {first_offset} and {second_offset}"
    )]
    AliasesApart {
        /// The index of an item.
        first: usize,
        /// Where it lies.
        first_offset: u64,
        /// The index of another item of the group.
        second: usize,
        /// Where that lies.
        second_offset: u64,
    },
    /// An item of a contiguous group does not begin where the one before it ends.
    #[error("item {second} lies at {offset}, but must begin where item {first} ends, at {end}")]
    NotContiguous {
        /// The index of the item before.
        first: usize,
        /// Where that ends.
        end: u64,
        /// The index of the item.
        second: usize,
        /// Where it lies.
        offset: u64,
    },
    /// A pair is computed in place that was not permitted, or is listed twice.
    #[error(
        "item {to} is computed in the place of item {from}, which is not permitted or said twice"
    )]
    PairUnknown {
        /// The index of the item that gives.
        from: usize,
        /// The index of the item that takes.
        to: usize,
    },
    /// The items of a pair computed in place lie at different offsets.
    #[error(
        "item {to} is computed in the place of item {from}, but they lie at {to_offset} and {from_offset}"
    )]
    PairApart {
        /// The index of the item that gives.
        from: usize,
        /// Where it lies.
        from_offset: u64,
        /// The index of the item that takes.
        to: usize,
        /// Where it lies.
        to_offset: u64,
    },
    /// An item gives its bytes to two others.
    #[error("item {from} gives its bytes to items {first} and {second}")]
    GivesTwice {
        /// The index of the item.
        from: usize,
        /// The index of an item that takes them.
        first: usize,
        /// The index of another.
        second: usize,
    },
    /// An item takes the bytes of two others.
    #[error("item {to} takes the bytes of items {first} and {second}")]
    TakesTwice {
        /// The index of the item.
        to: usize,
        /// The index of an item that gives them.
        first: usize,
        /// The index of another.
        second: usize,
    },
    /// An item that lives for one step takes bytes and gives them on.
    #[error(
        "item {item} lives for one step, but takes the bytes of item {from} and gives them to item {to}"
    )]
    PassedOn {
        /// The index of the item.
        item: usize,
        /// The index of the item that gives to it.
        from: usize,
        /// The index of the item that takes from it.
        to: usize,
    },
    /// Two items share bytes at the same time.
    #[error(
        "items {first} (bytes {} to {}) and {second} (bytes {} to {}) overlap at step {step} of space {space}",
        first_bytes.0, first_bytes.1, second_bytes.0, second_bytes.1
    )]
    Overlap {
        /// The index of an item, or of an alias of it.
        first: usize,
        /// What is needed of it then: first byte, and the byte after the last.
        first_bytes: (u64, u64),
        /// The index of another item, or of an alias of it.
        second: usize,
        /// What is needed of that.
        second_bytes: (u64, u64),
        /// The first step at which both need a byte.
        step: u64,
        /// The index of their space.
        space: usize,
    },
    /// The height of a space is wrong.
    #[error("space {space} is {expected} bytes high, not {found}")]
    Height {
        /// The index of the space.
        space: usize,
        /// The right number.
        expected: u64,
        /// What the packing says.
        found: u64,
    },
    /// The lower bound of a space is wrong.
    #[error("the lower bound of space {space} is {expected}, not {found}")]
    LowerBound {
        /// The index of the space.
        space: usize,
        /// The right number.
        expected: u64,
        /// What the packing says.
        found: u64,
    },
    /// The height or bound of the whole is not the sum of those of its spaces.
    #[error("the {what} of all spaces is {expected}, not {found}")]
    Sum {
        /// Which number.
        what: &'static str,
        /// The right one.
        expected: u64,
        /// What the packing says.
        found: u64,
    },
    /// The packing claims to be at its lower bound, but is above it, or the other way round.
    #[error(
        "the height is {height} and the lower bound {lower_bound}, which does not go with the proof {proof:?}"
    )]
    Proof {
        /// What is claimed.
        proof: Option<Proof>,
        /// The height of all spaces.
        height: u64,
        /// Their lower bound.
        lower_bound: u64,
    },
    /// A space is too small. All else is right.
    #[error(transparent)]
    Capacity(#[from] DoesNotFit),
}
