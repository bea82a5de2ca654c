//! Problems of tens of thousands of items, for which time quadratic in their number would be
//! minutes in a debug build.

use slabwise_packer::csv::{self, CsvError};
use slabwise_packer::random::Random;
use slabwise_packer::{
    Gap, InPlace, Item, Lifetime, Limits, Placement, Problem, ProblemError, Space, check,
};
use std::fmt::Write;
use std::time::Duration;

fn item(start: u64, end: u64, size: u64) -> Item {
    Item {
        life: Lifetime::new(start, end),
        size,
        align: 1,
    }
}

/// Items that begin at random and live for up to a tenth of the time.
fn random_lives(count: u64) -> Problem {
    let mut random = Random(5);
    let mut one = || {
        let start = random.below(10_000);
        item(
            start,
            start + 1 + random.below(1_000),
            1 + random.below(1_000),
        )
    };
    Problem::new((0..count).map(|_| one()).collect())
}

/// With no time, the fastest method packs all items, gaps and fixed offsets or not.
#[test]
fn one_rule_costs_little_height_without_time() {
    let plain = random_lives(4_000);
    let life = plain.items[0].life;
    let gap = Gap {
        item: 0,
        life: Lifetime::new(life.start + 1, life.end),
        window: None,
    };
    let limits = Limits {
        time: Some(Duration::ZERO),
        effort: u64::MAX,
        ..Limits::default()
    };
    for fixed in [None, Some(0), Some(plain.lower_bound() / 8)] {
        let problem = Problem {
            gaps: if fixed.is_none() { vec![gap] } else { vec![] },
            fixed: fixed
                .into_iter()
                .map(|offset| Placement { item: 0, offset })
                .collect(),
            ..plain.clone()
        };
        let packing = problem.pack_within(&limits).unwrap();
        assert_eq!(check(&problem, &packing), Ok(()));
        let most = packing.lower_bound as f64 * 1.05 + fixed.unwrap_or(0) as f64 + 1_000.0;
        assert!(
            packing.height as f64 <= most,
            "{fixed:?}: {} of {}",
            packing.height,
            packing.lower_bound
        );
    }
}

#[test]
fn cycles_behind_long_chains_are_refused() {
    const EACH: usize = 100_000;
    let mut text = String::from("id,lower,upper,size,follows\nc0,0,1,1,\n");
    for i in 1..EACH {
        writeln!(text, "c{i},0,1,1,c{}", i - 1).unwrap();
    }
    for i in 0..EACH {
        writeln!(text, "r{i},0,1,1,r{}", (i + 1) % EACH).unwrap();
    }
    let expected = CsvError::Follows {
        line: EACH + 2,
        id: "r1".into(),
    };
    assert_eq!(csv::read(&text), Err(expected));
}

#[test]
fn every_item_may_have_its_own_space() {
    const COUNT: usize = 80_000;
    let spaces = (0..COUNT).map(|item| Space {
        capacity: None,
        items: vec![item],
    });
    let problem = Problem {
        spaces: spaces.collect(),
        fixed: vec![Placement { item: 0, offset: 8 }],
        ..Problem::new(vec![item(0, 2, 4); COUNT])
    };
    let packing = problem.pack().unwrap();
    assert_eq!(check(&problem, &packing), Ok(()));
    assert_eq!(packing.height, 4 * COUNT as u64 + 8);
}

/// Fixed items side by side, and one computed in the place of the last.
#[test]
fn fixed_items_may_be_computed_in_place() {
    const COUNT: usize = 300_000;
    let mut items = vec![item(0, 3, 4); COUNT];
    items.push(item(2, 5, 4));
    let placement = |item: usize| Placement {
        item,
        offset: 4 * item.min(COUNT - 1) as u64,
    };
    let mut problem = Problem {
        fixed: (0..=COUNT).map(placement).collect(),
        in_place: vec![InPlace {
            from: COUNT - 1,
            to: COUNT,
        }],
        ..Problem::new(items)
    };
    assert_eq!(problem.verify(), Ok(()));
    problem.items[COUNT].life.end = 3;
    problem.items[7].size = 5;
    let expected = ProblemError::FixedOverlap {
        first: 7,
        first_offset: 28,
        second: 8,
        second_offset: 32,
        step: 0,
    };
    assert_eq!(problem.verify(), Err(expected));
}

/// An item with a gap lives all the time, so that the packer of blocks gets all pairs at once.
#[test]
fn many_pairs_are_joined_beside_a_gap() {
    const COUNT: usize = 60_000;
    let end = 8 * COUNT as u64 + 8;
    let mut items = vec![item(0, end, 4)];
    items.extend((0..COUNT as u64).flat_map(|i| [8 * i, 8 * i + 4].map(|at| item(at, at + 5, 4))));
    let pair = |i: usize| InPlace {
        from: 2 * i + 1,
        to: 2 * i + 2,
    };
    let problem = Problem {
        in_place: (0..COUNT).map(pair).collect(),
        gaps: vec![Gap {
            item: 0,
            life: Lifetime::new(end - 4, end - 2),
            window: None,
        }],
        ..Problem::new(items)
    };
    let packing = problem.pack().unwrap();
    assert_eq!(check(&problem, &packing), Ok(()));
    assert_eq!(packing.height, 12);
}
