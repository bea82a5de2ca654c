//! Models of published wheels against onnxruntime: Basic Pitch (notes of music), Magika (types of
//! files) and two files of Silero VAD (speech). `real.py` downloads them and records its results;
//! `arena.txt`, which `arena.py` wrote, has the memory that it takes.

use std::path::{Path, PathBuf};
use std::{fs, thread};

use slabwise::data::HostArray;
use slabwise::feed::Input;
use slabwise::prelude::*;
use slabwise::{Bytes, CompileOptions, Isa};
use slabwise_onnx::check::{CheckOptions, difference, read_array};
use slabwise_onnx::{Array, OnnxModel};

use crate::{cases, made};

/// The folder of the models.
fn models() -> Option<PathBuf> {
    let packages = "pip, a network and the packages onnx 1.23.2, onnxruntime 1.32.0 and numpy";
    made("real.py", "onnx-real", packages)
}

/// The arrays of a kind in a folder, in their order.
pub fn arrays(folder: &Path, kind: &str) -> Vec<Array> {
    let paths = (0..).map(|at| folder.join(format!("{kind}_{at}.pb")));
    paths
        .take_while(|path| path.exists())
        .map(|path| read_array(&path).expect("an array"))
        .collect()
}

/// A model for these inputs.
fn sized(path: &Path, inputs: &[Array]) -> OnnxModel {
    let mut model = OnnxModel::load(path).expect("a model");
    let names: Vec<String> = model.inputs().iter().map(|i| i.name.clone()).collect();
    assert_eq!(names.len(), inputs.len());
    for (name, array) in names.iter().zip(inputs) {
        model = match array.element.is_float() {
            true => model.with_shape(name, &array.shape),
            false => model.with_value(name, array.clone()),
        };
    }
    model
}

/// Runs a model on the inputs of a folder, compares with its outputs, and the measured memory with
/// the plan.
fn check(path: &Path, set: &Path, options: &CheckOptions) {
    let inputs = arrays(set, "input");
    let expected = arrays(set, "output");
    let model = sized(path, &inputs);
    let (params, trace) = (Params::seeded(0), Trace::inference());
    let tensors = model.declare(&trace).expect("all lengths are known");
    let values = model.values(&trace, &params.root(), &tensors);
    let (elements, outputs): (Vec<_>, Vec<_>) =
        values.expect("it is expressed").into_iter().unzip();
    let mut session = Session::new(Device::Cpu, params)
        .expect("a session")
        .with_threads(options.threads);
    let program = session.compile_any(&trace, &outputs).expect("it compiles");
    model.load_weights(&mut session).expect("they fit");
    let hosts: Vec<HostArray> = inputs
        .iter()
        .map(|array| array.to_host().expect("it is held"))
        .collect();
    let feed: Vec<&dyn Input> = hosts.iter().map(|host| host as &dyn Input).collect();
    let results = session.run_any(&program, &feed[..]).expect("it runs");
    assert_eq!(results.len(), expected.len());
    let names = model.outputs();
    for (at, (result, element)) in results.iter().zip(elements).enumerate() {
        let host = result.to_host().expect("it is read");
        let array = Array::of_host(&host, element).expect("of this type");
        if let Some(text) = difference(&array, &expected[at], options) {
            panic!("{}: {}: {text}", set.display(), names[at]);
        }
    }
    drop(results);
    assert_eq!(
        session.last_run().peak_slab_bytes,
        program.plan().slab_bytes(),
        "{}: planned and measured",
        set.display()
    );
}

/// The folders of inputs and outputs of a model.
pub fn sets(folder: &Path) -> Vec<PathBuf> {
    let sets = (0..).map(|at| folder.join(format!("test_data_set_{at}")));
    sets.take_while(|set| set.exists()).collect()
}

#[test]
fn models_of_wheels_give_the_results_of_onnxruntime() {
    let Some(root) = models() else { return };
    for (name, runs, rtol, atol) in [
        ("basic_pitch", 1, 1e-4, 1e-5),
        // onnxruntime is off by up to 0.3 % here: in f64 an element is 0.026603, where it gives
        // 0.026572 and this crate 0.026604.
        ("magika", 1, 1e-3, 1e-5),
        ("silero_opset18", 3, 1e-4, 1e-5),
        ("silero_sequence", 2, 1e-4, 1e-5),
    ] {
        let options = CheckOptions {
            rtol,
            atol,
            threads: thread::available_parallelism().map_or(1, Into::into),
            narrow: false,
        };
        let sets = sets(&root.join(name));
        assert_eq!(sets.len(), runs, "{name}");
        for set in sets {
            check(&root.join(name).join("model.onnx"), &set, &options);
        }
    }
}

/// Bytes of the slab, of weights and constants, and of the inputs of a model for the inputs of a
/// folder, with an instruction set.
fn planned(path: &Path, set: &Path, isa: Isa) -> [u64; 3] {
    let inputs = arrays(set, "input");
    let model = sized(path, &inputs);
    let (params, trace) = (Params::seeded(0), Trace::inference());
    let tensors = model.declare(&trace).expect("all lengths are known");
    let outputs = model.trace(&trace, &params.root(), &tensors);
    let session = Session::new(Device::Cpu, params)
        .expect("a session")
        .with_threads(1)
        .with_options(CompileOptions {
            isa: Some(isa),
            ..CompileOptions::default()
        });
    let plan = session
        .plan_any(&trace, &outputs.expect("it is expressed"))
        .expect("a plan");
    let kept = plan.persistent().weights + plan.persistent().state;
    let fed = tensors.iter().zip(&inputs);
    let fed = fed.map(|(tensor, array)| (array.len() * tensor.dtype().bytes()) as u64);
    [plan.slab_bytes(), kept, fed.sum()]
}

/// Further runs whose slab is larger than the peak would be if each request took only the bytes
/// that it asks for, or on some processors may be.
const ABOVE_EXACT: &[&str] = &["light_densenet121/0", "light_vgg19/0"];

/// On every instruction set of the machine the slab, which holds inputs too, is smaller than the
/// most bytes that the arena has in use at once beyond its weights, and the inputs. The weights are
/// not compared, because some of onnxruntime's are kept outside of its arena.
#[test]
fn plans_stay_below_the_arena_of_onnxruntime() {
    let (Some(cases), Some(real)) = (cases(), models()) else {
        return;
    };
    let recorded = Path::new(env!("CARGO_MANIFEST_DIR")).join("arena.txt");
    let recorded = fs::read_to_string(recorded).expect("it was recorded");
    let rows = recorded.lines().filter(|line| !line.starts_with('#'));
    let (mut above, mut above_exact) = (Vec::new(), Vec::new());
    eprintln!(
        "| run | instructions | slab | arena and inputs | exact | slab and weights | taken |"
    );
    for row in rows {
        let fields: Vec<&str> = row.split(' ').collect();
        let [run, loaded, peak, taken, exact] = fields[..] else {
            panic!("{row}: five fields");
        };
        let [loaded, peak, taken, exact]: [u64; 4] =
            [loaded, peak, taken, exact].map(|text| text.parse().expect("a number of bytes"));
        let (name, set) = run.split_once('/').expect("the name of a run");
        let kind = match name.starts_with("light_") {
            true => cases.join("light"),
            false => real.clone(),
        };
        let folder = kind.join(name);
        let set = folder.join(format!("test_data_set_{set}"));
        for isa in Isa::available() {
            let [slab, kept, inputs] = planned(&folder.join("model.onnx"), &set, isa);
            let (usual, exact) = (peak - loaded + inputs, exact + inputs);
            let shown = [slab, usual, exact, slab + kept, taken].map(|n| Bytes(n).to_string());
            eprintln!("| `{run}` | {isa} | {} |", shown.join(" | "));
            if slab > usual {
                above.push((run, isa));
            } else if slab > exact {
                above_exact.push((run, isa));
            }
        }
    }
    assert!(above.is_empty(), "runs above its peak: {above:?}");
    above_exact.retain(|(run, _)| !ABOVE_EXACT.contains(run));
    assert!(
        above_exact.is_empty(),
        "runs above its exact peak: {above_exact:?}"
    );
}
