//! Adapters of low rank.

use super::{Linear, Module};
use crate::params::{Init, Param, Scope};
use crate::tensor::Tensor;
use crate::trace::Trace;

/// A [`Linear`] with an adapter of low rank beside it (Hu et al. 2021): x·Wᵀ + b + s·(x·Aᵀ)·Bᵀ with
/// s = alpha/rank. To train the adapters alone, freeze the other parameters:
///
/// ```
/// # use slabwise::prelude::*;
/// # use slabwise::{nn::LoraLinear, optim::AdamW};
/// # let params = Params::seeded(0);
/// let layer = LoraLinear::new(params.root() / "query", 64, 64, 8);
/// let trace = Trace::training();
/// trace.freeze(|weight| !LoraLinear::is_adapter(&weight.name));
/// let x = trace.input("x", F32, (4, 64));
/// trace.minimize(x.apply(&layer).square().mean(), AdamW::new(1e-3));
/// ```
///
/// The weights of the layer keep the names of [`Linear`], so that files of the whole model fit, and
/// the adapter has those of PEFT: `lora_A.weight` `[rank, inputs]`, `lora_B.weight` `[outputs,
/// rank]`, of which the second is 0 at first. In a [quantized](Scope::quantized) scope the weights of
/// the layer are quantized, and those of the adapter are floats, which are trained.
#[derive(Clone, Debug)]
pub struct LoraLinear {
    base: Linear,
    down: Param,
    up: Param,
    scale: f32,
    dropout: f32,
}

impl LoraLinear {
    /// Declares the weights of the layer and of an adapter of this rank, whose alpha is the rank.
    #[track_caller]
    pub fn new(at: Scope, inputs: usize, outputs: usize, rank: usize) -> Self {
        LoraLinear::around(Linear::new(at.clone(), inputs, outputs), at, rank)
    }

    /// An adapter of this rank around a layer that is declared at this scope.
    #[track_caller]
    pub fn around(base: Linear, at: Scope, rank: usize) -> Self {
        let widths = base.weight().dims();
        let (outputs, inputs) = (widths[0], widths[1]);
        if rank == 0 {
            at.mistake("an adapter of rank 0".into());
        }
        // Quantized weights are not trained.
        let at = at.quantized(None);
        let (down, up) = (&at / "lora_A", &at / "lora_B");
        LoraLinear {
            base,
            down: down.param("weight", (rank, inputs), Init::kaiming_uniform(inputs)),
            up: up.param("weight", (outputs, rank), Init::Constant(0.0)),
            scale: 1.0,
            dropout: 0.0,
        }
        .alpha(rank as f32)
    }

    /// The adapter's share: it is scaled by alpha/rank.
    pub fn alpha(mut self, alpha: f32) -> Self {
        self.scale = alpha / self.rank() as f32;
        self
    }

    /// Drops elements of the adapter's input with this probability; see [`Tensor::dropout`].
    pub fn dropout(mut self, p: f32) -> Self {
        self.dropout = p;
        self
    }

    fn rank(&self) -> usize {
        let dims = self.down.dims();
        dims.first().copied().unwrap_or(1).max(1)
    }

    /// Whether a parameter of this name is an adapter's.
    pub fn is_adapter(name: &str) -> bool {
        name.split('.')
            .any(|part| part == "lora_A" || part == "lora_B")
    }

    /// The weight of the one [`Linear`] that computes the same: W + s·B·A, `[outputs, inputs]`.
    #[track_caller]
    pub fn merged<'t>(&self, trace: &'t Trace) -> Tensor<'t> {
        let product = trace.param(&self.up).matmul(trace.param(&self.down));
        trace.param(self.base.weight()) + product * self.scale
    }
}

impl Module for LoraLinear {
    #[track_caller]
    fn forward<'t>(&self, x: Tensor<'t>) -> Tensor<'t> {
        let trace = x.trace();
        let inner = x.dropout(self.dropout).matmul(trace.param(&self.down).t());
        let adapted = inner.matmul(trace.param(&self.up).t());
        x.apply(&self.base) + adapted * self.scale
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optim::AdamW;
    use crate::{DType, Device, Params, Session};

    /// The adapter changes nothing at first; training moves the adapter alone, and the merged weight
    /// computes the same.
    #[test]
    fn adapters_learn_alone_and_merge() {
        let params = Params::seeded(3);
        let layer = LoraLinear::new(params.root() / "query", 6, 4, 2).alpha(3.0);
        let input = ndarray::Array2::from_shape_fn((5, 6), |(i, j)| (i as f32 - j as f32) / 7.0);
        let read = |session: &mut Session| {
            let trace = Trace::inference();
            let x = trace.input("x", DType::F32, (5, 6));
            let plain = x.apply(&layer.base);
            let merged = x.matmul(layer.merged(&trace).t()) + layer.base.bias().expect("a bias");
            let program = session
                .compile(&trace, [x.apply(&layer), plain, merged])
                .expect("it compiles");
            let results = session.run(&program, (&input,)).expect("a run");
            results.map(|y| {
                y.view::<f32>()
                    .expect("f32")
                    .iter()
                    .copied()
                    .collect::<Vec<f32>>()
            })
        };
        let near = |a: &[f32], b: &[f32]| a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-5);
        let mut session = Session::new(Device::Cpu, params.clone()).expect("a session");
        let trace = Trace::training();
        trace.freeze(|weight| !LoraLinear::is_adapter(&weight.name));
        let x = trace.input("x", DType::F32, (5, 6));
        let loss = (x.apply(&layer) - 1.0).square().mean();
        trace.minimize(loss, AdamW::new(0.05));
        let program = session.compile(&trace, [loss]).expect("it compiles");
        let [first, plain, _] = read(&mut session);
        assert_eq!(first, plain);
        let losses: Vec<f32> = (0..50)
            .map(|_| session.run(&program, (&input,)).expect("a run")[0].item())
            .collect();
        assert!(losses[49] < 0.5 * losses[0], "{losses:?}");
        let [adapted, after, merged] = read(&mut session);
        assert_eq!(after, plain);
        assert!(near(&adapted, &merged) && !near(&adapted, &plain));
    }
}
