//! MNIST.
fn main() {}
