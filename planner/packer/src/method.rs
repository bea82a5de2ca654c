//! The methods of packing, as a result names them.

use std::fmt;

/// The method that made a packing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Method {
    /// Every item on its own bytes.
    Apart,
    /// Each item at the lowest offset free for its whole life.
    FirstFit(Rank),
    /// Each item in the smallest gap free for its whole life.
    BestFit(Rank),
    /// The lowest valley gets the best item inside it.
    Skyline(Rank),
    /// From the offsets in [`Problem::start`](crate::Problem::start).
    Start,
    /// Each rigid block at its lowest free offset, or in the place of another.
    Blocks(Rank),
    /// Rigid blocks or a skyline, in an order improved step by step.
    SqueakyWheel,
    /// The exact search.
    Search,
}

impl fmt::Display for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Method::Apart => f.write_str("without reuse"),
            Method::FirstFit(rank) => write!(f, "first fit by {rank}"),
            Method::BestFit(rank) => write!(f, "best fit by {rank}"),
            Method::Skyline(rank) => write!(f, "skyline by {rank}"),
            Method::Start => f.write_str("given start"),
            Method::Blocks(rank) => write!(f, "blocks by {rank}"),
            Method::SqueakyWheel => f.write_str("squeaky wheel"),
            Method::Search => f.write_str("exact search"),
        }
    }
}

/// The criteria by which items come earlier: larger numbers first, ties by the next criterion, then
/// by area, width, total, start and index.
///
/// *Width* is the length of an item's life, *area* its width times its size, *total* the largest
/// sum of live sizes during its life. The combinations of width, area and total are those of
/// Moffitt, "MiniMalloc" (ASPLOS 2023).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Rank {
    /// Size, width.
    SizeWidth,
    /// Area.
    Area,
    /// Total, area, width.
    TotalAreaWidth,
    /// Total, width, area.
    TotalWidthArea,
    /// Total, size: the items of the fullest instant first ("greedy by breadth").
    TotalSize,
    /// Width, area, total.
    WidthAreaTotal,
    /// Start, earlier ones first, then size: the order in which a run allocates them.
    Start,
}

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Rank::SizeWidth => "size",
            Rank::Area => "area",
            Rank::TotalAreaWidth => "total, area, width",
            Rank::TotalWidthArea => "total, width, area",
            Rank::TotalSize => "total, size",
            Rank::WidthAreaTotal => "width, area, total",
            Rank::Start => "start",
        })
    }
}
