//! Optimizers with separate states.

use super::{Optimizer, Weight};
use crate::trace::Trace;

/// An optimizer whose states have its name as a prefix; see [`Optimizer::named`].
#[derive(Clone, Debug)]
pub struct Named<O> {
    inner: O,
    name: String,
}

impl<O> Named<O> {
    pub(super) fn new(inner: O, name: &str) -> Self {
        Named {
            inner,
            name: name.into(),
        }
    }
}

impl<O: Optimizer> Optimizer for Named<O> {
    fn check(&self) -> Result<(), String> {
        if self.name.is_empty() {
            return Err("an optimizer's name is not empty".into());
        }
        if self.name.contains(char::is_control) {
            return Err(format!(
                "the optimizer's name is {:?}; a name has no line breaks and no other control characters",
                self.name
            ));
        }
        self.inner.check()
    }

    fn is_elementwise(&self) -> bool {
        self.inner.is_elementwise()
    }

    fn update<'t>(&self, trace: &'t Trace, weights: &[Weight<'t>]) {
        trace.owned_by(&self.name, || self.inner.update(trace, weights));
    }
}
