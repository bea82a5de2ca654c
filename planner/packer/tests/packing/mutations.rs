//! The checker must reject invalid packings: one valid packing, broken in every way that it can
//! detect.

use crate::oracle;
use crate::random_problem::sound_problem;
use slabwise_packer::Lifetime;
use slabwise_packer::*;

const A: usize = 0;
const B: usize = 1;
const WHOLE: usize = 2;
const VIEW: usize = 3;
const LEFT: usize = 4;
const RIGHT: usize = 5;
const PINNED: usize = 6;
const FAR: usize = 7;

fn item(start: u64, end: u64, size: u64) -> Item {
    Item {
        life: Lifetime::new(start, end),
        size,
        align: 16,
    }
}

/// B in the place of A, a view of a whole with a gap, two neighbours, a fixed item, and one in a
/// separate memory.
fn sample() -> (Problem, Packing) {
    let items = vec![
        item(0, 4, 64),
        item(3, 8, 64),
        item(0, 8, 64),
        item(2, 6, 32),
        item(0, 8, 32),
        item(0, 8, 30),
        item(1, 7, 16),
        item(0, 8, 48),
    ];
    let problem = Problem {
        fixed: vec![Placement {
            item: PINNED,
            offset: 0,
        }],
        gaps: vec![Gap {
            item: WHOLE,
            life: Lifetime::new(4, 6),
            window: Some(Window { low: 0, high: 32 }),
        }],
        aliases: vec![vec![WHOLE, VIEW]],
        contiguous: vec![vec![LEFT, RIGHT]],
        in_place: vec![InPlace { from: A, to: B }],
        spaces: vec![
            Space {
                capacity: Some(300),
                items: vec![],
            },
            Space {
                capacity: Some(48),
                items: vec![FAR],
            },
        ],
        ..Problem::new(items)
    };
    let packing = problem.pack().expect("sound");
    assert_eq!(packing.in_place, problem.in_place);
    assert_eq!(check(&problem, &packing), Ok(()));
    (problem, packing)
}

/// The violation that the checker reports for the sample after a change.
fn broken(change: impl FnOnce(&mut Problem, &mut Packing)) -> Violation {
    let (mut problem, mut packing) = sample();
    change(&mut problem, &mut packing);
    check(&problem, &packing).expect_err("a broken packing")
}

#[test]
fn a_broken_problem() {
    let violation = broken(|problem, _| problem.items[A].align = 3);
    assert_eq!(
        violation,
        Violation::Problem(ProblemError::Alignment { item: A, align: 3 })
    );
}

#[test]
fn lists_of_the_wrong_length() {
    let offsets = broken(|_, packing| packing.offsets.push(0));
    assert_eq!(
        offsets,
        Violation::Length {
            what: "offsets",
            expected: 8,
            found: 9
        }
    );
    let spaces = broken(|_, packing| packing.spaces.truncate(1));
    assert_eq!(
        spaces,
        Violation::Length {
            what: "spaces",
            expected: 2,
            found: 1
        }
    );
}

#[test]
fn items_where_they_may_not_be() {
    let (_, packing) = sample();
    let at = |item: usize| packing.offsets[item];
    let misaligned = broken(|_, packing| packing.offsets[A] += 8);
    assert_eq!(
        misaligned,
        Violation::Misaligned {
            item: A,
            offset: at(A) + 8,
            align: 16
        }
    );
    let end = broken(|_, packing| packing.offsets[A] = u64::MAX - 15);
    assert_eq!(
        end,
        Violation::End {
            item: A,
            offset: u64::MAX - 15,
            size: 64
        }
    );
    let moved = broken(|_, packing| packing.offsets[PINNED] = 512);
    assert_eq!(
        moved,
        Violation::Moved {
            item: PINNED,
            fixed: 0,
            offset: 512
        }
    );
}

#[test]
fn members_of_groups_at_wrong_distances() {
    let (_, packing) = sample();
    let at = |item: usize| packing.offsets[item];
    let aliases = broken(|_, packing| packing.offsets[VIEW] += 16);
    let (first_offset, second_offset) = (at(WHOLE), at(VIEW) + 16);
    assert_eq!(
        aliases,
        Violation::AliasesApart {
            first: WHOLE,
            first_offset,
            second: VIEW,
            second_offset
        }
    );
    let neighbours = broken(|_, packing| packing.offsets[RIGHT] += 16);
    let (end, offset) = (at(LEFT) + 32, at(RIGHT) + 16);
    assert_eq!(
        neighbours,
        Violation::NotContiguous {
            first: LEFT,
            end,
            second: RIGHT,
            offset
        }
    );
}

#[test]
fn pairs_that_are_not_permitted_or_lie_apart() {
    let unknown = broken(|_, packing| packing.in_place = vec![InPlace { from: B, to: A }]);
    assert_eq!(unknown, Violation::PairUnknown { from: B, to: A });
    let beyond = broken(|_, packing| packing.in_place.push(InPlace { from: 99, to: A }));
    assert_eq!(beyond, Violation::PairUnknown { from: 99, to: A });
    let twice = broken(|_, packing| packing.in_place.push(InPlace { from: A, to: B }));
    assert_eq!(twice, Violation::PairUnknown { from: A, to: B });
    let mut apart_at = 0;
    let apart = broken(|_, packing| {
        packing.offsets[B] = 1024;
        apart_at = packing.offsets[A];
    });
    assert_eq!(
        apart,
        Violation::PairApart {
            from: A,
            from_offset: apart_at,
            to: B,
            to_offset: 1024
        }
    );
}

/// Four items at one place, of which two die where the others are born, and one that lives for the
/// single step between them.
fn crowd(pairs: &[(usize, usize)]) -> Violation {
    let pairs: Vec<InPlace> = pairs
        .iter()
        .map(|&(from, to)| InPlace { from, to })
        .collect();
    let items = vec![
        item(0, 3, 16),
        item(0, 3, 16),
        item(2, 5, 16),
        item(2, 5, 16),
        item(2, 3, 16),
    ];
    let problem = Problem {
        in_place: pairs.clone(),
        ..Problem::new(items)
    };
    let height = Extent {
        height: 16,
        lower_bound: problem.lower_bound(),
    };
    let packing = Packing {
        offsets: vec![0; 5],
        in_place: pairs,
        spaces: vec![height],
        ..problem.pack().expect("sound")
    };
    check(&problem, &packing).expect_err("too many at one place")
}

#[test]
fn pairs_that_share_a_partner() {
    assert_eq!(
        crowd(&[(0, 2), (0, 3)]),
        Violation::GivesTwice {
            from: 0,
            first: 2,
            second: 3
        }
    );
    assert_eq!(
        crowd(&[(0, 2), (1, 2)]),
        Violation::TakesTwice {
            to: 2,
            first: 0,
            second: 1
        }
    );
    assert_eq!(
        crowd(&[(0, 4), (4, 2)]),
        Violation::PassedOn {
            item: 4,
            from: 0,
            to: 2
        }
    );
}

#[test]
fn shared_bytes() {
    // If the pair is not listed, its items overlap at their common step.
    let unsaid = broken(|_, packing| packing.in_place.clear());
    assert!(
        matches!(
            unsaid,
            Violation::Overlap {
                first: A,
                second: B,
                step: 3,
                space: 0,
                ..
            }
        ),
        "{unsaid}"
    );
    let mut bytes = (0, 0);
    let onto = broken(|_, packing| {
        bytes = (packing.offsets[LEFT], packing.offsets[LEFT] + 32);
        (packing.offsets[A], packing.offsets[B]) = (bytes.0, bytes.0);
    });
    let expected = Violation::Overlap {
        first: A,
        first_bytes: (bytes.0, bytes.0 + 64),
        second: LEFT,
        second_bytes: bytes,
        step: 0,
        space: 0,
    };
    assert_eq!(onto, expected);
    // Aliases may share bytes only within their own group.
    let alias = broken(|problem, packing| {
        problem.aliases.clear();
        packing.offsets[VIEW] = packing.offsets[WHOLE];
    });
    assert!(
        matches!(alias, Violation::Overlap { step: 2, .. }),
        "{alias}"
    );
    // Without its gap the whole needs its upper half while another item is there.
    let (mut problem, mut packing) = sample();
    problem.items[A].life = Lifetime::new(4, 6);
    problem.in_place.clear();
    packing.in_place.clear();
    packing.offsets[B] = 1024;
    packing.offsets[A] = packing.offsets[WHOLE] + 32;
    let other = check(&problem, &packing).expect_err("the numbers are others");
    assert!(
        !matches!(
            other,
            Violation::Overlap {
                first: A | WHOLE,
                second: A | WHOLE,
                ..
            }
        ),
        "{other}"
    );
    problem.gaps.clear();
    let filled = check(&problem, &packing).expect_err("an overlap");
    assert!(matches!(filled, Violation::Overlap { .. }), "{filled}");
}

#[test]
fn wrong_numbers() {
    let (_, packing) = sample();
    let Extent {
        height,
        lower_bound,
    } = packing.spaces[0];
    let wrong = broken(|_, packing| packing.spaces[0].height += 1);
    assert_eq!(
        wrong,
        Violation::Height {
            space: 0,
            expected: height,
            found: height + 1
        }
    );
    let wrong = broken(|_, packing| packing.spaces[0].lower_bound -= 1);
    assert_eq!(
        wrong,
        Violation::LowerBound {
            space: 0,
            expected: lower_bound,
            found: lower_bound - 1
        }
    );
    let wrong = broken(|_, packing| packing.height += 1);
    assert_eq!(
        wrong,
        Violation::Sum {
            what: "height",
            expected: packing.height,
            found: packing.height + 1
        }
    );
    let wrong = broken(|_, packing| packing.lower_bound = 0);
    assert_eq!(
        wrong,
        Violation::Sum {
            what: "lower bound",
            expected: packing.lower_bound,
            found: 0
        }
    );
    let claim = if packing.proof == Some(Proof::Bound) {
        None
    } else {
        Some(Proof::Bound)
    };
    let wrong = broken(|_, packing| packing.proof = claim);
    assert_eq!(
        wrong,
        Violation::Proof {
            proof: claim,
            height: packing.height,
            lower_bound: packing.lower_bound
        }
    );
}

#[test]
fn too_small_a_memory() {
    let violation = broken(|problem, _| problem.spaces[1].capacity = Some(47));
    let unfit = DoesNotFit {
        space: 1,
        capacity: 47,
        height: 48,
        lower_bound: 48,
    };
    assert_eq!(violation, Violation::Capacity(unfit));
    assert_eq!(
        unfit.to_string(),
        "space 1 has 47 bytes; the best packing found needs 48, and none needs less than 48"
    );
}

/// One offset or pair of a valid packing changed at random: checker and oracle agree on every
/// change.
#[test]
fn checker_and_oracle_agree_on_random_changes() {
    let (mut right, mut wrong) = (0, 0);
    arbtest::arbtest(|u| {
        let problem = sound_problem(u, 8)?;
        let Ok(mut packing) = problem.pack() else {
            return Ok(());
        };
        if packing.offsets.is_empty() {
            return Ok(());
        }
        let item = u.choose_index(packing.offsets.len())?;
        if packing.in_place.is_empty() || u.ratio(2, 3)? {
            packing.offsets[item] =
                u.int_in_range(0..=80)? / problem.items[item].align * problem.items[item].align;
        } else {
            packing.in_place.pop();
        }
        // The numbers are corrected, so that only offsets decide.
        for (extent, height) in packing
            .spaces
            .iter_mut()
            .zip(oracle::heights(&problem, &packing.offsets))
        {
            extent.height = height;
        }
        packing.height = packing.spaces.iter().map(|extent| extent.height).sum();
        packing.proof = (packing.height == packing.lower_bound).then_some(Proof::Bound);
        let verdict = check(&problem, &packing);
        if oracle::accepts(&problem, &packing) {
            right += 1;
            assert!(
                matches!(verdict, Ok(()) | Err(Violation::Capacity(_))),
                "{verdict:?}: {problem:?}\n{packing:?}"
            );
        } else {
            wrong += 1;
            assert!(
                !matches!(verdict, Ok(()) | Err(Violation::Capacity(_))),
                "{problem:?}\n{packing:?}"
            );
        }
        Ok(())
    });
    assert!(right > 0 && wrong > 0);
}
