//! Weights of a few bits: products with them, loading, and training beside them.

use ndarray::{Array2, ArrayD};
use slabwise::Quantization;
use slabwise::nn::{
    Conv2d, Embedding, Linear, LoraLinear, Lstm, MultiHeadAttention, TransformerEncoderLayer,
};
use slabwise::optim::AdamW;
use slabwise::prelude::*;
use slabwise::weights::{self, Entry, LoadOptions, Rules, SaveOptions, Weights};

const FOUR_BITS: Quantization = Quantization { bits: 4, block: 32 };

fn floats(rows: usize, columns: usize, seed: usize) -> Array2<f32> {
    Array2::from_shape_fn((rows, columns), |(i, j)| {
        let x = (i * 7919 + j * 104_729 + seed * 1_299_709) % 2003;
        x as f32 / 1001.0 - 1.0
    })
}

/// The floats that the parts of a quantized weight of a session stand for.
fn dequantized(session: &Session, name: &str, format: Quantization) -> Array2<f32> {
    let part = |end: &str| session.value(&format!("{name}.{end}")).expect("a part");
    let (numbers, scales, zeros) = (part("numbers"), part("scales"), part("zeros"));
    let (bits, per_byte) = (format.bits as usize, format.per_byte() as usize);
    let number = |packed: &ArrayD<f32>, row: usize, at: usize| {
        let byte = packed[[row, at / per_byte]] as usize;
        (byte >> (bits * (at % per_byte)) & ((1 << bits) - 1)) as f32
    };
    let columns = numbers.shape()[1] * per_byte;
    Array2::from_shape_fn((numbers.shape()[0], columns), |(i, j)| {
        let block = j / format.block as usize;
        (number(&numbers, i, j) - number(&zeros, i, block)) * scales[[i, block]]
    })
}

fn assert_near(a: &ArrayD<f32>, b: &Array2<f32>, of: &str) {
    assert_eq!(a.shape(), b.shape(), "{of}");
    let largest = b.iter().fold(0.0f32, |m, x| m.max(x.abs()));
    for (a, b) in a.iter().zip(b) {
        assert!((a - b).abs() <= 1e-5 * largest, "{a} instead of {b}: {of}");
    }
}

fn session(params: Params, threads: usize) -> Session {
    let session = Session::new(Device::Cpu, params).expect("a session");
    session.with_threads(threads)
}

/// Layers with and without a kernel for their format, with few rows and many, at a fixed and at a
/// bounded number of them, on one thread and on two, compute what their f32 weights would.
#[test]
fn layers_compute_what_their_floats_would() {
    let formats = [(4, 32), (4, 16), (4, 8), (8, 32), (2, 64)];
    for (bits, block) in formats {
        let format = Quantization { bits, block };
        for rows in [1, 3, 40] {
            for bounded in [false, true] {
                let mut results: Vec<Vec<u32>> = Vec::new();
                for threads in [1, 2] {
                    let params = Params::seeded(5);
                    let layer = Linear::new(params.root().quantized(format) / "layer", 192, 37);
                    let trace = Trace::inference();
                    let n = if bounded {
                        Dim::bounded("n", 50)
                    } else {
                        Dim::from(rows)
                    };
                    let x = trace.input("x", F32, (n, 192));
                    let y = x.apply(&layer).relu();
                    let mut session = session(params, threads);
                    let program = session.compile(&trace, [y]).expect("it compiles");
                    let reads = program
                        .plan()
                        .steps()
                        .any(|s| s.contains("quantized_matmul"));
                    assert_eq!(
                        reads,
                        block != 8,
                        "{:?}",
                        program.plan().steps().collect::<Vec<_>>()
                    );
                    let x = floats(rows, 192, 1);
                    let [y] = session.run(&program, (&x,)).expect("a run");
                    let y = y.view::<f32>().expect("f32").to_owned();
                    let weight = dequantized(&session, "layer.weight", format);
                    let bias = session.value("layer.bias").expect("a bias");
                    let bias = bias.into_dimensionality::<ndarray::Ix1>().expect("an axis");
                    let expected = (x.dot(&weight.t()) + bias).mapv(|x| x.max(0.0));
                    assert_near(&y, &expected, &format!("{format:?} {rows} {bounded}"));
                    results.push(y.iter().map(|x| x.to_bits()).collect());
                }
                assert_eq!(results[0], results[1], "threads change bits");
            }
        }
    }
}

/// The initial values of a quantized weight are those of its floats, and take a sixth of the memory.
#[test]
fn initial_values_are_the_nearest() {
    let plain = Params::seeded(9);
    let _layer = Linear::without_bias(plain.root() / "layer", 256, 64);
    let params = Params::seeded(9);
    let layer = Linear::without_bias(params.root().quantized(FOUR_BITS) / "layer", 256, 64);
    assert_eq!(layer.weight().quantization(), Some(FOUR_BITS));
    assert!(!layer.weight().is_trained());
    let values = |params: Params| {
        let mut session = session(params, 1);
        let trace = Trace::inference();
        let x = trace.input("x", F32, (1,));
        session.compile(&trace, [x + 1.0]).expect("it compiles");
        session
    };
    let (plain, quantized) = (values(plain), values(params));
    let weight = plain.value("layer.weight").expect("a weight");
    let near = dequantized(&quantized, "layer.weight", FOUR_BITS);
    let scales = quantized.value("layer.weight.scales").expect("scales");
    for ((at, x), y) in weight.indexed_iter().zip(&near) {
        let scale = scales[[at[0], at[1] / 32]];
        assert!((x - y).abs() <= scale * 1.001, "{x} as {y}");
    }
    assert!(quantized.persistent_bytes() * 6 < plain.persistent_bytes());
}

fn file(path: &std::path::Path, weights: &[(&str, &Array2<f32>)]) {
    let bytes: Vec<Vec<u8>> = weights
        .iter()
        .map(|(_, w)| w.iter().flat_map(|x| x.to_le_bytes()).collect())
        .collect();
    let entries: Vec<Entry<'_>> = weights
        .iter()
        .zip(&bytes)
        .map(|((name, w), bytes)| Entry {
            name,
            dtype: F32,
            shape: w.shape().iter().map(|&n| n as u64).collect(),
            bytes,
        })
        .collect();
    weights::save(path, &entries, &Default::default()).expect("a file");
}

/// Files of floats are quantized as they are read, by each way to load them; what a session saves it
/// loads again bit for bit, and a value that is not finite changes nothing.
#[test]
fn files_of_floats_are_quantized_and_those_of_parts_are_not() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name);
    let weight = floats(24, 96, 2);
    file(&path("floats.safetensors"), &[("old.weight", &weight)]);
    let new = || {
        let params = Params::seeded(1);
        let _layer = Linear::without_bias(params.root().quantized(FOUR_BITS) / "new", 96, 24);
        session(params, 1)
    };
    let rules = Rules::new().rename("old.{*rest}", "new.{*rest}");
    let mut by_rules = new();
    let opened = Weights::open(path("floats.safetensors")).expect("a file");
    let loaded = by_rules.load_from(&opened, &rules).expect("it loads");
    assert_eq!((loaded.count, loaded.missing.len()), (1, 0));
    let near = dequantized(&by_rules, "new.weight", FOUR_BITS);
    for (x, y) in weight.iter().zip(&near) {
        // Half of a fifteenth of the range, and as much at its ends.
        assert!((x - y).abs() <= 2.0 / 15.0, "{x} as {y}");
    }
    let mut by_options = new();
    let options = LoadOptions::weights().prefix("old.", "new.");
    by_options
        .load_with(path("floats.safetensors"), &options)
        .expect("it loads");
    assert_eq!(near, dequantized(&by_options, "new.weight", FOUR_BITS));

    // Parts have the names that the rules give them, and their own types.
    let halves = SaveOptions::new().floats(BF16);
    by_rules
        .save_as(path("renamed.safetensors"), &rules, &halves)
        .expect("it saves");
    let opened = Weights::open(path("renamed.safetensors")).expect("a file");
    assert!(
        opened
            .names()
            .all(|(name, ..)| name.starts_with("old.weight."))
    );
    let mut again = new();
    let loaded = again.load_from(&opened, &rules).expect("it loads");
    assert_eq!((loaded.count, loaded.extra.len()), (3, 0));
    assert_eq!(near, dequantized(&again, "new.weight", FOUR_BITS));

    by_rules.save(path("parts.safetensors")).expect("it saves");
    for how in 0..2 {
        let mut again = new();
        match how {
            0 => again.load(path("parts.safetensors")).expect("it loads"),
            _ => {
                let opened = Weights::open(path("parts.safetensors")).expect("a file");
                let loaded = again.load_from(&opened, &Rules::new()).expect("it loads");
                assert_eq!(loaded.count, 3);
            }
        }
        assert_eq!(near, dequantized(&again, "new.weight", FOUR_BITS));
    }

    let mut broken = weight.clone();
    broken[[3, 70]] = f32::NAN;
    file(&path("broken.safetensors"), &[("old.weight", &broken)]);
    let opened = Weights::open(path("broken.safetensors")).expect("a file");
    let error = by_rules.load_from(&opened, &rules).expect_err("not finite");
    let error = error.to_string();
    assert!(
        error.contains("`new.weight`") && error.contains("[3, 70] is NaN"),
        "{error}"
    );
    let error = by_options.load_with(path("broken.safetensors"), &options);
    assert!(
        error
            .expect_err("not finite")
            .to_string()
            .contains("[3, 70] is NaN")
    );
    for session in [&by_rules, &by_options] {
        assert_eq!(near, dequantized(session, "new.weight", FOUR_BITS));
    }

    let mistaken = Rules::new().permute("old.weight", &[0, 7]);
    let opened = Weights::open(path("floats.safetensors")).expect("a file");
    let error = by_rules.load_from(&opened, &mistaken).expect_err("7 of 2");
    let error = error.to_string();
    assert!(
        error.contains("[0, 7] does not name each axis once"),
        "{error}"
    );

    file(
        &path("shape.safetensors"),
        &[("old.weight", &floats(24, 64, 1))],
    );
    let opened = Weights::open(path("shape.safetensors")).expect("a file");
    let error = by_rules
        .load_from(&opened, &rules)
        .expect_err("another shape");
    let error = error.to_string();
    assert!(
        error.contains("`new.weight` is [24, 96] in the model"),
        "{error}"
    );
    let error = by_rules
        .value("new.weight")
        .expect_err("its parts are there");
    assert!(error.to_string().contains("new.weight.numbers"), "{error}");
}

/// A weight without elements takes no memory, however many rows it has.
#[test]
fn weights_without_columns_are_empty() {
    for rows in [0, 5, 1 << 40] {
        let params = Params::seeded(1);
        let _layer = Linear::without_bias(params.root().quantized(FOUR_BITS) / "l", 0, rows);
        let mut session = session(params, 1);
        let trace = Trace::inference();
        let y = trace.input("x", F32, (1,)).relu();
        session.compile(&trace, [y]).expect("it compiles");
        assert_eq!(session.value("l.numbers").map(|v| v.len()).unwrap_or(0), 0);
    }
}

/// Of a quantized table, rows are dequantized alone, and the same table is the weight of a product.
#[test]
fn tables_are_read_by_rows_and_as_weights() {
    let params = Params::seeded(4);
    let table = Embedding::new(params.root().quantized(FOUR_BITS) / "table", 50, 64);
    let trace = Trace::inference();
    let tokens = trace.input("tokens", I32, (2, 3));
    let x = tokens.apply(&table);
    let logits = x
        .reshape([-1i64, 64])
        .matmul(trace.param(table.weight()).t());
    let mut session = session(params, 2);
    let program = session.compile(&trace, [x, logits]).expect("it compiles");
    let tokens = Array2::from_shape_vec((2, 3), vec![0, 7, 49, 7, 31, 2]).expect("six");
    let outputs = session.run(&program, (&tokens,)).expect("a run");
    let [x, logits] = outputs.map(|y| y.view::<f32>().expect("f32").to_owned());
    let weight = dequantized(&session, "table.weight", FOUR_BITS);
    let rows: Vec<usize> = tokens.iter().map(|&t: &i32| t as usize).collect();
    let rows = weight.select(ndarray::Axis(0), &rows);
    assert_eq!(x.into_shape_with_order((6, 64)).expect("six rows"), rows);
    assert_near(&logits, &rows.dot(&weight.t()), "logits");
    // No f32 table is in memory.
    assert!(program.plan().slab_bytes() < 50 * 64 * 4);
}

/// An adapter learns beside a quantized weight as it does beside the floats that this stands for.
#[test]
fn adapters_learn_beside_quantized_weights() {
    let x = floats(20, 64, 3);
    let train = |quantized: bool, weight: Option<&Array2<f32>>| {
        let params = Params::seeded(8);
        let at = params.root() / "layer";
        let base = if quantized {
            at.quantized(FOUR_BITS)
        } else {
            at.clone()
        };
        let base = Linear::without_bias(base, 64, 16);
        let first = Linear::without_bias(params.root() / "first", 64, 64);
        let layer = LoraLinear::around(base, at, 4);
        let trace = Trace::training();
        if !quantized {
            trace.freeze(|weight| &*weight.name == "layer.weight");
        }
        let input = trace.input("x", F32, (20, 64));
        let y = input.apply(&first).tanh().apply(&layer);
        let loss = (y - 1.0).square().mean();
        trace.minimize(loss, AdamW::new(0.01));
        let mut session = session(params, 2);
        let program = session.compile(&trace, [loss]).expect("it compiles");
        if let Some(weight) = weight {
            session.set_value("layer.weight", weight).expect("a weight");
        }
        let losses: Vec<f32> = (0..30)
            .map(|_| session.run(&program, (&x,)).expect("a step")[0].item())
            .collect();
        (losses, session)
    };
    let (losses, session) = train(true, None);
    let weight = dequantized(&session, "layer.weight", FOUR_BITS);
    let (plain, _) = train(false, Some(&weight));
    assert!(losses[29] < 0.5 * losses[0], "{losses:?}");
    for (a, b) in losses.iter().zip(&plain) {
        assert!((a - b).abs() <= 1e-4 * b.abs(), "{a} instead of {b}");
    }
}

#[test]
fn mistakes_name_the_line_and_the_numbers() {
    let trace = Trace::inference();
    let numbers = trace.input("numbers", U8, (10, 16));
    let scales = trace.input("scales", F32, (10, 2));
    let line = line!() + 1;
    let _ = numbers.dequantize(FOUR_BITS, scales, None);
    let _ = numbers.dequantize(Quantization { bits: 3, block: 32 }, scales, None);
    let _ = numbers.dequantize(Quantization { bits: 4, block: 24 }, scales, None);
    let _ = scales.dequantize(FOUR_BITS, scales, None);
    let _ = numbers.dequantize(Quantization { bits: 4, block: 16 }, scales, scales.cast(U8));
    let params = Params::seeded(0);
    let five = params.root().quantized(Quantization { bits: 5, block: 32 });
    let _ = Linear::new(&five / "layer", 64, 10);
    let mut session = session(params, 1);
    let error = session.compile(&trace, [scales]).err();
    let error = error.expect("mistakes").to_string();
    for (at, text) in [
        (
            0,
            "weights of 4 bits in blocks of 32: scales are f32 [10, 2], not f32 [10, 1]",
        ),
        (
            1,
            "weights of 3 bits in blocks of 32: numbers have 2, 4 or 8 bits",
        ),
        (
            2,
            "weights of 4 bits in blocks of 24: rows of 16 bytes, 32 numbers, are not whole blocks",
        ),
        (3, "numbers are f32 [10, 2], not u8 [rows, bytes]"),
        (4, "packed zero points are u8 [10, 2], not u8 [10, 1]"),
        (7, "cannot be quantized to 5 bits in blocks of 32"),
    ] {
        let place = format!("quantized.rs:{}: ", line + at);
        let found = error
            .lines()
            .any(|l| l.contains(&place) && l.contains(text));
        assert!(found, "{place}{text}\n{error}");
    }
}

/// Layers of every kind compute the same with quantized weights as with the floats that these stand
/// for, in training traces too, and weights that are not quantized stay as they are.
#[test]
fn every_layer_may_be_quantized() {
    let layers: [(&str, usize); 5] = [
        ("lstm", 2),
        ("attention", 2),
        ("encoder", 4),
        ("conv", 0),
        ("odd", 0),
    ];
    for (name, quantized) in layers {
        for training in [false, true] {
            let run = |quantize: bool| {
                let params = Params::seeded(6);
                let at = match quantize {
                    true => params.root().quantized(FOUR_BITS),
                    false => params.root(),
                };
                let trace = match training {
                    true => Trace::training(),
                    false => Trace::inference(),
                };
                let x = trace.input("x", F32, (2, 5, 64));
                let y = match name {
                    "lstm" => x.apply(&Lstm::new(at, 64, 32).unrolled_up_to(0)),
                    "attention" => x.apply(&MultiHeadAttention::new(at, 64, 4)),
                    "encoder" => x.apply(&TransformerEncoderLayer::new(at, 64, 4, 96)),
                    "conv" => x.unsqueeze(1).apply(&Conv2d::new(at, 1, 4, 3)),
                    _ => x
                        .apply(&Linear::new(at.clone() / "a", 64, 10))
                        .apply(&Linear::new(at / "b", 10, 3)),
                };
                let mut session = session(params.clone(), 2);
                let program = session.compile(&trace, [y]).expect("it compiles");
                (params, session, program)
            };
            let (params, mut session, program) = run(true);
            let (_, mut plain, expected) = run(false);
            let declared = params.declared();
            let of = |param: &&Param| param.quantization().is_some();
            let all: Vec<&Param> = declared.iter().filter(of).collect();
            let expected_count = if name == "odd" { 1 } else { quantized };
            assert_eq!(all.len(), expected_count, "{name}: {declared:?}");
            for param in all {
                let weight = dequantized(&session, param.name(), FOUR_BITS);
                plain.set_value(param.name(), &weight).expect("a weight");
            }
            let x = floats(10, 64, 1)
                .into_shape_with_order((2, 5, 64))
                .expect("ten rows");
            let results =
                [(&mut session, &program), (&mut plain, &expected)].map(|(session, program)| {
                    let [y] = session.run(program, (&x,)).expect("a run");
                    y.view::<f32>().expect("f32").to_owned()
                });
            let [got, expected] = results;
            for (a, b) in got.iter().zip(&expected) {
                assert!((a - b).abs() <= 1e-4, "{a} instead of {b}: {name}");
            }
        }
    }
}

/// A format whose rows are not whole bytes, and blocks longer than a row.
#[test]
fn other_rows_are_not_quantized() {
    let params = Params::seeded(0);
    for (bits, block, columns) in [(4, 3, 9), (2, 2, 6), (4, 64, 32)] {
        let at = params.root().quantized(Quantization { bits, block });
        let layer = Linear::new(at / &format!("{bits}x{block}"), columns, 4);
        assert_eq!(layer.weight().quantization(), None);
        assert!(layer.weight().is_trained());
    }
    assert!(params.mistakes().is_empty());
}

/// Adapters in a quantized scope are floats, which learn; `None` ends a quantized scope.
#[test]
fn adapters_and_parts_of_a_model_may_be_floats() {
    let params = Params::seeded(3);
    let at = params.root().quantized(FOUR_BITS);
    // Their rows are whole blocks too.
    let layer = LoraLinear::new(&at / "layer", 64, 64, 32);
    let head = Linear::without_bias(at.quantized(None) / "head", 64, 32);
    let trained = params.declared().into_iter().filter(Param::is_trained);
    let trained: Vec<String> = trained.map(|p| p.name().to_string()).collect();
    let expected = [
        "layer.bias",
        "layer.lora_A.weight",
        "layer.lora_B.weight",
        "head.weight",
    ];
    assert_eq!(trained, expected);
    let trace = Trace::training();
    let x = trace.input("x", F32, (4, 64));
    let loss = x.apply(&layer).apply(&head).square().mean();
    trace.minimize(loss, AdamW::new(0.01));
    let mut session = session(params, 1);
    let program = session.compile(&trace, [loss]).expect("it compiles");
    let before = session.value("layer.lora_A.weight").expect("a weight");
    for _ in 0..2 {
        session.run(&program, (&floats(4, 64, 1),)).expect("a step");
    }
    let after = session.value("layer.lora_A.weight").expect("a weight");
    assert_ne!(before, after);
}

/// A rule that freezes all but the adapters may choose quantized weights alone, by the name of the
/// weight.
#[test]
fn rules_choose_quantized_weights_by_name() {
    for name in ["layer.weight", "layer.wait"] {
        let params = Params::seeded(3);
        let base = Linear::without_bias(params.root().quantized(FOUR_BITS) / "layer", 64, 64);
        let layer = LoraLinear::around(base, params.root() / "layer", 4);
        let trace = Trace::training();
        trace.freeze(|weight| !LoraLinear::is_adapter(&weight.name));
        trace.freeze(move |weight| *weight.name == *name && weight.dims.len() == 2);
        let x = trace.input("x", F32, (4, 64));
        let loss = x.apply(&layer).square().mean();
        trace.minimize(loss, AdamW::new(0.01));
        let compiled = session(params, 1).compile(&trace, [loss]);
        match compiled {
            Ok(_) => assert_eq!(name, "layer.weight"),
            Err(error) => {
                let expected = "freeze: none of the parameters of this trace is chosen; they are \"layer.lora_A.weight\", \"layer.lora_B.weight\", \"layer.weight\"";
                assert!(error.to_string().contains(expected), "{error}");
                assert_eq!(name, "layer.wait");
            }
        }
    }
}

/// A summary counts the weights that packed numbers stand for, in the layer of the weight.
#[test]
fn summaries_count_weights() {
    let summary = |quantize: bool| {
        let params = Params::seeded(0);
        let at = match quantize {
            true => params.root().quantized(FOUR_BITS),
            false => params.root(),
        };
        let first = Linear::new(&at / "first", 64, 96);
        let table = Embedding::new(&at / "table", 50, 64);
        let trace = Trace::inference();
        let y = trace.input("tokens", I32, (3,)).apply(&table).apply(&first);
        let mut session = session(params, 1);
        let program = session.compile(&trace, [y]).expect("it compiles");
        session.summary(&program).expect("its own program")
    };
    let [floats, quantized] = [false, true].map(summary);
    let of = |summary: &slabwise::Summary| {
        let mut layers: Vec<(String, u64)> = summary
            .layers
            .iter()
            .map(|l| (l.name.clone(), l.parameters))
            .collect();
        layers.retain(|(_, parameters)| *parameters > 0);
        layers.sort();
        layers
    };
    assert_eq!(of(&quantized), of(&floats));
    // Half a byte for each number, and 4 bytes and half of one for a block of 32; 96 biases.
    let zeros = 96 + 50;
    let bytes = (96 + 50) * (32 + 2 * 4) + zeros + 96 * 4;
    assert_eq!(quantized.total.parameter_bytes, bytes);
}

#[test]
fn uses_of_quantized_weights_as_others_are_refused() {
    let said = |build: &dyn for<'t> Fn(&Params, &'t Trace, Tensor<'t>) -> Tensor<'t>| {
        let (params, trace) = (Params::seeded(0), Trace::training());
        let y = build(&params, &trace, trace.input("x", F32, (3, 64)));
        let error = session(params, 1).compile(&trace, [y]).err();
        error.expect("a mistake").to_string()
    };
    let layer =
        |params: &Params| Linear::without_bias(params.root().quantized(FOUR_BITS) / "l", 64, 8);
    let errors = [
        said(&|params, trace, x| {
            let loss = x.apply(&layer(params)).square().mean();
            trace.minimize(loss, AdamW::new(0.01));
            loss
        }),
        said(&|params, trace, x| {
            let state = trace.statistic(layer(params).weight());
            state.set(state.value() * 0.5);
            x
        }),
        said(&|params, _, x| {
            let plain = Linear::without_bias(params.root() / "l", 64, 8);
            x.apply(&plain) + x.apply(&layer(params))
        }),
        said(&|params, trace, x| {
            let scales = params
                .root()
                .param("l.weight.scales", (8, 2), Init::Constant(1.0));
            x.apply(&layer(params)) + trace.param(&scales).sum()
        }),
    ];
    let expected = [
        "minimize: the loss has no gradient with respect to any parameter; quantized weights do not learn (\"l.weight\"), but an adapter beside them does, see LoraLinear",
        "\"l.weight\" is a quantized parameter: no step changes it",
        "\"l.weight\" is declared as 4 bits in blocks of 32 [8, 64], and as [8, 64] at ",
        "\"l.weight.scales\" is declared as a part of the quantized \"l.weight\", f32 [8, 2] and as parameter f32 [8, 2]",
    ];
    for (error, expected) in errors.iter().zip(expected) {
        assert!(
            error.contains(expected) && error.contains("quantized.rs:"),
            "{error}"
        );
    }
}
