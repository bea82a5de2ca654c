//! Work that moves between kernels on a CUDA device, over random programs and without a device: the
//! kernels compute the values that they computed before, by symbolic execution.

use slabwise::trace::Trace;
use slabwise_compiler::backend::{HalfProducts, Target};
use slabwise_compiler::ir::Program;
use slabwise_compiler::passes::{
    EpilogueSums, Expand, Fuse, Pass, REMAT_MIN_ELEMENTS, ShareReads, Simplify, SumInEpilogues,
    fuse, legalize, lower, rematerialize, simplify, validate, validate_values,
};
use slabwise_cuda::Description;
use slabwise_planner::{Options, TaskId};
use slabwise_random_programs::build::{Model, build};
use slabwise_random_programs::hunt::{drawn, seed_of};

/// The kernels of the first program of a case; `None` if it has a loop over steps, whose body is
/// compiled first.
fn program(seed: u64) -> Option<Program> {
    let (case, _) = drawn(seed, 30);
    let model = Model::new(&case);
    let trace = Trace::training();
    let outputs = build(&case, &case.programs[0], &model, &trace, false);
    let graph = trace.finish(&outputs).expect("a valid program");
    let expand = Expand {
        has_quantized_matmul: &|_, _| false,
        has_attention: &|_, _| false,
        // The number near a mean may become another one, which the values show.
        has_epilogue_sums: false,
    };
    let graph = simplify(&expand.expand(&graph), &Simplify::default());
    let graph = rematerialize(&graph, Some(REMAT_MIN_ELEMENTS));
    let graph = legalize(&graph, HalfProducts::OfOneType);
    lower(&fuse(&graph, &Fuse::default()), false).ok()
}

#[test]
fn merged_calls_compute_the_same_values() {
    let target = Target::described(Description::nearest(90).target());
    let sums = SumInEpilogues::on(&target, EpilogueSums::All).expect("a GPU");
    let reads = ShareReads::on(&target).expect("a GPU");
    let order = |program: &Program| -> Vec<TaskId> {
        let options = Options {
            effort: 0,
            ..Options::default()
        };
        let plan = slabwise_planner::plan(&program.to_dag(), &options);
        plan.expect("a plan").order
    };
    let (mut seen, mut moved) = (0, [0; 2]);
    for number in 0..1500 {
        let seed = seed_of(5, number);
        let Some(before) = program(seed) else {
            continue;
        };
        seen += 1;
        let summed = sums.run(&before).expect("sums");
        let shared = reads.run(&summed).expect("shared reads");
        for (at, (before, after)) in [(&before, &summed), (&summed, &shared)]
            .into_iter()
            .enumerate()
        {
            after
                .verify()
                .unwrap_or_else(|e| panic!("case {seed}: {e}"));
            moved[at] += usize::from(before.to_string() != after.to_string());
            let orders = [before, after].map(order);
            let both = ((before, &orders[0][..]), (after, &orders[1][..]));
            let same = match at {
                0 => validate_values(both.0, both.1),
                _ => validate(both.0, both.1, &|_, _| true),
            };
            same.unwrap_or_else(|e| panic!("case {seed}: {e}\n{before}\n{after}"));
        }
    }
    assert!(
        seen > 1000 && moved.iter().all(|n| *n > 50),
        "{seen}, {moved:?}"
    );
}
