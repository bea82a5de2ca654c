//! Layout padding on a GPU where one is required, else on a driver without a device: the same bits
//! with padded rows and without, every byte accounted for, and vectors where rows are padded.

#[path = "../../support/splitmix.rs"]
mod splitmix;

use ndarray::Array2;
use slabwise::prelude::*;
use slabwise::{CompileOptions, PaddingReport, Precision, RowPadding, Tuning};
use slabwise_cuda::fake::{FakeDriver, TestDevice};
use splitmix::Rng;

/// A session that times no products.
fn session(row_padding: RowPadding, tf32: bool) -> Session {
    let options = CompileOptions {
        row_padding,
        tf32,
        tuning: Tuning::Off,
        ..CompileOptions::default()
    };
    Session::new(Device::Cuda(0), Params::seeded(0))
        .expect("a session")
        .with_threads(1)
        .with_options(options)
}

fn numbers(shape: [usize; 2]) -> Array2<f32> {
    Array2::from_shape_fn(shape, |(i, j)| ((i * 31 + j * 17) as f32).sin())
}

/// A value of a network, and its shape.
#[derive(Clone, Copy)]
struct Value<'t> {
    tensor: Tensor<'t>,
    shape: [usize; 2],
}

/// A random network of products, pointwise operations, views and reductions over rows of odd
/// lengths, and its gradients: its inputs and its outputs.
fn network(trace: &Trace, seed: u64) -> ([Value<'_>; 2], [Tensor<'_>; 4]) {
    let mut rng = Rng(seed);
    let [rows, inner, columns] = [9 + rng.below(20), 5 + rng.below(30), 33 + rng.below(40)];
    let input = |name: &str, shape: [usize; 2]| Value {
        tensor: trace.input(name, F32, (shape[0], shape[1])),
        shape,
    };
    let [x, w] = [input("x", [rows, inner]), input("w", [inner, columns])];
    let first = Value {
        tensor: x.tensor.tanh().matmul(w.tensor.tanh()),
        shape: [rows, columns],
    };
    let mut values = vec![x, first];
    for _ in 0..7 {
        let [value, other] = [0; 2].map(|_| values[rng.below(values.len())]);
        let (it, [rows, width]) = (value.tensor, value.shape);
        let (next, shape) = match rng.below(8) {
            0 => (it.t().matmul(it), [width, width]),
            1 => (it.matmul(it.t()).softmax(1), [rows, rows]),
            2 => (it.softmax(1), [rows, width]),
            3 if width > 8 => (it.slice(1, 3..width) * 0.5, [rows, width - 3]),
            4 => (trace.concat(&[it, it.exp()], 1), [rows, 2 * width]),
            5 => (it.t() + 0.25, [width, rows]),
            6 => (it - it.mean_over(1).unsqueeze(1), [rows, width]),
            _ if other.shape[0] == rows => (it.t().matmul(other.tensor), [width, other.shape[1]]),
            _ => (it.gelu(), [rows, width]),
        };
        values.push(Value {
            tensor: next.tanh(),
            shape,
        });
    }
    let last = values[values.len() - 1].tensor;
    let squares = values.iter().map(|value| value.tensor.square().mean());
    let loss = squares.fold(last.sum(), |sum, mean| sum + mean);
    let [dx, dw] = trace.gradients(loss, [x.tensor, w.tensor]);
    ([x, w], [loss, last, dx, dw])
}

/// The bits of a network's results, and the padding of its plan.
fn results(seed: u64, padding: RowPadding) -> (Vec<Vec<u32>>, PaddingReport) {
    let precision = Precision::ALL[seed as usize % Precision::ALL.len()];
    let trace = Trace::training().with_precision(precision);
    let (inputs, outputs) = network(&trace, seed);
    let mut session = session(padding, seed.is_multiple_of(2));
    let program = session.compile(&trace, outputs).expect("it compiles");
    let [x, w] = inputs.map(|input| numbers(input.shape));
    let results = session.run(&program, (&x, &w)).expect("a run");
    let bits = results.iter().map(|result| {
        let numbers = result.array::<f32>().expect("floats");
        numbers.iter().map(|x| x.to_bits()).collect()
    });
    let bits = bits.collect();
    assert_eq!(
        session.last_run().peak_slab_bytes,
        program.plan().slab_bytes(),
        "measured is planned\n{}",
        program.plan()
    );
    (bits, program.plan().padding())
}

#[test]
fn padding_changes_no_bit() {
    let Some(_device) = TestDevice::find() else {
        return;
    };
    let mut padded = 0;
    for seed in 0..6 {
        let (off, none) = results(seed, RowPadding::Off);
        let (all, report) = results(seed, RowPadding::All);
        assert_eq!(none, PaddingReport::default());
        assert!(off == all, "seed {seed}: other bits with {report:?}");
        padded += report.values;
    }
    assert!(padded > 6, "{padded} padded values");
}

/// The loader of the left operand of each product in a folder of sources.
fn left_loaders(folder: &std::path::Path) -> Vec<String> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            found.extend(left_loaders(&path));
            continue;
        }
        let text = std::fs::read_to_string(&path).unwrap_or_default();
        let calls = text.split("tile.product<").skip(1);
        found.extend(calls.map(|call| call.splitn(3, ',').take(2).collect::<Vec<_>>().join(",")));
    }
    found
}

/// Of an operand in f16 with rows of 500 bytes the model says that vectors of 16 bytes, instead of 4,
/// gain more than 12 bytes a row cost.
#[test]
fn rows_of_a_product_are_padded_to_vectors() {
    let Some(_driver) = FakeDriver::install() else {
        return;
    };
    let run = |row_padding: RowPadding| {
        let folder = tempfile::tempdir().expect("a folder");
        let mut session = session(row_padding, false).with_dump(folder.path());
        let trace = Trace::inference().with_precision(Precision::F16);
        let (x, w) = (
            trace.input("x", F32, (192, 250)),
            trace.input("w", F32, (250, 256)),
        );
        let program = session
            .compile(&trace, [x.tanh().matmul(w.tanh()).sum_over(0)])
            .expect("it compiles");
        let [sums] = session
            .run(&program, (&numbers([192, 250]), &numbers([250, 256])))
            .expect("a run");
        let sums = sums.array::<f32>().expect("floats");
        let text = program.plan().to_string();
        let report = program.plan().padding();
        (sums, report, text, left_loaders(folder.path()))
    };
    let (off, none, text, loaders) = run(RowPadding::Off);
    assert_eq!(none, PaddingReport::default());
    assert!(!text.contains("padded"), "{text}");
    assert_eq!(loaders, ["true, 2"]);
    let (on, report, text, loaders) = run(RowPadding::Worthwhile);
    let bytes = 192 * 12;
    let expected = PaddingReport {
        values: 1,
        bytes,
        at_peak: bytes,
    };
    assert_eq!(report, expected, "{text}");
    assert!(
        text.contains("  padded       rows of 1 value by 2.2 KiB in all, 2.2 KiB at the peak"),
        "{text}"
    );
    assert_eq!(loaders, ["true, 8"]);
    assert_eq!(on, off);
}
