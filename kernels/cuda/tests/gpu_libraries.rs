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
use slabwise_kernels::scalar::{ScalarOp, Value};
use slabwise_kernels::spec::{Inst, Spec};

/// The types of operands, each with whether products of f32 may be rounded to tf32.
const TYPES: [(DType, bool); 4] = [
    (DType::F32, false),
    (DType::F32, true),
    (DType::BF16, false),
    (DType::F16, false),
];

/// Runs every candidate for each spec on small integers, which all operands and sums in f32 represent
/// exactly, and passes the case's choices and their arguments after the run to `judge`. Returns the
/// number of candidates of slabwise, cuBLASLt and cuDNN.
fn each(
    specs: Vec<(&'static str, Spec, bool)>,
    judge: impl Fn(&Case, &[(String, Vec<Vec<u8>>)]),
) -> [usize; 3] {
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
        let mut results = Vec::new();
        for ((choice, lowered), got) in offered.iter().zip(&lowered).zip(on_device(&runs)) {
            let what = format!("{}, tf32 {tf32}, by {choice:?}", case.name);
            let got = got.unwrap_or_else(|e| panic!("{what}: {e}"));
            let direct = case.name.starts_with(DIRECT) && matches!(choice, Choice::Library(_));
            assert!(!direct || lowered.functions.is_empty(), "{what}");
            results.push((what, got));
            counts[match choice {
                Choice::Ranked | Choice::Own(_) => 0,
                Choice::Library(_) => 1,
                Choice::Cudnn(_) => 2,
            }] += 1;
        }
        judge(&case, &results);
    }
    eprintln!("{counts:?} candidates of slabwise, cuBLASLt and cuDNN");
    counts
}

/// The beginning of names of products that cuBLASLt finishes itself.
const DIRECT: &str = "directly ";

/// Fails unless every candidate for each spec computes the sums of the CPU.
fn check(specs: Vec<(&'static str, Spec, bool)>) -> [usize; 3] {
    each(specs, |case, results| {
        let (expected, _) = case.on_cpu();
        for (what, got) in results {
            compare(case, what, got, &expected, 1e-6);
        }
    })
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
        let add = |a, b| op(ScalarOp::Add, a, b);
        let biased = with(
            square(m, n, k),
            vec![typed(DType::F32, 0, &[0, 1])],
            vec![Inst::Load(1), add(0, 1)],
        );
        let added = with(
            square(m, n, k),
            vec![typed(DType::F32, 0, &[n, 1])],
            vec![Inst::Load(1), add(1, 0)],
        );
        let both = with(
            square(m, n, k),
            vec![typed(DType::F32, 0, &[0, 1]), typed(DType::F32, 0, &[n, 1])],
            vec![
                Inst::Const(Value::F32(0.5)),
                op(ScalarOp::Mul, 0, 1),
                Inst::Load(1),
                add(2, 3),
                Inst::Load(2),
                add(4, 5),
            ],
        );
        specs.extend([
            ("directly with a bias", biased, tf32),
            ("directly added to another", added, tf32),
            ("directly scaled, with both", both, tf32),
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
    assert!(own >= 2 * 10 * TYPES.len(), "{own} candidates of slabwise");
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
        for (name, shape) in shapes() {
            let shape = Shape { dtype, ..shape };
            specs.extend(KINDS.map(|kind| (name, shape.contiguous(kind), tf32)));
        }
    }
    let [own, ..] = check(specs);
    assert!(own >= 9 * types.len(), "{own} candidates of slabwise");
}

fn shapes() -> [(&'static str, Shape); 3] {
    [
        ("3×3", Shape::simple(4, 16, 24, 7, 3, 1)),
        ("1×1", Shape::simple(3, 16, 24, 8, 1, 0)),
        ("5×5", Shape::simple(2, 4, 16, 12, 5, 2)),
    ]
}

/// cuDNN stores the results of halves in their type; the sums are exact, and rounded once.
#[test]
fn every_candidate_for_a_convolution_of_halves_computes_the_same() {
    if !slabwise_cuda::emulator::gpu_usable() {
        return;
    }
    for (dtype, rounding) in [(DType::BF16, 1.0 / 128.0), (DType::F16, 1.0 / 1024.0)] {
        let mut specs = Vec::new();
        for (name, shape) in shapes() {
            let shape = Shape { dtype, ..shape };
            for kind in KINDS {
                let both = [shape.contiguous(kind), shape.channels_last(kind, true)];
                specs.extend(both.map(|mut spec| {
                    spec.operands[0].dtype = dtype;
                    (name, spec, false)
                }));
            }
        }
        let count = specs.len();
        let [own, ..] = each(specs, |case, results| {
            let [(_, expected), others @ ..] = results else {
                panic!("{} has no candidates", case.name)
            };
            for (what, got) in others {
                compare(case, what, got, expected, rounding);
            }
        });
        assert!(own >= count, "{own} candidates of slabwise");
    }
}
