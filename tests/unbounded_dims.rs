//! Unbounded dimensions: planned for the lengths of runs, with few plans, and with the reference's
//! results.

use ndarray::{Array1, Array2, IxDyn};
use slabwise::feed::Input;
use slabwise::prelude::*;
use slabwise::{CompileOptions, DynamicShapes, Error, LengthRanges};
use slabwise_compiler::reference::{Array, Precision, evaluate};

const WIDTH: usize = 6;

fn options(ranges: LengthRanges, plans_max: u32) -> CompileOptions {
    CompileOptions {
        shapes: DynamicShapes {
            ranges,
            plans_max,
            ..DynamicShapes::default()
        },
        ..CompileOptions::default()
    }
}

fn session(options: CompileOptions) -> Session {
    Session::new(Device::Cpu, Params::seeded(0))
        .expect("a session")
        .with_threads(2)
        .with_options(options)
}

/// Self-attention, so that the square of the length is among the sizes, and a mean over the length.
fn attention(trace: &Trace) -> [Tensor<'_>; 2] {
    let x = trace.input("x", F32, (Dim::unbounded("len"), WIDTH));
    let seen = x.matmul(x.t()).softmax(1).matmul(x);
    [seen, (seen * seen + x.tanh()).mean()]
}

/// A sequence of some length, the same every time.
fn sequence(length: usize) -> Array2<f32> {
    Array2::from_shape_fn((length, WIDTH), |(i, j)| {
        ((i * 7 + j * 3) % 11) as f32 / 5.0 - 1.0
    })
}

fn expected(trace: &Trace, outputs: &[Tensor<'_>], x: &Array2<f32>) -> Vec<Vec<f64>> {
    let graph = trace.finish(outputs).expect("no mistakes");
    let mut env = graph.symbols.bounds();
    env.0[0] = x.nrows() as u32;
    let x = Array::from_fn(F32, x.shape(), |c| f64::from(x[(c[0], c[1])]));
    let run = evaluate(&graph, &env, &[x], &[], Precision::Single).expect("the graph evaluates");
    run.outputs.into_iter().map(|o| o.values).collect()
}

#[test]
fn every_length_agrees_with_the_reference() {
    for ranges in [
        LengthRanges::Exact,
        LengthRanges::Growth(25),
        LengthRanges::Growth(100),
    ] {
        let mut session = session(options(ranges, 64));
        let trace = Trace::inference();
        let outputs = attention(&trace);
        let program = session.compile(&trace, outputs).expect("compiles");
        for length in [1, 2, 3, 17, 40, 33, 90, 64, 65, 2] {
            let x = sequence(length);
            let want = expected(&trace, &outputs, &x);
            for dynamic in [false, true] {
                let run = if dynamic {
                    session.run_dynamic(&program, (&x,))
                } else {
                    session.run(&program, (&x,))
                };
                let found = run.expect("runs");
                assert_eq!(found[0].shape(), [length, WIDTH]);
                for (found, want) in found.iter().zip(&want) {
                    let found = found.array::<f32>().expect("f32");
                    let close = found
                        .iter()
                        .zip(want)
                        .all(|(&a, &b)| (f64::from(a) - b).abs() < 1e-4);
                    assert!(
                        close && found.len() == want.len(),
                        "{ranges:?}, length {length}: {found} and {want:?}"
                    );
                }
            }
        }
    }
}

#[test]
fn known_lengths_are_not_planned_again_and_plans_are_few() {
    let mut session = session(CompileOptions::default());
    let trace = Trace::inference();
    let program = session
        .compile(&trace, attention(&trace))
        .expect("compiles");
    assert_eq!(program.plan_counts().made, 1);
    let lengths: Vec<usize> = (0..200).map(|i| 1 + (i * 7919) % 150).collect();
    for &length in &lengths {
        session.run(&program, (&sequence(length),)).expect("runs");
    }
    let once = program.plan_counts();
    assert!(once.made <= 25, "150 lengths lie in few ranges: {once:?}");
    assert_eq!((once.made + once.hits, once.dropped), (201, 0));
    assert_eq!(
        session.slab_bytes(),
        once.slab_bytes,
        "the slab has room for the largest plan, and no more"
    );
    for &length in &lengths {
        session.run(&program, (&sequence(length),)).expect("runs");
    }
    let twice = program.plan_counts();
    assert_eq!(
        (twice.made, twice.hits, twice.slab_bytes),
        (once.made, once.hits + 200, once.slab_bytes)
    );
}

#[test]
fn plans_beyond_the_limit_are_dropped_least_recently_used_first() {
    let mut session = session(options(LengthRanges::Exact, 3));
    let trace = Trace::inference();
    let program = session
        .compile(&trace, attention(&trace))
        .expect("compiles");
    let mut made = |length: usize| {
        session.run(&program, (&sequence(length),)).expect("runs");
        program.plan_counts().made
    };
    // Beside the one of `compile`, for a length of 64.
    assert_eq!(
        [made(5), made(6), made(5), made(7), made(5), made(7)],
        [2, 3, 3, 4, 4, 4]
    );
    // 6 is the least recently used length: its plan was dropped for that of 8.
    assert_eq!([made(8), made(5), made(7), made(6)], [5, 5, 5, 6]);
    let counts = program.plan_counts();
    assert_eq!((counts.kept, counts.dropped), (3, 3));
}

#[test]
fn a_range_exceeds_a_length_by_at_most_its_growth() {
    let slab = |ranges: LengthRanges, length: usize| {
        let mut session = session(options(ranges, 64));
        let trace = Trace::inference();
        let x = trace.input("x", F32, (Dim::unbounded("len"), 1024));
        let program = session
            .compile(&trace, [(x.exp() + 1.0).sum_over(0)])
            .expect("compiles");
        // The plan of `compile` is dropped, so that the slab is that of the run.
        session
            .run(&program, (&Array2::<f32>::zeros((length, 1024)),))
            .expect("runs");
        session.last_run().peak_slab_bytes
    };
    for length in [65usize, 100, 333] {
        let (exact, ranged) = (
            slab(LengthRanges::Exact, length),
            slab(LengthRanges::Growth(25), length),
        );
        assert!(
            exact <= ranged && ranged * 100 <= exact * 126,
            "length {length}: {exact} and {ranged}"
        );
    }
}

#[test]
fn several_unbounded_dimensions_have_plans_for_their_combinations() {
    let mut session = session(CompileOptions::default());
    let trace = Trace::inference();
    let a = trace.input("a", F32, (Dim::unbounded("rows"), 3));
    let b = trace.input("b", F32, (Dim::unbounded("columns"), 3));
    let program = session
        .compile(&trace, [a.matmul(b.t())])
        .expect("compiles");
    for (rows, columns) in [(2, 9), (9, 2), (2, 9), (1, 1)] {
        let (a, b) = (
            Array2::<f32>::ones((rows, 3)),
            Array2::<f32>::from_elem((columns, 3), 2.0),
        );
        let [product] = session.run(&program, (a, b)).expect("runs");
        assert_eq!(
            product.array::<f32>().expect("f32"),
            ndarray::Array::from_elem(IxDyn(&[rows, columns]), 6.0)
        );
    }
    assert_eq!(
        program.plan_counts().made,
        4,
        "three pairs, and the first lengths"
    );
}

#[test]
fn mistakes_name_the_input() {
    let mut session = session(CompileOptions::default());
    let trace = Trace::inference();
    let (x, y) = (
        trace.input("x", U8, (Dim::unbounded("len"),)),
        trace.input("y", U8, (Dim::unbounded("len"),)),
    );
    let cube =
        x.unsqueeze(1).unsqueeze(2) * y.unsqueeze(0).unsqueeze(2) * y.unsqueeze(0).unsqueeze(0);
    let program = session.compile(&trace, [cube.sum()]).expect("compiles");
    let mut refused = |x: usize, y: usize| {
        let (x, y): (Box<dyn Input>, Box<dyn Input>) =
            (Box::new(vec![1u8; x]), Box::new(Array1::<u8>::ones(y)));
        match session.run(&program, &[&*x, &*y][..]) {
            Err(Error::Input { name, message }) => (name, message),
            Err(other) => panic!("{other}"),
            Ok([sum]) => panic!("{}", sum.item()),
        }
    };
    let (name, message) = refused(0, 3);
    assert!(
        name == "y" && message.contains("\"len\" is 3, but 0 in another input"),
        "{name}: {message}"
    );
    let (name, message) = refused(4, 3);
    assert!(
        name == "y" && message.contains("\"len\" is 3, but 4 in another input"),
        "{name}: {message}"
    );
    let (name, message) = refused(1 << 20, 1 << 20);
    assert!(
        name == "x"
            && message.contains("\"len\" is 1048576")
            && message.contains("unbounded_dims.rs"),
        "{name}: {message}"
    );
    let [sum] = session
        .run(&program, (vec![1u8; 5], vec![2u8; 5]))
        .expect("the session stays usable");
    assert_eq!(sum.item(), 500.0);
    assert_eq!(
        program.plan_counts().made,
        2,
        "nothing was planned for what was refused"
    );
}

#[test]
fn invalid_dimensions_are_refused_by_name() {
    let message = |session: &mut Session, build: &dyn Fn(&Trace)| {
        let trace = Trace::inference().named("odd");
        build(&trace);
        let one = trace.ones(());
        session
            .compile(&trace, [one])
            .err()
            .expect("refused")
            .to_string()
    };
    let mut plain = session(CompileOptions::default());
    let both = message(&mut plain, &|trace| {
        trace.input("x", F32, (Dim::bounded("len", 4), Dim::unbounded("len")));
    });
    assert!(both.contains("\"len\" is bounded by 4 and free"), "{both}");
    let orphan = message(&mut plain, &|trace| {
        trace.arange(Dim::unbounded("nobody"));
    });
    assert!(
        orphan.contains("no input has the unbounded dimension \"nobody\""),
        "{orphan}"
    );
    for (ranges, plans_max, said) in [
        (LengthRanges::Growth(0), 4, "Growth(0)"),
        (LengthRanges::Exact, 0, "plans_max"),
    ] {
        let odd = message(&mut session(options(ranges, plans_max)), &|_| {});
        assert!(odd.contains(said), "{odd}");
    }
}

#[test]
fn an_unbounded_batch_trains_as_a_bounded_one() {
    let train = |batch: Dim| {
        let params = Params::seeded(3);
        let layer = slabwise::nn::Linear::new(&params.root() / "layer", 4, 2);
        let trace = Trace::training();
        let x = trace.input("x", F32, (batch, 4));
        let loss = (x.apply(&layer) - 1.0).square().mean();
        trace.minimize(loss, slabwise::optim::Sgd::new(0.1));
        let mut session = Session::new(Device::Cpu, params).expect("a session");
        let program = session.compile(&trace, [loss]).expect("compiles");
        let mut losses = Vec::new();
        for step in 0..12 {
            let x = Array2::from_shape_fn((1 + step * 5 % 7, 4), |(i, j)| (i + 2 * j) as f32 / 4.0);
            let [loss] = session.run(&program, (x,)).expect("runs");
            losses.push(loss.item().to_bits());
        }
        losses
    };
    assert_eq!(
        train(Dim::unbounded("batch")),
        train(Dim::bounded("batch", 64))
    );
}

/// The number of elements that a mask selects of an unbounded length has no bound either.
#[test]
fn selected_elements_of_an_unbounded_length_are_not_taken_to_be_few() {
    let trace = Trace::inference();
    let n = Dim::unbounded("n");
    let (x, mask) = (trace.input("x", F32, (n,)), trace.input("m", Bool, (n,)));
    let y = x.masked_select(mask).pad_to(0, 4, 0.0);
    let error = session(CompileOptions::default()).compile(&trace, [y]);
    let error = error.err().expect("refused").to_string();
    assert!(error.contains("longer than 4"), "{error}");
}

#[test]
fn a_record_is_of_the_plan_that_is_shown() {
    let trace = Trace::inference();
    let x = trace.input("x", F32, (Dim::unbounded("length"), 8));
    let mut session = Session::new(Device::Cpu, Params::seeded(0)).expect("a session");
    let program = session
        .compile(&trace, [(x.tanh() + 1.0).sum()])
        .expect("it compiles");
    let x = |length| Array2::<f32>::ones((length, 8));
    let run = session
        .record(&program, (&x(64),))
        .expect("the plan for 64");
    assert!(program.plan().html(Ok(&run)).contains("<html"));
    let error = session
        .record(&program, (&x(1000),))
        .expect_err("another plan");
    assert!(error.to_string().contains("another plan"), "{error}");
}
