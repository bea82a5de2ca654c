//! Hooks of gradients against gradients that are put together by hand.

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use ndarray::ArrayD;
use slabwise::nn::*;
use slabwise::optim::Sgd;
use slabwise::prelude::*;
use support::Rng;

fn random(seed: u64, lengths: &[usize]) -> ArrayD<f32> {
    let mut rng = Rng(seed);
    ArrayD::from_shape_simple_fn(lengths, || rng.float(-2.0, 2.0) as f32)
}

/// The value of each element of a tensor of the inputs x `[4, 3]` and v `[3, 5]`.
fn run<const N: usize>(
    build: impl for<'t> Fn(Tensor<'t>, Tensor<'t>) -> [Tensor<'t>; N],
) -> [Vec<f32>; N] {
    let trace = Trace::inference();
    let (x, v) = (trace.input("x", F32, (4, 3)), trace.input("v", F32, (3, 5)));
    let outputs = build(x, v);
    let mut session = Session::new(Device::Cpu, Params::seeded(0)).expect("a session");
    let program = session.compile(&trace, outputs).expect("it compiles");
    let inputs = (&random(1, &[4, 3]), &random(2, &[3, 5]));
    let results = session.run(&program, inputs).expect("it runs");
    results.map(|result| result.array::<f32>().expect("f32").into_iter().collect())
}

/// Of h: the loss, to which h contributes twice.
fn loss(h: Tensor<'_>) -> Tensor<'_> {
    (h.exp() * h).sum()
}

#[test]
fn a_hook_replaces_the_whole_gradient() {
    let [hooked, of_h] = run(|x, v| {
        let h = x.matmul(v).tanh().hook_gradient(|dh| dh.clamp(-0.5, 0.5));
        x.trace().gradients(loss(h), [x, h])
    });
    let [by_hand, clamped] = run(|x, v| {
        let h = x.matmul(v).tanh();
        let [dh] = x.trace().gradients(loss(h), [h]);
        let dh = dh.clamp(-0.5, 0.5);
        let [dx] = x.trace().gradients((h * dh.detach()).sum(), [x]);
        [dx, dh]
    });
    assert_eq!(hooked, by_hand);
    assert_eq!(of_h, clamped);
    assert!(of_h.contains(&0.5) && of_h.iter().any(|g| g.abs() < 0.5));
}

#[test]
fn gradients_beside_the_hooked_tensor_do_not_pass_through_it() {
    let [dx, dy] = run(|x, _| {
        let hooked = x.hook_gradient(|dx| dx * 10.0);
        let loss = (hooked * 2.0 + x * 3.0).sum();
        x.trace().gradients(loss, [x, hooked])
    });
    assert_eq!(dx, [23.0; 12]);
    assert_eq!(dy, [20.0; 12]);
}

#[test]
fn hooks_are_called_from_the_loss_back() {
    let [dx] = run(|x, _| {
        let first = x.hook_gradient(|g| g * 2.0);
        let second = first.hook_gradient(|g| g + 1.0);
        x.trace().gradients(second.sum(), [x])
    });
    assert_eq!(dx, [4.0; 12]);
}

#[test]
fn a_hook_is_called_once_for_each_backward_pass_that_reaches_it() {
    let calls = Arc::new(AtomicUsize::new(0));
    let trace = Trace::inference();
    let x = trace.input("x", F32, (3,));
    let counter = calls.clone();
    let y = x.square().hook_gradient(move |g| {
        counter.fetch_add(1, Ordering::Relaxed);
        g
    });
    let called = || calls.load(Ordering::Relaxed);
    assert_eq!(called(), 0);
    let [_] = trace.gradients((y + y.exp()).sum(), [x]);
    assert_eq!(called(), 1);
    let [_] = trace.gradients(x.sum(), [x]);
    assert_eq!(called(), 1, "the loss does not depend on it");
    let [_] = trace.gradients(y.detach().sum(), [x]);
    assert_eq!(called(), 1, "no gradient comes back to it");
    let [_] = trace.gradients(y.sum(), [x]);
    assert_eq!(called(), 2);
}

#[test]
fn gradients_through_a_hook_are_differentiated_again() {
    // d/dx of (x²)′ = 2x·hook(1), where the hook's factor depends on nothing: its second derivative
    // passes through the hook of the gradient's own way back.
    let [first, second, by_hand] = run(|x, _| {
        let y = x.hook_gradient(|g| g.square());
        let [first] = x.trace().gradients((y * y).sum(), [x]);
        let [second] = x.trace().gradients(first.sum(), [x]);
        // (2x)² = 4x², and 8x, squared on its way back.
        [first, second, (x * 8.0).square()]
    });
    let x = random(1, &[4, 3]);
    for (g, x) in first.iter().zip(&x) {
        assert_eq!(*g, (2.0 * x) * (2.0 * x));
    }
    for (got, expected) in second.iter().zip(&by_hand) {
        assert!(
            (got - expected).abs() <= 1e-5 * expected.abs(),
            "{got} {expected}"
        );
    }
}

/// The losses of some steps of a model of two layers, and the bytes of its slab.
fn train(hooked: bool, parts: usize) -> (Vec<u32>, u64) {
    let params = Params::seeded(3);
    let at = &params.root();
    let (wide, narrow) = (
        Linear::new(at / "wide", 3, 16),
        Linear::new(at / "narrow", 16, 5),
    );
    let trace = Trace::training();
    let x = trace.input("x", F32, (4, 3));
    let model: Box<dyn Module> = match hooked {
        true => Box::new(
            Sequential::new()
                .then(Hooked::new(wide, |_, y| y.hook_gradient(|dy| dy)))
                .then(Relu)
                .then(BackwardHooked::new(narrow, |dx, _| dx)),
        ),
        false => Box::new(Sequential::new().then(wide).then(Relu).then(narrow)),
    };
    let of_all = match parts {
        1 => {
            let loss = x.apply(&*model).square().mean();
            trace.minimize(loss, Sgd::new(0.1));
            loss
        }
        _ => trace.minimize_in_parts(parts, Sgd::new(0.1), |part| {
            let rows = 4 / parts;
            let x = x.slice(0, part * rows..(part + 1) * rows);
            x.apply(&*model).square().mean()
        }),
    };
    let mut session = Session::new(Device::Cpu, params).expect("a session");
    let program = session.compile(&trace, [of_all]).expect("it compiles");
    let x = random(1, &[4, 3]);
    let losses = (0..4).map(|_| {
        let [loss] = session.run(&program, (&x,)).expect("it runs");
        loss.item().to_bits()
    });
    (losses.collect(), program.plan().slab_bytes())
}

#[test]
fn hooks_that_observe_change_neither_bits_nor_bytes() {
    for parts in [1, 2] {
        assert_eq!(train(true, parts), train(false, parts));
    }
}

#[test]
fn a_layer_with_a_backward_hook_has_both_gradients() {
    fn thrice(x: Tensor<'_>) -> Tensor<'_> {
        x * 3.0
    }
    struct Thrice;
    impl Module for Thrice {
        fn forward<'t>(&self, x: Tensor<'t>) -> Tensor<'t> {
            thrice(x)
        }
    }
    let layer = BackwardHooked::new(Thrice, |dx, dy| dx * 100.0 + dy);
    let [dx] = run(|x, _| x.trace().gradients((x.apply(&layer) * 2.0).sum(), [x]));
    assert_eq!(dx, [602.0; 12]);
}

#[test]
fn mistaken_hooks_are_named_with_their_line() {
    let trace = Trace::inference();
    let x = trace.input("x", F32, (2, 3));
    let _ = trace.input("i", I32, (3,)).hook_gradient(|g| g);
    let [_] = trace.gradients(x.hook_gradient(|g| g.sum()).sum(), [x]);
    let zero = trace.zeros((3,));
    let ([_], [_]) = trace.scan([zero], [x], |[h], [x]| {
        let h = (h + x).hook_gradient(|g| g);
        ([h], [h])
    });
    let mistakes = trace.mistakes();
    let shown: Vec<&str> = mistakes.iter().map(|m| m.message.as_str()).collect();
    assert_eq!(
        shown,
        [
            "hook_gradient: a tensor of type i32 has no gradient",
            "hook_gradient: the hook returns f32 [] for a gradient f32 [2, 3]",
            "scan: the gradients in a step pass through no hook; hook what enters the scan or leaves it",
        ]
    );
    assert!(
        mistakes
            .iter()
            .all(|m| m.location.file().ends_with("hooks.rs"))
    );
}

#[test]
fn a_hook_of_a_half_is_given_its_gradient() {
    let [dx] = run(|x, _| {
        let y = x.cast(BF16).hook_gradient(|g| g * 4.0);
        x.trace().gradients(y.cast(F32).sum(), [x])
    });
    assert_eq!(dx, [4.0; 12]);
}
