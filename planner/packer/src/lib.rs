#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod check;
pub mod csv;
mod error;
pub mod files;
pub mod generate;
mod lifetime;
mod method;
mod pack;
mod packing;
mod plain;
mod problem;
pub mod random;
mod rects;
mod rules;
mod shorten;

pub use check::{Violation, check};
pub use error::ProblemError;
pub use lifetime::Lifetime;
pub use method::{Method, Rank};
pub use packing::{DoesNotFit, Extent, Packing, Proof};
pub use plain::portfolio::Limits;
pub use problem::{Gap, InPlace, Item, Placement, Problem, Space, Window};
pub use rects::Rect;
pub use shorten::{brief, shortened, table, widest};
