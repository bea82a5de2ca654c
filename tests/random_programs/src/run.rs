//! Runs cases with slabwise in a given way, and with the reference evaluator.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;

use half::{bf16, f16};
use ndarray::{ArrayD, IxDyn};
use slabwise::feed::Input;
use slabwise::{
    Budget, Buffer, Bytes, DType, Device, Error, Offload, Output, Session, Tensor, Trace,
};
use slabwise_compiler::graph::Graph;
use slabwise_compiler::reference::{Array, Fault, Precision, evaluate};

use slabwise_compiler::shape::Env;

use crate::build::{Model, build};
use crate::case::{Axis, Case, Op, Program};
use crate::rng::{Rng, mixed};
use crate::setup::{Feed, Setup};

/// The reason for a run without results.
#[derive(Clone, Debug, PartialEq)]
pub enum Failure {
    /// A panic, with its place.
    Panic(String),
    /// An internal error.
    Internal(String),
    /// A model that `compile` refuses.
    Refused(String),
    /// A budget that does not suffice.
    Budget(String),
    /// Data that break a rule of the program.
    Data(String),
    /// Any other error.
    Other(String),
}

impl Failure {
    fn of(error: Error) -> Failure {
        let text = error.to_string();
        match error {
            Error::Internal(_) | Error::MemoryCheck { .. } | Error::Lost { .. } => {
                Failure::Internal(text)
            }
            Error::Trace(_) => Failure::Refused(text),
            Error::Budget { .. } | Error::Room { .. } => Failure::Budget(text),
            Error::Data { .. } => Failure::Data(text),
            _ => Failure::Other(text),
        }
    }

    /// The text of the error.
    pub fn text(&self) -> &str {
        match self {
            Failure::Panic(t)
            | Failure::Internal(t)
            | Failure::Refused(t)
            | Failure::Budget(t)
            | Failure::Data(t)
            | Failure::Other(t) => t,
        }
    }
}

/// The results of a case.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// The outputs of each run.
    pub outputs: Vec<Vec<Array>>,
    /// The final weights and states, by name.
    pub variables: BTreeMap<String, Array>,
}

/// The data that the reference evaluator needs.
#[derive(Default)]
pub struct Witness {
    graphs: Vec<Graph>,
    first: HashMap<String, Array>,
}

thread_local! {
    static PANIC: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Records panic messages for the report instead of printing them. Installed once per process.
fn quiet() {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            let text = info.payload().downcast_ref::<String>().cloned();
            let text = text
                .or_else(|| info.payload().downcast_ref::<&str>().map(|s| s.to_string()))
                .unwrap_or_default();
            let place = info
                .location()
                .map(|l| format!("{}:{}", l.file(), l.line()))
                .unwrap_or_default();
            let caught = PANIC.with(|p| {
                p.try_borrow_mut()
                    .map(|mut p| p.replace(format!("{text} at {place}")))
                    .is_ok()
            });
            if !caught || !CATCHING.with(std::cell::Cell::get) {
                before(info);
            }
        }));
    });
}

thread_local! {
    static CATCHING: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// The result of `work`, with a panic as a failure.
pub fn caught<R>(work: impl FnOnce() -> Result<R, Failure>) -> Result<R, Failure> {
    quiet();
    CATCHING.with(|c| c.set(true));
    let done = catch_unwind(AssertUnwindSafe(work));
    CATCHING.with(|c| c.set(false));
    done.unwrap_or_else(|_| {
        Err(Failure::Panic(
            PANIC.with(|p| p.borrow_mut().take()).unwrap_or_default(),
        ))
    })
}

/// Runs a case in one way; `witness` receives the data for the reference.
pub fn execute(
    case: &Case,
    setup: &Setup,
    witness: Option<&mut Witness>,
) -> Result<Outcome, Failure> {
    caught(|| {
        let mut runner = Runner {
            case,
            setup,
            model: Model::new(case),
            outcome: Outcome::default(),
        };
        runner.go(witness).map_err(Failure::of)?;
        Ok(runner.outcome)
    })
}

/// A program with as many outputs as it has.
trait Compiled {
    fn run(
        &self,
        session: &mut Session,
        feed: &[&dyn Input],
        dynamic: bool,
        donated: Option<usize>,
    ) -> Result<Vec<Array>, Error>;
}

impl<const N: usize> Compiled for slabwise::Program<N> {
    fn run(
        &self,
        session: &mut Session,
        feed: &[&dyn Input],
        dynamic: bool,
        donated: Option<usize>,
    ) -> Result<Vec<Array>, Error> {
        let outputs = if dynamic {
            session.run_dynamic(self, feed)?
        } else {
            session.run(self, feed)?
        };
        let arrays: Vec<Array> = outputs.iter().map(array).collect::<Result<_, _>>()?;
        let buffer: Option<Buffer> = donated.and_then(|at| outputs[at].buffer());
        if let (Some(at), Some(buffer)) = (donated, buffer) {
            let taken = download(session, &buffer)?;
            if !slabwise_compiler::reference::same_bits(&taken, &arrays[at]) {
                return Err(Error::Internal(format!(
                    "the donated buffer holds {taken}, output {at} is {}",
                    arrays[at]
                )));
            }
            session.free(buffer)?;
        } else if donated.is_some() {
            return Err(Error::Internal("a donated input gave no buffer".into()));
        }
        Ok(arrays)
    }
}

/// Most outputs of a program.
pub const OUTPUTS_MAX: usize = 7;

fn compile(
    session: &mut Session,
    trace: &Trace,
    outputs: &[Tensor<'_>],
) -> Result<Box<dyn Compiled>, Error> {
    macro_rules! by_count {
        ($($n:literal)*) => { match outputs.len() {
            $($n => Ok(Box::new(session.compile(trace, std::array::from_fn::<_, $n, _>(|i| outputs[i]))?)),)*
            n => Err(Error::Value(format!("{n} outputs"))),
        } };
    }
    by_count!(0 1 2 3 4 5 6 7)
}

fn array(output: &Output<'_>) -> Result<Array, Error> {
    let values = match output.dtype() {
        DType::F32 => output
            .view::<f32>()?
            .iter()
            .map(|&v| f64::from(v))
            .collect(),
        DType::F16 => output.view::<f16>()?.iter().map(|v| v.to_f64()).collect(),
        DType::BF16 => output.view::<bf16>()?.iter().map(|v| v.to_f64()).collect(),
        DType::I32 => output
            .view::<i32>()?
            .iter()
            .map(|&v| f64::from(v))
            .collect(),
        DType::U8 | DType::Bool => output.view::<u8>()?.iter().map(|&v| f64::from(v)).collect(),
    };
    Ok(Array {
        dtype: output.dtype(),
        dims: output.shape().to_vec(),
        values,
    })
}

fn download(session: &Session, buffer: &Buffer) -> Result<Array, Error> {
    let values = match buffer.dtype() {
        DType::F32 => session
            .download::<f32>(buffer)?
            .iter()
            .map(|&v| f64::from(v))
            .collect(),
        DType::F16 => session
            .download::<f16>(buffer)?
            .iter()
            .map(|v| v.to_f64())
            .collect(),
        DType::BF16 => session
            .download::<bf16>(buffer)?
            .iter()
            .map(|v| v.to_f64())
            .collect(),
        DType::I32 => session
            .download::<i32>(buffer)?
            .iter()
            .map(|&v| f64::from(v))
            .collect(),
        DType::U8 | DType::Bool => session
            .download::<u8>(buffer)?
            .iter()
            .map(|&v| f64::from(v))
            .collect(),
    };
    Ok(Array {
        dtype: buffer.dtype(),
        dims: buffer.shape().to_vec(),
        values,
    })
}

/// The data of an input in a run.
pub fn data(case: &Case, op: &Op, run: usize) -> Option<Array> {
    let Op::Input { dtype, shape, data } = op else {
        return None;
    };
    let length = |axis: &Axis| match *axis {
        Axis::Fixed(n) => n,
        Axis::Named(dim) => case.length(dim, run),
        Axis::Open => 0,
    };
    let dims: Vec<usize> = shape.iter().map(length).collect();
    let mut rng = Rng::new(mixed(case.seed) ^ mixed(u64::from(*data) << 8 | run as u64));
    let odd = [
        f64::NAN,
        f64::INFINITY,
        f64::NEG_INFINITY,
        -0.0,
        1e-40,
        -3.4e38,
    ];
    Some(Array::from_fn(*dtype, &dims, |_| match dtype {
        DType::F32 | DType::F16 | DType::BF16 if case.odd_numbers && rng.one_in(6) => {
            rounded(rng.pick(&odd), *dtype)
        }
        DType::F32 | DType::F16 | DType::BF16 => {
            let x = rng.float(-2.0, 2.0);
            // Contains zeros and equal numbers.
            if x.abs() < 0.8 {
                (x * 4.0).round() / 4.0 + 0.0
            } else {
                x
            }
        }
        DType::I32 | DType::U8 => rng.below(3) as f64,
        DType::Bool => rng.below(2) as f64,
    }))
}

fn rounded(x: f64, dtype: DType) -> f64 {
    match dtype {
        DType::F16 => f16::from_f64(x).to_f64(),
        DType::BF16 => bf16::from_f64(x).to_f64(),
        _ => f64::from(x as f32),
    }
}

/// The data of an input: an array, or a buffer of a session.
enum Fed {
    F32(ArrayD<f32>),
    F16(ArrayD<f16>),
    BF16(ArrayD<bf16>),
    I32(ArrayD<i32>),
    U8(ArrayD<u8>),
    Buffer(Buffer),
    Donated(slabwise::Donated),
}

impl Fed {
    fn host(array: &Array) -> Fed {
        let values = || array.values.iter();
        let shape = IxDyn(&array.dims);
        let ok = "an array has as many elements as its shape";
        match array.dtype {
            DType::F32 => Fed::F32(
                ArrayD::from_shape_vec(shape, values().map(|&v| v as f32).collect()).expect(ok),
            ),
            DType::F16 => Fed::F16(
                ArrayD::from_shape_vec(shape, values().map(|&v| f16::from_f64(v)).collect())
                    .expect(ok),
            ),
            DType::BF16 => Fed::BF16(
                ArrayD::from_shape_vec(shape, values().map(|&v| bf16::from_f64(v)).collect())
                    .expect(ok),
            ),
            DType::I32 => Fed::I32(
                ArrayD::from_shape_vec(shape, values().map(|&v| v as i32).collect()).expect(ok),
            ),
            DType::U8 | DType::Bool => Fed::U8(
                ArrayD::from_shape_vec(shape, values().map(|&v| v as u8).collect()).expect(ok),
            ),
        }
    }

    fn upload(self, session: &mut Session, name: &str) -> Result<Fed, Error> {
        Ok(Fed::Buffer(match self {
            Fed::F32(a) => session.upload(name, &a)?,
            Fed::F16(a) => session.upload(name, &a)?,
            Fed::BF16(a) => session.upload(name, &a)?,
            Fed::I32(a) => session.upload(name, &a)?,
            Fed::U8(a) => session.upload(name, &a)?,
            other => return Ok(other),
        }))
    }

    fn donate(self) -> Fed {
        if let Fed::Buffer(buffer) = self {
            Fed::Donated(buffer.donate())
        } else {
            self
        }
    }

    fn input(&self) -> &dyn Input {
        match self {
            Fed::F32(a) => a,
            Fed::F16(a) => a,
            Fed::BF16(a) => a,
            Fed::I32(a) => a,
            Fed::U8(a) => a,
            Fed::Buffer(b) => b,
            Fed::Donated(d) => d,
        }
    }
}

struct Runner<'a> {
    case: &'a Case,
    setup: &'a Setup,
    model: Model,
    outcome: Outcome,
}

impl Runner<'_> {
    fn session(&self) -> Result<Session, Error> {
        let setup = self.setup;
        let mut session = Session::new(Device::Cpu, self.model.params.clone())?
            .with_threads(setup.threads)
            .with_options(setup.options());
        if let Some(percent) = setup.budget {
            session = session.with_budget(Budget::Fraction(f64::from(percent) / 100.0));
        }
        if let Some(speed) = setup.offload {
            session = session.with_offload(Offload::new(Bytes(speed)));
        }
        Ok(session)
    }

    fn compile(
        &self,
        session: &mut Session,
        program: &Program,
    ) -> Result<(Box<dyn Compiled>, Graph), Error> {
        let trace = if program.training {
            Trace::training()
        } else {
            Trace::inference()
        };
        let trace = trace.with_precision(self.case.precision);
        let scale = program.learn.as_ref().and_then(|learn| learn.scale);
        let trace = match scale {
            Some(scale) => trace.with_loss_scale(scale.option()),
            None => trace,
        };
        let outputs = build(
            self.case,
            program,
            &self.model,
            &trace,
            self.setup.swap_dims,
        );
        let graph = trace.finish(&outputs).map_err(Error::Trace)?;
        Ok((compile(session, &trace, &outputs)?, graph))
    }

    fn go(&mut self, witness: Option<&mut Witness>) -> Result<(), Error> {
        let (case, setup) = (self.case, self.setup);
        let mut session = self.session()?;
        let mut others: Vec<Option<Session>> = case.programs.iter().map(|_| None).collect();
        let mut programs: Vec<Option<Box<dyn Compiled>>> = Vec::new();
        let mut graphs = Vec::new();
        for (program, other) in case.programs.iter().zip(&mut others) {
            let apart = setup.alone && case.programs.len() > 1;
            let (compiled, graph) = match apart {
                true => self.compile(other.insert(self.session()?), program)?,
                false => self.compile(&mut session, program)?,
            };
            programs.push(Some(compiled));
            graphs.push(graph);
        }
        if let Some(witness) = witness {
            *witness = Witness {
                graphs,
                first: variables(&session)?.into_iter().collect(),
            };
        }
        for (run, &at) in case.runs.iter().enumerate() {
            if setup.anew {
                programs[at] = None;
                programs[at] = Some(self.compile(&mut session, &case.programs[at])?.0);
            }
            let here = others[at].as_mut().unwrap_or(&mut session);
            let done = self.run(here, programs[at].as_deref(), at, run)?;
            self.outcome.outputs.push(done);
            if setup.reload && run == 0 {
                let folder = std::env::temp_dir().join(format!(
                    "random-programs-{}-{:?}",
                    std::process::id(),
                    std::thread::current().id()
                ));
                std::fs::create_dir_all(&folder).map_err(|source| Error::Io {
                    path: folder.clone(),
                    source,
                })?;
                let path = folder.join("saved.safetensors");
                session.save(&path)?;
                drop(session);
                session = self.session()?;
                for (program, compiled) in case.programs.iter().zip(&mut programs) {
                    *compiled = Some(self.compile(&mut session, program)?.0);
                }
                session.load(&path)?;
                drop(std::fs::remove_file(&path));
            }
        }
        if !setup.alone {
            self.outcome.variables = variables(&session)?;
        }
        Ok(())
    }

    fn run(
        &self,
        session: &mut Session,
        compiled: Option<&dyn Compiled>,
        at: usize,
        run: usize,
    ) -> Result<Vec<Array>, Error> {
        let (case, setup) = (self.case, self.setup);
        let program = &case.programs[at];
        let mut fed = Vec::new();
        let mut donated = None;
        for (place, input) in program.inputs().enumerate() {
            let op = &program.statements[input].op;
            let Some(array) = data(case, op, run) else {
                continue;
            };
            let mut one = Fed::host(&array);
            if setup.feed != Feed::Host && array.dtype != DType::Bool {
                one = one.upload(session, crate::build::INPUTS[place])?;
            }
            if let (Feed::Donated, Some((of, to)), true) =
                (setup.feed, program.donate, array.dtype != DType::Bool)
                && of == input
            {
                donated = Some(to);
                one = one.donate();
            }
            fed.push(one);
        }
        let feed: Vec<&dyn Input> = fed.iter().map(Fed::input).collect();
        let Some(compiled) = compiled else {
            return Ok(Vec::new());
        };
        let outputs = compiled.run(session, &feed, setup.dynamic, donated)?;
        for one in fed {
            if let Fed::Buffer(buffer) = one {
                session.free(buffer)?;
            }
        }
        Ok(outputs)
    }
}

fn variables(session: &Session) -> Result<BTreeMap<String, Array>, Error> {
    let names: Vec<String> = session.names().map(String::from).collect();
    let value = |name: String| {
        let held = session.value(&name)?;
        let values = held.iter().map(|&v| f64::from(v)).collect();
        Ok((
            name,
            Array {
                dtype: DType::F32,
                dims: held.shape().to_vec(),
                values,
            },
        ))
    };
    names.into_iter().map(value).collect()
}

/// The outcome of a case by the reference evaluator.
pub fn reference(case: &Case, witness: &Witness, precision: Precision) -> Result<Outcome, Fault> {
    let mut held = witness.first.clone();
    let mut outcome = Outcome::default();
    for (run, &at) in case.runs.iter().enumerate() {
        let (program, graph) = (&case.programs[at], &witness.graphs[at]);
        let mut env = graph.symbols.bounds();
        for (dim, named) in case.dims.iter().enumerate() {
            if let Some(symbol) = graph.symbols.find(named.name) {
                env.0[usize::from(symbol.0)] = case.length(dim, run) as u32;
            }
        }
        let inputs: Vec<Array> = program
            .inputs()
            .filter_map(|i| data(case, &program.statements[i].op, run))
            .collect();
        let missing = |info: &slabwise_compiler::graph::VariableInfo| {
            let found = held.get(&*info.name).cloned();
            found
                .or_else(|| constant(info))
                .map(|array| Array {
                    dtype: info.dtype,
                    ..array
                })
                .unwrap_or_else(|| Array {
                    dtype: info.dtype,
                    dims: vec![],
                    values: vec![],
                })
        };
        let variables: Vec<Array> = graph.variables.iter().map(missing).collect();
        let evaluated = evaluate(graph, &env, &inputs, &variables, precision)?;
        outcome.outputs.push(evaluated.outputs);
        for (info, value) in graph.variables.iter().zip(evaluated.assigned) {
            if let Some(value) = value {
                held.insert(
                    info.name.to_string(),
                    Array {
                        dtype: DType::F32,
                        ..value
                    },
                );
            }
        }
    }
    outcome.variables = held.into_iter().collect();
    Ok(outcome)
}

/// The array of a constant, whose elements have four bytes each.
fn constant(info: &slabwise_compiler::graph::VariableInfo) -> Option<Array> {
    let words = info.data.as_ref()?.chunks_exact(4);
    let word = |bytes: &[u8]| <[u8; 4]>::try_from(bytes).unwrap_or_default();
    let values = words.map(|bytes| match info.dtype {
        DType::F32 => f64::from(f32::from_ne_bytes(word(bytes))),
        _ => f64::from(i32::from_ne_bytes(word(bytes))),
    });
    let dims = info.dims.iter().map(|d| d.usize_at(&Env::default()));
    Some(Array {
        dtype: info.dtype,
        dims: dims.collect(),
        values: values.collect(),
    })
}
