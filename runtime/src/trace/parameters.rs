//! Parameters and statistics of the model as tensors of the trace.

use std::panic::Location;

use super::handle::Tensor;
use super::state::State;
use super::{Line, Trace};
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
        if statistic.is_trained() {
            let message = format!(
                "\"{}\" is a parameter: an optimizer changes it",
                statistic.name()
            );
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
        let info = param.info();
        let info = if self.averaged && info.trained {
            info.average()
        } else {
            info
        };
        let state = self.declare_wide(at, param.layer(), info);
        if let Some(message) = state
            .variable()
            .and_then(|variable| self.second_declaration(param, variable))
        {
            return State::mistaken(self.fail(at, param.layer(), message));
        }
        state
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
