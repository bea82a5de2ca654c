//! Gradients of exchanges between ranks, and gradients of these, against central differences of the
//! sum of what all ranks compute.

use std::sync::{Barrier, Mutex};

use slabwise::shape::{Dims, Env, Size};
use slabwise_compiler::graph::Graph;
use slabwise_compiler::ops::{GraphBuilder, NodeId, Op};
use slabwise_compiler::passes::autodiff::gradients;
use slabwise_compiler::reference::{Array, Precision, evaluate_rank};
use slabwise_compiler::shape::Extent;
use slabwise_kernels::collective::Group;
use slabwise_kernels::dtype::DType;
use slabwise_kernels::spec::CollectiveOp;

use crate::support::{Rng, dims, graph, input};
use crate::{STEP, TOLERANCE, floats, weighted};

/// The result of a collective at a place of a group, from what its ranks give.
fn exchanged(op: CollectiveOp, place: usize, given: &[Array]) -> Array {
    let mut result = given[0].clone();
    let row = |a: &Array| {
        let each = a.values.len() / given.len();
        a.values[place * each..][..each].to_vec()
    };
    match op {
        CollectiveOp::AllGather => {
            result.dims.insert(0, given.len());
            result.values = given.iter().flat_map(|a| a.values.clone()).collect();
        }
        CollectiveOp::AllToAll => result.values = given.iter().flat_map(row).collect(),
        CollectiveOp::ReduceScatter => {
            result.dims.remove(0);
            let add =
                |sum: Vec<f64>, row: Vec<f64>| sum.iter().zip(&row).map(|(a, b)| a + b).collect();
            result.values = given.iter().map(row).reduce(add).expect("a rank");
        }
    }
    result
}

/// The outputs of a graph on every rank, each with its own argument.
fn run(graph: &Graph, arguments: &[Array]) -> Vec<Vec<Array>> {
    let meeting = Barrier::new(arguments.len());
    let posted: Vec<Mutex<Option<Array>>> = arguments.iter().map(|_| Mutex::default()).collect();
    let on_rank = |rank: usize| {
        let exchange = |op: CollectiveOp, group: Group, own: &Array| {
            *posted[rank].lock().expect("no panic") = Some(own.clone());
            meeting.wait();
            let (ranks, stride) = (group.ranks as usize, group.stride as usize);
            let place = rank / stride % ranks;
            let members = (0..ranks).map(|at| rank + at * stride - place * stride);
            let theirs = members.map(|r| posted[r].lock().expect("no panic").clone());
            let theirs: Vec<Array> = theirs.map(|a| a.expect("it was posted")).collect();
            meeting.wait();
            exchanged(op, place, &theirs)
        };
        let mut env = Env::default();
        for (symbol, _, extent) in graph.symbols.iter() {
            if let Extent::Rank(group) = extent {
                let place = rank / group.stride as usize % group.ranks as usize;
                env.0[usize::from(symbol.0)] = place as u32;
            }
        }
        let own = std::slice::from_ref(&arguments[rank]);
        let run = evaluate_rank(graph, &env, own, &[], Precision::Double, &exchange);
        run.expect("it runs").outputs
    };
    std::thread::scope(|scope| {
        let on_rank = &on_rank;
        let ranks = (0..arguments.len()).map(|rank| scope.spawn(move || on_rank(rank)));
        let ranks: Vec<_> = ranks.collect();
        let outputs = ranks.into_iter().map(|r| r.join().expect("no panic"));
        outputs.collect()
    })
}

/// A scalar from all elements of a value, each with a weight of its own, which differs from rank to
/// rank.
fn loss_of(g: &mut Graph, value: NodeId, world: u32) -> NodeId {
    let loss = weighted(g, &[value]).expect("it is a float");
    let rank = g.symbols.rank(Group::all(world)).expect("there is room");
    let size = Size::symbol(rank).checked_add(Size::ONE).expect("it fits");
    let size = g.emit(Op::Size(size), &[], DType::I32, Dims::new());
    let size = g.cast(size, DType::F32);
    g.mul(loss, size)
}

/// Checks the gradient of a function of the graph's input on every rank; returns the gradient.
fn check(name: &str, g: &Graph, [of, value]: [NodeId; 2], arguments: &[Array]) -> (Graph, NodeId) {
    let mut forward = g.clone();
    let loss = loss_of(&mut forward, value, arguments.len() as u32);
    forward.outputs = vec![loss];
    let mut backward = forward.clone();
    let slope = gradients(&mut backward, loss, &[of])[0].expect("it depends on it");
    assert_eq!(backward.verify(), Ok(()), "{name}");
    backward.outputs = vec![slope];
    let slopes = run(&backward, arguments);
    let total = |arguments: &[Array]| -> f64 {
        let all = run(&forward, arguments);
        all.iter().map(|outputs| outputs[0].values[0]).sum()
    };
    for rank in 0..arguments.len() {
        for at in 0..arguments[rank].values.len() {
            let moved = |shift: f64| {
                let mut moved = arguments.to_vec();
                moved[rank].values[at] += shift;
                total(&moved)
            };
            let numeric = (moved(STEP) - moved(-STEP)) / (2.0 * STEP);
            let exact = slopes[rank][0].values[at];
            assert!(
                (numeric - exact).abs() <= TOLERANCE * (1.0 + numeric.abs()),
                "{name}: element {at} on rank {rank} has slope {numeric}, gradient {exact}"
            );
        }
    }
    (backward, slope)
}

#[test]
fn exchanges_between_ranks() {
    let mut rng = Rng(31);
    let group = |ranks, stride| Group { ranks, stride };
    for (world, group) in [
        (2, group(2, 1)),
        (3, group(3, 1)),
        (4, group(2, 1)),
        (4, group(2, 2)),
    ] {
        for op in [
            CollectiveOp::AllToAll,
            CollectiveOp::AllGather,
            CollectiveOp::ReduceScatter,
        ] {
            let name = format!("{op:?} between {group} of {world}");
            let lengths = match op {
                CollectiveOp::AllGather => vec![2],
                _ => vec![group.size(), 2],
            };
            let arguments: Vec<Array> = (0..world).map(|_| floats(&mut rng, &lengths)).collect();
            let mut g = graph();
            let x = input(&mut g, DType::F32, &dims(&lengths));
            let square = g.mul(x, x);
            let rows = Size::fixed(i64::from(group.ranks));
            let shape = match op {
                CollectiveOp::AllToAll => dims(&lengths),
                CollectiveOp::AllGather => Dims::from_slice(&[rows, Size::fixed(2)]),
                CollectiveOp::ReduceScatter => dims(&lengths[1..]),
            };
            let y = g.emit(Op::Collective { op, group }, &[square], DType::F32, shape);
            let value = g.mul(y, y);
            let (first, slope) = check(&name, &g, [x, value], &arguments);
            let name = format!("gradient of {name}");
            let (second, slope) = check(&name, &first, [x, slope], &arguments);
            check(
                &format!("gradient of {name}"),
                &second,
                [x, slope],
                &arguments,
            );
        }
    }
}
