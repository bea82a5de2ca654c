//! Custom gradients against those of composed operations.

use ndarray::{ArrayD, IxDyn};
use slabwise::Precision;
use slabwise::nn::Linear;
use slabwise::optim::Sgd;
use slabwise::prelude::*;
use slabwise_models::noise;

fn random(shape: &[usize], seed: u64) -> ArrayD<f32> {
    let mut draw = noise(seed);
    ArrayD::from_shape_simple_fn(IxDyn(shape), || draw() * 2.0 - 1.0)
}

/// The elements of tensors that are made of x `[4, 3]` and w `[3, 5]`.
fn run<const N: usize>(
    build: impl for<'t> Fn(Tensor<'t>, Tensor<'t>) -> [Tensor<'t>; N],
) -> [Vec<f32>; N] {
    let trace = Trace::inference();
    let (x, w) = (trace.input("x", F32, (4, 3)), trace.input("w", F32, (3, 5)));
    let outputs = build(x, w);
    let mut session = Session::new(Device::Cpu, Params::seeded(0)).expect("a session");
    let program = session.compile(&trace, outputs).expect("it compiles");
    let inputs = (&random(&[4, 3], 1), &random(&[3, 5], 2));
    let results = session.run(&program, inputs).expect("it runs");
    results.map(|result| result.array::<f32>().expect("f32").into_iter().collect())
}

/// tanh(x·w), with the gradients that differentiation gives, written by hand.
fn layer<'t>(x: Tensor<'t>, w: Tensor<'t>) -> Tensor<'t> {
    x.trace().custom_gradient(
        [x, w],
        |[x, w]| x.matmul(w).tanh(),
        |[x, w], y, dy| {
            let dy = dy * (1.0 - y * y);
            [Some(dy.matmul(w.t())), Some(x.t().matmul(dy))]
        },
    )
}

/// The same without a custom gradient.
fn derived<'t>(x: Tensor<'t>, w: Tensor<'t>) -> Tensor<'t> {
    x.matmul(w).tanh()
}

fn close(a: &[f32], b: &[f32]) {
    assert_eq!(a.len(), b.len());
    let near = |(a, b): (&f32, &f32)| (a - b).abs() <= 2e-6 * (1.0 + b.abs());
    assert!(a.iter().zip(b).all(near), "{a:?}\n{b:?}");
}

#[test]
fn the_function_takes_the_place_of_the_derivatives() {
    // Twice in a row, and once beside.
    let of = |by_hand: bool| {
        run(|x, w| {
            let layer = if by_hand { layer } else { derived };
            let h = layer(x, w);
            let loss = (layer(h, w.t()) * x).sum() + h.square().sum();
            let [dx, dw] = x.trace().gradients(loss, [x, w]);
            [loss, dx, dw]
        })
    };
    for (by_hand, derived) in of(true).iter().zip(&of(false)) {
        close(by_hand, derived);
    }
}

#[test]
fn another_gradient_than_the_derivative() {
    let [y, dx, dy] = run(|x, _| {
        let y = x.trace().custom_gradient(
            [x],
            |[x]| x.sign(),
            |[x], _, dy| [Some(x.abs().le(0.5).select(dy, 0.0))],
        );
        let [dx, dy] = x.trace().gradients((y * 3.0).sum(), [x, y]);
        [y, dx, dy]
    });
    let x = random(&[4, 3], 1);
    let expected: Vec<f32> = x
        .iter()
        .map(|x| if x.abs() <= 0.5 { 3.0 } else { 0.0 })
        .collect();
    assert_eq!((dx, dy), (expected, vec![3.0; 12]));
    assert!(y.iter().zip(&x).all(|(y, x)| *y == x.signum()));
}

/// The value depends on its input through integers alone, which have no derivative.
#[test]
fn a_value_through_integers_has_a_gradient() {
    let [dx] = run(|x, _| {
        let trace = x.trace();
        let y = trace.custom_gradient(
            [x],
            |[x]| (x * 4.0).cast(I32).cast(F32) / 4.0,
            |_, _, dy| [Some(dy * 2.0)],
        );
        trace.gradients(y.sum(), [x])
    });
    assert_eq!(dx, [2.0; 12]);
}

#[test]
fn an_input_twice_and_inputs_without_gradients() {
    let [dx, of_none] = run(|x, _| {
        let trace = x.trace();
        let mask = x.gt(0.0);
        let y = trace.custom_gradient_many(
            &[x, x, mask],
            |x| x[2].select(x[0] + x[1], 0.0),
            |x, _, dy| vec![Some(dy), Some(x[2].select(dy * 10.0, 0.0)), None],
        );
        let none = trace.custom_gradient([x], |[x]| x * 2.0, |_, _, _| [None]);
        let [dx] = trace.gradients(y.sum(), [x]);
        let [of_none] = trace.gradients(none.sum(), [x]);
        [dx, of_none]
    });
    let x = random(&[4, 3], 1);
    let expected: Vec<f32> = x
        .iter()
        .map(|&x| if x > 0.0 { 11.0 } else { 1.0 })
        .collect();
    assert_eq!((dx, of_none), (expected, vec![0.0; 12]));
}

/// y = eˣ with dx = y·dy: the second derivative goes through the function again.
#[test]
fn gradients_of_gradients() {
    let [first, second, expected] = run(|x, _| {
        let trace = x.trace();
        let y = trace.custom_gradient([x], |[x]| x.exp(), |_, y, dy| [Some(y * dy)]);
        let [first] = trace.gradients(y.sum(), [x]);
        let [second] = trace.gradients(first.square().sum(), [x]);
        [first, second, (x * 2.0).exp() * 2.0]
    });
    close(&second, &expected);
    assert!(first.iter().all(|dx| *dx > 0.0));
}

#[test]
fn hooks_and_custom_gradients_within_one_another() {
    let [dx] = run(|x, w| {
        let trace = x.trace();
        let y = trace.custom_gradient(
            [x, w],
            |[x, w]| layer(x, w) * 2.0,
            |[x, w], _, dy| {
                let of = (layer(x, w) * dy.detach() * 2.0).sum();
                x.trace().gradients(of, [x, w]).map(Some)
            },
        );
        let y = y.hook_gradient(|dy| dy * 3.0);
        trace.gradients(y.sum(), [x])
    });
    let [expected] = run(|x, w| {
        let y = x.matmul(w).tanh() * 6.0;
        x.trace().gradients(y.sum(), [x])
    });
    close(&dx, &expected);
}

/// Values that enter a scan, are its carry, or are captured by its steps; hooks too.
#[test]
fn values_of_scans() {
    let of = |scanned: bool, hook: bool| {
        run(|x, w| {
            let trace = x.trace();
            let changed = |v| match hook {
                true => mark(v),
                false => trace.custom_gradient([v], |[v]| v * 1.0, |_, _, dy| [Some(dy * 10.0)]),
            };
            let first = changed(w.slice(1, 0..1).squeeze(1));
            let captured = changed(w.slice(1, 1..2).squeeze(1));
            let inputs = changed(x);
            let last = match scanned {
                true => {
                    let ([last], []) = trace.scan([first], [inputs], |[c], [x]| {
                        ([(c * captured + x).tanh()], [])
                    });
                    last
                }
                false => (0..4).fold(first, |c, at| {
                    (c * captured + inputs.slice(0, at..=at).squeeze(0)).tanh()
                }),
            };
            trace.gradients(last.sum(), [x, w])
        })
    };
    fn mark(v: Tensor<'_>) -> Tensor<'_> {
        v.hook_gradient(|dv| dv * 10.0)
    }
    let expected = of(false, false);
    for (scanned, hook) in [(true, false), (true, true), (false, true)] {
        for (got, expected) in of(scanned, hook).iter().zip(&expected) {
            close(got, expected);
        }
    }
}

/// Rows of a batch, whose values are larger than the workspaces of kernels.
const ROWS: usize = 1024;

fn loss_of<'t>(x: Tensor<'t>, layers: &[Linear], custom: bool) -> Tensor<'t> {
    let y = layers.iter().fold(x, |x, layer| {
        let z = x.apply(layer);
        match custom {
            true => x.trace().custom_gradient(
                [z],
                |[z]| z.relu(),
                |[z], _, dy| [Some(z.gt(0.0).select(dy, 0.0))],
            ),
            false => z.relu(),
        }
    });
    y.square().mean()
}

/// Training by a budget, in parts of a batch and in halves: as without a custom gradient.
#[test]
fn training_of_layers() {
    let train = |custom: bool, parts: usize, budget: Budget, half: bool| {
        let params = Params::seeded(3);
        let at = params.root();
        let layers = [0, 1, 2].map(|i| Linear::new(&at / &format!("layer{i}"), 16, 16));
        let mut trace = Trace::training();
        if half {
            trace = trace.with_precision(Precision::Bf16);
        }
        let x = trace.input("x", F32, (ROWS, 16));
        let total = match parts {
            1 => {
                let loss = loss_of(x, &layers, custom);
                trace.minimize(loss, Sgd::new(0.5));
                loss
            }
            parts => trace.minimize_in_parts(parts, Sgd::new(0.5), |part| {
                let rows = ROWS / parts;
                let x = x.slice(0, part * rows..(part + 1) * rows);
                loss_of(x, &layers, custom)
            }),
        };
        let mut session = Session::new(Device::Cpu, params)
            .expect("a session")
            .with_budget(budget);
        let program = session.compile(&trace, [total]).expect("it compiles");
        let feed = random(&[ROWS, 16], 7);
        let losses = (0..4).map(|_| {
            let [loss] = session.run(&program, (&feed,)).expect("it runs");
            loss.item()
        });
        losses.collect::<Vec<f32>>()
    };
    for (parts, budget, half) in [
        (1, Budget::Unlimited, false),
        (1, Budget::Fraction(0.9), false),
        (2, Budget::Unlimited, false),
        (1, Budget::Unlimited, true),
    ] {
        let [custom, derived] = [true, false].map(|custom| train(custom, parts, budget, half));
        close(&custom, &derived);
        assert!(custom[3] < custom[0]);
    }
}

#[test]
fn mistakes_name_the_line() {
    let message = |build: &dyn for<'t> Fn(&'t Trace, Tensor<'t>) -> Tensor<'t>| {
        let trace = Trace::inference();
        let x = trace.input("x", F32, (4, 3));
        let y = build(&trace, x);
        let dx = trace.gradients_many(y.sum(), [x]);
        let mut session = Session::new(Device::Cpu, Params::seeded(0)).expect("a session");
        match session.compile_any(&trace, &dx) {
            Err(error) => error.to_string(),
            Ok(_) => panic!("accepted"),
        }
    };
    let file = file!().rsplit('/').next().expect("a name");
    let of = [
        (
            message(&|t, x| t.custom_gradient([x], |[x]| x, |_, _, dy| [Some(dy.sum())])),
            "the gradient of input 0 is f32 [], not f32 [4, 3]",
        ),
        (
            message(&|t, x| t.custom_gradient([x], |[x]| x, |_, _, dy| [Some(dy.cast(I32))])),
            "the gradient of input 0 is i32 [4, 3], not f32 [4, 3]",
        ),
        (
            message(&|t, x| t.custom_gradient_many(&[x], |x| x[0], |_, _, _| vec![])),
            "0 gradients of 1 inputs",
        ),
        (
            message(&|t, x| {
                t.custom_gradient([x], |[x]| x.cast(I32), |_, _, _| [None])
                    .cast(F32)
            }),
            "a value of type i32 has no gradient",
        ),
        (
            message(&|t, x| t.custom_gradient([], |[]| x, |[], _, _| [])),
            "it has no inputs",
        ),
        (
            message(&|t, x| {
                let first = x.slice(0, ..1).squeeze(0);
                let ([last], []) = t.scan([first], [x], |[c], [x]| {
                    let y = t.custom_gradient([x], |[x]| x, |_, _, dy| [Some(dy)]);
                    ([c + y], [])
                });
                last
            }),
            "a step has no custom gradients",
        ),
    ];
    for (message, expected) in of {
        assert!(
            message.contains(expected) && message.contains(file),
            "{message}"
        );
    }
    let params = Params::seeded(0);
    let layer = Linear::new(&params.root() / "layer", 3, 3);
    let trace = Trace::training();
    let x = trace.input("x", F32, (4, 3));
    let y = trace.custom_gradient([x], |[x]| x.apply(&layer), |_, _, dy| [Some(dy)]);
    trace.minimize(y.sum(), Sgd::new(0.1));
    let mut session = Session::new(Device::Cpu, params).expect("a session");
    let error = session.compile(&trace, [y]).err().expect("a mistake");
    let error = error.to_string();
    assert!(
        error.contains("the parameter \"layer.") && error.contains(file),
        "{error}"
    );
}
