//! Products and convolutions by each kernel that the tuner would time on a GPU, where there is one:
//! those of slabwise, of cuBLASLt and of cuDNN compute the same sums. Without a GPU these print a
//! message and pass.

mod common;
mod products;

use common::{Case, compare};
use products::convolution::{KINDS, Shape};
use products::library::{on_device, on_small_integers, op, picks_in, target, tuner, with};
use products::{matmul, typed};
use slabwise_cuda::{Choice, Target, Tuner, lower_as};
use slabwise_kernels::dtype::DType;
use slabwise_kernels::scalar::ScalarOp;
use slabwise_kernels::spec::{Inst, Spec};

/// The types of operands, each with whether products of f32 may be rounded to tf32.
const TYPES: [(DType, bool); 4] = [
    (DType::F32, false),
    (DType::F32, true),
    (DType::BF16, false),
    (DType::F16, false),
];

/// Fails unless every candidate for each spec computes the sums of small integers, which all
/// operands and sums represent exactly. Returns the number of candidates of slabwise, cuBLASLt and
/// cuDNN.
fn check(specs: Vec<(&'static str, Spec, bool)>) -> [usize; 3] {
    let folder = tempfile::tempdir().expect("a folder");
    let tuner = Tuner {
        worth: 1,
        ..tuner(picks_in(&folder))
    };
    let mut counts = [0; 3];
    for (mut case, tf32) in on_small_integers(specs, 17) {
        case.target = Target { tf32, ..target() };
        let offered = tuner
            .offered(&case.spec, &case.target, &case.bounds)
            .unwrap_or_else(|e| panic!("{}: {e}", case.name));
        let lowered: Vec<_> = offered
            .iter()
            .map(|choice| lower_as(&case.spec, &case.bounds, &case.target, choice))
            .map(|lowered| lowered.expect("it has a source"))
            .collect();
        let runs: Vec<(&Case, _)> = lowered.iter().map(|lowered| (&case, lowered)).collect();
        let (expected, _) = case.on_cpu();
        for (choice, got) in offered.iter().zip(on_device(&runs)) {
            let what = format!("{}, tf32 {tf32}, by {choice:?}", case.name);
            let got = got.unwrap_or_else(|e| panic!("{what}: {e}"));
            compare(&case, &what, &got, &expected, 1e-6);
            counts[match choice {
                Choice::Ranked | Choice::Own(_) => 0,
                Choice::Library(_) => 1,
                Choice::Cudnn(_) => 2,
            }] += 1;
        }
    }
    eprintln!("{counts:?} candidates of slabwise, cuBLASLt and cuDNN");
    counts
}

#[test]
fn every_candidate_for_a_product_computes_its_sums() {
    if !slabwise_cuda::emulator::gpu_usable() {
        return;
    }
    let mut specs = Vec::new();
    for (dtype, tf32) in TYPES {
        let square = |m: usize, n: usize, k: usize| {
            let (a, b) = (typed(dtype, 0, &[k, 1]), typed(dtype, 0, &[n, 1]));
            matmul(&[m, n], k, a, b)
        };
        let (m, n, k) = (96, 80, 64);
        let turned = matmul(
            &[m, n],
            k,
            typed(dtype, 0, &[1, m]),
            typed(dtype, 0, &[1, k]),
        );
        let several = matmul(
            &[3, m, n],
            k,
            typed(dtype, 0, &[m * k, k, 1]),
            typed(dtype, 0, &[k * n, n, 1]),
        );
        // A bias and relu, which follow a library's product.
        let followed = with(
            square(m, n, k),
            vec![typed(DType::F32, 0, &[0, 1])],
            vec![
                Inst::Load(1),
                op(ScalarOp::Add, 0, 1),
                op(ScalarOp::Relu, 2, 0),
            ],
        );
        specs.extend([
            ("rows", square(m, n, k), tf32),
            ("columns", turned, tf32),
            ("several", several, tf32),
            ("ragged", square(33, 47, 29), tf32),
            ("few rows", square(2, 130, 256), tf32),
            // Split sums.
            ("long", square(16, 24, 2048), tf32),
            ("a bias and relu", followed, tf32),
        ]);
    }
    let [own, ..] = check(specs);
    assert!(own >= 2 * 7 * TYPES.len(), "{own} candidates of slabwise");
}

#[test]
fn every_candidate_for_a_convolution_computes_its_sums() {
    if !slabwise_cuda::emulator::gpu_usable() {
        return;
    }
    let mut specs = Vec::new();
    // The CPU convolves no halves.
    let types = &TYPES[..2];
    for &(dtype, tf32) in types {
        // The CPU sums those with few channels or positions term by term, and so exactly.
        let shapes = [
            ("3×3", Shape::simple(4, 16, 24, 7, 3, 1)),
            ("1×1", Shape::simple(3, 16, 24, 8, 1, 0)),
            ("5×5", Shape::simple(2, 4, 16, 12, 5, 2)),
        ];
        for (name, shape) in shapes {
            let shape = Shape { dtype, ..shape };
            specs.extend(KINDS.map(|kind| (name, shape.contiguous(kind), tf32)));
        }
    }
    let [own, ..] = check(specs);
    assert!(own >= 9 * types.len(), "{own} candidates of slabwise");
}
