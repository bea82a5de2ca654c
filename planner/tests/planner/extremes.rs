//! Numbers at the limits of 64 bits, and options that are not numbers: each is planned or rejected
//! by name, and nothing panics.

use crate::generate::random_dag;
use crate::remat::cases;
use arbtest::arbitrary::{Result, Unstructured};
use slabwise_planner::remat::{Budget, Limit, RematError, RematOptions, remat, remat_in_slab};
use slabwise_planner::remat_graph::{Node, RematGraph};
use slabwise_planner::{
    Dag, Effort, Link, Options, PlanError, check, check_offload, holders_at_peak, minimise_peak,
    plan, plan_with_link, plan_within, report,
};

/// The limits of signed and unsigned 64-bit arithmetic, in whole units of an alignment and not.
const NUMBERS: [u64; 14] = [
    0,
    1,
    63,
    65,
    1 << 31,
    1 << 32,
    (1 << 53) + 1,
    1 << 61,
    (1 << 62) - 1,
    1 << 62,
    i64::MAX as u64,
    1 << 63,
    u64::MAX - 63,
    u64::MAX,
];

/// Replaces a few numbers by extreme ones.
fn strain(u: &mut Unstructured, dag: &mut Dag) -> Result<()> {
    for _ in 0..u.int_in_range(1..=3)? {
        let number = *u.choose(&NUMBERS)?;
        let (buffers, tasks) = (dag.buffers.len(), dag.tasks.len());
        match u.int_in_range(0..=4)? {
            0 | 1 if buffers > 0 => dag.buffers[u.choose_index(buffers)?].bytes = number,
            2 if buffers > 0 => {
                dag.buffers[u.choose_index(buffers)?].align = 1 << u.int_in_range(0..=63)?
            }
            3 if tasks > 0 => dag.tasks[u.choose_index(tasks)?].workspace = number,
            4 if tasks > 0 => dag.tasks[u.choose_index(tasks)?].cost = number,
            _ => {}
        }
    }
    Ok(())
}

#[test]
fn dags_of_extreme_sizes_are_planned_or_refused() {
    let (mut planned, mut refused, mut large) = (0, 0, 0);
    cases(400, |u| {
        let mut dag = random_dag(u)?;
        for task in &mut dag.tasks {
            (task.repeatable, task.cost) = (
                !task.writes.is_empty() && u.ratio(1, 2)?,
                u.int_in_range(0..=9)?,
            );
        }
        strain(u, &mut dag)?;
        let options = Options {
            effort: *u.choose(&[0, 1, 500])?,
            ..Options::default()
        };
        let once = match plan(&dag, &options) {
            Ok(plan) => plan,
            Err(PlanError::Dag(error)) => {
                assert_eq!(dag.verify(), Err(error.clone()));
                assert_eq!(minimise_peak(&dag, true, Effort::Counted), Err(error));
                refused += 1;
                return Ok(());
            }
            Err(error) => panic!("{error}\n{dag}"),
        };
        planned += 1;
        large += u32::from(once.height > 1 << 60);
        assert_eq!(
            minimise_peak(&dag, true, Effort::Counted).map(|best| best.lower_bound <= best.peak),
            Ok(true)
        );
        let whole = once.height;
        let checked = check(&dag, once.clone()).unwrap_or_else(|why| panic!("{why}\n{dag}"));
        assert!(!report::text(&dag, &checked).to_string().is_empty());
        assert!(
            holders_at_peak(&dag, &checked)
                .iter()
                .map(|(_, bytes)| bytes)
                .sum::<u64>()
                <= whole
        );
        let budget = *u.choose(&[0, 1, whole / 2, whole.saturating_sub(1), u64::MAX])?;
        let within = plan_within(&dag, once.clone(), budget, &options)
            .unwrap_or_else(|why| panic!("{why}\n{dag}"));
        assert!(within.plan.height <= whole);
        let host_bytes = *u.choose(&[None, Some(0), Some(1), Some(u64::MAX)])?;
        let link = Link {
            cost_per_byte: *u.choose(&[0.0, 1e-300, 1.0, 1e30, f64::MAX])?,
            host_bytes,
        };
        // Offloaded bytes count twice, which may exceed 64 bits.
        let Ok(found) = plan_with_link(&dag, once, budget, &link, &options) else {
            return Ok(());
        };
        assert!(found.plan.height <= whole);
        if let Some(offloaded) = found.offloaded {
            let base = found
                .repeated
                .as_ref()
                .map_or(&dag, |repeated| &repeated.dag);
            check(&offloaded.dag, found.plan).unwrap_or_else(|why| panic!("{why}\n{dag}"));
            check_offload(base, offloaded.into_inner())
                .unwrap_or_else(|why| panic!("{why}\n{dag}"));
        }
        Ok(())
    });
    assert!(
        planned > 100 && refused > 100 && large > 20,
        "{planned} planned, {large} of them large; {refused} refused"
    );
}

fn node(index: u32, bytes: u64, cost: u64, workspace: u64) -> Node {
    let inputs = index.checked_sub(1).into_iter().collect();
    Node {
        name: format!("n{index}"),
        inputs,
        bytes,
        cost,
        workspace,
        recompute: true,
        ..Node::default()
    }
}

#[test]
fn graphs_of_extreme_sizes_are_searched_or_refused() {
    let (mut found, mut refused) = (0, 0);
    cases(150, |u| {
        let mut number = || {
            Ok(if u.ratio(1, 6)? {
                *u.choose(&NUMBERS)?
            } else {
                u.int_in_range(0..=99)?
            })
        };
        let nodes: Result<Vec<Node>> = (0..8)
            .map(|i| Ok(node(i, number()?, number()?, number()?)))
            .collect();
        let mut graph = RematGraph {
            name: "strained".into(),
            nodes: nodes?,
            outputs: vec![7],
        };
        let last = u.int_in_range(2..=7u32)?;
        graph.nodes[last as usize].inputs.insert(0, last - 2);
        // A graph is verified when it is read: its sums fit 64 bits.
        let sum = |of: fn(&Node) -> u64| {
            graph
                .nodes
                .iter()
                .try_fold(0u64, |sum, node| sum.checked_add(of(node)))
        };
        let sums = [sum(|n| n.bytes), sum(|n| n.workspace), sum(|n| n.cost)];
        let [Some(bytes), Some(workspaces), Some(_)] = sums else {
            return Ok(());
        };
        if bytes.checked_add(workspaces).is_none() {
            return Ok(());
        }
        let budget = *u.choose(&[
            Budget::Bytes(0),
            Budget::Bytes(1 << 62),
            Budget::Bytes(u64::MAX),
            Budget::Fraction(0.0),
            Budget::Fraction(0.7),
            Budget::Fraction(1e300),
        ])?;
        let link = *u.choose(&[None, Some(0.0), Some(1.0), Some(f64::MAX)])?;
        let options = RematOptions {
            budget,
            link,
            limit: Limit::Rounds(60),
            seed: *u.choose(&NUMBERS)?,
        };
        match remat(&graph, &options) {
            Ok(remat) => {
                assert!(remat.peak >= remat.peak_bound);
                found += 1;
                let (_, placed) = remat_in_slab(&graph, &options).expect("the same graph");
                assert!(placed.height > 0 || bytes == 0);
            }
            Err(error) => {
                assert!(
                    matches!(error, RematError::TooLarge { bytes } if bytes >= 1 << 62),
                    "{error}"
                );
                refused += 1;
            }
        }
        Ok(())
    });
    assert!(
        found > 30 && refused > 30,
        "{found} found, {refused} refused"
    );
}

#[test]
fn options_that_are_not_numbers_are_named() {
    let graph = RematGraph {
        name: "chain".into(),
        nodes: (0..4).map(|i| node(i, 8, 1, 0)).collect(),
        outputs: vec![3],
    };
    let options = RematOptions {
        budget: Budget::Bytes(16),
        link: None,
        limit: Limit::Rounds(20),
        seed: 0,
    };
    let mut dag = graph.to_dag(false).dag;
    dag.tasks.iter_mut().for_each(|task| task.repeatable = true);
    let once = plan(&dag, &Options::default()).expect("a valid dag");
    for bad in [f64::NAN, -1.0, -1e-300, f64::INFINITY, f64::NEG_INFINITY] {
        let part = RematOptions {
            budget: Budget::Fraction(bad),
            ..options
        };
        let slow = RematOptions {
            link: Some(bad),
            ..options
        };
        for (options, says) in [(part, "a budget"), (slow, "a byte")] {
            let said = remat(&graph, &options).expect_err("no number").to_string();
            assert!(
                said.contains(says) && said.contains(&bad.to_string()),
                "{said}"
            );
            assert_eq!(
                remat_in_slab(&graph, &options)
                    .expect_err("no number")
                    .to_string(),
                said
            );
        }
        let link = Link {
            cost_per_byte: bad,
            host_bytes: None,
        };
        for budget in [0, once.height] {
            let said = plan_with_link(&dag, once.clone(), budget, &link, &Options::default())
                .expect_err("no number")
                .to_string();
            assert!(
                said.contains("a byte") && said.contains(&bad.to_string()),
                "{said}"
            );
        }
    }
}
