//! Declarations of named parameters: nothing is allocated here.

use std::collections::HashMap;
use std::fmt;
use std::ops::Div;
use std::panic::Location;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use slabwise_kernels::dtype::DType;
use slabwise_kernels::size::Size;
use slabwise_kernels::spec::Quantization;

use smallvec::{SmallVec, smallvec};

use crate::error::Mistake;
use crate::graph::{QuantizedPart, QuantizedRole, VariableInfo};
use crate::shape::{Dim, Dims, Shape};
use crate::world::Distribution;

pub use slabwise_compiler::init::Init;

/// The named parameters of a model: a declaration of each, with the seed of their initial values.
/// Clones share the declarations.
#[derive(Clone)]
pub struct Params {
    seed: u64,
    dtype: DType,
    registry: Arc<Mutex<Registry>>,
}

#[derive(Default)]
struct Registry {
    /// In the order of declaration. Declarations do not hold the registry: the cycle would never be
    /// freed.
    declared: Vec<Arc<Declaration>>,
    /// The index of each name in it.
    places: HashMap<Arc<str>, usize>,
    /// The number of declarations, including repeated ones of a name.
    declarations: u64,
    /// Each with the number of its declaration; 0 if it is not one of a declaration.
    mistakes: Vec<(u64, Mistake)>,
    /// How the steps of their session are distributed over ranks.
    distribution: Option<Distribution>,
}

impl Registry {
    fn find(&self, name: &str) -> Option<&Arc<Declaration>> {
        self.places.get(name).map(|&place| &self.declared[place])
    }

    /// Adds the first declaration of a name.
    fn add(&mut self, it: Arc<Declaration>) {
        self.places
            .insert(Arc::clone(&it.name), self.declared.len());
        self.declared.push(it);
    }

    fn remove(&mut self, name: &str) {
        let Some(place) = self.places.remove(name) else {
            return;
        };
        self.declared.remove(place);
        for (later, it) in self.declared.iter().enumerate().skip(place) {
            self.places.insert(Arc::clone(&it.name), later);
        }
    }
}

impl Params {
    /// Parameters without declarations; their initial values will follow from `seed` and their
    /// names.
    pub fn seeded(seed: u64) -> Self {
        Params {
            seed,
            dtype: DType::F32,
            registry: Arc::default(),
        }
    }

    /// The same with parameters that are [stored in](Scope::stored_in) this type unless their scope
    /// sets another type.
    #[must_use]
    pub fn stored_in(self, dtype: DType) -> Self {
        Params { dtype, ..self }
    }

    /// The seed.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// The scope whose parameters have no prefix.
    pub fn root(&self) -> Scope {
        Scope {
            params: self.clone(),
            path: Arc::from(""),
            shared: false,
            dtype: self.dtype,
            quantization: None,
        }
    }

    fn registry(&self) -> MutexGuard<'_, Registry> {
        // Nothing panics while the lock is held; if something did, the declarations would still be
        // whole.
        self.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Every parameter, in the order of declaration.
    pub fn declared(&self) -> Vec<Param> {
        let registry = self.registry();
        registry
            .declared
            .iter()
            .map(|it| Param {
                it: Arc::clone(it),
                params: self.clone(),
            })
            .collect()
    }

    /// The mistakes of declarations so far.
    pub fn mistakes(&self) -> Vec<Mistake> {
        let registry = self.registry();
        registry.mistakes.iter().map(|(_, it)| it.clone()).collect()
    }

    /// How the steps of their session are distributed over ranks, if they are.
    pub(crate) fn distribution(&self) -> Option<Distribution> {
        self.registry().distribution
    }

    pub(crate) fn set_distribution(&self, distribution: Option<Distribution>) {
        self.registry().distribution = distribution;
    }

    /// Whether both are clones of the same parameters.
    pub(crate) fn same(&self, other: &Params) -> bool {
        Arc::ptr_eq(&self.registry, &other.registry)
    }
}

impl fmt::Debug for Params {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let registry = self.registry();
        f.debug_struct("Params")
            .field("seed", &self.seed)
            .field("declared", &registry.declared.len())
            .finish()
    }
}

/// A place in the tree of names. `&scope / "name"` is a child scope; the path, joined with dots, is
/// the prefix of the parameters' names, which are their keys in a weight file.
#[derive(Clone, Debug)]
pub struct Scope {
    params: Params,
    path: Arc<str>,
    shared: bool,
    dtype: DType,
    quantization: Option<Quantization>,
}

impl Scope {
    /// The path, such as `body.conv2`; empty at the root.
    pub fn path(&self) -> &str {
        &self.path
    }

    fn join(&self, name: &str) -> Arc<str> {
        if self.path.is_empty() {
            Arc::from(name)
        } else {
            Arc::from(format!("{}.{name}", self.path))
        }
    }

    /// The same scope, in which a second layer of one program may declare the parameters again, to
    /// share them with the first.
    ///
    /// ```
    /// # use slabwise::{nn::Embedding, prelude::*};
    /// # let params = Params::seeded(0);
    /// let place = &params.root() / "tokens";
    /// let source = Embedding::new(place.clone(), 100, 8);
    /// let target = Embedding::new(place.shared(), 100, 8);
    /// ```
    #[must_use]
    pub fn shared(&self) -> Scope {
        Scope {
            shared: true,
            ..self.clone()
        }
    }

    /// The same scope, in which parameters are stored in this type, f16 or bf16, in half the bytes
    /// of f32. A trace reads them as f32, exactly, so that a model is written as usual; an update
    /// computes in f32 and rounds the new weight to the nearest number of the type.
    /// [`Optimizer::master_weights`](crate::optim::Optimizer::master_weights) keeps the rounding
    /// error. Statistics stay in f32.
    ///
    /// ```
    /// # use slabwise::{nn::Linear, prelude::*};
    /// let params = Params::seeded(0);
    /// let layer = Linear::new(&params.root().stored_in(BF16) / "head", 64, 10);
    /// assert_eq!(params.declared()[0].dtype(), BF16);
    /// let trace = Trace::inference();
    /// let y = trace.input("x", F32, (8, 64)).apply(&layer);
    /// assert_eq!(y.dtype(), F32);
    /// ```
    #[must_use]
    pub fn stored_in(&self, dtype: DType) -> Scope {
        Scope {
            dtype,
            ..self.clone()
        }
    }

    /// The same scope, in which weights are quantized: stored as integers of a few bits, with a scale
    /// and a zero point for each block of neighbours in a row. These are parameters of two axes
    /// whose rows are whole blocks; all others are declared as without this. A trace reads them as
    /// f32, so that a model is written as usual, and a product with them reads the packed numbers
    /// on the CPU (see [`Tensor::dequantize`](crate::Tensor::dequantize)): 4 bits in blocks of 32
    /// take 5.125 bits for each weight.
    ///
    /// They are not trained. [`Session::load_from`](crate::Session::load_from) and the other ways to
    /// load weights take files of floats, and quantize them as they are read, each number to the
    /// nearest, with one weight at a time in memory as f32. Numbers of a GGUF file in the same format
    /// (Q4_0 for 4 bits, Q8_0 for 8 bits, in blocks of 32) are taken over as they are. Saved are the
    /// parts, `<name>.numbers`, `<name>.scales` and `<name>.zeros`, which load as they are.
    ///
    /// `None` declares weights that are not quantized, for a part of a model that is.
    ///
    /// ```
    /// # use slabwise::{nn::Linear, prelude::*};
    /// use slabwise::Quantization;
    ///
    /// let params = Params::seeded(0);
    /// let four_bits = params.root().quantized(Quantization { bits: 4, block: 32 });
    /// let layer = Linear::new(&four_bits / "head", 64, 10);
    /// let trace = Trace::inference();
    /// let y = trace.input("x", F32, (8, 64)).apply(&layer);
    /// assert_eq!(layer.weight().quantization(), Some(Quantization { bits: 4, block: 32 }));
    /// ```
    #[must_use]
    pub fn quantized(&self, format: impl Into<Option<Quantization>>) -> Scope {
        Scope {
            quantization: format.into(),
            ..self.clone()
        }
    }

    /// Declares a parameter, of type f32 unless the scope [stores another](Scope::stored_in).
    /// Declaring it again with the same type and shape, for another program, gives the same
    /// parameter: weights are shared by name. Another type or shape under the same name, an empty
    /// name, a control character in one, and a negative or bounded length are mistakes that
    /// `compile` returns; and so are two declarations of one name that one program reads, such as
    /// two layers in one scope, unless the scope of one is [shared](Scope::shared). A layer that is
    /// applied twice is declared once.
    #[track_caller]
    pub fn param(&self, name: &str, shape: impl Into<Shape>, init: Init) -> Param {
        self.declare(name, shape.into(), init, true)
    }

    /// Declares a buffer of the model, an f32 value like a parameter, but not changed by gradients:
    /// a running statistic, which layers replace through
    /// [`Trace::statistic`](crate::Trace::statistic).
    #[track_caller]
    pub fn statistic(&self, name: &str, shape: impl Into<Shape>, init: Init) -> Param {
        self.declare(name, shape.into(), init, false)
    }

    #[track_caller]
    fn declare(&self, name: &str, shape: Shape, init: Init, trained: bool) -> Param {
        let mut new = self.describe(name, shape, init, trained);
        let known = self.params.registry().find(&new.name).cloned();
        match known {
            None => {
                let it = Arc::new(new);
                self.params.registry().add(Arc::clone(&it));
                return Param {
                    it,
                    params: self.params.clone(),
                };
            }
            Some(known)
                if known.faulty
                    || new.faulty
                    || (&known.dims, known.trained, known.dtype, known.quantization)
                        == (&new.dims, new.trained, new.dtype, new.quantization) => {}
            Some(known) => {
                let kind = |it: &Declaration| {
                    if it.trained {
                        "a parameter"
                    } else {
                        "a statistic"
                    }
                };
                let is_quantized = known.quantization.is_some() || new.quantization.is_some();
                let (of, again) = match known.trained == new.trained || is_quantized {
                    true => (String::new(), String::new()),
                    false => (format!("{} ", kind(&known)), format!("{} ", kind(&new))),
                };
                let (at, before, after) = (known.place(), known.show(), new.show());
                let message = format!(
                    "\"{}\" is declared as {again}{after}, and as {of}{before} at {at}",
                    new.name
                );
                self.mistake_of(new.number, message);
                new.faulty = true;
            }
        }
        Param {
            it: Arc::new(new),
            params: self.params.clone(),
        }
    }

    /// Withdraws a declaration, for layers whose options change their parameters: its mistakes, and
    /// the name, unless that is known from another declaration.
    pub(crate) fn retract(&self, param: &Param) {
        let mut registry = self.params.registry();
        let number = param.it.number;
        registry.mistakes.retain(|(of, _)| *of != number);
        if registry
            .find(param.name())
            .is_some_and(|it| it.number == number)
        {
            registry.remove(param.name());
        }
    }

    /// Records a mistake in the options of a layer. Compiling a program of a session with these
    /// parameters returns it, with the caller's line.
    #[track_caller]
    pub fn mistake(&self, message: String) {
        self.mistake_of(0, message);
    }

    /// Records a mistake in the declaration of this number.
    #[track_caller]
    fn mistake_of(&self, number: u64, message: String) {
        let mistake = Mistake {
            location: Location::caller(),
            layer: self.path.to_string(),
            message,
        };
        self.params.registry().mistakes.push((number, mistake));
    }

    #[track_caller]
    fn describe(&self, name: &str, shape: Shape, init: Init, trained: bool) -> Declaration {
        let path = self.join(name);
        let mut faults = Vec::new();
        if name.is_empty() {
            faults.push("a parameter needs a name".into());
        }
        if path.contains(char::is_control) {
            faults.push(format!(
                "parameter {path:?}: a name has no line breaks and no other control characters"
            ));
        }
        if !self.dtype.is_float() {
            let dtype = self.dtype;
            faults.push(format!(
                "parameter \"{path}\" cannot be stored as {dtype}: parameters are f32, f16 or bf16"
            ));
        }
        if let Some(Quantization { bits, block }) = self.quantization.filter(|q| !q.is_valid()) {
            faults.push(format!(
                "parameter \"{path}\" cannot be quantized to {bits} bits in blocks of {block}: numbers have 2, 4 or 8 bits, and blocks have numbers"
            ));
        }
        if let Some(fault) = init.fault() {
            faults.push(format!("parameter \"{path}\" {fault}"));
        }
        let mut dims = Dims::new();
        for dim in shape.dims() {
            match *dim {
                Dim::Fixed(n) if n >= 0 => dims.push(Size::fixed(n)),
                Dim::Fixed(n) => {
                    faults.push(format!("parameter \"{path}\" has the negative length {n}"))
                }
                Dim::Bounded { name, .. } => {
                    faults.push(format!("parameter \"{path}\" has the bounded length {name}: lengths of parameters are fixed"));
                }
                Dim::Unbounded { name } => {
                    faults.push(format!("parameter \"{path}\" has the unbounded length {name}: lengths of parameters are fixed"));
                }
                Dim::Computed(size) => match size.as_fixed() {
                    Some(n) if n >= 0 => dims.push(size),
                    _ => faults.push(format!("parameter \"{path}\" has a computed length: lengths of parameters are fixed")),
                },
            }
        }
        let quantization = self.quantization.filter(|format| {
            trained && format.is_valid() && dims.len() == 2 && format.blocks(dims[1]).is_some()
        });
        let number = {
            let mut registry = self.params.registry();
            registry.declarations += 1;
            registry.declarations
        };
        let faulty = !faults.is_empty();
        for fault in faults {
            self.mistake_of(number, fault);
        }
        let (layer, shared, location) = (self.path.clone(), self.shared, Location::caller());
        Declaration {
            name: path,
            layer,
            dtype: match quantization {
                None if trained => self.dtype,
                _ => DType::F32,
            },
            quantization,
            dims,
            init,
            trained: trained && quantization.is_none(),
            location,
            number,
            shared,
            faulty,
        }
    }
}

impl Div<&str> for &Scope {
    type Output = Scope;
    fn div(self, name: &str) -> Scope {
        Scope {
            path: self.join(name),
            ..self.clone()
        }
    }
}

impl Div<&str> for Scope {
    type Output = Scope;
    fn div(self, name: &str) -> Scope {
        &self / name
    }
}

/// The declaration of a name.
struct Declaration {
    name: Arc<str>,
    /// The path of the layer it belongs to.
    layer: Arc<str>,
    /// The type that it is stored in.
    dtype: DType,
    quantization: Option<Quantization>,
    dims: Dims,
    init: Init,
    trained: bool,
    location: &'static Location<'static>,
    /// Distinguishes declarations of one name.
    number: u64,
    /// Whether another declaration of its name may be used in the same program.
    shared: bool,
    /// Whether a mistake in it was recorded: errors that follow from it are not reported again.
    faulty: bool,
}

impl Declaration {
    fn place(&self) -> String {
        format!("{}:{}", self.location.file(), self.location.line())
    }

    /// Its shape, and its type unless that is f32.
    fn show(&self) -> String {
        match (self.quantization, self.dtype) {
            (Some(Quantization { bits, block }), _) => {
                format!("{bits} bits in blocks of {block} {}", show(&self.dims))
            }
            (None, DType::F32) => show(&self.dims),
            (None, half) => format!("{half} {}", show(&self.dims)),
        }
    }
}

/// A declared parameter. Layers keep it; a trace reads it, as f32.
#[derive(Clone)]
pub struct Param {
    it: Arc<Declaration>,
    params: Params,
}

impl Param {
    /// Its full name, which is its key in a weight file.
    pub fn name(&self) -> &str {
        &self.it.name
    }

    /// Its initial value.
    pub fn init(&self) -> Init {
        self.it.init
    }

    /// The type that it is [stored in](Scope::stored_in).
    pub fn dtype(&self) -> DType {
        self.it.dtype
    }

    /// How it is [quantized](Scope::quantized), if it is.
    pub fn quantization(&self) -> Option<Quantization> {
        self.it.quantization
    }

    /// Whether gradients change it: not if it is a [statistic](Scope::statistic) or
    /// [quantized](Scope::quantized).
    pub fn is_trained(&self) -> bool {
        self.it.trained
    }

    /// The length of each axis.
    pub fn dims(&self) -> Vec<usize> {
        self.it
            .dims
            .iter()
            .map(|d| {
                d.as_fixed()
                    .and_then(|n| usize::try_from(n).ok())
                    .unwrap_or(0)
            })
            .collect()
    }

    /// The variables that it declares: itself or, if it is quantized, its numbers, scales and zero
    /// points.
    pub(crate) fn infos(&self) -> SmallVec<[VariableInfo; 3]> {
        let whole = VariableInfo {
            name: self.shared_name().clone(),
            dtype: self.dtype(),
            dims: self.sizes().clone(),
            init: self.init(),
            is_param: true,
            trained: self.is_trained(),
            average_of: None,
            remainder_of: None,
            whole: None,
            part: None,
            data: None,
        };
        let (Some(format), &[rows, columns]) = (self.quantization(), &self.dims()[..]) else {
            return smallvec![whole];
        };
        let blocks = format.blocks(self.sizes()[1]).unwrap_or(0);
        let part = |role: QuantizedRole| {
            let (end, dtype, length) = match role {
                QuantizedRole::Numbers => ("numbers", DType::U8, format.bytes(columns as i64)),
                QuantizedRole::Scales => ("scales", DType::F32, blocks),
                QuantizedRole::Zeros => ("zeros", DType::U8, format.bytes(blocks)),
            };
            VariableInfo {
                name: format!("{}.{end}", whole.name).into(),
                dtype,
                dims: [self.sizes()[0], Size::fixed(length)].into_iter().collect(),
                part: Some(QuantizedPart {
                    weight: whole.name.clone(),
                    dims: [rows, columns],
                    init: whole.init,
                    format,
                    role,
                }),
                ..whole.clone()
            }
        };
        let roles = [
            QuantizedRole::Numbers,
            QuantizedRole::Scales,
            QuantizedRole::Zeros,
        ];
        roles.into_iter().map(part).collect()
    }

    pub(crate) fn shared_name(&self) -> &Arc<str> {
        &self.it.name
    }

    pub(crate) fn sizes(&self) -> &Dims {
        &self.it.dims
    }

    /// The path of the layer it belongs to.
    pub(crate) fn layer(&self) -> &Arc<str> {
        &self.it.layer
    }

    pub(crate) fn params(&self) -> &Params {
        &self.params
    }

    /// The number and the place of its declaration.
    pub(crate) fn declaration(&self) -> (u64, &'static Location<'static>) {
        (self.it.number, self.it.location)
    }

    /// Whether another declaration of its name may be read in the same program.
    pub(crate) fn is_shared(&self) -> bool {
        self.it.shared
    }

    /// Whether its declaration is a mistake that was recorded.
    pub(crate) fn is_faulty(&self) -> bool {
        self.it.faulty
    }
}

impl fmt::Debug for Param {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.it.name, self.it.show())
    }
}

fn show(dims: &[Size]) -> String {
    crate::shape::Symbols::default().show(dims).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_join_with_dots_and_share_by_name() {
        let params = Params::seeded(1);
        let body = &params.root() / "body";
        let a = (body.clone() / "conv").param("weight", (3, 4), Init::Constant(0.0));
        let b = (&body / "conv").param("weight", (3, 4), Init::Constant(0.0));
        assert_eq!(
            (a.name(), b.name()),
            ("body.conv.weight", "body.conv.weight")
        );
        assert_eq!(a.dims(), [3, 4]);
        assert_eq!(params.declared().len(), 1);
        assert!(params.mistakes().is_empty());
    }

    #[test]
    fn every_bad_declaration_is_reported_at_its_line() {
        let params = Params::seeded(1);
        let at = &params.root() / "head";
        let not_a_number = Init::Normal {
            mean: 0.0,
            std: f32::NAN,
        };
        at.param("weight", (3, 4), Init::Constant(0.0));
        let first = line!() - 1;
        let line = line!() + 1;
        at.param("weight", (4, 3), Init::Constant(0.0));
        at.param("bias", (-2,), Init::Constant(0.0));
        at.param("scale", (Dim::bounded("batch", 8),), Init::Constant(0.0));
        at.param("noise", (8,), not_a_number);
        at.param("a\nb", (1,), Init::Constant(0.0));
        let found: Vec<String> = params.mistakes().iter().map(ToString::to_string).collect();
        let clash = format!(
            "\"head.weight\" is declared as [4, 3], and as [3, 4] at {}:{first}",
            file!()
        );
        let expected = [
            &*clash,
            "parameter \"head.bias\" has the negative length -2",
            "parameter \"head.scale\" has the bounded length batch: lengths of parameters are fixed",
            "parameter \"head.noise\" cannot be normal with mean 0 and standard deviation NaN",
            "parameter \"head.a\\nb\": a name has no line breaks and no other control characters",
        ];
        let expected: Vec<String> = expected
            .iter()
            .zip(line..)
            .map(|(text, line)| format!("{}:{line}: {text} (in \"head\")", file!()))
            .collect();
        assert_eq!(found, expected);
    }

    #[test]
    fn declarations_are_gone_with_the_last_that_holds_them() {
        let params = Params::seeded(1);
        let registry = Arc::downgrade(&params.registry);
        let scope = &params.root() / "head";
        let weight = scope.param("weight", (3, 4), Init::Constant(0.0));
        let all = params.declared();
        drop((params, scope));
        assert_eq!(all[0].name(), weight.name());
        drop(all);
        assert_eq!(
            weight.params().declared().len(),
            1,
            "a parameter keeps its model's declarations"
        );
        drop(weight);
        assert!(
            registry.upgrade().is_none(),
            "nothing holds the declarations any more"
        );
    }

    #[test]
    fn initial_ranges_follow_the_published_formulas() {
        assert_eq!(
            Init::kaiming_uniform(784),
            Init::Uniform {
                low: -1.0 / 28.0,
                high: 1.0 / 28.0
            }
        );
        assert_eq!(
            Init::kaiming_normal(8),
            Init::Normal {
                mean: 0.0,
                std: 0.5
            }
        );
        assert_eq!(
            Init::xavier_uniform(2, 4),
            Init::Uniform {
                low: -1.0,
                high: 1.0
            }
        );
        assert_eq!(
            Init::xavier_normal(3, 5),
            Init::Normal {
                mean: 0.0,
                std: 0.5
            }
        );
        assert_eq!(Init::kaiming_uniform(0).fault(), None);
    }
}
