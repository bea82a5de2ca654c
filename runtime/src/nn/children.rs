//! Layers of one kind by number or by name, and layers with a hook.

use std::fmt;
use std::panic::Location;
use std::sync::{Arc, Mutex, PoisonError};

use super::Module;
use crate::params::Scope;
use crate::tensor::Tensor;

/// Layers of one kind under their numbers: their parameters are `0.…`, `1.…` and so on below a
/// scope, as those of PyTorch's `ModuleList`.
///
/// ```
/// use slabwise::nn::{Linear, ModuleList};
/// # use slabwise::prelude::*;
/// # let params = Params::seeded(0);
/// let layers = ModuleList::new(&params.root() / "layers", 3, |at, _| Linear::new(at, 8, 8));
/// assert_eq!(params.declared()[2].name(), "layers.1.weight");
/// ```
#[derive(Clone, Debug)]
pub struct ModuleList<M> {
    layers: Vec<M>,
}

impl<M> ModuleList<M> {
    /// `count` layers, each made in its scope with its number.
    pub fn new(at: Scope, count: usize, make: impl Fn(Scope, usize) -> M) -> Self {
        ModuleList {
            layers: (0..count)
                .map(|i| make(&at / i.to_string().as_str(), i))
                .collect(),
        }
    }

    /// The layers in order.
    pub fn iter(&self) -> std::slice::Iter<'_, M> {
        self.layers.iter()
    }

    /// The layer of this number.
    pub fn get(&self, number: usize) -> Option<&M> {
        self.layers.get(number)
    }

    /// The number of layers.
    pub fn len(&self) -> usize {
        self.layers.len()
    }

    /// Whether there is no layer.
    pub fn is_empty(&self) -> bool {
        self.layers.is_empty()
    }
}

impl<'a, M> IntoIterator for &'a ModuleList<M> {
    type Item = &'a M;
    type IntoIter = std::slice::Iter<'a, M>;
    fn into_iter(self) -> Self::IntoIter {
        self.layers.iter()
    }
}

impl<M: Module> Module for ModuleList<M> {
    /// One layer after the other.
    #[track_caller]
    fn forward<'t>(&self, x: Tensor<'t>) -> Tensor<'t> {
        x.trace().on_behalf(Location::caller(), || {
            self.layers.iter().fold(x, |x, layer| x.apply(layer))
        })
    }
}

/// Layers of one kind under their names, as PyTorch's `ModuleDict`.
#[derive(Clone, Debug)]
pub struct ModuleDict<M> {
    layers: Vec<(String, M)>,
}

impl<M> ModuleDict<M> {
    /// A layer for each name, made in the scope of that name.
    pub fn new<'n>(
        at: Scope,
        names: impl IntoIterator<Item = &'n str>,
        make: impl Fn(Scope, &str) -> M,
    ) -> Self {
        let layer = |name: &'n str| (name.to_string(), make(&at / name, name));
        ModuleDict {
            layers: names.into_iter().map(layer).collect(),
        }
    }

    /// The layer of this name.
    pub fn get(&self, name: &str) -> Option<&M> {
        self.layers
            .iter()
            .find(|(own, _)| own == name)
            .map(|(_, layer)| layer)
    }

    /// Names and layers in order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &M)> {
        self.layers
            .iter()
            .map(|(name, layer)| (name.as_str(), layer))
    }
}

/// A layer whose results pass through a function, as with a forward hook of PyTorch. The function
/// has the input and the result of the layer; it may show them, keep them, or return another
/// result.
///
/// ```
/// use slabwise::nn::{Hooked, Linear, Relu, Sequential};
/// # use slabwise::prelude::*;
/// # let params = Params::seeded(0);
/// # let at = &params.root();
/// let wide = Hooked::new(Linear::new(at / "wide", 4, 16), |x, y| {
///     x.trace().debug("wide", y);
///     y.clamp(-3.0, 3.0)
/// });
/// let model = Sequential::new().then(wide).then(Relu);
/// # let trace = Trace::inference();
/// assert_eq!(trace.input("x", F32, (2, 4)).apply(&model).len(1), Some(16));
/// ```
#[derive(Clone, Debug)]
pub struct Hooked<M, F> {
    layer: M,
    hook: F,
}

impl<M, F: for<'t> Fn(Tensor<'t>, Tensor<'t>) -> Tensor<'t>> Hooked<M, F> {
    /// A layer with a function of its input and its result.
    pub fn new(layer: M, hook: F) -> Self {
        Hooked { layer, hook }
    }

    /// The layer without the function.
    pub fn layer(&self) -> &M {
        &self.layer
    }
}

impl<M: Module, F: for<'t> Fn(Tensor<'t>, Tensor<'t>) -> Tensor<'t>> Module for Hooked<M, F> {
    #[track_caller]
    fn forward<'t>(&self, x: Tensor<'t>) -> Tensor<'t> {
        (self.hook)(x, x.apply(&self.layer))
    }
}

/// A layer whose gradients pass through a function, as with PyTorch's
/// `register_full_backward_hook`. The function is called while a backward pass is recorded. It has
/// the gradient of the layer's input and that of its result; it may show them, or return another
/// gradient of the input. It is not called where the input needs no gradient: there, and to
/// replace the gradient of the result, hook the result with
/// [`hook_gradient`](Tensor::hook_gradient) in a [`Hooked`].
///
/// ```
/// use slabwise::nn::{BackwardHooked, Linear, Relu, Sequential};
/// # use slabwise::prelude::*;
/// # let params = Params::seeded(0);
/// # let at = &params.root();
/// let narrow = BackwardHooked::new(Linear::new(at / "narrow", 16, 2), |dx, dy| {
///     dx.trace().debug("narrow.dy", dy);
///     dx.clamp(-1.0, 1.0)
/// });
/// let model = Sequential::new().then(Linear::new(at / "wide", 4, 16)).then(Relu).then(narrow);
/// # let trace = Trace::training();
/// let loss = trace.input("x", F32, (2, 4)).apply(&model).square().mean();
/// trace.minimize(loss, slabwise::optim::Sgd::new(0.1));
/// # Session::new(Device::Cpu, params)?.compile(&trace, [loss])?;
/// # Ok::<(), slabwise::Error>(())
/// ```
pub struct BackwardHooked<M, F> {
    layer: M,
    hook: Arc<F>,
}

impl<M, F> BackwardHooked<M, F>
where
    F: for<'t> Fn(Tensor<'t>, Tensor<'t>) -> Tensor<'t> + Send + Sync + 'static,
{
    /// A layer with a function of the gradients of its input and its result.
    pub fn new(layer: M, hook: F) -> Self {
        BackwardHooked {
            layer,
            hook: Arc::new(hook),
        }
    }

    /// The layer without the function.
    pub fn layer(&self) -> &M {
        &self.layer
    }
}

impl<M: Clone, F> Clone for BackwardHooked<M, F> {
    fn clone(&self) -> Self {
        BackwardHooked {
            layer: self.layer.clone(),
            hook: self.hook.clone(),
        }
    }
}

impl<M: fmt::Debug, F> fmt::Debug for BackwardHooked<M, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("BackwardHooked").field(&self.layer).finish()
    }
}

impl<M: Module, F> Module for BackwardHooked<M, F>
where
    F: for<'t> Fn(Tensor<'t>, Tensor<'t>) -> Tensor<'t> + Send + Sync + 'static,
{
    #[track_caller]
    fn forward<'t>(&self, x: Tensor<'t>) -> Tensor<'t> {
        x.trace().on_behalf(Location::caller(), || {
            // A backward pass has the gradient of the result before that of the input.
            let of_result = Arc::new(Mutex::new(None));
            let (hook, known) = (self.hook.clone(), of_result.clone());
            let x = x.hook_gradient(move |dx| {
                let dy = known.lock().unwrap_or_else(PoisonError::into_inner).take();
                match dy {
                    Some(id) => hook(
                        dx,
                        Tensor {
                            trace: dx.trace(),
                            id,
                        },
                    ),
                    None => dx,
                }
            });
            x.apply(&self.layer).hook_gradient(move |dy| {
                *of_result.lock().unwrap_or_else(PoisonError::into_inner) = Some(dy.id);
                dy
            })
        })
    }
}
