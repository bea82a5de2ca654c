//! A program whose buffers overlap, to be placed in a pool.

use ndarray::{Array1, Array2};
use slabwise::memory::MemoryConfig;
use slabwise::prelude::*;

/// A few products of `rows` × `rows` with overlapping lifetimes.
pub fn program(session: &mut Session, rows: usize) -> Program<1> {
    let trace = Trace::inference().named("products");
    let x = trace.input("x", F32, (rows, rows));
    let a = x.matmul(x);
    let b = a.matmul(x);
    let c = b.matmul(a);
    session
        .compile(&trace, [(a + b * c).sum()])
        .expect("compiles")
}

/// A session whose buffers are in a pool.
pub fn session(device: Device, config: &MemoryConfig) -> Session {
    Session::new(device, Params::seeded(0))
        .expect("a session")
        .with_memory(config)
        .expect("settings that make sense")
}

/// The program's input.
pub fn input(rows: usize) -> Array2<f32> {
    Array1::linspace(-0.1, 0.1, rows * rows)
        .into_shape_with_order((rows, rows))
        .expect("as many numbers")
}
