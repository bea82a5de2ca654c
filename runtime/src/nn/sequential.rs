//! Layers in a row.

use std::fmt;
use std::panic::Location;

use super::Module;
use crate::tensor::Tensor;

/// One layer after the other: `Sequential::new().then(Linear::new(…)).then(Relu)`.
#[derive(Default)]
pub struct Sequential {
    layers: Vec<Box<dyn Module>>,
}

impl Sequential {
    /// A sequence without layers: the identity.
    pub fn new() -> Self {
        Sequential::default()
    }

    /// With one more layer at the end.
    pub fn then(mut self, layer: impl Module + 'static) -> Self {
        self.layers.push(Box::new(layer));
        self
    }
}

impl Module for Sequential {
    #[track_caller]
    fn forward<'t>(&self, x: Tensor<'t>) -> Tensor<'t> {
        // A call through `dyn` loses the caller's line.
        x.trace().on_behalf(Location::caller(), || {
            self.layers.iter().fold(x, |x, layer| x.apply(&**layer))
        })
    }
}

impl fmt::Debug for Sequential {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Sequential of {} layers", self.layers.len())
    }
}
