//! Problems of tens of thousands of items, for which time quadratic in their number would be
//! minutes in a debug build.

use slabwise_packer::csv::{self, CsvError};
use slabwise_packer::random::Random;
use slabwise_packer::{Gap, Item, Lifetime, Limits, Placement, Problem, Space, check};
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
    const EACH: usize = 60_000;
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
    const COUNT: usize = 40_000;
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
