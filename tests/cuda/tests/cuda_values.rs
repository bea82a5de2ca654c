//! Values without elements, and values computed in place of a part of their operand, on a GPU where
//! one is required, else on a driver without a device.

#[path = "../../support/evaluator.rs"]
mod evaluator;
#[path = "../../support/prefixes.rs"]
mod prefixes;
#[path = "../../support/mod.rs"]
mod support;

use evaluator::against_the_evaluator;
use half::{bf16, f16};
use ndarray::{Array2, ArrayD};
use prefixes::prefixes;
use slabwise::nn::{Embedding, Linear};
use slabwise::prelude::*;
use slabwise::tensor::{AttentionOptions, ConvOptions, Interpolate, Padding, PoolOptions, Running};
use slabwise::{CompileOptions, CustomKernel, Quantization};
use slabwise_cuda::fake::TestDevice;
use support::arrays::{close, numbers};

#[test]
fn the_first_part_of_a_value_is_computed_in_place_on_a_device() {
    let Some(_device) = TestDevice::find() else {
        return;
    };
    prefixes(Device::Cuda(0), &[4, 33]);
}

/// On a device: layers of width 0, empty batches, and reductions, products, indices and views
/// without elements.
#[test]
fn programs_without_elements_run_on_a_device() {
    let Some(_device) = TestDevice::find() else {
        return;
    };
    let run = |device: Device| -> Vec<Vec<f64>> {
        let open = || {
            let untuned = CompileOptions {
                tuning: slabwise::Tuning::Off,
                ..CompileOptions::default()
            };
            Session::new(device, Params::seeded(0))
                .expect("a session")
                .with_threads(1)
                .with_options(untuned)
        };
        let trace = Trace::inference();
        let batch = Dim::bounded("batch", 3);
        let (x, none) = (
            trace.input("x", F32, (batch, 4)),
            trace.input("none", F32, (4, 0)),
        );
        let (image, index) = (
            trace.input("image", F32, (batch, 2, 5, 5)),
            trace.input("index", I32, (batch, 2)),
        );
        let weight = trace.full(0.5, F32, (3, 2, 2, 2));
        let image = image.conv2d(weight).relu().max_pool2d(2);
        let outputs = [
            x.matmul(none).matmul(none.t()),
            none.matmul(none.t()).exp(),
            x.softmax(1).sum_over(0),
            none.softmax(1).sum_over(1),
            x.mean_over(0),
            none.exp().flatten(0).sum(),
            image,
            x.gather(1, index).sum_over(0),
            x.sort(true),
            x.gt(0.0).nonzero(),
            x.masked_select(x.gt(0.0)).sum(),
            trace
                .concat(&[x, x.slice(1, 0..0), x.cumsum(1)], 1)
                .pad([(0, 0), (1, 1)], 0.5),
        ];
        let gradients = [x, none].map(|w| {
            trace.gradients(
                (outputs[0].square().sum() + outputs[6].sum()) + outputs[2].sum(),
                [w],
            )[0]
        });
        let mut session = open();
        let program = session.compile(&trace, outputs).expect("it compiles");
        let slopes = session.compile(&trace, gradients).expect("it compiles");
        let mut all = Vec::new();
        for n in [0, 2, 3] {
            let x = Array2::from_shape_fn((n, 4), |(i, j)| (i as f32 * 1.7 + j as f32).sin());
            let image =
                ArrayD::from_shape_fn(vec![n, 2, 5, 5], |at| (at[0] + at[2] * at[3]) as f32 * 0.1);
            let (none, index) = (
                Array2::<f32>::zeros((4, 0)),
                Array2::<i32>::from_elem((n, 2), 3),
            );
            all.extend(
                session
                    .run(&program, (&x, &none, &image, &index))
                    .expect("it runs")
                    .iter()
                    .map(numbers),
            );
            all.extend(
                session
                    .run(&slopes, (&x, &none, &image, &index))
                    .expect("it runs")
                    .iter()
                    .map(numbers),
            );
        }
        all
    };
    let (on_device, on_cpu) = (run(Device::Cuda(0)), run(Device::Cpu));
    for (at, (a, b)) in on_device.iter().zip(&on_cpu).enumerate() {
        let same = a.len() == b.len() && a.iter().zip(b).all(|(&p, &q)| close(p, q));
        assert!(same, "result {at}: {a:?} on the device, {b:?} on the CPU");
    }
}

/// Graphs drawn at random with lengths of 0 and 1 everywhere, on a device and within budgets.
#[test]
fn random_graphs_without_elements_run_on_a_device() {
    let Some(_device) = TestDevice::find() else {
        return;
    };
    let open = || {
        let untuned = CompileOptions {
            tuning: slabwise::Tuning::Off,
            ..CompileOptions::default()
        };
        Session::new(Device::Cuda(0), Params::seeded(0))
            .expect("a session")
            .with_threads(1)
            .with_options(untuned)
    };
    for seed in 500..506 {
        against_the_evaluator(seed, 8, &open);
    }
}

/// Results on a device without tuning, and on the CPU.
fn on_both<const N: usize>(
    build: impl for<'t> Fn(&'t Trace) -> [Tensor<'t>; N],
    inputs: &[&dyn slabwise::feed::Input],
) -> [Vec<Vec<f64>>; 2] {
    [Device::Cuda(0), Device::Cpu].map(|device| {
        let untuned = CompileOptions {
            tuning: slabwise::Tuning::Off,
            ..CompileOptions::default()
        };
        let mut session = Session::new(device, Params::seeded(0))
            .expect("a session")
            .with_threads(1)
            .with_options(untuned);
        let trace = Trace::inference();
        let program = session.compile(&trace, build(&trace)).expect("it compiles");
        let outputs = session.run(&program, inputs).expect("it runs");
        outputs.iter().map(numbers).collect()
    })
}

fn keyed(trace: &Trace) -> [Tensor<'_>; 8] {
    let [a, b] = trace.key(0x1234_5678_9ABC).split::<2>();
    let words = trace.input("words", I32, (3,));
    let step = trace.input("step", I32, ());
    let given = slabwise::Key::of(words).fold_in(step);
    [
        a.uniform((7, 65)),
        a.bernoulli(0.25, (300,)).cast(I32),
        b.randint(-5..1000, (4, 33)),
        b.fold_in(3).permutation(50),
        given.uniform((129,)),
        given.truncated_normal(-1.0..2.0, (40,)),
        b.normal((5, 9)),
        b.categorical(trace.zeros((6, 4)), 1),
    ]
}

/// Keys, and keys made from keys, of constants and of inputs. The functions ln and cos round
/// differently on a device.
#[test]
fn numbers_of_a_key_have_the_bits_of_the_cpu_on_a_device() {
    let Some(_device) = TestDevice::find() else {
        return;
    };
    let words = ndarray::arr1(&[7i32, -9, 11]).into_dyn();
    let step = ndarray::arr0(5i32).into_dyn();
    let [device, cpu] = on_both(keyed, &[&words, &step]);
    for (at, (a, b)) in device.iter().zip(&cpu).enumerate() {
        let alike = |(&p, &q): (&f64, &f64)| if at < 5 { p == q } else { close(p, q) };
        assert!(
            a.len() == b.len() && a.iter().zip(b).all(alike),
            "result {at}: {a:?} on the device, {b:?} on the CPU"
        );
    }
}

fn optional(trace: &Trace) -> [Tensor<'_>; 9] {
    let x = trace.input("x", F32, (2, 4, 6, 5));
    let (row, volume) = (x.flatten(2), x.unflatten(2, (2, 3)));
    let weight =
        trace.full(0.5, F32, (4, 2, 3)) * row.slice(0, ..1).slice(2, ..3).squeeze(0).mean();
    let cube = x
        .slice(2, ..2)
        .slice(3, ..2)
        .slice(0, ..1)
        .reshape([2, 2, 2, 2, 1]);
    let options = AttentionOptions::new().causal().window(2).soft_cap(3.0);
    let by = Running {
        exclusive: false,
        reverse: true,
    };
    [
        x.attention_with(x.slice(1, ..2), x.slice(1, 2..), options),
        row.conv1d_with(
            weight,
            ConvOptions::new().groups(2).padding(Padding::Causal),
        ),
        volume
            .slice(1, ..2)
            .conv_transpose3d(cube, ConvOptions::new().stride([2, 1, 2])),
        x.max_pool2d_with(
            PoolOptions::new([2, 3])
                .stride(2)
                .padding([(1, 0), (0, 1)])
                .ceil(),
        ),
        x.avg_pool2d_with(PoolOptions::new(2).dilation(2).stride(1)),
        x.interpolate([4, 9], Interpolate::AntialiasedCubic),
        x.interpolate(
            [13, 3],
            Interpolate::Linear {
                align_corners: true,
            },
        ),
        row.cumprod(2) + row.linear_recurrence(row.tanh(), 2, by),
        row.logcumsumexp(2) + row.cummax(2).0,
    ]
}

/// Attention, convolutions, poolings, resampling and recurrences with their options.
#[test]
fn options_of_methods_count_on_a_device() {
    let Some(_device) = TestDevice::find() else {
        return;
    };
    let mut rng = support::Rng(31);
    let x = ArrayD::from_shape_fn(vec![2, 4, 6, 5], |_| rng.float(-2.0, 2.0) as f32);
    let [device, cpu] = on_both(optional, &[&x]);
    for (at, (a, b)) in device.iter().zip(&cpu).enumerate() {
        let same = a.len() == b.len() && a.iter().zip(b).all(|(&p, &q)| close(p, q));
        assert!(same, "result {at}: {a:?} on the device, {b:?} on the CPU");
    }
}

/// Shown statistics are those of the CPU, and the search for NaN names the same line, whether runs
/// are replayed or launched.
#[test]
fn values_are_shown_and_nan_is_found_on_a_device() {
    let Some(_device) = TestDevice::find() else {
        return;
    };
    let run = |device: Device| {
        let (sender, shown) = std::sync::mpsc::channel();
        let untuned = CompileOptions {
            tuning: slabwise::Tuning::Off,
            ..CompileOptions::default()
        };
        let mut session = Session::new(device, Params::seeded(0))
            .expect("a session")
            .with_threads(1)
            .with_options(untuned)
            .with_debug(move |value| sender.send(value.clone()).expect("the test receives"));
        let trace = Trace::inference();
        let x = trace.input("x", F32, (3, 4));
        let y = x.ln() * 2.0;
        trace.debug("y", y);
        trace.debug("positions", x.cast(I32));
        let program = session
            .compile(&trace, [y.sum_over(1)])
            .expect("it compiles");
        let inputs = |bad: f32| {
            Array2::from_shape_fn((3, 4), |(i, j)| {
                if (i, j) == (1, 2) {
                    bad
                } else {
                    (i + j) as f32
                }
            })
        };
        for bad in [3.0, -1.0, -1.0, 0.5] {
            session.run(&program, inputs(bad)).expect("it runs");
        }
        let mut session = session.with_nan_check(slabwise::settings::NanCheck::Nan);
        session
            .run(&program, inputs(3.0))
            .expect("ln(0) is infinite");
        let Err(slabwise::Error::NotFinite { mistake, .. }) = session.run(&program, inputs(-1.0))
        else {
            panic!("ln(-1) is NaN");
        };
        assert!(mistake.message.contains("element [1, 2]"), "{mistake}");
        drop(session);
        (shown.iter().collect::<Vec<_>>(), mistake.location)
    };
    let ((on_host, line), (on_device, same)) = (run(Device::Cpu), run(Device::Cuda(0)));
    assert_eq!((line, on_host.len()), (same, 10));
    for (a, b) in on_host.iter().zip(&on_device) {
        assert_eq!((&a.shape, a.nan, a.infinite), (&b.shape, b.nan, b.infinite));
        for (a, b) in [
            (a.min, b.min),
            (a.max, b.max),
            (a.mean, b.mean),
            (a.std, b.std),
        ] {
            assert!((a - b).abs() < 1e-5, "{a} and {b}");
        }
    }
}

/// Products of few rows decode quantized weights as they read them. Rows of tables, and the weights of
/// products of more rows, are decoded by elementwise kernels.
#[test]
fn quantized_weights_stand_for_the_same_floats_on_a_device() {
    let Some(_device) = TestDevice::find() else {
        return;
    };
    let bounded = |most| Dim::bounded("rows", most);
    for ((bits, block), rows, count, is_few) in [
        ((4, 32), Dim::Fixed(1), 1, true),
        ((4, 32), bounded(8), 6, true),
        ((2, 32), Dim::Fixed(5), 5, true),
        ((8, 32), Dim::Fixed(2), 2, true),
        ((4, 32), Dim::Fixed(20), 20, true),
        ((4, 32), bounded(40), 1, false),
        ((8, 32), Dim::Fixed(33), 33, false),
        ((2, 16), Dim::Fixed(5), 5, false),
    ] {
        let run = |device: Device| -> (Vec<Vec<f64>>, Vec<String>) {
            let params = Params::seeded(3);
            let at = params.root().quantized(Quantization { bits, block });
            let table = Embedding::new(&at / "table", 20, 96);
            let layer = Linear::new(&at / "layer", 96, 24);
            let trace = Trace::inference();
            let tokens = trace.input("tokens", I32, (rows,));
            let x = tokens.apply(&table);
            let outputs = [x, x.apply(&layer).relu()];
            let untuned = CompileOptions {
                tuning: slabwise::Tuning::Off,
                ..CompileOptions::default()
            };
            let mut session = Session::new(device, params)
                .expect("a session")
                .with_threads(1)
                .with_options(untuned);
            let program = session.compile(&trace, outputs).expect("it compiles");
            let tokens: ndarray::Array1<i32> = (0..count).map(|i| i * 7 % 20).collect();
            let results = session.run(&program, (&tokens,)).expect("a run");
            let values = |y: slabwise::Output<'_>| {
                y.view::<f32>()
                    .expect("f32")
                    .iter()
                    .map(|&v| v.into())
                    .collect()
            };
            let values = results.map(values).to_vec();
            let used = program.resources().into_iter().flatten();
            (values, used.map(|kernel| kernel.function).collect())
        };
        let ((got, names), (expected, _)) = (run(Device::Cuda(0)), run(Device::Cpu));
        let kernel = format!("gemv_{bits}bits_");
        let decodes = names.iter().any(|name| name.starts_with(&kernel));
        assert_eq!(decodes, is_few, "{bits} bits, {rows:?}: {names:?}");
        // Rows are decoded by the same operations.
        assert_eq!(got[0], expected[0]);
        for (a, b) in got[1].iter().zip(&expected[1]) {
            assert!((a - b).abs() <= 1e-4, "{a} on the device, {b} on the CPU");
        }
    }
}

/// x · scale + words, element by element, of all types that a kernel takes.
fn elementwise_kernel() -> CustomKernel {
    CustomKernel::new(
        "own elementwise",
        [F32, F16, BF16, I32, U8, Bool],
        F16,
        |run| {
            let (x, scale) = (run.input::<f32>(0), run.input::<f16>(1));
            let (shift, words) = (run.input::<bf16>(2), run.input::<i32>(3));
            let (bytes, truth) = (run.input::<u8>(4), run.input::<u8>(5));
            let columns = run.dims()[1];
            run.parts(columns, |row, out: &mut [f16]| {
                for (j, out) in out.iter_mut().enumerate() {
                    let k = row * columns + j;
                    let sum = x[k] * scale[j].to_f32() + shift[0].to_f32();
                    let integers = words[k] + i32::from(bytes[row]) * i32::from(truth[k]);
                    *out = f16::from_f32(sum + integers as f32);
                }
            });
        },
    )
    .with_cuda(
        "const idx columns = out_dims[1];
         for (idx i = thread; i < out_count; i += threads) {
             const float sum = in0[i] * widen(in1[i % columns]) + widen(in2[0]);
             const int integers = in3[i] + int(in4[i / columns]) * int(in5[i]);
             out[i] = narrow_f16(sum + float(integers));
         }",
    )
}

/// The sum of each row, by blocks of threads.
fn rows_kernel() -> CustomKernel {
    CustomKernel::new("sums", [F32], F32, |run| {
        let (x, columns) = (run.input::<f32>(0), run.input_dims(0)[1]);
        run.parts(1, |row, out: &mut [f32]| out[0] = x[row * columns..][..columns].iter().sum());
    })
    .with_cuda(
        "__shared__ float NAMED_PARTS[256];
         for (idx row = blockIdx.x; row < in0_dims[0]; row += gridDim.x) {
             float sum = 0.0f;
             for (idx j = threadIdx.x; j < in0_dims[1]; j += 256) sum += in0[row * in0_dims[1] + j];
             NAMED_PARTS[threadIdx.x] = sum;
             __syncthreads();
             for (int half = 128; half > 0; half /= 2) {
                 if (threadIdx.x < half) NAMED_PARTS[threadIdx.x] += NAMED_PARTS[threadIdx.x + half];
                 __syncthreads();
             }
             if (threadIdx.x == 0) out[row] = NAMED_PARTS[0];
             __syncthreads();
         }",
    )
}

fn custom(trace: &Trace) -> [Tensor<'_>; 3] {
    let (own, sums) = (elementwise_kernel(), rows_kernel());
    let x = trace.input("x", F32, (Dim::bounded("batch", 9), 8, 33));
    // Views that start at odd elements, and in another order.
    let rows = x.slice(1, 3..4).reshape((x.dim(0), 33));
    let part = rows.slice(1, ..32);
    let inputs = [
        part,
        trace.full(0.5, F16, (33,)).slice(0, 1..),
        trace.full(1.5, BF16, ()),
        part.cast(I32),
        rows.abs().slice(1, 5..6).cast(U8),
        part.gt(0.0),
    ];
    [
        trace.custom(&own, &inputs, (x.dim(0), 32)).cast(F32),
        trace.custom(&sums, &[x.permute([2, 1, 0]).flatten(1)], (33,)) * 2.0,
        trace.custom(&sums, &[x.slice(2, ..0).flatten(1)], (x.dim(0),)),
    ]
}

#[test]
fn custom_kernels_compute_on_a_device_as_on_the_cpu() {
    let Some(_device) = TestDevice::find() else {
        return;
    };
    for batch in [0, 1, 9] {
        let x = ArrayD::from_shape_fn(vec![batch, 8, 33], |at| {
            ((at[0] * 5 + at[1] * 3 + at[2]) as f32).sin() * 9.0
        });
        let [device, cpu] = on_both(custom, &[&x]);
        for (at, (a, b)) in device.iter().zip(&cpu).enumerate() {
            assert!(
                a.len() == b.len() && a.iter().zip(b).all(|(&p, &q)| close(p, q)),
                "result {at}: {a:?} on the device, {b:?} on the CPU"
            );
        }
    }
    let trace = Trace::inference();
    let nothing = CustomKernel::new("nothing", [F32], F32, |_| {});
    let y = trace.custom(&nothing, &[trace.input("x", F32, (3,))], (3,));
    let mut session = Session::new(Device::Cuda(0), Params::seeded(0)).expect("a session");
    let text = match session.compile(&trace, [y]) {
        Ok(_) => panic!("it compiles"),
        Err(error) => error.to_string(),
    };
    let told = "the custom kernel \"nothing\" has no code for CUDA; add it by with_cuda";
    assert!(text.contains(told), "{text}");
    let broken = nothing.with_cuda(
        "if (thread < out_count) {\n\n    // Not right.\n\n    out[thread] = undeclared;\n}",
    );
    let y = trace.custom(&broken, &[trace.input("y", F32, (3,))], (3,));
    let text = match session.compile(&trace, [y]) {
        Ok(_) => panic!("it compiles"),
        Err(error) => error.to_string(),
    };
    // The compiler counts the lines of the body.
    let told = "custom kernel 'nothing'(5): error";
    assert!(text.contains(told) && text.contains("undeclared"), "{text}");
}
