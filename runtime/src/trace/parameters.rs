//! Parameters and statistics of the model as tensors of the trace.

use std::panic::Location;
use std::sync::Arc;

use slabwise_kernels::dtype::DType;
use slabwise_kernels::spec::{Dims, Quantization};

use super::handle::Tensor;
use super::state::State;
use super::{Line, Trace};
use crate::graph::VariableInfo;
use crate::ops::{GraphBuilder, NodeId, Op};
use crate::params::{Param, Params};

impl Trace {
    /// The declarations of the parameters read so far.
    pub fn params(&self) -> Option<Params> {
        self.building.borrow().params.clone()
    }

    /// The value of a parameter when a step begins.
    #[track_caller]
    pub fn param(&self, param: &Param) -> Tensor<'_> {
        self.read_param(param, Location::caller())
    }

    /// A [statistic](crate::Scope::statistic) of the model as state: its value, and its
    /// replacement.
    #[track_caller]
    pub fn statistic(&self, statistic: &Param) -> State<'_> {
        let at = Location::caller();
        let why = match statistic.quantization() {
            Some(_) => Some("is a quantized parameter: no step changes it"),
            None => (statistic.is_trained()).then_some("is a parameter: an optimizer changes it"),
        };
        if let Some(why) = why {
            let message = format!("\"{}\" {why}", statistic.name());
            return State::mistaken(self.fail(at, statistic.layer(), message));
        }
        self.variable_of(statistic, at)
    }

    pub(crate) fn read_param(&self, param: &Param, at: Line) -> Tensor<'_> {
        self.variable_of(param, at).value()
    }

    fn variable_of(&self, param: &Param, at: Line) -> State<'_> {
        let foreign = {
            let mut building = self.building.borrow_mut();
            let own = building
                .params
                .get_or_insert_with(|| param.params().clone())
                .same(param.params());
            let read = || {
                building
                    .graph
                    .variables
                    .iter()
                    .find(|v| v.is_param)
                    .map_or_else(String::new, |v| format!(", as \"{}\"", v.name))
            };
            (!own).then(|| {
                format!(
                    "parameter \"{}\" belongs to other Params than those used before{}; one program reads the parameters of one Params",
                    param.name(),
                    read()
                )
            })
        };
        if let Some(message) = foreign {
            return State::mistaken(self.fail(at, param.layer(), message));
        }
        // Its declaration was reported; errors that follow from it are not reported again.
        if param.is_faulty() {
            return State::mistaken(self.poisoned());
        }
        let state = match (&param.infos()[..], param.quantization()) {
            ([info], _) if self.averaged && info.trained => {
                self.declare_wide(at, param.layer(), info.average())
            }
            ([info], _) => self.declare_wide(at, param.layer(), info.clone()),
            (parts, Some(format)) => {
                self.declare_quantized(at, param.layer(), parts, (format, param.sizes()))
            }
            // Only quantized ones have several variables.
            (_, None) => State::mistaken(self.poisoned()),
        };
        if let Some(message) = state
            .variable()
            .and_then(|variable| self.second_declaration(param, variable))
        {
            return State::mistaken(self.fail(at, param.layer(), message));
        }
        state
    }

    /// Declares the variables of a quantized parameter, and gives the first, whose value is the
    /// weight that all of them stand for.
    fn declare_quantized(
        &self,
        at: Line,
        layer: &Arc<str>,
        parts: &[VariableInfo],
        (format, dims): (Quantization, &Dims),
    ) -> State<'_> {
        let parts: Vec<State<'_>> = parts
            .iter()
            .map(|info| self.declare(at, layer, info.clone()))
            .collect();
        let stored: Vec<NodeId> = parts.iter().map(|part| part.stored().id).collect();
        let first = parts.into_iter().next();
        let first = first.unwrap_or_else(|| State::mistaken(self.poisoned()));
        if let Some(variable) = first.variable()
            && first.value().id == stored[0]
        {
            let weight = self.record_in(at, layer.clone(), |g| {
                Ok(g.emit(Op::Dequantize(format), &stored, DType::F32, dims.clone()))
            });
            if !weight.is_poisoned() {
                self.building.borrow_mut().variables[variable as usize].read = weight.id;
            }
        }
        first
    }

    /// The rows of a parameter of two axes that an index `[…]` names: `[…, width]`. Of a quantized
    /// one, only these are dequantized.
    #[track_caller]
    pub(crate) fn param_rows<'t>(&'t self, param: &Param, index: Tensor<'t>) -> Tensor<'t> {
        let at = Location::caller();
        let table = self.variable_of(param, at);
        let format = match param.quantization() {
            Some(format) if table.variable().is_some() => format,
            _ => return self.on_behalf(at, || table.value().embed(index)),
        };
        let rows: Vec<Tensor<'t>> = param
            .infos()
            .iter()
            .map(|info| {
                let part = self.declare(at, param.layer(), info.clone()).stored();
                self.on_behalf(at, || part.index_select(0, index.reshape([-1i64])))
            })
            .collect();
        let [numbers, scales, zeros] = rows[..] else {
            return self.poisoned();
        };
        let rows = self.on_behalf(at, || numbers.dequantize(format, scales, zeros));
        rows.shaped_like(index, at)
    }

    /// The mistake if this is another declaration of a parameter than those read before, when it is
    /// first read.
    fn second_declaration(&self, param: &Param, variable: u32) -> Option<String> {
        let (number, location) = param.declaration();
        let known = &mut self.building.borrow_mut().variables[variable as usize].declarations;
        if known.iter().any(|(n, ..)| *n == number) {
            return None;
        }
        let first = known
            .iter()
            .find(|(.., shared)| !shared)
            .map(|(_, line, _)| *line)
            .filter(|_| !param.is_shared());
        known.push((number, location, param.is_shared()));
        let first = first?;
        let place = |line: Line| format!("{}:{}", line.file(), line.line());
        Some(format!(
            "\"{}\" is declared at {} and again at {}: two layers have one name and would share weights; give the second another name, \
             or its place as Scope::shared() if they are to",
            param.name(),
            place(first),
            place(location)
        ))
    }
}
