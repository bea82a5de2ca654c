//! Matrix products: every kernel that could compute them, emulated, against sums in double precision and the CPU's kernels.

mod common;
mod products;

use common::{Case, Choices, TARGET};
use products::{check, check_epilogue, floats, matmul, strided};
use slabwise_cuda::Target;
use slabwise_cuda::emulator::available;

#[test]
fn every_tile_on_ragged_shapes() {
    if !available() {
        return;
    }
    let mut choices = Choices::new(1);
    let mut cases = Vec::new();
    for (m, n, k) in [(150, 140, 70), (64, 128, 32), (33, 257, 19)] {
        for (a, b) in [([k, 1], [n, 1]), ([1, m], [1, k]), ([1, m], [n, 1]), ([k, 1], [1, k])] {
            let spec = matmul(&[m, n], k, strided(0, &a), strided(0, &b));
            cases.push(Case::new(format!("{m}×{n}×{k} {a:?} {b:?}"), spec, &mut choices));
        }
    }
    check(&cases);
}
