//! The incrementally updated schedule state against a rebuilt one, on random networks whose
//! computations make several values.

use super::network::{Computation, Network};
use super::repair::Repairer;
use super::tape::Tape;
use crate::generate::Random;

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
fn a_tape_under_change_keeps_right_books() {
    let mut random = Random(3);
    let (mut inserts, mut removals, mut moves, mut fetches) = (0, 0, 0, 0);
    for round in 0..400 {
        let net = network(&mut random, round % 2 == 0);
        let mut tape = Tape::new(&net, &(0..=net.sink()).collect::<Vec<u32>>());
        for _ in 0..30 {
            let p = random.below(u64::from(tape.len())) as u32;
            let c = tape.sequence[p as usize];
            match random.below(3) {
                0 => {
                    let node = random.below(net.len() as u64) as u32;
                    if node != net.sink() && tape.may_insert(node, p) {
                        fetches += u32::from(net.fetched(node).is_some());
                        tape.insert(node, p);
                        inserts += 1;
                    }
                }
                1 if tape.may_remove(c) => {
                    let expected = tape.peak_without(c);
                    let until = p as usize;
                    tape.remove(c);
                    let worst = tape.need[..until].iter().copied().max().unwrap_or(0);
                    assert!(expected <= worst, "{expected} {worst}");
                    removals += 1;
                }
                _ => {
                    let to = random.below(u64::from(p) + 1) as u32;
                    if tape.node_at(p) != net.sink()
                        && tape.is_quiet(tape.node_at(p), to, p)
                        && to < p
                    {
                        tape.relocate(c, to);
                        moves += 1;
                    }
                }
            }
            let order: Vec<u32> = tape.order().collect();
            let anew = Tape::new(&net, &order);
            assert_eq!((&tape.need, tape.cost), (&anew.need, anew.cost));
            for p in 0..tape.len() {
                let lives = |t: &Tape| {
                    t.made_at(p)
                        .map(|c| (t.node[c as usize], t.last[c as usize]))
                        .collect::<Vec<_>>()
                };
                assert_eq!(lives(&tape), lives(&anew));
                // A fetched value has been computed before.
                assert!(
                    net.fetched(tape.node_at(p))
                        .is_none_or(|value| tape.source(value, p).is_some())
                );
            }
        }
        // Repaired, a schedule fits and every read has its value.
        let peak = tape.peak();
        let mut repairer = Repairer::new(net.len(), peak * 3 / 4);
        repairer.fetching = (round % 2 == 0).then(|| random.unit());
        if repairer.repair(&mut tape, &mut random, 100, u128::MAX) {
            repairer.prune(&mut tape, &mut random, 0..u32::MAX);
            assert!(Tape::new(&net, &tape.order().collect::<Vec<u32>>()).peak() <= peak * 3 / 4);
        }
    }
    assert!(
        inserts > 500 && removals > 100 && moves > 100 && fetches > 100,
        "{inserts} {removals} {moves} {fetches}"
    );
}
