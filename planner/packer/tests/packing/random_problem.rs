//! Random packing problems with every constraint, for tests and for fuzzing.

use arbtest::arbitrary::{Result, Unstructured};
use slabwise_packer::Lifetime;
use slabwise_packer::{Gap, InPlace, Item, Placement, Problem, Space, Window};

/// A random problem of up to `items_max` items. Each constraint is valid by itself, but they may
/// contradict each other.
pub fn random_problem(u: &mut Unstructured, items_max: usize) -> Result<Problem> {
    let mut problem = Problem::default();
    let (span, aligned) = (u.int_in_range(1..=12u64)?, u.ratio(1, 3)?);
    for _ in 0..u.int_in_range(0..=items_max)? {
        let start = u.int_in_range(0..=span)?;
        let life = Lifetime::new(start, u.int_in_range(start..=span)?);
        let size = *u.choose(&[0, 1, 2, 3, 4, 4, 8, 8, 13, 40])?;
        let align = if aligned {
            1 << u.int_in_range(0..=3)?
        } else {
            1
        };
        problem.items.push(Item { life, size, align });
    }
    let count = problem.items.len();
    if count == 0 {
        return Ok(problem);
    }
    // Each kind of constraint occurs in some problems only, so that many problems have few.
    if u.ratio(1, 3)? {
        for _ in 0..u.int_in_range(1..=4)? {
            problem.gaps.push(gap(u, &problem, span)?);
        }
    }
    if u.ratio(1, 4)? {
        problem.aliases = groups(u, count)?;
    }
    if u.ratio(1, 4)? {
        problem.contiguous = groups(u, count)?;
    }
    if u.ratio(1, 3)? {
        permit(u, &mut problem)?;
    }
    if u.ratio(1, 4)? {
        for item in some(u, count)? {
            let align = problem.items[item].align;
            problem.fixed.push(Placement {
                item,
                offset: u.int_in_range(0..=60)? / align * align,
            });
        }
    }
    if u.ratio(1, 4)? {
        problem.spaces = vec![Space::default(); u.int_in_range(1..=3)?];
        for item in some(u, count)? {
            let space = u.choose_index(problem.spaces.len())?;
            problem.spaces[space].items.push(item);
        }
        for space in &mut problem.spaces {
            space.capacity = if u.arbitrary()? {
                Some(u.int_in_range(0..=200)?)
            } else {
                None
            };
        }
    }
    if u.ratio(1, 4)? {
        for item in some(u, count)? {
            problem.start.push(Placement {
                item,
                offset: u.int_in_range(0..=60)?,
            });
        }
    }
    Ok(problem)
}

/// A problem without contradictions: of two constraints that contradict each other, one is dropped.
pub fn sound_problem(u: &mut Unstructured, items_max: usize) -> Result<Problem> {
    let mut problem = random_problem(u, items_max)?;
    type Rule = fn(&mut Problem);
    let drops: [Rule; 5] = [
        |problem| problem.fixed.clear(),
        |problem| {
            problem
                .spaces
                .iter_mut()
                .for_each(|space| space.items.clear())
        },
        |problem| problem.contiguous.clear(),
        |problem| problem.in_place.clear(),
        |problem| problem.aliases.clear(),
    ];
    for drop in drops {
        if problem.verify().is_ok() {
            break;
        }
        drop(&mut problem);
    }
    Ok(problem)
}

fn gap(u: &mut Unstructured, problem: &Problem, span: u64) -> Result<Gap> {
    let item = u.choose_index(problem.items.len())?;
    let start = u.int_in_range(0..=span)?;
    let life = Lifetime::new(start, u.int_in_range(start..=span)?);
    let size = problem.items[item].size;
    let low = u.int_in_range(0..=size)?;
    let window = if u.arbitrary()? {
        Some(Window {
            low,
            high: u.int_in_range(low..=size)?,
        })
    } else {
        None
    };
    Ok(Gap { item, life, window })
}

/// A few different items in random order.
fn some(u: &mut Unstructured, count: usize) -> Result<Vec<usize>> {
    let mut all: Vec<usize> = (0..count).collect();
    let mut some = Vec::new();
    for _ in 0..u.int_in_range(1..=4)?.min(count) {
        some.push(all.swap_remove(u.choose_index(all.len())?));
    }
    Ok(some)
}

/// One or two groups without common members.
fn groups(u: &mut Unstructured, count: usize) -> Result<Vec<Vec<usize>>> {
    let mut some = some(u, count)?;
    let rest = some.split_off(u.int_in_range(0..=some.len())?);
    Ok(vec![some, rest])
}

/// Permits pairs; now and then moves an item so that a pair is possible.
fn permit(u: &mut Unstructured, problem: &mut Problem) -> Result<()> {
    for _ in 0..u.int_in_range(1..=5)? {
        let (from, to) = (
            u.choose_index(problem.items.len())?,
            u.choose_index(problem.items.len())?,
        );
        let (giver, taker) = (problem.items[from].life, problem.items[to].life);
        if from != to && !giver.is_empty() {
            let start = giver.end - 1;
            problem.items[to].life = Lifetime::new(start, start + taker.steps().max(1));
        }
    }
    for from in 0..problem.items.len() {
        for to in 0..problem.items.len() {
            let (giver, taker) = (problem.items[from].life, problem.items[to].life);
            let meets = from != to
                && !giver.is_empty()
                && !taker.is_empty()
                && taker.start + 1 == giver.end;
            if meets && u.ratio(1, 2)? {
                problem.in_place.push(InPlace { from, to });
            }
        }
    }
    Ok(())
}
