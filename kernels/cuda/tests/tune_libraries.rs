//! The choice of kernels where a library does not start, over a driver without a device.

mod common;
mod products;

use std::sync::Arc;

use products::library::{LIMITS, algorithm, installed, picks_in, target, tuner};
use products::{matmul, strided};
use slabwise_cuda::{Choice, Device, Picks};
use slabwise_kernels::size::Env;
use slabwise_kernels::spec::Spec;

/// A product that is timed.
fn product() -> Spec {
    matmul(&[48, 40], 64, strided(0, &[64, 1]), strided(0, &[40, 1]))
}

/// The choice for one spec.
fn choose(picks: Arc<Picks>, spec: &Spec) -> Choice {
    tuner(picks)
        .choose(&[(spec, target())], &Env::default())
        .remove(0)
}

/// Without a usable library the choice is that of the process in which it failed first; it is not
/// that of processes in which the library works.
#[test]
fn a_library_that_does_not_start_is_not_waited_for() {
    let Some(driver) = installed() else { return };
    let (spec, folder) = (product(), tempfile::tempdir().expect("a folder"));
    driver.cost("cublaslt_21", 10_000);
    driver.set("library", 0);
    let first = choose(picks_in(&folder), &spec);
    assert!(matches!(first, Choice::Own(_)), "{first:?}");
    let launched = driver.get("launches");
    assert_eq!(choose(picks_in(&folder), &spec), first);
    assert_eq!(driver.get("launches"), launched, "it is known");
    driver.set("library", 1);
    let library = Choice::Library(algorithm(21, 0));
    assert_eq!(choose(picks_in(&folder), &spec), library);
    driver.set("library", 0);
    assert_eq!(choose(picks_in(&folder), &spec), first);
}

/// A library that could not be opened once is opened later, while the device stays open.
#[test]
fn a_library_that_did_not_start_is_tried_again() {
    let Some(driver) = installed() else { return };
    let (spec, folder) = (product(), tempfile::tempdir().expect("a folder"));
    driver.cost("cublaslt_21", 10_000);
    let _open = Device::open(0, LIMITS).expect("it is there");
    driver.set("library", 0);
    let without = choose(picks_in(&folder), &spec);
    assert!(matches!(without, Choice::Own(_)), "{without:?}");
    driver.set("library", 1);
    let with = choose(picks_in(&folder), &spec);
    assert_eq!(with, Choice::Library(algorithm(21, 0)));
}

/// A choice of this process for a library is not used where the library does not start any more.
#[test]
fn a_known_choice_needs_its_library() {
    let Some(driver) = installed() else { return };
    let (spec, folder) = (product(), tempfile::tempdir().expect("a folder"));
    driver.cost("cublaslt_21", 10_000);
    let picks = picks_in(&folder);
    let with = choose(picks.clone(), &spec);
    assert_eq!(with, Choice::Library(algorithm(21, 0)));
    driver.set("library", 0);
    let without = choose(picks.clone(), &spec);
    assert!(matches!(without, Choice::Own(_)), "{without:?}");
    let launched = driver.get("launches");
    assert_eq!(choose(picks, &spec), without);
    assert_eq!(driver.get("launches"), launched, "it is known");
}
