//! One algorithm of a library for specs of one product, over a driver without a device.

mod common;
mod products;

use products::library::{
    algorithm, check, installed, on_small_integers, op, picks_in, target, tuner, with,
};
use products::{matmul, strided};
use slabwise_cuda::{Choice, Target};
use slabwise_kernels::scalar::ScalarOp;
use slabwise_kernels::size::Env;
use slabwise_kernels::spec::Spec;

/// A product whose result begins so many elements after its argument.
fn shifted(offset: i64) -> Spec {
    let mut spec = matmul(&[48, 40], 64, strided(0, &[64, 1]), strided(0, &[40, 1]));
    spec.operands[0] = strided(offset, &[40, 1]);
    spec
}

/// An algorithm that needs aligned operands is chosen only if those of all specs are.
#[test]
fn an_algorithm_suits_the_alignment_of_every_spec() {
    let Some(driver) = installed() else { return };
    driver.cost("cublaslt_24", 10_000);
    driver.cost("cublaslt_21", 20_000);
    // The epilogue.
    driver.cost("gemm_parts", 1_000);
    let relu = with(shifted(1), vec![], vec![op(ScalarOp::Relu, 0, 0)]);
    // With whether the library writes the result itself.
    let specs = [
        ("plain", shifted(0), true),
        ("behind one element", shifted(1), true),
        ("with an epilogue", relu, false),
        ("behind eight elements", shifted(8), true),
    ];
    for (members, chosen) in [
        (&[0, 1][..], 21),
        (&[1, 0], 21),
        (&[2, 1], 21),
        (&[0, 2, 3], 24),
    ] {
        driver.forget_picks();
        let members = || members.iter().map(|&at| specs[at].clone());
        let list: Vec<_> = members().collect();
        let wanted: Vec<(&Spec, Target)> =
            list.iter().map(|(_, spec, _)| (spec, target())).collect();
        let folder = tempfile::tempdir().expect("a folder");
        let choices = tuner(picks_in(&folder)).choose(&wanted, &Env::default());
        let expected = Choice::Library(algorithm(chosen, 0));
        assert_eq!(choices, vec![expected.clone(); list.len()]);
        check(&on_small_integers(members(), 6), &[expected], 1e-6);
    }
}
