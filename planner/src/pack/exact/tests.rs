use super::*;
use crate::pack::tests::{optimum, random_problem};
use crate::pack::Problem;
use arbtest::arbtest;

fn sections(problem: &Problem) -> (Sections, Vec<usize>) {
    let placed: Vec<usize> = (0..problem.items.len()).filter(|&i| problem.items[i].needs_space()).collect();
    (Sections::new(problem, &placed), placed)
}

/// A packing that is valid and too high.
fn stacked(sections: &Sections) -> Found {
    let mut found = Found { offsets: Vec::new(), height: 0 };
    for span in &sections.spans {
        let offset = found.height.next_multiple_of(span.align);
        found.offsets.push(offset);
        found.height = offset + span.size;
    }
    found
}

fn assert_valid(sections: &Sections, found: &Found) {
    let mut height = 0;
    for (i, (a, &low)) in sections.spans.iter().zip(&found.offsets).enumerate() {
        assert!(low.is_multiple_of(a.align));
        height = height.max(low + a.size);
        for (b, &other) in sections.spans.iter().zip(&found.offsets).take(i) {
            let apart = low + a.size <= other || other + b.size <= low;
            assert!(apart || a.end <= b.start || b.end <= a.start, "{a:?} at {low}, {b:?} at {other}");
        }
    }
    assert_eq!((found.offsets.len(), found.height), (sections.spans.len(), height));
}

fn exactly(sections: &Sections) -> u64 {
    let mut exact = Exact::new(sections, stacked(sections), sections.lower_bound(), 0);
    exact.run(0, u64::MAX, 1, None);
    assert_valid(sections, exact.best());
    assert_eq!(exact.lower_bound(), exact.best().height);
    exact.best().height
}

#[test]
fn the_optimum_of_few_items_is_found_and_nothing_below_it() {
    arbtest(|u| {
        let problem = random_problem(u, 6)?;
        let (sections, _) = sections(&problem);
        let optimum = optimum(&problem);
        assert_eq!(exactly(&sections), optimum, "{problem:?}");
        for limit in optimum.saturating_sub(3)..optimum + 3 {
            let mut search = Search::new(&sections, limit, 1);
            match search.run(u64::MAX, &mut Memo::new(10), 1, None) {
                Outcome::Found(found) => {
                    assert!(found.height <= limit && limit >= optimum, "{problem:?}");
                    assert_valid(&sections, found);
                }
                outcome => assert!(*outcome == Outcome::Infeasible && limit < optimum, "{outcome:?} {limit} {problem:?}"),
            }
        }
        Ok(())
    });
}
