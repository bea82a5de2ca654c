//! Violations of the rules of a packing, one variant per invariant.

use crate::error::ProblemError;
use crate::packing::{DoesNotFit, Proof};

/// A violation found by [`check`](super::check). Items are named by index.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// The problem itself is broken.
    #[error("the problem cannot be packed: {0}")]
    Problem(#[from] ProblemError),
    /// A list of the packing does not have one entry per item or space.
    #[error("the packing has {found} {what}, not {expected}")]
    Length {
        /// The name of the list.
        what: &'static str,
        /// Its expected length.
        expected: usize,
        /// Its actual length.
        found: usize,
    },
    /// The offset of an item is not a multiple of its alignment.
    #[error("item {item} lies at {offset}, which is not a multiple of its alignment {align}")]
    Misaligned {
        /// The index of the item.
        item: usize,
        /// Its offset.
        offset: u64,
        /// Its alignment.
        align: u64,
    },
    /// An item ends beyond 64 bits.
    #[error("item {item} lies at {offset} and has {size} bytes: together more than 64 bits hold")]
    End {
        /// The index of the item.
        item: usize,
        /// Its offset.
        offset: u64,
        /// Its size.
        size: u64,
    },
    /// An item is not at its fixed offset.
    #[error("item {item} is fixed at {fixed}, but lies at {offset}")]
    Moved {
        /// The index of the item.
        item: usize,
        /// Its fixed offset.
        fixed: u64,
        /// Its offset.
        offset: u64,
    },
    /// Two aliases have different offsets.
    #[error(
        "items {first} and {second} are aliases, but lie at {first_offset} and {second_offset}"
    )]
    AliasesApart {
        /// The index of an item.
        first: usize,
        /// Its offset.
        first_offset: u64,
        /// The index of another item of the group.
        second: usize,
        /// The offset of that item.
        second_offset: u64,
    },
    /// An item of a contiguous group does not begin at the end of the one before it.
    #[error("item {second} lies at {offset}, but must begin where item {first} ends, at {end}")]
    NotContiguous {
        /// The index of the item before.
        first: usize,
        /// The end of that item.
        end: u64,
        /// The index of the item.
        second: usize,
        /// Its offset.
        offset: u64,
    },
    /// A pair is computed in place that is not permitted, or is listed twice.
    #[error(
        "item {to} is computed in the place of item {from}, which is not permitted, or is listed twice"
    )]
    PairUnknown {
        /// The index of the donor.
        from: usize,
        /// The index of the recipient.
        to: usize,
    },
    /// The items of a pair computed in place lie at different offsets.
    #[error(
        "item {to} is computed in the place of item {from}, but they lie at {to_offset} and {from_offset}"
    )]
    PairApart {
        /// The index of the donor.
        from: usize,
        /// Its offset.
        from_offset: u64,
        /// The index of the recipient.
        to: usize,
        /// Its offset.
        to_offset: u64,
    },
    /// An item donates its bytes to two others.
    #[error("item {from} gives its bytes to items {first} and {second}")]
    GivesTwice {
        /// The index of the item.
        from: usize,
        /// The index of one recipient.
        first: usize,
        /// The index of the other recipient.
        second: usize,
    },
    /// An item receives the bytes of two others.
    #[error("item {to} takes the bytes of items {first} and {second}")]
    TakesTwice {
        /// The index of the item.
        to: usize,
        /// The index of one donor.
        first: usize,
        /// The index of the other donor.
        second: usize,
    },
    /// An item that lives for a single step both receives and donates bytes.
    #[error(
        "item {item} lives for one step, but takes the bytes of item {from} and gives them to item {to}"
    )]
    PassedOn {
        /// The index of the item.
        item: usize,
        /// The index of its donor.
        from: usize,
        /// The index of its recipient.
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
        /// The bytes needed of it at that step: the first, and the one after the last.
        first_bytes: (u64, u64),
        /// The index of another item, or of an alias of it.
        second: usize,
        /// The bytes needed of that item.
        second_bytes: (u64, u64),
        /// The first step at which both need a byte.
        step: u64,
        /// The index of their space.
        space: usize,
    },
    /// The reported height of a space is wrong.
    #[error("space {space} is {expected} bytes high, not {found}")]
    Height {
        /// The index of the space.
        space: usize,
        /// The right number.
        expected: u64,
        /// The reported number.
        found: u64,
    },
    /// The reported lower bound of a space is wrong.
    #[error("the lower bound of space {space} is {expected}, not {found}")]
    LowerBound {
        /// The index of the space.
        space: usize,
        /// The right number.
        expected: u64,
        /// The reported number.
        found: u64,
    },
    /// The total height or bound is not the sum of those of the spaces.
    #[error("the {what} of all spaces is {expected}, not {found}")]
    Sum {
        /// The name of the number.
        what: &'static str,
        /// The right number.
        expected: u64,
        /// The reported number.
        found: u64,
    },
    /// The packing claims to be at its lower bound, but is above it, or the other way round.
    #[error(
        "the height is {height} and the lower bound {lower_bound}, which contradicts the proof {proof:?}"
    )]
    Proof {
        /// The claimed proof.
        proof: Option<Proof>,
        /// The height of all spaces.
        height: u64,
        /// Their lower bound.
        lower_bound: u64,
    },
    /// A space is too small. The packing is valid otherwise.
    #[error(transparent)]
    Capacity(#[from] DoesNotFit),
}
