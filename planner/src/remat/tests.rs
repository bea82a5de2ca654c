//! The incrementally updated schedule state against a rebuilt one, on random networks whose
//! computations make several values; and schedules with evenly spaced checkpoints.

use super::checkpoints::with_checkpoints;
use super::clock::{Clock, Limit};
use super::network::{Computation, Network};
use super::repair::Repairer;
use super::search::Search;
use super::state::ScheduleState;
use crate::dag::{Buffer, BufferId, Dag, Kind, Task, TaskId};
use slabwise_packer::random::Random;

/// A random network: some computations have more than one value, and some values have fetches.
fn network(random: &mut Random, fetches: bool) -> Network {
    let mut below = |n: u64| random.below(n);
    let count = 3 + below(20) as u32;
    let (mut computations, mut more) = (Vec::new(), Vec::new());
    let mut values: Vec<u32> = Vec::new();
    for i in 0..count {
        let inputs = (0..below(4))
            .filter(|_| !values.is_empty())
            .map(|_| values[below(values.len() as u64) as usize])
            .collect();
        let (bytes, workspace, cost) = (below(50), below(10), below(9));
        computations.push(Computation {
            bytes,
            workspace,
            cost,
            once: below(6) == 0,
            inputs,
            ..Computation::default()
        });
        values.push(i);
        for _ in 0..below(3) {
            more.push((i, below(50)));
            values.push(count + more.len() as u32);
        }
    }
    let outputs = (0..2)
        .map(|_| values[below(values.len() as u64) as usize])
        .collect();
    let net = Network::new(computations, more, outputs);
    if fetches {
        net.with_fetches(|value| value % 5 != 0)
    } else {
        net
    }
}

#[test]
fn incremental_updates_match_a_rebuilt_state() {
    let mut random = Random(3);
    let (mut inserts, mut removals, mut moves, mut fetches) = (0, 0, 0, 0);
    for round in 0..400 {
        let net = network(&mut random, round % 2 == 0);
        let mut state = ScheduleState::new(&net, &(0..=net.sink()).collect::<Vec<u32>>());
        for _ in 0..30 {
            let p = random.below(u64::from(state.len())) as u32;
            let c = state.sequence[p as usize];
            match random.below(3) {
                0 => {
                    let node = random.below(net.len() as u64) as u32;
                    if node != net.sink() && state.may_insert(node, p) {
                        fetches += u32::from(net.fetched(node).is_some());
                        state.insert(node, p);
                        inserts += 1;
                    }
                }
                1 if state.may_remove(c) => {
                    let expected = state.peak_without(c);
                    let until = p as usize;
                    state.remove(c);
                    let worst = state.need[..until].iter().copied().max().unwrap_or(0);
                    assert!(expected <= worst, "{expected} {worst}");
                    removals += 1;
                }
                _ => {
                    let to = random.below(u64::from(p) + 1) as u32;
                    if state.node_at(p) != net.sink()
                        && state.is_quiet(state.node_at(p), to, p)
                        && to < p
                    {
                        state.relocate(c, to);
                        moves += 1;
                    }
                }
            }
            let order: Vec<u32> = state.order().collect();
            let anew = ScheduleState::new(&net, &order);
            assert_eq!((&state.need, state.cost), (&anew.need, anew.cost));
            for p in 0..state.len() {
                let lives = |t: &ScheduleState| {
                    t.made_at(p)
                        .map(|c| (t.node[c as usize], t.last[c as usize]))
                        .collect::<Vec<_>>()
                };
                assert_eq!(lives(&state), lives(&anew));
                // A fetched value has been computed before.
                assert!(
                    net.fetched(state.node_at(p))
                        .is_none_or(|value| state.source(value, p).is_some())
                );
            }
        }
        // Repaired, a schedule fits and every read has its value.
        let peak = state.peak();
        let mut repairer = Repairer::new(net.len(), peak * 3 / 4);
        repairer.fetching = (round % 2 == 0).then(|| random.unit());
        if repairer.repair(&mut state, &mut random, 100, u128::MAX) {
            repairer.prune(&mut state, &mut random, 0..u32::MAX);
            assert!(
                ScheduleState::new(&net, &state.order().collect::<Vec<u32>>()).peak()
                    <= peak * 3 / 4
            );
        }
    }
    assert!(
        inserts > 500 && removals > 100 && moves > 100 && fetches > 100,
        "{inserts} {removals} {moves} {fetches}"
    );
}

#[test]
fn schedules_with_checkpoints_run_everything_in_order() {
    let mut random = Random(4);
    let mut repeats = 0;
    for _ in 0..400 {
        let net = network(&mut random, false);
        let order: Vec<u32> = (0..=net.sink()).collect();
        for length in 1..6 {
            let Some(schedule) = with_checkpoints(&net, &order, length) else {
                continue;
            };
            repeats += schedule.len() - order.len();
            // Fails if a computation runs before its operands.
            ScheduleState::new(&net, &schedule);
            for &node in &order {
                let runs = schedule.iter().filter(|&&other| other == node).count();
                assert!(runs == 1 || runs > 1 && !net.once[node as usize]);
            }
        }
    }
    assert!(repeats > 1_000, "{repeats}");
}

/// A chain forward and, reading its values, backward, which takes minutes to repair.
#[test]
fn checkpoints_meet_budgets_on_very_long_chains() {
    const LAYERS: u32 = 20_000;
    let step = |i: u32| Computation {
        bytes: u64::from(10 + i % 7),
        cost: 1,
        inputs: match i {
            0 => vec![],
            i if i <= LAYERS => vec![i - 1],
            i => vec![2 * LAYERS - 1 - i, i - 1],
        },
        ..Computation::default()
    };
    let computations = (0..2 * LAYERS).map(step).collect();
    let net = Network::new(computations, Vec::new(), vec![2 * LAYERS - 1]);
    let order = net.program_order();
    let peak = ScheduleState::new(&net, &order).peak();
    for (part, most) in [(0.02, 1.5), (0.3, 1.5), (0.6, 1.3)] {
        let budget = (peak as f64 * part) as i64;
        let mut search = Search::new(&net, &order, budget, 0);
        let found = search.with_checkpoints(&order, &Clock::new(Limit::Rounds(1)));
        let found = found.expect("few repeats");
        let cost = found.cost as f64 / net.base_cost as f64;
        assert!(
            found.peak <= budget && cost <= most,
            "{part}: {} of {budget} bytes, {cost}",
            found.peak
        );
    }
}

#[test]
fn a_deep_chain_is_recomputed_with_a_small_stack() {
    const LENGTH: u32 = 10_000;
    let computation = |bytes, inputs: &[u32]| Computation {
        bytes,
        inputs: inputs.to_vec(),
        ..Computation::default()
    };
    let mut computations = vec![computation(16, &[])];
    computations.extend((0..LENGTH).map(|i| computation(16, &[i])));
    // The end of the chain is read, is idle while a large value lives, and is read again.
    computations.push(computation(0, &[LENGTH]));
    computations.push(computation(1000, &[]));
    computations.push(computation(0, &[LENGTH + 2]));
    computations.push(computation(16, &[LENGTH, LENGTH + 3]));
    let net = Network::new(computations, Vec::new(), vec![LENGTH + 4]);
    let order: Vec<u32> = (0..=net.sink()).collect();
    let repair = move || {
        let mut state = ScheduleState::new(&net, &order);
        let mut repairer = Repairer::new(net.len(), 1000);
        assert!(repairer.repair(&mut state, &mut Random(1), usize::MAX, u128::MAX));
        assert_eq!((state.peak(), state.len()), (1000, 2 * LENGTH + 7));
    };
    let thread = std::thread::Builder::new().stack_size(256 << 10);
    let thread = thread.spawn(repair).expect("a thread");
    thread.join().expect("the chain is recomputed");
}

/// Comparing all values of a computation with each other would take a minute in a debug build.
#[test]
fn a_task_may_make_many_values() {
    const MANY: usize = 100_000;
    let mut dag = Dag::new();
    let values: Vec<BufferId> = (0..MANY)
        .map(|_| dag.add_buffer(Buffer::new("value", Kind::Activation, 64)))
        .collect();
    dag.add_task(Task::new("make all", &[], &values));
    for value in &values {
        dag.add_task(Task::new("read", &[*value], &[]));
    }
    let order: Vec<TaskId> = (0..dag.tasks.len() as u32).map(TaskId).collect();
    let (net, buffers) = Network::of_dag(&dag, &order);
    // One more for the sink.
    assert_eq!(
        (net.values(), buffers.len()),
        (MANY + MANY + 1, MANY + MANY + 1)
    );
    assert!(buffers.iter().all(|buffers| buffers.len() <= 1));
}
