//! Values of the graph while it is imported.

use std::cell::OnceCell;
use std::rc::Rc;

use slabwise::{Tensor, Trace};

use crate::array::Array;
use crate::element::Element;

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

struct Inner<'t> {
    element: Element,
    known: Option<(Known, Rc<Array>)>,
    tensor: OnceCell<Tensor<'t>>,
}

/// A value of the graph: a tensor of the trace, an array that is known already, or both.
#[derive(Clone)]
pub struct Value<'t>(Rc<Inner<'t>>);

impl<'t> Value<'t> {
    /// A tensor of the trace.
    pub fn tensor(element: Element, tensor: Tensor<'t>) -> Value<'t> {
        Value(Rc::new(Inner {
            element,
            known: None,
            tensor: OnceCell::from(tensor),
        }))
    }

    /// An array, which is a tensor only where an operator asks for one.
    pub fn constant(array: Array) -> Value<'t> {
        Value(Rc::new(Inner {
            element: array.element,
            known: Some((Known::Constant, Rc::new(array))),
            tensor: OnceCell::new(),
        }))
    }

    /// A tensor whose value is known as well.
    pub fn both(tensor: Tensor<'t>, known: Known, array: Array) -> Value<'t> {
        Value(Rc::new(Inner {
            element: array.element,
            known: Some((known, Rc::new(array))),
            tensor: OnceCell::from(tensor),
        }))
    }

    /// The element type.
    pub fn element(&self) -> Element {
        self.0.element
    }

    /// The known array, and the reason why it is known.
    pub fn known(&self) -> Option<(Known, &Array)> {
        self.0
            .known
            .as_ref()
            .map(|(known, array)| (*known, &**array))
    }

    /// The tensor; a constant becomes one here.
    ///
    /// # Errors
    /// A constant that the runtime cannot hold.
    pub fn traced(&self, trace: &'t Trace) -> Result<Tensor<'t>, String> {
        if let Some(tensor) = self.0.tensor.get() {
            return Ok(*tensor);
        }
        let (_, array) = self.0.known.as_ref().ok_or("a value without tensor")?;
        let tensor = trace.constant(&array.to_host()?);
        Ok(*self.0.tensor.get_or_init(|| tensor))
    }
}
