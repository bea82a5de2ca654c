//! A neural ordinary differential equation, its integration unrolled.

use slabwise::nn::{Linear, Module};
use slabwise::params::Scope;
use slabwise::tensor::Tensor;

/// A classifier whose features follow a differential equation for one unit of time (Chen et al.
/// 2018): dx/dt is a network with one hidden layer, integrated by the classical Runge-Kutta method
/// of fourth order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ode {
    /// Features.
    pub width: usize,
    /// The width of the network's hidden layer.
    pub hidden: usize,
    /// Steps of the integration; each evaluates the network four times.
    pub steps: usize,
    /// Classes to tell apart.
    pub classes: usize,
}

impl Ode {
    /// Declares the weights of `field.0`, `field.1` and `head`: `[n, width] → [n, classes]`.
    #[track_caller]
    pub fn layers(&self, at: &Scope) -> impl Module + use<> {
        let field = at / "field";
        Layers {
            steps: self.steps,
            field: [
                Linear::new(&field / "0", self.width, self.hidden),
                Linear::new(&field / "1", self.hidden, self.width),
            ],
            head: Linear::new(at / "head", self.width, self.classes),
        }
    }
}

struct Layers {
    steps: usize,
    field: [Linear; 2],
    head: Linear,
}

impl Module for Layers {
    #[track_caller]
    fn forward<'t>(&self, x: Tensor<'t>) -> Tensor<'t> {
        let [inner, outer] = &self.field;
        let slope = |x: Tensor<'t>| x.apply(inner).tanh().apply(outer);
        let dt = 1.0 / self.steps.max(1) as f32;
        let step = |x: Tensor<'t>, _| {
            let k1 = slope(x);
            let k2 = slope(x + k1 * (dt / 2.0));
            let k3 = slope(x + k2 * (dt / 2.0));
            let k4 = slope(x + k3 * dt);
            x + (k1 + (k2 + k3) * 2.0 + k4) * (dt / 6.0)
        };
        (0..self.steps).fold(x, step).apply(&self.head)
    }
}
