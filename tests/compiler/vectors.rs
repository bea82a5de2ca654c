//! The vector accesses of the built-in models' kernels on a CUDA device: tested without a device,
//! by NVRTC's output.

use std::collections::{BTreeMap, BTreeSet};

use slabwise_cuda::nvrtc::{self, Program};
use slabwise_cuda::{Description, Function, PRELUDE};

use super::{Model, OptimizerKind};
use slabwise::CompileOptions;
use slabwise::params::Params;
use slabwise::shape::Dim;
use slabwise::trace::Trace;
use slabwise_compiler::backend::Target;
use slabwise_compiler::compile::lowered;

fn target() -> slabwise_cuda::Target {
    Description::nearest(90).target()
}

/// The functions of a model's training step that store vectors.
fn functions(model: Model, batch: u32) -> Vec<Function> {
    let params = Params::seeded(0);
    let (network, trace) = (model.build(&params), Trace::training());
    let batch = Dim::bounded("batch", batch);
    let loss = network.step(&trace, batch, OptimizerKind::Adam);
    let graph = trace.finish(&[loss]).expect("a graph");
    let bounds = graph.symbols.bounds();
    let described = Target::described(target());
    let program = lowered("step", &graph, &CompileOptions::default(), &described);
    let program = program.expect("kernels");
    let kernels = program.kernels.iter();
    let lowered =
        kernels.map(|task| slabwise_cuda::lower(&task.spec, &bounds, &target()).expect("source"));
    let all: BTreeMap<String, Function> = lowered
        .flat_map(|l| l.functions)
        .map(|f| (f.name.clone(), f))
        .collect();
    all.into_values()
        .filter(|f| f.source.contains("store_vec("))
        .collect()
}

#[test]
fn vectorized_stores_stay_vectorized() {
    if nvrtc::version().is_err() {
        return;
    }
    let (mut seen, mut rows) = (BTreeSet::new(), 0);
    for &model in Model::ALL {
        let functions: Vec<Function> = functions(model, 16)
            .into_iter()
            .filter(|f| seen.insert(f.name.clone()))
            .collect();
        if functions.is_empty() {
            continue;
        }
        let ptx = nvrtc::ptx(&Program::new(PRELUDE, &functions, target().sm))
            .unwrap_or_else(|e| panic!("{e}"));
        for function in &functions {
            let (_, own) = ptx
                .split_once(&format!(".entry {}(", function.name))
                .unwrap_or_else(|| panic!("{}", function.name));
            let own = own.split(".entry ").next().unwrap_or(own);
            let (asked, made) = (
                function.source.matches("store_vec(").count(),
                own.matches("st.global.v").count(),
            );
            assert!(
                made >= asked,
                "{model}: {made} of {asked} stores are of vectors\n{}\n{own}",
                function.source
            );
            rows += usize::from(function.name.starts_with("rows"));
        }
    }
    assert!(
        rows > 10 && seen.len() > 50,
        "{rows} kernels of rows among {}",
        seen.len()
    );
}
