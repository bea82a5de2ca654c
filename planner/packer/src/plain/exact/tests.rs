use super::*;
use crate::plain::portfolio::stacked;
use crate::plain::tests::{assert_apart, optimum, random_problem, sections};
use crate::{Item, Lifetime, Problem};
use arbtest::arbtest;

fn exactly(sections: &Sections) -> u64 {
    let mut exact = Exact::new(sections, stacked(sections), sections.lower_bound(), 0);
    exact.run(0, u64::MAX, 1, None);
    assert_apart(sections, exact.best());
    assert_eq!(exact.lower_bound(), exact.best().height);
    exact.best().height
}

/// Each limit from the bound on is refuted at once, and there are 2⁴⁰ of them: the search ends when its
/// nodes are spent.
#[test]
fn refuted_limits_do_not_prolong_a_search() {
    let mut problem = Problem::default();
    for size in [1 << 40, 1 << 40, 1] {
        let life = Lifetime::new(0, 2);
        problem.items.push(Item {
            life,
            size,
            align: 1,
        });
    }
    let sections = sections(&problem);
    let mut exact = Exact::new(&sections, stacked(&sections), 0, 0);
    exact.run(0, 3 * ROUND, 1, None);
    let refuted = exact.lower_bound();
    assert!((1..1 << 20).contains(&refuted), "{refuted} limits");
}

#[test]
fn the_optimum_of_few_items_is_found_and_nothing_below_it() {
    arbtest(|u| {
        let problem = random_problem(u, 6)?;
        let sections = sections(&problem);
        let optimum = optimum(&problem);
        assert_eq!(exactly(&sections), optimum, "{problem:?}");
        for limit in optimum.saturating_sub(3)..optimum + 3 {
            let mut search = Search::new(&sections.in_bytes(), limit, 1);
            match search.run(u64::MAX, &mut Memo::new(10), 1, None) {
                Outcome::Found(found) => {
                    assert!(found.height <= limit && limit >= optimum, "{problem:?}");
                    assert_apart(&sections, found);
                }
                outcome => assert!(
                    *outcome == Outcome::Infeasible && limit < optimum,
                    "{outcome:?} {limit} {problem:?}"
                ),
            }
        }
        Ok(())
    });
}

/// The search never proves an existing packing impossible: not by a wrong bound, not by leaving out
/// a branch.
#[test]
fn known_packings_are_not_proved_impossible() {
    use crate::generate::{Cuts, tiling, with_holes};
    let mut open = 0;
    for seed in 0..400 {
        let cuts = [Cuts::Straight, Cuts::Spiral, Cuts::Mixed][seed as usize % 3];
        // For tall tilings without gaps the search lists sums of sizes.
        let tall = seed % 4 == 0;
        let (items, time, height) = (
            8 + seed as usize % 25,
            6 + seed % 40,
            if tall {
                (1 << 20) + seed
            } else {
                6 + seed % 90
            },
        );
        let jigsaw = tiling(seed, items, time, height, cuts);
        let known = if tall {
            jigsaw
        } else {
            with_holes(seed, jigsaw, 2 + seed % 4)
        };
        let sections = sections(&known.problem);
        let mut search = Search::new(&sections, known.height, seed);
        match search.run(20 * ROUND, &mut Memo::new(16), 1, None) {
            Outcome::Found(found) => assert_apart(&sections, found),
            Outcome::Infeasible => panic!("{known:?}"),
            Outcome::Open => open += 1,
        }
    }
    assert!(open < 20, "{open} of 400 small problems are too hard");
}
