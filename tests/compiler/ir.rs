//! The verifier is tested by breaking programs, rewriting by the dependencies that come out.

use slabwise_kernels::dtype::DType::{self, F32};
use slabwise_planner::DagError;

use slabwise::{Device, Trace};
use slabwise_compiler::backend::{self, HalfProducts, KernelCache};
use slabwise_compiler::ir::{
    CallId, IrError, Program, Recompute, Rewriter, Source, Value, ValueId,
};
use slabwise_compiler::passes::{Fuse, Legalize, Lower, Pass, Prepare, Simplify};
use slabwise_kernels::cpu::{Config, Isa};

/// Two products with work between and behind them, each in a kernel of its own.
fn program() -> Program {
    let trace = Trace::inference();
    let (x, w) = (trace.input("x", F32, (4, 4)), trace.input("w", F32, (4, 4)));
    let h = x.matmul(w).relu();
    let y = h.matmul(w) + h;
    let graph = trace.finish(&[y]).expect("a graph");
    let graph = Simplify::default().run(&graph).expect("a graph");
    let legalize = Legalize {
        half_products: HalfProducts::Matrices,
    };
    let graph = legalize.run(&graph).expect("a graph");
    let clusters = Fuse::none().run(&graph).expect("kernels");
    Lower::default().run(&clusters).expect("a program")
}

/// Breaks a program, which was in order, and returns the error of the verifier.
fn broken(change: impl FnOnce(&mut Program)) -> IrError {
    let mut program = program();
    program.verify().expect("it is well-formed");
    change(&mut program);
    program.verify().expect_err("it is broken")
}

/// The call that writes an output of the program.
fn last(program: &Program) -> usize {
    program.kernels.len() - 1
}

#[test]
fn values_exist_and_planned_ones_come_first() {
    let error = broken(|p| p.kernels[0].args[0] = ValueId(99));
    assert!(
        matches!(error, IrError::NoValue { value: 99, .. }),
        "{error}"
    );
    let error = broken(|p| {
        let variable = Value {
            source: Source::Sizes,
            ..p.values[0].clone()
        };
        p.values.insert(0, variable);
    });
    assert_eq!(error, IrError::Unsorted { value: 1 });
}

#[test]
fn arguments_are_those_of_the_spec() {
    let error = broken(|p| _ = p.kernels[0].args.pop());
    assert!(matches!(error, IrError::Arguments { .. }), "{error}");
    let error = broken(|p| p.values[0].dtype = DType::I32);
    assert!(matches!(error, IrError::Type { .. }), "{error}");
    let error = broken(|p| p.values[0].bytes -= 4);
    assert!(matches!(error, IrError::Beyond { .. }), "{error}");
}

#[test]
fn dependencies_exist_and_close_no_cycle() {
    let error = broken(|p| p.kernels[0].after.push(CallId(0)));
    assert!(matches!(error, IrError::Dependency { .. }), "{error}");
    let error = broken(|p| {
        let last = CallId(last(p) as u32);
        p.kernels[0].after.push(last);
    });
    assert!(
        matches!(error, IrError::Dag(DagError::Cycle { .. })),
        "{error}"
    );
}

#[test]
fn every_value_that_is_read_is_written() {
    let error = broken(|p| _ = p.kernels.remove(0));
    assert!(
        matches!(error, IrError::Dag(DagError::NeverWritten { .. })),
        "{error}"
    );
}

#[test]
fn in_place_pairs_are_read_and_written() {
    let error = broken(|p| {
        let at = last(p);
        let value = p.kernels[at].args[0];
        p.kernels[at].in_place.push((value, value));
    });
    assert!(matches!(error, IrError::Dag(_)), "{error}");
}

#[test]
fn a_prepared_kernel_computes_its_call() {
    let error = broken(|p| {
        let config = Config {
            threads: 1,
            isa: Isa::detect(),
        };
        let device = backend::open(Device::Cpu).expect("the CPU");
        let target = device.target(config, None);
        let prepare = Prepare {
            target: &target,
            guard: 0,
            kernels: &KernelCache::default(),
        };
        *p = prepare.run(p).expect("kernels");
        let other = p.kernels[1].kernel.clone();
        p.kernels[0].kernel = other;
    });
    assert!(matches!(error, IrError::Prepared { .. }), "{error}");
}

#[test]
fn recompute_clones_write_the_same_values() {
    let error = broken(|p| {
        let clone = p.kernels[1].clone();
        p.kernels[0].recompute = Recompute::Clone(Box::new(clone));
    });
    assert!(matches!(error, IrError::Clone { .. }), "{error}");
}

#[test]
fn dependencies_follow_the_calls_that_do_the_work() {
    let mut old = program();
    let last = last(&old);
    assert!(last >= 2);
    old.kernels[last].after = vec![CallId(0), CallId(1)];
    // The first call is split, the second is dropped, and the others stay.
    let mut rewriter = Rewriter::new(&old);
    let (a, b) = (rewriter.keep(CallId(0)), rewriter.keep(CallId(0)));
    for call in 2..=last as u32 {
        rewriter.keep(CallId(call));
    }
    let new = rewriter.finish(None);
    assert_eq!(new.kernels.len(), old.kernels.len());
    assert!(new.call(b).after.is_empty());
    assert_eq!(new.kernels[last].after, [a, b]);
    // A dropped call whose work another does: dependencies go there.
    let mut rewriter = Rewriter::new(&old);
    let first = rewriter.keep(CallId(0));
    rewriter.replace(CallId(1), [first]);
    for call in 2..=last as u32 {
        rewriter.keep(CallId(call));
    }
    assert_eq!(rewriter.finish(None).kernels[last - 1].after, [first]);
}

#[test]
fn programs_read_like_code() {
    let text = program().to_string();
    let first = text.lines().next().unwrap_or_default();
    assert_eq!(first, "program(%0: f32[4, 4] \"x\", %1: f32[4, 4] \"w\")");
    assert!(text.contains("= matmul(%0, %1)  # matmul"), "{text}");
    assert!(text.ends_with(&format!("return %{}\n", program().values.len() - 1)));
}
