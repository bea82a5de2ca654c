//! Orders and bounds: compared with all orders on small problems, and with relabelled copies on
//! real ones.

use crate::generate::random_dag;
use crate::judge::judge;
use arbtest::arbitrary::{Result, Unstructured};
use arbtest::arbtest;
use slabwise_planner::remat_graph::{Node, RematGraph, Step, steps_in_place};
use slabwise_planner::{Dag, Effort, Options, minimise_peak, plan};
use std::time::Duration;

/// Runs nodes in an order and frees buffers after their last reader; in place where that is
/// permitted, or never.
fn peak_of(graph: &RematGraph, order: &[u32], in_place: bool) -> std::result::Result<u64, String> {
    if in_place {
        return peak(graph, steps_in_place(graph, order));
    }
    let mut steps = Vec::new();
    for (at, &i) in order.iter().enumerate() {
        steps.push(Step::Compute {
            node: i,
            reuse: None,
        });
        let used_later = |j: u32| {
            order[at + 1..]
                .iter()
                .any(|&k| graph.nodes[k as usize].inputs.contains(&j))
        };
        let ends = |&j: &u32| {
            !graph.nodes[j as usize].persistent && !graph.outputs.contains(&j) && !used_later(j)
        };
        steps.extend(
            graph.nodes[i as usize]
                .inputs
                .iter()
                .copied()
                .chain([i])
                .filter(ends)
                .map(Step::Free),
        );
    }
    peak(graph, steps)
}

fn peak(graph: &RematGraph, steps: Vec<Step>) -> std::result::Result<u64, String> {
    judge(graph, steps.into_iter().map(|step| (step, None)), 0.0).map(|judged| judged.peak)
}

pub fn random_graph(u: &mut Unstructured, nodes_max: usize) -> Result<RematGraph> {
    let mut graph = RematGraph::default();
    let persistent = u.int_in_range(0..=2usize)?;
    for i in 0..persistent + u.int_in_range(1..=nodes_max)? {
        let mut inputs: Vec<u32> = Vec::new();
        for _ in 0..u.int_in_range(0..=3)? {
            if i > 0 {
                inputs.push(u.int_in_range(0..=i as u32 - 1)?);
            }
        }
        inputs.sort_unstable();
        inputs.dedup();
        let bytes = *u.choose(&[0, 1, 2, 2, 3, 5, 8, 13])?;
        let same = |&&j: &&u32| {
            graph.nodes[j as usize].bytes == bytes && bytes > 0 && j as usize >= persistent
        };
        let inplace = inputs.iter().filter(same).copied().collect();
        let workspace = if u.ratio(1, 4)? {
            u.int_in_range(0..=9)?
        } else {
            0
        };
        let cost = u.int_in_range(0..=9)?;
        let node = Node {
            name: format!("n{i}"),
            inputs,
            bytes,
            workspace,
            cost,
            recompute: true,
            inplace,
            ..Node::default()
        };
        graph.nodes.push(if i < persistent {
            Node {
                persistent: true,
                inputs: vec![],
                workspace: 0,
                cost: 0,
                ..node
            }
        } else {
            node
        });
    }
    for p in 0..persistent {
        if u.ratio(1, 2)? {
            // The last reader may change it.
            if let Some(last) = graph
                .nodes
                .iter_mut()
                .rev()
                .find(|node| node.inputs.contains(&(p as u32)))
            {
                last.mutates.push(p as u32);
            }
        }
    }
    for i in persistent..graph.nodes.len() {
        if u.ratio(1, 6)? {
            graph.outputs.push(i as u32);
            graph
                .nodes
                .iter_mut()
                .for_each(|node| node.inplace.retain(|&j| j != i as u32));
        }
    }
    Ok(graph)
}

/// The smallest peak over all orders, judged by `peak`, which rejects the prefix of invalid orders.
fn least_peak(
    nodes: &[u32],
    peak: &dyn Fn(&[u32]) -> Option<u64>,
    follows: &dyn Fn(u32, &[u32]) -> bool,
) -> Option<u64> {
    fn extend(
        order: &mut Vec<u32>,
        nodes: &[u32],
        peak: &dyn Fn(&[u32]) -> Option<u64>,
        follows: &dyn Fn(u32, &[u32]) -> bool,
        least: &mut Option<u64>,
    ) {
        if order.len() == nodes.len() {
            if let Some(found) = peak(order) {
                *least = Some(least.map_or(found, |known| known.min(found)));
            }
            return;
        }
        for &node in nodes {
            if !order.contains(&node) && follows(node, order) {
                order.push(node);
                extend(order, nodes, peak, follows, least);
                order.pop();
            }
        }
    }
    let mut least = None;
    extend(&mut Vec::new(), nodes, peak, follows, &mut least);
    least
}

#[test]
fn small_graphs_get_the_best_order() {
    let mut seen = 0;
    arbtest(|u| {
        let graph = random_graph(u, 7)?;
        let nodes: Vec<u32> = (0..graph.nodes.len() as u32)
            .filter(|&i| !graph.nodes[i as usize].persistent)
            .collect();
        for in_place in [false, true] {
            let best = graph.minimise_peak(in_place, Effort::Counted);
            assert_eq!(
                peak_of(&graph, &best.order, in_place),
                Ok(best.peak),
                "{graph:?} {:?}",
                best.order
            );
            let inputs_ran = |node: u32, order: &[u32]| {
                graph.nodes[node as usize]
                    .inputs
                    .iter()
                    .all(|j| graph.nodes[*j as usize].persistent || order.contains(j))
            };
            let least = least_peak(
                &nodes,
                &|order| peak_of(&graph, order, in_place).ok(),
                &inputs_ran,
            );
            assert_eq!(
                (Some(best.lower_bound), Some(best.peak)),
                (least, least),
                "in place: {in_place}, {graph:?}"
            );
            assert_eq!(
                graph.minimise_peak(in_place, Effort::Counted),
                best,
                "the same again"
            );
        }
        seen += 1;
        Ok(())
    })
    .budget_ms(600);
    assert!(seen > 20);
}

/// The live bytes of the fullest step, from the definition; `None` if the order breaks a
/// dependency. Inputs without readers are ignored.
fn dag_peak(dag: &Dag, order: &[u32]) -> Option<u64> {
    let tasks: Vec<_> = order.iter().map(|&t| &dag.tasks[t as usize]).collect();
    let mut live = vec![0; order.len()];
    for (step, &t) in order.iter().enumerate() {
        let (task, later) = (tasks[step], &order[step + 1..]);
        let waits = later
            .iter()
            .any(|&l| task.after.iter().any(|before| before.0 == l));
        let reads_early = |&l: &u32| {
            dag.tasks[l as usize]
                .writes
                .iter()
                .any(|b| task.reads.contains(b) && !task.writes.contains(b))
        };
        let writes_early = |&l: &u32| {
            l < t
                && dag.tasks[l as usize]
                    .writes
                    .iter()
                    .any(|b| task.writes.contains(b))
        };
        if waits || later.iter().any(reads_early) || later.iter().any(writes_early) {
            return None;
        }
        live[step] = task.workspace_occupied();
    }
    for (b, buffer) in dag.buffers.iter().enumerate() {
        let touches = |step: &usize| {
            tasks[*step]
                .reads
                .iter()
                .chain(&tasks[*step].writes)
                .any(|id| id.index() == b)
        };
        let uses: Vec<usize> = (0..order.len()).filter(touches).collect();
        let Some((&first, &last)) = uses.first().zip(uses.last()) else {
            if buffer.live_in && buffer.live_out {
                live.iter_mut()
                    .for_each(|bytes| *bytes += buffer.occupied());
            }
            continue;
        };
        let (start, end) = (
            if buffer.live_in { 0 } else { first },
            if buffer.live_out {
                order.len() - 1
            } else {
                last
            },
        );
        live[start..=end]
            .iter_mut()
            .for_each(|bytes| *bytes += buffer.occupied());
    }
    live.into_iter().max()
}

#[test]
fn small_dags_get_the_best_order() {
    let mut seen = 0;
    arbtest(|u| {
        let mut dag = random_dag(u)?;
        dag.may_reuse.clear();
        if !(1..=7).contains(&dag.tasks.len()) {
            return Ok(());
        }
        let tasks: Vec<u32> = (0..dag.tasks.len() as u32).collect();
        let best = minimise_peak(&dag, false, Effort::Counted).expect("a valid dag");
        let order: Vec<u32> = best.order.iter().map(|task| task.0).collect();
        assert_eq!(dag_peak(&dag, &order), Some(best.peak), "{dag}");
        let least = least_peak(&tasks, &|order| dag_peak(&dag, order), &|_, _| true);
        assert_eq!(
            (Some(best.lower_bound), Some(best.peak)),
            (least, least),
            "{dag}"
        );
        seen += 1;
        Ok(())
    })
    .budget_ms(600);
    assert!(seen > 10);
}

#[test]
fn no_plan_is_below_the_bound() {
    arbtest(|u| {
        let dag = random_dag(u)?;
        for in_place in [false, true] {
            let best = minimise_peak(&dag, in_place, Effort::Counted).expect("a valid dag");
            assert!(best.lower_bound <= best.peak);
            let planned = plan(
                &dag,
                &Options {
                    in_place,
                    ..Options::default()
                },
            )
            .expect("a valid dag");
            assert!(
                best.lower_bound <= planned.lower_bound,
                "{} > {}\n{dag}",
                best.lower_bound,
                planned.lower_bound
            );
            assert!(
                in_place || best.peak <= planned.lower_bound,
                "{} > {}\n{dag}",
                best.peak,
                planned.lower_bound
            );
        }
        Ok(())
    })
    .budget_ms(400);
}

/// The same graph with its nodes in another topological order.
fn relabelled(graph: &RematGraph, seed: u64) -> RematGraph {
    let n = graph.nodes.len();
    let mut state = seed;
    let mut draw = |below: usize| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % below
    };
    let (mut place, mut taken) = (vec![0u32; n], vec![false; n]);
    let mut order = Vec::new();
    while order.len() < n {
        let ready =
            |&i: &usize| !taken[i] && graph.nodes[i].inputs.iter().all(|&j| taken[j as usize]);
        let ready: Vec<usize> = (0..n).filter(ready).collect();
        let i = ready[draw(ready.len())];
        (taken[i], place[i]) = (true, order.len() as u32);
        order.push(i);
    }
    let moved = |list: &[u32]| {
        let mut list: Vec<u32> = list.iter().map(|&j| place[j as usize]).collect();
        list.sort_unstable();
        list
    };
    let node = |&i: &usize| {
        let node = &graph.nodes[i];
        Node {
            inputs: moved(&node.inputs),
            inplace: moved(&node.inplace),
            mutates: moved(&node.mutates),
            ..node.clone()
        }
    };
    RematGraph {
        name: graph.name.clone(),
        nodes: order.iter().map(node).collect(),
        outputs: moved(&graph.outputs),
    }
}

/// A graph that is part of the repository.
pub fn real_graph(name: &str) -> RematGraph {
    let path = format!(
        "{}/../data/graphs/{name}.json.gz",
        env!("CARGO_MANIFEST_DIR")
    );
    let graph = RematGraph::read(&std::fs::read(path).expect("test data")).expect("a valid graph");
    assert_eq!(graph.name, name);
    graph
}

#[test]
fn real_graphs_reach_their_smallest_peak_under_any_labels() {
    for (name, least, least_in_place) in [
        ("cifar_vgg6_b128_sgd", 71_303_172, 66_322_436),
        ("randwire12_inf", 12_845_056, 11_239_424),
        ("unet_d2_c16_b4_grads", 49_807_500, 46_137_476),
    ] {
        let graph = real_graph(name);
        for seed in 0..4 {
            let graph = if seed == 0 {
                graph.clone()
            } else {
                relabelled(&graph, seed)
            };
            for (in_place, least) in [(false, least), (true, least_in_place)] {
                let best = graph.minimise_peak(in_place, Effort::Counted);
                assert_eq!(
                    (best.peak, best.lower_bound),
                    (least, least),
                    "{name}, in place: {in_place}, seed {seed}"
                );
                assert_eq!(peak_of(&graph, &best.order, in_place), Ok(least));
            }
        }
    }
}

#[test]
fn an_order_is_found_without_time() {
    arbtest(|u| {
        let graph = random_graph(u, 30)?;
        let best = graph.minimise_peak(true, Effort::Within(Duration::ZERO));
        assert_eq!(peak_of(&graph, &best.order, true), Ok(best.peak));
        assert!(best.lower_bound <= best.peak);
        Ok(())
    })
    .budget_ms(100);
}
