//! Loop kernels against a reference that evaluates every point on its own.

mod accuracy;
mod alike;
mod builder;
mod exact;
mod fixed;
mod operations;
mod reference;
mod support;
