//! Loop kernels against a reference that evaluates every point on its own.

mod exact;
mod fixed;
mod reference;
mod support;
