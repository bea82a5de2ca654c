//! State that programs of a session share beside weights: step counters, learning rates, and averages
//! of weights.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::Variables;
use crate::error::{Error, Result};
use crate::graph::Graph;
use crate::ops::Op;
use crate::trace::{OWN_NAME, RATE, two_starts};

/// The state that the programs of a session share.
#[derive(Clone, Default)]
pub(super) struct Shared {
    counters: Vec<SharedCounter>,
    /// The weights that programs change, with the first such program of each.
    changed: BTreeMap<Arc<str>, String>,
    /// The weights whose averages programs read without keeping them, with the first such program of
    /// each.
    averaged: BTreeMap<Arc<str>, String>,
    /// The weights whose averages a program keeps.
    kept: BTreeSet<Arc<str>>,
}

/// A step counter of the session.
#[derive(Clone, Debug)]
struct SharedCounter {
    counter: Arc<str>,
    /// The program that declared it, and the weights whose updates it counts, sorted.
    program: String,
    counts: Vec<Arc<str>>,
}

impl Variables {
    /// The shared state of the session with one more program.
    ///
    /// # Errors
    /// If a counter counts the updates of other weights, or by another rule, in a program compiled
    /// before. Values computed from the count, such as the correction of Adam's averages, would be
    /// wrong for both. If a learning rate has another initial value in a program compiled before. If
    /// a program reads the average of a weight that changes while no program keeps the average.
    pub(super) fn sharing(&self, name: &str, graph: &Graph) -> Result<Shared> {
        let mut shared = self.shared.clone();
        for counter in &graph.counters {
            let of = |v: &u32| graph.variables[*v as usize].name.clone();
            let mut counts: Vec<Arc<str>> = counter.counts.iter().map(of).collect();
            counts.sort();
            let here = SharedCounter {
                counter: of(&counter.variable),
                program: name.into(),
                counts,
            };
            let mut others = self.shared.counters.iter();
            match others.find(|known| known.counter == here.counter) {
                None => shared.counters.push(here),
                Some(known) if known.counts == here.counts => {}
                Some(known) => return Err(known.clash(&here)),
            }
        }
        self.check_rates(name, graph)?;
        shared.add_averages(name, graph)?;
        Ok(shared)
    }

    /// Fails if a learning rate that is set between steps has another initial value in this session.
    fn check_rates(&self, name: &str, graph: &Graph) -> Result<()> {
        let is_rate = |name: &str| {
            let owner = name.strip_suffix(RATE);
            owner.is_some_and(|owner| owner.is_empty() || owner.ends_with('.'))
        };
        let mut rates = graph.variables.iter().filter(|v| is_rate(&v.name));
        let clash = rates.find_map(|new| {
            let known = &self.list[*self.by_name.get(&new.name)?].info;
            (known.init != new.init).then(|| two_starts(&new.name, known.init, new.init))
        });
        clash.map_or(Ok(()), |starts| {
            Err(Error::Value(format!(
                "{starts} in two programs of this session, the second of which is \"{name}\": {OWN_NAME}"
            )))
        })
    }
}

impl Shared {
    /// Whether a program keeps the average of this weight.
    pub(super) fn keeps_average(&self, weight: &str) -> bool {
        self.kept.contains(weight)
    }

    /// Adds the weights that a program changes, and the averages that it reads and keeps.
    ///
    /// # Errors
    /// If a program reads the average of a weight that changes, and none keeps it.
    fn add_averages(&mut self, name: &str, graph: &Graph) -> Result<()> {
        let assigned = graph.nodes.iter().filter_map(|node| match node.op {
            Op::Assign(variable) => Some(variable),
            _ => None,
        });
        let assigned: BTreeSet<u32> = assigned.collect();
        for (variable, info) in (0..).zip(&graph.variables) {
            let weight = info.average_of.as_ref().unwrap_or(&info.name).clone();
            match (&info.average_of, assigned.contains(&variable)) {
                (Some(_), true) => {
                    self.kept.insert(weight);
                }
                (Some(_), false) => {
                    self.averaged.entry(weight).or_insert(name.into());
                }
                (None, true) if info.trained => {
                    self.changed.entry(weight).or_insert(name.into());
                }
                (None, _) => {}
            }
        }
        let mut stale = self.averaged.iter().filter_map(|(weight, reader)| {
            let trainer = self.changed.get(weight)?;
            (!self.kept.contains(weight)).then_some((weight, reader, trainer))
        });
        stale.next().map_or(Ok(()), |(weight, reader, trainer)| {
            Err(Error::Value(format!(
                "\"{reader}\" reads the average of \"{weight}\", which \"{trainer}\" changes, and no program keeps this \
                 average: add ema(decay) to the optimizer of that weight; of several programs, compile the one that \
                 has it first"
            )))
        })
    }
}

impl SharedCounter {
    fn clash(&self, other: &SharedCounter) -> Error {
        let only = |a: &SharedCounter, b: &SharedCounter| {
            let found: Vec<&str> = a
                .counts
                .iter()
                .filter(|name| !b.counts.contains(name))
                .map(|name| &**name)
                .collect();
            let more = if found.len() > 3 {
                format!(" and {} more", found.len() - 3)
            } else {
                String::new()
            };
            let shown = found[..found.len().min(3)].join("\", \"");
            if found.is_empty() {
                "nothing else".to_string()
            } else {
                format!("\"{shown}\"{more}")
            }
        };
        Error::Value(format!(
            "\"{}\" and \"{}\" both count their steps in \"{}\" but do not update the same: the first also {}, the second also {}; \
             a count that both move on is wrong for either: give one optimizer a name of its own, as in Adam::new(1e-3).named(\"{}\")",
            self.program,
            other.program,
            self.counter,
            only(self, other),
            only(other, self),
            other.program
        ))
    }
}
