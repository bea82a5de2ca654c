//! The anchors that move values around: pooling, gather, scatter and index checks, against plain
//! loops over random geometries, layouts and sizes below the bound.

mod choosing;
mod custom;
mod harness;
mod indexing;
mod pooling;
mod writes;
