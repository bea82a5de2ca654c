//! Recurrent layers: the products with the inputs of all steps are one. The steps of short sequences
//! are unrolled, those of long ones and of those whose length a run decides are a scan.

use slabwise::shape::Size;
use slabwise::{DType, Scan, Tensor};

use super::Run;
use crate::call::{Call, Results, dim, lengths, result, shape_of, sizes};

pub const OPERATORS: &[(&str, Run)] = &[
    ("GRU", |c| layer(c, 3, &["Sigmoid", "Tanh"], gru)),
    ("LSTM", |c| layer(c, 4, &["Sigmoid", "Tanh", "Tanh"], lstm)),
    ("RNN", |c| layer(c, 1, &["Tanh"], rnn)),
];

/// The longest sequence whose steps are unrolled, so that kernels may be fused across them; the
/// steps of longer ones are compiled once.
pub const UNROLLED_MAX: usize = 128;

/// A function of gates.
#[derive(Clone)]
struct Activation {
    name: String,
    alpha: f32,
    beta: f32,
}

impl Activation {
    /// A function by its name; it takes its parameters from the lists, in order.
    fn new(
        name: &str,
        alphas: &mut impl Iterator<Item = f32>,
        betas: &mut impl Iterator<Item = f32>,
    ) -> Result<Activation, String> {
        let name = name.to_lowercase();
        let (alpha, beta) = match &*name {
            "relu" | "tanh" | "sigmoid" | "softsign" | "softplus" => (None, None),
            "affine" => (Some(1.0), Some(0.0)),
            "leakyrelu" => (Some(0.01), None),
            "thresholdedrelu" | "elu" => (Some(1.0), None),
            "scaledtanh" => (Some(1.0), Some(1.0)),
            "hardsigmoid" => (Some(0.2), Some(0.5)),
            other => return Err(format!("activation \"{other}\"")),
        };
        let alpha = alpha.map_or(0.0, |default| alphas.next().unwrap_or(default));
        let beta = beta.map_or(0.0, |default| betas.next().unwrap_or(default));
        Ok(Activation { name, alpha, beta })
    }

    fn of<'t>(&self, x: Tensor<'t>) -> Tensor<'t> {
        let (alpha, beta) = (self.alpha, self.beta);
        match &*self.name {
            "relu" => x.relu(),
            "tanh" => x.tanh(),
            "sigmoid" => x.sigmoid(),
            "softsign" => x.softsign(),
            "softplus" => x.softplus(),
            "affine" => x * alpha + beta,
            "leakyrelu" => x.leaky_relu(alpha),
            "thresholdedrelu" => x.ge(alpha).select(x, 0.0),
            "elu" => x.elu(alpha),
            "scaledtanh" => (x * beta).tanh() * alpha,
            _ => (x * alpha + beta).clamp(0.0, 1.0),
        }
    }
}

/// What a step of one direction computes with.
struct Cell<'c, 't> {
    call: &'c Call<'c, 't>,
    /// The functions f, g and h.
    functions: Vec<Activation>,
    hidden: usize,
    /// The recurrent weights `[gates · hidden, hidden]`.
    recurrent: Tensor<'t>,
    /// The recurrent bias `[gates · hidden]`.
    bias: Option<Tensor<'t>>,
    /// The weights of peepholes `[3 · hidden]`.
    peepholes: Option<Tensor<'t>>,
}

impl<'t> Cell<'_, 't> {
    /// A gate's input, limited.
    fn clipped(&self, x: Tensor<'t>) -> Tensor<'t> {
        match self.call.has("clip") {
            true => {
                let limit = self.call.f("clip", 0.0);
                x.clamp(-limit, limit)
            }
            false => x,
        }
    }

    fn activate(&self, at: usize, x: Tensor<'t>) -> Tensor<'t> {
        self.functions[at].of(self.clipped(x))
    }

    /// The `at`th of the gates, which lie along axis 1.
    fn gate(&self, x: Tensor<'t>, at: usize) -> Tensor<'t> {
        x.slice(1, at * self.hidden..(at + 1) * self.hidden)
    }

    /// The hidden state's share of the gates `from..to`.
    fn carried(&self, state: Tensor<'t>, from: usize, to: usize) -> Tensor<'t> {
        let rows = from * self.hidden..to * self.hidden;
        let product = state.matmul(self.recurrent.slice(0, rows.clone()).t());
        self.bias
            .map_or(product, |bias| product + bias.slice(0, rows))
    }

    fn peephole(&self, at: usize, gate: Tensor<'t>, cell: Tensor<'t>) -> Tensor<'t> {
        let rows = at * self.hidden..(at + 1) * self.hidden;
        self.peepholes
            .map_or(gate, |p| gate + cell * p.slice(0, rows))
    }
}

/// The states after a step, from the input's share of the gates and the states before it.
type Step = for<'c, 't> fn(&Cell<'c, 't>, Tensor<'t>, &[Tensor<'t>]) -> Vec<Tensor<'t>>;

fn rnn<'t>(cell: &Cell<'_, 't>, x: Tensor<'t>, states: &[Tensor<'t>]) -> Vec<Tensor<'t>> {
    vec![cell.activate(0, x + cell.carried(states[0], 0, 1))]
}

/// The gates are update, reset, hidden.
fn gru<'t>(cell: &Cell<'_, 't>, x: Tensor<'t>, states: &[Tensor<'t>]) -> Vec<Tensor<'t>> {
    let old = states[0];
    let both = cell.carried(old, 0, 2);
    let update = cell.activate(0, cell.gate(x, 0) + cell.gate(both, 0));
    let reset = cell.activate(0, cell.gate(x, 1) + cell.gate(both, 1));
    let carried = match cell.call.flag("linear_before_reset") {
        true => reset * cell.carried(old, 2, 3),
        false => cell.carried(reset * old, 2, 3),
    };
    let new = cell.activate(1, cell.gate(x, 2) + carried);
    vec![(1.0 - update) * new + update * old]
}

/// The gates are input, output, forget, cell.
fn lstm<'t>(cell: &Cell<'_, 't>, x: Tensor<'t>, states: &[Tensor<'t>]) -> Vec<Tensor<'t>> {
    let (hidden, old) = (states[0], states[1]);
    let gates = x + cell.carried(hidden, 0, 4);
    let gate = |at: usize| cell.gate(gates, at);
    let input = cell.activate(0, cell.peephole(0, gate(0), old));
    let forget = match cell.call.flag("input_forget") {
        true => 1.0 - input,
        false => cell.activate(0, cell.peephole(2, gate(2), old)),
    };
    let new = forget * old + input * cell.activate(1, gate(3));
    let output = cell.activate(0, cell.peephole(1, gate(1), new));
    vec![output * cell.functions[2].of(new), new]
}

/// The states after a step and its result: beyond its length a sequence keeps its states and gives 0.
fn kept<'t>(
    inside: Option<Tensor<'t>>,
    new: Vec<Tensor<'t>>,
    old: &[Tensor<'t>],
) -> (Vec<Tensor<'t>>, Tensor<'t>) {
    match inside {
        Some(inside) => {
            let states = new.iter().zip(old);
            let states = states.map(|(&new, &old)| inside.select(new, old));
            (states.collect(), inside.select(new[0], 0.0))
        }
        None => {
            let row = new[0];
            (new, row)
        }
    }
}

fn layer<'t>(call: &Call<'_, 't>, gates: usize, functions: &[&str], step: Step) -> Results<'t> {
    let x = call.float(0)?;
    let batch_first = call.flag("layout");
    let turned = |x: Tensor<'t>| if batch_first { x.transpose(0, 1) } else { x };
    let x = turned(x);
    let (weights, recurrent) = (call.float(1)?, call.float(2)?);
    let (&[steps, batch, width], &[directions, _, hidden]) =
        (&sizes(x)[..], &lengths(recurrent)?[..])
    else {
        return Err("its input and its weights must be of three axes".into());
    };
    let direction = call.text("direction", "forward");
    if !["forward", "reverse", "bidirectional"].contains(&&*direction) {
        return Err(format!("direction \"{direction}\""));
    }
    if directions != if direction == "bidirectional" { 2 } else { 1 } {
        return Err(format!(
            "weights of {directions} directions for \"{direction}\""
        ));
    }
    // The steps that are computed, of which the first few count where a run decides the length.
    let all = usize::try_from(call.trace.range_of(steps).1).unwrap_or(0);
    let open = steps.as_fixed().is_none();
    if all == 0 {
        return Err("a sequence of no steps".into());
    }
    if call.trace.range_of(steps).1 > i64::from(u32::MAX) / 2 {
        return Err("its length needs a bound".into());
    }
    let lstm = gates == 4;
    let bias = call.optional_float(3)?;
    let used = call
        .optional(4)?
        .map(|n| n.cast(DType::I32).reshape(shape_of(&[batch, Size::ONE])));
    let initial = [
        call.optional_float(5)?,
        if lstm { call.optional_float(6)? } else { None },
    ];
    let peepholes = if lstm { call.optional_float(7)? } else { None };
    let names = call.texts("activations");
    let names = names.unwrap_or_else(|| {
        let once = functions.iter().map(ToString::to_string);
        once.cycle().take(functions.len() * directions).collect()
    });
    if names.len() != functions.len() * directions {
        return Err(format!("activations {names:?} for {directions} directions"));
    }
    let (mut alphas, mut betas) = (
        call.float_list("activation_alpha")
            .unwrap_or_default()
            .into_iter(),
        call.float_list("activation_beta")
            .unwrap_or_default()
            .into_iter(),
    );
    let mut all_rows = Vec::new();
    let mut all_states: Vec<Vec<Tensor<'t>>> = vec![Vec::new(); if lstm { 2 } else { 1 }];
    for at in 0..directions {
        let own = |x: Tensor<'t>| x.slice(0, at..at + 1).squeeze(0);
        let part = &names[at * functions.len()..(at + 1) * functions.len()];
        let functions = part
            .iter()
            .map(|name| Activation::new(name, &mut alphas, &mut betas));
        let size = gates * hidden;
        let bias = bias.map(own);
        let cell = Cell {
            call,
            functions: functions.collect::<Result<_, _>>()?,
            hidden,
            recurrent: own(recurrent),
            bias: bias.map(|bias| bias.slice(0, size..2 * size)),
            peepholes: peepholes.map(own),
        };
        let flat = x.reshape(shape_of(&[Size::fixed(-1), width]));
        let flat = flat.matmul(own(weights).t());
        let flat = bias.map_or(flat, |bias| flat + bias.slice(0, 0..size));
        let inputs = flat.reshape(shape_of(&[steps, batch, Size::fixed(size as i64)]));
        let mut states: Vec<Tensor<'t>> = initial[..all_states.len()]
            .iter()
            .map(|given| match given {
                Some(given) => own(turned(*given)),
                None => call.trace.zeros((dim(batch), hidden)),
            })
            .collect();
        let backward = direction == "reverse" || at == 1;
        let rows = if open || all > UNROLLED_MAX {
            let inputs = inputs.pad_to(0, all, 0.0);
            let places = call.trace.arange(all).cast(DType::I32);
            let end = open.then(|| call.trace.length(dim(steps)));
            let options = match backward {
                true => Scan::default().reverse(),
                false => Scan::default(),
            };
            let initial = states.clone();
            let body = |states: &[Tensor<'t>], parts: &[Tensor<'t>]| {
                let new = step(&cell, parts[0], states);
                let place = parts[1];
                let used = used.map(|used| used.gt(place));
                let inside = end.map(|end| place.lt(end).reshape([1, 1]));
                let inside = match (used, inside) {
                    (Some(used), Some(inside)) => Some(used.and(inside)),
                    (used, inside) => used.or(inside),
                };
                let (states, row) = kept(inside, new, states);
                (states, vec![row])
            };
            let parts = [inputs, places];
            let (last, rows) = call.trace.scan_many(options, &initial, &parts, body);
            states = last;
            let rows = rows.first().ok_or("its steps cannot be expressed")?;
            rows.narrow(0, 0, dim(steps))
        } else {
            let mut rows = vec![None; all];
            for i in 0..all {
                let place = if backward { all - 1 - i } else { i };
                let input = inputs.slice(0, place..place + 1).squeeze(0);
                let new = step(&cell, input, &states);
                let inside = used.map(|used| used.gt(place as f32));
                let row;
                (states, row) = kept(inside, new, &states);
                rows[place] = Some(row);
            }
            let rows: Vec<Tensor<'t>> = rows.into_iter().flatten().collect();
            call.trace.stack(&rows, 0)
        };
        all_rows.push(rows);
        for (all, state) in all_states.iter_mut().zip(states) {
            all.push(state);
        }
    }
    let element = call.element(0)?;
    let rows = call.trace.stack(&all_rows, 1);
    let rows = match batch_first {
        true => rows.permute([2, 0, 1, 3]),
        false => rows,
    };
    let mut results = vec![result(element, rows)];
    for states in &all_states {
        results.push(result(element, turned(call.trace.stack(states, 0))));
    }
    Ok(results)
}
