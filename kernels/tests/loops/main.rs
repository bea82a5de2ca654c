//! Loop kernels against a reference that evaluates every point separately.

mod accuracy;
mod alike;
mod builder;
mod exact;
mod fixed;
mod joined;
mod operations;
mod reference;
mod support;
