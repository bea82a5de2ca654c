//! Half precision: stored in 16 bits, computed in f32.

use half::{bf16, f16};
use ndarray::{Array1, Array2};
use slabwise::optim::Sgd;
use slabwise::params::{Init, Params};
use slabwise::prelude::*;
use slabwise::{Output, Precision, weights};
use slabwise_models::Model;

fn rounded(x: &Array2<f32>) -> Array2<f32> {
    x.mapv(|v| bf16::from_f32(v).to_f32())
}

/// Numbers that no half represents exactly.
fn numbers(rows: usize, cols: usize, scale: f32) -> Array2<f32> {
    Array2::from_shape_fn((rows, cols), |(r, c)| {
        scale * ((r * 31 + c * 17) as f32 * 0.618).sin()
    })
}

#[test]
fn products_of_halves_are_summed_in_single_precision() {
    let (a, b) = (numbers(5, 7, 1.5), numbers(7, 3, 0.7));
    let trace = Trace::inference();
    let (x, y) = (trace.input("a", F32, (5, 7)), trace.input("b", F32, (7, 3)));
    let z = x.cast(BF16).matmul(y.cast(BF16));
    assert_eq!(z.dtype(), F32);
    let mut session = Session::new(Device::Cpu, Params::seeded(1)).unwrap();
    let program = session.compile(&trace, [z]).unwrap();
    let [z] = session.run(&program, (&a, &b)).unwrap();
    let expected = rounded(&a).dot(&rounded(&b));
    for (got, expected) in z.view::<f32>().unwrap().iter().zip(&expected) {
        assert!((got - expected).abs() <= 1e-6, "{got} and {expected}");
    }
}

#[test]
fn values_round_whether_they_are_stored_or_not() {
    let x = Array1::from_iter((0..1000).map(|i| (i as f32 * 0.37).sin() * 100.0));
    let trace = Trace::inference();
    let input = trace.input("x", F32, (1000,));
    let half = input.cast(F16);
    // In a fused kernel the half is never in memory; as an output it is.
    let mut session = Session::new(Device::Cpu, Params::seeded(1)).unwrap();
    let program = session
        .compile(&trace, [half.cast(F32) * 2.0, half, half + input])
        .unwrap();
    let [double, half, sum] = session.run(&program, (&x,)).unwrap();
    assert_eq!((half.dtype(), sum.dtype()), (F16, F32));
    let halves = half.array::<f16>().unwrap();
    for (i, &x) in x.iter().enumerate() {
        let expected = f16::from_f32(x);
        assert_eq!(halves[i], expected);
        assert_eq!(double.view::<f32>().unwrap()[i], expected.to_f32() * 2.0);
        assert_eq!(sum.view::<f32>().unwrap()[i], expected.to_f32() + x);
    }
    assert_eq!(half.item(), 0.0);
    let error = half.view::<f32>().unwrap_err().to_string();
    assert_eq!(
        error,
        "the values are f16, not f32; request them in their type, or cast in the program"
    );
}

/// Weights in single precision, products of halves: the gradient goes back through the conversions.
#[test]
fn a_model_learns_with_products_of_halves() {
    let (x, target) = (numbers(64, 8, 1.0), numbers(8, 1, 1.0));
    let y = x.dot(&target);
    for dtype in [F32, F16, BF16] {
        let params = Params::seeded(3);
        let weight = params.root().param("weight", (8, 1), Init::Constant(0.0));
        let trace = Trace::training();
        let (images, wanted) = (
            trace.input("x", F32, (64, 8)),
            trace.input("y", F32, (64, 1)),
        );
        let product = images.cast(dtype).matmul(trace.param(&weight).cast(dtype));
        let loss = (product - wanted).square().mean();
        trace.minimize(loss, Sgd::new(0.05));
        let mut session = Session::new(Device::Cpu, params).unwrap();
        let program = session.compile(&trace, [loss]).unwrap();
        let mut losses = Vec::new();
        for _ in 0..60 {
            let [loss] = session.run(&program, (&x, &y)).unwrap();
            losses.push(loss.item());
        }
        assert!(losses[59] < losses[0] * 1e-2, "{dtype}: {losses:?}");
    }
}

#[test]
fn halves_go_in_and_out() {
    let x = Array1::from_iter((0..6).map(|i| bf16::from_f32(i as f32 * 0.5)));
    let trace = Trace::inference();
    let input = trace.input("x", BF16, (6,));
    let kept = trace.state("kept", F16, (6,), Init::Constant(1.5));
    let sum = kept.value() + input;
    kept.set(sum.cast(F16));
    let mut session = Session::new(Device::Cpu, Params::seeded(1)).unwrap();
    let program = session.compile(&trace, [sum]).unwrap();
    for step in 1..=3 {
        let [sum] = session.run(&program, (&x,)).unwrap();
        assert_eq!(sum.view::<f32>().unwrap()[5], 1.5 + step as f32 * 2.5);
    }
    assert_eq!(session.value("kept").unwrap()[5], 9.0);
    session
        .set_value("kept", &Array1::from_elem(6, 0.1))
        .unwrap();
    assert_eq!(
        session.value("kept").unwrap()[0],
        f16::from_f32(0.1).to_f32()
    );
    let resident = session.upload("resident", &x).unwrap();
    assert_eq!(
        session.download::<bf16>(&resident).unwrap()[1],
        bf16::from_f32(0.5)
    );

    let bytes: Vec<u8> = x.iter().flat_map(|h| h.to_le_bytes()).collect();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("halves.safetensors");
    let entry = weights::Entry {
        name: "x",
        dtype: BF16,
        shape: vec![6],
        bytes: &bytes,
    };
    weights::save(&path, &[entry], &Default::default()).unwrap();
    let file = weights::File::open(&path).unwrap();
    let back = file.tensors().next().unwrap();
    assert_eq!((back.dtype, back.bytes), (BF16, &bytes[..]));
}

#[test]
fn mixed_types_are_a_mistake() {
    let trace = Trace::inference();
    let (x, y) = (
        trace.input("x", BF16, (2, 3)),
        trace.input("y", F32, (3, 2)),
    );
    let z = x.matmul(y);
    let mut session = Session::new(Device::Cpu, Params::seeded(1)).unwrap();
    let error = session.compile(&trace, [z]).err().unwrap().to_string();
    assert!(
        error.contains("matmul [2, 3] × [3, 2]: types bf16 and f32 differ; convert one with cast"),
        "{error}"
    );
}

/// Losses of some steps of a model, and its weights after them. `rounds` has it begin with weights
/// that are rounded to bf16.
fn trained(model: &str, precision: Precision, batch: usize, rounds: bool) -> (Vec<f32>, Vec<f32>) {
    let (params, model) = (Params::seeded(2), Model::parse(model).unwrap());
    let network = model.build(&params).with_precision(precision);
    let mut session = Session::new(Device::Cpu, params).unwrap();
    let program = network
        .training(&mut session, batch, model.optimizer())
        .unwrap();
    let names: Vec<String> = session.names().map(String::from).collect();
    let value =
        |session: &Session, name: &String| -> ndarray::ArrayD<f32> { session.value(name).unwrap() };
    for name in names.iter().filter(|_| rounds) {
        let rounded = value(&session, name).mapv(|w| bf16::from_f32(w).to_f32());
        session.set_value(name, &rounded).unwrap();
    }
    let losses = (0..12).map(|step| {
        let (examples, labels) = model.batch(batch, step % 2);
        session.run(&program, (&examples, &labels)).unwrap()[0].item()
    });
    let losses = losses.collect();
    let values = names.iter().map(|name| value(&session, name));
    (losses, values.flat_map(IntoIterator::into_iter).collect())
}

/// The largest relative distance of losses after the first.
fn drift(losses: &[f32], exact: &[f32]) -> f32 {
    let each = losses.iter().zip(exact).skip(1);
    each.map(|(a, b)| ((a - b) / b).abs()).fold(0.0, f32::max)
}

/// Built-in models learn the same in mixed precision as in f32, and their weights are f32. Steps of
/// a deep network amplify the smallest difference, so losses may be as far off as four times those in
/// f32 are from weights that are rounded before the first step.
#[test]
fn models_learn_in_bf16_as_in_f32() {
    for (model, batch) in [
        ("mlp:inputs=64,hidden1=48,hidden2=32", 16),
        ("cnn:size=12,width=8,hidden=32", 8),
        ("gpt:layers=2,width=32,heads=2,length=16,vocabulary=50", 4),
        ("resnet20:size=16,width=8,blocks1=1,blocks2=1,blocks3=1", 16),
        (
            "resnet18:size=64,width=8,classes=10,blocks1=1,blocks2=1,blocks3=1,blocks4=1",
            16,
        ),
        (
            "resnet50:size=96,width=8,classes=10,blocks1=1,blocks2=1,blocks3=1,blocks4=1",
            16,
        ),
    ] {
        let (exact, weights) = trained(model, Precision::F32, batch, false);
        let (beside, _) = trained(model, Precision::F32, batch, true);
        let (half, halves) = trained(model, Precision::Bf16, batch, false);
        assert!(half[11] < half[1], "{model} learns: {half:?}");
        let first = (half[0] - exact[0]).abs();
        assert!(
            first <= 1e-3 * exact[0],
            "{model}: {first} at the first step"
        );
        let (off, may) = (drift(&half, &exact), 4.0 * drift(&beside, &exact));
        assert!(
            off <= may,
            "{model}: {half:?} in bf16, {exact:?} in f32, {beside:?} from rounded"
        );
        assert!(half != exact && weights.len() == halves.len());
        let kept = halves
            .iter()
            .filter(|w| bf16::from_f32(**w).to_f32() != **w)
            .count();
        assert!(
            kept > halves.len() / 2,
            "{model}: of {} weights {kept} have more digits than bf16",
            halves.len()
        );
    }
}

/// A value that a product reads is rounded for all that reads it, also before that product is
/// recorded, and so is the sum of its gradients; a bias is added before a result is rounded.
#[test]
fn values_between_products_are_rounded_once() {
    let (x, w, v) = (numbers(6, 5, 1.5), numbers(5, 4, 0.7), numbers(4, 5, 0.9));
    let bias = numbers(1, 4, 0.3);
    let params = Params::seeded(1);
    let weight = params.root().param("bias", (1, 4), Init::Constant(0.0));
    let trace = Trace::inference().with_precision(Precision::Bf16);
    let given = (
        trace.input("x", F32, (6, 5)),
        trace.input("w", F32, (5, 4)),
        trace.input("v", F32, (4, 5)),
    );
    let h = given.0.tanh() * 1.3;
    let (before, alone) = (h + 0.0, given.0.tanh() * 1.1);
    let y = h.matmul(given.1) + trace.param(&weight);
    // The sum reads what relu selects; no product reads the sum.
    let z = y.relu();
    let sum = z.matmul(given.2) + h;
    let skip = given.0 + z.matmul(given.2);
    let [of_h, of_w] = trace.gradients((sum * sum).mean(), [h, given.1]);
    let mut session = Session::new(Device::Cpu, params).unwrap();
    let program = session
        .compile(&trace, [before, alone, y, sum, skip, of_h, of_w])
        .unwrap();
    session.set_value("bias", &bias).unwrap();
    let outputs = session.run(&program, (&x, &w, &v)).unwrap();
    let [before, alone, y, sum, skip, of_h, of_w] =
        outputs.map(|o| o.array::<f32>().unwrap().into_dimensionality().unwrap());
    let close = |a: &Array2<f32>, b: &Array2<f32>| {
        let off = a
            .iter()
            .zip(b)
            .map(|(a, b)| (a - b).abs() / b.abs().max(1.0));
        off.fold(0.0, f32::max)
    };
    // Half of a unit in the last place of a bf16, where two ways to sum round to different numbers.
    let unit = 1.0 / 256.0;
    let (rw, rv) = (rounded(&w), rounded(&v));
    let h = rounded(&x.mapv(|x| x.tanh() * 1.3));
    assert_eq!(rounded(&before), before);
    assert!(close(&before, &h) <= unit);
    assert_ne!(rounded(&alone), alone);
    let h = before;
    let exact = h.dot(&rw) + &bias;
    assert!(rounded(&y) == y && close(&y, &exact) <= unit);
    let z = y.mapv(|y| y.max(0.0));
    let product = rounded(&z.dot(&rv));
    assert!(close(&sum, &(&product + &h)) <= 2.0 * unit);
    assert_ne!(rounded(&sum), sum);
    assert!(close(&skip, &(&product + &x)) <= 2.0 * unit);
    assert_ne!(rounded(&skip), skip);
    // The gradient of `z·v + h` goes to both terms.
    let d = &sum * (2.0 / 30.0);
    let of_y = rounded(&rounded(&d).dot(&rv.t())) * &y.mapv(|y| f32::from(y > 0.0));
    let of_both = &d + &of_y.dot(&rw.t());
    assert_eq!(rounded(&of_h), of_h);
    assert!(close(&of_h, &of_both) <= 4.0 * unit);
    let exact = h.t().dot(&of_y);
    assert!(close(&of_w, &exact) <= 4.0 * unit);
    assert_ne!(rounded(&of_w), of_w);
}

/// The steps of a scan round the operands of products alone.
#[test]
fn steps_of_a_scan_round_operands_alone() {
    let (x, w) = (numbers(3, 4, 1.5), numbers(4, 4, 0.7));
    let trace = Trace::inference().with_precision(Precision::Bf16);
    let given = (trace.input("x", F32, (3, 4)), trace.input("w", F32, (4, 4)));
    let zero = trace.zeros((1, 4));
    let ([_], [all]) = trace.scan([zero], [given.0.reshape((3, 1, 4))], |[_], [x]| {
        let y = x.matmul(given.1);
        ([y], [y])
    });
    let mut session = Session::new(Device::Cpu, Params::seeded(1)).unwrap();
    let program = session.compile(&trace, [all.reshape((3, 4))]).unwrap();
    let [all] = session.run(&program, (&x, &w)).unwrap();
    let all = all.array::<f32>().unwrap();
    let exact = rounded(&x).dot(&rounded(&w));
    let off = all.iter().zip(&exact).map(|(a, b)| (a - b).abs());
    assert!(off.fold(0.0, f32::max) < 1e-5);
}

/// Operands and results are rounded, in the backward pass too; sums, gradients of inputs and
/// everything else are f32.
#[test]
fn a_precision_rounds_operands_and_results_of_products() {
    let (x, w) = (numbers(6, 5, 1.5), numbers(5, 4, 0.7));
    let run = |precision: Option<Precision>| {
        let trace = Trace::inference();
        let trace = if let Some(precision) = precision {
            trace.with_precision(precision)
        } else {
            trace
        };
        let (a, b) = (trace.input("x", F32, (6, 5)), trace.input("w", F32, (5, 4)));
        let y = a.matmul(b);
        let weights = y.softmax(1);
        let loss = (y * 0.3).square().mean();
        let [da, db] = trace.gradients(loss, [a, b]);
        assert!([y, weights, loss, da, db].iter().all(|t| t.dtype() == F32));
        let summed = trace.einsum("ij,jk->ik", &[a, b]);
        let image = a.reshape((1, 1, 6, 5)).conv2d(b.reshape((1, 1, 5, 4)));
        let wide = a
            .reshape((1, 1, 6, 5))
            .conv_transpose2d(b.reshape((1, 1, 5, 4)), ConvGeometry::default());
        let mut session = Session::new(Device::Cpu, Params::seeded(1)).unwrap();
        let program = session
            .compile(&trace, [y, weights, da, db, summed, image, wide])
            .unwrap();
        session
            .run(&program, (&x, &w))
            .unwrap()
            .map(|output| output.array::<f32>().unwrap())
    };
    let close = |a: &ndarray::ArrayD<f32>, b: &Array2<f32>| {
        a.iter().zip(b).all(|(a, b)| (a - b).abs() <= 1e-6)
    };
    let [y, weights, da, db, summed, image, wide] = run(Some(Precision::Bf16));
    let (rx, rw) = (rounded(&x), rounded(&w));
    let product = rounded(&rx.dot(&rw));
    assert!(close(&y, &product) && close(&summed, &product));
    // d mean((0.3·y)²) / dy, rounded before it is multiplied.
    let dy = rounded(&product.mapv(|y| 2.0 * 0.3 * 0.3 * y / 24.0));
    assert!(close(&da, &dy.dot(&rw.t())) && close(&db, &rx.t().dot(&dy)));
    let most = product
        .rows()
        .into_iter()
        .map(|row| row.fold(f32::MIN, |a, b| a.max(*b)));
    let softmax = Array2::from_shape_vec(
        (6, 4),
        product
            .rows()
            .into_iter()
            .zip(most)
            .flat_map(|(row, most)| {
                let sum: f32 = row.iter().map(|y| (y - most).exp()).sum();
                row.iter()
                    .map(|y| (y - most).exp() / sum)
                    .collect::<Vec<f32>>()
            })
            .collect(),
    )
    .unwrap();
    assert!(close(&weights, &softmax));
    let at = |x: &Array2<f32>, w: &Array2<f32>, i: usize| -> f32 {
        (0..5)
            .flat_map(|r| (0..4).map(move |c| (r, c)))
            .map(|(r, c)| x[[r + i / 2, c + i % 2]] * w[[r, c]])
            .sum()
    };
    let near = |a: f32, exact: f32| {
        (a - exact).abs() <= exact.abs() / 256.0 + 1e-5 && bf16::from_f32(a).to_f32() == a
    };
    assert!((0..4).all(|i| near(*image.iter().nth(i).unwrap(), at(&rx, &rw, i))));
    assert!(near(wide[[0, 0, 0, 0]], rx[[0, 0]] * rw[[0, 0]]));
    // Switched off, it has no effect.
    assert_eq!(run(None), run(Some(Precision::F32)));
    assert!(run(None)[0] != y);
}

#[test]
fn precisions_have_names() {
    assert!(
        Precision::ALL
            .iter()
            .all(|p| p.to_string().parse::<Precision>().unwrap() == *p)
    );
    let said = "f64".parse::<Precision>().unwrap_err().to_string();
    assert_eq!(said, "unknown precision \"f64\"; it is f32, bf16 or f16");
}

/// The relu of halves is f32, as a pooling requires; relu and pooling may swap only where the
/// operand of relu is f32 too.
#[test]
fn pooling_behind_relu_of_halves() {
    let mut session = Session::new(Device::Cpu, Params::seeded(0)).expect("a session");
    let trace = Trace::inference();
    let x = trace.input("x", BF16, [1, 1, 2, 4]);
    let (y, plain) = (x.relu().max_pool2d(2), x.max_pool2d(2));
    assert_eq!(plain.dtype(), F32);
    let [slope] = trace.gradients(plain.sum(), [x]);
    let program = session
        .compile(&trace, [y, plain, slope])
        .expect("it compiles");
    let values = [-1.0, 2.0, -3.0, -4.0, 0.5, -1.0, -2.0, -5.0].map(bf16::from_f32);
    let image = ndarray::Array4::from_shape_vec((1, 1, 2, 4), values.to_vec()).expect("8 values");
    let [y, plain, slope] = session.run(&program, (&image,)).expect("a run");
    let values = |output: &Output| {
        output
            .array::<f32>()
            .expect("f32")
            .into_iter()
            .collect::<Vec<_>>()
    };
    assert_eq!(
        (values(&y), values(&plain)),
        (vec![2.0, 0.0], vec![2.0, -2.0])
    );
    assert_eq!(values(&slope), [0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0]);
}

/// With a precision of halves, queries, keys, values and results are halves in memory, for the
/// backward pass too.
#[test]
fn attention_keeps_halves() {
    let (length, width) = (64, 32);
    let x = numbers(length, 3 * width, 1.0);
    let run = |precision: Precision| {
        let trace = Trace::training().with_precision(precision);
        let joined = trace.input("x", F32, (length, 3 * width));
        let seen = trace.arange(length).lt(50);
        let y = joined.self_attention(2, true, Mask::Seen(seen));
        let [slope] = trace.gradients(y.square().sum(), [joined]);
        assert!(y.dtype() == F32 && slope.dtype() == F32);
        let mut session = Session::new(Device::Cpu, Params::seeded(1)).unwrap();
        let program = session.compile(&trace, [y, slope]).unwrap();
        let buffers = &program.plan().dag().buffers;
        let halves = (2 * length * width) as u64;
        let kept = buffers.iter().any(|buffer| buffer.bytes == halves);
        assert_eq!(kept, precision != Precision::F32, "{buffers:?}");
        session
            .run(&program, (&x,))
            .unwrap()
            .map(|output| output.array::<f32>().unwrap())
    };
    let exact = run(Precision::F32);
    for (precision, off) in [(Precision::Bf16, 2e-2), (Precision::F16, 2e-3)] {
        for (half, exact) in run(precision).iter().zip(&exact) {
            let most = exact.iter().fold(0f32, |most, x| most.max(x.abs()));
            let close = half
                .iter()
                .zip(exact)
                .all(|(a, b)| (a - b).abs() <= off * most);
            assert!(close && half != exact, "{precision}");
        }
    }
}
