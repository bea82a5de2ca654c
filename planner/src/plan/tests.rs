//! The growth of the planner's work with the size of the dag, counted and not timed.

use super::{Options, plan};
use crate::dag::relations::LOOKS;
use crate::generate::{chain, random_tasks, recurrent};

/// Four times the tasks take little more than four times the work, for dags of any shape.
#[test]
fn dags_are_planned_in_linear_work() {
    type Shape = (&'static str, fn(usize) -> crate::Dag);
    let shapes: [Shape; 3] = [
        ("chain", chain),
        ("recurrent", recurrent),
        ("random", random_tasks),
    ];
    for (name, make) in shapes {
        for effort in [0, Options::default().effort] {
            let [one, four] = [1_500, 6_000].map(|tasks| {
                let dag = make(tasks);
                let before = LOOKS.get();
                plan(
                    &dag,
                    &Options {
                        effort,
                        ..Options::default()
                    },
                )
                .expect("a valid dag");
                LOOKS.get() - before
            });
            assert!(
                four <= 6 * one,
                "{name} with effort {effort}: {one} looks for 1,500 tasks, {four} for 6,000"
            );
        }
    }
}
