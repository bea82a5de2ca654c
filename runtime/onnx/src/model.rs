//! A model file and its place in a trace.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::{Path, PathBuf};

use prost::bytes::Bytes;
use slabwise::shape::Dim;
use slabwise::{DType, Init, Scope, Session, Shape, Tensor, Trace};

use crate::array::{Array, Stored, count, lengths};
use crate::element::Element;
use crate::error::{Error, Refusal, Result};
use crate::file;
use crate::import::{Import, Names, domain};
use crate::order::sort_model;
use crate::proto::{GraphProto, ModelProto, TensorProto, ValueInfoProto};
use crate::value::{Known, Value};

/// The newest operator set that the importer was written for.
pub const NEWEST_OPSET: i64 = 28;

/// The length of an input's axis.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Axis {
    /// A number.
    Fixed(usize),
    /// A name that the model gives it, to be bounded or fixed by [`OnnxModel::with_dim`].
    Named(String),
    /// Neither.
    Unknown,
}

/// An input of a model: what a run has to feed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InputInfo {
    /// Its name.
    pub name: String,
    /// Its element type.
    pub element: Element,
    /// Its axes; `None` if the model does not even say how many.
    pub axes: Option<Vec<Axis>>,
}

/// An ONNX model, to be made part of a trace.
///
/// ```no_run
/// use slabwise::prelude::*;
/// use slabwise::{Device, Params, Session};
/// use slabwise_onnx::OnnxModel;
///
/// let model = OnnxModel::load("model.onnx")?.with_dim("batch", 8);
/// let params = Params::seeded(0);
/// let trace = Trace::inference();
/// let inputs = model.declare(&trace)?;
/// let outputs = model.trace(&trace, &params.root(), &inputs)?;
/// let mut session = Session::new(Device::Cpu, params)?;
/// let program = session.compile_any(&trace, &outputs)?;
/// model.load_weights(&mut session)?;
/// println!("{}", program.plan());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct OnnxModel {
    proto: ModelProto,
    folder: Option<PathBuf>,
    opsets: HashMap<String, i64>,
    inputs: Vec<InputInfo>,
    dims: BTreeMap<String, Dim>,
    values: BTreeMap<String, Array>,
    lengths: BTreeMap<String, Vec<usize>>,
    narrow: bool,
}

impl OnnxModel {
    /// Reads a model file; data files beside it are read when they are needed.
    ///
    /// # Errors
    /// A file that cannot be read, is no model or is damaged.
    pub fn load(path: impl AsRef<Path>) -> Result<OnnxModel> {
        let path = path.as_ref();
        let proto = file::model(path)?;
        let folder = path.parent().map(Path::to_path_buf);
        OnnxModel::of_proto(proto, folder).map_err(|message| Error::File {
            path: path.into(),
            message,
        })
    }

    /// The model in the bytes of a file, whose data is in the file itself.
    ///
    /// # Errors
    /// Bytes that are no model, or damaged.
    pub fn of_bytes(bytes: &[u8]) -> Result<OnnxModel> {
        let path = Path::new("the model");
        let proto = file::decode(path, Bytes::copy_from_slice(bytes))?;
        OnnxModel::of_proto(proto, None).map_err(|message| Error::File {
            path: path.into(),
            message,
        })
    }

    fn of_proto(mut proto: ModelProto, folder: Option<PathBuf>) -> Result<OnnxModel, String> {
        sort_model(&mut proto)?;
        let graph = proto.graph.as_ref().ok_or("has no graph")?;
        if !graph.sparse_initializer.is_empty() {
            return Err("has sparse initializers".into());
        }
        let weights: HashSet<&str> = graph.initializer.iter().map(|t| &*t.name).collect();
        let fed = graph
            .input
            .iter()
            .filter(|input| !weights.contains(&*input.name));
        let inputs = fed.map(input_info).collect::<Result<_, String>>()?;
        let opsets = proto
            .opset_import
            .iter()
            .map(|import| (domain(&import.domain).to_string(), import.version))
            .collect();
        Ok(OnnxModel {
            proto,
            folder,
            opsets,
            inputs,
            dims: BTreeMap::new(),
            values: BTreeMap::new(),
            lengths: BTreeMap::new(),
            narrow: false,
        })
    }

    fn graph(&self) -> &GraphProto {
        // Checked when the model was read.
        self.proto.graph.as_ref().expect("a model has a graph")
    }

    /// Sets a named dimension: a number fixes it, [`Dim::bounded`] plans for any length up to a
    /// bound.
    #[must_use]
    pub fn with_dim(mut self, name: &str, dim: impl Into<Dim>) -> OnnxModel {
        self.dims.insert(name.into(), dim.into());
        self
    }

    /// Gives the value of an input when the program is built, for operators that must know it, such
    /// as a shape. The input stays one, but the program is for this value alone where it was
    /// needed.
    #[must_use]
    pub fn with_value(mut self, input: &str, value: Array) -> OnnxModel {
        self.lengths.insert(input.into(), value.shape.clone());
        self.values.insert(input.into(), value);
        self
    }

    /// Sets the shape of an input.
    #[must_use]
    pub fn with_shape(mut self, input: &str, shape: &[usize]) -> OnnxModel {
        self.lengths.insert(input.into(), shape.to_vec());
        self
    }

    /// Allows f64 to be computed in f32.
    #[must_use]
    pub fn with_narrow(mut self, narrow: bool) -> OnnxModel {
        self.narrow = narrow;
        self
    }

    /// The inputs of a run, in their order. Initializers are none.
    pub fn inputs(&self) -> &[InputInfo] {
        &self.inputs
    }

    /// The names of the outputs, in their order.
    pub fn outputs(&self) -> Vec<&str> {
        self.graph().output.iter().map(|o| &*o.name).collect()
    }

    /// The element types of the outputs that the model declares.
    pub fn output_elements(&self) -> Vec<Option<Element>> {
        let outputs = self.graph().output.iter();
        outputs
            .map(|o| {
                let tensor = o.r#type.as_ref()?.tensor_type.as_ref()?;
                Element::of(tensor.elem_type).ok()
            })
            .collect()
    }

    /// The names of dimensions that have no length yet.
    pub fn open_dims(&self) -> Vec<&str> {
        let axes = self.inputs.iter().flat_map(|input| {
            let known = self.lengths.contains_key(&input.name);
            input.axes.iter().flatten().filter(move |_| !known)
        });
        let mut names: Vec<&str> = axes
            .filter_map(|axis| match axis {
                Axis::Named(name) => Some(self.names_of(name)),
                _ => None,
            })
            .flatten()
            .filter(|name| !self.dims.contains_key(*name))
            .collect();
        names.sort_unstable();
        names.dedup();
        names
    }

    /// Whether [`OnnxModel::with_dim`] has set a dimension of an input.
    pub(crate) fn has_dim_of(&self, input: &InputInfo) -> bool {
        let mut axes = input.axes.iter().flatten();
        let is_set = |name: &str| self.dims.contains_key(name);
        axes.any(
            |axis| matches!(axis, Axis::Named(name) if self.names_of(name).into_iter().any(is_set)),
        )
    }

    /// The names in the length of an axis: its own, or those of the lengths it is the sum of, as in
    /// `past_sequence_length + sequence_length`.
    fn names_of<'a>(&self, name: &'a str) -> Vec<&'a str> {
        match terms(name).filter(|_| !self.dims.contains_key(name)) {
            Some(terms) => terms
                .into_iter()
                .filter(|term| number(term).is_none())
                .collect(),
            None => vec![name],
        }
    }

    /// The length of an axis of this name.
    fn dim_of(&self, trace: &Trace, name: &str) -> Option<Dim> {
        if let Some(&dim) = self.dims.get(name) {
            return Some(dim);
        }
        let dims = terms(name)?.into_iter().map(|term| match number(term) {
            Some(n) => Some(Dim::from(n)),
            None => self.dims.get(term).copied(),
        });
        let sum = |a: Dim, b: Dim| trace.sum_of_lengths(a, b);
        dims.collect::<Option<Vec<Dim>>>()?.into_iter().reduce(sum)
    }

    /// The names of the inputs' dimensions whose lengths a run decides.
    fn bounded_dims(&self) -> Vec<String> {
        let axes = self
            .inputs
            .iter()
            .flat_map(|input| input.axes.iter().flatten());
        let names = axes.filter_map(|axis| match axis {
            Axis::Named(name) => Some(self.names_of(name)),
            _ => None,
        });
        let is_open = |name: &&str| {
            let dim = self.dims.get(*name);
            dim.is_some_and(|dim| !matches!(dim, Dim::Fixed(_)))
        };
        let mut open: Vec<String> = names.flatten().filter(is_open).map(String::from).collect();
        open.sort_unstable();
        open.dedup();
        open
    }

    /// Declares the model's inputs in a trace, under their names.
    ///
    /// # Errors
    /// An input of unknown shape, or with a named dimension that has no length.
    pub fn declare<'t>(&self, trace: &'t Trace) -> Result<Vec<Tensor<'t>>> {
        let open = self.open_dims();
        if !open.is_empty() {
            return Err(Error::Input(format!(
                "the lengths of {} are open: give each a number, such as --dim {}=1",
                open.join(", "),
                open[0]
            )));
        }
        let before = trace.mistakes().len();
        let declared = self.inputs.iter().map(|input| {
            let shape = self.input_shape(trace, input)?;
            Ok(trace.input(&input.name, input.element.dtype(), shape))
        });
        let declared = declared.collect::<Result<Vec<_>>>()?;
        match trace.mistakes().into_iter().nth(before) {
            Some(mistake) => Err(Error::Input(mistake.message)),
            None => Ok(declared),
        }
    }

    fn input_shape(&self, trace: &Trace, input: &InputInfo) -> Result<Shape> {
        if let Some(lengths) = self.lengths.get(&input.name) {
            return Ok(Shape::from(&lengths[..]));
        }
        let unknown = || {
            Error::Input(format!(
                "the model does not say the shape of input \"{}\": give it an array",
                input.name
            ))
        };
        let axes = input.axes.as_ref().ok_or_else(unknown)?;
        let dims = axes.iter().map(|axis| match axis {
            Axis::Fixed(n) => Ok(Dim::from(*n)),
            Axis::Named(name) => self.dim_of(trace, name).ok_or_else(unknown),
            Axis::Unknown => Err(unknown()),
        });
        Ok(Shape::from(&dims.collect::<Result<Vec<Dim>>>()?[..]))
    }

    /// Makes the model part of a trace: `inputs` in the order of [`OnnxModel::inputs`], the results
    /// in that of [`OnnxModel::outputs`]. Float initializers with axes become parameters below
    /// `scope`, under their names; a second trace shares them.
    ///
    /// # Errors
    /// All nodes that cannot be expressed, each with the reason.
    pub fn trace<'t>(
        &self,
        trace: &'t Trace,
        scope: &Scope,
        inputs: &[Tensor<'t>],
    ) -> Result<Vec<Tensor<'t>>> {
        let all = self.values(trace, scope, inputs)?;
        Ok(all.into_iter().map(|(_, tensor)| tensor).collect())
    }

    /// [`OnnxModel::trace`], with the element types of the results.
    ///
    /// # Errors
    /// As [`OnnxModel::trace`].
    pub fn values<'t>(
        &self,
        trace: &'t Trace,
        scope: &Scope,
        inputs: &[Tensor<'t>],
    ) -> Result<Vec<(Element, Tensor<'t>)>> {
        if inputs.len() != self.inputs.len() {
            return Err(Error::Input(format!(
                "the model has {} inputs, not {}",
                self.inputs.len(),
                inputs.len()
            )));
        }
        if let Some(&version) = self.opsets.get("").filter(|&&v| v > NEWEST_OPSET) {
            return Err(Error::Input(format!(
                "the model is for opset {version}; the newest known is {NEWEST_OPSET}"
            )));
        }
        let mut names = Names::default();
        for (input, tensor) in self.inputs.iter().zip(inputs) {
            let value = match self.values.get(&input.name) {
                Some(array) => Value::both(*tensor, Known::Given, array.clone()),
                None => Value::tensor(input.element, *tensor),
            };
            names.insert(input.name.clone(), Some(value));
        }
        let statistics = self.statistics();
        let mut refusals = Vec::new();
        for tensor in &self.graph().initializer {
            let value = self.initializer(trace, scope, tensor, &statistics);
            let value = value.map_err(|reason| {
                refusals.push(Refusal {
                    node: tensor.name.clone(),
                    operator: "initializer".into(),
                    opset: self.opsets.get("").copied().unwrap_or(1),
                    reason,
                });
            });
            names.insert(tensor.name.clone(), value.ok());
        }
        let mut import = Import {
            trace,
            narrow: self.narrow,
            functions: &self.proto.functions,
            opsets: self.opsets.clone(),
            refusals,
            nodes: 0,
            scans: 0,
            mistakes: trace.mistakes().len(),
            open: self.bounded_dims(),
        };
        import.nodes(&self.graph().node, &mut names, 0);
        if !import.refusals.is_empty() {
            return Err(Error::Refused(import.refusals));
        }
        let outputs = self.graph().output.iter().map(|output| {
            let found = names.get(&output.name).and_then(Option::as_ref);
            let value = found.ok_or_else(|| {
                Error::Input(format!("the output \"{}\" is defined nowhere", output.name))
            })?;
            let tensor = value.traced(trace).map_err(Error::Input)?;
            Ok((value.element(), tensor))
        });
        outputs.collect()
    }

    /// Writes the initial values of the parameters into a session that has compiled the model.
    /// Parameters that no program reads have no place there and are passed over.
    ///
    /// # Errors
    /// A parameter of another shape, and a data file that cannot be read.
    pub fn load_weights(&self, session: &mut Session) -> Result<()> {
        self.load_weights_below("", session)
    }

    /// [`OnnxModel::load_weights`] for a model traced below a scope of this path.
    ///
    /// # Errors
    /// As [`OnnxModel::load_weights`].
    pub fn load_weights_below(&self, path: &str, session: &mut Session) -> Result<()> {
        let known: HashSet<String> = session.names().map(str::to_string).collect();
        for tensor in &self.graph().initializer {
            let name = match path {
                "" => tensor.name.clone(),
                path => format!("{path}.{}", tensor.name),
            };
            if !is_parameter(tensor) || !known.contains(&name) {
                continue;
            }
            let stored = self.stored(tensor).map_err(Error::Input)?;
            session.set_value(&name, &stored.to_f32().map_err(Error::Input)?)?;
        }
        Ok(())
    }

    fn stored(&self, tensor: &TensorProto) -> Result<Stored, String> {
        Stored::of_proto(tensor, &|t| file::external(self.folder.as_deref(), t))
    }

    fn initializer<'t>(
        &self,
        trace: &'t Trace,
        scope: &Scope,
        tensor: &TensorProto,
        statistics: &HashSet<&str>,
    ) -> Result<Value<'t>, String> {
        if !is_parameter(tensor) {
            return self.stored(tensor).map(Value::stored);
        }
        let shape = lengths(&tensor.dims).ok_or("its shape has a negative length")?;
        let element = Element::of(tensor.data_type)?;
        crate::array::check_elements(tensor, element, &shape)?;
        if element == Element::F64 && !self.narrow {
            return Err("holds doubles; allow float instead (--narrow)".into());
        }
        let param = match statistics.contains(&*tensor.name) {
            true => scope.statistic(&tensor.name, &shape[..], Init::Constant(0.0)),
            false => scope.param(&tensor.name, &shape[..], Init::Constant(0.0)),
        };
        let mut read = trace.param(&param);
        if element.dtype() != DType::F32 {
            read = read.cast(element.dtype());
        }
        // Small ones may be options of an operator, such as scales of a resize.
        match count(&shape).is_some_and(|n| n <= SMALL) {
            true => {
                let initial = self.stored(tensor)?.into_array();
                Ok(Value::both(read, Known::Parameter, initial))
            }
            false => Ok(Value::tensor(element, read)),
        }
    }

    /// The initializers that are running statistics, which gradients leave alone.
    fn statistics(&self) -> HashSet<&str> {
        let nodes = self.graph().node.iter();
        let norms = nodes.filter(|node| node.op_type == "BatchNormalization");
        norms
            .flat_map(|node| node.input.iter().skip(3).map(String::as_str))
            .collect()
    }
}

/// The most elements of a parameter whose initial value operators may ask for.
const SMALL: usize = 64;

/// The terms of a name that is a sum of names and numbers.
fn terms(name: &str) -> Option<Vec<&str>> {
    let terms: Vec<&str> = name.split('+').map(str::trim).collect();
    let is_letter = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '.';
    let is_term = |term: &&str| !term.is_empty() && term.chars().all(is_letter);
    (terms.len() > 1 && terms.iter().all(is_term)).then_some(terms)
}

/// A term that is a number.
fn number(term: &str) -> Option<u32> {
    term.parse().ok()
}

/// Whether an initializer is a parameter: a float array with axes.
fn is_parameter(tensor: &TensorProto) -> bool {
    let float = Element::of(tensor.data_type).is_ok_and(Element::is_float);
    float && !tensor.dims.is_empty()
}

fn input_info(input: &ValueInfoProto) -> Result<InputInfo, String> {
    let name = input.name.clone();
    let tensor = input.r#type.as_ref().and_then(|t| t.tensor_type.as_ref());
    let tensor = tensor.ok_or_else(|| format!("input \"{name}\" is no tensor"))?;
    let element =
        Element::of(tensor.elem_type).map_err(|kind| format!("input \"{name}\" holds {kind}"))?;
    let axes = tensor.shape.as_ref().map(|shape| {
        let axes = shape
            .dim
            .iter()
            .map(|dim| match (&dim.dim_param, dim.dim_value) {
                (Some(name), _) if !name.is_empty() => Axis::Named(name.clone()),
                (_, Some(n)) => usize::try_from(n).map_or(Axis::Unknown, Axis::Fixed),
                _ => Axis::Unknown,
            });
        axes.collect()
    });
    Ok(InputInfo {
        name,
        element,
        axes,
    })
}
