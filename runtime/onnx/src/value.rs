//! Values of the graph while it is imported.

use std::cell::OnceCell;
use std::rc::Rc;

use ndarray::{ArrayD, IxDyn};
use slabwise::data::HostArray;
use slabwise::{DType, Tensor, Trace};

use crate::array::{Array, Stored};
use crate::element::Element;
use crate::lengths::Lengths;

/// The reason why an array is known when the graph is imported.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Known {
    /// A constant of the model.
    Constant,
    /// An input whose value the caller gave. A program that depends on it is for that value alone.
    Given,
    /// The initial value of a parameter.
    Parameter,
}

/// The least and the largest value of an integer.
pub type Range = (i64, i64);

/// The reason why a value is not known when the program is built, although no input of a run is.
#[derive(Debug)]
pub struct Unknown {
    /// The rest of a sentence about the value.
    pub reason: String,
    /// Whether it would be known if all lengths were fixed.
    pub by_lengths: bool,
}

struct Inner<'t> {
    element: Element,
    known: Option<(Known, Stored)>,
    /// The numbers of an array that is known as bytes, once an operator has asked for them.
    numbers: OnceCell<Array>,
    lengths: Option<Rc<Lengths>>,
    unknown: Option<Rc<Unknown>>,
    sequence: Option<Vec<Value<'t>>>,
    /// The range of equal integers that are computed from the number of a loop's step.
    step: Option<Range>,
    tensor: OnceCell<Tensor<'t>>,
}

impl<'t> Inner<'t> {
    fn new(element: Element) -> Inner<'t> {
        Inner {
            element,
            known: None,
            numbers: OnceCell::new(),
            lengths: None,
            unknown: None,
            sequence: None,
            step: None,
            tensor: OnceCell::new(),
        }
    }
}

/// A value of the graph: a tensor of the trace, an array that is known already, or both; or lengths
/// of a run.
#[derive(Clone)]
pub struct Value<'t>(Rc<Inner<'t>>);

impl<'t> Value<'t> {
    /// A tensor of the trace.
    pub fn tensor(element: Element, tensor: Tensor<'t>) -> Value<'t> {
        Value(Rc::new(Inner {
            tensor: OnceCell::from(tensor),
            ..Inner::new(element)
        }))
    }

    /// A tensor of equal integers in a range, computed from the number of a loop's step.
    pub fn with_step(self, range: Range) -> Value<'t> {
        let tensor = match self.0.tensor.get() {
            Some(&tensor) => OnceCell::from(tensor),
            None => return self,
        };
        Value(Rc::new(Inner {
            step: Some(range),
            tensor,
            ..Inner::new(self.element())
        }))
    }

    /// The range of its equal integers, if they are computed from the number of a loop's step.
    pub fn step(&self) -> Option<Range> {
        self.0.step
    }

    /// A tensor computed from constants and lengths, which is not known for this reason.
    pub fn unknown(self, trace: &'t Trace, reason: &Rc<Unknown>) -> Result<Value<'t>, String> {
        if self.sequence().is_some() || self.why_known().is_some() {
            return Ok(self);
        }
        Ok(Value(Rc::new(Inner {
            unknown: Some(reason.clone()),
            tensor: OnceCell::from(self.traced(trace)?),
            ..Inner::new(self.element())
        })))
    }

    /// Integers that are computed from lengths of a run.
    pub fn of_lengths(lengths: Lengths) -> Value<'t> {
        if let Some(array) = lengths.as_array() {
            return Value::constant(array);
        }
        let element = lengths.element;
        Value(Rc::new(Inner {
            lengths: Some(Rc::new(lengths)),
            ..Inner::new(element)
        }))
    }

    /// An array, which is a tensor only where an operator asks for one.
    pub fn constant(array: Array) -> Value<'t> {
        Value::stored(Stored::Array(array))
    }

    /// An array of a file, as [`Value::constant`].
    pub fn stored(stored: Stored) -> Value<'t> {
        let element = stored.element();
        Value(Rc::new(Inner {
            known: Some((Known::Constant, stored)),
            ..Inner::new(element)
        }))
    }

    /// A tensor whose value is known as well.
    pub fn both(tensor: Tensor<'t>, known: Known, array: Array) -> Value<'t> {
        let element = array.element;
        Value(Rc::new(Inner {
            known: Some((known, Stored::Array(array))),
            tensor: OnceCell::from(tensor),
            ..Inner::new(element)
        }))
    }

    /// A sequence of values, of the element type of the first.
    pub fn of_sequence(all: Vec<Value<'t>>) -> Value<'t> {
        let element = all.first().map_or(Element::F32, Value::element);
        Value(Rc::new(Inner {
            sequence: Some(all),
            ..Inner::new(element)
        }))
    }

    /// The values of a sequence; `None` if it is none.
    pub fn sequence(&self) -> Option<&[Value<'t>]> {
        self.0.sequence.as_deref()
    }

    /// The element type.
    pub fn element(&self) -> Element {
        self.0.element
    }

    /// The known array, and the reason why it is known.
    pub fn known(&self) -> Option<(Known, &Array)> {
        let (known, stored) = self.0.known.as_ref()?;
        let array = match stored {
            Stored::Array(array) => array,
            stored => {
                let numbers = || stored.clone().into_array();
                self.0.numbers.get_or_init(numbers)
            }
        };
        Some((*known, array))
    }

    /// The reason why its elements are known, if they are.
    pub fn why_known(&self) -> Option<Known> {
        self.0.known.as_ref().map(|(known, _)| *known)
    }

    /// The shape of the known array.
    pub fn known_shape(&self) -> Option<&[usize]> {
        self.0.known.as_ref().map(|(_, stored)| stored.shape())
    }

    /// The lengths of a run that it is computed from.
    pub fn lengths(&self) -> Option<&Lengths> {
        self.0.lengths.as_deref()
    }

    /// The reason why it is not known, although it is computed from constants and lengths.
    pub fn reason(&self) -> Option<&Rc<Unknown>> {
        self.0.unknown.as_ref()
    }

    /// The tensor; a constant, or lengths, become one here.
    ///
    /// # Errors
    /// A constant that the runtime cannot hold.
    pub fn traced(&self, trace: &'t Trace) -> Result<Tensor<'t>, String> {
        if let Some(tensor) = self.0.tensor.get() {
            return Ok(*tensor);
        }
        let tensor = match (&self.0.known, &self.0.lengths) {
            (Some((_, stored)), _) => match stored.offset_bytes() {
                Some(bytes) => signed_bytes(trace, stored.shape(), bytes)?,
                None => trace.constant(&stored.to_host()?),
            },
            (None, Some(lengths)) => lengths.traced(trace),
            (None, None) => {
                return Err("a sequence is no tensor; concatenate it into one".into());
            }
        };
        Ok(*self.0.tensor.get_or_init(|| tensor))
    }
}

/// A constant of int8, which the runtime does not have: bytes from 0 on, less 128. As i32 it would
/// take four times the memory.
fn signed_bytes<'t>(
    trace: &'t Trace,
    shape: &[usize],
    bytes: Vec<u8>,
) -> Result<Tensor<'t>, String> {
    let bytes = ArrayD::from_shape_vec(IxDyn(shape), bytes).map_err(|e| e.to_string())?;
    Ok(trace.constant(&HostArray::U8(bytes)).cast(DType::I32) - 128)
}
