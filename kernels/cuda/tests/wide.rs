//! Operands of more elements than a number of 32 bits counts.

mod common;
mod products;

use common::{NO_FAULT, TARGET, words};
use products::{matmul, typed};
use slabwise_cuda::candidates;
use slabwise_cuda::emulator::{Check, Emulator, Order, available, gpu_required};
use slabwise_kernels::dtype::DType;
use slabwise_kernels::size::Env;

/// Elements from one row of an operand to the next.
const FAR: usize = 1 << 31;

/// Rows of either operand are 2³¹ elements apart. Of the memory between them nothing is touched.
#[test]
fn products_of_rows_far_apart() {
    if gpu_required() || !available() {
        return;
    }
    const K: usize = 40;
    let one = half::bf16::from_f32(1.0).to_bits();
    let far = || {
        let mut rows = vec![0u16; FAR + K];
        for (row, start) in [0, FAR].into_iter().enumerate() {
            for (k, x) in rows[start..][..K].iter_mut().enumerate() {
                *x = half::bf16::from_f32((row * 3 + k % 4) as f32).to_bits();
            }
        }
        rows
    };
    let sums = [0, 1].map(|row| (0..K).map(|k| (row * 3 + k % 4) as f32).sum::<f32>());
    let mut of_far = far();
    for is_left in [true, false] {
        // The other operand is of ones, whose rows are close.
        let dims = if is_left { [2, 24] } else { [24, 2] };
        let rows = typed(DType::BF16, 0, &[FAR, 1]);
        let columns = typed(DType::BF16, 0, &[1, FAR]);
        let close = |strides: &[usize]| typed(DType::BF16, 0, strides);
        let spec = match is_left {
            true => matmul(&dims, K, rows, close(&[1, K])),
            false => matmul(&dims, K, close(&[K, 1]), columns),
        };
        let mut ones = vec![one; 24 * K];
        let all = candidates(&spec, &Env::default(), &TARGET).expect("products");
        assert!(all.len() > 3, "{} candidates", all.len());
        let functions: Vec<_> = all
            .iter()
            .flat_map(|c| c.lowered.functions.clone())
            .collect();
        let emulator = Emulator::new(&functions, Check::Nothing).unwrap_or_else(|e| panic!("{e}"));
        for candidate in &all {
            let lowered = &candidate.lowered;
            let mut result = vec![f32::NAN; 48];
            let mut workspace = vec![0u8; lowered.workspace as usize];
            let mut counters = vec![0u32; lowered.counters];
            let mut record = [NO_FAULT; 2];
            let (far, ones) = (of_far.as_mut_ptr() as u64, ones.as_mut_ptr() as u64);
            let (left, right) = if is_left { (far, ones) } else { (ones, far) };
            let arguments = [left, right, result.as_mut_ptr() as u64];
            let others = [
                workspace.as_mut_ptr() as u64,
                counters.as_mut_ptr() as u64,
                record.as_mut_ptr() as u64,
            ];
            for dispatch in lowered.launches(&Env::default()) {
                let words = words(&dispatch, |a| arguments[a], others);
                let function = &lowered.functions[dispatch.function];
                // SAFETY: the words are addresses of memory of this test, as large as the spec says;
                // a kernel that accesses other memory fails it.
                unsafe { emulator.launch(function, &dispatch, &words, Order::Forward) }
                    .unwrap_or_else(|e| panic!("{}: {e}", candidate.name));
            }
            for (at, &x) in result.iter().enumerate() {
                let row = if is_left { at / 24 } else { at % 2 };
                assert_eq!(x, sums[row], "{}: {at}", candidate.name);
            }
        }
    }
}
