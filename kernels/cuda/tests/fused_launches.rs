//! Horizontally fused specs, against the CPU's kernels one by one.

#[path = "../../tests/loops/builder.rs"]
#[allow(dead_code)] // not every test needs all of it
mod builder;
mod common;

use builder::Builder;
use common::gpu::Gpu;
use common::{
    Case, Choices, NO_FAULT, SAVED_BY_CALLS, TARGET, available, compile_for_gpu, emulate,
};
use slabwise_cuda::emulator::Order;
use slabwise_cuda::lower_fused;
use slabwise_kernels::scalar::ScalarOp;
use slabwise_kernels::size::{Env, Size, Symbol};
use slabwise_kernels::spec::{ReduceOp, Spec};

/// w −= rate · m for m = 0.9 m + g, in place.
fn update(dims: &[i64]) -> Spec {
    let mut b = Builder::new(dims, 0);
    let mut strides = vec![1; dims.len()];
    for axis in (1..dims.len()).rev() {
        strides[axis - 1] = strides[axis] * dims[axis];
    }
    let (weight, gradient, moment) = (b.load(&strides), b.load(&strides), b.load(&strides));
    let rate = b.load(&vec![0; dims.len()]);
    let decay = b.number(0.9);
    let kept = b.op(ScalarOp::Mul, &[moment, decay]);
    let next = b.op(ScalarOp::Add, &[kept, gradient]);
    let step = b.op(ScalarOp::Mul, &[next, rate]);
    let new = b.op(ScalarOp::Sub, &[weight, step]);
    let (to_weight, to_moment) = (b.operand(&strides), b.operand(&strides));
    b.store(new, to_weight);
    b.store(next, to_moment);
    b.spec
}

fn total(n: i64) -> Spec {
    let mut b = Builder::new(&[n], 1);
    let x = b.load(&[1]);
    let y = b.reduce(ReduceOp::Sum, x);
    let out = b.operand(&[0]);
    b.store(y, out);
    b.spec
}

#[test]
fn parameter_updates_are_fused_horizontally() {
    if !available() {
        return;
    }
    let mut choices = Choices::new(1);
    // More parameters than one launch holds, and another spec among them.
    let mut specs: Vec<Spec> = (0..90).map(|i| update(&[2 + i * 7 % 50])).collect();
    specs.extend([
        update(&[30, 40]),
        total(300),
        update(&[5001]),
        update(&[3, 5, 7]),
    ]);
    let all: Vec<&Spec> = specs.iter().collect();
    let groups = lower_fused(&all, &Env::default(), &TARGET).expect("source");
    assert_eq!(groups.len(), 2);
    assert_eq!(
        groups[0].members.len() + groups[1].members.len(),
        specs.len()
    );
    let launches = groups[0].lowered.launches(&Env::default());
    assert!(
        (2..=3).contains(&launches.len()),
        "{} launches",
        launches.len()
    );
    let functions: Vec<_> = groups
        .iter()
        .flat_map(|g| g.lowered.functions.clone())
        .collect();
    compile_for_gpu(&functions, 90, SAVED_BY_CALLS);
    let emulator = emulate(&functions);
    let mut gpu = Gpu::load(
        &groups
            .iter()
            .map(|group| &group.lowered)
            .collect::<Vec<_>>(),
    );
    for (step, group) in groups.iter().enumerate() {
        let mut case = |m: usize| {
            let mut case = Case::new(format!("member {m}"), specs[m].clone(), &mut choices);
            if case.args.len() == 6 {
                case.same = vec![(4, 0), (5, 2)];
            }
            case
        };
        let cases: Vec<Case> = group.members.iter().map(|&m| case(m)).collect();
        // All arguments, one spec's after the other's.
        let mut whole = cases[0].clone();
        (whole.args, whole.same) = (vec![], vec![]);
        for case in &cases {
            let first = whole.args.len();
            whole.same.extend(
                case.same
                    .iter()
                    .map(|(again, of)| (first + again, first + of)),
            );
            whole.args.extend(case.args.clone());
        }
        let expected: Vec<Vec<u8>> = cases.iter().flat_map(|case| case.on_cpu().0).collect();
        let check = |what: &str, all: &[Vec<u8>]| {
            for (a, (got, expected)) in all.iter().zip(&expected).enumerate() {
                let floats = |bytes: &[u8]| {
                    bytes
                        .chunks(4)
                        .map(|b| f32::from_le_bytes(b.try_into().expect("4 bytes")))
                        .collect::<Vec<_>>()
                };
                let near = floats(got)
                    .iter()
                    .zip(floats(expected))
                    .all(|(x, y)| (x - y).abs() <= 1e-5 * y.abs().max(1.0));
                assert!(near, "argument {a} ({what})");
            }
        };
        if let Some(gpu) = &mut gpu {
            check(
                "on the GPU",
                &gpu.run(step, &whole, &group.lowered).expect("runs").0,
            );
        }
        let Some(emulator) = &emulator else { continue };
        for order in Order::ALL {
            check(
                &format!("{order:?}"),
                &whole
                    .emulated(&group.lowered, emulator, order, NO_FAULT)
                    .expect("runs")
                    .0,
            );
        }
    }
}

/// Loops over rows of different bounds that one block keeps in shared memory: x less the largest
/// element of its row.
#[test]
fn a_launch_has_the_shared_memory_of_its_longest_rows() {
    let rows = |symbol: u8| {
        let length = Size::symbol(Symbol(symbol));
        let mut b = Builder::new(&[400, 1], 1);
        let x = b.load(&[1, 1]);
        let square = b.op(ScalarOp::Mul, &[x, x]);
        let most = b.reduce(ReduceOp::Max, square);
        let y = b.op(ScalarOp::Sub, &[square, most]);
        let out = b.operand(&[1, 1]);
        b.store(y, out);
        b.spec.dims[1] = length;
        for operand in &mut b.spec.operands {
            operand.strides[0] = length;
        }
        b.spec
    };
    let specs = [rows(0), rows(1)];
    let mut bounds = Env::default();
    (bounds.0[0], bounds.0[1]) = (18_000, 24_000);
    let alone = |spec: &Spec| {
        let lowered = slabwise_cuda::lower(spec, &bounds, &TARGET).expect("source");
        let launches = lowered.launches(&bounds);
        launches
            .iter()
            .map(|l| l.shared_bytes)
            .max()
            .expect("a launch")
    };
    let needed: Vec<u32> = specs.iter().map(alone).collect();
    assert!(0 < needed[0] && needed[0] < needed[1], "{needed:?}");
    for order in [[0, 1], [1, 0]] {
        let all = order.map(|at: usize| &specs[at]);
        let groups = lower_fused(&all, &bounds, &TARGET).expect("source");
        assert_eq!(groups.len(), 1, "one function");
        for launch in groups[0].lowered.launches(&bounds) {
            assert_eq!(launch.shared_bytes, needed[1]);
        }
    }
}
