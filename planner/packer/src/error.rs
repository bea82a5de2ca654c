//! The reasons why a problem cannot be packed.

/// Why a problem cannot be packed. Items are named by index.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProblemError {
    /// An alignment is not a power of two.
    #[error("item {item} has alignment {align}, which is not a power of two")]
    Alignment {
        /// The index of the item.
        item: usize,
        /// Its alignment.
        align: u64,
    },
    /// All sizes together, in whole units of the coarsest alignment and above the highest fixed
    /// offset, exceed 64 bits.
    #[error("the items up to {item} together are more bytes than 64 bits hold")]
    TotalSize {
        /// The index of the item at which the sum overflows.
        item: usize,
    },
    /// A constraint names an item that does not exist.
    #[error("`{list}` names item {item}, but there are only {count}")]
    NoSuchItem {
        /// The list of the problem.
        list: &'static str,
        /// The index.
        item: usize,
        /// The number of items.
        count: usize,
    },
    /// An item is in two groups of one kind, in two spaces, or has two offsets.
    #[error("`{list}` names item {item} twice")]
    NamedTwice {
        /// The list of the problem.
        list: &'static str,
        /// The index of the item.
        item: usize,
    },
    /// A fixed offset, its own or one that follows from that of another item of its group, is not
    /// aligned.
    #[error("item {item} must lie at {offset}, which is not a multiple of its alignment {align}")]
    FixedMisaligned {
        /// The index of the item.
        item: usize,
        /// The required offset.
        offset: u64,
        /// Its alignment.
        align: u64,
    },
    /// An item with a fixed offset would end beyond 64 bits.
    #[error(
        "item {item} is fixed at {offset} and has {size} bytes: together more than 64 bits hold"
    )]
    FixedEnd {
        /// The index of the item.
        item: usize,
        /// Its fixed offset.
        offset: u64,
        /// Its size.
        size: u64,
    },
    /// Two items whose offsets are given, directly or by their groups, would share bytes.
    #[error(
        "items {first} and {second} would share bytes at {first_offset} and {second_offset}, where they must lie, at step {step}"
    )]
    FixedOverlap {
        /// The index of an item.
        first: usize,
        /// Its required offset.
        first_offset: u64,
        /// The index of another item.
        second: usize,
        /// The required offset of that item.
        second_offset: u64,
        /// The time at which both need the bytes.
        step: u64,
    },
    /// A gap ends before it begins.
    #[error("item {item} has a gap from {start} to {end}, which ends before it begins")]
    Gap {
        /// The index of the item.
        item: usize,
        /// The start of the gap.
        start: u64,
        /// The end of the gap.
        end: u64,
    },
    /// The window of a gap is not part of the item.
    #[error("item {item} has a gap that leaves it the bytes from {low} to {high}, of {size}")]
    Window {
        /// The index of the item.
        item: usize,
        /// The first byte of the window.
        low: u64,
        /// The byte after its last one.
        high: u64,
        /// The size of the item.
        size: u64,
    },
    /// A permitted pair is given twice.
    #[error("`in_place` has the pair from item {from} to item {to} twice")]
    PairTwice {
        /// The index of the donor.
        from: usize,
        /// The index of the recipient.
        to: usize,
    },
    /// The second item of a permitted pair does not begin at the last step of the first.
    #[error(
        "item {to} begins at step {start}, which is not the last step of item {from} (it ends before {end}): it cannot take its place"
    )]
    PairNeverMeets {
        /// The index of the donor.
        from: usize,
        /// The index of the recipient.
        to: usize,
        /// The end of the donor's life.
        end: u64,
        /// The start of the recipient's life.
        start: u64,
    },
    /// The items of a permitted pair are tied to each other already, by groups.
    #[error(
        "items {from} and {to} are tied together by groups, so they cannot be a permitted pair"
    )]
    PairTied {
        /// The index of the donor.
        from: usize,
        /// The index of the recipient.
        to: usize,
    },
    /// Items that belong together are in different memories.
    #[error(
        "items {first} and {second} belong together (`{list}`), but are in the spaces {first_space} and {second_space}"
    )]
    AcrossSpaces {
        /// The list of the problem that ties them.
        list: &'static str,
        /// The index of an item.
        first: usize,
        /// Its space.
        first_space: usize,
        /// The index of another item.
        second: usize,
        /// Its space.
        second_space: usize,
    },
    /// Groups and fixed offsets require two distances between the same two items.
    #[error("item {second} must lie {asked} bytes above item {first}, and also {otherwise}")]
    TwoDistances {
        /// The index of an item.
        first: usize,
        /// The index of another item.
        second: usize,
        /// One required distance.
        asked: i128,
        /// The other.
        otherwise: i128,
    },
    /// Groups put two items on the same bytes at the same time, although they are not aliases.
    #[error("groups put items {first} and {second} on the same bytes at step {step}")]
    TiedOverlap {
        /// The index of an item.
        first: usize,
        /// The index of another item.
        second: usize,
        /// The time at which both need the bytes.
        step: u64,
    },
    /// The distance between two items that are tied together leaves no offset that is aligned for
    /// both.
    #[error(
        "item {second} lies {distance} bytes above item {first}; no offset suits their alignments, {second_align} and {first_align}"
    )]
    TiedMisaligned {
        /// The index of an item.
        first: usize,
        /// Its alignment.
        first_align: u64,
        /// The index of another item.
        second: usize,
        /// Its alignment.
        second_align: u64,
        /// The distance of the second above the first.
        distance: i128,
    },
    /// A fixed offset would put an item of the same group below 0.
    #[error(
        "item {fixed} is fixed at {offset}, which leaves no room for item {item} {below} bytes below it"
    )]
    BelowZero {
        /// The index of the fixed item.
        fixed: usize,
        /// Its offset.
        offset: u64,
        /// The index of the other item.
        item: usize,
        /// The distance of that item below the fixed one.
        below: u128,
    },
}

impl ProblemError {
    /// The items that it names.
    pub fn items(&self) -> Vec<usize> {
        match *self {
            ProblemError::Alignment { item, .. }
            | ProblemError::TotalSize { item }
            | ProblemError::NoSuchItem { item, .. }
            | ProblemError::NamedTwice { item, .. }
            | ProblemError::FixedMisaligned { item, .. }
            | ProblemError::FixedEnd { item, .. }
            | ProblemError::Gap { item, .. }
            | ProblemError::Window { item, .. } => vec![item],
            ProblemError::PairTwice { from, to }
            | ProblemError::PairNeverMeets { from, to, .. }
            | ProblemError::PairTied { from, to } => {
                vec![from, to]
            }
            ProblemError::FixedOverlap { first, second, .. }
            | ProblemError::AcrossSpaces { first, second, .. }
            | ProblemError::TwoDistances { first, second, .. }
            | ProblemError::TiedOverlap { first, second, .. }
            | ProblemError::TiedMisaligned { first, second, .. } => vec![first, second],
            ProblemError::BelowZero { fixed, item, .. } => vec![fixed, item],
        }
    }
}
