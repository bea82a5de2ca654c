//! Alignments finer and coarser than sizes: heights are bytes, and small problems are packed as low
//! as any order allows.

use slabwise_packer::Lifetime;
use slabwise_packer::{Item, Limits, Packing, Placement, Problem, Proof, Space, check};

/// A number below the first argument, pseudo-random.
fn below(n: u64, state: &mut u64) -> u64 {
    *state = state
        .wrapping_mul(6_364_136_223_846_793_005)
        .wrapping_add(1_442_695_040_888_963_407);
    (*state >> 33) % n
}

/// The lowest height of all orders in which each item gets the lowest offset free for its whole
/// life. That is the optimum, because in the order of an optimal packing's offsets no item lies
/// higher than in that packing.
fn optimum(items: &[Item]) -> u64 {
    let mut best = items
        .iter()
        .map(|item| item.size.next_multiple_of(item.align))
        .sum();
    extend(items, &mut Vec::new(), 0, &mut best);
    best
}

fn extend(items: &[Item], placed: &mut Vec<(usize, u64)>, height: u64, best: &mut u64) {
    if placed.len() == items.len() {
        *best = height.min(*best);
    }
    for (at, item) in items.iter().enumerate() {
        if placed.iter().any(|&(other, _)| other == at) {
            continue;
        }
        let offset = lowest(items, placed, item);
        if offset + item.size < *best {
            placed.push((at, offset));
            extend(items, placed, height.max(offset + item.size), best);
            placed.pop();
        }
    }
}

fn lowest(items: &[Item], placed: &[(usize, u64)], item: &Item) -> u64 {
    let mut offset = 0;
    loop {
        let overlapping = |&&(other, low): &&(usize, u64)| {
            let other = &items[other];
            let lives = item.life.start < other.life.end && other.life.start < item.life.end;
            lives && offset < low + other.size && low < offset + item.size
        };
        match placed.iter().find(overlapping) {
            Some(&(other, low)) => offset = (low + items[other].size).next_multiple_of(item.align),
            None => return offset,
        }
    }
}

fn packed(problem: &Problem, effort: u64) -> Packing {
    let packing = problem
        .pack_within(&Limits {
            effort,
            ..Limits::default()
        })
        .expect("a sound problem");
    check(problem, &packing).unwrap_or_else(|violation| panic!("{violation}: {problem:?}"));
    packing
}

/// Items that live at once or at random, with one alignment or with mixed ones, whose sizes are
/// seldom multiples of them.
fn random_items(count: u64, state: &mut u64) -> Vec<Item> {
    let (at_once, mixed) = (below(2, state) == 0, below(2, state) == 0);
    let align = 1 << below(5, state);
    let item = |_| {
        let start = if at_once { 0 } else { below(8, state) };
        let end = if at_once {
            1
        } else {
            start + 1 + below(6, state)
        };
        let align = if mixed { 1 << below(5, state) } else { align };
        Item {
            life: Lifetime::new(start, end),
            size: 1 + below(40, state),
            align,
        }
    };
    (0..count).map(item).collect()
}

#[test]
fn the_item_that_leaves_most_of_its_last_unit_is_on_top() {
    let item = |size| Item {
        life: Lifetime::new(0, 1),
        size,
        align: 4,
    };
    let mut problem = Problem::new(vec![item(5), item(7)]);
    assert_eq!(problem.lower_bound(), 13);
    let packing = packed(&problem, 1);
    assert_eq!((packing.height, packing.proof), (13, Some(Proof::Bound)));
    problem.spaces.push(Space {
        capacity: Some(13),
        items: Vec::new(),
    });
    assert_eq!(packed(&problem, 1).fits(&problem), Ok(()));
}

#[test]
fn small_packings_are_optimal_and_meet_their_height_as_a_capacity() {
    let (mut state, mut rests) = (1, 0);
    for case in 0..400 {
        let count = if case % 20 == 0 {
            7 + case / 20 % 2
        } else {
            2 + case % 5
        };
        let problem = Problem::new(random_items(count, &mut state));
        let optimum = optimum(&problem.items);
        let packing = packed(&problem, 10_000);
        assert_eq!(packing.height, optimum, "{problem:?}");
        assert!(packing.proof.is_some(), "{problem:?}");
        rests += usize::from(
            !optimum.is_multiple_of(
                problem
                    .items
                    .iter()
                    .map(|item| item.align)
                    .min()
                    .unwrap_or(1),
            ),
        );
        let capacity = Limits {
            capacity: Some(optimum),
            effort: 10_000,
            ..Limits::default()
        };
        assert_eq!(
            problem
                .pack_within(&capacity)
                .expect("packed before")
                .height,
            optimum,
            "{problem:?}"
        );
        // With bounds below the optimum, only the optimum is proved.
        assert!(problem.lower_bound() <= optimum, "{problem:?}");
    }
    assert!(rests > 100, "{rests} optima end within a unit");
}

/// The bound proves nothing of a packing of which one space is above it, even where the sums of all
/// spaces are the largest number.
#[test]
fn sums_of_spaces_that_saturate_prove_nothing() {
    let item = |step, size, align| Item {
        life: Lifetime::new(step, step + 1),
        size,
        align,
    };
    let mut problem = Problem::new(vec![
        item(0, 1, 1),
        item(0, 3, 4),
        item(0, 3, 4),
        item(0, 1, 1),
    ]);
    let half = u64::MAX / 2;
    problem.fixed = [0, 3].map(|item| Placement { item, offset: half }).to_vec();
    problem.spaces = [vec![0], vec![1, 2], vec![3]]
        .map(|items| Space {
            capacity: None,
            items,
        })
        .to_vec();
    let packing = packed(&problem, 1);
    assert!(packing.spaces[1].height > packing.spaces[1].lower_bound);
    assert_eq!([packing.height, packing.lower_bound], [u64::MAX; 2]);
    assert_ne!(packing.proof, Some(Proof::Bound));
    assert_eq!(check(&problem, &packing), Ok(()));
}
