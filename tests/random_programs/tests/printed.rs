//! Printed programs compile and run: `printed/programs.inc` holds some, which together have every
//! kind of statement, and equals the current output of the printer. `REPRINT=1 cargo test -p
//! slabwise-random-programs --test printed` rewrites it.

use std::collections::BTreeSet;
use std::fmt::Debug;

use slabwise_random_programs::case::{Axis, Case, Op, Statement};
use slabwise_random_programs::hunt::seed_of;
use slabwise_random_programs::judge::{Counts, judge};
use slabwise_random_programs::method::Method;
use slabwise_random_programs::print::{Claim, test};
use slabwise_random_programs::rng::Rng;
use slabwise_random_programs::{draw, run, setup};

// Every expression is printed in parentheses, so that it can be part of another.
#[allow(unused_parens)]
mod programs {
    include!("printed/programs.inc");
}

/// A kind of statement: the name of its variant, and of the method where it is one of many.
fn kind(Statement { op, args }: &Statement) -> String {
    let args = args.len();
    let word = |x: &dyn Debug| {
        format!("{x:?}")
            .split(|c: char| !c.is_alphanumeric())
            .next()
            .unwrap_or_default()
            .to_string()
    };
    match op {
        Op::Unary(u) => word(u),
        Op::Binary(b) => word(b),
        Op::Fold { fold, keep, .. } => format!("{} {keep}", word(fold)),
        Op::Layer { layer, .. } => word(layer),
        Op::Method(Method::Scan(l)) => word(&l.body),
        Op::Method(Method::Index(method)) => word(method),
        Op::Method(method) => word(method),
        Op::Gradient | Op::Checkpoint(_) => format!("{} {}", word(op), args),
        op => word(op),
    }
}

fn kinds(case: &Case) -> BTreeSet<String> {
    case.programs
        .iter()
        .flat_map(|p| &p.statements)
        .map(kind)
        .collect()
}

/// Whether an input has more numbers than a test should hold.
fn is_large(case: &Case) -> bool {
    let elements = |op: &Op| match op {
        Op::Input { shape, .. } => shape.iter().fold(1, |n, axis| match axis {
            Axis::Fixed(length) => n * length,
            _ => n,
        }),
        _ => 0,
    };
    let statements = case.programs.iter().flat_map(|p| &p.statements);
    statements.map(|s| elements(&s.op)).any(|n| n > 400)
}

/// Programs that each add many kinds of statements to those before, one or two for each way of
/// running them.
fn printed() -> (String, BTreeSet<String>) {
    let (mut text, mut seen) = (String::new(), BTreeSet::new());
    for number in 0..4000 {
        let seed = seed_of(3, number);
        let case = draw::case(seed, 60);
        let new = kinds(&case).difference(&seen).count();
        let few = case
            .programs
            .iter()
            .all(|p| p.outputs.len() < run::OUTPUTS_MAX)
            && case.size() < 50;
        let worth = if number < 300 { new > 8 } else { new > 0 };
        if !worth || !few || case.odd_numbers || is_large(&case) {
            continue;
        }
        let setups = draw::setups(&case, &mut Rng::new(seed));
        let Some(setup) = setups.into_iter().next().filter(|s| s.budget.is_none()) else {
            continue;
        };
        if judge(&case, std::slice::from_ref(&setup), &mut Counts::default()).is_some() {
            continue;
        }
        seen.extend(kinds(&case));
        let claim = if setup.rounds() {
            Claim::Close
        } else {
            Claim::SameBits
        };
        let about = format!("Printed by the default and with {}.", setup.describe());
        text += &test(&format!("program_{seed}"), &about, &case, &setup, &claim);
        text.push('\n');
        if setup != setup::Setup::default() && seen.len() > 190 {
            break;
        }
    }
    (text.trim_end().to_string() + "\n", seen)
}

#[test]
fn the_file_equals_the_printed_programs() {
    let (text, seen) = printed();
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/printed/programs.inc");
    if std::env::var_os("REPRINT").is_some() {
        std::fs::write(path, &text).expect("the file can be written");
    }
    let held = std::fs::read_to_string(path).expect("the file is there");
    assert!(
        held == text,
        "{path} differs from the current output of the printer: REPRINT=1 rewrites it"
    );
    assert!(
        seen.len() > 180,
        "{} kinds of statements: {seen:?}",
        seen.len()
    );
}
