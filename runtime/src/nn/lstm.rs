//! A recurrent layer.

use super::Module;
use crate::params::{Init, Param, Scope};
use crate::tensor::Tensor;

/// Long short-term memory (Hochreiter & Schmidhuber 1997; forget gates of Gers et al. 2000) over a
/// sequence of fixed length, unrolled: `[n, length, inputs] → [n, length, hidden]`. The state is
/// zero at first. With gates i, f, g, o side by side:
///
/// ```text
/// c ← σ(f)·c + σ(i)·tanh(g)
/// h ← σ(o)·tanh(c)
/// ```
///
/// Its parameters are `weight_ih_l0` `[4·hidden, inputs]`, `weight_hh_l0` `[4·hidden, hidden]`,
/// `bias_ih_l0` and `bias_hh_l0` `[4·hidden]`.
#[derive(Clone, Debug)]
pub struct Lstm {
    hidden: usize,
    of_input: [Param; 2],
    of_state: [Param; 2],
}

impl Lstm {
    /// Declares the parameters, uniform in ±1/√hidden at first.
    #[track_caller]
    pub fn new(at: Scope, inputs: usize, hidden: usize) -> Self {
        Lstm::numbered(at, 0, inputs, hidden)
    }

    /// Declares the parameters of one of several stacked layers: their names end in its number
    /// instead of 0, as PyTorch's do.
    #[track_caller]
    pub fn numbered(at: Scope, layer: usize, inputs: usize, hidden: usize) -> Self {
        let (init, gates) = (Init::kaiming_uniform(hidden), hidden.saturating_mul(4));
        let name = |kind: &str| format!("{kind}_l{layer}");
        Lstm {
            hidden,
            of_input: [
                at.param(&name("weight_ih"), (gates, inputs), init),
                at.param(&name("bias_ih"), (gates,), init),
            ],
            of_state: [
                at.param(&name("weight_hh"), (gates, hidden), init),
                at.param(&name("bias_hh"), (gates,), init),
            ],
        }
    }
}

impl Module for Lstm {
    #[track_caller]
    fn forward<'t>(&self, x: Tensor<'t>) -> Tensor<'t> {
        let trace = x.trace();
        let x = x.require_len("lstm", 2, self.of_input[0].dims()[1]);
        let Some(length) = x.len(1) else { return x };
        // The part that does not depend on the state is one product for the whole sequence.
        let [weight, bias] = &self.of_input;
        let from_input = x.matmul(trace.param(weight).t()) + bias;
        let [weight, bias] = &self.of_state;
        let weight = trace.param(weight).t();
        let mut state: Option<(Tensor<'t>, Tensor<'t>)> = None;
        let mut outputs = Vec::with_capacity(length);
        for at in 0..length {
            let now = from_input.slice(1, at..=at).squeeze(1) + bias;
            let now = state.map_or(now, |(h, _)| now + h.matmul(weight));
            let gates = now.split(1, 4);
            let written = gates[0].sigmoid() * gates[2].tanh();
            let c = state.map_or(written, |(_, c)| gates[1].sigmoid() * c + written);
            let h = gates[3].sigmoid() * c.tanh();
            outputs.push(h);
            state = Some((h, c));
        }
        if outputs.is_empty() {
            return from_input.slice(2, ..self.hidden);
        }
        trace.stack(&outputs, 1)
    }
}
