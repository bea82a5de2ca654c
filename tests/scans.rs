//! Scans: loops whose body is compiled once, against the same loops unrolled.

use ndarray::{ArrayD, IxDyn};
use slabwise::Scan;
use slabwise::prelude::*;
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
        for (x, y) in a.iter().zip(b) {
            let near = (x - y).abs() <= 1e-6 * (1.0 + x.abs().max(y.abs()));
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
