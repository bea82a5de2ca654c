//! A program by layers: output shapes, parameters, operations, and the bytes that the backward pass
//! needs kept.

use std::collections::HashMap;
use std::fmt;

use slabwise_kernels::spec::Access;
use slabwise_planner::{Bytes, table};

use super::{Session, fixed};
use crate::error::Result;
use crate::graph::{Phase, QuantizedRole};
use crate::passes::operations;
use crate::program::{Compiled, Place, Program, Step};

/// A layer of a [`Summary`].
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct LayerSummary {
    /// Its path, such as `body.conv2`; empty for all that lies outside of layers, inputs included.
    pub name: String,
    /// Type and shape of its output: of the last value computed directly from a parameter of the
    /// layer. Empty outside of layers.
    pub output: String,
    /// The number of its parameters.
    pub parameters: u64,
    /// The bytes of its parameters.
    pub parameter_bytes: u64,
    /// Arithmetic operations of the forward pass: of products a multiplication and an addition
    /// each, of other code one for each instruction of each element.
    pub forward_flops: u64,
    /// The same of the backward pass, recomputation included.
    pub backward_flops: u64,
    /// Bytes of the plan for values that the forward pass computes and the backward pass reads.
    pub kept_bytes: u64,
}

/// A program by layers, as [`Session::summary`] gives it; `Display` is a table.
///
/// Numbers are those of the plan, at the bounds of bounded dimensions. A kernel counts for the
/// layer of its main operation, so that the activation that is fused into a convolution counts for
/// the convolution.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Summary {
    /// The program's name.
    pub program: String,
    /// The layers, in the order of their first operations.
    pub layers: Vec<LayerSummary>,
    /// The sums of all layers.
    pub total: LayerSummary,
    /// Bytes of the slab.
    pub slab_bytes: u64,
    /// Bytes of the weights.
    pub weight_bytes: u64,
    /// Bytes of everything else that lives as long as the session, such as optimizer state.
    pub state_bytes: u64,
}

impl Session {
    /// A program by layers: output shape, parameters, arithmetic operations of both passes, and the
    /// bytes that are kept for the backward pass.
    ///
    /// ```
    /// # use slabwise::prelude::*;
    /// # use slabwise::{nn::Linear, optim::Sgd};
    /// let params = Params::seeded(0);
    /// let hidden = Linear::new(&params.root() / "hidden", 8, 16);
    /// let head = Linear::new(&params.root() / "head", 16, 3);
    /// let trace = Trace::training();
    /// let (x, y) = (trace.input("x", F32, (32, 8)), trace.input("y", I32, (32,)));
    /// let loss = x.apply(&hidden).relu().apply(&head).cross_entropy(y);
    /// trace.minimize(loss, Sgd::new(0.1));
    /// let mut session = Session::new(Device::Cpu, params)?;
    /// let program = session.compile(&trace, [loss])?;
    /// let summary = session.summary(&program)?;
    /// assert_eq!(summary.layers[0].name, "hidden");
    /// assert_eq!(summary.layers[0].output, "f32 [32, 16]");
    /// assert_eq!(summary.total.parameters, 8 * 16 + 16 + 16 * 3 + 3);
    /// println!("{summary}");
    /// # Ok::<(), slabwise::Error>(())
    /// ```
    ///
    /// # Errors
    /// If another session compiled the program.
    pub fn summary<const N: usize>(&self, program: &Program<N>) -> Result<Summary> {
        let inner = &*program.inner;
        self.owns(inner)?;
        let mut rows = Rows::default();
        for (layer, (dtype, dims)) in &program.layers {
            rows.of(layer).output = format!("{dtype} {}", inner.symbols.show(dims));
        }
        self.count_parameters(inner, &mut rows);
        count_operations(inner, &mut rows);
        count_kept(inner, &mut rows);
        let mut layers = rows.rows;
        // All that lies outside of layers comes last.
        if let Some(outside) = layers.iter().position(|row| row.name.is_empty()) {
            let outside = layers.remove(outside);
            layers.push(outside);
        }
        let mut total = LayerSummary::default();
        for row in &layers {
            total.parameters += row.parameters;
            total.parameter_bytes += row.parameter_bytes;
            total.forward_flops = total.forward_flops.saturating_add(row.forward_flops);
            total.backward_flops = total.backward_flops.saturating_add(row.backward_flops);
            total.kept_bytes += row.kept_bytes;
        }
        Ok(Summary {
            program: inner.name.to_string(),
            layers,
            total,
            slab_bytes: inner.plan.slab_bytes(),
            weight_bytes: inner.plan.persistent().weights,
            state_bytes: inner.plan.persistent().state,
        })
    }

    /// Adds the parameters that a program reads or writes.
    fn count_parameters(&self, inner: &Compiled, rows: &mut Rows) {
        let mut counted = vec![false; self.variables.list.len()];
        let places = inner.steps.iter().flat_map(|step| &step.places);
        for place in places {
            let Place::Variable(v) = *place else {
                continue;
            };
            let info = &self.variables.list[v].info;
            if !info.is_param || std::mem::replace(&mut counted[v], true) {
                continue;
            }
            let stored: u64 = fixed(&info.dims).iter().product();
            // A quantized weight has as many parameters as packed numbers.
            let (name, count) = match &info.part {
                None => (&info.name, stored),
                Some(part) if part.role == QuantizedRole::Numbers => {
                    (&part.weight, part.dims.iter().map(|&n| n as u64).product())
                }
                Some(part) => (&part.weight, 0),
            };
            let layer = name.rsplit_once('.').map_or("", |(layer, _)| layer);
            let row = rows.of(layer);
            row.parameters += count;
            row.parameter_bytes += stored * info.dtype.bytes() as u64;
        }
    }
}

/// The rows of a summary.
#[derive(Default)]
struct Rows {
    rows: Vec<LayerSummary>,
    at: HashMap<String, usize>,
}

impl Rows {
    /// The row of a layer.
    fn of(&mut self, layer: &str) -> &mut LayerSummary {
        let at = self.at.get(layer).copied().unwrap_or_else(|| {
            self.at.insert(layer.to_owned(), self.rows.len());
            self.rows.push(LayerSummary {
                name: layer.to_owned(),
                ..LayerSummary::default()
            });
            self.rows.len() - 1
        });
        &mut self.rows[at]
    }
}

/// Adds the arithmetic operations of each step.
fn count_operations(inner: &Compiled, rows: &mut Rows) {
    let bounds = inner.symbols.bounds();
    for step in &inner.steps {
        let Some(kernel) = step.kernel() else {
            continue;
        };
        let [product, code] = operations(kernel.spec(), &step.sizes(&bounds));
        let row = rows.of(&step.origin.layer);
        let flops = match step.origin.phase {
            Phase::Forward => &mut row.forward_flops,
            Phase::Backward | Phase::Recompute | Phase::Update => &mut row.backward_flops,
        };
        *flops = flops.saturating_add(product).saturating_add(code);
    }
}

/// Adds the bytes of values that the forward pass computes, or receives, and the backward pass
/// reads.
fn count_kept(inner: &Compiled, rows: &mut Rows) {
    let mut made = vec![false; inner.buffers.len()];
    for buffer in inner.inputs.iter().filter_map(|input| input.buffer) {
        made[buffer] = true;
    }
    let uses = |step: &Step, kept: &mut dyn FnMut(usize, bool)| {
        let Some(kernel) = step.kernel() else {
            return;
        };
        let accesses = kernel.spec().accesses();
        for (place, access) in step.places.iter().zip(accesses) {
            if let Some(buffer) = place.buffer() {
                kept(buffer, access != Access::Read);
            }
        }
    };
    let forward = |step: &&Step| step.origin.phase == Phase::Forward;
    for step in inner.steps.iter().filter(forward) {
        uses(step, &mut |buffer, writes| made[buffer] |= writes);
    }
    let mut kept = vec![false; inner.buffers.len()];
    for step in inner.steps.iter().filter(|step| !forward(step)) {
        uses(step, &mut |buffer, writes| {
            kept[buffer] |= !writes && made[buffer]
        });
    }
    for (buffer, _) in inner.buffers.iter().zip(kept).filter(|(_, kept)| *kept) {
        let layer = buffer.origin.as_ref().map_or("", |origin| &*origin.layer);
        rows.of(layer).kept_bytes += buffer.used;
    }
}

/// A number with thousands separators.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A number of operations in three digits.
fn operations_of(flops: u64) -> String {
    let units = [(1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")];
    let flops = flops as f64;
    match units.iter().find(|(unit, _)| flops >= *unit) {
        Some((unit, name)) => format!("{:.1} {name}", flops / unit),
        None => format!("{flops}"),
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let cells = |name: &str, row: &LayerSummary| {
            [
                name.to_owned(),
                row.output.clone(),
                grouped(row.parameters),
                operations_of(row.forward_flops),
                operations_of(row.backward_flops),
                Bytes(row.kept_bytes).to_string(),
            ]
            .to_vec()
        };
        let heads = [
            "layer",
            "output",
            "parameters",
            "forward flops",
            "backward flops",
            "kept",
        ];
        let mut rows = vec![heads.map(str::to_owned).to_vec()];
        for row in &self.layers {
            let name = if row.name.is_empty() {
                "(outside of layers)"
            } else {
                &row.name
            };
            rows.push(cells(name, row));
        }
        rows.push(cells("total", &self.total));
        writeln!(f, "\"{}\" by layers\n{}", self.program, table(&rows, 2))?;
        write!(
            f,
            "slab {}, weights {}, state {}; kept for the backward pass {}",
            Bytes(self.slab_bytes),
            Bytes(self.weight_bytes),
            Bytes(self.state_bytes),
            Bytes(self.total.kept_bytes)
        )
    }
}
