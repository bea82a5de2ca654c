//! Recurrent layers: LSTM, GRU and the plain recurrent network, over sequences of fixed length; and
//! their cells. The steps of short sequences are unrolled, those of long ones are a
//! [scan](crate::Trace::scan).

use super::Module;
use crate::params::{Init, Param, Scope};
use crate::tensor::Tensor;
use crate::trace::Scan;

/// The longest sequence whose steps are unrolled, so that kernels may be fused across them; the
/// steps of longer ones are a scan, whose compilation does not grow with their number.
const UNROLLED_MAX: usize = 128;

/// The computation of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cell {
    Lstm,
    Gru,
    Tanh,
    Relu,
}

impl Cell {
    fn gates(self) -> usize {
        match self {
            Cell::Lstm => 4,
            Cell::Gru => 3,
            Cell::Tanh | Cell::Relu => 1,
        }
    }
}

/// The state between steps: h, and the c of an LSTM.
#[derive(Clone, Copy)]
struct Between<'t> {
    h: Tensor<'t>,
    c: Option<Tensor<'t>>,
}

impl<'t> Between<'t> {
    /// This state where a truth value `[n, 1]` holds, else the other, or zeros.
    #[track_caller]
    fn or(self, holds: Tensor<'t>, other: Option<Between<'t>>) -> Self {
        let pick = |new: Tensor<'t>, old: Option<Tensor<'t>>| match old {
            Some(old) => holds.select(new, old),
            None => holds.select(new, 0.0),
        };
        Between {
            h: pick(self.h, other.map(|o| o.h)),
            c: self.c.map(|c| pick(c, other.and_then(|o| o.c))),
        }
    }
}

/// The parameters of one layer in one direction.
#[derive(Clone, Debug)]
struct Weights {
    of_input: Param,
    of_state: Param,
    biases: Option<[Param; 2]>,
    projection: Option<Param>,
}

impl Weights {
    /// Declares the parameters, with names that end in `suffix`.
    #[track_caller]
    fn new(at: &Scope, suffix: &str, shape: &Shape, inputs: usize) -> Self {
        let Shape {
            cell,
            hidden,
            projection,
            bias,
            ..
        } = *shape;
        let (init, gates) = (
            Init::kaiming_uniform(hidden),
            hidden.saturating_mul(cell.gates()),
        );
        let name = |kind: &str| format!("{kind}{suffix}");
        Weights {
            of_input: at.param(&name("weight_ih"), (gates, inputs), init),
            of_state: at.param(&name("weight_hh"), (gates, shape.results()), init),
            biases: bias
                .then(|| ["bias_ih", "bias_hh"].map(|kind| at.param(&name(kind), (gates,), init))),
            projection: projection.map(|to| at.param(&name("weight_hr"), (to, hidden), init)),
        }
    }

    fn retract(&self, at: &Scope) {
        let all = [&self.of_input, &self.of_state]
            .into_iter()
            .chain(self.biases.iter().flatten())
            .chain(&self.projection);
        all.for_each(|param| at.retract(param));
    }

    /// The part of the gates that does not depend on the state: of a sequence or of one step.
    #[track_caller]
    fn input_part<'t>(&self, x: Tensor<'t>) -> Tensor<'t> {
        let product = x.matmul(x.trace().param(&self.of_input).t());
        match &self.biases {
            Some([bias, _]) => product + bias,
            None => product,
        }
    }

    /// One step from the input's part of the gates, `[n, gates·hidden]`.
    #[track_caller]
    fn step<'t>(&self, cell: Cell, now: Tensor<'t>, state: Option<Between<'t>>) -> Between<'t> {
        let trace = now.trace();
        let bias = self.biases.as_ref().map(|[_, bias]| trace.param(bias));
        let weight = trace.param(&self.of_state).t();
        let h = state.map(|state| state.h);
        if cell == Cell::Gru {
            let [r, z, n] = thirds(now);
            // The contribution of the state, if there is a state or a bias.
            let product = h.map(|h| h.matmul(weight));
            let of_state = match (product, bias) {
                (Some(product), Some(bias)) => Some(product + bias),
                (product, bias) => product.or(bias.map(|bias| bias.unsqueeze(0))),
            };
            let h = match (of_state.map(thirds), h) {
                (Some([sr, sz, sn]), h) => {
                    let (r, z) = ((r + sr).sigmoid(), (z + sz).sigmoid());
                    let n = (n + r * sn).tanh();
                    match h {
                        Some(h) => (1.0 - z) * n + z * h,
                        None => (1.0 - z) * n,
                    }
                }
                (None, _) => (1.0 - z.sigmoid()) * n.tanh(),
            };
            return Between { h, c: None };
        }
        let now = bias.map_or(now, |bias| now + bias);
        let now = h.map_or(now, |h| now + h.matmul(weight));
        match cell {
            Cell::Tanh => Between {
                h: now.tanh(),
                c: None,
            },
            Cell::Relu => Between {
                h: now.relu(),
                c: None,
            },
            _ => {
                let gates = now.split(1, 4);
                let written = gates[0].sigmoid() * gates[2].tanh();
                let before = state.and_then(|state| state.c);
                let c = before.map_or(written, |c| gates[1].sigmoid() * c + written);
                let h = gates[3].sigmoid() * c.tanh();
                let h = match &self.projection {
                    Some(weight) => h.matmul(trace.param(weight).t()),
                    None => h,
                };
                Between { h, c: Some(c) }
            }
        }
    }
}

/// The three gates of a GRU.
#[track_caller]
fn thirds(x: Tensor<'_>) -> [Tensor<'_>; 3] {
    let parts = x.split(1, 3);
    [parts[0], parts[1], parts[2]]
}

/// The numbers of a recurrent network.
#[derive(Clone, Copy, Debug)]
struct Shape {
    cell: Cell,
    inputs: usize,
    hidden: usize,
    /// The number of the first layer, and of layers.
    first: usize,
    layers: usize,
    both_ways: bool,
    projection: Option<usize>,
    bias: bool,
    /// The longest sequence whose steps are unrolled.
    unrolled_max: usize,
    /// The option of a scan, see [`Scan::checkpoint_every`].
    checkpoint_every: Option<usize>,
}

impl Shape {
    /// The width of h.
    fn results(&self) -> usize {
        self.projection.unwrap_or(self.hidden)
    }

    fn directions(&self) -> usize {
        1 + usize::from(self.both_ways)
    }
}

/// Stacked recurrent layers.
#[derive(Clone, Debug)]
struct Network {
    at: Scope,
    shape: Shape,
    /// Layer by layer, forwards before backwards.
    weights: Vec<Weights>,
    name: &'static str,
}

impl Network {
    #[track_caller]
    fn new(at: Scope, name: &'static str, shape: Shape) -> Self {
        let weights = Network::declare(&at, &shape);
        Network {
            at,
            shape,
            weights,
            name,
        }
    }

    /// The input, if there is a layer to read it.
    #[track_caller]
    fn with_layers<'t>(&self, x: Tensor<'t>) -> Tensor<'t> {
        match self.shape.layers {
            0 => x.mistake(format!("{} of 0 layers: one or more are needed", self.name)),
            _ => x,
        }
    }

    #[track_caller]
    fn declare(at: &Scope, shape: &Shape) -> Vec<Weights> {
        let mut weights = Vec::new();
        for layer in 0..shape.layers {
            let inputs = match layer {
                0 => shape.inputs,
                _ => shape.results().saturating_mul(shape.directions()),
            };
            for direction in ["", "_reverse"].into_iter().take(shape.directions()) {
                let suffix = format!("_l{}{direction}", shape.first + layer);
                weights.push(Weights::new(at, &suffix, shape, inputs));
            }
        }
        weights
    }

    /// Declares the parameters anew, after a change of the shape.
    #[track_caller]
    fn reshape(mut self, change: impl FnOnce(&mut Shape)) -> Self {
        self.weights.iter().for_each(|w| w.retract(&self.at));
        change(&mut self.shape);
        self.weights = Network::declare(&self.at, &self.shape);
        self
    }

    /// One layer in one direction: `[n, length, inputs]` → results of the steps in order of time,
    /// and the last state. A step at which `seen` (`[n, length]`) is false gives zeros and leaves
    /// the state as it was.
    #[track_caller]
    fn direction<'t>(
        &self,
        weights: &Weights,
        x: Tensor<'t>,
        backwards: bool,
        initial: Option<Between<'t>>,
        seen: Option<Tensor<'t>>,
    ) -> Option<(Tensor<'t>, Option<Between<'t>>)> {
        let length = x.len(1)?;
        if length > self.shape.unrolled_max {
            return Some(self.scanned(weights, x, backwards, initial, seen));
        }
        // The part that does not depend on the state is one product for the whole sequence.
        let from_input = weights.input_part(x);
        let mut state = initial;
        let mut outputs = Vec::with_capacity(length);
        for step in 0..length {
            let at = if backwards { length - 1 - step } else { step };
            let now = from_input.slice(1, at..=at).squeeze(1);
            let next = weights.step(self.shape.cell, now, state);
            let (h, next) = match seen {
                Some(seen) => {
                    let holds = seen.slice(1, at..=at);
                    (holds.select(next.h, 0.0), next.or(holds, state))
                }
                None => (next.h, next),
            };
            outputs.push(h);
            state = Some(next);
        }
        if backwards {
            outputs.reverse();
        }
        let all = if outputs.is_empty() {
            from_input.slice(2, ..self.shape.results().min(from_input.len(2)?))
        } else {
            x.trace().stack(&outputs, 1)
        };
        Some((all, state))
    }

    /// [`Network::direction`] of at least one step, as a scan.
    #[track_caller]
    fn scanned<'t>(
        &self,
        weights: &Weights,
        x: Tensor<'t>,
        backwards: bool,
        initial: Option<Between<'t>>,
        seen: Option<Tensor<'t>>,
    ) -> (Tensor<'t>, Option<Between<'t>>) {
        let Shape { cell, hidden, .. } = self.shape;
        let zeros = |width: usize| x.zero_states(1, width).squeeze(0);
        let h = initial.map_or_else(|| zeros(self.shape.results()), |state| state.h);
        let mut carries = vec![h];
        if cell == Cell::Lstm {
            let c = initial.and_then(|state| state.c);
            carries.push(c.unwrap_or_else(|| zeros(hidden)));
        }
        // Steps come first, so that those of a batch lie together.
        let mut inputs = vec![weights.input_part(x.permute([1, 0, 2]))];
        inputs.extend(seen.map(|seen| seen.t().unsqueeze(2)));
        let options = if backwards {
            Scan::default().reverse()
        } else {
            Scan::default()
        };
        let options = match self.shape.checkpoint_every {
            Some(steps) => options.checkpoint_every(steps),
            None => options,
        };
        let trace = x.trace();
        let (last, results) = trace.scan_many(options, &carries, &inputs, |carries, parts| {
            let state = Between {
                h: carries[0],
                c: carries.get(1).copied(),
            };
            let next = weights.step(cell, parts[0], Some(state));
            let (h, next) = match parts.get(1) {
                Some(&holds) => (holds.select(next.h, 0.0), next.or(holds, Some(state))),
                None => (next.h, next),
            };
            ([next.h].into_iter().chain(next.c).collect(), vec![h])
        });
        let all = results.first().map(|all| all.permute([1, 0, 2]));
        let state = Between {
            h: last[0],
            c: last.get(1).copied(),
        };
        (all.unwrap_or(last[0]), Some(state))
    }

    /// All layers. States are those of layers and directions, in order.
    #[track_caller]
    fn forward<'t>(
        &self,
        x: Tensor<'t>,
        initial: &[Between<'t>],
        lengths: Option<Tensor<'t>>,
    ) -> (Tensor<'t>, Vec<Option<Between<'t>>>) {
        let x = self.with_layers(x);
        let mut x = x.require_len(self.name, 2, self.shape.inputs);
        let Some(length) = x.len(1) else {
            return (x.require_fixed_axis(self.name, 1), Vec::new());
        };
        // Not in a closure, whose line would be reported.
        let mut seen = None;
        if let Some(lengths) = lengths {
            seen = Some(lengths.require_lengths(length).within(length));
        }
        let mut last = Vec::new();
        for of_layer in self.weights.chunks(self.shape.directions()) {
            let mut sides = Vec::new();
            for (side, weights) in of_layer.iter().enumerate() {
                let first = initial.get(last.len()).copied();
                let Some((y, state)) = self.direction(weights, x, side == 1, first, seen) else {
                    return (x, last);
                };
                sides.push(y);
                last.push(state);
            }
            x = match sides[..] {
                [only] => only,
                _ => x.trace().concat(&sides, 2),
            };
        }
        (x, last)
    }

    /// States `[layers·directions, n, width]` as those of layers and directions.
    #[track_caller]
    fn apart<'t>(&self, all: Tensor<'t>, width: usize) -> Vec<Tensor<'t>> {
        let count = self.weights.len();
        let all = all
            .require_rank("the state of a recurrent layer", 3)
            .require_len("the state of a recurrent layer", 0, count)
            .require_len("the state of a recurrent layer", 2, width);
        (0..count).map(|i| all.slice(0, i..=i).squeeze(0)).collect()
    }

    /// The parts of last states, one after the other. Of no steps they are the initial ones, or
    /// zeros.
    #[track_caller]
    fn together<'t>(
        &self,
        x: Tensor<'t>,
        parts: Vec<Option<Tensor<'t>>>,
        width: usize,
    ) -> Tensor<'t> {
        let known: Option<Vec<Tensor<'t>>> = parts.into_iter().collect();
        match known {
            Some(parts) if !parts.is_empty() => x.trace().stack(&parts, 0),
            _ => x.zero_states(self.weights.len(), width),
        }
    }
}

macro_rules! networks {
    ($($(#[$doc:meta])* $name:ident $text:literal $cell:expr;)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Debug)]
        pub struct $name(Network);

        impl $name {
            /// Declares the parameters, initially uniform in ±1/√hidden.
            #[track_caller]
            pub fn new(at: Scope, inputs: usize, hidden: usize) -> Self {
                $name::numbered(at, 0, inputs, hidden)
            }

            /// Declares the parameters of one of several stacked layers: their names end in its
            /// number instead of 0, as PyTorch's do.
            #[track_caller]
            pub fn numbered(at: Scope, layer: usize, inputs: usize, hidden: usize) -> Self {
                let shape = Shape {
                    cell: $cell,
                    inputs,
                    hidden,
                    first: layer,
                    layers: 1,
                    both_ways: false,
                    projection: None,
                    bias: true,
                    unrolled_max: UNROLLED_MAX,
                    checkpoint_every: None,
                };
                $name(Network::new(at, $text, shape))
            }

            /// With so many layers, each over the results of the one before.
            #[track_caller]
            pub fn layers(self, count: usize) -> Self {
                $name(self.0.reshape(|shape| shape.layers = count))
            }

            /// With a second network for each layer that runs from the last step to the first;
            /// their results are side by side, and parameters of the second end in `_reverse`.
            #[track_caller]
            pub fn both_ways(self) -> Self {
                $name(self.0.reshape(|shape| shape.both_ways = true))
            }

            /// With the steps of sequences longer than this as a [scan](crate::Trace::scan), which
            /// is compiled once for any length; those of shorter ones are unrolled. 128 by default.
            pub fn unrolled_up_to(mut self, steps: usize) -> Self {
                self.0.shape.unrolled_max = steps;
                self
            }

            /// Where steps are a scan, keeps the states at intervals of this many steps for the
            /// backward pass rather than those of all ([`Scan::checkpoint_every`]). The inputs'
            /// part of the gates, 3 or 4 times as wide as a state, is computed for all steps at
            /// once, and kept.
            pub fn checkpoint_every(mut self, steps: usize) -> Self {
                self.0.shape.checkpoint_every = Some(steps);
                self
            }

            /// Without biases.
            #[track_caller]
            pub fn without_bias(self) -> Self {
                $name(self.0.reshape(|shape| shape.bias = false))
            }
        }

        impl Module for $name {
            #[track_caller]
            fn forward<'t>(&self, x: Tensor<'t>) -> Tensor<'t> {
                self.0.forward(x, &[], None).0
            }
        }
    )*};
}

networks! {
    /// Long short-term memory (Hochreiter & Schmidhuber 1997; forget gates of Gers et al. 2000)
    /// over a sequence of fixed length: `[n, length, inputs] → [n, length, hidden]`. The
    /// state is zero at first, unless [`run`](Lstm::run) gets another. With gates i, f, g, o side
    /// by side:
    ///
    /// ```text
    /// c ← σ(f)·c + σ(i)·tanh(g)
    /// h ← σ(o)·tanh(c)
    /// ```
    ///
    /// Its parameters are `weight_ih_l0` `[4·hidden, inputs]`, `weight_hh_l0` `[4·hidden, hidden]`,
    /// `bias_ih_l0` and `bias_hh_l0` `[4·hidden]`, and those of further layers and directions.
    Lstm "lstm" Cell::Lstm;
    /// Gated recurrent units (Cho et al. 2014) over a sequence of fixed length: `[n,
    /// length, inputs] → [n, length, hidden]`. With gates r, z, n side by side, of the input (x)
    /// and of the state (s):
    ///
    /// ```text
    /// n ← tanh(xₙ + σ(xᵣ + sᵣ)·sₙ)
    /// h ← (1 − σ(x_z + s_z))·n + σ(x_z + s_z)·h
    /// ```
    ///
    /// Its parameters are `weight_ih_l0` `[3·hidden, inputs]`, `weight_hh_l0` `[3·hidden, hidden]`,
    /// `bias_ih_l0` and `bias_hh_l0` `[3·hidden]`, and those of further layers and directions.
    Gru "gru" Cell::Gru;
    /// The recurrent network h ← tanh(W·x + b + V·h + c) (Elman 1990) over a sequence of fixed
    /// length: `[n, length, inputs] → [n, length, hidden]`.
    ///
    /// Its parameters are `weight_ih_l0` `[hidden, inputs]`, `weight_hh_l0` `[hidden, hidden]`,
    /// `bias_ih_l0` and `bias_hh_l0` `[hidden]`, and those of further layers and directions.
    Rnn "rnn" Cell::Tanh;
}

impl Rnn {
    /// With max(x, 0) in the place of tanh.
    #[track_caller]
    pub fn relu(self) -> Self {
        Rnn(self.0.reshape(|shape| shape.cell = Cell::Relu))
    }
}

impl Lstm {
    /// With h multiplied by a matrix `weight_hr_l0` `[width, hidden]` after each step, to this
    /// width (Sak et al. 2014).
    #[track_caller]
    pub fn projection(self, width: usize) -> Self {
        Lstm(self.0.reshape(|shape| shape.projection = Some(width)))
    }

    /// The results of all steps of the last layer, and the last states h and c of all layers,
    /// `[layers·directions, n, hidden]`. The initial states have the same shape; `None` is zeros. Of
    /// sequences of different lengths, `lengths` (i32 `[n]`) are the numbers of steps that count:
    /// later results are zeros, and the last state of each is that at its end. A length below 0 or
    /// beyond the steps fails the run.
    #[track_caller]
    pub fn run<'t>(
        &self,
        x: Tensor<'t>,
        initial: Option<[Tensor<'t>; 2]>,
        lengths: Option<Tensor<'t>>,
    ) -> (Tensor<'t>, [Tensor<'t>; 2]) {
        let shape = &self.0.shape;
        let widths = [shape.results(), shape.hidden];
        let initial: Vec<Between<'t>> = initial.map_or(Vec::new(), |[h, c]| {
            let (h, c) = (self.0.apart(h, widths[0]), self.0.apart(c, widths[1]));
            let both = h.into_iter().zip(c);
            both.map(|(h, c)| Between { h, c: Some(c) }).collect()
        });
        let (y, last) = self.0.forward(x, &initial, lengths);
        let h = last.iter().map(|state| state.map(|s| s.h)).collect();
        let c = last.iter().map(|state| state.and_then(|s| s.c)).collect();
        let h = self.0.together(x, h, widths[0]);
        (y, [h, self.0.together(x, c, widths[1])])
    }
}

macro_rules! run {
    ($($name:ident),*) => {$(
        impl $name {
            /// The results of all steps of the last layer, and the last states of all layers,
            /// `[layers·directions, n, hidden]`. The initial states have the same shape; `None` is
            /// zeros. Of sequences of different lengths, `lengths` (i32 `[n]`) are the numbers of
            /// steps that count: later results are zeros, and the last state of each is that at its
            /// end. A length below 0 or beyond the steps fails the run.
            #[track_caller]
            pub fn run<'t>(
                &self,
                x: Tensor<'t>,
                initial: Option<Tensor<'t>>,
                lengths: Option<Tensor<'t>>,
            ) -> (Tensor<'t>, Tensor<'t>) {
                let width = self.0.shape.hidden;
                let initial = initial.map_or(Vec::new(), |h| self.0.apart(h, width));
                let initial: Vec<Between<'t>> =
                    initial.into_iter().map(|h| Between { h, c: None }).collect();
                let (y, last) = self.0.forward(x, &initial, lengths);
                let h = last.iter().map(|state| state.map(|s| s.h)).collect();
                (y, self.0.together(x, h, width))
            }
        }
    )*};
}

run!(Gru, Rnn);

macro_rules! cells {
    ($($(#[$doc:meta])* $name:ident $text:literal $cell:expr;)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Debug)]
        pub struct $name {
            shape: Shape,
            weights: Weights,
        }

        impl $name {
            /// Declares `weight_ih`, `weight_hh`, `bias_ih` and `bias_hh`, uniform in ±1/√hidden at
            /// first.
            #[track_caller]
            pub fn new(at: Scope, inputs: usize, hidden: usize) -> Self {
                let shape = Shape {
                    cell: $cell,
                    inputs,
                    hidden,
                    first: 0,
                    layers: 1,
                    both_ways: false,
                    projection: None,
                    bias: true,
                    unrolled_max: UNROLLED_MAX,
                    checkpoint_every: None,
                };
                let weights = Weights::new(&at, "", &shape, inputs);
                $name { shape, weights }
            }

            /// One step, checked to be of the cell's widths.
            #[track_caller]
            fn stepped<'t>(&self, x: Tensor<'t>, state: Between<'t>) -> Between<'t> {
                let x = x
                    .require_rank($text, 2)
                    .require_len($text, 1, self.shape.inputs);
                let now = self.weights.input_part(x);
                self.weights.step(self.shape.cell, now, Some(state))
            }
        }
    )*};
}

cells! {
    /// One step of an [`Lstm`].
    LstmCell "lstm cell" Cell::Lstm;
    /// One step of a [`Gru`].
    GruCell "gru cell" Cell::Gru;
    /// One step of an [`Rnn`].
    RnnCell "rnn cell" Cell::Tanh;
}

impl LstmCell {
    /// The states h and c after a step with input `[n, inputs]`, from states `[n, hidden]`.
    #[track_caller]
    pub fn step<'t>(&self, x: Tensor<'t>, [h, c]: [Tensor<'t>; 2]) -> [Tensor<'t>; 2] {
        let next = self.stepped(x, Between { h, c: Some(c) });
        [next.h, next.c.unwrap_or(next.h)]
    }
}

impl GruCell {
    /// The state after a step with input `[n, inputs]`, from a state `[n, hidden]`.
    #[track_caller]
    pub fn step<'t>(&self, x: Tensor<'t>, h: Tensor<'t>) -> Tensor<'t> {
        self.stepped(x, Between { h, c: None }).h
    }
}

impl RnnCell {
    /// The state after a step with input `[n, inputs]`, from a state `[n, hidden]`.
    #[track_caller]
    pub fn step<'t>(&self, x: Tensor<'t>, h: Tensor<'t>) -> Tensor<'t> {
        self.stepped(x, Between { h, c: None }).h
    }
}

impl<'t> Tensor<'t> {
    /// Zeros `[count, n, width]` for this sequence `[n, …]`.
    #[track_caller]
    fn zero_states(self, count: usize, width: usize) -> Tensor<'t> {
        self.trace().zeros((count, 1, width)).expand_batch(self)
    }
}
