//! The seed tables of the fuzzer, and edge cases.

use crate::oracle;
use slabwise_packer::Lifetime;
use slabwise_packer::csv;
use slabwise_packer::*;
use std::path::Path;

#[test]
fn every_seed_is_read_and_packed_or_rejected() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/seeds");
    let mut heights = Vec::new();
    for entry in std::fs::read_dir(folder).expect("the folder of seeds") {
        let path = entry.expect("readable").path();
        let table = csv::read_file(&path).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(csv::read(&csv::write(&table)).as_ref(), Ok(&table));
        let name = path
            .file_stem()
            .expect("a name")
            .to_string_lossy()
            .into_owned();
        let packing = table.problem.pack();
        if let Ok(packing) = &packing {
            assert_eq!(check(&table.problem, packing), Ok(()), "{name}");
            // The oracle iterates over steps.
            let small = table.problem.items.iter().all(|item| item.life.end < 100);
            assert!(!small || oracle::accepts(&table.problem, packing), "{name}");
        }
        heights.push((name, packing.map(|packing| packing.height)));
    }
    heights.sort_by(|a, b| a.0.cmp(&b.0));
    let expected = [
        ("brief", Ok(24)),
        ("huge", Err(ProblemError::TotalSize { item: 1 })),
        ("line_ends", Ok(64)),
        ("residue", Ok(24)),
        ("rules", Ok(16 + 64 + 64 + 62 + 48)),
        ("tetris", Ok(3)),
    ];
    assert_eq!(
        heights,
        expected.map(|(name, height)| (name.to_string(), height))
    );
}

fn item(start: u64, end: u64, size: u64) -> Item {
    Item {
        life: Lifetime::new(start, end),
        size,
        align: 1,
    }
}

fn packed(problem: &Problem) -> Packing {
    let packing = problem.pack().expect("sound");
    assert_eq!(check(problem, &packing), Ok(()));
    packing
}

#[test]
fn empty_problems_and_items_without_bytes() {
    let tied = Problem {
        fixed: vec![Placement { item: 0, offset: 7 }],
        aliases: vec![vec![0, 1]],
        contiguous: vec![vec![1, 2]],
        ..Problem::new(vec![item(0, 0, 5), item(4, 9, 0), item(5, 5, 3)])
    };
    let packing = packed(&tied);
    // Items that need no bytes still lie where the constraints put them, and do not add to the
    // height.
    assert_eq!((packing.offsets, packing.height), (vec![7, 7, 7], 0));
    let gone = Problem {
        gaps: vec![Gap {
            item: 0,
            life: Lifetime::new(0, 9),
            window: None,
        }],
        ..Problem::new(vec![item(1, 8, 5)])
    };
    assert_eq!(packed(&gone).height, 0);
    let one = Problem {
        aliases: vec![vec![0], vec![]],
        ..Problem::new(vec![item(1, 8, 5)])
    };
    assert_eq!(packed(&one).height, 5);
}

#[test]
fn fixed_pairs_that_never_need_bytes() {
    let at = |item| Placement { item, offset: 8 };
    let gap = |item| Gap {
        item,
        life: Lifetime::new(0, 9),
        window: None,
    };
    let pair = Problem {
        fixed: vec![at(0), at(1)],
        gaps: vec![gap(0), gap(1)],
        in_place: vec![InPlace { from: 0, to: 1 }],
        ..Problem::new(vec![item(0, 4, 8), item(3, 9, 8)])
    };
    assert_eq!(
        (packed(&pair).height, packed(&pair).offsets),
        (0, vec![8, 8])
    );
}

#[test]
fn an_alias_of_a_donor_keeps_its_bytes() {
    let at = |item| Placement { item, offset: 40 };
    let problem = Problem {
        fixed: vec![at(0), at(1)],
        aliases: vec![vec![0, 2]],
        in_place: vec![InPlace { from: 0, to: 1 }],
        ..Problem::new(vec![item(1, 3, 4), item(2, 4, 4), item(2, 3, 1)])
    };
    assert!(
        matches!(
            problem.pack(),
            Err(ProblemError::FixedOverlap { step: 2, .. })
        ),
        "{:?}",
        problem.pack()
    );
}

#[test]
fn sizes_that_just_fit_64_bits() {
    let most = u64::MAX;
    let items = vec![
        item(0, most, most - 10),
        item(3, most, 10),
        item(0, most, 0),
    ];
    let fixed = Problem {
        fixed: vec![Placement { item: 1, offset: 0 }],
        ..Problem::new(items.clone())
    };
    assert_eq!(
        (packed(&fixed).height, packed(&fixed).offsets[0]),
        (most, 10)
    );
    let contiguous = Problem {
        contiguous: vec![vec![1, 0, 2]],
        ..Problem::new(items.clone())
    };
    assert_eq!(packed(&contiguous).offsets, [10, 0, most]);
    let too_high = Problem {
        fixed: vec![Placement {
            item: 1,
            offset: 11,
        }],
        ..Problem::new(items.clone())
    };
    assert!(matches!(
        too_high.pack(),
        Err(ProblemError::TotalSize { .. })
    ));
    let beyond = Problem {
        fixed: vec![Placement {
            item: 0,
            offset: 11,
        }],
        ..Problem::new(items)
    };
    assert_eq!(
        beyond.pack(),
        Err(ProblemError::FixedEnd {
            item: 0,
            offset: 11,
            size: most - 10
        })
    );
}

/// A start offset that leaves too little space above it for the other items is dropped.
#[test]
fn offsets_to_start_from_leave_room_for_the_rest() {
    for offset in [(1 << 63) - 1, 1 << 63, u64::MAX - 1] {
        let items = vec![
            item(0, 10, 1),
            item(6, 7, 1 << 63),
            item(6, 9, 8),
            item(9, 10, 8),
        ];
        let start = vec![Placement { item: 0, offset }];
        let pairs = vec![InPlace { from: 1, to: 2 }, InPlace { from: 0, to: 3 }];
        packed(&Problem {
            start,
            in_place: pairs,
            ..Problem::new(items)
        });
    }
    // The item above the one that starts there needs no bytes, but has an offset.
    let items = vec![item(0, 9, 3), item(4, 4, 40)];
    let start = vec![Placement {
        item: 0,
        offset: u64::MAX - 8,
    }];
    packed(&Problem {
        start,
        contiguous: vec![vec![0, 1]],
        ..Problem::new(items)
    });
}

/// An item that never needs bytes has an offset as well, and an end that must fit 64 bits.
#[test]
fn ends_of_items_without_bytes_do_not_overflow() {
    let items = vec![item(0, 6, 3), item(0, 2, 2), item(5, 5, 8)];
    let fixed = vec![Placement {
        item: 0,
        offset: u64::MAX - 7,
    }];
    let aliases = vec![vec![2, 1]];
    let tied = Problem {
        fixed,
        aliases,
        ..Problem::new(items)
    };
    assert!(
        matches!(tied.pack(), Err(ProblemError::TotalSize { .. })),
        "{:?}",
        tied.pack()
    );
}

/// Pairs are chosen with the offsets: a chain of equal sizes is one rectangle; if the recipient is
/// larger, the rest must be free; and a harmful pair is not used.
#[test]
fn pairs_are_chosen_with_the_offsets() {
    let pair = |from, to| InPlace { from, to };
    let chain = Problem {
        in_place: (0..9).map(|i| pair(i, i + 1)).collect(),
        ..Problem::new((0..10).map(|i| item(i, i + 2, 8)).collect())
    };
    let packing = packed(&chain);
    assert_eq!((packing.height, packing.in_place.len()), (8, 9));
    let growing = Problem {
        in_place: vec![pair(0, 1)],
        ..Problem::new(vec![item(0, 3, 8), item(2, 6, 20), item(0, 2, 12)])
    };
    assert_eq!(packed(&growing).height, 20);
    let crowded = Problem {
        in_place: vec![pair(0, 1)],
        ..Problem::new(vec![item(0, 3, 8), item(2, 6, 20), item(0, 6, 12)])
    };
    assert_eq!(packed(&crowded).height, 32);
    let either = Problem {
        in_place: vec![pair(0, 2), pair(1, 2)],
        ..Problem::new(vec![item(0, 3, 8), item(0, 3, 16), item(2, 6, 16)])
    };
    let packing = packed(&either);
    assert_eq!((packing.height, packing.in_place), (24, vec![pair(1, 2)]));
}

#[test]
fn each_memory_has_its_own_height() {
    let spaces = vec![
        Space {
            capacity: Some(10),
            items: vec![],
        },
        Space {
            capacity: Some(5),
            items: vec![1, 2],
        },
    ];
    let problem = Problem {
        spaces,
        ..Problem::new(vec![item(0, 9, 8), item(0, 9, 3), item(0, 9, 4)])
    };
    let packing = problem.pack().expect("sound");
    assert_eq!(
        packing
            .spaces
            .iter()
            .map(|extent| extent.height)
            .collect::<Vec<_>>(),
        [8, 7]
    );
    let unfit = DoesNotFit {
        space: 1,
        capacity: 5,
        height: 7,
        lower_bound: 7,
    };
    assert_eq!((packing.height, packing.fits(&problem)), (15, Err(unfit)));
    assert_eq!(check(&problem, &packing), Err(Violation::Capacity(unfit)));
    let across = Problem {
        aliases: vec![vec![0, 1]],
        ..problem
    };
    let error = ProblemError::AcrossSpaces {
        list: "aliases",
        first: 0,
        first_space: 0,
        second: 1,
        second_space: 1,
    };
    assert_eq!(across.pack(), Err(error));
}

/// Each constraint that contradicts itself or another is named with the items and numbers.
#[test]
fn contradictions_are_named() {
    let items = || {
        vec![
            item(0, 4, 8),
            item(3, 9, 8),
            Item {
                align: 8,
                ..item(0, 9, 4)
            },
            item(0, 9, 3),
        ]
    };
    let fixed = |item, offset| Placement { item, offset };
    let pair = |from, to| InPlace { from, to };
    let error = |change: fn(&mut Problem)| {
        let mut problem = Problem::new(items());
        change(&mut problem);
        assert_eq!(
            problem.pack().map(|packing| packing.height),
            Err(problem.verify().expect_err("a contradiction"))
        );
        problem.verify().expect_err("a contradiction")
    };
    let no_such = error(|p| p.aliases = vec![vec![0, 4]]);
    assert_eq!(
        no_such,
        ProblemError::NoSuchItem {
            list: "aliases",
            item: 4,
            count: 4
        }
    );
    assert_eq!(
        error(|p| p.contiguous = vec![vec![0, 1], vec![1]]),
        ProblemError::NamedTwice {
            list: "contiguous",
            item: 1
        }
    );
    let twice = error(|p| {
        p.fixed = vec![
            Placement { item: 0, offset: 0 },
            Placement { item: 0, offset: 0 },
        ]
    });
    assert_eq!(
        twice,
        ProblemError::NamedTwice {
            list: "fixed",
            item: 0
        }
    );
    let misaligned = error(|p| p.fixed = vec![Placement { item: 2, offset: 4 }]);
    assert_eq!(
        misaligned,
        ProblemError::FixedMisaligned {
            item: 2,
            offset: 4,
            align: 8
        }
    );
    let implied = error(|p| {
        (p.fixed, p.aliases) = (vec![Placement { item: 0, offset: 4 }], vec![vec![0, 2]])
    });
    assert_eq!(
        implied,
        ProblemError::FixedMisaligned {
            item: 2,
            offset: 4,
            align: 8
        }
    );
    let overlap = error(|p| {
        p.fixed = vec![
            Placement { item: 0, offset: 0 },
            Placement { item: 1, offset: 4 },
        ]
    });
    let expected = ProblemError::FixedOverlap {
        first: 0,
        first_offset: 0,
        second: 1,
        second_offset: 4,
        step: 3,
    };
    assert_eq!(overlap, expected);
    // At the same offset, a permitted pair may share bytes.
    let mut same = Problem {
        fixed: vec![fixed(0, 4), fixed(1, 4)],
        in_place: vec![pair(0, 1)],
        ..Problem::new(items())
    };
    assert_eq!(packed(&same).in_place, [pair(0, 1)]);
    same.in_place.clear();
    assert!(matches!(
        same.verify(),
        Err(ProblemError::FixedOverlap { .. })
    ));
    let backwards = error(|p| {
        p.gaps = vec![Gap {
            item: 1,
            life: Lifetime::new(5, 4),
            window: None,
        }]
    });
    assert_eq!(
        backwards,
        ProblemError::Gap {
            item: 1,
            start: 5,
            end: 4
        }
    );
    let wide = error(|p| {
        p.gaps = vec![Gap {
            item: 1,
            life: Lifetime::new(4, 5),
            window: Some(Window { low: 0, high: 9 }),
        }]
    });
    assert_eq!(
        wide,
        ProblemError::Window {
            item: 1,
            low: 0,
            high: 9,
            size: 8
        }
    );
    let apart = error(|p| p.in_place = vec![InPlace { from: 0, to: 2 }]);
    assert_eq!(
        apart,
        ProblemError::PairNeverMeets {
            from: 0,
            to: 2,
            end: 4,
            start: 0
        }
    );
    let again = error(|p| p.in_place = vec![InPlace { from: 0, to: 1 }; 2]);
    assert_eq!(again, ProblemError::PairTwice { from: 0, to: 1 });
    let tied =
        error(|p| (p.in_place, p.aliases) = (vec![InPlace { from: 0, to: 1 }], vec![vec![0, 1]]));
    assert_eq!(tied, ProblemError::PairTied { from: 0, to: 1 });
    let two = error(|p| (p.contiguous, p.aliases) = (vec![vec![0, 1]], vec![vec![0, 1]]));
    assert_eq!(
        two,
        ProblemError::TwoDistances {
            first: 0,
            second: 1,
            asked: 8,
            otherwise: 0
        }
    );
    let elsewhere = error(|p| {
        (p.contiguous, p.fixed) = (
            vec![vec![0, 1]],
            vec![
                Placement { item: 0, offset: 0 },
                Placement { item: 1, offset: 9 },
            ],
        )
    });
    assert_eq!(
        elsewhere,
        ProblemError::TwoDistances {
            first: 0,
            second: 1,
            asked: 9,
            otherwise: 8
        }
    );
    let stacked = error(|p| (p.contiguous, p.aliases) = (vec![vec![3, 1]], vec![vec![3, 0]]));
    assert_eq!(
        stacked,
        ProblemError::TiedOverlap {
            first: 0,
            second: 1,
            step: 3
        }
    );
    let odd = error(|p| {
        p.items[3].align = 2;
        p.contiguous = vec![vec![3, 2]];
    });
    assert_eq!(
        odd,
        ProblemError::TiedMisaligned {
            first: 2,
            first_align: 8,
            second: 3,
            second_align: 2,
            distance: -3
        }
    );
    let below = error(|p| {
        (p.contiguous, p.fixed) = (vec![vec![0, 1]], vec![Placement { item: 1, offset: 5 }])
    });
    assert_eq!(
        below,
        ProblemError::BelowZero {
            fixed: 1,
            offset: 5,
            item: 0,
            below: 8
        }
    );
}

#[test]
fn thousands_of_identical_items_and_one_of_them_fixed() {
    let mut problem = Problem::new(vec![item(3, 9, 16); 20_000]);
    assert_eq!(packed(&problem).height, 16 * 20_000);
    problem
        .items
        .iter_mut()
        .enumerate()
        .for_each(|(at, item)| (item.life.start, item.life.end) = (at as u64, at as u64 + 40));
    problem.fixed = vec![Placement {
        item: 77,
        offset: 16 * 5,
    }];
    let packing = packed(&problem);
    assert_eq!((packing.height, packing.offsets[77]), (16 * 40, 80));
}
