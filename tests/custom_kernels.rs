//! Custom kernels against composed operations.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use half::{bf16, f16};
use ndarray::{Array2, ArrayD, IxDyn, arr1};
use slabwise::nn::Linear;
use slabwise::optim::Sgd;
use slabwise::prelude::*;
use slabwise::{CustomKernel, CustomRun};
use slabwise_models::noise;

fn random(shape: &[usize], seed: u64) -> ArrayD<f32> {
    let mut draw = noise(seed);
    ArrayD::from_shape_simple_fn(IxDyn(shape), || draw() * 2.0 - 1.0)
}

fn session(threads: usize) -> Session {
    Session::new(Device::Cpu, Params::seeded(0))
        .expect("a session")
        .with_threads(threads)
}

fn elements(output: &slabwise::Output<'_>) -> Vec<f32> {
    output.array::<f32>().expect("f32").into_iter().collect()
}

#[track_caller]
fn close(a: &[f32], b: &[f32]) {
    assert_eq!(a.len(), b.len());
    let near = |(a, b): (&f32, &f32)| (a - b).abs() <= 2e-6 * (1.0 + b.abs());
    assert!(a.iter().zip(b).all(near), "{a:?}\n{b:?}");
}

/// Softmax along the last axis.
fn softmax() -> CustomKernel {
    CustomKernel::new("own_softmax", [F32], F32, |run| {
        let x = run.input::<f32>(0);
        let columns = run.dims().last().copied().unwrap_or(1).max(1);
        run.parts(columns, |row, result: &mut [f32]| {
            let x = &x[row * columns..][..columns];
            let most = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let sum: f32 = x.iter().map(|x| (x - most).exp()).sum();
            for (to, x) in result.iter_mut().zip(x) {
                *to = (x - most).exp() / sum;
            }
        });
    })
}

/// dx of softmax, from its result and the gradient of that.
fn softmax_gradient() -> CustomKernel {
    CustomKernel::new("own_softmax_gradient", [F32, F32], F32, |run| {
        let (y, dy) = (run.input::<f32>(0), run.input::<f32>(1));
        let columns = *run.dims().last().expect("an axis");
        run.parts(columns, |row, dx: &mut [f32]| {
            let at = |of: &'_ [f32], k: usize| of[row * columns + k];
            let dot: f32 = (0..columns).map(|k| at(y, k) * at(dy, k)).sum();
            for (k, dx) in dx.iter_mut().enumerate() {
                *dx = at(y, k) * (at(dy, k) - dot);
            }
        });
    })
}

#[test]
fn any_view_at_any_length_on_any_number_of_threads() {
    let kernel = softmax();
    let trace = Trace::inference();
    let x = trace.input("x", F32, (Dim::bounded("batch", 9), 6, 5));
    let views = [
        x,
        x.permute([2, 0, 1]),
        x.slice(1, 2..5),
        x.slice(2, 1..2),
        x.slice(0, 0..0),
        x.mean_over(0).expand((3, 6, 5)),
        (x * 2.0).exp(),
        x.reshape((x.dim(0), 30)),
        x.sum(),
        x.matmul(x.t()).relu(),
    ];
    let mut outputs = Vec::new();
    for view in views {
        outputs.push(trace.custom(&kernel, &[view], view.shape()) * 3.0);
    }
    for view in views {
        let last = view.rank().checked_sub(1);
        outputs.push(last.map_or(view * 0.0 + 1.0, |axis| view.softmax(axis)) * 3.0);
    }
    let outputs: [Tensor<'_>; 20] = outputs.try_into().expect("two lists of ten");
    let mut before: Option<Vec<Vec<f32>>> = None;
    for threads in [1, 2, 5] {
        let mut session = session(threads);
        let program = session.compile(&trace, outputs).expect("it compiles");
        let mut all = Vec::new();
        for batch in [9, 1, 4] {
            let results = session.run(&program, (&random(&[batch, 6, 5], 1),));
            let results = results.expect("it runs");
            let (own, composed) = results.split_at(10);
            for (own, composed) in own.iter().zip(composed) {
                assert_eq!(own.shape(), composed.shape());
                close(&elements(own), &elements(composed));
                all.push(elements(own));
            }
        }
        assert_eq!(*before.get_or_insert(all.clone()), all, "{threads} threads");
    }
}

/// The sum of the input's elements and of one of each type, into each element of the result.
fn sums(result: DType) -> CustomKernel {
    let types = [F32, F16, BF16, I32, U8, Bool];
    CustomKernel::new("sums", types, result, move |run| {
        let mut sum: f32 = run.input::<f32>(0).iter().sum();
        sum += run.input::<f16>(1).iter().map(|x| x.to_f32()).sum::<f32>();
        sum += run.input::<bf16>(2).iter().map(|x| x.to_f32()).sum::<f32>();
        sum += run.input::<i32>(3).iter().sum::<i32>() as f32;
        let bytes = run.input::<u8>(4).iter().chain(run.input::<u8>(5));
        sum += bytes.map(|&x| f32::from(x)).sum::<f32>();
        match result {
            F16 => run.result::<f16>().fill(f16::from_f32(sum)),
            BF16 => run.result::<bf16>().fill(bf16::from_f32(sum)),
            I32 => run.result::<i32>().fill(sum as i32),
            U8 => run.result::<u8>().fill(sum as u8),
            _ => run.result::<f32>().fill(sum),
        }
    })
}

#[test]
fn every_type() {
    let trace = Trace::inference();
    let x = trace.input("x", F32, (3, 5));
    // Parts that start at odd elements.
    let parts = [F32, F16, BF16, I32, U8].map(|dtype| x.cast(dtype).slice(0, 1..3));
    let mut inputs = parts.to_vec();
    inputs.push(x.gt(4.0).slice(0, 1..2));
    let of = |dtype| trace.custom(&sums(dtype), &inputs, (2, 3)).cast(F32);
    let mut session = session(2);
    let results = [F32, F16, BF16, I32, U8].map(of);
    let program = session.compile(&trace, results).expect("it compiles");
    let x = Array2::from_shape_fn((3, 5), |(i, j)| (i + j) as f32).into_dyn();
    // Of each type but the last 15 + 20, and of the last 4: of 5 to 9, four are above 4... of
    // 1 to 5, one is.
    let expected = 5.0 * (15.0 + 20.0) + 1.0;
    for result in session.run(&program, (&x,)).expect("it runs") {
        assert_eq!(elements(&result), vec![expected; 6]);
    }
}

/// tanh(x · w) by a loop, and how often it has run.
fn counted_layer() -> (CustomKernel, Arc<AtomicUsize>) {
    let count = Arc::new(AtomicUsize::new(0));
    let counter = count.clone();
    let kernel = CustomKernel::new("layer", [F32, F32], F32, move |run| {
        counter.fetch_add(1, Ordering::Relaxed);
        let (x, w) = (run.input::<f32>(0), run.input::<f32>(1));
        let (inner, columns) = (run.input_dims(0)[1], run.dims()[1]);
        run.parts(columns, |row, y: &mut [f32]| {
            for (j, y) in y.iter_mut().enumerate() {
                let terms = (0..inner).map(|k| x[row * inner + k] * w[k * columns + j]);
                *y = terms.sum::<f32>().tanh();
            }
        });
    });
    (kernel, count)
}

#[test]
fn calls_with_the_same_inputs_are_merged_and_unused_ones_removed() {
    let (kernel, count) = counted_layer();
    let (other, _) = counted_layer();
    let trace = Trace::inference();
    let (x, w) = (trace.input("x", F32, (4, 3)), trace.input("w", F32, (3, 5)));
    let call = |of: &CustomKernel, x| trace.custom(of, &[x, w], (4, 5));
    let sum =
        call(&kernel, x) + call(&kernel.clone(), x) + call(&other, x) + call(&kernel, x * 2.0);
    let _ = call(&kernel, x * 3.0);
    let mut session = session(1);
    let program = session.compile(&trace, [sum]).expect("it compiles");
    let inputs = (&random(&[4, 3], 1), &random(&[3, 5], 2));
    session.run(&program, inputs).expect("it runs");
    assert_eq!(count.load(Ordering::Relaxed), 2);
    assert!(
        program.plan().to_string().contains("layer"),
        "{}",
        program.plan()
    );
}

/// Softmax with its gradient.
fn trained<'t>(kernels: &(CustomKernel, CustomKernel), x: Tensor<'t>) -> Tensor<'t> {
    let (forward, backward) = kernels.clone();
    x.trace().custom_gradient(
        [x],
        |[x]| x.trace().custom(&forward, &[x], x.shape()),
        move |_, y, dy| [Some(y.trace().custom(&backward, &[y, dy], y.shape()))],
    )
}

/// The losses of three steps of a residual network with softmax, and whether the plan recomputes a
/// value.
fn steps(own: bool, budget: Budget, checkpoint: bool) -> (Vec<f32>, bool) {
    let params = Params::seeded(3);
    let root = params.root();
    let layers: Vec<Linear> = (0..6)
        .map(|k| Linear::new(&root / &format!("layer{k}"), 16, 16))
        .collect();
    let kernels = (softmax(), softmax_gradient());
    let trace = Trace::training();
    let x = trace.input("x", F32, (Dim::bounded("batch", 2000), 16));
    let mut y = x;
    for layer in &layers {
        let block = |scores| match own {
            true => trained(&kernels, scores),
            false => scores.softmax(1),
        };
        y = y + match checkpoint {
            true => y.checkpoint(|y| block(y.apply(layer) * 4.0)),
            false => block(y.apply(layer) * 4.0),
        };
    }
    let loss = y.square().mean();
    trace.minimize(loss, Sgd::new(0.5).momentum(0.9));
    let mut session = Session::new(Device::Cpu, params)
        .expect("a session")
        .with_budget(budget);
    let program = session.compile(&trace, [loss]).expect("it compiles");
    let mut all = Vec::new();
    for step in 0..3 {
        let x = random(&[2000 - 5 * step, 16], step as u64);
        let [loss] = session.run(&program, (&x,)).expect("it runs");
        all.extend(elements(&loss));
    }
    (all, !program.plan().recomputed().is_empty())
}

#[test]
fn a_gradient_by_a_second_kernel() {
    let (own, _) = steps(true, Budget::Unlimited, false);
    let (composed, _) = steps(false, Budget::Unlimited, false);
    close(&own, &composed);
    assert!(own[2] < own[0], "{own:?}");
}

#[test]
fn the_same_bits_under_a_budget_and_in_checkpoints() {
    let (all, _) = steps(true, Budget::Unlimited, false);
    let (within, recomputes) = steps(true, Budget::Fraction(0.7), false);
    assert_eq!(within, all);
    assert!(recomputes);
    assert_eq!(steps(true, Budget::Unlimited, true).0, all);
}

#[test]
fn in_the_steps_of_a_scan() {
    let kernel = softmax();
    let run = |own: bool| {
        let trace = Trace::inference();
        let x = trace.input("x", F32, (7, 4, 6));
        let ([last], [each]) = trace.scan([trace.zeros((4, 6))], [x], |[h], [x]| {
            let sum = h * 3.0 + x;
            let next = match own {
                true => trace.custom(&kernel, &[sum.t()], (6, 4)).t(),
                false => sum.softmax(0),
            };
            ([next], [next * 2.0])
        });
        let mut session = session(2);
        let program = session.compile(&trace, [last, each]).expect("it compiles");
        let results = session.run(&program, (&random(&[7, 4, 6], 4),));
        results
            .expect("it runs")
            .iter()
            .flat_map(elements)
            .collect::<Vec<_>>()
    };
    close(&run(true), &run(false));
}

/// The message of compiling a program for which there is one mistake.
fn mistake(build: impl for<'t> Fn(&'t Trace) -> Tensor<'t>) -> String {
    let trace = Trace::inference();
    let output = build(&trace);
    match session(1).compile(&trace, [output]) {
        Ok(_) => panic!("it compiles"),
        Err(error) => error.to_string(),
    }
}

#[track_caller]
fn assert_has(text: &str, parts: &[&str]) {
    let lines = format!("{}:", file!());
    for part in parts.iter().chain([&lines.as_str()]) {
        assert!(text.contains(part), "{part:?} is not in: {text}");
    }
}

#[test]
fn mistakes_name_the_kernel_and_the_line() {
    let kernel = softmax_gradient();
    let text = mistake(|t| t.custom(&kernel, &[t.input("x", F32, (2, 3))], (2, 3)));
    assert_has(
        &text,
        &["own_softmax_gradient: 1 inputs of a custom kernel of 2"],
    );
    let text = mistake(|t| {
        let (x, y) = (t.input("x", F32, (2, 3)), t.input("y", I32, (4,)));
        t.custom(&kernel, &[x, y], (2, 3))
    });
    let told = "input 1 is i32 [4], and the custom kernel takes f32; convert with cast";
    assert_has(&text, &[told]);
    let nothing = |_: &mut CustomRun<'_>| {};
    let truth = CustomKernel::new("truth", [F32], Bool, nothing);
    let text = mistake(|t| t.custom(&truth, &[t.input("x", F32, ())], ()));
    assert_has(
        &text,
        &["truth: a custom kernel returns no bool; return u8"],
    );
    let none = CustomKernel::new("none", [], F32, nothing);
    let text = mistake(|t| t.custom(&none, &[], ()) + t.input("x", F32, ()));
    assert_has(
        &text,
        &["none: a custom kernel of 0 inputs; it takes 1 to 39"],
    );
    let text = mistake(|t| t.custom(&truth, &[t.input("x", F32, ())], [-1]));
    assert_has(&text, &["truth: the length -1 is negative"]);
}

#[test]
fn a_gradient_that_is_missing() {
    let kernel = softmax();
    let gradient = |detach: bool, in_scan: bool| {
        let trace = Trace::inference();
        let x = trace.input("x", F32, (4, 3));
        let step = |x| {
            let y = trace.custom(&kernel, &[x], x.shape());
            x * if detach { y.detach() } else { y }
        };
        let y = match in_scan {
            true => {
                trace
                    .scan([x.mean_over(0)], [x], |[h], [x]| ([step(h + x)], []))
                    .0[0]
            }
            false => step(x),
        };
        let [dx] = trace.gradients(y.sum(), [x]);
        let compiled = session(1).compile(&trace, [dx]);
        compiled.map(|_| ()).map_err(|error| error.to_string())
    };
    for in_scan in [false, true] {
        let text = gradient(false, in_scan).expect_err("there is no gradient");
        let told = "own_softmax: a custom kernel has no gradient, and the backward pass needs it";
        assert_has(&text, &[told, "custom_gradient"]);
        assert_eq!(gradient(true, in_scan), Ok(()));
    }
}

#[test]
fn a_panic_reaches_the_caller_and_the_session_goes_on() {
    let picky = CustomKernel::new("picky", [F32], F32, |run| {
        let x = run.input::<f32>(0);
        run.parts(1, |k, y: &mut [f32]| {
            assert!(x[k] < 5.0, "{} is too large", x[k]);
            y[0] = x[k] * 2.0;
        });
    });
    let of_other_type = CustomKernel::new("confused", [F32], F32, |run| {
        run.input::<i32>(0);
    });
    let of_other_input = CustomKernel::new("absent", [F32], F32, |run| {
        run.input_dims(1);
    });
    let trace = Trace::inference();
    let x = trace.input("x", F32, (3,));
    let mut session = session(2);
    let [good, bad, absent] = [&picky, &of_other_type, &of_other_input].map(|kernel| {
        let y = trace.custom(kernel, &[x], x.shape());
        session.compile(&trace, [y]).expect("it compiles")
    });
    let mut told = |program: &Program<1>, x: [f32; 3]| {
        let x = arr1(&x).into_dyn();
        let run = catch_unwind(AssertUnwindSafe(|| {
            let [y] = session.run(program, (&x,)).expect("it runs");
            elements(&y)
        }));
        run.map_err(|panic| *panic.downcast::<String>().expect("a message"))
    };
    assert_eq!(told(&good, [1.0, 2.0, 3.0]), Ok(vec![2.0, 4.0, 6.0]));
    assert_eq!(told(&good, [1.0, 7.0, 3.0]), Err("7 is too large".into()));
    let text = told(&bad, [0.0; 3]).expect_err("it reads another type");
    assert!(text.starts_with("input 0 of \"confused\""), "{text}");
    assert!(text.ends_with("is read as i32"), "{text}");
    let text = told(&absent, [0.0; 3]).expect_err("there is no such input");
    assert!(
        text.starts_with("\"absent\" of [F32] to F32 has no input 1"),
        "{text}"
    );
    assert_eq!(told(&good, [1.0, 2.0, 4.0]), Ok(vec![2.0, 4.0, 8.0]));
}

/// A kernel that panics if an element is 5 or more.
fn picky() -> CustomKernel {
    CustomKernel::new("picky", [F32], F32, |run| {
        let x = run.input::<f32>(0);
        assert!(x.iter().all(|&x| x < 5.0), "too large");
        run.result::<f32>().copy_from_slice(x);
    })
}

#[test]
fn a_panic_leaves_nothing_in_the_pool_and_no_record() {
    let picky = picky();
    let trace = Trace::inference();
    let x = trace.input("x", F32, (300,));
    let y = trace.custom(&picky, &[x * 2.0], x.shape()) + x.exp();
    let mut session = session(1);
    let program = session.compile(&trace, [y]).expect("it compiles");
    let (good, bad) = (random(&[300], 1), random(&[300], 1) * 9.0);
    session.run_dynamic(&program, (&good,)).expect("it runs");
    let before = session.pool_statistics().bytes_in_use;
    let panics = |session: &mut Session, run: &dyn Fn(&mut Session)| {
        let run = catch_unwind(AssertUnwindSafe(|| run(session)));
        assert!(run.is_err());
    };
    for _ in 0..3 {
        panics(&mut session, &|s| {
            drop(s.run_dynamic(&program, (&bad,)).map(|_| ()))
        });
        session.run_dynamic(&program, (&good,)).expect("it runs");
        assert_eq!(session.pool_statistics().bytes_in_use, before);
    }
    session.reset_pool();
    assert_eq!(session.pool_statistics().bytes_in_use, 0);
    panics(&mut session, &|s| drop(s.record(&program, (&bad,))));
    panics(&mut session, &|s| drop(s.profile(&program, (&bad,), 2)));
    session.run(&program, (&good,)).expect("it runs");
    let run = session.record(&program, (&good,)).expect("it runs");
    assert_eq!(run.steps.len(), program.plan().kernels());
}

#[test]
fn a_panic_between_the_ends_of_a_copy() {
    let picky = picky();
    let params = Params::seeded(3);
    let root = params.root();
    let layers: Vec<Linear> = (0..8)
        .map(|k| Linear::new(&root / &format!("layer{k}"), 32, 32))
        .collect();
    let trace = Trace::training();
    let x = trace.input("x", F32, (512, 32));
    let mut y = x;
    for (at, layer) in layers.iter().enumerate() {
        y = y.apply(layer).tanh();
        if at == 2 {
            let beside = trace.custom(&picky, &[y.detach()], y.shape());
            y = y + beside.sum() * 1e-9;
        }
    }
    let loss = y.square().mean();
    trace.minimize(loss, Sgd::new(0.1));
    let run = |panics: bool| {
        let mut session = Session::new(Device::Cpu, params.clone())
            .expect("a session")
            .with_offload(Offload::new(Bytes(1 << 50)))
            .with_budget(Budget::Fraction(0.6));
        let program = session.compile(&trace, [loss]).expect("it fits");
        assert!(program.plan().host_bytes() > 0);
        let mut losses = Vec::new();
        for step in 0..4 {
            if panics {
                let mut x = random(&[512, 32], step);
                x[[0, 0]] = f32::NAN;
                let run = catch_unwind(AssertUnwindSafe(|| {
                    session.run(&program, (&x,)).map(|_| ())
                }));
                assert!(run.is_err());
            }
            let [loss] = session
                .run(&program, (&random(&[512, 32], step),))
                .expect("it runs");
            losses.push(loss.item());
        }
        losses
    };
    assert_eq!(run(true), run(false));
}
