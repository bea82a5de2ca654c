//! Schedules under a budget: judged by the rules of the format, and compared with the optimum on
//! small graphs.

use crate::judge::{Judged, judge};
use crate::order::{random_graph, real_graph};
use arbtest::arbitrary::Unstructured;
use arbtest::arbtest;
use slabwise_planner::remat::{Budget, Limit, Remat, RematOptions, remat, remat_in_slab};
use slabwise_planner::remat_graph::{Node, RematGraph};
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::time::Duration;

fn options(budget: u64) -> RematOptions {
    RematOptions {
        budget: Budget::Bytes(budget),
        link: None,
        limit: Limit::Rounds(120),
        seed: 1,
    }
}

/// The judged peak and cost of a schedule, which must equal its reported ones.
fn judged(graph: &RematGraph, found: &Remat, link: f64) -> Judged {
    let judged = judge(
        graph,
        found.steps(graph).into_iter().map(|step| (step, None)),
        link,
    );
    let judged = judged.unwrap_or_else(|why| panic!("{why}\n{graph:?}\n{found:?}"));
    assert_eq!(
        (judged.peak, u128::from(judged.cost)),
        (found.peak, found.cost),
        "{graph:?}\n{found:?}"
    );
    assert!(
        (judged.time - found.time as f64).abs() <= 1.0 + 1e-9 * judged.time,
        "{} {}",
        judged.time,
        found.time
    );
    assert_eq!(found.is_met(), found.peak <= found.budget);
    assert!(found.peak_bound <= found.peak);
    if found.is_met() {
        assert!(found.time_bound <= found.time, "{found:?}");
    }
    judged
}

/// The same random cases every time, for any load of the machine.
pub fn cases(
    count: u64,
    mut property: impl FnMut(&mut Unstructured) -> arbtest::arbitrary::Result<()>,
) {
    for case in 1..=count {
        arbtest(&mut property).seed(case << 32 | 4096).run();
    }
}

/// The lowest cost of running every node at least once within the budget, by Dijkstra's algorithm
/// over the sets of live buffers and of nodes that have run.
fn cheapest(graph: &RematGraph, budget: u64) -> Option<u64> {
    let n = graph.nodes.len();
    let computed: Vec<usize> = (0..n).filter(|&i| !graph.nodes[i].persistent).collect();
    let all: u32 = computed.iter().map(|i| 1 << i).sum();
    let bytes = |live: u32| {
        (0..n)
            .filter(|i| live >> i & 1 == 1)
            .map(|i| graph.nodes[i].bytes)
            .sum::<u64>()
    };
    let mut known: HashMap<(u32, u32), u64> = HashMap::from([((0, 0), 0)]);
    let mut queue = BinaryHeap::from([Reverse((0, 0, 0))]);
    while let Some(Reverse((cost, live, ran))) = queue.pop() {
        if known[&(live, ran)] < cost {
            continue;
        }
        if ran == all && graph.outputs.iter().all(|o| live >> o & 1 == 1) {
            return Some(cost);
        }
        let mut next = Vec::new();
        for &i in &computed {
            if live >> i & 1 == 1 {
                next.push((cost, live & !(1 << i), ran));
                continue;
            }
            let node = &graph.nodes[i];
            let once = ran >> i & 1 == 1 && !node.mutates.is_empty();
            let ready = node
                .inputs
                .iter()
                .all(|&j| graph.nodes[j as usize].persistent || live >> j & 1 == 1);
            let changed = |j: &u32| {
                computed
                    .iter()
                    .any(|&k| k != i && ran >> k & 1 == 1 && graph.nodes[k].mutates.contains(j))
            };
            if once
                || !ready
                || node.inputs.iter().any(changed)
                || bytes(live) + node.bytes + node.workspace > budget
            {
                continue;
            }
            next.push((cost + node.cost, live | 1 << i, ran | 1 << i));
        }
        for (cost, live, ran) in next {
            let old = known.entry((live, ran)).or_insert(u64::MAX);
            if cost < *old {
                *old = cost;
                queue.push(Reverse((cost, live, ran)));
            }
        }
    }
    None
}

#[test]
fn small_graphs_never_beat_the_optimum_and_bounds_hold() {
    let (mut tight, mut best) = (0, 0);
    cases(30, |u| {
        let graph = random_graph(u, 7)?;
        let least = remat(&graph, &options(0)).expect("small");
        judged(&graph, &least, 0.0);
        let budget = u.int_in_range(least.peak_bound..=least.ordered_peak)?;
        let found = remat(&graph, &options(budget)).expect("small");
        judged(&graph, &found, 0.0);
        assert_eq!(
            found,
            remat(&graph, &options(budget)).expect("small"),
            "the same again"
        );
        match cheapest(&graph, budget) {
            None => assert!(!found.is_met(), "{graph:?}"),
            Some(cost) => {
                assert!(found.peak_bound <= budget, "{graph:?}\n{found:?}");
                assert!(
                    found.time_bound <= u128::from(cost),
                    "{} > {cost}, budget {budget}\n{graph:?}",
                    found.time_bound
                );
                assert!(
                    !found.is_met() || found.cost >= u128::from(cost),
                    "{graph:?}"
                );
                tight += 1;
                best += u32::from(found.is_met() && found.cost == u128::from(cost));
            }
        }
        Ok(())
    });
    assert!(
        tight > 15 && best * 10 >= tight * 8,
        "{best} of {tight} are the cheapest"
    );
}

#[test]
fn transfers_end_before_they_are_needed() {
    let (mut sent, mut sooner) = (0, 0);
    cases(80, |u| {
        let graph = random_graph(u, 14)?;
        let least = remat(&graph, &options(0)).expect("small");
        let budget = u.int_in_range(least.peak_bound..=least.ordered_peak)?;
        let link = f64::from(u.int_in_range(0..=40u8)?) / 10.0;
        let alone = remat(&graph, &options(budget)).expect("small");
        let found = remat(
            &graph,
            &RematOptions {
                link: Some(link),
                ..options(budget)
            },
        )
        .expect("small");
        judged(&graph, &found, link);
        sent += u32::from(!found.transfers.is_empty());
        // Never worse than without a link: first by the budget, then by the time.
        assert!(
            found.peak.max(budget) <= alone.peak.max(budget),
            "{graph:?}"
        );
        assert!(found.time <= alone.time || !alone.is_met(), "{graph:?}");
        sooner += u32::from(
            alone.is_met() && found.time < alone.time || found.is_met() && !alone.is_met(),
        );
        Ok(())
    });
    assert!(
        sent > 5 && sooner > 5,
        "{sent} with transfers, {sooner} the better for it"
    );
}

/// Fractions of the smallest peak, times to copy a byte, and the overhead that remains, in
/// hundredths of a percent.
#[test]
fn real_graphs_take_less_time_with_a_link() {
    let graph = real_graph("unet_d2_c16_b4_grads");
    let base = graph.base_cost() as f64;
    for (fraction, link, most) in [
        (0.75, 780.0, 230),
        (0.75, 300.0, 20),
        (0.5, 780.0, 1300),
        (0.5, 300.0, 600),
        (0.35, 300.0, 5500),
    ] {
        let budget = Budget::Fraction(fraction);
        let found = remat(
            &graph,
            &RematOptions {
                budget,
                link: Some(link),
                limit: Limit::Rounds(600),
                seed: 0,
            },
        )
        .expect("not too large");
        judged(&graph, &found, link);
        let over = 10_000.0 * (found.time as f64 / base - 1.0);
        assert!(
            found.is_met() && over <= f64::from(most),
            "{fraction}, {link}: {over}, {} of {} bytes",
            found.peak,
            found.budget
        );
    }
}

#[test]
fn slabs_hold_all_live_buffers() {
    cases(40, |u| {
        let graph = random_graph(u, 14)?;
        let least = remat(&graph, &options(0)).expect("small");
        let budget = u.int_in_range(least.peak_bound..=least.ordered_peak)?;
        let link = u.arbitrary::<bool>()?.then_some(0.5);
        let (found, placed) = remat_in_slab(
            &graph,
            &RematOptions {
                link,
                ..options(budget)
            },
        )
        .expect("small");
        let judged = judge(&graph, placed.steps.iter().copied(), link.unwrap_or(0.0));
        let judged = judged.unwrap_or_else(|why| panic!("{why}\n{graph:?}\n{placed:?}"));
        assert_eq!(
            (judged.height, judged.peak),
            (placed.height, found.peak),
            "{graph:?}"
        );
        assert!(placed.height >= found.peak);
        Ok(())
    });
}

/// Budgets and the lowest costs known for them, in hundredths of a percent above the cost of
/// running everything once.
#[test]
fn real_graphs_reach_their_lowest_known_costs() {
    for (name, budget, most) in [
        ("cifar_vgg6_b128_sgd", 55_616_474, 228),
        ("cifar_vgg6_b128_sgd", 53_477_379, 319),
        ("unet_d2_c16_b4_grads", 37_355_625, 345),
    ] {
        let graph = real_graph(name);
        let found = remat(
            &graph,
            &RematOptions {
                limit: Limit::Rounds(300),
                ..options(budget)
            },
        )
        .expect("not too large");
        judged(&graph, &found, 0.0);
        let over = 10_000.0 * (found.cost as f64 / graph.base_cost() as f64 - 1.0);
        assert!(
            found.is_met() && over <= f64::from(most),
            "{name}: {over}, {} of {budget} bytes",
            found.peak
        );
        let fraction = RematOptions {
            budget: Budget::Fraction(0.75),
            ..options(0)
        };
        assert_eq!(
            remat(&graph, &fraction).expect("not too large").budget,
            (found.ordered_peak as f64 * 0.75) as u64
        );
    }
}

/// A chain forward and, reading its values, backward.
fn chain(layers: u32) -> RematGraph {
    let mut graph = RematGraph::default();
    for i in 0..2 * layers {
        let inputs = match i {
            0 => vec![],
            i if i < layers => vec![i - 1],
            i if i == layers => vec![i - 1],
            i => vec![2 * layers - 1 - i, i - 1],
        };
        let (bytes, cost) = (u64::from(10 + i % 7), u64::from(1 + i % 5));
        graph.nodes.push(Node {
            name: format!("n{i}"),
            inputs,
            bytes,
            cost,
            recompute: true,
            ..Node::default()
        });
    }
    graph.outputs = vec![2 * layers - 1];
    graph
}

/// Runs every mode; `check` gets each result.
fn in_every_mode(graph: &RematGraph, options: RematOptions, mut check: impl FnMut(&Remat)) {
    for link in [None, Some(0.5)] {
        let options = RematOptions { link, ..options };
        let found = remat(graph, &options).expect("small");
        judged(graph, &found, link.unwrap_or(0.0));
        check(&found);
        let (found, placed) = remat_in_slab(graph, &options).expect("small");
        let in_slab = judge(graph, placed.steps.iter().copied(), link.unwrap_or(0.0))
            .expect("a valid schedule");
        assert_eq!((in_slab.height, in_slab.peak), (placed.height, found.peak));
        check(&found);
    }
}

#[test]
fn a_schedule_is_found_without_time() {
    let over = Limit::Time(Duration::ZERO);
    for graph in [chain(6), chain(1050), real_graph("unet_d2_c16_b4_grads")] {
        let largest: u64 = graph.nodes.iter().map(|node| node.bytes).max().unwrap_or(0);
        for budget in [
            Budget::Bytes(largest),
            Budget::Fraction(0.5),
            Budget::Fraction(1.0),
        ] {
            in_every_mode(
                &graph,
                RematOptions {
                    budget,
                    link: None,
                    limit: over,
                    seed: 0,
                },
                |found| {
                    assert!(
                        found.is_met() == (budget == Budget::Fraction(1.0)),
                        "{budget:?}: {} of {}",
                        found.peak,
                        found.budget
                    );
                    assert_eq!(
                        found.schedule.len(),
                        graph.nodes.iter().filter(|node| !node.persistent).count(),
                        "nothing runs twice"
                    );
                    assert!(found.peak <= found.ordered_peak && found.transfers.is_empty());
                },
            );
        }
    }
}

/// Work that is left out per step must not be missed in a long schedule.
#[test]
fn long_chains_keep_their_budgets_for_little() {
    let graph = chain(1050);
    let base = graph.base_cost() as f64;
    for (fraction, most) in [(0.7, 1.12), (0.4, 1.35)] {
        let options = RematOptions {
            budget: Budget::Fraction(fraction),
            link: None,
            limit: Limit::Rounds(12),
            seed: 0,
        };
        in_every_mode(&graph, options, |found| {
            let over = found.time as f64 / base;
            assert!(
                found.is_met() && over <= most,
                "{fraction}: {} of {} bytes, {over}",
                found.peak,
                found.budget
            );
        });
    }
}
