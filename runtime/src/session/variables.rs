//! The weights and states of a session.

use std::collections::HashMap;
use std::sync::Arc;

use half::{bf16, f16};
use slabwise_kernels::cpu::Team;
use slabwise_kernels::dtype::DType;
use slabwise_kernels::memory::{Element, Region};
use slabwise_kernels::size::{Env, Size};
use slabwise_planner::{ALIGN, Bytes};

use super::memory::Memory;
use super::shared::Shared;
use crate::backend::Backend;
use crate::compile::variable_bytes;
use crate::error::{Error, Result};
use crate::graph::{Graph, VariableInfo};
use crate::params::{Param, Params};
use crate::words;

/// A weight or state variable of a session.
pub(crate) struct Variable {
    pub info: VariableInfo,
    pub region: Region,
}

impl Variable {
    /// The lengths of its axes.
    pub fn lengths(&self) -> Vec<usize> {
        let lengths = self.info.dims.iter();
        lengths.map(|d| d.usize_at(&Env::default())).collect()
    }

    /// Its elements as f32.
    pub fn read_f32(&self, backend: &dyn Backend) -> Result<Vec<f32>> {
        let dtype = self.info.dtype;
        backend.map_read(&self.region, |memory, region| -> Vec<f32> {
            fn all<T: Element>(elements: &[T], to: impl Fn(T) -> f32) -> Vec<f32> {
                elements.iter().map(|&e| to(e)).collect()
            }
            match dtype {
                DType::F32 => memory.elements::<f32>(region).to_vec(),
                DType::F16 => all(memory.elements(region), f16::to_f32),
                DType::BF16 => all(memory.elements(region), bf16::to_f32),
                DType::I32 => all(memory.elements(region), |i: i32| i as f32),
                DType::U8 | DType::Bool => all(memory.bytes(region), f32::from),
            }
        })
    }

    /// Replaces its elements by numbers, rounded to its type if that is one of floats; integers
    /// hold them as they are.
    pub fn write_f32<I: Iterator<Item = f32>>(
        &self,
        backend: &mut dyn Backend,
        numbers: impl Fn() -> I,
    ) -> Result<()> {
        let dtype = self.info.dtype;
        backend.map_write(&self.region, &mut |memory, region| {
            fn all<T>(elements: &mut [T], numbers: impl Iterator<Item = T>) {
                elements.iter_mut().zip(numbers).for_each(|(e, n)| *e = n);
            }
            let numbers = numbers();
            match dtype {
                DType::F32 => all(memory.elements_mut(region), numbers),
                DType::F16 => all(memory.elements_mut(region), numbers.map(f16::from_f32)),
                DType::BF16 => all(memory.elements_mut(region), numbers.map(bf16::from_f32)),
                DType::I32 => all(memory.elements_mut(region), numbers.map(|n| n as i32)),
                DType::U8 => all(memory.bytes_mut(region), numbers.map(|n| n as u8)),
                DType::Bool => all(
                    memory.bytes_mut(region),
                    numbers.map(|n| u8::from(n != 0.0)),
                ),
            }
        })
    }
}

/// The epoch with the best validation of a [`Fit`](crate::Fit), which is saved with the weights.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct BestEpoch {
    pub number: u32,
    pub validation: f64,
}

impl BestEpoch {
    /// The number and the validation, as a file has them.
    pub fn to_text(self) -> String {
        format!("{} {}", self.number, self.validation)
    }

    pub fn of_text(text: &str) -> Option<Self> {
        let (number, validation) = text.split_once(' ')?;
        Some(BestEpoch {
            number: number.parse().ok()?,
            validation: validation.parse().ok()?,
        })
    }
}

/// The variables of a session: the weights that its models declare and the state of its programs.
pub(crate) struct Variables {
    /// The declarations of the session's models.
    pub params: Params,
    /// Those that have memory, in the order in which they got it.
    pub list: Vec<Variable>,
    pub by_name: HashMap<Arc<str>, usize>,
    /// The state beside weights that its programs share.
    pub(super) shared: Shared,
    /// The best epoch of its training.
    pub best_epoch: Option<BestEpoch>,
}

impl Variables {
    pub fn new(params: Params) -> Self {
        Variables {
            params,
            list: Vec::new(),
            by_name: HashMap::new(),
            shared: Shared::default(),
            best_epoch: None,
        }
    }

    /// Bytes of weights and state, each rounded up to its alignment.
    pub fn bytes(&self) -> u64 {
        self.list
            .iter()
            .map(|v| v.region.bytes.next_multiple_of(ALIGN))
            .sum()
    }

    /// Names of all weights and state.
    pub fn names(&self) -> impl Iterator<Item = &str> + Clone {
        self.list
            .iter()
            .filter(|v| !v.info.is_constant())
            .map(|v| &*v.info.name)
    }

    /// The variable of a name.
    pub fn find(&self, name: &str) -> Result<&Variable> {
        self.by_name.get(name).map(|&at| &self.list[at]).ok_or_else(|| {
            let declared = self.params.declared();
            let known = declared.iter().find(|declared| declared.name() == name);
            if known.is_some_and(|declared| declared.quantization().is_some()) {
                return Error::Value(format!(
                    "\"{name}\" is quantized: its parts are \"{name}.numbers\", \"{name}.scales\" and \"{name}.zeros\""
                ));
            }
            if known.is_some() {
                return Error::Value(format!(
                    "\"{name}\" is declared but has no value yet: compile a program first, or load a file with Session::load"
                ));
            }
            if declared.is_empty() && self.names().next().is_none() {
                return Error::Value(format!(
                    "there is no weight or state \"{name}\": the session has none before a program is compiled or a file is loaded"
                ));
            }
            let more = declared.iter().map(|p| p.name());
            let more = more.filter(|&name| !self.by_name.contains_key(name));
            let instead = words::instead(name, "weights and states", self.names().chain(more));
            Error::Value(format!("there is no weight or state \"{name}\"{instead}"))
        })
    }

    /// The variables of a graph that this session does not have yet, and the bytes of each.
    fn fresh(&self, graph: &Graph) -> Result<Vec<(VariableInfo, u64)>> {
        let declared = self.params.declared();
        let declared = declared.iter().flat_map(Param::infos);
        let all: Vec<VariableInfo> = declared.chain(graph.variables.iter().cloned()).collect();
        let mut fresh: Vec<VariableInfo> = Vec::new();
        let mut by_name: HashMap<Arc<str>, usize> = HashMap::new();
        for info in all {
            let here = self.by_name.get(&info.name);
            let known = here
                .map(|&at| &self.list[at].info)
                .or_else(|| by_name.get(&info.name).map(|&at| &fresh[at]));
            let kind = |info: &VariableInfo| match info.is_param {
                true => "parameter",
                false => "state",
            };
            match known {
                Some(known) if known.is_param != info.is_param => {
                    return Err(Error::Value(format!(
                        "\"{}\" is a {} in this session and a {} in this program; give one of them another name",
                        info.name,
                        kind(known),
                        kind(&info)
                    )));
                }
                Some(known) if (known.dtype, &known.dims) == (info.dtype, &info.dims) => {}
                Some(known) => {
                    let (a, b) = (
                        graph.symbols.show(&known.dims),
                        graph.symbols.show(&info.dims),
                    );
                    return Err(Error::Value(format!(
                        "\"{}\" is {} {a} in this session and {} {b} in this program; give one of them another name",
                        info.name, known.dtype, info.dtype
                    )));
                }
                None => {
                    by_name.insert(info.name.clone(), fresh.len());
                    fresh.push(info);
                }
            }
        }
        let sized = fresh
            .into_iter()
            .map(|info| variable_bytes(graph, &info).map(|bytes| (info, bytes)));
        sized.collect()
    }

    /// Bytes of weights and state once a program of this graph is added, each rounded up to its
    /// alignment, if they are within the budget.
    pub fn bytes_with(&self, graph: &Graph, budget: Option<Bytes>) -> Result<u64> {
        let more = self.room_for(&self.fresh(graph)?, budget)?;
        Ok(self.bytes().saturating_add(more))
    }

    /// The indices of a graph's variables in this session; new ones are allocated and initialised.
    pub fn adopt(&mut self, graph: &Graph, memory: &mut Memory, team: &Team) -> Result<Vec<usize>> {
        let first = self.allocate(graph, memory)?;
        self.initialise(first, |_| false, memory, team)?;
        Ok(graph
            .variables
            .iter()
            .map(|v| self.by_name[&v.name])
            .collect())
    }

    /// Allocates the variables of a graph that this session does not have yet. They are those from
    /// the index that this gives on, and have no values before [`Variables::initialise`].
    pub fn allocate(&mut self, graph: &Graph, memory: &mut Memory) -> Result<usize> {
        let sized = self.fresh(graph)?;
        let total = self.room_for(&sized, memory.budget.bytes())?;
        let first = self.list.len();
        if !sized.is_empty() {
            let arena = memory.reserve(total, "weights and state")?;
            let mut at = 0;
            for (info, bytes) in sized {
                let region = arena.part(at, bytes);
                at += bytes.next_multiple_of(ALIGN);
                self.by_name.insert(info.name.clone(), self.list.len());
                self.list.push(Variable { info, region });
            }
        }
        Ok(first)
    }

    /// Gives variables from `first` on their initial values, or those of their weights to averages,
    /// except for the ones that have values already. If that fails, the session does not have the
    /// variables.
    pub fn initialise(
        &mut self,
        first: usize,
        has_value: impl Fn(usize) -> bool,
        memory: &mut Memory,
        team: &Team,
    ) -> Result<()> {
        let seed = self.params.seed();
        let mut without = (first..self.list.len()).filter(|&at| !has_value(at));
        let mut last = None;
        let filled = without.try_for_each(|at| {
            let Variable { info, region } = &self.list[at];
            memory.backend.map_write(region, &mut |memory, region| {
                crate::init::fill(info, seed, memory, region, team, &mut last)
            })
        });
        let all = first..self.list.len();
        let done = filled.and_then(|()| self.restart(all, &mut *memory.backend));
        if done.is_err() {
            self.forget(first, &mut *memory.backend);
        }
        done
    }

    /// Removes the variables from `first` on, and releases their memory.
    pub fn forget(&mut self, first: usize, backend: &mut dyn Backend) {
        let mut arenas: Vec<u32> = self.list.drain(first..).map(|v| v.region.arena).collect();
        arenas.dedup();
        for arena in arenas {
            backend.release(arena);
        }
        self.by_name.retain(|_, at| *at < first);
    }

    /// The bytes of new variables, each rounded up to its alignment, if they are within the budget.
    fn room_for(&self, fresh: &[(VariableInfo, u64)], budget: Option<Bytes>) -> Result<u64> {
        let total = fresh.iter().try_fold(0u64, |n, (_, b)| {
            n.checked_add(b.checked_next_multiple_of(ALIGN)?)
        });
        let total = total.ok_or_else(|| {
            Error::Value("the byte count of all weights and state overflows".into())
        })?;
        let needed = Bytes(self.bytes().saturating_add(total));
        if let Some(budget) = budget
            && needed > budget
        {
            return Err(Error::Budget {
                program: "weights and state".into(),
                budget,
                needed,
                persistent: needed,
                slab: Bytes(0),
                floor: needed,
                holders: "weights and state alone".into(),
            });
        }
        Ok(total)
    }

    /// Restarts what belongs to weights that have been read, unless it has been read too: averages
    /// become the weights, rounding errors zeros.
    pub fn restart_beside(&self, is_read: &[bool], backend: &mut dyn Backend) -> Result<()> {
        let is_new = |weight: &str| self.by_name.get(weight).is_some_and(|&at| is_read[at]);
        let stale = |&at: &usize| {
            let weight = self.list[at].info.average_of.as_ref();
            !is_read[at] && weight.is_some_and(|weight| is_new(weight))
        };
        self.restart((0..self.list.len()).filter(stale), backend)?;
        self.end_remainders(|at, weight| !is_read[at] && is_new(weight), backend)
    }

    /// Restarts what belongs to some weights that have been set: averages that no program keeps
    /// become the weights, rounding errors zeros.
    pub fn restart_idle(&self, of: impl Fn(&str) -> bool, backend: &mut dyn Backend) -> Result<()> {
        let is_idle = |&at: &usize| {
            let weight = self.list[at].info.average_of.as_ref();
            weight.is_some_and(|weight| of(weight) && !self.shared.keeps_average(weight))
        };
        self.restart((0..self.list.len()).filter(is_idle), backend)?;
        self.end_remainders(|_, weight| of(weight), backend)
    }

    /// Zeroes the rounding errors of which `ends` is true, given their index and their weight.
    fn end_remainders(
        &self,
        ends: impl Fn(usize, &str) -> bool,
        backend: &mut dyn Backend,
    ) -> Result<()> {
        for (at, Variable { info, region }) in self.list.iter().enumerate() {
            let weight = info.remainder_of.as_ref();
            if weight.is_some_and(|weight| ends(at, weight)) {
                backend.fill(region, 0)?;
            }
        }
        Ok(())
    }

    /// Sets the averages among these variables to their weights' values.
    fn restart(
        &self,
        averages: impl Iterator<Item = usize>,
        backend: &mut dyn Backend,
    ) -> Result<()> {
        for at in averages {
            let Some(of) = &self.list[at].info.average_of else {
                continue;
            };
            if let Some(&weight) = self.by_name.get(of) {
                let (weight, average) = (&self.list[weight], &self.list[at]);
                if weight.info.dtype == average.info.dtype {
                    backend.copy(&weight.region, &average.region)?;
                } else {
                    let values = weight.read_f32(backend)?;
                    average.write_f32(backend, || values.iter().copied())?;
                }
            }
        }
        Ok(())
    }
}

/// The lengths of a variable, all of which are fixed.
pub(crate) fn fixed(dims: &[Size]) -> Vec<u64> {
    dims.iter()
        .map(|d| {
            d.as_fixed()
                .and_then(|n| u64::try_from(n).ok())
                .unwrap_or(0)
        })
        .collect()
}
