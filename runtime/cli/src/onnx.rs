//! `slabwise plan MODEL.onnx` and `slabwise run MODEL.onnx`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::str::FromStr;
use std::time::Instant;

use serde_json::json;
use slabwise::data::{HostArray, npy};
use slabwise::feed::Input;
use slabwise::shape::Dim;
use slabwise::{Bytes, Device, Error, Params, Result, Session, Trace};
use slabwise_onnx::check::{CheckOptions, Verdict, check_model};
use slabwise_onnx::{Array, Axis, InputInfo, OnnxModel};
use slabwise_planner::brief;

use crate::arguments::{FileOptions, NamedLength, tolerance};
use crate::output::{bad_input, line, save};
use crate::plan;

/// An error of the importer as one of the command line.
fn failed(path: &Path, error: slabwise_onnx::Error) -> Error {
    match error {
        slabwise_onnx::Error::Runtime(error) => error,
        slabwise_onnx::Error::Io { path, source } => Error::Io { path, source },
        error @ slabwise_onnx::Error::File { .. } => Error::Value(error.to_string()),
        error => Error::Value(format!("{}: {error}", path.display())),
    }
}

/// The model of an ONNX file, with the lengths that the options give.
fn load(path: &Path, options: &FileOptions) -> slabwise_onnx::Result<OnnxModel> {
    let model = OnnxModel::load(path)?.with_narrow(options.narrow);
    for (at, dim) in options.dims.iter().enumerate() {
        if options.dims[..at]
            .iter()
            .any(|other| other.name == dim.name)
        {
            let twice = format!("--dim {}: the dimension is given twice", dim.name);
            return Err(slabwise_onnx::Error::Input(twice));
        }
        let known = model.inputs().iter().any(|input| {
            let mut axes = input.axes.iter().flatten();
            axes.any(|axis| matches!(axis, Axis::Named(name) if *name == dim.name))
        });
        if !known {
            let open = model.open_dims().join(", ");
            let open = if open.is_empty() { "none".into() } else { open };
            return Err(slabwise_onnx::Error::Input(format!(
                "--dim {}={}{}: the inputs have no dimension of that name; open ones: {open}",
                dim.name,
                if dim.bounded { ".." } else { "" },
                dim.length
            )));
        }
    }
    let dims = options.dims.iter();
    Ok(dims.fold(model, |model, dim| {
        let length = match dim.bounded {
            true => Dim::bounded(Dim::name(&dim.name), dim.length),
            false => dim.length.into(),
        };
        model.with_dim(&dim.name, length)
    }))
}

/// The length that the options give an axis.
fn length<'o>(axis: &Axis, options: &'o FileOptions) -> Option<&'o NamedLength> {
    let Axis::Named(name) = axis else { return None };
    options.dims.iter().find(|dim| dim.name == *name)
}

/// The dimension of an axis for which the options give a bound.
fn bound<'o>(axis: &Axis, options: &'o FileOptions) -> Option<&'o NamedLength> {
    length(axis, options).filter(|dim| dim.bounded)
}

/// The shape that the model and the options declare for an input, if an array does not have it.
fn misfit(info: &InputInfo, shape: &[usize], options: &FileOptions) -> Option<String> {
    let axes = info.axes.as_ref()?;
    let fits = |(axis, &n): (&Axis, &usize)| match (axis, length(axis, options)) {
        (Axis::Fixed(expected), _) => n == *expected,
        (_, Some(dim)) if dim.bounded => n <= dim.length as usize,
        (_, Some(dim)) => n == dim.length as usize,
        _ => true,
    };
    if axes.len() == shape.len() && axes.iter().zip(shape).all(fits) {
        return None;
    }
    let shown = axes.iter().map(|axis| match (axis, length(axis, options)) {
        (Axis::Fixed(n), _) => n.to_string(),
        (_, Some(dim)) if dim.bounded => format!("..{}", dim.length),
        (_, Some(dim)) => dim.length.to_string(),
        (Axis::Named(name), None) => name.clone(),
        (Axis::Unknown, None) => "?".into(),
    });
    Some(format!("[{}]", shown.collect::<Vec<_>>().join(", ")))
}

/// Plans the model of an ONNX file.
pub fn plan(args: &plan::Args, path: &Path) -> Result<ExitCode> {
    let failed = |error| failed(path, error);
    let model = match load(path, &args.file) {
        Ok(model) => model,
        Err(error @ (slabwise_onnx::Error::File { .. } | slabwise_onnx::Error::Io { .. })) => {
            return bad_input(error);
        }
        Err(error) => return Err(failed(error)),
    };
    let params = Params::seeded(0);
    let session = Session::new(args.device, params.clone())?
        .with_budget(args.budget)
        .with_offload(args.offload);
    let mut session = session.with_options(args.rounding.options());
    if let Some(folder) = &args.dump {
        session = session.with_dump(folder);
    }
    let name = path.file_stem().unwrap_or_default().to_string_lossy();
    let trace = match args.train {
        Some(_) => Trace::training(),
        None => Trace::inference(),
    };
    let trace = trace.named(&name).with_precision(args.rounding.dtype);
    let inputs = model.declare(&trace).map_err(failed)?;
    let mut outputs = model
        .trace(
            &trace,
            &params.root().stored_in(args.rounding.weights.dtype()),
            &inputs,
        )
        .map_err(failed)?;
    if let Some(kind) = args.train {
        let first = outputs
            .first()
            .ok_or_else(|| Error::Value("the model has no output".into()))?;
        let loss = first.cast(slabwise::DType::F32).square().mean();
        trace.minimize(loss, kind.optimizer());
        outputs = vec![loss];
    }
    let plan = session.plan_any(&trace, &outputs)?;
    if let Some(path) = &args.svg {
        save(path, plan.svg().as_bytes())?;
    }
    if let Some(path) = &args.html {
        let none = Err("`slabwise run` runs a model file");
        save(path, plan.html(none).as_bytes())?;
    }
    if args.json {
        let mut report = plan::report(&plan, &name, args.batch());
        if let Some(report) = report.as_object_mut() {
            report.remove("batch");
            let dims = args.file.dims.iter();
            let dims = dims
                .map(|dim| match dim.bounded {
                    true => (dim.name.clone(), json!({ "max": dim.length })),
                    false => (dim.name.clone(), dim.length.into()),
                })
                .collect();
            report.insert("dims".into(), serde_json::Value::Object(dims));
            if args.kernels {
                report.insert("kernel_names".into(), plan.steps().collect());
            }
        }
        line(report)?;
        return Ok(ExitCode::SUCCESS);
    }
    line(&name)?;
    line(&plan)?;
    if args.kernels {
        for (at, name) in plan.steps().enumerate() {
            line(format_args!("{at:>5}  {name}"))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// A file of an input's values, as users write it.
#[derive(Clone, Debug)]
pub struct InputFile {
    name: String,
    path: PathBuf,
}

impl FromStr for InputFile {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once('=') {
            Some((name, path)) if !name.is_empty() && !path.is_empty() => Ok(InputFile {
                name: name.into(),
                path: path.into(),
            }),
            _ => Err(format!(
                "`{}` is not of the form NAME=FILE.npy",
                brief(text)
            )),
        }
    }
}

#[derive(clap::Args)]
pub struct Args {
    /// An ONNX file
    model: PathBuf,
    /// The values of an input, as an array of NumPy
    #[arg(long = "input", value_name = "NAME=FILE.npy")]
    inputs: Vec<InputFile>,
    /// Random values for all other inputs: floats from a normal distribution, integers 0 and 1
    #[arg(long, value_name = "SEED")]
    random_inputs: Option<u64>,
    #[command(flatten)]
    file: FileOptions,
    /// Write each output as NAME.npy into this folder, integers of 64 bits and double in that type,
    /// all else in the type it is computed in: narrower integers as int32
    #[arg(short, long, value_name = "DIR")]
    output: Option<PathBuf>,
    /// Compare with the arrays output_N.pb of a folder, given its arrays input_N.pb, whose lengths
    /// the model has where --dim gives no bound; exit 1 if they differ
    #[arg(long, value_name = "DIR", conflicts_with_all = ["inputs", "random_inputs", "output", "runs"])]
    check: Option<PathBuf>,
    /// With --check: the largest difference relative to the expected value
    #[arg(long, default_value_t = 1e-3, value_parser = tolerance, allow_negative_numbers = true)]
    rtol: f64,
    /// With --check: the largest absolute difference
    #[arg(long, default_value_t = 1e-5, value_parser = tolerance, allow_negative_numbers = true)]
    atol: f64,
    /// How often to run. The time is the median of all runs but the first
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    runs: u32,
    /// auto, cpu or cuda:N
    #[arg(long, default_value = "auto")]
    device: Device,
    /// One JSON object instead of text
    #[arg(long)]
    json: bool,
}

/// The file of an output, whose name may have the form of a path.
fn file_name(output: &str) -> String {
    format!("{}.npy", output.replace(['/', '\\', ':'], "_"))
}

/// Runs the model of an ONNX file.
pub fn run(args: &Args) -> Result<ExitCode> {
    match &args.check {
        Some(folder) => check(args, folder),
        None => feed(args),
    }
}

fn check(args: &Args, folder: &Path) -> Result<ExitCode> {
    let threads = std::thread::available_parallelism().map_or(1, Into::into);
    let options = CheckOptions {
        rtol: args.rtol,
        atol: args.atol,
        threads,
        narrow: args.file.narrow,
    };
    let model = load(&args.model, &args.file);
    let verdict = match model.and_then(|model| check_model(model, folder, &options)) {
        Ok(verdict) => verdict,
        Err(error @ (slabwise_onnx::Error::File { .. } | slabwise_onnx::Error::Io { .. })) => {
            return bad_input(error);
        }
        Err(error) => return Err(failed(&args.model, error)),
    };
    let differences = match &verdict {
        Verdict::Match => Vec::new(),
        Verdict::Differ(lines) => lines.clone(),
    };
    let matches = differences.is_empty();
    if args.json {
        line(json!({ "match": matches, "differences": differences }))?;
    } else if matches {
        line("all outputs match")?;
    } else {
        differences.iter().try_for_each(line)?;
    }
    Ok(match matches {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}

fn feed(args: &Args) -> Result<ExitCode> {
    let path = &args.model;
    let failed = |error| failed(path, error);
    let mut model = match load(path, &args.file) {
        Ok(model) => model,
        Err(error @ (slabwise_onnx::Error::File { .. } | slabwise_onnx::Error::Io { .. })) => {
            return bad_input(error);
        }
        Err(error) => return Err(failed(error)),
    };
    if args.output.is_some() {
        let mut files = Vec::new();
        for name in model.outputs() {
            if let Some((_, other)) = files.iter().find(|(file, _)| *file == file_name(name)) {
                return bad_input(format!(
                    "--output: the outputs \"{other}\" and \"{name}\" have one file name, {}",
                    file_name(name)
                ));
            }
            files.push((file_name(name), name));
        }
    }
    let infos = model.inputs().to_vec();
    let mut given = Vec::new();
    for input in &args.inputs {
        let Some(info) = infos.iter().find(|info| info.name == input.name) else {
            let names: Vec<&str> = infos.iter().map(|info| &*info.name).collect();
            return bad_input(format!(
                "--input {}: the model's inputs are {}",
                input.name,
                names.join(", ")
            ));
        };
        let array = match npy::read(&input.path) {
            Ok(array) => array,
            Err(error) => return bad_input(error),
        };
        if array.dtype() != info.element.dtype() {
            return bad_input(format!(
                "--input {}: {} holds {}, the model expects {}",
                input.name,
                input.path.display(),
                array.dtype(),
                info.element
            ));
        }
        if let Some(expected) = misfit(info, array.shape(), &args.file) {
            return bad_input(format!(
                "--input {}: {} has the shape {:?}, the model expects {expected}",
                input.name,
                input.path.display(),
                array.shape()
            ));
        }
        if given.iter().any(|(name, _)| *name == input.name) {
            return bad_input(format!("--input {} is given twice", input.name));
        }
        let value = Array::of_host(&array, info.element).map_err(Error::Value)?;
        let mut axes = info.axes.iter().flatten();
        let bounded = axes.any(|axis| bound(axis, &args.file).is_some());
        model = match info.element.is_float() {
            // Planned for the bound, run at the length of the array.
            _ if bounded => model,
            true => model.with_shape(&input.name, array.shape()),
            false => model.with_value(&input.name, value),
        };
        given.push((input.name.clone(), array));
    }
    let params = Params::seeded(0);
    let trace = Trace::inference();
    let tensors = model.declare(&trace).map_err(failed)?;
    let fed_by_hand = |name: &str| given.iter().any(|(given, _)| given == name);
    if let (None, Some(info)) = (
        args.random_inputs,
        infos.iter().find(|info| !fed_by_hand(&info.name)),
    ) {
        return bad_input(format!(
            "the input \"{}\" has no values: --input {}=FILE.npy, or --random-inputs SEED for all",
            info.name, info.name
        ));
    }
    let values = model
        .values(&trace, &params.root(), &tensors)
        .map_err(failed)?;
    let (elements, outputs): (Vec<_>, Vec<_>) = values.into_iter().unzip();
    let mut session = Session::new(args.device, params)?;
    let program = session.compile_any(&trace, &outputs)?;
    let mut feeds: Vec<HostArray> = Vec::new();
    for (at, (info, tensor)) in infos.iter().zip(&tensors).enumerate() {
        if let Some((_, array)) = given.iter().find(|(name, _)| *name == info.name) {
            feeds.push(array.clone());
            continue;
        }
        let seed = args.random_inputs.unwrap_or_default();
        // A bounded axis has the length that an array gives its name, or else the bound.
        let of_array = |dim: &NamedLength| {
            given.iter().find_map(|(name, array)| {
                let axes = infos
                    .iter()
                    .find(|info| info.name == *name)?
                    .axes
                    .as_ref()?;
                let named = |axis: &Axis| matches!(axis, Axis::Named(name) if *name == dim.name);
                array.shape().get(axes.iter().position(named)?).copied()
            })
        };
        let shape: Vec<usize> = (0..tensor.rank())
            .filter_map(|axis| {
                tensor.len(axis).or_else(|| {
                    let dim = bound(info.axes.as_ref()?.get(axis)?, &args.file)?;
                    Some(of_array(dim).unwrap_or(dim.length as usize))
                })
            })
            .collect();
        feeds.push(
            random(info.element, &shape, seed.wrapping_add(at as u64)).map_err(Error::Value)?,
        );
    }
    model.load_weights(&mut session).map_err(failed)?;
    let fed: Vec<&dyn Input> = feeds.iter().map(|array| array as &dyn Input).collect();
    let mut times = Vec::new();
    for _ in 1..args.runs {
        let started = Instant::now();
        session.run_any(&program, &fed[..])?;
        times.push(started.elapsed().as_secs_f64());
    }
    let started = Instant::now();
    let results = session.run_any(&program, &fed[..])?;
    times.push(started.elapsed().as_secs_f64());
    let first = usize::from(times.len() > 1);
    times[first..].sort_by(f64::total_cmp);
    let seconds = times[first + (times.len() - first) / 2];
    let mut shown = Vec::new();
    for ((name, result), element) in model.outputs().iter().zip(&results).zip(elements) {
        let host = result.to_host()?;
        let declared = Array::of_host(&host, element).map_err(Error::Value)?;
        shown.push((name.to_string(), element, host, declared));
    }
    if let Some(folder) = &args.output {
        std::fs::create_dir_all(folder).map_err(|source| Error::Io {
            path: folder.clone(),
            source,
        })?;
        for (name, element, host, declared) in &shown {
            let bytes = match element.bytes() {
                8 => declared.to_npy64(),
                _ => npy::to_bytes(host),
            };
            save(&folder.join(file_name(name)), &bytes)?;
        }
    }
    let plan = program.plan();
    let persistent = plan.persistent();
    let peak = plan.slab_bytes() + persistent.weights + persistent.state;
    if args.json {
        let outputs = shown.iter().map(|(name, element, host, _)| {
            json!({ "name": name, "type": element.name(), "shape": host.shape() })
        });
        line(json!({
            "outputs": outputs.collect::<Vec<_>>(),
            "slab_bytes": plan.slab_bytes(),
            "persistent_bytes": persistent.weights + persistent.state,
            "peak_bytes": peak,
            "runs": args.runs,
            "run_s": seconds,
        }))?;
    } else {
        for (name, element, host, _) in &shown {
            line(format_args!("{name}: {element} {:?}", host.shape()))?;
        }
        line(format_args!(
            "peak {} (slab {}, weights {}) · {:.3} s",
            Bytes(peak),
            Bytes(plan.slab_bytes()),
            Bytes(persistent.weights + persistent.state),
            seconds
        ))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Values from a generator that gives the same ones for the same seed: normal floats, integers and
/// truth values of 0 and 1.
fn random(
    element: slabwise_onnx::Element,
    shape: &[usize],
    seed: u64,
) -> Result<HostArray, String> {
    use slabwise_onnx::Data;
    // Room for the values, a copy of them and the array that is made of both.
    let room = |&n: &usize| {
        n.checked_mul(3)
            .map(|n| Vec::<f64>::new().try_reserve_exact(n))
    };
    let n = shape.iter().try_fold(1usize, |n, &len| n.checked_mul(len));
    let n = n.filter(|n| matches!(room(n), Some(Ok(()))));
    let n = n.ok_or_else(|| format!("there is no memory for random values of shape {shape:?}"))?;
    let mut state = seed;
    // SplitMix64 (Steele, Lea & Flood 2014).
    let mut next = || {
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    };
    let data = match element.is_float() {
        true => {
            let mut unit = || (next() >> 11) as f64 / (1u64 << 53) as f64;
            // Box and Muller (1958).
            let normal = (0..n).map(|_| {
                let (a, b) = (unit(), unit());
                (-2.0 * (1.0 - a).ln()).sqrt() * (std::f64::consts::TAU * b).cos()
            });
            Data::Float(normal.collect())
        }
        false => Data::Int((0..n).map(|_| (next() & 1) as i64).collect()),
    };
    let array = Array {
        element,
        shape: shape.to_vec(),
        data,
    };
    array.to_host()
}
