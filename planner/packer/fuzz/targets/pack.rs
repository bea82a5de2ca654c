//! Random problems with every rule, and jigsaw puzzles of known optimum: packings are correct, and
//! refused problems are unsound.
#![no_main]

#[path = "../../tests/packing/oracle.rs"]
mod oracle;
#[path = "../../tests/packing/random_problem.rs"]
mod random_problem;

use arbtest::arbitrary::{Result, Unstructured};
use libfuzzer_sys::fuzz_target;
use slabwise_packer::generate::{Cuts, tiling};
use slabwise_packer::{Limits, Violation, check};

fuzz_target!(|data: &[u8]| {
    // Too few bytes for a problem are none.
    let _ = run(&mut Unstructured::new(data));
});

fn run(u: &mut Unstructured) -> Result<()> {
    let limits = Limits { effort: u.int_in_range(0..=2000)?, seed: u.arbitrary()?, ..Limits::default() };
    if u.ratio(1, 8)? {
        let cuts = *u.choose(&[Cuts::Straight, Cuts::Spiral, Cuts::Mixed])?;
        let known = tiling(u.arbitrary()?, u.int_in_range(0..=60)?, 1 << 12, 1 << 12, cuts);
        let packing = known.problem.pack_within(&limits).expect("sound");
        assert_eq!(check(&known.problem, &packing), Ok(()));
        assert!(packing.height >= known.height && packing.lower_bound == known.height);
        return Ok(());
    }
    let problem = match u.arbitrary()? {
        true => random_problem::random_problem(u, 24)?,
        false => random_problem::sound_problem(u, 24)?,
    };
    match problem.pack_within(&limits) {
        Ok(packing) => {
            assert!(oracle::accepts(&problem, &packing), "{problem:?}\n{packing:?}");
            let verdict = check(&problem, &packing);
            assert!(matches!(verdict, Ok(()) | Err(Violation::Capacity(_))), "{verdict:?}");
        }
        Err(error) => assert_eq!(problem.verify(), Err(error)),
    }
    Ok(())
}
