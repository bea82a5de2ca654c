//! Sizes that a run decides, and rows beside any number of others.

use slabwise_kernels::dtype::DType;
use slabwise_kernels::size::{Env, Size, Symbol};
use slabwise_kernels::spec::Body;

use super::common::*;
use super::{plain, stored};

/// One column that a symbol stands for: the operands are swapped then, and the right one is read in
/// place only if it is in single precision.
#[test]
fn one_column_of_halves_below_the_bound() {
    let (m, k) = (1, 40);
    let mut spec = plain(
        &[m, 4],
        k,
        operand(0, &[k as i64, 1]),
        operand(0, &[1, k as i64]),
    );
    let symbol = Size::symbol(Symbol(0));
    (spec.dims[1], spec.operands[0].strides[0]) = (symbol, symbol);
    let Body::Matmul(body) = &mut spec.body else {
        unreachable!()
    };
    body.b.dtype = DType::BF16;
    let ones = stored(DType::BF16, &vec![1.0; 4 * k]).0;
    let env = |n: u32| Env([n, 0, 0, 0, 0, 0, 0, 0]);
    for n in [1, 2, 4] {
        let args = [vec![1.0; m * k], ones.clone(), vec![f32::NAN; 4]];
        for (isa, results) in run_all(&spec, &env(4), &env(n), &teams(), &args) {
            let got = &results[2][..n as usize];
            assert!(got.iter().all(|&y| y == k as f32), "{isa}, {n}: {got:?}");
        }
    }
}

/// A row has the same bits in a product of any number of rows, also where the contracted axis is so
/// long that it is split in other products.
#[test]
fn a_row_has_the_same_bits_beside_any_number_of_others() {
    let mut random = Random(31);
    for (n, k, counts) in [(512, 4096, [1, 168, 169]), (10, 8192, [3, 169, 400])] {
        let (right, row) = (random.floats(k * n), random.floats(k));
        let first: Vec<_> = counts
            .into_iter()
            .map(|m| {
                let left = operand(0, &[k as i64, 1]);
                let spec = plain(&[m, n], k, left, operand(0, &[n as i64, 1]));
                let args = [row.repeat(m), right.clone(), vec![f32::NAN; m * n]];
                let env = Env::default();
                let results = run_all(&spec, &env, &env, &teams()[..1], &args);
                let rows = results
                    .into_iter()
                    .map(|(_, result)| result[2][..n].to_vec());
                rows.collect::<Vec<_>>()
            })
            .collect();
        assert!(first.windows(2).all(|w| w[0] == w[1]), "n {n} k {k}");
    }
}
