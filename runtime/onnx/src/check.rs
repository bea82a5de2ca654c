//! Comparison of a model's results with recorded ones, in the layout of ONNX's own tests: beside
//! `model.onnx`, folders with `input_0.pb`, … and `output_0.pb`, ….

use std::cmp::Ordering;
use std::path::Path;

use slabwise::data::HostArray;
use slabwise::feed::Input;
use slabwise::{Device, Params, Session, Trace};

use crate::array::{Array, Data};
use crate::element::Element;
use crate::error::{Error, Result};
use crate::file;
use crate::model::OnnxModel;
use crate::proto::TensorProto;

/// Tolerances of a comparison.
#[derive(Clone, Copy, Debug)]
pub struct CheckOptions {
    /// Relative to the expected value.
    pub rtol: f64,
    /// Absolute.
    pub atol: f64,
    /// The number of threads that kernels use.
    pub threads: usize,
    /// Whether f64 may be computed in f32.
    pub narrow: bool,
}

impl Default for CheckOptions {
    fn default() -> Self {
        CheckOptions {
            rtol: 1e-3,
            atol: 1e-5,
            threads: 1,
            narrow: false,
        }
    }
}

/// The result of a comparison.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// All outputs are within the tolerances.
    Match,
    /// The differences, a line for each output that has some.
    Differ(Vec<String>),
}

/// The array in a `.pb` file.
///
/// # Errors
/// A file that cannot be read or holds no array.
pub fn read_array(path: &Path) -> Result<Array> {
    let tensor: TensorProto = file::message(path)?;
    let external = |_: &_| Err("its data lies in another file".into());
    Array::of_proto(&tensor, &external).map_err(|message| Error::File {
        path: path.into(),
        message,
    })
}

fn numbered(folder: &Path, kind: &str) -> Result<Vec<Array>> {
    let paths = (0..).map(|at| folder.join(format!("{kind}_{at}.pb")));
    paths
        .take_while(|path| path.exists())
        .map(|path| read_array(&path))
        .collect()
}

/// Runs a model on the inputs of a folder, and compares with its outputs. Lengths of named
/// dimensions are those of the arrays. Integer and boolean inputs, and floats of a few elements, are
/// also given as values, for operators that must know them.
///
/// # Errors
/// A file that cannot be read, nodes that cannot be expressed, and errors of the run.
pub fn check_case(model: &Path, folder: &Path, options: &CheckOptions) -> Result<Verdict> {
    compare(|| OnnxModel::load(model), folder, options)
}

/// [`check_case`] for a model that is loaded. Inputs with a dimension that
/// [`OnnxModel::with_dim`] has set keep its length or bound, and are not given as values.
///
/// # Errors
/// As [`check_case`].
pub fn check_model(model: OnnxModel, folder: &Path, options: &CheckOptions) -> Result<Verdict> {
    compare(|| Ok(model), folder, options)
}

fn compare(
    model: impl FnOnce() -> Result<OnnxModel>,
    folder: &Path,
    options: &CheckOptions,
) -> Result<Verdict> {
    let inputs = numbered(folder, "input")?;
    let expected = numbered(folder, "output")?;
    if expected.is_empty() {
        // The system's reason, if the folder cannot be read.
        let found = std::fs::read_dir(folder).map(|_| ());
        return Err(match found {
            Err(source) => Error::Io {
                path: folder.into(),
                source,
            },
            Ok(()) => Error::File {
                path: folder.into(),
                message: "has no output_0.pb to compare with".into(),
            },
        });
    }
    let results = run(model()?, &inputs, options)?;
    if results.len() != expected.len() {
        return Err(Error::Input(format!(
            "the model has {} outputs, the folder {}",
            results.len(),
            expected.len()
        )));
    }
    let differences: Vec<String> = results
        .iter()
        .zip(&expected)
        .filter_map(|((name, result), expected)| {
            difference(result, expected, options).map(|text| format!("{name}: {text}"))
        })
        .collect();
    Ok(match differences.is_empty() {
        true => Verdict::Match,
        false => Verdict::Differ(differences),
    })
}

/// Runs a model once, on these inputs in its order; its results with their names.
///
/// # Errors
/// As [`check_case`].
pub fn run(
    model: OnnxModel,
    inputs: &[Array],
    options: &CheckOptions,
) -> Result<Vec<(String, Array)>> {
    let infos = model.inputs().to_vec();
    if infos.len() != inputs.len() {
        return Err(Error::Input(format!(
            "the model has {} inputs, {} are given",
            infos.len(),
            inputs.len()
        )));
    }
    let mut model = model.with_narrow(options.narrow);
    for (info, array) in infos.iter().zip(inputs) {
        model = match array.element.is_float() && array.len() > FEW {
            _ if model.has_dim_of(info) => model,
            true => model.with_shape(&info.name, &array.shape),
            false => model.with_value(&info.name, array.clone()),
        };
    }
    let params = Params::seeded(0);
    let trace = Trace::inference();
    let tensors = model.declare(&trace)?;
    let values = model.values(&trace, &params.root(), &tensors)?;
    let (elements, outputs): (Vec<_>, Vec<_>) = values.into_iter().unzip();
    let mut session = Session::new(Device::Cpu, params)?.with_threads(options.threads);
    let program = session.compile_any(&trace, &outputs)?;
    model.load_weights(&mut session)?;
    let hosts = inputs.iter().map(Array::to_host);
    let hosts: Vec<HostArray> = hosts.collect::<Result<_, String>>().map_err(Error::Input)?;
    let feed: Vec<&dyn Input> = hosts.iter().map(|host| host as &dyn Input).collect();
    let results = session.run_any(&program, &feed[..])?;
    let named = model
        .outputs()
        .into_iter()
        .zip(results.iter().zip(elements));
    named
        .map(|(name, (result, element))| {
            let array = Array::of_host(&result.to_host()?, element);
            Ok((name.to_string(), array.map_err(Error::Input)?))
        })
        .collect()
}

/// The most elements of a float input that is given as a value too.
const FEW: usize = 16;

/// The first difference beyond the tolerances, in words. Halves may differ by a unit in the last
/// place more, because neighbours are the least that two roundings can differ by.
pub fn difference(result: &Array, expected: &Array, options: &CheckOptions) -> Option<String> {
    if result.element != expected.element {
        return Some(format!("{}, not {}", result.element, expected.element));
    }
    if result.shape != expected.shape {
        return Some(format!(
            "shape {:?}, not {:?}",
            result.shape, expected.shape
        ));
    }
    let CheckOptions { rtol, atol, .. } = *options;
    let unit = |b: f64| match expected.element {
        Element::F16 => (b.abs() * 2f64.powi(-10)).max(2f64.powi(-24)),
        Element::BF16 => b.abs() * 2f64.powi(-7),
        _ => 0.0,
    };
    let differs = |a: f64, b: f64| match (a.is_nan(), b.is_nan()) {
        (true, true) => false,
        (false, false) if a == b => false,
        _ => {
            (a - b)
                .abs()
                .partial_cmp(&(atol + rtol * b.abs() + unit(b)))
                != Some(Ordering::Less)
        }
    };
    let (places, found, wanted): (Vec<usize>, Vec<f64>, Vec<f64>) =
        match (&result.data, &expected.data) {
            (Data::Int(a), Data::Int(b)) => {
                let places = (0..a.len()).filter(|&i| a[i] != b[i]).collect();
                (places, result.to_floats(), expected.to_floats())
            }
            _ => {
                let (a, b) = (result.to_floats(), expected.to_floats());
                (
                    (0..a.len()).filter(|&i| differs(a[i], b[i])).collect(),
                    a,
                    b,
                )
            }
        };
    let &first = places.first()?;
    Some(format!(
        "{} of {} elements differ; element {first} is {}, not {}",
        places.len(),
        found.len(),
        found[first],
        wanted[first]
    ))
}
