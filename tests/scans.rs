//! Scans: loops whose body is compiled once, against the same loops unrolled.

use ndarray::{ArrayD, IxDyn};
use slabwise::nn::{Gru, Linear, Lstm, Rnn};
use slabwise::optim::Adam;
use slabwise::prelude::*;
use slabwise::{CompileOptions, Scan};
use slabwise_models::noise;

const BATCH: usize = 3;
const WIDTH: usize = 8;

fn random(shape: &[usize], seed: u64) -> ArrayD<f32> {
    let mut draw = noise(seed);
    ArrayD::from_shape_simple_fn(IxDyn(shape), || draw() * 1.6 - 0.8)
}

/// Whether steps are recorded once, or one by one.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Form {
    Scanned(Scan),
    Unrolled { reverse: bool },
}

/// The values of one step: a carry or two, and a result.
type Step<'t, 's> = &'s dyn Fn(&[Tensor<'t>], Tensor<'t>) -> (Vec<Tensor<'t>>, Tensor<'t>);

/// A loop over the first axis of `x`: the last carries and all results.
fn looped<'t>(
    form: Form,
    initial: &[Tensor<'t>],
    x: Tensor<'t>,
    step: Step<'t, '_>,
) -> (Vec<Tensor<'t>>, Tensor<'t>) {
    match form {
        Form::Scanned(options) => {
            let (carries, results) = x.trace().scan_many(options, initial, &[x], |c, x| {
                let (c, y) = step(c, x[0]);
                (c, vec![y])
            });
            (carries, results[0])
        }
        Form::Unrolled { reverse } => {
            let steps = x.len(0).expect("a fixed length");
            let mut carries = initial.to_vec();
            let mut results = Vec::new();
            for at in 0..steps {
                let at = if reverse { steps - 1 - at } else { at };
                let (next, y) = step(&carries, x.slice(0, at..=at).squeeze(0));
                carries = next;
                results.push(y);
            }
            if reverse {
                results.reverse();
            }
            let results = x.trace().stack(&results, 0);
            (carries, results)
        }
    }
}

fn session(threads: usize) -> Session {
    Session::new(Device::Cpu, Params::seeded(0))
        .expect("a session")
        .with_threads(threads)
}

/// All elements of the outputs of a program over x `[steps, BATCH, WIDTH]`, h `[BATCH, WIDTH]` and w
/// `[WIDTH, WIDTH]`.
fn run(
    mut session: Session,
    steps: usize,
    build: impl for<'t> Fn(&'t Trace, [Tensor<'t>; 3]) -> Vec<Tensor<'t>>,
) -> (Vec<Vec<f32>>, usize) {
    let trace = Trace::inference();
    let x = trace.input("x", F32, (steps, BATCH, WIDTH));
    let h = trace.input("h", F32, (BATCH, WIDTH));
    let w = trace.input("w", F32, (WIDTH, WIDTH));
    let outputs = build(&trace, [x, h, w]);
    let program = session.compile_any(&trace, &outputs).expect("it compiles");
    let inputs = (
        random(&[steps, BATCH, WIDTH], 1),
        random(&[BATCH, WIDTH], 2),
        random(&[WIDTH, WIDTH], 3),
    );
    let outputs = session.run_any(&program, inputs).expect("it runs");
    let all = outputs
        .iter()
        .map(|o| o.view::<f32>().expect("f32").iter().copied().collect());
    (all.collect(), program.plan().kernels())
}

fn tanh<'t>(w: Tensor<'t>) -> impl Fn(&[Tensor<'t>], Tensor<'t>) -> (Vec<Tensor<'t>>, Tensor<'t>) {
    move |c, x| {
        let h = (x + c[0].matmul(w)).tanh();
        (vec![h], h * 2.0 - x)
    }
}

fn close(a: &[Vec<f32>], b: &[Vec<f32>], what: &str) {
    assert_eq!(a.len(), b.len());
    for (k, (a, b)) in a.iter().zip(b).enumerate() {
        assert_eq!(a.len(), b.len(), "{what}: output {k}");
        // Sums over steps are of numbers as large as the largest.
        let largest = b.iter().fold(1.0f32, |most, x| most.max(x.abs()));
        for (x, y) in a.iter().zip(b) {
            let near = (x - y).abs() <= 1e-6 * largest;
            assert!(near, "{what}: output {k}: {x} and {y}");
        }
    }
}

#[test]
fn values_are_those_of_the_unrolled_loop() {
    for steps in [1, 2, 7, 16] {
        for reverse in [false, true] {
            let scan = if reverse {
                Scan::default().reverse()
            } else {
                Scan::default()
            };
            let of = |form| {
                run(session(2), steps, move |_, [x, h, w]| {
                    let (last, all) = looped(form, &[h], x, &tanh(w));
                    vec![last[0], all]
                })
            };
            let (scanned, kernels) = of(Form::Scanned(scan));
            let (unrolled, _) = of(Form::Unrolled { reverse });
            assert_eq!(scanned, unrolled, "{steps} steps, reverse: {reverse}");
            assert!(kernels < 4, "{kernels} kernels");
        }
    }
}

fn gated<'t>(w: Tensor<'t>) -> impl Fn(&[Tensor<'t>], Tensor<'t>) -> (Vec<Tensor<'t>>, Tensor<'t>) {
    move |c, x| {
        let gate = (x + c[0].matmul(w)).sigmoid();
        let next = gate * c[1] + (1.0 - gate) * x;
        (vec![next.tanh(), next], next * c[0])
    }
}

/// The values of a loop, and the gradients of a loss over it with respect to x, h and w.
fn differentiated(form: Form, steps: usize, of_last: bool) -> (Vec<Vec<f32>>, usize) {
    run(session(2), steps, move |trace, [x, h, w]| {
        let (last, all) = looped(form, &[h, h * 0.5], x, &gated(w));
        let loss = if of_last {
            (last[0] * last[1]).sum()
        } else {
            (all * all).sum() + last[0].sum()
        };
        let [dx, dh, dw] = trace.gradients(loss, [x, h, w]);
        vec![loss, dx, dh, dw]
    })
}

#[test]
fn gradients_are_those_of_the_unrolled_loop() {
    for (steps, reverse, of_last) in [
        (1, false, false),
        (2, true, true),
        (9, false, true),
        (9, true, false),
    ] {
        let what = format!("{steps} steps, reverse: {reverse}, of the last: {of_last}");
        let scan = if reverse {
            Scan::default().reverse()
        } else {
            Scan::default()
        };
        let (unrolled, _) = differentiated(Form::Unrolled { reverse }, steps, of_last);
        let (scanned, _) = differentiated(Form::Scanned(scan), steps, of_last);
        close(&scanned, &unrolled, &what);
        for every in [1, 3, 4, 20] {
            let scan = scan.checkpoint_every(every);
            let (again, _) = differentiated(Form::Scanned(scan), steps, of_last);
            close(
                &again,
                &unrolled,
                &format!("{what}, checkpoints every {every}"),
            );
        }
    }
}

#[test]
fn gradients_of_gradients_are_those_of_the_unrolled_loop() {
    let of = |form| {
        let (values, _) = run(session(2), 5, move |trace, [x, h, w]| {
            let (last, all) = looped(form, &[h], x, &tanh(w));
            let loss = (all * all).sum() + last[0].sum();
            let [dw] = trace.gradients(loss, [w]);
            let [dx, dh, ddw] = trace.gradients((dw * dw).sum(), [x, h, w]);
            vec![dw, dx, dh, ddw]
        });
        values
    };
    close(
        &of(Form::Scanned(Scan::default())),
        &of(Form::Unrolled { reverse: false }),
        "second",
    );
}

#[test]
fn results_do_not_depend_on_threads_and_memory_is_as_planned() {
    let of = |session: Session| {
        run(session, 12, move |trace, [x, h, w]| {
            let (_, all) = looped(Form::Scanned(Scan::default()), &[h], x, &tanh(w));
            let [dx, dw] = trace.gradients((all * all).sum(), [x, w]);
            vec![all, dx, dw]
        })
        .0
    };
    let one = of(session(1));
    let checked = session(2).with_options(CompileOptions {
        check_memory: true,
        ..CompileOptions::default()
    });
    assert_eq!(one, of(session(2)));
    assert_eq!(one, of(checked));
}

#[test]
fn compiling_does_not_grow_with_the_steps() {
    let kernels = |steps| {
        let scan = Form::Scanned(Scan::default());
        differentiated(scan, steps, false).1
    };
    assert_eq!(kernels(4), kernels(400));
}

#[test]
fn fewer_carries_are_kept_with_checkpoints() {
    let slab = |options: Scan| {
        let trace = Trace::inference();
        let x = trace.input("x", F32, (256, BATCH));
        let w = trace.input("w", F32, (BATCH, 64));
        let zero = trace.zeros((BATCH, 64));
        let ([last], []) = trace.scan_with(options, [zero], [x], |[h], [x]| {
            ([(h * 0.9 + x.unsqueeze(1) * w).tanh()], [])
        });
        let [dw] = trace.gradients(last.sum(), [w]);
        let mut session = session(1);
        let program = session.compile(&trace, [dw]).expect("it compiles");
        let x = random(&[256, BATCH], 4);
        let w = random(&[BATCH, 64], 5);
        let value = session.run(&program, (x, w)).expect("it runs")[0].array::<f32>();
        let value = value.expect("f32").iter().copied().collect();
        (program.plan().slab_bytes(), value)
    };
    let (all, a) = slab(Scan::default());
    let (some, b) = slab(Scan::default().checkpoint_every(16));
    let carries = (256 * BATCH * 64 * 4) as u64;
    assert!(all >= carries && some * 3 < all, "{all} and {some} bytes");
    close(&[a], &[b], "with checkpoints");
}

#[test]
fn a_batch_may_vary_and_steps_may_be_none() {
    let trace = Trace::inference();
    let batch = Dim::bounded("batch", 5);
    let x = trace.input("x", F32, (4, batch, 2));
    let first = trace.input("first", F32, (batch, 2));
    let ([last], [sums]) = trace.scan([first], [x], |[sum], [x]| ([sum + x], [sum * x]));
    let none = x.slice(0, ..0);
    let ([same], [empty]) = trace.scan([first], [none], |[sum], [x]| ([sum + x], [sum * x]));
    assert_eq!(format!("{empty:?}"), "f32 [0, batch, 2]");
    let mut session = session(2);
    let program = session
        .compile(&trace, [last, sums, same])
        .expect("it compiles");
    for n in [5usize, 1, 0, 3] {
        let (x, first) = (random(&[4, n, 2], 6), random(&[n, 2], 7));
        let outputs = session.run(&program, (&x, &first)).expect("it runs");
        let (mut sum, mut all) = (first.clone(), Vec::new());
        for x in x.outer_iter() {
            all.extend((&sum * &x).iter().copied().collect::<Vec<f32>>());
            sum = sum + x;
        }
        let values = |k: usize| outputs[k].view::<f32>().expect("f32").to_owned();
        assert_eq!(values(0), sum);
        assert_eq!(values(1).iter().copied().collect::<Vec<f32>>(), all);
        assert_eq!(values(2), first);
    }
}

/// The mistakes of a trace.
fn mistakes(build: impl for<'t> Fn(&'t Trace)) -> String {
    let trace = Trace::inference();
    build(&trace);
    let all = trace.mistakes();
    assert!(
        all.iter().all(|m| m.location.file().ends_with("scans.rs")),
        "{all:?}"
    );
    all.iter().map(|m| m.message.clone() + "\n").collect()
}

#[test]
fn mistakes_name_the_carry_and_what_would_help() {
    let said = mistakes(|trace| {
        let x = trace.input("x", F32, (4, 3));
        trace.scan([trace.zeros((3,))], [x], |[c], [x]| ([(c + x).sum()], []));
    });
    assert!(
        said.contains("carry 0 is f32 [3] at first and f32 [] after a step"),
        "{said}"
    );
    let said = mistakes(|trace| {
        let x = trace.input("x", F32, (4, 3));
        let y = trace.input("y", F32, (5, 3));
        trace.scan([trace.zeros((3,))], [x, y], |[c], [x, y]| ([c + x + y], []));
    });
    assert!(
        said.contains("input 1 [5, 3] has 5 steps, input 0 [4, 3] 4"),
        "{said}"
    );
    let said = mistakes(|trace| {
        let x = trace.input("x", F32, (Dim::bounded("n", 9), 3));
        trace.scan([trace.zeros((3,))], [x], |[c], [x]| ([c + x], []));
    });
    assert!(said.contains("not of fixed length"), "{said}");
    let said = mistakes(|trace| {
        trace.scan([trace.zeros((3,))], [], |[c], []| ([c], []));
    });
    assert!(said.contains("Scan::length"), "{said}");
    let said = mistakes(|trace| {
        let x = trace.input("x", F32, (4, 3));
        trace.scan([trace.zeros((3,))], [x], |[c], [x]| {
            let index = x.cast(I32);
            ([c + c.gather(0, index)], [])
        });
    });
    assert!(said.contains("checks no indices"), "{said}");
    let said = mistakes(|trace| {
        let x = trace.input("x", F32, (4, 3));
        let mut leaked = None;
        trace.scan([trace.zeros((3,))], [x], |[c], [x]| {
            leaked = Some(c + x);
            ([c + x], [])
        });
        let outputs: Vec<Tensor<'_>> = leaked.into_iter().collect();
        assert!(trace.finish(&outputs).is_err());
    });
    assert!(said.contains("used outside of it"), "{said}");
}

#[test]
fn a_scan_without_inputs_counts() {
    let trace = Trace::inference();
    let one = trace.ones((2,));
    let options = Scan::default().length(10);
    let ([last], [all]) = trace.scan_with(options, [one], [], |[c], []| ([c + c], [c]));
    let mut session = session(1);
    let program = session.compile(&trace, [last, all]).expect("it compiles");
    let outputs = session.run(&program, ()).expect("it runs");
    assert!(
        outputs[0]
            .view::<f32>()
            .expect("f32")
            .iter()
            .all(|&v| v == 1024.0)
    );
    assert_eq!(outputs[1].view::<f32>().expect("f32")[[9, 0]], 512.0);
}

/// The values of a recurrent layer and the gradients of a loss over it, and the slab.
fn layer(unrolled_up_to: usize, which: usize, lengths: bool) -> (Vec<Vec<f32>>, u64) {
    const STEPS: usize = 9;
    let params = Params::seeded(1);
    let at = &params.root();
    let trace = Trace::inference();
    let x = trace.input("x", F32, (BATCH, STEPS, WIDTH));
    let n = trace.input("n", I32, (BATCH,));
    let n = lengths.then_some(n);
    let y = match which {
        0 => {
            let layer = Lstm::new(at / "net", WIDTH, 6).layers(2).both_ways();
            let layer = layer.projection(5).unrolled_up_to(unrolled_up_to);
            let (y, [h, c]) = layer.run(x, None, n);
            y.sum_over(2) + h.sum_over([0, 2]).unsqueeze(1) * c.sum_over([0, 2]).unsqueeze(1)
        }
        1 => {
            let layer = Gru::new(at / "net", WIDTH, 6).both_ways();
            let first = trace.ones((2, BATCH, 6)) * 0.3;
            let (y, h) = layer.unrolled_up_to(unrolled_up_to).run(x, Some(first), n);
            y.sum_over(2) + h.sum_over([0, 2]).unsqueeze(1)
        }
        _ => {
            let layer = Rnn::new(at / "net", WIDTH, 6).unrolled_up_to(unrolled_up_to);
            let (y, h) = layer.checkpoint_every(4).run(x, None, n);
            y.sum_over(2) + h.sum_over([0, 2]).unsqueeze(1)
        }
    };
    let loss = (y * y).sum();
    let [dx] = trace.gradients(loss, [x]);
    let mut session = Session::new(Device::Cpu, params)
        .expect("a session")
        .with_threads(2);
    let program = session.compile(&trace, [y, dx]).expect("it compiles");
    let n = ndarray::arr1(&[9, 0, 5]);
    let outputs = session.run(&program, (random(&[BATCH, STEPS, WIDTH], 8), n));
    let outputs = outputs.expect("it runs");
    let all = outputs
        .iter()
        .map(|o| o.view::<f32>().expect("f32").iter().copied().collect());
    (all.collect(), program.plan().slab_bytes())
}

#[test]
fn recurrent_layers_may_be_scans() {
    for which in 0..3 {
        for lengths in [false, true] {
            let (unrolled, _) = layer(usize::MAX, which, lengths);
            let (scanned, _) = layer(0, which, lengths);
            close(
                &scanned,
                &unrolled,
                &format!("layer {which}, lengths: {lengths}"),
            );
        }
    }
}

#[test]
fn a_recurrent_layer_learns_with_scans_as_unrolled() {
    let losses = |unrolled_up_to: usize| -> Vec<f32> {
        let params = Params::seeded(2);
        let layer = Lstm::new(&params.root() / "lstm", WIDTH, 12).unrolled_up_to(unrolled_up_to);
        let trace = Trace::training();
        let x = trace.input("x", F32, (BATCH, 20, WIDTH));
        let loss = (x.apply(&layer).slice(2, ..WIDTH) - x).square().mean();
        trace.minimize(loss, Adam::new(0.01));
        let mut session = Session::new(Device::Cpu, params)
            .expect("a session")
            .with_threads(2);
        let step = session.compile(&trace, [loss]).expect("it compiles");
        let x = random(&[BATCH, 20, WIDTH], 9);
        let planned = step.plan().slab_bytes();
        // Values end within the last block of 64 bytes.
        let touched = session.measure_touched(&step, (&x,)).expect("it runs");
        assert_eq!(touched.next_multiple_of(64), planned.next_multiple_of(64));
        let mut run = || session.run(&step, (&x,)).expect("it runs")[0].item();
        (0..20).map(|_| run()).collect()
    };
    let (scanned, unrolled) = (losses(0), losses(usize::MAX));
    assert!(scanned[19] < 0.9 * scanned[0], "{scanned:?}");
    for (a, b) in scanned.iter().zip(&unrolled) {
        assert!((a - b).abs() < 1e-5, "{scanned:?} and {unrolled:?}");
    }
}

#[test]
fn a_budget_changes_no_bit_of_scans() {
    let train = |budget: Budget| {
        let params = Params::seeded(3);
        let at = &params.root();
        let first = Lstm::new(at / "first", WIDTH, 16).unrolled_up_to(0);
        let second = Gru::new(at / "second", 16, 16).unrolled_up_to(0);
        let wide = Linear::new(at / "wide", 16, 200);
        let trace = Trace::training();
        let x = trace.input("x", F32, (BATCH, 40, WIDTH));
        let y = x.apply(&first).apply(&second).apply(&wide).gelu().square();
        let loss = y.mean();
        trace.minimize(loss, Adam::new(0.01));
        let session = Session::new(Device::Cpu, params).expect("a session");
        let mut session = session.with_threads(2).with_budget(budget);
        let step = session.compile(&trace, [loss]).expect("it compiles");
        let x = random(&[BATCH, 40, WIDTH], 9);
        let mut run = || {
            session.run(&step, (&x,)).expect("it runs")[0]
                .item()
                .to_bits()
        };
        let losses: Vec<u32> = (0..5).map(|_| run()).collect();
        (
            losses,
            step.plan().slab_bytes(),
            step.plan().persistent().clone(),
        )
    };
    let (free, slab, persistent) = train(Budget::Unlimited);
    let most = persistent.weights + persistent.state + slab * 9 / 10;
    let (within, smaller, _) = train(Budget::from(Bytes(most)));
    assert!(smaller < slab, "{smaller} of {slab} bytes");
    assert_eq!(free, within);
}

#[test]
fn a_budget_trades_steps_for_recomputation() {
    let build = |budget: Option<Bytes>| {
        let trace = Trace::inference();
        let x = trace.input("x", F32, (256, BATCH));
        let w = trace.input("w", F32, (BATCH, 64));
        let zero = trace.zeros((BATCH, 64));
        let ([h, c], [y]) = trace.scan([zero, zero], [x], |[h, c], [x]| {
            let next = (c * 0.9 + x.unsqueeze(1) * w).tanh();
            ([next * h.sigmoid(), next], [next.sum()])
        });
        let loss = h.sum() + (c * c).sum() + (y * y).sum();
        let [dx, dw] = trace.gradients(loss, [x, w]);
        let mut session = session(1).with_budget(budget);
        let program = session.compile(&trace, [y, dx, dw]).expect("it compiles");
        let inputs = (random(&[256, BATCH], 4), random(&[BATCH, 64], 5));
        let outputs = session.run(&program, inputs).expect("it runs");
        let bits = |o: &slabwise::Output<'_>| -> Vec<u32> {
            o.view::<f32>()
                .expect("f32")
                .iter()
                .map(|v| v.to_bits())
                .collect()
        };
        let values: Vec<Vec<u32>> = outputs.iter().map(bits).collect();
        (values, program.plan().slab_bytes())
    };
    let (free, slab) = build(None);
    let carries = (256 * 2 * BATCH * 64 * 4) as u64;
    assert!(slab > carries, "{slab} bytes");
    let (within, smaller) = build(Some(Bytes(slab / 4)));
    assert!(smaller <= slab / 4, "{smaller} of {slab} bytes");
    assert_eq!(free, within);
}

/// A start outside of the axis is moved to the nearest that fits.
#[test]
fn clamped_starts_lie_inside() {
    let trace = Trace::inference();
    let x = trace.input("x", F32, (6, 4));
    let start = trace.input("start", I32, ());
    let outputs = [
        x.slice_clamped(0, start, 2),
        x.slice_clamped(1, start, 4),
        x.update_clamped(0, start, x.slice(0, ..2) * -1.0),
        x.update_clamped(1, start, trace.zeros((6, 1))),
    ];
    let mut session = session(2);
    let program = session.compile(&trace, outputs).expect("it compiles");
    let numbers = random(&[6, 4], 7);
    let numbers = numbers.into_dimensionality::<ndarray::Ix2>().expect("rows");
    for start in [i32::MIN, -6, -1, 0, 1, 3, 4, 5, 6, i32::MAX] {
        let [rows, whole, written, cleared] = session
            .run(&program, (&numbers, &ndarray::arr0(start)))
            .expect("it runs")
            .map(|o| o.array::<f32>().expect("f32"));
        let row = start.clamp(0, 4) as usize;
        let part = ndarray::s![row..row + 2, ..];
        assert_eq!(rows, numbers.slice(part).into_dyn(), "from {start}");
        assert_eq!(whole, numbers.view().into_dyn(), "from {start}");
        let mut expected = numbers.clone();
        let first = numbers.slice(ndarray::s![..2, ..]);
        expected.slice_mut(part).assign(&(&first * -1.0));
        assert_eq!(written, expected.into_dyn(), "from {start}");
        let mut expected = numbers.clone();
        expected.column_mut(start.clamp(0, 3) as usize).fill(0.0);
        assert_eq!(cleared, expected.into_dyn(), "from {start}");
    }
}

/// Steps read a row beside their own, write a row of a carry, and give the numbers and the gradients
/// of first and second order of the same loop unrolled; at both ends rows are read and written
/// twice.
#[test]
fn steps_read_and_write_at_positions_of_their_own() {
    const STEPS: usize = 5;
    let of = |threads: usize, scanned: bool| {
        run(session(threads), STEPS, move |trace, [x, h, w]| {
            let next = |h, row| tanh(w)(&[h], row).0[0];
            let (last, all) = if scanned {
                let numbers = trace.arange(STEPS).cast(I32);
                let scan = Scan::default();
                let (carries, _) = trace.scan_many(scan, &[h, x], &[numbers], |c, parts| {
                    let row = x.slice_clamped(0, parts[0] - 1, 1).squeeze(0);
                    let h = next(c[0], row);
                    let all = c[1].update_clamped(0, parts[0] + 1, h.unsqueeze(0));
                    (vec![h, all], Vec::new())
                });
                (carries[0], carries[1])
            } else {
                let (mut h, mut all) = (h, x);
                for at in 0..STEPS {
                    let from = at.saturating_sub(1);
                    h = next(h, x.slice(0, from..=from).squeeze(0));
                    let to = (at + 1).min(STEPS - 1);
                    all = all.slice_assign(0, to..=to, h.unsqueeze(0));
                }
                (h, all)
            };
            let loss = (all * all * x).sum() + last.sum();
            let [dx, dh, dw] = trace.gradients(loss, [x, h, w]);
            let [ddx, ddw] = trace.gradients((dw * dw).sum() + dx.square().sum(), [x, w]);
            vec![last, all, dx, dh, dw, ddx, ddw]
        })
        .0
    };
    let scanned = of(2, true);
    close(&scanned, &of(2, false), "at their places");
    assert_eq!(scanned, of(1, true));
}

#[test]
fn clamped_starts_need_a_part_that_fits() {
    let said = mistakes(|trace| {
        let x = trace.input("x", F32, (4, 3));
        x.slice_clamped(0, 0, 5);
        x.slice_clamped(2, 0, 1);
        x.update_clamped(0, 0, trace.zeros((5, 3)));
        let open = trace.input("open", F32, (Dim::bounded("n", 9), 3));
        open.slice_clamped(0, 0, 2);
        open.update_clamped(0, 0, trace.zeros((2, 3)));
    });
    for part in [
        "slice_clamped: axis 0 of [4, 3] does not have 5 elements",
        "slice_clamped: [4, 3] has no axis 2",
        "update_clamped: axis 0 of [4, 3] does not have the elements of [5, 3]",
        "slice_clamped: the axis may be shorter than the part",
        "update_clamped: the axis may be shorter than the part",
    ] {
        assert!(said.contains(part), "{part} is not in:\n{said}");
    }
}

/// Two carries, of which one sums the other.
fn summed<'t>(
    more: Tensor<'t>,
) -> impl Fn(&[Tensor<'t>], Tensor<'t>) -> (Vec<Tensor<'t>>, Tensor<'t>) {
    move |c, x| {
        let next = (c[0] * 0.5 + x + more).tanh();
        (vec![next, c[1] + next], next)
    }
}

/// Slices, whose rows are apart in memory, as an initial carry and as an operand of every step; and
/// the gradients of last carries that are joined, which are slices too.
#[test]
fn operands_whose_rows_are_apart() {
    let half = WIDTH / 2;
    for steps in [1, 5] {
        let of = |form| {
            run(session(2), steps, move |trace, [x, h, w]| {
                let packed = h.matmul(w);
                let [a, b] = [
                    packed.slice(1, ..half),
                    packed.slice_step(0, .., 1).slice(1, half..),
                ];
                let same = w.slice(0, ..BATCH).slice(1, 1..=half);
                let same = same.maximum(same);
                let (last, all) = looped(form, &[a, b], x.slice(2, ..half), &summed(same));
                let loss = trace.concat(&last, 1).square().sum();
                let gradients = trace.gradients(loss, [x, h, w]);
                [&last[..], &[all], &gradients].concat()
            })
        };
        let (scanned, _) = of(Form::Scanned(Scan::default()));
        let (unrolled, _) = of(Form::Unrolled { reverse: false });
        close(&scanned, &unrolled, &format!("{steps} steps"));
    }
}
