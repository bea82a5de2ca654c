//! Random programs over the public interface of slabwise: drawn, compared, shrunk, printed as
//! tests.
//!
//! A [`case::Case`] is plain data: one or two programs as lists of statements, the lengths and data
//! of their runs. [`draw`] makes one from a seed, [`build`] writes its programs onto traces, and
//! [`judge`](judge::judge) runs it by default and in a few other ways ([`setup::Setup`]):
//! optimisations switched off, planned or dynamic, threads, budgets, offload, free or bounded
//! dimensions, resident and donated inputs, programs compiled anew, sessions saved and loaded.
//! Results must have the same bits, or agree within rounding where the documentation of an option
//! says so, and agree with the reference evaluator. Cases that fail are shrunk
//! ([`shrink`](shrink::shrink)) and printed as tests ([`print::test`]).
//!
//! ```text
//! cargo run --release -p slabwise-random-programs -- fuzz --seconds 60 --seed 1 --threads 2
//! cargo run --release -p slabwise-random-programs -- replay 12345
//! ```
//!
//! The case of a seed is the same on every machine, with any number of threads. With
//! AddressSanitizer, on a stable compiler:
//!
//! ```text
//! RUSTC_BOOTSTRAP=1 RUSTFLAGS=-Zsanitizer=address cargo run --release --target x86_64-unknown-linux-gnu \
//!     -p slabwise-random-programs -- fuzz --seconds 3600 --seed 1 --threads 2 --trail under-way.txt
//! ```
//!
//! The file of `--trail` holds the seeds of the cases under way, among them the case that ended the
//! process.
#![forbid(unsafe_code)]

pub mod axis;
pub mod build;
pub mod case;
pub mod draw;
pub mod facts;
pub mod hunt;
pub mod indexing;
pub mod judge;
pub mod method;
mod method_rules;
mod numbers;
pub mod print;
pub mod rng;
mod rules;
pub mod run;
pub mod scans;
pub mod setup;
mod shapes;
pub mod shrink;
