//! The hunt itself: a few hundred programs, a planted bug, and reproducibility from the seed.

use std::collections::{BTreeMap, BTreeSet};

use slabwise::DType::U8;
use slabwise_random_programs::case::{Axis, Binary, Case, Op, Statement, Unary};
use slabwise_random_programs::hunt::{Hunt, drawn, seed_of};
use slabwise_random_programs::judge::{Fault, is_valid};
use slabwise_random_programs::method::Method;
use slabwise_random_programs::run::Outcome;
use slabwise_random_programs::scans::Body;
use slabwise_random_programs::setup::Setup;

fn hunt(seed: u64, graphs: u64, threads: usize) -> Hunt {
    Hunt {
        seed,
        seconds: None,
        graphs: Some(graphs),
        threads,
        max_size: 12,
        trail: None,
        loud: false,
    }
}

#[test]
fn programs_agree_however_they_are_run() {
    let bag = hunt(1, 400, 2).go();
    let reports: Vec<String> = bag.reports.values().map(|r| r.text(12)).collect();
    assert!(reports.is_empty(), "{}", reports.join("\n"));
    assert_eq!(bag.counts.graphs, 400);
    assert!(bag.counts.comparisons > 700, "{:?}", bag.counts);
}

#[test]
fn drawn_cases_are_valid_and_reproducible() {
    for number in 0..2000 {
        let seed = seed_of(7, number);
        let (case, setups) = drawn(seed, 30);
        assert!(is_valid(&case), "case {seed}: {case:#?}");
        assert!(
            drawn(seed, 30) == (case, setups),
            "case {seed} is drawn in two ways"
        );
    }
}

/// Programs have quantized weights of every format with each kind of zero points, and products with
/// them.
#[test]
fn weights_of_every_format_are_drawn() {
    let (mut formats, mut products) = (BTreeSet::new(), 0);
    for number in 0..3000 {
        let (case, _) = drawn(seed_of(9, number), 12);
        for program in &case.programs {
            let statements = &program.statements;
            for statement in statements {
                let of = statement.args.last().map(|&a| &statements[a]);
                let transposed = of
                    .filter(|s| s.op == Op::T)
                    .map(|s| &statements[s.args[0]].op);
                let weight = matches!(transposed, Some(Op::Method(Method::Dequantize(_))));
                products += usize::from(weight && statement.op == Op::Matmul);
                if let Op::Method(Method::Dequantize(format)) = statement.op {
                    let zeros = statement.args.get(2).map(|&a| &statements[a].op);
                    formats.insert((format.bits, zeros.map(|op| *op == Op::Cast(U8))));
                }
            }
        }
    }
    assert_eq!(formats.len(), 9, "{formats:?}");
    assert!(products > 50, "{products}");
}

/// Every function, loop, place and optimizer is drawn, some of them in values with many elements.
#[test]
fn every_kind_of_statement_is_drawn() {
    let (mut drawn_ops, mut large) = (BTreeMap::<String, usize>::new(), 0);
    for number in 0..6000 {
        let (case, _) = drawn(seed_of(13, number), 12);
        for program in &case.programs {
            for Statement { op, args } in &program.statements {
                let name = match op {
                    Op::Unary(u) => format!("{u:?}"),
                    Op::Binary(b) | Op::Number(b, _) => format!("{b:?}"),
                    Op::Method(Method::Scan(l)) => format!("{:?}", l.body),
                    Op::Method(Method::Index(i)) => first_word(i),
                    Op::Gradient | Op::Checkpoint(_) => {
                        format!("{} {}", first_word(op), args.len())
                    }
                    op => first_word(op),
                };
                *drawn_ops.entry(name).or_default() += 1;
                let Op::Input { shape, .. } = op else {
                    continue;
                };
                let lengths = shape.iter().map(|axis| match axis {
                    Axis::Fixed(n) => *n,
                    _ => 1,
                });
                large += usize::from(lengths.product::<usize>() > 400);
            }
        }
    }
    let unary = Unary::ALL.iter().map(|op| format!("{op:?}"));
    let binary = Binary::ALL.iter().map(|op| format!("{op:?}"));
    let bodies = Body::ALL.iter().map(|body| format!("{body:?}"));
    let others = [
        "Take",
        "Segment",
        "Slices",
        "Put",
        "Narrow",
        "PadTo",
        "Length",
        "Gradient 3",
        "Checkpoint 2",
    ];
    let all = unary
        .chain(binary)
        .chain(bodies)
        .chain(others.map(String::from));
    let rare: Vec<String> = all
        .filter(|name| drawn_ops.get(name).is_none_or(|n| *n < 5))
        .collect();
    assert!(
        rare.is_empty() && large > 50,
        "{rare:?}, {large}, {drawn_ops:?}"
    );
}

fn first_word(value: &impl std::fmt::Debug) -> String {
    let text = format!("{value:?}");
    let word = text.split(|c: char| !c.is_alphanumeric()).next();
    word.unwrap_or_default().to_string()
}

/// A wrong last bit in the first output, in dynamic mode, of programs with a logistic function.
fn wrong(case: &Case, setup: &Setup, outcome: &mut Outcome) {
    let has = case.programs[0]
        .statements
        .iter()
        .any(|s| s.op == Op::Unary(Unary::Sigmoid));
    let values = outcome
        .outputs
        .first_mut()
        .and_then(|o| o.first_mut())
        .map(|array| &mut array.values);
    if let (true, true, Some(values)) = (has, setup.dynamic, values) {
        values
            .iter_mut()
            .filter(|v| v.is_finite())
            .for_each(|v| *v = f64::from((*v as f32).next_up()));
    }
}

#[test]
fn a_planted_bug_is_found_and_shrunk_with_any_number_of_threads() {
    for threads in [1, 3] {
        let bag = hunt(7, 400, threads).go_planted(&wrong);
        let reports: Vec<_> = bag
            .reports
            .values()
            .filter(|r| matches!(r.finding.fault, Fault::Differs(_)))
            .collect();
        let smallest = reports
            .iter()
            .min_by_key(|r| r.trial.case.size())
            .expect("the bug is found");
        // A value, its logistic function, and perhaps another output.
        assert!(smallest.trial.case.size() <= 2, "{}", smallest.text(12));
        assert_eq!(
            smallest.trial.setup,
            Setup {
                dynamic: true,
                ..Setup::default()
            }
        );
        assert!(
            smallest.program.contains(".sigmoid()"),
            "{}",
            smallest.program
        );
        assert!(
            smallest.program.contains("session.run_dynamic("),
            "{}",
            smallest.program
        );
    }
}

#[test]
fn counts_do_not_depend_on_threads() {
    let counts = [1, 4].map(|threads| hunt(11, 60, threads).go().counts);
    assert_eq!(counts[0], counts[1]);
}
