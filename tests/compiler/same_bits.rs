//! Whether programs for a CUDA device compute the same bits, without one.

use slabwise::prelude::*;
use slabwise_compiler::backend::{HalfProducts, Target};
use slabwise_compiler::ir::Program;
use slabwise_compiler::passes::{
    EpilogueSums, Expand, Fuse, Pass, Pipeline, Simplify, SumInEpilogues, fuse, has_same_products,
    legalize, lower, simplify,
};
use slabwise_cuda::Description;
use slabwise_planner::TaskId;

/// The kernels of a program in which sums have kernels of their own.
fn kernels(trace: &Trace, outputs: &[Tensor<'_>]) -> Program {
    let graph = trace.finish(outputs).expect("a graph");
    let expand = Expand {
        has_quantized_matmul: &|_, _| false,
        has_attention: &|_, _| false,
        has_epilogue_sums: true,
    };
    let graph = simplify(&expand.expand(&graph), &Simplify::default());
    let graph = legalize(&graph, HalfProducts::OfOneType);
    lower(&fuse(&graph, &Fuse::default()), false).expect("kernels")
}

/// Two products of the same sizes, of which one is summed over its rows: with the sums in a kernel of
/// their own, and in the epilogue of their product, which makes other bits and no other values.
#[test]
fn sums_in_another_kernel_are_other_bits() {
    let trace = Trace::inference();
    let product = |name: &str| {
        let matrix = |side: &str, rows: usize| {
            let name = format!("{name}.{side}");
            trace.input(&name, F32, (rows, 96))
        };
        let (a, b) = (matrix("a", 64), matrix("b", 96));
        a.matmul(b)
    };
    let outputs = [product("summed").sum_over([0]), product("plain")];
    let own = kernels(&trace, &outputs);
    let target = Target::described(Description::nearest(90).target());
    let pass = SumInEpilogues::on(&target, EpilogueSums::All).expect("a GPU");
    let joined = pass.run(&own).expect("sums");
    assert_eq!((own.kernels.len(), joined.kernels.len()), (3, 2));
    let passes = Pipeline::new("sums", true, None).expect("passes");
    let order = |program: &Program| -> Vec<TaskId> {
        (0..program.kernels.len() as u32).map(TaskId).collect()
    };
    let [orders, joined_order] = [&own, &joined].map(order);
    let (own, joined) = ((&own, &orders[..]), (&joined, &joined_order[..]));
    for (before, after, same) in [
        (own, own, true),
        (joined, joined, true),
        (own, joined, false),
        (joined, own, false),
    ] {
        let found = passes.same_bits(before, after, &target);
        assert_eq!(found.expect("the same values"), same);
    }
}

/// A product of few rows has another kernel without the sums of its epilogue, with which the clone
/// that recomputes it would have other bits; one of many rows has the same.
#[test]
fn a_product_without_sums_may_have_another_kernel() {
    let target = Target::described(Description::nearest(90).target());
    for (rows, same) in [(4, false), (512, true)] {
        let trace = Trace::inference();
        let a = trace.input("a", F32, (rows, 512));
        let product = a.matmul(trace.input("b", F32, (512, 640)));
        let own = kernels(&trace, &[product, product.sum_over([0])]);
        let pass = SumInEpilogues::on(&target, EpilogueSums::All).expect("a GPU");
        let joined = pass.run(&own).expect("sums");
        let bounds = joined.graph.symbols.bounds();
        let [alone, with_sums] = [&own, &joined].map(|program| &program.kernels[0].spec);
        assert_eq!((alone.reduced, with_sums.reduced), (0, 1));
        let found = has_same_products(&target, with_sums, alone, &bounds);
        assert_eq!(found, same, "{rows} rows");
    }
}
