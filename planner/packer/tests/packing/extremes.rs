//! Items and constraints with numbers at the limits of 64 bits: packed, or rejected by an error
//! that names the item.

use crate::random_problem::random_problem;
use arbtest::arbtest;
use slabwise_packer::Lifetime;
use slabwise_packer::csv;
use slabwise_packer::{Limits, Violation, Window, check};
use std::time::Duration;

const NUMBERS: [u64; 12] = [
    0,
    1,
    7,
    1 << 31,
    1 << 32,
    1 << 53,
    (1 << 62) - 1,
    1 << 62,
    i64::MAX as u64,
    1 << 63,
    u64::MAX - 7,
    u64::MAX,
];

#[test]
fn extreme_numbers_are_packed_or_refused() {
    arbtest(|u| {
        let mut problem = random_problem(u, 10)?;
        for _ in 0..u.int_in_range(1..=4)? {
            let number = *u.choose(&NUMBERS)?;
            if problem.items.is_empty() {
                break;
            }
            let item = u.choose_index(problem.items.len())?;
            match u.int_in_range(0..=7)? {
                0 | 1 => problem.items[item].size = number,
                2 => {
                    problem.items[item].align = if u.arbitrary()? {
                        number
                    } else {
                        1 << u.int_in_range(0..=63)?
                    }
                }
                3 => {
                    let start = *u.choose(&NUMBERS)?;
                    problem.items[item].life = Lifetime::new(start.min(number), start.max(number));
                }
                4 => problem
                    .fixed
                    .iter_mut()
                    .take(1)
                    .for_each(|at| at.offset = number),
                5 => problem
                    .start
                    .iter_mut()
                    .take(1)
                    .for_each(|at| at.offset = number),
                6 => {
                    let window = Some(Window {
                        low: number,
                        high: *u.choose(&NUMBERS)?,
                    });
                    problem
                        .gaps
                        .iter_mut()
                        .take(1)
                        .for_each(|gap| gap.window = window);
                }
                _ => problem
                    .gaps
                    .iter_mut()
                    .take(1)
                    .for_each(|gap| gap.life.end = number),
            }
        }
        let bound = problem.lower_bound();
        let limits = Limits {
            capacity: *u.choose(&[None, Some(0), Some(u64::MAX)])?,
            time: *u.choose(&[None, Some(Duration::ZERO), Some(Duration::MAX)])?,
            effort: *u.choose(&[0, 1, 300])?,
            threads: *u.choose(&[0, 1, 3, usize::MAX])?,
            seed: *u.choose(&NUMBERS)?,
        };
        match problem.pack_within(&limits) {
            Ok(packing) => {
                let judged = check(&problem, &packing);
                assert!(
                    matches!(judged, Ok(()) | Err(Violation::Capacity(_))),
                    "{judged:?}\n{problem:?}"
                );
                assert!(
                    bound <= packing.height || problem.spaces.len() > 1,
                    "{problem:?}"
                );
            }
            Err(error) => {
                assert_eq!(problem.verify(), Err(error.clone()));
                let items = error.items();
                assert!(
                    items
                        .iter()
                        .all(|item| error.to_string().contains(&item.to_string())),
                    "{error}"
                );
            }
        }
        let _ = problem.apart();
        Ok(())
    })
    .budget_ms(2_000);
}

/// The same through a table: reading returns the table that was written.
#[test]
fn extreme_numbers_in_tables() {
    for column in ["lower", "upper", "size", "alignment", "fixed", "offset"] {
        for number in NUMBERS
            .iter()
            .map(u64::to_string)
            .chain(["18446744073709551616", "-1", "1e3", "NaN", ""].map(String::from))
        {
            let value = |name: &str, usual: &str| {
                if name == column {
                    number.clone()
                } else {
                    usual.to_string()
                }
            };
            let [lower, upper, size] = [("lower", "2"), ("upper", "9"), ("size", "64")]
                .map(|(name, usual)| value(name, usual));
            let [align, fixed, offset] = [("alignment", "8"), ("fixed", ""), ("offset", "")]
                .map(|(name, usual)| value(name, usual));
            let text = format!(
                "id,lower,upper,size,alignment,fixed,offset\na,{lower},{upper},{size},{align},{fixed},{offset}\nb,1,20,32,16,,\n"
            );
            match csv::read(&text) {
                Ok(table) => {
                    assert_eq!(
                        csv::read(&csv::write(&table)).as_ref(),
                        Ok(&table),
                        "{text}"
                    );
                    match table.problem.pack() {
                        Ok(packing) => {
                            assert_eq!(check(&table.problem, &packing), Ok(()), "{text}")
                        }
                        Err(error) => assert!(
                            error.items().contains(&0) || error.items().contains(&1),
                            "{error}\n{text}"
                        ),
                    }
                }
                Err(error) => assert!(error.to_string().starts_with("line 2: "), "{error}\n{text}"),
            }
        }
    }
}
