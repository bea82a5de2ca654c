//! One call of an operator: its inputs and attributes, read with the operator's defaults.

use slabwise::shape::{Dim, Size};
use slabwise::{DType, Tensor, Trace};

use crate::array::{Array, Data};
use crate::element::Element;
use crate::proto::{AttributeProto, GraphProto};
use crate::value::{Known, Value};

/// The results of an operator; or the reason why it cannot be expressed.
pub type Results<'t> = Result<Vec<Value<'t>>, String>;

/// A call of an operator.
pub struct Call<'c, 't> {
    /// The trace that the model becomes part of.
    pub trace: &'t Trace,
    /// The operator.
    pub operator: &'c str,
    /// The version of the operator's domain.
    pub opset: i64,
    /// The number of results that the node names.
    pub outputs: usize,
    /// Whether f64 may be computed in f32.
    pub narrow: bool,
    pub(crate) inputs: Vec<Option<Value<'t>>>,
    pub(crate) attributes: &'c [AttributeProto],
}

impl<'t> Call<'_, 't> {
    /// A call with the same attributes, of floats, for one result.
    pub fn of<const N: usize>(&self, inputs: [Tensor<'t>; N]) -> Self {
        let inputs = inputs.map(|x| Some(Value::tensor(Element::F32, x)));
        Call {
            outputs: 1,
            inputs: inputs.into(),
            ..*self
        }
    }

    /// The number of inputs, absent ones at the end left out.
    pub fn len(&self) -> usize {
        self.inputs.len()
    }

    /// An input that may be absent.
    pub fn value(&self, at: usize) -> Option<&Value<'t>> {
        self.inputs.get(at)?.as_ref()
    }

    /// An input.
    pub fn required(&self, at: usize) -> Result<&Value<'t>, String> {
        self.value(at)
            .ok_or_else(|| format!("input {at} is missing"))
    }

    /// The element type of an input.
    pub fn element(&self, at: usize) -> Result<Element, String> {
        Ok(self.required(at)?.element())
    }

    /// An input as a tensor.
    pub fn x(&self, at: usize) -> Result<Tensor<'t>, String> {
        let value = self.required(at)?;
        if value.element() == Element::F64 && !self.narrow {
            return Err("computes in double; allow float instead (--narrow)".into());
        }
        value.traced(self.trace)
    }

    /// An input that may be absent as a tensor.
    pub fn optional(&self, at: usize) -> Result<Option<Tensor<'t>>, String> {
        match self.value(at) {
            Some(_) => self.x(at).map(Some),
            None => Ok(None),
        }
    }

    /// An input of a float type as f32, in which floats are computed.
    pub fn float(&self, at: usize) -> Result<Tensor<'t>, String> {
        let element = self.element(at)?;
        if !element.is_float() {
            return Err(format!("input {at} is {element}, no float"));
        }
        Ok(to_f32(self.x(at)?))
    }

    /// An input of a float type that may be absent, as f32.
    pub fn optional_float(&self, at: usize) -> Result<Option<Tensor<'t>>, String> {
        match self.value(at) {
            Some(_) => self.float(at).map(Some),
            None => Ok(None),
        }
    }

    /// The known array of an input that must be known to build the program.
    pub fn known(&self, at: usize) -> Result<&Array, String> {
        let value = self.required(at)?;
        value.known().map(|(_, array)| array).ok_or_else(|| {
            if let Some(lengths) = value.lengths() {
                let shown = lengths.values.iter().map(|&n| self.trace.show_size(n));
                return format!(
                    "its input {at} must be a number when the program is built, and is {}",
                    shown.collect::<Vec<_>>().join(", ")
                );
            }
            unknown(at, value)
        })
    }

    /// The array of an input that is a constant of the model.
    pub fn constant(&self, at: usize) -> Option<&Array> {
        match self.value(at)?.known()? {
            (Known::Constant, array) => Some(array),
            _ => None,
        }
    }

    /// The lengths of an input's axes, which a run may decide.
    pub fn dims(&self, at: usize) -> Result<Vec<Size>, String> {
        let value = self.required(at)?;
        let fixed = |shape: &[usize]| shape.iter().map(|&n| Size::fixed(n as i64)).collect();
        Ok(match (value.known_shape(), value.lengths()) {
            (Some(shape), _) => fixed(shape),
            (None, Some(lengths)) => fixed(&lengths.shape),
            (None, None) => sizes(value.traced(self.trace)?),
        })
    }

    /// The elements of an input that are lengths, which a run may decide.
    pub fn lengths(&self, at: usize) -> Result<Vec<Size>, String> {
        let value = self.required(at)?;
        match (value.known(), value.lengths()) {
            (Some((_, array)), _) => Ok(array.as_ints()?.iter().map(|&n| Size::fixed(n)).collect()),
            (None, Some(lengths)) => Ok(lengths.values.clone()),
            (None, None) => Err(unknown(at, value)),
        }
    }

    /// The known array of an input that may be absent.
    pub fn known_optional(&self, at: usize) -> Result<Option<&Array>, String> {
        match self.value(at) {
            Some(_) => self.known(at).map(Some),
            None => Ok(None),
        }
    }

    /// The known integers of an input that may be absent.
    pub fn ints(&self, at: usize) -> Result<Option<Vec<i64>>, String> {
        let array = self.known_optional(at)?;
        array.map(|a| a.as_ints().map(<[i64]>::to_vec)).transpose()
    }

    /// The known number of an input of one element that may be absent.
    pub fn number(&self, at: usize) -> Result<Option<f64>, String> {
        let Some(array) = self.known_optional(at)? else {
            return Ok(None);
        };
        match (&array.data, array.len()) {
            (Data::Int(v), 1) => Ok(Some(v[0] as f64)),
            (Data::Float(v), 1) => Ok(Some(v[0])),
            (_, n) => Err(format!("input {at} has {n} elements, one is expected")),
        }
    }

    /// The lengths of an input, all of which must be fixed.
    pub fn shape(&self, at: usize) -> Result<Vec<usize>, String> {
        let value = self.required(at)?;
        match value.known_shape() {
            Some(shape) => Ok(shape.to_vec()),
            None => lengths(value.traced(self.trace)?),
        }
    }

    /// Whether all lengths of an input are numbers.
    pub fn is_fixed(&self, at: usize) -> Result<bool, String> {
        Ok(self.dims(at)?.iter().all(|n| n.as_fixed().is_some()))
    }

    /// The number of axes of an input.
    pub fn rank(&self, at: usize) -> Result<usize, String> {
        Ok(self.dims(at)?.len())
    }

    fn attribute(&self, name: &str) -> Option<&AttributeProto> {
        self.attributes.iter().find(|a| a.name == name)
    }

    /// Whether the node has an attribute.
    pub fn has(&self, name: &str) -> bool {
        self.attribute(name).is_some()
    }

    /// An integer attribute.
    pub fn int(&self, name: &str, default: i64) -> i64 {
        self.attribute(name).and_then(|a| a.i).unwrap_or(default)
    }

    /// A truth value, stored as an integer.
    pub fn flag(&self, name: &str) -> bool {
        self.int(name, 0) != 0
    }

    /// A float attribute.
    pub fn f(&self, name: &str, default: f32) -> f32 {
        self.attribute(name).and_then(|a| a.f).unwrap_or(default)
    }

    /// A text attribute.
    pub fn text(&self, name: &str, default: &str) -> String {
        match self.attribute(name).and_then(|a| a.s.as_ref()) {
            Some(bytes) => String::from_utf8_lossy(bytes).into_owned(),
            None => default.into(),
        }
    }

    /// The texts of an attribute.
    pub fn texts(&self, name: &str) -> Option<Vec<String>> {
        let found = self.attribute(name)?.strings.iter();
        Some(
            found
                .map(|bytes| String::from_utf8_lossy(bytes).into_owned())
                .collect(),
        )
    }

    /// The integers of an attribute.
    pub fn int_list(&self, name: &str) -> Option<Vec<i64>> {
        self.attribute(name).map(|a| a.ints.clone())
    }

    /// The floats of an attribute.
    pub fn float_list(&self, name: &str) -> Option<Vec<f32>> {
        self.attribute(name).map(|a| a.floats.clone())
    }

    /// The array of an attribute.
    pub fn array(&self, name: &str) -> Result<Option<Array>, String> {
        let Some(tensor) = self.attribute(name).and_then(|a| a.t.as_ref()) else {
            return Ok(None);
        };
        let external = |_: &_| Err(format!("the attribute {name} lies in another file"));
        Array::of_proto(tensor, &external).map(Some)
    }

    /// The graph of an attribute.
    pub fn graph(&self, name: &str) -> Option<&GraphProto> {
        self.attribute(name)?.g.as_ref()
    }

    /// The non-negative integers of an attribute.
    pub fn sizes(&self, name: &str) -> Result<Option<Vec<usize>>, String> {
        let Some(values) = self.int_list(name) else {
            return Ok(None);
        };
        let found = crate::array::lengths(&values);
        found
            .map(Some)
            .ok_or_else(|| format!("{name} is {values:?}, with a negative number"))
    }

    /// An axis of input 0 that may count from the end.
    pub fn axis(&self, name: &str, default: i64) -> Result<usize, String> {
        resolve(self.int(name, default), self.rank(0)?)
    }

    /// The axes in an attribute or, from the version `since` of the operator set on, in an input.
    pub fn axes(&self, since: i64, input: usize) -> Result<Option<Vec<i64>>, String> {
        match self.opset >= since {
            true => self.ints(input),
            false => Ok(self.int_list("axes")),
        }
    }

    /// One result of the element type of input 0.
    pub fn same(&self, tensor: Tensor<'t>) -> Results<'t> {
        self.typed(self.element(0)?, tensor)
    }

    /// One result.
    pub fn typed(&self, element: Element, tensor: Tensor<'t>) -> Results<'t> {
        Ok(vec![result(element, tensor)])
    }
}

/// The message for an input that is not known when the program is built.
fn unknown(at: usize, value: &Value<'_>) -> String {
    let reason = value.reason().map_or_else(
        || "is computed or an input without a value (--input)".into(),
        |unknown| unknown.reason.clone(),
    );
    format!("its input {at} must be known when the program is built, and {reason}")
}

/// The lengths of a tensor's axes.
pub fn sizes(x: Tensor<'_>) -> Vec<Size> {
    let length = |axis| match x.dim(axis) {
        Dim::Computed(size) => size,
        Dim::Fixed(n) => Size::fixed(n),
        // An axis has one of these.
        Dim::Bounded { .. } | Dim::Unbounded { .. } => Size::ZERO,
    };
    (0..x.rank()).map(length).collect()
}

/// The length of an axis, which a run may decide.
pub fn size(x: Tensor<'_>, axis: usize) -> Result<Size, String> {
    sizes(x).get(axis).copied().ok_or_else(|| no_axis(x, axis))
}

fn no_axis(x: Tensor<'_>, axis: usize) -> String {
    format!("it reads axis {axis} of a tensor of {} axes", x.rank())
}

/// Sizes as the lengths of a shape.
pub fn shape_of(sizes: &[Size]) -> slabwise::Shape {
    let dims: Vec<Dim> = sizes.iter().map(|&size| dim(size)).collect();
    slabwise::Shape::from(&dims[..])
}

/// A size as a length.
pub fn dim(size: Size) -> Dim {
    size.as_fixed().map_or(Dim::Computed(size), Dim::Fixed)
}

/// A result of this element type, in the type of the runtime that holds it.
pub fn result<'t>(element: Element, tensor: Tensor<'t>) -> Value<'t> {
    let tensor = match tensor.dtype() == element.dtype() {
        true => tensor,
        false => tensor.cast(element.dtype()),
    };
    Value::tensor(element, tensor)
}

/// A float tensor as f32.
pub fn to_f32(x: Tensor<'_>) -> Tensor<'_> {
    match x.dtype() {
        DType::F32 => x,
        _ => x.cast(DType::F32),
    }
}

/// The lengths of a tensor, all of which must be fixed.
pub fn lengths(x: Tensor<'_>) -> Result<Vec<usize>, String> {
    (0..x.rank()).map(|axis| length(x, axis)).collect()
}

/// The length of an axis, which must be fixed.
pub fn length(x: Tensor<'_>, axis: usize) -> Result<usize, String> {
    x.len(axis).ok_or_else(|| match axis < x.rank() {
        true => format!("the length of axis {axis} is bounded, and must be fixed here"),
        false => no_axis(x, axis),
    })
}

/// An axis that may count from the end.
pub fn resolve(axis: i64, rank: usize) -> Result<usize, String> {
    let n = rank as i64;
    let found = if axis < 0 {
        axis.saturating_add(n)
    } else {
        axis
    };
    match usize::try_from(found) {
        Ok(found) if found < rank => Ok(found),
        _ => Err(format!("axis {axis} of {rank} axes")),
    }
}

/// Axes that may count from the end.
pub fn resolve_all(axes: &[i64], rank: usize) -> Result<Vec<usize>, String> {
    axes.iter().map(|&axis| resolve(axis, rank)).collect()
}
