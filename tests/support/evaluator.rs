//! Random graphs with lengths of 0, on any device, against the reference evaluator.

use ndarray::ArrayD;
use slabwise::Error;
use slabwise::feed::Input;
use slabwise::prelude::*;
use slabwise_compiler::graph::Graph;
use slabwise_compiler::reference::{Array, Precision, evaluate};

use crate::support::arrays::{close, host, numbers};
use crate::support::random_graph::{BATCH, RandomGraph};

/// The outputs of a program, planned and dynamic, or the error of its run.
fn results<const N: usize>(
    graph: &Graph,
    open: &dyn Fn() -> Session,
    inputs: &[Array],
    variables: &[Array],
) -> Result<[Vec<Vec<f64>>; 2], Error> {
    let mut session = open();
    let program = session.compile_graph::<N>("case", graph)?;
    for (info, array) in graph.variables.iter().zip(variables) {
        let values = array.values.iter().map(|&v| v as f32).collect();
        let values = ArrayD::from_shape_vec(array.dims.clone(), values).expect("as many");
        session.set_value(&info.name, &values).expect("it exists");
    }
    let owned: Vec<Box<dyn Input>> = inputs.iter().map(host).collect();
    let feed: Vec<&dyn Input> = owned.iter().map(|b| &**b).collect();
    let planned = session
        .run(&program, &feed[..])?
        .iter()
        .map(numbers)
        .collect();
    let dynamic = session
        .run_dynamic(&program, &feed[..])?
        .iter()
        .map(numbers)
        .collect();
    Ok([planned, dynamic])
}

pub fn any_results(
    graph: &Graph,
    open: &dyn Fn() -> Session,
    inputs: &[Array],
    variables: &[Array],
) -> Result<[Vec<Vec<f64>>; 2], Error> {
    macro_rules! by_count {
        ($($n:literal)*) => { match graph.outputs.len() { $($n => results::<$n>(graph, open, inputs, variables),)* n => panic!("{n} outputs") } };
    }
    by_count!(1 2 3 4 5 6 7 8 9 10 11 12)
}

/// A random graph with lengths of 0 and 1 everywhere, with a batch, of one example and of none.
pub fn against_the_evaluator(seed: u64, size: usize, open: &dyn Fn() -> Session) {
    let case = RandomGraph::short(seed, size);
    for batch in [BATCH, 1, 0] {
        let env = case.env(batch);
        let (inputs, variables) = case.arguments(&env);
        let want = evaluate(&case.graph, &env, &inputs, &variables, Precision::Single)
            .expect("the graph evaluates");
        if case.graph.outputs.is_empty() || case.graph.outputs.len() > 12 {
            return;
        }
        let first = case.graph.outputs.len();
        match any_results(&case.graph, open, &inputs, &variables) {
            Ok([planned, _]) => {
                for (at, (a, b)) in planned.iter().zip(&want.outputs).enumerate().take(first) {
                    let same = a.len() == b.values.len()
                        && a.iter().zip(&b.values).all(|(&p, &q)| close(p, q));
                    assert!(
                        same,
                        "seed {seed}, batch {batch}, output {at}: {a:?} instead of {b}\n{}",
                        case.graph
                    );
                }
            }
            Err(Error::Budget { .. }) => return,
            Err(other) => panic!("seed {seed}, batch {batch}: {other}\n{}", case.graph),
        }
    }
}
