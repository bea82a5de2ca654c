//! State that programs of a session share beside weights: step counters, and averages of weights.

use std::sync::Arc;

use super::Variables;
use crate::error::{Error, Result};
use crate::graph::Graph;

/// A step counter of the session.
#[derive(Clone, Debug)]
pub(super) struct SharedCounter {
    pub(super) counter: Arc<str>,
    /// The program that declared it, and the weights whose updates it counts, sorted.
    program: String,
    counts: Vec<Arc<str>>,
}

impl Variables {
    /// The counters that a program declares.
    ///
    /// # Errors
    /// If a counter counts the updates of other weights, or by another rule, in a program compiled
    /// before. Values computed from the count, such as the correction of Adam's averages, would be
    /// wrong for both.
    pub(super) fn new_counters(&self, name: &str, graph: &Graph) -> Result<Vec<SharedCounter>> {
        let mut fresh = Vec::new();
        for counter in &graph.counters {
            let of = |v: &u32| graph.variables[*v as usize].name.clone();
            let mut counts: Vec<Arc<str>> = counter.counts.iter().map(of).collect();
            counts.sort();
            let here = SharedCounter {
                counter: of(&counter.variable),
                program: name.into(),
                counts,
            };
            match self
                .counters
                .iter()
                .find(|known| known.counter == here.counter)
            {
                None => fresh.push(here),
                Some(known) if known.counts == here.counts => {}
                Some(known) => return Err(known.clash(&here)),
            }
        }
        Ok(fresh)
    }

    pub(super) fn keep_counters(&mut self, counters: Vec<SharedCounter>) {
        self.counters.extend(counters);
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
