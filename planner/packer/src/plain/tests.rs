use super::lives::{LOOKS, Lives};
use super::portfolio::Limits;
use super::portfolio::METHODS;
use super::sections::Sections;
use super::skyline::Skyline;
use super::*;
use crate::check::check;
use crate::error::ProblemError;
use crate::lifetime::Lifetime;
use crate::method::Method;
use crate::packing::{Extent, Packing, Proof};
use crate::problem::{Item, Problem};
use crate::random::Random;
use arbtest::arbitrary::{Result, Unstructured};
use arbtest::arbtest;

fn item(start: u64, end: u64, size: u64) -> Item {
    Item {
        life: Lifetime::new(start, end),
        size,
        align: 1,
    }
}

/// Checks a packing by the definition, pair by pair.
fn assert_valid(problem: &Problem, packing: &Packing) {
    assert_eq!(packing.offsets.len(), problem.items.len());
    let mut height = 0;
    for (i, (a, &a_offset)) in problem.items.iter().zip(&packing.offsets).enumerate() {
        assert!(a_offset.is_multiple_of(a.align), "item {i}");
        if a.size == 0 || a.life.is_empty() {
            assert_eq!(a_offset, 0, "item {i}");
            continue;
        }
        height = height.max(a_offset + a.size);
        for (b, &b_offset) in problem.items.iter().zip(&packing.offsets).take(i) {
            let apart = a_offset + a.size <= b_offset || b_offset + b.size <= a_offset;
            assert!(
                apart || b.size == 0 || !a.life.overlaps(b.life),
                "{:?}: {a:?} at {a_offset}, {b:?} at {b_offset}",
                packing.method
            );
        }
    }
    assert_eq!(packing.height, height);
    assert!(packing.lower_bound <= height);
    assert_eq!(check(problem, packing), Ok(()));
}

pub(super) fn random_problem(u: &mut Unstructured, items_max: usize) -> Result<Problem> {
    let mut problem = Problem::default();
    let (span, coarse) = (u.int_in_range(1..=30u64)?, u.arbitrary::<bool>()?);
    for _ in 0..u.int_in_range(0..=items_max)? {
        let start = u.int_in_range(0..=span)?;
        let life = Lifetime::new(start, u.int_in_range(start..=span)?);
        let size = *u.choose(&[0, 1, 2, 3, 5, 8, 8, 13, 40])?;
        let align = if coarse {
            1 << u.int_in_range(0..=4)?
        } else {
            1
        };
        problem.items.push(Item { life, size, align });
    }
    Ok(problem)
}

/// The packing that consists of these offsets, with its numbers.
fn packing_of(problem: &Problem, offsets: Vec<u64>, method: Method) -> Packing {
    let placed = problem
        .items
        .iter()
        .zip(&offsets)
        .filter(|(item, _)| item.needs_space());
    let height = placed
        .map(|(item, offset)| offset + item.size)
        .max()
        .unwrap_or(0);
    let lower_bound = problem.lower_bound();
    let proof = (height == lower_bound).then_some(Proof::Bound);
    Packing {
        offsets,
        height,
        lower_bound,
        proof,
        method,
        in_place: Vec::new(),
        spaces: vec![Extent {
            height,
            lower_bound,
        }],
    }
}

/// The packing of one method alone.
fn packed_by(problem: &Problem, method: Method) -> Packing {
    let placed: Vec<usize> = (0..problem.items.len())
        .filter(|&i| problem.items[i].needs_space())
        .collect();
    let sections = Sections::new(problem, &placed);
    let lives = Lives::new(&sections);
    let found = match method {
        Method::Skyline(rank) => {
            let mut skyline = Skyline::new(&sections, &lives);
            let height = skyline.pack(&rank.order(&sections), u64::MAX);
            height.map(|height| Found {
                offsets: skyline.offsets.clone(),
                height,
            })
        }
        Method::FirstFit(rank) => greedy::pack(
            &sections,
            &lives,
            &rank.order(&sections),
            greedy::Fit::First,
            u64::MAX,
        ),
        Method::BestFit(rank) => greedy::pack(
            &sections,
            &lives,
            &rank.order(&sections),
            greedy::Fit::Best,
            u64::MAX,
        ),
        Method::Apart
        | Method::Start
        | Method::Blocks(_)
        | Method::SqueakyWheel
        | Method::Search => {
            unreachable!("none of the fast methods")
        }
    };
    let found = found.expect("without a limit there is always a packing");
    let mut offsets = vec![0; problem.items.len()];
    placed
        .iter()
        .zip(found.offsets)
        .for_each(|(&i, offset)| offsets[i] = offset);
    packing_of(problem, offsets, method)
}

/// The sections of the items that need space.
pub(super) fn sections(problem: &Problem) -> Sections {
    let placed: Vec<usize> = (0..problem.items.len())
        .filter(|&i| problem.items[i].needs_space())
        .collect();
    Sections::new(problem, &placed)
}

/// Checks that everything is aligned, no two items share a byte at a time, and the height is the
/// reported one.
pub(super) fn assert_apart(sections: &Sections, found: &Found) {
    let mut height = 0;
    for (i, (a, &low)) in sections.spans.iter().zip(&found.offsets).enumerate() {
        assert!(low.is_multiple_of(a.align));
        height = height.max(low + a.bytes);
        for (b, &other) in sections.spans.iter().zip(&found.offsets).take(i) {
            let apart = low + a.size <= other || other + b.size <= low;
            assert!(
                apart || a.end <= b.start || b.end <= a.start,
                "{a:?} at {low}, {b:?} at {other}"
            );
        }
    }
    assert_eq!(
        (found.offsets.len(), found.height),
        (sections.spans.len(), height)
    );
}

#[test]
fn every_method_is_valid_on_random_problems() {
    arbtest(|u| {
        let problem = random_problem(u, 40)?;
        let best = problem.pack().expect("small");
        assert_valid(&problem, &best);
        let mut lowest = u64::MAX;
        for method in METHODS {
            let packing = packed_by(&problem, method);
            assert_valid(&problem, &packing);
            lowest = lowest.min(packing.height);
        }
        // The top item counts in whole units of the finest alignment until the end.
        let unit = problem
            .items
            .iter()
            .filter(|item| item.needs_space())
            .map(|item| item.align)
            .min()
            .unwrap_or(1);
        let whole = |bytes: u64| bytes.next_multiple_of(unit);
        // It can be lower than each of them, because different parts may be packed by different
        // methods.
        assert!(
            whole(best.height) <= whole(lowest),
            "the portfolio returns the best of its methods"
        );
        let apart = problem.apart().expect("small");
        assert_valid(&problem, &apart);
        let needy = || problem.items.iter().filter(|item| item.needs_space());
        assert!(apart.height >= needy().map(|item| item.size).sum());
        assert!(apart.height <= needy().map(|item| item.size.next_multiple_of(16)).sum());
        Ok(())
    });
}

/// The optimum. First fit in some order finds it, because in the order of an optimal solution's
/// offsets no item lies higher than there; so all orders are tried.
pub(super) fn optimum(problem: &Problem) -> u64 {
    fn permute(
        sections: &Sections,
        lives: &Lives,
        sizes: &[u64],
        order: &mut Vec<u32>,
        fixed: usize,
        best: &mut u64,
    ) {
        if fixed == order.len() {
            if let Some(found) = greedy::pack(sections, lives, order, greedy::Fit::First, u64::MAX)
            {
                *best = (*best).min(
                    found
                        .offsets
                        .iter()
                        .zip(sizes)
                        .map(|(offset, size)| offset + size)
                        .max()
                        .unwrap_or(0),
                );
            }
            return;
        }
        for i in fixed..order.len() {
            order.swap(fixed, i);
            permute(sections, lives, sizes, order, fixed + 1, best);
            order.swap(fixed, i);
        }
    }
    let placed: Vec<usize> = (0..problem.items.len())
        .filter(|&i| problem.items[i].needs_space())
        .collect();
    let sections = Sections::new(problem, &placed);
    let mut best = u64::MAX;
    let sizes: Vec<u64> = placed.iter().map(|&i| problem.items[i].size).collect();
    permute(
        &sections,
        &Lives::new(&sections),
        &sizes,
        &mut (0..placed.len() as u32).collect(),
        0,
        &mut best,
    );
    best
}

#[test]
fn packings_of_few_items_respect_the_optimum_and_the_bound() {
    let (mut tried, mut optimal) = (0, 0);
    arbtest(|u| {
        let problem = random_problem(u, 6)?;
        let packing = problem.pack().expect("small");
        let optimum = optimum(&problem);
        assert!(
            packing.lower_bound <= optimum && optimum <= packing.height,
            "{problem:?}"
        );
        tried += 1;
        optimal += usize::from(packing.height == optimum);
        Ok(())
    });
    assert!(
        optimal * 10 >= tried * 9,
        "{optimal} of {tried} small problems packed optimally"
    );
}

/// The sum of live sizes, instant by instant.
#[test]
fn the_lower_bound_is_the_fullest_instant() {
    arbtest(|u| {
        let problem = random_problem(u, 20)?;
        let unit = problem
            .items
            .iter()
            .filter(|item| item.needs_space())
            .map(|item| item.align)
            .min()
            .unwrap_or(1);
        let live = |t: u64| {
            let living = || {
                problem
                    .items
                    .iter()
                    .filter(move |item| item.life.contains(t))
                    .map(|item| item.size)
            };
            let rest = living()
                .map(|size| size.next_multiple_of(unit) - size)
                .max()
                .unwrap_or(0);
            living()
                .map(|size| size.next_multiple_of(unit))
                .sum::<u64>()
                - rest
        };
        assert_eq!(problem.lower_bound(), (0..=30).map(live).max().unwrap_or(0));
        Ok(())
    });
}

/// Cuts a rectangle of time × bytes into `pieces`, by straight cuts through one piece at a time.
/// The optimum is its height.
fn tiling(u: &mut Unstructured, pieces: usize) -> Result<Problem> {
    let mut items = vec![item(0, 1 << 20, 1 << 20)];
    while items.len() < pieces {
        let at = u.int_in_range(0..=items.len() - 1)?;
        let piece = items[at];
        let (cut_time, share) = (u.arbitrary::<bool>()?, u.int_in_range(1..=15u64)?);
        let mut rest = piece;
        if cut_time && piece.life.steps() >= 16 {
            let middle = piece.life.start + piece.life.steps() * share / 16;
            (items[at].life.end, rest.life.start) = (middle, middle);
        } else if piece.size >= 16 {
            items[at].size = piece.size * share / 16;
            rest.size = piece.size - items[at].size;
        } else {
            break;
        }
        items.push(rest);
    }
    Ok(Problem::new(items))
}

#[test]
fn the_bound_of_a_tiling_is_its_height() {
    arbtest(|u| {
        let pieces = u.int_in_range(1..=60)?;
        let problem = tiling(u, pieces)?;
        let packing = problem.pack().expect("small");
        assert_valid(&problem, &packing);
        assert_eq!(packing.lower_bound, 1 << 20);
        Ok(())
    });
}

#[test]
fn stacks_and_staircases_are_packed_at_the_bound() {
    let stack = Problem::new((1..100).map(|size| item(0, 7, size)).collect());
    let nested = Problem::new((0..100).map(|i| item(i, 200 - i, 1 + i % 7)).collect());
    let growing = Problem::new((0..500).map(|i| item(i, i + 2, 64 * (1 + i))).collect());
    let disjoint = Problem::new(
        (0..500)
            .map(|i| item(i, i + 1, 1 + (i * 37) % 101))
            .collect(),
    );
    for problem in [stack, nested, growing, disjoint] {
        let packing = problem.pack().expect("small");
        assert_valid(&problem, &packing);
        assert_eq!(packing.height, packing.lower_bound);
    }
}

#[test]
fn edges() {
    let empty = Problem::default().pack().expect("nothing to do");
    assert_eq!((empty.height, empty.lower_bound), (0, 0));
    let nothing = Problem::new(vec![item(0, 0, 5), item(3, 1, 5), item(0, 9, 0)])
        .pack()
        .expect("nothing to do");
    assert_eq!((nothing.offsets, nothing.height), (vec![0; 3], 0));
    let huge = Problem::new(vec![item(0, u64::MAX, u64::MAX - 1), item(0, u64::MAX, 1)])
        .pack()
        .expect("just fits");
    assert_eq!(huge.height, u64::MAX);

    let too_much = Problem::new(vec![item(0, 1, u64::MAX), item(5, 6, 1)]);
    assert_eq!(too_much.pack(), Err(ProblemError::TotalSize { item: 1 }));
    assert_eq!(too_much.apart(), Err(ProblemError::TotalSize { item: 1 }));
    let coarse = Problem::new(vec![
        item(0, 1, 1),
        Item {
            align: 1 << 63,
            ..item(0, 1, 1)
        },
        item(0, 1, 1),
    ]);
    assert_eq!(coarse.pack(), Err(ProblemError::TotalSize { item: 1 }));
    let uneven = Problem::new(vec![Item {
        align: 12,
        ..item(0, 1, 1)
    }]);
    assert_eq!(
        uneven.pack(),
        Err(ProblemError::Alignment { item: 0, align: 12 })
    );
}

#[test]
fn many_items_are_packed_by_the_methods_that_scale() {
    // A hundred thousand items, too many for the quadratic methods.
    let items = (0..100_000u64)
        .map(|i| item(i, i + 1 + (i * 7919) % 300, 64 * (1 + (i * 104_729) % 50)))
        .collect();
    let problem = Problem::new(items);
    let packing = problem.pack().expect("small sizes");
    assert!(matches!(packing.method, Method::Skyline(_)));
    assert!(
        packing.height >= packing.lower_bound && packing.height < packing.lower_bound / 10 * 13,
        "{}",
        packing.height
    );
}

/// Four times the items take little more than four times the work, for lives of any shape, counted
/// and not timed.
#[test]
fn problems_are_packed_in_linear_work() {
    // The activations of a chain, of a recurrent network with its backward pass, and values that
    // are read within the next hundred steps.
    let chain = |items: u64| (0..items).map(|i| item(i, i + 2, 4096)).collect();
    let recurrent = |items: u64| {
        let life = |i| item(i, 2 * items - i, 64 * (1 + i % 3));
        (0..items).map(life).collect()
    };
    let random = |items: u64| {
        let mut random = Random(7);
        let mut any = |i| item(i, i + 1 + random.below(100), 64 * (1 + random.below(64)));
        (0..items).map(&mut any).collect()
    };
    type Shape<'a> = (&'static str, &'a dyn Fn(u64) -> Vec<Item>);
    let shapes: [Shape; 3] = [
        ("chain", &chain),
        ("recurrent", &recurrent),
        ("random", &random),
    ];
    for (name, shape) in shapes {
        for effort in [0, 1_000_000] {
            let limits = Limits {
                effort,
                ..Limits::default()
            };
            let [one, four] = [6_000, 24_000].map(|items| {
                let problem = Problem::new(shape(items));
                let before = LOOKS.get();
                problem.pack_within(&limits).expect("small sizes");
                LOOKS.get() - before
            });
            assert!(
                four <= 6 * one,
                "{name} with effort {effort}: {one} looks for 6,000 items, {four} for 24,000"
            );
        }
    }
}
