//! The compiler from the inside, with programs as users write them. In this file: how the work of
//! compiling grows with the program, counted and not timed.

mod ir;
#[cfg(feature = "cuda")]
mod same_bits;
mod snapshots;
#[cfg(feature = "cuda")]
mod spills;
mod validate;
#[cfg(feature = "cuda")]
mod vectors;

use slabwise_kernels::dtype::DType::F32;

use slabwise::Tensor;
use slabwise::nn::Linear;
use slabwise::optim::Sgd;
use slabwise::{Device, Params, Session, Trace};
use slabwise_compiler::graph::looks;
use slabwise_models::{Model, OptimizerKind};

/// How often nodes and edges are looked at while this is traced and planned.
fn looks_of(plan: impl FnOnce(&Session)) -> u64 {
    let session = Session::new(Device::Cpu, Params::seeded(0))
        .expect("a session")
        .with_threads(1);
    let before = looks();
    plan(&session);
    looks() - before
}

fn planned(session: &Session, make: impl for<'t> FnOnce(Tensor<'t>) -> Tensor<'t>) {
    let trace = Trace::inference();
    let y = make(trace.input("x", F32, (4, 6)));
    session.plan(&trace, [y]).expect("it is planned");
}

/// Four times the program is at most five times the work.
fn assert_linear(name: &str, small: usize, mut work: impl FnMut(usize, &Session)) {
    let [one, four] = [small, 4 * small].map(|n| looks_of(|session| work(n, session)));
    assert!(
        four <= 5 * one,
        "{name}: {one} looks for {small}, {four} for four times that"
    );
}

#[test]
fn unrolled_models_are_compiled_in_linear_work() {
    for (name, small) in [
        ("lstm:hidden=8,width=8,vocabulary=16,length=", 24),
        ("ode:steps=", 12),
        ("gpt:layers=1,width=16,length=", 256),
    ] {
        assert_linear(name, small, |n, _| {
            let model = Model::parse(&format!("{name}{n}")).expect("a model");
            let params = Params::seeded(0);
            let network = model.build(&params);
            let session = Session::new(Device::Cpu, params)
                .expect("a session")
                .with_threads(1);
            network
                .plan_training(&session, 2u32, OptimizerKind::Adam)
                .expect("it is planned");
        });
    }
}

/// Two recurrent layers: the second slices the values that the first stacks.
#[test]
fn parts_of_stacks_are_found_in_linear_work() {
    assert_linear("lstm", 24, |n, _| {
        let model = Model::parse(&format!(
            "lstm:hidden=8,width=8,vocabulary=16,layers=2,length={n}"
        ))
        .expect("a model");
        let params = Params::seeded(0);
        let network = model.build(&params);
        let session = Session::new(Device::Cpu, params)
            .expect("a session")
            .with_threads(1);
        network
            .plan_training(&session, 2u32, OptimizerKind::Adam)
            .expect("it is planned");
    });
    assert_linear("slices of a stack", 200, |n, session| {
        planned(session, |x| {
            let parts: Vec<Tensor<'_>> = (0..n).map(|i| (x + i as f32).exp()).collect();
            let whole = x.trace().stack(&parts, 0).keep();
            let taken: Vec<Tensor<'_>> = (0..n)
                .map(|i| whole.slice(0, i..=i).tanh().keep())
                .collect();
            x.trace().concat(&taken, 0).sum()
        });
    });
}

/// Gradients of a part are made of that part alone.
#[test]
fn parts_of_a_batch_are_traced_in_linear_work() {
    assert_linear("parts of a batch", 24, |n, _| {
        let params = Params::seeded(0);
        let layer = Linear::new(&params.root() / "layer", 6, 3);
        let trace = Trace::training();
        let x = trace.input("x", F32, (n, 6));
        let loss = trace.minimize_in_parts(n, Sgd::new(0.1), |i| {
            x.slice(0, i..=i).apply(&layer).tanh().mean()
        });
        assert!(trace.finish(&[loss]).is_ok());
    });
}

#[test]
fn chains_of_views_are_compiled_in_linear_work() {
    assert_linear("transposes", 1000, |n, session| {
        planned(session, |x| (0..2 * n).fold(x, |x, _| x.t()).exp())
    });
    assert_linear("transposes and reshapes", 1000, |n, session| {
        planned(session, |x| {
            let x = (0..n).fold(x.reshape((2, 2, 6)), |x, _| {
                x.permute([1, 0, 2]).reshape((4, 6)).reshape((2, 2, 6))
            });
            x.exp()
        });
    });
    assert_linear("what lies between views", 300, |n, session| {
        planned(session, |x| {
            (0..n).fold(x, |x, _| x.t().reshape((4, 6)).exp())
        });
    });
    assert_linear("readers all along a chain of views", 300, |n, session| {
        planned(session, |x| {
            let (mut view, mut sum) = (x, x.exp());
            for _ in 0..n {
                view = view.reshape((2, 2, 6)).permute([1, 0, 2]).reshape((4, 6));
                sum = sum + view.exp();
            }
            sum
        });
    });
}

#[test]
fn long_chains_and_wide_sums_are_compiled_in_linear_work() {
    assert_linear("a chain of steps", 500, |n, session| {
        planned(session, |x| (0..n).fold(x, |x, _| x.sin()))
    });
    assert_linear("a chain of sums", 300, |n, session| {
        planned(session, |x| (0..n).fold(x, |x, _| x - x.mean()))
    });
    assert_linear("a concatenation", 500, |n, session| {
        planned(session, |x| {
            let parts: Vec<Tensor<'_>> = (0..n).map(|i| (x + i as f32).exp()).collect();
            x.trace().concat(&parts, 0)
        });
    });
    assert_linear("readers of one value", 300, |n, session| {
        planned(session, |x| {
            let shared = x.exp().matmul(x.t()).keep();
            (0..n).fold(shared, |y, _| shared.matmul(y).tanh() + shared)
        });
    });
}
